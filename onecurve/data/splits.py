"""Splits of a data set, which are stored as an array, as files, or as shards.

All splits yield micro-batches in the order of a plan. Images are uint8 tensors on the device. An array
contains decoded images, and DataLoader workers decode images from files and shards
(onecurve/data/workers.py).
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

if TYPE_CHECKING:  # imported at run time only for shards
    from onecurve.data.shard_cache import ShardCache
    from onecurve.data.shards import ShardManifest

AHEAD = 64  # number of micro-batches whose labels and pixel positions are sent to the device in one copy


class SplitPart(NamedTuple):
    """Images of a split, which are some or all of the images that a cache folder stores under one name.

    Attributes:
        split: Name under which the images are stored, for example "train".
        labels: Labels of the images, int64 [N].
        file: File with the ids of the images in the stored split, int64 [N]. None selects all images.
        folder: Folder in the cache.
    """

    split: str
    labels: np.ndarray
    file: Path | None = None
    folder: Path | None = None

    def stored(self, ids: np.ndarray) -> np.ndarray:
        """Convert sample ids in this part to ids in the stored split."""
        return ids if self.file is None else np.load(self.file)[ids]

    def names(self) -> NameOf:
        """Return a function that maps ids in the stored split to file names."""
        if self.folder is None:
            return nameless
        count = len(np.load(self.folder / f"{self.split}_labels.npy", mmap_mode="r"))
        return open_names(self.folder / names_file(self.split), count)


def hold_out(folder: Path, holdout: float | str) -> None:
    """Divide the training split of a cache folder into two parts, and write the sorted ids of each part.

    Args:
        folder: Folder in the cache.
        holdout: Share below 1, number of images, or fold to hold out.
    """
    is_held_out = held_out(np.load(folder / "train_labels.npy"), holdout)
    np.save(part_file(folder, "train"), np.flatnonzero(~is_held_out))
    np.save(part_file(folder, "val"), np.flatnonzero(is_held_out))


def part_file(folder: Path, part: str) -> Path:
    """Return the file with the ids of the training images ("train") or held-out images ("val"), int64 [n]."""
    return folder / f"{part}_part.npy"


def held_out(labels: np.ndarray, holdout: float | str) -> np.ndarray:
    """Choose the same share of each class to hold out, by a fixed hash of the image ids.

    The choice does not depend on the seed. Each class keeps at least one training image.

    Args:
        labels: Labels of the training images, int64 [N].
        holdout: Share below 1, number of images, or fold to hold out.

    Returns:
        Mask that is True for held-out images, bool [N].

    Raises:
        ValueError: There are too few images to divide.
    """
    count, sizes, is_held_out = len(labels), np.bincount(labels), np.zeros(len(labels), bool)
    if isinstance(holdout, str):  # folds differ in size by at most one image, in total and per class
        number, folds = parse_fold(holdout)
        if folds > count or 1 in sizes:
            raise ValueError(
                f"--fold {holdout}: {count:,} images, {sizes.min()} in the smallest class, are too few"
            )
        is_held_out[np.lexsort((hashes(count), labels))[number - 1 :: folds]] = True
        return is_held_out
    target = round(holdout * count) if holdout < 1 else int(holdout)
    spare = np.maximum(sizes - 1, 0)
    if not 0 < target <= spare.sum():
        raise ValueError(
            f"--holdout {holdout:g} is {target:,} of {count:,} training images. Choose 1 to {spare.sum():,},"
            " because each class keeps one"
        )
    exact = sizes * target / count
    shares = np.minimum(exact.astype(np.int64), spare)
    while (missing := target - shares.sum()) > 0:  # add images of the classes furthest below their share
        open_classes = np.flatnonzero(shares < spare)
        order = np.argsort(shares[open_classes] - exact[open_classes], kind="stable")
        shares[open_classes[order[:missing]]] += 1
    order = hashes(count)
    for label in np.flatnonzero(shares):
        ids = np.flatnonzero(labels == label)
        is_held_out[ids[np.argsort(order[ids], kind="stable")[: shares[label]]]] = True
    return is_held_out


class ArraySplit(Shuffled):
    """Split stored as a memory-mapped array of decoded images, uint8 [stored images, H, W, 3]."""

    cropped = False
    part: SplitPart
    mirror = False  # whether training flips images

    def __init__(self, images: np.ndarray, part: SplitPart):
        super().__init__(len(part.labels))
        self.images, self.labels = images, part.labels
        self.rows = None if part.file is None else np.load(part.file)  # rows of the split; None means all
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
        """Yield micro-batches of whole images in the order of the plan.

        In training, each image is shifted by up to an eighth of its height. The shift depends only on (seed,
        epoch, sample). This method ignores `size`, `workers`, `crop` and `crop_scale`, which only FileSplit
        uses.
        """
        device = torch.device(device)
        if device not in self._resident:
            self._resident[device] = self._move(device)
        resident = self._resident[device]
        for epoch, ids, labels, indices in self._sent_ahead(plan, device, train, seed):
            images = self._read(ids, device) if resident is None else resident
            if train:
                images = gather(images, *indices)
            elif resident is not None:
                images = images.index_select(0, *indices)
            yield MicroBatch(epoch, ids, images, labels)

    def _sent_ahead(
        self, plan: Plan, device: torch.device, train: bool, seed: int
    ) -> Iterator[tuple[int, np.ndarray, Tensor, list[Tensor]]]:
        """Yield the epoch, ids, labels and pixel indices of each micro-batch.

        In evaluation, the indices are the rows of the images. In training, they are the result of
        moved_pixels(). The labels and positions for up to AHEAD micro-batches are sent to the device in one
        copy of 40 bytes per image. On the device, they occupy 40 + 4 * (H + W) bytes per image.
        """
        resident, pad = self._resident[device], min(self.size[0] // 8, self.size[1] - 1)  # 4 pixels of 32
        for epoch, items in groupby(plan, itemgetter(0)):
            while group := [ids for _, ids in islice(items, AHEAD)]:
                ids, sizes = np.concatenate(group), [len(batch_ids) for batch_ids in group]
                rows = np.concatenate([np.arange(size) for size in sizes]) if resident is None else ids
                moved = list(moves(uniforms(seed, epoch, ids, FLIP.stop), pad, self.mirror)) if train else []
                sent = send(torch.from_numpy(np.stack([self.labels[ids], rows, *moved])), device)
                indices: tuple[Tensor, ...] = (sent[1],)
                if train:
                    count = max(sizes) if resident is None else len(resident)
                    indices = moved_pixels(sent[1], sent[2:], (count, *self.images.shape[1:]))
                tensors = (tensor.split(sizes) for tensor in (sent[0], *indices))
                for ids, labels, *batch_indices in zip(group, *tensors, strict=True):
                    yield epoch, ids, labels, batch_indices

    def _read(self, ids: np.ndarray, device: torch.device) -> Tensor:
        """Copy images from the memory-mapped array to the device, uint8 [b, H, W, 3]."""
        # Pinned memory is safe here, because torch's caching allocator reuses it only after the copy has
        # ended.
        pinned = device.type == "cuda"
        images = torch.empty(len(ids), *self.images.shape[1:], dtype=torch.uint8, pin_memory=pinned)
        # mode="clip" avoids the second copy that the default mode makes.
        np.take(self.images, ids if self.rows is None else self.rows[ids], 0, images.numpy(), mode="clip")
        return send(images, device)

    def _move(self, device: torch.device) -> Tensor | None:
        """Return the images on a CUDA device, or None if they exceed a quarter of its free memory."""
        size = len(self) * self.images.strides[0]
        if device.type == "cuda" and size <= torch.cuda.mem_get_info(device)[0] // 4:
            return torch.from_numpy(self.images if self.rows is None else self.images[self.rows]).to(device)
        return None


class EncodedSplit(Shuffled):
    """Split of encoded images."""

    cropped = True
    part: SplitPart
    mirror = False  # whether training flips crops
    open: Callable[[], Encoded]
    labels: np.ndarray  # int64 [N]
    skip: bool  # whether training skips broken images

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
        """Yield micro-batches of size x size crops in the order of the plan.

        Args:
            plan: Epochs and sample ids of the micro-batches.
            device: Device of the results.
            train: Whether to use random resized crops instead of the evaluation crop. Random crops depend
                only on (seed, epoch, sample).
            size: Height and width of the crops in pixels.
            seed: Seed of the random crops and flips.
            workers: Number of processes that decode. 0 decodes in this process.
            crop: Crop for evaluation. Random crops use the same interpolation.
            crop_scale: Minimum and maximum area of a random crop, as fractions of the image's area.

        Raises:
            ValueError: An image is broken, or a shard can't be fetched from S3. The message names the image
                or shard.
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
        """Yield an iterator over the plan that yields each item once the item's images are on this host."""
        yield plan


