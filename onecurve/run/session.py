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
from onecurve.distributed.channel import ExitReason, GlooExchange
from onecurve.distributed.exact_sum import exact_sum
from onecurve.distributed.job_accelerator import JobAccelerator
from onecurve.distributed.watch import Preempted, watch
from onecurve.flags.recipe import Batch, Recipe
from onecurve.numerics.order import Steps
from onecurve.run.predictions import Predictions
from onecurve.run.record import MainRecord
from onecurve.run.schemas import EndEntries
from onecurve.run.state import RunState
from onecurve.system.phase import SAVING, timed_as

if TYPE_CHECKING:  # Imported lazily at runtime
    from onecurve.telemetry.sampling import Telemetry

TakeSkippedIds = Callable[[], list[int]]  # Returns the ids of the images skipped since its last call
# A message takes the host about 0.1 ms, so several steps shorter than SHORT_STEP_S share one message. A
# signal takes effect after at most 2 * MESSAGE_INTERVAL_S seconds, or after at most 2 * MAX_STEPS_PER_POLL
# steps if steps suddenly become slow.
SHORT_STEP_S = 0.005  # Duration below which several steps share one message
MESSAGE_INTERVAL_S = 0.02  # Time between two messages if steps are short
MAX_STEPS_PER_POLL = 32  # Maximum number of steps that share one message
UNKNOWN_STEP_US = 2**31 - 1  # Step time in messages before the first measurement


class MessageExchange:
    """Exchange of messages over gloo, independent of the collectives used for training.

    All ranks must call the constructor and most methods.

    Args:
        main_record: Record of the run on the main process, None on other processes.
        telemetry: Telemetry of this process.
        timeout_s: Number of seconds without a message from a process after which the job ends.
        take_skipped_ids: Function that returns the ids of the images skipped by this process.
    """

    def __init__(
        self,
        main_record: MainRecord | None,
        telemetry: "Telemetry",
        timeout_s: float,
        take_skipped_ids: TakeSkippedIds = list,
    ):
        self.poll = GlooExchange(timeout_s)  # Exchanges messages without waiting for a GPU
        self.main_record, self.telemetry, self.take_skipped_ids = main_record, telemetry, take_skipped_ids
        self.local_step_us = UNKNOWN_STEP_US  # This process's time per step between the last two messages
        self.slowest_step_us = UNKNOWN_STEP_US  # Maximum local_step_us over all processes
        self.last_message_time_s = time.perf_counter()
        self.last_message_step = -1  # -1 before the first message
        self.next_message_step = 0

    def exchange_signals_if_due(self, step: int) -> None:
        """Call exchange_signals() after each step or, if steps are short, after every few steps.

        All processes call exchange_signals() at the same steps, because they exchange their step times.
        """
        if step < self.next_message_step:
            watch.wanted()  # Reset the watchdog, because a step has ended
            return
        current_time_s = time.perf_counter()
        if self.last_message_step >= 0:
            step_count = max(1, step - self.last_message_step)
            mean_step_us = (current_time_s - self.last_message_time_s) / step_count * 1e6
            self.local_step_us = min(int(mean_step_us), UNKNOWN_STEP_US)
        self.last_message_time_s, self.last_message_step = current_time_s, step
        self.exchange_signals()
        slowest_step_s = max(self.slowest_step_us / 1e6, 1e-6)  # Avoids a division by 0
        is_single_process = self.poll.gloo_group is None  # A single process exchanges no messages
        if is_single_process or slowest_step_s >= SHORT_STEP_S:
            self.next_message_step = step + 1
        else:
            steps_per_message = int(MESSAGE_INTERVAL_S / slowest_step_s)
            self.next_message_step = step + min(MAX_STEPS_PER_POLL, steps_per_message)

    def exchange_signals(self) -> None:
        """Send this process's signal or problem to all processes, and receive their previous messages.

        All ranks must call this method, and all ranks raise the same error.

        Raises:
            Preempted: If a process received a signal.
            ValueError: If the main process has a problem, which the error message describes.
        """
        failure_message = self.main_record and self.main_record.failure_message()
        local_reason = ExitReason.NONE
        if failure_message:
            local_reason = ExitReason.PROBLEM
        elif watch.wanted():
            local_reason = ExitReason.STOP
        # With several processes, poll() returns the maxima from its previous call, or [] in the first call.
        last_maxima = self.poll(local_reason, self.local_step_us) or (ExitReason.NONE, UNKNOWN_STEP_US)
        agreed_reason, self.slowest_step_us = last_maxima
        if agreed_reason == ExitReason.PROBLEM:
            [failure_message] = broadcast_object_list([failure_message])  # Rank 0's message
            raise ValueError(failure_message)
        if agreed_reason == ExitReason.STOP:
            raise Preempted

    def gather(self, value: Any) -> list[Any]:
        """Return all processes' values in rank order. All ranks must call this method.

        This method also sends telemetry and skipped ids to the main process. The main process writes the
        telemetry to files, and adds the ids to the run's state.
        """
        telemetry_and_ids = self.poll.collect((self.telemetry.take_unsent_texts(), self.take_skipped_ids()))
        if self.main_record:
            named_texts, skipped_ids = [], set(self.main_record.state.bad_images)
            for rank_texts, rank_skipped_ids in telemetry_and_ids:
                named_texts += rank_texts
                skipped_ids.update(rank_skipped_ids)
            self.telemetry.write_texts(named_texts)
            self.main_record.state.bad_images = sorted(skipped_ids)
        return self.poll.gather(value)


