"""Prepared data in shards, which consists of tar files, image indices and a manifest that is written last.

    manifest.json      the classes, and each split's shards and index with their SHA-256
    <split>_index.npy  int64 [N, 4], ascending: shard, offset and length of the image's bytes, label
    <split>_names.txt  image names in index order (onecurve/data/names.py); absent in earlier versions
    <split>-00000.tar  the bytes of each image, followed by its label in <key>.cls

A manifest of kind "in_place" refers to existing shards on this host or in one S3 bucket. Only version 1.0
wrote manifests of kind "index", which refer to archives on this host that may be sorted by class.

The 512 bytes before an image are the image's tar header, which contains the key that messages show. If a name
is too long for the header, messages show only the start of the key.
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

from onecurve.data.encoded import SPLITS, EncodedImages
from onecurve.system.files import has_type, parse_json
from onecurve.system.s3 import ObjectStore
from onecurve.system.text import printable

MANIFEST_FORMAT = 1
MANIFEST = "manifest.json"
JOURNAL = ".progress.json"  # file that records the progress of an unfinished preparation
SHARD_PATTERN = rf"({'|'.join(SPLITS)})-[0-9]{{5,}}\.tar"  # pattern of shard file names
SHARD_FILE_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]*")
shard_fields = itemgetter("file", "bytes", "images", "sha256")
SHA256 = re.compile("[0-9a-f]{64}")
HEADER_BYTES = 512  # size of a tar member header
MANIFEST_LIMIT, INDEX_LIMIT = 2**28, 2**34  # maximum file sizes in bytes
UNFINISHED_ADVICE = (
    "The preparation is not complete. Run the same prep_imagenet.py command again to continue the"
    " preparation. To use tar files in WebDataset format from a different source, create an index with"
    " `prep_imagenet.py --from shards --format index`"
)


class ClassName(TypedDict):
    name: str
    wnid: str


@dataclass(frozen=True)
class Shard:
    file: str  # file name or, unless the kind is "shards", absolute path or s3://bucket/key
    bytes: int
    images: int
    sha256: str | None  # None for existing shards on this host


@dataclass(frozen=True)
class SplitManifest:
    images: int
    index_sha256: str
    shards: tuple[Shard, ...]


@dataclass(frozen=True)
class ShardManifest:
    kind: str  # "shards", "index" or "in_place"
    name: str
    classes: tuple[str, ...]  # class names in label order; duplicate names include the WordNet id
    splits: dict[str, SplitManifest]
    sha256: str  # SHA-256 of the manifest file

    @property
    def store(self) -> str | None:
        """S3 prefix of an "in_place" manifest's existing shards, or None if the shards are not in S3."""
        files = [shard.file for split in self.splits.values() for shard in split.shards]
        if self.kind != "in_place" or not files[0].startswith("s3://"):
            return None
        return "s3://" + posixpath.commonpath([posixpath.dirname(file[5:]) for file in files])

    def shards_in(self, split: str) -> tuple[Shard, ...]:
        """Return the shards of a split. For shards in S3, the file names are keys relative to `store`."""
        prefix = f"{self.store}/"
        return tuple(
            replace(shard, file=shard.file.removeprefix(prefix)) for shard in self.splits[split].shards
        )


KEY_TYPES = {  # expected types of the values in manifest.json
    "kind": str,
    "name": str,
    "classes": list[ClassName],
    "splits": dict[str, SplitManifest],
}


def index_name(split: str) -> str:
    return f"{split}_index.npy"


def find_local(folder: Path) -> ShardManifest | None:
    """Return the manifest of a folder that contains prepared data, or None for any other folder.

    Raises:
        ValueError: If the manifest is missing or damaged, or if a shard is missing or has an unexpected size.
    """
    path = folder / MANIFEST
    if not path.is_file():
        if any(_is_prepared_file(entry.name) for entry in os.scandir(folder)):
            raise ValueError(f"--data {folder} contains no {MANIFEST}. {UNFINISHED_ADVICE}")
        return None
    manifest = parse_manifest(path.read_bytes(), str(path))
    for split in manifest.splits.values():
        for shard in split.shards if manifest.store is None else ():
            _check_shard_size(folder / shard.file, shard.bytes)
    return manifest


def _is_prepared_file(name: str) -> bool:
    """Return True if a preparation writes files with this name. Source tar files have different names."""
    indices = [index_name(split) for split in SPLITS]
    return name in (JOURNAL, *indices) or re.fullmatch(SHARD_PATTERN, name) is not None


