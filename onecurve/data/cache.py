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

from onecurve.data.conversions import ImageStats, conversion_warnings, sample_images
from onecurve.data.decode import detect_simplejpeg
from onecurve.data.encoded import (
    ALL_SPLITS,
    ITEM_FILE_ENDINGS,
    SPLITS,
    CachedImages,
    DamagedImage,
    EncodedImages,
)
from onecurve.data.equal import DuplicateImages
from onecurve.data.sources import Source, find_source
from onecurve.data.splits import hold_out, part_ids_path
from onecurve.flags.recipe import ImageRecipe
from onecurve.models.class_names import refuse_duplicates
from onecurve.system.files import discard, read_json, retried, sha256_of, sync, try_lock, ulimit_hint
from onecurve.system.output import log
from onecurve.system.processes import allowed_cores
from onecurve.system.progress import Display
from onecurve.system.threads import Heartbeat, run_with_heartbeat

LAYOUT_VERSION = 1  # version in the content key; increase it whenever the layout of a cache folder changes
PIXEL_VERSION = 8  # version in the folder key; increase it whenever decoded pixels, names or meta.json change
HASH_LIMIT_BYTES = 4 * 2**30  # total size above which only sampled blocks of each file are hashed
HASHED_BLOCK_BYTES = 4096  # size of each block that is hashed in a large file
FILE_PART_BYTES = 16 * 2**20  # bytes of a large file per hashed block
KEY_DIGITS = 16  # hex digits in a content key or folder key
MAX_DECODED_BYTES = 8 * 2**30  # decoded size above which images stay encoded, the same on every machine
MAX_SEARCH_BYTES = 4 * 2**30  # encoded size above which data is not searched for duplicates and broken images
LOCK_FILE = ".lock"  # file in --cache_dir that the preparing process locks
BROKEN_IMAGES_FILE = "broken.json"  # list of all images that can't be decoded
MAX_LISTED_IMAGES = 10  # broken images in an error message; BROKEN_IMAGES_FILE lists all broken images
CHECK_CHUNK_IMAGES = 16  # images per chunk when images are decoded to check them, but not stored
MAX_CHUNK_IMAGES = 256  # images per chunk when decoded images are stored
CHUNK_PIXELS = 2**22  # pixels per stored chunk; decoding takes about 50 ms and can't be interrupted


class PreparedData(NamedTuple):
    """Location of prepared data, with a note about ignored source files."""

    folder: str  # path of the data set's folder in the cache
    ignored_files_note: str  # description of the ignored files, including the reasons


def prepare_data(data: str, cache_dir: Path, heartbeat: Heartbeat = lambda: None, **flags: Any) -> Path:
    """Prepare a data set and return its cache folder. `flags` sets additional ImageRecipe fields."""
    recipe = ImageRecipe(data=data, cache_dir=str(cache_dir), **flags)
    return Path(prepare_cache(recipe, heartbeat).folder)


def prepare_cache(
    recipe: ImageRecipe, heartbeat: Heartbeat, is_evaluation_only: bool = False
) -> PreparedData:
    """Find or create the cache folder for recipe.data. Only one process per host calls this function.

    Args:
        recipe: Recipe that contains the data flags.
        heartbeat: Heartbeat function, called about once per second.
        is_evaluation_only: Whether the data is used only for evaluation, so that a single split is enough.

    Raises:
        ValueError: If the data or the cache can't be used.
    """
    cache_dir = Path(os.path.expanduser(recipe.cache_dir or "~/.cache/train-images"))
    if str(cache_dir).startswith("~"):
        raise ValueError(
            f"--cache_dir {cache_dir} can't be resolved, because this user has no home folder"
            " and HOME is not set. Set --cache_dir to an absolute path"
        )
    cache_dir = cache_dir.resolve()
    try:
        source = find_source(recipe, heartbeat, is_evaluation_only)
        content_key, folder_key = run_with_heartbeat(partial(_compute_cache_keys, source), heartbeat)
        safe_data_name = re.sub(r"[^A-Za-z0-9._-]", "_", source.name).lstrip(".") or "images"
        prepared_folder = cache_dir / f"{safe_data_name}-{folder_key}"
        _check_owner(cache_dir)
        _check_owner(prepared_folder)
        if not prepared_folder.exists():
            cache_dir.mkdir(parents=True, exist_ok=True)
            with _hold_cache_lock(cache_dir, heartbeat):
                if not prepared_folder.exists():  # another job may have created the folder in the meantime
                    _write_data_folder(prepared_folder, source, f"{safe_data_name}-{content_key}", heartbeat)
        may_skip_in_training = recipe.on_bad_image == "skip" or is_evaluation_only
        _refuse_broken_images(prepared_folder, may_skip_in_training)
        return PreparedData(str(prepared_folder), source.ignored_files_note)
    except OSError as error:
        raise ValueError(
            f"--data {recipe.data} could not be prepared in --cache_dir {cache_dir}: {error}{ulimit_hint()}."
            " Make sure that the data is readable"
            " and that --cache_dir is on a local disk with space for the decoded images"
        ) from error


