"""Measures decoding and cropping of photographs, beside the usual code with PIL and torchvision.

    python -m benchmarks.decoding --images FOLDER
    python -m benchmarks.decoding --images FOLDER --rounds 15 --json FILE

PIL:  Image.open, RandomResizedCrop, ToTensor, Normalize: float32 [3, S, S].
ours: common/data/decode.py, as in a worker of the training: uint8 [S, S, 3]. Flips and normalisation come
      later, on the device, on whole batches.

Both on the same files in memory: the originals, and resized to a shorter side of 256 at quality 90, as
prep_imagenet.py --resize 256 writes them. One thread. The arms take turns in one run; a round goes over all
files with each. The result is the median of the rounds' ratios of processor time.

100 photographs of ImageNet of 104 kB (29 kB resized), one CPU core, medians of 9 rounds, four runs: in the
same time ours decodes 1.8 to 2.0 times as many originals as PIL. It decodes 2.8 to 3.2 times as many resized
files as PIL does, and 4.8 to 5.7 times as many as PIL does originals.
"""

import argparse
import io
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from rich.console import Console
from rich.table import Table
from torchvision import transforms

from common.data.decode import decode, random_resized_crop
from common.order import uniforms
from tools.prepare.recode import smaller

SUFFIXES = (".jpg", ".jpeg", ".png")
SHORT_SIDE, QUALITY = 256, 90


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.add_argument(
        "--images", type=Path, required=True, help="folder of photographs, searched with all below it"
    )
    parser.add_argument("--size", type=int, default=224, help="edge of a crop in pixels")
    parser.add_argument("--limit", type=int, default=500, help="use the first so many files")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--json", type=Path, help="keep each round's milliseconds an image here")
    flags = parser.parse_args()
    torch.set_num_threads(1)
    files = sorted(path for path in flags.images.rglob("*") if path.suffix.lower() in SUFFIXES)[: flags.limit]
    if not files:
        parser.error(f"--images {flags.images}: holds no file that ends in {', '.join(SUFFIXES)}")
    originals = [path.read_bytes() for path in files]
    small = [smaller(data, SHORT_SIDE, QUALITY) or data for data in originals]
    arms = arms_of(originals, small, flags.size)
    for arm in arms.values():
        arm(0)  # a warm-up
    rounds = []
    for number in range(flags.rounds):
        order = list(arms) if number % 2 == 0 else list(reversed(arms))  # each as often early as late
        took = {name: processor_ms(arms[name], number) / len(files) for name in order}
        rounds.append({name: took[name] for name in arms})
    report(rounds, len(files))
    if flags.json:
        flags.json.write_text(json.dumps({"ms_per_image": rounds, "ratios": ratios(rounds)}, indent=1))


def arms_of(originals: list[bytes], small: list[bytes], size: int) -> dict[str, Callable[[int], None]]:
    """The arms by name: functions of the round's number that crop each file."""
    augment = transforms.Compose(
        [
            transforms.RandomResizedCrop(size),
            transforms.ToTensor(),
            transforms.Normalize((0.5,) * 3, (0.5,) * 3),
        ]
    )

    def by_pil(files: list[bytes], number: int) -> None:
        torch.manual_seed(number)
        for data in files:
            augment(Image.open(io.BytesIO(data)).convert("RGB"))

    def by_ours(files: list[bytes], number: int) -> None:
        draws = uniforms(0, number, np.arange(len(files)), 40)
        for data, own in zip(files, draws, strict=True):
            random_resized_crop(decode(data), size, own)

    return {
        "PIL, originals": lambda number: by_pil(originals, number),
        "ours, originals": lambda number: by_ours(originals, number),
        "PIL, resized": lambda number: by_pil(small, number),
        "ours, resized": lambda number: by_ours(small, number),
    }


def processor_ms(arm: Callable[[int], None], number: int) -> float:
    began = time.process_time()
    arm(number)
    return 1e3 * (time.process_time() - began)


def ratios(rounds: list[dict[str, float]]) -> dict[str, dict[str, float]]:
    """The images per processor time of each arm, divided by those of each PIL arm."""
    names = list(rounds[0])
    return {
        name: {
            base: statistics.median(took[base] / took[name] for took in rounds)
            for base in names
            if base.startswith("PIL")
        }
        for name in names
    }


def report(rounds: list[dict[str, float]], files: int) -> None:
    table = Table("arm", title=f"{files} files, medians of {len(rounds)} rounds", title_justify="left")
    for column in ("ms", "images/s", "of PIL, originals", "of PIL, resized"):
        table.add_column(column, justify="right")
    for name, found in ratios(rounds).items():
        took = statistics.median(one[name] for one in rounds)
        table.add_row(
            name, f"{took:.2f}", f"{1e3 / took:,.0f}", *(f"{ratio:.2f}" for ratio in found.values())
        )
    Console().print(table)


if __name__ == "__main__":
    main()
