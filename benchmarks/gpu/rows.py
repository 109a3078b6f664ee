"""Rows of the GPU suite: a measurement or a check, what came out, and how a row runs commands."""

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
PACKAGES = {"zero": "deepspeed", "vit": "timm", "hello": "matplotlib"}  # what a row with this word needs


class Skip(Exception):
    """Raised by a row that can't run here; its text says why."""


@dataclass(frozen=True)
class Result:
    """What a row found. value: in `unit`. expected: the estimate of a measurement, or what a check promises.

    verdict: ok or FAIL, of a check or a measurement with a goal. kernels: the dearest, as (name, ms a step,
    count a step).
    """

    value: Any = ""
    unit: str = ""
    expected: Any = ""
    verdict: str = ""
    note: str = ""
    kernels: tuple[tuple[str, float, float], ...] = ()


@dataclass
class Setting:
    """Where a section runs. folder: its own. data: `--data` of images of 32 pixels. ends_at: time.time().

    dry_run: on a CPU, where no goal counts. small: a few steps of small models. command_s: a command that
    takes longer hangs. failures: the file for the whole output of failed rows.
    """

    folder: Path
    data: str
    gpus: int
    dry_run: bool
    ends_at: float
    command_s: float = 900
    failures: Path | None = None
    small: bool | None = None

    def size(self, full: Any, dry: Any) -> Any:
        """The number of steps, images or bytes: a few in a dry run."""
        return dry if self.is_small else full

    def judge(self, reached: bool) -> str:
        """The verdict about a goal."""
        return "" if self.is_small else OK if reached else FAIL

    @property
    def is_small(self) -> bool:
        return self.dry_run if self.small is None else self.small

    @property
    def left_s(self) -> float:
        return self.ends_at - time.time()


def check(holds: bool, value: Any = "", unit: str = "", promised: Any = "", note: str = "") -> Result:
    """The result of a check."""
    return Result(value, unit, promised, OK if holds else FAIL, note)


# A row's function returns one result, or several by the rest of their names.
Row = Callable[[Setting], Result | dict[str, Result]]
_this = threading.local()  # .outputs: of the commands that this thread's row has run


def row(find: Callable, *words: Any) -> Row:
    """The row that is found by find(setting, *words)."""
    return lambda setting: find(setting, *words)


def on_gpu(find: Callable, *words: Any) -> Row:
    """row(), which a dry run leaves out: on a CPU it shows what another row shows."""

    def only(setting: Setting) -> Result | dict[str, Result]:
        if setting.dry_run:
            raise Skip("not in a dry run")
        return find(setting, *words)

    return only


def run_rows(
    rows: dict[str, Row], setting: Setting, at_once: int = 1
) -> Generator[dict[str, Any], None, None]:
    """Runs the rows, and yields each as JSON when it ends. A row that raises has failed; the others go on."""
    threads = ThreadPoolExecutor(at_once)
    try:
        for ended in as_completed([threads.submit(run_row, *row, setting) for row in rows.items()]):
            yield from ended.result()
    finally:
        setting.ends_at = 0  # for those that still run, if this is not the end
        threads.shutdown(wait=False, cancel_futures=True)


def run_row(name: str, row: Row, setting: Setting) -> list[dict[str, Any]]:
    began, _this.outputs = time.monotonic(), []
    missing = [p for word, p in PACKAGES.items() if word in name and not importlib.util.find_spec(p)]
    found: Result | dict[str, Result]
    try:
        if missing:
            raise Skip(f"{missing[0]} is not installed")
        if setting.left_s <= 0:
            raise Skip("did not fit into the section's time")
        found = row(setting)
    except Skip as reason:
        found = Result(verdict=SKIPPED, note=str(reason))
    except Exception as error:  # a failed row must not end the others
        _this.outputs.append(traceback.format_exc())
        found = Result(verdict=FAIL, note=f"{type(error).__name__}: {str(error)[-300:]}")
        if setting.left_s <= 0:
            found = Result(verdict=SKIPPED, note="the section's time ended during this row")
    results = {"": found} if isinstance(found, Result) else found
    if setting.failures and any(result.verdict == FAIL for result in results.values()):
        with setting.failures.open("a") as file:
            file.write("\n".join([f"=== {setting.folder.name}: {name}", *_this.outputs, ""]))
    seconds = round(time.monotonic() - began, 1)
    return [
        {"row": ", ".join(filter(None, (name, part))), **_cells(setting, result), "seconds": seconds}
        for part, result in results.items()
    ]


