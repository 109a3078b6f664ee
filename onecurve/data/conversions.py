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
MIN_KEPT_FRACTION = 1 / 4  # fraction of range, contrast or area that must remain; 1/4 loses two of eight bits
MIN_AFFECTED_SHARE = 1 / 10  # share of affected images that causes a warning; fewer hardly affect accuracy
OUTLIER_PERCENT = 0.1  # pixel values ignored at each end of the value range, for example hot pixels
VISIBLE_STD = 16  # standard deviation of 8-bit colours below which an area counts as a flat background
MAX_LEVEL = 255  # largest 8-bit pixel value

Property = TypeVar("Property")  # one property of an image


class HiddenDetail(NamedTuple):
    """Detail of an image that disappears on a white background."""

    transparent_share: float  # share of transparent pixels
    min_colour: int  # minimum colour value in the hidden area, 0 to 255
    max_colour: int  # maximum colour value in the hidden area, 0 to 255


class PaletteCounts(NamedTuple):
    """Size of a palette in which several indices share a colour."""

    index_count: int  # palette indices that occur in the image
    colour_count: int  # distinct colours of these indices


class ImageStats(NamedTuple):
    """Properties of one image that show the effects of its conversion to 8-bit RGB.

    Attributes:
        shape: Shape [H, W, 3] of the decoded image.
        level_range: Minimum and maximum decoded pixel values (0 to 255), excluding outliers.
        range_16_bit: Minimum and maximum pixel values in a 16-bit file, excluding outliers, or None for any
            other file.
        hidden_detail: Detail in transparent areas if the white background hides it, otherwise None.
        repeated_palette: Size of the palette if several indices share a colour, otherwise None.
    """

    shape: tuple[int, ...]
    level_range: tuple[int, int]
    range_16_bit: tuple[int, int] | None = None
    hidden_detail: HiddenDetail | None = None
    repeated_palette: PaletteCounts | None = None

    @property
    def is_long(self) -> bool:
        """True if a central square shows less than MIN_KEPT_FRACTION of the image."""
        short_side, long_side = sorted(self.shape[:2])
        return short_side < MIN_KEPT_FRACTION * long_side


def sample_images(splits: Iterable[EncodedImages]) -> list[list[ImageStats]]:
    """Decode SAMPLED_IMAGES evenly spaced images of each split, and skip images that can't be decoded."""
    stats_by_split = []
    for split_images in splits:
        split_stats: list[ImageStats] = []
        # In a small split, linspace() repeats indices
        for index in np.unique(np.linspace(0, len(split_images) - 1, SAMPLED_IMAGES).astype(int)):
            with suppress(ValueError):
                split_stats.append(image_stats(split_images.content(index), split_images.decode(index)))
        stats_by_split.append(split_stats)
    return stats_by_split


def image_stats(encoded_image: bytes, pixels: np.ndarray) -> ImageStats:
    """Return the properties of an image that show what its conversion to 8-bit RGB has lost.

    Args:
        encoded_image: Bytes of the encoded image.
        pixels: Result of `decode_image(encoded_image)`, uint8 [H, W, 3].
    """
    if encoded_image[:2] == JPEG_PREFIX:
        return ImageStats(pixels.shape, _value_range(pixels))
    pil_image = open_image(encoded_image)
    range_16_bit, hidden_detail, repeated_palette = None, None, None
    if is_16_bit(pil_image):
        range_16_bit = _value_range(np.asarray(pil_image))
    elif pil_image.mode == "P":
        repeated_palette = _count_repeated_colours(pil_image)
    if pil_image.has_transparency_data and range_16_bit is None:
        hidden_detail = _find_hidden_detail(np.asarray(pil_image.convert("RGBA")), pixels)
    return ImageStats(pixels.shape, _value_range(pixels), range_16_bit, hidden_detail, repeated_palette)


