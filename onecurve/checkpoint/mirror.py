"""Uploads a run's checkpoints and logs to S3 during training, and downloads them again.

Objects under the run's prefix:

    checkpoints/step_00000390/...                 same files as on disk; the manifest commits the checkpoint
    checkpoints/index.json                        {"latest": ..., "best": ...}
    metrics.jsonl, recipe.json, starts.jsonl, ... uploaded before each checkpoint
    telemetry-*.jsonl, result.json                uploaded at the end of the run
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

LOG_PATTERNS = ("recipe.json", "starts.jsonl", "metrics.jsonl", "confusion.json", "nvidia-smi-*.txt")
# Telemetry is uploaded only once, with the result, because a host with 8 GPUs produces 140 MB per day
TELEMETRY_GLOB = "telemetry-*.jsonl"
LOG_LIMIT_BYTES = 2**31


class Mirror:
    """Uploader that sends one checkpoint at a time to S3 in the background.

    The queue contains at most one checkpoint, and a newer one replaces it. Training never waits for an
    upload. A failed upload is reported. The mirror retries it with the next checkpoint, at the end of the
    run, and when the same command is started again.

    Args:
        store: S3 prefix of the run.
        folder: Run folder on the local disk.
        keep_every: Interval in steps at which checkpoints are kept permanently. None keeps only the newest
            checkpoints and the best checkpoint.
        lost: Function that returns None until another run takes over the prefix, for example while this
            machine is suspended, and an error message afterwards. Once the function returns an error message,
            the mirror neither writes nor removes objects. A request that passed this check before a
            suspension is still sent afterwards, but the new owner's next upload repairs any damage.
    """

    def __init__(
        self,
        store: ObjectStore,
        folder: Path,
        keep_every: int | None = None,
        lost: Callable[[], str | None] = lambda: None,
    ):
        self.store, self.folder, self.keep_every, self.lost = store, folder, keep_every, lost
        self.condition = threading.Condition()
        self.queued: tuple[int, int | None] | None = None  # queued checkpoint's step and best step
        self.uploading: tuple[int, int | None] | None = None
        self.failed = False  # True if the last upload failed
        threading.Thread(target=self._upload_checkpoints, daemon=True).start()

    def offer(self, step: int, best: int | None) -> None:
        """Queue the upload of a checkpoint that is already committed on the local disk."""
        with self.condition:
            self.queued = (step, best)
            self.condition.notify_all()

    def needs(self) -> set[int]:
        """Return the steps of the checkpoints that must stay on disk for queued and current uploads."""
        with self.condition:
            uploads = filter(None, (self.queued, self.uploading))
            return {step for upload in uploads for step in upload if step is not None}

    def wait(self, timeout_s: float) -> bool:
        """Wait until no checkpoint is queued or being uploaded. Return False on timeout.

        Each request to the store has a separate timeout.
        """
        with self.condition:
            return self.condition.wait_for(lambda: self.queued is None and self.uploading is None, timeout_s)

    def send_last_files(self, result: Mapping[str, Any]) -> None:
        """Upload a finished run's files.

        Uploading result.json last marks the upload as complete.
        """
        self._check_owner()
        self._upload_run_files(*LOG_PATTERNS, TELEMETRY_GLOB)
        self.store.write("result.json", json.dumps(result, indent=2).encode())

    def _upload_run_files(self, *patterns: str) -> None:
        for pattern in patterns:
            for file in own_files(self.folder, pattern):
                self.store.upload(file, file.name)

    def _upload_checkpoints(self) -> None:
        lower_priority()
        while True:
            with self.condition:
                self.condition.wait_for(lambda: self.queued is not None)
                assert self.queued
                (step, best), self.queued = self.queued, None
                self.uploading = step, best
            has_failed = False
            try:
                self._upload(step, best)
            except Exception as error:  # catch all errors, because the end of the run waits for this thread
                has_failed = True
                log.warning(
                    f"warning: the checkpoint of step {step:,} could not be uploaded to {self.store.url}"
                    f" ({error}). The checkpoint is safe on the local disk. The next upload includes this"
                    " checkpoint. To retry the upload after the run, start the same command again."
                )
            with self.condition:
                self.failed, self.uploading = has_failed, None
                self.condition.notify_all()

    def _upload(self, step: int, best: int | None) -> None:
        """Upload the logs, the checkpoint, index.json and, if it is missing in S3, the best checkpoint."""
        self._check_owner()
        self._upload_run_files(*LOG_PATTERNS)  # the logs must never be older than a checkpoint
        stored_steps = committed(self.store)
        needed_steps = {step} | ({best} if best in steps_in(self.folder / "checkpoints") else set())
        for missing_step in sorted(needed_steps - stored_steps):
            self._upload_checkpoint(missing_step)
            stored_steps.add(missing_step)
        index = {"latest": step_name(step)} | ({"best": step_name(best)} if best in stored_steps else {})
        self._check_owner()
        self.store.write(f"checkpoints/{checkpoints.INDEX_FILE}", json.dumps(index).encode())
        self._upload_run_files("result.json")
        earlier_steps = {stored_step for stored_step in stored_steps if stored_step <= step}
        self._delete_old_checkpoints(checkpoints.steps_to_keep(earlier_steps, best, self.keep_every))

    def _upload_checkpoint(self, step: int) -> None:
        """Upload a checkpoint. Uploading the manifest last commits the checkpoint."""
        local_folder = self.folder / "checkpoints" / step_name(step)
        remote_folder = f"checkpoints/{step_name(step)}"
        for path in own_files(local_folder, "*"):
            if path.name != MANIFEST_FILE:
                self._check_owner()
                self.store.upload(path, f"{remote_folder}/{path.name}")
        manifest = (local_folder / MANIFEST_FILE).read_bytes()
        is_new = self.store.create(f"{remote_folder}/{MANIFEST_FILE}", manifest)
        if not is_new and self.store.read(f"{remote_folder}/{MANIFEST_FILE}", JSON_LIMIT_BYTES) != manifest:
            raise StoreError(f"another run has written a checkpoint of step {step:,} to {self.store.url}")

    def _delete_old_checkpoints(self, kept_steps: set[int]) -> None:
        """Delete all checkpoints older than the newest step in `keep`, except those in `keep`.

        Manifests are deleted first, so that an interrupted removal leaves no checkpoint that looks committed.
        """
        newest_kept_step, keys = max(kept_steps), self.store.list("checkpoints/step_")
        steps = {key: _step_in_key(key) for key in keys}
        expired_keys = [
            key
            for key, step in steps.items()
            if step is not None and step < newest_kept_step and step not in kept_steps
        ]
        self._check_owner()
        self.store.delete(sorted(expired_keys, key=lambda key: not key.endswith(MANIFEST_FILE)))

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
    """Download the newest intact, committed checkpoint after step `newer_than` into the folder `parent`.

    Args:
        store: S3 prefix of a run.
        parent: Folder in which the checkpoint's folder is created.
        newer_than: Step after which checkpoints are considered. A negative number includes all checkpoints.
        heartbeat: Function called about once per second.
        lost: Mirror's `lost` argument if this run owns the prefix, or None. With `lost`, damaged checkpoints'
            manifests are deleted, so that the run ignores these checkpoints and can write the same steps
            again. Without `lost`, the function only reads from the prefix.

    Returns:
        The step of the downloaded checkpoint, or None if S3 contains no newer checkpoint.

    Raises:
        ValueError: If checkpoints exist but none of them passes verification, or if a download can't be
            written to disk.
    """

    def delete_manifests(manifest_keys: list[str]) -> None:
        # Another run may have taken over the prefix during the download.
        if manifest_keys and lost and not lost():
            store.delete(manifest_keys)

    steps = sorted((step for step in committed(store) if step > newer_than), reverse=True)
    damaged_manifests: list[str] = []
    for step in steps:
        try:
            fetch(store, step, parent, heartbeat)
            delete_manifests(damaged_manifests)
            return step
        except (DamagedCheckpoint, WrongSize) as error:
            log.warning(f"warning: the checkpoint of step {step:,} is damaged: {error}")
            damaged_manifests.append(f"checkpoints/{step_name(step)}/{MANIFEST_FILE}")
        except OSError as error:
            raise ValueError(
                f"the checkpoint of step {step:,} can't be downloaded from {store.url} to {parent}:"
                f" {error.strerror}"
            ) from None
    if steps and newer_than < 0:
        raise ValueError(f"none of the {len(steps)} checkpoints in {store.url} passes verification")
    delete_manifests(damaged_manifests)
    return None


def fetch(store: ObjectStore, step: int, parent: Path, heartbeat: Heartbeat) -> None:
    """Download a checkpoint into a temporary folder in `parent`, verify its files, and rename the folder.

    Raises:
        DamagedCheckpoint, WrongSize: If the checkpoint fails verification.
        OSError: If the checkpoint can't be written to disk.
    """
    remote_folder, folder = f"checkpoints/{step_name(step)}", parent / step_name(step)
    content, manifest = read_manifest(store, step)
    temporary_folder = parent / f".{folder.name}.part"
    discard(temporary_folder)
    temporary_folder.mkdir(parents=True)
    try:
        size_mib = sum(entry["size"] for entry in manifest["files"].values()) / 2**20
        log.info(f"downloading the checkpoint of step {step:,} ({size_mib:,.1f} MiB) from {store.url}")
        for name, entry in manifest["files"].items():
            store.download(f"{remote_folder}/{name}", temporary_folder / name, entry["size"], heartbeat)
            if sha256_of(temporary_folder / name, heartbeat) != entry["sha256"]:
                raise DamagedCheckpoint(
                    f"{store.url}/{remote_folder}/{name} does not match the SHA-256 in the manifest"
                )
            sync(temporary_folder / name)
        (temporary_folder / MANIFEST_FILE).write_bytes(content)
        sync(temporary_folder / MANIFEST_FILE)
        sync(temporary_folder)
        discard(folder)
        temporary_folder.rename(folder)
        sync(parent)
    finally:
        shutil.rmtree(temporary_folder, ignore_errors=True)


def read_manifest(store: ObjectStore, step: int) -> tuple[bytes, dict[str, Any]]:
    """Return a checkpoint's manifest, both as raw bytes and parsed.

    Raises:
        DamagedCheckpoint: If the manifest is missing or invalid.
    """
    remote_folder = f"checkpoints/{step_name(step)}"
    content = store.read(f"{remote_folder}/{MANIFEST_FILE}", JSON_LIMIT_BYTES) or b""
    return content, checkpoints.check_manifest(content, f"{store.url}/{remote_folder}")


def fetch_log(store: ObjectStore, folder: Path) -> None:
    """Download a run's logs, so that they have no gap after the run resumes on a different machine.

    recipe.json is downloaded first, so that the folder is recognized as a run folder even after an
    interrupted download. A local file is kept if it begins with the content of the file in the bucket.
    Otherwise, the bucket's file replaces it.
    """
    telemetry = [key for key in store.list("telemetry-") if fnmatch(key, TELEMETRY_GLOB) and "/" not in key]
    for name in ("recipe.json", "starts.jsonl", "metrics.jsonl", "confusion.json", *telemetry):
        file = folder / name
        content = store.read(name, LOG_LIMIT_BYTES)
        if content and not (file.exists() and read_regular(file).startswith(content)):
            write_bytes(file, content)


def committed(store: ObjectStore) -> set[int]:
    """Return the steps of all committed checkpoints in the store. A committed checkpoint has a manifest."""
    keys = store.list("checkpoints/step_")
    steps = {_step_in_key(key) for key in keys if key.endswith(f"/{MANIFEST_FILE}")}
    return {step for step in steps if step is not None}


def _step_in_key(key: str) -> int | None:
    key_parts = key.split("/")
    return step_of(key_parts[1]) if len(key_parts) == 3 else None
