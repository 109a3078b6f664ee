"""The splits of a data set, by the form of their images: one array, files, or shards.

All yield micro-batches in the order of a plan, uint8 on the device. Arrays hold decoded images; the workers
of a DataLoader decode the others (onecurve/data/workers.py).
"""

import math
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from functools import cached_property, partial
from itertools import chain, groupby, islice
from operator import itemgetter
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch
from torch import Tensor

from onecurve.data.crops import CROP_SCALE
from onecurve.data.encoded import ArrayImages, CachedImages, Encoded
from onecurve.data.names import NAMES_LIMIT, NameOf, nameless, names_file, open_names, read_names
from onecurve.data.workers import MicroBatch, decoded, in_flight
from onecurve.flags.recipe import Batch, ImageRecipe, parse_fold
from onecurve.models.preprocessing import IMAGENET_CROP, Crop
from onecurve.numerics.augment import FLIP, gather, moved_pixels, moves, send
from onecurve.numerics.order import Plan, Shuffled, Streamed, hashes, uniforms
from onecurve.system.env import processes_per_host

if TYPE_CHECKING:  # for shards
    from onecurve.data.shard_cache import ShardCache
    from onecurve.data.shards import ShardManifest

AHEAD = 64  # micro-batches whose labels and pixels' places are sent at once


class SplitPart(NamedTuple):
    """The images of a split: all that a cache folder stores as "train" or "val", or some of them."""

    split: str  # where they are stored
    labels: np.ndarray  # int64 [N]
    file: Path | None = None  # the ids of these images in the stored split, int64 [N]; None: all
    folder: Path | None = None  # in the cache

    def stored(self, ids: np.ndarray) -> np.ndarray:
        return ids if self.file is None else np.load(self.file)[ids]

    def names(self) -> NameOf:
        """Return a function from the numbers of stored images to their file names."""
        if self.folder is None:
            return nameless
        count = len(np.load(self.folder / f"{self.split}_labels.npy", mmap_mode="r"))
        return open_names(self.folder / names_file(self.split), count)


def hold_out(folder: Path, holdout: float | str) -> None:
    """Divides the training split of a cache folder: writes the ids of its parts, each ascending.

    holdout: a share below 1, a number of images, or a fold.
    """
    is_held_out = held_out(np.load(folder / "train_labels.npy"), holdout)
    np.save(part_file(folder, "train"), np.flatnonzero(~is_held_out))
    np.save(part_file(folder, "val"), np.flatnonzero(is_held_out))


def part_file(folder: Path, part: str) -> Path:
    """The ids of the images that --holdout leaves in "train", or takes out of it, "val": int64 [n]."""
    return folder / f"{part}_part.npy"


def held_out(labels: np.ndarray, holdout: float | str) -> np.ndarray:
    """The images that are held out: bool [N]. labels: int64 [N].

    The same share of each class, by a fixed hash of the images' ids: no seed changes the choice. A class
    keeps one training image at least. Raises ValueError where that leaves too few.
    """
    count, sizes, is_held_out = len(labels), np.bincount(labels), np.zeros(len(labels), bool)
    if isinstance(holdout, str):  # the sizes of folds, and of a class in them, differ by one image at most
        number, folds = parse_fold(holdout)
        if folds > count or 1 in sizes:
            raise ValueError(f"--fold {holdout}: {count:,} images, {sizes.min()} of a class, are too few")
        is_held_out[np.lexsort((hashes(count), labels))[number - 1 :: folds]] = True
        return is_held_out
    wanted = round(holdout * count) if holdout < 1 else int(holdout)
    spare = np.maximum(sizes - 1, 0)
    if not 0 < wanted <= spare.sum():
        raise ValueError(
            f"--holdout {holdout:g} is {wanted:,} of {count:,} training images: choose 1 to {spare.sum():,},"
            " as each class keeps one"
        )
    exact = sizes * wanted / count
    shares = np.minimum(exact.astype(np.int64), spare)
    while (missing := wanted - shares.sum()) > 0:  # to the classes that are furthest below their share
        open_classes = np.flatnonzero(shares < spare)
        order = np.argsort(shares[open_classes] - exact[open_classes], kind="stable")
        shares[open_classes[order[:missing]]] += 1
    order = hashes(count)
    for label in np.flatnonzero(shares):
        ids = np.flatnonzero(labels == label)
        is_held_out[ids[np.argsort(order[ids], kind="stable")[: shares[label]]]] = True
    return is_held_out


