"""Compare a finished run with replays of some of its steps, for verify.py.

There are two kinds of verification. If --deterministic makes a replay bitwise identical to the run, no value
may differ. Otherwise rounding differs, and training amplifies the differences without a bound. In this case
only evaluations of kept weights are judged, and the differences of trained steps are only reported.
"""

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from onecurve.checkpoint import format as checkpoints
from onecurve.checkpoint.format import OPTIMIZER_FILE, STATE_FILE, step_name
from onecurve.data.class_names import match_classes
from onecurve.flags.recipe import METRICS
from onecurve.run.evaluation import CONFUSED
from onecurve.system.files import read_json
from onecurve.system.text import plural, some_of
from tools.logbook.run_record import COMPARED, RunRecord

# Largest change of a metric's sum over the classes when the predicted class of one image changes, in units of
# 1 / (images of a class). The change affects the recall of one class, and the F1 of two classes by at most
# 2 / images each.
BY_CLASS = {"balanced_accuracy": 1, "macro_f1": 4}
# Largest changes when the same weights are evaluated again: predictions per 10,000 images, because the two
# largest logits of an image may differ only by rounding, and the loss as a fraction. Measurements used a CPU
# and CNN-B on CIFAR-10. Different micro-batches, thread counts and memory layouts changed none of 1,000
# predictions and no loss, in bf16 and fp32. Evaluating in fp32 instead of bf16 changed 3 predictions, but not
# the number of correct predictions, and changed the loss by 0.08 %. GPUs have not been measured yet.
CHANGED_PER_10_000 = {"no": 1, "bf16": 10, "fp16": 10}
CHANGED_LOSS = {"no": 1e-3, "bf16": 1e-2, "fp16": 1e-2}
LISTED = 5  # number of findings listed per comparison of an interval
# Keys of metrics.jsonl that are compared by other code or can't be compared
NOT_REPLAYED = {"step", "epoch", "wall_s", "train/images_per_s", "train/mfu_pct"}
NOT_REPLAYED |= {"interrupted_at", "resumed_at", "why"}
NOT_REPLAYED |= {"hosts", "hosts_before", "processes", "processes_before"}
EXACT = ("lr", "images", "logged_step")  # last parts of keys whose values are independent of rounding
# Keys of result.json. START_KEYS must match the last start in starts.jsonl, and REPEATED_KEYS the replay.
START_KEYS = ("data", "batch_size", "epochs", "seed", "deterministic", "per_device_batch_size")
REPEATED_KEYS = ["script", "data", "batch_size", "epochs", "seed", "deterministic"]
REPEATED_KEYS += ["val_name", "val_images", "test_name", "test_images"]
# Keys of recipe.json or result.json that are compared only if the run recorded them
SAME_WHERE_KNOWN = ("source", "unit", "val_chosen", "parameters", "total_steps")
SAME_BITS = ("mixed_precision", "half_precision", "compile", "versions", "threads")

Numbers = dict[tuple[int, str], list[float]]  # logged values by step and key


@dataclass(frozen=True)
class Interval:
    """Range of steps from start + 1 to end, with the evaluation at step start.

    Attributes:
        checkpoints: steps of the kept checkpoints in the interval.
    """

    start: int
    end: int
    checkpoints: tuple[int, ...] = ()

    @property
    def is_evaluation(self) -> bool:
        return self.start == self.end

    def __str__(self) -> str:
        if self.is_evaluation:
            return f"the evaluation at step {self.end:,}"
        return f"steps {self.start:,}-{self.end:,}"


@dataclass
class Outcome:
    """Result of comparing one interval with its replay."""

    interval: Interval
    findings: list[str] = field(default_factory=list)
    is_replayed: bool = False
    is_exact: bool = False  # True if no value may differ
    why_not: list[str] = field(default_factory=list)  # reasons why values are allowed to differ
    # Largest absolute difference of each quantity (loss, accuracy, ..., weights, optimizer's state)
    differences: dict[str, float] = field(default_factory=dict)
    # Steps with evaluations in the run's log that were compared, and that are missing from the replay
    evaluated: set[int] = field(default_factory=set)
    not_repeated: set[int] = field(default_factory=set)

    def add(self, name: str, difference: float) -> None:
        self.differences[name] = max(self.differences.get(name, 0.0), difference)


