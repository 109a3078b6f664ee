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

HEARTBEAT_INTERVAL_S = 20  # Seconds between an owner's heartbeats
# Seconds without a heartbeat after which an owner on a different machine is considered dead
MAX_SILENCE_S = 65
MAX_RELEASE_WAIT_S = 5  # Maximum number of seconds that release() waits
OWNER_FILE = "owner.json"  # Name of the file that contains the owner's record


class AlreadyOwned(ValueError):
    """Error for a folder or S3 prefix that has a live owner. `owner_record` is the content of owner.json."""

    def __init__(self, message: str, owner_record: dict[str, Any]):
        super().__init__(message)
        self.owner_record = owner_record


class FolderRecord:
    """Owner's record in a folder. Readers assume that an empty record belongs to a different machine.

    The attribute `location_flag` is the flag with which a user selects a different folder.
    """

    location_flag = "--output_dir"

    def __init__(self, folder: Path):
        self.location = str(folder)
        self.path = folder / OWNER_FILE

    def create(self, record_text: str) -> bool:
        """Create the record. Return False if a record already exists."""
        try:
            with open(self.path, "x") as owner_file:
                owner_file.write(record_text)
        except FileExistsError:
            return False
        except OSError:  # The disk may be full
            self.path.unlink(missing_ok=True)  # Removes the empty file that open() has created
            raise
        return True

    def read(self) -> str | None:
        """Return the record's text, or None without a record. Raise OSError if the file can't be read."""
        try:
            return read_regular(self.path).decode(errors="replace")
        except FileNotFoundError:
            return None

    def replace(self, record_text: str) -> None:
        write_text(self.path, record_text)

    def remove(self, record_text: str) -> None:
        """Remove the record if it still contains `record_text`. A record from a newer owner stays.

        The method first renames the file, so that only one process can remove the record.
        """
        renamed_path = self.path.with_name(f".{OWNER_FILE}.{secrets.token_hex(4)}")
        with contextlib.suppress(FileNotFoundError):
            self.path.rename(renamed_path)
            renamed_text = renamed_path.read_text()
            if renamed_text != record_text:
                self.create(renamed_text)  # Restores the newer owner's record
            renamed_path.unlink()


class PrefixRecord:
    """Owner's record under an S3 prefix, with the same interface as FolderRecord."""

    location_flag = "--s3"

    def __init__(self, object_store: "ObjectStore"):
        self.location = object_store.url
        self.object_store = object_store

    def create(self, record_text: str) -> bool:
        """Create the record. Return False if a record already exists."""
        return self.object_store.create(OWNER_FILE, record_text.encode())

    def read(self) -> str | None:
        """Return the record's text, or None without a record."""
        record_bytes = self.object_store.read(OWNER_FILE)
        return None if record_bytes is None else record_bytes.decode(errors="replace")

    def replace(self, record_text: str) -> None:
        self.object_store.write(OWNER_FILE, record_text.encode())

    def remove(self, record_text: str) -> None:
        """Remove the record if it still contains `record_text`."""
        if self.read() == record_text:
            self.object_store.delete([OWNER_FILE])


RecordFile = FolderRecord | PrefixRecord


class Lease:
    """Lease on a folder or S3 prefix. The constructor acquires the lease, and release() ends it.

    Args:
        record_file: Record of the folder or S3 prefix.
        heartbeat: Function called about every second while the constructor waits for a heartbeat from an
            owner on a different machine.
        owner_details: Additional entries for the record.

    Raises:
        AlreadyOwned: If the owner is alive. The message names the owner's host, process and start time.
    """

    def __init__(
        self,
        record_file: RecordFile,
        heartbeat: Callable[[], None],
        owner_details: dict[str, Any] | None = None,
    ):
        self.record_file = record_file
        # `id` identifies this owner. The heartbeat thread increments `beat`.
        self.record = {**(owner_details or {}), **_this_process(), "id": secrets.token_hex(8), "beat": 0}
        self.lost_message: str | None = None  # Set when a different run has taken over
        while not record_file.create(json.dumps(self.record)):
            _wait_for_owner_to_end(record_file, heartbeat)
        self.release_requested = threading.Event()
        self.heartbeat_thread = threading.Thread(target=self._send_heartbeats, daemon=True)
        self.heartbeat_thread.start()

    def check_owner(self) -> str | None:
        """Read the record again. If a different run has taken over, return a message, otherwise None.

        The message is also stored in `lost_message`.
        """
        location, record_text = self.record_file.location, self.record_file.read()
        current_owner = _parsed_record(record_text)
        if record_text is None:
            # A user removed the record, or a run took over while this process was suspended
            self.lost_message = (
                f"{location} no longer contains {OWNER_FILE}. A user deleted this file, or another run"
                f" used {location}"
            )
        elif current_owner.get("id") != self.record["id"]:
            self.lost_message = f"{location} was taken over by {_owner_in_words(current_owner)}"
        return self.lost_message

    def release(self) -> None:
        """Stop the heartbeats and remove the record. Wait at most MAX_RELEASE_WAIT_S seconds for both."""
        self.release_requested.set()
        self.heartbeat_thread.join(MAX_RELEASE_WAIT_S)

    def _send_heartbeats(self) -> None:
        """Increment the record's counter until release() is called, and then remove the record.

        This method runs in a thread. After a different run has taken over, it leaves the record unchanged.
        """
        # Errors are ignored here, because checkpoints report a full disk, and the mirror reports errors of
        # the S3 store (StoreError, a ValueError).
        while not self.release_requested.wait(HEARTBEAT_INTERVAL_S) and not self.lost_message:
            with contextlib.suppress(OSError, ValueError):
                if not self.check_owner():
                    self.record["beat"] += 1
                    self.record_file.replace(json.dumps(self.record))
        with contextlib.suppress(OSError, ValueError):
            if not self.check_owner():
                self.record_file.remove(json.dumps(self.record))


