"""The job's hosts: reads the hostfile, in DeepSpeed's syntax, and runs modules on them by ssh.

# a comment
worker-1 slots=4
worker-2 slots=4

ssh is the ordinary client, which reads ~/.ssh/config.
"""

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
    """A host: its name for ssh, and the numbers of its GPUs in the job, with one process each."""

    name: str
    devices: tuple[int, ...]


def read_hostfile(path: Path) -> list[Host]:
    """The hosts of the file. ValueError with the line number, also for mistakes that DeepSpeed ignores."""
    try:
        content = path.read_bytes()
    except OSError as error:
        raise ValueError(f"the hostfile {path} can't be read: {error.strerror}") from None
    is_utf16 = content.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE))  # as Windows writes it
    try:
        text = content.decode("utf-16" if is_utf16 else "utf-8-sig")
    except UnicodeDecodeError:
        text = "\0"
    if "\0" in text:
        raise ValueError(f"the hostfile {path} is not in UTF-8: save it in UTF-8")
    lines: dict[str, int] = {}
    hosts = []
    for number, line in enumerate(text.splitlines(), start=1):
        if line.strip() and not line.strip().startswith("#"):
            host = _host(line.strip(), f"{path}, line {number}")
            if host.name in lines:
                raise ValueError(f"{path}, line {number}: {host.name} is in line {lines[host.name]} already")
            lines[host.name] = number
            hosts.append(host)
    if not hosts:
        raise ValueError(f"{path} names no host: write one a line, as `worker-1 slots=4`")
    return hosts


def select(hosts: list[Host], include: str = "", exclude: str = "") -> list[Host]:
    """Applies DeepSpeed's filters: `worker-1@worker-2:0,2` is all of worker-1 and two GPUs of worker-2.

    The hosts stay in the hostfile's order, with rank 0 on the first. ValueError for a host or GPU that is not
    in `hosts`.
    """
    if include and exclude:
        raise ValueError("--include and --exclude exclude one another: give one of them")
    flag, named = ("--include", include) if include else ("--exclude", exclude)
    chosen = _parse_filter(flag, named, hosts) if named else {}
    kept = []
    for host in hosts:
        devices = [d for d in host.devices if (d in chosen.get(host.name, ())) == bool(include)]
        if devices:
            kept.append(Host(host.name, tuple(devices)))
    if not kept:
        raise ValueError(f"{flag} {named} leaves no host")
    return kept


def _host(line: str, place: str) -> Host:
    parts = re.fullmatch(r"(\S+)\s+slots=(\d+)", re.sub(r"\s+#.*", "", line))
    if not parts:
        raise ValueError(f"{place}: expected `name slots=N`, found `{line}`")
    name, slots = parts[1], parts[2].lstrip("0")
    if not NAME.fullmatch(name):
        raise ValueError(
            f"{place}: {name} is no host's name (letters, digits, dots, - and _; a user or a port belongs"
            " into ~/.ssh/config)"
        )
    if len(slots) > 3:
        raise ValueError(f"{place}: {name} has more than 999 slots: give the number of its GPUs")
    if not slots:
        raise ValueError(f"{place}: {name} has no slots: leave the line out, or give --exclude {name}")
    return Host(name, tuple(range(int(slots))))


def _parse_filter(flag: str, text: str, hosts: list[Host]) -> dict[str, set[int]]:
    """Host name -> devices. For a host named with and without numbers the numbers count, as in DeepSpeed."""
    known = {host.name: host.devices for host in hosts}
    chosen: dict[str, set[int]] = {}
    for part in text.split("@"):
        name, colon, devices = part.partition(":")
        if name not in known:
            raise ValueError(f"{flag} {text}: no host {name}; there are {', '.join(known)}")
        if colon and not re.fullmatch(r"\d{1,9}(,\d{1,9})*", devices):
            raise ValueError(f"{flag} {text}: expected `{name}:0,2`")
        numbers = {int(device) for device in devices.split(",")} if colon else set()
        if missing := numbers - set(known[name]):
            raise ValueError(
                f"{flag} {text}: {name} has no slot {min(missing)}, but {len(known[name])} slots"
            )
        chosen[name] = chosen.get(name, set()) | numbers
    return {name: numbers or set(known[name]) for name, numbers in chosen.items()}


