"""Run a training job on virtual hosts, once without a fault and once with each fault.

The drill appends `--output_dir` to the training command and runs the command on an additional host. The job
trains on the hosts in /etc/hostfile. If the job ends before training is finished, the drill runs the same
command again, as a user would. Finally, the drill prints a table with the cost of each fault.

If the command contains --s3, the drill starts moto's S3 server on the additional host. Pass the server's
environment variables to the job with these flags of launch.py: `--env AWS_ENDPOINT_URL --env
AWS_ACCESS_KEY_ID --env AWS_SECRET_ACCESS_KEY --env NO_PROXY`.
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
ON = 0.2  # fraction of all steps that the job must train during a fault to prove that the job continues
PAUSE_S = 25  # minimum fault duration in seconds, longer than the time to detect a lost host
PATIENCE_S = 120  # seconds beyond the undisturbed run's duration after which a job is considered hung
STARTS = 4  # maximum number of times that the same command is started
AFTER = 0.3  # fraction of all steps that the job trains before the fault
DISK_MIB = 512  # size of the in-memory disk for the runs
STORE_S = 30  # timeout in seconds for starting the S3 server


@dataclass
class Outcome:
    """Result of a training job during which one fault occurred."""

    fault: str  # key in FAULTS
    survived: bool = False  # True if the job finished despite the fault
    starts: int = 1  # number of times that the command was started
    lost_steps: int = 0  # number of steps that the job repeated
    pause_s: float = 0.0  # longest time without a new step after the fault, or 0 without later steps
    difference: float = math.nan  # largest relative difference from the undisturbed run's losses
    notes: str = ""


@dataclass
class Training:
    """Training job that writes to a folder."""

    words: list[str]  # the user's training command
    folder: Path
    control: str  # host that runs the command
    env: dict[str, str]  # additional environment variables for the command
    process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        s3_urls = re.findall(r"s3://\S+", " ".join(self.words))  # each run needs a different prefix
        s3_flags = ["--s3", f"{s3_urls[0].rstrip('/')}/{self.folder.name}"] if s3_urls else []
        command = cluster.inside(self.control, [*self.words, "--output_dir", str(self.folder), *s3_flags])
        with open(self.folder.with_suffix(".log"), "ab") as log:
            env = os.environ | self.env
            self.process = subprocess.Popen(command, stdout=log, stderr=log, env=env, start_new_session=True)

    @property
    def is_running(self) -> bool:
        return self.process is not None and self.process.poll() is None

    def status(self) -> int | None:
        """Wait for the command to exit, and return its exit status."""
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
        """Kill the command and all of the job's remaining processes on all hosts."""
        if self.process and self.is_running:
            os.killpg(self.process.pid, signal.SIGKILL)
        for host in filter(cluster._is_running, cluster.names()):
            kill(_job_processes(host))


class StepWatch:
    """Monitor of a job's latest logged step and of the longest time between two logged steps."""

    def __init__(self, training: Training) -> None:
        self.training = training
        self.reached, self.at, self.longest_s = training.step(), time.monotonic(), 0.0

    def watch(self, until: float) -> None:
        """Monitor the job until the command ends or time.monotonic() reaches `until`."""
        has_ended = False
        while not has_ended:
            time.sleep(0.1)
            has_ended = not self.training.is_running or time.monotonic() > until
            if (step := self.training.step()) > self.reached:
                self.longest_s = max(self.longest_s, time.monotonic() - self.at)
                self.reached, self.at = step, time.monotonic()


# --- Faults. Each fault is a context manager. The fault is repaired after the job has continued or ended.


@contextlib.contextmanager
def kill_a_rank(_: Training) -> Iterator[None]:
    ranks_on(VICTIM)[-1].kill()
    yield


