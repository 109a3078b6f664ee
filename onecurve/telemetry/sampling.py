"""Samples the CPU, memory, network, disk and GPUs of each host during training.

A thread in the first process of each host takes a sample every --telemetry_s seconds. The samples are written
to the following files:

    telemetry-<host>.jsonl     a header at each start of the run, then one sample per line. Headers of the
                               main process also contain the process's age_s and the run's earlier wall_s
    nvidia-smi-<host>.txt      the output of `nvidia-smi -q`, if installed, at the start and after half of
                               the steps

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

from onecurve.system.env import local_rank
from onecurve.system.files import open_to_append
from onecurve.system.output import log
from onecurve.system.processes import process_uptime_s
from onecurve.system.text import numbered
from onecurve.system.threads import lower_priority
from onecurve.telemetry.summary import GPU_MEASUREMENTS, HOST_MEASUREMENTS, HostSummary, summarize

QueueItem = TypeVar("QueueItem")
SAMPLER_STOP_TIMEOUT_S = 2  # Maximum number of seconds that the end of a run waits for a busy sampler
NVIDIA_SMI_TIMEOUT_S = 30  # Timeout of nvidia-smi in seconds
MIN_SAMPLE_INTERVAL_S = 0.1  # Minimum seconds between two samples for a meaningful CPU utilisation
MIB, GIB = 2**20, 2**30  # Bytes
MILLIJOULES_PER_WH = 3.6e6
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


def this_process(device: torch.device, device_name: str) -> ProcessInfo:
    """Return the host and device of this process. `device_name` is the device's name on the run's page."""
    gpu_uuid = str(torch.cuda.get_device_properties(device).uuid) if device.type == "cuda" else None
    return ProcessInfo(socket.gethostname(), local_rank(), device_name, gpu_uuid)


@dataclass
class SampledHost:
    """Host in the job, sampled by the first process on the host."""

    name: str  # Unique name that is safe in file names
    first_rank: int
    gpu_name_by_uuid: dict[str, str] = field(default_factory=dict)  # GPUs used by the job


def sampled_hosts(processes: list[ProcessInfo]) -> list[SampledHost]:
    """Return the hosts in rank order. Each local rank 0 adds a host, even if host names repeat."""
    hosts: list[SampledHost] = []
    for rank, process_info in enumerate(processes):
        if process_info.local_rank == 0:
            used_names = {host.name for host in hosts}
            safe_name = re.sub(r"[^A-Za-z0-9._-]", "_", process_info.host)
            unique_name = next(candidate for candidate in numbered(safe_name) if candidate not in used_names)
            hosts.append(SampledHost(unique_name, rank))
        if process_info.gpu_uuid:  # ranks on the same host are consecutive
            hosts[-1].gpu_name_by_uuid[process_info.gpu_uuid] = process_info.device
    return hosts


class Telemetry:
    """Telemetry of one process.

    The first process on each host takes samples in a thread. Only the main process writes samples to files.

    Args:
        processes: Host and device of each rank.
        rank: Rank of this process.
        folder: Folder of the run on the main process, and None on other processes.
        interval_s: Number of seconds between samples. 0 disables sampling.
        current_step: Function that returns the current training step.
        step_count: Number of training steps of the whole run.
        earlier_wall_s: The run's wall_s before this process started.
    """

    def __init__(
        self,
        processes: list[ProcessInfo],
        rank: int,
        folder: Path | None,
        interval_s: float,
        current_step: Callable[[], int],
        step_count: int,
        earlier_wall_s: float = 0.0,
    ):
        self.run_folder = folder
        self.interval_s = interval_s
        self.current_step = current_step
        self.earlier_wall_s = earlier_wall_s
        self.middle_step = step_count // 2  # when nvidia-smi's output is logged again
        self.reported_problems: set[str] = set()
        # (file name, text) pairs for the main process, which does not use this queue itself
        self.unsent_texts: deque[tuple[str, str]] = deque()
        # Samples for the trackers, only on the main process
        self.unlogged_samples: deque[dict[str, Any]] = deque()
        self.stop_requested = threading.Event()
        self.sampling_thread: threading.Thread | None = None
        # Only the first process on a host takes samples
        this_host = next((host for host in sampled_hosts(processes) if host.first_rank == rank), None)
        if this_host and interval_s:
            self.sampling_thread = threading.Thread(target=self._sample_host, args=(this_host,), daemon=True)
            self.sampling_thread.start()

    def stop(self) -> None:
        """Make the sampling thread take a last sample and end. Wait SAMPLER_STOP_TIMEOUT_S at most."""
        self.stop_requested.set()
        if self.sampling_thread:
            self.sampling_thread.join(SAMPLER_STOP_TIMEOUT_S)

    def take_unsent_texts(self) -> list[tuple[str, str]]:
        """Return and forget the (file name, text) pairs that the main process must append to files."""
        return _take_all(self.unsent_texts)

    def write_texts(self, named_texts: list[tuple[str, str]]) -> None:
        """Append texts from other processes to the named files. Only the main process calls this method."""
        try:
            for file_name, sent_text in named_texts:
                self._write_text(file_name, sent_text)
        except OSError as error:
            self._warn_once(str(error))

    def measurement_means(self) -> dict[str, float]:
        """Return {`telemetry/<name>`: mean since the last call} for the main process's host.

        The method removes the samples from the queue for the trackers.
        """
        values_by_metric: defaultdict[str, list[float]] = defaultdict(list)

        def add_measurements(
            metric_prefix: str, measurement_names: tuple[str, ...], measured: dict[str, Any]
        ) -> None:
            for measurement_name in measurement_names:
                if measured[measurement_name] is not None:
                    values_by_metric[f"{metric_prefix}{measurement_name}"].append(measured[measurement_name])

        for sample in _take_all(self.unlogged_samples):
            add_measurements("telemetry/", HOST_MEASUREMENTS, sample)
            for gpu_sample in sample.get("gpus", []):
                add_measurements(f"telemetry/gpu{gpu_sample['index']}_", GPU_MEASUREMENTS, gpu_sample)
        return {metric: fmean(measured_values) for metric, measured_values in values_by_metric.items()}

    def summaries(self) -> list[HostSummary]:
        """Return a summary for each host over all starts. Only the main process calls this method."""
        assert self.run_folder
        summaries = list[HostSummary]()
        for telemetry_file in sorted(self.run_folder.glob("telemetry-*.jsonl")):
            try:
                summaries.append(summarize(telemetry_file))
            except (OSError, ValueError) as error:
                self._warn_once(str(error))
        return summaries

    def _sample_host(self, host: SampledHost) -> None:
        """Write a header, a sample every interval_s seconds, and a last sample.

        The method also logs nvidia-smi's output at the start and after half of the steps. It runs in the
        sampling thread until stop() is called.
        """
        lower_priority()
        try:
            host_meter = HostMeter()
            gpus = open_gpus(list(host.gpu_name_by_uuid), self._warn_once)
            self._write_header(host)
            self._log_nvidia_smi(host)
            is_past_middle = self.current_step() >= self.middle_step
            is_last_sample = False
            while not is_last_sample:
                is_last_sample = self.stop_requested.wait(self.interval_s)
                if is_last_sample and host_meter.since_sample_s() <= MIN_SAMPLE_INTERVAL_S:
                    break
                sample: dict[str, Any] = {"t": round(time.time(), 3), "step": self.current_step()}
                sample |= host_meter.sample()
                if gpus:
                    sample["gpus"] = [gpu.sample() for gpu in gpus]
                self._write_entry(host, sample)
                if not is_last_sample and not is_past_middle and self.current_step() >= self.middle_step:
                    is_past_middle = True
                    self._log_nvidia_smi(host)
        except Exception as error:  # An error in telemetry must not end training
            self._warn_once(f"host {host.name} is no longer sampled ({error})")

    def _write_header(self, host: SampledHost) -> None:
        """Write a line that describes the host, at the start of each process's samples.

        On the main process, `before_s` is the run's wall_s before this process started.
        """
        host_header = {
            "host": host.name,
            "t": round(time.time(), 3),
            "interval_s": self.interval_s,
            "devices": list(host.gpu_name_by_uuid.values()),
            "cpus": psutil.cpu_count(),
            "memory_gib": round(psutil.virtual_memory().total / GIB, 3),
        }
        if self.run_folder:
            host_header |= {"before_s": round(self.earlier_wall_s, 3), "age_s": round(process_uptime_s(), 3)}
        self._write_entry(host, host_header)

    def _log_nvidia_smi(self, host: SampledHost) -> None:
        """Append the output of `nvidia-smi -q` to nvidia-smi-<host>.txt, if nvidia-smi is installed."""
        if shutil.which("nvidia-smi") is None:
            return
        step = self.current_step()
        utc_time = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime())
        try:
            nvidia_smi = subprocess.run(
                ["nvidia-smi", "-q"], capture_output=True, errors="replace", timeout=NVIDIA_SMI_TIMEOUT_S
            )
        except (OSError, subprocess.TimeoutExpired) as error:
            self._warn_once(f"nvidia-smi did not respond on host {host.name} ({error})")
            return
        report_text = f"# nvidia-smi -q, step {step}, {utc_time}\n{nvidia_smi.stdout}{nvidia_smi.stderr}\n"
        self._write_text(f"nvidia-smi-{host.name}.txt", report_text)

    def _write_entry(self, host: SampledHost, telemetry_entry: dict[str, Any]) -> None:
        """Write a header or a sample as one JSON line. The main process also keeps samples for trackers."""
        self._write_text(f"telemetry-{host.name}.jsonl", json.dumps(telemetry_entry) + "\n")
        is_sample_entry = "step" in telemetry_entry
        if self.run_folder and is_sample_entry:
            self.unlogged_samples.append(telemetry_entry)

    def _write_text(self, file_name: str, added_text: str) -> None:
        """Append a text to a file in the run folder, or keep the text until the main process receives it."""
        if not self.run_folder:
            self.unsent_texts.append((file_name, added_text))
            return
        with open_to_append(self.run_folder / file_name) as appended_file:
            if appended_file.tell():
                appended_file.seek(-1, os.SEEK_END)  # writes always append, regardless of the position
                if appended_file.read(1) != b"\n":  # A full disk has truncated the last line
                    appended_file.write(b"\n")
            appended_file.write(added_text.encode())

    def _warn_once(self, telemetry_problem: str) -> None:
        """Log a problem, unless it has already been logged."""
        if telemetry_problem not in self.reported_problems:
            self.reported_problems.add(telemetry_problem)
            log.info(f"the telemetry is incomplete: {telemetry_problem}")


def _take_all(queue: deque[QueueItem]) -> list[QueueItem]:
    """Remove and return the items that a queue contains now. A different thread may append more items."""
    return [queue.popleft() for _ in range(len(queue))]


class HostMeter:
    """Meter for a host's utilisation by all processes on the host. Rates are means since the last sample."""

    def __init__(self) -> None:
        psutil.cpu_percent()  # The first value of cpu_percent() in a thread is meaningless
        self.sampled_at = time.monotonic()
        self.io_totals_mib = _io_totals_mib()

    def since_sample_s(self) -> float:
        """Return the seconds since the last sample."""
        return time.monotonic() - self.sampled_at

    def sample(self) -> dict[str, float | None]:
        """Return the host's utilisation since the last sample."""
        elapsed_s = self.since_sample_s()
        io_totals_mib = _io_totals_mib()
        memory = psutil.virtual_memory()
        io_rates: dict[str, float | None] = {}  # None if the host does not count this traffic
        for traffic_name, total_mib in io_totals_mib.items():
            earlier_total_mib = self.io_totals_mib[traffic_name] or 0
            # A total decreases if a network interface disappears
            rate_mib_s = total_mib and round(max(0, total_mib - earlier_total_mib) / elapsed_s, 3)
            io_rates[f"{traffic_name}_mib_s"] = rate_mib_s
        self.sampled_at += elapsed_s
        self.io_totals_mib = io_totals_mib
        used_memory_gib = round((memory.total - memory.available) / GIB, 3)
        return {"cpu_pct": psutil.cpu_percent(), "memory_gib": used_memory_gib, **io_rates}


