"""A run's starts and settings, and the changes made by each start, for the run's page."""

import shlex
import time
from itertools import groupby
from operator import methodcaller
from typing import Any

from markupsafe import Markup

from onecurve.run.starts import MAX_JOINED_VALUES, RunStart
from onecurve.system.paths import public_path
from onecurve.system.text import plural
from tools.logbook.markdown import code_span, text
from tools.logbook.run_record import (
    RunRecord,
    SettingReader,
    devices_text,
    flag_text,
    mixed_precision_text,
    recipe_change,
    strategy_and_devices,
)

# Keys of starts.jsonl without a column in the table of starts. Each table row lists changes to these keys.
KEYS_WITHOUT_COLUMN = ["version", "git_commit", "compile", "grad_checkpointing", "step_graph", "threads"]
KEYS_WITHOUT_COLUMN += ["deterministic", "gradient_reduction", "half_precision"]
UNRECORDED = "started by an earlier version without records of starts (settings from the last checkpoint)"


def setting_over_steps(run: RunRecord, read_setting: SettingReader) -> Any:
    """Return the last start's setting, or text such as `a to step 60, then b` if the starts differ.

    `read_setting` reads the setting from a start's line of starts.jsonl.
    """
    kept_starts = run.kept_starts
    settings_and_steps = [(text(read_setting(start.settings)), start.last_kept_step) for start in kept_starts]
    starts_by_setting = groupby(settings_and_steps, key=lambda setting_and_step: setting_and_step[0])
    settings_in_order = []  # each setting with the last step that was trained with the setting
    for setting, consecutive_starts in starts_by_setting:
        *_, (_, last_step) = consecutive_starts  # the last of these starts
        settings_in_order.append((setting, last_step))
    if len(settings_in_order) < 2:
        return read_setting(run.last_start_settings)
    *earlier_settings, (last_setting, _) = settings_in_order
    setting_texts = [Markup("{} to step {:,}").format(setting, step) for setting, step in earlier_settings]
    setting_texts.append(last_setting)
    if len(setting_texts) > MAX_JOINED_VALUES:
        others_text = Markup("{} others").format(len(setting_texts) - MAX_JOINED_VALUES + 1)
        setting_texts = [*setting_texts[: MAX_JOINED_VALUES - 2], others_text, setting_texts[-1]]
    return Markup(", then ").join(setting_texts)


def batch_text(settings: dict[str, Any]) -> str | None:
    """Return the batch as a product, for example `128 = 64 images x 2 processes x 1 accumulation`."""
    setting_keys = ("batch_size", "per_device_batch_size", "processes", "accumulation_steps")
    batch_size, per_device, processes, accumulations = (settings.get(key) for key in setting_keys)
    sample_unit = settings.get("unit", "images")
    if None in (batch_size, per_device, processes, accumulations):  # not recorded by earlier versions
        return f"{batch_size} {sample_unit}" if batch_size else None
    batch_factors = [plural(per_device, sample_unit.removesuffix("s")), plural(processes, "process")]
    return f"{batch_size} = " + " x ".join([*batch_factors, plural(accumulations, "accumulation")])


def sharding_text(settings: dict[str, Any]) -> str:
    """Return all sharding settings with their values as text, or `none`."""
    value_by_setting = settings.get("sharding", {})
    setting_texts = [f"{setting_name} {flag_text(value)}" for setting_name, value in value_by_setting.items()]
    return ", ".join(setting_texts) or "none"


def versions_text(settings: dict[str, Any]) -> str | None:
    """Return all package versions as text, such as `torch 2.11.0, timm 1.0.20`, or None if unrecorded."""
    version_by_package = settings.get("versions", {})
    return ", ".join(f"{package} {version}" for package, version in version_by_package.items()) or None


def commit_text(settings: dict[str, Any]) -> str | None:
    commit = settings.get("git_commit")  # ends with "+" if the working tree had uncommitted changes
    return commit and commit.replace("+", " and uncommitted changes")


def host_names_text(settings: dict[str, Any]) -> str | None:
    """Return the host names as text, or None if only the number of hosts is recorded."""
    hosts = settings.get("hosts")
    return ", ".join(hosts) if isinstance(hosts, list) else None


def data_text(settings: dict[str, Any]) -> str | None:
    """Return the value of --data without private parts of its path, or None if it is unrecorded."""
    data_path = settings.get("data")
    return data_path and public_path(data_path)


# Rows of the settings table: each row's title, and the function that reads the setting
SETTING_READERS: dict[str, SettingReader] = {
    "batch": batch_text,
    "mixed precision": mixed_precision_text,
    "gradients reduced in": methodcaller("get", "gradient_reduction"),
    "compiled": methodcaller("get", "compile"),
    "activation checkpointing": methodcaller("get", "grad_checkpointing"),
    "CUDA graph per step": methodcaller("get", "step_graph"),
    "deterministic": methodcaller("get", "deterministic"),
    "sharding": sharding_text,
    "data": data_text,
    "hosts": host_names_text,
    "devices": devices_text,
    "version": methodcaller("get", "version"),
    "commit": commit_text,
    "versions": versions_text,
}


