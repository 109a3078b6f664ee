"""Check all scripts on one GPU, including telemetry, memory, determinism and running out of memory."""

import contextlib
import importlib.util
import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from safetensors.torch import load_file

from benchmarks.gpu import rows
from benchmarks.gpu.rows import Result, Row, Setting, check, on_gpu, row, small_images
from onecurve.system.files import read_lines

CNNS = ("train_cnn_a", "train_cnn_b")
SCRIPTS = (*CNNS, "train_vit")
# Flags of 20-step runs, and the scripts that train with these flags. The smoke test covers train_cnn_a
# without flags.
FLAGS: dict[tuple[str, ...], tuple[str, ...]] = {
    (): ("train_cnn_b", "train_vit"),
    ("--grad_checkpointing",): ("train_vit",),
    ("--compile", "default"): SCRIPTS,
}
# Flags whose checks have passed before or are slow. --compile uses CUDA graphs only for CNNs, because a ViT's
# blocks refuse CUDA graphs.
REPEATED: dict[tuple[str, ...], tuple[str, ...]] = {
    ("--mixed_precision", "fp16"): SCRIPTS,
    ("--compile", "reduce-overhead"): CNNS,
    ("--compile", "max-autotune"): SCRIPTS,
}
DRY = ("train_cnn_a --mixed_precision fp16", "train_cnn_a --compile default", "train_vit")


def smoke() -> dict[str, Row]:
    """Return the row that must pass before all other rows run. This row also loads the CUDA libraries."""
    return {"a few steps": row(runs, "train_cnn_a")}


def scripts() -> dict[str, Row]:
    return {"train_hello": hello} | with_flags(FLAGS)


def with_flags(table: dict[tuple[str, ...], tuple[str, ...]]) -> dict[str, Row]:
    names = [" ".join((script, *flags)) for flags, scripts in table.items() for script in scripts]
    return {name: (row if name in DRY else on_gpu)(runs, *name.split()) for name in names}


def thorough() -> dict[str, Row]:
    fp32 = ("--deterministic", "--mixed_precision", "no")  # attention uses a different kernel in fp32
    return with_flags(REPEATED) | {
        "train_hello, waits": hello_waits,
        "train_vit, twice, --deterministic, fp32": on_gpu(twice, "train_vit", *fp32),
        "train_cnn_a, twice, without --deterministic": on_gpu(twice, "train_cnn_a"),
    }


def hello(setting: Setting) -> Result:
    with rows.trained(setting, "hello", ["train_hello.py"], "--epochs", 2) as (folder, result):
        return sound(setting, folder, result)


def hello_waits(setting: Setting) -> Result:
    words = ["-m", "benchmarks.gpu.probe", "--watch", "waits", "--steps", setting.size(20, 3)]
    words += ["train_hello.py", "--data_size", 65536, "--trackers", "none"]
    return no_waits(json.loads(rows.succeeds(setting, words))[0]["waits"])


def no_waits(watch: dict[str, Any]) -> Result:
    """Check with the probe's `waits` watch that a step does not wait for the GPU."""
    lines = ", ".join(f"{line} {count}" for line, count in watch["places"].items())
    return check(not watch["waits"], watch["waits"], "a step", 0, lines)


def runs(setting: Setting, script: str, *flags: Any) -> Result:
    folder = variants(setting, script)[flags]
    return sound(setting, folder, json.loads((folder / "result.json").read_text()))


@rows.once
def variants(setting: Setting, script: str) -> dict[tuple[str, ...], Path]:
    """Train a script with each of the section's flag sets, and return the run folders.

    All training runs share one process.
    """
    table = REPEATED if setting.folder.name == "thorough" else FLAGS
    flag_sets = [flags for flags, scripts in table.items() if script in scripts]
    if setting.dry_run:
        flag_sets = [flags for flags in flag_sets if " ".join((script, *flags)) in DRY]
    if setting.folder.name == "smoke":
        flag_sets = [()]
    words, folders, commands = small_images(setting, script), {}, []
    steps = ["--max_steps", setting.size(20, 2), "--log_every", setting.size(5, 1), "--telemetry_s", 0.5]
    steps += ["--max_val_images", setting.size(4096, 64)]
    for flags in flag_sets:
        folders[flags] = setting.folder / "_".join([script, *flags]).replace("--", "")
        commands.append([*words, *rows.run_flags(setting, folders[flags], words), *steps, *flags])
    rows.train_all(setting, script, commands)
    return folders


def sound(setting: Setting, folder: Path, result: dict[str, Any]) -> Result:
    """Check that a run finished with plausible losses and, on a GPU, with GPU memory in its telemetry."""
    problems = [] if result["status"] == "finished" else [f"status {result['status']}"]
    lines = read_lines(folder / "metrics.jsonl")
    losses = [line["train/loss"] for line in lines if "train/loss" in line]
    if not losses or not all(loss < 100 for loss in losses):
        problems.append(f"losses {losses}")
    if not setting.dry_run and importlib.util.find_spec("pynvml"):
        samples = [sample for file in folder.glob("telemetry-*.jsonl") for sample in read_lines(file)]
        gpus = [gpu for sample in samples for gpu in sample.get("gpus", [])]
        problems += [] if any(gpu.get("memory_gib") for gpu in gpus) else ["telemetry contains no GPU memory"]
        problems += [] if "cuda" in str(result["device"]).lower() or gpus else ["the run used the CPU"]
    note = "; ".join(problems) or f"loss {losses[0]:.3f} to {losses[-1]:.3f}, {result['mixed_precision']}"
    return check(not problems, round(result["peak_memory_gib"], 3), "GiB", "finished", note)


# --- Bitwise comparison of repeated runs, and of stopped and resumed runs


