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

import numpy as np
import torch
from accelerate import Accelerator
from torch import Tensor

from onecurve.data.cache import prepare_cache
from onecurve.data.decode import torchcodec_decoder
from onecurve.data.encoded import ALL_SPLITS, SPLITS
from onecurve.data.splits import ArraySplit, FileSplit, ShardSplit, Split, SplitPart, part_file
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

    source: str
    classes: tuple[str, ...]
    train: Split
    val: Split
    val_name: str
    test: Split | None = None
    test_name: str = ""
    flaws: tuple[str, ...] = ()

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
        counts = np.bincount(self.train.labels, minlength=len(self.classes))
        present = np.maximum(counts, 1)
        if method == "sqrt":
            weights = len(self.train) / (np.sqrt(counts).sum() * np.sqrt(present)) * (counts > 0)
        else:
            weights = len(self.train) / (np.count_nonzero(counts) * present) * (counts > 0)
        return torch.from_numpy(weights.astype(np.float32)).to(device)

    @property
    def evaluated(self) -> dict[str, Split]:
        """Evaluated splits, by split name."""
        splits = {self.val_name: self.val} if self.val is not self.train else {}
        return splits | ({self.test_name: self.test} if self.test else {})


def load(accelerator: Accelerator, recipe: ImageRecipe, is_evaluated: bool = False) -> Images:
    """Load recipe.data on all processes, and check that all processes have the same data.

    Only one process per host prepares the data.

    Args:
        accelerator: Accelerator of this process.
        recipe: Recipe that contains the data flags.
        is_evaluated: Whether the data is used only for evaluation. If True, the data may contain a single
            class, and a single split becomes both `train` and `val`.

    Raises:
        ValueError: If the data can't be used.
    """
    now.enter(OPENING_DATA)
    prepare = partial(prepare_cache, recipe, is_evaluated=is_evaluated)
    prepared = once(accelerator, "data", prepare, recipe.timeout_s, per_host=True)
    folder, left_out = prepared  # a list, not a Prepared, if received as JSON from another process
    images = open_images(Path(folder), recipe)
    if len(images.classes) < 2 and not is_evaluated:
        name = images.classes[0]
        raise ValueError(
            f"{recipe.data} contains only one class, {name}. A classifier needs at least two classes"
        )
    train, evaluated = images.train.labels, {name: split.labels for name, split in images.evaluated.items()}
    counts = {f"{name} images": len(labels) for name, labels in {"training": train, **evaluated}.items()}
    source_and_type = [images.source, type(images.train).__name__]
    facts = {"data": source_and_type, "classes": images.classes, **counts}
    if not isinstance(images.train, ArraySplit):  # decoders may differ in the last bits of pixels
        facts["the decoder of JPEGs"] = "torchcodec" if torchcodec_decoder() else "PIL"
    agree(accelerator, facts)
    splits = {"training" if images.val is not images.train else "": train, **evaluated}
    accelerator.print(summary(recipe.data, splits, len(images.classes), left_out))
    for warning in (*warnings(train, evaluated, images.classes), *images.flaws):
        accelerator.print(f"warning: {warning}")
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
        meta = read_json(folder / "meta.json")
        parts, is_array = _split_parts(folder), meta["kind"] == "array"
        # Mode "c" (copy-on-write) shares memory pages between processes and avoids torch's warning about
        # read-only arrays.
        pixels = [np.load(folder / f"{part.split}_images.npy", mmap_mode="c") for part in parts if is_array]
    except (OSError, ValueError, KeyError, TypeError, EOFError) as error:
        raise ValueError(
            f"the prepared data in {folder} is damaged ({error}). Remove this folder, and run the same"
            " command again to prepare the data again"
        ) from error
    splits: Sequence[Split]
    if is_array:
        splits = [ArraySplit(images, part) for images, part in zip(pixels, parts, strict=True)]
    elif meta["kind"] == "files":
        splits = [FileSplit(folder, part, recipe.on_bad_image == "skip") for part in parts]
    else:
        splits = _open_shards(folder, meta["shards"], parts, recipe)
    for split, part in zip(splits, parts, strict=True):
        split.part = part
        split.mirror = meta["mirror"]  # False if mirroring may change an image's class, as for digits
    return Images(
        source=meta["source"],
        classes=tuple(map(printable, meta["classes"])),  # folder names may contain arbitrary bytes
        train=splits[0],
        val=splits[1] if len(splits) > 1 else splits[0],
        val_name=meta["val_name"] or "train",
        test=splits[2] if len(splits) > 2 else None,
        # A digits cache from an older version contains neither test_name nor flaws.
        test_name=meta.get("test_name") or "",
        flaws=tuple(meta.get("flaws", ())),
    )


