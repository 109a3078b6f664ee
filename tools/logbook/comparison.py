"""A page of the log book that compares several runs: cost, accuracy, and other differences."""

import math
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from common.system.files import Kind, fitting, read_json
from common.system.paths import public_path
from common.system.text import plural
from tools.logbook import price, seeds, words
from tools.logbook.markdown import code, render
from tools.logbook.record import RunRecord
from tools.logbook.words import as_flag, chosen, data, memory_gib, utilisation_pct

NOT_COMPARED = ("output_dir", "model_folder", "s3")  # places of files
# Flags whose resolved values stand in result.json.
RESOLVED = ("mixed_precision", "per_device_batch_size", "compile", "grad_checkpointing")
NAMED = ("data", "model", "epochs", "batch_size", "lr", "seed")  # flags in a column's name where they differ
SEARCH: dict[str, Kind] = {  # a result of find_batch_size.py
    **dict.fromkeys(("script", "strategy", "device", "mixed_precision", "half_precision", "compile"), str),
    "grad_checkpointing": bool,
    **dict.fromkeys(("processes", "answer", "knee", "quantum"), int),
    "limit_gib": float,
    **dict.fromkeys(("recipe", "sharding"), dict),
    "trials": [{"outcome": str, "*": float}],
}


@dataclass(frozen=True)
class Comparison:
    """Compares two runs or more with the first. searches: results of find_batch_size.py.

    target_accuracy: by default the lowest of the runs' best accuracies, which all have reached.
    price_per_hour: of one host. ValueError for runs that were evaluated on different images, unless
    allow_different_data.
    """

    runs: list[RunRecord]
    target_accuracy: float | None = None
    price_per_hour: float | None = None
    searches: tuple[dict[str, Any], ...] = ()
    allow_different_data: bool = False

    def __post_init__(self) -> None:
        if len(self.runs) < 2:
            raise ValueError("a comparison needs two runs or more")
        if self.allow_different_data:
            return
        for run in self.runs[1:]:
            if different := different_images(self.runs[0], run):
                raise ValueError(
                    f"{run.folder} and {self.runs[0].folder} were evaluated on different images"
                    f" ({different}): --allow_different_data compares them all the same"
                )

    @cached_property
    def names(self) -> list[str]:
        """A unique name for each run, of what differs: `ddp x 4`, `lr 0.003`; equal names get a number."""
        runs, facts = self.runs, [run.facts for run in self.runs]
        scripts = [one.get("script", "unknown") for one in facts]
        where = [f"{one.get('strategy', 'unknown')} x {one.get('processes', '?')}" for one in facts]
        hosts = [plural(one.get("hosts", "?"), "host") for one in facts]
        flags = [name for name in runs[0].recipe if all(name in run.recipe for run in runs)]
        others = [name for name in flags if name not in (*NAMED, *NOT_COMPARED)]
        always = [scripts, where, *(_values(runs, name) for name in NAMED if name in flags)]
        parts: list[tuple[str, ...]] = list(zip(*_differing(always), strict=True)) or [()] * len(runs)
        for column in _differing([hosts, *(_values(runs, name) for name in others)]):
            if len(set(parts)) < len(runs):
                parts = [(*own, value) for own, value in zip(parts, column, strict=True)]
        names = [", ".join(own) or one for own, one in zip(parts, where, strict=True)]
        seen = [names[:i].count(name) + 1 for i, name in enumerate(names)]
        return [name if k == 1 else f"{name} ({k})" for name, k in zip(names, seen, strict=True)]

    @cached_property
    def groups(self) -> list[seeds.Group]:
        """The runs by everything but the seed; [] where no recipe was run with several seeds."""
        found = seeds.group(self.runs, self.names)
        return found if any(len(group.values) > 1 for group in found) else []

    @property
    def target(self) -> float | None:
        best = [run.facts.get("best_accuracy") for run in self.runs]
        known = [accuracy for accuracy in best if accuracy is not None]
        return self.target_accuracy or min(known, default=None)


def read_search(file: Path) -> dict[str, Any]:
    """Reads a result of find_batch_size.py. ValueError for any other file."""
    try:
        found, odd = fitting(read_json(file), SEARCH)
    except OSError as error:
        raise ValueError(f"{file} can't be read: {error.strerror}") from None
    if odd or not {"script", "strategy", "processes", "recipe", "trials"} <= found.keys():
        raise ValueError(f"{file} is no result of find_batch_size.py")
    return found


