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
    is_named_after,
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

BUILT_IN_DATA = ("digits", "cifar10", "synthetic")  # data sets that --data selects by name
VAL_PER_DIGIT = 36  # number of held-out images of each digit
LISTING_WAIT_S = 1.0  # maximum seconds to wait for the file listing before torch is imported
# File listings that check_inputs() has started, by the value of `--data` and the columns
_listing_futures: "dict[tuple[str, Columns], Future[Source]]" = {}


@dataclass(frozen=True)
class Source:
    """Source of the data that `--data` specifies.

    Attributes:
        name: Name of the data set.
        named_files: Sorted pairs of a name, which is part of the cache key, and a file path. The tuple is
            empty for generated data.
        write: Function that accepts a cache folder and a heartbeat, stores each split in the folder, and
            returns the class names. A split consists of labels (`<split>_labels.npy`, int64 [N]), images
            (decoded in `<split>_images.npy`, or encoded by `save_images`), and optional names (`save_names`).
        val_name: Name of the split that selects the best checkpoint, or None if there is no such split.
        test_name: Name of the split that is evaluated once, at the end, or None if there is no such split.
        holdout: Share or number of training images to hold out, or a fold, or None to hold out no images.
        mirror: Whether images keep their class when mirrored.
        root: Base folder of the relative image paths, or None if images are not stored as paths.
        manifest_location: Location of the shards' manifest (a folder or s3://bucket/prefix), or None for
            other data.
        fold_key: Part of the cache key that distinguishes folds, because the data set's name is the same for
            all folds.
        hashes: Hashes of content not covered by `named_files`.
        is_table: Whether the data has columns that can be chosen with flags.
        ignored_files_note: Description of the ignored files, including the reasons.
        training_problem: Reason why the data can only be evaluated, or "".
    """

    name: str
    named_files: tuple[tuple[str, Path], ...]
    write: Callable[[Path, Heartbeat], tuple[str, ...]]
    val_name: str | None = "val"
    test_name: str | None = None
    holdout: float | str | None = None
    mirror: bool = True
    root: Path | None = None
    manifest_location: str | None = None
    fold_key: str = ""
    hashes: tuple[str, ...] = ()
    is_table: bool = False
    ignored_files_note: str = ""
    training_problem: str = ""


def find_source(recipe: ImageRecipe, beat: Heartbeat, is_evaluation_only: bool = False) -> Source:
    """Find the data that `--data` specifies, and list its files.

    Args:
        recipe: Recipe that contains the data flags.
        beat: Heartbeat function, called about once per second.
        is_evaluation_only: Whether the data is used only for evaluation, so that a single split is enough.

    Raises:
        ValueError: If the data can't be used. The error is raised before large files are read.
    """
    columns = Columns(recipe.image_column, recipe.label_column)
    source = _locate_source(recipe.data, beat, columns)
    if source.training_problem and not is_evaluation_only:
        raise ValueError(source.training_problem)
    if any(columns) and not source.is_table:
        raise ValueError(
            "--image_column and --label_column apply only to tables and lists."
            f" Remove these flags, because --data {recipe.data} is neither a table nor a list"
        )
    if recipe.holdout is not None:
        return _with_holdout(source, recipe.data, recipe.holdout)
    if source.val_name is None and not is_evaluation_only:
        raise ValueError(
            f"--data {recipe.data} contains no evaluation split (val, validation, valid or test)."
            " Add an evaluation split, or hold out a tenth of the training images with --holdout 0.1"
        )
    return source


