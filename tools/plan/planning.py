"""Plan of training on a cluster, with the lines of plan.py's table and the recommendation."""

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

MOST_AT_ONCE = 4  # number of parallel traces, each of which needs about 1 GiB
STRATEGIES = ("single", "ddp", "fsdp", "hybrid", "zero1", "zero2", "zero3", "offload")
CONFIGS = {"single": "single_gpu", "hybrid": "fsdp_2x4gpu", "offload": "zero3_offload_4gpu"}
ALIKE = 1.05  # ratio of two times below which the estimates can't distinguish them
SIZES = ("strategy", "GiB", "images", "largest", "link MB", "net MB")
HEAD = (*SIZES, "step ms", "images/s", "eff.", "hours", "limited by")
ROW = "{:<9}{:>7}{:>8}{:>9}{:>9}{:>8}{:>10}{:>10}{:>6}{:>9}  {}"


# Strategy, its trace, images per forward pass, and the most images per forward pass that fit
Candidate = tuple[str, Trace, int, int]


@dataclass(frozen=True)
class Line:
    """Line of the plan for one strategy. Numbers refer to one device unless stated otherwise."""

    strategy: str
    config_file: str
    memory: dict[str, int]  # bytes by part of the memory
    images: int  # images per forward pass, or 0 if no batch fits
    largest: int  # most images per forward pass that fit
    limit: str
    link_bytes: float = 0
    network_bytes: float = 0  # per host
    step_s: float | None = None  # time of an optimizer step with all micro-batches, or None if not estimated
    images_per_s: float | None = None  # of all devices
    efficiency: float | None = None  # images/s per device, relative to a single device
    hours: float | None = None  # time of the whole recipe, or None if the number of images is unknown

    def __str__(self) -> str:
        total = sum(self.memory.values()) / 2**30
        cells = [self.strategy, f"{total:.2f}", self.images or "-", f"{self.largest:,}"]
        cells += [_cell(self.link_bytes / 1e6), _cell(self.network_bytes / 1e6)]
        cells += [_cell(self.step_s and self.step_s * 1e3, 1), _cell(self.images_per_s)]
        cells += [_cell(number, 2) for number in (self.efficiency, self.hours)]
        return ROW.format(*cells, self.limit)

    def reason(self, best: "Line") -> str:
        """Return why the best strategy is recommended instead of this one."""
        if not self.images:
            return f"at most {self.largest} images fit"
        if not self.images_per_s or not best.images_per_s:
            return "its optimizer runs on the CPU, which is slower; the time is not estimated"
        return f"{best.images_per_s / self.images_per_s:.2f} times as long"


def _cell(number: float | None, digits: int = 0) -> str:
    return "-" if number is None else f"{number:,.{digits}f}"


def cluster_of(hosts: int, gpus: int, name: str, network_gb_s: float | None) -> Cluster:
    """Return the cluster of the devices with this name.

    Args:
        hosts: Number of hosts.
        gpus: Devices per host.
        name: Name of the device.
        network_gb_s: Bandwidth of a host's network in GB/s, or None for the device's value in devices.yaml.
    """
    device = named_device(name)
    return Cluster(hosts, gpus, device, network_gb_s or device.network_gb_s)


def named_device(name: str) -> Device:
    """Return the device with this name in torch, or else the first whose name contains all words of `name`.

    Raises:
        ValueError: No device matches.
    """
    if device := find_device(name):
        return device
    words = partial(re.findall, r"\w+")
    matches = [d for d in known_devices() if {*words(name.lower())} <= {*words(d.name.lower())}]
    if not matches:
        names = ", ".join(device.name for device in known_devices())
        raise ValueError(f"--gpu {name} is not in the table. Choose one of {names}.")
    if others := ", ".join(device.name for device in matches[1:]):
        print(f"--gpu {name}: using {matches[0].name}. The table also contains {others}.")
    return matches[0]


def _training_images(data: str, holdout: float | str | None) -> int | None:
    """Return the number of training images, or None if remote data would have to be read."""
    manifest = Path(data) / MANIFEST
    if manifest.is_file():
        count = sum(s.images for s in parse_manifest(manifest.read_bytes(), data).splits["train"].shards)
    elif not (count := training_images(data) or 0):
        return None
    share = 1 / parse_fold(holdout)[1] if isinstance(holdout, str) else holdout or 0
    return count - round(share * count if share < 1 else share)


