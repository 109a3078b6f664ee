"""Facts about a started job: its strategy, sharding, precision, device and versions."""

import contextlib
import platform
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import DistributedType
from torch import nn


def plain_module(model: nn.Module) -> nn.Module:
    """The model inside DDP's or DeepSpeed's wrapper. (Accelerate's unwrap_model would import deepspeed.)"""
    while type(model).__name__ in ("DistributedDataParallel", "DeepSpeedEngine"):
        model = model.get_submodule("module")
    return model


def strategy(accelerator: Accelerator) -> str:
    """single, ddp, fsdp, zero1, zero2 or zero3."""
    if accelerator.distributed_type == DistributedType.DEEPSPEED:
        return f"zero{accelerator.state.deepspeed_plugin.zero_stage}"
    return {DistributedType.NO: "single", DistributedType.FSDP: "fsdp"}.get(
        accelerator.distributed_type, "ddp"
    )


def sharding(accelerator: Accelerator) -> dict[str, Any]:
    """FSDP's or ZeRO's sharding, by the keys of their configs; empty if nothing is sharded."""
    if accelerator.distributed_type == DistributedType.DEEPSPEED:
        config = accelerator.state.deepspeed_plugin.deepspeed_config["zero_optimization"]
        plain = {name: value for name, value in config.items() if not isinstance(value, dict)}
        parts = ("offload_optimizer", "offload_param")
        return plain | {name: config.get(name, {}).get("device", "none") for name in parts}
    if accelerator.distributed_type != DistributedType.FSDP:
        return {}
    from torch.distributed.fsdp import CPUOffloadPolicy

    plugin, sizes = accelerator.state.fsdp_plugin, accelerator.parallelism_config
    hybrid = sizes is not None and sizes.dp_replicate_size > 1
    return {
        "reshard_after_forward": plugin.reshard_after_forward,
        "offload_params": isinstance(plugin.cpu_offload, CPUOffloadPolicy),
        "replicas": sizes.dp_replicate_size if hybrid else 1,
    }


def precision(accelerator: Accelerator) -> str:
    """no, bf16 or fp16."""
    return accelerator.precision.mixed_precision


def device_name(accelerator: Accelerator) -> str:
    return (
        torch.cuda.get_device_name() if accelerator.device.type == "cuda" else f"CPU ({platform.machine()})"
    )


def versions() -> dict[str, str]:
    """Versions of the packages that affect results or communication."""
    found = {"python": platform.python_version()}
    for name in ("torch", "accelerate", "deepspeed", "timm", "numpy"):
        with contextlib.suppress(PackageNotFoundError):  # DeepSpeed is needed for ZeRO alone
            found[name] = version(name)
    return found