def _with_holdout(source: Source, data_flag: str, holdout: float | str) -> Source:
    """Return the source with held-out images as its val split, and its former val split as its test split.

    Args:
        source: Source without held-out images.
        data_flag: Value of `--data` shown in error messages.
        holdout: Share or number of training images to hold out, or a fold.
    """
    is_holdout_fold = isinstance(holdout, str)
    holdout_text = holdout if is_holdout_fold else f"{holdout:.12g}"
    if source.test_name:
        raise ValueError(
            f"--holdout {holdout_text} is not needed, because --data {data_flag} contains"
            f" a {source.val_name} split to select the best checkpoint"
            f" and a {source.test_name} split for the final evaluation. Remove --holdout"
        )
    source = replace(source, holdout=holdout, val_name="holdout", test_name=source.val_name)
    if is_holdout_fold:  # a fold is not part of the content key, which is the same for all folds
        return replace(source, fold_key=f" fold {holdout_text}")
    return replace(source, hashes=(*source.hashes, f"holdout {holdout_text}"))


def _locate_source(data_flag: str, beat: Heartbeat, columns: Columns) -> Source:
    """Return the source for a value of `--data`. A data set on the Hub is downloaded.

    If check_inputs() has already started to list the same files, this function waits for that listing.
    """
    if data_flag == "digits":
        return Source(data_flag, (), _write_digits, mirror=False)  # because a mirrored 2 is not a 2
    if data_flag == "synthetic":
        return Source(data_flag, (), _write_synthetic)
    if data_flag == "cifar10" or data_flag.startswith("hub:"):
        return _hub_source(data_flag, load_from_hub(data_flag, beat), columns)
    listing_future = _listing_futures.pop((data_flag, columns), None)
    find_data_files = listing_future.result if listing_future else partial(_find_files, data_flag, columns)
    return run_with_heartbeat(find_data_files, beat)


def check_inputs(recipe: ImageRecipe) -> int:
    """Check the data and weights before torch is imported, for at most LISTING_WAIT_S seconds.

    A background thread lists the data's files, and the next find_source() call uses this listing.

    Returns:
        Exit status 0 for run_command(), which reports errors.

    Raises:
        ValueError: If the weights do not exist, or if the finished listing shows that the data can't be used.
    """
    if recipe.weights and not Path(recipe.weights).expanduser().exists():
        raise ValueError(f"--weights {recipe.weights} does not exist")
    columns = Columns(recipe.image_column, recipe.label_column)
    if recipe.data not in BUILT_IN_DATA and not recipe.data.startswith(("hub:", "s3:")):
        listing_future = start_daemon(partial(_find_files, recipe.data, columns))
        _listing_futures[recipe.data, columns] = listing_future
        if wait([listing_future], LISTING_WAIT_S).done:
            with suppress(OSError):  # the next find_source() call will report this error
                find_source(recipe, lambda: None)  # removes the future from _listing_futures
            _listing_futures[recipe.data, columns] = listing_future  # for the next find_source() call
    return 0


@retried
def _find_files(data_flag: str, columns: Columns) -> Source:
    """Return the source for a path or S3 URL, according to the first data format that matches.

    A folder may contain prepared or indexed shards, data saved by `datasets`, parquet files, image lists or
    class folders. The formats are tried in this order. No images are read.
    """
    from onecurve.data import shards

    if data_flag.startswith("s3://"):
        return _find_stored_shards(data_flag)
    # Symbolic links are not resolved, so that the data has the same name on hosts where links point to
    # different paths.
    data_path = Path(os.path.abspath(os.path.expanduser(data_flag)))
    if data_path.is_file() and data_path.suffix.lower() in class_folders.TABLE_EXTENSIONS:
        return _lone_table_source(data_path, columns)
    if not data_path.is_dir():
        path_problem = "is not a folder, list or parquet file" if data_path.exists() else "does not exist"
        path_advice = f". Pass a folder, list or parquet file, or choose one of {', '.join(BUILT_IN_DATA)}"
        if data_flag_suggestion := did_you_mean(data_flag, BUILT_IN_DATA):
            path_advice = f": {data_flag_suggestion}"
        raise ValueError(f"--data {data_flag} {path_problem}{path_advice}")
    if manifest := shards.find_local_manifest(data_path):
        return _shard_source(manifest, str(data_path), lambda file_name: read_regular(data_path / file_name))
    if (files_by_split := saved_files(data_path)) is not None:
        return _table_files_source(data_path, files_by_split, "{split}/{file}", columns)
    if files_by_split := parquet_files(data_path):
        has_flat_layout = is_named_after(files_by_split["train"][0], "train")
        file_name_format = "{file}" if has_flat_layout else "{folder}/{file}"
        return _table_files_source(data_path, files_by_split, file_name_format, columns)
    if list_by_split := class_folders.metadata_files(data_path):
        return _find_listed_images(data_path, list_by_split, columns)
    if table_path := class_folders.find_lone_table(data_path):
        return _lone_table_source(table_path, columns)
    return find_class_folders(data_path)


