"""Run a training job on virtual hosts, once undisturbed and once with each fault.

The drill runs the job's command on an extra host, and the job trains on the hosts in /etc/hostfile. The drill
appends `--output_dir` to the command. When a job ends before training is finished, the drill starts the same
command again, as a user would. The table shows the cost of each fault.

For a command with --s3, the drill starts moto's S3 server on the command's host. Pass the server's variables
to launch.py with `--env AWS_ENDPOINT_URL --env AWS_ACCESS_KEY_ID --env AWS_SECRET_ACCESS_KEY --env NO_PROXY`.
"""

import argparse
import contextlib
import json
import math
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import psutil

from cluster import virtual_hosts as cluster
from onecurve.system.files import read_lines
from onecurve.system.processes import kill

VICTIM = "node2"
ON = 0.2  # fraction of the steps to train during a fault, which shows that the job continues
PAUSE_S = 25  # minimum duration of a fault, longer than the time to detect a lost host
PATIENCE_S = 120  # a job hangs if it makes no progress for this long plus the undisturbed run's time
STARTS = 4  # number of starts of the same command after which training counts as failed
AFTER = 0.3  # fraction of the steps before the fault
DISK_MIB = 512
STORE_S = 30  # timeout for the start of the S3 server


@dataclass
class Outcome:
    """Result of a training job with one fault."""

    fault: str
    survived: bool = False
    starts: int = 1
    lost_steps: int = 0
    pause_s: float = 0.0  # longest time without a new step after the fault, or 0 if no step followed
    difference: float = math.nan  # largest relative difference of a loss
    notes: str = ""


@dataclass
class Training:
    """Run of the command in a folder."""

    words: list[str]  # the user's command
    folder: Path
    control: str  # host that runs the command
    env: dict[str, str]  # variables of the command in addition to this process's
    process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        urls = re.findall(r"s3://\S+", " ".join(self.words))  # each run needs a different prefix
        prefix = ["--s3", f"{urls[0].rstrip('/')}/{self.folder.name}"] if urls else []
        words = cluster.inside(self.control, [*self.words, "--output_dir", str(self.folder), *prefix])
        with open(self.folder.with_suffix(".log"), "ab") as log:
            env = os.environ | self.env
            self.process = subprocess.Popen(words, stdout=log, stderr=log, env=env, start_new_session=True)

    @property
    def is_running(self) -> bool:
        return self.process is not None and self.process.poll() is None

    def status(self) -> int | None:
        """Wait for the end of the command and return its exit status."""
        return self.process.wait() if self.process else None

    @property
    def is_finished(self) -> bool:
        with contextlib.suppress(OSError, ValueError):
            return bool(json.loads((self.folder / "result.json").read_text())["status"] == "finished")
        return False

    def lines(self) -> list[dict[str, float]]:
        """Return the lines of metrics.jsonl that contain a training loss."""
        return [line for line in read_lines(self.folder / "metrics.jsonl") if "train/loss" in line]

    def step(self) -> int:
        return int(max((line["step"] for line in self.lines()), default=0))

    def losses(self) -> dict[int, float]:
        return {int(line["step"]): line["train/loss"] for line in self.lines()}

    def has_checkpoint(self) -> bool:
        return any((self.folder / "checkpoints").glob("step_*/manifest.json"))

    def end(self) -> None:
        """Kill the command and all processes of the job that still run on any host."""
        if self.process and self.is_running:
            os.killpg(self.process.pid, signal.SIGKILL)
        for host in filter(cluster._is_up, cluster.names()):
            kill(_job_processes(host))


class StepWatch:
    """Monitor of a training job's newest logged step, and of the longest time between two steps."""

    def __init__(self, training: Training) -> None:
        self.training = training
        self.reached, self.at, self.longest_s = training.step(), time.monotonic(), 0.0

    def watch(self, until: float) -> None:
        """Watch the job until the command ends or time.monotonic() reaches `until`."""
        is_over = False
        while not is_over:
            time.sleep(0.1)
            is_over = not self.training.is_running or time.monotonic() > until
            if (step := self.training.step()) > self.reached:
                self.longest_s = max(self.longest_s, time.monotonic() - self.at)
                self.reached, self.at = step, time.monotonic()


# --- Faults. Each fault is a context manager, which repairs the fault after the job continued or ended.


@contextlib.contextmanager
def kill_a_rank(_: Training) -> Iterator[None]:
    ranks_on(VICTIM)[-1].kill()
    yield


@contextlib.contextmanager
def kill_an_agent(_: Training) -> Iterator[None]:
    """Kill the parent process of the ranks, which is the agent of torchrun or accelerate."""
    ranks_on(VICTIM)[-1].parent().kill()
    yield


@contextlib.contextmanager
def cut_a_cable(_: Training) -> Iterator[None]:
    cluster.cut(VICTIM)
    yield
    cluster.heal(VICTIM)


@contextlib.contextmanager
def power_off(_: Training) -> Iterator[None]:
    cluster.kill(VICTIM)
    yield
    cluster.revive(VICTIM)


