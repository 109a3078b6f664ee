"""Training speed of a script, beside the tutorials' way, a batch that is ready, or other flags.

Results and machines: benchmarks/README.md.

    python -m benchmarks.train_speed train_cnn_a.py --batch_size 512
    python -m benchmarks.train_speed train_cnn_b.py
    python -m benchmarks.train_speed --arms ready,ours train_vit.py --data SHARDS --workers 8
    python -m benchmarks.train_speed --arms ready --vary "--telemetry_s 0.02" train_cnn_a.py
    python -m benchmarks.train_speed --processes 2 --arms ready --vary=--deterministic train_cnn_b.py

In each round each arm is a process of its own, or --processes under DDP, one after the other: it trains a
block of --steps, after some steps that do not count. All flags behind the script are its own, in all arms.

tutorial  Accelerate's basic loop: PIL images, torchvision's transforms in --workers of a DataLoader, float32,
          contiguous, `.item()` each step; all else is the script's. For train_cnn_*.py
ours      the script's main(), without evaluations and telemetry
ready     the same on one batch that stays on the device: no data, no augmentation
--vary    one more arm like `ready`, with these flags in addition

On a GPU benchmarks/peers.py measures two of these arms.
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
STEPS = {"train_cnn_a": 100, "train_cnn_b": 6}  # of a block, some seconds on a CPU
LEAD_IN = 5  # steps before each block: more than the 4 batches that the tutorial's workers make ahead

Stopwatch = Generator[None, tuple[int, str], None]  # receives each step's images, and facts


def stopwatch(steps: int) -> Stopwatch:
    """Times so many steps after LEAD_IN, prints what they took as JSON, and ends the process.

    Of several processes the first one prints, and counts its own time for each.
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
    kill(running_descendants())  # DataLoader's workers
    os._exit(0)


def used_s() -> float:
    """Seconds of all cores that this process and its workers have used."""
    return sum(sum(process.cpu_times()[:2]) for process in (psutil.Process(), *running_descendants()))


class TutorialImages(Dataset):
    """torchvision's way with CIFAR10: decoded arrays in memory, each made a PIL image for the transforms."""

    def __init__(self, split: ArraySplit, transform: Callable):
        self.data, self.targets, self.transform = np.array(split.images), split.labels.tolist(), transform

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        return self.transform(Image.fromarray(self.data[index])), self.targets[index]

    def __len__(self) -> int:
        return len(self.data)


def tutorial(script: ModuleType, words: list[str], watch: Stopwatch) -> None:
    from torchvision.transforms import Compose, Normalize, RandomCrop, RandomHorizontalFlip, ToTensor

    recipe = recipe_of(script, words)
    cache = Path(recipe.cache_dir or "~/.cache/train-images").expanduser()
    images, size = open_images(prepare_data(recipe.data, cache)), recipe.image_size
    if not isinstance(images.train, ArraySplit) or images.train.size != (size, size):
        raise ValueError(f"--data {recipe.data}: needs images of {size} pixels that fit in memory")
    steps = [RandomCrop(size, padding=size // 8), *([RandomHorizontalFlip()] if images.train.mirror else [])]
    augment = Compose([*steps, ToTensor(), Normalize(script.MEAN, script.STD)])
    fork: Any = dict(num_workers=recipe.workers, multiprocessing_context="fork")
    train: Any = DataLoader(TutorialImages(images.train, augment), recipe.batch_size, shuffle=True, **fork)
    torch.manual_seed(recipe.seed)
    net = script.build_model(recipe, len(images.classes))
    for block in getattr(net, "blocks", ()):  # the usual order: the same function and weights
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
    """Runs an arm in this process, for one block of steps."""
    script, watch = load_script(Path(file).resolve()), stopwatch(steps)
    next(watch)

    def step(run: Run) -> None:
        facts = f"{device_name(run.accelerator)}, {run.batch}, mixed precision {precision(run.accelerator)}"
        watch.send((run.batch.total, facts))

    if arm == "tutorial":
        tutorial(script, words, watch)
    else:
        train_watched(script, words, step, lambda: arm != "ours")
    return 1  # the training ended before the block


class Arm:
    """An arm, whose blocks are processes. cpu_s, images: of all of them."""

    def __init__(self, processes: int, *words: str):
        torchrun = ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={processes}"]
        self.words = [*(torchrun if processes > 1 else []), "-m", "benchmarks.train_speed", "--as", *words]
        self.cpu_s, self.images, self.facts = 0.0, 0, ""

    def block(self) -> float:
        """Images a second of one block."""
        with tempfile.TemporaryDirectory() as folder:
            words = [sys.executable, *self.words, "--output_dir", f"{folder}/run"]
            done = subprocess.run(words, stdout=subprocess.PIPE, text=True, check=False)
        if done.returncode:
            raise ValueError(f"an arm ended with status {done.returncode}")
        found = json.loads(done.stdout.splitlines()[-1])
        self.cpu_s, self.images = self.cpu_s + found["cpu_s"], self.images + found["images"]
        self.facts = found["facts"]
        return found["images"] / found["seconds"]


def main() -> int:
    if sys.argv[1:2] == ["--as"]:  # a process of an arm
        return work(sys.argv[2], int(sys.argv[3]), sys.argv[4], sys.argv[5:])
    parser = benchmark_parser(__doc__, rounds=5)
    parser.add_argument("--arms", default=",".join(ARMS), help="(default: %(default)s)")
    parser.add_argument("--vary", action="append", default=[], metavar="FLAGS", help="also with these flags")
    parser.add_argument("--steps", type=positive, help="optimizer steps of a block")
    parser.add_argument("--processes", type=positive, default=1, help="of ours and ready, under DDP")
    own, words = split_at_script(sys.argv[1:])
    flags = parser.parse_args(own)
    if not words:
        parser.error("name a script: train_cnn_a.py")
    file, *words = words
    parse(recipe_class(load_script(Path(file).resolve())), words)  # a mistake ends it here
    if flags.processes > 1 and "tutorial" in flags.arms:
        parser.error("the tutorial has one process: give --arms ready")
    if unknown := set(names := flags.arms.split(",")) - {*ARMS}:
        parser.error(f"--arms {unknown.pop()}: choose of {', '.join(ARMS)}")
    steps = str(flags.steps or STEPS.get(Path(file).stem, 10))
    words += ["--epochs", "100000", "--checkpoint_every", "1000000000", "--log_every", "1000000000"]
    words += ["--telemetry_s", "0", "--trackers", "none"]
    arms = {name: Arm(flags.processes, name, steps, file, *words) for name in names}
    arms |= {more: Arm(flags.processes, "ready", steps, file, *words, *more.split()) for more in flags.vary}
    rounds = in_turn({name: arm.block for name, arm in arms.items()}, flags.rounds)
    us = {name: round(1e6 * arm.cpu_s / arm.images) for name, arm in arms.items()}
    facts = f"{arms[names[-1]].facts}, {os.cpu_count()} cores, {torch.get_num_threads()} threads"
    report(rounds, "images/s", names[0], flags.json, core_us_per_image=us, where=facts)
    return 0


if __name__ == "__main__":
    sys.exit(run_command(main))
