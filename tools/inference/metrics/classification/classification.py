"""Accuracy, confusion matrix, and per-class precision, recall, F1, specificity and support."""

import datasets
import evaluate
import numpy as np

MATRIX_CLASSES = 1000  # class limit for a confusion matrix, the same as in onecurve/run/evaluation.py
INPUTS = """
Args:
    predictions: Most probable class of each image, int [n].
    references: True class of each image, int [n].
    classes: Number of classes.
Returns:
    accuracy: Fraction of images whose most probable class is the true class.
    confusion: Confusion matrix with one row per true class, int [classes][classes]. Present for up to
        MATRIX_CLASSES classes.
    precision, recall, f1: Lists with one number per class.
    specificity: For each class, the fraction of the images of other classes that are not predicted as this
        class.
    support: Number of images of each class.
A fraction with denominator 0 is 0, like with zero_division=0 in scikit-learn.
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
        correct = references[references == predictions]
        class_ids = (correct, references, predictions)
        hits, support, predicted = (np.bincount(ids, minlength=classes) for ids in class_ids)
        negatives = len(references) - support
        per_class = {
            "precision": _divide(hits, predicted),
            "recall": _divide(hits, support),
            "f1": _divide(2 * hits, support + predicted),
            "specificity": _divide(negatives - (predicted - hits), negatives),
            "support": support,
        }
        metrics_by_class = {name: values.tolist() for name, values in per_class.items()}
        accuracy = {"accuracy": float(hits.sum() / len(references))}
        if classes > MATRIX_CLASSES:
            return accuracy | metrics_by_class
        cells = np.bincount(references * classes + predictions, minlength=classes**2)
        return accuracy | {"confusion": cells.reshape(classes, classes).tolist()} | metrics_by_class


def _divide(part: np.ndarray, whole: np.ndarray) -> np.ndarray:
    return np.divide(part, whole, out=np.zeros(len(part)), where=whole > 0)
