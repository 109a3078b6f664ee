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
RESERVED_OPEN_FILES = 64  # number of open files reserved for purposes other than shards
IMAGES_PER_DRAW = 4096  # number of images whose shards are drawn at once
BLOCK_BYTES = 512  # bytes per block in a tar file
TAR_END_MARKER = bytes(2 * BLOCK_BYTES)  # tar end-of-archive marker (two empty blocks)
FIELD_EXTENSIONS = {".jpeg": ".jpg"}  # shard readers use the extension as the field name


def write_shard_index(folder: Path, split: str, index_rows: array, names: CollectedNames) -> tuple[str, int]:
    """Write a split's index file, sorted by shard and offset, and its names file in the same order.

    Args:
        folder: Folder in which to write both files.
        split: Split name.
        index_rows: Shard, offset, length and label of each image, as one flat array.
        names: Image names, in the order of `index_rows`.

    Returns:
        A tuple of the index's SHA-256 and the largest label.
    """
    index_table = np.frombuffer(index_rows, np.int64).reshape(-1, 4)
    shard_column, offset_column, _, label_column = index_table.T
    file_order = np.lexsort((offset_column, shard_column))
    names.write(folder, split, file_order)
    npy_buffer = BytesIO()
    np.save(npy_buffer, index_table[file_order])
    write_bytes(folder / index_file_name(split), npy_buffer.getvalue())
    return hashlib.sha256(npy_buffer.getvalue()).hexdigest(), int(label_column.max())


class ShardWriter:
    """Writer that distributes a split's images over shards. All shards are open at the same time.

    Image i is appended to a random shard, drawn from (seed, split, i). Each class in a sorted source is
    therefore spread over all shards in one pass. Each shard stays sorted by class, so readers must shuffle at
    least the images of a whole shard.

    Each image is stored as two members, `<key>.jpg` (or .png, ...) and `<key>.cls` with the label as digits.
    """

    def __init__(self, folder: Path, split: str, shard_count: int, seed: int):
        """Create all shards, replacing existing files.

        This method raises the process's limit on open files if necessary.

        Raises:
            ValueError: If the process may not open so many files.
        """
        needed_files = shard_count + RESERVED_OPEN_FILES
        if (file_limit := allow_open_files(needed_files)) < needed_files:
            limit_problem = f"{needed_files:,} open files exceed the limit of {file_limit:,} (ulimit -Hn)"
            raise ValueError(f"{limit_problem}. Pass a larger --shard_mib.")
        self.folder, self.split = folder, split
        self.image_count = 0  # number of images in all shards
        self.random_key = [seed, *split.encode()]  # integers that seed the choice of shards
        self.index_rows = array("q")  # shard, offset, length and label of each image
        self.image_names = CollectedNames()
        # A single thread writes and hashes the batches, in order.
        self.thread, self.pending_writes = ThreadPoolExecutor(1), deque[Future[None]]()
        self.shards = [_Shard(folder / f"{split}-{index:05d}.tar") for index in range(shard_count)]

    def write(self, images: Sequence[RawImage]) -> None:
        """Assign images to shards and index rows, and queue their tar members for the writing thread.

        If an earlier write failed, raise its error. If too many batches are queued, wait.
        """
        write_batch: list[tuple[_Shard, bytes]] = []
        for image in images:
            draw_block, index_in_block = divmod(self.image_count, IMAGES_PER_DRAW)
            drawn_shards = _draw_shard_indices(*self.random_key, draw_block, len(self.shards))
            shard_index = int(drawn_shards[index_in_block])
            shard = self.shards[shard_index]
            extension = os.path.splitext(image.name)[1].lower()
            label_digits, image_bytes = b"%d" % image.label, len(image.encoded)
            file_name = f"{image.key}{FIELD_EXTENSIONS.get(extension, extension)}"
            image_header = tar_header(file_name, image_bytes)
            label_header = tar_header(f"{image.key}.cls", len(label_digits))
            padding = bytes(-image_bytes % BLOCK_BYTES)  # a member's content fills whole blocks
            label_block = label_digits.ljust(BLOCK_BYTES, b"\0")
            tar_bytes = b"".join((image_header, image.encoded, padding, label_header, label_block))
            image_offset = shard.queued_bytes + len(image_header)  # position of the image's content
            self.index_rows.extend((shard_index, image_offset, image_bytes, image.label))
            self.image_names.add(file_name)
            shard.queued_bytes += len(tar_bytes)
            shard.image_count += 1
            self.image_count += 1
            write_batch.append((shard, tar_bytes))
        self._wait_for_writes(MAX_WAITING_BATCHES)
        self.pending_writes.append(self.thread.submit(_append_to_shards, write_batch))

    def finish(self) -> dict[str, Any]:
        """Complete the shards on the disk, write the index and the names, and return the manifest entry.

        The entry also contains "largest_label", which the caller removes before it writes the manifest.
        """
        self._wait_for_writes(0)
        for shard in self.shards:
            shard.append(TAR_END_MARKER)
            os.fdatasync(shard.fd)
        shard_entries = [
            {
                "file": shard.path.name,
                "bytes": shard.queued_bytes + len(TAR_END_MARKER),
                "images": shard.image_count,
                "sha256": shard.sha256.hexdigest(),
            }
            for shard in self.shards
        ]
        index_rows, image_names = self.index_rows, self.image_names
        index_sha256, largest_label = write_shard_index(self.folder, self.split, index_rows, image_names)
        manifest_entry = {"images": self.image_count, "index_sha256": index_sha256, "shards": shard_entries}
        return manifest_entry | {"largest_label": largest_label}

    def close(self) -> None:
        """Drop queued batches, wait for the batch being written, and close the shards."""
        self.thread.shutdown(cancel_futures=True)
        for shard in self.shards:
            os.close(shard.fd)

    def _wait_for_writes(self, max_pending: int) -> None:
        """Wait until at most `max_pending` batches are queued.

        If an earlier write failed, raise its error.
        """
        while len(self.pending_writes) > max_pending:
            write_future = self.pending_writes.popleft()
            write_future.result()


