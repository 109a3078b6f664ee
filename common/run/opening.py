"""Opens a run: its folder, the state it resumes from, its log, its saver and its telemetry."""

import contextlib
import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

from accelerate import Accelerator
from accelerate.utils import gather_object

from common.checkpoint.format import Checkpoint
from common.checkpoint.saver import Saver
from common.checkpoint.training import TrainingState
from common.distributed.agreement import once
from common.order import Steps
from common.recipe import Batch, Recipe
from common.run.exchange import Exchange
from common.run.folder import RunFolder, count_restarts, open_folder, resumed_from
from common.run.log import RunLog
from common.run.provenance import checkpoint_record, run_name, run_record
from common.run.state import RunState
from common.system.env import EVENTS_FILE, report
from common.system.files import not_written
from common.system.threads import Heartbeat
from common.telemetry.collect import Telemetry, this_process


@dataclass
class OpenRun:
    """A run that has begun, in one process."""

    accelerator: Accelerator
    recipe: Recipe
    batch: Batch
    state: RunState
    saver: Saver
    exchange: Exchange
    devices: list[str]  # of all processes
    saved_step: int  # of the newest checkpoint in the run's own folder, 0 without one
    folder: RunFolder | None  # of the main process
    log: RunLog | None  # of the main process
    final: dict[str, Any] = field(default_factory=dict)  # parts of result.json that are known only at the end

    def wait_for_save(self, beat: Heartbeat) -> None:
        """Waits until the checkpoint in flight is written. ValueError when it could not be. Main process."""
        self.saver.wait(beat)
        if problem := self.exchange.problem():
            raise ValueError(problem)


@contextlib.contextmanager
def writing(what: str, folder: Path) -> Iterator[None]:
    """Turns an OSError into a ValueError that says what to do."""
    try:
        yield
    except OSError as error:
        raise not_written(what, folder, error) from error


def open_run(
    accelerator: Accelerator,
    recipe: Recipe,
    batch: Batch,
    training: TrainingState,
    data: tuple[str, tuple[str, ...]],
    steps: Steps,
) -> OpenRun:
    """Restores the training from the newest checkpoint, if there is one. Collective.

    data: a name that changes with its content, and the names of the classes. On an error the run's folder is
    released.
    """
    folder: RunFolder | None = None
    log: RunLog | None = None
    source, classes = data
    processes = gather_object([this_process(accelerator)])

    def open_own(beat: Heartbeat) -> dict[str, Any]:
        nonlocal folder
        folder = open_folder(recipe, run_name(accelerator, recipe, batch), steps.last, beat, _print)
        return _resume_point(folder, training, recipe, source, steps).to_json()

    def start_log(_: Heartbeat) -> None:
        nonlocal log
        assert folder
        log = _start_log(folder, recipe, record, point, steps)

    def problem() -> str | None:
        """The first error that ends the run: a lost folder, a checkpoint or a line that can't be written."""
        assert folder
        assert log
        return folder.lost() or saver.problem or log.problem

    try:
        point = ResumePoint.from_json(once(accelerator, "run folder", open_own, recipe.timeout_s))
        state = point.state
        if point.has_checkpoint:
            checkpoint = folder.checkpoint if folder else None
            training.restore(checkpoint, state.scalars(), with_optimizer=point.has_optimizer)
        record = run_record(accelerator, recipe, processes, point.resumed_from, source)
        once(accelerator, "log", start_log, recipe.timeout_s)
        path = folder.path if folder else None
        manifest = checkpoint_record(record, recipe, batch, accelerator, classes) | training.about()
        saver = Saver(
            training,
            path,
            recipe.keep_every,
            manifest,
            folder.mirror if folder else None,
            point.saved_step or None,
            folder.leases[0].check if folder else lambda: None,
        )
        telemetry = Telemetry(
            processes,
            accelerator.process_index,
            path,
            recipe.telemetry_s,
            lambda: state.step,
            steps.last,
            state.wall_s,
        )
        exchange = Exchange(recipe.timeout_s, state, telemetry, problem if folder else None)
        _report_start(exchange, recipe, batch, state.step, path)
        return OpenRun(
            accelerator,
            recipe,
            batch,
            state,
            saver,
            exchange,
            record["devices"],
            point.saved_step,
            folder,
            log,
        )
    except BaseException:
        if folder:
            folder.release()
        raise


def _start_log(
    folder: RunFolder, recipe: Recipe, record: dict[str, Any], point: "ResumePoint", steps: Steps
) -> RunLog:
    state = point.state
    with writing("the log", folder.path):
        (folder.path / "result.json").unlink(missing_ok=True)
        is_own = folder.checkpoint is not None and not folder.is_new
        writer = folder.checkpoint.manifest.get("written_by", {}) if folder.checkpoint and is_own else {}
        log = RunLog(folder.path, recipe, record, state, steps.last, steps.per_epoch, writer)
    if folder.mirror and point.saved_step:  # its upload may have been interrupted
        folder.mirror.offer(point.saved_step, state.best_step)
    print(f"run folder {folder.path}", flush=True)
    return log


def _report_start(exchange: Exchange, recipe: Recipe, batch: Batch, step: int, folder: Path | None) -> None:
    """Reports the first step to launch.py, and if all hosts see the run's folder. Collective."""
    if EVENTS_FILE not in os.environ:
        return
    file = folder.resolve() / "recipe.json" if folder else None
    mains = exchange.of_main((file, file.read_bytes()) if file else None)
    is_shared = all(exchange.poll.gather(_holds(*mains)))
    if file:
        report(
            "began",
            step=step,
            processes=batch.processes,
            folder=str(file.parent),
            in_s3=bool(recipe.s3),
            is_shared=is_shared,
        )


