"""A run's folder: a new one or that of an unfinished run, its lease, its mirror in S3, and its checkpoint.

The run resumes from:

1. The newest checkpoint in the run's own folder that verifies.
2. If --s3 has a newer one, it is downloaded first, as on a new machine with an empty folder.
3. Without a checkpoint of its own, the run starts from --resume PATH or s3://....
4. The chosen one must have the same recipe, except for the flags that --allow_changed names.

Main process only.
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

if TYPE_CHECKING:  # imported with --s3
    from onecurve.checkpoint.mirror import Mirror
    from onecurve.system.s3 import ObjectStore

FOLDERS = ("checkpoints", "plots", "profile", "tensorboard", "wandb")  # in a run's folder
FRUITLESS_RESTARTS = 3  # restarts by a launcher without a new checkpoint, after which it gives up
# Files that a run writes into its folder. In a folder without a run they are another program's, unless they
# have these keys, as a start that ended early leaves them.
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
    """A run's folder, which this process owns, its mirror in S3, and the checkpoint to resume from.

    name: of the folder where none is given. last_step: of this run. ValueError when the folder or the prefix
    has another owner or run, or has checkpoints but none verifies.
    """

    mirror: "Mirror | None" = None
    checkpoint: Checkpoint | None = None
    is_new = False  # True when the run begins now, from another run's checkpoint
    began_at: str | None = None  # the --resume with which the run began

    def __init__(self, recipe: Recipe, name: str, last_step: int, heartbeat: Heartbeat):
        self.recipe, self.last_step, self.heartbeat = recipe, last_step, heartbeat
        if recipe.resume == "never" and _is_restarted():
            raise ValueError(
                "--resume never: the launcher may start the job again, which would begin anew each time:"
                " leave it out, and choose a new --name or --output_dir"
            )
        self.leases: list[Lease] = []  # on the folder, and then on the prefix in S3
        self.path = self._lease(name)
        try:
            with writing("the run", self.path):
                self._open()
        except BaseException:
            self.release()
            raise

    def lost(self) -> str | None:
        """The message once another run has taken over the folder or the prefix."""
        return next((lease.lost for lease in self.leases if lease.lost), None)

    def release(self) -> None:
        for lease in self.leases:
            lease.release()

    def _lease(self, name: str) -> Path:
        """Takes the lease on the run's folder, which it returns.

        A run of another recipe that has just begun there may have no recipe.json yet, but its owner's record
        has the recipe. Unless --output_dir names the folder, the next number is tried then.
        """
        recipe = self.recipe
        identity = {"script": script_name(), "recipe": recipe_part(recipe)}
        for path in folders(recipe, name, self.last_step):
            try:
                with writing("the run", path):
                    lease = Lease(FolderRecord(path), self.heartbeat, identity)
                if not why_not_this_run(path, recipe, self.last_step):  # no other run used it meanwhile
                    self.leases.append(lease)
                    return path
                lease.release()
            except AlreadyOwned as error:
                usual_names = (name, name.removeprefix(model_part(recipe)))
                is_elsewhere = not path.name.startswith(usual_names)  # another job continues that run
                is_given = Path(recipe.output_dir or "*").name != "*"
                if is_given or not (is_elsewhere or why_other_run(error.record, recipe)):
                    raise
        raise AssertionError("there is always another number")

    def _open(self) -> None:
        """Finds the checkpoint to resume from, and the mirror."""
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
            # On another machine, whose checkpoint comes from our own prefix, there is no recipe.json.
            begun = {"resumed_from": None if resume in ("auto", "never") else resume}
            self.began_at = resume if self.is_new else (recorded_recipe(path) or begun).get("resumed_from")

    def _own_checkpoint(self) -> Checkpoint | None:
        """The newest checkpoint in the folder, after a download if S3 has a newer one."""
        parent, checkpoint, problem = self.path / "checkpoints", None, None
        try:
            checkpoint = checkpoints.newest(parent, self.heartbeat)
        except ValueError as error:
            problem = error  # raised below, unless S3 has an intact one
        if self.mirror:
            from onecurve.checkpoint.mirror import committed, fetch_log, fetch_newest, read_manifest
            from onecurve.system.s3 import WrongSize

            store, is_never = self.mirror.store, self.recipe.resume == "never"
            here, there = checkpoint.step if checkpoint else -1, max(committed(store), default=-1)
            result = partial(_stored_json, store, "result.json")
            if there >= 0 and not steps_in(parent) and (is_never or has_finished(result, self.last_step)):
                what = "and --resume is never" if is_never else "which is finished"
                raise ValueError(f"{store.url} holds a run already, {what}: choose another prefix")
            if there >= 0:  # also where nothing is fetched, as the mirror removes what is older
                with contextlib.suppress(
                    checkpoints.DamagedCheckpoint, WrongSize
                ):  # fetch_newest() finds another one
                    check_recipe(store.url, read_manifest(store, there)[1], self.recipe)
            if there > here:
                fetch_log(store, self.path)  # first: a kill before the checkpoint is complete repeats both
                lost = self.leases[-1].check
                if fetch_newest(store, parent, here, self.heartbeat, lost) is not None:
                    return checkpoints.newest(parent, self.heartbeat)
        if problem:
            raise problem
        return checkpoint


def folders(recipe: Recipe, name: str, last_step: int | None) -> Iterator[Path]:
    """Makes and yields folders without another run: --output_dir, or <name>, <name>-2, ... for its `*`.

    A run there is continued if it is unfinished, has the same recipe, and began at the same --resume; so is
    one that 1.0 named without the model. The folder of a start that trained nothing is taken. An unfinished
    run of this recipe under another automatic name is continued where the launcher restarts jobs.
    last_step: of this run, None if unknown; with it a line names an unfinished run that is not continued, of
    this recipe or with one other value.
    ValueError for another run or another program's files in --output_dir, and for a recipe.json that can't be
    read.
    """
    is_said = last_step is None
    where = Path(recipe.output_dir or "runs/*")
    given, parent = where if where.name != "*" else None, where.parent / script_name()
    old = name.removeprefix(model_part(recipe))  # as 1.0 named it
    names = [*_begun(parent, old, recipe, last_step)] if not given and old != name else []
    if not (given or names or recipe.name or recipe.s3 or any(_begun(parent, name, recipe, last_step))):
        elsewhere = _begun_elsewhere(parent, recipe, last_step)
        if _is_restarted():
            names = elsewhere
        elif elsewhere and not is_said:
            log.info(
                f"{parent / elsewhere[0]} holds an unfinished run of this recipe, which began with another"
                " number of processes or another strategy. To continue it instead of starting a new run, add"
                f" --name {shlex.quote(elsewhere[0])}"
            )
    usual = map(parent.joinpath, itertools.chain(names, numbered(name)))
    for folder in itertools.repeat(given) if given else usual:
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ValueError(f"can't make the run folder {error.filename}: {error.strerror}") from None
        reason = why_not_this_run(folder, recipe, last_step)
        if file := _other_programs_file(folder):
            if given:
                raise ValueError(
                    f"--output_dir {folder} holds {file}, but no run: it would be overwritten. Choose another"
                    " folder, or move that file away"
                )
        elif not reason:
            yield folder
        elif given:
            raise ValueError(
                f"--output_dir {folder} holds a run already{reason}: choose another folder, or move that one"
                " away"
            )
        elif not is_said and (differing := only_difference(folder, recipe, last_step)):
            is_said = True
            line = f"{folder} holds a run that has not finished; {differing}: to resume it, give that value"
            log.info(line)


def _begun(parent: Path, name: str, recipe: Recipe, last_step: int | None) -> Iterator[str]:
    """The names of unfinished runs of this recipe, of <name>, <name>-2, ..."""
    there = itertools.takewhile(lambda n: (parent / n / "recipe.json").exists(), numbered(name))
    return (
        n for n in there if has_trained(parent / n) and not why_not_this_run(parent / n, recipe, last_step)
    )


def _begun_elsewhere(parent: Path, recipe: Recipe, last_step: int | None) -> list[str]:
    """Return the names of unfinished runs of this recipe without a living owner, the most advanced first."""
    steps = {}
    for folder in sorted(parent.glob("*/")):
        with contextlib.suppress(OSError, ValueError):  # a damaged recipe.json of another run
            is_known = isinstance((recorded_recipe(folder) or {}).get("recipe"), dict) and has_trained(folder)
            # A restarted job may have lost a host: it waits for a heartbeat of an owner on another machine.
            owned = is_owned(folder, 0) if _is_restarted() else is_owned(folder)
            if is_known and not owned and not why_not_this_run(folder, recipe, last_step):
                steps[folder.name] = max(steps_in(folder / "checkpoints"), default=0)
    return sorted(steps, key=lambda name: -steps[name])


def _is_restarted() -> bool:
    """Return True under a launcher that may start the job again, with another number of processes."""
    return bool(_most_restarts() or job_round()[1])


def _other_programs_file(folder: Path) -> str | None:
    """Return a file that a run would replace, in a folder that holds no run; else None."""
    if "recipe" in (recorded_recipe(folder) or {}) or steps_in(folder / "checkpoints"):
        return None
    files = (file for pattern in PATTERNS for file in sorted(folder.glob(pattern)) if file.lstat().st_size)
    names = (str(file.relative_to(folder)) for file in files if not _is_leftover(file))
    return next(names, None)


def _is_leftover(file: Path) -> bool:
    """Return True for a file of a start of ours that ended before it wrote recipe.json."""
    if not (is_ours := WRITTEN.get(file.name)):
        return False
    try:
        return is_ours(next(json_lines(file), {}) if file.suffix == ".jsonl" else read_json(file))
    except (OSError, ValueError):
        return file.name == RECORD  # Lease judges one that can't be read


def _other_runs_checkpoint(folder: Path, resume: str, heartbeat: Heartbeat) -> Checkpoint:
    """The checkpoint that --resume names: in S3, a checkpoint's folder, or the newest in a run's folder."""
    path, parent, checkpoint = Path(resume), folder / "checkpoints" / ".step_others", None  # temporary
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
        hint = "" if "://" in resume else ": give a run's folder, or one of its checkpoints/step_*"
        raise ValueError(f"--resume {resume} holds no checkpoint{hint}")
    return checkpoint


def count_restarts(folder: Path, step: int) -> None:
    """Counts a launcher's restarts in restarts.json. Called at each start. step: where this start begins.

    A restart by the same launcher at the same step is one without progress, unless the process before it was
    told to stop, as when a host joins. ValueError at the fourth.
    """
    if _most_restarts() == 0:
        return
    launcher = f"{socket.gethostname()} {os.getppid()} {start_ticks(os.getppid())}"  # unique
    file, fruitless = folder / "restarts.json", 0
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
        before = read_json(file)
        if (before["launcher"], before["step"]) == (launcher, step):
            fruitless = before["fruitless"] + 1
            fruitless -= read_json(folder / "result.json")["status"] == "preempted"  # it may not be there
    write_json(file, {"launcher": launcher, "step": step, "fruitless": fruitless})
    if fruitless > FRUITLESS_RESTARTS:
        raise ValueError(
            f"{FRUITLESS_RESTARTS} restarts without a new checkpoint since step {step:,}: giving up. The log"
            " of the first failure says why; run the same command to resume when that is fixed"
        )


def _stored_json(store: "ObjectStore", key: str) -> Any:
    return json.loads(store.read(key, JSON_LIMIT_BYTES) or b"")


def _most_restarts() -> int:
    return int(os.environ.get("TORCHELASTIC_MAX_RESTARTS", "0"))
