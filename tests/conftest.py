"""Shared helpers and fixtures that start real scripts, read their results and set up their environment."""

import contextlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
import yaml
from safetensors.torch import load_file
from torch import Tensor

from tests.support import forks, packages
from tests.support.forks import reset_signals

# Containers often set PYTHONDONTWRITEBYTECODE, which makes each process compile all imported modules. The
# compilation would take a quarter of the tests' total time.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False

ROOT = Path(__file__).parents[1]
BIN = Path(sys.executable).parent

# Flags for small networks, so that a launch takes little longer than importing torch
CNN = ["train_cnn_a.py", "--widths", "4,8,32"]
RESNET = ["train_cnn_b.py", "--width", "8"]
VIT = ["train_vit.py", "--model", "test_vit", "--image_size", "32", "--patch_size", "8"]
# The default recipe enables drop path, mixup, cutmix, label smoothing, the EMA, parameter groups per layer
# and a test split.
VIT_WITH_ALL = [*VIT, "--data", "digits", "--dropout", "0.1", "--clip_norm", "0.1"]
VIT_WITH_ALL += ["--layer_decay", "0.8", "--holdout", "0.2"]


def reserve_cores() -> None:
    """Reserve cores for each pytest-xdist worker and its child processes.

    If there are more workers than cores, all workers share the cores and use one OpenMP thread each. Two
    OpenMP threads that compete for one core take many times as long as a single thread.
    """
    if "PYTEST_XDIST_WORKER" in os.environ:
        worker = int(os.environ["PYTEST_XDIST_WORKER"].removeprefix("gw"))
        workers, cores = int(os.environ["PYTEST_XDIST_WORKER_COUNT"]), sorted(os.sched_getaffinity(0))
        if workers > len(cores):
            os.environ["OMP_NUM_THREADS"] = "1"
            torch.set_num_threads(1)
            return
        os.sched_setaffinity(0, cores[worker::workers])
        torch.set_num_threads(len(os.sched_getaffinity(0)))  # torch counted the cores when it was imported


reserve_cores()

# Each pytest-xdist worker uses a separate set of virtual hosts.
os.environ["VIRTUAL_CLUSTER"] = "test-" + os.environ.get("PYTEST_XDIST_WORKER", "alone")

# The slowest tests run first, so that all pytest-xdist workers finish at about the same time.
FIRST = ("tests/scripts/test_launch.py", "tests/scripts/test_launchers.py", "tests/distributed/")
FIRST += ("tests/checkpoint/", "tests/test_gpu_suite.py", "tests/scripts/", "tests/cluster/")

