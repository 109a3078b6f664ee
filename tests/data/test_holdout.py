"""Tests of --holdout, which reserves training images for evaluation.

If the data already contains a held-out split, the run evaluates this split once, at the end, with the best
weights.
"""

import csv
import json

import numpy as np
import pytest

import validate
from onecurve.data.splits import held_out_mask
from onecurve.system.files import read_json
from tests.conftest import CNN, ROOT, Job, copy_project, full, metrics, mutate, python, result, run, torchrun
from tests.support.compare import assert_same_tensors
from tests.support.data_sets import data_set, opened, pixels, png, put, write
from tests.support.imagenet import prep

SORTED = [0] * 10 + [1] * 10


@pytest.mark.parametrize(("holdout", "expected"), [(0.1, [10, 4, 1]), (30, [20, 8, 2]), (1, [1, 0, 0])])
def test_each_class_is_held_out_in_the_same_proportion(holdout, expected):
    labels = np.random.RandomState(0).permutation(np.repeat([0, 1, 2], [100, 40, 10]))
    is_held_out = held_out_mask(labels, holdout)
    assert np.bincount(labels[is_held_out], minlength=3).tolist() == expected
    assert (held_out_mask(labels, holdout) == is_held_out).all()
    # The same images must be selected on every machine.
    assert np.flatnonzero(held_out_mask(np.zeros(20, np.int64), 5)).tolist() == [2, 4, 6, 8, 18]


def test_each_class_keeps_a_training_image():
    labels = np.array([0] * 10 + [1, 2, 2])
    assert np.bincount(labels[~held_out_mask(labels, 10)]).tolist() == [1, 1, 1]
    for holdout in (11, 0.9, 0.01):
        with pytest.raises(
            ValueError, match=r"of 13 training images\. .* 1 to 10 images, because each class must keep"
        ):
            held_out_mask(labels, holdout)


def test_folds_partition_the_images_and_stratify_the_classes():
    labels = np.random.RandomState(0).permutation(np.repeat([0, 1, 2], [101, 43, 7]))
    folds = [held_out_mask(labels, f"{k}/5") for k in range(1, 6)]
    assert np.stack(folds).sum(0).tolist() == [1] * len(labels)
    assert [fold.sum() for fold in folds] == [31, 30, 30, 30, 30]
    counts = np.array([np.bincount(labels[fold], minlength=3) for fold in folds])
    assert (np.ptp(counts, 0) <= 1).all()
    # The same images must be selected on every machine.
    assert np.flatnonzero(held_out_mask(np.zeros(10, np.int64), "2/5")).tolist() == [4, 7]
    for labels, text in (
        ([0] * 8 + [1], "9 images, with 1 in the smallest class"),
        ([0, 0, 1, 1], "4 images, with 2 in the smallest class"),
    ):
        with pytest.raises(ValueError, match=f"--fold 1/5 needs at least .* contains {text}"):
            held_out_mask(np.array(labels), "1/5")


def test_folds_split_the_same_data(tmp_path):
    data = data_set(tmp_path / "pets", labels=SORTED, whole=20)
    is_held_out = held_out_mask(np.array(SORTED), "2/5")
    first, second = (opened(data, tmp_path / "cache", holdout=f"{k}/5") for k in (1, 2))
    assert first.source == second.source
    assert second.val.part.stored(np.arange(4)).tolist() == np.flatnonzero(is_held_out).tolist()
    assert set(pixels_of(first.val)).isdisjoint(pixels_of(second.val))


@pytest.mark.parametrize(
    ("form", "split"),
    [("folders", "Train"), *((k, "whole") for k in ("folders", "list", "parquet", "saved"))],
)
def test_data_without_a_held_out_split(form, split, tmp_path):
    """Check that each image is in one split, in the original order. Only image IDs affect the selection."""
    data, cache = data_set(tmp_path / "pets", form, labels=SORTED, **{split: 20}), tmp_path / "cache"
    with pytest.raises(ValueError, match=r"contains no evaluation split .* with --holdout 0\.1"):
        opened(data, cache)
    images = opened(data, cache, holdout=0.2)
    is_held_out, all_pixels = held_out_mask(np.array(SORTED), 0.2), pixels(*range(20))
    assert pixels_of(images.train) == [image.tobytes() for image in all_pixels[~is_held_out]]
    assert pixels_of(images.val) == [image.tobytes() for image in all_pixels[is_held_out]]
    assert (images.train.labels.tolist(), images.val.labels.tolist()) == ([0] * 8 + [1] * 8, [0, 0, 1, 1])
    assert (images.val_name, images.test, images.flaws) == ("holdout", None, ())
    same, other = opened(data, cache, holdout=4), opened(data, cache, holdout=0.3)
    assert pixels_of(same.val) == pixels_of(images.val)
    assert len(other.val) == 6
    assert other.source != images.source != opened(data, cache, holdout=0.2000001).source


