"""Preemption: after SIGTERM, SIGUSR1 or SIGHUP to any process, all processes save together and exit.

SIGHUP comes when a terminal is closed or an ssh connection is lost. A process that was started with SIGHUP
ignored, as by nohup, continues. Launchers forward SIGTERM to their processes; torchrun and accelerate also
forward SIGHUP. When a launcher is killed, the kernel sends SIGTERM to its child processes; in processes
further down a thread notices it within a second.
"""

import os
import select
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

from common.distributed.watch import report_hang
from common.system.env import PREEMPTED, launched, report
from common.system.processes import end_with_parent, is_alive, is_orphan, is_under_nohup, launchers

_SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP)
_stop = threading.Event()


class Preempted(Exception):
    """All processes have agreed to save and exit."""


class _State:
    """What the main thread and the watching thread tell one another."""

    is_ready = False  # False: a signal ends the process at once; True: at the end of the step
    is_signalled = False
    is_agreed = False  # all processes have agreed to stop
    checked_at = 0.0  # time.monotonic() of the last check for a signal
    reason = ""  # the signal, or that the launcher has ended
    timeout_s = 300.0  # without a check for this long after a signal, the process is stuck


def watch(timeout_s: float) -> None:
    """Starts to listen for _SIGNALS. Before ready() a signal ends the process at once, later after a step.

    A process that is still in the same step timeout_s after a signal is ended.
    """
    _State.timeout_s = timeout_s
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    # The interpreter delays a handler while the main thread is inside torch; the thread reacts at once.
    signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
    for number in _SIGNALS:
        if number != signal.SIGHUP or not is_under_nohup():
            signal.signal(number, _note_signal)
    above: list[psutil.Process] = []
    if launched():  # only a launcher's end ends this process, not that of a shell
        end_with_parent()
        if is_orphan():
            _stop.set()
        above = launchers()
    threading.Thread(target=_watch, args=(reader, above), daemon=True).start()


def ready() -> None:
    """Makes signals take effect at the end of a step from here on."""
    _State.is_ready = True


def agreed() -> None:
    """Stops the watchdog once all processes have agreed to stop, as the last save may take long."""
    _State.is_agreed = True


def reason() -> str:
    """The signal that this process has received, or that its launcher has ended; empty without a reason."""
    return _State.reason


def wanted() -> bool:
    """True after a stop signal. Each call also resets the watchdog."""
    _State.checked_at = time.monotonic()
    return _State.is_signalled or _stop.is_set()


class Poll:
    """Asynchronous maxima over all processes: a call returns the maximum of each number of the last call.

    It uses gloo, beside the training's own collectives, so nothing waits for a GPU. The constructor is
    collective.
    """

    def __init__(self, timeout_s: float) -> None:
        self.group: dist.ProcessGroup | None = None
        if dist.is_initialized():
            group = dist.new_group(backend="gloo", timeout=timedelta(seconds=timeout_s))
            assert isinstance(group, dist.ProcessGroup)
            self.group = group
        self.values = torch.zeros(0, dtype=torch.int32)
        self.work: dist.Work | None = None

    def __call__(self, *mine: int) -> list[int]:
        """Returns the last call's maxima, [] in the first call; on one process its own. Collective."""
        if self.group is None:
            return list(mine)
        answer = self.finish()
        self.values = torch.tensor(mine, dtype=torch.int32)
        self.work = dist.all_reduce(self.values, dist.ReduceOp.MAX, group=self.group, async_op=True)
        return answer

    def finish(self) -> list[int]:
        """Waits for the last call's answer and returns it; [] when none is in flight."""
        if self.work is None:
            return []
        self.work.wait()
        self.work = None
        return self.values.tolist()

    def gather(self, mine: Any) -> list[Any]:
        """Every process's object, by rank. Collective. (NCCL would need GPU memory for it.)"""
        if self.group is None:
            return [mine]
        everyones = [None] * dist.get_world_size()
        dist.all_gather_object(everyones, mine, group=self.group)
        return everyones

    def wait_for_main(self, is_main: bool, done: Callable[[float], bool]) -> None:
        """Waits until done(1.0), which waits up to a second, is true on the main process. Collective.

        The main process broadcasts every second, so that no process waits for ever if it is gone.
        """
        finished = False
        while not finished:
            finished = is_main and done(1.0)
            if self.group is not None:
                told = torch.tensor([int(finished)])
                dist.broadcast(told, 0, group=self.group)
                finished = bool(told)


def _note_signal(*_) -> None:
    """Notes a signal. _stop.set() takes a lock, which a second signal may interrupt."""
    _State.is_signalled = True


def _watch(reader: int, above: list[psutil.Process]) -> None:
    """Notices signals at once, and the end of a launcher; ends this process if no step ends after it.

    The main thread may wait for ever, for a dead process, a disk or a file server.
    """
    stopped_at = 0.0
    while True:
        is_readable = select.select([reader], [], [], 1.0)[0]
        if numbers := [n for n in (os.read(reader, 64) if is_readable else b"") if n in _SIGNALS]:
            _State.reason = _State.reason or signal.Signals(numbers[0]).name
            _stop.set()
            if not _State.is_agreed:
                report("leaving", why=_State.reason)
        elif not all(map(is_alive, above)):
            _State.reason = _State.reason or "its launcher has ended"
            _stop.set()
            above = []
        if not _stop.is_set():
            continue
        if not _State.is_ready:
            os._exit(PREEMPTED)
        stopped_at = stopped_at or time.monotonic()
        silent_s = time.monotonic() - max(stopped_at, _State.checked_at)
        if not _State.is_agreed and silent_s > _State.timeout_s:
            report_hang()
            print(
                f"Received {_State.reason}, but no step finished within {_State.timeout_s:g} s; still waiting"
                " for data or another rank.",
                file=sys.stderr,
                flush=True,
            )
            os._exit(1)
