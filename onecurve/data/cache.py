"""The cache of prepared images: a folder per data set, named by a hash of its content, complete or absent.

One process per host writes a temporary folder, under a lock, and renames it when everything is on the disk.
"""

import fcntl
import hashlib
import json
import math
import os
import re
import shutil
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import contextmanager
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from onecurve.data.class_names import refuse_duplicates
from onecurve.data.conversions import Look, conversion_warnings, sample
from onecurve.data.decode import checks_jpegs
from onecurve.data.encoded import FILES, SPLITS, STORED, CachedImages, DamagedImage, Encoded
from onecurve.data.equal import EqualImages
from onecurve.data.sources import Source, find_source
from onecurve.data.splits import hold_out, part_file
from onecurve.flags.recipe import ImageRecipe
from onecurve.system.files import discard, read_json, retried, sha256_of, size_limit, sync, try_lock
from onecurve.system.output import log
from onecurve.system.processes import allowed_cores
from onecurve.system.progress import Display
from onecurve.system.threads import Heartbeat, run_with_heartbeat

FORMAT = 1  # part of the key: raised when the content of a cache folder changes
DECODING = 8  # part of the place's key: raised when pixels, names or the content of meta.json change
HASH_LIMIT_BYTES = 4 * 2**30
BLOCK_BYTES = 4096  # of files that are not read whole, a block for each begun part of PART_BYTES is hashed
PART_BYTES = 16 * 2**20
DECODED_BYTES = 8 * 2**30  # more stay encoded: not what memory is free, so that all machines do the same
LOCK, BROKEN = ".lock", "broken.json"
NAMED = 10  # broken images in an error; BROKEN has all
SEARCHED_BYTES = 4 * 2**30  # more are not searched for duplicates, nor decoded to find broken images
CHECKED = 16  # images of any size that a thread decodes in one go
CHUNK_PIXELS = 2**22  # decoded in one go by a thread: some 50 ms, the longest delay of an interruption


class Prepared(NamedTuple):
    folder: str  # in the cache
    left_out: str  # what of the data is not read, and why


def prepare_data(data: str, cache_dir: Path, heartbeat: Heartbeat = lambda: None, **flags: Any) -> Path:
    """The folder of prepare(), with further flags of ImageRecipe."""
    recipe = ImageRecipe(data=data, cache_dir=str(cache_dir), **flags)
    return Path(prepare_cache(recipe, heartbeat).folder)


def prepare_cache(recipe: ImageRecipe, beat: Heartbeat, is_evaluated: bool = False) -> Prepared:
    """Finds or makes the cache folder of recipe.data; one process per host calls it.

    is_evaluated: nothing is trained, so the data need no second split. Calls beat() about every second.
    Raises ValueError for data or a cache that can't be used.
    """
    cache_dir = Path(os.path.expanduser(recipe.cache_dir or "~/.cache/train-images"))
    if str(cache_dir).startswith("~"):
        raise ValueError(
            f"--cache_dir {cache_dir}: this user has no home folder, and HOME is not set."
            " Give --cache_dir PATH"
        )
    cache_dir = cache_dir.resolve()
    try:
        source = find_source(recipe, beat, is_evaluated)
        content, place = run_with_heartbeat(lambda: _keys(source), beat)
        label = re.sub(r"[^A-Za-z0-9._-]", "_", source.name).lstrip(".") or "images"
        folder = cache_dir / f"{label}-{place}"
        _check_owner(cache_dir)
        _check_owner(folder)
        if not folder.exists():
            cache_dir.mkdir(parents=True, exist_ok=True)
            with _lock(cache_dir, beat):
                if not folder.exists():  # another job may have made it while we waited
                    _make(folder, source, f"{label}-{content}", beat)
        _refuse_broken(folder, recipe.on_bad_image == "skip" or is_evaluated)
        return Prepared(str(folder), source.left_out)
    except OSError as error:
        raise ValueError(
            f"--data {recipe.data} could not be prepared in --cache_dir {cache_dir}: {error}{size_limit()}."
            " The data must be readable, and the cache on a local disk with room for the decoded images"
        ) from error


