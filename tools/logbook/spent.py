"""Where the time of a run went, over all its starts. All of it is measured."""

from dataclasses import dataclass
from itertools import pairwise

from onecurve.system.phase import (
    CAPTURE,
    CUDA,
    DATA,
    ENDING,
    EVALUATION,
    FIRST_EVALUATION,
    GROUP,
    IMPORTS,
    MODEL,
    PLOTS,
    READING,
    SAVING,
    STARTING,
    TRAINING,
    WARM_UP,
)
from tools.logbook.run_record import RunRecord

PARTS = {
    TRAINING: "training steps",
    READING: "waiting for data, augmenting",
    EVALUATION: "evaluation",
    SAVING: "saving",
    IMPORTS: "starting: imports",
    GROUP: "starting: process group",
    CUDA: "starting: CUDA",
    DATA: "starting: data",
    MODEL: "starting: model",
    WARM_UP: "starting: steps before the capture of graphs",
    CAPTURE: "starting: capture of graphs",
    STARTING: "starting: run folder, first batch, what else there is",
    FIRST_EVALUATION: "first evaluation",
    PLOTS: "ending: plots",
    ENDING: "ending: last checkpoint, upload",
}
LOST = "lost at restarts: work after the last checkpoint"


@dataclass(frozen=True)
class MainProcess:
    """A main process of the run, according to its telemetry. before_s: the run's wall_s when it began."""

    began_at: float
    ended_at: float  # of its last sample
    before_s: float

    @property
    def ended_s(self) -> float:
        """The run's wall_s at its end."""
        return self.before_s + self.ended_at - self.began_at


def main_processes(run: RunRecord) -> list[MainProcess]:
    """Return the main processes in order; none without telemetry or in runs of earlier versions."""
    found = []
    for lines in run.telemetry.values():
        headers = [i for i, line in enumerate(lines) if "host" in line]
        for first, following in pairwise([*headers, len(lines)]):
            header, last = lines[first], lines[following - 1]
            if {"before_s", "age_s"} <= header.keys():
                found.append(MainProcess(header["t"] - header["age_s"], last["t"], header["before_s"]))
    return sorted(found, key=lambda process: process.began_at)


def lost_s(run: RunRecord) -> float:
    """Seconds of earlier processes after the checkpoint with which the next one began."""
    return sum(max(0.0, one.ended_s - following.before_s) for one, following in pairwise(main_processes(run)))


def paused_s(run: RunRecord) -> float:
    """Seconds between the end of a process and the start of the next one."""
    return sum(
        max(0.0, following.began_at - one.ended_at) for one, following in pairwise(main_processes(run))
    )


def parts_s(run: RunRecord) -> dict[str, float]:
    """Seconds of all main processes by part, the largest first; empty where that is not recorded."""
    found = {PARTS.get(name, name): s for name, s in run.facts.get("spent_s", {}).items() if s is not None}
    found |= {LOST: lost_s(run)} if found else {}
    return {name: s for name, s in sorted(found.items(), key=lambda part: -part[1]) if s > 0}
