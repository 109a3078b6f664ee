"""The trace of a script's training step on one process, without a device.

`python -m tools.plan.trace CONFIG PROCESSES HOSTS SIZES DEVICE SCRIPT [its flags]` runs the script's
model and optimizer as rank 0, by the engines themselves on fake tensors, and prints what torch's MemTracker
and the dispatcher saw as JSON. SIZES: images per forward, as 8,16. DEVICE: a GPU of devices.yaml. Sizes near
the largest that fits its memory are traced, too, as with few images the optimizer's step is the peak, and
attention for few tokens is the kernel of onecurve.models.attention, where the GPU has it. `cpu`: only SIZES,
with a CPU's attention. benchmarks/plan_memory.py compares the sum of live tensors with real trainings.

The other kernels are a CPU's: what CUDA's or cuDNN's need beside their tensors is not in it. For ViT-B/32 at
batch 512 10.08 GiB are traced; torch allocated 10.80 on an H200.
"""

import dataclasses
import importlib.util
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.utils.flop_counter import flop_registry

from onecurve.distributed.accelerator import wrap
from onecurve.distributed.ema import EMA
from onecurve.distributed.job_accelerator import JobAccelerator
from onecurve.distributed.layout import layout_of, to_local
from onecurve.distributed.strategy import precision, strategy
from onecurve.flags.recipe import Batch, ImageRecipe, untrained
from onecurve.models.script import CLASSES, load_script, recipe_of
from onecurve.numerics.order import reseed
from onecurve.telemetry.flops import Device, find_device
from onecurve.upstream import torch_fakes
from onecurve.upstream.torch_fakes import leaves
from tools.plan.cost import QUANTUM, Collective, Kernel, Trace, largest_size
from tools.plan.fake_rank import fake_reducer, materialize, start_as_rank_0, without_contents

