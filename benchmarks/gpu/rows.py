"""Rows of the GPU suite: a measurement or a check, what came out, and how its section runs commands."""

import contextlib
import importlib.util
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import psutil
import torch

from common.system.processes import end_with_parent, kill

OK, FAIL, SKIPPED = "ok", "FAIL", "skipped"
END_TO_END = 0.95  # goal: a training's speed, divided by that on a batch that stays on the device
PACKAGES = {"zero": "deepspeed", "vit": "timm"}  # what a row with this word in its name needs


CHECK_CORES, CHECK_GIB = 4, 24  # processor cores and GPU memory for each of several checks at once


class Skip(Exception):
    """Raised by a row that can't run here; its text says why."""


@dataclass(frozen=True)
class Result:
    """What a row found. value: in `unit`. verdict: ok or FAIL; empty for a measurement without a goal."""

    value: Any = ""
    unit: str = ""
    verdict: str = ""
    note: str = ""


def judged(value: float, unit: str, goal: float, note: str = "") -> Result:
    """A measurement beside the goal that it should reach."""
    reached = OK if value >= goal else FAIL
    return Result(value, unit, reached, f"goal {goal:,g}{'; ' if note else ''}{note}")


@dataclass(frozen=True)
class Setting:
    """Where a section runs. folder: its own. data: `--data` of images of 32 pixels. ends_at: time.time().

    command_s: a command that takes longer hangs.
    """

    folder: Path
    data: str
    gpus: int
    dry_run: bool
    ends_at: float
    command_s: float = 900

    def size(self, full: int, dry: int) -> int:
        """The number of steps, images or bytes: a few in a dry run."""
        return dry if self.dry_run else full

    @property
    def device(self) -> torch.device:
        return torch.device("cpu" if self.dry_run else "cuda")

    @property
    def left_s(self) -> float:
        return self.ends_at - time.time()


Row = Callable[[Setting], Result]


def need_gpu(setting: Setting) -> None:
    if setting.dry_run:
        raise Skip("needs a GPU")


def run_rows(rows: dict[str, Row], setting: Setting, at_once: int = 1) -> Iterator[dict[str, Any]]:
    """Runs the rows, and yields each as JSON when it ends. A row that raises has failed; the others go on.

    One after another they run in the main thread, where alone a row may handle signals.
    """
    if at_once == 1:
        yield from (run_row(name, row, setting) for name, row in rows.items())
        return
    with ThreadPoolExecutor(at_once) as threads:
        for ended in as_completed([threads.submit(run_row, *row, setting) for row in rows.items()]):
            yield ended.result()


def run_row(name: str, row: Row, setting: Setting) -> dict[str, Any]:
    began = time.monotonic()
    missing = [p for word, p in PACKAGES.items() if word in name and not importlib.util.find_spec(p)]
    try:
        if missing:
            raise Skip(f"{missing[0]} is not installed")
        if setting.left_s <= 0:
            raise Skip("did not fit into the section's time")
        found = row(setting)
    except Skip as reason:
        found = Result(verdict=SKIPPED, note=str(reason))
    except Exception as error:  # a failed row must not end the others
        found = Result(verdict=FAIL, note=f"{type(error).__name__}: {str(error)[-300:]}")
        if setting.left_s <= 0:
            found = Result(verdict=SKIPPED, note="the section's time ended during this row")
    return {"row": name, **vars(found), "seconds": round(time.monotonic() - began, 1)}


def checks_at_once(setting: Setting) -> int:
    """Number of rows that may run at the same time when they measure no time."""
    if setting.dry_run:
        return 1
    free_gib = torch.cuda.mem_get_info()[0] / 2**30
    return max(1, min(len(os.sched_getaffinity(0)) // CHECK_CORES, int(free_gib // CHECK_GIB)))


_working: defaultdict[Path, threading.Lock] = defaultdict(threading.Lock)


def one_at_a_time(folder: Path) -> threading.Lock:
    """The lock of a run that several rows need: the first one trains it, the others wait."""
    return _working[folder]


# --- Commands of the project


class Done(NamedTuple):
    """The end of a command. status: None when it did not end in time."""

    status: int | None
    output: str


def command(setting: Setting, words: list[Any], env: dict[str, str] | None = None) -> Done:
    """Runs a Python command of the project until its end, or the section's. Nothing of it lives on."""
    with tempfile.TemporaryFile("w+", errors="replace") as output:
        process = psutil.Popen(
            [sys.executable, *map(str, words)],
            env=os.environ | (env or {}),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            preexec_fn=end_with_parent,
        )
        try:
            status = process.wait(max(1.0, min(setting.command_s, setting.left_s)))
        except psutil.TimeoutExpired:
            status = None
        finally:
            kill_all(process)
        output.seek(0)
        return Done(status, output.read())


def kill_all(process: psutil.Process) -> None:
    """Kills a process and what runs below it: a launcher's ranks have sessions of their own."""
    with contextlib.suppress(psutil.Error):
        kill([*process.children(recursive=True), process])
        process.wait(5)


def succeeds(setting: Setting, words: list[Any], env: dict[str, str] | None = None) -> str:
    """The command's output. RuntimeError with its last lines when it fails, or does not end in time."""
    done = command(setting, words, env)
    if done.status != 0:
        last = [line for line in done.output.splitlines() if line.strip()][-3:]
        how = "did not end in time" if done.status is None else f"exit status {done.status}"
        raise RuntimeError(f"{how}: {' | '.join(last)}")
    return done.output


def train(
    setting: Setting, name: str, words: list[Any], *flags: Any, env: dict[str, str] | None = None
) -> tuple[Path, dict[str, Any]]:
    """Trains by this launcher and script. Returns the run's folder and result.json."""
    folder = setting.folder / name.replace(" ", "_").replace("/", "_")
    common = ["--trackers", "none", "--output_dir", folder]
    if "train_hello.py" not in words:  # it has no images
        common += ["--cache_dir", setting.folder.parent / "cache"]
    succeeds(setting, [*words, *common, *flags], env)
    return folder, json.loads((folder / "result.json").read_text())


def torchrun(processes: int) -> list[str]:
    return ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={processes}"]


def small_images(setting: Setting, script: str) -> list[Any]:
    """A train script on images of 32 pixels; in a dry run on digits, and small."""
    words = [f"{script}.py", "--data", setting.data]
    if script == "train_vit":
        small = ["--model", "test_vit", "--image_size", 32, "--patch_size", 8, "--batch_size", 64]
        return [*words, *small] if setting.dry_run else [*words, "--batch_size", 512]
    widths = {"train_cnn_a": ["--widths", "8,8,32"], "train_cnn_b": ["--width", 8]}[script]
    return [*words, "--batch_size", 64, *widths] if setting.dry_run else words


FSDP = {
    "ACCELERATE_USE_FSDP": "true",
    "FSDP_VERSION": "2",
    "FSDP_AUTO_WRAP_POLICY": "TRANSFORMER_BASED_WRAP",
    "FSDP_RESHARD_AFTER_FORWARD": "true",
    "FSDP_STATE_DICT_TYPE": "SHARDED_STATE_DICT",
}


def strategy(name: str, processes: int) -> tuple[list[str], list[str], dict[str, str]]:
    """Launcher, flags and environment of a strategy: ddp, fsdp, zero1, zero2 or zero3."""
    flags = ["--deepspeed_config", f"ds_configs/{name}.json"] if name.startswith("zero") else []
    return torchrun(processes), flags, FSDP if name == "fsdp" else {}


STRATEGIES = ("ddp", "fsdp", "zero1", "zero2", "zero3")
