"""Tests of warnings about image conversions that can erase the signal."""

import numpy as np
import pytest
from PIL import Image

from onecurve.data.conversions import SAMPLED_IMAGES, conversion_warnings, image_stats
from onecurve.data.decode import decode_image
from tests.support.data_sets import class_folders, encode, opened, picture, png, write
from tests.support.imagenet import prep


def noise(high: int, dtype: type = np.uint8, *shape: int) -> np.ndarray:
    """Return random pixel values from 0 to `high`, with shape [32, 32] or the specified shape."""
    return np.random.RandomState(0).randint(0, high + 1, shape or (32, 32)).astype(dtype)


def with_alpha(colours: np.ndarray, alpha: np.ndarray) -> Image.Image:
    return Image.fromarray(np.dstack([np.broadcast_to(colours, (32, 32, 3)), alpha]).astype(np.uint8))


def hot(values: np.ndarray) -> np.ndarray:
    values[0, 0] = 65_535
    return values


def labels(colours: list[int]) -> Image.Image:
    """Return a label map stored as a palette image."""
    image = Image.fromarray(noise(20), "P")
    image.putpalette(colours)
    return image


COLOURS = noise(255, np.uint8, 32, 32, 3)
SPRITE = np.zeros((32, 32), np.uint8)
SPRITE[8:24, 8:24] = 255
TWELVE = "levels 0 to 15 of 255 after conversion to 8 bits. The files contain 16-bit values from "


@pytest.mark.parametrize(
    ("image", "format", "warning"),
    [
        (Image.fromarray(noise(4095, np.uint16)), "PNG", TWELVE),
        (Image.fromarray(noise(4095, np.uint16)), "TIFF", TWELVE),
        (Image.fromarray(hot(noise(4095, np.uint16, 200, 200))), "PNG", TWELVE),
        (Image.fromarray(noise(65_535, np.uint16)), "PNG", ""),
        (Image.fromarray(noise(16)), "PNG", "levels 0 to 16 of 255"),
        (Image.fromarray(noise(63)), "PNG", "levels 0 to 63 of 255"),
        (Image.fromarray(noise(66)), "PNG", ""),
        (
            with_alpha(COLOURS, np.zeros((32, 32))),
            "PNG",
            "up to 100% of the pixels, with colours from 0 to",
        ),
        (with_alpha(COLOURS, 255 - SPRITE), "PNG", "up to 25% of the pixels, with colours from 0 to 255"),
        (with_alpha(np.full(3, 255), SPRITE), "PNG", "up to 75% of the pixels, with colours from 255 to 255"),
        (with_alpha(np.zeros(3), SPRITE), "PNG", ""),
        (with_alpha(COLOURS * (SPRITE > 0)[..., None], SPRITE), "PNG", ""),
        (picture().convert("RGBA"), "PNG", ""),
        (labels([7, 7, 7] * 256), "PNG", "21 indices with 1 colour"),
        (labels(noise(255, np.uint8, 768).tolist()), "PNG", ""),
        (picture(), "GIF", ""),
        (picture(0, 290, 72), "JPEG", "for example 290 x 72 pixels"),
        (picture(0, 70, 300), "PNG", "for example 70 x 300 pixels"),
        (picture(0, 288, 72), "JPEG", ""),
    ],
)
def test_a_conversion_that_can_erase_the_signal(image, format, warning):
    """Check that a conversion causes one warning if it affects at least a tenth of the images."""
    samples = [image_stats(data, decode_image(data)) for data in (encode(image, format), png(1))]
    lines = conversion_warnings(samples[:1], is_cropped=True)
    assert len(lines) == bool(warning), lines
    assert not warning or warning in lines[0]
    few = [*samples[:1], *samples[1:] * 9]
    if warning and "levels" not in warning:
        assert "1 of 10 sampled images" in conversion_warnings(few, is_cropped=True)[0]
    assert conversion_warnings([*few, samples[1]], is_cropped=True) == []
    assert "pixels" in warning or conversion_warnings(samples[:1], is_cropped=False) == lines


@pytest.mark.parametrize("form", ["one size", "several sizes", "shards"])
def test_conversion_warnings_appear_at_the_start(form, tmp_path, capfd):
    """Check that only a sample of images is examined, and that images of a single size are not cropped."""
    dark = encode(Image.fromarray(noise(4095, np.uint16, 20, 100)), "PNG")
    root = class_folders(tmp_path / "data", train=[dark] * 100, val=[dark] * 4)
    if form == "several sizes":
        write(root, {"train/a/other.png": png(0, 100, 24)})
    elif form == "shards":
        prep("--from", "folder", "--data", root, "--out", tmp_path / "out")
        root = tmp_path / "out"
    lines = [line for line in opened(root, tmp_path / "cache").flaws if "sampled" in line]
    assert f"the pixels of {SAMPLED_IMAGES + 4} sampled images use only levels 0 to 15" in lines[0]
    assert len(lines) == (1 if form == "one size" else 2)
