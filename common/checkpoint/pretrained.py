"""Builds a timm model with initial weights from the hub, a file or a run.

timm's loading adapts them to the model: it resamples the position embeddings if the number of patches
differs, and the patch embedding if the patch size differs.
"""

import re
import shlex
from pathlib import Path
from typing import Any

import timm
from timm.models import get_pretrained_cfg
from timm.models.vision_transformer import init_weights_vit_timm
from torch import nn

from common.checkpoint.format import (
    EMA_FILE,
    MANIFEST_FILE,
    MODEL_FILE,
    TensorFile,
    best_in,
    newest,
    steps_in,
    verify,
)
from common.system.env import rank
from common.system.paths import shortest

# A command that converts a pickle, which the user runs, never this code. timm prefers the averaged weights of
# a training's checkpoint, and lets torch load only tensors.
CONVERT = (
    "import sys; from timm.models import load_state_dict as load; from safetensors.torch import save_file;"
    " save_file({n: t.clone().contiguous() for n, t in load(sys.argv[1]).items()}, sys.argv[2])"
)
PICKLES = (b"PK", b"\x80")  # first bytes of torch's files, new and old ones


def pretrained_model(name: str, classes: int, **options: Any) -> nn.Module:
    """The model with the hub's weights; its head is new if the number of classes differs.

    ValueError if timm has no weights for it, or the hub can't be reached.
    """
    config = get_pretrained_cfg(name)
    if config is None or not config.has_weights:
        raise ValueError(
            f"--pretrained: timm has no weights for --model {name}: give another, or --weights FILE"
        )
    try:
        return timm.create_model(name, True, num_classes=classes, **options)
    except OSError as error:
        file = config.hf_hub_filename or MODEL_FILE
        fetch = f"`hf download {config.hf_hub_id} {file} --local-dir .`"
        raise ValueError(
            f"--pretrained: the hub can't be reached ({error}): fetch the file where it can, by"
            f" {fetch if config.hf_hub_id else config.url}, copy it here, and give --weights {file}"
        ) from None


def model_with_weights(name: str, location: Path, classes: int, **options: Any) -> nn.Module:
    """The model with saved weights; its head is new if the number of classes differs.

    location: a safetensors file, a checkpoint's folder (its EMA if it has one), or a run's folder (its best
    checkpoint). ValueError names the file, and what does not fit.
    """
    try:
        file, about = _file_and_recipe(location)
        shapes = _open(file).shapes()
    except ValueError as error:
        raise ValueError(f"--weights {error}") from None
    heads = head_names(name)
    found = (shapes.get(f"{heads[0]}.weight") or (0,))[0]  # classes in the file; 0: it has no head
    source = {"file": str(file), "num_classes": found, "custom_load": False, "label_offset": 0}
    try:
        model: Any = timm.create_model(
            name, True, pretrained_cfg_overlay=source, num_classes=found, **options
        )
    except RuntimeError as error:
        if "loading state_dict" not in str(error):
            raise
        first = re.sub('", ".*', '"', str(error).splitlines()[1].strip()).rstrip(".")
        whose = f", {about['model']}" if "model" in about else ""
        raise ValueError(
            f"--weights {file} does not fit --model {name}: {first}: give the --model that it is of{whose}"
        ) from None
    if found != classes:
        model.reset_classifier(classes)
        for head in heads:
            model.get_submodule(head).apply(init_weights_vit_timm)
    if rank() == 0:
        new = f"; the head is new, for {classes:,} classes instead of {found:,}" if found != classes else ""
        print(f"--weights: {shortest(file)}{new}", flush=True)
    return model


def head_names(name: str) -> tuple[str, ...]:
    """The names of the layers that compute the logits: one, or two in DeiT's distilled models."""
    names = getattr(get_pretrained_cfg(name), "classifier", None) or "head"
    return (names,) if isinstance(names, str) else tuple(names)


def _file_and_recipe(path: Path) -> tuple[Path, dict[str, Any]]:
    """The file of weights, and the recipe that trained it if there is a manifest.

    ValueError if there is no file, or a checkpoint does not verify.
    """
    if not path.exists():
        raise ValueError(f"{path}: there is no such file")
    if not path.is_dir():
        return path, {}
    folder = _checkpoint_of_run(path / "checkpoints") or path
    if (folder / MANIFEST_FILE).exists():
        recipe = verify(folder).manifest.get("recipe")
        name = EMA_FILE if (folder / EMA_FILE).exists() else MODEL_FILE
        return folder / name, recipe if isinstance(recipe, dict) else {}
    if not (folder / MODEL_FILE).exists():
        raise ValueError(f"{path} holds neither checkpoints nor {MODEL_FILE}: give a file, or a run's folder")
    return folder / MODEL_FILE, {}


def _checkpoint_of_run(parent: Path) -> Path | None:
    """The best checkpoint, or if it is missing the newest that verifies; None without any."""
    if best := best_in(parent):
        return best
    found = newest(parent, lambda: None, lambda _: None, ours=False) if steps_in(parent) else None
    return found.folder if found else None


def _open(file: Path) -> TensorFile:
    try:
        weights = TensorFile(file)
    except ValueError:
        with open(file, "rb") as opened:
            begin = opened.read(2)
        if not begin.startswith(PICKLES):
            raise
        command = shlex.join(["python", "-c", CONVERT, str(file), str(file.with_suffix(".safetensors"))])
        raise ValueError(
            f"{file} is a pickle, which can run code when it is read: convert it where nothing can be"
            f" harmed, as in a container, by {command}"
        ) from None
    if file.suffix != ".safetensors":  # timm would treat it as a pickle
        raise ValueError(f"{file} is a safetensors file by another name: call it {file.stem}.safetensors")
    return weights
