"""Identity of a run: its name, and how a recorded run differs from a new recipe."""

import json
import re
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from onecurve.checkpoint.format import step_name, steps_in
from onecurve.distributed import strategy as job
from onecurve.distributed.job_accelerator import JobAccelerator
from onecurve.distributed.rendezvous import most_hosts, most_processes
from onecurve.flags.fields import LEFT, flags_where, without_left
from onecurve.flags.recipe import Batch, Recipe, recipe_part
from onecurve.run.starts import comparable
from onecurve.system.files import json_lines, read_json


def script_name() -> str:
    return Path(sys.argv[0]).stem


def run_name(accelerator: JobAccelerator, recipe: Recipe, batch: Batch) -> str:
    """--name, else <strategy>_<batch>_<epochs>_<hosts>_<mean processes per host>, after the model of a script
    that has --model; hosts that are away count, too."""
    if name := recipe.filled_name():
        return name
    hosts, processes = most_hosts(), most_processes()
    strategy = job.strategy(accelerator)
    strategy = "ddp" if strategy == "single" and processes > 1 else strategy
    return f"{model_part(recipe)}{strategy}_{batch.total}_{recipe.epochs}_{hosts}_{processes / hosts:g}"


def model_part(recipe: Recipe) -> str:
    """What stands before the name of a run whose script has --model."""
    return re.sub(r"[^\w.-]+", "_", recipe.model) + "_" if recipe.model else ""


def why_other_run(record: dict[str, Any], recipe: Recipe) -> str:
    """Why a run is not one of this recipe; empty if it is, or if that is unknown.

    record: its recipe.json, or its owner's record.
    """
    if not isinstance(record.get("recipe"), dict):
        return ""
    if (script := record.get("script")) != script_name():
        return f" ({script}'s)"
    if differing := "; ".join(recipe_differences(record["recipe"], recipe)):
        return f" ({differing}; --allow_changed names what may differ)"
    return ", and --resume is never" if recipe.resume == "never" else ""


def recipe_differences(theirs: dict[str, Any], recipe: Recipe) -> list[str]:
    """The flags that differ, each as `--epochs was 3, now 10`, without those that --allow_changed names.
    A flag that is missing in the other recipe counts as its default."""
    ours, defaults = (json.loads(json.dumps(recipe_part(r))) for r in (recipe, type(recipe)()))
    left = [name for name in without_left(theirs) if name in LEFT]
    theirs = recipe.without_derived(defaults | theirs)
    paths = flags_where(type(recipe), "is_path")
    return [f"--{name} was {theirs[name]}, and has left" for name in left] + [
        f"--{key} was {theirs[key]}, now {value}"
        for key, value in ours.items()
        if comparable(theirs[key], key in paths) != comparable(value, key in paths)
        and key not in recipe.allow_changed
    ]


def only_difference(folder: Path, recipe: Recipe, last_step: int | None) -> str:
    """The one flag in which an unfinished run of this script differs from the recipe; else empty."""
    record = recorded_recipe(folder) or {}
    is_ours = record.get("script") == script_name() and isinstance(record.get("recipe"), dict)
    if not is_ours or has_finished(partial(read_json, folder / "result.json"), last_step):
        return ""
    differing = recipe_differences(record["recipe"], recipe)
    return differing[0] if len(differing) == 1 else ""


def why_not_this_run(folder: Path, recipe: Recipe, last_step: int | None) -> str:
    """Why the folder holds another run, as ` (--epochs was 3, now 10)`; empty if it holds none, or this."""
    record = recorded_recipe(folder)
    if record is None or not has_trained(folder):
        return ""  # empty, or stopped before its first step: the checkpoint's recipe is compared later
    if reason := why_other_run(record, recipe):
        return reason
    if recipe.resume not in ("auto", record.get("resumed_from")) and not _is_own(folder, recipe.resume):
        return f", which did not begin at --resume {recipe.resume}"
    is_finished = has_finished(partial(read_json, folder / "result.json"), last_step)
    return ", which is finished" if is_finished else ""


def check_recipe(where: str, manifest: dict[str, Any], recipe: Recipe) -> None:
    theirs = manifest.get("recipe")
    differing = "; ".join(recipe_differences(theirs, recipe)) if isinstance(theirs, dict) else "it has none"
    if differing:
        raise ValueError(
            f"{where} is of another recipe ({differing}): give the same flags, or name with"
            " --allow_changed what may differ"
        )


def has_trained(folder: Path) -> bool:
    """True for a run with a checkpoint, or with a step in its log."""
    if steps_in(folder / "checkpoints"):
        return True
    return (file := folder / "metrics.jsonl").exists() and any(line.get("step") for line in json_lines(file))


def has_finished(read: Callable[[], Any], last_step: int | None) -> bool:
    """read(): the content of result.json."""
    try:
        result = read()
        done = result["status"] == "finished" and result.get("uploaded") is not False
        by_flag = (result.get("stopped_by") or "--max_steps").startswith("--max_steps")
        return done and (last_step is None or not by_flag or result["steps"] >= last_step)
    except (OSError, ValueError, KeyError, TypeError):
        return False


def recorded_recipe(folder: Path) -> dict[str, Any] | None:
    """The content of recipe.json; None without that file. ValueError when it can't be read."""
    file = folder / "recipe.json"
    try:
        return read_json(file) if file.exists() else None
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is empty or damaged"
        raise ValueError(
            f"{file} can't be read ({reason}), so the run in {folder} is not known: remove that file to"
            " continue from its newest checkpoint, or move the folder away to start afresh"
        ) from None


def _is_own(folder: Path, resume: str) -> bool:
    """True when --resume names this folder, or its own newest checkpoint."""
    path, parent = Path(resume).resolve(), folder.resolve() / "checkpoints"
    newest = [parent / step_name(step) for step in steps_in(parent)[:1]]
    return path in (parent.parent, parent, *newest)
