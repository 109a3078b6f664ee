"""Loads trained weights from runs, checkpoints, files and the Hugging Face Hub, for use or fine-tuning.

timm's loader adapts the weights to the model. The loader resamples the position embeddings if the number of
patches differs, and the patch embedding if the patch size differs.
"""

import contextlib
import dataclasses
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import torch
from accelerate import Accelerator
from accelerate.utils import broadcast
from torch import nn

from onecurve.checkpoint.format import (
    EMA_FILE,
    MANIFEST_FILE,
    MODEL_FILE,
    STATE_FILE,
    Checkpoint,
    TensorFile,
    best_checkpoint_folder,
    newest,
    open_weight_file,
    step_from_name,
    steps_in,
    verify_checkpoint,
)
from onecurve.checkpoint.published import (
    CONFIG_FILE,
    KNOWN_MODEL_ARGUMENTS,
    PublishedModel,
    class_name_lists,
    published_from_name,
    read_published,
    stored_class_names,
)
from onecurve.distributed.agreement import once
from onecurve.models.class_names import NEW_CLASS, match_classes
from onecurve.models.preprocessing import LEGACY
from onecurve.models.timm_models import head_names, registered_config
from onecurve.system.env import check_hub_or_go_offline, rank
from onecurve.system.files import read_json
from onecurve.system.output import log
from onecurve.system.paths import shortest
from onecurve.system.text import plural, printable
from onecurve.system.threads import Heartbeat

REPORTS_ROOT = Path("validation")  # folder for reports about models outside run folders
TRAINED_BY_KEY = "trained_by"  # config.json entry in which export.py describes the training run
_opened_weight_files: dict[str, TensorFile] = {}  # by path, opened by find_model() and not loaded yet


