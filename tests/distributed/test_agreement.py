"""Tests that ranks agree on shared settings, so that they neither diverge nor wait forever."""

import copy
import dataclasses
import os
import re
import signal
import time

import psutil
import pytest
import torch.distributed as dist

from onecurve.distributed import agreement
from onecurve.distributed.channel import Channel
from onecurve.flags.fields import flag_facts_of
from onecurve.flags.recipe import agreed_part, parse
from onecurve.models.script import load_script, recipe_class
from onecurve.system.processes import is_alive
from tests.conftest import CNN, ROOT, STRATEGIES, Job, free_port, mutate, torchrun, wait_until

FLAGS = ["--data", "synthetic", "--batch_size", "64", "--trackers", "none"]


def two_hosts(tmp_path, cache, words, projects=(None, None), flags=((), ()), envs=(None, None)):
    """Start two launches with one process each, as on two hosts, and return [(status, output), ...]."""
    port, jobs = free_port(), []
    for node in (0, 1):
        address = ("--nnodes=2", f"--node_rank={node}", "--master_addr=127.0.0.1", f"--master_port={port}")
        rest = [*cache, "--output_dir", tmp_path / f"run{node}", *flags[node]]
        jobs.append(Job([*torchrun(1, *address), *words, *rest], cwd=projects[node] or ROOT, env=envs[node]))
    return [job.wait() for job in jobs]


def assert_refused(jobs: list[tuple[int, str]], message: str) -> None:
    """Check that both launches failed and that only one rank reported the difference."""
    assert all(status != 0 for status, _ in jobs)
    output = jobs[0][1] + jobs[1][1]
    assert message in output
    assert "on rank 1 (host " in output
    assert output.count("error: ") == 1, output


def test_another_recipe_on_one_host(tmp_path, cache):
    other = ["--lr", "0.5", "--widths", "8,8,32", "--log_every", "7", "--profile", "3"]
    jobs = two_hosts(tmp_path, cache, [*CNN, *FLAGS], flags=([], other))
    assert_refused(jobs, "recipe is log_every=7, lr=0.5, profile=3, widths=[8, 8, 32]")
    assert not list(tmp_path.glob("run*"))


@pytest.mark.parametrize("script", sorted(path.stem for path in ROOT.glob("train_*.py")))
def test_a_difference_in_any_flag_is_reported_on_all_ranks(script, monkeypatch):
    """Check every flag, because a rank could wait forever if a difference in a flag were not reported."""
    recipe = parse(recipe_class(load_script(ROOT / f"{script}.py")), [])
    names = [field.name for field in dataclasses.fields(recipe)]
    unreported = [name for name in names if name not in disagreement(recipe, name, monkeypatch)]
    assert unreported == [name for name in names if flag_facts_of(type(recipe))[name].per_host]


def disagreement(recipe, name: str, monkeypatch) -> str:
    """Return the error that both ranks raise if one flag differs between the ranks, or an empty string."""
    other, gathered, errors = copy.copy(recipe), [], []
    object.__setattr__(other, name, "another value")
    # The first two calls gather each rank's settings. In the last two calls, each rank compares all settings.
    for rank_recipe in (recipe, other, recipe, other):
        monkeypatch.setattr(agreement, "gather_object", lambda part: gathered.extend(part) or gathered[:2])
        try:
            agreement.agree(None, {"recipe": agreed_part(rank_recipe)})
            errors.append("")
        except ValueError as error:
            errors.append(str(error))
    assert errors[2] == errors[3]
    return errors[2]


