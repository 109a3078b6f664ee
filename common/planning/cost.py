"""Time and price of a training from its trace: a roofline of each kernel, rings of each collective.

- A kernel takes the longer of its FLOPs at the device's peak and its bytes at the memory's bandwidth (the
  roofline of Williams, Waterman, Patterson 2009, doi 10.1145/1498765.1498785), each times a share that
  kernels reach.
- The host launches one kernel after another; the slower of host and device counts.
- A ring of n ranks sends, from each, 2 (n-1)/n of an all-reduce's bytes and (n-1)/n of an all-gather's or a
  reduce-scatter's (Patarasuk, Yuan 2009, doi 10.1016/j.jpdc.2008.09.002).
- What is exchanged during the backward pass hides behind it, two thirds of the computation.

Nothing here is measured on a GPU yet. The three constants are estimates for an H200.
"""

import math
from collections import defaultdict
from dataclasses import dataclass

from common.planning.result import Trace
from common.telemetry.flops import Device

REACHED_FLOPS = 0.66  # of the peak, by large products in half precision: 650 of 990 TFLOP/s
REACHED_BANDWIDTH = 0.9  # of the memory's: 4.3 of 4.8 TB/s
LAUNCH_S = 7e-6  # of a kernel, by the host, in PyTorch without compilation
HIDDEN = 2 / 3  # of the computation: the backward pass, beside which gradients are exchanged
CONTEXT_BYTES = int(0.5 * 2**30)  # CUDA's context and libraries, outside of torch's allocator
QUANTUM = 8  # sizes of forwards are its multiples
COMPUTE, MEMORY, LAUNCHES, LINK, NETWORK = (
    "compute",
    "memory traffic",
    "launch overhead",
    "link",
    "network",
)


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
class StepTime:
    """Seconds of a micro-batch with its optimizer step, and what limits it."""

    seconds: float
    limit: str
    link_bytes: float  # sent by a device to devices of its host
    network_bytes: float  # sent by a host to others


def largest_size(trace: Trace, memory_bytes: float) -> int:
    """The largest images per forward that fit: memory is linear in them. 0 where not one quantum fits."""
    (small, low), (large, high) = ((s, p["Total"]) for s, p in sorted(trace.peaks.items())[:2])
    each = (high - low) / (large - small)
    return max(
        0, math.floor((memory_bytes - CONTEXT_BYTES - (low - small * each)) / each / QUANTUM) * QUANTUM
    )


def step_time(trace: Trace, cluster: Cluster, least_launches: int = 0) -> StepTime:
    """The step of the trace's smallest size. least_launches: so many kernels at least are launched."""
    of_kernels = _kernel_times(trace, cluster.device)
    launching_s = max(least_launches, len(trace.operations)) * LAUNCH_S
    computing_s = max(sum(of_kernels.values()), launching_s)
    link, network = traffic(trace, cluster)
    # Half of a link's data sheet bandwidth: it counts both directions.
    times = {
        LINK: link / (cluster.device.link_gb_s / 2 * 1e9),
        NETWORK: network / (cluster.network_gb_s * 1e9),
    }
    exchanging_s = max(times.values())
    exposed_s = max(0.0, exchanging_s - HIDDEN * computing_s)
    if exposed_s > computing_s / 10:
        limit = max(times, key=lambda name: times[name])
    elif launching_s > sum(of_kernels.values()):
        limit = LAUNCHES
    else:
        limit = max(of_kernels, key=lambda name: of_kernels[name])
    return StepTime(computing_s + exposed_s, limit, link, network)


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


def traffic(trace: Trace, cluster: Cluster) -> tuple[float, float]:
    """Bytes that a device sends inside its host, and a host to others, in one step.

    A ring over all devices passes each host's network once. Groups of one device a host (hybrid sharding)
    share it.
    """
    sent: dict[int, float] = defaultdict(float)
    for kind, moved, ranks in trace.collectives:
        sent[ranks] += moved * {"all_reduce": 2.0}.get(kind, 1.0) * (ranks - 1) / ranks
    link = network = 0.0
    for ranks, each in sent.items():
        if cluster.hosts > 1 and ranks == cluster.hosts and ranks != cluster.processes:
            network += each * cluster.gpus
        elif cluster.hosts > 1 and ranks == cluster.processes:
            network += each
            link += each if cluster.gpus > 1 else 0
        else:
            link += each
    return link, network
