"""Reports a hanging job, with evidence from each rank and a table that shows which rank is blocking.

NCCL's watchdog aborts a process without a Python error message. Therefore, a rank collects evidence from all
ranks once a collective has waited for most of the timeout. A suspended rank does not answer. If the store's
process is suspended, the store does not answer either.

launch.py also builds the table, so this module does not import torch at the top level.
"""

import contextlib
import faulthandler
import os
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

from onecurve.system.env import EVENTS_FILE_VARIABLE, report_event
from onecurve.system.output import log
from onecurve.system.paths import ROOT
from onecurve.system.phase import now
from onecurve.system.threads import start_daemon
from onecurve.upstream.python_ import main_threads_frame
from onecurve.upstream.torch_ import flight_record

if TYPE_CHECKING:
    from onecurve.distributed.channel import Channel

Evidence = dict[str, Any]  # one rank's report, created by rank_evidence()
KEPT = 256  # number of collectives that torch records; reading the default of 2,000 takes 35 ms or more
# Operation name and group name of a graph replay in the evidence
REPLAY_OPERATION, REPLAY_GROUP = "replay", "graph"
TABLE_COLUMNS = ("rank", "host", "phase", "step", "where", "last collective", "last heartbeat")
REPORT_FILES = ("hang.py", "watch.py")  # stack frames in these files, which create the report, are skipped
ANSWER_S = 1.0  # seconds to wait for other ranks' answers


def record_collectives() -> None:
    """Configure torch to record few collectives and to write no pickle files after a timeout.

    Call this function before the first process group is created.
    """
    if "TORCH_NCCL_TRACE_BUFFER_SIZE" not in os.environ:
        os.environ.setdefault("TORCH_FR_BUFFER_SIZE", str(KEPT))
    for name in ("TORCH_FR_DUMP_ON_TIMEOUT", "TORCH_NCCL_DUMP_ON_TIMEOUT"):
        os.environ.setdefault(name, "0")


def recorded_collectives() -> list[dict[str, Any]]:
    """Return the collectives in torch's flight recorder and the tracked graph replay, oldest first.

    Each entry contains the keys op, group, number, age_s and is_done. The recorder counts `number` separately
    for each process group, so a rank with a smaller last number is behind. torch does not record collectives
    inside a CUDA graph.
    """
    entries = flight_record()
    unique = {(row["profiling_name"], row["process_group"][0], row["record_id"]): row for row in entries}
    recorded = [
        {
            "op": row["profiling_name"],
            "group": row["process_group"][0],
            "number": row["collective_seq_id"],
            "age_s": time.time() - row["time_created_ns"] / 1e9,
            "is_done": row["retired"] or row["state"] == "completed",
        }
        for row in sorted(unique.values(), key=lambda row: row["time_created_ns"])
        if not row["is_p2p"]
    ]
    return sorted(recorded + _replay_entries(), key=lambda entry: -entry["age_s"])


def _replay_entries() -> list[dict[str, Any]]:
    """Return a list that describes the tracked graph replay like a collective, or an empty list."""
    if (replay := now.replay) is None:
        return []
    entry = {
        "op": REPLAY_OPERATION,
        "group": REPLAY_GROUP,
        "number": replay.launched,
        "age_s": time.time() - replay.since,
    }
    return [entry | {"is_done": replay.is_done()}]


def rank_evidence(rank: int, hosts: list[str]) -> Evidence:
    """Return this process's evidence as JSON-serialisable values.

    The evidence names files, lines and functions, but contains no variables.
    """
    recorded = recorded_collectives()
    return {
        "rank": rank,
        "host": hosts[rank],
        "hosts": hosts,
        "phase": now.phase,
        "step": now.step,
        "where": _innermost_project_frame(main_threads_frame()),
        "waits": [entry for entry in recorded if not entry["is_done"]],
        "last": recorded[-1] if recorded else None,
        "sequence": {
            entry["group"]: entry["number"] for entry in sorted(recorded, key=lambda entry: entry["number"])
        },
        "silent_s": {},
    }


