"""Data sources for `--data`, with functions that find source files and read them into a cache folder.

`find_source` only lists the files, and `Source.write` reads them. `onecurve/data/cache.py` then decodes and
caches the images.
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
from onecurve.data.class_folders import VAL_NAMES, IgnoredFiles, refuse_unknown_classes, used_splits
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
    from onecurve.data.lists import ListedImage
    from onecurve.data.shards import ShardManifest

BUILT_IN_DATA = ("digits", "cifar10", "synthetic")
LISTING_WAIT_S = 1.0  # maximum seconds to wait for the file listing before torch is imported
_listings: "dict[tuple[str, Columns], Future[Source]]" = {}  # file listings that check_inputs() has started


@dataclass(frozen=True)
class Source:
    """Source of the data that `--data` specifies.

    Attributes:
        name: Name of the data set.
        files: Sorted pairs of a name, which is part of the cache key, and a file path. The tuple is empty for
            generated data.
        write: Function that accepts a cache folder and a heartbeat, stores each split in the folder, and
            returns the class names. A split consists of labels (`<split>_labels.npy`, int64 [N]), images
            (decoded in `<split>_images.npy`, or encoded by `save_images`), and optional names (`save_names`).
        val_name: Name of the split that selects the best checkpoint, or None if there is no such split.
        test_name: Name of the split that is evaluated once, at the end, or None if there is no such split.
        holdout: Share or number of training images to hold out, or a fold, or None to hold out no images.
        mirror: Whether images keep their class when mirrored.
        root: Base folder of the relative image paths, or None if images are not stored as paths.
        shards: Location of the shards' manifest (a folder or s3://bucket/prefix), or None for other data.
        fold: Part of the cache key that distinguishes folds, because the data set's name is the same for all
            folds.
        hashes: Hashes of content not covered by `files`.
        is_table: Whether the data has columns that can be chosen with flags.
        left_out: Description of the ignored files, including the reasons.
        training_problem: Reason why the data can only be evaluated, or "".
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
    training_problem: str = ""


def find_source(recipe: ImageRecipe, beat: Heartbeat, is_evaluated: bool = False) -> Source:
    """Find the data that `--data` specifies, and list its files.

    Args:
        recipe: Recipe that contains the data flags.
        beat: Heartbeat function, called about once per second.
        is_evaluated: Whether the data is used only for evaluation, so that a single split is sufficient.

    Raises:
        ValueError: If the data can't be used. The error is raised before large files are read.
    """
    data, holdout, columns = recipe.data, recipe.holdout, Columns(recipe.image_column, recipe.label_column)
    source = _locate_source(data, beat, columns)
    if source.training_problem and not is_evaluated:
        raise ValueError(source.training_problem)
    if any(columns) and not source.is_table:
        raise ValueError(
            "--image_column and --label_column apply only to tables and lists. Remove these flags, because"
            f" --data {data} is neither a table nor a list"
        )
    if holdout is not None:
        holdout_text = holdout if isinstance(holdout, str) else f"{holdout:.12g}"
        if source.test_name:
            raise ValueError(
                f"--holdout {holdout_text} is not needed, because --data {data} contains a {source.val_name}"
                f" split to select the best checkpoint and a {source.test_name} split for the final"
                " evaluation. Remove --holdout"
            )
        source = replace(source, holdout=holdout, val_name="holdout", test_name=source.val_name)
        if holdout_text == holdout:
            return replace(source, fold=f" fold {holdout_text}")
        return replace(source, hashes=(*source.hashes, f"holdout {holdout_text}"))
    if source.val_name is None and not is_evaluated:
        raise ValueError(
            f"--data {data} contains no evaluation split (val, validation, valid or test). Add an evaluation"
            " split, or hold out a tenth of the training images with --holdout 0.1"
        )
    return source


def _locate_source(data: str, beat: Heartbeat, columns: Columns) -> Source:
    if data == "digits":
        return Source(data, (), _write_digits, mirror=False)  # because a mirrored 2 is not a 2
    if data == "synthetic":
        return Source(data, (), _write_synthetic)
    if data == "cifar10" or data.startswith("hub:"):
        return _hub_source(data, load_from_hub(data, beat), columns)
    listing = _listings.pop((data, columns), None)
    return run_with_heartbeat(listing.result if listing else partial(_find_files, data, columns), beat)


