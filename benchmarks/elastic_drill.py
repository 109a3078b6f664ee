"""Check that random changes to four virtual hosts do not change the result of an elastic training run.

    python -m benchmarks.elastic_drill --minutes 20
    python -m benchmarks.elastic_drill --scripts cnn_a --strategies ddp rounded --lr 3e-3 --draw drill.png

Hosts are disconnected, killed or told to leave (with SIGTERM, after which the machine disappears), and later
join again. --seed determines the order of the changes, and each further training run uses the next seed.
launch.py runs on a fifth host. In fp32, the drill checks four properties:

ids, lr   All sample ids and learning rates are the same as in an uninterrupted single-process run.
whole     With --deterministic (DDP, FSDP2), each loss and the final weights are bitwise identical to the
          uninterrupted run. Without --deterministic (ZeRO-2, and DDP as `rounded`), losses differ from that
          run by at most twice as much as the losses of an uninterrupted run with four processes.
replay    Under ZeRO-2, the losses in the 50 steps after each change are within 1e-5 of the losses of a
          single-process run that starts from the checkpoint saved at that change.
lost      The job repeats no step after a host leaves or joins. The job repeats at most one checkpoint
          interval after a host is disconnected or killed.

The drill needs root permissions and the packages that cluster/virtual_cluster.py needs.
"""

import argparse
import itertools
import json
import os
import random
import re
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import psutil

from cluster import virtual_hosts as cluster
from cluster.drill import ranks_on, say
from onecurve.data.cache import prepare_data
from onecurve.run.plots import Panel, draw_panels
from onecurve.system.cli import command_parser
from onecurve.system.files import read_lines
from onecurve.system.paths import ROOT
from tools.logbook.markdown import markdown_table

HOSTS, BATCH, PER_DEVICE = 4, 96, 8  # 12 micro-batches per step are divisible among 1, 2, 3 or 4 hosts
CHECKPOINT_EVERY = 64
REPLAYED = 50  # number of steps replayed after each change
GAP = (60, 160)  # minimum and maximum number of steps between two changes
PATIENCE_S = 240  # timeout for a new step, including the first step after a change
REPLAY_BOUND = 1e-5
DROPOUT = ("--dropout", "0.1", "--mixup", "0.8")
SCRIPTS = {
    "cnn_a": ["train_cnn_a.py"],
    "vit": ["train_vit.py", "--model", "test_vit", "--image_size", "32", "--patch_size", "8", *DROPOUT],
}
# Without --deterministic, rounding occasionally changes the sign of an activation before one of CNN-A's
# ReLUs. The losses then differ in proportion to the learning rate. At a learning rate of 1e-5, one of 33
# replays exceeded REPLAY_BOUND. The ViT is less sensitive, because GELU is smooth.
LR = {"cnn_a": 3e-6, "vit": 1e-5}
EXACT_LR = 3e-3
STRATEGIES = {"ddp": "ddp_4gpu", "fsdp": "fsdp_4gpu", "zero2": "zero2_4gpu", "rounded": "ddp_4gpu"}
EXACT = {"ddp", "fsdp"}  # strategies that train with --deterministic
MEAN_OF = 20  # number of steps over which the plot averages losses
RECIPE = ["--batch_size", str(BATCH), "--per_device_batch_size", str(PER_DEVICE), "--mixed_precision", "no"]
RECIPE += ["--warmup", "0.01", "--log_every", "1", "--log_samples", "--trackers", "none"]
RECIPE += ["--max_val_images", "500"]
ELASTIC = ["--checkpoint_every", str(CHECKPOINT_EVERY), "--timeout_s", "60"]


# --- The plan


def leave(host: str) -> None:
    for rank in ranks_on(host):
        rank.terminate()


LOSSES = {"cut": cluster.cut, "kill": cluster.kill, "leave": leave}


@dataclass(frozen=True)
class Change:
    """Planned change to a host."""

    kind: str  # type of the change: cut, kill, leave or join
    host: str
    gap: int  # number of steps since the first step after the previous change


