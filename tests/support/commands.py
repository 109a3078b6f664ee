"""Helper that runs the project's commands in the test process."""

import contextlib
import io
import os
import signal
import sys
from collections.abc import Callable

import pytest

from onecurve.system.cli import run_command

SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


def call(main: Callable[[], int], *words: object) -> tuple[int, str]:
    """Run a command's main function with these arguments, and return its exit status and output.

    The process's umask and signal handlers are restored afterwards.
    """
    output, umask = io.StringIO(), os.umask(0)
    os.umask(umask)
    handlers = [signal.getsignal(number) for number in SIGNALS]
    with pytest.MonkeyPatch.context() as patch, contextlib.ExitStack() as stack:
        patch.setattr(sys, "argv", ["command", *map(str, words)])
        stack.enter_context(contextlib.redirect_stdout(output))
        stack.enter_context(contextlib.redirect_stderr(output))
        try:
            status = run_command(main)
        except SystemExit as exit:  # Flag parsers raise SystemExit
            status = int(exit.code or 0)
        finally:
            os.umask(umask)
            for number, handler in zip(SIGNALS, handlers, strict=True):
                signal.signal(number, handler)
    return status, output.getvalue()
