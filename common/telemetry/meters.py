"""Reads the use of one host: processor, memory, network, disk (psutil), the job's GPUs (NVML)."""

import time
from collections.abc import Callable
from typing import Any

import psutil

MIB, GIB = 2**20, 2**30
# nvidia-smi's names; an idle GPU's reason is left out
THROTTLE = (
    "applications_clocks_setting",
    "sw_power_cap",
    "hw_slowdown",
    "sync_boost",
    "sw_thermal_slowdown",
    "hw_thermal_slowdown",
    "hw_power_brake_slowdown",
)


class HostMeter:
    """Use of the whole host by all processes; rates are means since the last sample."""

    def __init__(self) -> None:
        psutil.cpu_percent()  # the first answer in a thread is meaningless
        self.sampled_at, self.totals = time.monotonic(), _totals_mib()

    def age_s(self) -> float:
        """Seconds since the last sample."""
        return time.monotonic() - self.sampled_at

    def sample(self) -> dict[str, float | None]:
        elapsed_s, totals, memory = self.age_s(), _totals_mib(), psutil.virtual_memory()
        rates = {
            f"{name}_mib_s": None if now is None else round((now - (self.totals[name] or 0)) / elapsed_s, 3)
            for name, now in totals.items()
        }
        self.sampled_at, self.totals = self.sampled_at + elapsed_s, totals
        used_gib = round((memory.total - memory.available) / GIB, 3)
        return {"cpu_pct": psutil.cpu_percent(), "memory_gib": used_gib, **rates}


def _totals_mib() -> dict[str, float | None]:
    """Totals since the host's start, over all network interfaces but the loopback. RDMA is not counted."""
    network = [counted for name, counted in psutil.net_io_counters(pernic=True).items() if name != "lo"]
    try:
        disk = psutil.disk_io_counters()
    except NotImplementedError:  # some containers have no /proc/diskstats
        disk = None
    return {
        "net_sent": sum(counted.bytes_sent for counted in network) / MIB,
        "net_received": sum(counted.bytes_recv for counted in network) / MIB,
        "disk_read": disk and disk.read_bytes / MIB,
        "disk_written": disk and disk.write_bytes / MIB,
    }


def open_gpus(uuids: list[str], complain: Callable[[str], None]) -> list["Gpu"]:
    """The job's GPUs; an empty list without NVML, or where it does not know one of them."""
    if not uuids:
        return []
    try:
        import pynvml
    except ImportError:
        complain("nvidia-ml-py is not installed: the GPUs are not in the telemetry")
        return []
    try:
        pynvml.nvmlInit()
        return [Gpu(pynvml, index, uuid, complain) for index, uuid in enumerate(uuids)]
    except pynvml.NVMLError as error:
        complain(f"NVML does not know the job's GPUs ({error})")
        return []


class Gpu:
    """A GPU, or a part of one (MIG). A value that it does not support is None. Not yet measured on a GPU.

    index: among the job's GPUs of this host. complain: takes errors, but not values that are not supported.
    """

    def __init__(self, nvml: Any, index: int, uuid: str, complain: Callable[[str], None]):
        self.nvml, self.index, self.complain = nvml, index, complain
        try:
            self.handle = nvml.nvmlDeviceGetHandleByUUID(f"GPU-{uuid}")
        except nvml.NVMLError_NotFound:
            self.handle = nvml.nvmlDeviceGetHandleByUUID(f"MIG-{uuid}")
        constants = {name: name.title().replace("_", "") for name in THROTTLE}
        self.reasons = {n: getattr(nvml, f"nvmlClocksEventReason{c}") for n, c in constants.items()}
        self.first_mj = self._get("TotalEnergyConsumption")

    def sample(self) -> dict[str, Any]:
        """energy_wh: since this object was made, by the GPU's own counter."""
        get = self._get
        rates, memory, power_mw, energy_mj, reasons = map(
            get,
            (
                "UtilizationRates",
                "MemoryInfo",
                "PowerUsage",
                "TotalEnergyConsumption",
                "CurrentClocksEventReasons",
            ),
        )
        counted = energy_mj is not None and self.first_mj is not None
        return {
            "index": self.index,
            "utilisation_pct": rates and rates.gpu,
            "memory_gib": memory and round(memory.used / GIB, 3),
            "power_w": None if power_mw is None else power_mw / 1e3,
            "temperature_c": get("Temperature", self.nvml.NVML_TEMPERATURE_GPU),
            "sm_clock_mhz": get("ClockInfo", self.nvml.NVML_CLOCK_SM),
            "throttle": None if reasons is None else [n for n, bit in self.reasons.items() if reasons & bit],
            "energy_wh": round((energy_mj - self.first_mj) / 3.6e6, 4) if counted else None,
        }

    def _get(self, name: str, *arguments: Any) -> Any:
        try:
            return getattr(self.nvml, f"nvmlDeviceGet{name}")(self.handle, *arguments)
        except self.nvml.NVMLError_NotSupported:
            return None
        except self.nvml.NVMLError as error:
            self.complain(f"{name} of GPU {self.index} failed ({error})")
            return None
