"""A cache of prepared images that several users share: none can harm or block another."""

import fcntl
import os
import shutil
import tempfile
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest

from common.data.cache import prepare_data
from common.data.images import open_images
from common.data.shard_cache import ShardCache
from common.data.shards import Shard, ShardImages
from common.recipe import ImageRecipe
from common.system.cli import set_umask
from tests.conftest import CNN, metrics, result
from tests.data.test_shards import write_shards
from tests.support.images import class_folders
from tests.support.warm import WarmJob

ALICE, MALLORY = 61001, 61002

pytestmark = pytest.mark.needs("root")  # to be several users


@contextmanager
def user(uid: int):
    """A context manager that runs its body as this user, without root's rights."""
    os.setegid(uid)
    os.seteuid(uid)
    try:
        yield
    finally:
        os.seteuid(0)
        os.setegid(0)


@pytest.fixture
def shared():
    """A folder that everybody may reach; data is an image folder in it. pytest's own are root's alone."""
    folder = Path(tempfile.mkdtemp(prefix="shared-cache-"))
    folder.chmod(0o755)
    class_folders(folder / "images", train=4, val=2)
    (folder / "root").mkdir(0o755)
    prepare_data(str(folder / "images"), folder / "root")  # imports what only root may read on some machines
    yield folder
    shutil.rmtree(folder)


def cache_of(shared: Path, uid: int, mode: int) -> Path:
    (shared / "cache").mkdir()
    (shared / "cache").chmod(mode)
    os.chown(shared / "cache", uid, uid)
    return shared / "cache"


def test_each_user_has_a_folder_where_others_may_write(shared):
    cache = cache_of(shared, MALLORY, 0o1777)
    with user(MALLORY):
        (cache / ".preparing").mkdir()  # left by a killed job
        theirs = prepare_data(str(shared / "images"), cache)
    with user(ALICE):
        ours = prepare_data(str(shared / "images"), cache)
        assert prepare_data(str(shared / "images"), cache) == ours
        assert len(open_images(ours).train) == 4
    assert (ours.parent.name, theirs.parent.name) == (f"user-{ALICE}", f"user-{MALLORY}")
    assert {path.stat().st_uid for path in (ours, *ours.iterdir())} == {ALICE}


def test_a_folder_in_which_nobody_else_may_write_is_used_as_it_is(shared):
    cache = cache_of(shared, ALICE, 0o775)
    with user(ALICE):
        assert prepare_data(str(shared / "images"), cache).parent == cache


def test_data_that_root_prepared_is_used_by_all(shared):
    with user(ALICE):
        assert prepare_data(str(shared / "images"), shared / "root").parent == shared / "root"


def test_a_folder_of_another_user_is_not_used(shared):
    """Another user knows the folder's name, and has put other pixels there first."""
    cache = cache_of(shared, MALLORY, 0o1777)
    with user(MALLORY):
        made = prepare_data(str(shared / "images"), cache)
        pixels = np.load(made / "train_images.npy")
        np.save(made / "train_images.npy", 255 - pixels)
        shutil.copytree(made, cache / made.name)
        (cache / f"user-{ALICE}").mkdir()
    with (
        user(ALICE),
        pytest.raises(ValueError, match=r"it belongs to user 61002\. Give a --cache_dir of your own"),
    ):
        prepare_data(str(shared / "images"), cache)
    (cache / f"user-{ALICE}").rmdir()
    with user(ALICE):
        ours = prepare_data(str(shared / "images"), cache)
    assert (np.load(ours / "train_images.npy") == pixels).all()


@pytest.mark.parametrize("poison", ["a file", "a link", "the folder", "the mode"])
def test_parts_of_another_owner_are_made_again(poison, shared, capsys):
    cache = cache_of(shared, ALICE, 0o755)
    with user(ALICE):
        folder = prepare_data(str(shared / "images"), cache)
    file, pixels = folder / "train_images.npy", np.load(folder / "train_images.npy")
    if poison == "a file":
        np.save(file, 255 - pixels)
        os.chown(file, MALLORY, MALLORY)
    elif poison == "a link":
        file.rename(shared / "elsewhere.npy")
        file.symlink_to(shared / "elsewhere.npy")
    elif poison == "the folder":
        os.chown(folder, MALLORY, MALLORY)
        folder.chmod(0o777)
    else:
        file.chmod(0o666)
    capsys.readouterr()
    with user(ALICE):
        assert prepare_data(str(shared / "images"), cache) == folder
    assert "is prepared again: " in capsys.readouterr().err
    assert (np.load(file) == pixels).all()
    assert not file.is_symlink()
    assert {path.stat().st_uid for path in (folder, *folder.iterdir())} == {ALICE}


