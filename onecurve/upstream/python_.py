"""Private names of CPython's standard library. Seen in Python 3.11 to 3.13."""

import sys
import threading
from collections.abc import Callable, Iterable
from types import FrameType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import argparse


def run_finalizers() -> None:
    """Run multiprocessing's finalizers, which os._exit skips.

    Otherwise, Python's resource tracker warns about leaked semaphores of the DataLoader workers.
    """
    import multiprocessing.util

    multiprocessing.util._run_finalizers(0)  # type: ignore[attr-defined]


def on_unsent(report: Callable[[Exception, object], None]) -> None:
    """Call report(error, object) when a multiprocessing queue can't send an object.

    Otherwise, the queue's thread prints a traceback and drops the object, and the receiver waits forever
    (pytorch #25691). CPython provides the replaced method for this purpose, but typeshed does not declare it.
    """
    import multiprocessing.queues

    setattr(multiprocessing.queues.Queue, "_on_queue_feeder_error", staticmethod(report))  # noqa: B010


def main_threads_frame() -> FrameType | None:
    """Return the innermost frame of the main thread, as seen from another thread.

    No public function shows where a thread hangs while it is inside native code.
    """
    return sys._current_frames().get(threading.main_thread().ident or 0)


def flag_names(parser: "argparse.ArgumentParser") -> Iterable[str]:
    """Return all flags of a parser, such as `--batch_size`.

    argparse has no public list of flags. The list is needed to suggest a similar flag when a flag is unknown.
    """
    return parser._option_string_actions
