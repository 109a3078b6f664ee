"""Crops of decoded images, for training and evaluation."""

import math

import numpy as np

from onecurve.models.preprocessing import IMAGENET_CROP, LEGACY, Crop

CROP_SCALE = (0.08, 1.0)  # area of a random crop, as a share of the image's
LONGEST = 64  # a longer image, as a multiple of its shorter side, is cut before it is scaled


def random_resized_crop(
    image: np.ndarray,
    size: int,
    draws: np.ndarray,
    interpolation: str = "bilinear",
    scale: tuple[float, ...] = CROP_SCALE,
) -> np.ndarray:
    """Return Inception's random crop (Szegedy et al. 2014), uint8 [size, size, 3].

    Equals torchvision's RandomResizedCrop: an aspect ratio of 3/4 to 4/3 and ten attempts, then the largest
    central crop within these ratios. draws: float64 [40] in [0, 1), four for each attempt. scale: the
    smallest and the largest area of the crop, as shares of the image's area.
    """
    height, width = image.shape[:2]
    smallest, largest = scale
    for area, ratio, down, right in draws.reshape(-1, 4):
        target = height * width * (smallest + (largest - smallest) * area)
        aspect = math.exp(math.log(3 / 4) + ratio * (math.log(4 / 3) - math.log(3 / 4)))
        w, h = round(math.sqrt(target * aspect)), round(math.sqrt(target / aspect))
        if 0 < w <= width and 0 < h <= height:
            top, left = int(down * (height - h + 1)), int(right * (width - w + 1))
            break
    else:
        w, h = min(width, round(height * 4 / 3)), min(height, round(width * 4 / 3))
        top, left = (height - h) // 2, (width - w) // 2
    return _resize(image[top : top + h, left : left + w], size, size, interpolation)


def evaluation_crop(image: np.ndarray, size: int, crop: Crop = IMAGENET_CROP) -> np.ndarray:
    """Return an evaluation's crop, uint8 [size, size, 3], as timm's `transforms_imagenet_eval` makes it.

    The default is ImageNet's usual crop: shorter side to size * 256 / 224, then the middle.
    """
    length = crop.scaled(size)
    if crop.crop_mode == "center":
        height, width = (image := _without_ends(image)).shape[:2]
        h, w = (length, length * width // height) if height <= width else (length * height // width, length)
    else:
        longest = max(image.shape)
        h, w = (max(1, round(side * length / longest)) for side in image.shape[:2])
        h, w = (length, length) if crop.crop_mode == "squash" else (h, w)
        image = _without_most(image)
    resize = _resize if crop.interpolation == LEGACY else _resize_by_pil
    scaled = resize(image, h, w, crop.filter)
    if crop.crop_mode == "border":
        top, left = (max(0, size - side) // 2 for side in (h, w))
        padded = np.full((max(h, size), max(w, size), 3), crop.fill, np.uint8)
        padded[top : top + h, left : left + w] = scaled
        scaled, (h, w) = padded, padded.shape[:2]
    top, left = round((h - size) / 2), round((w - size) / 2)
    return scaled[top : top + size, left : left + size]


def _without_ends(image: np.ndarray) -> np.ndarray:
    """Cuts the ends off an image that is longer than LONGEST times its shorter side.

    Scaled as a whole, one of 60,000 x 1 pixels would take 11 GB. An even multiple of the shorter side keeps
    the crop's pixels.
    """
    height, width = image.shape[:2]
    short, long = sorted((height, width))
    cut = max(0, (long // short - LONGEST) // 4) * 2 * short  # at each end
    return image[cut : height - cut] if height > width else image[:, cut : width - cut]


def _without_most(image: np.ndarray) -> np.ndarray:
    """Keep every k-th row or column of an image of many times 65,536, whose weights would take gigabytes."""
    height, width = (-(-side // 2**16) for side in image.shape[:2])
    return image[::height, ::width]


def _resize(image: np.ndarray, height: int, width: int, interpolation: str = "bilinear") -> np.ndarray:
    """Resize uint8 pixels with antialiasing, as PIL and torchvision do.

    The pixels of photographs are within 1 of PIL's, except for one value in two million, which is within 2.
    """
    import torch
    import torch.nn.functional as F

    # [1, 3, H, W], channels last in memory. A batch added after the permutation would have another stride,
    # and torch would take a path that is more than twice as slow, to the same pixels.
    pixels = torch.from_numpy(image)[None].permute(0, 3, 1, 2)
    pixels = F.interpolate(pixels, (height, width), mode=interpolation, antialias=True)
    return pixels[0].permute(1, 2, 0).numpy()


def _resize_by_pil(image: np.ndarray, height: int, width: int, interpolation: str) -> np.ndarray:
    """Resize uint8 pixels exactly as in the evaluations that published accuracies come from.

    Decoding a photograph and resizing it takes twice the time that it takes with _resize.
    """
    from PIL import Image

    scaled = Image.fromarray(image).resize((width, height), Image.Resampling[interpolation.upper()])
    return np.array(scaled)  # writable, as torch asks
