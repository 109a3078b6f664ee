"""Writes a trained model as files for timm, plain PyTorch and ONNX Runtime, without this repository."""

import json
import re
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from common.augment import to_float
from common.checkpoint.weights import TrainedModel, find, load_trained, open_script
from common.data.images import Images, open_data
from common.recipe import ImageRecipe
from common.script import load_script, normalisation

WEIGHTS, CONFIG, CODE = "model.safetensors", "config.json", "model.py"
RESIZE = 256 / 224  # the shorter side relative to the crop, as in common.data.decode.central_crop
OPSET = 20
OF_ITS_ORIGIN = ("tag", "license", "paper_ids", "paper_name", "origin_url", "notes")


@dataclass(frozen=True)
class Exported:
    """A trained model and what its files need."""

    trained: TrainedModel
    script: ModuleType
    recipe: ImageRecipe
    model: nn.Module  # in fp32, for evaluation
    classes: tuple[str, ...]
    mean: tuple[float, ...]
    std: tuple[float, ...]
    is_cropped: bool  # True: images are resized and centre-cropped; False: only resized
    sample: Tensor  # held-out images as the model's input: [n, 3, S, S]

    @property
    def is_timms(self) -> bool:
        return hasattr(self.model, "pretrained_cfg")

    @property
    def preparation(self) -> dict[str, Any]:
        """The preparation of an image for the model, with timm's keys."""
        size = self.recipe.image_size
        return {
            "input_size": (3, size, size),
            "mean": self.mean,
            "std": self.std,
            "crop_pct": 1 / RESIZE if self.is_cropped else 1.0,
            "interpolation": "bilinear" if self.is_cropped else "bicubic",
        }


def open_trained(
    location: str, which: str, script_file: str | None, words: list[str], scratch: Path, count: int
) -> Exported:
    """Opens a trained model and `count` held-out images of its data. words: flags of its script."""
    trained = find(location, which, scratch, lambda: None)
    if trained.recipe is None:
        raise ValueError(f"{trained.name} is a lone file: give the checkpoint's folder, or the run's")
    script, recipe, _ = open_script(trained, script_file, words)
    images = open_data(recipe)
    classes = tuple(trained.classes or images.classes)
    if len(images.classes) != len(classes):
        raise ValueError(
            f"{recipe.data} has {len(images.classes)} classes, the model {len(classes)}: give its --data"
        )
    model = script.build_model(recipe, len(classes))
    load_trained(model, Path(trained.weights))
    model.eval()
    mean, std = normalisation(script, model)
    sample = to_float(_first_pixels(images, recipe, count), mean, std, recipe.image_size)
    cropped = images.val.cropped
    return Exported(trained, script, recipe, model, classes, mean, std, cropped, sample.contiguous())


def _first_pixels(images: Images, recipe: ImageRecipe, count: int) -> Tensor:
    """uint8 [count, H, W, 3]"""
    plan = [(0, np.arange(min(count, len(images.val)), dtype=np.int64))]
    size = recipe.image_size
    batches = images.val.batches(iter(plan), device="cpu", train=False, size=size, seed=0, workers=0)
    return next(iter(batches)).images


# --- Files


def write_model(exported: Exported, folder: Path) -> dict[str, Any]:
    """Writes the weights, config.json and, unless timm builds the model, model.py. Returns the config."""
    if exported.is_timms:
        from timm.models import save_for_hf

        save_for_hf(
            exported.model,
            str(folder),
            model_config={"label_names": list(exported.classes)},
            data_config=exported.preparation,
            safe_serialization=True,
        )
        about = json.loads((folder / CONFIG).read_text())
        for key in OF_ITS_ORIGIN:  # facts about the hub's weights, which timm copies
            about["pretrained_cfg"].pop(key, None)
        (folder / CONFIG).write_text(json.dumps(about, indent=2) + "\n")
        return about
    from safetensors.torch import save_file

    code = model_section(exported.script)
    save_file({name: t.contiguous() for name, t in exported.model.state_dict().items()}, folder / WEIGHTS)
    recipe = {name: value for name, value in vars(exported.recipe).items() if f"recipe.{name}" in code}
    about = {
        "architecture": type(exported.model).__name__,
        "num_classes": len(exported.classes),
        "label_names": exported.classes,
        "recipe": recipe,
        **exported.preparation,
    }
    (folder / CONFIG).write_text(json.dumps(about, indent=2) + "\n")
    (folder / CODE).write_text(HEAD.format(script=exported.script.__name__, model=code) + LOADER)
    return about


