"""Profiles three optimizer steps of the main process with torch.profiler (--profile).

Other processes are not profiled, because profiling would slow them down, and because running several
profilers with gloo has crashed a job. torch's trace (for https://ui.perfetto.dev) and table of operators are
written to profile/ in the run's folder.
"""

from pathlib import Path

import torch
from torch.profiler import ProfilerAction, ProfilerActivity, profile

from onecurve.numerics.order import Steps
from onecurve.system.files import discard, write_text
from onecurve.system.output import log

STEPS = 3  # number of profiled steps
# Subfolder of the run's folder, and the files in it
FOLDER, TRACE, TABLE = "profile", "trace.json.gz", "table.txt"
ROWS = 50  # number of operators in the table


def begin_profile(device: torch.device, first: int, steps: Steps, folder: Path | None) -> "Profile | None":
    """Return a profile that begins at step `first`, or None if a resumed run is already past this step.

    Args:
        device: Device of this process.
        first: First profiled step, counted from 1.
        steps: Remaining steps of the run.
        folder: The run's folder on the main process; None on other processes, which are not profiled.

    Raises:
        ValueError: The run ends before the profile. Raised on all processes.
    """
    if first + STEPS - 1 > steps.last:
        raise ValueError(
            f"--profile {first} needs {STEPS} steps from step {first:,}, but the run ends at step"
            f" {steps.last:,}. Choose at most {steps.last - STEPS + 1:,}"
        )
    if folder and steps.first >= first:
        log.info(f"no new profile: the run resumes after step {first:,}")
        return None
    return Profile(device, first, steps.first, folder) if folder else None


class Profile:
    """Profile of the optimizer steps first, first + 1 and first + 2, counted from 1, written to profile/.

    The caller must call end_step() after each step.

    Args:
        device: Device of this process.
        first: First profiled step, counted from 1.
        done: Number of steps before the first step of this process.
        folder: The run's folder.
    """

    def __init__(self, device: torch.device, first: int, done: int, folder: Path):
        self.first, self.skipped, self.folder = first, first - 1 - done, folder / FOLDER
        self.left = self.skipped + STEPS  # steps until the profile is written
        self.on_gpu = device.type == "cuda"
        activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if self.on_gpu else [])]
        self.profiler = profile(activities=activities, schedule=self._action, on_trace_ready=self._write)
        self.profiler.start()

    def end_step(self) -> None:
        """End a step, before it is logged. After the last profiled step, this method writes the files."""
        if self.left:
            self.left -= 1
            self.profiler.step()

    def _action(self, step: int) -> ProfilerAction:
        """Return the profiler's action for a step of this process, counted from 0."""
        number = step - self.skipped
        if number == STEPS - 1:
            return ProfilerAction.RECORD_AND_SAVE
        return ProfilerAction.RECORD if 0 <= number < STEPS else ProfilerAction.NONE

    def _write(self, profiler: profile) -> None:
        """Write the files. An error is logged and does not end training."""
        try:
            self.folder.mkdir(exist_ok=True)
            discard(self.folder / TRACE)  # the profiler would follow a symbolic link
            profiler.export_chrome_trace(str(self.folder / TRACE))
            sort_by = f"self_{'device' if self.on_gpu else 'cpu'}_time_total"
            write_text(
                self.folder / TABLE, profiler.key_averages().table(sort_by=sort_by, row_limit=ROWS) + "\n"
            )
            steps = f"{self.first:,} to {self.first + STEPS - 1:,}"
            log.info(f"profile of steps {steps}: {self.folder / TRACE} (for https://ui.perfetto.dev)")
        except Exception as error:  # errors from the disk or the profiler
            log.info(f"no profile: {type(error).__name__}: {error}")
