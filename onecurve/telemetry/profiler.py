"""Profiles three optimizer steps of the main process with torch.profiler (--profile).

The other processes are not profiled, because profiling would slow down all processes, and because several
profilers with gloo have crashed a job. torch's trace (for https://ui.perfetto.dev) and torch's table of
operators are written to profile/ in the run folder.
"""

from pathlib import Path

import torch
from torch.profiler import ProfilerAction, ProfilerActivity, profile

from onecurve.numerics.order import Steps
from onecurve.system.files import discard, write_text
from onecurve.system.output import log

STEPS = 3  # Number of profiled steps
# Name of the subfolder in the run folder, and names of its two files
FOLDER, TRACE, TABLE = "profile", "trace.json.gz", "table.txt"
ROWS = 50  # Maximum number of operators in the table


def begin_profile(device: torch.device, first: int, steps: Steps, folder: Path | None) -> "Profile | None":
    """Return a profile that begins at step `first`, or None if a resumed run has already completed this step.

    Args:
        device: Device of this process.
        first: First profiled step, counted from 1.
        steps: Remaining steps of the run.
        folder: Folder of the run on the main process, and None on other processes, which are not profiled.

    Raises:
        ValueError: If the run ends before the last profiled step. All processes raise this error.
    """
    if first + STEPS - 1 > steps.last:
        raise ValueError(
            f"--profile {first} needs {STEPS} steps from step {first:,}, but the run ends at step"
            f" {steps.last:,}. Specify --profile {steps.last - STEPS + 1} or less"
        )
    if folder and steps.first >= first:
        log.info(f"no new profile is recorded, because the run resumes after step {first:,}")
        return None
    return Profile(device, first, steps.first, folder) if folder else None


class Profile:
    """Profile of the optimizer steps first, first + 1 and first + 2, written to profile/.

    The caller must call end_step() after each step.

    Args:
        device: Device of this process.
        first: First profiled step, counted from 1.
        done: Number of steps that were completed before this process started.
        folder: Folder of the run.
    """

    def __init__(self, device: torch.device, first: int, done: int, folder: Path):
        self.first, self.skipped, self.folder = first, first - 1 - done, folder / FOLDER
        self.left = self.skipped + STEPS  # Number of steps until the profile is written
        self.on_gpu = device.type == "cuda"
        activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if self.on_gpu else [])]
        self.profiler = profile(
            activities=activities, schedule=self._action_at, on_trace_ready=self._write_files
        )
        self.profiler.start()

    def end_step(self) -> None:
        """End a step.

        After the last profiled step, this method writes the profile. Call this method before the step is
        logged.
        """
        if self.left:
            self.left -= 1
            self.profiler.step()

    def _action_at(self, step: int) -> ProfilerAction:
        """Return the profiler's action for a step, counted from 0 in this process."""
        profiled_step = step - self.skipped  # 0 for the first profiled step
        if profiled_step == STEPS - 1:
            return ProfilerAction.RECORD_AND_SAVE
        return ProfilerAction.RECORD if 0 <= profiled_step < STEPS else ProfilerAction.NONE

    def _write_files(self, profiler: profile) -> None:
        """Write the trace and the table. An error is logged but does not end training."""
        try:
            self.folder.mkdir(exist_ok=True)
            discard(self.folder / TRACE)  # The profiler would follow a symbolic link
            profiler.export_chrome_trace(str(self.folder / TRACE))
            sort_by = f"self_{'device' if self.on_gpu else 'cpu'}_time_total"
            write_text(
                self.folder / TABLE, profiler.key_averages().table(sort_by=sort_by, row_limit=ROWS) + "\n"
            )
            steps = f"{self.first:,} to {self.first + STEPS - 1:,}"
            log.info(
                f"the profile of steps {steps} is in {self.folder / TRACE}. Open this file in"
                " https://ui.perfetto.dev"
            )
        except Exception as error:  # The disk or the profiler may cause many types of errors
            log.info(f"the profile could not be written: {type(error).__name__}: {error}")