def plan(seed: int, hosts: list[str]) -> Iterator[Change]:
    """Yield an infinite sequence of random host changes. At any time, at least one host is present."""
    draw = random.Random(seed)
    present, away = list(hosts), []
    while True:
        joins = away and (len(present) == 1 or draw.random() < 0.5)
        host = draw.choice(sorted(away if joins else present))
        name = "join" if joins else draw.choice([*LOSSES])
        source, target = (away, present) if joins else (present, away)
        source.remove(host)
        target.append(host)
        yield Change(name, host, draw.randint(*GAP))


@dataclass
class Event:
    """Completed change to a host."""

    kind: str
    host: str
    processes: int  # number of processes after the change
    step: int  # latest step before the change
    seconds: float  # time until the first step with the new number of processes
    lost: int = 0  # number of steps that the job repeated


# --- Jobs


class Job:
    """Elastic job that launch.py --min_hosts runs on the last host.

    The object copies each checkpoint from which the job resumes.
    """

    def __init__(self, folder: Path, words: list[str], config: str):
        self.folder, self.log = folder, folder.with_suffix(".log")
        folder.mkdir(parents=True)
        launch = ["launch.py", "--hostfile", "/etc/hostfile", "--min_hosts", "1", "--env", "OMP_NUM_THREADS"]
        launch += ["--config_file", f"accelerate_configs/{config}.yaml", "--log_dir", f"{folder}-logs"]
        self.resumed: list[tuple[int, Path]] = []  # step and copy of each resumed checkpoint
        words = [sys.executable, *launch, *words, *RECIPE, *ELASTIC, "--output_dir", str(folder)]
        command = cluster.inside(cluster.names()[-1], words, ROOT)
        with open(self.log, "ab") as log:
            self.process = subprocess.Popen(command, stdout=log, stderr=log, start_new_session=True)

    def is_running(self) -> bool:
        return self.process.poll() is None

    def wait(self, processes: int | None, steps: int) -> int:
        """Wait for `steps` steps after the first new step, and return the last step.

        The steps must be trained by `processes` processes, or by any number of processes if None.
        """
        deadline, newest, first = time.monotonic() + PATIENCE_S, (0, 0), None
        while self.is_running() and time.monotonic() < deadline:
            if (current := self.newest()) != newest:
                deadline, newest = time.monotonic() + PATIENCE_S, current
            current_processes, step = current
            if step and processes in (current_processes, None):
                first = step if first is None else min(first, step)
                if step - first >= steps:
                    return step
            time.sleep(0.1)
        state = f"made no progress for {PATIENCE_S} s" if self.is_running() else "ended"
        raise RuntimeError(f"The job {state}. See the cause in {self.log}.")

    def newest(self) -> tuple[int, int]:
        """Return the number of processes, and the step of the latest logged loss, or 0 without a loss."""
        self._copy_checkpoints()
        lines, processes = read_lines(self.folder / "metrics.jsonl"), HOSTS
        changes = [i for i, line in enumerate(lines) if "processes" in line]
        if changes:
            processes, lines = lines[changes[-1]]["processes"], lines[changes[-1] :]
        return processes, max((line["step"] for line in lines if "train/loss" in line), default=0)

    def _copy_checkpoints(self) -> None:
        resumes = re.findall(
            r"continuing at step ([\d,]+) with the checkpoint (\S+)", self.log.read_text(errors="replace")
        )
        for number, name in resumes[len(self.resumed) :]:
            copy = self.folder.with_name("checkpoints") / f"{len(self.resumed)}"
            shutil.copytree(name, copy / Path(name).name)
            self.resumed.append((int(number.replace(",", "")), copy / Path(name).name))

    def change(self, change: Change, away: dict[str, str], present: int) -> Event:
        """Change a host, and wait for the first step with the new number of processes.

        Args:
            change: Change to apply to a host.
            away: Type of change that removed each absent host, by host name. The method updates this dict.
            present: Number of hosts after the change.
        """
        log_size = self.log.stat().st_size
        step, began = self.newest()[1], time.monotonic()
        if change.kind == "join":
            cluster.heal(change.host) if away.pop(change.host) == "cut" else cluster.revive(change.host)
        else:
            LOSSES[change.kind](change.host)
            away[change.host] = change.kind
        self.wait(present, 0)
        event = Event(change.kind, change.host, present, step, time.monotonic() - began)
        if change.kind == "leave":
            cluster.kill(change.host)
        event.lost = max(self._repeated(log_size))
        return event

    def _repeated(self, log_size: int) -> list[int]:
        """Return the numbers of repeated steps that launch.py logged after the first `log_size` bytes."""
        deadline = time.monotonic() + PATIENCE_S
        while time.monotonic() < deadline:
            text = self.log.read_bytes()[log_size:].decode(errors="replace")
            if counts := re.findall(r"continuing at step [\d,]+ and repeating (\d+) steps?", text):
                return list(map(int, counts))
            time.sleep(0.1)
        raise RuntimeError(f"launch.py did not report the change of a host. See the cause in {self.log}.")

    def stop(self) -> None:
        """Stop the job with SIGTERM, so that it saves a checkpoint and ends."""
        for launcher in psutil.Process(self.process.pid).children():  # child processes of nsenter
            launcher.terminate()
        self.process.wait()


