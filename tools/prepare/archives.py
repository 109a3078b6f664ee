"""Read tar archives from a disk or from S3 as streams, member by member, without extracting the archives.

The tarfile module parses the headers. Only regular files with plain relative names are accepted. An archive
within an archive is read in place, so offsets always refer to the outermost archive.
"""

import hashlib
import math
import tarfile
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import NamedTuple

from onecurve.system.s3 import ObjectStore

CHUNK_BYTES = 2**20  # bytes per read, small enough for the CPU cache
HEADER_CHUNK_BYTES = 4096  # bytes per read if only headers are read
MAX_IMAGE_BYTES = 2**26
MAX_HEADER_BYTES = 2**20  # maximum size of a header with a long name or PAX records
DOWNLOAD_AGAIN = "Download the archive again"


class ByteStream:
    """Sequential byte stream that can be used as a context manager.

    Attributes:
        display_name: The stream's name in messages.
        size: The stream's length in bytes.
        version: Text that changes when the source is replaced, or None if unknown.

    Raises:
        ValueError: If the stream ends early during a read.
    """

    def __init__(
        self,
        display_name: str,
        size: int,
        version: str | None,
        open_chunks_at: Callable[[int], Iterator[bytes]],
        hash_algorithm: str | None,
    ):
        """Create the stream at its beginning. The first read opens the source.

        Args:
            display_name: The stream's name in messages.
            size: The stream's length in bytes.
            version: Text that changes with the source, or None.
            open_chunks_at: Function that yields the content, beginning at a position.
            hash_algorithm: "md5" or "sha256" to hash all bytes, or None.
        """
        self.display_name, self.size, self.version = display_name, size, version
        self._open_chunks_at, self._chunks = open_chunks_at, open_chunks_at(0)
        # Current chunk, its position in the stream, and the index of the next byte in the chunk
        self._chunk, self._chunk_start, self._index_in_chunk = b"", 0, 0
        self._hash = hashlib.new(hash_algorithm, usedforsecurity=False) if hash_algorithm else None
        self._hash_thread = ThreadPoolExecutor(1)  # hashes in a thread, because hashlib releases the GIL
        self._hash_future: Future[None] | None = None  # pending hash of the latest chunk

    def __enter__(self) -> "ByteStream":
        return self

    def __exit__(self, *_) -> None:
        """Close pending requests and stop the hash thread."""
        self._chunks = iter(())  # dropping the generator closes its file or requests
        self._hash_thread.shutdown()

    @property
    def archive(self) -> "ArchiveMember":
        """The whole stream as an archive, to pass to archive_members()."""
        return ArchiveMember(self, self.display_name, "", 0, self.size)

    def tell(self) -> int:
        return self._chunk_start + self._index_in_chunk

    def read(self, byte_count: int) -> bytes:
        """Read `byte_count` bytes. At the end of the stream, return the remaining bytes."""
        slices = []
        while byte_count and (self._index_in_chunk < len(self._chunk) or self._read_next_chunk()):
            slices.append(self._chunk[self._index_in_chunk : self._index_in_chunk + byte_count])
            self._index_in_chunk += len(slices[-1])
            byte_count -= len(slices[-1])
        return b"".join(slices)

    def seek(self, position: int) -> None:
        """Move forward to a position. The stream can't move backwards.

        For a long distance, reopen the source at the position, unless all bytes must be hashed.
        """
        if self._hash is None and position > self._chunk_start + 2 * len(self._chunk):
            self._chunks = self._open_chunks_at(position)
            self._chunk, self._chunk_start, self._index_in_chunk = b"", position, 0
        while self.tell() < position and self.read(min(position - self.tell(), CHUNK_BYTES)):
            pass

    def digest(self) -> str:
        """Read the rest of the stream, and return the whole stream's hash as hex digits.

        This method requires a stream that was opened with a hash algorithm.
        """
        self.seek(self.size)
        assert self._hash is not None
        if self._hash_future is not None:
            self._hash_future.result()
        return self._hash.hexdigest()

    def _read_next_chunk(self) -> bool:
        """Read the next chunk, and start hashing it in a thread. Return False at the end of the stream."""
        self._chunk_start += len(self._chunk)
        self._chunk, self._index_in_chunk = next(self._chunks, b""), 0
        if not self._chunk and self._chunk_start < self.size:
            remedy = "Do not change the source during a read, and run the same command again."
            failure_position = f"at byte {self._chunk_start:,} of {self.size:,}"
            raise ValueError(f"{self.display_name} ended early, {failure_position}. {remedy}")
        if self._hash is not None:
            if self._hash_future is not None:
                self._hash_future.result()  # chunks must be hashed in order, and must not pile up
            self._hash_future = self._hash_thread.submit(self._hash.update, self._chunk)
        return bool(self._chunk)


def open_stream(
    location: str, hash_name: str | None = None, store: ObjectStore | None = None, headers_only: bool = False
) -> ByteStream:
    """Open a file or `s3://bucket/key` for reading. An interrupted download resumes with a range request.

    Args:
        location: Path or s3:// URL.
        hash_name: "md5" or "sha256" to hash all bytes, or None.
        store: Bucket client. Share the client between objects, because creating a client takes 0.2 s.
        headers_only: True to read a file in small chunks, because only the archive's headers will be read.

    Raises:
        ValueError: If the file or object is missing, or if access is denied.
    """
    if location.startswith("s3://"):
        bucket_name, _, object_key = location.removeprefix("s3://").partition("/")
        store = store or ObjectStore(f"s3://{bucket_name}")
        if not object_key or (size_and_etag := store.size_and_etag(object_key)) is None:
            raise ValueError(f"{location} does not exist. Pass the s3://bucket/key URL of an archive.")
        return ByteStream(
            location, *size_and_etag, partial(store.stream, object_key, *size_and_etag), hash_name
        )
    archive_path = Path(location)
    if not archive_path.is_file():
        raise ValueError(f"{location} is not a file. Pass the path or s3:// URL of an archive.")
    file_stat = archive_path.stat()
    chunk_bytes = HEADER_CHUNK_BYTES if headers_only and not hash_name else CHUNK_BYTES
    open_chunks = partial(_file_chunks, archive_path, chunk_bytes)
    return ByteStream(location, file_stat.st_size, str(file_stat.st_mtime_ns), open_chunks, hash_name)


