"""Log book page that compares the time, accuracy and settings of several runs."""

import math
from dataclasses import dataclass
from functools import cached_property, partial
from operator import methodcaller
from pathlib import Path
from typing import Any

from onecurve.flags.fields import declared_values, without_removed
from onecurve.run.schemas import SearchResult, value_types
from onecurve.system.files import read_json, typed_values
from onecurve.system.paths import public_path
from onecurve.system.text import plural
from tools.logbook import seeds
from tools.logbook.markdown import code_span, render
from tools.logbook.run_record import RunRecord, fill_missing, flag_text, host_count

SEARCH_RESULT = "result of find_batch_size.py"
# Flags whose resolved values are recorded in result.json
RESOLVED_FLAGS = ("mixed_precision", "per_device_batch_size", "compile", "grad_checkpointing", "step_graph")
# Maximum throughput spread in an undisturbed run, relative to the median. Measured spreads are at most
# 0.18 on an H200, and 0.5 to 1.2 on 2 CPU cores that other programs also used.
LARGEST_SPREAD = 0.25


@dataclass(frozen=True)
class Comparison:
    """Comparison of a reference run with one or more other runs.

    Attributes:
        runs: Runs to compare. The first run is the reference.
        target_accuracy: Accuracy for the row `time to accuracy`. Default: the highest accuracy that all runs
            reached.
        searches: Results of find_batch_size.py.
        allow_different_data: True to accept runs that were evaluated on different images.

    Raises:
        ValueError: If there are fewer than two runs, or if the runs were evaluated on different images.
    """

    runs: list[RunRecord]
    target_accuracy: float | None = None
    searches: tuple[dict[str, Any], ...] = ()
    allow_different_data: bool = False

    def __post_init__(self) -> None:
        if len(self.runs) < 2:
            raise ValueError("a comparison needs at least two runs. Pass more run folders.")
        if self.allow_different_data:
            return
        for run in self.runs[1:]:
            if different := different_images(self.runs[0], run):
                folders = f"{run.folder} and {self.runs[0].folder}"
                remedy = "Add --allow_different_data to compare the runs anyway."
                raise ValueError(f"{folders} were evaluated on different images ({different}). {remedy}")

    @cached_property
    def names(self) -> list[str]:
        """Unique run names derived from the runs' differences, for example `ddp x 4` or `lr 0.003`.

        Numbers are appended to identical names.
        """
        runs = self.runs
        scripts = [run.facts.get("script", "unknown") for run in runs]
        jobs = [run.job for run in runs]
        hosts = [plural(run.facts.get("hosts", "?"), "host") for run in runs]
        shared_flags = [name for name in runs[0].recipe if all(name in run.recipe for run in runs)]
        positions = declared_values("in_names")
        naming_flags = [name for name in shared_flags if name in positions]
        naming_flags.sort(key=lambda name: positions[name])
        other_flags = [name for name in shared_flags if name not in (*naming_flags, *_result_flags())]
        # Differences in these properties are always part of the names, and other differences only if needed.
        main_properties = [scripts, jobs, *(_flag_texts(runs, name) for name in naming_flags)]
        properties = [*main_properties, hosts, *(_flag_texts(runs, name) for name in other_flags)]
        name_parts: list[tuple[str, ...]] = [()] * len(runs)
        for texts in properties:
            are_unique = len(set(name_parts)) == len(runs)
            if len(set(texts)) > 1 and (texts in main_properties or not are_unique):
                name_parts = [(*parts, text) for parts, text in zip(name_parts, texts, strict=True)]
        names = [", ".join(parts) or job for parts, job in zip(name_parts, jobs, strict=True)]
        counts = [names[:index].count(name) + 1 for index, name in enumerate(names)]
        numbered = zip(names, counts, strict=True)
        return [name if count == 1 else f"{name} ({count})" for name, count in numbered]

    @cached_property
    def groups(self) -> list[seeds.Group]:
        """Groups of runs that differ only in the seed. Empty if no recipe was run with several seeds."""
        groups = seeds.group(self.runs, self.names)
        return groups if any(len(group.values) > 1 for group in groups) else []

    @property
    def target(self) -> float | None:
        """Target accuracy for the row `time to accuracy`."""
        known = [run.facts["best_accuracy"] for run in self.runs if "best_accuracy" in run.facts]
        return self.target_accuracy or min(known, default=None)


def read_search(file: Path) -> dict[str, Any]:
    """Read a result file of find_batch_size.py. Raise ValueError for any other file."""
    try:
        search, wrong_keys = typed_values(read_json(file), value_types(SearchResult))
    except OSError as error:
        raise ValueError(f"{file} can't be read: {error.strerror}") from None
    needed = ("script", "strategy", "processes", "recipe", "trials")
    missing = [name for name in needed if name not in search and name not in wrong_keys]
    if problems := [*wrong_keys, *missing]:
        raise ValueError(f"{file} is not a {SEARCH_RESULT}. Missing or wrong keys: {', '.join(problems)}")
    return search | {"recipe": without_removed(search["recipe"])}


