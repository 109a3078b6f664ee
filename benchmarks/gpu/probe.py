"""Measure a train script's loop with one or more watches, and print a line of JSON.

    python -m benchmarks.gpu.probe --watch fed train_cnn_a.py --batch_size 512
    python -m benchmarks.gpu.probe --watch fed,resident,profile --watch "fed --compile default" train_vit.py

Each --watch starts a training run in this process, with additional flags. The training run ends after the
last of its watches. A failed run reports an `error` and does not end the other runs.

fed       Measure images/s in three windows of --seconds each, after a warm-up of --seconds.
resident  Measure images/s in the same way on one batch that stays on the device.
profile   Report the number of kernels per step, the fraction of time that the GPU was busy, and the most
          expensive kernels.
waits     Report the number of calls per step that wait for the GPU, and the source lines of these calls
          (torch.cuda.set_sync_debug_mode).

The output also contains the model's FLOPs per image, and the device's FLOP/s, both measured in a matrix
product and from the data sheet.
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

WINDOWS, LEAST_STEPS = 3, 3  # number of measured windows, and minimum number of steps per window
KERNELS = 15
Watch = Generator[None, int, dict[str, Any]]  # receives each step's image count, returns a result


def main() -> None:
    description, _, epilog = (__doc__ or "").partition("\n\n")
    parser = argparse.ArgumentParser(
        usage="python -m benchmarks.gpu.probe --watch WATCHES [flags] SCRIPT [SCRIPT_FLAGS ...]",
        description=description,
        epilog=epilog,
        allow_abbrev=False,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add(
        "--watch",
        action="append",
        required=True,
        metavar="WATCHES",
        help=f"one or more of {','.join(WATCHES)}, followed by flags of the script (repeatable)",
    )
    add("--seconds", type=float, default=1.0, metavar="SECONDS", help="seconds per window (default: 1)")
    add("--steps", type=int, default=20, metavar="N", help="steps of `profile` and `waits` (default: 20)")
    arguments, script_words = split_at_script(sys.argv[1:])
    flags = parser.parse_args(arguments)
    if not script_words:
        parser.error("the script is missing. Add a script after these flags, for example train_vit.py.")
    file, *words = script_words
    script = load_script(Path(file).resolve())
    results = [watched(script, words, flags, *shlex.split(watch)) for watch in flags.watch]
    print(json.dumps(results), flush=True)
    os._exit(0)  # exit without waiting for the training runs' threads


def watched(script: Any, words: list[str], flags: Any, names: str, *more: str) -> dict[str, Any]:
    """Train with additional flags and return the results of the named watches."""
    pending = {name: WATCHES[name](flags.seconds, flags.steps) for name in names.split(",")}
    results: dict[str, Any] = {}
    for watch in pending.values():
        next(watch)

    def on_step(run: Run) -> None:
        """Report the step to the current watch, and end the training run after the last watch."""
        name, watch = next(iter(pending.items()))
        try:
            watch.send(run.batch.total)
        except StopIteration as ended:
            results[name] = ended.value
            del pending[name]
        if not pending:
            results.update(facts_of(script, run))
            raise Enough

    try:
        with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
            words = [*words, *more, "--output_dir", f"{folder}/run"]
            train_watched(script, words, on_step, lambda: next(iter(pending), "") == "resident")
    except (Exception, SystemExit) as error:
        traceback.print_exc()
        return {"error": f"{type(error).__name__}: {error}"[-300:]}
    finally:
        if "torch._dynamo" in sys.modules:
            torch._dynamo.reset()
        gc.collect()
        torch.cuda.empty_cache()
    return {"error": "the training run ended before the last measurement"} if pending else results


def facts_of(script: Any, run: Run) -> dict[str, Any]:
    """Return the FLOPs per image and the device's FLOP/s, both measured (bf16) and from its data sheet."""
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
    """Measure images/s in windows that begin and end with a wait, after compilation and autotuning."""
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
    """Profile the kernels of a GPU, or the operators of a CPU in a dry run."""
    on_gpu, activities = torch.cuda.is_available(), torch.profiler.ProfilerActivity
    yield
    wait_for_device()
    with torch.profiler.profile(activities=[activities.CUDA if on_gpu else activities.CPU]) as profiler:
        began = time.perf_counter()
        for _ in range(steps):
            yield
        wait_for_device()
        ms = 1e3 * (time.perf_counter() - began)
    device_type = torch.autograd.DeviceType.CUDA if on_gpu else torch.autograd.DeviceType.CPU
    kernel_ms: Counter[str] = Counter()
    count: Counter[str] = Counter()
    for event in profiler.events():
        # Exclude annotations, which cover several kernels, for example all kernels in a step.
        if event.device_type == device_type and not event.is_user_annotation:
            kernel_ms[event.name] += (event.device_time if on_gpu else event.self_cpu_time_total) / 1e3
            count[event.name] += 1
    longest = [(name[:80], t / steps, count[name] / steps) for name, t in kernel_ms.most_common(KERNELS)]
    return {"launches": count.total() / steps, "busy_share": kernel_ms.total() / ms, "kernels": longest}


def waits(seconds: float, steps: int) -> Watch:
    """Count the calls that wait for the GPU."""
    set_mode = torch.cuda.set_sync_debug_mode if torch.cuda.is_available() else lambda mode: None
    yield
    wait_for_device()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        set_mode("warn")
        for _ in range(steps):
            yield
        set_mode("default")
    # Exclude torch's warning that the debug mode is a prototype.
    waiting = [w for w in caught or () if "called a synchronizing" in str(w.message)]
    lines = Counter(f"{Path(w.filename).name}:{w.lineno}" for w in waiting)
    return {"waits": len(waiting) / steps, "places": dict(lines.most_common(5))}


WATCHES = {"fed": speed, "resident": speed, "profile": profile, "waits": waits}

if __name__ == "__main__":
    main()
