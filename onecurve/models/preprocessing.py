"""Describes how images are preprocessed with interpolation, crop, mean and standard deviation."""

import math
from typing import Any, NamedTuple

INTERPOLATIONS = ("bilinear", "bicubic")  # interpolations that models may use
LEGACY = "legacy"  # bilinear in crops, bicubic on the device, as in versions without per-model interpolation
CROP_MODES = ("center", "squash", "border")  # crop modes of timm, described in Crop


class Crop(NamedTuple):
    """Resizing and cropping of images, with timm's parameters.

    The crop mode `center` scales the shorter side to size / crop_pct and crops the center. `squash` scales
    both sides to size / crop_pct. `border` scales the longer side to size / crop_pct and pads the shorter
    side with `fill`.
    """

    interpolation: str = LEGACY
    crop_pct: float = 0.875  # fraction of the scaled side length that the crop keeps
    crop_mode: str = "center"
    fill: tuple[int, ...] = (0, 0, 0)  # padding color, RGB in [0, 255]

    @property
    def filter(self) -> str:
        """Interpolation used for resizing crops on the CPU."""
        return "bilinear" if self.interpolation == LEGACY else self.interpolation

    @property
    def enlargement(self) -> str | None:
        """Interpolation that to_float() uses for whole images on the device. None selects its default."""
        return None if self.interpolation == LEGACY else self.interpolation

    def scaled(self, size: int) -> int:
        """Return the length to which an image side is scaled before cropping, rounded down as in timm."""
        side_length = size / self.crop_pct
        return round(side_length) if self.interpolation == LEGACY else math.floor(side_length)


IMAGENET_CROP = Crop()
CROP_FLAGS = ("interpolation", "crop_pct", "crop_mode")  # flags that change the fields of Crop
IMAGENET_CROP_VALUES = {flag_name: getattr(IMAGENET_CROP, flag_name) for flag_name in CROP_FLAGS}


class DataConfig(NamedTuple):
    """Preprocessing required for a model's inputs."""

    mean: tuple[float, ...]  # per-channel mean for pixels in [0, 1], used for normalisation
    std: tuple[float, ...]  # per-channel standard deviation
    crop: Crop = IMAGENET_CROP

    def to_json(self) -> dict[str, Any]:
        """Return the record that recipe.json and checkpoint manifests store."""
        crop_record = {flag_name: getattr(self.crop, flag_name) for flag_name in CROP_FLAGS}
        return crop_record | {"mean": list(self.mean), "std": list(self.std)}

    def __str__(self) -> str:
        crop = self.crop
        return f"{crop.interpolation} interpolation, crop {crop.crop_pct:g} {crop.crop_mode}"


def data_config(config_record: dict[str, Any], recipe: Any = None) -> DataConfig:
    """Return the configuration in a record, modified by a recipe's flags.

    Args:
        config_record: Result of DataConfig.to_json(), or timm's data configuration.
        recipe: Recipe whose flags take precedence over the record, or None.

    Raises:
        ValueError: If the interpolation or crop mode is unknown.
    """
    recipe_flags = vars(recipe) if recipe else {}
    flag_values = {flag: recipe_flags[flag] for flag in CROP_FLAGS if recipe_flags.get(flag) is not None}
    # With --interpolation legacy, the record's crop is ignored, as in versions without per-model crops
    is_legacy = flag_values.get("interpolation") == LEGACY
    default_crop_values = IMAGENET_CROP_VALUES if is_legacy else IMAGENET_CROP_VALUES | config_record
    crop_values = default_crop_values | flag_values
    interpolation, crop_pct, crop_mode = (crop_values[flag_name] for flag_name in CROP_FLAGS)
    if interpolation not in (*INTERPOLATIONS, LEGACY) or crop_mode not in CROP_MODES:
        raise ValueError(
            f"the model uses {interpolation} interpolation and crop mode {crop_mode},"
            " and at least one of them is not supported."
            " Use --interpolation bicubic and --crop_mode center."
        )
    mean = tuple(map(float, config_record["mean"]))
    std = tuple(map(float, config_record["std"]))
    # Padding with the mean color becomes approximately zero when the pixels are normalised
    fill = tuple(round(255 * channel_mean) for channel_mean in mean)
    return DataConfig(mean, std, Crop(interpolation, float(crop_pct), crop_mode, fill))
