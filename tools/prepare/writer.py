"""The writer of a split: shards that are shuffled in one pass, and the rows of their index.

The writer takes batches of images. `commit` waits until all of them are on the disk, and returns the state
from which another writer continues. The output is then the same, byte for byte, as without an interruption.
"""

import hashlib
import os
import tarfile
from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import lru_cache
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np

from common.data.shards import index_name
from common.system.files import allow_open_files, write_bytes
from common.system.processes import allowed_cores
from tools.prepare.originals import RawImage

WAITING = 8  # batches that may wait for the thread that writes and hashes
READ_BYTES = 2**23
OTHER_FILES = 64  # open files beside the shards
DRAWN = 4096  # images whose shards are drawn at once
BLOCK = 512  # bytes of a tar file's blocks
END = bytes(2 * BLOCK)  # of a tar file
EXTENSIONS = {".jpeg": ".jpg"}  # readers of shards name fields by extension

State = dict[str, Any]


class Appended:
    """A file that is appended to, from the length that an earlier start recorded."""

    def __init__(self, path: Path, length: int):
        self.path = path
        self.file = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
        if os.fstat(self.file).st_size < length:
            self.close()
            raise ValueError(f"{path} is shorter than the journal says: remove its folder, and begin again")
        os.ftruncate(self.file, length)
        os.lseek(self.file, length, os.SEEK_SET)

    def append(self, content: bytes) -> None:
        """On a full disk a call may write less, and the next one raises OSError."""
        try:
            while content:
                content = content[os.write(self.file, content) :]
        except OSError as error:
            raise OSError(error.errno, error.strerror, str(self.path)) from None

    def commit(self) -> None:
        os.fdatasync(self.file)

    def close(self) -> None:
        os.close(self.file)


class IndexRows:
    """Rows of a split's index in the order of the images: a file, which is removed at the end."""

    def __init__(self, folder: Path, split: str, count: int):
        """count: rows of an earlier start that are kept."""
        self.folder, self.split, self.count = folder, split, count
        self.file = Appended(folder / part_name(split), count * 32)

    def append(self, rows: Sequence[tuple[int, int, int, int]]) -> None:
        """rows: shard, offset, length and label of each image."""
        self.file.append(np.asarray(rows, np.int64).tobytes())
        self.count += len(rows)

    def finish(self) -> tuple[str, int]:
        """Writes the index, sorted by shard and offset. Returns its SHA-256 and the largest label."""
        rows = np.fromfile(self.file.path, np.int64).reshape(-1, 4)
        content = BytesIO()
        np.save(content, rows[np.lexsort((rows[:, 1], rows[:, 0]))])
        write_bytes(self.folder / index_name(self.split), content.getvalue())
        return hashlib.sha256(content.getvalue()).hexdigest(), int(rows[:, 3].max())


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
        self.split, self.lengths, self.images = split, state["lengths"], state["images"]
        self.count = sum(self.images)
        self.key = [seed, *split.encode()]
        self.rows, self.new_rows = IndexRows(folder, split, self.count), list[tuple[int, int, int, int]]()
        self.thread, self.pending = ThreadPoolExecutor(1), deque[Future[None]]()
        self.shards: list[_Shard] = []
        try:
            for i, length in enumerate(self.lengths):
                self.shards.append(_Shard(folder / f"{split}-{i:05d}.tar", length))
            with ThreadPoolExecutor(allowed_cores()) as pool:
                list(pool.map(_Shard.read_back, self.shards))
        except BaseException:
            self.close()
            raise

    def write(self, images: Sequence[RawImage]) -> None:
        """Queues images to be written. Raises the error of an earlier write."""
        batch: list[tuple[_Shard, bytes]] = []
        for image in images:
            number = int(_draws(*self.key, self.count // DRAWN, len(self.shards))[self.count % DRAWN])
            extension = os.path.splitext(image.name)[1].lower()
            label, size = b"%d" % image.label, len(image.data)
            header = tar_header(f"{image.key}{EXTENSIONS.get(extension, extension)}", size)
            label_header = tar_header(f"{image.key}.cls", len(label))
            padding = bytes(-size % BLOCK)
            members = b"".join((header, image.data, padding, label_header, label.ljust(BLOCK, b"\0")))
            self.new_rows.append((number, self.lengths[number] + len(header), size, image.label))
            self.lengths[number] += len(members)
            self.images[number] += 1
            self.count += 1
            batch.append((self.shards[number], members))
        self._drain(WAITING)
        self.pending.append(self.thread.submit(_append_all, batch))

    def commit(self) -> State:
        self._drain(0)
        for shard in self.shards:
            shard.commit()
        self.rows.append(self.new_rows)
        self.rows.file.commit()
        self.new_rows = []
        return {"lengths": list(self.lengths), "images": list(self.images)}

    def finish(self) -> dict[str, Any]:
        """Completes the shards and writes the index. Returns the split's part of the manifest."""
        self._drain(0)
        for shard in self.shards:
            shard.append(END)
        self.commit()
        shards = [
            {
                "file": shard.path.name,
                "bytes": length + len(END),
                "images": images,
                "sha256": shard.sha256.hexdigest(),
            }
            for shard, length, images in zip(self.shards, self.lengths, self.images, strict=True)
        ]
        digest, largest = self.rows.finish()
        return {"images": self.count, "index_sha256": digest, "shards": shards, "largest_label": largest}

    def close(self) -> None:
        self.thread.shutdown(cancel_futures=True)
        for file in (*self.shards, self.rows.file):
            file.close()

    def _drain(self, most: int) -> None:
        """Waits until at most so many batches wait to be written. Raises the error of an earlier write."""
        while len(self.pending) > most:
            self.pending.popleft().result()


def part_name(split: str) -> str:
    return f".{split}_index.part"


class _Shard(Appended):
    def __init__(self, path: Path, length: int):
        super().__init__(path, length)
        self.length, self.sha256 = length, hashlib.sha256()

    def read_back(self) -> None:
        """Hashes the content of an earlier start."""
        for start in range(0, self.length, READ_BYTES):
            self.sha256.update(os.pread(self.file, min(READ_BYTES, self.length - start), start))

    def append(self, content: bytes) -> None:
        super().append(content)
        self.sha256.update(content)


def _append_all(batch: list[tuple[_Shard, bytes]]) -> None:
    for shard, members in batch:
        shard.append(members)


@lru_cache(4)
def _draws(*key_block_count: int) -> np.ndarray:
    """Draws the shards of DRAWN images. RandomState: its stream is frozen (NEP 19)."""
    *key, count = key_block_count
    return np.random.RandomState(key).randint(count, size=DRAWN)


def tar_header(name: str, size: int) -> bytes:
    """Makes a member's header, 512 bytes. A class above 155 bytes, or a name above 100, takes PAX records
    before it: 1,536 bytes. Time 0 and no owner: the same images give the same bytes."""
    member = tarfile.TarInfo(name)
    member.size = size
    try:
        return member.tobuf(tarfile.USTAR_FORMAT, "utf-8")
    except ValueError:  # the name is too long
        return member.tobuf(tarfile.PAX_FORMAT, "utf-8")
