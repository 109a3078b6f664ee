"""Shards from S3 on the disk of a host: prefetched whole, checked, the least recently used removed.

All processes of a host share the folder. Each shard has a lock, a flock: shared by processes that read the
shard, exclusive to fetch or remove it. The kernel releases the locks of a process that dies.
"""

import errno
import fcntl
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from urllib.parse import quote, unquote

import numpy as np
import torch.distributed as dist

from onecurve.data.shards import Shard
from onecurve.distributed.watch import Preempted, watch
from onecurve.numerics.order import Plan
from onecurve.system.env import processes_per_host
from onecurve.system.files import allow_open_files, sha256_of, sync, try_lock
from onecurve.system.output import log
from onecurve.system.s3 import ObjectStore

DOWNLOADS = 2  # at a time in one process; each has its own connections
OTHER_FILES = 1024  # open beside the locks
AHEAD = 1000  # the most micro-batches to look ahead
POLL_S = 0.1  # between two attempts at a lock that another process holds
SILENT_S = 10  # of waiting, before a message
NO_ROOM_S = 120  # of waiting for space, before an error


class _Stopped(Exception):
    """The reader has stopped and needs no more shards."""


class ShardCache:
    """The shards of one data set on this host, at most limit_bytes of them. Thread-safe."""

    def __init__(self, folder: Path, url: str, shards: tuple[Shard, ...], limit_bytes: int):
        """folder: for this data set alone. Raises ValueError if a shard is larger than the cache."""
        largest = max(shards, key=lambda shard: shard.bytes)
        if largest.bytes > limit_bytes:
            raise ValueError(
                f"--cache_gib {limit_bytes / 2**30:g} has no room for {largest.file} of {url}, which has"
                f" {largest.bytes / 2**30:.3g} GiB: give more, or prepare smaller shards"
            )
        self.folder, self.store, self.limit_bytes = folder, ObjectStore(url), limit_bytes
        self.reserved_bytes = 0  # by the prefetchers of this process
        self.shards = {shard.file: shard for shard in shards}
        self.locks = folder / "locks"
        self.locks.mkdir(parents=True, exist_ok=True)
        allow_open_files(len(shards) + OTHER_FILES)  # each held lock is an open file

    def path(self, file: str) -> Path:
        return self.folder / quote(file, safe="")  # a key may have folders

    @contextmanager
    def reserve(self, kept_bytes: float) -> Iterator[int]:
        """Reserves this process's unreserved share of the cache, less kept_bytes; yields its bytes."""
        size_bytes = int(self.limit_bytes / processes_per_host() - self.reserved_bytes - kept_bytes)
        self.reserved_bytes += size_bytes
        try:
            yield size_bytes
        finally:
            self.reserved_bytes -= size_bytes

    def hold(self, file: str, stop: threading.Event) -> int:
        """Fetches the shard if it is missing, and holds its lock. Returns the lock for release: until then no
        process removes the shard.

        Raises ValueError when it can't be fetched or stored, _Stopped after `stop`.
        """
        lock = None
        try:
            lock = self._open_lock(file)
            while True:
                self._lock(lock, fcntl.LOCK_SH, stop)
                if self.path(file).exists():
                    return lock
                self._lock(lock, fcntl.LOCK_EX, stop)
                if not self.path(file).exists():  # another process may have fetched it while we waited
                    self._fetch(self.shards[file], stop)
        except BaseException as error:
            if lock is not None:
                os.close(lock)
            if not isinstance(error, OSError):
                raise
            advice = "Make room there, or give a smaller --cache_gib or another --cache_dir"
            if error.errno == errno.EMFILE:
                advice = "Allow more (ulimit -Hn), or prepare larger shards"
            raise ValueError(
                f"{file} of {self.store.url} can't be stored in {self.folder}: {error.strerror}. {advice}"
            ) from error

    def release(self, file: str, lock: int) -> None:
        with suppress(OSError):
            os.utime(self.path(file))  # when it was last used
        os.close(lock)

    def _open_lock(self, file: str) -> int:
        return os.open(self.locks / self.path(file).name, os.O_RDWR | os.O_CREAT, 0o666)

    def _lock(self, lock: int, kind: int, stop: threading.Event) -> None:
        while not try_lock(lock, kind):
            if stop.wait(POLL_S):
                raise _Stopped

    @contextmanager
    def _if_unused(self, file: str) -> Iterator[bool]:
        """Tries to lock a shard for this process; yields True if no other process holds its lock."""
        lock = self._open_lock(file)
        try:
            yield try_lock(lock)
        finally:
            os.close(lock)

    def _fetch(self, shard: Shard, stop: threading.Event) -> None:
        """Downloads a shard, whose lock we hold, under another name, until it is complete and checked."""

        def beat() -> None:
            if stop.is_set():
                raise _Stopped

        part = self.path(shard.file).with_name(f"{self.path(shard.file).name}.part")
        for _ in range(2):
            self._make_room(shard, part, stop)
            self.store.download(shard.file, part, shard.bytes, beat)
            if sha256_of(part) == shard.sha256:
                sync(part)
                part.rename(self.path(shard.file))
                return
            part.unlink()
        raise ValueError(
            f"{self.store.url}/{shard.file} differs from the manifest (SHA-256), fetched twice:"
            " prepare again, or upload it again"
        )

    def _make_room(self, shard: Shard, part: Path, stop: threading.Event) -> None:
        """Makes space for a shard, whose lock we hold, and reserves it by creating its part."""
        end_s = time.monotonic() + NO_ROOM_S
        while True:
            with open(self.locks / ".room", "w") as file:
                fcntl.flock(file, fcntl.LOCK_EX)
                if self._remove_until(self.limit_bytes - shard.bytes, shard.file):
                    part.touch()
                    return
            if time.monotonic() > end_s:
                raise ValueError(
                    f"no room for {shard.file} in {self.folder}: all {self.limit_bytes / 2**30:g} GiB are in"
                    " use. Give a larger --cache_gib, or each job its own --cache_dir"
                )
            if stop.wait(POLL_S):
                raise _Stopped

    def _remove_until(self, bytes_left: int, but: str) -> bool:
        """Removes parts that a dead process left, and unused shards, least recently used first, until all
        shards but one have at most bytes_left. Returns True if that was possible."""
        used, complete = 0, []
        for entry in os.scandir(self.folder):
            file = unquote(entry.name.removesuffix(".part"))
            if file not in self.shards or file == but:
                continue
            if not entry.name.endswith(".part"):
                complete.append((entry.stat().st_mtime_ns, file))
            else:
                with self._if_unused(file) as unused:
                    if unused and not self.path(file).exists():  # else it was just renamed
                        Path(entry.path).unlink(missing_ok=True)
                        continue
            used += self.shards[file].bytes  # a part will become as large
        for _, file in sorted(complete):
            if used <= bytes_left:
                break
            with self._if_unused(file) as unused:
                if unused:
                    self.path(file).unlink()
                    used -= self.shards[file].bytes
        return used <= bytes_left


