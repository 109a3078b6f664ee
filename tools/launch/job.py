"""Runner of a job in launch.py, which starts the job on each host and stops all hosts when one fails."""

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
# Start of a line that ssh prints about a lost connection
SSH_ERROR = re.compile(r"(Timeout, server|Connection (to|reset|closed)|client_loop|Read from remote|ssh)")
LAUNCHER_ERRORS = ("subprocess.CalledProcessError", "torch.distributed.elastic.")  # exceptions of launchers


@dataclass(frozen=True)
class LaunchPlan:
    """Hosts, command and environment of one launch."""

    hosts: list[Host]
    launcher: list[str]  # flags of accelerate launch
    script: list[str]  # the script and its flags
    env: dict[str, str]  # environment of each process, sent over stdin so that it appears on no command line
    master_addr: str | None
    port: int
    log_dir: Path

    @property
    def processes(self) -> int:
        return sum(len(host.devices) for host in self.hosts)

    def words(self, rank: int, master: str) -> list[str]:
        """Return the command of one host.

        Args:
            rank: Index of the host.
            master: Address of the first host. Unused in a job on one host.
        """
        hosts = len(self.hosts)
        # accelerate divides --num_processes by the number of hosts, and torchrun's agents add them up again.
        flags = f"--num_machines {hosts} --num_processes {hosts * len(self.hosts[rank].devices)}"
        flags += " --gpu_ids all"  # overrides the config file, because the agent sets CUDA_VISIBLE_DEVICES
        if hosts > 1:
            flags += f" --machine_rank {rank} --main_process_ip {master} --main_process_port {self.port}"
        launcher = [sys.executable, "-m", "accelerate.commands.launch", *self.launcher]
        return [*launcher, *flags.split(), *self.script]

    def shares(self, master: str) -> list[str]:
        """Describe each host's ranks and devices. The first of several hosts also names the master."""
        texts, first = [], 0
        for host in self.hosts:
            count = len(host.devices)
            ranks = f"rank {first}" if count == 1 else f"ranks {first}-{first + count - 1}"
            address = f"  master {master}:{self.port}" if first == 0 and len(self.hosts) > 1 else ""
            texts.append(f"{ranks}  devices {','.join(map(str, host.devices))}{address}")
            first += count
        return texts

    def address(self, connections: Sequence[HostConnection]) -> str:
        """Return the address at which all hosts can reach the first host.

        Args:
            connections: Connections to all hosts. All of them have answered.
        """
        hellos = [connection.hello for connection in connections if connection.hello]
        return self.master_addr or master_address(hellos)

    def remark(self, connections: Sequence[HostConnection]) -> str | None:
        """Return a hint for a script that would not form one job on hosts without a GPU, or None.

        Without a GPU, Accelerate runs each process as a separate job unless the script or the environment
        selects the CPU. Scripts that import onecurve/ select the CPU.
        """
        text = (ROOT / self.script[0]).read_text(errors="replace")
        selects_cpu = re.search(rf"^\s*(from|import) onecurve\b|cpu=True|{USE_CPU}", text, re.MULTILINE)
        has_gpus = any(connection.hello and connection.hello["has_gpus"] for connection in connections)
        if self.processes == 1 or selects_cpu or has_gpus or USE_CPU in self.env or "--cpu" in self.script:
            return None
        return (
            f"{self.script[0]} imports nothing of onecurve/. Without a GPU, each of its {self.processes}"
            " processes runs as a separate job. For one job, create Accelerator(cpu=True) in the script, or"
            f" put {USE_CPU}=true before this command and pass --env {USE_CPU}. The job then trains with DDP"
            " over gloo."
        )

    def start(self, connections: Sequence[HostConnection], job: str = "", **env: str) -> None:
        """Start each host's part of the job.

        Args:
            connections: Connections to all hosts.
            job: Name of an elastic job. Each host first kills processes of an earlier round of this job.
            env: Additional environment of each process.
        """
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
    """A single launch on all hosts. When one host fails, all hosts are stopped."""

    def __init__(self, plan: LaunchPlan):
        super().__init__(plan.hosts, plan.log_dir)
        self.plan = plan
        self.failed: list[HostConnection] = []  # in the order in which they failed

    def run(self, dry_run: bool) -> int:
        """Run the job and return its exit status.

        Args:
            dry_run: Print the command of each host instead, without connecting to any host.

        Returns:
            0 (finished), 75 (preempted, the same command resumes), 1 (failed), or 128 + a signal's number.
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
        """Wait until all hosts have answered. Return False if a host does not answer, or after a signal."""
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
        """Print each host's name, the address that ssh connected to, and its ranks."""
        shares = self.plan.shares(address)
        for rank, (connection, share) in enumerate(zip(self.connections, shares, strict=True)):
            assert connection.hello
            host_address = connection.hello["reached_at"] or (address if rank == 0 else "this host")
            self.log(f"{self.label(connection)}  {host_address}  {share}")

    def _show_commands(self) -> None:
        """Print the commands that start each host's part by hand. Does not connect to any host."""
        hosts, address = self.plan.hosts, self.plan.master_addr or self.plan.hosts[0].name
        if len(hosts) > 1 and not self.plan.master_addr:
            self.log(
                f"All hosts must be able to reach the first one as {address}. Otherwise pass --master_addr"
                " ADDRESS."
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
    """Return the reason of a host's failure, and a rating of how likely another host caused the failure.

    Processes that import onecurve/ report their failures. Other reasons are guessed from the host's output.

    Returns:
        A number from 0 (certainly the cause) to 5 (most likely a consequence), and the reason.
    """
    lines = connection.last_lines
    last = next((line for line in reversed(lines) if line.strip("=- ")), f"exit status {connection.status}")
    if connection.hello is None:
        needs = f"`ssh {connection.host.name}` must work without a prompt, and the project must be at {ROOT}"
        return 0, f"{last} ({needs})"
    if connection.status == SSH_FAILED:
        if SSH_ERROR.match(last):
            return 0, f"the connection is lost ({last})"
        return 0, "its agent was killed, or the connection is lost"  # ssh prints the same in both cases
    if (connection.status or 0) < 0:  # an agent on this machine, started without ssh
        return 0, f"its agent was killed by signal {-(connection.status or 0)}"
    text = "\n".join(lines)
    if suspended := re.search(rf"^error: (.* {re.escape(SUSPENDED)})$", text, re.MULTILINE):
        return 1, suspended[1]
    # torchrun reports exit codes. torchrun ends surviving processes with signal 15, and NCCL with signal 6.
    if killed := re.search(r"exitcode *: *-(?!15\b|6\b)(\d+)", text):
        return 1, f"a process was killed by signal {killed[1]}"
    if connection.failure:
        return 2, connection.failure
    if errors := re.findall(r"^(?:\S+: )?error: (.*)", text, re.MULTILINE):
        return 3, errors[0]
    raised = re.findall(r"^(?:\[\w+\]: ?)?(\w[\w.]*(?:Error|Exception): .*)", text, re.MULTILINE)
    if raised := [line for line in raised if not line.startswith(LAUNCHER_ERRORS)]:
        return 4, raised[-1]
    # The line before torchrun's report is the message of sys.exit("...").
    report = re.search(r"^(.*)\nE\d{4} .* failed (\(exitcode: \d+\))", text, re.MULTILINE)
    return (4, f"{report[1]} {report[2]}") if report else (5, last)
