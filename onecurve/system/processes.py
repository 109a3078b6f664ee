"""Inspects the processes and network interfaces on this host."""

import contextlib
import ctypes
import os
import re
import shlex
import signal
import socket
import time
from collections.abc import Collection, Iterator, Mapping
from functools import cache
from itertools import chain, takewhile
from pathlib import Path
from typing import Any, NamedTuple

import psutil

from onecurve.system.files import read_yaml

PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36  # prctl(2)
LAUNCHERS = ("accelerate", "accelerate-launch", "deepspeed", "torchrun", "launch.py")
LAUNCHER_MODULES = ("accelerate.commands.", "deepspeed.launcher.", "torch.distributed.")
# Environment variables that launchers set and that users rarely set
SET_BY_LAUNCHERS = ("TORCHELASTIC_RUN_ID", "ACCELERATE_DYNAMO_BACKEND", "CROSS_RANK")
OUT_OF_MEMORY_MESSAGES = (  # substrings of out-of-memory messages
    "out of memory",  # torch and CUDA
    "ALLOC_FAILED",  # cuBLAS and cuDNN 8
    "ALLOCATION_FAILED",  # cuDNN 9, for device or host memory
    "CUBLAS_STATUS_NOT_INITIALIZED",  # too little memory to create cuBLAS's handle
    # cuDNN, if the workspace of no engine fits into memory
    "unable to find an engine to execute this computation",
    "CUDA calloc",  # NCCL
    "can't allocate memory",  # torch on a CPU
    "Storage size calculation overflowed",  # torch, if the number of bytes exceeds 64 bits
    "could not create a primitive",  # oneDNN
)
# Substrings of messages from other allocators. They indicate exhausted memory only in a process with a memory
# limit
LIMITED_MEMORY_MESSAGES = (
    "MemoryError",
    "std::bad_alloc",
    "Cannot allocate memory",
    "can't start new thread",
    "failed to map segment from shared object",
    "could not execute a primitive",
    "OpenBLAS error: Memory allocation still failed",
    "OpenBLAS blas_thread_init: pthread_create failed",
)


class Parent(NamedTuple):
    """Ancestor of this process, with its command line."""

    process: psutil.Process
    words: list[str]  # command line, or [""] if the command line is hidden

    def launcher(self, within: int | None = None) -> str:
        """Return the launcher or launcher module in the first `within` words of a Python command, or ""."""
        python, *names = (Path(word).name for word in self.words[:within])
        launcher_names = (name for name in names if name in LAUNCHERS or name.startswith(LAUNCHER_MODULES))
        return next(launcher_names, "") if python.startswith("python") else ""

    def flag(self, pattern: str) -> str:
        """Return the value of the first flag whose name matches the pattern, or an empty string."""
        match = re.search(rf"\0--?{pattern}[=\0]([^\0]*)", "\0".join(self.words))
        return match[1] if match else ""


@cache
def parents() -> list[Parent]:
    """Return this process's ancestors at the time of the first call, starting with the parent.

    The list is never empty.
    """
    ancestors = [Parent(psutil.Process(), [""])]
    with contextlib.suppress(psutil.Error):  # raised if an ancestor ends during the query
        while process := ancestors[-1].process.parent():
            ancestors.append(Parent(process, process.cmdline() or [""]))
    return ancestors[1:] or ancestors


def launchers() -> list[psutil.Process]:
    """Return the launchers among this process's ancestors.

    Shells and tests are excluded because they may end earlier than the launcher. The `deepspeed` command runs
    two launcher processes.
    """
    return [parent.process for parent in takewhile(lambda parent: parent.launcher(within=4), parents())]


def is_orphan() -> bool:
    """Return True if the launcher died while this process imported modules.

    A process is an orphan if the launcher's environment variables are set but the launcher is not running. In
    a container without an init process, a running launcher is PID 1. This function recognizes a launcher by
    the command line, because torchrun renames its main thread.
    """
    parent, command_line = parents()[0]  # parents() may have run before or after the launcher died
    is_launcher = parent.pid == 1 and Path(command_line[0]).name.startswith(("python", "bash", "sh"))
    return os.getppid() == 1 and not is_launcher and any(name in os.environ for name in SET_BY_LAUNCHERS)