class Planning:
    """Plan of a script with its flags on a cluster.

    Raises:
        ValueError: The script or a flag is wrong.
    """

    def __init__(self, script: Sequence[str], cluster: Cluster):
        if not Path(script[0]).is_file():
            raise ValueError(f"{script[0]}: no such script")
        self.script, self.cluster = list(script), cluster
        loaded = load_script(Path(script[0]))
        self.recipe = recipe_of(loaded, self.script[1:])
        self.build_optimizer = getattr(loaded, "build_optimizer", lambda: None)
        if self.recipe.freeze:
            remark = "--freeze is ignored. The plan is for training all layers"
            print(f"{remark}, which needs more memory, traffic and time.")
        self.images = _training_images(self.recipe.data, self.recipe.holdout)
        # Raises ValueError for a batch that a train script would refuse.
        share_out(self.recipe.batch_size, self.recipe.per_device_batch_size, cluster.processes)
        dtypes = [dtype for dtype in ("bf16", "fp16") if dtype in cluster.device.peaks]
        self.precision = self.recipe.mixed_precision or [*dtypes, "no"][0]
        self.strategies = possible(cluster.hosts, cluster.gpus, self.recipe.grad_compression)
        self.first_speed = 0.0  # images/s per device of the first strategy
        self.least_launches = 0  # kernels of the first strategy, the minimum of any engine

    @property
    def summary(self) -> str:
        cluster, device = self.cluster, self.cluster.device
        gib = device.memory_gb / 1.073741824
        devices = f"{cluster.hosts} x {cluster.gpus} {device.name}, {gib:.0f} GiB each"
        return f"{devices}, batch {self.recipe.batch_size}, mixed precision {self.precision}"

    @property
    def links(self) -> str:
        """Description of the links that carry the traffic in columns `link MB` and `net MB`."""
        cluster = self.cluster
        link = f"{cluster.device.link} {cluster.device.link_gb_s / 2:g} GB/s"
        return f"link: {link}; network: {cluster.network_gb_s:g} GB/s of a host"

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
        """Trace each strategy. Call report() with a description of each new task."""
        with ThreadPoolExecutor(min(MOST_AT_ONCE, allowed_cores())) as pool:
            yield from pool.map(partial(self.traced, report=report), self.strategies)

    def traced(self, strategy: str, report: Callable[[str], None] = lambda _: None) -> Candidate:
        """Trace a strategy with the recipe's batch, or with smaller micro-batches and accumulation."""
        report(f"tracing {strategy}")
        processes, batch_size = self._processes(strategy), self.recipe.batch_size
        share = self.recipe.per_device_batch_size or batch_size // processes
        trace = self._trace(strategy, share)
        if (largest := cost.largest_size(trace.peaks, self.cluster.device.memory_gb * 1e9)) < share:
            share = max((n for n in range(1, largest + 1) if batch_size % (n * processes) == 0), default=0)
            trace = self._trace(strategy, share) if share else trace
        return strategy, compressed(trace, self.recipe.grad_compression), share, largest

    def _trace(self, strategy: str, size: int) -> Trace:
        """Trace micro-batches of `size` and 2 * `size` images, without this machine's GPUs."""
        hosts = 1 if strategy == "single" else self.cluster.hosts
        numbers = [self._processes(strategy), hosts, f"{size},{2 * size}"]
        script = [*self.script, f"--mixed_precision={self.precision}"]
        words = [config_of_strategy(strategy), *map(str, numbers), self.cluster.device.name, *script]
        env = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
        command = [sys.executable, "-m", "tools.plan.trace", *words]
        done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
        if done.returncode:
            errors = [line for line in done.stderr.splitlines() if line.strip()]
            reason = errors[-1].removeprefix("error: ") if errors else "the process was killed"
            raise ValueError(f"{strategy} can't be traced: {reason}")
        return Trace.from_json(done.stdout.splitlines()[-1])

    def _processes(self, strategy: str) -> int:
        return 1 if strategy == "single" else self.cluster.processes

    def line(self, strategy: str, trace: Trace, share: int, largest: int) -> Line:
        """Return the line of a strategy. Efficiency refers to the first line that this method returns.

        Args:
            strategy: Name of the strategy.
            trace: Trace of the strategy.
            share: Images per forward pass, or 0 if no batch fits.
            largest: Most images per forward pass that fit.
        """
        processes, memory = self._processes(strategy), memory_of(strategy, trace)
        line = Line(strategy, config_of_strategy(strategy), memory, share, largest, "does not fit")
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
        """Return how steps run. onecurve/distributed/step_graph.py decides if a step is one CUDA graph."""
        recipe = self.recipe
        is_graph = strategy in ("single", "ddp", "fsdp") and recipe.step_graph is not False
        is_graph &= self.precision != "fp16" and recipe.compile in (None, "no", "default")
        is_graph &= not recipe.grad_checkpointing and recipe.grad_compression == "no"
        fuses_sgd = "fused" in signature(self.build_optimizer).parameters and strategy != "fsdp"
        is_graph &= recipe.optimizer in ("adamw", "sgd" if fuses_sgd else "adamw")
        return Execution.of(recipe.compile, is_graph)

    def recommendation(self, lines: Sequence[Line]) -> str:
        """Return a text with the recommended strategy, its command, and the reasons against the others."""
        candidates = [line for line in lines if line.strategy != "single" or self.cluster.processes == 1]
        if not (fitting := [line for line in candidates if line.images]):
            return "No strategy fits. Use more GPUs, --grad_checkpointing or a smaller model."
        fastest = max(line.images_per_s or 0 for line in fitting)
        # Later lines shard more, so the first of several equally fast lines is the simplest.
        best = next(line for line in fitting if (line.images_per_s or 0) >= fastest / ALIKE)
        reason = f"the simplest strategy within {(ALIKE - 1) * 100:.0f} % of the fastest"
        if best.limit == cost.LAUNCHES:  # the estimate does not model how engines differ in their launches
            best = next(line for line in fitting if line.limit == cost.LAUNCHES)
            reason = "the simplest of the strategies that launch overhead limits"
        has_hosts, gpus = self.cluster.hosts > 1, ["--num_processes", str(self.cluster.gpus)]
        words = ["python", "launch.py", "--hostfile", "hostfile"] if has_hosts else ["accelerate", "launch"]
        words += ["--config_file", best.config_file, *([] if has_hosts else gpus), *self.script]
        words += ["--per_device_batch_size", str(best.images)]
        if self.precision != "bf16" and not self.recipe.mixed_precision:
            words += ["--mixed_precision", self.precision]
        rest = [f"  not {line.strategy}: {line.reason(best)}" for line in candidates if line is not best]
        return "\n".join([f"\nRecommended: {best.strategy} ({reason}):", f"    {shlex.join(words)}", *rest])


