"""A run's starts and settings, and the changes made by each start, for the run's page."""

import shlex
import time
from collections.abc import Callable
from itertools import groupby
from operator import methodcaller
from typing import Any

from markupsafe import Markup

from onecurve.run.starts import MAX_IN_TURN, RunStart
from onecurve.system.paths import public_path
from onecurve.system.text import plural
from tools.logbook.markdown import code_span, text
from tools.logbook.run_record import (
    RunRecord,
    device_summary,
    flag_text,
    mixed_precision,
    recipe_change,
    where,
)

SettingReader = Callable[[dict[str, Any]], Any]  # function that returns a value from a line of starts.jsonl

# Keys of starts.jsonl without a column in the table of starts. Each table row lists changes to these keys.
KEYS_WITHOUT_COLUMN = ["version", "git_commit", "compile", "grad_checkpointing", "step_graph", "threads"]
KEYS_WITHOUT_COLUMN += ["deterministic", "gradient_reduction", "half_precision"]
UNRECORDED = "started by an earlier version without records of starts (settings from the last checkpoint)"


def over_steps(run: RunRecord, value: SettingReader) -> Any:
    """Return the last start's setting, or text such as `a to step 60, then b` if the starts differ."""
    settings_and_steps = [(text(value(start.settings)), start.last) for start in run.kept]
    groups = groupby(settings_and_steps, key=lambda pair: pair[0])
    distinct_settings = [(setting, list(group)[-1][1]) for setting, group in groups]
    if len(distinct_settings) < 2:
        return value(run.last)
    texts = [Markup("{} to step {:,}").format(setting, last) for setting, last in distinct_settings[:-1]]
    texts.append(distinct_settings[-1][0])
    if len(texts) > MAX_IN_TURN:
        left_out = Markup("{} others").format(len(texts) - MAX_IN_TURN + 1)
        texts = [*texts[: MAX_IN_TURN - 2], left_out, texts[-1]]
    return Markup(", then ").join(texts)


def batch(settings: dict[str, Any]) -> str | None:
    """Return the batch as a product, for example `128 = 64 images x 2 processes x 1 accumulation`."""
    names = ("batch_size", "per_device_batch_size", "processes", "accumulation_steps")
    total, share, processes, accumulations = (settings.get(name) for name in names)
    unit = settings.get("unit", "images")
    if None in (total, share, processes, accumulations):
        return f"{total} {unit}" if total else None
    factors = [plural(share, unit.removesuffix("s")), plural(processes, "process")]
    return f"{total} = " + " x ".join([*factors, plural(accumulations, "accumulation")])


def sharding_text(settings: dict[str, Any]) -> str:
    sharding = settings.get("sharding", {})
    return ", ".join(f"{name} {flag_text(value)}" for name, value in sharding.items()) or "none"


def versions_text(settings: dict[str, Any]) -> str | None:
    return ", ".join(f"{name} {version}" for name, version in settings.get("versions", {}).items()) or None


def commit_text(settings: dict[str, Any]) -> str | None:
    commit = settings.get("git_commit")
    return commit and commit.replace("+", " and uncommitted changes")


def host_names(settings: dict[str, Any]) -> str | None:
    hosts = settings.get("hosts")
    return ", ".join(hosts) if isinstance(hosts, list) else None


def data(settings: dict[str, Any]) -> str | None:
    path = settings.get("data")
    return path and public_path(path)


SETTINGS: dict[str, SettingReader] = {
    "batch": batch,
    "mixed precision": mixed_precision,
    "gradients reduced in": methodcaller("get", "gradient_reduction"),
    "compiled": methodcaller("get", "compile"),
    "activation checkpointing": methodcaller("get", "grad_checkpointing"),
    "CUDA graph per step": methodcaller("get", "step_graph"),
    "deterministic": methodcaller("get", "deterministic"),
    "sharding": sharding_text,
    "data": data,
    "hosts": host_names,
    "devices": device_summary,
    "version": methodcaller("get", "version"),
    "commit": commit_text,
    "versions": versions_text,
}


