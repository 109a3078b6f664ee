"""Read tar archives from a disk or S3 as streams, member by member, without extracting the archives.

The module tarfile parses the headers. Only regular files with plain relative names are accepted. An archive
inside an archive is read in place, so offsets always refer to the outermost archive.
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

CHUNK_BYTES = 2**20  # bytes per read, which fit into the CPU cache
HEADER_BYTES = 4096  # bytes per read, if only headers are read
LARGEST_IMAGE_BYTES = 2**26
LARGEST_HEADER_BYTES = 2**20  # limit of a header with a long name or PAX records
GET_AGAIN = "download it again"


class Stream:
    """Sequential stream of bytes. The stream is a context manager.

    Attributes:
        where: name of the stream in messages.
        size: length in bytes.
        version: text that changes when the source is replaced, or None if unknown.

    Raises:
        ValueError: raised by a read if the stream ends early.
    """

    def __init__(
        self,
        where: str,
        size: int,
        version: str | None,
        chunks_from: Callable[[int], Iterator[bytes]],
        hash_name: str | None,
    ):
        """Open the stream.

        Args:
            where: name of the stream in messages.
            size: length in bytes.
            version: see the class.
            chunks_from: function that yields the content from a position on.
            hash_name: "md5" or "sha256" to hash all bytes, or None.
        """
        self.where, self.size, self.version = where, size, version
        self._chunks_from, self._chunks = chunks_from, chunks_from(0)
        self._chunk, self._start, self._at = b"", 0, 0  # current chunk, its position, index of its next byte
        self._hash = hashlib.new(hash_name, usedforsecurity=False) if hash_name else None
        self._hasher = ThreadPoolExecutor(1)  # hashlib releases the GIL
        self._hashing: Future[None] | None = None  # pending hash of the newest chunk

    def __enter__(self) -> "Stream":
        return self

    def __exit__(self, *_) -> None:
        self._chunks = iter(())  # this closes pending requests
        self._hasher.shutdown()

    @property
    def archive(self) -> "Member":
        """Whole stream as an archive, for members()."""
        return Member(self, self.where, "", 0, self.size)

    def tell(self) -> int:
        return self._start + self._at

    def read(self, count: int) -> bytes:
        """Read `count` bytes. At the end of the stream, return the remaining bytes."""
        pieces = []
        while count and (self._at < len(self._chunk) or self._next_chunk()):
            pieces.append(self._chunk[self._at : self._at + count])
            self._at += len(pieces[-1])
            count -= len(pieces[-1])
        return b"".join(pieces)

    def seek(self, position: int) -> None:
        """Move forward to a position. A long distance starts a new request, unless all bytes are hashed."""
        if self._hash is None and position > self._start + 2 * len(self._chunk):
            self._chunks = self._chunks_from(position)
            self._chunk, self._start, self._at = b"", position, 0
        while self.tell() < position and self.read(min(position - self.tell(), CHUNK_BYTES)):
            pass

    def digest(self) -> str:
        """Read the rest of the stream, and return the hash of the whole stream as hex digits."""
        self.seek(self.size)
        assert self._hash is not None
        if self._hashing is not None:
            self._hashing.result()
        return self._hash.hexdigest()

    def _next_chunk(self) -> bool:
        """Move to the next chunk. Return False at the end."""
        self._start += len(self._chunk)
        self._chunk, self._at = next(self._chunks, b""), 0
        if not self._chunk and self._start < self.size:
            raise ValueError(
                f"{self.where} ended at byte {self._start:,} of {self.size:,}. Don't change it during a read."
                " Run the same command again."
            )
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
        where: path or URL.
        hash_name: "md5" or "sha256" to hash all bytes, or None.
        store: client of the bucket, shared between many objects because creating a client takes 0.2 s.
        headers: True if only the headers of the archive will be read.

    Raises:
        ValueError: the file or object is missing, or access is denied.
    """
    if where.startswith("s3://"):
        bucket, _, key = where.removeprefix("s3://").partition("/")
        store = store or ObjectStore(f"s3://{bucket}")
        if not key or (size_and_etag := store.size_and_etag(key)) is None:
            raise ValueError(f"{where}: no such object. Give s3://bucket/key of an archive.")
        return Stream(where, *size_and_etag, partial(store.stream, key, *size_and_etag), hash_name)
    path = Path(where)
    if not path.is_file():
        raise ValueError(f"{where} is not a file. Give the path or s3:// URL of an archive.")
    stat, chunk_bytes = path.stat(), HEADER_BYTES if headers and not hash_name else CHUNK_BYTES
    chunks_from = partial(_file_chunks, path, chunk_bytes)
    return Stream(where, stat.st_size, str(stat.st_mtime_ns), chunks_from, hash_name)


