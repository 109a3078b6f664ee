"""Memory of a training step: as plan.py traces it without a device, and as torch's allocator has it.

    python -m benchmarks.plan_memory
    python -m benchmarks.plan_memory --models vit_s --configs fsdp_2gpu,zero2_2gpu

Each model trains four steps on two CPU processes under each config. Rank 0 records torch's allocator; the
largest sum after an operator in a step is its measured peak of live tensors (`live`), and the least of the
last three steps counts. Beside it stand the largest sum at all, with what kernels allocate for themselves,
and the resident memory, with Python and torch's code. The exit status is 1 if traced and live differ by more
than 3 percent. Its table stands in docs/performance.md.
"""

import bisect
import ctypes
import itertools
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._profiler import _EventType
from torch.profiler import ProfilerActivity, profile

from benchmarks.harness import train_watched
from onecurve.models.script import load_script
from onecurve.system.cli import command_parser
from onecurve.system.env import rank
from onecurve.system.files import write_json
from onecurve.system.paths import ROOT

MODELS = {
    "cnn_a": ["train_cnn_a.py", "--batch_size=256"],
    "resnet18": ["train_cnn_b.py", "--batch_size=64"],
    "vit_s": ["train_vit.py", "--model=vit_small_patch16_224", "--batch_size=8"],
    "vit_b": ["train_vit.py", "--batch_size=4"],
}
CONFIGS = ("single_gpu", "ddp_2gpu", "fsdp_2gpu", "zero1_4gpu", "zero2_2gpu", "zero3_4gpu")
BOUND_PCT = 3
FLAGS = ["--data=digits", "--max_steps=4", "--trackers=none", "--telemetry_s=0", "--log_every=1"]
FLAGS += ["--max_val_images=2", "--checkpoint_every=1000", "--mixed_precision=no"]


def main() -> int:
    parser = command_parser(__doc__)
    parser.add_argument("--models", default=",".join(MODELS))
    parser.add_argument("--configs", default=",".join(CONFIGS))
    flags = parser.parse_args()
    print("| model | config | traced, MiB | live, MiB | difference | with kernels', MiB | resident, MiB |")
    print("|---|---|---|---|---|---|---|", flush=True)
    worst = 0.0
    for model, config in itertools.product(flags.models.split(","), flags.configs.split(",")):
        processes = 1 if config == "single_gpu" else 2
        file, words = f"accelerate_configs/{config}.yaml", [*MODELS[model], *FLAGS]
        traced, found = _traced(file, processes, words), _measured(file, processes, words)
        difference = 100 * (traced / found["live"] - 1)
        worst = max(worst, abs(difference))
        sizes = (traced, found["live"], found["allocated"], found["resident"])
        size, live, peak, resident = (f"{each / 2**20:,.0f}" for each in sizes)
        cells = (model, config, size, live, f"{difference:+.1f} %", peak, resident)
        print(f"| {' | '.join(cells)} |", flush=True)
    return int(worst > BOUND_PCT)


def _traced(config_file: str, processes: int, words: list[str]) -> int:
    batch = next(int(word.partition("=")[2]) for word in words if word.startswith("--batch_size"))
    size = batch // processes
    command = [sys.executable, "-m", "benchmarks.plan_memory", "--trace", config_file, processes, 1, size, 0]
    command += words
    return json.loads(_output(command).splitlines()[-1])["peaks"][str(size)]["Total"]


