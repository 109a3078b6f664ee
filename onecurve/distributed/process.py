"""Starts and ends a job's process: train scripts' entry point, one-line errors and exit statuses."""

import contextlib
import functools
import io
import itertools
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable
from typing import Any, NoReturn, TextIO, TypeVar

import torch.distributed as dist
from accelerate import Accelerator

from onecurve.distributed.accelerator import start
from onecurve.distributed.channel import claim_report
from onecurve.distributed.step_graph import free_graphs
from onecurve.distributed.watch import STOP_SIGNALS, USER_ERROR_TYPES, Preempted, watch
from onecurve.flags.recipe import Batch, Recipe, from_flags
from onecurve.system.cli import settle_environment, tell_launchers, tell_torchrun
from onecurve.system.env import (
    PREEMPTED_STATUS,
    is_hosts_first,
    is_launched,
    rank,
    report_to_launcher,
    world_size,
)
from onecurve.system.output import log
from onecurve.system.phase import STARTING, now
from onecurve.system.text import safe_message
from onecurve.upstream.python_ import run_finalizers

INTERRUPTED_STATUS = 130  # exit status after Ctrl-C
RecipeType = TypeVar("RecipeType", bound=Recipe)
MainFunction = Callable[[RecipeType, Accelerator, Batch], None]


def entry(recipe_class: type[RecipeType]) -> Callable[[MainFunction[RecipeType]], Callable[[], None]]:
    """Decorate a train script's main(recipe, accelerator, batch).

    The decorated function reads the recipe from the flags, starts the Accelerator, runs the training and
    exits the process.
    """

    def decorate(script_main: MainFunction[RecipeType]) -> Callable[[], None]:
        def train() -> None:
            now.enter(STARTING)  # the script's imports are complete at this point
            recipe = from_flags(recipe_class).resolved()
            accelerator, batch = start(recipe, clip_norm=recipe.clip_norm)
            script_main(recipe, accelerator, batch)

        @functools.wraps(script_main)
        def run_script() -> None:
            run_process(train)

        return run_script

    return decorate


def run_process(run_main: Callable[[], None]) -> NoReturn:
    """Call run_main(), report its error, and exit the process.

    Inside another program such as a debugger, restore the signal handlers and raise SystemExit instead.

    The exit status is 0 after success, 1 after an error, 130 after Ctrl-C, and 75 after a preemption. User
    errors are printed on one line, and other errors with a traceback.
    """
    exit_status = 0
    owns_process = _owns_process()
    settle_environment()  # sets the umask
    if owns_process:
        sys.stdout = _ignore_write_errors(sys.stdout)
        sys.stderr = _ignore_write_errors(sys.stderr)
    previous_handlers = [(signal_number, signal.getsignal(signal_number)) for signal_number in STOP_SIGNALS]
    try:
        run_main()
    except KeyboardInterrupt as error:
        exit_status = INTERRUPTED_STATUS
        if is_hosts_first():
            log.warning(": ".join(["interrupted", *map(str, error.args)]))
    except Preempted:
        exit_status = PREEMPTED_STATUS
        if claim_report("preempted"):
            log.info(
                f"preempted: the same command continues the training run (exit status {PREEMPTED_STATUS})"
            )
    except SystemExit as error:
        if isinstance(error.code, str):
            tell_launchers(safe_message(error.code))
        raise
    except Exception as error:  # do not re-raise, because the interpreter would run queued downloads at exit
        exit_status = 1
        watch.begin_exit()
        watch.report_failure(error)
        is_user_error = isinstance(error, USER_ERROR_TYPES)
        error_message = safe_message(error) if is_user_error else f"{type(error).__name__}: {error}"
        tell_torchrun(error_message)
        if not is_user_error and (not dist.is_initialized() or claim_report(repr(error))):
            traceback.print_exc()
        elif is_user_error and claim_report(error_message):
            log.warning(f"error: {error_message}")
        # A launcher kills all processes as soon as one exits. The delay gives other ranks time to print their
        # errors, or to read this error from rank 0's store.
        if world_size() > 1:
            exit_delay_s = 2 if dist.is_initialized() else 5
            time.sleep(1 if rank() == 0 else exit_delay_s)
    watch.begin_exit()
    if dist.is_initialized() and exit_status in (0, PREEMPTED_STATUS):
        free_graphs()
        dist.destroy_process_group()
    sys.stdout.flush()
    sys.stderr.flush()
    report_to_launcher("exit", status=exit_status)
    if not owns_process:
        for signal_number, previous_handler in previous_handlers:
            signal.signal(signal_number, previous_handler)
        sys.exit(exit_status)
    run_finalizers()
    # sys.exit() would run thread destructors, in which about one in a hundred gloo processes aborts (pytorch
    # #179291). sys.exit() would also wait for uploads to an unresponsive store.
    os._exit(exit_status)


def _owns_process() -> bool:
    """Return False if IPython's %run, a debugger, a profiler or `python -i` runs the script."""
    # The command line without the interpreter and its options
    script_command = list(itertools.dropwhile(lambda argument: argument.startswith("-"), sys.orig_argv[1:]))
    return is_launched() or (script_command == sys.argv and not sys.flags.inspect)


class _ForgivingOutput(io.FileIO):
    """File that ignores write errors, because training must not fail in a print statement."""

    def write(self, encoded: Any, /) -> int:
        """Write the bytes. If the write fails, drop them and report success."""
        with contextlib.suppress(OSError):
            return super().write(encoded)
        return len(encoded)


def _ignore_write_errors(output_stream: TextIO) -> TextIO:
    """Return a stream that ignores write errors, for example after `| tee` exits or a disk fills up."""
    assert isinstance(output_stream, io.TextIOWrapper)
    output_stream.flush()
    raw_output = _ForgivingOutput(output_stream.fileno(), "w", closefd=False)
    return io.TextIOWrapper(
        # Unbuffered if Python was started with -u
        raw_output if output_stream.write_through else io.BufferedWriter(raw_output),
        encoding=output_stream.encoding,
        errors="backslashreplace",  # printing never fails, whatever the terminal's encoding is
        line_buffering=output_stream.line_buffering,
        write_through=output_stream.write_through,
    )
