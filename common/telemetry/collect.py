"""What each host does beside the training: processor, memory, network, disk, and the GPUs of the job.

A thread in the first process of each host takes a sample every --telemetry_s seconds. In the run's folder:

    telemetry-<host>.jsonl     a header at each start of the run, then the samples, an object a line
    nvidia-smi-<host>.txt      `nvidia-smi -q` at the start and after half of the steps, where there is one

The main process alone writes: of its own host at once; of the others what travels to it with each checkpoint
and at the end. A host that is lost takes its samples since the last checkpoint with it. All samples of a run
count, also those of steps that a restart did again. What fails here is said once and stops no training.
"""

import contextlib
import json
import re
import socket
from collections import defaultdict, deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from accelerate import Accelerator

from common.distributed.accelerator import device_name
from common.system.files import parse_json
from common.telemetry.sampler import Sampler

HOST_NUMBERS = (
    "cpu_pct",
    "memory_gib",
    "net_sent_mib_s",
    "net_received_mib_s",
    "disk_read_mib_s",
    "disk_written_mib_s",
)
GPU_NUMBERS = ("utilisation_pct", "memory_gib", "power_w", "temperature_c", "sm_clock_mhz")


@dataclass(frozen=True)
class Seat:
    """Where a process runs, as it tells the others."""

    host: str
    local_rank: int
    device: str
    gpu_uuid: str | None  # None on CPU


def own_seat(accelerator: Accelerator) -> Seat:
    on_gpu = accelerator.device.type == "cuda"
    uuid = str(torch.cuda.get_device_properties(accelerator.device).uuid) if on_gpu else None
    return Seat(socket.gethostname(), accelerator.local_process_index, device_name(accelerator), uuid)


@dataclass
class Host:
    name: str  # safe in file names, and of this host alone
    first_rank: int
    gpus: dict[str, str] = field(default_factory=dict)  # UUID -> name, of the job's alone


def hosts_of(seats: list[Seat]) -> list[Host]:
    """In the order of the ranks. One begins with each local rank 0, whatever it calls itself."""
    hosts: list[Host] = []
    for rank, seat in enumerate(seats):
        if seat.local_rank == 0:
            taken = {host.name for host in hosts}
            name, number = re.sub(r"[^A-Za-z0-9._-]", "_", seat.host), 1
            while (own := name if number == 1 else f"{name}-{number}") in taken:
                number += 1
            hosts.append(Host(own, rank))
        if seat.gpu_uuid:
            hosts[-1].gpus[seat.gpu_uuid] = seat.device
    return hosts


class Telemetry:
    """Of each process; the first one of a host samples it, the main one writes.

    seats: of all processes. folder: of the main process, None elsewhere. step: of the training, as it is now.
    steps: of the whole run.
    """

    def __init__(
        self,
        seats: list[Seat],
        rank: int,
        folder: Path | None,
        interval_s: float,
        step: Callable[[], int],
        steps: int,
    ):
        self.folder, self.said = folder, set()
        self.unsent: deque[tuple[str, str]] = deque()  # of another host: file name and text
        self.unlogged: deque[dict[str, Any]] = deque()  # of the main process: for the trackers
        self.host = next((host for host in hosts_of(seats) if host.first_rank == rank), None)
        self.sampler = None
        if self.host and interval_s:
            self.sampler = Sampler(
                self.host.name, self.host.gpus, interval_s, step, steps // 2, self._keep, self._complain
            )
            self.sampler.start()

    def stop(self) -> None:
        """After a last sample."""
        if self.sampler:
            self.sampler.stop()

    def take(self) -> list[tuple[str, str]]:
        """What this process has for the main one since the last call: names of files, and text for them."""
        return _drained(self.unsent)

    def append(self, pieces: list[tuple[str, str]]) -> None:
        """Of the main process: what the others had for it."""
        try:
            for name, text in pieces:
                self._append(name, text)
        except OSError as error:
            self._complain(str(error))

    def means(self) -> dict[str, float]:
        """Of the main process: its host since the last call, `telemetry/<name>`; empty without a sample."""
        values = defaultdict(list)
        for sample in _drained(self.unlogged):
            for name, value in _numbers(sample):
                values[f"telemetry/{name}"].append(value)
        return {name: fmean(measured) for name, measured in values.items()}

    def summaries(self) -> list[dict[str, Any]]:
        """Of the main process: of each host that the run has had."""
        found = []
        for file in sorted(self.folder.glob("telemetry-*.jsonl")):
            try:
                found.append(summary(file))
            except (OSError, ValueError) as error:
                self._complain(str(error))
        return found

    def _keep(self, record: dict[str, Any] | str) -> None:
        """In the sampler's thread."""
        is_sample = isinstance(record, dict)
        name = f"telemetry-{self.host.name}.jsonl" if is_sample else f"nvidia-smi-{self.host.name}.txt"
        text = json.dumps(record) + "\n" if is_sample else record
        if self.folder is None:
            self.unsent.append((name, text))
            return
        self._append(name, text)
        if is_sample and "step" in record:
            self.unlogged.append(record)

    def _append(self, name: str, text: str) -> None:
        with open(self.folder / name, "a+b") as file:
            if file.tell() and not _ends_a_line(file):  # it was cut by a full disk
                text = "\n" + text
            file.write(text.encode())

    def _complain(self, problem: str) -> None:
        if problem not in self.said:
            self.said.add(problem)
            print(f"telemetry is not complete: {problem}", flush=True)


