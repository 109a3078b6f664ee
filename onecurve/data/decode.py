"""Decoding of image files to uint8 pixels, with checks for damaged and oversized files."""

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

from onecurve.system.files import lfs_pointer_problem
from onecurve.system.output import log
from onecurve.system.text import printable
from onecurve.upstream.packages_ import allow_large_texts

if TYPE_CHECKING:
    from PIL import Image

JPEG_PREFIX = b"\xff\xd8"  # first two bytes of a JPEG file
# File extensions of each PIL format. PIL may open only these formats, because opening an EPS file would start
# Ghostscript, and document formats do not contain photographs.
EXTENSIONS_BY_FORMAT = {
    "JPEG": (".jpg", ".jpeg", ".jpe", ".jfif"),
    "PNG": (".png",),
    "WEBP": (".webp",),
    "BMP": (".bmp",),
    "TIFF": (".tif", ".tiff"),
    "GIF": (".gif",),
    "PPM": (".ppm", ".pgm", ".pbm", ".pnm"),
    "AVIF": (".avif",),
}
HEIC_EXTENSIONS = (".heic", ".heif")  # format of phone cameras, which PIL reads with an optional package
if importlib.util.find_spec("pillow_heif"):
    EXTENSIONS_BY_FORMAT["HEIF"] = HEIC_EXTENSIONS
HEIC_ADVICE = (
    "to read HEIC files, run `pip install pillow-heif`,"
    " or convert the files with `magick mogrify -format jpg *.heic`"
)
HEIC_FILE_ADVICE = (
    "To read the file, run `pip install pillow-heif`, or convert the file with `magick heic:FILE NEW.jpg`"
)
IMAGE_EXTENSIONS = tuple(chain.from_iterable(EXTENSIONS_BY_FORMAT.values()))
MAX_PIXELS = 89_478_485  # PIL's limit, because a larger image could be a decompression bomb
MAX_PADDING = 2**16  # maximum number of padding bytes before a JPEG marker
_PADDING_PATTERN = re.compile(b"\xff+")  # matches padding and the first byte of a JPEG marker
_FRAME_MARKERS = {*range(0xC0, 0xD0)} - {0xC4, 0xC8, 0xCC}  # JPEG markers that start a frame (second byte)
_FRAME_HEADER_BYTES = 10  # length of a frame header from its marker to its number of components
_LAST_HUFFMAN_MARKER = 0xC2  # frames with larger markers may use arithmetic coding


def decode_image(content: bytes) -> np.ndarray:
    """Decode one image and rotate it upright according to its EXIF tag.

    Only the first frame or page is decoded, and transparent pixels are composited onto a white background.
    16-bit pixel values are divided by 257, because PIL's own conversion would turn 16-bit grey images white.

    The image size in the header is checked before decoding. JPEGs are decoded with torchcodec. All other
    formats are decoded with PIL, as are files that torchcodec rejects, such as a PNG named .jpg. Both
    libraries reject a truncated file unless it contains an end marker (see `find_damage`). Because torchcodec
    and PIL both use libjpeg-turbo, their JPEG pixels differ by at most 2 of 255 levels.

    Returns:
        Pixels, uint8 [H, W, 3].

    Raises:
        ValueError: If the image can't be decoded. The message contains the reason.
    """
    if (frame := jpeg_frame(content)) is not None:
        _check_frame_size(frame, len(content))
        if (decode_jpeg := torchcodec_decoder()) is not None:
            import torch

            # The bytes are copied to a bytearray, because for read-only bytes torchcodec 0.17 changes the
            # warning filters, which is not thread-safe.
            content_tensor = torch.frombuffer(bytearray(content), dtype=torch.uint8)
            with suppress(RuntimeError):  # PIL then decodes the file or raises a clearer error
                return decode_jpeg(content_tensor).permute(1, 2, 0).numpy()  # contiguous as [H, W, 3]
    return _decode_by_pil(content)


@functools.cache
def torchcodec_decoder() -> Callable[..., Any] | None:
    """Return torchcodec's JPEG decoder, or None if torchcodec is missing or built for another CUDA version.

    Without torchcodec, JPEGs are decoded with PIL, which takes 1.4 times as long. Each training process logs
    one warning if torchcodec can't be used.
    """
    try:
        from torchcodec.decoders import decode_jpeg
    except (ImportError, OSError, RuntimeError) as error:
        if multiprocessing.parent_process() is None:  # only the trainer logs the warning, not its workers
            first_error_line = str(error).splitlines()[0]
            log.warning(
                "warning: torchcodec can't be used, so PIL decodes JPEGs, which is slower."
                f" Reason: {printable(first_error_line)}"
            )
        return None
    return decode_jpeg


