"""Time of an optimizer step from its trace, by data sheets.

- A kernel takes the longer of its FLOPs at the device's peak and its bytes at the memory's bandwidth (the
  roofline of Williams, Waterman, Patterson 2009, doi 10.1145/1498765.1498785), each times what large products
  and copies reach, and all kernels a share of that. The host launches one kernel after another; the slower of
  host and device counts.
- What is exchanged during the backward pass hides behind it: two thirds of the computation.
  A ring of n ranks sends, from each, 2 (n-1)/n of an all-reduce's bytes and (n-1)/n of an all-gather's or a
  reduce-scatter's (Patarasuk, Yuan 2009, doi 10.1016/j.jpdc.2008.09.002).

The constants of an execution are of one device: an H200 in a host with 16 cores (2026-11-26, commit f763543).
docs/performance.md has planned times beside those measured there. The exchange is not yet measured on GPUs.
"""

import json
import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

from onecurve.telemetry.flops import Device

REACHED_FLOPS = 0.66  # of the peak, by large products in bf16: 675 to 740 of 990 TFLOP/s were measured
REACHED_BANDWIDTH = 0.9  # of the memory's, by copies: 4.2 of 4.8 TB/s were measured
HIDDEN = 2 / 3  # of the computation: the backward pass, beside which gradients are exchanged
CONTEXT_BYTES = int(0.5 * 2**30)  # CUDA's context and libraries, outside of torch's allocator
QUANTUM = 8  # sizes of forwards are its multiples
RING = {"all_reduce": 2.0}  # times (n-1)/n of the bytes are sent; of other collectives once
LARGE_PART = 0.1  # of the computation: an exchange that takes longer beside it is what limits
COMPUTE, MEMORY, LAUNCHES = "compute", "memory traffic", "launch overhead"
LINK, NETWORK = "link", "network"

Kernel = tuple[str, int, int]  # the type of what it writes, FLOPs, bytes read and written
Collective = tuple[str, int, int]  # its name, bytes, ranks


@dataclass
class Trace:
    """One process's optimizer step. Memory in bytes, by the images per forward."""

    strategy: str
    mixed_precision: str
    peaks: dict[int, dict[str, int]]  # MemTracker's parts at the peak, and `Total`
    parameters: int  # bytes of what this process keeps between steps
    optimizer: int  # masters under ZeRO, the optimizer's state, averages
    operations: list[Kernel]
    collectives: list[Collective]
    gradients: int = 0  # bytes of the parameters' .grad after the backward pass; ZeRO keeps them in buckets

    @classmethod
    def from_json(cls, text: str) -> "Trace":
        values = json.loads(text)
        values["peaks"] = {int(size): peak for size, peak in values["peaks"].items()}
        return cls(**values)


@dataclass(frozen=True)
class Cluster:
    """hosts x gpus devices of one kind. network_gb_s: of a host, in one direction, in 10^9 bytes a second."""

    hosts: int
    gpus: int
    device: Device
    network_gb_s: float

    @property
    def processes(self) -> int:
        return self.hosts * self.gpus


@dataclass(frozen=True)
class Execution:
    """How steps run: the share of the roofline that kernels reach, and the host's seconds, as measured."""

    reached: float
    forward_s: float  # of a forward with its backward pass and all that is around it
    operation_s: float  # of each operation, also where compilation makes fewer kernels of them

    @classmethod
    def of(cls, compilation: str | None, is_graph: bool) -> "Execution":
        """compilation: the mode of --compile. is_graph: a step is one CUDA graph."""
        found = cls(0.65, 2e-3, 16e-6) if compilation in (None, "no") else cls(0.82, 2e-3, 18e-6)
        return replace(found, forward_s=1.1e-3, operation_s=0.0) if is_graph else found


