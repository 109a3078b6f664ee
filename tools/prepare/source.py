"""Raw images, as they are published: encoded files in archives or folders, with their classes and labels."""

import hashlib
import os
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import numpy as np

from common.data.class_folders import DANGLING, LeftOut, is_image, list_classes
from common.data.decode import EXTENSIONS, SPLITS
from common.system.s3 import ObjectStore
from tools.prepare.archives import Listing, TarMember, members
from tools.prepare.devkit import MD5, Devkit
from tools.prepare.inputs import Input, open_input, shown

VAL_NAME = re.compile(r"ILSVRC2012_val_(\d{8})\.JPEG")
WNID, PLAIN = re.compile(r"n\d{8}"), re.compile(r"[^/\\\0]+")
BATCH_IMAGES, BATCH_BYTES = 32, 2**23
SECOND_CLASS = "a second class of this name: put its images together"


class RawImage(NamedTuple):
    class_name: str
    name: str  # the file's, as n01440764_10026.JPEG
    key: str  # unique in the split; without extension, and without a dot in its last part
    label: int
    data: bytes


class Position(NamedTuple):
    """How far a split has been read."""

    group: int = 0  # finished class tars or class folders
    images: int = 0  # finished images of the next one


@dataclass
class ImageBatch:
    """Consecutive images of one class tar, class folder or flat tar."""

    where: str
    images: list[RawImage]
    bytes: int  # of the images as they were read
    position: Position  # after the batch
    odd: list[dict[str, str]] = field(default_factory=list)  # {"key", "why"} of re-encoded images


class ImageGroup(NamedTuple):
    """A class tar or class folder; or a flat tar, whose class_name is None."""

    class_name: str | None
    where: str
    files: Iterable[tuple[str, Callable[[], bytes]]]  # name, and a function that reads the content


Label = Callable[[str | None, str], tuple[str, int]]  # from class and file name to class name and label


def class_tars(stream: Input) -> Iterator[ImageGroup]:
    """Yields the class tars, `<class>.tar`, of a tar, in its order."""
    for outer in members(stream):
        name = outer.name.rpartition("/")[2]
        if not name.endswith(".tar"):
            raise ValueError(f"{outer.where} is no class tar: expected members <class>.tar that hold images")
        yield ImageGroup(name.removesuffix(".tar"), outer.where, _files(outer))


def flat_tar(stream: Input) -> Iterator[ImageGroup]:
    yield ImageGroup(None, stream.where, _files(stream))


def _files(archive: Input | TarMember) -> Iterator[tuple[str, Callable[[], bytes]]]:
    for member in members(archive):
        yield member.name.rpartition("/")[2], member.read


def class_folders(root: Path) -> Iterator[ImageGroup]:
    """Yields the folders `<class>/`, sorted. An image below, `<class>/a/1.jpg`, gets the name a_1.jpg."""
    for name, paths in list_folders(root).items():
        files = ((path.replace("/", "_"), (root / name / path).read_bytes) for path in paths)
        yield ImageGroup(name, str(root / name), files)


def list_folders(root: Path) -> dict[str, list[str]]:
    """Lists the classes of a folder, and the paths of their images below them.

    Raises ValueError for a dangling link to an image or a folder: images would be lost unnoticed.
    """
    left_out = LeftOut()
    classes = list_classes(root, left_out)
    if lost := left_out.first.get(DANGLING):
        raise ValueError(f"{lost} is a dangling link: mend it, or remove it")
    return classes


