"""The encoded images of a split: files in the cache that name or hold them."""

import io
import json
import os
from abc import ABC, abstractmethod
from array import array
from collections.abc import Iterable
from pathlib import Path

import numpy as np

from onecurve.data.decode import JPEG, damage, decode_image
from onecurve.system.files import read_json, retried
from onecurve.system.text import printable

SPLITS = ("train", "val")
STORED = (*SPLITS, "test")  # in a cache folder
FILES = ("items.bin", "offsets.npy", "items.json")


def save_labels(folder: Path, split: str, labels: Iterable[int] | np.ndarray) -> None:
    np.save(folder / f"{split}_labels.npy", np.asarray(labels, np.int64))


def save_images(
    folder: Path, split: str, items: Iterable[bytes], root: Path | None = None, parts: list | None = None
) -> None:
    """Writes image bytes, or paths below root, as a cache folder keeps them. Memory: the offsets.

    <split>_items.bin    the bytes or paths, one after another
    <split>_offsets.npy  int64 [N + 1]: where each item begins
    <split>_items.json   root: the folder of the image files, or null; parts: [table, rows] in their order
    """
    offsets = array("q", [0])
    with open(folder / f"{split}_items.bin", "wb") as out:
        for item in items:
            out.write(item)
            offsets.append(offsets[-1] + len(item))
    np.save(folder / f"{split}_offsets.npy", np.asarray(offsets))
    layout = {"root": None if root is None else str(root), "parts": parts}
    (folder / f"{split}_items.json").write_text(json.dumps(layout))


class DamagedImage(ValueError):
    """A part of an image is missing. Decoders fill it with grey."""


class Encoded(ABC):
    """The encoded images of one split, by number: each is bytes of a file, or a whole file."""

    def __init__(self, count: int, part: Path | None, kept: io.FileIO | None = None):
        """part: a file with the ids of those that count, of `count`. kept: the file of all, to stay open."""
        self.ids, self.kept = range(count) if part is None else np.load(part), kept

    def __len__(self) -> int:
        return len(self.ids)

    @abstractmethod
    def place(self, i: int) -> tuple[str, int, int]:
        """File, offset and length of image i; -1: the whole file."""

    @abstractmethod
    def where(self, i: int) -> str:
        """The name of image i in messages."""

    @retried
    def size(self, i: int) -> int:
        """The length of content(i)."""
        file, _, length = self.place(i)
        return os.path.getsize(file) if length < 0 else length

    @retried
    def content(self, i: int) -> bytes:
        """Return the bytes of image i as it is encoded. Raises OSError that names its file."""
        file, offset, length = self.place(i)
        try:
            if self.kept:
                return os.pread(self.kept.fileno(), length, offset)
            with open(file, "rb", buffering=0) as opened:
                opened.seek(offset)
                data = opened.read(length)
        except OSError as error:
            raise OSError(error.errno, error.strerror, file) from None
        if len(data) < length:
            raise OSError(f"{file} is shorter than its index says: prepare again")
        return data

    def decode(self, i: int, strict: bool = False) -> np.ndarray:
        """uint8 [H, W, 3]. Raises ValueError that names a broken image (strict: Damaged for a JPEG of which a
        part is missing), OSError where its file can't be read."""
        data = self.content(i)
        try:
            pixels = decode_image(data)
            if strict and data[:2] == JPEG and (what := damage(data)):
                raise DamagedImage(what)
            return pixels
        except ValueError as error:
            kind = DamagedImage if isinstance(error, DamagedImage) else ValueError
            raise kind(f"{self.where(i)}: {error}") from None


class ArrayImages(Encoded):
    """Images that are decoded already, in a file of a cache folder: uint8 [N, H, W, 3]."""

    def __init__(self, file: str, rows: np.ndarray | None):
        self.images = np.load(file, mmap_mode="r")
        super().__init__(len(self.images), None)
        self.ids = self.ids if rows is None else rows

    def place(self, i: int) -> tuple[str, int, int]:
        return str(self.images.filename), 0, -1

    def where(self, i: int) -> str:
        return f"image {self.ids[i]}"

    def decode(self, i: int, strict: bool = False) -> np.ndarray:
        return np.array(self.images[self.ids[i]])


class CachedImages(Encoded):
    """Those that save_images has written, named by their paths, or by the rows of their tables."""

    def __init__(self, folder: Path, split: str, part: Path | None = None):
        self.offsets = np.asarray(np.load(folder / f"{split}_offsets.npy", mmap_mode="r"))
        self.items = open(str(folder / f"{split}_items.bin"), "rb", buffering=0)  # noqa: SIM115
        layout = read_json(folder / f"{split}_items.json")
        self.root, self.parts = layout["root"], layout["parts"]
        super().__init__(len(self.offsets) - 1, part, self.items if self.root is None else None)

    def place(self, i: int) -> tuple[str, int, int]:
        start, end = self.offsets[self.ids[i] :][:2].tolist()  # of its bytes, or of its path
        if self.root is None:
            return self.items.name, start, end - start
        path = os.pread(self.items.fileno(), end - start, start)
        return os.path.join(self.root, os.fsdecode(path)), 0, -1

    def where(self, i: int) -> str:
        if self.root is not None:
            return printable(self.place(i)[0])
        row = int(self.ids[i])
        for name, rows in self.parts:
            if row < rows:
                return f"row {row} of {name}"
            row -= rows
        raise AssertionError("no such image")
