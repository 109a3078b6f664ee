"""Manages a run folder, its lease, its S3 mirror and the checkpoint from which the run resumes.

Only the main process uses this module. The checkpoint is selected as follows:

1. Use the newest intact checkpoint in the run's folder.
2. If --s3 contains a newer checkpoint, download it first, for example to an empty folder on a new machine.
3. If the run has no checkpoint, start from the checkpoint that --resume specifies as a local path or s3://
   address.
4. Require the checkpoint's recipe to be the same, except for the flags in --allow_changed.
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
    model_prefix,
    only_difference,
    recorded_recipe,
    script_name,
    why_not_this_run,
    why_other_run,
)
from onecurve.run.lease import OWNER_FILE, AlreadyOwned, FolderRecord, Lease, PrefixRecord, is_owned
from onecurve.run.starts import STARTS_FILE
from onecurve.system.env import job_round
from onecurve.system.files import explaining_write_errors, json_lines, read_json, refuse_link, write_json
from onecurve.system.output import log
from onecurve.system.processes import start_ticks
from onecurve.system.text import numbered
from onecurve.system.threads import Heartbeat

if TYPE_CHECKING:  # Imported at runtime only with --s3
    from onecurve.checkpoint.mirror import Mirror
    from onecurve.system.s3 import ObjectStore

SUBFOLDERS = ("checkpoints", "plots", "profile", "tensorboard", "wandb")  # Subfolders of a run folder
# Maximum number of times that a launcher may restart a run without a new checkpoint
MAX_FRUITLESS_RESTARTS = 3
# Files that a run writes to its folder. In a folder without a run, a file with one of these names belongs to
# a different program, unless the function for its name returns True. The function returns True for a file
# from a run that ended before training.
IS_WRITTEN_BY_RUN: dict[str, Callable[[dict[str, Any]], bool]] = {
    OWNER_FILE: lambda owner: {"id", "beat"} <= owner.keys(),
    "restarts.json": lambda restarts: {"launcher", "fruitless"} <= restarts.keys(),
    "result.json": lambda result: result == {"status": "preempted"},
    STARTS_FILE: lambda start: isinstance(start.get("recipe"), dict),
}
FILE_PATTERNS = (*IS_WRITTEN_BY_RUN, "recipe.json", "metrics.jsonl", "samples.jsonl", "confusion.json")
FILE_PATTERNS += ("telemetry-*.jsonl", "nvidia-smi-*.txt", "checkpoints/index.json", "plots/curves.png")
FILE_PATTERNS += (
    "plots/confusion.png",
    "plots/predictions.png",
    "profile/trace.json.gz",
    "profile/table.txt",
)


class RunFolder:
    """Run folder owned by this process, with the S3 mirror and the checkpoint from which the run resumes.

    Args:
        recipe: Recipe of the run.
        name: Folder name, used unless --output_dir specifies a folder.
        last_step: Last step of the run.
        heartbeat: Function called during long operations.

    Raises:
        ValueError: If the folder or the S3 prefix belongs to a different owner or run, or contains only
            damaged checkpoints.
    """

    mirror: "Mirror | None" = None
    checkpoint: Checkpoint | None = None
    is_new = False  # True if the run begins at this start with the checkpoint of a different run
    resumed_from: str | None = None  # Value of --resume at the run's first start

    def __init__(self, recipe: Recipe, name: str, last_step: int, heartbeat: Heartbeat):
        self.recipe, self.last_step, self.heartbeat = recipe, last_step, heartbeat
        if recipe.resume == "never" and _is_restarted():
            raise ValueError(
                "--resume never would start a new run each time the launcher restarts the job. Remove this"
                " flag, and choose a new --name or --output_dir"
            )
        self.leases: list[Lease] = []  # Leases on the folder and on the S3 prefix
        self.path = self._lease_folder(name)
        try:
            with explaining_write_errors("the run", self.path):
                self._open_checkpoint()
        except BaseException:
            self.release()
            raise

    def lost(self) -> str | None:
        """Return a message if a different run has taken over the folder or the S3 prefix, or None."""
        return next((lease.lost for lease in self.leases if lease.lost), None)

    def release(self) -> None:
        """Release the leases on the folder and the S3 prefix."""
        for lease in self.leases:
            lease.release()

    def _lease_folder(self, name: str) -> Path:
        """Acquire the lease on the run's folder, and return the folder's path.

        The folder of a run that has just begun may not contain recipe.json yet, but the owner's record
        contains the recipe. If the recorded recipe differs, the next folder is tried, unless --output_dir
        specifies the folder.
        """
        recipe = self.recipe
        identity = {"script": script_name(), "recipe": recipe_part(recipe)}
        for path in candidate_folders(recipe, name, self.last_step):
            try:
                with explaining_write_errors("the run", path):
                    lease = Lease(FolderRecord(path), self.heartbeat, identity)
                # A different run may have used the folder while this process waited for the lease.
                if not why_not_this_run(path, recipe, self.last_step):
                    self.leases.append(lease)
                    return path
                lease.release()
            except AlreadyOwned as error:
                usual_names = (name, name.removeprefix(model_prefix(recipe)))
                is_elsewhere = not path.name.startswith(usual_names)  # A different job continues the run
                is_given = Path(recipe.output_dir or "*").name != "*"
                if is_given or not (is_elsewhere or why_other_run(error.record, recipe)):
                    raise
        raise AssertionError("folder numbers are unlimited")

    def _open_checkpoint(self) -> None:
        """Open the S3 mirror, and find the checkpoint from which the run resumes."""
        path, resume = self.path, self.recipe.resume
        for name in SUBFOLDERS:
            refuse_link(path / name)
        checkpoints.remove_temporary(path / "checkpoints")
        if self.recipe.s3:
            from onecurve.checkpoint.mirror import Mirror
            from onecurve.system.s3 import ObjectStore

            store = ObjectStore(self.recipe.s3)
            store.probe()
            self.leases.append(Lease(PrefixRecord(store), self.heartbeat))
            self.mirror = Mirror(store, path, self.recipe.keep_every, self.leases[-1].check)
        self.checkpoint = self._newest_own_checkpoint()
        if resume not in ("auto", "never"):
            self.is_new = self.checkpoint is None
            self.checkpoint = self.checkpoint or _other_runs_checkpoint(path, resume, self.heartbeat)
        if self.checkpoint:
            check_recipe(str(self.checkpoint.folder), self.checkpoint.manifest, self.recipe)
            # On a new machine, recipe.json is missing, because the checkpoint was downloaded from the run's
            # S3 prefix.
            new_run = {"resumed_from": None if resume in ("auto", "never") else resume}
            record = {} if self.is_new else recorded_recipe(path) or new_run
            self.resumed_from = resume if self.is_new else record.get("resumed_from")

    def _newest_own_checkpoint(self) -> Checkpoint | None:
        """Return the newest checkpoint in the folder or in S3. Download a newer checkpoint from S3."""
        parent, checkpoint, damage = self.path / "checkpoints", None, None
        try:
            checkpoint = checkpoints.newest(parent, self.heartbeat)
        except ValueError as error:
            damage = error  # Raised below unless S3 contains an intact checkpoint
        if self.mirror:
            from onecurve.checkpoint.mirror import committed, fetch_log, fetch_newest, read_manifest
            from onecurve.system.s3 import WrongSize

            store, is_never = self.mirror.store, self.recipe.resume == "never"
            local_step = checkpoint.step if checkpoint else -1
            stored_step = max(committed(store), default=-1)
            read_result = partial(_stored_json, store, "result.json")
            is_only_stored = stored_step >= 0 and not steps_in(parent)
            if is_only_stored and (is_never or has_finished(read_result, self.last_step)):
                reason = ", but --resume never requires a new run" if is_never else ", which is finished"
                raise ValueError(
                    f"{store.url} already contains a run{reason}. Choose a different --s3 address"
                )
            # Require the same recipe even if no checkpoint is downloaded, because the mirror removes older
            # checkpoints.
            if stored_step >= 0:
                # This checkpoint may be damaged. fetch_newest() then finds an intact checkpoint.
                with contextlib.suppress(checkpoints.DamagedCheckpoint, WrongSize):
                    check_recipe(store.url, read_manifest(store, stored_step)[1], self.recipe)
            if stored_step > local_step:
                # Download the logs first. After an interruption, the next start downloads the logs and the
                # checkpoint again.
                fetch_log(store, self.path)
                check_lease = self.leases[-1].check
                if fetch_newest(store, parent, local_step, self.heartbeat, check_lease) is not None:
                    return checkpoints.newest(parent, self.heartbeat)
        if damage:
            raise damage
        return checkpoint


def candidate_folders(recipe: Recipe, name: str, last_step: int | None) -> Iterator[Path]:
    """Create and yield folders that no other run uses.

    --output_dir specifies the folder. If the last part of --output_dir is `*`, the function tries the folder
    names <name>, <name>-2 and so on. A run in a folder is resumed if it is unfinished, has the same recipe
    and began with the same --resume. Runs from version 1.0, whose names do not contain the model, are also
    resumed. A folder in which no step was trained is reused. If the launcher restarts jobs, an unfinished run
    of this recipe with a different automatic name is also resumed.

    Args:
        recipe: Recipe of the run.
        name: Automatic name of the run.
        last_step: Last step of the run, or None if the step is unknown. If last_step is specified, the
            function logs the name of an unfinished run that is not resumed although at most one flag of its
            recipe differs.

    Raises:
        ValueError: If --output_dir contains a different run or another program's files, or a recipe.json
            can't be read.
    """
    is_reported = last_step is None
    output_dir = Path(recipe.output_dir or "runs/*")
    given_folder, parent = output_dir if output_dir.name != "*" else None, output_dir.parent / script_name()
    old_name = name.removeprefix(model_prefix(recipe))  # Name of the run in version 1.0
    resumable_names: list[str] = []  # Names of unfinished runs, to be tried first
    if not given_folder and old_name != name:
        resumable_names = [*_unfinished_run_names(parent, old_name, recipe, last_step)]
    is_automatic = not (given_folder or resumable_names or recipe.name or recipe.s3)
    if is_automatic and not any(_unfinished_run_names(parent, name, recipe, last_step)):
        other_names = _unfinished_run_names_by_step(parent, recipe, last_step)
        if _is_restarted():
            resumable_names = other_names
        elif other_names and not is_reported:
            log.info(
                f"{parent / other_names[0]} contains an unfinished run of this recipe that began with a"
                " different number of processes or a different strategy. To resume that run instead of"
                f" starting a new run, add --name {shlex.quote(other_names[0])}"
            )
    automatic_folders = map(parent.joinpath, itertools.chain(resumable_names, numbered(name)))
    for folder in itertools.repeat(given_folder) if given_folder else automatic_folders:
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ValueError(f"the folder {error.filename} can't be created: {error.strerror}") from None
        reason = why_not_this_run(folder, recipe, last_step)
        if file := _other_programs_file(folder):
            if given_folder:
                raise ValueError(
                    f"--output_dir {folder} contains {file}, but no run. A run would overwrite this file."
                    " Choose a different folder, or move the file"
                )
        elif not reason:
            yield folder
        elif given_folder:
            raise ValueError(
                f"--output_dir {folder} already contains a run{reason}. Choose a different folder, or move"
                " the existing folder"
            )
        elif not is_reported and (difference := only_difference(folder, recipe, last_step)):
            is_reported = True
            log.info(
                f"{folder} contains an unfinished run that differs in one flag ({difference}). To resume that"
                " run, specify the earlier value of the flag"
            )


def _unfinished_run_names(parent: Path, name: str, recipe: Recipe, last_step: int | None) -> Iterator[str]:
    """Yield the names of unfinished runs of this recipe in the folders <name>, <name>-2 and so on."""
    existing_names = itertools.takewhile(
        lambda run_name: (parent / run_name / "recipe.json").exists(), numbered(name)
    )
    for run_name in existing_names:
        folder = parent / run_name
        if has_trained(folder) and not why_not_this_run(folder, recipe, last_step):
            yield run_name


def _unfinished_run_names_by_step(parent: Path, recipe: Recipe, last_step: int | None) -> list[str]:
    """Return the names of this recipe's unfinished runs without a live owner, by descending step."""
    newest_steps = {}  # {run name: step of the newest checkpoint}
    for folder in sorted(parent.glob("*/")):
        with contextlib.suppress(OSError, ValueError):  # The recipe.json of a different run may be damaged
            recipe_file = recorded_recipe(folder) or {}
            is_trained = isinstance(recipe_file.get("recipe"), dict) and has_trained(folder)
            # A restarted job may have lost a host. Lease waits for heartbeats from a lost host.
            has_owner = is_owned(folder, 0) if _is_restarted() else is_owned(folder)
            if is_trained and not has_owner and not why_not_this_run(folder, recipe, last_step):
                newest_steps[folder.name] = max(steps_in(folder / "checkpoints"), default=0)
    return sorted(newest_steps, key=lambda name: -newest_steps[name])


