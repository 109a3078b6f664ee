"""Images in class folders as people have them: nested, linked, with or without splits, beside other files.

torchvision's make_dataset finds the images: with the look for links in a circle, which it would follow again
and again, 0.5 s for 100,000 files in 1,000 folders, besides 1 to 2 s for its import. os.scandir took 0.11 s.
"""

import os
from collections import Counter
from functools import partial
from pathlib import Path
from typing import NoReturn

from common.data.decode import EXTENSIONS, SPLITS
from common.data.encoded import save_images, save_labels
from common.data.parquet import only_in
from common.data.source import VAL_NAMES, Source
from common.system.text import printable, some_of
from common.system.threads import Heartbeat

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

    def takes(self, folder: str, path: str) -> bool:
        """True for an image, a file in a folder or below. Counts any other file, unless it is hidden."""
        if any(map(is_hidden, path.removeprefix(folder).split("/"))):
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


def find_class_folders(root: Path) -> Source:
    """Lists `train/<class>/` and `val/<class>/` (or validation/, valid/, test/), or `<class>/` alone."""
    left_out, folders = LeftOut(), split_folders(root)
    if not folders:
        return _find_without_splits(root, left_out)
    if "train" not in folders:
        raise ValueError(f"--data {root} has {next(iter(folders.values()))}/, but no train/")
    val = next((split for split in VAL_NAMES if split in folders), None)
    names = {"train": folders["train"]} | ({"val": folders[val]} if val else {})
    splits = {split: list_classes(root / name, left_out) for split, name in names.items()}
    for split, classes in splits.items():
        folder = root / names[split]
        if not classes:
            raise ValueError(
                f"{folder} has no class folders: each class's images belong in a folder of its own"
            )
        if empty := [str(folder / name) for name, images in classes.items() if not images]:
            raise ValueError(
                f"no images ({' '.join(EXTENSIONS)}) in {some_of(empty)}: fill or remove the folder"
            )
    train, other = (set(splits.get(split, splits["train"])) for split in SPLITS)
    if train != other:
        raise ValueError(
            f"--data {root}: the class folders of {names['train']}/ and {names['val']}/ differ:"
            + only_in(names["train"], train - other)
            + only_in(names["val"], other - train)
        )
    files = {
        split: [(c, f"{names[split]}/{c}/{path}") for c, paths in classes.items() for path in paths]
        for split, classes in splits.items()
    }
    unused = [name for split, name in folders.items() if split not in ("train", val)]
    said = ", ".join(
        filter(None, (str(left_out), *(f"{name}/, as {names['val']}/ is there" for name in unused)))
    )
    return source_of_files(root.name, root, sorted(train), files, VAL_NAMES[val] if val else None, said)


def _find_without_splits(root: Path, left_out: LeftOut) -> Source:
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
    files = [(c, f"{c}/{path}") for c, paths in found.items() for path in paths]
    unused = [f"{name}/ without images" for name in classes if name not in found]
    said = ", ".join(filter(None, (str(left_out), *unused)))
    return source_of_files(root.name, root, sorted(found), {"train": files}, None, said)


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


def source_of_files(
    name: str,
    root: Path,
    classes: list[str],
    splits: dict[str, list[tuple[str, str]]],
    val_name: str | None,
    left_out: str,
) -> Source:
    """The source of image files. splits: the class, and the path below root, of each image of a split."""

    def write(folder: Path, beat: Heartbeat) -> tuple[str, ...]:
        number = {c: k for k, c in enumerate(classes)}
        for split, images in splits.items():
            save_images(folder, split, (os.fsencode(path) for _, path in images), root)
            save_labels(folder, split, [number[c] for c, _ in images])
            beat()
        return tuple(classes)

    files = tuple((path, root / path) for images in splits.values() for _, path in images)
    return Source(name, files, write, val_name, root=root, left_out=left_out)


def is_image(name: str) -> bool:
    return not is_hidden(name) and name.lower().endswith(EXTENSIONS)


def is_hidden(name: str) -> bool:
    return name.startswith(".") or name in IGNORED


def split_folders(root: Path) -> dict[str, str]:
    """Finds the folders of splits below root: their names by the split's, as {"train": "Train"}."""
    folders = folder_names(root)
    found = {}
    for split in ("train", *VAL_NAMES):
        alike = [name for name in folders if name.lower() == split]
        if alike:
            found[split] = split if split in alike else alike[0]
    return found


def folder_names(root: Path) -> list[str]:
    with os.scandir(root) as entries:
        return sorted(entry.name for entry in entries if not is_hidden(entry.name) and entry.is_dir())


def list_classes(root: Path, left_out: LeftOut) -> dict[str, list[str]]:
    """Lists {class: sorted paths of its images below its folder} for the folders of root, sorted.

    A class's images may lie deeper. Links are followed. Files that are no images, pipes, dangling links and
    images outside class folders are counted in left_out. Raises ValueError for a link in a circle.
    """
    with os.scandir(root) as entries:
        loose = [entry.path for entry in entries if not entry.is_dir()]
    for path in loose:
        if left_out.takes(os.path.join(root, ""), path):
            left_out.add(LOOSE, path)
    return {name: list_images(root / name, left_out) for name in folder_names(root)}


def list_images(folder: Path, left_out: LeftOut) -> list[str]:
    """Lists the images of a folder and the folders in it, sorted: their paths below it."""
    from torchvision.datasets.folder import make_dataset  # takes a second to import

    _refuse_circles(folder)
    prefix = os.path.join(folder, "")
    found = make_dataset(folder, {"": 0}, is_valid_file=partial(left_out.takes, prefix), allow_empty=True)
    return sorted(path.removeprefix(prefix) for path, _ in found)


def _refuse_circles(folder: Path) -> None:
    """Raises ValueError for a link to a folder above it: torchvision would follow it again and again."""
    for above, names, _ in os.walk(folder, onerror=_raise, followlinks=True):
        for path in (Path(above, name) for name in names):
            if path.is_symlink() and path.resolve() in map(Path.resolve, path.absolute().parents):
                raise ValueError(f"{path} links to a folder above it: remove the link")


def _raise(error: OSError) -> NoReturn:
    raise error
