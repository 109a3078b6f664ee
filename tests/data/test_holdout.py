"""--holdout: images of data without a held-out split that are evaluated, and not trained on."""

import shutil
from pathlib import Path

import numpy as np
import pytest

from common.data.cache import prepare_data
from common.data.holdout import chosen
from common.data.images import Images, open_images
from tests.conftest import CNN, lines, metrics, python, result, run, torchrun
from tests.data.test_any_images import put
from tests.data.test_images import encode, picture, write_parquet

pytestmark = pytest.mark.filterwarnings("ignore:The image decoding and encoding:DeprecationWarning")


def opened(data: Path, cache: Path, holdout: float | None) -> Images:
    return open_images(prepare_data(str(data), cache, show_progress=False, holdout=holdout))


@pytest.mark.parametrize(("holdout", "expected"), [(0.1, [10, 4, 1]), (30, [20, 8, 2]), (1, [1, 0, 0])])
def test_the_same_share_of_each_class(holdout, expected):
    labels = np.random.RandomState(0).permutation(np.repeat([0, 1, 2], [100, 40, 10]))
    is_held_out = chosen(labels, holdout)
    assert np.bincount(labels[is_held_out], minlength=3).tolist() == expected
    assert (chosen(labels, holdout) == is_held_out).all()
    assert np.flatnonzero(chosen(np.zeros(20, np.int64), 5)).tolist() == [2, 4, 6, 8, 18]  # on any machine


def test_each_class_keeps_a_training_image():
    labels = np.array([0] * 10 + [1, 2, 2])
    assert np.bincount(labels[~chosen(labels, 10)]).tolist() == [1, 1, 1]
    for holdout in (11, 0.9, 0.01):
        with pytest.raises(
            ValueError, match=r"of 13 training images: choose 1 to 10, as each class keeps one"
        ):
            chosen(labels, holdout)


def as_train_alone(root: Path) -> Path:
    return put(root, *(f"Train/{c}/deep/{k}.png" for c in "ab" for k in range(10)))


def as_classes_at_once(root: Path) -> Path:
    return put(root, *(f"{c}/{k}.png" for c in "ab" for k in range(10)), "notes/readme.txt")


def as_list(root: Path) -> Path:
    put(root, *(f"{k:02}.png" for k in range(20)))
    (root / "all.csv").write_text("file,label\n" + "".join(f"{k:02}.png,{k // 10}\n" for k in range(20)))
    return root / "all.csv"


def as_parquet(root: Path) -> Path:
    for part in range(2):
        images = [encode(picture(part * 10 + k), "PNG") for k in range(10)]
        write_parquet(root / f"train-{part}.parquet", images, [part] * 10, ["a", "b"])
    return root


def as_saved(root: Path) -> Path:
    datasets = pytest.importorskip("datasets")
    images = [{"bytes": encode(picture(k), "PNG"), "path": None} for k in range(20)]
    features = datasets.Features({"image": datasets.Image(), "label": datasets.ClassLabel(names=["a", "b"])})
    rows = datasets.Dataset.from_dict({"image": images, "label": [k // 10 for k in range(20)]}, features)
    rows.save_to_disk(root)
    return root


@pytest.mark.parametrize("make", [as_train_alone, as_classes_at_once, as_list, as_parquet, as_saved])
def test_data_without_a_held_out_split(make, tmp_path):
    """Each image is in one split; both are in the order of the whole. The choice depends on ids alone."""
    data, cache = make(tmp_path / "pets"), tmp_path / "cache"
    with pytest.raises(ValueError, match=r"to evaluate on: .* by --holdout 0\.1"):
        opened(data, cache, None)
    images = opened(data, cache, 0.2)
    is_held_out = chosen(np.repeat([0, 1], 10), 0.2)
    every = np.stack([np.asarray(picture(k)) for k in range(20)])
    assert (images.train.images == every[~is_held_out]).all()
    assert (images.val.images == every[is_held_out]).all()
    assert (images.train.labels.tolist(), images.val.labels.tolist()) == ([0] * 8 + [1] * 8, [0, 0, 1, 1])
    assert (images.val_name, images.flaws.duplicates) == ("val", None)
    same, other = opened(data, cache, 4), opened(data, cache, 0.3)
    assert (same.val.images == images.val.images).all()
    assert len(other.val) == 6
    assert other.source != images.source


def test_data_with_a_held_out_split_is_refused(tmp_path):
    root = put(tmp_path / "pets", "train/a/1.png", "test/a/1.png")
    for data, split in ((root, "test"), (Path("digits"), "val")):
        with pytest.raises(
            ValueError, match=f"--holdout 0.1: --data .* has a held-out split, {split}, already"
        ):
            opened(data, tmp_path / "cache", 0.1)


@pytest.mark.parametrize("make", [as_classes_at_once, as_parquet])
def test_a_broken_image_keeps_its_name(make, tmp_path):
    root = make(tmp_path / "pets")
    place = int(np.flatnonzero(chosen(np.repeat([0, 1], 10), 0.2))[-1])
    if make is as_parquet:
        images = [encode(picture(k), "PNG") for k in range(10, 20)]
        images[place - 10] = b"no image"
        file = write_parquet(root / "train-1.parquet", images, [1] * 10, ["a", "b"])
        name = f"row {place - 10} of {file}"
    else:
        name = str(sorted(root.glob("*/*.png"))[place])
        Path(name).write_bytes(b"no image")
    with pytest.raises(ValueError, match="1 of 20 images can't be decoded") as error:
        opened(root, tmp_path / "cache", 0.2)
    assert f"  {name}: not an image" in str(error.value)


def test_the_same_images_on_two_processes_and_after_a_resume(tmp_path):
    """Of several sizes. Begun on one process, continued on two; another --holdout is another recipe."""
    root = as_classes_at_once(tmp_path / "pets")
    (root / "a" / "large.png").write_bytes(encode(picture(77, 60, 50), "PNG"))
    words = [*CNN, "--data", root, "--epochs", 2, "--batch_size", 8, "--per_device_batch_size", 4]
    words += [
        "--mixed_precision",
        "no",
        "--workers",
        0,
        "--log_every",
        1,
        "--log_samples",
        "--trackers",
        "none",
    ]
    words += ["--cache_dir", tmp_path / "cache", "--telemetry_s", 0, "--checkpoint_s", 0, "--holdout"]
    run([*python(), *words, 5, "--output_dir", tmp_path / "straight"])
    run([*python(), *words, 5, "--max_steps", 3, "--output_dir", tmp_path / "resumed"])
    shutil.rmtree(tmp_path / "cache")
    output = run([*torchrun(2), *words, 5, "--output_dir", tmp_path / "resumed"])
    assert output.count(f"data {root}: 16 training images, 5 val images, 2 classes; left out: 1 .txt") == 1
    straight, resumed = (tmp_path / name for name in ("straight", "resumed"))
    ours, theirs = (lines(folder / "samples.jsonl") for folder in (resumed, straight))
    assert [line["samples"] for line in ours] == [line["samples"] for line in theirs]
    assert result(resumed)["val_images"] == 5
    last = [metrics(folder)[-1]["val/loss"] for folder in (resumed, straight)]
    assert last[0] == pytest.approx(last[1], abs=1e-5)