# Number of OpenMP threads per process in two-process runs. A different number of threads changes the
# summation order, which occasionally moves an activation across ReLU's threshold. In a small ResNet, a single
# such activation changes a gradient by 0.5%.
HALF_THE_CORES = {"OMP_NUM_THREADS": str(max(1, len(os.sched_getaffinity(0)) // 2))}


def pytest_configure() -> None:
    """Make hypothesis generate the same examples in every run and store none of them."""
    from hypothesis import settings

    settings.register_profile("tests", derandomize=True, database=None, deadline=None)
    settings.load_profile("tests")


def pytest_xdist_make_scheduler(config: pytest.Config, log):
    """Run all tests in a file on the same pytest-xdist worker."""
    from xdist.scheduler import LoadFileScheduling

    return LoadFileScheduling(config, log)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=lambda item: [not item.nodeid.startswith(first) for first in FIRST])


def needs(*names: str) -> None:
    """Skip the test if the machine lacks one of these requirements, or fail the test in CI.

    A requirement is a program's name, "root" or "TEST_DATA_DIR". Fixtures call this function, and tests
    use the mark with the same name.
    """
    if missing := packages.missing(names):
        refuse = pytest.fail if os.environ.get("CI") == "true" else pytest.skip
        refuse(NEEDS + ", ".join(missing))


NEEDS = "needs "  # Prefix of the reason for skipping a test whose requirements are missing


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_sessionfinish(session: pytest.Session):
    """Report the number of skipped tests for each missing package at the end of the session."""
    yield
    reporter = session.config.pluginmanager.get_plugin("terminalreporter")
    # pytest-xdist workers have no reporter
    skipped = reporter.stats.get("skipped", []) if reporter else []
    reasons = [report.longrepr[2].removeprefix("Skipped: ") for report in skipped]
    missing = [name for r in reasons if r.startswith(NEEDS) for name in r.removeprefix(NEEDS).split(", ")]
    if counts := [f"{name} ({missing.count(name)})" for name in sorted(set(missing))]:
        total = ", ".join(counts)
        reporter.write_line(f"Skipped tests, by what is missing: {total}. To install packages: make packages")


def pytest_runtest_setup(item: pytest.Item) -> None:
    needs(*(name for mark in item.iter_markers("needs") for name in mark.args))
    Job.warm = item.get_closest_marker("real_processes") is None


def rows_of(table: str) -> Any:
    """Return the test inputs and expected results from a table in rows.yaml."""
    return yaml.safe_load((ROOT / "tests" / "rows.yaml").read_text())[table]


def full(*values):
    """Return a parameter row that runs only in `make test-all`."""
    return pytest.param(*values, marks=pytest.mark.full)


def python() -> list[str]:
    return [sys.executable]


def accelerate(config: str, *flags: str) -> list[str]:
    """Return a command that runs `accelerate launch` as a module.

    The installed `accelerate` command imports timm and transformers first, which takes 4 s per launch.
    """
    file = f"accelerate_configs/{config}.yaml"
    return [sys.executable, "-m", "accelerate.commands.launch", "--config_file", file, *flags]


def torchrun(processes: int, *flags: str) -> list[str]:
    return [str(BIN / "torchrun"), f"--nproc_per_node={processes}", *(flags or ("--standalone",))]


def deepspeed(*flags: str) -> list:
    """Return a DeepSpeed command whose port is selected when the job starts.

    If the port were selected earlier, another process might bind the port before the job starts.
    """
    return [str(BIN / "deepspeed"), "--master_port", free_port, *flags]


STRATEGIES = {  # Launch command for each strategy. All launchers except `single` start two processes.
    "single": python(),
    "ddp": accelerate("ddp_2gpu"),
    "fsdp": accelerate("fsdp_2gpu"),
    "zero1": accelerate("zero1_4gpu", "--num_processes", "2"),
    "zero2": accelerate("zero2_2gpu"),
    "zero3": accelerate("zero3_4gpu", "--num_processes", "2"),
}


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


class Job:
    """Command that runs in a separate session, so that none of its processes outlives the test.

    The current Python interpreter runs scripts. A word of the command may be a function that returns the
    word. Python processes, including a launcher's ranks, are forked from a process that has already imported
    torch (support/forks.py), except with `warm=False` and in tests marked `real_processes`.
    """

    warm = True  # Value that pytest_runtest_setup sets for each test

    def __init__(self, words: list, cwd: Path = ROOT, env: dict | None = None, warm: bool | None = None):
        # Tests must not use the W&B account of the person who runs the tests.
        base_env = {name: value for name, value in os.environ.items() if not name.startswith("WANDB_")}
        base_env |= {"PATH": f"{BIN}{os.pathsep}{os.environ['PATH']}", "CUDA_VISIBLE_DEVICES": ""}
        base_env |= {"NETRC": "/nonexistent", "WANDB_CONFIG_DIR": "/nonexistent"}
        words = [word() if callable(word) else word for word in words]
        popen = forks.Popen if (self.warm if warm is None else warm) else subprocess.Popen
        self.process = popen(
            [*(python() if str(words[0]).endswith(".py") else ()), *map(str, words)],
            cwd=cwd,
            env=base_env | (env or {}),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
            preexec_fn=reset_signals,
        )

    def wait(self, timeout_s: float = 240) -> tuple[int, str]:
        """Return the job's exit status and output, or fail the test after the timeout.

        The job's remaining processes are killed before this function returns.
        """
        try:
            output, _ = self.process.communicate(timeout=timeout_s)
        except subprocess.TimeoutExpired:
            self.kill()
            output, _ = self.process.communicate(timeout=60)  # torchrun's ranks run in separate sessions
            pytest.fail(f"no end within {timeout_s} s:\n{output}")
        finally:
            self.kill()
        return self.process.returncode, output

    def kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)


def wait_until(condition: Callable[[], object], job: Job | None = None, timeout_s: float = 60) -> None:
    """Wait until the condition is true, but fail the test after the timeout or if the job ends first."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert job is None or job.process.poll() is None, job.wait()[1]
        assert time.monotonic() < deadline, f"not within {timeout_s} s"
        time.sleep(0.02)


def read_until(words: str, job: Job) -> None:
    """Read the job's output until a line contains `words`."""
    while words not in (line := job.process.stdout.readline()):
        assert line, job.wait()


def run(words: list, **options) -> str:
    """Run a command, check that it succeeds, and return its output."""
    status, output = Job(words, **options).wait()
    assert status == 0, output
    return output


def metrics(folder: Path) -> list[dict]:
    """Return the lines of metrics.jsonl that contain measurements, without interruptions and host changes."""
    log = lines(folder / "metrics.jsonl")
    return [line for line in log if any(name.startswith(("train/", "val/", "test/")) for name in line)]


def lines(file: Path) -> list[dict]:
    return [json.loads(line) for line in file.read_text().splitlines()]


def result(folder: Path) -> dict:
    return json.loads((folder / "result.json").read_text())


@pytest.fixture(scope="session")
def cache(tmp_path_factory) -> list:
    """Return the flag that makes all launches share a cache of decoded images."""
    return ["--cache_dir", tmp_path_factory.mktemp("cache")]


@pytest.fixture(scope="session")
def cifar10() -> Path:
    return real_data() / "cifar10"


@pytest.fixture(scope="session")
def photographs() -> Path:
    return real_data() / "imagenet_sample"


@pytest.fixture(scope="session")
def ilsvrc(tmp_path_factory):
    from tests.support.imagenet import make_ilsvrc

    return make_ilsvrc(tmp_path_factory.mktemp("ilsvrc"))


def real_data() -> Path:
    needs("TEST_DATA_DIR")
    return Path(os.environ["TEST_DATA_DIR"])


@contextlib.contextmanager
def small_disk(folder: Path, size: str) -> Iterator[Path]:
    """Mount an in-memory file system of this size at the folder."""
    needs("root")
    folder.mkdir(exist_ok=True)
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", folder], check=True)
    try:
        yield folder
    finally:
        # --lazy is needed because a thread may still be writing
        subprocess.run(["umount", "--lazy", folder], check=True)


@pytest.fixture
def ssh(tmp_path):
    """Start a real sshd on the loopback interface, and yield an environment in which `ssh localhost` reaches
    it.
    """
    needs("root", "ssh", "ssh-keygen", "sshd")
    sshd = shutil.which("sshd", path="/usr/sbin:/usr/bin")
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
        while subprocess.run([client, "localhost", "true"], capture_output=True).returncode != 0:
            assert server.poll() is None
            time.sleep(0.1)
        yield {"PATH": os.pathsep.join([str(client.parent), str(BIN), os.environ["PATH"]])}
    finally:
        server.terminate()
        server.wait()


# Training run that all multi-host tests compare with a one-process run. Each step trains on 96
# images in micro-batches of 24, or of 12 with 8 processes.
TRAINING = [*VIT, "--data", "digits", "--batch_size", "96", "--log_every", "1", "--max_steps", "20"]
TRAINING += ["--mixed_precision", "no", "--trackers", "none", "--per_device_batch_size"]


def per_device(processes: int) -> str:
    return str(next(size for size in (24, 12, 32) if 96 % (size * processes) == 0))


@pytest.fixture(scope="session")
def one_process(tmp_path_factory, cache):
    """Return a function that maps a micro-batch size to the folder of a one-process run."""
    folders = {}

    def folder_of(size: str) -> Path:
        if size not in folders:
            folders[size] = tmp_path_factory.mktemp("alone") / "run"
            words = [sys.executable, *TRAINING, size, *cache, "--output_dir", folders[size]]
            run(words, env=HALF_THE_CORES)
        return folders[size]

    return folder_of


def assert_same_losses(folder: Path, reference: Path) -> None:
    losses, expected = ([line.get("train/loss") for line in metrics(f)] for f in (folder, reference))
    assert len(losses) > 20
    assert losses == pytest.approx(expected, abs=1e-5)


@pytest.fixture(scope="session")
def cluster_tools():
    """Remove leftover virtual hosts and return the module cluster/virtual_hosts.py.

    The test is skipped if this machine can't create virtual hosts.
    """
    from cluster import virtual_hosts

    needs("root", "ssh", "ps", *virtual_hosts.NEEDS)
    virtual_hosts.down()
    return virtual_hosts


@pytest.fixture(scope="module")
def cluster(cluster_tools):
    """Start four hosts, each with a separate copy of the project and its packages."""
    cluster_tools.up(4, private=[ROOT, Path(psutil.__file__).parent.parent])
    yield cluster_tools
    cluster_tools.down()
    assert not cluster_tools.STATE.exists()
    namespaces = subprocess.run(["ip", "netns"], capture_output=True, text=True).stdout
    assert f"{cluster_tools.CLUSTER}-" not in namespaces


@pytest.fixture
def project_copy(tmp_path) -> Path:
    """Copy the project's code to a folder in which a test may break the code."""
    return copy_project(tmp_path / "project")


@pytest.fixture(scope="session")
def stoppable(tmp_path_factory) -> Path:
    """Copy the project with train scripts that stop or slow down on demand.

    With STOP_AT=N, the script sends itself SIGTERM at step N. With several processes, rank 0 sends the signal
    one step earlier, because all ranks agree on stopping one step later. With STEP_S=SECONDS, each step takes
    that much longer until torchrun restarts the script.
    """
    project = copy_project(tmp_path_factory.mktemp("stoppable") / "project")
    code = (
        "at = int(__import__('os').environ.get('STOP_AT', -1))",
        "if accelerator.is_main_process and step == at - (accelerator.num_processes > 1):",
        "    __import__('signal').raise_signal(15)",
        "if __import__('os').environ.get('TORCHELASTIC_RESTART_COUNT', '0') == '0':",
        f"    {SLOW_STEP}",
    )
    for script in sorted(path.name for path in project.glob("train_*.py")):
        insert_in_loop(project, script, *code)
    return project


SLOW_STEP = "__import__('time').sleep(float(__import__('os').environ.get('STEP_S', 0)))"


def insert_in_loop(project: Path, script: str, *code: str) -> None:
    """Insert lines of code before the end of each step in a script's training loop."""
    call = "            run.checkpoint(step)\n"
    mutate(project, script, call, "".join(f"            {line}\n" for line in code) + call)


def copy_project(copy: Path) -> Path:
    copy.mkdir()
    for name in ("onecurve", "tools", "accelerate_configs", "ds_configs", "recipes", "cluster"):
        shutil.copytree(ROOT / name, copy / name, ignore=shutil.ignore_patterns("*.pyc.*"))
    for name in ("*.py", "*.toml", "*.yaml", "Makefile", "requirements.txt", "constraints.txt", "hostfile"):
        for file in ROOT.glob(name):
            shutil.copy2(file, copy)  # copy2 preserves the modification times that make compares
    return copy


def link_environment(project: Path) -> None:
    """Link this Python's environment as the project's .venv, so that `make setup` has nothing to install."""
    (project / ".venv").mkdir()
    for path in Path(sys.prefix).iterdir():
        (project / ".venv" / path.name).symlink_to(path)
    (project / ".venv" / "installed").unlink(missing_ok=True)
    (project / ".venv" / "installed").touch()


def mutate(project: Path, file: str, old: str, new: str) -> None:
    """Replace a piece of code that must occur exactly once in the file."""
    text = (project / file).read_text()
    assert text.count(old) == 1, f"{file} has {text.count(old)} x {old!r}"
    (project / file).write_text(text.replace(old, new))


def tensors(checkpoint: Path) -> dict[str, Tensor]:
    """Return the tensors in all files of a checkpoint, with keys of the form `<file>:<name>`."""
    files = sorted(checkpoint.glob("*.safetensors"))
    return {f"{file.stem}:{name}": tensor for file in files for name, tensor in load_file(file).items()}


def latest(folder: Path) -> Path:
    """Return the folder of a run's newest checkpoint."""
    return sorted((folder / "checkpoints").glob("step_*"))[-1]
