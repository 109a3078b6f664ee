"""Lists the images of folders as people have them: nested, linked, with or without splits, among other files.

`datasets` and torchvision can't do it: they take the innermost folder for the class, or follow a link in a
circle, need seconds to import at each start, and don't tell what they leave out.
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

VAL_NAMES = {"val": "val", "validation": "val", "valid": "val", "test": "test"}  # the first one is evaluated
SPELLINGS = {"training": "train", "testing": "test"}  # of a split's folder, as some of Kaggle's have
SPLIT_WORD = re.compile("(?<![a-z])(train|valid|validation|val|test)(?:ing)?(?![a-z])")  # as in train_images
IGNORED = ("__MACOSX", "@eaDir", "lost+found")  # made by a Mac's zip, network drives, and ext4
DANGLING = "dangling links"
SPECIAL = "special files"
LOOSE = "outside class folders"
LISTS = (".csv", ".tsv", ".jsonl")
TABLES = (*LISTS, ".parquet")
METADATA = ("metadata.csv", "metadata.jsonl")  # the hub's lists, in the folder of a split


class LeftOut:
    """Files that are not read, counted by the reason, with the first of each; and empty class folders."""

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()
        self.first: dict[str, str] = {}
        self.empty_folders: list[str] = []

    def add(self, reason: str, path: str) -> None:
        self.counts[reason] += 1
        self.first.setdefault(reason, path)

    def takes(self, path: str) -> bool:
        """True for an image. Counts any other file, unless it is hidden."""
        if is_hidden(os.path.basename(path)):
            return False
        kind = os.path.splitext(path)[1].lower()
        is_image = kind in EXTENSIONS
        if os.path.isfile(path):
            reason = "" if is_image else kind or "without an extension"
        elif os.path.islink(path):
            reason = DANGLING if is_image else kind or DANGLING
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
    """Finds the folders of splits below root: their names by the split's, as {"train": "Train"}."""
    folders, found = folder_names(root), {}
    for split in ("train", *VAL_NAMES):
        if alike := [n for n in folders if SPELLINGS.get(n.lower(), n.lower()) == split]:
            found[split] = split if split in alike else alike[0]
    return found


def list_splits(root: Path, left_out: LeftOut) -> tuple[dict[str, str], dict[str, dict[str, list[str]]]]:
    """The folders of `train/<class>/`, `val/<class>/` (or validation/, valid/) and `test/<class>/`, and their
    classes.

    For `<class>/` alone the folder is "". A test/ without class folders has no labels, and its images are
    left out, as are those of a test/ next to val/ without any of train/'s classes. Class folders without
    images are left out. Raises ValueError for folders that can't be trained on.
    """
    folders = split_folders(root)
    if not folders or _is_class(root, folders):
        return {"train": ""}, {"train": _list_without_splits(root, left_out)}
    if "train" not in folders:
        raise ValueError(
            f"--data {root} has {next(iter(folders.values()))}/, but no train/: a folder of this name is a"
            f" split; rename it if it is a class{_hint(root)}"
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
                f"{folder} has no class folders: each class's images belong in a folder of its own, and a"
                f" folder of this name is a split; rename it if it is a class{_hint(root)}"
            )
        splits[split] = without_empty(folders[split], classes, left_out)
        if not splits[split]:
            raise ValueError(f"no images ({' '.join(EXTENSIONS)}) in the class folders of {folder}")
        check_known(f"--data {root}", folders[split], splits[split], splits["train"])
    return folders, splits


def without_empty(folder: str, classes: dict[str, list[str]], left_out: LeftOut) -> dict[str, list[str]]:
    """Return the classes that have images. Adds the folders of the others to left_out."""
    left_out.empty_folders += [os.path.join(folder, name, "") for name, paths in classes.items() if not paths]
    return {name: paths for name, paths in classes.items() if paths}


