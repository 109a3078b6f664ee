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
    DANGLING_LINKS,
    OUTSIDE_CLASSES,
    IgnoredFiles,
    drop_empty_classes,
    is_hidden,
    is_image,
    list_classes,
    list_images,
    refuse_unknown_classes,
    used_splits,
)
from onecurve.data.decode import IMAGE_EXTENSIONS
from onecurve.data.encoded import SPLITS
from onecurve.data.tables import DEFAULT_COLUMNS, Table, parquet_files, read_images, read_labels
from tools.prepare.archives import Member, Stream, members, open_stream
from tools.prepare.devkit import MD5, VAL_NAME, check_classes, read_devkit, read_val_labels

WNID = re.compile(r"n\d{8}")
# Files that list the classes of images outside class folders
KAGGLE_LIST, TINY_LIST = "LOC_val_solution.csv", "val_annotations.txt"
BATCH_IMAGES, BATCH_BYTES = 32, 2**23
MAGIC_BYTES = {b"\x89PNG": ".png", b"RIFF": ".webp", b"BM": ".bmp"}

LabelFunction = Callable[[str | None, str], int]  # maps a class name and a file name to a label


class ImageFile(NamedTuple):
    """Image that is not stored in an archive."""

    name: str
    read: Callable[[], bytes]


class ImageGroup(NamedTuple):
    """Images in a class tar or class folder, or all images in a flat tar or table (class_name is None)."""

    class_name: str | None
    where: str
    files: Iterable[Member | ImageFile]


class RawImage(NamedTuple):
    name: str
    key: str  # name that is unique within the split, without extension and without dots in its last part
    label: int
    data: bytes


class LabeledFile(NamedTuple):
    group: int  # the group's index
    where: str  # the group's name in messages
    name: str  # file name, for example n01440764_10026.JPEG
    key: str
    label: int
    file: Any  # a Member or an ImageFile


class ImageBatch(NamedTuple):
    """Batch of consecutive images from one image group."""

    where: str
    images: list[RawImage]
    bytes: int  # the original images' total size
    group: int  # the group's index
    odd: list[dict[str, str]]  # image key ("key") and reason ("why") of each re-encoded image


# --- Reading


def class_tars(archive: Member) -> Iterator[ImageGroup]:
    """Yield the class tars (`<class>.tar`) in a tar, in order."""
    for outer in members(archive):
        name = outer.name.rpartition("/")[2]
        if is_hidden(name):
            continue
        if not name.endswith(".tar"):
            remedy = "Pass a tar that contains <class>.tar archives of images."
            raise ValueError(f"{outer.where} is not a class tar. {remedy}")
        yield ImageGroup(name.removesuffix(".tar"), outer.where, members(outer))


def class_folders(root: Path) -> Iterator[ImageGroup]:
    """Yield the class folders in a folder, sorted. The image `<class>/a/1.jpg` is named a_1.jpg."""
    for name, paths in list_folders(root).items():
        files = (
            ImageFile(path.removeprefix(f"{name}/").replace("/", "_"), (root / path).read_bytes)
            for path in paths
        )
        yield ImageGroup(name, str(root / name), files)


def list_folders(root: Path, left_out: IgnoredFiles | None = None) -> dict[str, list[str]]:
    """Map the class folder names in a folder, sorted, to the relative paths of their images.

    The validation images of Kaggle and Tiny ImageNet are not in class folders. A file lists the classes of
    these images. Class folders without images are left out.

    Raises:
        ValueError: If an image has no class, or if a link to an image or folder is dangling, because images
            would be lost unnoticed.
    """
    left_out = left_out or IgnoredFiles()
    images_by_class = list_classes(root, left_out).items()
    classes = {name: [f"{name}/{path}" for path in paths] for name, paths in images_by_class}
    if link := left_out.first.get(DANGLING_LINKS):
        raise ValueError(f"{link} is a dangling link. Fix or remove the link.")
    if len(classes) < 2 and (file := _find_class_list(root)):
        classes = _group_by_list(root, list_images(root, IgnoredFiles()), file)
        del left_out.counts[OUTSIDE_CLASSES]
    classes = drop_empty_classes("", classes, left_out)
    if not classes:
        if OUTSIDE_CLASSES in left_out.first:
            remedy = f"Put {KAGGLE_LIST}, which lists the classes of the images, next to the folder."
            raise ValueError(f"{root} contains images outside class folders. {remedy}")
        raise ValueError(f"{root} contains no images ({' '.join(IMAGE_EXTENSIONS)})")
    return classes


