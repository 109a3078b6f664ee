"""Summarizes a host's telemetry with means, maxima and energy."""

from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path
from typing import TypedDict

from onecurve.system.files import json_lines

JOULES_PER_WH = 3600
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
    maximum: float | None = None

    def add(self, measurement: float | None) -> None:
        """Add a number to the stream, or ignore None."""
        if measurement is not None:
            self.count += 1
            self.total += measurement
            self.maximum = measurement if self.maximum is None else max(self.maximum, measurement)

    @property
    def mean(self) -> float | None:
        """Mean of the numbers, or None if no number was added."""
        return self.total / self.count if self.count else None


@dataclass
class GpuEnergy:
    """Energy used by one GPU in one start. Without a counter on the GPU, the power is integrated."""

    counted_wh: float | None = None
    integrated_joules: float = 0.0
    last_power_sample: tuple[float, float] | None = None  # (time in s, power in W)

    def add_sample(self, time_s: float, counted_wh: float | None, power_w: float | None) -> None:
        """Update the energy with one sample of the GPU.

        Args:
            time_s: Time of the sample in seconds.
            counted_wh: Energy in Wh that the GPU's counter has measured in this start, if supported.
            power_w: Power in W, if supported. The method integrates the power with the trapezoidal rule.
        """
        if counted_wh is not None:
            self.counted_wh = counted_wh
        if power_w is not None:
            if self.last_power_sample:
                last_time_s, last_power_w = self.last_power_sample
                self.integrated_joules += (time_s - last_time_s) * (power_w + last_power_w) / 2
            self.last_power_sample = time_s, power_w

    @property
    def energy_wh(self) -> float | None:
        """Energy in Wh, or None if the energy is unknown."""
        if self.counted_wh is not None:
            return self.counted_wh
        return None if self.last_power_sample is None else self.integrated_joules / JOULES_PER_WH


def summarize(telemetry_file: Path) -> HostSummary:
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
    totals_by_measurement: dict[str, MeasurementTotals] = defaultdict(MeasurementTotals)
    throttle_reasons: set[str] = set()
    gpu_energies: dict[tuple[int, int], GpuEnergy] = defaultdict(GpuEnergy)  # {(start, GPU index): energy}
    try:
        for telemetry_entry in json_lines(telemetry_file):
            is_header = "host" in telemetry_entry
            if is_header:
                start_count += 1
                gpu_count = len(telemetry_entry["devices"])
                continue
            sample_count += 1
            for measurement_name in HOST_MEASUREMENTS:
                totals_by_measurement[measurement_name].add(telemetry_entry[measurement_name])
            for gpu_sample in telemetry_entry.get("gpus", []):
                for measurement_name in GPU_MEASUREMENTS:
                    totals_by_measurement[f"gpu_{measurement_name}"].add(gpu_sample[measurement_name])
                # 100 or 0, so that the mean is the percentage of throttled samples
                throttled_pct = None if gpu_sample["throttle"] is None else 100 * bool(gpu_sample["throttle"])
                totals_by_measurement["throttled"].add(throttled_pct)
                throttle_reasons.update(gpu_sample["throttle"] or ())
                gpu_energy = gpu_energies[start_count, gpu_sample["index"]]
                gpu_energy.add_sample(telemetry_entry["t"], gpu_sample["energy_wh"], gpu_sample["power_w"])
    except (KeyError, TypeError, AttributeError):
        raise ValueError(f"{telemetry_file} contains lines that are not telemetry") from None
    return {
        "host": telemetry_file.stem.removeprefix("telemetry-"),
        "samples": sample_count,
        "gpus": gpu_count,
        "utilisation_pct": totals_by_measurement["gpu_utilisation_pct"].mean,
        "gpu_memory_gib": totals_by_measurement["gpu_memory_gib"].maximum,
        "power_w": totals_by_measurement["gpu_power_w"].mean,
        "temperature_c": totals_by_measurement["gpu_temperature_c"].maximum,
        "sm_clock_mhz": totals_by_measurement["gpu_sm_clock_mhz"].mean,
        "throttled_pct": totals_by_measurement["throttled"].mean,
        "throttle": sorted(throttle_reasons),
        "energy_wh": _sum_unless_unknown([gpu_energy.energy_wh for gpu_energy in gpu_energies.values()]),
        "cpu_pct": totals_by_measurement["cpu_pct"].mean,
        "net_sent_mib_s": totals_by_measurement["net_sent_mib_s"].mean,
        "net_received_mib_s": totals_by_measurement["net_received_mib_s"].mean,
        "disk_read_mib_s": totals_by_measurement["disk_read_mib_s"].mean,
        "disk_written_mib_s": totals_by_measurement["disk_written_mib_s"].mean,
        "memory_gib": totals_by_measurement["memory_gib"].maximum,
    }


def energy_wh(summaries: list[HostSummary]) -> float | None:
    """Return all hosts' total energy in Wh, or None if there are no GPUs or a host's energy is unknown."""
    return _sum_unless_unknown([summary["energy_wh"] for summary in summaries if summary["gpus"]])


def _sum_unless_unknown(energies_wh: list[float | None]) -> float | None:
    """Return the total energy in Wh, or None if the list is empty or contains None (an unknown energy)."""
    known_energies_wh = [energy for energy in energies_wh if energy is not None]
    are_all_energies_known = 0 < len(known_energies_wh) == len(energies_wh)
    return sum(known_energies_wh) if are_all_energies_known else None
