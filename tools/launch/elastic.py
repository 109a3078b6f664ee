"""Runner of an elastic job in launch.py, which launches the job in rounds on all available hosts.

A host that is lost or told to stop leaves the job, and the other hosts continue from the newest checkpoint.
When a host answers again or is added to the hostfile, all hosts save, and the next round includes this host.
The first host of a round is also the first host of the next round, because it stores the newest checkpoint.
When the first host is lost, the other hosts can only continue from checkpoints in S3 or in a shared folder. A
new host that prevents a round from training a step is excluded for a while.

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

_exclude_faulty_hosts decides which hosts are excluded after a failed round. It blames new hosts, or only the
new hosts that the error names. In a round that has not trained yet, it also blames the host whose failure
explains the failures of the other hosts. It never blames a host that was lost or told to stop. If the job has
never trained a step, the job itself is considered faulty and ends.
"""

import itertools
import re
import time
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

from onecurve.system.env import MOST_HOSTS, PER_DEVICE, PREEMPTED, ROUND
from onecurve.system.text import plural
from tools.launch.agent import FENCE_S
from tools.launch.hosts import SSH_FAILED, Host, is_this_host
from tools.launch.job import LaunchPlan, fail, failure_cause
from tools.launch.launcher import CONNECT_S, HostConnection, Launcher

LOST_S = 12  # time without an agent's heartbeat after which its host is considered lost
FENCED_S = FENCE_S + 3  # time after which the agent of a lost host has certainly killed its part
KILL_S = 3  # time from a loss until the other hosts are killed, because they wait in a collective
RETRY_S = 5  # interval between attempts to connect to a host that is away
SETTLE_S = 3  # time to wait for more hosts before a round starts or is stopped for a joining host
WAIT_S = 120  # the job ends if too few hosts are available for this long
LEAVE_S = 180  # time until a host that was told to stop may join again, unless it was away in the meantime
REFUSED_S, LONGEST_S = 60, 3600  # a faulty host's first exclusion, doubled each time up to a maximum
FRUITLESS_ROUNDS = 3  # failed rounds at the same step after which the job ends


