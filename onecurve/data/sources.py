"""The kinds of `--data`: finding their files, and reading them into a cache folder.

`find_source` only lists files; `Source.write` reads them; `onecurve/data/cache.py` decodes and caches.
"""

import os
from collections.abc import Callable
from concurrent.futures import Future, wait
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from onecurve.data import class_folders
from onecurve.data.class_folders import VAL_NAMES, LeftOut, check_known, used_splits
from onecurve.data.encoded import SPLITS, save_images, save_labels
from onecurve.data.names import save_names
from onecurve.data.tables import (
    Columns,
    Table,
    is_named,
    load_from_hub,
    parquet_files,
    saved_files,
    write_tables,
)
from onecurve.flags.recipe import ImageRecipe
from onecurve.system.files import read_regular, retried
from onecurve.system.text import did_you_mean, some_of
from onecurve.system.threads import Heartbeat, run_with_heartbeat, start_daemon

if TYPE_CHECKING:
    from onecurve.data.lists import Listed
    from onecurve.data.shards import ShardManifest

KNOWN = ("digits", "cifar10", "synthetic")
EARLY_S = 1.0  # of waiting before torch is imported
_listings: "dict[tuple[str, Columns], Future[Source]]" = {}  # that check_inputs() began


@dataclass(frozen=True)
class Source:
    """The data that `--data` names.

    write(folder, beat) stores the splits in a cache folder and returns the class names: for each split the
    labels, `<split>_labels.npy` int64 [N], and decoded images, `<split>_images.npy`, or encoded ones
    (save_images); and the images' names, where they have some (save_names).
    """

    name: str
    files: tuple[tuple[str, Path], ...]  # (name that is part of the key, file), sorted; () if generated
    write: Callable[[Path, Heartbeat], tuple[str, ...]]
    val_name: str | None = "val"  # the split that chooses the best checkpoint; None: there is none
    test_name: str | None = None  # the split that is evaluated once, at the end
    holdout: float | str | None = None  # the training images that are held out
    mirror: bool = True
    root: Path | None = None  # the folder of the image files, for images stored as paths
    shards: str | None = None  # the place of their manifest: a folder, or s3://bucket/prefix
    fold: str = ""  # has its own cache folder; the data's name is the same for all folds
    hashes: tuple[str, ...] = ()  # hashes of the content beyond the files'
    is_table: bool = False  # it has columns to choose from
    left_out: str = ""  # what is not read, and why
    why_not_trained_on: str = ""  # the images can be evaluated alone


def find_source(recipe: ImageRecipe, beat: Heartbeat, is_evaluated: bool = False) -> Source:
    """Finds the data that `--data` names and lists its files.

    is_evaluated: nothing is trained, so one split is enough. Raises ValueError for data that can't be used,
    before much is read.
    """
    data, holdout, columns = recipe.data, recipe.holdout, Columns(recipe.image_column, recipe.label_column)
    source = _find(data, beat, columns)
    if source.why_not_trained_on and not is_evaluated:
        raise ValueError(source.why_not_trained_on)
    if any(columns) and not source.is_table:
        raise ValueError(f"--image_column and --label_column are for tables: --data {data} has no columns")
    if holdout is not None:
        text = holdout if isinstance(holdout, str) else f"{holdout:.12g}"
        if source.test_name:
            raise ValueError(
                f"--holdout {text}: --data {data} has {source.val_name} to choose the best checkpoint by and"
                f" {source.test_name} to evaluate it once: leave out --holdout"
            )
        source = replace(source, holdout=holdout, val_name="holdout", test_name=source.val_name)
        if text == holdout:
            return replace(source, fold=f" fold {text}")
        return replace(source, hashes=(*source.hashes, f"holdout {text}"))
    if source.val_name is None and not is_evaluated:
        raise ValueError(
            f"--data {data} has no val, validation, valid or test to evaluate on: give it one, or hold out a"
            " tenth of its training images by --holdout 0.1"
        )
    return source


def _find(data: str, beat: Heartbeat, columns: Columns) -> Source:
    if data == "digits":
        return Source(data, (), _write_digits, mirror=False)  # a mirrored 2 is no 2
    if data == "synthetic":
        return Source(data, (), _write_synthetic)
    if data == "cifar10" or data.startswith("hub:"):
        return _of_hub(data, load_from_hub(data, beat), columns)
    begun = _listings.pop((data, columns), None)
    return run_with_heartbeat(begun.result if begun else partial(_find_files, data, columns), beat)


