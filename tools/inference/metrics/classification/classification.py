"""Accuracy, confusion matrix, and precision, recall, F1, specificity and support of each class."""

import datasets
import evaluate
import numpy as np

MATRIX_CLASSES = 1000  # largest number of classes with a confusion matrix, as in onecurve/run/evaluation.py
INPUTS = """
    predictions: most probable class of each image, int [n]
    references: true class of each image, int [n]
    classes: number of classes
Returns accuracy, confusion ([classes][classes], one row per true class, for up to MATRIX_CLASSES), and lists
with one number per class: precision, recall, f1, specificity (share of the other classes' images that are not
predicted as this class) and support (images of the class). A share with denominator 0 is 0, as with
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
