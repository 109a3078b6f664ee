"""What commands import: --help and a wrong flag need no torch, `make train` nothing that it does not use, and
a script no module of common/ that a flag alone needs."""

import os
import re
import shlex
import subprocess
import sys

import pytest

from tests.conftest import BIN, ROOT

COMMANDS = ("launch.py", "doctor.py", "find_batch_size.py", "logbook.py", "plan.py", "prep_imagenet.py")
HEAVY = {"torch", "accelerate", "deepspeed", "timm", "transformers"}
HEAVY |= {"datasets", "scipy", "boto3", "matplotlib"}
OF_FLAGS = {
    "checkpoint.mirror",
    "data.shards",
    "data.shard_cache",
    "system.s3",
    "run.plots",
    "telemetry.sampling",
}
MODULES = {"train_hello": 48, "train_cnn_a": 59}  # of common/, with packages: the most that a script loads


def imported(*words: str) -> tuple[int, set[str], str]:
    """Runs `python WORDS`. Returns its status, the packages that its processes import, and its output."""
    env = os.environ | {"PYTHONPROFILEIMPORTTIME": "1"}
    command = [sys.executable, *words]
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=120)
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


def test_make_train_imports_no_heavy_package_that_it_does_not_use(tmp_path, cache):
    [command] = re.findall(r"^\t\$\(VENV\)/bin/(accelerate-launch .*)", (ROOT / "Makefile").read_text(), re.M)
    small = ["--max_steps", "2", "--output_dir", str(tmp_path / "run"), *map(str, cache)]
    status, packages, output = imported(*shlex.split(f"{BIN}/{command}"), *small)
    assert status == 0, output
    assert "were not passed" not in output
    assert "│ speed" not in output  # of two steps
    assert {"torch", "accelerate"} < packages
    assert not packages & {"deepspeed", "transformers", "wandb", "evaluate", "timm", "datasets", "onnx"}


@pytest.mark.parametrize(("script", "most"), MODULES.items())
def test_a_script_loads_no_module_that_a_flag_alone_needs(script, most):
    code = f"import sys, {script}; print(*(name for name in sys.modules if name.startswith('common.')))"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=120)
    loaded = {name.removeprefix("common.") for name in done.stdout.split()}
    assert "run.run" in loaded, done.stderr
    assert not loaded & OF_FLAGS
    assert len(loaded) <= most, sorted(loaded)
