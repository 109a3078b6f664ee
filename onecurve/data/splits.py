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
from onecurve.data.names import (
    NAMES_LIMIT_BYTES,
    NameLookup,
    names_file_name,
    open_names,
    read_names,
    without_names,
)
from onecurve.data.workers import MicroBatch, decoded_batches, max_items_in_flight
from onecurve.flags.recipe import Batch, ImageRecipe, parse_fold
from onecurve.models.preprocessing import IMAGENET_CROP, Crop
from onecurve.numerics.augment import FLIP, gather_pixels, moved_pixel_indices, random_moves, send
from onecurve.numerics.order import Plan, Shuffled, Streamed, sample_hashes, uniforms
from onecurve.system.env import processes_per_host

if TYPE_CHECKING:  # these modules are imported at run time only for shards
    from onecurve.data.shard_cache import ShardCache
    from onecurve.data.shards import ShardManifest

BATCHES_SENT_AHEAD = 64  # number of micro-batches whose labels and pixel positions are sent at once


class SplitPart(NamedTuple):
    """Images of a split, which may be a subset of a stored split in a cache folder.

    Attributes:
        split: Name of the stored split that contains the images, for example "train".
        labels: Labels of the images, int64 [N].
        ids_file: File that contains the images' ids in the stored split, int64 [N], or None for all stored
            images.
        folder: Cache folder of the data set.
    """

    split: str
    labels: np.ndarray
    ids_file: Path | None = None
    folder: Path | None = None

    def stored(self, ids: np.ndarray) -> np.ndarray:
        """Convert sample ids in this part to image ids in the stored split."""
        return ids if self.ids_file is None else np.load(self.ids_file)[ids]

    def names(self) -> NameLookup:
        """Return a function that maps image ids in the stored split to image names."""
        if self.folder is None:
            return without_names
        stored_labels = np.load(self.folder / f"{self.split}_labels.npy", mmap_mode="r")
        return open_names(self.folder / names_file_name(self.split), len(stored_labels))


def hold_out(folder: Path, holdout: float | str) -> None:
    """Divide a cache folder's training split into two parts, and write the sorted image ids of each part.

    Args:
        folder: Cache folder of the data set.
        holdout: Share (below 1), number of images, or fold to hold out.
    """
    is_held_out = held_out_mask(np.load(folder / "train_labels.npy"), holdout)
    np.save(part_ids_path(folder, "train"), np.flatnonzero(~is_held_out))
    np.save(part_ids_path(folder, "val"), np.flatnonzero(is_held_out))


def part_ids_path(folder: Path, part: str) -> Path:
    """Return the path of the file with the training ("train") or held-out ("val") image ids, int64 [n]."""
    return folder / f"{part}_part.npy"


def held_out_mask(labels: np.ndarray, holdout: float | str) -> np.ndarray:
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
    image_count, class_sizes = len(labels), np.bincount(labels)
    is_held_out, id_hashes = np.zeros(image_count, bool), sample_hashes(image_count)
    if isinstance(holdout, str):  # fold sizes differ by at most one image, in total and per class
        fold, fold_count = parse_fold(holdout)
        if fold_count > image_count or 1 in class_sizes:
            raise ValueError(
                f"--fold {holdout} needs at least as many training images as folds,"
                " and more than one image in each class. The training split contains"
                f" {image_count:,} images, with {class_sizes.min()} in the smallest class"
            )
        ids_by_class = np.lexsort((id_hashes, labels))  # ids sorted by class, then by hash
        is_held_out[ids_by_class[fold - 1 :: fold_count]] = True
        return is_held_out
    held_out_count = round(holdout * image_count) if holdout < 1 else int(holdout)
    spare_per_class = np.maximum(class_sizes - 1, 0)  # number of images per class that may be held out
    if not 0 < held_out_count <= spare_per_class.sum():
        raise ValueError(
            f"--holdout {holdout:g} holds out {held_out_count:,} of {image_count:,} training images."
            f" Choose a value that holds out 1 to {spare_per_class.sum():,} images,"
            " because each class must keep at least one training image"
        )
    exact_per_class = class_sizes * held_out_count / image_count
    held_out_per_class = np.minimum(exact_per_class.astype(np.int64), spare_per_class)
    # Hold out more images of the classes that are furthest below their exact share
    while (missing_image_count := held_out_count - held_out_per_class.sum()) > 0:
        unfilled_classes = np.flatnonzero(held_out_per_class < spare_per_class)
        excess_per_class = held_out_per_class[unfilled_classes] - exact_per_class[unfilled_classes]
        neediest_classes_first = unfilled_classes[np.argsort(excess_per_class, kind="stable")]
        held_out_per_class[neediest_classes_first[:missing_image_count]] += 1
    for label in np.flatnonzero(held_out_per_class):
        class_ids = np.flatnonzero(labels == label)
        ids_by_hash = class_ids[np.argsort(id_hashes[class_ids], kind="stable")]
        is_held_out[ids_by_hash[: held_out_per_class[label]]] = True
    return is_held_out


