"""Local cache of S3 shards, which are prefetched, verified, and evicted in least recently used order.

All processes on a host share one cache folder. A file lock (flock) protects each shard. Readers hold a shared
lock, and fetching or removing a shard requires an exclusive lock. If a process dies, the kernel releases its
locks.
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

MAX_DOWNLOADS = 2  # number of concurrent downloads per process; each download uses separate connections
MAX_OTHER_FILES = 1024  # number of files that may be open in addition to lock files
MAX_PREFETCHED_BATCHES = 1000  # maximum number of micro-batches that are prefetched
POLL_S = 0.1  # seconds between attempts to acquire a lock held by another process
MESSAGE_AFTER_S = 10  # seconds to wait before showing a message
ROOM_TIMEOUT_S = 120  # seconds to wait for free space before raising an error


class _Stopped(Exception):
    """Exception for a reader that has stopped and needs no more shards."""


class ShardCache:
    """Thread-safe cache of one data set's shards on this host.

    Args:
        folder: Cache folder, used only for this data set.
        url: S3 location of the shards, s3://bucket/prefix.
        shards: All shards of the data set.
        limit_bytes: Maximum total size of the cached shards in bytes.

    Raises:
        ValueError: If a shard is larger than the cache.
    """

    def __init__(self, folder: Path, url: str, shards: tuple[Shard, ...], limit_bytes: int):
        largest = max(shards, key=lambda shard: shard.bytes)
        if largest.bytes > limit_bytes:
            raise ValueError(
                f"--cache_gib {limit_bytes / 2**30:g} is too small for {largest.file} in {url}, which"
                f" contains {largest.bytes / 2**30:.3g} GiB. Increase --cache_gib, or prepare smaller shards"
            )
        self.folder, self.store, self.limit_bytes = folder, ObjectStore(url), limit_bytes
        self.reserved_bytes = 0  # total number of bytes that this process's prefetchers have reserved
        self.shards = {shard.file: shard for shard in shards}
        self.locks = folder / "locks"
        self.locks.mkdir(parents=True, exist_ok=True)
        allow_open_files(len(shards) + MAX_OTHER_FILES)  # because each held lock is an open file

    def path(self, file: str) -> Path:
        return self.folder / quote(file, safe="")  # because a key may contain slashes

    @contextmanager
    def reserve(self, kept_bytes: float) -> Iterator[int]:
        """Reserve this process's free share of the cache, minus kept_bytes, and yield its size in bytes."""
        size_bytes = int(self.limit_bytes / processes_per_host() - self.reserved_bytes - kept_bytes)
        self.reserved_bytes += size_bytes
        try:
            yield size_bytes
        finally:
            self.reserved_bytes -= size_bytes

    def hold(self, file: str, stop: threading.Event) -> int:
        """Fetch a shard if it is missing, and hold its lock so that no process removes it.

        Returns:
            File descriptor of the lock, which the caller passes to `release`.

        Raises:
            ValueError: If the shard can't be fetched or stored.
            _Stopped: If `stop` is set.
        """
        lock = None
        try:
            lock = self._open_lock(file)
            while True:
                self._wait_for_lock(lock, fcntl.LOCK_SH, stop)
                if self.path(file).exists():
                    return lock
                self._wait_for_lock(lock, fcntl.LOCK_EX, stop)
                if not self.path(file).exists():  # another process may have fetched the shard
                    self._fetch(self.shards[file], stop)
        except BaseException as error:
            if lock is not None:
                os.close(lock)
            if not isinstance(error, OSError):
                raise
            advice = "Free disk space, reduce --cache_gib, or choose a different --cache_dir"
            if error.errno == errno.EMFILE:
                advice = "Raise the limit on open files (ulimit -Hn), or prepare fewer, larger shards"
            raise ValueError(
                f"{file} from {self.store.url} can't be stored in {self.folder}: {error.strerror}. {advice}"
            ) from error

    def release(self, file: str, lock: int) -> None:
        with suppress(OSError):
            os.utime(self.path(file))  # the modification time records the last use
        os.close(lock)

    def _open_lock(self, file: str) -> int:
        return os.open(self.locks / self.path(file).name, os.O_RDWR | os.O_CREAT, 0o666)

    def _wait_for_lock(self, lock: int, operation: int, stop: threading.Event) -> None:
        while not try_lock(lock, operation):
            if stop.wait(POLL_S):
                raise _Stopped

    @contextmanager
    def _lock_if_unused(self, file: str) -> Iterator[bool]:
        """Try to lock a shard exclusively, and yield True unless another process holds the lock."""
        lock = self._open_lock(file)
        try:
            yield try_lock(lock)
        finally:
            os.close(lock)

    def _fetch(self, shard: Shard, stop: threading.Event) -> None:
        """Download a shard, verify its SHA-256, and rename the .part file. The caller must hold the lock."""

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
            f"{self.store.url}/{shard.file} does not match the SHA-256 in the manifest, even after a second"
            " download. Prepare the data again, or upload the shard again"
        )

    def _make_room(self, shard: Shard, part: Path, stop: threading.Event) -> None:
        """Free space for a shard, and reserve it with a .part file. The caller must hold the lock."""
        deadline_s = time.monotonic() + ROOM_TIMEOUT_S
        while True:
            with open(self.locks / ".room", "w") as file:
                fcntl.flock(file, fcntl.LOCK_EX)
                if self._remove_until(self.limit_bytes - shard.bytes, shard.file):
                    part.touch()
                    return
            if time.monotonic() > deadline_s:
                raise ValueError(
                    f"{self.folder} has no space for {shard.file}, because all"
                    f" {self.limit_bytes / 2**30:g} GiB of --cache_gib are in use. Increase --cache_gib, or"
                    " use a separate --cache_dir for each job"
                )
            if stop.wait(POLL_S):
                raise _Stopped

    def _remove_until(self, bytes_left: int, excluded: str) -> bool:
        """Remove leftover .part files, and then the least recently used shards until the remaining shards
        fit.

        Args:
            bytes_left: Maximum total size of the remaining shards in bytes.
            excluded: Shard to be fetched, which is neither removed nor included in the total size.

        Returns:
            True if the remaining shards fit.
        """
        used_bytes, complete_files = 0, []
        for entry in os.scandir(self.folder):
            file = unquote(entry.name.removesuffix(".part"))
            if file not in self.shards or file == excluded:
                continue
            if not entry.name.endswith(".part"):
                complete_files.append((entry.stat().st_mtime_ns, file))
            else:
                with self._lock_if_unused(file) as is_unused:
                    # A complete shard means that the .part file was just renamed
                    if is_unused and not self.path(file).exists():
                        Path(entry.path).unlink(missing_ok=True)
                        continue
            used_bytes += self.shards[file].bytes  # a .part file grows to the size of its shard
        for _, file in sorted(complete_files):
            if used_bytes <= bytes_left:
                break
            with self._lock_if_unused(file) as is_unused:
                if is_unused:
                    self.path(file).unlink()
                    used_bytes -= self.shards[file].bytes
        return used_bytes <= bytes_left


