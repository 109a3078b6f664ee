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

TRAINING_IMAGES = {"digits": 1437, "cifar10": 50_000}  # number of training images in each data set
# Extensions of files that contain tables or lists of images
TABLE_SUFFIXES = (".arrow", ".csv", ".json", ".jsonl", ".parquet")
# Names that an exported model.py imports for use in the Model section
MODEL_NAMES = ("json", "math", "Path", "SimpleNamespace", "torch", "F", "Tensor", "nn")
MOVE_ADVICE = (
    "Move imports and definitions that the model needs into the Model section. The exported model.py can use"
    " torch, but no code from this project"
)
CLASS_COUNT = 10  # arbitrary, because the number of classes changes a model's size only slightly


def own_script(script_name: str | None) -> Path:
    """Return the path of the train script named in a checkpoint's manifest.

    The script must belong to this project. A manifest can't specify a path, because loading a script runs its
    code.

    Raises:
        ValueError: If the project contains no train script with this name.
    """
    scripts = {path.stem: path for path in sorted(ROOT.glob("train_*.py"))}
    if script_name not in scripts:
        raise ValueError(
            f"the model was trained by {script_name!r}, which is not one of this project's scripts"
            f" ({', '.join(scripts)}). If you trust that script, pass its path with --script."
        )
    return scripts[script_name]


def load_script(path: Path) -> ModuleType:
    """Import a train script as a module without running its main()."""
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    script = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = script
    spec.loader.exec_module(script)
    return script


def model_section(text: str) -> str | None:
    """Return the code in a script's `# --- Model` section, from which export.py creates model.py."""
    section = re.search(r"^# --- Model\b[^\n]*\n(.*?)^# --- ", text, re.MULTILINE | re.DOTALL)
    return section[1].strip() if section else None


def names_from_above(section: str) -> list[str]:
    """Return the names used in a Model section but defined neither there nor in model.py.

    The section is compiled but not run. Annotations are ignored, because model.py does not evaluate them.
    """
    used_names, defined_names = set[str](), {*dir(builtins), *MODEL_NAMES}
    code_objects: list[Any] = [compile(f"from __future__ import annotations\n{section}", "model.py", "exec")]
    while code_objects:
        code_object = code_objects.pop()
        code_objects += [value for value in code_object.co_consts if isinstance(value, types.CodeType)]
        for instruction in dis.get_instructions(code_object):
            if instruction.opname in ("LOAD_GLOBAL", "LOAD_NAME"):
                used_names.add(instruction.argval)
            elif instruction.opname in ("STORE_GLOBAL", "STORE_NAME"):
                defined_names.add(instruction.argval)
    # Every module defines names with two leading underscores
    return sorted(name for name in used_names - defined_names if not name.startswith("__"))


def recipe_class(script: ModuleType) -> type[Recipe]:
    """Return the recipe class that the script declares, or raise ValueError if there is none."""
    declared_objects = (
        value for value in vars(script).values() if getattr(value, "__module__", None) == script.__name__
    )
    recipes = [value for value in declared_objects if isinstance(value, type) and issubclass(value, Recipe)]
    if not recipes:
        raise ValueError(f"{script.__file__} declares no recipe, so it is not a train script")
    return recipes[0]


def recipe_of(script: ModuleType, words: list[str]) -> Any:
    """Return the script's recipe for these flags, with model-dependent values resolved."""
    return parse(recipe_class(script), words).resolved()


def as_flags(recipe: dict[str, Any], cls: type[Recipe]) -> list[str]:
    """Convert a manifest's recipe to script flags, which are then checked like a user's flags.

    Flags that affect only training are omitted. Flags that this project has removed are also omitted, because
    no removed flag changed a weight's name or shape.

    Raises:
        ValueError: If the recipe contains an unknown key.
    """
    recipe = {name: value for name, value in recipe.items() if name not in REMOVED_FLAGS}
    if unknown := recipe.keys() - recipe_part(cls()).keys():
        raise ValueError(f"the recipe contains {unknown.pop()!r}, which {cls.__name__} does not define")
    flags, omitted = [], flags_where(cls, "training_only")
    for name, value in recipe.items():
        if name in omitted or value is None or value == []:  # an empty list is always the default
            continue
        if isinstance(value, bool):
            flags.append(f"--{name}" if value else f"--no_{name}")
        else:
            value_text = ",".join(map(str, value)) if isinstance(value, list) else value
            flags.append(f"--{name}={value_text}")
    return flags


def normalisation(script: ModuleType, model: nn.Module) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Return the per-channel mean and standard deviation that the script uses for pixels in [0, 1]."""
    if hasattr(script, "MEAN"):
        return script.MEAN, script.STD
    return data_config_of(model)[:2]


def main() -> None:
    del sys.argv[0]  # so that error messages show the script's name
    script = load_script(Path(sys.argv[0]))
    recipe = without_training_flags(recipe_of(script, sys.argv[1:]))
    with torch.device("meta"):
        model = script.build_model(recipe, CLASS_COUNT) if hasattr(script, "build_model") else nn.Identity()
    summary = {
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "data": recipe.data,
        "images": training_images(recipe.data),
        "batch_size": recipe.batch_size,
    }
    print(json.dumps(summary))


def training_images(data: str) -> int | None:
    """Return the number of training images, or None if counting them would take long."""
    folder = Path(data)
    if tables := sorted(folder.rglob("train-*.parquet")):
        import pyarrow.parquet

        return sum(pyarrow.parquet.ParquetFile(table).metadata.num_rows for table in tables)
    files = filter(Path.is_file, (folder / "train").rglob("*"))
    return sum(file.suffix not in TABLE_SUFFIXES for file in files) or TRAINING_IMAGES.get(data)


if __name__ == "__main__":
    main()
