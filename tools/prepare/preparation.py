"""The preparation of one --out: reads the splits, writes them, uploads them, and records what is done."""

import argparse
import contextlib
import math
import os
import shlex
import shutil
import time
from concurrent.futures import ThreadPoolExecutor
from itertools import chain, islice
from pathlib import Path
from typing import Any

import numpy as np

from common.data.decode import SPLITS
from common.data.shards import FORMAT, data_root_flag, index_name
from common.system.progress import ReadingProgress
from common.system.s3 import ObjectStore
from common.system.text import printable
from tools.prepare.archives import scan
from tools.prepare.devkit import DEVKIT, TRAIN, VAL
from tools.prepare.inputs import shown
from tools.prepare.journal import Journal, SplitProgress
from tools.prepare.parquet import ParquetDataset
from tools.prepare.recode import recoded
from tools.prepare.source import SECOND_CLASS, ImageBatch, Position, RawDataset, batches, exists, index_rows
from tools.prepare.webdataset import THREADS, WebDataset, find_patterns, index_once
from tools.prepare.writer import FolderWriter, ShardWriter, rows_name, write_index

NAMES = {
    "imagenet": {"train": TRAIN, "val": VAL, "devkit": DEVKIT},
    "tar": {"train": "train.tar", "val": "val.tar"},
    "folder": {"train": "train", "val": "val"},
}
SAMPLED = 8  # batches from which the number of shards is estimated
WITHOUT = {"train": "training needs it", "val": "--holdout 0.1 evaluates on a tenth of train"}


