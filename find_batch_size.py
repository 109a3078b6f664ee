"""Finds the largest --per_device_batch_size that a script trains with, under one accelerate config.

    python find_batch_size.py --config_file accelerate_configs/fsdp_4gpu.yaml train_vit.py --data cifar10
    python find_batch_size.py --config_file accelerate_configs/ddp_2x4gpu.yaml \\
        --hostfile hostfile train_vit.py
    CUDA_VISIBLE_DEVICES= python find_batch_size.py --config_file accelerate_configs/zero2_2gpu.yaml \\
        train_cnn_b.py --data digits

Each trial launches a short training with the same data and model: 7 optimizer steps without accumulation, a
checkpoint and an evaluation. Two sizes show how memory grows; then the largest size that should fit is tried.
The search ends when a size ran and --quantum images more did not. A trial fails when any process runs out of
memory, so the process that needs most memory decides.

Without a GPU the search is a rehearsal: --memory_limit_gib limits the data of each process (RLIMIT_DATA). The
default limit is 1.25 times what the first trial needs, so that it always holds a step of this model and data.

The largest batch is often not the best. Each size is shown with its images/s, measured in a few steps. The
knee is the smallest size that no other beats by 5 percent. Not yet measured on a GPU.

With RandAugment a step's memory depends on its random operations, and a trial has only 7 steps: 5 percent of
the limit stay free.
"""

import argparse
import math
import re
import shlex
import signal
import statistics
import sys
import tempfile
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import psutil

from onecurve.flags.fields import flags_where, without
from onecurve.flags.recipe import ImageRecipe, recipe_part
from onecurve.flags.recipe import parse as parse_recipe
from onecurve.system.cli import check_positive, command_parser, config_file, run_command, split_at_script
from onecurve.system.files import read_json, read_lines, read_yaml, write_json
from onecurve.system.paths import ROOT
from onecurve.system.text import numbered
from tools.batch_size.largest import LaunchResult, knee, launch_limited, next_size
from tools.launch.hosts import read_hostfile

STEPS = 7
UNTIMED = 4  # create the optimizer's state, and capture a step graph
SHOWN = 25  # last lines of a launch that failed
RAN, OUT_OF_MEMORY, TOO_LARGE, IN_MARGIN = "ran", "out of memory", "more than the images", "ran in the margin"
# Share of the limit that is kept free where a recipe's memory differs from step to step. RandAugment's own
# tensors peak at 21 bytes a pixel of the batch. Their peak in 150 steps is 13 percent above that in 4 steps
# with 32 images, and 4 percent with 512 (torch's profiler, 2 layers, CPU). What CUDA's allocator adds is not
# yet measured on a GPU.
MARGIN = 0.05
REHEARSED_SHARE = 1.25  # limit of a rehearsal, relative to what the first trial needs


@dataclass(frozen=True)
class Trial:
    per_device_batch_size: int
    outcome: str
    seconds: float
    memory_gib: float | None = None  # of the process that used the most
    images_per_s: float | None = None

    def __str__(self) -> str:
        memory = "" if self.memory_gib is None else f"{self.memory_gib:.2f}"
        speed = "" if self.images_per_s is None else f"{self.images_per_s:,.1f}"
        size, time = f"{self.per_device_batch_size:,}", f"{self.seconds:,.0f} s"
        return ROW.format(size, self.outcome, memory, speed, time)


ROW = "{:>8}  {:<20}  {:>13}  {:>9}  {:>7}"


def main() -> int:
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    BatchSearch(parse_flags(sys.argv[1:])).run()
    return 0


