"""Augments a whole batch on the device, with separate random numbers for each sample.

To use these functions in a different project, copy this file, which requires torch and numpy, and torchvision
only for mixer(). The file rand_augment.py imports this file from the same folder. Random numbers are float64
values in [0, 1), with one row per sample. This project computes the random numbers with `uniforms` from
onecurve/numerics/order.py, but any other source of random numbers also works. COLUMNS assigns each column of
random numbers to one operation, including operations in other files.
"""

import math
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

# Columns of a sample's random numbers. A change to an operation's columns changes the results of every run
# that uses the operation.
COLUMNS = {
    "shift": slice(0, 2),  # moves(), for the shifts down and right
    "flip": slice(2, 3),  # moves(), and the flips of photos after the crop
    "crop": slice(4, 44),  # random_resized_crop() in data/crops.py, with ten attempts of four numbers
    "color": slice(44, 48),  # color_jitter()
    "erasing": slice(48, 53),  # random_erasing()
    "rand_augment": slice(53, 69),  # rand_augment(), with up to four layers of four numbers
}
SHIFT, FLIP, CROP, COLOR, ERASING, RAND_AUGMENT = COLUMNS.values()
DRAWS = RAND_AUGMENT.stop  # number of random numbers per sample

# Maximum number of pixels in an image whose normalisation factors are repeated for each pixel. For larger
# images, the inner loop is long enough without repetition, and repeated factors would need too much memory.
REPEATED_PIXELS = 2**19
ALIGNMENT = 8  # bytes, because a view with a different dtype must start at a multiple of that dtype's size
Mixer = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]
LUMA = (0.2989, 0.587, 0.114)  # ITU-R 601-2 weights of red, green and blue, as in PIL and torchvision
# The six possible orders of brightness (0), contrast (1) and saturation (2)
JITTER_ORDERS = np.array([[0, 1, 2], [0, 2, 1], [1, 0, 2], [1, 2, 0], [2, 0, 1], [2, 1, 0]])


def send(tensor: Tensor, device: torch.device) -> Tensor:
    """Copy a tensor to a device asynchronously. Copies to CUDA devices use page-locked memory."""
    if device.type == "cuda" and tensor.device.type == "cpu":
        tensor = tensor.pin_memory()  # returns an already pinned tensor unchanged
    return tensor.to(device, non_blocking=True)


