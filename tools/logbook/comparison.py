"""Log book page that compares the time, accuracy and settings of several runs."""

import math
from dataclasses import dataclass
from functools import cached_property, partial
from operator import methodcaller
from pathlib import Path
from typing import Any

from onecurve.flags.fields import declared_values, without_removed_flags
from onecurve.run.schemas import SearchResult, value_types
from onecurve.system.files import read_json, split_by_type
from onecurve.system.paths import public_path
from onecurve.system.text import plural
from tools.logbook import seeds
from tools.logbook.markdown import code_span, render
from tools.logbook.run_record import RunRecord, fill_missing, flag_text, host_count

SEARCH_RESULT_NAME = "result of find_batch_size.py"  # the file, in error messages
# Flags whose resolved values are recorded in result.json
RESOLVED_FLAGS = ("mixed_precision", "per_device_batch_size", "compile", "grad_checkpointing", "step_graph")
# Maximum throughput spread in an undisturbed run, relative to the median. Measured spreads are at most
# 0.18 on an H200, and 0.5 to 1.2 on 2 CPU cores that other programs also used.
MAX_THROUGHPUT_SPREAD = 0.25  # relative to the median


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
            if differences := different_images(self.runs[0], run):
                folders = f"{run.folder} and {self.runs[0].folder}"
                remedy = "Add --allow_different_data to compare the runs anyway."
                raise ValueError(f"{folders} were evaluated on different images ({differences}). {remedy}")

    @cached_property
    def names(self) -> list[str]:
        """Unique run names derived from the runs' differences, for example `ddp x 4` or `lr 0.003`.

        Numbers are appended to identical names.
        """
        runs = self.runs
        scripts = [run.result_values.get("script", "unknown") for run in runs]
        jobs = [run.strategies_and_processes for run in runs]  # for example `ddp x 4`
        host_texts = [plural(run.result_values.get("hosts", "?"), "host") for run in runs]
        shared_flags = [flag for flag in runs[0].recipe if all(flag in run.recipe for run in runs)]
        position_in_names = declared_values("in_names")  # {flag: position in a run's name}
        naming_flags = [flag for flag in shared_flags if flag in position_in_names]
        naming_flags.sort(key=lambda flag: position_in_names[flag])
        other_flags = [flag for flag in shared_flags if flag not in (*naming_flags, *_result_flags())]
        # Differences in these properties are always part of the names, and other differences only if needed.
        main_properties = [scripts, jobs, *(_flag_texts(runs, flag) for flag in naming_flags)]
        texts_by_property = [*main_properties, host_texts, *(_flag_texts(runs, flag) for flag in other_flags)]
        name_parts: list[tuple[str, ...]] = [()] * len(runs)
        for property_texts in texts_by_property:
            are_names_unique = len(set(name_parts)) == len(runs)
            if len(set(property_texts)) > 1 and (property_texts in main_properties or not are_names_unique):
                name_parts = [(*parts, text) for parts, text in zip(name_parts, property_texts, strict=True)]
        run_names = [", ".join(parts) or job for parts, job in zip(name_parts, jobs, strict=True)]
        # Runs with the same name are numbered in order: 1, 2, 3, ...
        occurrences = [run_names[:index].count(run_name) + 1 for index, run_name in enumerate(run_names)]
        numbered_names = zip(run_names, occurrences, strict=True)
        return [run_name if number == 1 else f"{run_name} ({number})" for run_name, number in numbered_names]

    @cached_property
    def groups(self) -> list[seeds.RunGroup]:
        """Groups of runs that differ only in the seed. Empty if no recipe was run with several seeds."""
        groups = seeds.group_runs(self.runs, self.names)
        return groups if any(len(group.accuracy_by_seed) > 1 for group in groups) else []

    @property
    def target(self) -> float | None:
        """Target accuracy for the row `time to accuracy`. By default, the lowest of the best accuracies."""
        all_results = [run.result_values for run in self.runs]
        best_accuracies = [results["best_accuracy"] for results in all_results if "best_accuracy" in results]
        return self.target_accuracy or min(best_accuracies, default=None)


