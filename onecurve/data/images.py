"""Loading of the --data images from tables, class folders, file lists, shards or a generator.

`prepare_cache` runs in one process per host and creates a folder in the cache. `open_images` runs in all
processes and maps this folder into memory. If all images have one size and fit into memory, they are decoded
once, to uint8 arrays in the cache. Otherwise, DataLoader workers decode the images for each batch. Batches
are uint8. Augmentation and normalisation run on the device.
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
from onecurve.data.encoded import SPLITS, STORED
from onecurve.data.splits import ArraySplit, FileSplit, ShardSplit, Split, SplitPart, part_file
from onecurve.distributed.agreement import agree, once
from onecurve.flags.recipe import ImageRecipe
from onecurve.system.files import read_json
from onecurve.system.phase import DATA, MODEL, now
from onecurve.system.text import printable, some_of

IMBALANCE = 10  # ratio of the largest to the smallest class size that causes a warning


@dataclass(frozen=True)
class Images:
    """Data set with its splits and class names.

    Attributes:
        source: Name of the data and key of its content. Hosts with the same data have the same source.
        classes: Class names in label order.
        train: Training split.
        val: Split used for evaluation during training.
        val_name: Name of `val`: "val", "test", "holdout" or "train".
        test: Split used for evaluation at the end: "test" if the data also has a "val" split or, with
            --holdout, the evaluation split that the data itself provides. None without such a split.
        test_name: Name of `test`.
        flaws: Warnings about the images, for example about broken images or images in two splits.
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
        """Source, class names, and a flag that is true if evaluations crop the images (encoded images only).

        Checkpoints record these values, and a resumed run compares its own values with the recorded values.
        """
        return self.source, self.classes, self.val.cropped

    def class_weights(self, method: str, device: torch.device) -> Tensor | None:
        """Return class weights for the loss. The mean weight over the training images is 1.

        The caller must average the weighted losses over images. The mean reduction of torch's loss would
        instead divide by the sum of the weights in a micro-batch.

        Args:
            method: "balanced" uses the inverse of a class's share, like scikit-learn. "sqrt" uses the inverse
                square root of the share (Mahajan et al. 2018, arXiv 1805.00932). "none" disables weights.
            device: Device of the returned tensor.

        Returns:
            Weights, float32 [classes], or None for "none".
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
        """Evaluated splits by name."""
        splits = {self.val_name: self.val} if self.val is not self.train else {}
        return splits | ({self.test_name: self.test} if self.test else {})


def load(accelerator: Accelerator, recipe: ImageRecipe, is_evaluated: bool = False) -> Images:
    """Load recipe.data on all processes, and check that all processes have the same data.

    One process per host prepares the data.

    Args:
        accelerator: Accelerator of this process.
        recipe: Recipe with the flags of the data.
        is_evaluated: Whether the data is only evaluated. If True, one split and one class are enough, and a
            single split becomes both `train` and `val`.

    Raises:
        ValueError: The data can't be used.
    """
    now.enter(DATA)
    make = partial(prepare_cache, recipe, is_evaluated=is_evaluated)
    prepared = once(accelerator, "data", make, recipe.timeout_s, per_host=True)
    folder, left_out = prepared  # a list instead of a Prepared if it came from another process as JSON
    images = open_images(Path(folder), recipe)
    if len(images.classes) < 2 and not is_evaluated:
        raise ValueError(f"{recipe.data} has one class, {images.classes[0]}. A classifier needs at least two")
    train, evaluated = images.train.labels, {name: s.labels for name, s in images.evaluated.items()}
    counts = {f"{name} images": len(labels) for name, labels in {"training": train, **evaluated}.items()}
    source_and_type = [images.source, type(images.train).__name__]
    facts = {"data": source_and_type, "classes": images.classes, **counts}
    if not isinstance(images.train, ArraySplit):  # pixels of different decoders may differ in the last bit
        facts["the decoder of JPEGs"] = "torchcodec" if torchcodec_decoder() else "PIL"
    agree(accelerator, facts)
    splits = {"training" if images.val is not images.train else "": train, **evaluated}
    accelerator.print(summary(recipe.data, splits, len(images.classes), left_out))
    for line in (*warnings(train, evaluated, images.classes), *images.flaws):
        accelerator.print(f"warning: {line}")
    now.enter(MODEL)
    return images


def open_images(folder: Path, recipe: ImageRecipe | None = None) -> Images:
    """Map a folder returned by `prepare_cache` into memory.

    Args:
        folder: Folder in the cache.
        recipe: Recipe with the settings for shards and broken images. None uses the defaults.

    Raises:
        ValueError: The folder is damaged.
    """
    recipe = recipe or ImageRecipe()
    try:
        meta = read_json(folder / "meta.json")
        parts, is_array = _parts(folder), meta["kind"] == "array"
        # Mode "c" (copy-on-write) shares pages between processes, and avoids torch's warning about read-only
        # arrays.
        pixels = [np.load(folder / f"{part.split}_images.npy", mmap_mode="c") for part in parts if is_array]
    except (OSError, ValueError, KeyError, TypeError, EOFError) as error:
        raise ValueError(
            f"the prepared data in {folder} is damaged ({error}). Remove that folder, and run the same"
            " command to prepare the data again"
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
        split.mirror = meta["mirror"]  # False if a mirrored image changes its class, for example a digit
    return Images(
        source=meta["source"],
        classes=tuple(map(printable, meta["classes"])),  # folder names may contain any bytes
        train=splits[0],
        val=splits[1] if len(splits) > 1 else splits[0],
        val_name=meta["val_name"] or "train",
        test=splits[2] if len(splits) > 2 else None,
        # The digits in a cache of an older version have neither a test_name nor flaws.
        test_name=meta.get("test_name") or "",
        flaws=tuple(meta.get("flaws", ())),
    )


def _parts(folder: Path) -> list[SplitPart]:
    """Return the parts for training, evaluation and, with --holdout, the data's own evaluation split."""
    whole = [
        SplitPart(split, np.load(folder / f"{split}_labels.npy"), folder=folder)
        for split in STORED
        if (folder / f"{split}_labels.npy").exists()
    ]
    if not part_file(folder, "train").exists():
        return whole
    files = [part_file(folder, part) for part in SPLITS]
    return [SplitPart("train", whole[0].labels[np.load(file)], file, folder) for file in files] + whole[1:]


