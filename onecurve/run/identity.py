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
from onecurve.distributed.rendezvous import max_host_count, max_process_count
from onecurve.flags.fields import REMOVED_FLAGS, flags_where, without_removed_flags
from onecurve.flags.recipe import Batch, Recipe, recipe_part
from onecurve.run.starts import normalised_value
from onecurve.system.files import json_lines, read_json


def script_name() -> str:
    """Return the name of the running script without the .py extension."""
    return Path(sys.argv[0]).stem


def run_name(accelerator: JobAccelerator, recipe: Recipe, batch: Batch) -> str:
    """Return --name or, by default, <strategy>_<batch>_<epochs>_<hosts>_<mean processes per host>.

    In scripts with --model, the default name begins with the model. In an elastic job, the number of hosts
    includes absent hosts.
    """
    if given_name := recipe.filled_name():
        return given_name
    host_count, process_count = max_host_count(), max_process_count()
    strategy = job.strategy(accelerator)
    if strategy == "single" and process_count > 1:  # Only one host of an elastic job is present
        strategy = "ddp"
    default_name = f"{strategy}_{batch.total}_{recipe.epochs}_{host_count}_{process_count / host_count:g}"
    return model_prefix(recipe) + default_name


def model_prefix(recipe: Recipe) -> str:
    """Return the prefix that scripts with --model add to run names, or an empty string in other scripts."""
    return re.sub(r"[^\w.-]+", "_", recipe.model) + "_" if recipe.model else ""


def why_other_run(recorded_run: dict[str, Any], recipe: Recipe) -> str:
    """Return the reason why a run does not match a recipe.

    The reason follows `contains a run` in a message, such as ` of the script train_vit`. The reason is empty
    if the run matches the recipe, or if the run's recipe is unknown. `recorded_run` is the content of the
    run's recipe.json or owner.json.
    """
    if not isinstance(recorded_run.get("recipe"), dict):
        return ""
    recorded_script = recorded_run.get("script")
    if recorded_script != script_name():
        return f" of the script {recorded_script}"
    if flag_differences := "; ".join(recipe_differences(recorded_run["recipe"], recipe)):
        return f" with a different recipe ({flag_differences}; --allow_changed can permit changed flags)"
    return ", but --resume never requires a new run" if recipe.resume == "never" else ""


def recipe_differences(recorded_flags: dict[str, Any], recipe: Recipe) -> list[str]:
    """List the changed flags that --allow_changed does not permit, such as `--epochs was 3, now 10`.

    If a flag is missing from the recorded recipe, its default is used for the comparison.
    """
    # Convert each value to the type it has after a JSON round trip
    current_flags = json.loads(json.dumps(recipe_part(recipe)))
    default_flags = json.loads(json.dumps(recipe_part(type(recipe)())))
    removed_flags = [flag for flag in without_removed_flags(recorded_flags) if flag in REMOVED_FLAGS]
    # A value that both recipes derive from a different flag is not a difference.
    recorded_flags = recipe.without_derived(default_flags | recorded_flags)
    path_flags = flags_where(type(recipe), "is_path")
    flag_differences = [
        f"--{flag} was {recorded_flags[flag]}, but this flag no longer exists" for flag in removed_flags
    ]
    for flag, current_value in current_flags.items():
        recorded_value, is_path = recorded_flags[flag], flag in path_flags
        has_changed = normalised_value(recorded_value, is_path) != normalised_value(current_value, is_path)
        if has_changed and flag not in recipe.allow_changed:
            flag_differences.append(f"--{flag} was {recorded_value}, now {current_value}")
    return flag_differences


def only_difference(folder: Path, recipe: Recipe, last_step: int | None) -> str:
    """Describe the flag in which this script's unfinished run in a folder differs from a recipe.

    The description has a form such as `--epochs was 3, now 10`. It is empty if the folder contains no such
    run, or if the number of different flags is not 1.
    """
    recorded_run = read_recipe_file(folder) or {}
    recorded_flags = recorded_run.get("recipe")
    is_same_script = recorded_run.get("script") == script_name() and isinstance(recorded_flags, dict)
    if not is_same_script or has_finished(partial(read_json, folder / "result.json"), last_step):
        return ""
    flag_differences = recipe_differences(recorded_run["recipe"], recipe)
    if len(flag_differences) != 1:
        return ""
    [flag_difference] = flag_differences
    return flag_difference


