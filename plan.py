"""What a training will need on a cluster, without a GPU: memory, batch, traffic, time and price by strategy.

    python plan.py train_vit.py --gpus 4 --gpu "NVIDIA A100-SXM4-40GB"
    python plan.py --hosts 2 --gpus 4 --gpu "NVIDIA H200" --price_per_hour 60 train_vit.py --batch_size 1024

Runs the script's model and optimizer under each strategy as rank 0 of the cluster: Accelerate, DDP, FSDP2
and DeepSpeed themselves, on tensors without contents. Memory is the largest sum of live tensors, by torch's
MemTracker; the bytes sent are those of the collectives that were called. Both are counted, not estimated;
docs/performance.md compares the memory with real trainings on CPU processes.

Time and price are estimates from data sheets (common/telemetry/devices.yaml) by the formulas of
common/planning/cost.py. They leave out the decoding of images, compilation, and offload's work on the CPU,
and are not yet measured on a GPU.
"""

import argparse
import os
import shlex
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from common.system.cli import command_parser, run_command, split_at_script
from common.system.files import write_json
from common.system.paths import ROOT

if TYPE_CHECKING:
    from common.planning.result import Trace

CONFIGS = {  # strategy: its config file
    "single": "single_gpu",
    "ddp": "ddp_4gpu",
    "fsdp": "fsdp_4gpu",
    "hybrid": "fsdp_2x4gpu",
    "zero1": "zero1_4gpu",
    "zero2": "zero2_4gpu",
    "zero3": "zero3_4gpu",
    "offload": "zero3_offload_4gpu",
}
HEAD = ("strategy", "GiB", "images", "largest", "link MB", "net MB", "step ms", "images/s", "eff.", "hours")
MOST_AT_ONCE = 4  # traces, of about 1 GiB each
ALIKE = 1.05  # times as long: more than the estimates can tell apart
ROW = "{:<9}{:>7}{:>8}{:>9}{:>9}{:>8}{:>10}{:>10}{:>6}{:>9}{:>9}  {}"


@dataclass(frozen=True)
class Line:
    """A strategy's line. Bytes are of a device; images is per forward on a device."""

    strategy: str
    config_file: str
    memory: dict[str, int]
    images: int  # 0: not even a few fit
    largest: int
    limit: str
    link_bytes: float = 0
    network_bytes: float = 0
    step_s: float | None = None  # of an optimizer step with all its accumulations; None: not estimated
    images_per_s: float | None = None
    efficiency: float | None = None  # images/s of a device, as a share of a single one's
    hours: float | None = None  # to the recipe's end; None where the number of images is not known
    price: float | None = None

    def __str__(self) -> str:
        total = sum(self.memory.values()) / 2**30
        cells = [self.strategy, f"{total:.2f}", self.images or "-", f"{self.largest:,}"]
        cells += [_shown(self.link_bytes / 1e6), _shown(self.network_bytes / 1e6)]
        cells += [_shown(self.step_s and self.step_s * 1e3, 1), _shown(self.images_per_s)]
        cells += [_shown(n, 2) for n in (self.efficiency, self.hours, self.price)]
        return ROW.format(*cells, self.limit)


def _shown(number: float | None, digits: int = 0) -> str:
    return "-" if number is None else f"{number:,.{digits}f}"


def main() -> int:
    flags = parse(sys.argv[1:])
    plan = Planning(flags)
    print(plan.about, flush=True)
    print(ROW.format(*HEAD, "price", "limited by"), flush=True)
    lines: list[Line] = []
    with ThreadPoolExecutor(min(MOST_AT_ONCE, os.cpu_count() or 1)) as pool:
        for strategy, traced in zip(plan.strategies, pool.map(plan.traced, plan.strategies), strict=True):
            lines.append(plan.line(strategy, *traced))
            print(lines[-1], flush=True)
    print(plan.recommendation(lines))
    if flags.output:
        write_json(flags.output, plan.facts | {"lines": [asdict(line) for line in lines]})
        print(flags.output)
    return 0


