"""Plan for training on a cluster, with the lines of plan.py's table and a recommendation."""

import os
import re
import shlex
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from inspect import signature
from pathlib import Path
from typing import Any

from onecurve.data.shards import MANIFEST, parse_manifest
from onecurve.flags.recipe import parse_fold, share_out
from onecurve.models.script import load_script, recipe_of, training_images
from onecurve.system.paths import ROOT
from onecurve.system.processes import allowed_cores
from onecurve.telemetry.flops import Device, find_device, known_devices
from tools.plan import cost
from tools.plan.cost import Cluster, Execution, Trace

MOST_AT_ONCE = 4  # maximum number of parallel traces, each of which needs about 1 GiB of memory
STRATEGIES = ("single", "ddp", "fsdp", "hybrid", "zero1", "zero2", "zero3", "offload")
CONFIGS = {"single": "single_gpu", "hybrid": "fsdp_2x4gpu", "offload": "zero3_offload_4gpu"}
EQUAL_SPEED_RATIO = 1.05  # ratio of two speeds below which the estimates can't distinguish them
SIZE_COLUMNS = ("strategy", "GiB", "images", "largest", "link MB", "net MB")
TABLE_HEAD = (*SIZE_COLUMNS, "step ms", "images/s", "eff.", "hours", "limited by")
TABLE_ROW = "{:<9}{:>7}{:>8}{:>9}{:>9}{:>8}{:>10}{:>10}{:>6}{:>9}  {}"


# Strategy, trace, number of images per forward pass, and maximum number of images per forward pass
Candidate = tuple[str, Trace, int, int]


@dataclass(frozen=True)
class PlanLine:
    """Line of the plan for one strategy. All numbers describe one device unless stated otherwise."""

    strategy: str
    config_file: str
    memory: dict[str, int]  # bytes in each memory category
    images: int  # number of images per forward pass, or 0 if no batch fits into memory
    largest: int  # maximum number of images per forward pass that fit into memory
    limit: str  # name of the bottleneck, for example `compute`
    link_bytes: float = 0  # bytes that a device sends within the host per step
    network_bytes: float = 0  # bytes that a host sends to other hosts per step
    step_s: float | None = None  # duration of an optimizer step, or None without an estimate
    images_per_s: float | None = None  # total speed of all devices
    efficiency: float | None = None  # images/s per device, relative to a job on a single device
    hours: float | None = None  # time for the entire recipe, or None if the number of images is unknown

    def __str__(self) -> str:
        total = sum(self.memory.values()) / 2**30
        cells = [self.strategy, f"{total:.2f}", self.images or "-", f"{self.largest:,}"]
        cells += [_format_cell(self.link_bytes / 1e6), _format_cell(self.network_bytes / 1e6)]
        cells += [_format_cell(self.step_s and self.step_s * 1e3, 1), _format_cell(self.images_per_s)]
        cells += [_format_cell(number, 2) for number in (self.efficiency, self.hours)]
        return TABLE_ROW.format(*cells, self.limit)

    def reason(self, best: "PlanLine") -> str:
        """Return the reason why the strategy in `best` is recommended instead of this strategy."""
        if not self.images:
            return f"at most {self.largest} images per forward pass fit into memory"
        if not self.images_per_s or not best.images_per_s:
            slowdown = "slower by an amount that this plan does not estimate"
            return f"the optimizer runs on the CPU, which is {slowdown}"
        return f"{best.images_per_s / self.images_per_s:.2f} times as long"


def _format_cell(number: float | None, digits: int = 0) -> str:
    return "-" if number is None else f"{number:,.{digits}f}"


def cluster_of(hosts: int, gpus: int, name: str, network_gb_s: float | None) -> Cluster:
    """Return a cluster of the named devices.

    Args:
        hosts: Number of hosts.
        gpus: Number of devices per host.
        name: Device name.
        network_gb_s: Network bandwidth of each host in GB/s, or None for the bandwidth in devices.yaml.
    """
    device = named_device(name)
    return Cluster(hosts, gpus, device, network_gb_s or device.network_gb_s)


