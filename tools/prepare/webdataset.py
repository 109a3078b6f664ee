"""WebDataset's shards of other people: tars of samples, indexed where they are, on this host or in S3.

Consecutive members with the same key are a sample. A key is a member's path up to the first dot of its last
part, and the rest is the member's field, as in `n01440764/a.jpg` and `n01440764/a.cls`. A sample has one
image (jpg, png, ...), and its class as digits (cls), or in JSON (json: "label" or "cls"). Other fields are
left out.
https://github.com/webdataset/webdataset
"""

import fnmatch
import glob
import io
import itertools
import os
import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import numpy as np

from common.data.decode import EXTENSIONS, SPLITS
from common.system.files import parse_json, write_bytes
from common.system.s3 import ObjectStore
from tools.prepare.archives import TarMember, members
from tools.prepare.inputs import Input, open_input, open_object
from tools.prepare.source import RawDataset, digest

NAMES = {"train": ("train",), "val": ("val", "test")}  # in the names of shards or their folders
WILDCARD = re.compile(r"[*?[]")
BRACES = re.compile(r"\{(\d+)\.\.(\d+)\}")  # WebDataset's, as in train-{0000..1023}.tar
IMAGES = tuple(extension.removeprefix(".") for extension in EXTENSIONS)
CLASSES, JSON_NAMES = ("cls", "json"), ("label", "cls")
LARGEST_FIELD_BYTES = 2**20
LARGEST_CLASS = 2**20
THREADS = 8  # read shards; one waits for S3 most of its time


class ShardFile(NamedTuple):
    url: str  # an absolute path, or s3://bucket/key
    bytes: int
    version: str | None


class IndexedShard(NamedTuple):
    rows: np.ndarray  # int64 [images, 3]: offset, length and label
    sha256: str | None  # of a shard in S3: each host checks its copy


class Places:
    """The disks of this host and buckets. All that is in a bucket is read by one client."""

    def __init__(self) -> None:
        self.stores: dict[str, ObjectStore] = {}

    def store(self, url: str) -> tuple[ObjectStore, str]:
        """A bucket, and the key in it that an s3:// url names."""
        bucket, _, key = url.removeprefix("s3://").partition("/")
        return self.stores.setdefault(bucket, ObjectStore(f"s3://{bucket}")), key

    def open(self, url: str, hashed: str | None = None) -> Input:
        if url.startswith("s3://"):
            return open_object(*self.store(url), hashed)
        return open_input(url, hashed)

    def match(self, pattern: str) -> list[str]:
        """The paths or urls that match a pattern of a shell, sorted; without wildcards itself, if it is there
        or not."""
        pattern = pattern if pattern.startswith("s3://") else os.path.abspath(os.path.expanduser(pattern))
        if not WILDCARD.search(pattern):
            return [pattern]
        if not pattern.startswith("s3://"):
            return sorted(glob.glob(pattern))
        store, key = self.store(pattern)
        names = [name for name in store.list(WILDCARD.split(key)[0]) if name.count("/") == key.count("/")]
        return [f"{store.url}/{name}" for name in names if fnmatch.fnmatchcase(name, key)]


class WebDataset(RawDataset):
    """The shards of train and val. Patterns name them: of a shell, or with braces."""

    def __init__(self, patterns: dict[str, str], class_file: str | None):
        """class_file: path or url of the names of the classes, one a line; None: their numbers."""
        self.kind, self.parts, self.hashed, self.subset = "shards", patterns, False, True
        self.places = Places()
        self.files = {split: find_shards(pattern, self.places) for split, pattern in patterns.items()}
        urls = [file.url for files in self.files.values() for file in files]
        if len({url.split("/")[2] if url.startswith("s3://") else "" for url in urls}) > 1:
            raise ValueError("the shards of train and val must lie all on this host, or all in one bucket")
        self.bytes = {split: sum(file.bytes for file in files) for split, files in self.files.items()}
        self.versions = {split: digest([*map(tuple, files)]) for split, files in self.files.items()}
        self.listings, self.labels, self.counts = {}, {}, {}
        self.classes: list[dict[str, str]] = []
        self.class_file = class_file

    def read_classes(self) -> None:
        """Reads the names of the classes; without them they follow from the labels, in name_classes."""
        if self.class_file is None:
            return
        with self.places.open(self.class_file) as stream:
            if stream.size > LARGEST_FIELD_BYTES:
                raise ValueError(f"{stream.where} is too large for a list of classes")
            names = stream.read(stream.size).decode(errors="replace").splitlines()
        self.classes = [{"wnid": str(label), "name": name.strip()} for label, name in enumerate(names)]

    def name_classes(self, largest: int) -> None:
        """Names the classes by their numbers, or checks that each label has a name. largest: label."""
        if self.class_file is None:
            self.classes = [{"wnid": str(label), "name": str(label)} for label in range(largest + 1)]
        elif largest >= len(self.classes):
            raise ValueError(
                f"{self.class_file} has {len(self.classes):,} names, and there is a label {largest}: give a"
                " line for each class"
            )