def batches(groups: Iterable[ImageGroup], label: Label, begin: Position) -> Iterator[ImageBatch]:
    """Yields all images from `begin` on. Hidden files and files with other extensions are skipped.

    Raises ValueError for a name that is not plain, or that occurs twice.
    """
    classes = set()
    for number, group in enumerate(groups):
        if group.class_name in classes:
            raise ValueError(f"{group.where}: {SECOND_CLASS}")
        classes.add(group.class_name)
        if number < begin.group:
            continue
        keys, images, size = set(), [], 0
        if group.class_name is not None:
            check_plain(group.class_name, group.where)
        for name, read in group.files:
            if not is_image(name):
                continue
            check_plain(name, group.where)
            try:
                class_name, number_of_class = label(group.class_name, name)
            except ValueError as error:
                raise ValueError(f"{group.where}: {error}") from None
            key = _key(group.class_name, name)
            if key in keys:
                raise ValueError(
                    f"{group.where}: {name} gets the key {key}, which another image has: rename one of them"
                    " (a key is the name without its extension, and with _ for other dots)"
                )
            keys.add(key)
            if number == begin.group and len(keys) <= begin.images:
                continue
            data = read()
            if not data:
                raise ValueError(f"{group.where}: {name} is empty: remove it")
            images.append(RawImage(class_name, name, key, number_of_class, data))
            size += len(data)
            if len(images) == BATCH_IMAGES or size >= BATCH_BYTES:
                yield ImageBatch(group.where, images, size, Position(number, len(keys)))
                images, size = [], 0
        if not keys:
            raise ValueError(f"{group.where} holds no images ({' '.join(EXTENSIONS)})")
        if images:
            yield ImageBatch(group.where, images, size, Position(number, len(keys)))


def check_plain(name: str, where: str) -> None:
    """Raises ValueError unless this is a plain name of a file or folder, of at most 200 bytes."""
    if (
        PLAIN.fullmatch(name) is None
        or not name.isprintable()
        or len(name.encode()) > 200
        or name in (".", "..")
    ):
        raise ValueError(f"{where}: {name!r} is no plain name for a file")


def _key(class_name: str | None, name: str) -> str:
    """Makes a key that is unique in the split. ILSVRC2012's file names are, with their class's WordNet id;
    others are unique within a class only."""
    stem = os.path.splitext(name)[0].replace(".", "_")
    if class_name is None or (WNID.fullmatch(class_name) and stem.startswith(f"{class_name}_")):
        return stem
    return f"{class_name}/{stem}"


class RawDataset:
    """A data set as it is published: archives or class folders of train and val, and ILSVRC2012's devkit."""

    def __init__(self, kind: str, parts: dict[str, str], hashed: bool, subset: bool):
        """kind: "imagenet", "tar" or "folder"; the latter two hold class tars or class folders. parts: path
        or url of train, val and devkit. hashed: compare the MD5 sums with the published ones. subset: accept
        other counts than ILSVRC2012's."""
        self.kind, self.parts, self.hashed, self.subset = kind, parts, hashed, subset
        found = {part: size_and_version(where) for part, where in parts.items()}
        self.bytes = {part: size for part, (size, _, _) in found.items()}
        self.versions = {part: version for part, (_, version, _) in found.items()}
        self.listings = {part: listing for part, (_, _, listing) in found.items() if listing}
        self.classes: list[dict[str, str]] = []  # "wnid" and "name", in label order
        self.labels: dict[str, Label] = {}
        self.counts: dict[str, int] = {}  # classes that train must have, images that val must have

    def read_classes(self) -> None:
        """Takes ILSVRC2012's classes from the devkit, and others from the names of class tars or folders."""
        if self.kind != "imagenet":
            split = "train" if "train" in self.parts else "val"
            if "://" in self.parts[split]:  # a request or more for each class
                print(f"looking for the classes in {shown(self.parts[split])}", flush=True)
            with self.open(split, hashed=False) as (groups, _):
                names = sorted(group.class_name or "" for group in groups)
            self.classes = [{"wnid": name, "name": name} for name in names]
            self.labels = dict.fromkeys(SPLITS, by_class(names))
            return
        with open_input(self.parts["devkit"], "md5" if self.hashed else None) as stream:
            self.check_md5("devkit", stream)
        with open_input(self.parts["devkit"]) as stream:
            devkit = Devkit.read(stream, self.subset)
        wnids = [wnid for wnid, _ in devkit.classes]
        self.classes = [{"wnid": wnid, "name": name} for wnid, name in devkit.classes]
        self.labels = {"train": by_class(wnids), "val": by_number(wnids, devkit.val_labels)}
        self.counts = {"train": len(wnids), "val": len(devkit.val_labels)}

    @contextmanager
    def open(self, split: str, hashed: bool) -> Iterator[tuple[Iterator[ImageGroup], Input | None]]:
        """Opens a split. Yields its groups, and their input; None instead of that for class folders."""
        where = self.parts[split]
        if self.kind != "imagenet" and Path(where).is_dir():
            yield class_folders(Path(where)), None
            return
        with open_input(where, "md5" if hashed else None) as stream:
            yield (flat_tar if self.kind == "imagenet" and split == "val" else class_tars)(stream), stream

    def check_md5(self, part: str, stream: Input | None) -> None:
        """Reads the rest of a part. Raises ValueError when its MD5 sum is not the published one."""
        if self.hashed and stream is not None and (found := stream.digest()) != MD5[part]:
            raise ValueError(
                f"{stream.where} is not the published file: its MD5 is {found}, expected {MD5[part]}. Get it"
                " again; or give --no_verify if another file is meant"
            )

    def check_counts(self, split: str, groups: int, images: int) -> None:
        found, what = (groups, "classes") if split == "train" else (images, "images")
        if not self.subset and found != self.counts.get(split, found):
            raise ValueError(
                f"{shown(self.parts[split])} holds {found:,} {what}, not {self.counts[split]:,}: get it"
                " again; or give --subset if a part is meant"
            )


