"""Read original images and labels from archives, folders and parquet files."""

import contextlib
import hashlib
import os
import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from onecurve.data.class_folders import (
    DANGLING,
    LOOSE,
    LeftOut,
    check_known,
    is_hidden,
    is_image,
    list_classes,
    list_images,
    used_splits,
    without_empty,
)
from onecurve.data.decode import EXTENSIONS
from onecurve.data.encoded import SPLITS
from onecurve.data.tables import BY_TYPE, Table, parquet_files, read_images, read_labels
from tools.prepare.archives import Member, Stream, members, open_stream
from tools.prepare.devkit import MD5, VAL_NAME, check_classes, read_devkit, read_val_labels

WNID = re.compile(r"n\d{8}")
# Files that list the classes of images that are not in class folders
KAGGLE, TINY = "LOC_val_solution.csv", "val_annotations.txt"
BATCH_IMAGES, BATCH_BYTES = 32, 2**23
BEGINS = {b"\x89PNG": ".png", b"RIFF": ".webp", b"BM": ".bmp"}

Label = Callable[[str | None, str], int]  # function that maps a class name and a file name to a label


class ImageFile(NamedTuple):
    """Image that is not in an archive."""

    name: str
    read: Callable[[], bytes]


class ImageGroup(NamedTuple):
    """Class tar or class folder. For a flat tar or a table, class_name is None."""

    class_name: str | None
    where: str
    files: Iterable[Member | ImageFile]


class RawImage(NamedTuple):
    name: str
    key: str  # unique name in the split, without extension and without dots in its last part
    label: int
    data: bytes


class LabeledFile(NamedTuple):
    group: int  # number of the group
    where: str  # name of the group in messages
    name: str  # for example n01440764_10026.JPEG
    key: str
    label: int
    file: Any  # Member or ImageFile


class ImageBatch(NamedTuple):
    """Consecutive images of one group."""

    where: str
    images: list[RawImage]
    bytes: int  # size of the original images
    group: int  # number of the group
    odd: list[dict[str, str]]  # keys "key" and "why" for each re-encoded image


# --- Reading


def class_tars(archive: Member) -> Iterator[ImageGroup]:
    """Yield the class tars in a tar, `<class>.tar`, in order."""
    for outer in members(archive):
        name = outer.name.rpartition("/")[2]
        if is_hidden(name):
            continue
        if not name.endswith(".tar"):
            raise ValueError(
                f"{outer.where} is not a class tar. Expected members <class>.tar that contain images."
            )
        yield ImageGroup(name.removesuffix(".tar"), outer.where, members(outer))


def class_folders(root: Path) -> Iterator[ImageGroup]:
    """Yield the classes in a folder, sorted. The name of image `<class>/a/1.jpg` is a_1.jpg."""
    for name, paths in list_folders(root).items():
        files = (
            ImageFile(p.removeprefix(f"{name}/").replace("/", "_"), (root / p).read_bytes) for p in paths
        )
        yield ImageGroup(name, str(root / name), files)


def list_folders(root: Path, left_out: LeftOut | None = None) -> dict[str, list[str]]:
    """List the class folders in a folder, sorted, with the relative paths of their images.

    The val images of Kaggle and Tiny ImageNet are not in class folders. A file lists their classes instead.
    Class folders without images are left out.

    Raises:
        ValueError: an image has no class, or a link to an image or folder is dangling, so that images would
        be
            lost unnoticed.
    """
    left_out = left_out or LeftOut()
    listed = list_classes(root, left_out).items()
    classes = {name: [f"{name}/{path}" for path in paths] for name, paths in listed}
    if link := left_out.first.get(DANGLING):
        raise ValueError(f"{link} is a dangling link. Fix it or remove it.")
    if len(classes) < 2 and (file := _list_of_classes(root)):
        classes = _by_file(root, list_images(root, LeftOut()), file)
        del left_out.counts[LOOSE]
    classes = without_empty("", classes, left_out)
    if not classes:
        if LOOSE in left_out.first:
            raise ValueError(
                f"{root} contains images outside class folders. Put {KAGGLE},"
                " which lists their classes, next to it."
            )
        raise ValueError(f"{root} contains no images ({' '.join(EXTENSIONS)})")
    return classes


