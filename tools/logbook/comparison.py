"""A page of the log book that compares several runs: cost, accuracy, and other differences."""

import math
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from common.run.plots import Panel, panels
from common.system.files import Kind, fitting, read_json
from common.system.paths import public_path
from common.system.text import plural
from tools.logbook import bill, seeds
from tools.logbook import markdown as md
from tools.logbook.page import as_flag, time_unit
from tools.logbook.record import RunRecord
from tools.logbook.words import (
    REHEARSAL,
    chosen,
    claim,
    data,
    evaluated_images,
    memory_gib,
    model,
    number,
    utilisation_pct,
)

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
    words = {"batch_size": f"{run.unit} a step", "steps": "steps", "data": "as data", "script": "as script"}
    for name, what in words.items():
        if first.facts.get(name) != run.facts.get(name):
            return None, f"{run.facts.get(name)} {what}, the first {first.facts.get(name)}"
    for one in (first, run):
        if one.facts["status"] != "finished":
            return None, f"{'the first' if one is first else 'it'} is not finished"
        if not one.facts.get(time):
            return None, f"{'the first' if one is first else 'it'} has no {time}"
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
        "began with": public_path(about.get("resumed_from", "fresh weights")),
    }


# --- The page


def draw(comparison: Comparison, file: Path) -> None:
    """Draws accuracy, loss, speed and time of each run; of several seeds their means."""
    if comparison.groups:
        _draw_groups(comparison, file)
        return
    runs, names = comparison.runs, comparison.names
    unit, unit_s = time_unit(max((line["wall_s"] for run in runs for line in run.metrics), default=0))
    accuracy, loss = Panel(f"time, {unit}", "accuracy"), Panel("step", "train/loss")
    for run, name in zip(runs, names, strict=True):
        points = [
            (line["wall_s"] / unit_s, line["val/accuracy"])
            for line in run.evaluations
            if "val/accuracy" in line
        ]
        steps = [(line["step"], line["train/loss"]) for line in run.metrics if "train/loss" in line]
        for panel, part in ((accuracy, points), (loss, steps)):
            if part:
                panel.curves[name] = ([point[0] for point in part], [point[1] for point in part])
    speed = Panel(
        f"{runs[0].unit}/s", "", bars=_known(names, [run.facts.get("images_per_s") for run in runs])
    )
    whole = Panel("whole time, s", "", bars=_known(names, [run.facts.get("wall_s") for run in runs]))
    panels(file, [[accuracy, loss], [speed, whole]], f"{model(runs[0])} on {data(runs[0])}")


def _draw_groups(comparison: Comparison, file: Path) -> None:
    first = comparison.runs[0]
    accuracy, loss = Panel("step", "accuracy, mean over seeds"), Panel("step", "train/loss, mean over seeds")
    names = [f"{group.name} ({plural(len(group.runs), 'run')})" for group in comparison.groups]
    for name, group in zip(names, comparison.groups, strict=True):
        for panel, key in ((accuracy, "val/accuracy"), (loss, "train/loss")):
            lines = [{line["step"]: line[key] for line in run.metrics if key in line} for run in group.runs]
            steps = sorted(set.intersection(*map(set, lines)))
            if steps:
                means = [sum(run[step] for run in lines) / len(lines) for step in steps]
                panel.curves[name] = (steps, means)
    bars = [
        Panel(label, "", bars=_known(names, [_mean(group, fact) for group in comparison.groups]))
        for label, fact in ((f"{first.unit}/s", "images_per_s"), ("whole time, s", "wall_s"))
    ]
    panels(file, [[accuracy, loss], bars], f"{model(first)} on {data(first)}")


def _mean(group: seeds.Group, fact: str) -> float | None:
    values = [run.facts[fact] for run in group.runs if fact in run.facts]
    return sum(values) / len(values) if values else None


def _known(names: list[str], values: list[float | None]) -> dict[str, float]:
    return {name: value for name, value in zip(names, values, strict=True) if value is not None}


def page(comparison: Comparison, picture: str, pages: list[str | None]) -> str:
    """The Markdown of the page. picture, pages: links to draw()'s file and to the runs' pages, if any."""
    runs = comparison.runs
    claims = "\n".join(
        f"- {md.link(name, link) if link else md.text(name)}: {md.text(claim(run))}"
        for name, run, link in zip(comparison.names, runs, pages, strict=True)
    )
    table, notes = _table(comparison)
    over_seeds = comparison.groups
    parts = [
        f"# {md.text(title(comparison))}",
        claims,
        REHEARSAL if any(run.is_rehearsal for run in runs) else "",
        seeds.section(over_seeds) if over_seeds else "",
        md.folded("Each run", table) if over_seeds else table,
        "\n".join(f"- {note}" for note in notes),
        md.picture(f"accuracy, loss, {runs[0].unit}/s and time", picture),
        "## Also different",
        _also_different(comparison),
        *_searches(comparison),
        _problems(comparison),
    ]
    return "\n\n".join(part for part in parts if part) + "\n"


def title(comparison: Comparison) -> str:
    return f"{model(comparison.runs[0])} on {data(comparison.runs[0])}: {', '.join(comparison.names)}"


