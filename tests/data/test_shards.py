"""Tests of shards on this host: refusals, sample order, broken images and training runs.

The tests write shards with tarfile instead of prep_imagenet.py. test_shard_stream.py tests shards in S3.
"""

import hashlib
import io
import json
import multiprocessing
import os
import resource
import shutil
import signal
import subprocess
import time
from collections import Counter
from dataclasses import replace
from functools import partial, reduce
from operator import getitem
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from onecurve.data import workers
from onecurve.data.cache import prepare_data
from onecurve.data.crops import evaluation_crop
from onecurve.data.decode import decode_image
from onecurve.data.images import Images, open_images
from onecurve.data.shards import Shard, ShardManifest, SplitManifest, parse_shard_index
from onecurve.data.splits import ShardSplit
from onecurve.data.workers import decoded_batches
from onecurve.flags.recipe import ImageRecipe, share_out
from onecurve.numerics.order import stream_order, training_plan
from onecurve.run.ending import explained_error
from tests.conftest import ROOT, Job, accelerate, lines, python, result, rows_of, run
from tests.support.data_sets import CLASSES, class_folders, jpeg, opened, png, write_manifest, write_shards

RECIPE = ImageRecipe(streams=4, shuffle_window=20)


def change(folder: Path, edit) -> None:
    """Apply `edit` to the shards' manifest."""
    manifest = json.loads((folder / "manifest.json").read_text())
    edit(manifest)
    (folder / "manifest.json").write_text(json.dumps(manifest))


def as_index(folder: Path) -> Path:
    """Write the images as a data set of the kind "index", as in version 1.0.

    The index is in a separate folder and refers to the tar files by absolute paths.
    """
    index_folder = folder.with_name(f"{folder.name}-index")
    index_folder.mkdir()
    manifest = json.loads((folder / "manifest.json").read_text()) | {"kind": "index"}
    for split, content in manifest["splits"].items():
        (index_folder / f"{split}_index.npy").write_bytes((folder / f"{split}_index.npy").read_bytes())
        for shard in content["shards"]:
            shard |= {"file": str(folder / shard["file"]), "sha256": None}
    write_manifest(index_folder, manifest)
    return index_folder


def break_image(folder: Path, sample: int, split: str = "train") -> tuple[str, int]:
    """Overwrite the bytes of an image after its header, and return the image's shard and offset."""
    number, offset, length, _ = np.load(folder / f"{split}_index.npy")[sample].tolist()
    path = folder / f"{split}-{number:05d}.tar"
    with open(path, "r+b") as file:
        file.seek(offset)
        file.write(b"x" * length)
    return str(path), offset


@pytest.fixture(scope="module")
def shards(tmp_path_factory) -> Path:
    return write_shards(tmp_path_factory.mktemp("shards") / "tiny")


@pytest.fixture(scope="module")
def images(shards, tmp_path_factory) -> Images:
    return open_images(prepare_data(str(shards), tmp_path_factory.mktemp("cache")), RECIPE)


def read(split: ShardSplit, plan: list, **options) -> list[tuple]:
    options = {"device": "cpu", "train": True, "size": 32, "seed": 5, "workers": 0, **options}
    return list(split.batches(iter(plan), **options))


# --- Reading


@pytest.mark.parametrize("form", ["shards", "index"])
def test_images_and_labels_equal_those_in_the_tars(form, shards, tmp_path):
    root = as_index(write_shards(tmp_path / "tiny")) if form == "index" else shards
    images = open_images(prepare_data(str(root), tmp_path / "cache"), RECIPE)
    assert images.classes == ("crane (n00000000)", "hen", "crane (n00000002)", "ox")
    assert (len(images.train), len(images.val), images.val_name) == (183, 25, "val")
    assert images.train.mirror
    [(_, ids, pixels, labels)] = read(images.val, [(0, np.array([24, 0, 13]))], train=False)
    assert labels.tolist() == [0, 0, 1]
    for i, image in zip(ids.tolist(), pixels, strict=True):
        assert np.array_equal(image, evaluation_crop(decode_image(jpeg(183 + i)), 32))
    # No image was copied to the cache.
    assert sum(path.stat().st_size for path in tmp_path.glob("cache/*/*")) < 20_000


