"""Images on which predict.py runs a model: search, decoding and batches."""

import glob
import os
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from onecurve.data.class_folders import IgnoredFiles, list_images
from onecurve.data.crops import evaluation_crop
from onecurve.data.decode import decode_image
from onecurve.data.workers import start_worker, while_workers_live
from onecurve.models.preprocessing import IMAGENET_CROP, Crop
from onecurve.numerics.augment import to_float
from onecurve.system.files import retried
from onecurve.system.output import log


def find_pictures(arguments: Sequence[str]) -> list[str]:
    """Return the image files that command-line arguments specify, in order and without duplicates.

    Args:
        arguments: Files, folders (searched recursively), glob patterns, or `-` to read a list of files from
            stdin.

    Raises:
        ValueError: If a folder contains no images, a pattern matches no files, or no files are specified.
    """
    files: list[str] = []
    left_out = IgnoredFiles()
    for argument in arguments:
        if argument == "-":
            files += [path_line.rstrip("\r\n") for path_line in sys.stdin if path_line.strip()]
        elif os.path.isdir(argument):
            images = [os.path.join(argument, name) for name in list_images(Path(argument), left_out)]
            if not images:
                other_files = f", but {left_out}" if left_out.counts else ""
                raise ValueError(f"{argument} contains no images{other_files}. Pass a folder with images")
            files += images
        elif glob.has_magic(argument) and not os.path.exists(argument):
            matches = sorted(name for name in glob.glob(argument, recursive=True) if os.path.isfile(name))
            if not matches:
                raise ValueError(f"the pattern {argument} matches no files")
            files += matches
        else:
            files.append(argument)
    if not files:
        raise ValueError(
            "no images were specified. Pass files, folders, glob patterns, or - to read a list from stdin"
        )
    if left_out.counts:
        log.warning(f"ignored files: {left_out}")
    return list(dict.fromkeys(files))


class Preprocessing(NamedTuple):
    """Settings that determine how an image is converted to the model's input."""

    size: int
    mean: tuple[float, ...]
    std: tuple[float, ...]
    is_cropped: bool  # True applies `crop`; False resizes the whole image
    crop: Crop = IMAGENET_CROP


class Pictures(Dataset[tuple[int, Tensor | str]]):
    """Data set of model inputs, float32 [3, S, S]. The item for an unreadable image is an error message."""

    def __init__(self, files: Sequence[str], preprocessing: Preprocessing):
        self.files, self.preprocessing = files, preprocessing

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, index: int) -> tuple[int, Tensor | str]:
        size, mean, std, is_cropped, crop = self.preprocessing
        try:
            pixels = decode_image(retried(Path(self.files[index]).read_bytes)())  # uint8 [H, W, 3]
        except OSError as error:
            return index, error.strerror or str(error)
        except ValueError as error:
            return index, str(error)
        pixels = np.ascontiguousarray(evaluation_crop(pixels, size, crop)) if is_cropped else pixels
        return index, to_float(torch.from_numpy(pixels)[None], mean, std, size, crop.enlargement)[0]


class PictureBatch(NamedTuple):
    """Model inputs for a batch's readable images, with error messages for the unreadable images."""

    ids: np.ndarray  # int64 [b]
    inputs: Tensor  # float32 [b, 3, S, S]
    broken: list[tuple[int, str]]  # ids and error messages


def picture_batches(
    pictures: Pictures, ids: Sequence[int], size: int, workers: int
) -> Iterator[PictureBatch]:
    """Yield batches of up to `size` images in the order of `ids`, decoded in `workers` processes."""
    batches = [list(ids[start : start + size]) for start in range(0, len(ids), size)]
    options: dict[str, Any] = {"worker_init_fn": start_worker} if workers else {}
    loader = DataLoader(pictures, batch_sampler=batches, num_workers=workers, collate_fn=_collate, **options)
    yield from while_workers_live(loader)


def _collate(items: list[tuple[int, Tensor | str]]) -> PictureBatch:
    intact = [(index, content) for index, content in items if isinstance(content, Tensor)]
    broken = [(index, content) for index, content in items if isinstance(content, str)]
    inputs = torch.stack([content for _, content in intact]) if intact else torch.empty(0)
    return PictureBatch(np.array([index for index, _ in intact], np.int64), inputs, broken)
