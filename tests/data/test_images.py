"""Tests of onecurve/data/images.py: data sources, the cache, decoding, image order and bad input."""

import errno
import importlib
import io
import json
import multiprocessing
import os
import shutil
import signal
import sys
import threading
import time
from functools import partial
from itertools import product
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from PIL import Image, ImageOps

from onecurve.checkpoint.format import Checkpoint
from onecurve.data import cache as image_cache
from onecurve.data import conversions
from onecurve.data import encoded as encoded_module
from onecurve.data.cache import prepare_cache, prepare_data
from onecurve.data.decode import decode_image
from onecurve.data.encoded import CachedImages
from onecurve.data.images import open_images
from onecurve.data.sources import find_source
from onecurve.data.splits import ArraySplit, FileSplit, SplitPart
from onecurve.flags.recipe import ImageRecipe, parse
from onecurve.models.preprocessing import DataConfig
from onecurve.models.script import recipe_class
from onecurve.numerics.augment import CROP
from onecurve.run.run_setup import RunSetup
from onecurve.system import files
from onecurve.system.processes import is_running, start_ticks
from tests.conftest import ROOT, Job, full, python, read_until, run, wait_until
from tests.support.data_sets import class_folders, encode, opened, parquet_folder, picture, png, write_parquet

PNG = png()


def in_cache(folder: Path) -> list[Path]:
    """Return the cached files except for the lock and the list of broken images."""
    return [
        path
        for path in folder.iterdir()
        if path.name not in (image_cache.LOCK_FILE, image_cache.BROKEN_IMAGES_FILE)
    ]


def read(split: FileSplit | ArraySplit, plan: list, **options) -> tuple[torch.Tensor, torch.Tensor]:
    options = {"device": "cpu", "train": True, "size": 48, "seed": 5, "workers": 0, **options}
    _, _, images, labels = zip(*split.batches(iter(plan), **options), strict=True)
    return torch.cat(images), torch.cat(labels)


def start(folder: Path, script: str, *arguments) -> Job:
    """Write a Python script to the folder and start it with the project on its import path."""
    (folder / "script.py").write_text(script)
    return Job([folder / "script.py", *arguments], env={"PYTHONPATH": str(ROOT)})


# Script that prepares the cache in one thread, and pauses between the splits until the file `go` appears
STALLED = """
import sys, time
from pathlib import Path
from onecurve.data import cache as image_cache
data, cache, go = map(Path, sys.argv[1:])
def decode(images, pixels, ids):
    if len(images) == 20:
        print("MIDDLE", flush=True)
        while not go.exists():
            time.sleep(0.05)
    return real(images, pixels, ids)
real, image_cache._decode_chunk, image_cache.allowed_cores = image_cache._decode_chunk, decode, lambda: 1
print("DONE", image_cache.prepare_data(str(data), cache), flush=True)
"""


# --- Data sources


def test_digits_hold_out_36_of_each_class(tmp_path):
    images = opened("digits", tmp_path)
    assert images.classes == tuple("0123456789")
    assert (len(images.train), len(images.val), images.val_name) == (1437, 360, "val")
    assert not images.train.mirror
    assert images.train.size == (32, 32)
    assert images.train.images.nbytes == 1437 * 32 * 32 * 3
    assert np.bincount(images.val.labels).tolist() == [36] * 10
    # The same images must be held out on every machine.
    assert images.val.labels[:12].tolist() == [4, 5, 6, 9, 4, 7, 8, 9, 9, 6, 9, 9]
    pixels, labels = read(images.train, [(0, np.array([5, 0, 5]))])
    assert pixels.dtype == torch.uint8
    assert pixels.shape == (3, 32, 32, 3)
    assert labels.tolist() == images.train.labels[[5, 0, 5]].tolist()
    assert (pixels[0] == pixels[2]).all()
    assert (pixels[..., 0] == pixels[..., 2]).all()
    assert pixels.max() > 240


def test_synthetic_is_learnable_and_the_same_everywhere(tmp_path):
    one, two = (opened("synthetic", tmp_path / x) for x in "ab")
    assert (len(one.train), len(one.val), len(one.classes)) == (4096, 1024, 10)
    assert (one.train.images == two.train.images).all()
    train, labels = one.train.images.astype(np.float32), one.train.labels
    means = np.stack([train[labels == c].mean(axis=0).ravel() for c in range(10)])
    val = one.val.images.reshape(1024, -1).astype(np.float32)
    distances = (means**2).sum(axis=1) - 2 * val @ means.T
    assert (distances.argmin(axis=1) == one.val.labels).mean() > 0.99


