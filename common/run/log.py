"""What a run says while it goes on: metrics.jsonl, samples.jsonl, the trackers, the line on the terminal."""

import contextlib
import json
import time
from pathlib import Path
from typing import Any, TextIO

from common.recipe import Recipe
from common.run.state import RunState
from common.run.trackers import finish_trackers, log_pictures, start_trackers, tracker_ids
from common.system.files import read_lines, write_json, write_text
from common.system.progress import progress


class RunLog:
    """Of the main process. A line that can't be written is a `problem`, which the run tells all processes.

    about: for recipe.json. state: of the checkpoint that the run goes on from; later lines are taken back.
    """

    def __init__(
        self,
        folder: Path,
        recipe: Recipe,
        about: dict[str, Any],
        state: RunState,
        steps: int,
        steps_per_epoch: int,
    ):
        self.folder, self.steps, self.steps_per_epoch = folder, steps, steps_per_epoch
        self.problem: str | None = None
        self.told = 0.0
        metrics, samples = folder / "metrics.jsonl", folder / "samples.jsonl"
        for file in (metrics, samples) if recipe.log_samples else (metrics,):
            kept = [line for line in read_lines(file) if _was_before(line, state)]
            write_text(file, "".join(json.dumps(line) + "\n" for line in kept))
        self.trackers = start_trackers(recipe.trackers, folder, about, state.step, state.wandb_id)
        write_json(folder / "recipe.json", about | self.tracker_ids())
        self.metrics = open(metrics, "a", buffering=1)  # noqa: SIM115 (closed in close)
        self.samples = open(samples, "a", buffering=1) if recipe.log_samples else None  # noqa: SIM115
        self.progress = progress(recipe.epochs, state.step, steps, recipe.batch_size, recipe.unit)

    def tracker_ids(self) -> dict[str, str]:
        return tracker_ids(self.trackers)

    def write(
        self, step: int, wall_s: float, values: dict[str, float], telemetry: dict[str, float] | None = None
    ) -> None:
        """After `step` optimizer steps and wall_s of the run. telemetry: for the trackers alone."""
        epoch = step / self.steps_per_epoch
        line = {"epoch": epoch, "wall_s": wall_s, **values}
        self._write_line(self.metrics, {"step": step, **line})
        try:
            for tracker in self.trackers:
                tracker.log({**line, **(telemetry or {})}, step=step)
        except OSError as error:
            self._can_not_write("the trackers' files", error)
        self.progress.show(step, epoch, values)

    def show(self, step: int, pictures: list[Path]) -> None:
        """PNG files, for the trackers."""
        for tracker in self.trackers:
            log_pictures(tracker, step, pictures)

    def write_confusion(self, step: int, classes: tuple[str, ...], confusion: list[list[int]]) -> None:
        """confusion.json, of the newest evaluation: a row per true class."""
        try:
            found = {"step": step, "classes": classes, "confusion": confusion}
            write_text(self.folder / "confusion.json", json.dumps(found) + "\n")
        except OSError as error:
            self._can_not_write("confusion.json", error)

    def write_samples(self, step: int, per_rank: list[list[int]], share: int) -> None:
        """A line for each of the steps up to `step`, with its ids in the order of the whole batch.

        per_rank: the ids of all these steps, of each process. share: of a process in a step.
        """
        count = len(per_rank[0]) // share
        for i in range(count):
            ids = [sample for own in per_rank for sample in own[i * share : (i + 1) * share]]
            self._write_line(self.samples, {"step": step - count + i + 1, "samples": ids})

    def tell(self, doing: str) -> None:
        """What goes on between two lines."""
        if time.perf_counter() - self.told > 1:
            self.told = time.perf_counter()
            self.progress.tell(doing)

    def close(self, failed: bool) -> None:
        """A full disk is no second error, and a second call does nothing."""
        for file in (self.metrics, self.samples):
            with contextlib.suppress(OSError, AttributeError):
                file.close()
        with contextlib.suppress(OSError):
            open_trackers, self.trackers = self.trackers, []
            finish_trackers(open_trackers, failed)

    def _write_line(self, file: TextIO, line: dict[str, Any]) -> None:
        try:
            file.write(json.dumps(line) + "\n")
        except OSError as error:
            self._can_not_write(file.name, error)

    def _can_not_write(self, what: str, error: OSError) -> None:
        self.problem = self.problem or (
            f"{what} can't be written: {error.strerror or error}. Make room: the same command continues with"
            " the newest checkpoint"
        )


def _was_before(line: dict[str, Any], state: RunState) -> bool:
    """True when the line was written before the state was saved."""
    again = line["step"] == state.step and "val/loss" in line and not state.evaluated
    return line["step"] <= state.step and not again
