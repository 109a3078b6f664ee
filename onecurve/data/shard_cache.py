"""Local cache of S3 shards. Whole files are prefetched, verified, and evicted when least recently used.

All processes on a host share one cache folder. Each shard has a lock (flock). Readers hold the lock in shared
mode. Fetching or removing a shard requires the lock in exclusive mode. The kernel releases the locks of a
process that dies.
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

DOWNLOADS = 2  # concurrent downloads per process; each download uses separate connections
OTHER_FILES = 1024  # number of files that may be open in addition to the locks
AHEAD = 1000  # maximum number of micro-batches that the prefetcher looks ahead
POLL_S = 0.1  # seconds between attempts to take a lock that another process holds
SILENT_S = 10  # waiting time before a message is shown
NO_ROOM_S = 120  # waiting time for free space before an error is raised


class _Stopped(Exception):
    """Signal that the reader has stopped, so no more shards are needed."""


class ShardCache:
    """Cache of one data set's shards on this host. Thread-safe.

    Args:
        folder: Folder that is used only for this data set.
        url: Location of the shards, s3://bucket/prefix.
        shards: All shards of the data set.
        limit_bytes: Maximum size of the cached shards.

    Raises:
        ValueError: A shard is larger than the cache.
    """

    def __init__(self, folder: Path, url: str, shards: tuple[Shard, ...], limit_bytes: int):
        largest = max(shards, key=lambda shard: shard.bytes)
        if largest.bytes > limit_bytes:
            raise ValueError(
                f"--cache_gib {limit_bytes / 2**30:g} is too small for {largest.file} of {url}, which has"
                f" {largest.bytes / 2**30:.3g} GiB. Increase it, or prepare smaller shards"
            )
        self.folder, self.store, self.limit_bytes = folder, ObjectStore(url), limit_bytes
        self.reserved_bytes = 0  # total size reserved by this process's prefetchers
        self.shards = {shard.file: shard for shard in shards}
        self.locks = folder / "locks"
        self.locks.mkdir(parents=True, exist_ok=True)
        allow_open_files(len(shards) + OTHER_FILES)  # each held lock is an open file

    def path(self, file: str) -> Path:
        return self.folder / quote(file, safe="")  # a key may contain slashes

    @contextmanager
    def reserve(self, kept_bytes: float) -> Iterator[int]:
        """Reserve this process's free share of the cache except kept_bytes. Yield the reserved bytes."""
        size_bytes = int(self.limit_bytes / processes_per_host() - self.reserved_bytes - kept_bytes)
        self.reserved_bytes += size_bytes
        try:
            yield size_bytes
        finally:
            self.reserved_bytes -= size_bytes

    def hold(self, file: str, stop: threading.Event) -> int:
        """Fetch a shard if it is missing, and hold its lock so that no process removes the shard.

        Returns:
            File descriptor of the lock, which the caller passes to `release`.

        Raises:
            ValueError: The shard can't be fetched or stored.
            _Stopped: `stop` was set.
        """
        lock = None
        try:
            lock = self._open_lock(file)
            while True:
                self._lock(lock, fcntl.LOCK_SH, stop)
                if self.path(file).exists():
                    return lock
                self._lock(lock, fcntl.LOCK_EX, stop)
                if not self.path(file).exists():  # another process may have fetched it in the meantime
                    self._fetch(self.shards[file], stop)
        except BaseException as error:
            if lock is not None:
                os.close(lock)
            if not isinstance(error, OSError):
                raise
            advice = "Free disk space, or give a smaller --cache_gib or another --cache_dir"
            if error.errno == errno.EMFILE:
                advice = "Raise the limit (ulimit -Hn), or prepare larger shards"
            raise ValueError(
                f"{file} of {self.store.url} can't be stored in {self.folder}: {error.strerror}. {advice}"
            ) from error

    def release(self, file: str, lock: int) -> None:
        with suppress(OSError):
            os.utime(self.path(file))  # record the time of the last use
        os.close(lock)

    def _open_lock(self, file: str) -> int:
        return os.open(self.locks / self.path(file).name, os.O_RDWR | os.O_CREAT, 0o666)

    def _lock(self, lock: int, operation: int, stop: threading.Event) -> None:
        while not try_lock(lock, operation):
            if stop.wait(POLL_S):
                raise _Stopped

    @contextmanager
    def _if_unused(self, file: str) -> Iterator[bool]:
        """Try to lock a shard exclusively. Yield True if no other process holds its lock."""
        lock = self._open_lock(file)
        try:
            yield try_lock(lock)
        finally:
            os.close(lock)

    def _fetch(self, shard: Shard, stop: threading.Event) -> None:
        """Download and verify a shard under a temporary name, and rename it. The caller holds the lock."""

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
            f"{self.store.url}/{shard.file} does not match its SHA-256 in the manifest after two downloads."
            " Prepare the data again, or upload the shard again"
        )

    def _make_room(self, shard: Shard, part: Path, stop: threading.Event) -> None:
        """Free space for a shard, and reserve it by creating a .part file. The caller holds the lock."""
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
                    " use. Give a larger --cache_gib, or a separate --cache_dir for each job"
                )
            if stop.wait(POLL_S):
                raise _Stopped

    def _remove_until(self, bytes_left: int, excluded: str) -> bool:
        """Remove leftover .part files, then the least recently used shards, until the remaining shards fit.

        Args:
            bytes_left: Maximum total size of the remaining shards.
            excluded: Shard that is neither removed nor included in the total size.

        Returns:
            True if the remaining shards fit.
        """
        used, complete = 0, []
        for entry in os.scandir(self.folder):
            file = unquote(entry.name.removesuffix(".part"))
            if file not in self.shards or file == excluded:
                continue
            if not entry.name.endswith(".part"):
                complete.append((entry.stat().st_mtime_ns, file))
            else:
                with self._if_unused(file) as unused:
                    if unused and not self.path(file).exists():  # otherwise, the .part file was just renamed
                        Path(entry.path).unlink(missing_ok=True)
                        continue
            used += self.shards[file].bytes  # a .part file will grow to this size
        for _, file in sorted(complete):
            if used <= bytes_left:
                break
            with self._if_unused(file) as unused:
                if unused:
                    self.path(file).unlink()
                    used -= self.shards[file].bytes
        return used <= bytes_left


