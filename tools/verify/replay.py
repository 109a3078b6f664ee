"""Compare a finished run with replays of some steps, for verify.py.

There are two kinds of verification. If --deterministic makes a replay bitwise identical to the run, no value
may differ. In all other cases, rounding differs, and training amplifies the differences without a bound. In
these cases, the verdict depends only on new evaluations of kept weights. Differences in the trained steps are
only reported.
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
from onecurve.run.evaluation import MAX_CONFUSION_CLASSES
from onecurve.system.files import read_json
from onecurve.system.text import plural, some_of
from tools.logbook.run_record import COMPARED_FILES, RunRecord

# Maximum change of a metric's sum over all classes when the prediction for one image changes, in units of 1 /
# (images in a class). A changed prediction changes the recall of one class, and the F1 of two classes by at
# most 2 / images each.
CLASS_METRIC_CHANGES = {"balanced_accuracy": 1, "macro_f1": 4}
# Maximum changes when the same weights are evaluated again. CHANGED_PER_10_000 is the number of predictions
# per 10,000 images, because an image's two largest logits may differ only by rounding. CHANGED_LOSS is a
# fraction of the loss. The changes were measured on a CPU with CNN-B on CIFAR-10. Different micro-batches,
# thread counts and memory layouts changed none of 1,000 predictions and no loss, in bf16 and fp32. Evaluation
# in fp32 instead of bf16 changed 3 predictions, but not the number of correct predictions, and changed the
# loss by 0.08 %. Changes on GPUs have not been measured yet.
CHANGED_PER_10_000 = {"no": 1, "bf16": 10, "fp16": 10}
CHANGED_LOSS = {"no": 1e-3, "bf16": 1e-2, "fp16": 1e-2}
MAX_LISTED = 5  # maximum number of findings to list for each comparison
# Keys of metrics.jsonl that are compared elsewhere or can't be compared
NOT_REPLAYED = {"step", "epoch", "wall_s", "train/images_per_s", "train/mfu_pct"}
NOT_REPLAYED |= {"interrupted_at", "resumed_at", "why"}
NOT_REPLAYED |= {"hosts", "hosts_before", "processes", "processes_before"}
# Last components of the keys whose values do not depend on rounding
EXACT_KEYS = ("lr", "images", "logged_step")
# Keys of result.json. START_KEYS must match the last start in starts.jsonl. REPEATED_KEYS must match the
# replay.
START_KEYS = ("data", "batch_size", "epochs", "seed", "deterministic", "per_device_batch_size")
REPEATED_KEYS = ["script", "data", "batch_size", "epochs", "seed", "deterministic"]
REPEATED_KEYS += ["val_name", "val_images", "test_name", "test_images"]
# Keys of recipe.json or result.json that are compared only if the run recorded them
SAME_WHERE_KNOWN = ("source", "unit", "val_chosen", "parameters", "total_steps")
BITWISE_SETTINGS = ("mixed_precision", "half_precision", "compile", "versions", "threads")
BITWISE_FACTS = ("device", "per_device_batch_size", "step_graph")

LoggedValues = dict[tuple[int, str], list[float]]  # logged values by step and key


@dataclass(frozen=True)
class Interval:
    """Range of steps from start + 1 to end, together with the evaluation at step start.

    Attributes:
        checkpoints: Steps at which a checkpoint in the interval was kept.
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
    """Result of comparing an interval with its replay."""

    interval: Interval
    findings: list[str] = field(default_factory=list)
    is_replayed: bool = False
    is_exact: bool = False  # True if no value may differ from the replay
    why_not: list[str] = field(default_factory=list)  # reasons why values may differ
    # Maximum absolute difference of each quantity (loss, accuracy, ..., weights, optimizer's state)
    differences: dict[str, float] = field(default_factory=dict)
    # Steps whose logged evaluations were compared, and steps whose logged evaluations the replay did not
    # repeat
    evaluated: set[int] = field(default_factory=set)
    not_repeated: set[int] = field(default_factory=set)

    def add(self, name: str, difference: float) -> None:
        self.differences[name] = max(self.differences.get(name, 0.0), difference)


def recorded_steps_per_epoch(run: RunRecord) -> int:
    """Return the recorded number of steps per epoch, or derive it from the first log line.

    contradictions() checks the remaining log lines. Raise ValueError if the log is empty.
    """
    if "steps_per_epoch" in run.settings:
        return run.settings["steps_per_epoch"]
    for line in run.metrics:
        if line["step"] > 0 < line["epoch"]:
            return max(1, round(line["step"] / line["epoch"]))
    raise ValueError(f"{run.folder} contains no log: {', '.join(run.problems)}")


