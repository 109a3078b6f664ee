"""Compare a training step's memory in plan.py's trace with measurements by torch's allocator.

    python -m benchmarks.plan_memory
    python -m benchmarks.plan_memory --models vit_s --configs fsdp_2gpu,zero2_2gpu

Each model trains for four steps with two CPU processes under each config, and rank 0 records the totals of
torch's allocator. A step's peak live tensor memory (`live`) is the largest number of allocated bytes after
any operator. The table contains the smallest peak of the last three steps, the largest number of allocated
bytes at any time (including kernels' temporary memory), and the resident memory (including Python and torch's
code). The command exits with status 1 if traced and live memory differ by more than 3 percent.
docs/performance.md contains the results.
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
    parser = command_parser(__doc__, "python -m benchmarks.plan_memory [flags]")
    models, configs = ",".join(MODELS), ",".join(CONFIGS)
    parser.add_argument("--models", default=models, metavar="NAME,...", help="models (default: %(default)s)")
    parser.add_argument(
        "--configs",
        default=configs,
        metavar="NAME,...",
        help="names of accelerate configs (default: %(default)s)",
    )
    flags = parser.parse_args()
    print("| model | config | traced, MiB | live, MiB | difference | with kernels', MiB | resident, MiB |")
    print("|---|---|---|---|---|---|---|", flush=True)
    worst = 0.0
    for model, config in itertools.product(flags.models.split(","), flags.configs.split(",")):
        processes = 1 if config == "single_gpu" else 2
        file, words = f"accelerate_configs/{config}.yaml", [*MODELS[model], *FLAGS]
        traced, measured = _traced(file, processes, words), _measured(file, processes, words)
        difference = 100 * (traced / measured["live"] - 1)
        worst = max(worst, abs(difference))
        sizes = (traced, measured["live"], measured["allocated"], measured["resident"])
        size, live, peak, resident = (f"{number / 2**20:,.0f}" for number in sizes)
        cells = (model, config, size, live, f"{difference:+.1f} %", peak, resident)
        print(f"| {' | '.join(cells)} |", flush=True)
    return int(worst > BOUND_PCT)


def _traced(config_file: str, processes: int, words: list[str]) -> int:
    batch = next(int(word.partition("=")[2]) for word in words if word.startswith("--batch_size"))
    size = batch // processes
    command = [sys.executable, "-m", "benchmarks.plan_memory", "--trace", config_file, processes, 1, size, 0]
    command += words
    return json.loads(_output(command).splitlines()[-1])["peak_bytes"][str(size)]["Total"]


def trace_over_gloo() -> None:
    """Make traced collectives allocate the temporary tensors that gloo allocates and NCCL does not."""
    from tools.plan import trace

    gather, reduce = dist.all_gather_into_tensor, dist.reduce_scatter_tensor

    def all_gather_into_tensor(output_tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
        torch.empty_like(output_tensor)  # gloo gathers into a buffer of this size and then copies it
        return gather(output_tensor, *args, **kwargs)

    def reduce_scatter_tensor(output: Tensor, input: Tensor, *args: Any, **kwargs: Any) -> Any:
        return reduce(output, input.clone(), *args, **kwargs)  # gloo reduces a copy in each process

    dist.all_gather_into_tensor = all_gather_into_tensor
    dist.reduce_scatter_tensor = reduce_scatter_tensor
    trace.main()


def _measured(config_file: str, processes: int, words: list[str]) -> dict[str, float]:
    with tempfile.TemporaryDirectory() as scratch:
        result = Path(scratch) / "result.json"
        launcher = [sys.executable, "-m", "accelerate.commands.launch", "--config_file", config_file]
        launcher += ["--num_processes", processes, "--main_process_port", 0]
        launcher += ["-m", "benchmarks.plan_memory", "--of", result]
        _output([*launcher, *words, f"--output_dir={scratch}/run"])
        return json.loads(result.read_text())


def _output(words: list[Any]) -> str:
    words, env = [*map(str, words)], os.environ | {"CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(words, cwd=ROOT, env=env, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{words}: {done.stdout[-2000:]}{done.stderr[-3000:]}")
    return done.stdout


def measure(file: Path, words: list[str]) -> None:
    """Train in this process of a job, and write the smallest per-step peak to a file on the main process."""
    from onecurve.checkpoint.training import TrainingState
    from onecurve.run.run import Run

    count_all_threads()
    # Exclude checkpoint buffers, which are always in CPU memory and never in device memory.
    TrainingState.allocate = lambda *_: None  # type: ignore[method-assign]
    recorded = profile(activities=[ProfilerActivity.CPU], profile_memory=True)
    marks_ns: list[int] = []  # end of each step in nanoseconds

    def on_step(run: Run) -> None:
        marks_ns.append(time.time_ns())
        if len(marks_ns) < run.session.steps.last:
            return
        if rank() == 0:
            recorded.stop()
            tree = recorded.profiler.kineto_results.experimental_event_tree()
            peaks = least_peaks(tree, marks_ns)
            peaks["resident"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
            write_json(file, peaks)
        while not file.exists():
            time.sleep(0.05)
        os._exit(0)  # skip the evaluation, the checkpoint and the report

    if rank() == 0:
        recorded.start()
    train_watched(load_script(ROOT / words[0]), words[1:], on_step)


def count_all_threads() -> None:
    """Make torch's CPU allocator count the memory of all threads.

    By default, the profiler counts only the memory of the thread that started it. Tensors that one of gloo's
    threads releases last would then count as live.
    """
    library = ctypes.CDLL(str(Path(torch.__file__).parent / "lib/libc10.so"))
    ctypes.c_bool.in_dll(library, "FLAGS_caffe2_report_cpu_memory_usage").value = True


def least_peaks(roots: list[Any], marks_ns: list[int]) -> dict[str, int]:
    """Return the smallest peak of a step in bytes, after an operator (`live`) and at any time (`allocated`).

    Peaks differ between steps because gloo's threads release sent tensors shortly after a wait has returned.

    Args:
        roots: Root events of the profiler's event tree.
        marks_ns: Start time of the first measured step and end time of each step, in nanoseconds.
    """
    sums: list[tuple[int, bool, int]] = []  # time, True at an operator's end, new total
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
    for at_ns, is_end, allocator_sum in sorted(sums):
        total = total if is_end else allocator_sum
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
