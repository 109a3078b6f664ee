"""Loads trained weights from runs, checkpoints, files and the Hugging Face Hub, for use or fine-tuning.

timm's loader adapts the weights to the model. The loader resamples the position embeddings if the number of
patches differs, and the patch embedding if the patch size differs.
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
    CONFIG_FILE,
    KNOWN_ARGUMENTS,
    Published,
    class_names,
    of_name,
    read_published,
)
from onecurve.data.class_names import NEW_CLASS, match_classes
from onecurve.distributed.agreement import once
from onecurve.flags.recipe import ImageRecipe, parse
from onecurve.models.preprocessing import LEGACY
from onecurve.models.script import as_flags, load_script, own_script, recipe_class
from onecurve.models.timm_models import head_names, registered_config
from onecurve.system.env import hub_problem, rank
from onecurve.system.files import read_json
from onecurve.system.output import log
from onecurve.system.paths import shortest
from onecurve.system.text import plural, printable
from onecurve.system.threads import Heartbeat

if TYPE_CHECKING:  # imported lazily at runtime
    from onecurve.system.s3 import ObjectStore

# Python code of a command that converts a pickle file to safetensors. Only the user runs this command, never
# onecurve. timm prefers averaged weights in a checkpoint, and allows torch to load only tensors.
CONVERSION = (
    "import sys; from timm.models import load_state_dict as load; from safetensors.torch import save_file;"
    " save_file({n: t.clone().contiguous() for n, t in load(sys.argv[1]).items()}, sys.argv[2])"
)
# Tensor name prefixes added by torch.compile, DDP and Lightning
WRAPPER_PREFIXES = ("_orig_mod.", "module.", "model.")
TRAINED_BY_KEY = "trained_by"  # key in config.json files written by export.py
PICKLE_PREFIXES = (b"PK", b"\x80")  # first bytes of files in torch's new and old pickle formats
# Weight files opened by find_model() and not loaded yet, by path
_open_files: dict[str, TensorFile] = {}


@dataclass(frozen=True)
class TrainedModel:
    """Model weights on the local disk, with metadata from the checkpoint's manifest.

    For a weight file without a manifest, only the first three fields and possibly `classes` are set.
    """

    weights: str  # path of the weight file on the local disk
    name: str  # the model's displayed name
    reports: str  # folder for reports about the model
    step: int | None = None
    script: str | None = None  # the train script's name
    recipe: dict[str, Any] | None = None
    classes: list[str] | None = None
    accuracy: float | None = None  # accuracy of these weights in the last evaluation during training
    cropped: bool | None = None  # True if evaluations cropped the images; None if unknown
    # Record of a DataConfig, or None if an earlier version wrote the checkpoint
    preprocessing: dict[str, Any] | None = None
    names: list[list[str]] | None = None  # all names of each class, if data sets use different names
    published: int = 0  # number of classes in weights published by timm; 0 for other weights
    note: str = ""  # note for users about the model

    @property
    def run_name(self) -> str:
        """Name of the run, folder or file. `reports` is <run>/validation or validation/<name>."""
        reports = Path(self.reports)
        return reports.parent.name if reports.name == "validation" else reports.name


def find_model(location: str, which: str, scratch_folder: Path, heartbeat: Heartbeat) -> TrainedModel:
    """Find the model at a location. Averaged weights are preferred if the checkpoint contains them.

    If a run in progress replaces its checkpoint during the search, the search starts again. The weight file
    stays open until load_trained() reads the weights.

    Args:
        location: Run folder, s3:// prefix of a run, checkpoint folder, folder written by export.py, or
            .safetensors file.
        which: Checkpoint to select from a run, either `best` or `latest`.
        scratch_folder: Folder for downloads.
        heartbeat: Function called about once per second.

    Raises:
        ValueError: If the location does not contain a model, or if the model's checkpoint fails verification.
    """
    while True:
        steps_before = steps_in(Path(location) / "checkpoints")
        try:
            trained = _find_model_once(location, which, scratch_folder, heartbeat)
            _open_files[trained.weights] = _open_weights(Path(trained.weights))
            return trained
        except ValueError:
            if steps_before == steps_in(Path(location) / "checkpoints"):
                raise


def _find_model_once(location: str, which: str, scratch: Path, heartbeat: Heartbeat) -> TrainedModel:
    if location.startswith("s3://"):
        from onecurve.system.s3 import ObjectStore

        store = ObjectStore(location)
        checkpoint = _download_checkpoint(store, which, scratch, heartbeat)
        reports = Path("validation") / store.url.rpartition("/")[2]
        name = f"{store.url}/checkpoints/{checkpoint.folder.name}"
        return _model_in_checkpoint(checkpoint, reports, name, _preferred_file(checkpoint))
    path = Path(location).resolve()
    file, saved = _locate(path, which, heartbeat)
    if saved is None and path.is_dir():
        return _hub_model(path) or _exported_model(path)
    if saved is None:
        folder = str(Path("validation") / file.stem)
        names = [[name] if isinstance(name, str) else list(name) for name in _class_names(file) or ()]
        classes = [aliases[0] for aliases in names] or None
        return TrainedModel(str(file), shortest(file), folder, classes=classes, names=names or None)
    is_in_run = saved.folder.parent.name == "checkpoints"
    reports = saved.folder.parents[1] / "validation" if is_in_run else Path("validation") / saved.folder.name
    return _model_in_checkpoint(saved, reports, shortest(saved.folder), file.name)


def _locate(path: Path, which: str, heartbeat: Heartbeat) -> tuple[Path, Checkpoint | None]:
    """Return the weight file at a local path, and the verified checkpoint that contains it, or None.

    Args:
        which: Checkpoint to select from a run. `any` selects the best checkpoint, or the newest intact
            checkpoint if the best checkpoint is missing.
    """
    if not path.exists():
        raise ValueError(f"{path} does not exist")
    if not path.is_dir():
        is_in_checkpoint = step_of(path.parent.name) is not None and (path.parent / MANIFEST_FILE).exists()
        return path, verify(path.parent, heartbeat) if is_in_checkpoint else None
    if step_of(path.name) is not None or (path / MANIFEST_FILE).exists():
        checkpoint = verify(path, heartbeat)
    elif steps_in(path / "checkpoints"):
        checkpoint = _checkpoint_of_run(path, which, heartbeat)
    elif (path / MODEL_FILE).exists():
        return path / MODEL_FILE, None
    else:
        raise ValueError(
            f"{path} contains neither checkpoints nor {MODEL_FILE}. Pass a weight file or a run folder."
        )
    return checkpoint.folder / _preferred_file(checkpoint), checkpoint


def _exported_model(folder: Path) -> TrainedModel:
    """Return the model in a folder written by export.py, without running any code from the folder."""
    try:
        origin = read_json(folder / CONFIG_FILE)[TRAINED_BY_KEY]
        script, recipe = str(origin["script"]), dict(origin["recipe"])
        classes = list(map(printable, origin["classes"]))
    except (OSError, ValueError, KeyError, TypeError):
        raise ValueError(
            f"{folder / CONFIG_FILE} describes neither a timm model nor the training that produced the"
            " weights. Export the model again with export.py."
        ) from None
    reports = str(Path("validation") / folder.name)
    origin_facts = script, recipe, classes, None, *map(origin.get, ("cropped", "preprocessing", "names"))
    return TrainedModel(str(folder / MODEL_FILE), shortest(folder), reports, None, *origin_facts)


def _class_names(file: Path) -> list[str] | list[tuple[str, ...]] | None:
    """Return a weight file's class names from the config.json in the same folder.

    export.py and timm write class names into config.json. For a timm model without class names, the function
    returns ImageNet's.
    """
    with contextlib.suppress(OSError, ValueError):
        if published := read_published(file.parent):
            return class_names(published)
        names = read_json(file.with_name(CONFIG_FILE)).get("label_names")
        if isinstance(names, list) and all(isinstance(name, str) for name in names):
            return list(map(printable, names))
    return None


def _hub_model(folder: Path) -> TrainedModel | None:
    """Return the timm model in a folder with the Hub's layout, or None for a train script's own model."""
    published = read_published(folder)
    if published is None or TRAINED_BY_KEY in read_json(folder / CONFIG_FILE):
        return None
    reports = str(Path("validation") / folder.name)
    return _describe_published(TrainedModel(str(folder / MODEL_FILE), shortest(folder), reports), published)


def as_timm_model(trained: TrainedModel, name: str) -> TrainedModel:
    """Describe a weight file as a timm model. Raise ValueError if the model predicts no classes."""
    shapes = _open_files[trained.weights].shapes()
    head = f"{_wrapper_prefix(list(shapes))}{head_names(name)[0]}.weight"
    published = dataclasses.replace(of_name(name), classes=(shapes.get(head) or (0,))[0])
    return _describe_published(trained, published)


def _describe_published(trained: TrainedModel, published: Published) -> TrainedModel:
    """Describe weights published by timm as a model that train_vit.py can build."""
    if not published.classes:
        raise ValueError(
            f"{trained.name} has no classification head, so the model can't predict classes. Train a head"
            " with train_vit.py --weights."
        )
    if unknown := published.arguments.keys() - KNOWN_ARGUMENTS:
        raise ValueError(
            f"{trained.name}: config.json contains the unsupported model argument {unknown.pop()}"
        )
    recipe: dict[str, Any] = {"model": published.architecture, "image_size": published.image_size}
    recipe |= {name: value for name in ("patch_size", "depth") if (value := published.arguments.get(name))}
    recipe |= {"drop_path": 0.0, "dropout": 0.0}
    class_rows = class_names(published)
    names = None if class_rows is None else [list(row) for row in class_rows]
    return dataclasses.replace(
        trained,
        script="train_vit",
        recipe=recipe,
        classes=[aliases[0] for aliases in names] if names else None,
        names=names,
        cropped=True,
        preprocessing=published.preprocessing(),
        published=published.classes,
        note=published.note(),
    )


def open_script(
    trained: TrainedModel, file: str | None, words: list[str]
) -> tuple[ModuleType, ImageRecipe, Path]:
    """Return the train script's module, the model's recipe as changed by the flags, and the script's file.

    Args:
        trained: The trained model.
        file: The script's file. The default is the project's script named in the manifest.
        words: Command-line flags that change the recipe.

    Raises:
        ValueError: If the script does not train an image classifier.
    """
    if file and not Path(file).is_file():
        raise ValueError(f"--script {file} does not exist")
    try:
        path = Path(file) if file else own_script(trained.script)
        script = load_script(path)
        recipe_type = recipe_class(script)
        if not issubclass(recipe_type, ImageRecipe):
            raise ValueError(
                f"{script.__name__} does not train an image classifier. Set --script to a script that trains"
                " an image classifier."
            )
        recipe = parse(recipe_type, words, as_flags(trained.recipe or {}, recipe_type)).resolved()
        return script, recipe, path
    except ValueError as error:
        raise ValueError(f"{trained.name}: {error}") from None


def load_trained(model: nn.Module, file: Path) -> None:
    """Copy weights from a file into a model. Raise ValueError if tensor names or shapes differ."""
    tensor_file, model_state = _open_files.pop(str(file), None) or TensorFile(file), model.state_dict()
    tensor_file.expect({name: tuple(tensor.shape) for name, tensor in model_state.items()})
    model.load_state_dict({name: tensor_file.tensor(name) for name in model_state})


def load_weights(model: nn.Module, trained: TrainedModel, script: ModuleType, recipe: Any) -> None:
    """Copy a trained model's weights into the script's model.

    Raises:
        ValueError: If the weights do not match the script's model.
    """
    if not trained.published:
        load_trained(model, Path(trained.weights))
    elif (class_count := int(model.num_classes)) != trained.published:  # type: ignore[arg-type]  # timm's model
        raise ValueError(
            f"{trained.name} predicts {trained.published:,} classes without names, but the data contains"
            f" {class_count:,} classes"
        )
    else:
        # Let timm's loader read the file, because it may rename or resample tensors.
        del _open_files[trained.weights]
        recipe = dataclasses.replace(recipe, weights=trained.weights)
        model.load_state_dict(script.build_model(recipe, trained.published).state_dict())


def load_everywhere(
    accelerator: Accelerator, model: nn.Module, load: Callable[[nn.Module], None], timeout_s: int
) -> None:
    """Call load(model) on the main process, and copy the weights to every rank's device.

    This function is collective.
    """
    once(accelerator, "weights", lambda _: load(model), timeout_s)
    model.to(accelerator.device)
    broadcast(model.state_dict())
    model.to(memory_format=torch.channels_last)


def _checkpoint_of_run(folder: Path, which: str, heartbeat: Heartbeat) -> Checkpoint:
    parent = folder / "checkpoints"
    if which != "latest" and (best := best_in(parent)):
        return verify(best, heartbeat)
    if which == "best":
        raise ValueError(
            f"{shortest(folder)} does not contain the run's best checkpoint. Use --which latest to select the"
            " newest checkpoint."
        )
    checkpoint = newest(parent, heartbeat, ours=False)
    assert checkpoint, "the folder contains checkpoints"
    return checkpoint


def _preferred_file(checkpoint: Checkpoint) -> str:
    """Return the file with the averaged weights, or the file with the raw weights if there is no EMA."""
    return EMA_FILE if EMA_FILE in checkpoint.manifest["files"] else MODEL_FILE


def _download_checkpoint(store: "ObjectStore", which: str, scratch: Path, heartbeat: Heartbeat) -> Checkpoint:
    """Download a run's best checkpoint from S3, or the newest intact checkpoint if `which` is `latest`."""
    from onecurve.checkpoint.mirror import fetch, fetch_newest

    if which == "latest":
        step = fetch_newest(store, scratch, -1, heartbeat)
        if step is None:
            raise ValueError(f"{store.url} contains no checkpoints. Pass the S3 prefix of a run.")
    else:
        key = f"checkpoints/{INDEX_FILE}"
        content = store.read(key, JSON_LIMIT_BYTES)
        if content is None:
            raise ValueError(
                f"{store.url} does not contain a run: {key} is missing. Pass the S3 prefix of a run."
            )
        step = parse_step_index(content, f"{store.url}/{key}").get("best")
        if step is None:
            raise ValueError(
                f"{store.url} does not contain the run's best checkpoint. Use --which latest to select the"
                " newest checkpoint."
            )
        try:
            fetch(store, step, scratch, heartbeat)
        except ValueError:
            if store.read(key, JSON_LIMIT_BYTES) == content:
                raise
            # A run in progress has replaced the checkpoint
            return _download_checkpoint(store, which, scratch, heartbeat)
    return verify(scratch / step_name(step), heartbeat)


