"""Watches a process for signals, its launcher's exit, failed ranks and hanging collectives.

After any process receives SIGTERM, SIGUSR1 or SIGHUP, all processes save together and exit. SIGHUP arrives
when a terminal closes or an SSH connection drops. A process that was started with SIGHUP ignored, for example
by nohup, continues running. Launchers forward SIGTERM to their processes. torchrun and accelerate also
forward SIGHUP. When a launcher is killed, the kernel sends SIGTERM to the launcher's child processes. In all
other descendants, the watch detects the launcher's exit within a second.

If one rank fails, all other ranks exit. Under gloo, a collective fails when a participating process exits.
Under NCCL, other ranks continue to wait, because their main threads block in a device synchronisation until
torchrun kills the processes 30 s later. Therefore, a failing rank writes its error message to the store, and
the other ranks exit with this message.

The store does not answer while its process is suspended. Separate threads query the store, so the watch
always notices signals. The watch also reports hanging collectives (onecurve/distributed/hang.py).

No library monitors collectives inside a CUDA graph. If a graph replay hangs, the report contains the step,
the replay's number and the waiting time, and the watch terminates the process after the timeout.

The rest of the project uses a single object, `watch`, and does not set its attributes.
"""

import contextlib
import os
import select
import signal
import socket
import sys
import threading
import time
import uuid
from collections.abc import Callable
from typing import NoReturn

import psutil
from accelerate import Accelerator
from accelerate.utils import gather_object

from onecurve.distributed.channel import Channel, first_to_report, let_main_close_first
from onecurve.distributed.hang import HangReport, recorded_collectives
from onecurve.system import processes
from onecurve.system.cli import tell_torchrun
from onecurve.system.env import PREEMPTED_STATUS, is_launched, local_rank, report_event
from onecurve.system.output import log
from onecurve.system.phase import now
from onecurve.system.text import message_text
from onecurve.system.threads import start_daemon

# Errors printed on one line, without a traceback
MISTAKES = (ValueError, FloatingPointError, OSError)
STOP_SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP)
LAUNCHER_ENDED = "its launcher has exited"
POLL_S = 0.5
GRACE_S = 1.0  # seconds granted to the main thread to fail first, as it does under gloo
CLOSING_S = 12.0  # seconds granted to the main process to close its files and finish a checkpoint
REPORT_AT_FRACTION = 0.7  # fraction of the timeout after which the watch reports a waiting collective
DYING_S = 0.5  # seconds between a dying process's disconnection and its exit
HEARTBEATS_PER_TIMEOUT = 5  # number of heartbeats per timeout
REPLAY_S = 5.0  # seconds after the timeout before the watch terminates a process with a hanging replay

# Function that closes the run's files and records a failure's error message
CloseRun = Callable[[str], None]


class Preempted(Exception):
    """Exception raised after all processes have agreed to save and exit."""


