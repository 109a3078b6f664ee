"""The plan of a training on a cluster: what plan.py's table and file are made of."""

import json
import math
import os
import platform
import shlex
import subprocess
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from common.data.shards import MANIFEST, parse_manifest
from common.distributed.precision import has_native_bf16
from common.recipe import parse
from common.script import load_script, recipe_class, training_images
from common.system.paths import ROOT
from common.telemetry.flops import Device, find_device
from tools.plan.cost import (
    Cluster,
    Measured,
    StepTime,
    Trace,
    largest_size,
    measured_step_time,
    step_time,
    traffic,
)
from tools.plan.table import ALIKE, Line, best_of, command, memory_of, reason

MOST_AT_ONCE = 4  # traces, of about 1 GiB each
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


@dataclass(frozen=True)
class Candidate:
    """A strategy on the cluster, with `share` images per forward."""

    strategy: str
    trace: Trace
    share: int  # 0: not even a few fit
    largest: int
    measured: Measured | None = None


def this_device() -> Device:
    """The device at hand. A CPU has no row in the table: its steps are timed, its exchange costs nothing."""
    if torch.cuda.is_available():
        name = torch.cuda.get_device_name()
        if not (device := find_device(name)):
            raise ValueError(f"--measure: {name} is not in common/telemetry/devices.yaml: add its row there")
        return device
    memory_gb = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 1e9
    peaks = {"fp32": math.nan} | ({"bf16": math.nan} if has_native_bf16() else {})
    name = f"CPU ({platform.machine()})"  # as runs name it
    return Device(name, peaks, memory_gb, math.nan, "loopback", math.inf, "measured")


def _training_images(data: str) -> int | None:
    """The number of images to train on; None where it is not known without reading a store."""
    manifest = Path(data) / MANIFEST
    if not manifest.is_file():
        return training_images(data)
    return sum(s.images for s in parse_manifest(manifest.read_bytes(), data).splits["train"].shards)


