"""Tar archives as streams, from a disk or from S3, read member by member. Nothing is extracted.

tarfile parses the headers. Only regular files with plain relative names are accepted. An archive within an
archive is read in place, so that offsets are those of the outermost one.
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

CHUNK_BYTES = 2**20  # one read; fits into the processor's cache
HEADER_BYTES = 4096  # one read where only headers are
LARGEST_IMAGE_BYTES = 2**26
LARGEST_HEADER_BYTES = 2**20  # a long name, or PAX records
GET_AGAIN = "get it again from where it was published"


class Stream:
    """A sequential stream of bytes; a context manager.

    where: its name in messages. version: changes when the source is replaced. Reads raise ValueError when the
    stream ends early.
    """

    def __init__(
        self,
        where: str,
        size: int,
        version: str | None,
        chunks_from: Callable[[int], Iterator[bytes]],
        hash_name: str | None,
    ):
        """chunks_from: yields the content from a position on. hash_name: "md5" or "sha256", of all bytes."""
        self.where, self.size, self.version = where, size, version
        self._chunks_from, self._chunks = chunks_from, chunks_from(0)
        self._chunk, self._start, self._at = b"", 0, 0  # the current chunk, its position, the next byte in it
        self._hash = hashlib.new(hash_name, usedforsecurity=False) if hash_name else None
        self._hasher = ThreadPoolExecutor(1)  # hashlib releases the GIL
        self._hashing: Future[None] | None = None  # of the newest chunk

    def __enter__(self) -> "Stream":
        return self

    def __exit__(self, *_) -> None:
        self._chunks = iter(())  # ends requests that are under way
        self._hasher.shutdown()

    @property
    def archive(self) -> "Member":
        """All of it, for members()."""
        return Member(self, self.where, "", 0, self.size)

    def tell(self) -> int:
        return self._start + self._at

    def read(self, count: int) -> bytes:
        """Read `count` bytes; fewer only at the end."""
        pieces = []
        while count and (self._at < len(self._chunk) or self._next_chunk()):
            pieces.append(self._chunk[self._at : self._at + count])
            self._at += len(pieces[-1])
            count -= len(pieces[-1])
        return b"".join(pieces)

    def seek(self, position: int) -> None:
        """Move forward to a position, by a new request unless it is near, or every byte is hashed."""
        if self._hash is None and position > self._start + 2 * len(self._chunk):
            self._chunks = self._chunks_from(position)
            self._chunk, self._start, self._at = b"", position, 0
        while self.tell() < position and self.read(min(position - self.tell(), CHUNK_BYTES)):
            pass

    def digest(self) -> str:
        """Read the rest, and returns the hash of the whole stream as hex."""
        self.seek(self.size)
        assert self._hash is not None
        if self._hashing is not None:
            self._hashing.result()
        return self._hash.hexdigest()

    def _next_chunk(self) -> bool:
        """Move to the next chunk. False at the end."""
        self._start += len(self._chunk)
        self._chunk, self._at = next(self._chunks, b""), 0
        if not self._chunk and self._start < self.size:
            raise ValueError(
                f"{self.where} ended at byte {self._start:,} of {self.size:,}: leave it alone while it is"
                " read, and run the same command again"
            )
        if self._hash is not None:
            if self._hashing is not None:
                self._hashing.result()
            self._hashing = self._hasher.submit(self._hash.update, self._chunk)
        return bool(self._chunk)


def open_stream(
    where: str, hash_name: str | None = None, store: ObjectStore | None = None, headers: bool = False
) -> Stream:
    """Open a file or `s3://bucket/key`, which is resumed by ranges after a cut.

    store: of the bucket, for many objects, as a client takes 0.2 s to make. headers: members are listed
    rather than read. Raises ValueError when the file or object is missing or access is denied.
    """
    if where.startswith("s3://"):
        bucket, _, key = where.removeprefix("s3://").partition("/")
        store = store or ObjectStore(f"s3://{bucket}")
        if not key or (found := store.size_and_etag(key)) is None:
            raise ValueError(f"{where}: there is no such object: give s3://bucket/key of an archive")
        return Stream(where, *found, partial(store.stream, key, *found), hash_name)
    path = Path(where)
    if not path.is_file():
        raise ValueError(f"{where} is no file: give the path or s3:// url of an archive")
    stat, chunk_bytes = path.stat(), HEADER_BYTES if headers and not hash_name else CHUNK_BYTES
    chunks_from = partial(_file_chunks, path, chunk_bytes)
    return Stream(where, stat.st_size, str(stat.st_mtime_ns), chunks_from, hash_name)


def _file_chunks(path: Path, chunk_bytes: int, position: int) -> Iterator[bytes]:
    with open(path, "rb", buffering=0) as file:
        file.seek(position)
        while chunk := file.read(chunk_bytes):
            yield chunk


class Member(NamedTuple):
    """A regular file in an archive, or an archive itself. Its content must be read before the next member."""

    stream: Stream
    where: str  # the names of the archive and the member, in messages
    name: str
    offset: int  # of the content in the outermost archive
    size: int

    def read(self) -> bytes:
        self.stream.seek(self.offset)
        return self.stream.read(self.size)


class _Headers:
    """An archive as a file for tarfile, which reads headers alone. It ends where the archive does."""

    def __init__(self, archive: Member):
        self.stream, self.tell, self.end = archive.stream, archive.stream.tell, archive.offset + archive.size
        self.last = b""  # read

    def seek(self, position: int) -> None:
        self.stream.seek(min(position, self.end))

    def read(self, count: int) -> bytes:
        if not 0 <= count <= LARGEST_HEADER_BYTES:
            raise tarfile.ReadError(f"an extended header of {count:,} bytes")
        self.last = self.stream.read(min(count, self.end - self.tell()))
        return self.last


def members(archive: Member) -> Iterator[Member]:
    """Yield the regular files of an archive, in order. Members named *.tar are archives, for members().

    Folders are skipped. Raises ValueError, with the names of archive and member, for links, devices, absolute
    names, names with .., members above LARGEST_IMAGE_BYTES, and truncated or damaged archives.
    """
    archive.stream.seek(archive.offset)
    headers = _Headers(archive)
    try:
        tar = tarfile.TarFile(fileobj=headers)  # type: ignore[arg-type]
        while (header := tar.next()) is not None:
            if not header.isdir():
                yield _checked(archive, header, headers.end)
    except tarfile.TarError as error:
        raise ValueError(f"{archive.where} is truncated or damaged ({error}); {GET_AGAIN}") from None
    if headers.last != bytes(tarfile.BLOCKSIZE):  # tarfile ends quietly at what is no header
        at = f"it is truncated or damaged at byte {headers.tell():,}"
        raise ValueError(f"{archive.where} has no end mark: {at}; {GET_AGAIN}")
    while rest := headers.read(LARGEST_HEADER_BYTES):
        if any(rest):
            raise ValueError(
                f"{archive.where} has content after its end mark: archives can't be joined by cat; give them"
                " one by one"
            )


def _checked(archive: Member, header: tarfile.TarInfo, end: int) -> Member:
    name, why = header.name.removeprefix("./"), ""
    most = math.inf if name.endswith(".tar") else LARGEST_IMAGE_BYTES
    if not name.isprintable() or any(part in ("", ".", "..") for part in name.split("/")):
        why = "is no plain relative name: absolute names and .. are not allowed"
    elif not header.isreg() or header.issparse():
        why = "is a link, a device or another special file, and only regular files are taken from an archive"
    elif not 0 <= header.size <= most:
        why = f"has {header.size:,} bytes, where at most {most:,} are taken"
    if why:
        shown = header.name if header.name.isprintable() and header.name else ascii(header.name)
        raise ValueError(f"{archive.where}: {shown[:200]} {why}; {GET_AGAIN}, or rebuild it without")
    if header.offset_data + header.size > end:
        raise ValueError(
            f"{archive.where} is truncated: it ends at {end - header.offset_data:,} of the {header.size:,}"
            f" bytes of {name}; {GET_AGAIN}"
        )
    return Member(archive.stream, f"{archive.where}: {name}", name, header.offset_data, header.size)
