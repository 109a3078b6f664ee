"""What all ranks of a run do together: steps, messages, checkpoints, the loss between lines of the log."""

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

if TYPE_CHECKING:  # imported where it is needed
    from onecurve.telemetry.sampling import Telemetry

Ids = Callable[[], list[int]]
# A message costs the host some 0.1 ms, so several short steps share one. A signal then takes effect
# 2 * AGREEMENT_S later, or after 2 * MOST_STEPS steps if steps suddenly become slow.
SHORT_STEP_S, AGREEMENT_S = 0.005, 0.02
MOST_STEPS = 32
UNKNOWN_US = 2**31 - 1


class Exchange:
    """Messages over gloo, beside the training's collectives. The constructor and most methods are collective.

    record: on the main process. skipped: the ids of this process's skipped images.
    """

    def __init__(
        self, record: MainRecord | None, telemetry: "Telemetry", timeout_s: float, skipped: Ids = list
    ):
        self.poll = Poll(timeout_s)
        self.record, self.telemetry, self.skipped = record, telemetry, skipped
        self.step_us = UNKNOWN_US  # of this process, between its last two messages after a step
        self.slowest_us = UNKNOWN_US  # of all processes, the same on each
        self.sent_at, self.sent_step, self.next_step = time.perf_counter(), -1, 0

    def listen_after(self, step: int) -> None:
        """Calls listen() after the step, or if steps are short, only after every few of them.

        All processes use the same number of steps, because each sends the others its time per step.
        """
        if step < self.next_step:
            watch.wanted()  # resets the watchdog: a step has ended
            return
        now = time.perf_counter()
        if self.sent_step >= 0:
            mean_us = (now - self.sent_at) / max(1, step - self.sent_step) * 1e6
            self.step_us = min(int(mean_us), UNKNOWN_US)
        self.sent_at, self.sent_step = now, step
        self.listen()
        step_s = max(self.slowest_us / 1e6, 1e-6)
        is_alone = self.poll.group is None  # then it costs nothing
        few = min(MOST_STEPS, int(AGREEMENT_S / step_s))
        self.next_step = step + (1 if is_alone or step_s >= SHORT_STEP_S else few)

    def listen(self) -> None:
        """Sends this process's signal or problem to the others, and receives theirs from the last call.

        On all processes it raises Preempted after a signal, or ValueError with a problem's message.
        """
        problem = self.record and self.record.problem()
        mine = Reason.PROBLEM if problem else Reason.STOP if watch.wanted() else Reason.NONE
        received, self.slowest_us = self.poll(mine, self.step_us) or (Reason.NONE, UNKNOWN_US)
        if received == Reason.PROBLEM:
            raise ValueError(broadcast_object_list([problem])[0])
        if received == Reason.STOP:
            raise Preempted

    def gather(self, own: Any) -> list[Any]:
        """The value of each process. The main process also gets telemetry and the ids of skipped images."""
        reports = self.poll.collect((self.telemetry.take(), self.skipped()))
        if self.record:
            self.telemetry.append([piece for pieces, _ in reports for piece in pieces])
            state = self.record.state
            state.bad_images = sorted({*state.bad_images, *(i for _, ids in reports for i in ids)})
        return self.poll.gather(own)


class Meter:
    """Loss, samples and time since the last line of the log. Only mean_loss() waits for the device."""

    def __init__(self, accelerator: JobAccelerator, batch: Batch, keeps_ids: bool):
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


@dataclass
class Ranks:
    """What all ranks of a run do together, from its opening on: steps, messages, checkpoints.

    A checkpoint is due at the first step, the best and the last, at multiples of --keep_every, and every
    --checkpoint_every steps or after each epoch. After short epochs only one in --checkpoint_s is due.
    """

    recipe: Recipe
    steps: Steps  # from the first of this process on
    state: RunState
    meter: Meter
    predictions: Predictions
    saver: Saver
    exchange: Exchange
    record: MainRecord | None  # on the main process
    newest: int  # step of the newest snapshot, or of the checkpoint in the run's own folder, or 0
    epoch_began: float = field(default_factory=time.monotonic)

    def is_over(self) -> bool:
        """True when the run ends at the next evaluation, or at the one of this step."""
        return self.state.is_over(self.recipe.patience)

    def end_facts(self) -> ResultEnd:
        """The parts of result.json about the end. stopped_by: None after the last step of all epochs."""
        step, steps, by = self.state.step, self.steps, None
        if step == steps.last != steps.total:
            by = f"--max_steps {step}"
        elif step != steps.total:
            by = "the script" if self.state.stopped else f"--patience {self.recipe.patience}"
        return {"steps": step, "total_steps": steps.total, "stopped_by": by}

    def save_if_due(self, step: int) -> None:
        """Saves if a checkpoint is due after `step` steps, and holds the snapshot of a new best evaluation
        until --checkpoint_s after the last write. Collective. Raises as take() does."""
        if step > self.newest:
            if self._is_due(step) or step == self.steps.first:
                self.take()
            elif step == self.state.best_step:
                self.take(hold=True)
        self.saver.write_held(self.recipe.checkpoint_s)

    def flush(self) -> None:
        """Writes what is not on the disk yet: this step's snapshot, or one that is held. As take()."""
        if self.state.step > self.newest:
            self.take()
        else:
            self.saver.write_held()

    def take(self, hold: bool = False) -> None:
        """Takes a snapshot, and writes it in the background or holds it in memory. Collective.

        Raises FloatingPointError if the loss is not finite, ValueError if the last save failed.
        """
        with spending(SAVING):
            state, saver, meter, exchange = self.state, self.saver, self.meter, self.exchange
            step, best = state.step, state.best_step
            if best != step:
                saver.write_held()  # the best evaluation's
            exchange.poll.wait_for_main(self.record is not None, saver.done)
            meter.check(step)
            everyones = exchange.gather((meter.loss.item(), self.record and self.record.problem()))
            losses, problems = zip(*everyones, strict=True)
            if problem := next(filter(None, problems), None):
                raise ValueError(problem)
            if not all(math.isfinite(loss) for loss in losses):
                raise FloatingPointError(f"the loss is {sum(losses)} before step {step}: nothing was saved")
            self.write_samples()
            content = state.at_save(
                losses=[*losses],
                accumulations=meter.batch.accumulations,
                epoch=step / self.steps.per_epoch,
                train_s=state.train_s + meter.elapsed_s() * (step > state.logged_step),  # else evaluating
                **saver.training.scalars(),
                **(self.record.log.tracker_ids() if self.record else {}),
            ).to_json()
            saver.save(step, content, best, hold)
            self.newest = step

    def write_samples(self) -> None:
        """Logs the sample ids since the last call, of each step in the order of its batch. Collective."""
        if not self.meter.keeps_ids:
            return
        batch, per_rank = self.meter.batch, self.exchange.poll.gather([*self.meter.ids])
        self.meter.ids.clear()
        if self.record:
            self.record.log.write_samples(per_rank, batch.per_device * batch.accumulations)

    def _is_due(self, step: int) -> bool:
        """True if a checkpoint is due after `step` steps. Collective at an epoch's end, as clocks differ.

        At an epoch's end it is due if the next epoch would end more than --checkpoint_s after the last write.
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
