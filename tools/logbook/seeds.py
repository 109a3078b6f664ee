"""Comparisons over seeds or folds: runs that differ in these alone count as one, with a mean and interval.

Two of them are compared by a t-test: of pairs where the seeds are the same, as a seed decides the initial
weights and the order of the images, and so a part of the noise; else Welch's, which assumes no equal
variances. Both assume that accuracies over seeds are normally distributed.
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

ALPHA = 0.05  # of the test
TINY = 1e-12  # a deviation that is rounding


@dataclass(frozen=True)
class Group:
    """Run of one recipe on one kind of job. values: their headline accuracies, by seed or fold."""

    name: str
    values: dict[Any, float]
    runs: tuple[RunRecord, ...]
    folds: int = 0  # of the cross-validation, if it is one

    @property
    def over_all(self) -> float | None:
        """The accuracy over all held-out images; None unless every fold is there."""
        images = [run.facts.get("val_images") or 0 for run in self.runs]
        is_whole = len(self.runs) == self.folds * len({run.recipe.get("seed") for run in self.runs})
        right = sum(a * n for a, n in zip(self.values.values(), images, strict=True))
        return right / sum(images) if is_whole and all(images) else None

    @property
    def mean(self) -> float:
        return statistics.fmean(self.values.values())

    @property
    def deviation(self) -> float | None:
        """The sample's standard deviation; None for one run."""
        return statistics.stdev(self.values.values()) if len(self.values) > 1 else None

    @property
    def interval(self) -> tuple[float, float] | None:
        """The mean's 95 percent interval within 0 and 1, by Student's t; None for one run."""
        if self.deviation is None:
            return None
        half = _critical(len(self.values) - 1) * self.deviation * self.error
        return max(0.0, self.mean - half), min(1.0, self.mean + half)

    @property
    def error(self) -> float:
        """The mean's standard error in standard deviations; of folds Nadeau and Bengio's (2003)."""
        return math.sqrt(1 / len(self.values) + (1 / (self.folds - 1) if self.folds else 0))


class Difference(NamedTuple):
    """The second group's mean minus the first's."""

    mean: float
    low: float  # of its 95 percent interval
    high: float
    p: float
    is_paired: bool


def group(runs: Sequence[RunRecord], names: Sequence[str]) -> list[Group]:
    """Group finished runs by everything but the seed, in their order.

    names: of the runs, in which parts are separated by commas. ValueError for a seed that a group has twice.
    """
    found: dict[str, list[tuple[str, RunRecord]]] = {}
    for name, run in zip(names, runs, strict=True):
        if run.facts["status"] == "finished" and headline(run) is not None:
            found.setdefault(_job(run), []).append((name, run))
    groups = []
    for members in found.values():
        seeds = Counter(_seed(run) for _, run in members)
        if len(seeds) == 1:  # the same training several times
            groups += [_group([member]) for member in members]
            continue
        ((seed, count),) = seeds.most_common(1)
        if count > 1:
            both = " and ".join(str(run.folder) for _, run in members if _seed(run) == seed)
            raise ValueError(f"{both} have the same recipe and seed {seed}: name one of them")
        groups.append(_group(members))
    return groups


def _group(members: list[tuple[str, RunRecord]]) -> Group:
    name, first = members[0]
    parts = [part for part in name.split(", ") if not part.startswith(("seed ", "fold "))]
    runs = sorted((run for _, run in members), key=lambda run: natural(_seed(run)))
    values = {_seed(run): headline(run) or 0.0 for run in runs}
    return Group(", ".join(parts) or first.job, values, tuple(runs), first.fold[1] if first.fold else 0)


def _seed(run: RunRecord) -> int | str:
    """What tells a run from the others of its group; with folds `0 and fold 2/5`."""
    seed = run.recipe.get("seed", 0)
    return f"{seed} and fold {run.recipe['holdout']}" if run.fold else seed


def headline(run: RunRecord) -> float | None:
    """The accuracy on the test split, or without --holdout the final one; of a fold the final one on it."""
    final = run.facts.get("final_accuracy")
    return final if run.fold else run.facts.get("test_accuracy", final)


def _job(run: RunRecord) -> str:
    """What the runs of a group have in common."""
    left_out = {"seed", *declared("locates")}
    recipe = {name: value for name, value in run.recipe.items() if name not in left_out}
    recipe |= {"holdout": ["folds", run.fold[1]]} if run.fold else {}
    places = [run.facts.get("script"), run.about.get("source"), run.where, run.recipe_changes]
    return json.dumps([recipe, places, run.over_starts(mixed_precision)], sort_keys=True)


def compare_groups(first: Group, second: Group) -> Difference | None:
    """The t-test of two groups; None where one of them has a single run, or all values are equal."""
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
    """One sentence: better, worse, or not distinguishable."""
    found = compare_groups(first, second)
    if found is None:
        few = min(len(first.values), len(second.values)) < 2
        why = "a single run does not show how seeds vary" if few else "all pairs differ by the same amount"
        return f"{second.name} and {first.name}: no test, because {why}."
    how = f"{'paired' if found.is_paired else 'Welch'} t-test, p = {found.p:.2g}"
    count = f"n = {' and '.join(map(str, sorted({len(first.values), len(second.values)})))}"
    between = f"{found.mean:+.4f}, 95 %: {found.low:+.4f} to {found.high:+.4f}; {how}"
    if found.p < ALPHA:
        word = "better" if found.mean > 0 else "worse"
        return f"{second.name} is {word} than {first.name} with {count} ({between})."
    return f"{second.name} and {first.name} are not distinguishable with {count} ({between})."