def largest_size(peaks: dict[int, dict[str, int]], memory_bytes: float) -> int:
    """The largest images per forward that fit, by the line through the last two sizes traced.

    0 where not one quantum fits. Where memory does not grow between the two: 64 times the larger one.
    """
    (small, low), (large, high) = [(size, peak["Total"]) for size, peak in peaks.items()][-2:]
    free, each = memory_bytes - CONTEXT_BYTES - high, (high - low) / (large - small)
    more = free / each if each > 0 else 63 * large if free > 0 else -large
    return max(0, math.floor((large + more) / QUANTUM) * QUANTUM)


def step_time(
    trace: Trace, cluster: Cluster, how: Execution, least_launches: int = 0, accumulations: int = 1
) -> tuple[float, str]:
    """Seconds of an optimizer step with its exchange, and what limits it.

    least_launches: so many operations at least a forward.
    """
    of_kernels = _kernel_times(trace, cluster.device)
    kernels_s = sum(of_kernels.values()) / how.reached
    host_s = how.forward_s + max(least_launches, len(trace.operations)) * how.operation_s
    computing_s = accumulations * max(kernels_s, host_s)
    limit = LAUNCHES if host_s > kernels_s else max(of_kernels, key=lambda name: of_kernels[name])
    link, network = traffic(trace, cluster, accumulations)
    # Half of a link's data sheet bandwidth: it counts both directions.
    times = {
        LINK: link / (cluster.device.link_gb_s / 2 * 1e9),
        NETWORK: network / (cluster.network_gb_s * 1e9),
    }
    exposed_s = max(0.0, max(times.values()) - HIDDEN * computing_s)
    if exposed_s > LARGE_PART * computing_s:
        limit = max(times, key=lambda name: times[name])
    return computing_s + exposed_s, limit


def exchanged(trace: Trace, accumulations: int = 1) -> Iterator[Collective]:
    """The collectives of an optimizer step: those of a micro-batch for each, but for what waits for the last.

    DDP and ZeRO-1 exchange gradients once, FSDP scatters them once; ZeRO-2 gathers weights once.
    """
    for collective in trace.collectives:
        kind = collective[0]
        once = {"fsdp": kind != "all_gather", "zero2": kind == "all_gather"}
        is_once = once.get(trace.strategy, trace.strategy in ("ddp", "zero1"))
        yield from [collective] * (1 if is_once else accumulations)


def _kernel_times(trace: Trace, device: Device) -> dict[str, float]:
    """Seconds of all kernels that computation limits, and of those that the memory's bandwidth limits."""
    peaks = {"bfloat16": device.peaks.get("bf16"), "float16": device.peaks.get("fp16")}
    full = device.peaks.get("tf32", device.peaks["fp32"])
    times = {COMPUTE: 0.0, MEMORY: 0.0}
    for kind, flops, moved in trace.operations:
        computing_s = flops / ((peaks.get(kind) or full) * 1e12 * REACHED_FLOPS)
        moving_s = moved / (device.memory_gb_s * 1e9 * REACHED_BANDWIDTH)
        times[COMPUTE if computing_s > moving_s else MEMORY] += max(computing_s, moving_s)
    return times


def traffic(trace: Trace, cluster: Cluster, accumulations: int = 1) -> tuple[float, float]:
    """Bytes that a device sends inside its host, and a host to others, in one optimizer step."""
    link = network = 0.0
    for kind, moved, ranks in exchanged(trace, accumulations):
        sent = RING.get(kind, 1.0) * moved * (ranks - 1) / ranks
        if cluster.hosts > 1 and ranks == cluster.processes:
            # A ring over all devices passes each host's network once.
            link, network = link + (sent if cluster.gpus > 1 else 0.0), network + sent
        elif cluster.hosts > 1 and ranks == cluster.hosts and (kind == "all_reduce" or ranks != cluster.gpus):
            # Hybrid sharding's all-reduce has one device a host. It gathers and scatters inside of a host.
            network += sent * cluster.gpus
        else:
            link += sent
    return link, network
