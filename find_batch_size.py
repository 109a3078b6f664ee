"""Find the largest --per_device_batch_size that a script can train with under one accelerate config.

    python find_batch_size.py --config_file accelerate_configs/fsdp_4gpu.yaml train_vit.py --data cifar10
    python find_batch_size.py --config_file accelerate_configs/ddp_2x4gpu.yaml \\
        --hostfile hostfile train_vit.py
    CUDA_VISIBLE_DEVICES= python find_batch_size.py --config_file accelerate_configs/zero2_2gpu.yaml \\
        train_cnn_b.py --data digits

Each trial launches a short training run with the script's data and model. The run consists of 7 optimizer
steps without accumulation, a checkpoint and an evaluation. The first two trials show how memory grows with
the number of images per process. After these trials, the search tries the largest size that should fit. The
search ends when one size fits and a size with --quantum more images does not. A trial fails when any process
runs out of memory, so the process that needs the most memory determines the result.

Without a GPU, the search is only a rehearsal, and --memory_limit_gib limits the data segment of each process
(RLIMIT_DATA). The default memory limit is 1.25 times the first trial's memory, so that at least one step
fits.

The largest batch is often not the best one. The printed table shows the throughput of each size in images/s,
measured over a few steps. The knee is the smallest size that no other size outperforms by 5 percent. The
search has not been tested on a GPU yet.

With RandAugment, a step's memory depends on its random operations, and a trial runs only 7
steps. The search therefore keeps 5 percent of the memory limit free for such recipes.
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

from onecurve.flags.fields import flags_where, without_flags
from onecurve.flags.recipe import ImageRecipe, recipe_part
from onecurve.flags.recipe import parse as parse_recipe
from onecurve.system.cli import check_positive, command_parser, config_file, run_command, split_at_script
from onecurve.system.files import read_json, read_lines, read_yaml, write_json
from onecurve.system.paths import ROOT
from onecurve.system.text import numbered
from tools.batch_size.largest import LaunchResult, knee_size, launch_limited, next_batch_size
from tools.launch.hosts import read_hostfile

STEPS = 7
UNTIMED = 4  # steps at the start of a trial that are not timed (optimizer state, step graph)
SHOWN = 25  # number of last lines of a failed launch's output to show
RAN, OUT_OF_MEMORY, TOO_LARGE, IN_MARGIN = (
    "ran",
    "out of memory",
    "exceeds the data set",
    "ran without margin",
)
# Fraction of the memory limit to keep free if a recipe's memory use varies between steps. RandAugment's
# tensors peak at 21 bytes per pixel of the batch. The peak over 150 steps exceeds the peak over 4 steps by 13
# percent with 32 images, and by 4 percent with 512 images (torch's profiler, 2 layers, CPU). The overhead of
# CUDA's allocator has not been measured on a GPU yet.
MARGIN = 0.05
REHEARSED_SHARE = 1.25  # memory limit of a rehearsal, relative to the first trial's memory


@dataclass(frozen=True)
class Trial:
    """Result of a trial, which is a short training run with one batch size."""

    per_device_batch_size: int
    outcome: str
    seconds: float
    memory_gib: float | None = None  # highest peak memory of any process
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
    """Return the search's flags, with the script and its flags in the attribute `script`."""
    parser = command_parser(__doc__, "%(prog)s --config_file FILE [flags] SCRIPT [SCRIPT_FLAGS ...]")
    add = parser.add_argument
    config_help = "The job's Accelerate config file, for example accelerate_configs/ddp_2gpu.yaml."
    add("--config_file", type=config_file, required=True, metavar="FILE", help=config_help)
    add(
        "--hostfile",
        type=Path,
        metavar="FILE",
        help="File that lists the hosts. The first host must be this machine.",
    )
    add("--quantum", type=int, default=8, metavar="N", help="Try only multiples of N images. Default: 8.")
    limit_help = (
        "Memory limit of each process on a machine without a GPU. Default: 1.25 times the memory of the"
        " first trial."
    )
    add("--memory_limit_gib", type=float, metavar="GIB", help=limit_help)
    timeout_help = "Time limit of each trial. Default: 900."
    add("--trial_timeout_s", type=float, default=900, metavar="SECONDS", help=timeout_help)
    output_help = "JSON file for the result. Default: a new file in runs/find_batch_size/<script>/."
    add("--output", type=Path, metavar="FILE", help=output_help)
    parser.add_argument_group("script", "SCRIPT is a train script for images, for example train_vit.py.")
    words, script = split_at_script(argv)
    flags = parser.parse_args(words)
    flags.script = script
    if not flags.script:
        parser.error("the train script is missing. Add a script after the flags, for example train_vit.py.")
    check_positive(parser, flags, "quantum", "memory_limit_gib", "trial_timeout_s")
    return flags


