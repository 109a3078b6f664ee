"""Tests of onecurve/data/decode.py: formats, size limits and images with missing data."""

import os
import resource
import sys
from pathlib import Path

import numpy as np
import pytest
from PIL import Image, PngImagePlugin
from timm.data import create_transform

from onecurve.data.cache import prepare_data
from onecurve.data.crops import _resize_by_torch, evaluation_crop, random_box, random_resized_crop
from onecurve.data.decode import (
    decode_image,
    detect_simplejpeg,
    find_damage,
    jpeg_frame,
    open_image,
    torchcodec_decoder,
)
from onecurve.models.preprocessing import Crop, data_config
from tests.support.data_sets import encode, picture, png, write
from tests.support.imagenet import fails, prep
from tools.prepare.originals import ImageBatch, RawImage
from tools.prepare.recode import recode_all

EPS = b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n%%EndComments\n0 0 9 9 rectfill\n%%EOF\n"


def header_alone(side: int, options: dict) -> bytes:
    """Return a JPEG whose header specifies a size of side x side pixels. An end marker replaces the image
    data.
    """
    data = encode(Image.new("RGB", (16, 16)), **options)
    offset = next(i for i in range(len(data)) if data[i] == 0xFF and data[i + 1] in (0xC0, 0xC2))
    edges = side.to_bytes(2) * 2
    return data[: offset + 5] + edges + data[offset + 9 : data.index(b"\xff\xda") + 14] + b"\xff\xd9"


