"""Tests of which hosts train in each round of an elastic job, and how the job ends, on simulated hosts."""

import subprocess
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from onecurve.system.env import PREEMPTED_STATUS
from tests.conftest import rows_of
from tools.launch import elastic
from tools.launch.agent import SUSPENDED
from tools.launch.elastic import ElasticJob
from tools.launch.hosts import SSH_FAILURE_STATUS, Host
from tools.launch.launcher import HostConnection

HELLO = {"reached_at": None, "asked_from": None}
BATCH = {"event": "batch", "batch_size": 64, "per_device": 8}


class Hosts:
    """Simulated hosts of a job, with a record of the requests sent to each host."""

    def __init__(self, count: int, tmp_path: Path, min_hosts: int = 1, max_hosts: int | None = None):
        self.names = [f"node{n}" for n in range(1, count + 1)]
        self.slots = dict.fromkeys(self.names, 2)
        self.sent: list[tuple[str, str]] = []
        self.job = ElasticJob(self.plan_for, self.read, tmp_path, min_hosts, max_hosts)
        self.job.connect = self.connect
        self.logged: list[str] = []
        self.job.log = self.logged.append

    def read(self) -> list[Host]:
        return [Host(name, tuple(range(self.slots[name]))) for name in self.names]

    def plan_for(self, hosts):
        if len({len(host.devices) for host in hosts}) > 1:
            raise ValueError("these differ")
        start = lambda *_, **env: self.sent.append(("start", env))  # noqa: E731
        process_count = sum(len(host.devices) for host in hosts)
        return SimpleNamespace(process_count=process_count, start=start, cpu_hint=lambda _: None)

    def connect(self, host: Host) -> HostConnection:
        process = SimpleNamespace(kill=lambda: None)
        connection = HostConnection(host, process, Path("log"), hello_event=HELLO | {"hostname": host.name})
        connection.request = lambda name: self.sent.append((host.name, name))
        self.job.connections.append(connection)
        return connection

    def launch(self, *names: str) -> None:
        """Launch a round on these hosts, but do not report that training has started."""
        job = self.job
        job._connect_to_missing_hosts()
        job._start_round([c for c in job._ready_connections() if c.host.name in names])
        job.on_event(job.members[0], BATCH)

    def start(self, *names: str) -> None:
        """Launch a round on these hosts and report that training has started."""
        self.launch(*names)
        began = {"event": "began", "step": 10, "in_s3": True, "is_shared": False}
        self.job.on_event(self.job.members[0], began)

    def train(self, *names: str) -> None:
        """Run a round that trains on these hosts until it receives a request to save and exit."""
        self.start(*names)
        self.job.on_event(self.job.members[0], {"event": "step", "step": 11})
        assert self.end(**dict.fromkeys(names, PREEMPTED_STATUS)) is None

    def reconnect(self) -> None:
        """Let the job connect to hosts that were unreachable."""
        self.job.next_connect_at = 0
        self.job._connect_to_missing_hosts()

    def print(self, name: str, line: str) -> None:
        self.job._find_connection(name).last_lines.append(line)

    def end(self, **statuses: int) -> int | None:
        for member in self.job.members:
            self.job.on_agent_end(member, statuses[member.host.name])
        status = self.job._judge_round()
        self.job.members = []
        return status


@pytest.fixture
def hosts(tmp_path):
    return lambda *words, **options: Hosts(*words, tmp_path, **options)


def chosen(job: ElasticJob) -> list[str]:
    return [connection.host.name for connection in job._choose_members(job._ready_connections()) or []]


def test_the_largest_number_of_hosts_that_divides_the_batch_is_chosen(hosts):
    """Divide eight micro-batches of 8 images among 1, 2 or 4 hosts with two processes each."""
    for available, used in ((1, 1), (2, 2), (3, 2), (4, 4), (5, 4)):
        cluster = hosts(available)
        cluster.job.batch_event = {"batch_size": 64, "per_device": 8}
        cluster.job._connect_to_missing_hosts()
        assert chosen(cluster.job) == cluster.names[:used]
    cluster = hosts(4, min_hosts=2, max_hosts=2)
    cluster.job._connect_to_missing_hosts()
    assert chosen(cluster.job) == ["node1", "node2"]
    for connection in cluster.job.connections[1:]:
        cluster.job.on_agent_end(connection, SSH_FAILURE_STATUS)
    assert chosen(cluster.job) == []