COLLECTIVES = {  # torch's operator: the collective, and the argument that has all of its bytes
    "allreduce_": ("all_reduce", 0),
    "_allgather_base_": ("all_gather", 0),
    "allgather_": ("all_gather", 0),
    "allgather_into_tensor_coalesced_": ("all_gather", 0),
    "_reduce_scatter_base_": ("reduce_scatter", 1),
    "reduce_scatter_": ("reduce_scatter", 1),
    "reduce_scatter_tensor_coalesced_": ("reduce_scatter", 1),
    "broadcast_": ("broadcast", 0),
    "reduce_": ("reduce", 0),
}
DispatchMode: Any = torch_fakes.dispatch_mode()
LINES = 6  # at most so many through two sizes each: memory is a few lines, each steeper than the one before
WITH_KERNELS = ("aten", "onecurve")  # namespaces of operators: torch's and onecurve.models.attention_kernels'
WITHOUT_KERNEL = ("empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "detach", "alias")


class _Operations(DispatchMode):
    """Records kernels and collectives. Views launch none."""

    def __init__(self) -> None:
        super().__init__()
        self.kernels: list[Kernel] = []
        self.collectives: list[Collective] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        name = func.overloadpacket.__name__
        if func.namespace == "c10d":
            self._collective(name, args)
        elif func.namespace in WITH_KERNELS and not func.is_view and name not in WITHOUT_KERNEL:
            written = [t for t in leaves(result) if isinstance(t, Tensor)]
            if written:
                read = [t for t in leaves((args, kwargs)) if isinstance(t, Tensor)]
                formula = flop_registry.get(func.overloadpacket)
                flops = formula(*args, **kwargs, out_val=result) if formula else 0
                moved = sum(t.nbytes for t in {id(t): t for t in (*read, *written)}.values())
                if moved:  # none is launched for empty tensors
                    self.kernels.append((str(written[0].dtype).removeprefix("torch."), int(flops), moved))
        return result

    def _collective(self, name: str, args: tuple[Any, ...]) -> None:
        if name in COLLECTIVES:
            kind, which = COLLECTIVES[name]
            moved = sum(t.nbytes for t in leaves(args[which]) if isinstance(t, Tensor))
            group = next(a for a in args if isinstance(a, torch.ScriptObject) and "ProcessGroup" in str(a))
            self.collectives.append((kind, moved, dist.ProcessGroup.unbox(group).size()))


class Training:
    """A script's model and optimizer on this process as rank 0, under an engine."""

    def __init__(
        self,
        config_file: Path,
        processes: int,
        hosts: int,
        size: int,
        words: list[str],
        device: Device | None,
    ):
        """words: the script and its flags. device: None is this CPU."""
        self.script = script = load_script(Path(words[0]))
        recipe = recipe_of(script, words[1:])
        if not (isinstance(recipe, ImageRecipe) and hasattr(script, "build_model")):
            raise ValueError(f"{words[0]} has no build_model(): only scripts for images can be planned")
        recipe = dataclasses.replace(untrained(recipe), grad_compression="no", compile="no")
        self.recipe = recipe
        batch = Batch(size * processes, size, processes, 1)
        self.accelerator = start_as_rank_0(config_file, batch, hosts, recipe)
        self.accelerator.short_attention = device is not None and _has_kernel(device, self.accelerator)
        torch.manual_seed(recipe.seed)
        with torch.device("meta"):
            self.model = script.build_model(recipe, CLASSES)

    def wrap(self) -> None:
        self.optimizer: Any = self.script.build_optimizer(self.model, self.recipe)
        self.model, self.optimizer = wrap(self.accelerator, self.model, self.optimizer)
        decay = self.recipe.ema_decay
        self.averaged = EMA(self.model, self.optimizer, decay) if decay else None

    def shape(self, size: int) -> tuple[int, ...]:
        edge = max(self.recipe.train_sizes or (self.recipe.image_size,))
        return size, 3, edge, edge

    def step(self, images: Tensor, labels: Tensor, at_gradients: Callable[[], None]) -> None:
        """An optimizer step of one micro-batch. It calls at_gradients() when they are there."""
        reseed(self.recipe.seed, 0, 0)
        with self.accelerator.accumulate(self.model):
            loss = F.cross_entropy(self.model(images).float(), labels)
            self.accelerator.backward(loss)  # under DeepSpeed with the optimizer's step
            at_gradients()
            if clip := self.recipe.clip_norm:
                self.accelerator.clip_grad_norm_(self.model.parameters(), clip)
            self.optimizer.step()
            self.optimizer.zero_grad()
        if self.averaged:
            self.averaged.update(0)


def _has_kernel(device: Device, accelerator: JobAccelerator) -> bool:
    """Do as onecurve.models.attention.has_kernel: GPUs from compute capability 8.0 on have units for bf16."""
    has_triton = importlib.util.find_spec("triton") is not None
    return has_triton and "bf16" in device.peaks and precision(accelerator) != "no"


def trace(
    config_file: Path,
    processes: int,
    hosts: int,
    sizes: list[int],
    device: Device | None,
    words: list[str],
) -> Trace:
    """Traces an optimizer step of one micro-batch for each of the sizes, on this process as rank 0."""
    training = Training(config_file, processes, hosts, sizes[0], words, device)
    memory_bytes = device.memory_gb * 1e9 if device else 0
    recorded = _Operations()
    with without_contents():
        training.model = materialize(training.model)
        training.wrap()
        model, averages = training.model, training.averaged.averages if training.averaged else ()
        exchanged: list[Collective] = []  # by DDP's reducer
        fake_reducer(model, exchanged)
        layout = layout_of(model, training.optimizer)
        tracker = torch_fakes.memory_tracker()
        tracker.track_external(model, *leaves(layout.local), *averages)
        gradients = 0

        def count_gradients() -> None:
            nonlocal gradients
            gradients = sum(_local_bytes(p.grad) for p in model.parameters() if p.grad is not None)

        def step(size: int) -> None:
            # In the memory format that onecurve.numerics.augment gives
            images = torch.empty(training.shape(size), memory_format=torch.channels_last)
            training.step(images, torch.empty(size, dtype=torch.int64), count_gradients)
            tracker.reset_mod_stats()

        peaks: dict[int, dict[str, int]] = {}

        def find_peak(size: int) -> None:
            torch_fakes.forget_peak(tracker)
            step(size)
            peak = tracker.get_tracker_snapshot("peak")[torch.device("cpu")]
            peaks[size] = {str(getattr(kind, "value", kind)): moved for kind, moved in peak.items()}

        with tracker:
            step(sizes[0])  # makes the optimizer's state
            with recorded:
                exchanged.clear()
                step(sizes[0])
            recorded.collectives += exchanged
            for size in sizes:
                find_peak(size)
            for _ in range(LINES if memory_bytes else 0):
                if (largest := largest_size(peaks, memory_bytes)) == 0 or largest in peaks:
                    break
                find_peak(largest)
                find_peak(largest + QUANTUM)
    state = [t for t in leaves(layout.states()) if isinstance(t, Tensor)]
    state += [*(layout.local if layout.is_flat else ()), *averages]
    return Trace(
        strategy(training.accelerator),
        precision(training.accelerator),
        peaks,
        sum(_local_bytes(p) for p in model.parameters()),
        sum(map(_local_bytes, state)),
        recorded.kernels,
        recorded.collectives,
        gradients,
    )


def _local_bytes(tensor: Any) -> int:
    return to_local(tensor).nbytes


def main() -> None:
    config_file, processes, hosts, sizes, device = sys.argv[1:6]
    words = sys.argv[6:]
    sys.argv[:] = words  # errors name the script
    numbers = [int(size) for size in sizes.split(",")]
    try:
        found = trace(Path(config_file), int(processes), int(hosts), numbers, find_device(device), words)
    except ValueError as error:
        sys.exit(f"error: {error}")
    print(json.dumps(dataclasses.asdict(found)), flush=True)
    os._exit(0)  # gloo's threads sometimes abort in their destructors (pytorch #179291)


if __name__ == "__main__":
    main()