def test_the_content_of_shards_identifies_the_data(shards, images, tmp_path):
    copy = opened(write_shards(tmp_path / "elsewhere"), tmp_path / "cache")
    assert copy.source == images.source  # Moving the data does not change `source`
    other = write_shards(tmp_path / "other", val=(13, 11))
    assert opened(other, tmp_path / "cache").source != images.source


# --- The order of samples


def test_the_order_never_changes():
    """Compare with the first version's sample order. With a different order, runs can't resume."""
    order = stream_order(7, 3, np.array([5, 3, 4, 6]), streams=2, window=4, batch_size=4)
    assert order.tolist() == [12, 13, 9, 8, 15, 16, 7, 10, 17, 14, 1, 11, 5, 6, 0, 2]


COUNTS = np.array([100, 90, 110, 95, 105, 100, 3, 97, 0, 100])


def test_each_epoch_has_another_order_and_leaves_out_other_images():
    orders = [stream_order(seed, epoch, COUNTS, 8, 64, 32) for seed in (0, 1) for epoch in range(20)]
    assert len({ids.tobytes() for ids in orders}) == 40
    left = Counter()
    for epoch in range(200):
        left.update(set(range(800)) - set(stream_order(0, epoch, COUNTS, 8, 64, 96).tolist()))
    assert left  # Every epoch leaves out 32 images
    assert max(left.values()) < 60


