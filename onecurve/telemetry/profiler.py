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

PROFILED_STEPS = 3  # Number of profiled steps
# Name of the subfolder in the run folder, and names of its two files
PROFILE_FOLDER, TRACE_FILE, TABLE_FILE = "profile", "trace.json.gz", "table.txt"
TABLE_ROWS = 50  # Maximum number of operators in the table


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
    if first + PROFILED_STEPS - 1 > steps.last:
        raise ValueError(
            f"--profile {first} needs {PROFILED_STEPS} steps from step {first:,}, but the run ends at"
            f" step {steps.last:,}. Specify --profile {steps.last - PROFILED_STEPS + 1} or less"
        )
    if folder and steps.first >= first:
        log.info(f"no new profile is recorded, because the run resumes after step {first:,}")
        return None
    return Profile(device, first, steps.first, folder) if folder else None


class Profile:
    """Profile of three consecutive optimizer steps, written to profile/.

    The caller must call end_step() after each step.

    Args:
        device: Device of this process.
        first_step: First profiled step, counted from 1.
        done_steps: Number of steps that were completed before this process started.
        folder: Folder of the run.
    """

    def __init__(self, device: torch.device, first_step: int, done_steps: int, folder: Path):
        self.first_step, self.folder = first_step, folder / PROFILE_FOLDER
        self.skipped_steps = first_step - 1 - done_steps
        self.steps_left = self.skipped_steps + PROFILED_STEPS  # Number of steps until the profile is written
        self.is_on_gpu = device.type == "cuda"
        activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if self.is_on_gpu else [])]
        self.profiler = profile(
            activities=activities, schedule=self._action_at, on_trace_ready=self._write_files
        )
        self.profiler.start()

    def end_step(self) -> None:
        """End a step.

        After the last profiled step, this method writes the profile. Call this method before the step is
        logged.
        """
        if self.steps_left:
            self.steps_left -= 1
            self.profiler.step()

    def _action_at(self, step: int) -> ProfilerAction:
        """Return the profiler's action for a step, counted from 0 in this process."""
        profiled_step = step - self.skipped_steps  # 0 for the first profiled step
        if profiled_step == PROFILED_STEPS - 1:
            return ProfilerAction.RECORD_AND_SAVE
        return ProfilerAction.RECORD if 0 <= profiled_step < PROFILED_STEPS else ProfilerAction.NONE

    def _write_files(self, profiler: profile) -> None:
        """Write the trace and the table. An error is logged but does not end training."""
        try:
            self.folder.mkdir(exist_ok=True)
            discard(self.folder / TRACE_FILE)  # The profiler would follow a symbolic link
            profiler.export_chrome_trace(str(self.folder / TRACE_FILE))
            sort_by = f"self_{'device' if self.is_on_gpu else 'cpu'}_time_total"
            table = profiler.key_averages().table(sort_by=sort_by, row_limit=TABLE_ROWS)
            write_text(self.folder / TABLE_FILE, f"{table}\n")
            steps = f"{self.first_step:,} to {self.first_step + PROFILED_STEPS - 1:,}"
            log.info(
                f"the profile of steps {steps} is in {self.folder / TRACE_FILE}. Open this file in"
                " https://ui.perfetto.dev"
            )
        except Exception as error:  # The disk or the profiler may cause many types of errors
            log.info(f"the profile could not be written: {type(error).__name__}: {error}")
