"""Memory of a training step: as plan.py traces it without a device, and as torch's allocator has it.

    python -m benchmarks.plan_memory
    python -m benchmarks.plan_memory --models vit_s --configs fsdp_2gpu,zero2_2gpu

Each model trains three steps on two CPU processes under each config. Rank 0 records every allocation and
every release of torch's CPU allocator; their largest sum after an operator is the measured peak of live
tensors. Beside it stand the largest sum at all, with what kernels allocate for themselves, and the resident
memory, with Python and torch's code. The exit status is 1 if traced and live differ by more than 3 percent.
Its table stands in docs/performance.md.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from common.system.paths import ROOT

MODELS = {
    "cnn_a": ["train_cnn_a.py", "--batch_size=512"],
    "resnet18": ["train_cnn_b.py", "--batch_size=64"],
    "vit_s": ["train_vit.py", "--model=vit_small_patch16_224", "--batch_size=16"],
    "vit_b": ["train_vit.py", "--batch_size=16"],
}
CONFIGS = ("single_gpu", "ddp_2gpu", "fsdp_2gpu", "zero1_4gpu", "zero2_2gpu", "zero3_4gpu")
BOUND_PCT = 3
FLAGS = ["--data=digits", "--max_steps=3", "--trackers=none", "--telemetry_s=0", "--log_every=1"]
FLAGS += ["--max_val_images=2", "--checkpoint_every=1000", "--mixed_precision=no"]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.add_argument("--models", default=",".join(MODELS))
    parser.add_argument("--configs", default=",".join(CONFIGS))
    flags = parser.parse_args()
    print("| model | config | traced, MiB | live, MiB | difference | with kernels', MiB | resident, MiB |")
    print("|---|---|---|---|---|---|---|", flush=True)
    worst = 0.0
    for model in flags.models.split(","):
        for config in flags.configs.split(","):
            processes = 1 if config == "single_gpu" else 2
            file = f"accelerate_configs/{config}.yaml"
            words = [*MODELS[model], *FLAGS]
            traced, found = _traced(file, processes, words), _measured(file, processes, words)
            difference = 100 * (traced / found["live"] - 1)
            worst = max(worst, abs(difference))
            size, live, peak, resident = (
                f"{bytes_ / 2**20:,.0f}"
                for bytes_ in (traced, found["live"], found["allocated"], found["resident"])
            )
            print(
                f"| {model} | {config} | {size} | {live} | {difference:+.1f} % | {peak} | {resident} |",
                flush=True,
            )
    return int(worst > BOUND_PCT)


def _traced(config_file: str, processes: int, words: list[str]) -> int:
    batch = next(int(word.partition("=")[2]) for word in words if word.startswith("--batch_size"))
    size = batch // processes
    command = [sys.executable, "-m", "common.planning.trace", config_file, processes, 1, size, *words]
    return json.loads(_output(command).splitlines()[-1])["peaks"][str(size)]["Total"]


def _measured(config_file: str, processes: int, words: list[str]) -> dict[str, float]:
    with tempfile.TemporaryDirectory() as scratch:
        found = Path(scratch) / "found.json"
        launcher = [sys.executable, "-m", "accelerate.commands.launch", "--config_file", config_file]
        launcher += ["--num_processes", processes, "--main_process_port", 0]
        _output(
            [*launcher, "-m", "benchmarks.plan_memory", "--of", found, *words, f"--output_dir={scratch}/run"]
        )
        return json.loads(found.read_text())


def _output(words: list[Any]) -> str:
    env = os.environ | {"CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        list(map(str, words)), cwd=ROOT, env=env, capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise RuntimeError(f"{words}: {done.stdout[-2000:]}{done.stderr[-3000:]}")
    return done.stdout


def measure(to: Path, words: list[str]) -> None:
    """Trains in this process of a job; the main one writes its largest sum of allocations, in bytes."""
    import resource

    from torch.profiler import ProfilerActivity, profile

    from common.distributed.accelerator import start
    from common.recipe import parse
    from common.run.run import Run
    from common.script import load_script, recipe_class

    trained_at = [0]  # when the steps had ended, and the evaluation and the checkpoint began
    should_evaluate = Run.should_evaluate

    def noted(run: Run, step: int) -> bool:
        trained_at[0] = time.time_ns()
        return should_evaluate(run, step)

    Run.should_evaluate = noted  # type: ignore[method-assign]
    sys.argv[:] = words
    script = load_script(ROOT / words[0])
    recipe = parse(recipe_class(script), words[1:])
    accelerator, batch = start(recipe, clip_norm=recipe.clip_norm)
    train = script.main.__wrapped__
    if not accelerator.is_main_process:
        train(recipe, accelerator, batch)
    else:
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as recorded:
            train(recipe, accelerator, batch)
        events = recorded.profiler.kineto_results.events()
        found = peaks([event for event in events if event.start_ns() < trained_at[0]])
        found["resident"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        to.write_text(json.dumps(found))
    sys.stdout.flush()
    os._exit(0)  # gloo's threads sometimes abort in their destructors


def peaks(events: list[Any]) -> dict[str, int]:
    """The largest sum of allocations after an operator (`live`), and at all (`allocated`), in bytes."""
    changes = [(e.start_ns(), 0, e.nbytes()) for e in events if e.name() == "[memory]"]
    ends: dict[int, int] = {}  # of the last operator that is in no other, by thread
    for event in sorted(events, key=lambda event: (event.start_ns(), -event.duration_ns())):
        thread, end = event.start_thread_id(), event.start_ns() + event.duration_ns()
        if event.name().startswith("aten::") and event.start_ns() >= ends.get(thread, 0):
            ends[thread] = end
            changes.append((end, 1, 0))
    total = live = allocated = 0
    for _, is_end, change in sorted(changes):
        total += change
        allocated = max(allocated, total)
        live = max(live, total) if is_end else live
    return {"live": live, "allocated": allocated}


if __name__ == "__main__":
    if sys.argv[1:2] == ["--of"]:
        measure(Path(sys.argv[2]), sys.argv[3:])
    sys.exit(main())
