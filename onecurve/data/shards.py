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

MANIFEST_FORMAT = 1  # version of the manifest format
MANIFEST = "manifest.json"  # file name of the manifest
JOURNAL = ".progress.json"  # file that records the progress of an unfinished preparation
SHARD_PATTERN = rf"({'|'.join(SPLITS)})-[0-9]{{5,}}\.tar"  # pattern of shard file names
ALLOWED_SHARD_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]*")  # pattern of shard names in a manifest
get_shard_fields = itemgetter("file", "bytes", "images", "sha256")  # values in the order of Shard's fields
SHA256_PATTERN = re.compile("[0-9a-f]{64}")  # pattern of a hexadecimal SHA-256
TAR_HEADER_BYTES = 512  # size of a tar member header
LABEL_COLUMN = 3  # index column that contains the labels
MAX_ESCAPED_LENGTH = 80  # maximum number of characters of an invalid value shown in a message
MANIFEST_LIMIT_BYTES, INDEX_LIMIT_BYTES = 2**28, 2**34  # maximum file sizes
UNFINISHED_ADVICE = (
    "The preparation is not complete."
    " Run the same prep_imagenet.py command again to continue the preparation."
    " To use tar files in WebDataset format from a different source,"
    " create an index with `prep_imagenet.py --from shards --format index`"
)


class ClassName(TypedDict):
    """Entry of "classes" in manifest.json."""

    name: str  # class name, which may occur more than once
    wnid: str  # WordNet id, which is unique


@dataclass(frozen=True)
class Shard:
    """Tar file that contains images of one split, as described in manifest.json."""

    file: str  # file name or, unless the kind is "shards", absolute path or s3://bucket/key
    bytes: int  # size of the tar file
    images: int  # number of images
    sha256: str | None  # SHA-256 of the tar file, or None for existing shards on this host


@dataclass(frozen=True)
class SplitManifest:
    """Entry of "splits" in manifest.json."""

    images: int  # number of images
    index_sha256: str  # SHA-256 of the split's index file
    shards: tuple[Shard, ...]


@dataclass(frozen=True)
class ShardManifest:
    """Parsed content of manifest.json."""

    kind: str  # "shards", "index" or "in_place"
    name: str  # name of the data set
    classes: tuple[str, ...]  # class names in label order; duplicate names include the WordNet id
    splits: dict[str, SplitManifest]  # by split name
    sha256: str  # SHA-256 of the manifest file

    @property
    def s3_prefix(self) -> str | None:
        """S3 prefix of an "in_place" manifest's existing shards, or None if the shards are not in S3."""
        shard_files = [shard.file for split in self.splits.values() for shard in split.shards]
        if self.kind != "in_place" or not shard_files[0].startswith("s3://"):
            return None
        shard_folders = [posixpath.dirname(shard_file.removeprefix("s3://")) for shard_file in shard_files]
        return "s3://" + posixpath.commonpath(shard_folders)

    def shards_in(self, split: str) -> tuple[Shard, ...]:
        """Return the shards of a split. For shards in S3, the file names are keys relative to `s3_prefix`."""
        store_prefix = f"{self.s3_prefix}/" if self.s3_prefix else ""
        split_shards = self.splits[split].shards
        return tuple(replace(shard, file=shard.file.removeprefix(store_prefix)) for shard in split_shards)


KEY_TYPES = {  # expected types of the values in manifest.json
    "kind": str,
    "name": str,
    "classes": list[ClassName],
    "splits": dict[str, SplitManifest],
}


def index_file_name(split: str) -> str:
    return f"{split}_index.npy"


def find_local_manifest(folder: Path) -> ShardManifest | None:
    """Return the manifest of a folder that contains prepared data, or None for any other folder.

    The function also checks the size of each shard on this host.

    Raises:
        ValueError: If the manifest is missing or damaged, or if a shard is missing or has an unexpected size.
    """
    manifest_path = folder / MANIFEST
    if not manifest_path.is_file():
        if any(_is_prepared_file(folder_entry.name) for folder_entry in os.scandir(folder)):
            raise ValueError(f"--data {folder} contains no {MANIFEST}. {UNFINISHED_ADVICE}")
        return None
    manifest = parse_manifest(manifest_path.read_bytes(), str(manifest_path))
    if manifest.s3_prefix is None:
        for split_manifest in manifest.splits.values():
            for shard in split_manifest.shards:
                _check_shard_size(folder / shard.file, shard.bytes)
    return manifest


