"""Listing of images in class folders that may be nested, linked, split, or mixed with other files.

This module does not use `datasets` or torchvision, because these libraries treat the innermost folder as the
class or follow cyclic links. They also take seconds to import at every start and don't report ignored files.
"""

import contextlib
import os
import re
import shlex
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NoReturn

from onecurve.data.decode import EXTENSIONS, HEIC_ADVICE, HEIC_EXTENSIONS
from onecurve.system.text import printable, some_of

# Folder names of evaluation splits, in order of preference, mapped to the reported split name
VAL_NAMES = {"val": "val", "validation": "val", "valid": "val", "test": "test"}
SPELLINGS = {"training": "train", "testing": "test"}  # alternative names of split folders, used on Kaggle
# Matches names of split folders, such as train_images
SPLIT_WORD = re.compile("(?<![a-z])(train|valid|validation|val|test)(?:ing)?(?![a-z])")
IGNORED_FOLDERS = ("__MACOSX", "@eaDir", "lost+found")  # from macOS zip files, network drives and ext4
DANGLING_LINKS = "dangling links"
SPECIAL_FILES = "special files"
OUTSIDE_CLASSES = "outside class folders"
LISTS = (".csv", ".tsv", ".jsonl")
TABLES = (*LISTS, ".parquet")
METADATA_FILES = ("metadata.csv", "metadata.jsonl")  # image lists in the Hugging Face Hub's format


class IgnoredFiles:
    """Counts of ignored files by reason, and names of empty class folders."""

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()
        self.first: dict[str, str] = {}  # first ignored path for each reason
        self.empty_folders: list[str] = []

    def add(self, reason: str, path: str) -> None:
        self.counts[reason] += 1
        self.first.setdefault(reason, path)

    def takes(self, path: str) -> bool:
        """Return True for an image path. Record any other path as ignored unless the file is hidden."""
        if is_hidden(os.path.basename(path)):
            return False
        extension = os.path.splitext(path)[1].lower()
        is_image = extension in EXTENSIONS
        if os.path.isfile(path):
            problem = "" if is_image else extension or "without an extension"
        elif os.path.islink(path):
            problem = DANGLING_LINKS if is_image else extension or DANGLING_LINKS
        else:
            problem = SPECIAL_FILES
        if problem:
            self.add(problem, path)
        return not problem

    def __str__(self) -> str:
        text = ", ".join(f"{count:,} {printable(reason)}" for reason, count in self.counts.most_common())
        text += f" ({HEIC_ADVICE})" if self.counts.keys() & {*HEIC_EXTENSIONS} else ""
        empty = f"{some_of(self.empty_folders)} without images" if self.empty_folders else ""
        return ", ".join(filter(None, (text, empty)))


def is_image(name: str) -> bool:
    return not is_hidden(name) and name.lower().endswith(EXTENSIONS)


def is_hidden(name: str) -> bool:
    return name.startswith(".") or name in IGNORED_FOLDERS


def folder_names(root: Path) -> list[str]:
    with os.scandir(root) as entries:
        return sorted(entry.name for entry in entries if not is_hidden(entry.name) and entry.is_dir())


def split_folders(root: Path) -> dict[str, str]:
    """Return the name of each split's folder in root, for example {"train": "Train"}."""
    folders, splits = folder_names(root), {}
    for split in ("train", *VAL_NAMES):
        if spellings := [name for name in folders if SPELLINGS.get(name.lower(), name.lower()) == split]:
            splits[split] = split if split in spellings else spellings[0]
    return splits


def list_splits(root: Path, left_out: IgnoredFiles) -> tuple[dict[str, str], dict[str, dict[str, list[str]]]]:
    """List the images in `train/<class>/`, `val/<class>/` (or validation/, valid/) and `test/<class>/`.

    If there are no split folders, the images in `<class>/` form the training split.

    A test/ folder without class folders is ignored, because its images have no labels. A test/ folder next to
    val/ is also ignored if test/ and train/ have no class in common. Class folders without images are
    ignored.

    Args:
        root: Folder that contains the data set.
        left_out: Record to which this function adds ignored files and folders.

    Returns:
        The name of each split's folder ("" if there are no split folders), and for each split and class the
        image paths relative to the class folder.

    Raises:
        ValueError: If the folders contain no images or can't be used for training.
    """
    folders = split_folders(root)
    if not folders or _is_class(root, folders):
        return {"train": ""}, {"train": _list_without_splits(root, left_out)}
    if "train" not in folders:
        folder = next(iter(folders.values()))
        raise ValueError(
            f"--data {root} contains {folder}/ but no train/. A folder named {folder} is treated as a split."
            f" Rename the folder if it is a class{_layout_advice(root)}"
        )
    splits = {split: list_classes(root / folders[split], left_out) for split in used_splits(folders).values()}
    known_names = splits["train"].keys() if len(splits) == 3 else splits.get("test", {}).keys()
    if "test" in splits and not splits["test"].keys() & known_names:
        for name, paths in splits.pop("test").items():
            for path in paths:
                left_out.add(OUTSIDE_CLASSES, str(root / folders["test"] / name / path))
        del folders["test"]
    for split, classes in splits.items():
        split_folder = root / folders[split]
        if not classes:
            raise ValueError(
                f"{split_folder} contains no class folders. A folder named {folders[split]} is treated as a"
                " split and needs a separate folder for each class. Rename the folder if it is a"
                f" class{_layout_advice(root)}"
            )
        splits[split] = drop_empty(folders[split], classes, left_out)
        if not splits[split]:
            extensions = " ".join(EXTENSIONS)
            raise ValueError(f"the class folders in {split_folder} contain no images ({extensions})")
        check_known(f"--data {root}", folders[split], splits[split], splits["train"])
    return folders, splits


