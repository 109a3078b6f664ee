"""Files that contain a split's image names, one line of printable text per stored image.

A names file is stored next to the split's labels or index. The line of an image without a name is empty. If
no image in a split has a name, there is no names file.
"""

from array import array
from collections.abc import Callable, Iterable, Iterator
from io import BytesIO
from pathlib import Path

import numpy as np

from onecurve.system.files import write_bytes
from onecurve.system.output import log
from onecurve.system.text import printable

NAMES_LIMIT_BYTES = 2**32  # maximum size of a names file in bytes
NameOf = Callable[[int], str]  # maps an image's index in the stored split to its name, or to ""


def names_file(split: str) -> str:
    return f"{split}_names.txt"


def save_names(folder: Path, split: str, names: Iterable[str]) -> None:
    with open(folder / names_file(split), "wb") as out:
        out.writelines(map(_encoded_line, names))


def save_names_of(images: Iterable[tuple[bytes, str]], folder: Path, split: str) -> Iterator[bytes]:
    """Yield the content of each (content, name) pair, and write the name to the split's names file."""
    with open(folder / names_file(split), "wb") as out:
        for content, name in images:
            out.write(_encoded_line(name))
            yield content


class CollectedNames:
    """Image names, collected in reading order. A name occupies its length plus 8 bytes of memory."""

    def __init__(self) -> None:
        self.encoded_lines, self.line_ends = bytearray(), array("q", [0])

    def add(self, name: str) -> None:
        self.encoded_lines += _encoded_line(name)
        self.line_ends.append(len(self.encoded_lines))

    def write(self, folder: Path, split: str, order: np.ndarray) -> None:
        """Write the names in index order. `order[i]` is the reading position of image i, int64 [N]."""
        content = BytesIO()
        for position in order.tolist():
            content.write(self.encoded_lines[self.line_ends[position] : self.line_ends[position + 1]])
        write_bytes(folder / names_file(split), content.getvalue())


def read_names(lines: np.ndarray | bytes, count: int, where: str) -> NameOf:
    """Return a function that maps image indices to names and keeps 8 bytes per name in memory.

    Args:
        lines: Content of a names file, which may be memory-mapped.
        count: Number of images. A file with a different number of lines is ignored with a warning.
        where: File name shown in the warning.
    """
    lines = np.frombuffer(lines, np.uint8) if isinstance(lines, bytes) else lines
    ends = np.flatnonzero(lines == ord("\n"))
    if len(ends) != count:
        log.warning(
            f"warning: {where} contains {len(ends):,} names for {count:,} images. Image names are not shown"
        )
        return without_names

    def name_of(index: int) -> str:
        start = ends[index - 1] + 1 if index else 0
        return printable(lines[start : ends[index]].tobytes().decode(errors="replace"))

    return name_of


def open_names(file: Path, count: int) -> NameOf:
    """Return a function that maps image indices to names. For a missing file, all names are empty."""
    if not file.exists() or not file.stat().st_size:
        return without_names
    return read_names(np.memmap(file, np.uint8, "r"), count, str(file))


def without_names(_: int) -> str:
    return ""


def _encoded_line(name: str) -> bytes:
    return f"{printable(name)}\n".encode()
