"""Watches a train script's own loop, one thing after another, and prints a line of JSON.

    python -m benchmarks.gpu.probe fed,resident,profile,waits train_vit.py --data synthetic

fed       images/s: a warm-up of --seconds, then three windows of --seconds
resident  likewise, on one batch that stays on the device
profile   launches of a step, the share of the time in which the GPU was busy, and the dearest kernels
waits     calls that wait for the GPU, a step, and from where they come (torch.cuda.set_sync_debug_mode)

Nothing is evaluated. Beside it are the model's operations for an image, and what a product of matrices and
the data sheet have for the device.
"""

import argparse
import contextlib
import io
import json
import os
import statistics
import sys
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from benchmarks.gpu.ceilings import product_flops, wait
from common.distributed.accelerator import start
from common.distributed.strategy import device_name
from common.order import Steps
from common.recipe import Recipe, parse
from common.run.run import Run
from common.script import load_script, recipe_class
from common.system.cli import split_at_script
from common.telemetry import flops

WINDOWS, LEAST_STEPS = 3, 3  # at least so many steps in a window
KERNELS = 15


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu.probe", allow_abbrev=False)
    parser.add_argument("what", help=f"of {','.join(WATCHES)}")
    parser.add_argument("--seconds", type=float, default=2.0, help="of a window")
    parser.add_argument("--steps", type=int, default=20, help="of a profile, and to count waits in")
    own, words = split_at_script(sys.argv[1:])
    flags = parser.parse_args(own)
    script = load_script(Path(words[0]).resolve())
    sys.argv = words
    recipe = parse(recipe_class(script))
    names = flags.what.split(",")
    watches = [WATCHES[name](flags.seconds, flags.steps) for name in names]
    found: dict[str, Any] = {}
    output = sys.stdout

    class WatchedRun(Run):
        """Gives each step to the watch whose turn it is, and ends the process after the last one."""

        def begin(self, *words: Any, **named: Any) -> Steps:
            steps = super().begin(*words, **named)
            self.steps = replace(self.steps, per_epoch=sys.maxsize)  # no evaluation and no line at its end
            return steps

        def add(self, loss: Tensor, ids: np.ndarray) -> None:
            super().add(loss, ids)
            if self.meter.micro_batches % self.batch.accumulations:
                return
            name = names[len(found)]
            if (ended := watches[len(found)].step(self.batch.total)) is not None:
                found[name] = ended
            if len(found) == len(names):
                about = device(script, recipe, self) if hasattr(recipe, "image_size") else {}
                print(json.dumps(found | about), file=output, flush=True)
                os._exit(0)

    script.Run = WatchedRun
    if hasattr(script, "training_batches"):
        is_resident = lambda: len(found) < len(names) and names[len(found)] == "resident"  # noqa: E731
        script.training_batches = batches(script.training_batches, is_resident)
    with contextlib.redirect_stdout(io.StringIO()):
        script.main.__wrapped__(recipe, *start(recipe, clip_norm=getattr(recipe, "clip_norm", 0.0)))
    sys.exit("the training ended before all was watched")


def device(script: Any, recipe: Recipe, run: Run) -> dict[str, Any]:
    """Operations of an image, and the device's a second: of a bf16 product, and of the data sheet."""
    size = getattr(recipe, "image_size", 0)
    name = device_name(run.accelerator)
    return {
        "flops_per_image": flops.flops_per_image(lambda: script.build_model(recipe, 10), size),
        "product": product_flops(run.accelerator.device, torch.bfloat16),
        "sheet": None if name.startswith("CPU") else flops.peak_flops(name, "bf16"),
    }


def batches(real: Callable[..., Iterator[tuple]], is_resident: Callable[[], bool]) -> Callable:
    """The script's training_batches, which repeats a batch while is_resident(): no data, no augmentation."""

    def repeated(*words: Any) -> Iterator[tuple]:
        for batch in real(*words):
            yield batch
            while is_resident():
                yield batch

    return repeated


class Speed:
    """A warm-up, which ends the compilation and the autotuning, then windows between two waits."""

    def __init__(self, seconds: float, steps: int):
        self.seconds = seconds
        self.count, self.began = 0, 0.0
        self.windows: list[float] = []

    def step(self, images: int) -> dict[str, Any] | None:
        """After a step of so many images: what was found, at the end."""
        self.count += 1
        if not self.began or (self.count >= LEAST_STEPS and time.perf_counter() - self.began >= self.seconds):
            wait()
            now = time.perf_counter()
            self.windows += [self.count * images / (now - self.began)] if self.began else []
            self.count, self.began = 0, now
        if len(self.windows) <= WINDOWS:
            return None
        speeds = self.windows[1:]
        median = statistics.median(speeds)
        spread = (max(speeds) - min(speeds)) / median
        return {"images_per_s": median, "spread": spread, "step_ms": 1e3 * images / median}


class Watch:
    """Watches a number of steps, from the end of one to the end of another."""

    def __init__(self, seconds: float, steps: int):
        self.steps, self.count = steps, -1

    def step(self, images: int) -> dict[str, Any] | None:
        self.count += 1
        if self.count == 0:
            wait()
            self.begin()
        return self.end() if self.count == self.steps else None

    def begin(self) -> None: ...

    def end(self) -> dict[str, Any]:
        raise NotImplementedError


class Profile(Watch):
    """Kernels of a GPU; on a CPU, for a dry run, its operators."""

    def begin(self) -> None:
        self.on_gpu = torch.cuda.is_available()
        kinds = torch.profiler.ProfilerActivity
        self.profiler = torch.profiler.profile(activities=[kinds.CUDA if self.on_gpu else kinds.CPU])
        self.profiler.__enter__()
        self.began = time.perf_counter()

    def end(self) -> dict[str, Any]:
        wait()
        ms = 1e3 * (time.perf_counter() - self.began)
        self.profiler.__exit__(None, None, None)
        kind = torch.autograd.DeviceType.CUDA if self.on_gpu else torch.autograd.DeviceType.CPU
        took: Counter[str] = Counter()
        count: Counter[str] = Counter()
        for event in self.profiler.events():
            # Annotations span kernels, such as those of a whole step.
            if event.device_type == kind and not event.is_user_annotation:
                took[event.name] += (event.device_time if self.on_gpu else event.self_cpu_time_total) / 1e3
                count[event.name] += 1
        dearest = [(n[:80], t / self.steps, count[n] / self.steps) for n, t in took.most_common(KERNELS)]
        busy = took.total() / ms
        return {"launches": count.total() / self.steps, "busy_share": busy, "kernels": dearest}


class Waits(Watch):
    def begin(self) -> None:
        self.caught = warnings.catch_warnings(record=True)
        self.warnings = self.caught.__enter__()
        warnings.simplefilter("always")
        self.set_mode("warn")

    def end(self) -> dict[str, Any]:
        self.set_mode("default")
        self.caught.__exit__(None, None, None)
        # torch warns also that the mode itself is a prototype.
        waits = [w for w in self.warnings or () if "called a synchronizing" in str(w.message)]
        places = Counter(f"{Path(w.filename).name}:{w.lineno}" for w in waits)
        return {"waits": len(waits) / self.steps, "places": dict(places.most_common(5))}

    def set_mode(self, mode: str) -> None:
        if torch.cuda.is_available():
            torch.cuda.set_sync_debug_mode(mode)


WATCHES = {"fed": Speed, "resident": Speed, "profile": Profile, "waits": Waits}

if __name__ == "__main__":
    main()