def recorded_steps_per_epoch(run: RunRecord) -> int:
    """Return the recorded number of steps per epoch, or derive it from the first line of the log.

    contradictions() checks the remaining lines. Raise ValueError if the log is empty.
    """
    if "steps_per_epoch" in run.about:
        return run.about["steps_per_epoch"]
    for line in run.metrics:
        if line["step"] > 0 < line["epoch"]:
            return max(1, round(line["step"] / line["epoch"]))
    raise ValueError(f"{run.folder} has no log: {', '.join(run.problems)}")


def contradictions(run: RunRecord, kept: list[int]) -> list[str]:
    """List contradictions between the run's files. `kept` contains the steps of the run's checkpoints."""
    starts = [start for start in run.kept if "steps_per_epoch" in start.about]
    facts, per_epoch = run.facts, recorded_steps_per_epoch(run.as_of(starts[-1]) if starts else run)
    findings = [line for line in run.problems if line.startswith(COMPARED)]
    if starts:
        last = run.starts[-1].about
        findings += [
            f"{name} in recipe.json differs from the last start in starts.jsonl"
            for name in run.about
            if name in last and run.about[name] != last[name]
        ]
        findings += [
            f"{name} is {facts.get(name)} in result.json, {last[name]} in the last start in starts.jsonl"
            for name in START_KEYS
            if name in last and facts.get(name) != last[name]
        ]
    evaluated = ["best_step", *(f"{which}_{name}" for which in ("best", "final") for name in METRICS)]
    tested = next((line for line in run.metrics if "test/loss" in line), {})
    total = run.recipe.get("epochs", 1) * per_epoch
    ended_by_flags = (facts.get("stopped_by") or "--max_steps").startswith("--max_steps")
    expected = {
        **({"steps": min(total, run.recipe.get("max_steps") or total)} if ended_by_flags else {}),
        **{name: run.derived.get(name) for name in evaluated},
        **{f"test_{name}": tested.get(f"test/{name}") for name in METRICS},
    }
    findings += [
        f"{name} is {facts.get(name)} in result.json, {value} by the recipe and the log"
        for name, value in expected.items()
        if facts.get(name) != value
    ]
    newest = max([*(line["step"] for line in run.metrics), *kept])
    if newest != facts["steps"]:
        findings.append(f"the log and the checkpoints end at step {newest:,}, the run at {facts['steps']:,}")
    for line in run.metrics:
        known = {s.about["steps_per_epoch"] for s in starts if s.first <= line["step"] <= s.last}
        if line["epoch"] not in [line["step"] / n for n in known or {per_epoch}]:
            return [*findings, f"step {line['step']:,} is in epoch {line['epoch']:g} of the log"]
    return findings


def compare_facts(run: RunRecord, replay: RunRecord, is_moved: bool) -> list[str]:
    """List differences in the facts on the run's page. `is_moved` means that the data was moved."""
    names = [name for name in REPEATED_KEYS if name not in run.unknown and not (is_moved and name == "data")]
    pairs = {name: (run.facts.get(name), replay.facts.get(name)) for name in names}
    recorded, repeated = run.about | run.facts, replay.about | replay.facts
    # Older versions did not record all of these keys.
    pairs |= {name: (recorded[name], repeated.get(name)) for name in SAME_WHERE_KNOWN if name in recorded}
    pairs["steps in an epoch"] = recorded_steps_per_epoch(run), recorded_steps_per_epoch(replay)
    return [f"{name}: {old}, in the replay {new}" for name, (old, new) in pairs.items() if old != new]


def compare_with_replay(run: RunRecord, replay: RunRecord, outcome: Outcome) -> list[str]:
    """List the findings of one interval, and add all differences to the outcome."""
    findings = _listed(_compare_numbers(run, replay, outcome))
    for step in outcome.interval.checkpoints:
        findings += _listed(_compare_checkpoint(run, replay, step, outcome))
    return findings


