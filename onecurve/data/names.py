"""Files with the names of a split's images: one line of printable text for each stored image.

The file lies next to the split's labels or index. An unnamed image has an empty line. A split without names
has no such file.
"""

from array import array
from collections.abc import Callable, Iterable, Iterator
from io import BytesIO
from pathlib import Path

import numpy as np

from onecurve.system.files import write_bytes
from onecurve.system.output import log
from onecurve.system.text import printable

NAMES_LIMIT = 2**32  # bytes
NameOf = Callable[[int], str]  # maps an image's number in its stored split to its name, or to "" without one


def names_file(split: str) -> str:
    return f"{split}_names.txt"


def save_names(folder: Path, split: str, names: Iterable[str]) -> None:
    with open(folder / names_file(split), "wb") as out:
        out.writelines(map(_line, names))


def save_names_of(images: Iterable[tuple[bytes, str]], folder: Path, split: str) -> Iterator[bytes]:
    """Yield the contents of (content, name) pairs, and write each name as its pair is read."""
    with open(folder / names_file(split), "wb") as out:
        for content, name in images:
            out.write(_line(name))
            yield content


class CollectedNames:
    """Names in the order in which a split's images are read. A name takes its line plus 8 bytes."""

    def __init__(self) -> None:
        self.lines, self.ends = bytearray(), array("q", [0])

    def add(self, name: str) -> None:
        self.lines += _line(name)
        self.ends.append(len(self.lines))

    def write(self, folder: Path, split: str, order: np.ndarray) -> None:
        """Write the names in the order of the index, int64 [N]."""
        content = BytesIO()
        for k in order.tolist():
            content.write(self.lines[self.ends[k] : self.ends[k + 1]])
        write_bytes(folder / names_file(split), content.getvalue())


def read_names(lines: np.ndarray | bytes, count: int, where: str) -> NameOf:
    """Return a function from image numbers to names. It keeps 8 bytes per name in memory.

    Args:
        lines: Content of a file of names; may be memory-mapped.
        count: Number of images. A file with another number of lines is ignored with a warning.
        where: Name of the file, for the warning.
    """
    lines = np.frombuffer(lines, np.uint8) if isinstance(lines, bytes) else lines
    ends = np.flatnonzero(lines == ord("\n"))
    if len(ends) != count:
        log.warning(f"warning: {where} has {len(ends):,} names for {count:,} images. No names are shown")
        return nameless

    def name_of(number: int) -> str:
        start = ends[number - 1] + 1 if number else 0
        return printable(lines[start : ends[number]].tobytes().decode(errors="replace"))

    return name_of


def open_names(file: Path, count: int) -> NameOf:
    """Return a function from image numbers to the names in a file. Without the file, all names are empty."""
    if not file.exists() or not file.stat().st_size:
        return nameless
    return read_names(np.memmap(file, np.uint8, "r"), count, str(file))


def nameless(_: int) -> str:
    return ""


def _line(name: str) -> bytes:
    return f"{printable(name)}\n".encode()