def is_owned(folder: Path, max_silence_s: float = MAX_SILENCE_S) -> bool:
    """Return True if the record in a run folder indicates a live owner, without waiting for a heartbeat.

    An owner on a different machine is considered dead after `max_silence_s` seconds without a heartbeat.
    """
    with contextlib.suppress(OSError):
        owner_record = _parsed_record(FolderRecord(folder).read())
        if _is_on_this_machine(owner_record):
            return _is_owner_running(owner_record)
        # Each heartbeat rewrites the file
        silence_s = time.time() - (folder / OWNER_FILE).stat().st_mtime
        return not _is_from_earlier_round(owner_record) and silence_s < max_silence_s
    return False


def _is_on_this_machine(owner_record: dict[str, Any]) -> bool:
    return owner_record.get("machine") == _machine_id()


def _is_owner_running(owner_record: dict[str, Any]) -> bool:
    """Return True if the process of an owner on this machine is running."""
    return is_running(owner_record.get("pid", 0), owner_record.get("start_ticks"))


def _is_from_earlier_round(owner_record: dict[str, Any]) -> bool:
    """Return True if launch.py has ended the owner's round of this process's job."""
    job_name, current_round = job_round()
    return owner_record.get("job") == job_name and owner_record.get("round") in range(current_round)


def _wait_for_owner_to_end(record_file: RecordFile, heartbeat: Callable[[], None]) -> None:
    """Wait until an owner's record is removed, or remove the record of a dead owner.

    Raise AlreadyOwned if the owner is alive. An owner on a different machine is dead if launch.py has ended
    its round, or if it sends no heartbeat for MAX_SILENCE_S seconds. While waiting for such an owner, this
    function calls heartbeat() every second.
    """
    location, record_text = record_file.location, record_file.read()
    if record_text is None:
        return
    owner_record = _parsed_record(record_text)
    owner_in_words = _owner_in_words(owner_record)
    in_use_advice = f"Stop that process, or choose a different {record_file.location_flag}"
    in_use_error = AlreadyOwned(f"{location} is in use by {owner_in_words}. {in_use_advice}", owner_record)
    if _is_on_this_machine(owner_record):
        if _is_owner_running(owner_record):
            raise in_use_error
    elif not _is_from_earlier_round(owner_record):
        log.info(
            f"{location} is leased by {owner_in_words}."
            f" Waiting up to {MAX_SILENCE_S} s for a heartbeat of the owner"
        )
        deadline_s = time.monotonic() + MAX_SILENCE_S
        while time.monotonic() < deadline_s:
            heartbeat()
            time.sleep(1)
            newer_record_text = record_file.read()
            if newer_record_text is None:
                return
            if newer_record_text != record_text:  # The owner has incremented its counter
                raise in_use_error
    log.info(f"taking over {location}, because {owner_in_words} has ended")
    record_file.remove(record_text)


def _this_process() -> dict[str, Any]:
    """Return the entries of an owner's record that identify this process."""
    job_name, current_round = job_round()
    return {
        "host": socket.gethostname(),
        "machine": _machine_id(),
        "pid": os.getpid(),
        "start_ticks": start_ticks(os.getpid()),
        "since": time.strftime("%Y-%m-%d %H:%M:%S %z"),
        "job": job_name,
        "round": current_round,
    }


def _machine_id() -> str:
    """Return an identifier for the machine's current boot and this container's PID namespace."""
    boot_file = Path("/proc/sys/kernel/random/boot_id")
    namespace_link = Path("/proc/self/ns/pid")
    boot_id = boot_file.read_text().strip() if boot_file.exists() else ""
    pid_namespace = os.readlink(namespace_link) if namespace_link.exists() else ""
    return f"{boot_id} {pid_namespace}"


def _owner_in_words(owner_record: dict[str, Any]) -> str:
    """Describe an owner's process. The record's entries are redacted, because messages show them."""
    host, pid, since = (redacted(str(owner_record.get(key, "unknown"))) for key in ("host", "pid", "since"))
    return f"process {pid} on host {host} (started {since})"


def _parsed_record(record_text: str | None) -> dict[str, Any]:
    """Parse an owner's record. Return {} if the record is missing, empty or damaged."""
    try:
        return parse_json(record_text or "{}", OWNER_FILE)
    except ValueError:
        return {}
