"""Job runner for launch.py, which starts the job on each host and stops all hosts if one fails."""

import re
import shlex
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from onecurve.system.env import PREEMPTED_STATUS, PROCESSES_VARIABLE
from onecurve.system.paths import ROOT
from tools.launch.agent import SUSPENDED
from tools.launch.hosts import SSH_FAILURE_STATUS, Host, master_address
from tools.launch.launcher import CONNECT_TIMEOUT_S, HostConnection, Launcher, device_variables

CPU_VARIABLE = "ACCELERATE_USE_CPU"
# Text in scripts that select the CPU
CPU_SCRIPT_PATTERN = rf"^\s*(from|import) onecurve\b|cpu=True|{CPU_VARIABLE}"
# Start of the lines that ssh prints about a lost connection
SSH_ERROR = re.compile(r"(Timeout, server|Connection (to|reset|closed)|client_loop|Read from remote|ssh)")
LAUNCHER_EXCEPTIONS = ("subprocess.CalledProcessError", "torch.distributed.elastic.")  # starts of their names


@dataclass(frozen=True)
class LaunchPlan:
    """Hosts, command and environment variables of one launch."""

    hosts: list[Host]
    launcher_flags: list[str]  # flags for accelerate launch
    script_command: list[str]  # script path, and flags for the script
    env: dict[str, str]  # environment of each process, sent over stdin to keep secrets out of command lines
    master_addr: str | None  # the first host's address, or None for the address from ssh
    port: int  # rendezvous port on the first host
    log_dir: Path  # folder for one log file per host

    @property
    def process_count(self) -> int:
        return sum(len(host.devices) for host in self.hosts)

    def launch_command(self, host_rank: int, first_host_address: str) -> list[str]:
        """Return the command that starts the job's processes on one host.

        Args:
            host_rank: The host's index in the job.
            first_host_address: The first host's address. Ignored in a job on one host.
        """
        host_count = len(self.hosts)
        # accelerate divides --num_processes by the number of hosts. torchrun's agents add up the process
        # counts of all hosts.
        device_count = len(self.hosts[host_rank].devices)
        job_flags_text = f"--num_machines {host_count} --num_processes {host_count * device_count}"
        job_flags_text += " --gpu_ids all"  # overrides the config file; the agent sets CUDA_VISIBLE_DEVICES
        if host_count > 1:
            job_flags_text += f" --machine_rank {host_rank}"
            job_flags_text += f" --main_process_ip {first_host_address} --main_process_port {self.port}"
        launcher_command = [sys.executable, "-m", "accelerate.commands.launch", *self.launcher_flags]
        return [*launcher_command, *job_flags_text.split(), *self.script_command]

    def host_descriptions(self, first_host_address: str) -> list[str]:
        """Return a description of each host's ranks and devices.

        With several hosts, the first description contains the first host's address.
        """
        host_descriptions: list[str] = []
        first_rank = 0
        for host in self.hosts:
            device_count = len(host.devices)
            last_rank = first_rank + device_count - 1
            rank_text = f"rank {first_rank}" if device_count == 1 else f"ranks {first_rank}-{last_rank}"
            host_descriptions.append(f"{rank_text}  devices {','.join(map(str, host.devices))}")
            first_rank += device_count
        if len(self.hosts) > 1:
            host_descriptions[0] += f"  master {first_host_address}:{self.port}"
        return host_descriptions

    def first_host_address(self, connections: Sequence[HostConnection]) -> str:
        """Return the address at which all hosts can reach the first host.

        Args:
            connections: Connections to all hosts, after their hello events have arrived.
        """
        hello_events = [connection.hello_event for connection in connections if connection.hello_event]
        return self.master_addr or master_address(hello_events)

    def cpu_hint(self, connections: Sequence[HostConnection]) -> str | None:
        """Return a hint about a script whose processes would run as separate jobs, or None.

        On hosts without a GPU, Accelerate runs each process as a separate job unless the script or the
        environment selects the CPU. Scripts that import onecurve select the CPU.
        """
        script_path, *script_flags = self.script_command
        script_text = (ROOT / script_path).read_text(errors="replace")
        job_selects_cpu = re.search(CPU_SCRIPT_PATTERN, script_text, re.MULTILINE) or CPU_VARIABLE in self.env
        hello_events = [connection.hello_event for connection in connections]
        some_host_has_gpus = any(hello_event and hello_event["has_gpus"] for hello_event in hello_events)
        if self.process_count == 1 or job_selects_cpu or some_host_has_gpus or "--cpu" in script_flags:
            return None
        processes_text = f"each of the {self.process_count} processes"
        return (
            f"{script_path} does not import onecurve."
            f" On hosts without a GPU, {processes_text} therefore runs as a separate job."
            " To run one job that trains with DDP over gloo, create Accelerator(cpu=True) in the script,"
            f" or put {CPU_VARIABLE}=true before this command and pass --env {CPU_VARIABLE}."
        )

    def start(self, connections: Sequence[HostConnection], job_id: str = "", **round_env: str) -> None:
        """Start the job's processes on all hosts.

        Args:
            connections: Connections to all hosts.
            job_id: ID of an elastic job. Each host first kills all processes from earlier rounds of this job.
            round_env: Additional environment variables for each process.
        """
        first_host_address = self.first_host_address(connections)
        process_env = self.env | {PROCESSES_VARIABLE: str(self.process_count)} | round_env
        for host_rank, connection in enumerate(connections):
            connection.request(
                "start",
                job=job_id,
                command=self.launch_command(host_rank, first_host_address),
                env=device_variables(connection.host) | process_env,
                master=(first_host_address, self.port) if len(connections) > 1 else None,
                is_first_host=host_rank == 0,
            )


