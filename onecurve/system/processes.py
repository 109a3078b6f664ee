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

PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36  # numbers of operations of prctl(2)
START_TIME_INDEX = 19  # index of a process's start time in the result of _stat_fields()
PROBE_PORT = 9  # the discard service; interface_to() sends no packet to this port
LAUNCHERS = ("accelerate", "accelerate-launch", "deepspeed", "torchrun", "launch.py")  # program names
LAUNCHER_MODULES = ("accelerate.commands.", "deepspeed.launcher.", "torch.distributed.")  # module prefixes
# Environment variables that launchers set and that users rarely set
LAUNCHER_VARIABLES = ("TORCHELASTIC_RUN_ID", "ACCELERATE_DYNAMO_BACKEND", "CROSS_RANK")
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


class Ancestor(NamedTuple):
    """Ancestor of this process, with its command line."""

    process: psutil.Process  # the ancestor
    words: list[str]  # command line, or [""] if the command line is hidden

    def launcher_name(self, within: int | None = None) -> str:
        """Return the launcher or launcher module in the first `within` words of a Python command, or ""."""
        program_name, *argument_names = (Path(command_word).name for command_word in self.words[:within])
        if not program_name.startswith("python"):
            return ""  # not a Python command
        for argument_name in argument_names:
            if argument_name in LAUNCHERS or argument_name.startswith(LAUNCHER_MODULES):
                return argument_name
        return ""  # not a launcher

    def flag_value(self, name_pattern: str) -> str:
        """Return the value of the first flag whose name matches the pattern, or an empty string."""
        command_line = "\0".join(self.words)  # words can contain spaces, but no null characters
        flag_match = re.search(rf"\0--?{name_pattern}[=\0]([^\0]*)", command_line)
        return flag_match[1] if flag_match else ""


@cache
def ancestors() -> list[Ancestor]:
    """Return this process's ancestors at the time of the first call, starting with the parent.

    The list is never empty.
    """
    process_and_ancestors = [Ancestor(psutil.Process(), [""])]
    with contextlib.suppress(psutil.Error):  # raised if an ancestor ends during the query
        while parent_process := process_and_ancestors[-1].process.parent():
            process_and_ancestors.append(Ancestor(parent_process, parent_process.cmdline() or [""]))
    return process_and_ancestors[1:] or process_and_ancestors


def launchers() -> list[psutil.Process]:
    """Return the launchers among this process's ancestors.

    Shells and tests are excluded because they may end earlier than the launcher. The `deepspeed` command runs
    two launcher processes.
    """
    # The launcher is among the first words, as in `python -u -m torch.distributed.run`. A script's arguments
    # may also contain the name of a launcher.
    launcher_ancestors = takewhile(lambda ancestor: ancestor.launcher_name(within=4), ancestors())
    return [ancestor.process for ancestor in launcher_ancestors]


def is_orphan() -> bool:
    """Return True if the launcher died while this process imported modules.

    A process is an orphan if the launcher's environment variables are set but the launcher is not running. In
    a container without an init process, a running launcher is PID 1. This function recognizes a launcher by
    the command line, because torchrun renames its main thread.
    """
    parent, *_ = ancestors()  # ancestors() may have run before or after the launcher died
    program_name = Path(parent.words[0]).name
    is_pid_1_launcher = parent.process.pid == 1 and program_name.startswith(("python", "bash", "sh"))
    was_launched = any(launcher_variable in os.environ for launcher_variable in LAUNCHER_VARIABLES)
    return os.getppid() == 1 and not is_pid_1_launcher and was_launched


def launcher_sigterm_warning() -> str | None:
    """Return a warning if SIGTERM to this container would not save a checkpoint, otherwise None.

    The kernel does not deliver a signal to a container's PID 1 if PID 1 has no handler for the signal.
    `deepspeed`, and `accelerate launch` with one process, do not handle SIGTERM. Outside of a container, the
    result is always None.
    """
    if not any(launcher_process.pid == 1 for launcher_process in launchers()):
        return None  # the launcher is not PID 1
    launcher_status = Path("/proc/1/status").read_text()
    caught_signals = re.search(r"^SigCgt:\s*(\w+)", launcher_status, re.MULTILINE)  # hexadecimal bit mask
    if caught_signals and int(caught_signals[1], 16) & 1 << (signal.SIGTERM - 1):
        return None  # the launcher handles SIGTERM
    return (
        "warning: SIGTERM to this container (docker stop, Kubernetes) will not save a checkpoint,"
        " because the launcher is process 1 and does not handle SIGTERM."
        " Use docker run --init, or start the job with torchrun."
    )