def contradictions(run: RunRecord, kept: list[int]) -> list[str]:
    """Return contradictions between the run's files. `kept` contains the run's checkpoint steps."""
    starts = [start for start in run.kept if "steps_per_epoch" in start.settings]
    facts, per_epoch = run.facts, recorded_steps_per_epoch(run.as_of(starts[-1]) if starts else run)
    findings = [line for line in run.problems if line.startswith(COMPARED_FILES)]
    if starts:
        last = run.starts[-1].settings
        findings += [
            f"{name} in recipe.json differs from the last start in starts.jsonl"
            for name in run.settings
            if name in last and run.settings[name] != last[name]
        ]
        findings += [
            f"{name} is {facts.get(name)} in result.json, but {last[name]} in the last start in starts.jsonl"
            for name in START_KEYS
            if name in last and facts.get(name) != last[name]
        ]
    evaluated = ["best_step", *(f"{which}_{name}" for which in ("best", "final") for name in METRICS)]
    tested = next((line for line in run.metrics if "test/loss" in line), {})
    total = run.recipe.get("epochs", 1) * per_epoch
    ended_by_flags = (facts.get("stopped_by") or "--max_steps").startswith("--max_steps")
    expected = {
        **{name: run.derived.get(name) for name in evaluated},
        **{f"test_{name}": tested.get(f"test/{name}") for name in METRICS},
    }
    if ended_by_flags:
        expected = {"steps": min(total, run.recipe.get("max_steps") or total)} | expected
    findings += [
        f"{name} is {facts.get(name)} in result.json, but {value} according to the recipe and the log"
        for name, value in expected.items()
        if facts.get(name) != value
    ]
    last_step, steps = max([*(line["step"] for line in run.metrics), *kept]), facts["steps"]
    if last_step != steps:
        end = f"the log and the checkpoints end at step {last_step:,}"
        findings.append(f"{end}, but the run ends at {steps:,}")
    for line in run.metrics:
        step = line["step"]
        epoch_lengths = {
            start.settings["steps_per_epoch"] for start in starts if start.first <= step <= start.last
        }
        if line["epoch"] not in [step / length for length in epoch_lengths or {per_epoch}]:
            return [*findings, f"the log contains a wrong epoch for step {line['step']:,}: {line['epoch']:g}"]
    return findings


def compare_facts(run: RunRecord, replay: RunRecord, is_moved: bool) -> list[str]:
    """Return differences in the facts on the run's page. `is_moved` is True if the data was moved."""
    names = [name for name in REPEATED_KEYS if name not in run.unknown and not (is_moved and name == "data")]
    pairs = {name: (run.facts.get(name), replay.facts.get(name)) for name in names}
    recorded, repeated = run.settings | run.facts, replay.settings | replay.facts
    # Earlier versions did not record all of these keys.
    pairs |= {name: (recorded[name], repeated.get(name)) for name in SAME_WHERE_KNOWN if name in recorded}
    pairs["number of steps per epoch"] = (recorded_steps_per_epoch(run), recorded_steps_per_epoch(replay))
    return [f"{name} is {old}, but {new} in the replay" for name, (old, new) in pairs.items() if old != new]


def compare_with_replay(run: RunRecord, replay: RunRecord, outcome: Outcome) -> list[str]:
    """Return an interval's findings, and add all differences to the outcome."""
    findings = _first_findings(_compare_logs(run, replay, outcome))
    for step in outcome.interval.checkpoints:
        findings += _first_findings(_compare_checkpoint(run, replay, step, outcome))
    return findings


def why_not_exact(run: RunRecord, replay: RunRecord) -> list[str]:
    """Return reasons why a replay may differ.

    If there are no reasons, the replay must be bitwise identical.
    """
    if not run.facts.get("deterministic"):
        return ["the run was trained without --deterministic"]
    settings = {name: (run.settings.get(name), replay.settings.get(name)) for name in BITWISE_SETTINGS}
    settings |= {name: (run.facts.get(name), replay.facts.get(name)) for name in BITWISE_FACTS}
    different = {name: values for name, values in settings.items() if values[0] != values[1]}
    reasons = [f"{name} is {old}, but {new} in the replay" for name, (old, new) in different.items()]
    is_zero = any(str(record.facts.get("strategy")).startswith("zero") for record in (run, replay))
    return [*reasons, *(["ZeRO sums gradients in a different order"] if is_zero else [])]


