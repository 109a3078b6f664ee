"""Comparisons of two runs: what a resumed or differently started one must have in common with another.

A failure names the promise that is broken, the step, and both values.
"""

import json
from itertools import zip_longest
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.conftest import latest, lines, metrics, result, tensors

LOSSES = {"train/loss", "val/loss", "test/loss"}


def without_times(log: list[dict]) -> list[dict]:
    """The lines without what differs from run to run."""
    times = ("train/images_per_s", "train/mfu_pct", "wall_s")
    return [{name: value for name, value in line.items() if name not in times} for line in log]


def said(promise: str, step: object, name: str, ours: Any, theirs: Any) -> str:
    return f"{promise}: {name} of step {step} is {ours}, of the reference {theirs}"


def assert_same_losses(ours: list[dict], theirs: list[dict], within: float = 1e-5) -> None:
    """The same steps and learning rates; losses of training and evaluation as near as that."""
    for our, their in zip_longest(ours, theirs, fillvalue={}):
        step = our.get("step", their.get("step"))
        for name in ("step", "train/lr"):
            values = our.get(name), their.get(name)
            assert values[0] == values[1], said("equal steps and learning rates", step, name, *values)
        for name in LOSSES & their.keys():
            values = our.get(name), their[name]
            told = said(f"losses within {within:g}", step, name, *values)
            assert values[0] == pytest.approx(values[1], abs=within), told


def assert_same_tensors(folder: Path, reference: Path, tolerance: float = 0, without: str = "\0") -> None:
    """Those of the newest checkpoints, of one step. without: a part of names that are left out."""
    ours, theirs = tensors(latest(folder)), tensors(latest(reference))
    promise, step = f"tensors within {tolerance:g}" if tolerance else "equal bits", latest(folder).name
    assert step == latest(reference).name, said(promise, step, "the last checkpoint", step, latest(reference))
    assert ours.keys() == theirs.keys(), f"{promise}: {step} has other names than the reference"
    for name in (name for name in ours if without not in name):
        mine, other = ours[name], theirs[name]
        kinds = [(tensor.dtype, tuple(tensor.shape)) for tensor in (mine, other)]
        assert kinds[0] == kinds[1], said(promise, step, name, *kinds)
        if not (apart := (mine - other).abs().flatten() <= tolerance).all():  # also for NaN
            at = int(apart.to(torch.int8).argmin())
            values = mine.flatten()[at].item(), other.flatten()[at].item()
            pytest.fail(said(promise, step, f"{name}, element {at},", *values))


def assert_same_training(folder: Path, reference: Path, begin: int = -1) -> None:
    """After step `begin`: losses within 1e-5, learning rates and samples equal, tensors within 1e-4."""
    logs = ([line for line in metrics(f) if line["step"] > begin] for f in (folder, reference))
    assert_same_losses(*logs)
    ours, theirs = (lines(f / "samples.jsonl") for f in (folder, reference))
    assert_same_lines("equal samples", ours, [line for line in theirs if line["step"] > begin])
    assert ours, "no samples"
    assert_same_tensors(folder, reference, tolerance=1e-4)


def assert_same_lines(promise: str, ours: list[dict], theirs: list[dict]) -> None:
    for our, their in zip_longest(ours, theirs, fillvalue={}):
        step = our.get("step", their.get("step"))
        for name in {**our, **their}:
            values = our.get(name), their.get(name)
            assert values[0] == values[1], said(promise, step, name, *values)


def assert_same_end(folder: Path, reference: Path) -> None:
    """Both have finished with the same bits."""
    found, expected = result(folder), result(reference)
    assert found["status"] == expected["status"] == "finished"
    assert_same_lines("equal logs", *(without_times(metrics(f)) for f in (folder, reference)))
    for name in ("best_accuracy", "best_step", "final_accuracy", "final_loss"):
        told = said("equal results", found["steps"], name, found[name], expected[name])
        assert found[name] == expected[name], told
    assert_same_tensors(folder, reference)


def assert_same_state(folder: Path, reference: Path) -> None:
    """state.json of the newest checkpoints, but for times."""
    states = [json.loads((latest(f) / "state.json").read_text()) for f in (folder, reference)]
    for state in states:
        assert state.pop("train_s") > 0
        assert state.pop("wall_s") == pytest.approx(sum(state.pop("spent_s").values()), abs=0.2)
    step = states[0]["step"]
    for name in {**states[0], **states[1]}:
        values = states[0].get(name), states[1].get(name)
        assert values[0] == values[1], said("an equal state", step, name, *values)
