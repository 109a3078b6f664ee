"""Uses private names of torch, and replaces some of its behaviour. Written for torch 2.11 and 2.15.0."""

import importlib
import json
import sys
from collections.abc import Sequence
from contextlib import suppress
from datetime import timedelta
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor

    Tensors = list[Tensor] | tuple[Tensor, ...]

# --- the compiler


class _CompilerStandIn(ModuleType):
    """Replacement for torch._dynamo that imports the real module on first use.

    Calls of graph_break and disable, which torch's optimizers always use, do not trigger the import.
    """

    graph_break = staticmethod(lambda *_, **__: None)  # torch's function does nothing outside a compilation
    disable = staticmethod(lambda function, *_, **__: function)

    def __getattr__(self, attribute: str) -> Any:
        """Import the real module on first use, and return the module's attribute."""
        # `inspect` reads double-underscore attributes, which must not trigger the import. The import of a
        # submodule reads __path__
        if attribute.startswith("__") and attribute != "__path__":
            raise AttributeError(attribute)
        if sys.modules.get(self.__name__) is self:
            del sys.modules[self.__name__]
            importlib.import_module(self.__name__)  # replaces this stand-in in sys.modules
        return getattr(sys.modules[self.__name__], attribute)


def postpone_compiler() -> None:
    """Delay the import of torch's compiler, which takes seconds, until the first compilation.

    Otherwise, an optimizer's first step imports torch._dynamo (pytorch #103952) to call two functions that do
    nothing outside a compilation.
    """
    import torch

    compiler_name = "torch._dynamo"
    if compiler_name not in sys.modules:
        torch._dynamo = sys.modules[compiler_name] = _CompilerStandIn(compiler_name)


def allow_recompilations(limit: int) -> None:
    """Let Dynamo compile up to `limit` graphs per function.

    Otherwise, Dynamo stops compiling a function after 8 graphs, runs it uncompiled, and only prints a
    warning.
    """
    import torch._dynamo

    dynamo_config = torch._dynamo.config
    dynamo_config.recompile_limit = max(limit, dynamo_config.recompile_limit)


def draw_random_numbers_as_eager() -> None:
    """Make compiled code draw the same random numbers as eager code.

    Otherwise, Inductor draws different random numbers, for example for dropout.
    """
    import torch._inductor.config

    torch._inductor.config.fallback_random = True


def has_cpp_compiler() -> bool:
    """Return True if Inductor finds a C++ compiler on this host.

    Without this check, a job without a compiler would fail with a traceback in the first compiled step.
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
    """Interpolate each tensor linearly towards a target in place, with few kernels for all tensors.

    A loop would launch one kernel per tensor. torch 2.15 provides a public function in torch.foreach, but
    torch 2.11 provides only the private function.
    """
    import torch

    torch._foreach_lerp_(tensors, targets, weight)


def add_(tensors: "Tensors", addend: float) -> None:
    """Add a number to each tensor in place, with few kernels for all tensors."""
    import torch

    torch._foreach_add_(tensors, addend)


def multiply_(tensors: "Tensors", factor: "Tensor") -> None:
    """Multiply each tensor by a factor on the same device in place, with few kernels for all tensors."""
    import torch

    torch._foreach_mul_(tensors, factor)


def norms(tensors: "Tensors", order: float) -> tuple["Tensor", ...]:
    """Return the norm of each tensor, computed with few kernels for all tensors."""
    import torch

    return tuple(torch._foreach_norm(tensors, order))


def has_bf16_instructions() -> bool:
    """Return True if this CPU supports bf16 natively.

    Without this check, rehearsals would train in bf16 on CPUs that emulate bf16. torch has no public function
    for this check.
    """
    import torch

    return torch.cpu._is_avx512_bf16_supported()


def batch_norm_class() -> Any:
    """Return the base class of torch's and timm's BatchNorm layers.

    The base class defines the forward method that numerics/batch_norm.py replaces. The layers have no public
    base class except for nn.Module.
    """
    from torch.nn.modules.batchnorm import _BatchNorm

    return _BatchNorm


# --- optimizers and loss scaling


def unscale_before_step(optimizer: Any) -> None:
    """Make the loss scaler divide the gradients by the loss scale before the optimizer's step.

    Otherwise, torch's fused optimizers divide the gradients in the step's kernel, and fused SGD rounds
    differently from a sharded model's optimizer.
    """
    optimizer._step_supports_amp_scaling = False  # read by torch.amp.GradScaler


def loss_scale(scaler: Any) -> tuple[float, int]:
    """Return a torch.amp.GradScaler's loss scale and the number of steps since its last overflow.

    Even state_dict() stores the number of steps under a private key.
    """
    scaler_state = scaler.state_dict()
    return scaler_state["scale"], scaler_state["_growth_tracker"]


def set_loss_scale(scaler: Any, scale: float, good_steps: int) -> None:
    """Set a torch.amp.GradScaler's loss scale, and set the steps since its last overflow to `good_steps`."""
    scaler.load_state_dict(scaler.state_dict() | {"scale": scale, "_growth_tracker": good_steps})


# --- process groups


