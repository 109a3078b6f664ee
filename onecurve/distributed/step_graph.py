"""Runs optimizer steps as CUDA graphs, so that the host launches one graph instead of every kernel.

With gradient accumulation, a step consists of up to three graphs: one for the first micro-batch, one for the
middle micro-batches, and one for the last. The last graph includes the gradient exchange and the optimizer
step. In a job with several processes, the graphs contain collectives, so all ranks must replay the same
graphs in the same order. The input shape and the micro-batch's position in the step determine which graph is
replayed. Ranks use captured graphs only if the capture succeeded on all ranks.

Replays read and write the memory addresses that the capture recorded. Therefore, everything that changes
between steps (inputs, labels and learning rates) is a tensor at a fixed address. torch passes the random seed
to a graph before each replay. State that persists between steps is updated in place and never replaced.
"""

import gc
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any, cast
from weakref import WeakSet

import torch
from accelerate.optimizer import AcceleratedOptimizer
from accelerate.utils import DDPCommunicationHookType
from torch import Tensor, nn

from onecurve.distributed.channel import GlooExchange
from onecurve.distributed.job_accelerator import JobAccelerator
from onecurve.distributed.layout import innermost_optimizer
from onecurve.distributed.rendezvous import backend
from onecurve.distributed.strategy import precision, sharding, strategy
from onecurve.distributed.watch import watch
from onecurve.system.phase import GRAPH_CAPTURE, GRAPH_WARM_UP, Replay, now, timed_as
from onecurve.upstream import torch_

# Number of warm-up steps before each input shape is captured. During warm-up, torch compiles code, tunes
# cuDNN and creates the optimizer's state. DDP rebuilds its buckets after the first step, and times the first
# ten steps.
WARM_UP_STEPS = {"single": 3, "ddp": 11, "fsdp": 3}
# Minimum free memory for evaluations, as a fraction of the memory reserved by the graphs
SPARE_MEMORY_FRACTION = 0.5
# Optimizers that can read learning rates on the device
CAPTURABLE_OPTIMIZERS = (torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW)

StepFunction = Callable[[Tensor, Tensor], Tensor]  # (inputs, labels) -> loss, including the optimizer's step


def chosen_step_graph(accelerator: JobAccelerator, step_graph_flag: bool | None) -> bool:
    """Return True if steps run as CUDA graphs.

    Args:
        accelerator: The started Accelerator.
        step_graph_flag: Value of --step_graph. None uses graphs on a GPU if possible, and otherwise prints
            the reason.

    Raises:
        ValueError: If the flag is set, but graphs are not possible.
    """
    graph_obstacle = capture_obstacle(accelerator)
    if step_graph_flag and graph_obstacle:
        raise ValueError(f"--step_graph: {graph_obstacle}. Remove --step_graph.")
    are_graphs_requested = accelerator.device.type == "cuda" if step_graph_flag is None else step_graph_flag
    if are_graphs_requested and graph_obstacle:
        accelerator.print(f"steps run without CUDA graphs: {graph_obstacle}")
    return are_graphs_requested and not graph_obstacle


def capture_obstacle(accelerator: JobAccelerator) -> str:
    """Return the reason why a step can't run as a CUDA graph, or an empty string if it can."""
    sharding_settings, ddp_options = sharding(accelerator), accelerator.ddp_handler
    if strategy(accelerator).startswith("zero"):
        return "ZeRO selects on the host which gradients to exchange"
    if sharding_settings.get("offload_params"):
        return "FSDP2 with offload runs the optimizer on the CPU"
    if sharding_settings.get("replicas", 1) > 1:
        return "CUDA graphs are not tested with FSDP2's hybrid sharding"
    if accelerator.grad_checkpointing:
        return "--grad_checkpointing reads the random generator's state on the host"
    if precision(accelerator) == "fp16":
        return "fp16 loss scaling checks for overflows on the host"
    if str(accelerator.compilation) not in ("no", "default"):
        return f"--compile {accelerator.compilation} may create CUDA graphs itself"
    if ddp_options and ddp_options.comm_hook != DDPCommunicationHookType.NO:
        return "--grad_compression launches its gradient casts from the host"
    if accelerator.num_processes > 1 and accelerator.device.type == "cuda" and backend() != "nccl":
        return f"{backend()} collectives run on the host"
    return ""