def find_damage(content: bytes) -> str | None:
    """Return an error message for a broken image or a JPEG with missing data, or None for an intact image.

    The check is needed because torchcodec and PIL hide libjpeg's warnings. For example, both libraries accept
    half a JPEG with an end marker and fill the missing half with grey. For a 110 kB photo, the check takes
    1.0 ms on one core, compared with 1.4 ms for decoding.
    """
    try:
        frame = jpeg_frame(content)
    except ValueError as error:
        return str(error)
    if frame is None or len(content) < frame.min_bytes or not detect_simplejpeg():
        return _decoding_error(content)
    import simplejpeg

    try:
        colorspace = "CMYK" if frame.component_count == 4 else "GRAY"
        # A grey image with an eighth of the resolution saves time. libjpeg still parses the whole file.
        simplejpeg.decode_jpeg(content, colorspace, min_factor=8, strict=True)
    except ValueError as error:
        jpeg_error = str(error)
        if "extraneous" in jpeg_error:  # extra bytes between two segments are harmless
            return None
        # simplejpeg rejects some files that decode_image() can decode.
        return jpeg_error if jpeg_error.startswith(("Corrupt", "Premature")) else _decoding_error(content)
    return None


@functools.cache
def detect_simplejpeg() -> bool:
    """Return True if simplejpeg, which detects missing JPEG data, is installed. If not, log one warning."""
    is_installed = importlib.util.find_spec("simplejpeg") is not None
    if not is_installed:
        log.warning(
            "warning: simplejpeg is not installed, so JPEGs with missing parts are not detected."
            " Run `pip install simplejpeg`"
        )
    return is_installed


def _decoding_error(encoded_image: bytes) -> str | None:
    """Return the error message of decode_image(), or None if it decodes the image."""
    try:
        decode_image(encoded_image)
    except ValueError as error:
        return str(error)
    return None


class JpegFrame(NamedTuple):
    """JPEG frame header."""

    height: int  # in pixels
    width: int  # in pixels
    component_count: int  # number of colour components: 1 for grey, 3 for colour, 4 for CMYK
    min_bytes: int  # minimum file size, 1 bit per block of 8 x 8 pixels; 0 for arithmetic coding


def jpeg_frame(content: bytes) -> JpegFrame | None:
    """Return a JPEG's frame header (ITU T.81, B.1.1, B.2.2 and A.2.4), or None if it has no frame header.

    Raises:
        ValueError: If the header contains more than MAX_PADDING bytes of padding, which PIL would read byte
            by byte.
    """
    marker_offset = 2 if content[:2] == JPEG_PREFIX else len(content)  # len(content) ends the loop at once
    while marker_offset + _FRAME_HEADER_BYTES <= len(content) and content[marker_offset] == 0xFF:
        marker_byte = content[marker_offset + 1]
        if marker_byte in _FRAME_MARKERS:
            return _parse_frame_header(content, marker_offset)
        if marker_byte == 0xFF:
            marker_match = _PADDING_PATTERN.match(content, marker_offset)
            # The last matched byte is the first byte of the next marker
            padding_bytes = len(marker_match[0]) - 1  # type: ignore[index]  # always matches here
            if padding_bytes > MAX_PADDING:
                raise ValueError(
                    f"the header contains {padding_bytes:,} bytes of padding."
                    f" At most {MAX_PADDING:,} bytes are supported"
                )
            marker_offset += padding_bytes
        else:  # any other segment before the frame starts with its length, which includes the length field
            segment_bytes = int.from_bytes(content[marker_offset + 2 : marker_offset + 4])
            marker_offset += 2 + segment_bytes
    return None


def _parse_frame_header(jpeg_bytes: bytes, marker_offset: int) -> JpegFrame:
    """Parse the JPEG frame header at an offset (ITU T.81, B.2.2).

    The header contains the marker (2 bytes), length (2), precision (1), height (2), width (2) and number of
    components (1). Three bytes for each component follow: the id, the sampling factors and the table.
    """
    marker_byte = jpeg_bytes[marker_offset + 1]
    height = int.from_bytes(jpeg_bytes[marker_offset + 5 : marker_offset + 7])
    width = int.from_bytes(jpeg_bytes[marker_offset + 7 : marker_offset + 9])
    component_count = jpeg_bytes[marker_offset + 9]
    factor_bytes = jpeg_bytes[marker_offset + 11 : marker_offset + 10 + 3 * component_count : 3]
    sampling_factors = [(factors >> 4, factors & 15) for factors in factor_bytes]  # horizontal, vertical
    max_horizontal = max((horizontal for horizontal, _ in sampling_factors), default=0)
    max_vertical = max((vertical for _, vertical in sampling_factors), default=0)
    block_count = 0
    if max_horizontal and max_vertical:
        for horizontal, vertical in sampling_factors:
            blocks_across = math.ceil(width * horizontal / (8 * max_horizontal))
            blocks_down = math.ceil(height * vertical / (8 * max_vertical))
            block_count += blocks_across * blocks_down
    min_bytes = block_count // 8 if marker_byte <= _LAST_HUFFMAN_MARKER else 0
    return JpegFrame(height, width, component_count, min_bytes)