def test_the_first_host_stays_first(hosts):
    """Check that the first host stays first, because the checkpoints may exist only on its disk."""
    cluster = hosts(2)
    cluster.start("node2")
    assert cluster.end(node2=PREEMPTED_STATUS) is None
    cluster.job._connect_to_missing_hosts()
    assert chosen(cluster.job) == ["node2", "node1"]
    cluster.start("node2", "node1")
    cluster.job.began_event |= {"in_s3": False}
    assert cluster.end(node2=SSH_FAILURE_STATUS, node1=1) is None
    cluster.job.next_connect_at = time.monotonic() + 100  # node2 is unreachable for 100 s
    cluster.job._connect_to_missing_hosts()
    assert chosen(cluster.job) == []
    cluster.reconnect()
    assert chosen(cluster.job) == ["node2", "node1"]


@pytest.mark.parametrize("departure", ["it leaves", "it is left out"])
@pytest.mark.parametrize("return_reason", ["time passes", "it was away"])
def test_a_host_rejoins_after_a_delay_or_as_another_machine(departure, return_reason, hosts):
    cluster = hosts(2)
    cluster.train("node1")
    if departure == "it leaves":
        cluster.start("node1", "node2")
        cluster.job.on_event(cluster.job.members[1], {"event": "leaving", "why": "SIGTERM"})
        assert cluster.end(node1=PREEMPTED_STATUS, node2=PREEMPTED_STATUS) is None
        assert "node2 leaves (SIGTERM)" in cluster.logged
    else:
        cluster.launch("node1", "node2")
        assert cluster.end(node1=1, node2=1) is None
    cluster.job._connect_to_missing_hosts()
    assert chosen(cluster.job) == ["node1"]
    if return_reason == "it was away":
        cluster.job.on_agent_end(cluster.job._find_connection("node2"), SSH_FAILURE_STATUS)
        cluster.reconnect()
    else:
        cluster.job.excluded_until["node2"] = time.monotonic()
    assert chosen(cluster.job) == ["node1", "node2"]


@pytest.mark.parametrize("is_finished", [False, True])
def test_a_host_that_joins_stops_the_round_once(is_finished, hosts, monkeypatch):
    """Check that a joining host stops an unfinished round once and never stops a finished round.

    If a signal sent just before the end makes the round's launcher exit, this exit does not count.
    """
    monkeypatch.setattr(elastic, "MORE_HOSTS_WAIT_S", 0)
    cluster = hosts(2)
    cluster.start("node1")
    if is_finished:
        cluster.job.on_event(cluster.job.members[0], {"event": "finished"})
    cluster.sent.clear()
    for _ in range(3):
        cluster.job._stop_round_for_more_hosts()
    assert cluster.sent == ([] if is_finished else [("node1", "stop")])
    assert cluster.end(node1=1 if is_finished else PREEMPTED_STATUS) == (0 if is_finished else None)
    assert is_finished or cluster.logged[-1] == "node2 joins"


def test_a_silent_host_is_lost_and_the_others_are_killed(hosts, monkeypatch):
    cluster = hosts(2)
    cluster.start("node1", "node2")
    cluster.job.members[1].last_line_at -= elastic.HOST_LOST_S + 1
    monkeypatch.setattr(elastic, "KILL_DELAY_S", -1)
    cluster.job._give_up_lost_hosts()
    assert cluster.job.members[1].exit_status == SSH_FAILURE_STATUS
    assert ("node1", "kill") in cluster.sent
    assert cluster.end(node1=1, node2=SSH_FAILURE_STATUS) is None
    assert "node2 lost after step 0" in cluster.logged
    assert cluster.job.fenced_until == 0  # No other process writes checkpoints while the first host is alive


def test_rounds_without_progress_and_early_errors_end_the_job(hosts, capsys):
    cluster = hosts(1)
    for _ in range(elastic.MAX_FRUITLESS_ROUNDS):
        cluster.start("node1")
        assert cluster.end(node1=1) is None
    cluster.start("node1")
    assert cluster.end(node1=1) == 1
    assert "error: 3 rounds failed without a new checkpoint" in capsys.readouterr().err
    cluster = hosts(2)
    cluster.launch("node1", "node2")
    assert cluster.end(node1=1, node2=1) == 1
    assert capsys.readouterr().err.startswith("error: node1: ")
    cluster.launch("node1", "node2")
    assert cluster.end(node1=-9, node2=1) == 1
    assert capsys.readouterr().err.startswith("error: node1: the agent was killed by signal 9")