def config_of_strategy(strategy: str) -> str:
    return f"accelerate_configs/{CONFIGS.get(strategy, f'{strategy}_4gpu')}.yaml"


def possible(hosts: int, gpus: int, grad_compression: str) -> list[str]:
    """Return the strategies for a cluster with `gpus` devices on each host."""
    if hosts * gpus == 1:
        return ["single", "offload"]
    if grad_compression != "no":  # other strategies refuse compression
        return ["single", "ddp"]
    return [name for name in STRATEGIES if name != "hybrid" or (hosts > 1 and gpus > 1)]


def compressed(trace: Trace, grad_compression: str) -> Trace:
    """Halve the bytes of DDP's collectives if --grad_compression exchanges gradients in 16 bits."""
    if grad_compression == "no" or trace.strategy != "ddp":
        return trace
    halved = [(name, moved // 2, ranks) for name, moved, ranks in trace.collectives]
    return replace(trace, collectives=halved)


def memory_of(strategy: str, trace: Trace) -> dict[str, int]:
    """Return the parts of a device's memory at the peak of a step, in bytes.

    MemTracker does not recognise DDP's gradients, because they are views of buckets. This function counts the
    buckets as gradients.
    """
    peak = next(iter(trace.peaks.values()))  # peak of the planned size
    optimizer = min(trace.optimizer, peak["Total"] - trace.parameters)
    rest = peak["Total"] - trace.parameters - optimizer
    activations = min(peak.get("Activation", 0), rest)
    buffers = min(peak.get("Buffer", 0), rest - activations)
    rest -= activations + buffers
    gradients = min(peak.get("Gradient", 0) or trace.gradients, rest)
    return {
        "parameters": trace.parameters,
        "optimizer": 0 if strategy == "offload" else optimizer,
        "activations": activations,
        "buffers": buffers,
        "gradients": gradients,
        "buckets_temporaries": rest - gradients,
        "context": cost.CONTEXT_BYTES,
    }
