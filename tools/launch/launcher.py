"""launch.py's connections to a job's agents, for output, heartbeats and stop requests."""

import contextlib
import math
import os
import queue
import signal
import sys
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from onecurve.distributed.hang import Evidence, hang_table
from onecurve.system.env import PREEMPTED_STATUS
from onecurve.system.gpus import visible_devices
from onecurve.system.processes import is_under_nohup
from tools.launch.agent import BEAT_S
from tools.launch.hosts import SSH_FAILED, Connection, Host, close_and_wait, start_on

CONNECT_S = 30  # timeout in seconds for all hosts to respond
COLLECT_S = 4.0  # seconds from the first report of a hang to the table, in which other ranks are `silent`
END_S = 60  # seconds after a stop request until a host that is still running is considered lost
TRACEBACK = "Traceback (most recent call last):"
KEPT_LINES = 200  # number of output lines kept per host to find the reason for a failure
# Seconds within which several signals count as one. timeout, systemd and experiments/ send a signal to a
# process group, and the first process in the group forwards the same signal again.
ECHO_S = 0.5
COLOURS = (36, 33, 35, 32, 34, 96, 93, 95)


@dataclass(eq=False)
class HostConnection(Connection):
    """Connection to the agent on one of the job's hosts."""

    log_file: Path
    hello: dict[str, Any] | None = None  # first event from the agent
    status: int | None = None  # the agent's exit status, or None while it is running
    failure: str = ""  # error message from the first process on this host that reported a failure
    last_lines: list[str] = field(default_factory=list)
    only_log: bool = False  # True once the launcher's traceback has started; it is not printed
    received_at: float = field(default_factory=time.monotonic)  # time.monotonic() of the agent's last line

    def record(self, line: str) -> None:
        """Append a line of the host's output to the log file and to last_lines."""
        self.last_lines = [*self.last_lines[-KEPT_LINES:], line]
        with contextlib.suppress(OSError):  # a full disk on this machine does not end the job
            self.log_file.parent.mkdir(parents=True, exist_ok=True)
            with open(self.log_file, "a", encoding="utf-8") as log:
                log.write(f"{line}\n")


def selected_devices(host: Host) -> dict[str, str]:
    """Return environment variables that select a host's devices, or {} if the devices are numbered from 0."""
    is_default = host.devices == tuple(range(len(host.devices)))
    return {} if is_default else visible_devices(host.devices)


