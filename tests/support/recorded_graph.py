"""CPU substitute for a CUDA graph, which records and replays a step's operations on the same memory.

    python -m tests.support.recorded_graph train_cnn_a.py --step_graph ...
    torchrun --nproc_per_node=2 -m tests.support.recorded_graph train_cnn_a.py --step_graph ...

As in a CUDA graph, everything except the contents of tensors is frozen, including Python numbers, Python
branches and the tensors themselves. As during a CUDA capture, recording computes nothing and sends nothing,
and reading a number from a tensor is an error. A replay runs the recorded collectives. Recordings do not
include work outside torch's operators, such as compiled kernels and NumPy calls.
"""

import os
import runpy
import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.fsdp._fully_shard import _fsdp_param, _fsdp_param_group
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from onecurve.distributed.step_graph import StepGraph

aten = torch.ops.aten
COLLECTIVES = ("c10d", "_c10d_functional")
# Tensor subclasses inside which operations are dispatched separately
WRAPPERS = ("DTensor", "AsyncCollectiveTensor")


def tensors(tree: Any) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor)]


class Recording(TorchDispatchMode):
    """Context manager that records operations and, on exit, restores memory to its previous contents."""

    def __init__(self, fails_at: Any = None) -> None:
        super().__init__()
        self.calls: list[tuple[Any, Any, Any, list[torch.Tensor]]] = []
        self.before: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        self.fails_at = fails_at
        self.resized: list[tuple[Any, Any]] = []

    def __enter__(self) -> "Recording":
        self.random = torch.get_rng_state()
        for module in (_fsdp_param, _fsdp_param_group):
            for name in ("alloc_storage", "free_storage"):
                if hasattr(module, name):
                    self._record_resizes(module, name)
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        for module, name, resize in self.resized:
            setattr(module, name, resize)
        with torch.no_grad():
            for memory, content in self.before.values():
                # FSDP2 frees gathered parameters, whose contents then can't be restored
                if memory.untyped_storage().nbytes() == content.numel():
                    memory.copy_(content)
        torch.set_rng_state(self.random)

    def _record_resizes(self, module: Any, name: str) -> None:
        """Record FSDP2's allocations and deallocations.

        In a CUDA graph, the allocator performs these operations at no cost.
        """
        resize = getattr(module, name)

        def recorded(tensor: torch.Tensor) -> None:
            self.calls.append((lambda t: (resize(t), None)[1], (tensor,), {}, []))
            resize(tensor)

        self.resized.append((module, name, resize))
        setattr(module, name, recorded)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(cls.__name__ in WRAPPERS for cls in types):
            return NotImplemented
        if func in (aten._local_scalar_dense.default, self.fails_at):
            raise RuntimeError("operation not permitted when stream is capturing")
        kwargs = kwargs or {}
        for tensor in tensors((args, kwargs)):
            storage = tensor.untyped_storage()
            if storage.data_ptr() not in self.before:
                memory = torch.empty(0, dtype=torch.uint8).set_(storage)
                self.before[storage.data_ptr()] = memory, memory.clone()
        if func.namespace in COLLECTIVES:
            fake_args, options = tree_map(partial(_to_fake_group, func), (args, kwargs))
            result = func(*fake_args, **options)
        else:
            result = func(*args, **kwargs)
        # The operation _wrap_tensor_autograd only creates a wrapper.
        if func is not torch.ops._c10d_functional._wrap_tensor_autograd.default:
            self.calls.append((func, args, kwargs, tensors(result)))
        return result

    @torch.no_grad()
    def replay(self) -> None:
        for func, args, kwargs, outputs in self.calls:
            result = func(*args, **kwargs)
            namespace = getattr(func, "namespace", "")
            for work in tree_leaves(result) if namespace == "c10d" else ():
                if isinstance(work, torch.ScriptObject):
                    dist.Work.unbox(work).wait()
            for old, new in zip(outputs, tensors(result), strict=True):
                if namespace == "_c10d_functional":
                    new = torch.ops._c10d_functional.wait_tensor(new)
                if old.untyped_storage().data_ptr() != new.untyped_storage().data_ptr():
                    old.copy_(new)


# Process group whose collectives return immediately, and process group that contains only this process
FAKE_GROUPS: list[Any] = []


def make_fake_groups() -> None:
    """Create the process groups to which a recording sends. Every rank must call this function."""
    import torch.testing._internal.distributed.fake_pg  # noqa: F401

    if dist.is_initialized() and not FAKE_GROUPS:
        alone, _ = dist.new_subgroups(1)
        FAKE_GROUPS.extend([dist.new_group(backend="fake"), alone])


def _to_fake_group(func: Any, value: Any) -> Any:
    """Replace a process group, or a group's name, with a fake group.

    An all-reduce uses a real one-process group, because DDP's reducer reads its result.
    """
    if isinstance(value, torch.ScriptObject) and "ProcessGroup" in str(value):
        return FAKE_GROUPS[func is torch.ops.c10d.allreduce_.default].boxed()
    if isinstance(value, str) and value in dist.distributed_c10d._world.pg_names.values():
        return FAKE_GROUPS[0].group_name
    return value


def record(
    _: StepGraph, run: Callable[[], None], pool: Any = None, fails_at: Any = None
) -> Callable[[], None]:
    """Record the step's operations, as a replacement for StepGraph.capture."""
    make_fake_groups()
    with Recording(fails_at) as recording:
        run()
    return recording.replay


if __name__ == "__main__":
    fails_at = aten._fused_adamw_.tensor_lr if os.environ.get("CAPTURE_FAILS") else None
    StepGraph.capture = lambda graph, run, pool: record(graph, run, pool, fails_at)
    del sys.argv[0]
    runpy.run_path(sys.argv[0], run_name="__main__")
