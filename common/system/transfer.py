"""Asynchronous copies from the host to the device."""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

ALIGNMENT = 8  # bytes; a view of another type must begin at a multiple of its size


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
