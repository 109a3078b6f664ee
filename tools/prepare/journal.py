"""The journal of a preparation: what is done, so that the same command continues after an interruption."""

import contextlib
import json
import os
import re
import shutil
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from common.data.decode import SPLITS
from common.data.shards import JOURNAL, MANIFEST, MANIFEST_LIMIT, index_name
from common.system.files import parse_json, read_json, try_lock, write_bytes
from common.system.s3 import ObjectStore
from tools.prepare.source import Position, RawDataset
from tools.prepare.writer import State, part_name, rows_name

FOLDER_MANIFEST = "prepared.json"  # of --format folder, whose files it does not list
RECORD_S = 20  # between two records: the work that a kill may cost
WRITTEN = re.compile(r"(train|val)(-\d{5,}\.tar|_index\.npy)")  # files of a preparation


@dataclass
class SplitProgress:
    """A split that is being written."""

    bytes: int  # expected output
    shards: int
    position: Position = field(default_factory=Position)
    odd: list[dict[str, str]] = field(default_factory=list)  # {"key", "why"} of re-encoded images
    read: int = 0  # bytes
    written: int = 0  # bytes
    writer: State | None = None

    @classmethod
    def from_json(cls, content: dict[str, Any]) -> "SplitProgress":
        content = dict(content)
        return cls(position=Position(*content.pop("place")), **content)

    def to_json(self, writer: State) -> dict[str, Any]:
        content = {name: value for name, value in vars(self).items() if name != "position"}
        return content | {"place": self.position, "writer": writer}


