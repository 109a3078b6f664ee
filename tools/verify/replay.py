"""Compare a finished run with replays of some of its steps, for verify.py.

Two kinds. Where --deterministic makes the bits of both equal, no value may differ. Elsewhere rounding
differs, and training amplifies it without a bound: there only evaluations of kept weights are judged, and the
differences of trained steps are reported.
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

# How many times 1 / (images of a class) the sum of a metric over the classes changes if one image's predicted
# class does: the recall of its class; and the F1 of two classes, each by 2 / images at most.
BY_CLASS = {"balanced_accuracy": 1, "macro_f1": 4}
# What a repeated evaluation of the same weights may change: of 10,000 images those whose two largest logits
# differ by rounding alone, and the loss, as a share of it. Measured on a CPU with CNN-B on CIFAR-10: other
# micro-batches, threads and memory layouts changed none of 1,000 images and no loss, in bf16 and fp32. fp32
# in the place of bf16 gave 3 of them another class, none more or fewer right, and changed the loss by 0.08 %.
# Not yet measured on a GPU.
CHANGED_PER_10_000 = {"no": 1, "bf16": 10, "fp16": 10}
CHANGED_LOSS = {"no": 1e-3, "bf16": 1e-2, "fp16": 1e-2}
LISTED = 5  # findings of a kind in an interval
# Keys of metrics.jsonl that are compared otherwise, or can't be
NOT_REPLAYED = {"step", "epoch", "wall_s", "train/images_per_s", "train/mfu_pct"}
NOT_REPLAYED |= {"interrupted_at", "resumed_at", "why"}
NOT_REPLAYED |= {"hosts", "hosts_before", "processes", "processes_before"}
EXACT = ("lr", "images", "logged_step")  # last words of keys whose values no rounding changes
# Keys of result.json: about the start, as starts.jsonl repeats them, and those that a replay must repeat
START_KEYS = ("data", "batch_size", "epochs", "seed", "deterministic", "per_device_batch_size")
REPEATED_KEYS = ["script", "data", "batch_size", "epochs", "seed", "deterministic"]
REPEATED_KEYS += ["val_name", "val_images", "test_name", "test_images"]
SAME_WHERE_KNOWN = ("source", "unit", "val_chosen", "parameters", "total_steps")  # in either file
SAME_BITS = ("mixed_precision", "half_precision", "compile", "versions", "threads")

Numbers = dict[tuple[int, str], list[float]]  # by step and key


@dataclass(frozen=True)
class Interval:
    """The steps start + 1 ... end, and the evaluation at start. checkpoints: the kept ones in these steps."""

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
    interval: Interval
    findings: list[str] = field(default_factory=list)
    is_replayed: bool = False
    is_exact: bool = False  # no value may differ
    why_not: list[str] = field(default_factory=list)  # what the bits depend on, and differs
    # The largest ones: of the losses, the accuracies, ..., the weights, the optimizer's state
    differences: dict[str, float] = field(default_factory=dict)
    # Steps with evaluations in the run's log that were compared, and that the replay does not have
    evaluated: set[int] = field(default_factory=set)
    not_repeated: set[int] = field(default_factory=set)

    def add(self, name: str, difference: float) -> None:
        self.differences[name] = max(self.differences.get(name, 0.0), difference)


def recorded_steps_per_epoch(run: RunRecord) -> int:
    """Return what the start recorded, else what the log's first line says; contradictions() checks others.

    ValueError without a line.
    """
    if "steps_per_epoch" in run.about:
        return run.about["steps_per_epoch"]
    for line in run.metrics:
        if line["step"] > 0 < line["epoch"]:
            return max(1, round(line["step"] / line["epoch"]))
    raise ValueError(f"{run.folder} has no log: {', '.join(run.problems)}")


def contradictions(run: RunRecord, kept: list[int]) -> list[str]:
    """Where the run's files contradict one another. kept: the steps of its checkpoints."""
    starts = [start for start in run.kept if "steps_per_epoch" in start.about]
    facts, per_epoch = run.facts, recorded_steps_per_epoch(run.as_of(starts[-1]) if starts else run)
    found = [line for line in run.problems if line.startswith(COMPARED)]
    if starts:
        last = run.starts[-1].about
        found += [
            f"{name} in recipe.json is not that of the last start in starts.jsonl"
            for name in run.about
            if name in last and run.about[name] != last[name]
        ]
        found += [
            f"{name} is {facts.get(name)} in result.json, {last[name]} in the last start in starts.jsonl"
            for name in START_KEYS
            if name in last and facts.get(name) != last[name]
        ]
    evaluated = ["best_step", *(f"{kind}_{name}" for kind in ("best", "final") for name in METRICS)]
    tested = next((line for line in run.metrics if "test/loss" in line), {})
    total = run.recipe.get("epochs", 1) * per_epoch
    is_by_flag = (facts.get("stopped_by") or "--max_steps").startswith("--max_steps")
    expected = {
        **({"steps": min(total, run.recipe.get("max_steps") or total)} if is_by_flag else {}),
        **{name: run.derived.get(name) for name in evaluated},
        **{f"test_{name}": tested.get(f"test/{name}") for name in METRICS},
    }
    found += [
        f"{name} is {facts.get(name)} in result.json, {value} by the recipe and the log"
        for name, value in expected.items()
        if facts.get(name) != value
    ]
    newest = max([*(line["step"] for line in run.metrics), *kept])
    if newest != facts["steps"]:
        found.append(f"the log and the checkpoints end at step {newest:,}, the run at {facts['steps']:,}")
    for line in run.metrics:
        known = {s.about["steps_per_epoch"] for s in starts if s.first <= line["step"] <= s.last}
        if line["epoch"] not in [line["step"] / n for n in known or {per_epoch}]:
            return [*found, f"step {line['step']:,} is in epoch {line['epoch']:g} of the log"]
    return found


