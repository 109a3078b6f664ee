"""The recipes with goals on CIFAR-10: accuracy, and the seconds of training with and without their start."""

import json
from pathlib import Path
from typing import Any

from benchmarks.gpu.rows import Result, Row, Setting, Skip, small_images, trained

FAST = ("--config", "recipes/cnn_b_cifar10_fast.yaml")
IMAGES = 50_000  # of CIFAR-10 to train on


def rows() -> dict[str, Row]:
    """Estimates and goals: seconds of the whole training on one H100, and on one H200."""
    return {
        "fast recipe, eager": trains("train_cnn_b", 0.94, 25, 15, *FAST, "--compile", "no"),
        "fast recipe, step graph": trains("train_cnn_b", 0.94, 22, 15, *FAST, "--step_graph"),
        "fast recipe, compiled": trains("train_cnn_b", 0.94, 18, 15, *FAST, "--compile", "default"),
        "CNN-A": trains("train_cnn_a", 0.75, 4, None),
    }


def trains(script: str, accuracy: float, expected_s: float, goal_s: float | None, *flags: Any) -> Row:
    def row(setting: Setting) -> dict[str, Result]:
        if setting.is_small and "default" in flags:
            raise Skip("takes minutes on a CPU")
        small = ["--epochs", 2, "--max_steps", 4, "--log_every", 1, "--max_val_images", 64]
        words = [*small_images(setting, script), *flags, *setting.size([], small), "--telemetry_s", 0]
        with trained(setting, script, words) as (folder, result):
            seconds, settled, evaluations = times(folder, result)
        # Generated images are fewer: the time is that of as many steps as CIFAR-10 has.
        share = result["epochs"] * IMAGES / (result["steps"] * result["batch_size"])
        is_whole = setting.data != "synthetic"
        seconds, settled = (s if is_whole else s * share for s in (seconds, settled))
        verdict = setting.judge(settled <= goal_s) if goal_s else ""
        note = f"goal {goal_s} s" if goal_s else ""
        note += "" if is_whole else "; as for CIFAR-10's number of images"
        reached = round(result["final_accuracy"], 4)
        judged = setting.judge(reached >= accuracy) if is_whole else ""
        return {
            "training": Result(round(seconds, 1), "s", note="with autotuning and compilation"),
            "training after epoch 1": Result(round(settled, 1), "s", expected_s, verdict, note.lstrip("; ")),
            "evaluations": Result(round(sum(evaluations), 2), "s", note=f"the first {evaluations[0]:.2f} s"),
            "accuracy": Result(reached, "", f"at least {accuracy}" if is_whole else "", judged),
        }

    return row


def times(folder: Path, result: dict[str, Any]) -> tuple[float, float, list[float]]:
    """Seconds of training; epochs 2 to n times n / (n - 1), as the first autotunes and compiles; evaluations.

    Evaluations are no part of the training's seconds. The first one autotunes and compiles, too.
    """
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    per_epoch, epochs = result["steps"] / result["epochs"], result["epochs"]
    before, first_s, evaluations = 0, 0.0, []
    for last, line in zip([{}, *lines], lines, strict=False):
        if "train/images_per_s" in line and line["step"] <= per_epoch:
            first_s += (line["step"] - before) * result["batch_size"] / line["train/images_per_s"]
            before = line["step"]
        if "val/loss" in line and "wall_s" in last:
            evaluations.append(line["wall_s"] - last["wall_s"])
    return result["train_s"], (result["train_s"] - first_s) * epochs / (epochs - 1), evaluations