@pytest.mark.parametrize("window", [1, 50, 100_000])
def test_a_stream_needs_few_shards_at_once(window):
    """Check that a stream needs only the shards in its window and the shards at the stream's ends."""
    counts = np.full(64, 100)
    ids = stream_order(3, 0, counts, streams=4, window=window, batch_size=16).reshape(400, 4, 4)
    needed = 0
    for stream in range(4):
        shards = ids[:, stream].reshape(-1) // 100
        first, last = {}, {}
        for position, shard in enumerate(shards.tolist()):
            first.setdefault(shard, position)
            last[shard] = position
        active = [sum(first[s] <= position <= last[s] for s in first) for position in range(1600)]
        needed = max(needed, *active)
    assert needed <= min(2 + window // 100, 17)
    if window == 1:
        # The stream shuffles shards but not the images within a shard.
        assert np.all(np.diff(ids[:, 0].reshape(-1)[:50]) >= 1)


@pytest.mark.parametrize(("batch", "streams", "message"), rows_of("streams"))
def test_streams_that_do_not_divide_are_refused(shards, images, batch, streams, message, tmp_path):
    train = open_images(prepare_data(str(shards), tmp_path), replace(RECIPE, streams=streams)).train
    with pytest.raises(ValueError, match=message):
        train.check_batch(share_out(*batch))


@pytest.mark.parametrize("batch_size", [2, 24, 36, 60, 100])
def test_the_default_streams_fit_any_batch_size(batch_size, shards, tmp_path):
    """Check that the default number of streams fits any number of processes up to 4 that divides the batch
    size.
    """
    train = open_images(prepare_data(str(shards), tmp_path), ImageRecipe(batch_size=batch_size)).train
    for processes in (p for p in (1, 2, 3, 4) if batch_size % p == 0):
        plan = training_plan(train, share_out(batch_size, None, processes), 0, 5, 0, 1)
        assert len(next(iter(plan))[1]) == batch_size // processes


def test_an_evaluation_of_some_images_needs_more_shards_at_once(tmp_path):
    """Evaluate 4 of 40 images, so that a batch of 2 images spans half of the split."""
    folder = write_shards(tmp_path / "many", val=(4,) * 10)
    cached = prepare_data(str(folder), tmp_path / "cache")
    whole, part = (open_images(cached, replace(RECIPE, workers=0, max_val_images=n)).train for n in (None, 4))
    total = sum(shard.bytes for shard in part.evaluated_split.shards)
    assert whole._evaluation_bytes(2) < 0.3 * total
    assert 0.5 * total < part._evaluation_bytes(2) <= total


# --- Refusals


def cut(file: str):
    return lambda f: (f / file).write_bytes((f / file).read_bytes()[:-1])


def gone(file: str):
    return lambda f: (f / file).unlink()


def manifest(**fields):
    return lambda f: change(f, lambda m: m.update(fields))


def without(key: str, *path: str):
    return lambda f: change(f, lambda m: reduce(getitem, path, m).pop(key))


def shard(**fields):
    """Change fields of the val split's first shard."""
    return lambda f: change(f, lambda m: m["splits"]["val"]["shards"][0].update(fields))


def index(save):
    """Rewrite the training split's index by calling `save(file, rows)`.

    The manifest is updated with the SHA-256 of the new index.
    """

    def rewrite(folder: Path) -> None:
        rows = np.load(folder / "train_index.npy")
        with open(folder / "train_index.npy", "wb") as file:
            save(file, rows)
        write_manifest(folder, json.loads((folder / "manifest.json").read_text()))

    return rewrite


BAD = {  # Function that damages the data, and expected message, for each fault
    "no manifest": (gone("manifest.json"), "the same prep_imagenet.py command again to continue"),
    "cut manifest": (cut("manifest.json"), "manifest.json, line 1, is not valid JSON"),
    "format": (manifest(format=2), "has format 2, but this version supports only format 1"),
    "kind": (manifest(kind="zip"), "kind 'zip'"),
    "no classes": (without("classes"), "(invalid: classes)"),
    "class twice": (manifest(classes=[*CLASSES, CLASSES[0]]), "classes, which must be distinct"),
    "name no text": (manifest(name=3), "(invalid: name)"),
    "a value missing": (without("images", "splits", "val"), "(invalid: splits)"),
    "no train": (without("train", "splits"), "contains no train split"),
    "no val": (without("val", "splits"), "with --holdout 0.1"),
    "count": (shard(images=3), "images 25, which differs from the sum"),
    "outside": (shard(file="../a.tar"), "shard '../a.tar'"),
    "one name": (shard(file="train-00000.tar"), "shard 'train-00000.tar'"),
    "hash": (shard(sha256="0"), "shard 'val-00000.tar'"),
    "shard missing": (
        gone("train-00002.tar"),
        "train-00002.tar is listed in manifest.json, but can't be read",
    ),
    "shard cut": (cut("val-00001.tar"), "val-00001.tar contains "),
    "index missing": (gone("val_index.npy"), "val_index.npy"),
    "index changed": (cut("val_index.npy"), "val_index.npy does not match its SHA-256"),
    "pickle": (
        index(lambda file, _: np.save(file, np.array([{}], object))),
        "train_index.npy is not an array",
    ),
    "zip": (index(lambda file, _: np.savez(file, rows=[1])), "train_index.npy is not an int64 array"),
    "unsorted": (index(lambda file, rows: np.save(file, rows[[1, 0, *range(2, 183)]])), "not sorted"),
}


@pytest.mark.parametrize("case", BAD)
def test_damaged_data_is_refused_in_one_line(case, tmp_path):
    damage, message = BAD[case]
    folder = write_shards(tmp_path / "tiny")
    damage(folder)
    with pytest.raises(ValueError, match=r".+") as error:
        prepare_data(str(folder), tmp_path / "cache")
    assert message in str(error.value)
    assert str(folder) in str(error.value)
    assert "\n" not in str(error.value)
    assert not list(tmp_path.glob("cache/[!.]*"))


ENDS = (2048, 4096)  # Sizes of two shards in bytes
ROWS = [[0, 512, 512, 0], [0, 1536, 512, 1], [1, 512, 512, 1], [1, 1024, 3072, 0]]
BOUNDS = [-(2**63), -1, 0, 1, 2, 511, 512, 513, 1024, 1536, 2047, 2049, 3073, 2**63 - 1]
ORDERS = [[0, 1, 2, 3], [1, 0, 2, 3], [0, 2, 1, 3]]
CHANGE = st.tuples(st.integers(0, 3), st.integers(0, 3), st.sampled_from(BOUNDS))


@settings(max_examples=1000)
@given(st.lists(CHANGE, max_size=2), st.sampled_from(ORDERS), st.sampled_from([1, 2, 2, 2]))
def test_an_index_is_accepted_only_if_its_images_are_ordered_inside_their_shards(changes, order, count):
    """Compare the index check with a check that uses Python integers, which do not overflow.

    `count` is the number of images in the first shard.
    """
    rows = np.array(ROWS)[order]
    for row, column, value in changes:
        rows[row, column] = value
    valid, last = rows[:, 0].tolist() == [0] * count + [1] * (4 - count), (0, 512)
    for shard, offset, length, label in rows.tolist():
        begin, end = (shard, offset), (shard, offset + length)
        valid = valid and last <= begin < end <= (shard, ENDS[shard]) and offset >= 512 and label in (0, 1)
        last = end
    out = io.BytesIO()
    np.save(out, rows)
    shards = tuple(map(Shard, ("a.tar", "b.tar"), ENDS, (count, 4 - count), (None, None)))
    split = SplitManifest(4, hashlib.sha256(out.getvalue()).hexdigest(), shards)
    manifest = ShardManifest("shards", "x", ("cat", "dog"), {"train": split}, "")
    if valid:
        assert parse_shard_index(out.getvalue(), manifest, "train", "here").tolist() == rows.tolist()
    else:
        with pytest.raises(ValueError, match=r"^here .*\. Prepare the data again$"):
            parse_shard_index(out.getvalue(), manifest, "train", "here")


# --- File paths in an index

SECRET = "root:$6$hash:19000:0:99999:7:::\n" * 40


def index_of(folder: Path, file: str) -> Path:
    """Write an index that places all images in this file."""
    folder.mkdir()
    rows = np.array([[0, 512, 20, 0], [0, 600, 20, 1]], np.int64)
    shard = {"file": file, "bytes": len(SECRET), "images": 2, "sha256": None}
    splits = {split: {"images": 2, "shards": [shard]} for split in ("train", "val")}
    for split in splits:
        np.save(folder / f"{split}_index.npy", rows)
    write_manifest(folder, {"format": 1, "kind": "index", "name": "x", "classes": CLASSES, "splits": splits})
    return folder


def test_no_message_quotes_a_file_that_is_not_a_tar(tmp_path):
    """Check that no message quotes a non-tar file that an index refers to, because it may be private."""
    (tmp_path / "shadow").write_text(SECRET)
    folder = prepare_data(str(index_of(tmp_path / "index", str(tmp_path / "shadow"))), tmp_path / "cache")
    with pytest.raises(ValueError, match="offset 600") as error:
        read(open_images(folder, ImageRecipe(workers=0)).train, [(0, np.array([1]))])
    assert str(tmp_path / "shadow") in str(error.value)
    assert "hash" not in str(error.value)
    assert "19000" not in str(error.value)


def test_an_index_must_name_files_of_this_host(tmp_path):
    folder = index_of(tmp_path / "index", "s3://bucket/data/a.tar")
    with pytest.raises(ValueError, match="is not a valid manifest"):
        prepare_data(str(folder), tmp_path / "cache")


# --- Broken images


@pytest.mark.parametrize("workers", [0, 2])
def test_a_broken_image_is_reported(tmp_path, workers):
    folder = write_shards(tmp_path / "tiny")
    path, offset = break_image(folder, 70)
    split = open_images(prepare_data(str(folder), tmp_path / "cache"), RECIPE).train
    with pytest.raises(ValueError, match="the file is not in a supported image format") as error:
        read(split, [(0, np.arange(68, 72))], workers=workers)
    assert str(error.value).startswith(f"{path}, offset {offset}, key train_70: ")
    assert str(error.value).endswith(". To train without this image, add --on_bad_image skip")


def test_a_broken_image_is_skipped(tmp_path, capsys):
    """Check that broken images are skipped and that a missing shard is still an error."""
    folder = write_shards(tmp_path / "tiny")
    for sample in (3, 4, 9):
        break_image(folder, sample)
    skip = replace(RECIPE, on_bad_image="skip")
    split = open_images(prepare_data(str(folder), tmp_path / "cache"), skip).train
    workers._skipped_ids.clear()
    plan = [(0, np.array([2, 3, 4, 5])), (0, np.array([8, 9])), (1, np.array([1, 3]))]
    batches = read(split, plan)
    # The returned IDs match the plan, even for skipped images.
    assert [ids.tolist() for _, ids, _, _ in batches] == [ids.tolist() for _, ids in plan]
    # The label belongs to the replacement image, not to the broken image.
    assert [labels.tolist() for *_, labels in batches] == [[2, 1, 1, 1], [0, 0], [1, 1]]
    for _, _, pixels, _ in batches:
        assert pixels.flatten(1).float().std(1).min() > 0  # No returned image is uninitialized or blank
    assert torch.equal(batches[0][2][1], batches[0][2][3])
    assert workers.skipped_ids() == [3, 4, 9]
    assert capsys.readouterr().err.count("skipped: ") == 3
    with pytest.raises(
        ValueError, match=r"none of the 2 images in a micro-batch can be decoded: .*key train_3"
    ):
        read(split, [(0, np.array([3, 4]))])
    with pytest.raises(ValueError, match="key train_3"):  # Evaluations must not skip images
        read(split, [(0, np.array([2, 3]))], train=False)
    (folder / "train-00001.tar").unlink()
    with pytest.raises(ValueError, match=r"train-00001\.tar: No such file"):
        read(split, [(0, np.array([40, 100]))])


def test_a_missing_file_is_not_a_broken_image(tmp_path):
    root = class_folders(tmp_path / "data")
    (root / "train" / "a" / "0.png").write_bytes(png(0, 40, 32))  # Images of different sizes stay encoded
    options = ImageRecipe(on_bad_image="skip")
    split = open_images(prepare_data(str(root), tmp_path / "cache"), options).train
    (root / "train" / "b" / "1.png").write_bytes(b"broken")
    assert len(read(split, [(0, np.arange(len(split)))])) == 1
    (root / "train" / "b" / "1.png").unlink()
    with pytest.raises(ValueError, match=r"b/1\.png: No such file"):
        read(split, [(0, np.arange(len(split)))])


# After 1 s, workers have announced batches that the trainer has not fetched yet.
@pytest.mark.parametrize("wait_s", [0, 1])
def test_a_killed_worker_is_one_line(wait_s, images):
    options = {"device": "cpu", "train": True, "size": 32, "seed": 5, "workers": 2}
    batches = images.train.batches(iter([(0, np.arange(6))] * 100), **options)
    next(batches)
    time.sleep(wait_s)
    for worker in multiprocessing.active_children():
        os.kill(worker.pid, signal.SIGKILL)
    with pytest.raises(ValueError, match=r"a decoding process was killed.*--shm-size.*--workers"):
        list(batches)


def with_one_more_file(open_images):
    """Limit the calling worker process so that it can open only one more file."""
    images = open_images()
    descriptor = os.open(os.devnull, os.O_RDONLY)
    os.close(descriptor)
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (descriptor + 1, hard))
    return images


