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
from typing import Any, NamedTuple

from onecurve.checkpoint import format as checkpoints
from onecurve.checkpoint.format import (
    JSON_LIMIT_BYTES,
    MANIFEST_FILE,
    DamagedCheckpoint,
    step_from_name,
    step_name,
    steps_in,
)
from onecurve.system.files import discard, files_inside, read_regular, sha256_of, sync, write_bytes
from onecurve.system.output import log
from onecurve.system.s3 import ObjectStore, StoreError, WrongSize
from onecurve.system.threads import Heartbeat, lower_priority

LOG_GLOBS = ("recipe.json", "starts.jsonl", "metrics.jsonl", "confusion.json", "nvidia-smi-*.txt")
CHECKPOINT_KEY_PREFIX = "checkpoints/step_"  # prefix of the keys of all checkpoint files
# Telemetry is uploaded only once, with the result, because a host with 8 GPUs produces 140 MB per day
TELEMETRY_GLOB = "telemetry-*.jsonl"
LOG_LIMIT_BYTES = 2**31  # maximum size of a downloaded log file


class CheckpointUpload(NamedTuple):
    """Queued or current upload of a checkpoint."""

    step: int
    best_step: int | None


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
        takeover_error: Function that returns None until another run takes over the prefix, for example while
            this machine is suspended, and an error message afterwards. Once the function returns an error
            message, the mirror neither writes nor removes objects. A request that passed this check before a
            suspension is still sent afterwards, but the new owner's next upload repairs any damage.
    """

    def __init__(
        self,
        store: ObjectStore,
        folder: Path,
        keep_every: int | None = None,
        takeover_error: Callable[[], str | None] = lambda: None,
    ):
        self.store, self.folder = store, folder
        self.keep_every, self.takeover_error = keep_every, takeover_error
        self.upload_condition = threading.Condition()  # notified when an upload is queued or ends
        self.queued_upload: CheckpointUpload | None = None
        self.current_upload: CheckpointUpload | None = None
        self.last_upload_failed = False
        threading.Thread(target=self._upload_queued_checkpoints, daemon=True).start()

    def offer(self, step: int, best: int | None) -> None:
        """Queue the upload of a checkpoint that is committed on the local disk.

        This checkpoint replaces a queued one whose upload has not started. `best` is the step of the best
        checkpoint.
        """
        with self.upload_condition:
            self.queued_upload = CheckpointUpload(step, best)
            self.upload_condition.notify_all()

    def steps_needed_on_disk(self) -> set[int]:
        """Return the steps of the checkpoints that must stay on disk for queued and current uploads."""
        with self.upload_condition:
            pending_uploads = [*filter(None, (self.queued_upload, self.current_upload))]
        best_steps = {upload.best_step for upload in pending_uploads if upload.best_step is not None}
        return best_steps | {upload.step for upload in pending_uploads}

    def wait(self, timeout_s: float) -> bool:
        """Wait until no checkpoint is queued or being uploaded. Return False on timeout.

        Each request to the store has a separate timeout.
        """
        with self.upload_condition:
            return self.upload_condition.wait_for(
                lambda: self.queued_upload is None and self.current_upload is None, timeout_s
            )

    def send_last_files(self, result: Mapping[str, Any]) -> None:
        """Upload a finished run's logs and telemetry, and then `result` as result.json.

        Uploading result.json last marks the upload as complete.
        """
        self._require_prefix_ownership()
        self._upload_run_files(*LOG_GLOBS, TELEMETRY_GLOB)
        self.store.write("result.json", json.dumps(result, indent=2).encode())

    def _upload_run_files(self, *file_globs: str) -> None:
        """Upload the files in the run folder that match any of the glob patterns."""
        for file_glob in file_globs:
            for run_file in files_inside(self.folder, file_glob):
                self.store.upload(run_file, run_file.name)

    def _upload_queued_checkpoints(self) -> None:
        """Upload checkpoints in the mirror's thread as they are queued. This method never returns."""
        lower_priority()
        while True:
            with self.upload_condition:
                self.upload_condition.wait_for(lambda: self.queued_upload is not None)
                assert self.queued_upload
                upload = self.current_upload = self.queued_upload
                self.queued_upload = None
            upload_has_failed = False
            try:
                self._upload_logs_and_checkpoints(upload.step, upload.best_step)
            except Exception as error:  # catch all errors, because the end of the run waits for this thread
                upload_has_failed = True
                log.warning(
                    f"warning: the checkpoint of step {upload.step:,} could not be uploaded"
                    f" to {self.store.url} ({error}). The checkpoint is safe on the local disk."
                    " The next upload includes this checkpoint."
                    " To retry the upload after the run, start the same command again."
                )
            with self.upload_condition:
                self.last_upload_failed, self.current_upload = upload_has_failed, None
                self.upload_condition.notify_all()

    def _upload_logs_and_checkpoints(self, step: int, best_step: int | None) -> None:
        """Upload the logs and a checkpoint, update index.json, and delete old checkpoints from the store.

        This method also uploads the best checkpoint if it is missing in S3, and result.json if it exists.
        """
        self._require_prefix_ownership()
        self._upload_run_files(*LOG_GLOBS)  # the logs must never be older than a checkpoint
        stored_steps = committed_steps(self.store)
        local_steps = {step, *steps_in(self.folder / "checkpoints")}
        needed_steps = local_steps & {step, best_step}
        for missing_step in sorted(needed_steps - stored_steps):
            self._upload_checkpoint(missing_step)
            stored_steps.add(missing_step)
        step_index = checkpoints.make_step_index(step, best_step if best_step in stored_steps else None)
        self._require_prefix_ownership()
        self.store.write(f"checkpoints/{checkpoints.INDEX_FILE}", json.dumps(step_index).encode())
        self._upload_run_files("result.json")
        stored_steps_so_far = {stored_step for stored_step in stored_steps if stored_step <= step}
        kept_steps = checkpoints.steps_to_keep(stored_steps_so_far, best_step, self.keep_every)
        self._delete_old_checkpoints(kept_steps)

    def _upload_checkpoint(self, step: int) -> None:
        """Upload a checkpoint. Uploading the manifest last commits the checkpoint."""
        local_folder = self.folder / "checkpoints" / step_name(step)
        remote_folder = f"checkpoints/{step_name(step)}"
        for checkpoint_file in files_inside(local_folder, "*"):  # all files
            if checkpoint_file.name != MANIFEST_FILE:
                self._require_prefix_ownership()
                self.store.upload(checkpoint_file, f"{remote_folder}/{checkpoint_file.name}")
        manifest_key = f"{remote_folder}/{MANIFEST_FILE}"
        manifest_bytes = (local_folder / MANIFEST_FILE).read_bytes()
        is_new_manifest = self.store.create(manifest_key, manifest_bytes)
        if not is_new_manifest and self.store.read(manifest_key, JSON_LIMIT_BYTES) != manifest_bytes:
            raise StoreError(f"another run has written a checkpoint of step {step:,} to {self.store.url}")

    def _delete_old_checkpoints(self, kept_steps: set[int]) -> None:
        """Delete all checkpoints older than the newest step in `kept_steps`, except those in `kept_steps`.

        Manifests are deleted first, so that an interrupted removal leaves no checkpoint that looks committed.
        """
        newest_kept_step = max(kept_steps)
        step_by_key = {key: _step_in_key(key) for key in self.store.list(CHECKPOINT_KEY_PREFIX)}
        expired_keys = [
            object_key
            for object_key, step in step_by_key.items()
            if step is not None and step < newest_kept_step and step not in kept_steps
        ]
        keys_to_delete = sorted(expired_keys, key=lambda object_key: not object_key.endswith(MANIFEST_FILE))
        self._require_prefix_ownership()
        self.store.delete(keys_to_delete)

    def _require_prefix_ownership(self) -> None:
        """Raise StoreError if another run has taken over the prefix."""
        if error_message := self.takeover_error():
            raise StoreError(error_message)


