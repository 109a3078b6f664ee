"""Tests that an evaluation counts every image once, for example 37 images with 1 and 3 processes."""

import json
import re

import numpy as np
import pytest
import torch
from sklearn.metrics import balanced_accuracy_score, f1_score
from sklearn.utils.class_weight import compute_class_weight

from onecurve.data.images import Images
from onecurve.data.splits import ArraySplit, SplitPart
from onecurve.flags.recipe import METRICS, ImageRecipe
from onecurve.run.evaluation import evaluated_ids, mean_of_classes
from tests.conftest import CNN, Job, full, metrics, mutate, python, result, run, torchrun
from tests.support.data_sets import class_folders

FLAGS = ["--batch_size", "12", "--max_steps", "8", "--lr", "0.02", "--best_by", "macro_f1"]
FLAGS += ["--mixed_precision", "no", "--trackers", "none"]
IMAGES = 37  # Number of images in the validation set


@pytest.fixture(scope="module")
def words(tmp_path_factory, cache) -> list:
    """Return a training command for data with few images of one class and many of another."""
    data = class_folders(tmp_path_factory.mktemp("prime") / "images", train=96, val=61)
    for file in sorted((data / "val" / "a").iterdir())[:24] + sorted((data / "train" / "a").iterdir())[:44]:
        file.unlink()
    return [*CNN, *FLAGS, "--data", data, *cache]


def test_one_and_three_processes_evaluate_the_same(words, tmp_path):
    """Train with --class_weights, and check that the mean loss does not depend on the micro-batches."""
    balanced = ["--class_weights", "balanced", "--output_dir"]
    output = run([*python(), *words, *balanced, tmp_path / "one"])
    assert "To weight classes equally, use --class_weights balanced and --best_by macro_f1" in output
    run([*torchrun(3), *words, *balanced, tmp_path / "three", "--per_device_batch_size", 2])
    run([*python(), *words, "--output_dir", tmp_path / "plain"])
    one_process, three_processes = (result(tmp_path / name) for name in ("one", "three"))
    confusion = np.array(json.loads((tmp_path / "one" / "confusion.json").read_text())["confusion"])
    f1 = 2 * np.diag(confusion) / (confusion.sum(0) + confusion.sum(1))
    assert one_process["final_macro_f1"] == pytest.approx(f1.mean(), abs=1e-12)
    for name in ("final_macro_f1", "final_accuracy", "best_step", "val_images"):
        assert one_process[name] == three_processes[name], name
    assert one_process["val_images"] == confusion.sum() == IMAGES
    assert one_process["final_accuracy"] * IMAGES % 1 == pytest.approx(0, abs=1e-9)
    pictures = [(tmp_path / name / "plots" / "predictions.png").read_bytes() for name in ("one", "three")]
    assert pictures[0] == pictures[1], "other images, or in another order"
    logs = {name: metrics(tmp_path / name) for name in ("one", "three", "plain")}
    losses = {name: next(line["train/loss"] for line in log) for name, log in logs.items()}
    assert losses["one"] == pytest.approx(losses["three"], abs=1e-5)
    assert losses["one"] != pytest.approx(losses["plain"], abs=1e-2)
    assert logs["one"][-1]["val/loss"] == pytest.approx(logs["three"][-1]["val/loss"], abs=1e-5)


NEW = {  # Code of one metric computed per image and one metric computed per class
    "top1": 'Metric("top-1", lambda logits, labels: (logits.topk(1).indices == labels[:, None]).any(1))',
    "macro_recall": 'Metric("macro recall", lambda n, _, right: (right, n), by_class=True)',
}


