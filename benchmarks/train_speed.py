"""Compare a script's training speed with a tutorial's loop, a resident batch, or different flags.

    python -m benchmarks.train_speed train_cnn_a.py --batch_size 512
    python -m benchmarks.train_speed train_cnn_b.py
    python -m benchmarks.train_speed --arms ready,ours train_vit.py --data SHARDS --workers 8
    python -m benchmarks.train_speed --arms ready --vary "--telemetry_s 0.02" train_cnn_a.py
    python -m benchmarks.train_speed --processes 2 --arms ready --vary=--deterministic train_cnn_b.py

In each round, the arms run one after another, each in a new process, or in --processes processes under DDP.
An arm trains for a few steps that are not measured, and then for a block of --steps steps. Flags after the
script apply to all arms.

tutorial  Run Accelerate's basic loop for train_cnn_*.py, with PIL images, torchvision's transforms in the
          --workers of a DataLoader, contiguous float32 tensors, and `.item()` in each step. All other
          parts are the same as in the script.
ours      Run the script's main() without evaluations and telemetry.
ready     Run the script like `ours`, but on one batch that stays on the device, without loading or
          augmenting data.
--vary    Add an arm like `ready` with additional flags.

On a GPU, benchmarks/peers.py measures two of these arms. benchmarks/README.md lists the results and the
machines.
"""

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Generator
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import psutil
import torch
from accelerate import Accelerator
from PIL import Image
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from benchmarks.harness import benchmark_parser, in_turn, positive, report, train_watched, wait_for_device
from onecurve.data.cache import prepare_data
from onecurve.data.images import open_images
from onecurve.data.splits import ArraySplit
from onecurve.distributed.strategy import device_name, precision
from onecurve.flags.recipe import parse
from onecurve.models.script import load_script, recipe_class, recipe_of
from onecurve.run.run import Run
from onecurve.system.cli import run_command, split_at_script
from onecurve.system.env import rank, world_size
from onecurve.system.processes import kill, running_descendants

ARMS = ("tutorial", "ours", "ready")
STEPS = {"train_cnn_a": 100, "train_cnn_b": 6}  # number of steps per block, which take some seconds on a CPU
LEAD_IN = 5  # number of unmeasured steps before each block, because workers prefetch 4 batches

Stopwatch = Generator[None, tuple[int, str], None]  # receives each step's number of images and facts


def stopwatch(steps: int) -> Stopwatch:
    """Time a number of steps after LEAD_IN steps, print the result as JSON, and exit the process.

    With several processes, only the first process prints the result. The result assumes that all processes
    use as much CPU time as the first process.
    """
    output = sys.stdout
    for _ in range(LEAD_IN):
        yield
    wait_for_device()
    began, used, images = time.perf_counter(), used_s(), 0
    for _ in range(steps):
        step_images, facts = yield
        images += step_images
    wait_for_device()
    block = {"images": images, "seconds": time.perf_counter() - began, "facts": facts}
    block["cpu_s"] = (used_s() - used) * world_size()
    if rank() == 0:
        print(json.dumps(block), file=output, flush=True)
    kill(running_descendants())  # end the DataLoader's workers
    os._exit(0)


def used_s() -> float:
    """Return the CPU seconds that this process and all its workers have used."""
    return sum(sum(process.cpu_times()[:2]) for process in (psutil.Process(), *running_descendants()))


class TutorialImages(Dataset):
    """In-memory images that are converted to PIL images for the transforms, as in torchvision's CIFAR10."""

    def __init__(self, split: ArraySplit, transform: Callable):
        self.data, self.targets, self.transform = np.array(split.images), split.labels.tolist(), transform

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        return self.transform(Image.fromarray(self.data[index])), self.targets[index]

    def __len__(self) -> int:
        return len(self.data)


