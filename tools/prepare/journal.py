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
        """Open a folder's journal. A preparation can resume only with the same `settings`."""
        self.folder, self.store, self.settings, self.dataset = folder, store, settings, dataset
        self.output_location = str(folder) if store is None else store.url
        self.earlier_journal: dict[str, Any] | None = None  # journal from an earlier, interrupted start
        self.current_journal: dict[str, Any] = {"splits": {}}

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """Lock the folder and read the folder's journal. The kernel releases the lock when the process ends.

        Raises:
            ValueError: If the journal belongs to a different --out, which may already contain uploads.
        """
        self.folder.mkdir(parents=True, exist_ok=True)
        folder_fd = os.open(self.folder, os.O_RDONLY)
        try:
            if not try_lock(folder_fd):
                lock_problem = f"another process prepares images in {self.folder}"
                raise ValueError(f"{lock_problem}. Wait until that process ends.")
            journal_file, store_url = self.folder / JOURNAL, self.store and self.store.url
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
            os.close(folder_fd)

    # --- A complete preparation

    def complete_splits(self) -> dict[str, Any] | None:
        """Return the manifest's splits if the preparation is complete, else None.

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
        own_shards = [shard for shard in shards if not shard["file"].startswith("s3://")]
        size_by_file = {
            index_file_name(split): None for split in manifest_splits
        }  # the manifest contains no index size
        size_by_file |= {shard["file"]: shard["bytes"] for shard in own_shards}
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
        for setting_name, current_value in self.settings.items():
            if earlier_settings.get(setting_name) != current_value:
                change = f"{setting_name} was {earlier_settings.get(setting_name)} and is now {current_value}"
                flags = "--out and --work_dir" if self.store else "--out"
                setting_problem = f"{self.output_location} was started with different settings: {change}"
                raise ValueError(f"{setting_problem}. Pass a new {flags}, or empty {self.output_location}.")

    # --- Begin or resume

    def begin_or_resume(self) -> None:
        """Open the journal, keep finished splits and remove the files of an interrupted split.

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
            self._check_output_is_empty()
            self.current_journal = current_header | {"splits": {}}
            self._save_journal()
            return
        input_keys = ("inputs", "names_and_sizes")
        # _check_finished_inputs() compares the inputs.
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

    def _check_output_is_empty(self) -> None:
        if other_files := [file.name for file in self.folder.iterdir() if file.name[0] != "."]:
            folder_problem = f"contains other files, such as {other_files[0]}"
            raise ValueError(f"{self.folder} {folder_problem}. Pass a new folder.")
        if self.store is not None:
            self.store.probe()
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
        """Raise ValueError if a finished split's input has been replaced."""
        earlier_inputs = earlier_journal["settings"]["inputs"]
        for part in sorted(earlier_inputs.keys() | self.dataset.locations.keys()):
            earlier_input = (earlier_inputs.get(part), earlier_journal["versions"].get(part))
            current_input = (self.dataset.bytes_by_part.get(part), self.dataset.version_by_part.get(part))
            input_change = f"{part} changed"
            if earlier_journal["classes"] != self.dataset.classes:  # different classes change the labels
                input_change = "the list of classes changed"
            elif earlier_input == current_input:
                continue
            if part == "devkit" or part in earlier_journal["splits"]:
                input_problem = f"{input_change} since the preparation in {self.folder} started"
                raise ValueError(f"{input_problem}. Remove the folder and start again.")

    # --- Progress

    def split_entry(self, split: str) -> dict[str, Any]:
        """Return a finished split's entry, or an empty dict for any other split."""
        return self.current_journal["splits"].get(split, {})

    def record_split(self, split: str, split_entry: dict[str, Any]) -> None:
        """Record a finished split in the journal."""
        self.current_journal["splits"][split] = split_entry
        self._save_journal()

    def write_manifest(self, manifest: dict[str, Any]) -> None:
        """Write the manifest and remove the journal."""
        manifest_content = (json.dumps(manifest, indent=1) + "\n").encode()
        splits = manifest["splits"]
        if self.store is None:
            write_bytes(self.folder / MANIFEST, manifest_content)
        else:
            shard_files = [shard["file"] for split in splits.values() for shard in split["shards"]]
            output_files = (*shard_files, *map(index_file_name, splits))
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
        if self.store is not None:
            self.store.delete([JOURNAL])
        (self.folder / JOURNAL).unlink()

    def _save_journal(self) -> None:
        write_bytes(self.folder / JOURNAL, json.dumps(self.current_journal).encode())
