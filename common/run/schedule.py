"""When a run saves a checkpoint, beside its first, best and last."""

import time

from common.checkpoint.saver import Saver
from common.recipe import Recipe
from common.run.exchange import Exchange


class SaveSchedule:
    """--checkpoint_every: a number of steps, or each epoch; short epochs save --checkpoint_s apart."""

    def __init__(self, recipe: Recipe, steps_per_epoch: int):
        self.every = None if recipe.checkpoint_every == "epoch" else int(recipe.checkpoint_every)
        self.interval_s, self.per_epoch = recipe.checkpoint_s, steps_per_epoch
        self.epoch_began = time.monotonic()

    def is_due(self, step: int, saver: Saver, exchange: Exchange) -> bool:
        """True after a step that saves. Collective at the end of an epoch, as clocks differ.

        An epoch saves where the next one's end would come more than interval_s after the last write.
        """
        if self.every is not None:
            return step % self.every == 0
        if step % self.per_epoch:
            return False
        now = time.monotonic()
        epoch_s, self.epoch_began = now - self.epoch_began, now
        return exchange.of_main(saver.since_write_s() + epoch_s > self.interval_s)