def _table(comparison: Comparison) -> tuple[str, list[str]]:
    """A table with a column for each run, and remarks on it."""
    runs, first = comparison.runs, comparison.runs[0]
    target, price = comparison.target, comparison.price_per_hour
    speed_ups = [speed_up(first, run, "train_s") for run in runs]
    busy = [value and f"{value:.0f} % of {kind}s" for value, kind in map(utilisation_pct, runs)]

    def facts(name: str) -> list[Any]:
        return [run.facts.get(name) for run in runs]

    rows = [
        ("hosts", "{}", facts("hosts")),
        ("processes", "{}", facts("processes")),
        (f"{first.unit} a step", "{:,}", facts("batch_size")),
        (f"{first.unit} a forward and process", "{:,}", facts("per_device_batch_size")),
        ("optimizer steps", "{:,}", facts("steps")),
        ("training time", "{:,.1f} s", facts("train_s")),
        ("whole time", "{:,.1f} s", facts("wall_s")),
        (f"time to accuracy {number(target, '{:.4f}')}", "{:,.1f} s", [time_to(run, target) for run in runs]),
        (f"{first.unit}/s", "{:,.0f}", facts("images_per_s")),
        ("MFU", "{:.1f} %", facts("mfu_pct")),
        ("speed-up in training time", "{:.2f}", [factor for factor, _ in speed_ups]),
        ("efficiency", "{:.0%}", [_efficiency(first, *pair) for pair in zip(runs, speed_ups, strict=True)]),
        ("speed-up in whole time", "{:.2f}", [speed_up(first, run, "wall_s")[0] for run in runs]),
        (f"best accuracy on the {evaluated_images(first)}", "{:.4f}", facts("best_accuracy")),
        ("final accuracy", "{:.4f}", facts("final_accuracy")),
        (
            f"accuracy of the best weights on the {evaluated_images(first, 'test')}",
            "{:.4f}",
            facts("test_accuracy"),
        ),
        ("final loss", "{:.4f}", facts("final_loss")),
        ("peak memory of a process", "{:.2f} GiB", [memory_gib(run) for run in runs]),
        ("utilisation, mean", "{}", busy),
        ("energy of the GPUs", "{:,.1f} Wh", facts("energy_wh")),
        (
            f"cost at {number(price, '{:,.2f}')} an hour and host",
            "{:,.2f}",
            [_cost(run, price) for run in runs],
        ),
        ("cost of a point of accuracy", "{:,.4f}", [_cost_of_a_point(run, price) for run in runs]),
        (
            "largest batch found, images a process",
            "{:,}",
            [_largest(run, comparison.searches) for run in runs],
        ),
    ]
    notes = [
        f"No speed-up of {md.text(name)}: {md.text(reason)}."
        for name, (_, reason) in zip(comparison.names, speed_ups, strict=True)
        if reason
    ]
    notes.append("Efficiency: the speed-up divided by (processes / processes of the first run).")
    shown = [
        [md.text(label), *(number(value, form) for value in values)]
        for label, form, values in rows
        if any(value is not None for value in values)
    ]
    return md.table(["", *map(md.text, comparison.names)], shown), notes


def _efficiency(first: RunRecord, run: RunRecord, found: tuple[float | None, str]) -> float | None:
    before, after = first.facts.get("processes"), run.facts.get("processes")
    return found[0] * before / after if found[0] is not None and before and after else None


def _cost(run: RunRecord, price_per_hour: float | None) -> float | None:
    """The price of all hosts for the run's whole time, with what restarts have lost."""
    used_s = bill.used_s(run)
    if price_per_hour is None or used_s is None or not {"wall_s", "hosts"} <= run.facts.keys():
        return None
    return used_s / 3600 * run.facts["hosts"] * price_per_hour


def _cost_of_a_point(run: RunRecord, price_per_hour: float | None) -> float | None:
    """The price of the run for each percent of its accuracy: on the test split, or the final one."""
    cost, accuracy = _cost(run, price_per_hour), seeds.headline(run)
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


def _also_different(comparison: Comparison) -> str:
    found = differences(comparison.runs)
    if not found:
        return "Nothing: recipe, data, versions, commit, devices and precision are the same."
    rows = [[md.text(name), *map(md.code, values)] for name, values in found.items()]
    return md.table(["", *map(md.text, comparison.names)], rows, numbers=False)


def _searches(comparison: Comparison) -> list[str]:
    """A table of the largest batch of each search; its trials, folded."""
    if not comparison.searches:
        return []
    head = [
        "",
        "largest, images a process",
        "images a forward, all processes",
        "knee",
        "limit",
        "trials",
        "time",
    ]
    rows, folds = [], []
    for search in comparison.searches:
        name = f"{search['script']}, {search['strategy']} x {search['processes']}"
        answer, trials = search.get("answer"), search["trials"]
        took_s = sum(trial.get("seconds") or 0 for trial in trials)
        rows.append(
            [
                md.text(f"{name} on {search.get('device', 'unknown device')}"),
                number(answer, "{:,}"),
                number(answer and answer * search["processes"], "{:,}"),
                number(search.get("knee"), "{:,}"),
                number(search.get("limit_gib"), "{:.2f} GiB a process"),
                f"{len(trials)}",
                f"{took_s:,.0f} s",
            ]
        )
        trial_rows = [
            [
                number(trial.get("per_device_batch_size"), "{:,}"),
                md.text(trial.get("outcome") or "-"),
                number(trial.get("memory_gib"), "{:.2f} GiB"),
                number(trial.get("images_per_s"), "{:,.0f}"),
                number(trial.get("seconds"), "{:,.0f} s"),
            ]
            for trial in trials
        ]
        columns = ["images a forward", "outcome", "memory", "images/s", "time"]
        folds.append(md.folded(f"The trials of {name}", md.table(columns, trial_rows)))
    knee = "The knee: from there on a larger batch brings less than 5 percent more images/s."
    return ["## Largest batch", md.table(head, rows), knee, *folds]


def _problems(comparison: Comparison) -> str:
    lines = [
        f"- {md.text(name)}: {md.text(problem)}"
        for name, run in zip(comparison.names, comparison.runs, strict=True)
        for problem in run.problems
    ]
    return "## Missing or broken in the runs' folders\n\n" + "\n".join(lines) if lines else ""
