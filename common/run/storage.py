"""Opens a run's folder and its mirror in S3, and chooses the checkpoint to resume from. Main process only.

1. The newest checkpoint in the run's own folder that verifies.
2. If --s3 has a newer one, it is downloaded first, as on a new machine with an empty folder.
3. Without a checkpoint of its own, the run starts from --resume PATH or s3://....
4. The chosen one must have the same recipe, except for the flags that --allow_changed names.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from common.checkpoint import format as checkpoints
from common.checkpoint.format import Checkpoint, step_of, steps_in
from common.checkpoint.mirror import Mirror, committed, fetch_log, fetch_newest
from common.recipe import Recipe
from common.run.folder import differences, open_folder, this_run, why_other_run
from common.run.owner import AlreadyOwned, FolderRecord, Owner, PrefixRecord
from common.system.files import not_written
from common.system.s3 import ObjectStore
from common.system.threads import Heartbeat

Say = Callable[[str], None]


@dataclass
class RunStorage:
    """A run's folder, which this process owns, its mirror in S3, and the checkpoint to resume from."""

    folder: Path
    owners: list[Owner] = field(default_factory=list)
    mirror: Mirror | None = None
    checkpoint: Checkpoint | None = None
    is_new: bool = False  # True when the run begins now, from another run's checkpoint

    def owner_lost(self) -> str | None:
        return next((owner.lost for owner in self.owners if owner.lost), None)

    def release(self) -> None:
        for owner in self.owners:
            owner.release()


def open_storage(recipe: Recipe, name: str, last_step: int, beat: Heartbeat, say: Say) -> RunStorage:
    """Opens the storage. ValueError when it has another owner or run, or has checkpoints but none verifies.

    name: of the folder, for open_folder(). last_step: of this run. A prefix in S3 that already has a
    checkpoint of that step belongs to another run.
    """
    storage = _own_folder(recipe, name, last_step, beat, say)
    folder = storage.folder
    try:
        checkpoints.remove_temporary(folder / "checkpoints")
        store = ObjectStore(recipe.s3) if recipe.s3 else None
        if store:
            store.probe()
            storage.owners.append(Owner(PrefixRecord(store), beat, say))
        storage.checkpoint = _own_checkpoint(
            folder, store, recipe, last_step, beat, say, storage.owners[-1].check
        )
        if recipe.resume not in ("auto", "never"):
            # A checkpoint downloaded by an interrupted start is still another run's.
            began = (folder / "recipe.json").exists() or (store is not None and committed(store))
            storage.is_new = storage.checkpoint is None or not began
            if storage.checkpoint is None:
                storage.checkpoint = _other_runs_checkpoint(folder, recipe.resume, beat, say)
        if storage.checkpoint:
            _check_recipe(storage.checkpoint, recipe)
        if store:
            storage.mirror = Mirror(store, folder, recipe.keep_every, say, storage.owners[-1].check)
    except OSError as error:
        storage.release()
        raise not_written("the run", folder, error) from None
    except BaseException:
        storage.release()
        raise
    return storage


def _own_folder(recipe: Recipe, name: str, last_step: int, beat: Heartbeat, say: Say) -> RunStorage:
    """Becomes the owner of the run's folder.

    A run of another recipe that has just begun there may have no recipe.json yet, but its owner's record has
    the recipe. Unless --output_dir names the folder, the next number is tried then."""
    passed: set[Path] = set()
    while True:
        folder = open_folder(recipe, name, last_step, passed)
        try:
            storage = RunStorage(folder, [Owner(FolderRecord(folder), beat, say, this_run(recipe))])
        except AlreadyOwned as error:
            if recipe.output_dir or not why_other_run(error.record, recipe):
                raise
            passed.add(folder)
            continue
        except OSError as error:
            raise not_written("the run", folder, error) from None
        try:
            if open_folder(recipe, name, last_step, passed) == folder:  # no other run used it meanwhile
                return storage
        except BaseException:
            storage.release()
            raise
        storage.release()


def _own_checkpoint(
    folder: Path,
    store: ObjectStore | None,
    recipe: Recipe,
    last_step: int,
    beat: Heartbeat,
    say: Say,
    lost: Callable[[], str | None],
) -> Checkpoint | None:
    """lost: of the last lease taken, that on the store if there is one."""
    own, found, problem = folder / "checkpoints", None, None
    try:
        found = checkpoints.newest(own, beat, say)
    except ValueError as error:
        problem = error  # raised below, unless S3 has an intact one
    if store:
        here, there = found.step if found else -1, max(committed(store), default=-1)
        if there >= 0 and not steps_in(own) and (recipe.resume == "never" or there >= last_step):
            what = "and --resume is never" if recipe.resume == "never" else "which is finished"
            raise ValueError(f"{store.url} holds a run already, {what}: give another prefix")
        if there > here:
            fetch_log(store, folder)  # first: a kill before the checkpoint is complete repeats both
            if fetch_newest(store, own, here, beat, say, lost) is not None:
                return checkpoints.newest(own, beat, say)
    if problem:
        raise problem
    return found


def _other_runs_checkpoint(folder: Path, resume: str, beat: Heartbeat, say: Say) -> Checkpoint:
    if not resume.startswith("s3://"):
        return _checkpoint_at(Path(resume), beat, say)
    fetched = fetch_newest(ObjectStore(resume), folder / "checkpoints", -1, beat, say)
    found = None if fetched is None else checkpoints.newest(folder / "checkpoints", beat, say)
    if found is None:
        raise ValueError(f"--resume {resume} holds no checkpoint")
    return found


def _checkpoint_at(path: Path, beat: Heartbeat, say: Say) -> Checkpoint:
    """The checkpoint at a path: a checkpoint's folder, or a run's folder with its newest checkpoint."""
    if step_of(path.resolve().name) is not None:
        return checkpoints.verify(path.resolve(), beat)
    for parent in (path / "checkpoints", path):
        if steps_in(parent) and (found := checkpoints.newest(parent, beat, say, ours=False)):
            return found
    raise ValueError(
        f"--resume {path} holds no checkpoint: give a run's folder, or one of its checkpoints/step_*"
    )


def _check_recipe(found: Checkpoint, recipe: Recipe) -> None:
    theirs = found.manifest.get("recipe")
    differing = differences(theirs, recipe) if isinstance(theirs, dict) else "it has none"
    if differing:
        raise ValueError(
            f"{found.folder} is of another recipe ({differing}): give the same flags, or name with"
            " --allow_changed what may differ"
        )
