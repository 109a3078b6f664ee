"""Runs functions in threads at low priority, or while the calling thread sends heartbeats."""

import contextlib
import os
import threading
from collections.abc import Callable
from concurrent.futures import Future, wait
from typing import TypeVar

# Function that reports progress to other processes and is called about every second
Heartbeat = Callable[[], None]
Result = TypeVar("Result")
LOWEST_PRIORITY = 19  # highest nice value on Linux


def lower_priority() -> None:
    """Limit the calling thread, and the threads it spawns, to CPU time that training does not use.

    On Linux, each thread has a separate priority. With ViT-B/32 on 2 cores, a training step during a write at
    low priority takes 1.0 to 1.3 times as long as a step without a write. A step during a write at normal
    priority takes 2.9 times as long (benchmarks/checkpoint_saves.py).
    """
    with contextlib.suppress(OSError, AttributeError):
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), LOWEST_PRIORITY)


def start_daemon(work: Callable[[], Result]) -> Future[Result]:
    """Run work() in a daemon thread, so that the process can exit while work() waits for a silent server."""
    work_future: Future[Result] = Future()

    def run_work() -> None:
        try:
            work_future.set_result(work())
        except BaseException as work_error:
            work_future.set_exception(work_error)

    threading.Thread(target=run_work, daemon=True).start()
    return work_future


def run_with_heartbeat(work: Callable[[], Result], heartbeat: Heartbeat, interval_s: float = 0.5) -> Result:
    """Run work() in a thread, call heartbeat() in the calling thread, and return the result of work().

    Exceptions from work() are raised in the calling thread. An exception from heartbeat() is raised
    immediately. After such an exception, the thread continues, but does not keep the process alive.
    """
    work_future = start_daemon(work)
    while wait([work_future], interval_s).not_done:
        heartbeat()
    return work_future.result()
