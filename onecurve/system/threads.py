"""Work in threads: at low priority beside the training, or with heartbeats meanwhile."""

import contextlib
import os
import threading
from collections.abc import Callable
from concurrent.futures import Future, wait
from typing import TypeVar

Heartbeat = Callable[[], None]  # shows the other processes that this one makes progress; about every second
Result = TypeVar("Result")


def lower_priority() -> None:
    """Gives the calling thread, and threads that it starts, only the CPU time that the training leaves.

    On Linux each thread has its own priority. With ViT-B/32 on 2 cores a step during a write takes 1.0 to 1.3
    times its time; at equal priority 2.9 times (benchmarks/checkpoint_saves.py).
    """
    with contextlib.suppress(OSError, AttributeError):
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), 19)


def start_daemon(work: Callable[[], Result]) -> Future[Result]:
    """Runs work() in a daemon thread, so that the process can end while it waits for a silent server."""
    outcome: Future[Result] = Future()

    def run() -> None:
        try:
            outcome.set_result(work())
        except BaseException as error:
            outcome.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    return outcome


def run_with_heartbeat(work: Callable[[], Result], heartbeat: Heartbeat, every_s: float = 0.5) -> Result:
    """Runs work() in a thread and calls heartbeat() here meanwhile. Returns or raises what work() does.

    An exception of heartbeat() is raised at once; the thread continues, and does not keep the process alive.
    """
    outcome = start_daemon(work)
    while wait([outcome], every_s).not_done:
        heartbeat()
    return outcome.result()
