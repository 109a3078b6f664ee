"""--profile: torch.profiler over three optimizer steps of the main process.

The other processes are not profiled: they run at their own speed, and under gloo several profilers at once
have crashed a job. profile/ in the run's folder gets torch's trace, for https://ui.perfetto.dev, and its
table of operators.
"""

from pathlib import Path

import torch
from torch.profiler import ProfilerAction, ProfilerActivity, profile

from onecurve.numerics.order import Steps
from onecurve.system.files import discard, write_text
from onecurve.system.output import log

STEPS = 3  # that are profiled
FOLDER, TRACE, TABLE = "profile", "trace.json.gz", "table.txt"  # in the run's folder, and in it
ROWS = 50  # operators in the table


def begin_profile(device: torch.device, first: int, steps: Steps, folder: Path | None) -> "Profile | None":
    """The profile of the steps from `first` on; None if a resumed run is behind it.

    folder: the run's, on the main process; None elsewhere, where nothing is profiled. ValueError on all
    processes when the run ends before the profile.
    """
    if first + STEPS - 1 > steps.last:
        raise ValueError(
            f"--profile {first}: {STEPS} steps from step {first:,} on, and the run ends at step"
            f" {steps.last:,}: choose at most {steps.last - STEPS + 1:,}"
        )
    if folder and steps.first >= first:
        log.info(f"no new profile: the run resumes after step {first:,}")
        return None
    return Profile(device, first, steps.first, folder) if folder else None


class Profile:
    """Profiles the optimizer steps first, first + 1 and first + 2, counted from 1, and writes profile/.

    done: the number of steps before this process's first. The caller calls end_step() after each step.
    """

    def __init__(self, device: torch.device, first: int, done: int, folder: Path):
        self.first, self.skipped, self.folder = first, first - 1 - done, folder / FOLDER
        self.left = self.skipped + STEPS  # steps until it is written
        self.on_gpu = device.type == "cuda"
        activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if self.on_gpu else [])]
        self.profiler = profile(activities=activities, schedule=self._action, on_trace_ready=self._write)
        self.profiler.start()

    def end_step(self) -> None:
        """Ends a step, before anything is logged. After the last one the training waits for the files."""
        if self.left:
            self.left -= 1
            self.profiler.step()

    def _action(self, step: int) -> ProfilerAction:
        """torch's schedule. step: of this process, counted from 0."""
        number = step - self.skipped
        if number == STEPS - 1:
            return ProfilerAction.RECORD_AND_SAVE
        return ProfilerAction.RECORD if 0 <= number < STEPS else ProfilerAction.NONE

    def _write(self, profiler: profile) -> None:
        """Writes the files. A profile that can't be written is reported, and ends nothing."""
        try:
            self.folder.mkdir(exist_ok=True)
            discard(self.folder / TRACE)  # a link would be followed
            profiler.export_chrome_trace(str(self.folder / TRACE))
            by = f"self_{'device' if self.on_gpu else 'cpu'}_time_total"
            write_text(self.folder / TABLE, profiler.key_averages().table(sort_by=by, row_limit=ROWS) + "\n")
            steps = f"{self.first:,} to {self.first + STEPS - 1:,}"
            log.info(f"profile of steps {steps}: {self.folder / TRACE} (for https://ui.perfetto.dev)")
        except Exception as error:  # of many kinds: of the disk, of the profiler
            log.info(f"no profile: {type(error).__name__}: {error}")
