"""Provides train scripts with the interface of a run: start, log, checkpoints and end."""

import contextlib
import importlib.util
import math
from collections.abc import Generator, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, cast

import numpy as np
from accelerate import Accelerator
from accelerate.optimizer import AcceleratedOptimizer
from torch import Tensor, nn

from onecurve.distributed.agreement import once
from onecurve.distributed.watch import Preempted, watch
from onecurve.flags.recipe import Batch, Recipe
from onecurve.numerics.order import Steps
from onecurve.system.env import report
from onecurve.system.output import log
from onecurve.system.phase import ENDING, EVALUATION, FIRST_EVALUATION, READING, STARTING, TRAINING, now

if TYPE_CHECKING:  # at runtime, imported lazily
    from onecurve.distributed.ema import EMA
    from onecurve.models.preprocessing import DataConfig
    from onecurve.run.evaluation import Mistake, Predicted
    from onecurve.run.record import MainRecord
    from onecurve.run.schemas import ResultEnd
    from onecurve.run.session import Ranks
    from onecurve.telemetry.profiler import Profile

Item = TypeVar("Item")


class Run:
    """Context manager of a training run. All processes use it, but only the main process writes and prints.

    Raises:
        ValueError: The folder contains another run or can't be written, or memory ran out. If memory ran out,
            the message names a batch size to try.
        Preempted: A process received a signal. The run was saved.
    """

    def __init__(self, accelerator: Accelerator, recipe: Recipe, batch: Batch):
        if "trackio" in recipe.trackers and importlib.util.find_spec("trackio") is None:
            raise ValueError("--trackers trackio: the package is not installed. Run `pip install trackio`")
        self.accelerator, self.recipe, self.batch = accelerator, recipe, batch
        self.tested: ResultEnd = {}  # parts of result.json about the test split
        self.begun: Ranks | None = None  # set by begin()
        self._preprocessing: DataConfig | None = None
        self.profile: Profile | None = None  # set with --profile, on the main process
        self.ended = self.finished = False
        self.feeding: Generator[Any, None, None] | None = None  # the script's micro-batches

    def begin(
        self,
        model: nn.Module,
        optimizer: AcceleratedOptimizer,
        steps: Steps,
        *,
        data: tuple[str, tuple[str, ...]] | tuple[str, tuple[str, ...], bool],
        ema: "EMA | None" = None,
        preprocessing: "DataConfig | None" = None,
    ) -> Steps:
        """Open the run's folder and restore the newest checkpoint. Collective.

        Call this method after prepare() and before the first forward pass.

        Args:
            model: The prepared model.
            optimizer: The prepared optimizer.
            steps: Steps of the whole run.
            data: Identity of the data, which changes with the content; names of the classes; and, for images,
                True if they are cropped.
            ema: Averaged weights, if the script maintains an EMA.
            preprocessing: Preprocessing of the model. A resumed run keeps its initial preprocessing, which
                run.preprocessing returns.

        Returns:
            Remaining steps.
        """
        from onecurve.checkpoint.training import TrainingState
        from onecurve.run.opening import Opening

        training = TrainingState(self.accelerator, model, optimizer, ema, data[1])
        job = self.accelerator, self.recipe, self.batch
        opening = Opening(*job, steps, training, *data, preprocessing=preprocessing)
        self.begun = ranks = opening.open()
        self._preprocessing, record = opening.preprocessing, ranks.record
        if first := self.recipe.profile:
            from onecurve.telemetry.profiler import begin_profile

            folder = record.folder if record else None
            self.profile = begin_profile(self.accelerator.device, first, ranks.steps, folder)
        now.enter(TRAINING)
        now.step = ranks.state.step
        if record:
            watch.on_failure(record.close_failed)
        return ranks.steps

    @property
    def ranks(self) -> "Ranks":
        """State shared by all ranks. Available after begin()."""
        assert self.begun, "call run.begin() first"
        return self.begun

    @property
    def preprocessing(self) -> "DataConfig":
        """The run's image preprocessing. Available after begin() with `preprocessing`."""
        assert self._preprocessing, "call run.begin() with preprocessing first"
        return self._preprocessing

    @property
    def main_record(self) -> "MainRecord":
        """The record of the run. Main process only."""
        assert self.ranks.record
        return self.ranks.record

    @property
    def folder(self) -> Path:
        """The run's folder. Main process only."""
        return self.main_record.folder

    def __enter__(self) -> "Run":
        import onecurve.run.ending  # noqa: F401  # imported now, because the import may fail after an error

        return self

    def __exit__(self, _: object, error: BaseException | None, trace: object) -> None:
        from onecurve.run.ending import end_early, end_failed, end_preempted

        ranks, job = self.begun, (self.accelerator, self.recipe, self.batch)
        if ranks:
            ranks.exchange.telemetry.stop()
        if isinstance(error, Preempted):
            why = watch.agreed()
            if ranks:
                end_preempted(ranks, why)
            else:
                end_early(*job)
        elif error is not None:
            end_failed(error, *job, ranks)
        elif ranks and not self.finished:
            not_finished = ValueError(
                "the script left its run without run.finish(). End the loop with `break`"
            )
            end_failed(not_finished, *job, ranks)
            raise not_finished
        elif ranks and ranks.record:
            ranks.record.close("finished")

    def should_evaluate(self, step: int) -> bool:
        """Return True if an epoch or the run ends after `step` steps and this step is not evaluated yet."""
        ranks = self.ranks
        is_end = step % ranks.steps.per_epoch == 0 or step == ranks.steps.last or ranks.is_over()
        is_due = step > 0 and is_end and not ranks.state.evaluated
        is_first = is_due and not {EVALUATION, FIRST_EVALUATION} & now.past_s.keys()
        now.enter(FIRST_EVALUATION if is_first else EVALUATION if is_due else TRAINING, EVALUATION * is_due)
        return is_due

    def checkpoint(self, step: int) -> None:
        """Save a checkpoint if one is due after `step` steps. Collective.

        If no checkpoint is due, a snapshot of a new best evaluation is held in memory until --checkpoint_s
        seconds after the last write.

        Raises:
            Preempted: A process received a signal.
            ValueError: A write failed.
        """
        self.ranks.exchange.listen_after(step)
        if self.is_last(step):
            self._end()
        else:
            self.ranks.save_if_due(step)

    def is_last(self, step: int) -> bool:
        """Return True if the run ends after `step` steps, or is over and this step has been evaluated."""
        ranks = self.ranks
        return step == ranks.steps.last or (ranks.state.evaluated and ranks.is_over())

    def stop(self) -> None:
        """End the run as finished, at this step if it has been evaluated, or else at the next step.

        All processes must call this method at the same step. Schedules still span all epochs.
        """
        self.ranks.state.stopped = True

    def _end(self) -> None:
        """Write pending checkpoints, and print the reason for an early end. Collective."""
        from onecurve.run.end_tables import early_end

        ranks = self.ranks
        now.enter(ENDING)
        if self.feeding:
            self.feeding.close()  # otherwise, decoders would continue with the next steps
        if ranks.state.step < ranks.steps.last and not ranks.is_over():
            ranks.state.stopped = True  # the script has left its training loop
        ranks.flush()
        if ranks.record and not self.ended and (early := early_end(ranks.end_facts())):
            log.info(early)
        self.ended = True
        if not ranks.state.best:
            raise ValueError("the script left its loop before the first evaluation, so there is no result")

    def restore_best(self) -> bool:
        """Load the weights of the best evaluation, or their EMA if there is one, into the model. Collective.

        Call this method after the training loop. Returns False if the weights no longer exist.
        """
        self._end()
        find, ranks = lambda heartbeat: self.main_record.find_best(heartbeat), self.ranks
        exists = once(self.accelerator, "best checkpoint", find, self.recipe.timeout_s)
        if exists:
            ranks.saver.training.restore_evaluated(ranks.record.best if ranks.record else None)
            now.enter(EVALUATION)
        return exists

    def log_test(self, metrics: dict[str, float], split: str) -> None:
        """Log the metrics of the best weights on the held-out split, which was not used for selection.

        Args:
            metrics: Metrics that evaluate() returned after restore_best().
            split: Name of the split.
        """
        now.enter(ENDING)
        test_metrics = {f"test_{name}": value for name, value in metrics.items()}
        self.tested = cast("ResultEnd", test_metrics | {"test_name": split})
        self.ranks.predictions.accept(f"{split} split, best weights")
        if record := self.ranks.record:
            best = record.state.best_step
            record.log.write_metrics("test", metrics, self.ranks.predictions, step=best, split=split)

    def finish(self, val_name: str) -> None:
        """Wait for the last checkpoint, write plots/ and result.json, and print the result. Collective."""
        from onecurve.run.record import memory_gib

        self._end()
        exchange, predictions, timeout_s = self.ranks.exchange, self.ranks.predictions, self.recipe.timeout_s
        exchange.poll.finish()
        exchange.telemetry.stop()
        memory = exchange.gather(memory_gib(self.accelerator, is_healthy=True))
        predictions.gather(exchange.poll)
        end = self.ranks.end_facts()
        facts: ResultEnd = {"val_name": val_name, "memory_gib": memory, **self.tested, **end}
        parts = facts, predictions, exchange.telemetry
        once(self.accelerator, "report", lambda beat: self.main_record.write_end(*parts, beat), timeout_s)
        once(self.accelerator, "last upload", lambda beat: self.main_record.upload(beat), timeout_s)
        watch.begin_exit()
        # With the deepspeed launcher, rank 0 hosts the store of all ranks
        self.accelerator.wait_for_everyone()
        if self.ranks.record:
            report("finished")
        self.finished = True

    def feed(self, batches: Iterator[Item]) -> Iterator[Item]:
        """Yield the micro-batches. The clock starts at the first one, because decoders take time to start."""
        self.feeding = self._feed(batches)
        return self.feeding

    def _feed(self, batches: Iterator[Item]) -> Generator[Item, None, None]:
        now.enter(STARTING, READING)
        with contextlib.ExitStack() as stack:
            if isinstance(batches, Generator):
                stack.callback(batches.close)  # ends the decoders when this generator ends
            for number, item in enumerate(batches):
                if number == 0:
                    self.ranks.meter.start_clock()
                now.enter(TRAINING)
                yield item
                now.enter(READING)

    def add(self, loss: Tensor, ids: np.ndarray) -> None:
        """Record a micro-batch. The loss stays on the device until the next line of the log."""
        self.ranks.meter.add(loss, ids)
        if record := self.ranks.record:
            steps = self.ranks.meter.micro_batches // self.batch.accumulations
            record.log.progress.advance(record.steps.first + steps)

    def log_training(self, step: int, lr: float) -> None:
        """End a step, and log it if a line of the log is due. Collective.

        Every --log_every steps and at the end of each epoch, this call waits for the device and logs the mean
        loss, the learning rate and the speed since the last line of the log.

        Raises:
            FloatingPointError: The loss is not finite. Raised on all processes.
        """
        assert not self.ended, "the loop must end when run.is_last(step) is true"
        ranks, meter = self.ranks, self.ranks.meter
        state, steps, record = ranks.state, ranks.steps, ranks.record
        if self.profile:
            self.profile.end_step()
        state.end_step(step)
        now.step = step
        meter.end_step()
        if record:
            record.log.end_step()
        is_last = step == steps.last or state.stopped
        if step % self.recipe.log_every and step % steps.per_epoch and not is_last:
            return
        meter.check(step)
        loss = meter.mean_loss(step - state.logged_step)
        spent_s = meter.start_clock()
        images_per_s = (step - max(state.logged_step, steps.first)) * self.batch.total / spent_s
        ranks.write_samples()
        state.train_s, state.logged_step = state.train_s + spent_s, step
        if not math.isfinite(loss):
            raise FloatingPointError(f"the loss is {loss} at step {step} with learning rate {lr:g}")
        if record:
            values = {"train/loss": loss, "train/lr": lr}
            if record.utilisation and (mfu_pct := record.utilisation.pct(images_per_s)) is not None:
                values["train/mfu_pct"] = mfu_pct
            values["train/images_per_s"] = images_per_s
            record.log.write(values, ranks.exchange.telemetry.means())

    def show_progress(self, text: str) -> None:
        """Show an evaluation's progress, without waiting for the device. May raise Preempted. Collective."""
        if record := self.ranks.record:
            record.log.progress.tell(text)
        self.ranks.exchange.listen()

    def keep(self, confusion: "Tensor | list[Mistake]", examples: "list[Predicted]") -> None:
        """Hold an evaluation's predictions until its metrics are logged."""
        self.ranks.predictions.keep(confusion, examples)

    def log_scalars(self, values: Mapping[str, float | Tensor]) -> None:
        """Add values from the main process to the next training or evaluation line of the log.

        If a name is given twice, the last value is logged. A tensor stays on its device until the line is
        logged.
        """
        if invalid := [name for name in values if "/" not in name]:
            raise ValueError(f"log_scalars: {invalid[0]} needs a group, for example train/{invalid[0]}")
        if record := self.ranks.record:
            record.log.scalars.update(values)

    def log_evaluation(self, step: int, metrics: dict[str, float]) -> None:
        """Log an evaluation.

        Args:
            step: Number of completed training steps.
            metrics: `loss`, `images`, `accuracy` for models with classes, and `raw_accuracy` with an EMA.

        Raises:
            FloatingPointError: The loss is not finite. Raised on all processes.
        """
        now.enter(TRAINING)
        self.ranks.meter.start_clock()
        if not math.isfinite(metrics["loss"]):
            raise FloatingPointError(f"the evaluation's loss is {metrics['loss']} at step {step}")
        self.ranks.state.add_evaluation(step, metrics, self.recipe.best_by)
        self.ranks.predictions.accept(f"step {step:,}")
        if record := self.ranks.record:
            record.log.write_metrics("val", metrics, self.ranks.predictions, step=step)
