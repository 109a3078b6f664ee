"""Job runner for launch.py, which starts the job on each host and stops all hosts if one fails."""

import re
import shlex
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from onecurve.system.env import PREEMPTED_STATUS, PROCESSES_VARIABLE
from onecurve.system.paths import ROOT
from tools.launch.agent import SUSPENDED
from tools.launch.hosts import SSH_FAILED, Host, master_address
from tools.launch.launcher import CONNECT_S, HostConnection, Launcher, selected_devices

USE_CPU = "ACCELERATE_USE_CPU"
SELECTS_CPU = rf"^\s*(from|import) onecurve\b|cpu=True|{USE_CPU}"  # text of scripts that select the CPU
# Start of the lines that ssh prints about a lost connection
SSH_ERROR = re.compile(r"(Timeout, server|Connection (to|reset|closed)|client_loop|Read from remote|ssh)")
LAUNCHER_ERRORS = ("subprocess.CalledProcessError", "torch.distributed.elastic.")  # exceptions of launchers


@dataclass(frozen=True)
class LaunchPlan:
    """Hosts, command and environment variables of one launch."""

    hosts: list[Host]
    launcher: list[str]  # flags for accelerate launch
    script: list[str]  # script path, and flags for the script
    env: dict[str, str]  # environment of each process, sent over stdin to keep secrets out of command lines
    master_addr: str | None  # the first host's address, or None for the address from ssh
    port: int  # rendezvous port on the first host
    log_dir: Path  # folder for one log file per host

    @property
    def processes(self) -> int:
        return sum(len(host.devices) for host in self.hosts)

    def words(self, rank: int, master: str) -> list[str]:
        """Return the command that starts the job's processes on one host.

        Args:
            rank: The host's index in the job.
            master: The first host's address. Ignored in a job on one host.
        """
        hosts = len(self.hosts)
        # accelerate divides --num_processes by the number of hosts. torchrun's agents add up the process
        # counts of all hosts.
        flags = f"--num_machines {hosts} --num_processes {hosts * len(self.hosts[rank].devices)}"
        flags += " --gpu_ids all"  # overrides the config file, because the agent sets CUDA_VISIBLE_DEVICES
        if hosts > 1:
            flags += f" --machine_rank {rank} --main_process_ip {master} --main_process_port {self.port}"
        launcher = [sys.executable, "-m", "accelerate.commands.launch", *self.launcher]
        return [*launcher, *flags.split(), *self.script]

    def shares(self, master: str) -> list[str]:
        """Return a description of each host's ranks and devices.

        With several hosts, the first description contains the master's address.
        """
        descriptions, first_rank = [], 0
        for host in self.hosts:
            device_count = len(host.devices)
            last_rank = first_rank + device_count - 1
            ranks = f"rank {first_rank}" if device_count == 1 else f"ranks {first_rank}-{last_rank}"
            address = f"  master {master}:{self.port}" if first_rank == 0 and len(self.hosts) > 1 else ""
            descriptions.append(f"{ranks}  devices {','.join(map(str, host.devices))}{address}")
            first_rank += device_count
        return descriptions

    def address(self, connections: Sequence[HostConnection]) -> str:
        """Return the address at which all hosts can reach the first host.

        Args:
            connections: Connections to all hosts, after their hello events have arrived.
        """
        hellos = [connection.hello for connection in connections if connection.hello]
        return self.master_addr or master_address(hellos)

    def remark(self, connections: Sequence[HostConnection]) -> str | None:
        """Return a hint about a script whose processes would run as separate jobs, or None.

        On hosts without a GPU, Accelerate runs each process as a separate job unless the script or the
        environment selects the CPU. Scripts that import onecurve select the CPU.
        """
        script_text = (ROOT / self.script[0]).read_text(errors="replace")
        selects_cpu = re.search(SELECTS_CPU, script_text, re.MULTILINE)
        has_gpus = any(connection.hello and connection.hello["has_gpus"] for connection in connections)
        if self.processes == 1 or selects_cpu or has_gpus or USE_CPU in self.env or "--cpu" in self.script:
            return None
        return (
            f"{self.script[0]} does not import onecurve. On hosts without a GPU, each of the {self.processes}"
            " processes therefore runs as a separate job. To run one job that trains with DDP over gloo,"
            f" create Accelerator(cpu=True) in the script, or put {USE_CPU}=true before this command and pass"
            f" --env {USE_CPU}."
        )

    def start(self, connections: Sequence[HostConnection], job: str = "", **env: str) -> None:
        """Start the job's processes on all hosts.

        Args:
            connections: Connections to all hosts.
            job: Name of an elastic job. Each host first kills all processes from earlier rounds of this job.
            env: Additional environment variables for each process.
        """
        address = self.address(connections)
        for rank, connection in enumerate(connections):
            connection.request(
                "start",
                job=job,
                words=self.words(rank, address),
                env=selected_devices(connection.host)
                | self.env
                | {PROCESSES_VARIABLE: str(self.processes)}
                | env,
                master=(address, self.port) if len(connections) > 1 else None,
                first=rank == 0,
            )


