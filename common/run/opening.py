"""Opens a run: its folder, the state it resumes from, its log, its saver and its telemetry."""

import contextlib
import os
from collections.abc import Callable, Iterator
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
from common.recipe import Batch, ImageRecipe, Recipe
from common.run.exchange import Exchange
from common.run.folder import RunFolder, count_restarts, open_folder, resumed_from
from common.run.log import RunLog
from common.run.provenance import checkpoint_record, run_name, run_record
from common.run.state import RunState
from common.system.env import EVENTS_FILE, report
from common.system.files import not_written
from common.system.threads import Heartbeat
from common.telemetry.sampling import Telemetry, this_process


class OpenRun:
    """A run that has begun, in one process. The constructor is collective.

    It restores the training from the newest checkpoint, if there is one. data: a name that changes with its
    content, and the names of the classes. On an error the run's folder is released.
    """

    # Of the main process
    folder: RunFolder | None = None
    log: RunLog | None = None

    def __init__(
        self,
        accelerator: Accelerator,
        recipe: Recipe,
        batch: Batch,
        training: TrainingState,
        data: tuple[str, tuple[str, ...]],
        steps: Steps,
    ):
        self.accelerator, self.recipe, self.batch, self.training = accelerator, recipe, batch, training
        self.steps, self.source = steps, data[0]
        self.final: dict[str, Any] = {}  # parts of result.json that are known only at the end
        processes = gather_object([this_process(accelerator)])
        try:
            point = ResumePoint.from_json(
                once(accelerator, "run folder", self._open_folder, recipe.timeout_s)
            )
            self.state = state = point.state
            self.saved_step = point.saved_step  # of the newest checkpoint in the run's own folder, or 0
            if point.has_checkpoint:
                checkpoint = self.folder.checkpoint if self.folder else None
                training.restore(checkpoint, state.scalars(), with_optimizer=point.has_optimizer)
            self.record = run_record(accelerator, recipe, processes, point.resumed_from, self.source)
            once(accelerator, "log", self._start_log, recipe.timeout_s)
            path, mirror = (self.folder.path, self.folder.mirror) if self.folder else (None, None)
            lost = self.folder.leases[0].check if self.folder else lambda: None
            manifest = checkpoint_record(self.record, recipe, batch, accelerator, data[1]) | training.about()
            newest = self.saved_step or None
            self.saver = Saver(training, path, recipe.keep_every, manifest, mirror, newest, lost)
            rank, interval_s = accelerator.process_index, recipe.telemetry_s
            telemetry = Telemetry(
                processes, rank, path, interval_s, lambda: state.step, steps.last, state.wall_s
            )
            find_problem = self._problem if self.folder else None
            self.exchange = Exchange(recipe.timeout_s, state, telemetry, find_problem, _skipped(recipe))
            _report_start(self.exchange, recipe, batch, state.step, path)
        except BaseException:
            if self.folder:
                self.folder.release()
            raise

    def wait_for_save(self, heartbeat: Heartbeat) -> None:
        """Waits until the checkpoint in flight is written. ValueError when it could not be. Main process."""
        self.saver.wait(heartbeat)
        if problem := self.exchange.problem():
            raise ValueError(problem)

    def _open_folder(self, heartbeat: Heartbeat) -> dict[str, Any]:
        name = run_name(self.accelerator, self.recipe, self.batch)
        self.folder = open_folder(self.recipe, name, self.steps.last, heartbeat, _print)
        return _resume_point(self.folder, self.training, self.recipe, self.source, self.steps).to_json()

    def _start_log(self, _: Heartbeat) -> None:
        assert self.folder
        folder, state, steps = self.folder, self.state, self.steps
        with writing("the log", folder.path):
            (folder.path / "result.json").unlink(missing_ok=True)
            own = None if folder.is_new else folder.checkpoint
            writer = own.manifest.get("written_by", {}) if own else {}
            self.log = RunLog(
                folder.path, self.recipe, self.record, state, steps.last, steps.per_epoch, writer
            )
        if folder.mirror and self.saved_step:  # its upload may have been interrupted
            folder.mirror.offer(self.saved_step, state.best_step)
        print(f"run folder {folder.path}", flush=True)

    def _problem(self) -> str | None:
        """The first error that ends the run: a lost folder, a checkpoint or a line that can't be written."""
        assert self.folder
        assert self.log
        return self.folder.lost() or self.saver.problem or self.log.problem


@contextlib.contextmanager
def writing(what: str, folder: Path) -> Iterator[None]:
    """Turns an OSError into a ValueError that says what to do."""
    try:
        yield
    except OSError as error:
        raise not_written(what, folder, error) from error


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


def _skipped(recipe: Recipe) -> Callable[[], list[int]]:
    """A function that gives the ids of skipped images; none without images."""
    if not isinstance(recipe, ImageRecipe):
        return list
    from common.data.workers import skipped

    return skipped


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


def _has_optimizer(checkpoint: Checkpoint, state: RunState, training: TrainingState, recipe: Recipe) -> bool:
    """False when the optimizer differs from the checkpoint's and --allow_changed permits it."""
    try:
        training.optimizer.check(checkpoint, state.scalars())
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
        yield f"from here on the run is {now} it cannot be reproduced bit for bit"
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