def test_nobody_else_can_hold_the_lock(shared):
    cache = cache_of(shared, ALICE, 0o755)
    (shared / "more").mkdir()
    class_folders(shared / "more" / "images", train=2, val=2)
    with user(ALICE):
        prepare_data(str(shared / "images"), cache)
    with user(MALLORY):
        with pytest.raises(PermissionError):
            os.open(cache / ".lock", os.O_RDONLY)
        held = os.open(cache, os.O_RDONLY)
        fcntl.flock(held, fcntl.LOCK_EX)
    with user(ALICE):
        prepare_data(str(shared / "more" / "images"), cache)
    os.close(held)


def test_nobody_else_can_hold_a_shards_lock(shared):
    folder = cache_of(shared, ALICE, 0o755)
    with user(ALICE):
        cache = ShardCache(folder, "s3://bucket/prefix", (Shard("train-00000.tar", 1, 10, "0"),), 100)
        os.close(cache._open_lock("train-00000.tar"))
    with user(MALLORY), pytest.raises(PermissionError):
        os.open(cache.locks / "train-00000.tar", os.O_RDONLY)


def test_nothing_is_ever_writable_by_all(shared, tmp_path):
    before = os.umask(0)
    try:
        set_umask()
        assert os.umask(0o077) == 0o002
        set_umask()
        assert os.umask(0) == 0o077
        words = [
            *CNN,
            "--data",
            shared / "images",
            "--batch_size",
            "2",
            "--image_size",
            "32",
            "--epochs",
            "1",
        ]
        words += ["--cache_dir", tmp_path / "cache", "--output_dir", tmp_path / "run"]
        status, output = WarmJob(words, tmp_path / "log").wait()
    finally:
        os.umask(before)
    assert status == 0, output
    made = [path for name in ("cache", "run") for path in ((tmp_path / name), *(tmp_path / name).rglob("*"))]
    assert len(made) > 20
    assert [path for path in made if path.stat().st_mode & 0o002] == []


# --- Cut while it is in use


def test_an_array_that_is_cut_while_it_is_mapped(tmp_path, cache):
    """A training reads the array; a read beyond the end of the mapped file is a SIGBUS."""
    folder = prepare_data("digits", tmp_path / "cache")
    words = [*CNN, "--data", "digits", "--epochs", "100000", "--log_every", "1", "--trackers", "none"]
    words += ["--cache_dir", tmp_path / "cache", "--output_dir", tmp_path / "run"]
    job = WarmJob(words, tmp_path / "log")
    while not (tmp_path / "run" / "metrics.jsonl").exists() or not metrics(tmp_path / "run"):
        assert job.is_alive, job.output
    os.truncate(folder / "train_images.npy", 4096)
    status, output = job.wait()
    assert status == 1, output
    assert output.count("error: ") == 1
    assert f"{folder}/train_images.npy is shorter than it was: remove its folder" in output
    assert "Traceback" not in output
    assert result(tmp_path / "run")["status"] == "failed"
    status, output = WarmJob(words, tmp_path / "log").wait()
    assert status == 1
    assert f"the prepared data in {folder} is damaged" in output


def test_encoded_images_and_an_index_that_are_cut(tmp_path):
    root = class_folders(tmp_path / "images", train=4, val=2)
    class_folders(tmp_path / "images", train=1, val=0, size=24)  # of another size: they stay encoded
    folder = prepare_data(str(root), tmp_path / "cache")
    split = open_images(folder).train.open()
    os.truncate(folder / "train_items.bin", 1)
    with pytest.raises(OSError, match=r"train_items\.bin is shorter than it was: remove its folder"):
        split.decode(3)
    folder = prepare_data(str(write_shards(tmp_path / "shards")), tmp_path / "cache")
    split = open_images(folder, ImageRecipe()).train.open()
    assert isinstance(split, ShardImages)
    os.truncate(split.index.name, 200)
    with pytest.raises(OSError, match="is shorter than it was: remove its folder"):
        split.decode(len(split) - 1)