@dataclass
class _Held:
    lock: Future[int]  # ShardCache.hold's
    uses: int = 0  # by micro-batches that are not done


class ShardPrefetcher:
    """Iterates over a plan and yields each item once all shards that it needs are on this host.

    A thread, which alone iterates the plan, looks ahead and holds the next shards as long as held shards have
    at most budget_bytes. A reader that asks for the next item is done with the one it got in_flight items
    before. A DataLoader asks before it returns a batch that is ready: decoded batches do not hide the wait
    for a shard.
    """

    def __init__(
        self,
        plan: Plan,
        files_of: Callable[[np.ndarray], set[str]],
        cache: ShardCache,
        budget_bytes: int,
        in_flight: int,
    ):
        """files_of(ids): the shards of these samples."""
        self.plan, self.files_of, self.cache = plan, files_of, cache
        self.budget_bytes, self.in_flight = budget_bytes, in_flight
        self.held: dict[str, _Held] = {}
        self.ahead: deque[tuple[tuple[int, np.ndarray], set[str]]] = deque()  # not yet yielded
        self.given: deque[set[str]] = deque()  # shards of the items in flight
        self.asked = False  # the reader waits for an item
        self.ended = False  # the thread's end, and its error
        self.error: BaseException | None = None
        self.stop, self.changed = threading.Event(), threading.Condition()
        self.downloads = ThreadPoolExecutor(DOWNLOADS)
        threading.Thread(target=self._look_ahead, daemon=True).start()

    def __iter__(self) -> Iterator[tuple[int, np.ndarray]]:
        """Raises ValueError when a shard can't be fetched, Preempted when a single process gets a stop
        signal."""
        while True:
            with self.changed:
                if len(self.given) == self.in_flight:
                    self._release(self.given.popleft())
                self.asked = True
                self.changed.notify_all()
                while not self.ahead and not self.ended:
                    self.changed.wait(0.5)
                    _stop_if_alone()
                self.asked = False
                if not self.ahead:
                    break
                item, files = self.ahead.popleft()
                self.given.append(files)
                locks = {file: self.held[file].lock for file in files}
            self._wait(locks)
            yield item
        if self.error:
            raise self.error

    def _release(self, files: set[str]) -> None:
        for file in files:
            held = self.held[file]
            held.uses -= 1
            if not held.uses:
                del self.held[file]
                self.cache.release(file, held.lock.result())

    def close(self) -> None:
        """Ends the thread and the downloads, and releases all shards."""
        self.stop.set()
        with self.changed:
            self.changed.notify_all()
            for file, held in self.held.items():
                held.lock.cancel()
                held.lock.add_done_callback(partial(self._release_late, file))
            self.held.clear()
        self.downloads.shutdown(wait=False)

    def _release_late(self, file: str, lock: Future[int]) -> None:
        if not lock.cancelled() and not lock.exception():
            self.cache.release(file, lock.result())

    def _wait(self, locks: dict[str, Future[int]]) -> None:
        """Waits for all locks. Raises the exception of any that failed."""
        print_s = time.monotonic() + SILENT_S
        while True:
            done, missing = wait(locks.values(), timeout=0.5, return_when=FIRST_EXCEPTION)
            for lock in done:
                lock.result()
            if not missing:
                return
            _stop_if_alone()
            if time.monotonic() > print_s:
                print_s = time.monotonic() + 3 * SILENT_S
                message = f"waiting for {len(missing)} of {len(locks)} shards of {self.cache.store.url}, as"
                first = next(file for file, lock in locks.items() if lock in missing)
                log.warning(f"{message} {first}")

    def _look_ahead(self) -> None:
        try:
            for item in self.plan:
                files = self.files_of(item[1])
                with self.changed:
                    self.changed.wait_for(partial(self._may_hold, files))
                    if self.stop.is_set():
                        return
                    for file in sorted(files):
                        if file not in self.held:
                            self.held[file] = _Held(self.downloads.submit(self.cache.hold, file, self.stop))
                        self.held[file].uses += 1
                    self.ahead.append((item, files))
                    self.changed.notify_all()
        except BaseException as error:
            self.error = error
        finally:
            with self.changed:
                self.ended = True
                self.changed.notify_all()

    def _may_hold(self, files: set[str]) -> bool:
        """True if these shards can be held, too: within the budget, or because the reader waits for them and
        releases nothing before it has them. Also true at the end."""
        if self.stop.is_set() or (self.asked and not self.ahead):
            return True
        together = sum(self.cache.shards[file].bytes for file in files | self.held.keys())
        return together <= self.budget_bytes and len(self.ahead) < AHEAD


def _stop_if_alone() -> None:
    """Raises Preempted after a stop signal, if this process is the only one. Other processes would be in the
    middle of a step and wait for this one for ever."""
    if watch.wanted() and not dist.is_initialized():
        raise Preempted
