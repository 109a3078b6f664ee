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
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.utils.flop_counter import flop_registry

from onecurve.distributed.accelerator import wrap
from onecurve.distributed.ema import EMA
from onecurve.distributed.job_accelerator import JobAccelerator
from onecurve.distributed.layout import to_local
from onecurve.distributed.strategy import precision, strategy
from onecurve.distributed.strategy_layouts import layout_of
from onecurve.flags.recipe import Batch, ImageRecipe, without_training_flags
from onecurve.models.script import ASSUMED_CLASS_COUNT, load_script, recipe_of
from onecurve.numerics.order import reseed
from onecurve.telemetry.flops import DeviceSpecs, find_device
from onecurve.upstream import torch_fakes
from onecurve.upstream.torch_fakes import leaves
from tools.plan.cost import IMAGE_QUANTUM, Collective, Kernel, Trace, estimate_largest_size
from tools.plan.fake_rank import (
    fake_tensor_contents,
    materialize_on_fake_cpu,
    record_reducer_collectives,
    start_as_rank_0,
)

COLLECTIVE_BY_OPERATOR = {
    "allreduce_": "all_reduce",
    "_allgather_base_": "all_gather",
    "allgather_": "all_gather",
    "allgather_into_tensor_coalesced_": "all_gather",
    "_reduce_scatter_base_": "reduce_scatter",
    "reduce_scatter_": "reduce_scatter",
    "reduce_scatter_tensor_coalesced_": "reduce_scatter",
    "broadcast_": "broadcast",
    "reduce_": "reduce",
}
DispatchMode: Any = torch_fakes.dispatch_mode()
# Maximum number of extrapolations in the search for the largest size that fits into memory. Memory is a
# convex, piecewise linear function of the size, and each extrapolation is based on two sizes.
MAX_EXTRAPOLATIONS = 6
KERNEL_NAMESPACES = ("aten", "onecurve")  # operator namespaces of torch and onecurve.models.attention_kernels
OPERATORS_WITHOUT_KERNEL = ["empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided"]
OPERATORS_WITHOUT_KERNEL += ["detach", "alias"]


class PlannedJob(NamedTuple):
    """Job with one process per device."""

    config_file: Path  # the accelerate config's path
    process_count: int
    host_count: int
    device: DeviceSpecs | None  # GPU model, or None for this machine's CPU
    script_command: list[str]  # the script's path and flags


class _OperationRecorder(DispatchMode):
    """Recorder of kernels and collectives. Views are not recorded, because views do not launch kernels."""

    def __init__(self) -> None:
        super().__init__()
        self.kernels: list[Kernel] = []
        self.collectives: list[Collective] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        """Run an operator, and record it if it is a collective or launches a kernel."""
        kwargs = kwargs or {}
        operator_result = func(*args, **kwargs)
        operator_name = func.overloadpacket.__name__
        if func.namespace == "c10d":
            self._record_collective(operator_name, args)
        elif func.namespace in KERNEL_NAMESPACES and operator_name not in OPERATORS_WITHOUT_KERNEL:
            written_tensors = [] if func.is_view else _tensors_in(operator_result)
            if written_tensors:
                read_tensors = _tensors_in((args, kwargs))
                flop_formula = flop_registry.get(func.overloadpacket)
                flops = flop_formula(*args, **kwargs, out_val=operator_result) if flop_formula else 0
                # Count a tensor once if the operator reads it twice or overwrites it.
                tensor_by_id = {id(tensor): tensor for tensor in (*read_tensors, *written_tensors)}
                moved_bytes = sum(tensor.nbytes for tensor in tensor_by_id.values())
                if moved_bytes:  # operators on empty tensors do not launch a kernel
                    output_dtype = str(written_tensors[0].dtype).removeprefix("torch.")
                    self.kernels.append((output_dtype, int(flops), moved_bytes))
        return operator_result

    def _record_collective(self, operator_name: str, arguments: tuple[Any, ...]) -> None:
        """Record the name, bytes and rank count of a c10d operator in COLLECTIVE_BY_OPERATOR."""
        if collective_name := COLLECTIVE_BY_OPERATOR.get(operator_name):
            # The larger of a collective's output (first argument) and input contains all of its bytes.
            largest_argument = arguments[1] if collective_name == "reduce_scatter" else arguments[0]
            moved_bytes = sum(tensor.nbytes for tensor in _tensors_in(largest_argument))
            # Operators receive the process group as a boxed TorchScript object.
            script_objects = [argument for argument in arguments if isinstance(argument, torch.ScriptObject)]
            boxed_group = next(argument for argument in script_objects if "ProcessGroup" in str(argument))
            rank_count = dist.ProcessGroup.unbox(boxed_group).size()
            self.collectives.append((collective_name, moved_bytes, rank_count))


