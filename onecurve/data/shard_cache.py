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
from typing import NamedTuple
from urllib.parse import quote, unquote

import numpy as np
import torch.distributed as dist

from onecurve.data.shards import Shard
from onecurve.distributed.watch import Preempted, watch
from onecurve.numerics.order import Plan, PlanItem
from onecurve.system.env import processes_per_host
from onecurve.system.files import allow_open_files, sha256_of, sync, try_lock
from onecurve.system.output import log
from onecurve.system.s3 import ObjectStore

MAX_CONCURRENT_DOWNLOADS = 2  # per process, because each download uses separate connections
DOWNLOAD_ATTEMPTS = 2  # a shard is downloaded again if its SHA-256 does not match
MAX_OTHER_OPEN_FILES = 1024  # number of files that may be open in addition to lock files
MAX_PREFETCHED_BATCHES = 1000  # maximum number of micro-batches that are prefetched
POLL_S = 0.1  # seconds between attempts to acquire a lock or free space
STOP_CHECK_S = 0.5  # seconds between checks for a stop signal while waiting for a shard
WAIT_MESSAGE_DELAY_S = 10  # seconds to wait for shards before showing a message
FREE_SPACE_TIMEOUT_S = 120  # seconds to wait for free space before raising an error


class _ReaderStopped(Exception):
    """Exception for a reader that has stopped and needs no more shards."""