class ArraySplit(Shuffled):
    """One split as a mapped array, uint8 [stored images, H, W, 3], and its labels, int64 [N]."""

    cropped = False
    part: SplitPart
    mirror = False  # training also flips images

    def __init__(self, images: np.ndarray, part: SplitPart):
        super().__init__(len(part.labels))
        self.images, self.labels = images, part.labels
        self.rows = None if part.file is None else np.load(part.file)  # of the images; None: all
        self._resident: dict[torch.device, Tensor | None] = {}

    def names(self) -> NameOf:
        return self.part.names()

    @property
    def size(self) -> tuple[int, int]:
        """Height and width in pixels."""
        return self.images.shape[1:3]

    def batches(
        self,
        plan: Plan,
        *,
        device: torch.device | str,
        train: bool,
        size: int,
        seed: int,
        workers: int,
        crop: Crop = IMAGENET_CROP,
        crop_scale: tuple[float, ...] = CROP_SCALE,
    ) -> Iterator[MicroBatch]:
        """Yields micro-batches of whole images in the order of the plan.

        train: shifted by up to an eighth of their height, by (seed, epoch, sample) alone. size, workers, crop
        and crop_scale, which FileSplit needs, are not used.
        """
        device = torch.device(device)
        if device not in self._resident:
            self._resident[device] = self._move(device)
        resident = self._resident[device]
        for epoch, ids, labels, places in self._sent_ahead(plan, device, train, seed):
            images = self._read(ids, device) if resident is None else resident
            if train:
                images = gather(images, *places)
            elif resident is not None:
                images = images.index_select(0, *places)
            yield MicroBatch(epoch, ids, images, labels)

    def _sent_ahead(
        self, plan: Plan, device: torch.device, train: bool, seed: int
    ) -> Iterator[tuple[int, np.ndarray, Tensor, list[Tensor]]]:
        """Yields epoch, ids, labels and rows of each micro-batch; in training moved_pixels(), not rows.

        What the host knows of the images of up to AHEAD micro-batches crosses to the device in one copy: 40
        bytes an image, which take 40 + 4 * (H + W) there.
        """
        resident, pad = self._resident[device], min(self.size[0] // 8, self.size[1] - 1)  # 4 pixels of 32
        for epoch, items in groupby(plan, itemgetter(0)):
            while group := [ids for _, ids in islice(items, AHEAD)]:
                ids, sizes = np.concatenate(group), [len(each) for each in group]
                rows = np.concatenate([np.arange(size) for size in sizes]) if resident is None else ids
                moved = list(moves(uniforms(seed, epoch, ids, FLIP.stop), pad, self.mirror)) if train else []
                sent = send(torch.from_numpy(np.stack([self.labels[ids], rows, *moved])), device)
                places: tuple[Tensor, ...] = (sent[1],)
                if train:
                    count = max(sizes) if resident is None else len(resident)
                    places = moved_pixels(sent[1], sent[2:], (count, *self.images.shape[1:]))
                parts = (part.split(sizes) for part in (sent[0], *places))
                for ids, labels, *own in zip(group, *parts, strict=True):
                    yield epoch, ids, labels, own

    def _read(self, ids: np.ndarray, device: torch.device) -> Tensor:
        """Copies images of the mapped array to the device: uint8 [b, H, W, 3]."""
        # page-locked by torch's caching allocator, which waits for the copy before it reuses them
        pinned = device.type == "cuda"
        images = torch.empty(len(ids), *self.images.shape[1:], dtype=torch.uint8, pin_memory=pinned)
        # mode: the default would copy twice
        np.take(self.images, ids if self.rows is None else self.rows[ids], 0, images.numpy(), mode="clip")
        return send(images, device)

    def _move(self, device: torch.device) -> Tensor | None:
        """The images on a CUDA device, if a quarter of its free memory holds them."""
        size = len(self) * self.images.strides[0]
        if device.type == "cuda" and size <= torch.cuda.mem_get_info(device)[0] // 4:
            return torch.from_numpy(self.images if self.rows is None else self.images[self.rows]).to(device)
        return None


class EncodedSplit(Shuffled):
    """One split of encoded images; labels int64 [N]. skip: in training, skip broken images."""

    cropped = True
    part: SplitPart
    mirror = False  # training also flips crops
    open: Callable[[], Encoded]
    labels: np.ndarray
    skip: bool

    def names(self) -> NameOf:
        return self.part.names()

    def batches(
        self,
        plan: Plan,
        *,
        device: torch.device | str,
        train: bool,
        size: int,
        seed: int,
        workers: int,
        crop: Crop = IMAGENET_CROP,
        crop_scale: tuple[float, ...] = CROP_SCALE,
    ) -> Iterator[MicroBatch]:
        """Yields micro-batches of size x size crops in the order of the plan.

        train: a random resized crop from (seed, epoch, sample) alone, with an area within crop_scale; else
        the evaluation's crop. `workers` processes decode, or with 0 this one. Raises ValueError that names a
        broken image, or a shard that can't be fetched from S3.
        """
        with self._fetched(plan, train, workers) as plan:
            yield from decoded(
                self.open,
                self.labels,
                plan,
                device=torch.device(device),
                train=train,
                size=size,
                seed=seed,
                workers=workers,
                skip=self.skip and train,
                flip=self.mirror and train,
                crop=crop,
                crop_scale=crop_scale,
            )

    @contextmanager
    def _fetched(self, plan: Plan, train: bool, workers: int) -> Iterator[Plan]:
        """Yields the plan; each of its items comes once its images are on this host."""
        yield plan


class FileSplit(EncodedSplit):
    """Images in a cache folder, or in files that it names: too large for memory, or of differing sizes."""

    def __init__(self, folder: Path, part: SplitPart, skip: bool = False):
        super().__init__(len(part.labels))
        self.open = partial(CachedImages, folder, part.split, part.file)
        self.labels, self.skip = part.labels, skip


class CroppedSplit(EncodedSplit):
    """The images of an array, cropped as files are: for a model that was evaluated so."""

    def __init__(self, split: ArraySplit):
        super().__init__(len(split))
        assert isinstance(split.images, np.memmap)
        self.open = partial(ArrayImages, str(split.images.filename), split.rows)
        self.labels, self.part, self.mirror, self.skip = split.labels, split.part, split.mirror, False


class ShardSplit(EncodedSplit):
    """Images in tar files of this host, or in S3 behind a cache."""

    def __init__(
        self,
        folder: Path,
        manifest: "ShardManifest",
        place: str,
        part: SplitPart,
        recipe: ImageRecipe,
        cache: "ShardCache | None",
        beside: "ShardSplit | None" = None,
    ):
        """folder: of the index. place: of the manifest, and without a cache of the shards. beside: the split
        that is evaluated, by as many workers, while training on this one pauses; None for a split that is
        evaluated."""
        from onecurve.data.shards import ShardImages, index_name

        super().__init__(len(part.labels))
        self.index, self.ids, self.labels = folder / index_name(part.split), part.file, part.labels
        self.place = place
        self.shards, self.cache, self.beside = manifest.shards_in(part.split), cache, beside
        self.skip, self.workers = recipe.on_bad_image == "skip", recipe.workers
        self.samples: Shuffled | Streamed = Shuffled(len(self))  # the order of training
        if beside and manifest.kind != "index":
            assert recipe.streams is not None
            counts = [shard.images for shard in self.shards]
            if part.file is not None:
                counts = np.bincount(self.rows[:, 0], minlength=len(counts)).tolist()
            self.samples = Streamed(counts, recipe.streams, recipe.shuffle_window)
        # The share of this split that --max_val_images leaves
        self.evaluated = 1.0 if beside else min(1.0, (recipe.max_val_images or math.inf) / len(self))
        files = (cache.path(shard.file) if cache else Path(place) / shard.file for shard in self.shards)
        self.images_of = partial(ShardImages, self.index, tuple(map(str, files)))  # of a part of the split
        self.open = partial(self.images_of, part.file)

    def check(self, batch: Batch) -> None:
        """Raises ValueError if the streams do not fit the batch, or their shards the cache."""
        self.samples.check(batch)
        if self.cache is None or not isinstance(self.samples, Streamed):
            return
        need = self.needed_bytes(batch)
        if need > self.cache.limit_bytes:
            enough_gib = math.ceil(need / 2**30 * 1000) / 1000
            raise ValueError(
                f"--cache_gib {self.cache.limit_bytes / 2**30:g} can't hold the shards that a host reads at"
                f" once for the windows of its streams and an evaluation: give {enough_gib:g},"
                " a smaller --shuffle_window, fewer --streams, or prepare smaller shards"
            )

    def needed_bytes(self, batch: Batch) -> int:
        """The most bytes of shards that a host reads at once in a training with its evaluations."""
        assert isinstance(self.samples, Streamed)
        streams = self.samples.streams * processes_per_host() // batch.processes
        steps = math.ceil(in_flight(self.workers) / batch.accumulations)
        flying = steps * batch.total // self.samples.streams  # images of one stream
        span = 2 * self.samples.window + flying  # the windows of the first and the last, and all between
        training = min(streams * self._span_bytes(span), self._span_bytes(len(self)))
        return math.ceil(training + processes_per_host() * self._evaluation_bytes(batch.per_device))

    def _span_bytes(self, images: float) -> float:
        """Bytes of the shards of so many consecutive images, whole shards at both ends."""
        total = sum(shard.bytes for shard in self.shards)
        ends = 2 * max(shard.bytes for shard in self.shards)
        return min(images / len(self) * total + ends, total)

    def _evaluation_bytes(self, per_device: int) -> float:
        """Bytes of the shards that one process reads at once in an evaluation during a training."""
        if self.beside is None:
            return 0
        return self.beside._span_bytes(in_flight(self.workers) * per_device / self.beside.evaluated)

    def order(self, seed: int, epoch: int, batch: Batch) -> np.ndarray:
        return self.samples.order(seed, epoch, batch)

    @contextmanager
    def _fetched(self, plan: Plan, train: bool, workers: int) -> Iterator[Plan]:
        from onecurve.data.shard_cache import ShardPrefetcher

        items = iter(plan)
        first = next(items, None)
        if self.cache is None or first is None:
            yield () if first is None else chain([first], items)
            return
        kept = self._evaluation_bytes(len(first[1])) if train else 0
        plan, flying = chain([first], items), in_flight(workers)
        with (
            self.cache.reserve(kept) as reserved_bytes,
            closing(ShardPrefetcher(plan, self._files_of, self.cache, reserved_bytes, flying)) as available,
        ):
            yield available

    def names(self) -> NameOf:
        """Return a function from the numbers of stored images to their names: those beside the index.

        Shards of an earlier version have none there. On a disk they are then read from the tar headers.
        """
        file, count = names_file(self.part.split), sum(shard.images for shard in self.shards)
        if self.place.startswith("s3://"):
            from onecurve.system.s3 import ObjectStore

            lines = ObjectStore(self.place).read(file, NAMES_LIMIT)
            return nameless if lines is None else read_names(lines, count, f"{self.place}/{file}")
        if (path := Path(self.place) / file).exists():
            return open_names(path, count)
        return nameless if self.cache else self.images_of(None).name

    def _files_of(self, ids: np.ndarray) -> set[str]:
        return {self.shards[k].file for k in set(self.rows[ids, 0].tolist())}

    @cached_property
    def rows(self) -> np.ndarray:
        """The index's rows of these images: int64 [N, 4]."""
        rows = np.load(self.index)
        return rows if self.ids is None else rows[np.load(self.ids)]


Split = ArraySplit | FileSplit | ShardSplit | CroppedSplit
