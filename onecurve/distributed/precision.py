"""The choice of mixed precision, computed in the same way under every strategy, with autocast.

Weights, the residual stream and the reduction of gradients are in fp32; matrix products and convolutions are
in half precision. Two settings differ: fp16 under ZeRO, because DeepSpeed scales the loss only in its own
fp16, and bf16 that a DeepSpeed JSON enables. There all weights and activations are in half precision.
"""

import os
from collections.abc import Callable
from dataclasses import dataclass

import torch
from accelerate import Accelerator
from accelerate.utils import DistributedType, convert_outputs_to_fp32, parse_flag_from_env
from torch import nn

from onecurve.distributed.strategy import strategy
from onecurve.system.env import is_on, rank
from onecurve.system.output import log
from onecurve.system.processes import parents
from onecurve.upstream.torch_ import has_bf16_instructions

HALF = {"bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass(frozen=True)
class Precision:
    """The types of a training's tensors."""

    mixed_precision: str  # no, bf16 or fp16
    half_precision: str  # none, autocast or weights (all in half precision)
    gradient_reduction: str  # between the processes: fp32, bf16 or fp16


def settle_precision(accelerator: Accelerator, kind: str, is_engines: bool, compression: str) -> Precision:
    """Makes FSDP2 and ZeRO compute as one process does. Call it before prepare(), which adds the autocast.

    kind: no, bf16 or fp16. is_engines: a DeepSpeed JSON sets it, which means DeepSpeed's own kind.
    compression: of the gradients that DDP exchanges, or no. One process, to which an elastic job may shrink,
    exchanges none. ValueError for other strategies.
    """
    half_precision, reduction = "none" if kind == "no" else "autocast", "fp32"
    if accelerator.distributed_type == DistributedType.FSDP:
        # Accelerate's policy would put weights, activations and the reduction in half precision
        accelerator.state.fsdp_plugin.mixed_precision_policy = None
    if accelerator.distributed_type == DistributedType.DEEPSPEED:
        config = accelerator.state.deepspeed_plugin.deepspeed_config
        reduction = config["communication_data_type"] = config.get("communication_data_type") or "fp32"
        if kind == "fp16" or (kind == "bf16" and is_engines):
            half_precision = "weights"
        elif kind == "bf16":
            config["bf16"] = {"enabled": False}
        if config.get("bf16", {}).get("enabled"):
            # True would silently skip a step whose gradients are not finite, and wait for the device.
            config["bf16"].setdefault("check_grad_overflow", False)
    name = strategy(accelerator)
    if compression != "no" and name not in ("single", "ddp"):
        raise ValueError(f"--grad_compression {compression} is for DDP, and this is {name}: choose no")
    if compression != "no" and name == "ddp":
        reduction = compression
    return Precision(kind, half_precision, reduction)


def autocast_forward(accelerator: Accelerator, model: nn.Module) -> None:
    """Puts the model's forward under autocast and its outputs into fp32, as Accelerate does for DDP."""
    half = HALF.get(accelerator.precision.mixed_precision)
    autocast = torch.autocast(accelerator.device.type, half, enabled=half is not None)
    model.forward = convert_outputs_to_fp32(autocast(model.forward))


def input_dtype(accelerator: Accelerator) -> torch.dtype | None:
    """The type in which a model on a GPU reads its images: bf16 or fp16; None for fp32, and on a CPU.

    On a CPU images stay in fp32 up to the model, because a resumed run must round as before.
    """
    return HALF.get(accelerator.precision.mixed_precision) if accelerator.device.type == "cuda" else None


def chosen_precision(flag: str | None) -> str:
    """The flag, else the launcher's setting, else bf16 where the device supports it natively."""
    launchers, remark = os.environ.get("ACCELERATE_MIXED_PRECISION"), ""
    typed = typed_precision() if launchers == "no" and not flag else ""
    fields = os.environ.get("ACCELERATE_CONFIG_DS_FIELDS", "").split(",")
    if typed == "no":
        flag = typed
    elif launchers == "no" and is_on("ACCELERATE_USE_DEEPSPEED") and "mixed_precision" not in fields:
        # accelerate launch (1.15) passes "no" if a DeepSpeed config leaves precision to the JSON's "auto".
        launchers = None
        if typed is None and has_native_bf16():
            remark = "training in bf16: a --mixed_precision no of accelerate launch can't be seen here;"
            remark += " give the flag to the script for fp32"
    wanted = flag or launchers or ("bf16" if has_native_bf16() else "no")
    if not on_gpu() and wanted == "fp16":
        remark = "fp16 is slow on a CPU; it is computed all the same, with loss scaling as on a GPU"
    elif not on_gpu() and wanted == launchers == "bf16" and not has_native_bf16():
        remark, wanted = "bf16 is not native to this CPU: the rehearsal is in fp32", "no"
    elif on_gpu() and wanted == launchers == "bf16" and flag is None and not has_native_bf16():
        remark, wanted = "bf16 is not native to this GPU: the config's bf16 becomes fp16", "fp16"
    elif on_gpu() and wanted == "bf16" and not has_native_bf16():
        remark = "this GPU has no native bf16 and emulates it: --mixed_precision fp16 is faster here"
    elif on_gpu() and wanted == launchers == "no" and flag is None and has_native_bf16():
        remark = (
            "training in fp32: the launcher says mixed precision no, as accelerate launch does without a"
            " config file; this GPU has native bf16: --mixed_precision bf16"
        )
    if remark and rank() == 0:
        log.info(remark)
    return wanted


def typed_precision() -> str | None:
    """--mixed_precision of `accelerate launch`, "" without it. None where another program is the parent.

    The launcher's environment does not tell a typed no from its default; its command line does.
    """
    parent = parents()[0]
    if not parent.launcher().startswith("accelerate"):
        return None
    typed = parent.flag("mixed[_-]precision")
    return typed if typed in ("no", *HALF) else ""


def on_gpu() -> bool:
    """True if the job trains on GPUs; False also if the launcher's config has use_cpu, as cpu.yaml."""
    return torch.cuda.is_available() and not parse_flag_from_env("ACCELERATE_USE_CPU")


def has_native_bf16() -> bool:
    if on_gpu():
        return torch.cuda.get_device_capability() >= (8, 0)
    return has_bf16_instructions()


def cast_inputs(kind: str) -> Callable:
    """A hook that casts inputs to half precision, as DeepSpeed casts only the weights."""
    dtype = HALF[kind]
    return lambda module, inputs: tuple(x.to(dtype) if x.is_floating_point() else x for x in inputs)
