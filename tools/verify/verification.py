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

from onecurve.checkpoint.format import step_name, step_of, steps_in, verify
from onecurve.flags.fields import flags_where, without_removed
from onecurve.flags.recipe import METRICS
from onecurve.models.preprocessing import CROP_FLAGS, LEGACY
from onecurve.models.script import load_script, own_script, recipe_class
from onecurve.run.schemas import ReplayRecord
from onecurve.system.files import read_yaml, write_json
from onecurve.system.paths import ROOT, shortest
from onecurve.system.text import plural, printable, some_of
from tools.logbook.run_record import (
    BIT_FOR_BIT,
    EVALUATED_AGAIN,
    MEANING,
    VERIFIED,
    RunRecord,
    flag_text,
    hash_compared_files,
    resets_best_result,
)
from tools.verify import replay
from tools.verify.replay import Interval, Outcome

SHOWN_OUTPUT_LINES = 15  # number of last lines of a failed replay's output to print
NOT_VERIFIED = (
    "devices, hosts, strategy, model FLOPs, times, throughput and memory",
    "commit, versions and command",
    "plots, confusion matrices and reports of validate.py",
)


@dataclass(frozen=True)
class StepRange:
    """Range of steps from first + 1 to last, trained with the same settings.

    Attributes:
        record: Copy of the run in which all starts have these settings.
    """

    first: int
    last: int
    record: RunRecord

    @property
    def repeats_evaluation(self) -> bool:
        """True if the start that trained these steps repeated the evaluation at its first step."""
        return resets_best_result(self.record.settings)