def disturb(job: Job, minutes: float, seed: int) -> list[Event]:
    """Disturb the job until the time has passed and a host has joined, and then stop it."""
    changes, events = plan(seed, cluster.names()[:HOSTS]), []
    away: dict[str, str] = {}
    deadline = time.monotonic() + 60 * minutes
    try:
        job.wait(HOSTS, 1)
        for change in changes:
            job.wait(None, change.gap)
            if time.monotonic() > deadline and any(event.kind == "join" for event in events):
                break
            present = HOSTS - len(away) + (1 if change.kind == "join" else -1)
            events.append(job.change(change, away, present))
            say(str(events[-1]))
    finally:
        job.stop()
    return events


# --- Checks


def uninterrupted(folder: Path, words: list[str]) -> dict[int, dict[str, Any]]:
    """Train on this machine, and return the log lines that contain a training loss, by step."""
    say(f"uninterrupted: {folder}")
    command = [sys.executable, *words, "--output_dir", str(folder)]
    with open(folder.with_suffix(".log"), "wb") as log:
        subprocess.run(command, check=True, cwd=ROOT, stdout=log, stderr=log)
    return trained(folder)


def trained(folder: Path) -> dict[int, dict[str, Any]]:
    """Return the lines in a run's log that contain a training loss, by step."""
    return {line["step"]: line for line in read_lines(folder / "metrics.jsonl") if "train/loss" in line}


def difference(lines: dict[int, dict], expected: dict[int, dict], steps: range) -> float:
    """Return the largest absolute difference between the training losses of two runs in these steps."""
    return max(abs(lines[step]["train/loss"] - expected[step]["train/loss"]) for step in steps)


