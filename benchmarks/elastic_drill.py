"""A random fire drill on four virtual hosts: hosts leave and join, and the training must stay the same.

    python -m benchmarks.elastic_drill --minutes 20
    python -m benchmarks.elastic_drill --scripts cnn_a --strategies ddp rounded --lr 3e-3 --draw drill.png

Hosts are cut off, killed, told to leave (SIGTERM, and the machine is gone after it), and join again, in an
order that follows from --seed: the second training's is that of the next seed, and so on.
launch.py --min_hosts runs on a fifth host. Then, in fp32:

ids, lr   the sample ids and learning rates of all steps are those of an uninterrupted process
whole     with --deterministic (DDP, FSDP2) each loss is that process's, bit for bit, and so are the weights
          at the end. Without it (ZeRO-2, and DDP as `rounded`) losses differ by no more than twice what those
          of an uninterrupted run on four processes do
replay    under ZeRO-2 the losses of the 50 steps after each change are within 1e-5 of a single process that
          begins at that change's checkpoint
lost      no step is repeated after a leave or a join, at most a checkpoint interval after a cut or kill

Needs root, and what cluster/virtual_cluster.py needs.
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
from onecurve.run.plots import Panel, panels
from onecurve.system.cli import command_parser
from onecurve.system.files import read_lines
from onecurve.system.paths import ROOT
from tools.logbook.markdown import markdown_table

HOSTS, BATCH, PER_DEVICE = 4, 96, 8  # 12 micro-batches a step: for 1, 2, 3 and 4 hosts
CHECKPOINT_EVERY = 64
REPLAYED = 50  # steps after each change
GAP = (60, 160)  # steps between two changes
PATIENCE_S = 240  # without a new step, also after a change
REPLAY_BOUND = 1e-5
DROPOUT = ("--dropout", "0.1", "--mixup", "0.8")
SCRIPTS = {
    "cnn_a": ["train_cnn_a.py"],
    "vit": ["train_vit.py", "--model", "test_vit", "--image_size", "32", "--patch_size", "8", *DROPOUT],
}
# Without --deterministic rounding now and then moves an activation of CNN-A over ReLU's edge. From there on
# losses differ, in proportion to the learning rate: at 1e-5 one of 33 replays left REPLAY_BOUND. The ViT's
# GELU has no edge.
LR = {"cnn_a": 3e-6, "vit": 1e-5}
EXACT_LR = 3e-3
STRATEGIES = {"ddp": "ddp_4gpu", "fsdp": "fsdp_4gpu", "zero2": "zero2_4gpu", "rounded": "ddp_4gpu"}
EXACT = {"ddp", "fsdp"}  # trained with --deterministic
MEAN_OF = 20  # steps, in the plot
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
    kind: str  # cut, kill, leave or join
    host: str
    gap: int  # steps after the last change's first one


def plan(seed: int, hosts: list[str]) -> Iterator[Change]:
    """Endless changes of these hosts; one or more of them is there at any time."""
    draw = random.Random(seed)
    present, away = list(hosts), []
    while True:
        joins = away and (len(present) == 1 or draw.random() < 0.5)
        host = draw.choice(sorted(away if joins else present))
        kind = "join" if joins else draw.choice([*LOSSES])
        source, target = (away, present) if joins else (present, away)
        source.remove(host)
        target.append(host)
        yield Change(kind, host, draw.randint(*GAP))


@dataclass
class Event:
    """A change as it came about."""

    kind: str
    host: str
    processes: int  # after it
    step: int  # the newest before it
    seconds: float  # until the first step with that number of processes
    lost: int = 0  # steps that were trained again


# --- The jobs


class Job:
    """launch.py --min_hosts, on the last host, in a folder that all share. Keeps each change's checkpoint."""

    def __init__(self, folder: Path, words: list[str], config: str):
        self.folder, self.log = folder, folder.with_suffix(".log")
        folder.mkdir(parents=True)
        launch = ["launch.py", "--hostfile", "/etc/hostfile", "--min_hosts", "1", "--env", "OMP_NUM_THREADS"]
        launch += ["--config_file", f"accelerate_configs/{config}.yaml", "--log_dir", f"{folder}-logs"]
        self.resumed: list[tuple[int, Path]] = []  # step and copy of the checkpoint
        words = [sys.executable, *launch, *words, *RECIPE, *ELASTIC, "--output_dir", str(folder)]
        command = cluster.inside(cluster.names()[-1], words, ROOT)
        with open(self.log, "ab") as log:
            self.process = subprocess.Popen(command, stdout=log, stderr=log, start_new_session=True)

    def is_running(self) -> bool:
        return self.process.poll() is None

    def wait(self, processes: int | None, steps: int) -> int:
        """Waits for so many new steps, with so many processes. Returns the newest step."""
        deadline, newest, first = time.monotonic() + PATIENCE_S, (0, 0), None
        while self.is_running() and time.monotonic() < deadline:
            if (found := self.newest()) != newest:
                deadline, newest = time.monotonic() + PATIENCE_S, found
            now, step = found
            if step and processes in (now, None):
                first = step if first is None else min(first, step)
                if step - first >= steps:
                    return step
            time.sleep(0.1)
        state = "does not go on" if self.is_running() else "ended"
        raise RuntimeError(f"the job {state}: see {self.log}")

    def newest(self) -> tuple[int, int]:
        """The number of processes and the step of the newest line with a loss; zeros when there is none."""
        self._copy_checkpoints()
        lines, processes = read_lines(self.folder / "metrics.jsonl"), HOSTS
        changes = [i for i, line in enumerate(lines) if "processes" in line]
        if changes:
            processes, lines = lines[changes[-1]]["processes"], lines[changes[-1] :]
        return processes, max((line["step"] for line in lines if "train/loss" in line), default=0)

    def _copy_checkpoints(self) -> None:
        found = re.findall(r"continuing at step ([\d,]+) with (\S+)", self.log.read_text(errors="replace"))
        for number, name in found[len(self.resumed) :]:
            copy = self.folder.with_name("checkpoints") / f"{len(self.resumed)}"
            shutil.copytree(name, copy / Path(name).name)
            self.resumed.append((int(number.replace(",", "")), copy / Path(name).name))

    def change(self, change: Change, away: dict[str, str], present: int) -> Event:
        told = self.log.stat().st_size
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
        event.lost = max(self._repeated(told))
        return event

    def _repeated(self, told: int) -> list[int]:
        """Steps that launch.py says are repeated, in the log from byte `told` on."""
        deadline = time.monotonic() + PATIENCE_S
        while time.monotonic() < deadline:
            text = self.log.read_bytes()[told:].decode(errors="replace")
            if found := re.findall(r"continuing at step [\d,]+; (\d+) steps? to repeat", text):
                return list(map(int, found))
            time.sleep(0.1)
        raise RuntimeError(f"launch.py does not tell of a change: see {self.log}")

    def stop(self) -> None:
        """Has it save and end."""
        for launcher in psutil.Process(self.process.pid).children():  # of nsenter
            launcher.terminate()
        self.process.wait()


