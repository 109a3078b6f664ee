"""What the kernel says of a process: when it started, by a clock that nobody sets, and what it ignores."""

import os
import signal
import time
from pathlib import Path

import psutil


def start_ticks(pid: int) -> int | None:
    """When it started, in clock ticks since the boot; None where there is no such process, or no /proc.

    Field 22 of /proc/PID/stat (proc(5)). psutil's create_time adds the time of the boot, which moves with
    the clock of the machine.
    """
    try:
        stat = Path(f"/proc/{pid}/stat").read_bytes()
        return int(stat.rpartition(b")")[2].split()[19])  # the name before it may hold anything
    except (OSError, ValueError, IndexError):
        return None


def own_age_s() -> float:
    """Seconds since this process started, imports included."""
    ticks = start_ticks(os.getpid())
    if ticks is None:
        return time.time() - psutil.Process().create_time()
    return time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK")


def is_under_nohup() -> bool:
    """Whether this process was started with SIGHUP ignored; asked before it has a handler of its own."""
    return signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