class ShardCache:
    """Thread-safe cache of one data set's shards on this host.

    Args:
        cache_folder: Cache folder, used only for this data set.
        url: S3 location of the shards, s3://bucket/prefix.
        shards: All shards of the data set.
        limit_bytes: Maximum total size of the cached shards in bytes.

    Raises:
        ValueError: If a shard is larger than the cache.
    """

    def __init__(self, cache_folder: Path, url: str, shards: tuple[Shard, ...], limit_bytes: int):
        largest_shard = max(shards, key=lambda shard: shard.bytes)
        if largest_shard.bytes > limit_bytes:
            raise ValueError(
                f"--cache_gib {limit_bytes / 2**30:g} is too small for {largest_shard.file} in {url},"
                f" which contains {largest_shard.bytes / 2**30:.3g} GiB."
                " Increase --cache_gib, or prepare smaller shards"
            )
        self.cache_folder, self.store, self.limit_bytes = cache_folder, ObjectStore(url), limit_bytes
        self.reserved_bytes = 0  # part of limit_bytes that this process's prefetchers have reserved
        self.shards_by_key = {shard.file: shard for shard in shards}
        self.lock_folder = cache_folder / "locks"
        self.lock_folder.mkdir(parents=True, exist_ok=True)
        allow_open_files(len(shards) + MAX_OTHER_OPEN_FILES)  # because each held lock is an open file

    def shard_path(self, shard_key: str) -> Path:
        """Return the path of a shard in the cache. The file exists only while the shard is cached."""
        return self.cache_folder / quote(shard_key, safe="")  # because a key may contain slashes

    @contextmanager
    def reserve_share(self, unreserved_bytes: float) -> Iterator[int]:
        """Reserve this process's free share of the cache, minus unreserved_bytes. Yield the size in bytes.

        The reservation only changes a counter, so that several prefetchers of this process divide its share.
        """
        share_bytes = int(self.limit_bytes / processes_per_host() - self.reserved_bytes - unreserved_bytes)
        self.reserved_bytes += share_bytes
        try:
            yield share_bytes
        finally:
            self.reserved_bytes -= share_bytes

    def hold_shard(self, shard_key: str, stop_event: threading.Event) -> int:
        """Fetch a shard if it is missing, and hold its lock so that no process removes it.

        Returns:
            File descriptor of the lock, which the caller passes to `release_shard`.

        Raises:
            ValueError: If the shard can't be fetched or stored.
            _ReaderStopped: If `stop_event` is set.
        """
        lock_fd = None
        try:
            lock_fd = self._open_lock_file(shard_key)
            while True:
                self._wait_for_lock(lock_fd, fcntl.LOCK_SH, stop_event)
                if self.shard_path(shard_key).exists():
                    return lock_fd
                self._wait_for_lock(lock_fd, fcntl.LOCK_EX, stop_event)
                if not self.shard_path(shard_key).exists():  # another process may have fetched the shard
                    self._fetch_shard(self.shards_by_key[shard_key], stop_event)
                # The loop returns to the shared lock, so that other processes can read the shard.
        except BaseException as error:
            if lock_fd is not None:
                os.close(lock_fd)
            if not isinstance(error, OSError):
                raise
            store_advice = "Free disk space, reduce --cache_gib, or choose a different --cache_dir"
            if error.errno == errno.EMFILE:
                store_advice = "Raise the limit on open files (ulimit -Hn), or prepare fewer, larger shards"
            store_problem = f"can't be stored in {self.cache_folder}: {error.strerror}"
            raise ValueError(f"{shard_key} from {self.store.url} {store_problem}. {store_advice}") from error

    def release_shard(self, shard_key: str, lock_fd: int) -> None:
        """Release a shard's lock, so that the shard may be removed, and record the time of its last use."""
        with suppress(OSError):
            os.utime(self.shard_path(shard_key))  # the modification time records the last use
        os.close(lock_fd)  # also releases the lock

    def _open_lock_file(self, shard_key: str) -> int:
        """Open a shard's lock file, which is created if necessary, and return the file descriptor."""
        return os.open(self.lock_folder / self.shard_path(shard_key).name, os.O_RDWR | os.O_CREAT, 0o666)

    def _wait_for_lock(self, lock_fd: int, lock_operation: int, stop_event: threading.Event) -> None:
        """Wait for a LOCK_SH or LOCK_EX lock on a shard, or raise _ReaderStopped after stop_event is set."""
        while not try_lock(lock_fd, lock_operation):
            if stop_event.wait(POLL_S):
                raise _ReaderStopped

    @contextmanager
    def _lock_if_unused(self, shard_key: str) -> Iterator[bool]:
        """Try to lock a shard exclusively. Yield True, or False if a reader or fetcher holds the lock."""
        lock_fd = self._open_lock_file(shard_key)
        try:
            yield try_lock(lock_fd)
        finally:
            os.close(lock_fd)

    def _fetch_shard(self, shard: Shard, stop_event: threading.Event) -> None:
        """Download a shard, verify its SHA-256, and rename the .part file. The caller must hold the lock."""

        def raise_if_stopped() -> None:
            if stop_event.is_set():
                raise _ReaderStopped

        partial_path = self.shard_path(shard.file).with_name(f"{self.shard_path(shard.file).name}.part")
        for _download_attempt in range(DOWNLOAD_ATTEMPTS):
            self._make_room_for(shard, partial_path, stop_event)
            self.store.download(shard.file, partial_path, shard.bytes, raise_if_stopped)
            if sha256_of(partial_path) == shard.sha256:
                sync(partial_path)
                partial_path.rename(self.shard_path(shard.file))
                return
            partial_path.unlink()
        raise ValueError(
            f"{self.store.url}/{shard.file} does not match the SHA-256 in the manifest,"
            " even after a second download. Prepare the data again, or upload the shard again"
        )

    def _make_room_for(self, shard: Shard, partial_path: Path, stop_event: threading.Event) -> None:
        """Free space for a shard, and reserve it with a .part file. The caller must hold the lock."""
        free_space_deadline_s = time.monotonic() + FREE_SPACE_TIMEOUT_S
        while True:
            # Only one process at a time frees space, so that two processes do not use the same free space.
            with open(self.lock_folder / ".room", "w") as room_lock_file:
                fcntl.flock(room_lock_file, fcntl.LOCK_EX)
                if self._remove_shards_until(self.limit_bytes - shard.bytes, shard.file):
                    partial_path.touch()
                    return
            if time.monotonic() > free_space_deadline_s:
                raise ValueError(
                    f"{self.cache_folder} has no space for {shard.file},"
                    f" because all {self.limit_bytes / 2**30:g} GiB of --cache_gib are in use."
                    " Increase --cache_gib, or use a separate --cache_dir for each job"
                )
            if stop_event.wait(POLL_S):
                raise _ReaderStopped

    def _remove_shards_until(self, remaining_limit_bytes: int, excluded_shard_key: str) -> bool:
        """Remove leftover .part files, and the least recently used shards until the remaining shards fit.

        Args:
            remaining_limit_bytes: Maximum total size of the remaining shards in bytes.
            excluded_shard_key: Shard to be fetched, which is neither removed nor included in the total size.

        Returns:
            True if the remaining shards fit.
        """
        cached_bytes = 0
        shard_keys_by_last_use = list[tuple[int, str]]()
        for cached_file in os.scandir(self.cache_folder):
            shard_key = unquote(cached_file.name.removesuffix(".part"))
            if shard_key not in self.shards_by_key or shard_key == excluded_shard_key:
                continue
            if not cached_file.name.endswith(".part"):
                shard_keys_by_last_use.append((cached_file.stat().st_mtime_ns, shard_key))
            else:
                with self._lock_if_unused(shard_key) as is_shard_unused:
                    # A complete shard means that the .part file was just renamed
                    if is_shard_unused and not self.shard_path(shard_key).exists():
                        Path(cached_file.path).unlink(missing_ok=True)
                        continue
            cached_bytes += self.shards_by_key[shard_key].bytes  # a .part file grows to the size of its shard
        for _last_use_ns, shard_key in sorted(shard_keys_by_last_use):
            if cached_bytes <= remaining_limit_bytes:
                break
            with self._lock_if_unused(shard_key) as is_shard_unused:
                if is_shard_unused:
                    self.shard_path(shard_key).unlink()
                    cached_bytes -= self.shards_by_key[shard_key].bytes
        return cached_bytes <= remaining_limit_bytes


