"""How large a script's model is, for doctor.py: `python -m common.model_size train_vit.py [its flags]`.

Prints JSON: parameters, the data and the batch. Nothing is trained or downloaded.
"""

import json
import sys
from pathlib import Path

import torch
from torch import nn

from common.recipe import parse
from common.script import load_script, recipe_class

IMAGES = {"digits": 1437, "cifar10": 50_000}  # to train on
CLASSES = 10  # a head for more makes little difference


def main() -> None:
    script = load_script(Path(sys.argv[1]))
    recipe = parse(recipe_class(script), sys.argv[2:])
    with torch.device("meta"):
        model = script.build_model(recipe, CLASSES) if hasattr(script, "build_model") else nn.Identity()
    found = {
        "parameters": sum(p.numel() for p in model.parameters()),
        "data": recipe.data,
        "images": _images(recipe.data),
        "batch_size": recipe.batch_size,
    }
    print(json.dumps(found))


def _images(data: str) -> int | None:
    """How many there are to train on, where that is seen at once."""
    folder = Path(data)
    if tables := sorted(folder.rglob("train-*.parquet")):
        import pyarrow.parquet

        return sum(pyarrow.parquet.ParquetFile(table).metadata.num_rows for table in tables)
    if (folder / "train").is_dir():
        return sum(1 for file in (folder / "train").rglob("*") if file.is_file())
    return IMAGES.get(data)


if __name__ == "__main__":
    main()
