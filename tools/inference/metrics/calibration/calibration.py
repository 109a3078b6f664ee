"""Expected calibration error, which is the mean gap between predicted probability and accuracy."""

import datasets
import evaluate
import numpy as np

INPUTS = """
Args:
    predictions: Most probable class of each sample, int [n].
    references: True class of each sample, int [n].
    probabilities: Probability of each predicted class, float [n].
    bins: Number of bins of equal width. Each bin excludes its lower edge and includes its upper edge.
Returns:
    expected_calibration_error: Mean over all samples of |accuracy - mean probability| in the sample's bin.
"""
SOURCE = """@inproceedings{guo2017calibration, title={On Calibration of Modern Neural Networks},
author={Guo, Chuan and Pleiss, Geoff and Sun, Yu and Weinberger, Kilian Q.}, booktitle={ICML}, year={2017},
note={arXiv 1706.04599, equation 3}}"""


class Calibration(evaluate.Metric):
    def _info(self) -> evaluate.MetricInfo:
        whole, real = datasets.Value("int64"), datasets.Value("float64")
        return evaluate.MetricInfo(
            description=__doc__,
            citation=SOURCE,
            inputs_description=INPUTS,
            features=datasets.Features({"predictions": whole, "references": whole, "probabilities": real}),
        )

    def _compute(
        self, predictions: list[int], references: list[int], probabilities: list[float], bins: int = 15
    ) -> dict[str, float]:
        hits, probabilities = np.equal(predictions, references), np.asarray(probabilities)
        edges = np.linspace(0, 1, bins + 1)[1:-1]
        bin_of = np.digitize(probabilities, edges, right=True)
        # In each bin, |sum of hits - sum of probabilities| is |accuracy - mean probability| times the number
        # of samples.
        gaps = np.bincount(bin_of, hits - probabilities, minlength=bins)
        return {"expected_calibration_error": float(np.abs(gaps).sum() / len(references))}
