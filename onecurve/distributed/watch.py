"""Watches a process from its start: signals, its launcher, the other ranks, and collectives that hang.

After SIGTERM, SIGUSR1 or SIGHUP to any process, all processes save together and exit. SIGHUP comes when a
terminal is closed or an ssh connection is lost. A process that was started with SIGHUP ignored, as by nohup,
continues. Launchers forward SIGTERM to their processes; torchrun and accelerate also forward SIGHUP. When a
launcher is killed, the kernel sends SIGTERM to its child processes; in processes further down the watch
notices it within a second.

A rank that fails ends all others. Under gloo a collective fails when one of its processes ends. Under NCCL
the others keep waiting: their main threads block in a synchronisation with the device until torchrun kills
them 30 s later. So a failing rank writes its message into the store, and the others end with it.

When a collective has waited for most of the time-out, the rank asks all ranks for their evidence before the
time-out ends them (NCCL's watchdog aborts a process without a message from Python). A stopped rank does not
answer; nor does the store, if its process is stopped. So other threads ask it, and signals are noticed.

In a replay of a CUDA graph no library watches the collectives. The report then has the step, the replay and
how long it has waited, and the watch itself ends the process after the time-out.
"""

import contextlib
import os
import select
import signal
import socket
import sys
import tempfile
import threading
import time
import uuid
from collections.abc import Callable
from pathlib import Path

import psutil
from accelerate import Accelerator
from accelerate.utils import gather_object

from onecurve.distributed.channel import Channel, first_to_report, let_main_close_first
from onecurve.system import processes
from onecurve.system.cli import tell_torchrun
from onecurve.system.env import EVENTS_FILE, PREEMPTED, launched, local_rank, report
from onecurve.system.phase import Evidence, collectives, evidence, hang_table, now, stacks
from onecurve.system.text import message_text
from onecurve.system.threads import start_daemon

MISTAKES = (ValueError, FloatingPointError, OSError)  # printed in one line, without a traceback
SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP)
LAUNCHER_ENDED = "its launcher has ended"
POLL_S = 0.5
GRACE_S = 1.0  # for the main thread to fail by itself, as it does under gloo
CLOSING_S = 12.0  # for the main process to close its files: a checkpoint may be in flight
ASK_AT = 0.7  # share of the time-out after which a waiting collective is reported
DYING_S = 0.5  # a dying process's connections close before it has ended
ANSWER_S = 1.0  # for the other ranks to answer
HEARTBEATS = 5  # heartbeats per time-out
REPLAY_S = 5.0  # beyond the time-out, until a replay that does not end ends the process

_exit_lock = threading.RLock()  # its holder ends this process: the main thread, or the watch


class Preempted(Exception):
    """All processes have agreed to save and exit."""


class _Stop:
    """What the main thread and the others tell one another about the end of this process."""

    def __init__(self) -> None:
        self.is_ready = False  # False: a signal ends the process at once; True: at the end of the step
        self.is_signalled = False
        self.is_agreed = False  # all processes will stop: no watchdog, as the last save may take long
        self.checked_at = 0.0  # time.monotonic() of the last check for a signal
        self.reason = ""  # the signal, or that the launcher has ended, once the watch has noticed it
        self.timeout_s = 300.0  # without a check for this long after a signal, the process is stuck
        self.ranks: _Ranks | None = None  # in a job of several processes, once it has started
        # Called with a message before another rank's failure ends this process; the main thread may hang
        self.close: Callable[[str], None] = lambda _: None


stop = _Stop()


def watch(timeout_s: float) -> None:
    """Starts the watching thread. A process that is in the same step timeout_s after a signal is ended."""
    stop.timeout_s = timeout_s
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    # The interpreter delays a handler while the main thread is inside torch; the thread reacts at once.
    signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
    for number in SIGNALS:
        if number != signal.SIGHUP or not processes.is_under_nohup():
            signal.signal(number, _note_signal)
    above: list[psutil.Process] = []
    if launched():  # only a launcher's end ends this process, not that of a shell
        processes.end_with_parent()
        stop.reason = LAUNCHER_ENDED if processes.is_orphan() else ""
        above = processes.launchers()
    threading.Thread(target=_watch, args=(reader, above), daemon=True).start()


def watch_ranks(accelerator: Accelerator) -> None:
    """Makes the watch include the other ranks. Collective."""
    if accelerator.num_processes > 1:
        stop.ranks = ranks = _Ranks(accelerator, stop.timeout_s)
        start_daemon(ranks.poll)


def wanted() -> bool:
    """True after a stop signal. Each call also resets the watchdog."""
    stop.checked_at = time.monotonic()
    return stop.is_signalled or bool(stop.reason)


