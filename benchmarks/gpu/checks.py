"""Checks of one GPU: every script, with telemetry and memory; bits; and what happens out of memory."""

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
# Flags of runs of 20 steps; the smoke test has train_cnn_a.
FLAGS: dict[tuple[str, ...], tuple[str, ...]] = {
    (): ("train_cnn_b", "train_vit"),
    ("--grad_checkpointing",): ("train_vit",),
    ("--compile", "default"): SCRIPTS,
}
# Found right once, or slow. CUDA graphs of --compile are for the CNNs: a ViT's blocks refuse them.
REPEATED: dict[tuple[str, ...], tuple[str, ...]] = {
    ("--mixed_precision", "fp16"): SCRIPTS,
    ("--compile", "reduce-overhead"): CNNS,
    ("--compile", "max-autotune"): SCRIPTS,
}
DRY = ("train_cnn_a --mixed_precision fp16", "train_cnn_a --compile default", "train_vit")


def smoke() -> dict[str, Row]:
    """What must work before anything else is worth its time. Its process loads CUDA's libraries first."""
    return {"a few steps": row(runs, "train_cnn_a")}


def scripts() -> dict[str, Row]:
    return {"train_hello": hello} | with_flags(FLAGS)


def with_flags(table: dict[tuple[str, ...], tuple[str, ...]]) -> dict[str, Row]:
    found = [" ".join((script, *flags)) for flags, names in table.items() for script in names]
    return {name: (row if name in DRY else on_gpu)(runs, *name.split()) for name in found}


def thorough() -> dict[str, Row]:
    fp32 = ("--deterministic", "--mixed_precision", "no")  # attention has another kernel
    return with_flags(REPEATED) | {
        "train_hello, waits": hello_waits,
        "train_vit, twice, --deterministic, fp32": on_gpu(twice, "train_vit", *fp32),
        "train_cnn_a, twice, without the flag": on_gpu(twice, "train_cnn_a"),
    }


def hello(setting: Setting) -> Result:
    with rows.trained(setting, "hello", ["train_hello.py"], "--epochs", 2) as (folder, result):
        return sound(setting, folder, result)


def hello_waits(setting: Setting) -> Result:
    words = ["-m", "benchmarks.gpu.probe", "--watch", "waits", "--steps", setting.size(20, 3)]
    words += ["train_hello.py", "--data_size", 65536, "--trackers", "none"]
    return no_waits(json.loads(rows.succeeds(setting, words))[0]["waits"])


def no_waits(found: dict[str, Any]) -> Result:
    places = ", ".join(f"{place} {count}" for place, count in found["places"].items())
    return check(not found["waits"], found["waits"], "a step", 0, places)


def runs(setting: Setting, script: str, *flags: Any) -> Result:
    folder = variants(setting, script)[flags]
    return sound(setting, folder, json.loads((folder / "result.json").read_text()))


@rows.once
def variants(setting: Setting, script: str) -> dict[tuple[str, ...], Path]:
    """Train the script with each set of flags that the section has for it, all in one process."""
    table = REPEATED if setting.folder.name == "thorough" else FLAGS
    wanted = [flags for flags, scripts in table.items() if script in scripts]
    if setting.dry_run:
        wanted = [flags for flags in wanted if " ".join((script, *flags)) in DRY]
    if setting.folder.name == "smoke":
        wanted = [()]
    words, folders, commands = small_images(setting, script), {}, []
    steps = ["--max_steps", setting.size(20, 2), "--log_every", setting.size(5, 1), "--telemetry_s", 0.5]
    steps += ["--max_val_images", setting.size(4096, 64)]
    for flags in wanted:
        folders[flags] = setting.folder / "_".join([script, *flags]).replace("--", "")
        commands.append([*words, *rows.run_flags(setting, folders[flags], words), *steps, *flags])
    rows.train_all(setting, script, commands)
    return folders


def sound(setting: Setting, folder: Path, result: dict[str, Any]) -> Result:
    """Finished, with a loss in each line; on a GPU with memory and utilisation, too."""
    problems = [] if result["status"] == "finished" else [f"status {result['status']}"]
    losses = [x["train/loss"] for x in read_lines(folder / "metrics.jsonl") if "train/loss" in x]
    if not losses or not all(loss < 100 for loss in losses):
        problems.append(f"losses {losses}")
    if not setting.dry_run and importlib.util.find_spec("pynvml"):
        samples = [sample for file in folder.glob("telemetry-*.jsonl") for sample in read_lines(file)]
        gpus = [gpu for sample in samples for gpu in sample.get("gpus", [])]
        problems += [] if any(gpu.get("memory_gib") for gpu in gpus) else ["no GPU memory in the telemetry"]
        problems += [] if "cuda" in str(result["device"]).lower() or gpus else ["it trained on the CPU"]
    note = "; ".join(problems) or f"loss {losses[0]:.3f} to {losses[-1]:.3f}, {result['mixed_precision']}"
    return check(not problems, round(result["peak_memory_gib"], 3), "GiB", "finished", note)