def _check_frame_size(frame: JpegFrame, file_bytes: int) -> None:
    """Raise ValueError if a JPEG header specifies too many pixels, in total or for the size of the file."""
    _refuse_oversized(frame.width, frame.height)
    if file_bytes < frame.min_bytes:
        raise ValueError(
            f"the header specifies {frame.width:,} x {frame.height:,} pixels,"
            f" which do not fit into {file_bytes:,} bytes."
            " The file is truncated or a decompression bomb"
        )


def _refuse_oversized(width: int, height: int) -> None:
    """Raise ValueError if an image has more than MAX_PIXELS pixels."""
    if width * height > MAX_PIXELS:
        raise ValueError(
            f"an image with {width:,} x {height:,} pixels could be a decompression bomb."
            f" At most {MAX_PIXELS:,} pixels are supported"
        )


def _decode_by_pil(encoded_image: bytes) -> np.ndarray:
    """Decode an image in any supported format to 8-bit RGB, uint8 [H, W, 3], with a white background.

    Raises:
        ValueError: If the image is broken or has 32-bit pixels.
    """
    from PIL import Image, ImageOps

    image = open_image(encoded_image)
    has_16_bits = is_16_bit(image)
    try:
        image = ImageOps.exif_transpose(image)
        if has_16_bits:  # because convert("RGB") would clip values above 255 to white
            grey_16_bit = np.asarray(image)
            # One grey value may stand for transparent pixels. Without such a value, -1 matches no pixel.
            is_transparent = grey_16_bit == image.info.get("transparency", -1)
            # 255 * 257 = 65,535, so the division maps the 16-bit maximum to the 8-bit maximum
            grey_8_bit = np.where(is_transparent, 255, grey_16_bit // 257).astype(np.uint8)
            return np.repeat(grey_8_bit[:, :, None], 3, axis=2)
        if image.mode in ("I", "F"):
            raise ValueError(
                f"32-bit pixels (PIL mode {image.mode}) are not supported. Convert the image to 8 or 16 bits"
            )
        if image.has_transparency_data:
            transparent_image = image.convert("RGBA")
            image = Image.new("RGBA", transparent_image.size, "white")
            image.alpha_composite(transparent_image)
        return np.array(image.convert("RGB"))  # copied, because torch warns about read-only memory
    except ValueError:
        raise
    except Exception as error:  # PIL's errors for broken files have no common base class
        raise ValueError(f"{error}" or type(error).__name__) from None


def is_16_bit(image: "Image.Image") -> bool:
    """Return True for 16-bit grey images, which PIL opens in mode I;16 or, for PPM files, in mode I.

    PIL opens 16-bit colour images with 8 bits per channel.
    """
    return image.mode.startswith("I;16") or (image.mode == "I" and image.format == "PPM")


def open_image(content: bytes) -> "Image.Image":
    """Open an image with PIL without decoding the pixels.

    Raises:
        ValueError: If the format is not supported, the image is too large, or the image header is broken.
    """
    from PIL import Image, UnidentifiedImageError

    allow_large_texts()
    if not content:
        raise ValueError("the file is empty")
    allowed_formats = [format_name for format_name in EXTENSIONS_BY_FORMAT if format_name != "HEIF"]
    if "HEIF" in EXTENSIONS_BY_FORMAT and content[4:8] == b"ftyp":  # signature of HEIC and AVIF files
        _register_heif()
        allowed_formats.append("HEIF")
    elif content[4:11] in (b"ftyphei", b"ftyphev"):
        raise ValueError(f"the file is in HEIC format. {HEIC_FILE_ADVICE}")
    if (frame := jpeg_frame(content)) is not None:
        _check_frame_size(frame, len(content))
    try:
        image = Image.open(io.BytesIO(content), formats=allowed_formats)
    except UnidentifiedImageError:
        format_error = f"the file is not in a supported image format ({', '.join(EXTENSIONS_BY_FORMAT)})"
        raise ValueError(lfs_pointer_problem(content) or format_error) from None
    except Exception as error:
        # The image exceeds twice PIL's limit or is broken. PIL's errors have no common base class.
        raise ValueError(str(error) or type(error).__name__) from None
    # PIL only warns about images that exceed its limit by up to a factor of two. Turning these warnings into
    # errors would not be thread-safe.
    _refuse_oversized(*image.size)
    return image


@functools.cache
def _register_heif() -> None:
    """Make PIL able to open HEIC files. Only the first call in a process has an effect."""
    import pillow_heif

    pillow_heif.register_heif_opener()
