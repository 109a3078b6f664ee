"""Counter of synchronizations in a GPU training run, simulated with a script's main() and fake CUDA tensors.

No GPU is needed. torch's FakeTensorMode computes shapes and devices without values, and this module
intercepts each operator before it runs. The module counts values that the host reads (`.item()`, `float()`,
`if tensor:`), blocking copies between host and device, and operators whose result size only the device knows.
Synchronizations inside kernels, collectives and the backward pass are not included. torch's backward engine
has no thread for a device that does not exist, so gradients are zeros. Functions that open, write and close a
run folder are replaced.
"""

import traceback
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest.mock import MagicMock, Mock, patch

import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from onecurve.data.images import Images
from onecurve.distributed import accelerator as accelerators
from onecurve.distributed.job_accelerator import JobAccelerator
from onecurve.distributed.precision import Precision
from onecurve.flags.recipe import Recipe, share_out
from onecurve.numerics.order import Steps
from onecurve.run import ending
from onecurve.run.run import Run
from onecurve.run.session import RunSession, TrainingMeter
from onecurve.run.state import RunState

aten = torch.ops.aten
STAGED_BYTES = 65536  # Size above which copies from pageable memory block even with non_blocking
OF_UNKNOWN_SIZE = {"nonzero", "masked_select", "_unique", "_unique2", "unique_dim", "bincount", "equal"}


class Waits(TorchDispatchMode):
    """Counter of synchronizations, by `file:function`, and of copies to the device.

    Args:
        value: Number that the host reads from each tensor on the device.
    """

    def __init__(self, value: float = 0.0):
        super().__init__()
        self.value, self.places, self.copies = value, Counter[str](), 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is aten._pin_memory.default:  # Fake tensors do not support pinned memory
            args[0].was_pinned = True
            return args[0]
        if self._waits(func, args, kwargs):
            self.places[_caller()] += 1
        if func is aten._fused_sgd_.default:  # Fake tensors do not support fused SGD
            return None
        if func is aten._local_scalar_dense.default:
            value = self.value if args[0].device.type == "cuda" else 0.5
            dtype = args[0].dtype
            return dtype == torch.bool or (value if dtype.is_floating_point else int(value))
        return func(*args, **kwargs)

    def _waits(self, func: Any, args: Any, kwargs: Any) -> bool:
        name = func.overloadpacket.__name__
        if func is aten._local_scalar_dense.default or name in OF_UNKNOWN_SIZE:
            return args[0].device.type == "cuda"
        if func is aten.index.Tensor:
            return any(i is not None and i.dtype in (torch.bool, torch.uint8) for i in args[1])
        if func is aten._to_copy.default:
            source, target = args[0], kwargs.get("device") or args[0].device
        elif func is aten.copy_.default:
            target, source = args[0].device, args[1]
        else:
            return False
        if torch.device(target).type == source.device.type:
            return False
        self.copies += torch.device(target).type == "cuda"
        non_blocking = kwargs.get("non_blocking") or (func is aten.copy_.default and args[2:] == (True,))
        to_device = source.device.type == "cpu"
        small = source.nbytes <= STAGED_BYTES or getattr(source, "was_pinned", False)
        return not (non_blocking and (small or not to_device))


def _caller() -> str:
    """Return the innermost project function on the call stack, in the form `file:function`."""
    stack = traceback.extract_stack()
    for frame in reversed(stack):
        file = Path(frame.filename)
        if file != Path(__file__) and "site-packages" not in file.parts:
            return f"{file.name}:{frame.name}"
    raise AssertionError("a test is on the stack")


@contextmanager
def counted(value: float = 0.0) -> Iterator[Waits]:
    """Use fake CUDA tensors inside the context, and count the synchronizations that they cause."""
    with FakeTensorMode(allow_non_fake_inputs=True), Waits(value) as waits:
        yield waits


def waits_of(script: ModuleType, recipe: Recipe, images: Images, read: int) -> Counter[str]:
    """Count a training run's synchronizations after Run.begin, by function. An evaluation reads `read`
    images.
    """
    batch = share_out(recipe.batch_size, recipe.per_device_batch_size, 1)
    builder = "build_model" if hasattr(script, "build_model") else "Net"
    build = getattr(script, builder)

    def begin(
        run: Run, model: nn.Module, optimizer: Any, steps: Steps, preprocessing: Any = None, **_: Any
    ) -> Steps:
        """Replace Run.begin with a function that uses no folder, checkpoints, telemetry or processes."""
        meter = TrainingMeter(run.accelerator, run.batch, keeps_ids=False)
        parts = meter, Mock(), Mock(since_write_s=lambda: 0.0), MagicMock()
        run._preprocessing = preprocessing
        run.opened_session = RunSession(
            run.recipe, steps, RunState(), *parts, main_record=None, newest_saved_step=0
        )
        run.opened_session.take_snapshot = Mock()
        for p in model.parameters():
            p.grad = torch.zeros_like(p)
        optimizer.zero_grad = lambda: None
        waits.places.clear()
        return steps

    replaced = {
        (Accelerator, "device"): torch.device("cuda", 0),
        (Accelerator, "backward"): lambda *_: None,
        (torch.cuda, "mem_get_info"): lambda device: (2**40, 2**40),
        (torch.cuda, "get_device_capability"): lambda *_: (9, 0),
        (nn.Module, "to"): lambda module, *args, **options: module,  # Fake tensors do not support Module.to
        (accelerators, "agree"): lambda *_: None,
        (Run, "begin"): begin,
        (Run, "folder"): Path(),
        (ending, "end_failed"): lambda *_: None,
        (Run, "finish"): lambda run, name: setattr(run, "has_finished", True),
        (script, builder): lambda *args: _on_cuda(build, *args),
        (script, "load"): lambda *_: images,
        (script, "plot"): lambda *_: None,
    }
    AcceleratorState._reset_state(True)
    accumulations = batch.accumulations
    accelerator = JobAccelerator(cpu=True, mixed_precision="no", gradient_accumulation_steps=accumulations)
    accelerator.precision = Precision("no", "none", "fp32")
    with ExitStack() as stack:
        stack.callback(AcceleratorState._reset_state, True)
        for (owner, name), replacement in replaced.items():
            stack.enter_context(patch.object(owner, name, replacement, create=owner is script))
        waits = stack.enter_context(counted(read))
        script.main.__wrapped__(recipe, accelerator, batch)
    return waits.places


def _on_cuda(build: Any, *args: Any) -> nn.Module:
    with torch.device("cuda"):
        return build(*args)
