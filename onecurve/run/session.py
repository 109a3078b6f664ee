"""Coordinates a run's ranks: messages, checkpoints, and the mean loss between lines of the log."""

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

if TYPE_CHECKING:  # at runtime, imported lazily
    from onecurve.telemetry.sampling import Telemetry

Ids = Callable[[], list[int]]
# A message costs the host about 0.1 ms, so several short steps share one message. A signal takes effect after
# 2 * AGREEMENT_S seconds, or after 2 * MOST_STEPS steps if steps suddenly become slow.
SHORT_STEP_S, AGREEMENT_S = 0.005, 0.02
MOST_STEPS = 32
UNKNOWN_US = 2**31 - 1


class Exchange:
    """Messages over gloo, independent of the collectives used for training.

    The constructor and most methods are collective.

    Args:
        record: The run's record on the main process, None on other processes.
        telemetry: This process's telemetry.
        timeout_s: Seconds without a message from a process, after which the job ends.
        skipped: Function that returns the ids of images that this process skipped.
    """

    def __init__(
        self, record: MainRecord | None, telemetry: "Telemetry", timeout_s: float, skipped: Ids = list
    ):
        self.poll = Poll(timeout_s)
        self.record, self.telemetry, self.skipped = record, telemetry, skipped
        self.step_us = UNKNOWN_US  # this process's time per step between its last two messages
        self.slowest_us = UNKNOWN_US  # longest time per step of any process; the same value on all processes
        self.sent_at, self.sent_step, self.next_step = time.perf_counter(), -1, 0

    def listen_after(self, step: int) -> None:
        """Call listen() after each step or, if steps are short, after every few steps.

        All processes skip the same number of steps, because the processes exchange their times per step.
        """
        if step < self.next_step:
            watch.wanted()  # reset the watchdog, because a step has ended
            return
        now = time.perf_counter()
        if self.sent_step >= 0:
            mean_us = (now - self.sent_at) / max(1, step - self.sent_step) * 1e6
            self.step_us = min(int(mean_us), UNKNOWN_US)
        self.sent_at, self.sent_step = now, step
        self.listen()
        step_s = max(self.slowest_us / 1e6, 1e-6)
        is_alone = self.poll.group is None  # a single process exchanges no messages
        few = min(MOST_STEPS, int(AGREEMENT_S / step_s))
        self.next_step = step + (1 if is_alone or step_s >= SHORT_STEP_S else few)

    def listen(self) -> None:
        """Send this process's signal or problem to the other processes, and receive their last messages.

        Raises, on all processes:
            Preempted: A process received a signal.
            ValueError: The main process has a problem, which the message describes.
        """
        problem = self.record and self.record.problem()
        reason = Reason.PROBLEM if problem else Reason.STOP if watch.wanted() else Reason.NONE
        received, self.slowest_us = self.poll(reason, self.step_us) or (Reason.NONE, UNKNOWN_US)
        if received == Reason.PROBLEM:
            raise ValueError(broadcast_object_list([problem])[0])
        if received == Reason.STOP:
            raise Preempted

    def gather(self, value: Any) -> list[Any]:
        """Return the values of all processes. The main process also receives telemetry and skipped images."""
        reports = self.poll.collect((self.telemetry.take(), self.skipped()))
        if self.record:
            self.telemetry.append([piece for pieces, _ in reports for piece in pieces])
            state = self.record.state
            state.bad_images = sorted({*state.bad_images, *(i for _, ids in reports for i in ids)})
        return self.poll.gather(value)


class Meter:
    """Loss, samples and time since the last line of the log. Only mean_loss() waits for the device."""

    def __init__(self, accelerator: JobAccelerator, batch: Batch, keeps_ids: bool):
        self.accelerator, self.batch, self.keeps_ids = accelerator, batch, keeps_ids
        dtype = torch.float64 if accelerator.deterministic else torch.float32
        # Sum over the micro-batches of all steps since the last line of the log
        self.loss = torch.zeros((), device=accelerator.device, dtype=dtype)
        self.step_loss = torch.zeros_like(self.loss)  # sum over the current step
        self.ids: list[int] = []  # ids of the samples since the last line, for --log_samples
        self.micro_batches = 0  # number of micro-batches since this process started
        self.started = time.perf_counter()

    def resume(self, state: RunState, rank: int) -> None:
        """Restore the sum of losses from a checkpoint.

        If the number of ranks has changed, rank 0 receives the whole sum. The sum is rescaled to the current
        number of micro-batches, so that the mean stays the same.
        """
        if losses := state.losses:
            now, before = self.batch.processes * self.batch.accumulations, len(losses) * state.accumulations
            share = losses[rank] if len(losses) == self.batch.processes else sum(losses) * (rank == 0)
            self.loss.fill_(share * (now / before))

    def add(self, loss: Tensor, ids: np.ndarray) -> None:
        """Add the loss and the sample ids of a micro-batch."""
        self.step_loss += exact_sum(loss.detach()) if self.accelerator.deterministic else loss.detach()
        self.micro_batches += 1
        if self.keeps_ids:
            self.ids.extend(ids.tolist())

    def end_step(self) -> None:
        """Add the losses of the current step to the sum since the last line of the log."""
        self.loss += self.step_loss
        self.step_loss.zero_()

    def check(self, step: int) -> None:
        """Raise FloatingPointError on all ranks if --deterministic could not sum gradients. Collective."""
        if self.accelerator.exact_sum:
            self.accelerator.exact_sum.check(step)

    def mean_loss(self, steps: int) -> float:
        """Return the mean loss of the last `steps` steps over all ranks. Waits for the device. Collective."""
        micro_batches = steps * self.batch.accumulations * self.batch.processes
        mean = self.accelerator.reduce(self.loss, "sum").item() / micro_batches
        self.loss.zero_()
        return mean

    def start_clock(self) -> float:
        """Restart the clock, and return the seconds since its last start."""
        elapsed_s = self.elapsed_s()
        self.started += elapsed_s
        return elapsed_s

    def elapsed_s(self) -> float:
        """Return the seconds since the last start of the clock."""
        return time.perf_counter() - self.started