def _is_restarted() -> bool:
    """Return True if the launcher may restart the job with a different number of processes."""
    return bool(_max_restarts() or job_round()[1])


def _other_programs_file(folder: Path) -> str | None:
    """Return the name of another program's file that a run would overwrite, or None if there is none."""
    if "recipe" in (recorded_recipe(folder) or {}) or steps_in(folder / "checkpoints"):
        return None
    files = (file for pattern in FILE_PATTERNS for file in sorted(folder.glob(pattern)))
    foreign_files = (file for file in files if file.lstat().st_size and not _is_leftover(file))
    return next((str(file.relative_to(folder)) for file in foreign_files), None)


def _is_leftover(file: Path) -> bool:
    """Return True if the file was written by a run that ended before it wrote recipe.json."""
    if not (is_written_by_run := IS_WRITTEN_BY_RUN.get(file.name)):
        return False
    try:
        return is_written_by_run(next(json_lines(file), {}) if file.suffix == ".jsonl" else read_json(file))
    except (OSError, ValueError):
        return file.name == OWNER_FILE  # Lease handles an unreadable record


def _other_runs_checkpoint(folder: Path, resume: str, heartbeat: Heartbeat) -> Checkpoint:
    """Return the checkpoint that --resume specifies, or the newest checkpoint of that run or S3 prefix."""
    # The folder .step_others is temporary.
    path, parent, checkpoint = Path(resume), folder / "checkpoints" / ".step_others", None
    if resume.startswith("s3://"):
        from onecurve.checkpoint.mirror import fetch_newest
        from onecurve.system.s3 import ObjectStore

        if fetch_newest(ObjectStore(resume), parent, -1, heartbeat) is not None:
            checkpoint = checkpoints.newest(parent, heartbeat)
    elif step_of(path.resolve().name) is not None:
        return checkpoints.verify(path.resolve(), heartbeat)
    else:
        for candidate in (path / "checkpoints", path):
            if steps_in(candidate):
                checkpoint = checkpoints.newest(candidate, heartbeat, ours=False)
                break
    if checkpoint is None:
        hint = "" if "://" in resume else ". Specify a run folder, or one of the run's checkpoints/step_*"
        raise ValueError(f"--resume {resume} contains no checkpoint{hint}")
    return checkpoint