def fetch_newest(
    store: ObjectStore,
    parent_folder: Path,
    newer_than: int,
    heartbeat: Heartbeat = lambda: None,
    takeover_error: Callable[[], str | None] | None = None,
) -> int | None:
    """Download the newest intact, committed checkpoint after step `newer_than` into `parent_folder`.

    Args:
        store: S3 prefix of a run.
        parent_folder: Folder in which the checkpoint's folder is created.
        newer_than: Step after which checkpoints are considered. A negative number includes all checkpoints.
        heartbeat: Function called about once per second.
        takeover_error: Mirror's `takeover_error` argument if this run owns the prefix, or None. With
            `takeover_error`, damaged checkpoints' manifests are deleted, so that the run ignores these
            checkpoints and can write the same steps again. Without `takeover_error`, the function only reads
            from the prefix.

    Returns:
        The step of the downloaded checkpoint, or None if S3 contains no newer checkpoint.

    Raises:
        ValueError: If `newer_than` is negative and none of the existing checkpoints passes verification, or
            if a download can't be written to disk.
    """

    def delete_manifests(manifest_keys: list[str]) -> None:
        # Another run may have taken over the prefix during the download.
        if manifest_keys and takeover_error and not takeover_error():
            store.delete(manifest_keys)

    candidate_steps = sorted((step for step in committed_steps(store) if step > newer_than), reverse=True)
    damaged_manifest_keys: list[str] = []
    for step in candidate_steps:
        try:
            fetch_checkpoint(store, step, parent_folder, heartbeat)
            delete_manifests(damaged_manifest_keys)  # of the newer, damaged checkpoints
            return step
        except (DamagedCheckpoint, WrongSize) as error:
            log.warning(f"warning: the checkpoint of step {step:,} is damaged: {error}")
            damaged_manifest_keys.append(f"checkpoints/{step_name(step)}/{MANIFEST_FILE}")
        except OSError as error:
            raise ValueError(
                f"the checkpoint of step {step:,} can't be downloaded"
                f" from {store.url} to {parent_folder}: {error.strerror}"
            ) from None
    if candidate_steps and newer_than < 0:
        raise ValueError(f"none of the {len(candidate_steps)} checkpoints in {store.url} passes verification")
    delete_manifests(damaged_manifest_keys)
    return None


