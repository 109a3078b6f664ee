"""From encoded images to uint8 pixels."""

import functools
import importlib.util
import io
import math
import multiprocessing
import re
from collections.abc import Callable
from contextlib import suppress
from itertools import chain
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from onecurve.system.files import unfetched
from onecurve.system.output import log
from onecurve.system.text import printable
from onecurve.upstream.packages_ import allow_large_texts

if TYPE_CHECKING:
    from PIL import Image

JPEG = b"\xff\xd8"
# Formats by PIL's names, with their files' extensions. PIL opens no other: EPS would start Ghostscript, and
# documents are no photographs.
FORMATS = {
    "JPEG": (".jpg", ".jpeg", ".jpe", ".jfif"),
    "PNG": (".png",),
    "WEBP": (".webp",),
    "BMP": (".bmp",),
    "TIFF": (".tif", ".tiff"),
    "GIF": (".gif",),
    "PPM": (".ppm", ".pgm", ".pbm", ".pnm"),
    "AVIF": (".avif",),
}
HEIC = (".heic", ".heif")  # of phones; PIL reads them with an optional package
if importlib.util.find_spec("pillow_heif"):
    FORMATS["HEIF"] = HEIC
TO_READ_HEIC = "to read HEIC, pip install pillow-heif; or convert it: magick mogrify -format jpg *.heic"
TO_READ_NAMED = "to read it, pip install pillow-heif; or convert it: magick heic:FILE NEW.jpg"
EXTENSIONS = tuple(chain.from_iterable(FORMATS.values()))
MAX_PIXELS = 89_478_485  # PIL's limit: a larger image could be a decompression bomb
MOST_PADDING = 2**16  # bytes before a marker
_PADDING = re.compile(b"\xff+")


def decode_image(data: bytes) -> np.ndarray:
    """Decodes one image, turned upright by its EXIF tag: uint8 [H, W, 3]. Raises ValueError with the reason.

    Decodes the first frame or page, composites transparency on white, and scales 16-bit values by 1/257,
    which PIL does not do to images in grey: it turns them white.

    The header's size is checked first. torchcodec decodes JPEGs; PIL decodes files that it refuses (a PNG
    named .jpg) and the other FORMATS. Both refuse a file that is cut short, unless it has an end marker: see
    damage(). On JPEG they agree within 2 of 255 (both use libjpeg-turbo).
    """
    if (frame := jpeg_frame(data)) is not None:
        _check_frame(frame, len(data))
        if (decode_jpeg := torchcodec_decoder()) is not None:
            import torch

            # A bytearray: for bytes torchcodec 0.17 changes the filters of warnings, and not thread-safely.
            encoded = torch.frombuffer(bytearray(data), dtype=torch.uint8)
            with suppress(RuntimeError):  # PIL decodes it, or has the better reason
                return decode_jpeg(encoded).permute(1, 2, 0).numpy()  # [H, W, 3] is how it lies in memory
    return _decode_by_pil(data)


@functools.cache
def torchcodec_decoder() -> Callable[..., Any] | None:
    """The function that decodes JPEGs; None, which is printed once per process of a training, without
    torchcodec, or with one that is built for another CUDA than torch. PIL then takes 1.4 times as long."""
    try:
        from torchcodec.decoders import decode_jpeg
    except (ImportError, OSError, RuntimeError) as error:
        if multiprocessing.parent_process() is None:  # a worker's trainer has said it
            reason = printable(str(error).splitlines()[0])
            text = f"warning: JPEGs are decoded by PIL, more slowly, as torchcodec can't be used: {reason}"
            log.warning(text)
        return None
    return decode_jpeg


def damage(data: bytes) -> str | None:
    """The error of a broken image, or of a JPEG with missing parts, which decoders fill with grey; else None.

    torchcodec and PIL accept half a JPEG with an end marker: they hide libjpeg's warnings. For a photograph
    of 110 kB damage() takes 1.0 ms of one core, decode() 1.4 ms.
    """
    try:
        frame = jpeg_frame(data)
    except ValueError as error:
        return str(error)
    if frame is None or len(data) < frame.least_bytes or not checks_jpegs():
        return _refusal(data)
    import simplejpeg

    try:
        colorspace = "CMYK" if frame.components == 4 else "GRAY"
        simplejpeg.decode_jpeg(data, colorspace, min_factor=8, strict=True)
    except ValueError as error:
        what = str(error)
        if "extraneous" in what:  # harmless bytes between two segments
            return None
        # decode() may know a file that simplejpeg does not.
        return what if what.startswith(("Corrupt", "Premature")) else _refusal(data)
    return None


@functools.cache
def checks_jpegs() -> bool:
    """True if simplejpeg is installed, which finds missing parts. Says once if it is not."""
    is_there = importlib.util.find_spec("simplejpeg") is not None
    if not is_there:
        log.warning("warning: simplejpeg is not installed, so JPEGs with missing parts are not found")
    return is_there


def _refusal(data: bytes) -> str | None:
    try:
        decode_image(data)
    except ValueError as error:
        return str(error)
    return None


