"""Checks the checkpoint that a run resumes from, and which parts of its state stay valid."""

from dataclasses import dataclass, field
from typing import Any, Self

from common.checkpoint.format import Checkpoint
from common.checkpoint.training import TrainingState
from common.order import Steps
from common.recipe import Recipe
from common.run.facts import VAL_CHOSEN
from common.run.folder import count_restarts, resumed_from
from common.run.state import RunState
from common.run.storage import RunStorage


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


def resume_point(
    storage: RunStorage, training: TrainingState, recipe: Recipe, data: str, steps: Steps
) -> ResumePoint:
    """The state to resume from. Main process only. data: a name of its content.

    ValueError for a checkpoint of other data, another model or optimizer, or a step after the run's last; and
    after too many restarts without a new checkpoint.
    """
    found = storage.checkpoint
    point = (
        ResumePoint() if found is None else _from_checkpoint(found, storage, training, recipe, data, steps)
    )
    count_restarts(storage.folder, point.state.step)
    if found:
        print(f"continuing at step {found.step:,} with {found.folder}", flush=True)
    return point


def _from_checkpoint(
    found: Checkpoint, storage: RunStorage, training: TrainingState, recipe: Recipe, data: str, steps: Steps
) -> ResumePoint:
    _check_data(found, recipe, data)
    training.check(found)
    state = RunState.read(found)
    has_optimizer = _has_optimizer(found, state, training, recipe)
    if found.step > steps.last:
        raise ValueError(
            f"--max_steps {steps.last}: {found.folder} is at step {found.step:,} already; give more"
        )
    began_at = resumed_from(storage.folder)
    writer = found.manifest.get("written_by", {})
    for change in (
        _changed_precision(writer, training),
        _changed_determinism(writer, recipe),
        _moved_place(found, state, recipe, steps.per_epoch),
    ):
        if change:
            print(change, flush=True)
    if _evaluated_other_images(found, recipe):
        print("--max_val_images takes other images than before: the best evaluation begins anew")
        state.best, state.stale, state.evaluated = {}, 0, False
    if storage.is_new:  # the best evaluation and the W&B run are another run's
        state.best, state.evaluated, state.wandb_id, state.wandb_url = {}, False, None, None
        state.stale, state.stopped = 0, False
        began_at = recipe.resume
    if found.step == steps.last or state.is_over(recipe.patience):
        # Only the run's end is missing, whose pictures need an evaluation.
        state.evaluated = False
    return ResumePoint(state, True, 0 if storage.is_new else found.step, has_optimizer, began_at)


def _check_data(found: Checkpoint, recipe: Recipe, data: str) -> None:
    """Raises ValueError when the data has changed: ids must mean the same images and classes."""
    theirs = found.manifest.get("data", data)  # absent in older manifests
    if theirs != data and "data" not in recipe.allow_changed:
        raise ValueError(
            f"{found.folder} was trained on {theirs}, and --data {recipe.data} is now {data}:"
            " give what it was, or --allow_changed data"
        )


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


def _changed_precision(writer: dict[str, Any], training: TrainingState) -> str:
    """A remark if the types of the computation have changed. Weights in checkpoints are always fp32."""
    before, now = writer, vars(training.accelerator.precision)
    changed = [name for name in now if before.get(name, now[name]) != now[name]]
    if not changed:
        return ""
    what = ", ".join(f"{name} {now[name]} (it was {before[name]})" for name in changed)
    return f"the checkpoint was computed otherwise: from here on {what}; losses differ by rounding"


def _changed_determinism(writer: dict[str, Any], recipe: Recipe) -> str:
    """A remark if --deterministic has changed: a GPU's last bits then depend on the step of the change."""
    before = writer.get("deterministic")  # absent in older manifests
    if not isinstance(before, bool) or before == recipe.deterministic:
        return ""
    was, now = (f"{'with' if flag else 'without'} --deterministic" for flag in (before, recipe.deterministic))
    return f"the checkpoint was computed {was}, from here on {now}: on a GPU no other run has its last bits"


def _moved_place(found: Checkpoint, state: RunState, recipe: Recipe, per_epoch: int) -> str:
    """A remark if another batch size moves the place in the epochs, as steps keep their numbers.

    state.epoch is the step divided by the steps per epoch with the checkpoint's batch size.
    """
    size, unit = recipe.batch_size, recipe.unit
    before = found.manifest["recipe"].get("batch_size", size)
    if before == size or not state.epoch:
        return ""
    old_epoch, old_step = divmod(state.step, round(state.step / state.epoch))
    epoch, step = divmod(state.step, per_epoch)
    old, new = old_step * before, step * size
    between = f"{abs(old - new):,} {unit}" if epoch == old_epoch else f"the {unit} between"
    return (
        f"--batch_size {size} (it was {before}): step {state.step:,} came after {old:,} {unit} of epoch"
        f" {old_epoch + 1}, and comes after {new:,} of epoch {epoch + 1} now: {between} are"
        f" {'trained twice' if (epoch, new) < (old_epoch, old) else 'not trained'}"
    )


def _evaluated_other_images(found: Checkpoint, recipe: Recipe) -> bool:
    """True if --max_val_images took the first images of the split, as in older versions."""
    part = getattr(recipe, "max_val_images", None)
    return bool(part) and found.manifest.get("written_by", {}).get("val_chosen") != VAL_CHOSEN
