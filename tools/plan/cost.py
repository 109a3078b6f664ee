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
from dataclasses import dataclass

from onecurve.telemetry.flops import DeviceSpecs

REACHED_FLOPS = 0.66  # fraction of peak FLOP/s in large bf16 matmuls; measured: 675 to 740 of 990 TFLOP/s
REACHED_BANDWIDTH = 0.9  # fraction of the memory bandwidth in copies; measured: 4.2 of 4.8 TB/s
BACKWARD_SHARE = 2 / 3  # fraction of the computation in the backward pass, which overlaps with communication
CONTEXT_BYTES = int(0.5 * 2**30)  # memory outside torch's allocator, for the CUDA context and libraries
IMAGE_QUANTUM = 8  # the number of images per forward pass is a multiple of this number
RING_FACTORS = {"all_reduce": 2.0}  # bytes sent as a multiple of (n-1)/n; 1 for all other collectives
LARGE_EXPOSED_SHARE = 0.1  # fraction of the computation above which exposed communication limits the speed
COMPUTE, MEMORY, LAUNCHES = "compute", "memory traffic", "launch overhead"  # bottlenecks of computation
LINK, NETWORK = "link", "network"  # bottlenecks of communication

Kernel = tuple[str, int, int]  # output dtype, number of FLOPs, number of bytes read and written
Collective = tuple[str, int, int]  # name, number of bytes, number of ranks


@dataclass
class Trace:
    """Trace of an optimizer step in one process. All memory sizes are in bytes."""

    strategy: str
    mixed_precision: str
    peak_bytes: dict[int, dict[str, int]]  # by number of images, then by category and `Total`
    parameter_bytes: int  # parameters that this process keeps between steps
    optimizer_bytes: int  # ZeRO's master weights, the optimizer state and the averaged weights
    operations: list[Kernel]
    collectives: list[Collective]
    gradient_bytes: int = 0  # all gradients after the backward pass, or 0 under ZeRO, which uses buckets

    @classmethod
    def from_json(cls, json_text: str) -> "Trace":
        """Return the trace that `tools/plan/trace.py` printed as JSON."""
        trace_fields = json.loads(json_text)
        peak_bytes = trace_fields["peak_bytes"]  # JSON turned the image counts into strings
        trace_fields["peak_bytes"] = {int(count): categories for count, categories in peak_bytes.items()}
        return cls(**trace_fields)


@dataclass(frozen=True)
class Cluster:
    """Cluster of hosts with the same number of identical devices."""

    host_count: int
    gpus_per_host: int
    device: DeviceSpecs
    network_gb_s: float  # bandwidth of a host in one direction, in 10^9 bytes/s

    @property
    def process_count(self) -> int:
        return self.host_count * self.gpus_per_host


@dataclass(frozen=True)
class Execution:
    """Measured constants for an execution mode of steps, for example compiled or as a CUDA graph."""

    reached_share: float  # fraction of the roofline limits that all kernels together reach
    pass_host_s: float  # host time of a forward and backward pass, not including operation_host_s
    operation_host_s: float  # host time per traced operation, even if compilation fuses operations

    @classmethod
    def of(cls, compilation: str | None, uses_cuda_graph: bool) -> "Execution":
        """Return the constants for a --compile value, with or without a CUDA graph.

        All constants were measured on one H200.
        """
        is_eager = compilation in (None, "no")
        reached_share, operation_host_s = (0.65, 16e-6) if is_eager else (0.82, 18e-6)
        if uses_cuda_graph:
            return cls(reached_share, pass_host_s=1.1e-3, operation_host_s=0.0)
        return cls(reached_share, pass_host_s=2e-3, operation_host_s=operation_host_s)


def estimate_largest_size(peak_bytes: dict[int, dict[str, int]], memory_bytes: float) -> int:
    """Estimate how many images per forward pass fit into memory, from the last two traced image counts.

    Args:
        peak_bytes: Peak memory by image count, then by category and `Total`, in the order of tracing.
        memory_bytes: Size of a device's memory.

    Returns:
        A multiple of IMAGE_QUANTUM. The result is 0 if IMAGE_QUANTUM images do not fit, and 64 times the
        larger image count if the peak does not grow with the image count.
    """
    (smaller_count, smaller_peak), (larger_count, larger_peak) = list(peak_bytes.items())[-2:]
    free_bytes = memory_bytes - CONTEXT_BYTES - larger_peak["Total"]
    bytes_per_image = (larger_peak["Total"] - smaller_peak["Total"]) / (larger_count - smaller_count)
    if bytes_per_image > 0:
        additional_images = free_bytes / bytes_per_image
    elif free_bytes > 0:  # the peak gives no upper limit, so stop at 64 times the larger count
        additional_images = 63 * larger_count
    else:  # not even one image fits
        additional_images = -larger_count
    return max(0, math.floor((larger_count + additional_images) / IMAGE_QUANTUM) * IMAGE_QUANTUM)


