"""Loads a train script as a module to read its recipe and build the model without training.

`python -m onecurve.models.script train_vit.py [FLAGS]` prints the number of parameters, the number of images,
the data and the batch size as JSON for doctor.py. The command neither trains nor downloads.
"""

import builtins
import dis
import importlib.util
import json
import re
import sys
import types
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import nn

from onecurve.flags.fields import REMOVED_FLAGS, flags_where
from onecurve.flags.recipe import Recipe, parse, recipe_part, without_training_flags
from onecurve.models.timm_models import data_config_of
from onecurve.system.paths import ROOT

TRAINING_IMAGE_COUNTS = {"digits": 1437, "cifar10": 50_000}  # for data sets selected by name
# Extensions of files that contain tables or lists of images
TABLE_SUFFIXES = (".arrow", ".csv", ".json", ".jsonl", ".parquet")
# Names that an exported model.py imports for use in the Model section
IMPORTED_MODEL_NAMES = ("json", "math", "Path", "SimpleNamespace", "torch", "F", "Tensor", "nn")
MOVE_ADVICE = (
    "Move imports and definitions that the model needs into the Model section. The exported model.py can use"
    " torch, but no code from this project"
)
ASSUMED_CLASS_COUNT = 10  # arbitrary, because the number of classes changes a model's size only slightly


def project_script(script_name: str | None) -> Path:
    """Return the path of the train script named in a checkpoint's manifest.

    The script must belong to this project. A manifest can't specify a path, because loading a script runs its
    code.

    Raises:
        ValueError: If the project contains no train script with this name.
    """
    script_by_name = {script_path.stem: script_path for script_path in sorted(ROOT.glob("train_*.py"))}
    if script_name not in script_by_name:
        raise ValueError(
            f"the model was trained by {script_name!r}, which is not one of this project's scripts"
            f" ({', '.join(script_by_name)}). If you trust that script, pass its path with --script."
        )
    return script_by_name[script_name]


def load_script(script_path: Path) -> ModuleType:
    """Import a train script as a module without running its main().

    The import runs the script's top-level code and registers the module in sys.modules.
    """
    module_spec = importlib.util.spec_from_file_location(script_path.stem, script_path)
    assert module_spec is not None
    assert module_spec.loader is not None
    script_module = importlib.util.module_from_spec(module_spec)
    sys.modules[script_path.stem] = script_module
    module_spec.loader.exec_module(script_module)
    return script_module


def model_section(script_text: str) -> str | None:
    """Return the code in a script's `# --- Model` section, from which export.py creates model.py."""
    section_pattern = re.compile(r"^# --- Model\b[^\n]*\n(.*?)^# --- ", re.MULTILINE | re.DOTALL)
    section_match = section_pattern.search(script_text)
    return section_match[1].strip() if section_match else None


def undefined_names(section: str) -> list[str]:
    """Return the names that a Model section uses but that neither the section nor model.py defines.

    The section is compiled but not run. Annotations are ignored, because model.py does not evaluate them.
    """
    used_names = set[str]()
    defined_names = {*dir(builtins), *IMPORTED_MODEL_NAMES}
    module_code = f"from __future__ import annotations\n{section}"
    code_objects: list[Any] = [compile(module_code, "model.py", "exec")]
    while code_objects:
        code_object = code_objects.pop()
        # Functions and classes are constants of the code object that contains them
        code_objects += [const for const in code_object.co_consts if isinstance(const, types.CodeType)]
        for instruction in dis.get_instructions(code_object):
            if instruction.opname in ("LOAD_GLOBAL", "LOAD_NAME"):
                used_names.add(instruction.argval)
            elif instruction.opname in ("STORE_GLOBAL", "STORE_NAME"):
                defined_names.add(instruction.argval)
    # Every module defines names with two leading underscores
    return sorted(used_name for used_name in used_names - defined_names if not used_name.startswith("__"))


def recipe_class(script: ModuleType) -> type[Recipe]:
    """Return the recipe class that the script declares, or raise ValueError if there is none."""
    for script_object in vars(script).values():
        is_declared_here = getattr(script_object, "__module__", None) == script.__name__
        if is_declared_here and isinstance(script_object, type) and issubclass(script_object, Recipe):
            return script_object
    raise ValueError(f"{script.__file__} declares no recipe, so it is not a train script")


def recipe_of(script: ModuleType, flag_words: list[str]) -> Any:
    """Return the script's recipe for these flags, with model-dependent values resolved."""
    return parse(recipe_class(script), flag_words).resolved()


def as_flags(manifest_recipe: dict[str, Any], recipe_type: type[Recipe]) -> list[str]:
    """Convert a manifest's recipe to script flags, which are then checked like a user's flags.

    Flags that affect only training are omitted. Flags that this project has removed are also omitted, because
    no removed flag changed a weight's name or shape.

    Raises:
        ValueError: If the recipe contains an unknown key.
    """
    if unknown_names := manifest_recipe.keys() - recipe_part(recipe_type()).keys() - REMOVED_FLAGS.keys():
        unknown_name = unknown_names.pop()
        raise ValueError(
            f"the recipe contains {unknown_name!r}, which {recipe_type.__name__} does not define"
        )
    flag_words: list[str] = []
    omitted_flags = {*REMOVED_FLAGS, *flags_where(recipe_type, "training_only")}
    for flag_name, flag_value in manifest_recipe.items():
        is_default_value = flag_value is None or flag_value == []  # an empty list is always the default
        if flag_name in omitted_flags or is_default_value:
            continue
        if isinstance(flag_value, bool):
            flag_words.append(f"--{flag_name}" if flag_value else f"--no_{flag_name}")
        else:
            flag_value_text = ",".join(map(str, flag_value)) if isinstance(flag_value, list) else flag_value
            flag_words.append(f"--{flag_name}={flag_value_text}")
    return flag_words


def normalisation(script: ModuleType, model: nn.Module) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Return the per-channel mean and standard deviation that the script uses for pixels in [0, 1]."""
    if hasattr(script, "MEAN"):
        return script.MEAN, script.STD
    data_config = data_config_of(model)
    return data_config.mean, data_config.std


def main() -> None:
    """Print a summary of a train script's model and data as JSON, for doctor.py."""
    del sys.argv[0]  # so that error messages show the script's name
    script = load_script(Path(sys.argv[0]))
    recipe = without_training_flags(recipe_of(script, sys.argv[1:]))
    with torch.device("meta"):
        has_model = hasattr(script, "build_model")
        model = script.build_model(recipe, ASSUMED_CLASS_COUNT) if has_model else nn.Identity()
    script_summary = {
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "data": recipe.data,
        "images": count_training_images(recipe.data),
        "batch_size": recipe.batch_size,
    }
    print(json.dumps(script_summary))


def count_training_images(data_name: str) -> int | None:
    """Return the number of training images, or None if counting them would take long.

    The count comes from the footers of Parquet tables, from the files in a train/ folder, or from
    TRAINING_IMAGE_COUNTS.

    Args:
        data_name: Folder, or name of a data set.
    """
    data_folder = Path(data_name)
    if table_files := sorted(data_folder.rglob("train-*.parquet")):
        import pyarrow.parquet

        return sum(pyarrow.parquet.ParquetFile(table_file).metadata.num_rows for table_file in table_files)
    train_files = filter(Path.is_file, (data_folder / "train").rglob("*"))
    image_count = sum(train_file.suffix not in TABLE_SUFFIXES for train_file in train_files)
    # Without image files, the name may refer to a known data set
    return image_count or TRAINING_IMAGE_COUNTS.get(data_name)


if __name__ == "__main__":
    main()
