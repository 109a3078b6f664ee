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

# Title of each phase in the table of times
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
    """Main process of a run, as recorded in the telemetry."""

    began_at: float  # value of time.time()
    ended_at: float  # value of time.time() at the last telemetry sample
    wall_s_before: float  # the run's wall_s when the process started

    @property
    def wall_s_at_end(self) -> float:
        """The run's wall_s when the process ended."""
        return self.wall_s_before + self.ended_at - self.began_at


def main_processes(run: RunRecord) -> list[MainProcess]:
    """Return the main processes in order. The list is empty without telemetry and for earlier versions."""
    processes = []
    for host_lines in run.telemetry.values():
        # On each host, a header line precedes the samples of each process.
        header_indices = [line_index for line_index, line in enumerate(host_lines) if "host" in line]
        for header_index, next_header_index in pairwise([*header_indices, len(host_lines)]):
            process_header, last_sample = host_lines[header_index], host_lines[next_header_index - 1]
            if {"before_s", "age_s"} <= process_header.keys():  # only in a main process's header
                began_at = process_header["t"] - process_header["age_s"]
                processes.append(MainProcess(began_at, last_sample["t"], process_header["before_s"]))
    return sorted(processes, key=lambda process: process.began_at)


def lost_s(run: RunRecord) -> float:
    """Return the seconds of work lost because the next process resumed an earlier checkpoint."""
    consecutive_processes = pairwise(main_processes(run))
    return sum(
        max(0.0, ended_process.wall_s_at_end - resumed_process.wall_s_before)
        for ended_process, resumed_process in consecutive_processes
    )


def paused_s(run: RunRecord) -> float:
    """Return the total seconds between the end of one main process and the start of the next."""
    consecutive_processes = pairwise(main_processes(run))
    return sum(
        max(0.0, resumed_process.began_at - ended_process.ended_at)
        for ended_process, resumed_process in consecutive_processes
    )


def seconds_by_activity(run: RunRecord) -> dict[str, float]:
    """Return the seconds of all main processes by activity, largest first, or {} if none are recorded."""
    seconds_by_phase = run.result_values.get("spent_s", {})
    seconds_by_title = {
        ACTIVITY_TITLES.get(phase, phase): phase_seconds
        for phase, phase_seconds in seconds_by_phase.items()
        if phase_seconds is not None
    }
    if seconds_by_title:
        seconds_by_title[LOST_WORK_TITLE] = lost_s(run)
    largest_first = sorted(seconds_by_title.items(), key=lambda title_and_seconds: -title_and_seconds[1])
    return {activity_title: seconds for activity_title, seconds in largest_first if seconds > 0}