def determinism() -> dict[str, Row]:
    """Return the rows of all scripts.

    A dry run includes only CNN-A, because tests cover all scripts on CPUs.
    """
    table: dict[str, Row] = {}
    for script in SCRIPTS:
        make = row if script == "train_cnn_a" else on_gpu
        table[f"{script}, twice, --deterministic"] = make(twice, script, "--deterministic")
        table[f"{script}, resumed, --deterministic"] = make(resumed, script)
        table[f"{script}, with and without a step graph, --deterministic"] = make(graphed, script)
    return table


def twice(setting: Setting, script: str, *flags: str) -> Result:
    first, second = (trainings(setting, script, *flags)[name] for name in ("first", "second"))
    return same(first, second) if flags else same(first, second, "anything")


def graphed(setting: Setting, script: str) -> Result:
    """Compare runs with and without a graph, to detect a seed, learning rate or input frozen in the graph."""
    checkpoints = trainings(setting, script, "--deterministic")
    return same(checkpoints["without a graph"], checkpoints["with a graph"])


def resumed(setting: Setting, script: str) -> Result:
    checkpoints = trainings(setting, script, "--deterministic")
    return same(checkpoints["first"], checkpoints["resumed"])


@rows.once
def trainings(setting: Setting, script: str, *flags: str) -> dict[str, Path]:
    """Train a few steps several times in one process, and return the folder of each run's last checkpoint."""
    variants: dict[str, list[Any]] = {"first": [], "second": []}
    if flags == ("--deterministic",):
        variants |= {"stopped": ["--max_steps", setting.size(10, 2)], "resumed": []}
        variants |= {"without a graph": ["--no_step_graph"], "with a graph": ["--step_graph"]}
    steps = ["--max_steps", setting.size(20, 4), "--checkpoint_every", 1000, "--max_val_images", 64]
    folders, commands = {}, []
    for name, more in variants.items():
        folder = "resumed" if name == "stopped" else name
        folders[name] = setting.folder / "_".join([script, *flags, folder]).replace(" ", "_").replace(
            "--", ""
        )
        words = small_images(setting, script)
        commands.append([*words, *rows.run_flags(setting, folders[name], words), *steps, *flags, *more])
    rows.train_all(setting, "_".join([script, *flags]), commands)
    results = {name: json.loads((folder / "result.json").read_text()) for name, folder in folders.items()}
    return {name: folders[name] / result["checkpoint"] for name, result in results.items()}


def same(first: Path, second: Path, promised: Any = 0) -> Result:
    """Compare the weights of two checkpoints.

    Unless `promised` is 0, the comparison is a measurement that cannot fail.
    """
    a, b = (load_file(folder / "model.safetensors") for folder in (first, second))
    assert a.keys() == b.keys()
    difference = max(float((a[n].double() - b[n].double()).abs().max()) for n in a if a[n].numel())
    unit = "largest weight difference"
    return Result(difference, unit, promised) if promised else check(difference == 0, difference, unit, 0)


# --- Running out of memory while another process holds most of the GPU

FREE_GIB = 6  # GPU memory that the ballast leaves free
BALLAST = """
import sys, torch
free, _ = torch.cuda.mem_get_info()
held = torch.empty(max(0, free - int(float(sys.argv[1]) * 2**30)), dtype=torch.uint8, device="cuda")
print("held", flush=True)
sys.stdin.read()
"""
# A dry run limits a process's memory as find_batch_size.py does.
LIMITED = """
import resource, runpy, sys
resource.setrlimit(resource.RLIMIT_DATA, (2**32, 2**32))
del sys.argv[0]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


def memory() -> dict[str, Row]:
    return {"one-line error when out of memory": one_line, "find_batch_size.py": search}


@contextlib.contextmanager
def ballast() -> Iterator[None]:
    """Allocate all of the GPU's memory except FREE_GIB in another process."""
    words = [sys.executable, "-c", BALLAST, str(FREE_GIB)]
    with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout
            assert process.stdout.readline() == "held\n"
            yield
        finally:
            process.kill()


def one_line(setting: Setting) -> Result:
    """Train on all generated images, enlarged, as one batch that needs 40 times the free memory."""
    words = [*small_images(setting, "train_cnn_b"), "--width", 64, "--batch_size", 4096, "--image_size", 128]
    words += rows.run_flags(setting, setting.folder / "full", words)
    with ballast() if not setting.dry_run else contextlib.nullcontext():
        done = rows.command(setting, ["-c", LIMITED, *words] if setting.dry_run else words)
    errors = re.findall(r"^error: out of memory.*", done.output, re.MULTILINE)
    holds = done.status not in (0, None) and len(errors) == 1 and "Traceback" not in done.output
    note = (errors or done.output.splitlines()[-1:] or [""])[0][:200]
    return check(holds, promised="one line", note=note)


def search(setting: Setting) -> Result:
    """Run find_batch_size.py. A dry run limits CNN-A's process memory instead of GPU memory."""
    file, script = setting.folder / "search.json", "train_cnn_a" if setting.dry_run else "train_cnn_b"
    limit = ["--memory_limit_gib", 2, "--quantum", 1024] if setting.dry_run else ["--quantum", 256]
    config = ["--config_file", "accelerate_configs/single_gpu.yaml", "--output", file]
    words = ["find_batch_size.py", *config, *limit, *small_images(setting, script)]
    words += ["--cache_dir", setting.folder.parent / "cache"]
    with ballast() if not setting.dry_run else contextlib.nullcontext():
        rows.succeeds(setting, [*words, "--widths", "32,64,128"] if setting.dry_run else words)
    result = json.loads(file.read_text())
    note = f"{len(result['trials'])} trials, knee {result.get('knee')}"
    return check(result["answer"] > 0, result["answer"], "images", "above 0", note)
