"""Warnings, based on sampled images, about conversions and crops that may hide class differences."""

from collections.abc import Iterable, Sequence
from contextlib import suppress
from typing import NamedTuple, TypeVar

import numpy as np

from onecurve.data.decode import JPEG, is_16_bit, open_image
from onecurve.data.encoded import Encoded
from onecurve.system.text import plural

SAMPLE = 64  # sampled images per split, which take a fraction of a second to decode
VALUES = 10_000  # pixel values per image that are used to estimate the range of the image's values
KEPT = 1 / 4  # warn if a smaller fraction of the range, contrast or area remains; 1/4 loses two of eight bits
NAMED_SHARE = 1 / 10  # share of affected images that causes a warning; fewer hardly affect accuracy
OUTLIERS_PCT = 0.1  # percentage of the values (for example hot pixels) that is ignored at each end
VISIBLE = 16  # standard deviation (of 255 levels) below which colours count as a flat background

Value = TypeVar("Value")


class Look(NamedTuple):
    """Effects of converting one image to 8-bit RGB.

    Attributes:
        shape: Shape of the decoded image, [H, W, 3].
        levels: Range of the decoded pixel values, 0 to 255, without outliers.
        values_16_bit: Range of the pixel values in a 16-bit file, without outliers. None for other files.
        hidden: Share of transparent pixels and range of their colours if the white background hides them, or
            None.
        palette: Number of palette indices and number of distinct colours if several indices share a colour,
            or None.
    """

    shape: tuple[int, ...]
    levels: tuple[int, int]
    values_16_bit: tuple[int, int] | None
    hidden: tuple[float, int, int] | None
    palette: tuple[int, int] | None

    @property
    def is_long(self) -> bool:
        return min(self.shape[:2]) < KEPT * max(self.shape[:2])


def sample(splits: Iterable[Encoded]) -> list[list[Look]]:
    """Decode SAMPLE evenly spaced images of each split. Skip images that can't be decoded."""
    looks = []
    for images in splits:
        looks.append(split_looks := list[Look]())
        for i in np.unique(np.linspace(0, len(images) - 1, SAMPLE).astype(int)):
            with suppress(ValueError):
                split_looks.append(look_at(images.content(i), images.decode(i)))
    return looks


def look_at(data: bytes, pixels: np.ndarray) -> Look:
    """Compare an encoded image with its decoded pixels.

    Args:
        data: Encoded image.
        pixels: Result of `decode_image(data)`, uint8 [H, W, 3].
    """
    if data[:2] == JPEG:
        return Look(pixels.shape, _range(pixels), None, None, None)
    image = open_image(data)
    values, hidden, palette = None, None, None
    if is_16_bit(image):
        values = _range(np.asarray(image))
    elif image.mode == "P":
        palette = _repeated_colours(image)
    if image.has_transparency_data and values is None:
        hidden = _hidden(np.asarray(image.convert("RGBA")), pixels)
    return Look(pixels.shape, _range(pixels), values, hidden, palette)


def conversion_warnings(looks: Sequence[Look], is_cropped: bool) -> list[str]:
    """Return a warning for each type of lossy conversion that affects at least NAMED_SHARE of the images.

    Args:
        looks: Conversion effects of the sampled images.
        is_cropped: Whether the images are cropped for evaluation.
    """
    if not looks:
        return []
    lines, sampled = [], plural(len(looks), "sampled image")
    plain = [look for look in looks if not (look.hidden or look.palette)]
    low, high = _common_range([look.levels for look in plain] or [(0, 255)])
    if high - low < KEPT * 255:
        source, values = "", [look.values_16_bit for look in plain if look.values_16_bit]
        if values:
            low_16, high_16 = _common_range(values)
            source = f". The files have 16 bits, with values from {low_16:,} to {high_16:,}"
        lines.append(
            f"{sampled} use only the levels {low} to {high} of 255 after conversion to 8 bits{source}. Scale"
            " the values to the whole range before training"
        )
    if hidden := _affected([look.hidden for look in looks]):
        share, low, high = max(hidden)
        lines.append(
            f"{len(hidden):,} of {sampled} have details in transparent areas, which become white: up to"
            f" {share:.0%} of the pixels, with colours from {low} to {high}. Save the images without"
            " transparency, as the model should see them"
        )
    if palettes := _affected([look.palette for look in looks]):
        indices, colours = max(palettes, key=lambda pair: pair[0] / pair[1])
        lines.append(
            f"{len(palettes):,} of {sampled} have a palette in which indices share colours, for example"
            f" {indices} indices with {plural(colours, 'colour')}. Save the indices as grey values if they"
            " matter, for example in label maps"
        )
    if is_cropped and (shapes := _affected([look.shape if look.is_long else None for look in looks])):
        height, width, _ = max(shapes, key=lambda shape: max(shape) / min(shape[:2]))
        lines.append(
            f"{len(shapes):,} of {sampled} are longer than 4 times their shorter side, for example {width:,}"
            f" x {height:,} pixels. A central crop shows less than a quarter of them. Pad or split the images"
        )
    return lines


def _affected(values: Sequence[Value | None]) -> list[Value]:
    """Return the values that are not None, or [] if less than NAMED_SHARE of all values are not None."""
    affected = [value for value in values if value is not None]
    return affected if len(affected) >= NAMED_SHARE * len(values) else []


def _common_range(ranges: Sequence[tuple[int, int]]) -> tuple[int, int]:
    """Return the range of pixel values that covers all images except a share of NAMED_SHARE at each end."""
    lows, highs = zip(*ranges, strict=True)
    low = np.quantile(lows, NAMED_SHARE, method="lower")
    return int(low), int(np.quantile(highs, 1 - NAMED_SHARE, method="higher"))


def _range(values: np.ndarray) -> tuple[int, int]:
    flat = values.reshape(-1)[:: max(1, values.size // VALUES)]
    low, high = np.percentile(flat, (OUTLIERS_PCT, 100 - OUTLIERS_PCT), method="nearest")
    return int(low), int(high)


def _hidden(rgba: np.ndarray, pixels: np.ndarray) -> tuple[float, int, int] | None:
    """Return the share of transparent pixels and the range of their colours, or None if no detail is hidden.

    A white background hides detail in two cases: fully transparent pixels have visible colours, or the
    contrast of colours or alpha disappears, for example in white drawings with an alpha channel.
    """
    colours, alpha = rgba[..., :3], rgba[..., 3]
    is_clear = alpha < 255
    if not is_clear.any():
        return None
    erased = colours[alpha == 0]
    has_erased = len(erased) >= alpha.size / 100 and erased.std() >= VISIBLE
    if has_erased or pixels.std() < KEPT * max(colours.std(), alpha.std()):
        return float(is_clear.mean()), *_range(erased if has_erased else colours)
    return None


def _repeated_colours(image) -> tuple[int, int] | None:
    """Return the number of used palette indices and the number of distinct colours.

    Return None if there are more than half as many colours as indices.
    """
    indices = np.unique(np.asarray(image))
    palette = np.asarray(image.getpalette() or [0, 0, 0], np.uint8).reshape(-1, 3)
    colours = np.unique(palette[indices[indices < len(palette)]], axis=0)
    return (len(indices), len(colours)) if len(colours) <= len(indices) / 2 else None