def named_device(name: str) -> Device:
    """Return the device that torch calls `name`, or the first device whose name contains all words of `name`.

    Raises:
        ValueError: If no device matches.
    """
    if device := find_device(name):
        return device
    words = partial(re.findall, r"\w+")
    named_words = {*words(name.lower())}
    matches = [device for device in known_devices() if named_words <= {*words(device.name.lower())}]
    if not matches:
        names = ", ".join(device.name for device in known_devices())
        raise ValueError(f"--gpu {name} is not in the table of devices. Choose one of {names}.")
    if others := ", ".join(device.name for device in matches[1:]):
        print(f"--gpu {name} matches several devices. Using {matches[0].name} instead of {others}.")
    return matches[0]


def _training_images(data: str, holdout: float | str | None) -> int | None:
    """Return the number of training images, or None if only remote data records it."""
    manifest = Path(data) / MANIFEST
    if manifest.is_file():
        shards = parse_manifest(manifest.read_bytes(), data).splits["train"].shards
        images = sum(shard.images for shard in shards)
    elif not (images := training_images(data) or 0):
        return None
    held_out = 1 / parse_fold(holdout)[1] if isinstance(holdout, str) else holdout or 0
    return images - round(held_out * images if held_out < 1 else held_out)


class Planning:
    """Plan for a train script with its flags on a cluster.

    Raises:
        ValueError: If the script or a flag is wrong.
    """

    def __init__(self, script: Sequence[str], cluster: Cluster):
        if not Path(script[0]).is_file():
            raise ValueError(f"the script {script[0]} does not exist")
        self.script, self.cluster = list(script), cluster
        loaded = load_script(Path(script[0]))
        self.recipe = recipe_of(loaded, self.script[1:])
        self.build_optimizer = getattr(loaded, "build_optimizer", lambda: None)
        if self.recipe.freeze:
            remark = "--freeze is ignored. The plan assumes that all layers are trained"
            print(f"{remark}, which requires more memory, traffic and time.")
        self.images = _training_images(self.recipe.data, self.recipe.holdout)
        # Raise ValueError for a batch size that train scripts refuse.
        share_out(self.recipe.batch_size, self.recipe.per_device_batch_size, cluster.processes)
        dtypes = [dtype for dtype in ("bf16", "fp16") if dtype in cluster.device.peaks]
        self.precision = self.recipe.mixed_precision or [*dtypes, "no"][0]
        self.strategies = possible_strategies(cluster.hosts, cluster.gpus, self.recipe.grad_compression)
        self.first_speed = 0.0  # images/s per device under the first strategy
        self.least_launches = 0  # number of kernels under the first strategy, the minimum for all engines

    @property
    def summary(self) -> str:
        cluster, device = self.cluster, self.cluster.device
        gib = device.memory_gb / 1.073741824
        devices = f"{cluster.hosts} x {cluster.gpus} {device.name}, {gib:.0f} GiB each"
        return f"{devices}, batch {self.recipe.batch_size}, mixed precision {self.precision}"

    @property
    def links(self) -> str:
        """Speeds of the links that carry the traffic in columns `link MB` and `net MB`."""
        cluster = self.cluster
        link = f"{cluster.device.link} {cluster.device.link_gb_s / 2:g} GB/s"
        return f"link: {link} per device; network: {cluster.network_gb_s:g} GB/s per host"

    @property
    def facts(self) -> dict[str, Any]:
        """Facts about the script, the recipe and the cluster, for the plan's JSON file."""
        return {
            "about": self.summary,
            "script": Path(self.script[0]).stem,
            "flags": self.script[1:],
            "batch_size": self.recipe.batch_size,
            "epochs": self.recipe.epochs,
            "mixed_precision": self.precision,
            "hosts": self.cluster.hosts,
            "gpus": self.cluster.gpus,
            "gpu": self.cluster.device.name,
            "link": self.cluster.device.link,
            "network_gb_s": self.cluster.network_gb_s,
        }

    def candidates(self, report: Callable[[str], None]) -> Iterator[Candidate]:
        """Trace all strategies in parallel. Call report() with a description before each trace."""
        with ThreadPoolExecutor(min(MOST_AT_ONCE, allowed_cores())) as pool:
            yield from pool.map(partial(self.traced, report=report), self.strategies)

    def traced(self, strategy: str, report: Callable[[str], None] = lambda _: None) -> Candidate:
        """Trace a strategy with the recipe's batch, or with smaller micro-batches that fit into memory."""
        report(f"tracing {strategy}")
        processes, batch_size = self._processes(strategy), self.recipe.batch_size
        images = self.recipe.per_device_batch_size or batch_size // processes
        trace = self._trace(strategy, images)
        if (largest := cost.largest_size(trace.peaks, self.cluster.device.memory_gb * 1e9)) < images:
            possible_sizes = (size for size in range(1, largest + 1) if batch_size % (size * processes) == 0)
            images = max(possible_sizes, default=0)
            trace = self._trace(strategy, images) if images else trace
        return strategy, compress_traffic(trace, self.recipe.grad_compression), images, largest

    def _trace(self, strategy: str, size: int) -> Trace:
        """Trace micro-batches of `size` and 2 * `size` images in a new process that does not use GPUs."""
        hosts = 1 if strategy == "single" else self.cluster.hosts
        sizes = f"{size},{2 * size}"
        arguments = [config_of_strategy(strategy), self._processes(strategy), hosts, sizes]
        arguments += [self.cluster.device.name, *self.script, f"--mixed_precision={self.precision}"]
        env = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
        command = [sys.executable, "-m", "tools.plan.trace", *map(str, arguments)]
        completed = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
        if completed.returncode:
            error_lines = [line for line in completed.stderr.splitlines() if line.strip()]
            last_line = error_lines[-1] if error_lines else "the tracing process was killed"
            reason = last_line.removeprefix("error: ")
            raise ValueError(f"the strategy {strategy} can't be traced: {reason}")
        return Trace.from_json(completed.stdout.splitlines()[-1])

    def _processes(self, strategy: str) -> int:
        return 1 if strategy == "single" else self.cluster.processes

    def line(self, strategy: str, trace: Trace, share: int, largest: int) -> PlanLine:
        """Return the plan's line for a strategy. The efficiency is relative to the first returned line.

        Args:
            strategy: Strategy name.
            trace: Trace of a step under the strategy.
            share: Number of images per forward pass, or 0 if no batch fits into memory.
            largest: Maximum number of images per forward pass that fit into memory.
        """
        processes, memory = self._processes(strategy), memory_by_part(strategy, trace)
        line = PlanLine(strategy, config_of_strategy(strategy), memory, share, largest, "does not fit")
        if not share:
            return line
        self.least_launches = self.least_launches or len(trace.operations)
        cluster = self.cluster if processes > 1 else replace(self.cluster, hosts=1, gpus=1)
        accumulations = self.recipe.batch_size // (share * processes)
        link, network = cost.traffic(trace, cluster, accumulations)
        line = replace(line, link_bytes=link, network_bytes=network)
        if strategy == "offload":
            return replace(line, limit="the CPU's optimizer")
        execution = self.execution(strategy)
        step_s, limit = cost.step_time(trace, cluster, execution, self.least_launches, accumulations)
        speed = self.recipe.batch_size / step_s
        self.first_speed = self.first_speed or speed / processes
        steps = (self.images or 0) // self.recipe.batch_size * self.recipe.epochs
        return replace(
            line,
            limit=self.cluster.device.link if limit == "link" else limit,
            step_s=step_s,
            images_per_s=speed,
            efficiency=speed / processes / self.first_speed,
            hours=min(steps, self.recipe.max_steps or steps) * step_s / 3600 if self.images else None,
        )

    def execution(self, strategy: str) -> Execution:
        """Return the steps' execution mode, by the CUDA graph rules in step_graph.py."""
        recipe = self.recipe
        is_graph = strategy in ("single", "ddp", "fsdp") and recipe.step_graph is not False
        is_graph &= self.precision != "fp16" and recipe.compile in (None, "no", "default")
        is_graph &= not recipe.grad_checkpointing and recipe.grad_compression == "no"
        fuses_sgd = "fused" in signature(self.build_optimizer).parameters and strategy != "fsdp"
        is_graph &= recipe.optimizer in ("adamw", "sgd" if fuses_sgd else "adamw")
        return Execution.of(recipe.compile, is_graph)

    def recommendation(self, lines: Sequence[PlanLine]) -> str:
        """Return a text with the recommended strategy, its command, and reasons against other strategies."""
        candidates = [line for line in lines if line.strategy != "single" or self.cluster.processes == 1]
        if not (fitting := [line for line in candidates if line.images]):
            return "No strategy fits into the memory. Use more GPUs, --grad_checkpointing or a smaller model."
        fastest = max(line.images_per_s or 0 for line in fitting)
        # Later strategies shard more, so the first of several equally fast strategies is the simplest
        # strategy.
        best = next(line for line in fitting if (line.images_per_s or 0) >= fastest / EQUAL_SPEED_RATIO)
        reason = f"the simplest strategy within {(EQUAL_SPEED_RATIO - 1) * 100:.0f} % of the fastest"
        if best.limit == cost.LAUNCHES:  # the estimate ignores differences in launch overhead
            best = next(line for line in fitting if line.limit == cost.LAUNCHES)
            reason = "the simplest strategy that is limited by launch overhead"
        has_hosts, gpus = self.cluster.hosts > 1, ["--num_processes", str(self.cluster.gpus)]
        command = ["python", "launch.py", "--hostfile", "hostfile"] if has_hosts else ["accelerate", "launch"]
        command += ["--config_file", best.config_file, *([] if has_hosts else gpus), *self.script]
        command += ["--per_device_batch_size", str(best.images)]
        if self.precision != "bf16" and not self.recipe.mixed_precision:
            command += ["--mixed_precision", self.precision]
        rejected = [line for line in candidates if line is not best]
        rejections = [f"  not {line.strategy}: {line.reason(best)}" for line in rejected]
        heading = f"\nRecommended: {best.strategy} ({reason}):"
        return "\n".join([heading, f"    {shlex.join(command)}", *rejections])