def setting_rows(run: RunRecord) -> list[list[Any]]:
    """Return one row per setting for the page's table: its title, and its values over the run's steps."""
    initial_weights = public_path(run.recipe_file.get("resumed_from", "fresh weights"))
    resumed_steps = [f"{start.begin_step:,}" for start in run.kept_starts[1:]]
    step_noun = "steps" if len(resumed_steps) > 1 else "step"
    resumed_text = f"; resumed at {step_noun} {', '.join(resumed_steps)}" if resumed_steps else ""
    rows = [[title, setting_over_steps(run, read_setting)] for title, read_setting in SETTING_READERS.items()]
    return [*rows, ["started from", initial_weights + resumed_text]]


def recipe_value(run: RunRecord, flag: str) -> Any:
    """Return a flag's value as a code span, or text with all its values if a start changed the flag."""

    def read_flag_value(settings: dict[str, Any]) -> Any:
        return code_span(public_path(flag_text(settings.get("recipe", {}).get(flag))))

    return setting_over_steps(run, read_flag_value)


def is_default(run: RunRecord, flag: str, default: Any) -> bool:
    """Return True if a flag had its default value in all starts."""
    recipes = [run.recipe, *(start.settings.get("recipe", {}) for start in run.kept_starts)]
    return all(recipe.get(flag, default) == default for recipe in recipes)


def commands_text(run: RunRecord) -> str:
    """Return the run's command.

    If starts used different commands, return each command after a comment with its steps.
    """
    start_commands = [command_text(start.settings) for start in run.kept_starts]
    if len(set(start_commands)) < 2:
        return command_text(run.recipe_file)
    comments = [f"# steps {start.begin_step + 1:,} to {start.last_kept_step:,}" for start in run.kept_starts]
    commented_commands = zip(comments, start_commands, strict=True)
    return "\n".join(f"{comment}\n{command or '# not recorded'}" for comment, command in commented_commands)


def command_text(settings: dict[str, Any]) -> str:
    """Return the recorded command for a shell, without private parts of paths. Empty if unrecorded."""
    public_words = map(public_path, settings.get("command", []))
    return shlex.join(public_words)


def start_rows(run: RunRecord) -> list[list[Any]]:
    """Return one row per start, or no rows for a run with a single start."""
    if len(run.starts) < 2:
        return []
    return [_start_row(run, start_index) for start_index in range(len(run.starts))]


def _start_row(run: RunRecord, start_index: int) -> list[Any]:
    """Return a start's date, steps, hardware, batch, mixed precision and changes, for the table of starts."""
    start = run.starts[start_index]
    start_settings, earlier_starts = start.settings, run.starts[:start_index]
    began_at = (
        time.strftime("%Y-%m-%d %H:%M", time.gmtime(start_settings["at"])) if "at" in start_settings else None
    )
    steps = f"{start.begin_step + 1:,} to {start.last_kept_step:,}" if start.trains_kept_steps else "none"
    # This start resumed a checkpoint of the newest earlier start that began at an earlier step.
    previous_starts = (earlier for earlier in earlier_starts[::-1] if earlier.begin_step < start.begin_step)
    previous_start = next(previous_starts, None)
    changes = [recipe_change(start), *(_setting_changes(previous_start, start) if previous_start else ())]
    if not start.is_recorded:  # its changes are unknown
        changes = [UNRECORDED]
    changes_text = "; ".join(filter(None, changes)) or None
    hardware, precision = strategy_and_devices(start_settings), mixed_precision_text(start_settings)
    return [began_at, steps, hardware, batch_text(start_settings), precision, changes_text]


def _setting_changes(previous: RunStart, start: RunStart) -> list[str]:
    """Return changes of settings without a column, for example `torch was 2.11.0, now 2.15.0`."""
    # {setting name: (old value, new value)}; None for an unrecorded value
    old_and_new = {key: (previous.settings.get(key), start.settings.get(key)) for key in KEYS_WITHOUT_COLUMN}
    for section in ("versions", "sharding"):
        old_values, new_values = previous.settings.get(section, {}), start.settings.get(section, {})
        old_and_new |= {key: (old_values.get(key), new_values.get(key)) for key in old_values | new_values}
    old_and_new["commit"] = old_and_new.pop("git_commit")
    return [
        f"{setting_name} was {flag_text(old_value)}, now {flag_text(new_value)}"
        for setting_name, (old_value, new_value) in old_and_new.items()
        if None not in (old_value, new_value) and old_value != new_value
    ]


def resume_verdict(run: RunRecord) -> str:
    """State whether later starts changed the training. Return an empty string for a single start."""
    if len(run.kept_starts) < 2:
        return ""
    if run.recipe_changes:
        return f"The recipe changed. {'. '.join(change.capitalize() for change in run.recipe_changes)}."
    if not run.kept_starts[0].is_recorded:
        return "The run does not record whether all steps were trained with the same recipe."
    start_commits = {str(start.settings.get("git_commit")) for start in run.kept_starts}
    if len(start_commits) > 1:
        consequence = "The new code may have affected the training result."
        return f"The recipe did not change, but the commit changed. {consequence}"
    per_device_batch_sizes = {start.settings.get("per_device_batch_size") for start in run.kept_starts}
    if len(per_device_batch_sizes) > 1:
        return (
            "The recipe did not change, but the number of images per forward pass changed. BatchNorm,"
            " dropout, drop path and mixup depend on this number. Training without these methods changed"
            " only by rounding."
        )
    return "The recipe did not change, so the restarts changed the training only by rounding."
