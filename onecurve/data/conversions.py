"""Warnings about image conversions and crops that may hide class differences, based on sampled images."""

from collections.abc import Iterable, Sequence
from contextlib import suppress
from typing import NamedTuple, TypeVar

import numpy as np

from onecurve.data.decode import JPEG_PREFIX, is_16_bit, open_image
from onecurve.data.encoded import EncodedImages
from onecurve.system.text import plural

SAMPLED_IMAGES = 64  # number of sampled images per split; decoding takes a fraction of a second
SAMPLED_VALUES = 10_000  # number of pixel values per image used to estimate the value range
MIN_KEPT = 1 / 4  # minimum fraction of range, contrast or area that must remain; 1/4 loses two of eight bits
NAMED_SHARE = 1 / 10  # minimum share of affected images for a warning; fewer images hardly affect accuracy
# Percentage of pixel values ignored at each end of the value range, because of outliers such as hot pixels
OUTLIERS_PCT = 0.1
VISIBLE_STD = 16  # standard deviation of 8-bit colours below which an area counts as a flat background

Value = TypeVar("Value")


class ImageStats(NamedTuple):
    """Properties of one image that show the effects of its conversion to 8-bit RGB.

    Attributes:
        shape: Shape [H, W, 3] of the decoded image.
        levels: Minimum and maximum decoded pixel values (0 to 255), excluding outliers.
        values_16_bit: Minimum and maximum pixel values in a 16-bit file, excluding outliers, or None for any
            other file.
        hidden: Share of transparent pixels and their minimum and maximum colour values if the white
            background hides them, otherwise None.
        palette: Number of palette indices and number of distinct colours if several indices share a colour,
            otherwise None.
    """

    shape: tuple[int, ...]
    levels: tuple[int, int]
    values_16_bit: tuple[int, int] | None
    hidden: tuple[float, int, int] | None
    palette: tuple[int, int] | None

    @property
    def is_long(self) -> bool:
        return min(self.shape[:2]) < MIN_KEPT * max(self.shape[:2])


def sample_images(splits: Iterable[EncodedImages]) -> list[list[ImageStats]]:
    """Decode SAMPLED_IMAGES evenly spaced images of each split, and skip images that can't be decoded."""
    stats = []
    for images in splits:
        stats.append(split_stats := list[ImageStats]())
        for index in np.unique(np.linspace(0, len(images) - 1, SAMPLED_IMAGES).astype(int)):
            with suppress(ValueError):
                split_stats.append(image_stats(images.content(index), images.decode(index)))
    return stats


def image_stats(content: bytes, pixels: np.ndarray) -> ImageStats:
    """Compare an encoded image with its decoded pixels.

    Args:
        content: Bytes of the encoded image.
        pixels: Result of `decode_image(data)`, uint8 [H, W, 3].
    """
    if content[:2] == JPEG_PREFIX:
        return ImageStats(pixels.shape, _value_range(pixels), None, None, None)
    image = open_image(content)
    values_16_bit, hidden, palettes = None, None, None
    if is_16_bit(image):
        values_16_bit = _value_range(np.asarray(image))
    elif image.mode == "P":
        palettes = _repeated_colours(image)
    if image.has_transparency_data and values_16_bit is None:
        hidden = _hidden_detail(np.asarray(image.convert("RGBA")), pixels)
    return ImageStats(pixels.shape, _value_range(pixels), values_16_bit, hidden, palettes)