def keep_segments_out_of_nccl() -> None:
    """Stop NCCL from registering graph memory in expandable segments (pytorch #158029).

    If the environment enables expandable segments, this function sets NCCL_GRAPH_REGISTER in the environment,
    unless the user has set it. Call this function before the process group is created.
    """
    allocator_variables = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")
    allocator_settings = [os.environ.get(variable, "") for variable in allocator_variables]
    if any("expandable_segments:True" in allocator_setting for allocator_setting in allocator_settings):
        os.environ.setdefault("NCCL_GRAPH_REGISTER", "0")


def step_graph(
    accelerator: JobAccelerator, optimizer: AcceleratedOptimizer
) -> Callable[[StepFunction], StepFunction]:
    """Return a decorator that replaces a micro-batch's step with a StepGraph, if graphs are enabled.

    Call this function after Run.begin. The step must launch the same kernels in every call, and must not
    depend on host values other than learning rates. Fused SGD, Adam and AdamW can read learning rates on the
    device, with bitwise identical results. With any other optimizer, this function disables graphs in the
    accelerator and prints the reason, and the decorator returns the step unchanged.
    """
    torch_optimizer = optimizer.optimizer
    if accelerator.step_graph and not _reads_rates_on_device(accelerator, torch_optimizer):
        class_name = type(torch_optimizer).__name__
        accelerator.print(f"steps run without CUDA graphs: {class_name} may read its settings on the host")
        accelerator.step_graph = False

    def decorate(step: StepFunction) -> StepFunction:
        return StepGraph(accelerator, optimizer, step) if accelerator.step_graph else step

    return decorate


def _reads_rates_on_device(accelerator: JobAccelerator, optimizer: torch.optim.Optimizer) -> bool:
    """Return True if the optimizer's step can read learning rates from tensors on the device."""
    # On a CPU, steps are never recorded, so any kernels are possible
    is_fused_or_on_cpu = accelerator.device.type == "cpu" or all(
        group.get("fused") for group in optimizer.param_groups
    )
    # PyTorch's SGD is never fused under FSDP2
    is_sharded_sgd = type(optimizer) is torch.optim.SGD and strategy(accelerator) == "fsdp"
    return (
        type(optimizer) in CAPTURABLE_OPTIMIZERS
        and innermost_optimizer(optimizer) is optimizer  # not wrapped, for example by Lookahead
        and is_fused_or_on_cpu
        and not is_sharded_sgd
    )


def make_capturable(optimizer: torch.optim.Optimizer) -> None:
    """Make the optimizer count steps on the device, because a graph can't update a count on the host.

    Step counts loaded from a checkpoint are moved to the device.
    """
    for parameter_group in optimizer.param_groups:
        if "capturable" in parameter_group:
            parameter_group["capturable"] = True
            for parameter in parameter_group["params"]:
                parameter_state = optimizer.state.get(parameter, {})
                for state_name, state_value in list(parameter_state.items()):
                    if isinstance(state_value, Tensor) and not state_value.ndim:  # a step count is a scalar
                        parameter_state[state_name] = state_value.to(parameter.device)


@contextmanager
def on_step_stream(accelerator: JobAccelerator) -> Iterator[None]:
    """Run the block on the capture stream, synchronised with the current stream on entry and exit.

    Autograd and DDP use the stream on which a gradient's accumulator was created. Therefore, the model must
    also be wrapped on the capture stream (Megatron-LM #6021).
    """
    step_stream = accelerator.step_stream
    if step_stream is None:
        yield
        return
    step_stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(step_stream):
        yield
    torch.cuda.current_stream().wait_stream(step_stream)


def free_graphs() -> None:
    """Free all graphs of this process.

    A process group can't be destroyed while a graph contains its collectives (pytorch #115388).
    """
    for live_step_graph in list(_live_step_graphs):
        live_step_graph.free_shape_graphs()


_live_step_graphs: "WeakSet[StepGraph]" = WeakSet()  # all objects in this process, for free_graphs()


