"""Starts of a run, shown on its page with the changes that each start made and all settings."""

import shlex
import time
from collections.abc import Callable
from itertools import groupby
from operator import methodcaller
from typing import Any

from markupsafe import Markup

from onecurve.run.starts import MOST_IN_TURN, Start
from onecurve.system.paths import public_path
from onecurve.system.text import plural
from tools.logbook.markdown import code_span, text
from tools.logbook.run_record import RunRecord, as_flag, device_summary, mixed_precision, recipe_change, where

Value = Callable[[dict[str, Any]], Any]  # returns a value from a line of starts.jsonl

# Keys of starts.jsonl that are not columns in the table of starts. Each row lists the keys that changed.
KEYS_WITHOUT_COLUMN = ["version", "git_commit", "compile", "grad_checkpointing", "step_graph", "threads"]
KEYS_WITHOUT_COLUMN += ["deterministic", "gradient_reduction", "half_precision"]


def over_steps(run: RunRecord, value: Value) -> Any:
    """Return the setting of the last start, or text such as `a to step 60, then b` if the starts differ."""
    pairs = [(text(value(start.about)), start.last) for start in run.kept]
    runs = [(setting, list(group)[-1][1]) for setting, group in groupby(pairs, key=lambda pair: pair[0])]
    if len(runs) < 2:
        return value(run.last)
    parts = [Markup("{} to step {:,}").format(setting, last) for setting, last in runs[:-1]] + [runs[-1][0]]
    if len(parts) > MOST_IN_TURN:
        left_out = Markup("{} others").format(len(parts) - MOST_IN_TURN + 1)
        parts = [*parts[: MOST_IN_TURN - 2], left_out, parts[-1]]
    return Markup(", then ").join(parts)


def batch(settings: dict[str, Any]) -> str | None:
    """Return the batch as a product, for example `128 = 64 images x 2 processes x 1 accumulation`."""
    names = ("batch_size", "per_device_batch_size", "processes", "accumulation_steps")
    total, share, processes, accumulations = (settings.get(name) for name in names)
    unit = settings.get("unit", "images")
    if None in (total, share, processes, accumulations):
        return f"{total} {unit}" if total else None
    factors = plural(share, unit.removesuffix("s")), plural(processes, "process")
    return " x ".join([f"{total} = {factors[0]}", factors[1], plural(accumulations, "accumulation")])


def sharding_text(settings: dict[str, Any]) -> str:
    sharding = settings.get("sharding", {})
    return ", ".join(f"{name} {as_flag(value)}" for name, value in sharding.items()) or "none"


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


SETTINGS: dict[str, Value] = {
    "batch": batch,
    "mixed precision": mixed_precision,
    "gradients reduced in": methodcaller("get", "gradient_reduction"),
    "compiled": methodcaller("get", "compile"),
    "activation checkpointing": methodcaller("get", "grad_checkpointing"),
    "a CUDA graph for each step": methodcaller("get", "step_graph"),
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
    """Return one row per setting."""
    began = public_path(run.about.get("resumed_from", "fresh weights"))
    steps = [f"{start.first:,}" for start in run.kept[1:]]
    resumed = f"; resumed at {'steps' if len(steps) > 1 else 'step'} {', '.join(steps)}" if steps else ""
    rows = [[title, over_steps(run, value)] for title, value in SETTINGS.items()]
    return [*rows, ["started from", began + resumed]]


def recipe_value(run: RunRecord, name: str) -> Any:
    """Return the value of a flag as a code span."""

    def value(settings: dict[str, Any]) -> Any:
        return code_span(public_path(as_flag(settings.get("recipe", {}).get(name))))

    return over_steps(run, value)


def is_default(run: RunRecord, name: str, default: Any) -> bool:
    """Return True if a flag had its default value in all starts."""
    recipes = [start.about.get("recipe", {}) for start in run.kept]
    return all(recipe.get(name, default) == default for recipe in (*recipes, run.recipe))


def commands(run: RunRecord) -> str:
    """Return the run's command, or all commands, each after a comment with its steps, if they differ."""
    pairs = [(command(start.about), f"# steps {start.first + 1:,} to {start.last:,}") for start in run.kept]
    if len({words for words, _ in pairs}) < 2:
        return command(run.about)
    return "\n".join(f"{steps}\n{words or '# not recorded'}" for words, steps in pairs)


def command(settings: dict[str, Any]) -> str:
    return shlex.join(map(public_path, settings.get("command", [])))


def rows(run: RunRecord) -> list[list[Any]]:
    """Return one row per start, or no rows if there was only one start."""
    return [_row(run, k) for k in range(len(run.starts))] if len(run.starts) > 1 else []


def _row(run: RunRecord, k: int) -> list[Any]:
    start, settings = run.starts[k], run.starts[k].about
    at = time.strftime("%Y-%m-%d %H:%M", time.gmtime(settings["at"])) if "at" in settings else None
    steps = f"{start.first + 1:,} to {start.last:,}" if start.last > start.first else "none"
    before = next((earlier for earlier in run.starts[:k][::-1] if earlier.first < start.first), None)
    changed = [recipe_change(start), *(_setting_changes(before, start) if before else ())]
    changes = "; ".join(filter(None, changed)) or None
    if not start.is_recorded:
        changes = "started by an earlier version that did not record starts; values from its last checkpoint"
    return [at, steps, where(settings), batch(settings), mixed_precision(settings), changes]


def _setting_changes(before: Start, now: Start) -> list[str]:
    """Return changes of settings that have no column, for example `torch was 2.11.0, now 2.15.0`."""
    pairs = {name: (before.about.get(name), now.about.get(name)) for name in KEYS_WITHOUT_COLUMN}
    for name in ("versions", "sharding"):
        old, new = before.about.get(name, {}), now.about.get(name, {})
        pairs |= {key: (old.get(key), new.get(key)) for key in old | new}
    pairs["commit"] = pairs.pop("git_commit")
    known = {name: pair for name, pair in pairs.items() if None not in pair}
    return [
        f"{name} was {as_flag(old)}, now {as_flag(new)}" for name, (old, new) in known.items() if old != new
    ]


def resume_verdict(run: RunRecord) -> str:
    """State whether later starts changed the training. Return an empty text if there was only one start."""
    if len(run.kept) < 2:
        return ""
    if run.recipe_changes:
        return f"The recipe changed. {'. '.join(change.capitalize() for change in run.recipe_changes)}."
    if not run.kept[0].is_recorded:
        return "It is not recorded whether all steps were trained with the same recipe."
    if len({str(start.about.get("git_commit")) for start in run.kept}) > 1:
        return "The recipe did not change, but the commit did. The training may have changed with the code."
    if len({start.about.get("per_device_batch_size") for start in run.kept}) > 1:
        return (
            "The recipe did not change, but the number of images per forward pass did. BatchNorm, dropout,"
            " drop path and mixup depend on it. Without them, the training is unchanged up to rounding."
        )
    return "The recipe did not change, so the training is unchanged up to rounding."