def half(jpeg: bytes) -> bytes:
    """Return the first half of a JPEG, followed by an end marker. Decoders raise no error for such a file."""
    return jpeg[: len(jpeg) // 2] + b"\xff\xd9"


def one_image(data: bytes, name: str = "a.jpg") -> list[ImageBatch]:
    return [ImageBatch("here", [RawImage(name, "a", 0, data)], len(data), 0, [])]


def pictures(root: Path, count: int, broken: str = "") -> Path:
    """Write class folders of JPEGs, and cut off the second half of the file `broken`."""
    names = [f"{split}/{c}/{i}.jpg" for split in ("train", "val") for c in "ab" for i in range(count)]
    images = {name: encode(picture(int(name[-5]))) for name in names}
    return write(root, images | ({broken: half(images[broken])} if broken else {}))


@pytest.mark.parametrize(
    "opener", [decode_image, open_image, lambda data: list(recode_all(one_image(data), 8, 90))]
)
def test_postscript_starts_no_interpreter(opener, tmp_path, monkeypatch):
    """Check that EPS data are refused under any file name. PIL would run the program `gs` to decode EPS."""
    marker = tmp_path / "started"
    (tmp_path / "gs").write_text(f"#!/bin/sh\ntouch {marker}\n")
    (tmp_path / "gs").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    with pytest.raises(ValueError, match="not in a supported image format"):
        opener(EPS)
    assert not marker.exists()


def test_only_known_formats_are_opened():
    for format in ("JPEG", "PNG", "WEBP", "BMP", "TIFF", "GIF", "PPM", "AVIF"):
        assert decode_image(encode(picture(), format)).shape == (32, 32, 3)
    for format in ("PCX", "TGA", "ICO", "SGI", "DDS"):
        with pytest.raises(ValueError, match="not in a supported image format"):
            decode_image(encode(picture(), format))


@pytest.mark.parametrize("options", [{}, {"progressive": True}, {"subsampling": "4:2:0"}], ids=str)
def test_a_small_file_is_not_decoded_to_many_pixels(options):
    """Decode a JPEG of 330 bytes, which libjpeg would expand to 20,000 x 20,000 pixels.

    Memory use must stay below the size of the decoded image.
    """
    for side in (20_000, 9_000):
        data = header_alone(side, options)
        assert len(data) < 700
        assert jpeg_frame(data)[:2] == (side, side)
        for read in (decode_image, open_image, lambda data: list(recode_all(one_image(data), 8, 90))):
            before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
            with pytest.raises(ValueError, match=f"{side:,} x {side:,} pixels"):
                read(data)
            # ru_maxrss is in KiB
            assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 50 * 1024


def test_intact_jpegs_are_not_reported_as_damaged(photographs):
    files = sorted(photographs.glob("*.JPEG"))
    assert len(files) == 100
    for file in files:
        assert find_damage(file.read_bytes()) is None
    jpeg_options = {"progressive": True}, {"subsampling": "4:4:4"}, {"restart_marker_rows": 1}, {"quality": 1}
    for options in jpeg_options:
        assert find_damage(encode(picture(width=61, height=47), **options)) is None
    for image in (picture().convert("L"), picture().convert("CMYK"), Image.new("RGB", (999, 1))):
        data = encode(image)
        assert find_damage(data) is None
        decode_image(data)
    assert find_damage(png()) is None


@pytest.mark.parametrize(
    "options", [{}, {"progressive": True}, {"restart_marker_rows": 1}, {"mode": "CMYK"}], ids=str
)
def test_half_a_jpeg_with_an_end_marker_is_damaged(options):
    options = dict(options)
    jpeg = encode(picture(width=256, height=256).convert(options.pop("mode", "RGB")), quality=95, **options)
    for part in (half(jpeg), jpeg[: len(jpeg) * 9 // 10] + b"\xff\xd9"):
        decode_image(part)  # No decoder raises an error for this image
        assert find_damage(part)


def test_half_a_jpeg_is_reported_when_the_cache_is_prepared(tmp_path):
    data = pictures(tmp_path / "data", 9, broken="train/b/4.jpg")
    with pytest.raises(ValueError, match="1 of 36 images can't be decoded") as error:
        prepare_data(str(data), tmp_path / "cache")
    assert "train/b/4.jpg: " in str(error.value)


def test_half_a_jpeg_is_reported_by_prep_imagenet(tmp_path):
    data = pictures(tmp_path / "data", 3, broken="train/b/2.jpg")
    words = ["--from", "folder", "--data", data, "--out", tmp_path / "out"]
    message = fails(*words)
    assert "2.jpg can't be decoded: " in message
    assert "--no_verify" in message
    prep(*words, "--no_verify")
    assert (tmp_path / "out" / "manifest.json").exists()


def test_endless_padding_is_not_read_byte_by_byte(monkeypatch):
    jpeg = encode(picture(), "JPEG")
    padded = jpeg[:2] + b"\xff" * 1000 + jpeg[2:]  # The JPEG format allows padding between markers
    assert decode_image(padded).shape == decode_image(jpeg).shape
    # PIL would take half a minute to read the padding.
    monkeypatch.setattr("onecurve.data.decode._decode_by_pil", None)
    padded, reason = jpeg[:2] + b"\xff" * 20_000_000 + jpeg[2:], "the header contains 20,000,000 bytes"
    with pytest.raises(ValueError, match=reason):
        decode_image(padded)
    assert find_damage(padded).startswith(reason)


@pytest.mark.filterwarnings("ignore::PIL.Image.DecompressionBombWarning")
@pytest.mark.parametrize("format", ["PNG", "JPEG"])
def test_bombs_are_refused_by_their_header(format, monkeypatch):
    data = encode(Image.new("L", (9_500, 9_500)), format)
    monkeypatch.setattr(Image.Image, "load", lambda self: pytest.fail("decoded"))
    for read in (open_image, decode_image):
        with pytest.raises(ValueError, match="decompression bomb"):
            read(data)


@pytest.mark.parametrize(("height", "width"), [(3, 999), (1, 700), (700, 1), (9, 2_001), (40, 30), (5, 330)])
@pytest.mark.parametrize("size", [9, 16])
def test_a_long_image_is_cropped_before_it_is_resized(height, width, size):
    """Check that cropping before resizing produces the same result as resizing before cropping."""
    image = np.random.default_rng(0).integers(0, 256, (height, width, 3), np.uint8)
    short = round(size * 256 / 224)
    h, w = (short, short * width // height) if height <= width else (short * height // width, short)
    top, left = round((h - size) / 2), round((w - size) / 2)
    whole = _resize_by_torch(image, h, w, "bilinear")[top : top + size, left : left + size]
    assert np.abs(evaluation_crop(image, size).astype(int) - whole).max() <= 1


@pytest.mark.parametrize("crop_mode", ["center", "squash", "border"])
@pytest.mark.parametrize(("interpolation", "crop_pct"), [("bicubic", 0.9), ("bilinear", 0.875)])
@pytest.mark.parametrize("size", [32, 224])
def test_evaluation_crops_equal_timms(crop_mode, interpolation, crop_pct, size):
    """Compare all pixels with timm's evaluation crop. For 32 pixels and a crop of 0.875, timm rounds 36.57
    down.
    """
    mean, std = (0.485, 0.456, 0.406), (0.2, 0.3, 0.4)
    config = {"mean": mean, "std": std, "interpolation": interpolation}
    config |= {"crop_pct": crop_pct, "crop_mode": crop_mode}
    transform = create_transform((3, size, size), normalize=False, **config)
    for image in (picture(1, 500, 375), picture(2, 61, 200)):
        expected = transform(image).permute(1, 2, 0).numpy()
        crop = evaluation_crop(np.asarray(image).copy(), size, data_config(config).crop)
        assert np.array_equal(crop, expected)


@pytest.mark.parametrize(("interpolation", "tolerance"), [("bicubic", 0), ("bilinear", 1)])
def test_training_crops_of_photographs_equal_pils(photographs, interpolation, tolerance):
    """Compare all pixels. A difference of 1 of 255 is allowed for bilinear crops, which torch resizes."""
    for k, file in enumerate(sorted(photographs.glob("*.JPEG"))[:30]):
        image, draws = decode_image(file.read_bytes()), np.random.default_rng(k).random(40)
        crop = random_resized_crop(image, 224, draws, interpolation).astype(int)
        top, left, h, w = random_box(*image.shape[:2], draws)
        box = Image.fromarray(image[top : top + h, left : left + w])
        expected = box.resize((224, 224), Image.Resampling[interpolation.upper()])
        assert np.abs(crop - np.asarray(expected)).max() <= tolerance


def test_the_longest_image_needs_little_memory():
    other_modes = [Crop("bicubic", 1.0, mode) for mode in ("squash", "border")]
    for shape in ((1, 60_000, 3), (60_000, 1, 3), (2, 30_000_000, 3)):
        image = np.zeros(shape, np.uint8)
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        crops = [evaluation_crop(image, 224, crop) for crop in (Crop(), *other_modes)]
        for crop in (*crops, random_resized_crop(image, 224, np.full(40, 0.99))):
            assert crop.shape == (224, 224, 3)
        assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 100 * 1024  # ru_maxrss is in KiB


@pytest.mark.parametrize("chunk", ["tEXt", "zTXt", "iTXt", "ICC"])
def test_a_large_text_or_profile_does_not_prevent_decoding(chunk):
    """Decode an image with a text or color profile of 3 MiB that is compressed to a few bytes."""
    info, size = PngImagePlugin.PngInfo(), 3 * 2**20
    if chunk != "ICC":
        (info.add_itxt if chunk == "iTXt" else info.add_text)("workflow", "a" * size, zip=chunk != "tEXt")
    data = encode(picture(), "PNG", pnginfo=info, icc_profile=bytes(size) if chunk == "ICC" else None)
    assert (decode_image(data) == decode_image(png())).all()


PROFILES = [b"\xff\xe2\xff\xffICC_PROFILE\0" + bytes([k, 5]) + bytes(65519) for k in range(1, 6)]
BROKEN = {
    "empty": b"",
    "not in a supported image format": b"hello",
    "is not in a supported": b"\xff\xd8\xff\xe0",
    # PIL reads all color profiles when it opens a file.
    "Truncated": b"\xff\xd8" + b"".join(PROFILES)[:-1000],
}


@pytest.mark.parametrize("reason", BROKEN)
def test_a_broken_file_is_an_error_with_a_reason(reason):
    with pytest.raises(ValueError, match=reason):
        decode_image(BROKEN[reason])


def test_without_torchcodec_pil_decodes_and_reports_it_once(photographs, monkeypatch, capsys):
    files = [file.read_bytes() for file in sorted(photographs.glob("*.JPEG"))[:9]]
    files += [encode(picture(k, 61, 47), progressive=bool(k)) for k in (0, 1)]
    expected = [decode_image(data) for data in files]
    monkeypatch.setitem(sys.modules, "torchcodec.decoders", None)
    torchcodec_decoder.cache_clear()
    images = [decode_image(data) for data in files]
    monkeypatch.undo()
    torchcodec_decoder.cache_clear()
    for image, expected_image in zip(images, expected, strict=True):
        assert np.abs(image.astype(int) - expected_image).max() <= 2
    assert capsys.readouterr().err.count("torchcodec can't be used, so PIL decodes JPEGs") == 1


def test_without_simplejpeg_images_are_decoded_and_a_warning_appears_once(tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "simplejpeg", None)
    detect_simplejpeg.cache_clear()
    prepare_data(str(pictures(tmp_path / "data", 9)), tmp_path / "cache")
    assert capsys.readouterr().err.count("simplejpeg is not installed") == 1
    assert find_damage(b"no image")
    monkeypatch.undo()
    detect_simplejpeg.cache_clear()
