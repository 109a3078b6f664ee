"""Rows of the GPU suite: a measurement or a check, what came out, and how its section runs commands."""

import importlib.util
import json
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from common.batch_search import LaunchResult, launch

OK, FAIL, SKIPPED = "ok", "FAIL", "skipped"
END_TO_END = 0.95  # goal: a training's speed, divided by that on a batch that stays on the device
PACKAGES = {"zero": "deepspeed", "vit": "timm"}  # what a row with this word in its name needs


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
    """Where a section runs. folder: its own. data: `--data` of images of 32 pixels. ends_at: time.time()."""

    folder: Path
    data: str
    gpus: int
    dry_run: bool
    ends_at: float

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


def run_rows(rows: dict[str, Row], setting: Setting) -> Iterator[dict[str, Any]]:
    """Runs each row, and yields it as JSON. A row that raises has failed; the next one runs all the same."""
    for name, row in rows.items():
        began = time.monotonic()
        missing = [p for word, p in PACKAGES.items() if word in name and not importlib.util.find_spec(p)]
        try:
            if missing:
                raise Skip(f"{missing[0]} is not installed")
            found = row(setting)
        except Skip as reason:
            found = Result(verdict=SKIPPED, note=str(reason))
        except Exception as error:  # a failed row must not end the others
            found = Result(verdict=FAIL, note=f"{type(error).__name__}: {str(error)[-300:]}")
        yield {"row": name, **vars(found), "seconds": round(time.monotonic() - began, 1)}


# --- Commands of the project


def command(setting: Setting, words: list[Any], env: dict[str, str] | None = None) -> LaunchResult:
    """Runs a Python command of the project until its end, or the section's."""
    given = [f"{name}={value}" for name, value in (env or {}).items()]
    words = [*(["env", *given] if given else []), sys.executable, *map(str, words)]
    return launch(words, None, max(1.0, setting.left_s))


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
    common = ["--trackers", "none", "--cache_dir", setting.folder.parent / "cache", "--output_dir", folder]
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
