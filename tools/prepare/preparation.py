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
from tools.prepare.devkit import DEVKIT_ARCHIVE, TRAIN_ARCHIVE, VAL_ARCHIVE
from tools.prepare.journal import Journal
from tools.prepare.originals import Ilsvrc, ImageBatch, OriginalImages, ParquetFolder, image_batches
from tools.prepare.recode import recode_all
from tools.prepare.webdataset import READER_THREADS, WebDataset, find_patterns
from tools.prepare.writer import ShardWriter, write_shard_index

# Names of the files or folders in --data that contain each part, by --from
INPUT_NAMES = {
    "imagenet": {"train": TRAIN_ARCHIVE, "val": VAL_ARCHIVE, "devkit": DEVKIT_ARCHIVE},
    "tar": {"train": "train.tar", "val": "val.tar"},
    "folder": {"train": "train", "val": "val"},
}
SAMPLED_BATCHES = 8  # number of batches used to estimate the number of shards
REMEDY_BY_MISSING_SPLIT = {
    "train": "Training needs a train split.",
    "val": "Use --holdout 0.1 to hold out a tenth of train.",
}


class Preparation:
    """Preparation of one --out location, which keeps splits finished by an earlier start."""

    def __init__(self, flags: argparse.Namespace):
        """Find and inspect the data set, and create a journal for the flags' settings. Write nothing yet.

        Raises:
            ValueError: If the data set or one of its parts can't be used.
        """
        self.flags = flags
        self.store = ObjectStore(flags.out) if flags.out.startswith("s3://") else None
        self.folder = Path(os.path.expanduser(flags.work_dir or flags.out)).absolute()
        self.dataset = find_dataset(flags)
        # Only a start with the same settings can resume the preparation.
        self.settings: dict[str, Any] = {
            "format": flags.format,
            "from": flags.source,
            "seed": flags.seed,
            "resize": {"short_side": flags.resize, "quality": flags.quality} if flags.resize else None,
            "shard_mib": flags.shard_mib,
            "inputs": self.dataset.bytes_by_part,
        }
        if self.dataset.listing_hashes:
            self.settings["names_and_sizes"] = self.dataset.listing_hashes
        if isinstance(self.dataset, WebDataset):
            self.settings |= {"patterns": self.dataset.locations, "classes": flags.classes}
        self.journal = Journal(self.folder, self.store, self.settings, self.dataset)

    def run(self) -> None:
        """Prepare and upload each split that no earlier start finished, and then write the manifest.

        If the output is already complete, only print the training flags.
        """
        with self.journal.locked():
            if (complete_splits := self.journal.complete_splits()) is not None:
                print(f"{self.flags.out} is already complete")
                self._print_training_flags(complete_splits)
                return
            self.dataset.read_classes()
            self.journal.begin_or_resume()
            for split in self._splits_to_prepare():
                prepare_split = self._index_split if self.flags.format == "index" else self._write_split
                if not self.journal.split_entry(split):  # no earlier start finished the split
                    prepare_split(split)
                if self.store is not None:
                    self._upload_split(split, self.store)
            self._finish()

    def _splits_to_prepare(self) -> list[str]:
        return [split for split in SPLITS if split in self.dataset.locations]

    def _finish(self) -> None:
        """Complete the class names, write the manifest from the journal, and print a summary."""
        flags, dataset = self.flags, self.dataset
        entry_by_split = {split: self.journal.split_entry(split) for split in self._splits_to_prepare()}
        manifest_splits = {split: split_entry["finished"] for split, split_entry in entry_by_split.items()}
        reencoded_images = [
            {"split": split, **reencoded_image}
            for split, split_entry in entry_by_split.items()
            for reencoded_image in split_entry["odd"]  # the journal's key for re-encoded images
        ]
        # The manifest does not contain this key of the journal, which earlier versions did not record.
        largest_labels = [entry.pop("largest_label", 0) for entry in manifest_splits.values()]
        dataset.complete_class_names(max(largest_labels))
        source_path = Path(flags.data or flags.train or flags.val)
        data_name = "imagenet" if flags.source == "imagenet" else source_path.stem
        self.journal.write_manifest(
            {
                "format": MANIFEST_FORMAT,
                "kind": "in_place" if flags.format == "index" else "shards",
                "name": data_name or "images",
                "seed": flags.seed,
                "resize": self.settings["resize"],
                "classes": dataset.classes,
                "splits": manifest_splits,
                "reencoded": reencoded_images,
                "settings": self.settings,
            }
        )
        count_texts = [
            f"{split_entry['images']:,} images of {split}" for split, split_entry in manifest_splits.items()
        ]
        print(f"{flags.out} is complete: {', '.join(count_texts)}, {len(dataset.classes):,} classes")
        for image in reencoded_images:
            print(f"re-encoded as RGB JPEG: {image['split']} {image['key']} ({image['why']})")
        for missing_split in sorted(set(SPLITS) - manifest_splits.keys()):
            print(f"There is no {missing_split} split. {REMEDY_BY_MISSING_SPLIT[missing_split]}")
        self._print_training_flags(manifest_splits)

    def _print_training_flags(self, prepared_splits: dict[str, Any]) -> None:
        """Print the flags with which a train script reads the output, unless there is no train split."""
        if "train" not in prepared_splits:
            return
        training_flags = f"--data {shlex.quote(self.journal.output_location)}"
        training_flags += "" if "val" in prepared_splits else " --holdout 0.1"
        print(printable(f"train with: {training_flags}"))

    # --- One split

    def _index_split(self, split: str) -> None:
        """Index a split's existing shards in threads, write the index, and record the split in the journal.

        The shards are read, but not copied.
        """
        dataset = self.dataset
        started_at = time.perf_counter()
        assert isinstance(dataset, WebDataset)
        index_rows = array("q")  # shard, offset, length and label of each image
        image_names = CollectedNames()
        shard_entries: list[dict[str, Any]] = []
        reader_pool = ThreadPoolExecutor(READER_THREADS)
        try:
            with ReadingProgress(split, dataset.bytes_by_part[split]) as progress:
                shards = dataset.shards_by_split[split]
                indexed_shards = zip(shards, reader_pool.map(dataset.index_shard, shards), strict=True)
                for shard_index, (shard, (image_rows, shard_sha256)) in enumerate(indexed_shards):
                    for image_row in image_rows:
                        index_rows.extend((shard_index, image_row.offset, image_row.length, image_row.label))
                        image_names.add(image_row.name)
                    shard_entry = {"file": shard.url, "bytes": shard.bytes, "images": len(image_rows)}
                    shard_entries.append(shard_entry | {"sha256": shard_sha256})
                    progress.tell(sum(entry["bytes"] for entry in shard_entries))
        finally:
            reader_pool.shutdown(cancel_futures=True)
        index_sha256, largest_label = write_shard_index(self.folder, split, index_rows, image_names)
        image_count = sum(entry["images"] for entry in shard_entries)
        manifest_entry = {"images": image_count, "index_sha256": index_sha256, "shards": shard_entries}
        manifest_entry["largest_label"] = largest_label
        journal_entry = {"finished": manifest_entry, "odd": [], "verified": dataset.checks_md5}
        self.journal.record_split(split, journal_entry)
        elapsed_s = time.perf_counter() - started_at
        counts_text = f"{image_count:,} images in {len(shard_entries):,} tars"
        print(f"{split}: {counts_text} indexed in {elapsed_s:.2f} s", flush=True)

    def _write_split(self, split: str) -> None:
        """Write a split's shards and index in one pass, and record the split in the journal.

        Raises:
            ValueError: If an image or archive is damaged, or if the disk has too little free space.
        """
        flags, dataset = self.flags, self.dataset
        with contextlib.ExitStack() as stack:
            image_groups, archive_stream = stack.enter_context(dataset.open_split(split, dataset.checks_md5))
            # Check each JPEG unless the archive is verified by MD5 sums, which exist only for ImageNet.
            checks_jpegs = not flags.no_verify and not (dataset.checks_md5 and archive_stream)
            original_batches = image_batches(image_groups, dataset.label_functions[split])
            recoded_batches = recode_all(original_batches, flags.resize, flags.quality, checks_jpegs)
            stack.callback(recoded_batches.close)  # ends the threads that re-encode images
            first_batches = list(islice(recoded_batches, SAMPLED_BATCHES))  # also written below
            writer = ShardWriter(self.folder, split, self._shard_count(split, first_batches), flags.seed)
            stack.callback(writer.close)
            progress = stack.enter_context(ReadingProgress(split, dataset.bytes_by_part[split]))
            reencoded_images: list[dict[str, str]] = []
            read_bytes, last_group_index = 0, 0
            for batch in chain(first_batches, recoded_batches):
                writer.write(batch.images)
                reencoded_images += batch.reencoded
                read_bytes += batch.original_bytes
                last_group_index = batch.group_index
                progress.show(writer.image_count, read_bytes)
            dataset.check_content(split, last_group_index + 1, writer.image_count, archive_stream)
            manifest_entry = writer.finish()
            journal_entry = {
                "finished": manifest_entry,
                "odd": reencoded_images,
                "verified": dataset.checks_md5,
            }
            self.journal.record_split(split, journal_entry)
            progress.end(writer.image_count, read_bytes)

    def _shard_count(self, split: str, first_batches: list[ImageBatch]) -> int:
        """Estimate the number of shards from the first batches, and check the free disk space.

        The estimate assumes that all images shrink or grow like the images in the first batches.

        Raises:
            ValueError: If there are no images, or if the disk has too little free space.
        """
        original_bytes = sum(batch.original_bytes for batch in first_batches)
        prepared_bytes = sum(len(image.encoded) for batch in first_batches for image in batch.images)
        if not original_bytes:
            raise ValueError(f"{self.dataset.locations[split]} contains no images")
        needed_bytes = math.ceil(self.dataset.bytes_by_part[split] * prepared_bytes / original_bytes)
        if needed_bytes > (free_bytes := shutil.disk_usage(self.folder).free):
            raise ValueError(
                f"{self.folder} needs {needed_bytes / 2**30:,.1f} GiB, but only {free_bytes / 2**30:,.1f} GiB"
                " are free. Free disk space, or pass a different folder."
            )
        return math.ceil(needed_bytes / (self.flags.shard_mib * 2**20))

    def _upload_split(self, split: str, store: ObjectStore) -> None:
        """Upload a finished split file by file, and remove each local file after its upload.

        The shards come first, then the names, and the index last.
        """
        is_indexed_in_place = self.flags.source == "shards"
        shards = [] if is_indexed_in_place else self.journal.split_entry(split)["finished"]["shards"]
        bytes_by_file = {shard["file"]: shard["bytes"] for shard in shards}
        uploaded_bytes = 0
        with ReadingProgress(split, sum(bytes_by_file.values()), "uploaded") as progress:
            for file_name in (*bytes_by_file, names_file_name(split), index_file_name(split)):
                # An earlier start has uploaded and removed each file that does not exist.
                if (self.folder / file_name).exists():
                    store.upload(self.folder / file_name, file_name)
                    (self.folder / file_name).unlink()
                uploaded_bytes += bytes_by_file.get(file_name, 0)
                progress.tell(uploaded_bytes)
        print(f"{split} was uploaded to {store.url}", flush=True)


