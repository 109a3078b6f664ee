"""Watches a train script's own loop, one thing after another, and prints a line of JSON.

    python -m benchmarks.gpu.probe fed,resident,profile,waits train_vit.py --data synthetic

fed       images/s: a warm-up of --seconds, then three windows of --seconds
resident  likewise, on one batch that stays on the device
profile   launches of a step, the share of the time in which the GPU was busy, and the dearest kernels
waits     calls that wait for the GPU, a step, and from where they come (torch.cuda.set_sync_debug_mode)

Beside it are the model's operations for an image, and what a product of matrices and the data sheet have for
the device.
"""

import argparse
import json
import os
import statistics
import sys
import time
import warnings
from collections import Counter
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu.device import product_flops
from benchmarks.harness import train_watched, wait_for_device
from common.distributed.strategy import device_name
from common.run.run import Run
from common.script import load_script
from common.system.cli import split_at_script
from common.telemetry import flops

WINDOWS, LEAST_STEPS = 3, 3  # at least so many steps in a window
KERNELS = 15


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu.probe", allow_abbrev=False)
    parser.add_argument("what", help=f"of {','.join(WATCHES)}")
    parser.add_argument("--seconds", type=float, default=2.0, help="of a window")
    parser.add_argument("--steps", type=int, default=20, help="of a profile, and to count waits in")
    own, (file, *words) = split_at_script(sys.argv[1:])
    flags = parser.parse_args(own)
    script, output, found = load_script(Path(file).resolve()), sys.stdout, {}
    names = flags.what.split(",")
    watches = [WATCHES[name](flags.seconds, flags.steps) for name in names]

    def on_step(run: Run) -> None:
        """Gives the step to the watch whose turn it is, and ends the process after the last one."""
        if (ended := watches[len(found)].step(run.batch.total)) is not None:
            found[names[len(found)]] = ended
        if len(found) == len(names):
            print(json.dumps(found | facts_of(script, run)), file=output, flush=True)
            os._exit(0)

    train_watched(script, words, on_step, lambda: len(found) < len(names) and names[len(found)] == "resident")
    sys.exit("the training ended before all was watched")


def facts_of(script: Any, run: Run) -> dict[str, Any]:
    """Operations of an image, and the device's a second: of a bf16 product, and of the data sheet."""
    if not (size := getattr(run.recipe, "image_size", 0)):
        return {}
    name = device_name(run.accelerator)
    return {
        "flops_per_image": flops.flops_per_image(lambda: script.build_model(run.recipe, 10), size),
        "product": product_flops(run.accelerator.device, torch.bfloat16),
        "sheet": None if name.startswith("CPU") else flops.peak_flops(name, "bf16"),
    }


class Speed:
    """A warm-up, which ends the compilation and the autotuning, then windows between two waits."""

    def __init__(self, seconds: float, steps: int):
        self.seconds, self.count, self.began = seconds, 0, 0.0
        self.windows: list[float] = []

    def step(self, images: int) -> dict[str, Any] | None:
        """After a step of so many images: what was found, at the end."""
        self.count += 1
        if not self.began or (self.count >= LEAST_STEPS and time.perf_counter() - self.began >= self.seconds):
            wait_for_device()
            now = time.perf_counter()
            self.windows += [self.count * images / (now - self.began)] if self.began else []
            self.count, self.began = 0, now
        if len(self.windows) <= WINDOWS:
            return None
        median = statistics.median(speeds := self.windows[1:])
        return {"images_per_s": median, "spread": (max(speeds) - min(speeds)) / median}


class Watch:
    """Watches a number of steps, from the end of one to the end of another."""

    def __init__(self, seconds: float, steps: int):
        self.steps, self.count = steps, -1
        self.on_gpu = torch.cuda.is_available()

    def step(self, images: int) -> dict[str, Any] | None:
        self.count += 1
        if self.count == 0:
            wait_for_device()
            self.begin()
        return self.end() if self.count == self.steps else None

    def begin(self) -> None: ...

    def end(self) -> dict[str, Any]:
        raise NotImplementedError


class Profile(Watch):
    """Kernels of a GPU; on a CPU, for a dry run, its operators."""

    def begin(self) -> None:
        kinds = torch.profiler.ProfilerActivity
        self.profiler = torch.profiler.profile(activities=[kinds.CUDA if self.on_gpu else kinds.CPU])
        self.profiler.__enter__()
        self.began = time.perf_counter()

    def end(self) -> dict[str, Any]:
        wait_for_device()
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
        return {"launches": count.total() / self.steps, "busy_share": took.total() / ms, "kernels": dearest}


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
        if self.on_gpu:
            torch.cuda.set_sync_debug_mode(mode)


WATCHES = {"fed": Speed, "resident": Speed, "profile": Profile, "waits": Waits}

if __name__ == "__main__":
    main()
