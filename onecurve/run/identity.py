"""Determines a run's name, and how a recorded run differs from a new recipe."""

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
    """Return the name of the running script, without .py."""
    return Path(sys.argv[0]).stem


def run_name(accelerator: JobAccelerator, recipe: Recipe, batch: Batch) -> str:
    """Return --name, or else <strategy>_<batch>_<epochs>_<hosts>_<mean processes per host>.

    In scripts with --model, the name begins with the model. The number of hosts includes absent hosts of an
    elastic job.
    """
    if name := recipe.filled_name():
        return name
    hosts, processes = most_hosts(), most_processes()
    strategy = job.strategy(accelerator)
    strategy = "ddp" if strategy == "single" and processes > 1 else strategy
    return f"{model_part(recipe)}{strategy}_{batch.total}_{recipe.epochs}_{hosts}_{processes / hosts:g}"


def model_part(recipe: Recipe) -> str:
    """Return the prefix of run names in scripts with --model, or an empty string in other scripts."""
    return re.sub(r"[^\w.-]+", "_", recipe.model) + "_" if recipe.model else ""


def why_other_run(record: dict[str, Any], recipe: Recipe) -> str:
    """Return why a run does not match this recipe, or "" if the run matches or its recipe is unknown.

    record: Content of the run's recipe.json, or of its owner's record.
    """
    if not isinstance(record.get("recipe"), dict):
        return ""
    if (script := record.get("script")) != script_name():
        return f" ({script}'s)"
    if differing := "; ".join(recipe_differences(record["recipe"], recipe)):
        return f" ({differing}; --allow_changed lists flags that may differ)"
    return ", and --resume is never" if recipe.resume == "never" else ""


def recipe_differences(recorded: dict[str, Any], recipe: Recipe) -> list[str]:
    """List changed flags that --allow_changed does not permit, for example `--epochs was 3, now 10`.

    A flag that is missing in the recorded recipe counts as having the default value.
    """
    current, defaults = (json.loads(json.dumps(recipe_part(r))) for r in (recipe, type(recipe)()))
    removed = [name for name in without_left(recorded) if name in LEFT]
    recorded = recipe.without_derived(defaults | recorded)
    paths = flags_where(type(recipe), "is_path")
    return [f"--{name} was {recorded[name]}, and was removed" for name in removed] + [
        f"--{name} was {recorded[name]}, now {value}"
        for name, value in current.items()
        if comparable(recorded[name], name in paths) != comparable(value, name in paths)
        and name not in recipe.allow_changed
    ]


def only_difference(folder: Path, recipe: Recipe, last_step: int | None) -> str:
    """Return the only flag in which this script's unfinished run differs from the recipe, or ""."""
    record = recorded_recipe(folder) or {}
    is_same_script = record.get("script") == script_name() and isinstance(record.get("recipe"), dict)
    if not is_same_script or has_finished(partial(read_json, folder / "result.json"), last_step):
        return ""
    differing = recipe_differences(record["recipe"], recipe)
    return differing[0] if len(differing) == 1 else ""


def why_not_this_run(folder: Path, recipe: Recipe, last_step: int | None) -> str:
    """Return why the run in a folder is not this run, for example ` (--epochs was 3, now 10)`.

    The result is empty for a folder without a run, and for an unfinished run of this recipe.
    """
    record = recorded_recipe(folder)
    if record is None or not has_trained(folder):
        return ""  # no run, or a run that trained no step; the checkpoint's recipe is compared later
    if reason := why_other_run(record, recipe):
        return reason
    if recipe.resume not in ("auto", record.get("resumed_from")) and not _is_own(folder, recipe.resume):
        return f", which did not begin with --resume {recipe.resume}"
    is_finished = has_finished(partial(read_json, folder / "result.json"), last_step)
    return ", which is finished" if is_finished else ""


def check_recipe(location: str, manifest: dict[str, Any], recipe: Recipe) -> None:
    """Raise ValueError if the checkpoint at `location` (folder or address) belongs to another recipe."""
    recorded = manifest.get("recipe")
    differing = "it has none"
    if isinstance(recorded, dict):
        differing = "; ".join(recipe_differences(recorded, recipe))
    if differing:
        raise ValueError(
            f"{location} is of another recipe ({differing}). Give the same flags, or list the flags that may"
            " differ with --allow_changed"
        )


def has_trained(folder: Path) -> bool:
    """Return True if the run wrote a checkpoint or logged a step."""
    if steps_in(folder / "checkpoints"):
        return True
    return (file := folder / "metrics.jsonl").exists() and any(line.get("step") for line in json_lines(file))


def has_finished(read: Callable[[], Any], last_step: int | None) -> bool:
    """Return True if result.json records that a run has finished.

    Args:
        read: Function that returns the content of result.json.
        last_step: Last step of the new run. An older run that --max_steps ended before this step does not
            count as finished. None accepts any step.
    """
    try:
        result = read()
        done = result["status"] == "finished" and result.get("uploaded") is not False
        by_flag = (result.get("stopped_by") or "--max_steps").startswith("--max_steps")
        return done and (last_step is None or not by_flag or result["steps"] >= last_step)
    except (OSError, ValueError, KeyError, TypeError):
        return False


def recorded_recipe(folder: Path) -> dict[str, Any] | None:
    """Return the content of recipe.json, or None without the file. Raises ValueError if it is unreadable."""
    file = folder / "recipe.json"
    try:
        return read_json(file) if file.exists() else None
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is empty or damaged"
        raise ValueError(
            f"{file} can't be read ({reason}), so the recipe of the run in {folder} is unknown. Remove that"
            " file to continue from the newest checkpoint, or move the folder away to start a new run"
        ) from None


def _is_own(folder: Path, resume: str) -> bool:
    """Return True if --resume names this folder or its newest checkpoint."""
    path, parent = Path(resume).resolve(), folder.resolve() / "checkpoints"
    newest = [parent / step_name(step) for step in steps_in(parent)[:1]]
    return path in (parent.parent, parent, *newest)