@dataclass
class _ReservedShard:
    """Shard that a prefetcher holds or fetches."""

    lock_future: Future[int]  # descriptor returned by ShardCache.hold_shard
    pending_uses: int = 0  # number of micro-batches that still need the shard


class _PrefetchedItem(NamedTuple):
    """Item of the plan with its shards, which may still be downloading."""

    plan_item: PlanItem
    shard_keys: set[str]  # keys of the shards that contain the item's samples


class ShardPrefetcher:
    """Iterator over a plan that yields each item once all of its shards are on this host.

    A thread iterates over the plan ahead of the reader and holds the next shards, as long as the total size
    of all held shards does not exceed budget_bytes. When the reader requests an item, it has finished the
    item received max_items_in_flight items earlier. A DataLoader requests the next item before returning a
    finished batch, so decoded batches do not hide the time spent waiting for a shard.

    Args:
        plan: Epoch and sample ids of each micro-batch.
        shard_keys_of: Function that maps sample ids to the keys of the shards that contain them.
        cache: Local cache that stores the shards.
        budget_bytes: Maximum total size of the held shards in bytes.
        max_items_in_flight: Maximum number of items that the reader processes at the same time.
    """

    def __init__(
        self,
        plan: Plan,
        shard_keys_of: Callable[[np.ndarray], set[str]],
        cache: ShardCache,
        budget_bytes: int,
        max_items_in_flight: int,
    ):
        self.plan, self.shard_keys_of, self.cache = plan, shard_keys_of, cache
        self.budget_bytes, self.max_items_in_flight = budget_bytes, max_items_in_flight
        self.reserved_shards: dict[str, _ReservedShard] = {}  # held or fetched shards, by key
        self.prefetched_items: deque[_PrefetchedItem] = deque()  # items that have not been yielded yet
        self.shard_keys_in_flight: deque[set[str]] = deque()  # shards of the items that the reader processes
        self.is_reader_waiting = False  # whether __iter__() is waiting for an item
        self.has_prefetching_ended = False  # whether the prefetching thread has ended
        self.prefetching_error: BaseException | None = None  # exception that ended the prefetching thread
        self.stop_event, self.state_condition = threading.Event(), threading.Condition()
        self.download_pool = ThreadPoolExecutor(MAX_CONCURRENT_DOWNLOADS)
        # From here on, state_condition protects the state that the thread and the reader share.
        threading.Thread(target=self._prefetch_items, daemon=True).start()

    def __iter__(self) -> Iterator[PlanItem]:
        """Yield the items of the plan in order, each once its shards are on this host.

        Raises:
            ValueError: If a shard can't be fetched.
            Preempted: If this process received a stop signal and is the job's only process.
        """
        while True:
            with self.state_condition:
                if len(self.shard_keys_in_flight) == self.max_items_in_flight:
                    # By requesting another item, the reader shows that it has finished its oldest item.
                    self._end_shard_uses(self.shard_keys_in_flight.popleft())
                self.is_reader_waiting = True
                self.state_condition.notify_all()
                while not self.prefetched_items and not self.has_prefetching_ended:
                    self.state_condition.wait(STOP_CHECK_S)
                    _raise_preempted_if_alone()
                self.is_reader_waiting = False
                if not self.prefetched_items:  # the thread has reached the end of the plan or failed
                    break
                plan_item, shard_keys = self.prefetched_items.popleft()
                self.shard_keys_in_flight.append(shard_keys)
                lock_future_by_key = {key: self.reserved_shards[key].lock_future for key in shard_keys}
            self._wait_for_shards(lock_future_by_key)
            yield plan_item
        if self.prefetching_error:
            raise self.prefetching_error

    def _add_shard_use(self, shard_key: str) -> None:
        """Count a use of a shard by one item. The first use starts a download unless the shard is cached."""
        if shard_key not in self.reserved_shards:
            lock_future = self.download_pool.submit(self.cache.hold_shard, shard_key, self.stop_event)
            self.reserved_shards[shard_key] = _ReservedShard(lock_future)
        self.reserved_shards[shard_key].pending_uses += 1

    def _end_shard_uses(self, shard_keys: set[str]) -> None:
        """End one use of each shard, and release the shards that no other item needs."""
        for shard_key in shard_keys:
            reserved_shard = self.reserved_shards[shard_key]
            reserved_shard.pending_uses -= 1
            if not reserved_shard.pending_uses:
                del self.reserved_shards[shard_key]
                self.cache.release_shard(shard_key, reserved_shard.lock_future.result())

    def close(self) -> None:
        """Stop the thread and the downloads, and release all shards."""
        self.stop_event.set()
        with self.state_condition:
            self.state_condition.notify_all()
            for shard_key, reserved_shard in self.reserved_shards.items():
                reserved_shard.lock_future.cancel()
                reserved_shard.lock_future.add_done_callback(partial(self._release_after_close, shard_key))
            self.reserved_shards.clear()
        self.download_pool.shutdown(wait=False)

    def _release_after_close(self, shard_key: str, lock_future: Future[int]) -> None:
        """Release a shard when its lock future is done, unless the lock was not acquired."""
        if not lock_future.cancelled() and not lock_future.exception():
            self.cache.release_shard(shard_key, lock_future.result())

    def _wait_for_shards(self, lock_future_by_key: dict[str, Future[int]]) -> None:
        """Wait until all shards are held, or raise the exception of the first shard that can't be held."""
        lock_futures = lock_future_by_key.values()
        next_message_s = time.monotonic() + WAIT_MESSAGE_DELAY_S
        while True:
            finished_futures, unfinished_futures = wait(
                lock_futures, timeout=STOP_CHECK_S, return_when=FIRST_EXCEPTION
            )
            for lock_future in finished_futures:
                lock_future.result()  # raises the exception of a shard that can't be held
            if not unfinished_futures:
                return
            _raise_preempted_if_alone()
            if time.monotonic() > next_message_s:
                next_message_s = time.monotonic() + 3 * WAIT_MESSAGE_DELAY_S  # less often than the first time
                missing_shard_keys = [
                    shard_key
                    for shard_key, lock_future in lock_future_by_key.items()
                    if lock_future in unfinished_futures
                ]
                log.warning(
                    f"waiting for {len(missing_shard_keys)} of {len(lock_futures)} shards"
                    f" from {self.cache.store.url}, for example {missing_shard_keys[0]}"
                )

    def _prefetch_items(self) -> None:
        """Reserve the shards of one item after another, within the budget. Runs in a background thread."""
        try:
            for epoch, sample_ids in self.plan:
                shard_keys = self.shard_keys_of(sample_ids)
                with self.state_condition:
                    self.state_condition.wait_for(partial(self._may_hold_shards, shard_keys))
                    if self.stop_event.is_set():
                        return
                    for shard_key in sorted(shard_keys):
                        self._add_shard_use(shard_key)
                    self.prefetched_items.append(_PrefetchedItem((epoch, sample_ids), shard_keys))
                    self.state_condition.notify_all()
        except BaseException as error:
            self.prefetching_error = error  # __iter__() raises the error in the reader's thread
        finally:
            with self.state_condition:
                self.has_prefetching_ended = True
                self.state_condition.notify_all()

    def _may_hold_shards(self, shard_keys: set[str]) -> bool:
        """Return True if these shards may be held in addition to those already held.

        The shards must fit into the budget unless the reader is waiting for them, because a waiting reader
        releases no shards. After `stop_event` is set, the result is always True, so that the thread can end.
        """
        if self.stop_event.is_set() or (self.is_reader_waiting and not self.prefetched_items):
            return True
        held_keys = shard_keys | self.reserved_shards.keys()
        held_bytes = sum(self.cache.shards_by_key[shard_key].bytes for shard_key in held_keys)
        return held_bytes <= self.budget_bytes and len(self.prefetched_items) < MAX_PREFETCHED_BATCHES


def _raise_preempted_if_alone() -> None:
    """Raise Preempted after a stop signal if this is the job's only process.

    In a larger job, the other processes may be in the middle of a step and would wait forever for this
    process.
    """
    if watch.wanted() and not dist.is_initialized():
        raise Preempted
