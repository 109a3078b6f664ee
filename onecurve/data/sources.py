"""Sources of `--data`, with functions that find the files and read them into a cache folder.

`find_source` only lists files. `Source.write` reads the files. `onecurve/data/cache.py` decodes and caches
the images.
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
EARLY_S = 1.0  # seconds to wait for the listing before torch is imported
_listings: "dict[tuple[str, Columns], Future[Source]]" = {}  # listings that check_inputs() has started


@dataclass(frozen=True)
class Source:
    """Data that `--data` refers to.

    Attributes:
        name: Name of the data.
        files: Sorted pairs of a name and a file path. The names are part of the cache key. () for generated
            data.
        write: Function with the arguments cache folder and heartbeat. It stores each split in the folder and
            returns the class names. A split consists of labels (`<split>_labels.npy`, int64 [N]), images
            (decoded in `<split>_images.npy`, or encoded by `save_images`), and optional names (`save_names`).
        val_name: Split that selects the best checkpoint, or None without such a split.
        test_name: Split that is evaluated once, at the end.
        holdout: Share or number of the training images to hold out, or a fold. None disables the hold-out.
        mirror: Whether mirrored images keep their class.
        root: Folder that the image paths are relative to, if images are stored as paths.
        shards: Location of the shards' manifest, which is a folder or s3://bucket/prefix.
        fold: Part of the cache key that differs between folds. All folds share one name.
        hashes: Hashes of content that `files` does not include.
        is_table: Whether the data has columns that flags can choose.
        left_out: Files that were not read, with the reasons.
        why_not_trained_on: Reason why the data can only be evaluated, or "".
    """

    name: str
    files: tuple[tuple[str, Path], ...]
    write: Callable[[Path, Heartbeat], tuple[str, ...]]
    val_name: str | None = "val"
    test_name: str | None = None
    holdout: float | str | None = None
    mirror: bool = True
    root: Path | None = None
    shards: str | None = None
    fold: str = ""
    hashes: tuple[str, ...] = ()
    is_table: bool = False
    left_out: str = ""
    why_not_trained_on: str = ""


def find_source(recipe: ImageRecipe, beat: Heartbeat, is_evaluated: bool = False) -> Source:
    """Find the data that `--data` refers to, and list the data's files.

    Args:
        recipe: Recipe with the flags of the data.
        beat: Function that is called about once a second.
        is_evaluated: Whether the data is only evaluated, so that one split is enough.

    Raises:
        ValueError: The data can't be used. The error is raised before large files are read.
    """
    data, holdout, columns = recipe.data, recipe.holdout, Columns(recipe.image_column, recipe.label_column)
    source = _find(data, beat, columns)
    if source.why_not_trained_on and not is_evaluated:
        raise ValueError(source.why_not_trained_on)
    if any(columns) and not source.is_table:
        raise ValueError(f"--image_column and --label_column require a table. --data {data} has no columns")
    if holdout is not None:
        text = holdout if isinstance(holdout, str) else f"{holdout:.12g}"
        if source.test_name:
            raise ValueError(
                f"--holdout {text} is not needed: --data {data} has {source.val_name} to select the best"
                f" checkpoint and {source.test_name} for the final evaluation. Remove --holdout"
            )
        source = replace(source, holdout=holdout, val_name="holdout", test_name=source.val_name)
        if text == holdout:
            return replace(source, fold=f" fold {text}")
        return replace(source, hashes=(*source.hashes, f"holdout {text}"))
    if source.val_name is None and not is_evaluated:
        raise ValueError(
            f"--data {data} has no val, validation, valid or test to evaluate on. Add one, or hold out a"
            " tenth of the training images with --holdout 0.1"
        )
    return source


def _find(data: str, beat: Heartbeat, columns: Columns) -> Source:
    if data == "digits":
        return Source(data, (), _write_digits, mirror=False)  # a mirrored 2 is not a 2
    if data == "synthetic":
        return Source(data, (), _write_synthetic)
    if data == "cifar10" or data.startswith("hub:"):
        return _hub_source(data, load_from_hub(data, beat), columns)
    listing = _listings.pop((data, columns), None)
    return run_with_heartbeat(listing.result if listing else partial(_find_files, data, columns), beat)


def check_inputs(recipe: ImageRecipe) -> int:
    """Check data and weights early, for up to EARLY_S seconds.

    A thread lists the files of the data. A later call of find_source() uses the thread's result.

    Returns:
        Always 0.

    Raises:
        ValueError: The weights do not exist, or the listing has already shown that the data can't be used.
    """
    if recipe.weights and not Path(recipe.weights).expanduser().exists():
        raise ValueError(f"--weights {recipe.weights}: there is no such folder or file")
    data, columns = recipe.data, Columns(recipe.image_column, recipe.label_column)
    if data not in KNOWN and not data.startswith(("hub:", "s3:")):
        _listings[data, columns] = listing = start_daemon(partial(_find_files, data, columns))
        if wait([listing], EARLY_S).done:
            with suppress(OSError):  # the next call of find_source() reports the error
                find_source(recipe, lambda: None)
            _listings[data, columns] = listing
    return 0


@retried
def _find_files(data: str, columns: Columns) -> Source:
    from onecurve.data import shards

    if data.startswith("s3://"):
        return _find_stored_shards(data)
    # Links are not resolved, so that the data has the same name on hosts where links point to different
    # paths.
    root = Path(os.path.abspath(os.path.expanduser(data)))
    if root.is_file() and root.suffix.lower() in class_folders.TABLES:
        return _lone_table_source(root, columns)
    if not root.is_dir():
        problem = "is not a folder, CSV list or parquet file" if root.exists() else "does not exist"
        advice = did_you_mean(data, KNOWN) or f"give a folder, or choose among {', '.join(KNOWN)}"
        raise ValueError(f"--data {data} {problem}: {advice}")
    if manifest := shards.find_local(root):
        return _shard_source(manifest, str(root), lambda name: read_regular(root / name))
    if (files := saved_files(root)) is not None:
        return _table_files_source(root, files, "{split}/{file}", columns)
    if files := parquet_files(root):
        is_flat = is_named(files["train"][0], "train")
        return _table_files_source(root, files, "{file}" if is_flat else "{folder}/{file}", columns)
    if lists := class_folders.metadata_files(root):
        return _find_metadata(root, lists, columns)
    if table := class_folders.lone_table(root):
        return _lone_table_source(table, columns)
    return find_class_folders(root)


# Generated data


def _write_digits(folder: Path, beat: Heartbeat) -> tuple[str, ...]:
    """Write scikit-learn's 1,797 digits (8x8, values 0 to 16) as uint8 32x32. Hold out 36 of each class.

    numpy guarantees that RandomState's stream does not change (NEP 19), so the held-out images are the same
    on every machine.
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
    """Write 4,096 + 1,024 noisy 32x32 images. Each class is a fixed pattern of 4x4 coloured squares."""
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
    """Find prepared or indexed shards below an S3 prefix. Each shard is downloaded when it is needed."""
    from onecurve.data import shards
    from onecurve.system.s3 import ObjectStore

    store = ObjectStore(data)
    manifest, content = shards.find_stored(store)

    def read(name: str) -> bytes:
        file_content = content if name == shards.MANIFEST else store.read(name, shards.INDEX_LIMIT)
        if file_content is None:
            raise ValueError(f"{store.url}/{name} is missing: prepare again")
        return file_content

    return _shard_source(manifest, store.url, read)


