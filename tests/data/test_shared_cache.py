"""Tests of a prepared-image cache on a machine with several users."""

import os
import shutil
import tempfile
from contextlib import contextmanager
from pathlib import Path

import pytest

from onecurve.data.cache import prepare_data
from onecurve.data.images import open_images
from onecurve.system.cli import settle_environment
from tests.conftest import CNN, Job
from tests.support.data_sets import class_folders

ALICE, MALLORY = 61001, 61002

pytestmark = pytest.mark.needs("root")  # The tests switch between users


@contextmanager
def user(uid: int):
    """Run the body of the `with` statement as this user, without root privileges."""
    os.setegid(uid)
    os.seteuid(uid)
    try:
        yield
    finally:
        os.seteuid(0)
        os.setegid(0)


@pytest.fixture
def shared():
    """Return a folder that all users can read, with images and root's cache of these images.

    pytest's temporary folders are not suitable, because only root can read them.
    """
    folder = Path(tempfile.mkdtemp(prefix="shared-cache-"))
    folder.chmod(0o755)
    class_folders(folder / "images", train=4, val=2)
    (folder / "root").mkdir(0o755)
    # The call also imports modules that other users may be unable to read.
    prepare_data(str(folder / "images"), folder / "root")
    yield folder
    shutil.rmtree(folder)


def test_all_users_can_use_data_that_root_prepared(shared):
    with user(ALICE):
        folder = prepare_data(str(shared / "images"), shared / "root")
        assert folder.parent == shared / "root"
        assert len(open_images(folder).train) == 4


@pytest.mark.parametrize("owned", ["the cache", "the data"])
def test_a_folder_of_another_user_is_refused(owned, shared):
    """Check that a cache folder that another user created is refused, except for root."""
    cache = shared / "cache"
    cache.mkdir()
    cache.chmod(0o777)
    if owned == "the cache":
        os.chown(cache, MALLORY, MALLORY)
    else:
        with user(MALLORY):
            prepare_data(str(shared / "images"), cache)
    message = r"belongs to user 61002\. Set --cache_dir to a folder that you own"
    with user(ALICE), pytest.raises(ValueError, match=message):
        prepare_data(str(shared / "images"), cache)
    prepare_data(str(shared / "images"), cache)


def test_no_file_is_world_writable(shared, tmp_path):
    before = os.umask(0)
    try:
        settle_environment()
        assert os.umask(0o077) == 0o002
        settle_environment()
        assert os.umask(0) == 0o077
        words = [*CNN, "--data", shared / "images", "--batch_size", "2", "--image_size", "32"]
        words += ["--epochs", "1", "--cache_dir", tmp_path / "cache", "--output_dir", tmp_path / "run"]
        status, output = Job(words).wait()
    finally:
        os.umask(before)
    assert status == 0, output
    paths = [path for name in ("cache", "run") for path in ((tmp_path / name), *(tmp_path / name).rglob("*"))]
    assert len(paths) > 20
    assert [path for path in paths if path.stat().st_mode & 0o002] == []
