"""Prepared data as shards: tar files, an index of the images in them, and a manifest that is written last.

    manifest.json      what there is: classes, and of each split its shards and its index with their SHA-256
    <split>_index.npy  int64 [N, 4]: shard, offset of the image's bytes, their length, label; in this order
    <split>-00000.tar  per image its bytes and, as <key>.cls, its label; of kind "index" other tars instead

An image's tar header stands in the 512 bytes before it: from there come the keys in messages, of names
too long for it their beginning.
"""

import hashlib
import io
import json
import os
import re
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from common.decode import SPLITS, decode
from common.object_store import ObjectStore

FORMAT = 1
MANIFEST = "manifest.json"
JOURNAL = ".progress.json"  # of a preparation that is not complete
SHARD = rf"({'|'.join(SPLITS)})-[0-9]{{5,}}\.tar"  # their names
HEADER_BYTES = 512  # of a tar's member
MANIFEST_LIMIT, INDEX_LIMIT = 2**28, 2**34  # bytes
UNFINISHED = "the preparation is not complete: the same prep_imagenet.py command goes on with it"


@dataclass(frozen=True)
class Shard:
    file: str  # its name in the folder; of kind "index" an absolute path
    bytes: int
    images: int
    sha256: str | None  # None of kind "index"


@dataclass(frozen=True)
class Split:
    images: int
    index_sha256: str
    shards: tuple[Shard, ...]


@dataclass(frozen=True)
class Manifest:
    kind: str  # "shards" or "index"
    name: str
    classes: tuple[str, ...]  # their names, in label order; of those with one name their WordNet ids, too
    splits: dict[str, Split]
    sha256: str  # of the manifest itself


def index_name(split: str) -> str:
    return f"{split}_index.npy"


def find_local(folder: Path) -> Manifest | None:
    """None where there is nothing of a prepared folder. Raises ValueError where it is damaged, or a shard is
    missing or has another size."""
    path = folder / MANIFEST
    if not path.is_file():
        if any(_is_prepared(entry.name) for entry in os.scandir(folder)):
            raise ValueError(f"--data {folder} has no {MANIFEST}: {UNFINISHED}")
        return None
    manifest = parse_manifest(path.read_bytes(), str(path))
    for split in manifest.splits.values():
        for shard in split.shards:
            _check_size(folder / shard.file, shard.bytes)
    return manifest


def _is_prepared(name: str) -> bool:
    """Whether a preparation makes files of this name: not the tars that it reads."""
    indices = [index_name(split) for split in SPLITS]
    return name in (JOURNAL, *indices) or re.fullmatch(SHARD, name) is not None


def _check_size(path: Path, size: int) -> None:
    try:
        found = path.stat().st_size
    except OSError as error:
        raise ValueError(f"{path}: {error.strerror}, though {MANIFEST} names it: prepare again") from None
    if found != size:
        raise ValueError(f"{path} has {found:,} bytes where {MANIFEST} says {size:,}: prepare again")


def find_stored(store: ObjectStore) -> tuple[Manifest, bytes]:
    """The manifest below the prefix, and its bytes. Raises ValueError when it is missing or damaged."""
    content = store.read(MANIFEST, MANIFEST_LIMIT)
    if content is None:
        unfinished = any(map(_is_prepared, store.list()))
        why = UNFINISHED if unfinished else "prep_imagenet.py --out prepares data there"
        raise ValueError(f"--data {store.url} has no {MANIFEST}: {why}")
    manifest = parse_manifest(content, f"{store.url}/{MANIFEST}")
    if manifest.kind == "index":
        raise ValueError(f"--data {store.url} is an index of files of one host: give its folder there")
    return manifest, content


def parse_manifest(content: bytes, where: str) -> Manifest:
    """Raises ValueError, which names what is wrong, for anything but a manifest."""
    try:
        about = json.loads(content)
        if not isinstance(about, dict):
            raise TypeError("it is no object")
        if about["format"] != FORMAT:
            raise ValueError(
                f"{where} has format {about['format']}, this code knows {FORMAT}: prepare again, or update"
            )
        kind, splits = about["kind"], about["splits"]
        if kind not in ("shards", "index"):
            raise TypeError(f"kind {kind}")
        manifest = Manifest(
            kind,
            _typed(about["name"], str, "name"),
            _class_names(about["classes"]),
            {name: _split(split, kind) for name, split in splits.items()},
            hashlib.sha256(content).hexdigest(),
        )
    except (KeyError, TypeError, AttributeError, UnicodeDecodeError, json.JSONDecodeError) as error:
        what = f"{error} is missing" if isinstance(error, KeyError) else str(error)
        raise ValueError(f"{where} is no manifest of shards ({what}): prepare again") from None
    files = [shard.file for split in manifest.splits.values() for shard in split.shards]
    if kind == "shards" and len(set(files)) < len(files):
        raise ValueError(f"{where}: two of its shards have one name: prepare again")
    if absent := [split for split in SPLITS if split not in manifest.splits]:
        raise ValueError(f"{where} has no split {' and '.join(absent)}, and training needs both")
    return manifest


def _split(about: dict[str, Any], kind: str) -> Split:
    shards = tuple(_shard(shard, kind) for shard in about["shards"])
    images = _typed(about["images"], int, "images")
    if images < 1 or sum(shard.images for shard in shards) != images:
        raise TypeError(f"images {images}, of all shards {sum(shard.images for shard in shards)}")
    return Split(images, _sha256(about["index_sha256"]), shards)


