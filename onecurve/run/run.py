"""Provides the interface with which train scripts start, log, checkpoint and end a run."""

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
from onecurve.system.env import report_event
from onecurve.system.output import log
from onecurve.system.phase import ENDING, EVALUATION, FIRST_EVALUATION, READING, STARTING, TRAINING, now

if TYPE_CHECKING:  # Imported lazily at runtime
    from onecurve.distributed.ema import EMA
    from onecurve.models.preprocessing import DataConfig
    from onecurve.run.evaluation import Mistake, PredictedBatch
    from onecurve.run.record import MainRecord
    from onecurve.run.schemas import ResultEnd
    from onecurve.run.session import Ranks
    from onecurve.system.threads import Heartbeat
    from onecurve.telemetry.profiler import Profile

Item = TypeVar("Item")


class Run:
    """Context manager for a training run on all processes. Only the main process writes and prints.

    Raises:
        ValueError: If the folder contains a different run or can't be written, or if memory runs out. The
            message of an out-of-memory error suggests a batch size.
        Preempted: If a process received a signal and the run was saved.
    """

    def __init__(self, accelerator: Accelerator, recipe: Recipe, batch: Batch):
        if "trackio" in recipe.trackers and importlib.util.find_spec("trackio") is None:
            raise ValueError("--trackers trackio requires the package trackio. Run `pip install trackio`")
        self.accelerator, self.recipe, self.batch = accelerator, recipe, batch
        self.test_facts: ResultEnd = {}  # result.json entries for the test split
        self.begun: Ranks | None = None  # State of the run after begin()
        self._preprocessing: DataConfig | None = None
        self.profile: Profile | None = None  # Set only with --profile on the main process
        self.has_ended = self.has_finished = False
        self.batch_generator: Generator[Any, None, None] | None = None  # Yields the script's micro-batches

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
        """Open the run's folder and restore the newest checkpoint.

        All ranks must call this method after prepare() and before the first forward pass.

        Args:
            model: Model that prepare() returned.
            optimizer: Optimizer that prepare() returned.
            steps: Training steps of the whole run.
            data: Tuple with the data's identity (which changes with the data's content) and the class names.
                For images, a third item is True if the images are cropped.
            ema: Averaged weights if the script maintains an EMA, otherwise None.
            preprocessing: Preprocessing of the model. A resumed run keeps its initial preprocessing, which
                run.preprocessing returns.

        Returns:
            Remaining training steps.
        """
        from onecurve.checkpoint.training import TrainingState
        from onecurve.run.opening import Opening

        training = TrainingState(self.accelerator, model, optimizer, ema, data[1])
        job_parts = self.accelerator, self.recipe, self.batch
        opening = Opening(*job_parts, steps, training, *data, preprocessing=preprocessing)
        self.begun = ranks = opening.open()
        self._preprocessing, record = opening.preprocessing, ranks.record
        if first_profiled_step := self.recipe.profile:
            from onecurve.telemetry.profiler import begin_profile

            folder = record.folder if record else None
            self.profile = begin_profile(self.accelerator.device, first_profiled_step, ranks.steps, folder)
        now.enter(TRAINING)
        now.step = ranks.state.step
        if record:
            watch.on_failure(record.close_failed)
        return ranks.steps

    @property
    def ranks(self) -> "Ranks":
        """State that all ranks share. This property is available after begin()."""
        assert self.begun, "call run.begin() first"
        return self.begun

    @property
    def preprocessing(self) -> "DataConfig":
        """Image preprocessing of the run. This property is available after begin() with `preprocessing`."""
        assert self._preprocessing, "call run.begin() with the argument preprocessing first"
        return self._preprocessing

    @property
    def main_record(self) -> "MainRecord":
        """Record of the run, which exists only on the main process."""
        assert self.ranks.record
        return self.ranks.record

    @property
    def folder(self) -> Path:
        """Folder of the run, which is known only on the main process."""
        return self.main_record.folder

    def __enter__(self) -> "Run":
        import onecurve.run.ending  # noqa: F401  # Imported now, because the import could fail after an error

        return self

    def __exit__(self, _: object, error: BaseException | None, trace: object) -> None:
        from onecurve.run.ending import end_early, end_failed, end_preempted

        ranks, job_parts = self.begun, (self.accelerator, self.recipe, self.batch)
        if ranks:
            ranks.exchange.telemetry.stop()
        if isinstance(error, Preempted):
            reason = watch.agreed()
            if ranks:
                end_preempted(ranks, reason)
            else:
                end_early(*job_parts)
        elif error is not None:
            end_failed(error, *job_parts, ranks)
        elif ranks and not self.has_finished:
            not_finished = ValueError(
                "the script left its run without a call to run.finish(). End the loop with `break`"
            )
            end_failed(not_finished, *job_parts, ranks)
            raise not_finished
        elif ranks and ranks.record:
            ranks.record.close("finished")

    def should_evaluate(self, step: int) -> bool:
        """Return True if an epoch or the run ends after `step` steps, unless this step has been evaluated."""
        ranks = self.ranks
        ends_epoch_or_run = step % ranks.steps.per_epoch == 0 or step == ranks.steps.last or ranks.is_over()
        is_due = step > 0 and ends_epoch_or_run and not ranks.state.evaluated
        is_first = is_due and not {EVALUATION, FIRST_EVALUATION} & now.past_s.keys()
        now.enter(FIRST_EVALUATION if is_first else EVALUATION if is_due else TRAINING, EVALUATION * is_due)
        return is_due

    def checkpoint(self, step: int) -> None:
        """Save a checkpoint if one is due after `step` steps. All ranks must call this method.

        If no checkpoint is due but the evaluation at this step is the best so far, a snapshot of this step is
        held in memory until --checkpoint_s seconds after the last write.

        Raises:
            Preempted: If a process received a signal.
            ValueError: If a write failed.
        """
        self.ranks.exchange.listen_after(step)
        if self.is_last(step):
            self._end()
        else:
            self.ranks.save_if_due(step)

    def is_last(self, step: int) -> bool:
        """Return True if the run ends after `step` steps, either as planned or early after an evaluation."""
        ranks = self.ranks
        return step == ranks.steps.last or (ranks.state.evaluated and ranks.is_over())

    def stop(self) -> None:
        """End the run with the status `finished`.

        The run ends at this step if this step has been evaluated, otherwise at the next step. All processes
        must call this method at the same step. Schedules still span all epochs.
        """
        self.ranks.state.stopped = True

    def _end(self) -> None:
        """Write pending checkpoints, and print the reason for an early end.

        All ranks must call this method.
        """
        from onecurve.run.end_tables import early_end_in_words

        ranks = self.ranks
        now.enter(ENDING)
        if self.batch_generator:
            self.batch_generator.close()  # Stops the decoders, which would continue with the next steps
        if ranks.state.step < ranks.steps.last and not ranks.is_over():
            ranks.state.stopped = True  # The script has left its training loop
        ranks.flush()
        if ranks.record and not self.has_ended and (early_end := early_end_in_words(ranks.end_facts())):
            log.info(f"the run {early_end}")
        self.has_ended = True
        if not ranks.state.best:
            raise ValueError(
                "the script left its loop before the first evaluation. Add an evaluation to the training loop"
            )

    def restore_best(self) -> bool:
        """Load the weights or the EMA of the best evaluation into the model.

        The method returns False if these weights are lost. All ranks must call this method after the training
        loop.
        """
        self._end()
        ranks, timeout_s = self.ranks, self.recipe.timeout_s
        is_restored = once(
            self.accelerator,
            "best checkpoint",
            lambda heartbeat: self.main_record.find_best(heartbeat),
            timeout_s,
        )
        if is_restored:
            ranks.saver.training.restore_evaluated(ranks.record.best if ranks.record else None)
            now.enter(EVALUATION)
        return is_restored

    def log_test(self, metrics: dict[str, float], split: str) -> None:
        """Log the best weights' metrics on a held-out split that was not used to select them.

        Args:
            metrics: Metrics that evaluate() returned after restore_best().
            split: Name of the split.
        """
        now.enter(ENDING)
        test_metrics = {f"test_{name}": value for name, value in metrics.items()}
        self.test_facts = cast("ResultEnd", test_metrics | {"test_name": split})
        self.ranks.predictions.accept(f"{split} split, best weights")
        if record := self.ranks.record:
            best_step = record.state.best_step
            record.log.write_metrics("test", metrics, self.ranks.predictions, step=best_step, split=split)

    def finish(self, val_name: str) -> None:
        """Wait for the last checkpoint, write plots/ and result.json, and print the result.

        All ranks must call this method.
        """
        from onecurve.run.record import memory_gib

        self._end()
        exchange, predictions, timeout_s = self.ranks.exchange, self.ranks.predictions, self.recipe.timeout_s
        exchange.poll.finish()
        exchange.telemetry.stop()
        memory = exchange.gather(memory_gib(self.accelerator, is_healthy=True))
        predictions.gather(exchange.poll)
        end_facts = self.ranks.end_facts()
        facts: ResultEnd = {"val_name": val_name, "memory_gib": memory, **self.test_facts, **end_facts}

        def write_end(heartbeat: "Heartbeat") -> None:
            self.main_record.write_end(facts, predictions, exchange.telemetry, heartbeat)

        once(self.accelerator, "report", write_end, timeout_s)
        once(self.accelerator, "last upload", lambda heartbeat: self.main_record.upload(heartbeat), timeout_s)
        watch.begin_exit()
        # With the deepspeed launcher, rank 0 hosts the store that all ranks use.
        self.accelerator.wait_for_everyone()
        if self.ranks.record:
            report_event("finished")
        self.has_finished = True

    def feed(self, batches: Iterator[Item]) -> Iterator[Item]:
        """Yield the micro-batches.

        Start the clock at the first micro-batch, because decoders start slowly.
        """
        self.batch_generator = self._timed_batches(batches)
        return self.batch_generator

    def _timed_batches(self, batches: Iterator[Item]) -> Generator[Item, None, None]:
        now.enter(STARTING, READING)
        with contextlib.ExitStack() as stack:
            if isinstance(batches, Generator):
                stack.callback(batches.close)  # Ends the decoders when this generator ends
            for micro_batch_index, micro_batch in enumerate(batches):
                if micro_batch_index == 0:
                    self.ranks.meter.start_clock()
                now.enter(TRAINING)
                yield micro_batch
                now.enter(READING)

    def add(self, loss: Tensor, ids: np.ndarray) -> None:
        """Record a micro-batch. The loss stays on the device until the next log line."""
        self.ranks.meter.add(loss, ids)
        if record := self.ranks.record:
            steps_of_process = self.ranks.meter.micro_batches // self.batch.accumulations
            record.log.progress.advance(record.steps.first + steps_of_process)

    def log_training(self, step: int, lr: float) -> None:
        """End a training step, and write a log line if one is due. All ranks must call this method.

        Every --log_every steps and at the end of each epoch, this method waits for the device. It then logs
        the learning rate, and the mean loss and speed since the last log line.

        Raises:
            FloatingPointError: If the loss is not finite. All processes raise this error.
        """
        assert not self.has_ended, "the training loop must end when run.is_last(step) returns True"
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
            raise FloatingPointError(f"the loss is {loss} at step {step} with a learning rate of {lr:g}")
        if record:
            metrics = {"train/loss": loss, "train/lr": lr}
            if record.utilisation and (mfu_pct := record.utilisation.mfu_pct(images_per_s)) is not None:
                metrics["train/mfu_pct"] = mfu_pct
            metrics["train/images_per_s"] = images_per_s
            record.log.write(metrics, ranks.exchange.telemetry.means())

    def show_progress(self, text: str) -> None:
        """Show an evaluation's progress without waiting for the device. All ranks must call this method.

        Raise Preempted if a process received a signal.
        """
        if record := self.ranks.record:
            record.log.progress.tell(text)
        self.ranks.exchange.listen()

    def keep(self, confusion: "Tensor | list[Mistake]", examples: "list[PredictedBatch]") -> None:
        """Store an evaluation's predictions until its metrics are logged."""
        self.ranks.predictions.keep(confusion, examples)

    def log_scalars(self, values: Mapping[str, float | Tensor]) -> None:
        """Add scalars from the main process to the next training or evaluation line of the log.

        If a name is repeated, the last value is logged. A tensor stays on its device until the line is
        logged.
        """
        if names_without_group := [name for name in values if "/" not in name]:
            name = names_without_group[0]
            raise ValueError(f"log_scalars: the name {name} needs a group, for example train/{name}")
        if record := self.ranks.record:
            record.log.scalars.update(values)

    def log_evaluation(self, step: int, metrics: dict[str, float]) -> None:
        """Log an evaluation's metrics.

        Args:
            step: Number of completed training steps.
            metrics: Metrics `loss` and `images`, `accuracy` for models with classes, and `raw_accuracy` with
                an EMA.

        Raises:
            FloatingPointError: If the loss is not finite. All processes raise this error.
        """
        now.enter(TRAINING)
        self.ranks.meter.start_clock()
        if not math.isfinite(metrics["loss"]):
            raise FloatingPointError(f"the evaluation loss is {metrics['loss']} at step {step}")
        self.ranks.state.add_evaluation(step, metrics, self.recipe.best_by)
        self.ranks.predictions.accept(f"step {step:,}")
        if record := self.ranks.record:
            record.log.write_metrics("val", metrics, self.ranks.predictions, step=step)