def _ends_a_line(file: Any) -> bool:
    file.seek(-1, 2)
    return file.read(1) == b"\n"


def _drained(queue: deque) -> list:
    """While another thread appends to it."""
    return [queue.popleft() for _ in range(len(queue))]


def _numbers(sample: dict[str, Any]) -> Iterator[tuple[str, float]]:
    """Those that were measured, of GPUs as `gpu0_power_w`."""
    parts = [("", HOST_NUMBERS, sample)]
    parts += [(f"gpu{gpu['index']}_", GPU_NUMBERS, gpu) for gpu in sample.get("gpus", [])]
    for prefix, names, values in parts:
        yield from ((prefix + name, values[name]) for name in names if values[name] is not None)


# --- What came out


def summary(file: Path) -> dict[str, Any]:
    """Of one telemetry-<host>.jsonl, over all starts: means, of memory and temperature the largest.

    None is what was never measured. energy_wh: of all GPUs and starts; None unless each tells its energy or
    its power. throttled_pct: samples of a GPU that had a reason to be slower; throttle: the reasons.
    ValueError for a file with other lines than telemetry's.
    """
    samples, gpus, starts = 0, 0, 0
    values, reasons = defaultdict(_Values), set()
    energies: dict[tuple[int, int], _Energy] = defaultdict(_Energy)  # of each start and GPU
    try:
        for line in _lines(file):
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
                energies[starts, gpu["index"]].add(line["t"], gpu)
    except (KeyError, TypeError, AttributeError):
        raise ValueError(f"{file} has lines that are no telemetry") from None
    return {
        "host": file.stem.removeprefix("telemetry-"),
        "samples": samples,
        "gpus": gpus,
        "utilisation_pct": values["gpu_utilisation_pct"].mean(),
        "gpu_memory_gib": values["gpu_memory_gib"].largest,
        "power_w": values["gpu_power_w"].mean(),
        "temperature_c": values["gpu_temperature_c"].largest,
        "sm_clock_mhz": values["gpu_sm_clock_mhz"].mean(),
        "throttled_pct": values["throttled"].mean(),
        "throttle": sorted(reasons),
        "energy_wh": _total([energy.wh() for energy in energies.values()]),
        **{name: values[name].mean() for name in HOST_NUMBERS},
        "memory_gib": values["memory_gib"].largest,
    }


def energy_wh(summaries: list[dict[str, Any]]) -> float | None:
    """Over all hosts; None where the GPUs of one of them did not tell, or there are none."""
    return _total([host["energy_wh"] for host in summaries if host["gpus"]])


def _total(numbers: list[float | None]) -> float | None:
    """None unless all are there."""
    return sum(numbers) if numbers and None not in numbers else None


def _lines(file: Path) -> Iterator[dict[str, Any]]:
    """One at a time, as a day has 86,400; without those that were cut by a kill or a full disk."""
    with open(file, errors="replace") as texts:
        for text in texts:
            with contextlib.suppress(ValueError):
                yield parse_json(text, file)


class _Values:
    """Mean and maximum of what was measured."""

    def __init__(self) -> None:
        self.sum, self.count, self.largest = 0.0, 0, None

    def add(self, value: float | None) -> None:
        if value is not None:
            self.sum, self.count = self.sum + value, self.count + 1
            self.largest = value if self.largest is None else max(self.largest, value)

    def mean(self) -> float | None:
        return self.sum / self.count if self.count else None


class _Energy:
    """Of one GPU in one start: by its counter, else the integral of its power."""

    def __init__(self) -> None:
        self.counted_wh: float | None = None
        self.integral_wh: float | None = None
        self.before: tuple[float, float] | None = None  # when, and its power then

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
