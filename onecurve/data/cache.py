"""Cache of prepared images. Each data set has a folder whose name contains a hash of the data set's content.

A data set's folder is always complete, because one process per host acquires a lock, writes all files to a
temporary folder, and renames the folder once the files are on disk.
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
from onecurve.data.conversions import ImageStats, conversion_warnings, sample_images
from onecurve.data.decode import checks_jpegs
from onecurve.data.encoded import ALL_SPLITS, ITEM_FILES, SPLITS, CachedImages, DamagedImage, EncodedImages
from onecurve.data.equal import EqualImages
from onecurve.data.sources import Source, find_source
from onecurve.data.splits import hold_out, part_file
from onecurve.flags.recipe import ImageRecipe
from onecurve.system.files import discard, read_json, retried, sha256_of, size_limit, sync, try_lock
from onecurve.system.output import log
from onecurve.system.processes import allowed_cores
from onecurve.system.progress import Display
from onecurve.system.threads import Heartbeat, run_with_heartbeat

LAYOUT_VERSION = 1  # version in the content key; increase it whenever the layout of a cache folder changes
PIXEL_VERSION = 8  # version in the folder key; increase it whenever decoded pixels, names or meta.json change
HASH_LIMIT_BYTES = 4 * 2**30  # total size above which only sampled blocks of each file are hashed
BLOCK_BYTES = 4096  # size of the block hashed in every PART_BYTES of a file
PART_BYTES = 16 * 2**20
# Decoded size above which data stays encoded. The limit is fixed so that all machines make the same decision.
MAX_DECODED_BYTES = 8 * 2**30
LOCK_FILE, BROKEN_FILE = ".lock", "broken.json"
NAMED = 10  # maximum number of broken images in an error message; BROKEN_FILE lists every broken image
MAX_SEARCH_BYTES = 4 * 2**30  # encoded size above which data is not part for duplicates and broken images
CHECKED = 16  # number of images per chunk when images are checked but not stored
# Number of pixels per decoded chunk. Decoding a chunk takes about 50 ms and can't be interrupted.
CHUNK_PIXELS = 2**22


class PreparedData(NamedTuple):
    """Location of prepared data, with a note about ignored source files."""

    folder: str  # path of the data set's folder in the cache
    left_out: str  # description of the ignored files, including the reasons


def prepare_data(data: str, cache_dir: Path, heartbeat: Heartbeat = lambda: None, **flags: Any) -> Path:
    """Prepare a data set and return its cache folder. `flags` sets additional ImageRecipe fields."""
    recipe = ImageRecipe(data=data, cache_dir=str(cache_dir), **flags)
    return Path(prepare_cache(recipe, heartbeat).folder)


def prepare_cache(recipe: ImageRecipe, beat: Heartbeat, is_evaluated: bool = False) -> PreparedData:
    """Find or create the cache folder for recipe.data. Only one process per host calls this function.

    Args:
        recipe: Recipe that contains the data flags.
        beat: Heartbeat function, called about once per second.
        is_evaluated: Whether the data is used only for evaluation, so that a single split is sufficient.

    Raises:
        ValueError: If the data or the cache can't be used.
    """
    cache_dir = Path(os.path.expanduser(recipe.cache_dir or "~/.cache/train-images"))
    if str(cache_dir).startswith("~"):
        raise ValueError(
            f"--cache_dir {cache_dir} can't be resolved, because this user has no home folder and HOME is not"
            " set. Set --cache_dir to an absolute path"
        )
    cache_dir = cache_dir.resolve()
    try:
        source = find_source(recipe, beat, is_evaluated)
        content_key, folder_key = run_with_heartbeat(lambda: _cache_keys(source), beat)
        label = re.sub(r"[^A-Za-z0-9._-]", "_", source.name).lstrip(".") or "images"
        folder = cache_dir / f"{label}-{folder_key}"
        _check_owner(cache_dir)
        _check_owner(folder)
        if not folder.exists():
            cache_dir.mkdir(parents=True, exist_ok=True)
            with _cache_lock(cache_dir, beat):
                if not folder.exists():  # another job may have created the folder in the meantime
                    _write_folder(folder, source, f"{label}-{content_key}", beat)
        _refuse_broken(folder, recipe.on_bad_image == "skip" or is_evaluated)
        return PreparedData(str(folder), source.left_out)
    except OSError as error:
        raise ValueError(
            f"--data {recipe.data} could not be prepared in --cache_dir {cache_dir}: {error}{size_limit()}."
            " Make sure that the data is readable and that --cache_dir is on a local disk with space for the"
            " decoded images"
        ) from error


def _check_owner(folder: Path) -> None:
    """Raise ValueError if the folder belongs to another user, who could replace the training images."""
    if not folder.exists():
        return
    owner_id = folder.stat().st_uid
    if os.geteuid() not in (0, owner_id) and owner_id != 0:
        raise ValueError(f"{folder} belongs to user {owner_id}. Set --cache_dir to a folder that you own")


def _cache_keys(source: Source) -> tuple[str, str]:
    """Return the content key, which is the same on all hosts, and the folder key (16 hex digits each).

    The content key is a SHA-256 hash of all file names and file contents. Above 4 GiB, the hash covers only
    each file's size and sampled blocks, because reading all files at every start would take too long.

    The folder key is a hash of the content key, the image folder's path (because the cache may store image
    paths), PIXEL_VERSION and the holdout fold. Above 4 GiB, the folder key also covers the files'
    modification times.
    """
    file_stats = [retried(path.stat)() for _, path in source.files]
    location = (
        str(source.root or source.shards or "") + (f" {PIXEL_VERSION}" if source.files else "") + source.fold
    )
    is_large = sum(file_stat.st_size for file_stat in file_stats) > HASH_LIMIT_BYTES
    with ThreadPoolExecutor(allowed_cores()) as executor:  # hashing and reading release the GIL
        hash_file = _hash_of_blocks if is_large else _hash_of_content
        hashes = list(executor.map(hash_file, source.files))
    if is_large:
        location += f" {[file_stat.st_mtime_ns for file_stat in file_stats]}"
    content_key = _short_hash(
        [LAYOUT_VERSION, source.name, [name for name, _ in source.files], [*hashes, *source.hashes]]
    )
    return content_key, _short_hash([content_key, location])


def _hash_of_content(file: tuple[str, Path]) -> str:
    _, path = file
    return sha256_of(path)


@retried
def _hash_of_blocks(file: tuple[str, Path]) -> str:
    """Return the SHA-256 of a file's size and sampled blocks, whose positions depend on the file's name."""
    name, path = file
    size = path.stat().st_size
    digest = hashlib.sha256(str(size).encode())
    with open(path, "rb", buffering=0) as stream:
        for part_index in range(1 + size // PART_BYTES):
            position = int.from_bytes(hashlib.sha256(f"{part_index} {name}".encode()).digest())
            stream.seek(position % max(1, size - BLOCK_BYTES + 1))
            digest.update(stream.read(BLOCK_BYTES))
    return digest.hexdigest()


def _short_hash(content: list) -> str:
    return hashlib.sha256(json.dumps(content).encode()).hexdigest()[:16]


@contextmanager
def _cache_lock(cache_dir: Path, beat: Heartbeat) -> Iterator[None]:
    """Hold the cache's lock on this host. The kernel releases the lock if the process dies."""
    descriptor = os.open(cache_dir / LOCK_FILE, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        if not try_lock(descriptor):
            log.warning(f"waiting for another process to finish preparing images in {cache_dir}")
            run_with_heartbeat(lambda: fcntl.flock(descriptor, fcntl.LOCK_EX), beat)
        yield
    finally:
        os.close(descriptor)


def _write_folder(folder: Path, source: Source, source_name: str, beat: Heartbeat) -> None:
    """Write a cache folder under a temporary name and then rename it. The caller must hold the lock.

    If several hosts share the cache over NFS, new folders become visible with a delay, so another host may
    already have created the same folder. In that case, the existing folder is kept.
    """
    new_folder = folder.parent / ".preparing"
    discard(new_folder)  # may exist if an earlier process was killed
    new_folder.mkdir()
    try:
        classes = source.write(new_folder, beat)
        refuse_duplicates(classes, source.name)
        if source.holdout is not None:
            hold_out(new_folder, source.holdout)
        storage = "shards" if source.shards else "array"
        warnings: list[str] = []
        stats: list[list[ImageStats]] = []
        if (
            source.test_name == "test"
            and source.holdout is None
            and not (new_folder / "test_labels.npy").exists()
        ):
            warnings.append("the test split is left out, because all of its labels are -1 or null")
        if (new_folder / f"train_{ITEM_FILES[0]}").exists():
            stored_splits = [split for split in ALL_SPLITS if (new_folder / f"{split}_labels.npy").exists()]
            encoded = {split: CachedImages(new_folder, split) for split in stored_splits}
            searched: list[EncodedImages] = list(encoded.values())
            if source.holdout is not None:
                searched[:1] = [
                    CachedImages(new_folder, "train", part_file(new_folder, part)) for part in SPLITS
                ]
                stored_splits[:1] = ["train", "train"]
            sizes = (images.size(index) for images in encoded.values() for index in range(len(images)))
            is_searched = run_with_heartbeat(lambda: sum(sizes), beat) <= MAX_SEARCH_BYTES
            if is_searched:
                stored_labels = (np.load(new_folder / f"{split}_labels.npy") for split in stored_splits)
                all_labels = [labels[part.ids] for labels, part in zip(stored_labels, searched, strict=True)]
                equal_images = run_with_heartbeat(partial(EqualImages, searched), beat)
                warnings += equal_images.split_warnings((source.val_name, source.test_name))
                warnings += equal_images.class_warnings(np.concatenate(all_labels), classes)
            stats = run_with_heartbeat(partial(sample_images, encoded.values()), beat)
            is_decoded = _decode_all(new_folder, source.name, encoded, _common_shape(stats), beat)
            storage = "array" if is_decoded else "files"
            if is_searched and storage == "files":
                warnings = _check_all(new_folder, source.name, searched, beat) + warnings
        elif source.shards and not source.shards.startswith("s3://"):
            stats = run_with_heartbeat(partial(_sample_shards, new_folder, source.shards), beat)
        warnings += conversion_warnings([*chain.from_iterable(stats)], is_cropped=storage != "array")
        meta = {
            "kind": storage,
            "flaws": warnings,
            "source": source_name,
            "classes": classes,
            "val_name": source.val_name,
            "test_name": source.test_name,
            "mirror": source.mirror,
            "shards": source.shards,
        }
        (new_folder / "meta.json").write_text(json.dumps(meta, indent=1) + "\n")
        run_with_heartbeat(lambda: list(map(sync, (*new_folder.iterdir(), new_folder))), beat)
        try:
            os.rename(new_folder, folder)
        except OSError:
            if not (folder / "meta.json").exists():
                raise
        sync(folder.parent)
    finally:
        shutil.rmtree(new_folder, ignore_errors=True)


def _check_all(new_folder: Path, source_name: str, splits: list[EncodedImages], beat: Heartbeat) -> list[str]:
    """Check images that stay encoded by decoding each image once.

    The function writes the errors for undecodable images to the file BROKEN_FILE. The returned list contains
    a warning if any image has missing data.
    """
    count, part_errors = sum(map(len, splits)), list[list[ValueError]]()
    with _show_progress(f"checking {count:,} images of {source_name}", count) as advance:
        for images in splits:
            starts = range(0, len(images), CHECKED)
            chunks = [Chunk(images, None, range(len(images))[start : start + CHECKED]) for start in starts]
            part_errors.append(_decode_chunks(chunks, beat, advance))
    all_errors = chain.from_iterable(part_errors)
    damaged = sorted(str(error) for error in all_errors if isinstance(error, DamagedImage))
    train_errors, *evaluated_errors = (
        [str(error) for error in errors if not isinstance(error, DamagedImage)] for errors in part_errors
    )
    all_evaluated_errors = list(chain.from_iterable(evaluated_errors))
    if not evaluated_errors:  # evaluation uses the only split
        train_errors, all_evaluated_errors = [], train_errors
    if train_errors or all_evaluated_errors:
        broken = {"count": count, "train": train_errors, "evaluated": all_evaluated_errors}
        (new_folder / BROKEN_FILE).write_text(json.dumps(broken, indent=1))
    problem = f"{len(damaged):,} of {count:,} images have missing parts, for example {''.join(damaged[:1])}"
    return [f"{problem}. Repair or remove these images"] if damaged else []


def _refuse_broken(folder: Path, is_train_skipped: bool) -> None:
    """Raise a ValueError that lists the undecodable images, unless training may skip every such image."""
    file = folder / BROKEN_FILE
    if not file.exists():
        return
    broken_images = read_json(file)
    messages = broken_images["evaluated"] + ([] if is_train_skipped else broken_images["train"])
    if messages:
        advice = "" if broken_images["evaluated"] else ", or add --on_bad_image skip to train without them"
        raise ValueError(_undecodable_message(messages, broken_images["count"], file, advice))


class Chunk(NamedTuple):
    """Consecutive images that one thread decodes without interruption."""

    images: EncodedImages
    pixels: np.ndarray | None  # pixels of the whole split, uint8 [N, H, W, 3]; None only checks images
    ids: range


class _UnequalSizes(Exception):
    """Exception for an image that differs in size from the sampled images, so all images stay encoded."""


def _decode_all(
    new_folder: Path,
    source_name: str,
    encoded: Mapping[str, EncodedImages],
    shape: tuple[int, ...] | None,
    beat: Heartbeat,
) -> bool:
    """Replace encoded images with decoded arrays if all images share a shape and fit into MAX_DECODED_BYTES.

    Args:
        new_folder: Folder that contains the encoded images.
        source_name: Name of the data set.
        encoded: Encoded images of each split, by split name.
        shape: Shape shared by all sampled images, or None if their shapes differ.
        beat: Heartbeat function, called about once per second.

    Returns:
        True if the images were decoded, or False if all images stay encoded and no file has changed.

    Raises:
        ValueError: If some images can't be decoded. The message lists these images.
    """
    count = sum(map(len, encoded.values()))
    if shape is None or count * math.prod(shape) > MAX_DECODED_BYTES:
        return False
    chunk_size = min(256, max(1, CHUNK_PIXELS // math.prod(shape[:2])))
    chunks: list[Chunk] = []
    for split, images in encoded.items():
        pixels = _create_pixels(new_folder / f"{split}_images.npy", (len(images), *shape))
        chunks += [
            Chunk(images, pixels, range(len(images))[start : start + chunk_size])
            for start in range(0, len(images), chunk_size)
        ]
    try:
        with _show_progress(f"decoding {count:,} images of {source_name}", count) as advance:
            errors = _decode_chunks(chunks, beat, advance)
    except _UnequalSizes:
        _remove_split_files(new_folder, "images.npy")
        return False
    if errors:
        broken_file = new_folder.parent / BROKEN_FILE
        broken_file.write_text(json.dumps(sorted(map(str, errors)), indent=1))
        raise ValueError(_undecodable_message(errors, count, broken_file))
    _remove_split_files(new_folder, *ITEM_FILES)
    return True


def _common_shape(stats: Iterable[list[ImageStats]]) -> tuple[int, ...] | None:
    """Return the shape (H, W, 3) shared by all sampled images, or None if their shapes differ."""
    shapes = {look.shape for split_stats in stats for look in split_stats}
    return shapes.pop() if len(shapes) == 1 else None


def _sample_shards(new_folder: Path, shard_folder: str) -> list[list[ImageStats]]:
    """Sample images from shards in a local folder. For shards in S3, return an empty list."""
    from onecurve.data.shards import MANIFEST, ShardImages, index_name, parse_manifest

    manifest = parse_manifest((new_folder / MANIFEST).read_bytes(), str(new_folder / MANIFEST))
    if manifest.store is not None:
        return []
    splits = {split: manifest.shards_in(split) for split in manifest.splits}
    files = {
        split: tuple(str(Path(shard_folder) / shard.file) for shard in shards)
        for split, shards in splits.items()
    }
    return sample_images(ShardImages(new_folder / index_name(split), paths) for split, paths in files.items())


def _decode_chunks(chunks: list[Chunk], beat: Heartbeat, advance: Callable[[int], None]) -> list[ValueError]:
    """Call _decode_chunk(*chunk) for each chunk with one thread per core. Return one error per broken image.

    Threads run in parallel because the decoders release the GIL. If beat() raises an exception or an image
    has an unexpected size, each thread finishes its current chunk and stops.
    """
    checks_jpegs()  # logs the warning about a missing package before the threads start
    executor = ThreadPoolExecutor(allowed_cores())
    errors = list[ValueError]()
    try:
        futures = [executor.submit(_decode_chunk, *chunk) for chunk in chunks]
        for future, chunk in zip(futures, chunks, strict=True):
            beat()
            while not wait([future], timeout=0.5).done:
                beat()
            errors += future.result()
            advance(len(chunk.ids))
        return errors
    finally:
        executor.shutdown(cancel_futures=True)


def _decode_chunk(images: EncodedImages, pixels: np.ndarray | None, ids: range) -> list[ValueError]:
    """Decode images[ids] into pixels[ids], unless `pixels` is None, and return one error per broken image."""
    errors = []
    for index in ids:
        try:
            image = images.decode(index, strict=True)
        except ValueError as error:
            errors.append(error)
            continue
        if pixels is None:
            continue
        if image.shape != pixels.shape[1:]:
            raise _UnequalSizes
        pixels[index] = image
    return errors


def _undecodable_message(errors: Sequence[object], count: int, file: Path, advice: str = "") -> str:
    """Return an error message that lists the first NAMED errors for undecodable images.

    Args:
        errors: Errors for all undecodable images.
        count: Total number of images.
        file: File that lists all errors, named in the message if there are more than NAMED errors.
        advice: Text that suggests an alternative to replacing or removing the images.
    """
    remainder = [f"and {len(errors) - NAMED:,} more images, listed in {file}"] if len(errors) > NAMED else []
    summary = f"{len(errors):,} of {count:,} images can't be decoded. Replace or remove these images{advice}"
    return "\n  ".join([summary, *sorted(map(str, errors))[:NAMED], *remainder])


@contextmanager
def _show_progress(title: str, count: int) -> Iterator[Callable[[int], None]]:
    """Show progress on stderr, and yield a function that advances it by a number of images."""
    display, done_count = Display(count, title, sys.stderr), 0
    if not display.bar:
        display.print(title)

    def advance(images: int) -> None:
        nonlocal done_count
        done_count += images
        if display.is_due() or (display.bar and done_count == count):
            display.show(f"{title}  {done_count:,}/{count:,}", done_count)

    try:
        yield advance
    finally:
        display.stop()


def _create_pixels(path: Path, shape: tuple[int, ...]) -> np.ndarray:
    """Create a memory-mapped uint8 array and reserve disk space for it.

    With the reservation, a full disk raises OSError here. Without the reservation, a full disk would cause
    SIGBUS on a later write.
    """
    pixels = np.lib.format.open_memmap(path, "w+", np.uint8, shape)
    with open(path, "r+b") as file:
        os.posix_fallocate(file.fileno(), 0, path.stat().st_size)
    return pixels


def _remove_split_files(new_folder: Path, *endings: str) -> None:
    for split in ALL_SPLITS:
        for ending in endings:
            (new_folder / f"{split}_{ending}").unlink(missing_ok=True)
