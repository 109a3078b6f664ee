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

from onecurve.distributed.channel import Poll
from onecurve.distributed.job_accelerator import JobAccelerator
from onecurve.distributed.layout import base_of
from onecurve.distributed.rendezvous import backend
from onecurve.distributed.strategy import precision, sharding, strategy
from onecurve.distributed.watch import watch
from onecurve.system.phase import GRAPH_CAPTURE, GRAPH_WARM_UP, Replay, now, spending
from onecurve.upstream import torch_

# Number of warm-up steps before each input shape is captured. During warm-up, torch compiles code, tunes
# cuDNN and creates the optimizer's state. DDP rebuilds its buckets after the first step, and times the first
# ten steps.
WARM_UP_STEPS = {"single": 3, "ddp": 11, "fsdp": 3}
SPARE_MEMORY = 0.5  # minimum free memory for evaluations, as a fraction of the memory reserved by the graphs
# Optimizers that can read learning rates on the device
CAPTURABLE_OPTIMIZERS = (torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW)

StepFunction = Callable[[Tensor, Tensor], Tensor]  # (inputs, labels) -> loss, including the optimizer's step


def chosen_step_graph(accelerator: JobAccelerator, flag: bool | None) -> bool:
    """Return True if steps run as CUDA graphs.

    Args:
        accelerator: The started Accelerator.
        flag: Value of --step_graph. None uses graphs on a GPU if possible, and otherwise prints the reason.

    Raises:
        ValueError: If the flag is set, but graphs are not possible.
    """
    problem = capture_obstacle(accelerator)
    if flag and problem:
        raise ValueError(f"--step_graph: {problem}. Remove --step_graph.")
    is_on = accelerator.device.type == "cuda" if flag is None else flag
    if is_on and problem:
        accelerator.print(f"steps run without CUDA graphs: {problem}")
    return is_on and not problem


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

    Call this function before the process group is created.
    """
    settings = [os.environ.get(name, "") for name in ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")]
    if any("expandable_segments:True" in setting for setting in settings):
        os.environ.setdefault("NCCL_GRAPH_REGISTER", "0")


def step_graph(
    accelerator: JobAccelerator, optimizer: AcceleratedOptimizer
) -> Callable[[StepFunction], StepFunction]:
    """Return a decorator that replaces a micro-batch's step with a StepGraph, if graphs are enabled.

    Call this function after Run.begin. The step must launch the same kernels in every call, and must not
    depend on host values other than learning rates. Fused SGD, Adam and AdamW can read learning rates on the
    device, with bitwise identical results. With any other optimizer, the decorator returns the step
    unchanged.
    """
    torch_optimizer = optimizer.optimizer
    if accelerator.step_graph and not _reads_on_device(accelerator, torch_optimizer):
        name = type(torch_optimizer).__name__
        accelerator.print(f"steps run without CUDA graphs: {name} may read its settings on the host")
        accelerator.step_graph = False
    return lambda step: StepGraph(accelerator, optimizer, step) if accelerator.step_graph else step


def _reads_on_device(accelerator: JobAccelerator, optimizer: torch.optim.Optimizer) -> bool:
    is_fused = accelerator.device.type == "cpu" or all(group.get("fused") for group in optimizer.param_groups)
    # PyTorch's SGD is never fused under FSDP2
    is_sharded_sgd = type(optimizer) is torch.optim.SGD and strategy(accelerator) == "fsdp"
    return (
        type(optimizer) in CAPTURABLE_OPTIMIZERS
        and base_of(optimizer) is optimizer
        and is_fused
        and not is_sharded_sgd
    )


def make_capturable(optimizer: torch.optim.Optimizer) -> None:
    """Make the optimizer count steps on the device.

    Step counts loaded from a checkpoint are moved to the device.
    """
    for group in optimizer.param_groups:
        if "capturable" in group:
            group["capturable"] = True
            for parameter in group["params"]:
                parameter_state = optimizer.state.get(parameter, {})
                for name, value in list(parameter_state.items()):
                    if isinstance(value, Tensor) and not value.ndim:
                        parameter_state[name] = value.to(parameter.device)


@contextmanager
def on_step_stream(accelerator: JobAccelerator) -> Iterator[None]:
    """Run the block on the capture stream, synchronised with the current stream on entry and exit.

    Autograd and DDP use the stream on which a gradient's accumulator was created. Therefore, the model must
    also be wrapped on the capture stream (Megatron-LM #6021).
    """
    stream = accelerator.step_stream
    if stream is None:
        yield
        return
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        yield
    torch.cuda.current_stream().wait_stream(stream)


def free_graphs() -> None:
    """Free all graphs, because a process group can't be destroyed while a graph contains its collectives.

    See pytorch #115388.
    """
    for graph in list(_live_step_graphs):
        graph.free()


_live_step_graphs: "WeakSet[StepGraph]" = WeakSet()


@dataclass
class GraphPart:
    """One of a step's graphs, and the loss that it computes."""

    replay: Callable[[], None] | None = None
    loss: Tensor | None = None


@dataclass
class CapturedShape:
    """Graphs for one input shape, and their input tensors.

    `parts` contains the graphs of the first, middle and last micro-batch. A step with fewer than three
    micro-batches has fewer graphs. The list is empty before the capture.
    """

    inputs: Tensor
    labels: Tensor
    steps: int = 0
    parts: list[GraphPart] = field(default_factory=list)


class StepGraph:
    """Training step that runs eagerly during each input shape's warm-up and as CUDA graphs afterwards.

    If the capture fails on any rank, all ranks call the original step from then on. On a CPU, every call runs
    the original step, with the same buffers as on a GPU. The constructor is collective.
    """

    def __init__(self, accelerator: JobAccelerator, optimizer: AcceleratedOptimizer, step: StepFunction):
        self.accelerator, self.step, self.groups = accelerator, step, optimizer.param_groups
        self.on_gpu = accelerator.device.type == "cuda"
        # On a GPU, fused optimizers require fp32 learning rates. On a CPU, float64 is as precise as a Python
        # float.
        dtype = torch.float32 if self.on_gpu else torch.float64
        self.device_rates = [torch.zeros((), dtype=dtype, device=accelerator.device) for _ in self.groups]
        if self.on_gpu:
            make_capturable(optimizer.optimizer)
        self.micro_batches = accelerator.gradient_accumulation_steps
        self.warm_up_steps = WARM_UP_STEPS[strategy(accelerator)]
        # Current input shape; with --train_sizes, each size is used once
        self.shape: CapturedShape | None = None
        self.replay_count = 0
        self.poll = Poll(watch.timeout_s)
        self.model = cast("Any", accelerator.prepared)
        self.has_gathered = False  # True if FSDP2's modules may contain gathered parameters
        if strategy(accelerator) == "fsdp":
            self.model.register_forward_hook(self._record_forward)
        elif isinstance(self.model, nn.parallel.DistributedDataParallel):
            torch_.stop_timing(self.model)
        _live_step_graphs.add(self)

    def __call__(self, inputs: Tensor, labels: Tensor) -> Tensor:
        """Run the step and return the micro-batch's loss, which is valid until the next call."""
        micro_batch = self.accelerator.step % self.micro_batches
        if self.accelerator.step_graph and micro_batch == 0:
            self._begin_step(inputs, labels)
        if not self.accelerator.step_graph:
            with on_step_stream(self.accelerator):
                return self.step(inputs, labels)
        assert self.shape
        self.shape.inputs.copy_(inputs)
        self.shape.labels.copy_(labels)
        for rate, group in zip(self.device_rates, self.groups, strict=True):
            rate.fill_(group["lr"])
        if self.shape.parts:
            is_last = micro_batch == self.micro_batches - 1
            part = self.shape.parts[-1 if is_last else min(micro_batch, 1)]
            self._replay(part)
        else:
            part = GraphPart()
            with spending(GRAPH_WARM_UP), on_step_stream(self.accelerator):
                self._run_step(self.shape, part)
        assert part.loss is not None
        return part.loss

    def free(self) -> None:
        """Free the graphs and their memory."""
        self.shape = None

    def _begin_step(self, inputs: Tensor, labels: Tensor) -> None:
        """Create the buffers for a new input shape. After the warm-up, capture the step."""
        if self.shape is None or self.shape.inputs.shape != inputs.shape:
            self.free()  # free the memory used by the previous shape's graphs
            self.shape = CapturedShape(torch.empty_like(inputs), torch.empty_like(labels))
        self.shape.steps += 1
        if self.shape.steps > self.warm_up_steps and not self.shape.parts:
            with spending(GRAPH_CAPTURE):
                self._capture_step(self.shape)

    def _run_step(self, shape: CapturedShape, part: GraphPart) -> None:
        """Call the original step with learning rates on the device.

        The loss is detached, because its autograd graph would otherwise still exist during the capture.
        """
        learning_rates = [group["lr"] for group in self.groups]
        for group, device_rate in zip(self.groups, self.device_rates, strict=True):
            if self.on_gpu or not group.get("foreach"):  # foreach optimizers on a CPU do not accept a tensor
                group["lr"] = device_rate
        try:
            part.loss = self.step(shape.inputs, shape.labels).detach()
        finally:
            for group, learning_rate in zip(self.groups, learning_rates, strict=True):
                group["lr"] = learning_rate

    def _replay(self, part: GraphPart) -> None:
        """Replay a graph, and make Accelerate count the replay as one micro-batch.

        The watch detects hanging replays.
        """
        self._reshard()
        self.replay_count += 1
        step = self.accelerator.step
        pending = now.replay if now.replay and not now.replay.is_done() else None
        now.replay = replay = pending or Replay(self.replay_count)
        replay.launched = self.replay_count
        assert part.replay
        part.replay()
        if not pending:
            replay.ended = _queued_work_query() if self.on_gpu else lambda: True
        self.accelerator.step = step + 1

    def _capture_step(self, shape: CapturedShape) -> None:
        """Capture the step's graphs. If the capture fails on any rank, disable graphs on all ranks.

        This method is collective.
        """
        step, exact_sum = self.accelerator.step, self.accelerator.exact_sum
        parts, problem, memory_pool = [], "", torch.cuda.graph_pool_handle() if self.on_gpu else None
        self._reshard()
        with exact_sum.uncounted() if exact_sum else nullcontext():
            try:
                bytes_before = _reserved_bytes() if self.on_gpu else 0
                for micro_batch in sorted({0, min(1, self.micro_batches - 1), self.micro_batches - 1}):
                    self.accelerator.step = step + micro_batch
                    parts.append(part := GraphPart())
                    part.replay = self.capture(partial(self._run_step, shape, part), memory_pool)
                if self.on_gpu:
                    _check_memory(bytes_before)
            except Exception as error:
                problem = _capture_failure(error)
        self.accelerator.step = step
        problems = self.poll.gather(problem)
        if any(problems):
            parts.clear()
            self._continue_without_graphs(problems)
        shape.parts = parts

    def capture(self, run_step: Callable[[], None], memory_pool: Any) -> Callable[[], None]:
        """Record the kernels that run() launches, without executing them.

        If the capture fails, this method restores the process's state and raises the error. torch alone would
        leave the stream, the random generator and the allocator in capture mode (pytorch #180395, #190348).

        Returns:
            A function that replays the recorded kernels.
        """
        if not self.on_gpu:
            return run_step
        graph = torch.cuda.CUDAGraph()
        device, stream = torch.cuda.current_device(), torch.cuda.current_stream()
        generator = torch.cuda.default_generators[device]
        generator_state = generator.clone_state()
        try:
            # "thread_local" allows CUDA calls during the capture by threads that write checkpoints or measure
            # usage.
            stream_of_steps = self.accelerator.step_stream
            with torch.cuda.graph(graph, memory_pool, stream_of_steps, capture_error_mode="thread_local"):
                run_step()
        except BaseException:
            torch.cuda.set_stream(stream)
            generator.graphsafe_set_state(generator_state)
            torch_.leave_pool(device, memory_pool)
            raise
        return graph.replay

    def _continue_without_graphs(self, problems: list[str]) -> None:
        """Disable graphs, and discard the captured gradients, which were never computed.

        This method is collective.

        Args:
            problems: Each rank's error message, or "" if the capture succeeded on the rank.
        """
        self.accelerator.step_graph = False
        self.free()
        gc.collect()
        for group in self.groups:
            for parameter in group["params"]:
                parameter.grad = None
        rank = next(rank for rank, problem in enumerate(problems) if problem)
        location = f" on rank {rank}" * (len(problems) > 1)
        self.accelerator.print(
            f"the step can't be captured as a CUDA graph{location} ({problems[rank]}). Training continues"
            " without CUDA graphs."
        )
        if isinstance(self.model, nn.parallel.DistributedDataParallel):
            torch_.reset_reducer(self.model)
        elif strategy(self.accelerator) == "fsdp":
            _reset_shards(self.model)

    def _record_forward(self, *_) -> None:
        """Record that a forward pass outside a graph may have gathered parameters."""
        self.has_gathered = True

    def _reshard(self) -> None:
        """Reshard FSDP2 parameters that are still gathered after a forward pass without a backward pass.

        Without this call, a capture after an evaluation would not record the all-gather of these parameters,
        and the next evaluation would use outdated parameters.
        """
        if self.has_gathered:
            for module in self.model.modules():
                if hasattr(module, "reshard"):
                    module.reshard()
            self.has_gathered = False


def _reset_shards(model: Any) -> None:
    """Reset FSDP2's state after a failed capture.

    Raises:
        ValueError: If this version of torch can't reset FSDP2's state.
    """
    if not torch_.can_reset_shards(model):
        raise ValueError(
            f"torch {torch.__version__} can't continue training with FSDP2 after a failed CUDA graph capture."
            " Run the same command with --no_step_graph."
        )
    torch_.reset_shards(model)


def _capture_failure(error: Exception) -> str:
    """Return the first line of the error that caused a capture to fail."""
    cause = error.__context__ or error  # torch's error about an invalid capture hides the cause
    return str(cause).partition("\n")[0] or type(cause).__name__


def _queued_work_query() -> Callable[[], bool]:
    """Return a function that reports whether the device has finished all work queued before this call."""
    event = torch.cuda.Event()
    event.record()
    return event.query


def _reserved_bytes() -> int:
    """Empty the allocator's cache, and return the reserved device memory in bytes."""
    torch.cuda.empty_cache()  # a capture also empties the cache
    return torch.cuda.memory_reserved()


def _check_memory(bytes_before: int) -> None:
    """Raise MemoryError if the memory reserved since `before` leaves too little for evaluations."""
    graph_bytes = torch.cuda.memory_reserved() - bytes_before
    if torch.cuda.mem_get_info()[0] < SPARE_MEMORY * graph_bytes:
        raise MemoryError(
            f"CUDA graphs use {graph_bytes / 2**30:.1f} GiB and leave too little GPU memory for evaluations"
        )
