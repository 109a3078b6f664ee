"""Weights of a trained model: those of a run, a checkpoint or a file, and those that fine-tuning begins with.

timm's loading adapts weights to its model: it resamples the position embeddings if the number of patches
differs, and the patch embedding if the patch size differs.
"""

import contextlib
import dataclasses
import re
import shlex
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from accelerate import Accelerator
from accelerate.utils import broadcast
from torch import nn

from onecurve.checkpoint.format import (
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
    parse_step_index,
    step_name,
    step_of,
    steps_in,
    verify,
)
from onecurve.checkpoint.published import (
    CONFIG,
    KNOWN_ARGUMENTS,
    Published,
    class_names,
    of_name,
    read_published,
)
from onecurve.data.class_names import NEW, match_classes
from onecurve.distributed.agreement import once
from onecurve.flags.recipe import ImageRecipe, parse
from onecurve.models.preprocessing import LEGACY
from onecurve.models.script import as_flags, load_script, own_script, recipe_class
from onecurve.models.timm_models import head_names, registered
from onecurve.system.env import hub_problem, rank
from onecurve.system.files import read_json
from onecurve.system.output import log
from onecurve.system.paths import shortest
from onecurve.system.text import plural, printable
from onecurve.system.threads import Heartbeat

if TYPE_CHECKING:  # imported where it is needed
    from onecurve.system.s3 import ObjectStore

# A command that converts a pickle, which the user runs, never this code. timm prefers the averaged weights of
# a training's checkpoint, and lets torch load only tensors.
CONVERT = (
    "import sys; from timm.models import load_state_dict as load; from safetensors.torch import save_file;"
    " save_file({n: t.clone().contiguous() for n, t in load(sys.argv[1]).items()}, sys.argv[2])"
)
WRAPPERS = ("_orig_mod.", "module.", "model.")  # before each name: torch.compile's, DDP's, Lightning's
TRAINED_BY = "trained_by"  # in config.json of a folder that export.py wrote
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
    preprocessing: dict[str, Any] | None = None  # the record of a DataConfig; None: of an earlier version
    names: list[list[str]] | None = None  # of each class, where data may call it by several
    published: int = 0  # its number of classes, of weights that timm's loader adapts; 0: a script's weights
    note: str = ""  # for people

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
            _held[found.weights] = _open(Path(found.weights))
            return found
        except ValueError:
            if before == steps_in(Path(location) / "checkpoints"):
                raise


def _find(location: str, which: str, scratch: Path, heartbeat: Heartbeat) -> TrainedModel:
    if location.startswith("s3://"):
        from onecurve.system.s3 import ObjectStore

        store = ObjectStore(location)
        stored = _download(store, which, scratch, heartbeat)
        reports = Path("validation") / store.url.rpartition("/")[2]
        name = f"{store.url}/checkpoints/{stored.folder.name}"
        return _described(stored, reports, name, _preferred(stored))
    path = Path(location).resolve()
    file, found = _locate(path, which, heartbeat)
    if found is None and path.is_dir():
        return _hub_model(path) or _exported(path)
    if found is None:
        folder = str(Path("validation") / file.stem)
        names = [[name] if isinstance(name, str) else list(name) for name in _named_beside(file) or ()]
        classes = [each[0] for each in names] or None
        return TrainedModel(str(file), shortest(file), folder, classes=classes, names=names or None)
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
        about = read_json(folder / CONFIG)[TRAINED_BY]
        script, recipe = str(about["script"]), dict(about["recipe"])
        classes = list(map(printable, about["classes"]))
    except (OSError, ValueError, KeyError, TypeError):
        raise ValueError(
            f"{folder / CONFIG} describes no model of timm, and does not say what trained it: export it again"
        ) from None
    reports = str(Path("validation") / folder.name)
    facts = script, recipe, classes, None, *map(about.get, ("cropped", "preprocessing", "names"))
    return TrainedModel(str(folder / MODEL_FILE), shortest(folder), reports, None, *facts)


def _named_beside(file: Path) -> list[str] | list[tuple[str, ...]] | None:
    """The class names in config.json beside a file of weights, as export.py and timm write them, or by which
    a model of timm that has none is known."""
    with contextlib.suppress(OSError, ValueError):
        if published := read_published(file.parent):
            return class_names(published)
        names = read_json(file.with_name(CONFIG)).get("label_names")
        if isinstance(names, list) and all(isinstance(name, str) for name in names):
            return list(map(printable, names))
    return None


def _hub_model(folder: Path) -> TrainedModel | None:
    """The model of timm in a folder as the hub has it; None where it says that a script trained it."""
    published = read_published(folder)
    if published is None or TRAINED_BY in read_json(folder / CONFIG):
        return None
    reports = str(Path("validation") / folder.name)
    return _published(TrainedModel(str(folder / MODEL_FILE), shortest(folder), reports), published)


def of_model(trained: TrainedModel, name: str) -> TrainedModel:
    """Describe a lone file of weights as those of a model of timm. ValueError for one without classes."""
    shapes = _held[trained.weights].shapes()
    head = f"{_wrapper(list(shapes))}{head_names(name)[0]}.weight"
    published = dataclasses.replace(of_name(name), classes=(shapes.get(head) or (0,))[0])
    return _published(trained, published)