def settings(run: RunRecord) -> list[list[Any]]:
    """Return one row per setting for the page's table."""
    initial_weights = public_path(run.settings.get("resumed_from", "fresh weights"))
    resumed_steps = [f"{start.first:,}" for start in run.kept[1:]]
    noun = "steps" if len(resumed_steps) > 1 else "step"
    resumed = f"; resumed at {noun} {', '.join(resumed_steps)}" if resumed_steps else ""
    rows = [[title, over_steps(run, value)] for title, value in SETTINGS.items()]
    return [*rows, ["started from", initial_weights + resumed]]


def recipe_value(run: RunRecord, name: str) -> Any:
    """Return a flag's value as a code span."""

    def value(settings: dict[str, Any]) -> Any:
        return code_span(public_path(flag_text(settings.get("recipe", {}).get(name))))

    return over_steps(run, value)


def is_default(run: RunRecord, name: str, default: Any) -> bool:
    """Return True if a flag had its default value in all starts."""
    recipes = [start.settings.get("recipe", {}) for start in run.kept]
    return all(recipe.get(name, default) == default for recipe in (*recipes, run.recipe))


def commands(run: RunRecord) -> str:
    """Return the run's command.

    If starts used different commands, return each command after a comment with its steps.
    """
    start_commands = [command(start.settings) for start in run.kept]
    if len(set(start_commands)) < 2:
        return command(run.settings)
    steps = [f"# steps {start.first + 1:,} to {start.last:,}" for start in run.kept]
    commented = zip(steps, start_commands, strict=True)
    return "\n".join(f"{comment}\n{words or '# not recorded'}" for comment, words in commented)


def command(settings: dict[str, Any]) -> str:
    return shlex.join(map(public_path, settings.get("command", [])))


def rows(run: RunRecord) -> list[list[Any]]:
    """Return one row per start, or no rows for a run with a single start."""
    if len(run.starts) < 2:
        return []
    return [_start_row(run, index) for index in range(len(run.starts))]


def _start_row(run: RunRecord, index: int) -> list[Any]:
    start, settings = run.starts[index], run.starts[index].settings
    began_at = time.strftime("%Y-%m-%d %H:%M", time.gmtime(settings["at"])) if "at" in settings else None
    steps = f"{start.first + 1:,} to {start.last:,}" if start.last > start.first else "none"
    previous = next((earlier for earlier in run.starts[:index][::-1] if earlier.first < start.first), None)
    changed = [recipe_change(start), *(_setting_changes(previous, start) if previous else ())]
    if not start.is_recorded:
        changed = [UNRECORDED]
    changes = "; ".join(filter(None, changed)) or None
    return [began_at, steps, where(settings), batch(settings), mixed_precision(settings), changes]


def _setting_changes(previous: RunStart, start: RunStart) -> list[str]:
    """Return changes of settings without a column, for example `torch was 2.11.0, now 2.15.0`."""
    pairs = {name: (previous.settings.get(name), start.settings.get(name)) for name in KEYS_WITHOUT_COLUMN}
    for name in ("versions", "sharding"):
        old, new = previous.settings.get(name, {}), start.settings.get(name, {})
        pairs |= {key: (old.get(key), new.get(key)) for key in old | new}
    pairs["commit"] = pairs.pop("git_commit")
    known = {name: pair for name, pair in pairs.items() if None not in pair}
    changed = [(name, *map(flag_text, pair)) for name, pair in known.items() if pair[0] != pair[1]]
    return [f"{name} was {old}, now {new}" for name, old, new in changed]


def resume_verdict(run: RunRecord) -> str:
    """State whether later starts changed the training. Return an empty string for a single start."""
    if len(run.kept) < 2:
        return ""
    if run.recipe_changes:
        return f"The recipe changed. {'. '.join(change.capitalize() for change in run.recipe_changes)}."
    if not run.kept[0].is_recorded:
        return "The run does not record whether all steps were trained with the same recipe."
    if len({str(start.settings.get("git_commit")) for start in run.kept}) > 1:
        consequence = "The new code may have affected the training result."
        return f"The recipe did not change, but the commit changed. {consequence}"
    if len({start.settings.get("per_device_batch_size") for start in run.kept}) > 1:
        return (
            "The recipe did not change, but the number of images per forward pass changed. BatchNorm,"
            " dropout, drop path and mixup depend on this number. Training without these methods changed"
            " only by rounding."
        )
    return "The recipe did not change, so the restarts changed the training only by rounding."
