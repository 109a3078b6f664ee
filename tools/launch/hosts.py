"""Read hostfiles, and start modules on hosts over SSH.

Hostfiles have the same syntax as DeepSpeed's hostfiles:

    # a comment
    worker-1 slots=4
    worker-2 slots=4

The connections use the installed ssh client, which reads ~/.ssh/config.
"""

import argparse
import codecs
import contextlib
import json
import os
import re
import shlex
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from onecurve.system.paths import ROOT
from onecurve.system.processes import own_addresses

NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]*")


@dataclass(frozen=True)
class Host:
    """Host name for ssh, and the indices of the host's GPUs in the job. Each GPU runs one process."""

    name: str
    devices: tuple[int, ...]


def add_host_flags(parser: argparse.ArgumentParser, hostfile: Path | None = None) -> None:
    """Add the flags that select a job's hosts and the first host's address.

    `hostfile` is the default hostfile.
    """
    add = parser.add_argument
    hostfile_help = "File with one line `NAME slots=N` for each host. Default: hostfile."
    add("--hostfile", type=Path, default=hostfile, metavar="FILE", help=hostfile_help)
    example = "`worker-1@worker-2:0,2` selects all GPUs on worker-1, and GPUs 0 and 2 on worker-2."
    include_help = f"Hosts and GPUs to use. {example} Default: all hosts and GPUs."
    add("--include", default="", metavar="HOSTS", help=include_help)
    exclude_help = "Hosts and GPUs to exclude, in the same format as --include."
    add("--exclude", default="", metavar="HOSTS", help=exclude_help)
    port_help = "Port on the first host that the other hosts connect to. Default: %(default)s."
    add("--port", type=int, default=29500, metavar="N", help=port_help)
    address_help = "Address at which all other hosts can reach the first host."
    address_help += " Default: the address that ssh connects to."
    add("--master_addr", metavar="ADDRESS", help=address_help)


def read_hostfile(path: Path) -> list[Host]:
    """Return the hosts in a hostfile.

    Raises:
        ValueError: If the hostfile contains a mistake, including mistakes that DeepSpeed ignores. The message
            contains the line number.
    """
    try:
        raw_content = path.read_bytes()
    except OSError as error:
        raise ValueError(f"the hostfile {path} can't be read: {error.strerror}") from None
    # Windows editors write UTF-16.
    is_utf16 = raw_content.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE))
    try:
        text = raw_content.decode("utf-16" if is_utf16 else "utf-8-sig")
    except UnicodeDecodeError:
        text = "\0"
    if "\0" in text:
        raise ValueError(f"the hostfile {path} is not UTF-8. Save the file as UTF-8.")
    line_numbers: dict[str, int] = {}
    hosts = []
    for number, line in enumerate(text.splitlines(), start=1):
        if line.strip() and not line.strip().startswith("#"):
            host = _parse_host(line.strip(), f"{path}, line {number}")
            if earlier := line_numbers.get(host.name):
                problem = f"{host.name} already appears in line {earlier}. Remove one of the lines."
                raise ValueError(f"{path}, line {number}: {problem}")
            line_numbers[host.name] = number
            hosts.append(host)
    if not hosts:
        raise ValueError(f"{path} lists no hosts. Write one host per line, for example `worker-1 slots=4`.")
    return hosts


def select_hosts(hosts: list[Host], include: str = "", exclude: str = "") -> list[Host]:
    """Apply DeepSpeed's filters to a list of hosts, and return the remaining hosts in the same order.

    For example, the filter `worker-1@worker-2:0,2` selects all GPUs on worker-1 and two GPUs on worker-2.
    Rank 0 runs on the first remaining host.

    Raises:
        ValueError: If a filter contains a host or GPU that is not in `hosts`, or if no host remains.
    """
    if include and exclude:
        raise ValueError("--include and --exclude can't be combined. Remove one of these flags.")
    flag, filter_text = ("--include", include) if include else ("--exclude", exclude)
    named_devices = _parse_filter(flag, filter_text, hosts) if filter_text else {}
    remaining = []
    for host in hosts:
        named = named_devices.get(host.name, set())
        if devices := [device for device in host.devices if (device in named) == bool(include)]:
            remaining.append(Host(host.name, tuple(devices)))
    if not remaining:
        raise ValueError(f"{flag} {filter_text} excludes all hosts. Keep at least one host.")
    return remaining


def _parse_host(line: str, position: str) -> Host:
    fields = re.fullmatch(r"(\S+)\s+slots=(\d+)", re.sub(r"\s+#.*", "", line))
    if not fields:
        raise ValueError(f"{position}: expected `name slots=N`, found `{line}`")
    name, slots = fields[1], fields[2].lstrip("0")
    if not NAME.fullmatch(name):
        remedy = "Use letters, digits, dots, - and _. Specify a user or a port in ~/.ssh/config."
        raise ValueError(f"{position}: {name} is not a valid host name. {remedy}")
    if len(slots) > 3:
        remedy = "Set slots to the number of GPUs on the host."
        raise ValueError(f"{position}: {name} has more than 999 slots. {remedy}")
    if not slots:
        raise ValueError(f"{position}: {name} has no slots. Remove the line, or pass --exclude {name}.")
    return Host(name, tuple(range(int(slots))))


