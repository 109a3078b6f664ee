"""Uses private names of torch to trace a step without devices for plan.py. Written for torch 2.11 and 2.15.0.

The trace uses torch's fake tensors, which have a shape but no contents. The functions in this module replace
code that reads the contents of tensors, or return private classes that record a step.
"""

from contextlib import AbstractContextManager
from typing import Any


def fake_contents() -> AbstractContextManager[Any]:
    """Return a mode in which reading a number from a fake tensor yields 1, or False for a bool tensor.

    By default, reading a number from a fake tensor, for example a gradient norm, raises an error.
    """
    import torch
    from torch._subclasses.fake_tensor import FakeTensorMode

    class FakeContents(FakeTensorMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            if func is torch.ops.aten._local_scalar_dense.default:  # Tensor.item()
                (fake_tensor,) = args
                is_bool = fake_tensor.dtype == torch.bool
                return False if is_bool else torch.ones((), dtype=fake_tensor.dtype).item()
            return super().__torch_dispatch__(func, types, args, kwargs)

    return FakeContents(allow_non_fake_inputs=True)


def join_fake_group(process_count: int) -> None:
    """Join torch's fake process group, in which collectives return immediately, as rank 0."""
    import torch.distributed as dist
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", rank=0, world_size=process_count, store=FakeStore())


def skip_ddp_checks() -> None:
    """Prevent DDP's constructor from comparing and broadcasting the contents of parameters."""
    from torch.nn.parallel import distributed

    distributed._verify_param_shape_across_processes = lambda *_, **__: True
    distributed._sync_module_states = lambda *_, **__: None


def read_ranks_of_meshes() -> None:
    """Make FSDP2 create the device mesh from real instead of fake tensors.

    FSDP2 reads the ranks in the device mesh, which a fake tensor does not contain.
    """
    from torch._subclasses.fake_tensor import unset_fake_temporarily
    from torch.distributed.fsdp._fully_shard import _fully_shard

    original_init_mesh = _fully_shard._init_default_mesh

    def init_mesh_of_real_tensors(*args: Any, **kwargs: Any) -> Any:
        with unset_fake_temporarily():
            return original_init_mesh(*args, **kwargs)

    _fully_shard._init_default_mesh = init_mesh_of_real_tensors


def hide_whole_shapes() -> None:
    """Make DTensor compute the shapes of operator results in a separate fake tensor mode.

    DTensor computes the shapes with fake tensors that are not sharded. In the current mode, these tensors
    would count towards this process's memory.
    """
    from torch.distributed.tensor import _sharding_prop

    _sharding_prop.detect_fake_mode = lambda *_: None  # DTensor then creates a new mode


def keep_first_buckets(ddp: Any) -> None:
    """Prevent DDP from rebuilding buckets after the first step, which would read the contents of tensors."""
    ddp.reducer = _FixedBucketReducer(ddp.reducer)


class _FixedBucketReducer:
    """Wrapper around DDP's reducer that never rebuilds the gradient buckets."""

    def __init__(self, ddp_reducer: Any):
        self.ddp_reducer = ddp_reducer

    def __getattr__(self, attribute_name: str) -> Any:
        return getattr(self.ddp_reducer, attribute_name)

    def _rebuild_buckets(self) -> bool:
        return False  # no buckets were rebuilt


def dispatch_mode() -> Any:
    """Return the TorchDispatchMode class, which intercepts operators.

    Only the class's module is private.
    """
    from torch.utils._python_dispatch import TorchDispatchMode

    return TorchDispatchMode


def leaves(tree: Any) -> list[Any]:
    """Return the leaves of nested lists, tuples and dicts, in torch's pytree order."""
    from torch.utils._pytree import tree_leaves

    return tree_leaves(tree)


def memory_tracker() -> Any:
    """Return a new torch MemTracker, which counts the bytes of live tensors by purpose."""
    from torch.distributed._tools.mem_tracker import MemTracker

    return MemTracker()


def reset_peak_memory(tracker: Any) -> None:
    """Reset a MemTracker's peak memory.

    MemTracker's public reset method keeps the peak memory, for example of an earlier trace with larger
    images.
    """
    tracker._peak_mem.clear()
