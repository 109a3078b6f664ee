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
from onecurve.flags.recipe import METRICS
from onecurve.models.class_names import match_classes
from onecurve.run.evaluation import MAX_CONFUSION_CLASSES
from onecurve.system.files import read_json
from onecurve.system.text import plural, some_of
from tools.logbook.run_record import COMPARED_FILES, RunRecord

# Maximum change of a metric's sum over all classes when the prediction for one image changes, in units of 1 /
# (images in a class). A changed prediction changes the recall of one class, and the F1 of two classes by at
# most 2 / images each.
MAX_CLASS_METRIC_CHANGES = {"balanced_accuracy": 1, "macro_f1": 4}
# Maximum changes when the same weights are evaluated again. MAX_CHANGED_PER_10_000 is the number of
# predictions per 10,000 images, because an image's two largest logits may differ only by rounding.
# MAX_LOSS_CHANGE is a fraction of the loss. The changes were measured on a CPU with CNN-B on CIFAR-10.
# Different micro-batches, thread counts and memory layouts changed none of 1,000 predictions and no loss, in
# bf16 and fp32. Evaluation in fp32 instead of bf16 changed 3 predictions, but not the number of correct
# predictions, and changed the loss by 0.08 %. Changes on GPUs have not been measured yet.
MAX_CHANGED_PER_10_000 = {"no": 1, "bf16": 10, "fp16": 10}
MAX_LOSS_CHANGE = {"no": 1e-3, "bf16": 1e-2, "fp16": 1e-2}
MAX_LISTED_FINDINGS = 5  # maximum number of findings to list for each comparison
# Keys of metrics.jsonl that are compared elsewhere or can't be compared
KEYS_NOT_REPLAYED = {"step", "epoch", "wall_s", "train/images_per_s", "train/mfu_pct"}
KEYS_NOT_REPLAYED |= {"interrupted_at", "resumed_at", "why"}
KEYS_NOT_REPLAYED |= {"hosts", "hosts_before", "processes", "processes_before"}
# Last components of the keys whose values do not depend on rounding
EXACT_KEY_ENDINGS = ("lr", "images", "logged_step")
# Keys of result.json. START_KEYS must match the last start in starts.jsonl. REPEATED_KEYS must match the
# replay.
START_KEYS = ("data", "batch_size", "epochs", "seed", "deterministic", "per_device_batch_size")
REPEATED_KEYS = ["script", "data", "batch_size", "epochs", "seed", "deterministic"]
REPEATED_KEYS += ["val_name", "val_images", "test_name", "test_images"]
# Keys of recipe.json or result.json that are compared only if the run recorded them
KEYS_COMPARED_IF_RECORDED = ("source", "unit", "val_chosen", "parameters", "total_steps")
SETTINGS_FOR_BITWISE = ("mixed_precision", "half_precision", "compile", "versions", "threads")
RESULTS_FOR_BITWISE = ("device", "per_device_batch_size", "step_graph")

LoggedValues = dict[tuple[int, str], list[float]]  # logged values by step and key


@dataclass(frozen=True)
class Interval:
    """Range of steps from start + 1 to end, together with the evaluation at step start.

    Attributes:
        checkpoint_steps: Steps at which a checkpoint in the interval was kept.
    """

    start: int  # step before the interval's first trained step
    end: int  # last trained step
    checkpoint_steps: tuple[int, ...] = ()

    @property
    def is_evaluation(self) -> bool:
        return self.start == self.end

    def __str__(self) -> str:
        if self.is_evaluation:
            return f"the evaluation at step {self.end:,}"
        return f"steps {self.start:,}-{self.end:,}"


@dataclass
class ReplayOutcome:
    """Result of comparing an interval with its replay."""

    interval: Interval
    findings: list[str] = field(default_factory=list)
    is_replayed: bool = False
    is_exact: bool = False  # True if no value may differ from the replay
    reasons_not_exact: list[str] = field(default_factory=list)  # reasons why values may differ
    # Maximum absolute difference of each quantity (loss, accuracy, ..., weights, optimizer's state)
    max_differences: dict[str, float] = field(default_factory=dict)
    # Steps whose logged evaluations were compared, and steps whose logged evaluations the replay did not
    # repeat
    evaluated_steps: set[int] = field(default_factory=set)
    not_repeated_steps: set[int] = field(default_factory=set)

    def add_difference(self, quantity: str, difference: float) -> None:
        """Update the quantity's maximum absolute difference."""
        self.max_differences[quantity] = max(self.max_differences.get(quantity, 0.0), difference)


