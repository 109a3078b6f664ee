"""Computes an exponential moving average (EMA) of the weights, under every strategy."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from accelerate.optimizer import AcceleratedOptimizer
from torch import Tensor, nn

from onecurve.distributed.strategy_layouts import layout_of
from onecurve.upstream.torch_ import lerp_

SWAP_BUFFER_BYTES = 64 * 2**20  # size of the temporary buffer for swapping two tensors


class EMA:
    """Exponential moving average of the fp32 weights. Each process averages its local tensors.

    These tensors are partitions of the master weights under ZeRO, shards under FSDP2, and whole parameters
    under other strategies. As in TensorFlow, the decay is min(decay, (1 + step) / (10 + step)), so early
    averages cover fewer steps.
    """

    def __init__(self, model: nn.Module, optimizer: AcceleratedOptimizer, decay: float):
        self.decay = decay  # upper limit of a step's decay
        self.layout = layout_of(model, optimizer)
        self.averages = [weights.clone() for weights in self.layout.local_tensors]

    @torch.no_grad()
    def update(self, step: int) -> None:
        """Update the averages in place after the optimizer step with index `step`, counted from 0."""
        step_decay = min(self.decay, (1 + step) / (10 + step))  # smaller in early steps
        lerp_(self.averages, self.layout.local_tensors, 1 - step_decay)

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """Use the averaged weights in the model inside the context, and restore the weights on exit.

        Entry and exit are collective.
        """
        _swap_contents(self.averages, self.layout.local_tensors)
        try:
            self.layout.sync_model()
            yield
        finally:
            _swap_contents(self.averages, self.layout.local_tensors)
        self.layout.sync_model()  # skipped after an error, because other ranks may not reach this collective


@torch.no_grad()
def _swap_contents(averages: list[Tensor], weights: list[Tensor]) -> None:
    """Swap the averages and the weights in place.

    Each tensor is swapped in blocks of rows, to limit the temporary buffer to about SWAP_BUFFER_BYTES.
    """
    for average, weight in zip(averages, weights, strict=True):
        if not average.numel():
            continue
        average, weight = torch.atleast_1d(average), torch.atleast_1d(weight)  # split() needs a dimension
        max_rows = max(1, SWAP_BUFFER_BYTES * len(average) // average.nbytes)
        for average_rows, weight_rows in zip(average.split(max_rows), weight.split(max_rows), strict=True):
            saved_average_rows = average_rows.clone()
            average_rows.copy_(weight_rows)
            weight_rows.copy_(saved_average_rows)
