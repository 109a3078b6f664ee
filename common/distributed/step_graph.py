"""A whole optimizer step as one CUDA graph: the host launches it once instead of each of its kernels."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass

import torch
from accelerate import Accelerator
from accelerate.optimizer import AcceleratedOptimizer
from torch import Tensor

from common.distributed.strategy import precision, strategy

WARM_UP_STEPS = 3  # of each shape: cuDNN's autotuning, and the optimizer's state

Step = Callable[[Tensor, Tensor], Tensor]  # (inputs, labels) -> loss, with the optimizer's step


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

    The step must launch the same kernels each time, and read no number of the host but the learning rates,
    which it gets as tensors. On a CPU every step is called, on the same buffers. Create it after Run.begin.
    Raises ValueError for several processes, accumulation, compiled or checkpointed blocks, and fp16, whose
    scaler decides on the host.
    """

    def __init__(self, accelerator: Accelerator, optimizer: AcceleratedOptimizer, step: Step):
        _check(accelerator)
        self.step, self.groups = step, optimizer.param_groups
        self.on_gpu = accelerator.device.type == "cuda"
        # A fused optimizer's on a GPU; else as exact as now
        kind = torch.float32 if self.on_gpu else torch.float64
        self.rates = [torch.zeros((), dtype=kind, device=accelerator.device) for _ in self.groups]
        for group in self.groups if self.on_gpu else ():
            if "capturable" in group:
                group["capturable"] = True
        self.stream = torch.cuda.Stream() if self.on_gpu else None
        self.shapes: dict[torch.Size, Buffers] = {}

    def __call__(self, inputs: Tensor, labels: Tensor) -> Tensor:
        """The loss, valid until the next call."""
        if inputs.shape not in self.shapes:
            self.shapes[inputs.shape] = Buffers(torch.empty_like(inputs), torch.empty_like(labels))
        buffers = self.shapes[inputs.shape]
        buffers.inputs.copy_(inputs)
        buffers.labels.copy_(labels)
        for rate, group in zip(self.rates, self.groups, strict=True):
            rate.fill_(group["lr"])
        if buffers.steps == WARM_UP_STEPS:
            buffers.replay = self._captured(buffers)
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
            group["lr"] = rate
        try:
            buffers.loss = self.step(buffers.inputs, buffers.labels).detach()
        finally:
            for group, number in zip(self.groups, numbers, strict=True):
                group["lr"] = number

    def _captured(self, buffers: Buffers) -> Callable[[], None]:
        if not self.on_gpu:
            return lambda: self._run(buffers)
        graph = torch.cuda.CUDAGraph()
        # Other threads, which write checkpoints and sample, may call CUDA meanwhile.
        with torch.cuda.graph(graph, stream=self.stream, capture_error_mode="thread_local"):
            self._run(buffers)
        return graph.replay

    @contextmanager
    def _aside(self) -> Iterator[None]:
        """Runs on the stream of the capture, after and before what else is queued: autograd keeps streams."""
        if self.stream:
            self.stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self.stream) if self.stream else nullcontext():
            yield
        if self.stream:
            torch.cuda.current_stream().wait_stream(self.stream)


def _check(accelerator: Accelerator) -> None:
    fits = strategy(accelerator) == "single" and accelerator.gradient_accumulation_steps == 1
    plain = not accelerator.compilation and not accelerator.grad_checkpointing
    if not (fits and plain and precision(accelerator) != "fp16"):
        raise ValueError(
            "--step_graph is for one process without accumulation, --compile, --grad_checkpointing and fp16:"
            " leave it out"
        )
