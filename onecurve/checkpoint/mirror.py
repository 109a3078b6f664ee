"""Uploads committed checkpoints to a prefix in S3 during the training, and downloads them.

<prefix>/checkpoints/step_00000390/...   as on the disk; the manifest, uploaded last, commits the checkpoint
<prefix>/checkpoints/index.json          {"latest": ..., "best": ...}
<prefix>/metrics.jsonl, recipe.json, starts.jsonl, result.json, ...    telemetry-*.jsonl with the result
"""

import json
import shutil
import threading
from collections.abc import Callable, Mapping
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

from onecurve.checkpoint import format as checkpoints
from onecurve.checkpoint.format import (
    JSON_LIMIT_BYTES,
    MANIFEST_FILE,
    DamagedCheckpoint,
    step_name,
    step_of,
    steps_in,
)
from onecurve.system.files import discard, own_files, read_regular, sha256_of, sync, write_bytes
from onecurve.system.output import log
from onecurve.system.s3 import ObjectStore, StoreError, WrongSize
from onecurve.system.threads import Heartbeat, lower_priority

LOGS = ("recipe.json", "starts.jsonl", "metrics.jsonl", "confusion.json", "nvidia-smi-*.txt")
TELEMETRY = "telemetry-*.jsonl"  # 140 MB a day from a host with 8 GPUs, so it is sent once, with the result
LOG_LIMIT_BYTES = 2**31


class Mirror:
    """Uploads one checkpoint at a time in its own thread; of later ones only the newest is queued.

    The training never waits for it. A failed upload is printed, and retried with the next checkpoint, at the
    end of the run, and when the same command is started again. lost(): the message once another run owns the
    prefix, as after a pause of this machine: from then on nothing is written or removed there. Only a request
    whose check came before the pause still goes out: the new owner's next upload repairs it.
    """

    def __init__(
        self,
        store: ObjectStore,
        folder: Path,
        keep_every: int | None = None,
        lost: Callable[[], str | None] = lambda: None,
    ):
        self.store, self.folder, self.keep_every, self.lost = store, folder, keep_every, lost
        self.changed = threading.Condition()
        self.waiting: tuple[int, int | None] | None = None  # (step, best step)
        self.sending: tuple[int, int | None] | None = None
        self.failed = False  # the last upload
        threading.Thread(target=self._work, daemon=True).start()

    def offer(self, step: int, best: int | None) -> None:
        """Queues a checkpoint that was committed on the disk."""
        with self.changed:
            self.waiting = (step, best)
            self.changed.notify_all()

    def needs(self) -> set[int]:
        """Steps of the checkpoints that must stay on the disk: queued, or being sent, and their best ones."""
        with self.changed:
            pairs = filter(None, (self.waiting, self.sending))
            return {step for pair in pairs for step in pair if step is not None}

    def wait(self, timeout_s: float) -> bool:
        """True once nothing is queued or being sent. Each request to the store has its own timeout."""
        with self.changed:
            return self.changed.wait_for(lambda: self.waiting is None and self.sending is None, timeout_s)

    def send_last_files(self, result: Mapping[str, Any]) -> None:
        """Uploads the files of a finished run, result.json last: its presence means a complete upload."""
        self._check_owner()
        self._send_run_files(*LOGS, TELEMETRY)
        self.store.write("result.json", json.dumps(result, indent=2).encode())

    def _send_run_files(self, *patterns: str) -> None:
        for pattern in patterns:
            for file in own_files(self.folder, pattern):
                self.store.upload(file, file.name)

    def _work(self) -> None:
        lower_priority()
        while True:
            with self.changed:
                self.changed.wait_for(lambda: self.waiting is not None)
                assert self.waiting
                (step, best), self.waiting = self.waiting, None
                self.sending = step, best
            failed = False
            try:
                self._send(step, best)
            except Exception as error:  # of any kind, because the end of the run waits for this thread
                failed = True
                log.info(
                    f"the checkpoint of step {step:,} is not in {self.store.url} ({error}): it is safe on the"
                    " disk. The next upload sends it, or run the same command again later"
                )
            with self.changed:
                self.failed, self.sending = failed, None
                self.changed.notify_all()

    def _send(self, step: int, best: int | None) -> None:
        """Uploads the logs, the checkpoint, the best one if it is missing, and index.json."""
        self._check_owner()
        self._send_run_files(*LOGS)  # first, as they are never behind a checkpoint
        there = committed(self.store)
        for wanted in sorted({step} | ({best} if best in steps_in(self.folder / "checkpoints") else set())):
            if wanted not in there:
                self._send_checkpoint(wanted)
                there.add(wanted)
        index = {"latest": step_name(step)} | ({"best": step_name(best)} if best in there else {})
        self._check_owner()
        self.store.write(f"checkpoints/{checkpoints.INDEX_FILE}", json.dumps(index).encode())
        self._send_run_files("result.json")
        self._prune(checkpoints.to_keep({s for s in there if s <= step}, best, self.keep_every))

    def _send_checkpoint(self, step: int) -> None:
        """Uploads a checkpoint. The manifest, last, is the commit: without one there is no checkpoint."""
        local = self.folder / "checkpoints" / step_name(step)
        remote = f"checkpoints/{step_name(step)}"
        for path in own_files(local, "*"):
            if path.name != MANIFEST_FILE:
                self._check_owner()
                self.store.upload(path, f"{remote}/{path.name}")
        manifest = (local / MANIFEST_FILE).read_bytes()
        made = self.store.create(f"{remote}/{MANIFEST_FILE}", manifest)
        if not made and self.store.read(f"{remote}/{MANIFEST_FILE}", JSON_LIMIT_BYTES) != manifest:
            raise StoreError(f"another run has written step {step:,} to {self.store.url}")

    def _prune(self, keep: set[int]) -> None:
        """Deletes checkpoints older than the newest of `keep`.

        Manifests first, so that an interrupted removal leaves none.
        """
        newest, keys = max(keep), self.store.list("checkpoints/step_")
        doomed = [k for k in keys if (step := _step(k)) is not None and step < newest and step not in keep]
        self._check_owner()
        self.store.delete(sorted(doomed, key=lambda key: not key.endswith(MANIFEST_FILE)))

    def _check_owner(self) -> None:
        if lost := self.lost():
            raise StoreError(lost)