class Planning:
    """A script with its flags on a cluster. ValueError for a mistake in them.

    price_per_hour: of all hosts together, in any currency. measure: the cluster is made of the device at
    hand, on which a step of each strategy is timed.
    """

    def __init__(
        self,
        script: Sequence[str],
        cluster: Cluster,
        price_per_hour: float | None = None,
        measure: bool = False,
    ):
        if not Path(script[0]).is_file():
            raise ValueError(f"{script[0]}: no such script")
        self.script, self.cluster = list(script), cluster
        self.price_per_hour, self.measure = price_per_hour, measure
        self.recipe: Any = parse(recipe_class(load_script(Path(script[0]))), self.script[1:])
        self.images = _training_images(self.recipe.data)
        if self.recipe.batch_size % cluster.processes:
            raise ValueError(
                f"--batch_size {self.recipe.batch_size} does not divide among {cluster.processes} devices"
            )
        kinds = [kind for kind in ("bf16", "fp16") if kind in cluster.device.peaks]
        self.precision = self.recipe.mixed_precision or (kinds[0] if "bf16" in kinds else [*kinds, "no"][0])
        self.strategies = possible(cluster.hosts, cluster.gpus, self.recipe.grad_compression)
        self.first_speed = 0.0  # images/s of a device of the first strategy
        self.least_launches = 0  # kernels of the first one: no engine launches less than the plain model

    @property
    def about(self) -> str:
        cluster, device = self.cluster, self.cluster.device
        gib = device.memory_gb / 1.073741824
        shown = f"{cluster.hosts} x {cluster.gpus} {device.name}, {gib:.0f} GiB each"
        return f"{shown}, batch {self.recipe.batch_size}, mixed precision {self.precision}"

    @property
    def links(self) -> str:
        """What carries `link MB` and `net MB`."""
        cluster = self.cluster
        speed = f" {cluster.device.link_gb_s / 2:g} GB/s" if cluster.device.link_gb_s < math.inf else ""
        return f"link: {cluster.device.link}{speed}; network: {cluster.network_gb_s:g} GB/s of a host"

    @property
    def facts(self) -> dict[str, Any]:
        """What was planned: the script, the recipe's size and the cluster."""
        return {
            "about": self.about,
            "script": Path(self.script[0]).stem,
            "flags": self.script[1:],
            "batch_size": self.recipe.batch_size,
            "epochs": self.recipe.epochs,
            "mixed_precision": self.precision,
            "hosts": self.cluster.hosts,
            "gpus": self.cluster.gpus,
            "gpu": self.cluster.device.name,
            "price_per_hour": self.price_per_hour,
            "link": self.cluster.device.link,
            "network_gb_s": self.cluster.network_gb_s,
            "measured": self.measure,
        }

    def candidates(self) -> Iterator[Candidate]:
        """Each strategy's trace; with `measure` its measured step, too, when all are traced."""
        with ThreadPoolExecutor(min(MOST_AT_ONCE, os.cpu_count() or 1)) as pool:
            traced = pool.map(self._traced, self.strategies)
            if not self.measure:
                yield from traced
                return
            done = list(traced)
        for found in done:  # one after another, undisturbed
            yield replace(found, measured=self._measured(found))

    def _traced(self, strategy: str) -> Candidate:
        processes, batch_size = self._processes(strategy), self.recipe.batch_size
        share = self.recipe.per_device_batch_size or batch_size // processes
        trace = self._trace(strategy, share)
        if (largest := largest_size(trace.peaks, self.cluster.device.memory_gb * 1e9)) < share:
            share = max((n for n in range(1, largest + 1) if batch_size % (n * processes) == 0), default=0)
            trace = self._trace(strategy, share) if share else trace
        return Candidate(strategy, compressed(trace, self.recipe.grad_compression), share, largest)

    def _trace(self, strategy: str, size: int) -> Trace:
        cluster, sizes = self.cluster, [size, 2 * size]
        return traced(
            strategy, cluster.hosts, cluster.gpus, sizes, cluster.device.memory_gb * 1e9, self._words
        )

    def _measured(self, found: Candidate) -> Measured | None:
        if not found.share or found.strategy == "offload":
            return None
        return measured(found.strategy, found.share, self._words)

    @property
    def _words(self) -> list[str]:
        return [*self.script, f"--mixed_precision={self.precision}"]

    def _processes(self, strategy: str) -> int:
        return processes_of(strategy, self.cluster.hosts, self.cluster.gpus)

    def line(self, found: Candidate) -> Line:
        """The line of a strategy. The first one is what the others' efficiency refers to."""
        strategy, processes = found.strategy, self._processes(found.strategy)
        memory, file = memory_of(strategy, found.trace), config_file(strategy)
        line = Line(strategy, file, memory, found.share, found.largest, "does not fit")
        if not found.share:
            return line
        self.least_launches = self.least_launches or len(found.trace.operations)
        cluster = self.cluster if processes > 1 else replace(self.cluster, hosts=1, gpus=1)
        accumulations = self.recipe.batch_size // (found.share * processes)
        link, network = traffic(found.trace, cluster, accumulations)
        line = replace(line, link_bytes=link, network_bytes=network)
        if strategy == "offload":
            return replace(line, limit="the CPU's optimizer")
        step = self.step(found, cluster, accumulations)
        speed = self.recipe.batch_size / step.seconds
        self.first_speed = self.first_speed or speed / processes
        hours, rate = self.hours(step.seconds), self.price_per_hour
        return replace(
            line,
            limit=self._named(step.limit),
            step_s=step.seconds,
            images_per_s=speed,
            efficiency=speed / processes / self.first_speed,
            hours=hours,
            price=hours * rate if hours and rate else None,
        )

    def step(self, found: Candidate, cluster: Cluster, accumulations: int) -> StepTime:
        """An optimizer step on a cluster."""
        if not found.measured:
            return step_time(found.trace, cluster, self.least_launches, accumulations)
        ranks = shards(found.strategy, cluster.hosts, cluster.gpus)
        return measured_step_time(found.trace, cluster, found.measured, ranks, accumulations)

    def hours(self, step_s: float) -> float | None:
        """To the recipe's end; None where the number of images is not known."""
        if not self.images:
            return None
        return self.images // self.recipe.batch_size * self.recipe.epochs * step_s / 3600

    def _named(self, limit: str) -> str:
        return self.cluster.device.link if limit == "link" else limit

    def recommendation(self, lines: Sequence[Line]) -> str:
        """The fastest strategy that fits, its command, and why not the others."""
        best, others = best_of(lines, self.cluster.processes)
        if best is None:
            return "nothing fits: take more GPUs, --grad_checkpointing or a smaller model"
        words = command(best, self.cluster.hosts, self.cluster.gpus, self.script)
        if self.precision != "bf16" and not self.recipe.mixed_precision:
            words += ["--mixed_precision", self.precision]
        rest = [f"  not {line.strategy}: {reason(line, best)}" for line in others]
        within = f"the simplest strategy within {(ALIKE - 1) * 100:.0f} % of the fastest"
        begin = f"\nRecommended: {best.strategy} ({within}):"
        return "\n".join([begin, f"    {shlex.join(words)}", *rest])