def parse(argv: list[str]) -> argparse.Namespace:
    parser = command_parser(__doc__, "%(prog)s [flags] SCRIPT [its flags]")
    parser.add_argument("--hosts", type=int, default=1, help="default: 1")
    parser.add_argument("--gpus", type=int, default=1, help="of each host (default: 1)")
    parser.add_argument("--gpu", required=True, help="a device of common/telemetry/devices.yaml")
    parser.add_argument(
        "--network_gb_s", type=float, default=12.5, help="10^9 bytes a second of a host (default: 12.5)"
    )
    parser.add_argument("--price_per_hour", type=float, help="of all hosts together, in any currency")
    parser.add_argument("--output", type=Path, help="also write the plan here, as JSON")
    mine, script = split_at_script(argv)
    flags = parser.parse_args(mine)
    flags.script = script
    if not script:
        parser.error("name the script, as train_vit.py, behind these flags")
    for name in ("hosts", "gpus", "network_gb_s", "price_per_hour"):
        if (value := getattr(flags, name)) is not None and value <= 0:
            parser.error(f"--{name} {value:g}: must be more than 0")
    return flags


class Planning:
    """The cluster and the recipe. ValueError for a mistake in the flags."""

    def __init__(self, flags: argparse.Namespace):
        from common.planning.cost import Cluster
        from common.recipe import parse as parse_recipe
        from common.script import load_script, recipe_class, training_images
        from common.telemetry.flops import find_device, known_devices

        if not Path(flags.script[0]).is_file():
            raise ValueError(f"{flags.script[0]}: no such script")
        if not (device := find_device(flags.gpu)):
            names = ", ".join(device.name for device in known_devices())
            raise ValueError(f"--gpu {flags.gpu} is not in the table: choose one of {names}")
        self.flags = flags
        self.cluster: Cluster = Cluster(flags.hosts, flags.gpus, device, flags.network_gb_s)
        self.recipe: Any = parse_recipe(recipe_class(load_script(Path(flags.script[0]))), flags.script[1:])
        self.images = training_images(self.recipe.data)
        if self.recipe.batch_size % self.cluster.processes:
            raise ValueError(
                f"--batch_size {self.recipe.batch_size} does not divide among"
                f" {self.cluster.processes} devices"
            )
        kinds = [kind for kind in ("bf16", "fp16") if kind in device.peaks]
        self.precision = self.recipe.mixed_precision or (kinds[0] if "bf16" in kinds else [*kinds, "no"][0])
        if self.cluster.processes == 1:
            self.strategies = ["single", "offload"]
        else:
            self.strategies = [s for s in CONFIGS if s != "hybrid" or (flags.hosts > 1 and flags.gpus > 1)]

        self.first_speed = 0.0  # images/s of a device of the first strategy
        self.least_launches = 0  # kernels of the first one: no engine launches less than the plain model

    @property
    def about(self) -> str:
        cluster, device = self.cluster, self.cluster.device
        shown = (
            f"{cluster.hosts} x {cluster.gpus} {device.name}, {device.memory_gb / 1.073741824:.0f} GiB each"
        )
        return f"{shown}, batch {self.recipe.batch_size}, mixed precision {self.precision}"

    @property
    def facts(self) -> dict[str, Any]:
        """What was planned: the script, the recipe's size and the cluster."""
        return {
            "about": self.about,
            "script": Path(self.flags.script[0]).stem,
            "flags": self.flags.script[1:],
            "batch_size": self.recipe.batch_size,
            "epochs": self.recipe.epochs,
            "mixed_precision": self.precision,
            "hosts": self.cluster.hosts,
            "gpus": self.cluster.gpus,
            "gpu": self.cluster.device.name,
            "price_per_hour": self.flags.price_per_hour,
        }

    def _trace(self, strategy: str, size: int) -> "Trace":
        """Traces a micro-batch of `size` images, and one twice as large, in a process of its own."""
        from common.planning.result import Trace

        words = [
            sys.executable,
            "-m",
            "common.planning.trace",
            f"accelerate_configs/{CONFIGS[strategy]}.yaml",
        ]
        hosts = 1 if strategy == "single" else self.cluster.hosts
        words += [str(self.processes(strategy)), str(hosts), f"{size},{2 * size}", *self.flags.script]
        env = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
        words.append(f"--mixed_precision={self.precision}")
        done = subprocess.run(words, env=env, capture_output=True, text=True, check=False)
        if done.returncode:
            said = [line for line in done.stderr.splitlines() if line.strip()]
            raise ValueError(
                f"{strategy} can't be traced: {said[-1].removeprefix('error: ') if said else '?'}"
            )
        return Trace.from_json(done.stdout.splitlines()[-1])

    def recommendation(self, lines: list[Line]) -> str:
        """The fastest strategy that fits, its command, and why not the others."""
        from common.planning.cost import LAUNCHES

        candidates = [line for line in lines if line.strategy != "single" or self.cluster.processes == 1]
        fitting = [line for line in candidates if line.images]
        if not fitting:
            return "nothing fits: take more GPUs, --grad_checkpointing or a smaller model"
        fastest = max(line.images_per_s or 0 for line in fitting)
        # The table begins with what shards least: of equally fast ones the simplest.
        best = next(line for line in fitting if (line.images_per_s or 0) >= fastest / ALIKE)
        if best.limit == LAUNCHES:  # engines launch differently, which the estimate does not tell apart
            best = next(line for line in fitting if line.limit == LAUNCHES)
        launcher = ["accelerate", "launch"]
        if self.cluster.hosts > 1:
            launcher = ["python", "launch.py", "--hostfile", "hostfile"]
        words = [*launcher, "--config_file", best.config_file]
        if self.cluster.hosts == 1:
            words += ["--num_processes", str(self.cluster.processes)]
        words += [*self.flags.script, "--per_device_batch_size", str(best.images)]
        if self.precision != "bf16" and not self.recipe.mixed_precision:
            words += ["--mixed_precision", self.precision]
        others = [f"  not {line.strategy}: {_reason(line, best)}" for line in candidates if line is not best]
        return "\n".join(
            [
                f"\n{best.strategy}, of those within {ALIKE - 1:.0%} of the fastest the simplest:",
                f"    {shlex.join(words)}",
                *others,
            ]
        )

    def traced(self, strategy: str) -> tuple["Trace", int, int]:
        """A strategy's trace, its images per forward, and the most that fit. 0 images: none fit."""
        from common.planning.cost import largest_size

        processes, batch_size = self.processes(strategy), self.recipe.batch_size
        share = self.recipe.per_device_batch_size or batch_size // processes
        trace = self._trace(strategy, share)
        if (largest := largest_size(trace, self.cluster.device.memory_gb * 1e9)) < share:
            share = max((n for n in range(1, largest + 1) if batch_size % (n * processes) == 0), default=0)
            trace = self._trace(strategy, share) if share else trace
        return trace, share, largest

    def processes(self, strategy: str) -> int:
        return 1 if strategy == "single" else self.cluster.processes

    def line(self, strategy: str, trace: "Trace", share: int, largest: int) -> Line:
        """The line of a traced strategy. The first one is what the others' efficiency refers to."""
        from common.planning.cost import CONTEXT_BYTES, step_time

        processes = self.processes(strategy)
        peak = trace.peaks[min(trace.peaks)]
        optimizer = min(trace.optimizer, peak["Total"] - trace.parameters)
        rest = peak["Total"] - trace.parameters - optimizer
        activations = min(peak["Activation"], rest)
        memory = {
            "parameters": trace.parameters,
            "optimizer": 0 if strategy == "offload" else optimizer,
            "activations": activations,
            "gradients_buckets_temporaries": rest - activations,
            "context": CONTEXT_BYTES,
        }
        line = Line(strategy, config_file(strategy), memory, share, largest, "does not fit")
        if not share:
            return line
        self.least_launches = self.least_launches or len(trace.operations)
        alone = replace(self.cluster, hosts=1, gpus=1)
        found = step_time(trace, self.cluster if processes > 1 else alone, self.least_launches)
        line = replace(line, link_bytes=found.link_bytes, network_bytes=found.network_bytes)
        if strategy == "offload":
            return replace(line, limit="the CPU's optimizer")
        step_s = found.seconds * (self.recipe.batch_size // (share * processes))
        speed = self.recipe.batch_size / step_s
        self.first_speed = self.first_speed or speed / processes
        hours = None
        if self.images:
            hours = self.images // self.recipe.batch_size * self.recipe.epochs * step_s / 3600
        rate = self.flags.price_per_hour
        return replace(
            line,
            limit=found.limit,
            step_s=step_s,
            images_per_s=speed,
            efficiency=speed / processes / self.first_speed,
            hours=hours,
            price=hours * rate if hours and rate else None,
        )


def config_file(strategy: str) -> str:
    return f"accelerate_configs/{CONFIGS[strategy]}.yaml"


def _reason(line: Line, best: Line) -> str:
    if not line.images:
        return f"at most {line.largest} images fit"
    if not line.images_per_s or not best.images_per_s:
        return "its optimizer steps on the CPU, which is slower; the time is not estimated"
    return f"{best.images_per_s / line.images_per_s:.2f} times as long"


if __name__ == "__main__":
    sys.exit(run_command(main))
