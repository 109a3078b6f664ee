"""WebDataset's shards of other people: tars of samples, indexed where they are, on this host or in S3.

Consecutive members with the same key are a sample. A key is a member's path up to the first dot of its last
part, and the rest is the member's field, as in `n01440764/a.jpg` and `n01440764/a.cls`. A sample has one
image (jpg, png, ...), and its class as digits (cls), or in JSON (json: "label" or "cls"). Other fields are
left out.
https://github.com/webdataset/webdataset
"""

import fnmatch
import glob
import itertools
import os
import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

from onecurve.data.decode import EXTENSIONS
from onecurve.data.encoded import SPLITS
from onecurve.system.files import parse_json
from onecurve.system.s3 import ObjectStore
from tools.prepare.archives import Member, members, open_stream
from tools.prepare.originals import Originals, digest

NAMES = {"train": ("train",), "val": ("val", "test")}  # in the names of shards or their folders
WILDCARD = re.compile(r"[*?[]")
BRACES = re.compile(r"\{(\d+)\.\.(\d+)\}")  # WebDataset's, as in train-{0000..1023}.tar
IMAGES = tuple(extension.removeprefix(".") for extension in EXTENSIONS)
CLASSES, JSON_NAMES = ("cls", "json"), ("label", "cls")
LARGEST_FIELD_BYTES = 2**20
LARGEST_CLASS = 2**20
THREADS = 8  # read shards; one waits for S3 most of its time


class Tar(NamedTuple):
    url: str  # an absolute path, or s3://bucket/key
    bytes: int
    version: str | None


class Row(NamedTuple):
    offset: int
    length: int
    label: int
    name: str  # of the image's member


def bucket_of(url: str) -> ObjectStore | None:
    """The bucket of an s3:// url; None for a path."""
    return ObjectStore("/".join(url.split("/")[:3])) if url.startswith("s3://") else None


class WebDataset(Originals):
    """The shards of train and val. Patterns name them: of a shell, or with braces."""

    def __init__(self, patterns: dict[str, str], class_file: str | None):
        """class_file: path or url of the names of the classes, one a line; None: their numbers."""
        self.class_file = class_file
        super().__init__(patterns)

    def find(self) -> None:
        self.store, *others = map(bucket_of, self.parts.values())  # one client for all shards
        if any((store and store.url) != (self.store and self.store.url) for store in others):
            raise ValueError("the shards of train and val must lie all on this host, or all in one bucket")
        self.shards = {split: find_shards(pattern, self.store) for split, pattern in self.parts.items()}
        names = [{shard.url for shard in shards} for shards in self.shards.values()]
        if len(names) == 2 and (both := names[0] & names[1]):
            raise ValueError(f"{min(both)} is in train and in val: give --train and --val")
        for split, shards in self.shards.items():
            self.bytes[split] = sum(shard.bytes for shard in shards)
            self.versions[split] = digest([*map(tuple, shards)])

    def read_classes(self) -> None:
        """Read the names of the classes; without them they follow from the labels, in name_classes."""
        if self.class_file is None:
            return
        with open_stream(self.class_file) as stream:
            names = stream.read(LARGEST_FIELD_BYTES).decode(errors="replace").splitlines()
        self.classes = [{"wnid": str(label), "name": name.strip()} for label, name in enumerate(names)]

    def name_classes(self, largest: int) -> None:
        """Name the classes by their numbers, or checks that each label has a name. largest: label."""
        if self.class_file is None:
            self.classes = [{"wnid": str(label), "name": str(label)} for label in range(largest + 1)]
        elif largest >= len(self.classes):
            raise ValueError(
                f"{self.class_file} has {len(self.classes):,} names, and there is a label {largest}: give a"
                " line for each class"
            )

    def index(self, tar: Tar) -> tuple[list[Row], str | None]:
        """Offset, length, label and name of each image of a shard. One in S3 is read whole, for its SHA-256.

        Raises ValueError that names the sample: without an image or a class, or with two images.
        """
        with open_stream(tar.url, "sha256" if self.store else None, self.store, headers=True) as stream:
            rows = list(_rows(stream.archive))
            sha256 = stream.digest() if self.store else None
        if not rows:
            raise ValueError(f"{tar.url} holds no samples with an image ({' '.join(IMAGES)}) and its class")
        return rows, sha256


