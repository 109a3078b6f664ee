"""Reader of hostfiles, and ssh connections to modules that run on the hosts.

A hostfile uses DeepSpeed's syntax:

    # a comment
    worker-1 slots=4
    worker-2 slots=4

Connections use the installed ssh client, which reads ~/.ssh/config.
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
    """A host's name for ssh and the indices of its GPUs in the job. Each GPU runs one process."""

    name: str
    devices: tuple[int, ...]


def add_host_flags(parser: argparse.ArgumentParser, hostfile: Path | None = None) -> None:
    """Add the flags that select a job's hosts and the first host's address. hostfile: default hostfile."""
    add = parser.add_argument
    hostfile_help = "File with lines `NAME slots=N`. Default: hostfile."
    add("--hostfile", type=Path, default=hostfile, metavar="FILE", help=hostfile_help)
    example = "`worker-1@worker-2:0,2` selects all GPUs of worker-1, and GPUs 0 and 2 of worker-2."
    add("--include", default="", metavar="HOSTS", help=f"Hosts and GPUs to use. {example} Default: all.")
    exclude_help = "Hosts and GPUs to exclude, in the same form as in --include."
    add("--exclude", default="", metavar="HOSTS", help=exclude_help)
    add("--port", type=int, default=29500, metavar="N", help="Port on the first host. Default: %(default)s.")
    address_help = "Address of the first host. Default: the address that ssh connects to."
    add("--master_addr", metavar="ADDRESS", help=address_help)


def read_hostfile(path: Path) -> list[Host]:
    """Return the hosts of a hostfile.

    Raises:
        ValueError: The file contains a mistake, even one that DeepSpeed would ignore. The message names the
            line.
    """
    try:
        content = path.read_bytes()
    except OSError as error:
        raise ValueError(f"the hostfile {path} can't be read: {error.strerror}") from None
    is_utf16 = content.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE))  # Windows editors write UTF-16
    try:
        text = content.decode("utf-16" if is_utf16 else "utf-8-sig")
    except UnicodeDecodeError:
        text = "\0"
    if "\0" in text:
        raise ValueError(f"the hostfile {path} is not UTF-8. Save it as UTF-8.")
    lines: dict[str, int] = {}
    hosts = []
    for number, line in enumerate(text.splitlines(), start=1):
        if line.strip() and not line.strip().startswith("#"):
            host = _host(line.strip(), f"{path}, line {number}")
            if host.name in lines:
                earlier = lines[host.name]
                raise ValueError(f"{path}, line {number}: {host.name} already appears in line {earlier}")
            lines[host.name] = number
            hosts.append(host)
    if not hosts:
        raise ValueError(f"{path} names no host. Write one per line, for example `worker-1 slots=4`.")
    return hosts


def select(hosts: list[Host], include: str = "", exclude: str = "") -> list[Host]:
    """Apply DeepSpeed's filters. `worker-1@worker-2:0,2` selects all of worker-1 and two GPUs of worker-2.

    The hosts keep the hostfile's order. Rank 0 runs on the first host.

    Raises:
        ValueError: A filter names a host or GPU that is not in `hosts`, or no host remains.
    """
    if include and exclude:
        raise ValueError("--include and --exclude can't be combined. Remove one of them.")
    flag, text = ("--include", include) if include else ("--exclude", exclude)
    chosen = _parse_filter(flag, text, hosts) if text else {}
    kept = []
    for host in hosts:
        devices = [d for d in host.devices if (d in chosen.get(host.name, ())) == bool(include)]
        if devices:
            kept.append(Host(host.name, tuple(devices)))
    if not kept:
        raise ValueError(f"{flag} {text} leaves no host")
    return kept


def _host(line: str, position: str) -> Host:
    parts = re.fullmatch(r"(\S+)\s+slots=(\d+)", re.sub(r"\s+#.*", "", line))
    if not parts:
        raise ValueError(f"{position}: expected `name slots=N`, found `{line}`")
    name, slots = parts[1], parts[2].lstrip("0")
    if not NAME.fullmatch(name):
        raise ValueError(
            f"{position}: {name} is not a host name. Use letters, digits, dots, - and _, and put a user or a"
            " port into ~/.ssh/config."
        )
    if len(slots) > 3:
        raise ValueError(f"{position}: {name} has more than 999 slots. Write its number of GPUs.")
    if not slots:
        raise ValueError(f"{position}: {name} has no slots. Remove the line or pass --exclude {name}.")
    return Host(name, tuple(range(int(slots))))