# Refuses an unknown key, never prompts, and notices a lost host within 25 s.
SSH: tuple[str, ...] = ("ssh", "-T", "-x", "-a", "-o", "BatchMode=yes", "-o", "StrictHostKeyChecking=yes")
SSH += ("-o", "ConnectTimeout=10", "-o", "ServerAliveInterval=5", "-o", "ServerAliveCountMax=4")
SSH += ("-o", "ControlMaster=no", "-o", "ControlPath=none")  # an existing connection has other options
SSH_FAILED = 255  # ssh's own exit status
EVENT = "\x1eevent "  # before an event; text without a newline may precede it, as a shell's that sets a title


@dataclass(eq=False)
class Connection:
    """A module that runs on a host. It is sent requests, and answers with events, both as JSON lines."""

    host: Host
    process: subprocess.Popen[str]
    lock: threading.Lock = field(default_factory=threading.Lock, kw_only=True)  # for its input

    def request(self, name: str, **arguments: Any) -> None:
        """Sends a request, unless the module has ended."""
        with self.lock, contextlib.suppress(OSError, ValueError):
            assert self.process.stdin
            self.process.stdin.write(json.dumps({"request": name} | arguments) + "\n")

    def events(self) -> Iterator[dict[str, Any] | str]:
        """Yields its events, and the lines of other output, until it ends."""
        assert self.process.stdout
        for line in self.process.stdout:
            text, mark, event = line.rstrip("\n").partition(EVENT)
            if text or not mark:
                yield text
            with contextlib.suppress(json.JSONDecodeError):  # no event, or one that a lost connection cut off
                yield json.loads(event)


def requests() -> Iterator[tuple[str, dict[str, Any]]]:
    """Yields the requests to this module, name and arguments, until its connection ends."""
    for line in sys.stdin:
        with contextlib.suppress(json.JSONDecodeError):  # it was cut off
            request = json.loads(line)
            yield request.pop("request"), request


def event_line(event: str, **facts: Any) -> str:
    return EVENT + json.dumps({"event": event} | facts)


def start_on(host: str, module: str) -> subprocess.Popen[str]:
    """Starts the project's module on the host. Ctrl-C here does not reach it. On this host it uses no ssh."""
    words = [sys.executable, "-m", module]
    command = f"cd {shlex.quote(str(ROOT))} && exec {shlex.join(words)}"
    # The connection of whoever works on this host says nothing of the network among the hosts.
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
    """Closes the inputs, which ends the modules. Kills each ssh that does not end in time."""
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
    """Where ssh reached this host, and the address that it came from; None without ssh."""
    ends = os.environ.get("SSH_CONNECTION", "").split()  # client, its port, server, its port
    client, server = (ends[0], ends[2]) if len(ends) == 4 else (None, None)
    return {"reached_at": server, "asked_from": client}


def master_address(ends: Sequence[Mapping[str, str | None]]) -> str:
    """An address of the first host that all hosts reach. ends: the connection_addresses() of each.

    It is where ssh reached the first host; if that is this host, where ssh came from.
    """
    return ends[0]["reached_at"] or next(filter(None, (e["asked_from"] for e in ends)), "localhost")


def is_this_host(name: str) -> bool:
    """True if the name resolves to an address of this machine. Aliases of ~/.ssh/config do not count."""
    try:
        addresses = {str(address[4][0]) for address in socket.getaddrinfo(name, None, socket.AF_INET)}
    except OSError:
        return False
    own = own_addresses()
    return any(address in own or address.startswith("127.") for address in addresses)
