"""What a run leaves behind: folder names, metrics, TensorBoard, weights that load, a picture."""

import json
import os
import re

import pytest
from PIL import Image

from tests.conftest import CNN, ROOT, VIT, Job, metrics, python, result, run, torchrun

FLAGS = ["--data", "digits", "--batch_size", "64", "--epochs", "2", "--max_steps", "30", "--log_every", "10"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory, cache):
    """Started twice with --model_folder, by two processes of one host."""
    weights = tmp_path_factory.mktemp("shared") / "weights"
    for _ in range(2):
        run([*torchrun(2), *CNN, *FLAGS, *cache, "--model_folder", weights])
    return weights / "train_cnn_a"


def test_runs_are_named_by_strategy_batch_epochs_hosts_processes(folder):
    assert sorted(path.name for path in folder.iterdir()) == ["ddp_64_2_1_2", "ddp_64_2_1_2-2"]


def test_the_result_has_what_a_log_book_needs(folder):
    found = result(folder / "ddp_64_2_1_2")
    expected = {
        "script": "train_cnn_a",
        "strategy": "ddp",
        "hosts": 1,
        "processes": 2,
        "batch_size": 64,
        "per_device_batch_size": 32,
        "accumulation_steps": 1,
        "epochs": 2,
        "steps": 30,
        "val_images": 360,
        "seed": 0,
        "status": "finished",
        "checkpoint": "checkpoints/step_00000030",
    }
    assert expected.items() <= found.items()
    for number in ("best_accuracy", "final_accuracy", "train_s", "wall_s", "images_per_s", "peak_memory_gib"):
        assert found[number] > 0, number
    assert found["wall_s"] > found["train_s"]
    walls = [line["wall_s"] for line in metrics(folder / "ddp_64_2_1_2")]
    assert walls == sorted(walls)
    assert found["train_s"] < walls[-1] < found["wall_s"]
    about = json.loads((folder / "ddp_64_2_1_2" / "recipe.json").read_text())
    assert about["recipe"]["batch_size"] == 64
    assert {"argv", "git_commit", "versions", "hosts", "devices"} <= about.keys()


def test_the_plot_is_a_picture_with_something_in_it(folder):
    with Image.open(folder / "ddp_64_2_1_2" / "plots" / "curves.png") as image:
        assert image.size[0] > 800
        assert len(image.convert("RGB").getcolors(1 << 20)) > 50


def test_weights_start_another_run_with_another_number_of_classes(tmp_path, cache):
    """--weights takes what a run has saved; the head is new where the classes differ (10 and 2)."""
    from tests.data import class_folders

    vit = [*VIT, "--batch_size", "8", "--max_steps", "2", "--trackers", "none", *cache]
    run([*python(), *vit, "--data", "digits", "--output_dir", tmp_path / "first"])
    saved = tmp_path / "first" / result(tmp_path / "first")["checkpoint"] / "model.safetensors"
    data = class_folders(tmp_path / "images", train=16, val=4)
    run([*python(), *vit, "--data", data, "--weights", saved, "--output_dir", tmp_path / "second"])
    words = [*python(), *vit, "--data", data, "--weights", saved, "--patch_size", "4"]
    status, output = Job([*words, "--output_dir", tmp_path / "third"]).wait()
    assert status == 1
    assert "is not this model's" in output
    assert "the first is pos_embed ([1, 17, 64] in the file, [1, 65, 64] in the model)" in output


@pytest.mark.parametrize("launcher", [python(), torchrun(2)], ids=["python", "torchrun"])
def test_who_reads_the_output_may_go(launcher, tmp_path):
    """As `| tee` does at Ctrl-C: the training goes on to its end."""
    words = ["train_hello.py", "--max_steps", "60", "--log_every", "1", "--trackers", "none"]
    job = Job([*launcher, *words, "--output_dir", tmp_path / "run"])
    while "step 2/" not in (line := job.process.stdout.readline()):
        assert line
    job.process.stdout.close()
    assert job.process.wait(60) == 0
    found = result(tmp_path / "run")
    assert (found["status"], found["steps"], found["error"]) == ("finished", 60, None)


def test_progress_on_a_terminal(tmp_path, cache):
    """A live line with epoch, step, loss, accuracy, rate, speed and time left."""
    import pexpect

    words = [*CNN, *FLAGS, *cache, "--output_dir", tmp_path / "run"]
    env = {**os.environ, "COLUMNS": "200", "TERM": "xterm"}
    words = [str(word) for word in words]
    child = pexpect.spawn(python()[0], words, cwd=ROOT, env=env, encoding="utf-8", dimensions=(40, 200))
    child.expect(pexpect.EOF, timeout=120)
    child.close()
    assert child.exitstatus == 0, child.before
    text = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", child.before)
    assert re.search(r"epoch \d/2 +step \d+/30 .*lr \d", text), text
    assert re.search(r"val accuracy 0\.\d+", text), text
    assert "left" in text
    assert "images/s" in text