def drop_empty(folder: str, classes: dict[str, list[str]], left_out: IgnoredFiles) -> dict[str, list[str]]:
    """Return the classes that contain images, and add the folders of empty classes to left_out."""
    left_out.empty_folders += [os.path.join(folder, name, "") for name, paths in classes.items() if not paths]
    return {name: paths for name, paths in classes.items() if paths}


def check_known(where: str, split: str, classes: Iterable[str], train: Iterable[str]) -> None:
    """Raise ValueError if a split contains classes that are missing from the training split.

    A class that occurs only in the training split is reported by a startup warning instead.

    Args:
        where: Name of the data set for the error message.
        split: Name of the split to check.
        classes: Class names in the split to check.
        train: Class names in the training split.
    """
    if unknown := sorted({*classes} - {*train}):
        raise ValueError(
            f"{where}: {printable(split)} contains classes that are not in train: {some_of(unknown)}. Rename"
            " or remove these classes, or add training images for them"
        )


def _is_class(root: Path, folders: dict[str, str]) -> bool:
    """Return True if the only folder that is named like a split is actually a class folder.

    The folder is a class folder if it and at least two other folders directly contain images. A single other
    folder is not enough, because a data set with training images in train/*.jpg may store test images in
    test1/.
    """
    if len(folders) != 1:
        return False
    names_with_images = {*_folders_with_images(root)}
    return {*folders.values()} < names_with_images and len(names_with_images) > 2


def _folders_with_images(root: Path) -> list[str]:
    """Return the folders that directly contain images, except unreadable folders such as lost+found."""
    names = []
    for name in folder_names(root):
        with contextlib.suppress(PermissionError):
            names += [name] if any(map(is_image, os.listdir(root / name))) else []
    return names


def folders_beside_splits(root: Path) -> list[str]:
    """Return the names of folders that contain images but are not split folders."""
    splits = split_folders(root).values()
    return [name for name in _folders_with_images(root) if name not in splits]


def used_splits(names: Iterable[str]) -> dict[str, str]:
    """Map the roles "train", "val" and "test" to the splits that are read.

    The "val" role uses the first available split in VAL_NAMES. The "test" role exists only if "val" uses a
    split other than "test".
    """
    val_split = next((name for name in VAL_NAMES if name in names), None)
    used_names = {"train": "train"} | ({"val": val_split} if val_split else {})
    return used_names | ({"test": "test"} if "test" in names and val_split != "test" else {})


def _list_without_splits(root: Path, left_out: IgnoredFiles) -> dict[str, list[str]]:
    """List the images in `<class>/` folders without splits, or raise ValueError if there are no images."""
    classes = drop_empty("", list_classes(root, left_out), left_out)
    if not classes:
        _refuse_without_classes(root)
    split_words = {match[1] if (match := SPLIT_WORD.search(name.lower())) else "" for name in classes}
    if "train" in split_words and "" not in split_words and len(classes) > 1:
        advice = _layout_advice(root) or (
            ". Rename the split folders to train/, val/ and test/, and create a folder for each class in each"
            " split folder"
        )
        raise ValueError(
            f"--data {root}: the folder names {some_of(sorted(classes))} refer to splits, not classes{advice}"
        )
    return classes


def training_problem(root: Path, name: str, paths: Sequence[str]) -> str:
    """Return an error message for data with only one class folder, which can't be used for training.

    Args:
        root: Folder that contains the data set.
        name: Name of the only class folder.
        paths: Image paths, relative to the class folder.
    """
    advice = f"If the class folders are in {printable(name)}, use --data {printable(root / name)}"
    if not any(os.sep in path for path in paths):
        advice = "A classifier needs at least two class folders"
    return (
        f"--data {root} contains images in only one folder, {printable(name)}. {advice}{_layout_advice(root)}"
    )


