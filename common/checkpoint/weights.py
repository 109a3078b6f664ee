"""Weights of a trained model: those of a run, a checkpoint or a file, and those that fine-tuning begins with.

timm's loading adapts weights to its model: it resamples the position embeddings if the number of patches
differs, and the patch embedding if the patch size differs.
"""

import contextlib
import re
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from accelerate import Accelerator
from accelerate.utils import broadcast
from torch import nn

from common.checkpoint.format import (
    EMA_FILE,
    INDEX_FILE,
    JSON_LIMIT_BYTES,
    MANIFEST_FILE,
    MODEL_FILE,
    STATE_FILE,
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
from common.data.class_names import NEW, match_classes
from common.distributed.agreement import once
from common.recipe import ImageRecipe, parse
from common.script import as_flags, load_script, own_script, recipe_class
from common.system.env import hub_problem, rank
from common.system.files import read_json
from common.system.paths import shortest
from common.system.text import plural, printable
from common.system.threads import Heartbeat
from common.timm_models import head_names

if TYPE_CHECKING:  # imported where it is needed
    from common.system.s3 import ObjectStore

# A command that converts a pickle, which the user runs, never this code. timm prefers the averaged weights of
# a training's checkpoint, and lets torch load only tensors.
CONVERT = (
    "import sys; from timm.models import load_state_dict as load; from safetensors.torch import save_file;"
    " save_file({n: t.clone().contiguous() for n, t in load(sys.argv[1]).items()}, sys.argv[2])"
)
WRAPPERS = ("_orig_mod.", "module.", "model.")  # before each name: torch.compile's, DDP's, Lightning's
EXPORTED = "config.json"  # of a folder that export.py wrote
PICKLES = (b"PK", b"\x80")  # first bytes of torch's files, new and old ones
_held: dict[str, TensorFile] = {}  # found and not yet loaded, by their paths


@dataclass(frozen=True)
class TrainedModel:
    """The weights and facts of their manifest. A lone file has the first three fields, and maybe classes."""

    weights: str  # path of the file on the local disk
    name: str  # for people
    reports: str  # folder for reports about the model
    step: int | None = None
    script: str | None = None  # the name of the script that trained it
    recipe: dict[str, Any] | None = None
    classes: list[str] | None = None
    accuracy: float | None = None  # of the evaluation of these weights during the training
    cropped: bool | None = None  # how its images were evaluated: cropped, or whole; None: not known

    @property
    def run_name(self) -> str:
        """The name of what holds the model: reports is <run>/validation, or validation/<name>."""
        reports = Path(self.reports)
        return reports.parent.name if reports.name == "validation" else reports.name


def find(location: str, which: str, scratch: Path, heartbeat: Heartbeat) -> TrainedModel:
    """Finds the model at a run's folder or s3:// prefix, a checkpoint's folder, export.py's folder, or a
    .safetensors file.

    which: a run's `best` or `latest` checkpoint. A checkpoint's averaged weights are preferred. Downloads go
    to `scratch`. ValueError when there is no model, or it does not verify. A running training may replace its
    checkpoint: then it looks again, and holds what it found open until load_trained() reads it.
    """
    while True:
        before = steps_in(Path(location) / "checkpoints")
        try:
            found = _find(location, which, scratch, heartbeat)
            _held[found.weights] = TensorFile(Path(found.weights))
            return found
        except ValueError:
            if before == steps_in(Path(location) / "checkpoints"):
                raise


def _find(location: str, which: str, scratch: Path, heartbeat: Heartbeat) -> TrainedModel:
    if location.startswith("s3://"):
        from common.system.s3 import ObjectStore

        store = ObjectStore(location)
        stored = _download(store, which, scratch, heartbeat)
        reports = Path("validation") / store.url.rpartition("/")[2]
        name = f"{store.url}/checkpoints/{stored.folder.name}"
        return _described(stored, reports, name, _preferred(stored))
    path = Path(location).resolve()
    file, found = _locate(path, which, heartbeat)
    if found is None and path.is_dir():
        return _exported(path)
    if found is None:
        folder = str(Path("validation") / file.stem)
        return TrainedModel(str(file), shortest(file), folder, classes=_named_beside(file))
    in_run = found.folder.parent.name == "checkpoints"
    reports = found.folder.parents[1] / "validation" if in_run else Path("validation") / found.folder.name
    return _described(found, reports, shortest(found.folder), file.name)


def _locate(path: Path, which: str, heartbeat: Heartbeat) -> tuple[Path, Checkpoint | None]:
    """The file of weights at a local path, and its checkpoint, which is verified; None if it is of none.

    which: `best` or `latest` of a run; `any`: its newest that verifies where the best is not there.
    """
    if not path.exists():
        raise ValueError(f"{path}: there is no such folder or file")
    if not path.is_dir():
        is_ours = step_of(path.parent.name) is not None and (path.parent / MANIFEST_FILE).exists()
        return path, verify(path.parent, heartbeat) if is_ours else None
    if step_of(path.name) is not None or (path / MANIFEST_FILE).exists():
        found = verify(path, heartbeat)
    elif steps_in(path / "checkpoints"):
        found = _of_run(path, which, heartbeat)
    elif (path / MODEL_FILE).exists():
        return path / MODEL_FILE, None
    else:
        raise ValueError(f"{path} holds neither checkpoints nor {MODEL_FILE}: give a file, or a run's folder")
    return found.folder / _preferred(found), found


def _exported(folder: Path) -> TrainedModel:
    """The model in a folder of export.py. Of its files the weights and config.json are read; no code runs."""
    try:
        about = read_json(folder / EXPORTED)["trained_by"]
        script, recipe = str(about["script"]), dict(about["recipe"])
        classes = list(map(printable, about["classes"]))
    except (OSError, ValueError, KeyError, TypeError):
        raise ValueError(
            f"{folder / EXPORTED} does not say what trained the model: export it again"
        ) from None
    reports = str(Path("validation") / folder.name)
    facts = script, recipe, classes, None, about.get("cropped")
    return TrainedModel(str(folder / MODEL_FILE), shortest(folder), reports, None, *facts)


def _named_beside(file: Path) -> list[str] | None:
    """The class names in config.json beside a file of weights, as export.py and timm write them."""
    with contextlib.suppress(OSError, ValueError):
        names = read_json(file.with_name(EXPORTED)).get("label_names")
        if isinstance(names, list) and all(isinstance(name, str) for name in names):
            return list(map(printable, names))
    return None


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
        return script, parse(kind, words, as_flags(trained.recipe or {}, kind)), path
    except ValueError as error:
        raise ValueError(f"{trained.name}: {error}") from None


def load_trained(model: nn.Module, file: Path) -> None:
    """Copies the weights of a safetensors file into a model. ValueError unless names and shapes agree."""
    weights, own = _held.pop(str(file), None) or TensorFile(file), model.state_dict()
    weights.expect({name: tuple(tensor.shape) for name, tensor in own.items()})
    model.load_state_dict({name: weights.tensor(name) for name in own})


def load_everywhere(accelerator: Accelerator, model: nn.Module, file: Path, timeout_s: int) -> None:
    """Loads the main process's file into the model of every process, and moves the models to their devices.
    Collective."""
    once(accelerator, "weights", lambda _: load_trained(model, file), timeout_s)
    model.to(accelerator.device)
    broadcast(model.state_dict())
    model.to(memory_format=torch.channels_last)


def _of_run(folder: Path, which: str, heartbeat: Heartbeat) -> Checkpoint:
    parent = folder / "checkpoints"
    if which != "latest" and (best := best_in(parent)):
        return verify(best, heartbeat)
    if which == "best":
        raise ValueError(f"{shortest(folder)} does not hold its best checkpoint: take --which latest")
    found = newest(parent, heartbeat, ours=False)
    assert found, "there are some"
    return found


def _preferred(found: Checkpoint) -> str:
    """The file of the averaged weights if the checkpoint has them."""
    return EMA_FILE if EMA_FILE in found.manifest["files"] else MODEL_FILE


def _download(store: "ObjectStore", which: str, scratch: Path, heartbeat: Heartbeat) -> Checkpoint:
    """Downloads the best checkpoint of a run in S3, or with `latest` the newest that verifies."""
    from common.checkpoint.mirror import fetch, fetch_newest

    if which == "latest":
        step = fetch_newest(store, scratch, -1, heartbeat)
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
        try:
            fetch(store, step, scratch, heartbeat)
        except ValueError:
            if store.read(key, JSON_LIMIT_BYTES) == content:
                raise
            return _download(store, which, scratch, heartbeat)  # a training has replaced it meanwhile
    return verify(scratch / step_name(step), heartbeat)


def _described(found: Checkpoint, reports: Path, name: str, file: str) -> TrainedModel:
    """The model of a verified checkpoint. file: name of the weights' file."""
    manifest = found.manifest
    if file not in (EMA_FILE, MODEL_FILE) or file not in manifest["files"]:
        raise ValueError(f"{name}/{file} does not hold a model: give {name}/{MODEL_FILE}")
    recipe, classes, writer = (manifest.get(key) for key in ("recipe", "classes", "written_by"))
    script = writer.get("script") if isinstance(writer, dict) else None
    if not isinstance(recipe, dict) or not isinstance(classes, list) or not isinstance(script, str):
        raise ValueError(
            f"{name}/{MANIFEST_FILE} does not say what trained it: no train script has written it"
        )
    weights, accuracy = str(found.folder / file), None
    name_of_it = "raw_accuracy" if EMA_FILE in manifest["files"] and file == MODEL_FILE else "accuracy"
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError):  # a state that no run has written
        state = read_json(found.folder / STATE_FILE)
        accuracy = float(state["last"][name_of_it]) if state["evaluated"] else None
    classes = [printable(name) for name in classes]
    where = f"{name}/{file}"
    facts = script, recipe, classes, accuracy, manifest.get("cropped")
    return TrainedModel(weights, where, str(reports), found.step, *facts)


