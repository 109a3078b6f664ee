"""Evaluation counts every image once: a validation set of prime size on 1, 2 and 3 processes."""

import json

import pytest

from tests.conftest import CNN, Job, metrics, mutate, python, result, run, torchrun
from tests.support.images import class_folders

# A rate of 0 keeps the weights, so that every number of processes evaluates the very same model.
FLAGS = ["--batch_size", "12", "--max_steps", "1", "--lr", "0"]
FLAGS += ["--mixed_precision", "no", "--trackers", "none"]


@pytest.fixture(scope="module")
def prime(tmp_path_factory):
    return class_folders(tmp_path_factory.mktemp("prime") / "images", train=24, val=97)


@pytest.fixture(scope="module")
def one_process(prime, tmp_path_factory, cache):
    folder = tmp_path_factory.mktemp("one") / "run"
    run([*python(), *CNN, *FLAGS, "--data", prime, *cache, "--output_dir", folder])
    return folder


@pytest.mark.parametrize("processes", [2, 3])
def test_the_number_of_one_process(processes, prime, one_process, tmp_path, cache):
    run([*torchrun(processes), *CNN, *FLAGS, "--data", prime, *cache, "--output_dir", tmp_path / "run"])
    ours, theirs = result(tmp_path / "run"), result(one_process)
    assert ours["val_images"] == theirs["val_images"] == 97
    assert ours["final_accuracy"] == theirs["final_accuracy"]
    pictures = [folder / "plots" / "predictions.png" for folder in (tmp_path / "run", one_process)]
    assert pictures[0].read_bytes() == pictures[1].read_bytes(), "other images, or in another order"
    assert (ours["final_accuracy"] * 97) % 1 == pytest.approx(0, abs=1e-9)
    assert metrics(tmp_path / "run")[-1]["val/loss"] == pytest.approx(
        metrics(one_process)[-1]["val/loss"], abs=1e-6
    )


def test_a_part_of_the_images_is_of_all_classes(prime, tmp_path, cache):
    """The files are sorted by class: the first 20 are zeros."""
    folder = tmp_path / "run"
    words = [*python(), *CNN, *FLAGS, "--data", prime, "--max_val_images", "20", *cache]
    run([*words, "--output_dir", folder])
    counts = [sum(row) for row in json.loads((folder / "confusion.json").read_text())["confusion"]]
    assert sum(counts) == 20
    assert min(counts) >= 5


def test_counting_the_filling_is_found(prime, tmp_path, project_copy, cache):
    mutate(project_copy, "common/order.py", "valid = int(np.count_nonzero(ids < end))", "valid = per_device")
    words = [*torchrun(2), *CNN, *FLAGS, "--data", prime, *cache, "--output_dir", tmp_path / "run"]
    status, output = Job(words, cwd=project_copy).wait()
    assert status != 0
    assert "of 97 images" in output
    assert result(tmp_path / "run")["status"] == "failed"
