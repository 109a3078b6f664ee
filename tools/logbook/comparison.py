"""A page of the log book that compares several runs: time, accuracy, and other differences."""

import math
from dataclasses import dataclass
from functools import cached_property, partial
from operator import methodcaller
from pathlib import Path
from typing import Any

from onecurve.flags.fields import declared, without_left
from onecurve.run.schemas import SearchResult, kinds
from onecurve.system.files import read_json, typed_values
from onecurve.system.paths import public_path
from onecurve.system.text import plural
from tools.logbook import seeds
from tools.logbook.markdown import code_span, render
from tools.logbook.run_record import RunRecord, as_flag, complete, host_count

SEARCH = "result of find_batch_size.py"
# Flags whose resolved values stand in result.json.
RESOLVED = ("mixed_precision", "per_device_batch_size", "compile", "grad_checkpointing", "step_graph")
# Undisturbed runs have a smaller spread of images/s. Seen: at most 0.18 on an H200; 0.5 to 1.2 on 2 CPU cores
# that other programs used as well.
LARGEST_SPREAD = 0.25


@dataclass(frozen=True)
class Comparison:
    """Compare two runs or more with the first. searches: results of find_batch_size.py.

    target_accuracy: by default the lowest of the runs' best accuracies, which all have reached.
    ValueError for runs that were evaluated on different images, unless allow_different_data.
    """

    runs: list[RunRecord]
    target_accuracy: float | None = None
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
        where = [run.job for run in runs]
        hosts = [plural(one.get("hosts", "?"), "host") for one in facts]
        flags = [name for name in runs[0].recipe if all(name in run.recipe for run in runs)]
        positions = declared("in_names")
        first = sorted((name for name in flags if name in positions), key=lambda name: positions[name])
        others = [name for name in flags if name not in (*first, *_places_of_results())]
        always = [scripts, where, *(_values(runs, name) for name in first)]
        parts: list[tuple[str, ...]] = [()] * len(runs)
        for column in [*always, hosts, *(_values(runs, name) for name in others)]:
            if len(set(column)) > 1 and (column in always or len(set(parts)) < len(runs)):
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
        known = [run.facts["best_accuracy"] for run in self.runs if "best_accuracy" in run.facts]
        return self.target_accuracy or min(known, default=None)


def read_search(file: Path) -> dict[str, Any]:
    """Read a result of find_batch_size.py. ValueError for any other file."""
    try:
        found, wrong = typed_values(read_json(file), kinds(SearchResult))
    except OSError as error:
        raise ValueError(f"{file} can't be read: {error.strerror}") from None
    needed = ("script", "strategy", "processes", "recipe", "trials")
    if wrong := [*wrong, *(name for name in needed if name not in found and name not in wrong)]:
        raise ValueError(f"{file} is no {SEARCH} ({', '.join(wrong)} missing or wrong)")
    return found | {"recipe": without_left(found["recipe"])}


# --- Comparing


def different_images(first: RunRecord, run: RunRecord) -> str:
    """The differences in the images that two runs were evaluated on, as `data: cifar10, digits`.

    A value that one of the runs does not record, as a killed run its split, is not compared.
    """
    both = (first, run)
    sources = [one.about.get("source") for one in both]
    found = {
        "data": sources if all(sources) else [one.data for one in both],
        "split": [one.facts.get("val_name") for one in both],
        "images": [None if one.fold else one.facts.get("val_images") for one in both],
        "chosen": [
            one.about.get("val_chosen") if one.recipe.get("max_val_images") else "all" for one in both
        ],
    }
    return "; ".join(
        f"{what}: {ours}, {theirs}"
        for what, (ours, theirs) in found.items()
        if None not in (ours, theirs) and ours != theirs
    )


def _values(runs: list[RunRecord], name: str) -> list[str]:
    """A flag and its value in each run, without the folders of a path."""
    values = [run.over_starts(partial(_flag, name)).replace(", then", " then") for run in runs]
    if any(run.fold for run in runs) and name == "holdout":
        return [f"fold {value}" for value in values]
    return [f"{name} {value.rstrip('/').rpartition('/')[2]}" for value in values]


def speed_up_over(first: RunRecord, run: RunRecord, time: str) -> tuple[float | None, str]:
    """The speed-up in `time` (train_s or wall_s); or None, and the reason."""
    words = {"batch_size": f"{run.unit} per step", "steps": "steps", "data": "as data", "script": "as script"}
    for name, what in words.items():
        if first.facts.get(name) != run.facts.get(name):
            return None, f"{run.facts.get(name)} {what}, the first run {first.facts.get(name)}"
    for one in (first, run):
        subject = "the first run" if one is first else "it"
        if one.facts["status"] != "finished":
            return None, f"{subject} is not finished"
        if not one.facts.get(time):
            return None, f"{subject} has no {time}"
        if one.recipe_changes:
            return None, f"{subject} changed its recipe: {'; '.join(one.recipe_changes)}"
    return first.facts[time] / run.facts[time], ""


