"""Define the rows of the GPU suite, which are measurements or checks, and run commands for them."""

import contextlib
import importlib.util
import json
import os
import shutil
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections import defaultdict
from collections.abc import Callable, Generator, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import asdict, dataclass
from functools import wraps
from pathlib import Path
from typing import IO, Any, NamedTuple

import psutil

from onecurve.system.processes import end_with_parent, kill

OK, FAIL, SKIPPED, OFF = "ok", "FAIL", "skipped", "off by half"
# Package that a row needs if its name contains the key
PACKAGES = {"zero": "deepspeed", "vit": "timm", "hello": "matplotlib"}


class Skip(Exception):
    """Exception that a row raises if it can't run on this machine. The text states the reason."""


@dataclass(frozen=True)
class Result:
    """Result of a row."""

    value: Any = ""
    unit: str = ""
    expected: Any = ""  # expected value of a measurement, or the promise that a check verifies
    verdict: str = ""  # ok or FAIL for a check or a measurement with a goal
    note: str = ""
    kernels: tuple[tuple[str, float, float], ...] = ()  # name, ms per step and number of launches per step


@dataclass
class Setting:
    """Settings of a section."""

    folder: Path  # folder that only this section uses
    data: str  # --data with images of 32 pixels
    gpus: int
    dry_run: bool  # True for a few steps of small models on a CPU, where goals do not apply
    ends_at: float  # deadline (time.time())
    command_s: float = 900  # timeout of a command
    failures: Path | None = None  # file for failed rows' complete output

    def size(self, full: Any, dry: Any) -> Any:
        """Return the number of steps, images or bytes for a full or a dry run."""
        return dry if self.dry_run else full

    def judge(self, reached: bool) -> str:
        """Return the verdict for a goal."""
        return "" if self.dry_run else OK if reached else FAIL

    @property
    def left_s(self) -> float:
        return self.ends_at - time.time()


def check(holds: bool, value: Any = "", unit: str = "", promised: Any = "", note: str = "") -> Result:
    """Return the result of a check."""
    return Result(value, unit, promised, OK if holds else FAIL, note)


# Function that returns one result, or a dict of results whose keys are appended to the row's name
Row = Callable[[Setting], Result | dict[str, Result]]
_this = threading.local()  # `outputs` contains the output of all commands that this thread's row ran


def row(measure: Callable, *words: Any) -> Row:
    """Return a row that calls measure(setting, *words)."""
    return lambda setting: measure(setting, *words)


def on_gpu(measure: Callable, *words: Any) -> Row:
    """Return a row that a dry run skips, because another row tests the same behaviour on a CPU."""

    def measure_on_gpu(setting: Setting) -> Result | dict[str, Result]:
        if setting.dry_run:
            raise Skip("a dry run does not include this row")
        return measure(setting, *words)

    return measure_on_gpu


def run_rows(
    rows: dict[str, Row], setting: Setting, at_once: int = 1
) -> Generator[dict[str, Any], None, None]:
    """Run all rows, and yield each row as a dict when it ends. A failed row does not end the other rows."""
    threads = ThreadPoolExecutor(at_once)
    try:
        for ended in as_completed([threads.submit(run_row, *row, setting) for row in rows.items()]):
            yield from ended.result()
    finally:
        setting.ends_at = 0  # end the rows that are still running
        threads.shutdown(wait=False, cancel_futures=True)


def run_row(name: str, row: Row, setting: Setting) -> list[dict[str, Any]]:
    """Run a row and return one dict per result."""
    began, _this.outputs = time.monotonic(), []
    missing = [p for word, p in PACKAGES.items() if word in name and not importlib.util.find_spec(p)]
    outcome: Result | dict[str, Result]
    try:
        if missing:
            raise Skip(f"{missing[0]} is not installed")
        if setting.left_s <= 0:
            raise Skip("the row did not fit into the section's time")
        outcome = row(setting)
    except Skip as reason:
        outcome = Result(verdict=SKIPPED, note=str(reason))
    except Exception as error:  # continue with the other rows after any error
        _this.outputs.append(traceback.format_exc())
        outcome = Result(verdict=FAIL, note=f"{type(error).__name__}: {str(error)[-300:]}")
        if setting.left_s <= 0:
            outcome = Result(verdict=SKIPPED, note="the section's time ended during this row")
    results = {"": outcome} if isinstance(outcome, Result) else outcome
    if setting.failures and any(result.verdict == FAIL for result in results.values()):
        with setting.failures.open("a") as file:
            file.write("\n".join([f"=== {setting.folder.name}: {name}", *_this.outputs, ""]))
    seconds = round(time.monotonic() - began, 1)
    return [
        {"row": ", ".join(filter(None, (name, part))), **_cells(setting, result), "seconds": seconds}
        for part, result in results.items()
    ]