def disturb(job: Job, minutes: float, seed: int) -> list[Event]:
    """Runs the job through changes until the time is over and a host has joined, and stops it."""
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


# --- What must hold


def uninterrupted(folder: Path, words: list[str]) -> dict[int, dict[str, Any]]:
    """The lines of a run on this machine, by step."""
    say(f"uninterrupted: {folder}")
    command = [sys.executable, *words, "--output_dir", str(folder)]
    with open(folder.with_suffix(".log"), "wb") as log:
        subprocess.run(command, check=True, cwd=ROOT, stdout=log, stderr=log)
    return trained(folder)


def trained(folder: Path) -> dict[int, dict[str, Any]]:
    """The lines of a run with a training loss, by step."""
    return {line["step"]: line for line in read_lines(folder / "metrics.jsonl") if "train/loss" in line}


def difference(ours: dict[int, dict], theirs: dict[int, dict], steps: range) -> float:
    return max(abs(ours[step]["train/loss"] - theirs[step]["train/loss"]) for step in steps)


def examine(job: Job, events: list[Event], words: list[str], strategy: str) -> dict[str, Any]:
    """Compares the run with uninterrupted ones and with replays. Returns the table's row."""
    folder, ours = job.folder.parent, trained(job.folder)
    last = max(ours)
    is_exact, config = strategy in EXACT, STRATEGIES[strategy]
    straight = [*words, *RECIPE, "--checkpoint_every", "epoch", "--max_steps", str(last)]
    launcher = ["-m", "accelerate.commands.launch", "--config_file", f"accelerate_configs/{config}.yaml"]
    four = {} if is_exact else uninterrupted(folder / "four", [*launcher, *straight])
    ends = [step for step, _ in job.resumed[1:]] + [last]

    def replay(number: int) -> float:
        """Trains up to REPLAYED steps after a change on one process. Returns the largest difference."""
        (step, checkpoint), end = job.resumed[number], min(ends[number], job.resumed[number][0] + REPLAYED)
        alone = [*words, *RECIPE, "--resume", str(checkpoint), "--max_steps", str(end)]
        found = uninterrupted(folder / f"replay{number}", alone)
        return difference(ours, found, range(step + 1, end + 1))

    with ThreadPoolExecutor(os.cpu_count()) as pool:  # each has one thread
        straight_one = pool.submit(uninterrupted, folder / "one", straight)
        replayed = [number for number, (step, _) in enumerate(job.resumed) if ends[number] > step]
        replays = list(pool.map(replay, replayed)) if strategy == "zero2" else []
        one = straight_one.result()
    steps = range(1, last + 1)
    signalled = [event.lost for event in events if event.kind in ("leave", "join")]
    killed = [event.lost for event in events if event.kind in ("cut", "kill")]
    ids = [(path / "samples.jsonl").read_text() for path in (job.folder, folder / "one")]
    ends_in = [path / "checkpoints" / f"step_{last:08d}" for path in (job.folder, folder / "one")]
    weights = [(path / "model.safetensors").read_bytes() for path in ends_in if path.exists()]
    return {
        "steps": last,
        "changes": ", ".join(event.kind for event in events),
        "replays": len(replayed),
        "ids": ids[0] == ids[1],
        "lr": all(ours[step]["train/lr"] == one[step]["train/lr"] for step in steps),
        "replay": max(replays, default=0.0),
        "whole": difference(ours, one, steps),
        "bound": 0.0 if is_exact else 2 * difference(four, one, steps),
        "weights": len(weights) == 2 and weights[0] == weights[1],
        "lost_signalled": max(signalled, default=0),
        "lost_killed": max(killed, default=0),
        **seconds(events),
    }