def _model_in_checkpoint(checkpoint: Checkpoint, reports: Path, name: str, file: str) -> TrainedModel:
    """Return the model in a verified checkpoint. `file` is the weight file's name."""
    manifest = checkpoint.manifest
    if file not in (EMA_FILE, MODEL_FILE) or file not in manifest["files"]:
        raise ValueError(f"{name}/{file} does not contain a model. Pass {name}/{MODEL_FILE} instead.")
    recipe, classes, writer = (manifest.get(key) for key in ("recipe", "classes", "written_by"))
    script = writer.get("script") if isinstance(writer, dict) else None
    if not isinstance(recipe, dict) or not isinstance(classes, list) or not isinstance(script, str):
        raise ValueError(
            f"{name}/{MANIFEST_FILE} does not describe a training run, so the checkpoint was not written by a"
            " train script"
        )
    weights, accuracy = str(checkpoint.folder / file), None
    metric = "raw_accuracy" if EMA_FILE in manifest["files"] and file == MODEL_FILE else "accuracy"
    # state.json may not have been written by a run
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
        state = read_json(checkpoint.folder / STATE_FILE)
        accuracy = float(state["last"][metric]) if state["evaluated"] else None
    classes = [printable(name) for name in classes]
    origin_facts = script, recipe, classes, accuracy, manifest.get("cropped"), manifest.get("preprocessing")
    return TrainedModel(weights, f"{name}/{file}", str(reports), checkpoint.step, *origin_facts)