def _find_class_list(root: Path) -> Path | None:
    """Find the file that lists the images' classes, in the folder or at most four levels above."""
    files = (root / TINY_LIST, *(parent / KAGGLE_LIST for parent in (root, *root.absolute().parents[:4])))
    return next(filter(Path.is_file, files), None)


def _group_by_list(root: Path, paths: list[str], file: Path) -> dict[str, list[str]]:
    """Group images by class, sorted. Each line of the file starts with an image's name and class."""
    name_class_pairs = [re.split("[,\t ]", line)[:2] for line in file.read_text().splitlines()]
    class_of = {pair[0].removesuffix(".JPEG"): pair[-1] for pair in name_class_pairs}
    paths_by_class = defaultdict(list)
    for path in paths:
        if (name := class_of.get(Path(path).stem)) is None:
            raise ValueError(f"{file} does not contain the class of {root / path}")
        paths_by_class[name].append(path)
    return dict(sorted(paths_by_class.items()))


def labeled_files(groups: Iterable[ImageGroup], label: LabelFunction) -> Iterator[LabeledFile]:
    """Yield the images in the groups with their labels. Skip hidden files and files that are not images.

    Raises:
        ValueError: If a name or class occurs twice, or if a group contains no images.
    """
    classes = set()
    for number, (class_name, where, files) in enumerate(groups):
        if class_name in classes:
            raise ValueError(f"{where} has the same name as another class. Merge the two classes.")
        classes.add(class_name)
        names: dict[str, str] = {}  # file name for each key
        for file in files:
            if not is_image(name := file.name.rpartition("/")[2]):
                continue
            try:
                class_number = label(class_name, name)
            except ValueError as error:
                raise ValueError(f"{where}: {error}") from None
            # ILSVRC2012's file names contain the WordNet id and are unique within a split. Other file names
            # are unique only within a class.
            key = os.path.splitext(name)[0].replace(".", "_")
            has_wnid = WNID.fullmatch(class_name or "") and key.startswith(f"{class_name}_")
            if class_name is not None and not has_wnid:
                key = f"{class_name}/{key}"
            if names.get(key, name) != name:  # the key of 1.png is 1_png if 1.jpg exists
                key = f"{key}_{name.rpartition('.')[2]}"
            if key in names:
                raise ValueError(
                    f"{where}: {name} and another image have the same key, {key}. Rename one of the images."
                    " (A key is the image's name without the extension, with _ instead of other dots.)"
                )
            names[key] = name
            yield LabeledFile(number, where, name, key, class_number, file)
        if not names:  # the tar or folder contains no images
            raise ValueError(f"{where} contains no images ({' '.join(IMAGE_EXTENSIONS)})")


def batches(groups: Iterable[ImageGroup], label: LabelFunction) -> Iterator[ImageBatch]:
    """Yield all images in batches. Each batch contains images from only one group."""
    images, batch_bytes, previous = list[RawImage](), 0, None
    for labeled_file in labeled_files(groups, label):
        is_full = len(images) == BATCH_IMAGES or batch_bytes >= BATCH_BYTES
        if previous and (labeled_file.group > previous.group or is_full):
            yield ImageBatch(previous.where, images, batch_bytes, previous.group, [])
            images, batch_bytes = [], 0
        if not (data := labeled_file.file.read()):
            raise ValueError(f"{labeled_file.where}: {labeled_file.name} is empty. Remove the file.")
        images.append(RawImage(labeled_file.name, labeled_file.key, labeled_file.label, data))
        batch_bytes, previous = batch_bytes + len(data), labeled_file
    if previous:
        yield ImageBatch(previous.where, images, batch_bytes, previous.group, [])


