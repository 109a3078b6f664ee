"""Manages a run's folder: lease, S3 mirror, and the checkpoint to resume from. Main process only.

The checkpoint is selected as follows:

1. Use the newest intact checkpoint in the run's folder.
2. If --s3 has a newer checkpoint, download it first, for example on a new machine with an empty folder.
3. If the run has no checkpoint, start from the checkpoint given by --resume, a local path or s3:// address.
4. Require the same recipe, except for the flags in --allow_changed.
"""

import contextlib
import itertools
import json
import os
import shlex
import socket
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from onecurve.checkpoint import format as checkpoints
from onecurve.checkpoint.format import JSON_LIMIT_BYTES, Checkpoint, step_of, steps_in
from onecurve.flags.recipe import Recipe, recipe_part
from onecurve.run.identity import (
    check_recipe,
    has_finished,
    has_trained,
    model_part,
    only_difference,
    recorded_recipe,
    script_name,
    why_not_this_run,
    why_other_run,
)
from onecurve.run.lease import RECORD, AlreadyOwned, FolderRecord, Lease, PrefixRecord, is_owned
from onecurve.run.starts import STARTS
from onecurve.system.env import job_round
from onecurve.system.files import json_lines, read_json, refuse_link, write_json, writing
from onecurve.system.output import log
from onecurve.system.processes import start_ticks
from onecurve.system.text import numbered
from onecurve.system.threads import Heartbeat

if TYPE_CHECKING:  # at runtime, imported only with --s3
    from onecurve.checkpoint.mirror import Mirror
    from onecurve.system.s3 import ObjectStore

FOLDERS = ("checkpoints", "plots", "profile", "tensorboard", "wandb")  # subfolders of a run's folder
# A run ends if a launcher restarts it more often than this without a new checkpoint.
FRUITLESS_RESTARTS = 3
# Files that a run writes into its folder. In a folder without a run, these files belong to another program,
# unless their content shows that a start of a run wrote the files and ended early.
WRITTEN: dict[str, Callable[[dict[str, Any]], bool]] = {
    RECORD: lambda owner: {"id", "beat"} <= owner.keys(),
    "restarts.json": lambda restarts: {"launcher", "fruitless"} <= restarts.keys(),
    "result.json": lambda result: result == {"status": "preempted"},
    STARTS: lambda start: isinstance(start.get("recipe"), dict),
}
PATTERNS = (*WRITTEN, "recipe.json", "metrics.jsonl", "samples.jsonl", "confusion.json", "telemetry-*.jsonl")
PATTERNS += ("nvidia-smi-*.txt", "plots/curves.png", "plots/confusion.png", "plots/predictions.png")
PATTERNS += ("profile/trace.json.gz", "profile/table.txt", "checkpoints/index.json")