class Watch:
    """Watchdog for this process. A separate thread terminates the process if the main thread can't.

    The main thread calls ready() once signals may wait for the current step to end, wanted() after each step,
    and agreed() when all processes stop.
    """

    def __init__(self) -> None:
        self._timeout_s = 300.0
        # True if a signal stops the process after the current step, False if it stops the process immediately
        self._is_ready = False
        self._is_signalled = False
        self._is_agreed = False
        self._checked_at = 0.0  # time.monotonic() of the last check for a signal
        self._reason = ""  # name of the detected signal, or LAUNCHER_ENDED
        self._ranks: _Ranks | None = None  # set by ready() if the job has several processes
        self._close: CloseRun = lambda _: None
        self._has_failed = False

    @property
    def timeout_s(self) -> float:
        """Number of seconds without progress after which a process is considered stuck (--timeout_s)."""
        return self._timeout_s

    def start(self, timeout_s: float) -> None:
        """Start the watch's thread, which terminates the process if a step takes too long after a signal.

        Args:
            timeout_s: Maximum number of seconds between a signal and the end of the current step.
        """
        self._timeout_s = timeout_s
        reader, writer = os.pipe()
        os.set_blocking(writer, False)
        # The interpreter delays signal handlers while the main thread is inside torch. The wakeup file
        # descriptor lets the watch's thread react immediately.
        signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
        for signal_number in STOP_SIGNALS:
            if signal_number != signal.SIGHUP or not processes.is_under_nohup():
                signal.signal(signal_number, self._note_signal)
        launcher_processes: list[psutil.Process] = []
        if is_launched():  # this process must exit when its launcher exits, but not when a shell does
            processes.end_with_parent()
            self._reason = LAUNCHER_ENDED if processes.is_orphan() else ""
            launcher_processes = processes.launchers()
        threading.Thread(target=self._watch_signals, args=(reader, launcher_processes), daemon=True).start()

    def ready(self, accelerator: Accelerator) -> None:
        """From now on, let signals wait for the current step to end, and watch other ranks.

        This method is collective.
        """
        self._is_ready = True
        if accelerator.num_processes > 1:
            self._ranks = _Ranks(accelerator, self._timeout_s, lambda message: self._close(message))
            start_daemon(self._ranks.poll)

    def wanted(self) -> bool:
        """Return True if the process must stop. Each call also records that a step has ended."""
        self._checked_at = time.monotonic()
        return self._is_signalled or bool(self._reason)

    def agreed(self) -> str:
        """Remove the time limit for the exit, because the last save may take a long time.

        The caller guarantees that all processes have agreed to stop.

        Returns:
            The reason why this process must stop, or "" if only another process received a signal.
        """
        self._is_agreed = True
        return self._reason

    def on_failure(self, close_run: CloseRun) -> None:
        """Set the function that receives the message if another rank's failure terminates this process."""
        self._close = close_run

    def begin_exit(self) -> None:
        """Reserve the exit for the main thread, so that another rank's failure can't terminate this process.

        If the watch is already terminating the process, this call never returns.
        """
        if self._ranks:
            self._ranks.begin_exit()

    def report_failure(self, error: BaseException) -> BaseException:
        """Report this rank's error to other ranks and to launch.py, and return its cause.

        Only the first call sends a report. The cause may be another rank's error.
        """
        if self._has_failed:
            return error
        self._has_failed = True
        if self._ranks:
            return self._ranks.report_failure(error)
        if isinstance(error, Exception):
            report_event("failed", message=_error_text(error))
        return error

    def report_hang(self) -> None:
        """Report this process's evidence and request other ranks' evidence before this process exits."""
        if self._ranks:
            self._ranks.hang.make()

    def _note_signal(self, *_: object) -> None:
        """Record a signal. This handler takes no lock, because a second signal may interrupt it."""
        self._is_signalled = True

    def _watch_signals(self, wakeup_reader: int, launcher_processes: list[psutil.Process]) -> None:
        """Watch for signals, the launcher's exit and hanging collectives. Signals are detected immediately.

        If no step ends after a signal, this method terminates the process, because the main thread may wait
        forever for a dead process, a disk or a file server.
        """
        stopped_at = 0.0
        while True:
            is_readable = select.select([wakeup_reader], [], [], POLL_S)[0]
            received_bytes = os.read(wakeup_reader, 64) if is_readable else b""
            if received_signals := [number for number in received_bytes if number in STOP_SIGNALS]:
                self._reason = self._reason or signal.Signals(received_signals[0]).name
                if not self._is_agreed:
                    report_event("leaving", why=self._reason)
            elif not all(map(processes.is_alive, launcher_processes)):
                self._reason = self._reason or LAUNCHER_ENDED
                launcher_processes = []
            if self._ranks:
                self._ranks.look_for_hang()
            if not self._reason:
                continue
            if not self._is_ready:
                os._exit(PREEMPTED_STATUS)
            time_s = time.monotonic()
            stopped_at = stopped_at or time_s
            if not self._is_agreed and time_s - max(stopped_at, self._checked_at) > self._timeout_s:
                self._end_stuck()

    def _end_stuck(self) -> NoReturn:
        """Terminate this process, because its step timed out after a signal."""
        self.report_hang()
        has_no_launcher = self._reason == LAUNCHER_ENDED
        cause = "the launcher has exited" if has_no_launcher else f"the process received {self._reason}"
        log.warning(
            f"{cause}, but the current step has not finished within {self._timeout_s:g} s. The process was"
            " waiting for data or for another rank."
        )
        os._exit(1)


