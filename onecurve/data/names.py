"""Files with the image names of a split, one line of printable text per stored image.

The file is stored next to the split's labels or index. Its line is empty for an image without a name. A split
whose images have no names has no such file.
"""

from array import array
from collections.abc import Callable, Iterable, Iterator
from io import BytesIO
from pathlib import Path

import numpy as np

from onecurve.system.files import write_bytes
from onecurve.system.output import log
from onecurve.system.text import printable

NAMES_LIMIT = 2**32  # maximum size of a file of names in bytes
NameOf = Callable[[int], str]  # maps an image's number in the stored split to the image's name, or to ""


def names_file(split: str) -> str:
    return f"{split}_names.txt"


def save_names(folder: Path, split: str, names: Iterable[str]) -> None:
    with open(folder / names_file(split), "wb") as out:
        out.writelines(map(_line, names))


def save_names_of(images: Iterable[tuple[bytes, str]], folder: Path, split: str) -> Iterator[bytes]:
    """Yield the content of each (content, name) pair, and write the name to the split's file of names."""
    with open(folder / names_file(split), "wb") as out:
        for content, name in images:
            out.write(_line(name))
            yield content


class CollectedNames:
    """Image names in the order in which the images are read. Memory use is the text plus 8 bytes per name."""

    def __init__(self) -> None:
        self.lines, self.ends = bytearray(), array("q", [0])

    def add(self, name: str) -> None:
        self.lines += _line(name)
        self.ends.append(len(self.lines))

    def write(self, folder: Path, split: str, order: np.ndarray) -> None:
        """Write the names in index order. `order` lists their positions in reading order, int64 [N]."""
        content = BytesIO()
        for k in order.tolist():
            content.write(self.lines[self.ends[k] : self.ends[k + 1]])
        write_bytes(folder / names_file(split), content.getvalue())


def read_names(lines: np.ndarray | bytes, count: int, where: str) -> NameOf:
    """Return a function that maps image numbers to names. The function keeps 8 bytes per name in memory.

    Args:
        lines: Content of a file of names, which may be memory-mapped.
        count: Number of images. A file with another number of lines is ignored with a warning.
        where: Name of the file for the warning.
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
    """Return a function that maps image numbers to names. If the file is missing, all names are empty."""
    if not file.exists() or not file.stat().st_size:
        return nameless
    return read_names(np.memmap(file, np.uint8, "r"), count, str(file))


def nameless(_: int) -> str:
    return ""


def _line(name: str) -> bytes:
    return f"{printable(name)}\n".encode()