def _innermost_project_frame(frame: FrameType | None) -> str:
    """Return the innermost stack frame in the project or the script's folder, as text."""
    roots = (ROOT, Path(sys.argv[0]).resolve().parent)
    while frame:
        file = Path(frame.f_code.co_filename).absolute()
        root = next((root for root in roots if file.is_relative_to(root)), None)
        if root and "site-packages" not in file.parts and file.name not in REPORT_FILES:
            return f"{file.relative_to(root)}:{frame.f_lineno} {frame.f_code.co_name}"
        frame = frame.f_back
    return "-"


def stack_traces() -> str:
    """Return the stack traces of all threads in this process."""
    with contextlib.suppress(OSError), tempfile.TemporaryFile("w+") as file:
        faulthandler.dump_traceback(file, all_threads=True)
        file.seek(0)
        return file.read()
    return ""


def hang_table(reports: Sequence[Evidence]) -> list[str]:
    """Return a line that names the blocking rank, followed by table lines with one row per rank.

    Args:
        reports: Evidence from the ranks that answered. Ranks without a report are silent. At least one report
            contains `hosts`, which lists each rank's host.
    """
    rows = {row["rank"]: row for row in reports}
    hosts = max((row.get("hosts", []) for row in reports), key=len)
    heartbeat_ages = _time_since_heartbeat(reports)
    table_rows = [list(TABLE_COLUMNS)]
    for rank, host in enumerate(hosts):
        if (row := rows.get(rank)) is None:
            table_rows.append([str(rank), host, "silent", "-", "-", "-", heartbeat_ages.get(rank, "unknown")])
            continue
        step, last_collective = f"{row['step']:,}", _describe_last_collective(row)
        table_rows.append([str(rank), row["host"], row["phase"], step, row["where"], last_collective, "now"])
    widths = [max(map(len, column)) for column in zip(*table_rows, strict=True)]
    lines = ["  ".join(map(str.ljust, cells, widths)).rstrip() for cells in table_rows]
    return [f"the job hangs: {hang_cause(rows, hosts)}", *lines]


def hang_cause(reports: dict[int, Evidence], hosts: Sequence[str]) -> str:
    """Return a phrase that names the blocking ranks.

    Args:
        reports: Evidence from the ranks that answered, by rank.
        hosts: Host of each rank.
    """
    if silent := [rank for rank in range(len(hosts)) if rank not in reports]:
        verb = "is" if len(silent) == 1 else "are"
        names = _rank_names(silent, hosts)
        return f"{names} {verb} silent: a signal stopped the process, or the host is unreachable"
    waits = {rank: row["waits"][0] for rank, row in reports.items() if row["waits"]}
    if not waits:
        return "no rank is waiting in a collective"
    late_ranks = {
        rank
        for wait in waits.values()
        for rank, row in reports.items()
        if row["sequence"].get(wait["group"], wait["number"]) < wait["number"]
        # Hosts may enqueue different numbers of replays in advance
        and not (wait["group"] == REPLAY_GROUP and rank in waits)
    }
    if blocking_ranks := sorted(late_ranks) or sorted(reports.keys() - waits.keys()):
        positions = {f"{reports[rank]['phase']} at {reports[rank]['where']}" for rank in blocking_ranks}
        ops = sorted({wait["op"] for rank, wait in waits.items() if rank not in blocking_ranks})
        verb = "has" if len(blocking_ranks) == 1 else "have"
        problem = f"{verb} not reached {', '.join(ops)}, where" if ops else f"{verb} stopped, and"
        names = _rank_names(blocking_ranks, hosts)
        return f"{names} {problem} other ranks wait: {'; '.join(sorted(positions))}"
    distinct_waits = {
        (wait["op"], wait["number"] * (wait["group"] != REPLAY_GROUP)) for wait in waits.values()
    }
    if len(distinct_waits) > 1:
        calls = [f"rank {rank} in {wait['op']} {wait['number']}" for rank, wait in sorted(waits.items())]
        return f"the ranks are waiting in different collectives: {', '.join(calls)}"
    return "all ranks are waiting in the same collective, so the network or a device is stuck"


def _rank_names(ranks: Sequence[int], hosts: Sequence[str]) -> str:
    return ", ".join(f"rank {rank} ({hosts[rank]})" for rank in ranks)