class ElasticJob(Launcher):
    """Elastic job that runs rounds until one of them finishes the training.

    Args:
        plan_for: Function that plans a round's launch on the given hosts.
        read_hosts: Function that returns the job's hosts, which may change during the job.
        log_dir: Folder of the hosts' log files.
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
        self.most = min(max_hosts or len(self.hosts), len(self.hosts))
        self.away: dict[str, str] = {}  # reason of each host that does not answer
        self.leaves_until: dict[str, float] = {}  # end of a host's exclusion (time.monotonic())
        self.refusals: dict[str, int] = {}  # number of exclusions of a host since it last trained
        self.waiting: dict[str, str] = {}  # reason of each available host that can't take part in a round
        self.proven: set[str] = set()  # hosts that have trained a step
        self.next_try = 0.0
        self.mistake = ""  # the hostfile's mistake that was reported last
        self.members = []  # connections to this round's hosts, beginning with the first host
        self.stopping = ""  # the reason why this round is stopped
        self.lost_at: float | None = None  # time when a member was lost
        self.fenced_at = 0.0  # time.monotonic() until which a lost first host may still write
        self.larger_since: float | None = None  # time at which a larger round became possible
        self.leavers: dict[str, str] = {}  # reason of each host of this round that was told to stop
        self.first: str | None = None  # first host of the last round that trained
        self.batch: dict[str, int] = {}  # batch_size, per_device
        self.began: dict[str, Any] = {}  # step, in_s3, is_shared of the last round that trained
        self.is_training = self.is_finished = False  # state of this round, and of the whole training
        self.step = 0  # newest step of all rounds
        self.changed_at: float | None = None  # time when the last change of hosts began
        self.fruitless = 0  # consecutive failed rounds at the same step

    def run(self) -> int:
        """Run the job and return its exit status.

        Returns:
            0, 75 (the same command continues later), 1 (failed) or 128 + the number of a signal.
        """
        self.listen()
        if local := [host.name for host in self.hosts if is_this_host(host.name)]:
            self.log(f"launch.py runs on {local[0]}, which the job can't lose")
        self.log(f"at least {plural(self.min_hosts, 'host')} of {len(self.hosts)}, logs in {self.log_dir}")
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
        """Connect to hosts and choose the next round's hosts, or None for too few hosts or after a signal."""
        begin = time.monotonic()
        patience_s = SETTLE_S if self.began else CONNECT_S
        while not self.signals:
            self._connect_missing()
            ready, waited_s = self._ready(), time.monotonic() - begin
            awaited = [h for h in self.hosts if h.name not in self.away and not self._leaves(h)]
            chosen = self._choose(ready) if time.monotonic() > self.fenced_at else None
            if chosen and (len(ready) >= len(awaited) or waited_s > patience_s):
                return chosen
            if not chosen and waited_s > WAIT_S:
                return None
            self._look_for_lost_hosts()
            self.handle_event()
        return None

    def _connect_missing(self) -> None:
        """Connect to all hosts without an agent. Every RETRY_S, retry hosts that did not answer."""
        now = time.monotonic()
        is_retry = now > self.next_try
        if is_retry:
            self.next_try = now + RETRY_S
            self._read_hosts_again()
        for host in self.hosts:
            current = self._connection(host.name)
            if current and (current.status is None or current in self.members):
                continue
            # This includes hosts that leave, because another machine may answer under the same name later.
            if is_retry or host.name not in self.away:
                if current:
                    self.connections.remove(current)
                self.connect(host)

    def _read_hosts_again(self) -> None:
        try:
            hosts = self.read_hosts()
            if hosts != self.hosts:
                self.plan_for(hosts)  # raises an error unless all hosts have the same number of processes
        except (ValueError, OSError) as error:
            if str(error) != self.mistake:
                self.log(f"keeping the previous hosts: {error}")
                self.mistake = str(error)
            return
        names, known = [host.name for host in hosts], [host.name for host in self.hosts]
        if new := [name for name in names if name not in known]:
            self.log(f"new in the hostfile: {', '.join(new)}")
            self.names += [name for name in new if name not in self.names]
        self.hosts = hosts
        self.leaves_until = {n: until for n, until in self.leaves_until.items() if n in names}
        if not self.began:  # after the first round, `most` is fixed, because the run's name contains it
            self.most = max(self.most, min(self.max_hosts or len(hosts), len(hosts)))

    def _connection(self, name: str) -> HostConnection | None:
        return next((c for c in self.connections if c.host.name == name), None)

    def _leaves(self, host: Host) -> bool:
        return time.monotonic() < self.leaves_until.get(host.name, 0)

    def _ready(self) -> list[HostConnection]:
        """Return the hosts that can take part in a round, beginning with the last round's first host."""
        names = [host.name for host in self.hosts if not self._leaves(host)]
        ready = [c for c in map(self._connection, names) if c and c.hello and c.status is None]
        return sorted(ready, key=lambda connection: connection.host.name != self.first)

    def _choose(self, ready: list[HostConnection]) -> list[HostConnection] | None:
        """Return the hosts of the largest possible round, or None if no round is possible."""
        if self._needs_first() and not (ready and ready[0].host.name == self.first):
            return None
        most = min(len(ready), self.max_hosts or len(ready))
        counts = [count for count in range(self.min_hosts, most + 1) if self._divides(count)]
        return ready[: counts[-1]] if counts else None

    def _needs_first(self) -> bool:
        """Return True if the checkpoints are stored only on the first host's disk."""
        return bool(self.began) and not (self.began["in_s3"] or self.began["is_shared"])

    def _divides(self, hosts: int) -> bool:
        if not self.batch:
            return True
        processes = hosts * len(self.hosts[0].devices)
        return self.batch["batch_size"] % (self.batch["per_device"] * processes) == 0

    def _look_for_lost_hosts(self) -> None:
        now = time.monotonic()
        for connection in self.connections:
            if connection.status is None and connection.hello and now - connection.received_at > LOST_S:
                connection.last_lines.append(f"no heartbeat for {LOST_S} s")
                self.give_up(connection)
        if self.lost_at and now - self.lost_at > KILL_S:
            self.request_all("kill", self.members)

    def _look_for_more_hosts(self) -> None:
        """Stop the round when a larger one is possible. All hosts save before the larger round starts."""
        can_stop = self.is_training and not self.stopping and not self.is_finished
        ready = self._ready() if can_stop else []
        chosen = self._choose(ready)
        if not chosen or len(chosen) <= len(self.members):
            self.larger_since = None
            self._name_waiting([c.host.name for c in ready if c not in self.members])
            return
        self.larger_since = self.larger_since or time.monotonic()
        if time.monotonic() - self.larger_since > SETTLE_S:
            names = [c.host.name for c in chosen if c not in self.members]
            self._stop_round(f"{', '.join(names)} {'joins' if len(names) == 1 else 'join'}")

    def _name_waiting(self, names: list[str]) -> None:
        """Print why available hosts can't take part in a round, once for each reason."""
        reason = f"--max_hosts {self.max_hosts}"
        if names and len(self.members) != self.max_hosts:
            hosts = plural(len(self.members) + len(names), "host")
            micro_batches = self.batch["batch_size"] // self.batch["per_device"]
            processes = plural(len(self.hosts[0].devices), "process")
            reason = f"the {micro_batches} micro-batches of a step do not divide among {hosts} of {processes}"
        if new := [name for name in names if self.waiting.get(name) != reason]:
            self.log(f"{', '.join(new)} {'waits' if len(new) == 1 else 'wait'}: {reason}")
        self.waiting = dict.fromkeys(names, reason)

    # --- Rounds

    def _start(self, chosen: list[HostConnection]) -> None:
        self.members, self.stopping, self.leavers, self.is_training = chosen, "", {}, False
        self.stopped_at = self.lost_at = self.larger_since = None
        plan = self.plan_for([member.host for member in chosen])
        names = ", ".join(member.host.name for member in chosen)
        count = f"{plural(len(chosen), 'host')}, {plural(plan.processes, 'process')}"
        self.log(f"starting on {count}: {names}")
        env = {MOST_HOSTS: str(self.most), ROUND: str(next(self.rounds))}
        if self.began:
            env[PER_DEVICE] = str(self.batch["per_device"])
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
        name = connection.host.name
        if event["event"] == "hello" and self.away.pop(name, None):
            self.log(f"{name} answers again")
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
            self.leavers.setdefault(name, event["why"])

    def _on_begin(self, event: dict[str, Any]) -> None:
        name = self.members[0].host.name
        if not self.began and not (event["in_s3"] or event["is_shared"]):
            reason = "only its disk stores the checkpoints (pass --s3 or a shared --model_folder)"
            self.log(f"the job can't lose {name}: {reason}")
        if event["step"] > self.began.get("step", -1):
            self.fruitless = 0
        if self.began:
            repeated = max(0, self.step - event["step"])
            self.log(f"continuing at step {event['step']:,}; {plural(repeated, 'step')} to repeat")
        self.began, self.first, self.is_training = event, name, True

    def _on_step(self, step: int) -> None:
        if self.changed_at and not self.stopping and step > self.began["step"]:
            self.log(f"step {step:,} came {time.monotonic() - self.changed_at:.0f} s after the change")
            self.changed_at = None
        if step > self.began["step"]:
            self.proven |= (trained := {member.host.name for member in self.members})
            self.refusals = {n: count for n, count in self.refusals.items() if n not in trained}
        self.step = max(self.step, step)

    def on_end(self, connection: HostConnection, status: int) -> None:
        if connection.status is not None:
            return
        connection.status, name = status, connection.host.name
        if connection.hello is None or status == SSH_FAILED:
            if name not in self.away and not self.signals:
                self.log(f"{name} does not answer: {failure_cause(connection)[1]}")
            self.away[name] = failure_cause(connection)[1]
            self.leaves_until.pop(name, None)  # another machine may answer under the same name
        if connection not in self.members or status == 0:
            return
        if status == SSH_FAILED:
            self.lost_at = self.lost_at or time.monotonic()
            if connection is self.members[0]:
                self.fenced_at = time.monotonic() + FENCED_S
        self._stop_round("a host has ended")

    def on_line(self, connection: HostConnection, line: str) -> None:
        if connection.hello is None and connection.host.name in self.away:
            connection.record(line)  # only logged, because the last attempt already printed this line
        else:
            super().on_line(connection, line)

    def on_signal(self, number: int) -> None:
        self.stopping = "launch.py was told to stop"
        super().on_signal(number)

    # --- End of a round

    def _judge(self) -> int | None:
        """Return the job's exit status after a round, or None if another round follows."""
        statuses = [member.status for member in self.members]
        if self.is_finished or not any(statuses):  # a finished round's launcher may still have been stopped
            return 0
        if self.signals:
            return self.end_preempted() if PREEMPTED in statuses else 128 + self.signals[0]
        lost = [member.host.name for member in self.members if member.status == SSH_FAILED]
        is_saved = PREEMPTED in statuses and set(statuses) <= {0, PREEMPTED, SSH_FAILED}
        if is_saved and not lost:
            for name, why in self.leavers.items():
                self.leaves_until[name] = time.monotonic() + LEAVE_S
                self.log(f"{name} leaves ({why})")
            if not self.leavers:
                self.log(self.stopping)
            return None
        if not lost and not self.proven and not self.is_training:
            # Before the first training step, only a different number of hosts can help.
            if not self.batch or self._divides(len(self.members)) or not self._choose(self.members):
                return fail(self._cause())
            self.log(f"{plural(len(self.members), 'host')} can't share the batch")
            return None
        if not lost and self._exclude_faulty_hosts():
            return None
        step = f"after step {self.step:,}"
        self.log(f"{', '.join(lost)} lost {step}" if lost else f"failed {step}: {self._cause()}")
        self.fruitless += 1
        if self.fruitless > FRUITLESS_ROUNDS:
            return fail(f"{FRUITLESS_ROUNDS} rounds without a new checkpoint: {self._cause()}")
        return None

    def _exclude_faulty_hosts(self) -> bool:
        """Exclude the hosts that made a round fail, provided that the remaining hosts can continue.

        Faulty hosts are new hosts, or a host that certainly caused the failure of a round without a step.

        Returns:
            False if no host is to blame or too few hosts would remain.
        """
        if (first := self._first_failure()) is None:
            return False
        rank, cause = failure_cause(first)
        suspects = [member for member in self.members if member.host.name not in self.proven]
        if not suspects and not self.is_training and rank <= 1:
            suspects = [first]
        # All hosts report a disagreement, and the message names the host that differs.
        named = [m for m in suspects if m.hello and re.search(rf"\bhost {m.hello['hostname']}\b", cause)]
        faulty = named or ([first] if first in suspects else suspects)
        if not faulty or not self._choose([member for member in self.members if member not in faulty]):
            return False
        for name in (member.host.name for member in faulty):
            wait_s = min(REFUSED_S * 2 ** self.refusals.get(name, 0), LONGEST_S)
            self.refusals[name] = self.refusals.get(name, 0) + 1
            self.leaves_until[name] = time.monotonic() + wait_s
            self.log(f"{name} is excluded for {wait_s} s: {cause}. See {first.log_file}")
        return True

    def _first_failure(self) -> HostConnection | None:
        """Return the host whose failure explains the other failures. Prefer a new host in case of a tie."""
        failed = [member for member in self.members if member.status not in (0, PREEMPTED)]
        order = lambda m: (failure_cause(m)[0], m.host.name in self.proven)  # noqa: E731
        return min(failed, key=order, default=None)

    def _cause(self) -> str:
        if (first := self._first_failure()) is None:
            return "all hosts were told to stop"
        return f"{first.host.name}: {failure_cause(first)[1]}. Its log: {first.log_file}"

    def _end_without_hosts(self) -> int:
        if self.signals:
            return self.end_preempted() if self.began else 128 + self.signals[0]
        missing = f"{self.first}, which stores the checkpoints," if self._needs_first() else "enough hosts"
        available = ", ".join(connection.host.name for connection in self._ready()) or "none"
        message = (
            f"{missing} did not answer within {WAIT_S} s (available: {available} of {', '.join(self.names)})"
        )
        if not self.began:
            return fail(message)
        self.log(message)
        return self.end_preempted()
