"""Parquet files of images, such as the hub's, as an input of a preparation."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import numpy as np

from common.data.class_folders import VAL_NAMES
from common.data.tables import BY_TYPE, Table, parquet_files, read_images, read_labels
from tools.prepare.inputs import Input
from tools.prepare.source import ImageGroup, Label, RawDataset, check_plain, digest

BEGINS = {b"\x89PNG": ".png", b"RIFF": ".webp", b"BM": ".bmp"}


class ParquetDataset(RawDataset):
    """The files of train and val in a folder. An image is named by its row in the split."""

    def __init__(self, folder: Path):
        """Raises ValueError when there are no such files."""
        if not folder.is_dir() or (found := parquet_files(folder)) is None:
            raise ValueError(f"--data {folder} holds no train-*.parquet: give a folder that does")
        if (val := next((found[name] for name in VAL_NAMES if name in found), None)) is None:
            raise ValueError(f"--data {folder} has train-*.parquet, but no val-, valid- or test-*.parquet")
        files = {"train": found["train"], "val": val}
        stats = {split: [(p.name, *_size_and_time(p)) for p in paths] for split, paths in files.items()}
        self.kind, self.hashed, self.subset = "parquet", False, True
        self.parts = dict.fromkeys(files, str(folder))
        self.tables = {split: [Table(str(path), path) for path in paths] for split, paths in files.items()}
        self.bytes = {split: sum(size for _, size, _ in rows) for split, rows in stats.items()}
        self.versions = {split: digest(rows) for split, rows in stats.items()}
        self.listings, self.counts = {}, {}
        self.classes: list[dict[str, str]] = []
        self.labels: dict[str, Label] = {}

    def read_classes(self) -> None:
        names, labels = read_labels(self.tables, BY_TYPE, lambda: None)
        for name in names:
            check_plain(name, self.parts["train"])  # it may become a folder
        self.classes = [{"wnid": name, "name": name} for name in names]
        self.labels = {split: _by_row(names, labels[split].numbers) for split in self.tables}

    @contextmanager
    def open(self, split: str, hashed: bool) -> Iterator[tuple[Iterator[ImageGroup], Input | None]]:
        yield iter([ImageGroup(None, self.parts[split], self._files(split))]), None

    def _files(self, split: str) -> Iterator[tuple[str, Callable[[], bytes]]]:
        for row, content in enumerate(read_images(self.tables[split], BY_TYPE, lambda: None)):
            yield f"{row:09d}{_extension(content)}", partial(bytes, content)


def _size_and_time(path: Path) -> tuple[int, int]:
    stat = path.stat()
    return stat.st_size, stat.st_mtime_ns


def _extension(content: bytes) -> str:
    """The extension of a file of this content; .jpg where it is unknown, which the decoder then refuses."""
    return next((extension for begin, extension in BEGINS.items() if content.startswith(begin)), ".jpg")


def _by_row(names: tuple[str, ...], labels: np.ndarray) -> Label:
    """Labels an image by the row in its name. labels: int64 [rows]."""

    def label(_: str | None, name: str) -> tuple[str, int]:
        number = int(labels[int(name.partition(".")[0])])
        return names[number], number

    return label