def test_a_second_preparation_reuses_the_first_and_imports_little(tmp_path):
    root, cache = parquet_folder(tmp_path / "data"), tmp_path / "cache"
    folder = prepare_data(str(root), cache)
    script = (
        "import sys; from pathlib import Path\n"
        "from onecurve.data.cache import prepare_data; from onecurve.data.images import open_images\n"
        "folder = prepare_data(sys.argv[1], Path(sys.argv[2])); open_images(folder); print(folder)\n"
        "heavy = ('datasets', 'sklearn', 'PIL', 'torchvision', 'pyarrow', 'rich')\n"
        "print([name for name in heavy if name in sys.modules])"
    )
    output = run([*python(), "-c", script, root, cache], env={"PYTHONPATH": str(ROOT)})
    assert output.splitlines() == [str(folder), "[]"]


def test_cifar10_by_name_is_loaded_through_datasets(tmp_path, monkeypatch):
    import datasets

    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "hf")
    # load_dataset prefers a local folder with this name.
    copy = parquet_folder(tmp_path / "uoft-cs" / "cifar10")
    monkeypatch.chdir(tmp_path)
    folder = prepare_data("cifar10", tmp_path / "cache")
    hub, local = map(open_images, (folder, prepare_data(str(copy), tmp_path / "cache")))
    assert folder.name.startswith("cifar10-")
    assert prepare_data("cifar10", tmp_path / "cache") == folder
    assert hub.val_name == "test"
    assert hub.classes == local.classes
    assert (hub.train.images == local.train.images).all()
    assert (hub.val.labels == local.val.labels).all()


@pytest.mark.parametrize("metadata", ["{}", '{"info": {}}', '{"info": {"features": {"label": null}}}'])
def test_metadata_without_names_is_accepted(metadata, tmp_path):
    with_metadata(tmp_path, metadata)
    shutil.copy(tmp_path / "train-00000-of-00001.parquet", tmp_path / "test-00000-of-00001.parquet")
    assert opened(tmp_path, tmp_path / "cache").classes == ("0", "1")


@pytest.mark.parametrize("name", ["we[1]rd*", "a::b", "http:", "caf\udce9"])
def test_parquet_in_a_folder_of_any_name(name, tmp_path):
    """Check folder names that look like a pattern or a URL, or are not valid UTF-8."""
    root = parquet_folder(tmp_path / "data").rename(tmp_path / name)
    images = opened(root, tmp_path / "cache")
    assert (len(images.train), len(images.val)) == (40, 20)


def test_label_types_of_parquet(tmp_path):
    """Read labels from Parquet files, as plain or dictionary-encoded strings or integers of several widths.

    One of the files contains no rows.
    """
    images = pa.array([{"bytes": PNG, "path": None}] * 3)
    label_columns = {
        "train-0": pa.array(["ox", "hen", "ox"]).dictionary_encode(),
        "train-1": pa.array(["hen", "hen", "ox"], pa.large_string()),
        "val-0": pa.array(["hen", "ox", "hen"]),
    }
    for name, labels in label_columns.items():
        pq.write_table(pa.table({"image": images, "label": labels}), tmp_path / f"{name}.parquet")
    pq.write_table(pa.table({"image": [], "label": []}), tmp_path / "train-2.parquet")
    named = opened(tmp_path, tmp_path / "cache")
    assert named.classes == ("hen", "ox")
    assert named.train.labels.tolist() == [1, 0, 1, 0, 0, 1]
    assert named.val.labels.tolist() == [0, 1, 0]
    (tmp_path / "wide").mkdir()
    for name, dtype in (("train", pa.uint8()), ("val", pa.int32())):
        labels = pa.array([7, 5, 7], dtype)
        pq.write_table(pa.table({"image": images, "label": labels}), tmp_path / "wide" / f"{name}.parquet")
    wide = opened(tmp_path / "wide", tmp_path / "cache")
    assert (wide.classes, wide.val.labels.tolist()) == (("5", "7"), [1, 0, 1])
    (tmp_path / "bool").mkdir()
    for name in ("train", "val"):
        table = pa.table({"image": images, "is_ill": [True, False, True]})
        pq.write_table(table, tmp_path / "bool" / f"{name}.parquet")
    booleans = opened(tmp_path / "bool", tmp_path / "cache")
    assert (booleans.classes, booleans.val.labels.tolist()) == (("False", "True"), [1, 0, 1])


@pytest.mark.parametrize(
    ("labels", "message"),
    [
        (pa.array([0.0, 1.0]), "have type float instead of numbers or names"),
        (pa.array(["a", "b"]), "must be either all numbers, or all names"),
        (pa.array([[0, 1], [1]]), "train.*parquet are lists. Multi-label data is not supported"),
    ],
)
def test_other_label_types_are_refused(labels, message, tmp_path):
    with_labels(tmp_path / "data", labels)
    with pytest.raises(ValueError, match=message):
        prepare_data(str(tmp_path / "data"), tmp_path / "cache")