def examine(job: Job, events: list[Event], words: list[str], strategy: str) -> dict[str, Any]:
    """Compare a disturbed run with uninterrupted runs and with replays, and return its table row."""
    folder, lines = job.folder.parent, trained(job.folder)
    last = max(lines)
    is_exact, config = strategy in EXACT, STRATEGIES[strategy]
    straight = [*words, *RECIPE, "--checkpoint_every", "epoch", "--max_steps", str(last)]
    launcher = ["-m", "accelerate.commands.launch", "--config_file", f"accelerate_configs/{config}.yaml"]
    four = {} if is_exact else uninterrupted(folder / "four", [*launcher, *straight])
    ends = [step for step, _ in job.resumed[1:]] + [last]

    def replay(number: int) -> float:
        """Replay up to REPLAYED steps after a change in a single process. Return the largest difference."""
        (step, checkpoint), end = job.resumed[number], min(ends[number], job.resumed[number][0] + REPLAYED)
        alone = [*words, *RECIPE, "--resume", str(checkpoint), "--max_steps", str(end)]
        replayed_lines = uninterrupted(folder / f"replay{number}", alone)
        return difference(lines, replayed_lines, range(step + 1, end + 1))

    with ThreadPoolExecutor(os.cpu_count()) as pool:  # use one thread for each replay
        straight_one = pool.submit(uninterrupted, folder / "one", straight)
        replayed = [number for number, (step, _) in enumerate(job.resumed) if ends[number] > step]
        replays = list(pool.map(replay, replayed)) if strategy == "zero2" else []
        one = straight_one.result()
    steps = range(1, last + 1)
    signalled = [event.lost for event in events if event.kind in ("leave", "join")]
    killed = [event.lost for event in events if event.kind in ("cut", "kill")]
    ids = [(path / "samples.jsonl").read_text() for path in (job.folder, folder / "one")]
    checkpoints = [path / "checkpoints" / f"step_{last:08d}" for path in (job.folder, folder / "one")]
    weights = [(path / "model.safetensors").read_bytes() for path in checkpoints if path.exists()]
    return {
        "steps": last,
        "changes": ", ".join(event.kind for event in events),
        "replays": len(replayed),
        "ids": ids[0] == ids[1],
        "lr": all(lines[step]["train/lr"] == one[step]["train/lr"] for step in steps),
        "replay": max(replays, default=0.0),
        "whole": difference(lines, one, steps),
        "bound": 0.0 if is_exact else 2 * difference(four, one, steps),
        "weights": len(weights) == 2 and weights[0] == weights[1],
        "lost_signalled": max(signalled, default=0),
        "lost_killed": max(killed, default=0),
        **seconds(events),
    }


def seconds(events: list[Event]) -> dict[str, float]:
    """Return the median seconds until the first step after a host is lost, leaves or joins."""
    groups = {"loss_s": ("cut", "kill"), "leave_s": ("leave",), "join_s": ("join",)}
    times = {
        name: [event.seconds for event in events if event.kind in kinds] for name, kinds in groups.items()
    }
    return {name: statistics.median(values) for name, values in times.items() if values}


def holds(row: dict[str, Any]) -> bool:
    """Return True if the training run was disturbed and exceeds no bound."""
    is_same = row["ids"] and row["lr"] and row["replay"] <= REPLAY_BOUND and row["whole"] <= row["bound"]
    is_same &= row["weights"] or row["bound"] > 0
    is_lost = row["lost_signalled"] > 0 or row["lost_killed"] > CHECKPOINT_EVERY
    return row["replays"] > 0 and is_same and not is_lost


# --- Plot


def draw(file: Path, folder: Path) -> None:
    """Plot the losses of the disturbed CNN-A and, if the folder contains one, of a plain script's run.

    A second panel shows how much each run differs from the corresponding uninterrupted run, and how much two
    uninterrupted runs, with one and with four processes, differ from each other.
    """
    exact, rounded, plain = (folder / name for name in ("cnn_a-ddp", "cnn_a-rounded", "plain"))
    pairs = {
        "with --deterministic": (exact / "run", exact / "one"),
        "without --deterministic": (rounded / "run", rounded / "one"),
        "undisturbed, 1 and 4 processes": (rounded / "four", rounded / "one"),
    }
    pairs |= {"plain script": (plain / "run", plain / "four")} if plain.exists() else {}
    runs = {name: [losses(path) for path in pair] for name, pair in pairs.items()}
    distances, row = Panel("step", "loss difference (0 is drawn at 1e-9)", has_log_scale=True), []
    for name, (disturbed, straight) in runs.items():
        gaps = [max(abs(a - b), 1e-9) for a, b in zip(disturbed, straight, strict=False)]
        distances.curves[name] = (range(1, len(gaps) + 1), gaps)
        if name in ("with --deterministic", "plain script" if plain.exists() else "without --deterministic"):
            curves = {"disturbed": disturbed[: len(gaps)], "uninterrupted": straight[: len(gaps)]}
            row.append(Panel("step", f"loss, {name}", {label: means(c) for label, c in curves.items()}))
    draw_panels(file, [[*row, distances]], "CNN-A with disturbed hosts, compared with uninterrupted runs")


def losses(folder: Path) -> list[float]:
    """Return a run's losses in step order, with the last loss of each repeated step."""
    lines = trained(folder)
    return [lines[step]["train/loss"] for step in sorted(lines)]


