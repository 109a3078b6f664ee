"""Data set splits that are stored as an array, as files, or as shards.

Every split yields micro-batches of uint8 images on the device, in the order of a plan. An array contains
decoded images. Images in files and shards are decoded by DataLoader workers (onecurve/data/workers.py).
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
from onecurve.data.encoded import ArrayImages, CachedImages, EncodedImages
from onecurve.data.names import NAMES_LIMIT_BYTES, NameOf, names_file, open_names, read_names, without_names
from onecurve.data.workers import MicroBatch, decoded, in_flight
from onecurve.flags.recipe import Batch, ImageRecipe, parse_fold
from onecurve.models.preprocessing import IMAGENET_CROP, Crop
from onecurve.numerics.augment import FLIP, gather, moved_pixels, moves, send
from onecurve.numerics.order import Plan, Shuffled, Streamed, hashes, uniforms
from onecurve.system.env import processes_per_host

if TYPE_CHECKING:  # these modules are imported at run time only for shards
    from onecurve.data.shard_cache import ShardCache
    from onecurve.data.shards import ShardManifest

SENT_AHEAD = 64  # number of micro-batches whose labels and pixel positions are copied to the device at once


class SplitPart(NamedTuple):
    """Images of a split, which may be a subset of a stored split in a cache folder.

    Attributes:
        split: Name of the stored split that contains the images, for example "train".
        labels: Labels of the images, int64 [N].
        file: File that contains the images' ids in the stored split, int64 [N], or None for all stored
            images.
        folder: Cache folder of the data set.
    """

    split: str
    labels: np.ndarray
    file: Path | None = None
    folder: Path | None = None

    def stored(self, ids: np.ndarray) -> np.ndarray:
        """Convert sample ids in this part to image ids in the stored split."""
        return ids if self.file is None else np.load(self.file)[ids]

    def names(self) -> NameOf:
        """Return a function that maps image ids in the stored split to image names."""
        if self.folder is None:
            return without_names
        count = len(np.load(self.folder / f"{self.split}_labels.npy", mmap_mode="r"))
        return open_names(self.folder / names_file(self.split), count)


def hold_out(folder: Path, holdout: float | str) -> None:
    """Divide a cache folder's training split into two parts, and write the sorted image ids of each part.

    Args:
        folder: Cache folder of the data set.
        holdout: Share (below 1), number of images, or fold to hold out.
    """
    is_held_out = held_out(np.load(folder / "train_labels.npy"), holdout)
    np.save(part_file(folder, "train"), np.flatnonzero(~is_held_out))
    np.save(part_file(folder, "val"), np.flatnonzero(is_held_out))


def part_file(folder: Path, part: str) -> Path:
    """Return the path of the file with the training ("train") or held-out ("val") image ids, int64 [n]."""
    return folder / f"{part}_part.npy"


def held_out(labels: np.ndarray, holdout: float | str) -> np.ndarray:
    """Choose images to hold out by a fixed hash of the image ids, with the same share from each class.

    The choice does not depend on the seed. Each class keeps at least one training image.

    Args:
        labels: Labels of the training images, int64 [N].
        holdout: Share (below 1), number of images, or fold to hold out.

    Returns:
        Mask that is True for held-out images, bool [N].

    Raises:
        ValueError: If there are too few images to divide.
    """
    count, sizes, is_held_out = len(labels), np.bincount(labels), np.zeros(len(labels), bool)
    if isinstance(holdout, str):  # fold sizes differ by at most one image, in total and per class
        fold, folds = parse_fold(holdout)
        if folds > count or 1 in sizes:
            raise ValueError(
                f"--fold {holdout} needs at least as many training images as folds, and more than one image"
                f" in each class. The training split contains {count:,} images, with {sizes.min()} in the"
                " smallest class"
            )
        is_held_out[np.lexsort((hashes(count), labels))[fold - 1 :: folds]] = True
        return is_held_out
    target = round(holdout * count) if holdout < 1 else int(holdout)
    spare_images = np.maximum(sizes - 1, 0)
    if not 0 < target <= spare_images.sum():
        raise ValueError(
            f"--holdout {holdout:g} holds out {target:,} of {count:,} training images. Choose a value that"
            f" holds out 1 to {spare_images.sum():,} images, because each class must keep at least one"
            " training image"
        )
    exact_shares = sizes * target / count
    shares = np.minimum(exact_shares.astype(np.int64), spare_images)
    # Hold out more images of the classes that are furthest below their exact share
    while (missing := target - shares.sum()) > 0:
        open_classes = np.flatnonzero(shares < spare_images)
        order = np.argsort(shares[open_classes] - exact_shares[open_classes], kind="stable")
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
        # Array rows of the split; None means all rows
        self.rows = None if part.file is None else np.load(part.file)
        self._on_device: dict[torch.device, Tensor | None] = {}

    def names(self) -> NameOf:
        return self.part.names()

    @property
    def size(self) -> tuple[int, int]:
        """Height and width of each image in pixels."""
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
        epoch, sample). The arguments `size`, `workers`, `crop` and `crop_scale` are ignored, because they
        apply only to encoded images.
        """
        device = torch.device(device)
        if device not in self._on_device:
            self._on_device[device] = self._copy_to_device(device)
        resident_images = self._on_device[device]
        for epoch, ids, labels, indices in self._send_ahead(plan, device, train, seed):
            images = self._read_images(ids, device) if resident_images is None else resident_images
            if train:
                images = gather(images, *indices)
            elif resident_images is not None:
                images = images.index_select(0, *indices)
            yield MicroBatch(epoch, ids, images, labels)

    def _send_ahead(
        self, plan: Plan, device: torch.device, train: bool, seed: int
    ) -> Iterator[tuple[int, np.ndarray, Tensor, list[Tensor]]]:
        """Yield the epoch, ids, labels and pixel indices of each micro-batch.

        In evaluation, the indices are array rows. In training, the indices are the result of moved_pixels().
        The labels and positions of up to SENT_AHEAD micro-batches are sent to the device in one copy of 40
        bytes per image. On the device, labels, positions and indices occupy 40 + 4 * (H + W) bytes per image.
        """
        # 4 pixels for a 32-pixel image
        resident_images, pad = self._on_device[device], min(self.size[0] // 8, self.size[1] - 1)
        for epoch, items in groupby(plan, itemgetter(0)):
            while batch_group := [ids for _, ids in islice(items, SENT_AHEAD)]:
                ids, sizes = np.concatenate(batch_group), [len(batch_ids) for batch_ids in batch_group]
                rows = np.concatenate([np.arange(size) for size in sizes]) if resident_images is None else ids
                moved = list(moves(uniforms(seed, epoch, ids, FLIP.stop), pad, self.mirror)) if train else []
                sent = send(torch.from_numpy(np.stack([self.labels[ids], rows, *moved])), device)
                indices: tuple[Tensor, ...] = (sent[1],)
                if train:
                    count = max(sizes) if resident_images is None else len(resident_images)
                    indices = moved_pixels(sent[1], sent[2:], (count, *self.images.shape[1:]))
                tensors = (tensor.split(sizes) for tensor in (sent[0], *indices))
                for ids, labels, *batch_indices in zip(batch_group, *tensors, strict=True):
                    yield epoch, ids, labels, batch_indices

    def _read_images(self, ids: np.ndarray, device: torch.device) -> Tensor:
        """Copy images from the memory-mapped array to the device, uint8 [b, H, W, 3]."""
        # The pinned memory may be released at once, because torch's caching allocator reuses such memory only
        # after the copy ends.
        pinned = device.type == "cuda"
        images = torch.empty(len(ids), *self.images.shape[1:], dtype=torch.uint8, pin_memory=pinned)
        # mode="clip" avoids the second copy that the default mode makes.
        np.take(self.images, ids if self.rows is None else self.rows[ids], 0, images.numpy(), mode="clip")
        return send(images, device)

    def _copy_to_device(self, device: torch.device) -> Tensor | None:
        """Return the images on a CUDA device, or None if they exceed a quarter of its free memory."""
        size_bytes = len(self) * self.images.strides[0]
        if device.type == "cuda" and size_bytes <= torch.cuda.mem_get_info(device)[0] // 4:
            return torch.from_numpy(self.images if self.rows is None else self.images[self.rows]).to(device)
        return None


class EncodedSplit(Shuffled):
    """Split of encoded images."""

    cropped = True
    part: SplitPart
    mirror = False  # whether training flips crops
    open: Callable[[], EncodedImages]
    labels: np.ndarray  # labels of the images, int64 [N]
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
            plan: Epoch and sample ids of each micro-batch.
            device: Device of the micro-batches.
            train: Whether to use random resized crops, which depend only on (seed, epoch, sample), instead of
                the evaluation crop.
            size: Height and width of the crops in pixels.
            seed: Seed of the random crops and flips.
            workers: Number of decoding processes. With 0 processes, the current process decodes.
            crop: Evaluation crop. Random crops use only the interpolation.
            crop_scale: Minimum and maximum area of a random crop, as fractions of the image area.

        Raises:
            ValueError: If an image is broken, or a shard can't be fetched from S3. The message contains the
                name of the image or shard.
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
        """Provide an iterator over the plan that yields each item once its images are on this host."""
        yield plan


class FileSplit(EncodedSplit):
    """Split of encoded images (cached bytes, or files) that differ in size or do not fit into memory."""

    def __init__(self, folder: Path, part: SplitPart, skip: bool = False):
        super().__init__(len(part.labels))
        self.open = partial(CachedImages, folder, part.split, part.file)
        self.labels, self.skip = part.labels, skip


class CroppedSplit(EncodedSplit):
    """Split that crops the images of an array, for models evaluated on crops."""

    def __init__(self, split: ArraySplit):
        super().__init__(len(split))
        assert isinstance(split.images, np.memmap)
        self.open = partial(ArrayImages, str(split.images.filename), split.rows)
        self.labels, self.part, self.mirror, self.skip = split.labels, split.part, split.mirror, False


class ShardSplit(EncodedSplit):
    """Split of images in tar files on this host, or in S3 with a local cache.

    Args:
        folder: Cache folder that contains the index.
        manifest: Manifest of the shards.
        location: Folder or S3 prefix that contains the manifest and, if `cache` is None, the shards.
        part: Images of the split.
        recipe: Recipe that contains the shard flags.
        cache: Local cache for shards in S3, or None for shards on this host.
        evaluated_split: Split that is evaluated during training with the same number of workers, or None if
            this split is itself evaluated.
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
        self.samples: Shuffled | Streamed = Shuffled(len(self))  # sample order in training
        if evaluated_split and manifest.kind != "index":
            assert recipe.streams is not None
            counts = [shard.images for shard in self.shards]
            if part.file is not None:
                counts = np.bincount(self.rows[:, 0], minlength=len(counts)).tolist()
            self.samples = Streamed(counts, recipe.streams, recipe.shuffle_window)
        # Fraction of this split that is evaluated. --max_val_images may reduce it
        share = min(1.0, (recipe.max_val_images or math.inf) / len(self))
        self.evaluated_share = 1.0 if evaluated_split else share
        files = (cache.path(shard.file) if cache else Path(location) / shard.file for shard in self.shards)
        # Function that opens the images in an ids file, or all images if the argument is None
        self.open_images = partial(ShardImages, self.index, tuple(map(str, files)))
        self.open = partial(self.open_images, part.file)

    def check(self, batch: Batch) -> None:
        """Raise ValueError if the batch doesn't match the streams, or if the cache can't hold the shards."""
        self.samples.check(batch)
        if self.cache is None or not isinstance(self.samples, Streamed):
            return
        needed_bytes = self.needed_bytes(batch)
        if needed_bytes > self.cache.limit_bytes:
            enough_gib = math.ceil(needed_bytes / 2**30 * 1000) / 1000
            raise ValueError(
                f"--cache_gib {self.cache.limit_bytes / 2**30:g} is too small for the shards that a host"
                " reads at once for its streams' windows and an evaluation. Use --cache_gib"
                f" {enough_gib:g}, reduce --shuffle_window or --streams, or prepare smaller shards"
            )

    def needed_bytes(self, batch: Batch) -> int:
        """Return the maximum total size in bytes of the shards that a host reads at once."""
        assert isinstance(self.samples, Streamed)
        streams_per_host = self.samples.streams * processes_per_host() // batch.processes
        steps_in_flight = math.ceil(in_flight(self.workers) / batch.accumulations)
        images_in_flight = steps_in_flight * batch.total // self.samples.streams  # images per stream
        # The span covers the windows of the first and the last image in flight, and all images in between.
        span_images = 2 * self.samples.window + images_in_flight
        training_bytes = min(streams_per_host * self._span_bytes(span_images), self._span_bytes(len(self)))
        return math.ceil(training_bytes + processes_per_host() * self._evaluation_bytes(batch.per_device))

    def _span_bytes(self, images: float) -> float:
        """Return the size in bytes of shards with `images` consecutive images, plus one shard at each end."""
        total_bytes = sum(shard.bytes for shard in self.shards)
        edge_bytes = 2 * max(shard.bytes for shard in self.shards)
        return min(images / len(self) * total_bytes + edge_bytes, total_bytes)

    def _evaluation_bytes(self, per_device: int) -> float:
        """Return the size in bytes of the shards that an evaluating process reads at once during training."""
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
        """Return a function that maps image ids in the stored split to image names.

        The names file is next to the index. For data from earlier versions, which has no names file, names
        are read from the tar headers if the shards are on a local disk.
        """
        file, count = names_file(self.part.split), sum(shard.images for shard in self.shards)
        if self.location.startswith("s3://"):
            from onecurve.system.s3 import ObjectStore

            lines = ObjectStore(self.location).read(file, NAMES_LIMIT_BYTES)
            return without_names if lines is None else read_names(lines, count, f"{self.location}/{file}")
        if (path := Path(self.location) / file).exists():
            return open_names(path, count)
        return without_names if self.cache else self.open_images(None).name

    def _files_of(self, ids: np.ndarray) -> set[str]:
        return {self.shards[shard].file for shard in set(self.rows[ids, 0].tolist())}

    @cached_property
    def rows(self) -> np.ndarray:
        """Index rows of this split's images, int64 [N, 4]."""
        rows = np.load(self.index)
        return rows if self.ids is None else rows[np.load(self.ids)]


Split = ArraySplit | FileSplit | ShardSplit | CroppedSplit