# --- Data sets


class Originals:
    """Train and val images in class tars (`<class>.tar`) or class folders (`<class>/`)."""

    hashed = False  # True to compare MD5 sums with the published MD5 sums

    def __init__(self, parts: dict[str, str]):
        """Find the parts of the data set. `parts` maps train, val, devkit or val_labels to paths or URLs."""
        self.parts = parts
        self.bytes: dict[str, int] = {}  # size of each archive, or of all images in each folder
        self.versions: dict[str, str | None] = {}  # text that changes with the content, or None if unknown
        self.listings: dict[str, str] = {}  # hash of all class names, file names and sizes in each folder
        self.classes: list[dict[str, str]] = []  # keys "wnid" and "name" for each class, in label order
        self.labels: dict[str, LabelFunction] = {}
        self.find()

    def find(self) -> None:
        """Determine the sizes and versions of the parts. Raise ValueError for an unusable folder."""
        listed = {}
        for part, where in self.parts.items():
            if Path(where).is_dir():
                print(f"listing the images in {where}", flush=True)
                listed[part] = list_folders(Path(where), left_out := IgnoredFiles())
                if text := str(left_out):
                    print(f"left out: {text}", flush=True)
                paths = [path for images in listed[part].values() for path in images]
                self.bytes[part], self.versions[part] = size_and_version(Path(where), paths)
                rows = [(path, os.stat(Path(where) / path).st_size) for path in paths]
                self.listings[part] = digest(rows)[:16]
            else:
                with open_stream(where) as stream:
                    self.bytes[part], self.versions[part] = stream.size, stream.version
        if len(listed) == 2:
            refuse_unknown_classes(self.parts["val"], "val", listed["val"], listed["train"])

    def read_classes(self) -> None:
        """Read the class names from the names of class tars or class folders."""
        split = "train" if "train" in self.parts else "val"
        if "://" in self.parts[split]:  # reading a class name takes one or more requests
            print(f"reading the class names in {self.parts[split]}", flush=True)
        with self.open(split, hashed=False) as (groups, _):
            names = sorted(group.class_name or "" for group in groups)
        self.classes = [{"wnid": name, "name": name} for name in names]
        self.labels = dict.fromkeys(SPLITS, label_by_class(names))

    @contextlib.contextmanager
    def open(self, split: str, hashed: bool) -> Iterator[tuple[Iterator[ImageGroup], Stream | None]]:
        """Open a split. Yield the split's image groups, and their stream or None for class folders."""
        if Path(self.parts[split]).is_dir():
            yield class_folders(Path(self.parts[split])), None
            return
        with open_stream(self.parts[split], "md5" if hashed else None) as stream:
            yield self.groups(split, stream.archive), stream

    def groups(self, split: str, archive: Member) -> Iterator[ImageGroup]:
        return class_tars(archive)

    def check(self, split: str, groups: int, images: int, stream: Stream | None) -> None:
        """Read the stream to the end. Raise ValueError if the content differs from the published content."""
        if self.hashed and stream is not None:
            self.check_md5(split, stream)

    def check_md5(self, part: str, stream: Stream) -> None:
        if (md5 := stream.digest()) != MD5[part]:
            problem = f"The file's MD5 is {md5}, but {MD5[part]} is expected"
            remedy = "Download the file again, or add --no_verify to use a different file."
            raise ValueError(f"{stream.where} is not the published file. {problem}. {remedy}")

    def name_classes(self, largest: int) -> None:
        """Check that each label up to `largest` has a class name."""


