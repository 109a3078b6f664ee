"""The launchers' environment variables, events for launch.py, and the exit status of a preemption.

It imports neither torch nor accelerate, so that commands that use it still answer --help at once.
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

PREEMPTED = 75  # exit status of a preempted process: EX_TEMPFAIL of sysexits.h, "try again later"
# Set by launch.py in an elastic job: its name, the same in all its rounds, and the round's number, from 1;
# the number of hosts including those away, and the micro-batch
JOB, ROUND = "LAUNCH_JOB", "LAUNCH_ROUND"
MOST_HOSTS, PER_DEVICE = "LAUNCH_MOST_HOSTS", "LAUNCH_PER_DEVICE_BATCH_SIZE"
EVENTS_FILE = "LAUNCH_EVENTS_FILE"  # set by launch.py's agent: the events of a host's processes, JSON lines
LOCAL_NUMBER = "LOCAL_NUMBER"  # this process's number on its host, where LOCAL_RANK is its only GPU's, 0
PROCESSES = "LAUNCH_PROCESSES"  # set by launch.py: the number of processes of the job


def launched() -> bool:
    """True when torchrun, accelerate or deepspeed started this process."""
    return "LOCAL_RANK" in os.environ or "ACCELERATE_MIXED_PRECISION" in os.environ


def is_under_deepspeed(env: Mapping[str, str] = os.environ) -> bool:
    """Return True where the command `deepspeed` started this process, without an accelerate config."""
    return "CROSS_SIZE" in env and not is_on("ACCELERATE_USE_DEEPSPEED", env)


def rank() -> int:
    return int(os.environ.get("RANK", "0"))


def world_size() -> int:
    return int(os.environ.get("WORLD_SIZE", "1"))


def local_rank() -> int:
    """This process's number on its host.

    torchrun --virtual-local-rank shows each process one GPU and sets LOCAL_RANK to 0: there it follows from
    the rank.
    """
    size, hosts = processes_per_host(), int(os.environ.get("GROUP_WORLD_SIZE", "0"))
    sees_one_gpu = re.fullmatch("[^,]+", os.environ.get("CUDA_VISIBLE_DEVICES", ""))
    if sees_one_gpu and hosts * size == world_size():
        return rank() % size
    return int(os.environ.get(LOCAL_NUMBER) or os.environ.get("LOCAL_RANK") or "0")


def is_hosts_first() -> bool:
    """True in the first process of each host."""
    return local_rank() == 0


def processes_per_host() -> int:
    """Processes on this host: deepspeed sets LOCAL_SIZE, torchrun and accelerate LOCAL_WORLD_SIZE.

    LOCAL_SIZE comes first: on a CPU Accelerate 1.15 sets LOCAL_WORLD_SIZE to 1 if the launcher did not.
    """
    return int(os.environ.get("LOCAL_SIZE") or os.environ.get("LOCAL_WORLD_SIZE") or "1")


def job_round() -> tuple[str | None, int]:
    """The elastic job and its round. When a round begins, all earlier ones of that job are over.

    (None, 0) elsewhere. torchrun tells its processes no such number: TORCHELASTIC_RESTART_COUNT is each
    agent's own and stays the same when hosts leave or join, and jobs share a TORCHELASTIC_RUN_ID.
    """
    return os.environ.get(JOB), int(os.environ.get(ROUND, "0"))


def is_on(variable: str, env: Mapping[str, str] = os.environ) -> bool:
    """True for a switch of Accelerate that is on."""
    return env.get(variable, "").lower() == "true"


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
        found = []
        for line in lines:
            with contextlib.suppress(ValueError):  # its process was killed as it wrote
                found.append(json.loads(line))
        return found


def hub_problem() -> str:
    """Why the hub can't be reached; empty if it can. Its client then takes what it has from before, instead
    of trying five times for each file."""
    from huggingface_hub import constants, get_session

    try:
        if not constants.HF_HUB_OFFLINE:
            get_session().head(constants.ENDPOINT, timeout=10)
        return ""
    except Exception as error:  # of the client's library, or of a proxy's
        use_hub_offline()
        return redacted(str(error))