def accelerate_config() -> dict[str, Any]:
    """Return the content of `accelerate launch`'s config file (--config_file or the default), or {}."""
    from accelerate.commands.config.config_args import default_config_file

    for ancestor in ancestors():
        if ancestor.launcher_name().startswith("accelerate"):
            with contextlib.suppress(psutil.Error):
                config_argument = ancestor.flag_value("config[_-]file")
                config_path = Path(ancestor.process.cwd(), config_argument or default_config_file)
                return read_yaml("--config_file", config_path) if config_path.is_file() else {}
    return {}  # `accelerate launch` did not start this process, or is hidden


def is_alive(process: psutil.Process) -> bool:
    """Return True if a process is running and not a zombie."""
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
        return int(_stat_fields(pid)[START_TIME_INDEX])
    except (OSError, ValueError, IndexError):
        return None  # the process has ended


def is_running(pid: int, expected_ticks: int | None) -> bool:
    """Return True if the process with this PID is running and its start_ticks() are `expected_ticks`.

    A new process with the same PID has other ticks. Zombies do not count as running.
    """
    try:
        process_state, *_ = _stat_fields(pid)
        has_ended = process_state in (b"Z", b"X")  # zombie or dead
        is_same_process = expected_ticks is not None and start_ticks(pid) == expected_ticks
        return is_same_process and not has_ended
    except (OSError, ValueError):
        return False  # the process has ended


def _stat_fields(pid: int) -> list[bytes]:
    """Return all fields after the second in /proc/PID/stat. The second field may contain any characters."""
    _, _, later_fields = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")
    return later_fields.split()


def process_uptime_s() -> float:
    """Return this process's uptime in seconds, including the time spent on imports."""
    started_s = int(_stat_fields(os.getpid())[START_TIME_INDEX]) / os.sysconf("SC_CLK_TCK")
    return time.clock_gettime(time.CLOCK_BOOTTIME) - started_s  # both in seconds since boot


def is_under_nohup() -> bool:
    """Return True if this process ignored SIGHUP from its start.

    Call this function before installing handlers.
    """
    return signal.getsignal(signal.SIGHUP) == signal.SIG_IGN


def allowed_cores(
    cgroup_file: Path = Path("/proc/self/cgroup"), cgroup_root: Path = Path("/sys/fs/cgroup")
) -> int:
    """Return the number of cores that this process may use under its CPU affinity and CPU quota."""
    affinity_cores = len(os.sched_getaffinity(0))
    return max(1, int(min([affinity_cores, *_cpu_quotas(cgroup_file, cgroup_root)])))


def _cpu_quotas(cgroup_file: Path, cgroup_root: Path) -> Iterator[float]:
    """Yield the CPU quotas of this process's control groups and their parents, in cores (cgroups(7))."""
    for cgroup_line in cgroup_file.read_text().splitlines() if cgroup_file.exists() else ():
        _, controllers, process_cgroup = cgroup_line.split(":", 2)  # cgroup v2 lists no controllers
        is_cgroup_v1 = "cpu" in controllers.split(",")
        if controllers and not is_cgroup_v1:
            continue  # a control group without CPU quotas
        quota_file_names = ("cpu.cfs_quota_us", "cpu.cfs_period_us") if is_cgroup_v1 else ("cpu.max",)
        for cgroup_path in (Path(process_cgroup), *Path(process_cgroup).parents):
            quota_folder = cgroup_root / ("cpu" if is_cgroup_v1 else "") / str(cgroup_path).lstrip("/")
            # In a container, whose own control group is the root, the path on the host may be missing.
            with contextlib.suppress(OSError):
                quota_texts = [(quota_folder / file_name).read_text() for file_name in quota_file_names]
                quota_us, period_us = " ".join(quota_texts).split()
                if quota_us not in ("max", "-1"):  # these values mean no limit
                    yield int(quota_us) / int(period_us)


