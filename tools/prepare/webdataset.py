"""Index existing WebDataset shards on this host or in S3, without copying them.

A shard is a tar (https://github.com/webdataset/webdataset). Consecutive members with the same key form a
sample. The key is the member's path up to the first dot in the file name, and the rest is the field. For
example, `n01440764/a.jpg` and `n01440764/a.cls` are two fields of one sample. A sample contains one image
(jpg, png, ...) and a class, either as digits (cls) or as "label" or "cls" in JSON (json). Other fields are
ignored.
"""

import fnmatch
import glob
import itertools
import os
import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

from onecurve.data.decode import IMAGE_EXTENSIONS
from onecurve.data.encoded import SPLITS
from onecurve.system.files import parse_json
from onecurve.system.s3 import ObjectStore
from tools.prepare.archives import Member, members, open_stream
from tools.prepare.originals import Originals, digest

KEYWORDS = {"train": ("train",), "val": ("val", "test")}  # words in the names of a split's shards or folders
WILDCARD = re.compile(r"[*?[]")
BRACES = re.compile(r"\{(\d+)\.\.(\d+)\}")  # braces in WebDataset patterns, such as train-{0000..1023}.tar
IMAGE_FIELDS = tuple(extension.removeprefix(".") for extension in IMAGE_EXTENSIONS)
CLASS_FIELDS, JSON_CLASS_KEYS = ("cls", "json"), ("label", "cls")
LARGEST_FIELD_BYTES = 2**20
LARGEST_CLASS = 2**20
THREADS = 8  # number of threads that read shards. The threads mostly wait for S3


class ShardTar(NamedTuple):
    url: str  # absolute path or s3://bucket/key
    bytes: int
    version: str | None


class IndexRow(NamedTuple):
    offset: int
    length: int
    label: int
    name: str  # name of the archive member that contains the image


def bucket_of(url: str) -> ObjectStore | None:
    """Return a client of the bucket in an s3:// URL, or None for a path."""
    return ObjectStore("/".join(url.split("/")[:3])) if url.startswith("s3://") else None


class WebDataset(Originals):
    """Train and val shards, specified by shell patterns or brace patterns."""

    def __init__(self, patterns: dict[str, str], class_file: str | None):
        """Find the shards.

        `class_file` contains one class name per line. If class_file is None, the class names are numbers.
        """
        self.class_file = class_file
        super().__init__(patterns)

    def find(self) -> None:
        self.store, *others = map(bucket_of, self.parts.values())  # one client for all shards
        if any((store and store.url) != (self.store and self.store.url) for store in others):
            remedy = "Put all shards on this host or into one bucket."
            raise ValueError(f"train and val are in different places. {remedy}")
        self.shards = {split: find_shards(pattern, self.store) for split, pattern in self.parts.items()}
        urls = [{shard.url for shard in shards} for shards in self.shards.values()]
        if len(urls) == 2 and (common := urls[0] & urls[1]):
            raise ValueError(f"{min(common)} is in both train and val. Pass --train and --val.")
        for split, shards in self.shards.items():
            self.bytes[split] = sum(shard.bytes for shard in shards)
            self.versions[split] = digest([*map(tuple, shards)])

    def read_classes(self) -> None:
        """Read the class names from the file.

        Without a file, name_classes derives the names from the labels.
        """
        if self.class_file is None:
            return
        with open_stream(self.class_file) as stream:
            names = stream.read(LARGEST_FIELD_BYTES).decode(errors="replace").splitlines()
        self.classes = [{"wnid": str(label), "name": name.strip()} for label, name in enumerate(names)]

    def name_classes(self, largest: int) -> None:
        """Use numbers as class names, or check that each label up to `largest` has a name in the file."""
        if self.class_file is None:
            self.classes = [{"wnid": str(label), "name": str(label)} for label in range(largest + 1)]
        elif largest >= len(self.classes):
            raise ValueError(
                f"{self.class_file} contains {len(self.classes):,} class names, but a sample has the label"
                f" {largest}. Write one class name per line."
            )

    def index(self, tar: ShardTar) -> tuple[list[IndexRow], str | None]:
        """Return a shard's index.

        Returns:
            A tuple of one row per image and a SHA-256. A shard in S3 is read completely to compute the
            SHA-256. For a local shard, the SHA-256 is None.

        Raises:
            ValueError: If a sample has no image, several images or no class. The message contains the
                sample's key.
        """
        with open_stream(tar.url, "sha256" if self.store else None, self.store, headers=True) as stream:
            rows = list(_index_rows(stream.archive))
            sha256 = stream.digest() if self.store else None
        if not rows:
            raise ValueError(
                f"{tar.url} contains no sample with an image ({' '.join(IMAGE_FIELDS)}) and a class"
            )
        return rows, sha256