class RunFolder:
    """Folder of a run that this process owns, with the S3 mirror and the checkpoint to resume from.

    Args:
        recipe: The run's recipe.
        name: Name of the folder, unless --output_dir names it.
        last_step: Last step of this run.
        heartbeat: Function that is called during long operations.

    Raises:
        ValueError: The folder or the S3 prefix belongs to another owner or run, or all its checkpoints are
            damaged.
    """

    mirror: "Mirror | None" = None
    checkpoint: Checkpoint | None = None
    is_new = False  # True if this start begins the run from another run's checkpoint
    began_at: str | None = None  # value of --resume at the run's first start

    def __init__(self, recipe: Recipe, name: str, last_step: int, heartbeat: Heartbeat):
        self.recipe, self.last_step, self.heartbeat = recipe, last_step, heartbeat
        if recipe.resume == "never" and _is_restarted():
            raise ValueError(
                "--resume never would start a new run each time the launcher restarts the job. Remove it, and"
                " choose a new --name or --output_dir"
            )
        self.leases: list[Lease] = []  # leases on the folder and the S3 prefix
        self.path = self._lease(name)
        try:
            with writing("the run", self.path):
                self._open()
        except BaseException:
            self.release()
            raise

    def lost(self) -> str | None:
        """Return a message if another run has taken over the folder or the S3 prefix."""
        return next((lease.lost for lease in self.leases if lease.lost), None)

    def release(self) -> None:
        """Release the leases on the folder and the S3 prefix."""
        for lease in self.leases:
            lease.release()

    def _lease(self, name: str) -> Path:
        """Acquire the lease on the run's folder, and return the folder.

        A run that has just begun may not have a recipe.json yet, but the record of the run's owner contains
        the recipe. If the recorded recipe differs, the next folder is tried, unless --output_dir names the
        folder.
        """
        recipe = self.recipe
        identity = {"script": script_name(), "recipe": recipe_part(recipe)}
        for path in folders(recipe, name, self.last_step):
            try:
                with writing("the run", path):
                    lease = Lease(FolderRecord(path), self.heartbeat, identity)
                if not why_not_this_run(
                    path, recipe, self.last_step
                ):  # no other run has used the folder in the meantime
                    self.leases.append(lease)
                    return path
                lease.release()
            except AlreadyOwned as error:
                usual_names = (name, name.removeprefix(model_part(recipe)))
                is_elsewhere = not path.name.startswith(usual_names)  # another job continues the run
                is_given = Path(recipe.output_dir or "*").name != "*"
                if is_given or not (is_elsewhere or why_other_run(error.record, recipe)):
                    raise
        raise AssertionError("folder numbers are unlimited")

    def _open(self) -> None:
        """Find the checkpoint to resume from, and open the S3 mirror."""
        path, resume = self.path, self.recipe.resume
        for name in FOLDERS:
            refuse_link(path / name)
        checkpoints.remove_temporary(path / "checkpoints")
        if self.recipe.s3:
            from onecurve.checkpoint.mirror import Mirror
            from onecurve.system.s3 import ObjectStore

            store = ObjectStore(self.recipe.s3)
            store.probe()
            self.leases.append(Lease(PrefixRecord(store), self.heartbeat))
            self.mirror = Mirror(store, path, self.recipe.keep_every, self.leases[-1].check)
        self.checkpoint = self._own_checkpoint()
        if resume not in ("auto", "never"):
            self.is_new = self.checkpoint is None
            self.checkpoint = self.checkpoint or _other_runs_checkpoint(path, resume, self.heartbeat)
        if self.checkpoint:
            check_recipe(str(self.checkpoint.folder), self.checkpoint.manifest, self.recipe)
            # On a new machine, the checkpoint comes from the run's S3 prefix, and recipe.json is missing.
            begun = {"resumed_from": None if resume in ("auto", "never") else resume}
            self.began_at = resume if self.is_new else (recorded_recipe(path) or begun).get("resumed_from")

    def _own_checkpoint(self) -> Checkpoint | None:
        """Return the newest checkpoint in the folder. If S3 contains a newer one, download it first."""
        parent, checkpoint, problem = self.path / "checkpoints", None, None
        try:
            checkpoint = checkpoints.newest(parent, self.heartbeat)
        except ValueError as error:
            problem = error  # raised below unless S3 contains an intact checkpoint
        if self.mirror:
            from onecurve.checkpoint.mirror import committed, fetch_log, fetch_newest, read_manifest
            from onecurve.system.s3 import WrongSize

            store, is_never = self.mirror.store, self.recipe.resume == "never"
            here, there = checkpoint.step if checkpoint else -1, max(committed(store), default=-1)
            result = partial(_stored_json, store, "result.json")
            if there >= 0 and not steps_in(parent) and (is_never or has_finished(result, self.last_step)):
                reason = "and --resume is never" if is_never else "which is finished"
                raise ValueError(f"{store.url} holds a run already, {reason}. Choose another prefix")
            # Require the same recipe even if nothing is downloaded, because the mirror removes older
            # checkpoints
            if there >= 0:
                with contextlib.suppress(
                    checkpoints.DamagedCheckpoint, WrongSize
                ):  # fetch_newest() finds an intact checkpoint
                    check_recipe(store.url, read_manifest(store, there)[1], self.recipe)
            if there > here:
                # Logs come first, so that an interrupted start downloads logs and checkpoint again
                fetch_log(store, self.path)
                lost = self.leases[-1].check
                if fetch_newest(store, parent, here, self.heartbeat, lost) is not None:
                    return checkpoints.newest(parent, self.heartbeat)
        if problem:
            raise problem
        return checkpoint