def test_a_worker_that_cannot_send_does_not_leave_the_trainer_waiting(images):
    """Allow a worker one open file, for its shared memory. Sending the memory requires a second file."""
    open_images, labels = partial(with_one_more_file, images.train.open_images), images.train.labels
    options = {"device": torch.device("cpu"), "train": True, "crop_size": 32, "seed": 5, "worker_count": 1}
    batches = decoded_batches(open_images, labels, [(0, np.arange(6))], skip_broken=False, **options)
    signal.signal(signal.SIGALRM, lambda *_: pytest.fail("no end within 60 s"))
    signal.alarm(60)
    try:
        with pytest.raises(ValueError, match="a decoding process was killed"):
            next(batches)
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, signal.SIG_DFL)


def test_tars_next_to_class_folders_are_ignored(tmp_path):
    root = class_folders(tmp_path / "data")
    for name in ("ILSVRC2012_img_train.tar", "train.tar", "train-1.tar"):
        (root / name).touch()
    assert len(opened(root, tmp_path / "cache").train) > 0
    (root / "train-00000.tar").write_bytes(b"")
    with pytest.raises(ValueError, match=r"contains no manifest\.json\. The preparation .* --from shards"):
        prepare_data(str(root), tmp_path / "cache")


# --- Training

VIT = ["train_vit.py", "--model", "test_vit", "--image_size", "32", "--patch_size", "8", "--log_samples"]
VIT += ["--streams", "4", "--shuffle_window", "20", "--batch_size", "24", "--per_device_batch_size", "6"]
VIT += ["--epochs", "3", "--log_every", "1", "--mixed_precision", "no", "--trackers", "none"]
VIT += ["--workers", "1"]
# Workers are disabled, because their fork server would import torch again in each process of each launch.
NO_WORKERS = ["--workers", "0"]
LAUNCHERS = {1: python(), 2: accelerate("ddp_2gpu"), 4: accelerate("ddp_4gpu")}


