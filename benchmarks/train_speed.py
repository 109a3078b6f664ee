"""Training speed of a script, beside PyTorch's CIFAR-10 tutorial, a batch that is ready, or other flags.

Results and machines: benchmarks/README.md.

    python -m benchmarks.train_speed train_cnn_a.py --batch_size 512
    python -m benchmarks.train_speed train_cnn_b.py
    python -m benchmarks.train_speed --arms ready,ours train_vit.py --data SHARDS --workers 8
    python -m benchmarks.train_speed --arms ready --vary "--telemetry_s 0.02" train_cnn_a.py
    python -m benchmarks.train_speed --processes 2 --arms ready --vary=--deterministic train_cnn_b.py

Each arm is a process of its own, or --processes under DDP, and one of them works at a time: a block of
--steps, after some that do not count. All flags behind the script are its own, in all arms.

tutorial  PIL images, torchvision's transforms in 2 DataLoader workers, float32, contiguous, `.item()` each
          step; network, optimizer, batch size and learning rate are the script's. For train_cnn_*.py
ours      the script's main(), without evaluations and telemetry
ready     the same on one batch that stays on the device: no data, no augmentation
--vary    one more arm like `ready`, with these flags in addition

On a GPU: not yet measured.
"""

import contextlib
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import psutil
import torch
from PIL import Image
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from benchmarks.harness import benchmark_parser, in_turn, positive, report, train_watched, wait_for_device
from common.data.cache import prepare_data
from common.data.images import open_images
from common.data.splits import ArraySplit
from common.distributed.strategy import device_name, precision
from common.recipe import parse
from common.run.run import Run
from common.script import load_script, recipe_class
from common.system.cli import run_command, split_at_script
from common.system.env import rank
from common.system.processes import kill

ARMS = ("tutorial", "ours", "ready")
STEPS = {"train_cnn_a": 100, "train_cnn_b": 6}  # of a block, some seconds on a CPU
LEAD_IN = 5  # steps before each block: more than the 4 batches that the tutorial's idle workers have ready


class Stopwatch:
    """Counts the steps of an arm's process, and waits after each block until the parent asks for the next."""

    def __init__(self) -> None:
        self.output, self.left, self.images, self.began = sys.stdout, 1, 0, time.perf_counter()

    def step(self, images: int, facts: str = "") -> None:
        """An optimizer step is done. Ends the process when the parent asks for no more, or is gone."""
        self.left -= 1
        self.images += images
        if not self.left and rank() == 0:  # the others wait for it in their next exchange
            wait_for_device()
            block = self.images, time.perf_counter() - self.began, facts
            print(json.dumps(block), file=self.output, flush=True)
            self.left, self.images = int(sys.stdin.readline() or os._exit(0)), 0
            self.began = time.perf_counter()


class TutorialImages(Dataset):
    """torchvision's way with CIFAR10: decoded arrays in memory, each made a PIL image for the transforms."""

    def __init__(self, split: ArraySplit, transform: Callable):
        self.data, self.targets, self.transform = np.array(split.images), split.labels.tolist(), transform

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        return self.transform(Image.fromarray(self.data[index])), self.targets[index]

    def __len__(self) -> int:
        return len(self.data)


