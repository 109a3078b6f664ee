"""Tests that a job saves once on all ranks after a stop signal, reports the stop and can be resumed."""

import os
import re
import signal
import subprocess
import time

import psutil
import pytest

from onecurve.checkpoint.format import steps_in
from onecurve.system.processes import is_alive
from tests.checkpoint.test_checkpoints import LONG, start_and_wait
from tests.conftest import (
    CNN,
    ROOT,
    Job,
    accelerate,
    deepspeed,
    full,
    latest,
    metrics,
    python,
    read_until,
    result,
    run,
    torchrun,
    wait_until,
)
from tests.data.test_shards import VIT
from tests.distributed.test_agreement import ranks_of
from tests.support.data_sets import write_shards
from tests.support.forks import reset_signals

SLOW = [*LONG, "--epochs", "3000"]
LAUNCHERS = {
    "torchrun": torchrun(2),
    "accelerate": accelerate("ddp_2gpu"),
    "accelerate, one process": accelerate("single_gpu"),
    "deepspeed": deepspeed("--num_gpus", "2"),
}
AS_PROCESS_1 = ["unshare", "--pid", "--fork", "--mount-proc", "--kill-child"]
SINGLE_NODE = [*python(), "launch.py", "--mode", "single-node", "--gpus", "2"]


def assert_preempted(folder, output: str, job: Job, ranks: list[psutil.Process]) -> None:
    wait_until(lambda: not any(map(is_alive, ranks)), timeout_s=30)
    final = result(folder)
    assert final["status"] == "preempted", output
    assert latest(folder).name == f"step_{final['steps']:08d}"
    assert final["checkpoint"] == f"checkpoints/{latest(folder).name}"
    assert not (folder / "owner.json").exists()


@pytest.mark.real_processes
@pytest.mark.parametrize(
    ("launcher", "number", "target"),
    [
        full("torchrun", signal.SIGUSR1, "rank 1"),
        ("deepspeed", signal.SIGTERM, "the launcher"),
        full("accelerate, one process", signal.SIGTERM, "the launcher"),
        full("torchrun", signal.SIGTERM, "the launcher"),
        full("torchrun", signal.SIGUSR1, "the launcher"),
        full("accelerate", signal.SIGTERM, "the launcher"),
        full("accelerate", signal.SIGTERM, "rank 0"),
        full("accelerate", signal.SIGKILL, "the launcher"),
        full("deepspeed", signal.SIGKILL, "the launcher"),
        full("deepspeed", signal.SIGTERM, "rank 1"),
        full("accelerate, one process", signal.SIGKILL, "the launcher"),
        *(full(launcher, signal.SIGHUP, "the launcher") for launcher in LAUNCHERS),
    ],
)
def test_told_to_stop(launcher, number, target, tmp_path):
    zero = ["--deepspeed_config", "ds_configs/zero2.json"] if launcher == "deepspeed" else []
    words = [*LAUNCHERS[launcher], *SLOW, *zero]
    job = start_and_wait(words, tmp_path / "run")
    ranks = ranks_of(job, "train_hello.py", 1 if "one process" in launcher else 2)
    victim = psutil.Process(job.process.pid) if target == "the launcher" else ranks[int(target[-1])]
    victim.send_signal(number)
    if target == "the launcher":
        job.process.wait(60)  # Some launchers exit immediately, before the processes that they have started
        psutil.wait_procs(ranks, timeout=30)
    status, output = job.wait(60)
    assert_preempted(tmp_path / "run", output, job, ranks)
    if launcher == "torchrun" and target != "the launcher":
        assert status == 1
        assert output.count("exitcode  : 75") == 2, output
        assert output.count("preempted: the same command continues") == 1
        step = result(tmp_path / "run")["steps"]
        job = start_and_wait(words, tmp_path / "run", warm=True)
        job.process.send_signal(signal.SIGTERM)
        _, output = job.wait(60)
        assert f"continuing at step {step:,} with" in output, output