def _shard_source(manifest: "ShardManifest", location: str, read: Callable[[str], bytes]) -> Source:
    """Return the source of prepared or indexed shards.

    Args:
        manifest: Manifest of the shards.
        location: Folder of the manifest, or s3://bucket/prefix.
        read: Function that maps the name of a file next to the manifest to the file's content.
    """
    from onecurve.data import shards

    def write(folder: Path, beat: Heartbeat) -> tuple[str, ...]:
        (folder / shards.MANIFEST).write_bytes(read(shards.MANIFEST))
        for split in manifest.splits:
            name = shards.index_name(split)
            content = run_with_heartbeat(partial(read, name), beat)
            rows = shards.parse_shard_index(content, manifest, split, f"{location}/{name}")
            (folder / name).write_bytes(content)
            save_labels(folder, split, rows[:, 3])
            beat()
        return manifest.classes

    val_name = "val" if "val" in manifest.splits else None
    return Source(manifest.name, (), write, val_name, shards=location, hashes=(manifest.sha256,))


# Tables


def _lone_table_source(file: Path, columns: Columns) -> Source:
    if file.suffix.lower() in class_folders.LISTS:
        from onecurve.data.lists import read_list

        return _list_source(file.stem, file.parent, file, read_list(file, columns))
    return _table_files_source(file, {"train": [file]}, "{file}", columns)


def _table_files_source(
    root: Path, files: dict[str, list[Path]], name_format: str, columns: Columns
) -> Source:
    tables = {split: [Table(str(file), file) for file in paths] for split, paths in files.items()}
    return _table_source(str(root), root.name, tables, files, name_format, columns)


def _hub_source(data: str, loaded: dict[str, Any], columns: Columns) -> Source:
    name = data.removeprefix("hub:")
    tables = {s: [Table(f"{name}'s {s} split", rows.data.table)] for s, rows in loaded.items()}
    files = {s: [Path(file["filename"]) for file in rows.cache_files] for s, rows in loaded.items()}
    return _table_source(data, name, tables, files, "{split} {k}", columns)