def samples(folder: Path) -> list[list[int]]:
    log = lines(folder / "samples.jsonl")
    assert [line["step"] for line in log] == [*range(1, len(log) + 1)]
    return [line["samples"] for line in log]


@pytest.mark.needs("root")  # The test mounts a file system
def test_a_full_dev_shm_is_one_line():
    code = "import torch; import onecurve.data.workers as w; print(w._share_crops(torch.empty(2**20), 8))"
    mounted = 'mount -t tmpfs -o size=256k tmpfs /dev/shm && exec "$@"'
    words = ["unshare", "--mount", "sh", "-c", mounted, "sh", *python(), "-c", code]
    output = subprocess.check_output(words, cwd=ROOT, text=True)
    assert output.startswith("/dev/shm is full. Each process prefetches up to 8 micro-batches")


@pytest.mark.parametrize(
    ("folder", "logged", "newest", "resumes"),
    [("D", 5, 0, True), ("D", 0, 0, False), ("D/*", 5, 0, False), (None, 5, 0, False), (None, 0, 3, True)],
)
def test_a_change_is_advised_only_if_the_run_can_resume(folder, logged, newest, resumes):
    """Check that --allow_changed is advised only if the next start would resume the run.

    Without a checkpoint, the next start creates a new run. If no step was logged, the new run reuses the
    folder.
    """
    recipe, state = ImageRecipe(output_dir=folder), SimpleNamespace(logged_step=logged)
    session = SimpleNamespace(recipe=recipe, state=state, newest_saved_step=newest)
    error = ValueError(f"a.jpg: broken{workers.BROKEN_IMAGE_ADVICE[True]}")
    message = str(explained_error(error, None, None, session))
    assert message.endswith(" --allow_changed on_bad_image") == resumes