def setting_differences(runs: list[RunRecord]) -> dict[str, list[str]]:
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
    left_out = (*_places_of_results(), *RESOLVED)
    recipe = {name: run.over_starts(partial(_flag, name)) for name in run.recipe if name not in left_out}
    names = ["script", "data", "batch_size", "per_device_batch_size", "accumulation_steps", "epochs", "steps"]
    names += ["mixed_precision", "half_precision", "gradient_reduction", "compile", "grad_checkpointing"]
    names += ["step_graph", "val_name", "val_images", "status"]
    versions = {f"version of {n}": run.over_starts(partial(_version, n)) for n in about.get("versions", {})}
    headers = [line for lines in run.telemetry.values() for line in lines if "cpus" in line]
    hosts = {f"{line['cpus']} CPUs, {line.get('memory_gib', 0):.0f} GiB" for line in headers}
    return {
        **recipe,
        **{n: as_flag(run.over_starts(methodcaller("get", n))) for n in names if n in facts},
        **versions,
        "commit": run.over_starts(methodcaller("get", "git_commit", "not known")),
        "device": run.over_starts(_kinds_of_device),
        "host": "; ".join(sorted(hosts)) or "not known",
        "started from": public_path(about.get("resumed_from", "fresh weights")),
    }


def _places_of_results() -> list[str]:
    """Return the flags that say where a run's results are, which differ between any two runs."""
    return [name for name, files in declared("locates").items() if files == "results"]


def _flag(name: str, about: dict[str, Any]) -> str:
    return public_path(as_flag(about.get("recipe", {}).get(name)))


def _version(name: str, about: dict[str, Any]) -> str:
    return str(about.get("versions", {}).get(name))


def _kinds_of_device(about: dict[str, Any]) -> str:
    return ", ".join(sorted(set(about.get("devices") or [about.get("device", "not known")])))


# --- The page


def comparison_page(comparison: Comparison, picture: str, pages: list[str | None]) -> str:
    """The page. picture, pages: links to the picture and to the runs' pages, if any."""
    runs, names, groups = comparison.runs, comparison.names, comparison.groups
    columns = [_column(comparison, *one) for one in zip(runs, names, strict=True)]
    return render(
        "compare.md.j2",
        title=title(comparison),
        members=list(zip(runs, names, pages, strict=True)),
        names=names,
        groups=groups,
        verdicts=[seeds.seed_verdict(groups[0], other) for other in groups[1:]],
        target=comparison.target,
        columns=columns,
        doubts=_doubts(columns),
        picture=picture,
        different=[[name, *map(code_span, values)] for name, values in setting_differences(runs).items()],
        searches=[
            complete(search, kinds(SearchResult))
            | {"name": f"{search['script']}, {search['strategy']} x {search['processes']}"}
            for search in comparison.searches
        ],
        problems=[f"{name}: {line}" for name, run in zip(names, runs, strict=True) for line in run.problems],
    )


def title(comparison: Comparison) -> str:
    first = comparison.runs[0]
    return f"{first.model} on {first.data}: {'; '.join(comparison.names)}"


def _doubts(columns: list[dict[str, Any]]) -> list[str]:
    """Return reasons to doubt the times: steps of very different speed, and efficiencies above 100 %."""
    unsteady = [column for column in columns if (column["spread"] or 0) > LARGEST_SPREAD]
    doubts = [
        f"The speed of {column['name']} varied by {column['spread']:.0%} of its median during the run."
        " Another program probably used the machine: repeat the run before you quote its time."
        for column in unsteady
    ]
    if above := [column["name"] for column in columns if (column["efficiency"] or 0) > 1]:
        cause = "was slowed down" if columns[0] in unsteady else "may have been slowed down"
        doubts.append(
            f"An efficiency above 100 % ({', '.join(above)}) is no merit of more processes:"
            f" the first run {cause}."
        )
    return doubts


def _column(comparison: Comparison, run: RunRecord, name: str) -> dict[str, Any]:
    """The run's facts, and what its column of the table has beside them."""
    first, facts = comparison.runs[0], run.facts
    factor, reason = speed_up_over(first, run, "train_s")
    before, after = first.facts.get("processes"), facts.get("processes")
    if run is not first and not (first.is_one_job and run.is_one_job):
        after = None  # the facts have the processes of the last start
    set_by_starts = ("processes", "batch_size", "per_device_batch_size")
    target = math.inf if comparison.target is None else comparison.target
    busy, kind = run.utilisation_pct
    reached = (line["wall_s"] for line in run.evaluations if line.get("val/accuracy", -1) >= target)
    return facts | {
        **{key: run.over_starts(methodcaller("get", key)) for key in set_by_starts},
        "hosts": run.over_starts(host_count),
        "name": name,
        "time_to_target": next(reached, None),
        "speed_up": factor,
        "no_speed_up": reason,
        "efficiency": factor * before / after if factor is not None and before and after else None,
        "spread": run.speed_spread,
        "whole_speed_up": speed_up_over(first, run, "wall_s")[0],
        "memory": run.memory_gib,
        "busy": busy and f"{busy:.0f} % of {kind}s",
        "largest": _largest(run, comparison.searches),
    }


def _largest(run: RunRecord, searches: tuple[dict[str, Any], ...]) -> int | None:
    """The search result with the run's script, strategy, recipe, processes and precision."""
    names = ["script", "strategy", "processes", "mixed_precision", "half_precision", "compile"]
    names += ["grad_checkpointing"]
    for search in searches if run.is_one_job else ():
        same_recipe = all(run.recipe.get(name) == value for name, value in search["recipe"].items())
        same_sharding = search.get("sharding") == run.about.get("sharding")
        same_facts = all(search.get(name) == run.facts.get(name) for name in names)
        if same_recipe and same_sharding and same_facts:
            return search.get("answer")
    return None