def _table_source(
    data: str,
    name: str,
    tables: dict[str, list[Table]],
    files: dict[str, list[Path]],
    name_format: str,
    columns: Columns,
) -> Source:
    """Return the source of tables.

    Args:
        data: Value of `--data` for messages.
        name: Name of the data.
        tables: Tables of each split.
        files: Files of the tables of each split.
        name_format: Format of a file's name in the cache key. The name must not change if the data is moved.
        columns: Columns chosen by flags.
    """
    if "train" not in tables:
        raise ValueError(f"--data {data} has no split train, only {some_of(list(tables)) or 'none'}")
    used = used_splits(tables)
    splits = {key: tables[split] for key, split in used.items()}
    return Source(
        name,
        tuple(
            (name_format.format(split=key, k=k, file=file.name, folder=file.parent.name), file)
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


def _left_out(names: dict[str, str], used: dict[str, str]) -> list[str]:
    """Return a note about each unused split.

    Args:
        names: Name of each split in messages.
        used: Result of `used_splits`.
    """
    reason = f" ({names[used['val']]} is used instead)" if "val" in used else ""
    return [name + reason for split, name in names.items() if split not in used.values()]


# Image files


def find_class_folders(root: Path) -> Source:
    """Find the images of class folders, with or without split folders."""
    left_out = LeftOut()
    folders, images = class_folders.list_splits(root, left_out)
    used = used_splits(images)
    splits = {
        key: [(c, os.path.join(folders[split], c, path)) for c, ps in images[split].items() for path in ps]
        for key, split in used.items()
    }
    unused = _left_out({split: f"{name}/" for split, name in folders.items()}, used)
    if folders["train"] and (other_folders := class_folders.beside_splits(root)):
        names = some_of([f"{name}/" for name in other_folders], 3)
        unused.append(f"{names} ({folders['train']}/ is a split)")
    text = ", ".join(filter(None, (str(left_out), *unused)))
    classes = sorted(images["train"])
    source = _file_source(root.name, root, classes, splits, used, text)
    if len(classes) > 1 or folders["train"]:
        return source
    (name,) = classes
    paths = images["train"][name]
    return replace(source, why_not_trained_on=class_folders.why_not_trained_on(root, name, paths))


def _find_metadata(root: Path, files: dict[str, Path], columns: Columns) -> Source:
    """Find the images that the list in each split folder names."""
    from onecurve.data.lists import read_list

    rows = [
        row._replace(file=os.path.join(path.parent.name, row.file))
        for split, path in files.items()
        for row in read_list(path, columns, split)
    ]
    source, listed = _list_source(root.name, root, root, rows), {row.split for row in rows}
    folders = class_folders.split_folders(root)
    unlabeled = [f"{folder}/ without labels" for split, folder in folders.items() if split not in listed]
    return replace(source, left_out=", ".join(filter(None, (source.left_out, *unlabeled))))


def _list_source(name: str, root: Path, data: Path, rows: "list[Listed]") -> Source:
    """Return the source of listed image files.

    Args:
        name: Name of the data.
        root: Folder that relative paths in the rows are relative to.
        data: Path of the data for messages.
        rows: Rows of all lists.
    """
    listed = {row.split for row in rows}
    used = used_splits(listed)
    if "train" not in listed:
        raise ValueError(f"--data {data}: none of the {len(rows):,} rows belongs to the split train")
    splits = {
        key: [(row.label, row.file) for row in rows if row.split == split] for key, split in used.items()
    }
    train = {label for label, _ in splits["train"]}
    for key, split in used.items():
        check_known(f"--data {data}", split, {label for label, _ in splits[key]}, train)
    text = ", ".join(_left_out({split: split for split in ("train", *VAL_NAMES) if split in listed}, used))
    classes = sorted(train, key=int if all(map(str.isdecimal, train)) else str)
    source = _file_source(name, root, classes, splits, used, text)
    return replace(source, hashes=(repr(splits),), is_table=True)


def _file_source(
    name: str,
    root: Path,
    classes: list[str],
    splits: dict[str, list[tuple[str, str]]],
    used: dict[str, str],
    left_out: str,
) -> Source:
    """Return the source of image files.

    Args:
        name: Name of the data.
        root: Folder that the image paths are relative to.
        classes: Class names in label order.
        splits: Pairs of class and path, one per image, for each split.
        used: Result of `used_splits`.
        left_out: Files that were not read, with the reasons.
    """

    def write(folder: Path, beat: Heartbeat) -> tuple[str, ...]:
        label_of = {name: label for label, name in enumerate(classes)}
        for split, images in splits.items():
            save_images(folder, split, (os.fsencode(path) for _, path in images), root)
            save_names(folder, split, (path for _, path in images))
            save_labels(folder, split, [label_of[name] for name, _ in images])
            beat()
        return tuple(classes)

    files = tuple((path, root / path) for images in splits.values() for _, path in images)
    val_name = VAL_NAMES.get(used.get("val", ""))
    return Source(name, files, write, val_name, used.get("test"), root=root, left_out=left_out)