@contextlib.contextmanager
def stop_a_rank(_: Training) -> Iterator[None]:
    """Suspend a rank, so that the rank neither answers nor ends."""
    victim = ranks_on(VICTIM)[-1]
    victim.suspend()
    yield
    with contextlib.suppress(psutil.NoSuchProcess):
        victim.resume()


@contextlib.contextmanager
def fill_the_disk(training: Training) -> Iterator[None]:
    filler = training.folder.parent / "filler"
    with contextlib.suppress(OSError), open(filler, "wb") as file:
        while True:
            file.write(bytes(2**20))
    yield
    filler.unlink()


@contextlib.contextmanager
def preempt(_: Training) -> Iterator[None]:
    """Send SIGTERM to the host's ranks, as a cloud provider does when it reclaims a spot machine."""
    for rank in ranks_on(VICTIM):
        rank.terminate()
    yield


@contextlib.contextmanager
def silence_s3(training: Training) -> Iterator[None]:
    """Suspend the S3 server, which then accepts connections but does not answer."""
    store = [p for p in _processes(training.control) if "moto.server" in (p.info["cmdline"] or ())]
    for process in store:
        process.suspend()
    yield
    for process in store:
        process.resume()


FAULTS: dict[str, Callable[[Training], contextlib.AbstractContextManager[None]]] = {
    "kill-rank": kill_a_rank,
    "kill-agent": kill_an_agent,
    "cut-cable": cut_a_cable,
    "power-off": power_off,
    "stop-rank": stop_a_rank,
    "fill-disk": fill_the_disk,
    "preempt": preempt,
    "silence-s3": silence_s3,
}
S3_ENV = {
    "AWS_ACCESS_KEY_ID": "drill",
    "AWS_SECRET_ACCESS_KEY": "drill",
    "AWS_DEFAULT_REGION": "us-east-1",
    "AWS_CONFIG_FILE": "/nonexistent",
    "AWS_SHARED_CREDENTIALS_FILE": "/nonexistent",
}


def main(flags: argparse.Namespace) -> int:
    """Run the drill with the flags of cluster/virtual_cluster.py. Return 0 if each job survived."""
    command = flags.command[1:] if flags.command[:1] == ["--"] else flags.command
    has_store = any("s3://" in word for word in command)
    default = [fault for fault in FAULTS if has_store or fault != "silence-s3"]
    faults = flags.faults.split(",") if flags.faults else default
    if unknown := [fault for fault in faults if fault not in FAULTS]:
        raise ValueError(f"--faults {unknown[0]}: choose among {', '.join(FAULTS)}")
    if "silence-s3" in faults and not has_store:
        raise ValueError("--faults silence-s3 needs a command with --s3")
    if not command:
        raise ValueError("the command is missing. Pass it after --.")
    if flags.hosts < 2:
        raise ValueError(f"--hosts {flags.hosts}: must be at least 2")
    if cluster.STATE.exists():
        raise ValueError("a virtual cluster is already running. Remove it with `down`.")
    outcomes = drill(command, flags.hosts, flags.slots, flags.folder.resolve(), faults)
    print(table(outcomes))
    return 0 if all(outcome.survived for outcome in outcomes) else 1


def drill(words: list[str], hosts: int, slots: int, folder: Path, faults: list[str]) -> list[Outcome]:
    """Run the command once undisturbed and once with each fault.

    Args:
        words: Command of the training.
        hosts: Hosts of the training.
        slots: Slots per host.
        folder: Folder for the runs, on which a small in-memory disk is mounted during the drill.
        faults: Names of the faults.

    Raises:
        ValueError: The undisturbed run does not finish.
    """
    folder.mkdir(parents=True, exist_ok=True)
    subprocess.run(
        ["mount", "-t", "tmpfs", "-o", f"size={DISK_MIB}m", "tmpfs", folder], check=True, capture_output=True
    )
    try:
        cluster.up(hosts + 1, slots, spare=1)
        control = cluster.names()[-1]
        buckets = re.findall(r"s3://([^/ ]+)", " ".join(words))
        env = _start_store(control, buckets[0], folder) if buckets else {}
        reference = Training(words, folder / "undisturbed", control, env)
        say("undisturbed")
        began = time.monotonic()
        reference.start()
        reference.status()
        duration_s = time.monotonic() - began
        if not reference.is_finished:
            raise ValueError(f"the undisturbed run did not finish. See {reference.folder}.log.")
        return [
            _try(fault, replace(reference, folder=folder / fault, process=None), reference, duration_s)
            for fault in faults
        ]
    finally:
        cluster.down()
        _keep(folder)


