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

SPLITS = ("train", "val")  # training split, and split that selects the best checkpoint
ALL_SPLITS = (*SPLITS, "test")  # splits that a cache folder may contain
ITEM_FILE_ENDINGS = ("items.bin", "offsets.npy", "items.json")  # of the files that save_images() writes
WHOLE_FILE = -1  # length in EncodedImages.location() of an image that occupies a whole file


def save_labels(folder: Path, split: str, labels: Iterable[int] | np.ndarray) -> None:
    """Write a split's labels to `<split>_labels.npy` in a cache folder, int64 [N]."""
    np.save(folder / f"{split}_labels.npy", np.asarray(labels, np.int64))


def save_images(
    folder: Path, split: str, items: Iterable[bytes], root: Path | None = None, tables: list | None = None
) -> None:
    """Write a split's images to a cache folder, either as bytes or as file paths relative to `root`.

    Only the item offsets are kept in memory. The function writes these files:

    <split>_items.bin    the concatenated bytes or paths of all images
    <split>_offsets.npy  int64 [N + 1], the start of each item and the end of the last item
    <split>_items.json   "root" (folder of the image files, or null) and "parts" (list of [table, rows])

    Args:
        folder: Cache folder of the data set.
        split: Name of the split.
        items: Encoded bytes of each image or, if `root` is not None, relative path of each image file.
        root: Folder of the image files, or None to store image bytes.
        tables: Name and row count of each table that contains the images, for messages.
    """
    item_offsets = array("q", [0])
    with open(folder / f"{split}_items.bin", "wb") as items_file:
        for item in items:
            items_file.write(item)
            item_offsets.append(item_offsets[-1] + len(item))
    np.save(folder / f"{split}_offsets.npy", np.asarray(item_offsets))
    item_origins = {"root": None if root is None else str(root), "parts": tables}
    (folder / f"{split}_items.json").write_text(json.dumps(item_origins))


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
        # Id of the stored image at each index
        self.ids = range(count) if ids_file is None else np.load(ids_file)
        self.open_file = open_file

    def __len__(self) -> int:
        return len(self.ids)

    @abstractmethod
    def location(self, index: int) -> tuple[str, int, int]:
        """Return the path of the file that contains an image, and the image's byte offset and length.

        The length is WHOLE_FILE if the image occupies the whole file.
        """

    @abstractmethod
    def display_name(self, index: int) -> str:
        """Return the name that messages show for an image."""

    @retried
    def size(self, index: int) -> int:
        """Return an image's encoded size in bytes, without reading the image."""
        image_file, _, image_length = self.location(index)
        return os.path.getsize(image_file) if image_length == WHOLE_FILE else image_length

    @retried
    def content(self, index: int) -> bytes:
        """Read an image's encoded bytes from disk, or raise an OSError that names the file."""
        image_file, byte_offset, image_length = self.location(index)
        try:
            if self.open_file:
                # Threads share the open file, because pread does not use its file position.
                return os.pread(self.open_file.fileno(), image_length, byte_offset)
            with open(image_file, "rb", buffering=0) as opened_file:
                opened_file.seek(byte_offset)
                encoded_image = opened_file.read(image_length)
        except OSError as error:
            raise OSError(error.errno, error.strerror, image_file) from None
        if len(encoded_image) < image_length:
            raise OSError(f"{image_file} is shorter than its index specifies. Prepare the data again")
        return encoded_image

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
        encoded_image = self.content(index)
        try:
            pixels = decode_image(encoded_image)
            is_jpeg_checked = strict and encoded_image[:2] == JPEG_PREFIX
            if is_jpeg_checked and (damage := find_damage(encoded_image)):
                raise DamagedImage(damage)
            return pixels
        except ValueError as error:
            # Add the image's name to the message, and keep the distinction between damaged and broken images.
            error_class = DamagedImage if isinstance(error, DamagedImage) else ValueError
            raise error_class(f"{self.display_name(index)}: {error}") from None


class ArrayImages(EncodedImages):
    """Decoded images in a cache file, uint8 [N, H, W, 3].

    Args:
        array_file: Path of the cache file.
        ids: Ids of the images to read, int64 [n], or None to read all images.
    """

    def __init__(self, array_file: str, ids: np.ndarray | None):
        self.images = np.load(array_file, mmap_mode="r")
        super().__init__(len(self.images), None)
        if ids is not None:  # the base class has selected all images
            self.ids = ids

    def location(self, index: int) -> tuple[str, int, int]:
        """Return the array file for every image, because the images have no separate files."""
        return str(self.images.filename), 0, WHOLE_FILE

    def display_name(self, index: int) -> str:
        return f"image {self.ids[index]}"

    def decode(self, index: int, strict: bool = False) -> np.ndarray:
        """Return a copy of an image's stored pixels. `strict` has no effect, because nothing is decoded."""
        return np.array(self.images[self.ids[index]])


class CachedImages(EncodedImages):
    """Images written by `save_images`. Messages identify an image by its file path or table row."""

    def __init__(self, folder: Path, split: str, ids_file: Path | None = None):
        # asarray() returns a plain view of the mapped file, because indexing np.memmap takes 6 times as long.
        self.offsets = np.asarray(np.load(folder / f"{split}_offsets.npy", mmap_mode="r"))
        self.items_file = open(str(folder / f"{split}_items.bin"), "rb", buffering=0)  # noqa: SIM115
        item_origins = read_json(folder / f"{split}_items.json")
        self.image_root, self.tables = item_origins["root"], item_origins["parts"]
        content_file = self.items_file if self.image_root is None else None  # None if the items are paths
        super().__init__(len(self.offsets) - 1, ids_file, content_file)

    def location(self, index: int) -> tuple[str, int, int]:
        stored_id = self.ids[index]
        # An item is an image's bytes or, with image_root, the path of an image file.
        item_start, item_end = self.offsets[stored_id : stored_id + 2].tolist()
        if self.image_root is None:
            return self.items_file.name, item_start, item_end - item_start
        relative_path = os.pread(self.items_file.fileno(), item_end - item_start, item_start)
        return os.path.join(self.image_root, os.fsdecode(relative_path)), 0, WHOLE_FILE

    def display_name(self, index: int) -> str:
        """Return the path of an image file, or the row and the name of the table that contains the image."""
        if self.image_root is not None:
            image_path, _, _ = self.location(index)
            return printable(image_path)
        table_row = int(self.ids[index])  # row in the concatenation of all tables
        for table_name, row_count in self.tables:
            if table_row < row_count:
                return f"row {table_row} of {table_name}"
            table_row -= row_count
        raise AssertionError(f"image {index} does not belong to any table")
