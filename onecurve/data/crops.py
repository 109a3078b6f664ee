"""Crops of decoded images, for training and evaluation."""

import math

import numpy as np

from onecurve.models.preprocessing import IMAGENET_CROP, LEGACY, Crop

CROP_SCALE = (0.08, 1.0)  # range of a random crop's area, as a fraction of the image's area
MIN_BOX_ASPECT, MAX_BOX_ASPECT = 3 / 4, 4 / 3  # aspect ratios (width / height) of random crops
MAX_ASPECT_RATIO = 64  # largest aspect ratio at which the whole image is resized; longer images are cut first
MAX_SIDE = 2**16  # maximum height and width in pixels of an image that is resized


def random_resized_crop(
    image: np.ndarray,
    crop_size: int,
    random_numbers: np.ndarray,
    interpolation: str = "bilinear",
    area_range: tuple[float, ...] = CROP_SCALE,
) -> np.ndarray:
    """Return a random resized crop as used to train Inception (Szegedy et al. 2014).

    Args:
        image: Pixels, uint8 [H, W, 3].
        crop_size: Height and width of the result.
        random_numbers: Random numbers in [0, 1), float64 [40], four for each attempt of `random_box`.
        interpolation: `bilinear` or `bicubic`. PIL resizes bicubic crops, as in timm's training.
        area_range: Minimum and maximum area of the crop, as fractions of the image's area.

    Returns:
        Pixels, uint8 [crop_size, crop_size, 3].
    """
    height, width = image.shape[:2]
    top, left, box_height, box_width = random_box(height, width, random_numbers, area_range)
    box_pixels = image[top : top + box_height, left : left + box_width]
    resize = _resize_by_pil if interpolation == "bicubic" else _resize_by_torch
    return resize(box_pixels, crop_size, crop_size, interpolation)


def random_box(
    height: int, width: int, random_numbers: np.ndarray, area_range: tuple[float, ...] = CROP_SCALE
) -> tuple[int, int, int, int]:
    """Return the top, left, height and width of torchvision's RandomResizedCrop, in pixels.

    Each of ten attempts draws an area and an aspect ratio from 3/4 to 4/3. If no drawn box fits into the
    image, the result is the largest central box with an aspect ratio in this range.

    Args:
        height: Height of the image in pixels.
        width: Width of the image in pixels.
        random_numbers: Random numbers in [0, 1), float64 [40], four for each attempt.
        area_range: Minimum and maximum area of the box, as fractions of the image's area.
    """
    min_area, max_area = area_range
    min_log_aspect, max_log_aspect = math.log(MIN_BOX_ASPECT), math.log(MAX_BOX_ASPECT)
    for random_area, random_aspect, random_top, random_left in random_numbers.reshape(-1, 4):
        box_area = height * width * (min_area + (max_area - min_area) * random_area)
        box_aspect = math.exp(min_log_aspect + random_aspect * (max_log_aspect - min_log_aspect))
        box_height = round(math.sqrt(box_area / box_aspect))
        box_width = round(math.sqrt(box_area * box_aspect))
        if 0 < box_width <= width and 0 < box_height <= height:
            top = int(random_top * (height - box_height + 1))
            left = int(random_left * (width - box_width + 1))
            return top, left, box_height, box_width
    # Largest central box with an aspect ratio from 3/4 to 4/3
    box_height, box_width = min(height, round(width * 4 / 3)), min(width, round(height * 4 / 3))
    top, left = (height - box_height) // 2, (width - box_width) // 2
    return top, left, box_height, box_width


