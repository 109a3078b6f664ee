"""Where images come from: digits, cifar10, synthetic, a folder of parquet files, a folder of class folders.

`prepare` (one process per host) makes a folder in the cache; `open_images` (all processes) maps it.
Images that fit in memory are decoded there once, as uint8 arrays; the others stay encoded, and are decoded by
the workers of a DataLoader. Batches are uint8 on the device: augmentation and normalisation follow there.
"""

import atexit
import functools
import json
import multiprocessing
import multiprocessing.forkserver
import multiprocessing.resource_tracker
import os
import signal
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

import numpy as np
import torch
from accelerate import Accelerator
from torch import Tensor

from common.agreement import agree, once_per_host
from common.decode import SPLITS, Encoded, central_crop, random_resized_crop
from common.image_cache import prepare
from common.order import Plan, uniforms
from common.recipe import ImageRecipe

MicroBatch = tuple[int, np.ndarray, Tensor, Tensor]  # epoch, sample ids, images, labels


class ArraySplit:
    """One split as an array: uint8 [N, H, W, 3], memory-mapped, and labels int64 [N]."""

    cropped = False  # random crops are left to the caller

    def __init__(self, images: np.ndarray, labels: np.ndarray):
        self.images, self.labels = images, labels
        self._resident: dict[torch.device, tuple[Tensor, Tensor] | None] = {}

    def __len__(self) -> int:
        return len(self.labels)

    @property
    def size(self) -> tuple[int, int]:
        """Height and width in pixels."""
        return self.images.shape[1:3]

    @property
    def nbytes(self) -> int:
        return self.images.nbytes

    def batches(
        self, plan: Plan, *, device, train: bool, size: int, seed: int, workers: int
    ) -> Iterator[MicroBatch]:
        """Yields (epoch, ids [b], uint8 [b, H, W, 3], labels int64 [b]) in the order of the plan.

        The last two are on the device. Crops are the caller's: train, size, seed and workers are FileSplit's.
        """
        device = torch.device(device)
        if device not in self._resident:
            self._resident[device] = self._move(device)
        pinned = device.type == "cuda"
        resident = self._resident[device]
        pixels, labels = resident if resident is not None else self._on_host()
        for epoch, ids in plan:
            rows = _send(torch.as_tensor(ids, dtype=torch.int64), pixels.device)
            if resident is None and pinned:
                # page-locked by torch's caching allocator, which waits for the copy before it reuses them
                images = torch.empty(len(ids), pixels.shape[1], dtype=torch.uint8, pin_memory=True)
                torch.index_select(pixels, 0, rows, out=images)
            else:
                images = pixels.index_select(0, rows)
            images, targets = _send(images, device), _send(labels.index_select(0, rows), device)
            yield epoch, ids, images.view(-1, *self.images.shape[1:]), targets

    def _on_host(self) -> tuple[Tensor, Tensor]:
        # One row per image: index_select copies rows whole, many times faster than four-dimensional indexing.
        return torch.from_numpy(self.images).view(len(self), -1), torch.from_numpy(self.labels)

    def _move(self, device: torch.device) -> tuple[Tensor, Tensor] | None:
        """The whole split on the device, or None: on CUDA it may take a quarter of the memory free now."""
        if device.type == "cpu":
            return self._on_host()
        if device.type == "cuda" and self.nbytes <= torch.cuda.mem_get_info(device)[0] // 4:
            pixels, labels = self._on_host()
            return pixels.to(device), labels.to(device)
        return None


def _send(tensor: Tensor, device: torch.device) -> Tensor:
    """To the device without waiting for it: to CUDA from page-locked memory."""
    if device.type == "cuda" and tensor.device.type == "cpu":
        tensor = tensor.pin_memory()  # returns itself where it is pinned already
    return tensor.to(device, non_blocking=True)


class FileSplit:
    """One split of encoded images, too large for memory or of differing sizes; labels int64 [N]."""

    cropped = True  # at random, when it is decoded for training

    def __init__(self, folder: Path, split: str, labels: np.ndarray):
        self.folder, self.split, self.labels = folder, split, labels

    def __len__(self) -> int:
        return len(self.labels)

    def batches(
        self, plan: Plan, *, device, train: bool, size: int, seed: int, workers: int
    ) -> Iterator[MicroBatch]:
        """Yields (epoch, ids [b], uint8 [b, size, size, 3], labels int64 [b]) in the order of the plan.

        The last two are on the device. train: a random resized crop from (seed, epoch, sample) alone; else
        the central crop. Decoded in `workers` processes, or here with 0. Raises ValueError that names an
        image which can't be decoded.
        """
        device = torch.device(device)
        loader = torch.utils.data.DataLoader(
            _Crops(self.folder, self.split, train, size, seed),
            sampler=plan,
            batch_size=None,  # the plan's items are batches already
            num_workers=workers,
            prefetch_factor=4 if workers else None,
            multiprocessing_context=_forkserver() if workers else None,
            worker_init_fn=_start_worker if workers else None,
            pin_memory=device.type == "cuda",
        )
        batches = iter(loader)
        try:
            for epoch, ids, images, error in batches:
                if error:
                    raise ValueError(error)
                ids = ids.numpy()  # DataLoader makes a tensor of it
                labels = torch.from_numpy(self.labels[ids])
                yield epoch, ids, _send(images, device), _send(labels, device)
        finally:
            del batches  # ends the workers, also when the caller leaves early