def _is_prepared_file(file_name: str) -> bool:
    """Return True if a preparation writes files with this name. Source tar files have different names."""
    index_file_names = [index_file_name(split) for split in SPLITS]
    return file_name in (JOURNAL, *index_file_names) or re.fullmatch(SHARD_PATTERN, file_name) is not None


def _check_shard_size(shard_path: Path, expected_bytes: int) -> None:
    """Raise ValueError if a shard can't be read or does not have the size that the manifest specifies."""
    try:
        actual_bytes = shard_path.stat().st_size
    except OSError as error:
        shard_problem = f"is listed in {MANIFEST}, but can't be read: {error.strerror}"
        raise ValueError(f"{shard_path} {shard_problem}. Prepare the data again") from None
    if actual_bytes != expected_bytes:
        raise ValueError(
            f"{shard_path} contains {actual_bytes:,} bytes,"
            f" but {MANIFEST} specifies {expected_bytes:,} bytes. Prepare the data again"
        )


def find_stored_manifest(store: ObjectStore) -> tuple[ShardManifest, bytes]:
    """Return the parsed manifest under an S3 prefix, and its bytes.

    Raises:
        ValueError: If the manifest is missing or damaged, or describes an index of files on one host.
    """
    manifest_bytes = store.read(MANIFEST, MANIFEST_LIMIT_BYTES)
    if manifest_bytes is None:
        is_preparation_unfinished = any(map(_is_prepared_file, store.list()))
        preparation_advice = f"Prepare data with prep_imagenet.py --out {store.url}"
        missing_manifest_advice = UNFINISHED_ADVICE if is_preparation_unfinished else preparation_advice
        raise ValueError(f"--data {store.url} contains no {MANIFEST}. {missing_manifest_advice}")
    manifest = parse_manifest(manifest_bytes, f"{store.url}/{MANIFEST}")
    if manifest.kind != "shards" and manifest.s3_prefix is None:
        raise ValueError(
            f"--data {store.url} is an index of files on one host."
            " On that host, pass the index's local folder to --data"
        )
    return manifest, manifest_bytes


def parse_manifest(manifest_bytes: bytes, manifest_location: str) -> ShardManifest:
    """Parse and check a manifest. The manifest's source is not trusted.

    Args:
        manifest_bytes: Content of the manifest file.
        manifest_location: Location of the manifest shown in error messages.

    Raises:
        ValueError: If the manifest is invalid. The message describes the first problem.
    """
    try:
        manifest_entries = parse_json(manifest_bytes, manifest_location)
    except ValueError as error:
        raise ValueError(f"{error}. Prepare the data again") from None
    if (format_version := manifest_entries.get("format")) != MANIFEST_FORMAT:
        raise ValueError(
            f"{manifest_location} has format {_escape_value(format_version)},"
            f" but this version supports only format {MANIFEST_FORMAT}."
            " Prepare the data again, or update this project"
        )
    invalid_keys = [
        manifest_key
        for manifest_key, value_type in KEY_TYPES.items()
        if not has_type(manifest_entries.get(manifest_key), value_type)
    ]
    if not invalid_keys:
        wnids = [class_entry["wnid"] for class_entry in manifest_entries["classes"]]
        if not wnids or len({*wnids}) != len(wnids):
            invalid_keys = ["classes, which must be distinct"]
    if invalid_keys:
        raise _invalid_manifest_error(manifest_location, ", ".join(invalid_keys))
    split_manifests = {}
    for split, split_entry in manifest_entries["splits"].items():
        shards = tuple(Shard(*get_shard_fields(shard_entry)) for shard_entry in split_entry["shards"])
        split_manifests[split] = SplitManifest(split_entry["images"], split_entry["index_sha256"], shards)
    class_names = _class_names(manifest_entries["classes"])
    manifest_sha256 = hashlib.sha256(manifest_bytes).hexdigest()
    manifest = ShardManifest(
        manifest_entries["kind"], manifest_entries["name"], class_names, split_manifests, manifest_sha256
    )
    if invalid_value := _first_invalid_value(manifest):
        raise _invalid_manifest_error(manifest_location, invalid_value)
    if "train" not in split_manifests:
        raise ValueError(f"{manifest_location} contains no train split. Prepare the train split as well")
    return manifest