@dataclass(frozen=True)
class TrainedModel:
    """Model weights on the local disk, with metadata from the checkpoint's manifest or from config.json.

    For a weight file without a manifest or a config.json, only the first three fields are set.
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
        reports_folder = Path(self.reports)
        return reports_folder.parent.name if reports_folder.name == "validation" else reports_folder.name


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
            trained_model = _find_model_once(location, which, scratch_folder, heartbeat)
            _opened_weight_files[trained_model.weights] = open_weight_file(Path(trained_model.weights))
            return trained_model
        except ValueError:
            if steps_before == steps_in(Path(location) / "checkpoints"):
                raise  # the run has not replaced its checkpoint


def _find_model_once(location: str, which: str, scratch_folder: Path, heartbeat: Heartbeat) -> TrainedModel:
    """Find the model at a location, which a run in progress may change during the search.

    A model in S3 is downloaded to the scratch folder.
    """
    if location.startswith("s3://"):
        from onecurve.checkpoint.mirror import download_selected_checkpoint
        from onecurve.system.s3 import ObjectStore

        store = ObjectStore(location)
        downloaded_checkpoint = download_selected_checkpoint(store, which, scratch_folder, heartbeat)
        _, _, run_name = store.url.rpartition("/")
        reports_folder = REPORTS_ROOT / run_name
        displayed_name = f"{store.url}/checkpoints/{downloaded_checkpoint.folder.name}"
        weight_name = _preferred_file_name(downloaded_checkpoint)
        return _model_in_checkpoint(downloaded_checkpoint, reports_folder, displayed_name, weight_name)
    local_path = Path(location).resolve()
    weight_file, checkpoint = _locate_weights(local_path, which, heartbeat)
    if checkpoint is None:
        if local_path.is_dir():
            return _hub_model(local_path) or _exported_model(local_path)
        return _single_file_model(weight_file)
    reports_folder = REPORTS_ROOT / checkpoint.folder.name
    if checkpoint.folder.parent.name == "checkpoints":  # the checkpoint belongs to a run folder
        reports_folder = checkpoint.folder.parent.parent / "validation"
    return _model_in_checkpoint(checkpoint, reports_folder, shortest(checkpoint.folder), weight_file.name)


def _single_file_model(weight_file: Path) -> TrainedModel:
    """Return the model in a single weight file, with class names from a config.json in the same folder."""
    names_by_class = stored_class_names(weight_file) or None
    classes = [displayed_name for displayed_name, *_ in names_by_class] if names_by_class else None
    weights, reports = str(weight_file), str(REPORTS_ROOT / weight_file.stem)
    return TrainedModel(weights, shortest(weight_file), reports, classes=classes, names=names_by_class)


def _locate_weights(location: Path, which: str, heartbeat: Heartbeat) -> tuple[Path, Checkpoint | None]:
    """Return the weight file at a local path, and the verified checkpoint that contains it, or None.

    Args:
        location: Weight file, checkpoint folder, run folder, or folder with a MODEL_FILE.
        which: Checkpoint to select from a run. `any` selects the best checkpoint, or the newest intact
            checkpoint if the best checkpoint is missing.
    """
    if not location.exists():
        raise ValueError(f"{location} does not exist")
    if not location.is_dir():
        is_in_step_folder = step_from_name(location.parent.name) is not None
        if is_in_step_folder and (location.parent / MANIFEST_FILE).exists():
            return location, verify_checkpoint(location.parent, heartbeat)
        return location, None
    if step_from_name(location.name) is not None or (location / MANIFEST_FILE).exists():
        checkpoint = verify_checkpoint(location, heartbeat)
    elif steps_in(location / "checkpoints"):  # the path is a run folder
        checkpoint = _checkpoint_of_run(location, which, heartbeat)
    elif (location / MODEL_FILE).exists():  # the folder was written by export.py or for the Hub
        return location / MODEL_FILE, None
    else:
        raise ValueError(
            f"{location} contains neither checkpoints nor {MODEL_FILE}. Pass a weight file or a run folder."
        )
    return checkpoint.folder / _preferred_file_name(checkpoint), checkpoint


def _exported_model(folder: Path) -> TrainedModel:
    """Return the model in a folder written by export.py, without running any code from the folder."""
    try:
        training_info = read_json(folder / CONFIG_FILE)[TRAINED_BY_KEY]
        script, recipe = str(training_info["script"]), dict(training_info["recipe"])
        classes = list(map(printable, training_info["classes"]))
    except (OSError, ValueError, KeyError, TypeError):
        raise ValueError(
            f"{folder / CONFIG_FILE} describes neither a timm model"
            " nor the training that produced the weights. Export the model again with export.py."
        ) from None
    weights, reports = str(folder / MODEL_FILE), str(REPORTS_ROOT / folder.name)
    model = TrainedModel(weights, shortest(folder), reports, script=script, recipe=recipe, classes=classes)
    optional_fields = {key: training_info.get(key) for key in ("cropped", "preprocessing", "names")}
    return dataclasses.replace(model, **optional_fields)


def _hub_model(folder: Path) -> TrainedModel | None:
    """Return the timm model in a folder with the Hub's layout, or None for a train script's own model."""
    published = read_published(folder)
    if published is None or TRAINED_BY_KEY in read_json(folder / CONFIG_FILE):
        return None
    trained_model = TrainedModel(str(folder / MODEL_FILE), shortest(folder), str(REPORTS_ROOT / folder.name))
    return _add_published_metadata(trained_model, published)


def as_timm_model(trained: TrainedModel, timm_name: str) -> TrainedModel:
    """Return a weight file's model with the metadata of a timm model. Call find_model() first.

    Raises:
        ValueError: If timm does not know the name, or the model predicts no classes.
    """
    class_count = _stored_class_count(_opened_weight_files[trained.weights], head_names(timm_name))
    published = dataclasses.replace(published_from_name(timm_name), class_count=class_count)
    return _add_published_metadata(trained, published)


def _stored_class_count(tensor_file: TensorFile, head_layer_names: Sequence[str]) -> int:
    """Return the number of classes (rows) in a weight file's first head, or 0 without a head."""
    first_weight_name = f"{tensor_file.wrapper_prefix()}{head_layer_names[0]}.weight"
    class_count, *_ = tensor_file.shapes().get(first_weight_name) or (0,)
    return class_count


