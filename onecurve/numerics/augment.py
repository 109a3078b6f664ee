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
    "shift": slice(0, 2),  # random_moves(), for the shifts down and right
    "flip": slice(2, 3),  # random_moves(), and the flips of photos after the crop
    "crop": slice(4, 44),  # random_resized_crop() in data/crops.py, with ten attempts of four numbers
    "color": slice(44, 48),  # color_jitter()
    "erasing": slice(48, 53),  # random_erasing()
    "rand_augment": slice(53, 69),  # rand_augment(), with up to four layers of four numbers
}
SHIFT, FLIP, CROP, COLOR, ERASING, RAND_AUGMENT = COLUMNS.values()
DRAWS = RAND_AUGMENT.stop  # number of random numbers per sample

# Maximum number of pixels in an image whose normalisation factors are repeated for each pixel. For larger
# images, the inner loop is long enough without repetition, and repeated factors would need too much memory.
MAX_REPEATED_PIXELS = 2**19
ALIGNMENT_BYTES = 8  # because a view with a different dtype must start at a multiple of that dtype's size
MAX_MATRIX_EDGE = 4096  # pixels, because the matrices that resize longer edges would need gigabytes
MIN_ERASED_AREA, MAX_ERASED_AREA = 0.02, 1 / 3  # fractions of the image's area
MIN_ERASED_ASPECT = 0.3  # minimum aspect ratio of an erased box; the maximum is the reciprocal
Mixer = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]  # mixes the images and labels of a micro-batch
# ITU-R 601-2 weights of red, green and blue, as in PIL and torchvision
RED_LUMA, GREEN_LUMA, BLUE_LUMA = 0.2989, 0.587, 0.114
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
    # Each array's size, rounded up so that the next array is aligned
    bytes_per_buffer = [-(-array.nbytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES for array in arrays]
    host_buffer = np.empty(sum(bytes_per_buffer), np.uint8)
    array_buffers = np.split(host_buffer, np.cumsum(bytes_per_buffer)[:-1])
    for array, array_buffer in zip(arrays, array_buffers, strict=True):
        array_buffer[: array.nbytes] = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
    device_buffers = send(torch.from_numpy(host_buffer), device).split(bytes_per_buffer)
    # from_numpy() of an empty slice converts the array's dtype to torch's
    return [
        device_buffer[: array.nbytes].view(torch.from_numpy(array[:0]).dtype).view(array.shape)
        for array, device_buffer in zip(arrays, device_buffers, strict=True)
    ]


def random_moves(draws: np.ndarray, max_shift: int, flip: bool) -> np.ndarray:
    """Draw a random shift (up to `max_shift` pixels down and right) and a horizontal flip for each image.

    The augmentation follows He et al. 2015 (arXiv 1512.03385, section 4.2).

    Args:
        draws: Random numbers, float64 [B, >= 3] in [0, 1). Only the columns SHIFT and FLIP are used.
        max_shift: Maximum shift in pixels.
        flip: Whether to flip images with a probability of 1/2.

    Returns:
        Downward shift, rightward shift, and 1 for a flip, int64 [3, B].
    """
    shifts = np.floor(draws[:, SHIFT] * (2 * max_shift + 1)).astype(np.int64) - max_shift
    flip_probability = 0.5 if flip else 0.0
    return np.stack([*shifts.T, draws[:, FLIP.start] < flip_probability])


def moved_pixel_indices(image_indices: Tensor, moves: Tensor, shape: Sequence[int]) -> tuple[Tensor, Tensor]:
    """Return the source pixel indices of shifted and flipped images.

    Images are mirrored at their borders, whereas He et al. pad images with black.

    Args:
        image_indices: Indices of the images, int64 [B].
        moves: Result of random_moves(), int64 [3, B]. Each shift must be smaller than the image's edge.
        shape: Shape of all images, [N, H, W, 3].

    Returns:
        Offsets y [B, H] and x [B, W], on the same device as `image_indices`. The sum y + x is the index of a
        pixel among the N * H * W pixels of all images.
    """
    image_count, h, w, _ = shape
    # Indices in int32 instead of int64 halve the memory traffic
    index_dtype = torch.int32 if image_count * h * w < 2**31 else torch.int64
    down, right, is_flipped = moves.to(index_dtype)[:, :, None].unbind()  # [B, 1] each
    y, x = (torch.arange(edge, dtype=index_dtype, device=image_indices.device) for edge in (h, w))
    pixel_rows = _mirrored(y + down, h) + image_indices.to(index_dtype)[:, None] * h
    return pixel_rows * w, _mirrored(torch.where(is_flipped > 0, x.flip(0), x) + right, w)


def gather_pixels(images: Tensor, y: Tensor, x: Tensor) -> Tensor:
    """Gather shifted and flipped images from all images: uint8 [N, H, W, 3] -> uint8 [B, H, W, 3].

    moved_pixel_indices() returns the index offsets y [B, H] and x [B, W].
    """
    pixel_indices = y[:, :, None] + x[:, None, :]  # [B, H, W]
    return images.reshape(-1, 3).index_select(0, pixel_indices.view(-1)).view(*pixel_indices.shape, 3)


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
    factor_draws, order_draws = draws[:, :3], draws[:, 3]
    operation_order = JITTER_ORDERS[(order_draws * len(JITTER_ORDERS)).astype(np.int64)]  # [B, 3]
    factors = np.take_along_axis(1 + strength * (2 * factor_draws - 1), operation_order, axis=1)
    # Brightness (0) blends an image with black, contrast (1) with the image's mean grey value, and saturation
    # (2) with each pixel's grey value.
    is_contrast, is_saturation = operation_order == 1, operation_order == 2  # [B, 3]
    blends = np.stack([factors, (1 - factors) * is_contrast, (1 - factors) * is_saturation])  # [3, B, 3]
    blend_weights = send(torch.from_numpy(blends.astype(np.float32)), images.device)
    planes = images.permute(3, 0, 1, 2).contiguous().float()  # [3, B, H, W]
    # Apply each image's three operations in its own order. The weights have the shape [B, 1, 1].
    for image_weight, mean_weight, grey_weight in blend_weights[..., None, None].unbind(2):
        luma = RED_LUMA * planes[0] + GREEN_LUMA * planes[1] + BLUE_LUMA * planes[2]  # [B, H, W]
        # Integers are summed, because the last bit of a float sum would depend on the other images in the
        # batch.
        luma_sum = luma.round().int().sum((1, 2), keepdim=True)
        weighted_grey = luma_sum * (mean_weight / (h * w)) + luma * grey_weight
        planes.mul_(image_weight).add_(weighted_grey).clamp_(0, 255)
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
    erase_draws, area_draws, aspect_draws, top_draws, left_draws = draws.T
    box_area = (MIN_ERASED_AREA + (MAX_ERASED_AREA - MIN_ERASED_AREA) * area_draws) * h * w
    # The aspect ratio's logarithm is uniform
    box_aspect = np.exp((2 * aspect_draws - 1) * -math.log(MIN_ERASED_ASPECT))
    # A box of height 0 erases nothing
    height = np.minimum(np.round(np.sqrt(box_area * box_aspect)), h) * (erase_draws < probability)
    width = np.minimum(np.round(np.sqrt(box_area / box_aspect)), w)
    top, left = np.floor(top_draws * (h - height + 1)), np.floor(left_draws * (w - width + 1))
    box_edges = np.stack([top, top + height, left, left + width]).astype(np.int32)[:, :, None]  # [4, B, 1]
    top, bottom, left, right = send(torch.from_numpy(box_edges), images.device)
    y, x = (torch.arange(edge, device=images.device, dtype=torch.int32) for edge in (h, w))
    is_box_row, is_box_column = (y >= top) & (y < bottom), (x >= left) & (x < right)  # [B, H], [B, W]
    is_in_box = is_box_row[:, :, None] & is_box_column[:, None, :]
    return images.masked_fill_(is_in_box[:, None], 0)


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
    # Number of pixels for which the channels' factors are repeated
    repetitions = h * w if h * w <= MAX_REPEATED_PIXELS else 1
    pixel_scale, pixel_offset = _normalization_factors(mean, std, repetitions, images.device)
    float_pixels = images.reshape(b, -1, repetitions * c).float().mul_(pixel_scale).add_(pixel_offset)
    if (h, w) != (size, size) and max(h, w) <= MAX_MATRIX_EDGE:
        row_matrix, column_matrix = _resize_matrices(h, w, size, interpolation, images.device)
        resized_rows = (float_pixels.view(b * h, w * c) @ column_matrix).view(b, h, size * c)
        float_pixels = row_matrix @ resized_rows  # [B, size, size * 3]
        h = w = size
    image_planes = float_pixels.view(b, h, w, c).permute(0, 3, 1, 2)
    if (h, w) != (size, size):
        image_planes = _resize(image_planes, size, size, interpolation, size < max(h, w))
    return image_planes


@lru_cache(maxsize=8)
def _normalization_factors(
    mean: tuple[float, ...], std: tuple[float, ...], repetitions: int, device: torch.device
) -> Tensor:
    """Return the scales and offsets that normalise `repetitions` pixels, [2, repetitions * 3].

    Repeated factors let the inner loop cover an image. The tensor is cached, because each copy to a GPU costs
    the host about 10 us. The alternative, torch.tensor(..., device=...), would also wait for all work queued
    on the device.
    """
    scales = [1 / (255 * channel_std) for channel_std in std]
    offsets = [-channel_mean / channel_std for channel_mean, channel_std in zip(mean, std, strict=True)]
    return torch.tensor([scales, offsets]).to(device, non_blocking=True).repeat(1, repetitions)


@lru_cache(maxsize=8)
def _resize_matrices(
    h: int, w: int, size: int, interpolation: str | None, device: torch.device
) -> tuple[Tensor, ...]:
    """Return matrices that resize rows, [size, H], and columns with interleaved channels, [W * 3, size * 3].

    Matrix products can resize images because resizing is linear in the pixels. On a CPU, the matrix products
    take a fifth of the time of F.interpolate (32 to 224 pixels). The speed of the matrix products on a GPU
    has not been measured yet.
    """
    is_shrinking = size < max(h, w)
    # Resizing the rows of an identity matrix yields the matrix that resizes any image
    row_matrix, column_matrix = (
        _resize(torch.eye(edge)[None, None], size, edge, interpolation, is_shrinking)[0, 0] for edge in (h, w)
    )
    channel_matrix = torch.kron(column_matrix.T.contiguous(), torch.eye(3))
    return tuple(matrix.to(device, non_blocking=True) for matrix in (row_matrix, channel_matrix))


def _resize(images: Tensor, height: int, width: int, interpolation: str | None, is_shrinking: bool) -> Tensor:
    """Resize images, float [B, C, H, W], to height x width pixels."""
    resize_mode = interpolation or "bicubic"
    # With antialias, F.interpolate uses PIL's bicubic kernel (a = -0.5) even when enlarging. Without
    # antialias, the bicubic kernel uses a = -0.75.
    antialias = is_shrinking or interpolation is not None
    return F.interpolate(images, (height, width), mode=resize_mode, antialias=antialias)


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
            """Mix each image with the previous image, or each label with the previous label."""
            if inpt is params["labels"]:
                return super().transform(inpt, params)
            previous_images = torch.cat((inpt[-1:], inpt[:-1]))
            mix_weight = params["lam"]
            if dtype is None:
                return previous_images.mul_(1.0 - mix_weight).add_(inpt.mul(mix_weight))
            return torch.lerp(previous_images, inpt, mix_weight)  # lerp rounds only once

    mix_transforms = [MixUp(alpha=mixup, num_classes=classes)] if mixup else []
    mix_transforms += [v2.CutMix(alpha=cutmix, num_classes=classes)] if cutmix else []
    if not mix_transforms:
        return None
    mix_batch = v2.RandomChoice(mix_transforms)
    return mix_batch if dtype is None else lambda images, labels: mix_batch(images.to(dtype), labels)


def _mirrored(pixel_indices: Tensor, edge: int) -> Tensor:
    """Reflect indices i outside of 0 ... edge - 1 at the border pixels, where |i| < 2 * edge - 1."""
    last_index = edge - 1
    return last_index - (last_index - pixel_indices.abs()).abs()
