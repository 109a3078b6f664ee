"""A whole optimizer step as one CUDA graph: the host launches it once instead of each of its kernels.

Replays read and write the memory that the capture saw. So what changes from step to step comes in as a
tensor, in the same place: inputs, labels, learning rates; the seed, which torch gives a graph before each
replay. And what a step leaves for the next one stays where it is: it is changed in place, never replaced.
"""

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass

import torch
from accelerate import Accelerator
from accelerate.optimizer import AcceleratedOptimizer
from torch import Tensor

from common.distributed.layout import owner
from common.distributed.strategy import precision, strategy

WARM_UP_STEPS = 3  # of each shape: compilation, cuDNN's autotuning, and the optimizer's state
SPARE = 0.5  # of a graph's memory: as much must be left, for evaluations, which can't use the graph's

Step = Callable[[Tensor, Tensor], Tensor]  # (inputs, labels) -> loss, with the optimizer's step


def chosen_step_graph(accelerator: Accelerator, wanted: bool | None) -> bool:
    """If steps become graphs. wanted: the flag; None takes them where they are possible, on a GPU.

    Raises ValueError where they are wanted, and not possible: fp16's scaler decides on the host, checkpointed
    blocks read the generator's state there, and other modes of --compile have graphs of their own.
    """
    fits = strategy(accelerator) == "single" and accelerator.gradient_accumulation_steps == 1
    fits &= not accelerator.grad_checkpointing and precision(accelerator) != "fp16"
    fits &= str(accelerator.compilation) in ("no", "default")
    if wanted and not fits:
        raise ValueError(
            "--step_graph is for one process without accumulation, --grad_checkpointing, fp16, and --compile"
            " other than default: leave it out"
        )
    return fits and accelerator.device.type == "cuda" if wanted is None else wanted


def step_graph(accelerator: Accelerator, optimizer: AcceleratedOptimizer) -> Callable[[Step], Step]:
    """Decorates a step, which becomes a StepGraph if the flags and the device say so. Use it after Run.begin.

    The step must launch the same kernels each time, and read no number of the host but the learning rates: of
    optimizers torch's own do, which are `capturable`, and fused SGD. With others, as Lookahead around one of
    them, the step stays as it is.
    """
    inner = optimizer.optimizer
    counts = any("capturable" not in group for group in inner.param_groups) or owner(inner) is not inner
    is_fused = accelerator.device.type == "cpu" or all(group.get("fused") for group in inner.param_groups)
    if accelerator.step_graph and counts and not (type(inner) is torch.optim.SGD and is_fused):
        name = type(inner).__name__
        accelerator.print(f"the step is no CUDA graph: {name} may read its numbers on the host")
        accelerator.step_graph = False
    return lambda step: StepGraph(accelerator, optimizer, step) if accelerator.step_graph else step


def make_capturable(optimizer: torch.optim.Optimizer) -> None:
    """Has the optimizer count its steps on the device, also those that a checkpoint had on the CPU."""
    for group in optimizer.param_groups:
        if "capturable" in group:
            group["capturable"] = True
            for p in group["params"]:
                state = optimizer.state.get(p, {})
                counts = {n: v for n, v in state.items() if isinstance(v, Tensor) and not v.ndim}
                state |= {name: count.to(p.device) for name, count in counts.items()}


@dataclass
class Buffers:
    """The tensors that the graph of one shape reads, and its loss."""

    inputs: Tensor
    labels: Tensor
    steps: int = 0
    loss: Tensor | None = None
    replay: Callable[[], None] | None = None


