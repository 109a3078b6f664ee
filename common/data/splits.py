"""The splits of a data set, by how their images are kept: as one array, as files, as shards.

All give micro-batches in the order of a plan, uint8 on the device. Those that fit in memory are decoded
already; the others are decoded by the workers of a DataLoader (common/data/workers.py).
"""

import math
import os
from collections.abc import Iterator
from contextlib import closing
from functools import cached_property, partial
from itertools import chain
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from common.data.encoded import Encoded
from common.data.shard_cache import ShardCache, ShardPrefetcher
from common.data.shards import Shard, ShardImages
from common.data.workers import MicroBatch, decoded, in_flight, send
from common.order import Plan, Samples, Shuffled, Streamed
from common.recipe import Batch
from common.system.env import processes_per_host


class ArraySplit(Shuffled):
    """One split as an array in a file: uint8 [N, H, W, 3], and labels int64 [N].

    On the host its rows are read, not copied out of the mapped array: what is cut off a mapped file while it
    is in use kills the process (SIGBUS). Both come from the page cache, which all processes share. Reading
    takes 1.2 us for an image of 32 x 32, on one core.
    """

    cropped = False  # random crops are left to the caller

    def __init__(self, images: np.memmap, labels: np.ndarray):
        super().__init__(len(labels))
        self.images, self.labels = images, labels
        self.file = open(images.filename, "rb", buffering=0)  # noqa: SIM115
        self._resident: dict[torch.device, Tensor | None] = {}

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
        Raises ValueError when the file is cut.
        """
        device = torch.device(device)
        if device not in self._resident:
            self._resident[device] = self._move(device)
        pixels, labels = self._resident[device], torch.from_numpy(self.labels)
        for epoch, ids in plan:
            rows = torch.as_tensor(ids, dtype=torch.int64)
            if pixels is None:
                images = send(self._read(ids, pinned=device.type == "cuda"), device)
            else:
                images = pixels.index_select(0, send(rows, device))
            targets = send(labels.index_select(0, rows), device)
            yield epoch, ids, images.view(-1, *self.images.shape[1:]), targets

    def _read(self, ids: np.ndarray, pinned: bool) -> Tensor:
        """uint8 [b, H * W * 3]"""
        row_bytes = self.images.strides[0]
        # page-locked by torch's caching allocator, which waits for the copy before it reuses them
        images = torch.empty(len(ids), row_bytes, dtype=torch.uint8, pin_memory=pinned)
        for row, i in zip(images.numpy(), ids.tolist(), strict=True):
            if os.preadv(self.file.fileno(), [row], self.images.offset + i * row_bytes) < row_bytes:
                raise ValueError(
                    f"{self.file.name} is shorter than it was: remove its folder, and the same command"
                    " prepares it again"
                )
        return images

    def _move(self, device: torch.device) -> Tensor | None:
        """The whole split on the device, or None: on CUDA it may take a quarter of the memory free now."""
        if device.type == "cuda" and self.nbytes <= torch.cuda.mem_get_info(device)[0] // 4:
            return torch.from_numpy(self.images).view(len(self), -1).to(device)
        return None


class FileSplit(Shuffled):
    """One split of encoded images, too large for memory or of differing sizes; labels int64 [N]."""

    cropped = True  # at random, when it is decoded for training

    def __init__(self, folder: Path, split: str, labels: np.ndarray, skip: bool = False):
        """skip: whether broken images are passed over in training."""
        super().__init__(len(labels))
        self.open, self.labels, self.skip = partial(Encoded, folder, split), labels, skip

    def batches(
        self, plan: Plan, *, device, train: bool, size: int, seed: int, workers: int
    ) -> Iterator[MicroBatch]:
        """Yields (epoch, ids [b], uint8 [b, size, size, 3], labels int64 [b]) in the order of the plan.

        The last two are on the device. train: a random resized crop from (seed, epoch, sample) alone; else
        the central crop. Decoded in `workers` processes, or here with 0. Raises ValueError that names an
        image which can't be decoded.
        """
        options = dict(device=torch.device(device), train=train, size=size, seed=seed, workers=workers)
        return decoded(self.open, self.labels, plan, skip=self.skip and train, **options)


class ShardSplit:
    """One split of encoded images in tar files of this host, or in S3 behind a cache; labels int64 [N]."""

    cropped = True  # at random, when it is decoded for training

    def __init__(
        self,
        index: Path,
        folder: Path,
        shards: tuple[Shard, ...],
        labels: np.ndarray,
        samples: Samples,
        skip: bool,
        workers: int,
        cache: ShardCache | None = None,
        beside: "ShardSplit | None" = None,
        evaluated: float = 1.0,
    ):
        """index: its file. folder: of the shards, or of the cache that they come to. samples: in which order
        they are learned from. beside: the split that is evaluated while this one's training pauses, by so
        many workers in each process. evaluated: the share of this split that --max_val_images leaves."""
        self.index, self.shards, self.labels, self.samples = index, shards, labels, samples
        self.skip, self.workers, self.cache = skip, workers, cache
        self.beside, self.evaluated = beside, evaluated
        self.open = partial(ShardImages, index, tuple(str(folder / shard.file) for shard in shards))

    def __len__(self) -> int:
        return len(self.labels)

    def check(self, batch: Batch) -> None:
        """Raises ValueError where the streams do not go with the batch, or their shards into the cache."""
        self.samples.check(batch)
        if self.cache is None or not isinstance(self.samples, Streamed):
            return
        need = self.needed_bytes(batch)
        if need > self.cache.limit_bytes:
            enough_gib = math.ceil(need / 2**30 * 1000) / 1000
            raise ValueError(
                f"--cache_gib {self.cache.limit_bytes / 2**30:g} can't hold what a host reads at once, the"
                f" windows of its streams and an evaluation: give {enough_gib:g},"
                " a smaller --shuffle_window, fewer --streams, or prepare smaller shards"
            )

    def needed_bytes(self, batch: Batch) -> int:
        """Of the shards that a host reads at once in a training with its evaluations, at most."""
        streams = self.samples.streams * processes_per_host() // batch.processes
        steps = math.ceil(in_flight(self.workers) / batch.accumulations)
        flying = steps * batch.total // self.samples.streams  # images of one stream
        span = 2 * self.samples.window + flying  # the windows of the first and the last, and all between
        training = min(streams * self._span_bytes(span), self._span_bytes(len(self)))
        return math.ceil(training + processes_per_host() * self._evaluation_bytes(batch.per_device))

    def _span_bytes(self, images: float) -> float:
        """Of the shards that so many images are in, which follow one another; of those at the ends all."""
        total = sum(shard.bytes for shard in self.shards)
        ends = 2 * max(shard.bytes for shard in self.shards)
        return min(images / len(self) * total + ends, total)

    def _evaluation_bytes(self, per_device: int) -> float:
        """Of the shards that an evaluation beside a training needs at once, in one process."""
        if self.beside is None:
            return 0
        return self.beside._span_bytes(in_flight(self.workers) * per_device / self.beside.evaluated)

    def order(self, seed: int, epoch: int, batch: Batch) -> np.ndarray:
        return self.samples.order(seed, epoch, batch)

    def batches(
        self, plan: Plan, *, device, train: bool, size: int, seed: int, workers: int
    ) -> Iterator[MicroBatch]:
        """As FileSplit's. From S3: ValueError also when a shard can't be had."""
        options = dict(device=torch.device(device), train=train, size=size, seed=seed, workers=workers)
        options |= dict(skip=self.skip and train)
        if self.cache is None:
            yield from decoded(self.open, self.labels, plan, **options)
            return
        items = iter(plan)
        first = next(items, None)
        if first is None:
            return
        kept = self._evaluation_bytes(len(first[1])) if train else 0
        plan, flying = chain([first], items), in_flight(workers)
        with (
            self.cache.room(kept) as room_bytes,
            closing(ShardPrefetcher(plan, self._files_of, self.cache, room_bytes, flying)) as supply,
        ):
            yield from decoded(self.open, self.labels, supply, **options)

    def _files_of(self, ids: np.ndarray) -> set[str]:
        return {self.shards[k].file for k in set(self.rows[ids, 0].tolist())}

    @cached_property
    def rows(self) -> np.ndarray:
        """The index, int64 [N, 4]."""
        return np.load(self.index)


Split = ArraySplit | FileSplit | ShardSplit
