"""Watches some steps of a train script's own loop, and prints one line of JSON.

    python -m benchmarks.gpu.probe speed --steps 50 train_cnn_a.py --data synthetic
    python -m benchmarks.gpu.probe waits --steps 20 train_vit.py --data synthetic

speed    images_per_s; with --resident on one batch that stays on the device
profile  launches of a step, and the share of the time in which the GPU was busy
waits    calls that wait for the GPU, a step, and from where they come (torch.cuda.set_sync_debug_mode)
"""

import argparse
import contextlib
import io
import json
import os
import sys
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from common.distributed.accelerator import start
from common.recipe import parse
from common.run.run import Run
from common.script import load_script, recipe_class
from common.system.cli import split_at_script

WARMUP = 10  # steps


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu.probe", allow_abbrev=False)
    parser.add_argument("what", choices=tuple(WATCHES))
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--resident", action="store_true")
    own, words = split_at_script(sys.argv[1:])
    flags = parser.parse_args(own)
    script = load_script(Path(words[0]).resolve())
    sys.argv = words
    watch = WATCHES[flags.what](flags.steps)
    output = sys.stdout

    class WatchedRun(Run):
        """Begins to watch after the warm-up, and ends the process after so many steps."""

        def add(self, loss: Tensor, ids: np.ndarray) -> None:
            super().add(loss, ids)
            if self.meter.micro_batches % self.batch.accumulations:
                return
            step = self.meter.micro_batches // self.batch.accumulations
            if step == WARMUP:
                wait()
                watch.begin()
            elif step == WARMUP + flags.steps:
                print(json.dumps(watch.end(self.batch.total)), file=output, flush=True)
                os._exit(0)

    script.Run, script.evaluate = WatchedRun, lambda *_, **__: {}
    if flags.resident:
        script.training_batches = resident(script.training_batches)
    with contextlib.redirect_stdout(io.StringIO()):
        recipe = parse(recipe_class(script))
        script.main.__wrapped__(recipe, *start(recipe, clip_norm=recipe.clip_norm))
    sys.exit(f"the training ended before {WARMUP + flags.steps} steps")


def resident(real: Callable[..., Iterator[tuple]]) -> Callable[..., Iterator[tuple]]:
    """The script's training_batches, which repeats its first batch: no data, no augmentation."""

    def batches(*words: Any) -> Iterator[tuple]:
        first = next(real(*words))
        while True:
            yield first

    return batches


def wait() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


class Speed:
    def __init__(self, steps: int):
        self.steps = steps

    def begin(self) -> None:
        self.began = time.perf_counter()

    def end(self, images: int) -> dict[str, Any]:
        wait()
        seconds = time.perf_counter() - self.began
        return {"images_per_s": self.steps * images / seconds, "step_ms": 1e3 * seconds / self.steps}


class Profile(Speed):
    def begin(self) -> None:
        self.profiler = torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA])
        self.profiler.__enter__()
        super().begin()

    def end(self, images: int) -> dict[str, Any]:
        found = super().end(images)
        self.profiler.__exit__(None, None, None)
        events = [e for e in self.profiler.events() if e.device_type == torch.autograd.DeviceType.CUDA]
        kernels = [e for e in events if not e.is_user_annotation]  # these span kernels, such as a whole step
        busy_ms = sum(kernel.device_time for kernel in kernels) / 1e3 / self.steps
        return found | {"launches": len(kernels) / self.steps, "busy_share": busy_ms / found["step_ms"]}


class Waits(Speed):
    def begin(self) -> None:
        self.caught = warnings.catch_warnings(record=True)
        self.warnings = self.caught.__enter__()
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        super().begin()

    def end(self, images: int) -> dict[str, Any]:
        torch.cuda.set_sync_debug_mode("default")
        self.caught.__exit__(None, None, None)
        waits = [w for w in self.warnings or () if "synchroniz" in str(w.message)]
        places = Counter(f"{Path(w.filename).name}:{w.lineno}" for w in waits)
        return {"waits": len(waits) / self.steps, "places": dict(places.most_common(5))}


WATCHES: dict[str, Callable[[int], Speed]] = {"speed": Speed, "profile": Profile, "waits": Waits}

if __name__ == "__main__":
    main()
