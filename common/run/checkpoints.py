"""When checkpoints are due, and what they hold; loss, samples and time since the last line of the log."""

import math
import time
from typing import TYPE_CHECKING

import numpy as np
import torch
from accelerate import Accelerator
from torch import Tensor

from common.distributed.exact_sum import exact_sum
from common.recipe import Batch
from common.run.state import RunState
from common.system.phase import SAVING, spending

if TYPE_CHECKING:
    from common.run.run import Run


class Meter:
    """Loss, samples and time of this process since the last line of the log. It does not wait for the device
    before mean_loss()."""

    def __init__(self, accelerator: Accelerator, batch: Batch, keeps_ids: bool):
        self.accelerator, self.batch, self.keeps_ids = accelerator, batch, keeps_ids
        dtype = torch.float64 if accelerator.deterministic else torch.float32
        # Over the micro-batches of all steps since the last line
        self.loss = torch.zeros((), device=accelerator.device, dtype=dtype)
        self.step_loss = torch.zeros_like(self.loss)  # over those of the current step
        self.ids: list[int] = []  # of the samples since the last line, for --log_samples
        self.micro_batches = 0  # since this process started
        self.started = time.perf_counter()

    def resume(self, state: RunState, rank: int) -> None:
        """Restores the sum of losses, on rank 0 where the number of ranks has changed, and scaled to the
        current number of micro-batches to keep the mean."""
        if losses := state.losses:
            now, before = self.batch.processes * self.batch.accumulations, len(losses) * state.accumulations
            own = losses[rank] if len(losses) == self.batch.processes else sum(losses) * (rank == 0)
            self.loss.fill_(own * (now / before))

    def add(self, loss: Tensor, ids: np.ndarray) -> None:
        self.step_loss += exact_sum(loss.detach()) if self.accelerator.deterministic else loss.detach()
        self.micro_batches += 1
        if self.keeps_ids:
            self.ids.extend(ids.tolist())

    def end_step(self) -> None:
        self.loss += self.step_loss
        self.step_loss.zero_()

    def check(self, step: int) -> None:
        """FloatingPointError on all processes if --deterministic could not add a gradient. Collective."""
        if self.accelerator.exact_sum:
            self.accelerator.exact_sum.check(step)

    def mean_loss(self, steps: int) -> float:
        """The mean loss of the last `steps` steps over all processes. Collective; waits for the device."""
        micro_batches = steps * self.batch.accumulations * self.batch.processes
        mean = self.accelerator.reduce(self.loss, "sum").item() / micro_batches
        self.loss.zero_()
        return mean

    def start_clock(self) -> float:
        """Restarts the clock. Returns the seconds since its last start."""
        elapsed_s = self.elapsed_s()
        self.started += elapsed_s
        return elapsed_s

    def elapsed_s(self) -> float:
        return time.perf_counter() - self.started


class Checkpoints:
    """Decides when a checkpoint is due, takes its snapshot, and has it written. All processes call it.

    Due are the first, the best and the last, and every --checkpoint_every steps or each epoch; after short
    epochs only every --checkpoint_s.
    """

    def __init__(self, run: "Run", meter: Meter):
        self.run, self.meter = run, meter
        self.newest = run.saved_step  # step of the newest snapshot, or of the checkpoint in the folder
        self.epoch_began = time.monotonic()

    def save_if_due(self, step: int) -> None:
        """Saves if a checkpoint is due after `step` steps, and holds the snapshot of a new best evaluation
        until --checkpoint_s after the last write. Collective. Raises as take() does."""
        if step > self.newest:
            if self._is_due(step) or step == self.run.steps.first:
                self.take()
            elif step == self.run.state.best_step:
                self.take(hold=True)
        self.run.saver.write_held(self.run.recipe.checkpoint_s)

    def flush(self) -> None:
        """Writes what is not on the disk yet: this step's snapshot, and one that is held. Collective. Raises
        as take() does."""
        if self.run.state.step > self.newest:
            self.take()
        else:
            self.run.saver.write_held()

    def take(self, hold: bool = False) -> None:
        """Takes a snapshot, and writes it in the background or holds it in memory. Collective.

        Raises FloatingPointError if the loss is not finite, ValueError if the last save failed.
        """
        with spending(SAVING):
            run, state, saver = self.run, self.run.state, self.run.saver
            if state.best_step != state.step:
                saver.write_held()  # the best evaluation's
            run.exchange.wait_for_main(saver.done)
            self.meter.check(state.step)
            everyones = run.exchange.gather((self.meter.loss.item(), run.problem()))
            losses, problems = zip(*everyones, strict=True)
            if problem := next(filter(None, problems), None):
                raise ValueError(problem)
            if not all(math.isfinite(loss) for loss in losses):
                raise FloatingPointError(
                    f"the loss is {sum(losses)} before step {state.step}: nothing was saved"
                )
            self.write_samples()
            content = state.at_save(
                losses=[*losses],
                accumulations=run.batch.accumulations,
                epoch=state.step / run.steps.per_epoch,
                train_s=state.train_s + self.meter.elapsed_s(),
                **saver.training.scalars(),
                **(run.log.tracker_ids() if run.log else {}),
            ).to_json()
            saver.save(state.step, content, state.best_step, hold)
            self.newest = state.step

    def write_samples(self) -> None:
        """Logs the sample ids since the last call, of each step in the order of its batch. Collective."""
        if not self.meter.keeps_ids:
            return
        per_rank = self.run.exchange.poll.gather(self.meter.ids)
        self.meter.ids = []
        if self.run.log:
            self.run.log.write_samples(per_rank, self.run.batch.per_device * self.run.batch.accumulations)

    def _is_due(self, step: int) -> bool:
        """True if a checkpoint is due after `step` steps. Collective at an epoch's end, as clocks differ.

        At an epoch's end it is due if the next epoch would end more than --checkpoint_s after the last write.
        """
        recipe = self.run.recipe
        if recipe.checkpoint_every != "epoch":
            return step % int(recipe.checkpoint_every) == 0
        if step % self.run.steps.per_epoch:
            return False
        now = time.monotonic()
        epoch_s, self.epoch_began = now - self.epoch_began, now
        return self.run.exchange.of_main(self.run.saver.since_write_s() + epoch_s > recipe.checkpoint_s)