def _tensors_in(tensor_tree: Any) -> list[Tensor]:
    return [tree_leaf for tree_leaf in leaves(tensor_tree) if isinstance(tree_leaf, Tensor)]


class TracedTraining:
    """A script's model and optimizer, wrapped by an engine for rank 0 of a job."""

    def __init__(self, job: PlannedJob, image_count: int):
        """Turn this process into the job's rank 0, and build the script's model on the meta device.

        Args:
            job: Job to trace. This process can trace only one job.
            image_count: Number of images per forward pass.

        Raises:
            ValueError: If the script does not train on images.
        """
        script_path, *script_flags = job.script_command
        self.script_module = load_script(Path(script_path))
        recipe = recipe_of(self.script_module, script_flags)
        if not (isinstance(recipe, ImageRecipe) and hasattr(self.script_module, "build_model")):
            explanation = "plan.py supports only scripts that train on images."
            raise ValueError(f"{script_path} does not define build_model(). {explanation}")
        # The planner applies both flags to the finished trace: see compress_traffic() and Execution.of().
        recipe = dataclasses.replace(without_training_flags(recipe), grad_compression="no", compile="no")
        self.recipe = recipe
        batch = Batch(image_count * job.process_count, image_count, job.process_count, accumulations=1)
        self.accelerator = start_as_rank_0(job.config_file, batch, job.host_count, recipe)
        uses_attention_kernel = job.device is not None and _has_attention_kernel(job.device, self.accelerator)
        self.accelerator.uses_short_attention_kernel = uses_attention_kernel
        torch.manual_seed(recipe.seed)
        with torch.device("meta"):
            self.model = self.script_module.build_model(recipe, ASSUMED_CLASS_COUNT)

    def wrap_model(self) -> None:
        """Build the optimizer, wrap model and optimizer with the engine, and create the EMA if enabled."""
        self.optimizer: Any = self.script_module.build_optimizer(self.model, self.recipe)
        self.model, self.optimizer = wrap(self.accelerator, self.model, self.optimizer)
        ema_decay = self.recipe.ema_decay
        self.average = EMA(self.model, self.optimizer, ema_decay) if ema_decay else None

    def batch_shape(self, image_count: int) -> tuple[int, ...]:
        """Return the shape of a batch with the largest edge in training: [image_count, 3, edge, edge]."""
        largest_edge = max(self.recipe.train_sizes or (self.recipe.image_size,))
        return image_count, 3, largest_edge, largest_edge

    def train_step(self, images: Tensor, labels: Tensor, on_gradients: Callable[[], None]) -> None:
        """Run an optimizer step with one micro-batch. Call on_gradients() after the backward pass."""
        reseed(self.recipe.seed, 0, 0)  # step 0, micro-batch 0
        with self.accelerator.accumulate(self.model):
            loss = F.cross_entropy(self.model(images).float(), labels)
            self.accelerator.backward(loss)  # under DeepSpeed, this call includes the optimizer's step
            on_gradients()
            if clip_norm := self.recipe.clip_norm:
                self.accelerator.clip_grad_norm_(self.model.parameters(), clip_norm)
            self.optimizer.step()
            self.optimizer.zero_grad()
        if self.average:
            self.average.update(0)  # step 0


def _has_attention_kernel(device: DeviceSpecs, accelerator: JobAccelerator) -> bool:
    """Return True if a GPU supports the attention kernel, which needs bf16 (compute capability 8.0)."""
    has_triton = importlib.util.find_spec("triton") is not None
    return has_triton and "bf16" in device.peaks and precision(accelerator) != "no"


