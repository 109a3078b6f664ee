"""Replays steps of a finished run, and checks its log, recipe and checkpoints against them.

    python verify.py runs/train_cnn_a/single_128_10_1_1
    python verify.py runs/train_vit/fsdp_512_100_1_4 --config_file accelerate_configs/ddp_2gpu.yaml
    python verify.py runs/train_vit/fsdp_512_100_1_4 --sample 5 --steps 100

A replay begins at step 0 or at a checkpoint that the run has kept (--keep_every keeps more of them), and ends
with the first line of the log after --steps steps. It is a training with the run's recipe in a temporary
folder on this machine, under any strategy and number of processes. Its losses, and its weights at the next
checkpoint, must equal the run's within bounds, its learning rates exactly. --sample replays only some
intervals, chosen at random.

It prints how much of the run was replayed; other steps are not verified. The outcome is added to
`verified.json` in the run's folder, which the run's page shows. Exit status 1 if anything differs.

The bound on the loss is 1e-4 after the first step in fp32, and grows tenfold every 25 steps up to 0.05, as
rounding errors grow; in half precision it is 0.05. So frequent lines (--log_every) and short replays verify
most. On a CPU, one process replays a run of one process bit by bit.
"""

import argparse
import json
import random
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path

from common.checkpoint.format import MODEL_FILE, Damaged, TensorFile, step_name, steps_in, verify
from common.recipe import recipe_part
from common.report.record import VERIFIED, RunRecord
from common.script import load_script, own_script, recipe_class
from common.system.cli import command_parser, run_command
from common.system.files import read_json, write_json
from common.system.paths import ROOT, shortest
from common.system.text import printable, some_of

# Rounding depends on the number of processes, the strategy and the device, and training amplifies it.
# Differences measured on CPUs: CIFAR-10, batch 96, 300 steps, 100 from each of three checkpoints. One process
# against one: 0. 4 processes against one in fp32: the small ViT's loss 5e-7; CNN-A's 2e-4 after 30 steps and
# 5e-3 after 100, its weights 0.06, as max pooling or a ReLU takes another branch. bf16 against fp32: 9e-5
# (ViT), 7e-3 (CNN-A). Not yet measured on a GPU.
LOSS_BOUND, WEIGHTS_BOUND = 1e-4, 1e-3  # for the loss and a weight, after the first step
TENFOLD_STEPS = 25  # in which the bounds grow tenfold
MOST_LOSS, MOST_WEIGHTS = 0.05, 0.1  # bounds in half precision, and maximum in fp32
DRAWN_ON_DEVICE = ("dropout", "drop_path")  # a GPU's random numbers differ from a CPU's
SHOWN = 15  # last lines of a failed replay
# Settings outside of the recipe that the run's numbers may depend on.
KEPT = ("log_every", "deterministic", "image_column", "label_column", "data_root", "workers")


@dataclass(frozen=True)
class Interval:
    """The steps start + 1 ... end. checkpoint: the first kept one in it, whose weights are compared."""

    start: int
    end: int
    checkpoint: int | None

    def __str__(self) -> str:
        return f"steps {self.start:,}-{self.end:,}"


@dataclass
class Outcome:
    interval: Interval
    findings: list[str] = field(default_factory=list)
    loss: float = 0.0  # largest difference of the loss
    bound: float = 0.0  # largest bound on the loss
    weights: float | None = None  # largest difference of a weight


def main() -> int:
    flags = parse(sys.argv[1:])
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    run = Run(flags)
    outcomes = []
    for interval in run.chosen:
        print(f"{interval} of {run.last:,}: replaying", flush=True)
        outcomes.append(run.replay(interval))
        print(run.said(outcomes[-1]), flush=True)
    return run.conclude(outcomes)