class JobRunner(Launcher):
    """Single launch of a job on all hosts. If a host fails, all other hosts are stopped."""

    def __init__(self, plan: LaunchPlan):
        super().__init__(plan.hosts, plan.log_dir)
        self.plan = plan
        self.failed_connections: list[HostConnection] = []  # connections to failed hosts, in order of failure

    def run(self, dry_run: bool) -> int:
        """Run the job and return its exit status.

        Args:
            dry_run: True to only print the command for each host, without connecting to the hosts.

        Returns:
            0 (finished), 75 (preempted, the same command continues), 1 (failed), or 128 + a signal's number.
        """
        if dry_run:
            self._print_commands()
            return 0
        job_start_s = time.monotonic()
        self.receive_signals_and_send_heartbeats()
        for host in self.plan.hosts:
            self.connect(host)
        try:
            if self._wait_for_agents():
                self._print_hosts(self.plan.first_host_address(self.connections))
                if cpu_hint := self.plan.cpu_hint(self.connections):
                    self.log(cpu_hint)
                self.plan.start(self.connections)
                startup_s = time.monotonic() - job_start_s
                self.log(f"started the job after {startup_s:.2f} s. Logs are in {self.log_dir}")
                while any(connection.exit_status is None for connection in self.connections):
                    self.handle_event()
            return self._job_exit_status()
        finally:
            self.close()

    def on_agent_end(self, connection: HostConnection, exit_status: int) -> None:
        """Record an agent's exit status. If the agent has failed, stop all other hosts."""
        if connection.exit_status is not None:
            return  # already recorded
        connection.exit_status = exit_status
        if exit_status != 0:
            self.failed_connections.append(connection)
            self.stop_all()

    def _wait_for_agents(self) -> bool:
        """Wait until all hosts have responded. Return False after a timeout or a signal."""
        deadline_s = time.monotonic() + CONNECT_TIMEOUT_S
        while silent_connections := self.silent_connections():
            if time.monotonic() > deadline_s:
                first_silent, *_ = silent_connections
                first_silent.last_lines.append(f"the host did not respond within {CONNECT_TIMEOUT_S} s")
                self.failed_connections.append(first_silent)
            if self.failed_connections or self.received_signals:
                return False
            self.handle_event()
        return True

    def _print_hosts(self, first_host_address: str) -> None:
        """Print each host's name, SSH address and ranks."""
        default_address = first_host_address  # for a host without an SSH address, which is this machine
        host_descriptions = self.plan.host_descriptions(first_host_address)
        for connection, host_description in zip(self.connections, host_descriptions, strict=True):
            assert connection.hello_event
            ssh_address = connection.hello_event["reached_at"]
            self.log(f"{self.padded_label(connection)}  {ssh_address or default_address}  {host_description}")
            default_address = "this host"  # only the first host's line needs the address

    def _print_commands(self) -> None:
        """Print the command for each host, without connecting to the hosts."""
        hosts = self.plan.hosts
        first_host_address = self.plan.master_addr or hosts[0].name
        if len(hosts) > 1 and not self.plan.master_addr:
            flag_remedy = "To use a different address, pass --master_addr ADDRESS."
            self.log(f"All hosts must be able to reach the first host as {first_host_address}. {flag_remedy}")
        host_descriptions = self.plan.host_descriptions(first_host_address)
        for host_rank, (host, host_description) in enumerate(zip(hosts, host_descriptions, strict=True)):
            self.log(f"{host.name}  {host_description}")
            device_assignments = [f"{variable}={value}" for variable, value in device_variables(host).items()]
            launch_command = self.plan.launch_command(host_rank, first_host_address)
            self.log(f"    {shlex.join([*device_assignments, *launch_command])}")
        if cpu_hint := self.plan.cpu_hint(self.connections):
            self.log(cpu_hint)

    def _job_exit_status(self) -> int:
        """Print why the job has not finished, if so, and return the job's exit status."""
        exit_statuses = {connection.exit_status for connection in self.connections}
        if not self.failed_connections and exit_statuses <= {0}:
            return 0
        failed_statuses = [connection.exit_status for connection in self.failed_connections]
        # Hosts that fail after the first failed host were stopped.
        decisive_statuses = failed_statuses if self.received_signals else failed_statuses[:1]
        if PREEMPTED_STATUS in decisive_statuses:
            return self.end_preempted()
        if self.received_signals:
            return 128 + self.received_signals[0]  # the status that shells report after a signal
        first_failed = min(self.failed_connections, key=lambda connection: failure_cause(connection).doubt)
        has_stopped_others = len(self.connections) > 1 and first_failed.hello_event
        consequence = "All other hosts were stopped. " if has_stopped_others else ""
        host_and_reason = f"{first_failed.host.name}: {failure_cause(first_failed).reason}"
        return print_error(f"{host_and_reason}. {consequence}See the log {first_failed.log_file}")