def _invalid_manifest_error(manifest_location: str, invalid_parts: str) -> ValueError:
    manifest_problem = f"is not a valid manifest (invalid: {invalid_parts})"
    return ValueError(f"{manifest_location} {manifest_problem}. Prepare the data again")


def _first_invalid_value(manifest: ShardManifest) -> str | None:
    """Return a description of the first invalid value, or None for a valid manifest."""
    if manifest.kind not in ("shards", "index", "in_place"):
        return f"kind {_escape_value(manifest.kind)}"
    is_prepared = manifest.kind == "shards"
    seen_shard_files, seen_buckets = set[str](), set[str]()
    for split_manifest in manifest.splits.values():
        if not 0 < split_manifest.images == sum(shard.images for shard in split_manifest.shards):
            return f"images {split_manifest.images}, which differs from the sum over the split's shards"
        if not SHA256_PATTERN.fullmatch(split_manifest.index_sha256):
            return f"SHA-256 {_escape_value(split_manifest.index_sha256)}"
        for shard in split_manifest.shards:
            is_in_s3 = manifest.kind == "in_place" and shard.file.startswith("s3://")
            if is_prepared:
                has_valid_name = ALLOWED_SHARD_NAME.fullmatch(shard.file) is not None
            else:
                has_valid_name = is_in_s3 or os.path.isabs(shard.file)
            has_valid_hash = not (is_prepared or is_in_s3) or SHA256_PATTERN.fullmatch(shard.sha256 or "")
            # Only an "index" manifest may list the same archive twice
            is_new_shard = manifest.kind == "index" or shard.file not in seen_shard_files
            has_valid_sizes = shard.bytes >= 0 and shard.images >= 0
            if not (has_valid_name and has_valid_hash and is_new_shard and has_valid_sizes):
                return f"shard {_escape_value(shard.file)}"
            seen_shard_files.add(shard.file)
            # s3://BUCKET/KEY; "" stands for this host
            seen_buckets.add(shard.file.split("/")[2] if is_in_s3 else "")
    if manifest.kind == "in_place" and len(seen_buckets) > 1:
        return "shards, which are in several buckets, or both in a bucket and on this host"
    return None


def _escape_value(untrusted_value: Any) -> str:
    """Format a value from an untrusted manifest for a message."""
    return ascii(untrusted_value)[:MAX_ESCAPED_LENGTH]


def _class_names(class_entries: list[ClassName]) -> tuple[str, ...]:
    """Return class names in label order. Duplicates, such as ILSVRC2012's cranes, include the WordNet id."""
    class_name_counts = Counter(class_entry["name"] for class_entry in class_entries)
    return tuple(
        entry["name"] if class_name_counts[entry["name"]] == 1 else f"{entry['name']} ({entry['wnid']})"
        for entry in class_entries
    )


