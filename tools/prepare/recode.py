"""Re-encode images that need a smaller size or another format. Other images stay unchanged."""

import os
from collections import deque
from collections.abc import Generator, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from io import BytesIO

from onecurve.data.decode import JPEG, damage, decode_image, jpeg_frame, open_image
from onecurve.system.processes import allowed_cores
from tools.prepare.originals import ImageBatch, RawImage

PNG = b"\x89PNG"
QUALITY = 95  # JPEG quality of images that keep their size


def recoded(
    source: Iterable[ImageBatch], short_side: int | None, quality: int, strict: bool = False
) -> Generator[ImageBatch, None, None]:
    """Yield the batches in order. Convert CMYK images and misnamed PNGs to RGB JPEGs of QUALITY.

    Args:
        source: the batches.
        short_side: shorter side to which larger images are resized, on all cores. None keeps all sizes.
        quality: JPEG quality of resized images.
        strict: True to also refuse JPEGs with a missing part.

    Raises:
        ValueError: an image can't be decoded. The message names the image.
    """
    if short_side is None and not strict:
        yield from (_recode(batch, None, quality, False) for batch in source)
        return
    # PIL releases the GIL, so threads suffice. On two cores, threads were 1.06 times as fast as processes.
    cores = allowed_cores()
    pool = ThreadPoolExecutor(cores)
    pending: deque[Future[ImageBatch]] = deque()
    try:
        for batch in source:
            pending.append(pool.submit(_recode, batch, short_side, quality, strict))
            if len(pending) > 2 * cores + 1:
                yield pending.popleft().result()
        while pending:
            yield pending.popleft().result()
    finally:
        pool.shutdown(cancel_futures=True)


def _recode(batch: ImageBatch, short_side: int | None, quality: int, strict: bool) -> ImageBatch:
    for i, image in enumerate(batch.images):
        odd = odd_format(image)
        remedy = "" if odd else ", or prepare without --resize"
        try:
            data = smaller(image.data, short_side, quality) if short_side else None
            data = data or (_as_jpeg(_upright(image.data), QUALITY) if odd else image.data)
            if strict and (problem := damage(image.data)):
                remedy = ", or keep it unchanged with --no_verify"
                raise ValueError(problem)
        except (ValueError, OSError) as error:  # OSError comes from the encoder
            raise ValueError(
                f"{batch.where}: {image.name} can't be decoded: {error}. Remove it from its archive{remedy}"
            ) from None
        if data is not image.data:
            stem, extension = os.path.splitext(image.name)
            name = image.name if extension.lower() in (".jpg", ".jpeg") else f"{stem}.jpg"
            batch.images[i] = image._replace(name=name, data=data)
        if odd:
            batch.odd.append({"key": image.key, "why": odd})
    return batch


def odd_format(image: RawImage) -> str | None:
    """Return the format of an image that fast decoders refuse, "PNG" (misnamed) or "CMYK", or None."""
    if image.data[:4] == PNG and not image.name.lower().endswith(".png"):
        return "PNG"
    frame = jpeg_frame(image.data)
    return "CMYK" if frame is not None and frame.components == 4 else None


def _upright(data: bytes):
    """Decode to an RGB or L image of PIL, and apply the EXIF rotation. Raise ValueError with the reason."""
    from PIL import Image, ImageOps

    if data[:2] != JPEG:
        return Image.fromarray(decode_image(data))
    picture = open_image(data)
    try:
        picture = ImageOps.exif_transpose(picture)
        picture.load()
    except Exception as error:  # PIL's errors about broken files have no common base class
        raise ValueError(str(error) or type(error).__name__) from None
    return picture if picture.mode in ("L", "RGB") else picture.convert("RGB")


def smaller(data: bytes, short_side: int, quality: int) -> bytes | None:
    """Resize an image to this shorter side, with the filter of onecurve.data.decode and the EXIF rotation.

    Return None for an image that is already small enough.
    """
    from PIL import Image

    picture = _upright(data)
    width, height = picture.size
    short = min(width, height)
    if short <= short_side:
        return None
    size = width * short_side // short, height * short_side // short
    return _as_jpeg(picture.resize(size, Image.Resampling.BILINEAR), quality)


def _as_jpeg(picture, quality: int) -> bytes:
    buffer = BytesIO()
    picture.save(buffer, "JPEG", quality=quality)
    return buffer.getvalue()