def _file_chunks(path: Path, chunk_bytes: int, position: int) -> Iterator[bytes]:
    with open(path, "rb", buffering=0) as file:
        file.seek(position)
        while chunk := file.read(chunk_bytes):
            yield chunk


class Member(NamedTuple):
    """Regular file or archive in an archive. Read its content before reading the next member's content."""

    stream: Stream
    where: str  # names of the archive and the member, for messages
    name: str
    offset: int  # position of the content in the outermost archive
    size: int

    def read(self) -> bytes:
        self.stream.seek(self.offset)
        return self.stream.read(self.size)


class _Headers:
    """File object that tarfile reads headers from. The file ends at the end of the archive."""

    def __init__(self, archive: Member):
        self.stream, self.tell, self.end = archive.stream, archive.stream.tell, archive.offset + archive.size
        self.last = b""  # bytes returned by the last read

    def seek(self, position: int) -> None:
        self.stream.seek(min(position, self.end))

    def read(self, count: int) -> bytes:
        if not 0 <= count <= LARGEST_HEADER_BYTES:
            raise tarfile.ReadError(f"an extended header of {count:,} bytes")
        self.last = self.stream.read(min(count, self.end - self.tell()))
        return self.last


def members(archive: Member) -> Iterator[Member]:
    """Yield the regular files in an archive in order, and skip folders.

    Members named *.tar are archives, which can be passed to members() again.

    Raises:
        ValueError: the archive is truncated or damaged, or contains a link, a device, an absolute name, a
        name with .., or a member larger than LARGEST_IMAGE_BYTES. The message names archive and member.
    """
    archive.stream.seek(archive.offset)
    headers = _Headers(archive)
    try:
        tar = tarfile.TarFile(fileobj=headers)  # type: ignore[arg-type]
        while (header := tar.next()) is not None:
            if not header.isdir():
                yield _checked(archive, header, headers.end)
    except tarfile.TarError as error:
        raise ValueError(f"{archive.where} is truncated or damaged ({error}). Fix: {GET_AGAIN}") from None
    if headers.last != bytes(tarfile.BLOCKSIZE):  # tarfile stops at an invalid header without an error
        cause = f"it is truncated or damaged at byte {headers.tell():,}"
        raise ValueError(f"{archive.where} has no end mark: {cause}. Fix: {GET_AGAIN}")
    while rest := headers.read(LARGEST_HEADER_BYTES):
        if any(rest):
            raise ValueError(
                f"{archive.where} has content after its end mark. Archives can't be joined with cat."
                " Give them one by one."
            )


def _checked(archive: Member, header: tarfile.TarInfo, end: int) -> Member:
    name, problem = header.name.removeprefix("./"), ""
    most = math.inf if name.endswith(".tar") else LARGEST_IMAGE_BYTES
    if not name.isprintable() or any(part in ("", ".", "..") for part in name.split("/")):
        problem = "is not a plain relative name; absolute names and .. are refused"
    elif not header.isreg() or header.issparse():
        problem = "is a link, a device or another special file; only regular files are accepted"
    elif not 0 <= header.size <= most:
        problem = f"has {header.size:,} bytes; at most {most:,} are accepted"
    if problem:
        printed = header.name if header.name.isprintable() and header.name else ascii(header.name)
        raise ValueError(
            f"{archive.where}: {printed[:200]} {problem}. Fix: {GET_AGAIN}, or rebuild it without this file"
        )
    if header.offset_data + header.size > end:
        raise ValueError(
            f"{archive.where} is truncated: it ends at {end - header.offset_data:,} of the {header.size:,}"
            f" bytes of {name}. Fix: {GET_AGAIN}"
        )
    return Member(archive.stream, f"{archive.where}: {name}", name, header.offset_data, header.size)
