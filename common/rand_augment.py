"""RandAugment (arXiv 1909.13719) of a batch on the device, after github.com/google-research/big_vision.

Each layer does one of 16 operations to each image, at one strength for all. The operations are those of
big_vision/pp/archive/autoaugment.py, most of them PIL's, in whole numbers: what an image becomes does not
depend on what is beside it. Ours: shifts and cut-outs grow with the image (theirs are of 224 pixels).
"""

import numpy as np
import torch
from torch import Tensor

from common.augment import LUMA

LAYERS = 4  # at most: each has DRAWN columns of a sample's draws
DRAWN = 4
GREY = 128  # of what is not in the image
EDGE = 224  # pixels of the images for which shifts and cut-outs are given


def rand_augment(images: Tensor, draws: np.ndarray, layers: int, magnitude: float) -> Tensor:
    """images: uint8 [B, H, W, 3]; draws: float64 [B, >= 4 * layers] in [0, 1), for the operation, its
    direction, and where something is cut out, of each layer; magnitude: 10 is strong, more is possible.
    Returns uint8 [B, H, W, 3]."""
    names = list(OPERATIONS)
    for layer in range(layers):
        mine = draws[:, layer * DRAWN : (layer + 1) * DRAWN]
        chosen = (mine[:, 0] * len(names)).astype(np.int64)
        order = np.argsort(chosen, kind="stable")  # one piece of the batch for each operation
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


# --- Operations: (uint8 [b, H, W, 3], strength 0 to 1 and more, draws [b, 3]) -> uint8 [b, H, W, 3]


def _auto_contrast(images: Tensor, strength: float, draws: np.ndarray) -> Tensor:
    """Of each channel the darkest becomes 0, the brightest 255."""
    low, high = (f(images, dim=(1, 2), keepdim=True).float() for f in (torch.amin, torch.amax))
    scale = 255 / (high - low)
    return torch.where(high > low, _cut(images * scale - low * scale), images)


def _equalize(images: Tensor, strength: float, draws: np.ndarray) -> Tensor:
    """Of each channel all values become as frequent as can be."""
    b, h, w, _ = images.shape
    rows = torch.arange(b * 3, device=images.device).view(b, 1, 1, 3) * 256
    bins = (rows + images).view(-1)
    counts = torch.zeros(b * 3 * 256, dtype=torch.int64, device=images.device)
    counts = counts.scatter_add_(0, bins, torch.ones_like(bins)).view(b * 3, 256)
    brightest = images.amax((1, 2)).long().view(-1, 1)
    step = (h * w - counts.gather(1, brightest)) // 255  # [b * 3, 1]
    below = counts.cumsum(1) - counts
    table = ((below + step // 2) // step.clamp(min=1)).clamp(max=255)
    table = torch.where(step > 0, table, torch.arange(256, device=images.device))
    return table.to(torch.uint8).view(-1)[bins].view(images.shape)


def _invert(images: Tensor, strength: float, draws: np.ndarray) -> Tensor:
    return 255 - images


def _posterize(images: Tensor, strength: float, draws: np.ndarray) -> Tensor:
    """Some of the upper bits stay."""
    bits = min(8, int(4 * strength))
    return images & (0xFF00 >> bits & 0xFF)


def _solarize(images: Tensor, strength: float, draws: np.ndarray) -> Tensor:
    """What is bright is inverted."""
    return torch.where(images.short() < int(256 * strength), images, 255 - images)


def _solarize_add(images: Tensor, strength: float, draws: np.ndarray) -> Tensor:
    """What is dark becomes brighter."""
    brighter = (images.short() + int(110 * strength)).clamp(max=255).to(torch.uint8)
    return torch.where(images < 128, brighter, images)


def _color(images: Tensor, strength: float, draws: np.ndarray) -> Tensor:
    return _blended(images, _luma(images), strength)


def _contrast(images: Tensor, strength: float, draws: np.ndarray) -> Tensor:
    h, w = images.shape[1:3]
    mean = _luma(images).int().sum((1, 2), keepdim=True) // (h * w)
    return _blended(images, mean, strength)


def _brightness(images: Tensor, strength: float, draws: np.ndarray) -> Tensor:
    return _blended(images, torch.zeros_like(images), strength)


def _sharpness(images: Tensor, strength: float, draws: np.ndarray) -> Tensor:
    """Away from, or towards, the mean of a pixel, five times, and its eight neighbours. The border stays."""
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
    """A square around some pixel, cut where it leaves the image."""
    h, w = images.shape[1:3]
    half = int(40 / EDGE * min(h, w) * strength)
    middle = _sent(np.floor(draws[:, 1:] * (h, w)).astype(np.int32), images)
    y, x = (torch.arange(n, device=images.device, dtype=torch.int32) for n in (h, w))
    rows, columns = ((i >= at - half) & (i < at + half) for i, at in ((y, middle[:, :1]), (x, middle[:, 1:])))
    return images.masked_fill((rows[:, :, None] & columns[:, None, :])[..., None], GREY)


OPERATIONS = {
    "AutoContrast": _auto_contrast,
    "Equalize": _equalize,
    "Invert": _invert,
    "Rotate": _rotate,
    "Posterize": _posterize,
    "Solarize": _solarize,
    "Color": _color,
    "Contrast": _contrast,
    "Brightness": _brightness,
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
    """uint8 [b, H, W, 1]"""
    red, green, blue = images.float().unbind(3)
    return (LUMA[0] * red + LUMA[1] * green + LUMA[2] * blue).round_().to(torch.uint8)[..., None]


def _blended(images: Tensor, others: Tensor, strength: float) -> Tensor:
    """others: what factor 0 gives; 1 changes nothing, and more goes beyond."""
    factor = 1.8 * strength + 0.1
    others = others.float()
    return _cut(others + factor * (images - others))


def _cut(values: Tensor) -> Tensor:
    return values.clamp(0, 255).to(torch.uint8)


def _warped(images: Tensor, to_x: list, to_y: list) -> Tensor:
    """Pixel (x, y) is the one nearest to (a x + b y + c, d x + e y + f), or GREY where the image ends.
    to_x: a, b and c; to_y: d, e and f: each a number, or one for each image."""
    b, h, w, _ = images.shape
    factors = np.stack([np.broadcast_to(factor, b) for factor in (*to_x, *to_y)])
    factors = _sent(factors.astype(np.float32), images)[:, :, None, None]  # [6, b, 1, 1]
    x = torch.arange(w, device=images.device).float()
    y = torch.arange(h, device=images.device).float()[:, None]
    columns = (factors[0] * x + factors[1] * y + factors[2] + 0.5).floor_().long()  # [b, H, W]
    rows = (factors[3] * x + factors[4] * y + factors[5] + 0.5).floor_().long()
    inside = (columns >= 0) & (columns < w) & (rows >= 0) & (rows < h)
    first = torch.arange(b, device=images.device)[:, None, None] * (h * w)
    pixels = first + rows.clamp_(0, h - 1) * w + columns.clamp_(0, w - 1)
    found = images.reshape(-1, 3).index_select(0, pixels.view(-1)).view(images.shape)
    return torch.where(inside[..., None], found, GREY)
