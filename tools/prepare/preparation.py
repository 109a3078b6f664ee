"""Read, write and upload all splits of a preparation, and record the progress."""

import argparse
import contextlib
import math
import os
import shlex
import shutil
import time
from array import array
from concurrent.futures import ThreadPoolExecutor
from itertools import chain, islice
from pathlib import Path
from typing import Any

from onecurve.data.class_folders import split_folders, used_splits
from onecurve.data.encoded import SPLITS
from onecurve.data.names import CollectedNames, names_file_name
from onecurve.data.shards import MANIFEST_FORMAT, index_file_name
from onecurve.system.progress import ReadingProgress
from onecurve.system.s3 import ObjectStore
from onecurve.system.text import printable
from tools.prepare.devkit import DEVKIT, TRAIN, VAL
from tools.prepare.journal import Journal
from tools.prepare.originals import Ilsvrc, ImageBatch, Originals, ParquetFolder, batches
from tools.prepare.recode import recode_all
from tools.prepare.webdataset import THREADS, WebDataset, find_patterns
from tools.prepare.writer import ShardWriter, write_shard_index

INPUTS = {
    "imagenet": {"train": TRAIN, "val": VAL, "devkit": DEVKIT},
    "tar": {"train": "train.tar", "val": "val.tar"},
    "folder": {"train": "train", "val": "val"},
}
SAMPLED_BATCHES = 8  # number of batches used to estimate the number of shards
REMEDY = {"train": "Training needs a train split.", "val": "Use --holdout 0.1 to hold out a tenth of train."}