def recorded_steps_per_epoch(run: RunRecord) -> int:
    """Return the recorded number of steps per epoch, or derive it from the first log line.

    contradictions() checks the remaining log lines. Raise ValueError if the log is empty.
    """
    if "steps_per_epoch" in run.recipe_file:
        return run.recipe_file["steps_per_epoch"]
    for metrics_line in run.metrics:
        if metrics_line["step"] > 0 and metrics_line["epoch"] > 0:
            return max(1, round(metrics_line["step"] / metrics_line["epoch"]))
    raise ValueError(f"{run.folder} contains no log: {', '.join(run.problems)}")


def contradictions(run: RunRecord, checkpoint_steps: list[int]) -> list[str]:
    """Describe contradictions between recipe.json, starts.jsonl, result.json, the log and the checkpoints.

    Args:
        run: A finished run.
        checkpoint_steps: Steps of the run's checkpoints.

    Returns:
        One sentence per contradiction. The check of the logged epochs stops at the first wrong epoch.
    """
    # Earlier versions did not record the steps per epoch of each start.
    starts = [start for start in run.kept_starts if "steps_per_epoch" in start.settings]
    run_with_last_settings = run.with_settings_of(starts[-1]) if starts else run
    steps_per_epoch = recorded_steps_per_epoch(run_with_last_settings)
    result_values = run.result_values
    findings = [file_problem for file_problem in run.problems if file_problem.startswith(COMPARED_FILES)]
    if starts:
        last_start = run.starts[-1].settings
        value_by_start_key = {start_key: result_values.get(start_key) for start_key in START_KEYS}
        findings += [
            f"{start_key} in recipe.json differs from the last start in starts.jsonl"
            for start_key in run.recipe_file
            if start_key in last_start and run.recipe_file[start_key] != last_start[start_key]
        ]
        findings += [
            f"{key} is {value} in result.json, but {last_start[key]} in the last start in starts.jsonl"
            for key, value in value_by_start_key.items()
            if key in last_start and value != last_start[key]
        ]
    evaluation_keys = ["best_step", *(f"{prefix}_{name}" for prefix in ("best", "final") for name in METRICS)]
    test_line = next((metrics_line for metrics_line in run.metrics if "test/loss" in metrics_line), {})
    total_steps = run.recipe.get("epochs", 1) * steps_per_epoch
    # Unless the script or --patience ended the run early, the flags determine the number of steps.
    ended_by_flags = (result_values.get("stopped_by") or "--max_steps").startswith("--max_steps")
    expected_results = {
        **{evaluation_key: run.derived_values.get(evaluation_key) for evaluation_key in evaluation_keys},
        **{f"test_{metric_name}": test_line.get(f"test/{metric_name}") for metric_name in METRICS},
    }
    if ended_by_flags:
        planned_steps = min(total_steps, run.recipe.get("max_steps") or total_steps)
        expected_results = {"steps": planned_steps} | expected_results
    findings += [
        f"{key} is {result_values.get(key)} in result.json, but {value} according to the recipe and the log"
        for key, value in expected_results.items()
        if result_values.get(key) != value
    ]
    last_step = max([*(metrics_line["step"] for metrics_line in run.metrics), *checkpoint_steps])
    if last_step != result_values["steps"]:
        log_end = f"the log and the checkpoints end at step {last_step:,}"
        findings.append(f"{log_end}, but the run ends at {result_values['steps']:,}")
    for metrics_line in run.metrics:
        step = metrics_line["step"]
        # At the step where one start ends and the next begins, either start may have written the line.
        starts_at_step = [start for start in starts if start.begin_step <= step <= start.last_kept_step]
        epoch_lengths = {start.settings["steps_per_epoch"] for start in starts_at_step} or {steps_per_epoch}
        if metrics_line["epoch"] not in [step / epoch_length for epoch_length in epoch_lengths]:
            return [*findings, f"the log contains a wrong epoch for step {step:,}: {metrics_line['epoch']:g}"]
    return findings


def compare_results(run: RunRecord, replay: RunRecord, is_moved: bool) -> list[str]:
    """Describe differences between the results of a run and its replay that the run's page shows.

    Args:
        run: The recorded run.
        replay: The replay's record.
        is_moved: True if the data was moved, so that its path may differ.

    Returns:
        One sentence per difference.
    """
    excluded_keys = {*run.keys_of_later_start, *(["data"] if is_moved else [])}
    compared_keys = [key for key in REPEATED_KEYS if key not in excluded_keys]
    old_and_new = {key: (run.result_values.get(key), replay.result_values.get(key)) for key in compared_keys}
    recorded_values = run.recipe_file | run.result_values
    repeated_values = replay.recipe_file | replay.result_values
    # Earlier versions did not record all of these keys.
    recorded_keys = [key for key in KEYS_COMPARED_IF_RECORDED if key in recorded_values]
    old_and_new |= {key: (recorded_values[key], repeated_values.get(key)) for key in recorded_keys}
    steps_per_epoch = (recorded_steps_per_epoch(run), recorded_steps_per_epoch(replay))
    old_and_new["number of steps per epoch"] = steps_per_epoch
    return _different_values(old_and_new)


