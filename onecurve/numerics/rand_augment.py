"""RandAugment (arXiv 1909.13719) of a batch on the device, after github.com/google-research/big_vision.

Each layer applies one of 16 operations to each image, with one strength for all. The operations are those
of big_vision/pp/archive/autoaugment.py, most of them PIL's. An image's result does not depend on the other
images of the batch. Shifts and cut-outs scale with the image size, while theirs are for 224 pixels.

Five operations are torchvision's. The others are ours: torchvision's AutoContrast, Color, Contrast and
Sharpness round differently, its affine transforms take one angle or shift for the whole batch, and it has no
SolarizeAdd and no Cutout.
"""

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from .augment import LUMA, send_arrays

Factors = tuple[float | np.ndarray, ...]

DRAWN = 4  # columns of a sample's draws per layer
GREY = 128  # the fill colour
EDGE = 224  # pixels: the image size for which shifts and cut-outs are given


def rand_augment(images: Tensor, draws: np.ndarray, layers: int, magnitude: float) -> Tensor:
    """Applies `layers` random operations to each image, one after another.

    images: uint8 [B, H, W, 3]. draws: float64 [B, >= 4 * layers] in [0, 1); each layer uses four: operation,
    direction, and row and column of a cut-out. magnitude: 10 is strong, more is possible.
    Returns uint8 [B, H, W, 3].
    """
    strength, (h, w) = magnitude / 10, images.shape[1:3]
    parts = [draws[:, layer * DRAWN : (layer + 1) * DRAWN] for layer in range(layers)]
    plans = [_plan(part, h, w, strength) for part in parts]
    sent = send_arrays([array for _, arrays in plans for array in arrays], images.device)
    for layer, (counts, _) in enumerate(plans):
        order, back, factors, middles = sent[4 * layer : 4 * layer + 4]
        pieces = images.index_select(0, order).split(counts)
        done = [
            _applied(group, piece, strength, factors, middles) if len(piece) else piece
            for group, piece in zip(GROUPS, pieces, strict=True)
        ]
        images = torch.cat(done).index_select(0, back)
    return images


def _plan(draws: np.ndarray, h: int, w: int, strength: float) -> tuple[list[int], tuple[np.ndarray, ...]]:
    """One layer's operations on a batch: the number of images in each of GROUPS, and four arrays.

    int64 [B] each: the order of the images by group, and its inverse; float32 [6, warped]: factors of
    _warped; int32 [cut out, 2]: middles of the squares.
    """
    chosen = (draws[:, 0] * len(OPERATIONS)).astype(np.int64)
    group = _GROUP_OF[chosen]
    order = np.argsort(group, kind="stable")
    factors = np.zeros((6, len(draws)))
    direction = np.where(draws[:, 1] < 0.5, -1.0, 1.0)
    for name, factors_of in WARPS.items():
        rows = chosen == OPERATIONS.index(name)
        for row, factor in zip(factors, factors_of(h, w, strength, direction[rows]), strict=True):
            row[rows] = factor
    warped, cut_out = (order[group[order] == GROUPS.index(name)] for name in ("Warp", "Cutout"))
    middles = np.floor(draws[cut_out, 2:4] * (h, w)).astype(np.int32)
    counts = np.bincount(group, minlength=len(GROUPS)).tolist()
    return counts, (order, np.argsort(order), factors[:, warped].astype(np.float32), middles)


def _applied(group: str, images: Tensor, strength: float, factors: Tensor, middles: Tensor) -> Tensor:
    if group == "Warp":
        return _warped(images, factors)
    if group == "Cutout":
        return _cutout(images, strength, middles)
    return SIMPLE[group](images, strength)


def _torchvision(name: str, images: Tensor, *arguments: float) -> Tensor:
    """Calls a function of torchvision.transforms.v2.functional, which takes [b, 3, H, W]."""
    from torchvision.transforms.v2 import functional  # takes seconds to import

    return getattr(functional, name)(images.movedim(3, 1), *arguments).movedim(1, 3)


# --- Operations: (uint8 [b, H, W, 3], strength 0 to 1 and more) -> uint8 [b, H, W, 3]


def _auto_contrast(images: Tensor, strength: float) -> Tensor:
    """Stretches each channel: its darkest value becomes 0, its brightest 255."""
    low, high = (f(images, dim=(1, 2), keepdim=True).float() for f in (torch.amin, torch.amax))
    scale = 255 / (high - low)
    return torch.where(high > low, _cut(images * scale - low * scale), images)


def _posterize(images: Tensor, strength: float) -> Tensor:
    """Keeps the upper bits."""
    return _torchvision("posterize", images, min(8, int(4 * strength)))


