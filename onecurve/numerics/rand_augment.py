"""Applies RandAugment (arXiv 1909.13719) to a batch on the device, following google-research/big_vision.

Each layer applies one of 16 operations to each image, with the same strength for all images. The operations
follow big_vision/pp/archive/autoaugment.py and mostly originate in PIL. The result for an image does not
depend on the other images in the batch. Shifts and cut-outs scale with the image size, whereas big_vision
assumes 224 pixels.

Five operations call torchvision. The remaining operations are implemented in this file for three reasons.
torchvision's AutoContrast, Color, Contrast and Sharpness round differently. The affine transforms in
torchvision accept only one angle or shift per batch. SolarizeAdd and Cutout are missing from torchvision.
"""

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from .augment import LUMA, send_arrays

WarpFactors = tuple[float | np.ndarray, ...]

LAYER_DRAWS = 4  # number of random numbers per sample and layer
GREY = 128  # value of all channels in filled areas
EDGE = 224  # image size in pixels to which the constants of shifts and cut-outs refer


def rand_augment(images: Tensor, draws: np.ndarray, layers: int, magnitude: float) -> Tensor:
    """Apply `layers` random operations to each image in sequence.

    Args:
        images: Pixels, uint8 [B, H, W, 3].
        draws: Random numbers, float64 [B, >= 4 * layers] in [0, 1). The four columns of a layer determine the
            operation, the direction, and the row and column of a cut-out.
        layers: Number of operations per image.
        magnitude: Strength of the operations. A magnitude of 10 is strong, and larger magnitudes are allowed.

    Returns:
        Augmented pixels, uint8 [B, H, W, 3].
    """
    strength, (h, w) = magnitude / 10, images.shape[1:3]
    layer_draws = [draws[:, layer * LAYER_DRAWS : (layer + 1) * LAYER_DRAWS] for layer in range(layers)]
    plans = [_plan(draws_of_layer, h, w, strength) for draws_of_layer in layer_draws]
    sent = send_arrays([array for _, arrays in plans for array in arrays], images.device)
    for layer, (counts, _) in enumerate(plans):
        order, inverse, factors, centers = sent[4 * layer : 4 * layer + 4]
        group_images = images.index_select(0, order).split(counts)
        augmented = [
            _apply_group(group, subset, strength, factors, centers) if len(subset) else subset
            for group, subset in zip(GROUP_NAMES, group_images, strict=True)
        ]
        images = torch.cat(augmented).index_select(0, inverse)
    return images


def _plan(draws: np.ndarray, h: int, w: int, strength: float) -> tuple[list[int], tuple[np.ndarray, ...]]:
    """Plan one layer's operations, and return the number of images in each group and four arrays.

    The arrays contain the order of the images by group (int64 [B]), the inverse of this order (int64 [B]),
    the factors for _warped() (float32 [6, warped]), and the centers of the cut-out squares (int32 [cut out,
    2]).
    """
    operations = (draws[:, 0] * len(OPERATIONS)).astype(np.int64)
    group = _GROUP_OF[operations]
    order = np.argsort(group, kind="stable")
    factors = np.zeros((6, len(draws)))
    direction = np.where(draws[:, 1] < 0.5, -1.0, 1.0)
    for name, factors_of in WARPS.items():
        is_warped = operations == OPERATIONS.index(name)
        for factor_row, factor in zip(factors, factors_of(h, w, strength, direction[is_warped]), strict=True):
            factor_row[is_warped] = factor
    warped, cut_out = (order[group[order] == GROUP_NAMES.index(name)] for name in ("Warp", "Cutout"))
    centers = np.floor(draws[cut_out, 2:4] * (h, w)).astype(np.int32)
    counts = np.bincount(group, minlength=len(GROUP_NAMES)).tolist()
    return counts, (order, np.argsort(order), factors[:, warped].astype(np.float32), centers)