def _shard(about: dict[str, Any], kind: str) -> Shard:
    file = _typed(about["file"], str, "file")
    plain = re.fullmatch(r"[A-Za-z0-9_][A-Za-z0-9._-]*", file) is not None
    if not (plain if kind == "shards" else os.path.isabs(file)):
        raise TypeError(f"file {file!r}")
    size, images = (_typed(about[key], int, key) for key in ("bytes", "images"))
    if size < 0 or images < 0:
        raise TypeError(f"{file} with {size} bytes and {images} images")
    return Shard(file, size, images, _sha256(about["sha256"]) if kind == "shards" else None)


def _typed(value: Any, kind: type, name: str) -> Any:
    if type(value) is not kind:
        raise TypeError(f"{name} {value!r}")
    return value


def _sha256(value: Any) -> str:
    if re.fullmatch("[0-9a-f]{64}", _typed(value, str, "SHA-256")) is None:
        raise TypeError(f"SHA-256 {value}")
    return value


def _class_names(classes: list[dict[str, str]]) -> tuple[str, ...]:
    """ILSVRC2012 has two kinds of cranes, and two of maillots: with their WordNet ids."""
    names = [_typed(c["name"], str, "class") for c in classes]
    wnids = [_typed(c["wnid"], str, "class") for c in classes]
    if not names or len(set(wnids)) < len(wnids):
        raise TypeError(f"{len(names)} classes, {len(set(wnids))} different ones")
    times = Counter(names)
    return tuple(
        name if times[name] == 1 else f"{name} ({wnid})" for name, wnid in zip(names, wnids, strict=True)
    )


def parse_index(content: bytes, manifest: Manifest, split: str, where: str) -> np.ndarray:
    """int64 [N, 4]. Raises ValueError unless it is what the manifest says."""
    about = manifest.splits[split]
    if hashlib.sha256(content).hexdigest() != about.index_sha256:
        raise ValueError(f"{where} is not the index that {MANIFEST} names (SHA-256): prepare again")
    try:
        rows = np.load(io.BytesIO(content), allow_pickle=False)
    except ValueError as error:
        raise ValueError(f"{where} is no array ({error}): prepare again") from None
    if rows.dtype != np.int64 or rows.shape != (about.images, 4):
        raise ValueError(f"{where} holds {rows.dtype} {list(rows.shape)}, not int64 [{about.images}, 4]")
    shard, offset, length, label = rows.T
    if shard.min() < 0 or shard.max() >= len(about.shards):
        raise ValueError(f"{where} names shards that there are not: prepare again")
    counts = np.bincount(shard, minlength=len(about.shards))
    sizes = np.array([shard.bytes for shard in about.shards])
    same = shard[1:] == shard[:-1]
    problems = {
        "has other numbers of images": (counts != [shard.images for shard in about.shards]).any(),
        "is not sorted": (np.diff(shard) < 0).any() or (same & (np.diff(offset) <= 0)).any(),
        "has images that overlap": (same & (offset[1:] < offset[:-1] + length[:-1])).any(),
        "has images outside of their shards": (
            (offset < HEADER_BYTES) | (length < 1) | (offset + length > sizes[shard])
        ).any(),
        "has labels without a class": label.min() < 0 or label.max() >= len(manifest.classes),
    }
    if wrong := [problem for problem, found in problems.items() if found]:
        raise ValueError(f"{where} {wrong[0]}: prepare again")
    return rows


class ShardImages:
    """The images of one split in tar files, by number: of the cached index, and the files of its shards."""

    def __init__(self, index: Path, files: tuple[str, ...]):
        mapped = np.load(index, mmap_mode="r")  # int64 [N, 4]
        self.images, self.rows_begin, self.row_bytes = len(mapped), mapped.offset, mapped.strides[0]
        self.index, self.files = open(index, "rb", buffering=0), files  # noqa: SIM115

    def __len__(self) -> int:
        return self.images

    def row(self, i: int) -> list[int]:
        """Shard, offset, length and label of image i. Read, not mapped, which every worker would have for
        itself, and which kills it (SIGBUS) when the file is cut."""
        data = os.pread(self.index.fileno(), self.row_bytes, self.rows_begin + int(i) * self.row_bytes)
        if len(data) < self.row_bytes:
            raise OSError(
                f"{self.index.name} is shorter than it was: remove its folder, and the same command prepares"
                " it again"
            )
        return np.frombuffer(data, np.int64).tolist()

    def file(self, i: int) -> str:
        return self.files[self.row(i)[0]]

    def where(self, i: int) -> str:
        """What to call image i in a message: its shard, offset and key."""
        shard, offset, _, _ = self.row(i)
        with open(self.files[shard], "rb", buffering=0) as file:
            header = os.pread(file.fileno(), HEADER_BYTES, offset - HEADER_BYTES)
        parts = [header[start:end].rstrip(b"\0").decode("utf-8", "replace") for start, end in NAME_FIELDS]
        key = os.path.splitext("/".join(filter(None, parts)))[0]
        return f"{self.files[shard]}, offset {offset}, key {key}"

    def decode(self, i: int) -> np.ndarray:
        """uint8 [H, W, 3]. Raises ValueError that names the image, OSError where its shard can't be read."""
        shard, offset, length, _ = self.row(i)
        data = bytearray(length)
        # Opened each time, some 10 us: nothing holds the room of a shard that the cache has removed.
        with open(self.files[shard], "rb", buffering=0) as file:
            if os.preadv(file.fileno(), [data], offset) < length:
                raise OSError(f"{self.files[shard]} is shorter than {MANIFEST} says: prepare again")
        try:
            return decode(data)
        except ValueError as error:
            raise ValueError(f"{self.where(i)}: {error}") from None


NAME_FIELDS = ((345, 500), (0, 100))  # of a ustar header: what comes before the last slash, and the name
