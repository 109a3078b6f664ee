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

from onecurve.checkpoint.weights import TrainedModel, find_model, load_weights
from onecurve.data.cache import prepare_cache
from onecurve.data.images import open_images
from onecurve.data.sources import BUILT_IN_DATA
from onecurve.flags.recipe import ImageRecipe, recipe_part
from onecurve.models.class_names import match_classes
from onecurve.models.preprocessing import DataConfig
from onecurve.models.script import MOVE_ADVICE, load_script, model_section
from onecurve.numerics.augment import to_float
from tools.inference.inference import evaluated_split, open_script, pixels_of, preprocessing_of

WEIGHTS_FILE, CONFIG_FILE, CODE_FILE = "model.safetensors", "config.json", "model.py"
MODEL_PY_TEMPLATE = Template(Path(__file__).with_name("model.py.j2").read_text(), keep_trailing_newline=True)
ONNX_OPSET = 20
# timm config keys that describe the weights published by timm
PRETRAINED_WEIGHTS_KEYS = ("tag", "license", "paper_ids", "paper_name", "origin_url", "notes")


@dataclass(frozen=True)
class ExportedModel:
    """Trained model with all information that the exported files contain."""

    trained_model: TrainedModel
    script: ModuleType
    recipe: ImageRecipe
    model: nn.Module  # model in fp32 and evaluation mode
    classes: tuple[str, ...]
    preprocessing: DataConfig
    is_cropped: bool  # True if images are resized and cropped, False if they are only resized
    sample_inputs: Tensor  # held-out images as model inputs [n, 3, S, S]

    @property
    def is_timm_model(self) -> bool:
        """True if timm contains the model. timm adds `pretrained_cfg` to its models."""
        return hasattr(self.model, "pretrained_cfg")

    @property
    def preprocessing_settings(self) -> dict[str, Any]:
        """Preprocessing settings, with timm's config keys."""
        image_size = self.recipe.image_size
        mean, std, crop = self.preprocessing
        return {
            "input_size": (3, image_size, image_size),
            "mean": mean,
            "std": std,
            "crop_pct": crop.crop_pct if self.is_cropped else 1.0,
            "crop_mode": crop.crop_mode if self.is_cropped else "squash",
            "interpolation": crop.filter if self.is_cropped else crop.enlargement or "bicubic",
        }


def open_trained(
    location: str, which: str, script_file: str | None, flag_words: list[str], scratch: Path, sample_size: int
) -> ExportedModel:
    """Load a trained model in fp32 on the CPU, and some held-out images of its data.

    Args:
        location: The model's path or s3:// URL.
        which: Checkpoint to open if `location` is a run, "best" or "latest".
        script_file: The train script's path, or None if the script is in this project.
        flag_words: Train script flags that change the recipe.
        scratch: Folder for downloaded files.
        sample_size: Number of held-out images.

    Raises:
        ValueError: If the model has no recipe, its data is unknown, or the data contains unknown classes.
    """

    def ignore_heartbeat() -> None:
        """Do nothing, because no other process waits for export.py."""

    trained_model = find_model(location, which, scratch, ignore_heartbeat)
    if trained_model.recipe is None:
        model_problem = "is a single file without a recipe. Specify the checkpoint folder or the run folder"
        raise ValueError(f"{trained_model.name} {model_problem}.")
    given_flags = [word.partition("=")[0] for word in flag_words]
    if "data" not in trained_model.recipe and "--data" not in given_flags:
        remedy = "Pass --data FOLDER with some of the images."
        raise ValueError(f"{trained_model.name} does not record the path of the training data. {remedy}")
    script, recipe, _ = open_script(trained_model, script_file, flag_words)
    cached_data = prepare_cache(recipe, ignore_heartbeat, is_evaluation_only=True)
    data_images = open_images(Path(cached_data.folder), recipe)
    class_match = match_classes(trained_model.names or trained_model.classes, data_images.classes)
    class_match.refuse_unknown(recipe.data, trained_model.name)
    model = script.build_model(recipe, len(class_match.model))
    load_weights(model, trained_model, script, recipe)
    model.eval()
    preprocessing = preprocessing_of(trained_model, script, recipe, model)
    mean, std, crop = preprocessing
    val_split = evaluated_split(data_images.val, trained_model)
    sample_ids = np.arange(min(sample_size, len(data_images.val)), dtype=np.int64)
    sample_pixels = pixels_of(val_split, sample_ids, recipe, crop)
    sample_inputs = to_float(sample_pixels, mean, std, recipe.image_size, crop.enlargement).contiguous()
    is_cropped = val_split.cropped if trained_model.cropped is None else trained_model.cropped
    return ExportedModel(
        trained_model, script, recipe, model, class_match.model, preprocessing, is_cropped, sample_inputs
    )


