"""Tests of image file names from each source that stores names, in the order of the stored images."""

import json
import os
import tracemalloc

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from onecurve.data.decode import decode_image
from onecurve.data.names import CollectedNames, open_names
from onecurve.run import plots
from onecurve.system.s3 import ObjectStore
from tests.support.data_sets import data_set, jpeg, opened, png, tar, write
from tests.support.imagenet import prep
from tests.support.s3 import BUCKET, s3, use_s3  # noqa: F401 (a fixture)
from tools.inference import report

INDEX = ["--from", "shards", "--format", "index"]


def names_in(split) -> list[str]:
    name_of = split.names()
    return [name_of(number) for number in split.part.stored(np.arange(len(split))).tolist()]


@pytest.mark.parametrize("form", ["folders", "list"])
@pytest.mark.parametrize("are_decoded", [True, False])
@pytest.mark.parametrize("flags", [{}, {"holdout": 0.5}], ids=str)
def test_an_image_has_the_name_of_its_file(form, are_decoded, flags, tmp_path):
    """Check file names in whole and partial training splits, with encoded and with decoded images."""
    data = data_set(tmp_path / "pets", form, train=8, val=4, size=(32, 32) if are_decoded else (40, 30))
    if not are_decoded:
        write(tmp_path / "pets", {"train/a/0.png" if form == "folders" else "train/0.image": png(0, 50, 60)})
    images = opened(data, tmp_path / "cache", **flags)
    assert hasattr(images.val, "images") == are_decoded
    for split in (images.train, images.val):
        for position, name in enumerate(names_in(split)):
            expected = decode_image((tmp_path / "pets" / name).read_bytes())
            stored = split.part.stored(np.array([position]))[0]
            image = split.images[stored] if are_decoded else split.open_images().decode(position)
            assert image.tolist() == expected.tolist()
    folder = images.train.part.folder
    for file in folder.glob("*_names.txt"):  # Caches written by earlier versions contain no names
        file.unlink()
    assert {*names_in(opened(data, tmp_path / "cache", **flags).val)} == {""}


def test_names_are_printable(tmp_path):
    root = data_set(tmp_path / "pets", train=2, val=2)
    file_name = b"caf\xe9\x1b[31m\n, =1.png"
    os.rename(root / "val/a/0.png", os.fsencode(root / "val/a") + b"/" + file_name)
    assert names_in(opened(root, tmp_path / "cache").val)[0] == r"val/a/caf\xe9\x1b[31m\x0a, =1.png"


@pytest.mark.parametrize("form", ["parquet", "saved"])
def test_a_table_gets_names_from_its_image_structs(form, tmp_path):
    structs = [{"bytes": png(k), "path": path} for k, path in enumerate(("b.png", None, "c.png"))]
    if form == "saved":
        import datasets

        rows = {"image": structs, "label": [0, 1, 0]}
        features = {"image": datasets.Image(), "label": datasets.ClassLabel(names=["cat", "dog"])}
        dataset = datasets.Dataset.from_dict(rows, datasets.Features(features))
        datasets.DatasetDict(train=dataset, val=dataset).save_to_disk(tmp_path / "data")
    else:
        (tmp_path / "data").mkdir()
        for split in ("train", "val"):
            table = pa.table({"image": structs, "label": [0, 1, 0]})
            pq.write_table(table, tmp_path / "data" / f"{split}.parquet")
    assert names_in(opened(tmp_path / "data", tmp_path / "cache").val) == ["b.png", "", "c.png"]


def test_shards_get_names_from_their_members(tmp_path):
    """Read image names from the file next to the index, in index order.

    Shards written by an earlier version contain names only in their tar headers.
    """
    data = data_set(tmp_path / "pets", train=20, val=6)
    prep("--from", "folder", "--data", data, "--out", out := tmp_path / "out", "--shard_mib", "0.004")
    for flags in ({}, {"holdout": 0.5}):
        images = opened(out, tmp_path / "cache", **flags)
        for split, folder in ((images.train, "train"), (images.val, "train" if flags else "val")):
            for position, name in enumerate(names_in(split)):
                assert split.open_images().content(position) == (data / folder / name).read_bytes()
    split = opened(out, tmp_path / "cache").train
    expected = names_in(split)
    (out / "train_names.txt").write_text("a.png\n")
    assert {*names_in(split)} == {""}
    (out / "train_names.txt").unlink()
    assert names_in(split) == expected