def _list_of_classes(root: Path) -> Path | None:
    """Find the list of the images' classes in the folder or at most four levels above the folder."""
    files = (root / TINY, *(parent / KAGGLE for parent in (root, *root.absolute().parents[:4])))
    return next(filter(Path.is_file, files), None)


def _by_file(root: Path, paths: list[str], file: Path) -> dict[str, list[str]]:
    """Group images by class, sorted. Each line of the file starts with the name of an image and its class."""
    rows = [re.split("[,\t ]", line)[:2] for line in file.read_text().splitlines()]
    class_of = {row[0].removesuffix(".JPEG"): row[-1] for row in rows}
    by_name = defaultdict(list)
    for path in paths:
        if (name := class_of.get(Path(path).stem)) is None:
            raise ValueError(f"{root / path}: {file} does not contain its class")
        by_name[name].append(path)
    return dict(sorted(by_name.items()))


def labeled(groups: Iterable[ImageGroup], label: Label) -> Iterator[LabeledFile]:
    """Yield the images of the groups. Skip hidden files and files that are not images.

    Raises:
        ValueError: a name or class occurs twice, or a group contains no images.
    """
    classes = set()
    for number, (class_name, where, files) in enumerate(groups):
        if class_name in classes:
            raise ValueError(f"{where}: a second class with this name. Put its images into one class.")
        classes.add(class_name)
        names: dict[str, str] = {}  # file name of each key
        for file in files:
            if not is_image(name := file.name.rpartition("/")[2]):
                continue
            try:
                class_number = label(class_name, name)
            except ValueError as error:
                raise ValueError(f"{where}: {error}") from None
            # ILSVRC2012's file names contain the WordNet id and are unique in a split. Other file names are
            # unique in a class.
            key = os.path.splitext(name)[0].replace(".", "_")
            has_wnid = WNID.fullmatch(class_name or "") and key.startswith(f"{class_name}_")
            if class_name is not None and not has_wnid:
                key = f"{class_name}/{key}"
            if names.get(key, name) != name:  # if 1.jpg exists, the key of 1.png is 1_png
                key = f"{key}_{name.rpartition('.')[2]}"
            if key in names:
                raise ValueError(
                    f"{where}: {name} and another image have the key {key}. Rename one of them (a key is the"
                    " name without its extension, with _ for other dots)."
                )
            names[key] = name
            yield LabeledFile(number, where, name, key, class_number, file)
        if not names:  # the tar is empty
            raise ValueError(f"{where} contains no images ({' '.join(EXTENSIONS)})")


def batches(groups: Iterable[ImageGroup], label: Label) -> Iterator[ImageBatch]:
    """Yield all images in batches. A batch contains images from only one group."""
    images, size, last = list[RawImage](), 0, None
    for file in labeled(groups, label):
        is_full = len(images) == BATCH_IMAGES or size >= BATCH_BYTES
        if last and (file.group > last.group or is_full):
            yield ImageBatch(last.where, images, size, last.group, [])
            images, size = [], 0
        if not (data := file.file.read()):
            raise ValueError(f"{file.where}: {file.name} is empty. Remove it.")
        images.append(RawImage(file.name, file.key, file.label, data))
        size, last = size + len(data), file
    if last:
        yield ImageBatch(last.where, images, size, last.group, [])


# --- Data sets