def _add_published_metadata(trained: TrainedModel, published: PublishedModel) -> TrainedModel:
    """Return the model with the script, recipe and metadata that train_vit.py needs to build a timm model.

    Raises:
        ValueError: If the model has no head, or train_vit.py can't build it.
    """
    if not published.class_count:
        raise ValueError(
            f"{trained.name} has no classification head, so the model can't predict classes."
            " Train a head with train_vit.py --weights."
        )
    if unknown_arguments := published.model_arguments.keys() - KNOWN_MODEL_ARGUMENTS:
        raise ValueError(
            f"{trained.name}: config.json contains the unsupported model argument {unknown_arguments.pop()}"
        )
    vit_recipe: dict[str, Any] = {"model": published.architecture, "image_size": published.image_size}
    for flag_name in ("patch_size", "depth"):
        if argument_value := published.model_arguments.get(flag_name):
            vit_recipe[flag_name] = argument_value
    vit_recipe |= {"drop_path": 0.0, "dropout": 0.0}
    names_by_class = class_name_lists(published)
    return dataclasses.replace(
        trained,
        script="train_vit",
        recipe=vit_recipe,
        classes=[displayed_name for displayed_name, *_ in names_by_class] if names_by_class else None,
        names=names_by_class,
        cropped=True,
        preprocessing=published.preprocessing(),
        published=published.class_count,
        note=published.second_size_note(),
    )


def load_trained(model: nn.Module, weight_file: Path) -> None:
    """Copy weights from a file into a model. Raise ValueError if tensor names or shapes differ."""
    # The file that find_model() opened is the one that it verified
    tensor_file = _opened_weight_files.pop(str(weight_file), None) or TensorFile(weight_file)
    model_state = model.state_dict()
    tensor_file.require_shapes({name: tuple(tensor.shape) for name, tensor in model_state.items()})
    model.load_state_dict({tensor_name: tensor_file.read_tensor(tensor_name) for tensor_name in model_state})


def load_weights(model: nn.Module, trained: TrainedModel, script: ModuleType, recipe: Any) -> None:
    """Copy a trained model's weights into the script's model.

    Raises:
        ValueError: If the weights do not match the script's model.
    """
    if not trained.published:  # the weights are not published by timm
        load_trained(model, Path(trained.weights))
    elif (class_count := int(model.num_classes)) != trained.published:  # type: ignore[arg-type]  # timm's model
        raise ValueError(
            f"{trained.name} predicts {trained.published:,} classes without names, but the data contains"
            f" {class_count:,} classes"
        )
    else:
        # Let timm's loader read the file, because it may rename or resample tensors.
        del _opened_weight_files[trained.weights]
        recipe_with_weights = dataclasses.replace(recipe, weights=trained.weights)
        loaded_model = script.build_model(recipe_with_weights, trained.published)
        model.load_state_dict(loaded_model.state_dict())


def load_everywhere(
    accelerator: Accelerator, model: nn.Module, load: Callable[[nn.Module], None], timeout_s: int
) -> None:
    """Call load(model) on the main process, and copy the weights to every rank's device.

    This function is collective. It moves the model to the device in channels_last memory format.

    Raises:
        ValueError: On every rank, if load() raises ValueError.
    """
    once(accelerator, "weights", lambda _: load(model), timeout_s)
    model.to(accelerator.device)
    broadcast(model.state_dict())  # in place, because the state dict shares the model's memory
    model.to(memory_format=torch.channels_last)


