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
HEADER_BYTES = 4096  # bytes per read if only headers are read
LARGEST_IMAGE_BYTES = 2**26
LARGEST_HEADER_BYTES = 2**20  # maximum size of a header with a long name or PAX records
GET_AGAIN = "Download the archive again"


class Stream:
    """Sequential byte stream that can be used as a context manager.

    Attributes:
        where: The stream's name in messages.
        size: The stream's length in bytes.
        version: Text that changes when the source is replaced, or None if unknown.

    Raises:
        ValueError: If the stream ends early during a read.
    """

    def __init__(
        self,
        where: str,
        size: int,
        version: str | None,
        chunks_from: Callable[[int], Iterator[bytes]],
        hash_name: str | None,
    ):
        """Open the stream at its beginning.

        Args:
            where: The stream's name in messages.
            size: The stream's length in bytes.
            version: Text that changes with the source, or None.
            chunks_from: Function that yields the content, beginning at a position.
            hash_name: "md5" or "sha256" to hash all bytes, or None.
        """
        self.where, self.size, self.version = where, size, version
        self._chunks_from, self._chunks = chunks_from, chunks_from(0)
        # Current chunk, its position in the stream, and the index of its next byte
        self._chunk, self._chunk_position, self._next_index = b"", 0, 0
        self._hash = hashlib.new(hash_name, usedforsecurity=False) if hash_name else None
        self._hasher = ThreadPoolExecutor(1)  # hashes in a thread, because hashlib releases the GIL
        self._hashing: Future[None] | None = None  # pending hash of the latest chunk

    def __enter__(self) -> "Stream":
        return self

    def __exit__(self, *_) -> None:
        self._chunks = iter(())  # closes pending requests
        self._hasher.shutdown()

    @property
    def archive(self) -> "Member":
        """The whole stream as an archive, to pass to members()."""
        return Member(self, self.where, "", 0, self.size)

    def tell(self) -> int:
        return self._chunk_position + self._next_index

    def read(self, count: int) -> bytes:
        """Read `count` bytes. At the end of the stream, return the remaining bytes."""
        slices = []
        while count and (self._next_index < len(self._chunk) or self._next_chunk()):
            slices.append(self._chunk[self._next_index : self._next_index + count])
            self._next_index += len(slices[-1])
            count -= len(slices[-1])
        return b"".join(slices)

    def seek(self, position: int) -> None:
        """Move forward to a position.

        Start a new request for a long distance, unless all bytes are hashed.
        """
        if self._hash is None and position > self._chunk_position + 2 * len(self._chunk):
            self._chunks = self._chunks_from(position)
            self._chunk, self._chunk_position, self._next_index = b"", position, 0
        while self.tell() < position and self.read(min(position - self.tell(), CHUNK_BYTES)):
            pass

    def digest(self) -> str:
        """Read the rest of the stream, and return the whole stream's hash as hex digits."""
        self.seek(self.size)
        assert self._hash is not None
        if self._hashing is not None:
            self._hashing.result()
        return self._hash.hexdigest()

    def _next_chunk(self) -> bool:
        """Move to the next chunk. Return False at the end of the stream."""
        self._chunk_position += len(self._chunk)
        self._chunk, self._next_index = next(self._chunks, b""), 0
        if not self._chunk and self._chunk_position < self.size:
            remedy = "Do not change the source during a read, and run the same command again."
            end = f"at byte {self._chunk_position:,} of {self.size:,}"
            raise ValueError(f"{self.where} ended early, {end}. {remedy}")
        if self._hash is not None:
            if self._hashing is not None:
                self._hashing.result()
            self._hashing = self._hasher.submit(self._hash.update, self._chunk)
        return bool(self._chunk)


def open_stream(
    where: str, hash_name: str | None = None, store: ObjectStore | None = None, headers: bool = False
) -> Stream:
    """Open a file or `s3://bucket/key`. An interrupted download resumes with a range request.

    Args:
        where: Path or s3:// URL.
        hash_name: "md5" or "sha256" to hash all bytes, or None.
        store: Bucket client. Share the client between objects, because creating a client takes 0.2 s.
        headers: True if only the archive's headers will be read.

    Raises:
        ValueError: If the file or object is missing, or if access is denied.
    """
    if where.startswith("s3://"):
        bucket, _, key = where.removeprefix("s3://").partition("/")
        store = store or ObjectStore(f"s3://{bucket}")
        if not key or (size_and_etag := store.size_and_etag(key)) is None:
            raise ValueError(f"{where} does not exist. Pass the s3://bucket/key URL of an archive.")
        return Stream(where, *size_and_etag, partial(store.stream, key, *size_and_etag), hash_name)
    path = Path(where)
    if not path.is_file():
        raise ValueError(f"{where} is not a file. Pass the path or s3:// URL of an archive.")
    stat = path.stat()
    chunk_bytes = HEADER_BYTES if headers and not hash_name else CHUNK_BYTES
    chunks_from = partial(_file_chunks, path, chunk_bytes)
    return Stream(where, stat.st_size, str(stat.st_mtime_ns), chunks_from, hash_name)


