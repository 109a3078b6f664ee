"""Tests of cluster/train.sbatch on a real Slurm cluster with a controller and four nodes on this machine."""

import os
import re
from pathlib import Path

import psutil
import pytest

from tests.conftest import (
    BIN,
    HALF_THE_CORES,
    ROOT,
    TRAINING,
    Job,
    assert_same_losses,
    free_port,
    insert_in_loop,
    metrics,
    needs,
    per_device,
    result,
    run,
    wait_until,
)

HELLO = ["train_hello.py", "--trackers", "none", "--mixed_precision", "no"]
DDP = "accelerate_configs/ddp_2x2gpu.yaml"
PATH = os.pathsep.join([str(BIN), os.environ["PATH"], "/usr/sbin", "/sbin"])

# Configuration of the Slurm cluster. A requeued job starts after its credential has expired. Slurm accepts
# lifetimes of 5 s or more, and the default is 120 s. Higher-tier jobs preempt lower-tier jobs.
# KillWait is the time between SIGTERM and SIGKILL.
SLURM_CONF = """
ClusterName=test
SlurmctldHost=node1(127.0.0.1)
SlurmctldPort={ports[0]}
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket,cred_expire=5
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd-%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/linear
JobAcctGatherType=jobacct_gather/none
SchedulerType=sched/builtin
SchedulerParameters=sched_interval=1,batch_sched_delay=0
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
KillWait=30
FirstJobId={ports[0]}
NodeName=node1 NodeAddr=127.0.0.1 Port={ports[1]} CPUs=1
NodeName=node2 NodeAddr=127.0.0.2 Port={ports[2]} CPUs=1
NodeName=node3 NodeAddr=127.0.0.3 Port={ports[3]} CPUs=1
NodeName=node4 NodeAddr=127.0.0.4 Port={ports[4]} CPUs=1
PartitionName=low Nodes=node[1-4] Default=YES PriorityTier=1
PartitionName=high Nodes=node[1-4] PriorityTier=2
"""

# Script that starts the cluster in separate namespaces, in which node names resolve. All of the script's
# processes end when its first process ends.
START = """
set -eu
cd "$1"
exec > log 2>&1
export SLURM_CONF=$1/slurm.conf
mount --bind hosts /etc/hosts
hostname node1
munged --foreground --force --key-file="$1/munge.key" --socket="$1/munge.socket" --pid-file="$1/munged.pid" \
    --seed-file="$1/munged.seed" &
until [ -S munge.socket ]; do sleep 0.1; done
slurmctld -D &
slurmd -D &
for name in node2 node3 node4; do
    unshare --uts sh -c 'hostname $0; exec slurmd -D' $name &
done
wait
"""
NAMESPACES = ["unshare", "--pid", "--fork", "--kill-child", "--mount-proc", "--mount", "--uts"]


class Slurm:
    """Slurm commands for a cluster, run in the project's folder as a user would type them."""

    def __init__(self, folder: Path):
        self.folder = folder
        self.env = {"SLURM_CONF": str(folder / "slurm.conf"), "PATH": PATH}

    def __call__(self, *words, cwd: Path = ROOT) -> str:
        return run(list(words), cwd=cwd, env=self.env)

    def train(self, log: Path, *words, nodes: int = 2, cwd: Path = ROOT) -> str:
        """Submit a job and return its job ID."""
        flags = ["--parsable", "--nodes", nodes, "--output", log]
        return self("sbatch", *flags, "cluster/train.sbatch", *words, cwd=cwd).strip()

    def job_info(self, job: str) -> dict[str, str]:
        return dict(re.findall(r"(\w+)=(\S*)", self("scontrol", "show", "job", job, "--oneliner")))

    def wait(self, job: str, log: Path, restarts: int = 0) -> dict[str, str]:
        """Wait until the job ends, and return its `scontrol` information. Fail if the job restarted too
        often.
        """
        unfinished = ("PENDING", "RUNNING", "COMPLETING", "CONFIGURING", "REQUEUED")
        wait_until(lambda: self.job_info(job)["JobState"] not in unfinished, timeout_s=240)
        info = self.job_info(job)
        assert int(info["Restarts"]) <= restarts, log.read_text()
        return info

    def wait_for_steps(self, folder: Path, count: int) -> None:
        """Wait until the log of the run in `folder` contains `count` more lines."""
        count += lines_of(folder)
        wait_until(lambda: lines_of(folder) >= count, timeout_s=120)

    def processes(self) -> list[psutil.Process]:
        """Return the processes of the cluster and its jobs."""
        processes = psutil.process_iter(["environ"])
        return [p for p in processes if (p.info["environ"] or {}).get("SLURM_CONF") == self.env["SLURM_CONF"]]


def lines_of(folder: Path) -> int:
    file = folder / "metrics.jsonl"
    return len(file.read_text().splitlines()) if file.exists() else 0


@pytest.fixture(scope="module")
def slurm(tmp_path_factory):
    needs("root", "slurmctld", "slurmd", "sbatch", "munged")
    folder = tmp_path_factory.mktemp("slurm")
    (folder / "state").mkdir()
    ports = [free_port() for _ in range(5)]
    (folder / "slurm.conf").write_text(SLURM_CONF.format(folder=folder, ports=ports))
    names = "".join(f"127.0.0.{k} node{k}\n" for k in (2, 3, 4))
    (folder / "hosts").write_text(f"127.0.0.1 node1 localhost\n{names}")
    (folder / "munge.key").write_bytes(os.urandom(128))
    (folder / "munge.key").chmod(0o600)
    cluster = Slurm(folder)
    # setpriv ends the cluster if the test is killed.
    words = ["setpriv", "--pdeathsig", "KILL", *NAMESPACES, "bash", "-c", START, "start", folder]
    daemons = Job(words, env=cluster.env)
    try:
        nodes = ["sinfo", "-h", "-N", "-p", "low", "-o", "%T"]
        wait_until(lambda: Job(nodes, env=cluster.env).wait()[1] == "idle\n" * 4, daemons)
        yield cluster
    finally:
        daemons.kill()
        daemons.process.wait()
        wait_until(lambda: not cluster.processes())