# --- Comparing


def different_images(first: RunRecord, run: RunRecord) -> str:
    """The differences in the images that two runs were evaluated on, as `data: cifar10, digits`.

    A value that one of the runs does not record, as a killed run its split, is not compared.
    """
    both = (first, run)
    sources = [one.about.get("source") for one in both]
    found = {
        "data": sources if all(sources) else [data(one) for one in both],
        "split": [one.facts.get("val_name") for one in both],
        "images": [one.facts.get("val_images") for one in both],
        "chosen": [chosen(one) for one in both],
    }
    return "; ".join(
        f"{what}: {ours}, {theirs}"
        for what, (ours, theirs) in found.items()
        if None not in (ours, theirs) and ours != theirs
    )


def _differing(columns: list[list[str]]) -> list[list[str]]:
    return [column for column in columns if len(set(column)) > 1]


def _values(runs: list[RunRecord], name: str) -> list[str]:
    """A flag and its value in each run, without the folders of a path."""
    values = [as_flag(run.recipe[name]) for run in runs]
    return [f"{name} {value.rstrip('/').rpartition('/')[2]}" for value in values]


def speed_up(first: RunRecord, run: RunRecord, time: str) -> tuple[float | None, str]:
    """The speed-up in `time` (train_s or wall_s); or None, and the reason."""
    words = {"batch_size": f"{run.unit} per step", "steps": "steps", "data": "as data", "script": "as script"}
    for name, what in words.items():
        if first.facts.get(name) != run.facts.get(name):
            return None, f"{run.facts.get(name)} {what}, the first run {first.facts.get(name)}"
    for one in (first, run):
        if one.facts["status"] != "finished":
            return None, f"{'the first run' if one is first else 'it'} is not finished"
        if not one.facts.get(time):
            return None, f"{'the first run' if one is first else 'it'} has no {time}"
    return first.facts[time] / run.facts[time], ""


def time_to(run: RunRecord, accuracy: float | None) -> float | None:
    """Seconds of the run until the first evaluation with that accuracy; None without one."""
    found = (
        line
        for line in run.evaluations
        if line.get("val/accuracy", -1) >= (math.inf if accuracy is None else accuracy)
    )
    return next((line["wall_s"] for line in found), None)


def differences(runs: list[RunRecord]) -> dict[str, list[str]]:
    """Settings that differ between the runs, other than the compared ones: {name: value of each run}."""
    known = [conditions(run) for run in runs]
    names = dict.fromkeys(name for found in known for name in found)
    values = {name: [found.get(name, "not known") for found in known] for name in names}
    return {name: found for name, found in values.items() if len(set(found)) > 1} | _sharding(runs)


def _sharding(runs: list[RunRecord]) -> dict[str, list[str]]:
    """Sharding settings that differ between runs of one strategy. Strategies themselves are compared."""
    found = {}
    for strategy in dict.fromkeys(run.facts.get("strategy") for run in runs):
        settings = [
            run.about.get("sharding", {}) if run.facts.get("strategy") == strategy else None for run in runs
        ]
        for name in dict.fromkeys(name for own in settings for name in own or ()):
            values = ["-" if own is None else as_flag(own.get(name, "not known")) for own in settings]
            if len(set(values) - {"-"}) > 1:
                found[f"{strategy}: {name}"] = values
    return found


def conditions(run: RunRecord) -> dict[str, str]:
    """Settings of the run that a comparison names where they differ."""
    facts, about = run.facts, run.about
    left_out = (*NOT_COMPARED, *RESOLVED)
    recipe = {name: public_path(as_flag(value)) for name, value in run.recipe.items() if name not in left_out}
    names = ["script", "data", "batch_size", "per_device_batch_size", "accumulation_steps", "epochs", "steps"]
    names += ["mixed_precision", "half_precision", "gradient_reduction", "compile", "grad_checkpointing"]
    names += ["val_name", "val_images", "status"]
    versions = {f"version of {name}": str(value) for name, value in about.get("versions", {}).items()}
    devices = about.get("devices") or [facts.get("device", "not known")]
    headers = [line for lines in run.telemetry.values() for line in lines if "cpus" in line]
    hosts = {f"{line['cpus']} CPUs, {line.get('memory_gib', 0):.0f} GiB" for line in headers}
    return {
        **recipe,
        **{name: as_flag(facts[name]) for name in names if name in facts},
        **versions,
        "commit": about.get("git_commit", "not known"),
        "device": ", ".join(sorted(set(devices))),
        "host": "; ".join(sorted(hosts)) or "not known",
        "started from": public_path(about.get("resumed_from", "fresh weights")),
    }


