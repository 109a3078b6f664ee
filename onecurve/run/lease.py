"""Leases a run folder or an S3 prefix, so that only one run uses it at a time.

The owner stores a record in owner.json. The record contains a counter that serves as a heartbeat. If the
owner was a process on this machine and has died, a new run takes over the lease immediately. If the owner ran
on a different machine, the new run first waits for a heartbeat, because a lost machine can't remove the
record. The new run does not wait for an owner in an earlier round of the same elastic job, because launch.py
has ended that round.
"""

import contextlib
import json
import os
import secrets
import socket
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from onecurve.system.env import job_round
from onecurve.system.files import parse_json, read_regular, write_text
from onecurve.system.output import log
from onecurve.system.processes import is_running, start_ticks
from onecurve.system.text import redacted

if TYPE_CHECKING:  # Imported lazily at runtime
    from onecurve.system.s3 import ObjectStore

HEARTBEAT_S = 20  # Seconds between an owner's heartbeats
# Seconds without a heartbeat after which an owner on a different machine is considered dead
SILENCE_S = 65
RELEASE_WAIT_S = 5  # Maximum number of seconds that release() waits
OWNER_FILE = "owner.json"  # Name of the file that contains the owner's record


class AlreadyOwned(ValueError):
    """Error for a folder or S3 prefix that has a live owner. `record` is the content of owner.json."""

    def __init__(self, message: str, record: dict[str, Any]):
        super().__init__(message)
        self.record = record


class FolderRecord:
    """Owner's record in a folder. Readers assume that an empty record belongs to a different machine.

    The attribute `flag` is the flag with which a user selects a different folder.
    """

    flag = "--output_dir"

    def __init__(self, folder: Path):
        self.name, self.path = str(folder), folder / OWNER_FILE

    def create(self, text: str) -> bool:
        """Create the record. Return False if a record already exists."""
        try:
            with open(self.path, "x") as file:
                file.write(text)
        except FileExistsError:
            return False
        except OSError:  # The disk may be full
            self.path.unlink(missing_ok=True)
            raise
        return True

    def read(self) -> str | None:
        try:
            return read_regular(self.path).decode(errors="replace")
        except FileNotFoundError:
            return None

    def replace(self, text: str) -> None:
        write_text(self.path, text)

    def remove(self, text: str) -> None:
        """Remove the record by renaming its file, so that only one process can remove the record.

        Keep a newer record.
        """
        renamed_path = self.path.with_name(f".{OWNER_FILE}.{secrets.token_hex(4)}")
        with contextlib.suppress(FileNotFoundError):
            self.path.rename(renamed_path)
            if (newer_text := renamed_path.read_text()) != text:
                self.create(newer_text)
            renamed_path.unlink()


class PrefixRecord:
    """Owner's record under an S3 prefix, with the same interface as FolderRecord."""

    flag = "--s3"

    def __init__(self, store: "ObjectStore"):
        self.name, self.store = store.url, store

    def create(self, text: str) -> bool:
        return self.store.create(OWNER_FILE, text.encode())

    def read(self) -> str | None:
        content = self.store.read(OWNER_FILE)
        return None if content is None else content.decode(errors="replace")

    def replace(self, text: str) -> None:
        self.store.write(OWNER_FILE, text.encode())

    def remove(self, text: str) -> None:
        if self.read() == text:
            self.store.delete([OWNER_FILE])


Record = FolderRecord | PrefixRecord


