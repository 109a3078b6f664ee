"""Tests that training results stay the same while hosts leave and join a job of `launch.py --min_hosts`.

Each host runs a real sshd.
"""

import json
import re
import shutil
import signal
import sys
import time
from pathlib import Path

import pytest

from cluster import virtual_hosts as hosts
from cluster.drill import ranks_on
from onecurve.checkpoint.format import step_from_name, step_name, steps_in
from onecurve.numerics.order import order
from tests.conftest import ROOT, Job, latest, lines, metrics, result, run, wait_until
from tests.scripts.test_launch import OTHER_CODE, launcher_of, wait_until_empty
from tests.support.s3 import BUCKET, aws_env

BATCH, POINTS = 64, 4096
# Number of steps to replay after a change of hosts, and tolerance of the replayed losses
REPLAYED, REPLAY_BOUND = 50, 1e-5
LOG_EVERY = "4"  # Number of steps over which each logged loss is averaged
WORDS = ["train_hello.py", "--trackers", "none", "--mixed_precision", "no", "--epochs", "100000"]
WORDS += ["--log_every", LOG_EVERY, "--checkpoint_every", "64", "--log_samples", "--timeout_s", "60"]
EXACT = ["--per_device_batch_size", "8", "--deterministic"]


class ElasticTraining:
    """Elastic training job that node4 starts on the first `count` hosts.

    Args:
        tmp_path: Folder for the hostfile, logs and output.
        count: Number of hosts.
        slots: Number of processes per host.
        flags: launch.py flags.
        script: Additional train_hello.py arguments.
    """

    def __init__(self, tmp_path: Path, count: int, slots: int, *flags: str, script=(), folder=None, env=None):
        self.folder, self.hostfile = folder or tmp_path / "run", tmp_path / "hostfile"
        self.slots, self.script = slots, list(script)
        self.processes = count * slots  # Number of processes after the first launch
        self.kept = tmp_path / "kept"  # Folder with copies of the checkpoints from which the job resumed
        self.hostfile.write_text("".join(f"node{n} slots={slots}\n" for n in range(1, count + 1)))
        launcher = [sys.executable, "launch.py", "--hostfile", self.hostfile, "--log_dir", tmp_path / "logs"]
        words = [*launcher, "--min_hosts", "1", *flags, *WORDS, "--output_dir", self.folder, *script]
        # launch.py writes to a file, because it would block on a full pipe that nobody reads.
        self.output = tmp_path / "output"
        words = ["sh", "-c", 'exec "$@" > "$0" 2>&1', self.output, *words]
        self.job = Job(hosts.inside("node4", words, ROOT), env=env)

    def wait_for(self, devices: int, steps: int = 80, keep: bool = False) -> None:
        """Wait until the job has trained `steps` more steps on `devices` processes.

        Args:
            devices: Number of processes.
            steps: Number of steps to wait for.
            keep: Whether to copy the checkpoint from which the job resumed before newer checkpoints replace
                it.
        """
        first, deadline = None, time.monotonic() + 120
        while True:
            assert self.job.process.poll() is None, self.output.read_text()
            assert time.monotonic() < deadline, f"not {devices} processes: {self.output.read_text()}"
            time.sleep(0.1)
            records = [line for line in self._lines() if "hosts" in line or "train/loss" in line]
            changes = [line for line in records if "processes" in line]
            processes = changes[-1]["processes"] if changes else self.processes
            trained = [line["step"] for line in records[-1:] if "train/loss" in line]
            if processes == devices and trained:
                if first is None:
                    first = trained[0]
                    if keep:
                        name = step_name(changes[-1]["step"])
                        shutil.copytree(self.folder / "checkpoints" / name, self.kept / name)
                if trained[0] >= first + steps:
                    return

    def _lines(self) -> list[dict]:
        """Return the log's complete lines, or an empty list if the log does not exist yet."""
        file = self.folder / "metrics.jsonl"
        text = file.read_text() if file.exists() else ""
        return [json.loads(line) for line in text.rpartition("\n")[0].splitlines()]

    def kill(self) -> None:
        """End the job if a failed test has left the job running. The agents on the hosts notice within
        seconds.
        """
        if self.job.process.poll() is None:
            launcher_of(self.job).kill()
            self.job.wait()
            wait_until_empty([name for name in hosts.names() if name != "node4"], 60)

    def add(self, *names: str) -> None:
        with self.hostfile.open("a") as hostfile:
            hostfile.write("".join(f"{name} slots={self.slots}\n" for name in names))

    def wait_for_line(self, text: str) -> list[str]:
        """Wait until launch.py prints the text, and return all output lines that contain the text."""
        wait_until(lambda: self.output.exists() and text in self.output.read_text(), self.job, 120)
        return [line for line in self.output.read_text().splitlines() if text in line]

    def stop(self) -> str:
        launcher_of(self.job).send_signal(signal.SIGTERM)
        status, _ = self.job.wait(90)
        output = self.output.read_text()
        assert status == 75, output
        return output

    def assert_same_as_one_process(self, tmp_path: Path, first_step: int = 1) -> None:
        """Compare samples, learning rates and losses with a one-process run.

        Each sample must appear once, in step order. Learning rates must be identical, and losses
        may differ only by rounding errors. With --deterministic, the losses and the last checkpoint's weights
        must be bitwise identical.

        Args:
            tmp_path: Folder for the one-process run.
            first_step: First step in the job's samples.jsonl. A host that resumes from S3 starts a new
                samples.jsonl, because this file is not copied to S3.
        """
        last = max(steps_in(self.folder / "checkpoints"))
        samples_of = {line["step"]: line["samples"] for line in lines(self.folder / "samples.jsonl")}
        assert sorted(samples_of) == list(range(first_step, last + 1))
        for step, samples in samples_of.items():
            epoch, batch = divmod(step - 1, POINTS // BATCH)
            assert samples == order(0, epoch, POINTS)[BATCH * batch : BATCH * (batch + 1)].tolist()
        expected = self._train_alone(tmp_path / "one", last)
        records = logged(self.folder).values()
        assert len(records) > 20
        is_exact = "--deterministic" in self.script
        for line in records:
            assert line["train/lr"] == expected[line["step"]]["train/lr"]
            tolerance = {"rel": 0, "abs": 0} if is_exact else {"rel": 1e-3}
            assert line["train/loss"] == pytest.approx(expected[line["step"]]["train/loss"], **tolerance)
        if is_exact:
            weights = [latest(folder) / "model.safetensors" for folder in (self.folder, tmp_path / "one")]
            assert weights[0].read_bytes() == weights[1].read_bytes()

    def assert_same_as_replays(self, tmp_path: Path) -> None:
        """Compare losses after each change of hosts with a one-process resume from the same checkpoint."""
        records = logged(self.folder)
        for checkpoint in sorted(self.kept.iterdir()):
            first = step_from_name(checkpoint.name)
            replay = self._train_alone(tmp_path / f"replay{first}", first + REPLAYED, "--resume", checkpoint)
            # The replay ends inside a logging window and therefore lacks the last log lines.
            common_steps = records.keys() & replay.keys()
            assert len(common_steps) >= REPLAYED // int(LOG_EVERY) - 1
            for step in common_steps:
                expected = replay[step]["train/loss"]
                assert records[step]["train/loss"] == pytest.approx(expected, abs=REPLAY_BOUND)

    def _train_alone(self, folder: Path, last: int, *words) -> dict[int, dict]:
        """Train with one process up to step `last`, and return the log lines by step."""
        words = [*words, *(EXACT if "--deterministic" in self.script else [])]
        run([sys.executable, *WORDS, "--max_steps", last, "--output_dir", folder, *words])
        return logged(folder)


def logged(folder: Path) -> dict[int, dict]:
    return {line["step"]: line for line in metrics(folder) if "train/loss" in line}


@pytest.fixture
def start(cluster, tmp_path):
    """Return a function that starts an ElasticTraining, and end all started jobs after the test."""
    started = []

    def start_one(*words, **options) -> ElasticTraining:
        started.append(ElasticTraining(tmp_path, *words, **options))
        return started[-1]

    yield start_one
    for training in started:
        training.kill()


@pytest.mark.full
def test_a_host_is_lost_comes_back_and_is_told_to_leave(start, tmp_path):
    training = start(2, 1, script=EXACT)
    training.wait_for(2)
    hosts.kill("node2")
    training.wait_for_line("node2 lost after step")
    hosts.revive("node2")  # node2 answers again while node1 restarts the job without node2
    training.wait_for_line("node2 joins")
    training.wait_for(2)
    ranks_on("node2")[0].send_signal(signal.SIGTERM)
    training.wait_for(1, steps=20)
    output = training.stop()
    assert "node2 responds again" in output
    assert "node2 leaves (SIGTERM)" in output
    repeated = re.findall(r"continuing at step [\d,]+ and repeating (\d+) steps?", output)
    assert len(repeated) == 3, output
    assert repeated[1:] == ["0", "0"]  # No step was repeated after the host joined or left the job
    assert len([line for line in lines(training.folder / "metrics.jsonl") if "hosts" in line]) == 3
    training.assert_same_as_one_process(tmp_path)
    wait_until_empty(hosts.names(), 5)


@pytest.mark.full
def test_a_job_of_one_process_grows_and_leaves_out_a_bad_host(start, tmp_path):
    """Add a host with different code, which can join only after its code is repaired, and a host that must
    wait.
    """
    training = start(1, 1, script=["--per_device_batch_size", "8"])
    training.wait_for(1)
    Job(hosts.inside("node2", OTHER_CODE[0])).wait()
    training.add("node2")
    (line,) = training.wait_for_line("node2 is excluded")
    assert "the processes do not agree: script and onecurve/ is " in line
    assert "(host node2)" in line
    training.wait_for(1)
    hosts.kill("node2")
    hosts.revive("node2")
    Job(hosts.inside("node2", OTHER_CODE[1])).wait()
    training.wait_for(2)
    training.add("node3")
    training.wait_for_line(
        "node3 waits: the 8 micro-batches of a step can't be divided evenly among 3 hosts with 1"
    )
    training.wait_for(2)
    output = training.stop()
    assert len(re.findall("node3 waits", output)) == 1
    assert result(training.folder)["hosts"] == 2
    training.assert_same_as_one_process(tmp_path)
    wait_until_empty(hosts.names(), 5)


@pytest.mark.full
@pytest.mark.parametrize("config", ["ddp_2x2gpu", "fsdp_2x4gpu", "zero2_4gpu", "zero3_2x4gpu"])
def test_the_first_host_is_lost_under_each_strategy(config, start, tmp_path):
    """Disconnect and later reconnect the network of the first host, which writes to the shared folder."""
    training = start(2, 2, "--config_file", f"accelerate_configs/{config}.yaml")
    training.wait_for(4)
    # The job would restart from step 0 if it had no checkpoint.
    wait_until(lambda: steps_in(training.folder / "checkpoints"), training.job, 60)
    hosts.cut("node1")
    training.wait_for(2, keep=True)
    hosts.heal("node1")
    training.wait_for(4, keep=True)
    output = training.stop()
    assert "node1 lost after step" in output
    assert "has ended" in output
    assert "watching for" not in output, "a later round waits for no heartbeat of an earlier one"
    assert "node1 joins" in output
    training.assert_same_as_one_process(tmp_path)
    training.assert_same_as_replays(tmp_path)
    wait_until_empty(hosts.names(), 5)


def test_a_process_that_fails_at_each_start_ends_the_job(cluster, tmp_path):
    """Check that launch.py reports a failure before the first step once and does not restart the job."""
    words = [sys.executable, "launch.py", "--mode", "multi-node", "--gpus-per-node", "1", "--min_hosts", "1"]
    words += ["--master-node", "node1", "--worker-nodes", "node2", "--log_dir", tmp_path / "logs"]
    words += ["train_hello.py", "--batch_sise", "64"]
    status, output = Job(hosts.inside("node4", words, ROOT)).wait(120)
    assert status == 1
    assert "unknown flag --batch_sise: did you mean --batch_size?" in output
    wait_until_empty(hosts.names(), 5)


@pytest.fixture
def s3_on_node4(cluster):
    """Run moto's S3 server on node4, which all hosts can reach, and yield the clients' environment."""
    env = aws_env("http://10.77.0.4:5000") | {"NO_PROXY": "10.77.0.4"}
    words = [sys.executable, "-m", "moto.server", "-H", "10.77.0.4", "-p", "5000"]
    server = Job(hosts.inside("node4", words, ROOT), env=env)
    try:
        bucket = f"import boto3; boto3.client('s3').create_bucket(Bucket={BUCKET!r})"
        run(hosts.inside("node4", [sys.executable, "-c", bucket], ROOT), env=env)
        yield env
    finally:
        server.kill()
        server.process.communicate()


@pytest.mark.full
def test_the_first_host_is_lost_with_its_disk(start, s3_on_node4, tmp_path):
    """Train without a shared folder, so that the second host resumes from S3 when the first host is lost.

    Later, the first host and two new hosts join.
    """
    folder = ROOT / "runs" / "elastic"  # Each host has its own copy of the project folder
    flags = [word for name in s3_on_node4 for word in ("--env", name)]
    words = ["--s3", f"s3://{BUCKET}/elastic", "--per_device_batch_size", "8"]
    training = start(2, 2, *flags, script=words, folder=folder, env=s3_on_node4)

    def seen_from(host: str) -> Path:
        return Path(f"/proc/{hosts._init_pid(host)}/root{folder}")

    training.folder = seen_from("node1")
    training.wait_for(4, steps=200)
    hosts.cut("node1")
    training.folder = seen_from("node2")
    training.wait_for(2, keep=True)
    hosts.heal("node1")
    training.wait_for(4, keep=True)
    training.add("node3", "node4")
    training.wait_for(8, keep=True)
    output = training.stop()
    assert "can't continue without" not in output
    assert "new hosts in the hostfile: node3, node4" in output
    first = lines(training.folder / "samples.jsonl")[0]["step"]
    assert first > 1
    training.assert_same_as_one_process(tmp_path, first)
    training.assert_same_as_replays(tmp_path)
    wait_until_empty(["node1", "node2", "node3"], 5)
