"""Fixture with a run that several telemetry tests read."""

from pathlib import Path

import pytest

from tests.conftest import CNN, python, run

DIGITS = [*CNN, "--data", "digits", "--batch_size", "96", "--per_device_batch_size", "48"]
DIGITS += ["--mixed_precision", "no", "--max_steps", "60", "--trackers", "none", "--log_every", "1"]


@pytest.fixture(scope="session")
def trained(tmp_path_factory, cache) -> tuple[Path, str]:
    """Train CNN-A with one process and frequent telemetry samples, and return its run folder and output."""
    folder = tmp_path_factory.mktemp("telemetry") / "run"
    return folder, run([*python(), *DIGITS, "--telemetry_s", "0.05", *cache, "--output_dir", folder])


@pytest.fixture(scope="session")
def folder(trained) -> Path:
    return trained[0]
