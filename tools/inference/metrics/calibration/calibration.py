"""Expected calibration error: how far the probability of a prediction is from how often it is right."""

import datasets
import evaluate
import numpy as np

INPUTS = """
    predictions: the class that is most probable, int [n]
    references: the true class, int [n]
    probabilities: of the predicted class, float [n]
    bins: of equal width, open below and closed above
Returns expected_calibration_error: the mean over the samples of |accuracy - mean probability| of their bin.
"""
SOURCE = """@inproceedings{guo2017calibration, title={On Calibration of Modern Neural Networks},
author={Guo, Chuan and Pleiss, Geoff and Sun, Yu and Weinberger, Kilian Q.}, booktitle={ICML}, year={2017},
note={arXiv 1706.04599, equation 3}}"""


class Calibration(evaluate.Metric):
    def _info(self) -> evaluate.MetricInfo:
        whole = datasets.Value("int64")
        return evaluate.MetricInfo(
            description=__doc__,
            citation=SOURCE,
            inputs_description=INPUTS,
            features=datasets.Features(
                {"predictions": whole, "references": whole, "probabilities": datasets.Value("float64")}
            ),
        )

    def _compute(
        self, predictions: list[int], references: list[int], probabilities: list[float], bins: int = 15
    ) -> dict[str, float]:
        hits, probabilities = np.equal(predictions, references), np.asarray(probabilities)
        edges = np.linspace(0, 1, bins + 1)[1:-1]
        bin_of = np.digitize(probabilities, edges, right=True)
        # |sum of hits - sum of probabilities| of a bin is its |accuracy - mean probability| times its samples
        gaps = np.bincount(bin_of, hits - probabilities, minlength=bins)
        return {"expected_calibration_error": float(np.abs(gaps).sum() / len(references))}
