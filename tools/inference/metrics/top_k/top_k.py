"""Top-k accuracy: the share of the samples whose true class is among the k most probable."""

import datasets
import evaluate
import numpy as np

INPUTS = """
    predictions: the k most probable classes, int [n][k]
    references: the true class, int [n]
Returns top_k.
"""


class TopK(evaluate.Metric):
    def _info(self) -> evaluate.MetricInfo:
        whole = datasets.Value("int64")
        return evaluate.MetricInfo(
            description=__doc__,
            citation="",
            inputs_description=INPUTS,
            features=datasets.Features({"predictions": datasets.List(whole), "references": whole}),
        )

    def _compute(self, predictions: list[list[int]], references: list[int]) -> dict[str, float]:
        hits = np.asarray(predictions) == np.asarray(references)[:, None]  # [n, k]
        return {"top_k": float(hits.any(1).mean())}
