"""Loading of images from tables, class folders, file lists, shards or a generator (--data).

`prepare_cache` runs in one process per host and creates a cache folder. `open_images` runs in all processes
and maps the cache folder into memory. If all images have the same size and fit into memory, they are decoded
once and stored as uint8 arrays in the cache. Otherwise, DataLoader workers decode the images for each batch.
Batches contain uint8 pixels, which are augmented and normalised on the device.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from accelerate import Accelerator
from torch import Tensor

from onecurve.data.cache import prepare_cache
from onecurve.data.decode import torchcodec_decoder
from onecurve.data.encoded import ALL_SPLITS, SPLITS
from onecurve.data.splits import ArraySplit, FileSplit, ShardSplit, Split, SplitPart, part_ids_path
from onecurve.distributed.agreement import agree, once
from onecurve.flags.recipe import ImageRecipe
from onecurve.system.files import read_json
from onecurve.system.phase import BUILDING_MODEL, OPENING_DATA, now
from onecurve.system.text import printable, some_of

IMBALANCE_RATIO = 10  # minimum ratio of the largest to the smallest class size for a warning


@dataclass(frozen=True)
class Images:
    """Data set with its splits and class names.

    Attributes:
        source: Data set name and content key, which are the same on all hosts with the same data.
        classes: Class names in label order.
        train: Training split.
        val: Split used for evaluation during training.
        val_name: Name of the `val` split, which is "val", "test", "holdout" or "train".
        test: Split used for the final evaluation. This is the "test" split if the data also contains a "val"
            split or, with --holdout, the data's evaluation split. None if there is no such split.
        test_name: Name of the `test` split.
        flaws: Warnings about the images, for example that images are broken or occur in two splits.
    """

    source: str  # data set name and content key
    classes: tuple[str, ...]  # class names
    train: Split
    val: Split
    val_name: str  # "val", "test", "holdout" or "train"
    test: Split | None = None
    test_name: str = ""
    flaws: tuple[str, ...] = ()  # warnings about the images

    @property
    def identity(self) -> tuple[str, tuple[str, ...], bool]:
        """Source, class names, and whether evaluations crop the images (true only for encoded images).

        Checkpoints store the identity, and a resumed run checks it against the current data.
        """
        return self.source, self.classes, self.val.cropped

    def class_weights(self, method: str, device: torch.device) -> Tensor | None:
        """Return class weights for the loss, scaled to a mean weight of 1 over the training images.

        The caller must divide the sum of the weighted losses by the number of images. In contrast, torch's
        mean reduction divides by the sum of the weights in the micro-batch.

        Args:
            method: "balanced" weights each class by the inverse of its share, like scikit-learn. "sqrt"
                weights each class by the inverse square root of its share (Mahajan et al. 2018, arXiv
                1805.00932). "none" disables class weights.
            device: Device of the returned tensor.

        Returns:
            Class weights, float32 [classes], or None if the method is "none".
        """
        if method == "none":
            return None
        class_counts = np.bincount(self.train.labels, minlength=len(self.classes))
        nonzero_counts = np.maximum(class_counts, 1)  # avoids a division by zero
        if method == "sqrt":
            divisors = np.sqrt(class_counts).sum() * np.sqrt(nonzero_counts)
        else:
            divisors = np.count_nonzero(class_counts) * nonzero_counts
        class_weights = len(self.train) / divisors * (class_counts > 0)
        return torch.from_numpy(class_weights.astype(np.float32)).to(device)

    @property
    def evaluated(self) -> dict[str, Split]:
        """Evaluated splits, by split name."""
        val_split = {self.val_name: self.val} if self.val is not self.train else {}
        test_split = {self.test_name: self.test} if self.test else {}
        return val_split | test_split


def load(accelerator: Accelerator, recipe: ImageRecipe, is_evaluation_only: bool = False) -> Images:
    """Load recipe.data on all processes, and check that all processes have the same data.

    Only one process per host prepares the data. This process prints a summary and warnings.

    Args:
        accelerator: Accelerator of this process.
        recipe: Recipe that contains the data flags.
        is_evaluation_only: Whether the data is used only for evaluation. If True, the data may contain a
            single class, and a single split becomes both `train` and `val`.

    Raises:
        ValueError: If the data can't be used.
    """
    now.enter(OPENING_DATA)  # part of the run to which the following time is attributed
    prepare_images = partial(prepare_cache, recipe, is_evaluation_only=is_evaluation_only)
    prepared_data = once(accelerator, "data", prepare_images, recipe.timeout_s, per_host=True)
    # `prepared_data` is a list, not a PreparedData, if received as JSON from another process.
    cache_folder, ignored_files_note = prepared_data
    images = open_images(Path(cache_folder), recipe)
    if len(images.classes) < 2 and not is_evaluation_only:
        only_class = images.classes[0]
        raise ValueError(
            f"{recipe.data} contains only one class, {only_class}. A classifier needs at least two classes"
        )
    train_labels = images.train.labels
    evaluated_labels = {split_name: split.labels for split_name, split in images.evaluated.items()}
    compared_facts: dict[str, Any] = {
        "data": [images.source, type(images.train).__name__],
        "classes": images.classes,
    }
    for split_name, compared_labels in {"training": train_labels, **evaluated_labels}.items():
        compared_facts[f"{split_name} images"] = len(compared_labels)
    if not isinstance(images.train, ArraySplit):  # decoders may differ in the last bits of pixels
        compared_facts["the decoder of JPEGs"] = "torchcodec" if torchcodec_decoder() else "PIL"
    agree(accelerator, compared_facts)
    # For data with a single split, the summary does not name the split
    train_name = "training" if images.val is not images.train else ""
    labels_by_split = {train_name: train_labels, **evaluated_labels}
    accelerator.print(data_summary(recipe.data, labels_by_split, len(images.classes), ignored_files_note))
    for data_warning in (*label_warnings(train_labels, evaluated_labels, images.classes), *images.flaws):
        accelerator.print(f"warning: {data_warning}")
    now.enter(BUILDING_MODEL)
    return images


def open_images(folder: Path, recipe: ImageRecipe | None = None) -> Images:
    """Memory-map a cache folder created by `prepare_cache`.

    Args:
        folder: Cache folder of the data set.
        recipe: Recipe that contains the flags for shards and broken images, or None to use the defaults.

    Raises:
        ValueError: If the cache folder is damaged.
    """
    recipe = recipe or ImageRecipe()
    try:
        cache_metadata = read_json(folder / "meta.json")
        split_parts = _load_split_parts(folder)
        storage_format = cache_metadata["kind"]
        array_parts = split_parts if storage_format == "array" else []
        # Mode "c" (copy-on-write) shares memory pages between processes and avoids torch's warning about
        # read-only arrays.
        image_arrays = [np.load(folder / f"{part.split}_images.npy", mmap_mode="c") for part in array_parts]
    except (OSError, ValueError, KeyError, TypeError, EOFError) as error:
        raise ValueError(
            f"the prepared data in {folder} is damaged ({error})."
            " Remove this folder, and run the same command again to prepare the data again"
        ) from error
    splits: Sequence[Split]
    if storage_format == "array":
        splits = [ArraySplit(pixels, part) for pixels, part in zip(image_arrays, array_parts, strict=True)]
    elif storage_format == "files":
        splits = [FileSplit(folder, part, recipe.on_bad_image == "skip") for part in split_parts]
    else:
        splits = _open_shards(folder, cache_metadata["shards"], split_parts, recipe)
    for split, split_part in zip(splits, split_parts, strict=True):
        split.part = split_part
        split.mirror = cache_metadata["mirror"]  # False if mirroring may change an image's class (digits)
    train_split, *evaluated_splits = splits
    return Images(
        source=cache_metadata["source"],
        classes=tuple(map(printable, cache_metadata["classes"])),  # folder names may contain arbitrary bytes
        train=train_split,
        val=evaluated_splits[0] if evaluated_splits else train_split,
        val_name=cache_metadata["val_name"] or "train",
        test=evaluated_splits[1] if len(evaluated_splits) > 1 else None,
        # A digits cache from an older version contains neither test_name nor flaws.
        test_name=cache_metadata.get("test_name") or "",
        flaws=tuple(cache_metadata.get("flaws", ())),
    )


def _load_split_parts(cache_folder: Path) -> list[SplitPart]:
    """Return all parts of a data set: the training images, followed by the images of each evaluated split.

    With --holdout, the stored training split is divided into the first two parts.
    """
    stored_splits = [
        SplitPart(split, np.load(cache_folder / f"{split}_labels.npy"), folder=cache_folder)
        for split in ALL_SPLITS
        if (cache_folder / f"{split}_labels.npy").exists()
    ]
    if not stored_splits:
        raise ValueError("it contains no labels")
    if not part_ids_path(cache_folder, "train").exists():
        return stored_splits
    train_split, *other_splits = stored_splits
    ids_files = [part_ids_path(cache_folder, part_name) for part_name in SPLITS]
    train_parts = [
        SplitPart("train", train_split.labels[np.load(ids_file)], ids_file, cache_folder)
        for ids_file in ids_files
    ]
    return [*train_parts, *other_splits]


def _open_shards(
    cache_folder: Path, shard_location: str, split_parts: list[SplitPart], recipe: ImageRecipe
) -> list[ShardSplit]:
    """Open all splits of a sharded data set.

    Args:
        cache_folder: Cache folder of the data set.
        shard_location: Folder that contains the manifest, or s3://bucket/prefix.
        split_parts: Split parts of the data set, from `_load_split_parts`.
        recipe: Recipe that contains the shard flags.
    """
    from onecurve.data.shard_cache import ShardCache
    from onecurve.data.shards import MANIFEST, parse_manifest

    manifest_file = cache_folder / MANIFEST
    manifest = parse_manifest(manifest_file.read_bytes(), str(manifest_file))
    # A local manifest of kind "in_place" may refer to shards in S3
    shard_store = manifest.s3_prefix or shard_location
    shard_cache = None
    if shard_store.startswith("s3://"):
        shards = tuple(shard for split in manifest.splits for shard in manifest.shards_in(split))
        shard_cache = ShardCache(cache_folder / "shards", shard_store, shards, int(recipe.cache_gib * 2**30))

    open_split = partial(ShardSplit, cache_folder, manifest, shard_location)
    train_part, *evaluated_parts = split_parts
    if not evaluated_parts:
        return [open_split(train_part, recipe, shard_cache)]
    evaluated_splits = [open_split(part, recipe, shard_cache) for part in evaluated_parts]
    # Training leaves cache space for the first evaluated split, which is evaluated during training.
    return [open_split(train_part, recipe, shard_cache, evaluated_splits[0]), *evaluated_splits]


# Summary and warnings at startup

SplitLabels = Mapping[str, np.ndarray]  # labels of each split, int64 [N], by split name


def data_summary(data_name: str, split_labels: SplitLabels, class_count: int, ignored_files_note: str) -> str:
    """Return a one-line summary of a data set.

    Args:
        data_name: Name of the data set.
        split_labels: Labels of each split, by split name. For data without splits, the name is "".
        class_count: Number of classes.
        ignored_files_note: Description of the ignored files, including the reasons.
    """
    # replace() removes the double space that an empty split name leaves
    phrases = [f"{len(labels):,} {split} images".replace("  ", " ") for split, labels in split_labels.items()]
    phrases.append(f"{class_count:,} {'class' if class_count == 1 else 'classes'}")
    ignored_suffix = f"; left out: {ignored_files_note}" if ignored_files_note else ""
    return f"data {printable(data_name)}: {', '.join(phrases)}{ignored_suffix}"


def label_warnings(
    train_labels: np.ndarray, evaluated_labels: SplitLabels, class_names: Sequence[str]
) -> list[str]:
    """Return a warning for imbalanced training classes, and for each split in which classes are absent.

    Args:
        train_labels: Labels of the training images, int64 [N].
        evaluated_labels: Labels of each evaluated split, by split name.
        class_names: Class names in label order.
    """
    warning_messages = []
    class_counts = np.bincount(train_labels, minlength=len(class_names))
    smallest_class, largest_class = int(class_counts.argmin()), int(class_counts.argmax())
    if class_counts[largest_class] >= IMBALANCE_RATIO * class_counts[smallest_class]:
        smallest_name, largest_name = class_names[smallest_class], class_names[largest_class]
        warning_messages.append(
            "the classes are imbalanced: the training split contains"
            f" {class_counts[smallest_class]:,} images of {printable(smallest_name)},"
            f" but {class_counts[largest_class]:,} images of {printable(largest_name)}."
            " Check the recall of each class."
            " To weight classes equally, use --class_weights balanced and --best_by macro_f1"
        )
    for split_name, labels in evaluated_labels.items():
        class_counts = np.bincount(labels, minlength=len(class_names))
        names_and_counts = zip(class_names, class_counts, strict=True)
        if absent_classes := [class_name for class_name, image_count in names_and_counts if not image_count]:
            warning_messages.append(f"the {split_name} split contains no images of {some_of(absent_classes)}")
    return warning_messages
