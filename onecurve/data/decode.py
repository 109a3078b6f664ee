"""Decoding of image files to uint8 pixels, and checks for damaged or oversized files."""

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
# File extensions by PIL's name of the format. PIL may open only these formats, because opening EPS would
# start Ghostscript, and document formats do not contain photographs.
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
HEIC = (".heic", ".heif")  # written by phones; PIL needs an optional package to read them
if importlib.util.find_spec("pillow_heif"):
    FORMATS["HEIF"] = HEIC
TO_READ_HEIC = (
    "to read HEIC, pip install pillow-heif, or convert the files: magick mogrify -format jpg *.heic"
)
TO_READ_NAMED = "To read it, pip install pillow-heif, or convert it: magick heic:FILE NEW.jpg"
EXTENSIONS = tuple(chain.from_iterable(FORMATS.values()))
MAX_PIXELS = 89_478_485  # PIL's limit; a larger image could be a decompression bomb
MOST_PADDING = 2**16  # maximum number of padding bytes before a marker
_PADDING = re.compile(b"\xff+")


def decode_image(data: bytes) -> np.ndarray:
    """Decode one image and rotate it upright according to its EXIF tag.

    Only the first frame or page is decoded. Transparent pixels are composited onto a white background. 16-bit
    pixel values are divided by 257, because PIL's conversion would turn 16-bit grey images white.

    The size in the header is checked before decoding. torchcodec decodes JPEGs. PIL decodes all other
    FORMATS, and files that torchcodec rejects, such as a PNG named .jpg. Both libraries reject a truncated
    file unless it contains an end marker (see `damage`). Because both use libjpeg-turbo, their JPEG pixels
    differ by at most 2 of 255 levels.

    Returns:
        Pixels, uint8 [H, W, 3].

    Raises:
        ValueError: The image can't be decoded. The message contains the reason.
    """
    if (frame := jpeg_frame(data)) is not None:
        _check_frame(frame, len(data))
        if (decode_jpeg := torchcodec_decoder()) is not None:
            import torch

            # The copy to a bytearray is needed because torchcodec 0.17 changes the warning filters for
            # read-only bytes, which is not thread-safe.
            encoded = torch.frombuffer(bytearray(data), dtype=torch.uint8)
            with suppress(RuntimeError):  # then PIL decodes the file or reports a better reason
                return decode_jpeg(encoded).permute(1, 2, 0).numpy()  # contiguous in memory as [H, W, 3]
    return _decode_by_pil(data)


@functools.cache
def torchcodec_decoder() -> Callable[..., Any] | None:
    """Return torchcodec's JPEG decoder, or None if torchcodec is missing or built for another CUDA version.

    Without torchcodec, PIL decodes JPEGs, which takes 1.4 times as long. Each training process logs a warning
    about this once.
    """
    try:
        from torchcodec.decoders import decode_jpeg
    except (ImportError, OSError, RuntimeError) as error:
        if multiprocessing.parent_process() is None:  # workers don't log this, because the trainer does
            reason = printable(str(error).splitlines()[0])
            log.warning(
                f"warning: PIL decodes JPEGs, more slowly, because torchcodec can't be used: {reason}"
            )
        return None
    return decode_jpeg


def damage(data: bytes) -> str | None:
    """Return the error message of a broken image or a JPEG with missing parts, or None for an intact image.

    torchcodec and PIL hide libjpeg's warnings. For example, they accept half a JPEG with an end marker and
    fill the missing half with grey. For a 110 kB photo, this check takes 1.0 ms on one core, and decoding
    takes 1.4 ms.
    """
    try:
        frame = jpeg_frame(data)
    except ValueError as error:
        return str(error)
    if frame is None or len(data) < frame.least_bytes or not checks_jpegs():
        return _decoding_error(data)
    import simplejpeg

    try:
        colorspace = "CMYK" if frame.components == 4 else "GRAY"
        simplejpeg.decode_jpeg(data, colorspace, min_factor=8, strict=True)
    except ValueError as error:
        message = str(error)
        if "extraneous" in message:  # harmless bytes between two segments
            return None
        # decode_image() may be able to decode a file that simplejpeg rejects.
        return message if message.startswith(("Corrupt", "Premature")) else _decoding_error(data)
    return None


@functools.cache
def checks_jpegs() -> bool:
    """Check whether simplejpeg, which detects missing parts, is installed. Log a warning once if not."""
    is_installed = importlib.util.find_spec("simplejpeg") is not None
    if not is_installed:
        log.warning("warning: simplejpeg is not installed, so JPEGs with missing parts are not detected")
    return is_installed


def _decoding_error(data: bytes) -> str | None:
    try:
        decode_image(data)
    except ValueError as error:
        return str(error)
    return None


