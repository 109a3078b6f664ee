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
NameLookup = Callable[[int], str]  # maps an image's index in the stored split to its name, or to ""


def names_file_name(split: str) -> str:
    return f"{split}_names.txt"


def save_names(folder: Path, split: str, names: Iterable[str]) -> None:
    """Write the names of a split's images to the split's names file."""
    with open(folder / names_file_name(split), "wb") as names_stream:
        names_stream.writelines(map(_encoded_line, names))


def save_names_on_read(images: Iterable[tuple[bytes, str]], folder: Path, split: str) -> Iterator[bytes]:
    """Yield the bytes of each (bytes, name) pair, and write the name to the split's names file.

    The names file is complete once the caller has consumed all images.
    """
    with open(folder / names_file_name(split), "wb") as names_stream:
        for image_bytes, image_name in images:
            names_stream.write(_encoded_line(image_name))
            yield image_bytes


class CollectedNames:
    """Image names, collected in reading order. A name occupies its length plus 8 bytes of memory."""

    def __init__(self) -> None:
        self.encoded_lines = bytearray()
        self.line_ends = array("q", [0])  # end of each line in encoded_lines; the first line starts at 0

    def add(self, name: str) -> None:
        """Append the name of the next image in reading order."""
        self.encoded_lines += _encoded_line(name)
        self.line_ends.append(len(self.encoded_lines))

    def write(self, folder: Path, split: str, reading_positions: np.ndarray) -> None:
        """Write the names to the split's names file in index order.

        Args:
            folder: Folder in which the names file is created.
            split: Name of the split.
            reading_positions: Position of each image in reading order, int64 [N], in index order.
        """
        ordered_name_lines = BytesIO()
        for reading_position in reading_positions.tolist():
            name_start, name_end = self.line_ends[reading_position], self.line_ends[reading_position + 1]
            ordered_name_lines.write(self.encoded_lines[name_start:name_end])
        write_bytes(folder / names_file_name(split), ordered_name_lines.getvalue())


def read_names(names_content: np.ndarray | bytes, image_count: int, file_location: str) -> NameLookup:
    """Return a function that maps image indices to names and keeps 8 bytes per name in memory.

    Args:
        names_content: Content of a names file, which may be memory-mapped.
        image_count: Number of images. A file with a different number of lines is ignored with a warning.
        file_location: Location of the names file shown in the warning.
    """
    if isinstance(names_content, bytes):
        names_content = np.frombuffer(names_content, np.uint8)
    name_line_ends = np.flatnonzero(names_content == ord("\n"))
    if len(name_line_ends) != image_count:
        log.warning(
            f"warning: {file_location} contains {len(name_line_ends):,} names for {image_count:,} images."
            " Image names are not shown"
        )
        return without_names

    def name_of(image_index: int) -> str:
        name_start = name_line_ends[image_index - 1] + 1 if image_index else 0
        encoded_name = names_content[name_start : name_line_ends[image_index]].tobytes()
        return printable(encoded_name.decode(errors="replace"))

    return name_of


def open_names(names_path: Path, image_count: int) -> NameLookup:
    """Return a function that maps image indices to names, or to "" if the file is missing or empty."""
    if not names_path.exists() or not names_path.stat().st_size:
        return without_names
    return read_names(np.memmap(names_path, np.uint8, "r"), image_count, str(names_path))


def without_names(_image_index: int) -> str:
    """Return "" for every image. This function is the NameLookup for images without names."""
    return ""


def _encoded_line(image_name: str) -> bytes:
    """Return a name's line in a names file. A line break in the name is escaped."""
    return f"{printable(image_name)}\n".encode()