def _different_values(old_and_new: dict[str, tuple[Any, Any]]) -> list[str]:
    """Describe each pair of values that differ. `old_and_new` maps names to the run's and replay's values."""
    named_pairs = old_and_new.items()
    return [f"{name} is {old}, but {new} in the replay" for name, (old, new) in named_pairs if old != new]


def compare_with_replay(run: RunRecord, replay: RunRecord, outcome: ReplayOutcome) -> list[str]:
    """Compare the logs and checkpoints in an interval, and add all differences to the outcome.

    Return one sentence per finding, limited to MAX_LISTED_FINDINGS for the log and for each checkpoint.
    """
    findings = _first_findings(_compare_logs(run, replay, outcome))
    for step in outcome.interval.checkpoint_steps:
        findings += _first_findings(_compare_checkpoint(run, replay, step, outcome))
    return findings


def why_not_exact(run: RunRecord, replay: RunRecord) -> list[str]:
    """Return reasons why a replay's values may differ from the run's values.

    Without any reason, the replay must be bitwise identical.
    """
    if not run.result_values.get("deterministic"):
        return ["the run was trained without --deterministic"]
    run_settings, new_settings = run.recipe_file, replay.recipe_file
    old_and_new = {key: (run_settings.get(key), new_settings.get(key)) for key in SETTINGS_FOR_BITWISE}
    run_results, new_results = run.result_values, replay.result_values
    old_and_new |= {key: (run_results.get(key), new_results.get(key)) for key in RESULTS_FOR_BITWISE}
    reasons = _different_values(old_and_new)
    if any(str(record.result_values.get("strategy")).startswith("zero") for record in (run, replay)):
        reasons.append("ZeRO sums gradients in a different order")
    return reasons


def max_changed_images(image_count: int, precision: str) -> int:
    """Return how many predictions may change when the same weights are evaluated again, at least 1."""
    return 1 + image_count * MAX_CHANGED_PER_10_000[precision] // 10_000


def is_metric_compared(metric_name: str, best_by: str) -> bool:
    """Return True if a repeated evaluation is compared by this metric.

    A metric by class is compared only if --best_by names it, and its maximum change is known.
    """
    is_bound_known = metric_name == best_by and metric_name in MAX_CLASS_METRIC_CHANGES
    return is_bound_known or not METRICS[metric_name].by_class


def max_mean_change(metric: str, class_sizes: list[int], changed_images: int) -> float:
    """Return the maximum change of a mean over classes if `changed_images` predictions change.

    Args:
        metric: Name of a metric in MAX_CLASS_METRIC_CHANGES.
        class_sizes: Number of images in each class. The smallest classes change most, each by at most 1.
        changed_images: Number of predictions that change.
    """
    remaining_change, total_change = MAX_CLASS_METRIC_CHANGES[metric] * changed_images, 0.0
    for class_size in sorted(max(1, class_size) for class_size in class_sizes):
        total_change += min(remaining_change, class_size) / class_size
        remaining_change -= min(remaining_change, class_size)
    return total_change / max(1, len(class_sizes))


def evaluated_class_sizes(replay: RunRecord, split: str) -> list[int]:
    """Return the number of evaluated images in each class of the val or test split.

    If there are more classes than confusion.json stores, assume one image per class. Fewer classes
    and fewer images permit larger changes, so this assumption never rejects a correct run.
    """
    confusion = replay.confusion
    if split == "val" and "val_images" in confusion:
        return confusion["val_images"]
    matrix_rows = confusion.get("confusion", [])  # one row per true class
    return [sum(image_counts) for image_counts in matrix_rows] or [1] * (MAX_CONFUSION_CLASSES + 1)


def _first_findings(findings: Iterator[str]) -> list[str]:
    """Return the first MAX_LISTED_FINDINGS findings, and a line with the number of remaining findings."""
    all_findings = list(findings)
    hidden_count = len(all_findings) - MAX_LISTED_FINDINGS
    remark = [f"and {hidden_count:,} more differences of this kind"] if hidden_count > 0 else []
    return [*all_findings[:MAX_LISTED_FINDINGS], *remark]


