"""Chooses a run's folder: a new one, or that of an unfinished run of the same recipe."""

import contextlib
import json
import os
import socket
import sys
from collections.abc import Collection
from pathlib import Path
from typing import Any

from common.checkpoint.format import steps_in
from common.recipe import Recipe, recipe_part
from common.system.files import read_json, write_json
from common.system.processes import start_ticks
from common.system.text import numbered

FRUITLESS_RESTARTS = 3  # restarts by a launcher without a new checkpoint, after which it gives up


def script_name() -> str:
    return Path(sys.argv[0]).stem


def open_folder(recipe: Recipe, name: str, last_step: int | None, passed: Collection[Path] = ()) -> Path:
    """Makes or finds the run's folder: --output_dir itself, or <name>, <name>-2, ... in --model_folder.

    A run there is continued if it is unfinished, has the same recipe, and began at the same --resume. Else
    the next number is tried, or --output_dir is refused. last_step: of this run, None if unknown. passed:
    folders to leave out. ValueError for a recipe.json that can't be read.
    """
    try:
        if recipe.output_dir is None:
            parent = Path(recipe.model_folder or "runs") / script_name()
            return _named(parent, name, recipe, last_step, passed)
        folder = Path(recipe.output_dir)
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ValueError(f"can't make the run folder {error.filename}: {error.strerror}") from None
    if reason := _why_not_ours(folder, recipe, last_step):
        raise ValueError(
            f"--output_dir {folder} holds a run already{reason}: give another folder, or move that one away"
        )
    return folder


def _named(parent: Path, name: str, recipe: Recipe, last_step: int | None, passed: Collection[Path]) -> Path:
    parent.mkdir(parents=True, exist_ok=True)
    for own in numbered(name):
        folder = parent / own
        folder.mkdir(exist_ok=True)
        if folder not in passed and not _why_not_ours(folder, recipe, last_step):
            break
    return folder


def _why_not_ours(folder: Path, recipe: Recipe, last_step: int | None) -> str:
    """Why the folder holds another run, as ` (its epochs is 3, here 10)`; empty if it holds this run or
    none."""
    about = _recipe_json(folder)
    if about is None:
        return ""  # empty, or stopped before it began: the checkpoint's recipe is compared later
    began = about.get("resumed_from")
    if reason := why_other_run(about, recipe):
        return reason
    if recipe.resume != "auto" and recipe.resume != began and not _is_own(folder, recipe.resume):
        return f", which did not begin at --resume {recipe.resume}"
    if _is_finished(folder, last_step):
        return ", which is finished"
    return ""


def _recipe_json(folder: Path) -> dict[str, Any] | None:
    """The content of recipe.json; None without that file. ValueError when it can't be read."""
    file = folder / "recipe.json"
    try:
        about = read_json(file)
        if not isinstance(about["recipe"], dict) or not isinstance(about["script"], str):
            raise ValueError("it has no recipe and script")
        return about
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is empty or damaged"
        raise ValueError(
            f"{file} can't be read ({reason}), so the run in {folder} is not known: remove that file to"
            " continue from its newest checkpoint, or move the folder away to start afresh"
        ) from None


def this_run(recipe: Recipe) -> dict[str, Any]:
    """The fields of recipe.json that identify the run, for use before that file is written."""
    return {"script": script_name(), "recipe": recipe_part(recipe)}


def why_other_run(about: dict[str, Any], recipe: Recipe) -> str:
    """Why a run is not one of this recipe; empty if it is, or if that is unknown.

    about: its recipe.json, or this_run() of it.
    """
    if not isinstance(about.get("recipe"), dict):
        return ""
    if (script := about.get("script")) != script_name():
        return f" ({script}'s)"
    if differing := differences(about["recipe"], recipe):
        return f" ({differing}; --allow_changed names what may differ)"
    return ", and --resume is never" if recipe.resume == "never" else ""


def resumed_from(folder: Path) -> str | None:
    """The --resume with which the folder's run began."""
    try:
        return read_json(folder / "recipe.json").get("resumed_from")
    except (OSError, ValueError):
        return None


def differences(theirs: dict[str, Any], recipe: Recipe) -> str:
    """The flags that differ, as `its epochs is 3, here 10; ...`, without those that --allow_changed names.
    A flag that is missing in the other recipe counts as its default."""
    ours, defaults = (json.loads(json.dumps(recipe_part(r))) for r in (recipe, type(recipe)()))
    theirs = recipe.without_derived(defaults | theirs)
    return "; ".join(
        f"its {key} is {theirs[key]}, here {value}"
        for key, value in ours.items()
        if theirs[key] != value and key not in recipe.allow_changed
    )


def _is_own(folder: Path, resume: str) -> bool:
    """True when --resume names this folder, or its own newest checkpoint."""
    steps = steps_in(folder / "checkpoints")
    path = Path(resume).resolve()
    own = folder.resolve()
    newest = [own / "checkpoints" / f"step_{steps[0]:08d}"] if steps else []
    return path in (own, own / "checkpoints", *newest)


def _is_finished(folder: Path, last_step: int | None) -> bool:
    try:
        result = read_json(folder / "result.json")
        done = result["status"] == "finished" and result.get("uploaded") is not False
        by_flag = (result.get("stopped_by") or "--max_steps").startswith("--max_steps")
        return done and (last_step is None or not by_flag or result["steps"] >= last_step)
    except (OSError, ValueError, KeyError, TypeError):
        return False


def count_restarts(folder: Path, step: int) -> None:
    """Counts a launcher's restarts in restarts.json. Called at each start. step: where this start begins.

    A restart by the same launcher at the same step is one without progress, unless the process before it was
    told to stop, as when a host joins. ValueError at the fourth.
    """
    launcher = _launcher()
    if launcher is None:
        return
    file, fruitless = folder / "restarts.json", 0
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
        before = read_json(file)
        if (before["launcher"], before["step"]) == (launcher, step):
            fruitless = before["fruitless"] + (not _was_preempted(folder))
    write_json(file, {"launcher": launcher, "step": step, "fruitless": fruitless})
    if fruitless > FRUITLESS_RESTARTS:
        raise ValueError(
            f"{FRUITLESS_RESTARTS} restarts without a new checkpoint since step {step:,}: giving up. The log"
            " of the first failure says why; the same command continues when that is fixed"
        )


def _launcher() -> str | None:
    """A unique name of the agent that restarts this process; None without one."""
    if int(os.environ.get("TORCHELASTIC_MAX_RESTARTS", "0")) == 0:
        return None
    return f"{socket.gethostname()} {os.getppid()} {start_ticks(os.getppid())}"


def _was_preempted(folder: Path) -> bool:
    with contextlib.suppress(OSError, ValueError, AttributeError):
        return bool(read_json(folder / "result.json").get("status") == "preempted")
    return False
