"""A training run as a train script uses it: its start, log, checkpoints and end."""

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

if TYPE_CHECKING:  # imported where they are needed
    from onecurve.distributed.ema import EMA
    from onecurve.models.preprocessing import DataConfig
    from onecurve.run.evaluation import Mistake, Predicted
    from onecurve.run.record import MainRecord
    from onecurve.run.schemas import ResultEnd
    from onecurve.run.session import Ranks
    from onecurve.telemetry.profiler import Profile

Item = TypeVar("Item")


class Run:
    """A context manager around a training. All processes call it; the main process writes and prints.

    Raises ValueError when the folder holds another run or can't be written, or when
    memory runs out, with the size to try. Raises Preempted, after saving, when a process was told to stop.
    """

    def __init__(self, accelerator: Accelerator, recipe: Recipe, batch: Batch):
        if "trackio" in recipe.trackers and importlib.util.find_spec("trackio") is None:
            raise ValueError("--trackers trackio: the package is not installed: pip install trackio")
        self.accelerator, self.recipe, self.batch = accelerator, recipe, batch
        self.tested: ResultEnd = {}  # parts of result.json about the test split
        self.begun: Ranks | None = None  # after begin()
        self._preprocessing: DataConfig | None = None
        self.profile: Profile | None = None  # of the main process, with --profile
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
        """Opens the run's folder and restores the newest checkpoint. Returns the steps left. Collective.

        Call it after prepare() and before the first forward. data: a name that changes with its content, the
        names of the classes, and of images if they are cropped. preprocessing: the model's own;
        run.preprocessing is that of the run's beginning, which a resumed run keeps.
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
        """What all ranks do together. After begin()."""
        assert self.begun, "run.begin() comes first"
        return self.begun

    @property
    def preprocessing(self) -> "DataConfig":
        """How images become inputs in this run. After begin(), where that was given the model's own."""
        assert self._preprocessing, "run.begin() comes first, with preprocessing"
        return self._preprocessing

    @property
    def main_record(self) -> "MainRecord":
        """Main process only."""
        assert self.ranks.record
        return self.ranks.record

    @property
    def folder(self) -> Path:
        """The run's folder. Main process only."""
        return self.main_record.folder

    def __enter__(self) -> "Run":
        import onecurve.run.ending  # noqa: F401  # now, as after a failure it may not be possible

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
            left = ValueError("the script left its run without run.finish(): end the loop by `break`")
            end_failed(left, *job, ranks)
            raise left
        elif ranks and ranks.record:
            ranks.record.close("finished")

    def should_evaluate(self, step: int) -> bool:
        """True when an epoch or the run ends after `step` steps and is not evaluated yet."""
        ranks = self.ranks
        ends = step % ranks.steps.per_epoch == 0 or step == ranks.steps.last or ranks.is_over()
        due = step > 0 and ends and not ranks.state.evaluated
        is_first = due and not {EVALUATION, FIRST_EVALUATION} & now.past_s.keys()
        now.enter(FIRST_EVALUATION if is_first else EVALUATION if due else TRAINING, EVALUATION * due)
        return due

    def checkpoint(self, step: int) -> None:
        """Saves if a checkpoint is due after `step` steps. Collective.

        A snapshot of a new best evaluation that is not due stays in memory until --checkpoint_s after the
        last write. Raises Preempted when any process was told to stop, ValueError when a write failed.
        """
        self.ranks.exchange.listen_after(step)
        if self.is_last(step):
            self._end()
        else:
            self.ranks.save_if_due(step)

    def is_last(self, step: int) -> bool:
        """True when the run ends after `step` steps: the last, or an evaluated one once the run is over."""
        ranks = self.ranks
        return step == ranks.steps.last or (ranks.state.evaluated and ranks.is_over())

    def stop(self) -> None:
        """Ends the run as a finished one, at this step if it is evaluated, else at the next, which will be.

        All processes call it at the same step. Schedules stay those of all epochs.
        """
        self.ranks.state.stopped = True

    def _end(self) -> None:
        """Writes the checkpoints that are not on the disk yet, and prints why an end is early. Collective."""
        from onecurve.run.end_tables import early_end

        ranks = self.ranks
        now.enter(ENDING)
        if self.feeding:
            self.feeding.close()  # decoders would go on with the next steps
        if ranks.state.step < ranks.steps.last and not ranks.is_over():
            ranks.state.stopped = True  # the script has left its loop
        ranks.flush()
        if ranks.record and not self.ended and (early := early_end(ranks.end_facts())):
            log.info(early)
        self.ended = True
        if not ranks.state.best:
            raise ValueError("the script left its loop before the first evaluation: there is no result")

    def restore_best(self) -> bool:
        """Gives the model the weights of the best evaluation, or their EMA if there is one. Collective.

        Call it after the loop. Returns False if those weights are gone.
        """
        self._end()
        find, ranks = lambda heartbeat: self.main_record.find_best(heartbeat), self.ranks
        exists = once(self.accelerator, "best checkpoint", find, self.recipe.timeout_s)
        if exists:
            ranks.saver.training.restore_evaluated(ranks.record.best if ranks.record else None)
            now.enter(EVALUATION)
        return exists

    def log_test(self, metrics: dict[str, float], split: str) -> None:
        """Logs the best weights' metrics on the data's own held-out split, by which nothing was chosen.

        metrics: of evaluate(), after restore_best().
        """
        now.enter(ENDING)
        measured = {f"test_{name}": value for name, value in metrics.items()}
        self.tested = cast("ResultEnd", measured | {"test_name": split})
        self.ranks.predictions.accept(f"{split} split, best weights")
        if record := self.ranks.record:
            best = record.state.best_step
            record.log.write_metrics("test", metrics, self.ranks.predictions, step=best, split=split)

    def finish(self, val_name: str) -> None:
        """Waits for the last checkpoint, writes plots/ and result.json, and prints the table. Collective."""
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
        self.accelerator.wait_for_everyone()  # under deepspeed rank 0 hosts the store that the others use
        if self.ranks.record:
            report("finished")
        self.finished = True

    def feed(self, batches: Iterator[Item]) -> Iterator[Item]:
        """Yields the micro-batches. The clock starts at the first one, as decoders take time to start."""
        self.feeding = self._feed(batches)
        return self.feeding

    def _feed(self, batches: Iterator[Item]) -> Generator[Item, None, None]:
        now.enter(STARTING, READING)
        with contextlib.ExitStack() as stack:
            if isinstance(batches, Generator):
                stack.callback(batches.close)  # its decoders end with this generator
            for number, item in enumerate(batches):
                if number == 0:
                    self.ranks.meter.start_clock()
                now.enter(TRAINING)
                yield item
                now.enter(READING)

    def add(self, loss: Tensor, ids: np.ndarray) -> None:
        """Adds a micro-batch. Its loss stays on the device until the next line of the log."""
        self.ranks.meter.add(loss, ids)
        if record := self.ranks.record:
            steps = self.ranks.meter.micro_batches // self.batch.accumulations
            record.log.progress.advance(record.steps.first + steps)

    def log_training(self, step: int, lr: float) -> None:
        """Ends a step. Every --log_every steps, and at the end of an epoch, it waits for the device and logs
        mean loss, learning rate and speed since the last line. Collective.

        Raises FloatingPointError on all processes when the loss is not finite.
        """
        assert not self.ended, "the loop must end where run.is_last(step) is true"
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
        """Shows an evaluation's progress without waiting for the device. May raise Preempted. Collective."""
        if record := self.ranks.record:
            record.log.progress.tell(text)
        self.ranks.exchange.listen()

    def keep(self, confusion: "Tensor | list[Mistake]", examples: "list[Predicted]") -> None:
        """Holds an evaluation's predictions until its metrics are logged."""
        self.ranks.predictions.keep(confusion, examples)

    def log_scalars(self, values: Mapping[str, float | Tensor]) -> None:
        """Adds the main process's values to the next line of the log, of the training or of an evaluation.

        Of a name given twice the last value counts. A tensor stays on its device until then.
        """
        if wrong := [name for name in values if "/" not in name]:
            raise ValueError(f"log_scalars: {wrong[0]}: give it a group, as train/{wrong[0]}")
        if record := self.ranks.record:
            record.log.scalars.update(values)

    def log_evaluation(self, step: int, metrics: dict[str, float]) -> None:
        """Logs an evaluation. metrics: loss, images and, with classes, accuracy; with an EMA raw_accuracy.

        Raises FloatingPointError on all processes when the loss is not finite.
        """
        now.enter(TRAINING)
        self.ranks.meter.start_clock()
        if not math.isfinite(metrics["loss"]):
            raise FloatingPointError(f"the evaluation's loss is {metrics['loss']} at step {step}")
        self.ranks.state.add_evaluation(step, metrics, self.recipe.best_by)
        self.ranks.predictions.accept(f"step {step:,}")
        if record := self.ranks.record:
            record.log.write_metrics("val", metrics, self.ranks.predictions, step=step)