# --- Comparing


def different_images(first: RunRecord, run: RunRecord) -> str:
    """Describe how the evaluated images of two runs differ, for example `data: cifar10, digits`.

    Skip properties that one of the runs does not record, for example the split of a killed run.
    """
    runs = (first, run)
    sources = [run.settings.get("source") for run in runs]
    pairs = {
        "data": sources if all(sources) else [run.data for run in runs],
        "split": [run.facts.get("val_name") for run in runs],
        "images": [None if run.fold else run.facts.get("val_images") for run in runs],
        "chosen": [
            run.settings.get("val_chosen") if run.recipe.get("max_val_images") else "all" for run in runs
        ],
    }
    known = {name: pair for name, pair in pairs.items() if None not in pair}
    return "; ".join(f"{name}: {old}, {new}" for name, (old, new) in known.items() if old != new)


def _flag_texts(runs: list[RunRecord], name: str) -> list[str]:
    """Return the flag and its value as text, for each run. Shorten paths to the last part."""
    values = [run.over_starts(partial(_flag_value, name)).replace(", then", " then") for run in runs]
    if any(run.fold for run in runs) and name == "holdout":
        return [f"fold {value}" for value in values]
    return [f"{name} {value.rstrip('/').rpartition('/')[2]}" for value in values]


def speed_up_over(first: RunRecord, run: RunRecord, time: str) -> tuple[float | None, str]:
    """Return the speed-up in `time` (train_s or wall_s) and an empty reason, or None and a reason."""
    labels = {"batch_size": "batch size", "steps": "number of steps", "data": "data", "script": "script"}
    for name, label in labels.items():
        value, reference = run.facts.get(name), first.facts.get(name)
        if value != reference:
            return None, f"the {label} is {value}, but {reference} in the first run"
    for record in (first, run):
        subject = "the first run" if record is first else "the run"
        if record.facts["status"] != "finished":
            return None, f"{subject} is not finished"
        if not record.facts.get(time):
            return None, f"{subject} has no {time}"
        if record.recipe_changes:
            return None, f"{subject} changed its recipe: {'; '.join(record.recipe_changes)}"
    return first.facts[time] / run.facts[time], ""


def setting_differences(runs: list[RunRecord]) -> dict[str, list[str]]:
    """Map each setting that differs between the runs to its values. Skip settings compared elsewhere."""
    settings = [run_settings(run) for run in runs]
    names = dict.fromkeys(name for values in settings for name in values)
    by_name = {name: [values.get(name, "unknown") for values in settings] for name in names}
    different = {name: values for name, values in by_name.items() if len(set(values)) > 1}
    return different | _sharding_differences(runs)


def _sharding_differences(runs: list[RunRecord]) -> dict[str, list[str]]:
    """Map each sharding setting that differs between runs with the same strategy to its values."""
    differences = {}
    for strategy in dict.fromkeys(run.facts.get("strategy") for run in runs):
        recorded = [(run.facts.get("strategy"), run.settings.get("sharding", {})) for run in runs]
        settings = [sharding if name == strategy else None for name, sharding in recorded]
        for name in dict.fromkeys(name for sharding in settings for name in sharding or ()):
            values = [
                "-" if shards is None else flag_text(shards.get(name, "unknown")) for shards in settings
            ]
            if len(set(values) - {"-"}) > 1:
                differences[f"{strategy}: {name}"] = values
    return differences


def run_settings(run: RunRecord) -> dict[str, str]:
    """Return the run's settings that a comparison lists when they differ between runs."""
    facts, settings = run.facts, run.settings
    left_out = (*_result_flags(), *RESOLVED_FLAGS)
    flags = [name for name in run.recipe if name not in left_out]
    recipe = {name: run.over_starts(partial(_flag_value, name)) for name in flags}
    names = ["script", "data", "batch_size", "per_device_batch_size", "accumulation_steps", "epochs", "steps"]
    names += ["mixed_precision", "half_precision", "gradient_reduction", "compile", "grad_checkpointing"]
    names += ["step_graph", "val_name", "val_images", "status"]
    packages = settings.get("versions", {})
    versions = {f"version of {name}": run.over_starts(partial(_package_version, name)) for name in packages}
    headers = [line for lines in run.telemetry.values() for line in lines if "cpus" in line]
    hosts = {f"{line['cpus']} CPUs, {line.get('memory_gib', 0):.0f} GiB" for line in headers}
    return {
        **recipe,
        **{name: flag_text(run.over_starts(methodcaller("get", name))) for name in names if name in facts},
        **versions,
        "commit": run.over_starts(methodcaller("get", "git_commit", "unknown")),
        "device": run.over_starts(_device_types),
        "host": "; ".join(sorted(hosts)) or "unknown",
        "started from": public_path(settings.get("resumed_from", "fresh weights")),
    }