def check_known(where: str, split: str, classes: Iterable[str], train: Iterable[str]) -> None:
    """Raise ValueError for classes that train lacks. A class that only train has gets a warning at the start.

    where: the data, for the message. train: its classes.
    """
    if unknown := sorted({*classes} - {*train}):
        raise ValueError(
            f"{where}: {printable(split)} has classes that train lacks: {some_of(unknown)}. Rename or remove"
            " them, or add training images of them"
        )


def _is_class(root: Path, folders: dict[str, str]) -> bool:
    """True if the only folder with a split's name is a class: it holds images itself, and so do two or more
    beside it. (One is not enough: of dogs and cats in train/*.jpg the test images may be in test1/.)"""
    return len(folders) == 1 and {*folders.values()} < (found := {*_with_images(root)}) and len(found) > 2


def _with_images(root: Path) -> list[str]:
    """The folders that hold images themselves, not only in folders below. What can't be read, as lost+found,
    does not count."""
    found = []
    for name in folder_names(root):
        with contextlib.suppress(PermissionError):
            found += [name] if any(map(is_image, os.listdir(root / name))) else []
    return found


def beside_splits(root: Path) -> list[str]:
    """The folders of images beside those of the splits."""
    splits = split_folders(root).values()
    return [name for name in _with_images(root) if name not in splits]


def used_splits(found: Iterable[str]) -> dict[str, str]:
    """The splits that are read: {"train": "train", "val": the first to evaluate on, "test": "test"}, the last
    where another one is there to evaluate on."""
    val = next((name for name in VAL_NAMES if name in found), None)
    used = {"train": "train"} | ({"val": val} if val else {})
    return used | ({"test": "test"} if "test" in found and val != "test" else {})


def _list_without_splits(root: Path, left_out: LeftOut) -> dict[str, list[str]]:
    """List `<class>/`. Raises ValueError where no folder has images."""
    found = without_empty("", list_classes(root, left_out), left_out)
    if not found:
        _refuse(root)
    words = {match[1] if (match := SPLIT_WORD.search(name.lower())) else "" for name in found}
    if "train" in words and "" not in words and len(found) > 1:
        advice = _hint(root) or ": call them train/, val/ and test/, with a folder for each class in them"
        raise ValueError(
            f"--data {root}: {some_of(sorted(found))} are splits by their names, no classes{advice}"
        )
    return found


def why_not_trained_on(root: Path, name: str, paths: Sequence[str]) -> str:
    """Explain that one class folder is enough for an evaluation alone. paths: of its images, below it."""
    advice = f": give --data {printable(root / name)} if the classes are in it"
    if not any(os.sep in path for path in paths):
        advice = ", which is one class: a classifier needs two or more"
    return f"--data {root} has images in one folder alone, {printable(name)}{advice}{_hint(root)}"


def _refuse(root: Path) -> NoReturn:
    """Raises ValueError: what may be meant by a folder without class folders."""
    if tables := sorted((*root.glob("*.parquet"), *root.glob("*/*.parquet"))):
        names = [table.relative_to(root) for table in tables]
        raise ValueError(
            f"--data {root} has parquet files, but no train-*.parquet ({some_of(names, 3)}): name those of"
            " training so, and others val-*.parquet or test-*.parquet"
        )
    raise ValueError(
        f"--data {root} holds neither parquet files (train-*.parquet, test-*.parquet)"
        f" nor class folders (train/<class>/*.jpg, val/<class>/*.jpg){_hint(root)}"
    )


def _hint(root: Path) -> str:
    """What to do with archives or lists in a folder; empty where it has none."""
    if sorted((*root.glob("*.tar"), *root.glob("*/*.tar"))):
        data, index = map(shlex.quote, (str(root), f"{root}_index"))
        return printable(
            "; index tar files of WebDataset's form by python prep_imagenet.py --from shards --format index"
            f" --data {data} --out {index}, and give --data {index}"
        )
    if tables := [str(path) for path in tables_of(root) if path.suffix.lower() in LISTS]:
        return printable(f"; for images that a list names give --data {' or '.join(tables)}")
    left_out = LeftOut()
    list_images(root, left_out)
    return f"; left out: {left_out}" if left_out.counts.keys() & {*HEIC} else ""


