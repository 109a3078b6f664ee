"""Events of a job's processes for launch.py: lines of JSON in a file that its agent reads on each host."""

import contextlib
import json
import os
from pathlib import Path
from typing import Any

EVENTS_FILE = "LAUNCH_EVENTS_FILE"  # set by launch.py's agent


def report(event: str, **facts: Any) -> None:
    """Adds an event to this host's file. Does nothing if launch.py did not start the job."""
    if file := os.environ.get(EVENTS_FILE):
        line = json.dumps({"event": event} | facts) + "\n"
        # One write per line, as several processes append to the file.
        with contextlib.suppress(OSError), open(file, "a", buffering=len(line) + 1) as events:
            events.write(line)


class EventReader:
    """Reads the events that are added to the file, each once."""

    def __init__(self, file: Path):
        self.file, self.read_bytes, self.rest = file, 0, b""

    def new(self) -> list[dict[str, Any]]:
        """The events since the last call; [] while there is no file."""
        try:
            with open(self.file, "rb") as events:
                events.seek(self.read_bytes)
                data = events.read()
        except OSError:
            return []
        self.read_bytes += len(data)
        *lines, self.rest = (self.rest + data).split(b"\n")
        return [json.loads(line) for line in lines]
