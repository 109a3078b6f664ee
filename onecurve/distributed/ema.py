"""Exponential moving average (EMA) of the weights, under every strategy."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from accelerate.optimizer import AcceleratedOptimizer
from torch import Tensor, nn

from onecurve.distributed.layout import layout_of
from onecurve.upstream.torch_ import lerp_

EXCHANGED_BYTES = 64 * 2**20  # extra memory for exchanging two tensors


class EMA:
    """An exponential moving average of the fp32 weights; each process averages the shard that it holds.

    Under ZeRO these are the master weights, under FSDP2 the local shards, else the parameters. The decay is
    min(decay, (1 + step) / (10 + step)), as in TensorFlow: early in the training it averages fewer steps.
    """

    def __init__(self, model: nn.Module, optimizer: AcceleratedOptimizer, decay: float):
        self.decay = decay
        self.layout = layout_of(model, optimizer)
        self.averages = [weights.clone() for weights in self.layout.local]

    @torch.no_grad()
    def update(self, step: int) -> None:
        """Averages the weights after the optimizer step `step`, counted from 0."""
        decay = min(self.decay, (1 + step) / (10 + step))
        lerp_(self.averages, self.layout.local, 1 - decay)

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """Gives the model the averaged weights within the context. Collective, also at its end."""
        _exchange(self.averages, self.layout.local)
        try:
            self.layout.sync()
            yield
        finally:
            _exchange(self.averages, self.layout.local)
        self.layout.sync()


@torch.no_grad()
def _exchange(ours: list[Tensor], theirs: list[Tensor]) -> None:
    """Exchanges the contents of two lists of tensors."""
    for a, b in zip(ours, theirs, strict=True):
        if not a.numel():
            continue
        a, b = torch.atleast_1d(a), torch.atleast_1d(b)
        rows = max(1, EXCHANGED_BYTES * len(a) // a.nbytes)
        for some_a, some_b in zip(a.split(rows), b.split(rows), strict=True):
            kept = some_a.clone()
            some_a.copy_(some_b)
            some_b.copy_(kept)
