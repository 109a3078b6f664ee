"""launch.py on hosts with real sshd: it starts, stops and cleans up on all of them, and says what failed."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from cluster import virtual_cluster as hosts
from tests.conftest import ROOT, VIT, Job, metrics, result
from tests.test_parity import HALF_THE_CORES
from tests.test_resume import full

HELLO = ["train_hello.py", "--trackers", "none", "--mixed_precision", "no"]
LONG = [*HELLO, "--epochs", "100000", "--log_every", "64", "--checkpoint_every", "64", "--timeout_s", "30"]


@pytest.fixture(scope="module", params=[2])
def cluster(request):
    """Two hosts with a copy of the project each."""
    missing = [name for name in hosts.NEEDS if not shutil.which(name, path=hosts.PATH)]
    if missing or os.geteuid() != 0:
        pytest.skip(f"needs root and Debian's {', '.join(set(hosts.NEEDS.values()))}")
    hosts.up(request.param, slots=1, private=[ROOT])
    yield hosts
    hosts.down()
    assert not hosts.STATE.exists()
    assert "vc-" not in subprocess.run(["ip", "netns"], capture_output=True, text=True).stdout


def write_hostfile(folder: Path, slots: int) -> Path:
    file = folder / "hostfile"
    file.write_text("".join(f"{name} slots={slots}\n" for name in hosts.names()))
    return file


def start(words: list, tmp_path, slots: int = 1, flags=(), env=None) -> Job:
    """launch.py on the first host, with a hostfile of all."""
    launcher = [sys.executable, "launch.py", "--hostfile", write_hostfile(tmp_path, slots)]
    launcher += ["--log_dir", tmp_path / "logs", *flags]
    return Job(hosts.inside("node1", [str(word) for word in [*launcher, *words]], ROOT), env=env)


def wait_for_line(job: Job, file: Path, count: int = 1) -> None:
    deadline = time.monotonic() + 90
    while not (file.exists() and len(file.read_text().splitlines()) >= count):
        assert job.process.poll() is None, job.wait()[1]
        assert time.monotonic() < deadline
        time.sleep(0.1)


def left(host: str) -> list[str]:
    """The command lines of what runs on a host beside sshd."""
    found = []
    for number in hosts.processes(host):
        try:
            words = psutil.Process(number).cmdline()
        except psutil.Error:
            continue
        if words and not words[0].startswith("sshd") and words[0] not in ("sleep", "/usr/sbin/sshd"):
            found.append(" ".join(words))
    return found


def wait_until_empty(names, within_s: float) -> None:
    deadline = time.monotonic() + within_s
    while any(left(name) for name in names):
        assert time.monotonic() < deadline, {name: left(name) for name in names}
        time.sleep(0.2)


def launcher_of(job: Job) -> psutil.Process:
    """launch.py itself, below nsenter."""
    for process in psutil.Process(job.process.pid).children(recursive=True):
        if "launch.py" in process.cmdline()[:2]:
            return process
    raise AssertionError("no launch.py")


def ranks_on(host: str, script: str = "train_hello.py") -> list[psutil.Process]:
    found = []
    for number in hosts.processes(host):
        process = psutil.Process(number)
        if script in process.cmdline()[:3] and "RANK" in process.environ():
            found.append(process)
    return found


@pytest.mark.parametrize(
    ("slots", "config"), [(1, "ddp_2gpu"), full(2, "ddp_2gpu"), full(2, "fsdp_2gpu"), full(1, "zero2_2gpu")]
)
def test_two_hosts_train_as_one_process(slots, config, cluster, tmp_path, cache):
    training = [*VIT, "--data", "digits", "--batch_size", "96", "--per_device_batch_size", "24", *cache]
    training += ["--max_steps", "20", "--log_every", "1", "--mixed_precision", "no", "--trackers", "none"]
    config = ["--config_file", f"accelerate_configs/{config}.yaml"]
    job = start([*training, "--output_dir", tmp_path / "run"], tmp_path, slots, config)
    status, output = job.wait()
    assert status == 0, output
    alone = Job([sys.executable, *training, "--output_dir", tmp_path / "alone"], env=HALF_THE_CORES)
    assert alone.wait()[0] == 0
    ours, theirs = metrics(tmp_path / "run"), metrics(tmp_path / "alone")
    assert [line.get("train/loss") for line in ours] == pytest.approx(
        [line.get("train/loss") for line in theirs], abs=1e-5
    )
    found = result(tmp_path / "run")
    assert (found["hosts"], found["processes"]) == (2, 2 * slots)
    assert json.loads((tmp_path / "run" / "recipe.json").read_text())["hosts"] == ["node1", "node2"]
    assert sorted(path.name for path in (tmp_path / "logs").iterdir()) == ["node1.log", "node2.log"]
    assert "node1 | run folder" in output
    assert "run folder" in (tmp_path / "logs" / "node1.log").read_text()
    wait_until_empty(hosts.names(), 5)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_saves_everywhere_and_the_same_command_continues(number, cluster, tmp_path):
    words = [*LONG, "--output_dir", tmp_path / "run"]
    job = start(words, tmp_path)
    wait_for_line(job, tmp_path / "run" / "metrics.jsonl", 3)
    launcher_of(job).send_signal(number)
    status, output = job.wait(60)
    assert status == 75, output
    assert result(tmp_path / "run")["status"] == "preempted"
    wait_until_empty(hosts.names(), 5)
    steps = result(tmp_path / "run")["steps"]
    again = start([*words, "--max_steps", steps + 10], tmp_path)
    status, output = again.wait()
    assert status == 0, output
    assert f"continuing at step {steps:,}" in output


def test_a_killed_launcher_leaves_nothing_behind(cluster, tmp_path):
    job = start([*LONG, "--output_dir", tmp_path / "run"], tmp_path)
    wait_for_line(job, tmp_path / "run" / "metrics.jsonl", 2)
    launcher_of(job).kill()
    assert job.wait(60)[0] != 0
    wait_until_empty(hosts.names(), 60)
    assert result(tmp_path / "run")["status"] == "preempted"


def test_a_rank_that_dies_ends_the_job_and_its_host_is_named(cluster, tmp_path):
    job = start([*LONG, "--output_dir", tmp_path / "run"], tmp_path)
    wait_for_line(job, tmp_path / "run" / "metrics.jsonl", 2)
    (rank,) = ranks_on("node2")
    rank.kill()
    status, output = job.wait(60)
    assert status == 1
    assert "error: node2: a process was killed by signal 9" in output, output
    wait_until_empty(hosts.names(), 5)


def test_a_host_that_is_cut_off(cluster, tmp_path):
    """The job ends on both sides of the cut, and once it is healed the same command continues."""
    words = [*LONG, "--output_dir", tmp_path / "run"]
    job = start(words, tmp_path)
    wait_for_line(job, tmp_path / "run" / "metrics.jsonl", 3)
    hosts.cut("node2")
    try:
        status, output = job.wait(120)
        assert status == 1
        assert "error: node2: " in output, output
        wait_until_empty(hosts.names(), 90)
    finally:
        hosts.heal("node2")
    saved = max(int(path.name[5:]) for path in (tmp_path / "run" / "checkpoints").glob("step_*"))
    status, output = start([*words, "--max_steps", saved + 10], tmp_path).wait()
    assert status == 0, output
    assert f"continuing at step {saved:,}" in output


def test_no_sshd_on_one_host(cluster, tmp_path):
    hosts.stop_sshd("node2")
    try:
        status, output = start(HELLO, tmp_path).wait(60)
    finally:
        hosts.start_sshd("node2")
    assert status == 1
    assert "error: node2: ssh: connect to host node2 port 22: Connection refused" in output
    wait_until_empty(hosts.names(), 5)


def test_another_host_key(cluster, tmp_path):
    """What answers there is not who it was: nothing is sent to it."""
    known = hosts.STATE / "node1" / "ssh" / "ssh_known_hosts"
    text = known.read_text()
    keys = text.splitlines()
    known.write_text(f"{keys[0]}\nnode2,10.77.0.2 {keys[0].partition(' ')[2]}\n")
    try:
        status, output = start(HELLO, tmp_path).wait(60)
    finally:
        known.write_text(text)
    assert status == 1
    assert "error: node2: Host key verification failed." in output, output


def test_a_taken_port_is_said_with_its_process(cluster, tmp_path):
    code = "import socket, time; s = socket.create_server(('', 29500)); print(1, flush=True); time.sleep(300)"
    taker = Job(hosts.inside("node1", [sys.executable, "-c", code]))
    assert taker.process.stdout.readline() == "1\n"
    try:
        status, output = start(HELLO, tmp_path).wait(60)
    finally:
        taker.kill()
        taker.process.communicate()
    assert status == 1
    assert "error: node1: port 29500: Address already in use by process " in output, output
    assert "give another --port" in output
    wait_until_empty(hosts.names(), 5)


def test_other_code_on_one_host(cluster, tmp_path):
    """Each host has a copy of its own here; one of them is old."""
    file = ROOT / "common" / "optim.py"
    before = file.read_text()
    Job(hosts.inside("node2", ["sed", "-i", "1s/^/# old\\n/", str(file)])).wait()
    try:
        status, output = start([*HELLO, "--output_dir", tmp_path / "run"], tmp_path).wait()
    finally:
        Job(hosts.inside("node2", ["sed", "-i", "1d", str(file)])).wait()
    assert file.read_text() == before
    assert status == 1
    assert "the processes do not agree: script and common/ is " in output, output
    assert "(host node2)" in output
    wait_until_empty(hosts.names(), 5)


def test_secrets_go_over_stdin_alone(cluster, tmp_path):
    """--env NAME reaches every process, and no command line, file or output."""
    script = tmp_path / "show.py"
    script.write_text(
        "import os, time; print('canary', len(os.environ['CANARY']), flush=True); time.sleep(3)\n"
    )
    canary = "s3cr3t-canary"
    job = start([script], tmp_path, flags=["--env", "CANARY"], env={"CANARY": canary})
    seen = set()
    while job.process.poll() is None:
        for name in hosts.names():
            for number in hosts.processes(name):
                try:
                    seen.add(" ".join(psutil.Process(number).cmdline()))
                except psutil.Error:
                    continue
        time.sleep(0.05)
    status, output = job.wait()
    assert status == 0, output
    assert output.count("canary 13") == 2
    assert any("show.py" in words for words in seen)
    assert not any(canary in words for words in seen)
    assert not any(canary in file.read_text() for file in (tmp_path / "logs").iterdir())
