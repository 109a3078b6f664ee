"""Elastic job runner for launch.py, which launches the job in rounds on all available hosts.

If a host is lost or receives a request to stop, it leaves the job, and the other hosts continue from
the newest checkpoint. If a lost host responds again, or if a host is added to the hostfile, all hosts save a
checkpoint, and the next round includes this host. A round's first host is also the next round's first host,
because it stores the newest checkpoint. If the first host is lost, the other hosts can continue only from
checkpoints in S3 or in a shared folder. A new host that prevents a round from training a step is temporarily
excluded.

    _gather_round: connects to hosts, chooses the round's hosts --- none for TOO_FEW_HOSTS_TIMEOUT_S,
       |                                ^                           or a signal ---> exit status
       v                                | another round
    _start_round: launches on each host |
       |                                |
       v                                |
    run: waits for the round's end      |  when a host has ended or more hosts are ready, all save and stop
       |                                |  KILL_DELAY_S after a host was lost, kills the others, which wait
       v                                |
    _judge_round: why the round ended --+--- finished, a signal, or nothing more to try ---> exit status

_exclude_faulty_hosts decides which hosts are excluded after a failed round. This method blames new hosts, or
only the new hosts that the error message names. After a round that did not train, this method also blames the
host whose failure explains the failures of the other hosts. A host that was lost or that received a request
to stop is never blamed. If the job has never trained a step, the job itself is considered faulty and ends.
"""

import itertools
import re
import time
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

from onecurve.system.env import MOST_HOSTS_VARIABLE, PER_DEVICE_VARIABLE, PREEMPTED_STATUS, ROUND_VARIABLE
from onecurve.system.text import plural
from tools.launch.agent import FENCE_TIMEOUT_S
from tools.launch.hosts import SSH_FAILURE_STATUS, Host, is_this_host
from tools.launch.job import LaunchPlan, failure_cause, print_error
from tools.launch.launcher import CONNECT_TIMEOUT_S, HostConnection, Launcher

HOST_LOST_S = 12  # seconds without a heartbeat from an agent after which the host is considered lost
# Seconds after which a lost host's agent has certainly killed the processes
FENCED_DELAY_S = FENCE_TIMEOUT_S + 3
KILL_DELAY_S = 3  # seconds from a loss to killing the other hosts' processes, which wait in a collective
CONNECT_RETRY_S = 5  # seconds between attempts to connect to a host that does not respond
MORE_HOSTS_WAIT_S = 3  # seconds to wait for more hosts before a round starts, or before a new host joins
TOO_FEW_HOSTS_TIMEOUT_S = 120  # seconds with too few available hosts after which the job ends
REJOIN_DELAY_S = 180  # seconds until a host may rejoin after a request to stop, unless the host disconnected
FIRST_EXCLUSION_S = 60  # duration in seconds of a faulty host's first exclusion; each exclusion doubles it
LONGEST_EXCLUSION_S = 3600  # maximum duration in seconds of an exclusion
MAX_FRUITLESS_ROUNDS = 3  # maximum number of consecutive failed rounds without a new checkpoint


