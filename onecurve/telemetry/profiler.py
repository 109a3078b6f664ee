"""Profiles three optimizer steps of the main process with torch.profiler (--profile).

The other processes are not profiled, because profiling would slow down all processes, and because several
profilers with gloo have crashed a job. torch's trace (for https://ui.perfetto.dev) and torch's table of
operators are written to profile/ in the run folder.
"""

from pathlib import Path

import torch
from torch.profiler import ProfilerAction, ProfilerActivity, profile

from onecurve.system.files import discard, write_text
from onecurve.system.output import log

PROFILED_STEP_COUNT = 3
PROFILE_FOLDER = "profile"  # Name of the subfolder in the run folder
TRACE_FILE, TABLE_FILE = "trace.json.gz", "table.txt"
MAX_TABLE_ROWS = 50  # Maximum number of operators in the table


def begin_profile(
    device: torch.device, first_step: int, completed_steps: int, last_step: int, run_folder: Path | None
) -> "Profile | None":
    """Return a profile that begins at `first_step`, or None if a resumed run has already completed this step.

    Args:
        device: Device of this process.
        first_step: First profiled step, counted from 1.
        completed_steps: Number of steps that were completed before this process started.
        last_step: Last step of the run.
        run_folder: Folder of the run on the main process, and None on other processes, which are not
            profiled.

    Raises:
        ValueError: If the run ends before the last profiled step. All processes raise this error.
    """
    if first_step + PROFILED_STEP_COUNT - 1 > last_step:
        raise ValueError(
            f"--profile {first_step} needs {PROFILED_STEP_COUNT} steps from step {first_step:,},"
            f" but the run ends at step {last_step:,}."
            f" Specify --profile {last_step - PROFILED_STEP_COUNT + 1} or less"
        )
    if run_folder is None:
        return None
    if completed_steps >= first_step:
        log.info(f"no new profile is recorded, because the run resumes after step {first_step:,}")
        return None
    return Profile(device, first_step, completed_steps, run_folder)


class Profile:
    """Profile of three consecutive optimizer steps, written to profile/.

    The constructor starts torch's profiler, which records nothing before the first profiled step. The caller
    must call end_step() after each step.

    Args:
        device: Device of this process.
        first_step: First profiled step, counted from 1.
        completed_steps: Number of steps that were completed before this process started.
        run_folder: Folder of the run.
    """

    def __init__(self, device: torch.device, first_step: int, completed_steps: int, run_folder: Path):
        self.first_step = first_step
        self.profile_folder = run_folder / PROFILE_FOLDER
        # Steps of this process before the first profiled step
        self.skipped_steps = first_step - 1 - completed_steps
        self.remaining_steps = self.skipped_steps + PROFILED_STEP_COUNT  # Steps until the profile is written
        self.is_on_gpu = device.type == "cuda"
        profiled_activities = [ProfilerActivity.CPU]
        if self.is_on_gpu:
            profiled_activities.append(ProfilerActivity.CUDA)
        self.profiler = profile(
            activities=profiled_activities, schedule=self._action_at, on_trace_ready=self._write_profile
        )
        self.profiler.start()

    def end_step(self) -> None:
        """Tell torch's profiler that an optimizer step has ended.

        After the last profiled step, the profiler calls _write_profile(). Call this method before the step is
        logged.
        """
        if self.remaining_steps:
            self.remaining_steps -= 1
            self.profiler.step()

    def _action_at(self, process_step: int) -> ProfilerAction:
        """Return the profiler's action for a step, counted from 0 in this process."""
        profiled_step = process_step - self.skipped_steps  # 0 for the first profiled step
        if profiled_step == PROFILED_STEP_COUNT - 1:
            return ProfilerAction.RECORD_AND_SAVE
        is_profiled = 0 <= profiled_step < PROFILED_STEP_COUNT
        return ProfilerAction.RECORD if is_profiled else ProfilerAction.NONE

    def _write_profile(self, profiler: profile) -> None:
        """Write torch's trace and table of operators to profile/.

        An error is logged but does not end training.
        """
        try:
            self.profile_folder.mkdir(exist_ok=True)
            trace_file = self.profile_folder / TRACE_FILE
            discard(trace_file)  # The profiler would follow a symbolic link
            profiler.export_chrome_trace(str(trace_file))
            sort_key = "self_device_time_total" if self.is_on_gpu else "self_cpu_time_total"
            operator_table = profiler.key_averages().table(sort_by=sort_key, row_limit=MAX_TABLE_ROWS)
            write_text(self.profile_folder / TABLE_FILE, f"{operator_table}\n")
            profiled_range = f"{self.first_step:,} to {self.first_step + PROFILED_STEP_COUNT - 1:,}"
            log.info(
                f"the profile of steps {profiled_range} is in {trace_file}."
                " Open this file in https://ui.perfetto.dev"
            )
        except Exception as error:  # The disk or the profiler may cause many types of errors
            log.info(f"the profile could not be written: {type(error).__name__}: {error}")