def fetch_newest(
    store: ObjectStore,
    parent: Path,
    newer_than: int,
    heartbeat: Heartbeat = lambda: None,
    lost: Callable[[], str | None] | None = None,
) -> int | None:
    """Downloads the newest committed checkpoint that verifies and is newer than that step into `parent`.

    Returns its step; None if there is no newer one. ValueError when there are checkpoints but none verifies.
    lost: as Mirror's, for the prefix's owner, who deletes the manifests of damaged ones, so that nothing
    reads them again and the run can write those steps anew. Without it the prefix is only read.
    """

    def remove(damaged: list[str]) -> None:
        if damaged and lost and not lost():  # a download takes long enough for another run to take over
            store.delete(damaged)

    steps = sorted((s for s in committed(store) if s > newer_than), reverse=True)
    damaged: list[str] = []
    for step in steps:
        try:
            fetch(store, step, parent, heartbeat)
            remove(damaged)
            return step
        except (DamagedCheckpoint, WrongSize) as error:
            log.info(f"checkpoint of step {step:,} is damaged: {error}")
            damaged.append(f"checkpoints/{step_name(step)}/{MANIFEST_FILE}")
        except OSError as error:
            raise ValueError(
                f"the checkpoint of step {step:,} can't be downloaded from {store.url} to {parent}:"
                f" {error.strerror}"
            ) from None
    if steps and newer_than < 0:
        raise ValueError(f"none of the {len(steps)} checkpoints in {store.url} verifies")
    remove(damaged)
    return None


def fetch(store: ObjectStore, step: int, parent: Path, heartbeat: Heartbeat) -> None:
    """Downloads one checkpoint into `parent`, by a temporary folder that is renamed once verified.

    Raises Damaged or WrongSize if it does not verify, OSError if it can't be written.
    """
    remote, folder = f"checkpoints/{step_name(step)}", parent / step_name(step)
    content, manifest = read_manifest(store, step)
    part = parent / f".{folder.name}.part"
    discard(part)
    part.mkdir(parents=True)
    try:
        mib = sum(about["size"] for about in manifest["files"].values()) / 2**20
        log.info(f"downloading the checkpoint of step {step:,} from {store.url}: {mib:,.1f} MiB")
        for name, about in manifest["files"].items():
            store.download(f"{remote}/{name}", part / name, about["size"], heartbeat)
            if sha256_of(part / name, heartbeat) != about["sha256"]:
                raise DamagedCheckpoint(
                    f"{store.url}/{remote}/{name} has changed since it was written (SHA-256)"
                )
            sync(part / name)
        (part / MANIFEST_FILE).write_bytes(content)
        sync(part / MANIFEST_FILE)
        sync(part)
        discard(folder)
        part.rename(folder)
        sync(parent)
    finally:
        shutil.rmtree(part, ignore_errors=True)


def read_manifest(store: ObjectStore, step: int) -> tuple[bytes, dict[str, Any]]:
    """A checkpoint's manifest: as it is stored, and read. Raises Damaged."""
    remote = f"checkpoints/{step_name(step)}"
    content = store.read(f"{remote}/{MANIFEST_FILE}", JSON_LIMIT_BYTES) or b""
    return content, checkpoints.check_manifest(content, f"{store.url}/{remote}")


def fetch_log(store: ObjectStore, folder: Path) -> None:
    """Downloads a run's logs, so that a run resumed from another machine's checkpoint has no gap.

    recipe.json comes first: it marks the folder as a run's even if the download is interrupted. A local file
    stays if it begins with the bucket's content; otherwise the bucket's file replaces it.
    """
    telemetry = [key for key in store.list("telemetry-") if fnmatch(key, TELEMETRY) and "/" not in key]
    for name in ("recipe.json", "starts.jsonl", "metrics.jsonl", "confusion.json", *telemetry):
        file = folder / name
        content = store.read(name, LOG_LIMIT_BYTES)
        if content and not (file.exists() and read_regular(file).startswith(content)):
            write_bytes(file, content)


def committed(store: ObjectStore) -> set[int]:
    """The steps of the checkpoints in the store: those with a manifest."""
    keys = store.list("checkpoints/step_")
    return {step for key in keys if key.endswith(f"/{MANIFEST_FILE}") and (step := _step(key)) is not None}


def _step(key: str) -> int | None:
    parts = key.split("/")
    return step_of(parts[1]) if len(parts) == 3 else None
