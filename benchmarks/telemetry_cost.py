"""Measures how much the telemetry sampler slows down a training: CNN-A with and without it, in turn.

On one thread of 2 CPU cores, which other jobs used, too: a sample takes 1.0 ms of a core; 50 a second took
1.9 percent of the throughput, so one takes 0.04 (medians of 15 rounds of 2 s).

    OMP_NUM_THREADS=1 python -m benchmarks.telemetry_cost --block_s 2
    python -m benchmarks.telemetry_cost --batch_size 32 --widths 4,8,32

A round is a block of some seconds of each arm: without a sampler, with its one sample a second, and with 50 a
second, as what one takes is less than what the speed of a machine varies by. All other flags are CNN-A's. The
batch lies ready on the device. On a GPU, where a sample also asks NVML: not yet measured.
"""

import argparse
import statistics
import sys
import tempfile
import time
from pathlib import Path

import torch
import torch.nn.functional as F
from rich.console import Console
from rich.table import Table

from common.distributed.accelerator import prepare, start
from common.distributed.process import run_process
from common.distributed.strategy import device_name, precision
from common.order import reseed
from common.recipe import parse
from common.telemetry.collect import Telemetry, this_process
from train_cnn_a import CnnA, build_model, build_optimizer

ARMS = {"none": 0.0, "1 a second": 1.0, "50 a second": 0.02}  # seconds between samples


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--block_s", type=float, default=4, help="seconds of a block")
    options, flags = parser.parse_known_args()
    benchmark = Benchmark(parse(CnnA, flags))
    benchmark.block("none", options.block_s)  # a warm-up
    rounds = []
    for number in range(options.rounds):
        # each arm is as often first as last
        order = list(ARMS) if number % 2 == 0 else list(reversed(ARMS))
        rounds.append({arm: benchmark.block(arm, options.block_s) for arm in order})
        print(
            f"round {number + 1}: "
            + ", ".join(f"{a} {b['images_per_s']:,.0f}" for a, b in rounds[-1].items())
        )
    benchmark.report(rounds)


class Benchmark:
    def __init__(self, recipe: CnnA):
        self.accelerator, self.batch = start(recipe)
        if self.accelerator.num_processes > 1 or self.batch.accumulations > 1:
            raise ValueError("one process and no accumulation: what a sampler takes is a matter of one host")
        size, device = recipe.image_size, self.accelerator.device
        torch.manual_seed(recipe.seed)
        model = build_model(recipe, classes=10)
        self.model, self.optimizer = prepare(self.accelerator, model, build_optimizer(model, recipe))
        shape = (recipe.batch_size, 3, size, size)
        self.inputs = torch.randn(shape, device=device).to(memory_format=torch.channels_last)
        self.labels = torch.randint(10, shape[:1], device=device)
        self.steps = 0

    def step(self) -> None:
        reseed(0, self.steps, 0)
        with self.accelerator.accumulate(self.model):
            loss = F.cross_entropy(self.model(self.inputs).float(), self.labels)
            self.accelerator.backward(loss)
            self.optimizer.step()
            self.optimizer.zero_grad()
        self.steps += 1

    def block(self, arm: str, block_s: float) -> dict[str, float]:
        """images_per_s; of the sampler samples and cpu_s, its thread's time on a core."""
        with tempfile.TemporaryDirectory() as folder:
            processes = [this_process(self.accelerator)]
            telemetry = Telemetry(processes, 0, Path(folder), ARMS[arm], lambda: self.steps, sys.maxsize)
            first_step, began = self.steps, time.perf_counter()
            while time.perf_counter() < began + block_s:
                self.step()
            if torch.cuda.is_available():
                torch.cuda.synchronize()
            images_per_s = (self.steps - first_step) * self.batch.total / (time.perf_counter() - began)
            cpu_s = 0.0
            if telemetry.thread:
                cpu_s = time.clock_gettime(time.pthread_getcpuclockid(telemetry.thread.ident))
            samples = len(telemetry.unlogged)
            telemetry.stop()
        return {"images_per_s": images_per_s, "samples": samples, "cpu_s": cpu_s}

    def report(self, rounds: list[dict[str, dict[str, float]]]) -> None:
        table = Table("samples", title=f"Medians of {len(rounds)} rounds", title_justify="left")
        for column in ("images/s", "of those without", "core ms a sample"):
            table.add_column(column, justify="right")
        ratios = {}
        for arm in ARMS:
            blocks = [found[arm] for found in rounds]
            ratios[arm] = statistics.median(
                r[arm]["images_per_s"] / r["none"]["images_per_s"] for r in rounds
            )
            speed = statistics.median(block["images_per_s"] for block in blocks)
            samples = sum(block["samples"] for block in blocks)
            cost = f"{1e3 * sum(block['cpu_s'] for block in blocks) / samples:.2f}" if samples else ""
            table.add_row(arm, f"{speed:,.0f}", f"{ratios[arm]:.4f}", cost)
        Console().print(table)
        one_pct = 100 * (1 - ratios["50 a second"]) / 50
        print(f"one sample a second, by the arm of 50: {one_pct:.3f} percent of the throughput")
        place = f"{device_name(self.accelerator)}, {torch.get_num_threads()} threads"
        print(f"CNN-A, {self.batch}, {precision(self.accelerator)}, {place}")


if __name__ == "__main__":
    run_process(main)
