"""Opens the images of --data: generated ones, tables, class folders, lists of files, or shards.

`prepare` (one process per host) makes a folder in the cache; `open_images` (all processes) maps it.
Images that fit in memory are decoded once, to uint8 arrays in the cache; workers of a DataLoader decode the
others for each batch. Batches are uint8 on the device: augmentation and normalisation follow there.
"""

from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
from accelerate import Accelerator

from common.data import survey
from common.data.cache import Prepared, prepare
from common.data.decode import SPLITS
from common.data.shard_cache import ShardCache
from common.data.shards import MANIFEST, check_roots, index_name, parse_manifest
from common.data.source import Columns
from common.data.splits import ArraySplit, FileSplit, ShardSplit, Split
from common.data.survey import NO_FLAWS, Broken, Duplicates, Flaws
from common.distributed.agreement import agree, once_per_host
from common.order import Shuffled, Streamed
from common.recipe import ImageRecipe
from common.system.files import read_json
from common.system.text import printable
from common.system.threads import Heartbeat


@dataclass(frozen=True)
class Images:
    """A data set: splits train and val (val_name is "val" or "test") and class names.

    source: the data's name and the key of its content, equal on all hosts with the same data.
    mirror: True if a mirrored image keeps its class; False for digits. flaws: what is wrong with them.
    """

    source: str
    classes: tuple[str, ...]
    train: Split
    val: Split
    val_name: str
    mirror: bool
    flaws: Flaws = NO_FLAWS

    @property
    def identity(self) -> tuple[str, tuple[str, ...]]:
        """Source and classes, which checkpoints record and a resume compares."""
        return self.source, self.classes


def load(accelerator: Accelerator, recipe: ImageRecipe) -> Images:
    """Opens recipe.data on all processes; one process per host prepares it, and all check that they agree."""
    prepared = once_per_host(accelerator, "data", partial(_prepare, recipe), recipe.timeout_s)
    folder, left_out = prepared  # as JSON, from another process
    images = open_images(Path(folder), recipe)
    kind = [images.source, images.val_name, type(images.train).__name__]
    counts = {"training images": len(images.train), "validation images": len(images.val)}
    agree(accelerator, {"data": kind, "classes": images.classes, **counts})
    labels = images.train.labels, images.val.labels, images.val_name
    accelerator.print(survey.found(recipe.data, *labels, len(images.classes), left_out))
    for line in survey.warnings(*labels, images.classes, images.flaws):
        accelerator.print(f"warning: {line}")
    return images


def open_data(recipe: ImageRecipe) -> Images:
    """Opens recipe.data in this process alone."""
    return open_images(Path(_prepare(recipe, lambda: None).folder), recipe)


def _prepare(recipe: ImageRecipe, beat: Heartbeat) -> Prepared:
    return prepare(
        recipe.data,
        Path(recipe.cache_dir or "~/.cache/train-images"),
        beat,
        data_root=recipe.data_root,
        columns=Columns(recipe.image_column, recipe.label_column),
        holdout=recipe.holdout,
    )


def open_images(folder: Path, recipe: ImageRecipe | None = None) -> Images:
    """Maps the folder that `prepare` returned into memory.

    recipe: how shards are read and what happens to broken images; None: the defaults.
    """
    recipe, pixels = recipe or ImageRecipe(), {}
    train: Split
    val: Split
    try:
        about = read_json(folder / "meta.json")
        labels = {split: np.load(folder / f"{split}_labels.npy") for split in SPLITS}
        if about["kind"] == "array":
            # mode "c": pages are shared by all processes; torch would warn about an array it may not write
            pixels = {split: np.load(folder / f"{split}_images.npy", mmap_mode="c") for split in SPLITS}
    except (OSError, ValueError, KeyError, TypeError, EOFError) as error:
        raise ValueError(
            f"the prepared data in {folder} is damaged ({error}): remove that folder, and the same command"
            " prepares it again"
        ) from error
    if about["kind"] == "array":
        train, val = (ArraySplit(pixels[split], labels[split]) for split in SPLITS)
    elif about["kind"] == "files":
        skip = recipe.on_bad_image == "skip"
        train, val = (FileSplit(folder, split, labels[split], skip) for split in SPLITS)
    else:
        train, val = _open_shards(folder, about["shards"], labels, recipe)
    duplicates, broken = about.get("duplicates"), about.get("broken")
    flaws = Flaws(duplicates and Duplicates(*duplicates), broken and Broken(*broken))
    classes = tuple(map(printable, about["classes"]))  # names of folders have any bytes
    return Images(about["source"], classes, train, val, about["val_name"], about["mirror"], flaws)


def _open_shards(
    folder: Path, place: str, labels: dict[str, np.ndarray], recipe: ImageRecipe
) -> tuple[ShardSplit, ShardSplit]:
    """Opens both splits. place: the folder of the manifest, or s3://bucket/prefix."""
    manifest = parse_manifest((folder / MANIFEST).read_bytes(), str(folder / MANIFEST))
    check_roots(manifest, place, recipe.data_root)
    cache, store = None, manifest.store or place
    if store.startswith("s3://"):
        shards = tuple(shard for split in SPLITS for shard in manifest.shards_in(split))
        cache = ShardCache(folder / "shards", store, shards, int(recipe.cache_gib * 2**30))

    def open_split(split: str, beside: ShardSplit | None) -> ShardSplit:
        shards, count = manifest.shards_in(split), len(labels[split])
        samples: Shuffled | Streamed = Shuffled(count)
        if manifest.kind != "index":
            assert recipe.streams is not None
            samples = Streamed([shard.images for shard in shards], recipe.streams, recipe.shuffle_window)
        return ShardSplit(
            folder / index_name(split),
            cache.folder if cache else Path(place),
            shards,
            labels[split],
            samples,
            recipe.on_bad_image == "skip",
            recipe.workers,
            cache,
            beside,
            min(1.0, recipe.max_val_images / count) if recipe.max_val_images and split == "val" else 1.0,
        )

    val = open_split("val", None)
    return open_split("train", val), val
