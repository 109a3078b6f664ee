"""Logs a run in progress to metrics.jsonl, samples.jsonl, the trackers and the terminal."""

import contextlib
import json
import math
import os
import re
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from torch import Tensor

from onecurve.flags.recipe import Recipe
from onecurve.numerics.order import Steps
from onecurve.run.predictions import Predictions
from onecurve.run.schemas import Mark, MetricsLine, RecipeFile
from onecurve.run.state import RunState
from onecurve.system.env import EVENTS_FILE, report
from onecurve.system.files import check_regular, read_lines, write_json, write_text
from onecurve.system.progress import TrainingProgress
from onecurve.system.text import shortened

if TYPE_CHECKING:  # at runtime, imported lazily
    from onecurve.run.trackers import Trackers


class RunLog:
    """Log of the main process. After a failed write, `problem` contains the message for all processes.

    The constructor removes lines that were written after the run's step.

    Args:
        folder: The run's folder.
        recipe: The run's recipe.
        manifest: Content of recipe.json, without the tracker ids.
        state: State at which the run starts or resumes.
        steps: Steps of the run.
    """

    trackers: "Trackers | None" = None

    def __init__(self, folder: Path, recipe: Recipe, manifest: RecipeFile, state: RunState, steps: Steps):
        self.folder, self.state, self.steps_per_epoch = folder, state, steps.per_epoch
        self.problem: str | None = None
        self.scalars: dict[str, float | Tensor] = {}  # values from the script for the next line of the log
        self.val_images: list[int] = []  # number of images of each class in the last evaluation
        self.report_at = 0.0 if EVENTS_FILE in os.environ else math.inf  # on the clock of time.monotonic()
        metrics, samples = folder / "metrics.jsonl", folder / "samples.jsonl"
        kept = _keep_lines(metrics, state)
        if samples.is_symlink():  # the link's target may not belong to the run
            samples.unlink()
        if recipe.log_samples and samples.exists():
            _cut(samples, state.step)
        marks = [line for line in kept if {"interrupted_at", "resumed_at"} & set(line)]
        self.was_interrupted = bool(marks) and "interrupted_at" in marks[-1]
        if "none" not in recipe.trackers:
            from onecurve.run.trackers import Trackers

            self.trackers = Trackers(recipe.trackers, folder, manifest, state)
        write_json(folder / "recipe.json", {**manifest, **self.tracker_ids()})
        self.metrics = open(metrics, "a", buffering=1)  # noqa: SIM115 (closed in close)
        self.samples = open(samples, "a", buffering=1) if recipe.log_samples else None  # noqa: SIM115
        val_name = "holdout" if manifest["recipe"].get("holdout") else "val"
        self.progress = TrainingProgress(recipe.epochs, state.step, steps.last, recipe.unit, val_name)

    def tracker_ids(self) -> dict[str, str]:
        """Return the ids that the trackers add to recipe.json and to the run's state."""
        return self.trackers.ids() if self.trackers else {}

    def end_step(self) -> None:
        """Report the step to launch.py (at most once per second), and log the end of an interruption."""
        if time.monotonic() > self.report_at:
            self.report_at = time.monotonic() + 1
            report("step", step=self.state.step)
        if self.was_interrupted:
            self.write_mark({"resumed_at": time.time()})
            self.was_interrupted = False

    def write(self, values: dict[str, float], telemetry: dict[str, float] | None = None) -> None:
        """Log a line with these values and the script's finite scalars. Only trackers receive telemetry."""
        scalars, self.scalars = self.scalars, {}
        values = {name: float(value) for name, value in scalars.items() if math.isfinite(value)} | values
        line = self.write_mark(values)
        step = int(line.pop("step"))
        try:
            if self.trackers:
                self.trackers.log({**line, **(telemetry or {})}, step)
        except OSError as error:
            self._set_problem("the trackers' files", error)
        self.progress.show(step, line["epoch"], values)

    def write_metrics(
        self, prefix: str, metrics: dict[str, float], predictions: Predictions, **subject: Any
    ) -> None:
        """Log a line of metrics and, for a model with classes, write confusion.json.

        The test metrics of the best weights appear in a line for the last step. For these metrics,
        confusion.json also contains the number of validation images of each class.

        Args:
            prefix: `val` or `test`, the first part of the metric names.
            metrics: Metrics returned by evaluate().
            predictions: Predictions from the evaluation.
            subject: Entries for confusion.json that describe what was evaluated, for example `step`.
        """
        self.write({f"{prefix}/{name}": v for name, v in metrics.items() if name != "images"})
        if not (confusion := predictions.as_json()):
            return
        if "confusion" in confusion:
            counts = [sum(row) for row in confusion["confusion"]]
            if prefix == "val":
                self.val_images = counts
            elif self.val_images:
                confusion["val_images"] = self.val_images
        try:
            write_text(self.folder / "confusion.json", json.dumps(subject | confusion) + "\n")
        except OSError as error:
            self._set_problem("confusion.json", error)

    def write_samples(self, per_rank: list[list[int]], share: int) -> None:
        """Log a line for each of the last steps, with the step's sample ids in the order of the whole batch.

        Args:
            per_rank: For each process, the sample ids of all these steps.
            share: Number of sample ids per process and step.
        """
        assert self.samples
        count = len(per_rank[0]) // share
        for i in range(count):
            ids = [sample for rank_ids in per_rank for sample in rank_ids[i * share : (i + 1) * share]]
            self._write_line(self.samples, {"step": self.state.step - count + i + 1, "samples": ids})

    def close(self, failed: bool) -> None:
        """Close files and trackers. Ignores a full disk. Further calls have no effect."""
        for file in (self.metrics, self.samples):
            with contextlib.suppress(OSError):
                if file:
                    file.close()
        with contextlib.suppress(OSError):
            trackers, self.trackers = self.trackers, None
            if trackers:
                trackers.finish(failed)

    def write_mark(self, values: Mark | dict[str, float]) -> dict[str, Any]:
        """Write a line with an event or metrics only to metrics.jsonl, and return the line."""
        step = self.state.step
        base: MetricsLine = {
            "step": step,
            "epoch": step / self.steps_per_epoch,
            "wall_s": self.state.wall_now_s(),
        }
        line = {**base, **values}
        self._write_line(self.metrics, line)
        return line

    def _write_line(self, file: TextIO, line: dict[str, Any]) -> None:
        if file.closed:  # a signal arrived during the upload at the end of the run
            return
        try:
            file.write(json.dumps(line) + "\n")
        except OSError as error:
            self._set_problem(file.name, error)

    def _set_problem(self, file: str, error: OSError) -> None:
        self.problem = self.problem or (
            f"{file} can't be written: {error.strerror or error}. Make room: the same command continues with"
            " the newest checkpoint"
        )


