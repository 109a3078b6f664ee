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
from collections.abc import Iterable, Sequence
from operator import itemgetter
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

from onecurve.system.env import EVENTS_FILE_VARIABLE, report_to_launcher
from onecurve.system.output import log
from onecurve.system.paths import ROOT
from onecurve.system.phase import now
from onecurve.system.threads import start_daemon
from onecurve.upstream.python_ import main_threads_frame
from onecurve.upstream.torch_ import flight_record

if TYPE_CHECKING:
    from onecurve.distributed.channel import Channel

Evidence = dict[str, Any]  # one rank's report, created by rank_evidence()
# Number of collectives that torch records. Reading the default of 2,000 takes 35 ms or more.
RECORDED_COLLECTIVE_COUNT = 256
# Operation name and group name of a graph replay in the evidence
REPLAY_OPERATION, REPLAY_GROUP = "replay", "graph"
TABLE_COLUMNS = ("rank", "host", "phase", "step", "where", "last collective", "last heartbeat")
REPORT_FILES = ("hang.py", "watch.py")  # stack frames in these files, which create the report, are skipped
ANSWER_TIMEOUT_S = 1.0  # seconds to wait for other ranks' answers


def configure_flight_recorder() -> None:
    """Set torch's environment variables to record few collectives and to write no files after a timeout.

    The files would be pickles. Call this function before the first process group is created.
    """
    if "TORCH_NCCL_TRACE_BUFFER_SIZE" not in os.environ:
        os.environ.setdefault("TORCH_FR_BUFFER_SIZE", str(RECORDED_COLLECTIVE_COUNT))
    for dump_variable in ("TORCH_FR_DUMP_ON_TIMEOUT", "TORCH_NCCL_DUMP_ON_TIMEOUT"):
        os.environ.setdefault(dump_variable, "0")


def recorded_collectives() -> list[dict[str, Any]]:
    """Return the collectives in torch's flight recorder and the tracked graph replay, oldest first.

    Each entry contains the keys op, group, number, age_s and is_done. The recorder counts `number` separately
    for each process group, so a rank with a smaller last number is behind. torch does not record collectives
    inside a CUDA graph.
    """
    # The flight recorders of gloo and NCCL may list the same collective
    unique_entries = {
        (entry["profiling_name"], entry["process_group"][0], entry["record_id"]): entry
        for entry in flight_record()
    }
    recorded_entries = [
        {
            "op": entry["profiling_name"],
            "group": entry["process_group"][0],
            "number": entry["collective_seq_id"],
            "age_s": time.time() - entry["time_created_ns"] / 1e9,
            "is_done": entry["retired"] or entry["state"] == "completed",
        }
        for entry in sorted(unique_entries.values(), key=lambda entry: entry["time_created_ns"])
        if not entry["is_p2p"]
    ]
    return sorted(recorded_entries + _replay_entries(), key=lambda collective: -collective["age_s"])


def _replay_entries() -> list[dict[str, Any]]:
    """Return a list that describes the tracked graph replay like a collective, or an empty list."""
    replay = now.replay
    if replay is None:
        return []
    replay_entry = {
        "op": REPLAY_OPERATION,
        "group": REPLAY_GROUP,
        "number": replay.launched,
        "age_s": time.time() - replay.since,
        "is_done": replay.is_done(),
    }
    return [replay_entry]


def rank_evidence(rank: int, host_by_rank: list[str]) -> Evidence:
    """Return this process's evidence as JSON-serialisable values.

    The evidence names files, lines and functions, but contains no variables.
    """
    collectives = recorded_collectives()
    collectives_by_number = sorted(collectives, key=itemgetter("number"))
    # The last assignment to a group wins, and has the largest number
    last_number_by_group = {collective["group"]: collective["number"] for collective in collectives_by_number}
    return {
        "rank": rank,
        "host": host_by_rank[rank],
        "hosts": host_by_rank,
        "phase": now.phase,
        "step": now.step,
        "where": _innermost_project_frame(main_threads_frame()),
        "waits": [collective for collective in collectives if not collective["is_done"]],
        "last": collectives[-1] if collectives else None,
        "sequence": last_number_by_group,
        "silent_s": {},
    }


def _innermost_project_frame(frame: FrameType | None) -> str:
    """Return the innermost stack frame in the project or the script's folder, as text."""
    project_folders = (ROOT, Path(sys.argv[0]).resolve().parent)
    while frame:
        source_file = Path(frame.f_code.co_filename).absolute()
        is_reported = "site-packages" not in source_file.parts and source_file.name not in REPORT_FILES
        for project_folder in project_folders:
            if is_reported and source_file.is_relative_to(project_folder):
                return f"{source_file.relative_to(project_folder)}:{frame.f_lineno} {frame.f_code.co_name}"
        frame = frame.f_back
    return "-"


