"""Optimizers by name, and the check for fused SGD."""

from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import DistributedType

from onecurve.system.text import did_you_mean


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
