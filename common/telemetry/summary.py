"""Sums up the telemetry of a host: means, maxima, energy."""

from collections import defaultdict
from collections.abc import Iterable
from itertools import pairwise
from pathlib import Path
from typing import Any

from common.system.files import json_lines

HOST_NUMBERS = (
    "cpu_pct",
    "memory_gib",
    "net_sent_mib_s",
    "net_received_mib_s",
    "disk_read_mib_s",
    "disk_written_mib_s",
)
GPU_NUMBERS = ("utilisation_pct", "memory_gib", "power_w", "temperature_c", "sm_clock_mhz")


def summarize(file: Path) -> dict[str, Any]:
    """Sums up one telemetry-<host>.jsonl over all starts: means, but maxima of memory and temperature.

    A value that was never measured is None. energy_wh: over all GPUs and starts; None unless each of them
    reported energy or power. throttled_pct: share of a GPU's samples with a throttle reason; throttle: the
    reasons. ValueError for a file with lines that are no telemetry.
    """
    samples, gpus, starts = 0, 0, 0
    values: dict[str, list[float | None]] = defaultdict(list)
    reasons: set[str] = set()
    energies: dict[tuple[int, int], list[Any]] = defaultdict(list)  # by start and GPU
    try:
        for line in json_lines(file):
            if "host" in line:
                starts, gpus = starts + 1, len(line["devices"])
                continue
            samples += 1
            for name in HOST_NUMBERS:
                values[name].append(line[name])
            for gpu in line.get("gpus", []):
                for name in GPU_NUMBERS:
                    values[f"gpu_{name}"].append(gpu[name])
                values["throttled"].append(None if gpu["throttle"] is None else 100 * bool(gpu["throttle"]))
                reasons.update(gpu["throttle"] or ())
                energies[starts, gpu["index"]].append((line["t"], gpu["energy_wh"], gpu["power_w"]))
    except (KeyError, TypeError, AttributeError):
        raise ValueError(f"{file} has lines that are no telemetry") from None
    return {
        "host": file.stem.removeprefix("telemetry-"),
        "samples": samples,
        "gpus": gpus,
        "utilisation_pct": _mean(values["gpu_utilisation_pct"]),
        "gpu_memory_gib": max(_known(values["gpu_memory_gib"]), default=None),
        "power_w": _mean(values["gpu_power_w"]),
        "temperature_c": max(_known(values["gpu_temperature_c"]), default=None),
        "sm_clock_mhz": _mean(values["gpu_sm_clock_mhz"]),
        "throttled_pct": _mean(values["throttled"]),
        "throttle": sorted(reasons),
        "energy_wh": _total([*map(_energy_wh, energies.values())]),
        **{name: _mean(values[name]) for name in HOST_NUMBERS},
        "memory_gib": max(_known(values["memory_gib"]), default=None),
    }


def energy_wh(summaries: list[dict[str, Any]]) -> float | None:
    """The energy over all hosts; None without GPUs, or where those of a host did not report it."""
    return _total([host["energy_wh"] for host in summaries if host["gpus"]])


def _total(numbers: list[float | None]) -> float | None:
    """The sum; None for an empty list or one with a None."""
    known = _known(numbers)
    return sum(known) if known and len(known) == len(numbers) else None


def _known(values: Iterable[float | None]) -> list[float]:
    return [value for value in values if value is not None]


def _mean(values: list[float | None]) -> float | None:
    known = _known(values)
    return sum(known) / len(known) if known else None


def _energy_wh(measured: list[tuple[float, float | None, float | None]]) -> float | None:
    """The energy of one GPU in one start: by its counter, else as the integral of its power.

    measured: time, counted Wh, and power in W.
    """
    if counted := _known(wh for _, wh, _ in measured):
        return counted[-1]
    powers = [(t, w) for t, _, w in measured if w is not None]
    joules = sum((t - before) * (w + w_before) / 2 for (before, w_before), (t, w) in pairwise(powers))
    return joules / 3600 if powers else None
