"""Computes an exponential moving average (EMA) of the weights, under every strategy."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from accelerate.optimizer import AcceleratedOptimizer
from torch import Tensor, nn

from onecurve.distributed.layout import layout_of
from onecurve.upstream.torch_ import lerp_

EXCHANGED_BYTES = 64 * 2**20  # size of the temporary buffer for swapping two tensors


class EMA:
    """Exponential moving average of the fp32 weights. Each process averages its local tensors.

    These tensors are partitions of the master weights under ZeRO, shards under FSDP2, and whole parameters
    under other strategies. As in TensorFlow, the decay is min(decay, (1 + step) / (10 + step)), so early
    averages cover fewer steps.
    """

    def __init__(self, model: nn.Module, optimizer: AcceleratedOptimizer, decay: float):
        self.decay = decay
        self.layout = layout_of(model, optimizer)
        self.averages = [weights.clone() for weights in self.layout.local]

    @torch.no_grad()
    def update(self, step: int) -> None:
        """Update the averages after optimizer step `step`, counted from 0."""
        decay = min(self.decay, (1 + step) / (10 + step))
        lerp_(self.averages, self.layout.local, 1 - decay)

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """Use the averaged weights in the model inside the context. Entry and exit are collective."""
        _swap(self.averages, self.layout.local)
        try:
            self.layout.sync()
            yield
        finally:
            _swap(self.averages, self.layout.local)
        self.layout.sync()


@torch.no_grad()
def _swap(first_tensors: list[Tensor], second_tensors: list[Tensor]) -> None:
    """Swap the contents of two tensor lists."""
    for first, second in zip(first_tensors, second_tensors, strict=True):
        if not first.numel():
            continue
        first, second = torch.atleast_1d(first), torch.atleast_1d(second)
        rows = max(1, EXCHANGED_BYTES * len(first) // first.nbytes)
        for first_rows, second_rows in zip(first.split(rows), second.split(rows), strict=True):
            saved_rows = first_rows.clone()
            first_rows.copy_(second_rows)
            second_rows.copy_(saved_rows)
