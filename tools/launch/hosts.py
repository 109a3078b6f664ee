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
from onecurve.system.processes import host_addresses

HOST_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]*")  # valid host name


@dataclass(frozen=True)
class Host:
    """Host name for ssh, and the indices of the host's GPUs in the job. Each GPU runs one process."""

    name: str
    devices: tuple[int, ...]  # GPU indices


def add_host_flags(parser: argparse.ArgumentParser, hostfile: Path | None = None) -> None:
    """Add the flags that select a job's hosts and the first host's address.

    `hostfile` is the default hostfile.
    """
    add_flag = parser.add_argument
    hostfile_help = "File with one line `NAME slots=N` for each host. Default: hostfile."
    add_flag("--hostfile", type=Path, default=hostfile, metavar="FILE", help=hostfile_help)
    include_example = "`worker-1@worker-2:0,2` selects all GPUs on worker-1, and GPUs 0 and 2 on worker-2."
    include_help = f"Hosts and GPUs to use. {include_example} Default: all hosts and GPUs."
    add_flag("--include", default="", metavar="HOSTS", help=include_help)
    exclude_help = "Hosts and GPUs to exclude, in the same format as --include."
    add_flag("--exclude", default="", metavar="HOSTS", help=exclude_help)
    port_help = "Port on the first host that the other hosts connect to. Default: %(default)s."
    add_flag("--port", type=int, default=29500, metavar="N", help=port_help)
    address_help = "Address at which all other hosts can reach the first host."
    address_help += " Default: the address that ssh connects to."
    add_flag("--master_addr", metavar="ADDRESS", help=address_help)


def read_hostfile(hostfile: Path) -> list[Host]:
    """Return the hosts in a hostfile.

    Raises:
        ValueError: If the hostfile contains a mistake, including mistakes that DeepSpeed ignores. The message
            contains the line number.
    """
    try:
        hostfile_bytes = hostfile.read_bytes()
    except OSError as read_error:
        raise ValueError(f"the hostfile {hostfile} can't be read: {read_error.strerror}") from None
    # Windows editors write UTF-16.
    is_utf16 = hostfile_bytes.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE))
    try:
        hostfile_text = hostfile_bytes.decode("utf-16" if is_utf16 else "utf-8-sig")
    except UnicodeDecodeError:
        hostfile_text = "\0"  # the next check reports that the hostfile is not UTF-8
    if "\0" in hostfile_text:
        raise ValueError(f"the hostfile {hostfile} is not UTF-8. Save the file as UTF-8.")
    line_number_by_host: dict[str, int] = {}
    hosts = []
    for line_number, hostfile_line in enumerate(hostfile_text.splitlines(), start=1):
        if hostfile_line.strip() and not hostfile_line.strip().startswith("#"):
            line_location = f"{hostfile}, line {line_number}"
            host = _parse_host(hostfile_line.strip(), line_location)
            if earlier_line := line_number_by_host.get(host.name):
                host_problem = f"{host.name} already appears in line {earlier_line}. Remove one of the lines."
                raise ValueError(f"{line_location}: {host_problem}")
            line_number_by_host[host.name] = line_number
            hosts.append(host)
    if not hosts:
        hostfile_remedy = "Write one host per line, for example `worker-1 slots=4`."
        raise ValueError(f"{hostfile} lists no hosts. {hostfile_remedy}")
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
    filter_flag, filter_text = ("--include", include) if include else ("--exclude", exclude)
    filter_indices_by_host = _parse_filter(filter_flag, filter_text, hosts) if filter_text else {}
    has_include_filter = bool(include)  # without a filter, the empty exclude filter selects all devices
    selected_hosts = []
    for host in hosts:
        filter_indices = filter_indices_by_host.get(host.name, set())
        selected_indices = [
            device for device in host.devices if (device in filter_indices) == has_include_filter
        ]
        if selected_indices:
            selected_hosts.append(Host(host.name, tuple(selected_indices)))
    if not selected_hosts:
        raise ValueError(f"{filter_flag} {filter_text} excludes all hosts. Keep at least one host.")
    return selected_hosts


