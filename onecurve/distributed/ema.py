"""Exponential moving average (EMA) of the weights, under every strategy."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from accelerate.optimizer import AcceleratedOptimizer
from torch import Tensor, nn

from onecurve.distributed.layout import layout_of
from onecurve.upstream.torch_ import lerp_

EXCHANGED_BYTES = 64 * 2**20  # size of the temporary memory that is used to swap two tensors


class EMA:
    """Exponential moving average of the fp32 weights. Each process averages its local shard.

    The averaged tensors are the master weights under ZeRO, the local shards under FSDP2, and the parameters
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
        """Use the averaged weights in the model within the context. Entry and exit are collective."""
        _exchange(self.averages, self.layout.local)
        try:
            self.layout.sync()
            yield
        finally:
            _exchange(self.averages, self.layout.local)
        self.layout.sync()


@torch.no_grad()
def _exchange(tensors: list[Tensor], others: list[Tensor]) -> None:
    """Swap the contents of two lists of tensors."""
    for a, b in zip(tensors, others, strict=True):
        if not a.numel():
            continue
        a, b = torch.atleast_1d(a), torch.atleast_1d(b)
        rows = max(1, EXCHANGED_BYTES * len(a) // a.nbytes)
        for a_rows, b_rows in zip(a.split(rows), b.split(rows), strict=True):
            copy = a_rows.clone()
            a_rows.copy_(b_rows)
            b_rows.copy_(copy)
