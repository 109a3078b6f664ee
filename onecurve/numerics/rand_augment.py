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

from .augment import BLUE_LUMA, GREEN_LUMA, RED_LUMA, send_arrays

WarpFactors = tuple[float | np.ndarray, ...]  # the six factors a to f for _warped()
LayerPlan = tuple[list[int], tuple[np.ndarray, ...]]  # group sizes, and LAYER_ARRAYS arrays

LAYER_DRAWS = 4  # number of random numbers per sample and layer
LAYER_ARRAYS = 4  # number of arrays in a layer's plan that are sent to the device
GREY = 128  # value of all channels in filled areas
REFERENCE_EDGE = 224  # image size in pixels to which the constants of shifts and cut-outs refer
UNIT_SHIFT = 100 / REFERENCE_EDGE  # shift at strength 1, as a fraction of the image's edge


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
    strength = magnitude / 10
    h, w = images.shape[1:3]
    layer_draws = [draws[:, layer * LAYER_DRAWS : (layer + 1) * LAYER_DRAWS] for layer in range(layers)]
    layer_plans = [_plan_layer(draws_of_layer, h, w, strength) for draws_of_layer in layer_draws]
    plan_arrays = [array for _group_sizes, arrays in layer_plans for array in arrays]
    device_arrays = send_arrays(plan_arrays, images.device)  # one copy for all layers
    for layer_index, (group_sizes, _arrays) in enumerate(layer_plans):
        layer_arrays = device_arrays[LAYER_ARRAYS * layer_index : LAYER_ARRAYS * (layer_index + 1)]
        image_order, inverse_order, warp_factors, cutout_centers = layer_arrays
        images_by_group = images.index_select(0, image_order).split(group_sizes)
        augmented_groups = [
            _apply_group(group_name, group_images, strength, warp_factors, cutout_centers)
            for group_name, group_images in zip(GROUP_NAMES, images_by_group, strict=True)
        ]
        images = torch.cat(augmented_groups).index_select(0, inverse_order)  # restores the original order
    return images


def _plan_layer(layer_draws: np.ndarray, h: int, w: int, strength: float) -> LayerPlan:
    """Choose one operation for each image, and group the images by operation, on the host.

    Args:
        layer_draws: Random numbers of one layer, float64 [B, LAYER_DRAWS] in [0, 1).
        h: Height of the images.
        w: Width of the images.
        strength: Strength of the operations.

    Returns:
        The number of images in each group, and LAYER_ARRAYS arrays. The arrays contain the order of the
        images by group (int64 [B]), the inverse of this order (int64 [B]), the factors for _warped() (float32
        [6, warped]), and the centers of the cut-out squares (int32 [cut out, 2]).
    """
    operation_draws, direction_draws, center_draws = layer_draws[:, 0], layer_draws[:, 1], layer_draws[:, 2:4]
    operation_indices = (operation_draws * len(OPERATIONS)).astype(np.int64)
    group_indices = _GROUP_INDEX_BY_OPERATION[operation_indices]
    image_order = np.argsort(group_indices, kind="stable")
    warp_factors = np.zeros((6, len(layer_draws)))  # the six factors of each image, 0 for other operations
    directions = np.where(direction_draws < 0.5, -1.0, 1.0)
    for warp_name, compute_factors in WARPS.items():
        is_warped = operation_indices == OPERATIONS.index(warp_name)
        new_factors = compute_factors(h, w, strength, directions[is_warped])
        for factor_row, new_factor in zip(warp_factors, new_factors, strict=True):
            factor_row[is_warped] = new_factor
    warped_image_ids, cutout_image_ids = (
        image_order[group_indices[image_order] == GROUP_NAMES.index(group_name)]
        for group_name in ("Warp", "Cutout")
    )
    cutout_centers = np.floor(center_draws[cutout_image_ids] * (h, w)).astype(np.int32)
    group_sizes = np.bincount(group_indices, minlength=len(GROUP_NAMES)).tolist()
    sorted_warp_factors = warp_factors[:, warped_image_ids].astype(np.float32)
    inverse_order = np.argsort(image_order)
    return group_sizes, (image_order, inverse_order, sorted_warp_factors, cutout_centers)


def _apply_group(
    group_name: str, images: Tensor, strength: float, warp_factors: Tensor, cutout_centers: Tensor
) -> Tensor:
    """Apply a group's operation to all images in the group, which may be empty."""
    if not len(images):
        return images
    if group_name == "Warp":
        return _warped(images, warp_factors)
    if group_name == "Cutout":
        return _cutout(images, strength, cutout_centers)
    return SIMPLE_OPERATIONS[group_name](images, strength)


