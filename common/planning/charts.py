"""The curves of plan.py's charts: cost against time, and the efficiency of more devices.

Nothing is traced or measured again: the formulas of common/planning/cost.py are evaluated for other numbers
of hosts, with the traces of the planned one. The bytes of a collective's tensor do not depend on the number
of ranks, under DDP, FSDP and ZeRO. With fewer images per forward kernels are taken to be shorter in
proportion; the number of launches and the optimizer's step stay.
"""

from collections.abc import Sequence
from dataclasses import replace

from common.planning.cost import Cluster, is_between_hosts
from common.planning.lines import best_of
from common.planning.planning import Found, Planning
from common.planning.result import Collective, Measured

MOST_DEVICES = 1024
NETWORKS = {"10 Gb/s": 1.25, "100 Gb/s": 12.5, "400 Gb/s": 50.0}  # of a host: 10^9 bytes a second
Curve = tuple[Sequence[float], Sequence[float]]


def costs(plan: Planning, found: Sequence[Found]) -> tuple[dict[str, Curve], Curve, str]:
    """Hours and price of each strategy on 1, 2, 4, ... hosts, the Pareto line, and the price's unit.

    The batch stays: more devices take fewer images each, fewer devices accumulate. Without a price it is the
    hours of all devices together. Sorted by time.
    """
    per_host = plan.prices.per_hour and plan.prices.per_hour / plan.cluster.hosts
    curves: dict[str, Curve] = {}
    for one in found:
        points = []
        for hosts in _powers(MOST_DEVICES // plan.cluster.gpus):
            hours = _hours(plan, one, hosts)
            if hours is not None:
                points.append((hours, hours * hosts * (per_host or plan.cluster.gpus)))
        if points:
            curves[one.strategy] = _curve(points)
    pareto = pareto_line([point for curve in curves.values() for point in zip(*curve, strict=True)])
    return curves, _curve(pareto), "price" if per_host else "device hours"


def pareto_line(points: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """The points that no other one beats in time and in cost."""
    line: list[tuple[float, float]] = []
    for time, cost in sorted(points):
        if not line or cost < line[-1][1]:
            line.append((time, cost))
    return line


def scaling(plan: Planning, found: Sequence[Found]) -> tuple[str, dict[str, Curve]]:
    """The best strategy but for hybrid sharding, and its efficiency on 1 to 1,024 devices, by network.

    Each device keeps its images per forward, so that the batch grows. Efficiency is a device's images/s, as a
    share of those of one that is alone.
    """
    lines = {one.strategy: plan.line(one) for one in found}
    best, _ = best_of([line for name, line in lines.items() if name != "hybrid"], plan.cluster.processes)
    one = next(one for one in found if best and one.strategy == best.strategy)
    curves = {}
    for network, gb_s in NETWORKS.items():
        points = []
        for devices in _powers(MOST_DEVICES):
            gpus = min(devices, plan.cluster.gpus)
            if devices % gpus == 0:
                cluster = replace(plan.cluster, hosts=devices // gpus, gpus=gpus, network_gb_s=gb_s)
                points.append((float(devices), _step_s(plan, one, cluster, one.share, 1)))
        curves[network] = _curve([(devices, points[0][1] / step_s) for devices, step_s in points])
    return one.strategy, curves


def _hours(plan: Planning, found: Found, hosts: int) -> float | None:
    """To the recipe's end on so many hosts; None where the batch does not divide, or it is not known."""
    cluster = replace(plan.cluster, hosts=hosts)
    alone, batch = found.strategy in ("single", "offload"), plan.recipe.batch_size
    if alone or (found.strategy == "hybrid" and hosts == 1) or not found.share:
        return None
    if batch % cluster.processes:
        return None
    share = min(found.share, batch // cluster.processes)
    if batch % (share * cluster.processes):
        return None
    accumulations = batch // (share * cluster.processes)
    return plan.hours(_step_s(plan, found, cluster, share, accumulations))


def _step_s(plan: Planning, found: Found, cluster: Cluster, share: int, accumulations: int) -> float:
    part = share / found.share
    trace = replace(
        found.trace,
        operations=[
            (kind, int(part * flops), int(part * moved)) for kind, flops, moved in found.trace.operations
        ],
        collectives=[_moved_to(cluster, plan.cluster, one) for one in found.trace.collectives],
    )
    measured = found.measured and _shorter(found.measured, part)
    there = replace(found, trace=trace, share=share, measured=measured)
    return plan.step(there, cluster, accumulations).seconds


def _moved_to(cluster: Cluster, planned: Cluster, collective: Collective) -> Collective:
    """With its group on another cluster: all, or hybrid sharding's hosts, or its devices of a host."""
    kind, moved, ranks = collective
    if ranks == planned.processes:
        return kind, moved, cluster.processes
    return kind, moved, cluster.hosts if is_between_hosts(kind, ranks, planned) else cluster.gpus


def _shorter(measured: Measured, part: float) -> Measured:
    return replace(
        measured,
        forward_s=part * measured.forward_s,
        backward_s=part * measured.backward_s,
        buckets=[(part * ready_s, moved) for ready_s, moved in measured.buckets],
    )


def _powers(most: int) -> list[int]:
    return [2**n for n in range(most.bit_length()) if 2**n <= most]


def _curve(points: Sequence[tuple[float, float]]) -> Curve:
    ordered = sorted(points)
    return [x for x, _ in ordered], [y for _, y in ordered]
