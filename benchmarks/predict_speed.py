"""Speed of predict.py from files to logits, beside timm's inference.py: its dataset, transform and loader.

    python -m benchmarks.predict_speed --pictures FOLDER --model vit_tiny_patch16_224

Both read the same files, decode in as many processes, and run the same model with random weights in fp32, in
turn; medians of the rounds. The start of the decoding processes is included.
"""

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

import timm
import torch
from timm.data import create_dataset, create_loader, resolve_model_data_config

from common.data.class_folders import find_pictures
from common.data.workers import Pictures, Preprocessing, picture_batches


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.add_argument("--pictures", required=True, help="folder of images")
    parser.add_argument("--model", default="vit_tiny_patch16_224", help="of timm (default: %(default)s)")
    parser.add_argument("--batch_size", type=int, default=64, help="(default: %(default)s)")
    parser.add_argument("--workers", type=int, default=2, help="decoding processes (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=5, help="(default: %(default)s)")
    parser.add_argument("--json", type=Path, help="also write the numbers to this file")
    flags = parser.parse_args()
    model = timm.create_model(flags.model).eval()
    ways: dict[str, Callable[[], int]] = {
        "ours": lambda: ours(model, flags),
        "timm": lambda: timms(model, flags),
    }
    speeds: dict[str, list[float]] = {name: [] for name in ways}
    for number in range(flags.rounds):
        for name, way in ways.items():
            began = time.perf_counter()
            count = way()
            speeds[name].append(count / (time.perf_counter() - began))
            print(
                f"round {number + 1}, {name}: {speeds[name][-1]:.1f} pictures/s", file=sys.stderr, flush=True
            )
    medians = {name: statistics.median(values) for name, values in speeds.items()}
    ratio = statistics.median(a / b for a, b in zip(speeds["ours"], speeds["timm"], strict=True))
    print(f"ours {medians['ours']:.1f}, timm {medians['timm']:.1f} pictures/s, ours / timm {ratio:.2f}")
    if flags.json:
        flags.json.write_text(json.dumps({"speeds": speeds, "ours_over_timm": ratio}) + "\n")
    return 0


@torch.inference_mode()
def ours(model: torch.nn.Module, flags: argparse.Namespace) -> int:
    config = resolve_model_data_config(model)
    preparation = Preprocessing(config["input_size"][1], config["mean"], config["std"], is_cropped=True)
    pictures = Pictures(find_pictures([flags.pictures]), preparation)
    count = 0
    for batch in picture_batches(pictures, range(len(pictures)), flags.batch_size, flags.workers):
        count += len(model(batch.inputs).softmax(1).topk(5).indices) if len(batch.ids) else 0
    return count


@torch.inference_mode()
def timms(model: torch.nn.Module, flags: argparse.Namespace) -> int:
    """As inference.py of timm does it, with the crop and the resampling of ours."""
    config = resolve_model_data_config(model) | {"crop_pct": 0.875, "interpolation": "bilinear"}
    dataset = create_dataset("", root=flags.pictures)
    loader = create_loader(
        dataset,
        batch_size=flags.batch_size,
        use_prefetcher=False,
        num_workers=flags.workers,
        device=torch.device("cpu"),
        **{name: config[name] for name in ("input_size", "mean", "std", "crop_pct", "interpolation")},
    )
    return sum(len(model(images).softmax(1).topk(5).indices) for images, _ in loader)


if __name__ == "__main__":
    sys.exit(main())
