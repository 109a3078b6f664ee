"""Journal of a preparation, which records finished splits so that the same command can resume."""

import contextlib
import json
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from onecurve.data.names import names_file
from onecurve.data.shards import JOURNAL, MANIFEST, MANIFEST_LIMIT, index_name
from onecurve.system.files import parse_json, read_json, try_lock, write_bytes
from onecurve.system.s3 import ObjectStore
from tools.prepare.originals import Originals

WRITTEN = re.compile(r"(train|val)(-\d{5,}\.tar|_index\.npy|_names\.txt)")  # files that a preparation writes


class Journal:
    """Journal and manifest of one --out. A preparation may change these files while they are locked().

    The journal is in the local folder to which shards are written. In a store, an object with the journal's
    name shows that a preparation has started there. The manifest is written after all splits, and then the
    journal is removed. The journal contains an entry for each finished split. Key "finished" of an entry is
    the split's part of the manifest. An interrupted split is repeated.
    """

    def __init__(self, folder: Path, store: ObjectStore | None, settings: dict[str, Any], dataset: Originals):
        """Open the journal of a folder. A preparation can only resume with the same `settings`."""
        self.folder, self.store, self.settings, self.dataset = folder, store, settings, dataset
        self.out = str(folder) if store is None else store.url
        self.left: dict[str, Any] | None = None  # the journal that an earlier start left
        self.content: dict[str, Any] = {"splits": {}}

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """Lock the folder and read its journal. The kernel releases the lock when the process ends.

        Raises:
            ValueError: the journal belongs to a different --out, which may already contain uploads.
        """
        self.folder.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(self.folder, os.O_RDONLY)
        try:
            if not try_lock(descriptor):
                raise ValueError(f"another process prepares images in {self.folder}. Wait until it ends.")
            path, url = self.folder / JOURNAL, self.store and self.store.url
            if path.exists():
                self.left = read_json(path)
                splits = self.left["splits"].items()  # version 1.0 also recorded unfinished splits
                self.left["splits"] = {split: entry for split, entry in splits if "finished" in entry}
            if self.left is not None and self.left["splits"] and self.left["store"] != url:
                raise ValueError(
                    f"{self.folder} contains a preparation for --out {self.left['store'] or self.folder}."
                    f" Resume it, give another {'--work_dir' if self.store else '--out'}, or empty this one."
                )
            yield
        finally:
            os.close(descriptor)

    # --- A complete preparation

    def complete_splits(self) -> dict[str, Any] | None:
        """Return the manifest's splits if the preparation is complete, else None.

        Raises:
            ValueError: the settings differ, an index or shard is missing, or a local shard has a wrong size.
        """
        if self.store is not None:
            content = self.store.read(MANIFEST, MANIFEST_LIMIT)
        else:
            path = self.folder / MANIFEST
            content = path.read_bytes() if path.exists() else None
        if content is None:
            return None
        manifest = {}
        with contextlib.suppress(ValueError):
            manifest = parse_json(content, MANIFEST)
        if "settings" not in manifest:
            raise ValueError(f"{self.out} contains the {MANIFEST} of another program. Give a new --out.")
        self._check_same(manifest["settings"])
        splits = manifest["splits"]
        wanted = {index_name(split): None for split in splits}
        shards = (shard for split in splits.values() for shard in split["shards"])
        wanted |= {s["file"]: s["bytes"] for s in shards if not s["file"].startswith("s3://")}
        stored = set() if self.store is None else set(self.store.list())
        for file, size in wanted.items():
            path = self.folder / file
            if file not in stored and not (path.is_file() and size in (None, path.stat().st_size)):
                raise ValueError(
                    f"{self.out} was complete, but {file} is missing or has another size."
                    f" Empty {self.out} and start again."
                )
        if (self.folder / JOURNAL).exists():  # the process was killed before it removed the journal
            self._remove()
        return splits

    def _check_same(self, settings: dict[str, Any]) -> None:
        for name, value in self.settings.items():
            if settings.get(name) != value:
                raise ValueError(
                    f"{self.out} was started with other settings: {name} was {settings.get(name)} and is now"
                    f" {value}. Give a new {'--out and --work_dir' if self.store else '--out'}, or empty it."
                )

    # --- Begin or resume

    def begin_or_resume(self) -> None:
        """Open the journal, keep finished splits and remove the files of an interrupted split.

        Raises:
            ValueError: the settings or an input of a finished split changed, or a new folder or prefix
            contains other files.
        """
        left = self.left
        header = {
            "store": self.store and self.store.url,
            "settings": self.settings,
            "versions": self.dataset.versions,
            "classes": self.dataset.classes,
        }
        if left is not None:
            for path in self.folder.iterdir():
                if (written := WRITTEN.fullmatch(path.name)) and written[1] not in left["splits"]:
                    path.unlink()
        if left is None or not left["splits"]:
            self._check_empty()
            self.content = header | {"splits": {}}
            self._save()
            return
        inputs = {n: self.settings[n] for n in ("inputs", "names_and_sizes") if n in self.settings}
        self._check_same(left["settings"] | inputs)
        for split, entry in left["splits"].items():
            if self.dataset.hashed and not entry.get("verified", True):
                raise ValueError(
                    f"{split} was finished with --no_verify. Resume with --no_verify, or remove {self.folder}"
                    " and start again."
                )
        self._check_inputs(left)
        self.content = left | header
        self._save()
        print(f"resuming in {self.folder}, keeping {' and '.join(left['splits'])}", flush=True)

    def _check_empty(self) -> None:
        if others := [file.name for file in self.folder.iterdir() if file.name[0] != "."]:
            raise ValueError(f"{self.folder} contains other files, such as {others[0]}. Give a new folder.")
        if self.store is not None:
            self.store.probe()
            # Accept hidden objects, for example from a killed probe, and shards whose --work_dir was
            # lost.
            has_started = self.store.read(JOURNAL) is not None
            keys = [key for key in self.store.list() if key[0] != "."]
            others = [key for key in keys if not (has_started and WRITTEN.fullmatch(key))]
            if others:
                raise ValueError(
                    f"{self.store.url} contains other objects, such as {others[0]}. Give a new prefix."
                )
            self.store.write(JOURNAL, json.dumps({"settings": self.settings}).encode())

    def _check_inputs(self, left: dict[str, Any]) -> None:
        """Raise ValueError if an input of a finished split was replaced."""
        for part in sorted(left["settings"]["inputs"].keys() | self.dataset.parts.keys()):
            earlier = left["settings"]["inputs"].get(part), left["versions"].get(part)
            change = f"{part} changed"
            if left["classes"] != self.dataset.classes:  # other classes change the labels
                change = "the list of classes changed"
            elif earlier == (self.dataset.bytes.get(part), self.dataset.versions.get(part)):
                continue
            if part == "devkit" or part in left["splits"]:
                raise ValueError(
                    f"{change} since the start in {self.folder}. Remove that folder and start again."
                )

    # --- Progress

    def entry(self, split: str) -> dict[str, Any]:
        """Return the entry of a finished split, or an empty dict for any other split."""
        return self.content["splits"].get(split, {})

    def record(self, split: str, entry: dict[str, Any]) -> None:
        """Record a finished split."""
        self.content["splits"][split] = entry
        self._save()

    def finish(self, manifest: dict[str, Any]) -> None:
        """Write the manifest and remove the journal."""
        content, splits = (json.dumps(manifest, indent=1) + "\n").encode(), manifest["splits"]
        if self.store is None:
            write_bytes(self.folder / MANIFEST, content)
        else:
            written = {shard["file"] for split in splits.values() for shard in split["shards"]}
            written = {file for file in (*written, *map(index_name, splits)) if WRITTEN.fullmatch(file)}
            stored = set(filter(WRITTEN.fullmatch, self.store.list()))
            if lost := written - stored:
                raise ValueError(f"{min(lost)} is neither in {self.folder} nor in {self.out}. Start again.")
            # An earlier start may have uploaded more shards, and readers of train-*.tar would read them.
            self.store.delete(sorted(stored - written - {*map(names_file, splits)}))
            self.store.write(MANIFEST, content)
        self._remove()

    def _remove(self) -> None:
        if self.store is not None:
            self.store.delete([JOURNAL])
        (self.folder / JOURNAL).unlink()

    def _save(self) -> None:
        write_bytes(self.folder / JOURNAL, json.dumps(self.content).encode())
