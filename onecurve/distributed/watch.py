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

from onecurve.distributed.channel import Channel, claim_report, let_main_close_first
from onecurve.distributed.hang import HangReport, recorded_collectives
from onecurve.system import processes
from onecurve.system.cli import tell_torchrun
from onecurve.system.env import PREEMPTED_STATUS, is_launched, local_rank, report_to_launcher
from onecurve.system.output import log
from onecurve.system.phase import now
from onecurve.system.text import safe_message
from onecurve.system.threads import start_daemon

# Errors printed on one line, without a traceback
USER_ERROR_TYPES = (ValueError, FloatingPointError, OSError)
STOP_SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP)
LAUNCHER_ENDED = "its launcher has exited"  # stop reason in messages, instead of a signal's name
POLL_INTERVAL_S = 0.5  # seconds between checks for signals, and between requests to the store
MAIN_THREAD_GRACE_S = 1.0  # seconds granted to the main thread to fail first, as it does under gloo
CLOSE_TIMEOUT_S = 12.0  # seconds granted to the main process to close its files and finish a checkpoint
REPORT_AT_FRACTION = 0.7  # fraction of the timeout after which the watch reports a waiting collective
DEATH_DELAY_S = 0.5  # seconds between a dying process's disconnection and its exit
HEARTBEATS_PER_TIMEOUT = 5  # number of heartbeats per timeout
HANG_CHECKS_PER_TIMEOUT = 40  # number of checks for a hanging collective per timeout
REPLAY_GRACE_S = 5.0  # seconds after the timeout before the watch terminates a process with a hanging replay

# Function that closes the run's files and records a failure's error message
CloseRun = Callable[[str], None]


class Preempted(Exception):
    """Exception raised after all processes have agreed to save and exit."""