def _split_parts(folder: Path) -> list[SplitPart]:
    """Return the training part, the evaluation part and, with --holdout, the data's evaluation split."""
    stored = [
        SplitPart(split, np.load(folder / f"{split}_labels.npy"), folder=folder)
        for split in ALL_SPLITS
        if (folder / f"{split}_labels.npy").exists()
    ]
    if not part_file(folder, "train").exists():
        return stored
    files = [part_file(folder, part) for part in SPLITS]
    return [SplitPart("train", stored[0].labels[np.load(file)], file, folder) for file in files] + stored[1:]


def _open_shards(
    folder: Path, location: str, parts: list[SplitPart], recipe: ImageRecipe
) -> list[ShardSplit]:
    """Open all splits of a sharded data set.

    Args:
        folder: Cache folder of the data set.
        location: Folder that contains the manifest, or s3://bucket/prefix.
        parts: Split parts of the data set, from `_split_parts`.
        recipe: Recipe that contains the shard flags.
    """
    from onecurve.data.shard_cache import ShardCache
    from onecurve.data.shards import MANIFEST, parse_manifest

    manifest = parse_manifest((folder / MANIFEST).read_bytes(), str(folder / MANIFEST))
    cache, store = None, manifest.store or location
    if store.startswith("s3://"):
        shards = tuple(shard for split in manifest.splits for shard in manifest.shards_in(split))
        cache = ShardCache(folder / "shards", store, shards, int(recipe.cache_gib * 2**30))

    evaluated = [ShardSplit(folder, manifest, location, part, recipe, cache) for part in parts[1:] or parts]
    if len(parts) == 1:
        return evaluated
    return [ShardSplit(folder, manifest, location, parts[0], recipe, cache, evaluated[0]), *evaluated]


# Summary and warnings at startup

SplitLabels = Mapping[str, np.ndarray]  # labels of each split, int64 [N], by split name


def summary(name: str, splits: SplitLabels, classes: int, left_out: str) -> str:
    """Return a one-line summary of a data set.

    Args:
        name: Name of the data set.
        splits: Labels of each split, by split name. For data without splits, the name is "".
        classes: Number of classes.
        left_out: Description of the ignored files, including the reasons.
    """
    phrases = [f"{len(labels):,} {split} images".replace("  ", " ") for split, labels in splits.items()]
    phrases.append(f"{classes:,} {'class' if classes == 1 else 'classes'}")
    return f"data {printable(name)}: {', '.join(phrases)}" + (f"; left out: {left_out}" if left_out else "")


def warnings(train: np.ndarray, evaluated: SplitLabels, classes: Sequence[str]) -> list[str]:
    """Return a warning for each label property that makes the accuracy misleading."""
    messages = []
    counts = np.bincount(train, minlength=len(classes))
    smallest, largest = int(counts.argmin()), int(counts.argmax())
    if counts[largest] >= IMBALANCE_RATIO * counts[smallest]:
        messages.append(
            f"the classes are imbalanced: the training split contains {counts[smallest]:,} images of"
            f" {printable(classes[smallest])}, but {counts[largest]:,} images of"
            f" {printable(classes[largest])}. Check the recall of each class. To weight classes equally, use"
            " --class_weights balanced and --best_by macro_f1"
        )
    for split, labels in evaluated.items():
        counts = np.bincount(labels, minlength=len(classes))
        if absent := [name for name, count in zip(classes, counts, strict=True) if count == 0]:
            messages.append(f"the {split} split contains no images of {some_of(absent)}")
    return messages
