"""Samples the CPU, memory, network, disk and GPUs of each host during training.

A thread in the first process of each host takes a sample every --telemetry_s seconds. The samples are written
to the following files:

    telemetry-<host>.jsonl     a header at each start of the run, then one sample per line. Headers of the
    main
                               process also contain the age_s of the process and the earlier wall_s of the run
    nvidia-smi-<host>.txt      the output of `nvidia-smi -q`, if installed, at the start and after half of the
    steps

Only the main process writes files. Samples of the main process's host are written immediately. Other hosts'
samples are sent with each checkpoint and at the end of the run. If a host is lost, its samples since the last
checkpoint are also lost. If a restart repeats steps, the earlier samples of these steps are kept. An error is
logged once but does not end training.
"""

import json
import os
import re
import shutil
import socket
import subprocess
import threading
import time
from collections import defaultdict, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean
from typing import Any, TypeVar

import psutil
import torch
from accelerate import Accelerator

from onecurve.distributed.strategy import device_name
from onecurve.system.env import local_rank
from onecurve.system.files import open_to_append
from onecurve.system.output import log
from onecurve.system.processes import own_age_s
from onecurve.system.text import numbered
from onecurve.system.threads import lower_priority
from onecurve.telemetry.summary import GPU_MEASUREMENTS, HOST_MEASUREMENTS, HostSummary, summarize

Item = TypeVar("Item")
STOP_TIMEOUT_S = 2  # Maximum number of seconds that the end of a run waits for a busy sampler
NVIDIA_SMI_S = 30  # Timeout of nvidia-smi in seconds
MIN_SAMPLE_S = 0.1  # Minimum seconds between two samples for a meaningful CPU utilisation
MIB, GIB = 2**20, 2**30
# Names of throttle reasons in nvidia-smi, except the reason that an idle GPU reports
THROTTLE_REASONS = (
    "applications_clocks_setting",
    "sw_power_cap",
    "hw_slowdown",
    "sync_boost",
    "sw_thermal_slowdown",
    "hw_thermal_slowdown",
    "hw_power_brake_slowdown",
)


@dataclass(frozen=True)
class ProcessInfo:
    """Host and device of a process."""

    host: str
    local_rank: int
    device: str
    gpu_uuid: str | None  # UUID of the GPU, or None on a CPU


def this_process(accelerator: Accelerator) -> ProcessInfo:
    """Return the host and device of this process."""
    on_gpu = accelerator.device.type == "cuda"
    uuid = str(torch.cuda.get_device_properties(accelerator.device).uuid) if on_gpu else None
    return ProcessInfo(socket.gethostname(), local_rank(), device_name(accelerator), uuid)


@dataclass
class SampledHost:
    """Host in the job, sampled by the first process on the host."""

    name: str  # Unique name that is safe in file names
    first_rank: int
    gpus: dict[str, str] = field(default_factory=dict)  # {UUID: name} of the GPUs used by the job


def sampled_hosts(processes: list[ProcessInfo]) -> list[SampledHost]:
    """Return the hosts in rank order. Each local rank 0 adds a host, even if host names repeat."""
    hosts: list[SampledHost] = []
    for rank, process in enumerate(processes):
        if process.local_rank == 0:
            used_names = {host.name for host in hosts}
            names = numbered(re.sub(r"[^A-Za-z0-9._-]", "_", process.host))
            hosts.append(SampledHost(next(name for name in names if name not in used_names), rank))
        if process.gpu_uuid:
            hosts[-1].gpus[process.gpu_uuid] = process.device
    return hosts


