"""launch.py's end of a job: starts an agent on each host, shows their output, and ends them together."""

import contextlib
import json
import os
import queue
import re
import shlex
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import IO, Any

from common.hosts.agent import BEAT_S, EVENT, HELLO, SUSPENDED
from common.hosts.hostfile import Host
from common.hosts.ssh import SSH_FAILED, close_and_wait, master_address, start_on
from common.system.env import PREEMPTED
from common.system.gpus import visible_devices
from common.system.paths import ROOT
from common.system.processes import is_under_nohup

CONNECT_S = 30  # for all hosts to answer
END_S = 60  # from `stop` until a host that has not ended is given up
TRACEBACK = "Traceback (most recent call last):"
LAUNCHERS_OWN = ("subprocess.CalledProcessError", "torch.distributed.elastic.")  # exceptions
LINES = 200  # of a host's output that are kept to find the reason of a failure
COLOURS = (36, 33, 35, 32, 34, 96, 93, 95)


@dataclass(frozen=True)
class LaunchPlan:
    hosts: list[Host]
    launcher: list[str]  # flags of accelerate launch
    script: list[str]  # and its flags
    env: dict[str, str]  # for each process, sent over stdin: no command line shows it
    master_addr: str | None
    port: int
    log_dir: Path

    @property
    def processes(self) -> int:
        return sum(len(host.devices) for host in self.hosts)

    def words(self, rank: int, address: str) -> list[str]:
        """The command of host number `rank`. address: the first host's, unused in a job on one host."""
        flags = ["--num_machines", str(len(self.hosts)), "--num_processes", str(self.processes)]
        if len(self.hosts) > 1:
            flags += ["--machine_rank", str(rank), "--main_process_ip", address]
            flags += ["--main_process_port", str(self.port)]
        return [sys.executable, "-m", "accelerate.commands.launch", *self.launcher, *flags, *self.script]


@dataclass
class HostConnection:
    """The agent on one host of the job, and what it has printed."""

    host: Host
    process: subprocess.Popen[str]
    log_file: Path
    log: IO[str] | None = None
    hello: dict[str, Any] | None = None  # the agent's first message
    status: int | None = None
    lock: threading.Lock = field(default_factory=threading.Lock)  # of the agent's input
    last_lines: list[str] = field(default_factory=list)
    only_log: bool = False  # what follows is its launcher's traceback, which is not shown

    def keep(self, line: str) -> None:
        self.last_lines = [*self.last_lines[-LINES:], line]
        with contextlib.suppress(OSError):  # a full disk here must not end the job there
            if self.log is None:
                self.log_file.parent.mkdir(parents=True, exist_ok=True)
                self.log = open(self.log_file, "w", buffering=1, encoding="utf-8")  # noqa: SIM115
            self.log.write(line + "\n")

    def visible_devices(self) -> dict[str, str]:
        """The environment of a host of which not all devices take part, or not the first ones."""
        devices = self.host.devices
        if devices == tuple(range(len(devices))):
            return {}
        return visible_devices(devices)

    def send(self, line: str) -> None:
        with self.lock, contextlib.suppress(OSError, ValueError):
            assert self.process.stdin
            self.process.stdin.write(line + "\n")
            self.process.stdin.flush()


