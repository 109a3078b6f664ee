"""Tests of prep_imagenet.py on a miniature ILSVRC2012: formats, sources, broken input and interruptions."""

import hashlib
import json
import os
import resource
import shutil
import signal
import subprocess
import sys
import tarfile
import time
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pexpect
import psutil
import pytest
from PIL import Image

from onecurve.data.decode import decode_image
from onecurve.data.shards import ShardImages, find_local_manifest, parse_shard_index
from onecurve.system import progress
from onecurve.system.s3 import ObjectStore
from tests.conftest import ROOT, Job, full, python, rows_of, run, small_disk, wait_until
from tests.support.data_sets import encode, tar, write
from tests.support.imagenet import DEVKIT, TRAIN, VAL, Ilsvrc, fails, forked, make_ilsvrc, prep, write_devkit
from tests.support.s3 import BUCKET, s3, s3_proxy, use_s3  # noqa: F401
from tools.prepare import devkit, originals, preparation

MINI = ["--no_verify", "--subset"]
SMALL = ["--shard_mib", "0.1"]  # Size in MiB that splits the training images into about 7 shards


@pytest.fixture(scope="module")
def shards(ilsvrc, tmp_path_factory) -> Path:
    out = tmp_path_factory.mktemp("shards") / "out"
    command = [*python(), "prep_imagenet.py"]
    run([*command, "--data", ilsvrc.folder, "--out", out, *MINI, *SMALL], warm=False)
    return out