def pixels_of(split) -> list[bytes]:
    """Return a split's images at 32 pixels, ordered by ID."""
    plan = [(0, np.arange(len(split)))]
    batches = split.batches(plan, device="cpu", train=False, size=32, seed=0, workers=0)
    return [image.numpy().tobytes() for batch in batches for image in batch.images]


@pytest.mark.parametrize("form", ["decoded", "several sizes", "shards"])
def test_data_with_its_own_held_out_split(form, tmp_path):
    """Check that each training image is either trained or held out, in the original order.

    The data's held-out split becomes the test split.
    """
    data, cache = data_set(tmp_path / "pets", train=20, val=6), tmp_path / "cache"
    if form == "several sizes":
        write(data, {"train/b/20.png": png(99, 60, 50)})
    elif form == "shards":
        prep("--from", "folder", "--data", data, "--out", tmp_path / "out", "--shard_mib", "0.004")
        data = tmp_path / "out"
    whole, images = opened(data, cache), opened(data, cache, holdout=0.2)
    assert (whole.test, images.val_name, images.test_name) == (None, "holdout", whole.val_name)
    is_held_out = held_out_mask(whole.train.labels, 0.2)
    assert is_held_out.sum() == 4
    for part, expected in ((images.train, ~is_held_out), (images.val, is_held_out)):
        assert (part.labels == whole.train.labels[expected]).all()
        assert pixels_of(part) == [pixels_of(whole.train)[i] for i in np.flatnonzero(expected)]
    assert pixels_of(images.test) == pixels_of(whole.val)
    assert (images.test.labels == whole.val.labels).all()
    unique_images = {image for part in (images.train, images.val, images.test) for image in pixels_of(part)}
    assert len(unique_images) == len(whole.train) + len(whole.val)
    assert whole.source != images.source
    assert validate.chosen_split(images, None) == ("test", images.test)
    assert validate.chosen_split(whole, None) == ("val", whole.val)
    with pytest.raises(ValueError, match="--split test is not available"):
        validate.chosen_split(whole, "test")


@pytest.mark.parametrize("form", ["folders", "parquet"])
def test_a_broken_held_out_image_is_reported_by_its_name(form, tmp_path):
    broken = int(np.flatnonzero(held_out_mask(np.array(SORTED), 0.2))[-1])
    images = [png(k) if form == "folders" or k != broken else b"no image" for k in range(20)]
    root = data_set(tmp_path / "pets", form, labels=SORTED, whole=images)
    name = f"row {broken} of {root}/train-00000-of-00001.parquet"
    if form == "folders":
        write(root, {f"b/{broken}.png": b"no image"})
        name = f"{root}/b/{broken}.png"
    with pytest.raises(ValueError, match="1 of 20 images can't be decoded") as error:
        opened(root, tmp_path / "cache", holdout=0.2)
    assert f"  {name}: the file is not in a supported image format" in str(error.value)


# --- End of a run whose data contains a held-out split

# Flags that end training while the learning rate is still high, so that the last evaluation is not the best.
DIGITS = [*CNN, "--data", "digits", "--holdout", 0.2, "--epochs", 20, "--max_steps", 48, "--batch_size", 96]
DIGITS += ["--lr", 0.02, "--warmup", 0, "--per_device_batch_size", 48, "--mixed_precision", "no"]
DIGITS += ["--trackers", "none", "--telemetry_s", 0]
VALIDATE = [*python(), "validate.py", "--mixed_precision", "no"]


@pytest.fixture(scope="module")
def finished(tmp_path_factory, cache):
    folder = tmp_path_factory.mktemp("finished") / "run"
    run([*python(), *DIGITS, *cache, "--output_dir", folder])
    return folder


