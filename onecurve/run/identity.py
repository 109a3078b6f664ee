"""Determines a run's name and the differences between a recorded run and a new recipe."""

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
from onecurve.flags.fields import REMOVED_FLAGS, flags_where, without_removed
from onecurve.flags.recipe import Batch, Recipe, recipe_part
from onecurve.run.starts import comparable
from onecurve.system.files import json_lines, read_json


def script_name() -> str:
    """Return the name of the running script without the .py extension."""
    return Path(sys.argv[0]).stem


def run_name(accelerator: JobAccelerator, recipe: Recipe, batch: Batch) -> str:
    """Return --name or, by default, <strategy>_<batch>_<epochs>_<hosts>_<mean processes per host>.

    In scripts with --model, the default name begins with the model. In an elastic job, the number of hosts
    includes absent hosts.
    """
    if name := recipe.filled_name():
        return name
    hosts, processes = most_hosts(), most_processes()
    strategy = job.strategy(accelerator)
    strategy = "ddp" if strategy == "single" and processes > 1 else strategy
    return f"{model_prefix(recipe)}{strategy}_{batch.total}_{recipe.epochs}_{hosts}_{processes / hosts:g}"


def model_prefix(recipe: Recipe) -> str:
    """Return the prefix that scripts with --model add to run names, or an empty string in other scripts."""
    return re.sub(r"[^\w.-]+", "_", recipe.model) + "_" if recipe.model else ""


def why_other_run(record: dict[str, Any], recipe: Recipe) -> str:
    """Return the reason why a run does not match a recipe.

    The reason is empty if the run matches the recipe, or if the run's recipe is unknown. `record` is the
    content of the run's recipe.json or owner.json.
    """
    if not isinstance(record.get("recipe"), dict):
        return ""
    if (script := record.get("script")) != script_name():
        return f" of the script {script}"
    if differences := "; ".join(recipe_differences(record["recipe"], recipe)):
        return f" with a different recipe ({differences}; --allow_changed can permit changed flags)"
    return ", but --resume never requires a new run" if recipe.resume == "never" else ""


def recipe_differences(recorded_flags: dict[str, Any], recipe: Recipe) -> list[str]:
    """List the changed flags that --allow_changed does not permit, such as `--epochs was 3, now 10`.

    If a flag is missing from the recorded recipe, its default is used for the comparison.
    """
    # Convert each value to the type it has after a JSON round trip
    current_flags = json.loads(json.dumps(recipe_part(recipe)))
    defaults = json.loads(json.dumps(recipe_part(type(recipe)())))
    removed = [name for name in without_removed(recorded_flags) if name in REMOVED_FLAGS]
    recorded_flags = recipe.without_derived(defaults | recorded_flags)
    path_flags = flags_where(type(recipe), "is_path")
    return [f"--{name} was {recorded_flags[name]}, but this flag no longer exists" for name in removed] + [
        f"--{name} was {recorded_flags[name]}, now {value}"
        for name, value in current_flags.items()
        if comparable(recorded_flags[name], name in path_flags) != comparable(value, name in path_flags)
        and name not in recipe.allow_changed
    ]


def only_difference(folder: Path, recipe: Recipe, last_step: int | None) -> str:
    """Describe the only flag in which this script's unfinished run differs from a recipe, or return ""."""
    record = recorded_recipe(folder) or {}
    is_same_script = record.get("script") == script_name() and isinstance(record.get("recipe"), dict)
    if not is_same_script or has_finished(partial(read_json, folder / "result.json"), last_step):
        return ""
    differences = recipe_differences(record["recipe"], recipe)
    return differences[0] if len(differences) == 1 else ""


def why_not_this_run(folder: Path, recipe: Recipe, last_step: int | None) -> str:
    """Return the reason why this recipe can't resume the run in a folder, such as `, which is finished`.

    The reason is empty for a folder without a run, and for an unfinished run of this recipe.
    """
    record = recorded_recipe(folder)
    if record is None or not has_trained(folder):
        return ""  # No step was trained. The checkpoint's recipe is compared later
    if reason := why_other_run(record, recipe):
        return reason
    if recipe.resume not in ("auto", record.get("resumed_from")) and not _is_own_path(folder, recipe.resume):
        return f", which did not begin with --resume {recipe.resume}"
    is_finished = has_finished(partial(read_json, folder / "result.json"), last_step)
    return ", which is finished" if is_finished else ""


def check_recipe(location: str, manifest: dict[str, Any], recipe: Recipe) -> None:
    """Raise ValueError if the checkpoint at `location` (a folder or address) has a different recipe."""
    recorded = manifest.get("recipe")
    differences = "the checkpoint contains no recipe"
    if isinstance(recorded, dict):
        differences = "; ".join(recipe_differences(recorded, recipe))
    if differences:
        raise ValueError(
            f"{location} belongs to a different recipe ({differences}). Specify the same flags, or list the"
            " changed flags in --allow_changed"
        )


def has_trained(folder: Path) -> bool:
    """Return True if the run in the folder wrote a checkpoint or logged a step."""
    if steps_in(folder / "checkpoints"):
        return True
    return (log := folder / "metrics.jsonl").exists() and any(entry.get("step") for entry in json_lines(log))


def has_finished(read_result: Callable[[], Any], last_step: int | None) -> bool:
    """Return True if result.json records that a run has finished.

    Args:
        read_result: Function that returns the content of result.json.
        last_step: Last step of the new run. The function returns False if --max_steps ended the recorded run
            before this step. If last_step is None, the recorded run may end at any step.
    """
    try:
        result = read_result()
        is_complete = result["status"] == "finished" and result.get("uploaded") is not False
        may_continue = (result.get("stopped_by") or "--max_steps").startswith("--max_steps")
        has_all_steps = last_step is None or not may_continue or result["steps"] >= last_step
        return is_complete and has_all_steps
    except (OSError, ValueError, KeyError, TypeError):
        return False


def recorded_recipe(folder: Path) -> dict[str, Any] | None:
    """Return the content of recipe.json, or None without that file. Raise ValueError if reading fails."""
    file = folder / "recipe.json"
    try:
        return read_json(file) if file.exists() else None
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else "the file is empty or damaged"
        raise ValueError(
            f"{file} can't be read ({reason}), so the recipe of the run in {folder} is unknown. Delete the"
            " file to resume from the newest checkpoint, or move the folder to start a new run"
        ) from None


def _is_own_path(folder: Path, resume: str) -> bool:
    """Return True if --resume specifies this run's folder or the newest checkpoint in it."""
    resume_path, own_checkpoints = Path(resume).resolve(), folder.resolve() / "checkpoints"
    newest_checkpoint = [own_checkpoints / step_name(step) for step in steps_in(own_checkpoints)[:1]]
    return resume_path in (own_checkpoints.parent, own_checkpoints, *newest_checkpoint)