def _file_chunks(archive_path: Path, chunk_bytes: int, start_position: int) -> Iterator[bytes]:
    """Yield a file's content from a position in chunks. The last chunk may be shorter."""
    with open(archive_path, "rb", buffering=0) as archive_file:
        archive_file.seek(start_position)
        while chunk := archive_file.read(chunk_bytes):
            yield chunk


class ArchiveMember(NamedTuple):
    """Regular file or nested archive in an archive. Read a member's content before the next member's."""

    stream: ByteStream  # stream of the outermost archive
    display_name: str  # names of the archive and the member, for messages
    name: str  # path in the archive, for example n01440764/a.jpg
    offset: int  # the content's position in the outermost archive, in bytes
    size: int  # in bytes

    def read(self) -> bytes:
        """Return the member's content. The archive's stream moves to the end of the content."""
        self.stream.seek(self.offset)
        return self.stream.read(self.size)


class _HeaderReader:
    """File object from which tarfile reads an archive's headers. The file ends where the archive ends."""

    def __init__(self, archive: ArchiveMember):
        self.stream = archive.stream
        self.tell = archive.stream.tell
        self.archive_end = archive.offset + archive.size
        self.last_read = b""  # after the last header, archive_members() looks for the end mark here

    def seek(self, position: int) -> None:
        self.stream.seek(min(position, self.archive_end))

    def read(self, byte_count: int) -> bytes:
        """Read up to `byte_count` bytes of the archive. A damaged header may request too many bytes."""
        if not 0 <= byte_count <= MAX_HEADER_BYTES:
            raise tarfile.ReadError(f"an extended header has {byte_count:,} bytes")
        self.last_read = self.stream.read(min(byte_count, self.archive_end - self.tell()))
        return self.last_read


def archive_members(archive: ArchiveMember) -> Iterator[ArchiveMember]:
    """Yield the regular files in an archive in order, and skip folders.

    Members named *.tar are archives. Pass such a member to archive_members() to read the inner archive.

    Raises:
        ValueError: If the archive is truncated or damaged, or contains a link, a device, an absolute name, a
            name with .., or a member larger than MAX_IMAGE_BYTES. The message contains the names of the
            archive and the member.
    """
    archive.stream.seek(archive.offset)
    reader = _HeaderReader(archive)
    try:
        tar_file = tarfile.TarFile(fileobj=reader)  # type: ignore[arg-type]
        while (header := tar_file.next()) is not None:
            if not header.isdir():
                yield _checked_member(archive, header, reader.archive_end)
    except tarfile.TarError as error:
        damage_text = f"is truncated or damaged ({error})"
        raise ValueError(f"{archive.display_name} {damage_text}. {DOWNLOAD_AGAIN}.") from None
    # At an invalid header, tarfile stops without an error. A complete archive ends with a block of zeros.
    if reader.last_read != bytes(tarfile.BLOCKSIZE):
        damage = f"is truncated or damaged at byte {reader.tell():,}, because the end mark is missing"
        raise ValueError(f"{archive.display_name} {damage}. {DOWNLOAD_AGAIN}.")
    while remaining_bytes := reader.read(MAX_HEADER_BYTES):  # only zeros may follow the end mark
        if any(remaining_bytes):
            remedy = "Archives that were joined with cat can't be read. Pass each archive separately."
            raise ValueError(f"{archive.display_name} contains data after its end mark. {remedy}")


def _checked_member(archive: ArchiveMember, header: tarfile.TarInfo, archive_end: int) -> ArchiveMember:
    """Return the member that a header describes.

    Raises:
        ValueError: If the member has an unsafe name, is not a regular file, is too large or is truncated.
    """
    member_name, member_problem = header.name.removeprefix("./"), ""
    max_bytes = math.inf if member_name.endswith(".tar") else MAX_IMAGE_BYTES  # an inner archive may be large
    if not member_name.isprintable() or any(part in ("", ".", "..") for part in member_name.split("/")):
        member_problem = "is not a plain relative name. Absolute names and .. are not accepted"
    elif not header.isreg() or header.issparse():
        member_problem = "is a link, a device or another special file. Only regular files are accepted"
    elif not 0 <= header.size <= max_bytes:
        member_problem = f"has {header.size:,} bytes. The maximum is {max_bytes:,} bytes"
    if member_problem:
        shown_name = header.name if header.name.isprintable() and header.name else ascii(header.name)
        remedy = f"{DOWNLOAD_AGAIN}, or rebuild it without this file."
        raise ValueError(f"{archive.display_name}: {shown_name[:200]} {member_problem}. {remedy}")
    available_bytes = archive_end - header.offset_data
    if header.size > available_bytes:
        present = f"only {available_bytes:,} of the {header.size:,} bytes of {member_name}"
        raise ValueError(f"{archive.display_name} is truncated and contains {present}. {DOWNLOAD_AGAIN}.")
    member_display_name = f"{archive.display_name}: {member_name}"
    return ArchiveMember(archive.stream, member_display_name, member_name, header.offset_data, header.size)
