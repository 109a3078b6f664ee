"""Prepared data as shards: tar files, an index of the images in them, and a manifest that is written last.

    manifest.json      the classes, and for each split its shards and its index with their SHA-256
    <split>_index.npy  int64 [N, 4]: shard, offset of the image's bytes, their length, label; in this order
    <split>_names.txt  image names in the same order (onecurve/data/names.py); earlier versions wrote none
    <split>-00000.tar  each image's bytes and, as <key>.cls, its label

Kind "in_place" names shards of other people instead, on this host or in one bucket of S3. Kind "index", of
version 1.0 alone, names archives of this host, which may be sorted by class.

The 512 bytes before an image are its tar header. Messages take the image's key from there; of a name that is
too long for the header they show the beginning.
"""

import hashlib
import io
import os
import posixpath
import re
import tarfile
from collections import Counter
from dataclasses import dataclass, replace
from operator import itemgetter
from pathlib import Path
from typing import Any, TypedDict

import numpy as np

from onecurve.data.encoded import SPLITS, Encoded
from onecurve.system.files import fits, parse_json
from onecurve.system.s3 import ObjectStore
from onecurve.system.text import printable

FORMAT = 1
MANIFEST = "manifest.json"
JOURNAL = ".progress.json"  # of an unfinished preparation
SHARD = rf"({'|'.join(SPLITS)})-[0-9]{{5,}}\.tar"  # a shard's name
SHARD_FILE = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]*")
VALUES_OF_SHARD = itemgetter("file", "bytes", "images", "sha256")
SHA256 = re.compile("[0-9a-f]{64}")
HEADER_BYTES = 512  # of a tar's member
MANIFEST_LIMIT, INDEX_LIMIT = 2**28, 2**34  # bytes
UNFINISHED = (
    "the preparation is not complete: the same prep_imagenet.py command continues it. (Other tars in"
    " WebDataset's form need an index: prep_imagenet.py --from shards --format index)"
)


class ClassName(TypedDict):
    name: str
    wnid: str


@dataclass(frozen=True)
class Shard:
    file: str  # its name in the folder; for other kinds than "shards" an absolute path, or s3://bucket/key
    bytes: int
    images: int
    sha256: str | None  # None for other kinds than "shards", but in S3


@dataclass(frozen=True)
class SplitManifest:
    images: int
    index_sha256: str
    shards: tuple[Shard, ...]


@dataclass(frozen=True)
class ShardManifest:
    kind: str  # "shards", "index" or "in_place"
    name: str
    classes: tuple[str, ...]  # names in label order; names that occur twice with their WordNet ids
    splits: dict[str, SplitManifest]
    sha256: str  # of the manifest itself

    @property
    def store(self) -> str | None:
        """The prefix in S3 of other people's shards; None for all other kinds and places."""
        files = [shard.file for split in self.splits.values() for shard in split.shards]
        if self.kind != "in_place" or not files[0].startswith("s3://"):
            return None
        return "s3://" + posixpath.commonpath([posixpath.dirname(file[5:]) for file in files])

    def shards_in(self, split: str) -> tuple[Shard, ...]:
        """The split's shards, those that stay in S3 by their keys below `store`."""
        begin = f"{self.store}/"
        return tuple(
            replace(shard, file=shard.file.removeprefix(begin)) for shard in self.splits[split].shards
        )


KINDS = {  # of the manifest's values
    "kind": str,
    "name": str,
    "classes": list[ClassName],
    "splits": dict[str, SplitManifest],
}


def index_name(split: str) -> str:
    return f"{split}_index.npy"


def find_local(folder: Path) -> ShardManifest | None:
    """The manifest of a prepared folder; None if it is no prepared folder.

    Raises ValueError if it is damaged, or if a shard is missing or has another size.
    """
    path = folder / MANIFEST
    if not path.is_file():
        if any(_is_prepared(entry.name) for entry in os.scandir(folder)):
            raise ValueError(f"--data {folder} has no {MANIFEST}: {UNFINISHED}")
        return None
    manifest = parse_manifest(path.read_bytes(), str(path))
    for split in manifest.splits.values():
        for shard in split.shards if manifest.store is None else ():
            _check_size(folder / shard.file, shard.bytes)
    return manifest


