"""Tests of torchrun jobs whose hosts join and leave. Each torchrun agent on this machine is one host."""

import contextlib
import json
import os
import signal
import threading
from datetime import timedelta
from pathlib import Path

import psutil
import pytest
import torch.distributed as dist

from onecurve.distributed import rendezvous
from onecurve.distributed.accelerator import start
from onecurve.flags.recipe import Recipe, usable_processes
from onecurve.run.folder import count_restarts
from onecurve.system.files import write_json
from onecurve.system.processes import Ancestor
from tests.checkpoint.test_checkpoints import LONG
from tests.conftest import (
    SLOW_STEP,
    Job,
    free_port,
    full,
    insert_in_loop,
    lines,
    metrics,
    python,
    result,
    rows_of,
    run,
    torchrun,
    wait_until,
)
from tests.support.compare import assert_same_losses

ALONE = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1"}


@pytest.fixture
def agent(monkeypatch):
    """Return a function that sets the environment that torchrun would set for a process."""

    def set_to(**variables: str) -> None:
        for name, value in ({"TORCHELASTIC_RUN_ID": "1"} | ALONE | variables).items():
            monkeypatch.setenv(name, value)

    monkeypatch.delenv("PET_NNODES", raising=False)
    return set_to


@pytest.mark.parametrize(("variables", "hosts", "processes"), rows_of("most hosts"))
def test_most_hosts(variables, hosts, processes, agent):
    agent(**variables)
    assert (rendezvous.max_host_count(), rendezvous.max_process_count()) == (hosts, processes)


@pytest.mark.parametrize(("flags", "hosts"), rows_of("most hosts of torchrun"))
def test_most_hosts_of_torchruns_command_line(flags, hosts, agent, monkeypatch):
    agent()
    monkeypatch.setattr(rendezvous, "ancestors", lambda: [Ancestor(None, ["python", "torchrun", *flags])])
    assert rendezvous.max_host_count() == hosts


def test_the_micro_batch_does_not_depend_on_the_number_of_hosts(agent):
    job = Recipe(batch_size=96)
    for hosts in (1, 2, 4):
        agent(PET_NNODES="1:4", WORLD_SIZE=str(2 * hosts), LOCAL_WORLD_SIZE="2")
        batch = rendezvous.elastic_batch(job)
        assert (batch.per_device, batch.accumulations) == (12, 4 // hosts)
    agent(PET_NNODES="1:5", WORLD_SIZE="4", LOCAL_WORLD_SIZE="1")  # A batch of 96 is not divisible by 5
    assert rendezvous.elastic_batch(job).per_device == 24


def test_launch_py_receives_the_trained_micro_batch(agent, monkeypatch):
    """Check that all rounds use the micro-batch size of two hosts. Three hosts can't share the batch."""
    reported = []
    monkeypatch.setattr(
        rendezvous, "report_to_launcher", lambda _, **facts: reported.append(facts["per_device"])
    )
    for processes in ("3", "2"):
        agent(LAUNCH_MOST_HOSTS="3", WORLD_SIZE=processes, LOCAL_WORLD_SIZE="1")
        with contextlib.suppress(ValueError):
            rendezvous.elastic_batch(Recipe(batch_size=256))
    assert reported == [1, 128]


def test_a_number_of_hosts_that_does_not_divide_the_batch_waits_then_fails(agent, capsys, monkeypatch):
    slept = []
    monkeypatch.setattr(rendezvous.time, "sleep", slept.append)
    job = Recipe(batch_size=64, timeout_s=7)
    agent(PET_NNODES="1:4", WORLD_SIZE="6", LOCAL_WORLD_SIZE="2")
    with pytest.raises(ValueError, match=r"--batch_size.*hosts that can train: 1 or 2 or 4"):
        rendezvous.elastic_batch(job)
    assert slept == [7]
    message = "the batch does not divide among 3 hosts. Waiting up to 7 s for a different number of hosts"
    message += " (1 or 2 or 4)\n"
    assert capsys.readouterr().out == message
    agent(PET_NNODES="3", WORLD_SIZE="6")
    with pytest.raises(ValueError, match="--batch_size"):
        rendezvous.elastic_batch(job)
    assert slept == [7]
    assert usable_processes(96, 16, 12, 2) == [2, 6]


def test_each_process_checks_the_promised_number_of_processes(monkeypatch):
    """Check WORLD_SIZE in each process, because a launcher may start the processes as separate jobs."""
    monkeypatch.setenv("LAUNCH_PROCESSES", "2")
    with pytest.raises(ValueError, match=r"^launch.py started 2 processes for this job, but WORLD_SIZE is"):
        start(Recipe())


@pytest.mark.parametrize(
    ("variables", "is_reported"),
    [
        ({"WORLD_SIZE": "2", "TORCHELASTIC_USE_AGENT_STORE": "True"}, True),
        ({"WORLD_SIZE": "2", "TORCHELASTIC_USE_AGENT_STORE": "False"}, False),
        ({"TORCHELASTIC_USE_AGENT_STORE": "True"}, False),  # Environment of a single-host job
        # The launchers accelerate and deepspeed use a static rendezvous.
        ({"WORLD_SIZE": "2", "TORCHELASTIC_USE_AGENT_STORE": "True", "TORCHELASTIC_RUN_ID": "none"}, False),
    ],
)
def test_a_shared_store_is_reported_if_hosts_can_join(variables, is_reported, agent):
    agent(**variables)
    assert ("TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1" in str(rendezvous.replacement_problem())) == is_reported


def test_each_attempt_gets_a_new_name_in_a_used_store():
    store = dist.TCPStore("127.0.0.1", 0, None, True, timedelta(seconds=10), wait_for_workers=False)

    def attempt() -> list[str]:
        names: list[str] = [""] * 3

        def learn(rank: int) -> None:
            client = dist.TCPStore("127.0.0.1", store.port, None, False, timedelta(seconds=10))
            names[rank] = rendezvous._receive_attempt_name(client, rank, 10)

        threads = [threading.Thread(target=learn, args=(rank,)) for rank in (1, 2)]
        threads[0].start()  # This rank starts before rank 0 and reads the old attempt's name
        threads[0].join(0.3)
        threads[1].start()
        names[0] = rendezvous._publish_attempt_name(store, 3)
        for thread in threads:
            thread.join()
        return names

    first, second = attempt(), attempt()
    assert len(set(first)) == len(set(second)) == 1
    assert first != second


def test_restarts_without_progress_are_counted_in_the_run_folder(tmp_path, monkeypatch):
    """Check that restarts are counted in the run folder, not by torchrun's agents.

    A start does not count if the previous run was preempted or if a different agent starts the process.
    """
    monkeypatch.setenv("TORCHELASTIC_MAX_RESTARTS", "1000")
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "7")
    for _ in range(4):
        count_restarts(tmp_path, 10)
    with pytest.raises(ValueError, match="3 times without a new checkpoint since step 10"):
        count_restarts(tmp_path, 10)
    for _ in range(4):
        count_restarts(tmp_path, 20)
    write_json(tmp_path / "result.json", {"status": "preempted"})
    count_restarts(tmp_path, 20)
    (tmp_path / "result.json").unlink()
    # Simulate a different agent, even if the parent's ID is 1. This process's ID always differs from its
    # parent's ID.
    monkeypatch.setattr(os, "getppid", os.getpid)
    for _ in range(4):
        count_restarts(tmp_path, 20)


