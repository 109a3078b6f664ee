"""Tracks the progress of a run, in memory and in each checkpoint's state.json."""

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
    """State of a run after `step` optimizer steps. The defaults describe a run before the first step.

    In memory, `wall_s` and `spent_s` contain only the time of earlier processes, and the fields from `losses`
    onwards contain the values at the start of this process. at_save() fills in current values.
    """

    step: int = 0
    evaluated: bool = False  # True if the weights of this step were evaluated
    best: dict[str, float] = field(default_factory=dict)  # metrics and step of the best evaluation
    last: dict[str, float] = field(default_factory=dict)  # metrics of the last evaluation
    logged_step: int = 0  # step of the last training loss in metrics.jsonl
    train_s: float = 0.0
    wall_s: float = 0.0
    spent_s: dict[str, float] | None = None  # seconds of wall_s spent in each part; missing in older files
    bad_images: list[int] = field(default_factory=list)  # ids of skipped samples; missing in older files
    stale: int = 0  # number of evaluations since the best one; missing in older files
    stopped: bool = False  # True if the script ends the run before its last step; missing in older files
    # For each process, the sum of losses since the last line of the log
    losses: list[float] = field(default_factory=list)
    accumulations: int = 1
    epoch: float = 0.0
    optimizer: OptimizerScalars | None = None
    loss_scale: dict[str, float] | None = None  # set only with fp16
    wandb_id: str | None = None
    wandb_url: str | None = None

    @classmethod
    def read(cls, checkpoint: Checkpoint) -> Self:
        """Read a checkpoint's state. Raises ValueError for an invalid file."""
        file = checkpoint.folder / STATE_FILE
        try:
            state = cls.from_json(read_json(file))
            if state.step != checkpoint.step:
                raise ValueError(f"it belongs to step {state.step}")
        except (OSError, ValueError) as error:
            raise ValueError(f"{file} is not a state of step {checkpoint.step}: {error}") from None
        return state

    @classmethod
    def from_json(cls, content: dict[str, Any]) -> Self:
        """Create a state from the content of state.json. A ValueError names missing and invalid fields."""
        fields, wrong = typed_values(content, typing.get_type_hints(cls))
        wrong += [name for name in NEEDED if name not in fields and name not in wrong]
        if not fields.get("losses") or fields.get("accumulations", 0) < 1:
            wrong += ["losses or accumulations"]
        if wrong:
            raise ValueError(f"missing or wrong: {', '.join(wrong)}")
        return cls(**fields)

    def to_json(self) -> dict[str, Any]:
        """Return the content of state.json."""
        return {n: value for n, value in vars(self).items() if value is not None or n == "loss_scale"}

    def at_save(self, **filled: Any) -> Self:
        """Return a copy for state.json with current times, and with the given values for other fields."""
        reset = {"wandb_id": None, "wandb_url": None}  # these ids are from an earlier process
        times: dict[str, Any] = {"wall_s": self.wall_now_s(), "spent_s": self.spent_now_s()}
        return dataclasses.replace(self, **times | reset | filled)

    def scalars(self) -> dict[str, Any]:
        """Return the optimizer's scalars and the loss scale, for TrainingState."""
        return {name: v for name, v in self.to_json().items() if name in ("optimizer", "loss_scale")}

    def wall_now_s(self) -> float:
        """Return the run's seconds over all starts, including imports but not the time between starts."""
        return self.wall_s + own_age_s()

    def spent_now_s(self) -> dict[str, float]:
        """Divide wall_now_s() into `starting`, `training` and so on (see onecurve/system/phase.py)."""
        before, current = self.spent_s or {}, now.spent_s()
        return {part: before.get(part, 0.0) + current.get(part, 0.0) for part in before | current}

    def end_step(self, step: int) -> None:
        """Set the current step. Its weights have not been evaluated yet."""
        self.step, self.evaluated = step, False

    def add_evaluation(self, step: int, metrics: dict[str, float], by: str = "accuracy") -> None:
        """Record an evaluation. The best one has the highest metric `by`, or the lowest loss without it."""
        self.last, self.evaluated = metrics, True
        self.stale += 1
        if not self.best or score(metrics, by) > score(self.best, by):
            self.best, self.stale = metrics | {"step": step}, 0

    def is_over(self, patience: int | None) -> bool:
        """Return True if the run ends at this step's evaluation or at the next step."""
        return self.stopped or (patience is not None and self.stale >= patience)

    @property
    def best_step(self) -> int | None:
        """Step of the best evaluation."""
        return int(self.best["step"]) if "step" in self.best else None


NEEDED = ["step", "evaluated", "best", "last", "logged_step", "losses", "accumulations", "optimizer"]
NEEDED += ["train_s", "wall_s"]
