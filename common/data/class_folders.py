"""Lists the images of folders as people have them: nested, linked, with or without splits, among other files.

`datasets` and torchvision can't do it: they take the innermost folder for the class, or follow a link in a
circle, need seconds to import at each start, and don't tell what they leave out.
"""

import glob
import os
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

from common.data.decode import EXTENSIONS
from common.system.text import printable, some_of

VAL_NAMES = {"val": "val", "validation": "val", "valid": "val", "test": "test"}  # the first one is evaluated
IGNORED = ("__MACOSX", "@eaDir")  # made by a Mac's zip, and by network drives
DANGLING = "dangling links"
SPECIAL = "special files"
LOOSE = "outside class folders"


class LeftOut:
    """Files that are not read: how many, by the reason, and the first of each."""

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()
        self.first: dict[str, str] = {}

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
        return ", ".join(f"{count:,} {printable(reason)}" for reason, count in self.counts.most_common())


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
        if alike := [name for name in folders if name.lower() == split]:
            found[split] = split if split in alike else alike[0]
    return found


def list_splits(root: Path, left_out: LeftOut) -> tuple[dict[str, str], dict[str, dict[str, list[str]]]]:
    """The folders of `train/<class>/` and `val/<class>/` (or validation/, valid/, test/), and their classes.

    For `<class>/` alone the folder is "". Raises ValueError for folders that can't be trained on.
    """
    folders = split_folders(root)
    if not folders:
        return {"train": ""}, {"train": _list_without_splits(root, left_out)}
    if "train" not in folders:
        raise ValueError(f"--data {root} has {next(iter(folders.values()))}/, but no train/")
    val = next((split for split in VAL_NAMES if split in folders), None)
    used = {"train": folders["train"]} | ({val: folders[val]} if val else {})
    splits = {split: list_classes(root / name, left_out) for split, name in used.items()}
    for split, classes in splits.items():
        folder = root / used[split]
        if not classes:
            raise ValueError(
                f"{folder} has no class folders: each class's images belong in a folder of its own"
            )
        if empty := [str(folder / name) for name, images in classes.items() if not images]:
            raise ValueError(
                f"no images ({' '.join(EXTENSIONS)}) in {some_of(empty)}: fill or remove the folder"
            )
    if val and (differing := only_in(used["train"], splits["train"], used[val], splits[val])):
        raise ValueError(
            f"--data {root}: the class folders of {used['train']}/ and {used[val]}/ differ:{differing}"
        )
    return folders, splits


def only_in(one: str, classes: Sequence | dict, other: str, others: Sequence | dict) -> str:
    """Sentences that name the classes which only one of two splits has; empty where none differs."""
    names = {one: sorted(set(classes) - set(others)), other: sorted(set(others) - set(classes))}
    return "".join(f" only in {split}: {some_of(only)}." for split, only in names.items() if only)


def _list_without_splits(root: Path, left_out: LeftOut) -> dict[str, list[str]]:
    """Lists `<class>/`. Raises ValueError where no folder, or one folder alone, has images."""
    classes = list_classes(root, left_out)
    found = {name: paths for name, paths in classes.items() if paths}
    if len(found) == 1:
        (name,) = found
        raise ValueError(
            f"--data {root} has images in one folder alone, {printable(name)}: give --data"
            f" {printable(root / name)} if the classes are in it"
        )
    if not found:
        _refuse(root)
    return classes


def _refuse(root: Path) -> NoReturn:
    """Raises ValueError: what may be meant by a folder without class folders."""
    if tables := sorted((*root.glob("*.parquet"), *root.glob("*/*.parquet"))):
        names = [table.relative_to(root) for table in tables]
        raise ValueError(
            f"--data {root} has parquet files, but no train-*.parquet ({some_of(names, 3)}): name those of"
            " training so, and others val-*.parquet or test-*.parquet"
        )
    hint = ""
    if tar := next(root.glob("*.tar"), None):
        hint = f"; run prep_imagenet.py on {tar.name}, and give --data its output"
    elif table := next(root.glob("*.csv"), None):
        hint = f"; for images that a list names give --data {table}"
    raise ValueError(
        f"--data {root} holds neither parquet files (train-*.parquet, test-*.parquet)"
        f" nor class folders (train/<class>/*.jpg, val/<class>/*.jpg){printable(hint)}"
    )


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
            if path.is_symlink() and path.resolve() in map(Path.resolve, path.absolute().parents):
                raise ValueError(f"{path} links to a folder above it: remove the link")
        found += filter(left_out.takes, (os.path.join(above, name) for name in files))
    prefix = os.path.join(folder, "")
    return sorted(path.removeprefix(prefix) for path in found)


def _raise(error: OSError) -> NoReturn:
    raise error


def find_pictures(words: Sequence[str]) -> list[str]:
    """The files that words name: files, folders with all images below, patterns, and `-` for a list on stdin.

    In the order of the words, each file once. Raises ValueError for a word that names nothing.
    """
    found: list[str] = []
    for word in words:
        if word == "-":
            found += [line.rstrip("\n") for line in sys.stdin if line.strip()]
        elif os.path.isdir(word):
            images = [os.path.join(word, name) for name in list_images(Path(word), LeftOut())]
            if not images:
                raise ValueError(f"{word} holds no images: give a folder of pictures")
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
    return list(dict.fromkeys(found))
