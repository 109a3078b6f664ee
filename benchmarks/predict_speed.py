"""Speed of predict.py from files to logits, beside timm's inference.py: its dataset, transform and loader.

    python -m benchmarks.predict_speed --pictures FOLDER --model vit_tiny_patch16_224

Both read the same files, decode in as many processes, and run the same model with random weights in fp32. The
start of the decoding processes is included.
"""

import argparse
import sys
import time
from collections.abc import Callable

import timm
import torch
from timm.data import create_dataset, create_loader, resolve_model_data_config

from benchmarks.harness import benchmark_parser, in_turn, report
from common.data.class_folders import find_pictures
from common.data.workers import Pictures, Preprocessing, picture_batches
from common.system.cli import run_command


def main() -> int:
    parser = benchmark_parser(__doc__, rounds=5)
    parser.add_argument("--pictures", required=True, help="folder of images")
    parser.add_argument("--model", default="vit_tiny_patch16_224", help="of timm (default: %(default)s)")
    parser.add_argument("--batch_size", type=int, default=64, help="(default: %(default)s)")
    parser.add_argument("--workers", type=int, default=2, help="decoding processes (default: %(default)s)")
    flags = parser.parse_args()
    model = timm.create_model(flags.model).eval()

    def speed(way: Callable[[torch.nn.Module, argparse.Namespace], int]) -> float:
        began = time.perf_counter()
        return way(model, flags) / (time.perf_counter() - began)

    arms = {"timm": lambda: speed(timms), "ours": lambda: speed(ours)}
    report(in_turn(arms, flags.rounds), "pictures/s", "timm", flags.json)
    return 0


@torch.inference_mode()
def ours(model: torch.nn.Module, flags: argparse.Namespace) -> int:
    config = resolve_model_data_config(model)
    preparation = Preprocessing(config["input_size"][1], config["mean"], config["std"], is_cropped=True)
    pictures = Pictures(find_pictures([flags.pictures]), preparation)
    batches = picture_batches(pictures, range(len(pictures)), flags.batch_size, flags.workers)
    return sum(len(model(b.inputs).softmax(1).topk(5).indices) for b in batches if len(b.ids))


@torch.inference_mode()
def timms(model: torch.nn.Module, flags: argparse.Namespace) -> int:
    """As inference.py of timm does it, with the crop and the resampling of ours."""
    config = resolve_model_data_config(model) | {"crop_pct": 0.875, "interpolation": "bilinear"}
    loader = create_loader(
        create_dataset("", root=flags.pictures),
        batch_size=flags.batch_size,
        use_prefetcher=False,
        num_workers=flags.workers,
        device=torch.device("cpu"),
        **{name: config[name] for name in ("input_size", "mean", "std", "crop_pct", "interpolation")},
    )
    return sum(len(model(images).softmax(1).topk(5).indices) for images, _ in loader)


if __name__ == "__main__":
    sys.exit(run_command(main))
