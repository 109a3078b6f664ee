"""Describes a started job's strategy (name, sharding, precision), and aligns the strategies' behavior.

Without the checks in this module, DDP would silently ignore missing gradients, and ZeRO would silently skip
steps with infinite gradients. With these checks, DDP and ZeRO raise an error instead.
"""

import contextlib
import platform
import re
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import DistributedType, recursively_apply
from torch import Tensor, nn

from onecurve.upstream.deepspeed_ import call_at_overflow


def strategy(accelerator: Accelerator) -> str:
    """Return the strategy's name: single, ddp, fsdp, zero1, zero2 or zero3."""
    if accelerator.distributed_type == DistributedType.DEEPSPEED:
        return f"zero{accelerator.state.deepspeed_plugin.zero_stage}"
    strategy_by_type = {DistributedType.NO: "single", DistributedType.FSDP: "fsdp"}
    return strategy_by_type.get(accelerator.distributed_type, "ddp")


def sharding(accelerator: Accelerator) -> dict[str, Any]:
    """Return FSDP2's or ZeRO's sharding settings by config key, or {} if nothing is sharded."""
    if accelerator.distributed_type == DistributedType.DEEPSPEED:
        zero_section = accelerator.state.deepspeed_plugin.deepspeed_config["zero_optimization"]
        scalar_settings = {key: value for key, value in zero_section.items() if not isinstance(value, dict)}
        offload_sections = ("offload_optimizer", "offload_param")
        device_by_section = {key: zero_section.get(key, {}).get("device", "none") for key in offload_sections}
        return scalar_settings | device_by_section
    if accelerator.distributed_type != DistributedType.FSDP:
        return {}
    from torch.distributed.fsdp import CPUOffloadPolicy

    fsdp_plugin, parallelism_config = accelerator.state.fsdp_plugin, accelerator.parallelism_config
    is_hybrid_sharding = parallelism_config is not None and parallelism_config.dp_replicate_size > 1
    return {
        "reshard_after_forward": fsdp_plugin.reshard_after_forward,
        "offload_params": isinstance(fsdp_plugin.cpu_offload, CPUOffloadPolicy),
        "replicas": parallelism_config.dp_replicate_size if is_hybrid_sharding else 1,
    }


def precision(accelerator: Accelerator) -> str:
    """Return the mixed precision: no, bf16 or fp16."""
    return accelerator.precision.mixed_precision


def device_name(accelerator: Accelerator) -> str:
    """Return the GPU's name, or the CPU's architecture."""
    trains_on_gpu = accelerator.device.type == "cuda"
    return torch.cuda.get_device_name() if trains_on_gpu else f"CPU ({platform.machine()})"


def versions(accelerator: Accelerator | None = None) -> dict[str, str]:
    """Return the versions of the packages that affect results or communication.

    Args:
        accelerator: The Accelerator of a wrapped model, or None. If the model uses the attention kernel in
            onecurve.models.attention_kernels, the result includes this kernel's version.
    """
    version_by_package = {"python": platform.python_version()}
    for package_name in ("torch", "accelerate", "deepspeed", "timm", "numpy"):
        with contextlib.suppress(PackageNotFoundError):  # DeepSpeed may not be installed
            version_by_package[package_name] = version(package_name)
    if accelerator and accelerator.uses_short_attention_kernel:
        from onecurve.models.attention import kernel_version

        version_by_package["short_attention"] = kernel_version()
    return version_by_package


def refuse_missing_gradients(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Make the optimizer's first step raise ValueError if a trained parameter lacks a gradient.

    If a gradient is missing, DDP does not average any gradient in the same bucket (pytorch #128949). DDP
    reports a missing gradient only in the next forward pass, after the processes have taken a step with
    different gradients.
    """

    def check_gradients(stepping_optimizer: torch.optim.Optimizer, *_) -> None:
        if stepping_optimizer is not optimizer:  # the trial steps copies of the optimizer before training
            return
        hook_handle.remove()
        names_without_gradient = [
            parameter_name
            for parameter_name, parameter in model.named_parameters()
            if parameter.requires_grad and parameter.grad is None
        ]
        if names_without_gradient:
            raise ValueError(missing_gradient_message(names_without_gradient))

    hook_handle = optimizer.register_step_pre_hook(check_gradients)


def refuse_skipped_steps(zero_optimizer: Any) -> None:
    """Make DeepSpeed's optimizer raise FloatingPointError instead of skipping a step.

    Without loss scaling, DeepSpeed skips a step if a gradient is not finite. All processes detect non-finite
    gradients in the same step.
    """

    def refuse_step() -> None:
        learning_rate = zero_optimizer.param_groups[0]["lr"]
        raise FloatingPointError(f"a gradient is not finite (learning rate {learning_rate:g})")

    call_at_overflow(zero_optimizer, refuse_step)


def keep_strides(model: nn.Module) -> None:
    """Add hooks that keep the strides of FSDP2 modules' inputs the same as in a single process.

    FSDP2's pre-forward hook turns inputs into views. For a single channels_last image, the view's strides
    differ from the input's. Convolutions treat such a view as contiguous (pytorch #78611) and add products in
    a different order.
    """

    def record_strides(module: nn.Module, args: Any, kwargs: Any) -> None:
        strides_by_module[module] = []
        recursively_apply(lambda tensor: strides_by_module[module].append(tensor.stride()), (args, kwargs))

    def restore_strides(module: nn.Module, args: Any, kwargs: Any) -> Any:
        recorded_strides = iter(strides_by_module.pop(module))
        return recursively_apply(lambda tensor: _with_strides(tensor, next(recorded_strides)), (args, kwargs))

    strides_by_module: dict[nn.Module, list[tuple[int, ...]]] = {}
    for module in model.modules():
        if hasattr(module, "unshard"):  # an FSDP2 module, whose own hook runs between these two hooks
            module.register_forward_pre_hook(record_strides, prepend=True, with_kwargs=True)
            module.register_forward_pre_hook(restore_strides, with_kwargs=True)


def _with_strides(tensor: Tensor, strides: tuple[int, ...]) -> Tensor:
    """Return the tensor itself if it already has these strides, otherwise a view with these strides."""
    return tensor if tensor.stride() == strides else _StridedView.apply(tensor, strides)


class _StridedView(torch.autograd.Function):
    """Identity function that changes a tensor's strides.

    Unlike as_strided, this function does not change the gradient's strides.
    """

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, strides: tuple[int, ...]) -> Tensor:
        return tensor.as_strided(tensor.shape, strides)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return gradient, None  # no gradient for `strides`


def unused_parameters(error: BaseException | None, parameter_names: list[str]) -> list[str]:
    """Return the parameters that DDP's error about missing gradients lists, or [] for any other error.

    Args:
        error: The error that ended training, or None.
        parameter_names: Names of the trained parameters, in DDP's order. DDP's message contains only indices.
    """
    indices_pattern = r"Parameter indices which did not receive grad for rank \d+: (?P<indices>[\d ]+)"
    error_match = re.search(indices_pattern, str(error))
    unused_indices = error_match["indices"].split() if error_match else []
    return [parameter_names[int(parameter_index)] for parameter_index in unused_indices]


def missing_gradient_message(parameter_names: list[str]) -> str:
    """Return the error message about trained parameters without a gradient."""
    return (
        "DDP needs a gradient for every trained parameter in each step,"
        f" but {', '.join(parameter_names)} received none."
        " Set requires_grad to False for unused parameters, or train with FSDP2 or ZeRO."
    )
