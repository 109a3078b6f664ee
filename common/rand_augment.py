"""RandAugment (arXiv 1909.13719) of a batch on the device, after github.com/google-research/big_vision.

Each layer applies one of 16 operations to each image, at one strength for all. The operations are those of
big_vision/pp/archive/autoaugment.py, most of them PIL's. An image's result does not depend on the other
images of the batch. One difference: shifts and cut-outs grow with the image (theirs are for 224 pixels).

Five operations are torchvision's. The others are ours: torchvision's AutoContrast, Color, Contrast and
Sharpness round differently, its affine transforms take one angle or shift for the whole batch, and it has no
SolarizeAdd and no Cutout.
"""

import numpy as np
import torch
from torch import Tensor

from common.augment import LUMA

LAYERS = 4  # at most
DRAWN = 4  # columns of a sample's draws that a layer uses
GREY = 128  # the fill colour
EDGE = 224  # pixels, to which shifts and cut-outs refer


def rand_augment(images: Tensor, draws: np.ndarray, layers: int, magnitude: float) -> Tensor:
    """Applies `layers` random operations to each image, one after another.

    images: uint8 [B, H, W, 3]. draws: float64 [B, >= 4 * layers] in [0, 1); each layer uses four: operation,
    direction, and row and column of a cut-out. magnitude: 10 is strong, more is possible.
    Returns uint8 [B, H, W, 3].
    """
    names = list(OPERATIONS)
    for layer in range(layers):
        mine = draws[:, layer * DRAWN : (layer + 1) * DRAWN]
        chosen = (mine[:, 0] * len(names)).astype(np.int64)
        order = np.argsort(chosen, kind="stable")  # groups the images by operation
        counts = np.bincount(chosen, minlength=len(names))
        pieces = images.index_select(0, _sent(order, images)).split(counts.tolist())
        drawn = np.split(mine[order, 1:], np.cumsum(counts)[:-1])
        done = [
            OPERATIONS[name](piece, magnitude / 10, own) if len(piece) else piece
            for name, piece, own in zip(names, pieces, drawn, strict=True)
        ]
        images = torch.cat(done).index_select(0, _sent(np.argsort(order), images))
    return images


def _sent(values: np.ndarray, images: Tensor) -> Tensor:
    return torch.from_numpy(values).to(images.device, non_blocking=True)


def _torchvision(name: str, images: Tensor, *arguments: float) -> Tensor:
    """Calls a function of torchvision.transforms.v2.functional, which takes [b, 3, H, W]."""
    from torchvision.transforms.v2 import functional  # takes seconds to import

    return getattr(functional, name)(images.movedim(3, 1), *arguments).movedim(1, 3)


# --- Operations: (uint8 [b, H, W, 3], strength 0 to 1 and more, draws [b, 3]) -> uint8 [b, H, W, 3]


def _auto_contrast(images: Tensor, strength: float, draws: np.ndarray) -> Tensor:
    """Stretches each channel: its darkest value becomes 0, its brightest 255."""
    low, high = (f(images, dim=(1, 2), keepdim=True).float() for f in (torch.amin, torch.amax))
    scale = 255 / (high - low)
    return torch.where(high > low, _cut(images * scale - low * scale), images)


def _posterize(images: Tensor, strength: float, draws: np.ndarray) -> Tensor:
    """Keeps the upper bits."""
    return _torchvision("posterize", images, min(8, int(4 * strength)))


def _solarize(images: Tensor, strength: float, draws: np.ndarray) -> Tensor:
    """Inverts what is bright."""
    threshold = int(256 * strength)
    return _torchvision("solarize", images, threshold) if threshold <= 255 else images


def _solarize_add(images: Tensor, strength: float, draws: np.ndarray) -> Tensor:
    """Brightens what is dark."""
    brighter = (images.short() + int(110 * strength)).clamp(max=255).to(torch.uint8)
    return torch.where(images < 128, brighter, images)


def _color(images: Tensor, strength: float, draws: np.ndarray) -> Tensor:
    return _blended(images, _luma(images), strength)


def _contrast(images: Tensor, strength: float, draws: np.ndarray) -> Tensor:
    h, w = images.shape[1:3]
    mean = _luma(images).int().sum((1, 2), keepdim=True) // (h * w)
    return _blended(images, mean, strength)


