"""Watch of a process, which notices signals, the launcher's end, failed ranks and hanging collectives.

After any process receives SIGTERM, SIGUSR1 or SIGHUP, all processes save together and exit. SIGHUP arrives
when a terminal closes or an ssh connection drops. A process that was started with SIGHUP ignored, for example
by nohup, continues. Launchers forward SIGTERM to their processes. torchrun and accelerate also forward
SIGHUP. When a launcher is killed, the kernel sends SIGTERM to the launcher's child processes. In indirect
descendants, the watch notices the launcher's end within a second.

The failure of one rank ends all other ranks. Under gloo, a collective fails when a participating process
ends. Under NCCL, other ranks continue to wait, because their main threads block in a device synchronisation
until torchrun kills the processes 30 s later. Therefore, a failing rank writes its error message to the
store, and the other ranks exit with this message.

The store does not answer while its process is suspended. Separate threads query the store, so the watch
always notices signals. The watch also reports collectives that wait too long (onecurve/distributed/hang.py).

No library monitors collectives inside a CUDA graph. If a replay of a graph hangs, the report contains the
step, the number of the replay and the waiting time, and the watch ends the process after the timeout.

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
from onecurve.distributed.hang import HangReport, collectives
from onecurve.system import processes
from onecurve.system.cli import tell_torchrun
from onecurve.system.env import PREEMPTED, launched, local_rank, report
from onecurve.system.output import log
from onecurve.system.phase import now
from onecurve.system.text import message_text
from onecurve.system.threads import start_daemon

MISTAKES = (ValueError, FloatingPointError, OSError)  # printed in one line, without a traceback
SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP)
LAUNCHER_ENDED = "its launcher has ended"
POLL_S = 0.5
GRACE_S = 1.0  # seconds for the main thread to fail first, which it does under gloo
CLOSING_S = 12.0  # seconds for the main process to close its files and finish a checkpoint
ASK_AT = 0.7  # fraction of the timeout after which the watch reports a waiting collective
DYING_S = 0.5  # seconds between the closing of a dying process's connections and the end of the process
HEARTBEATS = 5  # number of heartbeats per timeout
REPLAY_S = 5.0  # seconds after the timeout until the watch ends a process with a stuck replay

Close = Callable[[str], None]  # closes the run's files and records the error message of a failure


class Preempted(Exception):
    """Signal that all processes have agreed to save and exit."""


class Watch:
    """Watch of this process. A separate thread ends the process if the main thread can't.

    The main thread calls ready() when signals may wait for the end of a step, wanted() after each step, and
    agreed() when all processes stop.
    """

    def __init__(self) -> None:
        self._timeout_s = 300.0
        self._is_ready = False  # if False, a signal ends the process at once; if True, after the current step
        self._is_signalled = False
        self._is_agreed = False
        self._checked_at = 0.0  # time.monotonic() of the last check for a signal
        self._reason = ""  # name of the noticed signal, or LAUNCHER_ENDED
        self._ranks: _Ranks | None = None  # set after the start of a job with several processes
        self._close: Close = lambda _: None
        self._has_failed = False

    @property
    def timeout_s(self) -> float:
        """Number of seconds without progress after which a process counts as stuck (--timeout_s)."""
        return self._timeout_s

    def start(self, timeout_s: float) -> None:
        """Start the thread. It ends the process if the current step is not over timeout_s after a signal."""
        self._timeout_s = timeout_s
        reader, writer = os.pipe()
        os.set_blocking(writer, False)
        # The interpreter delays signal handlers while the main thread is inside torch. The wakeup file
        # descriptor lets the thread react at once.
        signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
        for number in SIGNALS:
            if number != signal.SIGHUP or not processes.is_under_nohup():
                signal.signal(number, self._note_signal)
        above: list[psutil.Process] = []
        if launched():  # this process ends with its launcher, but not with a shell
            processes.end_with_parent()
            self._reason = LAUNCHER_ENDED if processes.is_orphan() else ""
            above = processes.launchers()
        threading.Thread(target=self._run, args=(reader, above), daemon=True).start()

    def ready(self, accelerator: Accelerator) -> None:
        """From now on, let signals wait for the end of a step, and watch other ranks. Collective."""
        self._is_ready = True
        if accelerator.num_processes > 1:
            self._ranks = _Ranks(accelerator, self._timeout_s, lambda message: self._close(message))
            start_daemon(self._ranks.poll)

    def wanted(self) -> bool:
        """Return True if the process must stop. Each call also records that a step has ended."""
        self._checked_at = time.monotonic()
        return self._is_signalled or bool(self._reason)

    def agreed(self) -> str:
        """Remove the time limit for the exit, because the last save may take long. All processes have agreed.

        Returns:
            The reason why this process must stop, or "" if only another process received a signal.
        """
        self._is_agreed = True
        return self._reason

    def on_failure(self, close: Close) -> None:
        """Set the function that receives the message when another rank's failure ends this process."""
        self._close = close

    def begin_exit(self) -> None:
        """Reserve the exit for the main thread, so that another rank's failure can't end this process.

        This call never returns if the watch is already ending the process.
        """
        if self._ranks:
            self._ranks.begin_exit()

    def report_failure(self, error: BaseException) -> BaseException:
        """Report this rank's error to other ranks and to launch.py. Return the error's cause.

        Only the first call sends a report. The cause may be another rank's error.
        """
        if self._has_failed:
            return error
        self._has_failed = True
        if self._ranks:
            return self._ranks.report_failure(error)
        if isinstance(error, Exception):
            report("failed", message=_described(error))
        return error

    def report_hang(self) -> None:
        """Report this process's evidence and request other ranks' evidence before this process ends."""
        if self._ranks:
            self._ranks.hang.make()

    def _note_signal(self, *_: object) -> None:
        """Record a signal. This handler uses no lock, because a second signal may interrupt it."""
        self._is_signalled = True

    def _run(self, reader: int, above: list[psutil.Process]) -> None:
        """Watch for signals, the launcher's end and hanging collectives. Signals are noticed immediately.

        This method ends the process if no step ends after a signal, because the main thread may wait forever
        for a dead process, a disk or a file server.
        """
        stopped_at = 0.0
        while True:
            is_readable = select.select([reader], [], [], POLL_S)[0]
            if numbers := [n for n in (os.read(reader, 64) if is_readable else b"") if n in SIGNALS]:
                self._reason = self._reason or signal.Signals(numbers[0]).name
                if not self._is_agreed:
                    report("leaving", why=self._reason)
            elif not all(map(processes.is_alive, above)):
                self._reason = self._reason or LAUNCHER_ENDED
                above = []
            if self._ranks:
                self._ranks.look_for_hang()
            if not self._reason:
                continue
            if not self._is_ready:
                os._exit(PREEMPTED)
            at = time.monotonic()
            stopped_at = stopped_at or at
            if not self._is_agreed and at - max(stopped_at, self._checked_at) > self._timeout_s:
                self._end_stuck()

    def _end_stuck(self) -> NoReturn:
        """End this process, because its step has not ended within the timeout after a signal."""
        self.report_hang()
        has_no_launcher = self._reason == LAUNCHER_ENDED
        cause = "The launcher has ended" if has_no_launcher else f"Received {self._reason}"
        log.warning(
            f"{cause}, but no step finished within {self._timeout_s:g} s; still waiting for"
            " data or another rank."
        )
        os._exit(1)