def folders(recipe: Recipe, name: str, last_step: int | None) -> Iterator[Path]:
    """Create and yield folders that no other run uses.

    The folder is --output_dir. A `*` in --output_dir is replaced by <name>, <name>-2, ... A run in a folder
    is continued if it is unfinished, has the same recipe and began with the same --resume. This includes runs
    that version 1.0 named without the model. Folders of starts that trained no step are reused. If the
    launcher restarts jobs, an unfinished run of this recipe under another automatic name is also continued.

    Args:
        recipe: The run's recipe.
        name: Automatic name of the run.
        last_step: Last step of this run; None if unknown. If given, a message names an unfinished run that is
            not continued although its recipe is equal or differs in only one value.

    Raises:
        ValueError: --output_dir contains another run or files of another program, or a recipe.json can't be
            read.
    """
    is_reported = last_step is None
    output_dir = Path(recipe.output_dir or "runs/*")
    given, parent = output_dir if output_dir.name != "*" else None, output_dir.parent / script_name()
    old_name = name.removeprefix(model_part(recipe))  # the run's name in version 1.0
    names = [*_begun(parent, old_name, recipe, last_step)] if not given and old_name != name else []
    if not (given or names or recipe.name or recipe.s3 or any(_begun(parent, name, recipe, last_step))):
        elsewhere = _begun_elsewhere(parent, recipe, last_step)
        if _is_restarted():
            names = elsewhere
        elif elsewhere and not is_reported:
            log.info(
                f"{parent / elsewhere[0]} holds an unfinished run of this recipe, which began with another"
                " number of processes or another strategy. To continue it instead of starting a new run, add"
                f" --name {shlex.quote(elsewhere[0])}"
            )
    automatic = map(parent.joinpath, itertools.chain(names, numbered(name)))
    for folder in itertools.repeat(given) if given else automatic:
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ValueError(f"can't create the run folder {error.filename}: {error.strerror}") from None
        reason = why_not_this_run(folder, recipe, last_step)
        if file := _other_programs_file(folder):
            if given:
                raise ValueError(
                    f"--output_dir {folder} holds {file}, but no run. A run would overwrite this file."
                    " Choose another folder, or move the file away"
                )
        elif not reason:
            yield folder
        elif given:
            raise ValueError(
                f"--output_dir {folder} holds a run already{reason}. Choose another folder, or move that"
                " folder away"
            )
        elif not is_reported and (difference := only_difference(folder, recipe, last_step)):
            is_reported = True
            log.info(f"{folder} holds an unfinished run ({difference}). To resume it, use that run's value")


def _begun(parent: Path, name: str, recipe: Recipe, last_step: int | None) -> Iterator[str]:
    """Return the names of this recipe's unfinished runs among <name>, <name>-2, ..."""
    existing = itertools.takewhile(lambda n: (parent / n / "recipe.json").exists(), numbered(name))
    return (
        n for n in existing if has_trained(parent / n) and not why_not_this_run(parent / n, recipe, last_step)
    )


def _begun_elsewhere(parent: Path, recipe: Recipe, last_step: int | None) -> list[str]:
    """Return the names of this recipe's unfinished runs without a live owner, the most advanced run first."""
    steps = {}
    for folder in sorted(parent.glob("*/")):
        with contextlib.suppress(OSError, ValueError):  # another run's recipe.json may be damaged
            is_known = isinstance((recorded_recipe(folder) or {}).get("recipe"), dict) and has_trained(folder)
            # A restarted job may have lost a host. The lease waits for heartbeats from the lost host.
            has_owner = is_owned(folder, 0) if _is_restarted() else is_owned(folder)
            if is_known and not has_owner and not why_not_this_run(folder, recipe, last_step):
                steps[folder.name] = max(steps_in(folder / "checkpoints"), default=0)
    return sorted(steps, key=lambda name: -steps[name])