class JobRunner:
    def __init__(self, plan: LaunchPlan):
        self.plan = plan
        self.events: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()  # their handlers
        self.signals: list[int] = []  # that this launcher has received
        self.failed: list[HostConnection] = []  # in the order in which they ended
        self.stopped_at: float | None = None  # when all were told to stop

    def run(self, dry_run: bool) -> int:
        """Runs the job. Returns the exit status: 0, 75 after a preemption, 1, or 128 + a signal's number."""
        # SIGHUP comes from a terminal that is closed, or an ssh connection that is lost.
        hangup = () if is_under_nohup() else (signal.SIGHUP,)
        for number in (signal.SIGINT, signal.SIGTERM, *hangup):
            signal.signal(number, lambda number, _: self.events.put(partial(self._on_signal, number)))
        began = time.monotonic()
        self.connections = [self._connect(host) for host in self.plan.hosts]
        threading.Thread(target=self._send_heartbeats, daemon=True).start()
        try:
            if self._wait_for_agents():
                hellos = [c.hello for c in self.connections if c.hello]
                found = master_address([h["address"] for h in hellos], [h["client"] for h in hellos])
                address = self.plan.master_addr or found
                self._show_hosts(address, dry_run)
                if dry_run:
                    return 0
                self._start(address)
                self._say(f"started after {time.monotonic() - began:.2f} s, logs in {self.plan.log_dir}")
                while any(connection.status is None for connection in self.connections):
                    self._handle_event()
            return self._status()
        finally:
            close_and_wait([connection.process for connection in self.connections], END_S)
            for connection in self.connections:
                if connection.log:
                    connection.log.close()

    def _connect(self, host: Host) -> HostConnection:
        process = start_on(host.name, [sys.executable, "-m", "common.hosts.agent"], ROOT)
        connection = HostConnection(host, process, self.plan.log_dir / f"{host.name}.log")
        threading.Thread(target=self._listen, args=(connection,), daemon=True).start()
        return connection

    def _listen(self, connection: HostConnection) -> None:
        assert connection.process.stdout
        for line in connection.process.stdout:
            self.events.put(partial(self._on_line, connection, line.rstrip("\n")))
        self.events.put(partial(self._on_end, connection, connection.process.wait()))

    def _send_heartbeats(self) -> None:
        """Sends heartbeats, in a thread: a suspended terminal can block the main thread's output."""
        while True:
            self._send_all("")
            time.sleep(BEAT_S)

    def _wait_for_agents(self) -> bool:
        """True when all hosts answer. Nothing is started on any of them before."""
        deadline = time.monotonic() + CONNECT_S
        while silent := [connection for connection in self.connections if connection.hello is None]:
            if time.monotonic() > deadline:
                silent[0].last_lines.append(f"no answer within {CONNECT_S} s")
                self.failed.append(silent[0])
            if self.failed or self.signals:
                return False
            self._handle_event()
        return True

    def _start(self, address: str) -> None:
        for rank, connection in enumerate(self.connections):
            env = connection.visible_devices() | self.plan.env
            master = (address, self.plan.port) if len(self.connections) > 1 else None
            part = {"words": self.plan.words(rank, address), "env": env, "master": master, "first": rank == 0}
            connection.send(json.dumps(part))

    def _handle_event(self) -> None:
        if self.stopped_at and time.monotonic() - self.stopped_at > END_S:
            for connection in self.connections:
                if connection.status is None:  # can't be reached; its agent ends there by itself
                    connection.process.kill()
                    self._on_end(connection, SSH_FAILED)
        with contextlib.suppress(queue.Empty):
            self.events.get(timeout=0.5)()

    def _on_line(self, connection: HostConnection, line: str) -> None:
        if connection.hello is None and line.startswith(HELLO):
            connection.hello = json.loads(line.removeprefix(HELLO))
            return
        if line.startswith(EVENT):
            self._on_event(connection, json.loads(line.removeprefix(EVENT)))
            return
        connection.keep(line)
        if line == TRACEBACK:
            return  # shown before the next line, unless that line shows it is the launcher's
        if connection.last_lines[-2:-1] == [TRACEBACK]:
            connection.only_log = connection.only_log or "<frozen runpy>" in line  # `python -m`
            self._show_line(connection, TRACEBACK)
        self._show_line(connection, line)

    def _on_event(self, connection: HostConnection, event: dict[str, Any]) -> None:
        """An event that a process of the host has reported."""

    def _on_end(self, connection: HostConnection, status: int) -> None:
        if connection.status is not None:
            return
        connection.status = status
        if status != 0:
            self.failed.append(connection)
            self._stop_all()

    def _on_signal(self, number: int) -> None:
        if self.signals:
            self._send_all("kill")
        else:
            self._stop_all()
            self._say("stopping: every process saves and ends; once more ends all at once")
        self.signals.append(number)

    def _stop_all(self) -> None:
        self.stopped_at = self.stopped_at or time.monotonic()
        self._send_all("stop")

    def _send_all(self, word: str) -> None:
        for connection in self.connections:
            if connection.status is None:
                connection.send(word)

    # --- Output

    def _say(self, text: str) -> None:
        """Prints. When the reader is gone (`| tee` ends at Ctrl-C, too) the job and its logs continue."""
        try:
            print(text, flush=True)
        except OSError:
            sys.stdout = open(os.devnull, "w")  # noqa: SIM115

    def _show_line(self, connection: HostConnection, line: str) -> None:
        if not connection.only_log or line.startswith("error: "):
            self._say(f"{self._label(connection)} | {line}")

    def _label(self, connection: HostConnection) -> str:
        name = f"{connection.host.name:{max(len(host.name) for host in self.plan.hosts)}}"
        if not sys.stdout.isatty() or "NO_COLOR" in os.environ:
            return name
        return f"\033[{COLOURS[self.connections.index(connection) % len(COLOURS)]}m{name}\033[0m"

    def _show_hosts(self, address: str, with_commands: bool) -> None:
        """Prints the hosts and their ranks, and the command that would start each host's part by hand."""
        first = 0
        for rank, connection in enumerate(self.connections):
            count = len(connection.host.devices)
            ranks = f"rank {first}" if count == 1 else f"ranks {first}-{first + count - 1}"
            first += count
            devices = ",".join(map(str, connection.host.devices))
            master = f"  master {address}:{self.plan.port}" if rank == 0 and len(self.connections) > 1 else ""
            assert connection.hello
            at = connection.hello["address"] or (address if rank == 0 else "this host")
            self._say(f"{self._label(connection)}  {at}  {ranks}  devices {devices}{master}")
            if with_commands:
                visible = [f"{name}={value}" for name, value in connection.visible_devices().items()]
                self._say(f"    {shlex.join([*visible, *self.plan.words(rank, address)])}")

    def _status(self) -> int:
        if not self.failed and all(connection.status == 0 for connection in self.connections):
            return 0
        saved = [connection for connection in self.failed if connection.status == PREEMPTED]
        if saved and (self.signals or self.failed[0] in saved):  # those that fail later were stopped
            self._say(f"preempted: the same command continues (exit status {PREEMPTED})")
            return PREEMPTED
        if self.signals:
            return 128 + self.signals[0]
        first = min(self.failed, key=lambda connection: _cause(connection)[0])
        others = "; the other hosts were stopped" if len(self.connections) > 1 and first.hello else ""
        what = f"{first.host.name}: {_cause(first)[1]}{others}"
        print(f"error: {what}. Its log: {first.log_file}", file=sys.stderr)
        return 1