def _call_torchvision(function_name: str, images: Tensor, *function_arguments: float) -> Tensor:
    """Call a function of torchvision.transforms.v2.functional on images [b, H, W, 3].

    The functions in torchvision expect images [b, 3, H, W].
    """
    from torchvision.transforms.v2 import functional  # takes seconds to import

    return getattr(functional, function_name)(images.movedim(3, 1), *function_arguments).movedim(1, 3)


# --- Operations: (uint8 [b, H, W, 3], strength >= 0) -> uint8 [b, H, W, 3]


def _auto_contrast(images: Tensor, strength: float) -> Tensor:
    """Stretch each channel so that its darkest value becomes 0 and its brightest value becomes 255."""
    darkest = images.amin((1, 2), keepdim=True).float()
    brightest = images.amax((1, 2), keepdim=True).float()
    scale = 255 / (brightest - darkest)
    return torch.where(brightest > darkest, _clip_to_uint8(images * scale - darkest * scale), images)


def _posterize(images: Tensor, strength: float) -> Tensor:
    """Keep only the upper 4 * strength bits (8 at most) of each pixel value."""
    upper_bit_count = min(8, int(4 * strength))
    return _call_torchvision("posterize", images, upper_bit_count)


def _solarize(images: Tensor, strength: float) -> Tensor:
    """Invert pixel values from 256 * strength to 255."""
    threshold = int(256 * strength)
    # torchvision raises an error for a threshold above 255, which would not change any pixel
    return _call_torchvision("solarize", images, threshold) if threshold <= 255 else images


def _solarize_add(images: Tensor, strength: float) -> Tensor:
    """Add 110 * strength to dark pixel values, which are below 128."""
    brighter_images = (images.short() + int(110 * strength)).clamp(max=255).to(torch.uint8)
    return torch.where(images < 128, brighter_images, images)


def _adjust_color(images: Tensor, strength: float) -> Tensor:
    """Blend images with their grey versions, which changes the saturation."""
    return _blended(images, _pixel_brightness(images), strength)


def _adjust_contrast(images: Tensor, strength: float) -> Tensor:
    """Blend each image with its mean grey value. The sum is exact, because it adds integers."""
    h, w = images.shape[1:3]
    mean_brightness = _pixel_brightness(images).int().sum((1, 2), keepdim=True) // (h * w)
    return _blended(images, mean_brightness, strength)


