"""Summarizes a host's telemetry with means, maxima and energy."""

from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path
from typing import TypedDict

from onecurve.system.files import json_lines

HOST_MEASUREMENTS = (
    "cpu_pct",
    "memory_gib",
    "net_sent_mib_s",
    "net_received_mib_s",
    "disk_read_mib_s",
    "disk_written_mib_s",
)
GPU_MEASUREMENTS = ("utilisation_pct", "memory_gib", "power_w", "temperature_c", "sm_clock_mhz")


class HostSummary(TypedDict):
    """Summary of one host's telemetry over all starts of a run. result.json contains these summaries."""

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
class MeasurementTotals:
    """Mean and maximum of a stream of numbers. The stream is not stored."""

    count: int = 0
    total: float = 0.0
    largest: float | None = None

    def add(self, value: float | None) -> None:
        """Add a number to the stream, or ignore None."""
        if value is not None:
            self.count, self.total = self.count + 1, self.total + value
            self.largest = value if self.largest is None else max(self.largest, value)

    @property
    def mean(self) -> float | None:
        """Mean of the numbers, or None if no number was added."""
        return self.total / self.count if self.count else None


@dataclass
class GpuEnergy:
    """Energy used by one GPU in one start. Without a counter on the GPU, the power is integrated."""

    counted_wh: float | None = None
    joules: float = 0.0
    last_sample: tuple[float, float] | None = None  # (time in s, power in W)

    def add(self, time_s: float, counted_wh: float | None, power_w: float | None) -> None:
        self.counted_wh = self.counted_wh if counted_wh is None else counted_wh
        if power_w is not None:
            if self.last_sample:
                self.joules += (time_s - self.last_sample[0]) * (power_w + self.last_sample[1]) / 2
            self.last_sample = time_s, power_w

    @property
    def wh(self) -> float | None:
        """Energy in Wh, or None if the energy is unknown."""
        return self.counted_wh if self.counted_wh is not None else self.last_sample and self.joules / 3600


def summarize(file: Path) -> HostSummary:
    """Summarize one telemetry-<host>.jsonl over all starts of a run.

    Returns:
        The summary contains maxima of GPU memory, GPU temperature and host memory, and means of all other
        measurements. A quantity that was never measured is None. `energy_wh` is the sum over all GPUs and
        starts, or None if a GPU reported neither energy nor power in a start. `throttled_pct` is the
        percentage of GPU samples with a throttle reason. `throttle` lists the throttle reasons.

    Raises:
        ValueError: If the file contains lines that are not telemetry.
    """
    sample_count, gpu_count, start_count = 0, 0, 0
    measurements: dict[str, MeasurementTotals] = defaultdict(MeasurementTotals)
    reasons: set[str] = set()
    energies: dict[tuple[int, int], GpuEnergy] = defaultdict(GpuEnergy)  # {(start, GPU index): energy}
    try:
        for entry in json_lines(file):
            if "host" in entry:
                start_count, gpu_count = start_count + 1, len(entry["devices"])
                continue
            sample_count += 1
            for name in HOST_MEASUREMENTS:
                measurements[name].add(entry[name])
            for gpu in entry.get("gpus", []):
                for name in GPU_MEASUREMENTS:
                    measurements[f"gpu_{name}"].add(gpu[name])
                throttled_pct = None if gpu["throttle"] is None else 100 * bool(gpu["throttle"])
                measurements["throttled"].add(throttled_pct)
                reasons.update(gpu["throttle"] or ())
                energies[start_count, gpu["index"]].add(entry["t"], gpu["energy_wh"], gpu["power_w"])
    except (KeyError, TypeError, AttributeError):
        raise ValueError(f"{file} contains lines that are not telemetry") from None
    return {
        "host": file.stem.removeprefix("telemetry-"),
        "samples": sample_count,
        "gpus": gpu_count,
        "utilisation_pct": measurements["gpu_utilisation_pct"].mean,
        "gpu_memory_gib": measurements["gpu_memory_gib"].largest,
        "power_w": measurements["gpu_power_w"].mean,
        "temperature_c": measurements["gpu_temperature_c"].largest,
        "sm_clock_mhz": measurements["gpu_sm_clock_mhz"].mean,
        "throttled_pct": measurements["throttled"].mean,
        "throttle": sorted(reasons),
        "energy_wh": _complete_sum([energy.wh for energy in energies.values()]),
        "cpu_pct": measurements["cpu_pct"].mean,
        "net_sent_mib_s": measurements["net_sent_mib_s"].mean,
        "net_received_mib_s": measurements["net_received_mib_s"].mean,
        "disk_read_mib_s": measurements["disk_read_mib_s"].mean,
        "disk_written_mib_s": measurements["disk_written_mib_s"].mean,
        "memory_gib": measurements["memory_gib"].largest,
    }


def energy_wh(summaries: list[HostSummary]) -> float | None:
    """Return all hosts' total energy in Wh, or None if there are no GPUs or a host's energy is unknown."""
    return _complete_sum([host["energy_wh"] for host in summaries if host["gpus"]])


def _complete_sum(values: list[float | None]) -> float | None:
    """Return the sum of the numbers, or None if the list is empty or contains None."""
    measured_values = [value for value in values if value is not None]
    return sum(measured_values) if measured_values and len(measured_values) == len(values) else None