def trace_over_gloo() -> None:
    """Lets collectives allocate what gloo's do beside their results. NCCL's allocate no tensors."""
    from tools.plan import trace

    gather, reduce = dist.all_gather_into_tensor, dist.reduce_scatter_tensor

    def all_gather_into_tensor(output_tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
        torch.empty_like(output_tensor)  # it gathers there, and copies
        return gather(output_tensor, *args, **kwargs)

    def reduce_scatter_tensor(output: Tensor, input: Tensor, *args: Any, **kwargs: Any) -> Any:
        return reduce(output, input.clone(), *args, **kwargs)  # it reduces a copy on each process

    dist.all_gather_into_tensor = all_gather_into_tensor
    dist.reduce_scatter_tensor = reduce_scatter_tensor
    trace.main()


def _measured(config_file: str, processes: int, words: list[str]) -> dict[str, float]:
    with tempfile.TemporaryDirectory() as scratch:
        found = Path(scratch) / "found.json"
        launcher = [sys.executable, "-m", "accelerate.commands.launch", "--config_file", config_file]
        launcher += ["--num_processes", processes, "--main_process_port", 0]
        launcher += ["-m", "benchmarks.plan_memory", "--of", found]
        _output([*launcher, *words, f"--output_dir={scratch}/run"])
        return json.loads(found.read_text())


def _output(words: list[Any]) -> str:
    words, env = [*map(str, words)], os.environ | {"CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(words, cwd=ROOT, env=env, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{words}: {done.stdout[-2000:]}{done.stderr[-3000:]}")
    return done.stdout


def measure(to: Path, words: list[str]) -> None:
    """Trains in this process of a job; the main one writes its least peak of a step, in bytes."""
    from onecurve.checkpoint.training import TrainingState
    from onecurve.run.run import Run

    count_all_threads()
    # The buffers of a checkpoint are the host's memory, also where a GPU trains.
    TrainingState.allocate = lambda *_: None  # type: ignore[method-assign]
    recorded = profile(activities=[ProfilerActivity.CPU], profile_memory=True)
    marks_ns: list[int] = []  # when each step ended

    def on_step(run: Run) -> None:
        marks_ns.append(time.time_ns())
        if len(marks_ns) < run.ranks.steps.last:
            return
        if rank() == 0:
            recorded.stop()
            tree = recorded.profiler.kineto_results.experimental_event_tree()
            found = least_peaks(tree, marks_ns)
            found["resident"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
            write_json(to, found)
        while not to.exists():
            time.sleep(0.05)
        os._exit(0)  # without an evaluation, a checkpoint and a report

    if rank() == 0:
        recorded.start()
    train_watched(load_script(ROOT / words[0]), words[1:], on_step)


def count_all_threads() -> None:
    """Lets torch's CPU allocator keep the sum of all threads.

    The profiler turns that on in its own thread alone. Without the others it takes a tensor that gloo's
    thread is the last to release for one that lives on.
    """
    library = ctypes.CDLL(str(Path(torch.__file__).parent / "lib/libc10.so"))
    ctypes.c_bool.in_dll(library, "FLAGS_caffe2_report_cpu_memory_usage").value = True


def least_peaks(roots: list[Any], marks_ns: list[int]) -> dict[str, int]:
    """The least of the steps' peaks, in bytes: after an operator (`live`), and at all (`allocated`).

    roots: the profiler's events. marks_ns: when the first step began, and when each one ended. The steps'
    peaks are the same but for gloo's threads, which release what they sent a moment after it was waited for.
    """
    sums: list[tuple[int, bool, int]] = []  # a time; if an operator ends there; the allocator's sum, if not
    waiting = [(root, False) for root in roots]
    while waiting:
        event, is_inside = waiting.pop()
        is_operator = event.name.startswith("aten::")
        if event.tag == _EventType.Allocation:
            sums.append((event.start_time_ns, False, event.typed[1].total_allocated))
        elif is_operator and not is_inside:
            sums.append((event.end_time_ns, True, 0))
        waiting += [(child, is_inside or is_operator) for child in event.children]
    total, live, allocated = 0, [0] * len(marks_ns), [0] * len(marks_ns)
    for at_ns, is_end, sum_there in sorted(sums):
        total = total if is_end else sum_there
        step = bisect.bisect(marks_ns, at_ns)
        if 0 < step < len(marks_ns):
            allocated[step] = max(allocated[step], total)
            live[step] = max(live[step], total) if is_end else live[step]
    return {"live": min(live[1:]), "allocated": min(allocated[1:])}


if __name__ == "__main__":
    if sys.argv[1:2] == ["--of"]:
        measure(Path(sys.argv[2]), sys.argv[3:])
    elif sys.argv[1:2] == ["--trace"]:
        del sys.argv[1]
        trace_over_gloo()
    else:
        sys.exit(main())
