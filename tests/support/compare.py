"""Comparisons of two runs, for example a resumed run and an uninterrupted run.

Each failure message names the broken promise, the step and both values.
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
    """Return the log lines without times, speeds and other values that differ from run to run."""
    times = ("train/images_per_s", "train/mfu_pct", "wall_s")
    return [{name: value for name, value in line.items() if name not in times} for line in log]


def difference(promise: str, step: object, name: str, value: Any, reference: Any) -> str:
    return f"{promise}: {name} of step {step} is {value}, of the reference {reference}"


def assert_same_losses(log: list[dict], reference: list[dict], within: float = 1e-5) -> None:
    """Check that two logs contain the same steps and learning rates.

    The logs' losses may differ by `within`.
    """
    for line, reference_line in zip_longest(log, reference, fillvalue={}):
        step = line.get("step", reference_line.get("step"))
        for name in ("step", "train/lr"):
            values = line.get(name), reference_line.get(name)
            assert values[0] == values[1], difference("equal steps and learning rates", step, name, *values)
        for name in LOSSES & reference_line.keys():
            values = line.get(name), reference_line[name]
            message = difference(f"losses within {within:g}", step, name, *values)
            assert values[0] == pytest.approx(values[1], abs=within), message


def assert_same_tensors(folder: Path, reference: Path, tolerance: float = 0, without: str = "\0") -> None:
    """Compare the tensors of the newest checkpoints, which must have the same step.

    Args:
        folder: Run folder.
        reference: Run folder with the expected tensors.
        tolerance: Maximum absolute difference. 0 requires bitwise identical tensors.
        without: Text in the names of tensors that are not compared.
    """
    tensors_of_run, expected = tensors(latest(folder)), tensors(latest(reference))
    promise, step = f"tensors within {tolerance:g}" if tolerance else "equal bits", latest(folder).name
    assert step == latest(reference).name, difference(
        promise, step, "the last checkpoint", step, latest(reference)
    )
    assert tensors_of_run.keys() == expected.keys(), f"{promise}: {step} has other names than the reference"
    for name in (name for name in tensors_of_run if without not in name):
        tensor, expected_tensor = tensors_of_run[name], expected[name]
        types = [(item.dtype, tuple(item.shape)) for item in (tensor, expected_tensor)]
        assert types[0] == types[1], difference(promise, step, name, *types)
        # NaN counts as a difference, because the comparison is False
        is_close = (tensor - expected_tensor).abs().flatten() <= tolerance
        if not is_close.all():
            at = int(is_close.to(torch.int8).argmin())
            values = tensor.flatten()[at].item(), expected_tensor.flatten()[at].item()
            pytest.fail(difference(promise, step, f"{name}, element {at},", *values))


def assert_same_training(folder: Path, reference: Path, begin: int = -1) -> None:
    """Compare two runs after step `begin`.

    Losses must agree within 1e-5 and tensors within 1e-4. Learning rates and samples must be identical.
    """
    logs = ([line for line in metrics(f) if line["step"] > begin] for f in (folder, reference))
    assert_same_losses(*logs)
    samples, reference_samples = (lines(f / "samples.jsonl") for f in (folder, reference))
    assert_same_lines("equal samples", samples, [line for line in reference_samples if line["step"] > begin])
    assert samples, "no samples"
    assert_same_tensors(folder, reference, tolerance=1e-4)


def assert_same_lines(promise: str, log: list[dict], reference: list[dict]) -> None:
    for line, reference_line in zip_longest(log, reference, fillvalue={}):
        step = line.get("step", reference_line.get("step"))
        for name in {**line, **reference_line}:
            values = line.get(name), reference_line.get(name)
            assert values[0] == values[1], difference(promise, step, name, *values)


def assert_same_end(folder: Path, reference: Path) -> None:
    """Check that both runs have finished with bitwise identical results."""
    facts, expected = result(folder), result(reference)
    assert facts["status"] == expected["status"] == "finished"
    assert_same_lines("equal logs", *(without_times(metrics(f)) for f in (folder, reference)))
    for name in ("best_accuracy", "best_step", "final_accuracy", "final_loss"):
        message = difference("equal results", facts["steps"], name, facts[name], expected[name])
        assert facts[name] == expected[name], message
    assert_same_tensors(folder, reference)


def assert_same_state(folder: Path, reference: Path) -> None:
    """Compare the newest state.json files of two runs, ignoring times."""
    states = [json.loads((latest(f) / "state.json").read_text()) for f in (folder, reference)]
    for state in states:
        assert state.pop("train_s") > 0
        assert state.pop("wall_s") == pytest.approx(sum(state.pop("spent_s").values()), abs=0.2)
    step = states[0]["step"]
    for name in {**states[0], **states[1]}:
        values = states[0].get(name), states[1].get(name)
        assert values[0] == values[1], difference("an equal state", step, name, *values)