def write_model(exported_model: ExportedModel, folder: Path) -> dict[str, Any]:
    """Write the weights and config.json to a folder, and also model.py unless timm contains the model.

    config.json contains a section `trained_by` for predict.py and validate.py. This section stores only the
    last component of the data path.

    Returns:
        Content of config.json without `trained_by`.
    """
    if exported_model.is_timm_model:
        from timm.models import save_for_hf

        save_for_hf(
            exported_model.model,
            str(folder),
            model_config={"label_names": list(exported_model.classes)},
            data_config=exported_model.preprocessing_settings,
            safe_serialization=True,
        )
        config_json = json.loads((folder / CONFIG_FILE).read_text())
        for weights_key in PRETRAINED_WEIGHTS_KEYS:  # they do not describe the exported weights
            config_json["pretrained_cfg"].pop(weights_key, None)
        # transformers passes num_classes separately.
        config_json.get("model_args", {}).pop("num_classes", None)
    else:
        config_json = _write_weights_and_code(exported_model, folder)
    data_path = exported_model.recipe.data
    is_data_public = data_path in BUILT_IN_DATA or data_path.startswith("hub:")
    trained_recipe = recipe_part(exported_model.recipe)
    trained_recipe["data"] = data_path if is_data_public else f"./{Path(data_path).name}"
    trained_recipe.pop("weights", None)  # initial weights, which the exported weights replace
    trained_by: dict[str, Any] = {"script": exported_model.trained_model.script, "recipe": trained_recipe}
    trained_by |= {"classes": exported_model.classes, "cropped": exported_model.is_cropped}
    trained_by["preprocessing"] = exported_model.preprocessing.to_json()
    trained_by["names"] = exported_model.trained_model.names
    (folder / CONFIG_FILE).write_text(json.dumps(config_json | {"trained_by": trained_by}, indent=2) + "\n")
    shutil.copymode(folder / CONFIG_FILE, folder / WEIGHTS_FILE)  # safetensors writes private files
    return config_json


def _write_weights_and_code(exported_model: ExportedModel, folder: Path) -> dict[str, Any]:
    """Write model.safetensors and model.py, and return the content of config.json.

    Raises:
        ValueError: If the train script has no Model section, which becomes the code in model.py.
    """
    from safetensors.torch import save_file

    script_file = str(exported_model.script.__file__)
    if (model_code := model_section(Path(script_file).read_text())) is None:
        remedy = f"Put the code of the model into this section, which export.py copies to {CODE_FILE}."
        raise ValueError(f"{script_file} does not contain a section `# --- Model`. {remedy}")
    weights = {
        tensor_name: tensor.contiguous() for tensor_name, tensor in exported_model.model.state_dict().items()
    }
    save_file(weights, folder / WEIGHTS_FILE)
    flag_values = vars(exported_model.recipe).items()
    # Recipe values that the code in model.py reads
    used_flags = {flag: flag_value for flag, flag_value in flag_values if f"recipe.{flag}" in model_code}
    model_py = MODEL_PY_TEMPLATE.render(script=exported_model.script.__name__, model=model_code)
    (folder / CODE_FILE).write_text(model_py)
    return {
        "architecture": type(exported_model.model).__name__,
        "num_classes": len(exported_model.classes),
        "label_names": exported_model.classes,
        "recipe": used_flags,
        **exported_model.preprocessing_settings,
    }


def check_reloaded(exported_model: ExportedModel, folder: Path) -> None:
    """Load the exported model as a user would, and raise ValueError unless the logits are bitwise identical.

    For a script's model, this function runs the code in model.py. Loading fails if the script's Model section
    uses names that model.py does not import from torch.
    """
    if exported_model.is_timm_model:
        import timm

        reloaded_model = timm.create_model(f"local-dir:{folder}", pretrained=True).eval()
    else:
        try:
            sys.dont_write_bytecode = True  # don't write __pycache__ into the exported folder
            reloaded_model = load_script(folder / CODE_FILE).load(folder)
        except NameError as error:
            code_problem = f"the Model section uses {error.name}. {MOVE_ADVICE}"
            raise ValueError(f"{exported_model.script.__file__}: {code_problem}") from None
    with torch.inference_mode():
        original_logits = exported_model.model(exported_model.sample_inputs)
        if not torch.equal(reloaded_model(exported_model.sample_inputs), original_logits):
            raise ValueError("the export failed, because the reloaded model computes different logits")


def write_onnx(exported_model: ExportedModel, config_json: dict[str, Any], onnx_file: Path) -> None:
    """Write the model as an ONNX file for any batch size.

    The file's metadata contains the preprocessing, the class names and config_json["architecture"].
    """
    batch_dimension = torch.export.Dim("batch", min=1)
    onnx_program = torch.onnx.export(
        exported_model.model,
        (exported_model.sample_inputs,),
        dynamo=True,
        input_names=["images"],
        output_names=["logits"],
        dynamic_shapes=({0: batch_dimension},),
        opset_version=ONNX_OPSET,
        verbose=False,
    )
    assert onnx_program is not None
    metadata = exported_model.preprocessing_settings | {"label_names": exported_model.classes}
    metadata["architecture"] = config_json["architecture"]
    onnx_program.model.metadata_props.update({key: json.dumps(value) for key, value in metadata.items()})
    onnx_program.save(onnx_file, external_data=False)


def check_onnx(exported_model: ExportedModel, onnx_file: Path, max_difference: float) -> None:
    """Raise ValueError if logits from ONNX Runtime and from PyTorch differ by more than `max_difference`."""
    import onnxruntime

    onnx_session = onnxruntime.InferenceSession(onnx_file, providers=["CPUExecutionProvider"])
    # Use two batch sizes, because the file must support any batch size.
    for input_batch in (exported_model.sample_inputs, exported_model.sample_inputs[:1]):
        (onnx_logits,) = onnx_session.run(["logits"], {"images": input_batch.numpy()})
        with torch.inference_mode():
            torch_logits = exported_model.model(input_batch)
            logit_difference = float((torch.from_numpy(onnx_logits) - torch_logits).abs().max())
        if not logit_difference <= max_difference:  # also raises for NaN
            logits_problem = f"the logits from ONNX Runtime and PyTorch differ by {logit_difference:.1e}"
            raise ValueError(f"{logits_problem}, which exceeds {max_difference:g}")
