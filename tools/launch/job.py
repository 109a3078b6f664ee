"""launch.py's part of a job: starts the job on each host, and ends it on all together."""

import re
import shlex
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from onecurve.system.env import PREEMPTED, PROCESSES
from onecurve.system.paths import ROOT
from tools.launch.agent import SUSPENDED
from tools.launch.hosts import SSH_FAILED, Host, master_address
from tools.launch.launcher import CONNECT_S, HostConnection, Launcher, selected_devices

USE_CPU = "ACCELERATE_USE_CPU"
# Begins ssh's own line about a lost connection
SSHS_OWN = re.compile(r"(Timeout, server|Connection (to|reset|closed)|client_loop|Read from remote|ssh)")
LAUNCHERS_OWN = ("subprocess.CalledProcessError", "torch.distributed.elastic.")  # exceptions of launchers


@dataclass(frozen=True)
class LaunchPlan:
    hosts: list[Host]
    launcher: list[str]  # flags of accelerate launch
    script: list[str]  # the script and its flags
    env: dict[str, str]  # for each process; sent over stdin, so that no command line shows it
    master_addr: str | None
    port: int
    log_dir: Path

    @property
    def processes(self) -> int:
        return sum(len(host.devices) for host in self.hosts)

    def words(self, rank: int, master: str) -> list[str]:
        """The command of host number `rank`. master: the first one's address, unused in a job on one host."""
        hosts = len(self.hosts)
        # accelerate divides this number by the hosts, and torchrun's agents add up what each of them starts.
        own = f"--num_machines {hosts} --num_processes {hosts * len(self.hosts[rank].devices)}".split()
        own += ["--gpu_ids", "all"]  # of those that the agent lets it see, whatever a config file names
        if hosts > 1:
            own += f"--machine_rank {rank} --main_process_ip {master} --main_process_port {self.port}".split()
        return [sys.executable, "-m", "accelerate.commands.launch", *self.launcher, *own, *self.script]

    def shares(self, master: str) -> list[str]:
        """Return each host's ranks and devices, as text; for the first one of several also the master."""
        texts, first = [], 0
        for host in self.hosts:
            count = len(host.devices)
            ranks = f"rank {first}" if count == 1 else f"ranks {first}-{first + count - 1}"
            address = f"  master {master}:{self.port}" if first == 0 and len(self.hosts) > 1 else ""
            texts.append(f"{ranks}  devices {','.join(map(str, host.devices))}{address}")
            first += count
        return texts

    def address(self, connections: Sequence[HostConnection]) -> str:
        """The first host's address, by which all reach it. connections: to all hosts, which have answered."""
        hellos = [connection.hello for connection in connections if connection.hello]
        return self.master_addr or master_address(hellos)

    def remark(self, connections: Sequence[HostConnection]) -> str | None:
        """What a script that imports nothing of onecurve/ must set on hosts without a GPU; None for others.

        Accelerate by itself makes each process a job of its own there.
        """
        text = (ROOT / self.script[0]).read_text(errors="replace")
        knows = re.search(rf"^\s*(from|import) onecurve\b|cpu=True|{USE_CPU}", text, re.MULTILINE)
        has_gpus = any(connection.hello and connection.hello["has_gpus"] for connection in connections)
        if self.processes == 1 or knows or has_gpus or USE_CPU in self.env or "--cpu" in self.script:
            return None
        return (
            f"{self.script[0]} imports nothing of onecurve/: without a GPU each of its {self.processes}"
            " processes is a job of its own. For one job it must make Accelerator(cpu=True); or put"
            f" {USE_CPU}=true before this command, and give --env {USE_CPU}. It then trains by DDP over gloo"
        )

    def start(self, connections: Sequence[HostConnection], job: str = "", **env: str) -> None:
        """Starts each host's part. job: a name; leftovers of that job on a host are killed first."""
        address = self.address(connections)
        for rank, connection in enumerate(connections):
            connection.request(
                "start",
                job=job,
                words=self.words(rank, address),
                env=selected_devices(connection.host) | self.env | {PROCESSES: str(self.processes)} | env,
                master=(address, self.port) if len(connections) > 1 else None,
                first=rank == 0,
            )


