"""Accuracy, confusion matrix, and per-class precision, recall, F1, specificity and support."""

import datasets
import evaluate
import numpy as np

MAX_MATRIX_CLASSES = 1000  # class limit for a confusion matrix, the same as in onecurve/run/evaluation.py
INPUTS = """
Args:
    predictions: Most probable class of each image, int [n].
    references: True class of each image, int [n].
    class_count: Number of classes.
Returns:
    accuracy: Fraction of images whose most probable class is the true class.
    confusion: Confusion matrix with one row per true class, int [class_count][class_count]. Present for up to
        MAX_MATRIX_CLASSES classes.
    precision, recall, f1: Lists with one number per class.
    specificity: For each class, the fraction of the images of other classes that are not predicted as this
        class.
    support: Number of images of each class.
A fraction with denominator 0 is 0, like with zero_division=0 in scikit-learn.
"""


class Classification(evaluate.Metric):
    def _info(self) -> evaluate.MetricInfo:
        class_index = datasets.Value("int64")
        return evaluate.MetricInfo(
            description=__doc__,
            citation="",
            inputs_description=INPUTS,
            features=datasets.Features({"predictions": class_index, "references": class_index}),
        )

    def _compute(self, predictions: list[int], references: list[int], class_count: int) -> dict:
        predictions, references = np.asarray(predictions), np.asarray(references)
        correct_labels = references[references == predictions]
        labels_to_count = (correct_labels, references, predictions)
        # Per class: number of correct predictions, number of images, and number of predictions
        hits, support, predicted = (np.bincount(labels, minlength=class_count) for labels in labels_to_count)
        negatives = len(references) - support
        false_positives = predicted - hits
        per_class = {
            "precision": _divide(hits, predicted),
            "recall": _divide(hits, support),
            "f1": _divide(2 * hits, support + predicted),
            "specificity": _divide(negatives - false_positives, negatives),
            "support": support,
        }
        metrics_by_class = {metric: values.tolist() for metric, values in per_class.items()}
        accuracy = {"accuracy": float(hits.sum() / len(references))}
        if class_count > MAX_MATRIX_CLASSES:
            return accuracy | metrics_by_class
        flat_cells = references * class_count + predictions  # row * number of columns + column
        cell_counts = np.bincount(flat_cells, minlength=class_count**2)
        confusion = cell_counts.reshape(class_count, class_count).tolist()
        return accuracy | {"confusion": confusion} | metrics_by_class


def _divide(numerators: np.ndarray, denominators: np.ndarray) -> np.ndarray:
    """Divide elementwise. A quotient with denominator 0 is 0."""
    zeros = np.zeros(len(numerators))
    return np.divide(numerators, denominators, out=zeros, where=denominators > 0)
