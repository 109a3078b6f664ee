"""Step time of DDP with gradients in fp32, bf16 and float64, on two virtual hosts with a slow network.

    python -m benchmarks.gradient_exchange --data FOLDER

Trains ResNet-18 (45 MB of gradients) on two hosts with one process each: at each rate with and without
--grad_compression bf16 and --deterministic in turn. Needs root, and what cluster/virtual_cluster.py needs.
Results: benchmarks/README.md.
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from functools import partial
from pathlib import Path

from benchmarks.harness import benchmark_parser, in_turn, report
from cluster import virtual_cluster as cluster
from common.system.cli import run_command
from common.system.paths import ROOT

RATES = ("1gbit", "200mbit")
LAUNCH = [sys.executable, "launch.py", "--hostfile", "/etc/hostfile"]
LAUNCH += ["--config_file", "accelerate_configs/ddp_2x2gpu.yaml", "train_cnn_b.py", "--batch_size", "4"]
LAUNCH += ["--log_every", "1", "--max_val_images", "16", "--trackers", "none", "--telemetry_s", "0"]
LAUNCH += ["--mixed_precision", "no"]
WARM_UP = 3  # steps that do not count
ARMS = {"fp32": [], "bf16": ["--grad_compression", "bf16"], "float64": ["--deterministic"]}


def main() -> int:
    parser = benchmark_parser(__doc__, rounds=3)
    parser.add_argument("--data", default="digits", help="default: digits")
    parser.add_argument("--steps", type=int, default=10, help="of each training")
    flags = parser.parse_args()
    for rate in RATES:
        cluster.up(2, 1)
        try:
            for name in cluster.names():
                cluster.shape(name, rate)
            arms = {name: partial(step_s, words, flags) for name, words in ARMS.items()}
            rounds = in_turn(arms, flags.rounds)
        finally:
            cluster.down()
        report(rounds, "s a step", "fp32", flags.json, network=rate)
    return 0


def step_s(arm: list[str], flags: argparse.Namespace) -> float:
    """The median of a training's steps, without the first ones."""
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch) / "run"
        words = [*LAUNCH, "--data", flags.data, *arm, "--output_dir", str(folder)]
        words = cluster.inside("node1", [*words, "--max_steps", str(flags.steps + WARM_UP)], ROOT)
        done = subprocess.run(words, capture_output=True, text=True, check=False)
        if done.returncode:
            raise ValueError(f"{arm}: {done.stdout[-2000:]}{done.stderr[-2000:]}")
        lines = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
        speeds = [line["train/images_per_s"] for line in lines if "train/loss" in line]
    return statistics.median(4 / speed for speed in speeds[WARM_UP:])


if __name__ == "__main__":
    sys.exit(run_command(main))
