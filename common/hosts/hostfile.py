"""Reads the hostfile: hosts and the number of processes on each, in DeepSpeed's syntax.

# a comment
worker-1 slots=4
worker-2 slots=4
"""

import re
from dataclasses import dataclass
from pathlib import Path

NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]*")


@dataclass(frozen=True)
class Host:
    """A host: its name for ssh, and the numbers of its GPUs in the job, with one process each."""

    name: str
    devices: tuple[int, ...]


def read_hostfile(path: Path) -> list[Host]:
    """The hosts of the file. ValueError with the line number, also for mistakes that DeepSpeed ignores."""
    try:
        text = path.read_text()
    except OSError as error:
        raise ValueError(f"the hostfile {path} can't be read: {error.strerror}") from None
    except UnicodeDecodeError:
        raise ValueError(f"the hostfile {path} can't be read: not UTF-8") from None
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
    if include:
        kept = [Host(host.name, chosen.get(host.name, ())) for host in hosts]
    else:
        kept = [
            Host(host.name, tuple(d for d in host.devices if d not in chosen.get(host.name, ())))
            for host in hosts
        ]
    kept = [host for host in kept if host.devices]
    if not kept:
        raise ValueError(f"{flag} {named} leaves no host")
    return kept


def _host(line: str, where: str) -> Host:
    found = re.fullmatch(r"(\S+)\s+slots=(\d+)", re.sub(r"\s+#.*", "", line))
    if not found:
        raise ValueError(f"{where}: expected `name slots=N`, found `{line}`")
    name, slots = found[1], int(found[2])
    if not NAME.fullmatch(name):
        raise ValueError(
            f"{where}: {name} is no host's name (letters, digits, dots, - and _; a user or a port belongs"
            " into ~/.ssh/config)"
        )
    if slots == 0:
        raise ValueError(f"{where}: {name} has no slots: leave the line out, or give --exclude {name}")
    return Host(name, tuple(range(slots)))


def _parse_filter(flag: str, text: str, hosts: list[Host]) -> dict[str, tuple[int, ...]]:
    """Host name -> devices. For a host named with and without numbers the numbers count, as in DeepSpeed."""
    known = {host.name: host.devices for host in hosts}
    chosen: dict[str, set[int]] = {}
    for part in text.split("@"):
        name, colon, devices = part.partition(":")
        if name not in known:
            raise ValueError(f"{flag} {text}: no host {name}; there are {', '.join(known)}")
        if colon and not re.fullmatch(r"\d+(,\d+)*", devices):
            raise ValueError(f"{flag} {text}: expected `{name}:0,2`")
        numbers = {int(device) for device in devices.split(",")} if colon else set()
        if missing := numbers - set(known[name]):
            raise ValueError(
                f"{flag} {text}: {name} has no slot {min(missing)}, but {len(known[name])} slots"
            )
        chosen[name] = chosen.get(name, set()) | numbers
    return {name: tuple(sorted(numbers)) or known[name] for name, numbers in chosen.items()}
