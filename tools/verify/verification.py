"""Choose intervals of a finished run, replay the steps in these intervals, and record the outcome."""

import argparse
import json
import math
import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, fields, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch

from onecurve.checkpoint.format import step_from_name, step_name, steps_in, verify_checkpoint
from onecurve.flags.fields import flags_where, without_removed_flags
from onecurve.flags.recipe import METRICS
from onecurve.models.preprocessing import CROP_FLAGS, LEGACY
from onecurve.models.script import load_script, project_script, recipe_class
from onecurve.run.schemas import ReplayRecord
from onecurve.system.files import read_yaml, write_json
from onecurve.system.paths import ROOT, shortest
from onecurve.system.text import plural, printable, some_of
from tools.logbook.run_record import (
    BIT_FOR_BIT,
    EVALUATED_AGAIN,
    VERIFICATION_MEANING,
    VERIFIED_FILE,
    RunRecord,
    flag_text,
    hash_compared_files,
    resets_best_result,
)
from tools.verify import replay
from tools.verify.replay import Interval, ReplayOutcome

PRINTED_OUTPUT_LINES = 15  # number of last lines of a failed replay's output to print
NEVER_VERIFIED = (
    "devices, hosts, strategy, model FLOPs, times, throughput and memory",
    "commit, versions and command",
    "plots, confusion matrices and reports of validate.py",
)


@dataclass(frozen=True)
class StepRange:
    """Range of steps from begin_step + 1 to last_step, trained with the same settings.

    Attributes:
        record: Copy of the run in which all starts have these settings.
    """

    begin_step: int  # excluded
    last_step: int  # included
    record: RunRecord

    @property
    def repeats_evaluation(self) -> bool:
        """True if the start that trained these steps repeated the evaluation at its first step."""
        return resets_best_result(self.record.recipe_file)


