"""Applies RandAugment (arXiv 1909.13719) to a batch on the device, following google-research/big_vision.

Each layer applies one of 16 operations to each image, with the same strength for all images. The operations
follow big_vision/pp/archive/autoaugment.py; most of them come from PIL. The result for an image does not
depend on the other images in the batch. Shifts and cut-outs scale with the image size, whereas big_vision
assumes 224 pixels.

Five operations call torchvision. The remaining operations are implemented in this file, because torchvision's
AutoContrast, Color, Contrast and Sharpness round differently, its affine transforms accept only one angle or
shift per batch, and it lacks SolarizeAdd and Cutout.
"""

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from .augment import LUMA, send_arrays

Factors = tuple[float | np.ndarray, ...]

DRAWN = 4  # columns of draws per sample and layer
GREY = 128  # fill value of all channels
EDGE = 224  # image size in pixels for which the constants of shifts and cut-outs are defined


def rand_augment(images: Tensor, draws: np.ndarray, layers: int, magnitude: float) -> Tensor:
    """Apply `layers` random operations to each image in sequence.

    Args:
        images: uint8 [B, H, W, 3].
        draws: float64 [B, >= 4 * layers] in [0, 1). Each layer uses four columns: the operation, the
            direction, and the row and column of a cut-out.
        layers: Number of operations per image.
        magnitude: Strength of the operations. 10 is strong; larger values are allowed.

    Returns:
        uint8 [B, H, W, 3].
    """
    strength, (h, w) = magnitude / 10, images.shape[1:3]
    parts = [draws[:, layer * DRAWN : (layer + 1) * DRAWN] for layer in range(layers)]
    plans = [_plan(part, h, w, strength) for part in parts]
    sent = send_arrays([array for _, arrays in plans for array in arrays], images.device)
    for layer, (counts, _) in enumerate(plans):
        order, inverse, factors, centers = sent[4 * layer : 4 * layer + 4]
        pieces = images.index_select(0, order).split(counts)
        results = [
            _applied(group, piece, strength, factors, centers) if len(piece) else piece
            for group, piece in zip(GROUPS, pieces, strict=True)
        ]
        images = torch.cat(results).index_select(0, inverse)
    return images


def _plan(draws: np.ndarray, h: int, w: int, strength: float) -> tuple[list[int], tuple[np.ndarray, ...]]:
    """Plan one layer's operations on a batch. Return the number of images in each group, and four arrays.

    The arrays are: the order of the images by group, int64 [B]; the inverse of this order, int64 [B]; the
    factors for _warped(), float32 [6, warped]; and the centers of the cut-out squares, int32 [cut out, 2].
    """
    operations = (draws[:, 0] * len(OPERATIONS)).astype(np.int64)
    group = _GROUP_OF[operations]
    order = np.argsort(group, kind="stable")
    factors = np.zeros((6, len(draws)))
    direction = np.where(draws[:, 1] < 0.5, -1.0, 1.0)
    for name, factors_of in WARPS.items():
        rows = operations == OPERATIONS.index(name)
        for row, factor in zip(factors, factors_of(h, w, strength, direction[rows]), strict=True):
            row[rows] = factor
    warped, cut_out = (order[group[order] == GROUPS.index(name)] for name in ("Warp", "Cutout"))
    centers = np.floor(draws[cut_out, 2:4] * (h, w)).astype(np.int32)
    counts = np.bincount(group, minlength=len(GROUPS)).tolist()
    return counts, (order, np.argsort(order), factors[:, warped].astype(np.float32), centers)


def _applied(group: str, images: Tensor, strength: float, factors: Tensor, centers: Tensor) -> Tensor:
    if group == "Warp":
        return _warped(images, factors)
    if group == "Cutout":
        return _cutout(images, strength, centers)
    return SIMPLE[group](images, strength)


def _torchvision(name: str, images: Tensor, *arguments: float) -> Tensor:
    """Call a function of torchvision.transforms.v2.functional, which expects [b, 3, H, W]."""
    from torchvision.transforms.v2 import functional  # takes seconds to import

    return getattr(functional, name)(images.movedim(3, 1), *arguments).movedim(1, 3)


# --- Operations: (uint8 [b, H, W, 3], strength >= 0) -> uint8 [b, H, W, 3]


def _auto_contrast(images: Tensor, strength: float) -> Tensor:
    """Stretch each channel, so that the darkest value becomes 0 and the brightest value becomes 255."""
    low, high = (f(images, dim=(1, 2), keepdim=True).float() for f in (torch.amin, torch.amax))
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
    return _blended(images, _luma(images), strength)


def _contrast(images: Tensor, strength: float) -> Tensor:
    h, w = images.shape[1:3]
    mean = _luma(images).int().sum((1, 2), keepdim=True) // (h * w)
    return _blended(images, mean, strength)