class Preparation:
    """Preparation of one --out location, which keeps splits finished by an earlier start."""

    def __init__(self, flags: argparse.Namespace):
        self.flags = flags
        self.store = ObjectStore(flags.out) if flags.out.startswith("s3://") else None
        self.folder = Path(os.path.expanduser(flags.work_dir or flags.out)).absolute()
        self.dataset = find_dataset(flags)
        self.settings: dict[str, Any] = {
            "format": flags.format,
            "from": flags.source,
            "seed": flags.seed,
            "resize": {"short_side": flags.resize, "quality": flags.quality} if flags.resize else None,
            "shard_mib": flags.shard_mib,
            "inputs": self.dataset.bytes,
        }
        if self.dataset.listings:
            self.settings["names_and_sizes"] = self.dataset.listings
        if isinstance(self.dataset, WebDataset):
            self.settings |= {"patterns": self.dataset.parts, "classes": flags.classes}
        self.journal = Journal(self.folder, self.store, self.settings, self.dataset)

    def run(self) -> None:
        with self.journal.locked():
            if (complete := self.journal.complete_splits()) is not None:
                print(f"{self.flags.out} is already complete")
                self._print_training_flags(complete)
                return
            self.dataset.read_classes()
            self.journal.begin_or_resume()
            for split in self._given_splits():
                prepare_split = self._index_split if self.flags.format == "index" else self._write_split
                if not self.journal.entry(split):
                    prepare_split(split)
                if self.store is not None:
                    self._upload_split(split, self.store)
            self._finish()

    def _given_splits(self) -> list[str]:
        return [split for split in SPLITS if split in self.dataset.parts]

    def _finish(self) -> None:
        flags, dataset = self.flags, self.dataset
        entries = {split: self.journal.entry(split) for split in self._given_splits()}
        finished = {split: entry["finished"] for split, entry in entries.items()}
        reencoded = [{"split": split, **image} for split, entry in entries.items() for image in entry["odd"]]
        dataset.name_classes(max(entry.pop("largest_label", 0) for entry in finished.values()))
        name = "imagenet" if flags.source == "imagenet" else Path(flags.data or flags.train or flags.val).stem
        self.journal.finish(
            {
                "format": MANIFEST_FORMAT,
                "kind": "in_place" if flags.format == "index" else "shards",
                "name": name or "images",
                "seed": flags.seed,
                "resize": self.settings["resize"],
                "classes": dataset.classes,
                "splits": finished,
                "reencoded": reencoded,
                "settings": self.settings,
            }
        )
        counts = ", ".join(f"{entry['images']:,} images of {split}" for split, entry in finished.items())
        print(f"{flags.out} is complete: {counts}, {len(dataset.classes):,} classes")
        for image in reencoded:
            print(f"re-encoded as RGB JPEG: {image['split']} {image['key']} ({image['why']})")
        for split in sorted(set(SPLITS) - finished.keys()):
            print(f"There is no {split} split. {REMEDY[split]}")
        self._print_training_flags(finished)

    def _print_training_flags(self, splits: dict[str, Any]) -> None:
        if "train" not in splits:
            return
        words = f"--data {shlex.quote(self.journal.out)}" + ("" if "val" in splits else " --holdout 0.1")
        print(printable(f"train with: {words}"))

    # --- One split

    def _index_split(self, split: str) -> None:
        """Write an index of existing shards without copying the shards."""
        dataset, began = self.dataset, time.perf_counter()
        assert isinstance(dataset, WebDataset)
        rows, names, shards = array("q"), CollectedNames(), list[dict[str, Any]]()
        pool = ThreadPoolExecutor(THREADS)
        try:
            with ReadingProgress(split, dataset.bytes[split]) as reading:
                tars = dataset.shards[split]
                for tar, (tar_rows, sha256) in zip(tars, pool.map(dataset.index, tars), strict=True):
                    for row in tar_rows:
                        rows.extend((len(shards), row.offset, row.length, row.label))
                        names.add(row.name)
                    count = len(tar_rows)
                    shards.append({"file": tar.url, "bytes": tar.bytes, "images": count, "sha256": sha256})
                    reading.tell(sum(shard["bytes"] for shard in shards))
        finally:
            pool.shutdown(cancel_futures=True)
        digest, largest = write_shard_index(self.folder, split, rows, names)
        images = sum(shard["images"] for shard in shards)
        entry = {"images": images, "index_sha256": digest, "shards": shards, "largest_label": largest}
        self.journal.record(split, {"finished": entry, "odd": [], "verified": dataset.hashed})
        seconds = time.perf_counter() - began
        print(f"{split}: {images:,} images in {len(shards):,} tars indexed in {seconds:.2f} s", flush=True)

    def _write_split(self, split: str) -> None:
        """Write a split's shards in one pass."""
        flags, dataset = self.flags, self.dataset
        with contextlib.ExitStack() as stack:
            groups, stream = stack.enter_context(dataset.open(split, dataset.hashed))
            # Check each JPEG unless the archive is verified by MD5 sums, which exist only for ImageNet.
            strict = not flags.no_verify and not (dataset.hashed and stream)
            images = recode_all(batches(groups, dataset.labels[split]), flags.resize, flags.quality, strict)
            stack.callback(images.close)  # ends the threads that re-encode images
            sampled = list(islice(images, SAMPLED_BATCHES))
            writer = ShardWriter(self.folder, split, self._shard_count(split, sampled), flags.seed)
            stack.callback(writer.close)
            reading = stack.enter_context(ReadingProgress(split, dataset.bytes[split]))
            reencoded, read_bytes, last_group = list[dict[str, str]](), 0, 0
            for batch in chain(sampled, images):
                writer.write(batch.images)
                reencoded += batch.odd
                read_bytes += batch.bytes
                last_group = batch.group
                reading.show(writer.count, read_bytes)
            dataset.check(split, last_group + 1, writer.count, stream)
            entry = {"finished": writer.finish(), "odd": reencoded, "verified": dataset.hashed}
            self.journal.record(split, entry)
            reading.end(writer.count, read_bytes)

    def _shard_count(self, split: str, sampled: list[ImageBatch]) -> int:
        """Estimate the number of shards from the first batches.

        Raises:
            ValueError: If there are no images, or if the disk has too little free space.
        """
        original_bytes = sum(batch.bytes for batch in sampled)
        prepared_bytes = sum(len(image.data) for batch in sampled for image in batch.images)
        if not original_bytes:
            raise ValueError(f"{self.dataset.parts[split]} contains no images")
        needed_bytes = math.ceil(self.dataset.bytes[split] * prepared_bytes / original_bytes)
        if needed_bytes > (free_bytes := shutil.disk_usage(self.folder).free):
            raise ValueError(
                f"{self.folder} needs {needed_bytes / 2**30:,.1f} GiB, but only {free_bytes / 2**30:,.1f} GiB"
                " are free. Free disk space, or pass a different folder."
            )
        return math.ceil(needed_bytes / (self.flags.shard_mib * 2**20))

    def _upload_split(self, split: str, store: ObjectStore) -> None:
        """Upload a finished split shard by shard, and remove each local shard after its upload."""
        shards = [] if self.flags.source == "shards" else self.journal.entry(split)["finished"]["shards"]
        sizes = {shard["file"]: shard["bytes"] for shard in shards}
        uploaded_bytes = 0
        with ReadingProgress(split, sum(sizes.values()), "uploaded") as progress:
            for file in (*sizes, names_file_name(split), index_file_name(split)):
                if (self.folder / file).exists():  # an earlier start has uploaded a missing file
                    store.upload(self.folder / file, file)
                    (self.folder / file).unlink()
                uploaded_bytes += sizes.get(file, 0)
                progress.tell(uploaded_bytes)
        print(f"{split} was uploaded to {store.url}", flush=True)


