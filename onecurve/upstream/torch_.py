"""Private names of torch, and replaced behaviour. Seen in torch 2.11 and 2.15.0."""

import importlib
import json
import sys
from contextlib import suppress
from datetime import timedelta
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor

    Tensors = list[Tensor] | tuple[Tensor, ...]

# --- the compiler


class _Compiler(ModuleType):
    """Stand-in for torch._dynamo that imports the real module on first use.

    The two functions that torch's optimizers call in each run do not count as use.
    """

    graph_break = staticmethod(lambda *_, **__: None)  # also does nothing in torch outside a compilation
    disable = staticmethod(lambda function, *_, **__: function)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") and name != "__path__":  # inspect reads these names of every module
            raise AttributeError(name)
        if sys.modules.get(self.__name__) is self:
            del sys.modules[self.__name__]
            importlib.import_module(self.__name__)  # replaces this stand-in in sys.modules
        return getattr(sys.modules[self.__name__], name)


def postpone_compiler() -> None:
    """Let torch import its compiler, which takes seconds, only where something is compiled.

    Otherwise, an optimizer's first step imports torch._dynamo (pytorch #103952) for two functions that then
    do nothing.
    """
    import torch

    name = "torch._dynamo"
    if name not in sys.modules:
        torch._dynamo = sys.modules[name] = _Compiler(name)


def allow_recompilations(limit: int) -> None:
    """Let Dynamo compile up to `limit` graphs per function.

    Beyond its default limit of 8, a block would run uncompiled with only a warning.
    """
    import torch._dynamo

    torch._dynamo.config.recompile_limit = max(limit, torch._dynamo.config.recompile_limit)


def draw_as_eager() -> None:
    """Let compiled code draw the same random numbers as eager code.

    Otherwise, Inductor draws different numbers, so dropout differs from eager mode.
    """
    import torch._inductor.config

    torch._inductor.config.fallback_random = True


def has_cpp_compiler() -> bool:
    """Return True if Inductor finds a C++ compiler on this host.

    Without this check, the first compiled step would fail with a traceback, after the job has started.
    """
    from torch._inductor.cpp_builder import get_cpp_compiler
    from torch._inductor.exc import InvalidCxxCompiler

    try:
        get_cpp_compiler()
    except InvalidCxxCompiler:
        return False
    return True


# --- operators


def lerp_(tensors: "Tensors", targets: "Tensors", weight: float) -> None:
    """Move each tensor towards its target, with few kernels for all tensors.

    torch 2.15 offers this in torch.foreach; torch 2.11 has only the private name. A loop would launch a
    kernel per tensor.
    """
    import torch

    torch._foreach_lerp_(tensors, targets, weight)


def add_(tensors: "Tensors", number: float) -> None:
    """Add a number to each tensor, with few kernels like lerp_()."""
    import torch

    torch._foreach_add_(tensors, number)


def multiply_(tensors: "Tensors", factor: "Tensor") -> None:
    """Multiply each tensor by a factor on its device, with few kernels like lerp_()."""
    import torch

    torch._foreach_mul_(tensors, factor)


def norms(tensors: "Tensors", order: float) -> tuple["Tensor", ...]:
    """Return the norm of each tensor, with few kernels like lerp_()."""
    import torch

    return tuple(torch._foreach_norm(tensors, order))


def has_bf16_instructions() -> bool:
    """Return True if this CPU computes in bf16 natively.

    torch has no public function for this. Without it, rehearsals would train in bf16 where bf16 is emulated.
    """
    import torch

    return torch.cpu._is_avx512_bf16_supported()


def batch_norm_class() -> Any:
    """Return the base class of torch's and timm's BatchNorm layers.

    The class defines the forward method of the public classes, which numerics/batch_norm.py replaces. Their
    only public base class is nn.Module.
    """
    from torch.nn.modules.batchnorm import _BatchNorm

    return _BatchNorm


# --- optimizers and loss scaling