def stack_traces() -> str:
    """Return the stack traces of all threads in this process."""
    with contextlib.suppress(OSError), tempfile.TemporaryFile("w+") as trace_file:
        faulthandler.dump_traceback(trace_file, all_threads=True)
        trace_file.seek(0)
        return trace_file.read()
    return ""


def hang_table(reports: Sequence[Evidence]) -> list[str]:
    """Return a line that names the blocking rank, followed by table lines with one row per rank.

    Args:
        reports: Evidence from the ranks that answered. Ranks without a report are silent. At least one report
            contains `hosts`, which lists each rank's host.
    """
    evidence_by_rank = {evidence["rank"]: evidence for evidence in reports}
    host_by_rank = max((evidence.get("hosts", []) for evidence in reports), key=len)
    heartbeat_age_by_rank = _heartbeat_age_by_rank(reports)
    table_rows = [list(TABLE_COLUMNS)]
    for rank, host in enumerate(host_by_rank):
        evidence = evidence_by_rank.get(rank)
        if evidence is None:
            heartbeat_age = heartbeat_age_by_rank.get(rank, "unknown")
            table_rows.append([str(rank), host, "silent", "-", "-", "-", heartbeat_age])
            continue
        status = [evidence["phase"], f"{evidence['step']:,}", evidence["where"]]
        table_rows.append([str(rank), evidence["host"], *status, _describe_last_collective(evidence), "now"])
    column_widths = [max(map(len, column)) for column in zip(*table_rows, strict=True)]
    table_lines = ["  ".join(map(str.ljust, row_cells, column_widths)).rstrip() for row_cells in table_rows]
    return [f"the job hangs: {hang_cause(evidence_by_rank, host_by_rank)}", *table_lines]


def hang_cause(evidence_by_rank: dict[int, Evidence], host_by_rank: Sequence[str]) -> str:
    """Return a phrase that names the blocking ranks.

    Args:
        evidence_by_rank: Evidence from the ranks that answered, by rank.
        host_by_rank: Host of each rank.
    """
    if silent_ranks := [rank for rank in range(len(host_by_rank)) if rank not in evidence_by_rank]:
        verb = "is" if len(silent_ranks) == 1 else "are"
        rank_names = _rank_names(silent_ranks, host_by_rank)
        return f"{rank_names} {verb} silent: a signal stopped the process, or the host is unreachable"
    waits = {rank: evidence["waits"][0] for rank, evidence in evidence_by_rank.items() if evidence["waits"]}
    if not waits:
        return "no rank is waiting in a collective"
    late_ranks = [rank for rank, evidence in evidence_by_rank.items() if _is_late(evidence, waits.values())]
    blocking_ranks = sorted(late_ranks) or sorted(evidence_by_rank.keys() - waits.keys())
    if blocking_ranks:
        blocking_evidence = [evidence_by_rank[rank] for rank in blocking_ranks]
        blocking_positions = {f"{evidence['phase']} at {evidence['where']}" for evidence in blocking_evidence}
        awaited_operations = {wait["op"] for rank, wait in waits.items() if rank not in blocking_ranks}
        verb = "has" if len(blocking_ranks) == 1 else "have"
        predicate = f"{verb} stopped, and"
        if awaited_operations:
            predicate = f"{verb} not reached {', '.join(sorted(awaited_operations))}, where"
        rank_names = _rank_names(blocking_ranks, host_by_rank)
        return f"{rank_names} {predicate} other ranks wait: {'; '.join(sorted(blocking_positions))}"
    # Replay numbers may differ, because hosts may enqueue different numbers of replays in advance
    distinct_waits = {
        (wait["op"], wait["number"] if wait["group"] != REPLAY_GROUP else 0) for wait in waits.values()
    }
    if len(distinct_waits) > 1:
        rank_positions = [
            f"rank {rank} in {wait['op']} {wait['number']}" for rank, wait in sorted(waits.items())
        ]
        return f"the ranks are waiting in different collectives: {', '.join(rank_positions)}"
    return "all ranks are waiting in the same collective, so the network or a device is stuck"


def _is_late(evidence: Evidence, waits: Iterable[dict[str, Any]]) -> bool:
    """Return True if this rank has not reached a collective in which another rank waits."""
    if evidence["waits"]:  # hosts may enqueue different numbers of replays in advance
        waits = [wait for wait in waits if wait["group"] != REPLAY_GROUP]
    last_number_by_group = evidence["sequence"]  # without groups that this rank has not used
    return any(last_number_by_group.get(wait["group"], wait["number"]) < wait["number"] for wait in waits)


def _rank_names(ranks: Sequence[int], host_by_rank: Sequence[str]) -> str:
    return ", ".join(f"rank {rank} ({host_by_rank[rank]})" for rank in ranks)


def _describe_last_collective(evidence: Evidence) -> str:
    """Return the table cell about the collective in which a rank waits, or about its last collective."""
    collective = evidence["waits"][0] if evidence["waits"] else evidence["last"]
    if not collective:
        return "-"
    progress = f"waits for {collective['age_s']:.0f} s" if evidence["waits"] else "done"
    return f"{collective['op']} {collective['number']} of group {collective['group']}, {progress}"