# --- Fine-tuning


def pretrained_model(name: str, classes: int, **options: Any) -> nn.Module:
    """The model with the hub's weights; its head is new if the number of classes differs.

    ValueError if timm has no weights for it, or the hub can't be reached.
    """
    import timm

    config = timm.get_pretrained_cfg(name)
    if config is None or not config.has_weights:
        raise ValueError(
            f"--pretrained: timm has no weights for --model {name}: give another, or --weights FILE"
        )
    problem = hub_problem()
    try:
        return timm.create_model(name, True, num_classes=classes, **options)
    except OSError as error:
        file = config.hf_hub_filename or MODEL_FILE
        fetch = f"`hf download {config.hf_hub_id} {file} --local-dir .`"
        raise ValueError(
            f"--pretrained: the hub can't be reached ({problem or error}): fetch the file where it can, by"
            f" {fetch if config.hf_hub_id else config.url}, copy it here, and give --weights {file}"
        ) from None


def model_with_weights(
    name: str, location: Path, classes: int, names: Sequence[str] = (), **options: Any
) -> nn.Module:
    """Build the model with saved weights. Its head keeps the rows of the classes that the file has, by name.

    names: of the classes. Where they or the file's are not known, the head is kept if the numbers of classes
    are equal. location: a safetensors file, a checkpoint's folder (its EMA if it has one), or a run's folder
    (its best checkpoint). ValueError names the file, and what does not fit.
    """
    import timm

    try:
        file, trained = _locate(location, "any", lambda: None)
        weights = _open(file)
    except ValueError as error:
        raise ValueError(f"--weights {error}") from None
    shapes = weights.shapes()
    wrapper = _wrapper(list(shapes))
    heads = head_names(name)
    found = (shapes.get(f"{wrapper}{heads[0]}.weight") or (0,))[0]  # classes in the file; 0: it has no head
    tensors = {key.removeprefix(wrapper): weights.tensor(key) for key in shapes}
    source = {"state_dict": tensors, "num_classes": found, "custom_load": False, "label_offset": 0}
    try:
        model: Any = timm.create_model(
            name, True, pretrained_cfg_overlay=source, num_classes=found, **options
        )
    except RuntimeError as error:
        if "loading state_dict" not in str(error):
            raise
        first = re.sub('", ".*', '"', str(error).splitlines()[1].strip()).rstrip(".")
        recipe = trained.manifest.get("recipe") if trained else None
        whose = f", {recipe['model']}" if isinstance(recipe, dict) and "model" in recipe else ""
        raise ValueError(
            f"--weights {file} does not fit --model {name}: {first}: give the --model that it is of{whose}"
        ) from None
    del model.pretrained_cfg["state_dict"]  # timm keeps it
    lines = [f"each name begins with {wrapper}, which is taken off"] if wrapper else []
    its_classes = trained.manifest.get("classes") if trained else _named_beside(file)
    rows = None  # of the file's head, for each class
    if names and its_classes and len(its_classes) == found:
        match = match_classes(its_classes, names)
        rows = None if match.is_identity else match.labels
        if rows is not None:
            lines.append(f"the head keeps the rows of {plural(len(match.known), 'class')} and starts afresh")
            lines[-1] += f" for {plural(len(match.unknown), 'class')}, matched by name"
    elif found != classes:
        rows = np.full(classes, NEW)
        lines.append(f"the head is new, for {classes:,} classes instead of {found:,}")
    elif names:
        lines.append("it does not name its classes: they are taken to be those of --data, in its order")
    if rows is not None:
        _choose_rows(model, heads, rows)
    if rank() == 0:
        print("; ".join([f"--weights: {shortest(file)}", *lines]), flush=True)
    return model


