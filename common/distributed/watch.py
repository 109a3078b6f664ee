"""Watches a job's ranks: a rank that fails ends all others, and a job that hangs names the awaited rank.

A thread of each rank polls the store, the other processes of its host, and torch's flight recorder, which
records the collectives of gloo and NCCL.

Under gloo a collective fails when one of its processes ends. Under NCCL the others keep waiting: their main
threads block in a synchronisation with the device until torchrun kills them 30 s later. So a failing rank
writes its message into the store, and the others end with it.

When a collective has waited for most of the time-out, the rank asks all ranks for their evidence before the
time-out ends them (NCCL's watchdog aborts a process without a message from Python). A stopped rank does not
answer; nor does the store, if its process is stopped.
"""

import contextlib
import hashlib
import json
import os
import socket
import sys
import tempfile
import threading
import time
import uuid
from collections.abc import Callable
from pathlib import Path

import torch.distributed as dist
from accelerate import Accelerator
from accelerate.utils import gather_object

from common.system.cli import tell_torchrun
from common.system.env import EVENTS_FILE, is_hosts_first, local_rank, report
from common.system.phase import Evidence, collectives, evidence, hang_table, stacks
from common.system.processes import is_running, start_ticks
from common.system.text import printable_lines
from common.system.threads import start_daemon

MISTAKES = (ValueError, FloatingPointError, OSError)  # printed in one line, without a traceback
POLL_S = 0.5
GRACE_S = 1.0  # for the main thread to fail by itself, as it does under gloo
CLOSING_S = 12.0  # for the main process to close its files: a checkpoint may be in flight
ASK_AT = 0.7  # share of the time-out after which a waiting collective is reported
ANSWER_S = 1.0  # for the other ranks to answer
HEARTBEATS = 5  # heartbeats per time-out

_exit_lock = threading.RLock()  # its holder ends this process: the main thread, or the watch
_watch: "_Watch | None" = None


def watch_ranks(accelerator: Accelerator, timeout_s: float) -> None:
    """Starts the watch. Collective."""
    global _watch
    if accelerator.num_processes > 1:
        _watch = _Watch(accelerator, timeout_s)
        threading.Thread(target=_watch.run, daemon=True).start()


def on_failure(close: Callable[[str], None]) -> None:
    """Registers close(message), to be called before this process ends because another rank failed.

    It runs in the watching thread, while the main thread may hang.
    """
    if _watch:
        _watch.close = close


def begin_exit() -> None:
    """Reserves the end of this process for the main thread, so that no other rank's failure ends it.

    Never returns when the watch is already ending the process.
    """
    _exit_lock.acquire()
    if _watch:
        _watch.report_exit()


def report_failure(error: BaseException) -> BaseException:
    """Reports this rank's error to the others, except for Ctrl-C. Returns the error that explains it.

    The first failure of a job counts: an error that follows from it on another rank, such as a reset
    connection, is replaced by its message.
    """
    return _watch.report_failure(error) if _watch and isinstance(error, Exception) else error


def report_hang() -> None:
    """Reports this process's evidence and asks the others for theirs, because this process ends soon."""
    if _watch:
        _watch.report_hang()


def first_to_report(message: str, store: dist.Store | None = None) -> bool:
    """True when no other process has printed this message, as most mistakes occur in all processes.

    store: a connection for this thread alone.
    """
    if not dist.is_initialized():
        return is_hosts_first()
    key = f"said/{hashlib.sha256(message.encode()).hexdigest()}"
    try:
        return (store or dist.distributed_c10d._get_default_store()).add(key, 1) == 1
    except RuntimeError:  # the process that hosts the store is gone
        return True


def let_main_close_first(accelerator: Accelerator, store: dist.Store | None = None) -> None:
    """Waits in a failing job until the main process has closed its files, 10 s at most.

    The main process calls it after closing them, the others before they exit, because a launcher kills all
    processes as soon as one has exited. The main process may hang in a collective. store: a connection for
    this thread alone.
    """
    if not dist.is_initialized():
        return
    with contextlib.suppress(RuntimeError):  # the process that hosts the store is gone
        store = store or dist.distributed_c10d._get_default_store()
        if accelerator.is_main_process:
            store.set("closed", "yes")
        until = time.monotonic() + 10
        while not store.check(["closed"]) and time.monotonic() < until:
            time.sleep(0.05)


