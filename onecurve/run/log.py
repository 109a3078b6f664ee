"""Logs a run's progress to metrics.jsonl, samples.jsonl, trackers and the terminal."""

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
from onecurve.run.schemas import MetricsLine, RecipeFile, RunEvent
from onecurve.run.state import RunState
from onecurve.system.env import EVENTS_FILE_VARIABLE, report_to_launcher
from onecurve.system.files import check_regular, read_lines, write_error, write_json, write_text
from onecurve.system.progress import TrainingProgress
from onecurve.system.text import shortened

if TYPE_CHECKING:  # Imported lazily at runtime
    from onecurve.run.trackers import Trackers


class RunLog:
    """Log of a run on the main process. After a failed write, `problem` contains a message for all processes.

    The constructor removes log lines for steps after the step in `state`, starts the trackers, and writes
    recipe.json.

    Args:
        folder: Folder of the run.
        recipe: Recipe of the run.
        recipe_file: Content of recipe.json without the tracker ids.
        state: State at which the run starts or resumes.
        steps: Training steps of the run.
    """

    trackers: "Trackers | None" = None

    def __init__(self, folder: Path, recipe: Recipe, recipe_file: RecipeFile, state: RunState, steps: Steps):
        self.folder, self.state, self.steps_per_epoch = folder, state, steps.per_epoch
        self.problem: str | None = None  # Error message of the first failed write
        self.pending_scalars: dict[str, float | Tensor] = {}  # Scalars from the script for the next log line
        self.val_images_by_class: list[int] = []  # Number of images per class in the last evaluation
        # Value of time.monotonic() after which the next step is reported to launch.py
        self.next_report_time_s = 0.0 if EVENTS_FILE_VARIABLE in os.environ else math.inf
        metrics_path, samples_path = folder / "metrics.jsonl", folder / "samples.jsonl"
        kept_log_entries = _remove_later_entries(metrics_path, state)
        if samples_path.is_symlink():  # The target of the link may not belong to the run
            samples_path.unlink()
        if recipe.log_samples and samples_path.exists():
            _truncate_after(samples_path, state.step)
        # The last such entry shows whether the previous process ended after a signal.
        interruption_and_resume_entries = [
            log_entry for log_entry in kept_log_entries if {"interrupted_at", "resumed_at"} & set(log_entry)
        ]
        self.was_interrupted = (
            bool(interruption_and_resume_entries) and "interrupted_at" in interruption_and_resume_entries[-1]
        )
        if "none" not in recipe.trackers:
            from onecurve.run.trackers import Trackers

            self.trackers = Trackers(recipe.trackers, folder, recipe_file, state)
        write_json(folder / "recipe.json", {**recipe_file, **self.tracker_ids()})
        self.metrics_file = open(metrics_path, "a", buffering=1)  # noqa: SIM115 (closed in close)
        self.samples_file: TextIO | None = None
        if recipe.log_samples:
            self.samples_file = open(samples_path, "a", buffering=1)  # noqa: SIM115
        val_split = "holdout" if recipe_file["recipe"].get("holdout") else "val"
        self.progress = TrainingProgress(recipe.epochs, state.step, steps.last, recipe.unit, val_split)

    def tracker_ids(self) -> dict[str, str]:
        """Return the tracker ids that are stored in recipe.json and in the run's state."""
        return self.trackers.ids() if self.trackers else {}

    def end_step(self) -> None:
        """Report the step to launch.py at most once per second, and log the end of an interruption."""
        if time.monotonic() > self.next_report_time_s:
            self.next_report_time_s = time.monotonic() + 1
            report_to_launcher("step", step=self.state.step)
        if self.was_interrupted:
            self.write_entry({"resumed_at": time.time()})
            self.was_interrupted = False

    def log_metrics(self, metrics: dict[str, float], telemetry_means: dict[str, float] | None = None) -> None:
        """Log a line with `metrics` and the script's finite scalars, and show it in the progress display.

        Only the trackers receive the telemetry. Reading a scalar that is a tensor waits for its device.
        """
        scalars, self.pending_scalars = self.pending_scalars, {}
        finite_scalars = {tag: float(scalar) for tag, scalar in scalars.items() if math.isfinite(scalar)}
        logged_values = finite_scalars | metrics
        log_entry = self.write_entry(logged_values)
        logged_step = int(log_entry.pop("step"))
        try:
            if self.trackers:
                self.trackers.log({**log_entry, **(telemetry_means or {})}, logged_step)
        except OSError as error:
            self._record_write_error("the trackers' files", error)
        self.progress.show(logged_step, log_entry["epoch"], logged_values)

    def log_evaluation(
        self, stage: str, metrics: dict[str, float], predictions: Predictions, **confusion_subject: Any
    ) -> None:
        """Log a line of metrics and, for a model with classes, write confusion.json.

        The best weights' test metrics are logged at the last step. With test metrics, confusion.json also
        contains the number of validation images per class.

        Args:
            stage: First part of the metric names, either `val` or `test`.
            metrics: Metrics that evaluate() returned.
            predictions: Predictions from the evaluation.
            confusion_subject: Entries for confusion.json that describe the evaluated weights and images, such
                as `step`.
        """
        self.log_metrics({f"{stage}/{name}": value for name, value in metrics.items() if name != "images"})
        confusion_entries = predictions.confusion_entries()
        if not confusion_entries:
            return
        if "confusion" in confusion_entries:
            images_by_class = [sum(confusion_row) for confusion_row in confusion_entries["confusion"]]
            if stage == "val":
                self.val_images_by_class = images_by_class
            elif self.val_images_by_class:
                confusion_entries["val_images"] = self.val_images_by_class
        try:
            confusion_json = json.dumps(confusion_subject | confusion_entries)
            write_text(self.folder / "confusion.json", confusion_json + "\n")
        except OSError as error:
            self._record_write_error("confusion.json", error)

    def write_samples(self, ids_by_rank: list[list[int]], ids_per_step: int) -> None:
        """Log one line per step, with the step's sample ids in the order of the whole batch.

        Args:
            ids_by_rank: For each process, the sample ids of all steps to log. The last of these steps is the
                current step.
            ids_per_step: Number of sample ids per process and step.
        """
        assert self.samples_file
        step_count = len(ids_by_rank[0]) // ids_per_step
        first_step = self.state.step - step_count + 1
        for step_index in range(step_count):
            step_slice = slice(step_index * ids_per_step, (step_index + 1) * ids_per_step)
            ids_in_step = [sample_id for rank_ids in ids_by_rank for sample_id in rank_ids[step_slice]]
            self._write_line(self.samples_file, {"step": first_step + step_index, "samples": ids_in_step})

    def close(self, has_failed: bool) -> None:
        """Close the files and trackers, even if the disk is full. Further calls have no effect."""
        for log_file in (self.metrics_file, self.samples_file):
            with contextlib.suppress(OSError):
                if log_file:
                    log_file.close()
        with contextlib.suppress(OSError):
            open_trackers, self.trackers = self.trackers, None
            if open_trackers:
                open_trackers.finish(has_failed)

    def write_entry(self, values: RunEvent | dict[str, float]) -> dict[str, Any]:
        """Write a line with an event or metrics to metrics.jsonl, but not to trackers. Return the line."""
        current_step = self.state.step
        log_position: MetricsLine = {
            "step": current_step,
            "epoch": current_step / self.steps_per_epoch,
            "wall_s": self.state.wall_now_s(),
        }
        log_entry = {**log_position, **values}
        self._write_line(self.metrics_file, log_entry)
        return log_entry

    def _write_line(self, file: TextIO, log_entry: dict[str, Any]) -> None:
        """Append an entry to a file as a line of JSON. A failed write sets `problem`, but raises no error."""
        if file.closed:  # A signal arrived during the upload at the end of the run
            return
        try:
            file.write(json.dumps(log_entry) + "\n")
        except OSError as error:
            self._record_write_error(file.name, error)

    def _record_write_error(self, file_name: str, error: OSError) -> None:
        """Set `problem` to an explanation of the error, unless `problem` already explains an earlier one."""
        self.problem = self.problem or str(write_error(Path(file_name).name, self.folder, error))