@torch.no_grad()
def _choose_rows(model: Any, heads: Sequence[str], rows: np.ndarray) -> None:
    """Give the model a new head that has these rows of its present one. rows: int64 [classes], NEW: none."""
    from timm.models.vision_transformer import init_weights_vit_timm

    before = [dict(model.get_submodule(head).named_parameters()) for head in heads if rows.max() != NEW]
    model.reset_classifier(len(rows))
    for head in heads:
        model.get_submodule(head).apply(init_weights_vit_timm)
    known = torch.from_numpy(np.flatnonzero(rows != NEW))
    for head, parameters in zip(heads, before, strict=False):
        for name, parameter in model.get_submodule(head).named_parameters():
            parameter[known] = parameters[name][torch.from_numpy(rows)[known]]


def _wrapper(names: list[str]) -> str:
    """What a wrapper of the model put before all names, as `module._orig_mod.`; empty for most files."""
    found = ""
    while more := next((w for w in WRAPPERS if names and all(n.startswith(found + w) for n in names)), ""):
        found += more
    return found


def _open(file: Path) -> TensorFile:
    try:
        weights = TensorFile(file)
    except ValueError:
        if not file.is_file():
            raise
        with open(file, "rb") as opened:
            begin = opened.read(2)
        if not begin.startswith(PICKLES):
            raise
        command = shlex.join(["python", "-c", CONVERT, str(file), str(file.with_suffix(".safetensors"))])
        raise ValueError(
            f"{file} is a pickle, which can run code when it is read: convert it where nothing can be"
            f" harmed, as in a container, by {command}"
        ) from None
    return weights
