"""Trace a script's training step in one process, without a GPU.

    python -m tools.plan.trace CONFIG PROCESSES HOSTS SIZES DEVICE SCRIPT [SCRIPT_FLAGS ...]

This command runs the script's model and optimizer as rank 0, with the real engines on fake tensors. The
command prints a JSON object with the memory that torch's MemTracker observed, and with the operations that
the dispatcher observed. SIZES lists the numbers of images per forward pass, for example 8,16. DEVICE is
the name of a GPU in devices.yaml, or `cpu`.

For a GPU, the command also traces sizes near the largest size that fits into memory, because with few images,
memory peaks in the optimizer step. If the GPU supports the kernel in onecurve.models.attention, attention for
few tokens uses this kernel. For `cpu`, the command traces only SIZES, with the CPU attention kernel.
benchmarks/plan_memory.py compares the traced memory with real training runs.

All other kernels are CPU kernels, so the trace does not include the workspaces of CUDA and cuDNN kernels. For
ViT-B/32 at batch 512, the traced peak is 10.08 GiB, whereas torch allocated 10.80 GiB on an H200.
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
from onecurve.flags.recipe import Batch, ImageRecipe, without_training_flags
from onecurve.models.script import CLASS_COUNT, load_script, recipe_of
from onecurve.numerics.order import reseed
from onecurve.telemetry.flops import Device, find_device
from onecurve.upstream import torch_fakes
from onecurve.upstream.torch_fakes import leaves
from tools.plan.cost import QUANTUM, Collective, Kernel, Trace, largest_size
from tools.plan.fake_rank import fake_reducer, materialize, start_as_rank_0, without_contents

# Collective for each torch operator, and the index of the operator argument that contains all of the
# collective's bytes
COLLECTIVES = {
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
# Maximum number of extrapolations in the search for the largest size that fits into memory. Memory is a
# convex, piecewise linear function of the size, and each extrapolation is based on two sizes.
MAX_EXTRAPOLATIONS = 6
WITH_KERNELS = ("aten", "onecurve")  # operator namespaces of torch and onecurve.models.attention_kernels
WITHOUT_KERNEL = ("empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "detach", "alias")


class _Operations(DispatchMode):
    """Recorder of kernels and collectives. Views are not recorded, because views do not launch kernels."""

    def __init__(self) -> None:
        super().__init__()
        self.kernels: list[Kernel] = []
        self.collectives: list[Collective] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        operator = func.overloadpacket.__name__
        if func.namespace == "c10d":
            self._record_collective(operator, args)
        elif func.namespace in WITH_KERNELS and not func.is_view and operator not in WITHOUT_KERNEL:
            written = [tensor for tensor in leaves(result) if isinstance(tensor, Tensor)]
            if written:
                read = [tensor for tensor in leaves((args, kwargs)) if isinstance(tensor, Tensor)]
                formula = flop_registry.get(func.overloadpacket)
                flops = formula(*args, **kwargs, out_val=result) if formula else 0
                distinct_tensors = {id(tensor): tensor for tensor in (*read, *written)}.values()
                moved_bytes = sum(tensor.nbytes for tensor in distinct_tensors)
                if moved_bytes:  # operators on empty tensors do not launch a kernel
                    dtype = str(written[0].dtype).removeprefix("torch.")
                    self.kernels.append((dtype, int(flops), moved_bytes))
        return result

    def _record_collective(self, operator: str, args: tuple[Any, ...]) -> None:
        if operator in COLLECTIVES:
            collective, index = COLLECTIVES[operator]
            moved_bytes = sum(tensor.nbytes for tensor in leaves(args[index]) if isinstance(tensor, Tensor))
            scripted = [argument for argument in args if isinstance(argument, torch.ScriptObject)]
            group = next(argument for argument in scripted if "ProcessGroup" in str(argument))
            self.collectives.append((collective, moved_bytes, dist.ProcessGroup.unbox(group).size()))


class Training:
    """A script's model and optimizer, wrapped by an engine for rank 0 of a job."""

    def __init__(
        self,
        config_file: Path,
        processes: int,
        hosts: int,
        size: int,
        words: list[str],
        device: Device | None,
    ):
        """Build the model on the meta device.

        Args:
            config_file: The accelerate config's path.
            processes: Number of processes in the job.
            hosts: Number of hosts in the job.
            size: Number of images per forward pass.
            words: The script's path and flags.
            device: The job's GPU model, or None for this machine's CPU.
        """
        self.script = script = load_script(Path(words[0]))
        recipe = recipe_of(script, words[1:])
        if not (isinstance(recipe, ImageRecipe) and hasattr(script, "build_model")):
            supported = "plan.py supports only scripts that train on images."
            raise ValueError(f"{words[0]} does not define build_model(). {supported}")
        recipe = dataclasses.replace(without_training_flags(recipe), grad_compression="no", compile="no")
        self.recipe = recipe
        batch = Batch(size * processes, size, processes, 1)
        self.accelerator = start_as_rank_0(config_file, batch, hosts, recipe)
        self.accelerator.short_attention = device is not None and _has_kernel(device, self.accelerator)
        torch.manual_seed(recipe.seed)
        with torch.device("meta"):
            self.model = script.build_model(recipe, CLASS_COUNT)

    def wrap(self) -> None:
        """Build the optimizer, and wrap model and optimizer with the engine."""
        self.optimizer: Any = self.script.build_optimizer(self.model, self.recipe)
        self.model, self.optimizer = wrap(self.accelerator, self.model, self.optimizer)
        decay = self.recipe.ema_decay
        self.averaged = EMA(self.model, self.optimizer, decay) if decay else None

    def shape(self, size: int) -> tuple[int, ...]:
        """Return the shape of `size` images with the largest edge in training: [size, 3, edge, edge]."""
        edge = max(self.recipe.train_sizes or (self.recipe.image_size,))
        return size, 3, edge, edge

    def step(self, images: Tensor, labels: Tensor, at_gradients: Callable[[], None]) -> None:
        """Run an optimizer step with one micro-batch. Call at_gradients() after the backward pass."""
        reseed(self.recipe.seed, 0, 0)
        with self.accelerator.accumulate(self.model):
            loss = F.cross_entropy(self.model(images).float(), labels)
            self.accelerator.backward(loss)  # under DeepSpeed, this call includes the optimizer's step
            at_gradients()
            if clip := self.recipe.clip_norm:
                self.accelerator.clip_grad_norm_(self.model.parameters(), clip)
            self.optimizer.step()
            self.optimizer.zero_grad()
        if self.averaged:
            self.averaged.update(0)


