"""Bits: two equal runs, and a run that was stopped and resumed, with --deterministic and without."""

import json
from pathlib import Path
from typing import Any

from safetensors.torch import load_file

from benchmarks.gpu.rows import FAIL, OK, Result, Row, Setting, one_at_a_time, small_images, train

SCRIPTS = ("train_cnn_a", "train_cnn_b", "train_vit")


def checks() -> dict[str, Row]:
    found: dict[str, Row] = {}
    for script in SCRIPTS:
        found[f"{script}, twice, --deterministic"] = twice(script, "--deterministic")
        found[f"{script}, resumed, --deterministic"] = resumed(script)
    # In fp32 attention has another kernel.
    found["train_vit, twice, --deterministic, fp32"] = twice(
        "train_vit", "--deterministic", "--mixed_precision", "no"
    )
    found["train_cnn_a, twice, without the flag"] = twice("train_cnn_a")
    return found


def twice(script: str, *flags: str) -> Row:
    def row(setting: Setting) -> Result:
        runs = [go(setting, script, f"{script}_{number}{len(flags)}", *flags) for number in (1, 2)]
        off = difference(*runs)
        if not flags:
            return Result(off, "largest difference of a weight", "anything")  # nothing is promised
        return Result(off, "largest difference of a weight", 0, OK if off == 0 else FAIL)

    return row


def resumed(script: str) -> Row:
    def row(setting: Setting) -> Result:
        straight = go(setting, script, f"{script}_11", "--deterministic")  # the first row's
        half = setting.size(10, 2)
        go(setting, script, f"{script}_resumed", "--deterministic", "--max_steps", half)
        off = difference(straight, go(setting, script, f"{script}_resumed", "--deterministic"))
        return Result(off, "largest difference of a weight", 0, OK if off == 0 else FAIL)

    return row


def go(setting: Setting, script: str, name: str, *flags: Any) -> Path:
    """Trains some steps, unless that is done, and returns the last checkpoint's folder."""
    steps = ["--max_steps", setting.size(20, 4), "--checkpoint_every", 1000, "--max_val_images", 64]
    file = setting.folder / name / "result.json"
    with one_at_a_time(file.parent):
        if file.exists() and (found := json.loads(file.read_text()))["steps"] == steps[1]:
            return file.parent / found["checkpoint"]
        folder, result = train(setting, name, small_images(setting, script), *steps, *flags)
        return folder / result["checkpoint"]


def difference(one: Path, other: Path) -> float:
    a, b = (load_file(folder / "model.safetensors") for folder in (one, other))
    assert a.keys() == b.keys()
    return max(float((a[name].double() - b[name].double()).abs().max()) for name in a if a[name].numel())