def fetch_checkpoint(store: ObjectStore, step: int, parent_folder: Path, heartbeat: Heartbeat) -> None:
    """Download a checkpoint to a temporary folder in `parent_folder`, verify it, and rename the folder.

    An existing folder of the same step is replaced.

    Raises:
        DamagedCheckpoint, WrongSize: If the checkpoint fails verification.
        OSError: If the checkpoint can't be written to disk.
    """
    remote_folder = f"checkpoints/{step_name(step)}"
    local_folder = parent_folder / step_name(step)
    manifest_bytes, manifest = read_manifest(store, step)
    temporary_folder = parent_folder / f".{local_folder.name}.part"
    discard(temporary_folder)  # left by an interrupted download
    temporary_folder.mkdir(parents=True)
    try:
        download_mib = sum(file_entry["size"] for file_entry in manifest["files"].values()) / 2**20
        log.info(f"downloading the checkpoint of step {step:,} ({download_mib:,.1f} MiB) from {store.url}")
        for file_name, file_entry in manifest["files"].items():
            file_key = f"{remote_folder}/{file_name}"
            local_file = temporary_folder / file_name
            store.download(file_key, local_file, file_entry["size"], heartbeat)
            if sha256_of(local_file, heartbeat) != file_entry["sha256"]:
                raise DamagedCheckpoint(f"{store.url}/{file_key} does not match the SHA-256 in the manifest")
            sync(local_file)
        (temporary_folder / MANIFEST_FILE).write_bytes(manifest_bytes)
        sync(temporary_folder / MANIFEST_FILE)
        sync(temporary_folder)
        discard(local_folder)
        temporary_folder.rename(local_folder)
        sync(parent_folder)
    finally:
        shutil.rmtree(temporary_folder, ignore_errors=True)  # does nothing after the rename