def deaf_launcher() -> str | None:
    """Return a warning if SIGTERM to this container would not save a checkpoint, otherwise None.

    The kernel does not deliver a signal to a container's PID 1 if PID 1 has no handler for the signal.
    `deepspeed`, and `accelerate launch` with one process, do not handle SIGTERM. Outside of a container, the
    result is always None.
    """
    if not any(process.pid == 1 for process in launchers()):
        return None
    caught_signals = re.search(r"^SigCgt:\s*(\w+)", Path("/proc/1/status").read_text(), re.MULTILINE)
    if caught_signals and int(caught_signals[1], 16) & 1 << (signal.SIGTERM - 1):
        return None
    return (
        "warning: SIGTERM to this container (docker stop, Kubernetes) will not save a checkpoint, because the"
        " launcher is process 1 and does not handle SIGTERM. Use docker run --init, or start the job with"
        " torchrun."
    )


def accelerate_config() -> dict[str, Any]:
    """Return the content of `accelerate launch`'s config file (--config_file or the default), or {}."""
    from accelerate.commands.config.config_args import default_config_file

    for parent in parents():
        if parent.launcher().startswith("accelerate"):
            with contextlib.suppress(psutil.Error):
                file = Path(parent.process.cwd(), parent.flag("config[_-]file") or default_config_file)
                return read_yaml("--config_file", file) if file.is_file() else {}
    return {}