# --- Bits: two equal runs, and a run that was stopped and resumed


def determinism() -> dict[str, Row]:
    """A dry run has CNN-A's: on a CPU the bits of all scripts are the same for the same reason."""
    found: dict[str, Row] = {}
    for script in SCRIPTS:
        kind = row if script == "train_cnn_a" else on_gpu
        found[f"{script}, twice, --deterministic"] = kind(twice, script, "--deterministic")
        found[f"{script}, resumed, --deterministic"] = kind(resumed, script)
        found[f"{script}, with and without a step graph, --deterministic"] = kind(graphed, script)
    return found


def twice(setting: Setting, script: str, *flags: str) -> Result:
    first, second = (trainings(setting, script, *flags)[name] for name in ("first", "second"))
    return same(first, second) if flags else same(first, second, "anything")


def graphed(setting: Setting, script: str) -> Result:
    """What the graph has frozen would show: a seed, a learning rate, an input."""
    found = trainings(setting, script, "--deterministic")
    return same(found["without a graph"], found["with a graph"])


def resumed(setting: Setting, script: str) -> Result:
    found = trainings(setting, script, "--deterministic")
    return same(found["first"], found["resumed"])


@rows.once
def trainings(setting: Setting, script: str, *flags: str) -> dict[str, Path]:
    """Train some steps several times, all in one process. Return the folder of each last checkpoint."""
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


def same(one: Path, other: Path, promised: Any = 0) -> Result:
    a, b = (load_file(folder / "model.safetensors") for folder in (one, other))
    assert a.keys() == b.keys()
    off = max(float((a[name].double() - b[name].double()).abs().max()) for name in a if a[name].numel())
    unit = "largest difference of a weight"
    return Result(off, unit, promised) if promised else check(off == 0, off, unit, 0)


# --- Out of memory, beside a process that holds most of the GPU

FREE_GIB = 6  # what the ballast leaves
BALLAST = """
import sys, torch
free, _ = torch.cuda.mem_get_info()
held = torch.empty(max(0, free - int(float(sys.argv[1]) * 2**30)), dtype=torch.uint8, device="cuda")
print("held", flush=True)
sys.stdin.read()
"""
# A dry run limits memory as find_batch_size.py does.
LIMITED = """
import resource, runpy, sys
resource.setrlimit(resource.RLIMIT_DATA, (2**32, 2**32))
del sys.argv[0]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


def memory() -> dict[str, Row]:
    return {"out of memory is one line": one_line, "find_batch_size.py": search}


@contextlib.contextmanager
def ballast() -> Iterator[None]:
    """Holds the GPU's memory but FREE_GIB, in another process."""
    words = [sys.executable, "-c", BALLAST, str(FREE_GIB)]
    with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout
            assert process.stdout.readline() == "held\n"
            yield
        finally:
            process.kill()


def one_line(setting: Setting) -> Result:
    """A batch of all generated images, enlarged: it needs 40 times what is free."""
    words = [*small_images(setting, "train_cnn_b"), "--width", 64, "--batch_size", 4096, "--image_size", 128]
    words += rows.run_flags(setting, setting.folder / "full", words)
    with ballast() if not setting.dry_run else contextlib.nullcontext():
        done = rows.command(setting, ["-c", LIMITED, *words] if setting.dry_run else words)
    found = re.findall(r"^error: out of memory.*", done.output, re.MULTILINE)
    holds = done.status not in (0, None) and len(found) == 1 and "Traceback" not in done.output
    note = (found or done.output.splitlines()[-1:] or [""])[0][:200]
    return check(holds, promised="one line", note=note)


def search(setting: Setting) -> Result:
    """In a dry run CNN-A under a limit of memory, which stands for the GPU's."""
    file, script = setting.folder / "found.json", "train_cnn_a" if setting.dry_run else "train_cnn_b"
    limit = ["--memory_limit_gib", 2, "--quantum", 1024] if setting.dry_run else ["--quantum", 256]
    config = ["--config_file", "accelerate_configs/single_gpu.yaml", "--output", file]
    words = ["find_batch_size.py", *config, *limit, *small_images(setting, script)]
    words += ["--cache_dir", setting.folder.parent / "cache"]
    with ballast() if not setting.dry_run else contextlib.nullcontext():
        rows.succeeds(setting, [*words, "--widths", "32,64,128"] if setting.dry_run else words)
    found = json.loads(file.read_text())
    tried = f"{len(found['trials'])} trials, knee {found.get('knee')}"
    return check(found["answer"] > 0, found["answer"], "images", "above 0", tried)
