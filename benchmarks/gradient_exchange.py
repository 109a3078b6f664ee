"""Step time of DDP with gradients in fp32 and in bf16, on two virtual hosts with a slow network.

    python -m benchmarks.gradient_exchange --data FOLDER

Trains ResNet-18 (45 MB of gradients) on two hosts with one process each: at each rate with and without
--grad_compression bf16 in turn, --rounds times, so that both meet the same noise. Needs root, and what
cluster/virtual_cluster.py needs. Its table stands in benchmarks/README.md.
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from cluster import virtual_cluster as cluster
from common.system.paths import ROOT

RATES = ("1gbit", "200mbit")
TRAINING = ["train_cnn_b.py", "--batch_size", "4", "--log_every", "1", "--max_val_images", "16"]
TRAINING += ["--trackers", "none", "--telemetry_s", "0", "--mixed_precision", "no"]
WARM_UP = 3  # steps that do not count


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.add_argument("--data", default="digits", help="default: digits")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=10, help="of each training")
    flags = parser.parse_args()
    print("| network | step, fp32 | step, bf16 | speed-up |\n|---|---|---|---|", flush=True)
    for rate in RATES:
        cluster.up(2, 1)
        try:
            for name in cluster.names():
                cluster.shape(name, rate)
            found: dict[str, list[float]] = {"no": [], "bf16": []}
            for _ in range(flags.rounds):
                for kind, times in found.items():
                    times += step_times(flags.data, kind, flags.steps + WARM_UP)
        finally:
            cluster.down()
        full, half = (statistics.median(times) for times in found.values())
        print(f"| {rate} | {full:.3f} s | {half:.3f} s | {full / half:.2f} |", flush=True)
    return 0


def step_times(data: str, kind: str, steps: int) -> list[float]:
    """Seconds of each step of a training, without the first ones."""
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch) / "run"
        config = ["--config_file", "accelerate_configs/ddp_2x2gpu.yaml"]
        words = [sys.executable, "launch.py", "--hostfile", "/etc/hostfile", *config, *TRAINING]
        words += [
            "--data",
            data,
            "--grad_compression",
            kind,
            "--max_steps",
            str(steps),
            "--output_dir",
            folder,
        ]
        command = cluster.inside("node1", list(map(str, words)), ROOT)
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            raise RuntimeError(f"{kind}: {done.stdout[-2000:]}{done.stderr[-2000:]}")
        lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
        speeds = [line["train/images_per_s"] for line in lines if "train/loss" in line]
    return [4 / speed for speed in speeds[WARM_UP:]]


if __name__ == "__main__":
    sys.exit(main())
