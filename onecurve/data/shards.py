"""Prepared data in shards: tar files, an index of the images, and a manifest that is written last.

    manifest.json      the classes, and each split's shards and index with their SHA-256
    <split>_index.npy  int64 [N, 4], ascending: shard, offset and length of the image's bytes, label
    <split>_names.txt  image names in index order (onecurve/data/names.py); absent in earlier versions
    <split>-00000.tar  the bytes of each image, followed by its label in <key>.cls

A manifest of kind "in_place" refers to existing shards, on this host or in one S3 bucket. A manifest of kind
"index", which only version 1.0 wrote, refers to archives on this host that may be sorted by class.

The 512 bytes before an image are its tar header. Messages show the image's key from the header. If the name
does not fit into the header, messages show only the beginning of the key.
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
JOURNAL = ".progress.json"  # records the progress of an unfinished preparation
SHARD = rf"({'|'.join(SPLITS)})-[0-9]{{5,}}\.tar"  # file name of a shard
SHARD_FILE = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]*")
VALUES_OF_SHARD = itemgetter("file", "bytes", "images", "sha256")
SHA256 = re.compile("[0-9a-f]{64}")
HEADER_BYTES = 512  # header of a tar member
MANIFEST_LIMIT, INDEX_LIMIT = 2**28, 2**34  # maximum file sizes in bytes
UNFINISHED = (
    "the preparation is not complete. Run the same prep_imagenet.py command again to continue it. (Other"
    " tar files in WebDataset format need an index: prep_imagenet.py --from shards --format index)"
)


class ClassName(TypedDict):
    name: str
    wnid: str


@dataclass(frozen=True)
class Shard:
    file: str  # file name; an absolute path or s3://bucket/key for kinds other than "shards"
    bytes: int
    images: int
    sha256: str | None  # None unless the manifest is of kind "shards" on this host


@dataclass(frozen=True)
class SplitManifest:
    images: int
    index_sha256: str
    shards: tuple[Shard, ...]


@dataclass(frozen=True)
class ShardManifest:
    kind: str  # "shards", "index" or "in_place"
    name: str
    classes: tuple[str, ...]  # names in label order; duplicate names include their WordNet ids
    splits: dict[str, SplitManifest]
    sha256: str  # hash of the manifest itself

    @property
    def store(self) -> str | None:
        """S3 prefix of the existing shards of an "in_place" manifest. None if the shards are not in S3."""
        files = [shard.file for split in self.splits.values() for shard in split.shards]
        if self.kind != "in_place" or not files[0].startswith("s3://"):
            return None
        return "s3://" + posixpath.commonpath([posixpath.dirname(file[5:]) for file in files])

    def shards_in(self, split: str) -> tuple[Shard, ...]:
        """Return the shards of a split. The names of shards in S3 are keys relative to `store`."""
        prefix = f"{self.store}/"
        return tuple(
            replace(shard, file=shard.file.removeprefix(prefix)) for shard in self.splits[split].shards
        )


TYPES = {  # types of the values in manifest.json
    "kind": str,
    "name": str,
    "classes": list[ClassName],
    "splits": dict[str, SplitManifest],
}


def index_name(split: str) -> str:
    return f"{split}_index.npy"


def find_local(folder: Path) -> ShardManifest | None:
    """Return the manifest of a folder with prepared data, or None for any other folder.

    Raises:
        ValueError: The manifest is missing or damaged, or a shard is missing or has a different size.
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
    """Check whether a preparation writes files with this name. Source tar files have different names."""
    indices = [index_name(split) for split in SPLITS]
    return name in (JOURNAL, *indices) or re.fullmatch(SHARD, name) is not None


def _check_size(path: Path, size: int) -> None:
    try:
        actual = path.stat().st_size
    except OSError as error:
        raise ValueError(f"{path}: {error.strerror}, but {MANIFEST} lists it: prepare again") from None
    if actual != size:
        raise ValueError(f"{path} has {actual:,} bytes, but {MANIFEST} says {size:,}: prepare again")


