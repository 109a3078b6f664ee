"""Sets up mixed precision with autocast, which computes the same way under every strategy.

Weights, the residual stream and the gradient reduction use fp32. Matrix products and convolutions use half
precision. In two configurations, all weights and activations use half precision: fp16 under ZeRO, because
DeepSpeed scales the loss only in its own fp16 mode, and any DeepSpeed JSON that enables bf16.
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
    """Floating-point formats used in training."""

    mixed_precision: str  # `no`, `bf16` or `fp16`
    half_precision: str  # `none`, `autocast`, or `weights` (all tensors use half precision)
    gradient_reduction: str  # format in which processes exchange gradients: fp32, bf16 or fp16


def settle_precision(
    accelerator: Accelerator, mixed_precision: str, is_from_deepspeed: bool, compression: str
) -> Precision:
    """Make FSDP2 and ZeRO compute like a single process. Call this function before wrap() adds autocast.

    Args:
        accelerator: The Accelerator, which this function changes.
        mixed_precision: no, bf16 or fp16.
        is_from_deepspeed: True if a DeepSpeed JSON selects mixed_precision and thereby DeepSpeed's own mode.
        compression: Floating-point format in which DDP exchanges gradients, or no. A single process exchanges
            no gradients but accepts a format, because an elastic job may shrink to one process.

    Raises:
        ValueError: If the strategy does not support the compression.
    """
    half_precision, reduction = "none" if mixed_precision == "no" else "autocast", "fp32"
    if accelerator.distributed_type == DistributedType.FSDP:
        # Accelerate's policy would use half precision for weights, activations and the gradient reduction.
        accelerator.state.fsdp_plugin.mixed_precision_policy = None
    if accelerator.distributed_type == DistributedType.DEEPSPEED:
        config = accelerator.state.deepspeed_plugin.deepspeed_config
        reduction = config["communication_data_type"] = config.get("communication_data_type") or "fp32"
        if mixed_precision == "fp16" or (mixed_precision == "bf16" and is_from_deepspeed):
            half_precision = "weights"
        elif mixed_precision == "bf16":
            config["bf16"] = {"enabled": False}
        if config.get("bf16", {}).get("enabled"):
            # With True, DeepSpeed would wait for the device, and silently skip steps with non-finite
            # gradients.
            config["bf16"].setdefault("check_grad_overflow", False)
    strategy_name = strategy(accelerator)
    if compression != "no" and strategy_name not in ("single", "ddp"):
        raise ValueError(
            f"--grad_compression {compression} works only with DDP, but the strategy is {strategy_name}. Use"
            " --grad_compression no."
        )
    if compression != "no" and strategy_name == "ddp":
        reduction = compression
    return Precision(mixed_precision, half_precision, reduction)


def autocast_forward(accelerator: Accelerator, model: nn.Module) -> None:
    """Make the model's forward pass use autocast and return fp32 outputs, like Accelerate does for DDP."""
    half_dtype = HALF.get(accelerator.precision.mixed_precision)
    autocast = torch.autocast(accelerator.device.type, half_dtype, enabled=half_dtype is not None)
    model.forward = convert_outputs_to_fp32(autocast(model.forward))


def input_dtype(accelerator: Accelerator) -> torch.dtype | None:
    """Return the dtype of a model's input images on a GPU: bf16, fp16, or None for fp32.

    On a CPU, the result is None, so that a resumed run rounds like the original run.
    """
    return HALF.get(accelerator.precision.mixed_precision) if accelerator.device.type == "cuda" else None


def chosen_precision(flag: str | None) -> str:
    """Return the precision from the flag, the launcher, or the device's bf16 support, in this order."""
    launcher_setting, remark = os.environ.get("ACCELERATE_MIXED_PRECISION"), ""
    launch_flag = typed_precision() if launcher_setting == "no" and not flag else ""
    config_keys = os.environ.get("ACCELERATE_CONFIG_DS_FIELDS", "").split(",")
    if launch_flag == "no":
        flag = launch_flag
    elif (
        launcher_setting == "no"
        and is_on("ACCELERATE_USE_DEEPSPEED")
        and "mixed_precision" not in config_keys
    ):
        # accelerate launch (1.15) passes "no" if the precision in the DeepSpeed JSON is "auto".
        launcher_setting = None
        if launch_flag is None and has_native_bf16():
            remark = (
                "training in bf16, because this process can't see whether accelerate launch received"
                " --mixed_precision no. To train in fp32, pass --mixed_precision no to the script."
            )
    precision = flag or launcher_setting or ("bf16" if has_native_bf16() else "no")
    if not on_gpu() and precision == "fp16":
        remark = "fp16 is slow on a CPU. The job still uses fp16, with the same loss scaling as on a GPU."
    elif not on_gpu() and precision == launcher_setting == "bf16" and not has_native_bf16():
        remark, precision = "this CPU does not support bf16 natively, so the rehearsal uses fp32", "no"
    elif on_gpu() and precision == launcher_setting == "bf16" and flag is None and not has_native_bf16():
        remark = "this GPU does not support bf16 natively, so training uses fp16 instead of the config's bf16"
        precision = "fp16"
    elif on_gpu() and precision == "bf16" and not has_native_bf16():
        remark = (
            "this GPU does not support bf16 natively and emulates bf16. --mixed_precision fp16 is faster on"
            " this GPU."
        )
    elif on_gpu() and precision == launcher_setting == "no" and flag is None and has_native_bf16():
        remark = (
            "training in fp32, because the launcher sets mixed precision to no, which is the default of"
            " accelerate launch without a config file. This GPU supports bf16 natively. Use --mixed_precision"
            " bf16."
        )
    if remark and rank() == 0:
        log.info(remark)
    return precision


def typed_precision() -> str | None:
    """Return --mixed_precision from the `accelerate launch` command line, or "" without the flag.

    Unlike the launcher's environment variables, the command line distinguishes an explicit `no` from the
    default. The function returns None if the parent process is not `accelerate launch`.
    """
    parent = parents()[0]
    if not parent.launcher().startswith("accelerate"):
        return None
    value = parent.flag("mixed[_-]precision")
    return value if value in ("no", *HALF) else ""


def on_gpu() -> bool:
    """Return True if the job trains on GPUs. The launcher's use_cpu (cpu.yaml) disables GPUs."""
    return torch.cuda.is_available() and not parse_flag_from_env("ACCELERATE_USE_CPU")


def has_native_bf16() -> bool:
    """Return True if the job's device supports bf16 natively."""
    if on_gpu():
        return torch.cuda.get_device_capability() >= (8, 0)
    return has_bf16_instructions()


def cast_inputs(mixed_precision: str) -> Callable:
    """Return a hook that casts a module's inputs to half precision. DeepSpeed casts only the weights."""
    dtype = HALF[mixed_precision]

    def cast(_: nn.Module, inputs: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
        return tuple(value.to(dtype) if value.is_floating_point() else value for value in inputs)

    return cast
