"""Tests that prep_imagenet.py writes the images and labels that a training run reads from Parquet files."""

from collections import Counter

from onecurve.data.splits import ArraySplit, FileSplit, ShardSplit
from tests.support.data_sets import opened, parquet_folder
from tests.support.imagenet import fails, prep


def content(split: ArraySplit | FileSplit | ShardSplit) -> Counter:
    """Count (pixels, label) pairs, regardless of their order."""
    images = (
        split.images if isinstance(split, ArraySplit) else map(split.open_images().decode, range(len(split)))
    )
    return Counter((pixels.tobytes(), int(k)) for pixels, k in zip(images, split.labels, strict=True))


def test_images_and_labels_match_the_files(tmp_path):
    data = parquet_folder(tmp_path / "pets")
    prep("--from", "parquet", "--data", data, "--out", tmp_path / "out", "--shard_mib", 0.02)
    straight = opened(data, tmp_path / "cache")
    prepared = opened(tmp_path / "out", tmp_path / "cache")
    assert prepared.classes == straight.classes == ("a", "b")
    assert content(prepared.train) == content(straight.train)
    assert content(prepared.val) == content(straight.val)


def test_what_is_refused(tmp_path):
    assert "no train-*.parquet" in fails("--from", "parquet", "--data", tmp_path, "--out", tmp_path / "out")
    words = ["--from", "parquet", "--data", "s3://bucket/data", "--out", tmp_path / "out"]
    assert "--data FOLDER" in fails(*words, status=2)
