"""Expected calibration error, which is the mean gap between predicted probability and accuracy."""

import datasets
import evaluate
import numpy as np

INPUTS = """
Args:
    predictions: Most probable class of each sample, int [n].
    references: True class of each sample, int [n].
    probabilities: Probability of each predicted class, float [n].
    bin_count: Number of bins of equal width. Each bin excludes its lower edge and includes its upper edge.
Returns:
    expected_calibration_error: Mean over all samples of |accuracy - mean probability| in the sample's bin.
"""
CITATION = """@inproceedings{guo2017calibration, title={On Calibration of Modern Neural Networks},
author={Guo, Chuan and Pleiss, Geoff and Sun, Yu and Weinberger, Kilian Q.}, booktitle={ICML}, year={2017},
note={arXiv 1706.04599, equation 3}}"""


class Calibration(evaluate.Metric):
    def _info(self) -> evaluate.MetricInfo:
        class_index, probability = datasets.Value("int64"), datasets.Value("float64")
        return evaluate.MetricInfo(
            description=__doc__,
            citation=CITATION,
            inputs_description=INPUTS,
            features=datasets.Features(
                {"predictions": class_index, "references": class_index, "probabilities": probability}
            ),
        )

    def _compute(
        self, predictions: list[int], references: list[int], probabilities: list[float], bin_count: int = 15
    ) -> dict[str, float]:
        probabilities = np.asarray(probabilities)
        is_hit = np.equal(predictions, references)
        inner_edges = np.linspace(0, 1, bin_count + 1)[1:-1]
        bin_of_sample = np.digitize(probabilities, inner_edges, right=True)
        # In each bin, |sum of hits - sum of probabilities| is |accuracy - mean probability| times the number
        # of samples.
        gap_per_bin = np.bincount(bin_of_sample, is_hit - probabilities, minlength=bin_count)
        return {"expected_calibration_error": float(np.abs(gap_per_bin).sum() / len(references))}
