"""verify.py on one finished run, and on copies of it in each of which one thing is not true."""

import hashlib
import json
import random
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from common.checkpoint.format import _digest
from common.report.page import page
from common.report.record import RunRecord
from tests.conftest import CNN, Job, full, lines, python, run
from tests.data.test_any_images import put
from tests.data.test_images import encode, picture

EVERY, STEPS = 8, 32  # a kept checkpoint, and all steps
FLAGS = [
    "--epochs",
    4,
    "--batch_size",
    8,
    "--per_device_batch_size",
    4,
    "--max_steps",
    STEPS,
    "--log_every",
    2,
]
FLAGS += ["--checkpoint_every", EVERY, "--keep_every", EVERY, "--checkpoint_s", 0, "--mixed_precision", "no"]
FLAGS += ["--trackers", "none", "--telemetry_s", 0, "--label_smoothing", 0.1, "--workers", 0]
STARTS = [0, 8, 16, 24]  # of the intervals


@pytest.fixture(scope="module")
def data(tmp_path_factory) -> Path:
    paths = [f"{split}/{c}/{k}.png" for split in ("train", "val") for c in "ab" for k in range(32)]
    return put(tmp_path_factory.mktemp("data") / "pictures", *paths)


@pytest.fixture(scope="module")
def finished(data, tmp_path_factory, cache) -> Path:
    folder = tmp_path_factory.mktemp("finished") / "run"
    run([*python(), *CNN, "--data", data, *FLAGS, *cache, "--output_dir", folder])
    return folder


def verified(folder: Path, cache: list, start: int, *flags) -> tuple[int, str, dict]:
    """The exit status, the output and the stamp, after a replay of the interval that begins at a step."""
    seed = next(s for s in range(100) if random.Random(s).sample(STARTS, 1) == [start])
    words = [*python(), "verify.py", folder, "--sample", 1, "--seed", seed, "--steps", 4, *flags, *cache]
    status, output = Job(words).wait()
    file = folder / "verified.json"
    return status, output, json.loads(file.read_text())["stamps"][-1] if file.exists() else {}


def copy_of(folder: Path, tmp_path: Path) -> Path:
    shutil.copytree(folder, tmp_path / "copy")
    (tmp_path / "copy" / "verified.json").unlink(missing_ok=True)
    return tmp_path / "copy"


def edit(file: Path, change) -> None:
    content = json.loads(file.read_text())
    change(content)
    file.write_text(json.dumps(content))


@pytest.mark.parametrize(
    "config", ["one process", *map(full, ("ddp_2gpu", "fsdp_2gpu", "zero2_2gpu", "zero3_4gpu"))]
)
def test_a_true_run(config, finished, cache, tmp_path):
    """From step 0 and from a checkpoint to the next one; the page has the stamp."""
    folder = copy_of(finished, tmp_path)
    launcher = [] if config == "one process" else ["--config_file", f"accelerate_configs/{config}.yaml"]
    launcher += ["--per_device_batch_size", 2] if "4gpu" in config else []
    for start, steps in ((0, 4), (16, 8)):
        status, output, stamp = verified(folder, cache, start, "--steps", steps, *launcher)
        assert status == 0, output
        end = start + steps
        assert f"steps {start}-{end} of 32: the loss differs by at most " in output
        assert "data, recipe and weights are those of the page" in output
        assert ("the weights by at most" in output) == (start == 16)
        assert f"{steps} of 32 steps ({steps / 32:.1%}) replayed: no difference" in output
        assert (stamp["intervals"], stamp["findings"]) == ([f"{start}-{end}"], [])
        assert stamp["loss_difference"] <= (0 if config == "one process" else 1e-5)
    text = page(RunRecord(folder), "x", [])
    assert "### verify.py: replayed steps" in text
    assert f"| {config} on cpu | 8 of 32 | 16-24 | " in text


def forged_metrics(folder: Path) -> None:
    log = lines(folder / "metrics.jsonl")
    log[1]["train/loss"] -= 0.01
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in log))