def exists(where: str) -> bool:
    """True when a path or an object in S3 exists."""
    if where.startswith("s3://"):
        folder, _, name = where.rpartition("/")
        return ObjectStore(folder).size_and_etag(name) is not None
    return Path(where).exists()


def size_and_version(where: str) -> tuple[int, str | None, str | None]:
    """Returns the size in bytes of an archive, or of a folder's images; a version, which changes with the
    content, None when it is unknown; and for a folder a digest of classes, names and sizes of its images."""
    path = Path(where)
    if not path.is_dir():
        with open_input(where) as stream:
            return stream.size, stream.version, None
    print(f"listing the images in {where}", flush=True)
    rows = []
    for name, images in list_folders(path).items():
        for image in images:
            stat = os.stat(path / name / image)
            rows.append((f"{name}/{image}", stat.st_size, stat.st_mtime_ns))
    return sum(size for _, size, _ in rows), digest(rows), digest([row[:2] for row in rows])[:16]


def digest(rows: list[tuple]) -> str:
    """SHA-256 of a list of names, sizes, and what changes with a file."""
    return hashlib.sha256(repr(rows).encode(errors="surrogateescape")).hexdigest()


# --- Labels


def by_class(names: Sequence[str]) -> Label:
    numbers = {name: i for i, name in enumerate(names)}

    def label(class_name: str | None, name: str) -> tuple[str, int]:
        if class_name is None or class_name not in numbers:
            what = f"class {class_name} is none" if class_name else f"{name} is in none"
            raise ValueError(f"{what} of the {len(numbers):,} classes")
        return class_name, numbers[class_name]

    return label


def by_number(names: Sequence[str], labels: np.ndarray) -> Label:
    """Labels ILSVRC2012_val_00000001.JPEG with the first label, and so on. names: of the classes by label."""

    def label(_: str | None, name: str) -> tuple[str, int]:
        found = VAL_NAME.fullmatch(name)
        if found is None or not 1 <= int(found[1]) <= len(labels):
            raise ValueError(f"{name} is none of the {len(labels):,} images that the devkit has labels for")
        number = int(labels[int(found[1]) - 1])
        return names[number], number

    return label


def index_rows(listing: Listing, label: Label, where: Path) -> np.ndarray:
    """Makes the index of an archive: int64 [images, 4] of shard 0, offset, length and label."""
    names = [name.rpartition("/")[2] for name in listing.names]
    kept = np.array([is_image(name) for name in names], bool)
    names = [name for name in names if is_image(name)]
    archive = f"{where}: {listing.archive or ''}"
    if not 0 < len(names) == len(set(names)):
        raise ValueError(f"{archive} holds no images, or two of the same name")
    if (empty := listing.sizes[kept] == 0).any():
        raise ValueError(f"{archive}: {names[int(empty.argmax())]} is empty: remove it")
    if listing.archive is None:
        labels = np.array([label(None, name)[1] for name in names])
    else:
        class_name = listing.archive.rpartition("/")[2].removesuffix(".tar")
        labels = np.full(len(names), label(class_name, "")[1])
    columns = np.zeros(len(names), np.int64), listing.offsets[kept], listing.sizes[kept], labels
    return np.stack(columns, axis=1, dtype=np.int64)