class Preparation:
    """Prepares one --out, from its beginning or from where an interruption left it."""

    def __init__(self, flags: argparse.Namespace):
        self.flags = flags
        self.store = ObjectStore(flags.out) if flags.out.startswith("s3://") else None
        self.folder = Path(flags.work_dir or flags.out).expanduser().absolute()
        hashed = flags.source == "imagenet" and not flags.no_verify
        if flags.source == "shards":
            self.dataset: RawDataset = WebDataset(find_parts(flags), flags.classes)
        elif flags.source == "parquet":
            self.dataset = ParquetDataset(Path(flags.data).expanduser().absolute())
        else:
            self.dataset = RawDataset(flags.source, find_parts(flags), hashed, flags.subset)
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
        elif flags.format == "index":  # whose shards are the archives
            parts = self.dataset.parts
            self.settings["paths"] = {s: str(Path(parts[s]).absolute()) for s in self._splits()}
        self.journal = Journal(self.folder, self.store, flags.format, self.settings, self.dataset)

    def run(self) -> None:
        with self.journal.locked():
            left = self.journal.read()
            if (complete := self.journal.complete_splits()) is not None:
                print(f"{self.flags.out} is complete: nothing to do")
                self._print_training_flags(complete)
                return
            self.dataset.read_classes()
            self._begin_or_resume(left)
            for split in self._splits():
                if self.journal.finished(split) is None:
                    self._prepare(split)
                if self.store is not None:
                    self._upload(split, self.store)
            self._finish()

    def _splits(self) -> list[str]:
        return [split for split in SPLITS if split in self.dataset.parts]

    def _prepare(self, split: str) -> None:
        if isinstance(self.dataset, WebDataset):
            self._index_in_place(split, self.dataset)
        elif self.flags.format == "index":
            self._index(split)
        else:
            self._write(split)

    def _begin_or_resume(self, left: dict[str, Any] | None) -> None:
        if left is None or not left["splits"]:
            self.journal.begin(left)
            return
        for split, why in self.journal.resume(left).items():
            print(f"{split} is read again: {why} since {self.folder} was begun", flush=True)
        print(f"{self.folder} was begun: continuing there", flush=True)

    def _finish(self) -> None:
        finished = {split: self.journal.finished(split) or {} for split in self._splits()}
        odd = self.journal.odd_images()
        if isinstance(self.dataset, WebDataset):
            self.dataset.name_classes(max(entry.pop("largest_label") for entry in finished.values()))
        self.journal.finish(
            {
                "format": FORMAT,
                "kind": "in_place" if self.flags.source == "shards" else self.flags.format,
                "name": self._name(),
                "seed": self.flags.seed,
                "resize": self.settings["resize"],
                "classes": self.dataset.classes,
                "splits": finished,
                "reencoded": odd,
                "settings": self.settings,
            }
        )
        counts = ", ".join(f"{about['images']:,} images of {split}" for split, about in finished.items())
        print(f"{self.flags.out} is complete: {counts}, {len(self.dataset.classes):,} classes")
        for image in odd:
            print(f"re-encoded as RGB JPEG: {image['split']} {image['key']} ({image['why']})")
        for split in sorted(set(SPLITS) - finished.keys()):
            print(f"there is no {split}: {WITHOUT[split]}")
        self._print_training_flags(finished)

    def _print_training_flags(self, splits: dict[str, Any]) -> None:
        if self.flags.format == "folder" or "train" not in splits:
            return
        out = self.store.url if self.store else str(self.folder)
        words = f"--data {shlex.quote(out)}" + ("" if "val" in splits else " --holdout 0.1")
        if self.flags.format == "index":  # a training reads files outside of its folder only with this flag
            words += (
                f" {data_root_flag(shard['file'] for split in splits.values() for shard in split['shards'])}"
            )
        print(printable(f"train with: {words}"))

    def _name(self) -> str:
        flags = self.flags
        if flags.source == "imagenet":
            return "imagenet"
        return Path(shown(flags.data or flags.url or flags.train or flags.val)).stem or "images"

    # --- One split

    def _index(self, split: str) -> None:
        """Writes the index of an archive, whose images stay where they are."""
        path = Path(self.settings["paths"][split])
        with ReadingProgress(split, 0, 0, self.dataset.bytes[split]) as progress:
            if self.dataset.hashed:
                with self.dataset.open(split, hashed=True) as (_, stream):
                    assert stream is not None  # an index is of archives
                    stream.watch = progress.tell
                    self.dataset.check_md5(split, stream)
            began = time.perf_counter()
            classes: dict[str, np.ndarray] = {}
            for listing in scan(path):
                name = (listing.archive or "").rpartition("/")[2]
                if name in classes:
                    raise ValueError(f"{path}: {listing.archive}: {SECOND_CLASS}")
                classes[name] = index_rows(listing, self.dataset.labels[split], path)
                progress.tell(int(listing.offsets[-1]))
        if not classes:
            raise ValueError(f"{path} holds no images")
        rows = np.concatenate(list(classes.values()))
        self.dataset.check_counts(split, len(classes), len(rows))
        shard = {"file": str(path), "bytes": path.stat().st_size, "images": len(rows), "sha256": None}
        self.journal.begin_writing()
        digest = write_index(self.folder, split, rows)
        entry = {"images": len(rows), "index_sha256": digest, "shards": [shard]}
        self.journal.finish_split(split, entry, [])
        print(f"{split}: {len(rows):,} images indexed in {time.perf_counter() - began:.2f} s", flush=True)

    def _index_in_place(self, split: str, dataset: WebDataset) -> None:
        """Writes the index of shards that stay where they are. An interruption costs those being read."""
        files, folder, began = dataset.files[split], self.folder / rows_name(split), time.perf_counter()
        self.journal.begin_writing()
        self.journal.record(split, SplitProgress(0, len(files)), {})
        folder.mkdir(exist_ok=True)
        pool = ThreadPoolExecutor(THREADS)
        try:
            with ReadingProgress(split, 0, 0, dataset.bytes[split]) as progress:
                coming = [
                    pool.submit(index_once, folder / f"{n}.npz", file, dataset.places)
                    for n, file in enumerate(files)
                ]
                found, done = [], 0
                for file, shard in zip(files, coming, strict=True):
                    found.append(shard.result())
                    done += file.bytes
                    progress.tell(done)
        finally:
            pool.shutdown(cancel_futures=True)
        rows = np.concatenate([np.insert(s.rows, 0, n, axis=1) for n, s in enumerate(found)])
        shards = [
            {"file": file.url, "bytes": file.bytes, "images": len(shard.rows), "sha256": shard.sha256}
            for file, shard in zip(files, found, strict=True)
        ]
        digest, largest = write_index(self.folder, split, rows), int(rows[:, 3].max())
        entry = {"images": len(rows), "index_sha256": digest, "shards": shards, "largest_label": largest}
        self.journal.finish_split(split, entry, [])
        shutil.rmtree(folder)
        seconds = time.perf_counter() - began
        print(
            f"{split}: {len(rows):,} images in {len(files):,} shards indexed in {seconds:.2f} s", flush=True
        )

    def _write(self, split: str) -> None:
        """Writes a split's shards or folders in one pass, or the rest of them."""
        progress = self.journal.progress(split)
        with contextlib.ExitStack() as stack:
            groups, stream = stack.enter_context(self.dataset.open(split, self.dataset.hashed))
            begin = progress.position if progress else Position()
            # ImageNet's own archives are verified by their MD5 sums.
            strict = self.flags.source != "imagenet" and not self.flags.no_verify
            images = recoded(
                batches(groups, self.dataset.labels[split], begin),
                self.flags.resize,
                self.flags.quality,
                strict,
            )
            stack.callback(images.close)  # ends its threads
            first = [] if progress else list(islice(images, SAMPLED))
            progress = progress or self._new_progress(split, first)
            self._check_room(progress.bytes - progress.written)
            self.journal.begin_writing()
            writer = self._writer(split, progress)
            stack.callback(writer.close)
            reading = ReadingProgress(split, writer.count, progress.read, self.dataset.bytes[split])
            stack.enter_context(reading)
            if stream is not None:
                stream.watch = reading.tell
            for batch in chain(first, images):
                writer.write(batch.images)
                progress.position = batch.position
                progress.odd += batch.odd
                progress.read += batch.bytes
                progress.written += sum(len(image.data) for image in batch.images)
                reading.show(writer.count, progress.read)
                if self.journal.is_due():
                    self.journal.record(split, progress, writer.commit())
            self.dataset.check_counts(split, progress.position.group + 1, writer.count)
            try:
                self.dataset.check_md5(split, stream)
            except ValueError:
                self.journal.forget(split)  # its images are of the wrong archive
                raise
            self.journal.finish_split(split, writer.finish(), progress.odd)
            reading.end(writer.count, progress.read)

    def _new_progress(self, split: str, first: list[ImageBatch]) -> SplitProgress:
        """Estimates a split's output from its first batches."""
        before = sum(batch.bytes for batch in first)
        after = sum(len(image.data) for batch in first for image in batch.images)
        if not before:
            raise ValueError(f"{shown(self.dataset.parts[split])} holds no images")
        expected = math.ceil(self.dataset.bytes[split] * after / before)
        return SplitProgress(expected, math.ceil(expected / (self.flags.shard_mib * 2**20)))

    def _check_room(self, needed: int) -> None:
        free = shutil.disk_usage(self.folder).free
        if needed > free:
            raise ValueError(
                f"{self.folder} needs {needed / 2**30:,.1f} GiB, and {free / 2**30:,.1f} GiB are free: make"
                " room, or give another folder"
            )

    def _writer(self, split: str, progress: SplitProgress) -> ShardWriter | FolderWriter:
        if self.flags.format == "folder":
            return FolderWriter(self.folder, split, progress.writer)
        if progress.written > 2**30:  # hashing them takes a second or more
            print(f"{split}: reading {progress.written / 2**30:,.1f} GiB of shards again", flush=True)
        return ShardWriter(self.folder, split, progress.shards, self.flags.seed, progress.writer)

    def _upload(self, split: str, store: ObjectStore) -> None:
        """Uploads a finished split shard by shard, and removes each shard here."""
        entry = self.journal.finished(split)
        assert entry is not None
        in_place = self.flags.source == "shards"
        sizes = {} if in_place else {shard["file"]: shard["bytes"] for shard in entry["shards"]}
        done = 0
        with ReadingProgress(split, 0, 0, sum(sizes.values()), "uploaded") as progress:
            for file in (*sizes, index_name(split)):
                if not self.journal.is_uploaded(file):
                    store.upload(self.folder / file, file)
                    self.journal.record_upload(file)
                (self.folder / file).unlink(missing_ok=True)
                done += sizes.get(file, 0)
                progress.tell(done)
        print(f"{split} is uploaded to {store.url}", flush=True)


