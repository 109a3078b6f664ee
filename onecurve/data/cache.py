"""Cache of prepared images, with one folder per data set, named by a hash of the data set's content.

A folder in the cache is always complete. One process per host takes a lock, writes a temporary folder, and
renames the folder once all files are on disk.
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

FORMAT = 1  # part of the content key; increase it when the content of a cache folder changes
DECODING = 8  # part of the folder key; increase it when pixels, names or the content of meta.json change
HASH_LIMIT_BYTES = 4 * 2**30  # above this total size, only some blocks of each file are hashed
BLOCK_BYTES = 4096  # size of the block that is hashed in each PART_BYTES of a file
PART_BYTES = 16 * 2**20
DECODED_BYTES = 8 * 2**30  # larger data stays encoded; constant, so that all machines decide alike
LOCK, BROKEN = ".lock", "broken.json"
NAMED = 10  # maximum number of broken images in an error message; the file BROKEN lists all of them
SEARCHED_BYTES = 4 * 2**30  # data above this size is not searched for duplicates or broken images
CHECKED = 16  # images per chunk when images are checked but not stored
CHUNK_PIXELS = 2**22  # pixels per decoded chunk; takes about 50 ms, which delays an interruption


class Prepared(NamedTuple):
    """Location of the prepared data, and a note about ignored files."""

    folder: str  # path of the folder in the cache
    left_out: str  # files that were not read, with the reasons


def prepare_data(data: str, cache_dir: Path, heartbeat: Heartbeat = lambda: None, **flags: Any) -> Path:
    """Prepare data and return its folder in the cache. `flags` are additional fields of ImageRecipe."""
    recipe = ImageRecipe(data=data, cache_dir=str(cache_dir), **flags)
    return Path(prepare_cache(recipe, heartbeat).folder)


def prepare_cache(recipe: ImageRecipe, beat: Heartbeat, is_evaluated: bool = False) -> Prepared:
    """Find or create the cache folder of recipe.data. One process per host calls this function.

    Args:
        recipe: Recipe with the flags of the data.
        beat: Function that is called about once a second.
        is_evaluated: Whether the data is only evaluated, so that one split is enough.

    Raises:
        ValueError: The data or the cache can't be used.
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
        content_key, folder_key = run_with_heartbeat(lambda: _keys(source), beat)
        label = re.sub(r"[^A-Za-z0-9._-]", "_", source.name).lstrip(".") or "images"
        folder = cache_dir / f"{label}-{folder_key}"
        _check_owner(cache_dir)
        _check_owner(folder)
        if not folder.exists():
            cache_dir.mkdir(parents=True, exist_ok=True)
            with _lock(cache_dir, beat):
                if not folder.exists():  # another job may have created it in the meantime
                    _make(folder, source, f"{label}-{content_key}", beat)
        _refuse_broken(folder, recipe.on_bad_image == "skip" or is_evaluated)
        return Prepared(str(folder), source.left_out)
    except OSError as error:
        raise ValueError(
            f"--data {recipe.data} could not be prepared in --cache_dir {cache_dir}: {error}{size_limit()}."
            " The data must be readable, and the cache needs a local disk with space for the decoded images"
        ) from error


def _check_owner(folder: Path) -> None:
    """Raise ValueError if another user owns the folder and could therefore replace the training images."""
    if not folder.exists() or os.geteuid() in (0, folder.stat().st_uid) or folder.stat().st_uid == 0:
        return
    raise ValueError(f"{folder} belongs to user {folder.stat().st_uid}. Give a --cache_dir that you own")


