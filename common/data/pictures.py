"""Pictures to predict: found in files, folders, patterns and lists; decoded in processes; each one once."""

import glob
import os
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from common.augment import to_float
from common.data.class_folders import LeftOut, list_images
from common.data.decode import central_crop, decode


def find_pictures(words: Sequence[str]) -> list[str]:
    """The files that words name: files, folders with all images below, patterns, and `-` for a list on stdin.

    In the order of the words, each file once. Raises ValueError for a word that names nothing.
    """
    found: list[str] = []
    for word in words:
        if word == "-":
            found += [line.rstrip("\n") for line in sys.stdin if line.strip()]
        elif os.path.isdir(word):
            images = [os.path.join(word, name) for name in list_images(Path(word), LeftOut())]
            if not images:
                raise ValueError(f"{word} holds no images: give a folder of pictures")
            found += images
        elif glob.has_magic(word) and not os.path.exists(word):
            matches = sorted(name for name in glob.glob(word, recursive=True) if os.path.isfile(name))
            if not matches:
                raise ValueError(f"{word} matches no file")
            found += matches
        else:
            found.append(word)
    if not found:
        raise ValueError("no pictures: give files, folders, patterns, or - for a list on stdin")
    return list(dict.fromkeys(found))


class Preparation(NamedTuple):
    """How a picture becomes the model's input. is_cropped: the middle of it; else the whole is resized."""

    size: int
    mean: tuple[float, ...]
    std: tuple[float, ...]
    is_cropped: bool


class Pictures(Dataset[tuple[int, Tensor | str]]):
    """The model's inputs of pictures: float32 [3, S, S]; an error's text where one can't be read."""

    def __init__(self, files: Sequence[str], preparation: Preparation):
        self.files, self.preparation = files, preparation

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, i: int) -> tuple[int, Tensor | str]:
        size, mean, std, is_cropped = self.preparation
        try:
            pixels = decode(Path(self.files[i]).read_bytes())  # uint8 [H, W, 3]
        except OSError as error:
            return i, error.strerror or str(error)
        except ValueError as error:
            return i, str(error)
        pixels = np.ascontiguousarray(central_crop(pixels, size)) if is_cropped else pixels
        return i, to_float(torch.from_numpy(pixels)[None], mean, std, size)[0]


class PictureBatch(NamedTuple):
    ids: np.ndarray  # int64 [b]
    inputs: Tensor  # float32 [b, 3, S, S]
    broken: list[tuple[int, str]]  # ids of others, and why


def picture_batches(
    pictures: Pictures, ids: Sequence[int], size: int, workers: int
) -> Iterator[PictureBatch]:
    """Yields batches of up to `size` pictures, in the order of ids. workers: processes that decode."""
    batches = [list(ids[k : k + size]) for k in range(0, len(ids), size)]
    yield from DataLoader(
        pictures,
        batch_sampler=batches,
        num_workers=workers,
        collate_fn=_collate,
    )


def _collate(rows: list[tuple[int, Tensor | str]]) -> PictureBatch:
    good = [(i, content) for i, content in rows if isinstance(content, Tensor)]
    broken = [(i, content) for i, content in rows if isinstance(content, str)]
    inputs = torch.stack([content for _, content in good]) if good else torch.empty(0)
    return PictureBatch(np.array([i for i, _ in good], np.int64), inputs, broken)