def change_of_hosts(writer: dict[str, Any], manifest: RecipeFile) -> Mark:
    """Return the previous and current numbers of hosts and processes, or {} if equal or unknown.

    Args:
        writer: `written_by` from the manifest of the checkpoint from which the run resumes.
        manifest: Content of recipe.json at this start.
    """
    before = len(writer.get("hosts", ())), writer.get("processes", 0)
    now = len(manifest["hosts"]), len(manifest["devices"])
    if before == now or not all(before):
        return {}
    return {"hosts": now[0], "processes": now[1], "hosts_before": before[0], "processes_before": before[1]}


def _keep_lines(file: Path, state: RunState) -> list[dict[str, Any]]:
    """Remove the lines written after the state was saved, and return the remaining lines."""
    kept = [line for line in read_lines(file) if _was_before(line, state)]
    write_text(file, "".join(json.dumps(line) + "\n" for line in kept))
    return kept


def _cut(file: Path, step: int) -> None:
    """Truncate a file of lines, sorted by step, after the given step. The file may be gigabytes long."""
    check_regular(file)
    with open(file, "r+b") as lines:
        end = 0
        for line in lines:
            begin = re.match(rb'{"step": (\d+),', line)
            if not (begin and int(begin[1]) <= step and line.endswith(b"\n")):
                lines.truncate(end)
                break
            end += len(line)


def _was_before(line: dict[str, Any], state: RunState) -> bool:
    """Return True if the line was written before the state was saved.

    The result is False for host changes at the state's step and for evaluations that will be repeated,
    because the log will contain these lines again.
    """
    step = line.get("step", math.inf)
    if type(step) not in (int, float):
        raise ValueError(f"metrics.jsonl has a line with the step {shortened(repr(step))}. Remove that line")
    is_repeated = "hosts" in line or "test/loss" in line or ("val/loss" in line and not state.evaluated)
    is_written_again = step == state.step and is_repeated
    return step <= state.step and not is_written_again