def begin_exit() -> None:
    """Reserves the end of this process for the main thread, so that no other rank's failure ends it.

    Never returns when the watch is already ending the process.
    """
    _exit_lock.acquire()
    if (ranks := stop.ranks) and not ranks.exiting:
        ranks.exiting = True
        ranks.own.post(f"{ranks.exit}/{ranks.rank}", True)


def report_failure(error: BaseException) -> BaseException:
    """Reports this rank's error to the others. Returns the error that explains it.

    The first failure of a job counts: an error that follows from it on another rank, such as a reset
    connection, is replaced by its message. Ctrl-C reaches all ranks, which end by themselves; it explains
    the error of another rank only where SIGINT was sent to one alone.
    """
    if not (ranks := stop.ranks):
        return error
    where = f"rank {ranks.rank} (host {socket.gethostname()})"
    if not isinstance(error, Exception):
        ranks.own.first(ranks.interrupt, f"{where} was interrupted: it received SIGINT, which saves nothing")
        return error
    mine = message_text(error)
    if isinstance(error, MISTAKES):
        ranks.own.first(ranks.failure, mine)
        return error
    mine = f"{where} failed: {type(error).__name__}: {mine}"
    until = time.monotonic() + DYING_S
    while not (cause := ranks.cause_elsewhere()) and time.monotonic() < until:
        time.sleep(0.1)
    first = ranks.own.first(ranks.failure, cause or mine)
    return error if ranks.own.gone or first == mine else ValueError(first)


def report_hang() -> None:
    """Reports this process's evidence and asks the others for theirs, because this process ends soon."""
    if stop.ranks:
        stop.ranks.report_hang()


def _note_signal(*_) -> None:
    """Notes a signal, without a lock, which a second signal may interrupt."""
    stop.is_signalled = True


def _watch(reader: int, above: list[psutil.Process]) -> None:
    """Notices signals at once, the end of a launcher, and hanging collectives; ends this process if no step
    ends after a signal.

    The main thread may wait for ever, for a dead process, a disk or a file server.
    """
    stopped_at = looked_at = 0.0
    while True:
        is_readable = select.select([reader], [], [], POLL_S)[0]
        if numbers := [n for n in (os.read(reader, 64) if is_readable else b"") if n in SIGNALS]:
            stop.reason = stop.reason or signal.Signals(numbers[0]).name
            if not stop.is_agreed:
                report("leaving", why=stop.reason)
        elif not all(map(processes.is_alive, above)):
            stop.reason = stop.reason or LAUNCHER_ENDED
            above = []
        at, ranks = time.monotonic(), stop.ranks
        if ranks and not (ranks.exiting or ranks.reported) and at - looked_at >= stop.timeout_s / 40:
            looked_at = at
            start_daemon(ranks.look_for_hang)
        if ranks and not ranks.exiting and now.replay and now.replay.age_s > stop.timeout_s + REPLAY_S:
            start_daemon(ranks.end_replay)
        if not stop.reason:
            continue
        if not stop.is_ready:
            os._exit(PREEMPTED)
        stopped_at = stopped_at or at
        if not stop.is_agreed and at - max(stopped_at, stop.checked_at) > stop.timeout_s:
            report_hang()
            print(
                f"Received {stop.reason}, but no step finished within {stop.timeout_s:g} s; still waiting"
                " for data or another rank.",
                file=sys.stderr,
                flush=True,
            )
            os._exit(1)


