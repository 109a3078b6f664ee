"""--profile: torch.profiler over three optimizer steps of the main process.

The other processes are not profiled: they run at their own speed, and under gloo several profilers at once
have crashed a job. profile/ in the run's folder gets torch's trace, for https://ui.perfetto.dev, and its
table of operators.
"""

from concurrent import futures
from pathlib import Path

import torch
from torch.profiler import ProfilerAction, ProfilerActivity, profile

from common.system.files import write_text
from common.system.threads import Heartbeat, start_daemon

STEPS = 3  # that are profiled
FOLDER, TRACE, TABLE = "profile", "trace.json.gz", "table.txt"  # in the run's folder, and in it
ROWS = 50  # operators in the table


class Profile:
    """Profiles the optimizer steps first, first + 1 and first + 2, counted from 1, and writes profile/.

    The caller calls begin() before its first step, and end_step() after each step.
    """

    def __init__(self, device: torch.device, first: int, folder: Path):
        self.device, self.first, self.folder = device, first, folder / FOLDER
        self.profiler: profile | None = None
        self.writing: futures.Future[None] | None = None

    def begin(self, step: int) -> None:
        """Starts the profiler when the next step is the first one. step: the number of steps that ended."""
        if step != self.first - 1:
            return
        activities = [ProfilerActivity.CPU]
        if self.device.type == "cuda":
            torch.cuda.synchronize()
            activities.append(ProfilerActivity.CUDA)
        # Any schedule makes torch mark the steps: ProfilerStep#0, #1, #2.
        self.profiler = profile(activities=activities, schedule=lambda _: ProfilerAction.RECORD)
        self.profiler.start()

    def end_step(self, step: int) -> None:
        """Ends the step, and after the last one the profile. Before anything is logged."""
        if self.profiler is None:
            self.begin(step)
        elif step < self.first + STEPS - 1:
            self.profiler.step()
        else:
            if self.device.type == "cuda":
                torch.cuda.synchronize()
            self.profiler.stop()
            profiler, self.profiler = self.profiler, None
            self.writing = start_daemon(lambda: self._write(profiler))

    def wait(self, beat: Heartbeat) -> None:
        """Waits until the files are written."""
        while self.writing and futures.wait([self.writing], 0.5).not_done:
            beat()

    def _write(self, profiler: profile) -> None:
        """Writes the files. A profile that can't be written is said, and ends nothing."""
        try:
            self.folder.mkdir(exist_ok=True)
            trace = self.folder / TRACE
            profiler.export_chrome_trace(str(trace))
            by = f"self_{'device' if self.device.type == 'cuda' else 'cpu'}_time_total"
            write_text(self.folder / TABLE, profiler.key_averages().table(sort_by=by, row_limit=ROWS) + "\n")
            last = self.first + STEPS - 1
            print(f"profile of steps {self.first:,} to {last:,}: {trace} (for https://ui.perfetto.dev)")
        except Exception as error:  # of many kinds: of the disk, of the profiler
            print(f"no profile: {type(error).__name__}: {error}", flush=True)
