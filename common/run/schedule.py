"""The schedule of a run's checkpoints, besides the first, the best and the last."""

import time

from common.checkpoint.saver import Saver
from common.recipe import Recipe
from common.run.exchange import Exchange


class SaveSchedule:
    """Saves every --checkpoint_every steps, or each epoch; after short epochs only every --checkpoint_s."""

    def __init__(self, recipe: Recipe, steps_per_epoch: int):
        self.every = None if recipe.checkpoint_every == "epoch" else int(recipe.checkpoint_every)
        self.interval_s, self.per_epoch = recipe.checkpoint_s, steps_per_epoch
        self.epoch_began = time.monotonic()

    def is_due(self, step: int, saver: Saver, exchange: Exchange) -> bool:
        """True if a checkpoint is due after `step` steps. Collective at an epoch's end, as clocks differ.

        At an epoch's end it is due if the next epoch would end more than interval_s after the last write.
        """
        if self.every is not None:
            return step % self.every == 0
        if step % self.per_epoch:
            return False
        now = time.monotonic()
        epoch_s, self.epoch_began = now - self.epoch_began, now
        return exchange.of_main(saver.since_write_s() + epoch_s > self.interval_s)
