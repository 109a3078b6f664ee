"""Listing of images in real-world folders, which may be nested, linked, split, or mixed with other files.

This module does not use `datasets` or torchvision. Those libraries treat the innermost folder as the class or
follow cyclic links, take seconds to import at each start, and don't report which files they ignore.
"""

import contextlib
import glob
import os
import re
import shlex
import sys
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NoReturn

from onecurve.data.decode import EXTENSIONS, HEIC, TO_READ_HEIC
from onecurve.system.output import log
from onecurve.system.text import printable, some_of

# Names of folders with images for evaluation, in order of preference, and the split name that is reported
VAL_NAMES = {"val": "val", "validation": "val", "valid": "val", "test": "test"}
SPELLINGS = {"training": "train", "testing": "test"}  # alternative names of split folders, seen on Kaggle
SPLIT_WORD = re.compile("(?<![a-z])(train|valid|validation|val|test)(?:ing)?(?![a-z])")  # e.g. train_images
IGNORED = ("__MACOSX", "@eaDir", "lost+found")  # folders that macOS zip, network drives and ext4 create
DANGLING = "dangling links"
SPECIAL = "special files"
LOOSE = "outside class folders"
LISTS = (".csv", ".tsv", ".jsonl")
TABLES = (*LISTS, ".parquet")
METADATA = ("metadata.csv", "metadata.jsonl")  # lists in the Hugging Face Hub's format


class LeftOut:
    """Ignored files, counted by reason, and empty class folders."""

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()
        self.first: dict[str, str] = {}  # first path for each reason
        self.empty_folders: list[str] = []

    def add(self, reason: str, path: str) -> None:
        self.counts[reason] += 1
        self.first.setdefault(reason, path)

    def takes(self, path: str) -> bool:
        """Return True if the path is an image. Otherwise, count the file as ignored unless it is hidden."""
        if is_hidden(os.path.basename(path)):
            return False
        extension = os.path.splitext(path)[1].lower()
        is_image = extension in EXTENSIONS
        if os.path.isfile(path):
            reason = "" if is_image else extension or "without an extension"
        elif os.path.islink(path):
            reason = DANGLING if is_image else extension or DANGLING
        else:
            reason = SPECIAL
        if reason:
            self.add(reason, path)
        return not reason

    def __str__(self) -> str:
        text = ", ".join(f"{count:,} {printable(reason)}" for reason, count in self.counts.most_common())
        text += f" ({TO_READ_HEIC})" if self.counts.keys() & {*HEIC} else ""
        empty = f"{some_of(self.empty_folders)} without images" if self.empty_folders else ""
        return ", ".join(filter(None, (text, empty)))


def is_image(name: str) -> bool:
    return not is_hidden(name) and name.lower().endswith(EXTENSIONS)


def is_hidden(name: str) -> bool:
    return name.startswith(".") or name in IGNORED


def folder_names(root: Path) -> list[str]:
    with os.scandir(root) as entries:
        return sorted(entry.name for entry in entries if not is_hidden(entry.name) and entry.is_dir())


def split_folders(root: Path) -> dict[str, str]:
    """Find the split folders in root. Return each split's folder name, for example {"train": "Train"}."""
    folders, splits = folder_names(root), {}
    for split in ("train", *VAL_NAMES):
        if spellings := [n for n in folders if SPELLINGS.get(n.lower(), n.lower()) == split]:
            splits[split] = split if split in spellings else spellings[0]
    return splits


def list_splits(root: Path, left_out: LeftOut) -> tuple[dict[str, str], dict[str, dict[str, list[str]]]]:
    """List the images in `train/<class>/`, `val/<class>/` (or validation/, valid/) and `test/<class>/`.

    Data without split folders contains only `<class>/`.

    A test/ folder is ignored if it contains no class folders, because its images then have no labels. A test/
    folder next to val/ is also ignored if it shares no class with train/. Class folders without images are
    ignored.

    Args:
        root: Folder of the data.
        left_out: Object to which the ignored files and folders are added.

    Returns:
        The folder name of each split ("" if there are no split folders), and the image paths of each class in
        each split, relative to the class folder.

    Raises:
        ValueError: The images in the folders can't be used for training.
    """
    folders = split_folders(root)
    if not folders or _is_class(root, folders):
        return {"train": ""}, {"train": _list_without_splits(root, left_out)}
    if "train" not in folders:
        raise ValueError(
            f"--data {root} has {next(iter(folders.values()))}/, but no train/. A folder with this name is a"
            f" split. Rename it if it is a class{_hint(root)}"
        )
    splits = {split: list_classes(root / folders[split], left_out) for split in used_splits(folders).values()}
    known = splits["train"].keys() if len(splits) == 3 else splits.get("test", {}).keys()
    if "test" in splits and not splits["test"].keys() & known:
        for name, paths in splits.pop("test").items():
            for path in paths:
                left_out.add(LOOSE, str(root / folders["test"] / name / path))
        del folders["test"]
    for split, classes in splits.items():
        folder = root / folders[split]
        if not classes:
            raise ValueError(
                f"{folder} has no class folders. A folder with this name is a split and needs a"
                f" separate folder for each class. Rename it if it is a class{_hint(root)}"
            )
        splits[split] = without_empty(folders[split], classes, left_out)
        if not splits[split]:
            raise ValueError(f"no images ({' '.join(EXTENSIONS)}) in the class folders of {folder}")
        check_known(f"--data {root}", folders[split], splits[split], splits["train"])
    return folders, splits