@dataclass
class _HeldShard:
    lock: Future[int]  # result of ShardCache.hold
    uses: int = 0  # number of micro-batches that still need the shard


class ShardPrefetcher:
    """Iterator over a plan that yields each item as soon as all shards of the item are on this host.

    A thread iterates over the plan, looks ahead, and holds the next shards while the total size of all held
    shards is at most budget_bytes. When the reader requests an item, it has finished the item that it
    received in_flight items earlier. A DataLoader requests the next item before it returns a finished batch,
    so decoded batches do not hide the time spent waiting for a shard.

    Args:
        plan: Epoch and sample ids of each micro-batch.
        files_of: Function that returns the shards that contain the given sample ids.
        cache: Cache that stores the shards.
        budget_bytes: Maximum total size of the held shards.
        in_flight: Number of items that the reader uses at once.
    """

    def __init__(
        self,
        plan: Plan,
        files_of: Callable[[np.ndarray], set[str]],
        cache: ShardCache,
        budget_bytes: int,
        in_flight: int,
    ):
        self.plan, self.files_of, self.cache = plan, files_of, cache
        self.budget_bytes, self.in_flight = budget_bytes, in_flight
        self.held: dict[str, _HeldShard] = {}
        self.ahead: deque[tuple[tuple[int, np.ndarray], set[str]]] = deque()  # items not yet yielded
        self.files_in_flight: deque[set[str]] = deque()  # shards of the items that the reader is using
        self.reader_waits = False
        self.ended = False  # True once the thread has ended
        self.error: BaseException | None = None  # exception that ended the thread
        self.stop, self.changed = threading.Event(), threading.Condition()
        self.downloads = ThreadPoolExecutor(DOWNLOADS)
        threading.Thread(target=self._look_ahead, daemon=True).start()

    def __iter__(self) -> Iterator[tuple[int, np.ndarray]]:
        """Yield the items of the plan.

        Raises:
            ValueError: A shard can't be fetched.
            Preempted: The job has only this process, which received a stop signal.
        """
        while True:
            with self.changed:
                if len(self.files_in_flight) == self.in_flight:
                    self._release(self.files_in_flight.popleft())
                self.reader_waits = True
                self.changed.notify_all()
                while not self.ahead and not self.ended:
                    self.changed.wait(0.5)
                    _stop_if_alone()
                self.reader_waits = False
                if not self.ahead:
                    break
                item, files = self.ahead.popleft()
                self.files_in_flight.append(files)
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
        """End the thread and the downloads, and release all shards."""
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
        """Wait for all locks. If taking a lock failed, raise the first exception."""
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
                count = f"{len(missing)} of {len(locks)} shards of {self.cache.store.url}"
                first = next(file for file, lock in locks.items() if lock in missing)
                log.warning(f"waiting for {count}, for example {first}")

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
                            self.held[file] = _HeldShard(
                                self.downloads.submit(self.cache.hold, file, self.stop)
                            )
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
        """Check whether these shards may be held in addition to the shards that are already held.

        The shards must fit into the budget, unless the reader is waiting for them, because a waiting reader
        releases no shards. After `stop` is set, the result is always True.
        """
        if self.stop.is_set() or (self.reader_waits and not self.ahead):
            return True
        total_bytes = sum(self.cache.shards[file].bytes for file in files | self.held.keys())
        return total_bytes <= self.budget_bytes and len(self.ahead) < AHEAD


def _stop_if_alone() -> None:
    """Raise Preempted after a stop signal if this is the job's only process.

    In a larger job, the other processes may be in the middle of a step and would wait for this process
    forever.
    """
    if watch.wanted() and not dist.is_initialized():
        raise Preempted