def _sharpness(images: Tensor, strength: float) -> Tensor:
    """Blend images with their 3 x 3 means. The center pixel has weight 5. Border pixels do not change."""
    h, w = images.shape[1:3]
    values = images.short()
    rows = values[:, :-2] + values[:, 1:-1] + values[:, 2:]
    total = rows[:, :, :-2] + rows[:, :, 1:-1] + rows[:, :, 2:] + 4 * values[:, 1:-1, 1:-1]
    smooth = images.clone()
    smooth[:, 1 : h - 1, 1 : w - 1] = (total // 13).to(torch.uint8)
    return _blended(images, smooth, strength)


def _cutout(images: Tensor, strength: float, centers: Tensor) -> Tensor:
    """Fill a square around a random center, clipped at the image border. `centers`: int32 [b, 2]."""
    h, w = images.shape[1:3]
    half = int(40 / EDGE * min(h, w) * strength)
    y, x = (torch.arange(n, device=images.device, dtype=torch.int32) for n in (h, w))
    rows, columns = (
        (i >= center - half) & (i < center + half) for i, center in ((y, centers[:, :1]), (x, centers[:, 1:]))
    )
    return images.masked_fill((rows[:, :, None] & columns[:, None, :])[..., None], GREY)


SIMPLE = {
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
# is one number for all images or an array with one number per image


def _rotate(h: int, w: int, strength: float, direction: np.ndarray) -> Factors:
    angle = np.radians(30 * strength) * direction
    cos, sin = np.cos(angle), np.sin(angle)
    y, x = (h - 1) / 2, (w - 1) / 2
    return cos, -sin, x - cos * x + sin * y, sin, cos, y - sin * x - cos * y


WARPS: dict[str, Callable[[int, int, float, np.ndarray], Factors]] = {
    "Rotate": _rotate,
    "ShearX": lambda h, w, strength, direction: (1, 0.3 * strength * direction, 0, 0, 1, 0),
    "ShearY": lambda h, w, strength, direction: (1, 0, 0, 0.3 * strength * direction, 1, 0),
    "TranslateX": lambda h, w, strength, direction: (1, 0, 100 / EDGE * w * strength * direction, 0, 1, 0),
    "TranslateY": lambda h, w, strength, direction: (1, 0, 0, 0, 1, 100 / EDGE * h * strength * direction),
}

# A random number selects an operation by its index in this list.
OPERATIONS = (
    "AutoContrast", "Equalize", "Invert", "Rotate", "Posterize", "Solarize", "Color", "Contrast",
    "Brightness", "Sharpness", "ShearX", "ShearY", "TranslateX", "TranslateY", "Cutout", "SolarizeAdd",
)  # fmt: skip
# All images of a group are processed together. The warps form a single group, which needs fewer kernels on a
# GPU.
GROUPS = (*SIMPLE, "Cutout", "Warp")
_GROUP_OF = np.array([GROUPS.index("Warp" if name in WARPS else name) for name in OPERATIONS])


def _luma(images: Tensor) -> Tensor:
    """Return the brightness of each pixel according to ITU-R 601-2: uint8 [b, H, W, 1]."""
    red, green, blue = images.float().unbind(3)
    return (LUMA[0] * red + LUMA[1] * green + LUMA[2] * blue).round_().to(torch.uint8)[..., None]


def _blended(images: Tensor, others: Tensor, strength: float) -> Tensor:
    """Interpolate or extrapolate from `others` to the images by _factor(strength)."""
    others = others.float()
    return _clip(others + _factor(strength) * (images - others))


def _factor(strength: float) -> float:
    """Return the factor for PIL's ImageEnhance: 0 gives a black, grey or smooth image, 1 the original."""
    return 1.8 * strength + 0.1


def _clip(values: Tensor) -> Tensor:
    return values.clamp(0, 255).to(torch.uint8)


def _warped(images: Tensor, factors: Tensor) -> Tensor:
    """Set each pixel (x, y) to the pixel nearest to (a x + b y + c, d x + e y + f), or GREY outside the
    image.

    factors: float32 [6, b], the factors a to f of each image.
    """
    b, h, w, _ = images.shape
    factors = factors[:, :, None, None]
    x = torch.arange(w, device=images.device).float()
    y = torch.arange(h, device=images.device).float()[:, None]
    columns = (factors[0] * x + factors[1] * y + factors[2] + 0.5).floor_().long()  # [b, H, W]
    rows = (factors[3] * x + factors[4] * y + factors[5] + 0.5).floor_().long()
    is_inside = (columns >= 0) & (columns < w) & (rows >= 0) & (rows < h)
    first = torch.arange(b, device=images.device)[:, None, None] * (h * w)
    pixels = first + rows.clamp_(0, h - 1) * w + columns.clamp_(0, w - 1)
    sampled = images.reshape(-1, 3).index_select(0, pixels.view(-1)).view(images.shape)
    return torch.where(is_inside[..., None], sampled, GREY)