class JpegFrame(NamedTuple):
    height: int
    width: int
    components: int
    least_bytes: int  # at 1 bit for each block of 8 x 8; 0 for arithmetic coding


def jpeg_frame(data: bytes) -> JpegFrame | None:
    """Reads the frame header of a JPEG; None where there is none (ITU T.81, B.1.1, B.2.2 and A.2.4).

    Raises ValueError for endless padding, which PIL would read byte by byte.
    """
    at = 2 if data[:2] == JPEG else len(data)
    while at + 10 <= len(data) and data[at] == 0xFF:
        marker = data[at + 1]
        if 0xC0 <= marker <= 0xCF and marker not in (0xC4, 0xC8, 0xCC):
            height, width = int.from_bytes(data[at + 5 : at + 7]), int.from_bytes(data[at + 7 : at + 9])
            sampling = [(hv >> 4, hv & 15) for hv in data[at + 11 : at + 10 + 3 * data[at + 9] : 3]]
            widest, highest = (max((s[i] for s in sampling), default=0) for i in (0, 1))
            blocks = sum(
                math.ceil(width * h / (8 * widest)) * math.ceil(height * v / (8 * highest))
                for h, v in sampling
                if widest and highest
            )
            return JpegFrame(height, width, data[at + 9], blocks // 8 if marker <= 0xC2 else 0)
        if marker == 0xFF:
            padding = len(_PADDING.match(data, at)[0]) - 1  # type: ignore[index]  # it matches
            if padding > MOST_PADDING:
                raise ValueError(
                    f"its header has {padding:,} bytes of padding: at most {MOST_PADDING:,} are read"
                )
            at += padding
        else:  # all other segments before the frame have a length, which includes itself
            at += 2 + int.from_bytes(data[at + 2 : at + 4])
    return None


def _check_frame(frame: JpegFrame, size: int) -> None:
    _check_size(frame.width, frame.height)
    if size < frame.least_bytes:
        raise ValueError(
            f"its header says {frame.width:,} x {frame.height:,} pixels, which {size:,} bytes can't hold: it"
            " is cut short, or a decompression bomb"
        )


def _check_size(width: int, height: int) -> None:
    if width * height > MAX_PIXELS:
        raise ValueError(
            f"{width:,} x {height:,} pixels could be a decompression bomb: at most {MAX_PIXELS:,} pixels are"
            " decoded"
        )


def _decode_by_pil(data: bytes) -> np.ndarray:
    from PIL import Image, ImageOps

    image = open_image(data)
    has_16_bits = is_16_bit(image)
    try:
        image = ImageOps.exif_transpose(image)
        if has_16_bits:  # convert("RGB") would clip all above 255 to white
            grey = np.asarray(image)
            is_clear = grey == image.info.get("transparency", -1)
            grey = np.where(is_clear, 255, grey // 257).astype(np.uint8)
            return np.repeat(grey[:, :, None], 3, axis=2)
        if image.mode in ("I", "F"):
            raise ValueError(f"its pixels have 32 bits (PIL's mode {image.mode}), not 8 or 16")
        if image.has_transparency_data:
            clear = image.convert("RGBA")
            image = Image.new("RGBA", clear.size, "white")
            image.alpha_composite(clear)
        return np.array(image.convert("RGB"))  # a copy, as torch warns about memory that may not be written
    except ValueError:
        raise
    except Exception as error:  # PIL's errors on broken files have no common class
        raise ValueError(f"{error}" or type(error).__name__) from None


def is_16_bit(image: "Image.Image") -> bool:
    """True for a grey image of 16 bits. PIL opens one in colour as an image of 8 bits."""
    return image.mode.startswith("I;16") or (image.mode == "I" and image.format == "PPM")


def open_image(data: bytes) -> "Image.Image":
    """Opens an image lazily with PIL. Raises ValueError for one that is none of FORMATS, or is too large."""
    from PIL import Image, UnidentifiedImageError

    allow_large_texts()
    if not data:
        raise ValueError("the file is empty")
    formats = [name for name in FORMATS if name != "HEIF"]
    if "HEIF" in FORMATS and data[4:8] == b"ftyp":
        _register_heif()
        formats.append("HEIF")
    elif data[4:11] in (b"ftyphei", b"ftyphev"):
        raise ValueError(f"its format is HEIC: {TO_READ_NAMED}")
    if (frame := jpeg_frame(data)) is not None:
        _check_frame(frame, len(data))
    try:
        image = Image.open(io.BytesIO(data), formats=formats)
    except UnidentifiedImageError:
        known = f"not an image of a known format ({', '.join(FORMATS)})"
        raise ValueError(unfetched(data) or known) from None
    except Exception as error:  # twice the limit, or a broken file: PIL's errors have no common class
        raise ValueError(str(error) or type(error).__name__) from None
    # PIL's warning is no way to do it: changing the filters of warnings is not thread-safe.
    _check_size(*image.size)
    return image


@functools.cache
def _register_heif() -> None:
    import pillow_heif

    pillow_heif.register_heif_opener()
