"""Opens the images of --data: generated ones, tables, class folders, lists of files, or shards.

`prepare` (one process per host) makes a folder in the cache; `open_images` (all processes) maps it.
Images that fit in memory are decoded once, to uint8 arrays in the cache; workers of a DataLoader decode the
others for each batch. Batches are uint8 on the device: augmentation and normalisation follow there.
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

IMBALANCE = 10  # times as many images in the largest class as in the smallest: named


@dataclass(frozen=True)
class Images:
    """A data set: splits and class names.

    val: is evaluated during the training. test: for the end: the data's "test" beside "val", or with
    --holdout their own held-out split. Their names are "val", "test" or "holdout". source: the data's name
    and the key of its content, equal on all hosts with the same data. flaws: warnings about broken images,
    and about those in two splits.
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
        """Source, classes, and if images are cropped when they are evaluated (those that stay encoded):
        checkpoints record them, and a resume compares them."""
        return self.source, self.classes, self.val.cropped

    def class_weights(self, how: str, device: torch.device) -> Tensor | None:
        """Return the loss's weights, float32 [classes], whose mean over the training images is 1.

        how: "balanced" for scikit-learn's, the inverse of a class's share; "sqrt" for its inverse square root
        (Mahajan et al. 2018, arXiv 1805.00932); "none" for None. The weighted losses are averaged over
        images: torch's mean would be over a micro-batch's weights.
        """
        if how == "none":
            return None
        counts = np.bincount(self.train.labels, minlength=len(self.classes))
        present = np.maximum(counts, 1)
        if how == "sqrt":
            weights = len(self.train) / (np.sqrt(counts).sum() * np.sqrt(present)) * (counts > 0)
        else:
            weights = len(self.train) / (np.count_nonzero(counts) * present) * (counts > 0)
        return torch.from_numpy(weights.astype(np.float32)).to(device)

    @property
    def evaluated(self) -> dict[str, Split]:
        """The splits that are evaluated, by their names."""
        splits = {self.val_name: self.val} if self.val is not self.train else {}
        return splits | ({self.test_name: self.test} if self.test else {})


def load(accelerator: Accelerator, recipe: ImageRecipe, is_evaluated: bool = False) -> Images:
    """Opens recipe.data on all processes; one process per host prepares it, and all check that they agree.

    is_evaluated: nothing is trained; of data with one split, `val` is that one, and one class is enough.
    """
    now.enter(DATA)
    make = partial(prepare_cache, recipe, is_evaluated=is_evaluated)
    prepared = once(accelerator, "data", make, recipe.timeout_s, per_host=True)
    folder, left_out = prepared  # as JSON, from another process
    images = open_images(Path(folder), recipe)
    if len(images.classes) < 2 and not is_evaluated:
        raise ValueError(f"{recipe.data} has one class, {images.classes[0]}: a classifier needs two or more")
    train, evaluated = images.train.labels, {name: s.labels for name, s in images.evaluated.items()}
    counts = {f"{name} images": len(labels) for name, labels in {"training": train, **evaluated}.items()}
    kind = [images.source, type(images.train).__name__]
    facts = {"data": kind, "classes": images.classes, **counts}
    if not isinstance(images.train, ArraySplit):  # decoders may differ in the last bit
        facts["the decoder of JPEGs"] = "torchcodec" if torchcodec_decoder() else "PIL"
    agree(accelerator, facts)
    splits = {"training" if images.val is not images.train else "": train, **evaluated}
    accelerator.print(summary(recipe.data, splits, len(images.classes), left_out))
    for line in (*warnings(train, evaluated, images.classes), *images.flaws):
        accelerator.print(f"warning: {line}")
    now.enter(MODEL)
    return images