class Originals:
    """Class tars (`<class>.tar`) or class folders (`<class>/`) of train and val."""

    hashed = False  # True to compare MD5 sums with the published sums

    def __init__(self, parts: dict[str, str]):
        """Find the parts. `parts` contains the paths or URLs of train, val, and devkit or val_labels."""
        self.parts = parts
        self.bytes: dict[str, int] = {}  # size of each archive, or of the images in each folder
        self.versions: dict[str, str | None] = {}  # text that changes with the content, or None if unknown
        self.listings: dict[str, str] = {}  # hash of all classes, names and sizes in each folder
        self.classes: list[dict[str, str]] = []  # "wnid" and "name", in label order
        self.labels: dict[str, Label] = {}
        self.find()

    def find(self) -> None:
        """Find the sizes and versions of the parts. Raise ValueError for a folder that can't be used."""
        listed = {}
        for part, where in self.parts.items():
            if Path(where).is_dir():
                print(f"listing the images in {where}", flush=True)
                listed[part] = list_folders(Path(where), left_out := LeftOut())
                if text := str(left_out):
                    print(f"left out: {text}", flush=True)
                paths = [path for images in listed[part].values() for path in images]
                self.bytes[part], self.versions[part] = measured(Path(where), paths)
                rows = [(path, os.stat(Path(where) / path).st_size) for path in paths]
                self.listings[part] = digest(rows)[:16]
            else:
                with open_stream(where) as stream:
                    self.bytes[part], self.versions[part] = stream.size, stream.version
        if len(listed) == 2:
            check_known(self.parts["val"], "val", listed["val"], listed["train"])

    def read_classes(self) -> None:
        """Read the classes from the names of the class tars or class folders."""
        split = "train" if "train" in self.parts else "val"
        if "://" in self.parts[split]:  # reading the names takes one or more requests per class
            print(f"looking for the classes in {self.parts[split]}", flush=True)
        with self.open(split, hashed=False) as (groups, _):
            names = sorted(group.class_name or "" for group in groups)
        self.classes = [{"wnid": name, "name": name} for name in names]
        self.labels = dict.fromkeys(SPLITS, by_class(names))

    @contextlib.contextmanager
    def open(self, split: str, hashed: bool) -> Iterator[tuple[Iterator[ImageGroup], Stream | None]]:
        """Open a split. Yield the split's groups, and their stream or None for class folders."""
        if Path(self.parts[split]).is_dir():
            yield class_folders(Path(self.parts[split])), None
            return
        with open_stream(self.parts[split], "md5" if hashed else None) as stream:
            yield self.groups(split, stream.archive), stream

    def groups(self, split: str, archive: Member) -> Iterator[ImageGroup]:
        return class_tars(archive)

    def check(self, split: str, groups: int, images: int, stream: Stream | None) -> None:
        """Read the stream to its end. Raise ValueError if the content differs from the published content."""
        if self.hashed and stream is not None:
            self.check_md5(split, stream)

    def check_md5(self, part: str, stream: Stream) -> None:
        if (md5 := stream.digest()) != MD5[part]:
            raise ValueError(
                f"{stream.where} is not the published file: its MD5 is {md5}, expected {MD5[part]}."
                " Download it again, or add --no_verify if you intend to use another file."
            )

    def name_classes(self, largest: int) -> None:
        """Check that each label up to `largest` has a name."""


class Ilsvrc(Originals):
    """Archives of ILSVRC2012. Without the development kit, the training archive names the classes."""

    def __init__(self, parts: dict[str, str], hashed: bool, subset: bool):
        """Find the parts. With `subset`, accept counts that differ from the counts of ILSVRC2012."""
        super().__init__(parts)
        self.hashed, self.subset = hashed, subset

    def read_classes(self) -> None:
        if "devkit" not in self.parts:
            self._read_classes_of_train()
            return
        if self.hashed:
            with open_stream(self.parts["devkit"], "md5") as stream:
                self.check_md5("devkit", stream)
        with open_stream(self.parts["devkit"]) as stream:
            words, val_labels = read_devkit(stream, self.subset)
        self.classes = [{"wnid": wnid, "name": name} for wnid, name in words.items()]
        self.labels = {"train": by_class([*words]), "val": by_number(val_labels)}
        self.counts = {"train": len(words), "val": len(val_labels)}

    def _read_classes_of_train(self) -> None:
        super().read_classes()
        wnids = [entry["wnid"] for entry in self.classes]
        if not self.subset:
            check_classes(self.parts["train"], len(wnids))
        self.counts = {"train": len(wnids)}
        if "val_labels" in self.parts:
            with open_stream(self.parts["val_labels"]) as stream:
                val_labels = read_val_labels(stream, wnids, self.subset)
            self.labels["val"], self.counts["val"] = by_number(val_labels), len(val_labels)

    def groups(self, split: str, archive: Member) -> Iterator[ImageGroup]:
        if split == "val":
            return iter([ImageGroup(None, archive.where, members(archive))])
        return class_tars(archive)

    def check(self, split: str, groups: int, images: int, stream: Stream | None) -> None:
        count, noun = (groups, "classes") if split == "train" else (images, "images")
        if not self.subset and count != self.counts[split]:
            raise ValueError(
                f"{self.parts[split]} contains {count:,} {noun}, not {self.counts[split]:,}."
                " Download it again, or add --subset if you intend to use a part."
            )
        super().check(split, groups, images, stream)


