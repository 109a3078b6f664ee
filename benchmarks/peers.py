"""Training speed beside what others would run, on the same images and device.

    git clone https://github.com/huggingface/pytorch-image-models
    python -m benchmarks.peers --timm pytorch-image-models --data /data/cifar10 --workers 14

train_vit.py stands beside timm's train.py, of that clone: the same model, batch, mixup, cutmix, drop path and
bf16; both also compiled. Images are PNG files for timm, which enlarges them in its workers. train_cnn_a.py
stands beside the loop of the Accelerate tutorial (`tutorial` of benchmarks/train_speed.py). Each arm is a
process of its own. Results: docs/gpu.md. On a CPU, some minutes:

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

SKIPPED = 16  # updates of timm's train.py that do not count: its workers start, and it compiles
QUIET = "--trackers none --telemetry_s 0 --log_every 1000000000 --epochs 100000 --checkpoint_every 1000000000"
LINE = re.compile(r"Train: 0 \[ *(\d+)/.*\(\d+\.\d+s, +([\d.]+)/s\)")  # the update, the mean rate until there
COMPILED = {"": [], ", compiled": ["--torchcompile", "inductor"]}


def main() -> int:
    parser = command_parser(__doc__)
    add = parser.add_argument
    add("--timm", type=Path, required=True, help="a clone of github.com/huggingface/pytorch-image-models")
    add("--data", required=True, help="images that fit in memory, such as CIFAR-10")
    add("--cache_dir", default="~/.cache/train-images", help="of decoded images (default: %(default)s)")
    add("--workers", type=positive, default=14, help="of the peers (default: %(default)s)")
    add("--steps", type=positive, default=80, help="of timm's train.py, after 16 more (default: %(default)s)")
    add("--vit", default="--batch_size 512", help="flags of train_vit.py (default: %(default)s)")
    add("--cnn", default="--batch_size 512", help="flags of train_cnn_a.py (default: %(default)s)")
    flags = parser.parse_args()
    if not (file := flags.timm / "train.py").is_file():
        raise ValueError(f"--timm {flags.timm}: has no train.py; name a clone of pytorch-image-models")
    shared = ["--data", flags.data, "--cache_dir", flags.cache_dir, *QUIET.split()]
    vit, cnn = [*shlex.split(flags.vit), *shared], [*shlex.split(flags.cnn), *shared]
    tutorial = Arm(1, "tutorial", str(flags.steps), "train_cnn_a.py", *cnn, "--workers", str(flags.workers))
    found = dict(zip(("train_vit.py", "train_vit.py, compiled"), ours("train_vit.py", vit), strict=True))
    with tempfile.TemporaryDirectory() as folder:
        words = [str(file.absolute()), *timm_flags(vit, Path(folder)), "--workers", str(flags.workers)]
        for name, more in COMPILED.items():
            found[f"timm's train.py{name}"] = timms([*words, *more], flags.steps)
    found["train_cnn_a.py"] = ours("train_cnn_a.py", cnn)[0]
    found["the Accelerate tutorial's loop"] = tutorial.block()
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU"
    table = Table("training", "images/s", title=f"{device}, torch {torch.__version__}", title_justify="left")
    for name, speed in found.items():
        table.add_row(name, f"{speed:,.0f}")
    Console(width=110).print(table)
    return 0


def ours(script: str, words: list[str]) -> list[float]:
    """Images/s of the script, and compiled, by benchmarks.gpu.probe."""
    watches = ["--watch", "fed", *(["--watch", "fed --compile default"] if script == "train_vit.py" else [])]
    command = [sys.executable, "-m", "benchmarks.gpu.probe", *watches, script, *words]
    done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, check=False)
    found: list[Any] = json.loads(done.stdout.splitlines()[-1]) if done.stdout else [{"error": "it failed"}]
    if errors := [f"{script}: {each['error']}" for each in found if "error" in each]:
        raise ValueError(errors[0])
    return [each["fed"]["images_per_s"] for each in found]


def timm_flags(words: list[str], folder: Path) -> list[str]:
    """What train_vit.py trains by these flags, as timm's flags. Writes the images as files."""
    recipe = recipe_of(load_script(ROOT / "train_vit.py"), words)
    images = open_images(prepare_data(recipe.data, Path(recipe.cache_dir).expanduser()))
    if not isinstance(images.train, ArraySplit):
        raise ValueError(f"--data {recipe.data}: needs images that fit in memory")
    for number, (pixels, label) in enumerate(zip(images.train.images, images.train.labels, strict=True)):
        for split in ("train", "validation")[: 2 if number < 64 else 1]:
            place = folder / split / f"{int(label):04d}" / f"{number}.png"
            place.parent.mkdir(parents=True, exist_ok=True)
            Image.fromarray(pixels).save(place)
    flags: dict[str, Any] = {"data-dir": folder, "output": folder / "out", "model": recipe.model}
    flags["img-size"] = recipe.image_size
    flags |= {"batch-size": recipe.batch_size, "drop-path": recipe.drop_path, "mixup": recipe.mixup}
    flags |= {"cutmix": recipe.cutmix, "lr": recipe.lr, "weight-decay": recipe.weight_decay}
    flags |= {"num-classes": len(images.classes), "smoothing": recipe.label_smoothing, "opt": "adamw"}
    flags["amp-dtype"] = "bfloat16"
    flags |= {"device": "cuda" if torch.cuda.is_available() else "cpu", "epochs": 1, "warmup-epochs": 0}
    return [*(f"--{name}={value}" for name, value in flags.items()), "--amp"]


def timms(words: list[str], steps: int) -> float:
    """Images/s of timm's train.py, by its own log, from update SKIPPED on."""
    seconds: dict[int, float] = {}
    words = [sys.executable, *words, f"--log-interval={math.gcd(SKIPPED, steps)}"]
    with psutil.Popen(words, stdout=-1, stderr=subprocess.STDOUT, text=True) as process:
        last = ""
        for line in process.stdout:
            last = line.strip() or last
            if shown := LINE.search(line):
                update = int(shown[1])
                seconds[update] = (update + 1) / float(shown[2])  # for each image of a batch
                if update >= SKIPPED + steps:
                    break
        with contextlib.suppress(psutil.NoSuchProcess):  # it has ended by itself
            kill([*process.children(recursive=True), process])  # its workers, too
    if SKIPPED not in seconds or (end := max(seconds)) == SKIPPED:
        raise ValueError(f"timm's train.py ended within {SKIPPED} updates, which do not count: {last}")
    return (end - SKIPPED) / (seconds[end] - seconds[SKIPPED])


if __name__ == "__main__":
    sys.exit(run_command(main))