# --- Fine-tuning


def pretrained_model(name: str, classes: int, **options: Any) -> nn.Module:
    """Build the model with Hugging Face Hub weights. A different number of classes requires a new head.

    Raises:
        ValueError: If timm has no weights for the model, or the Hub can't be reached.
    """
    import timm

    config = timm.get_pretrained_cfg(name)
    if config is None or not config.has_weights:
        raise ValueError(
            f"--pretrained: timm provides no weights for --model {name}. Choose a different model, or load a"
            " file with --weights FILE."
        )
    problem = hub_problem()
    try:
        return timm.create_model(name, True, num_classes=classes, **options)
    except OSError as error:
        file = config.hf_hub_filename or MODEL_FILE
        command = f"run `hf download {config.hf_hub_id} {file} --local-dir .`"
        download = command if config.hf_hub_id else f"download {config.url}"
        raise ValueError(
            f"--pretrained: the hub can't be reached ({problem or error}). On a machine with internet access,"
            f" {download}. Then copy the file to this machine and use --weights {file}."
        ) from None


def model_with_weights(
    name: str, location: Path, classes: int, names: Sequence[str] = (), **options: Any
) -> nn.Module:
    """Build the model with saved weights. The head keeps the rows of all classes in the file.

    Args:
        name: timm model name.
        location: Safetensors file, checkpoint folder or run folder. A run folder selects the best checkpoint.
            A checkpoint folder selects the EMA if the checkpoint contains one.
        classes: Number of classes.
        names: Class names. If these names or the file's class names are unknown, the head is kept only if
            both have the same number of classes.
        options: Keyword arguments of the model's constructor.

    Raises:
        ValueError: If the weights do not match the model. The error message names the file and the
            difference.
    """
    import timm

    try:
        file, trained = _locate(location, "any", lambda: None)
        weights = _open_weights(file)
    except ValueError as error:
        raise ValueError(f"--weights {error}") from None
    shapes = weights.shapes()
    preprocessing = _stored_preprocessing(name, location, trained)
    wrapper = _wrapper_prefix(list(shapes))
    heads = head_names(name)
    # Number of classes in the file, or 0 without a head.
    stored_count = (shapes.get(f"{wrapper}{heads[0]}.weight") or (0,))[0]
    tensors = {key.removeprefix(wrapper): weights.tensor(key) for key in shapes}
    source = {"state_dict": tensors, "num_classes": stored_count, "custom_load": False, "label_offset": 0}
    try:
        model: Any = timm.create_model(
            name, True, pretrained_cfg_overlay=source | preprocessing, num_classes=stored_count, **options
        )
    except RuntimeError as error:
        if "loading state_dict" not in str(error):
            raise
        first_problem = re.sub('", ".*', '"', str(error).splitlines()[1].strip()).rstrip(".")
        recipe = trained.manifest.get("recipe") if trained else None
        stored_model = f" ({recipe['model']})" if isinstance(recipe, dict) and "model" in recipe else ""
        raise ValueError(
            f"--weights {file} does not match --model {name}: {first_problem}. Set --model to the"
            f" architecture of the weights{stored_model}."
        ) from None
    del model.pretrained_cfg["state_dict"]  # free the weights, because timm would keep a reference
    notes = [f"the prefix {wrapper} is removed from all tensor names"] if wrapper else []
    notes += _resampling_notes(model, tensors)
    stored_classes = trained.manifest.get("classes") if trained else _class_names(file)
    head_rows = None  # row index in the stored head for each class
    if names and stored_classes and len(stored_classes) == stored_count:
        match = match_classes(stored_classes, names)
        head_rows = None if match.is_identity else match.labels
        if head_rows is not None:
            kept_count, added = plural(len(match.known), "class"), plural(len(match.unknown), "class")
            notes.append(
                f"the head keeps the rows for {kept_count} with known names and adds rows for {added}"
            )
    elif stored_count != classes:
        head_rows = np.full(classes, NEW_CLASS)
        notes.append(
            f"a new head for {classes:,} classes replaces the file's head for {stored_count:,} classes"
        )
    elif names:
        notes.append(
            "the file contains no class names, so the head's rows are assumed to be in the data's class order"
        )
    if head_rows is not None:
        _choose_head_rows(model, heads, head_rows)
    if rank() == 0:
        log.info("; ".join([f"--weights: {shortest(file)}", *notes]))
    return model