# Generated data


def _write_digits(cache_folder: Path, beat: Heartbeat) -> tuple[str, ...]:
    """Write scikit-learn's 1,797 digits (8x8, 0 to 16) as 32x32 uint8 images, and return the class names.

    The val split consists of 36 held-out images per class. These images are the same on every machine,
    because NumPy guarantees that the random stream of RandomState never changes (NEP 19).
    """

    def load_digit_images() -> tuple[np.ndarray, np.ndarray]:
        from PIL import Image
        from sklearn.datasets import load_digits

        digit_data = load_digits()
        small_images = np.round(digit_data.images * (255 / 16)).astype(np.uint8)  # 16 becomes white
        large_images = [
            np.asarray(Image.fromarray(pixels).resize((32, 32), Image.Resampling.BILINEAR))
            for pixels in small_images
        ]
        return np.repeat(np.stack(large_images)[..., None], 3, axis=3), digit_data.target

    digit_images, labels = run_with_heartbeat(load_digit_images, beat)
    shuffled_ids = np.random.RandomState(0).permutation(len(labels))
    val_ids_per_digit = [shuffled_ids[labels[shuffled_ids] == digit][:VAL_PER_DIGIT] for digit in range(10)]
    val_ids = np.sort(np.concatenate(val_ids_per_digit))
    train_ids = np.setdiff1d(np.arange(len(labels)), val_ids)
    for split, split_ids in zip(SPLITS, (train_ids, val_ids), strict=True):
        np.save(cache_folder / f"{split}_images.npy", digit_images[split_ids])
        save_labels(cache_folder, split, labels[split_ids])
    return tuple("0123456789")


def _write_synthetic(cache_folder: Path, beat: Heartbeat) -> tuple[str, ...]:
    """Write synthetic training and val images to a cache folder, and return the class names.

    Each of the 4,096 training and 1,024 val images consists of noise and its class's 4x4 colour pattern,
    enlarged to 32x32 pixels.
    """
    random_generator = np.random.RandomState(0)
    class_patterns = random_generator.randint(64, 192, (10, 4, 4, 3)).repeat(8, axis=1).repeat(8, axis=2)
    for split, image_count in zip(SPLITS, (4096, 1024), strict=True):
        labels = random_generator.permutation(image_count) % 10
        pixel_noise = random_generator.normal(0, 64, (image_count, 32, 32, 3))
        images = np.clip(np.rint(class_patterns[labels] + pixel_noise), 0, 255).astype(np.uint8)
        np.save(cache_folder / f"{split}_images.npy", images)
        save_labels(cache_folder, split, labels)
        beat()
    return tuple(f"pattern {label}" for label in range(10))


# Shards


def _find_stored_shards(shards_url: str) -> Source:
    """Return the source for prepared or indexed shards in S3. Only the manifest is read now.

    Args:
        shards_url: S3 prefix that contains the manifest, s3://bucket/prefix.
    """
    from onecurve.data import shards
    from onecurve.system.s3 import ObjectStore

    shard_store = ObjectStore(shards_url)
    manifest, manifest_bytes = shards.find_stored_manifest(shard_store)

    def read_file(file_name: str) -> bytes:
        if file_name == shards.MANIFEST:
            return manifest_bytes
        file_content = shard_store.read(file_name, shards.INDEX_LIMIT_BYTES)
        if file_content is None:
            raise ValueError(f"{shard_store.url}/{file_name} is missing. Prepare the data again")
        return file_content

    return _shard_source(manifest, shard_store.url, read_file)


