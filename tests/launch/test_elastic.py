"""Which hosts are in the next round of an elastic job, and when it ends. No host is contacted."""

import subprocess
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from onecurve.system.env import PREEMPTED
from tests.conftest import rows_of
from tools.launch import elastic
from tools.launch.agent import SUSPENDED
from tools.launch.elastic import ElasticJob
from tools.launch.hosts import SSH_FAILED, Host
from tools.launch.launcher import HostConnection

HELLO = {"reached_at": None, "asked_from": None}
BATCH = {"event": "batch", "batch_size": 64, "per_device": 8}


class Hosts:
    """The hosts of a job, and what was sent to each."""

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
        processes = sum(len(host.devices) for host in hosts)
        return SimpleNamespace(processes=processes, start=start, remark=lambda _: None)

    def connect(self, host: Host) -> HostConnection:
        process = SimpleNamespace(kill=lambda: None)
        connection = HostConnection(host, process, Path("log"), hello=HELLO | {"hostname": host.name})
        connection.request = lambda name: self.sent.append((host.name, name))
        self.job.connections.append(connection)
        return connection

    def launch(self, *names: str) -> None:
        """A round on these hosts, that has not begun to train."""
        job = self.job
        job._connect_missing()
        job._start([c for c in job._ready() if c.host.name in names])
        job.on_event(job.members[0], BATCH)

    def start(self, *names: str) -> None:
        """A round on these hosts, that has begun to train."""
        self.launch(*names)
        began = {"event": "began", "step": 10, "in_s3": True, "is_shared": False}
        self.job.on_event(self.job.members[0], began)

    def train(self, *names: str) -> None:
        """A round on these hosts that has trained, and was then told to save and end."""
        self.start(*names)
        self.job.on_event(self.job.members[0], {"event": "step", "step": 11})
        assert self.end(**dict.fromkeys(names, PREEMPTED)) is None

    def again(self) -> None:
        """Connects to hosts that were away."""
        self.job.next_try = 0
        self.job._connect_missing()

    def print(self, name: str, line: str) -> None:
        self.job._connection(name).last_lines.append(line)

    def end(self, **statuses: int) -> int | None:
        for member in self.job.members:
            self.job.on_end(member, statuses[member.host.name])
        status = self.job._judge()
        self.job.members = []
        return status


@pytest.fixture
def hosts(tmp_path):
    return lambda *words, **options: Hosts(*words, tmp_path, **options)


def chosen(job: ElasticJob) -> list[str]:
    return [connection.host.name for connection in job._choose(job._ready()) or []]


def test_the_largest_number_that_divides_at_least_and_at_most(hosts):
    """Eight micro-batches of 8 images, two processes on a host: 1, 2 or 4 hosts."""
    for there, used in ((1, 1), (2, 2), (3, 2), (4, 4), (5, 4)):
        found = hosts(there)
        found.job.batch = {"batch_size": 64, "per_device": 8}
        found.job._connect_missing()
        assert chosen(found.job) == found.names[:used]
    found = hosts(4, min_hosts=2, max_hosts=2)
    found.job._connect_missing()
    assert chosen(found.job) == ["node1", "node2"]
    for connection in found.job.connections[1:]:
        found.job.on_end(connection, SSH_FAILED)
    assert chosen(found.job) == []


def test_the_first_host_stays_the_first(hosts):
    """It is needed where its disk alone has the checkpoints."""
    found = hosts(2)
    found.start("node2")
    assert found.end(node2=PREEMPTED) is None
    found.job._connect_missing()
    assert chosen(found.job) == ["node2", "node1"]
    found.start("node2", "node1")
    found.job.began |= {"in_s3": False}
    assert found.end(node2=SSH_FAILED, node1=1) is None
    found.job.next_try = time.monotonic() + 100  # node2 is away
    found.job._connect_missing()
    assert chosen(found.job) == []
    found.again()
    assert chosen(found.job) == ["node2", "node1"]


@pytest.mark.parametrize("how", ["it leaves", "it is left out"])
@pytest.mark.parametrize("then", ["time passes", "it was away"])
def test_a_host_joins_again_after_a_while_or_as_another_machine(how, then, hosts):
    found = hosts(2)
    found.train("node1")
    if how == "it leaves":
        found.start("node1", "node2")
        found.job.on_event(found.job.members[1], {"event": "leaving", "why": "SIGTERM"})
        assert found.end(node1=PREEMPTED, node2=PREEMPTED) is None
        assert "node2 leaves (SIGTERM)" in found.logged
    else:
        found.launch("node1", "node2")
        assert found.end(node1=1, node2=1) is None
    found.job._connect_missing()
    assert chosen(found.job) == ["node1"]
    if then == "it was away":
        found.job.on_end(found.job._connection("node2"), SSH_FAILED)
        found.again()
    else:
        found.job.leaves_until["node2"] = time.monotonic()
    assert chosen(found.job) == ["node1", "node2"]


@pytest.mark.parametrize("is_finished", [False, True])
def test_a_host_that_joins_stops_the_round_once(is_finished, hosts, monkeypatch):
    """Not one that has finished. The end of its launcher by a signal, sent just before, does not count."""
    monkeypatch.setattr(elastic, "SETTLE_S", 0)
    found = hosts(2)
    found.start("node1")
    if is_finished:
        found.job.on_event(found.job.members[0], {"event": "finished"})
    found.sent.clear()
    for _ in range(3):
        found.job._look_for_more_hosts()
    assert found.sent == ([] if is_finished else [("node1", "stop")])
    assert found.end(node1=1 if is_finished else PREEMPTED) == (0 if is_finished else None)
    assert is_finished or found.logged[-1] == "node2 joins"