def find_dataset(flags: argparse.Namespace) -> Originals:
    """Find the data set parts that the flags specify."""
    base = os.path.expanduser(flags.data or "")
    by_flags = {part: path for part in (*SPLITS, "devkit", "val_labels") if (path := getattr(flags, part))}
    if flags.source == "shards":
        patterns = (find_patterns(base) if base else {}) | by_flags
        if not patterns:
            problem = "contains no shards named *train*.tar or *val*.tar"
            raise ValueError(f"--data {base} {problem}. Pass --train and --val.")
        return WebDataset(patterns, flags.classes)
    if flags.source == "parquet":
        return ParquetFolder(dict.fromkeys(SPLITS, str(Path(base).absolute())))
    names = INPUTS[flags.source]
    if flags.source == "folder" and Path(base).is_dir():
        folders = split_folders(Path(base))
        for part, split in used_splits(folders).items():
            if part in SPLITS and (folder := folders.get(split)):
                names = names | {part: folder}
    parts = _find_parts(base, names) | by_flags
    is_ilsvrc = flags.source == "imagenet" or "val_labels" in by_flags
    if flags.source == "tar" and not {"train", "val"} & parts.keys():  # look for ILSVRC2012's file names
        parts |= _find_parts(base, INPUTS["imagenet"])
        is_ilsvrc = True
    if not {"train", "val"} & parts.keys():
        problem = f"contains neither {names['train']} nor {names['val']}"
        raise ValueError(f"--data {base} {problem}. Pass --train and --val.")
    if is_ilsvrc:
        _check_labels(parts, base)
        return Ilsvrc(parts, not flags.no_verify, flags.subset)
    return Originals(parts)


def _find_parts(base: str, names: dict[str, str]) -> dict[str, str]:
    paths = {part: f"{base.rstrip('/')}/{name}" for part, name in names.items() if base}
    return {part: path for part, path in paths.items() if path_exists(path)}


def _check_labels(parts: dict[str, str], base: str) -> None:
    """Raise ValueError unless there is exactly one source for the classes and one for the val labels."""
    if "devkit" in parts:
        if "val_labels" in parts:
            raise ValueError(f"{parts['devkit']} already contains the labels of val. Remove --val_labels.")
    elif "train" not in parts or ("val" in parts and "val_labels" not in parts):
        names_classes = " and the class names" if "train" not in parts else ""
        where = f" in {base}" if base else ""
        raise ValueError(
            f"{DEVKIT}, which contains the labels of val{names_classes}, is missing{where}. Pass --devkit."
            " With the training archive, --val_labels FILE can replace --devkit. FILE contains a WordNet id"
            " or index per line."
        )


def path_exists(where: str) -> bool:
    """Return True if the path or S3 object exists."""
    if where.startswith("s3://"):
        folder, _, name = where.rpartition("/")
        return ObjectStore(folder).size_and_etag(name) is not None
    return Path(where).exists()