class Lease:
    """Lease on a folder or S3 prefix. The constructor acquires the lease, and release() ends it.

    Args:
        store: Record of the folder or S3 prefix.
        heartbeat: Function called about every second while the constructor waits for a heartbeat from an
            owner on a different machine.
        details: Additional entries for the record.

    Raises:
        AlreadyOwned: If the owner is alive. The message names the owner's host, process and start time.
    """

    def __init__(self, store: Record, heartbeat: Callable[[], None], details: dict[str, Any] | None = None):
        self.store = store
        self.record = {**(details or {}), **_this_process(), "id": secrets.token_hex(8), "beat": 0}
        self.lost: str | None = None  # Message that is set when a different run has taken over
        while not store.create(json.dumps(self.record)):
            _wait_for_owner_to_end(store, heartbeat)
        self.released = threading.Event()
        self.thread = threading.Thread(target=self._keep_alive, daemon=True)
        self.thread.start()

    def check(self) -> str | None:
        """Read the record again. Return a message if a different run has taken over, or None."""
        record_text = self.store.read()
        if (
            record_text is None
        ):  # A user removed the record, or a run took over while this process was suspended
            self.lost = (
                f"{self.store.name} no longer contains {OWNER_FILE}. A user deleted this file, or another run"
                f" used {self.store.name}"
            )
        elif (current_owner := _parsed_record(record_text)).get("id") != self.record["id"]:
            self.lost = f"{self.store.name} was taken over by {_owner_in_words(current_owner)}"
        return self.lost

    def release(self) -> None:
        """Stop the heartbeats and remove the record. Wait at most RELEASE_WAIT_S seconds for both steps."""
        self.released.set()
        self.thread.join(RELEASE_WAIT_S)

    def _keep_alive(self) -> None:
        # Errors are ignored here, because checkpoints report a full disk, and the mirror reports errors of
        # the S3 store (StoreError, a ValueError).
        while not self.released.wait(HEARTBEAT_S) and not self.lost:
            with contextlib.suppress(OSError, ValueError):
                if not self.check():
                    self.record["beat"] += 1
                    self.store.replace(json.dumps(self.record))
        with contextlib.suppress(OSError, ValueError):
            if not self.check():
                self.store.remove(json.dumps(self.record))


def is_owned(folder: Path, silent_s: float = SILENCE_S) -> bool:
    """Return True if the record in a run folder indicates a live owner, without waiting for a heartbeat.

    An owner on a different machine is considered dead after `silent_s` seconds without a heartbeat.
    """
    with contextlib.suppress(OSError):
        record, (job, current_round) = _parsed_record(FolderRecord(folder).read()), job_round()
        if record.get("machine") == _machine_id():
            return is_running(record.get("pid", 0), record.get("start_ticks"))
        is_earlier_round = record.get("job") == job and record.get("round") in range(current_round)
        return not is_earlier_round and time.time() - (folder / OWNER_FILE).stat().st_mtime < silent_s
    return False


def _wait_for_owner_to_end(store: Record, heartbeat: Callable[[], None]) -> None:
    """Wait until the record is removed, or remove a dead owner's record.

    Raise AlreadyOwned if the owner is alive.
    """
    record_text = store.read()
    if record_text is None:
        return
    record, (job, current_round) = _parsed_record(record_text), job_round()
    owner = _owner_in_words(record)
    refusal = AlreadyOwned(
        f"{store.name} is in use by {owner}. Stop that process, or choose a different {store.flag}", record
    )
    if record.get("machine") == _machine_id():
        if is_running(record.get("pid", 0), record.get("start_ticks")):
            raise refusal
    elif record.get("job") != job or record.get("round") not in range(current_round):
        wait = f"Waiting up to {SILENCE_S} s for a heartbeat of the owner"
        log.info(f"{store.name} is leased by {owner}. {wait}")
        deadline = time.monotonic() + SILENCE_S
        while time.monotonic() < deadline:
            heartbeat()
            time.sleep(1)
            newer_text = store.read()
            if newer_text is None:
                return
            if newer_text != record_text:
                raise refusal
    log.info(f"taking over {store.name}, because {owner} has ended")
    store.remove(record_text)


def _this_process() -> dict[str, Any]:
    job, current_round = job_round()
    return {
        "host": socket.gethostname(),
        "machine": _machine_id(),
        "pid": os.getpid(),
        "start_ticks": start_ticks(os.getpid()),
        "since": time.strftime("%Y-%m-%d %H:%M:%S %z"),
        "job": job,
        "round": current_round,
    }


def _machine_id() -> str:
    """Return an identifier for the machine's current boot and this container's PID namespace."""
    boot_file = Path("/proc/sys/kernel/random/boot_id")
    namespace_link = Path("/proc/self/ns/pid")
    boot_id = boot_file.read_text().strip() if boot_file.exists() else ""
    namespace = os.readlink(namespace_link) if namespace_link.exists() else ""
    return f"{boot_id} {namespace}"


def _owner_in_words(record: dict[str, Any]) -> str:
    host, pid, since = (redacted(str(record.get(key, "unknown"))) for key in ("host", "pid", "since"))
    return f"process {pid} on host {host} (started {since})"


def _parsed_record(text: str | None) -> dict[str, Any]:
    try:
        return parse_json(text or "{}", OWNER_FILE)
    except ValueError:
        return {}