def test_a_silent_host_is_lost_and_the_others_are_killed(hosts, monkeypatch):
    found = hosts(2)
    found.start("node1", "node2")
    found.job.members[1].received_at -= elastic.LOST_S + 1
    monkeypatch.setattr(elastic, "KILL_S", -1)
    found.job._look_for_lost_hosts()
    assert found.job.members[1].status == SSH_FAILED
    assert ("node1", "kill") in found.sent
    assert found.end(node1=1, node2=SSH_FAILED) is None
    assert "node2 lost after step 0" in found.logged
    assert found.job.fenced_at == 0  # the first host lives: nobody else writes


def test_rounds_without_progress_and_a_mistake_before_the_first_step_end_the_job(hosts, capsys):
    found = hosts(1)
    for _ in range(elastic.FRUITLESS_ROUNDS):
        found.start("node1")
        assert found.end(node1=1) is None
    found.start("node1")
    assert found.end(node1=1) == 1
    assert "error: 3 rounds without a new checkpoint" in capsys.readouterr().err
    found = hosts(2)
    found.launch("node1", "node2")
    assert found.end(node1=1, node2=1) == 1
    assert capsys.readouterr().err.startswith("error: node1: ")
    found.launch("node1", "node2")
    assert found.end(node1=-9, node2=1) == 1
    assert capsys.readouterr().err.startswith("error: node1: its agent was killed by signal 9")


def test_a_signal_that_comes_twice_at_once_is_one(hosts):
    """`timeout` signals a group, whose first process passes it on. A second one, later, kills."""
    alone = hosts(1)
    alone.start("node1")
    for _ in range(2):
        alone.job.on_signal(15)
    assert ("node1", "kill") not in alone.sent
    alone.job.signal_at -= 1
    alone.job.on_signal(15)
    assert ("node1", "kill") in alone.sent


def test_a_changed_hostfile(hosts):
    found = hosts(2)
    found.names.append("node3")
    found.slots["node3"] = 1
    for _ in range(2):
        found.job._read_hosts_again()
    assert found.logged == ["the hosts stay as they were: these differ"]
    found.slots["node3"] = 2
    found.job._read_hosts_again()
    assert found.logged[1:] == ["new in the hostfile: node3"]
    assert (len(found.job.hosts), found.job.most) == (3, 3)
    found.train("node1")
    found.names.append("node4")
    found.slots["node4"] = 2
    found.job._read_hosts_again()
    assert (len(found.job.hosts), found.job.most) == (4, 3)  # the run's name has three


@pytest.mark.parametrize(("began", "host", "line", "reason"), rows_of("bad newcomers"))
def test_a_bad_newcomer_is_left_out_and_tried_again(began, host, line, reason, hosts, monkeypatch):
    """The others go on, and are not disturbed more and more seldom."""
    found = hosts(2)
    found.train("node1")
    clock = [time.monotonic()]
    monkeypatch.setattr(elastic.time, "monotonic", lambda: clock[0])
    for wait_s in (60, 120, 240):
        (found.start if began else found.launch)("node1", "node2")
        found.print("node1", "RuntimeError: connection reset by peer")
        found.print("node2", "RuntimeError: connection reset by peer")
        found.print(host, line)
        assert found.end(node1=1, node2=1) is None
        said = f"node2 is left out for {wait_s} s: {reason.removeprefix('error: ')}"
        assert found.logged[-1].startswith(said)
        found.job._connect_missing()
        assert chosen(found.job) == ["node1"]
        clock[0] += wait_s
        assert chosen(found.job) == ["node1", "node2"]
    found.train("node1", "node2")
    assert not found.job.refusals


def test_a_host_that_freezes_as_it_starts_again_is_left_out(hosts):
    """It has trained before: what tells is the signal."""
    found = hosts(2)
    found.train("node1", "node2")
    found.launch("node1", "node2")
    found.print("node2", f"error: rank 1, process 7, {SUSPENDED}")
    assert found.end(node1=1, node2=137) is None
    assert found.logged[-1].startswith("node2 is left out for 60 s: rank 1, process 7, is suspended")
    found.launch("node1", "node2")
    assert found.end(node1=1, node2=1) is None  # nobody is to blame: tried again
    assert found.logged[-1].startswith("failed after step 11: ")


def test_a_host_that_waits_is_named_once_with_the_reason(hosts, monkeypatch):
    monkeypatch.setattr(elastic, "SETTLE_S", 0)
    found = hosts(3)
    found.start("node1", "node2")
    for _ in range(3):
        found.job._look_for_more_hosts()
    waits = "node3 waits: the 8 micro-batches of a step do not divide among 3 hosts of 2 processes"
    assert [line for line in found.logged if "waits" in line] == [waits]
    found.names.append("node4")  # together they divide
    found.slots["node4"] = 2
    found.job._read_hosts_again()
    found.job._connect_missing()
    for _ in range(3):
        found.job._look_for_more_hosts()
    assert found.job.stopping == "node3, node4 join"
    found = hosts(3, max_hosts=2)
    found.start("node1", "node2")
    found.job._look_for_more_hosts()
    assert found.logged[-1] == "node3 waits: --max_hosts 2"


def test_an_ssh_that_hangs_before_an_answer_holds_no_terminal(hosts):
    found = hosts(1)
    connection = found.connect(Host("node1", (0,)))
    with subprocess.Popen(["sleep", "30"], stdin=subprocess.PIPE) as ssh:
        connection.hello, connection.process = None, ssh
        found.job.close()
    assert ssh.returncode == -9