def is_alive(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:  # raised if the process ends between the two calls
        return False


def start_ticks(pid: int) -> int | None:
    """Return a process's start time in clock ticks since boot, or None if /proc does not list the process.

    The start time is field 22 in /proc/PID/stat (proc(5)). psutil's create_time adds the boot time, which
    changes when someone sets the machine's clock.
    """
    try:
        return int(_stat_fields(pid)[19])
    except (OSError, ValueError, IndexError):
        return None


def is_running(pid: int, ticks: int | None) -> bool:
    """Return True if the process with this PID and start_ticks() is running.

    Zombies do not count as running.
    """
    try:
        return start_ticks(pid) == ticks is not None and _stat_fields(pid)[0] not in (b"Z", b"X")
    except (OSError, IndexError):
        return False


def _stat_fields(pid: int) -> list[bytes]:
    """Return all fields after the second in /proc/PID/stat. The second field may contain any characters."""
    return Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()


def own_age_s() -> float:
    """Return this process's uptime in seconds, including the time spent on imports."""
    started_s = int(_stat_fields(os.getpid())[19]) / os.sysconf("SC_CLK_TCK")
    return time.clock_gettime(time.CLOCK_BOOTTIME) - started_s


def is_under_nohup() -> bool:
    """Return True if this process ignored SIGHUP from its start.

    Call this function before installing handlers.
    """
    return signal.getsignal(signal.SIGHUP) == signal.SIG_IGN


def allowed_cores(groups: Path = Path("/proc/self/cgroup"), root: Path = Path("/sys/fs/cgroup")) -> int:
    """Return the number of cores that this process may use under its CPU affinity and CPU quota."""
    cores = len(os.sched_getaffinity(0))
    return max(1, int(min([cores, *_cpu_quotas(groups, root)])))


def _cpu_quotas(cgroup_file: Path, cgroup_root: Path) -> Iterator[float]:
    """Yield the CPU quotas of this process's control groups and their parents, in cores (cgroups(7))."""
    for line in cgroup_file.read_text().splitlines() if cgroup_file.exists() else ():
        _, controllers, cgroup = line.split(":", 2)
        is_v1 = "cpu" in controllers.split(",")
        if controllers and not is_v1:
            continue
        for path in (Path(cgroup), *Path(cgroup).parents):
            folder = cgroup_root / ("cpu" if is_v1 else "") / str(path).lstrip("/")
            file_names = ("cpu.cfs_quota_us", "cpu.cfs_period_us") if is_v1 else ("cpu.max",)
            # inside a container, the root is the container's control group
            with contextlib.suppress(OSError):
                quota, period = " ".join((folder / file_name).read_text() for file_name in file_names).split()
                if quota not in ("max", "-1"):
                    yield int(quota) / int(period)


def end_with_parent() -> None:
    """Make the kernel send SIGTERM to this process when the parent process dies, even after SIGKILL."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)


def adopt_orphans(adopt: bool = True) -> None:
    """Make this process the parent of orphaned descendants, so that it can find them."""
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, int(adopt))


def running_descendants(excluded_pids: Collection[int] = ()) -> list[psutil.Process]:
    """Return all running descendants of this process, except `excluded_pids`. Reap adopted zombies."""
    descendants = []
    for process in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.Error, ChildProcessError):
            if process.pid in excluded_pids:
                continue
            if process.status() != psutil.STATUS_ZOMBIE:
                descendants.append(process)
            elif process.ppid() == os.getpid():
                os.waitpid(process.pid, os.WNOHANG)
    return descendants


def kill(processes: Collection[psutil.Process]) -> None:
    """Send SIGKILL to each process that still exists."""
    for process in processes:
        with contextlib.suppress(psutil.Error):
            process.kill()


def says_out_of_memory(text: str, is_limited: bool = False) -> bool:
    """Return True if an error message or a failed process's output reports that memory ran out.

    Args:
        text: Error message or output.
        is_limited: True if the process had a memory limit.
    """
    messages = OUT_OF_MEMORY_MESSAGES + (LIMITED_MEMORY_MESSAGES if is_limited else ())
    return any(message in text for message in messages)


# --- Network


def interface_to(address: str) -> tuple[str, str]:
    """Return the network interface on the route to an IPv4 address, and this host's address on the interface.

    If the address belongs to this host, return the interface with this address. The launchers' rendezvous
    does not support IPv6 either.

    Raises:
        ValueError: If this host has no route to the address.
    """
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.connect((address, 9))  # does not send a packet
            local_address = probe.getsockname()[0]
    except OSError as error:
        problem = f"this host has no IPv4 route to {address} ({error.strerror or error})"
        if isinstance(error, socket.gaierror):
            problem = f"{problem}. Set --master_addr to an IPv4 address"
        raise ValueError(problem) from None
    for name, addresses in psutil.net_if_addrs().items():
        if any(interface_address.address == local_address for interface_address in addresses):
            return name, local_address
    raise ValueError(
        f"the route to {address} uses the local address {local_address}, but no interface has this address"
    )


def interface_problem(env: Mapping[str, str], with_nccl: bool) -> str | None:
    """Return the reason why a variable does not match an interface for gloo or NCCL, or None if both match.

    GLOO_SOCKET_IFNAME contains interface names. NCCL_SOCKET_IFNAME contains prefixes of names, full names
    after "=", or names to exclude after "^".
    """
    interfaces = psutil.net_if_addrs()
    problem = (
        f"matches no network interface on this host ({', '.join(interfaces)}). Set the variable to one of"
        " these interfaces, or unset the variable."
    )
    gloo, nccl = env.get("GLOO_SOCKET_IFNAME", ""), env.get("NCCL_SOCKET_IFNAME", "")
    if not {*gloo.split(",")} <= interfaces.keys() | {""}:
        return f"GLOO_SOCKET_IFNAME={gloo} {problem}"
    nccl_patterns = nccl.removeprefix("^").removeprefix("=").split(",")
    is_exact = nccl.removeprefix("^").startswith("=")
    if is_exact:
        matches = {name for name in interfaces if name in nccl_patterns}
    else:
        matches = {name for name in interfaces if name.startswith(tuple(nccl_patterns))}
    usable = interfaces.keys() - matches if nccl.startswith("^") else matches
    if with_nccl and not usable:
        return f"NCCL_SOCKET_IFNAME={nccl} {problem}"
    return None


def use_interface(name: str) -> dict[str, str]:
    """Return environment variables that make gloo and NCCL use a network interface."""
    # The character "=" makes NCCL compare full names instead of prefixes.
    return {"GLOO_SOCKET_IFNAME": name, "NCCL_SOCKET_IFNAME": f"={name}"}


def own_addresses() -> set[str]:
    all_addresses = chain.from_iterable(psutil.net_if_addrs().values())
    return {interface_address.address for interface_address in all_addresses}


def listening_process(port: int) -> str:
    """Describe the process that listens on a port, for example as ` by process 12, python x.py`.

    The text is empty if the operating system hides the process.
    """
    with contextlib.suppress(psutil.Error):
        for connection in psutil.net_connections("tcp"):
            is_listener = connection.status == psutil.CONN_LISTEN and connection.pid
            if is_listener and connection.laddr and connection.laddr.port == port:
                command = shlex.join(psutil.Process(connection.pid).cmdline())
                return f" by process {connection.pid}, {command[:80]}"
    return ""