def find_stored(store: ObjectStore) -> tuple[ShardManifest, bytes]:
    """Return the manifest below an S3 prefix and its bytes. Raise ValueError if it is missing or damaged."""
    content = store.read(MANIFEST, MANIFEST_LIMIT)
    if content is None:
        unfinished = any(map(_is_prepared, store.list()))
        reason = UNFINISHED if unfinished else "prepare data there with prep_imagenet.py --out"
        raise ValueError(f"--data {store.url} has no {MANIFEST}: {reason}")
    manifest = parse_manifest(content, f"{store.url}/{MANIFEST}")
    if manifest.kind != "shards" and manifest.store is None:
        raise ValueError(f"--data {store.url} is an index of files on one host. Give its folder on that host")
    return manifest, content


def parse_manifest(content: bytes, where: str) -> ShardManifest:
    """Parse a manifest.

    Args:
        content: Bytes of the manifest.
        where: Name of the manifest for messages.

    Raises:
        ValueError: The manifest is invalid. The message names the first problem.
    """
    try:
        values = parse_json(content, where)
    except ValueError as error:
        raise ValueError(f"{error}: prepare again") from None
    if (format_version := values.get("format")) != FORMAT:
        raise ValueError(
            f"{where} has format {_brief(format_version)}, but this code supports {FORMAT}: prepare again, or"
            " update"
        )
    invalid = [name for name, expected_type in TYPES.items() if not fits(values.get(name), expected_type)]
    if not invalid and not 0 < len({c["wnid"] for c in values["classes"]}) == len(values["classes"]):
        invalid = ["classes, which must differ"]
    if invalid:
        raise ValueError(f"{where} is not a valid manifest (check its {', '.join(invalid)}): prepare again")
    splits = {}
    for split, entry in values["splits"].items():
        shards = tuple(Shard(*VALUES_OF_SHARD(shard)) for shard in entry["shards"])
        splits[split] = SplitManifest(entry["images"], entry["index_sha256"], shards)
    classes, sha256 = _class_names(values["classes"]), hashlib.sha256(content).hexdigest()
    manifest = ShardManifest(values["kind"], values["name"], classes, splits, sha256)
    if problem := _problem(manifest):
        raise ValueError(f"{where} is not a valid manifest ({problem}): prepare again")
    if "train" not in splits:
        raise ValueError(f"{where} has no split train. Prepare it as well")
    return manifest


def _problem(manifest: ShardManifest) -> str | None:
    """Return an error message for values that no preparation writes, or None for a valid manifest."""
    if manifest.kind not in ("shards", "index", "in_place"):
        return f"kind {_brief(manifest.kind)}"
    has_shards, files, buckets = manifest.kind == "shards", set[str](), set[str]()
    for split in manifest.splits.values():
        if not 0 < split.images == sum(shard.images for shard in split.shards):
            return f"images {split.images}, which differs from the sum over its shards"
        if not SHA256.fullmatch(split.index_sha256):
            return f"SHA-256 {_brief(split.index_sha256)}"
        for shard in split.shards:
            in_store = manifest.kind == "in_place" and shard.file.startswith("s3://")
            has_valid_name = (
                SHARD_FILE.fullmatch(shard.file) if has_shards else in_store or os.path.isabs(shard.file)
            )
            has_valid_hash = not (has_shards or in_store) or SHA256.fullmatch(shard.sha256 or "")
            is_new = manifest.kind == "index" or shard.file not in files
            if not (has_valid_name and has_valid_hash and is_new and shard.bytes >= 0 and shard.images >= 0):
                return f"shard {_brief(shard.file)}"
            files.add(shard.file)
            buckets.add(shard.file.split("/")[2] if in_store else "")
    if manifest.kind == "in_place" and len(buckets) > 1:
        return "shards in several buckets, or in a bucket and on this host"
    return None


def _brief(value: Any) -> str:
    """Format a value from an untrusted manifest for a message."""
    return ascii(value)[:80]