@pytest.mark.parametrize("form", ["parquet", "folders"])
def test_large_data_stays_encoded(tmp_path, monkeypatch, form):
    make = parquet_folder if form == "parquet" else class_folders
    root = make(tmp_path / "data")
    array = opened(root, tmp_path / "one")
    images = len(array.train) + len(array.val)
    monkeypatch.setattr(image_cache, "MAX_DECODED_BYTES", images * 3072 - 1)
    files = opened(root, tmp_path / "two")
    assert isinstance(files.val, FileSplit)
    assert (files.source, files.classes) == (array.source, array.classes)
    assert (array.identity[2], files.identity[2]) == (False, True)
    assert (files.train.labels == array.train.labels).all()
    # Size 28 resizes the shorter side to 32, so the result is the central crop of the stored pixels.
    pixels, labels = read(files.val, [(0, np.array([3, 1]))], train=False, size=28)
    assert (pixels.numpy() == array.val.images[[3, 1], 2:30, 2:30]).all()
    assert labels.tolist() == array.val.labels[[3, 1]].tolist()
    monkeypatch.setattr(image_cache, "MAX_DECODED_BYTES", images * 3072)
    assert isinstance(opened(root, tmp_path / "three").val, ArraySplit)


def test_a_run_of_an_earlier_version_is_not_resumed_with_another_crop():
    run_setup = RunSetup(None, ImageRecipe(), None, None, None, "pets-1", ("a", "b"), True)
    checkpoint = Checkpoint(Path("step_00000004"), {"data": "pets-1", "cropped": False, "step": 4})
    with pytest.raises(
        ValueError, match=r"on whole images, because an earlier version .* uses cropped images"
    ):
        run_setup._state_from_checkpoint(checkpoint, is_other_run=False)


def test_images_much_taller_than_wide_are_shifted_within_themselves():
    images = np.repeat(np.arange(4, dtype=np.uint8), 64 * 4 * 3).reshape(4, 64, 4, 3)
    pixels, labels = read(ArraySplit(images, SplitPart("train", np.arange(4))), [(0, np.arange(4))])
    assert (pixels == labels[:, None, None, None]).all()


def test_one_image_of_another_size_at_the_end_is_detected(tmp_path, monkeypatch):
    monkeypatch.setattr(conversions, "SAMPLED_IMAGES", 2)  # Examine only a split's first and last image
    root = class_folders(tmp_path / "data")
    picture(0, 32, 40).save(root / "val" / "b" / "1.png")
    folder = prepare_data(str(root), tmp_path / "cache")
    assert isinstance(open_images(folder).train, FileSplit)
    assert not list(folder.glob("*_images.npy"))


# --- The cache


def test_the_cache_key_is_the_content(tmp_path):
    root, cache = parquet_folder(tmp_path / "data"), tmp_path / "cache"
    first = prepare_data(str(root), cache)
    elsewhere = shutil.copytree(root, tmp_path / "elsewhere" / "data")
    assert prepare_data(str(elsewhere), cache) == first
    path = elsewhere / "test-00000-of-00001.parquet"
    before, data = path.stat(), bytearray(path.read_bytes())
    # Damage an image's PNG header without changing the length of the data.
    data[data.index(b"IDAT") - 20] ^= 1
    path.write_bytes(data)
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    with pytest.raises(ValueError, match="can't be decoded"):
        prepare_data(str(elsewhere), cache)
    write_parquet(path, [png(k) for k in range(20)], [0, 1] * 10, ["a", "b"])
    assert prepare_data(str(elsewhere), cache) != first
    assert len(in_cache(cache)) == 2


def test_large_data_is_keyed_on_names_sizes_samples_and_times(tmp_path, monkeypatch):
    monkeypatch.setattr(image_cache, "HASH_LIMIT_BYTES", 0)
    monkeypatch.setattr(image_cache, "HASHED_BLOCK_BYTES", 64)
    root, cache = class_folders(tmp_path / "data"), tmp_path / "cache"
    first = prepare_data(str(root), cache)
    assert prepare_data(str(root), cache) == first
    path = root / "val" / "a" / "0.png"
    os.utime(path, (1, 1))
    second = prepare_data(str(root), cache)
    assert second != first
    # Hosts compare the `source` attribute, which contains no times.
    assert open_images(second).source == open_images(first).source
    size = path.stat().st_size
    # Decoders ignore padding at the end of a file.
    path.write_bytes(encode(Image.new("RGB", (32, 32), "red"), "PNG").ljust(size))
    os.utime(path, (1, 1))
    assert path.stat().st_size == size > 3 * image_cache.HASHED_BLOCK_BYTES
    assert opened(root, cache).source != open_images(first).source