# --- The page


def page(comparison: Comparison, picture: str, pages: list[str | None]) -> str:
    """The page. picture, pages: links to the picture and to the runs' pages, if any."""
    runs, names, groups = comparison.runs, comparison.names, comparison.groups
    pairs = [speed_up(runs[0], run, "train_s") for run in runs]
    speed_ups = [factor for factor, _ in pairs]
    costs = [_cost(run, comparison.price_per_hour) for run in runs]
    busy = [value and f"{value:.0f} % of {kind}s" for value, kind in map(utilisation_pct, runs)]
    return render(
        "compare.md.j2",
        title=title(comparison),
        members=list(zip(runs, names, pages, strict=True)),
        names=names,
        groups=groups,
        verdicts=[seeds.verdict(groups[0], other) for other in groups[1:]],
        each=lambda name: [run.facts.get(name) for run in runs],
        target=comparison.target,
        times=[time_to(run, comparison.target) for run in runs],
        speed_ups=speed_ups,
        efficiencies=[_efficiency(runs[0], run, factor) for run, factor in zip(runs, speed_ups, strict=True)],
        whole_speed_ups=[speed_up(runs[0], run, "wall_s")[0] for run in runs],
        reasons=[(name, reason) for name, (_, reason) in zip(names, pairs, strict=True) if reason],
        memory=[memory_gib(run) for run in runs],
        busy=busy,
        an_hour=comparison.price_per_hour,
        costs=costs,
        costs_of_a_point=[_cost_of_a_point(run, cost) for run, cost in zip(runs, costs, strict=True)],
        largest=[_largest(run, comparison.searches) for run in runs],
        picture=picture,
        different=[[name, *map(code, values)] for name, values in differences(runs).items()],
        searches=[
            dict.fromkeys(SEARCH)
            | search
            | {"name": f"{search['script']}, {search['strategy']} x {search['processes']}"}
            for search in comparison.searches
        ],
        problems=[f"{name}: {line}" for name, run in zip(names, runs, strict=True) for line in run.problems],
        words=words,
    )


def title(comparison: Comparison) -> str:
    return f"{words.model(comparison.runs[0])} on {data(comparison.runs[0])}: {'; '.join(comparison.names)}"


def _efficiency(first: RunRecord, run: RunRecord, factor: float | None) -> float | None:
    before, after = first.facts.get("processes"), run.facts.get("processes")
    return factor * before / after if factor is not None and before and after else None


def _cost(run: RunRecord, price_per_hour: float | None) -> float | None:
    """The price of all hosts for the run's whole time, with what restarts have lost."""
    used_s = price.used_s(run)
    if price_per_hour is None or used_s is None or not {"wall_s", "hosts"} <= run.facts.keys():
        return None
    return used_s / 3600 * run.facts["hosts"] * price_per_hour


def _cost_of_a_point(run: RunRecord, cost: float | None) -> float | None:
    """The cost for each percent of the run's accuracy: on the test split, or the final one."""
    accuracy = seeds.headline(run)
    return cost / (100 * accuracy) if cost is not None and accuracy else None


def _largest(run: RunRecord, searches: tuple[dict[str, Any], ...]) -> int | None:
    """The search result with the run's script, strategy, recipe, processes and precision."""
    names = ["script", "strategy", "processes", "mixed_precision", "half_precision", "compile"]
    names += ["grad_checkpointing"]
    for search in searches:
        recipe = {name: value for name, value in search["recipe"].items() if name != "streams"}
        same_recipe = all(run.recipe.get(name) == value for name, value in recipe.items())
        same_sharding = search.get("sharding") == run.about.get("sharding")
        same_facts = all(search.get(name) == run.facts.get(name) for name in names)
        if same_recipe and same_sharding and same_facts:
            return search.get("answer")
    return None