def check_inputs(recipe: ImageRecipe) -> int:
    """Check the data and weights before torch is imported, for at most LISTING_WAIT_S seconds.

    A background thread lists the data's files, and the next find_source() call uses this listing.

    Returns:
        Always 0.

    Raises:
        ValueError: If the weights do not exist, or if the finished listing shows that the data can't be used.
    """
    if recipe.weights and not Path(recipe.weights).expanduser().exists():
        raise ValueError(f"--weights {recipe.weights} does not exist")
    data, columns = recipe.data, Columns(recipe.image_column, recipe.label_column)
    if data not in BUILT_IN_DATA and not data.startswith(("hub:", "s3:")):
        _listings[data, columns] = listing = start_daemon(partial(_find_files, data, columns))
        if wait([listing], LISTING_WAIT_S).done:
            with suppress(OSError):  # the next find_source() call will report this error
                find_source(recipe, lambda: None)
            _listings[data, columns] = listing
    return 0


@retried
def _find_files(data: str, columns: Columns) -> Source:
    from onecurve.data import shards

    if data.startswith("s3://"):
        return _find_stored_shards(data)
    # Symbolic links are not resolved, so that the data has the same name on hosts where links point to
    # different paths.
    root = Path(os.path.abspath(os.path.expanduser(data)))
    if root.is_file() and root.suffix.lower() in class_folders.TABLE_EXTENSIONS:
        return _lone_table_source(root, columns)
    if not root.is_dir():
        problem = "is not a folder, list or parquet file" if root.exists() else "does not exist"
        advice = f". Pass a folder, list or parquet file, or choose one of {', '.join(BUILT_IN_DATA)}"
        if suggestion := did_you_mean(data, BUILT_IN_DATA):
            advice = f": {suggestion}"
        raise ValueError(f"--data {data} {problem}{advice}")
    if manifest := shards.find_local(root):
        return _shard_source(manifest, str(root), lambda name: read_regular(root / name))
    if (files := saved_files(root)) is not None:
        return _table_files_source(root, files, "{split}/{file}", columns)
    if files := parquet_files(root):
        is_flat = is_named(files["train"][0], "train")
        return _table_files_source(root, files, "{file}" if is_flat else "{folder}/{file}", columns)
    if lists := class_folders.metadata_files(root):
        return _find_metadata(root, lists, columns)
    if table := class_folders.find_lone_table(root):
        return _lone_table_source(table, columns)
    return find_class_folders(root)


# Generated data


def _write_digits(folder: Path, beat: Heartbeat) -> tuple[str, ...]:
    """Write scikit-learn's 1,797 digits (8x8, 0 to 16) as 32x32 uint8 images. Hold out 36 images per class.

    The held-out images are the same on every machine, because NumPy guarantees that the random stream of
    RandomState never changes (NEP 19).
    """

    def load():
        from PIL import Image
        from sklearn.datasets import load_digits

        digits = load_digits()
        small_images = np.round(digits.images * (255 / 16)).astype(np.uint8)
        large_images = [
            np.asarray(Image.fromarray(pixels).resize((32, 32), Image.Resampling.BILINEAR))
            for pixels in small_images
        ]
        return np.repeat(np.stack(large_images)[..., None], 3, axis=3), digits.target

    images, labels = run_with_heartbeat(load, beat)
    shuffled = np.random.RandomState(0).permutation(len(labels))
    val = np.sort(np.concatenate([shuffled[labels[shuffled] == digit][:36] for digit in range(10)]))
    train = np.setdiff1d(np.arange(len(labels)), val)
    for split, ids in zip(SPLITS, (train, val), strict=True):
        np.save(folder / f"{split}_images.npy", images[ids])
        save_labels(folder, split, labels[ids])
    return tuple("0123456789")


def _write_synthetic(folder: Path, beat: Heartbeat) -> tuple[str, ...]:
    """Write 4,096 training and 1,024 val images, each 32x32 with noise and its class's 4x4 colour pattern."""
    generator = np.random.RandomState(0)
    patterns = generator.randint(64, 192, (10, 4, 4, 3)).repeat(8, axis=1).repeat(8, axis=2)
    for split, count in zip(SPLITS, (4096, 1024), strict=True):
        labels = generator.permutation(count) % 10
        noise = generator.normal(0, 64, (count, 32, 32, 3))
        images = np.clip(np.rint(patterns[labels] + noise), 0, 255).astype(np.uint8)
        np.save(folder / f"{split}_images.npy", images)
        save_labels(folder, split, labels)
        beat()
    return tuple(f"pattern {label}" for label in range(10))


# Shards


def _find_stored_shards(data: str) -> Source:
    """Find prepared or indexed shards under an S3 prefix. Shards are downloaded when needed."""
    from onecurve.data import shards
    from onecurve.system.s3 import ObjectStore

    store = ObjectStore(data)
    manifest, content = shards.find_stored(store)

    def read(name: str) -> bytes:
        file_content = content if name == shards.MANIFEST else store.read(name, shards.INDEX_LIMIT)
        if file_content is None:
            raise ValueError(f"{store.url}/{name} is missing. Prepare the data again")
        return file_content

    return _shard_source(manifest, store.url, read)


