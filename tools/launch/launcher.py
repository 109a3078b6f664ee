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
from tools.launch.agent import LAUNCHER_HEARTBEAT_S
from tools.launch.hosts import SSH_FAILURE_STATUS, Connection, Host, close_and_wait, start_module_on

CONNECT_TIMEOUT_S = 30  # timeout in seconds for all hosts to respond
# Seconds from the first report of a hang to the table, in which ranks without a report are `silent`
HANG_COLLECT_S = 4.0
STOP_TIMEOUT_S = 60  # seconds after a stop request until a host that is still running is considered lost
TRACEBACK_START = "Traceback (most recent call last):"
FROZEN_RUNPY = "<frozen runpy>"  # in a traceback's first entry if the program was started with `python -m`
KEPT_LINE_COUNT = 200  # number of output lines kept per host to find the reason for a failure
# Seconds within which several signals count as one. timeout, systemd and experiments/ send a signal to a
# process group, and the first process in the group forwards the same signal again.
SIGNAL_ECHO_S = 0.5
HOST_COLOUR_CODES = (36, 33, 35, 32, 34, 96, 93, 95)  # terminal (ANSI) colour of each host's label, in turn


@dataclass(eq=False)  # connections are compared by identity
class HostConnection(Connection):
    """Connection to the agent on one of the job's hosts."""

    log_file: Path
    hello_event: dict[str, Any] | None = None  # first event from the agent
    exit_status: int | None = None  # the agent's exit status, or None while it is running
    failure_message: str = ""  # error message from the first process on this host that reported a failure
    last_lines: list[str] = field(default_factory=list)  # last KEPT_LINE_COUNT + 1 output lines
    hides_output: bool = False  # True once the launcher's traceback has started; it is not printed
    last_line_at: float = field(default_factory=time.monotonic)  # time.monotonic() of the agent's last line

    @property
    def is_connected(self) -> bool:
        """True from the agent's first event until the agent's end."""
        return self.hello_event is not None and self.exit_status is None

    def record_line(self, output_line: str) -> None:
        """Append a line of the host's output to the log file and to last_lines."""
        self.last_lines = [*self.last_lines[-KEPT_LINE_COUNT:], output_line]
        with contextlib.suppress(OSError):  # a full disk on this machine does not end the job
            self.log_file.parent.mkdir(parents=True, exist_ok=True)
            with open(self.log_file, "a", encoding="utf-8") as opened_log:
                opened_log.write(f"{output_line}\n")


def device_variables(host: Host) -> dict[str, str]:
    """Return environment variables that select a host's devices, or {} if the devices are numbered from 0."""
    has_default_devices = host.devices == tuple(range(len(host.devices)))
    return {} if has_default_devices else visible_devices(host.devices)


