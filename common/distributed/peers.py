"""Failures of other ranks: each rank learns of them from the store, also while it hangs in a collective.

Under gloo a collective fails when one of its processes ends. Under NCCL the others keep waiting: their main
threads block in a synchronisation with the device until torchrun kills them 30 s later.
"""

import contextlib
import json
import os
import socket
import sys
import threading
import time
import uuid
from collections.abc import Callable

import torch.distributed as dist
from accelerate import Accelerator
from accelerate.utils import gather_object

from common.distributed.agreement import MISTAKES, first_to_say, let_main_close_first
from common.distributed.hangs import stop_watching
from common.system.cli import tell_torchrun
from common.system.env import report
from common.system.processes import is_running, start_ticks
from common.system.text import printable_lines

POLL_S = 0.5
GRACE_S = 1.0  # for the main thread to fail by itself, as it does under gloo
CLOSING_S = 12.0  # for the main process to close its files: a checkpoint may be in flight

_exit_lock = threading.RLock()  # its holder ends this process: the main thread, or the watch
_watch: "_Watch | None" = None


def watch_peers(accelerator: Accelerator) -> None:
    """Starts to watch the other ranks: when one fails, this process ends with its message. Collective.

    A failing rank writes a message into the store. If it dies without one, other ranks of its host notice.
    """
    global _watch
    if accelerator.num_processes == 1:
        return
    hosts_first = accelerator.process_index - accelerator.local_process_index
    me = os.getpid(), start_ticks(os.getpid())
    everyones = gather_object([[uuid.uuid4().hex, hosts_first, *me]])
    siblings = {
        rank: (pid, ticks)
        for rank, (_, first, pid, ticks) in enumerate(everyones)
        if first == hosts_first and is_running(pid, ticks) and rank != accelerator.process_index
    }
    _watch = _Watch(accelerator, everyones[0][0], siblings)
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
    stop_watching()
    if _watch:
        _watch.tell_exit()


def tell_failure(error: BaseException) -> BaseException:
    """Publishes this rank's error to the others, except for Ctrl-C. Returns the error that explains it.

    The first failure of a job counts: an error that follows from it on another rank, such as a reset
    connection, is replaced by its message.
    """
    return _watch.tell(error) if _watch and isinstance(error, Exception) else error


class _Watch:
    """Watches the store and this host's other processes.

    job: a name that is new after a restart. siblings: pids and start times of this host's other ranks.
    """

    def __init__(self, accelerator: Accelerator, job: str, siblings: dict[int, tuple[int, int]]):
        self.accelerator, self.rank = accelerator, accelerator.process_index
        self.siblings, self.exiting = siblings, False
        self.failure, self.exit = f"{job}/failure", f"{job}/exit"
        # Clones, as a connection serves one thread at a time, and the main thread may wait in its own.
        store = dist.distributed_c10d._get_default_store()
        self.store, self.own = store.clone(), store.clone()
        self.close: Callable[[str], None] = lambda _: None

    def run(self) -> None:
        """Polls until another rank fails, and then ends this process; or until the main thread ends it."""
        while (message := self.first_failure()) is None:
            time.sleep(POLL_S)
            if self.exiting:
                return
        time.sleep(GRACE_S)
        if not _exit_lock.acquire(blocking=False):
            return
        end = threading.Timer(CLOSING_S, os._exit, (1,))  # closing may wait for a disk, or for the store
        end.daemon = True
        end.start()
        with contextlib.suppress(Exception):
            self.close(message)
        tell_torchrun(message)
        if first_to_say(message, self.store):
            print(f"error: {message}", file=sys.stderr, flush=True)
        let_main_close_first(self.accelerator, self.store)
        time.sleep(1 if self.rank == 0 else 2)  # a launcher kills all as soon as one has ended
        sys.stdout.flush()
        report("exit", status=1)
        os._exit(1)

    def first_failure(self) -> str | None:
        """The message of the first rank that failed; None while none has failed."""
        try:
            if self.store.check([self.failure]):
                return str(json.loads(self.store.get(self.failure)))
            if dead := self.dead_sibling(self.store):
                self.store.compare_set(self.failure, "", json.dumps(dead))
        except RuntimeError:  # the process that hosts the store is gone
            return self.dead_sibling(None)
        return None

    def dead_sibling(self, store: dist.Store | None) -> str | None:
        """A message about a process of this host that died without a message; None if there is none."""
        for rank, (pid, ticks) in self.siblings.items():
            if not is_running(pid, ticks) and not (store and store.check([f"{self.exit}/{rank}"])):
                return (
                    f"rank {rank} (host {socket.gethostname()}, process {pid}) died without a message: it was"
                    " killed, as for want of memory, or crashed; see the end of its output, and `dmesg`"
                )
        return None

    def tell(self, error: Exception) -> Exception:
        is_mistake = isinstance(error, MISTAKES)
        mine = printable_lines(error)
        if not is_mistake:
            mine = f"rank {self.rank} (host {socket.gethostname()}) failed: {type(error).__name__}: {mine}"
        with contextlib.suppress(RuntimeError):  # the process that hosts the store is gone
            dead = None if is_mistake else self.dead_sibling_soon()
            told = json.loads(self.own.compare_set(self.failure, "", json.dumps(dead or mine)))
            if not is_mistake and told != mine:
                return ValueError(told)
        return error

    def dead_sibling_soon(self) -> str | None:
        """Polls dead_sibling() for half a second: a dying process's connections close before it has ended."""
        for _ in range(5):
            if dead := self.dead_sibling(self.own):
                return dead
            time.sleep(0.1)
        return None

    def tell_exit(self) -> None:
        if self.exiting:
            return
        self.exiting = True
        with contextlib.suppress(RuntimeError):  # the process that hosts the store is gone
            self.own.set(f"{self.exit}/{self.rank}", "yes")
