"""train_cnn_a.py and train_cnn_b.py against the way of PyTorch's CIFAR-10 tutorial, side by side in one run.

Results and machine: benchmarks/README.md.

    python -m benchmarks.tutorial_speed --batch_size 512 --steps 49
    python -m benchmarks.tutorial_speed --batch_size 512 --steps 98 --widths 4,8,32 --mixed_precision no
    python -m benchmarks.tutorial_speed --script train_cnn_b
    python -m benchmarks.tutorial_speed --batch_size 512 --accuracy 3

Each arm is a process of its own, and one of them works at a time: a block of steps of the first, of the
second, of the third, and again. The arms:

tutorial   PIL images, torchvision transforms in 2 DataLoader workers, float32, contiguous, `.item()` each
           step; network, optimizer, batch size and learning rate are the script's
ours       the script's main() itself, a stopwatch in its log
ceiling    the same main() on one batch that is ready on the device: no data, no augmentation

No arm evaluates during the blocks. On a GPU: not yet measured.
"""

import argparse
import contextlib
import importlib
import io
import json
import multiprocessing
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection, wait
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import psutil
import torch
from accelerate import Accelerator
from PIL import Image
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from common.data.cache import prepare_data
from common.data.images import Images, open_images
from common.data.splits import ArraySplit
from common.distributed.accelerator import start
from common.distributed.strategy import device_name, precision
from common.recipe import ImageRecipe, parse
from common.run.run import Run
from common.script import recipe_class

# --- The arms, each in a process of its own ---------------------------------------------------------------


class Stopwatch:
    """Counts an arm's steps and stops it after each block, until the parent asks for the next."""

    def __init__(self, link: Connection):
        self.link = link
        self.about: dict[str, Any] = {}
        self.left, self.images, self.began = 1, 0, time.perf_counter()  # the first step: ready

    def step(self, images: int) -> None:
        """An optimizer step is done. Raises EOFError when the parent asks for no more, or is gone."""
        self.left -= 1
        self.images += images
        if self.left:
            return
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        block = {"images": self.images, "seconds": time.perf_counter() - self.began}
        self.link.send(("block", block | self.about))
        self.left, self.images = self.link.recv(), 0
        self.began = time.perf_counter()


def ours(script: ModuleType, argv: list[str], link: Connection, timed: bool, resident: bool = False) -> None:
    """The script's main() with a Run that reports to the parent. resident: always the same batch."""
    stopwatch = Stopwatch(link)

    class ReportingRun(Run):
        def __init__(self, accelerator: Accelerator, *others: Any):
            super().__init__(accelerator, *others)
            stopwatch.about = {"device": device_name(accelerator), "precision": precision(accelerator)}

        def add(self, loss: Tensor, ids: np.ndarray) -> None:
            super().add(loss, ids)
            if timed and self.meter.micro_batches % self.batch.accumulations == 0:
                stopwatch.step(self.batch.total)

        def log_evaluation(self, step: int, metrics: dict[str, float]) -> None:
            if not timed:
                super().log_evaluation(step, metrics)
                link.send(("epoch", metrics["accuracy"]))

    script.Run = ReportingRun
    if timed:
        script.evaluate = lambda *_, **__: {}
    if resident:
        script.training_batches = one_batch
    sys.argv = [script.__file__, *argv]
    with contextlib.redirect_stdout(io.StringIO()):
        recipe = parse(recipe_class(script))
        script.main.__wrapped__(recipe, *start(recipe, clip_norm=recipe.clip_norm))


def one_batch(images: Images, plan: Any, device: torch.device, recipe: ImageRecipe) -> Iterator[tuple]:
    """Replaces the script's training_batches: batches of its shape and layout, always the same pixels."""
    inputs = labels = None
    for _, ids in plan:
        if inputs is None:
            shape = (len(ids), 3, recipe.image_size, recipe.image_size)
            inputs = torch.randn(shape, device=device).to(memory_format=torch.channels_last)
            labels = torch.randint(len(images.classes), (len(ids),), device=device)
        yield inputs, labels, ids


class TutorialImages(Dataset):
    """torchvision's way with CIFAR10: decoded arrays in memory, each made a PIL image for the transforms."""

    def __init__(self, split: ArraySplit, transform: Callable):
        self.data, self.targets = np.array(split.images), split.labels.tolist()
        self.transform = transform

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        return self.transform(Image.fromarray(self.data[index])), self.targets[index]

    def __len__(self) -> int:
        return len(self.data)