def compare_facts(run: RunRecord, replay: RunRecord, is_moved: bool) -> list[str]:
    """Differences in what the page says of the training. is_moved: the data is at another place now."""
    names = [name for name in REPEATED_KEYS if name not in run.unknown and not (is_moved and name == "data")]
    pairs = {name: (run.facts.get(name), replay.facts.get(name)) for name in names}
    told, again = run.about | run.facts, replay.about | replay.facts
    # Older versions have not recorded all of these.
    pairs |= {name: (told[name], again.get(name)) for name in SAME_WHERE_KNOWN if name in told}
    pairs["steps in an epoch"] = recorded_steps_per_epoch(run), recorded_steps_per_epoch(replay)
    return [f"{name}: {ours}, in the replay {its}" for name, (ours, its) in pairs.items() if ours != its]


def compare_with_replay(run: RunRecord, replay: RunRecord, outcome: Outcome) -> list[str]:
    """Where the run is not what its replay shows. Other differences are added to the outcome."""
    found = _listed(_compare_numbers(run, replay, outcome))
    for step in outcome.interval.checkpoints:
        found += _listed(_compare_checkpoint(run, replay, step, outcome))
    return found


def why_not_exact(run: RunRecord, replay: RunRecord) -> list[str]:
    """What the bits depend on, and differs. Empty: the run and its replay must have the same bits."""
    if not run.facts.get("deterministic"):
        return ["it was trained without --deterministic"]
    pairs = {name: (run.about.get(name), replay.about.get(name)) for name in SAME_BITS}
    pairs |= {
        n: (run.facts.get(n), replay.facts.get(n)) for n in ("device", "per_device_batch_size", "step_graph")
    }
    found = [f"{name} {ours}, in the replay {its}" for name, (ours, its) in pairs.items() if ours != its]
    is_zero = any(str(record.facts.get("strategy")).startswith("zero") for record in (run, replay))
    return [*found, *(["ZeRO adds in another order"] if is_zero else [])]


def changed_images(images: int, precision: str) -> int:
    """The images that a repeated evaluation of the same weights may count otherwise."""
    return 1 + images * CHANGED_PER_10_000[precision] // 10_000


def changed_mean(name: str, sizes: list[int], images: int) -> float:
    """The most that a mean over classes changes if so many images are predicted otherwise.

    sizes: the number of images of each class. The smallest classes change most, and none by more than 1.
    """
    left, total = BY_CLASS[name] * images, 0.0
    for size in sorted(max(1, size) for size in sizes):
        total += min(left, size) / size
        left -= min(left, size)
    return total / max(1, len(sizes))


def class_sizes(replay: RunRecord, split: str) -> list[int]:
    """The evaluated images of each class; of more classes than confusion.json has room for 1 each."""
    matrix = replay.confusion
    if split == "val" and "val_images" in matrix:
        return matrix["val_images"]
    rows = matrix.get("confusion", [])
    return [sum(row) for row in rows] or [1] * (CONFUSED + 1)


def _listed(findings: Iterator[str]) -> list[str]:
    """The first LISTED findings, and how many more there are."""
    found = list(findings)
    more = len(found) - LISTED
    return [*found[:LISTED], *([f"and {more:,} more differences like these"] if more > 0 else [])]


def _compare_numbers(run: RunRecord, replay: RunRecord, outcome: Outcome) -> Iterator[str]:
    """Compare the values of the log."""
    theirs, mine = (_numbers(record, outcome, run) for record in (run, replay))
    per_epoch, last = recorded_steps_per_epoch(run), run.facts["steps"]
    for step, key in sorted(theirs.keys() | mine.keys()):
        told, values = theirs.get((step, key), []), mine.get((step, key), [])
        if key.startswith("val/"):
            # Both are evaluated at their own ends, too, and a run that was continued has several.
            is_due = outcome.interval.is_evaluation or step % per_epoch == 0 or step == last
            if not is_due and not (told and values):
                outcome.not_repeated |= {step} if told else set()
                continue
            outcome.evaluated.add(step)
        if len(told) != len(values):
            yield f"{key} of step {step:,} stands {len(told)} times in the log, {len(values)} in its replay"
            continue
        kind = key.rpartition("/")[2]
        for claimed, value in zip(told, values, strict=True):
            said = f"{key} of step {step:,} is {claimed:.6g}, in the replay {value:.6g}"
            difference = abs(value - claimed)
            outcome.add(kind, difference)
            if outcome.is_exact or kind in EXACT:
                if difference:
                    yield f"{said}: they differ by {difference:.1e}"
            elif outcome.interval.is_evaluation:
                yield from _compare_evaluation(said, key, difference, value, replay)