class ParquetFolder(Originals):
    """Parquet files of train and val in a folder. The name of an image is its row in the split."""

    def find(self) -> None:
        folder = Path(self.parts["train"])
        if not folder.is_dir() or (tables := parquet_files(folder)) is None:
            raise ValueError(f"--data {folder} contains no train-*.parquet. Give a folder with these files.")
        if (val := used_splits(tables).get("val")) is None:
            raise ValueError(f"--data {folder} has train-*.parquet, but no val-, valid- or test-*.parquet")
        files = {"train": tables["train"], "val": tables[val]}
        self.tables = {split: [Table(str(path), path) for path in paths] for split, paths in files.items()}
        for split, paths in files.items():
            names = [str(path.relative_to(folder)) for path in paths]
            self.bytes[split], self.versions[split] = measured(folder, names)

    def read_classes(self) -> None:
        names, labels = read_labels(self.tables, BY_TYPE, lambda: None)
        self.classes = [{"wnid": name, "name": name} for name in names]
        self.labels = {split: partial(_by_row, labels[split].numbers) for split in self.tables}

    @contextlib.contextmanager
    def open(self, split: str, hashed: bool) -> Iterator[tuple[Iterator[ImageGroup], Stream | None]]:
        def image(row: int, content: bytes) -> ImageFile:  # the decoder later refuses unknown formats
            extension = next((end for begin, end in BEGINS.items() if content.startswith(begin)), ".jpg")
            return ImageFile(f"{row:09d}{extension}", partial(bytes, content))

        contents = read_images(self.tables[split], BY_TYPE, lambda: None)
        files = (image(row, content) for row, (content, _) in enumerate(contents))
        yield iter([ImageGroup(None, self.parts[split], files)]), None


def measured(folder: Path, paths: list[str]) -> tuple[int, str]:
    """Return the total size of files in bytes, and a version that changes when any file changes."""
    stats = [os.stat(folder / path) for path in paths]
    rows = [(path, stat.st_size, stat.st_mtime_ns) for path, stat in zip(paths, stats, strict=True)]
    return sum(size for _, size, _ in rows), digest(rows)


def digest(rows: Sequence[tuple[Any, ...]]) -> str:
    """Return the SHA-256 of a list of names, sizes and times."""
    return hashlib.sha256(repr(rows).encode(errors="surrogateescape")).hexdigest()


# --- Labels


def by_class(names: Sequence[str]) -> Label:
    numbers = {name: i for i, name in enumerate(names)}

    def label(class_name: str | None, name: str) -> int:
        if class_name not in numbers:
            raise ValueError(f"class {class_name} is not one of the {len(numbers):,} classes")
        return numbers[class_name]

    return label


def by_number(labels: np.ndarray) -> Label:
    """Return a function that maps ILSVRC2012_val_00000001.JPEG to the first label, and so on."""

    def label(_: str | None, name: str) -> int:
        match = VAL_NAME.fullmatch(name)
        if match is None or not 1 <= int(match[1]) <= len(labels):
            raise ValueError(f"{name} is not one of the {len(labels):,} images that have labels")
        return int(labels[int(match[1]) - 1])

    return label


def _by_row(labels: np.ndarray, _: str | None, name: str) -> int:
    return int(labels[int(name.partition(".")[0])])