class _Watch:
    def __init__(self, accelerator: Accelerator, timeout_s: float):
        self.accelerator, self.rank, self.timeout_s = accelerator, accelerator.process_index, timeout_s
        hosts_first = self.rank - local_rank()
        me = socket.gethostname(), hosts_first, os.getpid(), start_ticks(os.getpid())
        everyones = gather_object([[uuid.uuid4().hex, *me]])
        self.hosts = [host for _, host, *_ in everyones]
        self.siblings = {  # pids and start times of this host's other ranks
            rank: (pid, ticks)
            for rank, (_, _, first, pid, ticks) in enumerate(everyones)
            if first == hosts_first and is_running(pid, ticks) and rank != self.rank
        }
        self.job = everyones[0][0]  # a name that is new after a restart
        self.failure, self.exit = f"{self.job}/failure", f"{self.job}/exit"
        self.hang, self.alive = f"{self.job}/hang", f"{self.job}/alive"
        # Clones, as a connection serves one thread at a time, and the main thread may wait in its own.
        store = dist.distributed_c10d._get_default_store()
        self.store, self.own, self.asking = store.clone(), store.clone(), store.clone()
        self.close: Callable[[str], None] = lambda _: None
        self.lock = threading.Lock()
        self.exiting = self.answered = self.reported = False
        self.evidence: Evidence | None = None
        self.heartbeat_at = self.looked_at = 0.0

    def run(self) -> None:
        """Polls until another rank fails, and then ends this process; or until the main thread ends it."""
        polling = start_daemon(self.poll)  # in a thread, as a store in a stopped process does not answer
        while not self.exiting:
            time.sleep(POLL_S)
            if polling.done():
                # RuntimeError: the process that hosts the store is gone
                message = self.dead_sibling(None) if polling.exception() else polling.result()
                if message:
                    self.end(message)
                    return
                polling = start_daemon(self.poll)
            if not self.reported and not self.exiting and self.is_stuck():
                self.report_hang()

    def poll(self) -> str | None:
        """Sends a heartbeat, answers a rank that asks, returns the message of the first rank that failed."""
        if time.monotonic() - self.heartbeat_at > self.timeout_s / HEARTBEATS:
            self.heartbeat_at = time.monotonic()
            self.store.set(f"{self.alive}/{self.rank}", str(time.time()))
        if not self.answered and self.store.check([self.hang]):
            self.answered = True
            self.store.set(f"{self.hang}/{self.rank}", json.dumps(self.report_evidence()))
        if self.store.check([self.failure]):
            return json.loads(self.store.get(self.failure))
        if dead := self.dead_sibling(self.store):
            return json.loads(self.store.compare_set(self.failure, "", json.dumps(dead)))
        return None

    def end(self, message: str) -> None:
        """Ends this process because another rank failed, unless the main thread does it."""
        time.sleep(GRACE_S)
        if not _exit_lock.acquire(blocking=False):
            return
        timer = threading.Timer(CLOSING_S, os._exit, (1,))  # closing may wait for a disk, or for the store
        timer.daemon = True
        timer.start()
        with contextlib.suppress(Exception):
            self.close(message)
        tell_torchrun(message)
        if first_to_report(message, self.store):
            print(f"error: {message}", file=sys.stderr, flush=True)
        let_main_close_first(self.accelerator, self.store)
        time.sleep(1 if self.rank == 0 else 2)  # a launcher kills all as soon as one has ended
        sys.stdout.flush()
        report("exit", status=1)
        os._exit(1)

    def dead_sibling(self, store: dist.Store | None) -> str | None:
        """A message about a process of this host that died without a message; None if there is none."""
        for rank, (pid, ticks) in self.siblings.items():
            if not is_running(pid, ticks) and not (store and store.check([f"{self.exit}/{rank}"])):
                return (
                    f"rank {rank} (host {socket.gethostname()}, process {pid}) died without a message: it was"
                    " killed, as for want of memory, or crashed; see the end of its output, and `dmesg`"
                )
        return None

    def report_failure(self, error: Exception) -> Exception:
        is_mistake = isinstance(error, MISTAKES)
        mine = printable_lines(error)
        if not is_mistake:
            mine = f"rank {self.rank} (host {socket.gethostname()}) failed: {type(error).__name__}: {mine}"
        with contextlib.suppress(RuntimeError):  # the process that hosts the store is gone
            dead = None if is_mistake else self.dead_sibling_soon()
            first = json.loads(self.own.compare_set(self.failure, "", json.dumps(dead or mine)))
            if not is_mistake and first != mine:
                return ValueError(first)
        return error

    def dead_sibling_soon(self) -> str | None:
        """Polls dead_sibling() for half a second: a dying process's connections close before it has ended."""
        for _ in range(5):
            if dead := self.dead_sibling(self.own):
                return dead
            time.sleep(0.1)
        return None

    def report_exit(self) -> None:
        if not self.exiting:
            self.exiting = True
            with contextlib.suppress(RuntimeError):  # the process that hosts the store is gone
                self.own.set(f"{self.exit}/{self.rank}", "yes")

    def is_stuck(self) -> bool:
        """True if a collective has waited too long. Needs no store, which may hang, too."""
        if time.monotonic() - self.looked_at < self.timeout_s / 40:
            return False
        self.looked_at = time.monotonic()
        ages_s = [c["age_s"] for c in collectives() if not c["is_done"]]
        return max(ages_s, default=0.0) > ASK_AT * self.timeout_s

    def report_hang(self) -> None:
        with self.lock:
            if self.reported:
                return
            self.reported = True
        found = {self.rank: self.report_evidence()}
        asking = start_daemon(lambda: self.ask(found))
        is_first = True
        with contextlib.suppress(TimeoutError, RuntimeError):  # the store does not answer, or is gone
            is_first = asking.result(2 * ANSWER_S)
        report("hang", **found[self.rank])  # again, with the last heartbeats of silent ranks
        if EVENTS_FILE not in os.environ and is_first:
            lines = hang_table(list(found.values()))
            lines.append(f"the stacks of all threads: {self.stacks_folder()}, on each host")
            print("\n".join(lines), file=sys.stderr, flush=True)

    def ask(self, found: dict[int, Evidence]) -> bool:
        """Adds the other ranks' evidence, and the last heartbeats of silent ranks. False if another asked."""
        store, me = self.asking, str(self.rank)
        is_first = store.compare_set(self.hang, "", me) == me.encode()
        until = time.monotonic() + ANSWER_S
        while (missing := set(range(len(self.hosts))) - found.keys()) and time.monotonic() < until:
            for rank in missing:
                if store.check([key := f"{self.hang}/{rank}"]):
                    found[rank] = json.loads(store.get(key))
            time.sleep(0.1)
        for rank in missing:
            if store.check([key := f"{self.alive}/{rank}"]):
                found[self.rank]["silent_s"][rank] = time.time() - float(store.get(key))
        return is_first

    def report_evidence(self) -> Evidence:
        """Reports this process's evidence to launch.py, or its stacks in a file, once. Returns it."""
        with self.lock:
            if self.evidence is None:
                self.evidence, text = evidence(self.rank, self.hosts), stacks()
                report("hang", **self.evidence, stacks=text)
                if EVENTS_FILE not in os.environ:
                    with contextlib.suppress(OSError):
                        self.stacks_folder().mkdir(mode=0o700, exist_ok=True)
                        (self.stacks_folder() / f"rank_{self.rank}.txt").write_text(text)
            return self.evidence

    def stacks_folder(self) -> Path:
        return Path(tempfile.gettempdir()) / f"hang-{self.job[:8]}"
