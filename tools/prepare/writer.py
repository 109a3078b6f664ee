"""Writers of a split: shards that are shuffled in one pass, or class folders.

A writer takes batches of images. `commit` waits until all of them are on the disk, and returns the state from
which another writer continues. The output is then the same, byte for byte, as without an interruption.
"""

import hashlib
import itertools
import os
import tarfile
from array import array
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import lru_cache
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np

from common.data.decode import cores
from common.system.files import allow_open_files, write_bytes
from tools.prepare.source import RawImage

THREADS = 4  # write and hash: 1 GB/s each with the processor's SHA-256 instructions
WAITING = 4  # calls that may wait for a thread, on average
READ_BYTES = 2**23
FLUSH_BYTES = 2**23  # of a shard, between two requests to write them to the disk
OTHER_FILES = 64  # open files beside the shards
DRAWN = 4096  # images whose shards are drawn at once
BLOCK = 512  # bytes of a tar file's blocks
END = bytes(2 * BLOCK)  # of a tar file
EXTENSIONS = {".jpeg": ".jpg"}  # readers of shards name fields by extension

State = dict[str, Any]


class ShardWriter:
    """Spreads one split over its shards, which are all open at once.

    Image i is appended to a shard drawn from (seed, split, i). A source sorted by class is thus spread over
    all shards in one pass. Each shard stays sorted by class: readers must shuffle at least a shard's images.

    Each image is two members: `<key>.jpg` (or .png, ...), and `<key>.cls` with the label as digits.
    """

    def __init__(self, folder: Path, split: str, shards: int, seed: int, state: State | None = None):
        """state: of commit(), to continue. Raises ValueError when a shard is shorter than the state says, or
        when the process may not open so many files."""
        count = shards + OTHER_FILES
        if (limit := allow_open_files(count)) < count:
            raise ValueError(
                f"{count:,} files must be open, and {limit:,} may (ulimit -Hn): give a larger --shard_mib"
            )
        state = state or {"lengths": [0] * shards, "images": [0] * shards}
        self.folder, self.split = folder, split
        self.lengths, self.images = state["lengths"], state["images"]
        self.count = sum(self.images)
        self.key = [seed, *split.encode()]
        self.rows = array("q")  # index rows not yet written: shard, offset, length, label
        self.part = folder / part_name(split)
        self.threads = WriterThreads(min(THREADS, cores(), shards))
        paths = [folder / f"{split}-{i:05d}.tar" for i in range(shards)]
        self.index = _open(self.part, self.count * 32)
        self.shards = [_Shard(path, length) for path, length in zip(paths, self.lengths, strict=True)]
        try:
            for i, shard in enumerate(self.shards):
                self.threads.submit(i, shard.read_back)
        except BaseException:  # Ctrl-C, too: otherwise the threads would not end
            self.close()
            raise

    def write(self, images: Sequence[RawImage]) -> None:
        """Queues images to be written. Raises the error of an earlier write."""
        parts: list[list[tuple[_Shard, list[bytes]]]] = [[] for _ in self.threads.threads]
        for image in images:
            number = self._shard_of(self.count)
            key, extension = image.key, _extension(image.name)
            label, size = b"%d" % image.label, len(image.data)
            header = tar_header(f"{key}{extension}", size)
            members = [
                header,
                image.data,
                bytes(-size % BLOCK) + tar_header(f"{key}.cls", len(label)) + label.ljust(BLOCK, b"\0"),
            ]
            self.rows.extend((number, self.lengths[number] + len(header), size, image.label))
            self.lengths[number] += sum(map(len, members))
            self.images[number] += 1
            self.count += 1
            parts[number % len(parts)].append((self.shards[number], members))
        for number, part in enumerate(parts):
            if part:
                self.threads.submit(number, _append_all, part)

    def commit(self) -> State:
        for i, shard in enumerate(self.shards):
            self.threads.submit(i, shard.sync)
        self.threads.drain()
        _write_all(self.index, [self.rows.tobytes()], self.part)
        os.fdatasync(self.index)
        self.rows = array("q")
        return {"lengths": list(self.lengths), "images": list(self.images)}

    def finish(self) -> dict[str, Any]:
        """Completes the shards and writes the index. Returns the split's part of the manifest."""
        for i, shard in enumerate(self.shards):
            self.threads.submit(i, _append_all, [(shard, [END])])
        self.commit()
        rows = np.fromfile(self.part, np.int64).reshape(-1, 4)
        shards = [
            {
                "file": shard.path.name,
                "bytes": length + len(END),
                "images": images,
                "sha256": shard.sha256.hexdigest(),
            }
            for shard, length, images in zip(self.shards, self.lengths, self.images, strict=True)
        ]
        return {
            "images": self.count,
            "index_sha256": write_index(self.folder, self.split, rows),
            "shards": shards,
        }

    def close(self) -> None:
        self.threads.close()
        for shard in self.shards:
            os.close(shard.file)
        os.close(self.index)

    def _shard_of(self, i: int) -> int:
        return int(_draws(*self.key, i // DRAWN, len(self.shards))[i % DRAWN])


def part_name(split: str) -> str:
    """Name of the file of index rows in the order of the images, which is removed at the end."""
    return f".{split}_index.part"


def rows_name(split: str) -> str:
    """Name of the folder with the indices of single shards, which is removed at the end."""
    return f".{split}_rows"


class _Shard:
    """One shard's file. A single thread calls its methods."""

    def __init__(self, path: Path, length: int):
        self.path, self.length = path, length
        self.sha256, self.changed = hashlib.sha256(), True
        self.unflushed = 0  # bytes
        self.file = _open(path, length)

    def read_back(self) -> None:
        """Hashes the content of an earlier start."""
        for start in range(0, self.length, READ_BYTES):
            self.sha256.update(os.pread(self.file, min(READ_BYTES, self.length - start), start))

    def append(self, parts: list[bytes]) -> None:
        _write_all(self.file, parts, self.path)
        for part in parts:
            self.sha256.update(part)
        self.changed = True
        self.unflushed += sum(map(len, parts))
        if self.unflushed >= FLUSH_BYTES:
            self._flush()

    def _flush(self) -> None:
        """Starts the write to the disk, so that sync() does not wait for all of it at once. Python has no
        sync_file_range(2); on Linux this advice has the same effect."""
        end = os.lseek(self.file, 0, os.SEEK_CUR)
        os.posix_fadvise(self.file, end - self.unflushed, self.unflushed, os.POSIX_FADV_DONTNEED)
        self.unflushed = 0

    def sync(self) -> None:
        if self.changed:
            os.fdatasync(self.file)
        self.changed = False


def _append_all(work: list[tuple[_Shard, list[bytes]]]) -> None:
    for shard, parts in work:
        shard.append(parts)


@lru_cache(4)
def _draws(*key_block_count: int) -> np.ndarray:
    """Draws the shards of DRAWN images. RandomState: its stream is frozen (NEP 19)."""
    *key, count = key_block_count
    return np.random.RandomState(key).randint(count, size=DRAWN)


class FolderWriter:
    """Writes `<split>/<class>/<name>`, a file per image."""

    def __init__(self, folder: Path, split: str, state: State | None = None):
        self.split, self.folder = split, folder / split
        self.count = (state or {"images": 0})["images"]
        self.threads = WriterThreads(min(THREADS, cores()))
        self.made: set[str] = set()
        self.turns = itertools.count()

    def write(self, images: Sequence[RawImage]) -> None:
        for name in {image.class_name for image in images} - self.made:
            (self.folder / name).mkdir(parents=True, exist_ok=True)
            self.made.add(name)
        self.threads.submit(next(self.turns), self._write_all, images)
        self.count += len(images)

    def _write_all(self, images: Sequence[RawImage]) -> None:
        for image in images:
            path = self.folder / image.class_name / image.name
            file = _open(path, 0)
            try:
                _write_all(file, [image.data], path)
            finally:
                os.close(file)

    def commit(self) -> State:
        self.threads.drain()
        os.sync()  # one call for all files: one for each of a million would take longer than writing them
        return {"images": self.count}

    def finish(self) -> dict[str, Any]:
        return self.commit()

    def close(self) -> None:
        self.threads.close()


class WriterThreads:
    """Threads that each run their calls in order. submit() blocks at WAITING queued calls per thread."""

    def __init__(self, count: int):
        self.threads = [ThreadPoolExecutor(1) for _ in range(count)]
        self.pending: deque[Future] = deque()

    def submit(self, thread: int, work: Callable, *arguments: Any) -> None:
        """Queues a call for one of the threads. Raises the error of an earlier call."""
        while len(self.pending) >= WAITING * len(self.threads):
            self.pending.popleft().result()
        self.pending.append(self.threads[thread % len(self.threads)].submit(work, *arguments))

    def drain(self) -> None:
        while self.pending:
            self.pending.popleft().result()

    def close(self) -> None:
        """Cancels the queued calls and ends the threads."""
        for thread in self.threads:
            thread.shutdown(cancel_futures=True)


def write_index(folder: Path, split: str, rows: np.ndarray) -> str:
    """Writes `<split>_index.npy`, int64 [N, 4], sorted by shard and offset. Returns its SHA-256."""
    content = BytesIO()
    np.save(content, rows[np.lexsort((rows[:, 1], rows[:, 0]))])
    write_bytes(folder / f"{split}_index.npy", content.getvalue())
    return hashlib.sha256(content.getvalue()).hexdigest()


def _open(path: Path, length: int) -> int:
    """Opens a file at this length, to append to it. Follows no link."""
    file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o644)
    if os.fstat(file).st_size < length:
        os.close(file)
        raise ValueError(f"{path} is shorter than the journal says: remove its folder, and begin again")
    os.ftruncate(file, length)
    os.lseek(file, length, os.SEEK_SET)
    return file


def _write_all(file: int, parts: list[bytes], path: Path) -> None:
    """Writes all parts in one call. On a full disk it may write less, and the next call raises OSError."""
    try:
        written, size = os.writev(file, parts), sum(map(len, parts))
        while written < size:
            written += os.write(file, b"".join(parts)[written:])
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(path)) from None


def tar_header(name: str, size: int) -> bytes:
    """Makes a member's header, 512 bytes. A class above 155 bytes, or a name above 100, takes PAX records
    before it: 1,536 bytes. Time 0 and no owner: the same images give the same bytes."""
    member = tarfile.TarInfo(name)
    member.size = size
    try:
        return member.tobuf(tarfile.USTAR_FORMAT, "utf-8")
    except ValueError:  # the name is too long
        return member.tobuf(tarfile.PAX_FORMAT, "utf-8")


def _extension(name: str) -> str:
    extension = os.path.splitext(name)[1].lower()
    return EXTENSIONS.get(extension, extension)
