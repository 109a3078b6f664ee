"""Run the arms of a benchmark in turn, compute medians and ratios over rounds, and print a table."""

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

if TYPE_CHECKING:  # at run time, only train_watched imports the code that trains
    from onecurve.numerics.order import Steps
    from onecurve.run.run import Run

Rounds = list[dict[str, float]]  # one dict per round, which maps each arm to its result


def benchmark_parser(doc: str | None, rounds: int, usage: str | None = None) -> argparse.ArgumentParser:
    """Return a parser with the flags that all benchmarks share. `rounds` is the default number of rounds."""
    parser = command_parser(doc, usage)
    parser.add_argument(
        "--rounds", type=positive, default=rounds, metavar="N", help="number of rounds (default: %(default)s)"
    )
    parser.add_argument("--json", type=Path, metavar="PATH", help="JSON file for the results of all rounds")
    return parser


def positive(text: str) -> int:
    """Convert a flag's text to an integer of at least 1."""
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError("the number must be at least 1")
    return number


def in_turn(arms: dict[str, Callable[[], float]], rounds: int) -> Rounds:
    """Run all arms in each round and return the results.

    Every second round reverses the order, so that no arm is always first.
    """
    results = []
    for number in range(rounds):
        order = list(arms) if number % 2 == 0 else list(reversed(arms))
        numbers = {name: arms[name]() for name in order}
        results.append({name: numbers[name] for name in arms})
        if rank() == 0:
            words = (f"{name} {value:,.5g}" for name, value in results[-1].items())
            print(f"round {number + 1} of {rounds}: {', '.join(words)}", file=sys.stderr, flush=True)
    return results


def ratios(rounds: Rounds, base: str) -> dict[str, list[float]]:
    """Return each arm's results relative to the base's results in the same rounds.

    Other load on the machine affects all arms in a round alike, so ratios vary less than absolute results.
    """
    return {name: [numbers[name] / numbers[base] for numbers in rounds] for name in rounds[0]}


def report(rounds: Rounds, unit: str, base: str, file: Path | None = None, **facts: Any) -> None:
    """Print each arm's median and its ratio to the base, and write the ratios and all rounds to a file."""
    table = Table("arm", title=f"Medians of {len(rounds)} rounds", title_justify="left")
    for column in (unit, f"ratio to {base}", "minimum ratio", "maximum ratio"):
        table.add_column(column, justify="right")
    by_arm = ratios(rounds, base)
    for name, values in by_arm.items():
        median = statistics.median(numbers[name] for numbers in rounds)
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
    """Exception that train_watched's on_step raises to end a training run.

    After the exception, another training run may follow.
    """


def train_watched(
    script: ModuleType,
    words: list[str],
    on_step: "Callable[[Run], None]",
    is_resident: Callable[[], bool] = lambda: False,
) -> None:
    """Run a script's main() without evaluations and output, until on_step raises Enough.

    Args:
        script: The train script's module.
        words: The script's command-line flags.
        on_step: Function to call after each optimizer step.
        is_resident: Function that returns True while the script must train on one batch without augmentation.
    """

    from accelerate.state import AcceleratorState, GradientState

    from onecurve.distributed.accelerator import start
    from onecurve.flags.recipe import parse
    from onecurve.models.script import recipe_class
    from onecurve.run.run import Run

    class WatchedRun(Run):
        def begin(self, *words: Any, **named: Any) -> "Steps":
            steps = super().begin(*words, **named)
            self.session.steps = replace(steps, per_epoch=sys.maxsize)  # skip the evaluation after an epoch
            return steps

        def __exit__(self, error_type: object, error: BaseException | None, trace: object) -> bool | None:
            if not isinstance(error, Enough):
                return super().__exit__(error_type, error, trace)  # type: ignore[func-returns-value]
            if self.batch_generator:
                self.batch_generator.close()
            self.session.exchange.telemetry.stop()
            return True

        def add(self, loss: Tensor, ids: np.ndarray) -> None:
            super().add(loss, ids)
            if self.session.meter.micro_batch_count % self.batch.accumulations == 0:
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