class Telemetry:
    """Telemetry of one process.

    The first process on each host takes samples in a thread. Only the main process writes samples to files.

    Args:
        processes: Host and device of each rank.
        rank: Rank of this process.
        folder: Folder of the run on the main process, and None on other processes.
        interval_s: Number of seconds between samples. 0 disables sampling.
        step: Function that returns the current training step.
        steps: Number of training steps of the whole run.
        before_s: The run's wall_s before this process started.
    """

    def __init__(
        self,
        processes: list[ProcessInfo],
        rank: int,
        folder: Path | None,
        interval_s: float,
        step: Callable[[], int],
        steps: int,
        before_s: float = 0.0,
    ):
        self.folder, self.interval_s, self.step, self.before_s = folder, interval_s, step, before_s
        self.middle_step = steps // 2
        self.reported_problems: set[str] = set()
        self.unsent_texts: deque[tuple[str, str]] = deque()  # (file name, text), not used on the main process
        # Samples for the trackers, only on the main process
        self.unlogged_samples: deque[dict[str, Any]] = deque()
        self.stopped, self.thread = threading.Event(), None
        host = next((host for host in sampled_hosts(processes) if host.first_rank == rank), None)
        if host and interval_s:
            self.thread = threading.Thread(target=self._sample_host, args=(host,), daemon=True)
            self.thread.start()

    def stop(self) -> None:
        """Take a last sample, and end the sampling thread."""
        self.stopped.set()
        if self.thread:
            self.thread.join(STOP_TIMEOUT_S)

    def take(self) -> list[tuple[str, str]]:
        """Return the (file name, text) pairs since the last call, which the main process writes to files."""
        return _drained(self.unsent_texts)

    def append(self, named_texts: list[tuple[str, str]]) -> None:
        """Write the (file name, text) pairs from other processes. Only the main process calls this method."""
        try:
            for name, text in named_texts:
                self._write_text(name, text)
        except OSError as error:
            self._warn_once(str(error))

    def means(self) -> dict[str, float]:
        """Return {`telemetry/<name>`: mean since the last call} for the main process's host."""
        values_by_name: defaultdict[str, list[float]] = defaultdict(list)
        for sample in _drained(self.unlogged_samples):
            sources: list[tuple[str, tuple[str, ...], dict[str, Any]]] = [("", HOST_MEASUREMENTS, sample)]
            sources += [(f"gpu{gpu['index']}_", GPU_MEASUREMENTS, gpu) for gpu in sample.get("gpus", [])]
            for prefix, names, measurements in sources:
                for name in names:
                    if measurements[name] is not None:
                        values_by_name[f"telemetry/{prefix}{name}"].append(measurements[name])
        return {name: fmean(measured_values) for name, measured_values in values_by_name.items()}

    def summaries(self) -> list[HostSummary]:
        """Return a summary for each host over all starts. Only the main process calls this method."""
        assert self.folder
        summaries = list[HostSummary]()
        for file in sorted(self.folder.glob("telemetry-*.jsonl")):
            try:
                summaries.append(summarize(file))
            except (OSError, ValueError) as error:
                self._warn_once(str(error))
        return summaries

    def _sample_host(self, host: SampledHost) -> None:
        """Write a header, a sample every interval_s seconds, and a last sample.

        This method runs in a thread.
        """
        lower_priority()
        try:
            meter, gpus = HostMeter(), open_gpus(list(host.gpus), self._warn_once)
            self._write_header(host)
            self._log_nvidia_smi(host)
            is_past_middle = self.step() >= self.middle_step
            while not (is_last := self.stopped.wait(self.interval_s)) or meter.age_s() > MIN_SAMPLE_S:
                sample: dict[str, Any] = {"t": round(time.time(), 3), "step": self.step(), **meter.sample()}
                if gpus:
                    sample["gpus"] = [gpu.sample() for gpu in gpus]
                self._write_entry(host, sample)
                if is_last:
                    break
                if not is_past_middle and self.step() >= self.middle_step:
                    is_past_middle = True
                    self._log_nvidia_smi(host)
        except Exception as error:  # An error in telemetry must not end training
            self._warn_once(f"host {host.name} is no longer sampled ({error})")

    def _write_header(self, host: SampledHost) -> None:
        header = {
            "host": host.name,
            "t": round(time.time(), 3),
            "interval_s": self.interval_s,
            "devices": list(host.gpus.values()),
            "cpus": psutil.cpu_count(),
            "memory_gib": round(psutil.virtual_memory().total / GIB, 3),
        }
        if self.folder:
            header |= {"before_s": round(self.before_s, 3), "age_s": round(own_age_s(), 3)}
        self._write_entry(host, header)

    def _log_nvidia_smi(self, host: SampledHost) -> None:
        if shutil.which("nvidia-smi") is None:
            return
        step, date = self.step(), time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime())
        try:
            nvidia_smi = subprocess.run(
                ["nvidia-smi", "-q"], capture_output=True, text=True, errors="replace", timeout=NVIDIA_SMI_S
            )
        except (OSError, subprocess.TimeoutExpired) as error:
            self._warn_once(f"nvidia-smi did not respond on host {host.name} ({error})")
            return
        report = f"# nvidia-smi -q, step {step}, {date}\n{nvidia_smi.stdout}{nvidia_smi.stderr}\n"
        self._write_text(f"nvidia-smi-{host.name}.txt", report)

    def _write_entry(self, host: SampledHost, entry: dict[str, Any]) -> None:
        self._write_text(f"telemetry-{host.name}.jsonl", json.dumps(entry) + "\n")
        if self.folder and "step" in entry:
            self.unlogged_samples.append(entry)

    def _write_text(self, name: str, text: str) -> None:
        """Append the text to a file in the run folder, or keep it for the main process."""
        if not self.folder:
            self.unsent_texts.append((name, text))
            return
        with open_to_append(self.folder / name) as file:
            if file.tell():
                file.seek(-1, os.SEEK_END)
                if file.read(1) != b"\n":  # A full disk has truncated the last line
                    file.write(b"\n")
            file.write(text.encode())

    def _warn_once(self, problem: str) -> None:
        if problem not in self.reported_problems:
            self.reported_problems.add(problem)
            log.info(f"the telemetry is incomplete: {problem}")


def _drained(queue: deque[Item]) -> list[Item]:
    """Remove and return all items in a queue. A different thread may append to the queue."""
    return [queue.popleft() for _ in range(len(queue))]


