"""Comparisons of two runs: what a resumed or differently started one must have in common with another."""

import json
from pathlib import Path

import pytest

from tests.conftest import latest, lines, metrics, result, tensors

LOSSES = {"train/loss", "val/loss", "test/loss"}


def without_times(log: list[dict]) -> list[dict]:
    """The lines without what differs from run to run."""
    times = ("train/images_per_s", "train/mfu_pct", "wall_s")
    return [{name: value for name, value in line.items() if name not in times} for line in log]


def assert_same_losses(ours: list[dict], theirs: list[dict], within: float = 1e-5) -> None:
    """The same steps and learning rates; losses of training and evaluation as near as that."""
    assert [line["step"] for line in ours] == [line["step"] for line in theirs]
    for our, their in zip(ours, theirs, strict=True):
        assert our.get("train/lr") == their.get("train/lr")
        for name in LOSSES & their.keys():
            assert our[name] == pytest.approx(their[name], abs=within), (name, our["step"])


def assert_same_tensors(folder: Path, reference: Path, tolerance: float = 0, without: str = "\0") -> None:
    """Those of the newest checkpoints, of one step. without: a part of names that are left out."""
    ours, theirs = tensors(latest(folder)), tensors(latest(reference))
    assert latest(folder).name == latest(reference).name
    assert ours.keys() == theirs.keys()
    for name in (name for name in ours if without not in name):
        assert ours[name].dtype == theirs[name].dtype
        assert ((ours[name] - theirs[name]).abs() <= tolerance).all(), name


def assert_same_training(folder: Path, reference: Path, begin: int = -1) -> None:
    """After step `begin`: losses within 1e-5, learning rates and samples equal, tensors within 1e-4."""
    logs = ([line for line in metrics(f) if line["step"] > begin] for f in (folder, reference))
    assert_same_losses(*logs)
    samples = [lines(f / "samples.jsonl") for f in (folder, reference)]
    assert samples[0] == [line for line in samples[1] if line["step"] > begin] != []
    assert_same_tensors(folder, reference, tolerance=1e-4)


def assert_same_end(folder: Path, reference: Path) -> None:
    """Both have finished with the same bits."""
    assert result(folder)["status"] == result(reference)["status"] == "finished"
    assert without_times(metrics(folder)) == without_times(metrics(reference))
    for name in ("best_accuracy", "best_step", "final_accuracy", "final_loss"):
        assert result(folder)[name] == result(reference)[name], name
    assert_same_tensors(folder, reference)


def assert_same_state(folder: Path, reference: Path) -> None:
    """state.json of the newest checkpoints, but for times."""
    states = [json.loads((latest(f) / "state.json").read_text()) for f in (folder, reference)]
    for state in states:
        assert state.pop("train_s") > 0
        assert state.pop("wall_s") == pytest.approx(sum(state.pop("spent_s").values()), abs=0.2)
    assert states[0] == states[1]
