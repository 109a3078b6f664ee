"""Readers for a split's encoded images, and a writer for cache files that store image bytes or paths."""

import io
import json
import os
from abc import ABC, abstractmethod
from array import array
from collections.abc import Iterable
from pathlib import Path

import numpy as np

from onecurve.data.decode import JPEG_PREFIX, decode_image, find_damage
from onecurve.system.files import read_json, retried
from onecurve.system.text import printable

SPLITS = ("train", "val")
ALL_SPLITS = (*SPLITS, "test")  # splits that a cache folder may contain
ITEM_FILES = ("items.bin", "offsets.npy", "items.json")


def save_labels(folder: Path, split: str, labels: Iterable[int] | np.ndarray) -> None:
    np.save(folder / f"{split}_labels.npy", np.asarray(labels, np.int64))


def save_images(
    folder: Path, split: str, items: Iterable[bytes], root: Path | None = None, tables: list | None = None
) -> None:
    """Write a split's images to a cache folder, either as bytes or as file paths relative to `root`.

    Only the item offsets are kept in memory. The function writes these files:

    <split>_items.bin    the concatenated bytes or paths of all images
    <split>_offsets.npy  int64 [N + 1], the start of each item and the end of the last item
    <split>_items.json   "root" (folder of the image files, or null) and "parts" (list of [table, rows])
    """
    offsets = array("q", [0])
    with open(folder / f"{split}_items.bin", "wb") as items_file:
        for item in items:
            items_file.write(item)
            offsets.append(offsets[-1] + len(item))
    np.save(folder / f"{split}_offsets.npy", np.asarray(offsets))
    layout = {"root": None if root is None else str(root), "parts": tables}
    (folder / f"{split}_items.json").write_text(json.dumps(layout))


class DamagedImage(ValueError):
    """Error for an image with missing data, which decoders would fill with grey."""


class EncodedImages(ABC):
    """Encoded images of one split, accessed by index. Each image occupies a whole file or a byte range.

    Args:
        count: Number of stored images.
        ids_file: File that contains the ids of the images to read, int64 [n], or None to read all stored
            images.
        open_file: Open file that contains the bytes of all images, or None to open a file for each read.
    """

    def __init__(self, count: int, ids_file: Path | None, open_file: io.FileIO | None = None):
        self.ids = range(count) if ids_file is None else np.load(ids_file)
        self.open_file = open_file

    def __len__(self) -> int:
        return len(self.ids)

    @abstractmethod
    def location(self, index: int) -> tuple[str, int, int]:
        """Return image i's file, byte offset, and length (-1 for the whole file)."""

    @abstractmethod
    def display_name(self, index: int) -> str:
        """Return the name shown for image i in messages."""

    @retried
    def size(self, index: int) -> int:
        """Return the length of `content(index)` in bytes."""
        file, _, length = self.location(index)
        return os.path.getsize(file) if length < 0 else length

    @retried
    def content(self, index: int) -> bytes:
        """Return the encoded bytes of image i, or raise an OSError that names the file."""
        file, offset, length = self.location(index)
        try:
            if self.open_file:
                return os.pread(self.open_file.fileno(), length, offset)
            with open(file, "rb", buffering=0) as stream:
                stream.seek(offset)
                content = stream.read(length)
        except OSError as error:
            raise OSError(error.errno, error.strerror, file) from None
        if len(content) < length:
            raise OSError(f"{file} is shorter than its index specifies. Prepare the data again")
        return content

    def decode(self, index: int, strict: bool = False) -> np.ndarray:
        """Decode one image.

        Args:
            index: Index of the image in this split.
            strict: Whether to reject JPEGs with missing data.

        Returns:
            Pixels, uint8 [H, W, 3].

        Raises:
            DamagedImage: If `strict` is True and a JPEG has missing data.
            ValueError: If the image can't be decoded. The message contains the image's name.
            OSError: If the image's file can't be read.
        """
        content = self.content(index)
        try:
            pixels = decode_image(content)
            if strict and content[:2] == JPEG_PREFIX and (problem := find_damage(content)):
                raise DamagedImage(problem)
            return pixels
        except ValueError as error:
            error_class = DamagedImage if isinstance(error, DamagedImage) else ValueError
            raise error_class(f"{self.display_name(index)}: {error}") from None


class ArrayImages(EncodedImages):
    """Decoded images in a cache file, uint8 [N, H, W, 3]."""

    def __init__(self, file: str, rows: np.ndarray | None):
        self.images = np.load(file, mmap_mode="r")
        super().__init__(len(self.images), None)
        self.ids = self.ids if rows is None else rows

    def location(self, index: int) -> tuple[str, int, int]:
        return str(self.images.filename), 0, -1

    def display_name(self, index: int) -> str:
        return f"image {self.ids[index]}"

    def decode(self, index: int, strict: bool = False) -> np.ndarray:
        return np.array(self.images[self.ids[index]])


class CachedImages(EncodedImages):
    """Images written by `save_images`. Messages identify an image by its file path or table row."""

    def __init__(self, folder: Path, split: str, ids_file: Path | None = None):
        self.offsets = np.asarray(np.load(folder / f"{split}_offsets.npy", mmap_mode="r"))
        self.items = open(str(folder / f"{split}_items.bin"), "rb", buffering=0)  # noqa: SIM115
        layout = read_json(folder / f"{split}_items.json")
        self.root, self.tables = layout["root"], layout["parts"]
        super().__init__(len(self.offsets) - 1, ids_file, self.items if self.root is None else None)

    def location(self, index: int) -> tuple[str, int, int]:
        start, end = self.offsets[self.ids[index] :][:2].tolist()  # byte range of the image's content or path
        if self.root is None:
            return self.items.name, start, end - start
        path = os.pread(self.items.fileno(), end - start, start)
        return os.path.join(self.root, os.fsdecode(path)), 0, -1

    def display_name(self, index: int) -> str:
        if self.root is not None:
            return printable(self.location(index)[0])
        row = int(self.ids[index])
        for table, rows in self.tables:
            if row < rows:
                return f"row {row} of {table}"
            row -= rows
        raise AssertionError(f"image {index} does not belong to any table")
