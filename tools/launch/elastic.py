"""Elastic job runner for launch.py, which launches the job in rounds on all available hosts.

If a host is lost or receives a request to stop, it leaves the job, and the other hosts continue from
the newest checkpoint. If a lost host responds again, or if a host is added to the hostfile, all hosts save a
checkpoint, and the next round includes this host. A round's first host is also the next round's first host,
because it stores the newest checkpoint. If the first host is lost, the other hosts can continue only from
checkpoints in S3 or in a shared folder. A new host that prevents a round from training a step is temporarily
excluded.

    _gather: connects to hosts, chooses the round's hosts --- none for WAIT_S, or a signal ---> exit status
       |                              ^
       v                              | another round
    _start: launches on each host     |
       |                              |
       v                              |
    run: waits for the round's end    |    when a host has ended or more hosts are ready, all save and stop
       |                              |    KILL_S after a host was lost, kills the others, which wait for it
       v                              |
    _judge: why the round ended ------+--- finished, a signal, or nothing more to try ---> exit status

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
from tools.launch.agent import FENCE_S
from tools.launch.hosts import SSH_FAILED, Host, is_this_host
from tools.launch.job import LaunchPlan, fail, failure_cause
from tools.launch.launcher import CONNECT_S, HostConnection, Launcher

LOST_S = 12  # seconds without a heartbeat from an agent after which the host is considered lost
FENCED_S = FENCE_S + 3  # seconds after which a lost host's agent has certainly killed the processes
KILL_S = 3  # seconds from a loss to killing the other hosts' processes, which wait in a collective
RETRY_S = 5  # seconds between attempts to connect to a host that does not respond
SETTLE_S = 3  # seconds to wait for more hosts before a round starts, or before a new host joins
WAIT_S = 120  # seconds with too few available hosts after which the job ends
LEAVE_S = 180  # seconds until a host may rejoin after a request to stop, unless the host disconnected
REFUSED_S, LONGEST_S = 60, 3600  # duration in seconds of a faulty host's first and longest exclusions
FRUITLESS_ROUNDS = 3  # maximum number of consecutive failed rounds without a new checkpoint


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
        self.name, self.rounds = uuid.uuid4().hex, itertools.count(1)
        self.most_hosts = min(max_hosts or len(self.hosts), len(self.hosts))
        self.unreachable: dict[str, str] = {}  # why a host does not respond, by host
        self.leaves_until: dict[str, float] = {}  # time.monotonic() at which a host may join again, by host
        self.refusals: dict[str, int] = {}  # number of exclusions since a host last trained, by host
        self.waiting_reasons: dict[str, str] = {}  # why an available host can't take part in a round, by host
        self.trained_hosts: set[str] = set()  # names of the hosts that have trained a step
        self.next_try = 0.0
        self.mistake = ""  # most recently reported hostfile mistake
        self.members = []  # connections to this round's hosts, starting with the first host
        self.stopping = ""  # reason why this round is being stopped, or an empty string
        self.lost_at: float | None = None  # time.monotonic() when a member was lost
        self.fenced_at = 0.0  # time.monotonic() until which a lost first host may still write files
        self.larger_since: float | None = None  # time.monotonic() when a larger round became possible
        self.leavers: dict[str, str] = {}  # why a host in this round is leaving, by host
        self.first_name: str | None = None  # first host's name in the last round that trained
        self.batch: dict[str, int] = {}  # values of the `batch` event: batch_size, per_device
        self.began: dict[str, Any] = {}  # newest `began` event: step, in_s3, is_shared
        self.is_training = self.is_finished = False  # states of this round and of the entire training run
        self.step = 0  # latest step in all rounds
        self.changed_at: float | None = None  # time.monotonic() when the last change of hosts began
        self.fruitless_rounds = 0  # number of consecutive failed rounds without a new checkpoint

    def run(self) -> int:
        """Run the job and return its exit status.

        Returns:
            0 (finished), 75 (preempted, the same command continues), 1 (failed), or 128 + a signal's number.
        """
        self.listen()
        if local := [host.name for host in self.hosts if is_this_host(host.name)]:
            self.log(f"launch.py runs on {local[0]}, so the job can't continue without this host")
        needed = f"the job needs at least {plural(self.min_hosts, 'host')} of {len(self.hosts)}"
        self.log(f"{needed}. Logs are in {self.log_dir}")
        try:
            while (chosen := self._gather()) is not None:
                self._start(chosen)
                while any(member.status is None for member in self.members):
                    self.handle_event()
                    self._connect_missing()
                    self._look_for_lost_hosts()
                    self._look_for_more_hosts()
                if (status := self._judge()) is not None:
                    return status
                self.members = []
            return self._end_without_hosts()
        finally:
            self.close()

    # --- Hosts

    def _gather(self) -> list[HostConnection] | None:
        """Connect to hosts and return the next round's hosts.

        Return None after a signal or with too few hosts.
        """
        start_s = time.monotonic()
        patience_s = SETTLE_S if self.began else CONNECT_S
        while not self.signals:
            self._connect_missing()
            ready, waited_s = self._ready(), time.monotonic() - start_s
            responding = [host for host in self.hosts if host.name not in self.unreachable]
            expected_hosts = [host for host in responding if not self._is_excluded(host)]
            chosen = self._choose(ready) if time.monotonic() > self.fenced_at else None
            if chosen and (len(ready) >= len(expected_hosts) or waited_s > patience_s):
                return chosen
            if not chosen and waited_s > WAIT_S:
                return None
            self._look_for_lost_hosts()
            self.handle_event()
        return None

    def _connect_missing(self) -> None:
        """Connect to all hosts without an agent. Retry hosts that did not respond every RETRY_S."""
        now_s = time.monotonic()
        if is_retry := now_s > self.next_try:
            self.next_try = now_s + RETRY_S
            self._read_hosts_again()
        for host in self.hosts:
            current = self._connection(host.name)
            if current and (current.status is None or current in self.members):
                continue
            # Also connect to hosts that are leaving, because a different machine may soon respond under the
            # same name.
            if is_retry or host.name not in self.unreachable:
                if current:
                    self.connections.remove(current)
                self.connect(host)

    def _read_hosts_again(self) -> None:
        try:
            hosts = self.read_hosts()
            if hosts != self.hosts:
                self.plan_for(hosts)  # raises an error if the hosts have different numbers of processes
        except (ValueError, OSError) as error:
            if str(error) != self.mistake:
                self.log(f"keeping the previous list of hosts: {error}")
                self.mistake = str(error)
            return
        new_names, previous_names = [host.name for host in hosts], [host.name for host in self.hosts]
        if added_names := [name for name in new_names if name not in previous_names]:
            self.log(f"new hosts in the hostfile: {', '.join(added_names)}")
            self.names += [name for name in added_names if name not in self.names]
        self.hosts = hosts
        leaves_until = self.leaves_until.items()
        self.leaves_until = {name: until for name, until in leaves_until if name in new_names}
        if not self.began:  # `most` is part of the run's name and can't change after the first round
            self.most_hosts = max(self.most_hosts, min(self.max_hosts or len(hosts), len(hosts)))

    def _connection(self, name: str) -> HostConnection | None:
        return next((connection for connection in self.connections if connection.host.name == name), None)

    def _is_excluded(self, host: Host) -> bool:
        return time.monotonic() < self.leaves_until.get(host.name, 0)

    def _ready(self) -> list[HostConnection]:
        """Return connections to all hosts that can take part in a round, starting with `self.first_name`."""
        allowed_names = [host.name for host in self.hosts if not self._is_excluded(host)]
        connections = filter(None, map(self._connection, allowed_names))
        ready = [connection for connection in connections if connection.hello and connection.status is None]
        return sorted(ready, key=lambda connection: connection.host.name != self.first_name)

    def _choose(self, ready: list[HostConnection]) -> list[HostConnection] | None:
        """Return connections to the hosts of the largest possible round, or None if no round is possible."""
        if self._needs_first_host() and not (ready and ready[0].host.name == self.first_name):
            return None
        host_counts = range(self.min_hosts, min(len(ready), self.max_hosts or len(ready)) + 1)
        possible_counts = [count for count in host_counts if self._can_share_batch(count)]
        return ready[: possible_counts[-1]] if possible_counts else None

    def _needs_first_host(self) -> bool:
        """Return True if only the first host's disk stores the checkpoints."""
        return bool(self.began) and not (self.began["in_s3"] or self.began["is_shared"])

    def _can_share_batch(self, hosts: int) -> bool:
        if not self.batch:
            return True
        processes = hosts * len(self.hosts[0].devices)
        return self.batch["batch_size"] % (self.batch["per_device"] * processes) == 0

    def _look_for_lost_hosts(self) -> None:
        now = time.monotonic()
        for connection in self.connections:
            if connection.status is None and connection.hello and now - connection.received_at > LOST_S:
                connection.last_lines.append(f"the host sent no heartbeat for {LOST_S} s")
                self.give_up(connection)
        if self.lost_at and now - self.lost_at > KILL_S:
            self.request_all("kill", self.members)

    def _look_for_more_hosts(self) -> None:
        """Stop the round once all hosts have saved a checkpoint, if a larger round is possible."""
        can_stop = self.is_training and not self.stopping and not self.is_finished
        ready = self._ready() if can_stop else []
        chosen = self._choose(ready)
        if not chosen or len(chosen) <= len(self.members):
            self.larger_since = None
            idle = [connection for connection in ready if connection not in self.members]
            self._report_waiting_hosts([connection.host.name for connection in idle])
            return
        self.larger_since = self.larger_since or time.monotonic()
        if time.monotonic() - self.larger_since > SETTLE_S:
            joining = [connection.host.name for connection in chosen if connection not in self.members]
            self._stop_round(f"{', '.join(joining)} {'joins' if len(joining) == 1 else 'join'}")

    def _report_waiting_hosts(self, names: list[str]) -> None:
        """Print, once per reason, why available hosts can't take part in a round."""
        reason = f"--max_hosts {self.max_hosts}"
        if names and len(self.members) != self.max_hosts:
            host_count = plural(len(self.members) + len(names), "host")
            micro_batches = self.batch["batch_size"] // self.batch["per_device"]
            process_count = plural(len(self.hosts[0].devices), "process")
            host_group = f"{host_count} with {process_count} each"
            reason = f"the {micro_batches} micro-batches of a step can't be divided evenly among {host_group}"
        if newly_waiting := [name for name in names if self.waiting_reasons.get(name) != reason]:
            self.log(f"{', '.join(newly_waiting)} {'waits' if len(newly_waiting) == 1 else 'wait'}: {reason}")
        self.waiting_reasons = dict.fromkeys(names, reason)

    # --- Rounds

    def _start(self, chosen: list[HostConnection]) -> None:
        self.members, self.stopping, self.leavers, self.is_training = chosen, "", {}, False
        self.stopped_at = self.lost_at = self.larger_since = None
        plan = self.plan_for([member.host for member in chosen])
        host_names = ", ".join(member.host.name for member in chosen)
        size = f"{plural(len(chosen), 'host')}, {plural(plan.processes, 'process')}"
        self.log(f"starting on {size}: {host_names}")
        env = {MOST_HOSTS_VARIABLE: str(self.most_hosts), ROUND_VARIABLE: str(next(self.rounds))}
        if self.began:
            env[PER_DEVICE_VARIABLE] = str(self.batch["per_device"])
        elif remark := plan.remark(chosen):
            self.log(remark)
        plan.start(chosen, self.name, **env)

    def _stop_round(self, reason: str) -> None:
        self.stopping = self.stopping or reason
        self.stopped_at = self.stopped_at or time.monotonic()
        self.changed_at = self.changed_at or time.monotonic()
        self.request_all("stop", self.members)

    def on_event(self, connection: HostConnection, event: dict[str, Any]) -> None:
        super().on_event(connection, event)
        host_name = connection.host.name
        if event["event"] == "hello" and self.unreachable.pop(host_name, None):
            self.log(f"{host_name} responds again")
        if connection not in self.members:
            return
        if event["event"] == "batch":
            self.batch = {key: event[key] for key in ("batch_size", "per_device")}
        elif event["event"] == "began":
            self._on_begin(event)
        elif event["event"] == "finished":
            self.is_finished = True
        elif event["event"] == "step":
            self._on_step(event["step"])
        elif event["event"] == "leaving" and not self.stopping:
            self.leavers.setdefault(host_name, event["why"])

    def _on_begin(self, event: dict[str, Any]) -> None:
        first_host = self.members[0].host.name
        if not self.began and not (event["in_s3"] or event["is_shared"]):
            remedy = "To avoid this dependency, pass --s3 or a shared --model_folder"
            reason = "only this host's disk stores the checkpoints"
            self.log(f"the job can't continue without {first_host}, because {reason}. {remedy}")
        if event["step"] > self.began.get("step", -1):
            self.fruitless_rounds = 0
        if self.began:
            repeated_steps = max(0, self.step - event["step"])
            self.log(f"continuing at step {event['step']:,} and repeating {plural(repeated_steps, 'step')}")
        self.began, self.first_name, self.is_training = event, first_host, True

    def _on_step(self, step: int) -> None:
        if self.changed_at and not self.stopping and step > self.began["step"]:
            elapsed_s = time.monotonic() - self.changed_at
            self.log(f"reached step {step:,} {elapsed_s:.0f} s after the change of hosts")
            self.changed_at = None
        if step > self.began["step"]:
            self.trained_hosts |= (trained_names := {member.host.name for member in self.members})
            refusals = self.refusals.items()
            self.refusals = {name: count for name, count in refusals if name not in trained_names}
        self.step = max(self.step, step)

    def on_end(self, connection: HostConnection, status: int) -> None:
        if connection.status is not None:
            return
        connection.status, host_name = status, connection.host.name
        if connection.hello is None or status == SSH_FAILED:
            if host_name not in self.unreachable and not self.signals:
                self.log(f"{host_name} does not respond: {failure_cause(connection)[1]}")
            self.unreachable[host_name] = failure_cause(connection)[1]
            self.leaves_until.pop(host_name, None)  # a different machine may soon respond under the same name
        if connection not in self.members or status == 0:
            return
        if status == SSH_FAILED:
            self.lost_at = self.lost_at or time.monotonic()
            if connection is self.members[0]:
                self.fenced_at = time.monotonic() + FENCED_S
        self._stop_round("the processes on a host have ended")

    def on_line(self, connection: HostConnection, line: str) -> None:
        if connection.hello is None and connection.host.name in self.unreachable:
            connection.record(line)  # only logged, because an earlier attempt has printed the same line
        else:
            super().on_line(connection, line)

    def on_signal(self, signal_number: int) -> None:
        self.stopping = "launch.py received a signal"
        super().on_signal(signal_number)

    # --- End of a round

    def _judge(self) -> int | None:
        """Return the job's exit status after a round, or None if the job continues with a new round."""
        statuses = [member.status for member in self.members]
        if self.is_finished or not any(statuses):  # a launcher may be stopped after training has finished
            return 0
        if self.signals:
            return self.end_preempted() if PREEMPTED_STATUS in statuses else 128 + self.signals[0]
        lost_names = [member.host.name for member in self.members if member.status == SSH_FAILED]
        is_saved = PREEMPTED_STATUS in statuses and set(statuses) <= {0, PREEMPTED_STATUS, SSH_FAILED}
        if is_saved and not lost_names:
            for host_name, reason in self.leavers.items():
                self.leaves_until[host_name] = time.monotonic() + LEAVE_S
                self.log(f"{host_name} leaves ({reason})")
            if not self.leavers:
                self.log(self.stopping)
            return None
        if not lost_names and not self.trained_hosts and not self.is_training:
            # Before the first training step, only a different number of hosts can prevent the failure.
            if not self.batch or self._can_share_batch(len(self.members)) or not self._choose(self.members):
                return fail(self._failure_text())
            self.log(f"the batch can't be divided evenly among {plural(len(self.members), 'host')}")
            return None
        if not lost_names and self._exclude_faulty_hosts():
            return None
        if lost_names:
            self.log(f"{', '.join(lost_names)} lost after step {self.step:,}")
        else:
            self.log(f"failed after step {self.step:,}: {self._failure_text()}")
        self.fruitless_rounds += 1
        if self.fruitless_rounds > FRUITLESS_ROUNDS:
            return fail(f"{FRUITLESS_ROUNDS} rounds failed without a new checkpoint: {self._failure_text()}")
        return None

    def _exclude_faulty_hosts(self) -> bool:
        """Exclude the hosts that made a round fail if the job can continue on the remaining hosts.

        A faulty host is a new host, or a host that certainly caused a round to fail before it trained a step.

        Returns:
            True if hosts were excluded. False if no host is faulty, or if too few hosts would remain.
        """
        if (first_failed := self._first_failure()) is None:
            return False
        rating, cause = failure_cause(first_failed)
        suspects = [member for member in self.members if member.host.name not in self.trained_hosts]
        if not suspects and not self.is_training and rating <= 1:
            suspects = [first_failed]
        # All hosts report a disagreement between hosts, and the message names the host that differs.
        hostnames = [(suspect, suspect.hello["hostname"]) for suspect in suspects if suspect.hello]
        named = [suspect for suspect, name in hostnames if re.search(rf"\bhost {name}\b", cause)]
        faulty = named or ([first_failed] if first_failed in suspects else suspects)
        if not faulty or not self._choose([member for member in self.members if member not in faulty]):
            return False
        for name in (member.host.name for member in faulty):
            wait_s = min(REFUSED_S * 2 ** self.refusals.get(name, 0), LONGEST_S)
            self.refusals[name] = self.refusals.get(name, 0) + 1
            self.leaves_until[name] = time.monotonic() + wait_s
            self.log(f"{name} is excluded for {wait_s} s: {cause}. See the log {first_failed.log_file}")
        return True

    def _first_failure(self) -> HostConnection | None:
        """Return the host whose failure explains all other failures.

        Prefer a new host if there are several.
        """
        failed_members = [member for member in self.members if member.status not in (0, PREEMPTED_STATUS)]

        def likelihood(member: HostConnection) -> tuple[int, bool]:
            return failure_cause(member)[0], member.host.name in self.trained_hosts

        return min(failed_members, key=likelihood, default=None)

    def _failure_text(self) -> str:
        if (first_failed := self._first_failure()) is None:
            return "all hosts received a request to stop"
        cause = failure_cause(first_failed)[1]
        return f"{first_failed.host.name}: {cause}. See the log {first_failed.log_file}"

    def _end_without_hosts(self) -> int:
        if self.signals:
            return self.end_preempted() if self.began else 128 + self.signals[0]
        available = ", ".join(connection.host.name for connection in self._ready()) or "none"
        if self._needs_first_host():
            problem = f"{self.first_name}, which stores the checkpoints, did not respond within {WAIT_S} s"
        else:
            problem = f"too few hosts responded within {WAIT_S} s"
        message = f"{problem} (available hosts: {available} of {', '.join(self.names)})"
        if not self.began:
            return fail(message)
        self.log(message)
        return self.end_preempted()