def why_not_exact(run: RunRecord, replay: RunRecord) -> list[str]:
    """Return the reasons why a replay may differ. Without a reason, the replay must be bitwise identical."""
    if not run.facts.get("deterministic"):
        return ["the run was trained without --deterministic"]
    pairs = {name: (run.about.get(name), replay.about.get(name)) for name in SAME_BITS}
    pairs |= {
        n: (run.facts.get(n), replay.facts.get(n)) for n in ("device", "per_device_batch_size", "step_graph")
    }
    reasons = [f"{name} {old}, in the replay {new}" for name, (old, new) in pairs.items() if old != new]
    is_zero = any(str(record.facts.get("strategy")).startswith("zero") for record in (run, replay))
    return [*reasons, *(["ZeRO sums in another order"] if is_zero else [])]


def changed_images(images: int, precision: str) -> int:
    """Return how many predictions may change when the same weights are evaluated again."""
    return 1 + images * CHANGED_PER_10_000[precision] // 10_000


def changed_mean(name: str, sizes: list[int], images: int) -> float:
    """Return the largest change of a mean over classes if `images` predictions change.

    Args:
        name: name of a metric in BY_CLASS.
        sizes: number of images of each class. The smallest classes change most, each by at most 1.
        images: number of predictions that change.
    """
    left, total = BY_CLASS[name] * images, 0.0
    for size in sorted(max(1, size) for size in sizes):
        total += min(left, size) / size
        left -= min(left, size)
    return total / max(1, len(sizes))


def class_sizes(replay: RunRecord, split: str) -> list[int]:
    """Return the number of evaluated images of each class.

    If there are more classes than confusion.json stores, one image per class is assumed.
    """
    matrix = replay.confusion
    if split == "val" and "val_images" in matrix:
        return matrix["val_images"]
    rows = matrix.get("confusion", [])
    return [sum(row) for row in rows] or [1] * (CONFUSED + 1)


def _listed(findings: Iterator[str]) -> list[str]:
    """Return the first LISTED findings, and a line with the number of remaining findings."""
    lines = list(findings)
    more = len(lines) - LISTED
    return [*lines[:LISTED], *([f"and {more:,} more differences like these"] if more > 0 else [])]


def _compare_numbers(run: RunRecord, replay: RunRecord, outcome: Outcome) -> Iterator[str]:
    """Compare the values in the logs of the run and the replay."""
    logged, replayed = (_numbers(record, outcome, run) for record in (run, replay))
    per_epoch, last = recorded_steps_per_epoch(run), run.facts["steps"]
    for step, key in sorted(logged.keys() | replayed.keys()):
        claims, values = logged.get((step, key), []), replayed.get((step, key), [])
        if key.startswith("val/"):
            # The run and the replay are also evaluated where they end. A resumed run ends several times.
            is_due = outcome.interval.is_evaluation or step % per_epoch == 0 or step == last
            if not is_due and not (claims and values):
                outcome.not_repeated |= {step} if claims else set()
                continue
            outcome.evaluated.add(step)
        if len(claims) != len(values):
            counts = f"{len(claims)} times in the log, {len(values)} in its replay"
            yield f"{key} of step {step:,} appears {counts}"
            continue
        name = key.rpartition("/")[2]
        for claim, value in zip(claims, values, strict=True):
            subject = f"{key} of step {step:,} is {claim:.6g}, in the replay {value:.6g}"
            difference = abs(value - claim)
            outcome.add(name, difference)
            if outcome.is_exact or name in EXACT:
                if difference:
                    yield f"{subject}: they differ by {difference:.1e}"
            elif outcome.interval.is_evaluation:
                yield from _compare_evaluation(subject, key, difference, value, replay)


def _compare_evaluation(
    subject: str, key: str, difference: float, value: float, replay: RunRecord
) -> Iterator[str]:
    """Compare a metric in two evaluations of the same weights.

    Metrics by class are compared only if they selected the best checkpoint.

    Args:
        subject: text with both values, for the finding.
        key: key in metrics.jsonl.
        difference: absolute difference between the values.
        value: value in the replay.
        replay: record of the replay.
    """
    precision, (split, _, name) = replay.facts["mixed_precision"], key.partition("/")
    metric = METRICS.get(name.removeprefix("raw_"))
    if metric is None:
        return
    if metric.by_class:
        if metric is METRICS.get(replay.facts.get("best_by", "")):
            images = replay.facts[f"{split}_images"]
            most_images = changed_images(images, precision)
            most = changed_mean(name.removeprefix("raw_"), class_sizes(replay, split), most_images)
            if difference > most:
                yield f"{subject}: a repeated evaluation changes {most:.4f} at most"
    elif metric.is_share:
        images = replay.facts[f"{split}_images"]
        count, most = round(difference * images), changed_images(images, precision)
        if count > most:
            differ = f"{plural(count, 'image')} of {images:,} more or fewer"
            yield f"{subject}: {differ}, and a repeated evaluation changes {most:,} at most"
    elif difference > CHANGED_LOSS[precision] * value:
        yield f"{subject}: a repeated evaluation changes {CHANGED_LOSS[precision]:.1%} at most"


