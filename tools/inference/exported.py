"""Write a trained model as files for timm, plain PyTorch and ONNX Runtime, without this repository."""

import json
import shutil
import sys
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import torch
from jinja2 import Template
from torch import Tensor, nn

from onecurve.checkpoint.weights import TrainedModel, find, load_weights, open_script
from onecurve.data.cache import prepare_cache
from onecurve.data.class_names import match_classes
from onecurve.data.images import open_images
from onecurve.data.sources import KNOWN
from onecurve.flags.recipe import ImageRecipe, recipe_part
from onecurve.models.preprocessing import DataConfig
from onecurve.models.script import MOVE, load_script, model_section
from onecurve.numerics.augment import to_float
from tools.inference.inference import evaluated_split, pixels_of, preprocessing_of

WEIGHTS, CONFIG, CODE = "model.safetensors", "config.json", "model.py"
MODEL_PY = Template(Path(__file__).with_name("model.py.j2").read_text(), keep_trailing_newline=True)
OPSET = 20
KEYS_OF_ORIGIN = (
    "tag",
    "license",
    "paper_ids",
    "paper_name",
    "origin_url",
    "notes",
)  # about the hub's weights


@dataclass(frozen=True)
class Exported:
    """A trained model with all data that its exported files contain."""

    trained: TrainedModel
    script: ModuleType
    recipe: ImageRecipe
    model: nn.Module  # fp32, in evaluation mode
    classes: tuple[str, ...]
    preprocessing: DataConfig
    is_cropped: bool  # True if images are resized and cropped, False if they are only resized
    sample: Tensor  # held-out images as the model's input: [n, 3, S, S]

    @property
    def is_timms(self) -> bool:
        return hasattr(self.model, "pretrained_cfg")

    @property
    def preparation(self) -> dict[str, Any]:
        """Preprocessing of the model's input, with timm's keys."""
        size, (mean, std, crop) = self.recipe.image_size, self.preprocessing
        return {
            "input_size": (3, size, size),
            "mean": mean,
            "std": std,
            "crop_pct": crop.crop_pct if self.is_cropped else 1.0,
            "crop_mode": crop.crop_mode if self.is_cropped else "squash",
            "interpolation": crop.filter if self.is_cropped else crop.enlargement or "bicubic",
        }


def open_trained(
    location: str, which: str, script_file: str | None, words: list[str], scratch: Path, count: int
) -> Exported:
    """Open a trained model and `count` held-out images of its data.

    Args:
        location: path or s3:// URL of the model.
        which: "best" or "latest", for a run.
        script_file: the train script, if it is not in this project.
        words: flags of the train script that change the recipe.
        scratch: folder for downloaded files.
    """
    trained = find(location, which, scratch, lambda: None)
    if trained.recipe is None:
        raise ValueError(
            f"{trained.name} is a single file without a recipe. Give the folder of the checkpoint or run."
        )
    if "data" not in trained.recipe and not any(word.partition("=")[0] == "--data" for word in words):
        raise ValueError(f"{trained.name} does not name its data. Give some of its images: --data FOLDER")
    script, recipe, _ = open_script(trained, script_file, words)
    prepared = prepare_cache(recipe, lambda: None, is_evaluated=True)
    images = open_images(Path(prepared.folder), recipe)
    match = match_classes(trained.names or trained.classes, images.classes)
    match.refuse_unknown(recipe.data, trained.name)
    classes = match.model
    model = script.build_model(recipe, len(classes))
    load_weights(model, trained, script, recipe)
    model.eval()
    preprocessing = mean, std, crop = preprocessing_of(trained, script, recipe, model)
    split, ids = evaluated_split(images.val, trained), np.arange(min(count, len(images.val)), dtype=np.int64)
    pixels = pixels_of(split, ids, recipe, crop)
    sample = to_float(pixels, mean, std, recipe.image_size, crop.enlargement).contiguous()
    is_cropped = split.cropped if trained.cropped is None else trained.cropped
    return Exported(trained, script, recipe, model, classes, preprocessing, is_cropped, sample)