def test_an_index_belongs_to_the_location_of_its_files(tmp_path):
    one = class_folders(tmp_path / "one" / "data")
    picture(0, 40, 32).save(one / "train" / "a" / "0.png")
    two = shutil.copytree(one, tmp_path / "two" / "data")
    folders = [prepare_data(str(root), tmp_path / "cache") for root in (one, two)]
    assert folders[0] != folders[1]
    shutil.rmtree(one)
    read(open_images(folders[1]).train, [(0, np.arange(8))])
    assert open_images(folders[0]).source == open_images(folders[1]).source


def test_two_simultaneous_jobs_prepare_the_cache_once(tmp_path):
    root, cache, go = parquet_folder(tmp_path / "data"), tmp_path / "cache", tmp_path / "go"
    other = start(tmp_path, STALLED, root, cache, go)
    read_until("MIDDLE", other)
    beats = []
    folder = prepare_data(str(root), cache, lambda: beats.append(0) or (len(beats) > 2 and go.touch()))
    assert len(beats) > 2
    assert other.wait() == (0, f"DONE {folder}\n")
    assert in_cache(cache) == [folder]
    assert len(open_images(folder).train) == 40


def test_a_killed_preparation_leaves_no_valid_cache(tmp_path):
    root, cache = parquet_folder(tmp_path / "data"), tmp_path / "cache"
    other = start(tmp_path, STALLED, root, cache, tmp_path / "never")
    read_until("MIDDLE", other)
    other.kill()
    other.wait()
    # The killed job decoded some images but did not rename its temporary folder.
    [work] = in_cache(cache)
    assert work.name == ".preparing"
    assert np.load(work / "train_images.npy").any()
    assert not np.load(work / "val_images.npy").any()
    folder = prepare_data(str(root), cache)
    assert in_cache(cache) == [folder]
    images = open_images(folder)
    assert all((images.val.images[k] == np.asarray(picture(1000 + k))).all() for k in range(20))


def test_a_folder_that_another_host_prepared_meanwhile_is_kept(tmp_path):
    """Simulate NFS, which may show another host's new folder late."""
    root, cache = parquet_folder(tmp_path / "data"), tmp_path / "cache"
    folder = prepare_data(str(root), cache)
    before = folder.stat().st_ino
    source = find_source(ImageRecipe(data=str(root)), lambda: None, False)
    image_cache._write_data_folder(folder, source, "the same", lambda: None)
    assert (in_cache(cache), folder.stat().st_ino) == ([folder], before)


def test_an_exception_in_the_heartbeat_ends_the_threads_and_leaves_no_files(tmp_path, monkeypatch):
    root, decoded = parquet_folder(tmp_path / "data"), []
    monkeypatch.setattr(image_cache, "CHUNK_PIXELS", 1)  # Make each image a separate chunk
    monkeypatch.setattr(
        image_cache, "_decode_chunk", lambda *chunk: time.sleep(0.1) or decoded.append(0) or []
    )

    def beat():
        if decoded:
            raise SystemExit(75)

    with pytest.raises(SystemExit):
        prepare_data(str(root), tmp_path / "cache", beat)
    count = len(decoded)
    assert 0 < count <= 4 * image_cache.allowed_cores()  # The data contain 60 images
    assert not in_cache(tmp_path / "cache")
    time.sleep(0.3)
    assert len(decoded) == count


def test_threads_decode_in_parallel_under_a_progress_bar(tmp_path, monkeypatch):
    class Terminal(io.StringIO):
        def isatty(self):
            return True

    together, beats, terminal = threading.Barrier(2, timeout=20), [], Terminal()
    real_decode = image_cache._decode_chunk

    def decode(*chunk):
        together.wait()  # Two chunks must be decoded at the same time to pass this barrier
        time.sleep(3)
        return real_decode(*chunk)

    monkeypatch.setattr(image_cache, "allowed_cores", lambda: 2)
    monkeypatch.setattr(image_cache, "_decode_chunk", decode)
    monkeypatch.setattr(sys, "stderr", terminal)
    root = parquet_folder(tmp_path / "data", train=600, test=100)
    images = open_images(prepare_data(str(root), tmp_path / "cache", lambda: beats.append(time.monotonic())))
    for split, seed in ((images.train, 0), (images.val, 1000)):
        assert all((split.images[k] == np.asarray(picture(seed + k))).all() for k in range(len(split)))
    assert np.diff(beats).max() < 3  # Heartbeats continue while a chunk is decoded for 3 s
    assert "decoding 700 images of data" in terminal.getvalue()
    assert "700/700" in terminal.getvalue()


def test_a_full_disk_is_a_clear_error(tmp_path, monkeypatch):
    def no_room(*_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "posix_fallocate", no_room)
    with pytest.raises(ValueError, match=r"No space left on device.* with space for the decoded images"):
        prepare_data(str(parquet_folder(tmp_path / "data")), tmp_path / "cache")
    assert not in_cache(tmp_path / "cache")