def test_a_run_does_not_continue_on_other_data(cache, tmp_path):
    words = [*python(), *VIT, *NO_WORKERS, "--data", tmp_path / "tiny", *cache]
    words += ["--output_dir", tmp_path / "run"]
    write_shards(tmp_path / "tiny")
    run([*words, "--max_steps", "3"])
    shutil.rmtree(tmp_path / "tiny")
    # The total number of images stays the same, but the shards differ
    write_shards(tmp_path / "tiny", (30, 31, 29, 31, 30, 32))
    status, output = Job(words).wait()
    assert status == 1
    assert "step_00000003 was trained on" in output
    assert "--allow_changed data" in output
    assert "continuing at step 3" in run([*words, "--allow_changed", "data", "--max_steps", "4"])


@pytest.mark.full
def test_broken_images_are_replaced_equally_on_any_number_of_processes(cache, tmp_path):
    folder = write_shards(tmp_path / "tiny")
    for sample in (5, 60, 150):
        break_image(folder, sample)
    words = [*VIT, "--data", folder, *cache, "--on_bad_image", "skip", "--output_dir"]
    run([*LAUNCHERS[1], *words, tmp_path / "one"])
    output = run([*LAUNCHERS[2], *words, tmp_path / "two", "--max_steps", "18"])
    for key in ("train_5", "train_60", "train_150"):
        # Each of the two processes reports the image at most once.
        assert 1 <= output.count(f"key {key}: the file is not") <= 2
    output = run([*LAUNCHERS[2], *words, tmp_path / "two"])
    # The last three steps do not use the image, and the checkpoint lists the image as broken.
    assert "key train_60:" not in output
    counts = np.array([31, 30, 29, 31, 30, 32])
    orders = [stream_order(0, epoch, counts, 4, 20, 24) for epoch in range(3)]
    for folder in (tmp_path / "one", tmp_path / "two"):
        assert result(folder)["bad_images"] == 3
        assert samples(folder) == np.concatenate(orders).reshape(-1, 24).tolist()
    logs = [lines(tmp_path / folder / "metrics.jsonl") for folder in ("two", "one")]
    losses, expected = ([line["train/loss"] for line in log if "train/loss" in line] for log in logs)
    assert len(losses) == 21
    assert losses == pytest.approx(expected, abs=1e-4)
