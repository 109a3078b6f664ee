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
        """True if the start that trained these steps first repeated the evaluation at begin_step.

        Such a start changed the metric that selects the best checkpoint, or the evaluated images.
        """
        return resets_best_result(self.record.recipe_file)


class Verification:
    """Verification of a run, with the intervals to replay according to the flags.

    Raises:
        ValueError: If no replay is possible.
    """

    def __init__(self, flags: argparse.Namespace):
        """Read the run's files, load its script, and choose the intervals. Replay nothing yet."""
        self.flags, self.folder = flags, flags.run
        self.hash_by_file = hash_compared_files(flags.run)  # hash before reading, for verified.json
        self.record = record = RunRecord(flags.run)
        run_status = record.result_values["status"]
        recipe_settings = record.recipe_file
        if run_status != "finished":
            remedy = "Repeat the training command to finish the run."
            raise ValueError(f"{flags.run} is not finished ({run_status}). {remedy}")
        self.script = flags.script or project_script(recipe_settings.get("script"))
        self.recipe_type = recipe_class(load_script(self.script))
        self.recipe = record.recipe
        self.steps_per_epoch = replay.recorded_steps_per_epoch(record)
        if not self.recipe:
            raise ValueError(f"{flags.run} contains no recipe: {some_of(record.problems)}")
        self.last_step = record.result_values["steps"]
        # Steps whose evaluations the page shows as headlines
        self.headline_steps = sorted({self.last_step, record.result_values.get("best_step", self.last_step)})
        self.checkpoints_folder = flags.run / "checkpoints"
        self.checkpoint_steps = sorted(steps_in(self.checkpoints_folder))
        checkpoint_by_first_step = self._checkpoint_by_first_step(recipe_settings.get("resumed_from"))
        # Steps from which a replay can start. The value is None for fresh weights.
        self.start_checkpoints = checkpoint_by_first_step | {
            step: self.checkpoints_folder / step_name(step) for step in self.checkpoint_steps
        }
        self.first_step = min(checkpoint_by_first_step, default=0)
        launch_config = read_yaml("--config_file", flags.config_file) if flags.config_file else {}
        uses_cuda = torch.cuda.is_available() and not launch_config.get("use_cpu")
        self.device_type = "cuda" if uses_cuda else "cpu"
        self.step_ranges = self._split_into_step_ranges()
        for step_range in self.step_ranges:
            self._check_device_type(step_range.record)
        self.intervals = self._sample_intervals(self._all_intervals()) + self._evaluation_intervals()

    def _split_into_step_ranges(self) -> list["StepRange"]:
        """Split the run into ranges of steps trained with the same settings."""
        step_ranges: list[StepRange] = []
        for start in self.record.kept_starts:
            start_record = self.record.with_settings_of(start)
            if not step_ranges:
                step_ranges = [StepRange(0, self.last_step, start_record)]
            elif self._training_settings(start_record) != self._training_settings(step_ranges[-1].record):
                # The previous range ends where this start begins.
                step_ranges[-1] = replace(step_ranges[-1], last_step=start.begin_step)
                step_ranges.append(StepRange(start.begin_step, self.last_step, start_record))
        return step_ranges or [StepRange(0, self.last_step, self.record)]

    def _flags_copied_to_replay(self) -> list[str]:
        """Return the names of flags whose values a replay copies from the run."""
        return [*flags_where(self.recipe_type, "part_of_recipe"), *flags_where(self.recipe_type, "replayed")]

    def _training_settings(self, record: RunRecord) -> list[Any]:
        """Return the settings that a replay copies from the run or that bitwise equality depends on."""
        flag_values = (record.recipe.get(flag) for flag in self._flags_copied_to_replay())
        result_values = (record.result_values.get(result_key) for result_key in replay.RESULTS_FOR_BITWISE)
        recipe_settings = (record.recipe_file.get(key) for key in ("source", *replay.SETTINGS_FOR_BITWISE))
        return [*flag_values, *result_values, *recipe_settings]

    def _range_with_step(self, step: int) -> "StepRange":
        """Return the step range that contains a step, or the last range for a later step."""
        last_range = self.step_ranges[-1]
        return next((candidate for candidate in self.step_ranges if step <= candidate.last_step), last_range)

    def _range_for_replay(self, interval: Interval) -> "StepRange":
        """Return the step range whose recipe an interval's replay uses.

        An evaluation belongs to the range that trained its step, unless the next start repeated the
        evaluation on different images.
        """
        next_range = self._range_with_step(interval.start + 1)
        if not interval.is_evaluation:
            return next_range
        if next_range.repeats_evaluation and next_range.begin_step == interval.start:
            return next_range
        return self._range_with_step(interval.start)

    def recipe_changes(self) -> Iterator[str]:
        """Yield recipe changes between step ranges, for example `step 100: lr was 0.003, now 0.001`."""
        for previous_range, current_range in pairwise(self.step_ranges):
            recipe_flags = flags_where(self.recipe_type, "part_of_recipe")
            old_recipe, new_recipe = previous_range.record.recipe, current_range.record.recipe
            change_texts = [
                f"{flag} was {flag_text(old_recipe.get(flag))}, now {flag_text(new_recipe.get(flag))}"
                for flag in recipe_flags
                if old_recipe.get(flag) != new_recipe.get(flag)
            ]
            old_source, new_source = (
                step_range.record.recipe_file.get("source") for step_range in (previous_range, current_range)
            )
            if old_source != new_source:
                change_texts.append(f"the content of the data was {old_source}, now {new_source}")
            if change_texts:
                yield f"step {current_range.begin_step:,}: {'; '.join(change_texts)}"

    def _checkpoint_by_first_step(self, resumed_from: str | None) -> dict[int, Path | None]:
        """Map the run's first step to the checkpoint from which it resumed, or to None for fresh weights.

        The mapping is empty if the checkpoint no longer exists.
        """
        if resumed_from is None:
            return {0: None}
        resumed_path = Path(resumed_from).resolve()
        first_logged_step = self.record.metrics[0]["step"]
        # `resumed_from` is either a checkpoint, a run folder or a folder with checkpoints.
        if (step := step_from_name(resumed_path.name)) is not None:
            return {step: resumed_path} if resumed_path.is_dir() else {}
        for checkpoints_folder in (resumed_path / "checkpoints", resumed_path):
            saved_steps = [step for step in steps_in(checkpoints_folder) if step <= first_logged_step]
            if saved_steps:  # newest first
                return {saved_steps[0]: checkpoints_folder / step_name(saved_steps[0])}
        return {}

    def _check_device_type(self, record: RunRecord) -> None:
        """Raise ValueError if a replay on this device type would draw different random numbers."""
        device, *_ = record.recipe_file.get("devices") or [""]
        run_device_type = "cpu" if device.startswith("CPU") else "cuda"
        device_flags = flags_where(self.recipe_type, "drawn_on_device")
        used_flags = [flag for flag in device_flags if record.recipe.get(flag)]
        if used_flags and run_device_type != self.device_type:
            raise ValueError(
                f"--{used_flags[0]} used random numbers from {printable(device)}, which this device does not"
                " produce. Verify the run on a device of the same type."
            )

    def _all_intervals(self) -> list[Interval]:
        """Return all intervals that start at the beginning or at a kept checkpoint, without overlaps.

        Each interval ends at the first log line after at least --steps steps, or at the last log line of its
        step range.
        """
        intervals: list[Interval] = []
        for start_step in sorted(self.start_checkpoints):
            if start_step >= self.last_step or (intervals and start_step < intervals[-1].end):
                continue
            step_range = self._range_with_step(start_step + 1)
            log_every = step_range.record.recipe.get("log_every", 50)  # 50 is the flag's default
            steps_per_epoch = replay.recorded_steps_per_epoch(step_range.record)
            steps = range(start_step + 1, step_range.last_step + 1)
            logged_steps = [step for step in steps if not step % log_every or not step % steps_per_epoch]
            logged_steps += [self.last_step] if step_range.last_step == self.last_step else []
            if not logged_steps:  # the recipe changed before the next log line
                continue
            min_end_step = start_step + self.flags.steps
            end_step = next((step for step in logged_steps if step >= min_end_step), logged_steps[-1])
            saved_steps = tuple(step for step in self.checkpoint_steps if start_step < step <= end_step)
            intervals.append(Interval(start_step, end_step, saved_steps))
        return intervals

    def _sample_intervals(self, intervals: list[Interval]) -> list[Interval]:
        """Return --sample random intervals, sorted by start, and print the seed of the selection."""
        if self.flags.sample is None or self.flags.sample >= len(intervals):
            return intervals
        seed = random.randrange(2**32) if self.flags.seed is None else self.flags.seed
        selection_text = f"{self.flags.sample} of {len(intervals)} intervals"
        print(f"Replaying {selection_text}, chosen with --seed {seed}", flush=True)
        sampled_intervals = random.Random(seed).sample(intervals, self.flags.sample)
        return sorted(sampled_intervals, key=lambda interval: interval.start)

    def _evaluation_intervals(self) -> list[Interval]:
        """Return the evaluations to repeat, as intervals.

        The best checkpoint (also on the test split) and the last checkpoint are evaluated again. Kept
        checkpoints within an epoch are also evaluated, because a replay evaluates only at the end of an
        epoch.
        """
        evaluated_steps = {evaluation["step"] for evaluation in self.record.evaluations}
        steps_within_epoch = {step for step in evaluated_steps if step % self.steps_per_epoch}
        interval_steps = {*self.headline_steps, *(steps_within_epoch & {*self.checkpoint_steps})}
        return [Interval(step, step) for step in sorted(interval_steps) if step in self.start_checkpoints]

    # --- One interval

    def replay(self, interval: Interval) -> ReplayOutcome:
        """Train an interval's steps again in a temporary folder, and compare the result with the run.

        The outcome contains an error of the replay as a finding. The run folder does not change.
        """
        outcome = ReplayOutcome(interval)
        saved_steps = {interval.start, *interval.checkpoint_steps} & {*self.checkpoint_steps}
        outcome.findings = [
            finding for step in sorted(saved_steps) for finding in self._checkpoint_findings(step)
        ]
        if outcome.findings:  # do not train from a damaged checkpoint
            return outcome
        try:
            with tempfile.TemporaryDirectory(prefix="verify-", ignore_cleanup_errors=True) as scratch_name:
                self._replay_and_compare(outcome, Path(scratch_name))
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
        run_recipe = self._range_with_step(step).record.recipe
        changed_flags = [flag for flag in trained_recipe if trained_recipe[flag] != run_recipe.get(flag)]
        changes = [f"{flag} {trained_recipe[flag]}, not {run_recipe.get(flag)}" for flag in changed_flags]
        if changes:
            yield f"the checkpoint of step {step:,} was trained with {', '.join(changes)}"

    def _replay_and_compare(self, outcome: ReplayOutcome, scratch_folder: Path) -> None:
        """Train the outcome's interval in `scratch_folder`, and add the comparison to the outcome."""
        recorded_run = self._range_for_replay(outcome.interval).record
        replay_folder = self._train_interval(outcome.interval, recorded_run, scratch_folder / "replay")
        replayed_run = RunRecord(replay_folder)
        outcome.is_replayed = True
        outcome.reasons_not_exact = replay.why_not_exact(recorded_run, replayed_run)
        outcome.is_exact = not outcome.reasons_not_exact
        outcome.findings += replay.compare_results(recorded_run, replayed_run, is_moved=bool(self.flags.data))
        outcome.findings += replay.compare_with_replay(recorded_run, replayed_run, outcome)

    def _train_interval(self, interval: Interval, run: RunRecord, output_folder: Path) -> Path:
        """Train an interval's steps with the run's script in a subprocess.

        Args:
            interval: Steps to train, starting from a kept checkpoint or from fresh weights.
            run: Recorded run, with the settings of the start that trained the interval.
            output_folder: Folder for the new run.

        Returns:
            `output_folder`, which is then a run folder.

        Raises:
            ValueError: If the script fails. The message is a line of its output, and stderr shows more lines.
        """
        # The largest period that saves at all compared steps. Without compared steps, save none.
        checkpoint_every = math.gcd(*interval.checkpoint_steps) or 10**9
        launcher_words = ["-m", "accelerate.commands.launch", "--config_file", self.flags.config_file]
        replay_command = [sys.executable, *(launcher_words if self.flags.config_file else ()), self.script]
        replay_command += ["--config", self._write_replay_config(run, output_folder)]
        replay_command += ["--output_dir", output_folder, "--max_steps", interval.end, "--trackers", "none"]
        replay_command += ["--checkpoint_every", checkpoint_every, "--keep_every", checkpoint_every]
        replay_command += ["--telemetry_s", "0"]
        replay_command += ["--mixed_precision", run.recipe_file.get("mixed_precision", "no")]
        if start_checkpoint := self.start_checkpoints[interval.start]:
            replay_command += ["--resume", start_checkpoint]
        if self.flags.cache_dir:
            replay_command += ["--cache_dir", self.flags.cache_dir]
        # The number of CPU threads can change rounding.
        thread_count = str(run.recipe_file.get("threads", 1))
        replay_env = {"OMP_NUM_THREADS": thread_count} if run.recipe.get("deterministic") else {}
        exit_status, replay_output = run_replay([str(word) for word in replay_command], replay_env)
        if exit_status:
            output_lines = replay_output.splitlines() or ["no output"]
            print("\n".join(output_lines[-PRINTED_OUTPUT_LINES:]), file=sys.stderr)
            # Prefer the last line with "error" to the last line, which may be a launcher's remark.
            error_lines = (output_line for output_line in reversed(output_lines) if "error" in output_line)
            raise ValueError(next(error_lines, output_lines[-1]))
        return output_folder

    def _write_replay_config(self, run: RunRecord, replay_folder: Path) -> Path:
        """Write a --config file with the run's recipe and all other settings that affect the results.

        The file is next to `replay_folder`, with the suffix .json. Return its path.
        """
        copied_flags = self._flags_copied_to_replay()
        replay_config = {flag: run.recipe[flag] for flag in copied_flags if run.recipe.get(flag) is not None}
        micro_batch_size = self.flags.per_device_batch_size or run.result_values.get("per_device_batch_size")
        preprocessing_flags = [flag for flag in CROP_FLAGS if flag in copied_flags]
        # Earlier versions did not record the preprocessing.
        preprocessing = run.recipe_file.get("preprocessing", {"interpolation": LEGACY})
        replay_config |= {flag: preprocessing[flag] for flag in preprocessing_flags if flag in preprocessing}
        # Without this permission, the train script refuses to resume with changed flags.
        changed_flags = [*run.recipe.get("allow_changed", []), "data", *preprocessing_flags]
        replay_config |= {"per_device_batch_size": micro_batch_size, "allow_changed": changed_flags}
        replay_config |= {"data": self.flags.data} if self.flags.data else {}
        config_file = replay_folder.with_suffix(".json")
        config_file.write_text(json.dumps(replay_config))
        return config_file

    # --- Output

    def describe_outcome(self, outcome: ReplayOutcome) -> str:
        """Describe an interval's outcome in one line per finding, and list the largest differences."""
        interval_text, findings = f"{outcome.interval} of {self.last_step:,}", outcome.findings
        if outcome.is_exact and not findings:
            return f"{interval_text}: bitwise identical. The log, data, recipe and weights match the page"
        differences = ", ".join(
            f"{quantity} {difference:.1e}" for quantity, difference in outcome.max_differences.items()
        )
        outcome_lines = [*findings, *([f"largest differences: {differences}"] if differences else [])]
        return "\n".join(f"{interval_text}: {outcome_line}" for outcome_line in outcome_lines)

    def print_verdict(self, contradictions: list[str], outcomes: list[ReplayOutcome]) -> int:
        """Print the coverage, append the outcome to verified.json, and return the exit status.

        Args:
            contradictions: Contradictions between the run's files.
            outcomes: Outcomes of all intervals. Some of them may not have been replayed.

        Returns:
            1 if anything differs, else 0.
        """
        replays = [outcome for outcome in outcomes if outcome.is_replayed]
        replayed_steps = sum(outcome.interval.end - outcome.interval.start for outcome in replays)
        compared_checkpoints = {step for outcome in replays for step in outcome.interval.checkpoint_steps}
        is_exact = bool(replays) and all(outcome.is_exact for outcome in replays)
        verification_type = BIT_FOR_BIT if is_exact else EVALUATED_AGAIN
        missing_evaluations = self._missing_headline_evaluations(replays)
        evaluation_findings = [*missing_evaluations, *self._unexplained_evaluations(replays)]
        print("".join(f"{finding}\n" for finding in evaluation_findings), end="")
        findings = [*contradictions, *evaluation_findings]
        findings += [f"{outcome.interval}: {finding}" for outcome in outcomes for finding in outcome.findings]
        run_steps = max(1, self.last_step - self.first_step)
        coverage_text = f"{replayed_steps:,} of {run_steps:,} steps ({replayed_steps / run_steps:.1%})"
        coverage_text += f" and {len(compared_checkpoints)} of {len(self.checkpoint_steps)} checkpoints"
        success_text = f"no difference. {VERIFICATION_MEANING[verification_type]}"
        verdict = plural(len(findings), "difference") if findings else success_text
        print(f"{coverage_text} replayed, {verification_type}: {verdict}")
        unverified_parts = self._unverified_parts(replays, compared_checkpoints)
        unverified_items = [f"{run_steps - replayed_steps:,} steps", *NEVER_VERIFIED, *unverified_parts]
        print(f"not verified: {'; '.join(unverified_items)}")
        recipe_changes = list(self.recipe_changes())
        print("".join(f"the recipe changed at {recipe_change}\n" for recipe_change in recipe_changes), end="")
        git_command = ["git", "-C", str(ROOT), "rev-parse", "--short", "HEAD"]
        commit = subprocess.run(git_command, capture_output=True, text=True, check=False).stdout.strip()
        largest_differences: dict[str, float] = {}  # by quantity, in all trained intervals
        for outcome in replays:
            if outcome.interval.is_evaluation:
                continue
            for quantity, difference in outcome.max_differences.items():
                largest_differences[quantity] = max(largest_differences.get(quantity, 0.0), difference)
        replay_record: ReplayRecord = {
            "date": time.strftime("%Y-%m-%d"),
            "commit": commit or None,
            "kind": verification_type,
            "device": self.device_type,
            "config": self.flags.config_file.stem if self.flags.config_file else "one process",
            "mixed_precision": ", ".join(dict.fromkeys(self._mixed_precisions())),
            "recipe_changes": recipe_changes,
            "steps": replayed_steps,
            "of_steps": run_steps,
            "intervals": [str(outcome.interval) for outcome in replays],
            "checkpoints": [step_name(step) for step in sorted(compared_checkpoints)],
            "differences": largest_differences,
            "findings": findings,
            "not_verified": unverified_items,
            "files": self.hash_by_file,
        }
        verified_file = self.folder / VERIFIED_FILE
        write_json(verified_file, {"stamps": [*self.record.verifications, replay_record]})
        print(
            f"Wrote {shortest(verified_file)}. To update the run's page, run:"
            f" python logbook.py add {shortest(self.folder)}"
        )
        return 1 if findings else 0

    def _missing_headline_evaluations(self, replays: list[ReplayOutcome]) -> Iterator[str]:
        """Yield a finding for each headline evaluation that no replay repeated.

        An evaluation can't be repeated if its checkpoint is missing.
        """
        evaluated_steps = {outcome.interval.start for outcome in replays if outcome.interval.is_evaluation}
        for step in sorted({*self.headline_steps} - evaluated_steps):
            yield f"the evaluation at step {step:,}, which the headline reports, could not be repeated"

    def _steps_without_repeated_evaluation(self, replays: list[ReplayOutcome]) -> set[int]:
        """Return steps in replayed intervals whose logged evaluation no replay repeated."""
        not_repeated_steps = {step for outcome in replays for step in outcome.not_repeated_steps}
        return not_repeated_steps - {step for outcome in replays for step in outcome.evaluated_steps}

    def _unexplained_evaluations(self, replays: list[ReplayOutcome]) -> Iterator[str]:
        """Yield a finding for each logged evaluation at whose step neither an epoch nor a start ended.

        A start ends at its --max_steps. If starts.jsonl does not record all starts, yield nothing.
        """
        kept_starts = self.record.kept_starts
        if kept_starts and all(start.is_recorded for start in kept_starts):
            start_recipes = [start.settings.get("recipe", {}) for start in self.record.starts]
            ends_of_starts = {recipe.get("max_steps") for recipe in start_recipes}
            for step in sorted(self._steps_without_repeated_evaluation(replays) - ends_of_starts):
                reason = "but neither an epoch nor a start ended at this step"
                yield f"the log contains an evaluation at step {step:,}, {reason}"

    def _mixed_precisions(self) -> Iterator[str]:
        """Return the mixed precision of each step range, which may occur several times."""
        records = (step_range.record for step_range in self.step_ranges)
        return (record.recipe_file.get("mixed_precision", "no") for record in records)

    def _unverified_parts(self, replays: list[ReplayOutcome], compared_checkpoints: set[int]) -> list[str]:
        """Return the parts of the run that a replay could have verified but did not."""
        unverified_parts = []
        if unrepeated_steps := sorted(self._steps_without_repeated_evaluation(replays)):
            unverified_parts.append(
                f"evaluations within an epoch, at steps without a checkpoint ({some_of(unrepeated_steps)})"
            )
        if reasons := dict.fromkeys(reason for outcome in replays for reason in outcome.reasons_not_exact):
            unverified_parts.append(f"bitwise equality ({some_of(list(reasons))})")

            best_by = self.recipe.get("best_by", "")
            unverified_metrics = [
                metric.title
                for metric_name, metric in METRICS.items()
                if not replay.is_metric_compared(metric_name, best_by)
            ]
            unverified_parts += ["whether these steps produced the weights", "precision", *unverified_metrics]
        if other_checkpoints := sorted({*self.checkpoint_steps} - compared_checkpoints):
            unverified_parts.append(f"weights in the checkpoints at steps {some_of(other_checkpoints)}")
        if resumed_from := self.record.recipe_file.get("resumed_from"):
            unverified_parts.append(f"the training before {resumed_from}, which the run resumed")
        unknown_flags = self.recipe.keys() - {recipe_field.name for recipe_field in fields(self.recipe_type)}
        if unknown_flags:
            flags_text = some_of(sorted(unknown_flags))
            unverified_parts.append(f"flags that {self.script.name} does not define: {flags_text}")
        return unverified_parts


def run_replay(command: list[str], env: dict[str, str]) -> tuple[int, str]:
    """Run a replay's command in a subprocess with additional environment variables.

    Returns:
        A tuple of the exit status and the output, which combines stdout and stderr.
    """
    replay_process = subprocess.run(
        command,
        env=os.environ | env,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
    )
    return replay_process.returncode, replay_process.stdout
