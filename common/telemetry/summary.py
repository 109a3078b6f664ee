"""Sums up the telemetry of a host: means, maxima, energy."""

from collections import defaultdict
from collections.abc import Iterable
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
    energies: dict[tuple[int, int], _Energy] = defaultdict(_Energy)  # by start and GPU
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
                energies[starts, gpu["index"]].add(line["t"], gpu)
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
        "energy_wh": _total([energy.wh() for energy in energies.values()]),
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


class _Energy:
    """The energy of one GPU in one start: by its counter, else as the integral of its power."""

    def __init__(self) -> None:
        self.counted_wh: float | None = None
        self.integral_wh: float | None = None
        self.before: tuple[float, float] | None = None  # time and power of the last sample

    def add(self, t: float, gpu: dict[str, Any]) -> None:
        if gpu["energy_wh"] is not None:
            self.counted_wh = gpu["energy_wh"]
        if gpu["power_w"] is not None:
            before_t, before_w = self.before or (t, gpu["power_w"])
            joules = (t - before_t) * (before_w + gpu["power_w"]) / 2
            self.integral_wh = (self.integral_wh or 0.0) + joules / 3600
            self.before = (t, gpu["power_w"])

    def wh(self) -> float | None:
        return self.integral_wh if self.counted_wh is None else self.counted_wh