def end_with_parent() -> None:
    """Make the kernel send SIGTERM to this process when the parent process dies, even after SIGKILL."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)


def adopt_orphans(adopt: bool = True) -> None:
    """Make this process the parent of its orphaned descendants, so that it can list them.

    `adopt=False` restores the default, in which another process adopts them.
    """
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, int(adopt))


def running_descendants(excluded_pids: Collection[int] = ()) -> list[psutil.Process]:
    """Return all running descendants of this process, except `excluded_pids`. Reap adopted zombies."""
    descendants = []
    for descendant in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.Error, ChildProcessError):
            if descendant.pid in excluded_pids:
                continue
            if descendant.status() != psutil.STATUS_ZOMBIE:
                descendants.append(descendant)
            elif descendant.ppid() == os.getpid():
                os.waitpid(descendant.pid, os.WNOHANG)
    return descendants


def kill(processes: Collection[psutil.Process]) -> None:
    """Send SIGKILL to each process that still exists."""
    for killed_process in processes:
        with contextlib.suppress(psutil.Error):
            killed_process.kill()


def says_out_of_memory(error_text: str, has_memory_limit: bool = False) -> bool:
    """Return True if an error message or a failed process's output reports that memory ran out.

    Args:
        error_text: Error message or output.
        has_memory_limit: True if the process had a memory limit.
    """
    memory_messages = OUT_OF_MEMORY_MESSAGES + (LIMITED_MEMORY_MESSAGES if has_memory_limit else ())
    return any(memory_message in error_text for memory_message in memory_messages)


# --- Network


def interface_to(address: str) -> tuple[str, str]:
    """Return the network interface on the route to an address, and this host's IPv4 address on the interface.

    If the address belongs to this host, return the interface with this address. IPv6 is not supported,
    because the launchers' rendezvous does not support it.

    Args:
        address: IPv4 address or host name.

    Raises:
        ValueError: If this host has no route to the address.
    """
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe_socket:
            probe_socket.connect((address, PROBE_PORT))  # does not send a packet
            local_address, _ = probe_socket.getsockname()
    except OSError as route_error:
        route_message = f"this host has no IPv4 route to {address} ({route_error.strerror or route_error})"
        if isinstance(route_error, socket.gaierror):
            route_message = f"{route_message}. Set --master_addr to an IPv4 address"
        raise ValueError(route_message) from None
    for interface_name, interface_addresses in psutil.net_if_addrs().items():
        if any(interface_address.address == local_address for interface_address in interface_addresses):
            return interface_name, local_address
    raise ValueError(
        f"the route to {address} uses the local address {local_address}, but no interface has this address"
    )


def interface_problem(env: Mapping[str, str], uses_nccl: bool) -> str | None:
    """Return the reason why a variable does not match an interface for gloo or NCCL, or None if both match.

    GLOO_SOCKET_IFNAME contains interface names. NCCL_SOCKET_IFNAME contains prefixes of names, full names
    after "=", or names to exclude after "^".
    """
    host_interfaces = psutil.net_if_addrs().keys()
    mismatch_text = (
        f"matches no network interface on this host ({', '.join(host_interfaces)})."
        " Set the variable to one of these interfaces, or unset the variable."
    )
    gloo_value, nccl_value = env.get("GLOO_SOCKET_IFNAME", ""), env.get("NCCL_SOCKET_IFNAME", "")
    if not {*gloo_value.split(",")} <= host_interfaces | {""}:
        return f"GLOO_SOCKET_IFNAME={gloo_value} {mismatch_text}"
    # NCCL's format is [^][=]name,name
    nccl_patterns = nccl_value.removeprefix("^").removeprefix("=").split(",")
    has_full_names = nccl_value.removeprefix("^").startswith("=")
    if has_full_names:
        matching_interfaces = {name for name in host_interfaces if name in nccl_patterns}
    else:
        matching_interfaces = {name for name in host_interfaces if name.startswith(tuple(nccl_patterns))}
    is_exclusion = nccl_value.startswith("^")
    usable_interfaces = host_interfaces - matching_interfaces if is_exclusion else matching_interfaces
    if uses_nccl and not usable_interfaces:
        return f"NCCL_SOCKET_IFNAME={nccl_value} {mismatch_text}"
    return None  # both variables match


def use_interface(interface_name: str) -> dict[str, str]:
    """Return environment variables that make gloo and NCCL use a network interface."""
    # The character "=" makes NCCL compare full names instead of prefixes.
    return {"GLOO_SOCKET_IFNAME": interface_name, "NCCL_SOCKET_IFNAME": f"={interface_name}"}


def host_addresses() -> set[str]:
    """Return the addresses of all network interfaces on this host."""
    interface_addresses = chain.from_iterable(psutil.net_if_addrs().values())
    return {interface_address.address for interface_address in interface_addresses}


def describe_listener(port: int) -> str:
    """Describe the process that listens on a port, for example as ` by process 12, python x.py`.

    The text is empty if the operating system hides the process.
    """
    with contextlib.suppress(psutil.Error):
        for tcp_connection in psutil.net_connections("tcp"):
            is_listener = tcp_connection.status == psutil.CONN_LISTEN and tcp_connection.pid
            if is_listener and tcp_connection.laddr and tcp_connection.laddr.port == port:
                command_line = shlex.join(psutil.Process(tcp_connection.pid).cmdline())
                return f" by process {tcp_connection.pid}, {command_line[:80]}"
    return ""  # no visible process listens on the port
