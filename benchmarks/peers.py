"""Compare the project's training throughput with other projects on the same data and device.

    git clone https://github.com/huggingface/pytorch-image-models
    python -m benchmarks.peers --timm pytorch-image-models --data /data/cifar10 --workers 14

The benchmark compares train_vit.py with timm's train.py from the clone, with the same model, batch size,
mixup, cutmix, drop path and bf16, with and without compilation. timm's workers read the images from PNG files
and enlarge them. The benchmark also compares train_cnn_a.py with the loop of the Accelerate tutorial
(`tutorial` in benchmarks/train_speed.py). Each arm runs in a separate process. docs/gpu.md contains the
results.

The following command takes a few minutes on a CPU:

    python -m benchmarks.peers --timm pytorch-image-models --data digits --steps 4 \\
        --vit "--model test_vit --image_size 64 --batch_size 32" --cnn "--batch_size 64"
"""

import contextlib
import json
import math
import re
import shlex
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import psutil
import torch
from PIL import Image
from rich.console import Console
from rich.table import Table

from benchmarks.harness import positive
from benchmarks.train_speed import Arm
from onecurve.data.cache import prepare_data
from onecurve.data.images import open_images
from onecurve.data.splits import ArraySplit
from onecurve.models.script import load_script, recipe_of
from onecurve.system.cli import command_parser, run_command
from onecurve.system.paths import ROOT
from onecurve.system.processes import kill

SKIPPED = 16  # number of unmeasured first updates in timm's train.py, which start workers and compile
QUIET = "--trackers none --telemetry_s 0 --log_every 1000000000 --epochs 100000 --checkpoint_every 1000000000"
# Update number, and the mean images/s over all updates so far
LINE = re.compile(r"Train: 0 \[ *(\d+)/.*\(\d+\.\d+s, +([\d.]+)/s\)")
COMPILED = {"": [], ", compiled": ["--torchcompile", "inductor"]}


def main() -> int:
    parser = command_parser(__doc__, "python -m benchmarks.peers --timm PATH --data DATA [flags]")
    add = parser.add_argument
    add("--timm", type=Path, required=True, metavar="PATH", help="clone of huggingface/pytorch-image-models")
    add("--data", required=True, metavar="DATA", help="data set that fits in memory, for example CIFAR-10")
    add(
        "--cache_dir",
        default="~/.cache/train-images",
        metavar="PATH",
        help="folder for decoded images (default: %(default)s)",
    )
    add(
        "--workers",
        type=positive,
        default=14,
        metavar="N",
        help="number of workers in the other projects (default: %(default)s)",
    )
    add(
        "--steps",
        type=positive,
        default=80,
        metavar="N",
        help=f"measured steps of timm's train.py, after {SKIPPED} unmeasured steps (default: %(default)s)",
    )
    add("--vit", default="--batch_size 512", metavar="FLAGS", help="flags for the ViT (default: %(default)s)")
    add("--cnn", default="--batch_size 512", metavar="FLAGS", help="flags for the CNN (default: %(default)s)")
    flags = parser.parse_args()
    if not (file := flags.timm / "train.py").is_file():
        raise ValueError(f"--timm {flags.timm} contains no train.py. Pass a clone of pytorch-image-models.")
    shared = ["--data", flags.data, "--cache_dir", flags.cache_dir, *QUIET.split()]
    vit, cnn = [*shlex.split(flags.vit), *shared], [*shlex.split(flags.cnn), *shared]
    tutorial = Arm(1, "tutorial", str(flags.steps), "train_cnn_a.py", *cnn, "--workers", str(flags.workers))
    names = ("train_vit.py", "train_vit.py, compiled")
    speeds = dict(zip(names, script_speeds("train_vit.py", vit), strict=True))
    with tempfile.TemporaryDirectory() as folder:
        words = [str(file.absolute()), *timm_flags(vit, Path(folder)), "--workers", str(flags.workers)]
        for name, more in COMPILED.items():
            speeds[f"timm's train.py{name}"] = timms([*words, *more], flags.steps)
    speeds["train_cnn_a.py"] = script_speeds("train_cnn_a.py", cnn)[0]
    speeds["the Accelerate tutorial's loop"] = tutorial.block()
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU"
    table = Table("training", "images/s", title=f"{device}, torch {torch.__version__}", title_justify="left")
    for name, speed in speeds.items():
        table.add_row(name, f"{speed:,.0f}")
    Console(width=110).print(table)
    return 0