def find_patterns(base: str) -> dict[str, str]:
    """The patterns of the splits in a folder or below a prefix, by names of shards or of their folders."""
    base, places, found = glob.escape(base.rstrip("/")), Places(), {}
    for split in SPLITS:
        patterns = [
            f"{base}/{form}" for word in NAMES[split] for form in (f"*{word}*.tar", f"*{word}*/*.tar")
        ]
        if pattern := next((pattern for pattern in patterns if places.match(pattern)), None):
            found[split] = pattern
    return found


def find_shards(pattern: str, places: Places) -> list[ShardFile]:
    """The shards that a pattern names, in order. Raises ValueError when there are none, or one is missing."""

    def about(name: str) -> ShardFile:
        with places.open(name) as stream:
            return ShardFile(name, stream.size, stream.version)

    names = [name for plain in _without_braces(pattern) for name in places.match(plain)]
    if not names:
        raise ValueError(
            f"{pattern} names no shards: give paths or s3:// urls with *, ? or braces, as"
            " 'FOLDER/train-{0000..1023}.tar'"
        )
    with ThreadPoolExecutor(THREADS) as pool:  # a request for each object in S3
        return list(pool.map(about, dict.fromkeys(names)))


def _without_braces(pattern: str) -> list[str]:
    """The patterns that braces stand for."""
    if (braces := BRACES.search(pattern)) is None:
        return [pattern]
    first, last = braces.groups()
    numbers = [str(n).zfill(len(first)) for n in range(int(first), int(last) + 1)]
    return [name for n in numbers for name in _without_braces(pattern.replace(braces[0], n, 1))]


# --- One shard


def index_shard(file: ShardFile, places: Places) -> IndexedShard:
    """Reads the headers and classes of a shard; one in S3 whole, for its SHA-256.

    Raises ValueError that names the sample: without an image or a class, or with two images.
    """
    remote = file.url.startswith("s3://")
    with places.open(file.url, "sha256" if remote else None) as stream:
        rows = np.array(list(_rows(stream)), np.int64).reshape(-1, 3)
        sha256 = stream.digest() if remote else None
    if not len(rows):
        raise ValueError(f"{file.url} holds no samples with an image ({' '.join(IMAGES)}) and its class")
    return IndexedShard(rows, sha256)


def index_once(path: Path, file: ShardFile, places: Places) -> IndexedShard:
    """Indexes a shard, or reads what an earlier start has stored in this file, an .npz."""
    if path.exists():
        with np.load(path, allow_pickle=False) as found:
            return IndexedShard(found["rows"], str(found["sha256"]) or None)
    shard, content = index_shard(file, places), io.BytesIO()
    np.savez(content, rows=shard.rows, sha256=shard.sha256 or "")
    write_bytes(path, content.getvalue())
    return shard


def _rows(stream: Input) -> Iterator[tuple[int, int, int]]:
    """Yields offset, length and label of each image. Contents of images are not read."""
    for key, sample in itertools.groupby(members(stream), _key):
        images, classes, where = [], {}, f"{stream.where}: {key}"
        for member in sample:
            field = member.name[len(key) + 1 :].lower()
            if field in IMAGES:
                images.append((member.offset, member.size))
            elif field in CLASSES:
                if member.size > LARGEST_FIELD_BYTES:
                    raise ValueError(f"{where}.{field} has {member.size:,} bytes, too many for a class")
                classes[field] = member.read()
        if len(images) > 1 or (classes and not images):
            raise ValueError(f"{where} has {len(images)} images ({' '.join(IMAGES)}), not one")
        if images:
            yield (*images[0], _label(classes, where))


def _key(member: TarMember) -> str:
    folder, slash, name = member.name.rpartition("/")
    return f"{folder}{slash}{name.partition('.')[0]}"


def _label(classes: dict[str, bytes], where: str) -> int:
    """The label of a sample: an int, or digits. Raises ValueError for anything else."""
    found: object = None
    if "cls" in classes:
        found = classes["cls"].decode(errors="replace").strip()
    elif "json" in classes:
        about = parse_json(classes["json"], f"{where}.json")
        found = next((about[name] for name in JSON_NAMES if name in about), None)
    if found is None:
        names = " or ".join(JSON_NAMES)
        raise ValueError(f"{where} has no class: digits in a .cls, or a number in a .json as {names}")
    text = "" if isinstance(found, bool) else str(found)
    if not (text.isascii() and text.isdigit() and len(text) < 9 and int(text) < LARGEST_CLASS):
        raise ValueError(
            f"{where}: its class is {ascii(found)[:80]}, not a number from 0 to {LARGEST_CLASS:,}"
        )
    return int(text)
