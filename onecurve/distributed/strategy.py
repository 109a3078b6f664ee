"""The strategy of a started job: its name, sharding, precision, and checks that make strategies train alike.

Gradients that a strategy would silently skip are refused: missing ones under DDP, infinite ones under ZeRO.
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


def versions(accelerator: Accelerator | None = None) -> dict[str, str]:
    """Versions of the packages that affect results or communication. accelerator: that of a wrapped model,
    whose training uses the attention of onecurve.models.attention_kernels or not."""
    found = {"python": platform.python_version()}
    for name in ("torch", "accelerate", "deepspeed", "timm", "numpy"):
        with contextlib.suppress(PackageNotFoundError):  # DeepSpeed is needed for ZeRO alone
            found[name] = version(name)
    if accelerator and accelerator.short_attention:
        from onecurve.models.attention import kernel_version

        found["short_attention"] = kernel_version()
    return found


def refuse_missing_gradients(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Makes the optimizer's first step raise ValueError when a trained parameter has no gradient.

    DDP averages no gradient of a bucket in which one is missing (pytorch #128949). It reports this only at
    the next forward, after a step with gradients that differ between the processes.
    """

    def check(stepping: torch.optim.Optimizer, *_) -> None:
        if stepping is not optimizer:  # a copy, in the trial before the training
            return
        hook.remove()
        if missing := [name for name, p in model.named_parameters() if p.requires_grad and p.grad is None]:
            raise ValueError(without_gradient(missing))

    hook = optimizer.register_step_pre_hook(check)


def refuse_skipped_steps(zero: Any) -> None:
    """Makes DeepSpeed's optimizer raise FloatingPointError where it would skip a step.

    For precisions without loss scaling, where it skips a step if a gradient is not finite. All processes
    detect this together.
    """

    def refuse() -> None:
        lr = zero.param_groups[0]["lr"]
        raise FloatingPointError(f"a gradient is not finite with learning rate {lr:g}")

    call_at_overflow(zero, refuse)


def keep_strides(model: nn.Module) -> None:
    """Has FSDP2 give its modules inputs with the strides that these have in one process.

    Its hook before a module's forward makes views of them. A view of one image in channels_last has other
    strides, by which convolutions take it for contiguous (pytorch #78611), and add in another order.
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
    """The same tensor with these strides. The gradient keeps its own, which as_strided would change."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, strides: tuple[int, ...]) -> Tensor:
        return x.as_strided(x.shape, strides)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return gradient, None


def unused_parameters(error: BaseException | None, parameters: list[str]) -> list[str]:
    """The parameters in DDP's own error, which it raises when a gradient is missing in a later step."""
    found = re.search(r"Parameter indices which did not receive grad for rank \d+: ([\d ]+)", str(error))
    return [parameters[int(i)] for i in found[1].split()] if found else []


def without_gradient(names: list[str]) -> str:
    return (
        f"under DDP every trained parameter needs a gradient in each step, and {', '.join(names)} had none:"
        " set its requires_grad to False, or train with FSDP or ZeRO"
    )
