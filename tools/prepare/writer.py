"""Write a split as shuffled shards in one pass, and write the shards' index."""

import hashlib
import os
import tarfile
from array import array
from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import lru_cache
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np

from onecurve.data.names import CollectedNames
from onecurve.data.shards import index_file_name
from onecurve.system.files import allow_open_files, write_bytes
from tools.prepare.originals import RawImage

MAX_WAITING_BATCHES = 8  # maximum number of batches that wait for the thread that writes and hashes
RESERVED_FILES = 64  # number of open files reserved for purposes other than shards
IMAGES_PER_DRAW = 4096  # number of images whose shards are drawn at once
BLOCK_BYTES = 512  # bytes per block in a tar file
TAR_END = bytes(2 * BLOCK_BYTES)  # tar end-of-archive marker (two empty blocks)
EXTENSIONS = {".jpeg": ".jpg"}  # shard readers use the extension as the field name


def write_shard_index(folder: Path, split: str, rows: array, names: CollectedNames) -> tuple[str, int]:
    """Write a split's index, sorted by shard and offset, and the image names in the same order.

    Args:
        folder: The split's folder.
        split: Split name.
        rows: Shard, offset, length and label of each image, as one flat array.
        names: Image names.

    Returns:
        A tuple of the index's SHA-256 and the largest label.
    """
    table, content = np.frombuffer(rows, np.int64).reshape(-1, 4), BytesIO()
    order = np.lexsort((table[:, 1], table[:, 0]))
    names.write(folder, split, order)
    np.save(content, table[order])
    write_bytes(folder / index_file_name(split), content.getvalue())
    return hashlib.sha256(content.getvalue()).hexdigest(), int(table[:, 3].max())


class ShardWriter:
    """Writer that distributes a split's images over shards. All shards are open at the same time.

    Image i is appended to a random shard, drawn from (seed, split, i). Each class in a sorted source is
    therefore spread over all shards in one pass. Each shard stays sorted by class, so readers must shuffle at
    least the images of a whole shard.

    Each image is stored as two members, `<key>.jpg` (or .png, ...) and `<key>.cls` with the label as digits.
    """

    def __init__(self, folder: Path, split: str, shards: int, seed: int):
        """Open all shards for writing. Raise ValueError if the process may not open so many files."""
        count = shards + RESERVED_FILES
        if (limit := allow_open_files(count)) < count:
            problem = f"{count:,} open files exceed the limit of {limit:,} (ulimit -Hn)"
            raise ValueError(f"{problem}. Pass a larger --shard_mib.")
        self.folder, self.split, self.count = folder, split, 0
        self.lengths, self.images = [0] * shards, [0] * shards
        self.key, self.rows, self.names = [seed, *split.encode()], array("q"), CollectedNames()
        self.thread, self.pending = ThreadPoolExecutor(1), deque[Future[None]]()
        self.shards = [_Shard(folder / f"{split}-{index:05d}.tar") for index in range(shards)]

    def write(self, images: Sequence[RawImage]) -> None:
        """Queue images for writing. If an earlier write failed, raise its error."""
        batch: list[tuple[_Shard, bytes]] = []
        for image in images:
            drawn_shards = _draw_shards(*self.key, self.count // IMAGES_PER_DRAW, len(self.shards))
            shard_index = int(drawn_shards[self.count % IMAGES_PER_DRAW])
            extension = os.path.splitext(image.name)[1].lower()
            label, size = b"%d" % image.label, len(image.data)
            name = f"{image.key}{EXTENSIONS.get(extension, extension)}"
            header = tar_header(name, size)
            label_header = tar_header(f"{image.key}.cls", len(label))
            padding = bytes(-size % BLOCK_BYTES)
            members = b"".join((header, image.data, padding, label_header, label.ljust(BLOCK_BYTES, b"\0")))
            self.rows.extend((shard_index, self.lengths[shard_index] + len(header), size, image.label))
            self.names.add(name)
            self.lengths[shard_index] += len(members)
            self.images[shard_index] += 1
            self.count += 1
            batch.append((self.shards[shard_index], members))
        self._wait_for_writes(MAX_WAITING_BATCHES)
        self.pending.append(self.thread.submit(_append_all, batch))

    def finish(self) -> dict[str, Any]:
        """Complete the shards and write the index. Return the split's manifest entry."""
        self._wait_for_writes(0)
        for shard in self.shards:
            shard.append(TAR_END)
            os.fdatasync(shard.file)
        shards = [
            {
                "file": shard.path.name,
                "bytes": length + len(TAR_END),
                "images": images,
                "sha256": shard.sha256.hexdigest(),
            }
            for shard, length, images in zip(self.shards, self.lengths, self.images, strict=True)
        ]
        digest, largest = write_shard_index(self.folder, self.split, self.rows, self.names)
        return {"images": self.count, "index_sha256": digest, "shards": shards, "largest_label": largest}

    def close(self) -> None:
        self.thread.shutdown(cancel_futures=True)
        for shard in self.shards:
            os.close(shard.file)

    def _wait_for_writes(self, max_pending: int) -> None:
        """Wait until at most `max_pending` batches are queued.

        If an earlier write failed, raise its error.
        """
        while len(self.pending) > max_pending:
            self.pending.popleft().result()


class _Shard:
    def __init__(self, path: Path):
        self.path, self.sha256 = path, hashlib.sha256()
        self.file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)

    def append(self, content: bytes) -> None:
        """Append the content.

        On a full disk, a write may be incomplete, and the next write raises OSError.
        """
        self.sha256.update(content)
        try:
            while content:
                content = content[os.write(self.file, content) :]
        except OSError as error:
            raise OSError(error.errno, error.strerror, str(self.path)) from None


def _append_all(batch: list[tuple[_Shard, bytes]]) -> None:
    for shard, members in batch:
        shard.append(members)


@lru_cache(4)
def _draw_shards(*key_block_count: int) -> np.ndarray:
    """Draw shards for IMAGES_PER_DRAW images. RandomState's random stream never changes (NEP 19)."""
    *key, count = key_block_count
    return np.random.RandomState(key).randint(count, size=IMAGES_PER_DRAW)


def tar_header(name: str, size: int) -> bytes:
    """Return a tar member's header, which is usually 512 bytes long.

    A class name longer than 155 bytes or a file name longer than 100 bytes needs 1,536 bytes of PAX records.
    The time is 0 and the owner is empty, so that identical images produce identical shards.
    """
    member = tarfile.TarInfo(name)
    member.size = size
    try:
        return member.tobuf(tarfile.USTAR_FORMAT, "utf-8")
    except ValueError:  # the name is too long for USTAR
        return member.tobuf(tarfile.PAX_FORMAT, "utf-8")