def tutorial_loaders(script: ModuleType, recipe: ImageRecipe) -> tuple[DataLoader, DataLoader, int]:
    """Training and test images, and the number of classes."""
    from torchvision.transforms import Compose, Normalize, RandomCrop, RandomHorizontalFlip, ToTensor

    images = open_images(prepare_data(recipe.data, Path(recipe.cache_dir or "~/.cache/train-images")))
    if not isinstance(images.train, ArraySplit) or images.train.size != (recipe.image_size,) * 2:
        raise ValueError(
            f"--data {recipe.data}: needs images of {recipe.image_size} pixels that fit in memory"
        )
    plain = [ToTensor(), Normalize(script.MEAN, script.STD)]
    size = recipe.image_size
    random = [RandomCrop(size, padding=size // 8), *([RandomHorizontalFlip()] if images.mirror else [])]
    train, test = (
        TutorialImages(images.train, Compose(random + plain)),
        TutorialImages(images.val, Compose(plain)),
    )
    # fork, as in a script: the arm itself was spawned, and its workers would be, too, in 10 s an epoch
    options = dict(batch_size=recipe.batch_size, num_workers=2, multiprocessing_context="fork")
    return DataLoader(train, shuffle=True, **options), DataLoader(test, **options), len(images.classes)


def tutorial(script: ModuleType, argv: list[str], link: Connection, timed: bool) -> None:
    recipe = parse(getattr(script, RECIPES[script.__name__]), argv)
    train, test, classes = tutorial_loaders(script, recipe)
    stopwatch = Stopwatch(link)
    device = torch.device("cuda:0" if torch.cuda.is_available() else "cpu")
    torch.manual_seed(recipe.seed)
    net = script.build_model(recipe, classes).to(device)
    if hasattr(net, "blocks"):
        relu_before_pool(net)
    optimizer = script.build_optimizer(net, recipe)
    criterion = nn.CrossEntropyLoss(label_smoothing=recipe.label_smoothing)
    step = 0
    for _ in range(recipe.epochs):
        running_loss = 0.0
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
            if timed:
                stopwatch.step(len(labels))
        if not timed:
            link.send(("epoch", tutorial_accuracy(net, test, device)))


def relu_before_pool(net: nn.Module) -> None:
    """CNN-A's layers in the usual order: the same function and weights."""
    for block in net.blocks:
        block[1], block[2] = block[2], block[1]


def tutorial_accuracy(net: nn.Module, test: DataLoader, device: torch.device) -> float:
    correct = total = 0
    with torch.no_grad():
        for inputs, labels in test:
            _, predicted = torch.max(net(inputs.to(device)), 1)
            total += labels.size(0)
            correct += (predicted == labels.to(device)).sum().item()
    return correct / total


def ceiling(script: ModuleType, argv: list[str], link: Connection, timed: bool) -> None:
    ours(script, argv, link, timed, resident=True)


RECIPES = {"train_cnn_a": "CnnA", "train_cnn_b": "CnnB"}
STEPS = {"train_cnn_a": 100, "train_cnn_b": 6}  # of a block, some seconds on a CPU
WARMUP = {"train_cnn_a": 20, "train_cnn_b": 3}  # steps before the first block
ARMS = {"tutorial": tutorial, "ours": ours, "ceiling": ceiling}


def work(name: str, script: str, argv: list[str], link: Connection, timed: bool) -> None:
    """Runs an arm in a child process. It ends with the parent, when the link is closed."""
    try:
        ARMS[name](importlib.import_module(script), argv, link, timed)
    except (EOFError, BrokenPipeError, KeyboardInterrupt):
        os._exit(0)  # the parent has ended or wants no more
    except ValueError as error:
        link.send(("error", str(error)))
    else:
        link.send(("end", None))


# --- The parent -------------------------------------------------------------------------------------------


class Arm:
    """A started arm. A context manager that ends it."""

    def __init__(self, name: str, script: str, argv: list[str], timed: bool):
        context = multiprocessing.get_context("spawn")
        self.name = name
        self.link, theirs = context.Pipe()
        self.process = context.Process(target=work, args=(name, script, argv, theirs, timed))
        self.process.start()
        theirs.close()
        self.tree = psutil.Process(self.process.pid)

    def __enter__(self) -> "Arm":
        return self

    def __exit__(self, *_: object) -> None:
        """Ends the arm; its DataLoader workers end with it."""
        self.link.close()
        self.process.join(10)
        self.process.kill()

    def answer(self) -> tuple[str, Any]:
        """The next message. Raises ValueError when it is an error, or when the process died."""
        wait([self.link, self.process.sentinel])
        if not self.link.poll():
            raise ValueError(f"{self.name}: ended with status {self.process.exitcode}")
        kind, content = self.link.recv()
        if kind == "error":
            raise ValueError(f"{self.name}: {content}")
        return kind, content

    def block(self, steps: int) -> dict[str, Any]:
        """Lets the arm do some steps. images, seconds, images_per_s; cpu_s of the arm, of all others."""
        cpu_s, busy_s = self.cpu_s(), machine_cpu_s()
        self.link.send(steps)
        _, block = self.answer()
        block["images_per_s"] = block["images"] / block["seconds"]
        block["cpu_s"] = self.cpu_s() - cpu_s
        block["other_cpu_s"] = max(0.0, machine_cpu_s() - busy_s - block["cpu_s"])
        return block

    def cpu_s(self) -> float:
        """Seconds of all cores that the process and its DataLoader workers have used."""
        times = self.tree.cpu_times()
        used_s = times.user + times.system + times.children_user + times.children_system
        for child in self.tree.children(recursive=True):
            with contextlib.suppress(psutil.NoSuchProcess):
                used_s += sum(child.cpu_times()[:2])
        return used_s


def machine_cpu_s() -> float:
    times = psutil.cpu_times()
    return sum(times) - times.idle - getattr(times, "iowait", 0.0)


def measure(flags: list[str], options: argparse.Namespace, say: Callable) -> dict[str, Any]:
    """Blocks of all arms in turn, their medians and the medians of each round's ratios."""
    blocks: dict[str, list[dict]] = {name: [] for name in ARMS}
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        arms = []
        for name in ARMS:
            say(f"starting {name}")
            words = [*flags, "--epochs", "1000", "--checkpoint_every", "1000000000"]
            words += ["--output_dir", str(folder / name)]
            arms.append(stack.enter_context(Arm(name, options.script, words, timed=True)))
            arms[-1].answer()
            arms[-1].block(options.warmup)
        for number in range(1, options.blocks + 1):
            for arm in arms:
                arm.block(LEAD_IN)
                blocks[arm.name].append(arm.block(options.steps))
                say(f"block {number}/{options.blocks} {arm.name:8} {in_words(blocks[arm.name][-1])}")
    return {"blocks": blocks, **summary(blocks)}


def in_words(block: dict[str, Any]) -> str:
    others = block["other_cpu_s"] / block["seconds"]
    return f"{block['images_per_s']:9,.0f} images/s, other processes {others:.2f} cores"


LEAD_IN = 5  # steps before each block: more than the 4 batches that the tutorial's idle workers have ready


def summary(blocks: dict[str, list[dict]]) -> dict[str, Any]:
    median = statistics.median

    def ratio(other: str) -> float:
        pairs = zip(blocks["ours"], blocks[other], strict=True)
        return median(a["images_per_s"] / b["images_per_s"] for a, b in pairs)

    everything = [block for arm in blocks.values() for block in arm]
    seconds = sum(block["seconds"] for block in everything)
    return {
        "device": blocks["ours"][0]["device"],
        "precision": blocks["ours"][0]["precision"],
        "images_per_s": {k: median(b["images_per_s"] for b in v) for k, v in blocks.items()},
        "cpu_us_per_image": {k: median(1e6 * b["cpu_s"] / b["images"] for b in v) for k, v in blocks.items()},
        "ours_over_tutorial": ratio("tutorial"),
        "ours_over_ceiling": ratio("ceiling"),
        "cores_taken_by_others": sum(block["other_cpu_s"] for block in everything) / seconds,
    }


def accuracies(flags: list[str], options: argparse.Namespace, say: Callable) -> dict[str, Any]:
    """Trains both ways to the end, one after the other, with each seed. Accuracies on the test images."""
    finals: dict[str, list[float]] = {"tutorial": [], "ours": []}
    for seed in range(options.seeds):
        for name in finals:
            with tempfile.TemporaryDirectory() as folder:
                words = [*flags, "--epochs", str(options.accuracy), "--seed", str(seed)]
                words += ["--output_dir", folder + "/run"]
                with Arm(name, options.script, words, timed=False) as arm:
                    finals[name].append(final_accuracy(arm, f"seed {seed}, {name}", say))
    return {"epochs": options.accuracy, "accuracy": finals}


def final_accuracy(arm: Arm, about: str, say: Callable) -> float:
    began, epoch, last = time.perf_counter(), 0, 0.0
    kind, content = arm.answer()
    while kind != "end":
        epoch, last = epoch + 1, content
        say(f"{about}: epoch {epoch}, test accuracy {last:.4f}, {time.perf_counter() - began:.0f} s")
        kind, content = arm.answer()
    return last


# --- Output -----------------------------------------------------------------------------------------------


def speed_table(result: dict[str, Any], options: argparse.Namespace) -> Table:
    table = Table(title=f"Medians of {options.blocks} blocks of {options.steps} steps", title_justify="left")
    for name in ARMS:
        table.add_column(f"{name}\nimages/s", justify="right")
    for title in ("ours /\ntutorial", "ours /\nceiling", "tutorial\ncore us/image", "ours\ncore us/image"):
        table.add_column(title, justify="right")
    speeds = [f"{result['images_per_s'][name]:,.0f}" for name in ARMS]
    ratios = [f"{result['ours_over_tutorial']:.2f}", f"{result['ours_over_ceiling']:.2f}"]
    cpu = result["cpu_us_per_image"]
    table.add_row(*speeds, *ratios, f"{cpu['tutorial']:.0f}", f"{cpu['ours']:.0f}")
    return table


def accuracy_table(result: dict[str, Any], options: argparse.Namespace) -> Table:
    title = f"Test accuracy after {options.accuracy} epochs, mean of {options.seeds} seeds (each)"
    table = Table("tutorial", "ours", "difference", title=title, title_justify="left")
    means = {name: statistics.mean(values) for name, values in result["accuracy"].items()}
    cells = [
        f"{means[name]:.4f} ({', '.join(f'{a:.4f}' for a in values)})"
        for name, values in result["accuracy"].items()
    ]
    table.add_row(*cells, f"{means['ours'] - means['tutorial']:+.4f}")
    return table


def read_options() -> tuple[argparse.Namespace, list[str]]:
    """The benchmark's own flags, and those that are left for the script."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.tutorial_speed",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog="All other flags are the script's, for all arms: --batch_size 64, --mixed_precision no",
        allow_abbrev=False,
    )
    parser.add_argument("--script", choices=RECIPES, default="train_cnn_a", help="(default: %(default)s)")
    numbers = {
        "blocks": (5, "blocks of each arm"),
        "seeds": (1, "trainings of each way for --accuracy, with the seeds 0, 1, ..."),
    }
    for name, (default, text) in numbers.items():
        parser.add_argument(f"--{name}", type=positive, default=default, help=f"{text} (default: {default})")
    parser.add_argument(
        "--accuracy",
        type=positive,
        metavar="EPOCHS",
        help="compare test accuracies after so many epochs instead",
    )
    parser.add_argument("--json", metavar="FILE", type=Path, help="write all blocks and results there")
    for name, by_script, text in (
        ("steps", STEPS, "optimizer steps of a block"),
        ("warmup", WARMUP, "optimizer steps of each arm before the first block"),
    ):
        defaults = ", ".join(f"{script}: {n}" for script, n in by_script.items())
        parser.add_argument(f"--{name}", type=positive, help=f"{text} (default: {defaults})")
    options, flags = parser.parse_known_args()
    options.steps = options.steps or STEPS[options.script]
    options.warmup = options.warmup or WARMUP[options.script]
    script = importlib.import_module(options.script)
    parse(getattr(script, RECIPES[options.script]), flags)  # a mistake ends it here
    return options, flags


def positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError("must be at least 1")
    return number


def main() -> None:
    options, flags = read_options()
    console = Console(width=None if sys.stdout.isatty() else 110)
    began = time.perf_counter()

    def say(line: str) -> None:
        console.print(f"{time.perf_counter() - began:5.0f} s  {line}", highlight=False)

    compare = accuracies if options.accuracy else measure
    try:
        result = compare(flags, options, say)
    except ValueError as error:
        sys.exit(f"error: {error}")
    except KeyboardInterrupt:
        sys.exit("interrupted")
    console.print((accuracy_table if options.accuracy else speed_table)(result, options))
    if not options.accuracy:
        console.print(
            f"{result['device']}, {os.cpu_count()} cores, {torch.get_num_threads()} threads, ours in"
            f" {result['precision']}; {result['cores_taken_by_others']:.2f} cores taken by other processes",
            highlight=False,
        )
    if options.json:
        options.json.write_text(
            json.dumps({"script": options.script, "flags": flags, **result}, indent=2) + "\n"
        )


if __name__ == "__main__":
    main()
