"""Creates optimizers by name, and determines whether fused SGD can be used."""

from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import DistributedType

from onecurve.system.text import did_you_mean


def can_fuse_sgd(accelerator: Accelerator) -> bool:
    """Return True if torch.optim.SGD(fused=True) can be used, that is, on a GPU without FSDP.

    Fused SGD updates all tensors in one kernel, and the fp16 scaler does not have to synchronize with the
    device. DTensors do not support fused SGD in torch 2.15. On a CPU, fused SGD would round differently from
    existing runs, which must remain resumable.
    """
    return accelerator.device.type == "cuda" and accelerator.distributed_type != DistributedType.FSDP


def named_optimizer(name: str, groups: list[dict[str, Any]], lr: float) -> torch.optim.Optimizer:
    """Create the named optimizer from timm, or else from torch, with default settings.

    Raises:
        ValueError: If no optimizer has this name, or if the optimizer can't be created.
    """
    from timm.optim import create_optimizer_v2, list_optimizers

    timm_names = list(map(str, list_optimizers()))
    torch_classes = {
        class_name.lower(): cls
        for class_name, cls in vars(torch.optim).items()
        if isinstance(cls, type) and class_name != "Optimizer"
    }
    try:
        if name.removeprefix("lookahead_") in timm_names:
            return create_optimizer_v2(groups, name, lr=lr)
        if name.lower() in torch_classes:
            return torch_classes[name.lower()](groups, lr=lr)
    except (ValueError, TypeError, AssertionError, ImportError, RuntimeError) as error:
        reason = str(error) or "a required package is not installed"
        raise ValueError(f"--optimizer {name} can't be created: {reason}") from error
    hint = did_you_mean(name, [*timm_names, *torch_classes]) or "timm.optim.list_optimizers() lists the names"
    raise ValueError(f"--optimizer {name} is neither in timm nor in torch: {hint}")
