"""An exponential moving average of the weights, under every strategy; optimizers by name; fused SGD."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.optimizer import AcceleratedOptimizer
from accelerate.utils import DistributedType
from torch import Tensor, nn

from onecurve.distributed.layout import layout_of
from onecurve.system.text import did_you_mean

EXCHANGED_BYTES = 64 * 2**20  # extra memory for exchanging two tensors


def can_fuse_sgd(accelerator: Accelerator) -> bool:
    """True where torch.optim.SGD(fused=True) can be used: on a GPU, except under FSDP.

    It runs one kernel for all tensors, and with it fp16's scaler needs no wait for the device. DTensors have
    no fused SGD in torch 2.15. On a CPU it would round differently than in runs that are to be resumed.
    """
    return accelerator.device.type == "cuda" and accelerator.distributed_type != DistributedType.FSDP


def named_optimizer(name: str, groups: list[dict[str, Any]], lr: float) -> torch.optim.Optimizer:
    """timm's optimizer of this name, else torch's, with its own defaults. ValueError if there is none."""
    from timm.optim import create_optimizer_v2, list_optimizers

    timms, ours = list(map(str, list_optimizers())), torch.optim
    torchs = {
        n.lower(): kind for n, kind in vars(ours).items() if isinstance(kind, type) and n != "Optimizer"
    }
    try:
        if name.removeprefix("lookahead_") in timms:
            return create_optimizer_v2(groups, name, lr=lr)
        if name.lower() in torchs:
            return torchs[name.lower()](groups, lr=lr)
    except (ValueError, TypeError, AssertionError, ImportError, RuntimeError) as error:
        reason = str(error) or "a package that it needs is not installed"
        raise ValueError(f"--optimizer {name} can't be made here: {reason}") from error
    meant = did_you_mean(name, [*timms, *torchs]) or "timm.optim.list_optimizers() names them"
    raise ValueError(f"--optimizer {name} is neither timm's nor torch's: {meant}")


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
        torch._foreach_lerp_(self.averages, self.layout.local, 1 - decay)

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