def metadata_files(root: Path) -> dict[str, Path]:
    """The list in each split's folder, as the hub has it; {} where train has none, or has class folders."""
    folders = {split: root / name for split, name in split_folders(root).items()}
    if "train" not in folders or len(folder_names(folders["train"])) > 1:
        return {}
    paths = [(split, folder / name) for split, folder in folders.items() for name in METADATA]
    found = {split: path for split, path in paths if path.is_file()}
    return found if "train" in found else {}


def tables_of(root: Path) -> list[Path]:
    """The tables in a folder, those of training first; without Kaggle's submission of dummy labels."""

    def order(path: Path) -> tuple[bool, str]:
        return not path.name.lower().startswith(("train", "label")), path.name

    tables = [path for path in root.iterdir() if path.suffix.lower() in TABLES and not is_hidden(path.name)]
    return sorted((path for path in tables if "submission" not in path.name.lower()), key=order)


def lone_table(root: Path) -> Path | None:
    """The only CSV list or parquet file of a folder whose other folders can't be class folders."""
    tables = tables_of(root)
    names = folder_names(root)
    are_flat = not any(folder_names(root / name) for name in names)
    may_be_classes = len(names) > len(split_folders(root)) and len(names) > 1
    return tables[0] if len(tables) == 1 and are_flat and not may_be_classes else None


def list_classes(root: Path, left_out: LeftOut) -> dict[str, list[str]]:
    """Lists {class: sorted paths of its images below its folder} for the folders of root, sorted.

    A class's images may lie deeper. Links are followed. Files that are no images, pipes, dangling links and
    images outside class folders are counted in left_out. Raises ValueError for a link in a circle.
    """
    with os.scandir(root) as entries:
        loose = [entry.path for entry in entries if not entry.is_dir()]
    for path in filter(left_out.takes, loose):
        left_out.add(LOOSE, path)
    return {name: list_images(root / name, left_out) for name in folder_names(root)}


def list_images(folder: Path, left_out: LeftOut) -> list[str]:
    """Lists the images of a folder and the folders in it, sorted: their paths below it."""
    found: list[str] = []
    for above, names, files in os.walk(folder, onerror=_raise, followlinks=True):
        names[:] = [name for name in names if not is_hidden(name)]  # os.walk enters these alone
        for path in (Path(above, name) for name in names):
            if leads_above(path):
                raise ValueError(f"{path} links to a folder above it: remove the link")
        found += filter(left_out.takes, (os.path.join(above, name) for name in files))
    prefix = os.path.join(folder, "")
    return sorted(path.removeprefix(prefix) for path in found)


def leads_above(path: Path) -> bool:
    """True for a link to a folder above it."""
    return path.is_symlink() and path.resolve() in map(Path.resolve, path.absolute().parents)


def _raise(error: OSError) -> NoReturn:
    raise error


def find_pictures(words: Sequence[str]) -> list[str]:
    """The files that words name: files, folders with all images below, patterns, and `-` for a list on stdin.

    In the order of the words, each file once. Raises ValueError for a word that names nothing.
    """
    found: list[str] = []
    left_out = LeftOut()
    for word in words:
        if word == "-":
            found += [line.rstrip("\r\n") for line in sys.stdin if line.strip()]
        elif os.path.isdir(word):
            images = [os.path.join(word, name) for name in list_images(Path(word), left_out)]
            if not images:
                but = f", but {left_out}" if left_out.counts else ""
                raise ValueError(f"{word} holds no images{but}: give a folder of pictures")
            found += images
        elif glob.has_magic(word) and not os.path.exists(word):
            matches = sorted(name for name in glob.glob(word, recursive=True) if os.path.isfile(name))
            if not matches:
                raise ValueError(f"{word} matches no file")
            found += matches
        else:
            found.append(word)
    if not found:
        raise ValueError("no pictures: give files, folders, patterns, or - for a list on stdin")
    if left_out.counts:
        log.warning(f"left out: {left_out}")
    return list(dict.fromkeys(found))
