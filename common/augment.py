"""Augmentation of a whole batch on the device; its randomness belongs to each sample (common/order.py)."""

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn


def crop_and_flip(images: Tensor, draws: np.ndarray, pad: int, flip: bool) -> Tensor:
    """Random shifts by up to `pad` pixels, the border mirrored, and horizontal flips, all by one gather.

    images: uint8 [B, H, W, 3]; draws: float64 [B, >= 3] in [0, 1), for the vertical shift, the horizontal
    shift and the flip. Returns uint8 [B, H, W, 3]. As in He et al. 2015 (arXiv 1512.03385, section 4.2), but
    with mirrored instead of black borders.
    """
    b, h, w, _ = images.shape
    shift = np.floor(draws[:, :2] * (2 * pad + 1)).astype(np.int32) - pad  # 32 bits: half the index traffic
    mirrored = draws[:, 2:3] < (0.5 if flip else 0.0)
    y, x = np.arange(h, dtype=np.int32), np.arange(w, dtype=np.int32)
    rows = _mirror(y + shift[:, :1], h) + np.arange(b, dtype=np.int32)[:, None] * h  # [B, H], of the batch
    columns = _mirror(np.where(mirrored, x[::-1], x) + shift[:, 1:], w)  # [B, W]
    rows, columns = (torch.from_numpy(i).to(images.device, non_blocking=True) for i in (rows * w, columns))
    pixels = rows[:, :, None] + columns[:, None, :]  # [B, H, W], into the pixels of the batch
    return images.reshape(-1, 3).index_select(0, pixels.view(-1)).view(b, h, w, 3)


def to_float(images: Tensor, mean: tuple[float, ...], std: tuple[float, ...], size: int) -> Tensor:
    """uint8 [B, H, W, 3] -> normalised float32 [B, 3, size, size], channels_last. mean, std: of [0, 1].

    The resize is bicubic and happens here, on the device: 3 kB a CIFAR image cross to it instead of 602 kB.
    """
    b, h, w, c = images.shape
    # Scale and shift stand for a whole image, so that the inner loop runs over H*W*3 values and not over 3.
    scale = torch.tensor([1 / (255 * s) for s in std], device=images.device).repeat(h * w)
    shift = torch.tensor([-m / s for m, s in zip(mean, std, strict=True)], device=images.device).repeat(h * w)
    floats = images.view(b, -1).float().mul_(scale).add_(shift).view(b, h, w, c).permute(0, 3, 1, 2)
    if (h, w) == (size, size):
        return floats
    return F.interpolate(floats, (size, size), mode="bicubic", antialias=size < min(h, w))


def mixer(mixup: float, cutmix: float, classes: int) -> nn.Module | None:
    """Mixup (arXiv 1710.09412) or cutmix (arXiv 1905.04899), by their alphas; one of them per micro-batch.

    Maps (images [B, 3, H, W], labels int64 [B]) to (mixed images, float labels [B, classes]). It draws from
    torch's generator, which common.order.reseed sets.
    """
    from torchvision.transforms import v2  # takes seconds to import

    kinds = [v2.MixUp(alpha=mixup, num_classes=classes)] if mixup else []
    kinds += [v2.CutMix(alpha=cutmix, num_classes=classes)] if cutmix else []
    return v2.RandomChoice(kinds) if kinds else None


def _mirror(i: np.ndarray, n: int) -> np.ndarray:
    """Indices outside 0 ... n - 1 are reflected at the border pixel. |i| < 2n - 1."""
    return (n - 1) - np.abs((n - 1) - np.abs(i))