def _sharpness(images: Tensor, strength: float, draws: np.ndarray) -> Tensor:
    """Blends with a 3 x 3 mean in which the middle pixel counts five times. The border stays."""
    h, w = images.shape[1:3]
    whole = images.short()
    rows = whole[:, :-2] + whole[:, 1:-1] + whole[:, 2:]
    total = rows[:, :, :-2] + rows[:, :, 1:-1] + rows[:, :, 2:] + 4 * whole[:, 1:-1, 1:-1]
    smooth = images.clone()
    smooth[:, 1 : h - 1, 1 : w - 1] = (total // 13).to(torch.uint8)
    return _blended(images, smooth, strength)


def _rotate(images: Tensor, strength: float, draws: np.ndarray) -> Tensor:
    h, w = images.shape[1:3]
    angle = np.radians(30 * strength) * _direction(draws)
    cos, sin = np.cos(angle), np.sin(angle)
    y, x = (h - 1) / 2, (w - 1) / 2
    return _warped(images, [cos, -sin, x - cos * x + sin * y], [sin, cos, y - sin * x - cos * y])


def _shear_x(images: Tensor, strength: float, draws: np.ndarray) -> Tensor:
    return _warped(images, [1, 0.3 * strength * _direction(draws), 0], [0, 1, 0])


def _shear_y(images: Tensor, strength: float, draws: np.ndarray) -> Tensor:
    return _warped(images, [1, 0, 0], [0.3 * strength * _direction(draws), 1, 0])


def _translate_x(images: Tensor, strength: float, draws: np.ndarray) -> Tensor:
    shift = 100 / EDGE * images.shape[2] * strength * _direction(draws)
    return _warped(images, [1, 0, shift], [0, 1, 0])


def _translate_y(images: Tensor, strength: float, draws: np.ndarray) -> Tensor:
    shift = 100 / EDGE * images.shape[1] * strength * _direction(draws)
    return _warped(images, [1, 0, 0], [0, 1, shift])


def _cutout(images: Tensor, strength: float, draws: np.ndarray) -> Tensor:
    """Fills a square around a random pixel, clipped at the image's border."""
    h, w = images.shape[1:3]
    half = int(40 / EDGE * min(h, w) * strength)
    middle = _sent(np.floor(draws[:, 1:] * (h, w)).astype(np.int32), images)
    y, x = (torch.arange(n, device=images.device, dtype=torch.int32) for n in (h, w))
    rows, columns = ((i >= at - half) & (i < at + half) for i, at in ((y, middle[:, :1]), (x, middle[:, 1:])))
    return images.masked_fill((rows[:, :, None] & columns[:, None, :])[..., None], GREY)


OPERATIONS = {
    "AutoContrast": _auto_contrast,
    "Equalize": lambda images, strength, draws: _torchvision("equalize", images),
    "Invert": lambda images, strength, draws: _torchvision("invert", images),
    "Rotate": _rotate,
    "Posterize": _posterize,
    "Solarize": _solarize,
    "Color": _color,
    "Contrast": _contrast,
    "Brightness": lambda images, strength, draws: _torchvision(
        "adjust_brightness", images, _factor(strength)
    ),
    "Sharpness": _sharpness,
    "ShearX": _shear_x,
    "ShearY": _shear_y,
    "TranslateX": _translate_x,
    "TranslateY": _translate_y,
    "Cutout": _cutout,
    "SolarizeAdd": _solarize_add,
}


def _direction(draws: np.ndarray) -> np.ndarray:
    return np.where(draws[:, 0] < 0.5, -1.0, 1.0)


def _luma(images: Tensor) -> Tensor:
    """Brightness by ITU-R 601-2: uint8 [b, H, W, 1]."""
    red, green, blue = images.float().unbind(3)
    return (LUMA[0] * red + LUMA[1] * green + LUMA[2] * blue).round_().to(torch.uint8)[..., None]


def _blended(images: Tensor, others: Tensor, strength: float) -> Tensor:
    """Moves `others` towards the images, or beyond, by _factor(strength)."""
    others = others.float()
    return _cut(others + _factor(strength) * (images - others))


def _factor(strength: float) -> float:
    """The factor of PIL's ImageEnhance: 0 is black, grey or smooth, and 1 changes nothing."""
    return 1.8 * strength + 0.1


def _cut(values: Tensor) -> Tensor:
    return values.clamp(0, 255).to(torch.uint8)


def _warped(images: Tensor, to_x: list[float | np.ndarray], to_y: list[float | np.ndarray]) -> Tensor:
    """Takes pixel (x, y) from the one nearest to (a x + b y + c, d x + e y + f); outside it is GREY.

    to_x: a, b and c; to_y: d, e and f; each a number, or one for each image: float64 [b].
    """
    b, h, w, _ = images.shape
    each = np.stack([np.broadcast_to(factor, b) for factor in (*to_x, *to_y)])
    factors = _sent(each.astype(np.float32), images)[:, :, None, None]  # [6, b, 1, 1]
    x = torch.arange(w, device=images.device).float()
    y = torch.arange(h, device=images.device).float()[:, None]
    columns = (factors[0] * x + factors[1] * y + factors[2] + 0.5).floor_().long()  # [b, H, W]
    rows = (factors[3] * x + factors[4] * y + factors[5] + 0.5).floor_().long()
    inside = (columns >= 0) & (columns < w) & (rows >= 0) & (rows < h)
    first = torch.arange(b, device=images.device)[:, None, None] * (h * w)
    pixels = first + rows.clamp_(0, h - 1) * w + columns.clamp_(0, w - 1)
    found = images.reshape(-1, 3).index_select(0, pixels.view(-1)).view(images.shape)
    return torch.where(inside[..., None], found, GREY)
