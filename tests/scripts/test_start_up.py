"""The commands around a training answer --help and a wrong flag without importing torch."""

import re
import subprocess
import sys

import pytest

from tests.conftest import ROOT

COMMANDS = ("launch.py", "doctor.py", "find_batch_size.py", "logbook.py", "plan.py", "prep_imagenet.py")
HEAVY = {"torch", "accelerate", "deepspeed", "timm", "transformers"}
HEAVY |= {"datasets", "scipy", "boto3", "matplotlib"}


def imported(*words: str) -> tuple[int, set[str], str]:
    """Runs `python WORDS`. Returns its exit status, the packages that it imported, and its output."""
    done = subprocess.run(
        [sys.executable, "-X", "importtime", *words], cwd=ROOT, capture_output=True, text=True, timeout=60
    )
    names = re.findall(r"^import time:.*\| +(\S+)$", done.stderr, re.MULTILINE)
    return done.returncode, {name.partition(".")[0] for name in names}, done.stdout + done.stderr


@pytest.mark.parametrize("command", COMMANDS)
def test_help_and_a_wrong_flag_are_answered_without_torch(command):
    status, packages, output = imported(command, "--help")
    assert status == 0
    assert "usage: " in output
    assert not packages & HEAVY
    status, packages, output = imported(command, "--no_such_flag", "train_hello.py")
    assert status == 2, output
    assert not packages & HEAVY


def test_a_script_that_trains_is_seen_to_import_torch():
    assert "torch" in imported("-c", "import train_hello")[1]
