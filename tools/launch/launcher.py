"""Connections of launch.py to a job's agents, with output, heartbeats and requests to stop."""

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
from onecurve.system.env import PREEMPTED
from onecurve.system.gpus import visible_devices
from onecurve.system.processes import is_under_nohup
from tools.launch.agent import BEAT_S
from tools.launch.hosts import SSH_FAILED, Connection, Host, close_and_wait, start_on

CONNECT_S = 30  # timeout for all hosts to answer
COLLECT_S = 4.0  # time from the first report of a hang to the table; ranks that sent no report are `silent`
END_S = 60  # time after `stop` until a host that still runs is considered lost
TRACEBACK = "Traceback (most recent call last):"
LINES = 200  # number of last output lines to keep for each host, to find the reason of a failure
# timeout, systemd and experiments/ send a signal to a process group, whose first process forwards the same
# signal. Signals that arrive within this time are treated as one signal.
ECHO_S = 0.5
COLOURS = (36, 33, 35, 32, 34, 96, 93, 95)


@dataclass(eq=False)
class HostConnection(Connection):
    """Connection to the agent on one host of the job."""

    log_file: Path
    hello: dict[str, Any] | None = None  # the agent's first event
    status: int | None = None
    failure: str = ""  # message of the first process on this host that reported a failure
    last_lines: list[str] = field(default_factory=list)
    only_log: bool = False  # True after the start of the launcher's traceback, which is logged but not shown
    received_at: float = field(default_factory=time.monotonic)  # time of the agent's last line

    def record(self, line: str) -> None:
        """Append a line of the host's output to its log file and to last_lines."""
        self.last_lines = [*self.last_lines[-LINES:], line]
        with contextlib.suppress(OSError):  # a full disk on this machine must not end the job
            self.log_file.parent.mkdir(parents=True, exist_ok=True)
            with open(self.log_file, "a", encoding="utf-8") as log:
                log.write(f"{line}\n")


def selected_devices(host: Host) -> dict[str, str]:
    """Return the variables that select a host's devices. No variable is needed for the first devices."""
    is_default = host.devices == tuple(range(len(host.devices)))
    return {} if is_default else visible_devices(host.devices)


class Launcher(ABC):
    """Connections of a job, one per host. The main thread runs the handlers, one event after another."""

    def __init__(self, hosts: list[Host], log_dir: Path):
        self.names, self.log_dir = [host.name for host in hosts], log_dir
        self.connections: list[HostConnection] = []
        self.members = self.connections  # connections to hosts that take part in the launch
        self.events: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()  # pending calls to handlers
        self.signals: list[int] = []  # signals that this process received
        self.signal_at = 0.0  # time of the last signal
        self.hangs: dict[int, Evidence] = {}  # reports of ranks in a hanging job
        self.hang_at: float | None = None  # time of the first report, or infinite after the table was shown
        self.stopped_at: float | None = None  # time of the first request to stop

    def listen(self) -> None:
        """Start receiving signals and sending heartbeats."""
        # SIGHUP arrives when a terminal is closed or an ssh connection is lost.
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
            silent.process.kill()  # ssh hangs, and the host has no state to save
        close_and_wait(self.connections, END_S)

    def handle_event(self) -> None:
        """Wait up to half a second for an event and handle it."""
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
        self._show(connection, line)

    def on_event(self, connection: HostConnection, event: dict[str, Any]) -> None:
        """Handle an event of the agent, or of a process on its host (onecurve/system/env.py)."""
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
        """Handle the end of a host's part. This method may be called more than once for a connection."""

    def on_signal(self, number: int) -> None:
        before, self.signal_at = self.signal_at, time.monotonic()
        if not self.signals:
            self.stop_all()
            self.log("stopping: every process saves and exits. A second signal kills all processes.")
        elif self.signal_at - before > ECHO_S:
            self.request_all("kill")
        self.signals.append(number)

    def stop_all(self) -> None:
        self.stopped_at = self.stopped_at or time.monotonic()
        self.request_all("stop")

    def request_all(self, name: str, connections: list[HostConnection] | None = None) -> None:
        """Send a request over the given connections, by default over all connections."""
        for connection in self.connections if connections is None else connections:
            if connection.status is None:
                connection.request(name)

    def _listen(self, connection: HostConnection) -> None:
        for event in connection.events():
            # Set in this thread, because a suspended terminal can block the main thread while hosts respond.
            connection.received_at = time.monotonic()
            handle: Callable[..., None] = self.on_line if isinstance(event, str) else self.on_event
            self.events.put(partial(handle, connection, event))
        self.events.put(partial(self.on_end, connection, connection.process.wait()))

    def _send_heartbeats(self) -> None:
        """Send heartbeats from a separate thread, because a suspended terminal can block the main thread."""
        while True:
            self.request_all("beat")
            time.sleep(BEAT_S)

    # --- Output

    def _show_hang(self, sooner_s: float = 0.0) -> None:
        """Show the table of a hanging job once, COLLECT_S - sooner_s seconds after the first report."""
        if self.hang_at and time.monotonic() - self.hang_at >= COLLECT_S - sooner_s:
            self.hang_at = math.inf
            for line in hang_table(list(self.hangs.values())):
                self.log(line)
            self.log(f"stacks of all threads: {self.log_dir}/hang_rank_*.txt")

    def end_preempted(self) -> int:
        self.log(f"preempted: the same command continues (exit status {PREEMPTED})")
        return PREEMPTED

    def log(self, text: str) -> None:
        """Print a line. The job continues if the reader of stdout has ended, like `| tee` after Ctrl-C."""
        try:
            print(text, flush=True)
        except OSError:
            sys.stdout = open(os.devnull, "w")  # noqa: SIM115

    def label(self, connection: HostConnection) -> str:
        name = f"{connection.host.name:{max(map(len, self.names))}}"
        if not sys.stdout.isatty() or "NO_COLOR" in os.environ:
            return name
        return f"\033[{COLOURS[self.names.index(connection.host.name) % len(COLOURS)]}m{name}\033[0m"

    def _show(self, connection: HostConnection, line: str) -> None:
        """Print a line of a host's output. After the launcher's traceback begins, print only error lines."""
        if line == TRACEBACK:
            return  # wait for the next line, which shows if this is the launcher's traceback
        if connection.last_lines[-2:-1] == [TRACEBACK]:
            connection.only_log = connection.only_log or "<frozen runpy>" in line  # `python -m`
            self._show_line(connection, TRACEBACK)
        self._show_line(connection, line)

    def _show_line(self, connection: HostConnection, line: str) -> None:
        if not connection.only_log or line.startswith("error: "):
            self.log(f"{self.label(connection)} | {line}")