def _refuse_without_classes(root: Path) -> NoReturn:
    """Raise ValueError for a folder without class folders, with advice for the folder's layout."""
    if tables := sorted((*root.glob("*.parquet"), *root.glob("*/*.parquet"))):
        names = [table.relative_to(root) for table in tables]
        raise ValueError(
            f"--data {root} contains parquet files ({some_of(names, 3)}) but no train-*.parquet. Rename the"
            " training files to train-*.parquet and the evaluation files to val-*.parquet or test-*.parquet"
        )
    raise ValueError(
        f"--data {root} contains neither parquet files (train-*.parquet, test-*.parquet)"
        f" nor class folders (train/<class>/*.jpg, val/<class>/*.jpg){_layout_advice(root)}"
    )


def _layout_advice(root: Path) -> str:
    """Return advice about a folder's tar files, image lists or HEIC files, or "" if there are none."""
    if sorted((*root.glob("*.tar"), *root.glob("*/*.tar"))):
        quoted_root, quoted_index = map(shlex.quote, (str(root), f"{root}_index"))
        return printable(
            ". To use tar files in WebDataset format, run python prep_imagenet.py --from shards --format"
            f" index --data {quoted_root} --out {quoted_index}, and then use --data {quoted_index}"
        )
    if tables := [str(path) for path in tables_of(root) if path.suffix.lower() in LISTS]:
        return printable(f". To use a list of images, pass --data {' or '.join(tables)}")
    left_out = IgnoredFiles()
    list_images(root, left_out)
    return f". Left out: {left_out}" if left_out.counts.keys() & {*HEIC_EXTENSIONS} else ""


def metadata_files(root: Path) -> dict[str, Path]:
    """Return the path of each split folder's image list in the Hugging Face Hub's format.

    The result is empty if the training folder contains no list or more than one subfolder.
    """
    folders = {split: root / name for split, name in split_folders(root).items()}
    if "train" not in folders or len(folder_names(folders["train"])) > 1:
        return {}
    paths = [(split, folder / name) for split, folder in folders.items() for name in METADATA_FILES]
    lists = {split: path for split, path in paths if path.is_file()}
    return lists if "train" in lists else {}


def tables_of(root: Path) -> list[Path]:
    """Return a folder's table files, training tables first, excluding Kaggle's sample submissions."""

    def sort_key(path: Path) -> tuple[bool, str]:
        return not path.name.lower().startswith(("train", "label")), path.name

    tables = [path for path in root.iterdir() if path.suffix.lower() in TABLES and not is_hidden(path.name)]
    return sorted((path for path in tables if "submission" not in path.name.lower()), key=sort_key)


def lone_table(root: Path) -> Path | None:
    """Return the only table file in a folder, or None if the folder may contain class folders."""
    tables = tables_of(root)
    names = folder_names(root)
    are_flat = not any(folder_names(root / name) for name in names)
    may_be_classes = len(names) > len(split_folders(root)) and len(names) > 1
    return tables[0] if len(tables) == 1 and are_flat and not may_be_classes else None


def list_classes(root: Path, left_out: IgnoredFiles) -> dict[str, list[str]]:
    """List the images in each class folder below root, including nested and linked folders.

    Args:
        root: Folder that directly contains the class folders.
        left_out: Record to which this function adds non-image files, pipes, dangling links and images outside
            class folders.

    Returns:
        Sorted image paths of each class, relative to the class folder. The classes are sorted by name.

    Raises:
        ValueError: If a link points to one of its parent folders.
    """
    with os.scandir(root) as entries:
        loose_paths = [entry.path for entry in entries if not entry.is_dir()]
    for path in filter(left_out.takes, loose_paths):
        left_out.add(OUTSIDE_CLASSES, path)
    return {name: list_images(root / name, left_out) for name in folder_names(root)}


def list_images(folder: Path, left_out: IgnoredFiles) -> list[str]:
    """Return the sorted paths of all images in a folder and its subfolders, relative to that folder."""
    images: list[str] = []
    for parent, names, files in os.walk(folder, onerror=_raise_error, followlinks=True):
        names[:] = [name for name in names if not is_hidden(name)]  # os.walk skips the removed names
        for path in (Path(parent, name) for name in names):
            if links_above(path):
                raise ValueError(f"{path} is a link to one of its parent folders. Remove the link")
        images += filter(left_out.takes, (os.path.join(parent, name) for name in files))
    prefix = os.path.join(folder, "")
    return sorted(path.removeprefix(prefix) for path in images)


def links_above(path: Path) -> bool:
    """Return True if a path is a link to one of its parent folders."""
    return path.is_symlink() and path.resolve() in map(Path.resolve, path.absolute().parents)


def _raise_error(error: OSError) -> NoReturn:
    raise error
