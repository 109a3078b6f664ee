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
    image_files: list[str] = []
    ignored_files = IgnoredFiles()
    for argument in arguments:
        if argument == "-":
            image_files += [path_line.rstrip("\r\n") for path_line in sys.stdin if path_line.strip()]
        elif os.path.isdir(argument):
            # list_images() adds the folder's other files to ignored_files.
            image_paths = list_images(Path(argument), ignored_files)
            if not image_paths:
                other_files = f", but {ignored_files}" if ignored_files.counts else ""
                raise ValueError(f"{argument} contains no images{other_files}. Pass a folder with images")
            image_files += [os.path.join(argument, image_path) for image_path in image_paths]
        elif glob.has_magic(argument) and not os.path.exists(argument):
            glob_files = sorted(path for path in glob.glob(argument, recursive=True) if os.path.isfile(path))
            if not glob_files:
                raise ValueError(f"the pattern {argument} matches no files")
            image_files += glob_files
        else:
            image_files.append(argument)
    if not image_files:
        raise ValueError(
            "no images were specified. Pass files, folders, glob patterns, or - to read a list from stdin"
        )
    if ignored_files.counts:
        log.warning(f"ignored files: {ignored_files}")
    return list(dict.fromkeys(image_files))


class Preprocessing(NamedTuple):
    """Settings that determine how an image is converted to the model's input."""

    image_size: int
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

    def __getitem__(self, image_id: int) -> tuple[int, Tensor | str]:
        """Read and decode an image file. Return the id with the model input, or with an error message."""
        image_size, mean, std, is_cropped, crop = self.preprocessing
        try:
            read_image_file = retried(Path(self.files[image_id]).read_bytes)  # retries transient errors
            pixels = decode_image(read_image_file())  # uint8 [H, W, 3]
        except OSError as read_error:
            return image_id, read_error.strerror or str(read_error)
        except ValueError as decode_error:
            return image_id, str(decode_error)
        pixels = np.ascontiguousarray(evaluation_crop(pixels, image_size, crop)) if is_cropped else pixels
        batch_of_one = torch.from_numpy(pixels)[None]
        return image_id, to_float(batch_of_one, mean, std, image_size, crop.enlargement)[0]


class PictureBatch(NamedTuple):
    """Model inputs for a batch's readable images, with error messages for the unreadable images."""

    ids: np.ndarray  # int64 [b]
    inputs: Tensor  # float32 [b, 3, S, S]
    broken: list[tuple[int, str]]  # ids and error messages


def picture_batches(
    pictures: Pictures, ids: Sequence[int], batch_size: int, workers: int
) -> Iterator[PictureBatch]:
    """Yield batches of up to `batch_size` images in the order of `ids`, decoded in `workers` processes.

    Without worker processes, this process decodes the images.
    """
    batch_ids = [list(ids[start : start + batch_size]) for start in range(0, len(ids), batch_size)]
    loader_options: dict[str, Any] = {"worker_init_fn": start_worker} if workers else {}
    loader_options |= {"num_workers": workers, "collate_fn": _collate_pictures}
    loader = DataLoader(pictures, batch_sampler=batch_ids, **loader_options)
    yield from while_workers_live(loader)


def _collate_pictures(items: list[tuple[int, Tensor | str]]) -> PictureBatch:
    """Stack the model inputs among a batch's items from Pictures, and list the error messages."""
    readable_items = [(image_id, content) for image_id, content in items if isinstance(content, Tensor)]
    readable_ids = np.array([image_id for image_id, _ in readable_items], np.int64)
    model_inputs = [model_input for _, model_input in readable_items]
    stacked_inputs = torch.stack(model_inputs) if model_inputs else torch.empty(0)
    broken_items = [(image_id, message) for image_id, message in items if isinstance(message, str)]
    return PictureBatch(readable_ids, stacked_inputs, broken_items)