def _checkpoint_of_run(run_folder: Path, which: str, heartbeat: Heartbeat) -> Checkpoint:
    """Verify and return a run's checkpoint selected by `which`. `any` prefers the best checkpoint."""
    checkpoints_folder = run_folder / "checkpoints"
    best_folder = best_checkpoint_folder(checkpoints_folder) if which != "latest" else None
    if best_folder:
        return verify_checkpoint(best_folder, heartbeat)
    if which == "best":
        raise ValueError(
            f"{shortest(run_folder)} does not contain the run's best checkpoint."
            " Use --which latest to select the newest checkpoint."
        )
    newest_checkpoint = newest(checkpoints_folder, heartbeat, is_owner=False)
    assert newest_checkpoint, "the folder contains checkpoints"
    return newest_checkpoint


def _preferred_file_name(checkpoint: Checkpoint) -> str:
    """Return the file with the averaged weights, or the file with the raw weights if there is no EMA."""
    return EMA_FILE if EMA_FILE in checkpoint.manifest["files"] else MODEL_FILE


def _model_in_checkpoint(
    checkpoint: Checkpoint, reports_folder: Path, displayed_name: str, weight_file_name: str
) -> TrainedModel:
    """Return the model in a verified checkpoint's weight file, described by manifest.json and state.json.

    Raises:
        ValueError: If the file contains no weights, or the manifest does not describe a training run.
    """
    manifest = checkpoint.manifest
    if weight_file_name not in (EMA_FILE, MODEL_FILE) or weight_file_name not in manifest["files"]:
        raise ValueError(
            f"{displayed_name}/{weight_file_name} does not contain a model."
            f" Pass {displayed_name}/{MODEL_FILE} instead."
        )
    recipe, classes, writer_info = (manifest.get(key) for key in ("recipe", "classes", "written_by"))
    script = writer_info.get("script") if isinstance(writer_info, dict) else None
    if not isinstance(recipe, dict) or not isinstance(classes, list) or not isinstance(script, str):
        raise ValueError(
            f"{displayed_name}/{MANIFEST_FILE} does not describe a training run,"
            " so the checkpoint was not written by a train script"
        )
    accuracy = None
    is_raw_weight_file = EMA_FILE in manifest["files"] and weight_file_name == MODEL_FILE
    metric_name = "raw_accuracy" if is_raw_weight_file else "accuracy"
    # state.json may not have been written by a run
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
        run_state = read_json(checkpoint.folder / STATE_FILE)
        accuracy = float(run_state["last"][metric_name]) if run_state["evaluated"] else None
    return TrainedModel(
        weights=str(checkpoint.folder / weight_file_name),
        name=f"{displayed_name}/{weight_file_name}",
        reports=str(reports_folder),
        step=checkpoint.step,
        script=script,
        recipe=recipe,
        classes=[printable(class_name) for class_name in classes],
        accuracy=accuracy,
        cropped=manifest.get("cropped"),
        preprocessing=manifest.get("preprocessing"),
    )


# --- Fine-tuning


def pretrained_model(timm_name: str, class_count: int, **options: Any) -> nn.Module:
    """Build a timm model with pretrained weights, which are downloaded from the Hugging Face Hub or cached.

    If the weights have a different number of classes, the model has a new head.

    Args:
        timm_name: timm model name.
        class_count: Number of classes.
        options: Keyword arguments of the model's constructor.

    Raises:
        ValueError: If timm has no weights for the model, or the Hub can't be reached.
    """
    import timm

    pretrained_config = timm.get_pretrained_cfg(timm_name)
    if pretrained_config is None or not pretrained_config.has_weights:
        raise ValueError(
            f"--pretrained: timm provides no weights for --model {timm_name}."
            " Choose a different model, or load a file with --weights FILE."
        )
    hub_problem = check_hub_or_go_offline()
    try:
        return timm.create_model(timm_name, pretrained=True, num_classes=class_count, **options)
    except OSError as error:
        hub_id = pretrained_config.hf_hub_id
        file_name = pretrained_config.hf_hub_filename or MODEL_FILE
        download_advice = f"run `hf download {hub_id} {file_name} --local-dir .`"
        if not hub_id:
            download_advice = f"download {pretrained_config.url}"
        raise ValueError(
            f"--pretrained: the Hub can't be reached ({hub_problem or error})."
            f" On a machine with internet access, {download_advice}."
            f" Then copy the file to this machine and use --weights {file_name}."
        ) from None


