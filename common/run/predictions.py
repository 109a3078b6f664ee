"""The confusion matrix and the sample predictions of the last evaluation, for plots/."""

from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from common.distributed.preemption import Poll

if TYPE_CHECKING:  # train_hello.py has no images, and starts faster without these imports
    from common.evaluation import Predicted


class Predictions:
    """The newest evaluation's predictions: keep() holds them, accept() takes them when metrics are logged.

    With an EMA two evaluations precede a log line; the last one, of the averaged weights, counts.
    """

    def __init__(self) -> None:
        self.classes: tuple[str, ...] = ()
        self.kept: tuple[Tensor | None, list[Predicted]] = (None, [])
        self.what = ""  # what was evaluated, for a title
        self.confusion: Tensor | None = None  # int64 [classes, classes], a row per true class
        self.examples: list[Predicted] = []  # this process's; after gather() all processes'

    def keep(self, confusion: Tensor | None, examples: "list[Predicted]") -> None:
        self.kept = (confusion, examples)

    def accept(self, what: str) -> None:
        self.what = what
        self.confusion, self.examples = self.kept

    def gather(self, poll: Poll) -> None:
        """Gathers all processes' examples on the CPU of each. Collective."""
        self.examples = [
            part for parts in poll.gather([part.to("cpu") for part in self.examples]) for part in parts
        ]

    def draw(self, folder: Path) -> list[Path]:
        """Writes confusion.png and predictions.png, and returns them; none without a confusion matrix: with
        too many classes or none, or without an evaluation in this process."""
        if self.confusion is None:
            return []
        from common.run import plots

        classes, files = self.classes, [folder / "confusion.png", folder / "predictions.png"]
        plots.confusion_matrix(files[0], self.confusion.tolist(), classes, self.what)
        pixels, labels, logits = (
            torch.cat([getattr(part, name) for part in self.examples])
            for name in ("pixels", "labels", "logits")
        )
        probabilities, predicted = logits.softmax(1).max(1)
        captions = [
            f"{classes[label]}\n{classes[guess]}\n{probability:.2f}"
            for label, guess, probability in zip(labels, predicted, probabilities, strict=True)
        ]
        title = f"{self.what}: the true class, the predicted one and its probability"
        plots.image_sheet(files[1], pixels.numpy(), captions, title, (labels != predicted).tolist())
        return files