def seconds(events: list[Event]) -> dict[str, float]:
    """Medians, from a loss and from a join to the first step after it."""
    kinds = {"loss_s": ("cut", "kill"), "leave_s": ("leave",), "join_s": ("join",)}
    found = {name: [event.seconds for event in events if event.kind in kind] for name, kind in kinds.items()}
    return {name: statistics.median(values) for name, values in found.items() if values}


def holds(row: dict[str, Any]) -> bool:
    """True if the training was disturbed, and no bound is broken."""
    is_same = row["ids"] and row["lr"] and row["replay"] <= REPLAY_BOUND and row["whole"] <= row["bound"]
    is_same &= row["weights"] or row["bound"] > 0
    is_lost = row["lost_signalled"] > 0 or row["lost_killed"] > CHECKPOINT_EVERY
    return row["replays"] > 0 and is_same and not is_lost


# --- The picture


def draw(file: Path, folder: Path) -> None:
    """Losses of the disturbed CNN-A, of a plain script where folder has one, and distances of all from their
    uninterrupted runs, with the distance of two uninterrupted ones on one and on four processes."""
    ours, rounded, plain = (folder / name for name in ("cnn_a-ddp", "cnn_a-rounded", "plain"))
    pairs = {
        "with --deterministic": (ours / "run", ours / "one"),
        "without it": (rounded / "run", rounded / "one"),
        "undisturbed, on 1 and on 4": (rounded / "four", rounded / "one"),
    }
    pairs |= {"plain script": (plain / "run", plain / "four")} if plain.exists() else {}
    runs = {name: [losses(path) for path in pair] for name, pair in pairs.items()}
    apart, row = Panel("step", "distance (0 is drawn at 1e-9)", is_log=True), []
    for name, (disturbed, straight) in runs.items():
        gaps = [max(abs(a - b), 1e-9) for a, b in zip(disturbed, straight, strict=False)]
        apart.curves[name] = (range(1, len(gaps) + 1), gaps)
        if name in ("with --deterministic", "plain script" if plain.exists() else "without it"):
            curves = {"drilled": means(disturbed[: len(gaps)]), "uninterrupted": means(straight[: len(gaps)])}
            row.append(Panel("step", f"loss, {name}", curves))
    panels(file, [[*row, apart]], "CNN-A while hosts are lost and join, beside the uninterrupted run")


