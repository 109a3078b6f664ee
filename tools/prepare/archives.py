"""Tar archives of images, read member by member.

Nothing is extracted. Only regular files with plain relative names are accepted. An archive within an archive
is read in place. Supported are ustar, GNU's long names, and the paths and sizes of PAX.
"""

import math
import os
import re
from collections.abc import Iterator
from io import FileIO
from pathlib import Path
from typing import NamedTuple

import numpy as np

from tools.prepare.inputs import CHUNK_BYTES, GET_AGAIN, Input, open_input

BLOCK = 512  # bytes of a header; contents are padded to a multiple
END = bytes(BLOCK)
LARGEST_IMAGE_BYTES = 2**26
LARGEST_EXTENSION_BYTES = 2**20  # a long name, or PAX records
REGULAR, FOLDER, EXTENSIONS = (b"0", b"\0", b"7"), b"5", (b"x", b"g", b"L", b"K")
REFUSED = {
    b"1": "a hard link",
    b"2": "a symbolic link",
    b"3": "a character device",
    b"4": "a block device",
    b"6": "a fifo",
    b"S": "a sparse file",
}
SIZE = re.compile(rb"[0-7]{11}[\0 ]")  # in a plain header
PLAIN = np.zeros(256, bool)
PLAIN[list(b"abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789_-.")] = True


class TarMember:
    """A regular file in an archive, or an inner archive. Its content must be read before the next member."""

    __slots__ = ("archive", "end", "name", "offset", "size", "stream")

    def __init__(self, archive: "Input | TarMember", name: str, offset: int, size: int):
        self.archive = archive
        self.stream: Input = archive.stream
        self.name = name
        self.offset = offset  # of the content in the outermost archive
        self.size = size
        self.end = offset + size

    @property
    def where(self) -> str:
        return f"{self.archive.where}: {self.name}"

    @property
    def next(self) -> int:
        """The position of the next member in its archive, from which skip_to() lets a later pass continue."""
        return min(self.end + -self.end % BLOCK, self.archive.end)

    def read(self) -> bytes:
        """Reads the whole content. Once only."""
        assert self.stream.position == self.offset
        return self.stream.read(self.size)


def members(archive: Input | TarMember, largest_bytes: int = LARGEST_IMAGE_BYTES) -> Iterator[TarMember]:
    """Yields the regular files of an archive, in order, from its stream's position on.

    Members named *.tar are archives, for members(member), and may be larger than `largest_bytes`. Folders are
    skipped. Raises ValueError, with the names of archive and member, for links, devices, fifos, sparse files,
    absolute names, names with .., oversized files, and truncated or damaged archives.
    """
    stream = archive.stream
    given: dict[str, bytes] = {}
    while (header := _next_header(archive)) is not None:
        if header[156:157] in EXTENSIONS:
            given |= _extension(archive, header)
            continue
        member = _member(archive, header, given, largest_bytes)
        given = {}
        if member is not None:
            yield member
            stream.skip_to(member.next)
    while rest := stream.read(min(CHUNK_BYTES, archive.end - stream.position)):
        if rest != bytes(len(rest)):
            raise ValueError(
                f"{archive.where} has content after its end mark: archives can't be joined by cat; give them"
                " one by one"
            )


def _next_header(archive: Input | TarMember) -> bytes | None:
    """Reads a header and checks its checksum. None at the archive's end mark."""
    stream = archive.stream
    position = stream.position
    header = stream.read(min(BLOCK, archive.end - position))
    if len(header) < BLOCK:
        raise ValueError(f"{archive.where} has no end mark: it is truncated; {GET_AGAIN}")
    if header == END:
        return None
    try:
        right = _number(header[148:156]) == sum(header) - sum(header[148:156]) + 8 * ord(" ")
    except ValueError:
        right = False
    if not right or header[257:262] != b"ustar":
        raise ValueError(
            f"{archive.where} has no tar header where one is expected, at byte {position:,} of the input: it"
            f" is damaged, or no tar archive; {GET_AGAIN}"
        )
    return header


def _number(field: bytes) -> int:
    """Parses octal digits, or the base-256 form of GNU and star. Raises ValueError."""
    if field[0] == 0x80:
        return int.from_bytes(field[1:])
    text = field.strip(b" \0") or b"0"
    if not text.isdigit():
        raise ValueError("no number")
    return int(text, 8)


