"""Estimate the duration of an optimizer step from a trace and from data sheets.

- The duration of a kernel is limited by the device's peak rate for FLOPs or by the memory bandwidth,
  according to the roofline model (Williams, Waterman, Patterson 2009, doi 10.1145/1498765.1498785). The
  estimate reduces both limits to the fraction that large matrix products and copies reach. All kernels
  together reach a fraction of the reduced limits (Execution). The host launches one kernel after another, and
  the slower of host and device determines the step duration.
- Communication overlaps with the backward pass, which is two thirds of the computation. In a ring of n ranks,
  each rank sends 2 (n-1)/n of an all-reduce's bytes, and (n-1)/n of an all-gather's or reduce-scatter's bytes
  (Patarasuk, Yuan 2009, doi 10.1016/j.jpdc.2008.09.002).

The constants of Execution were measured on a single device, an H200 in a host with 16 cores (2026-11-26,
commit f763543). docs/performance.md compares planned durations with durations that were measured on this
device. Communication has not been measured on GPUs yet.
"""

import json
import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

from onecurve.telemetry.flops import Device

REACHED_FLOPS = 0.66  # fraction of peak FLOP/s in large bf16 matmuls; measured: 675 to 740 of 990 TFLOP/s
REACHED_BANDWIDTH = 0.9  # fraction of the memory bandwidth in copies; measured: 4.2 of 4.8 TB/s
BACKWARD_SHARE = 2 / 3  # fraction of the computation in the backward pass, which overlaps with communication
CONTEXT_BYTES = int(0.5 * 2**30)  # memory outside torch's allocator, for the CUDA context and libraries
QUANTUM = 8  # the number of images per forward pass is a multiple of this number
RING_FACTORS = {"all_reduce": 2.0}  # bytes sent as a multiple of (n-1)/n; 1 for all other collectives
LARGE_EXPOSED_SHARE = 0.1  # fraction of the computation above which exposed communication limits the speed
COMPUTE, MEMORY, LAUNCHES = "compute", "memory traffic", "launch overhead"
LINK, NETWORK = "link", "network"

Kernel = tuple[str, int, int]  # output dtype, number of FLOPs, number of bytes read and written
Collective = tuple[str, int, int]  # name, number of bytes, number of ranks


@dataclass
class Trace:
    """Trace of an optimizer step in one process. All memory sizes are in bytes."""

    strategy: str
    mixed_precision: str
    peaks: dict[int, dict[str, int]]  # bytes at the peak by category and `Total`, by number of images
    parameters: int  # bytes of parameters that this process keeps between steps
    optimizer: int  # bytes of ZeRO's master weights, the optimizer state and the averaged weights
    operations: list[Kernel]
    collectives: list[Collective]
    gradients: int = 0  # bytes of all gradients after the backward pass, or 0 under ZeRO, which uses buckets

    @classmethod
    def from_json(cls, text: str) -> "Trace":
        fields = json.loads(text)
        fields["peaks"] = {int(size): peak for size, peak in fields["peaks"].items()}
        return cls(**fields)


@dataclass(frozen=True)
class Cluster:
    """Cluster of hosts with the same number of identical devices."""

    hosts: int
    gpus: int  # number of devices per host
    device: Device
    network_gb_s: float  # bandwidth of a host in one direction, in 10^9 bytes/s

    @property
    def processes(self) -> int:
        return self.hosts * self.gpus


@dataclass(frozen=True)
class Execution:
    """Measured constants for an execution mode of steps, for example compiled or as a CUDA graph."""

    reached: float  # fraction of the roofline limits that all kernels together reach
    forward_s: float  # host time of a forward and backward pass, not including operation_s
    operation_s: float  # host time per traced operation, even if compilation fuses operations

    @classmethod
    def of(cls, compilation: str | None, is_graph: bool) -> "Execution":
        """Return the constants for a --compile value, with or without a CUDA graph."""
        execution = cls(0.65, 2e-3, 16e-6) if compilation in (None, "no") else cls(0.82, 2e-3, 18e-6)
        return replace(execution, forward_s=1.1e-3, operation_s=0.0) if is_graph else execution