class TrainingMeter:
    """Loss, samples and time since the last log line.

    Only mean_loss() and, with --deterministic, check_gradients() wait for the device.
    """

    def __init__(self, accelerator: JobAccelerator, batch: Batch, keeps_ids: bool):
        self.accelerator, self.batch, self.keeps_ids = accelerator, batch, keeps_ids
        # With float64, the order of additions hardly matters, so any number of ranks logs the same losses
        loss_dtype = torch.float64 if accelerator.deterministic else torch.float32
        # Sum of the losses over the micro-batches of all steps since the last log line
        self.loss_sum = torch.zeros((), device=accelerator.device, dtype=loss_dtype)
        self.step_loss_sum = torch.zeros_like(self.loss_sum)  # Sum of the losses in the current step
        self.sample_ids: list[int] = []  # Sample ids since the last log line, for --log_samples
        self.micro_batch_count = 0  # Number of micro-batches since this process started
        self.clock_start_s = time.perf_counter()

    def resume(self, state: RunState, rank: int) -> None:
        """Restore the sum of the losses from a checkpoint.

        If the number of ranks has changed, rank 0 receives the sum over all ranks. The sum is rescaled to the
        current number of micro-batches, so that the mean loss stays the same.
        """
        if losses := state.losses:  # Empty before the first checkpoint
            previous_micro_batches_per_step = len(losses) * state.accumulations
            micro_batches_per_step = self.batch.processes * self.batch.accumulations
            has_same_rank_count = len(losses) == self.batch.processes
            merged_loss = sum(losses) if rank == 0 else 0.0
            local_loss = losses[rank] if has_same_rank_count else merged_loss
            self.loss_sum.fill_(local_loss * (micro_batches_per_step / previous_micro_batches_per_step))

    def add(self, loss: Tensor, ids: np.ndarray) -> None:
        """Add a micro-batch's loss and sample ids to the current step."""
        self.step_loss_sum += exact_sum(loss.detach()) if self.accelerator.deterministic else loss.detach()
        self.micro_batch_count += 1
        if self.keeps_ids:
            self.sample_ids.extend(ids.tolist())

    def end_step(self) -> None:
        """Add the current step's losses to the sum since the last log line."""
        self.loss_sum += self.step_loss_sum
        self.step_loss_sum.zero_()

    def check_gradients(self, step: int) -> None:
        """Raise FloatingPointError on all ranks if --deterministic could not sum the gradients.

        All ranks must call this method. With --deterministic, the method waits for the device.
        """
        if self.accelerator.exact_sum:
            self.accelerator.exact_sum.check(step)

    def mean_loss(self, step_count: int) -> float:
        """Return the mean loss of the last `step_count` steps over all ranks, and reset the loss sum.

        This method waits for the device. All ranks must call this method.
        """
        micro_batch_count = step_count * self.batch.accumulations * self.batch.processes
        mean_loss = self.accelerator.reduce(self.loss_sum, "sum").item() / micro_batch_count
        self.loss_sum.zero_()
        return mean_loss

    def restart_clock(self) -> float:
        """Restart the clock, and return the seconds since it was last started."""
        elapsed_s = self.elapsed_s()
        self.clock_start_s += elapsed_s
        return elapsed_s

    def elapsed_s(self) -> float:
        """Return the seconds since the clock was last started."""
        return time.perf_counter() - self.clock_start_s