# --- Strategies


def config_file(strategy: str) -> str:
    return f"accelerate_configs/{CONFIGS[strategy]}.yaml"


def possible(hosts: int, gpus: int, grad_compression: str) -> list[str]:
    """The strategies for a cluster of hosts x gpus devices."""
    if hosts * gpus == 1:
        return ["single", "offload"]
    if grad_compression != "no":  # the others refuse it
        return ["single", "ddp"]
    return [name for name in CONFIGS if name != "hybrid" or (hosts > 1 and gpus > 1)]


def processes_of(strategy: str, hosts: int, gpus: int) -> int:
    return 1 if strategy == "single" else hosts * gpus


def shards(strategy: str, hosts: int, gpus: int) -> int:
    """The ranks that share the optimizer's state."""
    if strategy in ("single", "ddp"):
        return 1
    return gpus if strategy == "hybrid" else hosts * gpus


def traced(
    strategy: str, hosts: int, gpus: int, sizes: Sequence[int], memory_bytes: float, script: Sequence[str]
) -> Trace:
    """Traces a micro-batch of each size in a process of its own. ValueError with its last words.

    memory_bytes: of a device. script: the script and its flags; a later flag wins.
    """
    words = [config_file(strategy), str(processes_of(strategy, hosts, gpus))]
    words += [str(1 if strategy == "single" else hosts)]
    words += [",".join(map(str, sizes)), str(memory_bytes), *script]
    env = {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    return Trace.from_json(_last_line("trace", words, env, f"{strategy} can't be traced"))


def measured(strategy: str, size: int, script: Sequence[str]) -> Measured:
    """Times the strategy's engine on micro-batches of `size` images, in one process on the device at hand."""
    words = [config_file(strategy), str(size), *script]
    env = {} if torch.cuda.is_available() else {"CUDA_VISIBLE_DEVICES": ""}
    return Measured(**json.loads(_last_line("measure", words, env, f"--measure: {strategy}")))


def _last_line(module: str, words: Sequence[str], env: dict[str, str], what: str) -> str:
    """What a module of this folder prints last. ValueError with its last words where it fails."""
    command = [sys.executable, "-m", f"tools.plan.{module}", *words]
    env = os.environ | {"PYTHONPATH": str(ROOT)} | env
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    if done.returncode:
        said = [line for line in done.stderr.splitlines() if line.strip()]
        raise ValueError(f"{what}: {said[-1].removeprefix('error: ') if said else 'the process was killed'}")
    return done.stdout.splitlines()[-1]


def compressed(trace: Trace, grad_compression: str) -> Trace:
    """The trace with half of the bytes where DDP exchanges gradients in 16 bits."""
    if grad_compression == "no" or trace.strategy != "ddp":
        return trace
    return replace(trace, collectives=[(kind, moved // 2, n) for kind, moved, n in trace.collectives])