def _cells(setting: Setting, result: Result) -> dict[str, Any]:
    cells = asdict(result)
    are_numbers = isinstance(result.value, (int, float)) and isinstance(result.expected, (int, float))
    if are_numbers and result.expected and not result.verdict and not setting.dry_run:
        cells["verdict"] = OFF if abs(result.value / result.expected - 1) > 0.5 else ""
    return cells


def once(make: Callable) -> Callable:
    """Cache the result of make(setting, *words) for each section.

    While the first row computes a result, other rows wait.
    """
    made: dict[tuple, Any] = {}
    locks: defaultdict[tuple, threading.Lock] = defaultdict(threading.Lock)

    @wraps(make)
    def get(setting: Setting, *words: Any) -> Any:
        key = (setting.folder, *words)
        with locks[key]:
            if key not in made:
                made[key] = make(setting, *words)
            return made[key]

    return get


# --- Commands of the project


class Done(NamedTuple):
    """Exit status and output of a command."""

    status: int | None  # None if the command timed out
    output: str


@contextlib.contextmanager
def started(words: list[Any], output: IO[str], env: dict[str, str] | None = None) -> Iterator[psutil.Popen]:
    """Start a Python command in this project. At the end of the block, kill all its remaining processes."""
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
        yield process
    finally:
        with contextlib.suppress(psutil.Error):  # a launcher's ranks run in separate sessions
            kill([*process.children(recursive=True), process])
            process.wait(5)


def command(setting: Setting, words: list[Any], env: dict[str, str] | None = None) -> Done:
    """Run a command until it ends, its timeout expires, or the section's deadline has passed."""
    with tempfile.TemporaryFile("w+", errors="replace") as output:
        with started(words, output, env) as process:
            try:
                status = process.wait(max(1.0, min(setting.command_s, setting.left_s)))
            except psutil.TimeoutExpired:
                status = None
        output.seek(0)
        text = output.read()
    if not hasattr(_this, "outputs"):
        _this.outputs = []
    _this.outputs.append(f"--- python {' '.join(map(str, words))}\n{text}--- exit status {status}")
    return Done(status, text)


def succeeds(setting: Setting, words: list[Any], env: dict[str, str] | None = None) -> str:
    """Run a command and return the last line of its output.

    Raises:
        RuntimeError: If the command failed or timed out. The message contains the last part of the command's
            output.
    """
    done = command(setting, words, env)
    last = [line for line in done.output.splitlines() if line.strip()][-3:]
    if done.status != 0:
        reason = "the command did not end in time" if done.status is None else f"exit status {done.status}"
        raise RuntimeError(f"{reason}: {' | '.join(last)}")
    return last[-1] if last else ""


def run_flags(setting: Setting, folder: Path, words: list[Any]) -> list[Any]:
    """Return the flags that make a run write only to the suite's scratch folder."""
    flags = ["--trackers", "none", "--output_dir", folder]
    return flags if "train_hello.py" in words else [*flags, "--cache_dir", setting.folder.parent / "cache"]


def train(
    setting: Setting, name: str, words: list[Any], *flags: Any, env: dict[str, str] | None = None
) -> tuple[Path, dict[str, Any]]:
    """Run a train script with a launcher, and return the run folder and the contents of result.json."""
    folder = setting.folder / name.replace(" ", "_").replace("/", "_")
    succeeds(setting, [*words, *run_flags(setting, folder, words), *flags], env)
    return folder, json.loads((folder / "result.json").read_text())


def train_all(
    setting: Setting,
    name: str,
    commands: list[list[Any]],
    launcher: Sequence[Any] = ("-m", "benchmarks.gpu.trainings"),
    env: dict[str, str] | None = None,
) -> None:
    """Run several training commands in turn in one process or one launch.

    Each command must pass --output_dir.

    A failed run does not end the other runs. A failed run's folder contains no result with the status
    `finished`.
    """
    spec = setting.folder / f"{name}.json"
    spec.write_text(json.dumps([list(map(str, words)) for words in commands]))
    command(setting, [*launcher, spec], env)


@contextlib.contextmanager
def trained(setting: Setting, name: str, *words: Any, **named: Any) -> Iterator[tuple[Path, dict[str, Any]]]:
    """Call train(), and remove the run folder at the end of the block."""
    folder, result = train(setting, name, *words, **named)
    yield folder, result
    shutil.rmtree(folder)


def small_images(setting: Setting, script: str) -> list[Any]:
    """Return a train script with flags for images of 32 pixels.

    In a dry run, the flags select a small model.
    """
    words = [f"{script}.py", "--data", setting.data]
    if script == "train_vit":
        small = ["--model", "test_vit", "--image_size", 32, "--patch_size", 8, "--batch_size", 64]
        return [*words, *small] if setting.dry_run else [*words, "--batch_size", 512]
    widths = {"train_cnn_a": ["--widths", "8,8,32"], "train_cnn_b": ["--width", 8]}[script]
    return [*words, "--batch_size", 64, *widths] if setting.dry_run else words
