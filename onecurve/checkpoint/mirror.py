"""Mirrors a run's checkpoints and logs to S3 during training, and downloads them again.

<prefix>/checkpoints/step_00000390/...   same files as on disk; uploading the manifest commits the checkpoint
<prefix>/checkpoints/index.json          {"latest": ..., "best": ...}
<prefix>/metrics.jsonl, recipe.json, starts.jsonl, ...    uploaded before each checkpoint
<prefix>/telemetry-*.jsonl, result.json                   uploaded at the end of the run
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
TELEMETRY = "telemetry-*.jsonl"  # 140 MB a day on a host with 8 GPUs, so uploaded only once, with the result
LOG_LIMIT_BYTES = 2**31


class Mirror:
    """Background uploader of checkpoints, one at a time. Only the newest waiting checkpoint stays queued.

    Training never waits for an upload. A failed upload is reported. It is retried with the next checkpoint,
    at the end of the run, and when the same command is started again.

    Args:
        store: S3 prefix of the run.
        folder: Run folder.
        keep_every: Interval in steps. Checkpoints at multiples of this interval are kept.
        lost: Function that returns a message once another run owns the prefix, for example after this machine
            was suspended. From then on, nothing is written or removed. A request that passed the check before
            the suspension is still sent, but the new owner's next upload repairs the damage.
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
        self.failed = False  # True if the last upload failed
        threading.Thread(target=self._work, daemon=True).start()

    def offer(self, step: int, best: int | None) -> None:
        """Queue a checkpoint that is already committed on disk."""
        with self.changed:
            self.waiting = (step, best)
            self.changed.notify_all()

    def needs(self) -> set[int]:
        """Return the steps of the checkpoints that the queued and current uploads still need on disk."""
        with self.changed:
            pairs = filter(None, (self.waiting, self.sending))
            return {step for pair in pairs for step in pair if step is not None}

    def wait(self, timeout_s: float) -> bool:
        """Wait until nothing is queued or being uploaded. Return False on timeout.

        Each request to the store has a separate timeout.
        """
        with self.changed:
            return self.changed.wait_for(lambda: self.waiting is None and self.sending is None, timeout_s)

    def send_last_files(self, result: Mapping[str, Any]) -> None:
        """Upload the files of a finished run. result.json is sent last and marks the upload as complete."""
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
            except Exception as error:  # catch everything, because the end of the run waits for this thread
                failed = True
                log.warning(
                    f"warning: the checkpoint of step {step:,} could not be uploaded to {self.store.url}"
                    f" ({error}). It is safe on disk. The next upload includes it, or run the same command"
                    " again later."
                )
            with self.changed:
                self.failed, self.sending = failed, None
                self.changed.notify_all()

    def _send(self, step: int, best: int | None) -> None:
        """Upload the logs, the checkpoint, index.json, and the best checkpoint if S3 does not contain it."""
        self._check_owner()
        self._send_run_files(*LOGS)  # logs first, because logs must never be older than a checkpoint
        stored = committed(self.store)
        needed = {step} | ({best} if best in steps_in(self.folder / "checkpoints") else set())
        for missing in sorted(needed - stored):
            self._send_checkpoint(missing)
            stored.add(missing)
        index = {"latest": step_name(step)} | ({"best": step_name(best)} if best in stored else {})
        self._check_owner()
        self.store.write(f"checkpoints/{checkpoints.INDEX_FILE}", json.dumps(index).encode())
        self._send_run_files("result.json")
        self._prune(checkpoints.to_keep({s for s in stored if s <= step}, best, self.keep_every))

    def _send_checkpoint(self, step: int) -> None:
        """Upload a checkpoint. The manifest is uploaded last, which commits the checkpoint."""
        local = self.folder / "checkpoints" / step_name(step)
        remote = f"checkpoints/{step_name(step)}"
        for path in own_files(local, "*"):
            if path.name != MANIFEST_FILE:
                self._check_owner()
                self.store.upload(path, f"{remote}/{path.name}")
        manifest = (local / MANIFEST_FILE).read_bytes()
        is_new = self.store.create(f"{remote}/{MANIFEST_FILE}", manifest)
        if not is_new and self.store.read(f"{remote}/{MANIFEST_FILE}", JSON_LIMIT_BYTES) != manifest:
            raise StoreError(f"another run has written step {step:,} to {self.store.url}")

    def _prune(self, keep: set[int]) -> None:
        """Delete all checkpoints whose steps are not in `keep` and precede the newest step in `keep`.

        Manifests are deleted first, so that an interrupted removal leaves no checkpoint that looks committed.
        """
        newest, keys = max(keep), self.store.list("checkpoints/step_")
        expired = [k for k in keys if (step := _step(k)) is not None and step < newest and step not in keep]
        self._check_owner()
        self.store.delete(sorted(expired, key=lambda key: not key.endswith(MANIFEST_FILE)))

    def _check_owner(self) -> None:
        if message := self.lost():
            raise StoreError(message)