def without_empty(folder: str, classes: dict[str, list[str]], left_out: LeftOut) -> dict[str, list[str]]:
    """Return the classes that have images. Add the folders of all other classes to left_out."""
    left_out.empty_folders += [os.path.join(folder, name, "") for name, paths in classes.items() if not paths]
    return {name: paths for name, paths in classes.items() if paths}


def check_known(where: str, split: str, classes: Iterable[str], train: Iterable[str]) -> None:
    """Raise ValueError if a split contains classes that train lacks.

    If a class occurs only in the training split, a warning at startup reports it instead.

    Args:
        where: Name of the data for the message.
        split: Name of the split.
        classes: Class names of the split.
        train: Class names of the training split.
    """
    if unknown := sorted({*classes} - {*train}):
        raise ValueError(
            f"{where}: {printable(split)} has classes that train lacks: {some_of(unknown)}. Rename or remove"
            " them, or add training images for them"
        )


def _is_class(root: Path, folders: dict[str, str]) -> bool:
    """Check whether the only folder that is named like a split is in fact a class folder.

    The folder is a class folder if it and at least two other folders directly contain images. One other
    folder is not enough, because a data set with unsorted training images in train/*.jpg may keep its test
    images in test1/.
    """
    if len(folders) != 1:
        return False
    folders_with_images = {*_with_images(root)}
    return {*folders.values()} < folders_with_images and len(folders_with_images) > 2


def _with_images(root: Path) -> list[str]:
    """Return the folders that directly contain images. Skip unreadable folders, such as lost+found."""
    folders_with_images = []
    for name in folder_names(root):
        with contextlib.suppress(PermissionError):
            folders_with_images += [name] if any(map(is_image, os.listdir(root / name))) else []
    return folders_with_images


def beside_splits(root: Path) -> list[str]:
    """Return the folders that contain images and lie next to the split folders."""
    splits = split_folders(root).values()
    return [name for name in _with_images(root) if name not in splits]


def used_splits(names: Iterable[str]) -> dict[str, str]:
    """Return the splits that are read, as {"train": "train", "val": NAME, "test": "test"}.

    NAME is the first available split of VAL_NAMES. "test" is included only if NAME is a different split.
    """
    val = next((name for name in VAL_NAMES if name in names), None)
    used = {"train": "train"} | ({"val": val} if val else {})
    return used | ({"test": "test"} if "test" in names and val != "test" else {})


def _list_without_splits(root: Path, left_out: LeftOut) -> dict[str, list[str]]:
    """List the images of `<class>/` folders without splits. Raise ValueError if no folder contains images."""
    classes = without_empty("", list_classes(root, left_out), left_out)
    if not classes:
        _refuse(root)
    words = {match[1] if (match := SPLIT_WORD.search(name.lower())) else "" for name in classes}
    if "train" in words and "" not in words and len(classes) > 1:
        advice = _hint(root) or ". Name them train/, val/ and test/, each with a folder for each class"
        raise ValueError(
            f"--data {root}: by their names, {some_of(sorted(classes))} are splits, not classes{advice}"
        )
    return classes


def why_not_trained_on(root: Path, name: str, paths: Sequence[str]) -> str:
    """Return a message that explains why data with only one class folder can't be used for training.

    Args:
        root: Folder of the data.
        name: Name of the class folder.
        paths: Image paths relative to the class folder.
    """
    advice = f". Give --data {printable(root / name)} if it contains the classes"
    if not any(os.sep in path for path in paths):
        advice = ", which is one class. A classifier needs at least two"
    return f"--data {root} has images in only one folder, {printable(name)}{advice}{_hint(root)}"


def _refuse(root: Path) -> NoReturn:
    """Raise ValueError for a folder without class folders. The message contains advice."""
    if tables := sorted((*root.glob("*.parquet"), *root.glob("*/*.parquet"))):
        names = [table.relative_to(root) for table in tables]
        raise ValueError(
            f"--data {root} has parquet files, but no train-*.parquet ({some_of(names, 3)}). Name the"
            " training files train-*.parquet, and the others val-*.parquet or test-*.parquet"
        )
    raise ValueError(
        f"--data {root} contains neither parquet files (train-*.parquet, test-*.parquet)"
        f" nor class folders (train/<class>/*.jpg, val/<class>/*.jpg){_hint(root)}"
    )


