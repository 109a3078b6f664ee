"""Commands on the hosts of a job, by the ordinary ssh client: what ~/.ssh/config says holds."""

import contextlib
import shlex
import socket
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path

from common.system.network import own_addresses

# A key that is not known is refused, nothing is asked, and a host that is gone is noticed within 25 s.
SSH = ("ssh", "-T", "-x", "-a", "-o", "BatchMode=yes", "-o", "StrictHostKeyChecking=yes")
SSH += ("-o", "ConnectTimeout=10", "-o", "ServerAliveInterval=5", "-o", "ServerAliveCountMax=4")
SSH += ("-o", "ControlMaster=no", "-o", "ControlPath=none")  # an older connection has other options
SSH_FAILED = 255  # ssh's own exit status


def start(host: str, words: Sequence[str], folder: Path) -> subprocess.Popen:
    """Starts these words in this folder there. Lines go in and come out; Ctrl-C here does not reach it."""
    return subprocess.Popen(
        _command(host, words, folder),
        cwd=folder,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        bufsize=1,
        start_new_session=True,
    )


def let_go(processes: Sequence[subprocess.Popen], within_s: float) -> None:
    """The end of its input is the sign to end for what was started; ssh itself does not outlive this."""
    for process in processes:
        with contextlib.suppress(OSError):
            process.stdin.close()
    deadline = time.monotonic() + within_s
    for process in processes:
        try:
            process.wait(max(0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            process.kill()


def _command(host: str, words: Sequence[str], folder: Path) -> list[str]:
    """What runs these words in this folder on that host. On this host ssh is not needed."""
    if is_here(host):
        return list(words)
    return [*SSH, host, f"cd {shlex.quote(str(folder))} && exec {shlex.join(words)}"]


def master_address(reached_at: Sequence[str | None], asked_from: Sequence[str | None]) -> str:
    """Of the first host, for all. By host: its address to which ssh came, and from which; None without ssh.

    As ssh reached the first one; where that is this host, as ssh came from it to the second.
    """
    return reached_at[0] or next(filter(None, asked_from), None) or "localhost"


def is_here(host: str) -> bool:
    """Whether the name is this machine's. One that only ~/.ssh/config knows is not."""
    try:
        found = {address[4][0] for address in socket.getaddrinfo(host, None, socket.AF_INET)}
    except OSError:
        return False
    own = own_addresses()
    return any(address in own or address.startswith("127.") for address in found)
