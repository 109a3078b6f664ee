"""Launches that may run out of memory or hang: each in processes of its own, of which none lives on."""

import contextlib
import ctypes
import re
import resource
import signal
import subprocess
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import psutil

SAMPLE_S, PERIOD_S = 0.02, 0.5  # between two looks at the same processes; until new ones are looked for
# What Python, C++, the loader and oneDNN say under a limit, where it is no allocator of torch's that fails.
NO_ROOM = (
    "MemoryError",
    "std::bad_alloc",
    "Cannot allocate memory",
    "can't start new thread",
    "failed to map segment from shared object",
    "could not create a primitive",
    "could not execute a primitive",
)


@dataclass(frozen=True)
class Ended:
    status: int | None  # the launcher's; None: it was ended at the deadline
    output: str
    data_gib: float  # the largest of any of its processes: writable memory, as RLIMIT_DATA counts it
    seconds: float
    is_out_of_memory: bool


def launch(words: list[str], limit_gib: float | None, timeout_s: float) -> Ended:
    """Runs the command with at most limit_gib of data in each process. Whatever it started has ended then."""
    libc, others = ctypes.CDLL(None), psutil.Process().children(recursive=True)
    libc.prctl(36, 1)  # PR_SET_CHILD_SUBREAPER: who loses its parent is found below this process
    began, killed_before, data_gib = time.monotonic(), _killed_by_kernel(), 0.0
    with tempfile.TemporaryFile("w+", errors="replace") as output:
        launcher = subprocess.Popen(
            words,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            preexec_fn=lambda: _enter(limit_gib),
        )
        try:
            while launcher.poll() is None and time.monotonic() - began < timeout_s:
                data_gib = max(data_gib, _largest_data_gib(others))
            status = launcher.poll()
        finally:
            _end(launcher, others)
            libc.prctl(36, 0)
        output.seek(0)
        text = output.read()
    killed = "SIGKILL" in text and _killed_by_kernel() > killed_before
    # A launcher computes nothing: where it crashes itself, its libraries had no room.
    crashed = status == -signal.SIGSEGV
    no_room = limit_gib is not None and (crashed or any(said in text for said in NO_ROOM))
    is_out_of_memory = status != 0 and ("error: out of memory on" in text or killed or no_room)
    return Ended(status, text, data_gib, time.monotonic() - began, is_out_of_memory)


def _enter(limit_gib: float | None) -> None:
    """In the launcher, before it begins; its processes inherit the limit."""
    ctypes.CDLL(None).prctl(1, signal.SIGTERM)  # PR_SET_PDEATHSIG
    if limit_gib is not None:
        size = int(limit_gib * 2**30)
        resource.setrlimit(resource.RLIMIT_DATA, (size, size))


def _largest_data_gib(others: list[psutil.Process]) -> float:
    """Of all processes below this one but the others, in PERIOD_S."""
    started = [process for process in psutil.Process().children(recursive=True) if process not in others]
    files = [Path(f"/proc/{process.pid}/status") for process in started]
    largest, end = 0, time.monotonic() + PERIOD_S
    while files and time.monotonic() < end:
        for file in files:
            with contextlib.suppress(OSError):  # it has ended
                largest = max(largest, int((re.findall(r"VmData:\s+(\d+)", file.read_text()) or ["0"])[0]))
        time.sleep(SAMPLE_S)
    return largest / 2**20


def _end(launcher: subprocess.Popen, others: list[psutil.Process]) -> None:
    """others: of this process, which were there before."""
    launcher.kill()
    launcher.wait()
    while orphans := [p for p in psutil.Process().children(recursive=True) if p not in others]:
        for process in orphans:
            with contextlib.suppress(psutil.Error):
                process.kill()
        psutil.wait_procs(orphans, timeout=1)


def _killed_by_kernel() -> int:
    """How many processes of this machine the kernel has killed for want of memory."""
    found = re.search(r"^oom_kill (\d+)", Path("/proc/vmstat").read_text(), re.MULTILINE)
    return int(found[1]) if found else 0
