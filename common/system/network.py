"""A host's network interfaces, and the process that listens on a port."""

import contextlib
import shlex
import socket

import psutil


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


def use_interface(name: str) -> dict[str, str]:
    """Environment variables that make gloo and NCCL use this interface."""
    return {"GLOO_SOCKET_IFNAME": name, "NCCL_SOCKET_IFNAME": f"={name}"}  # without = NCCL matches a prefix


def own_addresses() -> set[str]:
    return {known.address for addresses in psutil.net_if_addrs().values() for known in addresses}


def listener(port: int) -> str:
    """The process that listens on the port, as ` by process 12, python x.py`; empty if it is not visible."""
    with contextlib.suppress(psutil.Error):
        for known in psutil.net_connections("tcp"):
            if known.status == psutil.CONN_LISTEN and known.laddr and known.laddr.port == port and known.pid:
                command = shlex.join(psutil.Process(known.pid).cmdline())
                return f" by process {known.pid}, {command[:80]}"
    return ""
