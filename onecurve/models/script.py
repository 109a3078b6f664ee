"""Loads a train script as a module to read its recipe and build its model, without training.

`python -m onecurve.models.script train_vit.py [FLAGS]` prints JSON for doctor.py: the number of parameters,
the number of images, the data and the batch size. The command neither trains nor downloads.
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

from onecurve.flags.fields import LEFT, flags_where
from onecurve.flags.recipe import Recipe, parse, recipe_part, untrained
from onecurve.models.timm_models import data_config_of
from onecurve.system.paths import ROOT

IMAGES = {"digits": 1437, "cifar10": 50_000}  # numbers of training images
TABLES = (".arrow", ".csv", ".json", ".jsonl", ".parquet")  # files that contain or list images
# Names that an exported model.py imports at its beginning, for use in the Model section
MODEL_NAMES = ("json", "math", "Path", "SimpleNamespace", "torch", "F", "Tensor", "nn")
MOVE = (
    "Move its import or definition into that section. The exported model.py can use torch, but not our code"
)
CLASSES = 10  # the number of classes changes the size of a model only slightly


def own_script(name: str | None) -> Path:
    """Return the path of the train script that a checkpoint's manifest names.

    The script must belong to the project. A checkpoint can't name a path, because loading a script runs its
    code.

    Raises:
        ValueError: If the project has no train script of this name.
    """
    scripts = {path.stem: path for path in sorted(ROOT.glob("train_*.py"))}
    if name not in scripts:
        raise ValueError(
            f"it was trained by {name!r}, which is none of {', '.join(scripts)}. If you trust this script,"
            " pass its file as --script."
        )
    return scripts[name]


def load_script(path: Path) -> ModuleType:
    """Import a train script without running its main()."""
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    script = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = script
    spec.loader.exec_module(script)
    return script


def model_section(text: str) -> str | None:
    """Return the code of the section `# --- Model` in a script. export.py creates model.py from this code."""
    section = re.search(r"^# --- Model\b[^\n]*\n(.*?)^# --- ", text, re.MULTILINE | re.DOTALL)
    return section[1].strip() if section else None


def names_from_above(section: str) -> list[str]:
    """Return the names that a Model section uses, but that neither it nor model.py's imports define.

    The section is compiled but not run. Annotations are ignored, because model.py does not evaluate them.
    """
    used, defined = set[str](), {*dir(builtins), *MODEL_NAMES}
    codes: list[Any] = [compile(f"from __future__ import annotations\n{section}", "model.py", "exec")]
    while codes:
        code = codes.pop()
        codes += [constant for constant in code.co_consts if isinstance(constant, types.CodeType)]
        for instruction in dis.get_instructions(code):
            if instruction.opname in ("LOAD_GLOBAL", "LOAD_NAME"):
                used.add(instruction.argval)
            elif instruction.opname in ("STORE_GLOBAL", "STORE_NAME"):
                defined.add(instruction.argval)
    # Names with two leading underscores are defined in every module
    return sorted(name for name in used - defined if not name.startswith("__"))


def recipe_class(script: ModuleType) -> type[Recipe]:
    """Return the recipe class that the script declares. Raise ValueError if the script declares none."""
    declared = (v for v in vars(script).values() if getattr(v, "__module__", None) == script.__name__)
    recipes = [value for value in declared if isinstance(value, type) and issubclass(value, Recipe)]
    if not recipes:
        raise ValueError(f"{script.__file__} declares no recipe, so it is not a train script")
    return recipes[0]


def recipe_of(script: ModuleType, words: list[str]) -> Any:
    """Return the script's recipe for these flags. Values that depend on the model are resolved."""
    return parse(recipe_class(script), words).resolved()


def as_flags(recipe: dict[str, Any], cls: type[Recipe]) -> list[str]:
    """Convert a manifest's recipe to flags of the script, which are then checked like a user's flags.

    Flags that affect only training are omitted. Flags that the project has removed are also omitted, because
    none of them changed a weight's name or shape.

    Raises:
        ValueError: If the recipe contains an unknown key.
    """
    recipe = {name: value for name, value in recipe.items() if name not in LEFT}
    if unknown := recipe.keys() - recipe_part(cls()).keys():
        raise ValueError(f"its recipe has {unknown.pop()!r}, which is unknown to this code's {cls.__name__}")
    words, omitted = [], flags_where(cls, "training_only")
    for name, value in recipe.items():
        if name in omitted or value is None or value == []:  # an empty list is the default
            continue
        if isinstance(value, bool):
            words.append(f"--{name}" if value else f"--no_{name}")
        else:
            text = ",".join(map(str, value)) if isinstance(value, list) else value
            words.append(f"--{name}={text}")
    return words


def normalisation(script: ModuleType, model: nn.Module) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Return the per-channel mean and standard deviation that the script uses for pixels in [0, 1]."""
    if hasattr(script, "MEAN"):
        return script.MEAN, script.STD
    return data_config_of(model)[:2]


def main() -> None:
    del sys.argv[0]  # makes error messages name the script
    script = load_script(Path(sys.argv[0]))
    recipe = untrained(recipe_of(script, sys.argv[1:]))
    with torch.device("meta"):
        model = script.build_model(recipe, CLASSES) if hasattr(script, "build_model") else nn.Identity()
    size = {
        "parameters": sum(p.numel() for p in model.parameters()),
        "data": recipe.data,
        "images": training_images(recipe.data),
        "batch_size": recipe.batch_size,
    }
    print(json.dumps(size))


def training_images(data: str) -> int | None:
    """Return the number of training images, or None if it can't be determined quickly."""
    folder = Path(data)
    if tables := sorted(folder.rglob("train-*.parquet")):
        import pyarrow.parquet

        return sum(pyarrow.parquet.ParquetFile(table).metadata.num_rows for table in tables)
    files = (file for file in (folder / "train").rglob("*") if file.suffix not in TABLES and file.is_file())
    return sum(1 for _ in files) or IMAGES.get(data)


if __name__ == "__main__":
    main()
