"""Stores the predictions of the last evaluation for the log and the plots."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from onecurve.distributed.channel import Poll

if TYPE_CHECKING:  # at runtime, imported lazily
    from onecurve.run.evaluation import Mistake, Predicted


class Predictions:
    """Predictions of the newest evaluation.

    keep() holds an evaluation's predictions until accept() is called, when the metrics are logged. With an
    EMA, two evaluations precede a log line. The predictions of the second evaluation, with the averaged
    weights, are used.
    """

    def __init__(self, classes: tuple[str, ...]) -> None:
        self.classes = classes
        self.kept: tuple[Tensor | list[Mistake] | None, list[Predicted]] = (None, [])
        self.subject = ""  # description of the evaluated weights, for titles
        # int64 [classes, classes] with a row per true class, or the most frequent mistakes for many classes
        self.confusion: Tensor | list[Mistake] | None = None
        self.examples: list[Predicted] = []  # examples of this process; after gather(), of all processes

    def keep(self, confusion: "Tensor | list[Mistake]", examples: "list[Predicted]") -> None:
        """Hold an evaluation's predictions until accept() is called."""
        self.kept = (confusion, examples)

    def accept(self, subject: str) -> None:
        """Use the held predictions. `subject`: description of the evaluated weights, for titles."""
        self.subject = subject
        self.confusion, self.examples = self.kept

    def gather(self, poll: Poll) -> None:
        """Gather the examples from all processes in CPU memory. Collective."""
        examples_by_rank = poll.gather([part.to("cpu") for part in self.examples])
        self.examples = [part for parts in examples_by_rank for part in parts]

    def as_json(self) -> dict[str, Any]:
        """Return `classes` with `confusion` (or `mistakes` for many classes), or {} without classes."""
        if self.confusion is None:
            return {}
        if isinstance(self.confusion, Tensor):
            return {"classes": self.classes, "confusion": self.confusion.tolist()}
        return {"classes": self.classes, "mistakes": self.confusion}

    def draw(self, folder: Path) -> list[Path]:
        """Draw confusion.png and predictions.png, and return their paths.

        Nothing is drawn for a model without classes, or if this process has run no evaluation.
        """
        if self.confusion is None:
            return []
        from onecurve.run import plots

        classes, files = self.classes, [folder / "confusion.png", folder / "predictions.png"]
        plots.confusion(files[0], self.as_json(), self.subject)
        names = ("pixels", "labels", "logits")
        pixels, labels, logits = (torch.cat([getattr(p, name) for p in self.examples]) for name in names)
        probabilities, predicted = logits.softmax(1).max(1)
        captions = [
            plots.prediction_caption(classes[label], classes[guess], float(probability))
            for label, guess, probability in zip(labels, predicted, probabilities, strict=True)
        ]
        title = f"{self.subject}: true class, predicted class if different, probability of the prediction"
        plots.image_sheet(files[1], pixels.numpy(), captions, title, (labels != predicted).tolist())
        return files