class Launcher(ABC):
    """Connections to all hosts of a job. The main thread handles one event after another."""

    def __init__(self, hosts: list[Host], log_dir: Path):
        self.host_names = [host.name for host in hosts]
        self.log_dir = log_dir
        self.connections: list[HostConnection] = []
        self.members = self.connections  # connections to the hosts that take part in the current launch
        # Calls of handlers such as on_event(), which the main thread makes
        self.pending_calls: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self.received_signals: list[int] = []  # numbers of the signals that this process has received
        self.last_signal_at = 0.0  # time.monotonic() of the last signal
        self.hang_reports: dict[int, Evidence] = {}  # reports from the ranks of a hanging job, by rank
        # time.monotonic() of the first report of a hang, or infinity after the table
        self.first_hang_at: float | None = None
        self.stop_requested_at: float | None = None  # time.monotonic() of the first stop request

    def receive_signals_and_send_heartbeats(self) -> None:
        """Replace this process's signal handlers, and send heartbeats to the agents in a thread.

        The new signal handlers only queue calls of on_signal() for the main thread.
        """
        # A process receives SIGHUP when the terminal is closed or the SSH connection is lost.
        hangup_signals = () if is_under_nohup() else (signal.SIGHUP,)

        def call_on_signal_later(signal_number: int, _frame: object) -> None:
            self.pending_calls.put(partial(self.on_signal, signal_number))

        for signal_number in (signal.SIGINT, signal.SIGTERM, *hangup_signals):
            signal.signal(signal_number, call_on_signal_later)
        threading.Thread(target=self._send_heartbeats, daemon=True).start()

    def connect(self, host: Host) -> HostConnection:
        """Start an agent on a host, over SSH unless the host is this machine.

        A new thread receives the agent's output and events.
        """
        agent_process = start_module_on(host.name, "tools.launch.agent")
        connection = HostConnection(host, agent_process, self.log_dir / f"{host.name}.log")
        self.connections.append(connection)
        threading.Thread(target=self._receive_from_agent, args=(connection,), daemon=True).start()
        return connection

    def close(self) -> None:
        """End all agents, after printing the table of a job that hangs.

        Agents that have not sent an event yet are killed. All others have STOP_TIMEOUT_S to end.
        """
        self._show_hang_table_if_due(HANG_COLLECT_S)
        for connection in self.silent_connections():
            connection.process.kill()  # ssh hangs, and the host has no checkpoint to save
        close_and_wait(self.connections, STOP_TIMEOUT_S)

    def silent_connections(self) -> list[HostConnection]:
        """Return connections to the hosts whose agents have not sent an event yet."""
        return [connection for connection in self.connections if connection.hello_event is None]

    def handle_event(self) -> None:
        """Wait up to half a second for an event, signal or output line, and call the handler.

        This method also gives up the hosts that are still running STOP_TIMEOUT_S after a stop request.
        """
        if self.stop_requested_at and time.monotonic() - self.stop_requested_at > STOP_TIMEOUT_S:
            for connection in self.members:
                # The agent on an unreachable host stops without heartbeats.
                if connection.exit_status is None:
                    self.give_up(connection)
        with contextlib.suppress(queue.Empty):
            call_handler = self.pending_calls.get(timeout=0.5)
            call_handler()
        self._show_hang_table_if_due()

    def give_up(self, connection: HostConnection) -> None:
        """Kill this machine's end of a connection, and treat the host as lost."""
        connection.process.kill()
        self.on_agent_end(connection, SSH_FAILURE_STATUS)

    def on_output_line(self, connection: HostConnection, output_line: str) -> None:
        """Record a line of a host's output in the host's log file, and print it unless it is hidden."""
        connection.record_line(output_line)
        self._print_or_hide(connection, output_line)

    def on_event(self, connection: HostConnection, event: dict[str, Any]) -> None:
        """Handle an event from an agent, or from a process on the agent's host (onecurve/system/env.py).

        The stacks in a `hang` event are written to a file in the log folder.
        """
        event_name = event["event"]
        if event_name == "hello":
            connection.hello_event = event
        elif event_name == "failed":
            connection.failure_message = connection.failure_message or event["message"]
        elif event_name == "hang":
            self.first_hang_at = self.first_hang_at or time.monotonic()
            if stacks_text := event.pop("stacks", ""):
                with contextlib.suppress(OSError):
                    self.log_dir.mkdir(parents=True, exist_ok=True)
                    (self.log_dir / f"hang_rank_{event['rank']}.txt").write_text(stacks_text)
            self.hang_reports[event["rank"]] = event | {"host": connection.host.name}

    @abstractmethod
    def on_agent_end(self, connection: HostConnection, exit_status: int) -> None:
        """Handle the end of an agent. This method may be called more than once for the same connection."""

    def on_signal(self, signal_number: int) -> None:
        """Request all hosts to stop on the first signal, and to kill their processes on a later signal.

        Signals within SIGNAL_ECHO_S of the previous signal are ignored.
        """
        previous_signal_at = self.last_signal_at
        self.last_signal_at = time.monotonic()
        if not self.received_signals:
            self.stop_all()
            kill_remedy = "Send a second signal to kill all processes."
            self.log(f"stopping: every process saves a checkpoint and exits. {kill_remedy}")
        elif self.last_signal_at - previous_signal_at > SIGNAL_ECHO_S:
            self.request_all("kill")
        self.received_signals.append(signal_number)

    def stop_all(self) -> None:
        """Request all agents to stop their processes. handle_event() gives up those that do not."""
        self.stop_requested_at = self.stop_requested_at or time.monotonic()
        self.request_all("stop")

    def request_all(self, request_name: str, connections: list[HostConnection] | None = None) -> None:
        """Send a request to the agents that are still running, by default on all hosts."""
        for connection in self.connections if connections is None else connections:
            if connection.exit_status is None:
                connection.request(request_name)

    def _receive_from_agent(self, connection: HostConnection) -> None:
        """Queue a handler call for each event and output line of an agent, and for the agent's end."""
        for event_or_line in connection.events_and_lines():
            # Set the time in this thread, because a suspended terminal can block the main thread while hosts
            # respond.
            connection.last_line_at = time.monotonic()
            is_output_line = isinstance(event_or_line, str)
            handler_method: Callable[..., None] = self.on_output_line if is_output_line else self.on_event
            self.pending_calls.put(partial(handler_method, connection, event_or_line))
        self.pending_calls.put(partial(self.on_agent_end, connection, connection.process.wait()))

    def _send_heartbeats(self) -> None:
        """Send heartbeats in a separate thread, because a suspended terminal can block the main thread."""
        while True:
            self.request_all("beat")
            time.sleep(LAUNCHER_HEARTBEAT_S)

    # --- Output

    def _show_hang_table_if_due(self, sooner_s: float = 0.0) -> None:
        """Print the table of a hanging job once, HANG_COLLECT_S - sooner_s seconds after the first report."""
        if self.first_hang_at and time.monotonic() - self.first_hang_at >= HANG_COLLECT_S - sooner_s:
            self.first_hang_at = math.inf  # prevents a second table
            for table_line in hang_table(list(self.hang_reports.values())):
                self.log(table_line)
            self.log(f"the stacks of all threads are in {self.log_dir}/hang_rank_*.txt")

    def end_preempted(self) -> int:
        """Print that the same command continues the job, and return the exit status of a preempted job."""
        self.log(f"preempted: the same command continues the job (exit status {PREEMPTED_STATUS})")
        return PREEMPTED_STATUS

    def log(self, line: str) -> None:
        """Print a line. Ignore errors if the process reading stdout (for example `| tee`) has ended."""
        try:
            print(line, flush=True)
        except OSError:
            sys.stdout = open(os.devnull, "w")  # discards all later lines  # noqa: SIM115

    def padded_label(self, connection: HostConnection) -> str:
        """Return a host's name, padded to the width of the longest name, and in colour on a terminal."""
        host_label_width = max(map(len, self.host_names))
        host_label = f"{connection.host.name:{host_label_width}}"
        if not sys.stdout.isatty() or "NO_COLOR" in os.environ:
            return host_label
        host_index = self.host_names.index(connection.host.name)
        colour_code = HOST_COLOUR_CODES[host_index % len(HOST_COLOUR_CODES)]
        return f"\033[{colour_code}m{host_label}\033[0m"

    def _print_or_hide(self, connection: HostConnection, output_line: str) -> None:
        """Print a line of a host's output.

        Once the launcher's traceback has started, print only error messages.
        """
        if output_line == TRACEBACK_START:
            return  # the next line shows whether this traceback is from the launcher
        previous_output_lines = connection.last_lines[-2:-1]  # empty before the second line
        if previous_output_lines == [TRACEBACK_START]:
            connection.hides_output = connection.hides_output or FROZEN_RUNPY in output_line
            self._print_line(connection, TRACEBACK_START)
        self._print_line(connection, output_line)

    def _print_line(self, connection: HostConnection, output_line: str) -> None:
        """Print a line after the host's name. Print only error messages while the host's output is hidden."""
        if not connection.hides_output or output_line.startswith("error: "):
            self.log(f"{self.padded_label(connection)} | {output_line}")