def _shard_source(manifest: "ShardManifest", location: str, read_file: Callable[[str], bytes]) -> Source:
    """Return the source for prepared or indexed shards.

    Args:
        manifest: Manifest of the shards.
        location: Folder that contains the manifest, or s3://bucket/prefix.
        read_file: Function that returns the content of a file next to the manifest, by file name.
    """
    from onecurve.data import shards

    def write(cache_folder: Path, beat: Heartbeat) -> tuple[str, ...]:
        # Only the manifest, indices and labels are copied. The images stay in the shards.
        (cache_folder / shards.MANIFEST).write_bytes(read_file(shards.MANIFEST))
        for split in manifest.splits:
            index_file_name = shards.index_file_name(split)
            index_bytes = run_with_heartbeat(partial(read_file, index_file_name), beat)
            index_location = f"{location}/{index_file_name}"
            index_rows = shards.parse_shard_index(index_bytes, manifest, split, index_location)
            (cache_folder / index_file_name).write_bytes(index_bytes)
            save_labels(cache_folder, split, index_rows[:, shards.LABEL_COLUMN])
            beat()
        return manifest.classes

    val_name = "val" if "val" in manifest.splits else None
    return Source(manifest.name, (), write, val_name, manifest_location=location, hashes=(manifest.sha256,))


# Tables


def _lone_table_source(table_path: Path, columns: Columns) -> Source:
    """Return the source for an image list, or for a parquet file whose rows are all training images."""
    if table_path.suffix.lower() in class_folders.LIST_EXTENSIONS:
        from onecurve.data.lists import read_list

        listed_images = read_list(table_path, columns)
        return _list_source(table_path.stem, table_path.parent, table_path, listed_images)
    return _table_files_source(table_path, {"train": [table_path]}, "{file}", columns)


def _table_files_source(
    root: Path, files_by_split: dict[str, list[Path]], file_name_format: str, columns: Columns
) -> Source:
    """Return the source for local parquet files or Arrow streams.

    Args:
        root: Data folder, or the only table file.
        files_by_split: Table files of each split, by split name.
        file_name_format: Format string for a file's name in the cache key, as in `_table_source`.
        columns: Columns that the flags specify.
    """
    tables_by_split = {
        split: [Table(str(table_path), table_path) for table_path in table_paths]
        for split, table_paths in files_by_split.items()
    }
    return _table_source(str(root), root.name, tables_by_split, files_by_split, file_name_format, columns)


def _hub_source(data_flag: str, data_set_by_split: dict[str, Any], columns: Columns) -> Source:
    """Return the source for data sets from `load_from_hub`, whose files are in the cache of `datasets`."""
    data_name = data_flag.removeprefix("hub:")
    tables_by_split, files_by_split = {}, {}
    for split, data_set in data_set_by_split.items():
        tables_by_split[split] = [Table(f"{data_name}'s {split} split", data_set.data.table)]
        files_by_split[split] = [Path(cache_file["filename"]) for cache_file in data_set.cache_files]
    return _table_source(data_flag, data_name, tables_by_split, files_by_split, "{split} {index}", columns)