def why_not_this_run(folder: Path, recipe: Recipe, last_step: int | None) -> str:
    """Return the reason why this recipe can't resume the run in a folder, such as `, which is finished`.

    The reason is empty for a folder without a run, and for an unfinished run of this recipe.
    """
    recorded_run = read_recipe_file(folder)
    if recorded_run is None or not has_trained(folder):
        return ""  # No step was trained. The checkpoint's recipe is compared later
    if mismatch_reason := why_other_run(recorded_run, recipe):
        return mismatch_reason
    accepts_start = recipe.resume in ("auto", recorded_run.get("resumed_from"))
    if not accepts_start and not _is_path_in_run(recipe.resume, folder):
        return f", which did not begin with --resume {recipe.resume}"
    is_run_finished = has_finished(partial(read_json, folder / "result.json"), last_step)
    return ", which is finished" if is_run_finished else ""


def require_same_recipe(location: str, manifest: dict[str, Any], recipe: Recipe) -> None:
    """Raise ValueError if the checkpoint at `location` (a folder or address) has a different recipe."""
    recorded_flags = manifest.get("recipe")
    differences = "the checkpoint contains no recipe"
    if isinstance(recorded_flags, dict):
        differences = "; ".join(recipe_differences(recorded_flags, recipe))
    if differences:
        raise ValueError(
            f"{location} belongs to a different recipe ({differences}). Specify the same flags, or list the"
            " changed flags in --allow_changed"
        )


def has_trained(folder: Path) -> bool:
    """Return True if the run in the folder wrote a checkpoint or logged a step."""
    if steps_in(folder / "checkpoints"):
        return True
    metrics_file = folder / "metrics.jsonl"
    return metrics_file.exists() and any(log_entry.get("step") for log_entry in json_lines(metrics_file))


def has_finished(read_result: Callable[[], Any], last_step: int | None) -> bool:
    """Return True if result.json records that a run has finished.

    Args:
        read_result: Function that returns the content of result.json.
        last_step: Last step of the new run. The function returns False if --max_steps ended the recorded run
            before this step. If last_step is None, the recorded run may end at any step.
    """
    try:
        run_result = read_result()
        # `uploaded` is False until all files are in S3. Without --s3, the entry is missing.
        is_run_complete = run_result["status"] == "finished" and run_result.get("uploaded") is not False
        early_end_cause = run_result.get("stopped_by")
        # A run that --patience or the script ended has no further steps.
        may_run_continue = not early_end_cause or early_end_cause.startswith("--max_steps")
        includes_last_step = last_step is None or not may_run_continue or run_result["steps"] >= last_step
        return is_run_complete and includes_last_step
    except (OSError, ValueError, KeyError, TypeError):  # result.json is missing, damaged or incomplete
        return False


def read_recipe_file(folder: Path) -> dict[str, Any] | None:
    """Return the content of recipe.json, or None without that file. Raise ValueError if reading fails."""
    recipe_path = folder / "recipe.json"
    try:
        return read_json(recipe_path) if recipe_path.exists() else None
    except (OSError, ValueError) as error:
        read_problem = error.strerror if isinstance(error, OSError) else "the file is empty or damaged"
        raise ValueError(
            f"{recipe_path} can't be read ({read_problem}), so the recipe of the run in {folder} is unknown."
            " Delete the file to resume from the newest checkpoint, or move the folder to start a new run"
        ) from None


def _is_path_in_run(resume_flag: str, folder: Path) -> bool:
    """Return True if --resume specifies this run's folder or the newest checkpoint in it."""
    run_folder = folder.resolve()
    checkpoints_folder = run_folder / "checkpoints"
    run_paths = [run_folder, checkpoints_folder]
    if checkpoint_steps := steps_in(checkpoints_folder):
        newest_step, *_ = checkpoint_steps
        run_paths.append(checkpoints_folder / step_name(newest_step))
    return Path(resume_flag).resolve() in run_paths