def _io_totals_mib() -> dict[str, float | None]:
    """Return network and disk traffic in MiB since the host booted, without loopback interfaces and RDMA."""
    counters_by_interface = psutil.net_io_counters(pernic=True)
    net_counters = [counters for interface, counters in counters_by_interface.items() if interface != "lo"]
    try:
        disk_counters = psutil.disk_io_counters()
    except NotImplementedError:  # Some containers do not provide /proc/diskstats
        disk_counters = None
    return {
        "net_sent": sum(counters.bytes_sent for counters in net_counters) / MIB,
        "net_received": sum(counters.bytes_recv for counters in net_counters) / MIB,
        "disk_read": disk_counters and disk_counters.read_bytes / MIB,
        "disk_written": disk_counters and disk_counters.write_bytes / MIB,
    }


def open_gpus(uuids: list[str], report_problem: Callable[[str], None]) -> list["Gpu"]:
    """Return the job's GPUs on this host, or an empty list if NVML is missing or can't find a GPU."""
    if not uuids:
        return []
    try:
        import pynvml
    except ImportError:
        report_problem("GPUs are not measured. Run `pip install nvidia-ml-py`")
        return []
    try:
        pynvml.nvmlInit()
        return [Gpu(pynvml, gpu_index, gpu_uuid, report_problem) for gpu_index, gpu_uuid in enumerate(uuids)]
    except pynvml.NVMLError as error:
        report_problem(f"NVML can't find the job's GPUs ({error})")
        return []