def open_images(folder: Path, recipe: ImageRecipe | None = None) -> Images:
    """Maps the folder that `prepare` returned into memory.

    recipe: how shards are read and what happens to broken images; None: the defaults.
    """
    recipe = recipe or ImageRecipe()
    try:
        meta = read_json(folder / "meta.json")
        parts, is_array = _parts(folder), meta["kind"] == "array"
        # mode "c": pages are shared by all processes; torch would warn about an array it may not write
        pixels = [np.load(folder / f"{part.split}_images.npy", mmap_mode="c") for part in parts if is_array]
    except (OSError, ValueError, KeyError, TypeError, EOFError) as error:
        raise ValueError(
            f"the prepared data in {folder} is damaged ({error}): remove that folder, and the same command"
            " prepares it again"
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
        split.mirror = meta["mirror"]  # True if a mirrored image keeps its class; False for digits
    return Images(
        source=meta["source"],
        classes=tuple(map(printable, meta["classes"])),  # names of folders have any bytes
        train=splits[0],
        val=splits[1] if len(splits) > 1 else splits[0],
        val_name=meta["val_name"] or "train",
        test=splits[2] if len(splits) > 2 else None,
        # Digits in a cache of an older version have neither.
        test_name=meta.get("test_name") or "",
        flaws=tuple(meta.get("flaws", ())),
    )


def _parts(folder: Path) -> list[SplitPart]:
    """The images to train on, those to evaluate, and with --holdout the data's own held-out split."""
    whole = [
        SplitPart(split, np.load(folder / f"{split}_labels.npy"), folder=folder)
        for split in STORED
        if (folder / f"{split}_labels.npy").exists()
    ]
    if not part_file(folder, "train").exists():
        return whole
    files = [part_file(folder, part) for part in SPLITS]
    return [SplitPart("train", whole[0].labels[np.load(file)], file, folder) for file in files] + whole[1:]


def _open_shards(folder: Path, place: str, parts: list[SplitPart], recipe: ImageRecipe) -> list[ShardSplit]:
    """Opens all splits. place: the folder of the manifest, or s3://bucket/prefix."""
    from onecurve.data.shard_cache import ShardCache
    from onecurve.data.shards import MANIFEST, parse_manifest

    manifest = parse_manifest((folder / MANIFEST).read_bytes(), str(folder / MANIFEST))
    cache, store = None, manifest.store or place
    if store.startswith("s3://"):
        shards = tuple(shard for split in manifest.splits for shard in manifest.shards_in(split))
        cache = ShardCache(folder / "shards", store, shards, int(recipe.cache_gib * 2**30))

    evaluated = [ShardSplit(folder, manifest, place, part, recipe, cache) for part in parts[1:] or parts]
    if len(parts) == 1:
        return evaluated
    return [ShardSplit(folder, manifest, place, parts[0], recipe, cache, evaluated[0]), *evaluated]


# Its summary and warnings, printed at the start

Labels = Mapping[str, np.ndarray]  # int64 [N], by the name of the evaluated split


def summary(name: str, splits: Labels, classes: int, left_out: str) -> str:
    """One line. splits: the labels of each split by its name, which is empty for data without splits."""
    counts = [f"{len(labels):,} {split} images".replace("  ", " ") for split, labels in splits.items()]
    counts.append(f"{classes:,} {'class' if classes == 1 else 'classes'}")
    return f"data {printable(name)}: {', '.join(counts)}" + (f"; left out: {left_out}" if left_out else "")


def warnings(train: np.ndarray, evaluated: Labels, classes: Sequence[str]) -> list[str]:
    """A line for each thing about the labels that makes an accuracy misleading."""
    lines = []
    counts = np.bincount(train, minlength=len(classes))
    least, most = int(counts.argmin()), int(counts.argmax())
    if counts[most] >= IMBALANCE * counts[least]:
        lines.append(
            f"the classes are imbalanced: {counts[least]:,} training images of {printable(classes[least])},"
            f" {counts[most]:,} of {printable(classes[most])}: look at each class's recall, too."
            " With --class_weights balanced and --best_by macro_f1 each class counts alike"
        )
    for split, labels in evaluated.items():
        counts = np.bincount(labels, minlength=len(classes))
        if absent := [name for name, count in zip(classes, counts, strict=True) if count == 0]:
            lines.append(f"the {split} split has no image of {some_of(absent)}")
    return lines
