"""The plan of a training on a cluster: what plan.py's table and file are made of."""

import math
import os
import platform
import shlex
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
from common.telemetry.flops import Device, find_device
from tools.plan import strategies
from tools.plan.cost import Cluster, StepTime, largest_size, measured_step_time, step_time, traffic
from tools.plan.lines import ALIKE, Line, best_of, command, memory_of, reason
from tools.plan.result import Measured, Trace

MOST_AT_ONCE = 4  # traces, of about 1 GiB each


@dataclass(frozen=True)
class Found:
    """What is known of a strategy, with `share` images per forward."""

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
        self.strategies = strategies.possible(cluster.hosts, cluster.gpus, self.recipe.grad_compression)
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

    def found(self) -> Iterator[Found]:
        """Each strategy's trace; with `measure` its measured step, too, when all are traced."""
        with ThreadPoolExecutor(min(MOST_AT_ONCE, os.cpu_count() or 1)) as pool:
            traced = pool.map(self._traced, self.strategies)
            if not self.measure:
                yield from traced
                return
            done = list(traced)
        for found in done:  # one after another, undisturbed
            yield replace(found, measured=self._measured(found))

    def _traced(self, strategy: str) -> Found:
        processes, batch_size = self._processes(strategy), self.recipe.batch_size
        share = self.recipe.per_device_batch_size or batch_size // processes
        trace = self._trace(strategy, share)
        if (largest := largest_size(trace.peaks, self.cluster.device.memory_gb * 1e9)) < share:
            share = max((n for n in range(1, largest + 1) if batch_size % (n * processes) == 0), default=0)
            trace = self._trace(strategy, share) if share else trace
        return Found(strategy, strategies.compressed(trace, self.recipe.grad_compression), share, largest)

    def _trace(self, strategy: str, size: int) -> Trace:
        cluster, sizes = self.cluster, [size, 2 * size]
        return strategies.traced(
            strategy, cluster.hosts, cluster.gpus, sizes, cluster.device.memory_gb * 1e9, self._words
        )

    def _measured(self, found: Found) -> Measured | None:
        if not found.share or found.strategy == "offload":
            return None
        return strategies.measured(found.strategy, found.share, self._words)

    @property
    def _words(self) -> list[str]:
        return [*self.script, f"--mixed_precision={self.precision}"]

    def _processes(self, strategy: str) -> int:
        return strategies.processes_of(strategy, self.cluster.hosts, self.cluster.gpus)

    def line(self, found: Found) -> Line:
        """The line of a strategy. The first one is what the others' efficiency refers to."""
        strategy, processes = found.strategy, self._processes(found.strategy)
        memory, file = memory_of(strategy, found.trace), strategies.config_file(strategy)
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

    def step(self, found: Found, cluster: Cluster, accumulations: int) -> StepTime:
        """An optimizer step on a cluster."""
        if not found.measured:
            return step_time(found.trace, cluster, self.least_launches, accumulations)
        shards = strategies.shards(found.strategy, cluster.hosts, cluster.gpus)
        return measured_step_time(found.trace, cluster, found.measured, shards, accumulations)

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
        begin = f"\n{best.strategy}, of those within {ALIKE - 1:.0%} of the fastest the simplest:"
        return "\n".join([begin, f"    {shlex.join(words)}", *rest])
