"""Runs commands on a job's hosts with the ordinary ssh client, which reads ~/.ssh/config."""

import contextlib
import os
import shlex
import socket
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path

from common.system.network import own_addresses

# Refuses an unknown key, never prompts, and notices a lost host within 25 s.
SSH: tuple[str, ...] = ("ssh", "-T", "-x", "-a", "-o", "BatchMode=yes", "-o", "StrictHostKeyChecking=yes")
SSH += ("-o", "ConnectTimeout=10", "-o", "ServerAliveInterval=5", "-o", "ServerAliveCountMax=4")
SSH += ("-o", "ControlMaster=no", "-o", "ControlPath=none")  # an existing connection has other options
SSH_FAILED = 255  # ssh's own exit status


def start_on(host: str, words: Sequence[str], folder: Path) -> subprocess.Popen[str]:
    """Starts a command in this folder of the host, with pipes for its lines. Ctrl-C here does not reach it.

    On this host it starts the command directly, without ssh.
    """
    command = f"cd {shlex.quote(str(folder))} && exec {shlex.join(words)}"
    return subprocess.Popen(
        list(words) if is_this_host(host) else [*SSH, host, command],
        cwd=folder,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        bufsize=1,
        start_new_session=True,
    )


def close_and_wait(processes: Sequence[subprocess.Popen[str]], within_s: float) -> None:
    """Closes the inputs, which ends the commands. Kills each ssh that does not end in time."""
    for process in processes:
        with contextlib.suppress(OSError):
            assert process.stdin
            process.stdin.close()
    deadline = time.monotonic() + within_s
    for process in processes:
        try:
            process.wait(max(0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            process.kill()


def connection_addresses() -> tuple[str, str] | tuple[None, None]:
    """Both ends of the ssh connection that started this process: client and this host; None without ssh."""
    ends = os.environ.get("SSH_CONNECTION", "").split()  # client, its port, server, its port
    return (ends[0], ends[2]) if len(ends) == 4 else (None, None)


def master_address(reached_at: Sequence[str | None], asked_from: Sequence[str | None]) -> str:
    """An address of the first host that all hosts reach.

    reached_at, asked_from: for each host, the address that ssh connected to, and the one that it came from;
    None without ssh. It is where ssh reached the first host; if that is this host, where ssh came from.
    """
    return reached_at[0] or next(filter(None, asked_from), None) or "localhost"


def is_this_host(name: str) -> bool:
    """True if the name resolves to an address of this machine. Aliases of ~/.ssh/config do not count."""
    try:
        found = {str(address[4][0]) for address in socket.getaddrinfo(name, None, socket.AF_INET)}
    except OSError:
        return False
    own = own_addresses()
    return any(address in own or address.startswith("127.") for address in found)