def elastic_agent(port: int) -> list:
    """Return a torchrun command that starts one process on one of up to two hosts."""
    conf = "--rdzv_conf=last_call_timeout=1,keep_alive_interval=1"
    flags = ["--rdzv_backend=c10d", f"--rdzv_endpoint=localhost:{port}", "--rdzv_id=1", conf]
    return torchrun(1, "--nnodes=1:2", "--max_restarts=1000", *flags)


def wait_for_steps(folder: Path, steps: int, hosts: int, job: Job) -> None:
    """Wait until this number of hosts has trained this number of additional steps."""
    steps_seen: list[int] = []

    def have_trained() -> bool:
        with contextlib.suppress(OSError, ValueError, IndexError):
            if len(json.loads((folder / "recipe.json").read_text())["devices"]) == hosts:
                steps_seen.append(metrics(folder)[-1]["step"])
            else:
                steps_seen.clear()
        return bool(steps_seen) and steps_seen[-1] >= steps_seen[0] + steps

    wait_until(have_trained, job, 240)


@pytest.mark.parametrize("numbers", [(signal.SIGKILL,), full((signal.SIGKILL, signal.SIGTERM))], ids=len)
def test_hosts_join_are_lost_and_are_replaced(numbers, tmp_path, project_copy):
    """Train while a second host joins and is killed, and a third host joins and receives a stop signal.

    Each sample is trained once, in the order of the uninterrupted run. Losses differ only by rounding errors.
    """
    insert_in_loop(project_copy, "train_hello.py", SLOW_STEP)
    train = [*LONG, "--epochs", "100", "--log_samples"]  # Longer than any host takes to join
    env = {"STEP_S": "0.02", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1", "PET_NNODES": "1:2"}
    words = [*elastic_agent(free_port()), *train, "--model_folder", tmp_path]
    folder = tmp_path / "train_hello" / "ddp_64_100_2_1"
    hosts = [Job(words, cwd=project_copy, env=env)]
    wait_for_steps(folder, 30, 1, hosts[0])
    for number in numbers:
        hosts.append(Job(words, cwd=project_copy, env=env))
        wait_for_steps(folder, 30, 2, hosts[0])
        lost = [psutil.Process(hosts[-1].process.pid)]
        lost += lost[0].children() if number == signal.SIGKILL else []
        for process in reversed(lost):
            process.send_signal(number)
        wait_for_steps(folder, 30, 1, hosts[0])
    hosts[0].process.send_signal(signal.SIGTERM)
    hosts[0].wait()
    final, straight = result(folder), tmp_path / "straight"
    assert (final["status"], final["hosts"]) == ("preempted", 1)
    reference_words = [*python(), *train, "--per_device_batch_size", "32", "--output_dir", straight]
    run([*reference_words, "--max_steps", final["steps"]])
    assert lines(folder / "samples.jsonl") == lines(straight / "samples.jsonl")
    log = [line for line in metrics(folder) if line["step"] < final["steps"]]
    assert_same_losses(log, [line for line in metrics(straight) if line["step"] < final["steps"]])
    assert len(log) > 5