def _parse_filter(flag: str, text: str, hosts: list[Host]) -> dict[str, set[int]]:
    """Return the devices that a filter names, by host name.

    If a filter names a host both with and without GPU numbers, the numbers apply, as in DeepSpeed.
    """
    known = {host.name: host.devices for host in hosts}
    chosen: dict[str, set[int]] = {}
    for part in text.split("@"):
        name, colon, devices = part.partition(":")
        if name not in known:
            raise ValueError(f"{flag} {text}: there is no host {name}. The hosts are {', '.join(known)}.")
        if colon and not re.fullmatch(r"\d{1,9}(,\d{1,9})*", devices):
            raise ValueError(f"{flag} {text}: expected `{name}:0,2`")
        numbers = {int(device) for device in devices.split(",")} if colon else set()
        if missing := numbers - set(known[name]):
            raise ValueError(
                f"{flag} {text}: {name} has no slot {min(missing)}. Its {len(known[name])} slots are counted"
                " from 0."
            )
        chosen[name] = chosen.get(name, set()) | numbers
    return {name: numbers or set(known[name]) for name, numbers in chosen.items()}


# With these options, ssh refuses unknown host keys, never prompts, and detects a lost host within 25 s.
SSH: tuple[str, ...] = ("ssh", "-T", "-x", "-a", "-o", "BatchMode=yes", "-o", "StrictHostKeyChecking=yes")
SSH += ("-o", "ConnectTimeout=10", "-o", "ServerAliveInterval=5", "-o", "ServerAliveCountMax=4")
SSH += ("-o", "ControlMaster=no", "-o", "ControlPath=none")  # a shared connection would ignore these options
SSH_FAILED = 255  # exit status of ssh when ssh itself fails
EVENT = "\x1eevent "  # start of an event; a shell that sets a title may print other text before it


@dataclass(eq=False)
class Connection:
    """Connection to a module that runs on a host. Requests and events are lines of JSON."""

    host: Host
    process: subprocess.Popen[str]
    lock: threading.Lock = field(default_factory=threading.Lock, kw_only=True)  # protects the module's input

    def request(self, name: str, **arguments: Any) -> None:
        """Send a request, unless the module has ended."""
        with self.lock, contextlib.suppress(OSError, ValueError):
            assert self.process.stdin
            self.process.stdin.write(json.dumps({"request": name} | arguments) + "\n")

    def events(self) -> Iterator[dict[str, Any] | str]:
        """Yield the module's events, and other output as lines of text, until the module ends."""
        assert self.process.stdout
        for line in self.process.stdout:
            text, mark, event = line.rstrip("\n").partition(EVENT)
            if text or not mark:
                yield text
            with contextlib.suppress(json.JSONDecodeError):  # not an event, or an incomplete event
                yield json.loads(event)


def requests() -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the name and arguments of each request to this module, until the connection ends."""
    for line in sys.stdin:
        with contextlib.suppress(json.JSONDecodeError):  # the line is truncated
            request = json.loads(line)
            yield request.pop("request"), request


def event_line(event: str, **facts: Any) -> str:
    return EVENT + json.dumps({"event": event} | facts)


def start_on(host: str, module: str) -> subprocess.Popen[str]:
    """Start a module of this project on a host. Use ssh unless the host is this machine.

    The module runs in a separate session, so that Ctrl-C in this terminal does not reach it.
    """
    words = [sys.executable, "-m", module]
    command = f"cd {shlex.quote(str(ROOT))} && exec {shlex.join(words)}"
    # SSH_CONNECTION describes the user's login to this host, not the network between the job's hosts.
    env = {name: value for name, value in os.environ.items() if name != "SSH_CONNECTION"}
    return subprocess.Popen(
        words if is_this_host(host) else [*SSH, host, command],
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
    """Close the inputs of the modules, which ends them. Kill processes that still run after within_s."""
    for connection in connections:
        with contextlib.suppress(OSError):
            assert connection.process.stdin
            connection.process.stdin.close()
    deadline = time.monotonic() + within_s
    for connection in connections:
        try:
            connection.process.wait(max(0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            connection.process.kill()


def connection_addresses() -> dict[str, str | None]:
    """Return the addresses of this host and of the client in the ssh connection, or None without ssh."""
    ends = os.environ.get("SSH_CONNECTION", "").split()  # client address and port, server address and port
    client, server = (ends[0], ends[2]) if len(ends) == 4 else (None, None)
    return {"reached_at": server, "asked_from": client}


def master_address(ends: Sequence[Mapping[str, str | None]]) -> str:
    """Return an address at which all hosts can reach the first host.

    The result is the address at which ssh reached the first host. If the first host is this machine, the
    result is the address from which ssh connected to the other hosts.

    Args:
        ends: The connection_addresses() of each host.
    """
    return ends[0]["reached_at"] or next(filter(None, (end["asked_from"] for end in ends)), "localhost")


def is_this_host(name: str) -> bool:
    """Return True if the name resolves to an address of this machine. Ignore aliases in ~/.ssh/config."""
    try:
        addresses = {str(address[4][0]) for address in socket.getaddrinfo(name, None, socket.AF_INET)}
    except OSError:
        return False
    local_addresses = own_addresses()
    return any(address in local_addresses or address.startswith("127.") for address in addresses)