class HostMeter:
    """Meter for a host's utilisation by all processes on the host. Rates are means since the last sample."""

    def __init__(self) -> None:
        psutil.cpu_percent()  # The first value of cpu_percent() in a thread is meaningless
        self.sampled_at, self.io_totals_mib = time.monotonic(), _io_totals_mib()

    def age_s(self) -> float:
        """Return the seconds since the last sample."""
        return time.monotonic() - self.sampled_at

    def sample(self) -> dict[str, float | None]:
        """Return the host's utilisation since the last sample."""
        elapsed_s, io_totals_mib, memory = self.age_s(), _io_totals_mib(), psutil.virtual_memory()
        io_rates = {
            f"{name}_mib_s": total and round(max(0, total - (self.io_totals_mib[name] or 0)) / elapsed_s, 3)
            for name, total in io_totals_mib.items()
        }
        self.sampled_at, self.io_totals_mib = self.sampled_at + elapsed_s, io_totals_mib
        used_gib = round((memory.total - memory.available) / GIB, 3)
        return {"cpu_pct": psutil.cpu_percent(), "memory_gib": used_gib, **io_rates}


def _io_totals_mib() -> dict[str, float | None]:
    """Return network and disk traffic in MiB since the host booted, without loopback interfaces and RDMA."""
    counters = [counter for name, counter in psutil.net_io_counters(pernic=True).items() if name != "lo"]
    try:
        disk = psutil.disk_io_counters()
    except NotImplementedError:  # Some containers do not provide /proc/diskstats
        disk = None
    return {
        "net_sent": sum(counter.bytes_sent for counter in counters) / MIB,
        "net_received": sum(counter.bytes_recv for counter in counters) / MIB,
        "disk_read": disk and disk.read_bytes / MIB,
        "disk_written": disk and disk.write_bytes / MIB,
    }


def open_gpus(uuids: list[str], complain: Callable[[str], None]) -> list["Gpu"]:
    """Return the job's GPUs on this host, or an empty list if NVML is missing or can't find a GPU."""
    if not uuids:
        return []
    try:
        import pynvml
    except ImportError:
        complain("GPUs are not measured. Run `pip install nvidia-ml-py`")
        return []
    try:
        pynvml.nvmlInit()
        return [Gpu(pynvml, index, uuid, complain) for index, uuid in enumerate(uuids)]
    except pynvml.NVMLError as error:
        complain(f"NVML can't find the job's GPUs ({error})")
        return []


class Gpu:
    """GPU or GPU partition (MIG). A measurement is None if the GPU does not support the measurement.

    This class has not been tested on a GPU yet.

    Args:
        nvml: Imported module pynvml.
        index: Index of the GPU among the job's GPUs on this host.
        uuid: UUID of the GPU, as torch reports it.
        complain: Function that receives messages about errors, except about unsupported measurements.
    """

    def __init__(self, nvml: Any, index: int, uuid: str, complain: Callable[[str], None]):
        self.nvml, self.index, self.complain = nvml, index, complain
        try:
            self.handle = nvml.nvmlDeviceGetHandleByUUID(f"GPU-{uuid}")
        except nvml.NVMLError_NotFound:
            self.handle = nvml.nvmlDeviceGetHandleByUUID(f"MIG-{uuid}")
        self.reason_bits = {
            reason: getattr(nvml, f"nvmlClocksEventReason{reason.title().replace('_', '')}")
            for reason in THROTTLE_REASONS
        }
        self.first_mj = self._read_nvml("TotalEnergyConsumption")

    def sample(self) -> dict[str, Any]:
        """Return a sample.

        `energy_wh` is the increase in the GPU's energy counter since this object was created.
        """
        read_nvml = self._read_nvml
        utilisation_rates, memory, power_mw = map(read_nvml, ("UtilizationRates", "MemoryInfo", "PowerUsage"))
        energy_mj, reason_mask = map(read_nvml, ("TotalEnergyConsumption", "CurrentClocksEventReasons"))
        has_energy = energy_mj is not None and self.first_mj is not None
        reasons = None
        if reason_mask is not None:
            reasons = [reason for reason, bit in self.reason_bits.items() if reason_mask & bit]
        return {
            "index": self.index,
            "utilisation_pct": utilisation_rates and utilisation_rates.gpu,
            "memory_gib": memory and round(memory.used / GIB, 3),
            "power_w": None if power_mw is None else power_mw / 1e3,
            "temperature_c": read_nvml("Temperature", self.nvml.NVML_TEMPERATURE_GPU),
            "sm_clock_mhz": read_nvml("ClockInfo", self.nvml.NVML_CLOCK_SM),
            "throttle": reasons,
            "energy_wh": round((energy_mj - self.first_mj) / 3.6e6, 4) if has_energy else None,
        }

    def _read_nvml(self, name: str, *arguments: Any) -> Any:
        try:
            return getattr(self.nvml, f"nvmlDeviceGet{name}")(self.handle, *arguments)
        except self.nvml.NVMLError_NotSupported:
            return None
        except self.nvml.NVMLError as error:
            self.complain(f"NVML could not read {name} of GPU {self.index} ({error})")
            return None
