"""Where a run lives and what it goes on from, decided by the main process alone.

1. The run's own folder is looked at first: its newest checkpoint that verifies.
2. --s3: a newer one there is downloaded first, as on a fresh machine with an empty folder.
3. --resume PATH or s3://...: where a run begins that has no checkpoint of its own.
4. Whatever was chosen must be of the same recipe, but for what --allow_changed names.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from common.checkpoint import format as checkpoints
from common.checkpoint.format import Checkpoint, step_of, steps_in
from common.checkpoint.mirror import Mirror, committed, fetch_log, fetch_newest
from common.recipe import Recipe
from common.run.folder import differences, open_folder, this_run, why_another
from common.run.owner import Folder, Owned, Owner, Prefix
from common.system.files import not_written
from common.system.s3 import ObjectStore

Beat = Callable[[], None]
Say = Callable[[str], None]


@dataclass
class RunStorage:
    """A run's folder, which it owns, its mirror in S3, and the checkpoint to go on from."""

    folder: Path
    owners: list[Owner] = field(default_factory=list)
    mirror: Mirror | None = None
    checkpoint: Checkpoint | None = None
    is_new: bool = False  # whether it begins now, at another run's checkpoint

    def owner_lost(self) -> str | None:
        return next((owner.lost for owner in self.owners if owner.lost), None)

    def release(self) -> None:
        for owner in self.owners:
            owner.release()


def open_storage(recipe: Recipe, name: str, last_step: int, beat: Beat, say: Say) -> RunStorage:
    """ValueError when it has another owner, holds another run, or no checkpoint of several verifies.

    name: of the folder, as open_folder takes it. last_step: of this run. A prefix in S3 that has it already
    is another run's.
    """
    storage = _own_folder(recipe, name, last_step, beat, say)
    folder = storage.folder
    try:
        checkpoints.remove_temporary(folder / "checkpoints")
        store = ObjectStore(recipe.s3) if recipe.s3 else None
        if store:
            store.probe()
            storage.owners.append(Owner(Prefix(store), beat, say))
        storage.checkpoint = _own(folder, store, recipe, last_step, beat, say)
        if recipe.resume not in ("auto", "never"):
            # One that was downloaded by a start that was then stopped is still another run's.
            began = (folder / "recipe.json").exists() or (store is not None and committed(store))
            storage.is_new = storage.checkpoint is None or not began
            if storage.checkpoint is None:
                storage.checkpoint = _others(folder, recipe.resume, beat, say)
        if storage.checkpoint:
            _check_recipe(storage.checkpoint, recipe)
        if store:
            storage.mirror = Mirror(store, folder, recipe.keep_every, say)
    except OSError as error:
        storage.release()
        raise not_written("the run", folder, error) from None
    except BaseException:
        storage.release()
        raise
    return storage


def _own_folder(recipe: Recipe, name: str, last_step: int, beat: Beat, say: Say) -> RunStorage:
    """The run's folder, owned. A run of another recipe that has just begun in it may have no recipe.json
    yet: its owner's record has the recipe. Then a named folder gets the next number."""
    passed: set[Path] = set()
    while True:
        folder = open_folder(recipe, name, last_step, passed)
        try:
            storage = RunStorage(folder, [Owner(Folder(folder), beat, say, this_run(recipe))])
        except Owned as error:
            if recipe.output_dir or not why_another(error.record, recipe):
                raise
            passed.add(folder)
            continue
        except OSError as error:
            raise not_written("the run", folder, error) from None
        try:
            if open_folder(recipe, name, last_step, passed) == folder:  # nobody had it since it was looked at
                return storage
        except BaseException:
            storage.release()
            raise
        storage.release()


def _own(
    folder: Path, store: ObjectStore | None, recipe: Recipe, last_step: int, beat: Beat, say: Say
) -> Checkpoint | None:
    own, found, problem = folder / "checkpoints", None, None
    try:
        found = checkpoints.newest(own, beat, say)
    except ValueError as error:
        problem = error  # unless there is an intact one in S3
    if store:
        here, there = found.step if found else -1, max(committed(store), default=-1)
        if there >= 0 and not steps_in(own) and (recipe.resume == "never" or there >= last_step):
            what = "and --resume is never" if recipe.resume == "never" else "which is finished"
            raise ValueError(f"{store.url} holds a run already, {what}: give a prefix of its own")
        if there > here:
            fetch_log(store, folder)  # first: who is killed before the checkpoint is here does both again
            if fetch_newest(store, own, here, beat, say, ours=True) is not None:
                return checkpoints.newest(own, beat, say)
    if problem:
        raise problem
    return found


def _others(folder: Path, resume: str, beat: Beat, say: Say) -> Checkpoint:
    """The checkpoint of another run that --resume names."""
    if not resume.startswith("s3://"):
        return _at_path(Path(resume), beat, say)
    if fetch_newest(ObjectStore(resume), folder / "checkpoints", -1, beat, say, ours=False) is None:
        raise ValueError(f"--resume {resume} holds no checkpoint")
    return checkpoints.newest(folder / "checkpoints", beat, say)


def _at_path(path: Path, beat: Beat, say: Say) -> Checkpoint:
    """A checkpoint's folder, or the newest of a run's."""
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