class JpegFrame(NamedTuple):
    """Frame header of a JPEG."""

    height: int
    width: int
    components: int
    least_bytes: int  # minimum file size: 1 bit per block of 8 x 8 pixels; 0 for arithmetic coding


def jpeg_frame(data: bytes) -> JpegFrame | None:
    """Read the frame header of a JPEG (ITU T.81, B.1.1, B.2.2 and A.2.4). Return None without one.

    Raises:
        ValueError: The header contains too much padding, which PIL would read byte by byte.
    """
    offset = 2 if data[:2] == JPEG else len(data)
    while offset + 10 <= len(data) and data[offset] == 0xFF:
        marker = data[offset + 1]
        if 0xC0 <= marker <= 0xCF and marker not in (0xC4, 0xC8, 0xCC):
            height = int.from_bytes(data[offset + 5 : offset + 7])
            width = int.from_bytes(data[offset + 7 : offset + 9])
            components = data[offset + 9]
            sampling = [(hv >> 4, hv & 15) for hv in data[offset + 11 : offset + 10 + 3 * components : 3]]
            widest, highest = (max((s[i] for s in sampling), default=0) for i in (0, 1))
            blocks = sum(
                math.ceil(width * h / (8 * widest)) * math.ceil(height * v / (8 * highest))
                for h, v in sampling
                if widest and highest
            )
            return JpegFrame(height, width, components, blocks // 8 if marker <= 0xC2 else 0)
        if marker == 0xFF:
            padding = len(_PADDING.match(data, offset)[0]) - 1  # type: ignore[index]  # always matches here
            if padding > MOST_PADDING:
                raise ValueError(
                    f"the header has {padding:,} bytes of padding: at most {MOST_PADDING:,} are read"
                )
            offset += padding
        else:  # all other segments before the frame start with their length, which includes the length field
            offset += 2 + int.from_bytes(data[offset + 2 : offset + 4])
    return None


def _check_frame(frame: JpegFrame, size: int) -> None:
    _check_size(frame.width, frame.height)
    if size < frame.least_bytes:
        raise ValueError(
            f"the header says {frame.width:,} x {frame.height:,} pixels, which {size:,} bytes can't hold. The"
            " file is truncated or a decompression bomb"
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
        if has_16_bits:  # convert("RGB") would clip values above 255 to white
            grey = np.asarray(image)
            is_clear = grey == image.info.get("transparency", -1)
            grey = np.where(is_clear, 255, grey // 257).astype(np.uint8)
            return np.repeat(grey[:, :, None], 3, axis=2)
        if image.mode in ("I", "F"):
            raise ValueError(f"the pixels have 32 bits (PIL's mode {image.mode}), not 8 or 16")
        if image.has_transparency_data:
            clear = image.convert("RGBA")
            image = Image.new("RGBA", clear.size, "white")
            image.alpha_composite(clear)
        return np.array(image.convert("RGB"))  # a copy, because torch warns about read-only memory
    except ValueError:
        raise
    except Exception as error:  # PIL's errors for broken files share no base class
        raise ValueError(f"{error}" or type(error).__name__) from None


def is_16_bit(image: "Image.Image") -> bool:
    """Check whether PIL opened an image as 16-bit grey. PIL converts 16-bit colour images to 8 bits."""
    return image.mode.startswith("I;16") or (image.mode == "I" and image.format == "PPM")


def open_image(data: bytes) -> "Image.Image":
    """Open an image lazily with PIL.

    Raises:
        ValueError: The format is not one of FORMATS, the image is too large, or its header is broken.
    """
    from PIL import Image, UnidentifiedImageError

    allow_large_texts()
    if not data:
        raise ValueError("the file is empty")
    formats = [name for name in FORMATS if name != "HEIF"]
    if "HEIF" in FORMATS and data[4:8] == b"ftyp":
        _register_heif()
        formats.append("HEIF")
    elif data[4:11] in (b"ftyphei", b"ftyphev"):
        raise ValueError(f"the format is HEIC. {TO_READ_NAMED}")
    if (frame := jpeg_frame(data)) is not None:
        _check_frame(frame, len(data))
    try:
        image = Image.open(io.BytesIO(data), formats=formats)
    except UnidentifiedImageError:
        message = f"not an image of a known format ({', '.join(FORMATS)})"
        raise ValueError(unfetched(data) or message) from None
    except Exception as error:  # over twice PIL's limit, or broken; PIL's errors share no base class
        raise ValueError(str(error) or type(error).__name__) from None
    # PIL only warns about images up to twice its limit. Turning the warnings into errors would not be
    # thread-safe.
    _check_size(*image.size)
    return image


@functools.cache
def _register_heif() -> None:
    import pillow_heif

    pillow_heif.register_heif_opener()
