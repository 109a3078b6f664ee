"""Time of an optimizer step from its trace: by data sheets, or by measured times of the computation.

By data sheets (`step_time`):
- A kernel takes the longer of its FLOPs at the device's peak and its bytes at the memory's bandwidth (the
  roofline of Williams, Waterman, Patterson 2009, doi 10.1145/1498765.1498785), each times a share that
  kernels reach. The host launches one kernel after another; the slower of host and device counts.
- What is exchanged during the backward pass hides behind it, two thirds of the computation.

Measured (`measured_step_time`): a step on one process under the engine, without an exchange, and
- under DDP each bucket is exchanged when its gradients are ready, behind the bucket before it; the optimizer
  waits for the last one (Li et al. 2020, arXiv 2006.15704, section 3.2.3);
- over gloo FSDP and ZeRO wait for each collective: on a CPU torch and DeepSpeed have no streams;
- over NCCL what they exchange hides behind the backward pass.
The optimizer's time is divided among the ranks that share its state.

A ring of n ranks sends, from each, 2 (n-1)/n of an all-reduce's bytes and (n-1)/n of an all-gather's or a
reduce-scatter's (Patarasuk, Yuan 2009, doi 10.1016/j.jpdc.2008.09.002). A collective takes the longest of its
bytes on the hosts' links, on the network, and, measured, the hosts' own work.

The estimates by data sheets are not measured on a GPU yet; their three constants are meant for an H200.
benchmarks/plan_time.py compares the measured ones with trainings on virtual hosts.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass

from common.planning.result import Collective, Collectives, Measured, Trace
from common.telemetry.flops import Device

REACHED_FLOPS = 0.66  # of the peak, by large products in half precision: 650 of 990 TFLOP/s
REACHED_BANDWIDTH = 0.9  # of the memory's: 4.3 of 4.8 TB/s
LAUNCH_S = 7e-6  # of a kernel, by the host, in PyTorch without compilation
HIDDEN = 2 / 3  # of the computation: the backward pass, beside which gradients are exchanged
CONTEXT_BYTES = int(0.5 * 2**30)  # CUDA's context and libraries, outside of torch's allocator
QUANTUM = 8  # sizes of forwards are its multiples
# Of an Ethernet frame: MTU 1500 less IPv4's 20 and TCP's 32 bytes (RFC 791, 9293, 7323), of 1514 with header
TCP_SHARE = 1448 / 1514
RING = {"all_reduce": 2.0}  # times (n-1)/n of the bytes are sent; of other collectives once
# Between two ranks, measured by `python -m benchmarks.plan_time --collectives`: gloo's reduce-scatter sends
# as much as an all-reduce. Its all-gather takes 1.5 times as long as its bytes: it sends a block in halves,
# and a rank's request for the other's second half waits behind what it sends itself.
GLOO_RING = {"all_reduce": 2.0, "reduce_scatter": 2.0}
GLOO_WAITS = {"all_gather": 1.5}
LARGE_PART = 0.1  # of the computation: an exchange that takes longer beside it is what limits
COMPUTE, MEMORY, LAUNCHES = "compute", "memory traffic", "launch overhead"
LINK, NETWORK, HOSTS = "link", "network", "exchange on the hosts"


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
    """Seconds of an optimizer step with all its accumulations, and what limits it."""

    seconds: float
    limit: str
    link_bytes: float  # sent by a device to devices of its host
    network_bytes: float  # sent by a host to others


def largest_size(peaks: dict[int, dict[str, int]], memory_bytes: float) -> int:
    """The largest images per forward that fit, by the line through the last two sizes traced.

    0 where not one quantum fits. Where memory does not grow between the two: 64 times the larger one.
    """
    (small, low), (large, high) = [(size, peak["Total"]) for size, peak in peaks.items()][-2:]
    free, each = memory_bytes - CONTEXT_BYTES - high, (high - low) / (large - small)
    more = free / each if each > 0 else 63 * large if free > 0 else -large
    return max(0, math.floor((large + more) / QUANTUM) * QUANTUM)


def step_time(trace: Trace, cluster: Cluster, least_launches: int = 0, accumulations: int = 1) -> StepTime:
    """By data sheets, with the trace's smallest size. least_launches: so many kernels at least a forward."""
    of_kernels = _kernel_times(trace, cluster.device)
    launching_s = max(least_launches, len(trace.operations)) * LAUNCH_S
    computing_s = accumulations * max(sum(of_kernels.values()), launching_s)
    link, network = traffic(trace, cluster, accumulations)
    # Half of a link's data sheet bandwidth: it counts both directions.
    times = {
        LINK: link / (cluster.device.link_gb_s / 2 * 1e9),
        NETWORK: network / (cluster.network_gb_s * 1e9),
    }
    exposed_s = max(0.0, max(times.values()) - HIDDEN * computing_s)
    if exposed_s > LARGE_PART * computing_s:
        limit = max(times, key=lambda name: times[name])
    elif launching_s > sum(of_kernels.values()):
        limit = LAUNCHES
    else:
        limit = max(of_kernels, key=lambda name: of_kernels[name])
    return StepTime(computing_s + exposed_s, limit, link, network)


