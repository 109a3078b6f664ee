"""One owner of a run folder, or of a prefix in S3: a second run on it is refused.

The owner's record has a counter that goes up while it lives. A dead process of this machine is seen at once;
a record from elsewhere is watched for a while, as a machine that was lost can't take its record away.
"""

import contextlib
import errno
import json
import os
import secrets
import socket
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

import psutil

from common.system.files import parse_json, write_text
from common.system.processes import start_ticks
from common.system.redaction import redacted
from common.system.s3 import ObjectStore, StoreError

BEAT_S = 20  # between two signs of life
WATCH_S = 65  # a record from elsewhere that shows none for so long is a dead owner's
RELEASE_S = 5
RECORD = "owner.json"


class Owned(ValueError):
    """Another owner lives. record: what it says of itself."""

    def __init__(self, message: str, record: dict[str, Any]):
        super().__init__(message)
        self.record = record


class RecordStore(Protocol):
    """Where a record lies."""

    def create(self, text: str) -> bool: ...
    def read(self) -> str | None: ...
    def replace(self, text: str) -> None: ...
    def remove(self, text: str) -> None: ...


class Folder:
    def __init__(self, folder: Path):
        self.name, self.path = str(folder), folder / RECORD

    def create(self, text: str) -> bool:
        """Complete from the first moment on, unlike a file that is opened and then filled."""
        mine = self.path.with_name(f".{RECORD}.{secrets.token_hex(4)}")
        try:
            mine.write_text(text)
            os.link(mine, self.path)
            return True
        except FileExistsError:
            return False
        except OSError as error:
            if error.errno not in (errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS):
                raise
            with contextlib.suppress(FileExistsError), open(self.path, "x") as file:  # no hard links there
                file.write(text)
                return True
            return False
        finally:
            mine.unlink(missing_ok=True)

    def read(self) -> str | None:
        try:
            return self.path.read_text()
        except FileNotFoundError:
            return None

    def replace(self, text: str) -> None:
        write_text(self.path, text)

    def remove(self, text: str) -> None:
        """By a rename: of several that take over a record one does, and none takes away another's new one."""
        aside = self.path.with_name(f".{RECORD}.{secrets.token_hex(4)}")
        with contextlib.suppress(FileNotFoundError):
            self.path.rename(aside)
            if aside.read_text() != text:
                with contextlib.suppress(FileExistsError):
                    os.link(aside, self.path)
            aside.unlink()


class Prefix:
    def __init__(self, store: ObjectStore):
        self.name, self.store = store.url, store

    def create(self, text: str) -> bool:
        return self.store.create(RECORD, text.encode())

    def read(self) -> str | None:
        found = self.store.read(RECORD)
        return None if found is None else found.decode(errors="replace")

    def replace(self, text: str) -> None:
        self.store.write(RECORD, text.encode())

    def remove(self, text: str) -> None:
        if self.read() == text:
            self.store.delete([RECORD])


class Owner:
    """Ours from here to release(). Owned names the host, the process and the time of another owner.

    beat() is called about every second while a record from elsewhere is watched. about: what the record says
    beside that.
    """

    def __init__(
        self,
        place: RecordStore,
        beat: Callable[[], None],
        warn: Callable[[str], None],
        about: dict[str, Any] | None = None,
    ):
        self.place = place
        self.record = {**(about or {}), **_this_process(), "id": secrets.token_hex(8), "beat": 0}
        self.lost: str | None = None  # what to say when another run has taken over
        while not place.create(json.dumps(self.record)):
            _wait_for_end(place, beat, warn)
        self.released = threading.Event()
        self.thread = threading.Thread(target=self._live, daemon=True)
        self.thread.start()

    def release(self) -> None:
        """Takes the record away; where that can't be done soon it stays, and shows a dead owner."""
        self.released.set()
        self.thread.join(RELEASE_S)

    def _live(self) -> None:
        while not self.released.wait(BEAT_S) and not self.lost:
            with contextlib.suppress(OSError, StoreError):  # what a full disk or no network means others say
                self._show_life()
        with contextlib.suppress(OSError, StoreError):
            if self._is_ours():
                self.place.remove(json.dumps(self.record))

    def _show_life(self) -> None:
        if not self._is_ours():
            self.lost = f"{self.place.name} was taken over by {_who(_parsed(self.place.read()))}"
            return
        self.record["beat"] += 1
        self.place.replace(json.dumps(self.record))

    def _is_ours(self) -> bool:
        return _parsed(self.place.read()).get("id") == self.record["id"]


def _wait_for_end(place: RecordStore, beat: Callable[[], None], warn: Callable[[str], None]) -> None:
    """Returns when the record there is gone, or was a dead owner's and is removed. Owned if it lives."""
    text = place.read()
    if text is None:
        return
    theirs = _parsed(text)
    refusal = Owned(
        f"{place.name} belongs to a run that goes on: {_who(theirs)}. Stop that one, or give this one a place"
        " of its own",
        theirs,
    )
    if theirs.get("machine") == _machine():
        if _lives(theirs):
            raise refusal
    else:
        warn(f"{place.name} has an owner, {_who(theirs)}: watching for {WATCH_S} s whether it still lives")
        until = time.monotonic() + WATCH_S
        while time.monotonic() < until:
            beat()
            time.sleep(1)
            now = place.read()
            if now is None:
                return
            if now != text:
                raise refusal
    warn(f"{place.name} was left by {_who(theirs)}, which is dead: taken over")
    place.remove(text)


def _this_process() -> dict[str, Any]:
    me = psutil.Process()
    return {
        "host": socket.gethostname(),
        "machine": _machine(),
        "pid": me.pid,
        "started": me.create_time(),  # by the clock, for versions that know no start_ticks
        "start_ticks": start_ticks(me.pid),
        "since": time.strftime("%Y-%m-%d %H:%M:%S %z"),
    }


def _machine() -> str:
    """Of this start of this kernel, and of this container's process numbers."""
    boot = Path("/proc/sys/kernel/random/boot_id")
    space = Path("/proc/self/ns/pid")
    return (
        f"{boot.read_text().strip() if boot.exists() else ''} {os.readlink(space) if space.exists() else ''}"
    )


def _lives(record: dict[str, Any]) -> bool:
    try:
        process = psutil.Process(int(record["pid"]))
        if record.get("start_ticks") is not None:
            same = record["start_ticks"] == start_ticks(process.pid)
        else:
            same = abs(process.create_time() - float(record["started"])) < 1
        return same and process.status() != psutil.STATUS_ZOMBIE
    except (psutil.NoSuchProcess, KeyError, TypeError, ValueError, OverflowError):
        return False


def _who(record: dict[str, Any]) -> str:
    host, pid, since = (redacted(str(record.get(key, "unknown"))) for key in ("host", "pid", "since"))
    return f"process {pid} on host {host} since {since}"


def _parsed(text: str | None) -> dict[str, Any]:
    try:
        return parse_json(text or "{}", RECORD)
    except ValueError:
        return {}