# --- Decoding


@pytest.mark.parametrize("format", ["JPEG", "PNG"])
@pytest.mark.parametrize("orientation", range(1, 9))
def test_both_decoders_apply_the_exif_orientation(format, orientation):
    exif = Image.Exif()
    exif[0x0112] = orientation
    data = encode(picture(2, 48, 32), format, exif=exif)
    upright = np.asarray(ImageOps.exif_transpose(Image.open(io.BytesIO(data))))
    assert decode_image(data).shape == ((48, 32, 3) if orientation >= 5 else (32, 48, 3))
    assert np.abs(decode_image(data) - upright.astype(int)).max() <= 2


@pytest.mark.parametrize("options", [{}, {"progressive": True}])
@pytest.mark.parametrize("part", [0.02, 0.5, 0.99])
def test_a_truncated_jpeg_is_an_error(options, part):
    data = encode(picture(3, 200, 200), **options)
    assert decode_image(data).shape == (200, 200, 3)
    with pytest.raises(ValueError, match=r".+"):
        decode_image(data[: int(len(data) * part)])


# --- Batches of image files


def test_photographs_keep_their_order_for_any_number_of_workers(photographs, tmp_path):
    """Read 100 photographs of two classes: 80 in the train folder and 20 in the val folder."""
    for k, path in enumerate(sorted(photographs.iterdir())):
        folder = tmp_path / "data" / ("train" if k % 5 else "val") / f"class{k % 2}"
        folder.mkdir(parents=True, exist_ok=True)
        shutil.copy(path, folder)
    images = opened(tmp_path / "data", tmp_path / "cache")
    assert isinstance(images.train, FileSplit)
    assert (len(images.train), len(images.val)) == (80, 20)
    ids = np.random.RandomState(0).permutation(80)[:30]
    plan = [(0, ids[:7]), (0, ids[7:8]), (1, ids[8:20]), (1, ids[20:])]
    in_process = read(images.train, plan)
    assert in_process[0].shape == (30, 48, 48, 3)
    assert in_process[1].tolist() == images.train.labels[ids].tolist()
    in_workers = read(images.train, plan, workers=2)
    assert (in_process[0] == in_workers[0]).all()
    assert (in_process[1] == in_workers[1]).all()
    assert not [p for p in multiprocessing.active_children() if p.is_alive()]

    # A crop depends only on the seed, epoch and sample.
    single, _ = read(images.train, [(0, ids[3:4])])
    assert (single[0] == in_process[0][3]).all()
    for other in (read(images.train, [(1, ids[3:4])]), read(images.train, [(0, ids[3:4])], seed=6)):
        assert (other[0] != in_process[0][3]).any()

    val = [(0, np.arange(20))], [(3, np.arange(20))]
    one, two = (read(images.val, plan, train=False, seed=s)[0] for s, plan in enumerate(val))
    assert (one == two).all()
    from torchvision.transforms.v2 import functional as F

    for k, path in enumerate(sorted((tmp_path / "data" / "val").glob("*/*"))[:5]):
        pixels = torch.from_numpy(decode_image(path.read_bytes()).copy()).permute(2, 0, 1)
        expected = F.center_crop(F.resize(pixels, [round(48 * 256 / 224)], antialias=True), [48, 48])
        assert (one[k].permute(2, 0, 1).int() - expected.int()).abs().max() <= 1


def test_random_crops_have_torchvisions_distribution():
    from torchvision.transforms import RandomResizedCrop

    from onecurve.data.crops import random_box
    from onecurve.numerics.order import uniforms

    boxes = [random_box(300, 500, draws)[2:] for draws in uniforms(0, 0, np.arange(4000), 44)[:, 4:]]
    torch.manual_seed(0)
    tensor = torch.empty(3, 300, 500)
    expected = [RandomResizedCrop.get_params(tensor, [0.08, 1], [3 / 4, 4 / 3])[2:] for _ in range(4000)]
    actual, expected = np.array(boxes), np.array(expected)
    for q in (5, 25, 50, 75, 95):
        difference = np.abs(np.percentile(actual, q, axis=0) - np.percentile(expected, q, axis=0))
        assert difference.max() < 12, f"percentile {q} of height and width differs by {difference} pixels"


def test_the_area_of_random_crops():
    """Check that the areas of default crops are the same in every version and that `scale` limits these
    areas.
    """
    from onecurve.data.crops import random_box
    from onecurve.numerics.order import uniforms

    draws = uniforms(0, 0, np.arange(500), CROP.stop)[:, CROP]
    assert [random_box(300, 500, row) for row in draws[:4]] == [
        (14, 95, 273, 336),
        (26, 134, 215, 244),
        (83, 89, 159, 153),
        (129, 49, 117, 134),
    ]
    areas = [h * w / (300 * 500) for _, _, h, w in (random_box(300, 500, row, (0.25, 0.36)) for row in draws)]
    assert (min(areas), max(areas)) == pytest.approx((0.25, 0.36), abs=0.005)


