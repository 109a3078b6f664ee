"""Time that a run spent on each activity, measured over all starts."""

from dataclasses import dataclass
from itertools import pairwise

from onecurve.system.phase import (
    BUILDING_MODEL,
    CUDA_START,
    ENDING,
    EVALUATION,
    FIRST_EVALUATION,
    GRAPH_CAPTURE,
    GRAPH_WARM_UP,
    IMPORTS,
    OPENING_DATA,
    PLOTS,
    PROCESS_GROUP,
    READING,
    SAVING,
    STARTING,
    TRAINING,
)
from tools.logbook.run_record import RunRecord

ACTIVITY_NAMES = {
    TRAINING: "training steps",
    READING: "waiting for data and augmentation",
    EVALUATION: "evaluation",
    SAVING: "saving",
    IMPORTS: "starting: imports",
    PROCESS_GROUP: "starting: process group",
    CUDA_START: "starting: CUDA",
    OPENING_DATA: "starting: data",
    BUILDING_MODEL: "starting: model",
    GRAPH_WARM_UP: "starting: steps before graph capture",
    GRAPH_CAPTURE: "starting: graph capture",
    STARTING: "starting: run folder, first batch and other work",
    FIRST_EVALUATION: "first evaluation",
    PLOTS: "ending: plots",
    ENDING: "ending: last checkpoint and upload",
}
LOST_WORK = "restarting: lost work after the last checkpoint"


@dataclass(frozen=True)
class MainProcess:
    """Main process of a run, as recorded in the telemetry.

    before_s is the run's wall_s when the process started.
    """

    began_at: float
    ended_at: float  # time of the last telemetry sample
    before_s: float

    @property
    def ended_s(self) -> float:
        """The run's wall_s when the process ended."""
        return self.before_s + self.ended_at - self.began_at


def main_processes(run: RunRecord) -> list[MainProcess]:
    """Return the main processes in order. The list is empty without telemetry and for earlier versions."""
    processes = []
    for lines in run.telemetry.values():
        header_indices = [index for index, line in enumerate(lines) if "host" in line]
        for first, following in pairwise([*header_indices, len(lines)]):
            header, last = lines[first], lines[following - 1]
            if {"before_s", "age_s"} <= header.keys():
                processes.append(MainProcess(header["t"] - header["age_s"], last["t"], header["before_s"]))
    return sorted(processes, key=lambda process: process.began_at)


def lost_s(run: RunRecord) -> float:
    """Return the seconds of work lost because the next process resumed an earlier checkpoint."""
    pairs = pairwise(main_processes(run))
    return sum(max(0.0, process.ended_s - following.before_s) for process, following in pairs)


def paused_s(run: RunRecord) -> float:
    """Return the total seconds between the end of one main process and the start of the next."""
    pairs = pairwise(main_processes(run))
    return sum(max(0.0, following.began_at - process.ended_at) for process, following in pairs)


def parts_s(run: RunRecord) -> dict[str, float]:
    """Return the seconds of all main processes by activity, largest first, or {} if none are recorded."""
    spent = run.facts.get("spent_s", {})
    seconds = {ACTIVITY_NAMES.get(phase, phase): value for phase, value in spent.items() if value is not None}
    seconds |= {LOST_WORK: lost_s(run)} if seconds else {}
    largest_first = sorted(seconds.items(), key=lambda part: -part[1])
    return {activity: value for activity, value in largest_first if value > 0}