def default_store() -> Any:
    """Return the default process group's store.

    torch has no public function that returns this store. A second store would need a second port.
    """
    from torch.distributed import distributed_c10d

    return distributed_c10d._get_default_store()


def set_default_group_timeout(timeout_s: int) -> None:
    """Set the default timeout of all process groups that are created later.

    DeepSpeed 0.19 clones the world group, and a DeviceMesh creates one group per host (pytorch #119574). By
    default, these groups ignore the first group's timeout, and use torch's timeouts of 600 s for NCCL and
    1,800 s for gloo.
    """
    from torch.distributed import distributed_c10d as c10d

    c10d.default_pg_timeout = c10d.default_pg_nccl_timeout = timedelta(seconds=timeout_s)


def flight_record() -> list[dict[str, Any]]:
    """Return the recent collectives of this process from torch's flight recorders for gloo and NCCL.

    The report of a hanging job uses the flight recorders to name the collective for which the job waits. With
    torch's public settings, the flight recorders only write the collectives to a file after a timeout.
    """
    import torch._C._distributed_c10d as c10d

    collectives = []
    for dump_name in ("_dump_fr_trace_json", "_dump_nccl_trace_json"):  # flight recorders of gloo and NCCL
        with suppress(AttributeError, RuntimeError, ValueError):  # without a recorder for this backend
            dump_flight_recorder = getattr(c10d, dump_name)
            collectives += json.loads(dump_flight_recorder()).get("entries", [])
    return collectives


# --- captures of CUDA graphs

UNREACHED_STEP = 2**31 - 1  # number of a step that no run reaches


def leave_capture_pool(device_index: int, memory_pool: Any) -> None:
    """Make the CUDA allocator leave a failed capture's memory pool.

    Otherwise, the allocator behaves as if the capture continued (pytorch #180395, #190348), and places later
    tensors in a deleted graph's memory.
    """
    import torch

    with suppress(RuntimeError):  # the allocator has already left the pool
        torch._C._cuda_endAllocateToPool(device_index, memory_pool)
        torch._C._cuda_releasePool(device_index, memory_pool)


def stop_ddp_timing(ddp: Any) -> None:
    """Make DDP stop timing its steps.

    Otherwise, DDP records CUDA events in every hundredth step, which is not allowed while a graph is
    captured.
    """
    ddp._set_ddp_runtime_logging_sample_rate(UNREACHED_STEP)  # after DDP's first 10 steps


def reset_reducer(ddp: Any) -> None:
    """Make DDP discard the state of a backward pass that did not finish, for example in a failed capture.

    Otherwise, DDP raises an error about unreduced gradients in the next forward pass.
    """
    ddp.reducer._reset_state()


def reset_fsdp_state(model: Any) -> None:
    """Make FSDP2 discard the state that remains after a failed capture.

    Otherwise, the next step fails, because no stream can wait for the capture's CUDA events. Waiting is not
    necessary, because a capture does not compute anything.
    """
    root_state = model._get_fsdp_state()
    param_groups = [
        group for state in root_state._state_ctx.all_states for group in _fsdp_param_groups(state)
    ]
    comm_context = root_state._comm_ctx
    comm_context.all_gather_state = None
    if hasattr(comm_context, "reduce_scatter_states"):
        comm_context.reduce_scatter_states.clear()
    else:  # torch 2.11
        comm_context.reduce_scatter_state = None
    if hasattr(comm_context, "_last_post_reduce_events"):  # since torch 2.13
        comm_context._last_post_reduce_events.clear()
    for param_group in param_groups:
        param_group._all_gather_result = param_group._post_reduce_event = None
        param_group._all_reduce_state = param_group._reshard_after_forward_event = None
    if hasattr(model, "reset_iter_state"):  # since torch 2.13
        model.reset_iter_state()
    else:
        _reset_fsdp_iteration(root_state, param_groups)


def _fsdp_param_groups(fsdp_state: Any) -> Sequence[Any]:
    """Return the parameter groups of one FSDP2 module. torch 2.11 has at most one group for each module."""
    if hasattr(fsdp_state, "_fsdp_param_groups"):
        return fsdp_state._fsdp_param_groups
    return [fsdp_state._fsdp_param_group] if fsdp_state._fsdp_param_group else []


def _reset_fsdp_iteration(root_state: Any, param_groups: Sequence[Any]) -> None:
    """Shard all parameters, and discard their gradients and the unfinished iteration.

    FSDPModule.reset_iter_state() does the same since torch 2.13.
    """
    for fsdp_state in root_state._state_ctx.all_states:
        fsdp_state._modules_to_run_forward.clear()
        fsdp_state._training_state = type(fsdp_state._training_state).IDLE
    for param_group in param_groups:
        for fsdp_param in param_group.fsdp_params:
            fsdp_param.sharded_param.grad = fsdp_param.unsharded_accumulated_grad = None
            if hasattr(fsdp_param, "_unsharded_param"):  # gathered at least once
                fsdp_param._unsharded_param.grad = None
        param_group._post_forward_indices.clear()
        param_group._training_state = type(param_group._training_state).IDLE
        param_group._to_sharded()
    root_state._comm_ctx.post_forward_order.clear()
    root_state._state_ctx.iter_forward_root = None
    root_state._state_ctx.post_backward_final_callback_queued = False