def _class_names(classes: list[dict[str, str]]) -> tuple[str, ...]:
    """Return class names in label order. Duplicates (two cranes in ILSVRC2012) include the WordNet id."""
    counts = Counter(c["name"] for c in classes)
    return tuple(c["name"] if counts[c["name"]] == 1 else f"{c['name']} ({c['wnid']})" for c in classes)


def parse_shard_index(content: bytes, manifest: ShardManifest, split: str, where: str) -> np.ndarray:
    """Parse the index of a split.

    Args:
        content: Bytes of the index.
        manifest: Manifest that contains the expected facts about the index.
        split: Name of the split.
        where: Name of the index for messages.

    Returns:
        One row per image with its shard, offset, length and label, int64 [N, 4].

    Raises:
        ValueError: The index does not match the manifest.
    """
    expected = manifest.splits[split]
    if hashlib.sha256(content).hexdigest() != expected.index_sha256:
        raise ValueError(f"{where} does not match its SHA-256 in {MANIFEST}: prepare again")
    try:
        rows = np.load(io.BytesIO(content), allow_pickle=False)
    except Exception:  # numpy parses the header as Python code, which can raise many types of exceptions
        raise ValueError(f"{where} is not an array: prepare again") from None
    if not isinstance(rows, np.ndarray) or rows.dtype != np.int64 or rows.shape != (expected.images, 4):
        raise ValueError(f"{where} is not an array of int64 [{expected.images}, 4]: prepare again")
    shard, offset, length, label = rows.T
    if shard.min() < 0 or shard.max() >= len(expected.shards):
        raise ValueError(f"{where} refers to shards that do not exist: prepare again")
    counts = np.bincount(shard, minlength=len(expected.shards))
    ends = np.array([shard.bytes for shard in expected.shards])[shard]
    same = shard[1:] == shard[:-1]
    problems = {
        # This check is first because it ensures that the sums below can't overflow.
        "has images outside of their shards": (
            (offset < HEADER_BYTES) | (length < 1) | (offset > ends) | (length > ends - offset)
        ).any(),
        "has other numbers of images": (counts != [shard.images for shard in expected.shards]).any(),
        "is not sorted": (np.diff(shard) < 0).any() or (same & (np.diff(offset) <= 0)).any(),
        "has images that overlap": (same & (offset[1:] < offset[:-1] + length[:-1])).any(),
        "has labels without a class": label.min() < 0 or label.max() >= len(manifest.classes),
    }
    if present := [problem for problem, is_present in problems.items() if is_present]:
        raise ValueError(f"{where} {present[0]}: prepare again")
    return rows


class ShardImages(Encoded):
    """Images in tar files.

    No file stays open, because a shard that the cache removes would occupy disk space until it is closed.

    Args:
        index: Index file in the cache.
        files: Paths of the shards.
        ids_file: File with the ids of the images to read, int64 [n]. None selects all images.
    """

    def __init__(self, index: Path, files: tuple[str, ...], ids_file: Path | None = None):
        self.rows, self.files = np.asarray(np.load(index, mmap_mode="r")), files  # int64 [N, 4]
        super().__init__(len(self.rows), ids_file)

    def location(self, i: int) -> tuple[str, int, int]:
        shard, offset, length, _ = self.rows[self.ids[i]].tolist()
        return self.files[shard], offset, length

    def display_name(self, i: int) -> str:
        """Return the shard and offset of image i, and the image's key if a tar header precedes the image."""
        shard, offset, _ = self.location(i)
        name = self.name(i)
        return printable(f"{shard}, offset {offset}{name and f', key {os.path.splitext(name)[0]}'}")

    def name(self, i: int) -> str:
        """Return the name in the tar header before image i, or "" if there is no header."""
        shard, offset, _ = self.location(i)
        with open(shard, "rb", buffering=0) as file:
            header = os.pread(file.fileno(), HEADER_BYTES, offset - HEADER_BYTES)
        try:
            # If the bytes are not a header, the checksum does not match. Messages must not show such bytes.
            return printable(tarfile.TarInfo.frombuf(header, "utf-8", "surrogateescape").name)
        except tarfile.HeaderError:
            return ""
