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
from onecurve.checkpoint.format import JSON_LIMIT_BYTES, Checkpoint, step_from_name, steps_in
from onecurve.flags.recipe import Recipe, recipe_part
from onecurve.run.identity import (
    has_finished,
    has_trained,
    model_prefix,
    only_difference,
    read_recipe_file,
    require_same_recipe,
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

ANY_FOLDER_NAME = "*"  # Last part of --output_dir if the run chooses the folder's name
SUBFOLDERS = ("checkpoints", "plots", "profile", "tensorboard", "wandb")  # Subfolders of a run folder
# Maximum number of times that a launcher may restart a run without a new checkpoint
MAX_FRUITLESS_RESTARTS = 3
# Files that a run writes to its folder. In a folder without a run, a file with one of these names belongs to
# a different program, unless the function for its name returns True. The function returns True for a file
# from a run that ended before training.
IS_WRITTEN_BY_RUN: dict[str, Callable[[dict[str, Any]], bool]] = {
    OWNER_FILE: lambda owner_record: {"id", "beat"} <= owner_record.keys(),
    "restarts.json": lambda restart_counts: {"launcher", "fruitless"} <= restart_counts.keys(),
    "result.json": lambda run_result: run_result == {"status": "preempted"},
    STARTS_FILE: lambda start_line: isinstance(start_line.get("recipe"), dict),
}
RUN_FILE_PATTERNS = (*IS_WRITTEN_BY_RUN, "recipe.json", "metrics.jsonl", "samples.jsonl", "confusion.json")
RUN_FILE_PATTERNS += ("telemetry-*.jsonl", "nvidia-smi-*.txt", "checkpoints/index.json", "plots/curves.png")
RUN_FILE_PATTERNS += (
    "plots/confusion.png",
    "plots/predictions.png",
    "profile/trace.json.gz",
    "profile/table.txt",
)


class RunFolder:
    """Run folder owned by this process, with the S3 mirror and the checkpoint from which the run resumes.

    Args:
        recipe: Recipe of the run.
        automatic_name: Folder name, used unless --output_dir specifies a folder.
        last_step: Last step of the run.
        heartbeat: Function called during long operations.

    Raises:
        ValueError: If the folder or the S3 prefix belongs to a different owner or run, or contains only
            damaged checkpoints.
    """

    mirror: "Mirror | None" = None
    checkpoint: Checkpoint | None = None
    # True if the run begins at this start with the checkpoint of a different run
    starts_from_other_run = False
    resumed_from: str | None = None  # Value of --resume at the run's first start

    def __init__(self, recipe: Recipe, automatic_name: str, last_step: int, heartbeat: Heartbeat):
        self.recipe, self.last_step, self.heartbeat = recipe, last_step, heartbeat
        if recipe.resume == "never" and _is_job_restartable():
            raise ValueError(
                "--resume never would start a new run each time the launcher restarts the job. Remove this"
                " flag, and choose a new --name or --output_dir"
            )
        self.leases: list[Lease] = []  # Leases on the folder and on the S3 prefix
        self.path = self._lease_folder(automatic_name)
        try:
            with explaining_write_errors("the run", self.path):
                self._open_checkpoint()
        except BaseException:
            self.release()
            raise

    def lost_message(self) -> str | None:
        """Return a message if a different run has taken over the folder or the S3 prefix, or None."""
        return next((lease.lost_message for lease in self.leases if lease.lost_message), None)

    def release(self) -> None:
        """Release the leases on the folder and the S3 prefix."""
        for lease in self.leases:
            lease.release()

    def _lease_folder(self, automatic_name: str) -> Path:
        """Acquire the lease on the run's folder, and return the folder's path.

        The folder of a run that has just begun may not contain recipe.json yet, but the owner's record
        contains the recipe. If the recorded recipe differs, the next folder is tried, unless --output_dir
        specifies the folder.
        """
        recipe = self.recipe
        owner_details = {"script": script_name(), "recipe": recipe_part(recipe)}
        for candidate_folder in candidate_folders(recipe, automatic_name, self.last_step):
            try:
                with explaining_write_errors("the run", candidate_folder):
                    folder_lease = Lease(FolderRecord(candidate_folder), self.heartbeat, owner_details)
                # A different run may have used the folder while this process waited for the lease.
                if not why_not_this_run(candidate_folder, recipe, self.last_step):
                    self.leases.append(folder_lease)
                    return candidate_folder
                folder_lease.release()
            except AlreadyOwned as error:
                usual_run_names = (automatic_name, automatic_name.removeprefix(model_prefix(recipe)))
                # A different job continues a run whose name differs from this job's usual names.
                is_other_jobs_run = not candidate_folder.name.startswith(usual_run_names)
                is_folder_given = Path(recipe.output_dir or ANY_FOLDER_NAME).name != ANY_FOLDER_NAME
                if is_folder_given or not (is_other_jobs_run or why_other_run(error.owner_record, recipe)):
                    raise
        raise AssertionError("folder numbers are unlimited")

    def _open_checkpoint(self) -> None:
        """Set `checkpoint` to the checkpoint from which the run resumes, and set `resumed_from`.

        The method removes leftovers of interrupted saves from the run folder. With --s3, it also leases the
        S3 prefix, sets `mirror`, and downloads a newer checkpoint.
        """
        for subfolder_name in SUBFOLDERS:
            refuse_link(self.path / subfolder_name)
        checkpoints.remove_temporary_folders(self.path / "checkpoints")
        if self.recipe.s3:
            from onecurve.checkpoint.mirror import Mirror
            from onecurve.system.s3 import ObjectStore

            s3_store = ObjectStore(self.recipe.s3)
            s3_store.probe()  # Raises StoreError, a ValueError, if the store does not work
            prefix_lease = Lease(PrefixRecord(s3_store), self.heartbeat)
            self.leases.append(prefix_lease)
            self.mirror = Mirror(s3_store, self.path, self.recipe.keep_every, prefix_lease.check_owner)
        self.checkpoint = self._newest_own_checkpoint()
        resume = self.recipe.resume
        has_resume_path = resume not in ("auto", "never")
        if has_resume_path:
            self.starts_from_other_run = self.checkpoint is None
            self.checkpoint = self.checkpoint or _other_runs_checkpoint(self.path, resume, self.heartbeat)
        if self.checkpoint:
            require_same_recipe(str(self.checkpoint.folder), self.checkpoint.manifest, self.recipe)
            if self.starts_from_other_run:
                self.resumed_from = resume
            elif recipe_file := read_recipe_file(self.path):
                self.resumed_from = recipe_file.get("resumed_from")
            else:
                # On a new machine, recipe.json is missing, because the checkpoint was downloaded from the
                # run's S3 prefix.
                self.resumed_from = resume if has_resume_path else None

    def _newest_own_checkpoint(self) -> Checkpoint | None:
        """Return the newest intact checkpoint of this run, or None if there is none.

        If S3 contains a newer checkpoint, this method downloads the checkpoint and the logs to the folder.

        Raises:
            ValueError: If all checkpoints are damaged, if the recipe in S3 differs, or if the run in S3 is
                finished or excluded by --resume never.
        """
        checkpoints_folder = self.path / "checkpoints"
        local_checkpoint = local_error = None
        try:
            local_checkpoint = checkpoints.newest(checkpoints_folder, self.heartbeat)
        except ValueError as error:
            local_error = error  # Raised below unless S3 contains an intact checkpoint
        if self.mirror:
            from onecurve.checkpoint.mirror import committed_steps, download_logs, fetch_newest, read_manifest
            from onecurve.system.s3 import WrongSize

            s3_store, requires_new_run = self.mirror.store, self.recipe.resume == "never"
            # -1 means that there is no checkpoint
            newest_local_step = local_checkpoint.step if local_checkpoint else -1
            newest_s3_step = max(committed_steps(s3_store), default=-1)
            read_stored_result = partial(_read_stored_json, s3_store, "result.json")
            is_run_only_in_s3 = newest_s3_step >= 0 and not steps_in(checkpoints_folder)
            if is_run_only_in_s3 and (requires_new_run or has_finished(read_stored_result, self.last_step)):
                refusal_reason = ", which is finished"
                if requires_new_run:
                    refusal_reason = ", but --resume never requires a new run"
                raise ValueError(
                    f"{s3_store.url} already contains a run{refusal_reason}. Choose a different --s3 address"
                )
            # Require the same recipe even if no checkpoint is downloaded, because the mirror removes older
            # checkpoints.
            if newest_s3_step >= 0:
                # This checkpoint may be damaged. fetch_newest() then finds an intact checkpoint.
                with contextlib.suppress(checkpoints.DamagedCheckpoint, WrongSize):
                    _, stored_manifest = read_manifest(s3_store, newest_s3_step)
                    require_same_recipe(s3_store.url, stored_manifest, self.recipe)
            if newest_s3_step > newest_local_step:
                # Download the logs first. After an interruption, the next start downloads the logs and the
                # checkpoint again.
                download_logs(s3_store, self.path)
                check_prefix_owner = self.leases[-1].check_owner  # The last lease is on the S3 prefix
                fetch_newer = partial(fetch_newest, s3_store, checkpoints_folder, newest_local_step)
                if fetch_newer(self.heartbeat, check_prefix_owner) is not None:
                    return checkpoints.newest(checkpoints_folder, self.heartbeat)
        if local_error:
            raise local_error
        return local_checkpoint


def candidate_folders(recipe: Recipe, automatic_name: str, last_step: int | None) -> Iterator[Path]:
    """Create and yield folders that no other run uses.

    --output_dir specifies the folder. If the last part of --output_dir is `*`, the function tries the folder
    names <name>, <name>-2 and so on. A run in a folder is resumed if it is unfinished, has the same recipe
    and began with the same --resume. Runs from version 1.0, whose names do not contain the model, are also
    resumed. A folder in which no step was trained is reused. If the launcher restarts jobs, an unfinished run
    of this recipe with a different automatic name is also resumed.

    Args:
        recipe: Recipe of the run.
        automatic_name: Automatic name of the run.
        last_step: Last step of the run, or None if the step is unknown. Unless it is None, the function logs
            a hint about an unfinished run that is not resumed, although at most one flag differs.

    Raises:
        ValueError: If --output_dir contains a different run or another program's files, or a recipe.json
            can't be read.
    """
    is_hint_logged = last_step is None  # True if no further hint may be logged
    output_dir = Path(recipe.output_dir or f"runs/{ANY_FOLDER_NAME}")
    given_folder = output_dir if output_dir.name != ANY_FOLDER_NAME else None
    runs_folder = output_dir.parent / script_name()
    old_run_name = automatic_name.removeprefix(model_prefix(recipe))  # Name of the run in version 1.0
    resumable_names: list[str] = []  # Names of unfinished runs, to be tried first
    if not given_folder and old_run_name != automatic_name:
        resumable_names = [*_unfinished_run_names(runs_folder, old_run_name, recipe, last_step)]
    is_name_automatic = not (given_folder or resumable_names or recipe.name or recipe.s3)
    if is_name_automatic and not any(_unfinished_run_names(runs_folder, automatic_name, recipe, last_step)):
        other_run_names = _unfinished_run_names_by_step(runs_folder, recipe, last_step)
        if _is_job_restartable():
            resumable_names = other_run_names
        elif other_run_names and not is_hint_logged:
            furthest_run_name, *_ = other_run_names
            log.info(
                f"{runs_folder / furthest_run_name} contains an unfinished run of this recipe that began with"
                " a different number of processes or a different strategy. To resume that run instead of"
                f" starting a new run, add --name {shlex.quote(furthest_run_name)}"
            )
    automatic_folders = map(runs_folder.joinpath, itertools.chain(resumable_names, numbered(automatic_name)))
    # The caller asks for the folder from --output_dir a second time only if a different run has used it. The
    # second check then raises an error that names the difference.
    for folder in itertools.repeat(given_folder) if given_folder else automatic_folders:
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ValueError(f"the folder {error.filename} can't be created: {error.strerror}") from None
        mismatch_reason = why_not_this_run(folder, recipe, last_step)
        if foreign_name := _foreign_file_name(folder):
            if given_folder:
                raise ValueError(
                    f"--output_dir {folder} contains {foreign_name}, but no run. A run would overwrite this"
                    " file. Choose a different folder, or move the file"
                )
        elif not mismatch_reason:
            yield folder
        elif given_folder:
            raise ValueError(
                f"--output_dir {folder} already contains a run{mismatch_reason}. Choose a different"
                " folder, or move the existing folder"
            )
        elif not is_hint_logged and (flag_difference := only_difference(folder, recipe, last_step)):
            is_hint_logged = True
            log.info(
                f"{folder} contains an unfinished run that differs in one flag ({flag_difference}). To resume"
                " that run, specify the earlier value of the flag"
            )


def _unfinished_run_names(
    runs_folder: Path, base_run_name: str, recipe: Recipe, last_step: int | None
) -> Iterator[str]:
    """Yield the names of unfinished runs of this recipe in the folders <name>, <name>-2 and so on."""
    existing_run_names = itertools.takewhile(
        lambda run_name: (runs_folder / run_name / "recipe.json").exists(), numbered(base_run_name)
    )
    for run_name in existing_run_names:
        run_folder = runs_folder / run_name
        if has_trained(run_folder) and not why_not_this_run(run_folder, recipe, last_step):
            yield run_name


def _unfinished_run_names_by_step(runs_folder: Path, recipe: Recipe, last_step: int | None) -> list[str]:
    """Return the names of this recipe's unfinished runs without a live owner, by descending step."""
    newest_step_by_name = {}  # {run name: step of the newest checkpoint}
    for folder in sorted(runs_folder.glob("*/")):
        with contextlib.suppress(OSError, ValueError):  # The recipe.json of a different run may be damaged
            recipe_file = read_recipe_file(folder) or {}
            is_run_trained = isinstance(recipe_file.get("recipe"), dict) and has_trained(folder)
            # A restarted job may have lost a host. Lease waits for heartbeats from a lost host.
            has_live_owner = is_owned(folder, max_silence_s=0) if _is_job_restartable() else is_owned(folder)
            if is_run_trained and not has_live_owner and not why_not_this_run(folder, recipe, last_step):
                newest_step_by_name[folder.name] = max(steps_in(folder / "checkpoints"), default=0)
    return sorted(newest_step_by_name, key=lambda run_name: -newest_step_by_name[run_name])


def _is_job_restartable() -> bool:
    """Return True if the launcher may restart the job with a different number of processes.

    The launcher is torchrun with --max_restarts, or launch.py in an elastic job.
    """
    _, current_round = job_round()
    return bool(_max_restarts() or current_round)


def _foreign_file_name(folder: Path) -> str | None:
    """Return the name of another program's file that a run would overwrite, or None if there is none."""
    recipe_file = read_recipe_file(folder) or {}
    if "recipe" in recipe_file or steps_in(folder / "checkpoints"):
        return None  # The folder contains a run, whose files are not foreign
    matching_files = (file for pattern in RUN_FILE_PATTERNS for file in sorted(folder.glob(pattern)))
    foreign_files = (file for file in matching_files if file.lstat().st_size and not _is_leftover(file))
    return next((str(foreign_file.relative_to(folder)) for foreign_file in foreign_files), None)


def _is_leftover(run_file: Path) -> bool:
    """Return True if the content shows that a run wrote the file, but ended before it wrote recipe.json."""
    is_written_by_run = IS_WRITTEN_BY_RUN.get(run_file.name)
    if is_written_by_run is None:
        return False
    try:
        file_content = next(json_lines(run_file), {}) if run_file.suffix == ".jsonl" else read_json(run_file)
        return is_written_by_run(file_content)
    except (OSError, ValueError):
        return run_file.name == OWNER_FILE  # Lease handles an unreadable record


def _other_runs_checkpoint(run_folder: Path, resume: str, heartbeat: Heartbeat) -> Checkpoint:
    """Return the checkpoint that --resume specifies, or the newest checkpoint of that run or S3 prefix.

    Args:
        run_folder: Folder of this run, to which a checkpoint is downloaded from S3.
        resume: Value of --resume, which is a local path or an s3:// address.
        heartbeat: Function called during long operations.

    Raises:
        ValueError: If --resume specifies no intact checkpoint.
    """
    resume_path, checkpoint = Path(resume), None
    if resume.startswith("s3://"):
        from onecurve.checkpoint.mirror import fetch_newest
        from onecurve.system.s3 import ObjectStore

        # When the run begins, remove_temporary_folders() removes this folder, because of the name `.step_*`.
        temporary_folder = run_folder / "checkpoints" / ".step_others"
        # -1 includes the checkpoints of all steps.
        if fetch_newest(ObjectStore(resume), temporary_folder, -1, heartbeat) is not None:
            checkpoint = checkpoints.newest(temporary_folder, heartbeat)
    elif step_from_name(resume_path.resolve().name) is not None:
        return checkpoints.verify_checkpoint(resume_path.resolve(), heartbeat)
    else:
        # --resume may specify a run folder or its subfolder checkpoints/
        for candidate_folder in (resume_path / "checkpoints", resume_path):
            if steps_in(candidate_folder):
                checkpoint = checkpoints.newest(candidate_folder, heartbeat, is_owner=False)
                break
    if checkpoint is None:
        hint = "" if "://" in resume else ". Specify a run folder, or one of the run's checkpoints/step_*"
        raise ValueError(f"--resume {resume} contains no checkpoint{hint}")
    return checkpoint


def count_restarts(folder: Path, step: int) -> None:
    """Record this start in restarts.json, and end a job that the launcher restarts again and again.

    The main process calls this function each time a run starts. If the same launcher starts the run at the
    same step again, the previous process made no progress. A restart is not counted if the previous process
    was asked to stop, for example because a host joined.

    Args:
        folder: Folder of the run.
        step: Step at which the run starts or resumes.

    Raises:
        ValueError: If more than MAX_FRUITLESS_RESTARTS consecutive restarts made no progress.
    """
    if _max_restarts() == 0:
        return  # torchrun does not restart this job
    # Identifies the launcher, which is this process's parent, even if its PID is reused
    launcher_id = f"{socket.gethostname()} {os.getppid()} {start_ticks(os.getppid())}"
    restarts_file = folder / "restarts.json"
    fruitless_restarts = 0
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
        previous_restarts = read_json(restarts_file)
        if (previous_restarts["launcher"], previous_restarts["step"]) == (launcher_id, step):
            fruitless_restarts = previous_restarts["fruitless"] + 1
            # Without result.json, read_json() raises an OSError, and the restart counts as fruitless.
            was_asked_to_stop = read_json(folder / "result.json")["status"] == "preempted"
            if was_asked_to_stop:
                fruitless_restarts -= 1
    write_json(restarts_file, {"launcher": launcher_id, "step": step, "fruitless": fruitless_restarts})
    if fruitless_restarts > MAX_FRUITLESS_RESTARTS:
        raise ValueError(
            f"the launcher restarted the job {MAX_FRUITLESS_RESTARTS} times without a new checkpoint since"
            f" step {step:,}. The log of the first failure shows the cause. Fix the cause, then run the same"
            " command to resume"
        )


def _read_stored_json(s3_store: "ObjectStore", object_key: str) -> Any:
    """Return the JSON value in an S3 object. Raise ValueError if the object is missing or invalid."""
    return json.loads(s3_store.read(object_key, JSON_LIMIT_BYTES) or b"")


def _max_restarts() -> int:
    """Return torchrun's --max_restarts, or 0 if torchrun did not start this process."""
    return int(os.environ.get("TORCHELASTIC_MAX_RESTARTS", "0"))
