"""Real launches of the real scripts: how a test starts one and reads what came out."""

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

# Containers often say so; then each process compiles all that it imports, a quarter of what the tests take.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False

ROOT = Path(__file__).parents[1]
BIN = Path(sys.executable).parent

# Small networks, so that a launch costs little more than the import of torch.
CNN = ["train_cnn_a.py", "--widths", "4,8,32"]
RESNET = ["train_cnn_b.py", "--width", "8"]
VIT = ["train_vit.py", "--model", "test_vit", "--image_size", "32", "--patch_size", "8"]
# Drop path, mixup, cutmix, label smoothing and EMA; a parameter group for each layer; a test split
VIT_WITH_ALL = [*VIT, "--data", "digits", "--dropout", "0.1", "--clip_norm", "0.1"]
VIT_WITH_ALL += ["--layer_decay", "0.8", "--holdout", "0.2"]


def keep_to_own_cores() -> None:
    """Gives each pytest process of `-n`, and all that it starts, cores of its own; without enough of them all
    share them, with one OpenMP thread each.

    Two OpenMP threads that share a core with others take many times as long as one.
    """
    if "PYTEST_XDIST_WORKER" in os.environ:
        number = int(os.environ["PYTEST_XDIST_WORKER"].removeprefix("gw"))
        count, cores = int(os.environ["PYTEST_XDIST_WORKER_COUNT"]), sorted(os.sched_getaffinity(0))
        if count > len(cores):
            os.environ["OMP_NUM_THREADS"] = "1"
            torch.set_num_threads(1)
            return
        os.sched_setaffinity(0, cores[number::count])
        torch.set_num_threads(len(os.sched_getaffinity(0)))  # it has counted the cores when it was imported


keep_to_own_cores()

# Each process of `-n` has virtual hosts of its own.
os.environ["VIRTUAL_CLUSTER"] = "test-" + os.environ.get("PYTEST_XDIST_WORKER", "alone")

# Those that take longest come first: at the end no process of `-n` waits long for another one.
FIRST = ("tests/scripts/test_launch.py", "tests/scripts/test_launchers.py", "tests/distributed/")
FIRST += ("tests/checkpoint/", "tests/test_gpu_suite.py", "tests/scripts/", "tests/cluster/")

