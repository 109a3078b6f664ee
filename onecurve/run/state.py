"""Tracks a run's progress in memory and in each checkpoint's state.json."""

import dataclasses
import typing
from dataclasses import dataclass, field
from typing import Any, Self

from onecurve.checkpoint.format import STATE_FILE, Checkpoint, OptimizerScalars
from onecurve.flags.recipe import score
from onecurve.system.files import read_json, split_by_type
from onecurve.system.phase import now
from onecurve.system.processes import process_uptime_s


@dataclass
class RunState:
    """State of a run after `step` optimizer steps. The defaults describe a run before the first step.

    In memory, `wall_s` and `spent_s` include only the time of earlier processes. The fields from `losses`
    onwards are not updated after this process starts. copy_for_save() fills in their current values.
    """

    step: int = 0
    evaluated: bool = False  # True if this step's weights have been evaluated
    best: dict[str, float] = field(default_factory=dict)  # Metrics and step of the best evaluation
    last: dict[str, float] = field(default_factory=dict)  # Metrics of the last evaluation
    logged_step: int = 0  # Step of the last training loss in metrics.jsonl
    train_s: float = 0.0  # Seconds spent on training steps
    wall_s: float = 0.0  # Duration of all starts in seconds, without the time between starts
    # Files from earlier versions do not contain the next four fields.
    spent_s: dict[str, float] | None = None  # Seconds in wall_s for each phase
    bad_images: list[int] = field(default_factory=list)  # Ids of skipped samples
    stale: int = 0  # Number of evaluations since the best evaluation
    stopped: bool = False  # True if the script ends the run before the last step
    # Sum of the losses since the last log line, for each process
    losses: list[float] = field(default_factory=list)
    accumulations: int = 1  # Micro-batches per process and step
    epoch: float = 0.0  # Epochs trained up to `step`
    optimizer: OptimizerScalars | None = None  # None before the first checkpoint
    loss_scale: dict[str, float] | None = None  # None except with fp16
    wandb_id: str | None = None
    wandb_url: str | None = None

    @classmethod
    def read(cls, checkpoint: Checkpoint) -> Self:
        """Read the state in a checkpoint. Raise ValueError if the file is invalid."""
        state_file = checkpoint.folder / STATE_FILE
        try:
            state = cls.from_json(read_json(state_file))
            if state.step != checkpoint.step:
                raise ValueError(f"the file belongs to step {state.step}")
        except (OSError, ValueError) as error:
            raise ValueError(
                f"{state_file} is not a valid state of step {checkpoint.step}: {error}"
            ) from None
        return state

    @classmethod
    def from_json(cls, state_json: dict[str, Any]) -> Self:
        """Create a state from the content of state.json.

        Raise ValueError that lists missing or invalid fields.
        """
        valid_fields, invalid_names = split_by_type(state_json, typing.get_type_hints(cls))
        present_names = {*valid_fields, *invalid_names}
        invalid_names += [field_name for field_name in REQUIRED_FIELDS if field_name not in present_names]
        if not valid_fields.get("losses") or valid_fields.get("accumulations", 0) < 1:
            invalid_names += ["losses or accumulations"]
        if invalid_names:
            raise ValueError(f"missing or invalid fields: {', '.join(invalid_names)}")
        return cls(**valid_fields)

    def to_json(self) -> dict[str, Any]:
        """Return the content of state.json, without fields that are None."""
        field_values = vars(self).items()
        # TrainingState.restore() requires the key loss_scale, even if the value is None.
        return {name: value for name, value in field_values if value is not None or name == "loss_scale"}

    def copy_for_save(self, **field_values: Any) -> Self:
        """Return a copy of the state with current times and the given values for other fields."""
        reset_ids = {"wandb_id": None, "wandb_url": None}  # These ids belong to an earlier process
        current_times: dict[str, Any] = {"wall_s": self.wall_now_s(), "spent_s": self.spent_now_s()}
        return dataclasses.replace(self, **current_times | reset_ids | field_values)

    def scalars(self) -> dict[str, Any]:
        """Return the optimizer scalars and the loss scale, which TrainingState restores."""
        state_json = self.to_json()
        return {scalar: state_json[scalar] for scalar in ("optimizer", "loss_scale") if scalar in state_json}

    def wall_now_s(self) -> float:
        """Return the duration of all starts in seconds, including imports but not the time between starts."""
        return self.wall_s + process_uptime_s()

    def spent_now_s(self) -> dict[str, float]:
        """Return the seconds spent in each phase of all starts, such as `training`.

        The seconds add up to wall_now_s(). onecurve/system/phase.py defines the phases.
        """
        earlier_spent_s, current_spent_s = self.spent_s or {}, now.spent_s()
        phases = earlier_spent_s | current_spent_s  # The keys are the phases
        return {phase: earlier_spent_s.get(phase, 0.0) + current_spent_s.get(phase, 0.0) for phase in phases}

    def end_step(self, step: int) -> None:
        """Set the current step, whose weights have not been evaluated yet."""
        self.step, self.evaluated = step, False

    def add_evaluation(self, step: int, metrics: dict[str, float], best_by: str = "accuracy") -> None:
        """Record an evaluation of this step, and update the best evaluation.

        An evaluation is the best one if score(metrics, best_by) is the highest.
        """
        self.last, self.evaluated = metrics, True
        self.stale += 1
        if not self.best or score(metrics, best_by) > score(self.best, best_by):
            self.best, self.stale = metrics | {"step": step}, 0

    def ends_early(self, patience: int | None) -> bool:
        """Return True if the run ends early, at the evaluation of this step or at the next step."""
        return self.stopped or (patience is not None and self.stale >= patience)

    @property
    def best_step(self) -> int | None:
        """Step of the best evaluation."""
        return int(self.best["step"]) if "step" in self.best else None


# Fields that state.json must contain in every version of the format
REQUIRED_FIELDS = ["step", "evaluated", "best", "last", "logged_step", "losses", "accumulations", "optimizer"]
REQUIRED_FIELDS += ["train_s", "wall_s"]