def _compare_evaluation(
    said: str, key: str, difference: float, value: float, replay: RunRecord
) -> Iterator[str]:
    """Compare a metric of two evaluations of the same weights, unless it is by class. said: the values, for
    the finding."""
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
                yield f"{said}: a repeated evaluation changes {most:.4f} at most"
    elif metric.is_share:
        images = replay.facts[f"{split}_images"]
        count, most = round(difference * images), changed_images(images, precision)
        if count > most:
            differ = f"{plural(count, 'image')} of {images:,} more or fewer"
            yield f"{said}: {differ}, and a repeated evaluation changes {most:,} at most"
    elif difference > CHANGED_LOSS[precision] * value:
        yield f"{said}: a repeated evaluation changes {CHANGED_LOSS[precision]:.1%} at most"


def _numbers(record: RunRecord, outcome: Outcome, run: RunRecord) -> Numbers:
    """The values of the log in the interval, and the loss since its last line in the checkpoints' state.json.

    Those on the test split, of the best weights, are here of the step of these weights.
    """
    interval, last = outcome.interval, run.facts["steps"]
    has_test = interval.is_evaluation and interval.start == run.facts.get("best_step", last)
    found: Numbers = defaultdict(list)
    for line in record.metrics:
        step = line["step"]
        for key in line.keys() - NOT_REPLAYED:
            if key.startswith("test/"):
                if has_test:
                    found[interval.start, key].append(line[key])
            elif key.startswith("val/"):
                if interval.start <= step <= interval.end:
                    found[step, key].append(line[key])
            elif interval.start < step <= interval.end:
                found[step, key].append(line[key])
    for step in interval.checkpoints:
        state = read_json(_folder(record, step) / STATE_FILE)
        mean = sum(state["losses"]) / (len(state["losses"]) * state["accumulations"])
        found[step, f"{STATE_FILE}/loss"].append(mean)
        found[step, f"{STATE_FILE}/logged_step"].append(state["logged_step"])
    return found


def _folder(record: RunRecord, step: int) -> Path:
    return record.folder / "checkpoints" / step_name(step)


def _manifest(record: RunRecord, step: int) -> dict[str, Any]:
    folder = _folder(record, step)
    return checkpoints.check_manifest((folder / checkpoints.MANIFEST_FILE).read_bytes(), folder)


def _compare_checkpoint(run: RunRecord, replay: RunRecord, step: int, outcome: Outcome) -> Iterator[str]:
    """Compare all tensors of a checkpoint."""
    records, name = (run, replay), step_name(step)
    theirs, mine = (_manifest(record, step) for record in records)
    scalars = [read_json(_folder(record, step) / STATE_FILE).get("optimizer") for record in records]
    classes = [manifest.get("classes", []) for manifest in (theirs, mine)]
    if not (match := match_classes(*classes)).is_identity:
        order = ", the same in another order" if match.is_permutation else ""
        yield f"classes in {name}: {some_of(classes[0])}, in the replay {some_of(classes[1])}{order}"
        return  # their heads have other rows
    pairs = {"optimizer": (theirs.get("optimizer"), mine.get("optimizer"))}
    for key, (told, value) in {**pairs, "the optimizer's part of state.json": scalars}.items():
        if told != value:
            yield f"{key} in {name}: {told}, in the replay {value}"
    if theirs["files"].keys() != mine["files"].keys():
        yield f"{name} has the files {', '.join(theirs['files'])}, in the replay {', '.join(mine['files'])}"
        return
    for file in (file for file in mine["files"] if file.endswith(".safetensors")):
        told, made = (checkpoints.TensorFile(_folder(record, step) / file) for record in records)
        if told.specs() != made.specs():
            yield f"{name}/{file} has other tensors than in the replay"
            continue
        for tensor in made.shapes():
            claimed, value = (part.tensor(tensor).double() for part in (told, made))
            if not claimed.isfinite().all():
                yield f"{tensor} in {name}/{file} is not finite"
            elif claimed.numel():
                difference = (value - claimed).abs().max().item()
                outcome.add("optimizer's state" if file == OPTIMIZER_FILE else "weights", difference)
                if outcome.is_exact and difference:
                    yield f"{tensor} in {name}/{file} differs by {difference:.1e}"