def _adjust_sharpness(images: Tensor, strength: float) -> Tensor:
    """Blend images with 3 x 3 means that weight the center pixel by 5. Border pixels do not change."""
    h, w = images.shape[1:3]
    pixels = images.short()
    row_sums = pixels[:, :-2] + pixels[:, 1:-1] + pixels[:, 2:]
    box_sums = row_sums[:, :, :-2] + row_sums[:, :, 1:-1] + row_sums[:, :, 2:]
    weighted_sums = box_sums + 4 * pixels[:, 1:-1, 1:-1]  # the weights are 8 * 1 + 5 = 13
    smooth_images = images.clone()
    smooth_images[:, 1 : h - 1, 1 : w - 1] = (weighted_sums // 13).to(torch.uint8)
    return _blended(images, smooth_images, strength)


def _cutout(images: Tensor, strength: float, centers: Tensor) -> Tensor:
    """Fill a square around each center (int32 [b, 2]) with GREY, clipped at the image border."""
    h, w = images.shape[1:3]
    half_edge = int(40 / REFERENCE_EDGE * min(h, w) * strength)  # 40 pixels at size 224 and strength 1
    y, x = (torch.arange(edge, device=images.device, dtype=torch.int32) for edge in (h, w))
    center_y, center_x = centers[:, :1], centers[:, 1:]
    is_cut_row = (y >= center_y - half_edge) & (y < center_y + half_edge)  # [b, H]
    is_cut_column = (x >= center_x - half_edge) & (x < center_x + half_edge)  # [b, W]
    is_cut = is_cut_row[:, :, None] & is_cut_column[:, None, :]
    return images.masked_fill(is_cut[..., None], GREY)


# Operations that compute each image from its pixels and the strength only
SIMPLE_OPERATIONS = {
    "AutoContrast": _auto_contrast,
    "Equalize": lambda images, strength: _call_torchvision("equalize", images),
    "Invert": lambda images, strength: _call_torchvision("invert", images),
    "Posterize": _posterize,
    "Solarize": _solarize,
    "Color": _adjust_color,
    "Contrast": _adjust_contrast,
    "Brightness": lambda images, strength: _call_torchvision(
        "adjust_brightness", images, _enhance_factor(strength)
    ),
    "Sharpness": _adjust_sharpness,
    "SolarizeAdd": _solarize_add,
}

# --- Warps: (height, width, strength, direction float64 [b]) -> the six factors for _warped(), each of which
# is a number for all images or an array with one number per image


def _rotate(h: int, w: int, strength: float, direction: np.ndarray) -> WarpFactors:
    """Return the factors of a rotation around the image's center by 30 degrees at strength 1."""
    angle = np.radians(30 * strength) * direction
    cos, sin = np.cos(angle), np.sin(angle)
    center_y, center_x = (h - 1) / 2, (w - 1) / 2
    shift_x = center_x - cos * center_x + sin * center_y
    shift_y = center_y - sin * center_x - cos * center_y
    return cos, -sin, shift_x, sin, cos, shift_y


# Operations that move pixels, with their functions for the warp factors. At strength 1, a shear shifts each
# row or column by 0.3 pixels more than the previous one.
WARPS: dict[str, Callable[[int, int, float, np.ndarray], WarpFactors]] = {
    "Rotate": _rotate,
    "ShearX": lambda h, w, strength, direction: (1, 0.3 * strength * direction, 0, 0, 1, 0),
    "ShearY": lambda h, w, strength, direction: (1, 0, 0, 0.3 * strength * direction, 1, 0),
    "TranslateX": lambda h, w, strength, direction: (1, 0, UNIT_SHIFT * w * strength * direction, 0, 1, 0),
    "TranslateY": lambda h, w, strength, direction: (1, 0, 0, 0, 1, UNIT_SHIFT * h * strength * direction),
}

# Operations in the order of the indices that random numbers select
OPERATIONS = (
    "AutoContrast", "Equalize", "Invert", "Rotate", "Posterize", "Solarize", "Color", "Contrast",
    "Brightness", "Sharpness", "ShearX", "ShearY", "TranslateX", "TranslateY", "Cutout", "SolarizeAdd",
)  # fmt: skip
# Groups of operations whose images are processed together. The warps form a single group, which reduces the
# number of kernel launches on a GPU.
GROUP_NAMES = (*SIMPLE_OPERATIONS, "Cutout", "Warp")
_GROUP_INDEX_BY_OPERATION = np.array(
    [GROUP_NAMES.index("Warp" if operation in WARPS else operation) for operation in OPERATIONS]
)


def _pixel_brightness(images: Tensor) -> Tensor:
    """Return each pixel's brightness according to ITU-R 601-2: uint8 [b, H, W, 1]."""
    red, green, blue = images.float().unbind(3)
    return (RED_LUMA * red + GREEN_LUMA * green + BLUE_LUMA * blue).round_().to(torch.uint8)[..., None]


def _blended(images: Tensor, blend_images: Tensor, strength: float) -> Tensor:
    """Interpolate from `blend_images` (factor 0) to `images` (factor 1). The factor may exceed 1."""
    blend_images = blend_images.float()
    return _clip_to_uint8(blend_images + _enhance_factor(strength) * (images - blend_images))


def _enhance_factor(strength: float) -> float:
    """Convert a strength to a factor of PIL's ImageEnhance.

    A factor of 1 keeps the image, and a factor of 0 removes, for example, its contrast.
    """
    return 1.8 * strength + 0.1


def _clip_to_uint8(pixel_values: Tensor) -> Tensor:
    return pixel_values.clamp(0, 255).to(torch.uint8)


def _warped(images: Tensor, factors: Tensor) -> Tensor:
    """Copy the pixel nearest to (a x + b y + c, d x + e y + f) to each position (x, y).

    Positions whose source lies outside the image become GREY. `factors` contains a to f of each image,
    float32 [6, b].
    """
    image_count, h, w, _ = images.shape
    a, b, c, d, e, f = factors[:, :, None, None].unbind()
    x = torch.arange(w, device=images.device).float()
    y = torch.arange(h, device=images.device).float()[:, None]
    source_columns = (a * x + b * y + c + 0.5).floor_().long()  # [b, H, W], rounded to the nearest pixel
    source_rows = (d * x + e * y + f + 0.5).floor_().long()  # [b, H, W]
    is_inside_column = (source_columns >= 0) & (source_columns < w)
    is_source_inside = is_inside_column & (source_rows >= 0) & (source_rows < h)
    first_pixel_indices = torch.arange(image_count, device=images.device)[:, None, None] * (h * w)
    # Clamping makes all indices valid. torch.where() discards the pixels of clamped indices.
    pixel_indices = first_pixel_indices + source_rows.clamp_(0, h - 1) * w + source_columns.clamp_(0, w - 1)
    warped_images = images.reshape(-1, 3).index_select(0, pixel_indices.view(-1)).view(images.shape)
    return torch.where(is_source_inside[..., None], warped_images, GREY)