def _published(trained: TrainedModel, published: Published) -> TrainedModel:
    """Describe weights of timm as a model that train_vit.py would build."""
    if not published.classes:
        raise ValueError(f"{trained.name} has no head, so it predicts no classes: train one, with --weights")
    if unknown := published.arguments.keys() - KNOWN_ARGUMENTS:
        raise ValueError(
            f"{trained.name}: its config.json has the argument {unknown.pop()}, which is not known"
        )
    recipe: dict[str, Any] = {"model": published.architecture, "image_size": published.image_size}
    recipe |= {name: n for name in ("patch_size", "depth") if (n := published.arguments.get(name))}
    recipe |= {"drop_path": 0.0, "dropout": 0.0}
    rows = class_names(published)
    names = None if rows is None else [list(row) for row in rows]
    return dataclasses.replace(
        trained,
        script="train_vit",
        recipe=recipe,
        classes=[each[0] for each in names] if names else None,
        names=names,
        cropped=True,
        preprocessing=published.preprocessing(),
        published=published.classes,
        note=published.note(),
    )


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
        recipe = parse(kind, words, as_flags(trained.recipe or {}, kind)).resolved()
        return script, recipe, path
    except ValueError as error:
        raise ValueError(f"{trained.name}: {error}") from None


def load_trained(model: nn.Module, file: Path) -> None:
    """Copies the weights of a safetensors file into a model. ValueError unless names and shapes agree."""
    weights, own = _held.pop(str(file), None) or TensorFile(file), model.state_dict()
    weights.expect({name: tuple(tensor.shape) for name, tensor in own.items()})
    model.load_state_dict({name: weights.tensor(name) for name in own})


def load_weights(model: nn.Module, trained: TrainedModel, script: ModuleType, recipe: Any) -> None:
    """Copy a trained model's weights into the model that the script has built. ValueError unless they fit."""
    if not trained.published:
        load_trained(model, Path(trained.weights))
    elif (classes := int(model.num_classes)) != trained.published:  # type: ignore[arg-type]  # timm's model
        raise ValueError(
            f"{trained.name} does not name its {trained.published:,} classes, and the data has {classes:,}"
        )
    else:
        del _held[trained.weights]  # timm's loader reads the file, as it may rename or resample tensors
        recipe = dataclasses.replace(recipe, weights=trained.weights)
        model.load_state_dict(script.build_model(recipe, trained.published).state_dict())


def load_everywhere(
    accelerator: Accelerator, model: nn.Module, load: Callable[[nn.Module], None], timeout_s: int
) -> None:
    """Call load(model) on the main process, copy the weights to every process, and move the models to their
    devices. Collective."""
    once(accelerator, "weights", lambda _: load(model), timeout_s)
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
    from onecurve.checkpoint.mirror import fetch, fetch_newest

    if which == "latest":
        step = fetch_newest(store, scratch, -1, heartbeat)
        if step is None:
            raise ValueError(f"{store.url} holds no checkpoint: give the prefix of a run")
    else:
        key = f"checkpoints/{INDEX_FILE}"
        content = store.read(key, JSON_LIMIT_BYTES)
        if content is None:
            raise ValueError(f"{store.url} holds no run: {key} is missing")
        step = parse_step_index(content, f"{store.url}/{key}").get("best")
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
    facts = script, recipe, classes, accuracy, manifest.get("cropped"), manifest.get("preprocessing")
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
    data = _own_data(name, location, trained)
    wrapper = _wrapper(list(shapes))
    heads = head_names(name)
    found = (shapes.get(f"{wrapper}{heads[0]}.weight") or (0,))[0]  # classes in the file; 0: it has no head
    tensors = {key.removeprefix(wrapper): weights.tensor(key) for key in shapes}
    source = {"state_dict": tensors, "num_classes": found, "custom_load": False, "label_offset": 0} | data
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
    lines += _resampled(model, tensors)
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
        log.info("; ".join([f"--weights: {shortest(file)}", *lines]))
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


def _resampled(model: nn.Module, tensors: dict[str, torch.Tensor]) -> list[str]:
    """Say which tensors timm resamples, such as position embeddings for another image size."""
    shapes = {name: tensor.shape for name, tensor in model.state_dict().items() if "embed" in name}
    names = [name for name, shape in shapes.items() if name in tensors and tensors[name].shape != shape]
    return [f"timm resamples {', '.join(names)} for this size"] if names else []


def own_image_size(name: str, location: str | None) -> int:
    """Return the image size of the configuration in a folder of weights, else of the model's in timm."""
    published = read_published(Path(location)) if location else None
    return published.image_size if published else registered(name).input_size[-1]


def _own_data(name: str, location: Path, trained: Checkpoint | None) -> dict[str, Any]:
    """Return how a folder of weights says images are prepared, with timm's keys. ValueError for another
    architecture."""
    if trained:
        own = trained.manifest.get("preprocessing", {})
        return own if own.get("interpolation") != LEGACY else {k: own[k] for k in ("mean", "std")}
    published = read_published(location)
    if published is None:
        return {}
    if published.architecture != name.partition(".")[0]:
        raise ValueError(
            f"--weights {shortest(location)} holds {published.architecture}, not {name}: give --model"
            f" {published.architecture}"
        )
    return published.data


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
