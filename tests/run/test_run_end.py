"""Tests that running the same command completes a run that was killed or filled the disk at its end."""

import errno
import os
import shutil
import signal
from pathlib import Path

import pytest
from PIL import Image

from onecurve.system.files import write_error
from tests.conftest import Job, mutate, result, run, small_disk
from tests.support.compare import assert_same_end
from tests.support.faults import at_file_operation, mark, operations

CNN = ["train_cnn_a.py", "--widths", "4,8,32", "--data", "digits", "--batch_size", "96", "--epochs", "1"]
CNN += ["--mixed_precision", "no", "--telemetry_s", "0", "--trackers", "none"]
PICTURES = ["confusion.png", "curves.png", "predictions.png"]


@pytest.fixture(scope="module")
def disk(tmp_path_factory):
    with small_disk(tmp_path_factory.mktemp("disk"), "8m") as folder:
        yield folder


class Trained:
    """Folders of a run that was killed after its last checkpoint and of an uninterrupted run."""

    def __init__(self, parent: Path, cache: list):
        self.words = [*CNN, *cache]
        self.straight, self.killed = parent / "straight" / "run", parent / "killed" / "run"
        self.start(self.straight, parent, "list")
        written = [operation.split(" ", 1)[1] for operation in operations(parent)]
        drawn = max(written.index(f"open .{name}.tmp") for name in PICTURES)
        assert written.index("open .result.json.tmp") > drawn
        second = [
            number for number, operation in enumerate(written, 1) if operation == "open .index.json.tmp"
        ][1]
        status, output = self.start(self.killed, parent, second)
        assert status == -signal.SIGKILL, output
        assert not (self.killed / "result.json").exists()

    def operations(self, parent: Path) -> list[str]:
        """Return the file operations of the command that completes the killed run."""
        shutil.copytree(self.killed, parent / "again" / "run")
        self.start(parent / "again" / "run", parent, "list")
        return [operation.split(" ", 1)[1] for operation in operations(parent)]

    def start(self, folder: Path, tmp_path: Path, at: int | str | None = None, fill: Path | None = None):
        """Run the command again with the fault selected by `at` and `fill`, and return its exit status and
        output.
        """
        mark(tmp_path).unlink(missing_ok=True)
        env = {} if at is None else at_file_operation(tmp_path, "/run/", at, fill) | {"WRITES": "1"}
        return Job([*self.words, "--output_dir", folder], env=env).wait()

    def assert_completed(self, folder: Path) -> None:
        """Check that the completed run's results are identical to the uninterrupted run's."""
        assert_same_end(folder, self.straight)
        checkpoints = sorted((folder / "checkpoints").iterdir())
        assert [path.name for path in checkpoints] == ["index.json", "step_00000014"]
        assert sorted(path.name for path in (folder / "plots").iterdir()) == PICTURES
        for path in (folder / "plots").iterdir():
            with Image.open(path) as image:
                image.load()
        assert not (folder / "owner.json").exists()


@pytest.fixture(scope="module")
def trained(tmp_path_factory, cache):
    return Trained(tmp_path_factory.mktemp("trained"), cache)


def assert_says_what_to_do(output: str) -> None:
    assert output.count("error: ") == 1, output
    assert "No space left on device" in output
    assert "Make room, then run the same command again" in output
    assert "Traceback" not in output


@pytest.mark.parametrize(
    ("number", "message"), [(errno.ENOSPC, "MiB are free"), (errno.EDQUOT, "quota is exhausted")]
)
def test_a_quota_is_not_the_disks_free_space(number, message, tmp_path):
    text = str(write_error("the run", tmp_path, OSError(number, os.strerror(number))))
    assert [part for part in ("MiB are free", "quota is exhausted") if part in text] == [message]


def test_one_end_with_many_faults(trained, disk, tmp_path):
    """Inject a different fault at each start. Each start of the same command must progress further."""
    folder = disk / "one" / "run"
    shutil.copytree(trained.killed, folder)
    for point in ("open .curves.png.tmp", "open .result.json.tmp"):
        status, output = trained.start(folder, tmp_path, point, fill=disk)
        assert status == 1, output
        assert mark(tmp_path).exists()
        assert_says_what_to_do(output)
        (disk / "filler").unlink()
    for point in ("open .predictions.png.tmp", "os.rename .result.json.tmp"):
        status, output = trained.start(folder, tmp_path, point)
        assert status == -signal.SIGKILL, output
        assert "  lr " not in output, output
    status, output = trained.start(folder, tmp_path)
    assert status == 0, output
    assert "  lr " not in output, output
    trained.assert_completed(folder)
    shutil.rmtree(folder.parent)


def test_a_script_that_finds_the_disk_full(disk, project_copy, tmp_path):
    """Fill the disk while train_hello.py draws its plot and the last checkpoint is written."""
    draw = "            plot(run.folder"
    mutate(project_copy, "train_hello.py", draw, f"            run.session.saver.wait()\n{draw}")
    words = ["train_hello.py", "--epochs", "1", "--trackers", "none", "--telemetry_s", "0"]
    words += ["--output_dir", disk / "hello" / "run"]
    env = at_file_operation(tmp_path, "/run/", "open fit.png", disk) | {"WRITES": "1"}
    status, output = Job(words, cwd=project_copy, env=env).wait()
    assert status == 1
    assert_says_what_to_do(output)
    (disk / "filler").unlink()
    assert "  lr " not in run(words, cwd=project_copy)
    shutil.rmtree(disk / "hello")


@pytest.mark.full
@pytest.mark.parametrize("fault", ["killed", "full"])
def test_each_point_of_the_end(fault, trained, disk, tmp_path):
    for number, point in enumerate(trained.operations(tmp_path), start=1):
        folder = disk / str(number) / "run"
        shutil.copytree(trained.killed, folder)
        status, output = trained.start(folder, tmp_path, number, fill=disk if fault == "full" else None)
        assert mark(tmp_path).exists(), point
        assert "  lr " not in output, output
        is_finished = (folder / "result.json").exists() and result(folder)["status"] == "finished"
        if fault == "killed":
            assert status == -signal.SIGKILL, (point, output)
        else:
            (disk / "filler").unlink()
            assert status == (0 if is_finished else 1), (point, output)
            if not is_finished:
                assert_says_what_to_do(output)
        if not is_finished:
            status, output = trained.start(folder, tmp_path)
            assert status == 0, (point, output)
            assert "  lr " not in output, output
            trained.assert_completed(folder)
        shutil.rmtree(folder.parent)
