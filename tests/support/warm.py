"""One-process runs of the project's scripts, forked from a server that has imported torch, accelerate and
matplotlib: a run starts in 0.2 s of processor time instead of 5.

The server is multiprocessing's own. It has run no torch operation and has no threads, so that its forks start
as a fresh process does.
"""

import functools
import multiprocessing
import multiprocessing.forkserver
import multiprocessing.resource_tracker
import os
import runpy
import signal
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from common.data.workers import FOR_THE_TRAINER
from tests.conftest import ROOT
from tests.support import faults

_context = multiprocessing.get_context("forkserver")
_context.set_forkserver_preload(
    [
        *("torch", "accelerate", "torch.utils.tensorboard", "sklearn.datasets"),
        *("matplotlib.figure", "matplotlib.backends.backend_agg", "common.run.plots", "common.evaluation"),
        *("train_cnn_a", "train_hello", "tests.support.warm"),
    ]
)


@functools.cache
def _start_server() -> None:
    """Starts the server with the signals blocked that data.workers blocks: a process has one server, and
    decoding workers may come from this one too."""
    multiprocessing.resource_tracker.ensure_running()  # first, as it unblocks some of them
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, FOR_THE_TRAINER)
    try:
        multiprocessing.forkserver.ensure_running()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)


class WarmJob:
    """Like conftest.Job, for one process. words: a script, as a path in the project, and its flags."""

    def __init__(
        self,
        words: list,
        log: Path,
        env: dict[str, str] | None = None,
        ignored: tuple[int, ...] = (),
        before: Callable[[], None] | None = None,
    ):
        """ignored: signals, as under nohup. before: is called in the process before the script."""
        self.log = log
        words = [str(word) for word in words]
        _start_server()
        self.process = _context.Process(target=_run, args=(words, str(log), env or {}, ignored, before))
        self.process.start()

    @property
    def is_alive(self) -> bool:
        return self.process.exitcode is None

    @property
    def output(self) -> str:
        return self.log.read_text(errors="replace") if self.log.exists() else ""

    def send_signal(self, number: int) -> None:
        if self.is_alive:
            os.kill(self.process.pid, number)

    def wait(self, timeout_s: float = 240) -> tuple[int, str]:
        """Exit status (a signal as -number) and output; fails the test when it takes longer."""
        self.process.join(timeout_s)
        if self.is_alive:
            self.process.kill()
            self.process.join()
            pytest.fail(f"no end within {timeout_s} s:\n{self.output}")
        return self.process.exitcode, self.output


def run(words: list, log: Path, env: dict[str, str] | None = None) -> str:
    """Runs a script that must succeed. Returns its output."""
    status, output = WarmJob(words, log, env).wait()
    assert status == 0, output
    return output


def _run(
    words: list[str],
    log: str,
    env: dict[str, str],
    ignored: tuple[int, ...],
    before: Callable[[], None] | None,
) -> None:
    os.setsid()
    signal.pthread_sigmask(signal.SIG_UNBLOCK, FOR_THE_TRAINER)
    out = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
    for descriptor in (1, 2):
        os.dup2(out, descriptor)
    os.environ.update({"CUDA_VISIBLE_DEVICES": "", "NETRC": "/nonexistent"} | env)
    for number in (signal.SIGHUP, signal.SIGTERM):
        signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)  # multiprocessing's server ignores it
    for number in ignored:
        signal.signal(number, signal.SIG_IGN)
    os.chdir(ROOT)
    sys.argv = words
    if "WATCHED" in env:
        exec(faults.HOOK, {})
    if before:
        before()
    runpy.run_path(words[0], run_name="__main__")