class Watch:
    """Watchdog for this process. A separate thread terminates the process if the main thread can't.

    The main thread calls ready() once signals may wait for the current step to end, wanted() after each
    step, and confirm_stop() when all processes stop.
    """

    def __init__(self) -> None:
        self._timeout_s = 300.0
        # True if a signal stops the process after the current step, False if it stops the process immediately
        self._waits_for_step = False
        self._is_signalled = False
        self._is_stop_agreed = False
        self._signal_checked_at = 0.0  # time.monotonic() of the last check for a signal
        self._stop_reason = ""  # name of the detected signal, or LAUNCHER_ENDED
        self._other_ranks: _OtherRanks | None = None  # set by ready() if the job has several processes
        self._close_run: CloseRun = lambda _: None
        self._has_reported_failure = False

    @property
    def timeout_s(self) -> float:
        """Number of seconds without progress after which a process is considered stuck (--timeout_s)."""
        return self._timeout_s

    def start(self, timeout_s: float) -> None:
        """Install the signal handlers, and start the thread that watches for signals.

        The thread terminates the process if a step takes too long after a signal. In a launched job, the
        kernel sends SIGTERM to this process when its parent process dies.

        Args:
            timeout_s: Maximum number of seconds between a signal and the end of the current step.
        """
        self._timeout_s = timeout_s
        wakeup_read_fd, wakeup_write_fd = os.pipe()
        os.set_blocking(wakeup_write_fd, False)
        # The interpreter delays signal handlers while the main thread is inside torch. The wakeup file
        # descriptor lets the watch's thread react immediately.
        signal.set_wakeup_fd(wakeup_write_fd, warn_on_full_buffer=False)
        for signal_number in STOP_SIGNALS:
            if signal_number != signal.SIGHUP or not processes.is_under_nohup():
                signal.signal(signal_number, self._note_signal)
        launcher_processes: list[psutil.Process] = []
        if is_launched():  # this process must exit when its launcher exits, but not when a shell does
            processes.end_with_parent()
            self._stop_reason = LAUNCHER_ENDED if processes.is_orphan() else ""
            launcher_processes = processes.launchers()
        thread_arguments = (wakeup_read_fd, launcher_processes)
        threading.Thread(target=self._watch_signals, args=thread_arguments, daemon=True).start()

    def ready(self, accelerator: Accelerator) -> None:
        """Let signals wait for the current step to end from now on, and start watching other ranks.

        This method is collective.
        """
        self._waits_for_step = True
        if accelerator.num_processes > 1:

            def close_run(message: str) -> None:
                self._close_run(message)  # on_failure() may set this function later

            self._other_ranks = _OtherRanks(accelerator, self._timeout_s, close_run)
            start_daemon(self._other_ranks.poll_store)

    def wanted(self) -> bool:
        """Return True if the process must stop. Each call also records that a step has ended."""
        self._signal_checked_at = time.monotonic()
        return self._is_signalled or bool(self._stop_reason)

    def confirm_stop(self) -> str:
        """Remove the time limit for the exit, because the last save may take a long time.

        The caller guarantees that all processes have agreed to stop.

        Returns:
            The reason why this process must stop, or "" if only another process received a signal.
        """
        self._is_stop_agreed = True
        return self._stop_reason

    def on_failure(self, close_run: CloseRun) -> None:
        """Set the function that receives the message if another rank's failure terminates this process."""
        self._close_run = close_run

    def begin_exit(self) -> None:
        """Reserve the exit for the main thread, so that another rank's failure can't terminate this process.

        If the watch is already terminating the process, this call never returns.
        """
        if self._other_ranks:
            self._other_ranks.begin_exit()

    def report_failure(self, error: BaseException) -> BaseException:
        """Report this rank's error to other ranks and to launch.py, and return its cause.

        Only the first call sends a report. The cause may be another rank's error.
        """
        if self._has_reported_failure:
            return error
        self._has_reported_failure = True
        if self._other_ranks:
            return self._other_ranks.report_failure(error)
        if isinstance(error, Exception):
            report_to_launcher("failed", message=_failure_message(error))
        return error

    def report_hang(self) -> None:
        """Report this process's evidence and request other ranks' evidence before this process exits."""
        if self._other_ranks:
            self._other_ranks.hang_report.publish_report()

    def _note_signal(self, *_: object) -> None:
        """Record a signal. This handler takes no lock, because a second signal may interrupt it."""
        self._is_signalled = True

    def _watch_signals(self, wakeup_read_fd: int, launcher_processes: list[psutil.Process]) -> None:
        """Watch for signals, the launcher's exit and hanging collectives. Signals are detected immediately.

        If no step ends after a signal, this method terminates the process, because the main thread may wait
        forever for a dead process, a disk or a file server.
        """
        stop_detected_at = 0.0
        while True:
            readable_fds, _, _ = select.select([wakeup_read_fd], [], [], POLL_INTERVAL_S)
            # Each byte is a signal's number
            signal_numbers = os.read(wakeup_read_fd, 64) if readable_fds else b""
            stop_signals = [number for number in signal_numbers if number in STOP_SIGNALS]
            if stop_signals:
                self._stop_reason = self._stop_reason or signal.Signals(stop_signals[0]).name
                if not self._is_stop_agreed:
                    report_to_launcher("leaving", why=self._stop_reason)
            elif not all(map(processes.is_alive, launcher_processes)):
                self._stop_reason = self._stop_reason or LAUNCHER_ENDED
                launcher_processes = []  # nothing left to watch
            if self._other_ranks:
                self._other_ranks.start_hang_checks()
            if not self._stop_reason:
                continue
            if not self._waits_for_step:
                os._exit(PREEMPTED_STATUS)
            now_s = time.monotonic()
            stop_detected_at = stop_detected_at or now_s
            step_wait_s = now_s - max(stop_detected_at, self._signal_checked_at)
            if not self._is_stop_agreed and step_wait_s > self._timeout_s:
                self._end_stuck()

    def _end_stuck(self) -> NoReturn:
        """Terminate this process, because its step timed out after a signal."""
        self.report_hang()
        stop_cause = f"the process received {self._stop_reason}"
        if self._stop_reason == LAUNCHER_ENDED:
            stop_cause = "the launcher has exited"
        log.warning(
            f"{stop_cause}, but the current step has not finished within {self._timeout_s:g} s."
            " The process was waiting for data or for another rank."
        )
        os._exit(1)