def _keys(source: Source) -> tuple[str, str]:
    """Return the content key, which is equal on all hosts, and the folder key (16 hex digits each).

    The content key is the SHA-256 of the names and bytes of all files. Reading more than 4 GiB at each start
    would take too long, so for larger data the hash covers only the size and some blocks of each file.

    The folder key is a hash of the content key, the path of the image folder (because the cache may store
    image paths), DECODING and the fold. Above 4 GiB, it also covers the files' modification times.
    """
    stats = [retried(path.stat)() for _, path in source.files]
    location = (
        str(source.root or source.shards or "") + (f" {DECODING}" if source.files else "") + source.fold
    )
    is_large = sum(stat.st_size for stat in stats) > HASH_LIMIT_BYTES
    with ThreadPoolExecutor(allowed_cores()) as pool:  # hashing and reading release the GIL
        hashes = list(pool.map(_hash_of_blocks if is_large else lambda f: sha256_of(f[1]), source.files))
    if is_large:
        location += f" {[stat.st_mtime_ns for stat in stats]}"
    content_key = _short_hash(
        [FORMAT, source.name, [name for name, _ in source.files], [*hashes, *source.hashes]]
    )
    return content_key, _short_hash([content_key, location])


@retried
def _hash_of_blocks(file: tuple[str, Path]) -> str:
    """Return the SHA-256 of a file's size and some blocks. The file's name determines which blocks."""
    name, path = file
    size = path.stat().st_size
    digest = hashlib.sha256(str(size).encode())
    with open(path, "rb", buffering=0) as content:
        for part in range(1 + size // PART_BYTES):
            position = int.from_bytes(hashlib.sha256(f"{part} {name}".encode()).digest())
            content.seek(position % max(1, size - BLOCK_BYTES + 1))
            digest.update(content.read(BLOCK_BYTES))
    return digest.hexdigest()


def _short_hash(content: list) -> str:
    return hashlib.sha256(json.dumps(content).encode()).hexdigest()[:16]


@contextmanager
def _lock(folder: Path, beat: Heartbeat) -> Iterator[None]:
    """Hold the cache's lock on this host. The kernel releases the lock if the process that holds it dies."""
    descriptor = os.open(folder / LOCK, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        if not try_lock(descriptor):
            log.warning(f"waiting for another process that prepares images in {folder}")
            run_with_heartbeat(lambda: fcntl.flock(descriptor, fcntl.LOCK_EX), beat)
        yield
    finally:
        os.close(descriptor)


def _make(folder: Path, source: Source, name: str, beat: Heartbeat) -> None:
    """Write the cache folder under a temporary name, and rename it once complete. The caller holds the lock.

    If several hosts share the cache over NFS, new folders become visible with a delay, so another host may
    already have created this folder. In that case, the existing folder is kept.
    """
    work = folder.parent / ".preparing"
    discard(work)  # may be left over from a killed process
    work.mkdir()
    try:
        classes = source.write(work, beat)
        refuse_duplicates(classes, source.name)
        if source.holdout is not None:
            hold_out(work, source.holdout)
        storage, flaws, looks = "shards" if source.shards else "array", list[str](), list[list[Look]]()
        if source.test_name == "test" and source.holdout is None and not (work / "test_labels.npy").exists():
            flaws.append("the test split is left out, because it has no labels (all are -1 or null)")
        if (work / f"train_{FILES[0]}").exists():
            encoded = {s: CachedImages(work, s) for s in STORED if (work / f"{s}_labels.npy").exists()}
            parts, stored_splits = list[Encoded](encoded.values()), [*encoded]
            if source.holdout is not None:
                parts[:1] = [CachedImages(work, "train", part_file(work, part)) for part in SPLITS]
                stored_splits[:1] = ["train", "train"]
            sizes = (e.size(i) for e in encoded.values() for i in range(len(e)))
            is_small = run_with_heartbeat(lambda: sum(sizes), beat) <= SEARCHED_BYTES
            if is_small:
                stored_labels = (np.load(work / f"{split}_labels.npy") for split in stored_splits)
                part_labels = [labels[part.ids] for labels, part in zip(stored_labels, parts, strict=True)]
                equal = run_with_heartbeat(partial(EqualImages, parts), beat)
                flaws += equal.in_two_splits((source.val_name, source.test_name))
                flaws += equal.in_two_classes(np.concatenate(part_labels), classes)
            looks = run_with_heartbeat(partial(sample, encoded.values()), beat)
            is_decoded = _decode_all(work, source.name, encoded, _common_shape(looks), beat)
            storage = "array" if is_decoded else "files"
            if is_small and storage == "files":
                flaws = _check_all(work, source.name, parts, beat) + flaws
        elif source.shards and not source.shards.startswith("s3://"):
            looks = run_with_heartbeat(partial(_sample_shards, work, source.shards), beat)
        flaws += conversion_warnings([*chain.from_iterable(looks)], is_cropped=storage != "array")
        meta = {
            "kind": storage,
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
    """Decode images that stay encoded once, to check them.

    Write the errors of undecodable images to the file BROKEN. Return a warning if parts of images are
    missing.
    """
    count, part_errors = sum(map(len, parts)), list[list[ValueError]]()
    with _progress(f"checking {count:,} images of {name}", count) as advance:
        for images in parts:
            starts = range(0, len(images), CHECKED)
            chunks = [Chunk(images, None, range(len(images))[k : k + CHECKED]) for k in starts]
            part_errors.append(_decode_chunks(chunks, beat, advance))
    all_errors = chain.from_iterable(part_errors)
    damaged = sorted(str(error) for error in all_errors if isinstance(error, DamagedImage))
    train, *others = (
        [str(error) for error in errors if not isinstance(error, DamagedImage)] for errors in part_errors
    )
    evaluated = [text for texts in others for text in texts] if others else train
    if train or evaluated:
        broken = {"count": count, "train": train if others else [], "evaluated": evaluated}
        (work / BROKEN).write_text(json.dumps(broken, indent=1))
    line = f"{len(damaged):,} of {count:,} images have missing parts, for example {''.join(damaged[:1])}"
    return [f"{line}. Repair or remove them"] if damaged else []


def _refuse_broken(folder: Path, is_train_skipped: bool) -> None:
    """Raise ValueError that lists the undecodable images, unless all of them may be skipped."""
    if (file := folder / BROKEN).exists():
        broken = read_json(file)
        skip = "" if broken["evaluated"] else ", or train without them with --on_bad_image skip"
        if errors := broken["evaluated"] + broken["train"] * (not is_train_skipped):
            raise ValueError(_undecodable(errors, broken["count"], file, skip))


class Chunk(NamedTuple):
    """Images that a thread decodes without interruption."""

    images: Encoded
    pixels: np.ndarray | None  # array for the whole split, uint8 [N, H, W, 3]; None only checks the images
    ids: range


class _OddSize(Exception):
    """Signal that an image and the sampled images differ in size, so that all images stay encoded."""


def _decode_all(
    work: Path, name: str, encoded: Mapping[str, Encoded], shape: tuple[int, ...] | None, beat: Heartbeat
) -> bool:
    """Replace encoded images with decoded arrays if all images have one shape and fit into DECODED_BYTES.

    Args:
        work: Folder of the encoded images.
        name: Name of the data.
        encoded: Images of each split.
        shape: Common shape of the sampled images, or None if their shapes differ.
        beat: Function that is called about once a second.

    Returns:
        True if the images were decoded. If False, no file has changed.

    Raises:
        ValueError: Some images can't be decoded. The message lists these images.
    """
    count = sum(map(len, encoded.values()))
    if shape is None or count * math.prod(shape) > DECODED_BYTES:
        return False
    chunk_size = min(256, max(1, CHUNK_PIXELS // math.prod(shape[:2])))
    chunks: list[Chunk] = []
    for split, images in encoded.items():
        pixels = _allocate(work / f"{split}_images.npy", (len(images), *shape))
        chunks += [
            Chunk(images, pixels, range(len(images))[start : start + chunk_size])
            for start in range(0, len(images), chunk_size)
        ]
    try:
        with _progress(f"decoding {count:,} images of {name}", count) as advance:
            errors = _decode_chunks(chunks, beat, advance)
    except _OddSize:
        _remove(work, "images.npy")
        return False
    if errors:
        (file := work.parent / BROKEN).write_text(json.dumps(sorted(map(str, errors)), indent=1))
        raise ValueError(_undecodable(errors, count, file))
    _remove(work, *FILES)
    return True


def _common_shape(looks: Iterable[list[Look]]) -> tuple[int, ...] | None:
    """Return the common shape (H, W, 3) of the sampled images, or None without images or a common shape."""
    shapes = {look.shape for split_looks in looks for look in split_looks}
    return shapes.pop() if len(shapes) == 1 else None


def _sample_shards(work: Path, shard_folder: str) -> list[list[Look]]:
    """Sample images from shards in a local folder. Shards in S3 are not sampled."""
    from onecurve.data.shards import MANIFEST, ShardImages, index_name, parse_manifest

    manifest = parse_manifest((work / MANIFEST).read_bytes(), str(work / MANIFEST))
    if manifest.store is not None:
        return []
    splits = {split: manifest.shards_in(split) for split in manifest.splits}
    files = {
        split: tuple(str(Path(shard_folder) / s.file) for s in shards) for split, shards in splits.items()
    }
    return sample(ShardImages(work / index_name(split), paths) for split, paths in files.items())


def _decode_chunks(chunks: list[Chunk], beat: Heartbeat, advance: Callable[[int], None]) -> list[ValueError]:
    """Call _decode(*chunk) for each chunk, in one thread per core. Return an error for each broken image.

    Threads help because the decoders release the GIL. If beat() raises an exception or an image has a
    different size, each thread finishes its current chunk and stops.
    """
    checks_jpegs()  # logs its warning once, before the threads start
    pool = ThreadPoolExecutor(allowed_cores())
    errors = list[ValueError]()
    try:
        futures = [pool.submit(_decode, *chunk) for chunk in chunks]
        for future, chunk in zip(futures, chunks, strict=True):
            beat()
            while not wait([future], timeout=0.5).done:
                beat()
            errors += future.result()
            advance(len(chunk.ids))
        return errors
    finally:
        pool.shutdown(cancel_futures=True)


def _decode(images: Encoded, pixels: np.ndarray | None, ids: range) -> list[ValueError]:
    """Decode images[ids] into pixels[ids], unless `pixels` is None. Return one error per broken image."""
    errors = []
    for i in ids:
        try:
            image = images.decode(i, strict=True)
        except ValueError as error:
            errors.append(error)
            continue
        if pixels is None:
            continue
        if image.shape != pixels.shape[1:]:
            raise _OddSize
        pixels[i] = image
    return errors


def _undecodable(errors: Sequence[object], count: int, file: Path, advice: str = "") -> str:
    """Return the error message for undecodable images, with the first NAMED errors.

    Args:
        errors: All errors.
        count: Number of images.
        file: File that lists all errors.
        advice: Alternative to replacing or removing the images.
    """
    rest = [f"and {len(errors) - NAMED:,} more, listed in {file}"] if len(errors) > NAMED else []
    text = f"{len(errors):,} of {count:,} images can't be decoded. Replace or remove them{advice}"
    return "\n  ".join([text, *sorted(map(str, errors))[:NAMED], *rest])


@contextmanager
def _progress(text: str, count: int) -> Iterator[Callable[[int], None]]:
    """Show the progress on stderr. Yield a function that advances the progress by a number of images."""
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
    """Create a memory-mapped uint8 array, and reserve its disk space.

    Without the reservation, a full disk would cause SIGBUS later. With it, this function raises OSError.
    """
    pixels = np.lib.format.open_memmap(path, "w+", np.uint8, shape)
    with open(path, "r+b") as file:
        os.posix_fallocate(file.fileno(), 0, path.stat().st_size)
    return pixels


def _remove(work: Path, *endings: str) -> None:
    for split in STORED:
        for ending in endings:
            (work / f"{split}_{ending}").unlink(missing_ok=True)
