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
from tools.logbook.run_record import RunRecord, mixed_precision

ALPHA = 0.05  # significance level of the test
SMALLEST_ERROR = 1e-12  # standard errors below this value are rounding errors


@dataclass(frozen=True)
class Group:
    """Runs with the same recipe and type of job. `values` contains the headline accuracy by seed or fold."""

    name: str
    values: dict[Any, float]
    runs: tuple[RunRecord, ...]
    folds: int = 0  # number of folds, or 0 without cross-validation

    @property
    def accuracy_over_folds(self) -> float | None:
        """Accuracy over all held-out images, or None if a fold is missing."""
        images = [run.facts.get("val_images") or 0 for run in self.runs]
        is_whole = len(self.runs) == self.folds * len({run.recipe.get("seed") for run in self.runs})
        correct = sum(accuracy * count for accuracy, count in zip(self.values.values(), images, strict=True))
        return correct / sum(images) if is_whole and all(images) else None

    @property
    def mean(self) -> float:
        return statistics.fmean(self.values.values())

    @property
    def deviation(self) -> float | None:
        """Sample standard deviation, or None for a single run."""
        return statistics.stdev(self.values.values()) if len(self.values) > 1 else None

    @property
    def interval(self) -> tuple[float, float] | None:
        """95 % confidence interval of the mean (Student's t), limited to [0, 1], or None for a single run."""
        if self.deviation is None:
            return None
        half_width = _critical_t(len(self.values) - 1) * self.deviation * self.error
        return max(0.0, self.mean - half_width), min(1.0, self.mean + half_width)

    @property
    def error(self) -> float:
        """Standard error of the mean, in units of the standard deviation.

        Folds are handled as in Nadeau and Bengio (2003).
        """
        return math.sqrt(1 / len(self.values) + (1 / (self.folds - 1) if self.folds else 0))


class Difference(NamedTuple):
    """Difference between two groups' mean accuracies, second minus first, with its 95 % interval."""

    mean: float
    low: float  # lower limit of the 95 % interval
    high: float  # upper limit of the 95 % interval
    p: float
    is_paired: bool


def group(runs: Sequence[RunRecord], names: Sequence[str]) -> list[Group]:
    """Group finished runs by all settings except the seed and the fold. Keep the order of the runs.

    Args:
        runs: Runs to group. Unfinished runs are left out.
        names: Run names, which consist of comma-separated parts.

    Raises:
        ValueError: If a group contains a seed twice.
    """
    members_by_key: dict[str, list[tuple[str, RunRecord]]] = {}
    for name, run in zip(names, runs, strict=True):
        if run.facts["status"] == "finished" and headline_accuracy(run) is not None:
            members_by_key.setdefault(_group_key(run), []).append((name, run))
    groups = []
    for members in members_by_key.values():
        seed_counts = Counter(_seed_label(run) for _, run in members)
        if len(seed_counts) == 1:  # all runs in the group used the same seed
            groups += [_make_group([member]) for member in members]
            continue
        ((seed, count),) = seed_counts.most_common(1)
        if count > 1:
            folders = " and ".join(str(run.folder) for _, run in members if _seed_label(run) == seed)
            raise ValueError(f"{folders} have the same recipe and seed {seed}. Pass only one of these runs.")
        groups.append(_make_group(members))
    return groups


def _make_group(members: list[tuple[str, RunRecord]]) -> Group:
    name, first = members[0]
    parts = [part for part in name.split(", ") if not part.startswith(("seed ", "fold "))]
    runs = sorted((run for _, run in members), key=lambda run: natural_sort_key(_seed_label(run)))
    values = {_seed_label(run): headline_accuracy(run) or 0.0 for run in runs}
    return Group(", ".join(parts) or first.job, values, tuple(runs), first.fold[1] if first.fold else 0)


def _seed_label(run: RunRecord) -> int | str:
    """Return the run's label within its group: the seed, or text such as `0 and fold 2/5`."""
    seed = run.recipe.get("seed", 0)
    return f"{seed} and fold {run.recipe['holdout']}" if run.fold else seed


def headline_accuracy(run: RunRecord) -> float | None:
    """Return the accuracy on the test split, or the final accuracy of a fold or a run without --holdout."""
    final = run.facts.get("final_accuracy")
    return final if run.fold else run.facts.get("test_accuracy", final)


def _group_key(run: RunRecord) -> str:
    """Return a key that consists of the settings that all runs in a group share."""
    left_out = {"seed", *declared_values("locates")}
    recipe = {name: value for name, value in run.recipe.items() if name not in left_out}
    recipe |= {"holdout": ["folds", run.fold[1]]} if run.fold else {}
    settings = [run.facts.get("script"), run.settings.get("source"), run.where, run.recipe_changes]
    return json.dumps([recipe, settings, run.over_starts(mixed_precision)], sort_keys=True)


def compare_groups(first: Group, second: Group) -> Difference | None:
    """Compare two groups with a t-test.

    Return None if a group contains one run or all differences are equal.
    """
    from scipy import stats

    if min(len(first.values), len(second.values)) < 2:
        return None
    mean, is_paired = second.mean - first.mean, first.values.keys() == second.values.keys()
    errors = [(group.deviation or 0.0) * group.error for group in (first, second)]
    error = math.hypot(*errors)
    if is_paired:
        differences = [second.values[seed] - first.values[seed] for seed in first.values]
        error = first.error * statistics.stdev(differences)
    if error < SMALLEST_ERROR:
        return None
    counts = [len(group.values) - 1 for group in (first, second)]
    squared_variances = sum(term**4 / count for term, count in zip(errors, counts, strict=True))
    degrees = counts[0] if is_paired else error**4 / squared_variances
    p, half_width = 2 * float(stats.t.sf(abs(mean) / error, degrees)), _critical_t(degrees) * error
    return Difference(mean, mean - half_width, mean + half_width, p, is_paired)


def _critical_t(degrees: float) -> float:
    from scipy import stats

    return float(stats.t.ppf(1 - ALPHA / 2, degrees))


def seed_verdict(first: Group, second: Group) -> str:
    """State in one sentence whether the second group is better, worse, or indistinguishable."""
    difference = compare_groups(first, second)
    if difference is None:
        reason = "all pairs of runs differ by the same amount"
        if min(len(first.values), len(second.values)) < 2:
            reason = "a single run does not show the variation between seeds"
        return f"{second.name} and {first.name} are not compared with a test, because {reason}."
    test = f"{'paired' if difference.is_paired else 'Welch'} t-test, p = {difference.p:.2g}"
    sizes = f"n = {' and '.join(map(str, sorted({len(first.values), len(second.values)})))}"
    details = f"{difference.mean:+.4f}, 95 %: {difference.low:+.4f} to {difference.high:+.4f}; {test}"
    if difference.p < ALPHA:
        rank = "better" if difference.mean > 0 else "worse"
        return f"{second.name} is {rank} than {first.name} with {sizes} ({details})."
    return f"{second.name} and {first.name} are not distinguishable with {sizes} ({details})."