def _parse_host(host_line: str, line_location: str) -> Host:
    """Parse a line of a hostfile, such as `worker-1 slots=4  # a comment`.

    Raises:
        ValueError: If the line is malformed. The message starts with `line_location`.
    """
    line_without_comment = re.sub(r"\s+#.*", "", host_line)
    host_match = re.fullmatch(r"(\S+)\s+slots=(\d+)", line_without_comment)
    if not host_match:
        raise ValueError(f"{line_location}: expected `name slots=N`, found `{host_line}`")
    host_name, padded_slot_digits = host_match.groups()
    slot_digits = padded_slot_digits.lstrip("0")
    if not HOST_NAME.fullmatch(host_name):
        name_remedy = "Use letters, digits, dots, - and _. Specify a user or a port in ~/.ssh/config."
        raise ValueError(f"{line_location}: {host_name} is not a valid host name. {name_remedy}")
    if len(slot_digits) > 3:
        slots_remedy = "Set slots to the number of GPUs on the host."
        raise ValueError(f"{line_location}: {host_name} has more than 999 slots. {slots_remedy}")
    if not slot_digits:
        empty_host_remedy = f"Remove the line, or pass --exclude {host_name}."
        raise ValueError(f"{line_location}: {host_name} has no slots. {empty_host_remedy}")
    return Host(host_name, tuple(range(int(slot_digits))))


def _parse_filter(flag: str, filter_text: str, hosts: list[Host]) -> dict[str, set[int]]:
    """Return the device indices that a filter such as `worker-1@worker-2:0,2` contains, by host name.

    A host without device indices selects all of its devices. If a filter contains a host both with and
    without device indices, only the indices are selected, as in DeepSpeed.
    """
    devices_by_host = {host.name: set(host.devices) for host in hosts}
    filter_indices_by_host: dict[str, set[int]] = {}
    for filter_entry in filter_text.split("@"):
        host_name, colon, index_text = filter_entry.partition(":")
        if host_name not in devices_by_host:
            remedy = f"Choose from {', '.join(devices_by_host)}."
            raise ValueError(f"{flag} {filter_text}: the host {host_name} is not in the hostfile. {remedy}")
        if colon and not re.fullmatch(r"\d{1,9}(,\d{1,9})*", index_text):
            indices_problem = f"expected slot numbers after {host_name}, for example `{host_name}:0,2`"
            raise ValueError(f"{flag} {filter_text}: {indices_problem}")
        entry_indices = {int(index_digits) for index_digits in index_text.split(",")} if colon else set()
        if unknown_indices := entry_indices - devices_by_host[host_name]:
            last_slot = len(devices_by_host[host_name]) - 1
            slot_problem = f"{host_name} has no slot {min(unknown_indices)}"
            valid_slots = f"The slots on {host_name} are numbered from 0 to {last_slot}."
            raise ValueError(f"{flag} {filter_text}: {slot_problem}. {valid_slots}")
        filter_indices_by_host.setdefault(host_name, set()).update(entry_indices)
    # An empty set of indices means all devices.
    return {name: indices or devices_by_host[name] for name, indices in filter_indices_by_host.items()}


# With these options, ssh rejects unknown host keys, never prompts, and detects a lost host within 25 s.
SSH_COMMAND = ["ssh", "-T", "-x", "-a", "-o", "BatchMode=yes", "-o", "StrictHostKeyChecking=yes"]
SSH_COMMAND += ["-o", "ConnectTimeout=10", "-o", "ServerAliveInterval=5", "-o", "ServerAliveCountMax=4"]
SSH_COMMAND += ["-o", "ControlMaster=no", "-o", "ControlPath=none"]  # a shared connection ignores options
SSH_FAILURE_STATUS = 255  # ssh's exit status if ssh itself fails
EVENT_MARK = "\x1eevent "  # start of an event; a shell may print a window title before the event