def parse_flags(argv: list[str]) -> argparse.Namespace:
    """The search's flags; `script` has the script and its flags."""
    parser = command_parser(__doc__, "%(prog)s [flags] SCRIPT [its flags]")
    parser.add_argument("--config_file", type=config_file, required=True, help="one of accelerate_configs/")
    parser.add_argument("--hostfile", type=Path, help="launch on these hosts; the first must be this one")
    parser.add_argument("--quantum", type=int, default=8, help="try only multiples of this (default: 8)")
    limit = "without a GPU: limit on each process's data (default: 1.25 times what the first trial needs)"
    parser.add_argument("--memory_limit_gib", type=float, help=limit)
    parser.add_argument("--trial_timeout_s", type=float, default=900, help="limit on a trial (default: 900)")
    default = "runs/find_batch_size/<script>/<config>.json"
    parser.add_argument("--output", type=Path, help=f"file for the result (default: {default}, -2, ...)")
    mine, script = split_at_script(argv)
    flags = parser.parse_args(mine)
    flags.script = script
    if not flags.script:
        parser.error("name the script, as train_vit.py, behind these flags")
    check_positive(parser, flags, "quantum", "memory_limit_gib", "trial_timeout_s")
    return flags


class BatchSearch:
    def __init__(self, flags: argparse.Namespace):
        """Checks the flags before anything is launched. ValueError for a mistake."""
        from onecurve.models.script import load_script, recipe_class  # imports torch

        self.flags = flags
        config = read_yaml("--config_file", flags.config_file)
        self.processes = config.get("num_processes", 1)  # of the whole job
        if flags.hostfile:
            self.processes = sum(len(host.devices) for host in read_hostfile(flags.hostfile))
        elif config.get("num_machines", 1) > 1:
            raise ValueError(f"the config file is for {config['num_machines']} hosts: give --hostfile")
        kind = recipe_class(load_script(Path(flags.script[0])))
        if not issubclass(kind, ImageRecipe):
            raise ValueError(f"{flags.script[0]} has no images, whose number could be searched for")
        self.recipe = parse_recipe(kind, flags.script[1:])  # a wrong flag ends the search with status 2
        self.limit_gib = self._first_limit(use_cpu=config.get("use_cpu", False))
        self.margin = MARGIN if self.recipe.randaug_layers else 0.0  # of the limit
        place = Path("runs/find_batch_size") / Path(flags.script[0]).stem
        names = (place / f"{name}.json" for name in numbered(flags.config_file.stem))
        self.output = flags.output or next(file for file in names if not file.exists())
        self.trials: list[Trial] = []
        self.settings: dict[str, Any] = {}  # settings as reported by the trials that ran
        self.shown = ""  # command and last lines of the last failed launch

    def run(self) -> None:
        """Searches and prints. ValueError when no size fits, or a trial fails for another reason."""
        self.output.parent.mkdir(parents=True, exist_ok=True)
        quantum, most = self.flags.quantum, sys.maxsize
        ran: dict[int, float] = {}
        failed: set[int] = set()
        if not self.on_gpu:
            limit = self.flags.memory_limit_gib
            relative = f"{REHEARSED_SHARE:g} times what the first trial needs"
            print(f"rehearsal on CPU: each process may use {f'{limit:g} GiB' if limit else relative}")
        print(ROW.format("images", "outcome", "GiB/process", "images/s", "time"), flush=True)
        while (size := next_size(ran, failed, self.usable_gib, quantum)) is not None:
            if (size := min(size, most)) in ran:
                break
            trial, images = self.try_size(size)
            self.trials.append(trial)
            print(trial, flush=True)
            if trial.outcome == RAN:
                assert trial.memory_gib is not None
                ran[size] = trial.memory_gib
            elif trial.outcome in (OUT_OF_MEMORY, IN_MARGIN):
                failed.add(size)
            elif not (most := images // self.processes // quantum * quantum):
                raise ValueError(f"{images} training images are too few for --quantum {quantum}")
        if not ran:
            raise ValueError(self._why_nothing_fits(min(failed)))
        self._conclude(max(ran), is_memory_full=max(ran) + quantum in failed)

    def _first_limit(self, use_cpu: bool) -> float:
        """Return the GiB that each process of the first trial may use; on a GPU, infinity."""
        import torch

        limit_gib, hostfile = self.flags.memory_limit_gib, self.flags.hostfile
        self.on_gpu = bool(hostfile or (torch.cuda.is_available() and not use_cpu))
        if limit_gib and self.on_gpu:
            raise ValueError(
                "--memory_limit_gib is for processes of this machine that have no GPU: leave it out, or"
                " rehearse by CUDA_VISIBLE_DEVICES= before the same command without --hostfile"
            )
        if self.on_gpu:
            return math.inf  # _read replaces it by the memory of the GPUs
        total_gib = psutil.virtual_memory().total / 2**30
        if limit_gib and limit_gib * self.processes > total_gib:
            needed = f"{self.processes} x --memory_limit_gib {limit_gib:g}"
            raise ValueError(f"{needed} is more than this machine has, {total_gib:.1f} GiB")
        return limit_gib or total_gib / self.processes

    def _why_nothing_fits(self, size: int) -> str:
        """Try one image per process, to tell a limit that holds no step from a batch that is too large."""
        one_image_fits = False
        if size > 1:
            trial, _ = self.try_size(1)
            print(trial, flush=True)
            one_image_fits = trial.outcome == RAN
        if not one_image_fits:
            print(self.shown, file=sys.stderr)
        limit, remedy = f"{self.limit_gib:.2f} GiB", "a larger --memory_limit_gib"
        if not self.flags.memory_limit_gib:
            limit = "the GPU's memory" if self.on_gpu else f"{limit}, this machine's memory for a process,"
            remedy = "a config file that shards the model, or a smaller model"
        if one_image_fits:
            return f"{size} images per process do not fit in {limit}, but one does. Give a smaller --quantum"
        return f"{limit} cannot hold one step, even with one image per process. Give {remedy}"

    def try_size(self, size: int) -> tuple[Trial, int]:
        """Launches one trial. Also returns the number of training images if they were too few, else 0."""
        with tempfile.TemporaryDirectory(prefix=".trial-", dir=self.output.parent.resolve()) as folder:
            run = Path(folder) / "run"
            config = ["--config_file", str(self.flags.config_file)]
            # Not the command `accelerate`: it takes seconds to import what is not needed.
            launcher = ["-m", "accelerate.commands.launch", *config, "--main_process_port", "0"]
            if self.flags.hostfile:
                launcher = [str(ROOT / "launch.py"), "--hostfile", str(self.flags.hostfile), *config]
            words = [sys.executable, *launcher, *self._words(size, run)]
            limit_gib = None if self.on_gpu else self.limit_gib
            ended = launch_limited(words, limit_gib, self.flags.trial_timeout_s)
            if ended.status == 0:
                return self._read(size, ended, run), 0
        lines = ended.output.splitlines()
        self.shown = "\n".join([shlex.join(words), *lines[-SHOWN:]])
        if ended.is_out_of_memory:
            return Trial(size, OUT_OF_MEMORY, ended.seconds), 0
        if found := re.search(r"is more than the (\d+) training images", ended.output):
            return Trial(size, TOO_LARGE, ended.seconds), int(found[1])
        print(self.shown, file=sys.stderr)
        reason = next((line.strip() for line in lines if "error: " in line), f"exit status {ended.status}")
        if ended.status is None:
            reason = f"no end within --trial_timeout_s {self.flags.trial_timeout_s:g}"
        raise ValueError(f"the trial with {size} images per process failed ({reason})")

    def _words(self, size: int, run: Path) -> list[str]:
        """The script and its flags in a trial, which replace those of the user."""
        batch_size = size * self.processes
        flags = {
            "per_device_batch_size": size,
            "batch_size": batch_size,
            "streams": self.processes,  # of shards: must divide any size
            "epochs": STEPS,  # in case one batch is the whole data set
            "max_steps": STEPS,
            "patience": STEPS,  # evaluations, at most one a step: ends no trial
            "max_val_images": 2 * batch_size,
            "lr": 0,  # the recipe's is for another batch, and the loss must not diverge
            "checkpoint_every": STEPS - 1,  # the last step runs while the checkpoint is written
            "log_every": 1,
            "resume": "auto",
            "trackers": "none",
            "s3": "none",
            "output_dir": run,
        }
        if sizes := self.recipe.train_sizes:
            flags["train_sizes"] = max(sizes)
        replaced = [field for field in fields(self.recipe) if field.name in flags]
        return [*without(self.flags.script, replaced), *(f"--{name}={v}" for name, v in flags.items())]

    def _read(self, size: int, ended: LaunchResult, run: Path) -> Trial:
        if not (run / "result.json").exists():
            raise ValueError("the trial's result is not here: the hostfile's first host must be this one")
        result, recipe = (read_json(run / name) for name in ("result.json", "recipe.json"))
        names = ("script", "strategy", "mixed_precision", "half_precision", "compile", "grad_checkpointing")
        self.settings = {name: result[name] for name in (*names, "device")}
        self.settings |= {name: recipe[name] for name in ("sharding", "git_commit", "versions")}
        memory_gib, of_each = ended.data_gib, result["memory_gib"]
        if self.on_gpu:
            if "device" not in of_each[0]:
                raise ValueError("the hosts have no GPU, whose memory would be the limit")
            memory_gib = max(own["reserved"] + own["other"] for own in of_each)
            self.limit_gib = min(own["device"] for own in of_each)
        elif not self.flags.memory_limit_gib and not self.trials:
            self.limit_gib = min(self.limit_gib, REHEARSED_SHARE * memory_gib)
        lines = read_lines(run / "metrics.jsonl")
        speeds = [line["train/images_per_s"] for line in lines if "train/images_per_s" in line]
        outcome = IN_MARGIN if self.margin and memory_gib > self.usable_gib else RAN
        return Trial(size, outcome, ended.seconds, memory_gib, statistics.median(speeds[UNTIMED:]))

    @property
    def usable_gib(self) -> float:
        return self.limit_gib * (1 - self.margin)

    def _conclude(self, answer: int, is_memory_full: bool) -> None:
        """Writes the result and prints the commands that train with it."""
        ran = [trial for trial in self.trials if trial.outcome == RAN]
        speeds = {t.per_device_batch_size: t.images_per_s for t in ran if t.images_per_s is not None}
        deciding = flags_where(type(self.recipe), "changes_memory")
        report = self.settings | {
            "config_file": str(self.flags.config_file),
            "processes": self.processes,
            "flags": self.flags.script[1:],
            "recipe": {name: v for name, v in recipe_part(self.recipe).items() if name in deciding},
            "quantum": self.flags.quantum,
            "limit_gib": self.limit_gib,
            "margin": self.margin,
            "answer": answer,
            "limited_by": "memory" if is_memory_full else "data",
            "knee": knee(speeds),
            "trials": [asdict(trial) for trial in self.trials],
        }
        write_json(self.output, report)
        outcomes = {trial.per_device_batch_size: trial.outcome for trial in self.trials}
        more = answer + self.flags.quantum
        why = f"{more} ran out of memory" if is_memory_full else "the data set has no more"
        if outcomes.get(more) == IN_MARGIN:
            why = f"{more} left less than {self.margin:.0%} free, for what RandAugment may still draw"
        print(f"\nLargest: {answer} images per process, within {self.limit_gib:.2f} GiB each; {why}")
        print(self._command(answer))
        print(f"Knee: {report['knee']} images per process; of {len(speeds)} sizes none is over 5 % faster")
        print(self._command(report["knee"]))
        print(self.output)

    def _command(self, size: int) -> str:
        """The training command: the largest per-device batch up to `size` that divides the recipe's batch."""
        batch_size = self.recipe.batch_size
        shares = [n for n in range(1, size + 1) if batch_size % (n * self.processes) == 0]
        share = max(shares, default=size)
        launcher = ["python", "launch.py", "--hostfile", str(self.flags.hostfile)]
        words = launcher if self.flags.hostfile else ["accelerate", "launch"]
        words += ["--config_file", str(self.flags.config_file), *self.flags.script]
        words.append(f"--per_device_batch_size={share}")
        if not shares:
            words.append(f"--batch_size={size * self.processes}")
        remark = "" if share == size else f"  # {size} x {self.processes} does not divide {batch_size}"
        if shares and (largest := size * self.processes) > batch_size:
            remark = f"  # limited by --batch_size {batch_size}, not by memory, which holds {largest}"
        return f"    {shlex.join(words)}{remark}"


if __name__ == "__main__":
    sys.exit(run_command(main))
