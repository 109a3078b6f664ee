"""--profile: torch.profiler over three optimizer steps of the main process.

The other processes are not profiled: they run at their own speed, and under gloo several profilers at once
have crashed a job. profile/ in the run's folder gets a trace for https://ui.perfetto.dev, a summary, and on
a GPU the allocator's history, all as JSON.
"""

import gzip
import json
from collections.abc import Callable, Iterator
from concurrent import futures
from pathlib import Path
from typing import Any, TypeVar

import torch
from accelerate import Accelerator
from accelerate.optimizer import AcceleratedOptimizer
from torch import nn
from torch.profiler import ProfilerActivity, profile, record_function

from common.system.files import write_json
from common.system.threads import Heartbeat, start_daemon
from common.telemetry.trace import FOLDER, PART, STEP, SUMMARY, TRACE, step_time

STEPS = 3  # that are profiled
DEAREST = 10  # operators in the summary
MEMORY = "memory.json.gz"
HISTORY = 100_000  # the last events of the allocator that are kept

Item = TypeVar("Item")


class Profile:
    """Profiles the optimizer steps first, first + 1 and first + 2, counted from 1, and writes profile/.

    Records which part of a step the main thread is in. The caller iterates over watch(batches), and calls
    end_step() after each step.
    """

    def __init__(
        self,
        accelerator: Accelerator,
        model: nn.Module,
        optimizer: AcceleratedOptimizer,
        first: int,
        folder: Path,
    ):
        self.device, self.first, self.folder = accelerator.device, first, folder / FOLDER
        # (object, method, the step's part during the call, and the part after it)
        self.watched: list[tuple[Any, str, str, str]] = [(accelerator, "backward", "backward", "optimizer")]
        self.watched += [(optimizer, "step", "optimizer", "host")]
        if hasattr(model, "zero_optimization"):  # DeepSpeed's engine: accelerator.backward() calls its step()
            self.watched += [(model, "step", "optimizer", "optimizer")]
        self.profiler: profile | None = None
        self.step: record_function | None = None  # the open ranges
        self.part: record_function | None = None
        self.last_step = 0  # that has ended
        self.writing: futures.Future[None] | None = None

    def begin(self, step: int) -> None:
        """Starts the profiler when the next step is the first one. step: the number of steps that ended."""
        self.last_step = step
        if step != self.first - 1:
            return
        on_gpu = self.device.type == "cuda"
        if on_gpu:
            torch.cuda.synchronize()
            torch.cuda.memory._record_memory_history(max_entries=HISTORY, stacks="python")
        for owner, method, part, after in self.watched:
            setattr(owner, method, self._watching(getattr(owner, method), part, after))
        self.profiler = profile(
            activities=[ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if on_gpu else [])]
        )
        self.profiler.start()

    def watch(self, batches: Iterator[Item]) -> Iterator[Item]:
        """Yields the batches. From a batch on the step's part is `forward`, until the backward pass."""
        while True:
            self._enter("data")
            try:
                item = next(batches)
            except StopIteration:
                return
            self._enter("forward")
            yield item

    def end_step(self, step: int) -> None:
        """Ends the step's range, and after the last one the profile. Before anything is logged."""
        self._leave()
        if self.profiler and step == self.first + STEPS - 1:
            self._end(self.profiler)
            self.profiler = None
        self.begin(step)

    def wait(self, beat: Heartbeat) -> None:
        """Waits until the files are written."""
        while self.writing and futures.wait([self.writing], 0.5).not_done:
            beat()

    def _end(self, profiler: profile) -> None:
        for owner, method, _, _ in self.watched:
            delattr(owner, method)  # the class's own is behind it
        memory = None
        if self.device.type == "cuda":
            torch.cuda.synchronize()
            memory = torch.cuda.memory._snapshot()
            torch.cuda.memory._record_memory_history(enabled=None)
        profiler.stop()
        self.writing = start_daemon(lambda: self._write(profiler, memory))

    def _watching(self, call: Callable[..., Any], part: str, after: str) -> Callable[..., Any]:
        """The same function, during which the step's part is `part`, and afterwards `after`."""

        def watched(*args: Any, **kwargs: Any) -> Any:
            self._enter(part)
            result = call(*args, **kwargs)
            self._enter(after)
            return result

        return watched

    def _enter(self, part: str) -> None:
        if self.profiler is None:
            return
        if self.step is None:
            self.step = record_function(f"{STEP}{self.last_step + 1}")
            self.step.__enter__()
        if self.part:
            self.part.__exit__(None, None, None)
        self.part = record_function(PART + part)
        self.part.__enter__()

    def _leave(self) -> None:
        for part in (self.part, self.step):
            if part:
                part.__exit__(None, None, None)
        self.part = self.step = None

    def _write(self, profiler: profile, memory: dict[str, Any] | None) -> None:
        """Writes the files, the summary last. A profile that can't be written is said, and ends nothing."""
        try:
            self.folder.mkdir(exist_ok=True)
            trace = self.folder / TRACE
            profiler.export_chrome_trace(str(trace))
            if memory is not None:
                write_snapshot(self.folder / MEMORY, memory)
            with gzip.open(trace) as file:
                found = step_time(json.load(file)["traceEvents"])
            about = {"first_step": self.first, "steps": STEPS, "device": self.device.type}
            write_json(self.folder / SUMMARY, about | vars(found) | {"operators": _dearest(profiler)})
            last = self.first + STEPS - 1
            print(f"profile of steps {self.first:,} to {last:,}: {trace} (for https://ui.perfetto.dev)")
        except Exception as error:  # of many kinds: of the disk, of the profiler
            print(f"no profile: {type(error).__name__}: {error}", flush=True)


def write_snapshot(file: Path, snapshot: dict[str, Any]) -> None:
    """Writes what torch.cuda.memory._snapshot() returns as JSON. torch's own dump is a pickle."""
    with gzip.open(file, "wt") as out:
        json.dump(snapshot, out, default=str)


def _dearest(profiler: profile) -> list[dict[str, Any]]:
    """The operators with the most time of their own, on the device where there is one."""
    averages = [op for op in profiler.key_averages() if not op.is_user_annotation]
    kind = "device" if any(op.self_device_time_total for op in averages) else "cpu"
    found = [
        {"name": op.key, "calls": op.count, "self_s": getattr(op, f"self_{kind}_time_total") / 1e6}
        for op in averages
    ]
    return sorted(found, key=lambda op: -op["self_s"])[:DEAREST]
