"""Compares a finished run with replays of some of its steps, for verify.py.

Rounding depends on the device, the strategy and the number of processes, and training amplifies it. So the
bounds are measured: they are multiples of the differences between two replays, of which one begins with
slightly other weights, or is in fp32 where the run is in half precision. They take no word of the run's own.
"""

import math
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from common.checkpoint import format as checkpoints
from common.checkpoint.format import MODEL_FILE, STATE_FILE, step_name
from common.system.files import read_json
from tools.logbook.record import COMPARED, RunRecord

# The bound on a difference, in differences between the two replays. Measured on CPUs on CIFAR-10 and digits
# with CNN-A, a small ViT and a small ResNet: runs by 2 processes under DDP, replayed by one over 4 to 20
# steps of their first 60, differed from it by at most 13 times that, in all losses and tensors; nearly all by
# less than 5 times. Not yet measured on a GPU.
SPREADS = 30
TIGHT = 1e-6  # added to it, as a share of the value: rounding that nothing has amplified
LISTED = 5  # findings of a kind in an interval
# Keys of metrics.jsonl that are compared otherwise, or can't be
NOT_REPLAYED = {"step", "epoch", "wall_s", "train/images_per_s", "train/mfu_pct"}
NOT_REPLAYED |= {"interrupted_at", "resumed_at", "why"}
NOT_REPLAYED |= {"hosts", "hosts_before", "processes", "processes_before"}
SAME = ["script", "data", "batch_size", "epochs", "seed", "deterministic"]  # in result.json
SAME += ["val_name", "val_images", "test_name", "test_images"]
SAME_ABOUT = ("source", "unit", "val_chosen")  # in recipe.json
SAME_BITS = ("mixed_precision", "half_precision", "compile", "versions", "threads")

Numbers = dict[tuple[int, str], list[float]]  # by step and key


@dataclass(frozen=True)
class Interval:
    """The steps start + 1 ... end, and the evaluation at start. checkpoints: the kept ones in these steps."""

    start: int
    end: int
    checkpoints: tuple[int, ...] = ()

    def __str__(self) -> str:
        if self.start == self.end:
            return f"the evaluation at step {self.end:,}"
        return f"steps {self.start:,}-{self.end:,}"


@dataclass
class Outcome:
    interval: Interval
    findings: list[str] = field(default_factory=list)
    is_replayed: bool = False
    is_exact: bool = False  # no value may differ
    has_test: bool = False  # the replay evaluated the run's best weights on the test split
    loss: float = 0.0  # largest difference of a loss
    bound: float = 0.0  # largest bound on a loss
    weights: float | None = None  # largest difference of a weight
    untold: set[str] = field(default_factory=set)  # tensors for which rounding explains any difference


def steps_per_epoch(run: RunRecord) -> int:
    """By the first line of the log; contradictions() checks the others. ValueError without a line."""
    for line in run.metrics:
        if line["step"] > 0 < line["epoch"]:
            return max(1, round(line["step"] / line["epoch"]))
    raise ValueError(f"{run.folder} has no log: {', '.join(run.problems)}")