@contextlib.contextmanager
def kill_an_agent(_: Training) -> Iterator[None]:
    """Kill the ranks' parent process on a host, the torchrun or accelerate agent."""
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
    """Suspend a rank, so that it neither responds nor exits."""
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
    """Suspend the S3 server, which then accepts connections but does not respond to requests."""
    candidates = _host_processes(training.control)
    servers = [process for process in candidates if "moto.server" in (process.info["cmdline"] or ())]
    for process in servers:
        process.suspend()
    yield
    for process in servers:
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
    """Run the drill with the flags of cluster/virtual_cluster.py.

    Return 0 if all jobs survived the faults.
    """
    command = flags.command[1:] if flags.command[:1] == ["--"] else flags.command
    has_store = any("s3://" in word for word in command)
    default = [fault for fault in FAULTS if has_store or fault != "silence-s3"]
    faults = flags.faults.split(",") if flags.faults else default
    if unknown := [fault for fault in faults if fault not in FAULTS]:
        raise ValueError(f"--faults {unknown[0]} is not a known fault. Choose from {', '.join(FAULTS)}.")
    if "silence-s3" in faults and not has_store:
        raise ValueError("--faults silence-s3 requires a command with --s3. Add --s3 to the command.")
    if not command:
        raise ValueError("the training command is missing. Pass the command after --.")
    if flags.hosts < 2:
        raise ValueError(f"--hosts {flags.hosts} is too small. Use at least 2 hosts.")
    if cluster.STATE.exists():
        raise ValueError("a virtual cluster is already running. Remove the cluster with `down`.")
    outcomes = drill(command, flags.hosts, flags.slots, flags.folder.resolve(), faults)
    print(table(outcomes))
    return 0 if all(outcome.survived for outcome in outcomes) else 1


def drill(command: list[str], hosts: int, slots: int, folder: Path, faults: list[str]) -> list[Outcome]:
    """Run a training command once without a fault and once with each fault.

    Args:
        command: Training command.
        hosts: Number of hosts that train.
        slots: Number of slots per host.
        folder: The runs' output folder. During the drill, a small in-memory disk is mounted on this folder.
        faults: Fault names.

    Raises:
        ValueError: If the undisturbed run does not finish.
    """
    folder.mkdir(parents=True, exist_ok=True)
    subprocess.run(
        ["mount", "-t", "tmpfs", "-o", f"size={DISK_MIB}m", "tmpfs", folder], check=True, capture_output=True
    )
    try:
        cluster.up(hosts + 1, slots, spare=1)
        command_host = cluster.names()[-1]
        buckets = re.findall(r"s3://([^/ ]+)", " ".join(command))
        env = _start_store(command_host, buckets[0], folder) if buckets else {}
        undisturbed = Training(command, folder / "undisturbed", command_host, env)
        say("undisturbed")
        start_s = time.monotonic()
        undisturbed.start()
        undisturbed.status()
        duration_s = time.monotonic() - start_s
        if not undisturbed.is_finished:
            raise ValueError(f"the undisturbed run did not finish. See the log {undisturbed.folder}.log.")
        return [
            _run_with_fault(
                fault, replace(undisturbed, folder=folder / fault, process=None), undisturbed, duration_s
            )
            for fault in faults
        ]
    finally:
        cluster.down()
        _keep_runs(folder)


def _start_store(host: str, bucket: str, folder: Path) -> dict[str, str]:
    """Start moto's S3 server on a host, create a bucket, and return the environment variables for clients.

    The server needs the packages in requirements-dev.txt. The server exits when the host ends.
    """
    address = f"10.77.0.{host.removeprefix('node')}"
    client_env = S3_ENV | {"AWS_ENDPOINT_URL": f"http://{address}:5000", "NO_PROXY": address}
    env = os.environ | client_env
    command = cluster.inside(host, [sys.executable, "-m", "moto.server", "-H", address, "-p", "5000"])
    with open(folder / "s3.log", "wb") as log:
        subprocess.Popen(command, env=env, stdout=log, stderr=log, start_new_session=True)
    create_bucket = f"import boto3; boto3.client('s3').create_bucket(Bucket={bucket!r})"
    end_s = time.monotonic() + STORE_S
    while True:
        command = cluster.inside(host, [sys.executable, "-c", create_bucket])
        attempt = subprocess.run(command, env=env, capture_output=True, text=True)
        if not attempt.returncode:
            return client_env
        if time.monotonic() > end_s:
            last_line = attempt.stderr.strip().splitlines()[-1]
            raise ValueError(f"the S3 server on {host} did not start: {last_line}")


