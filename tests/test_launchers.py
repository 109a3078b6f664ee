"""Every way to start a script that the README names, on this host; each ends with the same numbers."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pexpect
import pytest

from tests.conftest import BIN, CNN, ROOT, Job, deepspeed, free_port, metrics, python, result, run, torchrun

FLAGS = ["--data", "digits", "--batch_size", "64", "--max_steps", "4", "--log_every", "1"]
FLAGS += ["--mixed_precision", "no", "--trackers", "none"]
ZERO2 = ["--deepspeed_config", "ds_configs/zero2.json"]
LAUNCHERS = {  # name: (launcher, flags, strategy, processes)
    "python": (python(), [], "single", 1),
    "torchrun": (torchrun(2), [], "ddp", 2),
    "torchrun with c10d": (
        torchrun(2, "--nnodes=1", "--rdzv_backend=c10d", "--rdzv_endpoint=localhost:0", "--rdzv_id=7"),
        [],
        "ddp",
        2,
    ),
    "deepspeed --num_gpus": (deepspeed("--num_gpus", "2"), [], "ddp", 2),
    "deepspeed --num_gpus with ZeRO-2": (deepspeed("--num_gpus", "2"), ZERO2, "zero2", 2),
}


@pytest.fixture(scope="module")
def losses(tmp_path_factory, cache) -> list[float]:
    folder = tmp_path_factory.mktemp("reference") / "run"
    run([*python(), *CNN, *FLAGS, *cache, "--output_dir", folder])
    return train_losses(folder)


@pytest.mark.parametrize("name", LAUNCHERS)
def test_launcher(name, losses, tmp_path, cache):
    launcher, flags, strategy, processes = LAUNCHERS[name]
    run([*launcher, *CNN, *FLAGS, *flags, *cache, "--output_dir", tmp_path / "run"])
    check(tmp_path / "run", losses, strategy, processes)


def test_two_torchruns_with_static_rendezvous(losses, tmp_path, cache):
    """As on two hosts with one process each; the run folder is rank 0's alone."""
    port = free_port()
    jobs = []
    for node in (0, 1):
        address = ("--nnodes=2", f"--node_rank={node}", "--master_addr=127.0.0.1", f"--master_port={port}")
        words = [*torchrun(1, *address), *CNN, *FLAGS, *cache, "--output_dir", tmp_path / f"run{node}"]
        jobs.append(Job(words))
    for job in jobs:
        status, output = job.wait()
        assert status == 0, output
    check(tmp_path / "run0", losses, "ddp", 2)
    assert result(tmp_path / "run0")["hosts"] == 2
    assert not (tmp_path / "run1").exists()


def test_after_the_users_own_accelerate_config(losses, tmp_path, cache):
    """The questions of accelerate are answered at a terminal; then the plain command works."""
    home = {"HF_HOME": str(tmp_path / "hf"), "CUDA_VISIBLE_DEVICES": "", "TERM": "dumb"}
    answer_accelerate_config(home, processes=2)
    config = (tmp_path / "hf" / "accelerate" / "default_config.yaml").read_text()
    assert "num_processes: 2" in config
    assert "distributed_type: MULTI_GPU" in config
    run([BIN / "accelerate", "launch", *CNN, *FLAGS, *cache, "--output_dir", tmp_path / "run"], env=home)
    check(tmp_path / "run", losses, "ddp", 2)


def answer_accelerate_config(env: dict[str, str], processes: int) -> None:
    """Takes each question's default, but multi-GPU and the number of processes."""
    env = {**os.environ, **env}
    child = pexpect.spawn(str(BIN / "accelerate"), ["config"], env=env, encoding="utf-8", timeout=60)
    child.logfile_read = sys.stdout
    answers = {
        "Which type of machine": "\x1b[B" * 4 + "\r",  # four down: multi-GPU
        r"How many GPU.*\]: ?": f"{processes}\r",
        "In which compute environment|mixed precision": "\r",  # menus, at their first entry
        r"\]: ?": "\r",  # all others show their default
        pexpect.EOF: None,
    }
    while (answer := list(answers.values())[child.expect(list(answers))]) is not None:
        child.send(answer)
    child.close()
    assert child.exitstatus == 0


def test_deepspeed_hostfile_as_committed(ssh, losses, tmp_path, cache):
    """The deepspeed launcher asks each host for its name over ssh, this one too."""
    words = [*deepspeed("--hostfile", "hostfile"), *CNN, *FLAGS, *cache, "--output_dir", tmp_path / "run"]
    run(words, env=ssh)
    check(tmp_path / "run", losses, "ddp", 2)


def test_deepspeed_hostfile_without_ssh(losses, tmp_path, cache):
    launcher = deepspeed("--hostfile", "hostfile", "--no_ssh_check", "--master_addr", "127.0.0.1")
    run([*launcher, *CNN, *FLAGS, *ZERO2, *cache, "--output_dir", tmp_path / "run"])
    check(tmp_path / "run", losses, "zero2", 2)


@pytest.fixture
def ssh(tmp_path):
    """A real sshd on loopback, and a PATH on which `ssh localhost` goes to it. Yields the environment."""
    sshd = shutil.which("sshd", path="/usr/sbin:/usr/bin")
    if sshd is None or os.geteuid() != 0:
        pytest.skip("needs root and Debian's openssh-server")
    folder, port = tmp_path / "ssh", free_port()
    folder.mkdir(mode=0o700)
    for key in ("host", "user"):
        subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", folder / key], check=True)
    (folder / "known_hosts").write_text(f"[127.0.0.1]:{port} {(folder / 'host.pub').read_text()}")
    (folder / "sshd_config").write_text(
        f"ListenAddress 127.0.0.1:{port}\nHostKey {folder}/host\nAuthorizedKeysFile {folder}/user.pub\n"
        f"UsePAM no\nStrictModes no\nPidFile none\nPermitRootLogin prohibit-password\n"
    )
    (folder / "config").write_text(
        f"Host localhost\n  HostName 127.0.0.1\n  Port {port}\n  IdentityFile {folder}/user\n"
        f"  UserKnownHostsFile {folder}/known_hosts\n  StrictHostKeyChecking yes\n  BatchMode yes\n"
    )
    client = folder / "bin" / "ssh"
    client.parent.mkdir()
    client.write_text(f'#!/bin/sh\nexec {shutil.which("ssh")} -F {folder}/config "$@"\n')
    client.chmod(0o755)
    Path("/run/sshd").mkdir(exist_ok=True)
    server = subprocess.Popen([sshd, "-D", "-e", "-f", folder / "sshd_config"])
    try:
        yield {"PATH": os.pathsep.join([str(client.parent), str(BIN), os.environ["PATH"]])}
    finally:
        server.terminate()
        server.wait()


def check(folder, losses, strategy, processes):
    found = result(folder)
    assert (found["status"], found["strategy"], found["processes"]) == ("finished", strategy, processes)
    assert train_losses(folder) == pytest.approx(losses, abs=1e-5)
    assert json.loads((folder / "recipe.json").read_text())["recipe"]["data"] == "digits"


def train_losses(folder) -> list[float]:
    return [line["train/loss"] for line in metrics(folder) if "train/loss" in line]


def test_the_committed_hostfile_is_this_host():
    entries = [line for line in (ROOT / "hostfile").read_text().splitlines() if line and line[0] != "#"]
    assert entries == ["localhost slots=2"]