@pytest.mark.real_processes
@pytest.mark.needs("root")
@pytest.mark.parametrize("launcher", ["torchrun", full("accelerate"), full("launch.py")])
def test_the_launcher_is_process_1(launcher, tmp_path):
    """Simulate a container without an init process, as with `docker run IMAGE torchrun` and Kubernetes."""
    words = AS_PROCESS_1 + LAUNCHERS.get(launcher, [*SINGLE_NODE, "--log_dir", tmp_path / "logs"])
    job = start_and_wait([*words, *SLOW], tmp_path / "run")
    ranks = ranks_of(job, "train_hello.py")
    psutil.Process(job.process.pid).children()[0].send_signal(signal.SIGTERM)
    status, output = job.wait(60)
    assert_preempted(tmp_path / "run", output, job, ranks)
    assert status == (75 if launcher == "launch.py" else 1), output
    assert re.findall("^preempted: the same command continues", output, re.MULTILINE)[1:] == []


@pytest.mark.full
@pytest.mark.real_processes
@pytest.mark.needs("root")
@pytest.mark.parametrize("launcher", ["accelerate, one process", "deepspeed"])
def test_a_process_1_without_a_handler_is_reported(launcher, tmp_path):
    """Check the warning that the kernel does not deliver SIGTERM to PID 1 unless it has a handler."""
    words = [*AS_PROCESS_1, *LAUNCHERS[launcher], *LONG, "--max_steps", "2"]
    output = run([*words, "--output_dir", tmp_path / "run"])
    assert "warning: SIGTERM to this container" in output


def test_a_process_that_waits_for_data_ends_after_sigterm(tmp_path, cache):
    """Simulate an unreachable file server. A process that waits for data must end, but can't save."""
    shards = write_shards(tmp_path / "data")
    words = [*VIT, *cache, "--data", shards, "--epochs", "100000", "--timeout_s", "2"]
    job = start_and_wait(words, tmp_path / "run")
    for shard in shards.glob("*.tar"):
        os.mkfifo(tmp_path / "pipe")  # Opening this pipe blocks
        os.replace(tmp_path / "pipe", shard)
    steps = -1
    while steps != (steps := len(metrics(tmp_path / "run"))):
        time.sleep(1)
    job.process.send_signal(signal.SIGTERM)
    status, output = job.wait(60)
    assert status == 1
    assert "the process received SIGTERM, but the current step has not finished within 2 s" in output


def test_told_to_stop_while_data_is_prepared(cifar10, tmp_path):
    """Stop rank 1 while it waits for rank 0 to decode images. Both ranks must exit and leave no partial
    cache.
    """
    words = [*torchrun(2), *CNN, "--data", cifar10, "--cache_dir", tmp_path / "cache", "--trackers", "none"]
    words += ["--output_dir", tmp_path / "run"]
    job = Job(words)
    wait_until((tmp_path / "cache" / ".preparing").exists, job)
    ranks = ranks_of(job)
    ranks[1].send_signal(signal.SIGTERM)
    status, output = job.wait(60)
    assert status == 1
    assert output.count("exitcode  : 75") == 2, output
    assert result(tmp_path / "run")["status"] == "preempted"
    assert [path.name for path in (tmp_path / "cache").iterdir()] == [".lock"]


@pytest.mark.full
@pytest.mark.parametrize("flags", [[], ["--step_graph"]])
def test_an_interrupted_evaluation_is_repeated(flags, tmp_path, cache, stoppable):
    """Signal rank 0 in the last step of an epoch, so that all ranks agree during the evaluation one step
    later.
    """
    words = [*torchrun(2), *CNN, "--data", "digits", "--batch_size", "96", "--epochs", "2", *cache, *flags]
    words += ["--trackers", "none", "--output_dir", tmp_path / "run"]
    Job(words, cwd=stoppable, env={"STOP_AT": "14"}).wait()
    assert result(tmp_path / "run")["status"] == "preempted"
    assert [line["step"] for line in metrics(tmp_path / "run") if "val/loss" in line] == []
    status, output = Job(words, cwd=stoppable).wait()
    assert status == 0, output
    assert [line["step"] for line in metrics(tmp_path / "run") if "val/loss" in line] == [14, 28]


