"""Augmentation of a whole batch on the device, with random numbers per sample.

To use it elsewhere copy this file: it needs torch and numpy, and mixer() torchvision. rand_augment.py needs
this file beside it. Random numbers are float64 in [0, 1), a row for each sample: `uniforms` of
onecurve/numerics/order.py here, or any others. COLUMNS gives each column one use, also outside this file.
"""

import math
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

# The columns of a sample's random numbers. Other columns for a use would change the bits of every training.
COLUMNS = {
    "shift": slice(0, 2),  # moves(): down and right
    "flip": slice(2, 3),  # moves(), and photographs after their crop
    "crop": slice(4, 44),  # data/crops.py's random_resized_crop(): ten attempts with four numbers each
    "color": slice(44, 48),  # color_jitter()
    "erasing": slice(48, 53),  # random_erasing()
    "rand_augment": slice(53, 69),  # rand_augment(): up to four layers with four numbers each
}
SHIFT, FLIP, CROP, COLOR, ERASING, RAND_AUGMENT = COLUMNS.values()
DRAWS = RAND_AUGMENT.stop  # columns altogether

REPEATED_PIXELS = 2**19  # in a larger image the loop is long enough, and its factors would take much memory
ALIGNMENT = 8  # bytes; a view of another type must begin at a multiple of its size
Mixer = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]
# ITU-R 601-2, as in PIL and torchvision
LUMA = (0.2989, 0.587, 0.114)
# The six orders of brightness (0), contrast (1) and saturation (2)
ORDERS = np.array([[0, 1, 2], [0, 2, 1], [1, 0, 2], [1, 2, 0], [2, 0, 1], [2, 1, 0]])


def send(tensor: Tensor, device: torch.device) -> Tensor:
    """Copies to the device without waiting for it, to CUDA from page-locked memory."""
    if device.type == "cuda" and tensor.device.type == "cpu":
        tensor = tensor.pin_memory()  # no copy if it is pinned already
    return tensor.to(device, non_blocking=True)


