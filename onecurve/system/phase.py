"""What a process does: its phase and step, and the time of each part.

A phase is an assignment. Parts divide the whole time of the process, from its start on: enter() begins one,
in less than a microsecond.
"""

import contextlib
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from onecurve.system.processes import own_age_s

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