def _cause(connection: HostConnection) -> tuple[int, str]:
    """The reason why this host's part ended, after its rank: 0 is a cause, 4 most likely a consequence."""
    lines = connection.last_lines
    last = next((line for line in reversed(lines) if line.strip("=- ")), f"exit status {connection.status}")
    if connection.hello is None:
        needs = f"`ssh {connection.host.name}` must work without a question, the project be at {ROOT}"
        return 0, f"{last} ({needs})"
    if connection.status == SSH_FAILED:
        return 0, f"the connection is lost ({last})"
    text = "\n".join(lines)
    if suspended := re.search(rf"^error: (.* {re.escape(SUSPENDED)})$", text, re.MULTILINE):
        return 1, suspended[1]
    # torchrun's report. It ends survivors by 15, and NCCL ends them by 6.
    if killed := re.search(r"exitcode *: *-(?!15\b|6\b)(\d+)", text):
        return 1, f"a process was killed by signal {killed[1]}"
    if errors := re.findall(r"^(?:\S+: )?error: (.*)", text, re.MULTILINE):
        return 2, errors[0]
    raised = re.findall(r"^(?:\[\w+\]: ?)?(\w[\w.]*(?:Error|Exception): .*)", text, re.MULTILINE)
    if raised := [line for line in raised if not line.startswith(LAUNCHERS_OWN)] or raised:
        return 3, raised[-1]
    return 4, last
