"""Every train script for 20 steps, its telemetry and memory checked; also compiled, in fp16, ..."""

import json
from pathlib import Path
from typing import Any

from benchmarks.gpu.rows import FAIL, OK, Result, Row, Setting, Skip, small_images, train

SCRIPTS = ("train_cnn_a", "train_cnn_b", "train_vit")


def checks() -> dict[str, Row]:
    found: dict[str, Row] = {"train_hello": hello}
    found |= {script: trained(script) for script in SCRIPTS}
    found |= {f"{script}, fp16": trained(script, "--mixed_precision", "fp16") for script in SCRIPTS}
    found["train_vit, activation checkpointing"] = trained("train_vit", "--grad_checkpointing")
    found |= {f"{script}, compiled": trained(script, "--compile", "default") for script in SCRIPTS}
    return found


def hello(setting: Setting) -> Result:
    folder, result = train(setting, "hello", ["train_hello.py"], "--epochs", 2)
    return checked(setting, folder, result)


def trained(script: str, *flags: Any) -> Row:
    def row(setting: Setting) -> Result:
        if setting.dry_run and "--compile" in flags and script != "train_cnn_a":
            raise Skip("takes minutes on a CPU")
        words = small_images(setting, script)
        steps = ["--max_steps", setting.size(20, 2), "--log_every", setting.size(5, 1), "--telemetry_s", 0.5]
        name = "_".join([script, *map(str, flags)]).replace("--", "")
        folder, result = train(setting, name, words, *steps, *flags)
        return checked(setting, folder, result)

    return row


def checked(setting: Setting, folder: Path, result: dict[str, Any]) -> Result:
    """Finished, with a loss in each line; on a GPU with memory and utilisation, too."""
    problems = [] if result["status"] == "finished" else [f"status {result['status']}"]
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    losses = [line["train/loss"] for line in lines if "train/loss" in line]
    if not losses or not all(loss < 100 for loss in losses):
        problems.append(f"losses {losses}")
    if not setting.dry_run:
        samples = [
            json.loads(line)
            for file in folder.glob("telemetry-*.jsonl")
            for line in file.read_text().splitlines()
        ]
        gpus = [gpu for sample in samples for gpu in sample.get("gpus", [])]
        problems += [] if any(gpu.get("memory_gib") for gpu in gpus) else ["no GPU memory in the telemetry"]
        problems += [] if "cuda" in str(result["device"]).lower() or gpus else ["it trained on the CPU"]
    note = "; ".join(problems) or f"loss {losses[0]:.3f} to {losses[-1]:.3f}, {result['mixed_precision']}"
    return Result(round(result["peak_memory_gib"], 3), "GiB", FAIL if problems else OK, note)