class _Ranks:
    """The job's other ranks, observed through the store and, on the same host, through /proc."""

    def __init__(self, accelerator: Accelerator, timeout_s: float, close_run: CloseRun):
        self.accelerator, self.rank, self.timeout_s = accelerator, accelerator.process_index, timeout_s
        self.close_run = close_run
        hosts_first = self.rank - local_rank()
        identity = socket.gethostname(), hosts_first, os.getpid(), processes.start_ticks(os.getpid())
        identities = gather_object([[uuid.uuid4().hex, *identity]])
        self.local_ranks = {  # PID and start time of each other rank on this host, by rank
            rank: (pid, ticks)
            for rank, (_, _, first, pid, ticks) in enumerate(identities)
            if first == hosts_first and processes.is_running(pid, ticks) and rank != self.rank
        }
        job = identities[0][0]  # unique job name, which changes after a restart
        self.failure_key, self.interrupt_key = f"{job}/failure", f"{job}/interrupt"
        self.exit_key_prefix = f"{job}/exit"
        # One channel each for poll(), for failures in the main thread, and for the hang report
        self.poll_channel, self.failure_channel, hang_channel = (Channel().clone() for _ in range(3))
        self.hang = HangReport(job, self.rank, [host for _, host, *_ in identities], hang_channel)
        self.exit_lock = threading.RLock()  # acquired by the thread that terminates this process
        self.is_exiting = False
        self.hang_checked_at = 0.0

    def poll(self) -> None:
        """Send heartbeats and answer requests from other ranks until the main thread exits.

        If another rank fails, this method terminates the process.
        """
        channel, heartbeat_at = self.poll_channel, 0.0
        while not self.is_exiting:
            if time.monotonic() - heartbeat_at > self.timeout_s / HEARTBEATS_PER_TIMEOUT:
                heartbeat_at = time.monotonic()
                self.hang.beat(channel)
            self.hang.answer(channel)
            message = channel.read(self.failure_key)
            if not message and (death_message := self.dead_sibling(channel)):
                message = channel.first(self.failure_key, death_message)
            if message:
                return self.end(message)
            time.sleep(POLL_S)

    def end(self, message: str) -> None:
        """Terminate this process after another rank's failure, unless the main thread is already exiting."""
        time.sleep(GRACE_S)
        if not self.exit_lock.acquire(blocking=False):
            return
        self.is_exiting = True
        timer = threading.Timer(CLOSING_S, os._exit, (1,))  # close() may wait for a disk or the store
        timer.daemon = True
        timer.start()
        with contextlib.suppress(Exception):
            self.close_run(message)
        tell_torchrun(message)
        if first_to_report(message, self.poll_channel):
            log.warning(f"error: {message}")
        let_main_close_first(self.accelerator, self.poll_channel)
        time.sleep(1 if self.rank == 0 else 2)  # a launcher kills all processes as soon as one exits
        sys.stdout.flush()
        report_event("exit", status=1)
        os._exit(1)

    def dead_sibling(self, channel: Channel) -> str | None:
        """Return a message about a process on this host that died without reporting an error, or None."""
        for rank, (pid, ticks) in self.local_ranks.items():
            if not processes.is_running(pid, ticks) and not channel.read(f"{self.exit_key_prefix}/{rank}"):
                return (
                    f"rank {rank} (host {socket.gethostname()}, process {pid}) died without an error message."
                    " The process crashed or was killed, perhaps because the host ran out of memory. Check"
                    " the last lines of the process's output, and `dmesg`."
                )
        return None

    def cause_elsewhere(self) -> str | None:
        """Return another rank's failure message if it explains a failed collective, or None."""
        return self.failure_channel.read(self.interrupt_key) or self.dead_sibling(self.failure_channel)

    def begin_exit(self) -> None:
        """Reserve the exit for the main thread, and tell other ranks that it is intentional."""
        self.exit_lock.acquire()
        if not self.is_exiting:
            self.is_exiting = True
            self.failure_channel.post(f"{self.exit_key_prefix}/{self.rank}", True)

    def report_failure(self, error: BaseException) -> BaseException:
        """Report this rank's error to other ranks, and return its cause, which may be another rank's error.

        Only a job's first failure is reported to launch.py. The first failure's message replaces
        consequential errors on other ranks, such as a reset connection. Ctrl-C reaches all ranks, and each
        rank exits independently. Ctrl-C is the cause of another rank's error only if SIGINT was sent to a
        single rank.
        """
        location = f"rank {self.rank} (host {socket.gethostname()})"
        if not isinstance(error, Exception):
            self.failure_channel.first(
                self.interrupt_key, f"{location} was interrupted by SIGINT, so no checkpoint was saved"
            )
            return error
        message, cause = _error_text(error), None
        is_mistake = isinstance(error, MISTAKES)
        if not is_mistake:
            message = f"{location} failed: {message}"
            deadline = time.monotonic() + DYING_S
            while not (cause := self.cause_elsewhere()) and time.monotonic() < deadline:
                time.sleep(0.1)
        first_message = self.failure_channel.first(self.failure_key, cause or message)
        if self.failure_channel.store_error:
            return error
        if first_message == message:
            report_event("failed", message=message)
        return error if is_mistake or first_message == message else ValueError(first_message)

    def look_for_hang(self) -> None:
        """Check for hanging collectives and replays. This method does not use the store, which may hang."""
        if self.is_exiting:
            return
        time_s = time.monotonic()
        if not self.hang.is_published and time_s - self.hang_checked_at >= self.timeout_s / 40:
            self.hang_checked_at = time_s
            start_daemon(self.report_long_wait)
        if now.replay and now.replay.age_s > self.timeout_s + REPLAY_S:
            start_daemon(self.end_replay)

    def report_long_wait(self) -> None:
        """Create the hang report if a collective has waited for most of the timeout."""
        ages_s = [entry["age_s"] for entry in recorded_collectives() if not entry["is_done"]]
        if max(ages_s, default=0.0) > REPORT_AT_FRACTION * self.timeout_s and not self.is_exiting:
            self.hang.make()

    def end_replay(self) -> None:
        """Terminate this process because a CUDA graph replay hangs."""
        if replay := now.replay:
            self.end(
                f"replay {replay.number} of the step's CUDA graph, at step {now.step}, has waited for another"
                f" rank for more than {self.timeout_s:g} s"
            )


def _error_text(error: Exception) -> str:
    """Return the error's message, preceded by the class name unless the error is one of MISTAKES."""
    text = message_text(error)
    return text if isinstance(error, MISTAKES) else f"{type(error).__name__}: {text}"


watch = Watch()