@dataclass
class MicroBatchGraph:
    """One of a step's graphs, and the loss that it computes."""

    replay_graph: Callable[[], None] | None = None  # None before the capture
    loss: Tensor | None = None  # tensor that each replay overwrites


@dataclass
class ShapeGraphs:
    """Graphs for one input shape, and their input tensors.

    `graphs` contains the graphs of the first, middle and last micro-batch. A step with fewer than three
    micro-batches has fewer graphs. The list is empty before the capture.
    """

    inputs: Tensor
    labels: Tensor
    step_count: int = 0  # number of steps since the input shape last changed
    graphs: list[MicroBatchGraph] = field(default_factory=list)


class StepGraph:
    """Training step that runs eagerly during each input shape's warm-up and as CUDA graphs afterwards.

    If the capture fails on any rank, all ranks call the original step from then on. On a CPU, every call runs
    the original step, with the same buffers as on a GPU. The constructor is collective.
    """

    def __init__(self, accelerator: JobAccelerator, optimizer: AcceleratedOptimizer, step: StepFunction):
        self.accelerator = accelerator
        self.eager_step = step
        self.parameter_groups = optimizer.param_groups
        self.on_gpu = accelerator.device.type == "cuda"
        # Learning rates at fixed addresses. On a GPU, fused optimizers require fp32 learning rates. On a CPU,
        # float64 is as precise as a Python float.
        rate_dtype = torch.float32 if self.on_gpu else torch.float64
        self.device_rates = [
            torch.zeros((), dtype=rate_dtype, device=accelerator.device) for _ in self.parameter_groups
        ]
        if self.on_gpu:
            make_capturable(optimizer.optimizer)
        self.micro_batch_count = accelerator.gradient_accumulation_steps
        self.warm_up_steps = WARM_UP_STEPS[strategy(accelerator)]
        # Graphs for the current input shape only, because --train_sizes uses each size only once
        self.shape_graphs: ShapeGraphs | None = None
        self.replay_count = 0
        self.gloo_exchange = GlooExchange(watch.timeout_s)  # tells all ranks which captures failed
        self.model = cast("Any", accelerator.prepared_model)
        self.has_gathered_parameters = False  # True if FSDP2's modules may contain gathered parameters
        if strategy(accelerator) == "fsdp":
            self.model.register_forward_hook(self._record_forward)
        elif isinstance(self.model, nn.parallel.DistributedDataParallel):
            torch_.stop_ddp_timing(self.model)
        _live_step_graphs.add(self)

    def __call__(self, inputs: Tensor, labels: Tensor) -> Tensor:
        """Run one micro-batch's step, and return its loss, which is valid until the next call.

        The step runs eagerly during the warm-up or if graphs are disabled, and as a graph afterwards.
        """
        micro_batch_index = self.accelerator.step % self.micro_batch_count
        if self.accelerator.step_graph and micro_batch_index == 0:
            self._begin_step(inputs, labels)
        if not self.accelerator.step_graph:
            with on_step_stream(self.accelerator):
                return self.eager_step(inputs, labels)
        assert self.shape_graphs
        self.shape_graphs.inputs.copy_(inputs)
        self.shape_graphs.labels.copy_(labels)
        for device_rate, group in zip(self.device_rates, self.parameter_groups, strict=True):
            device_rate.fill_(group["lr"])
        if self.shape_graphs.graphs:
            is_last = micro_batch_index == self.micro_batch_count - 1
            # Index 0 is the first micro-batch's graph, and 1 the graph of all middle micro-batches
            micro_batch_graph = self.shape_graphs.graphs[-1 if is_last else min(micro_batch_index, 1)]
            self._replay(micro_batch_graph)
        else:
            micro_batch_graph = MicroBatchGraph()
            with timed_as(GRAPH_WARM_UP), on_step_stream(self.accelerator):
                self._run_step(self.shape_graphs, micro_batch_graph)
        assert micro_batch_graph.loss is not None
        return micro_batch_graph.loss

    def free_shape_graphs(self) -> None:
        """Free this object's graphs, their input tensors and their memory."""
        self.shape_graphs = None

    def _begin_step(self, inputs: Tensor, labels: Tensor) -> None:
        """Create the buffers for a new input shape. After the warm-up, capture the step."""
        if self.shape_graphs is None or self.shape_graphs.inputs.shape != inputs.shape:
            self.free_shape_graphs()  # free the memory used by the previous shape's graphs
            self.shape_graphs = ShapeGraphs(torch.empty_like(inputs), torch.empty_like(labels))
        self.shape_graphs.step_count += 1
        if self.shape_graphs.step_count > self.warm_up_steps and not self.shape_graphs.graphs:
            with timed_as(GRAPH_CAPTURE):
                self._capture_step(self.shape_graphs)

    def _run_step(self, shape_graphs: ShapeGraphs, micro_batch_graph: MicroBatchGraph) -> None:
        """Call the original step with learning rates on the device, and store the loss.

        The optimizer's original learning rates are restored afterwards. The loss is detached, because its
        autograd graph would otherwise still exist during the capture.
        """
        original_rates = [group["lr"] for group in self.parameter_groups]
        for group, device_rate in zip(self.parameter_groups, self.device_rates, strict=True):
            if self.on_gpu or not group.get("foreach"):  # foreach optimizers on a CPU do not accept a tensor
                group["lr"] = device_rate
        try:
            micro_batch_graph.loss = self.eager_step(shape_graphs.inputs, shape_graphs.labels).detach()
        finally:
            for group, original_rate in zip(self.parameter_groups, original_rates, strict=True):
                group["lr"] = original_rate

    def _replay(self, micro_batch_graph: MicroBatchGraph) -> None:
        """Replay a graph, and make Accelerate count the replay as one micro-batch.

        The method also publishes the replay in `now.replay`, where the watch thread detects hanging replays.
        """
        self._reshard()
        self.replay_count += 1
        accelerator_step = self.accelerator.step
        # The watch observes one replay at a time, until the device has finished it
        pending_replay = now.replay if now.replay and not now.replay.is_done() else None
        tracked_replay = pending_replay or Replay(self.replay_count)
        now.replay = tracked_replay
        tracked_replay.launched = self.replay_count
        assert micro_batch_graph.replay_graph
        micro_batch_graph.replay_graph()
        if not pending_replay:
            tracked_replay.ended = _queued_work_query() if self.on_gpu else lambda: True
        # Replaying a CUDA graph does not call accelerator.accumulate(), which otherwise counts micro-batches
        self.accelerator.step = accelerator_step + 1

    def _capture_step(self, shape_graphs: ShapeGraphs) -> None:
        """Capture the step's graphs. If the capture fails on any rank, disable graphs on all ranks.

        This method is collective.
        """
        accelerator_step = self.accelerator.step
        exact_sum = self.accelerator.exact_sum
        micro_batch_graphs: list[MicroBatchGraph] = []
        capture_error = ""
        memory_pool = torch.cuda.graph_pool_handle() if self.on_gpu else None
        last_micro_batch_index = self.micro_batch_count - 1
        self._reshard()
        with exact_sum.restoring_counters() if exact_sum else nullcontext():
            try:
                reserved_bytes_before = _reserved_bytes_without_cache() if self.on_gpu else 0
                # Capture the first, a middle and the last micro-batch, as far as these differ
                for micro_batch_index in sorted({0, min(1, last_micro_batch_index), last_micro_batch_index}):
                    self.accelerator.step = accelerator_step + micro_batch_index
                    micro_batch_graph = MicroBatchGraph()
                    micro_batch_graphs.append(micro_batch_graph)
                    run_step = partial(self._run_step, shape_graphs, micro_batch_graph)
                    micro_batch_graph.replay_graph = self.capture(run_step, memory_pool)
                if self.on_gpu:
                    _check_memory_for_evaluations(reserved_bytes_before)
            except Exception as error:
                capture_error = _capture_error_text(error)
        self.accelerator.step = accelerator_step
        error_by_rank = self.gloo_exchange.gather(capture_error)
        if any(error_by_rank):
            micro_batch_graphs.clear()
            self._continue_without_graphs(error_by_rank)
        shape_graphs.graphs = micro_batch_graphs

    def capture(self, run_step: Callable[[], None], memory_pool: Any) -> Callable[[], None]:
        """Record the kernels that run_step() launches, without executing them.

        If the capture fails, this method restores the process's state and raises the error. torch alone would
        leave the stream, the random generator and the allocator in capture mode (pytorch #180395, #190348).

        On a CPU, nothing is recorded or executed.

        Returns:
            A function that replays the recorded kernels, or run_step on a CPU.
        """
        if not self.on_gpu:
            return run_step
        cuda_graph = torch.cuda.CUDAGraph()
        device_index = torch.cuda.current_device()
        current_stream = torch.cuda.current_stream()
        random_generator = torch.cuda.default_generators[device_index]
        generator_state = random_generator.clone_state()
        try:
            # "thread_local" allows CUDA calls during the capture by threads that write checkpoints or measure
            # usage.
            step_stream = self.accelerator.step_stream
            with torch.cuda.graph(cuda_graph, memory_pool, step_stream, capture_error_mode="thread_local"):
                run_step()
        except BaseException:
            torch.cuda.set_stream(current_stream)
            random_generator.graphsafe_set_state(generator_state)
            torch_.leave_capture_pool(device_index, memory_pool)
            raise
        return cuda_graph.replay

    def _continue_without_graphs(self, error_by_rank: list[str]) -> None:
        """Disable graphs after a failed capture, so that all later steps run eagerly.

        The method discards the captured gradients, which were never computed, and the state that the capture
        left in DDP or FSDP2. This method is collective.

        Args:
            error_by_rank: Each rank's error message, or "" if the capture succeeded on the rank.
        """
        self.accelerator.step_graph = False
        self.free_shape_graphs()
        gc.collect()  # frees graphs and tensors that reference cycles keep alive
        for parameter_group in self.parameter_groups:
            for parameter in parameter_group["params"]:
                parameter.grad = None
        failed_rank = next(rank for rank, error_text in enumerate(error_by_rank) if error_text)
        failure_location = f" on rank {failed_rank}" if len(error_by_rank) > 1 else ""
        self.accelerator.print(
            f"the step can't be captured as a CUDA graph{failure_location} ({error_by_rank[failed_rank]})."
            " Training continues without CUDA graphs."
        )
        if isinstance(self.model, nn.parallel.DistributedDataParallel):
            torch_.reset_reducer(self.model)
        elif strategy(self.accelerator) == "fsdp":
            torch_.reset_fsdp_state(self.model)

    def _record_forward(self, *_) -> None:
        """Record that a forward pass outside a graph may have gathered FSDP2 parameters."""
        self.has_gathered_parameters = True

    def _reshard(self) -> None:
        """Reshard FSDP2 parameters that are still gathered after a forward pass without a backward pass.

        Without this call, a capture after an evaluation would not record the all-gather of these parameters,
        and the next evaluation would use outdated parameters.
        """
        if self.has_gathered_parameters:
            for module in self.model.modules():
                if hasattr(module, "reshard"):
                    module.reshard()
            self.has_gathered_parameters = False


