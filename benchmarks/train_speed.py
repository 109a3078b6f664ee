"""Training speed of a script, beside PyTorch's CIFAR-10 tutorial, a batch that is ready, or other flags.

Results and machines: benchmarks/README.md.

    python -m benchmarks.train_speed train_cnn_a.py --batch_size 512
    python -m benchmarks.train_speed train_cnn_b.py
    python -m benchmarks.train_speed --arms ready,ours train_vit.py --data SHARDS --workers 8
    python -m benchmarks.train_speed --arms ready --vary "--telemetry_s 0.02" train_cnn_a.py

Each arm is a process of its own, and one of them works at a time: a block of --steps, after some that do not
count. All flags behind the script are its own, in all arms.

tutorial  PIL images, torchvision's transforms in 2 DataLoader workers, float32, contiguous, `.item()` each
          step; network, optimizer, batch size and learning rate are the script's. For train_cnn_*.py
ours      the script's main(), without evaluations and telemetry
ready     the same on one batch that stays on the device: no data, no augmentation
--vary    one more arm like `ready`, with these flags in addition

On a GPU: not yet measured.
"""

import contextlib
import multiprocessing
import os
import sys
import tempfile
import time
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
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

ARMS = ("tutorial", "ours", "ready")
STEPS = {"train_cnn_a": 100, "train_cnn_b": 6}  # of a block, some seconds on a CPU
LEAD_IN = 5  # steps before each block: more than the 4 batches that the tutorial's idle workers have ready


class Stopwatch:
    """Counts the steps of this process, and waits after each block until the parent asks for the next."""

    def __init__(self, link: Connection):
        self.link, self.left, self.images, self.began = link, 1, 0, time.perf_counter()

    def step(self, images: int, facts: str = "") -> None:
        """An optimizer step is done. Raises EOFError when the parent asks for no more, or is gone."""
        self.left -= 1
        self.images += images
        if not self.left:
            wait_for_device()
            self.link.send((self.images, time.perf_counter() - self.began, facts))
            self.left, self.images = self.link.recv(), 0
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
    train = DataLoader(  # fork, as in a script: this process was spawned, and its workers would be, too
        TutorialImages(images.train, augment),
        recipe.batch_size,
        shuffle=True,
        num_workers=2,
        multiprocessing_context="fork",
    )
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


def work(arm: str, file: str, words: list[str], link: Connection) -> None:
    """Runs an arm in a child process. It ends with the parent, when the link is closed."""
    script, stopwatch = load_script(Path(file).resolve()), Stopwatch(link)

    def step(run: Run) -> None:
        facts = f"{device_name(run.accelerator)}, {run.batch}, mixed precision {precision(run.accelerator)}"
        stopwatch.step(run.batch.total, facts)

    try:
        if arm == "tutorial":
            tutorial(script, words, stopwatch)
        else:
            train_watched(script, words, step, lambda: arm != "ours")
    except (EOFError, BrokenPipeError, KeyboardInterrupt):
        os._exit(0)  # the parent has ended or wants no more
    except ValueError as error:
        link.send(error)


class Arm:
    """A started arm. A context manager that ends it. cpu_s, images: of all its blocks."""

    def __init__(self, *what: Any):
        context = multiprocessing.get_context("spawn")
        self.link, theirs = context.Pipe()
        self.process = context.Process(target=work, args=(*what, theirs))
        self.process.start()
        theirs.close()
        self.tree, self.cpu_s, self.images, self.facts = psutil.Process(self.process.pid), 0.0, 0, ""

    def __enter__(self) -> "Arm":
        self.answer()  # the first step
        return self

    def __exit__(self, *_: object) -> None:
        """Ends the arm; its DataLoader workers end with it."""
        self.link.close()
        self.process.join(10)
        self.process.kill()

    def answer(self) -> tuple[int, float, str]:
        wait([self.link, self.process.sentinel])
        if not self.link.poll():
            raise ValueError(f"an arm ended with status {self.process.exitcode}")
        if isinstance(answer := self.link.recv(), ValueError):
            raise answer
        return answer

    def block(self, steps: int) -> float:
        """Images a second of so many steps, after some that do not count."""
        self.link.send(LEAD_IN)
        self.answer()
        before = self.used_s()
        self.link.send(steps)
        images, seconds, self.facts = self.answer()
        self.cpu_s, self.images = self.cpu_s + self.used_s() - before, self.images + images
        return images / seconds

    def used_s(self) -> float:
        """Seconds of all cores that the process and its workers have used."""
        used_s = sum(self.tree.cpu_times()[:4])
        for child in self.tree.children(recursive=True):
            with contextlib.suppress(psutil.NoSuchProcess):
                used_s += sum(child.cpu_times()[:2])
        return used_s


def main() -> int:
    parser = benchmark_parser(__doc__, rounds=5)
    parser.add_argument("--arms", default=",".join(ARMS), help="(default: %(default)s)")
    parser.add_argument("--vary", action="append", default=[], metavar="FLAGS", help="also with these flags")
    parser.add_argument("--steps", type=positive, help="optimizer steps of a block")
    own, words = split_at_script(sys.argv[1:])
    flags = parser.parse_args(own)
    if not words:
        parser.error("name a script: train_cnn_a.py")
    file, *words = words
    parse(recipe_class(load_script(Path(file).resolve())), words)  # a mistake ends it here
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
            arms[name] = stack.enter_context(Arm(kind, file, [*words, *quiet, *more]))
            arms[name].block(1)
        rounds = in_turn({name: lambda arm=arm: arm.block(steps) for name, arm in arms.items()}, flags.rounds)
    us = {name: round(1e6 * arm.cpu_s / arm.images) for name, arm in arms.items()}
    facts = f"{arms[names[-1]].facts}, {os.cpu_count()} cores, {torch.get_num_threads()} threads"
    report(rounds, "images/s", names[0], flags.json, core_us_per_image=us, where=facts)
    return 0


if __name__ == "__main__":
    sys.exit(run_command(main))