def model_with_weights(
    timm_name: str, location: Path, class_count: int, class_names: Sequence[str] = (), **options: Any
) -> nn.Module:
    """Build a timm model with saved weights, and log how the weights were adapted.

    The head keeps the rows of classes that the file contains, by name. Other classes get new rows.

    Args:
        timm_name: timm model name.
        location: Safetensors file, checkpoint folder or run folder. A run folder selects the best checkpoint.
            A checkpoint folder selects the EMA if the checkpoint contains one.
        class_count: Number of classes.
        class_names: The data's class names. If these names or the file's class names are unknown, the head
            is kept only if both have the same number of classes.
        options: Keyword arguments of the model's constructor.

    Raises:
        ValueError: If the weights do not match the model. The error message names the file and the
            difference.
    """
    import timm

    try:
        weight_file, checkpoint = _locate_weights(location, "any", lambda: None)
        tensor_file = open_weight_file(weight_file)
    except ValueError as error:
        raise ValueError(f"--weights {error}") from None
    preprocessing = _stored_preprocessing(timm_name, location, checkpoint)
    head_layer_names = head_names(timm_name)
    stored_class_count = _stored_class_count(tensor_file, head_layer_names)
    wrapper_prefix = tensor_file.wrapper_prefix()
    stored_tensors = {
        stored_name.removeprefix(wrapper_prefix): tensor_file.read_tensor(stored_name)
        for stored_name in tensor_file.shapes()
    }
    timm_overlay = {"state_dict": stored_tensors, "num_classes": stored_class_count}
    # Keep timm from using the published file's loader, and from removing its background class
    timm_overlay |= {"custom_load": False, "label_offset": 0} | preprocessing
    options |= {"pretrained_cfg_overlay": timm_overlay, "num_classes": stored_class_count}
    try:
        model: Any = timm.create_model(timm_name, pretrained=True, **options)
    except RuntimeError as error:
        if "loading state_dict" not in str(error):
            raise
        # After a heading, torch lists each kind of mismatch in one line. Keep the first line's first tensor
        _, first_mismatch, *_ = str(error).splitlines()
        first_mismatch = re.sub('", ".*', '"', first_mismatch.strip()).rstrip(".")
        recipe = checkpoint.manifest.get("recipe") if checkpoint else None
        stored_model = f" ({recipe['model']})" if isinstance(recipe, dict) and "model" in recipe else ""
        raise ValueError(
            f"--weights {weight_file} does not match --model {timm_name}: {first_mismatch}."
            f" Set --model to the architecture of the weights{stored_model}."
        ) from None
    del model.pretrained_cfg["state_dict"]  # free the weights, because timm would keep a reference
    weight_notes = []
    if wrapper_prefix:
        weight_notes.append(f"the prefix {wrapper_prefix} is removed from all tensor names")
    weight_notes += _resampling_notes(model, stored_tensors)
    stored_classes = checkpoint.manifest.get("classes") if checkpoint else stored_class_names(weight_file)
    stored_row_by_class = None  # row index in the stored head for each class
    if class_names and stored_classes and len(stored_classes) == stored_class_count:
        class_match = match_classes(stored_classes, class_names)
        if not class_match.is_identity:
            stored_row_by_class = class_match.labels
            kept_count_text = plural(len(class_match.known_classes), "class")
            new_count_text = plural(len(class_match.unknown_classes), "class")
            weight_notes.append(
                f"the head keeps the rows for {kept_count_text} with known names"
                f" and adds rows for {new_count_text}"
            )
    elif stored_class_count != class_count:
        stored_row_by_class = np.full(class_count, NEW_CLASS)
        weight_notes.append(
            f"a new head for {class_count:,} classes"
            f" replaces the file's head for {stored_class_count:,} classes"
        )
    elif class_names:
        weight_notes.append(
            "the file contains no class names, so the head's rows are assumed to be in the data's class order"
        )
    if stored_row_by_class is not None:
        _replace_head(model, head_layer_names, stored_row_by_class)
    if rank() == 0:
        log.info("; ".join([f"--weights: {shortest(weight_file)}", *weight_notes]))
    return model


