"""Processes of this host, and its network: start times, launchers above, descendants, interfaces."""

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
SET_BY_LAUNCHERS = ("TORCHELASTIC_RUN_ID", "ACCELERATE_DYNAMO_BACKEND", "CROSS_RANK")  # rarely by hand
NO_MEMORY = (  # in an error, or in the output of a failed process
    "out of memory",  # torch and CUDA
    "ALLOC_FAILED",  # cuBLAS, cuDNN 8
    "ALLOCATION_FAILED",  # cuDNN 9, of the device or the host
    "CUBLAS_STATUS_NOT_INITIALIZED",  # no room for cuBLAS's handle
    "unable to find an engine to execute this computation",  # cuDNN: no room for any engine's workspace
    "CUDA calloc",  # NCCL
    "can't allocate memory",  # torch on a CPU
    "Storage size calculation overflowed",  # torch: more bytes than a number of 64 bits can count
    "could not create a primitive",  # oneDNN
)
NO_MEMORY_WHERE_LIMITED = (  # only under a limit on a process's memory, from other allocators than torch's
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
    """A process above this one, and its command line as it was typed; an empty word where it is hidden."""

    process: psutil.Process
    words: list[str]

    def launcher(self, within: int | None = None) -> str:
        """The launcher or its module that Python runs, named in the first `within` words; else empty."""
        python, *names = (Path(word).name for word in self.words[:within])
        known = (name for name in names if name in LAUNCHERS or name.startswith(LAUNCHER_MODULES))
        return next(known, "") if python.startswith("python") else ""

    def flag(self, pattern: str) -> str:
        """The value of the first flag whose name matches; empty without it."""
        found = re.search(rf"\0--?{pattern}[=\0]([^\0]*)", "\0".join(self.words))
        return found[1] if found else ""


@cache
def parents() -> list[Parent]:
    """The processes above this one, the nearest first, as they were at the first call. Never empty."""
    found = [Parent(psutil.Process(), [""])]
    with contextlib.suppress(psutil.Error):  # one has just ended
        while process := found[-1].process.parent():
            found.append(Parent(process, process.cmdline() or [""]))
    return found[1:] or found


def launchers() -> list[psutil.Process]:
    """The launchers above this process, not a shell or a test, which may end first. `deepspeed` has two."""
    return [parent.process for parent in takewhile(lambda parent: parent.launcher(within=4), parents())]


def is_orphan() -> bool:
    """True if the launcher died while this process imported: its variables are set, but it is gone.

    In a container without an init the launcher is process 1. It is known by its command line: torchrun gives
    its main thread another name.
    """
    parent, words = parents()[0]  # as read before or after the launcher died
    is_launcher = parent.pid == 1 and Path(words[0]).name.startswith(("python", "bash", "sh"))
    return os.getppid() == 1 and not is_launcher and any(name in os.environ for name in SET_BY_LAUNCHERS)


def deaf_launcher() -> str | None:
    """Why SIGTERM to this container saves nothing; None if it does, and outside of a container.

    The kernel drops a signal to process 1 that has no handler for it. `accelerate launch` of one process and
    `deepspeed` have none.
    """
    if not any(process.pid == 1 for process in launchers()):
        return None
    caught = re.search(r"^SigCgt:\s*(\w+)", Path("/proc/1/status").read_text(), re.MULTILINE)
    if caught and int(caught[1], 16) & 1 << (signal.SIGTERM - 1):
        return None
    return (
        "warning: SIGTERM to this container (docker stop, Kubernetes) saves nothing: the launcher, process 1,"
        " has no handler for it: give docker run --init, or start with torchrun"
    )


def accelerate_config() -> dict[str, Any]:
    """The config file of `accelerate launch` above this process: of --config_file, else the default one."""
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
    except psutil.NoSuchProcess:  # it ended between the two
        return False


def start_ticks(pid: int) -> int | None:
    """The process's start time in clock ticks since the boot; None without such a process, or /proc.

    It is field 22 of /proc/PID/stat (proc(5)). psutil's create_time adds the time of the boot, which changes
    when the machine's clock is set.
    """
    try:
        return int(_stat(pid)[19])
    except (OSError, ValueError, IndexError):
        return None


def is_running(pid: int, ticks: int | None) -> bool:
    """True if the process that started at these start_ticks() has not ended. A zombie has ended."""
    try:
        return start_ticks(pid) == ticks is not None and _stat(pid)[0] not in (b"Z", b"X")
    except (OSError, IndexError):
        return False


def _stat(pid: int) -> list[bytes]:
    """The fields of /proc/PID/stat from the third on. (The name before them may contain anything.)"""
    return Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()


def own_age_s() -> float:
    """Seconds since this process started, imports included."""
    started_s = int(_stat(os.getpid())[19]) / os.sysconf("SC_CLK_TCK")
    return time.clock_gettime(time.CLOCK_BOOTTIME) - started_s


def is_under_nohup() -> bool:
    """True if this process was started with SIGHUP ignored. Call it before installing a handler."""
    return signal.getsignal(signal.SIGHUP) == signal.SIG_IGN


def allowed_cores(groups: Path = Path("/proc/self/cgroup"), root: Path = Path("/sys/fs/cgroup")) -> int:
    """Cores that this process may use: by its affinity, and by the CPU quota of its container."""
    cores = len(os.sched_getaffinity(0))
    return max(1, int(min([cores, *_quotas(groups, root)])))


def _quotas(groups: Path, root: Path) -> Iterator[float]:
    """The limits of this process's control groups, and of those above them, in cores (cgroups(7))."""
    for line in groups.read_text().splitlines() if groups.exists() else ():
        _, controllers, group = line.split(":", 2)
        is_first = "cpu" in controllers.split(",")  # version 1 of the interface
        if controllers and not is_first:
            continue
        for path in (Path(group), *Path(group).parents):
            folder = root / ("cpu" if is_first else "") / str(path).lstrip("/")
            names = ("cpu.cfs_quota_us", "cpu.cfs_period_us") if is_first else ("cpu.max",)
            with contextlib.suppress(OSError):  # a container shows its own group as the root
                quota, period = " ".join((folder / name).read_text() for name in names).split()
                if quota not in ("max", "-1"):
                    yield int(quota) / int(period)


def end_with_parent() -> None:
    """Asks the kernel to send SIGTERM to this process when its parent dies, also by SIGKILL."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)


def adopt_orphans(adopt: bool = True) -> None:
    """Makes orphaned descendants children of this process instead of init, so that it can find them."""
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, int(adopt))


def running_descendants(but: Collection[int] = ()) -> list[psutil.Process]:
    """Processes below this one, except the pids in `but`. Reaps zombies that this process has adopted."""
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
    """Sends SIGKILL to each process that still exists."""
    for process in processes:
        with contextlib.suppress(psutil.Error):
            process.kill()


def says_out_of_memory(text: str, is_limited: bool = False) -> bool:
    """True if an error or a failed process's output has such a message. is_limited: memory had a limit."""
    return any(message in text for message in (*NO_MEMORY, *(NO_MEMORY_WHERE_LIMITED if is_limited else ())))


# Its network


def interface_to(address: str) -> tuple[str, str]:
    """The interface with the route to an address, and this host's address on it.

    For an address of this host, the interface that has it. IPv4 only, like the launchers' rendezvous.
    ValueError if there is no route.
    """
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.connect((address, 9))  # sends nothing
            mine = probe.getsockname()[0]
    except OSError as error:
        hint = ": give --master_addr with an IPv4 address" if isinstance(error, socket.gaierror) else ""
        raise ValueError(f"no IPv4 route to {address} ({error.strerror or error}){hint}") from None
    for name, addresses in psutil.net_if_addrs().items():
        if any(known.address == mine for known in addresses):
            return name, mine
    raise ValueError(f"no interface has the address {mine}, from which {address} is reached")


def interface_problem(env: Mapping[str, str], with_nccl: bool) -> str | None:
    """Why gloo, or NCCL, can't use the interface that its variable names; None if it can.

    gloo takes names. NCCL takes beginnings of names, after = whole names, and after ^ those to leave out.
    """
    there = psutil.net_if_addrs()
    gloo, nccl = env.get("GLOO_SOCKET_IFNAME", ""), env.get("NCCL_SOCKET_IFNAME", "")
    if not {*gloo.split(",")} <= there.keys() | {""}:
        return (
            f"GLOO_SOCKET_IFNAME={gloo}: this host's interfaces are {', '.join(there)}: name one, or unset it"
        )
    words = nccl.removeprefix("^").removeprefix("=").split(",")
    is_exact = nccl.removeprefix("^").startswith("=")
    named = {
        name for name in there for word in words if (name == word if is_exact else name.startswith(word))
    }
    if with_nccl and not (there.keys() - named if nccl.startswith("^") else named):
        return (
            f"NCCL_SOCKET_IFNAME={nccl}: this host's interfaces are {', '.join(there)}: name one, or unset it"
        )
    return None


def use_interface(name: str) -> dict[str, str]:
    """Environment variables that make gloo and NCCL use this interface."""
    return {"GLOO_SOCKET_IFNAME": name, "NCCL_SOCKET_IFNAME": f"={name}"}  # without = NCCL matches a prefix


def own_addresses() -> set[str]:
    return {known.address for addresses in psutil.net_if_addrs().values() for known in addresses}


def listening_process(port: int) -> str:
    """The process that listens on the port, as ` by process 12, python x.py`; empty if it is not visible."""
    with contextlib.suppress(psutil.Error):
        for known in psutil.net_connections("tcp"):
            if known.status == psutil.CONN_LISTEN and known.laddr and known.laddr.port == port and known.pid:
                command = shlex.join(psutil.Process(known.pid).cmdline())
                return f" by process {known.pid}, {command[:80]}"
    return ""
