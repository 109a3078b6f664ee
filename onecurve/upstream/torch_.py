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

    Calls of the two functions that torch's optimizers always use do not trigger the import.
    """

    graph_break = staticmethod(lambda *_, **__: None)  # like torch's function outside a compilation
    disable = staticmethod(lambda function, *_, **__: function)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") and name != "__path__":  # inspect reads these attributes of every module
            raise AttributeError(name)
        if sys.modules.get(self.__name__) is self:
            del sys.modules[self.__name__]
            importlib.import_module(self.__name__)  # replaces this stand-in in sys.modules
        return getattr(sys.modules[self.__name__], name)


def postpone_compiler() -> None:
    """Delay the import of torch's compiler, which takes seconds, until code is compiled.

    Otherwise, an optimizer's first step imports torch._dynamo (pytorch #103952) to call two functions that do
    nothing outside a compilation.
    """
    import torch

    name = "torch._dynamo"
    if name not in sys.modules:
        torch._dynamo = sys.modules[name] = _Compiler(name)


def allow_recompilations(limit: int) -> None:
    """Let Dynamo compile up to `limit` graphs per function.

    Beyond Dynamo's default limit of 8, a block would run uncompiled, with only a warning.
    """
    import torch._dynamo

    torch._dynamo.config.recompile_limit = max(limit, torch._dynamo.config.recompile_limit)


def draw_as_eager() -> None:
    """Make compiled code draw the same random numbers as eager code.

    Otherwise, Inductor draws different random numbers, so dropout differs from eager mode.
    """
    import torch._inductor.config

    torch._inductor.config.fallback_random = True


def has_cpp_compiler() -> bool:
    """Return True if Inductor finds a C++ compiler on this host.

    Without this check, a job would start and then fail with a traceback in its first compiled step.
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
    """Interpolate each tensor linearly towards its target in place, with few kernels for all tensors.

    torch 2.15 has a public function in torch.foreach, but torch 2.11 has only the private function. A loop
    would launch one kernel per tensor.
    """
    import torch

    torch._foreach_lerp_(tensors, targets, weight)


def add_(tensors: "Tensors", number: float) -> None:
    """Add a number to each tensor in place. Like lerp_(), this launches few kernels."""
    import torch

    torch._foreach_add_(tensors, number)


def multiply_(tensors: "Tensors", factor: "Tensor") -> None:
    """Multiply each tensor in place by a factor on its device. Like lerp_(), this launches few kernels."""
    import torch

    torch._foreach_mul_(tensors, factor)


def norms(tensors: "Tensors", order: float) -> tuple["Tensor", ...]:
    """Return the norm of each tensor. Like lerp_(), this launches few kernels."""
    import torch

    return tuple(torch._foreach_norm(tensors, order))


def has_bf16_instructions() -> bool:
    """Return True if this CPU computes in bf16 natively.

    torch has no public function for this check. Without the check, rehearsals would train in bf16 on CPUs
    that emulate bf16.
    """
    import torch

    return torch.cpu._is_avx512_bf16_supported()


def batch_norm_class() -> Any:
    """Return the base class of torch's and timm's BatchNorm layers.

    This class defines the forward method that the public classes inherit and that numerics/batch_norm.py
    replaces. The only public base class of the layers is nn.Module.
    """
    from torch.nn.modules.batchnorm import _BatchNorm

    return _BatchNorm


# --- optimizers and loss scaling


def unscale_before_step(optimizer: Any) -> None:
    """Make the loss scaler divide the gradients before it calls the optimizer's step.

    torch's fused optimizers would divide the gradients in their own kernel. Fused SGD would then round
    differently from the optimizer of a sharded model.
    """
    optimizer._step_supports_amp_scaling = False


def loss_scale(scaler: Any) -> tuple[float, int]:
    """Return the scale of a torch.amp.GradScaler and the number of steps since its last overflow.

    The number of steps has only a private key, even in state_dict().
    """
    state = scaler.state_dict()
    return state["scale"], state["_growth_tracker"]


def set_loss_scale(scaler: Any, scale: float, good_steps: int) -> None:
    """Set the values that loss_scale() returns."""
    scaler.load_state_dict(scaler.state_dict() | {"scale": scale, "_growth_tracker": good_steps})


# --- process groups


def default_store() -> Any:
    """Return the store of the default process group.

    Without this function, ranks would need a second store with a separate port.
    """
    from torch.distributed import distributed_c10d

    return distributed_c10d._get_default_store()


def set_default_group_timeout(timeout_s: int) -> None:
    """Set the default timeout of process groups that are created from now on.

    DeepSpeed 0.19 clones the world group, and a DeviceMesh creates one group per host (pytorch #119574). The
    new groups use torch's defaults (600 s for NCCL and 1,800 s for gloo), regardless of the first group's
    timeout.
    """
    from torch.distributed import distributed_c10d as c10d

    c10d.default_pg_timeout = c10d.default_pg_nccl_timeout = timedelta(seconds=timeout_s)


def flight_record() -> list[dict[str, Any]]:
    """Return the collectives in torch's flight recorders for gloo and NCCL.

    torch's public settings only write the collectives to a file after a timeout. Without this function, the
    report of a hanging job can't name the collective that the job is waiting for.
    """
    import torch._C._distributed_c10d as c10d

    entries = []
    for name in ("_dump_fr_trace_json", "_dump_nccl_trace_json"):  # recorders of gloo and NCCL
        with suppress(AttributeError, RuntimeError, ValueError):
            entries += json.loads(getattr(c10d, name)()).get("entries", [])
    return entries


# --- captures of CUDA graphs


def leave_pool(device: int, pool: Any) -> None:
    """Make the CUDA allocator leave the memory pool of a failed capture.

    Otherwise, the allocator remains in the state of a capture (pytorch #180395, #190348), and later tensors
    are placed in the memory of a deleted graph.
    """
    import torch

    with suppress(RuntimeError):  # the allocator has already left the pool
        torch._C._cuda_endAllocateToPool(device, pool)
        torch._C._cuda_releasePool(device, pool)


def stop_timing(ddp: Any) -> None:
    """Make DDP stop timing its steps.

    DDP times every hundredth step with CUDA events, which are not allowed in a capture.
    """
    ddp._set_ddp_runtime_logging_sample_rate(2**31 - 1)


def reset_reducer(ddp: Any) -> None:
    """Make DDP discard the state of an unfinished backward pass, for example in a failed capture.

    Otherwise, DDP's next forward pass raises an error about unreduced gradients.
    """
    ddp.reducer._reset_state()


def can_reset_shards(model: Any) -> bool:
    """Return True if reset_shards() works. It needs reset_iter_state, which torch 2.11 lacks."""
    return hasattr(model, "reset_iter_state")


def reset_shards(model: Any) -> None:
    """Make FSDP2 discard the state that a failed capture left behind.

    Otherwise, the next step waits for CUDA events of the capture, which is not possible in any stream. The
    capture has computed nothing, so waiting is unnecessary.
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
