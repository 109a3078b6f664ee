"""Commands with closed streams, without a home or a working folder, under a file size limit; exit statuses of
launch.py's jobs."""

import shlex
import signal
import subprocess
import sys
import time

import pytest

from common.system import cli
from common.system import paths as commands
from tests.conftest import CNN, ROOT, Job, full, latest, needs, result, torchrun

TRAIN = [str(ROOT / "train_cnn_a.py"), "--data", "digits", "--batch_size", "16", "--max_steps", "2"]
COMMANDS = ("launch.py", "doctor.py", "logbook.py", "find_batch_size.py", "prep_imagenet.py")
MISTAKE = {  # what each can't do, without a host, a GPU or torch
    "launch.py": ["--port", "0", "train_hello.py"],
    "doctor.py": ["--hostfile", "nowhere"],
    "logbook.py": ["add", "nowhere"],
    "find_batch_size.py": ["--config_file", "nowhere", "train_hello.py"],
    "prep_imagenet.py": ["--data", "nowhere", "--out", "/nowhere/out"],
}
NOBODY = 54321  # a user id that no passwd file has


def shell(words: list, redirections: str = "", before: str = "") -> list[str]:
    line = shlex.join([str(word() if callable(word) else word) for word in words])
    return ["bash", "-c", f"{before} {line} {redirections}"]


@pytest.mark.parametrize(
    ("launcher", "closed"),
    [
        ([sys.executable], "<&- >&- 2>&-"),
        full([sys.executable], ">&-"),
        full([sys.executable], "2>&-"),
        full(torchrun(2), "<&- >&- 2>&-"),
    ],
    ids=str,
)
def test_a_training_with_closed_streams(launcher, closed, tmp_path, cache):
    words = [*launcher, *TRAIN, *CNN[1:], *cache, "--output_dir", tmp_path / "run"]
    status, output = Job(shell(words, closed)).wait()
    assert status == 0, output
    assert "Traceback" not in output
    assert result(tmp_path / "run")["status"] == "finished"
    text = (latest(tmp_path / "run") / "state.json").read_text()
    assert "epoch " not in text  # nothing that was printed went to a file


@pytest.mark.parametrize("command", COMMANDS)
def test_a_command_with_closed_streams_or_in_a_removed_folder(command, tmp_path):
    words = [sys.executable, ROOT / command, *MISTAKE[command]]
    for closed, lines in (("", 1), (">&-", 1), ("<&- 2>&-", 0)):
        status, output = Job(shell(words, closed), cwd=tmp_path).wait()
        assert (status, output.count("error: ")) == (1, lines), output
        assert "Traceback" not in output
    gone = f"cd {tmp_path} && mkdir gone && cd gone && rmdir {tmp_path}/gone &&"
    status, output = Job(shell(words, "", gone)).wait()
    assert output.startswith("error: the working folder was removed")
    assert output.count("\n") == 1
    assert status == 1


def test_paths_in_a_removed_folder(tmp_path, monkeypatch):
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    assert commands.shortest(tmp_path / "gone" / "x") == "x"
    (tmp_path / "gone").rmdir()
    assert commands.shortest(tmp_path / "gone" / "x") == str(tmp_path / "gone" / "x")
    with pytest.raises(ValueError, match="the working folder was removed"):
        cli.check_working_folder()


def as_nobody(words: list) -> list:
    """The environment of a user without a home folder, who may read all files here."""
    needs("root")
    ids = [f"--reuid={NOBODY}", f"--regid={NOBODY}", "--clear-groups"]
    may_read = ["--inh-caps=+dac_read_search", "--ambient-caps=+dac_read_search"]
    return ["env", "-u", "HOME", "-u", "USER", "-u", "LOGNAME", "setpriv", *ids, *may_read, *words]


def test_without_a_home(tmp_path):
    code = "from pathlib import Path; from common.system import cli, paths; print(paths.public_path('/x/y'));"
    code += "print(cli.expand_home('/data', '')); cli.run_command(lambda: cli.expand_home('~/c', 'give --c'))"
    status, output = Job(as_nobody([sys.executable, "-c", code])).wait()
    error = f"error: ~/c: HOME is not set, and user {NOBODY} has no home folder: give --c"
    assert output.splitlines() == ["/x/y", "/data", error]
    assert status == 0


@pytest.mark.full
def test_a_training_without_a_home(tmp_path):
    tmp_path.chmod(0o777)
    words = as_nobody([sys.executable, *TRAIN, *CNN[1:], "--output_dir", tmp_path / "run"])
    status, output = Job(words, cwd=tmp_path).wait()
    assert status == 1
    assert output.splitlines()[-1].startswith("error: ~/.cache/train-images: HOME is not set")
    status, output = Job([*words, "--cache_dir", tmp_path / "cache"], cwd=tmp_path).wait()
    assert status == 0, output
    assert not (tmp_path / "~").exists()


@pytest.mark.parametrize("blocks", [200, full(4)])
def test_files_that_may_not_grow(blocks, tmp_path, cache):
    """Limits file sizes by ulimit -f, in KiB: with a cache from before, or without."""
    folder = cache if blocks == 200 else ["--cache_dir", tmp_path / "cache"]
    if blocks == 200 and not any(cache[1].iterdir()):
        subprocess.run(
            [sys.executable, *TRAIN, *CNN[1:], *cache, "--output_dir", tmp_path / "first"], check=True
        )
    words = [sys.executable, *TRAIN, *folder, "--output_dir", tmp_path / "run"]
    status, output = Job(shell(words, "", f"ulimit -f {blocks};")).wait()
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
