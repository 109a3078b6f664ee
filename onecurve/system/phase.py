"""What a process does: its phase and step, the time of each part, and the table of a job that hangs.

A phase is an assignment. Parts divide the whole time of the process, from its start on: enter() begins one,
in less than a microsecond.
"""

import contextlib
import faulthandler
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

from onecurve.system.paths import ROOT
from onecurve.system.processes import own_age_s
from onecurve.upstream.python_ import main_threads_frame
from onecurve.upstream.torch_ import flight_record

STARTING, TRAINING, READING, EVALUATION = "starting", "training", "reading data", "evaluation"
SAVING, ENDING = "saving", "ending"
# Parts of a start, and of an end, which are none of the phases above
IMPORTS, GROUP, CUDA = "imports", "process group", "CUDA"
DATA, MODEL = "opening the data", "building the model"
WARM_UP, CAPTURE = "warm-up of the graphs", "capture of the graphs"
FIRST_EVALUATION, PLOTS = "first evaluation", "plots"


@dataclass
class Replay:
    """A replay of a step's CUDA graph that the watch follows. No other one is followed until it has ended.

    number: of the process's replays. launched: the number of replays that the host has launched.
    """

    number: int
    since: float = field(default_factory=time.time)
    launched: int = 0
    ended: Callable[[], bool] = lambda: False

    def __post_init__(self) -> None:
        self.launched = self.number

    def is_done(self) -> bool:
        return self.ended()

    @property
    def age_s(self) -> float:
        return 0.0 if self.is_done() else time.time() - self.since


class _Now:
    """What this process does now. phase: may be more detailed than the part to which the time counts."""

    def __init__(self) -> None:
        self.phase, self.part = STARTING, IMPORTS
        self.step = 0
        self.replay: Replay | None = None
        self.since: float | None = None  # time.perf_counter() of the last enter()
        self.past_s: dict[str, float] = {}  # by part, up to then

    def enter(self, part: str, phase: str = "") -> None:
        """Begin a part. By default the phase has the same name."""
        at = time.perf_counter()
        before_s = own_age_s() if self.since is None else at - self.since
        self.past_s[self.part] = self.past_s.get(self.part, 0.0) + before_s
        self.since, self.part, self.phase = at, part, phase or part

    def spent_s(self) -> dict[str, float]:
        """Seconds of this process by part; they add up to its age."""
        last_s = own_age_s() if self.since is None else time.perf_counter() - self.since
        return self.past_s | {self.part: self.past_s.get(self.part, 0.0) + last_s}


now = _Now()


@contextlib.contextmanager
def in_phase(phase: str) -> Iterator[None]:
    """Sets the phase within the context."""
    before, now.phase = now.phase, phase
    try:
        yield
    finally:
        now.phase = before


@contextlib.contextmanager
def spending(part: str) -> Iterator[None]:
    """Makes what runs inside a part of its own."""
    before, phase = now.part, now.phase
    now.enter(part)
    try:
        yield
    finally:
        now.enter(before, phase)


# A job that hangs

Evidence = dict[str, Any]  # a rank's report, from evidence()
KEPT = 256  # recorded collectives; reading torch's default of 2,000 takes 35 ms or more
REPLAY, GRAPH = "replay", "graph"  # stand for a collective and its group in the evidence
COLUMNS = ("rank", "host", "phase", "step", "where", "last collective", "last sign of life")
REPORTING = ("phase.py", "watch.py")  # files that make the report: the process is where they were called


def record_collectives() -> None:
    """Makes torch record few collectives, and write no pickles at a time-out. Before the first group."""
    if "TORCH_NCCL_TRACE_BUFFER_SIZE" not in os.environ:
        os.environ.setdefault("TORCH_FR_BUFFER_SIZE", str(KEPT))
    for name in ("TORCH_FR_DUMP_ON_TIMEOUT", "TORCH_NCCL_DUMP_ON_TIMEOUT"):
        os.environ.setdefault(name, "0")


def collectives() -> list[dict[str, Any]]:
    """The collectives in torch's flight recorder, and the replay of a graph that has some, oldest first.

    Each has op, group, number, age_s and is_done. torch records none of the collectives in a graph.

    number: in its group; a rank whose last number is smaller is behind.
    """
    entries = flight_record()
    unique = {(e["profiling_name"], e["process_group"][0], e["record_id"]): e for e in entries}
    recorded = [
        {
            "op": e["profiling_name"],
            "group": e["process_group"][0],
            "number": e["collective_seq_id"],
            "age_s": time.time() - e["time_created_ns"] / 1e9,
            "is_done": e["retired"] or e["state"] == "completed",
        }
        for e in sorted(unique.values(), key=lambda e: e["time_created_ns"])
        if not e["is_p2p"]
    ]
    return sorted(recorded + _replay(), key=lambda one: -one["age_s"])


def _replay() -> list[dict[str, Any]]:
    """Return the replay that is followed, in the form of a collective."""
    if (replay := now.replay) is None:
        return []
    entry = {"op": REPLAY, "group": GRAPH, "number": replay.launched, "age_s": time.time() - replay.since}
    return [entry | {"is_done": replay.is_done()}]