def max_changed_images(images: int, precision: str) -> int:
    """Return the number of predictions that may change when the same weights are evaluated again."""
    return 1 + images * CHANGED_PER_10_000[precision] // 10_000


def max_mean_change(name: str, sizes: list[int], images: int) -> float:
    """Return the maximum change of a mean over classes if `images` predictions change.

    Args:
        name: Name of a metric in CLASS_METRIC_CHANGES.
        sizes: Number of images in each class. The smallest classes change most, each by at most 1.
        images: Number of predictions that change.
    """
    remaining_change, total_change = CLASS_METRIC_CHANGES[name] * images, 0.0
    for size in sorted(max(1, size) for size in sizes):
        total_change += min(remaining_change, size) / size
        remaining_change -= min(remaining_change, size)
    return total_change / max(1, len(sizes))


def class_sizes(replay: RunRecord, split: str) -> list[int]:
    """Return the number of evaluated images in each class.

    If there are more classes than confusion.json stores, assume one image per class.
    """
    matrix = replay.confusion
    if split == "val" and "val_images" in matrix:
        return matrix["val_images"]
    rows = matrix.get("confusion", [])
    return [sum(row) for row in rows] or [1] * (MAX_CONFUSION_CLASSES + 1)


def _first_findings(findings: Iterator[str]) -> list[str]:
    """Return the first MAX_LISTED findings, followed by a line with the number of remaining findings."""
    all_findings = list(findings)
    hidden = len(all_findings) - MAX_LISTED
    remark = [f"and {hidden:,} more differences of this kind"] if hidden > 0 else []
    return [*all_findings[:MAX_LISTED], *remark]


def _compare_logs(run: RunRecord, replay: RunRecord, outcome: Outcome) -> Iterator[str]:
    """Compare the values that the run and the replay logged."""
    logged, replayed = (_logged_values(record, outcome, run) for record in (run, replay))
    per_epoch, last = recorded_steps_per_epoch(run), run.facts["steps"]
    for step, key in sorted(logged.keys() | replayed.keys()):
        claims, values = logged.get((step, key), []), replayed.get((step, key), [])
        if key.startswith("val/"):
            # The run and the replay are also evaluated at their last step. A resumed run has several last
            # steps.
            is_due = outcome.interval.is_evaluation or step % per_epoch == 0 or step == last
            if not is_due and not (claims and values):
                outcome.not_repeated |= {step} if claims else set()
                continue
            outcome.evaluated.add(step)
        if len(claims) != len(values):
            logged_times, replayed_times = plural(len(claims), "time"), plural(len(values), "time")
            counts = f"{logged_times} in the log, but {replayed_times} in the replay"
            yield f"{key} of step {step:,} appears {counts}"
            continue
        name = key.rpartition("/")[2]
        for claim, value in zip(claims, values, strict=True):
            subject = f"{key} of step {step:,} is {claim:.6g}, but {value:.6g} in the replay"
            difference = abs(value - claim)
            outcome.add(name, difference)
            if outcome.is_exact or name in EXACT_KEYS:
                if difference:
                    yield f"{subject}, a difference of {difference:.1e}"
            elif outcome.interval.is_evaluation:
                yield from _compare_evaluation(subject, key, difference, value, replay)


def _compare_evaluation(
    subject: str, key: str, difference: float, value: float, replay: RunRecord
) -> Iterator[str]:
    """Compare a metric in two evaluations of the same weights.

    Metrics by class are compared only if the metric selected the best checkpoint.

    Args:
        subject: The finding's text, with both values.
        key: Key in metrics.jsonl.
        difference: Absolute difference between the two values.
        value: Value in the replay.
        replay: The replay's record.
    """
    precision, (split, _, name) = replay.facts["mixed_precision"], key.partition("/")
    metric = METRICS.get(name.removeprefix("raw_"))
    if metric is None:
        return
    if metric.by_class:
        if metric is METRICS.get(replay.facts.get("best_by", "")):
            images = replay.facts[f"{split}_images"]
            most_images = max_changed_images(images, precision)
            max_change = max_mean_change(name.removeprefix("raw_"), class_sizes(replay, split), most_images)
            if difference > max_change:
                yield f"{subject}. A repeated evaluation changes the metric by at most {max_change:.4f}"
    elif metric.is_share:
        images = replay.facts[f"{split}_images"]
        changed, max_change = round(difference * images), max_changed_images(images, precision)
        if changed > max_change:
            differ = f"The difference is {plural(changed, 'image')} of {images:,}"
            yield f"{subject}. {differ}, but a repeated evaluation changes at most {max_change:,}"
    elif difference > CHANGED_LOSS[precision] * value:
        yield f"{subject}. A repeated evaluation changes the loss by at most {CHANGED_LOSS[precision]:.1%}"


