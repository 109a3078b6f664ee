"""Compare groups of runs. Runs in a group differ only in their seed or fold.

The comparison contains a mean and a confidence interval for each group. A t-test compares two groups. If both
groups used the same seeds, the test is paired, because a seed determines the initial weights and the image
order, both sources of noise. Otherwise, the comparison uses Welch's test, which does not assume equal
variances. Both tests assume that accuracies over seeds are normally distributed.
"""

import json
import math
import statistics
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from onecurve.flags.fields import declared_values
from onecurve.system.text import natural_sort_key
from tools.logbook.run_record import RunRecord, mixed_precision_text

SIGNIFICANCE_LEVEL = 0.05  # maximum p-value of a significant difference
MIN_STANDARD_ERROR = 1e-12  # smaller standard errors are rounding errors


@dataclass(frozen=True)
class RunGroup:
    """Runs with the same recipe and type of job. The accuracies are headline accuracies by seed or fold."""

    name: str  # run name without the seed
    accuracy_by_seed: dict[Any, float]
    runs: tuple[RunRecord, ...]
    fold_count: int = 0  # number of folds, or 0 without cross-validation

    @property
    def accuracies(self) -> list[float]:
        return list(self.accuracy_by_seed.values())

    @property
    def accuracy_over_folds(self) -> float | None:
        """Accuracy over the held-out images of all folds and seeds, or None if a fold is missing."""
        image_counts = [run.result_values.get("val_images") or 0 for run in self.runs]
        seeds = {run.recipe.get("seed") for run in self.runs}
        has_all_folds = len(self.runs) == self.fold_count * len(seeds)
        accuracies_and_counts = zip(self.accuracies, image_counts, strict=True)
        correct_images = sum(accuracy * image_count for accuracy, image_count in accuracies_and_counts)
        return correct_images / sum(image_counts) if has_all_folds and all(image_counts) else None

    @property
    def mean(self) -> float:
        """Mean accuracy of the runs."""
        return statistics.fmean(self.accuracies)

    @property
    def standard_deviation(self) -> float | None:
        """Sample standard deviation, or None for a single run."""
        return statistics.stdev(self.accuracies) if len(self.accuracies) > 1 else None

    @property
    def mean_interval(self) -> tuple[float, float] | None:
        """95 % confidence interval of the mean (Student's t), limited to [0, 1], or None for a single run."""
        if self.standard_deviation is None:
            return None
        critical_value = _critical_t(len(self.accuracies) - 1)
        half_width = critical_value * self.standard_deviation * self.relative_standard_error
        return max(0.0, self.mean - half_width), min(1.0, self.mean + half_width)

    @property
    def relative_standard_error(self) -> float:
        """Standard error of the mean, in units of the standard deviation.

        Folds share training images. As in Nadeau and Bengio (2003), the ratio of held-out to training images
        is added to the variance.
        """
        held_out_ratio = 1 / (self.fold_count - 1) if self.fold_count else 0
        return math.sqrt(1 / len(self.accuracies) + held_out_ratio)


class GroupDifference(NamedTuple):
    """Difference between two groups' mean accuracies, second minus first, with its 95 % interval."""

    mean: float
    interval_low: float  # lower limit of the 95 % interval
    interval_high: float  # upper limit of the 95 % interval
    p_value: float
    is_paired: bool


def group_runs(runs: Sequence[RunRecord], run_names: Sequence[str]) -> list[RunGroup]:
    """Group finished runs by all settings except the seed and the fold. Keep the order of the runs.

    Args:
        runs: Runs to group. Unfinished runs are left out.
        run_names: Run names, which consist of comma-separated parts.

    Raises:
        ValueError: If a group contains a seed twice.
    """
    members_by_key: dict[str, list[tuple[str, RunRecord]]] = {}
    for run_name, run in zip(run_names, runs, strict=True):
        if run.result_values["status"] == "finished" and headline_accuracy(run) is not None:
            members_by_key.setdefault(_group_key(run), []).append((run_name, run))
    run_groups = []
    for members in members_by_key.values():
        seed_counts = Counter(_seed_label(run) for _, run in members)
        if len(seed_counts) == 1:  # without a second seed, repeated runs of the same recipe are not grouped
            run_groups += [_make_run_group([member]) for member in members]
            continue
        [(seed, run_count)] = seed_counts.most_common(1)
        if run_count > 1:
            folders = " and ".join(str(run.folder) for _, run in members if _seed_label(run) == seed)
            raise ValueError(f"{folders} have the same recipe and seed {seed}. Pass only one of these runs.")
        run_groups.append(_make_run_group(members))
    return run_groups