@torch.no_grad()
def _replace_head(model: Any, head_layer_names: Sequence[str], stored_row_by_class: np.ndarray) -> None:
    """Replace the model's head with a new head that keeps some rows of the current head.

    Args:
        model: The timm model.
        head_layer_names: Names of the layers that compute the logits.
        stored_row_by_class: Row index in the current head for each class, or NEW_CLASS for a new row
            (int64 [classes]).
    """
    from timm.models.vision_transformer import init_weights_vit_timm

    stored_heads: list[dict[str, nn.Parameter]] = []  # stays empty if the new head keeps no rows
    if stored_row_by_class.max() != NEW_CLASS:
        stored_heads = [dict(model.get_submodule(name).named_parameters()) for name in head_layer_names]
    model.reset_classifier(len(stored_row_by_class))
    for layer_name in head_layer_names:
        model.get_submodule(layer_name).apply(init_weights_vit_timm)
    known_classes = torch.from_numpy(np.flatnonzero(stored_row_by_class != NEW_CLASS))
    known_rows = torch.from_numpy(stored_row_by_class)[known_classes]
    for layer_name, stored_parameters in zip(head_layer_names, stored_heads, strict=False):
        for parameter_name, parameter in model.get_submodule(layer_name).named_parameters():
            parameter[known_classes] = stored_parameters[parameter_name][known_rows]


def _resampling_notes(model: nn.Module, stored_tensors: dict[str, torch.Tensor]) -> list[str]:
    """Return a note that lists the tensors resampled by timm, for example position embeddings."""
    resampled_names = [
        tensor_name
        for tensor_name, tensor in model.state_dict().items()
        if "embed" in tensor_name  # timm resamples only embeddings
        and tensor_name in stored_tensors
        and stored_tensors[tensor_name].shape != tensor.shape
    ]
    resampling_note = f"timm resamples {', '.join(resampled_names)} to match this model's size"
    return [resampling_note] if resampled_names else []


def own_image_size(timm_name: str, location: str | None) -> int:
    """Return the image size for which a timm model's weights were trained.

    Args:
        timm_name: timm model name, whose configuration is the default.
        location: Folder with weights. If it contains a config.json, that file's image size is used.
    """
    published = read_published(Path(location)) if location else None
    return published.image_size if published else registered_config(timm_name).input_size[-1]


def _stored_preprocessing(model_name: str, location: Path, checkpoint: Checkpoint | None) -> dict[str, Any]:
    """Return the preprocessing stored with the weights, with timm's keys.

    Raises:
        ValueError: If the weights belong to a different architecture.
    """
    if checkpoint:
        preprocessing = checkpoint.manifest.get("preprocessing", {})
        if preprocessing.get("interpolation") == LEGACY:  # not an interpolation that timm supports
            return {setting_name: preprocessing[setting_name] for setting_name in ("mean", "std")}
        return preprocessing
    published = read_published(location)
    if published is None:
        return {}
    architecture, _, _ = model_name.partition(".")
    if published.architecture != architecture:
        raise ValueError(
            f"--weights {shortest(location)} contains a {published.architecture} model,"
            f" but --model is {model_name}. Use --model {published.architecture}."
        )
    return published.preprocessing_settings
