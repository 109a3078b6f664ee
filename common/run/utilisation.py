"""The MFU of the model that the running train script builds."""

import copy
import dataclasses
import sys
from functools import partial
from typing import Any

from accelerate import Accelerator

from common.distributed.strategy import precision
from common.recipe import ImageRecipe, Recipe
from common.script import AFRESH
from common.telemetry.flops import Utilisation


def utilisation(
    accelerator: Accelerator, recipe: Recipe, classes: int, devices: list[str]
) -> Utilisation | None:
    """The run's utilisation. None without images or build_model, or if the image size changes in training."""
    build: Any = getattr(sys.modules["__main__"], "build_model", None)
    sizes: Any = getattr(recipe, "train_sizes", None)
    if build is None or sizes or not isinstance(recipe, ImageRecipe):
        return None
    empty = copy.copy(recipe)  # replace() would refuse --freeze without weights
    for name in {field.name for field in dataclasses.fields(recipe)} & (AFRESH.keys() - {"freeze"}):
        object.__setattr__(empty, name, AFRESH[name])
    return Utilisation(partial(build, empty, classes), recipe.image_size, devices, precision(accelerator))
