"""Evaluation counts every image once: a validation set of prime size on 1, 2 and 3 processes."""

import json

import numpy as np
import pytest
import torch
from sklearn.metrics import balanced_accuracy_score, f1_score
from sklearn.utils.class_weight import compute_class_weight

from common.data.images import Images
from common.data.splits import ArraySplit, Part
from common.evaluation import mean_of_classes
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


# --class_weights and --best_by


def test_classes_count_alike_on_any_number_of_processes(tmp_path, cache):
    """The metric is scikit-learn's. The mean of weighted losses is the same for any micro-batches."""
    data = class_folders(tmp_path / "images", train=96, val=61)
    for file in sorted((data / "val" / "0").iterdir())[:24] + sorted((data / "train" / "0").iterdir())[:44]:
        file.unlink()
    words = [*CNN, *FLAGS, "--max_steps", 8, "--lr", 0.02, "--best_by", "macro_f1", "--data", data, *cache]
    balanced = [*words, "--class_weights", "balanced", "--output_dir"]
    output = run([*python(), *balanced, tmp_path / "one"])
    assert "With --class_weights balanced and --best_by macro_f1 each class counts alike" in output
    run([*torchrun(3), *balanced, tmp_path / "three", "--per_device_batch_size", 2])
    run([*python(), *words, "--output_dir", tmp_path / "plain"])
    one, three = (result(tmp_path / name) for name in ("one", "three"))
    confusion = np.array(json.loads((tmp_path / "one" / "confusion.json").read_text())["confusion"])
    f1 = 2 * np.diag(confusion) / (confusion.sum(0) + confusion.sum(1))
    assert one["final_macro_f1"] == pytest.approx(f1.mean(), abs=1e-12)
    assert (one["final_macro_f1"], one["best_step"]) == (three["final_macro_f1"], three["best_step"])
    names = ("one", "three", "plain")
    losses = [next(line["train/loss"] for line in metrics(tmp_path / name)) for name in names]
    assert losses[0] == pytest.approx(losses[1], abs=1e-5)
    assert losses[0] != pytest.approx(losses[2], abs=1e-2)


def test_the_metrics_and_weights_are_scikit_learns():
    """Classes without images, or never predicted, among them."""
    labels, predicted = np.array([0, 0, 0, 1, 3]), np.array([0, 0, 1, 1, 4])
    counts = [np.bincount(ids, minlength=6) for ids in (labels, predicted, labels[labels == predicted])]
    found = [mean_of_classes(metric, *counts) for metric in ("balanced_accuracy", "macro_f1")]
    assert found[0] == pytest.approx(balanced_accuracy_score(labels, predicted))
    assert found[1] == pytest.approx(f1_score(labels, predicted, average="macro"))
    split = ArraySplit(np.zeros((5, 1, 1, 3), np.uint8), Part("train", labels))
    weights = Images("x", tuple("abcdef"), split, split, "val").class_weights("balanced", torch.device("cpu"))
    expected = compute_class_weight("balanced", classes=np.array([0, 1, 3]), y=labels)
    assert weights[[0, 1, 3]].numpy() == pytest.approx(expected)