def read_search(result_file: Path) -> dict[str, Any]:
    """Read a result file of find_batch_size.py. Raise ValueError for any other file."""
    try:
        search, wrong_keys = split_by_type(read_json(result_file), value_types(SearchResult))
    except OSError as error:
        raise ValueError(f"{result_file} can't be read: {error.strerror}") from None
    needed_keys = ("script", "strategy", "processes", "recipe", "trials")
    missing_keys = [key for key in needed_keys if key not in search and key not in wrong_keys]
    if bad_keys := ", ".join([*wrong_keys, *missing_keys]):
        raise ValueError(f"{result_file} is not a {SEARCH_RESULT_NAME}. Missing or wrong keys: {bad_keys}")
    return search | {"recipe": without_removed_flags(search["recipe"])}


# --- Comparing


def different_images(first_run: RunRecord, other_run: RunRecord) -> str:
    """Describe how the evaluated images of two runs differ, for example `data: cifar10, digits`.

    Skip properties that one of the runs does not record, for example the split of a killed run.
    """
    runs = (first_run, other_run)
    data_sources = [run.recipe_file.get("source") for run in runs]
    values_by_property = {
        "data": data_sources if all(data_sources) else [run.data_name for run in runs],
        "split": [run.result_values.get("val_name") for run in runs],
        # The number of images is not compared for folds, which may differ in size.
        "images": [None if run.fold else run.result_values.get("val_images") for run in runs],
        "chosen": [  # method by which --max_val_images selected the images
            run.recipe_file.get("val_chosen") if run.recipe.get("max_val_images") else "all" for run in runs
        ],
    }
    known_values = {
        property_name: values for property_name, values in values_by_property.items() if None not in values
    }
    return "; ".join(
        f"{property_name}: {first_value}, {other_value}"
        for property_name, (first_value, other_value) in known_values.items()
        if first_value != other_value
    )


def _flag_texts(runs: list[RunRecord], flag: str) -> list[str]:
    """Return a text such as `lr 0.003` for each run, with paths shortened to the last part."""
    flag_settings = [run.setting_over_starts(partial(_flag_value, flag)) for run in runs]
    # Commas separate the parts of a run's name.
    value_texts = [flag_setting.replace(", then", " then") for flag_setting in flag_settings]
    if any(run.fold for run in runs) and flag == "holdout":
        return [f"fold {value_text}" for value_text in value_texts]
    return [f"{flag} {value_text.rstrip('/').rpartition('/')[2]}" for value_text in value_texts]


def speed_up_over(first_run: RunRecord, run: RunRecord, time_key: str) -> tuple[float | None, str]:
    """Return how many times as fast as the first run a run was, and an empty reason.

    If the times are not comparable, return None and the reason. `time_key` is `train_s` or `wall_s`.
    """
    # Times are comparable only if these results are the same.
    key_labels = {"batch_size": "batch size", "steps": "number of steps", "data": "data", "script": "script"}
    for result_key, key_label in key_labels.items():
        run_value, first_value = run.result_values.get(result_key), first_run.result_values.get(result_key)
        if run_value != first_value:
            return None, f"the {key_label} is {run_value}, but {first_value} in the first run"
    for compared_run in (first_run, run):
        subject = "the first run" if compared_run is first_run else "the run"
        if compared_run.result_values["status"] != "finished":
            return None, f"{subject} is not finished"
        if not compared_run.result_values.get(time_key):
            return None, f"{subject} has no {time_key}"
        if compared_run.recipe_changes:
            return None, f"{subject} changed its recipe: {'; '.join(compared_run.recipe_changes)}"
    return first_run.result_values[time_key] / run.result_values[time_key], ""


def setting_differences(runs: list[RunRecord]) -> dict[str, list[str]]:
    """Map the name of each setting that differs between the runs to the setting's text in each run."""
    settings_of_runs = [run_settings(run) for run in runs]
    setting_names = dict.fromkeys(setting_name for settings in settings_of_runs for setting_name in settings)
    values_by_name = {
        setting_name: [settings.get(setting_name, "unknown") for settings in settings_of_runs]
        for setting_name in setting_names
    }
    different_settings = {name: values for name, values in values_by_name.items() if len(set(values)) > 1}
    return different_settings | _sharding_differences(runs)


