"""Inspects this host's processes (launchers, descendants, memory limits) and network interfaces."""

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
from itertools import takewhile
from pathlib import Path
from typing import Any, NamedTuple

import psutil

from onecurve.system.files import read_yaml

PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36  # prctl(2)
LAUNCHERS = ("accelerate", "accelerate-launch", "deepspeed", "torchrun", "launch.py")
LAUNCHER_MODULES = ("accelerate.commands.", "deepspeed.launcher.", "torch.distributed.")
# Variables that launchers set but users rarely set
SET_BY_LAUNCHERS = ("TORCHELASTIC_RUN_ID", "ACCELERATE_DYNAMO_BACKEND", "CROSS_RANK")
NO_MEMORY = (  # messages about exhausted memory, in an error or in the output of a failed process
    "out of memory",  # message of torch and CUDA
    "ALLOC_FAILED",  # cuBLAS, cuDNN 8
    "ALLOCATION_FAILED",  # cuDNN 9, device or host memory
    "CUBLAS_STATUS_NOT_INITIALIZED",  # not enough memory for cuBLAS's handle
    # Message of cuDNN if no engine's workspace fits into memory
    "unable to find an engine to execute this computation",
    "CUDA calloc",  # NCCL
    "can't allocate memory",  # torch on a CPU
    "Storage size calculation overflowed",  # torch: number of bytes exceeds 64 bits
    "could not create a primitive",  # oneDNN
)
# Messages from allocators other than torch's; meaningful only if the process's memory is limited
NO_MEMORY_WHERE_LIMITED = (
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
    words: list[str]  # command line; [""] if the command line is hidden

    def launcher(self, within: int | None = None) -> str:
        """Return the launcher or module that Python runs, from the first `within` words, or ""."""
        python, *names = (Path(word).name for word in self.words[:within])
        launcher_names = (n for n in names if n in LAUNCHERS or n.startswith(LAUNCHER_MODULES))
        return next(launcher_names, "") if python.startswith("python") else ""

    def flag(self, pattern: str) -> str:
        """Return the value of the first flag that matches the name pattern, or an empty string."""
        match = re.search(rf"\0--?{pattern}[=\0]([^\0]*)", "\0".join(self.words))
        return match[1] if match else ""


@cache
def parents() -> list[Parent]:
    """Return this process's ancestors as of the first call, nearest first. The list is never empty."""
    chain = [Parent(psutil.Process(), [""])]
    with contextlib.suppress(psutil.Error):  # an ancestor ended during the query
        while process := chain[-1].process.parent():
            chain.append(Parent(process, process.cmdline() or [""]))
    return chain[1:] or chain


def launchers() -> list[psutil.Process]:
    """Return the launchers among this process's ancestors, without shells and tests.

    Shells and tests are omitted because they may end earlier. The `deepspeed` command runs two launcher
    processes.
    """
    return [parent.process for parent in takewhile(lambda parent: parent.launcher(within=4), parents())]


def is_orphan() -> bool:
    """Return True if the launcher died during this process's imports.

    In this case, the launcher's variables are set but the launcher no longer runs. In a container without an
    init process, the launcher is process 1. The launcher is recognized by its command line, because torchrun
    renames its main thread.
    """
    parent, words = parents()[0]  # read before or after the launcher died
    is_launcher = parent.pid == 1 and Path(words[0]).name.startswith(("python", "bash", "sh"))
    return os.getppid() == 1 and not is_launcher and any(name in os.environ for name in SET_BY_LAUNCHERS)


def deaf_launcher() -> str | None:
    """Return a warning if SIGTERM to this container would not save a checkpoint, or else None.

    The result is always None outside of a container. In a container, the kernel drops signals to process 1
    for which this process has no handler. `deepspeed`, and `accelerate launch` with one process, have no
    handler for SIGTERM.
    """
    if not any(process.pid == 1 for process in launchers()):
        return None
    caught = re.search(r"^SigCgt:\s*(\w+)", Path("/proc/1/status").read_text(), re.MULTILINE)
    if caught and int(caught[1], 16) & 1 << (signal.SIGTERM - 1):
        return None
    return (
        "warning: SIGTERM to this container (docker stop, Kubernetes) saves nothing, because the launcher,"
        " process 1, has no handler for it. Use docker run --init, or start with torchrun."
    )


def accelerate_config() -> dict[str, Any]:
    """Return the config of the `accelerate launch` above this process: --config_file or the default."""
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
    except psutil.NoSuchProcess:  # the process ended between the two calls
        return False


def start_ticks(pid: int) -> int | None:
    """Return a process's start time in clock ticks since boot, or None without the process or /proc.

    This is field 22 of /proc/PID/stat (proc(5)). psutil's create_time adds the boot time, which changes when
    the machine's clock is set.
    """
    try:
        return int(_stat(pid)[19])
    except (OSError, ValueError, IndexError):
        return None


def is_running(pid: int, ticks: int | None) -> bool:
    """Return True if the process with this start_ticks() value is running. A zombie counts as ended."""
    try:
        return start_ticks(pid) == ticks is not None and _stat(pid)[0] not in (b"Z", b"X")
    except (OSError, IndexError):
        return False


def _stat(pid: int) -> list[bytes]:
    """Return the fields of /proc/PID/stat from the third on. The second field may contain any characters."""
    return Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()


def own_age_s() -> float:
    """Return the seconds since this process started, including its imports."""
    started_s = int(_stat(os.getpid())[19]) / os.sysconf("SC_CLK_TCK")
    return time.clock_gettime(time.CLOCK_BOOTTIME) - started_s


def is_under_nohup() -> bool:
    """Return True if this process was started with SIGHUP ignored. Call this before installing a handler."""
    return signal.getsignal(signal.SIGHUP) == signal.SIG_IGN


def allowed_cores(groups: Path = Path("/proc/self/cgroup"), root: Path = Path("/sys/fs/cgroup")) -> int:
    """Return the number of cores that this process may use under its affinity and the CPU quota."""
    cores = len(os.sched_getaffinity(0))
    return max(1, int(min([cores, *_quotas(groups, root)])))


def _quotas(groups: Path, root: Path) -> Iterator[float]:
    """Yield the limits of this process's control groups and their ancestors, in cores (cgroups(7))."""
    for line in groups.read_text().splitlines() if groups.exists() else ():
        _, controllers, group = line.split(":", 2)
        is_v1 = "cpu" in controllers.split(",")
        if controllers and not is_v1:
            continue
        for path in (Path(group), *Path(group).parents):
            folder = root / ("cpu" if is_v1 else "") / str(path).lstrip("/")
            names = ("cpu.cfs_quota_us", "cpu.cfs_period_us") if is_v1 else ("cpu.max",)
            with contextlib.suppress(OSError):  # inside a container, the container's group is the root
                quota, period = " ".join((folder / name).read_text() for name in names).split()
                if quota not in ("max", "-1"):
                    yield int(quota) / int(period)


def end_with_parent() -> None:
    """Ask the kernel to send SIGTERM to this process when its parent dies, even by SIGKILL."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)


def adopt_orphans(adopt: bool = True) -> None:
    """Make orphaned descendants children of this process instead of init, so that they can be found."""
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, int(adopt))


def running_descendants(but: Collection[int] = ()) -> list[psutil.Process]:
    """Return this process's descendants, except the pids in `but`. Reap adopted zombies."""
    running = []
    for process in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.Error, ChildProcessError):
            if process.pid in but:
                continue
            if process.status() != psutil.STATUS_ZOMBIE:
                running.append(process)
            elif process.ppid() == os.getpid():
                os.waitpid(process.pid, os.WNOHANG)
    return running