class Gpu:
    """GPU or GPU partition (MIG). A measurement is None if the GPU does not support the measurement.

    This class has not been tested on a GPU yet.

    Args:
        nvml: Imported module pynvml.
        index: Index of the GPU among the job's GPUs on this host.
        uuid: UUID of the GPU, as torch reports it.
        report_problem: Function that receives messages about errors, except about unsupported measurements.
    """

    def __init__(self, nvml: Any, index: int, uuid: str, report_problem: Callable[[str], None]):
        self.nvml = nvml
        self.index = index
        self.report_problem = report_problem
        try:  # torch's UUID lacks NVML's prefix
            self.handle = nvml.nvmlDeviceGetHandleByUUID(f"GPU-{uuid}")
        except nvml.NVMLError_NotFound:  # the UUID may belong to a GPU partition
            self.handle = nvml.nvmlDeviceGetHandleByUUID(f"MIG-{uuid}")
        self.bit_by_reason: dict[str, int] = {}  # bit of each throttle reason in NVML's mask
        for throttle_reason in THROTTLE_REASONS:
            camel_case_reason = throttle_reason.title().replace("_", "")  # as in NVML's constants
            self.bit_by_reason[throttle_reason] = getattr(nvml, f"nvmlClocksEventReason{camel_case_reason}")
        self.first_energy_mj = self._read_nvml("TotalEnergyConsumption")

    def sample(self) -> dict[str, Any]:
        """Return the GPU's current measurements.

        `energy_wh` is the increase in the GPU's energy counter since this object was created.
        """
        utilisation_rates = self._read_nvml("UtilizationRates")
        gpu_memory = self._read_nvml("MemoryInfo")
        power_mw = self._read_nvml("PowerUsage")
        energy_mj = self._read_nvml("TotalEnergyConsumption")
        used_energy_wh = None
        if energy_mj is not None and self.first_energy_mj is not None:
            used_energy_wh = round((energy_mj - self.first_energy_mj) / MILLIJOULES_PER_WH, 4)
        throttle_bits = self._read_nvml("CurrentClocksEventReasons")
        throttle_reasons = None
        if throttle_bits is not None:
            throttle_reasons = [reason for reason, bit in self.bit_by_reason.items() if throttle_bits & bit]
        return {
            "index": self.index,
            "utilisation_pct": utilisation_rates and utilisation_rates.gpu,
            "memory_gib": gpu_memory and round(gpu_memory.used / GIB, 3),
            "power_w": None if power_mw is None else power_mw / 1e3,
            "temperature_c": self._read_nvml("Temperature", self.nvml.NVML_TEMPERATURE_GPU),
            "sm_clock_mhz": self._read_nvml("ClockInfo", self.nvml.NVML_CLOCK_SM),
            "throttle": throttle_reasons,
            "energy_wh": used_energy_wh,
        }

    def _read_nvml(self, nvml_quantity: str, *nvml_arguments: Any) -> Any:
        """Return the result of nvmlDeviceGet<nvml_quantity>(), or None if it is unsupported or fails.

        Failures are reported.
        """
        try:
            read_quantity = getattr(self.nvml, f"nvmlDeviceGet{nvml_quantity}")
            return read_quantity(self.handle, *nvml_arguments)
        except self.nvml.NVMLError_NotSupported:
            return None
        except self.nvml.NVMLError as error:
            self.report_problem(f"NVML could not read {nvml_quantity} of GPU {self.index} ({error})")
            return None