def test_two_simultaneous_signals_count_as_one(hosts):
    """Simulate `timeout`, which signals a process group whose first process forwards the signal.

    A second signal that arrives later kills the hosts.
    """
    cluster = hosts(1)
    cluster.start("node1")
    for _ in range(2):
        cluster.job.on_signal(15)
    assert ("node1", "kill") not in cluster.sent
    cluster.job.last_signal_at -= 1
    cluster.job.on_signal(15)
    assert ("node1", "kill") in cluster.sent


def test_a_changed_hostfile(hosts):
    cluster = hosts(2)
    cluster.names.append("node3")
    cluster.slots["node3"] = 1
    for _ in range(2):
        cluster.job._update_hosts()
    assert cluster.logged == ["keeping the previous list of hosts: these differ"]
    cluster.slots["node3"] = 2
    cluster.job._update_hosts()
    assert cluster.logged[1:] == ["new hosts in the hostfile: node3"]
    assert (len(cluster.job.hosts), cluster.job.run_max_hosts) == (3, 3)
    cluster.train("node1")
    cluster.names.append("node4")
    cluster.slots["node4"] = 2
    cluster.job._update_hosts()
    assert (len(cluster.job.hosts), cluster.job.run_max_hosts) == (4, 3)  # The run's name records three hosts


@pytest.mark.parametrize(("began", "host", "line", "reason"), rows_of("bad newcomers"))
def test_a_bad_newcomer_is_left_out_and_retried(began, host, line, reason, hosts, monkeypatch):
    """Check that the other hosts continue, and that the excluded host is retried less and less often."""
    cluster = hosts(2)
    cluster.train("node1")
    clock = [time.monotonic()]
    monkeypatch.setattr(elastic.time, "monotonic", lambda: clock[0])
    for wait_s in (60, 120, 240):
        (cluster.start if began else cluster.launch)("node1", "node2")
        cluster.print("node1", "RuntimeError: connection reset by peer")
        cluster.print("node2", "RuntimeError: connection reset by peer")
        cluster.print(host, line)
        assert cluster.end(node1=1, node2=1) is None
        message = f"node2 is excluded for {wait_s} s: {reason.removeprefix('error: ')}"
        assert cluster.logged[-1].startswith(message)
        cluster.job._connect_to_missing_hosts()
        assert chosen(cluster.job) == ["node1"]
        clock[0] += wait_s
        assert chosen(cluster.job) == ["node1", "node2"]
    cluster.train("node1", "node2")
    assert not cluster.job.exclusion_counts


def test_a_host_that_freezes_during_a_restart_is_left_out(hosts):
    """Freeze a host that has already trained, so that only the signal identifies the frozen host."""
    cluster = hosts(2)
    cluster.train("node1", "node2")
    cluster.launch("node1", "node2")
    cluster.print("node2", f"error: rank 1, process 7, {SUSPENDED}")
    assert cluster.end(node1=1, node2=137) is None
    assert cluster.logged[-1].startswith("node2 is excluded for 60 s: rank 1, process 7, is suspended")
    cluster.launch("node1", "node2")
    assert cluster.end(node1=1, node2=1) is None  # No host is at fault, so the round is retried
    assert cluster.logged[-1].startswith("failed after step 11: ")


def test_a_waiting_host_is_reported_once_with_the_reason(hosts, monkeypatch):
    monkeypatch.setattr(elastic, "MORE_HOSTS_WAIT_S", 0)
    cluster = hosts(3)
    cluster.start("node1", "node2")
    for _ in range(3):
        cluster.job._stop_round_for_more_hosts()
    waits = (
        "node3 waits: the 8 micro-batches of a step can't be divided evenly among 3 hosts with 2 processes"
        " each"
    )
    assert [line for line in cluster.logged if "waits" in line] == [waits]
    cluster.names.append("node4")  # The batch is divisible among four hosts
    cluster.slots["node4"] = 2
    cluster.job._update_hosts()
    cluster.job._connect_to_missing_hosts()
    for _ in range(3):
        cluster.job._stop_round_for_more_hosts()
    assert cluster.job.stop_reason == "node3, node4 join"
    cluster = hosts(3, max_hosts=2)
    cluster.start("node1", "node2")
    cluster.job._stop_round_for_more_hosts()
    assert cluster.logged[-1] == "node3 waits: --max_hosts 2"


def test_an_ssh_that_hangs_before_an_answer_is_killed(hosts):
    cluster = hosts(1)
    connection = cluster.connect(Host("node1", (0,)))
    with subprocess.Popen(["sleep", "30"], stdin=subprocess.PIPE) as ssh:
        connection.hello_event, connection.process = None, ssh
        cluster.job.close()
    assert ssh.returncode == -9