def count_restarts(folder: Path, step: int) -> None:
    """Count the launcher's restarts without progress in restarts.json.

    This function is called each time a run starts. If the same launcher starts the run at the same step
    again, the previous process made no progress, unless that process was asked to stop, for example because a
    host joined.

    Args:
        folder: Folder of the run.
        step: Step at which the run starts or resumes.

    Raises:
        ValueError: If more than MAX_FRUITLESS_RESTARTS consecutive restarts made no progress.
    """
    if _max_restarts() == 0:
        return
    # Unique identifier of the launcher
    launcher = f"{socket.gethostname()} {os.getppid()} {start_ticks(os.getppid())}"
    restarts_file, fruitless_restarts = folder / "restarts.json", 0
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
        previous_restarts = read_json(restarts_file)
        if (previous_restarts["launcher"], previous_restarts["step"]) == (launcher, step):
            fruitless_restarts = previous_restarts["fruitless"] + 1
            # A missing result.json raises an OSError.
            fruitless_restarts -= read_json(folder / "result.json")["status"] == "preempted"
    write_json(restarts_file, {"launcher": launcher, "step": step, "fruitless": fruitless_restarts})
    if fruitless_restarts > MAX_FRUITLESS_RESTARTS:
        raise ValueError(
            f"the launcher restarted the job {MAX_FRUITLESS_RESTARTS} times without a new checkpoint since"
            f" step {step:,}. The log of the first failure shows the cause. Fix the cause, then run the same"
            " command to resume"
        )


def _stored_json(store: "ObjectStore", key: str) -> Any:
    return json.loads(store.read(key, JSON_LIMIT_BYTES) or b"")


def _max_restarts() -> int:
    return int(os.environ.get("TORCHELASTIC_MAX_RESTARTS", "0"))