def _holds(file: Path, content: bytes) -> bool:
    with contextlib.suppress(OSError):
        return file.read_bytes() == content
    return False


def _print(message: str) -> None:
    """Prints. Called by the main process, also in the threads that save and upload."""
    print(message, flush=True)


@dataclass(frozen=True)
class ResumePoint:
    """The state from which this process starts. Without arguments: step 0."""

    state: RunState = field(default_factory=RunState)
    has_checkpoint: bool = False
    saved_step: int = 0  # of that checkpoint if it is in this run's own folder
    has_optimizer: bool = False  # False: the optimizer's state starts at zero
    resumed_from: str | None = None  # the --resume with which the run began

    def to_json(self) -> dict[str, Any]:
        return vars(self) | {"state": self.state.to_json()}

    @classmethod
    def from_json(cls, content: dict[str, Any]) -> Self:
        return cls(**content | {"state": RunState(**content["state"])})


def _resume_point(
    folder: RunFolder, training: TrainingState, recipe: Recipe, data: str, steps: Steps
) -> ResumePoint:
    """The state to resume from. Main process only. data: a name of its content.

    ValueError for a checkpoint of other data, another model or optimizer, or a step after the run's last; and
    after too many restarts without a new checkpoint.
    """
    checkpoint = folder.checkpoint
    point = (
        _from_checkpoint(checkpoint, folder, training, recipe, data, steps) if checkpoint else ResumePoint()
    )
    count_restarts(folder.path, point.state.step)
    if checkpoint:
        print(f"continuing at step {checkpoint.step:,} with {checkpoint.folder}", flush=True)
    return point


def _from_checkpoint(
    checkpoint: Checkpoint,
    folder: RunFolder,
    training: TrainingState,
    recipe: Recipe,
    data: str,
    steps: Steps,
) -> ResumePoint:
    before = checkpoint.manifest.get("data")
    if before != data and "data" not in recipe.allow_changed:  # ids must mean the same images and classes
        raise ValueError(
            f"{checkpoint.folder} was trained on {before}, and --data {recipe.data} is now {data}:"
            " give what it was, or --allow_changed data"
        )
    training.check(checkpoint)
    state = RunState.read(checkpoint)
    has_optimizer = _has_optimizer(checkpoint, state, training, recipe)
    if checkpoint.step > steps.last:
        raise ValueError(
            f"--max_steps {steps.last}: {checkpoint.folder} is at step {checkpoint.step:,} already; give more"
        )
    began_at = resumed_from(folder.path)
    for change in _changes(checkpoint, state, training, recipe, steps.per_epoch):
        print(change, flush=True)
    if folder.is_new:  # the best evaluation and the W&B run are another run's
        state.best, state.evaluated, state.wandb_id, state.wandb_url = {}, False, None, None
        state.stale, state.stopped = 0, False
        began_at = recipe.resume
    if checkpoint.step == steps.last or state.is_over(recipe.patience):
        # Only the run's end is missing, whose pictures need an evaluation.
        state.evaluated = False
    return ResumePoint(state, True, 0 if folder.is_new else checkpoint.step, has_optimizer, began_at)


def _has_optimizer(found: Checkpoint, state: RunState, training: TrainingState, recipe: Recipe) -> bool:
    """False when the optimizer differs from the checkpoint's and --allow_changed permits it."""
    try:
        training.optimizer.check(found, state.scalars())
    except ValueError as problem:
        if "optimizer" not in recipe.allow_changed:
            raise ValueError(
                f"{problem}: give that optimizer, or --allow_changed optimizer to start its state afresh"
            ) from None
        print(f"the optimizer's state starts afresh: {problem}", flush=True)
        return False
    return True


def _changes(
    checkpoint: Checkpoint, state: RunState, training: TrainingState, recipe: Recipe, per_epoch: int
) -> Iterator[str]:
    """Yields a remark for each change that the flags permit, and that changes numbers."""
    writer = checkpoint.manifest.get("written_by", {})
    if types := changed_types(writer, vars(training.accelerator.precision)):
        yield f"the checkpoint was computed with other types: from here on {types}; losses differ by rounding"
    if writer.get("deterministic", recipe.deterministic) != recipe.deterministic:
        now = "deterministic, but" if recipe.deterministic else "not deterministic:"
        yield f"from here on the run is {now} it cannot be reproduced bit for bit on a GPU"
    size, unit = recipe.batch_size, recipe.unit
    old_size = checkpoint.manifest["recipe"].get("batch_size", size)
    if old_size != size and state.epoch:
        # Steps keep their numbers. state.epoch is the step divided by the checkpoint's steps per epoch.
        old_epoch, old_step = divmod(state.step, round(state.step / state.epoch))
        epoch, step = divmod(state.step, per_epoch)
        old, new = old_step * old_size, step * size
        between = f"{abs(old - new):,} {unit}" if epoch == old_epoch else f"the {unit} between"
        yield (
            f"--batch_size {size} (it was {old_size}): step {state.step:,} came after {old:,} {unit} of epoch"
            f" {old_epoch + 1}, and comes after {new:,} of epoch {epoch + 1} now: {between} are"
            f" {'trained twice' if (epoch, new) < (old_epoch, old) else 'not trained'}"
        )


def changed_types(writer: dict[str, Any], types: dict[str, Any]) -> str:
    """The types of the computation that differ from the checkpoint's, whose weights are always fp32."""
    changed = (name for name, now in types.items() if writer.get(name, now) != now)
    return ", ".join(f"{name} {types[name]} (it was {writer[name]})" for name in changed)
