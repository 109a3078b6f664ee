"""Records the current phase and step of this process, and the time spent in each part of a run.

The times of all parts add up to the process's uptime. A call of enter() takes less than a microsecond. The
phase is a label that may be more detailed than the part.
"""

import contextlib
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from onecurve.system.processes import process_uptime_s

# Names of phases and parts of a run
STARTING, TRAINING, READING, EVALUATION = "starting", "training", "reading data", "evaluation"
SAVING, ENDING = "saving", "ending"
# Names of additional parts at the start and end of a run
IMPORTS, PROCESS_GROUP, CUDA_START = "imports", "process group", "CUDA"
OPENING_DATA, BUILDING_MODEL = "opening the data", "building the model"
GRAPH_WARM_UP, GRAPH_CAPTURE = "warm-up of the graphs", "capture of the graphs"
FIRST_EVALUATION, PLOTS = "first evaluation", "plots"


@dataclass
class Replay:
    """Replay of a step's CUDA graph, observed by watch.py.

    At most one replay is observed at a time.
    """

    number: int  # index of this replay among all replays in this process
    since: float = field(default_factory=time.time)  # time.time() at the start of the observation
    launched: int = 0  # index of the newest replay that the host has launched
    ended: Callable[[], bool] = lambda: False  # returns True if the GPU has finished the replay

    def __post_init__(self) -> None:
        self.launched = self.number  # no later replay has been launched yet

    def is_done(self) -> bool:
        """Return True if the GPU has finished the replay."""
        return self.ended()

    @property
    def age_s(self) -> float:
        """Seconds since the observation of this replay began, or 0 if the GPU has finished the replay."""
        return 0.0 if self.is_done() else time.time() - self.since


class _CurrentPhase:
    """Current phase, part and step of this process, and the number of seconds spent in each part."""

    def __init__(self) -> None:
        self.phase = STARTING  # what the process is doing, as shown in reports of hanging jobs
        self.part = IMPORTS  # part of the run to which the current time is attributed
        self.step = 0  # optimizer step that this process computes
        self.replay: Replay | None = None  # observed replay of a CUDA graph
        self.entered_s: float | None = None  # time.perf_counter() at the last enter()
        self.past_s: dict[str, float] = {}  # seconds spent in each part before the last enter()

    def enter(self, part: str, phase: str = "") -> None:
        """Begin a part of the run, and attribute the time since the last call to the previous part.

        The default phase is the name of the part.
        """
        now_s = time.perf_counter()
        # The first part began with the process.
        elapsed_s = process_uptime_s() if self.entered_s is None else now_s - self.entered_s
        self.past_s[self.part] = self.past_s.get(self.part, 0.0) + elapsed_s
        self.entered_s, self.part, self.phase = now_s, part, phase or part

    def spent_s(self) -> dict[str, float]:
        """Return the seconds spent in each part. The times add up to the process's uptime."""
        elapsed_s = process_uptime_s() if self.entered_s is None else time.perf_counter() - self.entered_s
        return self.past_s | {self.part: self.past_s.get(self.part, 0.0) + elapsed_s}


now = _CurrentPhase()


@contextlib.contextmanager
def in_phase(phase: str) -> Iterator[None]:
    """Set this process's phase, but not its part, for the duration of the context."""
    previous_phase, now.phase = now.phase, phase
    try:
        yield
    finally:
        now.phase = previous_phase


@contextlib.contextmanager
def timed_as(part: str) -> Iterator[None]:
    """Attribute the time spent in the context to `part`."""
    previous_part, previous_phase = now.part, now.phase
    now.enter(part)
    try:
        yield
    finally:
        now.enter(previous_part, previous_phase)