def _table_source(
    data_flag: str,
    data_name: str,
    tables_by_split: dict[str, list[Table]],
    files_by_split: dict[str, list[Path]],
    file_name_format: str,
    columns: Columns,
) -> Source:
    """Return the source for tables.

    Args:
        data_flag: Value of `--data` shown in error messages.
        data_name: Name of the data set.
        tables_by_split: Tables of each split, by split name.
        files_by_split: Table files of each split, by split name.
        file_name_format: Format string for a file's name in the cache key. The name must not change if the
            data is moved.
        columns: Columns that the flags specify.
    """
    if "train" not in tables_by_split:
        available_splits = some_of(list(tables_by_split)) or "none"
        raise ValueError(f"--data {data_flag} contains no train split. Available splits: {available_splits}")
    split_by_role = used_splits(tables_by_split)
    tables_by_role = {role: tables_by_split[split] for role, split in split_by_role.items()}
    named_files = []
    for role, split in split_by_role.items():
        for file_index, table_path in enumerate(files_by_split[split]):
            file_name = file_name_format.format(
                split=role, index=file_index, file=table_path.name, folder=table_path.parent.name
            )
            named_files.append((file_name, table_path))
    display_names = {split: split for split in tables_by_split}
    return Source(
        data_name,
        tuple(named_files),
        lambda cache_folder, beat: write_tables(tables_by_role, columns, cache_folder, beat),
        VAL_NAMES.get(split_by_role.get("val", "")),
        split_by_role.get("test"),
        hashes=(f"columns {list(columns)}",) if any(columns) else (),  # different columns are different data
        is_table=True,
        ignored_files_note=", ".join(_unused_split_notes(display_names, split_by_role)),
    )


def _unused_split_notes(display_names: dict[str, str], split_by_role: dict[str, str]) -> list[str]:
    """Return a note for each split that is not read, for example "valid/ (val/ is used instead)".

    Args:
        display_names: Displayed name of each split, by split name.
        split_by_role: Splits that are read, from `used_splits`.
    """
    reason = f" ({display_names[split_by_role['val']]} is used instead)" if "val" in split_by_role else ""
    read_splits = split_by_role.values()
    return [split_name + reason for split, split_name in display_names.items() if split not in read_splits]


# Image files


def find_class_folders(root: Path) -> Source:
    """Return the source for class folders, with or without split folders. Only listings are read."""
    ignored_files = IgnoredFiles()
    folder_by_split, classes_by_split = class_folders.list_splits(root, ignored_files)
    split_by_role = used_splits(classes_by_split)
    images_by_role = {
        role: [
            (class_name, os.path.join(folder_by_split[split], class_name, image_path))
            for class_name, image_paths in classes_by_split[split].items()
            for image_path in image_paths
        ]
        for role, split in split_by_role.items()
    }
    display_names = {split: f"{folder}/" for split, folder in folder_by_split.items()}
    ignored_folder_notes = _unused_split_notes(display_names, split_by_role)
    if folder_by_split["train"] and (other_folders := class_folders.folders_beside_splits(root)):
        other_folder_list = some_of([f"{folder}/" for folder in other_folders], 3)
        ignored_folder_notes.append(f"{other_folder_list} ({folder_by_split['train']}/ is a split)")
    ignored_files_note = ", ".join(filter(None, (str(ignored_files), *ignored_folder_notes)))
    train_classes = sorted(classes_by_split["train"])
    source = _file_source(root.name, root, train_classes, images_by_role, split_by_role, ignored_files_note)
    if len(train_classes) > 1 or folder_by_split["train"]:
        return source
    # A single class can be evaluated, but not trained.
    (only_class,) = train_classes
    image_paths = classes_by_split["train"][only_class]
    return replace(source, training_problem=class_folders.training_problem(root, only_class, image_paths))


