"""Parquet files as an input of prep_imagenet.py: the same images and labels as when they are trained on."""

from collections import Counter

import pytest

from common.data.cache import prepare_data
from common.data.images import open_images
from common.data.splits import ArraySplit, FileSplit, ShardSplit
from tests.data.test_images import parquet_folder, write_parquet
from tests.support.imagenet import fails, prep


def content(split: ArraySplit | FileSplit | ShardSplit) -> Counter:
    """Pixels and labels, in any order."""
    images = split.images if isinstance(split, ArraySplit) else map(split.open().decode, range(len(split)))
    return Counter((pixels.tobytes(), int(k)) for pixels, k in zip(images, split.labels, strict=True))


@pytest.mark.parametrize("form", ["shards", "folder"])
def test_images_and_labels_are_those_of_the_files(form, tmp_path):
    data = parquet_folder(tmp_path / "pets")
    prep(
        "--from", "parquet", "--data", data, "--out", tmp_path / "out", "--format", form, "--shard_mib", 0.02
    )
    straight = open_images(prepare_data(str(data), tmp_path / "cache"))
    found = open_images(prepare_data(str(tmp_path / "out"), tmp_path / "cache"))
    assert found.classes == straight.classes == ("cat", "dog")
    assert content(found.train) == content(straight.train)
    assert content(found.val) == content(straight.val)


def test_what_is_refused(tmp_path):
    assert "no train-*.parquet" in fails("--from", "parquet", "--data", tmp_path, "--out", tmp_path / "out")
    words = ["--from", "parquet", "--data", "s3://bucket/data", "--out", tmp_path / "out"]
    assert "--data FOLDER" in fails(*words, status=2)
    for split in ("train", "test"):
        write_parquet(tmp_path / "odd" / f"{split}-0.parquet", [b"\xff\xd8"] * 2, ["../a", "b"])
    output = fails("--from", "parquet", "--data", tmp_path / "odd", "--out", tmp_path / "out")
    assert "'../a' is no plain name" in output