def _file_chunks(path: Path, chunk_bytes: int, position: int) -> Iterator[bytes]:
    with open(path, "rb", buffering=0) as file:
        file.seek(position)
        while chunk := file.read(chunk_bytes):
            yield chunk


class Member(NamedTuple):
    """Regular file or nested archive in an archive. Read a member's content before the next member's."""

    stream: Stream
    where: str  # names of the archive and the member, for messages
    name: str
    offset: int  # the content's position in the outermost archive, in bytes
    size: int

    def read(self) -> bytes:
        self.stream.seek(self.offset)
        return self.stream.read(self.size)


class _HeaderReader:
    """File object from which tarfile reads an archive's headers. The file ends where the archive ends."""

    def __init__(self, archive: Member):
        self.stream, self.tell = archive.stream, archive.stream.tell
        self.end = archive.offset + archive.size
        self.last = b""  # content of the most recent read

    def seek(self, position: int) -> None:
        self.stream.seek(min(position, self.end))

    def read(self, count: int) -> bytes:
        if not 0 <= count <= LARGEST_HEADER_BYTES:
            raise tarfile.ReadError(f"an extended header has {count:,} bytes")
        self.last = self.stream.read(min(count, self.end - self.tell()))
        return self.last


def members(archive: Member) -> Iterator[Member]:
    """Yield the regular files in an archive in order, and skip folders.

    Members named *.tar are archives. Pass such a member to members() to read the inner archive.

    Raises:
        ValueError: If the archive is truncated or damaged, or contains a link, a device, an absolute name, a
            name with .., or a member larger than LARGEST_IMAGE_BYTES. The message contains the names of the
            archive and the member.
    """
    archive.stream.seek(archive.offset)
    headers = _HeaderReader(archive)
    try:
        tar = tarfile.TarFile(fileobj=headers)  # type: ignore[arg-type]
        while (header := tar.next()) is not None:
            if not header.isdir():
                yield _checked_member(archive, header, headers.end)
    except tarfile.TarError as error:
        raise ValueError(f"{archive.where} is truncated or damaged ({error}). {GET_AGAIN}.") from None
    if headers.last != bytes(tarfile.BLOCKSIZE):  # tarfile stops at an invalid header without an error
        damage = f"is truncated or damaged at byte {headers.tell():,}, because the end mark is missing"
        raise ValueError(f"{archive.where} {damage}. {GET_AGAIN}.")
    while remaining_bytes := headers.read(LARGEST_HEADER_BYTES):
        if any(remaining_bytes):
            remedy = "Archives that were joined with cat can't be read. Pass each archive separately."
            raise ValueError(f"{archive.where} contains data after its end mark. {remedy}")


def _checked_member(archive: Member, header: tarfile.TarInfo, archive_end: int) -> Member:
    name, problem = header.name.removeprefix("./"), ""
    max_bytes = math.inf if name.endswith(".tar") else LARGEST_IMAGE_BYTES
    if not name.isprintable() or any(part in ("", ".", "..") for part in name.split("/")):
        problem = "is not a plain relative name. Absolute names and .. are not accepted"
    elif not header.isreg() or header.issparse():
        problem = "is a link, a device or another special file. Only regular files are accepted"
    elif not 0 <= header.size <= max_bytes:
        problem = f"has {header.size:,} bytes. The maximum is {max_bytes:,} bytes"
    if problem:
        shown = header.name if header.name.isprintable() and header.name else ascii(header.name)
        remedy = f"{GET_AGAIN}, or rebuild it without this file."
        raise ValueError(f"{archive.where}: {shown[:200]} {problem}. {remedy}")
    if header.offset_data + header.size > archive_end:
        present = f"only {archive_end - header.offset_data:,} of the {header.size:,} bytes of {name}"
        raise ValueError(f"{archive.where} is truncated and contains {present}. {GET_AGAIN}.")
    return Member(archive.stream, f"{archive.where}: {name}", name, header.offset_data, header.size)
