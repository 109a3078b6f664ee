"""Copies of tensors: from the host to the device, asynchronously, and exchanges of contents."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import numpy as np
import torch
from torch import Tensor

EXCHANGED_BYTES = 64 * 2**20  # extra memory for exchanging two tensors
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


@contextmanager
def exchanged(ours: list[Tensor], theirs: list[Tensor]) -> Iterator[None]:
    """Exchanges the contents of two lists of tensors, and exchanges them back at the end."""
    _exchange(ours, theirs)
    try:
        yield
    finally:
        _exchange(ours, theirs)


@torch.no_grad()
def _exchange(ours: list[Tensor], theirs: list[Tensor]) -> None:
    for a, b in zip(ours, theirs, strict=True):
        if not a.numel():
            continue
        a, b = torch.atleast_1d(a), torch.atleast_1d(b)
        rows = max(1, EXCHANGED_BYTES * len(a) // a.nbytes)
        for some_a, some_b in zip(a.split(rows), b.split(rows), strict=True):
            kept = some_a.clone()
            some_a.copy_(some_b)
            some_b.copy_(kept)