def _check_owner(cache_path: Path) -> None:
    """Raise ValueError if the folder belongs to another user, who could replace the training images."""
    if not cache_path.exists():
        return
    owner_id = cache_path.stat().st_uid
    if os.geteuid() not in (0, owner_id) and owner_id != 0:  # root may use any folder and is trusted
        raise ValueError(f"{cache_path} belongs to user {owner_id}. Set --cache_dir to a folder that you own")


def _compute_cache_keys(source: Source) -> tuple[str, str]:
    """Return the content key, which is the same on all hosts, and the folder key.

    The content key is a SHA-256 hash of all file names and file contents. Above 4 GiB, the hash covers only
    each file's size and sampled blocks, because reading all files at every start would take too long.

    The folder key is a hash of the content key, the image folder's path (because the cache may store image
    paths), PIXEL_VERSION and the holdout fold. Above 4 GiB, the folder key also covers the files'
    modification times.
    """
    file_stats = [retried(file_path.stat)() for _, file_path in source.named_files]
    is_hash_sampled = sum(file_stat.st_size for file_stat in file_stats) > HASH_LIMIT_BYTES
    with ThreadPoolExecutor(allowed_cores()) as executor:  # hashing and reading release the GIL
        hash_file = _hash_sampled_blocks if is_hash_sampled else _hash_whole_file
        file_hashes = list(executor.map(hash_file, source.named_files))
    file_names = [file_name for file_name, _ in source.named_files]
    content_key = _short_hash([LAYOUT_VERSION, source.name, file_names, [*file_hashes, *source.hashes]])
    image_location = str(source.root or source.manifest_location or "")
    # PIXEL_VERSION does not apply to generated data and shards, for which no image files are decoded here.
    pixel_version = f" {PIXEL_VERSION}" if source.named_files else ""
    mtimes_ns = f" {[file_stat.st_mtime_ns for file_stat in file_stats]}" if is_hash_sampled else ""
    folder_key = _short_hash([content_key, image_location + pixel_version + source.fold_key + mtimes_ns])
    return content_key, folder_key


def _hash_whole_file(named_file: tuple[str, Path]) -> str:
    """Return the SHA-256 of a file's content. The argument is an element of Source.named_files."""
    _file_name, file_path = named_file
    return sha256_of(file_path)