def test_the_headline_evaluates_the_best_weights_on_the_test_split(finished, cache, tmp_path):
    """Check that the run's test result, which uses the best weights, matches validate.py's result."""
    final = result(finished)
    assert final["best_step"] < final["steps"]
    assert (final["val_name"], final["val_images"]) == ("holdout", 287)
    assert (final["test_name"], final["test_images"]) == ("val", 360)
    for flags, accuracy in (([], "test_accuracy"), (["--split", "val"], "best_accuracy")):
        out = tmp_path / accuracy
        run([*VALIDATE, "--checkpoint", finished, *flags, *cache, "--output_dir", out])
        report = json.loads((out / "report.json").read_text())
        assert report["top1"] == pytest.approx(final[accuracy])
    run([*VALIDATE, "--checkpoint", finished, "--which", "latest", *cache, "--output_dir", tmp_path / "last"])
    assert json.loads((tmp_path / "last" / "report.json").read_text())["top1"] != final["test_accuracy"]
    confusion = json.loads((finished / "confusion.json").read_text())
    assert (confusion["split"], confusion["step"]) == ("val", final["best_step"])
    correct = sum(confusion["confusion"][c][c] for c in range(10))
    assert correct / 360 == pytest.approx(final["test_accuracy"])


def test_other_data_is_evaluated_whole(finished, cache, tmp_path):
    """Check that validate.py does not apply the run's --holdout to other data.

    The run's page must not include the report on other data.
    """
    data = put(tmp_path / "other", *(f"{c}/{k}.png" for c in range(10) for k in range(2)))
    command = [*python(), ROOT / "validate.py", finished, "--data", data, "--mixed_precision", "no", *cache]
    assert "The training run's --holdout 0.2 is ignored" in run(command, cwd=tmp_path)
    report = read_json(tmp_path / f"validation/run/other/train_{result(finished)['best_step']}/report.json")
    assert (report["images"], report["split"]) == (20, "train")
    run([*command, "--holdout", "0.5", "--split", "val", "--output_dir", "half"], cwd=tmp_path)
    with open(tmp_path / "half/predictions.csv") as file:
        rows = {int(row["id"]): row for row in csv.DictReader(file)}
    assert [*rows] == np.flatnonzero(held_out_mask(np.repeat(range(10), 2), 0.5)).tolist()
    assert all(row["file"] == f"{number // 2}/{number % 2}.png" for number, row in rows.items())
    assert all(row["file"][0] == row["label"] for row in rows.values())
    worst = read_json(tmp_path / "half/report.json")["worst"]
    assert {rows[image["id"]]["file"] for image in worst} == {image["file"] for image in worst}
    assert all(rows[image["id"]]["label"] == str(image["label"]) for image in worst)
    assert len(worst) == sum(row["label"] != row["predicted"] for row in rows.values()) > 1


TESTED = "            run.log_test(measure(images.test), images.test_name)\n"
SIGNALS = {
    "SIGTERM": (75, "            __import__('signal').raise_signal(15)\n" + TESTED),
    "SIGKILL": (-9, TESTED + "            __import__('signal').raise_signal(9)\n"),
}


@pytest.mark.parametrize("name", ["SIGTERM", full("SIGKILL")])
def test_a_run_stopped_in_its_last_evaluation_can_be_finished(name, finished, cache, tmp_path):
    """Check that the last step's state is saved, even if the model already contains the best weights."""
    status, lines_of_script = SIGNALS[name]
    project = copy_project(tmp_path / "project")
    mutate(project, "train_cnn_a.py", TESTED, lines_of_script)
    words = [*DIGITS, *cache, "--output_dir", tmp_path / "run"]
    assert Job([*python(), *words], cwd=project).wait()[0] == status
    output = run([*torchrun(2), *words])
    assert f"continuing at step {result(finished)['steps']} with" in output
    final, expected = result(tmp_path / "run"), result(finished)
    for key in ("test_accuracy", "best_accuracy", "best_step", "final_accuracy", "test_images"):
        assert final[key] == expected[key], key
    log, expected_log = metrics(tmp_path / "run"), metrics(finished)
    assert [line["step"] for line in log] == [line["step"] for line in expected_log]
    assert log[-1]["test/loss"] == pytest.approx(expected_log[-1]["test/loss"], abs=1e-5)
    assert_same_tensors(tmp_path / "run", finished, tolerance=0)