def _has_kernel(device: Device, accelerator: JobAccelerator) -> bool:
    """Return True if a GPU supports the attention kernel, which needs bf16 (compute capability 8.0)."""
    has_triton = importlib.util.find_spec("triton") is not None
    return has_triton and "bf16" in device.peaks and precision(accelerator) != "no"


def trace(
    config_file: Path, processes: int, hosts: int, sizes: list[int], device: Device | None, words: list[str]
) -> Trace:
    """Trace an optimizer step of rank 0 with one micro-batch of each size."""
    training = Training(config_file, processes, hosts, sizes[0], words, device)
    memory_bytes = device.memory_gb * 1e9 if device else 0
    recorded = _Operations()
    with without_contents():
        training.model = materialize(training.model)
        training.wrap()
        model, averages = training.model, training.averaged.averages if training.averaged else ()
        exchanged: list[Collective] = []  # collectives of DDP's reducer, which bypass the dispatcher
        fake_reducer(model, exchanged)
        layout = layout_of(model, training.optimizer)
        tracker = torch_fakes.memory_tracker()
        tracker.track_external(model, *leaves(layout.local), *averages)
        gradients = 0

        def count_gradients() -> None:
            nonlocal gradients
            all_gradients = [parameter.grad for parameter in model.parameters()]
            gradients = sum(_local_bytes(gradient) for gradient in all_gradients if gradient is not None)

        def step(size: int) -> None:
            # Use the memory format of images augmented by onecurve.numerics.augment.
            images = torch.empty(training.shape(size), memory_format=torch.channels_last)
            training.step(images, torch.empty(size, dtype=torch.int64), count_gradients)
            tracker.reset_mod_stats()

        peaks: dict[int, dict[str, int]] = {}

        def find_peak(size: int) -> None:
            torch_fakes.reset_peak_memory(tracker)
            step(size)
            snapshot = tracker.get_tracker_snapshot("peak")[torch.device("cpu")]
            peaks[size] = {
                str(getattr(name, "value", name)): peak_bytes for name, peak_bytes in snapshot.items()
            }

        with tracker:
            step(sizes[0])  # the first step creates the optimizer state
            with recorded:
                exchanged.clear()
                step(sizes[0])
            recorded.collectives += exchanged
            for size in sizes:
                find_peak(size)
            for _ in range(MAX_EXTRAPOLATIONS if memory_bytes else 0):
                if (largest := largest_size(peaks, memory_bytes)) == 0 or largest in peaks:
                    break
                find_peak(largest)
                find_peak(largest + QUANTUM)
    state_tensors = [tensor for tensor in leaves(layout.states()) if isinstance(tensor, Tensor)]
    state_tensors += [*(layout.local if layout.is_flat else ()), *averages]
    engine, dtype = strategy(training.accelerator), precision(training.accelerator)
    parameter_bytes = sum(map(_local_bytes, model.parameters()))
    memory = (peaks, parameter_bytes, sum(map(_local_bytes, state_tensors)))
    return Trace(engine, dtype, *memory, recorded.kernels, recorded.collectives, gradients)


def _local_bytes(tensor: Any) -> int:
    return to_local(tensor).nbytes


def main() -> None:
    config_file, processes, hosts, sizes, device = sys.argv[1:6]
    words = sys.argv[6:]
    sys.argv[:] = words  # error messages start with the script's name
    job = (Path(config_file), int(processes), int(hosts))
    try:
        step_trace = trace(*job, [int(size) for size in sizes.split(",")], find_device(device), words)
    except ValueError as error:
        sys.exit(f"error: {error}")
    print(json.dumps(dataclasses.asdict(step_trace)), flush=True)
    os._exit(0)  # skip destructors, in which gloo's threads sometimes abort (pytorch #179291)


if __name__ == "__main__":
    main()