@torch.no_grad()
def _choose_head_rows(model: Any, heads: Sequence[str], rows: np.ndarray) -> None:
    """Replace the model's head with a new head that keeps some rows of the current head.

    Args:
        model: The timm model.
        heads: Names of the head's layers.
        rows: Row index in the current head for each class, or NEW_CLASS for a new row (int64 [classes]).
    """
    from timm.models.vision_transformer import init_weights_vit_timm

    earlier_parameters = [
        dict(model.get_submodule(head).named_parameters()) for head in heads if rows.max() != NEW_CLASS
    ]
    model.reset_classifier(len(rows))
    for head in heads:
        model.get_submodule(head).apply(init_weights_vit_timm)
    known_rows = torch.from_numpy(np.flatnonzero(rows != NEW_CLASS))
    for head, parameters in zip(heads, earlier_parameters, strict=False):
        for name, parameter in model.get_submodule(head).named_parameters():
            parameter[known_rows] = parameters[name][torch.from_numpy(rows)[known_rows]]


def _resampling_notes(model: nn.Module, tensors: dict[str, torch.Tensor]) -> list[str]:
    """Return a note that lists the tensors resampled by timm, for example position embeddings."""
    shapes = {name: tensor.shape for name, tensor in model.state_dict().items() if "embed" in name}
    names = [name for name, shape in shapes.items() if name in tensors and tensors[name].shape != shape]
    return [f"timm resamples {', '.join(names)} to match this model's size"] if names else []