def find_patterns(base: str) -> dict[str, str]:
    """Find a pattern for each split in a folder or prefix, based on the names of shards or folders."""
    base, store, patterns = glob.escape(base.rstrip("/")), bucket_of(base), {}
    for split in SPLITS:
        candidates = [f"{base}/*{word}*{rest}" for word in KEYWORDS[split] for rest in (".tar", "/*.tar")]
        if pattern := next((candidate for candidate in candidates if match_pattern(candidate, store)), None):
            patterns[split] = pattern
    return patterns


def match_pattern(pattern: str, store: ObjectStore | None) -> list[str]:
    """Return the paths or URLs that match a shell pattern, sorted.

    Return text without wildcards unchanged.
    """
    if store is None:
        pattern = os.path.abspath(os.path.expanduser(pattern))
        return sorted(glob.glob(pattern)) if WILDCARD.search(pattern) else [pattern]
    if not WILDCARD.search(pattern):
        return [pattern]
    prefix = f"{store.url}/"
    urls = [prefix + name for name in store.list(WILDCARD.split(pattern.removeprefix(prefix))[0])]
    # Wildcards match neither a slash nor a leading dot, as on a disk.
    separators = re.findall("/[.]?", pattern)
    return [url for url in fnmatch.filter(urls, pattern) if re.findall("/[.]?", url) == separators]


def find_shards(pattern: str, store: ObjectStore | None) -> list[ShardTar]:
    """Return the shards that match a pattern, in order. Raise ValueError if one or all shards are missing."""

    def tar(name: str) -> ShardTar:
        with open_stream(name, store=store) as stream:
            return ShardTar(name, stream.size, stream.version)

    names = [name for expanded in _without_braces(pattern) for name in match_pattern(expanded, store)]
    if not names:
        raise ValueError(
            f"{pattern} matches no shards. Pass paths or s3:// URLs with *, ? or braces, for example"
            " 'FOLDER/train-{0000..1023}.tar'."
        )
    with ThreadPoolExecutor(THREADS) as pool:  # because S3 needs one request per object
        return list(pool.map(tar, dict.fromkeys(names)))


def _without_braces(pattern: str) -> list[str]:
    """Return all names to which a brace pattern expands."""
    if (braces := BRACES.search(pattern)) is None:
        return [pattern]
    first, last = braces.groups()
    numbers = [str(number).zfill(len(first)) for number in range(int(first), int(last) + 1)]
    return [name for number in numbers for name in _without_braces(pattern.replace(braces[0], number, 1))]


def _index_rows(archive: Member) -> Iterator[IndexRow]:
    """Yield an index row for each image, without reading the images."""
    for key, sample in itertools.groupby(members(archive), _sample_key):
        images, classes, where = [], {}, f"{archive.where}: {key}"
        for member in sample:
            field = member.name[len(key) + 1 :].lower()
            if field in IMAGE_FIELDS:
                if not member.size:
                    raise ValueError(f"{where} contains an empty image. Remove the sample.")
                images.append((member.offset, member.size, member.name))
            elif field in CLASS_FIELDS:
                if member.size > LARGEST_FIELD_BYTES:
                    problem = f"has {member.size:,} bytes, which is too large for a class"
                    raise ValueError(f"{where}.{field} {problem}")
                classes[field] = member.read()
        if len(images) > 1 or (classes and not images):
            raise ValueError(
                f"{where} contains {len(images)} images ({' '.join(IMAGE_FIELDS)}) instead of one"
            )
        if images:
            offset, length, name = images[0]
            yield IndexRow(offset, length, _sample_label(classes, where), name)


def _sample_key(member: Member) -> str:
    folder, slash, name = member.name.rpartition("/")
    return f"{folder}{slash}{name.partition('.')[0]}"


def _sample_label(classes: dict[str, bytes], where: str) -> int:
    """Return a sample's label from an int or a string of digits. Raise ValueError for anything else."""
    value: object = None
    if "cls" in classes:
        value = classes["cls"].decode(errors="replace").strip()
    elif "json" in classes:
        content = parse_json(classes["json"], f"{where}.json")
        value = next((content[name] for name in JSON_CLASS_KEYS if name in content), None)
    if value is None:
        names = " or ".join(JSON_CLASS_KEYS)
        remedy = f"Add digits in a .cls file, or a number as {names} in a .json file."
        raise ValueError(f"{where} contains no class. {remedy}")
    digits = "" if isinstance(value, bool) else str(value)
    if not (digits.isascii() and digits.isdigit() and len(digits) < 9 and int(digits) < LARGEST_CLASS):
        expected = f"a number from 0 to {LARGEST_CLASS:,}"
        raise ValueError(f"the class of {where} is {ascii(value)[:80]} instead of {expected}")
    return int(digits)