def _check_shard_size(path: Path, size: int) -> None:
    try:
        actual = path.stat().st_size
    except OSError as error:
        raise ValueError(
            f"{path} is listed in {MANIFEST}, but can't be read: {error.strerror}. Prepare the data again"
        ) from None
    if actual != size:
        raise ValueError(
            f"{path} contains {actual:,} bytes, but {MANIFEST} specifies {size:,} bytes. Prepare the data"
            " again"
        )


def find_stored(store: ObjectStore) -> tuple[ShardManifest, bytes]:
    """Return the parsed manifest under an S3 prefix, and its bytes.

    Raises:
        ValueError: If the manifest is missing or damaged, or describes an index of files on one host.
    """
    content = store.read(MANIFEST, MANIFEST_LIMIT)
    if content is None:
        unfinished = any(map(_is_prepared_file, store.list()))
        advice = UNFINISHED_ADVICE if unfinished else f"Prepare data with prep_imagenet.py --out {store.url}"
        raise ValueError(f"--data {store.url} contains no {MANIFEST}. {advice}")
    manifest = parse_manifest(content, f"{store.url}/{MANIFEST}")
    if manifest.kind != "shards" and manifest.store is None:
        raise ValueError(
            f"--data {store.url} is an index of files on one host. On that host, pass the index's local"
            " folder to --data"
        )
    return manifest, content


def parse_manifest(content: bytes, where: str) -> ShardManifest:
    """Parse a manifest.

    Args:
        content: Content of the manifest file.
        where: Manifest location shown in error messages.

    Raises:
        ValueError: If the manifest is invalid. The message describes the first problem.
    """
    try:
        values = parse_json(content, where)
    except ValueError as error:
        raise ValueError(f"{error}. Prepare the data again") from None
    if (format_version := values.get("format")) != MANIFEST_FORMAT:
        raise ValueError(
            f"{where} has format {_escaped(format_version)}, but this version supports only format"
            f" {MANIFEST_FORMAT}. Prepare the data again, or update this project"
        )
    invalid = [
        key for key, expected_type in KEY_TYPES.items() if not has_type(values.get(key), expected_type)
    ]
    if not invalid:
        wnids = [entry["wnid"] for entry in values["classes"]]
        if not wnids or len({*wnids}) != len(wnids):
            invalid = ["classes, which must be distinct"]
    if invalid:
        fields = ", ".join(invalid)
        raise ValueError(f"{where} is not a valid manifest (invalid: {fields}). Prepare the data again")
    splits = {}
    for split, entry in values["splits"].items():
        shards = tuple(Shard(*shard_fields(shard)) for shard in entry["shards"])
        splits[split] = SplitManifest(entry["images"], entry["index_sha256"], shards)
    class_names, sha256 = _class_names(values["classes"]), hashlib.sha256(content).hexdigest()
    manifest = ShardManifest(values["kind"], values["name"], class_names, splits, sha256)
    if problem := _manifest_problem(manifest):
        raise ValueError(f"{where} is not a valid manifest (invalid: {problem}). Prepare the data again")
    if "train" not in splits:
        raise ValueError(f"{where} contains no train split. Prepare the train split as well")
    return manifest


def _manifest_problem(manifest: ShardManifest) -> str | None:
    """Return a description of the first invalid value, or None for a valid manifest."""
    if manifest.kind not in ("shards", "index", "in_place"):
        return f"kind {_escaped(manifest.kind)}"
    has_shards, files, buckets = manifest.kind == "shards", set[str](), set[str]()
    for split in manifest.splits.values():
        if not 0 < split.images == sum(shard.images for shard in split.shards):
            return f"images {split.images}, which differs from the sum over the split's shards"
        if not SHA256.fullmatch(split.index_sha256):
            return f"SHA-256 {_escaped(split.index_sha256)}"
        for shard in split.shards:
            in_store = manifest.kind == "in_place" and shard.file.startswith("s3://")
            has_valid_name = (
                SHARD_FILE_NAME.fullmatch(shard.file) if has_shards else in_store or os.path.isabs(shard.file)
            )
            has_valid_hash = not (has_shards or in_store) or SHA256.fullmatch(shard.sha256 or "")
            is_new = manifest.kind == "index" or shard.file not in files
            if not (has_valid_name and has_valid_hash and is_new and shard.bytes >= 0 and shard.images >= 0):
                return f"shard {_escaped(shard.file)}"
            files.add(shard.file)
            buckets.add(shard.file.split("/")[2] if in_store else "")
    if manifest.kind == "in_place" and len(buckets) > 1:
        return "shards, which are in several buckets, or both in a bucket and on this host"
    return None