@pytest.mark.full
@pytest.mark.parametrize(("nodes", "slots"), [(2, 1), (2, 2), (4, 1), (4, 2)])
def test_nodes_train_as_one_process(nodes, slots, slurm, one_process, tmp_path, cache, monkeypatch):
    folder, log, size = tmp_path / "a run", tmp_path / "log", per_device(nodes * slots)
    monkeypatch.setenv("PROCESSES_PER_NODE", str(slots))
    words = [*TRAINING, size, *cache, "--output_dir", folder]
    job = slurm.train(log, DDP, *words, nodes=nodes)
    assert slurm.wait(job, log)["JobState"] == "COMPLETED", log.read_text()
    assert_trained(folder, nodes, slots)
    assert_same_losses(folder, one_process(size))


def assert_trained(folder: Path, nodes: int, slots: int) -> None:
    final = result(folder)
    assert (final["status"], final["strategy"]) == ("finished", "ddp")
    assert (final["hosts"], final["processes"]) == (nodes, nodes * slots)


@pytest.mark.full
def test_a_job_that_is_stopped_twice_trains_as_one_process(slurm, project_copy, tmp_path):
    """Stop a job with the time-limit signal and then by preemption. No step may be lost or repeated."""
    slow = "if __import__('os').environ.get('SLURM_RESTART_COUNT') != '2': __import__('time').sleep(0.8)"
    insert_in_loop(project_copy, "train_hello.py", slow)
    folder, log, alone = tmp_path / "a run", tmp_path / "log", tmp_path / "alone"
    words = [*HELLO, "--max_steps", "20", "--log_every", "1", "--per_device_batch_size", "32", "--output_dir"]
    job = slurm.train(log, DDP, *words, folder, "--checkpoint_every", "300", cwd=project_copy)

    slurm.wait_for_steps(folder, 3)
    slurm("scancel", "--batch", "--signal=USR1", job)
    wait_until(lambda: slurm.job_info(job)["Restarts"] == "1", timeout_s=120)
    slurm.wait_for_steps(folder, 3)
    flags = ["--parsable", "-p", "high", "-N", "4", "-o", tmp_path / "u"]
    urgent = slurm("sbatch", *flags, "--wrap", "true").strip()

    assert slurm.wait(urgent, tmp_path / "u")["JobState"] == "COMPLETED"
    info = slurm.wait(job, log, restarts=2)
    output = log.read_text()
    assert (info["JobState"], info["Restarts"]) == ("COMPLETED", "2"), output
    assert "DUE TO PREEMPTION" in output
    first, second = (int(step) for step in re.findall(r"continuing at step (\d+) with", output))
    assert 3 <= first < second < 20
    assert_trained(folder, nodes=2, slots=1)
    assert [line["step"] for line in metrics(folder) if "train/loss" in line] == list(range(1, 21))
    run([*words, alone], env=HALF_THE_CORES)
    assert_same_losses(folder, alone)


@pytest.mark.full
def test_a_cancelled_job_saves_and_is_not_requeued(slurm, tmp_path):
    """Cancel a one-process job, for which accelerate's launcher does not wait until the script ends."""
    folder, log = tmp_path / "run", tmp_path / "log"
    words = [*HELLO, "--epochs", "100000", "--log_every", "10", "--checkpoint_every", "1000000"]
    job = slurm.train(log, "accelerate_configs/single_gpu.yaml", *words, "--output_dir", folder, nodes=1)
    slurm.wait_for_steps(folder, 5)
    slurm("scancel", job)
    info = slurm.wait(job, log)
    assert (info["JobState"], info["Restarts"]) == ("CANCELLED", "0"), log.read_text()
    final = result(folder)
    assert final["status"] == "preempted"
    assert final["checkpoint"] == f"checkpoints/step_{final['steps']:08d}"


def test_a_failed_job_is_not_restarted(slurm, tmp_path):
    """Check that a failed job is not restarted, even if an earlier start was preempted."""
    folder, log = tmp_path / "run", tmp_path / "log"
    folder.mkdir()
    (folder / "result.json").write_text('{"status": "preempted"}')
    job = slurm.train(log, DDP, *HELLO, "--no_such_flag", "1", "--output_dir", folder)
    info = slurm.wait(job, log)
    assert (info["JobState"], info["Restarts"], info["ExitCode"]) == ("FAILED", "0", "1:0")
    assert "no_such_flag" in log.read_text()
    assert f"error: the run has not finished: {folder}/result.json says nothing, srun 1" in log.read_text()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([DDP], "usage: sbatch [flags] cluster/train.sbatch CONFIG SCRIPT --output_dir FOLDER [flags]"),
        (["nowhere.yaml", "train_hello.py", "--output_dir", "x"], f"nowhere.yaml: no such file in {ROOT}"),
        ([DDP, "nothing.py", "--output_dir", "x"], f"nothing.py: no such file in {ROOT}"),
        ([DDP, "train_hello.py", "--epochs", "3"], "--output_dir is missing"),
        ([DDP, "train_hello.py", "--output-dir=x"], "this script runs only in a Slurm job. Start it with"),
    ],
)
def test_missing_arguments_are_reported(words, message):
    status, output = Job(["bash", "cluster/train.sbatch", *words]).wait(60)
    assert status == 2
    assert f"error: {message}" in output