class StepGraph:
    """Calls the step for the first WARM_UP_STEPS of each shape, then captures it, and then replays it.

    A step that can't be captured is called as it is from then on. On a CPU every step is called, on the same
    buffers.
    """

    def __init__(self, accelerator: Accelerator, optimizer: AcceleratedOptimizer, step: Step):
        self.accelerator, self.step, self.groups = accelerator, step, optimizer.param_groups
        self.on_gpu = accelerator.device.type == "cuda"
        # A fused optimizer's on a GPU; else as exact as now
        kind = torch.float32 if self.on_gpu else torch.float64
        self.rates = [torch.zeros((), dtype=kind, device=accelerator.device) for _ in self.groups]
        if self.on_gpu:
            make_capturable(optimizer.optimizer)
        self.stream = torch.cuda.Stream() if self.on_gpu else None
        self.buffers: Buffers | None = None  # of one shape: --train_sizes has each size once

    def __call__(self, inputs: Tensor, labels: Tensor) -> Tensor:
        """The loss, valid until the next call."""
        if not self.accelerator.step_graph:
            return self.step(inputs, labels)
        if self.buffers is None or self.buffers.inputs.shape != inputs.shape:
            self.buffers = None  # before the next, as its graph holds memory
            self.buffers = Buffers(torch.empty_like(inputs), torch.empty_like(labels))
        buffers = self.buffers
        buffers.inputs.copy_(inputs)
        buffers.labels.copy_(labels)
        for rate, group in zip(self.rates, self.groups, strict=True):
            rate.fill_(group["lr"])
        if buffers.steps == WARM_UP_STEPS:
            try:
                buffers.replay = self.capture(lambda: self._run(buffers))
            except Exception as error:
                self._give_up(error)
            if not self.accelerator.step_graph:  # not above, where the error's traceback holds the memory
                gc.collect()
                return self.step(inputs, labels)
        buffers.steps += 1
        if buffers.replay:
            buffers.replay()
        else:
            with self._aside():
                self._run(buffers)
        assert buffers.loss is not None
        return buffers.loss

    def _run(self, buffers: Buffers) -> None:
        """The step itself. The loss is detached, as its autograd graph would live on into the capture."""
        numbers = [group["lr"] for group in self.groups]
        for group, rate in zip(self.groups, self.rates, strict=True):
            if self.on_gpu or not group.get("foreach"):  # these, on a CPU, take no tensor
                group["lr"] = rate
        try:
            buffers.loss = self.step(buffers.inputs, buffers.labels).detach()
        finally:
            for group, number in zip(self.groups, numbers, strict=True):
                group["lr"] = number

    def capture(self, run: Callable[[], None]) -> Callable[[], None]:
        """Records what run() launches, without computing it. Returns what replays it.

        Raises what the capture does, and MemoryError if the graph leaves too little. The process is then as
        before: torch leaves the stream, the generator and the allocator in the state of a capture (pytorch
        #180395, #190348).
        """
        if not self.on_gpu:
            return run
        graph, pool = torch.cuda.CUDAGraph(), torch.cuda.graph_pool_handle()
        device, stream = torch.cuda.current_device(), torch.cuda.current_stream()
        generator = torch.cuda.default_generators[device]
        state = generator.clone_state()
        try:
            # Other threads, which write checkpoints and sample, may call CUDA meanwhile.
            with torch.cuda.graph(graph, pool, self.stream, capture_error_mode="thread_local"):
                before = torch.cuda.memory_reserved()
                run()
        except BaseException:
            torch.cuda.set_stream(stream)
            generator.graphsafe_set_state(state)
            with suppress(RuntimeError):  # it has ended already
                torch._C._cuda_endAllocateToPool(device, pool)
                torch._C._cuda_releasePool(device, pool)
            raise
        if torch.cuda.mem_get_info()[0] < SPARE * (held := torch.cuda.memory_reserved() - before):
            raise MemoryError(f"its {held / 2**30:.1f} GiB leave too little for evaluations")
        return graph.replay

    def _give_up(self, error: Exception) -> None:
        """Leaves the graphs, and the gradients of the capture, which were never computed."""
        self.accelerator.step_graph = False
        self.buffers = None
        for group in self.groups:
            for parameter in group["params"]:
                parameter.grad = None
        cause = error.__context__ or error  # torch's own error about the broken capture hides the first one
        why = str(cause).partition("\n")[0] or type(cause).__name__
        self.accelerator.print(
            f"the step can't be one CUDA graph ({why}): its kernels are launched one by one"
        )

    @contextmanager
    def _aside(self) -> Iterator[None]:
        """Runs on the stream of the capture, after and before what else is queued: autograd keeps streams."""
        if self.stream:
            self.stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self.stream) if self.stream else nullcontext():
            yield
        if self.stream:
            torch.cuda.current_stream().wait_stream(self.stream)
