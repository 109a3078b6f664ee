"""Tests of parent and child processes: command lines, adopted orphans, and processes that end together."""

import os
import signal
import subprocess
import sys

import psutil
import pytest

from onecurve.system import processes
from onecurve.system.processes import (
    adopt_orphans,
    allowed_cores,
    interface_problem,
    kill,
    running_descendants,
)
from tests.conftest import ROOT, wait_until

SLEEP = [sys.executable, "-c", "import time; time.sleep(60)"]


def test_an_orphan_is_adopted_and_its_zombie_reaped():
    before = {process.pid for process in psutil.Process().children(recursive=True)}
    starter = f"import subprocess; print(subprocess.Popen({SLEEP!r}, stdout=subprocess.DEVNULL).pid)"
    adopt_orphans()
    try:
        orphan = int(subprocess.run([sys.executable, "-c", starter], stdout=subprocess.PIPE).stdout)
        assert [process.pid for process in running_descendants(before)] == [orphan]
        assert running_descendants({*before, orphan}) == []
        kill(running_descendants(before))
        wait_until(lambda: not running_descendants(before) and not psutil.pid_exists(orphan))
    finally:
        adopt_orphans(False)


def test_a_process_ends_with_its_parent():
    code = "from onecurve.system.processes import end_with_parent; end_with_parent(); print(1, flush=True)"
    code += "; import time; time.sleep(60)"
    parent = f"import subprocess, time; c = subprocess.Popen([{sys.executable!r}, '-c', {code!r}]);"
    parent += " print(c.pid, flush=True); time.sleep(60)"
    words = [sys.executable, "-c", parent]
    with subprocess.Popen(words, cwd=ROOT, stdout=subprocess.PIPE, text=True) as process:
        lines = {process.stdout.readline().strip(), process.stdout.readline().strip()}
        (pid,) = (int(line) for line in lines - {"1"})
        child = psutil.Process(pid)
        os.kill(process.pid, signal.SIGKILL)
        wait_until(lambda: not processes.is_alive(child), timeout_s=10)


@pytest.mark.parametrize(
    ("command", "launchers", "nodes"),
    [
        ("python3 /bin/torchrun --nnodes=1:4 x.py", ("torchrun", "torchrun"), "1:4"),
        ("python -m torch.distributed.run --nnodes 2 x.py", ("", "torch.distributed.run"), "2"),
        (
            "/bin/python -u -m deepspeed.launcher.launch --nnode_rank=0 --nnodes",
            ("", "deepspeed.launcher.launch"),
            "",
        ),
        ("python -m dbg --listen 5 /bin/accelerate-launch x.py -nnodes 3", ("", "accelerate-launch"), "3"),
        ("bash run.sh torchrun x.py", ("", ""), ""),
        ("", ("", ""), ""),
    ],
)
def test_the_launcher_and_flags_of_a_parent_process(command, launchers, nodes):
    parent = processes.Ancestor(psutil.Process(), command.split(" "))
    assert (parent.launcher_name(within=2), parent.launcher_name()) == launchers
    assert parent.flag_value("nnodes") == nodes


def test_the_launcher_above_and_its_config_file(tmp_path):
    """Check that a config file's path is relative to the launcher's folder and other programs are ignored."""
    code = (
        "from onecurve.system.processes import *; print(accelerate_config(), ancestors()[0].launcher_name())"
    )
    start = f"import subprocess; subprocess.run([{sys.executable!r}, '-c', {code!r}], cwd={str(ROOT)!r})"
    (tmp_path / "a b.yaml").write_text("use_cpu: true")
    for name, expected in (("accelerate", "{'use_cpu': True} accelerate"), ("other", "{}")):
        (tmp_path / name).write_text(start)
        words = [sys.executable, name, "--config_file", "a b.yaml", "x.py"]
        assert subprocess.check_output(words, cwd=tmp_path, text=True).strip() == expected


@pytest.mark.parametrize(
    ("groups", "files", "cores"),
    [
        ("0::/", {}, 96),
        # In a container, the root is the container's cgroup
        ("0::/", {"cpu.max": "700000 100000"}, 7),
        ("0::/", {"cpu.max": "max 100000"}, 96),
        ("0::/", {"cpu.max": "50000 100000"}, 1),
        ("0::/a.slice/b.scope", {"a.slice/cpu.max": "300000 100000", "a.slice/b.scope/cpu.max": "max 9"}, 3),
        ("1:cpu,cpuacct:/d", {"cpu/cpu.cfs_quota_us": "250000", "cpu/cpu.cfs_period_us": "100000"}, 2),
        ("1:cpu:/", {"cpu/cpu.cfs_quota_us": "-1", "cpu/cpu.cfs_period_us": "100000"}, 96),
    ],
)  # fmt: skip
def test_a_quota_of_the_processor_counts_as_fewer_cores(groups, files, cores, tmp_path, monkeypatch):
    """Simulate the cgroup files that the kernel shows on a 96-core machine."""
    monkeypatch.setattr("os.sched_getaffinity", lambda _: range(96))
    (tmp_path / "cgroup").write_text(f"{groups}\n")
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(f"{text}\n")
    assert allowed_cores(tmp_path / "cgroup", tmp_path) == cores


@pytest.mark.parametrize(
    ("variable", "value", "is_right"),
    [
        ("GLOO", "lo", True),
        ("GLOO", "", True),  # An empty value is treated like an unset variable
        ("GLOO", "lo,eth9", False),
        ("GLOO", "eth9", False),
        ("GLOO", "=lo", False),  # NCCL accepts this syntax, but gloo does not
        ("NCCL", "l", True),
        ("NCCL", "=lo", True),
        ("NCCL", "=l", False),
        ("NCCL", "eth9,l", True),
        ("NCCL", "eth9", False),
        ("NCCL", "^docker", True),
        ("NCCL", "^=lo", False),  # The only network interface is lo
        ("NCCL", "^l", False),
    ],
)
def test_a_variable_that_names_an_interface(variable, value, is_right, monkeypatch):
    monkeypatch.setattr(psutil, "net_if_addrs", lambda: {"lo": []})
    env = {f"{variable}_SOCKET_IFNAME": value}
    message = f"{variable}_SOCKET_IFNAME={value} matches no network interface on this host (lo)."
    message += " Set the variable to one of these interfaces, or unset the variable."
    assert interface_problem(env, uses_nccl=True) == (None if is_right else message)
    assert variable == "GLOO" or interface_problem(env, uses_nccl=False) is None