def send_arrays(arrays: Sequence[np.ndarray], device: torch.device) -> list[Tensor]:
    """The arrays as tensors on the device, sent as one copy, as each copy costs the host some 10 us."""
    if device.type == "cpu":
        return [torch.from_numpy(array) for array in arrays]
    room = [-(-array.nbytes // ALIGNMENT) * ALIGNMENT for array in arrays]
    parts = np.split(np.empty(sum(room), np.uint8), np.cumsum(room)[:-1])
    for array, part in zip(arrays, parts, strict=True):
        part[: array.nbytes] = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
    sent = send(torch.from_numpy(parts[0].base), device).split(room)
    return [
        part[: array.nbytes].view(torch.from_numpy(array[:0]).dtype).view(array.shape)
        for array, part in zip(arrays, sent, strict=True)
    ]


def moves(draws: np.ndarray, pad: int, flip: bool) -> np.ndarray:
    """Shifts by up to `pad` pixels down and right, and horizontal flips, at random: int64 [3, B].

    draws: float64 [B, >= 3] in [0, 1), of which the columns SHIFT and FLIP are used. As in He et al. 2015
    (arXiv 1512.03385, section 4.2).
    """
    shifts = np.floor(draws[:, SHIFT] * (2 * pad + 1)).astype(np.int64) - pad
    return np.stack([*shifts.T, draws[:, FLIP.start] < (0.5 if flip else 0.0)])


def moved_pixels(rows: Tensor, moved: Tensor, shape: Sequence[int]) -> tuple[Tensor, Tensor]:
    """Where moved images have their pixels: y [B, H] and x [B, W], on the device of the rows.

    rows: int64 [B], of images of this shape, [N, H, W, 3]; moved: int64 [3, B], of moves(), each shift less
    than an edge. y + x is a pixel among all images' N * H * W. The borders are mirrored, and not black as in
    He et al.
    """
    count, h, w, _ = shape
    kind = torch.int32 if count * h * w < 2**31 else torch.int64  # 32 bits: half the index traffic
    down, right, flipped = moved.to(kind)[:, :, None].unbind()  # [B, 1] each
    y, x = (torch.arange(n, dtype=kind, device=rows.device) for n in (h, w))
    lines = _mirrored(y + down, h) + rows.to(kind)[:, None] * h
    return lines * w, _mirrored(torch.where(flipped > 0, x.flip(0), x) + right, w)


def gather(images: Tensor, y: Tensor, x: Tensor) -> Tensor:
    """The pixels of moved_pixels() among the images, uint8 [N, H, W, 3]: uint8 [B, H, W, 3]."""
    pixels = y[:, :, None] + x[:, None, :]  # [B, H, W]
    return images.reshape(-1, 3).index_select(0, pixels.view(-1)).view(*pixels.shape, 3)


def color_jitter(images: Tensor, draws: np.ndarray, strength: float) -> Tensor:
    """Scales brightness, contrast and saturation by 1 - strength to 1 + strength, in random order.

    images: uint8 [B, H, W, 3]; draws: float64 [B, 4] in [0, 1), for the three factors and the order;
    strength: up to 1. Returns uint8 [B, H, W, 3]. Equals torchvision's ColorJitter(strength, strength,
    strength), which timm uses with 0.4, but rounds only once, at the end.
    """
    _, h, w, _ = images.shape
    order = ORDERS[(draws[:, 3] * len(ORDERS)).astype(np.int64)]  # [B, 3]
    factors = np.take_along_axis(1 + strength * (2 * draws[:, :3] - 1), order, axis=1)
    # Each is a blend: with black, with the image's mean grey, or with each pixel's grey.
    blends = np.stack([factors, (1 - factors) * (order == 1), (1 - factors) * (order == 2)])  # [3, B, 3]
    shares = send(torch.from_numpy(blends.astype(np.float32)), images.device)
    planes = images.permute(3, 0, 1, 2).contiguous().float()  # [3, B, H, W]
    for own, mean, grey in shares[..., None, None].unbind(2):  # [B, 1, 1] each
        luma = LUMA[0] * planes[0] + LUMA[1] * planes[1] + LUMA[2] * planes[2]  # [B, H, W]
        # Integers, as the last bit of a float sum would depend on the other images of the batch.
        total = luma.round().int().sum((1, 2), keepdim=True)
        other = total * (mean / (h * w)) + luma * grey
        planes.mul_(own).add_(other).clamp_(0, 255)
    return planes.round_().to(torch.uint8).permute(1, 2, 3, 0).contiguous()


def random_erasing(images: Tensor, draws: np.ndarray, probability: float) -> Tensor:
    """Erases a box in some images: sets it to 0, the mean of normalised pixels (arXiv 1708.04896).

    images: float [B, 3, H, W], changed in place and returned; draws: float64 [B, 5] in [0, 1): whether, area,
    aspect ratio, position. Area 0.02 to 1/3 of the image, aspect ratio 0.3 to 1/0.3, as in timm's mode
    "const"; its mode "pixel" would need 150,000 draws per sample for noise. A box that is longer than the
    image, one in 200, is clipped, where timm draws again.
    """
    h, w = images.shape[2:]
    area = (0.02 + (1 / 3 - 0.02) * draws[:, 1]) * h * w
    aspect = np.exp((2 * draws[:, 2] - 1) * -math.log(0.3))
    height = np.minimum(np.round(np.sqrt(area * aspect)), h) * (draws[:, 0] < probability)
    width = np.minimum(np.round(np.sqrt(area / aspect)), w)
    top, left = np.floor(draws[:, 3] * (h - height + 1)), np.floor(draws[:, 4] * (w - width + 1))
    box = np.stack([top, top + height, left, left + width]).astype(np.int32)[:, :, None]  # [4, B, 1]
    top, bottom, left, right = send(torch.from_numpy(box), images.device)
    y, x = (torch.arange(n, device=images.device, dtype=torch.int32) for n in (h, w))
    rows, columns = (y >= top) & (y < bottom), (x >= left) & (x < right)  # [B, H], [B, W]
    return images.masked_fill_((rows[:, :, None] & columns[:, None, :])[:, None], 0)


def to_float(
    images: Tensor,
    mean: tuple[float, ...],
    std: tuple[float, ...],
    size: int,
    interpolation: str | None = None,
) -> Tensor:
    """uint8 [B, H, W, 3] -> normalised float32 [B, 3, size, size], channels_last. mean, std: of [0, 1].

    interpolation: `bilinear` or `bicubic`, with PIL's kernel; None: bicubic, enlarged with PyTorch's kernel.
    The resize runs on the device, so that only 3 kB per CIFAR image are copied to it, not 602 kB.
    """
    b, h, w, c = images.shape
    pixels = h * w if h * w <= REPEATED_PIXELS else 1
    scale, shift = _normalization(mean, std, pixels, images.device)
    floats = images.reshape(b, -1, pixels * c).float().mul_(scale).add_(shift)
    if (h, w) != (size, size) and max(h, w) <= 4096:  # a longer edge's matrices would take gigabytes
        rows, columns = _resize_matrices(h, w, size, interpolation, images.device)
        floats = rows @ (floats.view(b * h, w * c) @ columns).view(b, h, size * c)  # [B, size, size * 3]
        h = w = size
    planes = floats.view(b, h, w, c).permute(0, 3, 1, 2)
    if (h, w) != (size, size):
        planes = _resize(planes, size, size, interpolation, size < max(h, w))
    return planes


@lru_cache(maxsize=8)
def _normalization(
    mean: tuple[float, ...], std: tuple[float, ...], pixels: int, device: torch.device
) -> Tensor:
    """[2, pixels * 3]: scale and shift as large as an image, so that the inner loop runs over all its values.

    Kept, as each copy to a GPU costs the host some 10 us; torch.tensor(..., device=...) would also wait for
    all work that is queued on it.
    """
    factors = torch.tensor([[1 / (255 * s) for s in std], [-m / s for m, s in zip(mean, std, strict=True)]])
    return factors.to(device, non_blocking=True).repeat(1, pixels)


@lru_cache(maxsize=8)
def _resize_matrices(
    h: int, w: int, size: int, interpolation: str | None, device: torch.device
) -> tuple[Tensor, ...]:
    """The resize of rows, [size, H], and of interleaved columns, [W * 3, size * 3], as matrices.

    A resize is linear in the pixels. The products take a fifth of the time of F.interpolate on a CPU
    (32 to 224 pixels); not yet measured on a GPU.
    """
    shrinks = size < max(h, w)
    rows, columns = (_resize(torch.eye(n)[None, None], size, n, interpolation, shrinks)[0, 0] for n in (h, w))
    matrices = rows, torch.kron(columns.T.contiguous(), torch.eye(3))
    return tuple(matrix.to(device, non_blocking=True) for matrix in matrices)


def _resize(images: Tensor, height: int, width: int, interpolation: str | None, shrinks: bool) -> Tensor:
    # With antialias bicubic has PIL's kernel (a = -0.5) where images grow, too; without it a = -0.75.
    mode, antialias = interpolation or "bicubic", shrinks or interpolation is not None
    return F.interpolate(images, (height, width), mode=mode, antialias=antialias)


def mixer(mixup: float, cutmix: float, classes: int, dtype: torch.dtype | None = None) -> Mixer | None:
    """Mixup (arXiv 1710.09412) or cutmix (arXiv 1905.04899) with these alphas, one of them per micro-batch.

    Maps (images [B, 3, H, W], labels int64 [B]) to (mixed images, float labels [B, classes]), channels_last
    if the images are. dtype: of the mixed images, by default the images' own; bf16 halves the bytes for a
    model that rounds to bf16 anyway. Random numbers come from torch's generator, which
    onecurve.numerics.order.reseed seeds.
    """
    from torchvision.transforms import v2  # takes seconds to import

    class MixUp(v2.MixUp):
        """Mixup that keeps channels_last: on a GPU torchvision's roll() loses it."""

        def transform(self, inpt: Tensor, params: dict[str, Any]) -> Tensor:
            if inpt is params["labels"]:
                return super().transform(inpt, params)
            others, own = torch.cat((inpt[-1:], inpt[:-1])), params["lam"]
            if dtype is None:
                return others.mul_(1.0 - own).add_(inpt.mul(own))
            return torch.lerp(others, inpt, own)  # rounds once

    kinds = [MixUp(alpha=mixup, num_classes=classes)] if mixup else []
    kinds += [v2.CutMix(alpha=cutmix, num_classes=classes)] if cutmix else []
    mix = v2.RandomChoice(kinds) if kinds else None
    return mix if mix is None or dtype is None else lambda images, labels: mix(images.to(dtype), labels)


def _mirrored(i: Tensor, n: int) -> Tensor:
    """Reflects indices outside 0 ... n - 1 at the border pixel. |i| < 2n - 1."""
    return (n - 1) - ((n - 1) - i.abs()).abs()
