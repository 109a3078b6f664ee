"""Where the time of a training step goes, by a trace of torch.profiler.

The main thread is always in one part of a step: it waits for data, computes forward, backward or the
optimizer, or does something else ("host"). On a GPU the time is the device's: a kernel belongs to the part in
which it was launched, and while none runs the device waits, for data or for the host. Communication is the
time in which a collective runs and nothing is computed; what the computation hides is counted apart.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

FOLDER, TRACE, SUMMARY = "profile", "trace.json.gz", "summary.json"  # in the run's folder, and in it
STEP, PART = "profiled step ", "part: "  # how the names of our ranges begin
PARTS = ("data", "forward", "backward", "optimizer")  # that have a range; "host" is the rest
COLLECTIVES = ("gloo:", "nccl", "oneccl")
ON_DEVICE = ("kernel", "gpu_memcpy", "gpu_memset")


class Span(NamedTuple):
    start: float  # microseconds of the trace's clock
    end: float


@dataclass(frozen=True)
class StepTime:
    """Means of the profiled steps. parts_s: of PARTS, `communication` and `host`, which add up to step_s.
    hidden_s: communication behind the computation."""

    step_s: float
    parts_s: dict[str, float]
    hidden_s: float


def step_time(events: list[dict[str, Any]]) -> StepTime:
    """Divides the time of the profiled steps. events: `traceEvents` of a Chrome trace.

    ValueError for a trace without a profiled step.
    """
    events = [event for event in events if event.get("ph") == "X" and "dur" in event]
    ours = [event for event in events if event.get("cat") == "user_annotation"]
    steps = sorted(_span(event) for event in ours if event["name"].startswith(STEP))
    if not steps:
        raise ValueError("the trace has no profiled step")
    parts = {name: [_span(event) for event in ours if event["name"] == PART + name] for name in PARTS}
    kernels = [event for event in events if event.get("cat") in ON_DEVICE]
    collectives = [_span(event) for event in kernels or events if event["name"].startswith(COLLECTIVES)]
    if kernels:
        steps[-1] = Span(steps[-1].start, max(steps[-1].end, *(_span(kernel).end for kernel in kernels)))
        work = _by_part(kernels, parts, events)
        computing = [span for spans in work.values() for span in spans]
    else:
        computing = [_span(event) for event in events if event.get("cat") == "cpu_op" and _computes(event)]
        work = parts
    time = _Time([*steps, *collectives, *computing, *(span for spans in parts.values() for span in spans)])
    in_step, communicates, computes = map(time.covered, (steps, collectives, computing))
    claims = [("communication", communicates & ~computes)]
    claims += [(name, time.covered(spans)) for name, spans in work.items()]
    claims += [("data", time.covered(parts["data"]))]
    found, left = dict.fromkeys((*PARTS, "communication", "host"), 0.0), in_step
    for name, claimed in claims:  # the first claim counts
        found[name] += time.seconds(left & claimed)
        left = left & ~claimed
    found["host"] += time.seconds(left)
    count = len(steps)
    return StepTime(
        time.seconds(in_step) / count,
        {name: seconds / count for name, seconds in found.items()},
        time.seconds(in_step & communicates & computes) / count,
    )


def _by_part(
    kernels: list[dict[str, Any]], parts: dict[str, list[Span]], events: list[dict[str, Any]]
) -> dict[str, list[Span]]:
    """The kernels but the collectives by the part of the step that launched them; "host" for none."""
    launched = {
        event["args"]["correlation"]: event["ts"]
        for event in events
        if event.get("cat") in ("cuda_runtime", "cuda_driver") and "correlation" in event.get("args", {})
    }
    ranges = sorted((span, name) for name, spans in parts.items() for span in spans)
    starts = [span.start for span, _ in ranges]
    found: dict[str, list[Span]] = {name: [] for name in (*PARTS, "host")}
    for kernel in kernels:
        if kernel["name"].startswith(COLLECTIVES):
            continue
        at = launched.get(kernel.get("args", {}).get("correlation"), kernel["ts"])
        k = int(np.searchsorted(starts, at, side="right")) - 1
        inside = k >= 0 and at <= ranges[k][0].end
        found[ranges[k][1] if inside else "host"].append(_span(kernel))
    return found


def _computes(event: dict[str, Any]) -> bool:
    """False for an operator that may only wait for others: a collective, or autograd's wrapper of a hook."""
    return event["name"].startswith("aten::") or "fused" in event["name"]


def _span(event: dict[str, Any]) -> Span:
    return Span(event["ts"], event["ts"] + event["dur"])


class _Time:
    """The time between the first and the last bound of some spans, cut at every bound."""

    def __init__(self, spans: Iterable[Span]):
        self.bounds = np.unique([bound for span in spans for bound in span])  # microseconds
        self.lengths = np.diff(self.bounds)

    def covered(self, spans: list[Span]) -> np.ndarray:
        """True for each piece that lies in one of the spans: bool [bounds - 1]."""
        change = np.zeros(len(self.bounds), np.int64)
        for bound, by in ((0, 1), (1, -1)):
            np.add.at(change, np.searchsorted(self.bounds, [span[bound] for span in spans]), by)
        return np.cumsum(change)[:-1] > 0

    def seconds(self, pieces: np.ndarray) -> float:
        return float(self.lengths[pieces].sum()) / 1e6
