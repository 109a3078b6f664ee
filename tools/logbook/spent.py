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

ACTIVITY_TITLES = {
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
LOST_WORK_TITLE = "restarting: lost work after the last checkpoint"


@dataclass(frozen=True)
class MainProcess:
    """Main process of a run, as recorded in the telemetry.

    wall_s_before is the run's wall_s when the process started.
    """

    began_at: float
    ended_at: float  # time of the last telemetry sample
    wall_s_before: float

    @property
    def wall_s_at_end(self) -> float:
        """The run's wall_s when the process ended."""
        return self.wall_s_before + self.ended_at - self.began_at


def main_processes(run: RunRecord) -> list[MainProcess]:
    """Return the main processes in order. The list is empty without telemetry and for earlier versions."""
    processes = []
    for lines in run.telemetry.values():
        header_indices = [index for index, line in enumerate(lines) if "host" in line]
        for header_index, next_header_index in pairwise([*header_indices, len(lines)]):
            header, last_sample = lines[header_index], lines[next_header_index - 1]
            if {"before_s", "age_s"} <= header.keys():
                began_at = header["t"] - header["age_s"]
                processes.append(MainProcess(began_at, last_sample["t"], header["before_s"]))
    return sorted(processes, key=lambda process: process.began_at)


def lost_s(run: RunRecord) -> float:
    """Return the seconds of work lost because the next process resumed an earlier checkpoint."""
    process_pairs = pairwise(main_processes(run))
    return sum(max(0.0, ended.wall_s_at_end - resumed.wall_s_before) for ended, resumed in process_pairs)


def paused_s(run: RunRecord) -> float:
    """Return the total seconds between the end of one main process and the start of the next."""
    process_pairs = pairwise(main_processes(run))
    return sum(max(0.0, resumed.began_at - ended.ended_at) for ended, resumed in process_pairs)


def seconds_by_activity(run: RunRecord) -> dict[str, float]:
    """Return the seconds of all main processes by activity, largest first, or {} if none are recorded."""
    seconds_by_phase = run.result_values.get("spent_s", {})
    seconds_by_title = {
        ACTIVITY_TITLES.get(phase, phase): seconds
        for phase, seconds in seconds_by_phase.items()
        if seconds is not None
    }
    if seconds_by_title:
        seconds_by_title[LOST_WORK_TITLE] = lost_s(run)
    largest_first = sorted(seconds_by_title.items(), key=lambda title_and_seconds: -title_and_seconds[1])
    return {title: seconds for title, seconds in largest_first if seconds > 0}