class _Crops(torch.utils.data.Dataset):
    """What a DataLoader worker does with one item of the plan. Small to pickle: the images stay on disk."""

    def __init__(self, folder: Path, split: str, train: bool, size: int, seed: int):
        self.folder, self.split, self.train, self.size, self.seed = folder, split, train, size, seed
        self.encoded: Encoded | None = None

    def __getitem__(self, item: tuple[int, np.ndarray]) -> tuple[int, np.ndarray, Tensor, str]:
        """With uint8 [b, size, size, 3], and the error, which torch would wrap in a worker's traceback."""
        epoch, ids = item
        self.encoded = self.encoded or Encoded(self.folder, self.split)
        # Columns 0 to 3 are the caller's (crop and flip on the device), 4 for each of ten attempts are ours.
        draws = uniforms(self.seed, epoch, ids, 44)[:, 4:] if self.train else None
        crops = torch.empty(len(ids), self.size, self.size, 3, dtype=torch.uint8)
        error = ""
        for k, i in enumerate(ids):
            try:
                image = self.encoded.decode(int(i))
            except ValueError as found:
                error = str(found)
                break
            crop = central_crop(image, self.size) if draws is None else None
            crop = random_resized_crop(image, self.size, draws[k]) if crop is None else crop
            crops[k] = torch.from_numpy(crop)
        return epoch, ids, crops, error


_FOR_THE_TRAINER = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)  # it decides what they mean


@functools.cache
def _forkserver() -> multiprocessing.context.BaseContext:
    """How workers start. A fork of this process would copy its sockets, and locks that threads of the process
    group, CUDA or telemetry may hold just then; spawn would import the script, and torch, once per worker and
    epoch. The fork server has neither fault: it imports once, has no threads of ours, then forks.
    """
    atexit.register(_kill_workers)
    # A worker runs the script's top level again (Python 3.11's server does not preload "__main__"): that is
    # quick when the server has imported what the script did.
    values = list(vars(sys.modules["__main__"]).values())
    names = [x.__name__ if isinstance(x, ModuleType) else getattr(x, "__module__", None) for x in values]
    modules = sorted({name for name in names if isinstance(name, str) and name in sys.modules} - {"__main__"})
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["common.images", "torchvision.io", *modules])
    # Python 3.11 does not give the server our sys.path: a script started from elsewhere would not import.
    before = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, sys.path))
    # The server and its workers inherit the mask: a signal to the whole group can't end a worker that starts.
    multiprocessing.resource_tracker.ensure_running()  # first, as it unblocks these signals
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, _FOR_THE_TRAINER)
    try:
        multiprocessing.forkserver.ensure_running()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        if before is None:
            del os.environ["PYTHONPATH"]
        else:
            os.environ["PYTHONPATH"] = before
    return context


def _kill_workers() -> None:
    """At exit, when the traceback of what went wrong still holds the batches: multiprocessing would send its
    workers SIGTERM, which they ignore, and wait for ever."""
    for process in multiprocessing.active_children():
        if process.daemon:
            process.kill()


def _start_worker(_: int) -> None:
    """Signals to the whole group are for the trainer to judge. When it is gone, even killed, the worker goes:
    torch's own watch would look at the worker's parent, which is the fork server, and alive."""

    def watch() -> None:
        multiprocessing.parent_process().join()
        os._exit(1)

    for number in _FOR_THE_TRAINER:
        signal.signal(number, signal.SIG_IGN)
    threading.Thread(target=watch, daemon=True).start()


@dataclass(frozen=True)
class Images:
    """A data set: splits train and val (val_name says whether that is "val" or "test") and class names.

    source: the data's name and the key of its content, equal on all hosts that have the same.
    mirror: whether a mirrored image keeps its class; False for digits.
    """

    source: str
    classes: tuple[str, ...]
    train: ArraySplit | FileSplit
    val: ArraySplit | FileSplit
    val_name: str
    mirror: bool


def load(accelerator: Accelerator, recipe: ImageRecipe) -> Images:
    """The data set that recipe.data names, the same on all processes; prepared by one process per host."""
    cache_dir = Path(recipe.cache_dir or "~/.cache/train-images")
    folder = once_per_host(
        accelerator, "data", lambda beat: str(prepare(recipe.data, cache_dir, beat)), recipe.timeout_s
    )
    images = open_images(Path(folder))
    kind = [images.source, images.val_name, type(images.train).__name__]
    counts = {"training images": len(images.train), "validation images": len(images.val)}
    agree(accelerator, {"data": kind, "classes": images.classes, **counts})
    return images


def open_images(folder: Path) -> Images:
    """Maps the folder that `prepare` returned into memory."""
    about = json.loads((folder / "meta.json").read_text())
    splits = []
    for split in SPLITS:
        labels = np.load(folder / f"{split}_labels.npy")
        if about["kind"] == "array":
            # mode "c": pages are shared with all processes; torch would warn about an array it may not write
            splits.append(ArraySplit(np.load(folder / f"{split}_images.npy", mmap_mode="c"), labels))
        else:
            splits.append(FileSplit(folder, split, labels))
    return Images(about["source"], tuple(about["classes"]), *splits, about["val_name"], about["mirror"])
