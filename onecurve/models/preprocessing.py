"""How images become a model's inputs: interpolation, crop, mean and deviation, in timm's terms."""

import math
from typing import Any, NamedTuple

INTERPOLATIONS = ("bilinear", "bicubic")
LEGACY = "legacy"  # bilinear in crops, bicubic on the device: every script before models chose
CROP_MODES = ("center", "squash", "border")


class Crop(NamedTuple):
    """How images are resized and cropped, in timm's terms.

    crop_mode: `center` scales the shorter side to size / crop_pct and cuts the middle out, `squash` scales
    both sides to that length, `border` scales the longer side and pads with `fill`.
    """

    interpolation: str = LEGACY
    crop_pct: float = 0.875
    crop_mode: str = "center"
    fill: tuple[int, ...] = (0, 0, 0)

    @property
    def filter(self) -> str:
        """The interpolation of crops."""
        return "bilinear" if self.interpolation == LEGACY else self.interpolation

    @property
    def enlargement(self) -> str | None:
        """The interpolation of whole images on the device, for to_float()."""
        return None if self.interpolation == LEGACY else self.interpolation

    def scaled(self, size: int) -> int:
        """The length to which an image's side is scaled before the crop. timm rounds down."""
        length = size / self.crop_pct
        return round(length) if self.interpolation == LEGACY else math.floor(length)


IMAGENET_CROP = Crop()
FLAGS = ("interpolation", "crop_pct", "crop_mode")
IMAGENET = {name: getattr(IMAGENET_CROP, name) for name in FLAGS}


class DataConfig(NamedTuple):
    """How images become a model's inputs. mean, std: of pixels in [0, 1], by which they are normalised."""

    mean: tuple[float, ...]
    std: tuple[float, ...]
    crop: Crop = IMAGENET_CROP

    def to_json(self) -> dict[str, Any]:
        """The record in recipe.json and in manifests."""
        crop = {name: getattr(self.crop, name) for name in FLAGS}
        return crop | {"mean": list(self.mean), "std": list(self.std)}

    def __str__(self) -> str:
        return f"{self.crop.interpolation} interpolation, crop {self.crop.crop_pct:g} {self.crop.crop_mode}"


def data_config(record: dict[str, Any], recipe: Any = None) -> DataConfig:
    """Make the configuration that a record describes, changed by a recipe's flags.

    record: DataConfig.to_json(), or timm's. ValueError for an interpolation or a crop mode that is not known.
    """
    given = vars(recipe) if recipe else {}
    flags = {name: given[name] for name in FLAGS if given.get(name) is not None}
    base = IMAGENET if flags.get("interpolation") == LEGACY else IMAGENET | record
    interpolation, crop_pct, crop_mode = ((base | flags)[name] for name in FLAGS)
    if interpolation not in (*INTERPOLATIONS, LEGACY) or crop_mode not in CROP_MODES:
        raise ValueError(
            f"the model asks for {interpolation} interpolation and crop mode {crop_mode}, which are not"
            " available here: give --interpolation bicubic and --crop_mode center"
        )
    mean, std = (tuple(map(float, record[name])) for name in ("mean", "std"))
    fill = tuple(round(255 * value) for value in mean)
    return DataConfig(mean, std, Crop(interpolation, float(crop_pct), crop_mode, fill))