def find_patterns(base: str) -> dict[str, str]:
    """The patterns of the splits in a folder or below a prefix, by names of shards or of their folders."""
    base, store, found = glob.escape(base.rstrip("/")), bucket_of(base), {}
    for split in SPLITS:
        forms = (form for word in NAMES[split] for form in (f"*{word}*.tar", f"*{word}*/*.tar"))
        if pattern := next((f"{base}/{form}" for form in forms if match(f"{base}/{form}", store)), None):
            found[split] = pattern
    return found


def match(pattern: str, store: ObjectStore | None) -> list[str]:
    """The paths or urls that match a pattern of a shell, sorted; without wildcards the pattern itself."""
    if store is None:
        pattern = os.path.abspath(os.path.expanduser(pattern))
        return sorted(glob.glob(pattern)) if WILDCARD.search(pattern) else [pattern]
    if not WILDCARD.search(pattern):
        return [pattern]
    bucket = f"{store.url}/"
    urls = [bucket + name for name in store.list(WILDCARD.split(pattern.removeprefix(bucket))[0])]
    parts = re.findall("/[.]?", pattern)  # as on a disk no wildcard is a slash or begins a hidden name
    return [url for url in fnmatch.filter(urls, pattern) if re.findall("/[.]?", url) == parts]


def find_shards(pattern: str, store: ObjectStore | None) -> list[Tar]:
    """The shards that a pattern names, in order. Raises ValueError when there are none, or one is missing."""

    def tar(name: str) -> Tar:
        with open_stream(name, store=store) as stream:
            return Tar(name, stream.size, stream.version)

    names = [name for plain in _without_braces(pattern) for name in match(plain, store)]
    if not names:
        raise ValueError(
            f"{pattern} names no shards: give paths or s3:// urls with *, ? or braces, as"
            " 'FOLDER/train-{0000..1023}.tar'"
        )
    with ThreadPoolExecutor(THREADS) as pool:  # a request for each object in S3
        return list(pool.map(tar, dict.fromkeys(names)))


def _without_braces(pattern: str) -> list[str]:
    """The patterns that braces stand for."""
    if (braces := BRACES.search(pattern)) is None:
        return [pattern]
    first, last = braces.groups()
    numbers = [str(n).zfill(len(first)) for n in range(int(first), int(last) + 1)]
    return [name for n in numbers for name in _without_braces(pattern.replace(braces[0], n, 1))]


def _rows(archive: Member) -> Iterator[Row]:
    """Yield offset, length, label and name of each image. Contents of images are not read."""
    for key, sample in itertools.groupby(members(archive), _key):
        images, classes, where = [], {}, f"{archive.where}: {key}"
        for member in sample:
            field = member.name[len(key) + 1 :].lower()
            if field in IMAGES:
                if not member.size:
                    raise ValueError(f"{where} has an empty image: remove the sample")
                images.append((member.offset, member.size, member.name))
            elif field in CLASSES:
                if member.size > LARGEST_FIELD_BYTES:
                    raise ValueError(f"{where}.{field} has {member.size:,} bytes, too many for a class")
                classes[field] = member.read()
        if len(images) > 1 or (classes and not images):
            raise ValueError(f"{where} has {len(images)} images ({' '.join(IMAGES)}), not one")
        if images:
            offset, length, name = images[0]
            yield Row(offset, length, _label(classes, where), name)


def _key(member: Member) -> str:
    folder, slash, name = member.name.rpartition("/")
    return f"{folder}{slash}{name.partition('.')[0]}"


def _label(classes: dict[str, bytes], where: str) -> int:
    """The label of a sample: an int, or digits. Raises ValueError for anything else."""
    value: object = None
    if "cls" in classes:
        value = classes["cls"].decode(errors="replace").strip()
    elif "json" in classes:
        fields = parse_json(classes["json"], f"{where}.json")
        value = next((fields[name] for name in JSON_NAMES if name in fields), None)
    if value is None:
        names = " or ".join(JSON_NAMES)
        raise ValueError(f"{where} has no class: digits in a .cls, or a number in a .json as {names}")
    text = "" if isinstance(value, bool) else str(value)
    if not (text.isascii() and text.isdigit() and len(text) < 9 and int(text) < LARGEST_CLASS):
        raise ValueError(
            f"{where}: its class is {ascii(value)[:80]}, not a number from 0 to {LARGEST_CLASS:,}"
        )
    return int(text)