def _parse_filter(flag: str, filter_text: str, hosts: list[Host]) -> dict[str, set[int]]:
    """Return the device indices in a filter, by host name.

    If a filter contains a host both with and without device indices, only the indices are selected, as in
    DeepSpeed.
    """
    devices_by_host = {host.name: host.devices for host in hosts}
    named_devices: dict[str, set[int]] = {}
    for entry in filter_text.split("@"):
        name, colon, devices = entry.partition(":")
        if name not in devices_by_host:
            problem = f"the host {name} is not in the hostfile. Choose from {', '.join(devices_by_host)}."
            raise ValueError(f"{flag} {filter_text}: {problem}")
        if colon and not re.fullmatch(r"\d{1,9}(,\d{1,9})*", devices):
            problem = f"expected slot numbers after {name}, for example `{name}:0,2`"
            raise ValueError(f"{flag} {filter_text}: {problem}")
        indices = {int(device) for device in devices.split(",")} if colon else set()
        if unknown_indices := indices - set(devices_by_host[name]):
            slots = f"The slots on {name} are numbered from 0 to {len(devices_by_host[name]) - 1}."
            raise ValueError(f"{flag} {filter_text}: {name} has no slot {min(unknown_indices)}. {slots}")
        named_devices[name] = named_devices.get(name, set()) | indices
    return {name: indices or set(devices_by_host[name]) for name, indices in named_devices.items()}


# With these options, ssh rejects unknown host keys, never prompts, and detects a lost host within 25 s.
SSH: tuple[str, ...] = ("ssh", "-T", "-x", "-a", "-o", "BatchMode=yes", "-o", "StrictHostKeyChecking=yes")
SSH += ("-o", "ConnectTimeout=10", "-o", "ServerAliveInterval=5", "-o", "ServerAliveCountMax=4")
SSH += ("-o", "ControlMaster=no", "-o", "ControlPath=none")  # a shared connection ignores other options
SSH_FAILED = 255  # ssh's exit status if ssh itself fails
EVENT_MARK = "\x1eevent "  # start of an event; a shell may print a window title before the event


@dataclass(eq=False)
class Connection:
    """Connection to a module running on a host. Requests and events are sent as lines of JSON."""

    host: Host
    process: subprocess.Popen[str]
    lock: threading.Lock = field(default_factory=threading.Lock, kw_only=True)  # protects the module's input

    def request(self, name: str, **arguments: Any) -> None:
        """Send a request to the module. Do nothing if the module has ended."""
        with self.lock, contextlib.suppress(OSError, ValueError):
            assert self.process.stdin
            self.process.stdin.write(json.dumps({"request": name} | arguments) + "\n")

    def events(self) -> Iterator[dict[str, Any] | str]:
        """Yield the module's events, and all its other output as lines of text, until the module ends."""
        assert self.process.stdout
        for line in self.process.stdout:
            text, event_mark, event = line.rstrip("\n").partition(EVENT_MARK)
            if text or not event_mark:
                yield text
            with contextlib.suppress(json.JSONDecodeError):  # raised for other or incomplete lines
                yield json.loads(event)


def requests() -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the name and the arguments of each request to this module until the connection ends."""
    for line in sys.stdin:
        with contextlib.suppress(json.JSONDecodeError):  # raised if the line is truncated
            request = json.loads(line)
            yield request.pop("request"), request


def event_line(event: str, **facts: Any) -> str:
    return EVENT_MARK + json.dumps({"event": event} | facts)


def start_on(host: str, module: str) -> subprocess.Popen[str]:
    """Start a module of this project on a host, over SSH unless the host is this machine.

    The module runs in a separate session, so that Ctrl-C in this terminal does not interrupt the module.
    """
    local_command = [sys.executable, "-m", module]
    remote_command = f"cd {shlex.quote(str(ROOT))} && exec {shlex.join(local_command)}"
    # Remove SSH_CONNECTION, which describes the user's login instead of the connection to the host.
    env = {name: value for name, value in os.environ.items() if name != "SSH_CONNECTION"}
    return subprocess.Popen(
        local_command if is_this_host(host) else [*SSH, host, remote_command],
        cwd=ROOT,
        env=env,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        bufsize=1,
        start_new_session=True,
    )


def close_and_wait(connections: Sequence[Connection], within_s: float) -> None:
    """End the modules by closing their inputs.

    Kill all modules that have not ended after within_s seconds.
    """
    for connection in connections:
        with contextlib.suppress(OSError):
            assert connection.process.stdin
            connection.process.stdin.close()
    end_s = time.monotonic() + within_s
    for connection in connections:
        try:
            connection.process.wait(max(0, end_s - time.monotonic()))
        except subprocess.TimeoutExpired:
            connection.process.kill()


def connection_addresses() -> dict[str, str | None]:
    """Return the addresses of this host and of the SSH client.

    Both addresses are None without an SSH connection.
    """
    login = os.environ.get("SSH_CONNECTION", "").split()  # client address and port, server address and port
    client, server = (login[0], login[2]) if len(login) == 4 else (None, None)
    return {"reached_at": server, "asked_from": client}


def master_address(ends: Sequence[Mapping[str, str | None]]) -> str:
    """Return an address at which all hosts can reach the first host.

    ssh connected to the first host at this address. If the first host is this machine, ssh connected to the
    other hosts from this address.

    Args:
        ends: Result of connection_addresses() on each host, starting with the first host.
    """
    return ends[0]["reached_at"] or next(filter(None, (end["asked_from"] for end in ends)), "localhost")


def is_this_host(name: str) -> bool:
    """Return True if a host name resolves to an address of this machine, without aliases in ~/.ssh/config."""
    try:
        addresses = {str(address[4][0]) for address in socket.getaddrinfo(name, None, socket.AF_INET)}
    except OSError:
        return False
    local_addresses = own_addresses()
    return any(address in local_addresses or address.startswith("127.") for address in addresses)
