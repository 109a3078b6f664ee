"""Finds and verifies a trained model on the disk or in S3: a run's, a checkpoint's or a single file."""

from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist
from accelerate import Accelerator
from torch import nn

from common.checkpoint.format import (
    EMA_FILE,
    INDEX_FILE,
    JSON_LIMIT_BYTES,
    MANIFEST_FILE,
    MODEL_FILE,
    Checkpoint,
    TensorFile,
    best_in,
    newest,
    parse_index,
    step_name,
    step_of,
    steps_in,
    verify,
)
from common.checkpoint.mirror import fetch, fetch_newest
from common.distributed.agreement import once
from common.recipe import ImageRecipe, parse
from common.script import as_flags, load_script, own_script, recipe_class
from common.system.paths import shortest
from common.system.s3 import ObjectStore
from common.system.text import printable
from common.system.threads import Heartbeat


@dataclass(frozen=True)
class TrainedModel:
    """The weights and facts of their manifest. Without a manifest only the first three fields are set."""

    weights: str  # path of the file on the local disk
    name: str  # for people
    reports: str  # folder for reports about the model
    step: int | None = None
    script: str | None = None  # the name of the script that trained it
    recipe: dict[str, Any] | None = None
    classes: list[str] | None = None


def find(location: str, which: str, scratch: Path, beat: Heartbeat) -> TrainedModel:
    """Finds the model at a run's folder or s3:// prefix, a checkpoint's folder, or a .safetensors file.

    which: a run's `best` or `latest` checkpoint. A checkpoint's averaged weights are preferred. Downloads go
    to `scratch`. ValueError when there is no model, or it does not verify.
    """
    if location.startswith("s3://"):
        store = ObjectStore(location)
        found = _download(store, which, scratch, beat)
        reports = Path("validation") / store.url.rpartition("/")[2]
        return _described(found, reports, f"{store.url}/checkpoints/{found.folder.name}")
    path, file = Path(location).resolve(), None
    if not path.exists():
        raise ValueError(f"{location}: there is no such folder or file")
    if path.is_file():
        if not (path.parent / MANIFEST_FILE).exists():
            return TrainedModel(str(path), shortest(path), str(Path("validation") / path.stem))
        path, file = path.parent, path.name
    found = verify(path, beat) if step_of(path.name) is not None or file else _of_run(path, which, beat)
    in_run = found.folder.parent.name == "checkpoints"
    reports = found.folder.parents[1] / "validation" if in_run else Path("validation") / found.folder.name
    return _described(found, reports, shortest(found.folder), file)


def open_script(
    trained: TrainedModel, file: str | None, words: list[str]
) -> tuple[ModuleType, ImageRecipe, Path]:
    """The script that trained the model, its recipe changed by flags, and the script's file.

    file: of the script, if it is not the project's script that the manifest names. Raises ValueError unless
    the script trains a classifier of images.
    """
    if file and not Path(file).is_file():
        raise ValueError(f"--script {file}: there is no such file")
    try:
        path = Path(file) if file else own_script(trained.script)
        script = load_script(path)
        kind = recipe_class(script)
        if not issubclass(kind, ImageRecipe):
            raise ValueError(
                f"{script.__name__} trains no classifier of images, which alone can be used here"
            )
        return script, parse(kind, [*as_flags(trained.recipe or {}, kind), *words]), path
    except ValueError as error:
        raise ValueError(f"{trained.name}: {error}") from None


def load_trained(model: nn.Module, file: Path) -> None:
    """Copies the weights of a safetensors file into a model. ValueError unless names and shapes agree."""
    weights, own = TensorFile(file), model.state_dict()
    weights.expect({name: tuple(tensor.shape) for name, tensor in own.items()})
    model.load_state_dict({name: weights.tensor(name) for name in own})


def load_everywhere(accelerator: Accelerator, model: nn.Module, file: Path, timeout_s: int) -> None:
    """Loads the main process's file into the model of every process, and moves the models to their devices.
    Collective."""
    once(accelerator, "weights", lambda _: load_trained(model, file), timeout_s)
    model.to(accelerator.device)
    if dist.is_initialized():
        for tensor in model.state_dict().values():
            dist.broadcast(tensor, 0)
    model.to(memory_format=torch.channels_last)


def _of_run(folder: Path, which: str, beat: Heartbeat) -> Checkpoint:
    """A run's best checkpoint, or with `latest` the newest that verifies."""
    parent = folder / "checkpoints"
    if not steps_in(parent):
        raise ValueError(f"{shortest(folder)} holds no checkpoints/step_*: give the folder of a run")
    if which == "latest":
        found = newest(parent, beat, print, ours=False)
        assert found, "there are some"
        return found
    if (best := best_in(parent)) is None:
        raise ValueError(f"{shortest(folder)} does not hold its best checkpoint: take --which latest")
    return verify(best, beat)


def _download(store: ObjectStore, which: str, scratch: Path, beat: Heartbeat) -> Checkpoint:
    """Downloads the best checkpoint of a run in S3, or with `latest` the newest that verifies."""
    if which == "latest":
        step = fetch_newest(store, scratch, -1, beat, print)
        if step is None:
            raise ValueError(f"{store.url} holds no checkpoint: give the prefix of a run")
    else:
        key = f"checkpoints/{INDEX_FILE}"
        content = store.read(key, JSON_LIMIT_BYTES)
        if content is None:
            raise ValueError(f"{store.url} holds no run: {key} is missing")
        step = parse_index(content, f"{store.url}/{key}").get("best")
        if step is None:
            raise ValueError(f"{store.url} does not hold its best checkpoint: take --which latest")
        fetch(store, step, scratch, beat, print)
    return verify(scratch / step_name(step), beat)


def _described(found: Checkpoint, reports: Path, name: str, file: str | None = None) -> TrainedModel:
    """The model of a verified checkpoint. file: name of the weights' file, if the user gave one."""
    manifest = found.manifest
    file = file or (EMA_FILE if EMA_FILE in manifest["files"] else MODEL_FILE)
    if file not in (EMA_FILE, MODEL_FILE) or file not in manifest["files"]:
        raise ValueError(f"{name}/{file} does not hold a model: give {name}/{MODEL_FILE}")
    recipe, classes, writer = (manifest.get(key) for key in ("recipe", "classes", "written_by"))
    script = writer.get("script") if isinstance(writer, dict) else None
    if not isinstance(recipe, dict) or not isinstance(classes, list) or not isinstance(script, str):
        raise ValueError(
            f"{name}/{MANIFEST_FILE} does not say what trained it: no train script has written it"
        )
    weights = str(found.folder / file)
    classes = [printable(name) for name in classes]
    return TrainedModel(weights, f"{name}/{file}", str(reports), found.step, script, recipe, classes)
