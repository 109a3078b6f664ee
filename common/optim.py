"""An exponential moving average of the weights, under every strategy; where SGD is fused."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from accelerate import Accelerator
from accelerate.optimizer import AcceleratedOptimizer
from accelerate.utils import DistributedType
from torch import nn

from common.distributed.layout import exchanged, layout_of


def can_fuse_sgd(accelerator: Accelerator) -> bool:
    """True where torch.optim.SGD(fused=True) serves: on a GPU, but under FSDP.

    One kernel for all tensors, and fp16's scaler does not wait for the device to see an overflow. FSDP's
    DTensors know no fused SGD in torch 2.15. On a CPU it rounds differently, and a continued run must not.
    """
    return accelerator.device.type == "cuda" and accelerator.distributed_type != DistributedType.FSDP


class EMA:
    """An exponential moving average of the fp32 weights; each process averages the shard that it holds.

    Under ZeRO these are the master weights, under FSDP2 the local shards, else the parameters. Early in the
    training the average is shorter, min(decay, (1 + step) / (10 + step)), as in TensorFlow's.
    """

    def __init__(self, model: nn.Module, optimizer: AcceleratedOptimizer, decay: float):
        self.decay = decay
        self.layout = layout_of(model, optimizer)
        self.averages = [weights.clone() for weights in self.layout.held]

    @torch.no_grad()
    def update(self, step: int) -> None:
        """Averages the weights after the optimizer step `step`, counted from 0."""
        decay = min(self.decay, (1 + step) / (10 + step))
        torch._foreach_lerp_(self.averages, self.layout.held, 1 - decay)

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """Gives the model the averaged weights until the end. Collective: every process enters and leaves."""
        with exchanged(self.averages, self.layout.held):
            self.layout.publish()
            yield
        self.layout.publish()
