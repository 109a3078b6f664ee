"""The log of a running training: metrics.jsonl, samples.jsonl, the trackers, the line on the terminal."""

import contextlib
import json
import math
import time
from pathlib import Path
from typing import Any, TextIO

from common.recipe import Recipe
from common.run.predictions import Predictions
from common.run.state import RunState
from common.run.trackers import finish_trackers, log_pictures, start_trackers, tracker_ids
from common.system.files import read_lines, write_json, write_text
from common.system.progress import TrainingProgress


class RunLog:
    """The log of the main process. After a failed write `problem` has the message, for all processes.

    about: for recipe.json. state: of the checkpoint that the run resumes from; later lines are removed.
    wrote: `written_by` of that checkpoint's manifest.
    """

    def __init__(
        self,
        folder: Path,
        recipe: Recipe,
        about: dict[str, Any],
        state: RunState,
        steps: int,
        steps_per_epoch: int,
        wrote: dict[str, Any],
    ):
        self.folder, self.steps, self.steps_per_epoch = folder, steps, steps_per_epoch
        self.problem: str | None = None
        self.shown_at = 0.0  # when tell() last showed something
        metrics, samples = folder / "metrics.jsonl", folder / "samples.jsonl"
        for file in (metrics, samples) if recipe.log_samples else (metrics,):
            kept = [line for line in read_lines(file) if _was_before(line, state)]
            write_text(file, "".join(json.dumps(line) + "\n" for line in kept))
            if file == metrics:
                marks = [line for line in kept if {"interrupted_at", "resumed_at"} & set(line)]
                self.was_interrupted = bool(marks) and "interrupted_at" in marks[-1]
        self.trackers = start_trackers(recipe.trackers, folder, about, state.step, state.wandb_id)
        write_json(folder / "recipe.json", about | self.tracker_ids())
        self.metrics = open(metrics, "a", buffering=1)  # noqa: SIM115 (closed in close)
        self.samples = open(samples, "a", buffering=1) if recipe.log_samples else None  # noqa: SIM115
        self.progress = TrainingProgress(recipe.epochs, state.step, steps, recipe.unit)
        if change := _change_of_hosts(wrote, about):
            line = {"step": state.step, "epoch": state.step / steps_per_epoch, "wall_s": state.wall_now_s()}
            self._write_line(self.metrics, line | change)

    def tracker_ids(self) -> dict[str, str]:
        return tracker_ids(self.trackers)

    def write(
        self, step: int, wall_s: float, values: dict[str, float], telemetry: dict[str, float] | None = None
    ) -> None:
        """Writes a line after `step` optimizer steps and wall_s seconds of the run.

        telemetry: further values, only for the trackers.
        """
        epoch = step / self.steps_per_epoch
        line = {"epoch": epoch, "wall_s": wall_s, **values}
        self._write_line(self.metrics, {"step": step, **line})
        try:
            for tracker in self.trackers:
                tracker.log({**line, **(telemetry or {})}, step=step)
        except OSError as error:
            self._set_problem("the trackers' files", error)
        self.progress.show(step, epoch, values)

    def write_interruption(self, step: int, wall_s: float, why: str) -> None:
        """Writes why and when the training is interrupted after `step` steps."""
        line = {"step": step, "epoch": step / self.steps_per_epoch, "wall_s": wall_s}
        self._write_line(self.metrics, line | {"interrupted_at": time.time(), "why": why})

    def end_interruption(self, step: int, wall_s: float) -> None:
        """Writes when the first step after an interruption has ended."""
        if self.was_interrupted:
            line = {"step": step, "epoch": step / self.steps_per_epoch, "wall_s": wall_s}
            self._write_line(self.metrics, line | {"resumed_at": time.time()})
            self.was_interrupted = False

    def show(self, step: int, pictures: list[Path]) -> None:
        """Sends PNG files to the trackers."""
        for tracker in self.trackers:
            log_pictures(tracker, step, pictures)

    def write_evaluation(
        self, step: int, wall_s: float, metrics: dict[str, float], predictions: Predictions
    ) -> None:
        """Writes a line with the metrics and, with classes, confusion.json: a row per true class."""
        self.write(step, wall_s, {f"val/{name}": v for name, v in metrics.items() if name != "images"})
        self._write_confusion(predictions, {"step": step})

    def write_test(
        self, state: RunState, metrics: dict[str, float], split: str, predictions: Predictions
    ) -> None:
        """Writes the metrics of the best weights on the test split, in a line of the last step."""
        values = {f"test/{name}": v for name, v in metrics.items() if name != "images"}
        self.write(state.step, state.wall_now_s(), values)
        self._write_confusion(predictions, {"step": state.best_step, "split": split})

    def _write_confusion(self, predictions: Predictions, of: dict[str, Any]) -> None:
        """Writes confusion.json. of: what was evaluated."""
        if predictions.confusion is None:
            return
        try:
            confusion = predictions.confusion.tolist()
            found = of | {"classes": predictions.classes, "confusion": confusion}
            write_text(self.folder / "confusion.json", json.dumps(found) + "\n")
        except OSError as error:
            self._set_problem("confusion.json", error)

    def write_samples(self, step: int, per_rank: list[list[int]], share: int) -> None:
        """Writes a line for each step up to `step`, with its ids in the order of the whole batch.

        per_rank: each process's ids of all these steps. share: number of ids of a process in a step.
        """
        assert self.samples
        count = len(per_rank[0]) // share
        for i in range(count):
            ids = [sample for own in per_rank for sample in own[i * share : (i + 1) * share]]
            self._write_line(self.samples, {"step": step - count + i + 1, "samples": ids})

    def tell(self, doing: str) -> None:
        """Shows the work between two lines on the terminal, at most once a second."""
        if time.perf_counter() - self.shown_at > 1:
            self.shown_at = time.perf_counter()
            self.progress.tell(doing)

    def close(self, failed: bool) -> None:
        """Closes files and trackers. Ignores a full disk. A second call does nothing."""
        for file in (self.metrics, self.samples):
            with contextlib.suppress(OSError):
                if file:
                    file.close()
        with contextlib.suppress(OSError):
            open_trackers, self.trackers = self.trackers, []
            finish_trackers(open_trackers, failed)

    def _write_line(self, file: TextIO, line: dict[str, Any]) -> None:
        try:
            file.write(json.dumps(line) + "\n")
        except OSError as error:
            self._set_problem(file.name, error)

    def _set_problem(self, what: str, error: OSError) -> None:
        self.problem = self.problem or (
            f"{what} can't be written: {error.strerror or error}. Make room: the same command continues with"
            " the newest checkpoint"
        )


def _change_of_hosts(wrote: dict[str, Any], about: dict[str, Any]) -> dict[str, int]:
    """Numbers of hosts and processes, before and now; {} if they are the same or unknown."""
    before = len(wrote.get("hosts", ())), wrote.get("processes", 0)
    now = len(about["hosts"]), len(about["devices"])
    if before == now or not all(before):
        return {}
    return {"hosts": now[0], "processes": now[1], "hosts_before": before[0], "processes_before": before[1]}


def _was_before(line: dict[str, Any], state: RunState) -> bool:
    """True when the line was written before the state was saved. Changes of hosts at that step, and
    evaluations that will be repeated, count as later: they are written again."""
    step = line.get("step", math.inf)
    is_repeated = "hosts" in line or "test/loss" in line or ("val/loss" in line and not state.evaluated)
    again = step == state.step and is_repeated
    return step <= state.step and not again