@dataclass(eq=False)  # connections are compared by identity
class Connection:
    """Connection to a module running on a host. Requests and events are sent as lines of JSON."""

    host: Host
    process: subprocess.Popen[str]  # ssh client, or the module itself if the host is this machine
    stdin_lock: threading.Lock = field(default_factory=threading.Lock, kw_only=True)

    def request(self, request_name: str, **arguments: Any) -> None:
        """Send a request to the module. Do nothing if the module has ended."""
        with self.stdin_lock, contextlib.suppress(OSError, ValueError):
            assert self.process.stdin
            self.process.stdin.write(json.dumps({"request": request_name} | arguments) + "\n")

    def events_and_lines(self) -> Iterator[dict[str, Any] | str]:
        """Yield the module's events, and all its other output as lines of text, until the module ends."""
        assert self.process.stdout
        for output_line in self.process.stdout:
            output_text, event_mark, event_json = output_line.rstrip("\n").partition(EVENT_MARK)
            if output_text or not event_mark:  # an ordinary line, or text before an event
                yield output_text
            with contextlib.suppress(json.JSONDecodeError):  # raised for other or incomplete lines
                yield json.loads(event_json)


def read_requests() -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the name and the arguments of each request to this module until the connection ends."""
    for request_line in sys.stdin:
        with contextlib.suppress(json.JSONDecodeError):  # raised if the line is truncated
            request_arguments = json.loads(request_line)
            yield request_arguments.pop("request"), request_arguments


def event_line(event: str, **event_fields: Any) -> str:
    """Return an event as the line of output that Connection.events_and_lines() recognizes."""
    return EVENT_MARK + json.dumps({"event": event} | event_fields)


def start_module_on(host_name: str, module: str) -> subprocess.Popen[str]:
    """Start a module of this project on a host, over SSH unless the host is this machine.

    The module runs in a separate session, so that Ctrl-C in this terminal does not interrupt the module.
    """
    local_command = [sys.executable, "-m", module]
    remote_command = f"cd {shlex.quote(str(ROOT))} && exec {shlex.join(local_command)}"
    # Remove SSH_CONNECTION, which describes the user's login instead of the connection to the host.
    env_without_login = {name: value for name, value in os.environ.items() if name != "SSH_CONNECTION"}
    return subprocess.Popen(
        local_command if is_this_host(host_name) else [*SSH_COMMAND, host_name, remote_command],
        cwd=ROOT,
        env=env_without_login,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        bufsize=1,
        start_new_session=True,
    )


def close_and_wait(connections: Sequence[Connection], timeout_s: float) -> None:
    """End the modules on all hosts by closing their standard inputs.

    After timeout_s seconds in total, kill this machine's end of each connection that is still open.
    """
    for connection in connections:
        with contextlib.suppress(OSError):
            assert connection.process.stdin
            connection.process.stdin.close()
    deadline_s = time.monotonic() + timeout_s
    for connection in connections:
        try:
            connection.process.wait(max(0, deadline_s - time.monotonic()))
        except subprocess.TimeoutExpired:
            connection.process.kill()


def connection_addresses() -> dict[str, str | None]:
    """Return the addresses of both ends of the SSH connection that started this process.

    Returns:
        {"reached_at": this host's address, "asked_from": the SSH client's address}. Both addresses are None
        without an SSH connection.
    """
    client_address, server_address = None, None
    connection_fields = os.environ.get("SSH_CONNECTION", "").split()
    if len(connection_fields) == 4:
        client_address, _client_port, server_address, _server_port = connection_fields
    return {"reached_at": server_address, "asked_from": client_address}


def master_address(addresses_by_rank: Sequence[Mapping[str, str | None]]) -> str:
    """Return an address at which all hosts can reach the first host.

    ssh connected to the first host at this address. If the first host is this machine, ssh connected to the
    other hosts from this address.

    Args:
        addresses_by_rank: Result of connection_addresses() on each host, starting with the first host.
    """
    client_addresses = (addresses["asked_from"] for addresses in addresses_by_rank)
    return addresses_by_rank[0]["reached_at"] or next(filter(None, client_addresses), "localhost")


def is_this_host(host_name: str) -> bool:
    """Return True if a host name resolves to an address of this machine, without aliases in ~/.ssh/config."""
    try:
        address_infos = socket.getaddrinfo(host_name, None, socket.AF_INET)
    except OSError:
        return False
    resolved_addresses = {str(address) for *_, (address, *_port) in address_infos}
    local_addresses = host_addresses()
    return any(address in local_addresses or address.startswith("127.") for address in resolved_addresses)