@pytest.mark.parametrize(
    ("metric", "equal_metric"), [("top1", "accuracy"), full("macro_recall", "balanced_accuracy")]
)
def test_a_new_metric_is_one_line(words, cache, tmp_path, project_copy, metric, equal_metric):
    """Add a metric, and select the best checkpoint by this metric.

    All splits must report the metric. If the metric counts images, verify.py must also verify it.
    """
    first = "METRICS = {\n"
    mutate(project_copy, "onecurve/flags/recipe.py", first, f'{first}    "{metric}": {NEW[metric]},\n')
    folder, held_out = tmp_path / "run", ["--holdout", "12", "--per_device_batch_size", "6"]
    run([*words, *held_out, "--best_by", metric, "--output_dir", folder], cwd=project_copy)
    run([*words, *held_out, "--best_by", equal_metric, "--output_dir", tmp_path / "same"], cwd=project_copy)
    facts, expected = (result(path) for path in (folder, tmp_path / "same"))
    for stage in ("best", "final", "test"):
        assert facts[f"{stage}_{metric}"] == expected[f"{stage}_{equal_metric}"], stage
    run([*python(), "logbook.py", "add", folder, "--folder", tmp_path / "pages"], cwd=project_copy)
    (page,) = (tmp_path / "pages").glob("train_cnn_a/*/run.md")
    title = {"top1": "top-1", "macro_recall": "macro recall"}[metric]
    (row,) = re.findall(rf"^\| {title} \|.*", page.read_text(), re.MULTILINE)
    shown = [f"{facts[f'{stage}_{metric}']:.4f}" for stage in ("test", "best", "final")]
    assert re.findall(r"[\d.]{6}", row) == shown
    forged = {f"val/{metric}", f"best_{metric}", f"final_{metric}"}
    log = [{n: v - 0.3 if n in forged else v for n, v in line.items()} for line in metrics(folder)]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in log))
    lowered = {n: v - 0.3 if n in forged else v for n, v in facts.items()}
    (folder / "result.json").write_text(json.dumps(lowered))
    status, output = Job([*python(), "verify.py", folder, "--sample", "1", *cache], cwd=project_copy).wait()
    reports_change = "a repeated evaluation changes at most 1" in output
    assert (status, reports_change) == (int(metric == "top1"), metric == "top1"), output


def test_a_subset_of_the_images_covers_all_classes():
    """Check that a subset contains all classes although the images are sorted by class.

    The first 20 images are zeros.
    """
    labels = np.arange(97) // 49
    split = ArraySplit(np.zeros((97, 1, 1, 3), np.uint8), SplitPart("val", labels))
    ids = evaluated_ids(split, ImageRecipe(max_val_images=20))
    assert np.bincount(labels[ids]).sum() == 20 == len(set(ids))
    assert np.bincount(labels[ids]).min() >= 5


def test_counting_the_padding_is_detected(words, tmp_path, project_copy):
    mutate(
        project_copy,
        "onecurve/numerics/order.py",
        "valid_count = int(np.count_nonzero(ids < end_id))",
        "valid_count = per_device",
    )
    status, output = Job([*words, "--output_dir", tmp_path / "run"], cwd=project_copy).wait()
    assert status != 0
    assert f"of {IMAGES} images" in output
    assert result(tmp_path / "run")["status"] == "failed"


def test_metrics_and_class_weights_match_scikit_learn():
    """Check metrics and weights for classes without images and classes that are never predicted."""
    labels, predicted = np.array([0, 0, 0, 1, 3]), np.array([0, 0, 1, 1, 4])
    right = labels[labels == predicted]
    counts = np.array([np.bincount(ids, minlength=6) for ids in (labels, predicted, right)])
    values = [mean_of_classes(METRICS[metric], counts) for metric in ("balanced_accuracy", "macro_f1")]
    assert values[0] == pytest.approx(balanced_accuracy_score(labels, predicted))
    assert values[1] == pytest.approx(f1_score(labels, predicted, average="macro"))
    split = ArraySplit(np.zeros((5, 1, 1, 3), np.uint8), SplitPart("train", labels))
    images, device = Images("x", tuple("abcdef"), split, split, "val"), torch.device("cpu")
    expected = compute_class_weight("balanced", classes=np.array([0, 1, 3]), y=labels)
    assert images.class_weights("balanced", device)[[0, 1, 3]].numpy() == pytest.approx(expected)
    rooted = images.class_weights("sqrt", device)
    assert rooted[[1, 3]].numpy() / rooted[0].item() == pytest.approx(np.sqrt([3, 3]))
    assert rooted[labels].mean().item() == pytest.approx(1)
    assert rooted[[2, 4, 5]].tolist() == [0, 0, 0]