def _apply_group(group: str, images: Tensor, strength: float, factors: Tensor, centers: Tensor) -> Tensor:
    if group == "Warp":
        return _warped(images, factors)
    if group == "Cutout":
        return _cutout(images, strength, centers)
    return SIMPLE_OPERATIONS[group](images, strength)


def _torchvision(name: str, images: Tensor, *arguments: float) -> Tensor:
    """Call a function of torchvision.transforms.v2.functional, which expects [b, 3, H, W]."""
    from torchvision.transforms.v2 import functional  # takes seconds to import

    return getattr(functional, name)(images.movedim(3, 1), *arguments).movedim(1, 3)


# --- Operations: (uint8 [b, H, W, 3], strength >= 0) -> uint8 [b, H, W, 3]


def _auto_contrast(images: Tensor, strength: float) -> Tensor:
    """Stretch each channel so that its darkest value becomes 0 and its brightest value becomes 255."""
    low, high = (reduce(images, dim=(1, 2), keepdim=True).float() for reduce in (torch.amin, torch.amax))
    scale = 255 / (high - low)
    return torch.where(high > low, _clip(images * scale - low * scale), images)


def _posterize(images: Tensor, strength: float) -> Tensor:
    """Keep only the upper bits of each pixel value."""
    return _torchvision("posterize", images, min(8, int(4 * strength)))


def _solarize(images: Tensor, strength: float) -> Tensor:
    """Invert pixels above a threshold."""
    threshold = int(256 * strength)
    return _torchvision("solarize", images, threshold) if threshold <= 255 else images


def _solarize_add(images: Tensor, strength: float) -> Tensor:
    """Brighten dark pixels by adding a constant."""
    brighter = (images.short() + int(110 * strength)).clamp(max=255).to(torch.uint8)
    return torch.where(images < 128, brighter, images)


def _color(images: Tensor, strength: float) -> Tensor:
    return _blended(images, _brightness(images), strength)


def _contrast(images: Tensor, strength: float) -> Tensor:
    h, w = images.shape[1:3]
    mean = _brightness(images).int().sum((1, 2), keepdim=True) // (h * w)
    return _blended(images, mean, strength)