def _sharding_differences(runs: list[RunRecord]) -> dict[str, list[str]]:
    """Map each sharding setting that differs between runs with the same strategy to its values."""
    sharding_differences = {}
    strategies = [run.result_values.get("strategy") for run in runs]
    for strategy in dict.fromkeys(strategies):
        shardings = [  # sharding settings of each run, or None for a run with a different strategy
            run.recipe_file.get("sharding", {}) if run_strategy == strategy else None
            for run, run_strategy in zip(runs, strategies, strict=True)
        ]
        setting_names = dict.fromkeys(name for sharding in shardings for name in sharding or ())
        for setting_name in setting_names:
            setting_values = ["-"] * len(runs)  # "-" for runs with a different strategy
            for run_index, sharding in enumerate(shardings):
                if sharding is not None:
                    setting_values[run_index] = flag_text(sharding.get(setting_name, "unknown"))
            if len(set(setting_values) - {"-"}) > 1:
                sharding_differences[f"{strategy}: {setting_name}"] = setting_values
    return sharding_differences


def run_settings(run: RunRecord) -> dict[str, str]:
    """Return the text of each setting that a comparison lists when it differs between runs."""
    excluded_flags = (*_result_flags(), *RESOLVED_FLAGS)  # result_keys contains RESOLVED_FLAGS instead
    compared_flags = [flag for flag in run.recipe if flag not in excluded_flags]
    flag_values = {flag: run.setting_over_starts(partial(_flag_value, flag)) for flag in compared_flags}
    result_keys = ["script", "data", "batch_size", "per_device_batch_size", "accumulation_steps", "epochs"]
    result_keys += ["steps", "mixed_precision", "half_precision", "gradient_reduction", "compile"]
    result_keys += ["grad_checkpointing", "step_graph", "val_name", "val_images", "status"]
    recorded_keys = [result_key for result_key in result_keys if result_key in run.result_values]
    versions = {
        f"version of {package}": run.setting_over_starts(partial(_package_version, package))
        for package in run.recipe_file.get("versions", {})
    }
    # Only header lines contain the host's properties.
    telemetry_headers = [line for lines in run.telemetry.values() for line in lines if "cpus" in line]
    host_types = {f"{line['cpus']} CPUs, {line.get('memory_gib', 0):.0f} GiB" for line in telemetry_headers}
    return {
        **flag_values,
        **{key: flag_text(run.setting_over_starts(methodcaller("get", key))) for key in recorded_keys},
        **versions,
        "commit": run.setting_over_starts(methodcaller("get", "git_commit", "unknown")),
        "device": run.setting_over_starts(_device_types),
        "host": "; ".join(sorted(host_types)) or "unknown",
        "started from": public_path(run.recipe_file.get("resumed_from", "fresh weights")),
    }


def _result_flags() -> list[str]:
    """Return the flags that specify where a run's results are stored. All runs differ in these flags."""
    return [flag for flag, location_type in declared_values("locates").items() if location_type == "results"]


def _flag_value(flag: str, settings: dict[str, Any]) -> str:
    """Return a flag's value in a line of starts.jsonl as text, without private parts of paths."""
    return public_path(flag_text(settings.get("recipe", {}).get(flag)))


def _package_version(package: str, settings: dict[str, Any]) -> str:
    """Return a package's version in a line of starts.jsonl, or `None` as text."""
    return str(settings.get("versions", {}).get(package))


def _device_types(settings: dict[str, Any]) -> str:
    """Return the different device names in a line of starts.jsonl, separated by commas."""
    devices = settings.get("devices") or [settings.get("device", "unknown")]
    return ", ".join(sorted(set(devices)))


# --- The page


def comparison_page(comparison: Comparison, plots_link: str, page_links: list[str | None]) -> str:
    """Return the comparison page as Markdown.

    Args:
        comparison: Comparison to show.
        plots_link: Link to the plots.
        page_links: Link to each run's page, or None for a run without a page.
    """
    runs, run_names, groups = comparison.runs, comparison.names, comparison.groups
    run_columns = [_run_column(comparison, run, name) for run, name in zip(runs, run_names, strict=True)]
    values_by_setting = setting_differences(runs)
    named_runs = zip(run_names, runs, strict=True)
    run_problems = [f"{name}: {run_problem}" for name, run in named_runs for run_problem in run.problems]
    return render(
        "compare.md.j2",
        title=page_title(comparison),
        members=list(zip(runs, run_names, page_links, strict=True)),
        names=run_names,
        groups=groups,
        verdicts=[seeds.seed_verdict(groups[0], group) for group in groups[1:]],
        target=comparison.target,
        columns=run_columns,
        doubts=_timing_warnings(run_columns),
        picture=plots_link,
        different=[[setting, *map(code_span, values)] for setting, values in values_by_setting.items()],
        searches=[_search_values(search) for search in comparison.searches],
        problems=run_problems,
    )


