"""Stands for a CUDA graph on a CPU: the operations of a step, recorded once and repeated on the same memory.

    python -m tests.support.recorded_graph train_cnn_a.py --step_graph ...

As in a graph, all that is no tensor is frozen: numbers and branches of Python, and a tensor that takes
another's place. As in a capture, nothing is computed by the recording, and reading a number of a tensor is an
error. It does not see what is no operation of torch: compiled kernels, and what NumPy does.
"""

import os
import runpy
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from common.distributed.step_graph import StepGraph

aten = torch.ops.aten


def tensors(tree: Any) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor)]


class Recording(TorchDispatchMode):
    """The operations inside. Memory that existed before is afterwards as it was."""

    def __init__(self, fails_at: Any = None) -> None:
        super().__init__()
        self.calls: list[tuple[Any, Any, Any, list[torch.Tensor]]] = []
        self.before: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        self.fails_at = fails_at

    def __enter__(self) -> "Recording":
        self.random = torch.get_rng_state()
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        with torch.no_grad():
            for memory, content in self.before.values():
                memory.copy_(content)
        torch.set_rng_state(self.random)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (aten._local_scalar_dense.default, self.fails_at):
            raise RuntimeError("operation not permitted when stream is capturing")
        kwargs = kwargs or {}
        for tensor in tensors((args, kwargs)):
            storage = tensor.untyped_storage()
            if storage.data_ptr() not in self.before:
                memory = torch.empty(0, dtype=torch.uint8).set_(storage)
                self.before[storage.data_ptr()] = memory, memory.clone()
        made = func(*args, **kwargs)
        self.calls.append((func, args, kwargs, tensors(made)))
        return made

    @torch.no_grad()
    def replay(self) -> None:
        for func, args, kwargs, outputs in self.calls:
            for old, new in zip(outputs, tensors(func(*args, **kwargs)), strict=True):
                if old.untyped_storage().data_ptr() != new.untyped_storage().data_ptr():
                    old.copy_(new)


def record(_: StepGraph, run: Callable[[], None], fails_at: Any = None) -> Callable[[], None]:
    """In place of StepGraph.capture."""
    with Recording(fails_at) as recording:
        run()
    return recording.replay


if __name__ == "__main__":
    fails_at = aten._fused_adamw_.tensor_lr if os.environ.get("CAPTURE_FAILS") else None
    StepGraph.capture = lambda graph, run: record(graph, run, fails_at)
    del sys.argv[0]
    runpy.run_path(sys.argv[0], run_name="__main__")