# As each of two processes has. Sums in another order would now and then carry an activation over
# ReLU's edge: in a small ResNet one such activation is 0.5 % of a gradient.
HALF_THE_CORES = {"OMP_NUM_THREADS": str(max(1, len(os.sched_getaffinity(0)) // 2))}


def pytest_configure() -> None:
    """Properties are tested by the same examples in each run, which are not stored."""
    from hypothesis import settings

    settings.register_profile("tests", derandomize=True, database=None, deadline=None)
    settings.load_profile("tests")


def pytest_xdist_make_scheduler(config: pytest.Config, log):
    """Keeps the tests of a file in one process of `-n`."""
    from xdist.scheduler import LoadFileScheduling

    return LoadFileScheduling(config, log)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=lambda item: [not item.nodeid.startswith(first) for first in FIRST])


def needs(*names: str) -> None:
    """Skips a test where the machine lacks one of these programs, "root" or "TEST_DATA_DIR"; in CI it fails.

    For fixtures; a test has the mark of the same name.
    """
    if missing := packages.missing(names):
        refuse = pytest.fail if os.environ.get("CI") == "true" else pytest.skip
        refuse(NEEDS + ", ".join(missing))


NEEDS = "needs "  # begins the reason of each such skip


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_sessionfinish(session: pytest.Session):
    """Says last what was missing: how many tests were skipped for each package."""
    yield
    reporter = session.config.pluginmanager.get_plugin("terminalreporter")
    skipped = reporter.stats.get("skipped", []) if reporter else []  # a process of `-n` has no reporter
    reasons = [report.longrepr[2].removeprefix("Skipped: ") for report in skipped]
    lacking = [name for r in reasons if r.startswith(NEEDS) for name in r.removeprefix(NEEDS).split(", ")]
    if counts := [f"{name} ({lacking.count(name)})" for name in sorted(set(lacking))]:
        found = ", ".join(counts)
        reporter.write_line(f"Skipped tests, by what is missing: {found}. To install packages: make packages")


def pytest_runtest_setup(item: pytest.Item) -> None:
    needs(*(name for mark in item.iter_markers("needs") for name in mark.args))
    Job.warm = item.get_closest_marker("real_processes") is None


def rows_of(table: str) -> Any:
    """A table of what is given to tests, and what is expected."""
    return yaml.safe_load((ROOT / "tests" / "rows.yaml").read_text())[table]


def full(*values):
    """A row of a table of tests that is for `make test-all`."""
    return pytest.param(*values, marks=pytest.mark.full)


def python() -> list[str]:
    return [sys.executable]


def accelerate(config: str, *flags: str) -> list[str]:
    """`accelerate launch` by its module: the command imports timm and transformers first, 4 s each time."""
    file = f"accelerate_configs/{config}.yaml"
    return [sys.executable, "-m", "accelerate.commands.launch", "--config_file", file, *flags]


def torchrun(processes: int, *flags: str) -> list[str]:
    return [str(BIN / "torchrun"), f"--nproc_per_node={processes}", *(flags or ("--standalone",))]


def deepspeed(*flags: str) -> list:
    """The port is chosen when the job starts: until then others might take it."""
    return [str(BIN / "deepspeed"), "--master_port", free_port, *flags]


STRATEGIES = {  # the launcher of each; all but the first start two processes
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
    """A command in a session of its own, so that nothing of it outlives the test. A script is one for this
    Python. A word may be a function that returns it.

    Python's processes, a launcher's ranks too, are forked from one that has torch (support/forks.py),
    but where warm is False, and in tests marked real_processes.
    """

    warm = True  # as the test that runs says

    def __init__(self, words: list, cwd: Path = ROOT, env: dict | None = None, warm: bool | None = None):
        # No test reaches the W&B account of whoever runs it.
        mine = {name: value for name, value in os.environ.items() if not name.startswith("WANDB_")}
        mine |= {"PATH": f"{BIN}{os.pathsep}{os.environ['PATH']}", "CUDA_VISIBLE_DEVICES": ""}
        mine |= {"NETRC": "/nonexistent", "WANDB_CONFIG_DIR": "/nonexistent"}
        words = [word() if callable(word) else word for word in words]
        start = forks.Popen if (self.warm if warm is None else warm) else subprocess.Popen
        self.process = start(
            [*(python() if str(words[0]).endswith(".py") else ()), *map(str, words)],
            cwd=cwd,
            env=mine | (env or {}),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
            preexec_fn=reset_signals,
        )

    def wait(self, timeout_s: float = 240) -> tuple[int, str]:
        """Exit status and output; fails the test when it takes longer. Nothing of the job lives on."""
        try:
            output, _ = self.process.communicate(timeout=timeout_s)
        except subprocess.TimeoutExpired:
            self.kill()
            output, _ = self.process.communicate(timeout=60)  # torchrun's ranks have sessions of their own
            pytest.fail(f"no end within {timeout_s} s:\n{output}")
        finally:
            self.kill()
        return self.process.returncode, output

    def kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)


def wait_until(happens: Callable[[], object], job: Job | None = None, timeout_s: float = 60) -> None:
    """Fails the test when it takes longer, or the job ends before."""
    deadline = time.monotonic() + timeout_s
    while not happens():
        assert job is None or job.process.poll() is None, job.wait()[1]
        assert time.monotonic() < deadline, f"not within {timeout_s} s"
        time.sleep(0.02)


def read_until(words: str, job: Job) -> None:
    """Reads the job's output up to the line that has these words."""
    while words not in (line := job.process.stdout.readline()):
        assert line, job.wait()


def run(words: list, **options) -> str:
    """Runs a command that must succeed. Returns its output."""
    status, output = Job(words, **options).wait()
    assert status == 0, output
    return output


def metrics(folder: Path) -> list[dict]:
    """What was measured: the lines of metrics.jsonl without those on interruptions and changes of hosts."""
    log = lines(folder / "metrics.jsonl")
    return [line for line in log if any(name.startswith(("train/", "val/", "test/")) for name in line)]


def lines(file: Path) -> list[dict]:
    return [json.loads(line) for line in file.read_text().splitlines()]


def result(folder: Path) -> dict:
    return json.loads((folder / "result.json").read_text())


@pytest.fixture(scope="session")
def cache(tmp_path_factory) -> list:
    """The flag that lets all launches share one cache of decoded images."""
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
    """Mounts a file system of this size, in memory, at the folder."""
    needs("root")
    folder.mkdir(exist_ok=True)
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", folder], check=True)
    try:
        yield folder
    finally:
        subprocess.run(["umount", "--lazy", folder], check=True)  # a thread may write yet


@pytest.fixture
def ssh(tmp_path):
    """A real sshd on loopback, and a PATH on which `ssh localhost` goes to it. Yields the environment."""
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


# What every road to several hosts trains, to be compared with one process: 96 images a step, in micro-batches
# of 24; on 8 processes of 12
TRAINING = [*VIT, "--data", "digits", "--batch_size", "96", "--log_every", "1", "--max_steps", "20"]
TRAINING += ["--mixed_precision", "no", "--trackers", "none", "--per_device_batch_size"]


def per_device(processes: int) -> str:
    return str(next(size for size in (24, 12, 32) if 96 % (size * processes) == 0))


@pytest.fixture(scope="session")
def one_process(tmp_path_factory, cache):
    """The folder of a run with micro-batches of this size in one process."""
    folders = {}

    def folder_of(size: str) -> Path:
        if size not in folders:
            folders[size] = tmp_path_factory.mktemp("alone") / "run"
            words = [sys.executable, *TRAINING, size, *cache, "--output_dir", folders[size]]
            run(words, env=HALF_THE_CORES)
        return folders[size]

    return folder_of


def assert_same_losses(folder: Path, reference: Path) -> None:
    ours, theirs = ([line.get("train/loss") for line in metrics(f)] for f in (folder, reference))
    assert len(ours) > 20
    assert ours == pytest.approx(theirs, abs=1e-5)


@pytest.fixture(scope="session")
def cluster_tools():
    """cluster/virtual_hosts.py, where this machine can make hosts of itself. None is left from before."""
    from cluster import virtual_hosts

    needs("root", "ssh", "ps", *virtual_hosts.NEEDS)
    virtual_hosts.down()
    return virtual_hosts


@pytest.fixture(scope="module")
def cluster(cluster_tools):
    """Four hosts, each with its own copy of the project and its packages."""
    cluster_tools.up(4, private=[ROOT, Path(psutil.__file__).parent.parent])
    yield cluster_tools
    cluster_tools.down()
    assert not cluster_tools.STATE.exists()
    namespaces = subprocess.run(["ip", "netns"], capture_output=True, text=True).stdout
    assert f"{cluster_tools.CLUSTER}-" not in namespaces


@pytest.fixture
def project_copy(tmp_path) -> Path:
    """The project's code in a folder of its own, to be broken on purpose."""
    return copy_project(tmp_path / "project")


@pytest.fixture(scope="session")
def stoppable(tmp_path_factory) -> Path:
    """The project's code with scripts that, told by STOP_AT, send themselves SIGTERM after so many steps.

    With several processes rank 0 does it a step earlier: the others agree a step later. Told by STEP_S, they
    take so many seconds longer for each step, until torchrun restarts them.
    """
    project = copy_project(tmp_path_factory.mktemp("stoppable") / "project")
    stop = (
        "at = int(__import__('os').environ.get('STOP_AT', -1))",
        "if accelerator.is_main_process and step == at - (accelerator.num_processes > 1):",
        "    __import__('signal').raise_signal(15)",
        "if __import__('os').environ.get('TORCHELASTIC_RESTART_COUNT', '0') == '0':",
        f"    {SLOW_STEP}",
    )
    for script in sorted(path.name for path in project.glob("train_*.py")):
        insert_in_loop(project, script, *stop)
    return project


SLOW_STEP = "__import__('time').sleep(float(__import__('os').environ.get('STEP_S', 0)))"


def insert_in_loop(project: Path, script: str, *code: str) -> None:
    """Inserts lines of code before the end of each step."""
    call = "            run.checkpoint(step)\n"
    mutate(project, script, call, "".join(f"            {line}\n" for line in code) + call)


def copy_project(copy: Path) -> Path:
    copy.mkdir()
    for name in ("onecurve", "tools", "accelerate_configs", "ds_configs", "recipes", "cluster"):
        shutil.copytree(ROOT / name, copy / name, ignore=shutil.ignore_patterns("*.pyc.*"))
    for name in ("*.py", "*.toml", "*.yaml", "Makefile", "requirements.txt", "constraints.txt", "hostfile"):
        for file in ROOT.glob(name):
            shutil.copy2(file, copy)  # with its time, which make compares
    return copy


def link_environment(project: Path) -> None:
    """Gives the project a .venv that is this Python's, and in which `make setup` has nothing to do."""
    (project / ".venv").mkdir()
    for path in Path(sys.prefix).iterdir():
        (project / ".venv" / path.name).symlink_to(path)
    (project / ".venv" / "installed").unlink(missing_ok=True)
    (project / ".venv" / "installed").touch()


def mutate(project: Path, file: str, old: str, new: str) -> None:
    """Replaces a piece of code that must occur exactly once."""
    text = (project / file).read_text()
    assert text.count(old) == 1, f"{file} has {text.count(old)} x {old!r}"
    (project / file).write_text(text.replace(old, new))


def tensors(checkpoint: Path) -> dict[str, Tensor]:
    """The tensors of all files of a checkpoint, by `<file>:<name>`."""
    files = sorted(checkpoint.glob("*.safetensors"))
    return {f"{file.stem}:{name}": tensor for file in files for name, tensor in load_file(file).items()}


def latest(folder: Path) -> Path:
    """The newest checkpoint of a run."""
    return sorted((folder / "checkpoints").glob("step_*"))[-1]
