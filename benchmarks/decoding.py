"""Compare the speed of decoding and cropping photographs with PIL and torchvision, on one thread.

    python -m benchmarks.decoding --images FOLDER
    python -m benchmarks.decoding --images FOLDER --size 160 --limit 100

PIL    This arm uses Image.open, RandomResizedCrop, ToTensor and Normalize. Its result is float32 [3, S, S].
ours   This arm uses onecurve/data/decode.py and crops.py, as a training run's workers do. Its result is uint8
       [S, S, 3]. Training then flips and normalises whole batches on the device.

Both arms read the same files from memory. They first read the original files and then files resized as in
prep_imagenet.py --resize 256. The result is the number of images per CPU second.
benchmarks/README.md contains the results.
"""

import io
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from torchvision import transforms

from benchmarks.harness import benchmark_parser, in_turn, report
from onecurve.data.crops import random_resized_crop
from onecurve.data.decode import decode_image
from onecurve.numerics.augment import CROP
from onecurve.numerics.order import uniforms
from onecurve.system.cli import run_command
from tools.prepare.recode import resize_image

SUFFIXES = (".jpg", ".jpeg", ".png")
SHORT_SIDE, QUALITY = 256, 90


def main() -> int:
    parser = benchmark_parser(__doc__, 9, "python -m benchmarks.decoding --images PATH [flags]")
    add = parser.add_argument
    add("--images", type=Path, required=True, metavar="PATH", help="folder of images, searched recursively")
    add("--size", type=int, default=224, metavar="N", help="edge of crops in pixels (default: 224)")
    add("--limit", type=int, default=500, metavar="N", help="maximum number of images (default: 500)")
    flags = parser.parse_args()
    torch.set_num_threads(1)
    files = sorted(path for path in flags.images.rglob("*") if path.suffix.lower() in SUFFIXES)
    if not files:
        raise ValueError(f"--images {flags.images} contains no file with the suffix {' or '.join(SUFFIXES)}")
    originals = [path.read_bytes() for path in files[: flags.limit]]
    small = [resize_image(data, SHORT_SIDE, QUALITY) or data for data in originals]
    augment = transforms.Compose(
        [
            transforms.RandomResizedCrop(flags.size),
            transforms.ToTensor(),
            transforms.Normalize((0.5,) * 3, (0.5,) * 3),
        ]
    )
    draws = uniforms(0, 0, np.arange(len(originals)), CROP.stop)[:, CROP]

    def by_pil(files: list[bytes]) -> None:
        for data in files:
            augment(Image.open(io.BytesIO(data)).convert("RGB"))

    def by_ours(files: list[bytes], interpolation: str = "bilinear") -> None:
        for data, draw in zip(files, draws, strict=True):
            random_resized_crop(decode_image(data), flags.size, draw, interpolation)

    by_ours_bicubic = partial(by_ours, interpolation="bicubic")

    def speed(arm: Callable[[list[bytes]], None], files: list[bytes]) -> float:
        began = time.process_time()
        arm(files)
        return len(files) / (time.process_time() - began)

    arms = {
        "PIL, originals": lambda: speed(by_pil, originals),
        "ours, originals": lambda: speed(by_ours, originals),
        "ours, originals, bicubic": lambda: speed(by_ours_bicubic, originals),
        "PIL, resized": lambda: speed(by_pil, small),
        "ours, resized": lambda: speed(by_ours, small),
        "ours, resized, bicubic": lambda: speed(by_ours_bicubic, small),
    }
    for arm in arms.values():
        arm()  # run each arm once as a warm-up
    report(in_turn(arms, flags.rounds), "images/s", "PIL, originals", flags.json, files=len(originals))
    return 0


if __name__ == "__main__":
    sys.exit(run_command(main))