def _shard_source(manifest: "ShardManifest", location: str, read: Callable[[str], bytes]) -> Source:
    """Return the source for prepared or indexed shards.

    Args:
        manifest: Manifest of the shards.
        location: Folder that contains the manifest, or s3://bucket/prefix.
        read: Function that returns the content of a file next to the manifest, by file name.
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
    if file.suffix.lower() in class_folders.LIST_EXTENSIONS:
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
    tables = {split: [Table(f"{name}'s {split} split", rows.data.table)] for split, rows in loaded.items()}
    files = {split: [Path(file["filename"]) for file in rows.cache_files] for split, rows in loaded.items()}
    return _table_source(data, name, tables, files, "{split} {k}", columns)


def _table_source(
    data: str,
    name: str,
    tables: dict[str, list[Table]],
    files: dict[str, list[Path]],
    name_format: str,
    columns: Columns,
) -> Source:
    """Return the source for tables.

    Args:
        data: Value of `--data` shown in error messages.
        name: Name of the data set.
        tables: Tables of each split, by split name.
        files: Table files of each split, by split name.
        name_format: Format string for a file's name in the cache key. The name must not change if the data is
            moved.
        columns: Columns that the flags specify.
    """
    if "train" not in tables:
        raise ValueError(
            f"--data {data} contains no train split. Available splits: {some_of(list(tables)) or 'none'}"
        )
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
        names: Displayed name of each split, by split name.
        used: Splits that are read, from `used_splits`.
    """
    reason = f" ({names[used['val']]} is used instead)" if "val" in used else ""
    return [name + reason for split, name in names.items() if split not in used.values()]


# Image files


def find_class_folders(root: Path) -> Source:
    """Find the images in class folders, with or without split folders."""
    left_out = IgnoredFiles()
    folders, images = class_folders.list_splits(root, left_out)
    used = used_splits(images)
    splits = {
        key: [
            (name, os.path.join(folders[split], name, path))
            for name, paths in images[split].items()
            for path in paths
        ]
        for key, split in used.items()
    }
    unused = _left_out({split: f"{name}/" for split, name in folders.items()}, used)
    if folders["train"] and (other_folders := class_folders.folders_beside_splits(root)):
        names = some_of([f"{name}/" for name in other_folders], 3)
        unused.append(f"{names} ({folders['train']}/ is a split)")
    ignored = ", ".join(filter(None, (str(left_out), *unused)))
    classes = sorted(images["train"])
    source = _file_source(root.name, root, classes, splits, used, ignored)
    if len(classes) > 1 or folders["train"]:
        return source
    (name,) = classes
    paths = images["train"][name]
    return replace(source, training_problem=class_folders.training_problem(root, name, paths))


def _find_metadata(root: Path, files: dict[str, Path], columns: Columns) -> Source:
    """Find the images listed in the split folders' image lists."""
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


def _list_source(name: str, root: Path, data: Path, rows: "list[ListedImage]") -> Source:
    """Return the source for listed image files.

    Args:
        name: Name of the data set.
        root: Base folder of the relative paths in the rows.
        data: Data path shown in error messages.
        rows: Rows of all image lists.
    """
    listed = {row.split for row in rows}
    used = used_splits(listed)
    if "train" not in listed:
        raise ValueError(f"--data {data}: none of the {len(rows):,} rows belongs to the train split")
    splits = {
        key: [(row.label, row.file) for row in rows if row.split == split] for key, split in used.items()
    }
    train = {label for label, _ in splits["train"]}
    for key, split in used.items():
        refuse_unknown_classes(f"--data {data}", split, {label for label, _ in splits[key]}, train)
    ignored = ", ".join(_left_out({split: split for split in ("train", *VAL_NAMES) if split in listed}, used))
    classes = sorted(train, key=int if all(map(str.isdecimal, train)) else str)
    source = _file_source(name, root, classes, splits, used, ignored)
    return replace(source, hashes=(repr(splits),), is_table=True)


def _file_source(
    name: str,
    root: Path,
    classes: list[str],
    splits: dict[str, list[tuple[str, str]]],
    used: dict[str, str],
    left_out: str,
) -> Source:
    """Return the source for image files.

    Args:
        name: Name of the data set.
        root: Base folder of the image paths.
        classes: Class names in label order.
        splits: Class name and path of each image, for each split.
        used: Splits that are read, from `used_splits`.
        left_out: Description of the ignored files, including the reasons.
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