def host_change(written_by: dict[str, Any], recipe_file: RecipeFile) -> RunEvent:
    """Return the previous and current numbers of hosts and processes, or {} if they have not changed.

    The result is also {} if the previous numbers are unknown.

    Args:
        written_by: `written_by` entry in the manifest of the checkpoint from which the run resumes.
        recipe_file: Content of recipe.json at this start.
    """
    previous_host_count = len(written_by.get("hosts", ()))
    previous_process_count = written_by.get("processes", 0)
    host_count, process_count = len(recipe_file["hosts"]), len(recipe_file["devices"])
    are_previous_known = all((previous_host_count, previous_process_count))
    if not are_previous_known or (host_count, process_count) == (previous_host_count, previous_process_count):
        return {}
    return {
        "hosts": host_count,
        "processes": process_count,
        "hosts_before": previous_host_count,
        "processes_before": previous_process_count,
    }


def _remove_later_entries(metrics_path: Path, state: RunState) -> list[dict[str, Any]]:
    """Rewrite metrics.jsonl without the lines that were written after the state was saved.

    Return the remaining lines.
    """
    kept_entries = [log_entry for log_entry in read_lines(metrics_path) if _precedes_state(log_entry, state)]
    write_text(metrics_path, "".join(json.dumps(log_entry) + "\n" for log_entry in kept_entries))
    return kept_entries


def _truncate_after(samples_path: Path, step: int) -> None:
    """Truncate samples.jsonl after the last complete line for a step up to `step`.

    The file is sorted by step. It is read line by line, because it may contain gigabytes.
    """
    check_regular(samples_path)
    with open(samples_path, "r+b") as samples_file:
        kept_bytes = 0
        for sample_line in samples_file:
            step_match = re.match(rb'{"step": (\d+),', sample_line)
            is_line_kept = step_match and int(step_match[1]) <= step and sample_line.endswith(b"\n")
            if not is_line_kept:
                samples_file.truncate(kept_bytes)
                break
            kept_bytes += len(sample_line)


def _precedes_state(entry: dict[str, Any], state: RunState) -> bool:
    """Return True if the line was written before the state was saved.

    The function returns False for a line that the resumed run writes again. Examples are a host change at the
    state's step, and an evaluation that will be repeated. Raise ValueError if the step is not a number.
    """
    step = entry.get("step", math.inf)
    if type(step) not in (int, float):
        raise ValueError(
            f"metrics.jsonl contains a line with the invalid step {shortened(repr(step))}. Delete this line"
        )
    is_repeated = "hosts" in entry or "test/loss" in entry or ("val/loss" in entry and not state.evaluated)
    is_written_again = step == state.step and is_repeated
    return step <= state.step and not is_written_again