class _Shard:
    """Shard being written. `queued_bytes` is its size after all queued writes, without the end marker."""

    def __init__(self, shard_file: Path):
        self.path, self.sha256 = shard_file, hashlib.sha256()
        self.queued_bytes, self.image_count = 0, 0  # changed by ShardWriter.write() only
        self.fd = os.open(shard_file, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)

    def append(self, tar_bytes: bytes) -> None:
        """Append the bytes to the shard's file and hash.

        On a full disk, os.write() may write only some of the bytes. The next call raises OSError, to which
        this method adds the shard's path.
        """
        self.sha256.update(tar_bytes)
        try:
            while tar_bytes:
                written_bytes = os.write(self.fd, tar_bytes)
                tar_bytes = tar_bytes[written_bytes:]
        except OSError as error:
            raise OSError(error.errno, error.strerror, str(self.path)) from None


def _append_to_shards(write_batch: list[tuple[_Shard, bytes]]) -> None:
    """Append each image's tar members to its shard. This function runs in the writing thread."""
    for shard, tar_bytes in write_batch:
        shard.append(tar_bytes)


@lru_cache(4)
def _draw_shard_indices(*seed_and_shard_count: int) -> np.ndarray:
    """Draw a shard index for each of IMAGES_PER_DRAW images.

    The last argument is the number of shards. All other arguments together are the seed. RandomState's random
    stream never changes (NEP 19).
    """
    *seed_integers, shard_count = seed_and_shard_count
    return np.random.RandomState(seed_integers).randint(shard_count, size=IMAGES_PER_DRAW)


def tar_header(name: str, content_bytes: int) -> bytes:
    """Return a tar member's header, which is usually 512 bytes long.

    A class name longer than 155 bytes or a file name longer than 100 bytes needs 1,536 bytes of PAX records.
    The time is 0 and the owner is empty, so that identical images produce identical shards.
    """
    tar_info = tarfile.TarInfo(name)
    tar_info.size = content_bytes
    try:
        return tar_info.tobuf(tarfile.USTAR_FORMAT, "utf-8")
    except ValueError:  # the name is too long for USTAR
        return tar_info.tobuf(tarfile.PAX_FORMAT, "utf-8")
