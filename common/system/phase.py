"""What a process does: its phase and step, the time of each part, and the table of a job that hangs.

A phase is an assignment. Parts divide the whole time of the process, from its start on: enter() begins one,
in less than a microsecond.
"""

import contextlib
import time
from collections.abc import Iterator, Sequence
from typing import Any

from common.system.processes import own_age_s

STARTING, TRAINING, READING, EVALUATION = "starting", "training", "reading data", "evaluation"
SAVING, ENDING = "saving", "ending"


class _Now:
    """What this process does now. phase: may be more detailed than the part to which the time counts."""

    def __init__(self) -> None:
        self.phase = self.part = STARTING
        self.step = 0
        self.since: float | None = None  # time.perf_counter() of the last enter()
        self.past_s: dict[str, float] = {}  # by part, up to then

    def enter(self, part: str) -> None:
        """Begins a part, which is the phase, too."""
        at = time.perf_counter()
        before_s = own_age_s() if self.since is None else at - self.since
        self.past_s[self.part] = self.past_s.get(self.part, 0.0) + before_s
        self.since, self.part, self.phase = at, part, part

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
    before = now.part
    now.enter(part)
    try:
        yield
    finally:
        now.enter(before)


# A job that hangs

Evidence = dict[str, Any]  # a rank's report: see common.distributed.watch.evidence()

COLUMNS = ("rank", "host", "phase", "step", "where", "last collective", "last sign of life")


def hang_table(found: Sequence[Evidence]) -> list[str]:
    """Lines of text: the rank that is waited for, and a table with a row per rank.

    found: the evidence of the ranks that answered; the others are silent. At least one has `hosts`, the host
    of each rank.
    """
    rows = {evidence["rank"]: evidence for evidence in found}
    hosts = max((evidence.get("hosts", []) for evidence in found), key=len)
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
    }
    if odd := sorted(behind) or sorted(rows.keys() - waits.keys()):
        steps = {f"{rows[rank]['phase']} at {rows[rank]['where']}" for rank in odd}
        ops = sorted({wait["op"] for rank, wait in waits.items() if rank not in odd})
        inside = f", not in {', '.join(ops)} with the others" if ops else ""
        return f"{_named(odd, hosts)} awaited{inside}: {'; '.join(sorted(steps))}"
    kinds = {(wait["op"], wait["number"]) for wait in waits.values()}
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
    for evidence in found:
        for rank, age_s in evidence.get("silent_s", {}).items():
            ages[int(rank)] = min(age_s, ages.get(int(rank), age_s))
    return {rank: f"{age_s:.0f} s ago" for rank, age_s in ages.items()}
