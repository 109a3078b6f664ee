"""Which folder a run has: a new one, or that of an unfinished run of the same recipe, which it continues."""

import contextlib
import json
import os
import sys
from pathlib import Path
from typing import Any

from common.checkpoints import steps_in
from common.files import write_json
from common.recipe import Recipe, recipe_part

FRUITLESS_RESTARTS = 3  # without a new checkpoint; then a launcher that restarts by itself is told to give up


def script_name() -> str:
    return Path(sys.argv[0]).stem


def open_folder(recipe: Recipe, name: str, last_step: int | None) -> Path:
    """Makes or finds the run's folder: exactly --output_dir, or <name>, <name>-2, ... in --model_folder.

    A run there is continued when it is unfinished, of the same recipe, and began at the same --resume; else a
    named folder gets the next number, and --output_dir is refused. last_step: of this run, None if not known.
    """
    try:
        if recipe.output_dir is None:
            return _named(Path(recipe.model_folder or "runs") / script_name(), name, recipe, last_step)
        folder = Path(recipe.output_dir)
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ValueError(f"can't make the run folder {error.filename}: {error.strerror}") from None
    if reason := _why_not(folder, recipe, last_step):
        raise ValueError(
            f"--output_dir {folder} holds a run already{reason}: give another folder, or move that one away"
        )
    return folder


def _named(parent: Path, name: str, recipe: Recipe, last_step: int | None) -> Path:
    parent.mkdir(parents=True, exist_ok=True)
    number = 1
    while True:
        folder = parent / (name if number == 1 else f"{name}-{number}")
        folder.mkdir(exist_ok=True)
        if not _why_not(folder, recipe, last_step):
            return folder
        number += 1


def _why_not(folder: Path, recipe: Recipe, last_step: int | None) -> str:
    """Why the folder is not this run's, as ` (its epochs is 3, here 10)`; nothing if it is, or is empty."""
    if not (folder / "recipe.json").exists():
        return ""  # empty, or it was stopped before it began: its checkpoint's recipe will be compared
    try:
        about = json.loads((folder / "recipe.json").read_text())
        theirs, script = about["recipe"], about["script"]
        began = about.get("resumed_from")
    except (OSError, ValueError, KeyError, TypeError):
        return ", whose recipe.json can't be read"
    if script != script_name():
        return f" ({script}'s)"
    if differing := differences(theirs, recipe):
        return f" ({differing}; --allow_changed names what may differ)"
    if recipe.resume == "never":
        return ", and --resume is never"
    if recipe.resume != "auto" and recipe.resume != began and not _is_own(folder, recipe.resume):
        return f", which did not begin at --resume {recipe.resume}"
    if _is_finished(folder, last_step):
        return ", which is finished"
    return ""


def resumed_from(folder: Path) -> str | None:
    """The --resume at which the folder's run began."""
    try:
        return json.loads((folder / "recipe.json").read_text()).get("resumed_from")
    except (OSError, ValueError, AttributeError):
        return None


def differences(theirs: dict[str, Any], recipe: Recipe) -> str:
    """`its epochs is 3, here 10; ...`, without what --allow_changed names. A flag that is younger than the
    other run has its default there."""
    ours, defaults = (json.loads(json.dumps(recipe_part(r))) for r in (recipe, type(recipe)()))
    theirs = recipe.without_derived(defaults | theirs)
    return "; ".join(
        f"its {key} is {theirs[key]}, here {value}"
        for key, value in ours.items()
        if theirs[key] != value and key not in recipe.allow_changed
    )


def _is_own(folder: Path, resume: str) -> bool:
    """Whether --resume names this folder's own newest checkpoint, or the folder."""
    steps = steps_in(folder / "checkpoints")
    path = Path(resume).resolve()
    own = folder.resolve()
    newest = [own / "checkpoints" / f"step_{steps[0]:08d}"] if steps else []
    return path in (own, own / "checkpoints", *newest)


def _is_finished(folder: Path, last_step: int | None) -> bool:
    try:
        result = json.loads((folder / "result.json").read_text())
        done = result["status"] == "finished" and result.get("uploaded") is not False
        return done and (last_step is None or result["steps"] >= last_step)
    except (OSError, ValueError, KeyError, TypeError):
        return False


def count_restarts(folder: Path, step: int) -> None:
    """Called at each start. ValueError at the third restart by torchrun that found no newer checkpoint."""
    run_id, file = os.environ.get("TORCHELASTIC_RUN_ID"), folder / "restarts.json"
    if run_id is None:
        return
    restart = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))
    begun = {"run_id": run_id, "restart": restart, "step": step, "fruitless": 0}
    if restart > 0:
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
            before = json.loads(file.read_text())
            if (before["run_id"], before["step"]) == (run_id, step):
                begun["fruitless"] = before["fruitless"] + (before["restart"] > 0)
    write_json(file, begun)
    if begun["fruitless"] >= FRUITLESS_RESTARTS:
        raise ValueError(
            f"{FRUITLESS_RESTARTS} restarts without a new checkpoint since step {step:,}: giving up. The log"
            " of the first failure says why; the same command continues when that is mended"
        )
