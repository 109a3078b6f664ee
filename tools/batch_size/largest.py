"""Choose the next batch size to try, and launch trials under a memory limit.

A trial runs in new processes, because it may run out of memory or hang. All these processes end with the
trial.
"""

import contextlib
import re
import resource
import signal
import subprocess
import tempfile
import time
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

FIRST = 8  # images in the first trial, because fewer images need little memory beyond weights and libraries
EXTRAPOLATED_SHARE = 0.9  # fraction of a predicted growth to try, if the prediction is an extrapolation
KNEE_SPEED_UP = 1.05  # speedup over a smaller batch that makes a larger batch worthwhile
SAMPLE_S, PERIOD_S = 0.02, 0.5  # intervals of sampling memory and of listing the processes


def next_size(ran: dict[int, float], failed: set[int], limit_gib: float, quantum: int) -> int | None:
    """Return the size to try next, or None when the search is over.

    The search is over when the size that is `quantum` above the largest size that ran has failed. Memory is
    modelled as a + b * size. After a wrong prediction, the next sizes decrease in steps that double, but stay
    above the middle of the open interval.

    Args:
        ran: Memory in GiB of each size that ran.
        failed: Sizes that did not fit.
        limit_gib: Memory limit.
        quantum: Number of which all sizes are multiples.
    """
    low = max(ran, default=0)
    if not failed:
        return _predicted(ran, limit_gib, quantum)
    high = min(failed)
    if high - low <= quantum:
        return None
    middle = low + max(1, (high - low) // (2 * quantum)) * quantum
    if len(ran) < 2:
        safe = _safe(ran, limit_gib, quantum)
        return safe if low < safe < high else middle
    predicted = _predicted(ran, limit_gib, quantum)
    return predicted if predicted < high else max(middle, high - quantum * 2 ** (len(failed) - 1))


def _predicted(ran: dict[int, float], limit_gib: float, quantum: int) -> int:
    """Return the largest size that should fit, extrapolated from smaller sizes that ran."""
    if not ran:
        return max(1, FIRST // quantum) * quantum
    small, low = min(ran), max(ran)
    if small == low:
        return max(4 * low, _safe(ran, limit_gib, quantum))
    image_gib = (ran[low] - ran[small]) / (low - small)
    if image_gib <= 0:
        return 4 * low
    room = (limit_gib - ran[low]) / image_gib + 1e-6  # in images; 1e-6 tolerates rounding
    if room > low - small:
        room *= EXTRAPOLATED_SHARE
    if room >= quantum:
        return low + int(room / quantum) * quantum
    # No larger size should fit. If this prediction was wrong more than once before, the step grows.
    full = sum(gib + quantum * image_gib > limit_gib for gib in ran.values())
    return low + quantum * 2 ** max(0, full - 2)


def _safe(ran: dict[int, float], limit_gib: float, quantum: int) -> int:
    """Return a size that fits even if memory is proportional to the size, or 0 if no size ran."""
    low = max(ran, default=0)
    return int(low * limit_gib / ran[low]) // quantum * quantum if low else 0


def knee(images_per_s: dict[int, float]) -> int:
    """Return the smallest size that no other size outperforms by 5 percent."""
    best = max(images_per_s.values())
    return min(size for size, speed in images_per_s.items() if best < KNEE_SPEED_UP * speed)


@dataclass(frozen=True)
class LaunchResult:
    """Outcome of a launch under a memory limit."""

    status: int | None  # exit status of the launcher, or None if the launcher was killed at the deadline
    output: str
    data_gib: float  # largest data size of a process, as counted by RLIMIT_DATA, or 0 without a limit
    seconds: float
    is_out_of_memory: bool


def launch_limited(words: list[str], limit_gib: float | None, timeout_s: float) -> LaunchResult:
    """Run a command with at most limit_gib of data in each process. Kill all processes that remain.

    Without a limit, for example on GPUs, the memory of the processes is not sampled.
    """
    before = {process.pid for process in psutil.Process().children(recursive=True)}
    began, killed_before, data_gib = time.monotonic(), _killed_by_kernel(), 0.0
    adopt_orphans()
    with tempfile.TemporaryFile("w+", errors="replace") as output:
        launcher = subprocess.Popen(
            words,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            preexec_fn=partial(_limit_process, limit_gib),
        )
        try:
            if limit_gib is None:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    launcher.wait(timeout_s)
            while launcher.poll() is None and time.monotonic() - began < timeout_s:
                data_gib = max(data_gib, _largest_data_gib(before))
            status = launcher.poll()
        finally:
            launcher.kill()
            launcher.wait()
            while orphans := running_descendants(before):
                kill(orphans)
                psutil.wait_procs(orphans, timeout=1)
            adopt_orphans(False)
        output.seek(0)
        text = output.read()
    killed = "SIGKILL" in text and _killed_by_kernel() > killed_before
    # The launcher does no computation, so a segmentation fault means that its libraries ran out of memory.
    crashed = status == -signal.SIGSEGV
    is_limited = limit_gib is not None
    reported = says_out_of_memory(text, is_limited) or (is_limited and crashed)
    is_out_of_memory = status != 0 and (killed or reported)
    return LaunchResult(status, text, data_gib, time.monotonic() - began, is_out_of_memory)


def _limit_process(limit_gib: float | None) -> None:
    """Limit the launcher's memory before its program starts. The launcher's processes inherit the limit."""
    end_with_parent()
    if limit_gib is not None:
        size = int(limit_gib * 2**30)
        resource.setrlimit(resource.RLIMIT_DATA, (size, size))


def _largest_data_gib(before: set[int]) -> float:
    """Sample all descendants except the pids in `before` for PERIOD_S. Return their largest data size."""
    descendants = psutil.Process().children(recursive=True)
    files = [Path(f"/proc/{process.pid}/status") for process in descendants if process.pid not in before]
    largest, end = 0, time.monotonic() + PERIOD_S
    while files and time.monotonic() < end:
        for file in files:
            with contextlib.suppress(OSError):  # the process has ended
                largest = max(largest, int((re.findall(r"VmData:\s+(\d+)", file.read_text()) or ["0"])[0]))
        time.sleep(SAMPLE_S)
    return largest / 2**20


def _killed_by_kernel() -> int:
    """Return the number of processes on this machine that the kernel has killed for lack of memory."""
    match = re.search(r"^oom_kill (\d+)", Path("/proc/vmstat").read_text(), re.MULTILINE)
    return int(match[1]) if match else 0
