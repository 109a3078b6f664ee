"""Watches a train script's own loop, one thing after another, and prints a line of JSON.

    python -m benchmarks.gpu.probe --watch fed,resident,profile --watch "fed --compile default" train_vit.py

Each --watch is a training in this process, with more flags, that ends when all is seen. A training that fails
has an `error`, and ends no other.

fed       images/s: a warm-up of --seconds, then three windows of --seconds
resident  likewise, on one batch that stays on the device
profile   kernels of a step, the share of the time in which the GPU was busy, and the dearest kernels
waits     calls that wait for the GPU, a step, and from where they come (torch.cuda.set_sync_debug_mode)

Beside it are the model's operations for an image, and what a product of matrices and the data sheet have for
the device.
"""

import argparse
import gc
import json
import os
import shlex
import statistics
import sys
import tempfile
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Generator
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu.device import product_flops
from benchmarks.harness import Enough, train_watched, wait_for_device
from onecurve.distributed.strategy import device_name
from onecurve.flags.recipe import ImageRecipe
from onecurve.models.script import load_script
from onecurve.run.run import Run
from onecurve.system.cli import split_at_script
from onecurve.telemetry import flops

WINDOWS, LEAST_STEPS = 3, 3  # at least so many steps in a window
KERNELS = 15
Watch = Generator[None, int, dict[str, Any]]  # receives each step's images, and returns what it saw


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu.probe", allow_abbrev=False)
    parser.add_argument("--watch", action="append", required=True, help=f"of {','.join(WATCHES)}, then flags")
    parser.add_argument("--seconds", type=float, default=1.0, help="of a window")
    parser.add_argument("--steps", type=int, default=20, help="of a profile, and to count waits in")
    own, (file, *words) = split_at_script(sys.argv[1:])
    flags = parser.parse_args(own)
    script = load_script(Path(file).resolve())
    found = [watched(script, words, flags, *shlex.split(each)) for each in flags.watch]
    print(json.dumps(found), flush=True)
    os._exit(0)  # threads of the trainings live on


def watched(script: Any, words: list[str], flags: Any, names: str, *more: str) -> dict[str, Any]:
    """What is found in a training with more flags."""
    left, found = {name: WATCHES[name](flags.seconds, flags.steps) for name in names.split(",")}, {}
    for watch in left.values():
        next(watch)

    def on_step(run: Run) -> None:
        """Gives the step to the watch whose turn it is, and ends the training after the last one."""
        name, watch = next(iter(left.items()))
        try:
            watch.send(run.batch.total)
        except StopIteration as ended:
            found[name] = ended.value
            del left[name]
        if not left:
            found.update(facts_of(script, run))
            raise Enough

    try:
        with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
            words = [*words, *more, "--output_dir", f"{folder}/run"]
            train_watched(script, words, on_step, lambda: next(iter(left), "") == "resident")
    except (Exception, SystemExit) as error:
        traceback.print_exc()
        return {"error": f"{type(error).__name__}: {error}"[-300:]}
    finally:
        if "torch._dynamo" in sys.modules:
            torch._dynamo.reset()
        gc.collect()
        torch.cuda.empty_cache()
    return {"error": "the training ended before all was watched"} if left else found


def facts_of(script: Any, run: Run) -> dict[str, Any]:
    """Operations of an image, and the device's a second: of a bf16 product, and of the data sheet."""
    if not isinstance(run.recipe, ImageRecipe):
        return {}
    name = device_name(run.accelerator)
    return {
        "flops_per_image": flops.flops_per_image(
            lambda: script.build_model(run.recipe, 10), run.recipe.image_size
        ),
        "product": product_flops(run.accelerator.device, torch.bfloat16),
        "sheet": None if name.startswith("CPU") else flops.peak_flops(name, "bf16"),
    }


def speed(seconds: float, steps: int) -> Watch:
    """A warm-up, which ends the compilation and the autotuning, then windows between two waits."""
    speeds, images = [], (yield)
    for _ in range(1 + WINDOWS):
        wait_for_device()
        began, count = time.perf_counter(), 0
        while count < LEAST_STEPS or time.perf_counter() - began < seconds:
            images = yield
            count += 1
        wait_for_device()
        speeds.append(count * images / (time.perf_counter() - began))
    median = statistics.median(windows := speeds[1:])
    return {"images_per_s": median, "spread": (max(windows) - min(windows)) / median}


def profile(seconds: float, steps: int) -> Watch:
    """Kernels of a GPU; on a CPU, for a dry run, its operators."""
    on_gpu, kinds = torch.cuda.is_available(), torch.profiler.ProfilerActivity
    yield
    wait_for_device()
    with torch.profiler.profile(activities=[kinds.CUDA if on_gpu else kinds.CPU]) as profiler:
        began = time.perf_counter()
        for _ in range(steps):
            yield
        wait_for_device()
        ms = 1e3 * (time.perf_counter() - began)
    kind = torch.autograd.DeviceType.CUDA if on_gpu else torch.autograd.DeviceType.CPU
    took: Counter[str] = Counter()
    count: Counter[str] = Counter()
    for event in profiler.events():
        # Annotations span kernels, such as those of a whole step.
        if event.device_type == kind and not event.is_user_annotation:
            took[event.name] += (event.device_time if on_gpu else event.self_cpu_time_total) / 1e3
            count[event.name] += 1
    dearest = [(n[:80], t / steps, count[n] / steps) for n, t in took.most_common(KERNELS)]
    return {"launches": count.total() / steps, "busy_share": took.total() / ms, "kernels": dearest}


def waits(seconds: float, steps: int) -> Watch:
    set_mode = torch.cuda.set_sync_debug_mode if torch.cuda.is_available() else lambda mode: None
    yield
    wait_for_device()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        set_mode("warn")
        for _ in range(steps):
            yield
        set_mode("default")
    # torch warns also that the mode itself is a prototype.
    seen = [w for w in caught or () if "called a synchronizing" in str(w.message)]
    places = Counter(f"{Path(w.filename).name}:{w.lineno}" for w in seen)
    return {"waits": len(seen) / steps, "places": dict(places.most_common(5))}


WATCHES = {"fed": speed, "resident": speed, "profile": profile, "waits": waits}

if __name__ == "__main__":
    main()