def _check_owner(folder: Path) -> None:
    """Raises ValueError for a folder of another user, who could put pixels into this training."""
    if not folder.exists() or os.geteuid() in (0, folder.stat().st_uid) or folder.stat().st_uid == 0:
        return
    raise ValueError(f"{folder} belongs to user {folder.stat().st_uid}: give a --cache_dir of your own")


def _keys(source: Source) -> tuple[str, str]:
    """Two keys of 16 hex digits: of the content, equal on all hosts, and of the content in its place here.

    The first is SHA-256 of the names and bytes of all files. Above 4 GiB, where reading everything at each
    start would take too long, each file's size and some of its blocks stand for its bytes, and the second key
    covers the times of change. The second key covers the folder of the images, too: the cache may hold their
    paths; and DECODING.
    """
    stats = [retried(path.stat)() for _, path in source.files]
    place = str(source.root or source.shards or "") + (f" {DECODING}" if source.files else "") + source.fold
    is_large = sum(stat.st_size for stat in stats) > HASH_LIMIT_BYTES
    with ThreadPoolExecutor(allowed_cores()) as pool:  # SHA-256 and reading release the GIL
        hashes = list(pool.map(_hash_of_blocks if is_large else lambda f: sha256_of(f[1]), source.files))
    if is_large:
        place += f" {[stat.st_mtime_ns for stat in stats]}"
    content = _short_hash(
        [FORMAT, source.name, [name for name, _ in source.files], [*hashes, *source.hashes]]
    )
    return content, _short_hash([content, place])


