"""What an optimizer is given, and an exponential moving average of what it trains, under every strategy."""

import math
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from accelerate.optimizer import AcceleratedOptimizer
from torch import nn

from common.distributed.layout import exchanged, layout_of


def parameter_groups(model: nn.Module, weight_decay: float) -> list[dict]:
    """Weight decay on matrices and convolutions only: not on biases, norms and what the model names in
    `no_weight_decay()` (position embeddings), which it would pull to zero without making the model smaller.
    """
    excluded = model.no_weight_decay() if hasattr(model, "no_weight_decay") else set()
    named = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    decayed = [p for name, p in named if p.ndim > 1 and name not in excluded]
    plain = [p for name, p in named if not (p.ndim > 1 and name not in excluded)]
    return [{"params": decayed, "weight_decay": weight_decay}, {"params": plain, "weight_decay": 0.0}]


def warmup_cosine(step: int, total_steps: int, warmup_steps: int) -> float:
    """The learning rate as a share of its peak: linear up, then half a cosine to 0 (arXiv 1608.03983)."""
    if step < warmup_steps:
        return (step + 1) / warmup_steps
    return 0.5 * (1 + math.cos(math.pi * (step - warmup_steps) / max(1, total_steps - warmup_steps)))


def set_learning_rate(optimizer: AcceleratedOptimizer, lr: float) -> None:
    """Instead of a scheduler, which accelerator.prepare would step once per process."""
    for group in optimizer.param_groups:
        group["lr"] = lr


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
        """After the optimizer step `step`, counted from 0."""
        decay = min(self.decay, (1 + step) / (10 + step))
        torch._foreach_lerp_(self.averages, self.layout.held, 1 - decay)

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """Inside, the model has the averaged weights. Collective: every process enters and leaves."""
        with exchanged(self.averages, self.layout.held):
            self.layout.publish()
            yield
        self.layout.publish()