def _escaped(value: Any) -> str:
    """Format a value from an untrusted manifest for a message."""
    return ascii(value)[:80]


def _class_names(classes: list[dict[str, str]]) -> tuple[str, ...]:
    """Return class names in label order. Duplicates, such as ILSVRC2012's cranes, include the WordNet id."""
    counts = Counter(entry["name"] for entry in classes)
    return tuple(
        entry["name"] if counts[entry["name"]] == 1 else f"{entry['name']} ({entry['wnid']})"
        for entry in classes
    )


def parse_shard_index(content: bytes, manifest: ShardManifest, split: str, where: str) -> np.ndarray:
    """Parse the index of a split.

    Args:
        content: Content of the index file.
        manifest: Manifest that specifies the index's SHA-256, number of images and shards.
        split: Name of the split that the index describes.
        where: Index location shown in error messages.

    Returns:
        Shard number, byte offset, byte length and label of each image, int64 [N, 4].

    Raises:
        ValueError: If the index is damaged or does not match the manifest.
    """
    expected = manifest.splits[split]
    if hashlib.sha256(content).hexdigest() != expected.index_sha256:
        raise ValueError(f"{where} does not match its SHA-256 in {MANIFEST}. Prepare the data again")
    try:
        rows = np.load(io.BytesIO(content), allow_pickle=False)
    except Exception:  # NumPy parses the header as Python code, which may raise any exception
        raise ValueError(f"{where} is not an array. Prepare the data again") from None
    if not isinstance(rows, np.ndarray) or rows.dtype != np.int64 or rows.shape != (expected.images, 4):
        raise ValueError(
            f"{where} is not an int64 array of shape [{expected.images}, 4]. Prepare the data again"
        )
    shard, offset, length, label = rows.T
    if shard.min() < 0 or shard.max() >= len(expected.shards):
        raise ValueError(f"{where} refers to shards that are not in {MANIFEST}. Prepare the data again")
    counts = np.bincount(shard, minlength=len(expected.shards))
    shard_sizes = np.array([shard.bytes for shard in expected.shards])[shard]
    is_same_shard = shard[1:] == shard[:-1]
    problems = {
        # This check must come first, because it ensures that the sums below can't overflow.
        "lists images outside of their shards": (
            (offset < HEADER_BYTES) | (length < 1) | (offset > shard_sizes) | (length > shard_sizes - offset)
        ).any(),
        "lists different numbers of images than the manifest": (
            counts != [shard.images for shard in expected.shards]
        ).any(),
        "is not sorted": (np.diff(shard) < 0).any() or (is_same_shard & (np.diff(offset) <= 0)).any(),
        "lists images that overlap": (is_same_shard & (offset[1:] < offset[:-1] + length[:-1])).any(),
        "contains labels without a class": label.min() < 0 or label.max() >= len(manifest.classes),
    }
    if present_problems := [problem for problem, is_present in problems.items() if is_present]:
        raise ValueError(f"{where} {present_problems[0]}. Prepare the data again")
    return rows


class ShardImages(EncodedImages):
    """Images stored in tar files.

    No tar file stays open, because an open file occupies disk space even after the cache removes the shard.

    Args:
        index: Index file in the cache folder.
        files: Paths of the shards.
        ids_file: File that contains the ids of the images to read, int64 [n], or None to read all images.
    """

    def __init__(self, index: Path, files: tuple[str, ...], ids_file: Path | None = None):
        self.rows, self.files = np.asarray(np.load(index, mmap_mode="r")), files  # int64 [N, 4]
        super().__init__(len(self.rows), ids_file)

    def location(self, index: int) -> tuple[str, int, int]:
        shard, offset, length, _ = self.rows[self.ids[index]].tolist()
        return self.files[shard], offset, length

    def display_name(self, index: int) -> str:
        """Return image i's shard and byte offset, and its key if a tar header precedes the image."""
        shard, offset, _ = self.location(index)
        name = self.name(index)
        return printable(f"{shard}, offset {offset}{name and f', key {os.path.splitext(name)[0]}'}")

    def name(self, index: int) -> str:
        """Return the member name in the tar header before image i, or "" if there is no such header."""
        shard, offset, _ = self.location(index)
        with open(shard, "rb", buffering=0) as file:
            header = os.pread(file.fileno(), HEADER_BYTES, offset - HEADER_BYTES)
        try:
            # The header's checksum keeps other bytes out of messages.
            return printable(tarfile.TarInfo.frombuf(header, "utf-8", "surrogateescape").name)
        except tarfile.HeaderError:
            return ""