class Launcher(ABC):
    """Connections to all hosts of a job. The main thread handles one event after another."""

    def __init__(self, hosts: list[Host], log_dir: Path):
        self.names, self.log_dir = [host.name for host in hosts], log_dir
        self.connections: list[HostConnection] = []
        self.members = self.connections  # connections to the hosts that take part in the current launch
        self.events: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()  # pending calls of handlers
        self.signals: list[int] = []  # numbers of the signals that this process has received
        self.signal_at = 0.0  # time.monotonic() of the last signal
        self.hangs: dict[int, Evidence] = {}  # reports from the ranks of a hanging job, by rank
        self.hang_at: float | None = None  # time.monotonic() of the first report, or infinity after the table
        self.stopped_at: float | None = None  # time.monotonic() of the first stop request

    def listen(self) -> None:
        """Start to receive signals and to send heartbeats."""
        # A process receives SIGHUP when the terminal is closed or the SSH connection is lost.
        hangup = () if is_under_nohup() else (signal.SIGHUP,)
        for number in (signal.SIGINT, signal.SIGTERM, *hangup):
            signal.signal(number, lambda number, _: self.events.put(partial(self.on_signal, number)))
        threading.Thread(target=self._send_heartbeats, daemon=True).start()

    def connect(self, host: Host) -> HostConnection:
        process = start_on(host.name, "tools.launch.agent")
        connection = HostConnection(host, process, self.log_dir / f"{host.name}.log")
        self.connections.append(connection)
        threading.Thread(target=self._listen, args=(connection,), daemon=True).start()
        return connection

    def close(self) -> None:
        self._show_hang(COLLECT_S)
        for silent in [connection for connection in self.connections if connection.hello is None]:
            silent.process.kill()  # ssh hangs, and the host has no checkpoint to save
        close_and_wait(self.connections, END_S)

    def handle_event(self) -> None:
        """Wait up to half a second for an event, and handle the event."""
        if self.stopped_at and time.monotonic() - self.stopped_at > END_S:
            for connection in self.members:
                if connection.status is None:  # an unreachable host, whose agent stops without heartbeats
                    self.give_up(connection)
        with contextlib.suppress(queue.Empty):
            self.events.get(timeout=0.5)()
        self._show_hang()

    def give_up(self, connection: HostConnection) -> None:
        connection.process.kill()
        self.on_end(connection, SSH_FAILED)

    def on_line(self, connection: HostConnection, line: str) -> None:
        connection.record(line)
        self._print_output(connection, line)

    def on_event(self, connection: HostConnection, event: dict[str, Any]) -> None:
        """Handle an event from an agent, or from a process on the agent's host (onecurve/system/env.py)."""
        if event["event"] == "hello":
            connection.hello = event
        elif event["event"] == "failed":
            connection.failure = connection.failure or event["message"]
        elif event["event"] == "hang":
            self.hang_at = self.hang_at or time.monotonic()
            if stacks := event.pop("stacks", ""):
                with contextlib.suppress(OSError):
                    self.log_dir.mkdir(parents=True, exist_ok=True)
                    (self.log_dir / f"hang_rank_{event['rank']}.txt").write_text(stacks)
            self.hangs[event["rank"]] = event | {"host": connection.host.name}

    @abstractmethod
    def on_end(self, connection: HostConnection, status: int) -> None:
        """Handle the end of an agent. This method may be called more than once for the same connection."""

    def on_signal(self, signal_number: int) -> None:
        previous_s, self.signal_at = self.signal_at, time.monotonic()
        if not self.signals:
            self.stop_all()
            remedy = "Send a second signal to kill all processes."
            self.log(f"stopping: every process saves a checkpoint and exits. {remedy}")
        elif self.signal_at - previous_s > ECHO_S:
            self.request_all("kill")
        self.signals.append(signal_number)

    def stop_all(self) -> None:
        self.stopped_at = self.stopped_at or time.monotonic()
        self.request_all("stop")

    def request_all(self, name: str, connections: list[HostConnection] | None = None) -> None:
        """Send a request over the specified connections, or by default over all connections."""
        for connection in self.connections if connections is None else connections:
            if connection.status is None:
                connection.request(name)

    def _listen(self, connection: HostConnection) -> None:
        for event in connection.events():
            # Set the time in this thread, because a suspended terminal can block the main thread while hosts
            # respond.
            connection.received_at = time.monotonic()
            handle: Callable[..., None] = self.on_line if isinstance(event, str) else self.on_event
            self.events.put(partial(handle, connection, event))
        self.events.put(partial(self.on_end, connection, connection.process.wait()))

    def _send_heartbeats(self) -> None:
        """Send heartbeats in a separate thread, because a suspended terminal can block the main thread."""
        while True:
            self.request_all("beat")
            time.sleep(BEAT_S)

    # --- Output

    def _show_hang(self, sooner_s: float = 0.0) -> None:
        """Print the table of a hanging job once, COLLECT_S - sooner_s seconds after the first report."""
        if self.hang_at and time.monotonic() - self.hang_at >= COLLECT_S - sooner_s:
            self.hang_at = math.inf
            for line in hang_table(list(self.hangs.values())):
                self.log(line)
            self.log(f"the stacks of all threads are in {self.log_dir}/hang_rank_*.txt")

    def end_preempted(self) -> int:
        self.log(f"preempted: the same command continues the job (exit status {PREEMPTED_STATUS})")
        return PREEMPTED_STATUS

    def log(self, text: str) -> None:
        """Print a line. Ignore errors if the process reading stdout (for example `| tee`) has ended."""
        try:
            print(text, flush=True)
        except OSError:
            sys.stdout = open(os.devnull, "w")  # noqa: SIM115

    def label(self, connection: HostConnection) -> str:
        name = f"{connection.host.name:{max(map(len, self.names))}}"
        if not sys.stdout.isatty() or "NO_COLOR" in os.environ:
            return name
        return f"\033[{COLOURS[self.names.index(connection.host.name) % len(COLOURS)]}m{name}\033[0m"

    def _print_output(self, connection: HostConnection, line: str) -> None:
        """Print a line of a host's output.

        Once the launcher's traceback has started, print only error messages.
        """
        if line == TRACEBACK:
            return  # the next line shows whether this traceback is from the launcher
        if connection.last_lines[-2:-1] == [TRACEBACK]:
            connection.only_log = connection.only_log or "<frozen runpy>" in line  # started with `python -m`
            self._print_line(connection, TRACEBACK)
        self._print_line(connection, line)

    def _print_line(self, connection: HostConnection, line: str) -> None:
        if not connection.only_log or line.startswith("error: "):
            self.log(f"{self.label(connection)} | {line}")
