"""A training run as a train script uses it: its start, log, checkpoints and end."""

import contextlib
import importlib.util
import math
from collections.abc import Generator, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
from accelerate import Accelerator
from accelerate.optimizer import AcceleratedOptimizer
from torch import Tensor, nn

from common.checkpoint.format import Checkpoint
from common.checkpoint.saver import Saver
from common.checkpoint.training import TrainingState
from common.distributed.agreement import once
from common.distributed.preemption import Preempted
from common.distributed.watch import begin_exit, on_failure
from common.order import Steps
from common.recipe import Batch, ImageRecipe, Recipe
from common.run import finish
from common.run.checkpoints import Checkpoints, Meter
from common.run.ending import close, close_failed, end_failed, end_preempted
from common.run.exchange import Exchange
from common.run.folder import RunFolder
from common.run.log import Predictions, RunLog
from common.run.opening import open_run
from common.run.state import RunState
from common.system.env import report
from common.system.phase import ENDING, EVALUATION, READING, STARTING, TRAINING, now

if TYPE_CHECKING:  # imported where they are needed
    from common.optim import EMA
    from common.telemetry.flops import Utilisation
    from common.telemetry.profiler import Profile

Item = TypeVar("Item")


class Run:
    """A context manager around a training. All processes call it; the main process writes and prints.

    Raises ValueError when the folder holds another run or can't be written, or when
    memory runs out, with the size to try. Raises Preempted, after saving, when a process was told to stop.
    """

    # Of the main process, after begin()
    place: RunFolder | None = None
    log: RunLog | None = None
    best: Checkpoint | None = None  # after restore_best()

    # After begin()
    steps: Steps  # from the first of this process on
    saved_step: int  # of the newest checkpoint in the run's own folder, or 0
    record: dict[str, Any]  # the content of recipe.json
    saver: Saver
    exchange: Exchange

    def __init__(self, accelerator: Accelerator, recipe: Recipe, batch: Batch):
        if "trackio" in recipe.trackers and importlib.util.find_spec("trackio") is None:
            raise ValueError("--trackers trackio: the package is not installed: pip install trackio")
        self.accelerator, self.recipe, self.batch = accelerator, recipe, batch
        self.state = RunState()
        self.final: dict[str, Any] = {}  # parts of result.json that are known after begin(), or at the end
        self.meter = Meter(accelerator, batch, recipe.log_samples)
        self.predictions = Predictions()
        self.keep = self.predictions.keep  # an evaluation's, until its metrics are logged
        self.tested: dict[str, Any] = {}  # parts of result.json about the test split
        self.checkpoints: Checkpoints | None = None  # once the run has begun
        self.profile: Profile | None = None  # of the main process, with --profile
        self.utilisation: Utilisation | None = None  # of the main process
        self.ended = self.finished = False
        self.feeding: Generator[Any, None, None] | None = None  # the script's micro-batches

    def begin(
        self,
        model: nn.Module,
        optimizer: AcceleratedOptimizer,
        steps: Steps,
        *,
        data: tuple[str, tuple[str, ...]],
        ema: "EMA | None" = None,
    ) -> Steps:
        """Opens the run's folder and restores the newest checkpoint. Returns the steps left. Collective.

        Call it after prepare() and before the first forward. data: a name that changes with its content, and
        the names of the classes.
        """
        self.steps = steps
        open_run(self, TrainingState(self.accelerator, model, optimizer, ema), data)
        self.meter.resume(self.state, self.accelerator.process_index)
        self.meter.start_clock()
        self.checkpoints = Checkpoints(self, self.meter)
        if first := self.recipe.profile:
            from common.telemetry.profiler import begin_profile

            folder = self.folder if self.log else None
            self.profile = begin_profile(self.accelerator.device, first, self.steps, folder)
        if self.log and isinstance(self.recipe, ImageRecipe):
            from common.telemetry.flops import utilisation

            precision = self.accelerator.precision.mixed_precision
            self.utilisation = utilisation(self.recipe, len(data[1]), self.record["devices"], precision)
        now.enter(TRAINING)
        now.step = self.state.step
        on_failure(partial(close_failed, self))
        return self.steps

    @property
    def folder(self) -> Path:
        """The run's folder. Main process only."""
        assert self.place
        return self.place.path

    def problem(self) -> str | None:
        """The main process's first error that ends the run: a lost folder, a checkpoint or a line that can't
        be written."""
        if not self.place or not self.log:
            return None
        return self.place.lost() or self.saver.problem or self.log.problem

    def __enter__(self) -> "Run":
        return self

    def __exit__(self, _: object, error: BaseException | None, trace: object) -> None:
        if self.checkpoints:
            self.exchange.telemetry.stop()
        if isinstance(error, Preempted):
            end_preempted(self)
        elif error is not None:
            end_failed(error, self)
        elif self.checkpoints and self.finished:
            close(self, "finished")
        elif self.checkpoints:
            left = ValueError("the script left its run without run.finish(): end the loop by `break`")
            end_failed(left, self)
            raise left

    def should_evaluate(self, step: int) -> bool:
        """True when an epoch or the run ends after `step` steps and is not evaluated yet."""
        ends = step % self.steps.per_epoch == 0 or step == self.steps.last
        ends |= self.state.is_over(self.recipe.patience)
        due = step > 0 and ends and not self.state.evaluated
        now.enter(EVALUATION if due else TRAINING)
        return due

    def checkpoint(self, step: int) -> None:
        """Saves if a checkpoint is due after `step` steps. Collective.

        A snapshot of a new best evaluation that is not due stays in memory until --checkpoint_s after the
        last write. Raises Preempted when any process was told to stop, ValueError when a write failed.
        """
        assert self.checkpoints
        self.exchange.listen_after(step)
        if self.is_last(step):
            self._end()
        else:
            self.checkpoints.save_if_due(step)

    def is_last(self, step: int) -> bool:
        """True when the run ends after `step` steps: the last, or an evaluated one once the run is over."""
        return step == self.steps.last or (self.state.evaluated and self.state.is_over(self.recipe.patience))

    def stop(self) -> None:
        """Ends the run as a finished one, at this step if it is evaluated, else at the next, which will be.

        All processes call it at the same step. Schedules stay those of all epochs.
        """
        self.state.stopped = True

    def _end(self) -> None:
        """Writes the checkpoints that are not on the disk yet, and prints why an end is early. Collective."""
        assert self.checkpoints
        now.enter(ENDING)
        if self.feeding:
            self.feeding.close()  # decoders would go on with the next steps
        if self.state.step < self.steps.last and not self.state.is_over(self.recipe.patience):
            self.state.stopped = True  # the script has left its loop
        self.checkpoints.flush()
        if self.log and not self.ended and (early := finish.early_end(self._end_facts())):
            print(early, flush=True)
        self.ended = True
        if not self.state.best:
            raise ValueError("the script left its loop before the first evaluation: there is no result")

    def _end_facts(self) -> dict[str, Any]:
        """The parts of result.json about the end. stopped_by: None after the last step of all epochs."""
        step, by = self.state.step, None
        if step == self.steps.last != self.steps.total:
            by = f"--max_steps {step}"
        elif step != self.steps.total:
            by = "the script" if self.state.stopped else f"--patience {self.recipe.patience}"
        return {"steps": step, "total_steps": self.steps.total, "stopped_by": by}

    def restore_best(self) -> bool:
        """Gives the model the weights of the best evaluation, or their EMA if there is one. Collective.

        Call it after the loop. Returns False if those weights are gone.
        """
        self._end()
        find = partial(finish.find_best, self)
        exists = once(self.accelerator, "best checkpoint", find, self.recipe.timeout_s)
        if exists:
            self.saver.training.restore_evaluated(self.best)
            now.enter(EVALUATION)
        return exists

    def log_test(self, metrics: dict[str, float], split: str) -> None:
        """Logs the best weights' metrics on the data's own held-out split, by which nothing was chosen.

        metrics: of evaluate(), after restore_best().
        """
        now.enter(ENDING)
        self.tested = {f"test_{name}": value for name, value in metrics.items()} | {"test_name": split}
        self.predictions.accept(f"{split} split, best weights")
        if self.log:
            best = self.state.best_step
            self.log.write_metrics("test", metrics, self.predictions, step=best, split=split)

    def finish(self, val_name: str) -> None:
        """Waits for the last checkpoint, writes plots/ and result.json, and prints the table. Collective."""
        self._end()
        self.exchange.poll.finish()
        self.exchange.telemetry.stop()
        memory = self.exchange.gather(finish.memory_gib(self.accelerator, is_healthy=True))
        self.predictions.gather(self.exchange.poll)
        self.final |= {"val_name": val_name, "memory_gib": memory, **self.tested, **self._end_facts()}
        once(self.accelerator, "report", partial(finish.write_end, self), self.recipe.timeout_s)
        once(self.accelerator, "last upload", partial(finish.upload, self), self.recipe.timeout_s)
        begin_exit()
        self.accelerator.wait_for_everyone()  # under deepspeed rank 0 hosts the store that the others use
        if self.log:
            report("finished")
        self.finished = True

    def feed(self, batches: Iterator[Item]) -> Iterator[Item]:
        """Yields the micro-batches. The clock starts at the first one, as decoders take time to start."""
        self.feeding = self._feed(batches)
        return self.feeding

    def _feed(self, batches: Iterator[Item]) -> Generator[Item, None, None]:
        now.enter(STARTING)
        now.phase = READING
        with contextlib.ExitStack() as stack:
            if isinstance(batches, Generator):
                stack.callback(batches.close)  # its decoders end with this generator
            for number, item in enumerate(batches):
                if number == 0:
                    self.meter.start_clock()
                now.enter(TRAINING)
                yield item
                now.enter(READING)

    def add(self, loss: Tensor, ids: np.ndarray) -> None:
        """Adds a micro-batch. Its loss stays on the device until the next line of the log."""
        self.meter.add(loss, ids)
        if self.log:
            self.log.progress.advance(self.steps.first + self.meter.micro_batches // self.batch.accumulations)

    def log_training(self, step: int, lr: float) -> None:
        """Ends a step. Every --log_every steps, and at the end of an epoch, it waits for the device and logs
        mean loss, learning rate and speed since the last line. Collective.

        Raises FloatingPointError on all processes when the loss is not finite.
        """
        assert not self.ended, "the loop must end where run.is_last(step) is true"
        assert self.checkpoints
        if self.profile:
            self.profile.end_step()
        self.state.end_step(step)
        now.step = step
        self.meter.end_step()
        if self.log:
            self.log.end_step()
        is_last = step == self.steps.last or self.state.stopped
        if step % self.recipe.log_every and step % self.steps.per_epoch and not is_last:
            return
        state, meter = self.state, self.meter
        meter.check(step)
        loss = meter.mean_loss(step - state.logged_step)
        spent_s = meter.start_clock()
        images_per_s = (step - max(state.logged_step, self.steps.first)) * self.batch.total / spent_s
        state.train_s += spent_s
        self.checkpoints.write_samples()
        state.logged_step = step
        if not math.isfinite(loss):
            raise FloatingPointError(f"the loss is {loss} at step {step} with learning rate {lr:g}")
        if self.log:
            values = {"train/loss": loss, "train/lr": lr}
            if self.utilisation and (mfu_pct := self.utilisation.pct(images_per_s)) is not None:
                values["train/mfu_pct"] = mfu_pct
            values["train/images_per_s"] = images_per_s
            self.log.write(values, self.exchange.telemetry.means())

    def show_progress(self, text: str) -> None:
        """Shows an evaluation's progress without waiting for the device. May raise Preempted. Collective."""
        if self.log:
            self.log.show_progress(text)
        self.exchange.listen()

    def log_scalars(self, values: Mapping[str, float | Tensor]) -> None:
        """Adds the main process's values to the next line of the log, of the training or of an evaluation.

        Of a name given twice the last value counts. A tensor stays on its device until then.
        """
        if wrong := [name for name in values if "/" not in name]:
            raise ValueError(f"log_scalars: {wrong[0]}: give it a group, as train/{wrong[0]}")
        if self.log:
            self.log.scalars |= values

    def log_evaluation(self, step: int, metrics: dict[str, float]) -> None:
        """Logs an evaluation. metrics: loss, images and, with classes, accuracy; with an EMA raw_accuracy."""
        now.enter(TRAINING)
        self.meter.start_clock()
        self.state.add_evaluation(step, metrics, self.recipe.best_by)
        self.predictions.accept(f"step {step:,}")
        if self.log:
            self.log.write_metrics("val", metrics, self.predictions, step=step)