def kill(processes: Collection[psutil.Process]) -> None:
    """Send SIGKILL to each process that still exists."""
    for process in processes:
        with contextlib.suppress(psutil.Error):
            process.kill()


def says_out_of_memory(text: str, is_limited: bool = False) -> bool:
    """Return True if the text (an error or a failed process's output) reports that memory ran out.

    is_limited: True if the process's memory was limited.
    """
    return any(message in text for message in (*NO_MEMORY, *(NO_MEMORY_WHERE_LIMITED if is_limited else ())))


# --- Network


def interface_to(address: str) -> tuple[str, str]:
    """Return the interface that routes to an address, and this host's address on the interface.

    If the address belongs to this host, return the interface with this address. Only IPv4 is supported, as in
    the launchers' rendezvous.

    Raises:
        ValueError: If there is no route.
    """
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.connect((address, 9))  # sends nothing
            local_address = probe.getsockname()[0]
    except OSError as error:
        hint = ". Set --master_addr to an IPv4 address" if isinstance(error, socket.gaierror) else ""
        raise ValueError(f"no IPv4 route to {address} ({error.strerror or error}){hint}") from None
    for name, addresses in psutil.net_if_addrs().items():
        if any(known.address == local_address for known in addresses):
            return name, local_address
    raise ValueError(f"the route to {address} starts at {local_address}, which no interface has")


def interface_problem(env: Mapping[str, str], with_nccl: bool) -> str | None:
    """Return why gloo or NCCL can't use the interface named by its variable, or None if both can.

    gloo expects interface names. NCCL expects name prefixes, or full names after "=", or names to exclude
    after "^".
    """
    interfaces = psutil.net_if_addrs()
    problem = f"matches no interface of this host ({', '.join(interfaces)}). Name one of them, or unset it."
    gloo, nccl = env.get("GLOO_SOCKET_IFNAME", ""), env.get("NCCL_SOCKET_IFNAME", "")
    if not {*gloo.split(",")} <= interfaces.keys() | {""}:
        return f"GLOO_SOCKET_IFNAME={gloo} {problem}"
    words = nccl.removeprefix("^").removeprefix("=").split(",")
    is_exact = nccl.removeprefix("^").startswith("=")
    matches = {
        name for name in interfaces for word in words if (name == word if is_exact else name.startswith(word))
    }
    if with_nccl and not (interfaces.keys() - matches if nccl.startswith("^") else matches):
        return f"NCCL_SOCKET_IFNAME={nccl} {problem}"
    return None


def use_interface(name: str) -> dict[str, str]:
    """Return environment variables that make gloo and NCCL use this interface."""
    # "=" makes NCCL match whole names.
    return {"GLOO_SOCKET_IFNAME": name, "NCCL_SOCKET_IFNAME": f"={name}"}


def own_addresses() -> set[str]:
    return {known.address for addresses in psutil.net_if_addrs().values() for known in addresses}


def listening_process(port: int) -> str:
    """Describe the process that listens on a port, for example ` by process 12, python x.py`.

    Return an empty string if the process is hidden.
    """
    with contextlib.suppress(psutil.Error):
        for known in psutil.net_connections("tcp"):
            if known.status == psutil.CONN_LISTEN and known.laddr and known.laddr.port == port and known.pid:
                command = shlex.join(psutil.Process(known.pid).cmdline())
                return f" by process {known.pid}, {command[:80]}"
    return ""