def test_shards_in_s3_have_their_names_next_to_the_index(s3, tmp_path, monkeypatch):  # noqa: F811
    """Read image names from shards in S3 and on disk. Names are optional."""
    use_s3(monkeypatch, s3)
    shards, store = ObjectStore(f"s3://{BUCKET}/named/tars"), ObjectStore(f"s3://{BUCKET}/named/index")
    long_name = "n01440764/" + 120 * "x" + ".jpg"  # This name is too long for a tar header
    members = {long_name: jpeg(1), f"{long_name[:-4]}.cls": b"0", "n2/b.jpg": jpeg(2), "n2/b.cls": b"1"}
    for split in ("train", "val"):
        write(tmp_path, {f"tars/{split}-0.tar": tar(members)})
        shards.upload(tmp_path / f"tars/{split}-0.tar", f"{split}-0.tar")
    prep(*INDEX, "--data", tmp_path / "tars", "--out", tmp_path / "index")
    assert names_in(opened(tmp_path / "index", tmp_path / "cache").val) == [long_name, "n2/b.jpg"]
    prep(*INDEX, "--data", shards.url, "--out", store.url, "--work_dir", tmp_path / "work")
    assert "val_names.txt" in store.list()
    val = opened(store.url, tmp_path / "cache").val
    assert names_in(val) == [long_name, "n2/b.jpg"]
    store.delete(["val_names.txt"])
    assert names_in(val) == ["", ""]


def test_names_need_little_memory(tmp_path):
    collected = CollectedNames()
    for k in range(100_000):
        collected.add(f"n{k:08}_{k}.JPEG")
    collected.write(tmp_path, "train", np.arange(100_000)[::-1])
    tracemalloc.start()
    name_of = open_names(tmp_path / "train_names.txt", 100_000)
    kept, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert name_of(0) == "n00099999_99999.JPEG"
    assert name_of(99_999) == "n00000000_0.JPEG"
    assert (kept < 1_000_000, peak < 5_000_000) == (True, True)


def test_the_report_contains_ids_and_names(tmp_path, monkeypatch):
    """Check that the report's files contain full names.

    Captions shorten long names, and show the ID of an image that has no name.
    """
    names = {3: "a/=1.png", 5: f"{'b' * 99}.png", 9: ""}
    rows = {"id": [3, 5, 9], "label": [0, 0, 1], "predicted": [1, 1, 0], "probability": [0.7, 0.6, 0.8]}
    rows = {name: np.array(column) for name, column in rows.items()} | {"loss": np.ones(3)}
    rows["top"] = np.array([[1, 0], [1, 0], [0, 1]])
    measured = report.measure(rows, names.__getitem__, 2, tmp_path / "scratch") | {"classes": ["cat", "dog"]}
    captions, draw = [], plots.draw_image_sheet

    def image_sheet(path, images, texts, title):
        captions.extend(texts)
        draw(path, images, texts, title)

    monkeypatch.setattr(plots, "draw_image_sheet", image_sheet)
    report.write_report(
        tmp_path / "out", measured, rows, names.__getitem__, np.zeros((3, 4, 4, 3), np.uint8), "title"
    )
    assert [image["id"] for image in measured["worst"]] == [9, 3, 5]
    assert all(image["file"] == names[image["id"]] for image in measured["worst"])
    assert json.loads((tmp_path / "out/report.json").read_text())["worst"] == measured["worst"]
    assert [caption.split("\n")[0] for caption in captions] == ["id 9", "a/=1.png", f"...{'b' * 37}.png"]
    table = (tmp_path / "out/predictions.csv").read_text().splitlines()
    assert table[0] == "id,file,label,predicted,probability"
    assert table[1:3] == ["3,a/=1.png,cat,dog,0.700000", f"5,{names[5]},cat,dog,0.600000"]
    assert table[3] == "9,,dog,cat,0.800000"
