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
from tools.prepare.originals import Originals

# Names of files that a preparation writes
OUTPUTS = re.compile(r"(train|val)(-\d{5,}\.tar|_index\.npy|_names\.txt)")


class Journal:
    """Journal and manifest of a preparation. The preparation may change both files only in `with locked()`.

    The journal is in the local folder to which shards are written. In an S3 store, an object with the
    journal's name shows that a preparation has started. The manifest is written after all splits are
    finished, and then the journal is removed. The journal contains an entry for each finished split. An
    entry's "finished" key contains the split's manifest entry. An interrupted split is repeated.
    """

    def __init__(self, folder: Path, store: ObjectStore | None, settings: dict[str, Any], dataset: Originals):
        """Open a folder's journal. A preparation can resume only with the same `settings`."""
        self.folder, self.store, self.settings, self.dataset = folder, store, settings, dataset
        self.out = str(folder) if store is None else store.url
        self.left: dict[str, Any] | None = None  # journal from an earlier, interrupted start
        self.content: dict[str, Any] = {"splits": {}}

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """Lock the folder and read the folder's journal. The kernel releases the lock when the process ends.

        Raises:
            ValueError: If the journal belongs to a different --out, which may already contain uploads.
        """
        self.folder.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(self.folder, os.O_RDONLY)
        try:
            if not try_lock(descriptor):
                problem = f"another process prepares images in {self.folder}"
                raise ValueError(f"{problem}. Wait until that process ends.")
            path, url = self.folder / JOURNAL, self.store and self.store.url
            if path.exists():
                self.left = read_json(path)
                splits = self.left["splits"].items()  # version 1.0 also recorded unfinished splits
                self.left["splits"] = {split: entry for split, entry in splits if "finished" in entry}
            if self.left is not None and self.left["splits"] and self.left["store"] != url:
                raise ValueError(
                    f"{self.folder} contains a preparation for --out {self.left['store'] or self.folder}."
                    f" Resume this preparation, empty the folder, or pass a different"
                    f" {'--work_dir' if self.store else '--out'}."
                )
            yield
        finally:
            os.close(descriptor)

    # --- A complete preparation

    def complete_splits(self) -> dict[str, Any] | None:
        """Return the manifest's splits if the preparation is complete, else None.

        Raises:
            ValueError: If the settings differ, an index or shard is missing, or a local shard has a wrong
                size.
        """
        if self.store is not None:
            content = self.store.read(MANIFEST, MANIFEST_LIMIT_BYTES)
        else:
            path = self.folder / MANIFEST
            content = path.read_bytes() if path.exists() else None
        if content is None:
            return None
        manifest = {}
        with contextlib.suppress(ValueError):
            manifest = parse_json(content, MANIFEST)
        if "settings" not in manifest:
            raise ValueError(f"{self.out} contains the {MANIFEST} of a different program. Pass a new --out.")
        self._check_settings(manifest["settings"])
        splits = manifest["splits"]
        expected_sizes = {index_file_name(split): None for split in splits}
        shards = [shard for split in splits.values() for shard in split["shards"]]
        local_shards = [shard for shard in shards if not shard["file"].startswith("s3://")]
        expected_sizes |= {shard["file"]: shard["bytes"] for shard in local_shards}
        stored = set() if self.store is None else set(self.store.list())
        for file, size in expected_sizes.items():
            path = self.folder / file
            if file not in stored and not (path.is_file() and size in (None, path.stat().st_size)):
                problem = f"{self.out} was complete, but {file} is missing or has a different size"
                raise ValueError(f"{problem}. Empty {self.out} and run the command again.")
        if (self.folder / JOURNAL).exists():  # an earlier process was killed before it removed the journal
            self._remove()
        return splits

    def _check_settings(self, settings: dict[str, Any]) -> None:
        for name, value in self.settings.items():
            if settings.get(name) != value:
                change = f"{name} was {settings.get(name)} and is now {value}"
                remedy = (
                    f"Pass a new {'--out and --work_dir' if self.store else '--out'}, or empty {self.out}."
                )
                raise ValueError(f"{self.out} was started with different settings: {change}. {remedy}")

    # --- Begin or resume

    def begin_or_resume(self) -> None:
        """Open the journal, keep finished splits and remove the files of an interrupted split.

        Raises:
            ValueError: If the settings or an input of a finished split changed, or if a new folder or prefix
                contains other files.
        """
        journal = self.left
        header = {
            "store": self.store and self.store.url,
            "settings": self.settings,
            "versions": self.dataset.versions,
            "classes": self.dataset.classes,
        }
        if journal is not None:
            for path in self.folder.iterdir():
                if (name := OUTPUTS.fullmatch(path.name)) and name[1] not in journal["splits"]:
                    path.unlink()
        if journal is None or not journal["splits"]:
            self._check_empty()
            self.content = header | {"splits": {}}
            self._save()
            return
        input_keys = ("inputs", "names_and_sizes")
        inputs = {key: self.settings[key] for key in input_keys if key in self.settings}
        self._check_settings(journal["settings"] | inputs)
        for split, entry in journal["splits"].items():
            if self.dataset.hashed and not entry.get("verified", True):
                remedy = f"Resume with --no_verify, or remove {self.folder} and run the command again."
                raise ValueError(f"{split} was finished with --no_verify. {remedy}")
        self._check_inputs(journal)
        self.content = journal | header
        self._save()
        print(f"resuming in {self.folder}, keeping {' and '.join(journal['splits'])}", flush=True)

    def _check_empty(self) -> None:
        if foreign_names := [file.name for file in self.folder.iterdir() if file.name[0] != "."]:
            problem = f"contains other files, such as {foreign_names[0]}"
            raise ValueError(f"{self.folder} {problem}. Pass a new folder.")
        if self.store is not None:
            self.store.probe()
            # Accept hidden objects, for example from a killed probe, and accept shards whose --work_dir was
            # lost.
            has_started = self.store.read(JOURNAL) is not None
            visible_keys = [key for key in self.store.list() if key[0] != "."]
            if foreign_names := [key for key in visible_keys if not (has_started and OUTPUTS.fullmatch(key))]:
                problem = f"contains other objects, such as {foreign_names[0]}"
                raise ValueError(f"{self.store.url} {problem}. Pass a new prefix.")
            self.store.write(JOURNAL, json.dumps({"settings": self.settings}).encode())

    def _check_inputs(self, journal: dict[str, Any]) -> None:
        """Raise ValueError if a finished split's input has been replaced."""
        for part in sorted(journal["settings"]["inputs"].keys() | self.dataset.parts.keys()):
            recorded = (journal["settings"]["inputs"].get(part), journal["versions"].get(part))
            change = f"{part} changed"
            if journal["classes"] != self.dataset.classes:  # different classes change the labels
                change = "the list of classes changed"
            elif recorded == (self.dataset.bytes.get(part), self.dataset.versions.get(part)):
                continue
            if part == "devkit" or part in journal["splits"]:
                problem = f"{change} since the preparation in {self.folder} started"
                raise ValueError(f"{problem}. Remove the folder and start again.")

    # --- Progress

    def entry(self, split: str) -> dict[str, Any]:
        """Return a finished split's entry, or an empty dict for any other split."""
        return self.content["splits"].get(split, {})

    def record(self, split: str, entry: dict[str, Any]) -> None:
        """Record a finished split in the journal."""
        self.content["splits"][split] = entry
        self._save()

    def finish(self, manifest: dict[str, Any]) -> None:
        """Write the manifest and remove the journal."""
        content, splits = (json.dumps(manifest, indent=1) + "\n").encode(), manifest["splits"]
        if self.store is None:
            write_bytes(self.folder / MANIFEST, content)
        else:
            new_files = {shard["file"] for split in splits.values() for shard in split["shards"]}
            new_files = {
                file for file in (*new_files, *map(index_file_name, splits)) if OUTPUTS.fullmatch(file)
            }
            stored = set(filter(OUTPUTS.fullmatch, self.store.list()))
            if missing_files := new_files - stored:
                problem = f"{min(missing_files)} is neither in {self.folder} nor in {self.out}"
                raise ValueError(f"{problem}. Remove {self.folder} and start again.")
            # Delete additional shards that an earlier start uploaded, because readers of train-*.tar would
            # read them.
            self.store.delete(sorted(stored - new_files - {*map(names_file_name, splits)}))
            self.store.write(MANIFEST, content)
        self._remove()

    def _remove(self) -> None:
        if self.store is not None:
            self.store.delete([JOURNAL])
        (self.folder / JOURNAL).unlink()

    def _save(self) -> None:
        write_bytes(self.folder / JOURNAL, json.dumps(self.content).encode())
