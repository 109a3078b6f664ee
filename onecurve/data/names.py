"""File names of images: a text file beside a split's labels or index, with a line for each stored image.

The lines are printable text. An image without a name has an empty line; a split without names has no file.
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
NameOf = Callable[[int], str]  # from an image's number in its stored split; "" for an image without a name


def names_file(split: str) -> str:
    return f"{split}_names.txt"


def save_names(folder: Path, split: str, names: Iterable[str]) -> None:
    with open(folder / names_file(split), "wb") as out:
        out.writelines(map(_line, names))


def save_names_of(images: Iterable[tuple[bytes, str]], folder: Path, split: str) -> Iterator[bytes]:
    """Yield the images' contents, and write their names meanwhile."""
    with open(folder / names_file(split), "wb") as out:
        for content, name in images:
            out.write(_line(name))
            yield content


class CollectedNames:
    """Names in the order in which a split's images are read. Memory: a line of text and 8 bytes a name."""

    def __init__(self) -> None:
        self.lines, self.ends = bytearray(), array("q", [0])

    def add(self, name: str) -> None:
        self.lines += _line(name)
        self.ends.append(len(self.lines))

    def write(self, folder: Path, split: str, order: np.ndarray) -> None:
        """Write the names in the order of the index: int64 [N]."""
        content = BytesIO()
        for k in order.tolist():
            content.write(self.lines[self.ends[k] : self.ends[k + 1]])
        write_bytes(folder / names_file(split), content.getvalue())


def read_names(lines: np.ndarray | bytes, count: int, where: str) -> NameOf:
    """Return a function from numbers to names. lines: the content of a file of names, which may be mapped.

    Memory: 8 bytes a name. A file that has not `count` lines is not used, and a line says so.
    """
    lines = np.frombuffer(lines, np.uint8) if isinstance(lines, bytes) else lines
    ends = np.flatnonzero(lines == ord("\n"))
    if len(ends) != count:
        log.info(f"warning: {where} has {len(ends):,} names for {count:,} images. No names are shown")
        return nameless

    def name_of(number: int) -> str:
        start = ends[number - 1] + 1 if number else 0
        return printable(lines[start : ends[number]].tobytes().decode(errors="replace"))

    return name_of


def open_names(file: Path, count: int) -> NameOf:
    """Return a function from numbers to the names in a file; without the file no image has a name."""
    if not file.exists() or not file.stat().st_size:
        return nameless
    return read_names(np.memmap(file, np.uint8, "r"), count, str(file))


def nameless(_: int) -> str:
    return ""


def _line(name: str) -> bytes:
    return f"{printable(name)}\n".encode()
