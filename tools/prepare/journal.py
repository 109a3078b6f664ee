"""The journal of a preparation: what is done, so that the same command resumes after an interruption."""

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

WRITTEN = re.compile(r"(train|val)(-\d{5,}\.tar|_index\.npy|_names\.txt)")  # files of a preparation


class Journal:
    """The journal and the manifest of one --out, which a preparation owns while it is locked().

    The journal lies in the local folder that shards are written to; in a store an object of the same name
    says that a preparation has begun there. The manifest is written last, and the journal is then removed.
    It has an entry for each finished split: "finished" is its part of the manifest. An interrupted split
    begins again.
    """

    def __init__(self, folder: Path, store: ObjectStore | None, settings: dict[str, Any], dataset: Originals):
        """settings: must be the same when a preparation resumes."""
        self.folder, self.store, self.settings, self.dataset = folder, store, settings, dataset
        self.out = str(folder) if store is None else store.url
        self.left: dict[str, Any] | None = None  # the journal of an earlier start
        self.content: dict[str, Any] = {"splits": {}}

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """Hold a lock on the folder, which the kernel releases with the process, and reads its journal.

        Raises ValueError when that is for another --out, which may have its first uploads.
        """
        self.folder.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(self.folder, os.O_RDONLY)
        try:
            if not try_lock(descriptor):
                raise ValueError(f"another process prepares images in {self.folder}: wait until it ends")
            path, url = self.folder / JOURNAL, self.store and self.store.url
            if path.exists():
                self.left = read_json(path)
                splits = self.left["splits"].items()  # version 1.0 recorded unfinished ones, too
                self.left["splits"] = {split: entry for split, entry in splits if "finished" in entry}
            if self.left is not None and self.left["splits"] and self.left["store"] != url:
                raise ValueError(
                    f"{self.folder} holds a preparation for --out {self.left['store'] or self.folder}: resume"
                    f" with that, give another {'--work_dir' if self.store else '--out'}, or remove what is"
                    " there"
                )
            yield
        finally:
            os.close(descriptor)

    # --- A complete preparation

    def complete_splits(self) -> dict[str, Any] | None:
        """Return the manifest's splits when the preparation is complete, else None.

        Raises ValueError when it has other settings, when an index or a shard is missing, or when a shard
        here has another size.
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
            raise ValueError(f"{self.out} holds a {MANIFEST} of something else: give a new --out")
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
                    f"{self.out} was complete, but {file} is missing or has another size: remove what is"
                    " there, and begin again"
                )
        if (self.folder / JOURNAL).exists():  # killed at the very end
            self._remove()
        return splits

    def _check_same(self, settings: dict[str, Any]) -> None:
        for name, value in self.settings.items():
            if settings.get(name) != value:
                raise ValueError(
                    f"{self.out} was begun with other settings: {name} was {settings.get(name)}, and is now"
                    f" {value}. Give another {'--out and --work_dir' if self.store else '--out'}, or remove"
                    " what is there"
                )

    # --- Begin or resume

    def begin_or_resume(self) -> None:
        """Open the journal. Keeps finished splits, and removes what an interrupted one has left.

        Raises ValueError when the settings or an input of a finished split changed, or when a new folder or
        prefix holds other files.
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
                    f"{split} was finished under --no_verify: resume with --no_verify, or remove"
                    f" {self.folder} and begin again"
                )
        self._check_inputs(left)
        self.content = left | header
        self._save()
        print(f"{self.folder} was begun: keeping its {' and '.join(left['splits'])}", flush=True)

    def _check_empty(self) -> None:
        if others := [file.name for file in self.folder.iterdir() if file.name[0] != "."]:
            raise ValueError(f"{self.folder} holds other files, as {others[0]}: give a new folder")
        if self.store is not None:
            self.store.probe()
            # Accepted: hidden objects, such as a killed probe's; shards whose --work_dir was lost.
            begun = self.store.read(JOURNAL) is not None
            others = [k for k in self.store.list() if k[0] != "." and not (begun and WRITTEN.fullmatch(k))]
            if others:
                raise ValueError(f"{self.store.url} holds other objects, as {others[0]}: give a new prefix")
            self.store.write(JOURNAL, json.dumps({"settings": self.settings}).encode())

    def _check_inputs(self, left: dict[str, Any]) -> None:
        """Raise ValueError when an input of a finished split was replaced."""
        for part in sorted(left["settings"]["inputs"].keys() | self.dataset.parts.keys()):
            was = left["settings"]["inputs"].get(part), left["versions"].get(part)
            why = f"{part} changed"
            if left["classes"] != self.dataset.classes:  # and with them the labels
                why = "the list of classes changed"
            elif was == (self.dataset.bytes.get(part), self.dataset.versions.get(part)):
                continue
            if part == "devkit" or part in left["splits"]:
                raise ValueError(f"{why} since {self.folder} was begun: remove that, and begin again")

    # --- Progress

    def entry(self, split: str) -> dict[str, Any]:
        """What is recorded of a finished split; else {}."""
        return self.content["splits"].get(split, {})

    def record(self, split: str, entry: dict[str, Any]) -> None:
        """Record a finished split."""
        self.content["splits"][split] = entry
        self._save()

    def finish(self, manifest: dict[str, Any]) -> None:
        """Write the manifest and removes the journal."""
        content, splits = (json.dumps(manifest, indent=1) + "\n").encode(), manifest["splits"]
        if self.store is None:
            write_bytes(self.folder / MANIFEST, content)
        else:
            made = {shard["file"] for split in splits.values() for shard in split["shards"]}
            made = {file for file in (*made, *map(index_name, splits)) if WRITTEN.fullmatch(file)}
            stored = set(filter(WRITTEN.fullmatch, self.store.list()))
            if lost := made - stored:
                raise ValueError(f"{min(lost)} is neither in {self.folder} nor in {self.out}: begin again")
            # An earlier start may have uploaded more shards; readers of train-*.tar would take them, too.
            self.store.delete(sorted(stored - made - {*map(names_file, splits)}))
            self.store.write(MANIFEST, content)
        self._remove()

    def _remove(self) -> None:
        if self.store is not None:
            self.store.delete([JOURNAL])
        (self.folder / JOURNAL).unlink()

    def _save(self) -> None:
        write_bytes(self.folder / JOURNAL, json.dumps(self.content).encode())
