"""Reads the environment variables of launchers, reports events, and defines the exit status of preemptions.

This module imports neither torch nor accelerate, so that commands respond to --help immediately.
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

PREEMPTED_STATUS = 75  # exit status of a preempted process: EX_TEMPFAIL ("try again later") in sysexits.h
# Environment variables that launch.py sets in an elastic job
JOB_VARIABLE = "LAUNCH_JOB"  # variable with the job's name, which is the same in all rounds
ROUND_VARIABLE = "LAUNCH_ROUND"  # variable with the round's number, starting at 1
MOST_HOSTS_VARIABLE = "LAUNCH_MOST_HOSTS"  # variable with the number of hosts, including absent hosts
PER_DEVICE_VARIABLE = "LAUNCH_PER_DEVICE_BATCH_SIZE"  # variable with the micro-batch size
# The processes on a host append events to a JSON-lines file. launch.py's agent sets this variable
EVENTS_FILE_VARIABLE = "LAUNCH_EVENTS_FILE"  # variable with the path of the events file
# Set if each process sees only one GPU, which makes LOCAL_RANK 0 in all processes
LOCAL_NUMBER_VARIABLE = "LOCAL_NUMBER"  # variable with the index of the process on its host
PROCESSES_VARIABLE = "LAUNCH_PROCESSES"  # variable set by launch.py: number of processes in the job


def is_launched() -> bool:
    """Return True if torchrun, accelerate, or deepspeed started this process."""
    return "LOCAL_RANK" in os.environ or "ACCELERATE_MIXED_PRECISION" in os.environ


def is_under_deepspeed(env: Mapping[str, str] = os.environ) -> bool:
    """Return True if the `deepspeed` command started this process without an accelerate config."""
    return "CROSS_SIZE" in env and not is_on("ACCELERATE_USE_DEEPSPEED", env)


def rank() -> int:
    """Return the index of this process among all processes of the job, or 0 without a launcher."""
    return int(os.environ.get("RANK", "0"))


def world_size() -> int:
    """Return the number of processes in the job, or 1 without a launcher."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def local_rank() -> int:
    """Return the index of this process among the processes on this host.

    `torchrun --virtual-local-rank` makes only one GPU visible to each process and sets LOCAL_RANK to 0. With
    this flag, the index is computed from the rank.
    """
    host_count = int(os.environ.get("GROUP_WORLD_SIZE", "0"))
    sees_one_gpu = re.fullmatch("[^,]+", os.environ.get("CUDA_VISIBLE_DEVICES", ""))
    if sees_one_gpu and host_count * processes_per_host() == world_size():
        return rank() % processes_per_host()
    return int(os.environ.get(LOCAL_NUMBER_VARIABLE) or os.environ.get("LOCAL_RANK") or "0")


def is_hosts_first() -> bool:
    """Return True if this process is the first process on its host."""
    return local_rank() == 0


def processes_per_host() -> int:
    """Return the number of processes on this host.

    deepspeed sets LOCAL_SIZE, whereas torchrun and accelerate set LOCAL_WORLD_SIZE. LOCAL_SIZE takes
    precedence, because Accelerate 1.15 sets LOCAL_WORLD_SIZE to 1 on a CPU if the launcher has not set this
    variable.
    """
    return int(os.environ.get("LOCAL_SIZE") or os.environ.get("LOCAL_WORLD_SIZE") or "1")


def job_round() -> tuple[str | None, int]:
    """Return an elastic job's name and round number, or (None, 0) if the job is not elastic.

    When a round begins, all earlier rounds of the job have ended. The variables of torchrun can't replace the
    round number. Each agent counts TORCHELASTIC_RESTART_COUNT separately, the count does not change when
    hosts leave or join, and several jobs can have the same TORCHELASTIC_RUN_ID.
    """
    return os.environ.get(JOB_VARIABLE), int(os.environ.get(ROUND_VARIABLE, "0"))


def is_on(variable: str, env: Mapping[str, str] = os.environ) -> bool:
    """Return True if a boolean environment variable of Accelerate is set to true."""
    return env.get(variable, "").lower() == "true"


def report_to_launcher(event_type: str, **event_fields: Any) -> None:
    """Append an event to the event file on this host if launch.py started the job."""
    if events_file := os.environ.get(EVENTS_FILE_VARIABLE):
        event_line = json.dumps({"event": event_type} | event_fields) + "\n"
        # Several processes append to the file. A buffer longer than the line makes one system call write it.
        buffer_bytes = len(event_line) + 1
        with contextlib.suppress(OSError), open(events_file, "a", buffering=buffer_bytes) as event_stream:
            event_stream.write(event_line)


class EventReader:
    """Reader for the events that a host's processes append to a file."""

    def __init__(self, events_file: Path):
        self.file = events_file
        self.bytes_read = 0  # number of bytes that earlier calls of read_new_events() have read
        self.partial_line = b""  # beginning of a line that is not complete yet

    def read_new_events(self) -> list[dict[str, Any]]:
        """Return the events that were written since the last call, or [] if the file does not exist."""
        try:
            with open(self.file, "rb") as event_stream:
                event_stream.seek(self.bytes_read)
                new_bytes = event_stream.read()
        except OSError:
            return []  # the file does not exist yet
        self.bytes_read += len(new_bytes)
        *complete_lines, self.partial_line = (self.partial_line + new_bytes).split(b"\n")
        new_events = []
        for event_line in complete_lines:
            with contextlib.suppress(ValueError):  # the process was killed while it wrote the line
                new_events.append(json.loads(event_line))
        return new_events


def check_hub_or_go_offline() -> str:
    """Return the reason why the Hugging Face Hub is unreachable, or an empty string if it is reachable.

    If the Hub is unreachable, switch the Hub client to offline mode, so that it uses cached files instead of
    requesting each file five times.
    """
    from huggingface_hub import constants, get_session

    try:
        if not constants.HF_HUB_OFFLINE:
            get_session().head(constants.ENDPOINT, timeout=10)
        return ""  # the Hub is reachable, or the client is already offline
    except Exception as hub_error:  # the client's HTTP library or a proxy may raise any error
        use_hub_offline()
        return redacted(str(hub_error))