def _describe_last_collective(row: Evidence) -> str:
    collective = row["waits"][0] if row["waits"] else row["last"]
    if not collective:
        return "-"
    state = f"waits for {collective['age_s']:.0f} s" if row["waits"] else "done"
    return f"{collective['op']} {collective['number']} of group {collective['group']}, {state}"


def _time_since_heartbeat(reports: Sequence[Evidence]) -> dict[int, str]:
    """Return the time since each silent rank's last heartbeat, for example `12 s ago`."""
    ages: dict[int, float] = {}
    for row in reports:
        for rank, age_s in row.get("silent_s", {}).items():
            ages[int(rank)] = min(age_s, ages.get(int(rank), age_s))
    return {rank: f"{age_s:.0f} s ago" for rank, age_s in ages.items()}


class HangReport:
    """Exchange of evidence about a hanging job with the other ranks, through the store.

    Args:
        job: Unique job name, which changes after a restart.
        rank: This process's rank.
        hosts: Host of each rank.
        channel: Channel used only by make(), in a separate thread.
    """

    def __init__(self, job: str, rank: int, hosts: list[str], channel: "Channel"):
        self._rank, self._hosts, self._channel = rank, hosts, channel
        self._question_key, self._alive_key = f"{job}/hang", f"{job}/alive"  # key prefixes in the store
        self._stacks_folder = Path(tempfile.gettempdir()) / f"hang-{job[:8]}"
        self._lock = threading.Lock()
        self._evidence: Evidence | None = None
        self._has_answered = False
        self.is_published = False

    def beat(self, channel: "Channel") -> None:
        """Send a heartbeat to the store."""
        channel.post(f"{self._alive_key}/{self._rank}", time.time())

    def answer(self, channel: "Channel") -> None:
        """Send this rank's evidence if another rank has requested evidence."""
        if not self._has_answered and channel.read(self._question_key) is not None:
            self._has_answered = True
            channel.post(f"{self._question_key}/{self._rank}", self._publish_evidence())

    def make(self) -> None:
        """Report this rank's evidence, request other ranks' evidence, and show the table.

        Only the first call has an effect.
        """
        with self._lock:
            if self.is_published:
                return
            self.is_published = True
        rows = {self._rank: self._publish_evidence()}
        collection = start_daemon(lambda: self._collect_evidence(rows))
        is_first = True
        with contextlib.suppress(TimeoutError):  # the store may not answer
            is_first = collection.result(2 * ANSWER_S)
        # This second report includes silent ranks' last heartbeats
        report_event("hang", **rows[self._rank])
        if EVENTS_FILE_VARIABLE not in os.environ and is_first:
            lines = hang_table(list(rows.values()))
            lines.append(f"The stack traces of all threads are in {self._stacks_folder} on each host.")
            log.warning("\n".join(lines))

    def _collect_evidence(self, rows: dict[int, Evidence]) -> bool:
        """Add other ranks' evidence to `rows`. Return False if another rank requested evidence earlier."""
        channel = self._channel
        is_first = channel.first(self._question_key, self._rank) == self._rank
        deadline = time.monotonic() + ANSWER_S
        while (missing := set(range(len(self._hosts))) - rows.keys()) and time.monotonic() < deadline:
            for rank in missing:
                if answer := channel.read(f"{self._question_key}/{rank}"):
                    rows[rank] = answer
            time.sleep(0.1)
        for rank in missing:
            if alive_at := channel.read(f"{self._alive_key}/{rank}"):
                rows[self._rank]["silent_s"][rank] = time.time() - alive_at
        return is_first

    def _publish_evidence(self) -> Evidence:
        """Return this rank's evidence.

        The first call also sends the evidence to launch.py, or writes the stack traces to a file.
        """
        with self._lock:
            if self._evidence is None:
                self._evidence, traces = rank_evidence(self._rank, self._hosts), stack_traces()
                report_event("hang", **self._evidence, stacks=traces)
                if EVENTS_FILE_VARIABLE not in os.environ:
                    with contextlib.suppress(OSError):
                        self._stacks_folder.mkdir(mode=0o700, exist_ok=True)
                        (self._stacks_folder / f"rank_{self._rank}.txt").write_text(traces)
            return self._evidence
