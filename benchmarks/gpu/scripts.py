"""Every train script for 20 steps, its telemetry and memory checked; also compiled, in fp16, ..."""

import importlib.util
import json
from pathlib import Path
from typing import Any

from benchmarks.gpu.rows import (
    FAIL,
    OK,
    Result,
    Row,
    Setting,
    Skip,
    run_flags,
    small_images,
    succeeds,
    trained,
)

SCRIPTS = ("train_cnn_a", "train_cnn_b", "train_vit")


MODES = ("default", "max-autotune")  # reduce-overhead is for the CNNs: a ViT's blocks refuse it


def smoke() -> dict[str, Row]:
    """What must work before anything else is worth its time. Its process loads CUDA's libraries first."""
    return {"a few steps": runs("train_cnn_a")}


def checks() -> dict[str, Row]:
    found: dict[str, Row] = {"train_hello": hello, "train_hello, waits": hello_waits}
    found |= {script: runs(script) for script in SCRIPTS}
    found |= {f"{script}, fp16": runs(script, "--mixed_precision", "fp16") for script in SCRIPTS}
    found["train_vit, activation checkpointing"] = runs("train_vit", "--grad_checkpointing")
    for mode in MODES:
        found |= {f"{script}, --compile {mode}": runs(script, "--compile", mode) for script in SCRIPTS}
    for script in SCRIPTS[:2]:
        found[f"{script}, --compile reduce-overhead"] = runs(script, "--compile", "reduce-overhead")
        found[f"{script}, --step_graph"] = runs(script, "--step_graph")
    return found


def hello(setting: Setting) -> Result:
    with trained(setting, "hello", ["train_hello.py"], "--epochs", 2) as (folder, result):
        return checked(setting, folder, result)


def hello_waits(setting: Setting) -> Result:
    words = ["train_hello.py", "--data_size", 65536]
    probe = ["-m", "benchmarks.gpu.probe", "waits", "--steps", setting.size(20, 3)]
    output = succeeds(setting, [*probe, *words, *run_flags(setting, setting.folder / "waits", words)])
    waits = json.loads(output.splitlines()[-1])["waits"]
    note = ", ".join(f"{place} {count}" for place, count in waits["places"].items())
    return Result(waits["waits"], "a step", 0, FAIL if waits["waits"] else OK, note)


def runs(script: str, *flags: Any) -> Row:
    def row(setting: Setting) -> Result:
        if setting.is_small and "--compile" in flags and (*flags[1:], script) != ("default", "train_cnn_a"):
            raise Skip("takes minutes on a CPU")
        words = small_images(setting, script)
        steps = ["--max_steps", setting.size(20, 2), "--log_every", setting.size(5, 1), "--telemetry_s", 0.5]
        steps += ["--max_val_images", setting.size(4096, 64)]
        name = "_".join([script, *map(str, flags)]).replace("--", "")
        with trained(setting, name, words, *steps, *flags) as (folder, result):
            return checked(setting, folder, result)

    return row


def checked(setting: Setting, folder: Path, result: dict[str, Any]) -> Result:
    """Finished, with a loss in each line; on a GPU with memory and utilisation, too."""
    problems = [] if result["status"] == "finished" else [f"status {result['status']}"]
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    losses = [line["train/loss"] for line in lines if "train/loss" in line]
    if not losses or not all(loss < 100 for loss in losses):
        problems.append(f"losses {losses}")
    if not setting.dry_run and importlib.util.find_spec("pynvml"):
        samples = [
            json.loads(line)
            for file in folder.glob("telemetry-*.jsonl")
            for line in file.read_text().splitlines()
        ]
        gpus = [gpu for sample in samples for gpu in sample.get("gpus", [])]
        problems += [] if any(gpu.get("memory_gib") for gpu in gpus) else ["no GPU memory in the telemetry"]
        problems += [] if "cuda" in str(result["device"]).lower() or gpus else ["it trained on the CPU"]
    note = "; ".join(problems) or f"loss {losses[0]:.3f} to {losses[-1]:.3f}, {result['mixed_precision']}"
    return Result(round(result["peak_memory_gib"], 3), "GiB", "finished", FAIL if problems else OK, note)