def _logged_values(record: RunRecord, outcome: Outcome, run: RunRecord) -> LoggedValues:
    """Return the values logged in an interval.

    The values include the loss since the last log line, stored in each checkpoint's state.json. Values on the
    test split belong to the best weights' step, because the best weights were tested.
    """
    interval, last = outcome.interval, run.facts["steps"]
    has_test = interval.is_evaluation and interval.start == run.facts.get("best_step", last)
    values: LoggedValues = defaultdict(list)
    for line in record.metrics:
        step = line["step"]
        for key in line.keys() - NOT_REPLAYED:
            if key.startswith("test/"):
                if has_test:
                    values[interval.start, key].append(line[key])
            elif key.startswith("val/"):
                if interval.start <= step <= interval.end:
                    values[step, key].append(line[key])
            elif interval.start < step <= interval.end:
                values[step, key].append(line[key])
    for step in interval.checkpoints:
        saved_state = read_json(_checkpoint_folder(record, step) / STATE_FILE)
        mean_loss = sum(saved_state["losses"]) / (len(saved_state["losses"]) * saved_state["accumulations"])
        values[step, f"{STATE_FILE}/loss"].append(mean_loss)
        values[step, f"{STATE_FILE}/logged_step"].append(saved_state["logged_step"])
    return values


def _checkpoint_folder(record: RunRecord, step: int) -> Path:
    return record.folder / "checkpoints" / step_name(step)


def _read_manifest(record: RunRecord, step: int) -> dict[str, Any]:
    folder = _checkpoint_folder(record, step)
    return checkpoints.check_manifest((folder / checkpoints.MANIFEST_FILE).read_bytes(), folder)


def _compare_checkpoint(run: RunRecord, replay: RunRecord, step: int, outcome: Outcome) -> Iterator[str]:
    """Compare all tensors in the run's checkpoint with the replay's checkpoint."""
    records, name = (run, replay), step_name(step)
    run_manifest, replay_manifest = (_read_manifest(record, step) for record in records)
    states = (read_json(_checkpoint_folder(record, step) / STATE_FILE) for record in records)
    optimizer_states = [state.get("optimizer") for state in states]
    classes = [manifest.get("classes", []) for manifest in (run_manifest, replay_manifest)]
    if not (match := match_classes(*classes)).is_identity:
        order = " (the same classes in a different order)" if match.is_permutation else ""
        trained, replayed = map(some_of, classes)
        yield f"the classes in {name} are {trained}, but {replayed} in the replay{order}"
        return  # the two heads' rows belong to different classes
    optimizer_names = {"optimizer": (run_manifest.get("optimizer"), replay_manifest.get("optimizer"))}
    pairs = {**optimizer_names, "the optimizer state in state.json": optimizer_states}
    for key, (claim, value) in pairs.items():
        if claim != value:
            yield f"{key} in {name} is {claim}, but {value} in the replay"
    if run_manifest["files"].keys() != replay_manifest["files"].keys():
        run_files, replay_files = ", ".join(run_manifest["files"]), ", ".join(replay_manifest["files"])
        yield f"{name} contains {run_files}, but {replay_files} in the replay"
        return
    for file in (file for file in replay_manifest["files"] if file.endswith(".safetensors")):
        paths = [_checkpoint_folder(record, step) / file for record in records]
        run_file, replay_file = map(checkpoints.TensorFile, paths)
        if run_file.specs() != replay_file.specs():
            yield f"the tensors in {name}/{file} differ from the replay's tensors in name, shape or dtype"
            continue
        for tensor in replay_file.shapes():
            run_tensor, replay_tensor = (opened.tensor(tensor).double() for opened in (run_file, replay_file))
            if not run_tensor.isfinite().all():
                yield f"{tensor} in {name}/{file} is not finite"
            elif run_tensor.numel():
                difference = (replay_tensor - run_tensor).abs().max().item()
                outcome.add("optimizer's state" if file == OPTIMIZER_FILE else "weights", difference)
                if outcome.is_exact and difference:
                    yield f"{tensor} in {name}/{file} differs by {difference:.1e}"
