"""Tests of WebDataset shards from other tools, indexed on this host or in S3, in the project's order."""

import json
import shutil
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from onecurve.data.cache import prepare_data
from onecurve.data.images import open_images
from onecurve.data.splits import ShardSplit
from onecurve.flags.recipe import share_out
from onecurve.numerics.order import training_plan
from onecurve.system.s3 import ObjectStore
from tests.conftest import lines, python, run, torchrun
from tests.data.test_shard_stream import RECIPE, SHARD_GIB, STEPS, TRAIN, VAL, expected
from tests.data.test_shards import NO_WORKERS, VIT, read
from tests.support.data_sets import jpeg, tar, write, write_shards
from tests.support.imagenet import fails, prep
from tests.support.s3 import BUCKET, s3, use_s3  # noqa: F401 (fixture)
from tools.prepare import preparation
from tools.prepare.webdataset import WebDataset, match_pattern

FROM_SHARDS = ["--from", "shards", "--format", "index"]
INDICES = ("train_index.npy", "val_index.npy")


@pytest.fixture(scope="module")
def project_shards(tmp_path_factory) -> Path:
    """Write shards in the format of prep_imagenet.py."""
    return write_shards(tmp_path_factory.mktemp("ours") / "wds", TRAIN, VAL)


@pytest.fixture(scope="module")
def foreign(project_shards) -> Path:
    """Copy the shards' tar files without the manifest and the indices."""
    folder = project_shards.parent.parent / "theirs" / "wds"
    shutil.copytree(
        project_shards, folder, ignore=lambda _, names: [n for n in names if not n.endswith(".tar")]
    )
    return folder


@pytest.fixture(scope="module")
def in_s3(foreign, s3):  # noqa: F811
    """Upload the foreign tar files to S3 as train/00000.tar and so on, and yield their store."""
    with pytest.MonkeyPatch.context() as patch:
        use_s3(patch, s3)
        store = ObjectStore(f"s3://{BUCKET}/wds")
        for path in foreign.iterdir():
            store.upload(path, path.name.replace("-", "/"))
        yield store


def training_split(data: str, cache: Path) -> ShardSplit:
    return open_images(prepare_data(data, cache), RECIPE).train


def ids_of(train: ShardSplit, processes: int) -> list[list[int]]:
    """Return the samples in an epoch's micro-batches, starting at step 3."""
    batch = share_out(24, 6, processes)
    ranks = [list(training_plan(train, batch, rank, 0, 3, STEPS)) for rank in range(processes)]
    size = batch.accumulations
    parts = [part for k in range(STEPS - 3) for rank in ranks for part in rank[k * size : (k + 1) * size]]
    return [ids.tolist() for _, ids in parts]


@pytest.mark.parametrize("location", ["local", "s3"])
def test_nothing_is_copied_and_the_order_is_that_of_our_shards(
    location, project_shards, foreign, in_s3, tmp_path
):
    data, out = (str(foreign) if location == "local" else in_s3.url), tmp_path / "index"
    before = in_s3.list()
    output = prep(*FROM_SHARDS, "--data", data, "--out", out)
    assert f"train with: --data {out}\n" in output
    expected_files = {"manifest.json", *INDICES, "train_names.txt", "val_names.txt"}
    assert {path.name for path in out.iterdir()} == expected_files
    assert in_s3.list() == before
    for name in INDICES:
        assert np.array_equal(np.load(out / name), np.load(project_shards / name))
    project_split = training_split(str(project_shards), tmp_path / "cache")
    foreign_split = training_split(str(out), tmp_path / "cache")
    for processes in (1, 2, 4):
        assert ids_of(foreign_split, processes) == ids_of(project_split, 1)
    plan = list(training_plan(foreign_split, share_out(24, 6, 1), 0, 0, 3, STEPS))
    for (*_, x, labels), (*_, x2, labels2) in zip(
        read(foreign_split, plan), read(project_split, plan), strict=True
    ):
        assert torch.equal(x, x2)
        assert labels.tolist() == labels2.tolist()


@pytest.mark.full
@pytest.mark.parametrize("processes", [1, 2, 4])
def test_an_interrupted_training_from_s3(processes, in_s3, tmp_path):
    """Resume a one-process run whose index is in S3. The process count must not change the sample order."""
    index = f"s3://{BUCKET}/index-{processes}"
    prep(*FROM_SHARDS, "--data", in_s3.url, "--out", index, "--work_dir", tmp_path / "work")
    words = [*VIT, "--data", index, "--streams", 4, "--shuffle_window", 4, "--epochs", 2, *NO_WORKERS]
    words += ["--cache_dir", tmp_path / "cache", "--output_dir", tmp_path / "run"]
    run([*python(), *words, "--max_steps", 5])
    run([*torchrun(processes), *words])
    samples = [line["samples"] for line in lines(tmp_path / "run" / "samples.jsonl")]
    assert samples == expected().tolist()


