"""Measures the machine at hand for plan.py: its device, a step under each engine, gloo's collectives.

Each measurement runs in processes of its own. On a CPU several of them can run at once, each on cores of its
own, as they do where virtual hosts or a rehearsal's processes share the machine: then a step takes as long as
the slowest of them.
"""

import json
import math
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from common.planning.result import Collectives, Costs, Measured
from common.system.paths import ROOT
from common.telemetry.flops import Device, find_device, measured_flops

COPIED = 2**24  # fp32 numbers: 64 MiB


@dataclass(frozen=True)
class Calibration:
    """The machine at hand. processes: so many measure at once, and share its cores."""

    device: Device
    processes: int
    collectives: Collectives | None  # of gloo; None on a GPU, where NCCL exchanges

    @property
    def on_cpu(self) -> bool:
        return self.collectives is not None


def calibrate(processes: int) -> Calibration:
    """Measures what does not depend on the script. ValueError where several processes would share a GPU."""
    if torch.cuda.is_available():
        name = torch.cuda.get_device_name()
        if processes > 1:
            raise ValueError(f"--measure {processes}: only processes on a CPU share a machine: leave it out")
        if not (device := find_device(name)):
            raise ValueError(f"--measure: {name} is not in common/telemetry/devices.yaml: add its row there")
        return Calibration(device, 1, None)
    if processes > (cores := len(os.sched_getaffinity(0))):
        raise ValueError(f"--measure {processes}: this machine has {cores} cores: choose at most {cores}")
    return Calibration(this_cpu(processes), processes, measured_collectives())


def this_cpu(processes: int) -> Device:
    """This machine's CPU as a device: a process's part of its cores, and of its memory."""
    before = torch.get_num_threads()
    torch.set_num_threads(len(_cores(0, processes)))
    try:
        kinds = {"fp32": torch.float32, "bf16": torch.bfloat16}
        peaks = {name: measured_flops(kind) / 1e12 for name, kind in kinds.items()}
        copying_s = _fastest_copy()
    finally:
        torch.set_num_threads(before)
    return Device(
        name=f"CPU ({platform.machine()})",  # as runs name it
        peaks=peaks,
        memory_gb=os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 1e9 / processes,
        memory_gb_s=2 * COPIED * 4 / copying_s / 1e9,
        link="loopback",
        link_gb_s=math.inf,  # what it takes is in the collectives' own time
        source="measured",
    )


def _fastest_copy() -> float:
    """Seconds to copy COPIED numbers, the fastest of some: the first ones get the memory."""
    source, target = torch.ones(COPIED), torch.empty(COPIED)
    seconds = []
    for _ in range(4):
        began = time.perf_counter()
        target.copy_(source)
        seconds.append(time.perf_counter() - began)
    return min(seconds)


def measured_step(
    config_file: str, size: int, script: Sequence[str], compression: str, processes: int
) -> Measured:
    """An engine's step on a micro-batch of `size` images, in so many processes at once."""
    words = ["common.planning.measure", config_file, str(size), compression, *script]
    started = [_Process(words, _cores(number, processes)) for number in range(processes)]
    try:
        for process in started:
            process.await_line("ready")
        for process in started:
            process.say("go")
        return slowest([json.loads(process.await_line("[")) for process in started])
    finally:
        for process in started:
            process.end()


def slowest(runs: Sequence[Sequence[dict[str, Any]]]) -> Measured:
    """Medians of the steps, each the slowest of those that ran at once; the buckets are the middle step's."""
    steps = sorted((max(together, key=_length) for together in zip(*runs, strict=True)), key=_length)
    names = ("forward_s", "backward_s", "optimizer_s")
    medians = {name: statistics.median(step[name] for step in steps) for name in names}
    return Measured(**medians, buckets=[(at, moved) for at, moved in steps[len(steps) // 2]["buckets"]])


def _length(step: dict[str, Any]) -> float:
    return step["forward_s"] + step["backward_s"] + step["optimizer_s"]


def measured_collectives() -> Collectives:
    """gloo's collectives between two processes of this machine, on cores of their own where there are two."""
    several = min(2, len(os.sched_getaffinity(0)))
    with tempfile.TemporaryDirectory() as scratch:
        words = ["common.planning.collectives", f"{scratch}/store"]
        pair = [_Process([*words, str(number)], _cores(number % several, several)) for number in range(2)]
        try:
            found = json.loads(pair[0].await_line("{"))
        finally:
            for process in pair:
                process.end()
    return {kind: Costs(*numbers) for kind, numbers in found.items()}


def _cores(number: int, processes: int) -> set[int]:
    """The cores of one of several processes that share this machine: an equal part each."""
    cores = sorted(os.sched_getaffinity(0))
    each = max(1, len(cores) // processes)
    return set(cores[number * each : (number + 1) * each])


class _Process:
    """A module of ours as a process on some cores, which says lines and is answered."""

    def __init__(self, words: list[str], cores: set[int]):
        env = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": str(len(cores))}
        if not torch.cuda.is_available():
            env["CUDA_VISIBLE_DEVICES"] = ""
        self.errors = tempfile.TemporaryFile("w+")  # noqa: SIM115
        self.process = subprocess.Popen(
            [sys.executable, "-m", *words],
            env=env,
            text=True,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self.errors,
        )
        os.sched_setaffinity(self.process.pid, cores)

    def say(self, line: str) -> None:
        assert self.process.stdin
        self.process.stdin.write(f"{line}\n")
        self.process.stdin.flush()

    def await_line(self, begin: str) -> str:
        """The next line that begins so. ValueError with its last words where the process ends before."""
        assert self.process.stdout
        for line in self.process.stdout:
            if line.startswith(begin):
                return line
        self.errors.seek(0)
        said = [line.strip() for line in self.errors if line.strip()]
        raise ValueError(
            f"--measure: {said[-1].removeprefix('error: ') if said else 'the process was killed'}"
        )

    def end(self) -> None:
        self.process.kill()
        self.process.communicate()
        self.errors.close()