def _solarize(images: Tensor, strength: float) -> Tensor:
    """Inverts pixels above a threshold."""
    threshold = int(256 * strength)
    return _torchvision("solarize", images, threshold) if threshold <= 255 else images


def _solarize_add(images: Tensor, strength: float) -> Tensor:
    """Brightens dark pixels."""
    brighter = (images.short() + int(110 * strength)).clamp(max=255).to(torch.uint8)
    return torch.where(images < 128, brighter, images)


def _color(images: Tensor, strength: float) -> Tensor:
    return _blended(images, _luma(images), strength)


def _contrast(images: Tensor, strength: float) -> Tensor:
    h, w = images.shape[1:3]
    mean = _luma(images).int().sum((1, 2), keepdim=True) // (h * w)
    return _blended(images, mean, strength)


def _sharpness(images: Tensor, strength: float) -> Tensor:
    """Blends with a 3 x 3 mean in which the middle pixel counts five times. The border stays."""
    h, w = images.shape[1:3]
    whole = images.short()
    rows = whole[:, :-2] + whole[:, 1:-1] + whole[:, 2:]
    total = rows[:, :, :-2] + rows[:, :, 1:-1] + rows[:, :, 2:] + 4 * whole[:, 1:-1, 1:-1]
    smooth = images.clone()
    smooth[:, 1 : h - 1, 1 : w - 1] = (total // 13).to(torch.uint8)
    return _blended(images, smooth, strength)


def _cutout(images: Tensor, strength: float, middles: Tensor) -> Tensor:
    """Fills a square around a random pixel, clipped at the image's border. middles: int32 [b, 2]."""
    h, w = images.shape[1:3]
    half = int(40 / EDGE * min(h, w) * strength)
    y, x = (torch.arange(n, device=images.device, dtype=torch.int32) for n in (h, w))
    rows, columns = (
        (i >= at - half) & (i < at + half) for i, at in ((y, middles[:, :1]), (x, middles[:, 1:]))
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

# --- Warps: (height, width, strength, direction float64 [b]) -> the six factors of _warped, each a number for
# all images or an array with one per image


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

# A draw chooses an operation by its index.
OPERATIONS = (
    "AutoContrast", "Equalize", "Invert", "Rotate", "Posterize", "Solarize", "Color", "Contrast",
    "Brightness", "Sharpness", "ShearX", "ShearY", "TranslateX", "TranslateY", "Cutout", "SolarizeAdd",
)  # fmt: skip
# Images of a group are computed together. All warps form one group, to need fewer kernels on a GPU.
GROUPS = (*SIMPLE, "Cutout", "Warp")
_GROUP_OF = np.array([GROUPS.index("Warp" if name in WARPS else name) for name in OPERATIONS])


def _luma(images: Tensor) -> Tensor:
    """Brightness by ITU-R 601-2: uint8 [b, H, W, 1]."""
    red, green, blue = images.float().unbind(3)
    return (LUMA[0] * red + LUMA[1] * green + LUMA[2] * blue).round_().to(torch.uint8)[..., None]


def _blended(images: Tensor, others: Tensor, strength: float) -> Tensor:
    """Interpolates, or extrapolates, from `others` to the images by _factor(strength)."""
    others = others.float()
    return _cut(others + _factor(strength) * (images - others))


def _factor(strength: float) -> float:
    """The factor of PIL's ImageEnhance: 0 is black, grey or smooth, 1 the unchanged image."""
    return 1.8 * strength + 0.1


def _cut(values: Tensor) -> Tensor:
    return values.clamp(0, 255).to(torch.uint8)


def _warped(images: Tensor, factors: Tensor) -> Tensor:
    """Takes pixel (x, y) from the one nearest to (a x + b y + c, d x + e y + f). Pixels outside are GREY.

    factors: a to f, float32 [6, b].
    """
    b, h, w, _ = images.shape
    factors = factors[:, :, None, None]
    x = torch.arange(w, device=images.device).float()
    y = torch.arange(h, device=images.device).float()[:, None]
    columns = (factors[0] * x + factors[1] * y + factors[2] + 0.5).floor_().long()  # [b, H, W]
    rows = (factors[3] * x + factors[4] * y + factors[5] + 0.5).floor_().long()
    inside = (columns >= 0) & (columns < w) & (rows >= 0) & (rows < h)
    first = torch.arange(b, device=images.device)[:, None, None] * (h * w)
    pixels = first + rows.clamp_(0, h - 1) * w + columns.clamp_(0, w - 1)
    found = images.reshape(-1, 3).index_select(0, pixels.view(-1)).view(images.shape)
    return torch.where(inside[..., None], found, GREY)