@dataclass
class Ranks:
    """State and operations that all ranks of an open run share.

    A checkpoint is due after the first step, after the best evaluation, after the last step, at multiples of
    --keep_every, and every --checkpoint_every steps or after each epoch. If epochs are short, at most one
    checkpoint is due per --checkpoint_s seconds.
    """

    recipe: Recipe
    steps: Steps  # starts at the first step of this process
    state: RunState
    meter: Meter
    predictions: Predictions
    saver: Saver
    exchange: Exchange
    record: MainRecord | None  # None except on the main process
    newest: int  # step of the newest snapshot, else of the newest checkpoint in the folder, else 0
    epoch_began: float = field(default_factory=time.monotonic)

    def is_over(self) -> bool:
        """Return True if the run ends at this step's evaluation or at the next step."""
        return self.state.is_over(self.recipe.patience)

    def end_facts(self) -> ResultEnd:
        """Return the entries of result.json about the end. `stopped_by` is None if no epoch is missing."""
        step, steps, stopped_by = self.state.step, self.steps, None
        if step == steps.last != steps.total:
            stopped_by = f"--max_steps {step}"
        elif step != steps.total:
            stopped_by = "the script" if self.state.stopped else f"--patience {self.recipe.patience}"
        return {"steps": step, "total_steps": steps.total, "stopped_by": stopped_by}

    def save_if_due(self, step: int) -> None:
        """Save a checkpoint if one is due after `step` steps. Collective. Raises the same errors as take().

        The snapshot of a new best evaluation is held until --checkpoint_s seconds after the last write.
        """
        if step > self.newest:
            if self._is_due(step) or step == self.steps.first:
                self.take()
            elif step == self.state.best_step:
                self.take(hold=True)
        self.saver.write_held(self.recipe.checkpoint_s)

    def flush(self) -> None:
        """Write this step's snapshot, or a held snapshot that is not on disk yet. Collective. See take()."""
        if self.state.step > self.newest:
            self.take()
        else:
            self.saver.write_held()

    def take(self, hold: bool = False) -> None:
        """Take a snapshot, and write it in the background. Collective.

        Args:
            hold: Keep the snapshot in memory instead of writing it.

        Raises:
            FloatingPointError: The loss is not finite.
            ValueError: The last save failed.
        """
        with spending(SAVING):
            state, saver, meter, exchange = self.state, self.saver, self.meter, self.exchange
            step, best = state.step, state.best_step
            if best != step:
                saver.write_held()  # snapshot of the best evaluation
            exchange.poll.wait_for_main(self.record is not None, saver.done)
            meter.check(step)
            loss_and_problem = meter.loss.item(), self.record and self.record.problem()
            losses, problems = zip(*exchange.gather(loss_and_problem), strict=True)
            if problem := next(filter(None, problems), None):
                raise ValueError(problem)
            if not all(math.isfinite(loss) for loss in losses):
                raise FloatingPointError(f"the loss is {sum(losses)} before step {step}. Nothing was saved")
            self.write_samples()
            content = state.at_save(
                losses=[*losses],
                accumulations=meter.batch.accumulations,
                epoch=step / self.steps.per_epoch,
                # Excludes time spent on evaluation
                train_s=state.train_s + meter.elapsed_s() * (step > state.logged_step),
                **saver.training.scalars(),
                **(self.record.log.tracker_ids() if self.record else {}),
            ).to_json()
            saver.save(step, content, best, hold)
            self.newest = step

    def write_samples(self) -> None:
        """Log the sample ids of each step since the last call, in the order of the batch. Collective."""
        if not self.meter.keeps_ids:
            return
        batch, per_rank = self.meter.batch, self.exchange.poll.gather([*self.meter.ids])
        self.meter.ids.clear()
        if self.record:
            self.record.log.write_samples(per_rank, batch.per_device * batch.accumulations)

    def _is_due(self, step: int) -> bool:
        """Return True if a checkpoint is due after `step` steps.

        At the end of an epoch, a checkpoint is due if the next epoch would end more than --checkpoint_s
        seconds after the last write. In this case, the call is collective, because clocks differ between
        ranks.
        """
        recipe = self.recipe
        is_to_keep = recipe.keep_every is not None and step % recipe.keep_every == 0
        if recipe.checkpoint_every != "epoch":
            return is_to_keep or step % int(recipe.checkpoint_every) == 0
        if step % self.steps.per_epoch:
            return is_to_keep
        now = time.monotonic()
        epoch_s, self.epoch_began = now - self.epoch_began, now
        is_late = self.saver.since_write_s() + epoch_s > recipe.checkpoint_s
        return self.exchange.poll.gather(is_to_keep or is_late)[0]