def measured_step_time(
    trace: Trace,
    cluster: Cluster,
    measured: Measured,
    over_gloo: Collectives | None,
    shards: int = 1,
    accumulations: int = 1,
) -> StepTime:
    """By measured times of the micro-batch. over_gloo: the hosts' costs there; None: over NCCL.

    shards: ranks that share the optimizer's state.
    """
    passes_s = measured.forward_s + measured.backward_s
    optimizing_s = measured.optimizer_s / shards
    computing_s = accumulations * passes_s + optimizing_s
    taken = [_Exchange(*c, cluster, over_gloo) for c in exchanged(trace, accumulations)]
    if trace.strategy == "ddp":
        ends_s = passes_s
        free_s = 0.0  # when the network has sent the buckets so far
        for ready_s, moved in measured.buckets:
            bucket = _Exchange("all_reduce", moved, cluster.processes, cluster, over_gloo)
            free_s = max(ready_s, free_s) + bucket.seconds
            ends_s = max(ends_s, free_s)
        exposed_s = ends_s - passes_s
    elif over_gloo:
        exposed_s = sum(one.seconds for one in taken)
    else:
        exposed_s = max(0.0, sum(one.seconds for one in taken) - accumulations * measured.backward_s)
    limit = COMPUTE
    if exposed_s > LARGE_PART * computing_s:
        ways = {LINK: sum(one.link_s for one in taken), NETWORK: sum(one.network_s for one in taken)}
        ways[HOSTS] = sum(one.hosts_s for one in taken)
        limit = max(ways, key=lambda name: ways[name])
    link, network = sum(one.link for one in taken), sum(one.network for one in taken)
    return StepTime(computing_s + exposed_s, limit, link, network)


class _Exchange:
    """A collective on a cluster: the bytes sent each way, and seconds."""

    def __init__(self, kind: str, moved: int, ranks: int, cluster: Cluster, over_gloo: Collectives | None):
        costs = (over_gloo or {}).get(kind)
        factor = (GLOO_RING if over_gloo else RING).get(kind, 1.0)
        self.link, self.network = _ways(kind, factor * moved * (ranks - 1) / ranks, ranks, cluster)
        waits = GLOO_WAITS.get(kind, 1.0) / TCP_SHARE if over_gloo else 1.0
        self.network_s = self.network * waits / (cluster.network_gb_s * 1e9)
        self.link_s = self.link / (cluster.device.link_gb_s / 2 * 1e9)
        self.hosts_s = moved * costs.s_per_byte if costs and ranks > 1 else 0.0
        latency_s = costs.latency_s if costs and ranks > 1 else 0.0
        self.seconds = max(self.network_s, self.link_s, self.hosts_s, latency_s)


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
        more = _ways(kind, RING.get(kind, 1.0) * moved * (ranks - 1) / ranks, ranks, cluster)
        link, network = link + more[0], network + more[1]
    return link, network


def _ways(kind: str, sent: float, ranks: int, cluster: Cluster) -> tuple[float, float]:
    """What of a rank's bytes goes to devices of its host, and of its host's to others.

    A ring over all devices passes each host's network once. Groups of one device a host (hybrid sharding)
    share it.
    """
    if cluster.hosts > 1 and ranks == cluster.processes:
        return (sent if cluster.gpus > 1 else 0.0), sent
    if is_between_hosts(kind, ranks, cluster):
        return 0.0, sent * cluster.gpus
    return sent, 0.0


def is_between_hosts(kind: str, ranks: int, cluster: Cluster) -> bool:
    """True for a group of one device a host: hybrid sharding's all-reduce. It gathers inside of a host."""
    is_shard = kind != "all_reduce" and ranks == cluster.gpus
    return cluster.hosts > 1 and ranks == cluster.hosts != cluster.processes and not is_shard