def conversion_warnings(stats: Sequence[ImageStats], is_cropped: bool) -> list[str]:
    """Return a warning for each type of lossy conversion that affects at least NAMED_SHARE of the images.

    Args:
        stats: Properties of the sampled images.
        is_cropped: Whether evaluations crop the images.
    """
    if not stats:
        return []
    messages, sampled = [], plural(len(stats), "sampled image")
    opaque = [look for look in stats if not (look.hidden or look.palette)]
    low, high = _common_range([look.levels for look in opaque] or [(0, 255)])
    if high - low < MIN_KEPT * 255:
        file_range, values = "", [look.values_16_bit for look in opaque if look.values_16_bit]
        if values:
            low_16, high_16 = _common_range(values)
            file_range = f". The files contain 16-bit values from {low_16:,} to {high_16:,}"
        messages.append(
            f"the pixels of {sampled} use only levels {low} to {high} of 255 after conversion to 8"
            f" bits{file_range}. Rescale the pixel values to the full range before training"
        )
    if hidden := _affected_values([look.hidden for look in stats]):
        share, low, high = max(hidden)
        messages.append(
            f"{len(hidden):,} of {sampled} contain details in transparent areas, which are converted to white"
            f" (up to {share:.0%} of the pixels, with colours from {low} to {high}). Save these images"
            " without transparency, in the colours that the model should see"
        )
    if palettes := _affected_values([look.palette for look in stats]):
        indices, colours = max(palettes, key=lambda counts: counts[0] / counts[1])
        messages.append(
            f"{len(palettes):,} of {sampled} have a palette in which several indices share a colour, for"
            f" example {indices} indices with {plural(colours, 'colour')}. If the indices carry information,"
            " as in label maps, save them as grey values"
        )
    if is_cropped and (shapes := _affected_values([look.shape if look.is_long else None for look in stats])):
        height, width, _ = max(shapes, key=lambda shape: max(shape) / min(shape[:2]))
        messages.append(
            f"{len(shapes):,} of {sampled} are longer than 4 times their shorter side, for example {width:,}"
            f" x {height:,} pixels. A central crop shows less than a quarter of each of these images. Pad or"
            " split these images"
        )
    return messages


def _affected_values(values: Sequence[Value | None]) -> list[Value]:
    """Return the values that are not None, or [] if their share is below NAMED_SHARE."""
    affected = [value for value in values if value is not None]
    return affected if len(affected) >= NAMED_SHARE * len(values) else []


def _common_range(ranges: Sequence[tuple[int, int]]) -> tuple[int, int]:
    """Return the pixel value range of all images except a fraction of NAMED_SHARE at each end."""
    lows, highs = zip(*ranges, strict=True)
    low = np.quantile(lows, NAMED_SHARE, method="lower")
    return int(low), int(np.quantile(highs, 1 - NAMED_SHARE, method="higher"))


def _value_range(values: np.ndarray) -> tuple[int, int]:
    flat = values.reshape(-1)[:: max(1, values.size // SAMPLED_VALUES)]
    low, high = np.percentile(flat, (OUTLIERS_PCT, 100 - OUTLIERS_PCT), method="nearest")
    return int(low), int(high)


def _hidden_detail(rgba: np.ndarray, pixels: np.ndarray) -> tuple[float, int, int] | None:
    """Return the share of transparent pixels and their colour range, or None if no detail is hidden.

    A white background hides detail if fully transparent pixels have visible colours. It also hides detail if
    the colour or alpha contrast disappears, for example in a white drawing with an alpha channel.
    """
    colours, alpha = rgba[..., :3], rgba[..., 3]
    is_transparent = alpha < 255
    if not is_transparent.any():
        return None
    erased = colours[alpha == 0]
    has_erased = len(erased) >= alpha.size / 100 and erased.std() >= VISIBLE_STD
    if has_erased or pixels.std() < MIN_KEPT * max(colours.std(), alpha.std()):
        return float(is_transparent.mean()), *_value_range(erased if has_erased else colours)
    return None


def _repeated_colours(image) -> tuple[int, int] | None:
    """Return the numbers of used palette indices and distinct colours.

    The result is None if there are more than half as many colours as indices.
    """
    used_indices = np.unique(np.asarray(image))
    palette = np.asarray(image.getpalette() or [0, 0, 0], np.uint8).reshape(-1, 3)
    colours = np.unique(palette[used_indices[used_indices < len(palette)]], axis=0)
    return (len(used_indices), len(colours)) if len(colours) <= len(used_indices) / 2 else None