def download_selected_checkpoint(
    store: ObjectStore, which: str, parent_folder: Path, heartbeat: Heartbeat
) -> checkpoints.Checkpoint:
    """Download a run's best checkpoint, or the newest intact checkpoint if `which` is `latest`.

    Raises:
        ValueError: If S3 does not contain this checkpoint, or the checkpoint fails verification.
    """
    if which == "latest":
        step = fetch_newest(store, parent_folder, newer_than=-1, heartbeat=heartbeat)
        if step is None:
            raise ValueError(f"{store.url} contains no checkpoints. Pass the S3 prefix of a run.")
    else:
        index_key = f"checkpoints/{checkpoints.INDEX_FILE}"
        index_bytes = store.read(index_key, JSON_LIMIT_BYTES)
        if index_bytes is None:
            raise ValueError(
                f"{store.url} does not contain a run: {index_key} is missing. Pass the S3 prefix of a run."
            )
        step = checkpoints.parse_step_index(index_bytes, f"{store.url}/{index_key}").get("best")
        if step is None:
            raise ValueError(
                f"{store.url} does not contain the run's best checkpoint."
                " Use --which latest to select the newest checkpoint."
            )
        try:
            fetch_checkpoint(store, step, parent_folder, heartbeat)
        except ValueError:
            if store.read(index_key, JSON_LIMIT_BYTES) == index_bytes:
                raise
            # A run in progress has replaced the checkpoint
            return download_selected_checkpoint(store, which, parent_folder, heartbeat)
    return checkpoints.verify_checkpoint(parent_folder / step_name(step), heartbeat)


def read_manifest(store: ObjectStore, step: int) -> tuple[bytes, dict[str, Any]]:
    """Return a checkpoint's manifest, both as raw bytes and parsed.

    Raises:
        DamagedCheckpoint: If the manifest is missing or invalid.
    """
    remote_folder = f"checkpoints/{step_name(step)}"
    manifest_bytes = store.read(f"{remote_folder}/{MANIFEST_FILE}", JSON_LIMIT_BYTES) or b""
    manifest = checkpoints.parse_checkpoint_manifest(manifest_bytes, f"{store.url}/{remote_folder}")
    return manifest_bytes, manifest


def download_logs(store: ObjectStore, folder: Path) -> None:
    """Download a run's logs, so that they have no gap after the run resumes on a different machine.

    recipe.json is downloaded first, so that the folder is recognized as a run folder even after an
    interrupted download. A local file is kept if it begins with the content of the file in the bucket.
    Otherwise, the bucket's file replaces it.
    """
    file_names = ["recipe.json", "starts.jsonl", "metrics.jsonl", "confusion.json"]
    # fnmatch's `*` also matches slashes
    file_names += [key for key in store.list("telemetry-") if fnmatch(key, TELEMETRY_GLOB) and "/" not in key]
    for file_name in file_names:
        local_file = folder / file_name
        remote_content = store.read(file_name, LOG_LIMIT_BYTES)
        if not remote_content:  # the run has not uploaded this file
            continue
        is_local_file_current = local_file.exists() and read_regular(local_file).startswith(remote_content)
        if not is_local_file_current:
            write_bytes(local_file, remote_content)


def committed_steps(store: ObjectStore) -> set[int]:
    """Return the steps of all committed checkpoints in the store. A committed checkpoint has a manifest."""
    checkpoint_keys = store.list(CHECKPOINT_KEY_PREFIX)
    steps_or_none = {_step_in_key(key) for key in checkpoint_keys if key.endswith(f"/{MANIFEST_FILE}")}
    return {step for step in steps_or_none if step is not None}


def _step_in_key(object_key: str) -> int | None:
    """Return the step of the checkpoint that contains an object, or None if the key is not a checkpoint's."""
    key_parts = object_key.split("/")
    if len(key_parts) != 3:  # the key does not have the form checkpoints/<name>/<file>
        return None
    _, checkpoint_name, _ = key_parts
    return step_from_name(checkpoint_name)