def tutorial(script: ModuleType, words: list[str], watch: Stopwatch) -> None:
    """Train the script's model with the loop of the Accelerate tutorial."""
    from torchvision.transforms import Compose, Normalize, RandomCrop, RandomHorizontalFlip, ToTensor

    recipe = recipe_of(script, words)
    cache = Path(recipe.cache_dir or "~/.cache/train-images").expanduser()
    images, size = open_images(prepare_data(recipe.data, cache)), recipe.image_size
    if not isinstance(images.train, ArraySplit) or images.train.size != (size, size):
        raise ValueError(f"--data {recipe.data}: the tutorial needs images of {size} pixels in memory")
    steps = [RandomCrop(size, padding=size // 8), *([RandomHorizontalFlip()] if images.train.mirror else [])]
    augment = Compose([*steps, ToTensor(), Normalize(script.MEAN, script.STD)])
    fork: Any = dict(num_workers=recipe.workers, multiprocessing_context="fork")
    train: Any = DataLoader(TutorialImages(images.train, augment), recipe.batch_size, shuffle=True, **fork)
    torch.manual_seed(recipe.seed)
    net = script.build_model(recipe, len(images.classes))
    for block in getattr(net, "blocks", ()):  # the tutorials' layer order, with the same result
        block[1], block[2] = block[2], block[1]
    accelerator = Accelerator()
    net, optimizer, train = accelerator.prepare(net, script.build_optimizer(net, recipe), train)
    criterion, step, running_loss = nn.CrossEntropyLoss(label_smoothing=recipe.label_smoothing), 0, 0.0
    for _ in range(recipe.epochs):
        for inputs, labels in train:
            for group in optimizer.param_groups:
                group["lr"] = script.learning_rate(recipe, step, recipe.epochs * len(train))
            optimizer.zero_grad()
            loss = criterion(net(inputs), labels)
            accelerator.backward(loss)
            optimizer.step()
            running_loss += loss.item()
            step += 1
            watch.send((len(labels), ""))


def work(arm: str, steps: int, file: str, words: list[str]) -> int:
    """Run one block of an arm's steps in this process."""
    script, watch = load_script(Path(file).resolve()), stopwatch(steps)
    next(watch)

    def step(run: Run) -> None:
        facts = f"{device_name(run.accelerator)}, {run.batch}, mixed precision {precision(run.accelerator)}"
        watch.send((run.batch.total, facts))

    if arm == "tutorial":
        tutorial(script, words, watch)
    else:
        train_watched(script, words, step, lambda: arm != "ours")
    return 1  # the training run ended before the block did


class Arm:
    """Benchmark arm that runs each block of steps in new processes.

    Attributes:
        cpu_s: CPU seconds that all blocks used.
        images: Number of images in all blocks.
        facts: The last block's device, batch and precision.
    """

    def __init__(self, processes: int, *words: str):
        torchrun = ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={processes}"]
        self.words = [*(torchrun if processes > 1 else []), "-m", "benchmarks.train_speed", "--as", *words]
        self.cpu_s, self.images, self.facts = 0.0, 0, ""

    def block(self) -> float:
        """Run one block and return its images/s."""
        with tempfile.TemporaryDirectory() as folder:
            words = [sys.executable, *self.words, "--output_dir", f"{folder}/run"]
            done = subprocess.run(words, stdout=subprocess.PIPE, text=True, check=False)
        if done.returncode:
            raise ValueError(f"An arm ended with exit status {done.returncode}. Read its output above.")
        result = json.loads(done.stdout.splitlines()[-1])
        self.cpu_s, self.images = self.cpu_s + result["cpu_s"], self.images + result["images"]
        self.facts = result["facts"]
        return result["images"] / result["seconds"]


def main() -> int:
    if sys.argv[1:2] == ["--as"]:  # run one block in this process
        return work(sys.argv[2], int(sys.argv[3]), sys.argv[4], sys.argv[5:])
    usage = "python -m benchmarks.train_speed [flags] SCRIPT [SCRIPT_FLAGS ...]"
    parser = benchmark_parser(__doc__, rounds=5, usage=usage)
    add, default = parser.add_argument, ",".join(ARMS)
    add("--arms", default=default, metavar="NAME,...", help="arms to compare (default: %(default)s)")
    add(
        "--vary",
        action="append",
        default=[],
        metavar="FLAGS",
        help="flags of an additional arm like `ready` (repeatable)",
    )
    add(
        "--steps",
        type=positive,
        metavar="N",
        help="optimizer steps per block (the default depends on the script)",
    )
    add(
        "--processes",
        type=positive,
        default=1,
        metavar="N",
        help="DDP processes for `ours` and `ready` (default: 1)",
    )
    arguments, words = split_at_script(sys.argv[1:])
    flags = parser.parse_args(arguments)
    if not words:
        parser.error("the script is missing. Add a script after these flags, for example train_cnn_a.py.")
    file, *words = words
    parse(recipe_class(load_script(Path(file).resolve())), words)  # exit if a script flag is wrong
    if flags.processes > 1 and "tutorial" in flags.arms:
        parser.error("--processes: the `tutorial` arm supports only one process. Pass --arms ours,ready.")
    if unknown := set(names := flags.arms.split(",")) - {*ARMS}:
        parser.error(f"--arms {unknown.pop()}: choose among {', '.join(ARMS)}")
    steps = str(flags.steps or STEPS.get(Path(file).stem, 10))
    words += ["--epochs", "100000", "--checkpoint_every", "1000000000", "--log_every", "1000000000"]
    words += ["--telemetry_s", "0", "--trackers", "none"]
    arms = {name: Arm(flags.processes, name, steps, file, *words) for name in names}
    for extra in flags.vary:
        arms[extra] = Arm(flags.processes, "ready", steps, file, *words, *extra.split())
    rounds = in_turn({name: arm.block for name, arm in arms.items()}, flags.rounds)
    us = {name: round(1e6 * arm.cpu_s / arm.images) for name, arm in arms.items()}
    facts = f"{arms[names[-1]].facts}, {os.cpu_count()} cores, {torch.get_num_threads()} threads"
    report(rounds, "images/s", names[0], flags.json, core_us_per_image=us, where=facts)
    return 0


if __name__ == "__main__":
    sys.exit(run_command(main))
