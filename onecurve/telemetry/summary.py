"""Summarizes a host's telemetry: means, maxima and energy."""

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
    """Telemetry of one host over all starts of a run, as stored in result.json."""

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
    """Mean and maximum of a stream of numbers. The numbers are not stored, and None is ignored."""

    count: int = 0
    total: float = 0.0
    largest: float | None = None

    def add(self, value: float | None) -> None:
        """Add a number. None is ignored."""
        if value is not None:
            self.count, self.total = self.count + 1, self.total + value
            self.largest = value if self.largest is None else max(self.largest, value)

    @property
    def mean(self) -> float | None:
        """Mean of the numbers, or None without numbers."""
        return self.total / self.count if self.count else None


@dataclass
class Energy:
    """Energy of one GPU in one start, from the GPU's counter or else from the integral of its power."""

    counted_wh: float | None = None
    joules: float = 0.0
    last: tuple[float, float] | None = None  # time in s and power in W

    def add(self, t: float, counted_wh: float | None, power_w: float | None) -> None:
        self.counted_wh = self.counted_wh if counted_wh is None else counted_wh
        if power_w is not None:
            if self.last:
                self.joules += (t - self.last[0]) * (power_w + self.last[1]) / 2
            self.last = t, power_w

    @property
    def wh(self) -> float | None:
        """Energy in Wh, or None if the energy is unknown."""
        return self.counted_wh if self.counted_wh is not None else self.last and self.joules / 3600


def summarize(file: Path) -> HostSummary:
    """Summarize one telemetry-<host>.jsonl over all starts of a run.

    Values are means, except for GPU memory, GPU temperature and host memory, for which the maximum is
    returned. Values that were never measured are None.

    Returns:
        The summary. `energy_wh` is the sum over all GPUs and starts. It is None unless every GPU reported
        energy or power in every start. `throttled_pct` is the percentage of GPU samples with a throttle
        reason. `throttle` lists the reasons.

    Raises:
        ValueError: The file contains lines that are not telemetry.
    """
    samples, gpus, starts = 0, 0, 0
    values: dict[str, Numbers] = defaultdict(Numbers)
    reasons: set[str] = set()
    energies: dict[tuple[int, int], Energy] = defaultdict(Energy)  # energy by start and GPU
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
        raise ValueError(f"{file} has lines that are not telemetry") from None
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
    """Return the energy over all hosts, or None if there are no GPUs or a host did not report energy."""
    return _total([host["energy_wh"] for host in summaries if host["gpus"]])


def _total(numbers: list[float | None]) -> float | None:
    """Return the sum, or None if the list is empty or contains None."""
    measured = [number for number in numbers if number is not None]
    return sum(measured) if measured and len(measured) == len(numbers) else None