class JobRunner(Launcher):
    """Launches a job on all hosts once. When one host fails, all are stopped."""

    def __init__(self, plan: LaunchPlan):
        super().__init__(plan.hosts, plan.log_dir)
        self.plan = plan
        self.failed: list[HostConnection] = []  # in the order in which they ended

    def run(self, dry_run: bool) -> int:
        """Runs the job. Returns the exit status: 0, 75 after a preemption, 1, or 128 + a signal's number.

        dry_run: print the command of each host instead, without connecting to one.
        """
        if dry_run:
            self._show_commands()
            return 0
        began = time.monotonic()
        self.listen()
        for host in self.plan.hosts:
            self.connect(host)
        try:
            if self._wait_for_agents():
                self._show_hosts(self.plan.address(self.connections))
                if remark := self.plan.remark(self.connections):
                    self.log(remark)
                self.plan.start(self.connections)
                self.log(f"started after {time.monotonic() - began:.2f} s, logs in {self.log_dir}")
                while any(connection.status is None for connection in self.connections):
                    self.handle_event()
            return self._status()
        finally:
            self.close()

    def on_end(self, connection: HostConnection, status: int) -> None:
        if connection.status is not None:
            return
        connection.status = status
        if status != 0:
            self.failed.append(connection)
            self.stop_all()

    def _wait_for_agents(self) -> bool:
        """Waits until all hosts answer, before anything is started. False if one fails to, or on a signal."""
        deadline = time.monotonic() + CONNECT_S
        while silent := [connection for connection in self.connections if connection.hello is None]:
            if time.monotonic() > deadline:
                silent[0].last_lines.append(f"no answer within {CONNECT_S} s")
                self.failed.append(silent[0])
            if self.failed or self.signals:
                return False
            self.handle_event()
        return True

    def _show_hosts(self, address: str) -> None:
        """Prints the hosts, where ssh reached them, and their ranks."""
        shares = self.plan.shares(address)
        for rank, (connection, share) in enumerate(zip(self.connections, shares, strict=True)):
            assert connection.hello
            at = connection.hello["reached_at"] or (address if rank == 0 else "this host")
            self.log(f"{self.label(connection)}  {at}  {share}")

    def _show_commands(self) -> None:
        """Prints the command that starts each host's part by hand. A launch finds the address by ssh."""
        hosts, address = self.plan.hosts, self.plan.master_addr or self.plan.hosts[0].name
        if len(hosts) > 1 and not self.plan.master_addr:
            self.log(
                f"All hosts must reach the first one as {address}. Otherwise give --master_addr ADDRESS."
            )
        for rank, (host, share) in enumerate(zip(hosts, self.plan.shares(address), strict=True)):
            self.log(f"{host.name}  {share}")
            visible = [f"{name}={value}" for name, value in selected_devices(host).items()]
            self.log(f"    {shlex.join([*visible, *self.plan.words(rank, address)])}")
        if remark := self.plan.remark(self.connections):
            self.log(remark)

    def _status(self) -> int:
        if not self.failed and all(connection.status == 0 for connection in self.connections):
            return 0
        saved = [connection for connection in self.failed if connection.status == PREEMPTED]
        if saved and (self.signals or self.failed[0] in saved):  # hosts that failed later were stopped
            return self.end_preempted()
        if self.signals:
            return 128 + self.signals[0]
        first = min(self.failed, key=lambda connection: failure_cause(connection)[0])
        others = "; the other hosts were stopped" if len(self.connections) > 1 and first.hello else ""
        return fail(f"{first.host.name}: {failure_cause(first)[1]}{others}. Its log: {first.log_file}")


def fail(message: str) -> int:
    print(f"error: {message}", file=sys.stderr)
    return 1


def failure_cause(connection: HostConnection) -> tuple[int, str]:
    """Return a rank from 0 (a cause) to 5 (most likely a consequence), and the reason of this host's failure.

    A process of ours reports its failure. Other causes are guessed from the output.
    """
    lines = connection.last_lines
    last = next((line for line in reversed(lines) if line.strip("=- ")), f"exit status {connection.status}")
    if connection.hello is None:
        needs = f"`ssh {connection.host.name}` must work without a prompt, and the project must be at {ROOT}"
        return 0, f"{last} ({needs})"
    if connection.status == SSH_FAILED:
        if SSHS_OWN.match(last):
            return 0, f"the connection is lost ({last})"
        return 0, "its agent was killed, or the connection is lost"  # ssh says the same of both: nothing
    if (connection.status or 0) < 0:  # of the agent that ran here, without ssh
        return 0, f"its agent was killed by signal {-(connection.status or 0)}"
    text = "\n".join(lines)
    if suspended := re.search(rf"^error: (.* {re.escape(SUSPENDED)})$", text, re.MULTILINE):
        return 1, suspended[1]
    # torchrun's report. Survivors end by signal 15 of torchrun, or 6 of NCCL.
    if killed := re.search(r"exitcode *: *-(?!15\b|6\b)(\d+)", text):
        return 1, f"a process was killed by signal {killed[1]}"
    if connection.failure:
        return 2, connection.failure
    if errors := re.findall(r"^(?:\S+: )?error: (.*)", text, re.MULTILINE):
        return 3, errors[0]
    raised = re.findall(r"^(?:\[\w+\]: ?)?(\w[\w.]*(?:Error|Exception): .*)", text, re.MULTILINE)
    if raised := [line for line in raised if not line.startswith(LAUNCHERS_OWN)]:
        return 4, raised[-1]
    # sys.exit("...") leaves its message alone before torchrun's report.
    said = re.search(r"^(.*)\nE\d{4} .* failed (\(exitcode: \d+\))", text, re.MULTILINE)
    return (4, f"{said[1]} {said[2]}") if said else (5, last)