def _is_prepared(name: str) -> bool:
    """True if a preparation writes files of this name; not for the tars that it reads."""
    indices = [index_name(split) for split in SPLITS]
    return name in (JOURNAL, *indices) or re.fullmatch(SHARD, name) is not None


def _check_size(path: Path, size: int) -> None:
    try:
        found = path.stat().st_size
    except OSError as error:
        raise ValueError(f"{path}: {error.strerror}, though {MANIFEST} names it: prepare again") from None
    if found != size:
        raise ValueError(f"{path} has {found:,} bytes where {MANIFEST} says {size:,}: prepare again")


def find_stored(store: ObjectStore) -> tuple[ShardManifest, bytes]:
    """The manifest below a prefix, and its bytes. Raises ValueError when it is missing or damaged."""
    content = store.read(MANIFEST, MANIFEST_LIMIT)
    if content is None:
        unfinished = any(map(_is_prepared, store.list()))
        why = UNFINISHED if unfinished else "prep_imagenet.py --out prepares data there"
        raise ValueError(f"--data {store.url} has no {MANIFEST}: {why}")
    manifest = parse_manifest(content, f"{store.url}/{MANIFEST}")
    if manifest.kind != "shards" and manifest.store is None:
        raise ValueError(f"--data {store.url} is an index of one host's files: give its folder on that host")
    return manifest, content


def parse_manifest(content: bytes, where: str) -> ShardManifest:
    """Parses a manifest. Raises ValueError that names the first problem."""
    try:
        values = parse_json(content, where)
    except ValueError as error:
        raise ValueError(f"{error}: prepare again") from None
    if (found := values.get("format")) != FORMAT:
        raise ValueError(
            f"{where} has format {_brief(found)}, this code knows {FORMAT}: prepare again, or update"
        )
    wrong = [name for name, kind in KINDS.items() if not fits(values.get(name), kind)]
    if not wrong and not 0 < len({c["wnid"] for c in values["classes"]}) == len(values["classes"]):
        wrong = ["classes: they must differ"]
    if wrong:
        raise ValueError(f"{where} is no manifest of shards (look at its {', '.join(wrong)}): prepare again")
    splits = {}
    for split, found in values["splits"].items():
        shards = tuple(Shard(*VALUES_OF_SHARD(shard)) for shard in found["shards"])
        splits[split] = SplitManifest(found["images"], found["index_sha256"], shards)
    classes, sha256 = _class_names(values["classes"]), hashlib.sha256(content).hexdigest()
    manifest = ShardManifest(values["kind"], values["name"], classes, splits, sha256)
    if problem := _problem(manifest):
        raise ValueError(f"{where} is no manifest of shards ({problem}): prepare again")
    if "train" not in splits:
        raise ValueError(f"{where} has no split train: prepare it, too")
    return manifest


def _problem(manifest: ShardManifest) -> str | None:
    """Returns an error for values that no preparation writes, else None."""
    if manifest.kind not in ("shards", "index", "in_place"):
        return f"kind {_brief(manifest.kind)}"
    has_shards, files, places = manifest.kind == "shards", set[str](), set[str]()
    for split in manifest.splits.values():
        if not 0 < split.images == sum(shard.images for shard in split.shards):
            return f"images {split.images}, which is not the sum of its shards'"
        if not SHA256.fullmatch(split.index_sha256):
            return f"SHA-256 {_brief(split.index_sha256)}"
        for shard in split.shards:
            in_store = manifest.kind == "in_place" and shard.file.startswith("s3://")
            is_named = (
                SHARD_FILE.fullmatch(shard.file) if has_shards else in_store or os.path.isabs(shard.file)
            )
            is_known = not (has_shards or in_store) or SHA256.fullmatch(shard.sha256 or "")
            is_new = manifest.kind == "index" or shard.file not in files
            if not (is_named and is_known and is_new and shard.bytes >= 0 and shard.images >= 0):
                return f"shard {_brief(shard.file)}"
            files.add(shard.file)
            places.add(shard.file.split("/")[2] if in_store else "")
    if manifest.kind == "in_place" and len(places) > 1:
        return "shards in more than one bucket, or of this host, too"
    return None