def find_parts(flags: argparse.Namespace) -> dict[str, str]:
    """Finds train, val and devkit: the path or url of each part that exists."""
    base = flags.url or os.path.expanduser(flags.data or "")
    if flags.source == "shards":
        patterns = find_patterns(base) if base else {}
        patterns |= {split: given for split in SPLITS if (given := getattr(flags, split))}
        if not patterns:
            raise ValueError(
                f"--data {base} holds no shards named *train*.tar or *val*.tar: give --train, --val"
            )
        return patterns
    names, found = NAMES[flags.source], {}
    for part, name in names.items():
        given, beside = getattr(flags, part), base and f"{base.rstrip('/')}/{name}"
        if given or (beside and (flags.url or exists(beside))):
            found[part] = given or beside
    if not {"train", "val"} & found.keys():
        raise ValueError(f"--data {shown(base)}: there is neither {names['train']} nor {names['val']}")
    if flags.source == "imagenet" and "devkit" not in found:
        raise ValueError(
            f"{DEVKIT} is missing{f' in {shown(base)}' if base else ''}: it has val's labels"
            " and the names of the classes. Give --devkit, or --from tar for class tars without one"
        )
    if flags.format == "index" and (remote := [where for where in found.values() if "://" in where]):
        raise ValueError(f"--format index takes files on this host, not {shown(remote[0])}")
    return found