def largest_size(peaks: dict[int, dict[str, int]], memory_bytes: float) -> int:
    """Estimate how many images per forward pass fit into memory, from the last two traced sizes.

    The result is 0 if QUANTUM images do not fit, and 64 times the larger size if memory does not grow with
    the size.
    """
    totals = [(size, peak["Total"]) for size, peak in peaks.items()]
    (smaller, smaller_bytes), (larger, larger_bytes) = totals[-2:]
    free_bytes = memory_bytes - CONTEXT_BYTES - larger_bytes
    image_bytes = (larger_bytes - smaller_bytes) / (larger - smaller)
    if image_bytes > 0:
        more_images = free_bytes / image_bytes
    elif free_bytes > 0:
        more_images = 63 * larger
    else:
        more_images = -larger
    return max(0, math.floor((larger + more_images) / QUANTUM) * QUANTUM)


def step_time(
    trace: Trace, cluster: Cluster, execution: Execution, least_launches: int = 0, accumulations: int = 1
) -> tuple[float, str]:
    """Return an optimizer step's duration in seconds, and the name of the bottleneck.

    Args:
        trace: Trace of an optimizer step with one micro-batch.
        cluster: Cluster that runs the step.
        execution: Constants for the step's execution mode.
        least_launches: Minimum number of operations per forward pass.
        accumulations: Number of micro-batches per optimizer step.
    """
    kernel_times = _kernel_times(trace, cluster.device)
    kernels_s = sum(kernel_times.values()) / execution.reached
    host_s = execution.forward_s + max(least_launches, len(trace.operations)) * execution.operation_s
    computing_s = accumulations * max(kernels_s, host_s)
    limit = LAUNCHES if host_s > kernels_s else max(kernel_times, key=lambda name: kernel_times[name])
    link, network = traffic(trace, cluster, accumulations)
    # Divide the link bandwidth by 2, because data sheets state the sum for both directions.
    times = {
        LINK: link / (cluster.device.link_gb_s / 2 * 1e9),
        NETWORK: network / (cluster.network_gb_s * 1e9),
    }
    exposed_s = max(0.0, max(times.values()) - BACKWARD_SHARE * computing_s)
    if exposed_s > LARGE_EXPOSED_SHARE * computing_s:
        limit = max(times, key=lambda name: times[name])
    return computing_s + exposed_s, limit


def collectives_of_step(trace: Trace, accumulations: int = 1) -> Iterator[Collective]:
    """Yield all collectives in an optimizer step.

    Collectives that run once per step follow the last micro-batch: DDP and ZeRO-1 reduce gradients, FSDP
    scatters gradients, and ZeRO-2 gathers weights. All other collectives run for each micro-batch.
    """
    for collective in trace.collectives:
        name = collective[0]
        once = {"fsdp": name != "all_gather", "zero2": name == "all_gather"}
        is_once = once.get(trace.strategy, trace.strategy in ("ddp", "zero1"))
        yield from [collective] * (1 if is_once else accumulations)


def _kernel_times(trace: Trace, device: Device) -> dict[str, float]:
    """Return the total seconds of the compute-bound kernels and of the memory-bound kernels."""
    peaks = {"bfloat16": device.peaks.get("bf16"), "float16": device.peaks.get("fp16")}
    fp32_peak = device.peaks.get("tf32", device.peaks["fp32"])
    times = {COMPUTE: 0.0, MEMORY: 0.0}
    for dtype, flops, moved in trace.operations:
        computing_s = flops / ((peaks.get(dtype) or fp32_peak) * 1e12 * REACHED_FLOPS)
        moving_s = moved / (device.memory_gb_s * 1e9 * REACHED_BANDWIDTH)
        times[COMPUTE if computing_s > moving_s else MEMORY] += max(computing_s, moving_s)
    return times


def traffic(trace: Trace, cluster: Cluster, accumulations: int = 1) -> tuple[float, float]:
    """Return the bytes per step that a device sends within a host, and that a host sends to other hosts."""
    link = network = 0.0
    for name, moved, ranks in collectives_of_step(trace, accumulations):
        sent = RING_FACTORS.get(name, 1.0) * moved * (ranks - 1) / ranks
        if cluster.hosts > 1 and ranks == cluster.processes:
            # A ring over all devices crosses each host's network once.
            link, network = link + (sent if cluster.gpus > 1 else 0.0), network + sent
        elif cluster.hosts > 1 and ranks == cluster.hosts and (name == "all_reduce" or ranks != cluster.gpus):
            # Hybrid sharding all-reduces between hosts, and gathers and scatters within each host.
            network += sent * cluster.gpus
        else:
            link += sent
    return link, network
