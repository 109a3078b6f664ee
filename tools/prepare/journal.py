"""Journal of a preparation. The journal records finished splits so that the same command can resume."""

import contextlib
import json
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from onecurve.data.names import names_file_name
from onecurve.data.shards import JOURNAL, MANIFEST, MANIFEST_LIMIT_BYTES, index_file_name
from onecurve.system.files import parse_json, read_json, try_lock, write_bytes
from onecurve.system.s3 import ObjectStore
from tools.prepare.originals import OriginalImages

# Names of files that a preparation writes
OUTPUT_NAME_PATTERN = re.compile(r"(train|val)(-\d{5,}\.tar|_index\.npy|_names\.txt)")


class Journal:
    """Journal and manifest of a preparation. The preparation may change both files only in `with locked()`.

    The journal is in the local folder to which shards are written. In an S3 store, an object with the
    journal's name shows that a preparation has started. The manifest is written after all splits are
    finished, and then the journal is removed. The journal contains an entry for each finished split. An
    entry's "finished" key contains the split's manifest entry. An interrupted split is repeated.
    """

    def __init__(
        self, folder: Path, store: ObjectStore | None, settings: dict[str, Any], dataset: OriginalImages
    ):
        """Store the arguments. locked() reads the journal's file, and begin_or_resume() writes it.

        Args:
            folder: Local folder for the journal, the shards and the indices.
            store: Store that is the preparation's output, or None if `folder` is the output.
            settings: JSON values that determine the output. A preparation resumes only with equal settings.
            dataset: Data set whose parts are compared with the parts of an earlier start.
        """
        self.folder, self.store, self.settings, self.dataset = folder, store, settings, dataset
        self.output_location = str(folder) if store is None else store.url
        self.earlier_journal: dict[str, Any] | None = None  # journal from an earlier, interrupted start
        self.current_journal: dict[str, Any] = {"splits": {}}

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """Lock the folder during the context, create the folder if necessary, and read an earlier journal.

        The kernel releases the lock when the process ends, even after a kill.

        Raises:
            ValueError: If another process holds the lock, or if the journal belongs to a different --out,
                which may already contain uploads.
        """
        self.folder.mkdir(parents=True, exist_ok=True)
        folder_fd = os.open(self.folder, os.O_RDONLY)
        try:
            if not try_lock(folder_fd):
                lock_problem = f"another process prepares images in {self.folder}"
                raise ValueError(f"{lock_problem}. Wait until that process ends.")
            journal_file = self.folder / JOURNAL
            store_url = self.store and self.store.url
            if journal_file.exists():
                self.earlier_journal = read_json(journal_file)
                split_entries = self.earlier_journal["splits"].items()
                # Version 1.0 also recorded unfinished splits.
                finished_entries = {
                    split: split_entry for split, split_entry in split_entries if "finished" in split_entry
                }
                self.earlier_journal["splits"] = finished_entries
            journal = self.earlier_journal
            if journal is not None and journal["splits"] and journal["store"] != store_url:
                earlier_output = journal["store"] or self.folder
                output_flag = "--work_dir" if self.store else "--out"
                raise ValueError(
                    f"{self.folder} contains a preparation for --out {earlier_output}."
                    f" Resume this preparation, empty the folder, or pass a different {output_flag}."
                )
            yield
        finally:
            os.close(folder_fd)  # releases the lock

    # --- A complete preparation

    def complete_splits(self) -> dict[str, Any] | None:
        """Return the manifest's splits if an earlier start completed the preparation, else None.

        If the preparation is complete, this method removes a journal that a killed process left.

        Raises:
            ValueError: If the settings differ, an index or shard is missing, or a local shard has a wrong
                size.
        """
        if self.store is not None:
            manifest_content = self.store.read(MANIFEST, MANIFEST_LIMIT_BYTES)
        else:
            manifest_file = self.folder / MANIFEST
            manifest_content = manifest_file.read_bytes() if manifest_file.exists() else None
        if manifest_content is None:
            return None
        manifest = {}
        with contextlib.suppress(ValueError):
            manifest = parse_json(manifest_content, MANIFEST)
        if "settings" not in manifest:
            manifest_problem = f"{self.output_location} contains the {MANIFEST} of a different program"
            raise ValueError(f"{manifest_problem}. Pass a new --out.")
        self._check_settings(manifest["settings"])
        manifest_splits = manifest["splits"]
        shards = [shard for split_entry in manifest_splits.values() for shard in split_entry["shards"]]
        # Shards with s3:// URLs were indexed in place and are not part of the output.
        checked_shards = [shard for shard in shards if not shard["file"].startswith("s3://")]
        size_by_file = dict.fromkeys(map(index_file_name, manifest_splits))  # no index sizes in the manifest
        size_by_file |= {shard["file"]: shard["bytes"] for shard in checked_shards}
        stored_files = set() if self.store is None else set(self.store.list())
        for file_name, expected_size in size_by_file.items():
            local_file = self.folder / file_name
            is_local = local_file.is_file() and expected_size in (None, local_file.stat().st_size)
            if file_name not in stored_files and not is_local:
                file_problem = (
                    f"{self.output_location} was complete, but {file_name} is missing or has a different size"
                )
                raise ValueError(f"{file_problem}. Empty {self.output_location} and run the command again.")
        if (self.folder / JOURNAL).exists():  # an earlier process was killed before it removed the journal
            self._remove_journal()
        return manifest_splits

    def _check_settings(self, earlier_settings: dict[str, Any]) -> None:
        """Raise ValueError if one of the current settings differs from an earlier start's settings."""
        for setting_name, current_value in self.settings.items():
            if earlier_settings.get(setting_name) != current_value:
                change = f"{setting_name} was {earlier_settings.get(setting_name)} and is now {current_value}"
                flags = "--out and --work_dir" if self.store else "--out"
                setting_problem = f"{self.output_location} was started with different settings: {change}"
                raise ValueError(f"{setting_problem}. Pass a new {flags}, or empty {self.output_location}.")

    # --- Begin or resume

    def begin_or_resume(self) -> None:
        """Write a new journal, or write an earlier journal again with this start's values.

        An earlier journal keeps its finished splits. Files of unfinished splits are removed from the folder.
        Call this method within `with locked()`, after the data set's classes were read.

        Raises:
            ValueError: If the settings or an input of a finished split changed, or if a new folder or prefix
                contains other files.
        """
        earlier_journal = self.earlier_journal
        current_header = {
            "store": self.store and self.store.url,
            "settings": self.settings,
            "versions": self.dataset.version_by_part,
            "classes": self.dataset.classes,
        }
        if earlier_journal is not None:
            for output_file in self.folder.iterdir():
                name_match = OUTPUT_NAME_PATTERN.fullmatch(output_file.name)
                if name_match and name_match[1] not in earlier_journal["splits"]:
                    output_file.unlink()
        if earlier_journal is None or not earlier_journal["splits"]:
            self._claim_empty_output()
            self.current_journal = current_header | {"splits": {}}
            self._save_journal()
            return
        input_keys = ("inputs", "names_and_sizes")
        # Inputs of unfinished splits may change, so treat the inputs as equal here. _check_finished_inputs()
        # compares the inputs of finished splits.
        current_inputs = {key: self.settings[key] for key in input_keys if key in self.settings}
        self._check_settings(earlier_journal["settings"] | current_inputs)
        for split, split_entry in earlier_journal["splits"].items():
            if self.dataset.checks_md5 and not split_entry.get("verified", True):
                remedy = f"Resume with --no_verify, or remove {self.folder} and run the command again."
                raise ValueError(f"{split} was finished with --no_verify. {remedy}")
        self._check_finished_inputs(earlier_journal)
        self.current_journal = earlier_journal | current_header
        self._save_journal()
        print(f"resuming in {self.folder}, keeping {' and '.join(earlier_journal['splits'])}", flush=True)

    def _claim_empty_output(self) -> None:
        """Raise ValueError if the folder or the store contains other files. Write a marker into the store."""
        if other_files := [file.name for file in self.folder.iterdir() if file.name[0] != "."]:
            folder_problem = f"contains other files, such as {other_files[0]}"
            raise ValueError(f"{self.folder} {folder_problem}. Pass a new folder.")
        if self.store is not None:
            self.store.probe()  # fail now if the store can't be written
            # Accept hidden objects, for example from a killed probe, and accept shards whose --work_dir was
            # lost.
            has_started = self.store.read(JOURNAL) is not None
            visible_keys = [object_key for object_key in self.store.list() if object_key[0] != "."]
            shard_keys = set(filter(OUTPUT_NAME_PATTERN.fullmatch, visible_keys)) if has_started else set()
            if other_keys := [object_key for object_key in visible_keys if object_key not in shard_keys]:
                prefix_problem = f"contains other objects, such as {other_keys[0]}"
                raise ValueError(f"{self.store.url} {prefix_problem}. Pass a new prefix.")
            self.store.write(JOURNAL, json.dumps({"settings": self.settings}).encode())

    def _check_finished_inputs(self, earlier_journal: dict[str, Any]) -> None:
        """Raise ValueError if a finished split's input or the list of classes has changed."""
        earlier_inputs = earlier_journal["settings"]["inputs"]
        for part in sorted(earlier_inputs.keys() | self.dataset.locations.keys()):
            earlier_input = (earlier_inputs.get(part), earlier_journal["versions"].get(part))
            current_input = (self.dataset.bytes_by_part.get(part), self.dataset.version_by_part.get(part))
            input_change = f"{part} changed"
            if earlier_journal["classes"] != self.dataset.classes:  # different classes change the labels
                input_change = "the list of classes changed"
            elif earlier_input == current_input:
                continue
            # The development kit affects both splits, and val_labels affects val. Any other part is a split.
            affected_split = "val" if part == "val_labels" else part
            if part == "devkit" or affected_split in earlier_journal["splits"]:
                input_problem = f"{input_change} since the preparation in {self.folder} started"
                raise ValueError(f"{input_problem}. Remove the folder and start again.")

    # --- Progress

    def split_entry(self, split: str) -> dict[str, Any]:
        """Return a finished split's entry in the journal, or an empty dict for any other split."""
        return self.current_journal["splits"].get(split, {})

    def record_split(self, split: str, split_entry: dict[str, Any]) -> None:
        """Record a finished split, and save the journal on disk.

        Args:
            split: Split name.
            split_entry: Values with the keys "finished" (the split's manifest entry), "odd" (re-encoded
                images) and "verified" (True if the published MD5 sums were compared).
        """
        self.current_journal["splits"][split] = split_entry
        self._save_journal()

    def write_manifest(self, manifest: dict[str, Any]) -> None:
        """Write the manifest to the output, and remove the journal, which completes the preparation.

        In a store, delete shards and indices that the manifest does not list.

        Raises:
            ValueError: If the store does not contain a shard or index. Nothing is written in this case.
        """
        manifest_content = (json.dumps(manifest, indent=1) + "\n").encode()
        splits = manifest["splits"]
        if self.store is None:
            write_bytes(self.folder / MANIFEST, manifest_content)
        else:
            shard_files = [shard["file"] for split in splits.values() for shard in split["shards"]]
            output_files = (*shard_files, *map(index_file_name, splits))
            # Shards that were indexed in place do not match the pattern.
            new_files = set(filter(OUTPUT_NAME_PATTERN.fullmatch, output_files))
            stored_files = set(filter(OUTPUT_NAME_PATTERN.fullmatch, self.store.list()))
            if missing_files := new_files - stored_files:
                problem = f"{min(missing_files)} is neither in {self.folder} nor in {self.output_location}"
                raise ValueError(f"{problem}. Remove {self.folder} and start again.")
            # Delete additional shards that an earlier start uploaded, because readers of train-*.tar would
            # read them.
            self.store.delete(sorted(stored_files - new_files - {*map(names_file_name, splits)}))
            self.store.write(MANIFEST, manifest_content)
        self._remove_journal()

    def _remove_journal(self) -> None:
        """Remove the journal's file, and the marker from the store."""
        if self.store is not None:
            self.store.delete([JOURNAL])
        (self.folder / JOURNAL).unlink()

    def _save_journal(self) -> None:
        write_bytes(self.folder / JOURNAL, json.dumps(self.current_journal).encode())