def test_a_shell_that_ends_does_not_end_its_background_job(stoppable, tmp_path):
    """Simulate the command `nohup python train_hello.py &` in a terminal that is then closed."""
    words = [*python(), *LONG, "--max_steps", "300", "--output_dir", tmp_path / "run"]
    start_command = 'nohup "$@" > "$0/log" 2>&1 & echo $!'
    wait_command = 'until ls "$0"/run/checkpoints/step_*; do sleep 0.1; done >&2'
    shell = ["sh", "-c", f"{start_command}; {wait_command}", tmp_path, *map(str, words)]
    env = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "STEP_S": "0.02"}
    pid = int(subprocess.check_output(shell, cwd=stoppable, env=env, timeout=240))
    os.kill(pid, signal.SIGHUP)
    assert not (tmp_path / "run" / "result.json").exists()  # Training continues, so there is no result yet
    wait_until((tmp_path / "run" / "result.json").exists)
    assert result(tmp_path / "run")["status"] == "finished"
    assert steps_in(tmp_path / "run" / "checkpoints")[0] == 300


def test_a_terminal_that_is_closed(tmp_path):
    """Check that the run saves after SIGHUP, although it can no longer print."""
    import pexpect

    words = [str(word) for word in [*SLOW, "--output_dir", tmp_path / "run"]]
    env = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "TERM": "xterm"}
    child = pexpect.spawn(python()[0], words, cwd=ROOT, env=env, preexec_fn=reset_signals)
    while not steps_in(tmp_path / "run" / "checkpoints"):
        assert child.expect([pexpect.TIMEOUT, pexpect.EOF], timeout=0.2) == 0, child.before
    os.close(child.fileno())
    process = psutil.Process(child.pid)
    wait_until(lambda: not is_alive(process), timeout_s=60)
    _, status = os.waitpid(child.pid, 0)
    assert os.waitstatus_to_exitcode(status) == 75
    final = result(tmp_path / "run")
    assert final["status"] == "preempted"
    assert latest(tmp_path / "run").name == f"step_{final['steps']:08d}"


@pytest.mark.full
@pytest.mark.real_processes
def test_ctrl_c_with_decoding_workers_prints_no_python_warning(tmp_path, cache):
    words = [*VIT, *cache, "--data", write_shards(tmp_path / "data"), "--epochs", "100000", "--workers", "2"]
    job = start_and_wait(words, tmp_path / "run")
    job.process.send_signal(signal.SIGINT)
    status, output = job.wait()
    assert (status, "semaphore" in output) == (130, False), output


def test_ctrl_c_reports_the_step_at_which_the_run_resumes(tmp_path):
    # Number of samples for 10,000 steps per epoch
    long_epochs = ["--data_size", "640000", "--checkpoint_every", "epoch"]
    words = [*SLOW, *long_epochs, "--output_dir", tmp_path / "early"]
    job = Job(words)
    read_until("step 60/", job)
    job.process.send_signal(signal.SIGINT)
    status, output = job.wait()
    assert status == 130
    assert output.splitlines()[-1] == "interrupted: run the same command to start from the beginning"
    assert result(tmp_path / "early")["error"] == "interrupted"
    words = [*SLOW, "--output_dir", tmp_path / "run"]
    job = Job(words)
    wait_until(lambda: steps_in(tmp_path / "run" / "checkpoints"), job)
    job.process.send_signal(signal.SIGINT)
    status, output = job.wait()
    step = max(steps_in(tmp_path / "run" / "checkpoints"))
    assert output.splitlines()[-1] == f"interrupted: run the same command to resume at step {step:,}"
    assert "Traceback" not in output
    job = Job(words)
    read_until(f"continuing at step {step:,} with", job)
    job.kill()
    assert job.wait()[0] == -signal.SIGKILL
