"""Sums up the telemetry of a host: means, maxima, energy."""

from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path
from typing import TypedDict

from onecurve.system.files import json_lines

HOST_NUMBERS = (
    "cpu_pct",
    "memory_gib",
    "net_sent_mib_s",
    "net_received_mib_s",
    "disk_read_mib_s",
    "disk_written_mib_s",
)
GPU_NUMBERS = ("utilisation_pct", "memory_gib", "power_w", "temperature_c", "sm_clock_mhz")


class HostSummary(TypedDict):
    """The telemetry of one host over all starts of a run, as in result.json."""

    host: str
    samples: int
    gpus: int
    utilisation_pct: float | None
    gpu_memory_gib: float | None
    power_w: float | None
    temperature_c: float | None
    sm_clock_mhz: float | None
    throttled_pct: float | None
    throttle: list[str]
    energy_wh: float | None
    cpu_pct: float | None
    memory_gib: float | None
    net_sent_mib_s: float | None
    net_received_mib_s: float | None
    disk_read_mib_s: float | None
    disk_written_mib_s: float | None


@dataclass
class Numbers:
    """The mean and the maximum of numbers that are not kept, as a run of weeks has many; None is none."""

    count: int = 0
    total: float = 0.0
    largest: float | None = None

    def add(self, value: float | None) -> None:
        if value is not None:
            self.count, self.total = self.count + 1, self.total + value
            self.largest = value if self.largest is None else max(self.largest, value)

    @property
    def mean(self) -> float | None:
        return self.total / self.count if self.count else None


@dataclass
class Energy:
    """The energy of one GPU in one start: by its counter, else as the integral of its power."""

    counted_wh: float | None = None
    joules: float = 0.0
    last: tuple[float, float] | None = None  # time in s, and power in W

    def add(self, t: float, counted_wh: float | None, power_w: float | None) -> None:
        self.counted_wh = self.counted_wh if counted_wh is None else counted_wh
        if power_w is not None:
            if self.last:
                self.joules += (t - self.last[0]) * (power_w + self.last[1]) / 2
            self.last = t, power_w

    @property
    def wh(self) -> float | None:
        return self.counted_wh if self.counted_wh is not None else self.last and self.joules / 3600


def summarize(file: Path) -> HostSummary:
    """Sums up one telemetry-<host>.jsonl over all starts: means, but maxima of memory and temperature.

    A value that was never measured is None. energy_wh: over all GPUs and starts; None unless each of them
    reported energy or power. throttled_pct: share of a GPU's samples with a throttle reason; throttle: the
    reasons. ValueError for a file with lines that are no telemetry.
    """
    samples, gpus, starts = 0, 0, 0
    values: dict[str, Numbers] = defaultdict(Numbers)
    reasons: set[str] = set()
    energies: dict[tuple[int, int], Energy] = defaultdict(Energy)  # by start and GPU
    try:
        for line in json_lines(file):
            if "host" in line:
                starts, gpus = starts + 1, len(line["devices"])
                continue
            samples += 1
            for name in HOST_NUMBERS:
                values[name].add(line[name])
            for gpu in line.get("gpus", []):
                for name in GPU_NUMBERS:
                    values[f"gpu_{name}"].add(gpu[name])
                values["throttled"].add(None if gpu["throttle"] is None else 100 * bool(gpu["throttle"]))
                reasons.update(gpu["throttle"] or ())
                energies[starts, gpu["index"]].add(line["t"], gpu["energy_wh"], gpu["power_w"])
    except (KeyError, TypeError, AttributeError):
        raise ValueError(f"{file} has lines that are no telemetry") from None
    return {
        "host": file.stem.removeprefix("telemetry-"),
        "samples": samples,
        "gpus": gpus,
        "utilisation_pct": values["gpu_utilisation_pct"].mean,
        "gpu_memory_gib": values["gpu_memory_gib"].largest,
        "power_w": values["gpu_power_w"].mean,
        "temperature_c": values["gpu_temperature_c"].largest,
        "sm_clock_mhz": values["gpu_sm_clock_mhz"].mean,
        "throttled_pct": values["throttled"].mean,
        "throttle": sorted(reasons),
        "energy_wh": _total([energy.wh for energy in energies.values()]),
        "cpu_pct": values["cpu_pct"].mean,
        "net_sent_mib_s": values["net_sent_mib_s"].mean,
        "net_received_mib_s": values["net_received_mib_s"].mean,
        "disk_read_mib_s": values["disk_read_mib_s"].mean,
        "disk_written_mib_s": values["disk_written_mib_s"].mean,
        "memory_gib": values["memory_gib"].largest,
    }


def energy_wh(summaries: list[HostSummary]) -> float | None:
    """The energy over all hosts; None without GPUs, or where those of a host did not report it."""
    return _total([host["energy_wh"] for host in summaries if host["gpus"]])


def _total(numbers: list[float | None]) -> float | None:
    """The sum; None for an empty list or one with a None."""
    known = [number for number in numbers if number is not None]
    return sum(known) if known and len(known) == len(numbers) else None
