"""Tests that a failing comparison names the broken promise, the step and both values."""

from pathlib import Path

import pytest
import torch

from tests.support import compare

LOG = [{"step": 3, "train/loss": 1.5, "train/lr": 0.1}]


@pytest.mark.parametrize(
    ("log", "message"),
    [
        (
            [LOG[0] | {"train/loss": 1.6}],
            "losses within 1e-05: train/loss of step 3 is 1.6, of the reference 1.5",
        ),
        ([LOG[0] | {"train/lr": 0.2}], "learning rates: train/lr of step 3 is 0.2, of the reference 0.1"),
        ([*LOG, {"step": 4}], "steps and learning rates: step of step 4 is 4, of the reference None"),
    ],
)
def test_a_difference_of_losses_is_named(log, message):
    compare.assert_same_losses(LOG, LOG)
    with pytest.raises(AssertionError, match=message):
        compare.assert_same_losses(log, LOG)


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (torch.tensor([1.0, 2.5]), "equal bits: w, element 1, of step step_3 is 2.5, of the reference 2.0"),
        (torch.tensor([torch.nan, 2.0]), "element 0, of step step_3 is nan, of the reference 1.0"),
        (torch.tensor([1.0]), "w of step step_3 is .*1,.*, of the reference .*2,"),
    ],
)
def test_a_difference_of_tensors_is_named(value, message, monkeypatch):
    tensors_of = {Path("ours"): {"w": value}, Path("theirs"): {"w": torch.tensor([1.0, 2.0])}}
    monkeypatch.setattr(compare, "latest", lambda folder: folder / "step_3")
    monkeypatch.setattr(compare, "tensors", lambda checkpoint: tensors_of[checkpoint.parent])
    compare.assert_same_tensors(Path("theirs"), Path("theirs"))
    with pytest.raises((AssertionError, pytest.fail.Exception), match=message):
        compare.assert_same_tensors(Path("ours"), Path("theirs"))