class ArraySplit(Shuffled):
    """Split stored as a memory-mapped array of decoded images, uint8 [stored images, H, W, 3]."""

    cropped = False  # whether batches() yields crops of the images
    part: SplitPart  # set by open_images()
    mirror = False  # whether training flips images; set by open_images()

    def __init__(self, images: np.ndarray, part: SplitPart):
        super().__init__(len(part.labels))
        self.images, self.labels = images, part.labels
        # Rows of `images` that belong to the split; None means all rows
        self.image_rows = None if part.ids_file is None else np.load(part.ids_file)
        # Copy of all images on each device, or None if a device holds no copy
        self._images_by_device = dict[torch.device, Tensor | None]()

    def names(self) -> NameLookup:
        """Return a function that maps image ids in the stored split to image names."""
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
        if device not in self._images_by_device:
            self._images_by_device[device] = self._copy_to_device(device)
        resident_images = self._images_by_device[device]  # None: read each micro-batch from the cache file
        for epoch, ids, labels, pixel_indices in self._send_labels_and_indices(plan, device, train, seed):
            images = self._read_images(ids, device) if resident_images is None else resident_images
            if train:  # the pixel indices select, shift and flip the images
                images = gather_pixels(images, *pixel_indices)
            elif resident_images is not None:
                images = images.index_select(0, *pixel_indices)
            yield MicroBatch(epoch, ids, images, labels)

    def _send_labels_and_indices(
        self, plan: Plan, device: torch.device, train: bool, seed: int
    ) -> Iterator[tuple[int, np.ndarray, Tensor, list[Tensor]]]:
        """Yield the epoch, ids, labels and pixel indices of each micro-batch.

        In evaluation, the indices are array rows. In training, the indices are the result of
        moved_pixel_indices(). The labels and positions of up to BATCHES_SENT_AHEAD micro-batches are sent to
        the device in one copy of 40 bytes per image. On the device, labels, positions and indices occupy
        40 + 4 * (H + W) bytes per image.
        """
        resident_images = self._images_by_device[device]
        height, width = self.size
        max_shift = min(height // 8, width - 1)  # 4 pixels for a 32-pixel image
        for epoch, epoch_plan_items in groupby(plan, itemgetter(0)):
            while id_batches := [ids for _, ids in islice(epoch_plan_items, BATCHES_SENT_AHEAD)]:
                all_ids = np.concatenate(id_batches)
                batch_sizes = [len(ids) for ids in id_batches]
                source_rows = all_ids
                if resident_images is None:  # each micro-batch is read into a separate array
                    source_rows = np.concatenate([np.arange(batch_size) for batch_size in batch_sizes])
                drawn_moves = list[np.ndarray]()
                if train:
                    random_draws = uniforms(seed, epoch, all_ids, FLIP.stop)
                    drawn_moves = list(random_moves(random_draws, max_shift, self.mirror))
                labels_rows_and_moves = np.stack([self.labels[all_ids], source_rows, *drawn_moves])
                sent_values = send(torch.from_numpy(labels_rows_and_moves), device)
                sent_labels, sent_rows, sent_moves = sent_values[0], sent_values[1], sent_values[2:]
                pixel_indices: tuple[Tensor, ...] = (sent_rows,)
                if train:
                    # Number of images in the array from which the pixels are gathered
                    source_image_count = max(batch_sizes) if resident_images is None else len(resident_images)
                    source_shape = (source_image_count, *self.images.shape[1:])
                    pixel_indices = moved_pixel_indices(sent_rows, sent_moves, source_shape)
                split_tensors = (tensor.split(batch_sizes) for tensor in (sent_labels, *pixel_indices))
                for batch_ids, batch_labels, *batch_indices in zip(id_batches, *split_tensors, strict=True):
                    yield epoch, batch_ids, batch_labels, batch_indices

    def _read_images(self, sample_ids: np.ndarray, device: torch.device) -> Tensor:
        """Copy images from the memory-mapped array to the device, uint8 [b, H, W, 3]."""
        # The pinned memory may be released at once, because torch's caching allocator reuses such memory only
        # after the copy ends.
        uses_pinned_memory = device.type == "cuda"
        batch_shape = (len(sample_ids), *self.images.shape[1:])
        batch_images = torch.empty(batch_shape, dtype=torch.uint8, pin_memory=uses_pinned_memory)
        image_rows = sample_ids if self.image_rows is None else self.image_rows[sample_ids]
        # mode="clip" avoids the second copy that the default mode makes.
        np.take(self.images, image_rows, axis=0, out=batch_images.numpy(), mode="clip")
        return send(batch_images, device)

    def _copy_to_device(self, device: torch.device) -> Tensor | None:
        """Copy all images to a CUDA device, or return None if they exceed a quarter of its free memory.

        The result for a CPU is always None, because the images are already in a memory-mapped file.
        """
        if device.type != "cuda":
            return None
        free_bytes, _total_bytes = torch.cuda.mem_get_info(device)
        needed_bytes = len(self) * self.images.strides[0]  # the first stride is the size of one image
        if needed_bytes > free_bytes // 4:
            return None
        split_images = self.images if self.image_rows is None else self.images[self.image_rows]
        return torch.from_numpy(split_images).to(device)


class EncodedSplit(Shuffled):
    """Split of encoded images."""

    cropped = True  # whether batches() yields crops of the images
    part: SplitPart  # set by open_images()
    mirror = False  # whether training flips crops; set by open_images()
    open_images: Callable[[], EncodedImages]  # opens all images; has a small pickle, which workers receive
    labels: np.ndarray  # labels of the images, int64 [N]
    skips_broken: bool  # whether training skips broken images

    def names(self) -> NameLookup:
        """Return a function that maps image ids in the stored split to image names."""
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
        with self._fetch_images_ahead(plan, train, workers) as fetched_plan:
            yield from decoded_batches(
                self.open_images,
                self.labels,
                fetched_plan,
                device=torch.device(device),
                train=train,
                crop_size=size,
                seed=seed,
                worker_count=workers,
                skip_broken=self.skips_broken and train,
                flip_randomly=self.mirror and train,
                crop=crop,
                crop_scale=crop_scale,
            )

    @contextmanager
    def _fetch_images_ahead(self, plan: Plan, is_training: bool, worker_count: int) -> Iterator[Plan]:
        """Provide an iterator over the plan that yields each item once its images are on this host.

        This base class returns the plan itself, because all images are already on this host.
        """
        yield plan


class FileSplit(EncodedSplit):
    """Split of encoded images (cached bytes, or files) that differ in size or do not fit into memory."""

    def __init__(self, folder: Path, part: SplitPart, skips_broken: bool = False):
        super().__init__(len(part.labels))
        self.open_images = partial(CachedImages, folder, part.split, part.ids_file)
        self.labels, self.skips_broken = part.labels, skips_broken


class CroppedSplit(EncodedSplit):
    """Split that crops the images of an array, for models evaluated on crops."""

    def __init__(self, split: ArraySplit):
        super().__init__(len(split))
        assert isinstance(split.images, np.memmap)
        self.open_images = partial(ArrayImages, str(split.images.filename), split.image_rows)
        self.labels, self.part, self.mirror = split.labels, split.part, split.mirror
        self.skips_broken = False  # an array contains no broken images


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
        from onecurve.data.shards import ShardImages, index_file_name

        super().__init__(len(part.labels))
        self.index_path, self.ids_file = folder / index_file_name(part.split), part.ids_file
        self.labels, self.location, self.cache = part.labels, location, cache
        self.shards = manifest.shards_in(part.split)
        self.evaluated_split = evaluated_split
        self.skips_broken = recipe.on_bad_image == "skip"
        self.worker_count = recipe.workers
        self.ordered_samples: Shuffled | Streamed = Shuffled(len(self))  # sample order in training
        # Only a training split has an evaluated_split. The archives of an "index" manifest may be sorted by
        # class, so reading them in streams would yield batches with only a few classes.
        if evaluated_split and manifest.kind != "index":
            assert recipe.streams is not None
            images_per_shard = [shard.images for shard in self.shards]
            if part.ids_file is not None:  # with --holdout, the split uses only part of each shard
                images_per_shard = np.bincount(self.shard_indices, minlength=len(self.shards)).tolist()
            self.ordered_samples = Streamed(images_per_shard, recipe.streams, recipe.shuffle_window)
        # Fraction of this split that is evaluated. --max_val_images may reduce it
        limited_share = min(1.0, (recipe.max_val_images or math.inf) / len(self))
        self.evaluated_share = 1.0 if evaluated_split else limited_share
        shard_path_of = cache.shard_path if cache else Path(location).joinpath
        shard_paths = [shard_path_of(shard.file) for shard in self.shards]
        # Function that opens the images in an ids file, or all images if the argument is None
        self.open_stored_images = partial(ShardImages, self.index_path, tuple(map(str, shard_paths)))
        self.open_images = partial(self.open_stored_images, part.ids_file)

    def check_batch(self, batch: Batch) -> None:
        """Raise ValueError if the batch doesn't match the streams, or if the cache can't hold the shards."""
        self.ordered_samples.check_batch(batch)
        # Only shards in S3 that are read in streams need a certain cache size
        if self.cache is None or not isinstance(self.ordered_samples, Streamed):
            return
        needed_cache_bytes = self.needed_bytes(batch)
        if needed_cache_bytes > self.cache.limit_bytes:
            enough_cache_gib = math.ceil(needed_cache_bytes / 2**30 * 1000) / 1000  # rounded up to 0.001 GiB
            raise ValueError(
                f"--cache_gib {self.cache.limit_bytes / 2**30:g} is too small"
                " for the shards that a host reads at once for its streams' windows and an evaluation."
                f" Use --cache_gib {enough_cache_gib:g}, reduce --shuffle_window or --streams,"
                " or prepare smaller shards"
            )

    def needed_bytes(self, batch: Batch) -> int:
        """Return the maximum total size in bytes of the shards that a host reads at once.

        The total includes the shards for its training streams and for an evaluation during training.
        """
        assert isinstance(self.ordered_samples, Streamed)
        streams_per_host = self.ordered_samples.streams * processes_per_host() // batch.processes
        steps_in_flight = math.ceil(max_items_in_flight(self.worker_count) / batch.accumulations)
        stream_images_in_flight = steps_in_flight * batch.total // self.ordered_samples.streams
        # The span covers the windows of the first and the last image in flight, and all images in between.
        span_image_count = 2 * self.ordered_samples.window + stream_images_in_flight
        # All shards together are an upper limit
        training_bytes = min(
            streams_per_host * self._span_bytes(span_image_count), self._span_bytes(len(self))
        )
        return math.ceil(training_bytes + processes_per_host() * self._evaluation_bytes(batch.per_device))

    def _span_bytes(self, image_count: float) -> float:
        """Estimate the size in bytes of the shards that contain `image_count` consecutive images.

        The estimate assumes shards of average size. It adds the largest shard at both ends, because the first
        and the last image may be anywhere in their shards.
        """
        all_shard_bytes = sum(shard.bytes for shard in self.shards)
        edge_shard_bytes = 2 * max(shard.bytes for shard in self.shards)
        return min(image_count / len(self) * all_shard_bytes + edge_shard_bytes, all_shard_bytes)

    def _evaluation_bytes(self, micro_batch_size: int) -> float:
        """Return the size in bytes of the shards that an evaluating process reads at once during training."""
        if self.evaluated_split is None:
            return 0
        images_in_flight = max_items_in_flight(self.worker_count) * micro_batch_size
        # The images that --max_val_images selects are spread over all shards of the evaluated split
        evaluated_share = self.evaluated_split.evaluated_share
        return self.evaluated_split._span_bytes(images_in_flight / evaluated_share)

    def order(self, seed: int, epoch: int, batch: Batch) -> np.ndarray:
        """Return the sample ids of one training epoch in random order, int64 [n]."""
        return self.ordered_samples.order(seed, epoch, batch)

    @contextmanager
    def _fetch_images_ahead(self, plan: Plan, is_training: bool, worker_count: int) -> Iterator[Plan]:
        """Provide an iterator over the plan that yields each item once its shards are on this host.

        For shards in S3, the iterator downloads them ahead of the reader, within this process's share of the
        cache. During training, part of the share stays free for evaluations.
        """
        from onecurve.data.shard_cache import ShardPrefetcher

        # The first item is read to get the micro-batch size, and is then put back
        plan_items = iter(plan)
        first_item = next(plan_items, None)
        if first_item is None:
            yield ()
            return
        _epoch, first_ids = first_item
        plan, cache = chain([first_item], plan_items), self.cache
        if cache is None:  # the shards are on this host
            yield plan
            return
        evaluation_bytes = self._evaluation_bytes(len(first_ids)) if is_training else 0
        max_items = max_items_in_flight(worker_count)
        with (
            cache.reserve_share(evaluation_bytes) as share_bytes,
            closing(ShardPrefetcher(plan, self._shard_keys_of, cache, share_bytes, max_items)) as prefetcher,
        ):
            yield prefetcher

    def names(self) -> NameLookup:
        """Return a function that maps image ids in the stored split to image names.

        The names file is next to the index. For data from earlier versions, which has no names file, names
        are read from the tar headers if the shards are on a local disk.
        """
        names_file = names_file_name(self.part.split)
        image_count = sum(shard.images for shard in self.shards)
        if self.location.startswith("s3://"):
            from onecurve.system.s3 import ObjectStore

            names_content = ObjectStore(self.location).read(names_file, NAMES_LIMIT_BYTES)
            if names_content is None:
                return without_names
            return read_names(names_content, image_count, f"{self.location}/{names_file}")
        if (names_path := Path(self.location) / names_file).exists():
            return open_names(names_path, image_count)
        return without_names if self.cache else self.open_stored_images(None).name

    def _shard_keys_of(self, sample_ids: np.ndarray) -> set[str]:
        """Return the file names of the shards that contain the samples, which are the shard cache's keys."""
        return {self.shards[shard_index].file for shard_index in set(self.shard_indices[sample_ids].tolist())}

    @cached_property
    def shard_indices(self) -> np.ndarray:
        """Index of the shard that contains each image of this split, int64 [N]."""
        index_rows = np.load(self.index_path)
        return (index_rows if self.ids_file is None else index_rows[np.load(self.ids_file)])[:, 0]


Split = ArraySplit | FileSplit | ShardSplit | CroppedSplit