def _hint(root: Path) -> str:
    """Return advice on archives, lists or HEIC files in a folder, or "" if there are no such files."""
    if sorted((*root.glob("*.tar"), *root.glob("*/*.tar"))):
        data, index = map(shlex.quote, (str(root), f"{root}_index"))
        return printable(
            ". To use tar files in WebDataset format, run python prep_imagenet.py --from shards --format"
            f" index --data {data} --out {index}, and give --data {index}"
        )
    if tables := [str(path) for path in tables_of(root) if path.suffix.lower() in LISTS]:
        return printable(f". To use a list of images, give --data {' or '.join(tables)}")
    left_out = LeftOut()
    list_images(root, left_out)
    return f". Left out: {left_out}" if left_out.counts.keys() & {*HEIC} else ""


def metadata_files(root: Path) -> dict[str, Path]:
    """Find the lists in the Hugging Face Hub's format in the split folders.

    Return {} if the training folder contains no list, or contains more than one folder.
    """
    folders = {split: root / name for split, name in split_folders(root).items()}
    if "train" not in folders or len(folder_names(folders["train"])) > 1:
        return {}
    paths = [(split, folder / name) for split, folder in folders.items() for name in METADATA]
    lists = {split: path for split, path in paths if path.is_file()}
    return lists if "train" in lists else {}


def tables_of(root: Path) -> list[Path]:
    """Return the tables in a folder, with training tables first. Kaggle's sample submissions are excluded."""

    def order(path: Path) -> tuple[bool, str]:
        return not path.name.lower().startswith(("train", "label")), path.name

    tables = [path for path in root.iterdir() if path.suffix.lower() in TABLES and not is_hidden(path.name)]
    return sorted((path for path in tables if "submission" not in path.name.lower()), key=order)


def lone_table(root: Path) -> Path | None:
    """Return the only list or parquet file in a folder, or None if the folder may contain class folders."""
    tables = tables_of(root)
    names = folder_names(root)
    are_flat = not any(folder_names(root / name) for name in names)
    may_be_classes = len(names) > len(split_folders(root)) and len(names) > 1
    return tables[0] if len(tables) == 1 and are_flat and not may_be_classes else None


def list_classes(root: Path, left_out: LeftOut) -> dict[str, list[str]]:
    """List the images of each class folder in root, including images in nested and linked folders.

    Args:
        root: Folder that contains the class folders.
        left_out: Object to which other files, pipes, dangling links and images outside class folders are
            added.

    Returns:
        Mapping from each class to its sorted image paths, relative to the class folder. Classes are sorted.

    Raises:
        ValueError: A link points to one of its parent folders.
    """
    with os.scandir(root) as entries:
        loose = [entry.path for entry in entries if not entry.is_dir()]
    for path in filter(left_out.takes, loose):
        left_out.add(LOOSE, path)
    return {name: list_images(root / name, left_out) for name in folder_names(root)}


def list_images(folder: Path, left_out: LeftOut) -> list[str]:
    """Return the sorted paths of all images in a folder and its subfolders, relative to the folder."""
    images: list[str] = []
    for parent, names, files in os.walk(folder, onerror=_raise, followlinks=True):
        names[:] = [name for name in names if not is_hidden(name)]  # os.walk enters only these folders
        for path in (Path(parent, name) for name in names):
            if leads_above(path):
                raise ValueError(f"{path} links to a folder above it. Remove the link")
        images += filter(left_out.takes, (os.path.join(parent, name) for name in files))
    prefix = os.path.join(folder, "")
    return sorted(path.removeprefix(prefix) for path in images)


def leads_above(path: Path) -> bool:
    """Check whether a path is a link to one of its parent folders."""
    return path.is_symlink() and path.resolve() in map(Path.resolve, path.absolute().parents)


def _raise(error: OSError) -> NoReturn:
    raise error


def find_pictures(words: Sequence[str]) -> list[str]:
    """Return the image files that command-line arguments refer to, in order and without duplicates.

    Args:
        words: Files, folders (including all images in subfolders), glob patterns, or `-` to read a list from
            stdin.

    Raises:
        ValueError: A folder contains no images, a pattern matches no file, or there are no files.
    """
    files: list[str] = []
    left_out = LeftOut()
    for word in words:
        if word == "-":
            files += [line.rstrip("\r\n") for line in sys.stdin if line.strip()]
        elif os.path.isdir(word):
            images = [os.path.join(word, name) for name in list_images(Path(word), left_out)]
            if not images:
                other_files = f", but {left_out}" if left_out.counts else ""
                raise ValueError(f"{word} contains no images{other_files}. Give a folder of pictures")
            files += images
        elif glob.has_magic(word) and not os.path.exists(word):
            matches = sorted(name for name in glob.glob(word, recursive=True) if os.path.isfile(name))
            if not matches:
                raise ValueError(f"{word} matches no file")
            files += matches
        else:
            files.append(word)
    if not files:
        raise ValueError("no pictures: give files, folders, patterns, or - for a list on stdin")
    if left_out.counts:
        log.warning(f"left out: {left_out}")
    return list(dict.fromkeys(files))
