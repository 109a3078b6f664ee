"""Tests that virtual hosts are isolated, can simulate failures and are removed completely."""

import os
import re
import shlex
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from cluster import virtual_hosts as hosts
from tests.conftest import ROOT, Job, run, wait_until

SCRIPT = [sys.executable, "cluster/virtual_cluster.py"]


def on(host: str, *words) -> str:
    return run(hosts.inside(host, [str(word) for word in words])).strip()


def test_hosts_are_isolated(cluster):
    assert hosts.names() == ["node1", "node2", "node3", "node4"]
    assert on("node2", "hostname") == "node2"
    assert "10.77.0.2/24" in on("node2", "ip", "-brief", "address", "show", "eth0")
    assert on("node1", "ssh", "node2", "hostname") == "node2"
    on("node1", "touch", "/dev/shm/mine")
    assert on("node2", "ls", "/dev/shm") == ""
    assert not Path("/dev/shm/mine").exists()
    processes = on("node1", "ps", "ax", "-o", "pid,args")
    assert "pytest" not in processes
    assert Path("/etc/hostname").read_text().strip() == socket.gethostname() != "node1"


@pytest.mark.full
@pytest.mark.needs("two cores")
def test_each_host_has_its_own_cores(cluster_tools):
    # All of the machine's cores, even if this process is limited to one core
    cores = sorted(os.sched_getaffinity(1))
    env = {"VIRTUAL_CLUSTER": f"{hosts.CLUSTER}-cores"}
    show = [sys.executable, "-c", "import os; print(*sorted(os.sched_getaffinity(0)))"]

    def on_two(*words: str) -> str:
        taskset = ["taskset", "--cpu-list", ",".join(map(str, cores[:2]))]
        return run([*taskset, *SCRIPT, *words], env=env).strip()

    on_two("up", "--hosts", "3")
    try:
        for number, core in enumerate([cores[0], cores[1], cores[0]], 1):
            assert on_two("run", "--host", f"node{number}", *show) == str(core)
            cores_over_ssh = on_two("run", "--host", "node1", "ssh", f"node{number}", shlex.join(show))
            assert cores_over_ssh == str(core)
    finally:
        on_two("down")


@pytest.mark.parametrize(("shares", "expected"), [(2, ["0,2,4", "1,3,5"]), (4, ["0,4", "1,5", "2", "3"])])
def test_cores_are_divided(shares, expected, monkeypatch):
    monkeypatch.setattr(hosts.os, "sched_getaffinity", lambda _: set(range(6)))
    assert [hosts._share_of_cores(number, shares) for number in range(shares)] == expected


def test_changes_in_a_private_folder_stay_on_one_host(cluster):
    file = ROOT / "docs" / "only-here"
    on("node1", "touch", file)
    assert on("node1", "ls", file)
    assert Job(hosts.inside("node2", ["ls", str(file)])).wait()[0] != 0
    assert not file.exists()
    on("node1", "rm", file)


def test_a_cut_cable_and_a_host_without_power(cluster):
    reach = ["ssh", "-o", "ConnectTimeout=1", "node2", "true"]
    hosts.cut("node2")
    status, output = Job(hosts.inside("node1", reach)).wait()
    assert status == 255, output
    assert on("node2", "hostname") == "node2"  # node2 is still running
    hosts.heal("node2")
    assert on("node1", "ssh", "node2", "hostname") == "node2"
    on("node3", "touch", "/dev/shm/lost")
    hosts.kill("node3")
    with pytest.raises(ValueError, match="host node3 is not running"):
        hosts.inside("node3", ["true"])
    hosts.revive("node3")
    assert on("node1", "ssh", "node3", "ls", "/dev/shm") == ""


def test_a_lossy_cable(cluster):
    """Check the kernel's packet filter rule, because the kernel selects the dropped packets at random."""
    hosts.lose("node2", 30)
    assert "numgen random mod 10000 < 3000 drop" in on("node2", "nft", "list", "ruleset")
    hosts.lose("node2", 0)
    assert on("node2", "nft", "list", "ruleset") == ""


def test_a_slow_and_a_delayed_cable(cluster):
    """Check a cable's bandwidth and delay. Without netem in the kernel, setting a delay changes nothing."""
    show = ["tc", "qdisc", "show", "dev", "eth0"]
    hosts.shape("node2", rate="10mbit")
    assert "rate 10Mbit" in on("node2", *show)
    netem = ["tc", "qdisc", "add", "dev", "lo", "root", "netem", "delay", "1ms"]
    if Job(hosts.inside("node2", netem)).wait()[0] != 0:
        with pytest.raises(ValueError, match="--delay requires the kernel module sch_netem"):
            hosts.shape("node2", delay="20ms")
    else:
        hosts.shape("node2", delay="20ms")
        assert "delay 20ms" in on("node2", *show)
    hosts.shape("node2")
    assert not re.search("rate|netem", on("node2", *show))


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            ["run", "--host", "node9", "true"],
            "host node9 is not running. Running hosts: node1, node2, node3, node4",
        ),
        (["cut", "node9"], "host node9 is not running"),
        (["revive", "node9"], "there is no host node9"),
        (["revive", "node2"], "host node2 is already running"),
        (["up"], "a virtual cluster is already running"),
    ],
)
def test_a_mistake_is_one_line(words, message, cluster):
    status, output = Job([*SCRIPT, *words]).wait()
    assert status == 1
    assert output.startswith(f"error: {message}")


def test_root_is_needed(cluster_tools):
    may_read = ["--inh-caps=+dac_read_search", "--ambient-caps=+dac_read_search"]
    words = ["setpriv", "--reuid=54321", "--regid=54321", "--clear-groups", *may_read]
    words += [sys.executable, "-m", "cluster.virtual_cluster", "down"]
    completed = subprocess.run(words, cwd=ROOT, capture_output=True, text=True)
    assert (completed.returncode, completed.stderr) == (
        1,
        "error: virtual hosts are Linux namespaces, which require root. Run this command as root.\n",
    )


def test_down_leaves_nothing(cluster_tools):
    """Check that `down` also kills running processes. The module's tests share the hosts that this test
    removes.
    """
    hosts.down()
    before = run(["ip", "-brief", "link"])
    run([*SCRIPT, "up", "--hosts", "2"])
    sleeper = Job([*SCRIPT, "run", "--host", "node2", "sleep", "1000"])
    wait_until(lambda: "sleep 1000" in on("node2", "ps", "ax", "-o", "args"), sleeper)
    run([*SCRIPT, "down"])
    assert sleeper.wait(60)[0] != 0
    assert hosts.names() == []
    assert not hosts.STATE.exists()
    assert f"{hosts.CLUSTER}-" not in run(["ip", "netns"])
    assert run(["ip", "-brief", "link"]) == before
    assert "virtual_cluster" not in Path("/proc/mounts").read_text()


def test_all_missing_packages_are_reported_at_once(tmp_path, monkeypatch):
    monkeypatch.setattr(hosts, "STATE", tmp_path / "none")
    monkeypatch.setattr(hosts, "PATH", str(tmp_path))
    with pytest.raises(ValueError, match=r"apt-get install iproute2 nftables openssh-server util-linux\.$"):
        hosts.up(2)