class ElasticJob(Launcher):
    """Elastic job that runs rounds until a round finishes the training.

    Args:
        plan_for: Function that returns the plan for a round on the given hosts.
        read_hosts: Function that returns the job's hosts, which may change during the job.
        log_dir: Folder for the log files of all hosts.
        min_hosts: Minimum number of hosts in a round.
        max_hosts: Maximum number of hosts in a round, or None for no limit.
    """

    def __init__(
        self,
        plan_for: Callable[[list[Host]], LaunchPlan],
        read_hosts: Callable[[], list[Host]],
        log_dir: Path,
        min_hosts: int,
        max_hosts: int | None,
    ):
        self.hosts = read_hosts()
        super().__init__(self.hosts, log_dir)
        self.plan_for, self.read_hosts = plan_for, read_hosts
        self.min_hosts, self.max_hosts = min_hosts, max_hosts
        self.job_id = uuid.uuid4().hex
        self.round_numbers = itertools.count(1)
        # Maximum number of hosts in all rounds; part of the run's name
        self.run_max_hosts = min(max_hosts or len(self.hosts), len(self.hosts))
        self.unreachable_reasons: dict[str, str] = {}  # why a host does not respond, by host
        self.excluded_until: dict[str, float] = {}  # time.monotonic() at which a host may join again, by host
        self.exclusion_counts: dict[str, int] = {}  # number of exclusions since a host last trained, by host
        self.waiting_reasons: dict[str, str] = {}  # why an available host can't take part in a round, by host
        self.trained_host_names: set[str] = set()  # names of the hosts that have trained a step
        self.next_connect_at = 0.0  # time.monotonic() of the next attempt to connect to unreachable hosts
        self.reported_mistake = ""  # most recently reported hostfile mistake
        self.members = []  # connections to this round's hosts, starting with the first host
        self.stop_reason = ""  # reason why this round is being stopped, or an empty string
        self.member_lost_at: float | None = None  # time.monotonic() when a member was lost
        self.fenced_until = 0.0  # time.monotonic() until which a lost first host may still write files
        self.larger_round_since: float | None = None  # time.monotonic() when a larger round became possible
        self.leaving_reasons: dict[str, str] = {}  # why a host in this round is leaving, by host
        self.first_host_name: str | None = None  # first host's name in the last round that trained
        self.batch_event: dict[str, int] = {}  # values of the `batch` event: batch_size, per_device
        self.began_event: dict[str, Any] = {}  # newest `began` event: step, in_s3, is_shared
        self.is_training = False  # True once this round has begun to train
        self.is_finished = False  # True once the entire training run has finished
        self.latest_step = 0  # latest step in all rounds
        self.hosts_changed_at: float | None = None  # time.monotonic() when the last change of hosts began
        self.fruitless_rounds = 0  # number of consecutive failed rounds without a new checkpoint

    def run(self) -> int:
        """Run the job and return its exit status.

        Returns:
            0 (finished), 75 (preempted, the same command continues), 1 (failed), or 128 + a signal's number.
        """
        self.receive_signals_and_send_heartbeats()
        local_host_names = (host.name for host in self.hosts if is_this_host(host.name))
        if local_host_name := next(local_host_names, None):
            self.log(f"launch.py runs on {local_host_name}, so the job can't continue without this host")
        min_hosts_text = f"at least {plural(self.min_hosts, 'host')} of {len(self.hosts)}"
        self.log(f"the job needs {min_hosts_text}. Logs are in {self.log_dir}")
        try:
            while (chosen_members := self._gather_round()) is not None:
                self._start_round(chosen_members)
                while any(member.exit_status is None for member in self.members):
                    self.handle_event()
                    self._connect_to_missing_hosts()
                    self._give_up_lost_hosts()
                    self._stop_round_for_more_hosts()
                if (job_exit_status := self._judge_round()) is not None:
                    return job_exit_status
                self.members = []
            return self._exit_status_without_hosts()
        finally:
            self.close()

    # --- Hosts

    def _gather_round(self) -> list[HostConnection] | None:
        """Wait until a round is possible, and return connections to the round's hosts.

        This method connects to all hosts, and waits a limited time for more than the necessary hosts. It
        returns None after a signal, or after TOO_FEW_HOSTS_TIMEOUT_S with too few hosts.
        """
        gathering_start_s = time.monotonic()
        max_wait_s = MORE_HOSTS_WAIT_S if self.began_event else CONNECT_TIMEOUT_S
        while not self.received_signals:
            self._connect_to_missing_hosts()
            ready_connections = self._ready_connections()
            waited_s = time.monotonic() - gathering_start_s
            responding_hosts = [host for host in self.hosts if host.name not in self.unreachable_reasons]
            expected_hosts = [host for host in responding_hosts if not self._is_excluded(host)]
            first_host_may_write = time.monotonic() <= self.fenced_until
            chosen_members = None if first_host_may_write else self._choose_members(ready_connections)
            if chosen_members and (len(ready_connections) >= len(expected_hosts) or waited_s > max_wait_s):
                return chosen_members
            if not chosen_members and waited_s > TOO_FEW_HOSTS_TIMEOUT_S:
                return None
            self._give_up_lost_hosts()
            self.handle_event()
        return None

    def _connect_to_missing_hosts(self) -> None:
        """Start agents on all hosts without an agent.

        Every CONNECT_RETRY_S, reread the list of hosts and retry the hosts that did not respond.
        """
        now_s = time.monotonic()
        if may_reconnect := now_s > self.next_connect_at:
            self.next_connect_at = now_s + CONNECT_RETRY_S
            self._update_hosts()
        for host in self.hosts:
            connection = self._find_connection(host.name)
            # A member's connection is kept after its end, because _judge_round() needs the exit status.
            if connection and (connection.exit_status is None or connection in self.members):
                continue
            # Also connect to hosts that are leaving, because a different machine may soon respond under the
            # same name.
            if may_reconnect or host.name not in self.unreachable_reasons:
                if connection:
                    self.connections.remove(connection)
                self.connect(host)

    def _update_hosts(self) -> None:
        """Reread the list of hosts, or keep the previous list if the hostfile contains a mistake."""
        try:
            new_hosts = self.read_hosts()
            if new_hosts != self.hosts:
                self.plan_for(new_hosts)  # raises an error if the hosts have different numbers of processes
        except (ValueError, OSError) as hostfile_error:
            if str(hostfile_error) != self.reported_mistake:
                self.log(f"keeping the previous list of hosts: {hostfile_error}")
                self.reported_mistake = str(hostfile_error)
            return
        new_names = [host.name for host in new_hosts]
        previous_names = [host.name for host in self.hosts]
        if added_names := [host_name for host_name in new_names if host_name not in previous_names]:
            self.log(f"new hosts in the hostfile: {', '.join(added_names)}")
            self.host_names += [host_name for host_name in added_names if host_name not in self.host_names]
        self.hosts = new_hosts
        for removed_host_name in self.excluded_until.keys() - set(new_names):
            del self.excluded_until[removed_host_name]
        if not self.began_event:  # the run's name can't change after the first round
            round_max_hosts = min(self.max_hosts or len(new_hosts), len(new_hosts))
            self.run_max_hosts = max(self.run_max_hosts, round_max_hosts)

    def _find_connection(self, host_name: str) -> HostConnection | None:
        host_connections = (
            connection for connection in self.connections if connection.host.name == host_name
        )
        return next(host_connections, None)

    def _is_excluded(self, host: Host) -> bool:
        return time.monotonic() < self.excluded_until.get(host.name, 0)

    def _ready_connections(self) -> list[HostConnection]:
        """Return connections to all hosts that can take part in a round, starting with the first host."""
        allowed_host_names = [host.name for host in self.hosts if not self._is_excluded(host)]
        allowed_connections = filter(None, map(self._find_connection, allowed_host_names))
        ready_connections = [connection for connection in allowed_connections if connection.is_connected]
        return sorted(ready_connections, key=lambda connection: connection.host.name != self.first_host_name)

    def _choose_members(self, ready_connections: list[HostConnection]) -> list[HostConnection] | None:
        """Return connections to the hosts of the largest possible round, or None if no round is possible."""
        ready_host_names = [connection.host.name for connection in ready_connections]
        if self._needs_first_host() and ready_host_names[:1] != [self.first_host_name]:
            return None
        max_host_count = min(len(ready_connections), self.max_hosts or len(ready_connections))
        for host_count in range(max_host_count, self.min_hosts - 1, -1):
            if self._can_divide_batch(host_count):
                return ready_connections[:host_count]
        return None

    def _needs_first_host(self) -> bool:
        """Return True if only the first host's disk stores the checkpoints."""
        return bool(self.began_event) and not (self.began_event["in_s3"] or self.began_event["is_shared"])

    def _can_divide_batch(self, host_count: int) -> bool:
        """Return True if host_count hosts can share a step's micro-batches evenly."""
        if not self.batch_event:
            return True  # the batch size is not known yet
        process_count = host_count * len(self.hosts[0].devices)  # all hosts run equally many processes
        return self.batch_event["batch_size"] % (self.batch_event["per_device"] * process_count) == 0

    def _give_up_lost_hosts(self) -> None:
        """Give up hosts without a heartbeat for HOST_LOST_S, and kill a round that has lost a host.

        The other hosts' processes are killed KILL_DELAY_S after the loss.
        """
        now_s = time.monotonic()
        for connection in self.connections:
            if connection.is_connected and now_s - connection.last_line_at > HOST_LOST_S:
                connection.last_lines.append(f"the host sent no heartbeat for {HOST_LOST_S} s")
                self.give_up(connection)
        if self.member_lost_at and now_s - self.member_lost_at > KILL_DELAY_S:
            self.request_all("kill", self.members)

    def _stop_round_for_more_hosts(self) -> None:
        """Stop this round if a larger round has been possible for MORE_HOSTS_WAIT_S.

        All hosts save a checkpoint before they stop. If no larger round is possible, print why hosts wait.
        """
        can_stop_round = self.is_training and not self.stop_reason and not self.is_finished
        ready_connections = self._ready_connections() if can_stop_round else []
        chosen_members = self._choose_members(ready_connections)
        if not chosen_members or len(chosen_members) <= len(self.members):
            self.larger_round_since = None
            self._report_waiting_hosts(self._names_of_new_hosts(ready_connections))
            return
        self.larger_round_since = self.larger_round_since or time.monotonic()
        if time.monotonic() - self.larger_round_since > MORE_HOSTS_WAIT_S:
            joining_names = self._names_of_new_hosts(chosen_members)
            join_verb = "joins" if len(joining_names) == 1 else "join"
            self._stop_round(f"{', '.join(joining_names)} {join_verb}")

    def _names_of_new_hosts(self, connections: list[HostConnection]) -> list[str]:
        """Return the names of the connected hosts that do not take part in this round."""
        return [connection.host.name for connection in connections if connection not in self.members]

    def _report_waiting_hosts(self, waiting_names: list[str]) -> None:
        """Print, once per reason, why available hosts can't take part in a round."""
        waiting_reason = f"--max_hosts {self.max_hosts}"  # the reason if the round already has max_hosts
        if waiting_names and len(self.members) != self.max_hosts:
            round_hosts_text = plural(len(self.members) + len(waiting_names), "host")
            host_processes_text = plural(len(self.hosts[0].devices), "process")
            micro_batch_count = self.batch_event["batch_size"] // self.batch_event["per_device"]
            waiting_reason = f"the {micro_batch_count} micro-batches of a step can't be divided evenly"
            waiting_reason += f" among {round_hosts_text} with {host_processes_text} each"
        new_names = [name for name in waiting_names if self.waiting_reasons.get(name) != waiting_reason]
        if new_names:
            wait_verb = "waits" if len(new_names) == 1 else "wait"
            self.log(f"{', '.join(new_names)} {wait_verb}: {waiting_reason}")
        self.waiting_reasons = dict.fromkeys(waiting_names, waiting_reason)

    # --- Rounds

    def _start_round(self, chosen_members: list[HostConnection]) -> None:
        """Reset the state of the previous round, and start the job's processes on the chosen hosts."""
        self.members = chosen_members
        self.stop_reason, self.is_training = "", False
        self.leaving_reasons = {}
        self.stop_requested_at = self.member_lost_at = self.larger_round_since = None
        round_plan = self.plan_for([member.host for member in chosen_members])
        member_names = ", ".join(member.host.name for member in chosen_members)
        round_size = f"{plural(len(chosen_members), 'host')}, {plural(round_plan.process_count, 'process')}"
        self.log(f"starting on {round_size}: {member_names}")
        round_number = next(self.round_numbers)
        round_env = {MOST_HOSTS_VARIABLE: str(self.run_max_hosts), ROUND_VARIABLE: str(round_number)}
        if self.began_event:
            # Keep the micro-batch size of the previous rounds.
            round_env[PER_DEVICE_VARIABLE] = str(self.batch_event["per_device"])
        elif cpu_hint := round_plan.cpu_hint(chosen_members):
            self.log(cpu_hint)
        round_plan.start(chosen_members, self.job_id, **round_env)

    def _stop_round(self, stop_reason: str) -> None:
        """Request all hosts of this round to save a checkpoint and stop. Keep an earlier reason and time."""
        self.stop_reason = self.stop_reason or stop_reason
        self.stop_requested_at = self.stop_requested_at or time.monotonic()
        self.hosts_changed_at = self.hosts_changed_at or time.monotonic()
        self.request_all("stop", self.members)

    def on_event(self, connection: HostConnection, event: dict[str, Any]) -> None:
        """Handle an event, and update the state of this round if the event's host takes part in it."""
        super().on_event(connection, event)
        host_name, event_name = connection.host.name, event["event"]
        if event_name == "hello" and self.unreachable_reasons.pop(host_name, None):
            self.log(f"{host_name} responds again")
        if connection not in self.members:
            return
        if event_name == "batch":
            self.batch_event = {event_key: event[event_key] for event_key in ("batch_size", "per_device")}
        elif event_name == "began":
            self._on_training_began(event)
        elif event_name == "finished":
            self.is_finished = True
        elif event_name == "step":
            self._on_step(event["step"])
        elif event_name == "leaving" and not self.stop_reason:
            self.leaving_reasons.setdefault(host_name, event["why"])

    def _on_training_began(self, event: dict[str, Any]) -> None:
        """Handle a `began` event, which contains the step at which this round starts or continues."""
        first_host_name = self.members[0].host.name
        if not self.began_event and not (event["in_s3"] or event["is_shared"]):
            s3_remedy = "To avoid this dependency, pass --s3 or a shared --model_folder"
            disk_reason = "only this host's disk stores the checkpoints"
            self.log(f"the job can't continue without {first_host_name}, because {disk_reason}. {s3_remedy}")
        if event["step"] > self.began_event.get("step", -1):  # continues from a newer checkpoint
            self.fruitless_rounds = 0
        if self.began_event:
            repeated_steps = max(0, self.latest_step - event["step"])
            self.log(f"continuing at step {event['step']:,} and repeating {plural(repeated_steps, 'step')}")
        self.began_event, self.first_host_name = event, first_host_name
        self.is_training = True

    def _on_step(self, reached_step: int) -> None:
        """Handle a `step` event. After its first step, a round's hosts are no longer considered new."""
        if self.hosts_changed_at and not self.stop_reason and reached_step > self.began_event["step"]:
            recovery_s = time.monotonic() - self.hosts_changed_at
            self.log(f"reached step {reached_step:,} {recovery_s:.0f} s after the change of hosts")
            self.hosts_changed_at = None
        if reached_step > self.began_event["step"]:
            for member in self.members:
                self.trained_host_names.add(member.host.name)
                self.exclusion_counts.pop(member.host.name, None)
        self.latest_step = max(self.latest_step, reached_step)

    def on_agent_end(self, connection: HostConnection, exit_status: int) -> None:
        """Record an agent's end, and stop the round if one of its hosts has failed or is lost."""
        if connection.exit_status is not None:
            return  # already recorded
        connection.exit_status = exit_status
        host_name = connection.host.name
        if connection.hello_event is None or exit_status == SSH_FAILURE_STATUS:
            failure_reason = failure_cause(connection).reason
            if host_name not in self.unreachable_reasons and not self.received_signals:
                self.log(f"{host_name} does not respond: {failure_reason}")
            self.unreachable_reasons[host_name] = failure_reason
            # A different machine may soon respond under the same name.
            self.excluded_until.pop(host_name, None)
        if connection not in self.members or exit_status == 0:
            return
        if exit_status == SSH_FAILURE_STATUS:
            self.member_lost_at = self.member_lost_at or time.monotonic()
            if connection is self.members[0]:  # the host that writes the checkpoints
                self.fenced_until = time.monotonic() + FENCED_DELAY_S
        self._stop_round("the processes on a host have ended")

    def on_output_line(self, connection: HostConnection, output_line: str) -> None:
        """Record and print a line of a host's output. Print ssh's errors for a host only once."""
        if connection.hello_event is None and connection.host.name in self.unreachable_reasons:
            # An earlier attempt to connect has printed the same line.
            connection.record_line(output_line)
        else:
            super().on_output_line(connection, output_line)

    def on_signal(self, signal_number: int) -> None:
        self.stop_reason = "launch.py received a signal"
        super().on_signal(signal_number)

    # --- End of a round

    def _judge_round(self) -> int | None:
        """Print why a round ended, and decide whether the job continues.

        This method also excludes faulty hosts, and for a time the hosts that left the job, from new rounds.

        Returns:
            The job's exit status, or None if the job continues with a new round.
        """
        statuses = [member.exit_status for member in self.members]
        if self.is_finished or not any(statuses):  # a launcher may be stopped after training has finished
            return 0
        if self.received_signals:
            # 128 + N is the status that shells report after signal N.
            return self.end_preempted() if PREEMPTED_STATUS in statuses else 128 + self.received_signals[0]
        lost_names = [member.host.name for member in self.members if member.exit_status == SSH_FAILURE_STATUS]
        has_job_saved = PREEMPTED_STATUS in statuses and set(statuses) <= {0, PREEMPTED_STATUS}
        if has_job_saved:
            for host_name, leaving_reason in self.leaving_reasons.items():
                self.excluded_until[host_name] = time.monotonic() + REJOIN_DELAY_S
                self.log(f"{host_name} leaves ({leaving_reason})")
            if not self.leaving_reasons:
                self.log(self.stop_reason)
            return None
        if not lost_names and not self.trained_host_names and not self.is_training:
            # Before the first training step, only a different number of hosts can prevent the failure.
            can_divide_batch = self._can_divide_batch(len(self.members))
            if can_divide_batch or not self._choose_members(self.members):
                return print_error(self._failure_message())
            self.log(f"the batch can't be divided evenly among {plural(len(self.members), 'host')}")
            return None
        if not lost_names and self._exclude_faulty_hosts():
            return None
        if lost_names:
            self.log(f"{', '.join(lost_names)} lost after step {self.latest_step:,}")
        else:
            self.log(f"failed after step {self.latest_step:,}: {self._failure_message()}")
        self.fruitless_rounds += 1
        if self.fruitless_rounds > MAX_FRUITLESS_ROUNDS:
            rounds_problem = f"{MAX_FRUITLESS_ROUNDS} rounds failed without a new checkpoint"
            return print_error(f"{rounds_problem}: {self._failure_message()}")
        return None

    def _exclude_faulty_hosts(self) -> bool:
        """Exclude the hosts that made a round fail if the job can continue on the remaining hosts.

        A faulty host is a new host, or a host that certainly caused a round to fail before it trained a step.

        Returns:
            True if hosts were excluded. False if no host is faulty, or if too few hosts would remain.
        """
        if (first_failed := self._find_first_failed()) is None:
            return False
        failure_doubt, failure_reason = failure_cause(first_failed)
        trained_names = self.trained_host_names
        suspect_members = [member for member in self.members if member.host.name not in trained_names]
        if not suspect_members and not self.is_training and failure_doubt <= 1:  # certainly the cause
            suspect_members = [first_failed]
        # All hosts report a disagreement between hosts, and the message names the host that differs.
        if named_members := [member for member in suspect_members if _names_host(failure_reason, member)]:
            faulty_members = named_members
        else:
            faulty_members = [first_failed] if first_failed in suspect_members else suspect_members
        remaining_members = [member for member in self.members if member not in faulty_members]
        if not faulty_members or not self._choose_members(remaining_members):
            return False
        for host_name in (member.host.name for member in faulty_members):
            exclusion_count = self.exclusion_counts.get(host_name, 0)
            exclusion_s = min(FIRST_EXCLUSION_S * 2**exclusion_count, LONGEST_EXCLUSION_S)
            self.exclusion_counts[host_name] = exclusion_count + 1
            self.excluded_until[host_name] = time.monotonic() + exclusion_s
            log_reference = f"See the log {first_failed.log_file}"
            self.log(f"{host_name} is excluded for {exclusion_s} s: {failure_reason}. {log_reference}")
        return True

    def _find_first_failed(self) -> HostConnection | None:
        """Return the host whose failure explains all other failures, or None if no host has failed.

        Prefer a new host if there are several.
        """
        stopped_statuses = (0, PREEMPTED_STATUS)  # finished, or saved a checkpoint after a request to stop
        failed_members = [member for member in self.members if member.exit_status not in stopped_statuses]

        def doubt_and_has_trained(member: HostConnection) -> tuple[int, bool]:
            return failure_cause(member).doubt, member.host.name in self.trained_host_names

        return min(failed_members, key=doubt_and_has_trained, default=None)

    def _failure_message(self) -> str:
        """Return the name, the failure and the log file of the host that made the round fail."""
        if (first_failed := self._find_first_failed()) is None:
            return "all hosts received a request to stop"
        failure_reason = failure_cause(first_failed).reason
        return f"{first_failed.host.name}: {failure_reason}. See the log {first_failed.log_file}"

    def _exit_status_without_hosts(self) -> int:
        """Print why no further round is possible, and return the job's exit status.

        The reason is a signal or too few hosts. A job that has begun to train is preempted.
        """
        if self.received_signals:
            return self.end_preempted() if self.began_event else 128 + self.received_signals[0]
        ready_names = ", ".join(connection.host.name for connection in self._ready_connections()) or "none"
        hosts_problem = "too few hosts responded"
        if self._needs_first_host():
            hosts_problem = f"{self.first_host_name}, which stores the checkpoints, did not respond"
        hosts_text = f"available hosts: {ready_names} of {', '.join(self.host_names)}"
        too_few_hosts_message = f"{hosts_problem} within {TOO_FEW_HOSTS_TIMEOUT_S} s ({hosts_text})"
        if not self.began_event:
            return print_error(too_few_hosts_message)
        self.log(too_few_hosts_message)
        return self.end_preempted()


def _names_host(failure_reason: str, member: HostConnection) -> bool:
    """Return True if the reason for a failure names a member's host."""
    hostname = member.hello_event["hostname"] if member.hello_event else None
    return hostname is not None and re.search(rf"\bhost {hostname}\b", failure_reason) is not None