def _heartbeat_age_by_rank(reports: Sequence[Evidence]) -> dict[int, str]:
    """Return the time since each silent rank's last heartbeat, for example `12 s ago`."""
    age_by_rank: dict[int, float] = {}
    for evidence in reports:
        for rank, age_s in evidence.get("silent_s", {}).items():
            age_by_rank[int(rank)] = min(age_s, age_by_rank.get(int(rank), age_s))
    return {rank: f"{age_s:.0f} s ago" for rank, age_s in age_by_rank.items()}


class HangReport:
    """Exchange of evidence about a hanging job with the other ranks, through the store.

    Args:
        job_name: Unique job name, which changes after a restart.
        rank: This process's rank.
        host_by_rank: Host of each rank.
        channel: Channel used only by publish_report(), in a separate thread.
    """

    def __init__(self, job_name: str, rank: int, host_by_rank: list[str], channel: "Channel"):
        self._rank, self._host_by_rank, self._channel = rank, host_by_rank, channel
        # Key prefixes in the store
        self._request_key, self._heartbeat_key = f"{job_name}/hang", f"{job_name}/alive"
        self._stacks_folder = Path(tempfile.gettempdir()) / f"hang-{job_name[:8]}"
        self._evidence_lock = threading.Lock()
        self._evidence: Evidence | None = None
        self._has_answered = False
        self.is_report_published = False

    def send_heartbeat(self, channel: "Channel") -> None:
        """Store the current time as this rank's last heartbeat, for other ranks' reports."""
        channel.post(f"{self._heartbeat_key}/{self._rank}", time.time())

    def answer_request(self, channel: "Channel") -> None:
        """Send this rank's evidence if another rank has requested evidence."""
        if not self._has_answered and channel.read(self._request_key) is not None:
            self._has_answered = True
            channel.post(f"{self._request_key}/{self._rank}", self._publish_evidence())

    def publish_report(self) -> None:
        """Report this rank's evidence, request other ranks' evidence, and show the table.

        Only the first call has an effect.
        """
        with self._evidence_lock:
            if self.is_report_published:
                return
            self.is_report_published = True
        evidence_by_rank = {self._rank: self._publish_evidence()}
        collection_future = start_daemon(lambda: self._collect_evidence(evidence_by_rank))
        is_first_report = True
        with contextlib.suppress(TimeoutError):  # the store may not answer
            is_first_report = collection_future.result(2 * ANSWER_TIMEOUT_S)
        # _publish_evidence() has already reported once. This report adds silent ranks' last heartbeats.
        report_to_launcher("hang", **evidence_by_rank[self._rank])
        if EVENTS_FILE_VARIABLE not in os.environ and is_first_report:  # launch.py prints the table otherwise
            report_lines = hang_table(list(evidence_by_rank.values()))
            report_lines.append(f"The stack traces of all threads are in {self._stacks_folder} on each host.")
            log.warning("\n".join(report_lines))

    def _collect_evidence(self, evidence_by_rank: dict[int, Evidence]) -> bool:
        """Request other ranks' evidence through the store, and add it to the map.

        The age of each silent rank's last heartbeat is added to this rank's evidence.

        Returns:
            True if this rank is the first that requested evidence.
        """
        channel = self._channel
        is_first_report = channel.store_if_unset(self._request_key, self._rank) == self._rank
        answer_deadline = time.monotonic() + ANSWER_TIMEOUT_S
        all_ranks = set(range(len(self._host_by_rank)))
        while (missing_ranks := all_ranks - evidence_by_rank.keys()) and time.monotonic() < answer_deadline:
            for rank in missing_ranks:
                if other_evidence := channel.read(f"{self._request_key}/{rank}"):
                    evidence_by_rank[rank] = other_evidence
            time.sleep(0.1)
        for rank in missing_ranks:
            if heartbeat_at := channel.read(f"{self._heartbeat_key}/{rank}"):
                evidence_by_rank[self._rank]["silent_s"][rank] = time.time() - heartbeat_at
        return is_first_report

    def _publish_evidence(self) -> Evidence:
        """Return this rank's evidence.

        The first call also sends the evidence to launch.py, or writes the stack traces to a file.
        """
        with self._evidence_lock:
            if self._evidence is None:
                evidence = rank_evidence(self._rank, self._host_by_rank)
                stack_text = stack_traces()
                self._evidence = evidence
                report_to_launcher("hang", **evidence, stacks=stack_text)
                if EVENTS_FILE_VARIABLE not in os.environ:  # launch.py did not start this process
                    with contextlib.suppress(OSError):
                        self._stacks_folder.mkdir(mode=0o700, exist_ok=True)
                        (self._stacks_folder / f"rank_{self._rank}.txt").write_text(stack_text)
            return self._evidence
