"""The progress of a run, in memory and as state.json in each checkpoint."""

import dataclasses
import typing
from dataclasses import dataclass, field
from typing import Any, Self

from onecurve.checkpoint.format import STATE_FILE, Checkpoint, OptimizerScalars
from onecurve.flags.recipe import score
from onecurve.system.files import read_json, typed_values
from onecurve.system.phase import now
from onecurve.system.processes import own_age_s


@dataclass
class RunState:
    """The state after `step` optimizer steps. Without arguments: before the run begins.

    In memory `wall_s` and `spent_s` are the times of earlier processes, and the fields from `losses` on have
    the values with which this process began; at_save() fills in the current ones.
    """

    step: int = 0
    evaluated: bool = False  # True when the weights of this step were evaluated
    best: dict[str, float] = field(default_factory=dict)  # of the best evaluation: its metrics and its step
    last: dict[str, float] = field(default_factory=dict)  # of the last evaluation: its metrics
    logged_step: int = 0  # step of the last line with a training loss in metrics.jsonl
    train_s: float = 0.0
    wall_s: float = 0.0
    spent_s: dict[str, float] | None = None  # the parts of wall_s; absent in older files
    bad_images: list[int] = field(default_factory=list)  # samples that were skipped; absent in older files
    stale: int = 0  # evaluations since the best one; absent in older files
    stopped: bool = False  # True when the script ends the run before its last step; absent in older files
    losses: list[float] = field(default_factory=list)  # of each process, summed since the last line
    accumulations: int = 1
    epoch: float = 0.0
    optimizer: OptimizerScalars | None = None
    loss_scale: dict[str, float] | None = None  # with fp16
    wandb_id: str | None = None
    wandb_url: str | None = None

    @classmethod
    def read(cls, checkpoint: Checkpoint) -> Self:
        """The checkpoint's state. ValueError for a file that no run has written."""
        file = checkpoint.folder / STATE_FILE
        try:
            state = cls.from_json(read_json(file))
            if state.step != checkpoint.step:
                raise ValueError(f"it is of step {state.step}")
        except (OSError, ValueError) as error:
            raise ValueError(f"{file} is no state of step {checkpoint.step}: {error}") from None
        return state

    @classmethod
    def from_json(cls, content: dict[str, Any]) -> Self:
        """ValueError names the fields that are missing or wrong."""
        kept, wrong = typed_values(content, typing.get_type_hints(cls))
        wrong += [name for name in NEEDED if name not in kept and name not in wrong]
        if not kept.get("losses") or kept.get("accumulations", 0) < 1:
            wrong += ["losses or accumulations"]
        if wrong:
            raise ValueError(f"missing or wrong: {', '.join(wrong)}")
        return cls(**kept)

    def to_json(self) -> dict[str, Any]:
        return {n: value for n, value in vars(self).items() if value is not None or n == "loss_scale"}

    def at_save(self, **filled: Any) -> Self:
        """A copy for state.json, with the fields whose values are taken at the save."""
        restored = {"wandb_id": None, "wandb_url": None}  # not of this process
        times: dict[str, Any] = {"wall_s": self.wall_now_s(), "spent_s": self.spent_now_s()}
        return dataclasses.replace(self, **times | restored | filled)

    def scalars(self) -> dict[str, Any]:
        """The state of the optimizer and the loss scale, for TrainingState."""
        return {name: v for name, v in self.to_json().items() if name in ("optimizer", "loss_scale")}

    def wall_now_s(self) -> float:
        """Seconds since the run's first process began, imports included, without pauses between processes."""
        return self.wall_s + own_age_s()

    def spent_now_s(self) -> dict[str, float]:
        """The parts of wall_now_s(): `starting`, `training`, `evaluation`, ... (onecurve/system/phase.py)."""
        before, mine = self.spent_s or {}, now.spent_s()
        return {part: before.get(part, 0.0) + mine.get(part, 0.0) for part in before | mine}

    def end_step(self, step: int) -> None:
        self.step, self.evaluated = step, False

    def add_evaluation(self, step: int, metrics: dict[str, float], by: str = "accuracy") -> None:
        """Adds an evaluation. The best is the first with the highest `by`, or without one the lowest loss."""
        self.last, self.evaluated = metrics, True
        self.stale += 1
        if not self.best or score(metrics, by) > score(self.best, by):
            self.best, self.stale = metrics | {"step": step}, 0

    def is_over(self, patience: int | None) -> bool:
        """True when the run ends at the next evaluation, or at the one of this step. patience: --patience."""
        return self.stopped or (patience is not None and self.stale >= patience)

    @property
    def best_step(self) -> int | None:
        return int(self.best["step"]) if "step" in self.best else None


NEEDED = ["step", "evaluated", "best", "last", "logged_step", "losses", "accumulations", "optimizer"]
NEEDED += ["train_s", "wall_s"]
