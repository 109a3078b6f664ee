"""Fixture with a trained run that several tests of scripts read."""

from pathlib import Path

import pytest

from tests.conftest import CNN, python, run

QUICK = ["--data", "digits", "--trackers", "none", "--mixed_precision", "no", "--epochs", "1"]


@pytest.fixture(scope="session")
def trained(tmp_path_factory, cache) -> Path:
    """Return a run on the digits with correct and wrong predictions.

    Tests write nothing to it except reports.
    """
    folder = tmp_path_factory.mktemp("trained") / "run"
    run([*python(), *CNN, *QUICK, *cache, "--output_dir", folder])
    return folder
