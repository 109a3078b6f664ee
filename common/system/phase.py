"""What this process does: its phase and step, for reports of a job that hangs, and the time of each part.

A phase is an assignment. Parts divide the whole time of the process, from its start on: enter() begins one,
in less than a microsecond.
"""

import contextlib
import time
from collections.abc import Iterator

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