def _cells(setting: Setting, found: Result) -> dict[str, Any]:
    cells = asdict(found)
    numbers = isinstance(found.value, (int, float)) and isinstance(found.expected, (int, float))
    if numbers and found.expected and not found.verdict and not setting.is_small:
        cells["verdict"] = OFF if abs(found.value / found.expected - 1) > 0.5 else ""
    return cells


def once(make: Callable) -> Callable:
    """make(setting, *words), called once in a section: the first row that needs it does, others wait."""
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
    """The end of a command. status: None when it did not end in time."""

    status: int | None
    output: str


@contextlib.contextmanager
def started(words: list[Any], output: IO[str], env: dict[str, str] | None = None) -> Iterator[psutil.Popen]:
    """A Python command of the project, of which nothing lives on."""
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
        with contextlib.suppress(psutil.Error):  # a launcher's ranks have sessions of their own
            kill([*process.children(recursive=True), process])
            process.wait(5)


def command(setting: Setting, words: list[Any], env: dict[str, str] | None = None) -> Done:
    """Runs a command until its end, or the section's."""
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
    """The command's last line. RuntimeError with the last ones when it fails, or does not end in time."""
    done = command(setting, words, env)
    last = [line for line in done.output.splitlines() if line.strip()][-3:]
    if done.status != 0:
        how = "did not end in time" if done.status is None else f"exit status {done.status}"
        raise RuntimeError(f"{how}: {' | '.join(last)}")
    return last[-1] if last else ""


def run_flags(setting: Setting, folder: Path, words: list[Any]) -> list[Any]:
    """Flags of a run that keeps to the suite's scratch folder."""
    flags = ["--trackers", "none", "--output_dir", folder]
    return flags if "train_hello.py" in words else [*flags, "--cache_dir", setting.folder.parent / "cache"]


def train(
    setting: Setting, name: str, words: list[Any], *flags: Any, env: dict[str, str] | None = None
) -> tuple[Path, dict[str, Any]]:
    """Trains by this launcher and script. Returns the run's folder and result.json."""
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
    """Run trainings one after another in one process, or in one launch. Each command names its --output_dir.

    One that fails ends no other; its run folder has no result that says `finished`.
    """
    spec = setting.folder / f"{name}.json"
    spec.write_text(json.dumps([list(map(str, words)) for words in commands]))
    command(setting, [*launcher, spec], env)


@contextlib.contextmanager
def trained(setting: Setting, name: str, *words: Any, **named: Any) -> Iterator[tuple[Path, dict[str, Any]]]:
    """train(), whose folder is removed once it is read."""
    folder, result = train(setting, name, *words, **named)
    yield folder, result
    shutil.rmtree(folder)


def small_images(setting: Setting, script: str) -> list[Any]:
    """A train script on images of 32 pixels; small in a dry run."""
    words = [f"{script}.py", "--data", setting.data]
    if script == "train_vit":
        small = ["--model", "test_vit", "--image_size", 32, "--patch_size", 8, "--batch_size", 64]
        return [*words, *small] if setting.is_small else [*words, "--batch_size", 512]
    widths = {"train_cnn_a": ["--widths", "8,8,32"], "train_cnn_b": ["--width", 8]}[script]
    return [*words, "--batch_size", 64, *widths] if setting.is_small else words