class FileSplit(EncodedSplit):
    """Split of encoded images (in a cache folder or files) that differ in size or do not fit into memory."""

    def __init__(self, folder: Path, part: SplitPart, skip: bool = False):
        super().__init__(len(part.labels))
        self.open = partial(CachedImages, folder, part.split, part.file)
        self.labels, self.skip = part.labels, skip


class CroppedSplit(EncodedSplit):
    """Split that crops an array's images like image files, for models that were evaluated on crops."""

    def __init__(self, split: ArraySplit):
        super().__init__(len(split))
        assert isinstance(split.images, np.memmap)
        self.open = partial(ArrayImages, str(split.images.filename), split.rows)
        self.labels, self.part, self.mirror, self.skip = split.labels, split.part, split.mirror, False


class ShardSplit(EncodedSplit):
    """Split of images in tar files, which are stored on this host or in S3 with a local cache.

    Args:
        folder: Folder in the cache that contains the index.
        manifest: Manifest of the shards.
        location: Folder or S3 prefix of the manifest. Without a cache, this folder also contains the shards.
        part: Images of the split.
        recipe: Recipe with the settings for shards.
        cache: Local cache of the shards in S3, or None for shards on this host.
        evaluated_split: For the training split, the split that the same number of workers reads for
            evaluation while training pauses. None for an evaluated split.
    """

    def __init__(
        self,
        folder: Path,
        manifest: "ShardManifest",
        location: str,
        part: SplitPart,
        recipe: ImageRecipe,
        cache: "ShardCache | None",
        evaluated_split: "ShardSplit | None" = None,
    ):
        from onecurve.data.shards import ShardImages, index_name

        super().__init__(len(part.labels))
        self.index, self.ids, self.labels = folder / index_name(part.split), part.file, part.labels
        self.location = location
        self.shards, self.cache = manifest.shards_in(part.split), cache
        self.evaluated_split = evaluated_split
        self.skip, self.workers = recipe.on_bad_image == "skip", recipe.workers
        self.samples: Shuffled | Streamed = Shuffled(len(self))  # order of the samples in training
        if evaluated_split and manifest.kind != "index":
            assert recipe.streams is not None
            counts = [shard.images for shard in self.shards]
            if part.file is not None:
                counts = np.bincount(self.rows[:, 0], minlength=len(counts)).tolist()
            self.samples = Streamed(counts, recipe.streams, recipe.shuffle_window)
        # Share of this split that remains with --max_val_images
        share = min(1.0, (recipe.max_val_images or math.inf) / len(self))
        self.evaluated_share = 1.0 if evaluated_split else share
        files = (cache.path(shard.file) if cache else Path(location) / shard.file for shard in self.shards)
        self.open_images = partial(ShardImages, self.index, tuple(map(str, files)))  # takes an ids_file
        self.open = partial(self.open_images, part.file)

    def check(self, batch: Batch) -> None:
        """Raise ValueError if the streams do not fit the batch, or the shards do not fit into the cache."""
        self.samples.check(batch)
        if self.cache is None or not isinstance(self.samples, Streamed):
            return
        needed_bytes = self.needed_bytes(batch)
        if needed_bytes > self.cache.limit_bytes:
            enough_gib = math.ceil(needed_bytes / 2**30 * 1000) / 1000
            raise ValueError(
                f"--cache_gib {self.cache.limit_bytes / 2**30:g} can't hold the shards that a host reads at"
                f" once for the windows of its streams and an evaluation. Give {enough_gib:g},"
                " a smaller --shuffle_window or fewer --streams, or prepare smaller shards"
            )

    def needed_bytes(self, batch: Batch) -> int:
        """Return the maximum size of all shards that a host reads at once in training and evaluation."""
        assert isinstance(self.samples, Streamed)
        streams = self.samples.streams * processes_per_host() // batch.processes
        steps = math.ceil(in_flight(self.workers) / batch.accumulations)
        images_in_flight = steps * batch.total // self.samples.streams  # per stream
        # The span covers one window for the first and one for the last image in flight, and all images
        # between them.
        span = 2 * self.samples.window + images_in_flight
        training = min(streams * self._span_bytes(span), self._span_bytes(len(self)))
        return math.ceil(training + processes_per_host() * self._evaluation_bytes(batch.per_device))

    def _span_bytes(self, images: float) -> float:
        """Return the size of the shards of `images` consecutive images, plus one whole shard at each end."""
        total = sum(shard.bytes for shard in self.shards)
        ends = 2 * max(shard.bytes for shard in self.shards)
        return min(images / len(self) * total + ends, total)

    def _evaluation_bytes(self, per_device: int) -> float:
        """Return the size of the shards that one process reads at once in an evaluation during training."""
        split = self.evaluated_split
        if split is None:
            return 0
        return split._span_bytes(in_flight(self.workers) * per_device / split.evaluated_share)

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
        evaluation_bytes = self._evaluation_bytes(len(first[1])) if train else 0
        plan, count = chain([first], items), in_flight(workers)
        with (
            self.cache.reserve(evaluation_bytes) as reserved_bytes,
            closing(ShardPrefetcher(plan, self._files_of, self.cache, reserved_bytes, count)) as available,
        ):
            yield available

    def names(self) -> NameOf:
        """Return a function that maps ids in the stored split to image names.

        The file of names is next to the index. Data from earlier versions has no such file. In that case,
        names are read from the tar headers if the shards are on a local disk.
        """
        file, count = names_file(self.part.split), sum(shard.images for shard in self.shards)
        if self.location.startswith("s3://"):
            from onecurve.system.s3 import ObjectStore

            lines = ObjectStore(self.location).read(file, NAMES_LIMIT)
            return nameless if lines is None else read_names(lines, count, f"{self.location}/{file}")
        if (path := Path(self.location) / file).exists():
            return open_names(path, count)
        return nameless if self.cache else self.open_images(None).name

    def _files_of(self, ids: np.ndarray) -> set[str]:
        return {self.shards[k].file for k in set(self.rows[ids, 0].tolist())}

    @cached_property
    def rows(self) -> np.ndarray:
        """Rows of the index that describe this split's images, int64 [N, 4]."""
        rows = np.load(self.index)
        return rows if self.ids is None else rows[np.load(self.ids)]


Split = ArraySplit | FileSplit | ShardSplit | CroppedSplit