def evidence(rank: int, hosts: list[str]) -> Evidence:
    """This process's evidence for JSON: names of files, lines and functions, but no values."""
    found = collectives()
    return {
        "rank": rank,
        "host": hosts[rank],
        "hosts": hosts,
        "phase": now.phase,
        "step": now.step,
        "where": _where(main_threads_frame()),
        "waits": [one for one in found if not one["is_done"]],
        "last": found[-1] if found else None,
        "sequence": {one["group"]: one["number"] for one in sorted(found, key=lambda one: one["number"])},
        "silent_s": {},
    }


def _where(frame: FrameType | None) -> str:
    """The innermost line of the stack in the project or beside the script."""
    roots = (ROOT, Path(sys.argv[0]).resolve().parent)
    while frame:
        file = Path(frame.f_code.co_filename).absolute()
        root = next((root for root in roots if file.is_relative_to(root)), None)
        if root and "site-packages" not in file.parts and file.name not in REPORTING:
            return f"{file.relative_to(root)}:{frame.f_lineno} {frame.f_code.co_name}"
        frame = frame.f_back
    return "-"


def stacks() -> str:
    """The stacks of all threads of this process."""
    with contextlib.suppress(OSError), tempfile.TemporaryFile("w+") as file:
        faulthandler.dump_traceback(file, all_threads=True)
        file.seek(0)
        return file.read()
    return ""


def hang_table(found: Sequence[Evidence]) -> list[str]:
    """Lines of text: the rank that is waited for, and a table with a row per rank.

    found: the evidence of the ranks that answered; the others are silent. At least one has `hosts`, the host
    of each rank.
    """
    rows = {row["rank"]: row for row in found}
    hosts = max((row.get("hosts", []) for row in found), key=len)
    last_seen = _last_seen(found)
    cells = [list(COLUMNS)]
    for rank, host in enumerate(hosts):
        if (row := rows.get(rank)) is None:
            cells.append([str(rank), host, "silent", "-", "-", "-", last_seen.get(rank, "unknown")])
            continue
        step = f"{row['step']:,}"
        cells.append([str(rank), row["host"], row["phase"], step, row["where"], _last(row), "now"])
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    lines = ["  ".join(map(str.ljust, row, widths)).rstrip() for row in cells]
    return [f"the job hangs: {awaited(rows, hosts)}", *lines]


def awaited(rows: dict[int, Evidence], hosts: Sequence[str]) -> str:
    """The ranks that the others wait for, in words. rows: the evidence of the ranks that answered."""
    if silent := [rank for rank in range(len(hosts)) if rank not in rows]:
        return f"{_named(silent, hosts)} silent: stopped by a signal, or its host is cut off"
    waits = {rank: row["waits"][0] for rank, row in rows.items() if row["waits"]}
    if not waits:
        return "no rank waits in a collective"
    behind = {
        rank
        for wait in waits.values()
        for rank, row in rows.items()
        if row["sequence"].get(wait["group"], wait["number"]) < wait["number"]
        and not (wait["group"] == GRAPH and rank in waits)  # hosts launch ahead, each as far as it gets
    }
    if odd := sorted(behind) or sorted(rows.keys() - waits.keys()):
        steps = {f"{rows[rank]['phase']} at {rows[rank]['where']}" for rank in odd}
        ops = sorted({wait["op"] for rank, wait in waits.items() if rank not in odd})
        inside = f", not in {', '.join(ops)} with the others" if ops else ""
        return f"{_named(odd, hosts)} awaited{inside}: {'; '.join(sorted(steps))}"
    kinds = {(wait["op"], wait["number"] * (wait["group"] != GRAPH)) for wait in waits.values()}
    if len(kinds) > 1:
        places = [f"rank {rank} in {wait['op']} {wait['number']}" for rank, wait in sorted(waits.items())]
        return f"the ranks are in different collectives: {', '.join(places)}"
    return "all ranks are in the same collective: the network, or a device"


def _named(ranks: Sequence[int], hosts: Sequence[str]) -> str:
    names = [f"rank {rank} ({hosts[rank]})" for rank in ranks]
    return f"{', '.join(names)} {'is' if len(names) == 1 else 'are'}"


def _last(row: Evidence) -> str:
    collective = row["waits"][0] if row["waits"] else row["last"]
    if not collective:
        return "-"
    state = f"waits for {collective['age_s']:.0f} s" if row["waits"] else "done"
    return f"{collective['op']} {collective['number']} of group {collective['group']}, {state}"


def _last_seen(found: Sequence[Evidence]) -> dict[int, str]:
    """The time since the last heartbeat of each silent rank, as text."""
    ages: dict[int, float] = {}
    for row in found:
        for rank, age_s in row.get("silent_s", {}).items():
            ages[int(rank)] = min(age_s, ages.get(int(rank), age_s))
    return {rank: f"{age_s:.0f} s ago" for rank, age_s in ages.items()}
