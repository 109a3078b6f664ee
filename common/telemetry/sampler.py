"""The thread that samples one host: processor, memory, network, disk (psutil), the job's GPUs (NVML)."""

import shutil
import subprocess
import threading
import time
from collections.abc import Callable
from typing import Any

import psutil

from common.system.threads import lower_priority

MIB, GIB = 2**20, 2**30
STOP_S = 2  # how long a run waits at its end for a sampler that is busy
NVIDIA_SMI_S = 30  # how long nvidia-smi may take
SHORTEST_S = 0.1  # a share of the processor's time over less is meaningless


class Sampler:
    """Takes a sample each interval_s until stop(), and then a last one.

    gpus: UUID -> name of those that the job uses on this host. step: returns the training's current step; at
    step `middle` nvidia-smi runs for the second time. keep(record) takes a header, a sample, or nvidia-smi's
    text; complain(problem) takes an error. Both are called in the thread.
    """

    def __init__(
        self,
        host: str,
        gpus: dict[str, str],
        interval_s: float,
        step: Callable[[], int],
        middle: int,
        keep: Callable[[dict[str, Any] | str], None],
        complain: Callable[[str], None],
    ):
        self.host, self.gpu_names, self.interval_s, self.step = host, gpus, interval_s, step
        self.middle: int | None = middle if step() < middle else None
        self.keep, self.complain = keep, complain
        self.stopped = threading.Event()
        self.thread = threading.Thread(target=self._work, daemon=True)

    def start(self) -> None:
        self.thread.start()

    def stop(self) -> None:
        self.stopped.set()
        self.thread.join(STOP_S)

    def open(self) -> None:
        """Opens the meters. Called in the thread that samples, before the first sample."""
        self.meter = HostMeter()
        self.gpus = open_gpus(list(self.gpu_names), self.complain)

    def sample(self) -> dict[str, Any]:
        found = {"t": round(time.time(), 3), "step": self.step(), **self.meter.sample()}
        return found | ({"gpus": [gpu.sample() for gpu in self.gpus]} if self.gpus else {})

    def _work(self) -> None:
        lower_priority()
        try:
            self.open()
            self.keep(self._header())
            self._ask_nvidia_smi()
            while not self.stopped.wait(self.interval_s):
                self.keep(self.sample())
                if self.middle is not None and self.step() >= self.middle:
                    self.middle = None
                    self._ask_nvidia_smi()
            if self.meter.age_s() > SHORTEST_S:
                self.keep(self.sample())
        except Exception as error:  # of any kind: no training ends because its telemetry does
            self.complain(f"no more samples of host {self.host} ({error})")

    def _header(self) -> dict[str, Any]:
        return {
            "host": self.host,
            "t": round(time.time(), 3),
            "interval_s": self.interval_s,
            "devices": list(self.gpu_names.values()),
            "cpus": psutil.cpu_count(),
            "memory_gib": round(psutil.virtual_memory().total / GIB, 3),
        }

    def _ask_nvidia_smi(self) -> None:
        if shutil.which("nvidia-smi") is None:
            return
        step, when = self.step(), time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime())
        try:
            answer = subprocess.run(
                ["nvidia-smi", "-q"], capture_output=True, text=True, errors="replace", timeout=NVIDIA_SMI_S
            )
        except (OSError, subprocess.TimeoutExpired) as error:
            self.complain(f"no answer of nvidia-smi on host {self.host} ({error})")
            return
        self.keep(f"# nvidia-smi -q, step {step}, {when}\n{answer.stdout}{answer.stderr}\n")


class HostMeter:
    """Use of the whole host by all processes; rates are means since the last sample."""

    def __init__(self) -> None:
        psutil.cpu_percent()  # the first answer in a thread is meaningless
        self.before_s, self.before = time.monotonic(), _counters_mib()

    def age_s(self) -> float:
        """Seconds since the last sample."""
        return time.monotonic() - self.before_s

    def sample(self) -> dict[str, float | None]:
        elapsed_s, now, memory = self.age_s(), _counters_mib(), psutil.virtual_memory()
        rates: dict[str, float | None] = {}
        for name, before in self.before.items():
            after = now[name]
            if before is None or after is None:
                rates[f"{name}_mib_s"] = None
            else:
                rates[f"{name}_mib_s"] = round((after - before) / elapsed_s, 3)
        self.before_s, self.before = self.before_s + elapsed_s, now
        used_gib = round((memory.total - memory.available) / GIB, 3)
        return {"cpu_pct": psutil.cpu_percent(), "memory_gib": used_gib, **rates}


def _counters_mib() -> dict[str, float | None]:
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
        # By nvidia-smi's names, without the reason of an idle GPU.
        self.reasons = {
            nvml.nvmlClocksEventReasonApplicationsClocksSetting: "applications_clocks_setting",
            nvml.nvmlClocksEventReasonSwPowerCap: "sw_power_cap",
            nvml.nvmlClocksEventReasonHwSlowdown: "hw_slowdown",
            nvml.nvmlClocksEventReasonSyncBoost: "sync_boost",
            nvml.nvmlClocksEventReasonSwThermalSlowdown: "sw_thermal_slowdown",
            nvml.nvmlClocksEventReasonHwThermalSlowdown: "hw_thermal_slowdown",
            nvml.nvmlClocksEventReasonHwPowerBrakeSlowdown: "hw_power_brake_slowdown",
        }
        self.first_mj = self._ask(nvml.nvmlDeviceGetTotalEnergyConsumption)

    def sample(self) -> dict[str, Any]:
        """energy_wh: since this object was made, by the GPU's own counter."""
        nvml, ask = self.nvml, self._ask
        utilisation, memory = ask(nvml.nvmlDeviceGetUtilizationRates), ask(nvml.nvmlDeviceGetMemoryInfo)
        power_mw, energy_mj = ask(nvml.nvmlDeviceGetPowerUsage), ask(nvml.nvmlDeviceGetTotalEnergyConsumption)
        reasons = ask(nvml.nvmlDeviceGetCurrentClocksEventReasons)
        counted = energy_mj is not None and self.first_mj is not None
        return {
            "index": self.index,
            "utilisation_pct": None if utilisation is None else utilisation.gpu,
            "memory_gib": None if memory is None else round(memory.used / GIB, 3),
            "power_w": None if power_mw is None else power_mw / 1e3,
            "temperature_c": ask(nvml.nvmlDeviceGetTemperature, nvml.NVML_TEMPERATURE_GPU),
            "sm_clock_mhz": ask(nvml.nvmlDeviceGetClockInfo, nvml.NVML_CLOCK_SM),
            "throttle": None if reasons is None else [n for bit, n in self.reasons.items() if reasons & bit],
            "energy_wh": round((energy_mj - self.first_mj) / 3.6e6, 4) if counted else None,
        }

    def _ask(self, function: Callable[..., Any], *words: Any) -> Any:
        try:
            return function(self.handle, *words)
        except self.nvml.NVMLError_NotSupported:
            return None
        except self.nvml.NVMLError as error:
            self.complain(f"{function.__name__} of GPU {self.index} failed ({error})")
            return None
