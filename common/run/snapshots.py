"""Takes snapshots of a run for its checkpoints, and logs the sample ids between log lines."""

import math

from accelerate.utils import gather_object

from common.order import Steps
from common.recipe import Batch, Recipe
from common.run.meter import Meter
from common.run.opening import OpenRun
from common.system.phase import SAVING, spending


class Snapshots:
    """The snapshots of a run that has begun. All processes call it; the main process writes."""

    def __init__(self, opened: OpenRun, recipe: Recipe, batch: Batch, steps: Steps, meter: Meter):
        self.opened, self.recipe, self.batch, self.steps, self.meter = opened, recipe, batch, steps, meter
        self.newest = opened.saved_step  # step of the newest snapshot, or of the checkpoint in the folder

    def take(self, hold: bool = False) -> None:
        """Takes a snapshot, and writes it in the background or holds it in memory. Collective.

        Raises FloatingPointError if the loss is not finite, ValueError if the last write failed.
        """
        with spending(SAVING):
            self._take(hold)

    def flush(self) -> None:
        """Writes what is not on the disk yet: this step's snapshot, and one that is held. Collective.

        Raises as take() does.
        """
        if self.opened.state.step > self.newest:
            self.take()
        else:
            self.opened.saver.write_held()

    def _take(self, hold: bool) -> None:
        state, saver, exchange = self.opened.state, self.opened.saver, self.opened.exchange
        if state.best_step != state.step:
            saver.write_held()  # the best evaluation's
        exchange.wait_for_main(saver.done)
        losses = exchange.gather(self.meter.loss.item())
        if not all(math.isfinite(loss) for loss in losses):
            raise FloatingPointError(f"the loss is {sum(losses)} before step {state.step}: nothing was saved")
        self.write_samples()
        content = state.at_save(
            losses=losses,
            accumulations=self.batch.accumulations,
            epoch=state.step / self.steps.per_epoch,
            train_s=state.train_s + self.meter.elapsed_s(),
            **saver.training.scalars(),
            **(self.opened.output.log.tracker_ids() if self.opened.output else {}),
        ).to_json()
        saver.save(state.step, content, state.best_step, hold)
        self.newest = state.step

    def write_samples(self) -> None:
        """Logs the sample ids since the last call, of each step in the order of its batch. Collective."""
        if not self.recipe.log_samples:
            return
        per_rank = gather_object([self.meter.take_ids()])
        if output := self.opened.output:
            share = self.batch.per_device * self.batch.accumulations
            output.log.write_samples(self.opened.state.step, per_rank, share)