def changed_rate(folder: Path) -> None:
    edit(folder / "recipe.json", lambda about: about["recipe"].update(lr=0.004))


def another_seed(folder: Path) -> None:
    edit(folder / "recipe.json", lambda about: about["recipe"].update(seed=7))


def damaged_checkpoint(folder: Path) -> None:
    file = folder / "checkpoints" / "step_00000008" / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1] + b"x")


def edited_checkpoint(folder: Path) -> None:
    """With the hashes of a sound one: 0.1 on one weight of the second kept checkpoint."""
    checkpoint = folder / "checkpoints" / "step_00000016"
    tensors = load_file(checkpoint / "model.safetensors")
    tensors["head.bias"] = tensors["head.bias"] + torch.tensor([0.1, 0.0])
    save_file(tensors, checkpoint / "model.safetensors")
    content = (checkpoint / "model.safetensors").read_bytes()
    manifest = json.loads((checkpoint / "manifest.json").read_text())
    entry = {"size": len(content), "sha256": hashlib.sha256(content).hexdigest()}
    manifest["files"]["model.safetensors"] = entry
    del manifest["digest"]
    manifest["digest"] = _digest(manifest)
    (checkpoint / "manifest.json").write_text(json.dumps(manifest))


@pytest.mark.parametrize(
    ("forge", "start", "steps", "said"),
    [
        (forged_metrics, 0, 4, ": they differ by 1.0e-02, bound 1.4e-04"),
        (changed_rate, 8, 4, "the checkpoint of step 8 was trained with lr 0.003, not 0.004"),
        full(changed_rate, 0, 4, "the learning rate of step 2 is 0.00266667, in the log 0.002"),
        (another_seed, 8, 4, "the checkpoint of step 8 was trained with seed 0, not 7"),
        full(another_seed, 0, 4, ", bound 1."),
        (damaged_checkpoint, 8, 4, "model.safetensors has changed since it was written (SHA-256)"),
        (edited_checkpoint, 8, 8, "head.bias in the checkpoint of step 16 differs by 1.0e-01, bound 2.1e-03"),
        full(edited_checkpoint, 16, 4, ", bound 1."),
    ],
)
def test_what_is_not_true_is_found(forge, start, steps, said, finished, cache, tmp_path):
    folder = copy_of(finished, tmp_path)
    forge(folder)
    status, output, stamp = verified(folder, cache, start, "--steps", steps)
    assert (status, said in output) == (1, True), output
    assert f"**{len(stamp['findings'])} difference" in page(RunRecord(folder), "x", [])


@pytest.mark.parametrize(
    ("start", "said"), [(0, "the data is pictures-"), full(8, "its replay failed: error: ")], ids=[0, 8]
)
def test_a_swapped_image_is_found(start, said, data, finished, cache, tmp_path):
    """The pictures have other bytes than those of the page."""
    file = data / "train" / "a" / "3.png"
    before = file.read_bytes()
    file.write_bytes(encode(picture(999), "PNG"))
    try:
        status, output, _ = verified(copy_of(finished, tmp_path), cache, start)
    finally:
        file.write_bytes(before)
    assert (status, said in output) == (1, True), output


def test_what_can_not_be_verified(finished, tmp_path):
    folder = copy_of(finished, tmp_path)
    edit(folder / "result.json", lambda found: found.update(status="preempted"))
    dropout = tmp_path / "dropout"
    shutil.copytree(finished, dropout)
    edit(dropout / "recipe.json", lambda about: about.update(devices=["NVIDIA H200"]))
    edit(dropout / "recipe.json", lambda about: about["recipe"].update(dropout=0.1))
    for words, said in (
        ([folder], f"{folder} is not finished (preempted): the same command as before ends it"),
        ([dropout], "the run's --dropout was drawn on NVIDIA H200, which draws other numbers"),
        ([tmp_path / "nowhere"], "is no run's folder"),
        ([finished, "--steps", "0"], "--steps 0: must be at least 1"),
    ):
        status, output = Job([*python(), "verify.py", *words]).wait()
        assert (status > 0, said in output) == (True, True), output
    assert not (folder / "verified.json").exists()