def _brief(value: Any) -> str:
    """A value of an untrusted manifest, for a message."""
    return ascii(value)[:80]


def _class_names(classes: list[dict[str, str]]) -> tuple[str, ...]:
    """Class names in label order, with the WordNet id if two have the same: ILSVRC2012 has two cranes."""
    times = Counter(c["name"] for c in classes)
    return tuple(c["name"] if times[c["name"]] == 1 else f"{c['name']} ({c['wnid']})" for c in classes)


def parse_shard_index(content: bytes, manifest: ShardManifest, split: str, where: str) -> np.ndarray:
    """Parses an index: int64 [N, 4]. Raises ValueError unless it agrees with the manifest."""
    expected = manifest.splits[split]
    if hashlib.sha256(content).hexdigest() != expected.index_sha256:
        raise ValueError(f"{where} is not the index that {MANIFEST} names (SHA-256): prepare again")
    try:
        rows = np.load(io.BytesIO(content), allow_pickle=False)
    except Exception:  # numpy parses the header as Python, which fails in many ways
        raise ValueError(f"{where} is no array: prepare again") from None
    if not isinstance(rows, np.ndarray) or rows.dtype != np.int64 or rows.shape != (expected.images, 4):
        raise ValueError(f"{where} is no array of int64 [{expected.images}, 4]: prepare again")
    shard, offset, length, label = rows.T
    if shard.min() < 0 or shard.max() >= len(expected.shards):
        raise ValueError(f"{where} names shards that do not exist: prepare again")
    counts = np.bincount(shard, minlength=len(expected.shards))
    ends = np.array([shard.bytes for shard in expected.shards])[shard]
    same = shard[1:] == shard[:-1]
    problems = {
        # The first check, so that the sums below can't overflow.
        "has images outside of their shards": (
            (offset < HEADER_BYTES) | (length < 1) | (offset > ends) | (length > ends - offset)
        ).any(),
        "has other numbers of images": (counts != [shard.images for shard in expected.shards]).any(),
        "is not sorted": (np.diff(shard) < 0).any() or (same & (np.diff(offset) <= 0)).any(),
        "has images that overlap": (same & (offset[1:] < offset[:-1] + length[:-1])).any(),
        "has labels without a class": label.min() < 0 or label.max() >= len(manifest.classes),
    }
    if wrong := [problem for problem, found in problems.items() if found]:
        raise ValueError(f"{where} {wrong[0]}: prepare again")
    return rows


class ShardImages(Encoded):
    """Those in tar files. index: the cached file; files: of the shards. None stays open: that would keep the
    space of a shard that the cache has removed."""

    def __init__(self, index: Path, files: tuple[str, ...], part: Path | None = None):
        self.rows, self.files = np.asarray(np.load(index, mmap_mode="r")), files  # int64 [N, 4]
        super().__init__(len(self.rows), part)

    def place(self, i: int) -> tuple[str, int, int]:
        shard, offset, length, _ = self.rows[self.ids[i]].tolist()
        return self.files[shard], offset, length

    def where(self, i: int) -> str:
        """Its shard and offset, and its key if it has a tar header."""
        shard, offset, _ = self.place(i)
        name = self.name(i)
        return printable(f"{shard}, offset {offset}{name and f', key {os.path.splitext(name)[0]}'}")

    def name(self, i: int) -> str:
        """The name in the tar header of image i; "" without a header."""
        shard, offset, _ = self.place(i)
        with open(shard, "rb", buffering=0) as file:
            header = os.pread(file.fileno(), HEADER_BYTES, offset - HEADER_BYTES)
        try:
            # Bytes that are no header fail its checksum, and messages must not show them.
            return printable(tarfile.TarInfo.frombuf(header, "utf-8", "surrogateescape").name)
        except tarfile.HeaderError:
            return ""
