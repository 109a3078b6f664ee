"""Strategy of a started job (name, sharding, precision), and code that makes strategies train alike.

Without the checks in this module, DDP would silently ignore missing gradients, and ZeRO would silently skip
steps with infinite gradients. The checks raise an error instead.
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
    """Return the strategy's name, which is single, ddp, fsdp, zero1, zero2 or zero3."""
    if accelerator.distributed_type == DistributedType.DEEPSPEED:
        return f"zero{accelerator.state.deepspeed_plugin.zero_stage}"
    return {DistributedType.NO: "single", DistributedType.FSDP: "fsdp"}.get(
        accelerator.distributed_type, "ddp"
    )


def sharding(accelerator: Accelerator) -> dict[str, Any]:
    """Return FSDP's or ZeRO's sharding settings by config key. The result is empty if nothing is sharded."""
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
    """Return the mixed precision, which is no, bf16 or fp16."""
    return accelerator.precision.mixed_precision


def device_name(accelerator: Accelerator) -> str:
    """Return the GPU's name, or the CPU's architecture."""
    return (
        torch.cuda.get_device_name() if accelerator.device.type == "cuda" else f"CPU ({platform.machine()})"
    )


def versions(accelerator: Accelerator | None = None) -> dict[str, str]:
    """Return the versions of the packages that affect results or communication.

    Args:
        accelerator: The Accelerator of a wrapped model. If the model uses onecurve.models.attention_kernels,
            the result includes the version of the attention kernel.
    """
    installed = {"python": platform.python_version()}
    for name in ("torch", "accelerate", "deepspeed", "timm", "numpy"):
        with contextlib.suppress(PackageNotFoundError):  # DeepSpeed is optional
            installed[name] = version(name)
    if accelerator and accelerator.short_attention:
        from onecurve.models.attention import kernel_version

        installed["short_attention"] = kernel_version()
    return installed


def refuse_missing_gradients(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Make the optimizer's first step raise ValueError if a trained parameter lacks a gradient.

    If a gradient is missing, DDP does not average any gradient in the same bucket (pytorch #128949). DDP
    reports this only in the next forward pass, after a step with different gradients in each process.
    """

    def check(stepping: torch.optim.Optimizer, *_) -> None:
        if stepping is not optimizer:  # a copy of the optimizer, which steps in the trial before training
            return
        hook.remove()
        if missing := [name for name, p in model.named_parameters() if p.requires_grad and p.grad is None]:
            raise ValueError(without_gradient(missing))

    hook = optimizer.register_step_pre_hook(check)


def refuse_skipped_steps(zero: Any) -> None:
    """Make DeepSpeed's optimizer raise FloatingPointError instead of skipping a step.

    Without loss scaling, DeepSpeed skips a step if a gradient is not finite. All processes detect this in the
    same step.
    """

    def refuse() -> None:
        lr = zero.param_groups[0]["lr"]
        raise FloatingPointError(f"a gradient is not finite with learning rate {lr:g}")

    call_at_overflow(zero, refuse)


def keep_strides(model: nn.Module) -> None:
    """Make FSDP2 pass inputs to its modules with the same strides as in a single process.

    FSDP2's pre-forward hook turns inputs into views. A view of a single channels_last image has different
    strides. Convolutions treat such a view as contiguous (pytorch #78611) and add products in a different
    order.
    """

    def note(module: nn.Module, args: Any, kwargs: Any) -> None:
        strides[module] = []
        recursively_apply(lambda x: strides[module].append(x.stride()), (args, kwargs))

    def restore(module: nn.Module, args: Any, kwargs: Any) -> Any:
        noted = iter(strides.pop(module))
        return recursively_apply(lambda x: _strided(x, next(noted)), (args, kwargs))

    strides: dict[nn.Module, list[tuple[int, ...]]] = {}
    for module in model.modules():
        if hasattr(module, "unshard"):
            module.register_forward_pre_hook(note, prepend=True, with_kwargs=True)
            module.register_forward_pre_hook(restore, with_kwargs=True)


def _strided(x: Tensor, strides: tuple[int, ...]) -> Tensor:
    return x if x.stride() == strides else _Strided.apply(x, strides)


class _Strided(torch.autograd.Function):
    """Identity function that changes the strides of a tensor but (unlike as_strided) not of its gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, strides: tuple[int, ...]) -> Tensor:
        return x.as_strided(x.shape, strides)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return gradient, None


def unused_parameters(error: BaseException | None, parameters: list[str]) -> list[str]:
    """Return the parameters that DDP lists in its error about missing gradients in a later step."""
    match = re.search(r"Parameter indices which did not receive grad for rank \d+: ([\d ]+)", str(error))
    return [parameters[int(i)] for i in match[1].split()] if match else []


def without_gradient(names: list[str]) -> str:
    """Return the error message about trained parameters without a gradient."""
    return (
        f"under DDP every trained parameter needs a gradient in each step, and {', '.join(names)} had none."
        " Set requires_grad to False for unused parameters, or train with FSDP or ZeRO."
    )