def config_of_strategy(strategy: str) -> str:
    return f"accelerate_configs/{CONFIGS.get(strategy, f'{strategy}_4gpu')}.yaml"


def possible_strategies(hosts: int, gpus: int, grad_compression: str) -> list[str]:
    """Return the names of all strategies that a cluster with `gpus` devices per host can use."""
    if hosts * gpus == 1:
        return ["single", "offload"]
    if grad_compression != "no":  # all other strategies refuse --grad_compression
        return ["single", "ddp"]
    return [name for name in STRATEGIES if name != "hybrid" or (hosts > 1 and gpus > 1)]


def compress_traffic(trace: Trace, grad_compression: str) -> Trace:
    """Halve the bytes of DDP's collectives if --grad_compression makes DDP exchange gradients in 16 bits."""
    if grad_compression == "no" or trace.strategy != "ddp":
        return trace
    halved = [(name, moved // 2, ranks) for name, moved, ranks in trace.collectives]
    return replace(trace, collectives=halved)


def memory_by_part(strategy: str, trace: Trace) -> dict[str, int]:
    """Return the bytes in each category of a device's memory at the step's peak.

    MemTracker does not recognise DDP's gradients, because these gradients are views of buckets. This function
    includes the buckets in the gradients.
    """
    peak = next(iter(trace.peaks.values()))  # peak at the planned number of images
    optimizer = min(trace.optimizer, peak["Total"] - trace.parameters)
    other_bytes = peak["Total"] - trace.parameters - optimizer
    activations = min(peak.get("Activation", 0), other_bytes)
    buffers = min(peak.get("Buffer", 0), other_bytes - activations)
    other_bytes -= activations + buffers
    gradients = min(peak.get("Gradient", 0) or trace.gradients, other_bytes)
    return {
        "parameters": trace.parameters,
        "optimizer": 0 if strategy == "offload" else optimizer,
        "activations": activations,
        "buffers": buffers,
        "gradients": gradients,
        "buckets_temporaries": other_bytes - gradients,
        "context": cost.CONTEXT_BYTES,
    }