def script_speeds(script: str, words: list[str]) -> list[float]:
    """Return the images/s that benchmarks.gpu.probe measures, and for train_vit.py, also with compilation."""
    watches = ["--watch", "fed", *(["--watch", "fed --compile default"] if script == "train_vit.py" else [])]
    command = [sys.executable, "-m", "benchmarks.gpu.probe", *watches, script, *words]
    done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, check=False)
    results: list[Any] = json.loads(done.stdout.splitlines()[-1]) if done.stdout else [{"error": "it failed"}]
    if errors := [f"{script}: {result['error']}" for result in results if "error" in result]:
        raise ValueError(errors[0])
    return [result["fed"]["images_per_s"] for result in results]


def timm_flags(words: list[str], folder: Path) -> list[str]:
    """Translate train_vit.py's flags into flags for timm's train.py, and write the images to PNG files."""
    recipe = recipe_of(load_script(ROOT / "train_vit.py"), words)
    images = open_images(prepare_data(recipe.data, Path(recipe.cache_dir).expanduser()))
    if not isinstance(images.train, ArraySplit):
        raise ValueError(f"--data {recipe.data}: this benchmark needs images that fit in memory")
    for number, (pixels, label) in enumerate(zip(images.train.images, images.train.labels, strict=True)):
        for split in ("train", "validation")[: 2 if number < 64 else 1]:
            image_file = folder / split / f"{int(label):04d}" / f"{number}.png"
            image_file.parent.mkdir(parents=True, exist_ok=True)
            Image.fromarray(pixels).save(image_file)
    flags: dict[str, Any] = {"data-dir": folder, "output": folder / "out", "model": recipe.model}
    flags["img-size"] = recipe.image_size
    flags |= {"batch-size": recipe.batch_size, "drop-path": recipe.drop_path, "mixup": recipe.mixup}
    flags |= {"cutmix": recipe.cutmix, "lr": recipe.lr, "weight-decay": recipe.weight_decay}
    flags |= {"num-classes": len(images.classes), "smoothing": recipe.label_smoothing, "opt": "adamw"}
    flags["amp-dtype"] = "bfloat16"
    flags |= {"device": "cuda" if torch.cuda.is_available() else "cpu", "epochs": 1, "warmup-epochs": 0}
    return [*(f"--{name}={value}" for name, value in flags.items()), "--amp"]


def timms(words: list[str], steps: int) -> float:
    """Return the images/s in the log of timm's train.py, measured after the first SKIPPED updates."""
    seconds: dict[int, float] = {}
    words = [sys.executable, *words, f"--log-interval={math.gcd(SKIPPED, steps)}"]
    with psutil.Popen(words, stdout=-1, stderr=subprocess.STDOUT, text=True) as process:
        last = ""
        for line in process.stdout:
            last = line.strip() or last
            if match := LINE.search(line):
                update = int(match[1])
                seconds[update] = (update + 1) / float(match[2])  # elapsed seconds divided by the batch size
                if update >= SKIPPED + steps:
                    break
        with contextlib.suppress(psutil.NoSuchProcess):  # ignore a process that has already exited
            kill([*process.children(recursive=True), process])
    if SKIPPED not in seconds or (end := max(seconds)) == SKIPPED:
        raise ValueError(f"timm's train.py ended within {SKIPPED} updates, before the measurement: {last}")
    return (end - SKIPPED) / (seconds[end] - seconds[SKIPPED])


if __name__ == "__main__":
    sys.exit(run_command(main))