def contents(folder: Path) -> dict[str, str]:
    """Return the SHA-256 of every file below a folder, including hidden files."""
    return {
        str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


def downloaded(store: ObjectStore, folder: Path) -> dict[str, str]:
    """Download the prepared data set and return the SHA-256 of every file."""
    folder.mkdir(exist_ok=True)
    for key in store.list():
        store.download(key, folder / key, store.size_and_etag(key)[0])
    return contents(folder)


def read_index(folder: Path, split: str) -> dict[str, tuple[int, bytes]]:
    """Check the manifest, and return each image's label and bytes by the stem of its file name."""
    manifest = find_local_manifest(folder)
    images = {}
    rows = parse_shard_index((folder / f"{split}_index.npy").read_bytes(), manifest, split, split)
    for shard, offset, length, label in rows.tolist():
        with open(folder / manifest.splits[split].shards[shard].file, "rb") as file:
            file.seek(offset - 512)
            stem = Path(file.read(100).rstrip(b"\0").decode()).stem
            file.seek(offset)
            images[stem] = label, file.read(length)
    assert len(images) == len(rows)
    return images


def expected(ilsvrc: Ilsvrc, split: str) -> dict[str, tuple[int, bytes]]:
    contents, labels = getattr(ilsvrc, split), getattr(ilsvrc, f"{split}_labels")
    return {Path(name).stem: (labels[name], data) for name, data in contents.items()}


def assert_same(images: dict, expected_images: dict, odd: set[str] = frozenset()) -> None:
    """Compare all labels and bytes, but only approximate pixels for the re-encoded images in `odd`."""
    assert images.keys() == expected_images.keys()
    for stem, (label, data) in expected_images.items():
        assert images[stem][0] == label
        if stem not in odd:
            assert images[stem][1] == data
            continue
        pixels, original = decode_image(images[stem][1]).astype(int), decode_image(data)
        assert images[stem][1][:2] == b"\xff\xd8"
        assert np.abs(pixels - original).mean() < 4


def odd(ilsvrc: Ilsvrc) -> set[str]:
    return {Path(ilsvrc.cmyk).stem, Path(ilsvrc.png).stem}


# --- Output formats


def test_shards(ilsvrc, shards):
    assert_same(read_index(shards, "train"), expected(ilsvrc, "train"), odd(ilsvrc))
    assert_same(read_index(shards, "val"), expected(ilsvrc, "val"))
    manifest = json.loads((shards / "manifest.json").read_text())
    assert [c["wnid"] for c in manifest["classes"]] == ilsvrc.wnids
    assert [c["name"] for c in manifest["classes"]] == ilsvrc.names
    assert manifest["reencoded"] == [
        {"split": "train", "key": Path(ilsvrc.cmyk).stem, "why": "CMYK"},
        {"split": "train", "key": Path(ilsvrc.png).stem, "why": "PNG"},
    ]
    for split in ("train", "val"):
        for shard in manifest["splits"][split]["shards"]:
            content = (shards / shard["file"]).read_bytes()
            assert (len(content), hashlib.sha256(content).hexdigest()) == (shard["bytes"], shard["sha256"])
    assert not any(path.name.startswith(".") for path in shards.iterdir())


def test_the_seed_decides_which_shard(ilsvrc, shards, tmp_path):
    """Check that a seed always writes identical shards, and that a shard contains images of many classes."""
    rows = np.load(shards / "train_index.npy")
    labels_by_shard = [set(rows[rows[:, 0] == shard, 3]) for shard in np.unique(rows[:, 0])]
    assert len(labels_by_shard) > 4
    assert np.mean([len(labels) for labels in labels_by_shard]) > 4
    for name, seed in {"same": 0, "other": 1}.items():
        prep("--data", ilsvrc.folder, "--out", tmp_path / name, "--seed", seed, *MINI, *SMALL)
    assert contents(tmp_path / "same") == contents(shards)
    assert contents(tmp_path / "other")["train-00000.tar"] != contents(shards)["train-00000.tar"]


def test_shards_are_read_by_tar_webdataset_and_the_standard_library(ilsvrc, shards, tmp_path):
    from datasets import load_dataset

    expected_images = expected(ilsvrc, "train")
    names = set()
    for file in sorted(shards.glob("train-*.tar")):
        listed = subprocess.run(["tar", "-tf", file], capture_output=True, text=True, check=True)
        assert listed.stderr == ""
        with tarfile.open(file) as archive:
            assert archive.getnames() == listed.stdout.splitlines()
            for image, label in zip(*[iter(archive)] * 2, strict=True):
                stem, _ = os.path.splitext(image.name)
                assert (image.name, label.name) == (f"{stem}.jpg", f"{stem}.cls")
                assert int(archive.extractfile(label).read()) == expected_images[stem][0]
                if stem not in odd(ilsvrc):
                    assert archive.extractfile(image).read() == expected_images[stem][1]
                names.add(stem)
    assert names == expected_images.keys()
    tars = [str(file) for file in sorted(shards.glob("train-*.tar"))]
    rows = load_dataset("webdataset", data_files=tars, split="train", streaming=True, cache_dir=str(tmp_path))
    assert {row["__key__"]: int(row["cls"]) for row in rows} == {
        key: entry[0] for key, entry in expected_images.items()
    }


def test_resize(ilsvrc, tmp_path):
    out = tmp_path / "out"
    prep("--data", ilsvrc.folder, "--out", out, "--resize", 120, *MINI, *SMALL)
    images = read_index(out, "train")
    for stem, (label, data) in expected(ilsvrc, "train").items():
        assert images[stem][0] == label
        # decode_image applies EXIF rotations
        resized, original = decode_image(images[stem][1]), decode_image(data)
        height, width = original.shape[:2]
        if min(height, width) <= 120:
            assert stem in odd(ilsvrc) or images[stem][1] == data
            continue
        assert min(resized.shape[:2]) == 120
        assert max(resized.shape[:2]) == max(height, width) * 120 // min(height, width)
        expected_image = Image.fromarray(original).resize(resized.shape[1::-1], Image.Resampling.BILINEAR)
        assert np.abs(resized.astype(int) - np.asarray(expected_image)).mean() < 4
    assert json.loads((out / "manifest.json").read_text())["resize"] == {"short_side": 120, "quality": 90}


# --- Sources of images


@pytest.mark.parametrize("source", ["tar", "folder"])
def test_other_images(source, ilsvrc, tmp_path):
    """Prepare names with dots and spaces, a real PNG, an image name shared by two classes, and non-image
    files.

    The source folders also contain links and images in subfolders.
    """
    photograph, drawing = next(iter(ilsvrc.val.values())), encode(Image.new("RGB", (8, 8), "red"), "PNG")
    classes = {
        "st. bernard": {"1.jpg": photograph, "a.b.jpeg": photograph, ".hidden.jpg": b"", "notes.txt": b""},
        "cat": {"1.jpg": photograph, "red.png": drawing},
    }
    keys = {"cat/1.jpg", "cat/red.png", "st. bernard/1.jpg", "st. bernard/a_b.jpg"}
    data = tmp_path / "data"
    data.mkdir()
    for split in ("train", "val"):
        if source == "tar":
            content = tar({"./._cat.tar": b"x"} | {f"{c}.tar": tar(files) for c, files in classes.items()})
            (data / f"{split}.tar").write_bytes(content)
        else:
            images = {
                f"{split}/{name}/{file}": c for name, files in classes.items() for file, c in files.items()
            }
            write(data, images | {f"{split}/cat/x/y/1.JPG": photograph})
    if source == "folder":
        keys |= {"cat/x_y_1.jpg"}
        (data / "train" / "cat").rename(tmp_path / "cats")
        (data / "train" / "cat").symlink_to(tmp_path / "cats")
    prep("--from", source, "--data", data, "--out", tmp_path / "out")
    with tarfile.open(tmp_path / "out" / "train-00000.tar") as archive:
        assert {name for name in archive.getnames() if not name.endswith(".cls")} == keys
        assert archive.extractfile("cat/1.jpg").read() == photograph
    manifest = json.loads((tmp_path / "out" / "manifest.json").read_text())
    assert [c["name"] for c in manifest["classes"]] == ["cat", "st. bernard"]
    rows = np.load(tmp_path / "out" / "val_index.npy")
    assert sorted(rows[:, 3]) == [0] * (len(rows) - 2) + [1, 1]


KAGGLE = (
    "ImageId,PredictionString\nx_val_2,n02 8 9 1 2 \nx_val_1,n01 1 2 3 4 n01 5 6 7 8 \nx_val_3,n02 1 2 3 4\n"
)
PUBLISHED = {
    "Kaggle": ({"ILSVRC/Data/CLS-LOC/val/{}": None, "LOC_val_solution.csv": KAGGLE}, "ILSVRC/Data/CLS-LOC"),
    "Tiny ImageNet": (
        {
            "val/images/{}": None,
            "val/val_annotations.txt": "".join(f"x_val_{k}.JPEG\tn0{min(k, 2)}\t0\t32\n" for k in (1, 2, 3)),
        },
        ".",
    ),
}


@pytest.mark.parametrize("form", PUBLISHED)
def test_a_file_lists_the_classes_of_val(form, ilsvrc, tmp_path):
    """Check that nothing is copied if the label file is missing or if train lacks one of val's classes."""
    files, below = PUBLISHED[form]
    photographs = list(ilsvrc.val.values())
    images = {f"{below}/train/n0{c}/images/{k}.JPEG": photographs[c + k] for c in (1, 2) for k in (0, 2)}
    for name, text in files.items():
        if text is None:
            images |= {name.format(f"x_val_{k}.JPEG"): photographs[k] for k in (1, 2, 3)}
        else:
            images[name] = text.encode()
            label_file = tmp_path / "data" / name
    words = ["--from", "folder", "--data", write(tmp_path / "data", images) / below]
    assert "left out" not in prep(*words, "--out", tmp_path / "out").replace("left out: 1 .txt", "")
    rows = np.load(tmp_path / "out" / "val_index.npy")
    assert sorted(rows[:, 3]) == [0, 1, 1]
    with tarfile.open(tmp_path / "out" / "val-00000.tar") as archive:
        names = [name for name in archive.getnames() if "x_val_3" in name]
        assert {name.partition("/")[0] for name in names} == {"n02"}
    label_file.write_text(label_file.read_text().replace("n01", "n09"))
    assert "val contains classes that are not in train: n09" in fails(*words, "--out", tmp_path / "wrong")
    label_file.write_text("")
    assert "does not contain the class of" in fails(*words, "--out", tmp_path / "wrong")
    label_file.unlink()
    if form == "Kaggle":
        assert "Put LOC_val_solution.csv," in fails(*words, "--out", tmp_path / "wrong")
    assert not (tmp_path / "wrong").exists()


VAL_LABELS = {  # Functions that format a line of a label list from an image's name, WordNet ID and label
    "synsets, as TensorFlow's": lambda name, wnid, label: f"{wnid}\n",
    "indices": lambda name, wnid, label: f"{label}\r\n",
    "names and indices, as Caffe's": lambda name, wnid, label: f"{name} {label}\n",
    "names and boxes, as Kaggle's": lambda name, wnid, label: f"{name[:-5]},{wnid} 1 2 3 4 {wnid} 5 6 7 8\n",
}


@pytest.fixture
def two_tars(ilsvrc, tmp_path) -> Path:
    """Return a folder with ILSVRC2012's two image archives but without the development kit."""
    (tmp_path / "tars").mkdir()
    for name in (TRAIN, VAL):
        (tmp_path / "tars" / name).symlink_to(ilsvrc.folder / name)
    return tmp_path / "tars"


@pytest.mark.parametrize(
    ("form", "source"), [*((form, "imagenet") for form in VAL_LABELS), ("indices", "tar")]
)
def test_without_the_development_kit(form, source, ilsvrc, two_tars, tmp_path):
    labels = sorted(ilsvrc.val_labels.items(), reverse="names" in form)
    lines = [VAL_LABELS[form](name, ilsvrc.wnids[label], label) for name, label in labels]
    header = "ImageId,PredictionString\n" if "boxes" in form else ""
    (tmp_path / "labels.txt").write_text("".join([header, *lines]))
    words = ["--from", source, "--data", two_tars, "--val_labels", tmp_path / "labels.txt"]
    prep(*words, *MINI, "--out", tmp_path / "out")
    for split, count in (("train", 60), ("val", 30)):
        images = read_index(tmp_path / "out", split)
        assert {name: label for name, (label, _) in images.items()} == {
            Path(name).stem: label for name, label in getattr(ilsvrc, f"{split}_labels").items()
        }
        assert len(images) == count
    classes = json.loads((tmp_path / "out" / "manifest.json").read_text())["classes"]
    assert [entry["wnid"] for entry in classes] == ilsvrc.wnids


WRONG_VAL_LABELS = {
    "ids of the kit": (lambda ids, lines: ids, "numbers the classes from 1, like the development kit"),
    "unknown synset": (
        lambda ids, lines: ["n99999999", *lines[1:]],
        "line 1: n99999999 is not one of",
    ),
    "beyond the classes": (
        lambda ids, lines: [*lines[:-1], "11"],
        "line 30: 11 is not one of the",
    ),
    "negative": (lambda ids, lines: [*lines[:-1], "-1"], "line 30: -1 is not one of the 10 classes"),
    "too short": (
        lambda ids, lines: lines[:-1],
        "_val.tar: ILSVRC2012_val_00000030.JPEG is not one",
    ),
    "a gap": (lambda ids, lines: ["ILSVRC2012_val_00000002.JPEG 1"], "has no label for validation image 1"),
    "empty": (lambda ids, lines: [], "contains no labels"),
}


@pytest.mark.parametrize("fault", WRONG_VAL_LABELS)
def test_wrong_labels_of_val(fault, ilsvrc, two_tars, tmp_path):
    labels = [ilsvrc.val_labels[name] for name in sorted(ilsvrc.val_labels)]
    change, message = WRONG_VAL_LABELS[fault]
    lines = change([str(ilsvrc.ids[i]) for i in labels], [ilsvrc.wnids[i] for i in labels])
    (tmp_path / "labels.txt").write_text("\n".join(lines))
    words = ["--data", two_tars, "--val_labels", tmp_path / "labels.txt", "--out", tmp_path / "out"]
    assert message in fails(*words, *MINI)


def test_missing_labels_are_reported_with_a_remedy(ilsvrc, two_tars, tmp_path):
    """Check the remedy for missing val labels. The train archive contains the class names."""
    words = ["--data", two_tars, "--out", tmp_path / "out", *MINI]
    for source in ("imagenet", "tar"):
        output = fails("--from", source, *words)
        assert "ILSVRC2012_devkit_t12.tar.gz, which contains the labels of val" in output
        assert "--val_labels FILE" in output
    labels = tmp_path / "labels.txt"
    labels.write_text("\n".join(ilsvrc.wnids * 3))
    assert "contains 10 classes, but ILSVRC2012 has" in fails(*words[:5], "--val_labels", labels)
    kit = ["--devkit", ilsvrc.devkit, "--val_labels", labels]
    assert "contains the labels of val. Remove --val_labels" in fails(*words, *kit)
    (two_tars / VAL).unlink()
    assert "no val split" in prep(*words)


def test_one_split_alone(ilsvrc, tmp_path):
    words = ["--train", ilsvrc.train_tar, "--devkit", ilsvrc.devkit, "--out", tmp_path / "out"]
    assert "no val split" in prep(*words, *MINI)
    assert json.loads((tmp_path / "out" / "manifest.json").read_text())["splits"].keys() == {"train"}


@pytest.fixture
def in_s3(s3, monkeypatch) -> None:  # noqa: F811
    use_s3(monkeypatch, s3)


def test_s3(ilsvrc, shards, in_s3, tmp_path, monkeypatch):
    source, store = (ObjectStore(f"s3://{BUCKET}/prep/{name}") for name in ("in", "out"))
    for name in (TRAIN, VAL, DEVKIT):
        source.upload(ilsvrc.folder / name, name)
    words = ["--data", source.url, "--out", store.url, "--work_dir", tmp_path / "work"]
    store.write("train-00099.tar", b"somebody's data set")
    assert "contains other objects, such as train-00099.tar" in fails(*words, *MINI)
    assert store.list() == ["train-00099.tar"]
    store.delete(["train-00099.tar"])
    store.write(".probe-0123/object", b"of a killed one")
    monkeypatch.setattr(progress, "LINE_INTERVAL_S", -1)
    assert "train  0.00 of 0.00 GiB uploaded" in prep(*words, *MINI, *SMALL)
    store.delete([".probe-0123/object"])
    assert list((tmp_path / "work").iterdir()) == []
    assert downloaded(store, tmp_path / "out") == contents(shards)
    assert "is already complete" in prep(*words, *MINI, *SMALL)
    store.delete(["train-00001.tar"])
    assert "train-00001.tar is missing or has a different size" in fails(*words, *MINI, *SMALL)


@pytest.mark.parametrize("lost", [False, True])
def test_s3_continues_after_a_kill(lost, ilsvrc, shards, s3_proxy, tmp_path, monkeypatch):  # noqa: F811
    """Resume an upload to S3 with the journal in --work_dir, or start over if the journal is lost.

    A journal lists the uploads to only one destination.

    Args:
        lost: Whether --work_dir was deleted after the kill.
    """
    use_s3(monkeypatch, s3_proxy.endpoint)
    store = ObjectStore(f"s3://{BUCKET}/killed-{lost}")
    work = tmp_path / "work"
    source = ["--data", ilsvrc.folder, *MINI, *SMALL]
    words = [*source, "--out", store.url, "--work_dir", work]
    s3_proxy.on("PUT", "train-00003", lambda: job.process.send_signal(signal.SIGKILL))
    job = Job(["prep_imagenet.py", *words])
    assert job.wait()[0] == -signal.SIGKILL
    if lost:
        shutil.rmtree(work)
        store.write("train-00099.tar", b"of more shards than there are now")
    else:
        before = contents(work)
        for out in ([f"{store.url}-2", "--work_dir", work], [work]):
            message = fails(*source, "--out", *out)
            assert f"{work} contains a preparation for --out {store.url}. Resume this preparation" in message
        assert contents(work) == before
    prep(*words)
    uploads = [path for method, path, _ in s3_proxy.requests if method == "PUT"]
    assert sum("train-00001" in path for path in uploads) == 1 + lost
    assert not list(work.iterdir())
    assert downloaded(store, tmp_path / "out") == contents(shards)


# --- Wrong input


@pytest.mark.parametrize(("words", "message"), rows_of("prep_imagenet.py wrong flags"))
def test_wrong_flags(words, message, tmp_path):
    output = fails("--data", tmp_path, "--out", tmp_path / "out", *words, status=2)
    assert message in output
    assert "pw" not in output
    assert not (tmp_path / "out").exists()


def broken(ilsvrc: Ilsvrc, folder: Path, **archives: bytes) -> Path:
    """Copy the miniature data set and replace the train or val archive."""
    shutil.copytree(ilsvrc.folder, folder)
    for part, content in archives.items():
        (folder / {"train": TRAIN, "val": VAL}[part]).write_bytes(content)
    return folder


def class_tars(ilsvrc: Ilsvrc) -> dict[str, bytes]:
    with tarfile.open(ilsvrc.train_tar) as archive:
        return {member.name: archive.extractfile(member).read() for member in archive}


ESCAPED = "../../../escaped.JPEG"
TWICE = dict.fromkeys(("a.JPEG", "./a.JPEG"), b"x")
BROKEN = {  # Function that builds the training tar, and expected message, for each fault
    "parent": (lambda _: tar({"n01440764.tar": tar({ESCAPED: b"x"})}), f".tar: {ESCAPED} is not a plain"),
    "truncated": (lambda i: i.train_tar.read_bytes()[:500_000], f"{TRAIN} is truncated and contains only"),
    "unknown class": (lambda _: tar({"n99999999.tar": tar({"a.JPEG": b"x"})}), "n99999999"),
    "same name": (lambda _: tar({"n01440764.tar": tar(TWICE)}), "and another image have the same key"),
    "empty": (lambda _: tar({"n01440764.tar": tar({"n01440764_5.JPEG": b""})}), "n01440764_5.JPEG is empty"),
    "no class tar": (lambda i: i.val_tar.read_bytes(), "is not a class tar"),
    "no images": (lambda _: tar({"n01440764.tar": tar({"a.txt": b"x"})}), "n01440764.tar contains no images"),
    "nothing": (lambda _: tar({}), "contains no images"),
}


@pytest.mark.parametrize("fault", BROKEN)
def test_a_broken_archive(fault, ilsvrc, tmp_path):
    make, message = BROKEN[fault]
    data = broken(ilsvrc, tmp_path / "data", train=make(ilsvrc))
    output = fails("--data", data, "--out", tmp_path / "out", *MINI)
    assert message in output
    assert not (tmp_path / "out" / "manifest.json").exists()
    assert {path.name for path in tmp_path.iterdir()} == {"data", "out"}
    assert not list((tmp_path / "out").rglob("*escaped*"))


def test_parts_of_the_data_that_do_not_fit(ilsvrc, tmp_path):
    """Check the messages for wrong MD5 sums and counts and for missing, incomplete or unsuitable devkits."""
    words = ["--data", broken(ilsvrc, tmp_path / "data"), "--out", tmp_path / "out"]
    assert f"The file's MD5 is {ilsvrc.md5(ilsvrc.devkit)}" in fails(*words)
    assert "1,000" in fails(*words, "--no_verify")
    fewer = make_ilsvrc(tmp_path / "fewer", val=2)
    shutil.copy(fewer.devkit, tmp_path / "data")
    assert "is not one of the 20 images" in fails(*words, *MINI)
    write_devkit(tmp_path / "data" / DEVKIT, None, ilsvrc.ids)
    assert "meta.mat" in fails(*words[:2], "--out", tmp_path / "out2", *MINI)
    (tmp_path / "data" / DEVKIT).unlink()
    assert DEVKIT in fails(*words, *MINI)


@pytest.fixture
def published(ilsvrc, monkeypatch) -> tuple[tuple[str, str], ...]:
    """Replace the published MD5 sums with the miniature data set's."""
    files = {"train": ilsvrc.train_tar, "val": ilsvrc.val_tar, "devkit": ilsvrc.devkit}
    sums = {part: ilsvrc.md5(file) for part, file in files.items()}
    for part, md5 in sums.items():
        monkeypatch.setitem(devkit.MD5_BY_PART, part, md5)
    return tuple(sums.items())


def test_md5(ilsvrc, shards, published, tmp_path):
    """Check that a training tar with a flipped bit is refused.

    A preparation from the correct tar must then replace all output.
    """
    content, out = bytearray(ilsvrc.train_tar.read_bytes()), tmp_path / "out"
    content[2000] ^= 1  # Flip a bit in the first image
    data = broken(ilsvrc, tmp_path / "data", train=content)
    words = ["--subset", *SMALL, "--data", data, "--out", out]
    output = fails(*words)
    for text in (hashlib.md5(content).hexdigest(), ilsvrc.md5(ilsvrc.train_tar), "--no_verify"):
        assert text in output
    assert not (out / "manifest.json").exists()
    shutil.copy(ilsvrc.train_tar, data)
    prep(*words)
    assert contents(out) == contents(shards)


WIDE = encode(Image.new("RGB", (70_000, 1)), "PNG")


@pytest.mark.parametrize(
    ("content", "reason"),
    [(None, "truncated"), (WIDE, "Maximum supported image dimension")],
    ids=["cut", "too wide for a JPEG"],
)
def test_an_image_that_can_not_be_resized_is_named(content, reason, ilsvrc, tmp_path, capfd):
    content = content or next(iter(ilsvrc.val.values()))[:2000]
    data = write(tmp_path / "data", {"train/cat/a.jpg": content})
    message = fails("--from", "folder", "--data", data, "--out", tmp_path / "out", "--resize", "256")
    assert f"{data / 'train' / 'cat'}: a.jpg can't be decoded: " in message
    assert reason in message + capfd.readouterr().err  # libjpeg prints the reason to stderr
    assert not (tmp_path / "out" / "manifest.json").exists()


@pytest.mark.parametrize("path", ["train/cat/b.jpg", "train/dog", "train/cat/more/b.TIF"])
def test_dangling_links_of_a_folder_are_refused(path, ilsvrc, tmp_path):
    """Check that dangling links in class folders are refused, but other files are skipped."""
    image = next(iter(ilsvrc.val.values()))
    data = write(tmp_path / "data", {"train/cat/a..jpg": image, "train/cat/notes.txt": b""})
    (data / path).parent.mkdir(exist_ok=True)
    (data / path).symlink_to("absent")
    message = f"{data / path} is a dangling link"
    assert message in fails("--from", "folder", "--data", data, "--out", tmp_path / "out")


def test_images_with_equal_names_get_separate_keys():
    files = [SimpleNamespace(name=name) for name in ("1.jpg", "1.png", "a.b.jpg", "a_b.jpg")]
    keys = [file.key for file in originals.labeled_files([("cat", "cat/", files)], lambda *_: 0)]
    assert keys == ["cat/1", "cat/1_png", "cat/a_b", "cat/a_b_jpg"]


def test_names_too_long_for_plain_tar_headers(ilsvrc, tmp_path):
    """Prepare a class name longer than 155 bytes and image names longer than 100 bytes."""
    from datasets import load_dataset

    image = next(iter(ilsvrc.val.values()))
    keys = {f"{'c' * 190}/{'i' * 190}", f"cat/{'ü' * 90}", "cat/1"}
    paths = [f"{split}/{key}.jpg" for split in ("train", "val") for key in keys]
    data = write(tmp_path / "data", dict.fromkeys(paths, image))
    prep("--from", "folder", "--data", data, "--out", tmp_path / "out")
    shard = tmp_path / "out" / "train-00000.tar"
    names = {f"{key}.{extension}" for key in keys for extension in ("jpg", "cls")}
    words, utf8 = ["tar", "-tf", shard, "--quoting-style=literal"], {**os.environ, "LC_ALL": "C.UTF-8"}
    listed = subprocess.run(words, capture_output=True, text=True, check=True, env=utf8)
    assert (set(listed.stdout.splitlines()), listed.stderr) == (names, "")
    with tarfile.open(shard) as archive:
        assert all(archive.extractfile(f"{key}.jpg").read() == image for key in keys)
    rows = load_dataset("webdataset", data_files=[str(shard)], split="train", streaming=True)
    assert {row["__key__"]: int(row["cls"]) for row in rows} == {key: int(key[:3] == "ccc") for key in keys}
    images = ShardImages(tmp_path / "out" / "train_index.npy", (str(shard),))
    assert all((images.decode(i) == decode_image(image)).all() for i in range(len(keys)))


def test_counts_that_are_not_the_published_ones(ilsvrc, tmp_path, monkeypatch):
    """Prepare without --subset, with the miniature's class and image counts as the published counts."""
    monkeypatch.setattr(devkit, "CLASS_COUNT", 10)
    monkeypatch.setattr(devkit, "VAL_IMAGES_PER_CLASS", 3)
    words = ["--no_verify"]
    prep(*words, "--data", ilsvrc.folder, "--out", tmp_path / "out")
    faults = {
        "9 classes instead of 10": {"train": tar(dict(list(class_tars(ilsvrc).items())[1:]))},
        "29 images instead of 30": {"val": tar(dict(list(ilsvrc.val.items())[1:]))},
    }
    for number, (message, archive) in enumerate(faults.items()):
        data, out = broken(ilsvrc, tmp_path / f"data{number}", **archive), tmp_path / f"out{number}"
        assert f"contains {message}. Download the archive again" in fails(
            *words, "--data", data, "--out", out
        )
        assert not (out / "manifest.json").exists()
        prep(*words, "--data", data, "--out", f"{out}-subset", "--subset")


@pytest.mark.parametrize("damage", ["gone", "shorter", "no index"])
def test_a_complete_data_set_that_lost_a_file(damage, ilsvrc, shards, tmp_path):
    out = shutil.copytree(shards, tmp_path / "out")
    file = out / ("train_index.npy" if damage == "no index" else "train-00001.tar")
    os.truncate(file, 512) if damage == "shorter" else file.unlink()
    message = fails("--data", ilsvrc.folder, "--out", out, *MINI, *SMALL)
    assert f"was complete, but {file.name} is missing or has a different size. Empty" in message


def test_other_settings_and_foreign_files(ilsvrc, shards, tmp_path):
    """Check that different settings and foreign files are refused and leave the output folder unchanged."""
    out = shutil.copytree(shards, tmp_path / "out")
    words = ["--data", ilsvrc.folder, "--out", out, *MINI, *SMALL]
    assert "is already complete" in prep(*words)
    assert "seed was 0 and is now 7" in fails(*words, "--seed", 7)
    assert "resize was None" in fails(*words, "--resize", 64)
    data = broken(ilsvrc, tmp_path / "data", val=ilsvrc.val_tar.read_bytes() + bytes(512))
    assert "inputs" in fails("--data", data, *words[2:])
    assert contents(out) == contents(shards)
    for name, content, message in (
        ("manifest.json", '{"name": "webapp"}', "contains the manifest.json of a different program"),
        ("manifest.json", "no JSON", "contains the manifest.json of a different program"),
        ("thesis.tex", "x", "contains other files, such as thesis.tex"),
    ):
        shutil.rmtree(out)
        out.mkdir()
        (out / name).write_text(content)
        assert message in fails(*words)
        assert [(path.name, path.read_text()) for path in out.iterdir()] == [(name, content)]


def test_an_image_that_moved_to_another_class(ilsvrc, tmp_path):
    """Check that moving an image to another class is detected, although the total size stays the same.

    Changes to modification times alone are accepted.
    """
    image = next(iter(ilsvrc.val.values()))
    paths = ("train/cat/1.jpg", "train/cat/2.jpg", "train/dog/1.jpg")
    data = write(tmp_path / "data", dict.fromkeys(paths, image))
    words = ["--from", "folder", "--data", data, "--out", tmp_path / "out"]
    prep(*words)
    os.utime(data / "train" / "cat" / "1.jpg")
    assert "is already complete" in prep(*words)
    (data / "train" / "cat" / "2.jpg").rename(data / "train" / "dog" / "2.jpg")
    assert "started with different settings: names_and_sizes was" in fails(*words)


def test_open_files(ilsvrc, shards, tmp_path):
    limits = ((resource.RLIMIT_NOFILE, (80, 96)),)
    words = ["--data", ilsvrc.folder, *MINI, "--out"]
    # The first preparation writes 24 shards.
    job = forked(tmp_path, *words, tmp_path / "out", "--shard_mib", 0.03, limits=limits)
    assert job.wait()[0] == 0, "the soft limit is raised"
    status, output = forked(tmp_path, *words, tmp_path / "more", "--shard_mib", 0.005, limits=limits).wait()
    assert status == 1
    assert "larger --shard_mib" in output


# --- Interruptions


@pytest.fixture
def eager(monkeypatch) -> None:
    """Process images in batches of 2, as forked preparations do."""
    monkeypatch.setattr(originals, "BATCH_IMAGES", 2)


def command(ilsvrc: Ilsvrc) -> list:
    return ["--data", ilsvrc.folder, *MINI, *SMALL, "--out"]


@pytest.fixture
def killed(eager, tmp_path):
    """Return a function that starts a preparation that kills itself at `stop_at`."""

    def killed(stop_at: str | int, *words: object, **options) -> None:
        status, output = forked(tmp_path, *words, place=stop_at, **options).wait()
        assert status == -signal.SIGKILL, output

    return killed


@pytest.fixture(scope="module")
def straight(ilsvrc, tmp_path_factory) -> Path:
    """Prepare reference shards without an interruption."""
    out = tmp_path_factory.mktemp("straight") / "out"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(originals, "BATCH_IMAGES", 2)
        prep(*command(ilsvrc), out)
    return out


# Where the preparation is killed, its flags, the archive that is touched afterwards, and the expected reason
# for refusing to resume, for each case
STORIES = {
    "the first images": (2, [], "", ""),
    "images": (40, [], "", ""),
    "all images of train": ("train", [], "", ""),
    "all images of val": ("val", [], "", ""),
    "all but the manifest": ("manifest", [], "", ""),
    "more shards than then": (40, ["--shard_mib", 0.03], "", ""),
    "an archive not finished": (40, [], TRAIN, ""),
    "a finished archive": ("val", [], TRAIN, "train changed since"),
    "the devkit": ("val", [], DEVKIT, "devkit changed since"),
    "another seed": ("val", ["--seed", 7], "", "seed was 7 and is now 0"),
}
KEPT = {"val": ["train"], "manifest": ["train", "val"]}


@pytest.mark.parametrize("story", STORIES)
def test_killed_and_started_again(story, killed, ilsvrc, straight, tmp_path):
    """Check that finished splits with unchanged inputs and settings are kept and unfinished splits start
    over.
    """
    stop_at, flags, replaced, refusal = STORIES[story]
    data, out = shutil.copytree(ilsvrc.folder, tmp_path / "data"), tmp_path / "out"
    words = ["--data", data, *MINI, *SMALL, "--out", out]
    killed(stop_at, *words, *flags)
    with pytest.raises(ValueError, match="not complete"):
        find_local_manifest(out)
    if replaced:
        os.utime(data / replaced)
    if refusal:
        assert refusal in fails(*words)
        return
    output = prep(*words)
    assert [split for split in ("train", "val") if f"{split}  " not in output] == KEPT.get(stop_at, [])
    assert contents(out) == contents(straight)


@pytest.mark.full
def test_killed_at_any_moment(eager, ilsvrc, straight, tmp_path):
    words, killed, durations_s = [*command(ilsvrc), tmp_path / "out"], 0, []
    for name in ("cold", "warm"):  # the first run may take several times as long
        began_s = time.monotonic()
        assert forked(tmp_path, *command(ilsvrc), tmp_path / name).wait()[0] == 0
        durations_s.append(time.monotonic() - began_s)
    took_s = min(durations_s)
    for part in (0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9):
        job = forked(tmp_path, *words)
        time.sleep(part * took_s)
        job.process.send_signal(signal.SIGKILL)
        killed += job.wait()[0] != 0
    assert killed > 1
    prep(*words)
    assert contents(tmp_path / "out") == contents(straight)


def test_a_checked_preparation_resumes_from_s3(killed, published, ilsvrc, straight, in_s3, tmp_path):
    store = ObjectStore(f"s3://{BUCKET}/checked")
    for name in (TRAIN, VAL, DEVKIT):
        store.upload(ilsvrc.folder / name, name)
    words = ["--subset", *SMALL, "--data", store.url, "--out", tmp_path / "out"]
    killed("val", *words, md5=published)
    assert "keeping train\n" in prep(*words)
    assert contents(tmp_path / "out") == contents(straight)


@pytest.mark.parametrize("number", [full(signal.SIGINT), signal.SIGTERM])
def test_interrupted(number, eager, ilsvrc, straight, tmp_path):
    words = [*command(ilsvrc), tmp_path / "out"]
    status, output = forked(tmp_path, *words, place=30, signal=number).wait()
    assert status == 130
    assert "the same command to resume" in output
    assert "Traceback" not in output
    prep(*words)
    assert contents(tmp_path / "out") == contents(straight)


def test_a_finished_split_stays_with_its_classes(killed, ilsvrc, tmp_path):
    image = next(iter(ilsvrc.val.values()))
    data = write(tmp_path / "data", {f"{c}/1.jpg": image for c in ("train/ape", "train/cat", "val/cat")})
    words = ["--from", "folder", "--val", data / "val", "--out", tmp_path / "out"]
    killed("manifest", *words)
    assert "the list of classes changed since" in fails(*words, "--train", data / "train")
    assert "1 images of val" in prep(*words)


def test_a_finished_val_split_stays_with_its_labels(killed, ilsvrc, two_tars, tmp_path):
    labels = [ilsvrc.val_labels[name] for name in sorted(ilsvrc.val_labels)]
    label_file = tmp_path / "labels.txt"
    label_file.write_text("\n".join(map(str, labels)))
    words = ["--data", two_tars, "--val_labels", label_file, *MINI, "--out", tmp_path / "out"]
    killed("manifest", *words)
    label_file.write_text("\n".join(map(str, labels[::-1])))
    assert "val_labels changed since" in fails(*words)


def test_a_split_that_failed_leaves_nothing(ilsvrc, tmp_path, monkeypatch):
    """Let val fail after it has written some images, then prepare a val archive without the class of these
    images.
    """
    images = list(ilsvrc.val.values())
    classes = [tar({f"{i}.jpg": image for i, image in enumerate(images[:6])}), tar({"1.jpg": images[7]})]
    data = tmp_path / "data"
    data.mkdir()
    (data / "train.tar").write_bytes(tar({"cat.tar": classes[0], "dog.tar": classes[1]}))
    (data / "val.tar").write_bytes(tar({"cat.tar": classes[0], "wolf.tar": classes[1]}))
    monkeypatch.setattr(preparation, "SAMPLED_BATCHES", 1)
    monkeypatch.setattr(originals, "BATCH_IMAGES", 2)
    # --no_verify disables the threads that check images, because they would be one batch behind.
    words = ["--from", "tar", "--data", data, "--no_verify", "--out"]
    output = fails(*words, tmp_path / "out")
    assert "class wolf is not one of the 2 classes" in output
    assert (tmp_path / "out" / "val-00000.tar").exists()
    (data / "val.tar").write_bytes(tar({"dog.tar": classes[1]}))
    prep(*words, tmp_path / "out")
    prep(*words, tmp_path / "straight")
    assert contents(tmp_path / "out") == contents(tmp_path / "straight")


def test_a_split_finished_without_md5_needs_no_verify(killed, published, ilsvrc, tmp_path):
    words = ["--subset", *SMALL, "--data", ilsvrc.folder, "--out", tmp_path / "out"]
    killed("val", *words, "--no_verify", md5=published)
    assert "train was finished with --no_verify. Resume with --no_verify, or remove" in fails(*words)
    prep(*words, "--no_verify")


def test_a_killed_preparation_leaves_no_process(ilsvrc, tmp_path):
    words = ["--train", ilsvrc.train_tar, "--devkit", ilsvrc.devkit, *MINI, "--resize", 64, "--out"]
    job = forked(tmp_path, *words, tmp_path / "out", place=2)
    # wait() returns only after all processes that inherited the output have ended
    assert job.wait(60)[0] == -signal.SIGKILL
    for folder in ("out", "straight"):
        prep(*words, tmp_path / folder)
    assert contents(tmp_path / "out") == contents(tmp_path / "straight")


def test_two_at_once(eager, ilsvrc, straight, tmp_path):
    words = [*command(ilsvrc), tmp_path / "out"]
    job = forked(tmp_path, *words, place=40, signal=signal.SIGSTOP)
    wait_until(lambda: psutil.Process(job.process.pid).status() == psutil.STATUS_STOPPED)
    assert "another process" in fails(*words)
    job.process.send_signal(signal.SIGCONT)
    assert job.wait()[0] == 0
    assert contents(tmp_path / "out") == contents(straight)


def test_a_file_may_not_grow(eager, ilsvrc, tmp_path):
    """Reach the file size limit RLIMIT_FSIZE in the middle of an image."""
    words = ["--data", ilsvrc.folder, *MINI, "--shard_mib", 64, "--out"]
    limits = ((resource.RLIMIT_FSIZE, (300_000, 300_000)),)
    status, output = forked(tmp_path, *words, tmp_path / "out", limits=limits).wait()
    assert status == 1
    assert "train-00000.tar" in output
    assert "the same command to resume" in output
    assert "Traceback" not in output
    prep(*words, tmp_path / "out")
    prep(*words, tmp_path / "straight")
    assert contents(tmp_path / "out") == contents(tmp_path / "straight")


def test_free_space_is_checked_first(ilsvrc, tmp_path):
    with small_disk(tmp_path / "disk", "500k") as disk:
        assert "GiB are free" in fails("--data", ilsvrc.folder, "--out", disk / "out", *MINI)
        assert [path.name for path in (disk / "out").iterdir()] == [".progress.json"]


def test_the_line_of_a_split(monkeypatch, capsys):
    monkeypatch.setattr(progress, "time", SimpleNamespace(monotonic=lambda: now_s))
    now_s = 0
    reading = progress.ReadingProgress("train", 10**10)
    now_s = 40
    reading.show(40, 4 * 10**9)
    line = "train  40 images  3.73 of 9.31 GiB  1 images/s  100 MB/s  1:00 left\n"
    assert capsys.readouterr().out == line


def test_a_bar_on_a_terminal(ilsvrc, tmp_path):
    flags = ["--data", ilsvrc.folder, "--out", tmp_path / "out", *MINI]
    words = [str(word) for word in (ROOT / "prep_imagenet.py", *flags)]
    child = pexpect.spawn(sys.executable, words, dimensions=(24, 160), encoding="utf-8", timeout=60)
    child.expect("images/s")
    child.expect("MB/s")
    child.expect("is complete")
    child.expect(pexpect.EOF)
    child.close()
    assert child.exitstatus == 0