def trace(job: PlannedJob, image_counts: list[int]) -> Trace:
    """Trace rank 0's optimizer step with one micro-batch.

    Kernels and collectives are traced with the first image count, and peak memory with each image count.
    For a GPU, the peak is also traced near the largest image count that fits into the GPU's memory.

    Args:
        job: Job to trace.
        image_counts: Numbers of images per forward pass, at least two.
    """
    first_image_count, *_ = image_counts
    training = TracedTraining(job, first_image_count)
    memory_bytes = job.device.memory_gb * 1e9 if job.device else 0
    recorder = _OperationRecorder()
    with fake_tensor_contents():
        training.model = materialize_on_fake_cpu(training.model)
        training.wrap_model()
        model = training.model
        ema_tensors = training.average.averages if training.average else ()
        reducer_collectives: list[Collective] = []  # from DDP's reducer, which bypasses the dispatcher
        record_reducer_collectives(model, reducer_collectives)
        layout = layout_of(model, training.optimizer)
        memory_tracker = torch_fakes.memory_tracker()
        # These tensors exist before the tracker starts.
        memory_tracker.track_external(model, *leaves(layout.local_tensors), *ema_tensors)
        gradient_bytes = 0

        def record_gradient_bytes() -> None:  # runs in each step, while the gradients exist
            nonlocal gradient_bytes
            gradients = [parameter.grad for parameter in model.parameters()]
            gradient_bytes = sum(_local_bytes(gradient) for gradient in gradients if gradient is not None)

        def trace_step(image_count: int) -> None:
            # Use the memory format of images augmented by onecurve.numerics.augment.
            images = torch.empty(training.batch_shape(image_count), memory_format=torch.channels_last)
            labels = torch.empty(image_count, dtype=torch.int64)
            training.train_step(images, labels, record_gradient_bytes)
            memory_tracker.reset_mod_stats()  # the statistics of modules are not used

        peak_bytes: dict[int, dict[str, int]] = {}  # by number of images, then by category

        def trace_peak(image_count: int) -> None:
            torch_fakes.reset_peak_memory(memory_tracker)
            trace_step(image_count)
            peak_items = memory_tracker.get_tracker_snapshot("peak")[torch.device("cpu")].items()
            # Categories are enum members, but the key "Total" is a string.
            peak_bytes[image_count] = {str(getattr(key, "value", key)): size for key, size in peak_items}

        with memory_tracker:
            trace_step(first_image_count)  # the first step creates the optimizer state
            with recorder:
                reducer_collectives.clear()
                trace_step(first_image_count)
            recorder.collectives += reducer_collectives
            for image_count in image_counts:
                trace_peak(image_count)
            for _ in range(MAX_EXTRAPOLATIONS if memory_bytes else 0):
                largest_image_count = estimate_largest_size(peak_bytes, memory_bytes)
                if largest_image_count == 0 or largest_image_count in peak_bytes:
                    break
                trace_peak(largest_image_count)  # the next estimate is based on these two traces
                trace_peak(largest_image_count + IMAGE_QUANTUM)
    optimizer_tensors = _tensors_in(layout.local_states())
    # ZeRO's flat partitions are its fp32 master weights.
    optimizer_tensors += [*(layout.local_tensors if layout.has_flat_partitions else ()), *ema_tensors]
    return Trace(
        strategy=strategy(training.accelerator),
        mixed_precision=precision(training.accelerator),
        peak_bytes=peak_bytes,
        parameter_bytes=sum(map(_local_bytes, model.parameters())),
        optimizer_bytes=sum(map(_local_bytes, optimizer_tensors)),
        operations=recorder.kernels,
        collectives=recorder.collectives,
        gradient_bytes=gradient_bytes,
    )


def _local_bytes(tensor: Any) -> int:
    """Return the size of rank 0's shard of a DTensor, or of a whole tensor."""
    return to_local(tensor).nbytes


def main() -> None:
    """Trace the job that the command line describes, and print the trace as a line of JSON."""
    _, config_file, process_count, host_count, image_counts, device_name, *script_command = sys.argv
    sys.argv[:] = script_command  # error messages start with the script's name
    device = find_device(device_name)
    planned_job = PlannedJob(Path(config_file), int(process_count), int(host_count), device, script_command)
    try:
        step_trace = trace(planned_job, [int(image_count) for image_count in image_counts.split(",")])
    except ValueError as error:
        sys.exit(f"error: {error}")
    print(json.dumps(dataclasses.asdict(step_trace)), flush=True)
    os._exit(0)  # skip destructors, in which gloo's threads sometimes abort (pytorch #179291)


if __name__ == "__main__":
    main()