def _make_run_group(group_members: list[tuple[str, RunRecord]]) -> RunGroup:
    """Return the group of named runs, in the order of their seeds.

    The group's name is the first run's name without the seed and the fold.
    """
    first_name, first_run = group_members[0]
    name_parts = [
        name_part for name_part in first_name.split(", ") if not name_part.startswith(("seed ", "fold "))
    ]
    group_name = ", ".join(name_parts) or first_run.strategies_and_processes
    runs = sorted((run for _, run in group_members), key=lambda run: natural_sort_key(_seed_label(run)))
    accuracy_by_seed = {_seed_label(run): headline_accuracy(run) or 0.0 for run in runs}
    return RunGroup(group_name, accuracy_by_seed, tuple(runs), first_run.fold_count)


def _seed_label(run: RunRecord) -> int | str:
    """Return the run's label within its group: the seed, or text such as `0 and fold 2/5`."""
    seed = run.recipe.get("seed", 0)
    return f"{seed} and fold {run.recipe['holdout']}" if run.fold else seed


def headline_accuracy(run: RunRecord) -> float | None:
    """Return the accuracy on the test split, or the final accuracy of a fold or a run without --holdout."""
    final_accuracy = run.result_values.get("final_accuracy")
    return final_accuracy if run.fold else run.result_values.get("test_accuracy", final_accuracy)


def _group_key(run: RunRecord) -> str:
    """Return a text that is the same for two runs if only their seeds, folds and file locations differ."""
    excluded_flags = {"seed", *declared_values("locates")}
    recipe = {flag: flag_value for flag, flag_value in run.recipe.items() if flag not in excluded_flags}
    recipe |= {"holdout": ["folds", run.fold_count]} if run.fold else {}  # the same key for all folds
    settings = [run.result_values.get("script"), run.recipe_file.get("source"), run.strategies_and_devices]
    precision = run.setting_over_starts(mixed_precision_text)
    return json.dumps([recipe, [*settings, run.recipe_changes], precision], sort_keys=True)


def compare_groups(first: RunGroup, second: RunGroup) -> GroupDifference | None:
    """Compare two groups with a t-test.

    Return None if a group contains one run or all differences are equal.
    """
    from scipy import stats

    groups = (first, second)
    if min(len(group.accuracies) for group in groups) < 2:
        return None
    mean_difference = second.mean - first.mean
    is_paired = second.accuracy_by_seed.keys() == first.accuracy_by_seed.keys()
    errors = [(group.standard_deviation or 0.0) * group.relative_standard_error for group in groups]
    error_of_difference = math.hypot(*errors)  # standard error for Welch's test
    if is_paired:
        seeds = first.accuracy_by_seed
        paired_differences = [second.accuracy_by_seed[seed] - first.accuracy_by_seed[seed] for seed in seeds]
        error_of_difference = first.relative_standard_error * statistics.stdev(paired_differences)
    if error_of_difference < MIN_STANDARD_ERROR:
        return None
    group_degrees = [len(group.accuracies) - 1 for group in groups]
    squared_variances = sum(error**4 / degrees for error, degrees in zip(errors, group_degrees, strict=True))
    # For Welch's test, use the Welch-Satterthwaite equation.
    degrees_of_freedom = group_degrees[0] if is_paired else error_of_difference**4 / squared_variances
    p_value = 2 * float(stats.t.sf(abs(mean_difference) / error_of_difference, degrees_of_freedom))
    half_width = _critical_t(degrees_of_freedom) * error_of_difference
    interval_low, interval_high = mean_difference - half_width, mean_difference + half_width
    return GroupDifference(mean_difference, interval_low, interval_high, p_value, is_paired)


def _critical_t(degrees_of_freedom: float) -> float:
    """Return Student's critical t for a two-sided test at SIGNIFICANCE_LEVEL."""
    from scipy import stats

    return float(stats.t.ppf(1 - SIGNIFICANCE_LEVEL / 2, degrees_of_freedom))  # ppf is the quantile function


def seed_verdict(first: RunGroup, second: RunGroup) -> str:
    """State in one sentence whether the second group is better, worse, or indistinguishable."""
    group_difference = compare_groups(first, second)  # None without a test
    run_counts = {len(first.accuracies), len(second.accuracies)}
    if group_difference is None:
        skip_reason = "all pairs of runs differ by the same amount"
        if min(run_counts) < 2:
            skip_reason = "a single run does not show the variation between seeds"
        return f"{second.name} and {first.name} are not compared with a test, because {skip_reason}."
    test_name = "paired" if group_difference.is_paired else "Welch"
    test_text = f"{test_name} t-test, p = {group_difference.p_value:.2g}"
    sample_sizes = f"n = {' and '.join(map(str, sorted(run_counts)))}"
    interval_text = f"95 %: {group_difference.interval_low:+.4f} to {group_difference.interval_high:+.4f}"
    details = f"{group_difference.mean:+.4f}, {interval_text}; {test_text}"
    if group_difference.p_value < SIGNIFICANCE_LEVEL:
        verdict = "better" if group_difference.mean > 0 else "worse"
        return f"{second.name} is {verdict} than {first.name} with {sample_sizes} ({details})."
    return f"{second.name} and {first.name} are not distinguishable with {sample_sizes} ({details})."
