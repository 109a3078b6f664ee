"""Coordinates a run's ranks: messages, checkpoints, and the mean loss between log lines."""

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from accelerate.utils import broadcast_object_list
from torch import Tensor

from onecurve.checkpoint.saver import Saver
from onecurve.distributed.channel import Poll, Reason
from onecurve.distributed.exact_sum import exact_sum
from onecurve.distributed.job_accelerator import JobAccelerator
from onecurve.distributed.watch import Preempted, watch
from onecurve.flags.recipe import Batch, Recipe
from onecurve.numerics.order import Steps
from onecurve.run.predictions import Predictions
from onecurve.run.record import MainRecord
from onecurve.run.schemas import ResultEnd
from onecurve.run.state import RunState
from onecurve.system.phase import SAVING, spending

if TYPE_CHECKING:  # Imported lazily at runtime
    from onecurve.telemetry.sampling import Telemetry

TakeIds = Callable[[], list[int]]
# A message takes the host about 0.1 ms, so several steps shorter than SHORT_STEP_S share one message. A
# signal takes effect after at most 2 * AGREEMENT_S seconds, or after at most 2 * MAX_STEPS_PER_POLL steps
# if steps suddenly become slow.
SHORT_STEP_S, AGREEMENT_S = 0.005, 0.02
MAX_STEPS_PER_POLL = 32
UNKNOWN_STEP_US = 2**31 - 1


class Exchange:
    """Exchange of messages over gloo, independent of the collectives used for training.

    All ranks must call the constructor and most methods.

    Args:
        record: Record of the run on the main process, None on other processes.
        telemetry: Telemetry of this process.
        timeout_s: Number of seconds without a message from a process after which the job ends.
        skipped: Function that returns the ids of the images skipped by this process.
    """

    def __init__(
        self, record: MainRecord | None, telemetry: "Telemetry", timeout_s: float, skipped: TakeIds = list
    ):
        self.poll = Poll(timeout_s)
        self.record, self.telemetry, self.skipped = record, telemetry, skipped
        self.step_us = UNKNOWN_STEP_US  # This process's time per step between the last two messages
        self.slowest_us = UNKNOWN_STEP_US  # Maximum step_us over all processes
        self.sent_at, self.sent_step, self.next_step = time.perf_counter(), -1, 0

    def listen_after(self, step: int) -> None:
        """Call listen() after each step or, if steps are short, after every few steps.

        All processes call listen() at the same steps, because they exchange their step times.
        """
        if step < self.next_step:
            watch.wanted()  # Reset the watchdog, because a step has ended
            return
        current_time = time.perf_counter()
        if self.sent_step >= 0:
            mean_us = (current_time - self.sent_at) / max(1, step - self.sent_step) * 1e6
            self.step_us = min(int(mean_us), UNKNOWN_STEP_US)
        self.sent_at, self.sent_step = current_time, step
        self.listen()
        step_s = max(self.slowest_us / 1e6, 1e-6)
        is_alone = self.poll.group is None  # A single process exchanges no messages
        if is_alone or step_s >= SHORT_STEP_S:
            self.next_step = step + 1
        else:
            self.next_step = step + min(MAX_STEPS_PER_POLL, int(AGREEMENT_S / step_s))

    def listen(self) -> None:
        """Send this process's signal or problem to all processes, and receive their last messages.

        All processes raise the following errors.

        Raises:
            Preempted: If a process received a signal.
            ValueError: If the main process has a problem, which the error message describes.
        """
        problem = self.record and self.record.problem()
        reason = Reason.NONE
        if problem:
            reason = Reason.PROBLEM
        elif watch.wanted():
            reason = Reason.STOP
        received, self.slowest_us = self.poll(reason, self.step_us) or (Reason.NONE, UNKNOWN_STEP_US)
        if received == Reason.PROBLEM:
            raise ValueError(broadcast_object_list([problem])[0])
        if received == Reason.STOP:
            raise Preempted

    def gather(self, value: Any) -> list[Any]:
        """Return each process's value. The main process also receives telemetry and skipped ids."""
        reports = self.poll.collect((self.telemetry.take(), self.skipped()))
        if self.record:
            self.telemetry.append([named_text for named_texts, _ in reports for named_text in named_texts])
            state = self.record.state
            skipped_ids = {image_id for _, image_ids in reports for image_id in image_ids}
            state.bad_images = sorted({*state.bad_images, *skipped_ids})
        return self.poll.gather(value)


