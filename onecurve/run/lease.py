"""Leases a run folder or an S3 prefix, so that only one run uses it at a time.

The owner's record, owner.json, contains a counter that serves as a heartbeat. If the owner was a process on
this machine and has died, the lease is taken over at once. If the owner ran on another machine, its record is
first watched for heartbeats, because a lost machine can't remove its record. An earlier round of the same
elastic job is not watched, because launch.py has ended it.
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

if TYPE_CHECKING:  # at runtime, imported lazily
    from onecurve.system.s3 import ObjectStore

HEARTBEAT_S = 20
WATCH_S = 65  # seconds without a heartbeat after which an owner on another machine is considered dead
RELEASE_S = 5
RECORD = "owner.json"


class AlreadyOwned(ValueError):
    """Raised when a folder or prefix has a live owner. `record` is the content of its owner.json."""

    def __init__(self, message: str, record: dict[str, Any]):
        super().__init__(message)
        self.record = record


class FolderRecord:
    """Owner's record in a folder. Readers treat an empty record as the record of another machine.

    flag: Flag with which a user selects another folder.
    """

    flag = "--output_dir"

    def __init__(self, folder: Path):
        self.name, self.path = str(folder), folder / RECORD

    def create(self, text: str) -> bool:
        """Create the record. Returns False if a record already exists."""
        try:
            with open(self.path, "x") as file:
                file.write(text)
        except FileExistsError:
            return False
        except OSError:  # for example a full disk
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
        """Remove the record by renaming it. Only one process can succeed, and newer records remain."""
        aside = self.path.with_name(f".{RECORD}.{secrets.token_hex(4)}")
        with contextlib.suppress(FileNotFoundError):
            self.path.rename(aside)
            if (newer := aside.read_text()) != text:
                self.create(newer)
            aside.unlink()


class PrefixRecord:
    """Owner's record under an S3 prefix, with the same interface as FolderRecord."""

    flag = "--s3"

    def __init__(self, store: "ObjectStore"):
        self.name, self.store = store.url, store

    def create(self, text: str) -> bool:
        return self.store.create(RECORD, text.encode())

    def read(self) -> str | None:
        content = self.store.read(RECORD)
        return None if content is None else content.decode(errors="replace")

    def replace(self, text: str) -> None:
        self.store.write(RECORD, text.encode())

    def remove(self, text: str) -> None:
        if self.read() == text:
            self.store.delete([RECORD])


Record = FolderRecord | PrefixRecord


class Lease:
    """Ownership of a record, from the constructor to release().

    Args:
        store: Location of the record.
        heartbeat: Function that is called about every second while another machine's record is watched.
        details: Additional entries for the record.

    Raises:
        AlreadyOwned: The owner is alive. The message names the owner's host, process and start time.
    """

    def __init__(self, store: Record, heartbeat: Callable[[], None], details: dict[str, Any] | None = None):
        self.store = store
        self.record = {**(details or {}), **_this_process(), "id": secrets.token_hex(8), "beat": 0}
        self.lost: str | None = None  # message, set once another run has taken over
        while not store.create(json.dumps(self.record)):
            _wait_for_end(store, heartbeat)
        self.released = threading.Event()
        self.thread = threading.Thread(target=self._keep_alive, daemon=True)
        self.thread.start()

    def check(self) -> str | None:
        """Read the record again. Returns a message if another run has taken over, or else None."""
        text = self.store.read()
        if text is None:  # a user removed the record, or a run took over while this process was suspended
            self.lost = (
                f"{self.store.name} has no {RECORD} any more. It was removed, or another run used the folder"
            )
        elif (owner := _parsed(text)).get("id") != self.record["id"]:
            self.lost = f"{self.store.name} was taken over by {_who(owner)}"
        return self.lost

    def release(self) -> None:
        """Stop the heartbeats and remove the record. Waits at most RELEASE_S seconds."""
        self.released.set()
        self.thread.join(RELEASE_S)

    def _keep_alive(self) -> None:
        # Checkpoints report a full disk. The mirror reports errors of the store (StoreError, a ValueError).
        while not self.released.wait(HEARTBEAT_S) and not self.lost:
            with contextlib.suppress(OSError, ValueError):
                if not self.check():
                    self.record["beat"] += 1
                    self.store.replace(json.dumps(self.record))
        with contextlib.suppress(OSError, ValueError):
            if not self.check():
                self.store.remove(json.dumps(self.record))


def is_owned(folder: Path, silent_s: float = WATCH_S) -> bool:
    """Return True if the record in a run folder indicates a live owner. The record is not watched.

    silent_s: Seconds without a heartbeat after which an owner on another machine is considered dead.
    """
    with contextlib.suppress(OSError):
        record, (job, number) = _parsed(FolderRecord(folder).read()), job_round()
        if record.get("machine") == _machine():
            return is_running(record.get("pid", 0), record.get("start_ticks"))
        is_earlier_round = record.get("job") == job and record.get("round") in range(number)
        return not is_earlier_round and time.time() - (folder / RECORD).stat().st_mtime < silent_s
    return False


def _wait_for_end(store: Record, heartbeat: Callable[[], None]) -> None:
    """Wait until the record is gone, or remove a dead owner's record. Otherwise, raise AlreadyOwned."""
    text = store.read()
    if text is None:
        return
    record, (job, number) = _parsed(text), job_round()
    owner = _who(record)
    refusal = AlreadyOwned(
        f"{store.name} is in use by {owner}. Stop that run, or choose another {store.flag}", record
    )
    if record.get("machine") == _machine():
        if is_running(record.get("pid", 0), record.get("start_ticks")):
            raise refusal
    elif record.get("job") != job or record.get("round") not in range(number):
        log.info(f"{store.name} is leased by {owner}: waiting {WATCH_S} s for its next heartbeat")
        until = time.monotonic() + WATCH_S
        while time.monotonic() < until:
            heartbeat()
            time.sleep(1)
            newer_text = store.read()
            if newer_text is None:
                return
            if newer_text != text:
                raise refusal
    log.info(f"{store.name} was left by {owner}, which is dead: taken over")
    store.remove(text)


def _this_process() -> dict[str, Any]:
    job, number = job_round()
    return {
        "host": socket.gethostname(),
        "machine": _machine(),
        "pid": os.getpid(),
        "start_ticks": start_ticks(os.getpid()),
        "since": time.strftime("%Y-%m-%d %H:%M:%S %z"),
        "job": job,
        "round": number,
    }


def _machine() -> str:
    """Identify this machine, the machine's current boot and this container's pid namespace."""
    boot = Path("/proc/sys/kernel/random/boot_id")
    space = Path("/proc/self/ns/pid")
    booted = boot.read_text().strip() if boot.exists() else ""
    return f"{booted} {os.readlink(space) if space.exists() else ''}"


def _who(record: dict[str, Any]) -> str:
    host, pid, since = (redacted(str(record.get(key, "unknown"))) for key in ("host", "pid", "since"))
    return f"process {pid} on host {host} since {since}"


def _parsed(text: str | None) -> dict[str, Any]:
    try:
        return parse_json(text or "{}", RECORD)
    except ValueError:
        return {}