class _Ranks:
    """The job's other ranks, as this one sees them through the store, and on its host through /proc."""

    def __init__(self, accelerator: Accelerator, timeout_s: float):
        self.accelerator, self.rank, self.timeout_s = accelerator, accelerator.process_index, timeout_s
        hosts_first = self.rank - local_rank()
        me = socket.gethostname(), hosts_first, os.getpid(), processes.start_ticks(os.getpid())
        everyones = gather_object([[uuid.uuid4().hex, *me]])
        self.hosts = [host for _, host, *_ in everyones]
        self.siblings = {  # pids and start times of this host's other ranks
            rank: (pid, ticks)
            for rank, (_, _, first, pid, ticks) in enumerate(everyones)
            if first == hosts_first and processes.is_running(pid, ticks) and rank != self.rank
        }
        job = everyones[0][0]  # a name that is new after a restart
        self.failure, self.interrupt, self.exit = f"{job}/failure", f"{job}/interrupt", f"{job}/exit"
        self.hang, self.alive = f"{job}/hang", f"{job}/alive"
        # Of poll(), of the main thread, which may wait in its other one, and of ask().
        self.polling, self.own, self.asking = (Channel().clone() for _ in range(3))
        self.stacks_folder = Path(tempfile.gettempdir()) / f"hang-{job[:8]}"
        self.lock = threading.Lock()
        self.exiting = self.reported = False
        self.evidence: Evidence | None = None

    def poll(self) -> None:
        """Sends heartbeats and answers a rank that asks, until another rank fails, and then ends this
        process; or until the main thread ends it."""
        channel, heartbeat_at, answered = self.polling, 0.0, False
        while not self.exiting:
            if time.monotonic() - heartbeat_at > self.timeout_s / HEARTBEATS:
                heartbeat_at = time.monotonic()
                channel.post(f"{self.alive}/{self.rank}", time.time())
            if not answered and channel.read(self.hang) is not None:
                answered = True
                channel.post(f"{self.hang}/{self.rank}", self.report_evidence())
            message = channel.read(self.failure)
            if not message and (dead := self.dead_sibling(channel)):
                message = channel.first(self.failure, dead)
            if message:
                return self.end(message)
            time.sleep(POLL_S)

    def end(self, message: str) -> None:
        """Ends this process because another rank failed, unless the main thread does it."""
        time.sleep(GRACE_S)
        if not _exit_lock.acquire(blocking=False):
            return
        self.exiting = True
        timer = threading.Timer(CLOSING_S, os._exit, (1,))  # closing may wait for a disk, or for the store
        timer.daemon = True
        timer.start()
        with contextlib.suppress(Exception):
            stop.close(message)
        tell_torchrun(message)
        if first_to_report(message, self.polling):
            print(f"error: {message}", file=sys.stderr, flush=True)
        let_main_close_first(self.accelerator, self.polling)
        time.sleep(1 if self.rank == 0 else 2)  # a launcher kills all as soon as one has ended
        sys.stdout.flush()
        report("exit", status=1)
        os._exit(1)

    def dead_sibling(self, channel: Channel) -> str | None:
        """A message about a process of this host that died without a message; None if there is none."""
        for rank, (pid, ticks) in self.siblings.items():
            if not processes.is_running(pid, ticks) and not channel.read(f"{self.exit}/{rank}"):
                return (
                    f"rank {rank} (host {socket.gethostname()}, process {pid}) died without a message: it was"
                    " killed, as for want of memory, or crashed; see the end of its output, and `dmesg`"
                )
        return None

    def cause_elsewhere(self) -> str | None:
        """Return why a collective of this process may have failed: a message about another rank."""
        return self.own.read(self.interrupt) or self.dead_sibling(self.own)

    def look_for_hang(self) -> None:
        """Reports a collective that has waited too long. Needs no store, which may hang, too."""
        ages_s = [c["age_s"] for c in collectives() if not c["is_done"]]
        if max(ages_s, default=0.0) > ASK_AT * self.timeout_s and not self.exiting:
            self.report_hang()

    def end_replay(self) -> None:
        """Ends this process because a replay does not end."""
        if replay := now.replay:
            self.end(
                f"replay {replay.number} of the step's graph, at step {now.step}, has waited for another rank"
                f" for more than {self.timeout_s:g} s"
            )

    def report_hang(self) -> None:
        with self.lock:
            if self.reported:
                return
            self.reported = True
        found = {self.rank: self.report_evidence()}
        asking = start_daemon(lambda: self.ask(found))
        is_first = True
        with contextlib.suppress(TimeoutError):  # the store does not answer
            is_first = asking.result(2 * ANSWER_S)
        report("hang", **found[self.rank])  # again, with the last heartbeats of silent ranks
        if EVENTS_FILE not in os.environ and is_first:
            lines = hang_table(list(found.values()))
            lines.append(f"the stacks of all threads: {self.stacks_folder}, on each host")
            print("\n".join(lines), file=sys.stderr, flush=True)

    def ask(self, found: dict[int, Evidence]) -> bool:
        """Adds the other ranks' evidence, and the last heartbeats of silent ranks. False if another asked."""
        channel = self.asking
        is_first = channel.first(self.hang, self.rank) == self.rank
        until = time.monotonic() + ANSWER_S
        while (missing := set(range(len(self.hosts))) - found.keys()) and time.monotonic() < until:
            for rank in missing:
                if answer := channel.read(f"{self.hang}/{rank}"):
                    found[rank] = answer
            time.sleep(0.1)
        for rank in missing:
            if alive_at := channel.read(f"{self.alive}/{rank}"):
                found[self.rank]["silent_s"][rank] = time.time() - alive_at
        return is_first

    def report_evidence(self) -> Evidence:
        """Reports this process's evidence to launch.py, or its stacks in a file, once. Returns it."""
        with self.lock:
            if self.evidence is None:
                self.evidence, text = evidence(self.rank, self.hosts), stacks()
                report("hang", **self.evidence, stacks=text)
                if EVENTS_FILE not in os.environ:
                    with contextlib.suppress(OSError):
                        self.stacks_folder.mkdir(mode=0o700, exist_ok=True)
                        (self.stacks_folder / f"rank_{self.rank}.txt").write_text(text)
            return self.evidence