@dataclass
class RunSession:
    """State and operations that all ranks of an open run share.

    A checkpoint is due after the first step, after the best evaluation, after the last step, at multiples of
    --keep_every, and every --checkpoint_every steps or after each epoch. If epochs are short, at most one
    checkpoint is due every --checkpoint_s seconds.
    """

    recipe: Recipe
    steps: Steps  # Steps that remained when this process started
    state: RunState  # Progress and metrics, as saved in state.json
    meter: TrainingMeter
    predictions: Predictions
    saver: Saver
    exchange: MessageExchange
    main_record: MainRecord | None  # None except on the main process
    # Step of the newest snapshot or, initially, of the newest checkpoint. 0 for a new run
    newest_saved_step: int
    epoch_start_s: float = field(default_factory=time.monotonic)

    def ends_early(self) -> bool:
        """Return True if the run ends early, at the evaluation of this step or at the next step."""
        return self.state.ends_early(self.recipe.patience)

    def end_entries(self) -> EndEntries:
        """Return the result.json entries that describe how the run ended.

        `stopped_by` is None for a complete run.
        """
        end_step, total_steps = self.state.step, self.steps.total
        if end_step == total_steps:
            early_end_cause = None
        elif end_step == self.steps.last:
            early_end_cause = f"--max_steps {end_step}"
        else:
            early_end_cause = "the script" if self.state.stopped else f"--patience {self.recipe.patience}"
        return {"steps": end_step, "total_steps": total_steps, "stopped_by": early_end_cause}

    def save_if_due(self, step: int) -> None:
        """Save a checkpoint if one is due after `step` steps.

        If the evaluation at this step is the best so far, but no checkpoint is due, a snapshot is held in
        memory. The snapshot is written --checkpoint_s seconds after the last write. All ranks must call this
        method.

        Raises:
            FloatingPointError: If the loss is not finite.
            ValueError: If the last save failed.
        """
        if step > self.newest_saved_step:
            if self._is_checkpoint_due(step) or step == self.steps.first:
                self.take_snapshot()
            elif step == self.state.best_step:
                self.take_snapshot(hold=True)
        self.saver.write_held(after_s=self.recipe.checkpoint_s)  # Writes a held snapshot that is old enough

    def write_newest_snapshot(self) -> None:
        """Start writing a snapshot of this step, or a snapshot of this step that is held in memory.

        All ranks must call this method.

        Raises:
            FloatingPointError: If the loss is not finite.
            ValueError: If the last save failed.
        """
        if self.state.step > self.newest_saved_step:
            self.take_snapshot()
        else:
            self.saver.write_held()

    def take_snapshot(self, hold: bool = False) -> None:
        """Take a snapshot of this step, and write it in the background. All ranks must call this method.

        This method first waits for the last save and for the device.

        Args:
            hold: True if the snapshot is held in memory instead of being written.

        Raises:
            FloatingPointError: If the loss is not finite.
            ValueError: If the last save failed.
        """
        with timed_as(SAVING):
            state, saver, meter, exchange = self.state, self.saver, self.meter, self.exchange
            snapshot_step, best_step = state.step, state.best_step
            if best_step != snapshot_step:
                saver.write_held()  # Write the best evaluation's snapshot
            # Wait until the main process has finished the last save
            exchange.poll.wait_for_main(self.main_record is not None, saver.wait_up_to)
            meter.check_gradients(snapshot_step)
            # item() waits for the device. A write may fail meanwhile, so the failure is read afterwards.
            local_loss = meter.loss_sum.item()
            failure_message = self.main_record and self.main_record.failure_message()
            losses_and_failures = exchange.gather((local_loss, failure_message))
            loss_by_rank, failure_by_rank = zip(*losses_and_failures, strict=True)
            if first_failure := next(filter(None, failure_by_rank), None):
                raise ValueError(first_failure)
            if not all(map(math.isfinite, loss_by_rank)):
                raise FloatingPointError(
                    f"the loss is {sum(loss_by_rank)} before step {snapshot_step}. No checkpoint was saved"
                )
            self.write_samples()
            # Training time excludes the time spent on evaluations.
            unlogged_train_s = meter.elapsed_s() if snapshot_step > state.logged_step else 0.0
            tracker_ids = self.main_record.log.tracker_ids() if self.main_record else {}
            state_values = state.copy_for_save(
                losses=[*loss_by_rank],
                accumulations=meter.batch.accumulations,
                epoch=snapshot_step / self.steps.per_epoch,
                train_s=state.train_s + unlogged_train_s,
                **saver.training.scalars(),
                **tracker_ids,
            ).to_json()
            saver.save(snapshot_step, state_values, best_step, hold)
            self.newest_saved_step = snapshot_step

    def write_samples(self) -> None:
        """Log the sample ids of each step since the last call, in batch order.

        All ranks must call this method.
        """
        if not self.meter.keeps_ids:
            return
        # A single process gathers the list itself, so a copy is needed before clear().
        ids_by_rank = self.exchange.poll.gather([*self.meter.sample_ids])
        self.meter.sample_ids.clear()
        if self.main_record:
            ids_per_step = self.meter.batch.per_device * self.meter.batch.accumulations
            self.main_record.log.write_samples(ids_by_rank, ids_per_step)

    def _is_checkpoint_due(self, step: int) -> bool:
        """Return True if a checkpoint is due after `step` steps.

        At the end of an epoch, a checkpoint is due if the next epoch would end more than --checkpoint_s
        seconds after the last write. All ranks must call this method, because clocks differ between ranks.
        """
        recipe = self.recipe
        is_checkpoint_permanent = recipe.keep_every is not None and step % recipe.keep_every == 0
        if recipe.checkpoint_every != "epoch":
            return is_checkpoint_permanent or step % int(recipe.checkpoint_every) == 0
        if step % self.steps.per_epoch:  # The epoch continues
            return is_checkpoint_permanent
        current_time_s = time.monotonic()
        epoch_s, self.epoch_start_s = current_time_s - self.epoch_start_s, current_time_s
        would_next_save_be_late = self.saver.since_write_s() + epoch_s > recipe.checkpoint_s
        is_due_by_rank = self.exchange.poll.gather(is_checkpoint_permanent or would_next_save_be_late)
        return is_due_by_rank[0]  # Rank 0's clock decides