def find_dataset(flags: argparse.Namespace) -> OriginalImages:
    """Find the parts that the flags specify, and return the data set, whose parts have been inspected.

    A flag for a part, such as --train, takes precedence over --data.

    Raises:
        ValueError: If no split is found, or if a part can't be used.
    """
    data_location = os.path.expanduser(flags.data or "")
    flag_values = {part: getattr(flags, part) for part in (*SPLITS, "devkit", "val_labels")}
    locations_from_flags = {part: path for part, path in flag_values.items() if path}
    if flags.source == "shards":
        pattern_by_split = (find_patterns(data_location) if data_location else {}) | locations_from_flags
        if not pattern_by_split:
            data_problem = "contains no shards named *train*.tar or *val*.tar"
            raise ValueError(f"--data {data_location} {data_problem}. Pass --train and --val.")
        return WebDataset(pattern_by_split, flags.classes)
    if flags.source == "parquet":
        return ParquetFolder(dict.fromkeys(SPLITS, str(Path(data_location).absolute())))
    name_by_part = INPUT_NAMES[flags.source]
    if flags.source == "folder" and Path(data_location).is_dir():
        folder_by_name = split_folders(Path(data_location))
        for part, folder_name in used_splits(folder_by_name).items():
            if part in SPLITS and (split_folder := folder_by_name.get(folder_name)):
                name_by_part = name_by_part | {part: split_folder}
    locations = _find_parts(data_location, name_by_part) | locations_from_flags
    is_ilsvrc = flags.source == "imagenet" or "val_labels" in locations_from_flags
    if flags.source == "tar" and not {"train", "val"} & locations.keys():  # look for ILSVRC2012's file names
        locations |= _find_parts(data_location, INPUT_NAMES["imagenet"])
        is_ilsvrc = True
    if not {"train", "val"} & locations.keys():
        location_problem = f"contains neither {name_by_part['train']} nor {name_by_part['val']}"
        raise ValueError(f"--data {data_location} {location_problem}. Pass --train and --val.")
    if is_ilsvrc:
        _check_label_sources(locations, data_location)
        return Ilsvrc(locations, not flags.no_verify, flags.subset)
    return OriginalImages(locations)