def step_time(
    trace: Trace, cluster: Cluster, execution: Execution, min_launches: int = 0, accumulations: int = 1
) -> tuple[float, str]:
    """Return an optimizer step's duration in seconds, and the name of the bottleneck.

    Args:
        trace: Trace of an optimizer step with one micro-batch.
        cluster: Cluster that runs the step.
        execution: Constants for the step's execution mode.
        min_launches: Minimum number of operations per forward pass.
        accumulations: Number of micro-batches per optimizer step.
    """
    kernel_seconds = _kernel_seconds(trace, cluster.device)
    device_s = sum(kernel_seconds.values()) / execution.reached_share
    host_s = execution.pass_host_s + max(min_launches, len(trace.operations)) * execution.operation_host_s
    computation_s = accumulations * max(device_s, host_s)
    bottleneck = LAUNCHES if host_s > device_s else max(kernel_seconds, key=kernel_seconds.__getitem__)
    link_bytes, network_bytes = sent_bytes(trace, cluster, accumulations)
    # Divide the link bandwidth by 2, because data sheets state the sum for both directions.
    transfer_seconds = {
        LINK: link_bytes / (cluster.device.link_gb_s / 2 * 1e9),
        NETWORK: network_bytes / (cluster.network_gb_s * 1e9),
    }
    exposed_transfer_s = max(0.0, max(transfer_seconds.values()) - BACKWARD_SHARE * computation_s)
    if exposed_transfer_s > LARGE_EXPOSED_SHARE * computation_s:
        bottleneck = max(transfer_seconds, key=transfer_seconds.__getitem__)
    return computation_s + exposed_transfer_s, bottleneck


def collectives_of_step(trace: Trace, accumulations: int = 1) -> Iterator[Collective]:
    """Yield all collectives in an optimizer step.

    Collectives that run once per step follow the last micro-batch: DDP and ZeRO-1 reduce gradients, FSDP
    scatters gradients, and ZeRO-2 gathers weights. All other collectives run for each micro-batch.
    """
    for collective in trace.collectives:
        collective_name, *_ = collective
        if trace.strategy == "fsdp":
            runs_once_per_step = collective_name != "all_gather"
        elif trace.strategy == "zero2":
            runs_once_per_step = collective_name == "all_gather"
        else:
            runs_once_per_step = trace.strategy in ("ddp", "zero1")
        yield from [collective] * (1 if runs_once_per_step else accumulations)


def _kernel_seconds(trace: Trace, device: DeviceSpecs) -> dict[str, float]:
    """Return the total seconds of the compute-bound kernels and of the memory-bound kernels."""
    peak_tflops_by_dtype = {"bfloat16": device.peaks.get("bf16"), "float16": device.peaks.get("fp16")}
    fp32_peak_tflops = device.peaks.get("tf32", device.peaks["fp32"])
    seconds_by_bottleneck = {COMPUTE: 0.0, MEMORY: 0.0}
    for kernel_dtype, kernel_flops, kernel_bytes in trace.operations:
        peak_tflops = peak_tflops_by_dtype.get(kernel_dtype) or fp32_peak_tflops
        compute_s = kernel_flops / (peak_tflops * 1e12 * REACHED_FLOPS)
        memory_s = kernel_bytes / (device.memory_gb_s * 1e9 * REACHED_BANDWIDTH)
        seconds_by_bottleneck[COMPUTE if compute_s > memory_s else MEMORY] += max(compute_s, memory_s)
    return seconds_by_bottleneck


def sent_bytes(trace: Trace, cluster: Cluster, accumulations: int = 1) -> tuple[float, float]:
    """Return the bytes per step that a device sends within a host, and that a host sends to other hosts.

    A collective's rank count shows whether its group consists of all devices, of one host's devices, or of
    one device from each host.
    """
    link_bytes = network_bytes = 0.0
    for collective_name, collective_bytes, rank_count in collectives_of_step(trace, accumulations):
        ring_bytes = RING_FACTORS.get(collective_name, 1.0) * collective_bytes * (rank_count - 1) / rank_count
        is_between_hosts = rank_count == cluster.host_count  # a group with one rank from each host
        if rank_count == cluster.gpus_per_host:
            # The count fits both kinds of group. Hybrid sharding all-reduces between hosts, and gathers and
            # scatters within each host.
            is_between_hosts &= collective_name == "all_reduce"
        if cluster.host_count > 1 and rank_count == cluster.process_count:
            # A ring over all devices crosses each host's network once.
            network_bytes += ring_bytes
            link_bytes += ring_bytes if cluster.gpus_per_host > 1 else 0.0
        elif cluster.host_count > 1 and is_between_hosts:
            # Each device of a host belongs to a different group.
            network_bytes += ring_bytes * cluster.gpus_per_host
        else:
            link_bytes += ring_bytes
    return link_bytes, network_bytes
