"""Tar archives of images, read member by member.

Nothing is extracted. Only regular files with plain relative names come out, and an archive in an archive is
read in place. ustar, GNU's long names, and the paths and sizes of PAX are understood.
"""

import math
import os
import re
from collections.abc import Iterator
from io import FileIO
from pathlib import Path
from typing import NamedTuple

import numpy as np

from common.prepare.inputs import CHUNK_BYTES, GET_AGAIN, Input, open_input

BLOCK = 512  # bytes: a header, and what contents are padded to
END = bytes(BLOCK)
LARGEST_IMAGE_BYTES = 2**26
LARGEST_EXTENSION_BYTES = 2**20  # of a long name, or of PAX records
REGULAR, FOLDER, EXTENSIONS = (b"0", b"\0", b"7"), b"5", (b"x", b"g", b"L", b"K")
REFUSED = {
    b"1": "a hard link",
    b"2": "a symbolic link",
    b"3": "a character device",
    b"4": "a block device",
    b"6": "a fifo",
    b"S": "a sparse file",
}
SIZE = re.compile(rb"[0-7]{11}[\0 ]")  # in the plainest header
PLAIN = np.zeros(256, bool)
PLAIN[list(b"abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789_-.")] = True


class TarMember:
    """A regular file in an archive; an inner archive, too. Read it before its successor is asked for."""

    __slots__ = ("archive", "end", "name", "offset", "size", "stream")

    def __init__(self, archive: "Input | TarMember", name: str, offset: int, size: int):
        self.archive, self.stream = archive, archive.stream
        self.name = name
        self.offset = offset  # of its content in the input, also within an inner archive
        self.size = size
        self.end = offset + size

    @property
    def where(self) -> str:
        return f"{self.archive.where}: {self.name}"

    @property
    def next(self) -> int:
        """The position of what follows in its archive: where a later pass may go on, with skip_to()."""
        return min(self.end + -self.end % BLOCK, self.archive.end)

    def read(self) -> bytes:
        """Its whole content, once."""
        assert self.stream.position == self.offset
        return self.stream.read(self.size)


def members(archive: Input | TarMember, largest_bytes: int = LARGEST_IMAGE_BYTES) -> Iterator[TarMember]:
    """The regular files, in order, of an archive that begins at its stream's position, or goes on there.

    Members named *.tar may be larger than `largest_bytes`: they are archives again, for members(member).
    Folders are passed over. Raises ValueError with the names of archive and member for links, devices, fifos,
    sparse files, absolute names and those with .., what is too large, and a truncated or damaged archive.
    """
    stream, given = archive.stream, {}
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
                f"{archive.where} goes on behind the mark of its end: archives can't be put together by cat;"
                " give them one by one"
            )


def _next_header(archive: Input | TarMember) -> bytes | None:
    """With the right checksum; None at the mark of the archive's end."""
    stream = archive.stream
    position = stream.position
    header = stream.read(min(BLOCK, archive.end - position))
    if len(header) < BLOCK:
        raise ValueError(
            f"{archive.where} ends without the mark of an archive's end: it is truncated; {GET_AGAIN}"
        )
    if header == END:
        return None
    try:
        right = _number(header[148:156]) == sum(header) - sum(header[148:156]) + 8 * ord(" ")
    except ValueError:
        right = False
    if not right or header[257:262] != b"ustar":
        raise ValueError(
            f"{archive.where} has no tar header where one must be, at byte {position:,} of the input: it is"
            f" damaged, or no tar archive; {GET_AGAIN}"
        )
    return header


def _number(field: bytes) -> int:
    """Octal digits, or GNU's and star's form for large numbers. Raises ValueError."""
    if field[0] == 0x80:
        return int.from_bytes(field[1:])
    text = field.strip(b" \0") or b"0"
    if not text.isdigit():
        raise ValueError("no number")
    return int(text, 8)


def _member(
    archive: Input | TarMember, header: bytes, given: dict[str, bytes], largest_bytes: int
) -> TarMember | None:
    """What the header, and the extended ones before it, describe; None for a folder."""
    name, kind = given.get("path") or _path(header), header[156:157]
    if kind == FOLDER and name in (b".", b"./"):
        return None
    name = _plain(archive, name.removesuffix(b"/") if kind == FOLDER else name)
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
    """The member whose content begins at the stream's position, once its size is one that can be."""
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
    if header[257:263] == b"ustar\0" and header[345]:  # GNU has other things there
        return header[345:500].partition(b"\0")[0] + b"/" + name
    return name


def _plain(archive: Input | TarMember, path: bytes) -> str:
    """The path as text: names with single slashes between, without ./ before them."""
    text = path.decode(errors="surrogateescape")
    name = text.removeprefix("./")
    if not name.isprintable() or any(part in ("", ".", "..") for part in name.split("/")):
        raise _refused(archive, text, "is no plain relative name: none may be absolute, or have .. in it")
    return name