def _find_parts(data_location: str, name_by_part: dict[str, str]) -> dict[str, str]:
    """Map each part that exists in a folder or prefix to the part's path or URL."""
    if not data_location:
        return {}
    candidates = {
        part: f"{data_location.rstrip('/')}/{input_name}" for part, input_name in name_by_part.items()
    }
    return {part: candidate for part, candidate in candidates.items() if location_exists(candidate)}


def _check_label_sources(locations: dict[str, str], data_location: str) -> None:
    """Raise ValueError if ILSVRC2012's class names or val labels are missing, or if two files contain labels.

    The development kit contains both. Without the kit, the training archive contains the class names, and
    val needs the --val_labels file.
    """
    if "devkit" in locations:
        if "val_labels" in locations:
            label_problem = f"{locations['devkit']} already contains the labels of val"
            raise ValueError(f"{label_problem}. Remove --val_labels.")
    elif "train" not in locations or ("val" in locations and "val_labels" not in locations):
        missing_content = "the labels of val"
        missing_content += " and the class names" if "train" not in locations else ""
        in_data = f" in {data_location}" if data_location else ""
        raise ValueError(
            f"{DEVKIT_ARCHIVE}, which contains {missing_content}, is missing{in_data}. Pass --devkit."
            " With the training archive, --val_labels FILE can replace --devkit. FILE contains a WordNet id"
            " or index per line."
        )


def location_exists(path_or_url: str) -> bool:
    """Return True if the path or S3 object exists."""
    if path_or_url.startswith("s3://"):
        prefix_url, _, object_name = path_or_url.rpartition("/")
        return ObjectStore(prefix_url).size_and_etag(object_name) is not None
    return Path(path_or_url).exists()