@pytest.mark.full
def test_another_strategy_on_one_host(tmp_path, cache):
    """Simulate a config file that was edited on only one host.

    Ranks that do not compare their settings would run different collectives and hang.
    """
    fsdp = {"ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "2"}
    fsdp |= {"FSDP_AUTO_WRAP_POLICY": "TRANSFORMER_BASED_WRAP"}
    jobs = two_hosts(tmp_path, cache, [*CNN, *FLAGS], envs=(None, fsdp))
    assert_refused(jobs, "the processes do not agree: strategy is fsdp")


def test_a_checkpoint_on_the_other_hosts_disk_is_refused(tmp_path, cache):
    """Simulate a rank 0 on a new host without checkpoints, where a fresh start would lose the progress."""
    (tmp_path / "a").mkdir()
    (tmp_path / "b" / "run" / "checkpoints" / "step_00000009").mkdir(parents=True)
    words, output_flags = [ROOT / CNN[0], *CNN[1:], *FLAGS], ["--output_dir", "run"]
    jobs = two_hosts(tmp_path, cache, words, (tmp_path / "a", tmp_path / "b"), (output_flags, output_flags))
    assert all(status != 0 for status, _ in jobs)
    assert "stores the run's checkpoint of step 9 in run, but " in jobs[0][1] + jobs[1][1]


def test_other_code_on_one_host(project_copy, tmp_path, cache):
    mutate(project_copy, "onecurve/data/decode.py", '"""Decoding', '"""Other decoding')
    jobs = two_hosts(tmp_path, cache, [*CNN, *FLAGS], projects=(None, project_copy))
    assert_refused(jobs, "error: the processes do not agree: script and onecurve/ is ")


def test_other_data_on_one_host(tmp_path, cache):
    """Train with the same flags on different images. A recipe contains only the image folder's name."""
    from tests.support.data_sets import class_folders

    projects = (tmp_path / "cwd0", tmp_path / "cwd1")
    for project, count in zip(projects, (16, 18), strict=True):
        project.mkdir()
        class_folders(project / "images", train=count, val=8)
    words = [ROOT / CNN[0], *CNN[1:], "--data", "images", "--batch_size", "8", "--trackers", "none"]
    jobs = two_hosts(tmp_path, cache, words, projects=projects)
    assert_refused(jobs, "error: the processes do not agree: data is ['images-")


def ranks_of(job: Job, script: str = "train_cnn_a.py", count: int = 2) -> list[psutil.Process]:
    """Wait until all ranks of a launch run the script, and return the ranks' processes sorted by rank."""
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        processes = {}
        for process in psutil.Process(job.process.pid).children(recursive=True):
            try:
                if script in process.cmdline()[:3]:
                    processes[int(process.environ().get("RANK", "0"))] = process
            except (psutil.Error, KeyError):
                continue
        if len(processes) == count:
            return [processes[rank] for rank in sorted(processes)]
        time.sleep(0.2)
    raise AssertionError(f"{len(processes)} ranks")


def start_long_training(tmp_path, cache, *flags, strategy: str = "ddp") -> Job:
    """Start a long training run, and return its job once two ranks are training."""
    words = [*STRATEGIES[strategy], *CNN, *FLAGS, *cache, "--epochs", "100000", "--log_every", "1", *flags]
    job, file = Job([*words, "--output_dir", tmp_path / "run"]), tmp_path / "run" / "metrics.jsonl"
    wait_until(lambda: file.exists() and file.stat().st_size, job, 90)
    return job


@pytest.mark.full
@pytest.mark.parametrize("strategy", ["ddp", "zero2"])
def test_a_silent_rank_ends_the_job(strategy, tmp_path, cache):
    job = start_long_training(tmp_path, cache, "--timeout_s", "5", strategy=strategy)
    ranks = ranks_of(job)
    ranks[1].send_signal(signal.SIGSTOP)
    wait_until(lambda: ranks[1].status() == psutil.STATUS_STOPPED)
    status, _ = job.wait(timeout_s=65)
    assert status != 0
    wait_until(lambda: not any(map(is_alive, ranks)), timeout_s=10)


ONCE = """
import sys, time
from onecurve.distributed.accelerator import start
from onecurve.distributed.process import run_process
from onecurve.distributed.agreement import once
from onecurve.flags.recipe import Recipe, parse

def alive(beat):  # takes twice as long as the limit
    for _ in range(30):
        time.sleep(0.2)
        beat()
    return "done"

def failing(beat):
    raise ValueError("no such images")

def main():
    accelerator, _ = start(parse(Recipe))
    print(f"answer {once(accelerator, 'data', alive, 3, per_host=True)}", flush=True)
    try:
        once(accelerator, "images", failing, 60, per_host=True)
    except ValueError as error:
        print(f"raised {error}", flush=True)
    once(accelerator, "rest", lambda _: time.sleep(30), 1, per_host=True)

if __name__ == "__main__":
    run_process(main)
"""


def test_ranks_wait_for_the_process_that_prepares_data(project_copy):
    """Check that ranks waiting for data receive the result or the error, or notice that rank 0 is silent."""
    (project_copy / "once.py").write_text(ONCE)
    status, output = Job([*torchrun(2), "once.py"], cwd=project_copy).wait()
    assert status != 0, output
    assert output.count("answer done") == 2, output
    assert output.count("raised no such images (on host ") == 2, output
    assert output.count("error: rank 0 sent no heartbeat for 1 s") == 1, output


def test_a_channel_answers_like_a_single_process_once_its_host_is_gone():
    host = dist.TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
    channel, peer = (Channel(dist.TCPStore("127.0.0.1", host.port)) for _ in range(2))
    assert (channel.read("a"), channel.store_if_unset("a", 1), channel.add_to_counter("n", 1)) == (None, 1, 1)
    assert channel.store_error is None
    assert (peer.read("a"), peer.store_if_unset("a", 2), peer.add_to_counter("n", 1)) == (1, 1, 2)
    del host
    assert (
        peer.add_to_counter("n", 1),
        peer.read("a"),
        peer.store_if_unset("a", 2),
        not peer.store_error,
    ) == (
        1,
        None,
        2,
        False,
    )


def test_sigint_to_one_rank_is_reported(tmp_path, cache):
    job = start_long_training(tmp_path, cache)
    ranks_of(job)[1].send_signal(signal.SIGINT)
    status, output = job.wait(timeout_s=60)
    assert status == 1, output
    message = r"^error: rank 1 \(host .*\) was interrupted by SIGINT, so no checkpoint was saved$"
    assert len(re.findall(message, output, re.MULTILINE)) == 1, output
    assert 'train_cnn_a.py", line' not in output, output  # Only the launcher prints a traceback


def test_ctrl_c_ends_everything(tmp_path, cache):
    job = start_long_training(tmp_path, cache)
    ranks = ranks_of(job)
    os.killpg(job.process.pid, signal.SIGINT)  # Ctrl-C in a terminal sends SIGINT to the whole process group
    status, output = job.wait(timeout_s=60)
    assert status != 0
    wait_until(lambda: not any(map(is_alive, ranks)), timeout_s=10)
    assert output.count("\ninterrupted: run the same command to ") == 1, output
    assert "train_cnn_a.py" not in output, output  # Only torchrun prints a traceback
