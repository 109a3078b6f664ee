"""Re-encode images that need a smaller size or a different format. Keep all other images unchanged."""

import os
from collections import deque
from collections.abc import Generator, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from io import BytesIO

from onecurve.data.decode import JPEG_PREFIX, decode_image, find_damage, jpeg_frame, open_image
from onecurve.system.processes import allowed_cores
from tools.prepare.originals import ImageBatch, RawImage

PNG_MAGIC_BYTES = b"\x89PNG"
FULL_SIZE_QUALITY = 95  # JPEG quality of re-encoded images that keep their size


def recode_all(
    batches: Iterable[ImageBatch], short_side: int | None, quality: int, strict: bool = False
) -> Generator[ImageBatch, None, None]:
    """Yield the batches in order, after converting or resizing images in place.

    CMYK images and misnamed PNGs become RGB JPEGs of quality FULL_SIZE_QUALITY. All other images of a
    sufficiently small size keep their bytes.

    Args:
        batches: Batches of images.
        short_side: Shorter side to which larger images are resized, using all cores. None keeps all sizes.
        quality: JPEG quality of resized images.
        strict: True to also refuse JPEGs with missing parts.

    Raises:
        ValueError: If an image can't be decoded. The message contains the image's name.
    """
    if short_side is None and not strict:
        yield from (_recode_batch(batch, None, quality, False) for batch in batches)
        return
    # PIL releases the GIL, so threads suffice. On two cores, threads were 1.06 times as fast as processes.
    core_count = allowed_cores()
    thread_pool = ThreadPoolExecutor(core_count)
    pending_batches: deque[Future[ImageBatch]] = deque()
    try:
        for batch in batches:
            pending_batches.append(thread_pool.submit(_recode_batch, batch, short_side, quality, strict))
            # Read ahead far enough to keep all cores busy, but limit the memory for waiting batches.
            if len(pending_batches) > 2 * core_count + 1:
                yield pending_batches.popleft().result()
        while pending_batches:
            yield pending_batches.popleft().result()
    finally:
        thread_pool.shutdown(cancel_futures=True)


def _recode_batch(batch: ImageBatch, short_side: int | None, quality: int, checks_damage: bool) -> ImageBatch:
    """Resize or convert images in place, list converted images in `reencoded`, and return the batch.

    Args:
        batch: Batch of images, which this function changes.
        short_side: Shorter side to which larger images are resized, or None.
        quality: JPEG quality of resized images.
        checks_damage: True to refuse JPEGs with missing parts.

    Raises:
        ValueError: If an image can't be decoded or is damaged. The message contains the image's name.
    """
    for image_index, image in enumerate(batch.images):
        original_format = format_to_convert(image)
        # Advice after "Remove the image". Images of these formats are decoded even without --resize.
        remedy = "" if original_format else ", or remove --resize"
        try:
            recoded_bytes = resize_image(image.encoded, short_side, quality) if short_side else None
            if not recoded_bytes and original_format:
                recoded_bytes = _encode_jpeg(_decode_upright(image.encoded), FULL_SIZE_QUALITY)
            recoded_bytes = recoded_bytes or image.encoded
            if checks_damage and (image_problem := find_damage(image.encoded)):
                remedy = ", or pass --no_verify to keep the image unchanged"
                raise ValueError(image_problem)
        except (ValueError, OSError) as error:  # the encoder raises OSError
            image_problem = f"{image.name} can't be decoded: {error}"
            raise ValueError(f"{batch.display_name}: {image_problem}. Remove the image{remedy}") from None
        if recoded_bytes is not image.encoded:
            stem, extension = os.path.splitext(image.name)
            is_named_jpeg = extension.lower() in (".jpg", ".jpeg")
            new_name = image.name if is_named_jpeg else f"{stem}.jpg"
            batch.images[image_index] = image._replace(name=new_name, encoded=recoded_bytes)
        if original_format:
            batch.reencoded.append({"key": image.key, "why": original_format})
    return batch


def format_to_convert(image: RawImage) -> str | None:
    """Return "PNG" (a PNG with a different extension) or "CMYK" (a JPEG in CMYK), and None for other images.

    Fast decoders refuse images in these two formats.
    """
    if image.encoded.startswith(PNG_MAGIC_BYTES) and not image.name.lower().endswith(".png"):
        return "PNG"
    frame_header = jpeg_frame(image.encoded)
    return "CMYK" if frame_header is not None and frame_header.component_count == 4 else None


def _decode_upright(encoded: bytes):
    """Decode an image to a PIL image in mode RGB or L, and apply the EXIF rotation.

    Raise ValueError if decoding fails.
    """
    from PIL import Image, ImageOps

    if not encoded.startswith(JPEG_PREFIX):
        return Image.fromarray(decode_image(encoded))
    picture = open_image(encoded)
    try:
        picture = ImageOps.exif_transpose(picture)
        picture.load()
    except Exception as error:  # PIL's errors for broken files have no common base class
        raise ValueError(str(error) or type(error).__name__) from None
    return picture if picture.mode in ("L", "RGB") else picture.convert("RGB")


def resize_image(encoded: bytes, short_side: int, quality: int) -> bytes | None:
    """Resize an image so that its shorter side has `short_side` pixels, and encode it as a JPEG.

    Return None if the image is already small enough. The filter and the EXIF rotation are the same as in
    onecurve.data.decode.
    """
    from PIL import Image

    picture = _decode_upright(encoded)
    width, height = picture.size
    old_short_side = min(width, height)
    if old_short_side <= short_side:
        return None
    new_size = (width * short_side // old_short_side, height * short_side // old_short_side)
    return _encode_jpeg(picture.resize(new_size, Image.Resampling.BILINEAR), quality)


def _encode_jpeg(picture, jpeg_quality: int) -> bytes:
    jpeg_buffer = BytesIO()
    picture.save(jpeg_buffer, "JPEG", quality=jpeg_quality)
    return jpeg_buffer.getvalue()
