"""Stores the last evaluation's predictions for the log and the plots."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from onecurve.distributed.channel import GlooExchange

if TYPE_CHECKING:  # Imported lazily at runtime
    from onecurve.run.evaluation import Mistake, PredictedBatch


class Predictions:
    """Predictions of the newest evaluation.

    keep_evaluation() stores the predictions of an evaluation until accept_kept() is called, when the metrics
    are logged. With an EMA, two evaluations precede a log line, and accept_kept() uses the second one, which
    evaluates the averaged weights.
    """

    def __init__(self, classes: tuple[str, ...]) -> None:
        self.classes = classes
        # Arguments of the last keep_evaluation()
        self.kept_confusion: Tensor | list[Mistake] | None = None
        self.kept_examples: list[PredictedBatch] = []
        self.plot_subject = ""  # Description of the evaluated weights in plot titles
        # Confusion matrix, int64 [classes, classes], with a row per true class. With many classes, the most
        # frequent mistakes replace the matrix
        self.confusion: Tensor | list[Mistake] | None = None
        # Examples from this process or, after gather_examples(), from all processes
        self.examples: list[PredictedBatch] = []

    def keep_evaluation(self, confusion: "Tensor | list[Mistake]", examples: "list[PredictedBatch]") -> None:
        """Store the predictions of an evaluation until accept_kept() is called.

        `confusion` is a confusion matrix, int64 [classes, classes], or the most frequent mistakes for a model
        with too many classes. `examples` are this process's sample predictions.
        """
        self.kept_confusion, self.kept_examples = confusion, examples

    def accept_kept(self, plot_subject: str) -> None:
        """Use the predictions from the last keep_evaluation() for the log and the plots.

        `plot_subject` describes the evaluated weights in plot titles.
        """
        self.plot_subject = plot_subject
        self.confusion, self.examples = self.kept_confusion, self.kept_examples

    def gather_examples(self, poll: GlooExchange) -> None:
        """Gather the examples from all processes into CPU memory. All ranks must call this method."""
        examples_by_rank = poll.gather([batch.to("cpu") for batch in self.examples])
        self.examples = [batch for rank_examples in examples_by_rank for batch in rank_examples]

    def confusion_entries(self) -> dict[str, Any]:
        """Return the entries of confusion.json, or {} for a model without classes."""
        if self.confusion is None:
            return {}
        if isinstance(self.confusion, Tensor):
            return {"classes": self.classes, "confusion": self.confusion.tolist()}
        return {"classes": self.classes, "mistakes": self.confusion}

    def draw_plots(self, folder: Path) -> list[Path]:
        """Draw confusion.png and predictions.png in the folder, and return their paths.

        The list of paths is empty for a model without classes, or if this process has not run an evaluation.
        """
        if self.confusion is None:
            return []
        from onecurve.run import plots

        confusion_plot, examples_plot = folder / "confusion.png", folder / "predictions.png"
        plots.draw_confusion(confusion_plot, self.confusion_entries(), self.plot_subject)
        pixels = torch.cat([batch.pixels for batch in self.examples])
        true_classes = torch.cat([batch.labels for batch in self.examples])
        logits = torch.cat([batch.logits for batch in self.examples])
        probabilities, predicted_classes = logits.softmax(1).max(1)
        predictions = zip(true_classes, predicted_classes, probabilities, strict=True)
        captions = [
            plots.prediction_caption(self.classes[true_class], self.classes[predicted], float(probability))
            for true_class, predicted, probability in predictions
        ]
        sheet_title = (
            f"{self.plot_subject}: true class, predicted class (if different), probability of the prediction"
        )
        is_prediction_wrong = (true_classes != predicted_classes).tolist()
        plots.draw_image_sheet(examples_plot, pixels.numpy(), captions, sheet_title, is_prediction_wrong)
        return [confusion_plot, examples_plot]
