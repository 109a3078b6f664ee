"""The encoded images and the labels of a split, as a cache folder keeps them.

<split>_labels.npy   int64 [N]
<split>_items.bin    the images' bytes, or the paths of their files, one after another
<split>_offsets.npy  int64 [N + 1]: where each item begins
<split>_items.json   root: the folder of the image files, or null; parts: [table, rows] in their order
"""

import json
import os
from array import array
from collections.abc import Iterable
from pathlib import Path

import numpy as np

from common.data.decode import JPEG, damage, decode
from common.system.files import read_json
from common.system.text import printable

FILES = ("items.bin", "offsets.npy", "items.json")


def save_labels(folder: Path, split: str, labels: Iterable[int] | np.ndarray) -> None:
    np.save(folder / f"{split}_labels.npy", np.asarray(labels, np.int64))


def save_images(
    folder: Path,
    split: str,
    items: Iterable[bytes],
    root: Path | None = None,
    parts: list[tuple[str, int]] | None = None,
) -> None:
    """Writes image bytes, or paths below root, one after another. Memory: the offsets."""
    offsets = array("q", [0])
    with open(folder / f"{split}_items.bin", "wb") as out:
        for item in items:
            out.write(item)
            offsets.append(offsets[-1] + len(item))
    np.save(folder / f"{split}_offsets.npy", np.asarray(offsets))
    about = {"root": None if root is None else str(root), "parts": parts}
    (folder / f"{split}_items.json").write_text(json.dumps(about))


class Encoded:
    """The encoded images of one split, by number. part: a file with the ids of those that count."""

    def __init__(self, folder: Path, split: str, part: Path | None = None):
        # Read, not mapped: a mapped file that is cut while it is in use kills the process (SIGBUS).
        offsets = np.load(folder / f"{split}_offsets.npy")
        self.starts, self.ends = offsets[:-1], offsets[1:]
        self.ids = None if part is None else np.load(part)
        if self.ids is not None:
            self.starts, self.ends = self.starts[self.ids], self.ends[self.ids]
        self.items = open(folder / f"{split}_items.bin", "rb", buffering=0)  # noqa: SIM115
        about = read_json(folder / f"{split}_items.json")
        self.root: str | None = about["root"]
        self.parts: list[tuple[str, int]] = about["parts"]

    def __len__(self) -> int:
        return len(self.starts)

    def where(self, i: int) -> str:
        """The name of image i in messages: its path, or the row of its table."""
        if self.root is not None:
            return printable(self.file(i))
        i = i if self.ids is None else int(self.ids[i])
        for name, rows in self.parts:
            if i < rows:
                return f"row {i} of {name}"
            i -= rows
        raise AssertionError("no such image")

    def file(self, i: int) -> str:
        """The file of image i; for one from a table its row."""
        return self.where(i) if self.root is None else os.path.join(self.root, os.fsdecode(self.item(i)))

    def decode(self, i: int, strict: bool = False) -> np.ndarray:
        """uint8 [H, W, 3]. Raises ValueError that names a broken image, OSError where its file can't be read.

        strict: a JPEG of which a part is missing is broken, too.
        """
        data = self.content(i)
        try:
            pixels = decode(data)
            if strict and data[:2] == JPEG and (what := damage(data)):
                raise ValueError(what)
            return pixels
        except ValueError as error:
            raise ValueError(f"{self.where(i)}: {error}") from None

    def content(self, i: int) -> bytes:
        """The bytes of image i as it is encoded."""
        return self.item(i) if self.root is None else Path(self.file(i)).read_bytes()

    def size(self, i: int) -> int:
        """The length of content(i)."""
        if self.root is None:
            return int(self.ends[i] - self.starts[i])
        return os.path.getsize(self.file(i))

    def item(self, i: int) -> bytes:
        """The bytes of image i, or of the path of its file."""
        start, end = int(self.starts[i]), int(self.ends[i])
        data = os.pread(self.items.fileno(), end - start, start)
        if len(data) < end - start:
            raise OSError(
                f"{self.items.name} is shorter than it was: remove its folder, and the same command prepares"
                " it again"
            )
        return data