def model_section(script: ModuleType) -> str:
    """The text of the script's section `# --- Model`. ValueError without one."""
    text = Path(str(script.__file__)).read_text()
    found = re.search(r"^# --- Model\b[^\n]*\n(.*?)^# --- ", text, re.MULTILINE | re.DOTALL)
    if not found:
        raise ValueError(f"{script.__file__} has no section that begins with `# --- Model`, to export")
    return found[1].strip()


def check_reloaded(exported: Exported, folder: Path) -> None:
    """Loads the model from the folder as a user would. ValueError unless its logits have equal bits.

    The script's section may need torch alone, by the names that the head of model.py imports.
    """
    if exported.is_timms:
        import timm

        loaded = timm.create_model(f"local-dir:{folder}", pretrained=True).eval()
    else:
        try:
            loaded = load_script(folder / CODE).load(folder)
        except NameError as error:
            raise ValueError(
                f"{exported.script.__file__}: its Model section needs {error.name}, and may need torch alone"
            ) from None
    with torch.inference_mode():
        if not torch.equal(loaded(exported.sample), exported.model(exported.sample)):
            raise ValueError("the model that was loaded back gives other logits: it is not exported")


def write_onnx(exported: Exported, about: dict[str, Any], file: Path) -> None:
    """Writes the model for any batch size, with the preparation and the classes as metadata."""
    batch = torch.export.Dim("batch", min=1)
    program = torch.onnx.export(
        exported.model,
        (exported.sample,),
        dynamo=True,
        input_names=["images"],
        output_names=["logits"],
        dynamic_shapes=({0: batch},),
        opset_version=OPSET,
        verbose=False,
    )
    assert program is not None
    facts = {**exported.preparation, "label_names": exported.classes, "architecture": about["architecture"]}
    for name, value in facts.items():
        program.model.metadata_props[name] = json.dumps(value)
    program.save(file, external_data=False)


def check_onnx(exported: Exported, file: Path, bound: float) -> None:
    """Raises ValueError unless ONNX Runtime's logits are within `bound` of the model's."""
    import onnxruntime

    session = onnxruntime.InferenceSession(file, providers=["CPUExecutionProvider"])
    for images in (exported.sample, exported.sample[:1]):
        (logits,) = session.run(["logits"], {"images": images.numpy()})
        with torch.inference_mode():
            distance = float((torch.from_numpy(logits) - exported.model(images)).abs().max())
        if not distance <= bound:
            raise ValueError(
                f"ONNX Runtime's logits are {distance:.1e} from the model's, more than {bound:g}"
            )


HEAD = '''"""The model of {script}.py, exported. Needs torch, numpy, safetensors, and Pillow for images.

    from PIL import Image
    from model import class_names, load, prepare

    logits = load()(prepare(Image.open("a.jpg")))
    print(class_names()[logits.argmax()])
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from types import SimpleNamespace

import torch
import torch.nn.functional as F
from torch import Tensor, nn


{model}

'''
LOADER = '''
FOLDER = Path(__file__).parent


def about(folder: Path = FOLDER) -> dict:
    return json.loads((Path(folder) / "config.json").read_text())


def class_names(folder: Path = FOLDER) -> list[str]:
    return about(folder)["label_names"]


def load(folder: Path = FOLDER) -> torch.nn.Module:
    """The trained model, for evaluation: [B, 3, S, S] -> logits [B, classes]."""
    from safetensors.torch import load_file

    config = about(folder)
    model = build_model(SimpleNamespace(**config["recipe"]), config["num_classes"])
    model.load_state_dict(load_file(Path(folder) / "model.safetensors"))
    return model.eval()


def prepare(image, folder: Path = FOLDER) -> torch.Tensor:
    """A PIL image as the model's input: float [1, 3, S, S]."""
    import numpy as np

    config = about(folder)
    size, resize = config["input_size"][1], torch.nn.functional.interpolate
    pixels = torch.from_numpy(np.array(image.convert("RGB"))).permute(2, 0, 1)[None]  # uint8 [1, 3, H, W]
    if config["crop_pct"] < 1:
        short, (height, width) = round(size / config["crop_pct"]), pixels.shape[2:]
        h, w = (short, short * width // height) if height <= width else (short * height // width, short)
        top, left = round((h - size) / 2), round((w - size) / 2)
        pixels = resize(pixels, (h, w), mode="bilinear", antialias=True)
        pixels = pixels[:, :, top : top + size, left : left + size]
    mean, std = (torch.tensor(config[name]).view(1, 3, 1, 1) for name in ("mean", "std"))
    inputs = (pixels.float() / 255 - mean) / std
    if inputs.shape[2:] == (size, size):
        return inputs
    return resize(inputs, (size, size), mode="bicubic", antialias=size < min(inputs.shape[2:]))
'''