class _OtherRanks:
    """The job's other ranks, observed through the store and, on the same host, through /proc."""

    def __init__(self, accelerator: Accelerator, timeout_s: float, close_run: CloseRun):
        self.accelerator, self.own_rank = accelerator, accelerator.process_index
        self.timeout_s, self.close_run = timeout_s, close_run
        own_first_rank = self.own_rank - local_rank()  # first rank on this host, which identifies the host
        own_pid_and_start = (os.getpid(), processes.start_ticks(os.getpid()))
        own_identity = [uuid.uuid4().hex, socket.gethostname(), own_first_rank, *own_pid_and_start]
        identity_by_rank = gather_object([own_identity])
        self.local_process_by_rank = {  # PID and start time of each other rank on this host, by rank
            rank: (pid, start_ticks)
            for rank, (_, _, first_rank_on_host, pid, start_ticks) in enumerate(identity_by_rank)
            if first_rank_on_host == own_first_rank
            and processes.is_running(pid, start_ticks)
            and rank != self.own_rank
        }
        job_name, *_ = identity_by_rank[0]  # unique job name, which changes after a restart
        self.failure_key, self.interrupt_key = f"{job_name}/failure", f"{job_name}/interrupt"
        self.exit_key_prefix = f"{job_name}/exit"
        # One channel each for poll_store(), for failures in the main thread, and for the hang report
        self.poll_channel, self.failure_channel, hang_channel = (Channel().clone() for _ in range(3))
        host_by_rank = [host for _, host, *_ in identity_by_rank]
        self.hang_report = HangReport(job_name, self.own_rank, host_by_rank, hang_channel)
        self.exit_lock = threading.RLock()  # acquired by the thread that terminates this process
        self.is_exiting = False
        self.hang_checked_at = 0.0

    def poll_store(self) -> None:
        """Send heartbeats and answer requests from other ranks until the main thread exits.

        This method runs in a daemon thread. If another rank fails, it terminates the process.
        """
        channel, heartbeat_sent_at = self.poll_channel, 0.0
        while not self.is_exiting:
            if time.monotonic() - heartbeat_sent_at > self.timeout_s / HEARTBEATS_PER_TIMEOUT:
                heartbeat_sent_at = time.monotonic()
                self.hang_report.send_heartbeat(channel)
            self.hang_report.answer_request(channel)
            failure_message = channel.read(self.failure_key)
            death_message = "" if failure_message else self.dead_sibling_message(channel)
            if death_message:
                failure_message = channel.store_if_unset(self.failure_key, death_message)
            if failure_message:
                return self.end_after_failure(failure_message)
            time.sleep(POLL_INTERVAL_S)

    def end_after_failure(self, message: str) -> None:
        """Terminate this process after another rank's failure, unless the main thread is already exiting."""
        time.sleep(MAIN_THREAD_GRACE_S)
        if not self.exit_lock.acquire(blocking=False):
            return
        self.is_exiting = True
        # close_run() may wait for a disk or the store
        exit_timer = threading.Timer(CLOSE_TIMEOUT_S, os._exit, (1,))
        exit_timer.daemon = True
        exit_timer.start()
        with contextlib.suppress(Exception):
            self.close_run(message)
        tell_torchrun(message)
        if claim_report(message, self.poll_channel):
            log.warning(f"error: {message}")
        let_main_close_first(self.accelerator, self.poll_channel)
        time.sleep(1 if self.own_rank == 0 else 2)  # a launcher kills all processes as soon as one exits
        sys.stdout.flush()
        report_to_launcher("exit", status=1)
        os._exit(1)

    def dead_sibling_message(self, channel: Channel) -> str | None:
        """Return a message about a process on this host that died without reporting an error, or None."""
        for rank, (pid, start_ticks) in self.local_process_by_rank.items():
            exit_key = f"{self.exit_key_prefix}/{rank}"
            if not processes.is_running(pid, start_ticks) and not channel.read(exit_key):
                return (
                    f"rank {rank} (host {socket.gethostname()}, process {pid}) died without an error message."
                    " The process crashed or was killed, perhaps because the host ran out of memory."
                    " Check the last lines of the process's output, and `dmesg`."
                )
        return None

    def other_ranks_failure(self) -> str | None:
        """Return another rank's failure message if it explains a failed collective, or None."""
        interrupt_message = self.failure_channel.read(self.interrupt_key)
        return interrupt_message or self.dead_sibling_message(self.failure_channel)

    def begin_exit(self) -> None:
        """Reserve the exit for the main thread, and tell other ranks that it is intentional.

        If another thread is already terminating this process, the call never returns.
        """
        self.exit_lock.acquire()  # never released
        if not self.is_exiting:
            self.is_exiting = True
            self.failure_channel.post(f"{self.exit_key_prefix}/{self.own_rank}", True)

    def report_failure(self, error: BaseException) -> BaseException:
        """Report this rank's error to other ranks, and return its cause, which may be another rank's error.

        Only a job's first failure is reported to launch.py. The first failure's message replaces the errors
        that it causes on other ranks, such as a reset connection. Ctrl-C reaches all ranks, and each
        rank exits independently. Ctrl-C is the cause of another rank's error only if SIGINT was sent to a
        single rank.
        """
        rank_location = f"rank {self.own_rank} (host {socket.gethostname()})"
        if not isinstance(error, Exception):
            self.failure_channel.store_if_unset(
                self.interrupt_key, f"{rank_location} was interrupted by SIGINT, so no checkpoint was saved"
            )
            return error
        own_message = _failure_message(error)
        other_failure = None
        is_user_error = isinstance(error, USER_ERROR_TYPES)
        if not is_user_error:
            own_message = f"{rank_location} failed: {own_message}"
            # A dead rank may have caused this error. Its death becomes visible with a delay.
            death_deadline = time.monotonic() + DEATH_DELAY_S
            while not (other_failure := self.other_ranks_failure()) and time.monotonic() < death_deadline:
                time.sleep(0.1)
        first_message = self.failure_channel.store_if_unset(self.failure_key, other_failure or own_message)
        if self.failure_channel.store_error:
            return error  # the store is gone, so the first failure is unknown
        if first_message == own_message:
            report_to_launcher("failed", message=own_message)
        if is_user_error or first_message == own_message:
            return error
        return ValueError(first_message)

    def start_hang_checks(self) -> None:
        """Start threads that check for hanging collectives and end a hanging replay.

        The calling thread does not use the store, which may hang.
        """
        if self.is_exiting:
            return
        now_s = time.monotonic()
        is_check_due = now_s - self.hang_checked_at >= self.timeout_s / HANG_CHECKS_PER_TIMEOUT
        if not self.hang_report.is_report_published and is_check_due:
            self.hang_checked_at = now_s
            start_daemon(self.report_long_wait)
        if now.replay and now.replay.age_s > self.timeout_s + REPLAY_GRACE_S:
            start_daemon(self.end_replay)

    def report_long_wait(self) -> None:
        """Create the hang report if a collective has waited for most of the timeout."""
        waits = [collective for collective in recorded_collectives() if not collective["is_done"]]
        longest_wait_s = max((collective["age_s"] for collective in waits), default=0.0)
        if longest_wait_s > REPORT_AT_FRACTION * self.timeout_s and not self.is_exiting:
            self.hang_report.publish_report()

    def end_replay(self) -> None:
        """Terminate this process because a CUDA graph replay hangs."""
        if replay := now.replay:
            self.end_after_failure(
                f"replay {replay.number} of the step's CUDA graph, at step {now.step},"
                f" has waited for another rank for more than {self.timeout_s:g} s"
            )


def _failure_message(error: Exception) -> str:
    """Return the error's message, preceded by the class name unless the error is one of USER_ERROR_TYPES."""
    error_text = safe_message(error)
    return error_text if isinstance(error, USER_ERROR_TYPES) else f"{type(error).__name__}: {error_text}"


watch = Watch()  # this process's only Watch, which other modules import
