"""Private names of torch that plan.py uses to trace a step without devices. Seen in torch 2.11 and 2.15.0.

The trace uses torch's fake tensors, which have shapes but no contents. Each function in this module either
handles code that reads contents or provides a private class that records a step.
"""

from contextlib import AbstractContextManager
from typing import Any


def fake_contents() -> AbstractContextManager[Any]:
    """Return a mode in which reading the contents of a fake tensor returns 1.

    By default, a fake tensor raises an error when code reads a number from it, for example a gradient norm.
    """
    import torch
    from torch._subclasses.fake_tensor import FakeTensorMode

    class FakeContents(FakeTensorMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            if func is torch.ops.aten._local_scalar_dense.default:
                return False if args[0].dtype == torch.bool else torch.ones((), dtype=args[0].dtype).item()
            return super().__torch_dispatch__(func, types, args, kwargs)

    return FakeContents(allow_non_fake_inputs=True)


def join_fake_group(processes: int) -> None:
    """Join torch's fake process group as rank 0. Its collectives return immediately."""
    import torch.distributed as dist
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", rank=0, world_size=processes, store=FakeStore())


def skip_ddp_checks() -> None:
    """Stop DDP's constructor from comparing and broadcasting parameters, which would read their contents."""
    from torch.nn.parallel import distributed

    distributed._verify_param_shape_across_processes = lambda *_, **__: True
    distributed._sync_module_states = lambda *_, **__: None


def read_ranks_of_meshes() -> None:
    """Let FSDP2 create its mesh outside the mode with fake tensors.

    FSDP2 reads the ranks in the mesh, which is not possible in a fake tensor.
    """
    from torch._subclasses.fake_tensor import unset_fake_temporarily
    from torch.distributed.fsdp._fully_shard import _fully_shard

    init_default_mesh = _fully_shard._init_default_mesh

    def default_mesh(*args: Any, **kwargs: Any) -> Any:
        with unset_fake_temporarily():
            return init_default_mesh(*args, **kwargs)

    _fully_shard._init_default_mesh = default_mesh


def hide_whole_shapes() -> None:
    """Make DTensor compute the shapes of operator results in a separate mode.

    DTensor computes these shapes with fake tensors of the full, unsharded shapes. In the current mode, these
    tensors would count towards this process's memory.
    """
    from torch.distributed.tensor import _sharding_prop

    _sharding_prop.detect_fake_mode = lambda *_: None


def keep_first_buckets(ddp: Any) -> None:
    """Make DDP keep the buckets of its first step, because rebuilding them reads the contents of tensors."""
    ddp.reducer = _Reducer(ddp.reducer)


class _Reducer:
    def __init__(self, reducer: Any):
        self.reducer = reducer

    def __getattr__(self, name: str) -> Any:
        return getattr(self.reducer, name)

    def _rebuild_buckets(self) -> bool:
        return False


def dispatch_mode() -> Any:
    """Return TorchDispatchMode, which intercepts each operator. Only the module of this class is private."""
    from torch.utils._python_dispatch import TorchDispatchMode

    return TorchDispatchMode


def leaves(tree: Any) -> list[Any]:
    """Return the leaves of nested lists, tuples and dicts, in the order of torch's pytrees."""
    from torch.utils._pytree import tree_leaves

    return tree_leaves(tree)


def memory_tracker() -> Any:
    """Return torch's MemTracker, which counts live tensors by purpose."""
    from torch.distributed._tools.mem_tracker import MemTracker

    return MemTracker()


def forget_peak(tracker: Any) -> None:
    """Reset the peak of a MemTracker.

    The public reset method only discards modules, so the peak of an earlier trace with larger images would
    persist.
    """
    tracker._peak_mem.clear()
