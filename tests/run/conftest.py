"""A run that several modules look at."""

import re
from pathlib import Path

import pytest

from tests.conftest import CNN, run, torchrun

FLAGS = ["--data", "digits", "--batch_size", "64", "--epochs", "2", "--max_steps", "30", "--log_every", "10"]


WANDB = {"WANDB_RUN_ID": "chosen1", "WANDB_NAME": "mine", "WANDB_ENTITY": "we", "WANDB_RUN_GROUP": "group"}
WANDB |= {"WANDB_TAGS": "a,b", "WANDB_NOTES": "some notes"}


@pytest.fixture(scope="session")
def folder(tmp_path_factory, cache) -> Path:
    """The folder of a run of two processes with both trackers, without a W&B key; W&B's variables are set."""
    parent = tmp_path_factory.mktemp("shared") / "weights"
    words = [*torchrun(2), *CNN, *FLAGS, "--trackers", "tensorboard,wandb", "--telemetry_s", "0.1", *cache]
    output = run([*words, "--model_folder", parent], env=WANDB)
    assert output.count("W&B has no key (wandb login): the run is logged offline") == 1
    assert not re.search("W&B does not|W&B has stopped|not have the pictures", output)
    (found,) = (parent / "train_cnn_a").iterdir()
    return found
