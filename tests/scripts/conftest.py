"""Fixture with a trained run that several script tests read."""

from pathlib import Path

import pytest

from tests.conftest import CNN, python, run

QUICK = ["--data", "digits", "--trackers", "none", "--mixed_precision", "no", "--epochs", "1"]


@pytest.fixture(scope="session")
def trained(tmp_path_factory, cache) -> Path:
    """Train a small model on the digits and return its run, which contains correct and wrong predictions.

    Tests must not write anything to the run folder except reports.
    """
    folder = tmp_path_factory.mktemp("trained") / "run"
    run([*python(), *CNN, *QUICK, *cache, "--output_dir", folder])
    return folder