def tutorial(script: ModuleType, words: list[str], stopwatch: Stopwatch) -> None:
    from torchvision.transforms import Compose, Normalize, RandomCrop, RandomHorizontalFlip, ToTensor

    recipe: Any = parse(recipe_class(script), words)
    images, size = open_images(prepare_data(recipe.data, cache_of(recipe))), recipe.image_size
    if not isinstance(images.train, ArraySplit) or images.train.size != (size, size):
        raise ValueError(f"--data {recipe.data}: needs images of {size} pixels that fit in memory")
    steps = [RandomCrop(size, padding=size // 8), *([RandomHorizontalFlip()] if images.train.mirror else [])]
    augment = Compose([*steps, ToTensor(), Normalize(script.MEAN, script.STD)])
    dataset, fork = TutorialImages(images.train, augment), dict(num_workers=2, multiprocessing_context="fork")
    train = DataLoader(dataset, recipe.batch_size, shuffle=True, **fork)
    device = torch.device("cuda:0" if torch.cuda.is_available() else "cpu")
    torch.manual_seed(recipe.seed)
    net = script.build_model(recipe, len(images.classes)).to(device)
    for block in getattr(net, "blocks", ()):  # the usual order: the same function and weights
        block[1], block[2] = block[2], block[1]
    optimizer = script.build_optimizer(net, recipe)
    criterion, step, running_loss = nn.CrossEntropyLoss(label_smoothing=recipe.label_smoothing), 0, 0.0
    for _ in range(recipe.epochs):
        for inputs, labels in train:
            for group in optimizer.param_groups:
                group["lr"] = script.learning_rate(recipe, step, recipe.epochs * len(train))
            inputs, labels = inputs.to(device), labels.to(device)
            optimizer.zero_grad()
            loss = criterion(net(inputs), labels)
            loss.backward()
            optimizer.step()
            running_loss += loss.item()
            step += 1
            stopwatch.step(len(labels))


def cache_of(recipe: Any) -> Path:
    return Path(recipe.cache_dir or "~/.cache/train-images").expanduser()


def work(arm: str, file: str, words: list[str]) -> int:
    """Runs an arm in this process, until its standard input is closed."""
    script, stopwatch = load_script(Path(file).resolve()), Stopwatch()

    def step(run: Run) -> None:
        facts = f"{device_name(run.accelerator)}, {run.batch}, mixed precision {precision(run.accelerator)}"
        stopwatch.step(run.batch.total, facts)

    if arm == "tutorial":
        tutorial(script, words, stopwatch)
    else:
        train_watched(script, words, step, lambda: arm != "ours")
    return 1  # the training ended before the benchmark


class Arm:
    """The processes that run an arm. cpu_s, images: of all its blocks."""

    def __init__(self, processes: int, *what: str):
        torchrun = ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={processes}"]
        words = [*(torchrun if processes > 1 else []), "-m", "benchmarks.train_speed", "--as", *what]
        words = [sys.executable, *words]
        self.process = psutil.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self.cpu_s, self.images, self.facts = 0.0, 0, ""

    def __enter__(self) -> "Arm":
        self.answer()  # the first step
        return self

    def __exit__(self, *_: object) -> None:
        """Ends the arm; its DataLoader workers end with it."""
        below = self.process.children(recursive=True)
        self.process.stdin.close()
        psutil.wait_procs([self.process], timeout=10)
        kill([*below, self.process])

    def answer(self, steps: int | None = None) -> tuple[int, float, str]:
        """Images, seconds and facts of a block of so many steps."""
        if steps:
            print(steps, file=self.process.stdin, flush=True)
        if not (line := self.process.stdout.readline()):
            raise ValueError(f"an arm ended with status {self.process.wait()}")
        return json.loads(line)

    def block(self, steps: int) -> float:
        """Images a second of so many steps, after some that do not count."""
        self.answer(LEAD_IN)
        before = self.used_s()
        images, seconds, self.facts = self.answer(steps)
        self.cpu_s, self.images = self.cpu_s + self.used_s() - before, self.images + images
        return images / seconds

    def used_s(self) -> float:
        """Seconds of all cores that the processes and their workers have used."""
        used_s = sum(self.process.cpu_times()[:4])
        for child in self.process.children(recursive=True):
            with contextlib.suppress(psutil.NoSuchProcess):
                used_s += sum(child.cpu_times()[:2])
        return used_s


def main() -> int:
    if sys.argv[1:2] == ["--as"]:  # a process of an arm
        return work(sys.argv[2], sys.argv[3], sys.argv[4:])
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
    steps = flags.steps or STEPS.get(Path(file).stem, 10)
    words += ["--epochs", "100000", "--checkpoint_every", "1000000000", "--log_every", "1000000000"]
    chosen = {name: (name, []) for name in names} | {more: ("ready", more.split()) for more in flags.vary}
    with contextlib.ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory())
        arms = {}
        for number, (name, (kind, more)) in enumerate(chosen.items()):
            quiet = ["--telemetry_s", "0", "--trackers", "none", "--output_dir", f"{folder}/{number}"]
            arms[name] = stack.enter_context(Arm(flags.processes, kind, file, *words, *quiet, *more))
            arms[name].block(1)
        rounds = in_turn({name: lambda arm=arm: arm.block(steps) for name, arm in arms.items()}, flags.rounds)
    us = {name: round(1e6 * arm.cpu_s / arm.images) for name, arm in arms.items()}
    facts = f"{arms[names[-1]].facts}, {os.cpu_count()} cores, {torch.get_num_threads()} threads"
    report(rounds, "images/s", names[0], flags.json, core_us_per_image=us, where=facts)
    return 0


if __name__ == "__main__":
    sys.exit(run_command(main))