def _search_values(search: dict[str, Any]) -> dict[str, Any]:
    """Return a result of find_batch_size.py with the key `name`, and with None for missing values."""
    search_name = f"{search['script']}, {search['strategy']} x {search['processes']}"
    return fill_missing(search, value_types(SearchResult)) | {"name": search_name}


def page_title(comparison: Comparison) -> str:
    first_run = comparison.runs[0]
    return f"{first_run.model} on {first_run.data_name}: {'; '.join(comparison.names)}"


def _timing_warnings(run_columns: list[dict[str, Any]]) -> list[str]:
    """Return warnings about doubtful times: uneven throughput and efficiencies above 100 %."""
    unsteady_columns = [column for column in run_columns if (column["spread"] or 0) > MAX_THROUGHPUT_SPREAD]
    timing_warnings = [
        f"The throughput of {column['name']} varied by {column['spread']:.0%} of the median during the run."
        " Another program probably used the machine. Repeat the run before you quote the run's time."
        for column in unsteady_columns
    ]
    if names_above := [column["name"] for column in run_columns if (column["efficiency"] or 0) > 1]:
        cause = "was slowed down" if run_columns[0] in unsteady_columns else "may have been slowed down"
        timing_warnings.append(
            f"An efficiency above 100 % ({', '.join(names_above)}) is not caused by the number of processes."
            f" The first run {cause}."
        )
    return timing_warnings


def _run_column(comparison: Comparison, run: RunRecord, run_name: str) -> dict[str, Any]:
    """Return the values in a run's table column, together with the values in its result.json."""
    first_run, result_values = comparison.runs[0], run.result_values
    speed_up, no_speed_up_reason = speed_up_over(first_run, run, "train_s")
    first_processes = first_run.result_values.get("processes")
    processes = result_values.get("processes")
    if run is not first_run and not (first_run.has_constant_hardware and run.has_constant_hardware):
        processes = None  # result.json contains only the last start's processes
    keys_set_by_starts = ("processes", "batch_size", "per_device_batch_size")
    target = math.inf if comparison.target is None else comparison.target  # no accuracy reaches infinity
    efficiency = None
    if speed_up is not None and first_processes and processes:
        efficiency = speed_up * first_processes / processes
    mean_pct, device_type = run.mean_utilisation_pct
    # Times of the evaluations that reached the target accuracy, in order
    times_reached = (line["wall_s"] for line in run.evaluations if line.get("val/accuracy", -1) >= target)
    total_speed_up, _ = speed_up_over(first_run, run, "wall_s")
    return result_values | {
        **{key: run.setting_over_starts(methodcaller("get", key)) for key in keys_set_by_starts},
        "hosts": run.setting_over_starts(host_count),
        "name": run_name,
        "time_to_target": next(times_reached, None),
        "speed_up": speed_up,
        "no_speed_up": no_speed_up_reason,
        "efficiency": efficiency,
        "spread": run.throughput_spread,
        "whole_speed_up": total_speed_up,
        "memory": run.peak_memory_gib,
        "busy": mean_pct and f"{mean_pct:.0f} % of {device_type}s",
        "largest": _largest_batch(run, comparison.searches),
    }


def _largest_batch(run: RunRecord, searches: tuple[dict[str, Any], ...]) -> int | None:
    """Return the largest batch size that a search with the run's settings reported, or None."""
    result_keys = ["script", "strategy", "processes", "mixed_precision", "half_precision", "compile"]
    result_keys += ["grad_checkpointing"]
    if not run.has_constant_hardware:
        return None  # a search describes a single type of job
    for search in searches:
        # The search records only flags that affect memory.
        has_same_recipe = all(
            run.recipe.get(flag) == flag_value for flag, flag_value in search["recipe"].items()
        )
        has_same_sharding = search.get("sharding") == run.recipe_file.get("sharding")
        has_same_settings = all(search.get(key) == run.result_values.get(key) for key in result_keys)
        if has_same_recipe and has_same_sharding and has_same_settings:
            return search.get("answer")
    return None