class Journal:
    """The journal and the manifest of one --out, which a preparation owns while it is locked().

    The journal lies in the local folder that shards are written to; in a store an object of the same name
    says that a preparation has begun there. The manifest is written last, and the journal is then removed.
    """

    def __init__(
        self,
        folder: Path,
        store: ObjectStore | None,
        form: str,
        settings: dict[str, Any],
        dataset: RawDataset,
    ):
        """form: "shards", "folder" or "index". settings: must be the same when a preparation continues."""
        self.folder, self.store, self.form = folder, store, form
        self.settings, self.dataset = settings, dataset
        self.out = folder if store is None else store.url
        self.manifest = FOLDER_MANIFEST if form == "folder" else MANIFEST
        self.content: dict[str, Any] = {"splits": {}}
        self.recorded_s = 0.0  # by time.monotonic()

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """Holds a lock on the folder. The kernel releases it when the process ends, however it ends."""
        self.folder.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(self.folder, os.O_RDONLY)
        try:
            if not try_lock(descriptor):
                raise ValueError(f"another process prepares images in {self.folder}: wait until it ends")
            yield
        finally:
            os.close(descriptor)

    # --- What is there

    def read(self) -> dict[str, Any] | None:
        """Returns the journal of an earlier start.

        Raises ValueError when that was for another --out, where alone its list of uploads is valid.
        """
        path = self.folder / JOURNAL
        left = read_json(path) if path.exists() else None
        if left is not None and left["splits"] and left.get("store") != self._store_url():
            raise ValueError(
                f"{self.folder} holds a preparation for --out {left.get('store') or self.folder}: continue"
                f" with that, give another {'--work_dir' if self.store else '--out'}, or remove what is there"
            )
        return left

    def complete_splits(self) -> dict[str, Any] | None:
        """Returns the manifest's splits when the preparation is complete, else None.

        Raises ValueError when it has other settings, or when a file is missing or shorter.
        """
        if self.store is None:
            path = self.folder / self.manifest
            content = path.read_bytes() if path.exists() else None
        else:
            content = self.store.read(self.manifest, MANIFEST_LIMIT)
        if content is None:
            return None
        about = {}
        with contextlib.suppress(ValueError):
            about = parse_json(content, self.manifest)
        if "settings" not in about:
            raise ValueError(f"{self.out} holds a {self.manifest} of something else: give a new --out")
        self._check_same(about["settings"])
        self._check_files(about["splits"])
        if (self.folder / JOURNAL).exists():  # killed at the very end
            self._remove()
        return about["splits"]

    def _check_files(self, splits: dict[str, Any]) -> None:
        """Raises ValueError when an index or a shard is missing, or a local shard has another size."""
        if self.form == "folder":
            return  # its manifest lists no files
        wanted = {index_name(split): None for split in splits}
        shards = (shard for about in splits.values() for shard in about["shards"])
        wanted |= {s["file"]: s["bytes"] for s in shards if not s["file"].startswith("s3://")}
        stored = set() if self.store is None else set(self.store.list())
        for file, size in wanted.items():
            path = self.folder / file
            if file not in stored and not (path.is_file() and size in (None, path.stat().st_size)):
                raise ValueError(
                    f"{self.out} was complete, but {file} is missing or has another size: remove what is"
                    " there, and begin again"
                )

    def _check_same(self, found: dict[str, Any]) -> None:
        for name, value in self.settings.items():
            if found.get(name) != value:
                other = "--out and --work_dir" if self.store else "--out"
                raise ValueError(
                    f"{self.out} was begun with other settings: {name} was {found.get(name)}, and is now"
                    f" {value}. Give another {other}, or remove what is there"
                )

    # --- Begin or continue

    def begin(self, left: dict[str, Any] | None) -> None:
        """Starts a new journal. Raises ValueError when the folder or the store holds other files."""
        if left is not None and left["writing"]:  # interrupted before the journal had any image
            for split in SPLITS:
                self._remove_files(split)
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
        self.content = self._header() | {"splits": {}, "uploaded": [], "writing": False}
        self._save()

    def resume(self, left: dict[str, Any]) -> dict[str, str]:
        """Continues an earlier journal. Returns the splits that must be read again, and why.

        Raises ValueError when the settings changed, or an input of a finished split.
        """
        inputs = {n: self.settings[n] for n in ("inputs", "names_and_sizes") if n in self.settings}
        self._check_same(left["settings"] | inputs)
        self._check_verified(left["splits"])
        dropped = self._drop_changed(left)
        self.content = left | self._header()
        self._save()
        return dropped

    def _header(self) -> dict[str, Any]:
        return {
            "store": self._store_url(),
            "settings": self.settings,
            "versions": self.dataset.versions,
            "classes": self.dataset.classes,
        }

    def _store_url(self) -> str | None:
        return None if self.store is None else self.store.url

    def _check_verified(self, splits: dict[str, Any]) -> None:
        """Raises ValueError when a finished split's MD5 sum was not checked: it can't be checked later."""
        unchecked = [split for split, about in splits.items() if not about.get("verified", True)]
        if unchecked and self.dataset.hashed:
            raise ValueError(
                f"{unchecked[0]} was finished under --no_verify: continue with --no_verify, or remove"
                f" {self.folder} and begin again"
            )

    def _drop_changed(self, left: dict[str, Any]) -> dict[str, str]:
        """Forgets unfinished splits whose input was replaced, and removes their files."""
        parts = left["settings"]["inputs"].keys() | self.dataset.parts.keys()
        done = {part for part in parts if "finished" in left["splits"].get(part, {})} | {"devkit"}
        changed = {part: why for part in parts if (why := self._change(part, left, part in done))}
        for part in changed.keys() & done:
            raise ValueError(f"{changed[part]} since {self.folder} was begun: remove that, and begin again")
        for part in changed:
            self._remove_files(part)  # also when it failed before the journal had any image of it
        return {part: why for part, why in changed.items() if left["splits"].pop(part, None)}

    def _change(self, part: str, left: dict[str, Any], done: bool) -> str | None:
        """Why the journal's record of a part is no longer valid; None when it is valid."""
        version = self.dataset.versions.get(part)
        before = left["settings"]["inputs"].get(part), left["versions"].get(part)
        if left.get("classes") != self.dataset.classes:  # and with them the labels
            return "the list of classes changed"
        if before != (self.dataset.bytes.get(part), version):
            return f"{part} changed"
        if version is None and self.dataset.hashed and not done:
            # The MD5 sum will be of the file as it is now; the shards may hold images of an earlier file.
            return f"nothing says whether {part} changed"
        return None

    def _remove_files(self, split: str) -> None:
        for path in self.folder.iterdir():
            if WRITTEN.fullmatch(path.name) and path.name.startswith(split):
                path.unlink()
        shutil.rmtree(self.folder / rows_name(split), ignore_errors=True)
        if self.form == "folder":
            shutil.rmtree(self.folder / split, ignore_errors=True)

    # --- Progress

    def progress(self, split: str) -> SplitProgress | None:
        """The recorded progress of an unfinished split; None before the first record."""
        recorded = self.content["splits"].get(split)
        return SplitProgress.from_json(recorded) if recorded else None

    def begin_writing(self) -> None:
        """Records that a split's files in the folder belong to this preparation, before the first is made."""
        self.recorded_s = time.monotonic()
        if not self.content["writing"]:
            self.content["writing"] = True
            self._save()

    def is_due(self) -> bool:
        """True when the last record is older than RECORD_S."""
        return time.monotonic() > self.recorded_s + RECORD_S

    def record(self, split: str, progress: SplitProgress, writer: State) -> None:
        """Records a split's progress. writer: its state after a commit."""
        self.content["splits"][split] = progress.to_json(writer)
        self._save()
        self.recorded_s = time.monotonic()

    def forget(self, split: str) -> None:
        if self.content["splits"].pop(split, None):
            self._save()

    def finish_split(self, split: str, entry: dict[str, Any], odd: list[dict[str, str]]) -> None:
        """Records a split as finished. entry: its part of the manifest."""
        about = {"finished": entry, "odd": odd, "verified": self.dataset.hashed}
        self.content["splits"][split] = about
        self._save()

    def finished(self, split: str) -> dict[str, Any] | None:
        """The split's part of the manifest once it is finished, else None."""
        return self.content["splits"].get(split, {}).get("finished")

    def is_uploaded(self, file: str) -> bool:
        return file in self.content["uploaded"]

    def record_upload(self, file: str) -> None:
        self.content["uploaded"].append(file)
        self._save()

    def odd_images(self) -> list[dict[str, str]]:
        """The re-encoded images: {"split", "key", "why"}."""
        splits = self.content["splits"].items()
        return [{"split": split, **image} for split, about in splits for image in about["odd"]]

    def finish(self, manifest: dict[str, Any]) -> None:
        """Writes the manifest and removes the journal."""
        content = (json.dumps(manifest, indent=1) + "\n").encode()
        for split in manifest["splits"]:
            (self.folder / part_name(split)).unlink(missing_ok=True)
        if self.store is None:
            write_bytes(self.folder / self.manifest, content)
        else:
            made = {shard["file"] for about in manifest["splits"].values() for shard in about["shards"]}
            made |= {index_name(split) for split in manifest["splits"]}
            # An earlier start may have uploaded more shards; readers of train-*.tar would take them, too.
            self.store.delete([k for k in self.store.list() if WRITTEN.fullmatch(k) and k not in made])
            self.store.write(self.manifest, content)
        self._remove()

    def _remove(self) -> None:
        if self.store is not None:
            self.store.delete([JOURNAL])
        (self.folder / JOURNAL).unlink()

    def _save(self) -> None:
        write_bytes(self.folder / JOURNAL, json.dumps(self.content).encode())
