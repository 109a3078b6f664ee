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
from onecurve.system.processes import ancestors
from onecurve.upstream.torch_ import has_bf16_instructions

HALF_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass(frozen=True)
class Precision:
    """Floating-point formats used in training."""

    mixed_precision: str  # `no`, `bf16` or `fp16`
    half_precision: str  # `none`, `autocast`, or `weights` (all tensors use half precision)
    gradient_reduction: str  # format in which processes exchange gradients: fp32, bf16 or fp16


def settle_precision(
    accelerator: Accelerator, mixed_precision: str, is_from_deepspeed: bool, grad_compression: str
) -> Precision:
    """Choose the floating-point formats, and make FSDP2 and ZeRO compute like a single process.

    Call this function before wrap() adds autocast.

    Args:
        accelerator: The Accelerator, whose FSDP2 or DeepSpeed settings this function changes.
        mixed_precision: no, bf16 or fp16.
        is_from_deepspeed: True if a DeepSpeed JSON selects mixed_precision and thereby DeepSpeed's own mode.
        grad_compression: Floating-point format in which DDP exchanges gradients, or no. A single process
            exchanges no gradients but accepts a format, because an elastic job may shrink to one process.

    Raises:
        ValueError: If the strategy does not support the compression.
    """
    half_precision = "none" if mixed_precision == "no" else "autocast"
    gradient_reduction = "fp32"
    if accelerator.distributed_type == DistributedType.FSDP:
        # Accelerate's policy would use half precision for weights, activations and the gradient reduction.
        accelerator.state.fsdp_plugin.mixed_precision_policy = None
    if accelerator.distributed_type == DistributedType.DEEPSPEED:
        deepspeed_config = accelerator.state.deepspeed_plugin.deepspeed_config
        # By default, DeepSpeed would exchange gradients in the weights' half precision
        gradient_reduction = deepspeed_config.get("communication_data_type") or "fp32"
        deepspeed_config["communication_data_type"] = gradient_reduction
        if mixed_precision == "fp16" or (mixed_precision == "bf16" and is_from_deepspeed):
            half_precision = "weights"
        elif mixed_precision == "bf16":
            deepspeed_config["bf16"] = {"enabled": False}  # wrap() adds autocast instead
        if deepspeed_config.get("bf16", {}).get("enabled"):
            # With True, DeepSpeed would wait for the device, and silently skip steps with non-finite
            # gradients.
            deepspeed_config["bf16"].setdefault("check_grad_overflow", False)
    strategy_name = strategy(accelerator)
    if grad_compression != "no" and strategy_name not in ("single", "ddp"):
        raise ValueError(
            f"--grad_compression {grad_compression} works only with DDP, but the strategy is {strategy_name}."
            " Use --grad_compression no."
        )
    if grad_compression != "no" and strategy_name == "ddp":
        gradient_reduction = grad_compression
    return Precision(mixed_precision, half_precision, gradient_reduction)


def autocast_forward(accelerator: Accelerator, model: nn.Module) -> None:
    """Replace the model's forward() with one under autocast that returns fp32, as Accelerate does for DDP."""
    half_dtype = HALF_DTYPES.get(accelerator.precision.mixed_precision)
    autocast = torch.autocast(accelerator.device.type, half_dtype, enabled=half_dtype is not None)
    model.forward = convert_outputs_to_fp32(autocast(model.forward))


def input_dtype(accelerator: Accelerator) -> torch.dtype | None:
    """Return the dtype of a model's input images on a GPU: bf16, fp16, or None for fp32.

    On a CPU, the result is None, so that a resumed run rounds like the original run.
    """
    if accelerator.device.type != "cuda":
        return None
    return HALF_DTYPES.get(accelerator.precision.mixed_precision)


