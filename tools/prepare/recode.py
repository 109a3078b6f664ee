"""Re-encodes images that need it: to JPEG, or to a smaller size. Others stay as they are."""

import os
from collections import deque
from collections.abc import Generator, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from io import BytesIO

from onecurve.data.decode import JPEG, damage, decode_image, jpeg_frame, open_image
from onecurve.system.processes import allowed_cores
from tools.prepare.originals import ImageBatch, RawImage

PNG = b"\x89PNG"
QUALITY = 95  # of images that keep their size


def recoded(
    source: Iterable[ImageBatch], short_side: int | None, quality: int, strict: bool = False
) -> Generator[ImageBatch, None, None]:
    """Yield the batches in their order. CMYK, and a PNG named otherwise, become RGB JPEGs of QUALITY.

    short_side: images with a longer shorter side are resized to it, on all cores; others stay as they are.
    Raises ValueError, with the image's name, when one can't be decoded; strict: also when a part of a JPEG is
    missing.
    """
    if short_side is None and not strict:
        yield from (_recode(batch, None, quality, False) for batch in source)
        return
    # Threads, as PIL releases the GIL: on two cores 1.06 times as fast as processes.
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
        why = odd_format(image)
        remedy = "" if why else ", or prepare without --resize"
        try:
            data = smaller(image.data, short_side, quality) if short_side else None
            data = data or (_as_jpeg(_upright(image.data), QUALITY) if why else image.data)
            if strict and (what := damage(image.data)):
                remedy = ", or keep it as it is by --no_verify"
                raise ValueError(what)
        except (ValueError, OSError) as error:  # the latter from the encoder
            raise ValueError(
                f"{batch.where}: {image.name} can't be decoded: {error}. Remove it from its archive{remedy}"
            ) from None
        if data is not image.data:
            stem, extension = os.path.splitext(image.name)
            name = image.name if extension.lower() in (".jpg", ".jpeg") else f"{stem}.jpg"
            batch.images[i] = image._replace(name=name, data=data)
        if why:
            batch.odd.append({"key": image.key, "why": why})
    return batch


def odd_format(image: RawImage) -> str | None:
    """Name the format of an image that fast decoders refuse, a misnamed PNG or a CMYK JPEG; else None."""
    if image.data[:4] == PNG and not image.name.lower().endswith(".png"):
        return "PNG"
    frame = jpeg_frame(image.data)
    return "CMYK" if frame is not None and frame.components == 4 else None


def _upright(data: bytes):
    """Decode to a PIL image, RGB or L, turned upright by its EXIF tag. Raises ValueError with the reason."""
    from PIL import Image, ImageOps

    if data[:2] != JPEG:
        return Image.fromarray(decode_image(data))
    picture = open_image(data)
    try:
        picture = ImageOps.exif_transpose(picture)
        picture.load()
    except Exception as error:  # PIL's errors on a broken file have no common class
        raise ValueError(str(error) or type(error).__name__) from None
    return picture if picture.mode in ("L", "RGB") else picture.convert("RGB")


def smaller(data: bytes, short_side: int, quality: int) -> bytes | None:
    """Resize to this shorter side, upright, with onecurve.data.decode's filter; None for a small image."""
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