def write_model(exported: Exported, folder: Path) -> dict[str, Any]:
    """Write the weights, config.json and, unless timm contains the model, model.py.

    Returns:
        The config without `trained_by`. The file also contains `trained_by`, which predict.py and validate.py
        read. Only the last part of the data's path is stored.
    """
    if exported.is_timms:
        from timm.models import save_for_hf

        save_for_hf(
            exported.model,
            str(folder),
            model_config={"label_names": list(exported.classes)},
            data_config=exported.preparation,
            safe_serialization=True,
        )
        config = json.loads((folder / CONFIG).read_text())
        for key in KEYS_OF_ORIGIN:  # timm would also apply these keys to the trained weights
            config["pretrained_cfg"].pop(key, None)
        config.get("model_args", {}).pop("num_classes", None)  # transformers already passes num_classes
    else:
        config = _write_with_code(exported, folder)
    data = exported.recipe.data
    data = data if data in KNOWN or data.startswith("hub:") else f"./{Path(data).name}"
    recipe = {k: v for k, v in recipe_part(exported.recipe).items() if k != "weights"} | {"data": data}
    trained_by: dict[str, Any] = {"script": exported.trained.script, "recipe": recipe}
    trained_by |= {"classes": exported.classes, "cropped": exported.is_cropped}
    trained_by |= {"preprocessing": exported.preprocessing.to_json(), "names": exported.trained.names}
    (folder / CONFIG).write_text(json.dumps(config | {"trained_by": trained_by}, indent=2) + "\n")
    shutil.copymode(folder / CONFIG, folder / WEIGHTS)  # safetensors writes private files
    return config


def _write_with_code(exported: Exported, folder: Path) -> dict[str, Any]:
    from safetensors.torch import save_file

    text = Path(str(exported.script.__file__)).read_text()
    if (code := model_section(text)) is None:
        raise ValueError(f"{exported.script.__file__} has no section `# --- Model` to export")
    save_file({name: t.contiguous() for name, t in exported.model.state_dict().items()}, folder / WEIGHTS)
    recipe = {name: value for name, value in vars(exported.recipe).items() if f"recipe.{name}" in code}
    (folder / CODE).write_text(MODEL_PY.render(script=exported.script.__name__, model=code))
    return {
        "architecture": type(exported.model).__name__,
        "num_classes": len(exported.classes),
        "label_names": exported.classes,
        "recipe": recipe,
        **exported.preparation,
    }


def check_reloaded(exported: Exported, folder: Path) -> None:
    """Load the model as a user would. Raise ValueError unless its logits are bitwise identical.

    Loading fails if the script's Model section uses names that model.py does not import from torch.
    """
    if exported.is_timms:
        import timm

        loaded = timm.create_model(f"local-dir:{folder}", pretrained=True).eval()
    else:
        try:
            sys.dont_write_bytecode = True  # keep __pycache__ out of the exported folder
            loaded = load_script(folder / CODE).load(folder)
        except NameError as error:
            raise ValueError(
                f"{exported.script.__file__}: the Model section uses {error.name}. {MOVE}"
            ) from None
    with torch.inference_mode():
        if not torch.equal(loaded(exported.sample), exported.model(exported.sample)):
            raise ValueError("the model was not exported: loaded back, it computes different logits")


def write_onnx(exported: Exported, config: dict[str, Any], file: Path) -> None:
    """Write the model for any batch size, with preprocessing and class names as metadata."""
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
    facts = {**exported.preparation, "label_names": exported.classes, "architecture": config["architecture"]}
    program.model.metadata_props.update({name: json.dumps(value) for name, value in facts.items()})
    program.save(file, external_data=False)


def check_onnx(exported: Exported, file: Path, bound: float) -> None:
    """Raise ValueError unless ONNX Runtime's logits are within `bound` of the model's logits."""
    import onnxruntime

    session = onnxruntime.InferenceSession(file, providers=["CPUExecutionProvider"])
    for images in (exported.sample, exported.sample[:1]):
        (logits,) = session.run(["logits"], {"images": images.numpy()})
        with torch.inference_mode():
            distance = float((torch.from_numpy(logits) - exported.model(images)).abs().max())
        if not distance <= bound:
            raise ValueError(f"ONNX Runtime's logits differ by {distance:.1e}, more than {bound:g}")