def _member(
    archive: Input | TarMember, header: bytes, given: dict[str, bytes], largest_bytes: int
) -> TarMember | None:
    """Makes the member of a header and the extended headers before it; None for a folder."""
    path, kind = given.get("path") or _path(header), header[156:157]
    if kind == FOLDER and path in (b".", b"./"):
        return None
    name = _plain(archive, path.removesuffix(b"/") if kind == FOLDER else path)
    if kind == FOLDER:
        _sized(archive, name, header, {}, 0)
        return None
    if kind not in REGULAR:
        what = REFUSED.get(kind, f"of the unknown kind {kind!r}")
        raise _refused(archive, name, f"is {what}, and only regular files are taken from an archive")
    return _sized(archive, name, header, given, math.inf if name.endswith(".tar") else largest_bytes)


def _sized(
    archive: Input | TarMember, name: str, header: bytes, given: dict[str, bytes], largest_bytes: float
) -> TarMember:
    """Makes the member whose content begins at the stream's position, after a check of its size."""
    try:
        size = int(given["size"]) if "size" in given else _number(header[124:136])
    except ValueError:
        raise _refused(archive, name, "has a size that is no number") from None
    position = archive.stream.position
    if not 0 <= size <= largest_bytes:
        raise _refused(archive, name, f"has {size:,} bytes, where at most {largest_bytes:,} are taken")
    if position + size > archive.end:
        raise ValueError(
            f"{archive.where} is truncated: it ends at {archive.end - position:,} of the {size:,} bytes of"
            f" {name}; {GET_AGAIN}"
        )
    return TarMember(archive, name, position, size)


def _path(header: bytes) -> bytes:
    name = header[:100].partition(b"\0")[0]
    if header[257:263] == b"ustar\0" and header[345]:  # GNU uses the field otherwise
        return header[345:500].partition(b"\0")[0] + b"/" + name
    return name


def _plain(archive: Input | TarMember, path: bytes) -> str:
    """Decodes a path and checks that it is plain and relative; a leading ./ is removed."""
    text = path.decode(errors="surrogateescape")
    name = text.removeprefix("./")
    if not name.isprintable() or any(part in ("", ".", "..") for part in name.split("/")):
        raise _refused(archive, text, "is no plain relative name: absolute names and .. are not allowed")
    return name


def _extension(archive: Input | TarMember, header: bytes) -> dict[str, bytes]:
    """Parses an extended header: the next member's path or size, among others."""
    kind, stream = header[156:157], archive.stream
    member = _sized(archive, "an extended header", header, {}, LARGEST_EXTENSION_BYTES)
    content = member.read()
    stream.skip_to(member.next)
    if kind == b"L":
        return {"path": content.rstrip(b"\0")}
    records = {} if kind == b"K" else _pax_records(content)  # K is a link's name: its member is refused
    if records is None or (kind == b"g" and records.keys() & {"path", "size"}):
        raise _refused(archive, "an extended header", "has records that are not supported")
    if any(key.startswith("GNU.sparse") for key in records):
        raise _refused(archive, _path(header).decode(errors="replace"), f"is {REFUSED[b'S']}")
    return records if kind == b"x" else {}


def _pax_records(content: bytes) -> dict[str, bytes] | None:
    """Parses lines of `<length of the line> <key>=<value>`; None when they have another form."""
    records = {}
    while content:
        digits, _, _ = content.partition(b" ")
        length = int(digits) if digits.isdigit() and len(digits) < 8 else 0
        key, equals, value = content[len(digits) + 1 : length].partition(b"=")
        if not equals or not value.endswith(b"\n") or length > len(content):
            return None
        records[key.decode(errors="replace")] = value[:-1]
        content = content[length:]
    return records


def _refused(archive: Input | TarMember, name: str, why: str) -> ValueError:
    shown = name if name.isprintable() and 0 < len(name) < 200 else ascii(name[:200])
    return ValueError(f"{archive.where}: {shown} {why}; {GET_AGAIN}, or rebuild it without")