class BatchSearch:
    """Search for the largest number of images per process that fits into memory, using trial runs."""

    def __init__(self, flags: argparse.Namespace):
        """Check the flags before the first launch.

        Raises:
            ValueError: If a flag is wrong.
        """
        from onecurve.models.script import load_script, recipe_class  # this import loads torch

        self.flags = flags
        config = read_yaml("--config_file", flags.config_file)
        self.processes = config.get("num_processes", 1)  # total number of processes on all hosts
        if flags.hostfile:
            self.processes = sum(len(host.devices) for host in read_hostfile(flags.hostfile))
        elif config.get("num_machines", 1) > 1:
            raise ValueError(f"--config_file is for {config['num_machines']} hosts. Pass --hostfile.")
        recipe_type = recipe_class(load_script(Path(flags.script[0])))
        if not issubclass(recipe_type, ImageRecipe):
            raise ValueError(
                f"{flags.script[0]} does not train on images. Pass a script that trains on images."
            )
        self.recipe = parse_recipe(recipe_type, flags.script[1:])  # exits with status 2 if a flag is wrong
        self.limit_gib = self._first_limit(use_cpu=config.get("use_cpu", False))
        self.margin = (
            MARGIN if self.recipe.randaug_layers else 0.0
        )  # fraction of the memory limit to keep free

        folder = Path("runs/find_batch_size") / Path(flags.script[0]).stem
        files = (folder / f"{name}.json" for name in numbered(flags.config_file.stem))
        self.output = flags.output or next(file for file in files if not file.exists())
        self.trials: list[Trial] = []
        self.settings: dict[str, Any] = {}  # training settings that the trials reported
        self.shown = ""  # command and last output lines of the most recent failed launch

    def run(self) -> None:
        """Run the search and print a row for each trial.

        Raises:
            ValueError: If no size fits, or if a trial fails for a reason other than memory.
        """
        self.output.parent.mkdir(parents=True, exist_ok=True)
        quantum, most = self.flags.quantum, sys.maxsize  # the data set's size later limits `most`
        ran: dict[int, float] = {}
        failed: set[int] = set()
        if not self.on_gpu:
            limit = self.flags.memory_limit_gib
            relative = f"{REHEARSED_SHARE:g} times the memory of the first trial"
            shown_limit = f"{limit:g} GiB" if limit else relative
            print(f"Rehearsal on CPU: the memory limit of each process is {shown_limit}")
        print(ROW.format("images", "outcome", "GiB/process", "images/s", "time"), flush=True)
        while (size := next_batch_size(ran, failed, self.usable_gib, quantum)) is not None:
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
                raise ValueError(
                    f"{images} training images are too few for --quantum {quantum}. Pass a smaller --quantum."
                )
        if not ran:
            raise ValueError(self._why_nothing_fits(min(failed)))
        self._conclude(max(ran), is_memory_full=max(ran) + quantum in failed)

    def _first_limit(self, use_cpu: bool) -> float:
        """Return the per-process memory limit in GiB for the first trial.

        The limit is infinite on a GPU.
        """
        import torch

        limit_gib, hostfile = self.flags.memory_limit_gib, self.flags.hostfile
        self.on_gpu = bool(hostfile or (torch.cuda.is_available() and not use_cpu))
        if limit_gib and self.on_gpu:
            raise ValueError(
                "--memory_limit_gib does not apply to GPUs or to other hosts. Remove --memory_limit_gib. To"
                " rehearse on the CPU instead, put CUDA_VISIBLE_DEVICES= before the command and remove"
                " --hostfile."
            )
        if self.on_gpu:
            return math.inf  # _read replaces this limit with the GPU memory
        total_gib = psutil.virtual_memory().total / 2**30
        if limit_gib and limit_gib * self.processes > total_gib:
            needed = f"{self.processes} x --memory_limit_gib {limit_gib:g}"
            raise ValueError(f"{needed} exceeds this machine's memory of {total_gib:.1f} GiB")
        return limit_gib or total_gib / self.processes

    def _why_nothing_fits(self, size: int) -> str:
        """Explain why no size fits.

        Run a trial with one image per process to test whether any size can fit.
        """
        one_image_fits = False
        if size > 1:
            trial, _ = self.try_size(1)
            print(trial, flush=True)
            one_image_fits = trial.outcome == RAN
        if not one_image_fits:
            print(self.shown, file=sys.stderr)
        limit, remedy = f"{self.limit_gib:.2f} GiB", "Pass a larger --memory_limit_gib."
        if not self.flags.memory_limit_gib:
            limit = "the GPU's memory" if self.on_gpu else f"this machine's {limit} per process"
            remedy = "Choose a smaller model, or a config file that shards the model."
        if one_image_fits:
            advice = "Pass a smaller --quantum."
            return f"{size} images per process do not fit into {limit}, but one image fits. {advice}"
        return f"One training step does not fit into {limit}, even with one image per process. {remedy}"

    def try_size(self, size: int) -> tuple[Trial, int]:
        """Launch a trial with `size` images per process.

        Returns:
            A tuple of the trial and a count. The count is the number of training images if the batch is
            larger than the data set, and 0 otherwise.
        """
        with tempfile.TemporaryDirectory(prefix=".trial-", dir=self.output.parent.resolve()) as folder:
            run = Path(folder) / "run"
            config = ["--config_file", str(self.flags.config_file)]
            # The command `accelerate` spends seconds on imports that a launch does not need.
            launcher = ["-m", "accelerate.commands.launch", *config, "--main_process_port", "0"]
            if self.flags.hostfile:
                launcher = [str(ROOT / "launch.py"), "--hostfile", str(self.flags.hostfile), *config]
            words = [sys.executable, *launcher, *self._words(size, run)]
            limit_gib = None if self.on_gpu else self.limit_gib
            launch = launch_limited(words, limit_gib, self.flags.trial_timeout_s)
            if launch.exit_status == 0:
                return self._read(size, launch, run), 0
        lines = launch.output.splitlines()
        self.shown = "\n".join([shlex.join(words), *lines[-SHOWN:]])
        if launch.is_out_of_memory:
            return Trial(size, OUT_OF_MEMORY, launch.duration_s), 0
        if match := re.search(r"is more than the (\d+) training images", launch.output):
            return Trial(size, TOO_LARGE, launch.duration_s), int(match[1])
        print(self.shown, file=sys.stderr)
        errors = (line.strip() for line in lines if "error: " in line)
        reason = next(errors, f"exit status {launch.exit_status}")
        if launch.exit_status is None:
            reason = f"the trial did not end within --trial_timeout_s {self.flags.trial_timeout_s:g}"
        raise ValueError(f"the trial with {size} images per process failed: {reason}")

    def _words(self, size: int, run: Path) -> list[str]:
        """Return a trial's script and flags. The trial's flags override the user's flags."""
        batch_size = size * self.processes
        flags = {
            "per_device_batch_size": size,
            "batch_size": batch_size,
            "streams": self.processes,  # number of shard streams, which must divide the batch size
            "epochs": STEPS,  # if a batch contains the whole data set, an epoch is one step
            "max_steps": STEPS,
            "patience": STEPS,  # never ends a trial, because a step runs at most one evaluation
            "max_val_images": 2 * batch_size,
            "lr": 0,  # the recipe's rate suits a different batch size, and the loss might diverge
            "checkpoint_every": STEPS - 1,  # the last step runs during the checkpoint's write
            "log_every": 1,
            "resume": "auto",
            "trackers": "none",
            "s3": "none",
            "output_dir": run,
        }
        if sizes := self.recipe.train_sizes:
            flags["train_sizes"] = max(sizes)
        replaced = [field for field in fields(self.recipe) if field.name in flags]
        return [*without_flags(self.flags.script, replaced), *(f"--{name}={v}" for name, v in flags.items())]

    def _read(self, size: int, launch: LaunchResult, run: Path) -> Trial:
        """Read a trial's result from the run folder. Update the memory limit and the reported settings."""
        if not (run / "result.json").exists():
            raise ValueError(
                "this machine has no result of the trial. Put this machine first in the hostfile."
            )
        result, recipe = (read_json(run / name) for name in ("result.json", "recipe.json"))
        names = ("script", "strategy", "mixed_precision", "half_precision", "compile", "grad_checkpointing")
        self.settings = {name: result[name] for name in (*names, "device")}
        self.settings |= {name: recipe[name] for name in ("sharding", "git_commit", "versions")}
        memory_gib, ranks = launch.data_gib, result["memory_gib"]
        if self.on_gpu:
            if "device" not in ranks[0]:
                raise ValueError("the hosts have no GPUs. To search without GPUs, remove --hostfile.")
            memory_gib = max(rank["reserved"] + rank["other"] for rank in ranks)
            self.limit_gib = min(rank["device"] for rank in ranks)
        elif not self.flags.memory_limit_gib and not self.trials:
            self.limit_gib = min(self.limit_gib, REHEARSED_SHARE * memory_gib)
        lines = read_lines(run / "metrics.jsonl")
        speeds = [line["train/images_per_s"] for line in lines if "train/images_per_s" in line]
        outcome = IN_MARGIN if self.margin and memory_gib > self.usable_gib else RAN
        return Trial(size, outcome, launch.duration_s, memory_gib, statistics.median(speeds[UNTIMED:]))

    @property
    def usable_gib(self) -> float:
        return self.limit_gib * (1 - self.margin)

    def _conclude(self, answer: int, is_memory_full: bool) -> None:
        """Write the result. Print the commands that train with the largest size and with the knee."""
        ran = [trial for trial in self.trials if trial.outcome == RAN]
        speeds = {t.per_device_batch_size: t.images_per_s for t in ran if t.images_per_s is not None}
        relevant = flags_where(type(self.recipe), "changes_memory")
        report = self.settings | {
            "config_file": str(self.flags.config_file),
            "processes": self.processes,
            "flags": self.flags.script[1:],
            "recipe": {name: v for name, v in recipe_part(self.recipe).items() if name in relevant},
            "quantum": self.flags.quantum,
            "limit_gib": self.limit_gib,
            "margin": self.margin,
            "answer": answer,
            "limited_by": "memory" if is_memory_full else "data",
            "knee": knee_size(speeds),
            "trials": [asdict(trial) for trial in self.trials],
        }
        write_json(self.output, report)
        outcomes = {trial.per_device_batch_size: trial.outcome for trial in self.trials}
        more = answer + self.flags.quantum
        reason = (
            f"{more} images ran out of memory" if is_memory_full else "the data set allows no larger batch"
        )
        if outcomes.get(more) == IN_MARGIN:
            reason = f"{more} images left less than {self.margin:.0%} of the memory free for RandAugment"
        print(f"\nLargest size: {answer} images per process in {self.limit_gib:.2f} GiB of memory ({reason})")
        print(self._command(answer))
        print(
            f"Knee: {report['knee']} images per process (none of {len(speeds)} sizes is more than 5 % faster)"
        )
        print(self._command(report["knee"]))
        print(self.output)

    def _command(self, size: int) -> str:
        """Return a training command that uses the largest divisor of the recipe's batch up to `size`."""
        batch_size = self.recipe.batch_size
        shares = [n for n in range(1, size + 1) if batch_size % (n * self.processes) == 0]
        share = max(shares, default=size)
        launcher = ["python", "launch.py", "--hostfile", str(self.flags.hostfile)]
        words = launcher if self.flags.hostfile else ["accelerate", "launch"]
        words += ["--config_file", str(self.flags.config_file), *self.flags.script]
        words.append(f"--per_device_batch_size={share}")
        if not shares:
            words.append(f"--batch_size={size * self.processes}")
        remark = (
            ""
            if share == size
            else f"  # --batch_size {batch_size} is not a multiple of {size} x {self.processes}"
        )
        if shares and (largest := size * self.processes) > batch_size:
            remark = f"  # limited by --batch_size {batch_size}; {largest} images would fit into memory"
        return f"    {shlex.join(words)}{remark}"


if __name__ == "__main__":
    sys.exit(run_command(main))
