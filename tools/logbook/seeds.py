"""Comparison of groups of runs that differ only in their seed or fold.

Each group has a mean and a confidence interval. A t-test compares two groups. If both groups used the same
seeds, the test is paired, because a seed determines the initial weights and the order of the images, which
cause a part of the noise. Otherwise Welch's test is used, which does not assume equal variances. Both tests
assume that accuracies over seeds are normally distributed.
"""

import json
import math
import statistics
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from onecurve.flags.fields import declared
from onecurve.system.text import natural
from tools.logbook.run_record import RunRecord, mixed_precision

ALPHA = 0.05  # significance level of the test
TINY = 1e-12  # smaller deviations are rounding errors


@dataclass(frozen=True)
class Group:
    """Runs with the same recipe and type of job. `values` contains headline accuracies by seed or fold."""

    name: str
    values: dict[Any, float]
    runs: tuple[RunRecord, ...]
    folds: int = 0  # number of folds, or 0 without cross-validation

    @property
    def over_all(self) -> float | None:
        """Accuracy over all held-out images, or None if a fold is missing."""
        images = [run.facts.get("val_images") or 0 for run in self.runs]
        is_whole = len(self.runs) == self.folds * len({run.recipe.get("seed") for run in self.runs})
        right = sum(a * n for a, n in zip(self.values.values(), images, strict=True))
        return right / sum(images) if is_whole and all(images) else None

    @property
    def mean(self) -> float:
        return statistics.fmean(self.values.values())

    @property
    def deviation(self) -> float | None:
        """Sample standard deviation, or None for a single run."""
        return statistics.stdev(self.values.values()) if len(self.values) > 1 else None

    @property
    def interval(self) -> tuple[float, float] | None:
        """95 % interval of the mean by Student's t, limited to [0, 1], or None for a single run."""
        if self.deviation is None:
            return None
        half = _critical(len(self.values) - 1) * self.deviation * self.error
        return max(0.0, self.mean - half), min(1.0, self.mean + half)

    @property
    def error(self) -> float:
        """Standard error of the mean, in standard deviations. For folds, as in Nadeau and Bengio (2003)."""
        return math.sqrt(1 / len(self.values) + (1 / (self.folds - 1) if self.folds else 0))


class Difference(NamedTuple):
    """Mean of the second group minus the mean of the first."""

    mean: float
    low: float  # lower end of the 95 % interval
    high: float  # upper end
    p: float
    is_paired: bool


def group(runs: Sequence[RunRecord], names: Sequence[str]) -> list[Group]:
    """Group finished runs by everything except the seed, and keep their order.

    Args:
        runs: the runs. Unfinished runs are left out.
        names: names of the runs, with parts separated by commas.

    Raises:
        ValueError: a group contains a seed twice.
    """
    by_job: dict[str, list[tuple[str, RunRecord]]] = {}
    for name, run in zip(names, runs, strict=True):
        if run.facts["status"] == "finished" and headline(run) is not None:
            by_job.setdefault(_job(run), []).append((name, run))
    groups = []
    for members in by_job.values():
        seeds = Counter(_seed(run) for _, run in members)
        if len(seeds) == 1:  # all runs of the group used the same seed
            groups += [_group([member]) for member in members]
            continue
        ((seed, count),) = seeds.most_common(1)
        if count > 1:
            both = " and ".join(str(run.folder) for _, run in members if _seed(run) == seed)
            raise ValueError(f"{both} have the same recipe and seed {seed}. Give only one of them.")
        groups.append(_group(members))
    return groups


def _group(members: list[tuple[str, RunRecord]]) -> Group:
    name, first = members[0]
    parts = [part for part in name.split(", ") if not part.startswith(("seed ", "fold "))]
    runs = sorted((run for _, run in members), key=lambda run: natural(_seed(run)))
    values = {_seed(run): headline(run) or 0.0 for run in runs}
    return Group(", ".join(parts) or first.job, values, tuple(runs), first.fold[1] if first.fold else 0)


def _seed(run: RunRecord) -> int | str:
    """Return the seed, or text such as `0 and fold 2/5`, which identifies the run in its group."""
    seed = run.recipe.get("seed", 0)
    return f"{seed} and fold {run.recipe['holdout']}" if run.fold else seed


def headline(run: RunRecord) -> float | None:
    """Return the accuracy on the test split. For a fold or without --holdout, return the final accuracy."""
    final = run.facts.get("final_accuracy")
    return final if run.fold else run.facts.get("test_accuracy", final)


def _job(run: RunRecord) -> str:
    """Return a key made of the settings that all runs of a group share."""
    left_out = {"seed", *declared("locates")}
    recipe = {name: value for name, value in run.recipe.items() if name not in left_out}
    recipe |= {"holdout": ["folds", run.fold[1]]} if run.fold else {}
    settings = [run.facts.get("script"), run.about.get("source"), run.where, run.recipe_changes]
    return json.dumps([recipe, settings, run.over_starts(mixed_precision)], sort_keys=True)


def compare_groups(first: Group, second: Group) -> Difference | None:
    """Compare two groups by a t-test. Return None for a group of one run, or if all differences are equal."""
    from scipy import stats

    if min(len(first.values), len(second.values)) < 2:
        return None
    mean, is_paired = second.mean - first.mean, first.values.keys() == second.values.keys()
    errors = [(group.deviation or 0.0) * group.error for group in (first, second)]
    error = math.hypot(*errors)
    if is_paired:
        error = first.error * statistics.stdev(
            second.values[seed] - first.values[seed] for seed in first.values
        )
    if error < TINY:
        return None
    counts = [len(group.values) - 1 for group in (first, second)]
    freedom = error**4 / sum(e**4 / n for e, n in zip(errors, counts, strict=True))
    freedom = counts[0] if is_paired else freedom
    p, half = 2 * float(stats.t.sf(abs(mean) / error, freedom)), _critical(freedom) * error
    return Difference(mean, mean - half, mean + half, p, is_paired)


def _critical(freedom: float) -> float:
    from scipy import stats

    return float(stats.t.ppf(1 - ALPHA / 2, freedom))


def seed_verdict(first: Group, second: Group) -> str:
    """State in one sentence whether the second group is better than the first, worse or indistinguishable."""
    difference = compare_groups(first, second)
    if difference is None:
        is_single = min(len(first.values), len(second.values)) < 2
        reason = (
            "one run does not show how seeds vary" if is_single else "all pairs differ by the same amount"
        )
        return f"{second.name} and {first.name}: no test, because {reason}."
    test = f"{'paired' if difference.is_paired else 'Welch'} t-test, p = {difference.p:.2g}"
    count = f"n = {' and '.join(map(str, sorted({len(first.values), len(second.values)})))}"
    between = f"{difference.mean:+.4f}, 95 %: {difference.low:+.4f} to {difference.high:+.4f}; {test}"
    if difference.p < ALPHA:
        word = "better" if difference.mean > 0 else "worse"
        return f"{second.name} is {word} than {first.name} with {count} ({between})."
    return f"{second.name} and {first.name} are not distinguishable with {count} ({between})."