@retried
def _hash_sampled_blocks(named_file: tuple[str, Path]) -> str:
    """Return the SHA-256 of a file's size and sampled blocks, whose positions depend on the file's name.

    The function hashes one block for each FILE_PART_BYTES of the file, at a random position in the file.
    """
    file_name, file_path = named_file
    file_bytes = file_path.stat().st_size
    file_hash = hashlib.sha256(str(file_bytes).encode())
    with open(file_path, "rb", buffering=0) as source_file:
        for part_index in range(1 + file_bytes // FILE_PART_BYTES):
            random_position = int.from_bytes(hashlib.sha256(f"{part_index} {file_name}".encode()).digest())
            source_file.seek(random_position % max(1, file_bytes - HASHED_BLOCK_BYTES + 1))
            file_hash.update(source_file.read(HASHED_BLOCK_BYTES))
    return file_hash.hexdigest()


def _short_hash(key_parts: list) -> str:
    """Return the first KEY_DIGITS hex digits of the SHA-256 of a list that JSON can represent."""
    return hashlib.sha256(json.dumps(key_parts).encode()).hexdigest()[:KEY_DIGITS]


@contextmanager
def _hold_cache_lock(cache_dir: Path, heartbeat: Heartbeat) -> Iterator[None]:
    """Hold the cache's lock on this host. The kernel releases the lock if the process dies."""
    lock_fd = os.open(cache_dir / LOCK_FILE, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        if not try_lock(lock_fd):
            log.warning(f"waiting for another process to finish preparing images in {cache_dir}")
            run_with_heartbeat(lambda: fcntl.flock(lock_fd, fcntl.LOCK_EX), heartbeat)
        yield
    finally:
        os.close(lock_fd)


def _write_data_folder(prepared_folder: Path, source: Source, source_id: str, heartbeat: Heartbeat) -> None:
    """Write a cache folder under a temporary name and then rename it. The caller must hold the lock.

    If several hosts share the cache over NFS, new folders become visible with a delay, so another host may
    already have created the same folder. In that case, the existing folder is kept.
    """
    temp_folder = prepared_folder.parent / ".preparing"
    discard(temp_folder)  # may exist if an earlier process was killed
    temp_folder.mkdir()
    try:
        class_names = source.write(temp_folder, heartbeat)
        refuse_duplicates(class_names, source.name)
        if source.holdout is not None:
            hold_out(temp_folder, source.holdout)
        storage_format = "shards" if source.manifest_location else "array"
        data_warnings: list[str] = []
        stats_by_split: list[list[ImageStats]] = []  # statistics of the sampled images in each split
        has_test_labels = (temp_folder / "test_labels.npy").exists()
        if source.test_name == "test" and source.holdout is None and not has_test_labels:
            data_warnings.append("the test split is left out, because all of its labels are -1 or null")
        if (temp_folder / f"train_{ITEM_FILE_ENDINGS[0]}").exists():  # the images are encoded
            part_splits = [split for split in ALL_SPLITS if (temp_folder / f"{split}_labels.npy").exists()]
            encoded_splits = {split: CachedImages(temp_folder, split) for split in part_splits}
            searched_parts: list[EncodedImages] = list(encoded_splits.values())
            if source.holdout is not None:  # replace the training split with its training and held-out parts
                ids_files = [part_ids_path(temp_folder, part_name) for part_name in SPLITS]
                searched_parts[:1] = [CachedImages(temp_folder, "train", ids_file) for ids_file in ids_files]
                part_splits[:1] = ["train", "train"]
            # Search for duplicates and contradictory labels, unless reading all images would take too long
            encoded_bytes = run_with_heartbeat(partial(_total_bytes, encoded_splits.values()), heartbeat)
            is_data_searched = encoded_bytes <= MAX_SEARCH_BYTES
            if is_data_searched:
                stored_labels = (np.load(temp_folder / f"{split}_labels.npy") for split in part_splits)
                labels_and_parts = zip(stored_labels, searched_parts, strict=True)
                # `ids` selects the labels of a part from the labels of its stored split
                part_labels = [all_labels[part_images.ids] for all_labels, part_images in labels_and_parts]
                duplicate_images = run_with_heartbeat(partial(DuplicateImages, searched_parts), heartbeat)
                data_warnings += duplicate_images.split_warnings((source.val_name, source.test_name))
                data_warnings += duplicate_images.class_warnings(np.concatenate(part_labels), class_names)
            # Decode all images now if they have the same shape. Otherwise, workers decode them in each epoch
            stats_by_split = run_with_heartbeat(partial(sample_images, encoded_splits.values()), heartbeat)
            image_shape = _common_shape(stats_by_split)
            is_decoded = _decode_to_arrays(temp_folder, source.name, encoded_splits, image_shape, heartbeat)
            storage_format = "array" if is_decoded else "files"
            if is_data_searched and not is_decoded:
                check_warnings = _check_images(temp_folder, source.name, searched_parts, heartbeat)
                data_warnings = check_warnings + data_warnings
        elif source.manifest_location and not source.manifest_location.startswith("s3://"):
            sample_shards = partial(_sample_shards, temp_folder, source.manifest_location)
            stats_by_split = run_with_heartbeat(sample_shards, heartbeat)
        all_image_stats = list(chain.from_iterable(stats_by_split))
        data_warnings += conversion_warnings(all_image_stats, is_cropped=storage_format != "array")
        cache_metadata = {
            "kind": storage_format,
            "flaws": data_warnings,
            "source": source_id,
            "classes": class_names,
            "val_name": source.val_name,
            "test_name": source.test_name,
            "mirror": source.mirror,
            "shards": source.manifest_location,
        }
        (temp_folder / "meta.json").write_text(json.dumps(cache_metadata, indent=1) + "\n")
        run_with_heartbeat(partial(_sync_files, temp_folder), heartbeat)
        try:
            os.rename(temp_folder, prepared_folder)
        except OSError:
            if not (prepared_folder / "meta.json").exists():  # no other host has created it
                raise
        sync(prepared_folder.parent)
    finally:
        shutil.rmtree(temp_folder, ignore_errors=True)


def _total_bytes(splits: Iterable[EncodedImages]) -> int:
    """Return the total size in bytes of all encoded images in some splits."""
    return sum(split_images.size(index) for split_images in splits for index in range(len(split_images)))


def _sync_files(temp_folder: Path) -> None:
    """Wait until a folder and all files in it are on disk, so that a crash after the rename loses no data."""
    for synced_path in (*temp_folder.iterdir(), temp_folder):
        sync(synced_path)


def _check_images(
    temp_folder: Path, source_name: str, searched_parts: list[EncodedImages], heartbeat: Heartbeat
) -> list[str]:
    """Check images that stay encoded by decoding each image once.

    The function writes the errors for undecodable images to BROKEN_IMAGES_FILE. The returned list contains a
    warning if any image has missing data.
    """
    image_count = sum(map(len, searched_parts))
    errors_by_part: list[list[ValueError]] = []
    with _show_progress(f"checking {image_count:,} images of {source_name}", image_count) as advance_progress:
        for part_images in searched_parts:
            part_chunks = _divide_split(part_images, None, CHECK_CHUNK_IMAGES)
            errors_by_part.append(_decode_chunks(part_chunks, heartbeat, advance_progress))
    all_decoding_errors = chain.from_iterable(errors_by_part)
    damage_messages = sorted(str(error) for error in all_decoding_errors if isinstance(error, DamagedImage))
    # The first part contains the training images
    train_messages, *messages_by_evaluated_part = (
        [str(error) for error in errors if not isinstance(error, DamagedImage)] for errors in errors_by_part
    )
    evaluated_messages = list(chain.from_iterable(messages_by_evaluated_part))
    if not messages_by_evaluated_part:  # evaluation uses the only split
        train_messages, evaluated_messages = [], train_messages
    if train_messages or evaluated_messages:
        broken_image_report = {"count": image_count, "train": train_messages, "evaluated": evaluated_messages}
        (temp_folder / BROKEN_IMAGES_FILE).write_text(json.dumps(broken_image_report, indent=1))
    if not damage_messages:
        return []  # no warning
    damage_summary = f"{len(damage_messages):,} of {image_count:,} images have missing parts"
    return [f"{damage_summary}, for example {damage_messages[0]}. Repair or remove these images"]


def _refuse_broken_images(prepared_folder: Path, may_skip_in_training: bool) -> None:
    """Raise a ValueError that lists the undecodable images, unless training may skip every such image."""
    broken_images_file = prepared_folder / BROKEN_IMAGES_FILE
    if not broken_images_file.exists():
        return  # all images can be decoded
    broken_image_report = read_json(broken_images_file)
    train_messages, evaluated_messages = broken_image_report["train"], broken_image_report["evaluated"]
    refused_messages = evaluated_messages + ([] if may_skip_in_training else train_messages)
    if refused_messages:
        skip_advice = "" if evaluated_messages else ", or add --on_bad_image skip to train without them"
        image_count = broken_image_report["count"]
        raise ValueError(_undecodable_message(refused_messages, image_count, broken_images_file, skip_advice))


class ImageChunk(NamedTuple):
    """Consecutive images of a split that one thread decodes without interruption."""

    images: EncodedImages  # all images of the split
    pixels: np.ndarray | None  # decoded split, uint8 [N, H, W, 3]; None only checks the images
    indices: range  # indices of the chunk's images in the split


def _divide_split(images: EncodedImages, pixels: np.ndarray | None, chunk_size: int) -> list[ImageChunk]:
    """Divide a split into chunks of `chunk_size` consecutive images, which share `images` and `pixels`."""
    image_indices = range(len(images))
    chunk_starts = image_indices[::chunk_size]
    return [ImageChunk(images, pixels, image_indices[start : start + chunk_size]) for start in chunk_starts]


class _UnexpectedImageSize(Exception):
    """Exception for an image that differs in size from the sampled images, so all images stay encoded."""


def _decode_to_arrays(
    temp_folder: Path,
    source_name: str,
    encoded_splits: Mapping[str, EncodedImages],
    image_shape: tuple[int, ...] | None,
    heartbeat: Heartbeat,
) -> bool:
    """Replace encoded images with decoded arrays if all images share a shape and fit into MAX_DECODED_BYTES.

    Args:
        temp_folder: Folder that contains the encoded images.
        source_name: Name of the data set.
        encoded_splits: Encoded images of each split, by split name.
        image_shape: Shape shared by all sampled images, or None if their shapes differ.
        heartbeat: Heartbeat function, called about once per second.

    Returns:
        True if the images were decoded, or False if all images stay encoded and no file has changed.

    Raises:
        ValueError: If some images can't be decoded. The message lists these images.
    """
    image_count = sum(map(len, encoded_splits.values()))
    if image_shape is None or image_count * math.prod(image_shape) > MAX_DECODED_BYTES:
        return False  # images stay encoded
    images_per_chunk = min(MAX_CHUNK_IMAGES, max(1, CHUNK_PIXELS // math.prod(image_shape[:2])))
    image_chunks: list[ImageChunk] = []
    for split, split_images in encoded_splits.items():
        pixels = _create_pixel_array(temp_folder / f"{split}_images.npy", (len(split_images), *image_shape))
        image_chunks += _divide_split(split_images, pixels, images_per_chunk)
    try:
        progress_title = f"decoding {image_count:,} images of {source_name}"
        with _show_progress(progress_title, image_count) as advance_progress:
            decoding_errors = _decode_chunks(image_chunks, heartbeat, advance_progress)
    except _UnexpectedImageSize:
        _remove_split_files(temp_folder, "images.npy")
        return False  # images stay encoded
    if decoding_errors:
        # The list is written to the parent folder, because temp_folder is removed after an error.
        broken_images_file = temp_folder.parent / BROKEN_IMAGES_FILE
        broken_images_file.write_text(json.dumps(sorted(map(str, decoding_errors)), indent=1))
        raise ValueError(_undecodable_message(decoding_errors, image_count, broken_images_file))
    _remove_split_files(temp_folder, *ITEM_FILE_ENDINGS)
    return True


def _common_shape(stats_by_split: Iterable[list[ImageStats]]) -> tuple[int, ...] | None:
    """Return the shape (H, W, 3) shared by all sampled images, or None if their shapes differ."""
    image_shapes = {image_stats.shape for split_stats in stats_by_split for image_stats in split_stats}
    return image_shapes.pop() if len(image_shapes) == 1 else None


def _sample_shards(temp_folder: Path, shard_folder: str) -> list[list[ImageStats]]:
    """Sample images from shards in a local folder. For shards in S3, return an empty list."""
    from onecurve.data.shards import MANIFEST, ShardImages, index_file_name, parse_manifest

    manifest_file = temp_folder / MANIFEST
    manifest = parse_manifest(manifest_file.read_bytes(), str(manifest_file))
    if manifest.s3_prefix is not None:
        return []  # images in S3 are not sampled
    sharded_splits = []
    for split in manifest.splits:
        shard_paths = tuple(str(Path(shard_folder) / shard.file) for shard in manifest.shards_in(split))
        sharded_splits.append(ShardImages(temp_folder / index_file_name(split), shard_paths))
    return sample_images(sharded_splits)


def _decode_chunks(
    image_chunks: list[ImageChunk], heartbeat: Heartbeat, advance_progress: Callable[[int], None]
) -> list[ValueError]:
    """Decode all chunks with one thread per core, and return one error per broken image.

    Threads run in parallel because the decoders release the GIL. If heartbeat() raises an exception or an
    image has an unexpected size, each thread finishes its current chunk and stops.

    Args:
        image_chunks: Chunks to decode. The pixels are stored in each chunk's `pixels` array, if any.
        heartbeat: Heartbeat function, called about twice per second.
        advance_progress: Function that is called with the number of images in each finished chunk.
    """
    detect_simplejpeg()  # logs the warning about a missing package before the threads start
    executor = ThreadPoolExecutor(allowed_cores())
    decoding_errors: list[ValueError] = []
    try:
        chunk_futures = [executor.submit(_decode_chunk, *chunk) for chunk in image_chunks]
        for chunk_future, chunk in zip(chunk_futures, image_chunks, strict=True):
            heartbeat()
            while not wait([chunk_future], timeout=0.5).done:  # seconds between two heartbeats
                heartbeat()
            decoding_errors += chunk_future.result()
            advance_progress(len(chunk.indices))
        return decoding_errors
    finally:
        executor.shutdown(cancel_futures=True)


def _decode_chunk(
    split_images: EncodedImages, split_pixels: np.ndarray | None, chunk_indices: range
) -> list[ValueError]:
    """Decode split_images[chunk_indices], and return one error per broken image.

    The decoded images are stored in split_pixels[chunk_indices], unless `split_pixels` is None.

    Raises:
        _UnexpectedImageSize: If an image does not fit into `split_pixels`.
    """
    decoding_errors = []
    for image_index in chunk_indices:
        try:
            image_pixels = split_images.decode(image_index, strict=True)
        except ValueError as error:
            decoding_errors.append(error)
        else:
            if split_pixels is not None:
                if image_pixels.shape != split_pixels.shape[1:]:
                    raise _UnexpectedImageSize
                split_pixels[image_index] = image_pixels
    return decoding_errors


def _undecodable_message(
    decoding_errors: Sequence[object], image_count: int, error_list_file: Path, extra_advice: str = ""
) -> str:
    """Return an error message that lists the first MAX_LISTED_IMAGES errors for undecodable images.

    Args:
        decoding_errors: Errors for all undecodable images.
        image_count: Total number of images.
        error_list_file: File that lists all errors. The message names the file if there are more than
            MAX_LISTED_IMAGES errors.
        extra_advice: Text that suggests an alternative to replacing or removing the images.
    """
    error_summary = f"{len(decoding_errors):,} of {image_count:,} images can't be decoded"
    shown_errors = sorted(map(str, decoding_errors))[:MAX_LISTED_IMAGES]
    if (omitted_count := len(decoding_errors) - MAX_LISTED_IMAGES) > 0:
        shown_errors.append(f"and {omitted_count:,} more images, listed in {error_list_file}")
    return "\n  ".join([f"{error_summary}. Replace or remove these images{extra_advice}", *shown_errors])


@contextmanager
def _show_progress(progress_title: str, image_count: int) -> Iterator[Callable[[int], None]]:
    """Show progress on stderr, and yield a function that advances it by a number of images."""
    progress_display = Display(image_count, progress_title, sys.stderr)
    done_image_count = 0
    if not progress_display.bar:  # for example, if stderr is a log file
        progress_display.print(progress_title)

    def advance_progress(new_image_count: int) -> None:
        nonlocal done_image_count
        done_image_count += new_image_count
        if progress_display.is_due() or (progress_display.bar and done_image_count == image_count):
            progress_display.show(f"{progress_title}  {done_image_count:,}/{image_count:,}", done_image_count)

    try:
        yield advance_progress
    finally:
        progress_display.stop()


def _create_pixel_array(array_path: Path, array_shape: tuple[int, ...]) -> np.ndarray:
    """Create a memory-mapped uint8 array and reserve disk space for it.

    With the reservation, a full disk raises OSError here. Without the reservation, a full disk would cause
    SIGBUS on a later write.
    """
    pixel_array = np.lib.format.open_memmap(array_path, "w+", np.uint8, array_shape)
    with open(array_path, "r+b") as array_file:
        os.posix_fallocate(array_file.fileno(), 0, array_path.stat().st_size)
    return pixel_array


def _remove_split_files(temp_folder: Path, *file_endings: str) -> None:
    """Remove each split's files with these endings from a cache folder that is being written."""
    for split in ALL_SPLITS:
        for file_ending in file_endings:
            (temp_folder / f"{split}_{file_ending}").unlink(missing_ok=True)