def _sharpness(images: Tensor, strength: float) -> Tensor:
    """Blend images with 3 x 3 means that weight the center pixel by 5. Border pixels do not change."""
    h, w = images.shape[1:3]
    values = images.short()
    rows = values[:, :-2] + values[:, 1:-1] + values[:, 2:]
    total = rows[:, :, :-2] + rows[:, :, 1:-1] + rows[:, :, 2:] + 4 * values[:, 1:-1, 1:-1]
    smooth = images.clone()
    smooth[:, 1 : h - 1, 1 : w - 1] = (total // 13).to(torch.uint8)
    return _blended(images, smooth, strength)


def _cutout(images: Tensor, strength: float, centers: Tensor) -> Tensor:
    """Fill a square around each center (int32 [b, 2]) with GREY, clipped at the image border."""
    h, w = images.shape[1:3]
    half = int(40 / EDGE * min(h, w) * strength)
    y, x = (torch.arange(edge, device=images.device, dtype=torch.int32) for edge in (h, w))
    rows, columns = (
        (positions >= center - half) & (positions < center + half)
        for positions, center in ((y, centers[:, :1]), (x, centers[:, 1:]))
    )
    return images.masked_fill((rows[:, :, None] & columns[:, None, :])[..., None], GREY)


SIMPLE_OPERATIONS = {
    "AutoContrast": _auto_contrast,
    "Equalize": lambda images, strength: _torchvision("equalize", images),
    "Invert": lambda images, strength: _torchvision("invert", images),
    "Posterize": _posterize,
    "Solarize": _solarize,
    "Color": _color,
    "Contrast": _contrast,
    "Brightness": lambda images, strength: _torchvision("adjust_brightness", images, _factor(strength)),
    "Sharpness": _sharpness,
    "SolarizeAdd": _solarize_add,
}

# --- Warps: (height, width, strength, direction float64 [b]) -> the six factors for _warped(), each of which
# is a number for all images or an array with one number per image


def _rotate(h: int, w: int, strength: float, direction: np.ndarray) -> WarpFactors:
    angle = np.radians(30 * strength) * direction
    cos, sin = np.cos(angle), np.sin(angle)
    y, x = (h - 1) / 2, (w - 1) / 2
    return cos, -sin, x - cos * x + sin * y, sin, cos, y - sin * x - cos * y


WARPS: dict[str, Callable[[int, int, float, np.ndarray], WarpFactors]] = {
    "Rotate": _rotate,
    "ShearX": lambda h, w, strength, direction: (1, 0.3 * strength * direction, 0, 0, 1, 0),
    "ShearY": lambda h, w, strength, direction: (1, 0, 0, 0.3 * strength * direction, 1, 0),
    "TranslateX": lambda h, w, strength, direction: (1, 0, 100 / EDGE * w * strength * direction, 0, 1, 0),
    "TranslateY": lambda h, w, strength, direction: (1, 0, 0, 0, 1, 100 / EDGE * h * strength * direction),
}

# Operations in the order of the indices that random numbers select
OPERATIONS = (
    "AutoContrast", "Equalize", "Invert", "Rotate", "Posterize", "Solarize", "Color", "Contrast",
    "Brightness", "Sharpness", "ShearX", "ShearY", "TranslateX", "TranslateY", "Cutout", "SolarizeAdd",
)  # fmt: skip
# Groups of operations whose images are processed together. The warps form a single group, which reduces the
# number of kernel launches on a GPU.
GROUP_NAMES = (*SIMPLE_OPERATIONS, "Cutout", "Warp")
_GROUP_OF = np.array([GROUP_NAMES.index("Warp" if name in WARPS else name) for name in OPERATIONS])


def _brightness(images: Tensor) -> Tensor:
    """Return each pixel's brightness according to ITU-R 601-2: uint8 [b, H, W, 1]."""
    red, green, blue = images.float().unbind(3)
    return (LUMA[0] * red + LUMA[1] * green + LUMA[2] * blue).round_().to(torch.uint8)[..., None]


def _blended(images: Tensor, blend_images: Tensor, strength: float) -> Tensor:
    """Blend `blend_images` (factor 0) with the images (factor 1) by _factor(strength), which may exceed 1."""
    blend_images = blend_images.float()
    return _clip(blend_images + _factor(strength) * (images - blend_images))


def _factor(strength: float) -> float:
    """Return PIL's ImageEnhance factor, where 1 keeps the image and 0 removes, for example, its contrast."""
    return 1.8 * strength + 0.1


def _clip(values: Tensor) -> Tensor:
    return values.clamp(0, 255).to(torch.uint8)


def _warped(images: Tensor, factors: Tensor) -> Tensor:
    """Copy the pixel nearest to (a x + b y + c, d x + e y + f) to each position (x, y).

    Positions whose source lies outside the image become GREY. `factors` contains a to f of each image,
    float32 [6, b].
    """
    b, h, w, _ = images.shape
    factors = factors[:, :, None, None]
    x = torch.arange(w, device=images.device).float()
    y = torch.arange(h, device=images.device).float()[:, None]
    columns = (factors[0] * x + factors[1] * y + factors[2] + 0.5).floor_().long()  # [b, H, W]
    rows = (factors[3] * x + factors[4] * y + factors[5] + 0.5).floor_().long()
    is_inside = (columns >= 0) & (columns < w) & (rows >= 0) & (rows < h)
    first_pixels = torch.arange(b, device=images.device)[:, None, None] * (h * w)
    pixels = first_pixels + rows.clamp_(0, h - 1) * w + columns.clamp_(0, w - 1)
    sampled = images.reshape(-1, 3).index_select(0, pixels.view(-1)).view(images.shape)
    return torch.where(is_inside[..., None], sampled, GREY)