def evaluation_crop(image: np.ndarray, crop_size: int, crop: Crop = IMAGENET_CROP) -> np.ndarray:
    """Resize and crop an image like timm's `transforms_imagenet_eval`.

    The default crop is the usual one for ImageNet, which resizes the shorter side to crop_size * 256 / 224
    and keeps the central square.

    Args:
        image: Pixels, uint8 [H, W, 3].
        crop_size: Height and width of the result.
        crop: Crop mode, interpolation and scale.

    Returns:
        Pixels, uint8 [crop_size, crop_size, 3].
    """
    scaled_side = crop.scaled(crop_size)  # length of the shorter, longer or both sides after resizing
    if crop.crop_mode == "center":
        image = _cut_ends(image)
        height, width = image.shape[:2]
        if height <= width:
            scaled_height, scaled_width = scaled_side, scaled_side * width // height
        else:
            scaled_height, scaled_width = scaled_side * height // width, scaled_side
    elif crop.crop_mode == "squash":
        scaled_height, scaled_width = scaled_side, scaled_side
        image = _skip_extra_pixels(image)
    else:  # "border" resizes the longer side. The shorter side is padded later
        longer_side = max(image.shape[:2])
        scaled_height, scaled_width = (
            max(1, round(side * scaled_side / longer_side)) for side in image.shape[:2]
        )
        image = _skip_extra_pixels(image)
    resize = _resize_by_torch if crop.interpolation == LEGACY else _resize_by_pil
    scaled_image = resize(image, scaled_height, scaled_width, crop.filter)
    if crop.crop_mode == "border":
        scaled_image = _pad_to_min_side(scaled_image, crop_size, crop.fill)
    top, left = (round((side - crop_size) / 2) for side in scaled_image.shape[:2])
    return scaled_image[top : top + crop_size, left : left + crop_size]


def _pad_to_min_side(image: np.ndarray, min_side: int, fill_colour: tuple[int, ...]) -> np.ndarray:
    """Add a border to an image so that both sides are at least `min_side` pixels long."""
    height, width = image.shape[:2]
    top_border, left_border = (max(0, min_side - side) // 2 for side in (height, width))
    padded_image = np.full((max(height, min_side), max(width, min_side), 3), fill_colour, np.uint8)
    padded_image[top_border : top_border + height, left_border : left_border + width] = image
    return padded_image


def _cut_ends(image: np.ndarray) -> np.ndarray:
    """Cut off both ends of an image whose longer side exceeds MAX_ASPECT_RATIO times its shorter side.

    Resizing a whole image of 60,000 x 1 pixels would take 11 GB of memory. The removed length is an even
    multiple of the shorter side, so that the pixels of the final crop do not change.
    """
    height, width = image.shape[:2]
    short_side, long_side = sorted((height, width))
    # Cut the same even number of squares at each end, so that at least MAX_ASPECT_RATIO squares remain.
    cut_length = max(0, (long_side // short_side - MAX_ASPECT_RATIO) // 4) * 2 * short_side  # at each end
    if height > width:
        return image[cut_length : height - cut_length]
    return image[:, cut_length : width - cut_length]


def _skip_extra_pixels(image: np.ndarray) -> np.ndarray:
    """Keep every k-th row and column of an image so that neither side exceeds 65,536 pixels.

    The interpolation weights for a longer side would take gigabytes of memory.
    """
    row_step, column_step = (math.ceil(side / MAX_SIDE) for side in image.shape[:2])
    return image[::row_step, ::column_step]


def _resize_by_torch(image: np.ndarray, new_height: int, new_width: int, interpolation: str) -> np.ndarray:
    """Resize uint8 pixels with antialiasing. Bilinear pixels differ from PIL's by at most 1 of 255."""
    import torch
    import torch.nn.functional as F

    # The tensor has shape [1, 3, H, W] and is channels last in memory. Adding the batch dimension after the
    # permutation would change the strides, so torch would use a kernel that computes the same pixels but
    # takes more than twice as long.
    image_batch = torch.from_numpy(image)[None].permute(0, 3, 1, 2)
    resized_batch = F.interpolate(image_batch, (new_height, new_width), mode=interpolation, antialias=True)
    return resized_batch[0].permute(1, 2, 0).numpy()


def _resize_by_pil(image: np.ndarray, new_height: int, new_width: int, interpolation: str) -> np.ndarray:
    """Resize uint8 pixels with PIL, like timm.

    torch's bicubic pixels differ from PIL's by up to 11 of 255 in crops that Pillow 13 resizes vertically
    before horizontally. Decoding and cropping a photo takes 1.7 times as much CPU time with PIL's bicubic
    interpolation as with torch's bilinear interpolation (benchmarks/decoding.py).
    """
    from PIL import Image

    resampling = Image.Resampling[interpolation.upper()]
    resized_image = Image.fromarray(image).resize((new_width, new_height), resampling)
    return np.array(resized_image)  # a copy, because torch warns about read-only memory
