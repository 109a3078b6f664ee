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


def named_optimizer(name: str, parameter_groups: list[dict[str, Any]], lr: float) -> torch.optim.Optimizer:
    """Create the named optimizer from timm, or else from torch, with default settings.

    Raises:
        ValueError: If no optimizer has this name, or if the optimizer can't be created.
    """
    from timm.optim import create_optimizer_v2, list_optimizers

    timm_optimizer_names = list(map(str, list_optimizers()))
    class_by_torch_name = {
        class_name.lower(): optimizer_class
        for class_name, optimizer_class in vars(torch.optim).items()
        if isinstance(optimizer_class, type) and class_name != "Optimizer"
    }
    try:
        # timm accepts the prefix for all optimizers, but does not list the prefixed names
        if name.removeprefix("lookahead_") in timm_optimizer_names:
            return create_optimizer_v2(parameter_groups, name, lr=lr)
        if name.lower() in class_by_torch_name:
            return class_by_torch_name[name.lower()](parameter_groups, lr=lr)
    except (ValueError, TypeError, AssertionError, ImportError, RuntimeError) as error:
        failure_reason = str(error) or "a required package is not installed"
        raise ValueError(f"--optimizer {name} can't be created: {failure_reason}") from error
    name_suggestion = did_you_mean(name, [*timm_optimizer_names, *class_by_torch_name])
    name_advice = name_suggestion or "timm.optim.list_optimizers() lists the names"
    raise ValueError(f"--optimizer {name} is neither in timm nor in torch: {name_advice}")