def parse(argv: list[str]) -> argparse.Namespace:
    parser = command_parser(__doc__)
    parser.add_argument("run", type=Path, metavar="RUN", help="the folder of a finished run")
    parser.add_argument("--config_file", type=Path, help="one of accelerate_configs/; unset: one process")
    parser.add_argument("--steps", type=int, default=20, help="minimum length of a replay (default: 20)")
    parser.add_argument("--sample", type=int, help="replay this many intervals, at random; unset: all")
    parser.add_argument("--seed", type=int, help="seed of that choice; unset: a new one, which is printed")
    parser.add_argument("--data", help="where the run's data is now; unset: where it was")
    parser.add_argument("--per_device_batch_size", type=int, help="unset: the run's")
    parser.add_argument("--mixed_precision", choices=("no", "bf16", "fp16"), help="unset: the run's")
    parser.add_argument("--cache_dir", help="as the train scripts'")
    flags = parser.parse_args(argv)
    for name in ("steps", "sample", "per_device_batch_size"):
        if (value := getattr(flags, name)) is not None and value < 1:
            parser.error(f"--{name} {value}: must be at least 1")
    return flags


class Run:
    """The run and the intervals to replay. ValueError for a run that can't be replayed."""

    def __init__(self, flags: argparse.Namespace):
        self.flags, self.folder = flags, flags.run
        self.record = record = RunRecord(flags.run)
        status, about = record.facts["status"], record.about
        if status != "finished":
            raise ValueError(f"{flags.run} is not finished ({status}): the same command as before ends it")
        self.script = own_script(about.get("script"))
        self.recipe, self.lines = (
            record.recipe,
            {line["step"]: line for line in record.metrics if {"train/loss", "train/lr"} <= set(line)},
        )
        if not self.recipe or not self.lines:
            raise ValueError(f"{flags.run} has no recipe, or no losses: {some_of(record.problems)}")
        self.last = max(self.lines)
        self.checkpoints = flags.run / "checkpoints"
        self.kept = sorted(steps_in(self.checkpoints))
        self.precision = flags.mixed_precision or about.get("mixed_precision", "no")
        is_half = {self.precision, about.get("mixed_precision", "no")} != {"no"}
        self.is_half = is_half
        self.device = "cuda" if has_gpu(flags.config_file) else "cpu"
        self._check_device(about.get("devices") or [""])
        self.chosen = self._choose(self._intervals())

    def _check_device(self, devices: list[str]) -> None:
        theirs = "cpu" if devices[0].startswith("CPU") else "cuda"
        drawn = [name for name in DRAWN_ON_DEVICE if self.recipe.get(name)]
        if drawn and theirs != self.device:
            raise ValueError(
                f"the run's --{drawn[0]} was drawn on {printable(devices[0])}, which draws other numbers than"
                " this device: verify it on one of its kind"
            )

    def _intervals(self) -> list[Interval]:
        """One from step 0 and from each kept checkpoint, up to a line of the log, without overlaps."""
        found: list[Interval] = []
        for start in (0, *self.kept):
            lines = [step for step in sorted(self.lines) if step > start]
            if not lines or (found and start < found[-1].end):
                continue
            end = next((step for step in lines if step >= start + self.flags.steps), lines[-1])
            inside = [step for step in self.kept if start < step <= end]
            found.append(Interval(start, end, inside[0] if inside else None))
        return found

    def _choose(self, intervals: list[Interval]) -> list[Interval]:
        if self.flags.sample is None or self.flags.sample >= len(intervals):
            return intervals
        seed = random.randrange(2**32) if self.flags.seed is None else self.flags.seed
        print(f"--sample {self.flags.sample} of {len(intervals)} intervals by --seed {seed}", flush=True)
        return sorted(random.Random(seed).sample(intervals, self.flags.sample), key=lambda i: i.start)

    # --- One interval

    def replay(self, interval: Interval) -> Outcome:
        """Trains the interval's steps and compares them with the run."""
        outcome = Outcome(interval)
        if interval.start and not self._check_checkpoint(interval.start, outcome):
            return outcome
        with tempfile.TemporaryDirectory(prefix="verify-") as scratch:
            folder = Path(scratch) / "run"
            problem = self._train(interval, folder)
            if problem:
                outcome.findings.append(problem)
                return outcome
            ours = RunRecord(folder)
            source = self.record.about.get("source")
            if source and ours.about.get("source") != source:
                outcome.findings.append(f"the data is {ours.about.get('source')}, the page's was {source}")
            self._compare_lines(ours, outcome)
            if interval.checkpoint is not None and self._check_checkpoint(interval.checkpoint, outcome):
                self._compare_weights(folder / "checkpoints", interval.checkpoint, outcome)
        return outcome

    def _check_checkpoint(self, step: int, outcome: Outcome) -> bool:
        """True if the checkpoint is intact and of the page's recipe."""
        try:
            found = verify(self.checkpoints / step_name(step))
        except Damaged as error:
            outcome.findings.append(f"the checkpoint of step {step:,}: {error}")
            return False
        theirs = found.manifest.get("recipe", {})
        changed = [name for name in theirs if theirs[name] != self.recipe.get(name)]
        if changed:
            shown = ", ".join(f"{name} {theirs[name]}, not {self.recipe.get(name)}" for name in changed)
            outcome.findings.append(f"the checkpoint of step {step:,} was trained with {shown}")
        return not changed

    def _train(self, interval: Interval, folder: Path) -> str:
        """Runs the train script. Returns the reason if it failed, else an empty string."""
        words = [
            *self._launcher(),
            str(self.script),
            "--config",
            self._config(folder),
            "--output_dir",
            folder,
        ]
        words += ["--max_steps", interval.end, "--trackers", "none", "--telemetry_s", "0"]
        words += ["--checkpoint_every", interval.checkpoint or 10**9, "--mixed_precision", self.precision]
        if interval.start:
            words += ["--resume", self.checkpoints / step_name(interval.start)]
        if self.flags.cache_dir:
            words += ["--cache_dir", self.flags.cache_dir]
        if self.flags.data:
            words += ["--data", self.flags.data, "--allow_changed", "data"]
        done = subprocess.run(
            [str(word) for word in words],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
        )
        if done.returncode == 0:
            return ""
        lines = done.stdout.splitlines()
        print("\n".join(lines[-SHOWN:]), file=sys.stderr)
        return f"its replay failed: {next((line for line in reversed(lines) if 'error' in line), lines[-1])}"

    def _launcher(self) -> list[str]:
        if self.flags.config_file is None:
            return [sys.executable]
        return [
            sys.executable,
            "-m",
            "accelerate.commands.launch",
            "--config_file",
            str(self.flags.config_file),
        ]

    def _config(self, folder: Path) -> Path:
        """A file for --config with the run's recipe and the settings that its numbers depend on."""
        kind = recipe_class(load_script(self.script))
        names = (*recipe_part(kind()), *KEPT)
        values = {name: self.recipe[name] for name in names if self.recipe.get(name) is not None}
        size = self.flags.per_device_batch_size or self.record.facts.get("per_device_batch_size")
        file = folder.with_suffix(".json")
        file.write_text(json.dumps(values | {"per_device_batch_size": size}))
        return file

    def _compare_lines(self, ours: RunRecord, outcome: Outcome) -> None:
        """Compares the losses and learning rates of the interval's lines."""
        found = {line["step"]: line for line in ours.metrics if "train/loss" in line}
        steps = [s for s in self.lines if outcome.interval.start < s <= outcome.interval.end]
        for step in sorted(steps):
            if step not in found:
                outcome.findings.append(f"the replay has no line of step {step:,}")
                continue
            mine, theirs = found[step], self.lines[step]
            difference = abs(mine["train/loss"] - theirs["train/loss"])
            outcome.loss = max(outcome.loss, difference)
            bound = self.bound(step - outcome.interval.start, LOSS_BOUND, MOST_LOSS)
            outcome.bound = max(outcome.bound, bound)
            if not difference <= bound:
                outcome.findings.append(
                    f"the loss of step {step:,} is {mine['train/loss']:.6g}, in the log"
                    f" {theirs['train/loss']:.6g}: they differ by {difference:.1e}, bound {bound:.1e}"
                )
            if mine["train/lr"] != theirs["train/lr"]:
                outcome.findings.append(
                    f"the learning rate of step {step:,} is {mine['train/lr']:g}, in the log"
                    f" {theirs['train/lr']:g}"
                )

    def _compare_weights(self, checkpoints: Path, step: int, outcome: Outcome) -> None:
        parents = checkpoints, self.checkpoints
        mine, theirs = (TensorFile(parent / step_name(step) / MODEL_FILE) for parent in parents)
        if mine.shapes() != theirs.shapes():
            outcome.findings.append(f"the checkpoint of step {step:,} has other tensors than the model")
            return
        differences = {
            name: float((mine.tensor(name).double() - theirs.tensor(name).double()).abs().max())
            for name in mine.shapes()
        }
        worst = max(differences, key=lambda name: differences[name])
        outcome.weights = differences[worst]
        bound = self.bound(step - outcome.interval.start, WEIGHTS_BOUND, MOST_WEIGHTS)
        if not differences[worst] <= bound:
            outcome.findings.append(
                f"{worst} in the checkpoint of step {step:,} differs by {differences[worst]:.1e}, bound"
                f" {bound:.1e}"
            )

    def bound(self, steps: int, first: float, most: float) -> float:
        return most if self.is_half else min(most, first * 10 ** (steps / TENFOLD_STEPS))

    # --- Output

    def said(self, outcome: Outcome) -> str:
        where = f"{outcome.interval} of {self.last:,}"
        if outcome.findings:
            return "\n".join(f"{where}: {finding}" for finding in outcome.findings)
        weights = "" if outcome.weights is None else f", the weights by at most {outcome.weights:.0e}"
        return (
            f"{where}: the loss differs by at most {outcome.loss:.0e}{weights}; data, recipe and weights are"
            " those of the page"
        )

    def conclude(self, outcomes: list[Outcome]) -> int:
        """Prints the coverage, adds the outcome to verified.json, and returns the exit status."""
        covered = sum(one.interval.end - one.interval.start for one in outcomes)
        findings = [finding for one in outcomes for finding in one.findings]
        share = f"{covered:,} of {self.last:,} steps ({covered / self.last:.1%}) replayed"
        print(f"{share}: {f'{len(findings)} differences' if findings else 'no difference'}")
        stamp = {
            "date": time.strftime("%Y-%m-%d"),
            "commit": commit(),
            "device": self.device,
            "config": self.flags.config_file.stem if self.flags.config_file else "one process",
            "mixed_precision": self.precision,
            "steps": covered,
            "of_steps": self.last,
            "intervals": [f"{one.interval.start}-{one.interval.end}" for one in outcomes],
            "loss_difference": max((one.loss for one in outcomes), default=0.0),
            "bound": max((one.bound for one in outcomes), default=0.0),
            "findings": findings,
        }
        file = self.folder / VERIFIED
        write_json(file, {"stamps": [*(read_json(file)["stamps"] if file.exists() else []), stamp]})
        print(f"{shortest(file)}: its page shows it after `python logbook.py add {shortest(self.folder)}`")
        return 1 if findings else 0


def has_gpu(config_file: Path | None) -> bool:
    import torch

    from common.system.files import read_accelerate_config

    on_cpu = config_file is not None and read_accelerate_config(config_file).get("use_cpu", False)
    return torch.cuda.is_available() and not on_cpu


def commit() -> str | None:
    words = ["git", "-C", str(ROOT), "rev-parse", "--short", "HEAD"]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    return done.stdout.strip() or None


if __name__ == "__main__":
    sys.exit(run_command(main))
