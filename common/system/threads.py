"""Threads beside the training."""

import contextlib
import os
import threading
from collections.abc import Callable
from concurrent.futures import Future, wait
from typing import TypeVar

Heartbeat = Callable[[], None]  # tells the other processes that this one gets on; called about every second
Result = TypeVar("Result")


def step_aside() -> None:
    """Gives the calling thread, and those that it starts, what the training leaves of the processor.

    On Linux threads have priorities of their own. With 2 cores for ViT-B/32 a step beside the writing takes
    1.0 to 1.3 times its time; at equal priority 2.9 times (benchmarks/checkpoint_saves.py).
    """
    with contextlib.suppress(OSError, AttributeError):
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), 19)


def run_with_heartbeat(work: Callable[[], Result], beat: Heartbeat, every_s: float = 0.5) -> Result:
    """Runs work() in a thread and calls beat() here meanwhile. Returns its result, or raises its exception.

    An exception of beat() is raised at once; the thread goes on, and does not keep the process alive.
    """
    outcome: Future[Result] = Future()

    def run() -> None:
        try:
            outcome.set_result(work())
        except BaseException as error:
            outcome.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    while not wait([outcome], every_s).done:
        beat()
    return outcome.result()