def parse_shard_index(index_bytes: bytes, manifest: ShardManifest, split: str, location: str) -> np.ndarray:
    """Parse and check the index of a split. The index's source is not trusted.

    Args:
        index_bytes: Content of the index file.
        manifest: Manifest that specifies the index's SHA-256, number of images and shards.
        split: Name of the split that the index describes.
        location: Location of the index shown in error messages.

    Returns:
        Shard number, byte offset, byte length and label of each image, int64 [N, 4].

    Raises:
        ValueError: If the index is damaged or does not match the manifest.
    """
    split_manifest = manifest.splits[split]
    if hashlib.sha256(index_bytes).hexdigest() != split_manifest.index_sha256:
        raise ValueError(f"{location} does not match its SHA-256 in {MANIFEST}. Prepare the data again")
    try:
        index_rows = np.load(io.BytesIO(index_bytes), allow_pickle=False)
    except Exception:  # NumPy parses the header as Python code, which may raise any exception
        raise ValueError(f"{location} is not an array. Prepare the data again") from None
    expected_shape = (split_manifest.images, 4)
    is_int64_array = isinstance(index_rows, np.ndarray) and index_rows.dtype == np.int64
    if not is_int64_array or index_rows.shape != expected_shape:
        raise ValueError(
            f"{location} is not an int64 array of shape [{split_manifest.images}, 4]. Prepare the data again"
        )
    shard_indices, image_offsets, image_lengths, labels = index_rows.T
    if shard_indices.min() < 0 or shard_indices.max() >= len(split_manifest.shards):
        index_problem = f"refers to shards that are not in {MANIFEST}"
        raise ValueError(f"{location} {index_problem}. Prepare the data again")
    images_per_shard = np.bincount(shard_indices, minlength=len(split_manifest.shards))
    # Size in bytes of the shard that contains each image
    shard_bytes = np.array([shard.bytes for shard in split_manifest.shards])[shard_indices]
    is_outside_of_shard = (
        (image_offsets < TAR_HEADER_BYTES) | (image_lengths < 1) | (image_offsets > shard_bytes)
    )
    is_outside_of_shard |= image_lengths > shard_bytes - image_offsets
    is_same_shard = shard_indices[1:] == shard_indices[:-1]
    is_overlapping = is_same_shard & (image_offsets[1:] < image_offsets[:-1] + image_lengths[:-1])
    is_unsorted = (np.diff(shard_indices) < 0) | (is_same_shard & (np.diff(image_offsets) <= 0))
    is_present_by_problem = {
        # This check must come first, because it detects values for which the sums in is_overlapping overflow.
        "lists images outside of their shards": is_outside_of_shard.any(),
        "lists different numbers of images than the manifest": (
            images_per_shard != [shard.images for shard in split_manifest.shards]
        ).any(),
        "is not sorted": is_unsorted.any(),
        "lists images that overlap": is_overlapping.any(),
        "contains labels without a class": labels.min() < 0 or labels.max() >= len(manifest.classes),
    }
    for index_problem, is_problem_present in is_present_by_problem.items():
        if is_problem_present:
            raise ValueError(f"{location} {index_problem}. Prepare the data again")
    return index_rows


class ShardImages(EncodedImages):
    """Images stored in tar files.

    No tar file stays open, because an open file occupies disk space even after the cache removes the shard.

    Args:
        index_path: Path of the index file in the cache folder.
        shard_paths: Paths of the shards.
        ids_file: File that contains the ids of the images to read, int64 [n], or None to read all images.
    """

    def __init__(self, index_path: Path, shard_paths: tuple[str, ...], ids_file: Path | None = None):
        self.shard_paths = shard_paths
        # Index of the whole split, int64 [N, 4]. asarray() returns a plain view of the memory-mapped file,
        # because indexing np.memmap takes 6 times as long.
        self.index_rows = np.asarray(np.load(index_path, mmap_mode="r"))
        super().__init__(len(self.index_rows), ids_file)

    def location(self, index: int) -> tuple[str, int, int]:
        shard_index, byte_offset, byte_length, _label = self.index_rows[self.ids[index]].tolist()
        return self.shard_paths[shard_index], byte_offset, byte_length

    def display_name(self, index: int) -> str:
        """Return an image's shard and byte offset, and its key if a tar header precedes the image."""
        shard_path, byte_offset, _byte_length = self.location(index)
        member_name = self.name(index)
        key_text = f", key {os.path.splitext(member_name)[0]}" if member_name else ""
        return printable(f"{shard_path}, offset {byte_offset}{key_text}")

    def name(self, index: int) -> str:
        """Read the member name from the tar header before an image, or return "" if there is no header."""
        shard_path, byte_offset, _byte_length = self.location(index)
        with open(shard_path, "rb", buffering=0) as shard_file:
            tar_header = os.pread(shard_file.fileno(), TAR_HEADER_BYTES, byte_offset - TAR_HEADER_BYTES)
        try:
            # The header's checksum keeps other bytes out of messages.
            return printable(tarfile.TarInfo.frombuf(tar_header, "utf-8", "surrogateescape").name)
        except tarfile.HeaderError:
            return ""