@retried
def _hash_of_blocks(file: tuple[str, Path]) -> str:
    """SHA-256 of a file's size and of blocks at positions that its name chooses, so the same on all hosts."""
    name, path = file
    size = path.stat().st_size
    digest = hashlib.sha256(str(size).encode())
    with open(path, "rb", buffering=0) as content:
        for part in range(1 + size // PART_BYTES):
            chosen = int.from_bytes(hashlib.sha256(f"{part} {name}".encode()).digest())
            content.seek(chosen % max(1, size - BLOCK_BYTES + 1))
            digest.update(content.read(BLOCK_BYTES))
    return digest.hexdigest()


def _short_hash(content: list) -> str:
    return hashlib.sha256(json.dumps(content).encode()).hexdigest()[:16]


@contextmanager
def _lock(folder: Path, beat: Heartbeat) -> Iterator[None]:
    """Holds the lock that the processes on a host share; the kernel releases it when its holder dies."""
    descriptor = os.open(folder / LOCK, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        if not try_lock(descriptor):
            log.warning(f"another process is preparing images in {folder}: waiting for it")
            run_with_heartbeat(lambda: fcntl.flock(descriptor, fcntl.LOCK_EX), beat)
        yield
    finally:
        os.close(descriptor)


def _make(folder: Path, source: Source, name: str, beat: Heartbeat) -> None:
    """Writes the cache folder under a temporary name and renames it when it is complete. Needs the lock.

    Where hosts share it over NFS, which tells late of a new folder, another may have made it: that one stays.
    """
    work = folder.parent / ".preparing"
    discard(work)  # left by a process that was killed
    work.mkdir()
    try:
        classes = source.write(work, beat)
        refuse_duplicates(classes, source.name)
        if source.holdout is not None:
            hold_out(work, source.holdout)
        kind, flaws, looks = "shards" if source.shards else "array", list[str](), list[list[Look]]()
        if source.test_name == "test" and source.holdout is None and not (work / "test_labels.npy").exists():
            flaws.append("the test split has no labels (all are -1 or null): it is left out")
        if (work / f"train_{FILES[0]}").exists():
            encoded = {s: CachedImages(work, s) for s in STORED if (work / f"{s}_labels.npy").exists()}
            parts, stored = list[Encoded](encoded.values()), [*encoded]
            if source.holdout is not None:
                parts[:1] = [CachedImages(work, "train", part_file(work, part)) for part in SPLITS]
                stored[:1] = ["train", "train"]
            sizes = (e.size(i) for e in encoded.values() for i in range(len(e)))
            is_small = run_with_heartbeat(lambda: sum(sizes), beat) <= SEARCHED_BYTES
            if is_small:
                every = (np.load(work / f"{split}_labels.npy") for split in stored)
                labels = np.concatenate([own[part.ids] for own, part in zip(every, parts, strict=True)])
                equal = run_with_heartbeat(partial(EqualImages, parts), beat)
                flaws += equal.in_two_splits((source.val_name, source.test_name))
                flaws += equal.in_two_classes(labels, classes)
            looks = run_with_heartbeat(partial(sample, encoded.values()), beat)
            is_decoded = _decode_all(work, source.name, encoded, _common_shape(looks), beat)
            kind = "array" if is_decoded else "files"
            if is_small and kind == "files":
                flaws = _check_all(work, source.name, parts, beat) + flaws
        elif source.shards and not source.shards.startswith("s3://"):
            looks = run_with_heartbeat(partial(_sample_shards, work, source.shards), beat)
        flaws += conversion_warnings([*chain.from_iterable(looks)], is_cropped=kind != "array")
        meta = {
            "kind": kind,
            "flaws": flaws,
            "source": name,
            "classes": classes,
            "val_name": source.val_name,
            "test_name": source.test_name,
            "mirror": source.mirror,
            "shards": source.shards,
        }
        (work / "meta.json").write_text(json.dumps(meta, indent=1) + "\n")
        run_with_heartbeat(lambda: list(map(sync, (*work.iterdir(), work))), beat)
        try:
            os.rename(work, folder)
        except OSError:
            if not (folder / "meta.json").exists():
                raise
        sync(folder.parent)
    finally:
        shutil.rmtree(work, ignore_errors=True)


def _check_all(work: Path, name: str, parts: list[Encoded], beat: Heartbeat) -> list[str]:
    """Decodes images that stay encoded. Writes the errors of those that can't be decoded. Returns a warning
    if others have missing parts."""
    count, found = sum(map(len, parts)), list[list[ValueError]]()
    with _progress(f"checking {count:,} images of {name}", count) as advance:
        for images in parts:
            starts = range(0, len(images), CHECKED)
            chunks = [Chunk(images, None, range(len(images))[k : k + CHECKED]) for k in starts]
            found.append(_decode_chunks(chunks, beat, advance))
    damaged = sorted(str(error) for errors in found for error in errors if isinstance(error, DamagedImage))
    train, *others = (
        [str(error) for error in errors if not isinstance(error, DamagedImage)] for errors in found
    )
    evaluated = [text for texts in others for text in texts] if others else train
    if train or evaluated:
        broken = {"count": count, "train": train if others else [], "evaluated": evaluated}
        (work / BROKEN).write_text(json.dumps(broken, indent=1))
    line = f"{len(damaged):,} of {count:,} images have missing parts, for example {''.join(damaged[:1])}"
    return [f"{line}: repair or remove"] if damaged else []


def _refuse_broken(folder: Path, is_train_skipped: bool) -> None:
    """Raises ValueError that names the images which can't be decoded, of those that must be."""
    if (file := folder / BROKEN).exists():
        found = read_json(file)
        skip = "" if found["evaluated"] else ", or train without them by --on_bad_image skip"
        if bad := found["evaluated"] + found["train"] * (not is_train_skipped):
            raise ValueError(_undecodable(bad, found["count"], file, skip))


class Chunk(NamedTuple):
    """Images that a thread decodes in one go."""

    images: Encoded
    pixels: np.ndarray | None  # uint8 [N, H, W, 3] of the whole split; None: the images are only checked
    ids: range


class _OddSize(Exception):
    """An image has another size than the first ones: the data set stays encoded."""


def _decode_all(
    work: Path, name: str, encoded: Mapping[str, Encoded], shape: tuple[int, ...] | None, beat: Heartbeat
) -> bool:
    """Replaces encoded images by decoded arrays.

    shape: of the sampled images; None if they differ. Returns False, and changes nothing, for None, for an
    image of another shape, or if all splits together need more than DECODED_BYTES. Raises ValueError that
    lists images which can't be decoded.
    """
    count = sum(map(len, encoded.values()))
    if shape is None or count * math.prod(shape) > DECODED_BYTES:
        return False
    chunk = min(256, max(1, CHUNK_PIXELS // math.prod(shape[:2])))
    chunks: list[Chunk] = []
    for split, images in encoded.items():
        pixels = _allocate(work / f"{split}_images.npy", (len(images), *shape))
        chunks += [
            Chunk(images, pixels, range(len(images))[start : start + chunk])
            for start in range(0, len(images), chunk)
        ]
    try:
        with _progress(f"decoding {count:,} images of {name}", count) as advance:
            bad = _decode_chunks(chunks, beat, advance)
    except _OddSize:
        _remove(work, "images.npy")
        return False
    if bad:
        (file := work.parent / BROKEN).write_text(json.dumps(sorted(map(str, bad)), indent=1))
        raise ValueError(_undecodable(bad, count, file))
    _remove(work, *FILES)
    return True


def _common_shape(looks: Iterable[list[Look]]) -> tuple[int, ...] | None:
    """The shape (H, W, 3) that the sampled images of all splits share; None where they differ, or there is
    none."""
    shapes = {look.shape for of_split in looks for look in of_split}
    return shapes.pop() if len(shapes) == 1 else None


def _sample_shards(work: Path, place: str) -> list[list[Look]]:
    """place: a folder with shards."""
    from onecurve.data.shards import MANIFEST, ShardImages, index_name, parse_manifest

    manifest = parse_manifest((work / MANIFEST).read_bytes(), str(work / MANIFEST))
    if manifest.store is not None:
        return []
    splits = {split: manifest.shards_in(split) for split in manifest.splits}
    files = {split: tuple(str(Path(place) / s.file) for s in shards) for split, shards in splits.items()}
    return sample(ShardImages(work / index_name(split), of_split) for split, of_split in files.items())


def _decode_chunks(chunks: list[Chunk], beat: Heartbeat, advance: Callable[[int], None]) -> list[ValueError]:
    """Calls _decode(*chunk) for each chunk, in a thread per core. Returns an error for each broken image.

    Decoders release the GIL. An exception of beat(), or an odd size, ends the threads after their chunks.
    """
    checks_jpegs()  # said here, before the threads could say it several times
    pool = ThreadPoolExecutor(allowed_cores())
    bad = list[ValueError]()
    try:
        futures = [pool.submit(_decode, *chunk) for chunk in chunks]
        for future, chunk in zip(futures, chunks, strict=True):
            beat()
            while not wait([future], timeout=0.5).done:
                beat()
            bad += future.result()
            advance(len(chunk.ids))
        return bad
    finally:
        pool.shutdown(cancel_futures=True)


def _decode(images: Encoded, pixels: np.ndarray | None, ids: range) -> list[ValueError]:
    """Decodes images[ids] into pixels[ids], if given. Returns an error for each that can't be decoded."""
    bad = []
    for i in ids:
        try:
            image = images.decode(i, strict=True)
        except ValueError as error:
            bad.append(error)
            continue
        if pixels is None:
            continue
        if image.shape != pixels.shape[1:]:
            raise _OddSize
        pixels[i] = image
    return bad


def _undecodable(bad: Sequence[object], count: int, file: Path, advice: str = "") -> str:
    """The message, with ten of the errors. file: has all."""
    more = [f"and {len(bad) - NAMED:,} more: {file} has all"] if len(bad) > NAMED else []
    text = f"{len(bad):,} of {count:,} images can't be decoded: replace or remove them{advice}"
    return "\n  ".join([text, *sorted(map(str, bad))[:NAMED], *more])


@contextmanager
def _progress(text: str, count: int) -> Iterator[Callable[[int], None]]:
    """Shows the progress on stderr. Yields advance(images)."""
    display, done = Display(count, text, sys.stderr), 0
    if not display.bar:
        display.print(text)

    def advance(images: int) -> None:
        nonlocal done
        done += images
        if display.is_due() or (display.bar and done == count):
            display.show(f"{text}  {done:,}/{count:,}", done)

    try:
        yield advance
    finally:
        display.stop()


def _allocate(path: Path, shape: tuple[int, ...]) -> np.ndarray:
    """Creates a memory-mapped uint8 array and reserves its space: a full disk is an error here, no SIGBUS
    later."""
    pixels = np.lib.format.open_memmap(path, "w+", np.uint8, shape)
    with open(path, "r+b") as file:
        os.posix_fallocate(file.fileno(), 0, path.stat().st_size)
    return pixels


def _remove(work: Path, *endings: str) -> None:
    for split in STORED:
        for ending in endings:
            (work / f"{split}_{ending}").unlink(missing_ok=True)