def _numbers(record: RunRecord, outcome: Outcome, run: RunRecord) -> Numbers:
    """Return the logged values of an interval.

    The values include the loss since the last line of the log, which the checkpoints' state.json stores.
    Values on the test split belong to the step of the best weights, because these weights were tested.
    """
    interval, last = outcome.interval, run.facts["steps"]
    has_test = interval.is_evaluation and interval.start == run.facts.get("best_step", last)
    numbers: Numbers = defaultdict(list)
    for line in record.metrics:
        step = line["step"]
        for key in line.keys() - NOT_REPLAYED:
            if key.startswith("test/"):
                if has_test:
                    numbers[interval.start, key].append(line[key])
            elif key.startswith("val/"):
                if interval.start <= step <= interval.end:
                    numbers[step, key].append(line[key])
            elif interval.start < step <= interval.end:
                numbers[step, key].append(line[key])
    for step in interval.checkpoints:
        state = read_json(_folder(record, step) / STATE_FILE)
        mean = sum(state["losses"]) / (len(state["losses"]) * state["accumulations"])
        numbers[step, f"{STATE_FILE}/loss"].append(mean)
        numbers[step, f"{STATE_FILE}/logged_step"].append(state["logged_step"])
    return numbers


def _folder(record: RunRecord, step: int) -> Path:
    return record.folder / "checkpoints" / step_name(step)


def _manifest(record: RunRecord, step: int) -> dict[str, Any]:
    folder = _folder(record, step)
    return checkpoints.check_manifest((folder / checkpoints.MANIFEST_FILE).read_bytes(), folder)


def _compare_checkpoint(run: RunRecord, replay: RunRecord, step: int, outcome: Outcome) -> Iterator[str]:
    """Compare all tensors of a checkpoint."""
    records, name = (run, replay), step_name(step)
    old, new = (_manifest(record, step) for record in records)
    scalars = [read_json(_folder(record, step) / STATE_FILE).get("optimizer") for record in records]
    classes = [manifest.get("classes", []) for manifest in (old, new)]
    if not (match := match_classes(*classes)).is_identity:
        order = ", the same classes in another order" if match.is_permutation else ""
        yield f"classes in {name}: {some_of(classes[0])}, in the replay {some_of(classes[1])}{order}"
        return  # the rows of the two heads do not correspond
    pairs = {"optimizer": (old.get("optimizer"), new.get("optimizer"))}
    for key, (claim, value) in {**pairs, "the optimizer's part of state.json": scalars}.items():
        if claim != value:
            yield f"{key} in {name}: {claim}, in the replay {value}"
    if old["files"].keys() != new["files"].keys():
        yield f"{name} has the files {', '.join(old['files'])}, in the replay {', '.join(new['files'])}"
        return
    for file in (file for file in new["files"] if file.endswith(".safetensors")):
        old_file, new_file = (checkpoints.TensorFile(_folder(record, step) / file) for record in records)
        if old_file.specs() != new_file.specs():
            yield f"the tensors in {name}/{file} differ from the replay's in name, shape or dtype"
            continue
        for tensor in new_file.shapes():
            before, after = (tensors.tensor(tensor).double() for tensors in (old_file, new_file))
            if not before.isfinite().all():
                yield f"{tensor} in {name}/{file} is not finite"
            elif before.numel():
                difference = (after - before).abs().max().item()
                outcome.add("optimizer's state" if file == OPTIMIZER_FILE else "weights", difference)
                if outcome.is_exact and difference:
                    yield f"{tensor} in {name}/{file} differs by {difference:.1e}"