def means(values: list[float]) -> tuple[range, list[float]]:
    """Return the steps from MEAN_OF on, and the mean of the last MEAN_OF losses at each step."""
    steps = range(MEAN_OF, len(values) + 1)
    return steps, [statistics.fmean(values[step - MEAN_OF : step]) for step in steps]


# --- Command


def main() -> int:
    parser = command_parser(__doc__, "python -m benchmarks.elastic_drill [flags]")
    add = parser.add_argument
    add("--scripts", nargs="+", choices=SCRIPTS, default=list(SCRIPTS), help="models to train (default: all)")
    add(
        "--strategies",
        nargs="+",
        choices=STRATEGIES,
        default=["ddp", "fsdp", "zero2"],
        help="strategies to train with (default: ddp fsdp zero2)",
    )
    add("--draw", type=Path, metavar="PATH", help="PNG file for a plot of CNN-A's runs")
    add(
        "--minutes",
        type=float,
        default=20,
        metavar="N",
        help="total minutes of all training runs (default: %(default)s)",
    )
    add(
        "--seed",
        type=int,
        default=0,
        metavar="N",
        help="seed of the first run's changes of hosts (default: %(default)s)",
    )
    add("--data", default="digits", metavar="DATA", help="--data flag of the scripts (default: %(default)s)")
    add("--epochs", type=int, default=1000, metavar="N", help="epochs in the schedule (default: %(default)s)")
    rates = ", ".join(f"{lr:g} for {script}" for script, lr in LR.items())
    add(
        "--lr",
        type=float,
        metavar="RATE",
        help=f"learning rate (default: {EXACT_LR:g} with --deterministic, otherwise {rates})",
    )
    add(
        "--folder",
        type=Path,
        default=Path("runs/elastic_drill"),
        metavar="PATH",
        help="folder for the run folders (default: %(default)s)",
    )
    flags = parser.parse_args()
    if flags.folder.exists():
        parser.error(f"{flags.folder} already exists. Remove {flags.folder} or pass a different --folder.")
    os.environ["OMP_NUM_THREADS"] = "1"
    prepare_data(flags.data, Path("~/.cache/train-images").expanduser())
    rows = []
    flags.minutes /= len(flags.scripts) * len(flags.strategies)  # convert to minutes per training run
    for number, (script, strategy) in enumerate(itertools.product(flags.scripts, flags.strategies)):
        rows.append(drill_training(script, strategy, flags.seed + number, flags))
        show(rows)
    if flags.draw:
        draw(flags.draw, flags.folder)
    return 0 if all(map(holds, rows)) else 1


def drill_training(script: str, strategy: str, seed: int, flags: argparse.Namespace) -> dict[str, Any]:
    """Disturb and check one training run, and return its table row."""
    folder = flags.folder.resolve() / f"{script}-{strategy}"
    words = [*SCRIPTS[script], "--data", flags.data, "--epochs", str(flags.epochs)]
    is_exact = strategy in EXACT
    words += ["--lr", str(flags.lr or (EXACT_LR if is_exact else LR[script]))]
    words += ["--deterministic"] if is_exact else []
    cluster.up(HOSTS + 1, 1, spare=1)
    try:
        job = Job(folder / "run", words, STRATEGIES[strategy])
        events = disturb(job, flags.minutes, seed)
    finally:
        cluster.down()
    row = {"training": f"{script} {strategy}", "seed": seed, **examine(job, events, words, strategy)}
    text = json.dumps({"row": row, "events": list(map(asdict, events))}, indent=2)
    (folder / "drill.json").write_text(text)
    return row


def show(rows: list[dict[str, Any]]) -> None:
    """Print a Markdown table with one row per training run."""
    names = list(dict.fromkeys(itertools.chain(*rows)))
    values = [[*map(row.get, names), holds(row)] for row in rows]
    cells = [[f"{v:.2g}" if isinstance(v, float) else v for v in row] for row in values]
    print(markdown_table(cells, [*names, "holds"], numbers=False))


if __name__ == "__main__":
    sys.exit(main())