def _capture_error_text(error: Exception) -> str:
    """Return the first line of the error that caused a capture to fail, or the name of its type."""
    cause = error.__context__ or error  # torch's error about an invalid capture hides the cause
    return str(cause).partition("\n")[0] or type(cause).__name__


def _queued_work_query() -> Callable[[], bool]:
    """Return a function that reports whether the device has finished all work queued before this call."""
    queued_work_event = torch.cuda.Event()
    queued_work_event.record()
    return queued_work_event.query


def _reserved_bytes_without_cache() -> int:
    """Empty the CUDA allocator's cache, and return the device memory that is still reserved, in bytes."""
    torch.cuda.empty_cache()  # a capture also empties the cache
    return torch.cuda.memory_reserved()


def _check_memory_for_evaluations(reserved_bytes_before: int) -> None:
    """Raise MemoryError if the graphs' memory leaves too little for evaluations.

    `reserved_bytes_before` is the memory that the process had reserved before the capture.
    """
    graph_bytes = torch.cuda.memory_reserved() - reserved_bytes_before
    free_bytes, _ = torch.cuda.mem_get_info()
    if free_bytes < SPARE_MEMORY_FRACTION * graph_bytes:
        raise MemoryError(
            f"CUDA graphs use {graph_bytes / 2**30:.1f} GiB and leave too little GPU memory for evaluations"
        )
