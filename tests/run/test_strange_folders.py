"""Tests that commands follow no link out of an untrusted run folder and that no pipe blocks a command."""

import json
import os
import shutil
from pathlib import Path

import pytest

from onecurve.checkpoint.weights import model_with_weights
from tests.conftest import CNN, Job, python, result, run

FLAGS = ["--data", "digits", "--batch_size", 64, "--mixed_precision", "no", "--log_every", 5, "--log_samples"]


@pytest.fixture(scope="module")
def begun(tmp_path_factory, cache) -> Path:
    """Return the folder of a run that still has steps to train."""
    folder = tmp_path_factory.mktemp("begun") / "run"
    run([*python(), *CNN, *FLAGS, *cache, "--max_steps", 10, "--output_dir", folder])
    return folder


@pytest.fixture
def strange(begun, tmp_path) -> Path:
    return shutil.copytree(begun, tmp_path / "strange")


COMMANDS = {
    "a resume": lambda folder: [*CNN, *FLAGS, "--max_steps", 20, "--output_dir", folder],
    "validate.py": lambda folder: ["validate.py", folder, "--mixed_precision", "no"],
    "verify.py": lambda folder: ["verify.py", folder, "--sample", 1],
}


def test_no_file_behind_a_link_is_overwritten(strange, cache, tmp_path):
    """Replace all files that the commands write, and their temporary files, with symbolic links."""
    target, report = tmp_path / "home" / "bashrc", strange / "validation" / "val_20"
    target.parent.mkdir()
    target.write_text("mine\n")
    report.mkdir(parents=True)
    written_files = [file for file in strange.rglob("*") if file.is_file() and "step_" not in str(file)]
    written_files += [strange / "verified.json", *(report / name for name in ("report.json", "worst.png"))]
    assert len(written_files) > 10
    for file in written_files:
        # These files stay, because the commands read them first
        if file.name not in ("recipe.json", "metrics.jsonl"):
            file.unlink(missing_ok=True)
            file.symlink_to(target)
        file.with_name(f".{file.name}.tmp").symlink_to(target)
    for command in COMMANDS.values():
        Job([*python(), *command(strange), *cache]).wait()
    assert result(strange)["steps"] == 20
    assert (report / "report.json").is_file()
    assert (strange / "verified.json").is_file()
    assert target.read_text() == "mine\n"
    assert list(target.parent.iterdir()) == [target]


LINKS = {"validation": "validate.py", "validation/val_10": "validate.py"}
LINKS |= dict.fromkeys(("checkpoints", "plots", "tensorboard"), "a resume")


@pytest.mark.parametrize("name", LINKS)
def test_a_folder_that_is_a_link_is_refused(name, strange, cache, tmp_path):
    target, link = tmp_path / "mine", strange / name
    link.mkdir(parents=True, exist_ok=True)
    link.rename(target)
    link.symlink_to(target)
    before = sorted(target.rglob("*"))
    status, output = Job([*python(), *COMMANDS[LINKS[name]](strange), *cache]).wait()
    assert (status, f"error: {link} is a symbolic link to {target}" in output) == (1, True), output
    assert sorted(target.rglob("*")) == before


PIPES = {
    "checkpoints/step_00000010/manifest.json": ("validate.py", "manifest.json is not a regular file"),
    "recipe.json": ("a resume", "recipe.json can't be read (the path is not a regular file)"),
    "metrics.jsonl": ("a resume", "the path is not a regular file"),
    "owner.json": ("a resume", "the path is not a regular file"),
    "result.json": ("a resume", None),
}


@pytest.mark.parametrize("name", PIPES)
def test_a_pipe_holds_no_command(name, strange, cache):
    command, message = PIPES[name]
    (strange / name).unlink(missing_ok=True)
    os.mkfifo(strange / name)
    status, output = Job([*python(), *COMMANDS[command](strange), *cache]).wait(60)
    assert (status == 0, "Traceback" in output) == (message is None, False), output
    assert (message or "") in output


def test_a_pipe_in_the_place_of_weights(tmp_path):
    os.mkfifo(tmp_path / "model.safetensors")
    with pytest.raises(
        ValueError, match=r"--weights .* is not a valid safetensors file: .*not a regular file"
    ):
        model_with_weights("test_vit", tmp_path / "model.safetensors", 10)


@pytest.mark.parametrize("step", ['"x"', "null", "[]", "true"])
def test_a_log_line_without_a_numeric_step_is_refused(step, strange, cache):
    with open(strange / "metrics.jsonl", "a") as log:
        log.write(f'{{"step": {step}, "train/loss": 1}}\n')
    status, output = Job([*python(), *COMMANDS["a resume"](strange), *cache]).wait(60)
    assert (status, "Traceback" in output) == (1, False), output
    assert f"metrics.jsonl contains a line with the invalid step {json.loads(step)!r}. Delete" in output
