"""The kinds of `--data`: finding their files, and reading them into a cache folder.

`find_source` only lists files; `Source.write` reads them; `common/data/cache.py` decodes and caches.
"""

import difflib
import os
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np

from common.data import shards
from common.data.class_folders import find_class_folders
from common.data.csv_lists import find_csv
from common.data.decode import SPLITS
from common.data.encoded import save_labels
from common.data.source import BY_TYPE, VAL_CHOICE, Columns, Source
from common.data.tables import find_on_hub, find_parquet, find_saved
from common.system.s3 import ObjectStore
from common.system.threads import Heartbeat, run_with_heartbeat

KNOWN = ("digits", "cifar10", "synthetic")


def find_source(
    data: str,
    beat: Heartbeat,
    show_progress: bool,
    data_root: tuple[str, ...] = (),
    columns: Columns = BY_TYPE,
    holdout: float | None = None,
) -> Source:
    """Finds the data that `--data` names and lists its files.

    data_root: folders in which the files of an index may lie. Raises ValueError for data that can't be
    trained on, before much is read.
    """
    source = _find(data, beat, show_progress, data_root, columns)
    if any(columns) and not source.is_table:
        raise ValueError(f"--image_column and --label_column are for tables: --data {data} has no columns")
    if holdout is not None:
        return replace(source, holdout=holdout, hashes=(*source.hashes, f"holdout {holdout:g}"))
    if source.val_name is None:
        raise ValueError(
            f"--data {data} has no {VAL_CHOICE} to evaluate on: give it one, or hold out a tenth of its"
            " training images by --holdout 0.1"
        )
    return source


def _find(
    data: str, beat: Heartbeat, show_progress: bool, data_root: tuple[str, ...], columns: Columns
) -> Source:
    if data == "digits":
        return Source(data, (), _write_digits, mirror=False)  # a mirrored 2 is no 2
    if data == "synthetic":
        return Source(data, (), _write_synthetic)
    if data == "cifar10" or str(data).startswith("hub:"):
        return find_on_hub(data, beat, show_progress, columns)
    if str(data).startswith("s3://"):
        return run_with_heartbeat(lambda: _find_stored_shards(ObjectStore(data), data_root), beat)
    # Links are not followed: hosts that keep the data in different places can give it one name.
    root = Path(os.path.abspath(Path(data).expanduser()))
    if root.is_file() and root.suffix.lower() in (".csv", ".tsv"):
        return run_with_heartbeat(lambda: find_csv(root, columns), beat)
    if not root.is_dir():
        what = "is a file, not a folder or a CSV list" if root.exists() else "does not exist"
        near = difflib.get_close_matches(data, KNOWN, n=1)
        meant = f"did you mean {near[0]}?" if near else f"give a folder or one of: {', '.join(KNOWN)}"
        raise ValueError(f"--data {data}: {what}; {meant}")
    return run_with_heartbeat(
        lambda: (
            _find_shards(root, data_root)
            or find_saved(root, columns)
            or find_parquet(root, columns)
            or find_class_folders(root)
        ),
        beat,
    )


def _write_digits(folder: Path, beat: Heartbeat) -> tuple[str, ...]:
    """Writes scikit-learn's 1,797 digits of 8x8 (values 0 to 16) as uint8 32x32; holds out 36 of each class.

    RandomState, whose stream numpy keeps fixed (NEP 19), makes the hold-out the same on every machine.
    """

    def load():
        from PIL import Image
        from sklearn.datasets import load_digits

        digits = load_digits()
        small = np.round(digits.images * (255 / 16)).astype(np.uint8)
        large = [np.asarray(Image.fromarray(x).resize((32, 32), Image.Resampling.BILINEAR)) for x in small]
        return np.repeat(np.stack(large)[..., None], 3, axis=3), digits.target

    images, labels = run_with_heartbeat(load, beat)
    shuffled = np.random.RandomState(0).permutation(len(labels))
    val = np.sort(np.concatenate([shuffled[labels[shuffled] == c][:36] for c in range(10)]))
    train = np.setdiff1d(np.arange(len(labels)), val)
    for split, ids in zip(SPLITS, (train, val), strict=True):
        np.save(folder / f"{split}_images.npy", images[ids])
        save_labels(folder, split, labels[ids])
    return tuple("0123456789")


def _write_synthetic(folder: Path, beat: Heartbeat) -> tuple[str, ...]:
    """Writes 4,096 + 1,024 images of 32x32: one of ten fixed patterns of 4x4 coloured squares, with noise."""
    generator = np.random.RandomState(0)
    patterns = generator.randint(64, 192, (10, 4, 4, 3)).repeat(8, axis=1).repeat(8, axis=2)
    for split, count in zip(SPLITS, (4096, 1024), strict=True):
        labels = generator.permutation(count) % 10
        noise = generator.normal(0, 64, (count, 32, 32, 3))
        images = np.clip(np.rint(patterns[labels] + noise), 0, 255).astype(np.uint8)
        np.save(folder / f"{split}_images.npy", images)
        save_labels(folder, split, labels)
        beat()
    return tuple(f"pattern {c}" for c in range(10))


def _find_shards(root: Path, data_root: tuple[str, ...]) -> Source | None:
    """Finds the shards that prep_imagenet.py wrote to a folder, or an index of others; they stay there."""
    manifest = shards.find_local(root, data_root)
    if manifest is None:
        return None
    return _source_of_shards(manifest, str(root), lambda name: (root / name).read_bytes())


def _find_stored_shards(store: ObjectStore, data_root: tuple[str, ...]) -> Source:
    """Finds shards below a prefix in S3, or an index of others; each is fetched when it is needed."""
    manifest, content = shards.find_stored(store, data_root)

    def read(name: str) -> bytes:
        found = content if name == shards.MANIFEST else store.read(name, shards.INDEX_LIMIT)
        if found is None:
            raise ValueError(f"{store.url}/{name} is missing: prepare again")
        return found

    return _source_of_shards(manifest, store.url, read)


def _source_of_shards(manifest: shards.Manifest, place: str, read: Callable[[str], bytes]) -> Source:
    """The source of shards in a place. read(name): the content of a file beside them."""

    def write(folder: Path, beat: Heartbeat) -> tuple[str, ...]:
        (folder / shards.MANIFEST).write_bytes(read(shards.MANIFEST))
        for split in manifest.splits:
            name = shards.index_name(split)
            content = run_with_heartbeat(partial(read, name), beat)
            rows = shards.parse_index(content, manifest, split, f"{place}/{name}")
            (folder / name).write_bytes(content)
            save_labels(folder, split, rows[:, 3])
            beat()
        return manifest.classes

    val_name = "val" if "val" in manifest.splits else None
    return Source(
        manifest.name,
        (),
        write,
        val_name,
        shards=place,
        store=manifest.store,
        hashes=(manifest.sha256,),
    )