def contradictions(run: RunRecord, kept: list[int]) -> list[str]:
    """Where the run's files contradict one another. kept: the steps of its checkpoints."""
    facts, per_epoch = run.facts, steps_per_epoch(run)
    found = [line for line in run.problems if line.startswith(COMPARED)]
    evaluated = ("final_accuracy", "final_loss", "best_accuracy", "best_step")
    tested = next((line for line in run.metrics if "test/loss" in line), {})
    total = run.recipe.get("epochs", 1) * per_epoch
    expected = {
        "steps": min(total, run.recipe.get("max_steps") or total),
        **{name: run.derived.get(name) for name in evaluated},
        **{f"test_{name}": tested.get(f"test/{name}") for name in ("accuracy", "loss")},
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
        if line["epoch"] != line["step"] / per_epoch:
            return [*found, f"step {line['step']:,} is in epoch {line['epoch']:g} of the log"]
    return found


def compare_facts(run: RunRecord, replay: RunRecord, is_moved: bool) -> list[str]:
    """Differences in what the page says of the training. is_moved: the data is at another place now."""
    names = [name for name in SAME if not (is_moved and name == "data")]
    pairs = {name: (run.facts.get(name), replay.facts.get(name)) for name in names}
    # Older versions have not recorded all of these.
    pairs |= {name: (run.about[name], replay.about.get(name)) for name in SAME_ABOUT if name in run.about}
    pairs["steps in an epoch"] = steps_per_epoch(run), steps_per_epoch(replay)
    return [f"{name}: {ours}, in the replay {its}" for name, (ours, its) in pairs.items() if ours != its]


def compare(run: RunRecord, first: RunRecord, second: RunRecord, outcome: Outcome) -> list[str]:
    """The differences between the run and its first replay that are larger than the bounds.

    second: the replay that rounds otherwise; the same as `first` if there is none, for the smallest bounds.
    """
    checkpoints = outcome.interval.checkpoints
    # Up to a checkpoint with equal bits rounding explains no difference.
    exact = max((step for step in checkpoints if _sha256(run, step) == _sha256(first, step)), default=-1)
    exact = outcome.interval.end if outcome.is_exact else exact
    found = _listed(_compare_numbers(run, first, second, outcome, exact))
    for step in checkpoints:
        found += _listed(_compare_checkpoint([run, first, second], step, step <= exact, outcome))
    return found


def must_be_equal(run: RunRecord, replay: RunRecord) -> bool:
    """True if both have --deterministic, and nothing differs on which their bits depend."""
    pairs = [(run.about.get(name), replay.about.get(name)) for name in SAME_BITS]
    pairs += [(run.facts.get(name), replay.facts.get(name)) for name in ("device", "per_device_batch_size")]
    is_zero = any(str(record.facts.get("strategy")).startswith("zero") for record in (run, replay))
    return bool(run.facts.get("deterministic")) and not is_zero and all(a == b for a, b in pairs)


def has_same_weights(run: RunRecord, replay: RunRecord, interval: Interval) -> bool:
    """True if a kept checkpoint has the replay's weights, bit by bit."""
    return any(_sha256(run, step) == _sha256(replay, step) for step in interval.checkpoints)


def _listed(findings: Iterator[str]) -> list[str]:
    """The first LISTED findings, and how many more there are."""
    found = list(findings)
    more = len(found) - LISTED
    return [*found[:LISTED], *([f"and {more:,} more differences like these"] if more > 0 else [])]


def _compare_numbers(
    run: RunRecord, first: RunRecord, second: RunRecord, outcome: Outcome, exact: int
) -> Iterator[str]:
    """Compares the values of the log. exact: the step up to which rounding explains no difference."""
    theirs, mine, again = (_numbers(record, record is run, outcome, run) for record in (run, first, second))
    spread: dict[str, float] = defaultdict(float)  # the largest so far, by the last word of the key
    tight = 0.0 if outcome.is_exact else TIGHT
    outcome.loss = outcome.bound = 0.0
    for step, key in sorted(theirs.keys() | mine.keys()):
        told, values = theirs.get((step, key), []), mine.get((step, key), [])
        if len(told) != len(values):
            yield f"{key} of step {step:,} stands {len(told)} times in the log, {len(values)} in its replay"
            continue
        kind, has_rounded = key.rpartition("/")[2], step > exact
        for claimed, value, other in zip(told, values, again.get((step, key), values), strict=False):
            difference = abs(value - claimed)
            spread[kind] = max(spread[kind], abs(value - other) * has_rounded)
            if kind == "lr":
                bound = 0.0
            elif "accuracy" in kind or kind == "macro_f1":
                bound = SPREADS * spread[kind] + has_rounded * _one_image(run, theirs, mine, step, key)
            else:
                bound = tight * abs(value) + SPREADS * spread[kind]
            if kind == "loss":
                outcome.loss, outcome.bound = max(outcome.loss, difference), max(outcome.bound, bound)
            if not difference <= bound:
                yield (
                    f"{key} of step {step:,} is {claimed:.6g}, in the replay {value:.6g}: they differ by"
                    f" {difference:.1e}, bound {bound:.1e}"
                )


def _one_image(run: RunRecord, theirs: Numbers, mine: Numbers, step: int, key: str) -> float:
    """The share of one image: rounding may change its class, where it has changed the loss, too."""
    split = key.partition("/")[0]
    has_changed = theirs.get((step, f"{split}/loss")) != mine.get((step, f"{split}/loss"))
    is_by_class = key.endswith(("balanced_accuracy", "macro_f1"))  # an image may be all of a class
    return has_changed / (1 if is_by_class else run.facts.get(f"{split}_images", math.inf))


def _numbers(record: RunRecord, is_run: bool, outcome: Outcome, run: RunRecord) -> Numbers:
    """The values of the log in the interval, and the loss since its last line in the checkpoints' state.json.

    The accuracy on the test split is that of the best weights, and stands at the run's last step.
    """
    interval, last, per_epoch = outcome.interval, run.facts["steps"], steps_per_epoch(run)
    found: Numbers = defaultdict(list)
    for line in record.metrics:
        step = line["step"]
        # A replay is evaluated at its own end, too.
        is_of_run = is_run or step % per_epoch == 0 or step == last
        for key in line.keys() - NOT_REPLAYED:
            if key.startswith("test/"):
                if outcome.has_test:
                    found[last, key].append(line[key])
            elif key.startswith("val/"):
                if is_of_run and interval.start <= step <= interval.end:
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


def _sha256(record: RunRecord, step: int) -> str:
    return _manifest(record, step)["files"][MODEL_FILE]["sha256"]


def _compare_checkpoint(
    records: list[RunRecord], step: int, is_exact: bool, outcome: Outcome
) -> Iterator[str]:
    """Compares all tensors of a checkpoint. records: the run, its first and its second replay."""
    name = step_name(step)
    theirs, mine = (_manifest(record, step) for record in records[:2])
    scalars = [read_json(_folder(record, step) / STATE_FILE).get("optimizer") for record in records[:2]]
    pairs = {key: (theirs.get(key), mine.get(key)) for key in ("classes", "optimizer")}
    for key, (told, value) in {**pairs, "the optimizer's part of state.json": scalars}.items():
        if told != value:
            yield f"{key} in {name}: {told}, in the replay {value}"
    if theirs["files"].keys() != mine["files"].keys():
        yield f"{name} has the files {', '.join(theirs['files'])}, in the replay {', '.join(mine['files'])}"
        return
    for file in (file for file in mine["files"] if file.endswith(".safetensors")):
        files = [checkpoints.TensorFile(_folder(record, step) / file) for record in records]
        if files[0].specs() != files[1].specs():
            yield f"{name}/{file} has other tensors than in the replay"
            continue
        for tensor in files[1].shapes():
            told, value, other = (part.tensor(tensor).double().flatten() for part in files)
            if not told.isfinite().all():
                yield f"{tensor} in {name}/{file} is not finite"
                continue
            # The largest value shows a change of one weight, the norm a small change of all.
            for norm in (math.inf, 2) if told.numel() else ():
                difference, spread, size = (
                    float(torch.linalg.vector_norm(part, norm))
                    for part in (value - told, value - other, value)
                )
                bound = TIGHT * size * (not outcome.is_exact) + SPREADS * spread * (not is_exact)
                if bound > size > 0:
                    outcome.untold.add(f"{tensor} in {name}/{file}")
                if file == MODEL_FILE and norm == math.inf:
                    outcome.weights = max(outcome.weights or 0.0, difference)
                if not difference <= bound:
                    yield f"{tensor} in {name}/{file} differs by {difference:.1e}, bound {bound:.1e}"
                    break