@pytest.mark.parametrize("name", ["train_cnn_a", "train_cnn_b", "train_vit"])
def test_scripts_pass_the_area_of_crops(tmp_path, monkeypatch, name):
    monkeypatch.setattr(image_cache, "MAX_DECODED_BYTES", 0)  # Keep the images encoded
    script = importlib.import_module(name)
    images = opened(class_folders(tmp_path / "data", train=8, val=8), tmp_path / "cache")
    assert isinstance(images.train, FileSplit)

    def pixels(*words: str) -> torch.Tensor:
        recipe = parse(recipe_class(script), ["--image_size", "32", "--workers", "0", *words])
        config = [DataConfig((0.5,) * 3, (0.5,) * 3)] if name == "train_vit" else []
        plan = [(0, np.arange(8))]
        return next(iter(script.training_batches(images, plan, torch.device("cpu"), recipe, *config)))[0]

    default = pixels()
    assert torch.equal(pixels("--crop_scale", "0.08,1"), default)
    assert not torch.equal(pixels("--crop_scale", "0.5,1"), default)


def test_workers_ignore_signals_and_end_when_the_iterator_is_closed(tmp_path):
    root = class_folders(tmp_path / "data", train=60, val=60)
    picture(0, 40, 32).save(root / "train" / "a" / "0.png")
    split = opened(root, tmp_path / "cache").train
    plan = [(0, np.arange(k, k + 2)) for k in range(0, 60, 2)]
    workers = []

    def plan_with_signals():
        for k, item in enumerate(plan):
            if k in (0, 20):  # The workers are still starting when the first item is requested
                workers[:] = multiprocessing.active_children()
                for worker, number in product(workers, (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)):
                    os.kill(worker.pid, number)
            yield item

    batches = split.batches(plan_with_signals(), device="cpu", train=True, size=32, seed=0, workers=2)
    images = [next(batches)[2] for _ in range(29)]
    assert len(workers) == 2
    assert all(worker.is_alive() for worker in workers)
    assert (torch.cat(images) == read(split, plan[:29], size=32, seed=0)[0]).all()
    batches.close()  # Stop before the last batch is read
    for worker in workers:
        worker.join(10)
        assert not worker.is_alive()


TRAINER = """
import multiprocessing, os, sys, time
import numpy as np
sys.path.insert(0, sys.argv[1])
from onecurve.data.images import open_images
from pathlib import Path
import slow
if __name__ == "__main__":
    split = open_images(Path(sys.argv[2])).train
    plan = [(0, np.arange(2))] * 100
    batches = split.batches(plan, device="cpu", train=True, size=32, seed=0, workers=2)
    next(batches)
    print("workers", *[p.pid for p in multiprocessing.active_children()], flush=True)
    if sys.argv[3] == "fails":
        raise RuntimeError("out of memory")
    time.sleep(60)
"""


@pytest.mark.parametrize("end", [full("fails"), "is killed"])
def test_workers_end_with_the_trainer(tmp_path, end):
    root = class_folders(tmp_path / "data")
    picture(0, 40, 32).save(root / "train" / "a" / "0.png")
    folder = prepare_data(str(root), tmp_path / "cache")
    (tmp_path / "trainer.py").write_text(TRAINER)
    (tmp_path / "slow.py").write_text(f"open({str(tmp_path / 'imports')!r}, 'a').write('x')")
    words = [tmp_path / "trainer.py", ROOT, folder, end]
    trainer = Job(words, env={"PYTHONPATH": ""}, cwd=Path("/"))  # The job runs in a different folder
    try:
        line = next(line for line in trainer.process.stdout if line.startswith("workers "))
        workers = [int(pid) for pid in line.split()[1:]]
        assert len(workers) == 2
        if end == "is killed":
            assert all(is_running(pid, start_ticks(pid)) for pid in workers)
            trainer.process.kill()
        trainer.process.wait(30)
        wait_until(lambda: not any(is_running(pid, start_ticks(pid)) for pid in workers), timeout_s=10)
    finally:
        trainer.kill()  # Kill any remaining workers
        trainer.wait()
    # The script and the fork server import the script's modules, but the workers do not.
    assert (tmp_path / "imports").read_text() == "xx"


class Flaky(CachedImages):
    """Images on a network mount, where the first attempt to read a file named 1.png fails."""

    def __init__(self, number: int, *arguments):
        super().__init__(*arguments)
        self.number, self.seen = number, set[str]()
        encoded_module.open = self.open  # Set directly, because monkeypatch does not affect worker processes

    def open(self, file: str, *options, **keywords):
        if file in self.seen or not file.endswith("1.png"):
            return open(file, *options, **keywords)
        self.seen.add(file)
        raise OSError(self.number, os.strerror(self.number), file)