def own_image_size(name: str, location: str | None) -> int:
    """Return the image size from the weights' config.json, or from timm's configuration."""
    published = read_published(Path(location)) if location else None
    return published.image_size if published else registered_config(name).input_size[-1]


def _stored_preprocessing(name: str, location: Path, trained: Checkpoint | None) -> dict[str, Any]:
    """Return the preprocessing stored with the weights, with timm's keys.

    Raises:
        ValueError: If the weights belong to a different architecture.
    """
    if trained:
        record = trained.manifest.get("preprocessing", {})
        is_legacy = record.get("interpolation") == LEGACY
        return {key: record[key] for key in ("mean", "std")} if is_legacy else record
    published = read_published(location)
    if published is None:
        return {}
    if published.architecture != name.partition(".")[0]:
        raise ValueError(
            f"--weights {shortest(location)} contains a {published.architecture} model, but --model is"
            f" {name}. Use --model {published.architecture}."
        )
    return published.data


def _wrapper_prefix(names: list[str]) -> str:
    """Return the prefix that model wrappers add to all tensor names, for example `module._orig_mod.`."""
    prefix = ""
    while names:
        longer_prefixes = (prefix + wrapper_prefix for wrapper_prefix in WRAPPER_PREFIXES)
        shared = [longer for longer in longer_prefixes if all(name.startswith(longer) for name in names)]
        if not shared:
            break
        prefix = shared[0]
    return prefix


def _open_weights(file: Path) -> TensorFile:
    try:
        weights = TensorFile(file)
    except ValueError:
        if not file.is_file():
            raise
        with open(file, "rb") as binary_file:
            first_bytes = binary_file.read(2)
        if not first_bytes.startswith(PICKLE_PREFIXES):
            raise
        command = shlex.join(["python", "-c", CONVERSION, str(file), str(file.with_suffix(".safetensors"))])
        raise ValueError(
            f"{file} is a pickle file, which can execute code when it is loaded. Convert the file to"
            f" safetensors in an isolated environment such as a container: {command}"
        ) from None
    return weights
