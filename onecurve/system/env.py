"""Reads launchers' environment variables, reports events, and defines the exit status of preemptions.

This file imports neither torch nor accelerate, so that commands which use the file answer --help at once.
"""

import contextlib
import json
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from onecurve.system.text import redacted
from onecurve.upstream.packages_ import use_hub_offline

PREEMPTED = 75  # exit status of a preempted process: EX_TEMPFAIL in sysexits.h, "try again later"
# launch.py sets these variables in an elastic job: the job's name, which is the same in all rounds; the
# number of the round, starting at 1; the number of hosts, including absent hosts; and the size of a
# micro-batch.
JOB, ROUND = "LAUNCH_JOB", "LAUNCH_ROUND"
MOST_HOSTS, PER_DEVICE = "LAUNCH_MOST_HOSTS", "LAUNCH_PER_DEVICE_BATCH_SIZE"
# Set by launch.py's agent: a JSON-lines file with events from a host's processes
EVENTS_FILE = "LAUNCH_EVENTS_FILE"
# Number of the process on its host, set if each process sees only one GPU and LOCAL_RANK is therefore 0
LOCAL_NUMBER = "LOCAL_NUMBER"
PROCESSES = "LAUNCH_PROCESSES"  # set by launch.py: number of processes in the job


def launched() -> bool:
    """Return True if torchrun, accelerate or deepspeed started this process."""
    return "LOCAL_RANK" in os.environ or "ACCELERATE_MIXED_PRECISION" in os.environ


def is_under_deepspeed(env: Mapping[str, str] = os.environ) -> bool:
    """Return True if the `deepspeed` command started this process without an accelerate config."""
    return "CROSS_SIZE" in env and not is_on("ACCELERATE_USE_DEEPSPEED", env)


def rank() -> int:
    return int(os.environ.get("RANK", "0"))


def world_size() -> int:
    return int(os.environ.get("WORLD_SIZE", "1"))


def local_rank() -> int:
    """Return the number of this process on its host.

    torchrun --virtual-local-rank shows only one GPU to each process and sets LOCAL_RANK to 0. In this case,
    the number is computed from the rank.
    """
    size, hosts = processes_per_host(), int(os.environ.get("GROUP_WORLD_SIZE", "0"))
    sees_one_gpu = re.fullmatch("[^,]+", os.environ.get("CUDA_VISIBLE_DEVICES", ""))
    if sees_one_gpu and hosts * size == world_size():
        return rank() % size
    return int(os.environ.get(LOCAL_NUMBER) or os.environ.get("LOCAL_RANK") or "0")


def is_hosts_first() -> bool:
    """Return True in the first process of each host."""
    return local_rank() == 0


def processes_per_host() -> int:
    """Return the number of processes on this host.

    deepspeed sets LOCAL_SIZE; torchrun and accelerate set LOCAL_WORLD_SIZE. LOCAL_SIZE takes precedence,
    because on a CPU Accelerate 1.15 sets LOCAL_WORLD_SIZE to 1 if the launcher has not set it.
    """
    return int(os.environ.get("LOCAL_SIZE") or os.environ.get("LOCAL_WORLD_SIZE") or "1")


def job_round() -> tuple[str | None, int]:
    """Return the name of the elastic job and the number of its round, or (None, 0) for other jobs.

    When a round begins, all earlier rounds of the job have ended. torchrun does not provide a round number.
    Each of its agents counts TORCHELASTIC_RESTART_COUNT separately, the count does not change when hosts
    leave or join, and several jobs can share a TORCHELASTIC_RUN_ID.
    """
    return os.environ.get(JOB), int(os.environ.get(ROUND, "0"))


def is_on(variable: str, env: Mapping[str, str] = os.environ) -> bool:
    """Return True if one of Accelerate's boolean variables is set to true."""
    return env.get(variable, "").lower() == "true"


def report(event: str, **facts: Any) -> None:
    """Append an event to this host's event file. Do nothing if launch.py did not start the job."""
    if file := os.environ.get(EVENTS_FILE):
        line = json.dumps({"event": event} | facts) + "\n"
        # Write each line with one call, because several processes append to the file.
        with contextlib.suppress(OSError), open(file, "a", buffering=len(line) + 1) as events:
            events.write(line)


class EventReader:
    """Reader for events that processes append to a file."""

    def __init__(self, file: Path):
        self.file, self.read_bytes, self.rest = file, 0, b""

    def new(self) -> list[dict[str, Any]]:
        """Return the events since the last call, or [] if the file does not exist."""
        try:
            with open(self.file, "rb") as events:
                events.seek(self.read_bytes)
                data = events.read()
        except OSError:
            return []
        self.read_bytes += len(data)
        *lines, self.rest = (self.rest + data).split(b"\n")
        new_events = []
        for line in lines:
            with contextlib.suppress(ValueError):  # the process was killed while writing the line
                new_events.append(json.loads(line))
        return new_events


def hub_problem() -> str:
    """Return why the hub can't be reached, or an empty string if it can.

    If the hub can't be reached, switch the hub's client to offline mode, so that the client uses cached files
    instead of requesting each file five times.
    """
    from huggingface_hub import constants, get_session

    try:
        if not constants.HF_HUB_OFFLINE:
            get_session().head(constants.ENDPOINT, timeout=10)
        return ""
    except Exception as error:  # the client's HTTP library or a proxy may raise any error
        use_hub_offline()
        return redacted(str(error))