def send_arrays(arrays: Sequence[np.ndarray], device: torch.device) -> list[Tensor]:
    """Send several arrays to a device in one copy, because each copy costs the host about 10 us."""
    if device.type == "cpu":
        return [torch.from_numpy(array) for array in arrays]
    sizes = [-(-array.nbytes // ALIGNMENT) * ALIGNMENT for array in arrays]
    buffers = np.split(np.empty(sum(sizes), np.uint8), np.cumsum(sizes)[:-1])
    for array, buffer in zip(arrays, buffers, strict=True):
        buffer[: array.nbytes] = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
    device_buffers = send(torch.from_numpy(buffers[0].base), device).split(sizes)
    return [
        buffer[: array.nbytes].view(torch.from_numpy(array[:0]).dtype).view(array.shape)
        for array, buffer in zip(arrays, device_buffers, strict=True)
    ]


def moves(draws: np.ndarray, pad: int, flip: bool) -> np.ndarray:
    """Draw a random shift (up to `pad` pixels down and right) and a horizontal flip for each image.

    The augmentation follows He et al. 2015 (arXiv 1512.03385, section 4.2).

    Args:
        draws: Random numbers, float64 [B, >= 3] in [0, 1). Only the columns SHIFT and FLIP are used.
        pad: Maximum shift in pixels.
        flip: Whether to flip images with a probability of 1/2.

    Returns:
        Downward shift, rightward shift, and 1 for a flip, int64 [3, B].
    """
    shifts = np.floor(draws[:, SHIFT] * (2 * pad + 1)).astype(np.int64) - pad
    return np.stack([*shifts.T, draws[:, FLIP.start] < (0.5 if flip else 0.0)])


def moved_pixels(rows: Tensor, moved: Tensor, shape: Sequence[int]) -> tuple[Tensor, Tensor]:
    """Return the source pixel indices of shifted and flipped images.

    Images are mirrored at their borders, whereas He et al. pad images with black.

    Args:
        rows: Indices of the images, int64 [B].
        moved: Result of moves(), int64 [3, B]. Each shift must be smaller than the image's edge.
        shape: Shape of all images, [N, H, W, 3].

    Returns:
        Offsets y [B, H] and x [B, W], on the same device as `rows`. The sum y + x is the index of a pixel
        among the N * H * W pixels of all images.
    """
    count, h, w, _ = shape
    # Indices in int32 instead of int64 halve the memory traffic
    dtype = torch.int32 if count * h * w < 2**31 else torch.int64
    down, right, flipped = moved.to(dtype)[:, :, None].unbind()  # [B, 1] each
    y, x = (torch.arange(edge, dtype=dtype, device=rows.device) for edge in (h, w))
    image_rows = _mirrored(y + down, h) + rows.to(dtype)[:, None] * h
    return image_rows * w, _mirrored(torch.where(flipped > 0, x.flip(0), x) + right, w)


def gather(images: Tensor, y: Tensor, x: Tensor) -> Tensor:
    """Gather the pixels that moved_pixels() chose: uint8 [N, H, W, 3] -> uint8 [B, H, W, 3]."""
    pixels = y[:, :, None] + x[:, None, :]  # [B, H, W]
    return images.reshape(-1, 3).index_select(0, pixels.view(-1)).view(*pixels.shape, 3)


def color_jitter(images: Tensor, draws: np.ndarray, strength: float) -> Tensor:
    """Scale brightness, contrast and saturation by random factors in 1 +/- strength, in random order.

    The result matches torchvision's ColorJitter(strength, strength, strength), which timm uses with a
    strength of 0.4, except that this function rounds pixel values only once, at the end.

    Args:
        images: Pixels, uint8 [B, H, W, 3].
        draws: Random numbers for the three factors and the order, float64 [B, 4] in [0, 1).
        strength: Maximum deviation of the factors from 1, between 0 and 1.

    Returns:
        uint8 [B, H, W, 3].
    """
    _, h, w, _ = images.shape
    order = JITTER_ORDERS[(draws[:, 3] * len(JITTER_ORDERS)).astype(np.int64)]  # [B, 3]
    factors = np.take_along_axis(1 + strength * (2 * draws[:, :3] - 1), order, axis=1)
    # Each operation blends an image with black, with the image's mean grey value, or with each pixel's grey
    # value.
    blends = np.stack([factors, (1 - factors) * (order == 1), (1 - factors) * (order == 2)])  # [3, B, 3]
    weights = send(torch.from_numpy(blends.astype(np.float32)), images.device)
    planes = images.permute(3, 0, 1, 2).contiguous().float()  # [3, B, H, W]
    for image_weight, mean_weight, grey_weight in weights[..., None, None].unbind(2):  # [B, 1, 1] each
        luma = LUMA[0] * planes[0] + LUMA[1] * planes[1] + LUMA[2] * planes[2]  # [B, H, W]
        # Integers are summed, because the last bit of a float sum would depend on the other images in the
        # batch.
        total = luma.round().int().sum((1, 2), keepdim=True)
        blended = total * (mean_weight / (h * w)) + luma * grey_weight
        planes.mul_(image_weight).add_(blended).clamp_(0, 255)
    return planes.round_().to(torch.uint8).permute(1, 2, 3, 0).contiguous()


def random_erasing(images: Tensor, draws: np.ndarray, probability: float) -> Tensor:
    """Set a random box in some images to 0, the mean of normalised pixels (arXiv 1708.04896).

    The box covers 0.02 to 1/3 of the image's area and has an aspect ratio from 0.3 to 1/0.3, as in timm's
    mode "const". timm's mode "pixel" would need 150,000 draws per sample for the noise. A box that exceeds
    the image (one in 200 boxes) is clipped, whereas timm draws a new box.

    Args:
        images: Normalised images, float [B, 3, H, W], which are changed in place and returned.
        draws: Random numbers, float64 [B, 5] in [0, 1). The columns determine whether to erase a box, the
            box's area, the aspect ratio, and the vertical and horizontal position.
        probability: Fraction of images in which a box is erased.
    """
    h, w = images.shape[2:]
    area = (0.02 + (1 / 3 - 0.02) * draws[:, 1]) * h * w
    aspect = np.exp((2 * draws[:, 2] - 1) * -math.log(0.3))
    height = np.minimum(np.round(np.sqrt(area * aspect)), h) * (draws[:, 0] < probability)
    width = np.minimum(np.round(np.sqrt(area / aspect)), w)
    top, left = np.floor(draws[:, 3] * (h - height + 1)), np.floor(draws[:, 4] * (w - width + 1))
    box = np.stack([top, top + height, left, left + width]).astype(np.int32)[:, :, None]  # [4, B, 1]
    top, bottom, left, right = send(torch.from_numpy(box), images.device)
    y, x = (torch.arange(edge, device=images.device, dtype=torch.int32) for edge in (h, w))
    rows, columns = (y >= top) & (y < bottom), (x >= left) & (x < right)  # [B, H], [B, W]
    return images.masked_fill_((rows[:, :, None] & columns[:, None, :])[:, None], 0)


def to_float(
    images: Tensor,
    mean: tuple[float, ...],
    std: tuple[float, ...],
    size: int,
    interpolation: str | None = None,
) -> Tensor:
    """Normalise and resize images on the device.

    Because images are resized on the device, copying a CIFAR image transfers 3 kB instead of 602 kB.

    Args:
        images: Pixels, uint8 [B, H, W, 3].
        mean: Per-channel mean for pixels in [0, 1].
        std: Per-channel standard deviation for pixels in [0, 1].
        size: Edge length of the output images in pixels.
        interpolation: `bilinear` or `bicubic` with PIL's kernel, or None for bicubic with PyTorch's kernel
            when enlarging.

    Returns:
        Normalised images, float32 [B, 3, size, size], channels_last.
    """
    b, h, w, c = images.shape
    pixels = h * w if h * w <= REPEATED_PIXELS else 1
    scale, shift = _normalization(mean, std, pixels, images.device)
    floats = images.reshape(b, -1, pixels * c).float().mul_(scale).add_(shift)
    if (h, w) != (size, size) and max(h, w) <= 4096:  # for a longer edge, the matrices would need gigabytes
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
    """Return normalisation scales and shifts, repeated so the inner loop covers an image: [2, pixels * 3].

    The tensor is cached, because each copy to a GPU costs the host about 10 us. The alternative,
    torch.tensor(..., device=...), would also wait for all work queued on the device.
    """
    factors = torch.tensor([[1 / (255 * s) for s in std], [-m / s for m, s in zip(mean, std, strict=True)]])
    return factors.to(device, non_blocking=True).repeat(1, pixels)


@lru_cache(maxsize=8)
def _resize_matrices(
    h: int, w: int, size: int, interpolation: str | None, device: torch.device
) -> tuple[Tensor, ...]:
    """Return matrices that resize rows, [size, H], and columns with interleaved channels, [W * 3, size * 3].

    Matrix products can resize images because resizing is linear in the pixels. On a CPU, the matrix products
    take a fifth of the time of F.interpolate (32 to 224 pixels). The speed of the matrix products on a GPU
    has not been measured yet.
    """
    shrinks = size < max(h, w)
    rows, columns = (
        _resize(torch.eye(edge)[None, None], size, edge, interpolation, shrinks)[0, 0] for edge in (h, w)
    )
    matrices = rows, torch.kron(columns.T.contiguous(), torch.eye(3))
    return tuple(matrix.to(device, non_blocking=True) for matrix in matrices)


def _resize(images: Tensor, height: int, width: int, interpolation: str | None, shrinks: bool) -> Tensor:
    # With antialias, F.interpolate uses PIL's bicubic kernel (a = -0.5) even when enlarging. Without
    # antialias, the bicubic kernel uses a = -0.75.
    mode, antialias = interpolation or "bicubic", shrinks or interpolation is not None
    return F.interpolate(images, (height, width), mode=mode, antialias=antialias)


def mixer(mixup: float, cutmix: float, classes: int, dtype: torch.dtype | None = None) -> Mixer | None:
    """Create a function that applies mixup (arXiv 1710.09412) or cutmix (arXiv 1905.04899) to a micro-batch.

    The function maps (images [B, 3, H, W], labels int64 [B]) to (mixed images, float labels [B, classes]).
    The mixed images are channels_last if the input images are channels_last. Random numbers come from torch's
    generator, which is seeded by onecurve.numerics.order.reseed.

    Args:
        mixup: Mixup's alpha, or 0 to disable mixup.
        cutmix: Cutmix's alpha, or 0 to disable cutmix. If mixup is also enabled, each micro-batch uses either
            mixup or cutmix, chosen at random.
        classes: Number of classes.
        dtype: Dtype of the mixed images, which defaults to the dtype of the input images. For a model that
            rounds its inputs to bf16, the dtype bf16 halves the memory traffic.

    Returns:
        The function, or None if mixup and cutmix are disabled.
    """
    from torchvision.transforms import v2  # takes seconds to import

    class MixUp(v2.MixUp):
        """Mixup that preserves channels_last, which the roll() in torchvision's MixUp would lose on a GPU."""

        def transform(self, inpt: Tensor, params: dict[str, Any]) -> Tensor:
            if inpt is params["labels"]:
                return super().transform(inpt, params)
            others, weight = torch.cat((inpt[-1:], inpt[:-1])), params["lam"]
            if dtype is None:
                return others.mul_(1.0 - weight).add_(inpt.mul(weight))
            return torch.lerp(others, inpt, weight)  # lerp rounds only once

    transforms = [MixUp(alpha=mixup, num_classes=classes)] if mixup else []
    transforms += [v2.CutMix(alpha=cutmix, num_classes=classes)] if cutmix else []
    mix = v2.RandomChoice(transforms) if transforms else None
    return mix if mix is None or dtype is None else lambda images, labels: mix(images.to(dtype), labels)


def _mirrored(i: Tensor, n: int) -> Tensor:
    """Reflect indices outside of 0 ... n - 1 at the border pixels. Indices must satisfy |i| < 2n - 1."""
    return (n - 1) - ((n - 1) - i.abs()).abs()