def print_error(message: str) -> int:
    """Print an error message and return the exit status 1."""
    print(f"error: {message}", file=sys.stderr)
    return 1


class FailureCause(NamedTuple):
    """Reason for a host's failure, and the likelihood that a different host caused the failure."""

    doubt: int  # from 0 (this host's failure is the cause) to 5 (most likely a consequence)
    reason: str


def failure_cause(connection: HostConnection) -> FailureCause:
    """Return the reason for a host's failure, with a doubt from 0 to 5 (see FailureCause).

    Processes that import onecurve report the reason for a failure. Without a report, this function guesses
    the reason from the host's last output lines.
    """
    lines_with_text = (line for line in reversed(connection.last_lines) if line.strip("=- "))  # not rulers
    last_host_line = next(lines_with_text, f"exit status {connection.exit_status}")
    if connection.hello_event is None:
        ssh_remedy = f"`ssh {connection.host.name}` must work without a prompt"
        return FailureCause(0, f"{last_host_line} ({ssh_remedy}, and {ROOT} must contain the project)")
    if connection.exit_status == SSH_FAILURE_STATUS:
        if SSH_ERROR.match(last_host_line):
            return FailureCause(0, f"the ssh connection was lost ({last_host_line})")
        # ssh prints the same for both reasons.
        return FailureCause(0, "the agent was killed, or the ssh connection was lost")
    agent_status = connection.exit_status or 0
    if agent_status < 0:  # only an agent without ssh, on this machine, has a negative status
        return FailureCause(0, f"the agent was killed by signal {-agent_status}")
    host_output = "\n".join(connection.last_lines)
    if suspended_match := re.search(rf"^error: (.* {re.escape(SUSPENDED)})$", host_output, re.MULTILINE):
        return FailureCause(1, suspended_match[1])
    # torchrun reports exit codes. Ignore signal 15 (SIGTERM), with which torchrun ends the other processes,
    # and NCCL's signal 6 (SIGABRT).
    if kill_match := re.search(r"exitcode *: *-(?!15\b|6\b)(\d+)", host_output):
        return FailureCause(1, f"a process of the job was killed by signal {kill_match[1]}")
    if connection.failure_message:
        return FailureCause(2, connection.failure_message)
    # Messages such as `error: ...` from commands, or `script.py: error: ...` from argparse
    if error_messages := re.findall(r"^(?:\S+: )?error: (.*)", host_output, re.MULTILINE):
        return FailureCause(3, error_messages[0])
    # Last line of each Python traceback, after torch's prefix such as `[rank0]: `, if any
    exceptions = re.findall(r"^(?:\[\w+\]: ?)?(\w[\w.]*(?:Error|Exception): .*)", host_output, re.MULTILINE)
    if script_exceptions := [line for line in exceptions if not line.startswith(LAUNCHER_EXCEPTIONS)]:
        return FailureCause(4, script_exceptions[-1])
    # The line before torchrun's report is the message that the script passed to sys.exit().
    torchrun_report = re.search(r"^(.*)\nE\d{4} .* failed (\(exitcode: \d+\))", host_output, re.MULTILINE)
    if torchrun_report:
        exit_message, exit_code_text = torchrun_report.groups()
        return FailureCause(4, f"{exit_message} {exit_code_text}")
    return FailureCause(5, last_host_line)