def _compare_logs(run: RunRecord, replay: RunRecord, outcome: ReplayOutcome) -> Iterator[str]:
    """Yield findings about the values that the run and the replay logged in the outcome's interval.

    This generator also adds the differences and the evaluated steps to the outcome.
    """
    values_of_run, values_of_replay = (_logged_values(record, outcome, run) for record in (run, replay))
    steps_per_epoch = recorded_steps_per_epoch(run)
    last_step = run.result_values["steps"]
    for step, log_key in sorted(values_of_run.keys() | values_of_replay.keys()):
        logged_values = values_of_run.get((step, log_key), [])
        replayed_values = values_of_replay.get((step, log_key), [])
        if log_key.startswith("val/"):
            # The run and the replay are also evaluated at their last step. A resumed run has several last
            # steps.
            is_due = outcome.interval.is_evaluation or step % steps_per_epoch == 0 or step == last_step
            if not is_due and not (logged_values and replayed_values):
                if logged_values:
                    outcome.not_repeated_steps.add(step)
                continue
            outcome.evaluated_steps.add(step)
        if len(logged_values) != len(replayed_values):
            logged_times = plural(len(logged_values), "time")
            replayed_times = plural(len(replayed_values), "time")
            counts_text = f"{logged_times} in the log, but {replayed_times} in the replay"
            yield f"{log_key} of step {step:,} appears {counts_text}"
            continue
        quantity = log_key.rpartition("/")[2]
        for logged_value, replayed_value in zip(logged_values, replayed_values, strict=True):
            finding = (
                f"{log_key} of step {step:,} is {logged_value:.6g}, but {replayed_value:.6g} in the replay"
            )
            difference = abs(replayed_value - logged_value)
            outcome.add_difference(quantity, difference)
            if outcome.is_exact or quantity in EXACT_KEY_ENDINGS:
                if difference:
                    yield f"{finding}, a difference of {difference:.1e}"
            elif outcome.interval.is_evaluation:
                yield from _compare_evaluation(finding, log_key, difference, replayed_value, replay)


def _compare_evaluation(
    finding: str, log_key: str, difference: float, replayed_value: float, replay: RunRecord
) -> Iterator[str]:
    """Yield a finding if two evaluations of the same weights differ by more than rounding can explain.

    A metric by class is compared only if it selected the best checkpoint.

    Args:
        finding: Sentence that states both values.
        log_key: Key in metrics.jsonl.
        difference: Absolute difference between the two values.
        replayed_value: Value in the replay.
        replay: The replay's record.
    """
    precision = replay.result_values["mixed_precision"]
    split, _, logged_name = log_key.partition("/")
    metric_name = logged_name.removeprefix("raw_")  # metrics of the raw weights next to an EMA
    metric = METRICS.get(metric_name)
    if metric is None:  # the value is not a metric
        return
    if not is_metric_compared(metric_name, replay.result_values.get("best_by", "")):
        return
    if metric.by_class:
        max_count = max_changed_images(replay.result_values[f"{split}_images"], precision)
        max_change = max_mean_change(metric_name, evaluated_class_sizes(replay, split), max_count)
        if difference > max_change:
            yield f"{finding}. A repeated evaluation changes the metric by at most {max_change:.4f}"
    elif metric.is_share:
        image_count = replay.result_values[f"{split}_images"]
        changed_count = round(difference * image_count)
        max_count = max_changed_images(image_count, precision)
        if changed_count > max_count:
            difference_text = f"The difference is {plural(changed_count, 'image')} of {image_count:,}"
            yield f"{finding}. {difference_text}, but a repeated evaluation changes at most {max_count:,}"
    elif difference > MAX_LOSS_CHANGE[precision] * replayed_value:
        max_change = MAX_LOSS_CHANGE[precision]
        yield f"{finding}. A repeated evaluation changes the loss by at most {max_change:.1%}"


