"""Exit statuses and messages of commands, also under a file size limit, and of launch.py's jobs."""

import shlex
import signal
import subprocess
import sys
import time

import pytest

from common.system.cli import run_command
from tests.conftest import CNN, ROOT, Job, result

TRAIN = [str(ROOT / "train_cnn_a.py"), "--data", "digits", "--batch_size", "16", "--max_steps", "2"]


@pytest.mark.parametrize(
    ("error", "status", "text"),
    [
        (None, 0, ""),
        (ValueError("two\nlines \x1b[31m"), 1, "error: two\nlines \\x1b[31m\n"),
        (FileNotFoundError(2, "No such file", "a\udcff"), 1, "error: a\\xff: No such file\n"),
        (OSError("unknown"), 1, "error: unknown\n"),
        (KeyboardInterrupt(), 130, "interrupted\n"),
    ],
)
def test_a_command_ends_with_a_line_and_a_status(error, status, text, capsys):
    def main() -> int:
        if error:
            raise error
        return 0

    assert run_command(main) == status
    assert capsys.readouterr().err == text


@pytest.mark.full
@pytest.mark.parametrize("blocks", [200, 4])
def test_files_that_may_not_grow(blocks, tmp_path, cache):
    """Limits file sizes by ulimit -f, in KiB: with a cache from before, or without."""
    folder = cache if blocks == 200 else ["--cache_dir", tmp_path / "cache"]
    if blocks == 200 and not any(cache[1].iterdir()):
        subprocess.run(
            [sys.executable, *TRAIN, *CNN[1:], *cache, "--output_dir", tmp_path / "first"], check=True
        )
    words = [sys.executable, *TRAIN, *folder, "--output_dir", tmp_path / "run"]
    line = shlex.join(map(str, words))
    status, output = Job(["bash", "-c", f"ulimit -f {blocks}; {line}"]).wait()
    assert status == 1
    (line,) = [line for line in output.splitlines() if "error" in line]
    assert line.startswith("error: ")
    assert ("a file may have 4,096 bytes here: ulimit -f" if blocks == 4 else "File too large") in line
    assert "Traceback" not in output


def test_what_a_job_prints_is_not_its_status(tmp_path):
    """A script that fails prints `preempted: `."""
    (tmp_path / "script.py").write_text(
        "print('preempted: x', flush=True)\nraise SystemExit('error: 3 is bad')\n"
    )
    words = [
        sys.executable,
        "launch.py",
        "--mode",
        "single-node",
        "--log_dir",
        tmp_path,
        tmp_path / "script.py",
    ]
    status, output = Job(words).wait()
    assert status == 1, output
    assert "error: localhost: 3 is bad" in output


@pytest.mark.full
@pytest.mark.parametrize("gpus", ["1", "2"])
def test_a_preempted_job(gpus, tmp_path):
    words = [sys.executable, "launch.py", "--mode", "single-node", "--gpus", gpus, "--log_dir", tmp_path]
    words += ["train_hello.py", "--epochs", "100000", "--log_every", "1", "--output_dir", tmp_path / "run"]
    job = Job(words)
    for _ in range(1200):
        if (tmp_path / "run" / "metrics.jsonl").exists():
            break
        time.sleep(0.1)
    job.process.send_signal(signal.SIGTERM)
    status, output = job.wait()
    assert status == 75, output
    assert "preempted: the same command continues (exit status 75)" in output
    assert result(tmp_path / "run")["status"] == "preempted"