def test_samples_of_several_fields(tmp_path):
    """Check shards with classes in JSON files, additional fields, folders, a test split and class names."""
    image, meta = jpeg(1), json.dumps({"label": 1, "width": 40}).encode()
    train = {"a/1.jpg": image, "a/1.seg.png": b"x", "a/1.json": meta, "a/2.cls": b"0\n", "a/2.JPG": image}
    test = {"about.txt": b"x", "3.png": image, "3.cls": b"2"}
    (tmp_path / "in-train-0.tar").write_bytes(tar(train))
    (tmp_path / "in-test-0.tar").write_bytes(tar(test))
    names = tmp_path / "names.txt"
    names.write_text("cat\ndog\nhen\n")
    prep(*FROM_SHARDS, "--data", tmp_path, "--out", tmp_path / "index", "--classes", names)
    assert np.load(tmp_path / "index" / "train_index.npy")[:, 3].tolist() == [1, 0]
    manifest = json.loads((tmp_path / "index" / "manifest.json").read_text())
    assert [c["name"] for c in manifest["classes"]] == ["cat", "dog", "hen"]
    assert manifest["splits"]["val"]["images"] == 1


def test_braces(foreign, tmp_path):
    patterns = ["--train", foreign / "train-{00000..00023}.tar", "--val", foreign / "val-0000[2-3].tar"]
    prep(*FROM_SHARDS, *patterns, "--out", tmp_path / "index")
    splits = json.loads((tmp_path / "index" / "manifest.json").read_text())["splits"]
    assert {name: len(split["shards"]) for name, split in splits.items()} == {"train": 24, "val": 2}


def test_wildcards_match_the_same_in_s3_and_on_a_disk(tmp_path):
    names = ("train-0.tar", "._train-1.tar", "a/train-2.tar", ".a/train-3.tar", "a/.train-4.tar")
    write(tmp_path / "wds", dict.fromkeys(names, b"x"))
    store = SimpleNamespace(url=f"s3:/{tmp_path}", list=lambda _: [f"wds/{name}" for name in names])
    for pattern in ("*train*.tar", "*/*.tar", ".a/*", "a/.*"):
        paths = match_pattern(f"{tmp_path}/wds/{pattern}", None)
        assert match_pattern(f"{store.url}/wds/{pattern}", store) == [f"s3:/{path}" for path in paths] != []


@pytest.mark.parametrize(
    ("members", "message"),
    [
        ({"a.jpg": b"x"}, "train-0.tar: a contains no class"),
        ({"a.jpg": b"x", "a.json": b'{"name": "cat"}'}, "train-0.tar: a contains no class"),
        ({"a.cls": b"0"}, "train-0.tar: a contains 0 images"),
        ({"a.jpg": b"x", "a.png": b"x", "a.cls": b"0"}, "train-0.tar: a contains 2 images"),
        ({"a.jpg": b"x", "a.cls": b"-1"}, "is '-1' instead of a number"),
        ({"a.jpg": b"x", "a.json": b'{"label": true}'}, "is True instead of a number"),
        ({"a.jpg": b"x", "a.json": b"{"}, "a.json"),
        ({"a.jpg": b"", "a.cls": b"0"}, "train-0.tar: a contains an empty image. Remove the sample"),
        ({"a.txt": b"x"}, "train-0.tar contains no sample with an image"),
    ],
)
def test_an_invalid_sample_is_named(members, message, tmp_path):
    (tmp_path / "train-0.tar").write_bytes(tar(members))
    output = fails(*FROM_SHARDS, "--data", tmp_path, "--out", tmp_path / "index")
    assert message in output
    assert not (tmp_path / "index" / "manifest.json").exists()


@pytest.mark.parametrize(
    ("words", "status", "message"),
    [
        (["--from", "shards"], 2, "--format index"),
        ([*FROM_SHARDS, "--out", "s3://bucket/x", "--work_dir", "w"], 2, "an index in S3"),
        ([*FROM_SHARDS, "--train", "nothing-{0..3}.tar"], 1, "nothing-0.tar is not a file"),
        ([*FROM_SHARDS, "--train", "nothing-*.tar"], 1, "nothing-*.tar matches no shards"),
        ([*FROM_SHARDS, "--train", __file__, "--val", __file__], 1, f"{__file__} is in both train and val"),
        ([*FROM_SHARDS], 1, "contains no shards named *train*.tar"),
        (["--classes", "x"], 2, "--classes"),
    ],
)
def test_what_is_refused(words, status, message, tmp_path):
    assert message in fails("--out", tmp_path / "out", "--data", tmp_path, *words, status=status)


def test_an_interruption_in_val_keeps_train(foreign, tmp_path, monkeypatch):
    read_shards = []

    def index(dataset, shard):
        read_shards.append(Path(shard.url).name)
        if len(read_shards) == len(TRAIN) + 1:
            raise OSError("the disk is gone")
        return index_shard(dataset, shard)

    index_shard = WebDataset.index_shard
    monkeypatch.setattr(WebDataset, "index_shard", index)
    monkeypatch.setattr(preparation, "READER_THREADS", 1)
    words = [*FROM_SHARDS, "--data", foreign, "--out", tmp_path / "index"]
    assert "run the same command to resume" in fails(*words)
    begun = len(read_shards)
    assert "keeping train\n" in prep(*words)
    assert {name.partition("-")[0] for name in read_shards[begun:]} == {"val"}
    assert not list((tmp_path / "index").glob(".*"))


def test_a_shard_in_s3_that_was_replaced_is_refused(in_s3, tmp_path):
    prep(*FROM_SHARDS, "--data", in_s3.url, "--out", tmp_path / "index")
    in_s3.write("train/00000.tar", bytes(int(SHARD_GIB * 2**30)))
    train = training_split(str(tmp_path / "index"), tmp_path / "cache")
    with pytest.raises(ValueError, match="does not match the SHA-256"):
        read(train, [(0, np.array([0]))])