class Listing(NamedTuple):
    """The regular files of one archive on a local disk."""

    archive: str | None  # the inner archive's name; None for the outer archive
    names: list[str]
    offsets: np.ndarray  # int64 [files], of the contents in the outer archive
    sizes: np.ndarray  # int64 [files], bytes


def scan(path: Path, largest_bytes: int = LARGEST_IMAGE_BYTES) -> Iterator[Listing]:
    """Lists the files that members() finds, from the headers alone: first those of the outer archive, if it
    has any, then those of each inner archive, in order. Raises ValueError as members() does."""
    with open_input(path) as stream:
        end = stream.size
    with open(path, "rb", buffering=0) as file:
        outer = _list(file, largest_bytes, None, 0, end)
        inner = np.array([name.endswith(".tar") for name in outer.names], dtype=bool)
        if not inner.all():
            names = [name for name in outer.names if not name.endswith(".tar")]
            yield Listing(None, names, outer.offsets[~inner], outer.sizes[~inner])
        for i in np.flatnonzero(inner):
            start = int(outer.offsets[i])
            yield _list(file, largest_bytes, outer.names[i], start, start + int(outer.sizes[i]))


def _list(file: FileIO, largest_bytes: int, name: str | None, start: int, end: int) -> Listing:
    """Lists one archive, which lies in the file from start to end."""
    if (found := _list_plain(file.fileno(), start, end, largest_bytes)) is not None:
        return Listing(name, *found)
    with open_input(file.name) as stream:  # slower; knows every kind of header, and refuses
        stream.skip_to(start)
        archive = stream if name is None else TarMember(stream, name, start, end - start)
        files = [(file.name, file.offset, file.size) for file in members(archive, largest_bytes)]
    names, offsets, sizes = zip(*files, strict=True) if files else ((), (), ())
    return Listing(name, list(names), np.array(offsets, np.int64), np.array(sizes, np.int64))


def _list_plain(
    file: int, start: int, end: int, largest_bytes: int
) -> tuple[list[str], np.ndarray, np.ndarray] | None:
    """Returns names, offsets and sizes when every header is a plain one: of a regular file, with a name of at
    most 100 letters, digits, _, - and dots. None in every other case."""
    headers: list[bytes] = []
    offsets: list[int] = []
    contents: list[int] = []  # bytes
    at = start
    while (header := os.pread(file, BLOCK, at)) != END:
        if at + BLOCK > end or not SIZE.fullmatch(header, 124, 136):
            return None
        headers.append(header)
        offsets.append(at + BLOCK)
        contents.append(int(header[124:135], 8))
        at += BLOCK + contents[-1] + -contents[-1] % BLOCK
    if not headers or not BLOCK <= end - at <= CHUNK_BYTES or any(os.pread(file, end - at, at)):
        return None
    names = [header[:100].rstrip(b"\0").decode(errors="replace") for header in headers]
    if not _all_plain(np.frombuffer(b"".join(headers), np.uint8).reshape(-1, BLOCK)):
        return None
    sizes = np.array(contents)
    images = np.array([not name.endswith(".tar") for name in names])
    if (sizes[images] > largest_bytes).any():
        return None
    return names, np.array(offsets), sizes


def _all_plain(headers: np.ndarray) -> bool:
    """True when all headers, uint8 [files, BLOCK], have right checksums and are plain."""
    names = headers[:, :100]
    digits = headers[:, 148:154] - ord("0")  # a byte below "0" wraps to a large one
    sums = headers.sum(1, dtype=np.int64) - headers[:, 148:156].sum(1, dtype=np.int64) + 8 * ord(" ")
    return bool(
        (PLAIN[names] == (names != 0)).all()
        and ((names[:, 1:] == 0) | (names[:, :-1] != 0)).all()  # zeros after the name
        and (names[:, 0] != 0).all()
        and (names[:, 0] != ord(".")).all()
        and (headers[:, 156] == ord("0")).all()
        and (headers[:, 257:262] == np.frombuffer(b"ustar", np.uint8)).all()
        and (headers[:, 345] == 0).all()  # no prefix of the path
        and (digits < 8).all()
        and (digits @ (8 ** np.arange(5, -1, -1)) == sums).all()
        and (headers[:, 154] == 0).all()
    )