@pytest.mark.parametrize(
    ("number", "workers"), [*product(files.TRANSIENT_ERRORS, [0]), (errno.ESTALE, 2), (errno.EACCES, 0)]
)
def test_transient_errors_of_a_network_mount_are_retried(number, workers, tmp_path, monkeypatch, capfd):
    root = class_folders(tmp_path / "data")
    picture(0, 40, 32).save(root / "train" / "a" / "0.png")
    split = opened(root, tmp_path / "cache").train
    plan = [(0, np.arange(4)), (0, np.arange(4, 8))]
    expected, _ = read(split, plan)
    split.open_images = partial(Flaky, number, *split.open_images.args)
    monkeypatch.setattr(files, "BACKOFF_S", 0.0)
    monkeypatch.setattr(files, "_first_retry", [])
    monkeypatch.setattr(encoded_module, "open", open, raising=False)
    if number == errno.EACCES:
        with pytest.raises(ValueError, match=r"1\.png: Permission denied"):
            read(split, plan)
        return
    pixels, _ = read(split, plan, workers=workers)
    assert torch.equal(pixels, expected)
    assert capfd.readouterr().err.count(f": {os.strerror(number)}. Retrying the read") == 1


def test_a_persistent_error_fails_after_four_attempts(monkeypatch):
    waits, calls = [], []
    monkeypatch.setattr(time, "sleep", waits.append)

    @files.retried
    def read_stale() -> None:
        calls.append(1)
        raise OSError(errno.ESTALE, "Stale file handle", "a.png")

    with pytest.raises(OSError, match=r"Stale file handle: 'a\.png'"):
        read_stale()
    assert (len(calls), waits) == (4, pytest.approx([0.4, 0.8, 1.2]))


# --- Bad input


@pytest.mark.parametrize("workers", [0, 2])
def test_a_broken_file_is_one_clear_error(tmp_path, workers):
    root = class_folders(tmp_path / "data")
    picture(0, 40, 32).save(root / "train" / "a" / "0.png")
    path = root / "train" / "b" / "1.png"
    split = opened(root, tmp_path / "cache").train
    path.write_bytes(path.read_bytes()[:60])
    with pytest.raises(ValueError, match=r"train/b/1\.png: ") as error:
        read(split, [(0, np.arange(4)), (0, np.arange(4, 8))], workers=workers)
    assert "Traceback" not in str(error.value)
    assert len(str(error.value).splitlines()) == 1
    path.unlink()
    with pytest.raises(ValueError, match=r"train/b/1\.png: No such file"):
        read(split, [(0, np.arange(4, 8))], workers=workers)
    path.symlink_to("/proc/self/mem")  # This file can be opened but not read
    with pytest.raises(ValueError, match=r"train/b/1\.png: Input/output error"):
        read(split, [(0, np.arange(4, 8))], workers=workers)


def test_files_that_cannot_be_decoded_are_all_counted(tmp_path):
    root = class_folders(tmp_path / "data", train=40, val=40)
    for k in range(1, 24, 2):
        (root / "train" / "b" / f"{k}.png").write_bytes(b"broken")
    with pytest.raises(ValueError, match="12 of 80 images can't be decoded") as error:
        prepare_data(str(root), tmp_path / "cache")
    lines = str(error.value).splitlines()
    assert len(lines) == 12
    assert lines[1].startswith(
        f"  {root}/train/b/1.png: the file is not in a supported image format (JPEG, PNG, "
    )
    file = tmp_path / "cache" / "broken.json"
    assert lines[-1] == f"  and 2 more images, listed in {file}"
    assert len(json.loads(file.read_text())) == 12


def with_damage(root: Path, position: slice, content: bytes) -> None:
    path = parquet_folder(root) / "train-00000-of-00001.parquet"
    data = bytearray(path.read_bytes())
    data[position] = content
    path.write_bytes(data)


def with_train(root: Path, images: list, labels: list, names="ab") -> None:
    parquet_folder(root, names=names and "ab")
    write_parquet(root / "train-00000-of-00001.parquet", images, labels, names and list(names))


def with_metadata(root: Path, metadata: str) -> None:
    """Write a table in which this text replaces the JSON metadata of `datasets`."""
    file = parquet_folder(root) / "train-00000-of-00001.parquet"
    pq.write_table(pq.read_table(file).replace_schema_metadata({"huggingface": metadata}), file)


def with_labels(root: Path, labels: pa.Array) -> None:
    images = pa.array([{"bytes": PNG, "path": None}] * len(labels))
    file = parquet_folder(root) / "train-00000-of-00001.parquet"
    pq.write_table(pa.table({"img": images, "label": labels}), file)


