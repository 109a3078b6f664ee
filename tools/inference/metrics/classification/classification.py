"""Accuracy, the confusion matrix, and of each class precision, recall, F1, specificity and support."""

import datasets
import evaluate
import numpy as np

MATRIX_CLASSES = 1000  # the most with a confusion matrix, as in onecurve/run/evaluation.py
INPUTS = """
    predictions: the class that is most probable, int [n]
    references: the true class, int [n]
    classes: how many there are
Returns accuracy, confusion ([classes][classes], a row per true class, for up to MATRIX_CLASSES), and lists
with one number per class: precision, recall, f1, specificity (of the images of other classes, the share that
is not taken for this one) and support (images of the class). Where a share is of nothing it is 0, as
scikit-learn's zero_division=0.
"""


class Classification(evaluate.Metric):
    def _info(self) -> evaluate.MetricInfo:
        whole = datasets.Value("int64")
        return evaluate.MetricInfo(
            description=__doc__,
            citation="",
            inputs_description=INPUTS,
            features=datasets.Features({"predictions": whole, "references": whole}),
        )

    def _compute(self, predictions: list[int], references: list[int], classes: int) -> dict:
        predictions, references = np.asarray(predictions), np.asarray(references)
        right = references[references == predictions]
        hits, support, predicted = (
            np.bincount(c, minlength=classes) for c in (right, references, predictions)
        )
        others = len(references) - support
        per_class = {
            "precision": _share(hits, predicted),
            "recall": _share(hits, support),
            "f1": _share(2 * hits, support + predicted),
            "specificity": _share(others - (predicted - hits), others),
            "support": support,
        }
        numbers = {name: values.tolist() for name, values in per_class.items()}
        accuracy = {"accuracy": float(hits.sum() / len(references))}
        if classes > MATRIX_CLASSES:
            return accuracy | numbers
        cells = np.bincount(references * classes + predictions, minlength=classes**2)
        return accuracy | {"confusion": cells.reshape(classes, classes).tolist()} | numbers


def _share(part: np.ndarray, whole: np.ndarray) -> np.ndarray:
    return np.divide(part, whole, out=np.zeros(len(part)), where=whole > 0)