class Meter:
    """Loss, samples and time since the last log line. Only mean_loss() waits for the device."""

    def __init__(self, accelerator: JobAccelerator, batch: Batch, keeps_ids: bool):
        self.accelerator, self.batch, self.keeps_ids = accelerator, batch, keeps_ids
        dtype = torch.float64 if accelerator.deterministic else torch.float32
        # Sum of the losses over the micro-batches of all steps since the last log line
        self.loss = torch.zeros((), device=accelerator.device, dtype=dtype)
        self.step_loss = torch.zeros_like(self.loss)  # Sum of the losses in the current step
        self.ids: list[int] = []  # Ids of the samples since the last log line, for --log_samples
        self.micro_batches = 0  # Number of micro-batches since this process started
        self.started = time.perf_counter()

    def resume(self, state: RunState, rank: int) -> None:
        """Restore the sum of the losses from a checkpoint.

        If the number of ranks has changed, rank 0 receives the sum over all ranks. The sum is rescaled to the
        current number of micro-batches, so that the mean loss stays the same.
        """
        if losses := state.losses:
            micro_batches_per_step_before = len(losses) * state.accumulations
            micro_batches_per_step = self.batch.processes * self.batch.accumulations
            has_same_ranks = len(losses) == self.batch.processes
            loss_of_rank = losses[rank] if has_same_ranks else sum(losses) * (rank == 0)
            self.loss.fill_(loss_of_rank * (micro_batches_per_step / micro_batches_per_step_before))

    def add(self, loss: Tensor, ids: np.ndarray) -> None:
        """Add a micro-batch's loss and sample ids to the current step."""
        self.step_loss += exact_sum(loss.detach()) if self.accelerator.deterministic else loss.detach()
        self.micro_batches += 1
        if self.keeps_ids:
            self.ids.extend(ids.tolist())

    def end_step(self) -> None:
        """Add the current step's losses to the sum since the last log line."""
        self.loss += self.step_loss
        self.step_loss.zero_()

    def check(self, step: int) -> None:
        """Raise FloatingPointError on all ranks if --deterministic could not sum the gradients.

        All ranks must call this method.
        """
        if self.accelerator.exact_sum:
            self.accelerator.exact_sum.check(step)

    def mean_loss(self, steps: int) -> float:
        """Return the mean loss of the last `steps` steps over all ranks.

        This method waits for the device. All ranks must call this method.
        """
        micro_batches = steps * self.batch.accumulations * self.batch.processes
        mean = self.accelerator.reduce(self.loss, "sum").item() / micro_batches
        self.loss.zero_()
        return mean

    def start_clock(self) -> float:
        """Restart the clock, and return the seconds since it was last started."""
        elapsed_s = self.elapsed_s()
        self.started += elapsed_s
        return elapsed_s

    def elapsed_s(self) -> float:
        """Return the seconds since the clock was last started."""
        return time.perf_counter() - self.started