def _find_listed_images(data_folder: Path, list_by_split: dict[str, Path], columns: Columns) -> Source:
    """Return the source for image lists in split folders, such as train/metadata.csv.

    Args:
        data_folder: Folder that contains the split folders.
        list_by_split: Image list of each split, by split name.
        columns: Columns that the flags specify.
    """
    from onecurve.data.lists import read_list

    # Paths in a list are relative to the split folder. The source needs paths relative to the data folder.
    listed_images = [
        listed_image._replace(file=os.path.join(list_path.parent.name, listed_image.file))
        for split, list_path in list_by_split.items()
        for listed_image in read_list(list_path, columns, split)
    ]
    source = _list_source(data_folder.name, data_folder, data_folder, listed_images)
    listed_splits = {listed_image.split for listed_image in listed_images}
    folder_by_split = class_folders.split_folders(data_folder)
    unlabeled_folders = [folder for split, folder in folder_by_split.items() if split not in listed_splits]
    unlabeled_notes = [f"{folder}/ without labels" for folder in unlabeled_folders]
    ignored_notes = filter(None, (source.ignored_files_note, *unlabeled_notes))
    return replace(source, ignored_files_note=", ".join(ignored_notes))


def _list_source(data_name: str, root: Path, data_path: Path, listed_images: "list[ListedImage]") -> Source:
    """Return the source for listed image files.

    Args:
        data_name: Name of the data set.
        root: Base folder of the images' relative paths.
        data_path: Data path shown in error messages.
        listed_images: Rows of all image lists.
    """
    listed_splits = {image.split for image in listed_images}
    if "train" not in listed_splits:
        list_problem = f"none of the {len(listed_images):,} rows belongs to the train split"
        raise ValueError(f"--data {data_path}: {list_problem}")
    split_by_role = used_splits(listed_splits)
    images_by_role = {
        role: [(image.label, image.file) for image in listed_images if image.split == split]
        for role, split in split_by_role.items()
    }
    train_classes = {class_name for class_name, _path in images_by_role["train"]}
    for role, split in split_by_role.items():
        split_classes = {class_name for class_name, _path in images_by_role[role]}
        refuse_unknown_classes(f"--data {data_path}", split, split_classes, train_classes)
    display_names = {split: split for split in ("train", *VAL_NAMES) if split in listed_splits}
    ignored_files_note = ", ".join(_unused_split_notes(display_names, split_by_role))
    has_numeric_classes = all(map(str.isdecimal, train_classes))  # sorted by value: class 10 follows class 9
    class_names = sorted(train_classes, key=int if has_numeric_classes else str)
    source = _file_source(data_name, root, class_names, images_by_role, split_by_role, ignored_files_note)
    # The cache key includes the labels, because the same files may have different labels in another list.
    return replace(source, hashes=(repr(images_by_role),), is_table=True)


def _file_source(
    data_name: str,
    root: Path,
    class_names: list[str],
    images_by_role: dict[str, list[tuple[str, str]]],
    split_by_role: dict[str, str],
    ignored_files_note: str,
) -> Source:
    """Return the source for image files. Its `write` stores the paths, names and labels, but no pixels.

    Args:
        data_name: Name of the data set.
        root: Base folder of the image paths.
        class_names: Class names in label order.
        images_by_role: Class name and path of each image, by role ("train", "val" or "test").
        split_by_role: Splits that are read, from `used_splits`.
        ignored_files_note: Description of the ignored files, including the reasons.
    """

    def write(cache_folder: Path, beat: Heartbeat) -> tuple[str, ...]:
        label_by_class = {class_name: label for label, class_name in enumerate(class_names)}
        for role, images in images_by_role.items():
            save_images(
                cache_folder, role, (os.fsencode(image_path) for _class_name, image_path in images), root
            )
            save_names(cache_folder, role, (image_path for _class_name, image_path in images))
            save_labels(cache_folder, role, [label_by_class[class_name] for class_name, _path in images])
            beat()
        return tuple(class_names)

    named_files = tuple(
        (image_path, root / image_path) for images in images_by_role.values() for _, image_path in images
    )
    val_name = VAL_NAMES.get(split_by_role.get("val", ""))
    test_name = split_by_role.get("test")
    return Source(
        data_name, named_files, write, val_name, test_name, root=root, ignored_files_note=ignored_files_note
    )
