"""Uses private names of CPython's standard library. Written for Python 3.11 to 3.13."""

import sys
import threading
from collections.abc import Callable, Iterable
from types import FrameType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import argparse


def run_finalizers() -> None:
    """Run multiprocessing's finalizers before os._exit, which skips the finalizers.

    Otherwise, Python's resource tracker warns about semaphores leaked by the DataLoader workers.
    """
    import multiprocessing.util

    multiprocessing.util._run_finalizers(minpriority=0)  # type: ignore[attr-defined]


def call_on_unsent(report_unsent: Callable[[Exception, object], None]) -> None:
    """Call report_unsent(error, object) when a multiprocessing queue can't send an object.

    Otherwise, the queue's thread prints a traceback and drops the object, so that the receiver waits forever
    (pytorch #25691). CPython intends the replaced method to be overridden, but typeshed does not declare the
    method.
    """
    import multiprocessing.queues

    error_handler = staticmethod(report_unsent)
    setattr(multiprocessing.queues.Queue, "_on_queue_feeder_error", error_handler)  # noqa: B010


def main_threads_frame() -> FrameType | None:
    """Return the innermost stack frame of the main thread. Any thread may call this function.

    CPython has no public function that shows where a thread hangs in native code.
    """
    frame_by_thread_id = sys._current_frames()
    return frame_by_thread_id.get(threading.main_thread().ident or 0)


def flag_names(parser: "argparse.ArgumentParser") -> Iterable[str]:
    """Return the names of a parser's flags, such as `--batch_size`.

    Error messages about unknown flags suggest a similar name from this list. argparse has no public list of
    flags.
    """
    return parser._option_string_actions