class JobRunner(Launcher):
    """Single launch of a job on all hosts. If a host fails, all other hosts are stopped."""

    def __init__(self, plan: LaunchPlan):
        super().__init__(plan.hosts, plan.log_dir)
        self.plan = plan
        self.failed: list[HostConnection] = []  # connections to failed hosts, in order of failure

    def run(self, dry_run: bool) -> int:
        """Run the job and return its exit status.

        Args:
            dry_run: True to only print the command for each host, without connecting to the hosts.

        Returns:
            0 (finished), 75 (preempted, the same command continues), 1 (failed), or 128 + a signal's number.
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
                elapsed_s = time.monotonic() - began
                self.log(f"started the job after {elapsed_s:.2f} s. Logs are in {self.log_dir}")
                while any(connection.status is None for connection in self.connections):
                    self.handle_event()
            return self._exit_status()
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
        """Wait until all hosts have responded. Return False after a timeout or a signal."""
        end_s = time.monotonic() + CONNECT_S
        while silent_hosts := [connection for connection in self.connections if connection.hello is None]:
            if time.monotonic() > end_s:
                silent_hosts[0].last_lines.append(f"the host did not respond within {CONNECT_S} s")
                self.failed.append(silent_hosts[0])
            if self.failed or self.signals:
                return False
            self.handle_event()
        return True

    def _show_hosts(self, address: str) -> None:
        """Print each host's name, SSH address and ranks."""
        shares = self.plan.shares(address)
        for rank, (connection, share) in enumerate(zip(self.connections, shares, strict=True)):
            assert connection.hello
            host_address = connection.hello["reached_at"] or (address if rank == 0 else "this host")
            self.log(f"{self.label(connection)}  {host_address}  {share}")

    def _show_commands(self) -> None:
        """Print the command for each host, without connecting to the hosts."""
        hosts, address = self.plan.hosts, self.plan.master_addr or self.plan.hosts[0].name
        if len(hosts) > 1 and not self.plan.master_addr:
            remedy = "To use a different address, pass --master_addr ADDRESS."
            self.log(f"All hosts must be able to reach the first host as {address}. {remedy}")
        for rank, (host, share) in enumerate(zip(hosts, self.plan.shares(address), strict=True)):
            self.log(f"{host.name}  {share}")
            variables = [f"{name}={value}" for name, value in selected_devices(host).items()]
            self.log(f"    {shlex.join([*variables, *self.plan.words(rank, address)])}")
        if remark := self.plan.remark(self.connections):
            self.log(remark)

    def _exit_status(self) -> int:
        if not self.failed and all(connection.status == 0 for connection in self.connections):
            return 0
        preempted = [connection for connection in self.failed if connection.status == PREEMPTED_STATUS]
        if preempted and (self.signals or self.failed[0] in preempted):  # hosts that fail later were stopped
            return self.end_preempted()
        if self.signals:
            return 128 + self.signals[0]
        first_failed = min(self.failed, key=lambda connection: failure_cause(connection)[0])
        others = "All other hosts were stopped. " if len(self.connections) > 1 and first_failed.hello else ""
        cause = failure_cause(first_failed)[1]
        return fail(f"{first_failed.host.name}: {cause}. {others}See the log {first_failed.log_file}")


def fail(message: str) -> int:
    print(f"error: {message}", file=sys.stderr)
    return 1


def failure_cause(connection: HostConnection) -> tuple[int, str]:
    """Return the reason for a host's failure, and the likelihood that a different host caused the failure.

    Processes that import onecurve report the reason for a failure. Without a report, this function guesses
    the reason from the host's output.

    Returns:
        Number from 0 (the failure of this host is the cause) to 5 (the failure is most likely a consequence),
        and the reason.
    """
    lines = connection.last_lines
    texts = (line for line in reversed(lines) if line.strip("=- "))  # skips empty lines and rulers
    last_line = next(texts, f"exit status {connection.status}")
    if connection.hello is None:
        ssh = f"`ssh {connection.host.name}` must work without a prompt"
        return 0, f"{last_line} ({ssh}, and {ROOT} must contain the project)"
    if connection.status == SSH_FAILED:
        if SSH_ERROR.match(last_line):
            return 0, f"the ssh connection was lost ({last_line})"
        return 0, "the agent was killed, or the ssh connection was lost"  # ssh prints the same for both
    if (connection.status or 0) < 0:  # only an agent without ssh, on this machine, has a negative status
        return 0, f"the agent was killed by signal {-(connection.status or 0)}"
    output = "\n".join(lines)
    if suspended := re.search(rf"^error: (.* {re.escape(SUSPENDED)})$", output, re.MULTILINE):
        return 1, suspended[1]
    # torchrun reports exit codes. Ignore signal 15 (SIGTERM), with which torchrun ends the other processes,
    # and NCCL's signal 6 (SIGABRT).
    if kill_report := re.search(r"exitcode *: *-(?!15\b|6\b)(\d+)", output):
        return 1, f"a process of the job was killed by signal {kill_report[1]}"
    if connection.failure:
        return 2, connection.failure
    if error_messages := re.findall(r"^(?:\S+: )?error: (.*)", output, re.MULTILINE):
        return 3, error_messages[0]
    exceptions = re.findall(r"^(?:\[\w+\]: ?)?(\w[\w.]*(?:Error|Exception): .*)", output, re.MULTILINE)
    if exceptions := [line for line in exceptions if not line.startswith(LAUNCHER_ERRORS)]:
        return 4, exceptions[-1]
    # The line before torchrun's report is the message that the script passed to sys.exit().
    torchrun_report = re.search(r"^(.*)\nE\d{4} .* failed (\(exitcode: \d+\))", output, re.MULTILINE)
    if torchrun_report:
        return 4, f"{torchrun_report[1]} {torchrun_report[2]}"
    return 5, last_line