def losses(folder: Path) -> list[float]:
    """By step; of steps that were trained again the last ones."""
    lines = trained(folder)
    return [lines[step]["train/loss"] for step in sorted(lines)]


def means(values: list[float]) -> tuple[range, list[float]]:
    """Steps, and the means of the MEAN_OF values up to each."""
    steps = range(MEAN_OF, len(values) + 1)
    return steps, [statistics.fmean(values[step - MEAN_OF : step]) for step in steps]


# --- Entry


def main() -> int:
    parser = command_parser(__doc__)
    add = parser.add_argument
    add("--scripts", nargs="+", choices=SCRIPTS, default=list(SCRIPTS))
    add("--strategies", nargs="+", choices=STRATEGIES, default=["ddp", "fsdp", "zero2"])
    add("--draw", type=Path, metavar="PNG", help="CNN-A under ddp and rounded")
    add("--minutes", type=float, default=20, help="of all trainings (default: %(default)s)")
    add("--seed", type=int, default=0, help="of the first training's changes (default: %(default)s)")
    add("--data", default="digits", help="as the scripts' (default: %(default)s)")
    add("--epochs", type=int, default=1000, help="of the schedule (default: %(default)s)")
    usual = ", ".join(f"{lr:g} of {script}" for script, lr in LR.items())
    add("--lr", type=float, help=f"learning rate (default: {EXACT_LR:g}; without --deterministic {usual})")
    add("--folder", type=Path, default=Path("runs/elastic_drill"), help="for the runs")
    flags = parser.parse_args()
    if flags.folder.exists():
        parser.error(f"{flags.folder} exists: remove it, or give another --folder")
    os.environ["OMP_NUM_THREADS"] = "1"
    prepare_data(flags.data, Path("~/.cache/train-images").expanduser())
    rows = []
    flags.minutes /= len(flags.scripts) * len(flags.strategies)  # of each training
    for number, (script, strategy) in enumerate(itertools.product(flags.scripts, flags.strategies)):
        rows.append(drill_ours(script, strategy, flags.seed + number, flags))
        show(rows)
    if flags.draw:
        draw(flags.draw, flags.folder)
    return 0 if all(map(holds, rows)) else 1


def drill_ours(script: str, strategy: str, seed: int, flags: argparse.Namespace) -> dict[str, Any]:
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
    """Prints Markdown, a row for each training."""
    names = list(dict.fromkeys(itertools.chain(*rows)))
    values = [[*map(row.get, names), holds(row)] for row in rows]
    shown = [[f"{v:.2g}" if isinstance(v, float) else v for v in cells] for cells in values]
    print(markdown_table(shown, [*names, "holds"], numbers=False))


if __name__ == "__main__":
    sys.exit(main())
