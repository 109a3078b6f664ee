"""Describes how images are preprocessed with interpolation, crop, mean and standard deviation."""

import math
from typing import Any, NamedTuple

INTERPOLATIONS = ("bilinear", "bicubic")
LEGACY = "legacy"  # bilinear in crops, bicubic on the device, as in versions without per-model interpolation
CROP_MODES = ("center", "squash", "border")


class Crop(NamedTuple):
    """Resizing and cropping of images, with timm's parameters.

    crop_mode: `center` scales the shorter side to size / crop_pct and crops the center. `squash` scales both
        sides to size / crop_pct. `border` scales the longer side to size / crop_pct and pads the shorter side
        with `fill`.
    """

    interpolation: str = LEGACY
    crop_pct: float = 0.875
    crop_mode: str = "center"
    fill: tuple[int, ...] = (0, 0, 0)

    @property
    def filter(self) -> str:
        """Interpolation used for crops."""
        return "bilinear" if self.interpolation == LEGACY else self.interpolation

    @property
    def enlargement(self) -> str | None:
        """Interpolation that to_float() uses for whole images on the device."""
        return None if self.interpolation == LEGACY else self.interpolation

    def scaled(self, size: int) -> int:
        """Return the length to which an image side is scaled before cropping, rounded down as in timm."""
        length = size / self.crop_pct
        return round(length) if self.interpolation == LEGACY else math.floor(length)


IMAGENET_CROP = Crop()
CROP_FLAGS = ("interpolation", "crop_pct", "crop_mode")
IMAGENET_FLAGS = {name: getattr(IMAGENET_CROP, name) for name in CROP_FLAGS}


class DataConfig(NamedTuple):
    """Preprocessing required for a model's inputs."""

    mean: tuple[float, ...]  # per-channel mean for pixels in [0, 1], used for normalisation
    std: tuple[float, ...]
    crop: Crop = IMAGENET_CROP

    def to_json(self) -> dict[str, Any]:
        """Return the record that recipe.json and checkpoint manifests store."""
        crop = {name: getattr(self.crop, name) for name in CROP_FLAGS}
        return crop | {"mean": list(self.mean), "std": list(self.std)}

    def __str__(self) -> str:
        return f"{self.crop.interpolation} interpolation, crop {self.crop.crop_pct:g} {self.crop.crop_mode}"


def data_config(record: dict[str, Any], recipe: Any = None) -> DataConfig:
    """Return the configuration in a record, modified by a recipe's flags.

    Args:
        record: Result of DataConfig.to_json(), or timm's data configuration.
        recipe: Recipe whose flags take precedence over the record, or None.

    Raises:
        ValueError: If the interpolation or crop mode is unknown.
    """
    recipe_values = vars(recipe) if recipe else {}
    given_flags = {name: recipe_values[name] for name in CROP_FLAGS if recipe_values.get(name) is not None}
    model_values = IMAGENET_FLAGS if given_flags.get("interpolation") == LEGACY else IMAGENET_FLAGS | record
    interpolation, crop_pct, crop_mode = ((model_values | given_flags)[name] for name in CROP_FLAGS)
    if interpolation not in (*INTERPOLATIONS, LEGACY) or crop_mode not in CROP_MODES:
        raise ValueError(
            f"the model uses {interpolation} interpolation and crop mode {crop_mode}, and at least one of"
            " them is not supported. Use --interpolation bicubic and --crop_mode center."
        )
    mean, std = (tuple(map(float, record[name])) for name in ("mean", "std"))
    fill = tuple(round(255 * value) for value in mean)
    return DataConfig(mean, std, Crop(interpolation, float(crop_pct), crop_mode, fill))