class Verification:
    """Verification of a run, with the intervals to replay according to the flags.

    Raises:
        ValueError: If no replay is possible.
    """

    def __init__(self, flags: argparse.Namespace):
        self.flags, self.folder, self.files = flags, flags.run, hash_compared_files(flags.run)
        self.record = record = RunRecord(flags.run)
        status, settings = record.facts["status"], record.settings
        if status != "finished":
            remedy = "Repeat the training command to finish the run."
            raise ValueError(f"{flags.run} is not finished ({status}). {remedy}")
        self.script = flags.script or own_script(settings.get("script"))
        self.recipe_type = recipe_class(load_script(self.script))
        self.recipe, self.per_epoch = record.recipe, replay.recorded_steps_per_epoch(record)
        if not self.recipe:
            raise ValueError(f"{flags.run} contains no recipe: {some_of(record.problems)}")
        self.last = record.facts["steps"]
        self.best = record.facts.get("best_step", self.last)
        self.headline = sorted({self.last, self.best})  # steps whose evaluations the page shows as headlines
        self.checkpoints = flags.run / "checkpoints"
        self.kept = sorted(steps_in(self.checkpoints))
        began = self._initial_checkpoint(settings.get("resumed_from"))
        self.starts = began | {step: self.checkpoints / step_name(step) for step in self.kept}
        self.began = min(began, default=0)
        config = read_yaml("--config_file", flags.config_file) if flags.config_file else {}
        self.device = "cuda" if torch.cuda.is_available() and not config.get("use_cpu") else "cpu"
        self.parts = self._split_into_parts()
        for part in self.parts:
            self._check_device(part.record)
        self.intervals = self._sample_intervals(self._all_intervals()) + self._evaluation_intervals()

    def _split_into_parts(self) -> list["StepRange"]:
        """Split the run into ranges of steps trained with the same settings."""
        parts: list[StepRange] = []
        for start in self.record.kept:
            record = self.record.as_of(start)
            if not parts:
                parts = [StepRange(0, self.last, record)]
            elif self._training_settings(record) != self._training_settings(parts[-1].record):
                parts[-1:] = [replace(parts[-1], last=start.first), StepRange(start.first, self.last, record)]
        return parts or [StepRange(0, self.last, self.record)]

    def _repeated_flags(self) -> list[str]:
        """Return the names of flags whose values a replay copies from the run."""
        return [*flags_where(self.recipe_type, "part_of_recipe"), *flags_where(self.recipe_type, "replayed")]

    def _training_settings(self, record: RunRecord) -> list[Any]:
        """Return the settings that a replay copies from the run or that bitwise equality depends on."""
        names = self._repeated_flags()
        facts = (record.facts.get(name) for name in ("per_device_batch_size", "device", "step_graph"))
        settings = (record.settings.get(name) for name in ("source", *replay.BITWISE_SETTINGS))
        return [*(record.recipe.get(name) for name in names), *facts, *settings]

    def _part_at(self, step: int) -> "StepRange":
        """Return the run's part that contains a step."""
        return next((part for part in self.parts if step <= part.last), self.parts[-1])

    def _part_for(self, interval: Interval) -> "StepRange":
        """Return the part whose recipe an interval's replay uses.

        An evaluation belongs to the part that trained its step, unless the next start repeated the
        evaluation on different images.
        """
        if not interval.is_evaluation:
            return self._part_at(interval.start + 1)
        later = self._part_at(interval.start + 1)
        if later.repeats_evaluation and later.first == interval.start:
            return later
        return self._part_at(interval.start)

    def recipe_changes(self) -> Iterator[str]:
        """Yield recipe changes between parts, for example `step 100: lr was 0.003, now 0.001`."""
        for previous, part in pairwise(self.parts):
            names = flags_where(self.recipe_type, "part_of_recipe")
            old, new = previous.record.recipe, part.record.recipe
            changed = [
                f"{name} was {flag_text(old.get(name))}, now {flag_text(new.get(name))}"
                for name in names
                if old.get(name) != new.get(name)
            ]
            old_source, source = (run.record.settings.get("source") for run in (previous, part))
            if old_source != source:
                changed.append(f"the content of the data was {old_source}, now {source}")
            if changed:
                yield f"step {part.first:,}: {'; '.join(changed)}"

    def _initial_checkpoint(self, resumed_from: str | None) -> dict[int, Path | None]:
        """Map the run's first step to the checkpoint from which it resumed, or to None for fresh weights.

        The mapping is empty if the checkpoint no longer exists.
        """
        if resumed_from is None:
            return {0: None}
        source, first_step = Path(resumed_from).resolve(), self.record.metrics[0]["step"]
        if (step := step_of(source.name)) is not None:
            return {step: source} if source.is_dir() else {}
        for parent in (source / "checkpoints", source):
            if steps := [step for step in steps_in(parent) if step <= first_step]:
                return {steps[0]: parent / step_name(steps[0])}
        return {}

    def _check_device(self, record: RunRecord) -> None:
        devices = record.settings.get("devices") or [""]
        run_device = "cpu" if devices[0].startswith("CPU") else "cuda"
        drawn = [name for name in flags_where(self.recipe_type, "drawn_on_device") if record.recipe.get(name)]
        if drawn and run_device != self.device:
            raise ValueError(
                f"--{drawn[0]} used random numbers from {printable(devices[0])}, which this device does not"
                " produce. Verify the run on a device of the same type."
            )

    def _all_intervals(self) -> list[Interval]:
        """Return all intervals that start at the beginning or at a kept checkpoint, without overlaps.

        Each interval ends at the step of a log line.
        """
        intervals: list[Interval] = []
        for start in sorted(self.starts):
            if start >= self.last or (intervals and start < intervals[-1].end):
                continue
            part = self._part_at(start + 1)
            log_every = part.record.recipe.get("log_every", 50)
            per_epoch = replay.recorded_steps_per_epoch(part.record)
            steps = range(start + 1, part.last + 1)
            logged_steps = [step for step in steps if not step % log_every or not step % per_epoch]
            logged_steps += [self.last] if part.last == self.last else []
            if not logged_steps:  # the recipe changed before the next log line
                continue
            end = next((step for step in logged_steps if step >= start + self.flags.steps), logged_steps[-1])
            intervals.append(Interval(start, end, tuple(step for step in self.kept if start < step <= end)))
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
        inside = {line["step"] for line in self.record.evaluations if line["step"] % self.per_epoch}
        steps = {*self.headline, *(inside & {*self.kept})}
        return [Interval(step, step) for step in sorted(steps) if step in self.starts]

    # --- One interval

    def replay(self, interval: Interval) -> Outcome:
        """Train an interval's steps again and compare the result with the run."""
        outcome = Outcome(interval)
        steps = {step for step in (interval.start, *interval.checkpoints) if step in self.kept}
        outcome.findings = [finding for step in sorted(steps) for finding in self._check_checkpoint(step)]
        if outcome.findings:
            return outcome
        try:
            with tempfile.TemporaryDirectory(prefix="verify-", ignore_cleanup_errors=True) as scratch:
                self._compare_with_training(outcome, Path(scratch))
        except Exception as error:  # the script or a library may raise any error for damaged files
            outcome.findings.append(f"the replay failed: {printable(error)}")
        return outcome

    def _check_checkpoint(self, step: int) -> Iterator[str]:
        """Yield a finding if a checkpoint is damaged or was trained with a different recipe."""
        try:
            manifest = verify(self.checkpoints / step_name(step)).manifest
        except ValueError as error:
            yield f"the checkpoint of step {step:,}: {error}"
            return
        trained_recipe, recipe = (
            without_removed(manifest.get("recipe", {})),
            self._part_at(step).record.recipe,
        )
        changed = [name for name in trained_recipe if trained_recipe[name] != recipe.get(name)]
        if changed:
            values = ", ".join(f"{name} {trained_recipe[name]}, not {recipe.get(name)}" for name in changed)
            yield f"the checkpoint of step {step:,} was trained with {values}"

    def _compare_with_training(self, outcome: Outcome, scratch: Path) -> None:
        run = self._part_for(outcome.interval).record
        repeated = RunRecord(self._run_training(outcome.interval, run, scratch / "replay"))
        outcome.is_replayed = True
        outcome.why_not = replay.why_not_exact(run, repeated)
        outcome.is_exact = not outcome.why_not
        outcome.findings += replay.compare_facts(run, repeated, is_moved=bool(self.flags.data))
        outcome.findings += replay.compare_with_replay(run, repeated, outcome)

    def _run_training(self, interval: Interval, run: RunRecord, folder: Path) -> Path:
        """Run the train script and return the new run folder.

        If the script fails, raise ValueError with a reason.
        """
        checkpoint_every = math.gcd(*interval.checkpoints) or 10**9
        launcher = ["-m", "accelerate.commands.launch", "--config_file", self.flags.config_file]
        words = [sys.executable, *(launcher if self.flags.config_file else ()), self.script]
        words += ["--config", self._write_config(run, folder)]
        words += ["--output_dir", folder, "--max_steps", interval.end, "--trackers", "none"]
        words += ["--checkpoint_every", checkpoint_every, "--keep_every", checkpoint_every]
        words += ["--telemetry_s", "0"]
        words += ["--mixed_precision", run.settings.get("mixed_precision", "no")]
        if start := self.starts[interval.start]:
            words += ["--resume", start]
        if self.flags.cache_dir:
            words += ["--cache_dir", self.flags.cache_dir]
        is_exact, threads = run.recipe.get("deterministic"), str(run.settings.get("threads", 1))
        env = {"OMP_NUM_THREADS": threads} if is_exact else {}
        status, output = run_replay([str(word) for word in words], env)
        if status:
            lines = output.splitlines() or ["no output"]
            print("\n".join(lines[-SHOWN_OUTPUT_LINES:]), file=sys.stderr)
            raise ValueError(next((line for line in reversed(lines) if "error" in line), lines[-1]))
        return folder

    def _write_config(self, run: RunRecord, folder: Path) -> Path:
        """Write a --config file with the run's recipe and all other settings that affect the results."""
        names = self._repeated_flags()
        values = {name: run.recipe[name] for name in names if run.recipe.get(name) is not None}
        micro_batch = self.flags.per_device_batch_size or run.facts.get("per_device_batch_size")
        preprocessing_flags = [name for name in CROP_FLAGS if name in names]
        # Earlier versions did not record the preprocessing.
        preprocessing = run.settings.get("preprocessing", {"interpolation": LEGACY})
        values |= {name: preprocessing[name] for name in preprocessing_flags if name in preprocessing}
        changed = [*run.recipe.get("allow_changed", []), "data", *preprocessing_flags]
        values |= {"per_device_batch_size": micro_batch, "allow_changed": changed}
        values |= {"data": self.flags.data} if self.flags.data else {}
        file = folder.with_suffix(".json")
        file.write_text(json.dumps(values))
        return file

    # --- Output

    def describe(self, outcome: Outcome) -> str:
        """Describe an interval's outcome, with one line per finding."""
        interval, lines = f"{outcome.interval} of {self.last:,}", outcome.findings
        if outcome.is_exact and not lines:
            return f"{interval}: bitwise identical. The log, data, recipe and weights match the page"
        differences = ", ".join(f"{name} {value:.1e}" for name, value in outcome.differences.items())
        lines = [*lines, *([f"largest differences: {differences}"] if differences else [])]
        return "\n".join(f"{interval}: {line}" for line in lines)

    def conclude(self, contradictions: list[str], outcomes: list[Outcome]) -> int:
        """Print the coverage, append the outcome to verified.json, and return the exit status."""
        replayed = [outcome for outcome in outcomes if outcome.is_replayed]
        covered = sum(outcome.interval.end - outcome.interval.start for outcome in replayed)
        compared = {step for outcome in replayed for step in outcome.interval.checkpoints}
        is_exact = bool(replayed) and all(outcome.is_exact for outcome in replayed)
        kind = BIT_FOR_BIT if is_exact else EVALUATED_AGAIN
        missing = [*self._not_evaluated(replayed), *self._unexplained(replayed)]
        print("".join(f"{finding}\n" for finding in missing), end="")
        findings = [*contradictions, *missing]
        findings += [f"{outcome.interval}: {finding}" for outcome in outcomes for finding in outcome.findings]
        of_steps = max(1, self.last - self.began)
        steps = f"{covered:,} of {of_steps:,} steps ({covered / of_steps:.1%})"
        differ = plural(len(findings), "difference") if findings else f"no difference. {MEANING[kind]}"
        print(f"{steps} and {len(compared)} of {len(self.kept)} checkpoints replayed, {kind}: {differ}")
        left_out = [f"{of_steps - covered:,} steps", *NOT_VERIFIED, *self._not_replayed(replayed, compared)]
        print(f"not verified: {'; '.join(left_out)}")
        recipe_changes = list(self.recipe_changes())
        print("".join(f"the recipe changed at {change}\n" for change in recipe_changes), end="")
        git = ["git", "-C", str(ROOT), "rev-parse", "--short", "HEAD"]
        commit = subprocess.run(git, capture_output=True, text=True, check=False).stdout.strip()
        trained = [outcome.differences for outcome in replayed if not outcome.interval.is_evaluation]
        largest: dict[str, float] = {}  # largest difference of each quantity in all trained intervals
        for name, value in (item for differences in trained for item in differences.items()):
            largest[name] = max(largest.get(name, 0.0), value)
        stamp: ReplayRecord = {
            "date": time.strftime("%Y-%m-%d"),
            "commit": commit or None,
            "kind": kind,
            "device": self.device,
            "config": self.flags.config_file.stem if self.flags.config_file else "one process",
            "mixed_precision": ", ".join(dict.fromkeys(self._precisions())),
            "recipe_changes": recipe_changes,
            "steps": covered,
            "of_steps": of_steps,
            "intervals": [str(outcome.interval) for outcome in replayed],
            "checkpoints": [step_name(step) for step in sorted(compared)],
            "differences": largest,
            "findings": findings,
            "not_verified": left_out,
            "files": self.files,
        }
        file = self.folder / VERIFIED
        write_json(file, {"stamps": [*self.record.stamps, stamp]})
        print(
            f"Wrote {shortest(file)}. To update the run's page, run:"
            f" python logbook.py add {shortest(self.folder)}"
        )
        return 1 if findings else 0

    def _not_evaluated(self, replayed: list[Outcome]) -> Iterator[str]:
        """Yield headline evaluations that no replay repeated, for example because a checkpoint is missing."""
        evaluated = {outcome.interval.start for outcome in replayed if outcome.interval.is_evaluation}
        for step in sorted({*self.headline} - evaluated):
            yield f"the evaluation at step {step:,}, which the headline reports, could not be repeated"

    def _not_repeated(self, replayed: list[Outcome]) -> set[int]:
        """Return steps in replayed intervals whose logged evaluation no replay repeated."""
        missing = {step for outcome in replayed for step in outcome.not_repeated}
        return missing - {step for outcome in replayed for step in outcome.evaluated}

    def _unexplained(self, replayed: list[Outcome]) -> Iterator[str]:
        """Yield logged evaluations at steps at which neither an epoch nor a start (--max_steps) ended."""
        kept = self.record.kept
        if kept and all(start.is_recorded for start in kept):
            ends = {start.settings.get("recipe", {}).get("max_steps") for start in self.record.starts}
            for step in sorted(self._not_repeated(replayed) - ends):
                reason = "but neither an epoch nor a start ended at this step"
                yield f"the log contains an evaluation at step {step:,}, {reason}"

    def _precisions(self) -> Iterator[str]:
        return (part.record.settings.get("mixed_precision", "no") for part in self.parts)

    def _not_replayed(self, replayed: list[Outcome], compared: set[int]) -> list[str]:
        """Return the parts of the run that a replay could have verified but did not."""
        lines = []
        if steps := sorted(self._not_repeated(replayed)):
            lines.append(f"evaluations within an epoch, at steps without a checkpoint ({some_of(steps)})")
        if reasons := dict.fromkeys(reason for outcome in replayed for reason in outcome.why_not):
            lines.append(f"bitwise equality ({some_of(list(reasons))})")

            best_by = METRICS.get(self.recipe.get("best_by", ""))
            by_class = [
                metric.title for metric in METRICS.values() if metric.by_class and metric is not best_by
            ]
            lines += ["whether these steps produced the weights", "precision", *by_class]
        if rest := sorted({*self.kept} - compared):
            lines.append(f"weights in the checkpoints at steps {some_of(rest)}")
        if checkpoint := self.record.settings.get("resumed_from"):
            lines.append(f"the training before {checkpoint}, which the run resumed")
        unknown = self.recipe.keys() - {field.name for field in fields(self.recipe_type)}
        if unknown:
            lines.append(f"flags that {self.script.name} does not define: {some_of(sorted(unknown))}")
        return lines


def run_replay(words: list[str], env: dict[str, str]) -> tuple[int, str]:
    """Run a replay with additional environment variables. Return the exit status and the replay's output."""
    process = subprocess.run(
        words,
        env=os.environ | env,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
    )
    return process.returncode, process.stdout