class Verification:
    """Verification of a run, with the intervals to replay according to the flags.

    Raises:
        ValueError: If no replay is possible.
    """

    def __init__(self, flags: argparse.Namespace):
        self.flags, self.folder = flags, flags.run
        self.hash_by_file = hash_compared_files(flags.run)
        self.record = record = RunRecord(flags.run)
        status, settings = record.result_values["status"], record.recipe_file
        if status != "finished":
            remedy = "Repeat the training command to finish the run."
            raise ValueError(f"{flags.run} is not finished ({status}). {remedy}")
        self.script = flags.script or project_script(settings.get("script"))
        self.recipe_type = recipe_class(load_script(self.script))
        self.recipe, self.steps_per_epoch = record.recipe, replay.recorded_steps_per_epoch(record)
        if not self.recipe:
            raise ValueError(f"{flags.run} contains no recipe: {some_of(record.problems)}")
        self.last_step = record.result_values["steps"]
        # Steps whose evaluations the page shows as headlines
        self.headline_steps = sorted({self.last_step, record.result_values.get("best_step", self.last_step)})
        self.checkpoints_folder = flags.run / "checkpoints"
        self.checkpoint_steps = sorted(steps_in(self.checkpoints_folder))
        initial_checkpoint = self._checkpoint_by_first_step(settings.get("resumed_from"))
        self.start_checkpoints = initial_checkpoint | {
            step: self.checkpoints_folder / step_name(step) for step in self.checkpoint_steps
        }
        self.first_step = min(initial_checkpoint, default=0)
        launch_config = read_yaml("--config_file", flags.config_file) if flags.config_file else {}
        uses_cuda = torch.cuda.is_available() and not launch_config.get("use_cpu")
        self.device_type = "cuda" if uses_cuda else "cpu"
        self.step_ranges = self._split_into_step_ranges()
        for step_range in self.step_ranges:
            self._check_device_type(step_range.record)
        self.intervals = self._sample_intervals(self._all_intervals()) + self._evaluation_intervals()

    def _split_into_step_ranges(self) -> list["StepRange"]:
        """Split the run into ranges of steps trained with the same settings."""
        ranges: list[StepRange] = []
        for start in self.record.kept_starts:
            record = self.record.with_settings_of(start)
            if not ranges:
                ranges = [StepRange(0, self.last_step, record)]
            elif self._training_settings(record) != self._training_settings(ranges[-1].record):
                ranges[-1] = replace(ranges[-1], last_step=start.begin_step)
                ranges.append(StepRange(start.begin_step, self.last_step, record))
        return ranges or [StepRange(0, self.last_step, self.record)]

    def _flags_copied_to_replay(self) -> list[str]:
        """Return the names of flags whose values a replay copies from the run."""
        return [*flags_where(self.recipe_type, "part_of_recipe"), *flags_where(self.recipe_type, "replayed")]

    def _training_settings(self, record: RunRecord) -> list[Any]:
        """Return the settings that a replay copies from the run or that bitwise equality depends on."""
        flag_values = (record.recipe.get(flag) for flag in self._flags_copied_to_replay())
        results = (record.result_values.get(key) for key in replay.RESULTS_FOR_BITWISE)
        settings = (record.recipe_file.get(key) for key in ("source", *replay.SETTINGS_FOR_BITWISE))
        return [*flag_values, *results, *settings]

    def _range_with_step(self, step: int) -> "StepRange":
        """Return the run's part that contains a step."""
        last_range = self.step_ranges[-1]
        return next((candidate for candidate in self.step_ranges if step <= candidate.last_step), last_range)

    def _range_for_replay(self, interval: Interval) -> "StepRange":
        """Return the part whose recipe an interval's replay uses.

        An evaluation belongs to the part that trained its step, unless the next start repeated the
        evaluation on different images.
        """
        next_range = self._range_with_step(interval.start + 1)
        if not interval.is_evaluation:
            return next_range
        if next_range.repeats_evaluation and next_range.begin_step == interval.start:
            return next_range
        return self._range_with_step(interval.start)

    def recipe_changes(self) -> Iterator[str]:
        """Yield recipe changes between parts, for example `step 100: lr was 0.003, now 0.001`."""
        for previous, current in pairwise(self.step_ranges):
            flags = flags_where(self.recipe_type, "part_of_recipe")
            old_recipe, new_recipe = previous.record.recipe, current.record.recipe
            changes = [
                f"{flag} was {flag_text(old_recipe.get(flag))}, now {flag_text(new_recipe.get(flag))}"
                for flag in flags
                if old_recipe.get(flag) != new_recipe.get(flag)
            ]
            old_source, new_source = (part.record.recipe_file.get("source") for part in (previous, current))
            if old_source != new_source:
                changes.append(f"the content of the data was {old_source}, now {new_source}")
            if changes:
                yield f"step {current.begin_step:,}: {'; '.join(changes)}"

    def _checkpoint_by_first_step(self, resumed_from: str | None) -> dict[int, Path | None]:
        """Map the run's first step to the checkpoint from which it resumed, or to None for fresh weights.

        The mapping is empty if the checkpoint no longer exists.
        """
        if resumed_from is None:
            return {0: None}
        source, first_logged_step = Path(resumed_from).resolve(), self.record.metrics[0]["step"]
        if (step := step_from_name(source.name)) is not None:
            return {step: source} if source.is_dir() else {}
        for checkpoints_folder in (source / "checkpoints", source):
            steps = [step for step in steps_in(checkpoints_folder) if step <= first_logged_step]
            if steps:
                return {steps[0]: checkpoints_folder / step_name(steps[0])}
        return {}

    def _check_device_type(self, record: RunRecord) -> None:
        device, *_ = record.recipe_file.get("devices") or [""]
        run_device_type = "cpu" if device.startswith("CPU") else "cuda"
        flags = flags_where(self.recipe_type, "drawn_on_device")
        used_flags = [flag for flag in flags if record.recipe.get(flag)]
        if used_flags and run_device_type != self.device_type:
            raise ValueError(
                f"--{used_flags[0]} used random numbers from {printable(device)}, which this device does not"
                " produce. Verify the run on a device of the same type."
            )

    def _all_intervals(self) -> list[Interval]:
        """Return all intervals that start at the beginning or at a kept checkpoint, without overlaps.

        Each interval ends at the step of a log line.
        """
        intervals: list[Interval] = []
        for start in sorted(self.start_checkpoints):
            if start >= self.last_step or (intervals and start < intervals[-1].end):
                continue
            step_range = self._range_with_step(start + 1)
            log_every = step_range.record.recipe.get("log_every", 50)
            steps_per_epoch = replay.recorded_steps_per_epoch(step_range.record)
            steps = range(start + 1, step_range.last_step + 1)
            logged_steps = [step for step in steps if not step % log_every or not step % steps_per_epoch]
            logged_steps += [self.last_step] if step_range.last_step == self.last_step else []
            if not logged_steps:  # the recipe changed before the next log line
                continue
            min_end = start + self.flags.steps
            end = next((step for step in logged_steps if step >= min_end), logged_steps[-1])
            saved_steps = tuple(step for step in self.checkpoint_steps if start < step <= end)
            intervals.append(Interval(start, end, saved_steps))
        return intervals

    def _sample_intervals(self, intervals: list[Interval]) -> list[Interval]:
        if self.flags.sample is None or self.flags.sample >= len(intervals):
            return intervals
        seed = random.randrange(2**32) if self.flags.seed is None else self.flags.seed
        selection = f"{self.flags.sample} of {len(intervals)} intervals"
        print(f"Replaying {selection}, chosen with --seed {seed}", flush=True)
        sampled = random.Random(seed).sample(intervals, self.flags.sample)
        return sorted(sampled, key=lambda interval: interval.start)

    def _evaluation_intervals(self) -> list[Interval]:
        """Return the evaluations to repeat, as intervals.

        The best checkpoint (also on the test split) and the last checkpoint are evaluated again. Kept
        checkpoints within an epoch are also evaluated, because a replay evaluates only at the end of an
        epoch.
        """
        evaluated_steps = {line["step"] for line in self.record.evaluations}
        steps_within_epoch = {step for step in evaluated_steps if step % self.steps_per_epoch}
        steps = {*self.headline_steps, *(steps_within_epoch & {*self.checkpoint_steps})}
        return [Interval(step, step) for step in sorted(steps) if step in self.start_checkpoints]

    # --- One interval

    def replay(self, interval: Interval) -> ReplayOutcome:
        """Train an interval's steps again and compare the result with the run."""
        outcome = ReplayOutcome(interval)
        saved_steps = {interval.start, *interval.checkpoint_steps} & {*self.checkpoint_steps}
        outcome.findings = [
            finding for step in sorted(saved_steps) for finding in self._checkpoint_findings(step)
        ]
        if outcome.findings:
            return outcome
        try:
            with tempfile.TemporaryDirectory(prefix="verify-", ignore_cleanup_errors=True) as scratch:
                self._replay_and_compare(outcome, Path(scratch))
        except Exception as error:  # the script or a library may raise any error for damaged files
            outcome.findings.append(f"the replay failed: {printable(error)}")
        return outcome

    def _checkpoint_findings(self, step: int) -> Iterator[str]:
        """Yield a finding if a checkpoint is damaged or was trained with a different recipe."""
        try:
            manifest = verify_checkpoint(self.checkpoints_folder / step_name(step)).manifest
        except ValueError as error:
            yield f"the checkpoint of step {step:,}: {error}"
            return
        trained_recipe = without_removed_flags(manifest.get("recipe", {}))
        recipe = self._range_with_step(step).record.recipe
        changed_flags = [flag for flag in trained_recipe if trained_recipe[flag] != recipe.get(flag)]
        changes = [f"{flag} {trained_recipe[flag]}, not {recipe.get(flag)}" for flag in changed_flags]
        if changes:
            yield f"the checkpoint of step {step:,} was trained with {', '.join(changes)}"

    def _replay_and_compare(self, outcome: ReplayOutcome, scratch: Path) -> None:
        run = self._range_for_replay(outcome.interval).record
        replayed_run = RunRecord(self._train_interval(outcome.interval, run, scratch / "replay"))
        outcome.is_replayed = True
        outcome.reasons_not_exact = replay.why_not_exact(run, replayed_run)
        outcome.is_exact = not outcome.reasons_not_exact
        outcome.findings += replay.compare_results(run, replayed_run, is_moved=bool(self.flags.data))
        outcome.findings += replay.compare_with_replay(run, replayed_run, outcome)

    def _train_interval(self, interval: Interval, run: RunRecord, folder: Path) -> Path:
        """Run the train script and return the new run folder.

        If the script fails, raise ValueError with a reason.
        """
        checkpoint_every = math.gcd(*interval.checkpoint_steps) or 10**9
        launcher = ["-m", "accelerate.commands.launch", "--config_file", self.flags.config_file]
        command = [sys.executable, *(launcher if self.flags.config_file else ()), self.script]
        command += ["--config", self._write_replay_config(run, folder)]
        command += ["--output_dir", folder, "--max_steps", interval.end, "--trackers", "none"]
        command += ["--checkpoint_every", checkpoint_every, "--keep_every", checkpoint_every]
        command += ["--telemetry_s", "0"]
        command += ["--mixed_precision", run.recipe_file.get("mixed_precision", "no")]
        if checkpoint := self.start_checkpoints[interval.start]:
            command += ["--resume", checkpoint]
        if self.flags.cache_dir:
            command += ["--cache_dir", self.flags.cache_dir]
        threads = str(run.recipe_file.get("threads", 1))
        env = {"OMP_NUM_THREADS": threads} if run.recipe.get("deterministic") else {}
        status, output = run_replay([str(word) for word in command], env)
        if status:
            output_lines = output.splitlines() or ["no output"]
            print("\n".join(output_lines[-PRINTED_OUTPUT_LINES:]), file=sys.stderr)
            error_lines = (line for line in reversed(output_lines) if "error" in line)
            raise ValueError(next(error_lines, output_lines[-1]))
        return folder

    def _write_replay_config(self, run: RunRecord, folder: Path) -> Path:
        """Write a --config file with the run's recipe and all other settings that affect the results."""
        flags = self._flags_copied_to_replay()
        config = {flag: run.recipe[flag] for flag in flags if run.recipe.get(flag) is not None}
        micro_batch = self.flags.per_device_batch_size or run.result_values.get("per_device_batch_size")
        preprocessing_flags = [flag for flag in CROP_FLAGS if flag in flags]
        # Earlier versions did not record the preprocessing.
        preprocessing = run.recipe_file.get("preprocessing", {"interpolation": LEGACY})
        config |= {flag: preprocessing[flag] for flag in preprocessing_flags if flag in preprocessing}
        changed_flags = [*run.recipe.get("allow_changed", []), "data", *preprocessing_flags]
        config |= {"per_device_batch_size": micro_batch, "allow_changed": changed_flags}
        config |= {"data": self.flags.data} if self.flags.data else {}
        config_file = folder.with_suffix(".json")
        config_file.write_text(json.dumps(config))
        return config_file

    # --- Output

    def describe_outcome(self, outcome: ReplayOutcome) -> str:
        """Describe an interval's outcome, with one line per finding."""
        interval, findings = f"{outcome.interval} of {self.last_step:,}", outcome.findings
        if outcome.is_exact and not findings:
            return f"{interval}: bitwise identical. The log, data, recipe and weights match the page"
        differences = ", ".join(f"{name} {value:.1e}" for name, value in outcome.max_differences.items())
        lines = [*findings, *([f"largest differences: {differences}"] if differences else [])]
        return "\n".join(f"{interval}: {line}" for line in lines)

    def print_verdict(self, contradictions: list[str], outcomes: list[ReplayOutcome]) -> int:
        """Print the coverage, append the outcome to verified.json, and return the exit status."""
        replayed = [outcome for outcome in outcomes if outcome.is_replayed]
        replayed_steps = sum(outcome.interval.end - outcome.interval.start for outcome in replayed)
        compared_checkpoints = {step for outcome in replayed for step in outcome.interval.checkpoint_steps}
        is_exact = bool(replayed) and all(outcome.is_exact for outcome in replayed)
        verification = BIT_FOR_BIT if is_exact else EVALUATED_AGAIN
        missing_evaluations = self._missing_headline_evaluations(replayed)
        missing = [*missing_evaluations, *self._unexplained_evaluations(replayed)]
        print("".join(f"{finding}\n" for finding in missing), end="")
        findings = [*contradictions, *missing]
        findings += [f"{outcome.interval}: {finding}" for outcome in outcomes for finding in outcome.findings]
        run_steps = max(1, self.last_step - self.first_step)
        coverage = f"{replayed_steps:,} of {run_steps:,} steps ({replayed_steps / run_steps:.1%})"
        coverage += f" and {len(compared_checkpoints)} of {len(self.checkpoint_steps)} checkpoints"
        no_difference = f"no difference. {VERIFICATION_MEANING[verification]}"
        verdict = plural(len(findings), "difference") if findings else no_difference
        print(f"{coverage} replayed, {verification}: {verdict}")
        unverified_parts = self._unverified_parts(replayed, compared_checkpoints)
        not_verified = [f"{run_steps - replayed_steps:,} steps", *NEVER_VERIFIED, *unverified_parts]
        print(f"not verified: {'; '.join(not_verified)}")
        recipe_changes = list(self.recipe_changes())
        print("".join(f"the recipe changed at {change}\n" for change in recipe_changes), end="")
        git = ["git", "-C", str(ROOT), "rev-parse", "--short", "HEAD"]
        commit = subprocess.run(git, capture_output=True, text=True, check=False).stdout.strip()
        largest_differences: dict[str, float] = {}  # by quantity, in all trained intervals
        for outcome in replayed:
            if outcome.interval.is_evaluation:
                continue
            for quantity, difference in outcome.max_differences.items():
                largest_differences[quantity] = max(largest_differences.get(quantity, 0.0), difference)
        stamp: ReplayRecord = {
            "date": time.strftime("%Y-%m-%d"),
            "commit": commit or None,
            "kind": verification,
            "device": self.device_type,
            "config": self.flags.config_file.stem if self.flags.config_file else "one process",
            "mixed_precision": ", ".join(dict.fromkeys(self._mixed_precisions())),
            "recipe_changes": recipe_changes,
            "steps": replayed_steps,
            "of_steps": run_steps,
            "intervals": [str(outcome.interval) for outcome in replayed],
            "checkpoints": [step_name(step) for step in sorted(compared_checkpoints)],
            "differences": largest_differences,
            "findings": findings,
            "not_verified": not_verified,
            "files": self.hash_by_file,
        }
        verified_file = self.folder / VERIFIED_FILE
        write_json(verified_file, {"stamps": [*self.record.verifications, stamp]})
        print(
            f"Wrote {shortest(verified_file)}. To update the run's page, run:"
            f" python logbook.py add {shortest(self.folder)}"
        )
        return 1 if findings else 0

    def _missing_headline_evaluations(self, replayed: list[ReplayOutcome]) -> Iterator[str]:
        """Yield headline evaluations that no replay repeated, for example because a checkpoint is missing."""
        evaluated_steps = {outcome.interval.start for outcome in replayed if outcome.interval.is_evaluation}
        for step in sorted({*self.headline_steps} - evaluated_steps):
            yield f"the evaluation at step {step:,}, which the headline reports, could not be repeated"

    def _steps_without_repeated_evaluation(self, replayed: list[ReplayOutcome]) -> set[int]:
        """Return steps in replayed intervals whose logged evaluation no replay repeated."""
        not_repeated_steps = {step for outcome in replayed for step in outcome.not_repeated_steps}
        return not_repeated_steps - {step for outcome in replayed for step in outcome.evaluated_steps}

    def _unexplained_evaluations(self, replayed: list[ReplayOutcome]) -> Iterator[str]:
        """Yield logged evaluations at steps at which neither an epoch nor a start (--max_steps) ended."""
        kept_starts = self.record.kept_starts
        if kept_starts and all(start.is_recorded for start in kept_starts):
            start_recipes = [start.settings.get("recipe", {}) for start in self.record.starts]
            ends_of_starts = {recipe.get("max_steps") for recipe in start_recipes}
            for step in sorted(self._steps_without_repeated_evaluation(replayed) - ends_of_starts):
                reason = "but neither an epoch nor a start ended at this step"
                yield f"the log contains an evaluation at step {step:,}, {reason}"

    def _mixed_precisions(self) -> Iterator[str]:
        records = (step_range.record for step_range in self.step_ranges)
        return (record.recipe_file.get("mixed_precision", "no") for record in records)

    def _unverified_parts(self, replayed: list[ReplayOutcome], compared_checkpoints: set[int]) -> list[str]:
        """Return the parts of the run that a replay could have verified but did not."""
        unverified = []
        if steps := sorted(self._steps_without_repeated_evaluation(replayed)):
            unverified.append(
                f"evaluations within an epoch, at steps without a checkpoint ({some_of(steps)})"
            )
        if reasons := dict.fromkeys(reason for outcome in replayed for reason in outcome.reasons_not_exact):
            unverified.append(f"bitwise equality ({some_of(list(reasons))})")

            best_by = METRICS.get(self.recipe.get("best_by", ""))
            unverified_metrics = [
                metric.title for metric in METRICS.values() if metric.by_class and metric is not best_by
            ]
            unverified += ["whether these steps produced the weights", "precision", *unverified_metrics]
        if other_checkpoints := sorted({*self.checkpoint_steps} - compared_checkpoints):
            unverified.append(f"weights in the checkpoints at steps {some_of(other_checkpoints)}")
        if resumed_from := self.record.recipe_file.get("resumed_from"):
            unverified.append(f"the training before {resumed_from}, which the run resumed")
        unknown_flags = self.recipe.keys() - {field.name for field in fields(self.recipe_type)}
        if unknown_flags:
            flags = some_of(sorted(unknown_flags))
            unverified.append(f"flags that {self.script.name} does not define: {flags}")
        return unverified


def run_replay(command: list[str], env: dict[str, str]) -> tuple[int, str]:
    """Run a replay with additional environment variables. Return the exit status and the replay's output."""
    process = subprocess.run(
        command,
        env=os.environ | env,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
    )
    return process.returncode, process.stdout