def _result_flags() -> list[str]:
    """Return the flags that specify where a run's results are stored. All runs differ in these flags."""
    return [name for name, files in declared_values("locates").items() if files == "results"]


def _flag_value(name: str, settings: dict[str, Any]) -> str:
    return public_path(flag_text(settings.get("recipe", {}).get(name)))


def _package_version(name: str, settings: dict[str, Any]) -> str:
    return str(settings.get("versions", {}).get(name))


def _device_types(settings: dict[str, Any]) -> str:
    return ", ".join(sorted(set(settings.get("devices") or [settings.get("device", "unknown")])))


# --- The page


def comparison_page(comparison: Comparison, picture: str, pages: list[str | None]) -> str:
    """Return the comparison page as Markdown.

    Args:
        comparison: Comparison to show.
        picture: Link to the plots.
        pages: Link to each run's page, or None for a run without a page.
    """
    runs, names, groups = comparison.runs, comparison.names, comparison.groups
    columns = [_run_column(comparison, run, name) for run, name in zip(runs, names, strict=True)]
    return render(
        "compare.md.j2",
        title=title(comparison),
        members=list(zip(runs, names, pages, strict=True)),
        names=names,
        groups=groups,
        verdicts=[seeds.seed_verdict(groups[0], group) for group in groups[1:]],
        target=comparison.target,
        columns=columns,
        doubts=_timing_doubts(columns),
        picture=picture,
        different=[[name, *map(code_span, values)] for name, values in setting_differences(runs).items()],
        searches=[
            fill_missing(search, value_types(SearchResult))
            | {"name": f"{search['script']}, {search['strategy']} x {search['processes']}"}
            for search in comparison.searches
        ],
        problems=[f"{name}: {line}" for name, run in zip(names, runs, strict=True) for line in run.problems],
    )


def title(comparison: Comparison) -> str:
    first = comparison.runs[0]
    return f"{first.model} on {first.data}: {'; '.join(comparison.names)}"


def _timing_doubts(columns: list[dict[str, Any]]) -> list[str]:
    """Return warnings about doubtful times: uneven throughput and efficiencies above 100 %."""
    unsteady = [column for column in columns if (column["spread"] or 0) > LARGEST_SPREAD]
    doubts = [
        f"The throughput of {column['name']} varied by {column['spread']:.0%} of the median during the run."
        " Another program probably used the machine. Repeat the run before you quote the run's time."
        for column in unsteady
    ]
    if above := [column["name"] for column in columns if (column["efficiency"] or 0) > 1]:
        cause = "was slowed down" if columns[0] in unsteady else "may have been slowed down"
        doubts.append(
            f"An efficiency above 100 % ({', '.join(above)}) is not caused by the number of processes."
            f" The first run {cause}."
        )
    return doubts


def _run_column(comparison: Comparison, run: RunRecord, name: str) -> dict[str, Any]:
    """Return the values in a run's table column, together with the run's facts."""
    first, facts = comparison.runs[0], run.facts
    speed_up, reason = speed_up_over(first, run, "train_s")
    first_processes, processes = first.facts.get("processes"), facts.get("processes")
    if run is not first and not (first.is_one_job and run.is_one_job):
        processes = None  # result.json contains only the last start's processes
    set_by_starts = ("processes", "batch_size", "per_device_batch_size")
    target = math.inf if comparison.target is None else comparison.target
    efficiency = None
    if speed_up is not None and first_processes and processes:
        efficiency = speed_up * first_processes / processes
    utilisation, device = run.utilisation_pct
    times_reached = (line["wall_s"] for line in run.evaluations if line.get("val/accuracy", -1) >= target)
    return facts | {
        **{key: run.over_starts(methodcaller("get", key)) for key in set_by_starts},
        "hosts": run.over_starts(host_count),
        "name": name,
        "time_to_target": next(times_reached, None),
        "speed_up": speed_up,
        "no_speed_up": reason,
        "efficiency": efficiency,
        "spread": run.speed_spread,
        "whole_speed_up": speed_up_over(first, run, "wall_s")[0],
        "memory": run.memory_gib,
        "busy": utilisation and f"{utilisation:.0f} % of {device}s",
        "largest": _largest_batch(run, comparison.searches),
    }


def _largest_batch(run: RunRecord, searches: tuple[dict[str, Any], ...]) -> int | None:
    """Return the largest batch size that a search with the run's settings reported, or None."""
    names = ["script", "strategy", "processes", "mixed_precision", "half_precision", "compile"]
    names += ["grad_checkpointing"]
    for search in searches if run.is_one_job else ():
        same_recipe = all(run.recipe.get(name) == value for name, value in search["recipe"].items())
        same_sharding = search.get("sharding") == run.settings.get("sharding")
        same_facts = all(search.get(name) == run.facts.get(name) for name in names)
        if same_recipe and same_sharding and same_facts:
            return search.get("answer")
    return None
