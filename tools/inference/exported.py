"""Export a trained model to files that timm, plain PyTorch and ONNX Runtime load without this repository."""

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

from onecurve.checkpoint.weights import TrainedModel, find_model, load_weights, open_script
from onecurve.data.cache import prepare_cache
from onecurve.data.class_names import match_classes
from onecurve.data.images import open_images
from onecurve.data.sources import BUILT_IN_DATA
from onecurve.flags.recipe import ImageRecipe, recipe_part
from onecurve.models.preprocessing import DataConfig
from onecurve.models.script import MOVE_ADVICE, load_script, model_section
from onecurve.numerics.augment import to_float
from tools.inference.inference import evaluated_split, pixels_of, preprocessing_of

WEIGHTS, CONFIG, CODE = "model.safetensors", "config.json", "model.py"
MODEL_PY = Template(Path(__file__).with_name("model.py.j2").read_text(), keep_trailing_newline=True)
OPSET = 20
# timm config keys that describe the pretrained weights
PRETRAINED_KEYS = ("tag", "license", "paper_ids", "paper_name", "origin_url", "notes")


@dataclass(frozen=True)
class Exported:
    """Trained model with all information that the exported files contain."""

    trained: TrainedModel
    script: ModuleType
    recipe: ImageRecipe
    model: nn.Module  # model in fp32 and evaluation mode
    classes: tuple[str, ...]
    preprocessing: DataConfig
    is_cropped: bool  # True if images are resized and cropped, False if they are only resized
    sample: Tensor  # held-out images as model inputs [n, 3, S, S]

    @property
    def is_timm_model(self) -> bool:
        return hasattr(self.model, "pretrained_cfg")

    @property
    def preprocessing_settings(self) -> dict[str, Any]:
        """Preprocessing settings, with timm's config keys."""
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
    """Open a trained model and some held-out images.

    Args:
        location: The model's path or s3:// URL.
        which: Checkpoint to open if `location` is a run, "best" or "latest".
        script_file: The train script's path, or None if the script is in this project.
        words: Train script flags that change the recipe.
        scratch: Folder for downloaded files.
        count: Number of held-out images.
    """
    trained = find_model(location, which, scratch, lambda: None)
    if trained.recipe is None:
        problem = "is a single file without a recipe. Specify the checkpoint folder or the run folder"
        raise ValueError(f"{trained.name} {problem}.")
    if "data" not in trained.recipe and not any(word.partition("=")[0] == "--data" for word in words):
        remedy = "Pass --data FOLDER with some of the images."
        raise ValueError(f"{trained.name} does not record the path of the training data. {remedy}")
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
    """Write the weights and config.json, and also write model.py unless timm contains the model.

    config.json contains a section `trained_by` for predict.py and validate.py. This section stores only the
    last component of the data path.

    Returns:
        Content of config.json without `trained_by`.
    """
    if exported.is_timm_model:
        from timm.models import save_for_hf

        save_for_hf(
            exported.model,
            str(folder),
            model_config={"label_names": list(exported.classes)},
            data_config=exported.preprocessing_settings,
            safe_serialization=True,
        )
        config = json.loads((folder / CONFIG).read_text())
        for key in PRETRAINED_KEYS:  # these keys do not describe the trained weights
            config["pretrained_cfg"].pop(key, None)
        config.get("model_args", {}).pop("num_classes", None)  # transformers passes num_classes separately
    else:
        config = _write_weights_and_code(exported, folder)
    data = exported.recipe.data
    data = data if data in BUILT_IN_DATA or data.startswith("hub:") else f"./{Path(data).name}"
    recipe = recipe_part(exported.recipe) | {"data": data}
    recipe.pop("weights", None)
    trained_by: dict[str, Any] = {"script": exported.trained.script, "recipe": recipe}
    trained_by |= {"classes": exported.classes, "cropped": exported.is_cropped}
    trained_by |= {"preprocessing": exported.preprocessing.to_json(), "names": exported.trained.names}
    (folder / CONFIG).write_text(json.dumps(config | {"trained_by": trained_by}, indent=2) + "\n")
    shutil.copymode(folder / CONFIG, folder / WEIGHTS)  # safetensors writes private files
    return config


def _write_weights_and_code(exported: Exported, folder: Path) -> dict[str, Any]:
    from safetensors.torch import save_file

    script_text = Path(str(exported.script.__file__)).read_text()
    if (model_code := model_section(script_text)) is None:
        remedy = f"Put the code of the model into this section, which export.py copies to {CODE}."
        raise ValueError(f"{exported.script.__file__} does not contain a section `# --- Model`. {remedy}")
    weights = {name: tensor.contiguous() for name, tensor in exported.model.state_dict().items()}
    save_file(weights, folder / WEIGHTS)
    recipe = {name: value for name, value in vars(exported.recipe).items() if f"recipe.{name}" in model_code}
    (folder / CODE).write_text(MODEL_PY.render(script=exported.script.__name__, model=model_code))
    return {
        "architecture": type(exported.model).__name__,
        "num_classes": len(exported.classes),
        "label_names": exported.classes,
        "recipe": recipe,
        **exported.preprocessing_settings,
    }


def check_reloaded(exported: Exported, folder: Path) -> None:
    """Load the exported model as a user would, and raise ValueError unless the logits are bitwise identical.

    Loading fails if the script's Model section uses names that model.py does not import from torch.
    """
    if exported.is_timm_model:
        import timm

        loaded = timm.create_model(f"local-dir:{folder}", pretrained=True).eval()
    else:
        try:
            sys.dont_write_bytecode = True  # don't write __pycache__ into the exported folder
            loaded = load_script(folder / CODE).load(folder)
        except NameError as error:
            problem = f"the Model section uses {error.name}. {MOVE_ADVICE}"
            raise ValueError(f"{exported.script.__file__}: {problem}") from None
    with torch.inference_mode():
        if not torch.equal(loaded(exported.sample), exported.model(exported.sample)):
            raise ValueError("the export failed, because the reloaded model computes different logits")


def write_onnx(exported: Exported, config: dict[str, Any], file: Path) -> None:
    """Write the model as an ONNX file for any batch size.

    The metadata contains preprocessing and class names.
    """
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
    metadata = exported.preprocessing_settings | {"label_names": exported.classes}
    metadata["architecture"] = config["architecture"]
    program.model.metadata_props.update({name: json.dumps(value) for name, value in metadata.items()})
    program.save(file, external_data=False)


def check_onnx(exported: Exported, file: Path, bound: float) -> None:
    """Raise ValueError if logits from ONNX Runtime and from PyTorch differ by more than `bound`."""
    import onnxruntime

    session = onnxruntime.InferenceSession(file, providers=["CPUExecutionProvider"])
    for images in (exported.sample, exported.sample[:1]):
        (logits,) = session.run(["logits"], {"images": images.numpy()})
        with torch.inference_mode():
            difference = float((torch.from_numpy(logits) - exported.model(images)).abs().max())
        if not difference <= bound:
            problem = f"the logits from ONNX Runtime and PyTorch differ by {difference:.1e}"
            raise ValueError(f"{problem}, which exceeds {bound:g}")
