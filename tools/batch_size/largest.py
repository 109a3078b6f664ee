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

FIRST_SIZE = 8  # images in the first trial; with fewer images, weights and libraries dominate memory use
EXTRAPOLATED_SHARE = 0.9  # fraction of the predicted increase to try if the prediction is an extrapolation
KNEE_SPEED_UP = 1.05  # minimum speedup over a smaller batch that justifies a larger batch
SAMPLE_S, PERIOD_S = 0.02, 0.5  # seconds between memory samples, and between process listings


def next_size(ran: dict[int, float], failed: set[int], limit_gib: float, quantum: int) -> int | None:
    """Return the next batch size to try, or None if the search has finished.

    The search finishes when the next multiple of `quantum` above the largest successful size has failed. The
    search models memory as a + b * size. After a wrong prediction, the candidates decrease in doubling steps,
    but not below the midpoint between the largest successful size and the smallest failed size.

    Args:
        ran: Memory in GiB for each batch size that ran successfully.
        failed: Batch sizes that did not fit into memory.
        limit_gib: Memory limit in GiB.
        quantum: Divisor of all batch sizes.
    """
    largest_ok = max(ran, default=0)
    if not failed:
        return _predicted_size(ran, limit_gib, quantum)
    smallest_failed = min(failed)
    if smallest_failed - largest_ok <= quantum:
        return None
    middle_size = largest_ok + max(1, (smallest_failed - largest_ok) // (2 * quantum)) * quantum
    if len(ran) < 2:
        safe_size = _safe_size(ran, limit_gib, quantum)
        return safe_size if largest_ok < safe_size < smallest_failed else middle_size
    predicted_size = _predicted_size(ran, limit_gib, quantum)
    if predicted_size < smallest_failed:
        return predicted_size
    return max(middle_size, smallest_failed - quantum * 2 ** (len(failed) - 1))


def _predicted_size(ran: dict[int, float], limit_gib: float, quantum: int) -> int:
    """Predict the largest batch size that fits in memory, based on smaller sizes that ran successfully."""
    if not ran:
        return max(1, FIRST_SIZE // quantum) * quantum
    smallest_ok, largest_ok = min(ran), max(ran)
    if smallest_ok == largest_ok:
        return max(4 * largest_ok, _safe_size(ran, limit_gib, quantum))
    image_gib = (ran[largest_ok] - ran[smallest_ok]) / (largest_ok - smallest_ok)
    if image_gib <= 0:
        return 4 * largest_ok
    free_gib = limit_gib - ran[largest_ok]
    free_images = free_gib / image_gib + 1e-6  # 1e-6 compensates rounding errors
    if free_images > largest_ok - smallest_ok:
        free_images *= EXTRAPOLATED_SHARE
    if free_images >= quantum:
        return largest_ok + int(free_images / quantum) * quantum
    # According to the model, no larger size fits. The step grows if this prediction was wrong more than once.
    wrong_predictions = sum(gib + quantum * image_gib > limit_gib for gib in ran.values())
    return largest_ok + quantum * 2 ** max(0, wrong_predictions - 2)


def _safe_size(ran: dict[int, float], limit_gib: float, quantum: int) -> int:
    """Return a size that fits even if memory is proportional to the size, or 0 if no size has run yet."""
    largest_ok = max(ran, default=0)
    return int(largest_ok * limit_gib / ran[largest_ok]) // quantum * quantum if largest_ok else 0


def knee(images_per_s: dict[int, float]) -> int:
    """Return the smallest batch size whose speed is within 5 percent of the best speed."""
    best = max(images_per_s.values())
    return min(size for size, speed in images_per_s.items() if best < KNEE_SPEED_UP * speed)


@dataclass(frozen=True)
class LaunchResult:
    """Result of a command that ran under a memory limit."""

    status: int | None  # the launcher's exit status, or None if it was killed after the timeout
    output: str  # combined stdout and stderr of all processes
    data_gib: float  # largest data size of a process, as limited by RLIMIT_DATA, or 0 without a limit
    seconds: float  # launch duration
    is_out_of_memory: bool


def launch_limited(command: list[str], limit_gib: float | None, timeout_s: float) -> LaunchResult:
    """Run a command whose processes may each use limit_gib of data, and then kill all remaining processes.

    Without a limit, for example on GPUs, this function does not sample process memory.
    """
    other_pids = {process.pid for process in psutil.Process().children(recursive=True)}
    start_s, killed_before, data_gib = time.monotonic(), _killed_by_kernel(), 0.0
    adopt_orphans()
    with tempfile.TemporaryFile("w+", errors="replace") as output:
        try:
            with _delayed_signals():
                launcher = subprocess.Popen(
                    command,
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                    preexec_fn=partial(_limit_process, limit_gib),
                )
            if limit_gib is None:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    launcher.wait(timeout_s)
            while launcher.poll() is None and time.monotonic() - start_s < timeout_s:
                data_gib = max(data_gib, _largest_data_gib(other_pids))
            status = launcher.poll()
        finally:
            while remaining := running_descendants(other_pids):
                kill(remaining)
                psutil.wait_procs(remaining, timeout=1)
            adopt_orphans(False)
        output.seek(0)
        output_text = output.read()
    was_killed = "SIGKILL" in output_text and _killed_by_kernel() > killed_before
    # The launcher does not compute, so a segmentation fault means that a library in the launcher ran out of
    # memory.
    has_crashed = status == -signal.SIGSEGV
    is_limited = limit_gib is not None
    is_reported = says_out_of_memory(output_text, is_limited) or (is_limited and has_crashed)
    is_out_of_memory = status != 0 and (was_killed or is_reported)
    return LaunchResult(status, output_text, data_gib, time.monotonic() - start_s, is_out_of_memory)


@contextlib.contextmanager
def _delayed_signals() -> Iterator[None]:
    """Run the handlers of SIGINT and SIGTERM only after the block.

    When Popen forks to call preexec_fn, Python ignores exceptions in the hooks of os.register_at_fork. A
    KeyboardInterrupt that a signal handler raises at this moment would be lost.
    """
    received: list[int] = []
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    handlers = {number: handler for number, handler in handlers.items() if callable(handler)}
    for number in handlers:
        signal.signal(number, lambda number, _: received.append(number))
    try:
        yield
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
        for received_number in received:
            signal.raise_signal(received_number)


def _limit_process(limit_gib: float | None) -> None:
    """Limit the memory of the launcher and of all processes it starts."""
    end_with_parent()
    if limit_gib is not None:
        size = int(limit_gib * 2**30)
        resource.setrlimit(resource.RLIMIT_DATA, (size, size))


def _largest_data_gib(other_pids: set[int]) -> float:
    """Sample the descendants that are not in `other_pids` for PERIOD_S.

    Return the largest data size in GiB.
    """
    descendants = psutil.Process().children(recursive=True)
    pids = {process.pid for process in descendants} - other_pids
    status_files = [Path(f"/proc/{pid}/status") for pid in pids]
    largest_kib, end_s = 0, time.monotonic() + PERIOD_S
    while status_files and time.monotonic() < end_s:
        for file in status_files:
            with contextlib.suppress(OSError):  # raised if the process has ended
                data_size = re.search(r"VmData:\s+(\d+)", file.read_text())
                largest_kib = max(largest_kib, int(data_size[1]) if data_size else 0)
        time.sleep(SAMPLE_S)
    return largest_kib / 2**20


def _killed_by_kernel() -> int:
    """Return the number of processes that this machine's kernel has OOM-killed."""
    match = re.search(r"^oom_kill (\d+)", Path("/proc/vmstat").read_text(), re.MULTILINE)
    return int(match[1]) if match else 0
