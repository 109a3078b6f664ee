"""What an optimizer is given, and an exponential moving average of what it trains, under every strategy."""

import math
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from accelerate.optimizer import AcceleratedOptimizer
from torch import Tensor, nn


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
        self.model, self.optimizer, self.decay = model, optimizer, decay
        self.weights = local_weights(model, optimizer)
        self.averages = [weights.clone() for weights in self.weights]

    @torch.no_grad()
    def update(self, step: int) -> None:
        """After the optimizer step `step`, counted from 0."""
        decay = min(self.decay, (1 + step) / (10 + step))
        torch._foreach_lerp_(self.averages, self.weights, 1 - decay)

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """Inside, the model has the averaged weights. Collective: every process enters and leaves."""
        self._swap()
        yield
        self._swap()

    @torch.no_grad()
    def _swap(self) -> None:
        for average, weights in zip(self.averages, self.weights, strict=True):
            trained = weights.clone()
            weights.copy_(average)
            average.copy_(trained)
        publish_weights(self.model, self.optimizer)


def local_weights(model: nn.Module, optimizer: AcceleratedOptimizer) -> list[Tensor]:
    """The fp32 weights that this process holds, which its optimizer changes in place.

    Flat partitions under ZeRO, local shards under FSDP2 (before the first forward), else the parameters.
    """
    zero = _zero_optimizer(optimizer)
    if zero is not None:
        return [flat.detach() for flat in _zero_partitions(zero)]
    parameters = [p.detach() for p in model.parameters() if p.requires_grad]
    return [p.to_local() if hasattr(p, "to_local") else p for p in parameters]


def publish_weights(model: nn.Module, optimizer: AcceleratedOptimizer) -> None:
    """Lets the next forward see what was written into local_weights. Collective."""
    zero = _zero_optimizer(optimizer)
    if zero is None:
        for module in model.modules():
            if hasattr(module, "reshard"):  # FSDP2 keeps gathered copies after a forward without backward
                module.reshard()
    elif hasattr(zero, "update_lp_params"):  # ZeRO-1 and 2
        zero.update_lp_params()
    else:  # ZeRO-3, as in its optimizer step
        zero._partition_all_parameters()
        for i in range(len(_zero_partitions(zero))):
            zero._reassign_or_swap_out_partitioned_parameters(i)
        if zero.persistent_parameters:
            zero.persistent_parameters[0].all_gather(zero.persistent_parameters)


def _zero_optimizer(optimizer: AcceleratedOptimizer) -> object | None:
    inner = optimizer.optimizer
    return inner if hasattr(inner, "zero_grad") and type(inner).__module__.startswith("deepspeed") else None


def _zero_partitions(zero: object) -> list[Tensor]:
    if hasattr(zero, "fp32_partitioned_groups_flat"):
        return zero.fp32_partitioned_groups_flat
    return zero.single_partition_of_fp32_groups
