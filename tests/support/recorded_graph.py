"""Stands for a CUDA graph on a CPU: the operations of a step, recorded once and repeated on the same memory.

    python -m tests.support.recorded_graph train_cnn_a.py --step_graph ...
    torchrun --nproc_per_node=2 -m tests.support.recorded_graph train_cnn_a.py --step_graph ...

As in a graph, all that is no tensor is frozen: numbers and branches of Python, and a tensor that takes
another's place. As in a capture, nothing is computed or sent by the recording, and reading a number of a
tensor is an error. A replay sends what the recorded collectives send. It does not see what is no operation of
torch: compiled kernels, and what NumPy does.
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
WRAPPERS = ("DTensor", "AsyncCollectiveTensor")  # their own operations arrive, too


def tensors(tree: Any) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor)]


class Recording(TorchDispatchMode):
    """The operations inside. Memory that existed before is afterwards as it was."""

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
                if memory.untyped_storage().nbytes() == content.numel():  # FSDP2 frees gathered parameters
                    memory.copy_(content)
        torch.set_rng_state(self.random)

    def _record_resizes(self, module: Any, name: str) -> None:
        """Repeats also what FSDP2 does to memory: of a graph it is the allocator's, and costs nothing."""
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
            args_of_nobody, options = tree_map(partial(_of_nobody, func), (args, kwargs))
            made = func(*args_of_nobody, **options)
        else:
            made = func(*args, **kwargs)
        if func is not torch.ops._c10d_functional._wrap_tensor_autograd.default:  # makes a wrapper
            self.calls.append((func, args, kwargs, tensors(made)))
        return made

    @torch.no_grad()
    def replay(self) -> None:
        for func, args, kwargs, outputs in self.calls:
            made = func(*args, **kwargs)
            namespace = getattr(func, "namespace", "")
            for work in tree_leaves(made) if namespace == "c10d" else ():
                if isinstance(work, torch.ScriptObject):
                    dist.Work.unbox(work).wait()
            for old, new in zip(outputs, tensors(made), strict=True):
                if namespace == "_c10d_functional":
                    new = torch.ops._c10d_functional.wait_tensor(new)
                if old.untyped_storage().data_ptr() != new.untyped_storage().data_ptr():
                    old.copy_(new)


NOBODY: list[Any] = []  # a group whose collectives return at once, and a group of this process alone


def make_nobody() -> None:
    """Makes the groups that a recording sends to. Collective."""
    import torch.testing._internal.distributed.fake_pg  # noqa: F401

    if dist.is_initialized() and not NOBODY:
        alone, _ = dist.new_subgroups(1)
        NOBODY.extend([dist.new_group(backend="fake"), alone])


def _of_nobody(func: Any, value: Any) -> Any:
    """Replaces a process group, or its name. DDP's reducer reads the result of an all-reduce."""
    if isinstance(value, torch.ScriptObject) and "ProcessGroup" in str(value):
        return NOBODY[func is torch.ops.c10d.allreduce_.default].boxed()
    if isinstance(value, str) and value in dist.distributed_c10d._world.pg_names.values():
        return NOBODY[0].group_name
    return value


def record(
    _: StepGraph, run: Callable[[], None], pool: Any = None, fails_at: Any = None
) -> Callable[[], None]:
    """In place of StepGraph.capture."""
    make_nobody()
    with Recording(fails_at) as recording:
        run()
    return recording.replay


if __name__ == "__main__":
    fails_at = aten._fused_adamw_.tensor_lr if os.environ.get("CAPTURE_FAILS") else None
    StepGraph.capture = lambda graph, run, pool: record(graph, run, pool, fails_at)
    del sys.argv[0]
    runpy.run_path(sys.argv[0], run_name="__main__")
