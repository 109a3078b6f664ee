"""Stopping together: SIGTERM, SIGUSR1 or SIGHUP, to the launcher or to one process, is agreed by all of them.

SIGHUP comes from a terminal that is closed, or an ssh that is lost; a process that was started with it
ignored, by nohup, goes on. A launcher passes SIGTERM on to its processes, torchrun and accelerate SIGHUP too.
One that is killed can't: then the kernel sends SIGTERM to them, or, where another process of the launcher
stands between, a thread here that watches it.
"""

import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import psutil
import torch
import torch.distributed as dist

from common.system.env import PREEMPTED, launched
from common.system.processes import end_with_parent, is_under_nohup

_SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP)
_stop = threading.Event()


class Preempted(Exception):
    """All processes have agreed to save and to end."""


class _Main:
    """What the other threads know of the main one."""

    ready = False  # to be told to stop; before that a signal ends the process at once
    heard = False  # a signal
    agreed = False
    seen = 0.0  # when it last looked
    timeout_s = 300.0  # told to stop and silent for so long it waits for what will not come


def watch(timeout_s: float) -> None:
    """From now on _SIGNALS wait for the end of the step; before ready() they end the process.

    A process that is in the same step timeout_s after a signal ends.
    """
    _Main.timeout_s = timeout_s
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    # The interpreter calls a handler only when the main thread is out of torch: a thread hears it at once.
    signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
    for number in _SIGNALS:
        if number != signal.SIGHUP or not is_under_nohup():
            signal.signal(number, _hear)
    threading.Thread(target=_listen, args=(reader,), daemon=True).start()
    threading.Thread(target=_end_if_stuck, daemon=True).start()
    if launched():  # a shell that ends does not end what it started
        end_with_parent()
        if _is_orphan():
            _stop.set()
        threading.Thread(target=_watch_launcher, args=(_launchers(),), daemon=True).start()


def ready() -> None:
    _Main.ready = True


def agreed() -> None:
    """To stop: what comes now may take its time."""
    _Main.agreed = True


def wanted() -> bool:
    """Whether this process was told to stop. Who asks is not stuck."""
    _Main.seen = time.monotonic()
    return _Main.heard or _stop.is_set()


class Poll:
    """Each process gives a number, and all get the largest: at the next call, so that nothing waits.

    Over gloo, beside the training's own collectives, so that no GPU is waited for. Making it is collective.
    """

    def __init__(self, timeout_s: float) -> None:
        timeout = timedelta(seconds=timeout_s)
        self.group = dist.new_group(backend="gloo", timeout=timeout) if dist.is_initialized() else None
        self.value = torch.zeros(1, dtype=torch.int32)
        self.work: dist.Work | None = None

    def __call__(self, mine: int) -> int:
        """The largest number given by any process at the last call. Collective; one process gets its own."""
        if self.group is None:
            return mine
        answer = self.finish()
        self.value = torch.tensor([mine], dtype=torch.int32)
        self.work = dist.all_reduce(self.value, dist.ReduceOp.MAX, group=self.group, async_op=True)
        return answer

    def finish(self) -> int:
        """The answer to the last call."""
        if self.work is None:
            return 0
        self.work.wait()
        self.work = None
        return int(self.value)

    def gather(self, mine: Any) -> list[Any]:
        """That of each process, by rank. Collective; not over NCCL, which would take GPU memory for it."""
        if self.group is None:
            return [mine]
        everyones = [None] * dist.get_world_size()
        dist.all_gather_object(everyones, mine, group=self.group)
        return everyones

    def wait_for_main(self, is_main: bool, done: Callable[[float], bool]) -> None:
        """Until done(1.0), of the main process, which waits so many seconds, is true. Collective.

        By messages in between: none of them waits for ever where the main process is gone.
        """
        finished = False
        while not finished:
            finished = is_main and done(1.0)
            if self.group is not None:
                told = torch.tensor([int(finished)])
                dist.broadcast(told, 0, group=self.group)
                finished = bool(told)


def is_alive(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:  # it ended between the two
        return False


def _is_orphan() -> bool:
    """Whether the launcher died while this process imported: what each launcher sets is there, it is not."""
    by_launcher = any(name in os.environ for name in _SET_BY_LAUNCHERS)
    return (
        by_launcher
        and os.getppid() == 1
        and not psutil.Process(1).name().startswith(("python", "bash", "sh"))
    )


def _hear(*_) -> None:
    """Not _stop.set(): it takes a lock, and a second signal may interrupt it."""
    _Main.heard = True


def _listen(reader: int) -> None:
    while True:
        if any(number in _SIGNALS for number in os.read(reader, 64)):
            _stop.set()


def _end_if_stuck() -> None:
    """A launcher tells the others to stop when one has died; they may wait for that one for ever, as one
    process may for a disk or a file server."""
    _stop.wait()
    told = time.monotonic()
    while _Main.ready:
        time.sleep(1)
        silent_s = time.monotonic() - max(told, _Main.seen)
        if not _Main.agreed and silent_s > _Main.timeout_s:
            what = f"told to stop, and no step ended in {_Main.timeout_s:g} s: the data, or another process"
            print(f"{what}, is waited for", file=sys.stderr, flush=True)
            os._exit(1)
    os._exit(PREEMPTED)


def _launchers() -> list[psutil.Process]:
    """The parent, and above it what belongs to the same launcher: `deepspeed` starts one that starts ours."""
    found = []
    for process in psutil.Process().parents():
        try:
            words = process.cmdline()[:4]
        except psutil.Error:
            break
        if not words or not words[0].rpartition("/")[2].startswith(("python", "pypy")):
            break  # a shell or a test: it may end before us
        if not any(w.rpartition("/")[2] in _LAUNCHERS or w.startswith(_LAUNCHER_MODULES) for w in words[1:]):
            break
        found.append(process)
    return found


# by torchrun, accelerate and deepspeed, and hardly by hand
_SET_BY_LAUNCHERS = ("TORCHELASTIC_RUN_ID", "ACCELERATE_DYNAMO_BACKEND", "CROSS_RANK")
_LAUNCHERS = ("deepspeed", "accelerate", "torchrun", "launch.py")
_LAUNCHER_MODULES = ("deepspeed.launcher", "accelerate.commands", "torch.distributed")


def _watch_launcher(launchers: list[psutil.Process]) -> None:
    while all(map(is_alive, launchers)):
        time.sleep(1)
    _stop.set()