def conversion_warnings(sampled_stats: Sequence[ImageStats], is_cropped: bool) -> list[str]:
    """Return a warning for each lossy conversion that affects at least MIN_AFFECTED_SHARE of the images.

    Args:
        sampled_stats: Properties of the sampled images.
        is_cropped: Whether evaluations crop the images.
    """
    if not sampled_stats:
        return []
    warning_messages: list[str] = []
    sample_phrase = plural(len(sampled_stats), "sampled image")
    # Images with hidden detail or repeated palette colours cause separate warnings
    opaque_stats = [stats for stats in sampled_stats if not (stats.hidden_detail or stats.repeated_palette)]
    low_level, high_level = _common_range([stats.level_range for stats in opaque_stats] or [(0, MAX_LEVEL)])
    if high_level - low_level < MIN_KEPT_FRACTION * MAX_LEVEL:
        file_range_note = ""
        if ranges_16_bit := [stats.range_16_bit for stats in opaque_stats if stats.range_16_bit]:
            min_16_bit, max_16_bit = _common_range(ranges_16_bit)
            file_range_note = f". The files contain 16-bit values from {min_16_bit:,} to {max_16_bit:,}"
        warning_messages.append(
            f"the pixels of {sample_phrase} use only levels {low_level} to {high_level} of 255"
            f" after conversion to 8 bits{file_range_note}."
            " Rescale the pixel values to the full range before training"
        )
    if hidden_details := _drop_rare([stats.hidden_detail for stats in sampled_stats]):
        transparent_share, min_colour, max_colour = max(hidden_details)
        warning_messages.append(
            f"{len(hidden_details):,} of {sample_phrase} contain details in transparent areas,"
            f" which are converted to white (up to {transparent_share:.0%} of the pixels,"
            f" with colours from {min_colour} to {max_colour})."
            " Save these images without transparency, in the colours that the model should see"
        )
    if repeated_palettes := _drop_rare([stats.repeated_palette for stats in sampled_stats]):
        most_repeated = max(repeated_palettes, key=lambda palette: palette.index_count / palette.colour_count)
        warning_messages.append(
            f"{len(repeated_palettes):,} of {sample_phrase} have a palette in which several indices share"
            f" a colour, for example {most_repeated.index_count} indices with"
            f" {plural(most_repeated.colour_count, 'colour')}."
            " If the indices carry information, as in label maps, save them as grey values"
        )
    long_shapes = _drop_rare([stats.shape if stats.is_long else None for stats in sampled_stats])
    if is_cropped and long_shapes:
        height, width, _ = max(long_shapes, key=lambda shape: max(shape) / min(shape[:2]))
        warning_messages.append(
            f"{len(long_shapes):,} of {sample_phrase} are longer than 4 times their shorter side,"
            f" for example {width:,} x {height:,} pixels."
            " A central crop shows less than a quarter of each of these images. Pad or split these images"
        )
    return warning_messages


def _drop_rare(image_properties: Sequence[Property | None]) -> list[Property]:
    """Return the properties that are not None, or [] if their share is below MIN_AFFECTED_SHARE."""
    properties = [image_property for image_property in image_properties if image_property is not None]
    return properties if len(properties) >= MIN_AFFECTED_SHARE * len(image_properties) else []


def _common_range(image_ranges: Sequence[tuple[int, int]]) -> tuple[int, int]:
    """Return the lowest minimum and highest maximum of all images, ignoring MIN_AFFECTED_SHARE at each end.

    Args:
        image_ranges: Minimum and maximum pixel value of each image.
    """
    image_minima, image_maxima = zip(*image_ranges, strict=True)
    low_value = np.quantile(image_minima, MIN_AFFECTED_SHARE, method="lower")
    high_value = np.quantile(image_maxima, 1 - MIN_AFFECTED_SHARE, method="higher")
    return int(low_value), int(high_value)


def _value_range(pixel_values: np.ndarray) -> tuple[int, int]:
    """Return the minimum and maximum of about SAMPLED_VALUES pixel values, excluding outliers."""
    sampled_values = pixel_values.reshape(-1)[:: max(1, pixel_values.size // SAMPLED_VALUES)]
    range_percentiles = (OUTLIER_PERCENT, 100 - OUTLIER_PERCENT)
    low_value, high_value = np.percentile(sampled_values, range_percentiles, method="nearest")
    return int(low_value), int(high_value)


def _find_hidden_detail(rgba_pixels: np.ndarray, decoded_pixels: np.ndarray) -> HiddenDetail | None:
    """Return the share of transparent pixels and their colour range, or None if no detail is hidden.

    A white background hides detail if fully transparent pixels have visible colours. It also hides detail if
    the colour or alpha contrast disappears, for example in a white drawing with an alpha channel.
    """
    colours, alpha = rgba_pixels[..., :3], rgba_pixels[..., 3]
    is_transparent = alpha < 255
    if not is_transparent.any():
        return None
    erased_colours = colours[alpha == 0]
    # Colours in less than 1% of the image, or with little contrast, are not considered a detail.
    has_erased_detail = len(erased_colours) >= alpha.size / 100 and erased_colours.std() >= VISIBLE_STD
    if has_erased_detail or decoded_pixels.std() < MIN_KEPT_FRACTION * max(colours.std(), alpha.std()):
        min_colour, max_colour = _value_range(erased_colours if has_erased_detail else colours)
        return HiddenDetail(float(is_transparent.mean()), min_colour, max_colour)
    return None


def _count_repeated_colours(palette_image) -> PaletteCounts | None:
    """Count the palette indices that occur in an image, and the distinct colours of these indices.

    The result is None if there are more than half as many colours as indices.
    """
    used_indices = np.unique(np.asarray(palette_image))
    palette = np.asarray(palette_image.getpalette() or [0, 0, 0], np.uint8).reshape(-1, 3)
    used_colours = np.unique(palette[used_indices[used_indices < len(palette)]], axis=0)
    if len(used_colours) > len(used_indices) / 2:
        return None
    return PaletteCounts(len(used_indices), len(used_colours))
