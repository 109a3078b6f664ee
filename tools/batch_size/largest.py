"""Choose the next batch size to try, and launch trials under a memory limit.

Each trial runs in new processes, because a trial may run out of memory or hang. When a trial ends, all its
processes are killed.
"""

import contextlib
import re
import resource
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import psutil

from onecurve.system.processes import (
    adopt_orphans,
    end_with_parent,
    kill,
    running_descendants,
    says_out_of_memory,
)

FIRST_BATCH_SIZE = 8  # images in the first trial; with fewer, weights and libraries dominate memory use
EXTRAPOLATED_SHARE = 0.9  # fraction of the predicted increase to try if the prediction is an extrapolation
KNEE_SPEEDUP = 1.05  # minimum speedup over a smaller batch that justifies a larger batch
SAMPLE_INTERVAL_S = 0.02  # seconds between samples of the processes' memory
LISTING_INTERVAL_S = 0.5  # seconds between listings of the processes


def next_batch_size(
    gib_by_size: dict[int, float], failed_sizes: set[int], limit_gib: float, quantum: int
) -> int | None:
    """Return the next batch size to try, or None if the search has finished.

    The search finishes when the next multiple of `quantum` above the largest successful size has failed. The
    search models memory as a + b * size. After a wrong prediction, the candidates decrease in doubling steps,
    but not below the midpoint between the largest successful size and the smallest failed size.

    Args:
        gib_by_size: Memory in GiB for each batch size that ran successfully.
        failed_sizes: Batch sizes that did not fit into memory.
        limit_gib: Memory limit in GiB.
        quantum: Divisor of all batch sizes.
    """
    largest_fitting_size = max(gib_by_size, default=0)
    if not failed_sizes:
        return _predicted_size(gib_by_size, limit_gib, quantum)
    smallest_failed_size = min(failed_sizes)
    if smallest_failed_size - largest_fitting_size <= quantum:
        return None
    half_size_difference = max(1, (smallest_failed_size - largest_fitting_size) // (2 * quantum)) * quantum
    midpoint_size = largest_fitting_size + half_size_difference
    if len(gib_by_size) < 2:  # too few measurements for both a and b
        proportional_size = _proportional_size(gib_by_size, limit_gib, quantum)
        is_size_untried = largest_fitting_size < proportional_size < smallest_failed_size
        return proportional_size if is_size_untried else midpoint_size
    predicted_size = _predicted_size(gib_by_size, limit_gib, quantum)
    if predicted_size < smallest_failed_size:
        return predicted_size
    size_decrease = quantum * 2 ** (len(failed_sizes) - 1)  # doubles with each failure
    return max(midpoint_size, smallest_failed_size - size_decrease)


def _predicted_size(gib_by_size: dict[int, float], limit_gib: float, quantum: int) -> int:
    """Predict the largest batch size that fits in memory, based on smaller sizes that ran successfully.

    The prediction uses a line through the smallest and the largest of these sizes. With only one size, return
    at least four times this size, and without any, FIRST_BATCH_SIZE.
    """
    if not gib_by_size:
        return max(1, FIRST_BATCH_SIZE // quantum) * quantum
    smallest_fitting_size, largest_fitting_size = min(gib_by_size), max(gib_by_size)
    if smallest_fitting_size == largest_fitting_size:
        return max(4 * largest_fitting_size, _proportional_size(gib_by_size, limit_gib, quantum))
    image_difference = largest_fitting_size - smallest_fitting_size
    gib_difference = gib_by_size[largest_fitting_size] - gib_by_size[smallest_fitting_size]
    gib_per_image = gib_difference / image_difference
    if gib_per_image <= 0:  # the memory of the images does not show in the measurements
        return 4 * largest_fitting_size
    free_gib = limit_gib - gib_by_size[largest_fitting_size]
    more_image_count = free_gib / gib_per_image + 1e-6  # 1e-6 compensates rounding errors
    is_extrapolation = more_image_count > image_difference
    if is_extrapolation:
        more_image_count *= EXTRAPOLATED_SHARE
    if more_image_count >= quantum:
        return largest_fitting_size + int(more_image_count / quantum) * quantum
    # According to the model, no larger size fits. The step grows if this prediction was wrong more than once.
    wrong_prediction_count = sum(gib + quantum * gib_per_image > limit_gib for gib in gib_by_size.values())
    return largest_fitting_size + quantum * 2 ** max(0, wrong_prediction_count - 2)


def _proportional_size(gib_by_size: dict[int, float], limit_gib: float, quantum: int) -> int:
    """Return a size that fits even if memory is proportional to the size, or 0 if no size has run yet."""
    largest_fitting_size = max(gib_by_size, default=0)
    if not largest_fitting_size:
        return 0
    return int(largest_fitting_size * limit_gib / gib_by_size[largest_fitting_size]) // quantum * quantum


def knee_size(speed_by_size: dict[int, float]) -> int:
    """Return the smallest batch size whose speed is within 5 percent of the best speed."""
    best_speed = max(speed_by_size.values())
    return min(size for size, speed in speed_by_size.items() if best_speed < KNEE_SPEEDUP * speed)


@dataclass(frozen=True)
class LaunchResult:
    """Result of a command that ran under a memory limit."""

    exit_status: int | None  # the launcher's exit status, or None if it was killed after the timeout
    output: str  # combined stdout and stderr of all processes
    data_gib: float  # largest data size of a process, as limited by RLIMIT_DATA, or 0 without a limit
    duration_s: float
    is_out_of_memory: bool


def launch_limited(command: list[str], limit_gib: float | None, timeout_s: float) -> LaunchResult:
    """Run a command whose processes may each use limit_gib of data, and then kill all remaining processes.

    Without a limit, for example on GPUs, this function does not sample process memory.

    Args:
        command: Command line of a launcher.
        limit_gib: Limit of each process's data size in GiB (RLIMIT_DATA), or None.
        timeout_s: Time in seconds after which the launcher is killed.
    """
    earlier_pids = {process.pid for process in psutil.Process().children(recursive=True)}
    trial_start_s, oom_kills_before = time.monotonic(), _count_oom_kills()
    largest_data_gib = 0.0
    adopt_orphans()
    with tempfile.TemporaryFile("w+", errors="replace") as output_file:
        try:
            with _delayed_signals():
                launcher = subprocess.Popen(
                    command,
                    stdin=subprocess.DEVNULL,
                    stdout=output_file,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,  # Ctrl-C interrupts only this process, which kills the trial
                    preexec_fn=partial(_limit_process, limit_gib),
                )
            if limit_gib is None:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    launcher.wait(timeout_s)
            while launcher.poll() is None and time.monotonic() - trial_start_s < timeout_s:
                largest_data_gib = max(largest_data_gib, _sample_largest_data_gib(earlier_pids))
            launcher_status = launcher.poll()
        finally:
            while remaining_processes := running_descendants(earlier_pids):
                kill(remaining_processes)
                psutil.wait_procs(remaining_processes, timeout=1)
            adopt_orphans(False)  # stop adopting orphans
        output_file.seek(0)
        output_text = output_file.read()
    # torchrun prints the name of the signal that killed a process.
    was_oom_killed = "SIGKILL" in output_text and _count_oom_kills() > oom_kills_before
    # The launcher does not compute, so a segmentation fault means that a library in the launcher ran out of
    # memory.
    launcher_crashed = launcher_status == -signal.SIGSEGV
    is_limited = limit_gib is not None
    reports_out_of_memory = says_out_of_memory(output_text, is_limited) or (is_limited and launcher_crashed)
    is_out_of_memory = launcher_status != 0 and (was_oom_killed or reports_out_of_memory)
    trial_duration_s = time.monotonic() - trial_start_s
    return LaunchResult(launcher_status, output_text, largest_data_gib, trial_duration_s, is_out_of_memory)


@contextlib.contextmanager
def _delayed_signals() -> Iterator[None]:
    """Run the handlers of SIGINT and SIGTERM only after the block.

    When Popen forks to call preexec_fn, Python ignores exceptions in the hooks of os.register_at_fork. A
    KeyboardInterrupt that a signal handler raises at this moment would be lost.
    """
    received_signals: list[int] = []
    all_handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    # SIG_DFL and SIG_IGN are not callable, and do not raise exceptions.
    handler_by_signal = {number: handler for number, handler in all_handlers.items() if callable(handler)}
    for signal_number in handler_by_signal:
        signal.signal(signal_number, lambda number, _frame: received_signals.append(number))
    try:
        yield
    finally:
        for signal_number, handler in handler_by_signal.items():
            signal.signal(signal_number, handler)
        for received_signal in received_signals:
            signal.raise_signal(received_signal)


def _limit_process(limit_gib: float | None) -> None:
    """Limit the memory of this process and of each process it starts, and end this process with its parent.

    Popen calls this function in the new process, before the launcher's program starts.
    """
    end_with_parent()
    if limit_gib is not None:
        limit_bytes = int(limit_gib * 2**30)
        resource.setrlimit(resource.RLIMIT_DATA, (limit_bytes, limit_bytes))


def _sample_largest_data_gib(earlier_pids: set[int]) -> float:
    """Return the largest data size in GiB of any of this trial's processes, sampled for LISTING_INTERVAL_S.

    `earlier_pids` contains the PIDs of descendants that do not belong to the trial.
    """
    descendants = psutil.Process().children(recursive=True)
    trial_pids = {process.pid for process in descendants} - earlier_pids
    status_files = [Path(f"/proc/{pid}/status") for pid in trial_pids]
    largest_data_kib = 0
    sampling_deadline_s = time.monotonic() + LISTING_INTERVAL_S
    while status_files and time.monotonic() < sampling_deadline_s:
        for status_file in status_files:
            with contextlib.suppress(OSError):  # raised if the process has ended
                data_sizes_kib = re.findall(r"VmData:\s+(\d+)", status_file.read_text())
                largest_data_kib = max([largest_data_kib, *map(int, data_sizes_kib)])
        time.sleep(SAMPLE_INTERVAL_S)
    return largest_data_kib / 2**20


def _count_oom_kills() -> int:
    """Return the number of processes that this machine's kernel has OOM-killed since boot."""
    oom_kill_match = re.search(r"^oom_kill (\d+)", Path("/proc/vmstat").read_text(), re.MULTILINE)
    return int(oom_kill_match[1]) if oom_kill_match else 0