def _logged_values(record: RunRecord, outcome: ReplayOutcome, run: RunRecord) -> LoggedValues:
    """Return the values logged in the outcome's interval, by step and key.

    The values include the loss since the last log line, stored in each checkpoint's state.json. Values on the
    test split belong to the best weights' step, because the best weights were tested.

    Args:
        record: Run or replay whose log is read.
        outcome: Outcome with the interval.
        run: The run, whose result.json contains the best step.
    """
    interval, last_step = outcome.interval, run.result_values["steps"]
    has_test = interval.is_evaluation and interval.start == run.result_values.get("best_step", last_step)
    logged_values: LoggedValues = defaultdict(list)
    for metrics_line in record.metrics:
        step = metrics_line["step"]
        # Evaluations at the interval's start belong to the interval, but training values do not.
        for log_key in metrics_line.keys() - KEYS_NOT_REPLAYED:
            if log_key.startswith("test/"):
                if has_test:
                    logged_values[interval.start, log_key].append(metrics_line[log_key])
            elif log_key.startswith("val/"):
                if interval.start <= step <= interval.end:
                    logged_values[step, log_key].append(metrics_line[log_key])
            elif interval.start < step <= interval.end:
                logged_values[step, log_key].append(metrics_line[log_key])
    for step in interval.checkpoint_steps:
        saved_state = read_json(_checkpoint_folder(record, step) / STATE_FILE)
        losses = saved_state["losses"]
        mean_loss = sum(losses) / (len(losses) * saved_state["accumulations"])
        logged_values[step, f"{STATE_FILE}/loss"].append(mean_loss)
        logged_values[step, f"{STATE_FILE}/logged_step"].append(saved_state["logged_step"])
    return logged_values


def _checkpoint_folder(record: RunRecord, step: int) -> Path:
    return record.folder / "checkpoints" / step_name(step)


def _read_manifest(record: RunRecord, step: int) -> dict[str, Any]:
    """Read the manifest of a run's checkpoint."""
    folder = _checkpoint_folder(record, step)
    return checkpoints.parse_checkpoint_manifest((folder / checkpoints.MANIFEST_FILE).read_bytes(), folder)


def _compare_checkpoint(
    run: RunRecord, replay: RunRecord, step: int, outcome: ReplayOutcome
) -> Iterator[str]:
    """Yield findings about a step's checkpoints in the run and in the replay, and compare all tensors.

    This generator also adds the largest differences of the tensors to the outcome.
    """
    records = (run, replay)
    checkpoint_name = step_name(step)
    run_manifest, replay_manifest = (_read_manifest(record, step) for record in records)
    saved_states = (read_json(_checkpoint_folder(record, step) / STATE_FILE) for record in records)
    run_optimizer_state, replay_optimizer_state = (
        saved_state.get("optimizer") for saved_state in saved_states
    )
    class_lists = [manifest.get("classes", []) for manifest in (run_manifest, replay_manifest)]
    if not (class_match := match_classes(*class_lists)).is_identity:
        order = " (the same classes in a different order)" if class_match.is_permutation else ""
        run_classes, replay_classes = map(some_of, class_lists)
        yield f"the classes in {checkpoint_name} are {run_classes}, but {replay_classes} in the replay{order}"
        return  # the two heads' rows belong to different classes
    compared_values = {
        "optimizer": (run_manifest.get("optimizer"), replay_manifest.get("optimizer")),
        "the optimizer state in state.json": (run_optimizer_state, replay_optimizer_state),
    }
    for value_name, (run_value, replay_value) in compared_values.items():
        if run_value != replay_value:
            yield f"{value_name} in {checkpoint_name} is {run_value}, but {replay_value} in the replay"
    if run_manifest["files"].keys() != replay_manifest["files"].keys():
        run_files, replay_files = ", ".join(run_manifest["files"]), ", ".join(replay_manifest["files"])
        yield f"{checkpoint_name} contains {run_files}, but {replay_files} in the replay"
        return
    for file_name in (name for name in replay_manifest["files"] if name.endswith(".safetensors")):
        subject = f"{checkpoint_name}/{file_name}"
        quantity = "optimizer's state" if file_name == OPTIMIZER_FILE else "weights"
        tensor_paths = [_checkpoint_folder(record, step) / file_name for record in records]
        run_tensor_file, replay_tensor_file = map(checkpoints.TensorFile, tensor_paths)
        if run_tensor_file.specs() != replay_tensor_file.specs():
            yield f"the tensors in {subject} differ from the replay's tensors in name, shape or dtype"
            continue
        for tensor_name in replay_tensor_file.shapes():
            tensors = (file.read_tensor(tensor_name) for file in (run_tensor_file, replay_tensor_file))
            run_tensor, replay_tensor = (tensor.double() for tensor in tensors)
            if not run_tensor.isfinite().all():
                yield f"{tensor_name} in {subject} is not finite"
            elif run_tensor.numel():
                difference = (replay_tensor - run_tensor).abs().max().item()
                outcome.add_difference(quantity, difference)
                if outcome.is_exact and difference:
                    yield f"{tensor_name} in {subject} differs by {difference:.1e}"