@dataclass
class Ranks:
    """State and operations that all ranks of an open run share.

    A checkpoint is due after the first step, after the best evaluation, after the last step, at multiples of
    --keep_every, and every --checkpoint_every steps or after each epoch. If epochs are short, at most one
    checkpoint is due every --checkpoint_s seconds.
    """

    recipe: Recipe
    steps: Steps  # Steps that remained when this process started
    state: RunState
    meter: Meter
    predictions: Predictions
    saver: Saver
    exchange: Exchange
    record: MainRecord | None  # None except on the main process
    # Step of the newest snapshot or, initially, of the newest checkpoint. 0 for a new run
    newest_saved_step: int
    epoch_began: float = field(default_factory=time.monotonic)

    def is_over(self) -> bool:
        """Return True if the run ends early, at the evaluation of this step or at the next step."""
        return self.state.is_over(self.recipe.patience)

    def end_facts(self) -> ResultEnd:
        """Return the result.json entries that describe how the run ended.

        `stopped_by` is None for a complete run.
        """
        step, steps, stopped_by = self.state.step, self.steps, None
        if step == steps.last != steps.total:
            stopped_by = f"--max_steps {step}"
        elif step != steps.total:
            stopped_by = "the script" if self.state.stopped else f"--patience {self.recipe.patience}"
        return {"steps": step, "total_steps": steps.total, "stopped_by": stopped_by}

    def save_if_due(self, step: int) -> None:
        """Save a checkpoint if one is due after `step` steps.

        All ranks must call this method, which raises the same errors as take(). If no checkpoint is due but
        the evaluation at this step is the best so far, a snapshot of this step is held in memory until
        --checkpoint_s seconds after the last write.
        """
        if step > self.newest_saved_step:
            if self._is_due(step) or step == self.steps.first:
                self.take()
            elif step == self.state.best_step:
                self.take(hold=True)
        self.saver.write_held(self.recipe.checkpoint_s)

    def flush(self) -> None:
        """Write a snapshot of this step, or the snapshot held in memory.

        All ranks must call this method. See take() for the errors.
        """
        if self.state.step > self.newest_saved_step:
            self.take()
        else:
            self.saver.write_held()

    def take(self, hold: bool = False) -> None:
        """Take a snapshot, and write it in the background. All ranks must call this method.

        Args:
            hold: True if the snapshot is held in memory instead of being written.

        Raises:
            FloatingPointError: If the loss is not finite.
            ValueError: If the last save failed.
        """
        with spending(SAVING):
            state, saver, meter, exchange = self.state, self.saver, self.meter, self.exchange
            step, best_step = state.step, state.best_step
            if best_step != step:
                saver.write_held()  # Write the best evaluation's snapshot
            exchange.poll.wait_for_main(self.record is not None, saver.done)
            meter.check(step)
            loss_and_problem = meter.loss.item(), self.record and self.record.problem()
            losses, problems = zip(*exchange.gather(loss_and_problem), strict=True)
            if problem := next(filter(None, problems), None):
                raise ValueError(problem)
            if not all(math.isfinite(loss) for loss in losses):
                loss = sum(losses)
                raise FloatingPointError(f"the loss is {loss} before step {step}. No checkpoint was saved")
            self.write_samples()
            state_values = state.at_save(
                losses=[*losses],
                accumulations=meter.batch.accumulations,
                epoch=step / self.steps.per_epoch,
                # Training time excludes the time spent on evaluations.
                train_s=state.train_s + meter.elapsed_s() * (step > state.logged_step),
                **saver.training.scalars(),
                **(self.record.log.tracker_ids() if self.record else {}),
            ).to_json()
            saver.save(step, state_values, best_step, hold)
            self.newest_saved_step = step

    def write_samples(self) -> None:
        """Log the sample ids of each step since the last call, in batch order.

        All ranks must call this method.
        """
        if not self.meter.keeps_ids:
            return
        batch, ids_by_rank = self.meter.batch, self.exchange.poll.gather([*self.meter.ids])
        self.meter.ids.clear()
        if self.record:
            self.record.log.write_samples(ids_by_rank, batch.per_device * batch.accumulations)

    def _is_due(self, step: int) -> bool:
        """Return True if a checkpoint is due after `step` steps.

        At the end of an epoch, a checkpoint is due if the next epoch would end more than --checkpoint_s
        seconds after the last write. All ranks must call this method, because clocks differ between ranks.
        """
        recipe = self.recipe
        is_to_keep = recipe.keep_every is not None and step % recipe.keep_every == 0
        if recipe.checkpoint_every != "epoch":
            return is_to_keep or step % int(recipe.checkpoint_every) == 0
        if step % self.steps.per_epoch:
            return is_to_keep
        current_time = time.monotonic()
        epoch_s, self.epoch_began = current_time - self.epoch_began, current_time
        is_late = self.saver.since_write_s() + epoch_s > recipe.checkpoint_s
        return self.exchange.poll.gather(is_to_keep or is_late)[0]