def _open_shards(
    folder: Path, location: str, parts: list[SplitPart], recipe: ImageRecipe
) -> list[ShardSplit]:
    """Open all splits of shards.

    Args:
        folder: Folder in the cache.
        location: Folder of the manifest, or s3://bucket/prefix.
        parts: Result of `_parts`.
        recipe: Recipe with the settings for shards.
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

Labels = Mapping[str, np.ndarray]  # labels by split name, int64 [N]


def summary(name: str, splits: Labels, classes: int, left_out: str) -> str:
    """Return a one-line description of the data.

    Args:
        name: Name of the data.
        splits: Labels of each split by split name. The name is "" for data without splits.
        classes: Number of classes.
        left_out: Files that were not read, with the reasons.
    """
    counts = [f"{len(labels):,} {split} images".replace("  ", " ") for split, labels in splits.items()]
    counts.append(f"{classes:,} {'class' if classes == 1 else 'classes'}")
    return f"data {printable(name)}: {', '.join(counts)}" + (f"; left out: {left_out}" if left_out else "")


def warnings(train: np.ndarray, evaluated: Labels, classes: Sequence[str]) -> list[str]:
    """Return a warning for each property of the labels that makes accuracy misleading."""
    lines = []
    counts = np.bincount(train, minlength=len(classes))
    least, most = int(counts.argmin()), int(counts.argmax())
    if counts[most] >= IMBALANCE * counts[least]:
        lines.append(
            f"the classes are imbalanced: {counts[least]:,} training images of {printable(classes[least])},"
            f" {counts[most]:,} of {printable(classes[most])}. Check the recall of each class. To weight"
            " classes equally, use --class_weights balanced and --best_by macro_f1"
        )
    for split, labels in evaluated.items():
        counts = np.bincount(labels, minlength=len(classes))
        if absent := [name for name, count in zip(classes, counts, strict=True) if count == 0]:
            lines.append(f"the {split} split has no image of {some_of(absent)}")
    return lines