def with_column(root: Path, name: str, values: pa.Array | None) -> None:
    """Write a table with one row, in which these values replace a column."""
    file = parquet_folder(root, train=1) / "train-00000-of-00001.parquet"
    table = pq.read_table(file).drop_columns([name])
    pq.write_table(table if values is None else table.append_column(name, values), file)


NO_NAMES = ["train-00000", "the class names in the huggingface metadata are not"]
CUT = ["train-00000-of-00001.parquet cannot be read", "Download the file again"]
NO_NAMES_IN = {
    "no object": "[]",
    "no JSON": "{",
    "a list": '{"info": {"features": [1]}}',
    "names no list": '{"info": {"features": {"label": {"names": "ab"}}}}',
}
# Function that writes bad data, and pattern of the expected error. tests/test_messages.py contains more
# cases.
BAD = {
    "a file": (lambda root: root.write_text("x"), ["is not a folder, list or parquet file"]),
    "tars": (lambda root: (root.mkdir(), (root / "a.tar").touch()), ["prep_imagenet.py --from shards"]),
    "no classes": (
        lambda root: [(root / s).mkdir(parents=True) for s in ("train", "val")],
        ["no class folders"],
    ),
    "cut parquet": (lambda root: with_damage(root, slice(-100, None), b""), CUT),
    # The zeros damage a page's header.
    "damaged parquet": (lambda root: with_damage(root, slice(4, 400), bytes(396)), CUT),
    "two sets": (
        lambda root: (parquet_folder(root / "fine"), parquet_folder(root / "coarse")),
        ["several data sets", "coarse, fine"],
    ),
    "no image column": (
        lambda root: with_column(root, "img", pa.array(["1.png"])),
        ["train-00000", "the image column has type string instead of image bytes"],
    ),
    "no label column": (
        lambda root: with_column(root, "label", None),
        ["train-00000", "contains no label column (label, fine_label), only img. Choose"],
    ),
    "label range": (
        lambda root: with_train(root, [PNG] * 3, [0, 1, 2]),
        ["label 2 in row 2 of the train split", "train-00000", "out of range for 2 classes"],
    ),
    "label -1": (lambda root: with_train(root, [PNG], [-1]), ["label -1 in row 0 of the train split"]),
    "label missing": (lambda root: with_train(root, [PNG] * 2, [0, None]), ["row 1 of", "has no label"]),
    "image missing": (lambda root: with_train(root, [PNG, None], [0, 1]), ["row 1 of", "has no image bytes"]),
    "other names": (
        lambda root: with_train(root, [PNG], [0], names="az"),
        ["the val split contains classes that are not in train: b. Rename"],
    ),
    "other labels": (
        lambda root: with_train(root, [PNG] * 3, [0, 2, 9], names=None),
        ["the val split contains classes that are not in train: 1. Rename"],
    ),
    **{name: (partial(with_metadata, metadata=metadata), NO_NAMES) for name, metadata in NO_NAMES_IN.items()},
    "label not UTF-8": (
        lambda root: with_labels(root, pa.array([b"caf\xe9"]).cast(pa.string(), safe=False)),
        ["train-00000", "not encoded in UTF-8"],
    ),
    "no rows": (lambda root: parquet_folder(root, train=0), ["the train split contains no images"]),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_input_is_one_clear_error(tmp_path, case):
    make, messages = BAD[case]
    make(tmp_path / "data")
    with pytest.raises(ValueError, match=r".+") as error:
        prepare_data(str(tmp_path / "data"), tmp_path / "cache")
    assert str(tmp_path / "data") in str(error.value)
    assert "\n" not in str(error.value)
    for message in messages:
        assert message in str(error.value)
    assert not (tmp_path / "cache").exists() or not in_cache(tmp_path / "cache")


def test_a_user_without_a_home_folder_needs_cache_dir(tmp_path, monkeypatch):
    """Simulate a container that runs under an arbitrary user ID without a home folder."""
    monkeypatch.delenv("HOME")
    monkeypatch.setattr("pwd.getpwuid", {}.__getitem__)
    with pytest.raises(ValueError, match=r"no home folder and HOME is not set\. Set --cache_dir to"):
        prepare_cache(ImageRecipe(data="digits"), lambda: None)
    with pytest.raises(ValueError, match="--data ~nobody-here/pets does not exist"):
        prepare_data("~nobody-here/pets", tmp_path)


def test_a_cache_that_cannot_be_written_is_a_clear_error(tmp_path):
    (tmp_path / "cache").write_text("a file")
    with pytest.raises(ValueError, match="could not be prepared in --cache_dir"):
        prepare_data("digits", tmp_path / "cache")
