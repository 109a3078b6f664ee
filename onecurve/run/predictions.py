"""Predictions of the last evaluation, as the log and the plots show them."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from onecurve.distributed.channel import Poll

if TYPE_CHECKING:  # imported where they are needed
    from onecurve.run.evaluation import Mistake, Predicted


class Predictions:
    """The newest evaluation's predictions: keep() holds them, accept() takes them when metrics are logged.

    With an EMA two evaluations precede a log line; the last one, of the averaged weights, counts.
    """

    def __init__(self, classes: tuple[str, ...]) -> None:
        self.classes = classes
        self.kept: tuple[Tensor | list[Mistake] | None, list[Predicted]] = (None, [])
        self.what = ""  # what was evaluated, for a title
        # int64 [classes, classes], a row per true class; of many classes the most frequent mistakes
        self.confusion: Tensor | list[Mistake] | None = None
        self.examples: list[Predicted] = []  # this process's; after gather() all processes'

    def keep(self, confusion: "Tensor | list[Mistake]", examples: "list[Predicted]") -> None:
        self.kept = (confusion, examples)

    def accept(self, what: str) -> None:
        self.what = what
        self.confusion, self.examples = self.kept

    def gather(self, poll: Poll) -> None:
        """Gathers all processes' examples on the CPU of each. Collective."""
        everyones = poll.gather([part.to("cpu") for part in self.examples])
        self.examples = [part for parts in everyones for part in parts]

    def as_json(self) -> dict[str, Any]:
        """Return `classes` with `confusion`, or of many classes with `mistakes`; empty without classes."""
        if self.confusion is None:
            return {}
        if isinstance(self.confusion, Tensor):
            return {"classes": self.classes, "confusion": self.confusion.tolist()}
        return {"classes": self.classes, "mistakes": self.confusion}

    def draw(self, folder: Path) -> list[Path]:
        """Write confusion.png and predictions.png, and return them. Nothing is drawn without classes, or
        without an evaluation in this process."""
        if self.confusion is None:
            return []
        from onecurve.run import plots

        classes, files = self.classes, [folder / "confusion.png", folder / "predictions.png"]
        plots.confusion(files[0], self.as_json(), self.what)
        names = ("pixels", "labels", "logits")
        pixels, labels, logits = (torch.cat([getattr(p, name) for p in self.examples]) for name in names)
        probabilities, predicted = logits.softmax(1).max(1)
        captions = [
            plots.prediction_caption(classes[label], classes[guess], float(probability))
            for label, guess, probability in zip(labels, predicted, probabilities, strict=True)
        ]
        title = f"{self.what}: the true class, another predicted one, and the prediction's probability"
        plots.image_sheet(files[1], pixels.numpy(), captions, title, (labels != predicted).tolist())
        return files