def check_inputs(recipe: ImageRecipe) -> int:
    """Begins find_source() in a thread, for this process's next call, and waits EARLY_S for it.

    Returns 0. Raises ValueError for data of this host that can't be used, if that is known by then, and for
    weights that are not there.
    """
    if recipe.weights and not Path(recipe.weights).expanduser().exists():
        raise ValueError(f"--weights {recipe.weights}: there is no such folder or file")
    data, columns = recipe.data, Columns(recipe.image_column, recipe.label_column)
    if data not in KNOWN and not data.startswith(("hub:", "s3:")):
        _listings[data, columns] = listing = start_daemon(partial(_find_files, data, columns))
        if wait([listing], EARLY_S).done:
            with suppress(OSError):  # the next call explains it
                find_source(recipe, lambda: None)
            _listings[data, columns] = listing
    return 0


@retried
def _find_files(data: str, columns: Columns) -> Source:
    from onecurve.data import shards

    if data.startswith("s3://"):
        return _find_stored_shards(data)
    # Links are not followed: hosts that keep the data in different places can give it one name.
    root = Path(os.path.abspath(os.path.expanduser(data)))
    if root.is_file() and root.suffix.lower() in class_folders.TABLES:
        return _of_lone_table(root, columns)
    if not root.is_dir():
        what = "is a file, no folder, CSV list or parquet file" if root.exists() else "does not exist"
        meant = did_you_mean(data, KNOWN) or f"give a folder or one of: {', '.join(KNOWN)}"
        raise ValueError(f"--data {data}: {what}; {meant}")
    if manifest := shards.find_local(root):
        return _of_shards(manifest, str(root), lambda name: read_regular(root / name))
    if (found := saved_files(root)) is not None:
        return _of_table_files(root, found, "{split}/{file}", columns)
    if found := parquet_files(root):
        is_flat = is_named(found["train"][0], "train")
        return _of_table_files(root, found, "{file}" if is_flat else "{folder}/{file}", columns)
    if lists := class_folders.metadata_files(root):
        return _find_metadata(root, lists, columns)
    if table := class_folders.lone_table(root):
        return _of_lone_table(table, columns)
    return find_class_folders(root)


# Generated


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


# Shards


def _find_stored_shards(data: str) -> Source:
    """Finds shards below a prefix in S3, or an index of others; each is fetched when it is needed."""
    from onecurve.data import shards
    from onecurve.system.s3 import ObjectStore

    store = ObjectStore(data)
    manifest, content = shards.find_stored(store)

    def read(name: str) -> bytes:
        found = content if name == shards.MANIFEST else store.read(name, shards.INDEX_LIMIT)
        if found is None:
            raise ValueError(f"{store.url}/{name} is missing: prepare again")
        return found

    return _of_shards(manifest, store.url, read)


def _of_shards(manifest: "ShardManifest", place: str, read: Callable[[str], bytes]) -> Source:
    """The source of shards in a place. read(name): the content of a file beside them."""

    from onecurve.data import shards

    def write(folder: Path, beat: Heartbeat) -> tuple[str, ...]:
        (folder / shards.MANIFEST).write_bytes(read(shards.MANIFEST))
        for split in manifest.splits:
            name = shards.index_name(split)
            content = run_with_heartbeat(partial(read, name), beat)
            rows = shards.parse_shard_index(content, manifest, split, f"{place}/{name}")
            (folder / name).write_bytes(content)
            save_labels(folder, split, rows[:, 3])
            beat()
        return manifest.classes

    val_name = "val" if "val" in manifest.splits else None
    return Source(manifest.name, (), write, val_name, shards=place, hashes=(manifest.sha256,))


# Tables


def _of_lone_table(file: Path, columns: Columns) -> Source:
    if file.suffix.lower() in class_folders.LISTS:
        from onecurve.data.lists import read_list

        return _of_lists(file.stem, file.parent, file, read_list(file, columns))
    return _of_table_files(file, {"train": [file]}, "{file}", columns)


def _of_table_files(root: Path, files: dict[str, list[Path]], named: str, columns: Columns) -> Source:
    tables = {split: [Table(str(file), file) for file in of_split] for split, of_split in files.items()}
    return _of_tables(str(root), root.name, tables, files, named, columns)


def _of_hub(data: str, loaded: dict[str, Any], columns: Columns) -> Source:
    name = data.removeprefix("hub:")
    tables = {s: [Table(f"{name}'s {s} split", rows.data.table)] for s, rows in loaded.items()}
    files = {s: [Path(file["filename"]) for file in rows.cache_files] for s, rows in loaded.items()}
    return _of_tables(data, name, tables, files, "{split} {k}", columns)