def fetch_newest(
    store: ObjectStore,
    parent: Path,
    newer_than: int,
    heartbeat: Heartbeat = lambda: None,
    lost: Callable[[], str | None] | None = None,
) -> int | None:
    """Download the newest intact checkpoint that is committed and newer than `newer_than` into `parent`.

    Args:
        heartbeat: Function that is called about every second.
        lost: See Mirror. Pass this function only if this run owns the prefix. The manifests of damaged
            checkpoints are then deleted, so that the run ignores these checkpoints and can write the same
            steps again. Without `lost`, the prefix is only read.

    Returns:
        The step of the checkpoint, or None if there is no newer checkpoint.

    Raises:
        ValueError: If checkpoints exist but none of them passes verification, or a download can't be written
            to disk.
    """

    def remove(damaged: list[str]) -> None:
        if damaged and lost and not lost():  # another run may have taken over during the download
            store.delete(damaged)

    steps = sorted((s for s in committed(store) if s > newer_than), reverse=True)
    damaged: list[str] = []
    for step in steps:
        try:
            fetch(store, step, parent, heartbeat)
            remove(damaged)
            return step
        except (DamagedCheckpoint, WrongSize) as error:
            log.warning(f"warning: checkpoint of step {step:,} is damaged: {error}")
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
    """Download one checkpoint into a temporary folder in `parent`, and rename the folder once verified.

    Raises:
        DamagedCheckpoint, WrongSize: If the checkpoint fails verification.
        OSError: If the checkpoint can't be written.
    """
    remote, folder = f"checkpoints/{step_name(step)}", parent / step_name(step)
    content, manifest = read_manifest(store, step)
    part = parent / f".{folder.name}.part"
    discard(part)
    part.mkdir(parents=True)
    try:
        mib = sum(entry["size"] for entry in manifest["files"].values()) / 2**20
        log.info(f"downloading the checkpoint of step {step:,} from {store.url}: {mib:,.1f} MiB")
        for name, entry in manifest["files"].items():
            store.download(f"{remote}/{name}", part / name, entry["size"], heartbeat)
            if sha256_of(part / name, heartbeat) != entry["sha256"]:
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
    """Return a checkpoint's manifest, both raw and parsed. Raise DamagedCheckpoint if it is invalid."""
    remote = f"checkpoints/{step_name(step)}"
    content = store.read(f"{remote}/{MANIFEST_FILE}", JSON_LIMIT_BYTES) or b""
    return content, checkpoints.check_manifest(content, f"{store.url}/{remote}")


def fetch_log(store: ObjectStore, folder: Path) -> None:
    """Download a run's logs, so that they have no gap after the run resumes on another machine.

    recipe.json is downloaded first, so that the folder is recognized as a run even if the download is
    interrupted. A local file is kept if it begins with the content of the file in the bucket. Otherwise, the
    file in the bucket replaces it.
    """
    telemetry = [key for key in store.list("telemetry-") if fnmatch(key, TELEMETRY) and "/" not in key]
    for name in ("recipe.json", "starts.jsonl", "metrics.jsonl", "confusion.json", *telemetry):
        file = folder / name
        content = store.read(name, LOG_LIMIT_BYTES)
        if content and not (file.exists() and read_regular(file).startswith(content)):
            write_bytes(file, content)


def committed(store: ObjectStore) -> set[int]:
    """Return the steps of the committed checkpoints in the store (the checkpoints with a manifest)."""
    keys = store.list("checkpoints/step_")
    return {step for key in keys if key.endswith(f"/{MANIFEST_FILE}") and (step := _step(key)) is not None}


def _step(key: str) -> int | None:
    parts = key.split("/")
    return step_of(parts[1]) if len(parts) == 3 else None