def _start_store(host: str, bucket: str, folder: Path) -> dict[str, str]:
    """Start moto's S3 server with the bucket on a host, and return the environment of its clients.

    The server needs the packages in requirements-dev.txt. It ends when the host ends.
    """
    address = f"10.77.0.{host.removeprefix('node')}"
    clients = S3_ENV | {"AWS_ENDPOINT_URL": f"http://{address}:5000", "NO_PROXY": address}
    env = os.environ | clients
    words = cluster.inside(host, [sys.executable, "-m", "moto.server", "-H", address, "-p", "5000"])
    with open(folder / "s3.log", "wb") as log:
        subprocess.Popen(words, env=env, stdout=log, stderr=log, start_new_session=True)
    code = f"import boto3; boto3.client('s3').create_bucket(Bucket={bucket!r})"
    deadline = time.monotonic() + STORE_S
    while True:
        words = cluster.inside(host, [sys.executable, "-c", code])
        done = subprocess.run(words, env=env, capture_output=True, text=True)
        if not done.returncode:
            return clients
        if time.monotonic() > deadline:
            raise ValueError(f"no S3 server on {host}: {done.stderr.strip().splitlines()[-1]}")


def _try(fault: str, training: Training, reference: Training, duration_s: float) -> Outcome:
    """Run the job with one fault. `duration_s` is the time that the undisturbed run took."""
    say(fault)
    outcome = Outcome(fault)
    training.start()
    try:
        while training.step() < AFTER * reference.step() or not training.has_checkpoint():
            if not training.is_running:
                outcome.notes = "ended before the fault"
                return outcome
            time.sleep(0.1)
        last, at, steps = reference.step(), time.monotonic(), StepWatch(training)
        enough = min(steps.reached + ON * last, last)
        with FAULTS[fault](training):
            steps.watch(until=at + PAUSE_S)
            while training.is_running and training.step() < enough:
                if time.monotonic() > at + PATIENCE_S + duration_s:
                    outcome.notes = "hangs"
                    return outcome
                steps.watch(until=time.monotonic() + 1)
        steps.watch(until=math.inf)
        while not training.is_finished and outcome.starts < STARTS:
            outcome.starts += 1
            training.start()
            steps.watch(until=math.inf)
        outcome.survived = training.is_finished and training.status() == 0
    finally:
        training.end()
    outcome.pause_s = steps.longest_s
    outcome.lost_steps = _repeated(training.folder.with_suffix(".log").read_text(errors="replace"))
    losses, expected = training.losses(), reference.losses()
    if outcome.survived and set(losses) == set(expected):
        outcome.difference = max(abs(losses[step] / expected[step] - 1) for step in expected)
    return outcome


def _repeated(log: str) -> int:
    """Return the number of steps that the job repeated after it resumed.

    This is the last step before the job resumed, minus the first step afterwards. Both are read from the log,
    because a line of metrics.jsonl covers many steps.
    """
    reached = max(_numbers(r"\bstep ([\d,]+)", log.partition("continuing at")[0]), default=0)
    return max(0, reached - min(_numbers(r"continuing at step ([\d,]+)(?: with|;)", log), default=reached))


def _numbers(pattern: str, text: str) -> list[int]:
    return [int(number.replace(",", "")) for number in re.findall(pattern, text)]


def ranks_on(host: str) -> list[psutil.Process]:
    """Return the processes of the job's ranks on a host."""
    # Workers inherit the environment of their rank, so the oldest process with a rank number is the rank.
    oldest: dict[int, psutil.Process] = {}
    for process in _job_processes(host):
        if "RANK" in process.info["environ"]:
            oldest.setdefault(int(process.info["environ"]["RANK"]), process)
    return [oldest[rank] for rank in sorted(oldest)]


def _job_processes(host: str) -> list[psutil.Process]:
    return [process for process in _processes(host) if "WORLD_SIZE" in (process.info["environ"] or ())]


def _processes(host: str) -> list[psutil.Process]:
    """Return a host's processes, the oldest first. Their `info` contains `cmdline` and `environ`."""
    pids = cluster.processes(host)
    return [process for process in psutil.process_iter(["cmdline", "environ"]) if process.pid in pids]


def _keep(folder: Path) -> None:
    """Unmount the in-memory disk, and keep the runs in the folder where the disk was mounted."""
    kept = folder.with_name(f".{folder.name}.kept")
    shutil.copytree(folder, kept, ignore=shutil.ignore_patterns("checkpoints", "filler"))
    subprocess.run(["umount", "--lazy", folder], check=True)
    shutil.copytree(kept, folder, dirs_exist_ok=True)
    shutil.rmtree(kept)


def say(text: str) -> None:
    print(f"drill: {text}", file=sys.stderr, flush=True)


def table(outcomes: list[Outcome]) -> str:
    """Return a Markdown table with one row per fault."""
    head = "| fault | survived | starts | steps repeated | seconds without a new step | losses differ by |"
    rows = [head, "|---|---|---|---|---|---|"]
    for outcome in outcomes:
        survived = "yes" if outcome.survived else f"no {outcome.notes}".strip()
        pause = f"{outcome.pause_s:.0f}" if outcome.pause_s else "-"
        difference = "-" if math.isnan(outcome.difference) else f"{outcome.difference:.1g}"
        numbers = f"{outcome.starts} | {outcome.lost_steps} | {pause} | {difference}"
        rows.append(f"| {outcome.fault} | {survived} | {numbers} |")
    return "\n".join(rows)