def _extension(archive: Input | TarMember, header: bytes) -> dict[str, bytes]:
    """What an extended header says of the next member: its path or size, among others."""
    kind, stream = header[156:157], archive.stream
    member = _sized(archive, "an extended header", header, {}, LARGEST_EXTENSION_BYTES)
    content = member.read()
    stream.skip_to(member.next)
    if kind == b"L":
        return {"path": content.rstrip(b"\0")}
    records = _pax_records(content) if kind in (b"x", b"g") else {}  # K: the link itself is refused
    if records is None or (kind == b"g" and records.keys() & {"path", "size"}):
        raise _refused(archive, "an extended header", "has records that are not understood")
    if any(key.startswith("GNU.sparse") for key in records):
        raise _refused(archive, _path(header).decode(errors="replace"), f"is {REFUSED[b'S']}")
    return records if kind == b"x" else {}


def _pax_records(content: bytes) -> dict[str, bytes] | None:
    """Of lines `<length of the line> <key>=<value>`; None when they are not."""
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
    return ValueError(f"{archive.where}: {shown} {why}; {GET_AGAIN}, or make it again without")


class Listing(NamedTuple):
    """The regular files of one archive on a disk."""

    archive: str | None  # the inner archive's name; None for what lies in the outer one itself
    names: list[str]
    offsets: np.ndarray  # int64 [files], of the contents in the outer archive
    sizes: np.ndarray  # int64 [files], bytes


def scan(path: Path, largest_bytes: int = LARGEST_IMAGE_BYTES) -> Iterator[Listing]:
    """What members() finds in a file, from the headers alone: first what lies in the archive itself, if
    anything does, then each inner archive, in order. The same refusals."""
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
    """One archive, which lies in the file from start to end."""
    if (found := _list_plainest(file.fileno(), start, end, largest_bytes)) is not None:
        return Listing(name, *found)
    with open_input(file.name) as stream:  # slower, and knows every kind of header and what to refuse
        stream.skip_to(start)
        archive = stream if name is None else TarMember(stream, name, start, end - start)
        files = [(file.name, file.offset, file.size) for file in members(archive, largest_bytes)]
    names, offsets, sizes = zip(*files, strict=True) if files else ((), (), ())
    return Listing(name, list(names), np.array(offsets, np.int64), np.array(sizes, np.int64))


def _list_plainest(
    file: int, start: int, end: int, largest_bytes: int
) -> tuple[list[str], np.ndarray, np.ndarray] | None:
    """Names, offsets and sizes, where all is well and each header is a regular file's with a name of letters,
    digits and _ - . below 100; None in every other case."""
    headers, offsets, sizes, at = [], [], [], start
    while (header := os.pread(file, BLOCK, at)) != END:
        if at + BLOCK > end or not SIZE.fullmatch(header, 124, 136):
            return None
        headers.append(header)
        offsets.append(at + BLOCK)
        sizes.append(int(header[124:135], 8))
        at += BLOCK + sizes[-1] + -sizes[-1] % BLOCK
    if not headers or not BLOCK <= end - at <= CHUNK_BYTES or any(os.pread(file, end - at, at)):
        return None
    names = [header[:100].rstrip(b"\0").decode(errors="replace") for header in headers]
    if not _all_plain(np.frombuffer(b"".join(headers), np.uint8).reshape(-1, BLOCK)):
        return None
    sizes = np.array(sizes)
    images = np.array([not name.endswith(".tar") for name in names])
    if (sizes[images] > largest_bytes).any():
        return None
    return names, np.array(offsets), sizes


def _all_plain(headers: np.ndarray) -> bool:
    """Whether headers, [files, BLOCK] uint8, have right checksums and are of the plainest kind."""
    names = headers[:, :100]
    digits = headers[:, 148:154] - ord("0")  # a byte below "0" wraps to a large one
    sums = headers.sum(1, dtype=np.int64) - headers[:, 148:156].sum(1, dtype=np.int64) + 8 * ord(" ")
    return bool(
        (PLAIN[names] == (names != 0)).all()
        and ((names[:, 1:] == 0) | (names[:, :-1] != 0)).all()  # nothing behind the name's end
        and (names[:, 0] != 0).all()
        and (names[:, 0] != ord(".")).all()
        and (headers[:, 156] == ord("0")).all()
        and (headers[:, 257:262] == np.frombuffer(b"ustar", np.uint8)).all()
        and (headers[:, 345] == 0).all()  # no prefix of the path
        and (digits < 8).all()
        and (digits @ (8 ** np.arange(5, -1, -1)) == sums).all()
        and (headers[:, 154] == 0).all()
    )
