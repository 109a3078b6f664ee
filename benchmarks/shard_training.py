"""Measures an epoch of train_vit.py from shards, beside the same steps on one batch that stays on the device.

    python -m benchmarks.shard_training --data SHARDS --config recipes/vit_s16_imagenet.yaml --workers 8
    accelerate launch --config_file accelerate_configs/ddp_4gpu.yaml \
        -m benchmarks.shard_training --data SHARDS --workers 8

shards    batches of the data, decoded by --workers processes a device, augmented
resident  the same step on normal noise: no reading, no decoding, no augmentation

The result is the first speed divided by the second. The arms take turns in one run, with one model. A block
is an epoch, or --steps. As many steps as batches can be prefetched precede it untimed: neither arm gains from
batches decoded while the other ran. All other flags are train_vit.py's; --data also takes class folders, and
s3://bucket/prefix of shards. Not yet measured on a GPU.

ViT-Ti/16 at 224 pixels, bf16, batch 16, one thread for the training and one decoding process, shards of
--resize 256, blocks of 4 steps, on 2 CPU cores: 0.97, the median of 5 rounds from 0.91 to 1.09.
"""

import argparse
import json
import statistics
import sys
import time
from pathlib import Path

import torch
import torch.nn.functional as F
from rich.console import Console
from rich.table import Table
from torch import Tensor

from common.augment import mixer
from common.data.images import load
from common.data.workers import in_flight
from common.distributed.accelerator import prepare, start
from common.distributed.precision import input_dtype
from common.distributed.process import run_process
from common.distributed.strategy import device_name, precision
from common.order import reseed, steps_per_epoch, training_plan
from common.recipe import parse
from train_vit import Vit, build_model, build_optimizer, training_batches

ARMS = ("shards", "resident")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, help="of a block (default: an epoch)")
    parser.add_argument("--json", type=Path, help="keep each round's images/s here")
    options, flags = parser.parse_known_args()
    benchmark = Benchmark(parse(Vit, flags))
    rounds = []
    for number in range(options.rounds):
        order = ARMS if number % 2 == 0 else ARMS[::-1]  # each is as often first as last
        speeds = {arm: benchmark.images_per_s(arm, options.steps or benchmark.per_epoch) for arm in order}
        rounds.append(speeds)
        found = ", ".join(f"{arm} {speeds[arm]:,.1f}" for arm in ARMS)
        benchmark.accelerator.print(f"round {number + 1}, images/s: {found}", flush=True)
    if benchmark.accelerator.is_main_process:
        benchmark.report(rounds)
        if options.json:
            options.json.write_text(json.dumps(rounds, indent=1))


class Benchmark:
    def __init__(self, recipe: Vit):
        self.recipe = recipe
        self.accelerator, self.batch = start(recipe, recipe.clip_norm)
        self.device, self.rank = self.accelerator.device, self.accelerator.process_index
        images = load(self.accelerator, recipe)
        if not images.train.cropped:
            raise ValueError(f"--data {recipe.data} is decoded once, before the training: give shards")
        torch.manual_seed(recipe.seed)
        model = build_model(recipe, len(images.classes))
        mean, std = model.pretrained_cfg["mean"], model.pretrained_cfg["std"]
        self.model, self.optimizer = prepare(self.accelerator, model, build_optimizer(model, recipe))
        self.mix = mixer(recipe.mixup, recipe.cutmix, len(images.classes), input_dtype(self.accelerator))
        self.per_epoch, self.steps = steps_per_epoch(images.train, self.batch), 0
        plan = training_plan(images.train, self.batch, self.rank, recipe.seed, 0, sys.maxsize)
        self.batches = training_batches(images, plan, self.device, recipe, mean, std)
        shape = (self.batch.per_device, 3, recipe.image_size, recipe.image_size)
        inputs = torch.randn(shape, device=self.device).to(memory_format=torch.channels_last)
        self.resident = inputs, torch.randint(len(images.classes), shape[:1], device=self.device)

    def images_per_s(self, arm: str, steps: int) -> float:
        """The speed of the whole job over a number of optimizer steps."""
        for _ in range(1 + in_flight(self.recipe.workers) // self.batch.accumulations):
            self.step(arm)
        self.wait()
        began = time.perf_counter()
        for _ in range(steps):
            self.step(arm)
        self.wait()
        return steps * self.batch.total / (time.perf_counter() - began)

    def wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize()
        self.accelerator.wait_for_everyone()

    def step(self, arm: str) -> None:
        """One optimizer step, as in train_vit.py."""
        for k in self.batch.micro_batches(self.rank):
            inputs, labels = next(self.batches)[:2] if arm == "shards" else self.resident
            reseed(self.recipe.seed, self.steps, k)
            self.forward_and_backward(inputs, labels)
        self.steps += 1

    def forward_and_backward(self, inputs: Tensor, labels: Tensor) -> None:
        if self.mix:
            inputs, labels = self.mix(inputs, labels)
        with self.accelerator.accumulate(self.model):
            logits = self.model(inputs).float()
            loss = F.cross_entropy(logits, labels, label_smoothing=self.recipe.label_smoothing)
            self.accelerator.backward(loss)
            if self.recipe.clip_norm and self.accelerator.sync_gradients:
                self.accelerator.clip_grad_norm_(self.model.parameters(), self.recipe.clip_norm)
            self.optimizer.step()
            self.optimizer.zero_grad()

    def report(self, rounds: list[dict[str, float]]) -> None:
        table = Table("arm", title=f"Medians of {len(rounds)} rounds", title_justify="left")
        for column in ("images/s", "of resident"):
            table.add_column(column, justify="right")
        for arm in ARMS:
            speed = statistics.median(speeds[arm] for speeds in rounds)
            share = statistics.median(speeds[arm] / speeds["resident"] for speeds in rounds)
            table.add_row(arm, f"{speed:,.1f}", f"{share:.3f}")
        Console().print(table)
        place = f"{device_name(self.accelerator)}, {torch.get_num_threads()} threads"
        print(f"{self.recipe.model} at {self.recipe.image_size}, {self.recipe.workers} workers, {place}")
        print(f"{self.batch}, {precision(self.accelerator)}")


if __name__ == "__main__":
    run_process(main)