def chosen_precision(precision_flag: str | None) -> str:
    """Return the precision from the flag, the launcher, or the device's bf16 support, in this order.

    If the device does not support the launcher's bf16 natively, the result is fp32 or fp16 instead. Rank 0
    logs a remark if the precision is slow or may be unexpected.
    """
    launcher_precision = os.environ.get("ACCELERATE_MIXED_PRECISION")
    remark = ""
    precision_in_command = (
        launch_command_precision() if launcher_precision == "no" and not precision_flag else ""
    )
    answered_config_keys = os.environ.get("ACCELERATE_CONFIG_DS_FIELDS", "").split(",")
    if precision_in_command == "no":
        precision_flag = precision_in_command
    elif (
        launcher_precision == "no"
        and is_on("ACCELERATE_USE_DEEPSPEED")
        and "mixed_precision" not in answered_config_keys
    ):
        # accelerate launch (1.15) passes "no" if the precision in the DeepSpeed JSON is "auto".
        launcher_precision = None
        if precision_in_command is None and has_native_bf16():
            remark = (
                "training in bf16,"
                " because this process can't see whether accelerate launch received --mixed_precision no."
                " To train in fp32, pass --mixed_precision no to the script."
            )
    precision = precision_flag or launcher_precision or ("bf16" if has_native_bf16() else "no")
    is_launchers_choice = precision == launcher_precision and precision_flag is None
    if not on_gpu() and precision == "fp16":
        remark = "fp16 is slow on a CPU. The job still uses fp16, with the same loss scaling as on a GPU."
    elif not on_gpu() and precision == launcher_precision == "bf16" and not has_native_bf16():
        remark, precision = "this CPU does not support bf16 natively, so the rehearsal uses fp32", "no"
    elif on_gpu() and is_launchers_choice and precision == "bf16" and not has_native_bf16():
        remark = "this GPU does not support bf16 natively, so training uses fp16 instead of the config's bf16"
        precision = "fp16"
    elif on_gpu() and precision == "bf16" and not has_native_bf16():
        remark = (
            "this GPU does not support bf16 natively and emulates bf16."
            " --mixed_precision fp16 is faster on this GPU."
        )
    elif on_gpu() and is_launchers_choice and precision == "no" and has_native_bf16():
        remark = (
            "training in fp32, because the launcher sets mixed precision to no,"
            " which is the default of accelerate launch without a config file."
            " This GPU supports bf16 natively. Use --mixed_precision bf16."
        )
    if remark and rank() == 0:
        log.info(remark)
    return precision


def launch_command_precision() -> str | None:
    """Return --mixed_precision from the `accelerate launch` command line, or "" without the flag.

    Unlike the launcher's environment variables, the command line distinguishes an explicit `no` from the
    default. The function returns None if the parent process is not `accelerate launch`.
    """
    parent_process, *_ = ancestors()
    if not parent_process.launcher_name().startswith("accelerate"):
        return None
    precision_flag_value = parent_process.flag_value("mixed[_-]precision")  # the flag has two spellings
    return precision_flag_value if precision_flag_value in ("no", *HALF_DTYPES) else ""


def on_gpu() -> bool:
    """Return True if the job trains on GPUs. The launcher's use_cpu (cpu.yaml) disables GPUs."""
    return torch.cuda.is_available() and not parse_flag_from_env("ACCELERATE_USE_CPU")


def has_native_bf16() -> bool:
    """Return True if the job's device supports bf16 natively."""
    if on_gpu():
        return torch.cuda.get_device_capability() >= (8, 0)  # Ampere or newer
    return has_bf16_instructions()


def make_input_cast_hook(mixed_precision: str) -> Callable:
    """Return a hook that casts a module's inputs to half precision. DeepSpeed casts only the weights."""
    half_dtype = HALF_DTYPES[mixed_precision]

    def cast_floating_inputs(_: nn.Module, inputs: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
        return tuple(tensor.to(half_dtype) if tensor.is_floating_point() else tensor for tensor in inputs)

    return cast_floating_inputs