def _is_restarted() -> bool:
    """Return True if the launcher may restart the job with another number of processes."""
    return bool(_most_restarts() or job_round()[1])


def _other_programs_file(folder: Path) -> str | None:
    """Return another program's file that a run would overwrite, or None if there is no such file."""
    if "recipe" in (recorded_recipe(folder) or {}) or steps_in(folder / "checkpoints"):
        return None
    files = (file for pattern in PATTERNS for file in sorted(folder.glob(pattern)) if file.lstat().st_size)
    names = (str(file.relative_to(folder)) for file in files if not _is_leftover(file))
    return next(names, None)


def _is_leftover(file: Path) -> bool:
    """Return True if the file belongs to a run that ended before it wrote recipe.json."""
    if not (is_written_by_run := WRITTEN.get(file.name)):
        return False
    try:
        return is_written_by_run(next(json_lines(file), {}) if file.suffix == ".jsonl" else read_json(file))
    except (OSError, ValueError):
        return file.name == RECORD  # Lease handles unreadable records


def _other_runs_checkpoint(folder: Path, resume: str, heartbeat: Heartbeat) -> Checkpoint:
    """Return the checkpoint given by --resume: from S3, a checkpoint folder or a run (newest checkpoint)."""
    # The folder .step_others is temporary
    path, parent, checkpoint = Path(resume), folder / "checkpoints" / ".step_others", None
    if resume.startswith("s3://"):
        from onecurve.checkpoint.mirror import fetch_newest
        from onecurve.system.s3 import ObjectStore

        if fetch_newest(ObjectStore(resume), parent, -1, heartbeat) is not None:
            checkpoint = checkpoints.newest(parent, heartbeat)
    elif step_of(path.resolve().name) is not None:
        return checkpoints.verify(path.resolve(), heartbeat)
    else:
        parents = (p for p in (path / "checkpoints", path) if steps_in(p))
        checkpoint = next((checkpoints.newest(p, heartbeat, ours=False) for p in parents), None)
    if checkpoint is None:
        hint = "" if "://" in resume else ". Give a run's folder, or one of its checkpoints/step_*"
        raise ValueError(f"--resume {resume} holds no checkpoint{hint}")
    return checkpoint


def count_restarts(folder: Path, step: int) -> None:
    """Count the launcher's restarts in restarts.json. This function is called at each start.

    A restart by the same launcher at the same step means that the previous process made no progress, unless
    that process was asked to stop, for example because a host joined.

    Args:
        folder: The run's folder.
        step: Step at which this start begins.

    Raises:
        ValueError: More than FRUITLESS_RESTARTS consecutive restarts made no progress.
    """
    if _most_restarts() == 0:
        return
    launcher = f"{socket.gethostname()} {os.getppid()} {start_ticks(os.getppid())}"  # unique to one launcher
    file, fruitless = folder / "restarts.json", 0
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
        before = read_json(file)
        if (before["launcher"], before["step"]) == (launcher, step):
            fruitless = before["fruitless"] + 1
            # The file result.json may be missing, which raises an OSError
            fruitless -= read_json(folder / "result.json")["status"] == "preempted"
    write_json(file, {"launcher": launcher, "step": step, "fruitless": fruitless})
    if fruitless > FRUITLESS_RESTARTS:
        raise ValueError(
            f"{FRUITLESS_RESTARTS} restarts without a new checkpoint since step {step:,}: giving up. The log"
            " of the first failure shows the cause. Once it is fixed, run the same command to resume"
        )


def _stored_json(store: "ObjectStore", key: str) -> Any:
    return json.loads(store.read(key, JSON_LIMIT_BYTES) or b"")


def _most_restarts() -> int:
    return int(os.environ.get("TORCHELASTIC_MAX_RESTARTS", "0"))
