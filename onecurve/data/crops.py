"""Crops of decoded images, for training and evaluation."""

import math

import numpy as np

from onecurve.models.preprocessing import IMAGENET_CROP, LEGACY, Crop

CROP_SCALE = (0.08, 1.0)  # range of a random crop's area, as a fraction of the image's area
MAX_ASPECT_RATIO = 64  # largest aspect ratio at which the whole image is resized; longer images are cut first


def random_resized_crop(
    image: np.ndarray,
    size: int,
    draws: np.ndarray,
    interpolation: str = "bilinear",
    scale: tuple[float, ...] = CROP_SCALE,
) -> np.ndarray:
    """Return a random resized crop as used to train Inception (Szegedy et al. 2014).

    Args:
        image: Pixels, uint8 [H, W, 3].
        size: Height and width of the result.
        draws: Random numbers in [0, 1), float64 [40], four for each attempt of `random_box`.
        interpolation: `bilinear` or `bicubic`. PIL resizes bicubic crops, as in timm's training.
        scale: Minimum and maximum area of the crop, as fractions of the image's area.

    Returns:
        Pixels, uint8 [size, size, 3].
    """
    top, left, box_height, box_width = random_box(image.shape[0], image.shape[1], draws, scale)
    resize = _resize_by_pil if interpolation == "bicubic" else _resize_by_torch
    return resize(image[top : top + box_height, left : left + box_width], size, size, interpolation)


def random_box(
    height: int, width: int, draws: np.ndarray, scale: tuple[float, ...] = CROP_SCALE
) -> tuple[int, int, int, int]:
    """Return the top, left, height and width of torchvision's RandomResizedCrop, in pixels.

    Each of ten attempts draws an area and an aspect ratio from 3/4 to 4/3. If no drawn box fits into the
    image, the result is the largest central box with an aspect ratio in this range.
    """
    smallest, largest = scale
    for area, ratio, down, right in draws.reshape(-1, 4):
        target_area = height * width * (smallest + (largest - smallest) * area)
        aspect = math.exp(math.log(3 / 4) + ratio * (math.log(4 / 3) - math.log(3 / 4)))
        box_width, box_height = round(math.sqrt(target_area * aspect)), round(math.sqrt(target_area / aspect))
        if 0 < box_width <= width and 0 < box_height <= height:
            return (
                int(down * (height - box_height + 1)),
                int(right * (width - box_width + 1)),
                box_height,
                box_width,
            )
    box_width, box_height = min(width, round(height * 4 / 3)), min(height, round(width * 4 / 3))
    return (height - box_height) // 2, (width - box_width) // 2, box_height, box_width


def evaluation_crop(image: np.ndarray, size: int, crop: Crop = IMAGENET_CROP) -> np.ndarray:
    """Return the evaluation crop of timm's `transforms_imagenet_eval`, uint8 [size, size, 3].

    The default crop is the usual one for ImageNet, which resizes the shorter side to size * 256 / 224 and
    keeps the central square.
    """
    length = crop.scaled(size)
    if crop.crop_mode == "center":
        height, width = (image := _without_ends(image)).shape[:2]
        h, w = (length, length * width // height) if height <= width else (length * height // width, length)
    else:
        longest = max(image.shape)
        h, w = (max(1, round(side * length / longest)) for side in image.shape[:2])
        h, w = (length, length) if crop.crop_mode == "squash" else (h, w)
        image = _without_extra_pixels(image)
    resize = _resize_by_torch if crop.interpolation == LEGACY else _resize_by_pil
    scaled = resize(image, h, w, crop.filter)
    if crop.crop_mode == "border":
        top, left = (max(0, size - side) // 2 for side in (h, w))
        padded = np.full((max(h, size), max(w, size), 3), crop.fill, np.uint8)
        padded[top : top + h, left : left + w] = scaled
        scaled, (h, w) = padded, padded.shape[:2]
    top, left = round((h - size) / 2), round((w - size) / 2)
    return scaled[top : top + size, left : left + size]


def _without_ends(image: np.ndarray) -> np.ndarray:
    """Cut off both ends of an image whose longer side exceeds MAX_ASPECT_RATIO times its shorter side.

    Resizing a whole image of 60,000 x 1 pixels would take 11 GB of memory. The removed length is an even
    multiple of the shorter side, so that the pixels of the final crop do not change.
    """
    height, width = image.shape[:2]
    short, long = sorted((height, width))
    cut = max(0, (long // short - MAX_ASPECT_RATIO) // 4) * 2 * short  # at each end
    return image[cut : height - cut] if height > width else image[:, cut : width - cut]


def _without_extra_pixels(image: np.ndarray) -> np.ndarray:
    """Keep every k-th row and column of an image so that neither side exceeds 65,536 pixels.

    The interpolation weights for a longer side would take gigabytes of memory.
    """
    row_step, column_step = (-(-side // 2**16) for side in image.shape[:2])
    return image[::row_step, ::column_step]


def _resize_by_torch(image: np.ndarray, height: int, width: int, interpolation: str) -> np.ndarray:
    """Resize uint8 pixels with antialiasing. Bilinear pixels differ from PIL's by at most 1 of 255."""
    import torch
    import torch.nn.functional as F

    # The tensor has shape [1, 3, H, W] and is channels last in memory. Adding the batch dimension after the
    # permutation would change the strides, so torch would use a kernel that computes the same pixels but
    # takes more than twice as long.
    pixels = torch.from_numpy(image)[None].permute(0, 3, 1, 2)
    pixels = F.interpolate(pixels, (height, width), mode=interpolation, antialias=True)
    return pixels[0].permute(1, 2, 0).numpy()


def _resize_by_pil(image: np.ndarray, height: int, width: int, interpolation: str) -> np.ndarray:
    """Resize uint8 pixels with PIL, like timm.

    torch's bicubic pixels differ from PIL's by up to 11 of 255 in crops that Pillow 13 resizes vertically
    before horizontally. Decoding and cropping a photo takes 1.7 times as much CPU time with PIL's bicubic
    interpolation as with torch's bilinear interpolation (benchmarks/decoding.py).
    """
    from PIL import Image

    scaled = Image.fromarray(image).resize((width, height), Image.Resampling[interpolation.upper()])
    return np.array(scaled)  # a copy, because torch warns about read-only memory