class Ilsvrc(Originals):
    """Data set in ILSVRC2012's archives.

    Without the development kit, class names come from the training archive.
    """

    def __init__(self, parts: dict[str, str], hashed: bool, subset: bool):
        """Find the archives. With `subset`, accept counts that differ from ILSVRC2012's counts."""
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
        self.labels = {"train": label_by_class([*words]), "val": label_by_number(val_labels)}
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
            self.labels["val"], self.counts["val"] = label_by_number(val_labels), len(val_labels)

    def groups(self, split: str, archive: Member) -> Iterator[ImageGroup]:
        if split == "val":
            return iter([ImageGroup(None, archive.where, members(archive))])
        return class_tars(archive)

    def check(self, split: str, groups: int, images: int, stream: Stream | None) -> None:
        count, noun = (groups, "classes") if split == "train" else (images, "images")
        if not self.subset and count != self.counts[split]:
            problem = f"contains {count:,} {noun} instead of {self.counts[split]:,}"
            remedy = "Download the archive again, or add --subset to use a subset."
            raise ValueError(f"{self.parts[split]} {problem}. {remedy}")
        super().check(split, groups, images, stream)


class ParquetFolder(Originals):
    """Parquet files of train and val in a folder. An image's name is its row number in the split."""

    def find(self) -> None:
        folder = Path(self.parts["train"])
        if not folder.is_dir() or (tables := parquet_files(folder)) is None:
            raise ValueError(f"--data {folder} contains no train-*.parquet. Pass a folder with such files.")
        if (val := used_splits(tables).get("val")) is None:
            missing = "no val-, valid- or test-*.parquet"
            raise ValueError(f"--data {folder} contains train-*.parquet, but {missing}")
        files = {"train": tables["train"], "val": tables[val]}
        self.tables = {split: [Table(str(path), path) for path in paths] for split, paths in files.items()}
        for split, paths in files.items():
            names = [str(path.relative_to(folder)) for path in paths]
            self.bytes[split], self.versions[split] = size_and_version(folder, names)

    def read_classes(self) -> None:
        names, labels = read_labels(self.tables, DEFAULT_COLUMNS, lambda: None)
        self.classes = [{"wnid": name, "name": name} for name in names]
        self.labels = {split: partial(_label_in_row, labels[split].numbers) for split in self.tables}

    @contextlib.contextmanager
    def open(self, split: str, hashed: bool) -> Iterator[tuple[Iterator[ImageGroup], Stream | None]]:
        def image(row: int, content: bytes) -> ImageFile:  # unknown formats are refused later, by the decoder
            extension = next((end for begin, end in MAGIC_BYTES.items() if content.startswith(begin)), ".jpg")
            return ImageFile(f"{row:09d}{extension}", partial(bytes, content))

        contents = read_images(self.tables[split], DEFAULT_COLUMNS, lambda: None)
        files = (image(row, content) for row, (content, _) in enumerate(contents))
        yield iter([ImageGroup(None, self.parts[split], files)]), None


def size_and_version(folder: Path, paths: list[str]) -> tuple[int, str]:
    """Return the files' total size in bytes, and a version that changes when any of the files changes."""
    stats = [os.stat(folder / path) for path in paths]
    path_size_time = [(path, stat.st_size, stat.st_mtime_ns) for path, stat in zip(paths, stats, strict=True)]
    return sum(size for _, size, _ in path_size_time), digest(path_size_time)


def digest(rows: Sequence[tuple[Any, ...]]) -> str:
    """Return the SHA-256 of a list of tuples, for example (path, size, time)."""
    return hashlib.sha256(repr(rows).encode(errors="surrogateescape")).hexdigest()


# --- Labels


def label_by_class(names: Sequence[str]) -> LabelFunction:
    label_of = {name: label for label, name in enumerate(names)}

    def label(class_name: str | None, name: str) -> int:
        if class_name not in label_of:
            raise ValueError(f"class {class_name} is not one of the {len(label_of):,} classes")
        return label_of[class_name]

    return label


def label_by_number(labels: np.ndarray) -> LabelFunction:
    """Return a function that maps ILSVRC2012_val_00000001.JPEG to the first label and so on."""

    def label(_: str | None, name: str) -> int:
        match = VAL_NAME.fullmatch(name)
        if match is None or not 1 <= int(match[1]) <= len(labels):
            raise ValueError(f"{name} is not one of the {len(labels):,} images that have labels")
        return int(labels[int(match[1]) - 1])

    return label


def _label_in_row(labels: np.ndarray, _: str | None, name: str) -> int:
    return int(labels[int(name.partition(".")[0])])