def unscale_before_step(optimizer: Any) -> None:
    """Make the loss scaler divide the gradients before it calls the optimizer's step.

    torch's fused optimizers would divide them in their kernel. Fused SGD then rounds differently from the
    optimizer of a sharded model.
    """
    optimizer._step_supports_amp_scaling = False


def loss_scale(scaler: Any) -> tuple[float, int]:
    """Return a torch.amp.GradScaler's scale, and the steps since its last overflow.

    The number of steps has only a private name, even in state_dict().
    """
    state = scaler.state_dict()
    return state["scale"], state["_growth_tracker"]


def set_loss_scale(scaler: Any, scale: float, good_steps: int) -> None:
    """Set the values that loss_scale() returns."""
    scaler.load_state_dict(scaler.state_dict() | {"scale": scale, "_growth_tracker": good_steps})


# --- process groups


def default_store() -> Any:
    """Return the store of the default process group.

    Without it, ranks would need a second store with a separate port.
    """
    from torch.distributed import distributed_c10d

    return distributed_c10d._get_default_store()


def set_default_group_timeout(timeout_s: int) -> None:
    """Set the default timeout of process groups that are created from now on.

    DeepSpeed 0.19 clones the world group, and a DeviceMesh creates groups of its hosts (pytorch #119574).
    Both use torch's defaults, 600 s for NCCL and 1,800 s for gloo, regardless of the first group's timeout.
    """
    from torch.distributed import distributed_c10d as c10d

    c10d.default_pg_timeout = c10d.default_pg_nccl_timeout = timedelta(seconds=timeout_s)


def flight_record() -> list[dict[str, Any]]:
    """Return the collectives in torch's flight recorders for gloo and NCCL.

    torch's public settings only write them to a file at a timeout. Without this function, the report of a
    hanging job can't name the collective that it waits for.
    """
    import torch._C._distributed_c10d as c10d

    entries = []
    for name in ("_dump_fr_trace_json", "_dump_nccl_trace_json"):  # gloo's, NCCL's
        with suppress(AttributeError, RuntimeError, ValueError):
            entries += json.loads(getattr(c10d, name)()).get("entries", [])
    return entries


# --- captures of CUDA graphs


def leave_pool(device: int, pool: Any) -> None:
    """End the allocator's part in a failed capture.

    torch leaves the allocator in the state of a capture (pytorch #180395, #190348). Later tensors would then
    be placed in the memory of a deleted graph.
    """
    import torch

    with suppress(RuntimeError):  # it has already ended
        torch._C._cuda_endAllocateToPool(device, pool)
        torch._C._cuda_releasePool(device, pool)


def stop_timing(ddp: Any) -> None:
    """Make DDP stop timing its steps.

    DDP times every hundredth step with events, which a capture does not allow.
    """
    ddp._set_ddp_runtime_logging_sample_rate(2**31 - 1)


def reset_reducer(ddp: Any) -> None:
    """Make DDP forget an unfinished backward pass, for example in a failed capture.

    Otherwise, DDP's next forward pass raises an error about unreduced gradients.
    """
    ddp.reducer._reset_state()


def can_reset_shards(model: Any) -> bool:
    """Return True if reset_shards() works. torch 2.11 lacks reset_iter_state."""
    return hasattr(model, "reset_iter_state")


def reset_shards(model: Any) -> None:
    """Make FSDP2 forget the state that a failed capture left behind.

    Otherwise, the next step waits for events of the capture, which no stream can do. The capture has computed
    nothing, so waiting is unnecessary.
    """
    context = model._get_fsdp_state()._comm_ctx
    context.all_gather_state = None
    context.reduce_scatter_states.clear()
    context._last_post_reduce_events.clear()
    for module in model.modules():
        for group in module._get_fsdp_state()._fsdp_param_groups if hasattr(module, "unshard") else ():
            group._all_gather_result = group._post_reduce_event = None
            group._all_reduce_state = group._reshard_after_forward_event = None
    model.reset_iter_state()
