"""A trained model, wherever it lies: found, verified, with what its manifest says of it."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from common.checkpoint.format import (
    EMA,
    INDEX,
    JSON_LIMIT_BYTES,
    MANIFEST,
    MODEL,
    Checkpoint,
    newest,
    parse_index,
    step_name,
    step_of,
    steps_in,
    verify,
)
from common.checkpoint.mirror import fetch, fetch_newest
from common.system.s3 import ObjectStore
from common.system.text import printable

Beat = Callable[[], None]


@dataclass(frozen=True)
class TrainedModel:
    """Of a lone file, without a manifest, only the first three are known."""

    weights: str  # the file, on this process's disk
    name: str  # of the file, for people
    reports: str  # the folder for what is found out about it
    step: int | None = None
    script: str | None = None  # the name of what trained it
    recipe: dict[str, Any] | None = None
    classes: list[str] | None = None


def find(place: str, which: str, scratch: Path, beat: Beat) -> TrainedModel:
    """The model at a run's folder or s3:// prefix, in a checkpoint's folder, or in a .safetensors file.

    which: of a run, its `best` checkpoint or the `latest`; of a checkpoint, the averaged weights where there
    are some. Downloads go to `scratch`. ValueError when there is none, or what there is does not verify.
    """
    if place.startswith("s3://"):
        store = ObjectStore(place)
        found = _download(store, which, scratch, beat)
        reports = Path("validation") / store.url.rpartition("/")[2]
        return _described(found, reports, f"{store.url}/checkpoints/{found.folder.name}")
    path, file = Path(place).resolve(), None
    if not path.exists():
        raise ValueError(f"{place}: there is no such folder or file")
    if path.is_file():
        if not (path.parent / MANIFEST).exists():
            return TrainedModel(str(path), _shown(path), str(Path("validation") / path.stem))
        path, file = path.parent, path.name
    found = verify(path, beat) if step_of(path.name) is not None or file else _of_run(path, which, beat)
    in_run = found.folder.parent.name == "checkpoints"
    reports = found.folder.parents[1] / "validation" if in_run else Path("validation") / found.folder.name
    return _described(found, reports, _shown(found.folder), file)


def _of_run(folder: Path, which: str, beat: Beat) -> Checkpoint:
    """A run's best checkpoint, or the newest that verifies."""
    parent = folder / "checkpoints"
    if not steps_in(parent):
        raise ValueError(f"{_shown(folder)} holds no checkpoints/step_*: give the folder of a run")
    if which == "latest":
        return newest(parent, beat, print, ours=False)
    index = parent / INDEX
    best = parse_index(index.read_bytes(), _shown(index)).get("best") if index.exists() else None
    if best is None or not (parent / step_name(best)).is_dir():
        raise ValueError(f"{_shown(folder)} does not hold its best checkpoint: take --which latest")
    return verify(parent / step_name(best), beat)


def _download(store: ObjectStore, which: str, scratch: Path, beat: Beat) -> Checkpoint:
    """The best checkpoint of the run in S3, or the newest that verifies."""
    if which == "latest":
        step = fetch_newest(store, scratch, -1, beat, print, ours=False)
        if step is None:
            raise ValueError(f"{store.url} holds no checkpoint: give the prefix of a run")
    else:
        key = f"checkpoints/{INDEX}"
        content = store.read(key, JSON_LIMIT_BYTES)
        if content is None:
            raise ValueError(f"{store.url} holds no run: {key} is missing")
        step = parse_index(content, f"{store.url}/{key}").get("best")
        if step is None:
            raise ValueError(f"{store.url} does not hold its best checkpoint: take --which latest")
        fetch(store, step, scratch, beat, print)
    return verify(scratch / step_name(step), beat)


def _described(found: Checkpoint, reports: Path, name: str, file: str | None = None) -> TrainedModel:
    """file: of the weights, where it is given."""
    manifest = found.manifest
    file = file or (EMA if EMA in manifest["files"] else MODEL)
    if file not in (EMA, MODEL) or file not in manifest["files"]:
        raise ValueError(f"{name}/{file} does not hold a model: give {name}/{MODEL}")
    recipe, classes, writer = (manifest.get(key) for key in ("recipe", "classes", "written_by"))
    script = writer.get("script") if isinstance(writer, dict) else None
    if not isinstance(recipe, dict) or not isinstance(classes, list) or not isinstance(script, str):
        raise ValueError(f"{name}/{MANIFEST} does not say what trained it: no train script has written it")
    weights = str(found.folder / file)
    classes = [printable(name) for name in classes]
    return TrainedModel(weights, f"{name}/{file}", str(reports), found.step, script, recipe, classes)


def _shown(path: Path) -> str:
    """Relative where it lies below the current folder."""
    return str(path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path)
