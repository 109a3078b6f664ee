"""Top-k accuracy, which is the fraction of samples whose true class is among the k most probable classes."""

import datasets
import evaluate
import numpy as np

INPUTS = """
Args:
    predictions: The k most probable classes of each sample, int [n][k].
    references: True class of each sample, int [n].
Returns:
    top_k: Fraction of samples whose true class is among the k most probable classes.
"""


class TopK(evaluate.Metric):
    def _info(self) -> evaluate.MetricInfo:
        class_index = datasets.Value("int64")
        top_classes = datasets.List(class_index)
        return evaluate.MetricInfo(
            description=__doc__,
            citation="",
            inputs_description=INPUTS,
            features=datasets.Features({"predictions": top_classes, "references": class_index}),
        )

    def _compute(self, predictions: list[list[int]], references: list[int]) -> dict[str, float]:
        is_hit = np.asarray(predictions) == np.asarray(references)[:, None]  # [n, k]
        return {"top_k": float(is_hit.any(1).mean())}