@dataclass
class _ReservedShard:
    lock: Future[int]  # descriptor returned by ShardCache.hold
    pending_uses: int = 0  # number of micro-batches that still need the shard


class ShardPrefetcher:
    """Iterator over a plan that yields each item once all of its shards are on this host.

    A thread iterates over the plan ahead of the reader and holds the next shards, as long as the total size
    of all held shards does not exceed budget_bytes. When the reader requests an item, it has finished the
    item received in_flight items earlier. A DataLoader requests the next item before returning a finished
    batch, so decoded batches do not hide the time spent waiting for a shard.

    Args:
        plan: Epoch and sample ids of each micro-batch.
        files_of: Function that maps sample ids to the names of the shards that contain them.
        cache: Local cache that stores the shards.
        budget_bytes: Maximum total size of the held shards in bytes.
        in_flight: Number of items that the reader processes at the same time.
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
        self.reserved: dict[str, _ReservedShard] = {}
        # Prefetched items, not yet yielded
        self.prefetched: deque[tuple[tuple[int, np.ndarray], set[str]]] = deque()
        self.files_in_flight: deque[set[str]] = deque()  # shards of the items that the reader is processing
        self.is_reader_waiting = False
        self.has_ended = False  # True once the thread has ended
        self.thread_error: BaseException | None = None  # exception that ended the thread
        self.stop_event, self.condition = threading.Event(), threading.Condition()
        self.download_pool = ThreadPoolExecutor(MAX_DOWNLOADS)
        threading.Thread(target=self._look_ahead, daemon=True).start()

    def __iter__(self) -> Iterator[tuple[int, np.ndarray]]:
        """Yield the items of the plan in order.

        Raises:
            ValueError: If a shard can't be fetched.
            Preempted: If this process received a stop signal and is the job's only process.
        """
        while True:
            with self.condition:
                if len(self.files_in_flight) == self.in_flight:
                    self._release(self.files_in_flight.popleft())
                self.is_reader_waiting = True
                self.condition.notify_all()
                while not self.prefetched and not self.has_ended:
                    self.condition.wait(0.5)
                    _stop_if_alone()
                self.is_reader_waiting = False
                if not self.prefetched:
                    break
                item, files = self.prefetched.popleft()
                self.files_in_flight.append(files)
                locks = {file: self.reserved[file].lock for file in files}
            self._wait_for_shards(locks)
            yield item
        if self.thread_error:
            raise self.thread_error

    def _release(self, files: set[str]) -> None:
        for file in files:
            reserved_shard = self.reserved[file]
            reserved_shard.pending_uses -= 1
            if not reserved_shard.pending_uses:
                del self.reserved[file]
                self.cache.release(file, reserved_shard.lock.result())

    def close(self) -> None:
        """Stop the thread and the downloads, and release all shards."""
        self.stop_event.set()
        with self.condition:
            self.condition.notify_all()
            for file, reserved_shard in self.reserved.items():
                reserved_shard.lock.cancel()
                reserved_shard.lock.add_done_callback(partial(self._release_late, file))
            self.reserved.clear()
        self.download_pool.shutdown(wait=False)

    def _release_late(self, file: str, lock: Future[int]) -> None:
        if not lock.cancelled() and not lock.exception():
            self.cache.release(file, lock.result())

    def _wait_for_shards(self, locks: dict[str, Future[int]]) -> None:
        """Wait until all shards are held, or raise the exception of the first shard that can't be held."""
        next_message_s = time.monotonic() + MESSAGE_AFTER_S
        while True:
            done, missing = wait(locks.values(), timeout=0.5, return_when=FIRST_EXCEPTION)
            for lock in done:
                lock.result()
            if not missing:
                return
            _stop_if_alone()
            if time.monotonic() > next_message_s:
                next_message_s = time.monotonic() + 3 * MESSAGE_AFTER_S
                missing_shards = f"{len(missing)} of {len(locks)} shards from {self.cache.store.url}"
                first = next(file for file, lock in locks.items() if lock in missing)
                log.warning(f"waiting for {missing_shards}, for example {first}")

    def _look_ahead(self) -> None:
        try:
            for item in self.plan:
                files = self.files_of(item[1])
                with self.condition:
                    self.condition.wait_for(partial(self._may_hold, files))
                    if self.stop_event.is_set():
                        return
                    for file in sorted(files):
                        if file not in self.reserved:
                            self.reserved[file] = _ReservedShard(
                                self.download_pool.submit(self.cache.hold, file, self.stop_event)
                            )
                        self.reserved[file].pending_uses += 1
                    self.prefetched.append((item, files))
                    self.condition.notify_all()
        except BaseException as error:
            self.thread_error = error
        finally:
            with self.condition:
                self.has_ended = True
                self.condition.notify_all()

    def _may_hold(self, files: set[str]) -> bool:
        """Return True if these shards may be held in addition to those already held.

        The shards must fit into the budget unless the reader is waiting for them, because a waiting reader
        releases no shards. After `stop` is set, the result is always True.
        """
        if self.stop_event.is_set() or (self.is_reader_waiting and not self.prefetched):
            return True
        total_bytes = sum(self.cache.shards[file].bytes for file in files | self.reserved.keys())
        return total_bytes <= self.budget_bytes and len(self.prefetched) < MAX_PREFETCHED_BATCHES


def _stop_if_alone() -> None:
    """Raise Preempted after a stop signal if this is the job's only process.

    In a larger job, the other processes may be in the middle of a step and would wait forever for this
    process.
    """
    if watch.wanted() and not dist.is_initialized():
        raise Preempted
