"""What the benchmarks share: arms that take turns, medians and ratios of the rounds, and a table of them."""

import argparse
import contextlib
import io
import json
import os
import statistics
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

from onecurve.system.cli import command_parser
from onecurve.system.env import rank

if TYPE_CHECKING:  # what trains is imported by train_watched alone
    from onecurve.numerics.order import Steps
    from onecurve.run.run import Run

Rounds = list[dict[str, float]]  # each arm's number, by round


def benchmark_parser(doc: str | None, rounds: int) -> argparse.ArgumentParser:
    parser = command_parser(doc)
    parser.add_argument("--rounds", type=positive, default=rounds, help="(default: %(default)s)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the numbers of all rounds there")
    return parser


def positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError("must be at least 1")
    return number


def in_turn(arms: dict[str, Callable[[], float]], rounds: int) -> Rounds:
    """Runs all arms in each round, every second one in reverse: each arm is as often early as late."""
    found = []
    for number in range(rounds):
        order = list(arms) if number % 2 == 0 else list(reversed(arms))
        numbers = {name: arms[name]() for name in order}
        found.append({name: numbers[name] for name in arms})
        if rank() == 0:
            words = (f"{name} {value:,.5g}" for name, value in found[-1].items())
            print(f"round {number + 1} of {rounds}: {', '.join(words)}", file=sys.stderr, flush=True)
    return found


def ratios(rounds: Rounds, base: str) -> dict[str, list[float]]:
    """Each arm's number divided by the base's of the same round, which the same other work has disturbed."""
    return {name: [found[name] / found[base] for found in rounds] for name in rounds[0]}


def report(rounds: Rounds, unit: str, base: str, file: Path | None = None, **facts: Any) -> None:
    """Prints medians and ratios to the base, and writes them to the file with every round."""
    table = Table("arm", title=f"Medians of {len(rounds)} rounds", title_justify="left")
    for column in (unit, f"of {base}", "least", "most"):
        table.add_column(column, justify="right")
    by_arm = ratios(rounds, base)
    for name, values in by_arm.items():
        median = statistics.median(found[name] for found in rounds)
        cells = (statistics.median(values), min(values), max(values))
        table.add_row(name, f"{median:,.5g}", *(f"{value:.2f}" for value in cells))
    Console(width=None if sys.stdout.isatty() else 110).print(table)
    for name, fact in facts.items():
        print(f"{name.replace('_', ' ')}: {fact}")
    if file:
        medians = {name: statistics.median(values) for name, values in by_arm.items()}
        file.write_text(json.dumps({"rounds": rounds, "ratios": medians, **facts}, indent=1) + "\n")


def wait_for_device() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


class Enough(Exception):
    """Raised by on_step of train_watched: the training ends there, and another one may follow."""


def train_watched(
    script: ModuleType,
    words: list[str],
    on_step: "Callable[[Run], None]",
    is_resident: Callable[[], bool] = lambda: False,
) -> None:
    """The script's main(), without evaluations, that calls on_step after each optimizer step, until Enough.

    While is_resident() is true it trains on the same batch: no data, no augmentation. What it prints is lost.
    """

    from accelerate.state import AcceleratorState, GradientState

    from onecurve.distributed.accelerator import start
    from onecurve.flags.recipe import parse
    from onecurve.models.script import recipe_class
    from onecurve.run.run import Run

    class WatchedRun(Run):
        def begin(self, *words: Any, **named: Any) -> "Steps":
            steps = super().begin(*words, **named)
            self.ranks.steps = replace(steps, per_epoch=sys.maxsize)  # no evaluation and no line at its end
            return steps

        def __exit__(self, kind: object, error: BaseException | None, trace: object) -> bool | None:
            if not isinstance(error, Enough):
                return super().__exit__(kind, error, trace)  # type: ignore[func-returns-value]
            if self.feeding:
                self.feeding.close()
            self.ranks.exchange.telemetry.stop()
            return True

        def add(self, loss: Tensor, ids: np.ndarray) -> None:
            super().add(loss, ids)
            if self.ranks.meter.micro_batches % self.batch.accumulations == 0:
                on_step(self)

    def batches(*words: Any) -> Iterator[tuple]:
        for batch in real(*words):
            yield batch
            while is_resident():
                yield batch

    script.Run = WatchedRun  # type: ignore[attr-defined]
    if real := getattr(script, "training_batches", None):
        script.training_batches = batches  # type: ignore[attr-defined]
    sys.argv = [os.path.abspath(str(script.__file__)), *words]
    try:
        with contextlib.redirect_stdout(io.StringIO()):
            recipe = parse(recipe_class(script))
            script.main.__wrapped__(recipe, *start(recipe, clip_norm=recipe.clip_norm))
    finally:
        if real:
            script.training_batches = real  # type: ignore[attr-defined]
        AcceleratorState._reset_state(True)
        GradientState._reset_state()
