"""launch.py --min_hosts on hosts with real sshd: hosts leave and join, and the training stays the same."""

import re
import signal
import sys
import time
from pathlib import Path

import pytest

from cluster import virtual_cluster as hosts
from common.checkpoint.format import steps_in
from common.order import order
from tests.conftest import ROOT, Job, full, lines, metrics, run
from tests.scripts.test_launch import launcher_of, ranks_on, wait_until_empty

BATCH, POINTS = 64, 4096
WORDS = ["train_hello.py", "--trackers", "none", "--mixed_precision", "no", "--epochs", "100000"]
WORDS += ["--log_every", "16", "--checkpoint_every", "256", "--log_samples", "--timeout_s", "60"]


class ElasticTraining:
    """A job that node4 starts on the first `count` hosts, with `slots` processes each."""

    def __init__(self, tmp_path: Path, count: int, slots: int, *flags: str):
        self.folder, hostfile = tmp_path / "run", tmp_path / "hostfile"
        self.processes = count * slots  # of the first launch
        hostfile.write_text("".join(f"node{n} slots={slots}\n" for n in range(1, count + 1)))
        launcher = [sys.executable, "launch.py", "--hostfile", hostfile, "--log_dir", tmp_path / "logs"]
        words = [*launcher, "--min_hosts", "1", *flags, *WORDS, "--output_dir", self.folder]
        self.job = Job(hosts.inside("node4", words, ROOT))

    def wait_for(self, devices: int, steps: int = 40) -> int:
        """Waits until so many processes have trained so many steps more. Returns the newest step."""
        first, deadline = None, time.monotonic() + 120
        while True:
            assert self.job.process.poll() is None, self.job.wait()[1]
            assert time.monotonic() < deadline, f"not {devices} processes"
            time.sleep(0.1)
            found = [line for line in self._lines() if "hosts" in line or "train/loss" in line]
            changes = [line for line in found if "processes" in line]
            now = changes[-1]["processes"] if changes else self.processes
            trained = [line["step"] for line in found[-1:] if "train/loss" in line]
            if now == devices and trained:
                first = trained[0] if first is None else first
                if trained[0] >= first + steps:
                    return trained[0]

    def _lines(self) -> list[dict]:
        try:
            return metrics(self.folder)
        except (OSError, ValueError):  # not yet there, or a line is being written
            return []

    def stop(self) -> str:
        launcher_of(self.job).send_signal(signal.SIGTERM)
        status, output = self.job.wait(90)
        assert status == 75, output
        return output

    def assert_same_as_one_process(self, tmp_path: Path) -> None:
        """Each sample once, in the order of the step; learning rates equal, losses up to rounding."""
        last = max(steps_in(self.folder / "checkpoints"))
        ours = {line["step"]: line["samples"] for line in lines(self.folder / "samples.jsonl")}
        assert sorted(ours) == list(range(1, last + 1))
        for step, samples in ours.items():
            epoch, within = divmod(step - 1, POINTS // BATCH)
            assert samples == order(0, epoch, POINTS)[BATCH * within : BATCH * (within + 1)].tolist()
        words = [sys.executable, *WORDS, "--max_steps", last, "--output_dir", tmp_path / "one"]
        run(words)
        theirs = {line["step"]: line for line in metrics(tmp_path / "one") if "train/loss" in line}
        found = [line for line in metrics(self.folder) if "train/loss" in line]
        assert len(found) > 20
        for line in found:
            assert line["train/lr"] == theirs[line["step"]]["train/lr"]
            assert line["train/loss"] == pytest.approx(theirs[line["step"]]["train/loss"], rel=1e-3)


def test_a_host_is_lost_comes_back_and_is_told_to_leave(cluster, tmp_path):
    training = ElasticTraining(tmp_path, 2, 1)
    training.wait_for(2)
    hosts.kill("node2")
    training.wait_for(1)
    hosts.revive("node2")
    joined = training.wait_for(2)
    ranks_on("node2")[0].send_signal(signal.SIGTERM)
    training.wait_for(1)
    output = training.stop()
    assert "node2 lost after step" in output
    assert "node2 answers again" in output
    assert "node2 joins" in output
    assert "node2 leaves (SIGTERM)" in output
    repeated = re.findall(r"continuing at step [\d,]+; (\d+) steps? to repeat", output)
    assert len(repeated) == 3, output
    assert repeated[1:] == ["0", "0"]  # the join's, and the leave's
    assert len([line for line in metrics(training.folder) if "hosts" in line]) == 3
    assert joined > 0
    training.assert_same_as_one_process(tmp_path)
    wait_until_empty(hosts.names(), 5)


@pytest.mark.parametrize(
    "config", [full("ddp_2x2gpu"), full("fsdp_2x4gpu"), full("zero2_4gpu"), full("zero3_2x4gpu")]
)
def test_the_first_host_is_lost_under_each_strategy(config, cluster, tmp_path):
    """Its cable is cut, while it writes to a folder that all hosts share; later it joins as another."""
    training = ElasticTraining(tmp_path, 2, 2, "--config_file", f"accelerate_configs/{config}.yaml")
    training.wait_for(4)
    hosts.cut("node1")
    training.wait_for(2)
    hosts.heal("node1")
    training.wait_for(4)
    output = training.stop()
    assert "node1 lost after step" in output
    assert "node1 joins" in output
    training.assert_same_as_one_process(tmp_path)
    wait_until_empty(hosts.names(), 5)


def test_a_process_that_fails_at_each_start_ends_the_job(cluster, tmp_path):
    """Before the first step nothing is tried again: it is a mistake, said once."""
    words = [sys.executable, "launch.py", "--mode", "multi-node", "--gpus-per-node", "1", "--min_hosts", "1"]
    words += ["--master-node", "node1", "--worker-nodes", "node2", "--log_dir", tmp_path / "logs"]
    words += ["train_hello.py", "--batch_size", "64", "--per_device_batch_size", "48"]
    status, output = Job(hosts.inside("node4", words, ROOT)).wait(120)
    assert status == 1
    assert "--batch_size 64 is no multiple of --per_device_batch_size 48" in output
    wait_until_empty(hosts.names(), 5)
