"""CNN-A as a plain Accelerate script with save_state: what benchmarks/elastic_drill.py compares with.

It goes on as Accelerate's examples/complete_cv_example.py does: load_state() of the newest folder, then
skip_first_batches(). Each process takes --batch_size images a step, so that the batch follows the number of
processes, as with every script of that kind. Rank 0 appends a line for each step to FOLDER/metrics.jsonl.

    torchrun --nnodes=1:4 --max_restarts=1000 ... -m benchmarks.plain_elastic --folder FOLDER
"""

import argparse
import json
import math
from pathlib import Path

import torch
import torch.nn.functional as F
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch.utils.data import DataLoader, TensorDataset

from common.data.cache import prepare_data
from common.data.images import open_images
from train_cnn_a import MEAN, STD, Net

LR = 1e-4


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--data", default="digits")
    parser.add_argument("--batch_size", type=int, default=24, help="images per process and step")
    parser.add_argument("--epochs", type=int, default=30)
    parser.add_argument("--max_steps", type=int, default=10**9)
    parser.add_argument("--checkpoint_every", type=int, default=64)
    flags = parser.parse_args()
    accelerator = Accelerator(cpu=not torch.cuda.is_available())
    set_seed(0)
    images, classes = training_images(flags.data)
    model = Net((32, 64, 128), images.tensors[0].shape[-1], classes)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR)
    loader = DataLoader(images, batch_size=flags.batch_size, shuffle=True, drop_last=True)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    total = flags.epochs * len(loader)
    step = newest = max(map(step_of, flags.folder.glob("step_*")), default=0)
    if newest:
        accelerator.load_state(str(flags.folder / f"step_{newest}"))
    with open(flags.folder / "metrics.jsonl", "a", buffering=1) as log:
        for epoch in range(newest // len(loader), flags.epochs):
            skipped = newest % len(loader) if epoch == newest // len(loader) else 0
            batches = accelerator.skip_first_batches(loader, skipped) if skipped else loader
            for inputs, labels in batches:
                for group in optimizer.param_groups:
                    group["lr"] = LR * min((step + 1) / (0.01 * total), cosine(step, total))
                loss = F.cross_entropy(model(inputs), labels)
                accelerator.backward(loss)
                optimizer.step()
                optimizer.zero_grad()
                step += 1
                mean = accelerator.gather(loss.detach().reshape(1)).mean().item()
                if accelerator.is_main_process:
                    line = {"step": step, "processes": accelerator.num_processes, "train/loss": mean}
                    log.write(json.dumps(line) + "\n")
                if step % flags.checkpoint_every == 0:
                    accelerator.save_state(str(flags.folder / f"step_{step}"))
                if step >= flags.max_steps:
                    return


def training_images(data: str) -> tuple[TensorDataset, int]:
    """Normalised images, float [n, 3, S, S], with labels, int64 [n]; and the number of classes."""
    images = open_images(prepare_data(data, Path("~/.cache/train-images").expanduser()))
    pixels = torch.from_numpy(images.train.images[:]).permute(0, 3, 1, 2).float() / 255
    mean, std = (torch.tensor(values).reshape(1, 3, 1, 1) for values in (MEAN, STD))
    labels = torch.from_numpy(images.train.labels[:]).long()
    return TensorDataset((pixels - mean) / std, labels), len(images.classes)


def cosine(step: int, total: int) -> float:
    return 0.5 * (1 + math.cos(math.pi * step / total))


def step_of(folder: Path) -> int:
    return int(folder.name.removeprefix("step_"))


if __name__ == "__main__":
    main()