def _run_with_fault(fault: str, training: Training, undisturbed: Training, duration_s: float) -> Outcome:
    """Run the job with one fault. `duration_s` is the undisturbed run's duration in seconds."""
    say(fault)
    outcome = Outcome(fault)
    training.start()
    try:
        while training.step() < AFTER * undisturbed.step() or not training.has_checkpoint():
            if not training.is_running:
                outcome.notes = "the job ended before the fault"
                return outcome
            time.sleep(0.1)
        last_step, fault_s, step_watch = undisturbed.step(), time.monotonic(), StepWatch(training)
        target_step = min(step_watch.reached + ON * last_step, last_step)
        with FAULTS[fault](training):
            step_watch.watch(until=fault_s + PAUSE_S)
            while training.is_running and training.step() < target_step:
                if time.monotonic() > fault_s + PATIENCE_S + duration_s:
                    outcome.notes = "the job hung"
                    return outcome
                step_watch.watch(until=time.monotonic() + 1)
        step_watch.watch(until=math.inf)
        while not training.is_finished and outcome.starts < STARTS:
            outcome.starts += 1
            training.start()
            step_watch.watch(until=math.inf)
        outcome.survived = training.is_finished and training.status() == 0
    finally:
        training.end()
    outcome.pause_s = step_watch.longest_s
    outcome.lost_steps = _repeated_steps(training.folder.with_suffix(".log").read_text(errors="replace"))
    losses, expected_losses = training.losses(), undisturbed.losses()
    if outcome.survived and set(losses) == set(expected_losses):
        outcome.difference = max(abs(losses[step] / expected_losses[step] - 1) for step in expected_losses)
    return outcome


def _repeated_steps(log: str) -> int:
    """Return the number of steps that the job repeated after a resume.

    The result is the last step before the resume, minus the step at which the job resumed. This function
    reads both numbers from the log, because a line in metrics.jsonl covers many steps.
    """
    last_step = max(_logged_numbers(r"\bstep ([\d,]+)", log.partition("continuing at")[0]), default=0)
    resumed_steps = _logged_numbers(r"continuing at step ([\d,]+)(?: with| and)", log)
    return max(0, last_step - min(resumed_steps, default=last_step))


def _logged_numbers(pattern: str, log: str) -> list[int]:
    return [int(number.replace(",", "")) for number in re.findall(pattern, log)]


def ranks_on(host: str) -> list[psutil.Process]:
    """Return the job's ranks on a host as processes, in rank order."""
    # Workers inherit the environment of their rank, so the oldest process with a RANK variable is the rank.
    oldest: dict[int, psutil.Process] = {}
    for process in _job_processes(host):
        if "RANK" in process.info["environ"]:
            oldest.setdefault(int(process.info["environ"]["RANK"]), process)
    return [oldest[rank] for rank in sorted(oldest)]


def _job_processes(host: str) -> list[psutil.Process]:
    return [process for process in _host_processes(host) if "WORLD_SIZE" in (process.info["environ"] or ())]


def _host_processes(host: str) -> list[psutil.Process]:
    """Return a host's processes with `cmdline` and `environ` in `info`, starting with the oldest process."""
    pids = cluster.processes(host)
    return [process for process in psutil.process_iter(["cmdline", "environ"]) if process.pid in pids]


def _keep_runs(folder: Path) -> None:
    """Unmount the in-memory disk, after copying the runs to the folder under the mount point."""
    copy = folder.with_name(f".{folder.name}.kept")
    shutil.copytree(folder, copy, ignore=shutil.ignore_patterns("checkpoints", "filler"))
    subprocess.run(["umount", "--lazy", folder], check=True)
    shutil.copytree(copy, folder, dirs_exist_ok=True)
    shutil.rmtree(copy)


def say(text: str) -> None:
    print(f"drill: {text}", file=sys.stderr, flush=True)


def table(outcomes: list[Outcome]) -> str:
    """Return a Markdown table with one row for each fault."""
    heading = "| fault | survived | starts | repeated steps | seconds without a new step | loss difference |"
    rows = [heading, "|---|---|---|---|---|---|"]
    for outcome in outcomes:
        notes = f" ({outcome.notes})" if outcome.notes else ""
        survived = "yes" if outcome.survived else f"no{notes}"
        pause = f"{outcome.pause_s:.0f}" if outcome.pause_s else "-"
        difference = "-" if math.isnan(outcome.difference) else f"{outcome.difference:.1g}"
        cells = f"{outcome.starts} | {outcome.lost_steps} | {pause} | {difference}"
        rows.append(f"| {outcome.fault} | {survived} | {cells} |")
    return "\n".join(rows)