class _Ranks:
    """Other ranks of the job, which are observed through the store and, on the same host, through /proc."""

    def __init__(self, accelerator: Accelerator, timeout_s: float, close: Close):
        self.accelerator, self.rank, self.timeout_s = accelerator, accelerator.process_index, timeout_s
        self.close = close
        hosts_first = self.rank - local_rank()
        identity = socket.gethostname(), hosts_first, os.getpid(), processes.start_ticks(os.getpid())
        identities = gather_object([[uuid.uuid4().hex, *identity]])
        self.siblings = {  # pid and start time of each other rank on this host
            rank: (pid, ticks)
            for rank, (_, _, first, pid, ticks) in enumerate(identities)
            if first == hosts_first and processes.is_running(pid, ticks) and rank != self.rank
        }
        job = identities[0][0]  # unique name, which changes after a restart
        self.failure, self.interrupt, self.exit = f"{job}/failure", f"{job}/interrupt", f"{job}/exit"
        # One channel each for poll(), for failures in the main thread, and for the hang report
        self.polling, self.failing, asking = (Channel().clone() for _ in range(3))
        self.hang = HangReport(job, self.rank, [host for _, host, *_ in identities], asking)
        self.ending = threading.RLock()  # lock held by the thread that ends this process
        self.exiting = False
        self.looked_at = 0.0

    def poll(self) -> None:
        """Send heartbeats and answer requests from other ranks until the main thread ends this process.

        This method ends the process if another rank fails.
        """
        channel, heartbeat_at = self.polling, 0.0
        while not self.exiting:
            if time.monotonic() - heartbeat_at > self.timeout_s / HEARTBEATS:
                heartbeat_at = time.monotonic()
                self.hang.beat(channel)
            self.hang.answer(channel)
            message = channel.read(self.failure)
            if not message and (dead := self.dead_sibling(channel)):
                message = channel.first(self.failure, dead)
            if message:
                return self.end(message)
            time.sleep(POLL_S)

    def end(self, message: str) -> None:
        """End this process because another rank failed, unless the main thread is already doing so."""
        time.sleep(GRACE_S)
        if not self.ending.acquire(blocking=False):
            return
        self.exiting = True
        timer = threading.Timer(CLOSING_S, os._exit, (1,))  # in case close() waits for a disk or the store
        timer.daemon = True
        timer.start()
        with contextlib.suppress(Exception):
            self.close(message)
        tell_torchrun(message)
        if first_to_report(message, self.polling):
            log.warning(f"error: {message}")
        let_main_close_first(self.accelerator, self.polling)
        time.sleep(1 if self.rank == 0 else 2)  # a launcher kills all processes as soon as one exits
        sys.stdout.flush()
        report("exit", status=1)
        os._exit(1)

    def dead_sibling(self, channel: Channel) -> str | None:
        """Return a message about a process on this host that died without a report, or None."""
        for rank, (pid, ticks) in self.siblings.items():
            if not processes.is_running(pid, ticks) and not channel.read(f"{self.exit}/{rank}"):
                return (
                    f"rank {rank} (host {socket.gethostname()}, process {pid}) died without a message: it was"
                    " killed (perhaps by lack of memory) or crashed. See the end of its output, and `dmesg`."
                )
        return None

    def cause_elsewhere(self) -> str | None:
        """Return a message about another rank's failure that explains a failed collective, or None."""
        return self.failing.read(self.interrupt) or self.dead_sibling(self.failing)

    def begin_exit(self) -> None:
        """Let the main thread end this process, and tell other ranks that the exit is intentional."""
        self.ending.acquire()
        if not self.exiting:
            self.exiting = True
            self.failing.post(f"{self.exit}/{self.rank}", True)

    def report_failure(self, error: BaseException) -> BaseException:
        """Report this rank's error to other ranks. Return its cause, which may be another rank's error.

        Only the first failure of a job is reported to launch.py. The message of this failure replaces
        consequential errors on other ranks, such as a reset connection. Ctrl-C reaches all ranks, and each
        rank ends independently. Ctrl-C is the cause of another rank's error only if SIGINT was sent to a
        single rank.
        """
        where = f"rank {self.rank} (host {socket.gethostname()})"
        if not isinstance(error, Exception):
            self.failing.first(
                self.interrupt, f"{where} was interrupted: it received SIGINT, which saves nothing"
            )
            return error
        message, cause = _described(error), None
        is_mistake = isinstance(error, MISTAKES)
        if not is_mistake:
            message = f"{where} failed: {message}"
            deadline = time.monotonic() + DYING_S
            while not (cause := self.cause_elsewhere()) and time.monotonic() < deadline:
                time.sleep(0.1)
        first = self.failing.first(self.failure, cause or message)
        if self.failing.gone:
            return error
        if first == message:
            report("failed", message=message)
        return error if is_mistake or first == message else ValueError(first)

    def look_for_hang(self) -> None:
        """Look for collectives and replays that wait too long, without using the store, which may hang."""
        if self.exiting:
            return
        at = time.monotonic()
        if not self.hang.is_made and at - self.looked_at >= self.timeout_s / 40:
            self.looked_at = at
            start_daemon(self.report_long_wait)
        if now.replay and now.replay.age_s > self.timeout_s + REPLAY_S:
            start_daemon(self.end_replay)

    def report_long_wait(self) -> None:
        """Create the hang report if a collective has waited for most of the timeout."""
        ages_s = [c["age_s"] for c in collectives() if not c["is_done"]]
        if max(ages_s, default=0.0) > ASK_AT * self.timeout_s and not self.exiting:
            self.hang.make()

    def end_replay(self) -> None:
        """End this process because a graph replay does not end."""
        if replay := now.replay:
            self.end(
                f"replay {replay.number} of the step's graph, at step {now.step}, has waited for another rank"
                f" for more than {self.timeout_s:g} s"
            )


def _described(error: Exception) -> str:
    """Return the error's message, preceded by the class name unless the error is one of MISTAKES."""
    text = message_text(error)
    return text if isinstance(error, MISTAKES) else f"{type(error).__name__}: {text}"


watch = Watch()