def _of_tables(
    data: str,
    name: str,
    tables: dict[str, list[Table]],
    files: dict[str, list[Path]],
    named: str,
    columns: Columns,
) -> Source:
    """named: the form of a file's name in the key; a data set that is moved keeps its names."""
    if "train" not in tables:
        raise ValueError(f"--data {data} has no split train, only: {some_of(list(tables)) or 'none'}")
    used = used_splits(tables)
    splits = {key: tables[split] for key, split in used.items()}
    return Source(
        name,
        tuple(
            (named.format(split=key, k=k, file=file.name, folder=file.parent.name), file)
            for key, split in used.items()
            for k, file in enumerate(files[split])
        ),
        lambda folder, beat: write_tables(splits, columns, folder, beat),
        VAL_NAMES.get(used.get("val", "")),
        used.get("test"),
        hashes=(f"columns {list(columns)}",) if any(columns) else (),
        is_table=True,
        left_out=", ".join(_left_out({split: split for split in tables}, used)),
    )


def _left_out(shown: dict[str, str], used: dict[str, str]) -> list[str]:
    """Messages about the other splits. shown: how messages name each split."""
    why = f", as {shown[used['val']]} is there" if "val" in used else ""
    return [name + why for split, name in shown.items() if split not in used.values()]


# Image files


def find_class_folders(root: Path) -> Source:
    left_out = LeftOut()
    folders, found = class_folders.list_splits(root, left_out)
    used = used_splits(found)
    splits = {
        key: [(c, os.path.join(folders[split], c, path)) for c, ps in found[split].items() for path in ps]
        for key, split in used.items()
    }
    unused = _left_out({split: f"{name}/" for split, name in folders.items()}, used)
    if folders["train"] and (beside := class_folders.beside_splits(root)):
        unused.append(f"{some_of([f'{name}/' for name in beside], 3)}, as {folders['train']}/ is a split")
    text = ", ".join(filter(None, (str(left_out), *unused)))
    classes = sorted(found["train"])
    source = _source_of_files(root.name, root, classes, splits, used, text)
    if len(classes) > 1 or folders["train"]:
        return source
    (name,) = classes
    paths = found["train"][name]
    return replace(source, why_not_trained_on=class_folders.why_not_trained_on(root, name, paths))


def _find_metadata(root: Path, files: dict[str, Path], columns: Columns) -> Source:
    """The files that the list in each split's folder names."""
    from onecurve.data.lists import read_list

    rows = [
        row._replace(file=os.path.join(path.parent.name, row.file))
        for split, path in files.items()
        for row in read_list(path, columns, split)
    ]
    source, listed = _of_lists(root.name, root, root, rows), {row.split for row in rows}
    bare = [f"{f}/ without labels" for s, f in class_folders.split_folders(root).items() if s not in listed]
    return replace(source, left_out=", ".join(filter(None, (source.left_out, *bare))))


def _of_lists(name: str, root: Path, data: Path, rows: "list[Listed]") -> Source:
    """data: for messages. root: of the rows' files."""
    named = {row.split for row in rows}
    used = used_splits(named)
    if "train" not in named:
        raise ValueError(f"--data {data}: none of its {len(rows):,} rows is of the split train")
    splits = {
        key: [(row.label, row.file) for row in rows if row.split == split] for key, split in used.items()
    }
    train = {label for label, _ in splits["train"]}
    for key, split in used.items():
        check_known(f"--data {data}", split, {label for label, _ in splits[key]}, train)
    text = ", ".join(_left_out({split: split for split in ("train", *VAL_NAMES) if split in named}, used))
    classes = sorted(train, key=int if all(map(str.isdecimal, train)) else str)
    source = _source_of_files(name, root, classes, splits, used, text)
    return replace(source, hashes=(repr(splits),), is_table=True)


def _source_of_files(
    name: str,
    root: Path,
    classes: list[str],
    splits: dict[str, list[tuple[str, str]]],
    used: dict[str, str],
    left_out: str,
) -> Source:
    """splits: the class, and the path below root, of each image of a split."""

    def write(folder: Path, beat: Heartbeat) -> tuple[str, ...]:
        number = {c: k for k, c in enumerate(classes)}
        for split, images in splits.items():
            save_images(folder, split, (os.fsencode(path) for _, path in images), root)
            save_names(folder, split, (path for _, path in images))
            save_labels(folder, split, [number[c] for c, _ in images])
            beat()
        return tuple(classes)

    files = tuple((path, root / path) for images in splits.values() for _, path in images)
    val_name = VAL_NAMES.get(used.get("val", ""))
    return Source(name, files, write, val_name, used.get("test"), root=root, left_out=left_out)
