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
from onecurve.system.env import report_to_launcher
from onecurve.system.output import log
from onecurve.system.phase import ENDING, EVALUATION, FIRST_EVALUATION, READING, STARTING, TRAINING, now

if TYPE_CHECKING:  # Imported lazily at runtime
    from onecurve.distributed.ema import EMA
    from onecurve.models.preprocessing import DataConfig
    from onecurve.run.evaluation import Mistake, PredictedBatch
    from onecurve.run.record import MainRecord
    from onecurve.run.schemas import EndEntries
    from onecurve.run.session import RunSession
    from onecurve.system.threads import Heartbeat
    from onecurve.telemetry.profiler import Profile

MicroBatch = TypeVar("MicroBatch")


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
        self.test_entries: EndEntries = {}  # result.json entries for the test split
        self.opened_session: RunSession | None = None  # State of the run after begin()
        self._preprocessing: DataConfig | None = None
        self.profile: Profile | None = None  # Set only with --profile on the main process
        self.has_training_ended = False  # True after the last step
        self.has_finished = False  # True after finish()
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
        from onecurve.run.run_setup import RunSetup

        _, class_names, *_ = data
        training = TrainingState(self.accelerator, model, optimizer, ema, class_names)
        job_parts = (self.accelerator, self.recipe, self.batch)
        # The items of `data` are data_identity, classes and, for images, are_images_cropped.
        run_setup = RunSetup(*job_parts, steps, training, *data, preprocessing=preprocessing)
        self.opened_session = session = run_setup.open_session()
        self._preprocessing, main_record = run_setup.preprocessing, session.main_record
        if first_profiled_step := self.recipe.profile:
            from onecurve.telemetry.profiler import begin_profile

            device, folder = self.accelerator.device, main_record.folder if main_record else None
            completed_steps, last_step = session.steps.first, session.steps.last
            self.profile = begin_profile(device, first_profiled_step, completed_steps, last_step, folder)
        now.enter(TRAINING)
        now.step = session.state.step
        if main_record:
            watch.on_failure(main_record.close_failed)  # Called if another rank fails
        return session.steps

    @property
    def session(self) -> "RunSession":
        """State that all ranks share. This property is available after begin()."""
        assert self.opened_session, "call run.begin() first"
        return self.opened_session

    @property
    def preprocessing(self) -> "DataConfig":
        """Image preprocessing of the run. This property is available after begin() with `preprocessing`."""
        assert self._preprocessing, "call run.begin() with the argument preprocessing first"
        return self._preprocessing

    @property
    def main_record(self) -> "MainRecord":
        """Record of the run, which exists only on the main process."""
        assert self.session.main_record
        return self.session.main_record

    @property
    def folder(self) -> Path:
        """Folder of the run, which is known only on the main process."""
        return self.main_record.folder

    def __enter__(self) -> "Run":
        import onecurve.run.ending  # noqa: F401  # Imported now, because the import could fail after an error

        return self

    def __exit__(self, _error_type: object, error: BaseException | None, _traceback: object) -> None:
        """Close the run after its end, a signal or an error, and report the error to other ranks.

        Raises:
            ValueError: If the script left the run without an error and without a call to finish().
            BaseException: Another rank's error, or an error that explains `error`.
        """
        from onecurve.run.ending import end_early, end_failed, end_preempted

        session, job_parts = self.opened_session, (self.accelerator, self.recipe, self.batch)
        if session:
            session.exchange.telemetry.stop()
        if isinstance(error, Preempted):
            stop_reason = watch.confirm_stop()
            if session:
                end_preempted(session, stop_reason)
            else:
                end_early(*job_parts)
        elif error is not None:
            end_failed(error, *job_parts, session)
        elif session and not self.has_finished:
            unfinished_error = ValueError(
                "the script left its run without a call to run.finish(). End the loop with `break`"
            )
            end_failed(unfinished_error, *job_parts, session)
            raise unfinished_error
        elif session and session.main_record:
            session.main_record.close("finished")

    def should_evaluate(self, step: int) -> bool:
        """Return True if an epoch or the run ends after `step` steps, unless this step has been evaluated."""
        session = self.session
        ends_epoch = step % session.steps.per_epoch == 0
        ends_run = step == session.steps.last or session.ends_early()
        is_evaluation_due = step > 0 and (ends_epoch or ends_run) and not session.state.evaluated
        if is_evaluation_due:
            is_first_evaluation = not {EVALUATION, FIRST_EVALUATION} & now.past_s.keys()
            now.enter(FIRST_EVALUATION if is_first_evaluation else EVALUATION, phase=EVALUATION)
        else:
            now.enter(TRAINING)
        return is_evaluation_due

    def checkpoint(self, step: int) -> None:
        """Save a checkpoint if one is due after `step` steps. All ranks must call this method.

        If the evaluation at this step is the best so far, but no checkpoint is due, a snapshot is held in
        memory. The snapshot is written --checkpoint_s seconds after the last write.

        Raises:
            Preempted: If a process received a signal.
            ValueError: If a write failed.
        """
        self.session.exchange.exchange_signals_if_due(step)
        if self.is_last(step):
            self._end_training()
        else:
            self.session.save_if_due(step)

    def is_last(self, step: int) -> bool:
        """Return True if the run ends after `step` steps, either as planned or early after an evaluation."""
        session = self.session
        return step == session.steps.last or (session.state.evaluated and session.ends_early())

    def stop(self) -> None:
        """End the run with the status `finished`.

        The run ends at this step if this step has been evaluated, otherwise at the next step. All processes
        must call this method at the same step. Schedules still span all epochs.
        """
        self.session.state.stopped = True

    def _end_training(self) -> None:
        """Stop reading data, start writing the last checkpoint, and print the reason for an early end.

        All ranks must call this method. Further calls have no effect.

        Raises:
            ValueError: If the run has not been evaluated, or if a write failed.
        """
        from onecurve.run.end_tables import early_end_in_words

        session = self.session
        now.enter(ENDING)
        if self.batch_generator:
            self.batch_generator.close()  # Stops the decoders, which would continue with the next steps
        if session.state.step < session.steps.last and not session.ends_early():
            session.state.stopped = True  # The script has left its training loop
        session.write_newest_snapshot()
        early_end_phrase = early_end_in_words(session.end_entries())
        if session.main_record and early_end_phrase and not self.has_training_ended:
            log.info(f"the run {early_end_phrase}")
        self.has_training_ended = True
        if not session.state.best:
            raise ValueError(
                "the script left its loop before the first evaluation. Add an evaluation to the training loop"
            )

    def restore_best(self) -> bool:
        """Load the best checkpoint's EMA into the model, or the weights if the run has no EMA.

        The method returns False, and leaves the model unchanged, if the best checkpoint is lost. All ranks
        must call this method after the training loop.
        """
        self._end_training()
        session, timeout_s = self.session, self.recipe.timeout_s
        is_best_restored = once(  # The main process finds the checkpoint. All ranks receive the result
            self.accelerator,
            "best checkpoint",
            lambda heartbeat: self.main_record.find_best_checkpoint(heartbeat),
            timeout_s,
        )
        if is_best_restored:
            best_checkpoint = session.main_record.best_checkpoint if session.main_record else None
            session.saver.training.restore_evaluated(best_checkpoint)
            now.enter(EVALUATION)
        return is_best_restored

    def log_test(self, metrics: dict[str, float], split: str) -> None:
        """Log the best weights' metrics on a held-out split, and keep the metrics for result.json.

        Args:
            metrics: Metrics that evaluate() returned after restore_best().
            split: Name of the split, which was not used to select the best weights.
        """
        now.enter(ENDING)
        test_metrics = {f"test_{metric_name}": metric_value for metric_name, metric_value in metrics.items()}
        self.test_entries = cast("EndEntries", test_metrics | {"test_name": split})
        self.session.predictions.accept_kept(f"{split} split, best weights")
        if main_record := self.session.main_record:
            best_step = main_record.state.best_step
            main_record.log.log_evaluation(
                "test", metrics, self.session.predictions, step=best_step, split=split
            )

    def finish(self, val_name: str) -> None:
        """Wait for the last checkpoint, write plots/ and result.json, upload the run, and print the result.

        All ranks must call this method.

        Args:
            val_name: Name of the split on which the run was evaluated.
        """
        from onecurve.run.record import memory_gib

        self._end_training()
        session, timeout_s = self.session, self.recipe.timeout_s
        exchange, predictions = session.exchange, session.predictions
        exchange.poll.finish()  # Waits for the last exchange of signals
        exchange.telemetry.stop()
        memory_by_rank = exchange.gather(memory_gib(self.accelerator, is_gpu_responsive=True))
        predictions.gather_examples(exchange.poll)
        final_entries: EndEntries = {"val_name": val_name, "memory_gib": memory_by_rank}
        final_entries.update(self.test_entries)
        final_entries.update(session.end_entries())

        def write_end(heartbeat: "Heartbeat") -> None:
            self.main_record.write_end(final_entries, predictions, exchange.telemetry, heartbeat)

        # The main process writes and uploads the result, while the other ranks wait.
        once(self.accelerator, "report", write_end, timeout_s)
        once(self.accelerator, "last upload", lambda heartbeat: self.main_record.upload(heartbeat), timeout_s)
        watch.begin_exit()  # From now on, another rank's failure can't terminate this process
        # With the deepspeed launcher, rank 0 hosts all ranks' store, so rank 0 must not exit first.
        self.accelerator.wait_for_everyone()
        if self.session.main_record:
            report_to_launcher("finished")
        self.has_finished = True

    def feed(self, batches: Iterator[MicroBatch]) -> Iterator[MicroBatch]:
        """Return an iterator over the same micro-batches that times training and reading.

        The clock starts at the first micro-batch, because decoders start slowly. The run closes the iterator
        after the last step.
        """
        self.batch_generator = self._timed_batches(batches)
        return self.batch_generator

    def _timed_batches(self, batches: Iterator[MicroBatch]) -> Generator[MicroBatch, None, None]:
        """Yield the micro-batches, and record whether this process is training or waiting for data."""
        now.enter(STARTING, phase=READING)  # The first micro-batch is part of the run's start
        with contextlib.ExitStack() as cleanup_stack:
            if isinstance(batches, Generator):
                cleanup_stack.callback(batches.close)  # Ends the decoders when this generator ends
            for micro_batch_index, micro_batch in enumerate(batches):
                if micro_batch_index == 0:
                    self.session.meter.restart_clock()
                now.enter(TRAINING)
                yield micro_batch
                now.enter(READING)

    def add(self, loss: Tensor, ids: np.ndarray) -> None:
        """Add a micro-batch's loss and sample ids to the next log line, and advance the progress display.

        The loss stays on the device until the next log line.
        """
        self.session.meter.add(loss, ids)
        if main_record := self.session.main_record:
            trained_steps = self.session.meter.micro_batch_count // self.batch.accumulations
            main_record.log.progress.advance(main_record.steps.first + trained_steps)

    def log_training(self, step: int, lr: float) -> None:
        """End a training step, and write a log line if one is due. All ranks must call this method.

        Every --log_every steps and at the end of each epoch, this method waits for the device. It then logs
        the learning rate, and the mean loss and speed since the last log line.

        Raises:
            FloatingPointError: If the loss is not finite. All processes raise this error.
        """
        assert not self.has_training_ended, "the training loop must end when run.is_last(step) returns True"
        session, meter = self.session, self.session.meter
        state, steps, main_record = session.state, session.steps, session.main_record
        if self.profile:
            self.profile.end_step()
        state.end_step(step)
        now.step = step
        meter.end_step()
        if main_record:
            main_record.log.end_step()
        ends_epoch, ends_run = step % steps.per_epoch == 0, step == steps.last or state.stopped
        if step % self.recipe.log_every != 0 and not (ends_epoch or ends_run):
            return
        meter.check_gradients(step)
        mean_loss = meter.mean_loss(step - state.logged_step)
        elapsed_s = meter.restart_clock()
        # A process that resumed the run after the last log line has timed only the steps after `first`.
        images_per_s = (step - max(state.logged_step, steps.first)) * self.batch.total / elapsed_s
        session.write_samples()
        state.train_s += elapsed_s
        state.logged_step = step
        if not math.isfinite(mean_loss):
            raise FloatingPointError(f"the loss is {mean_loss} at step {step} with a learning rate of {lr:g}")
        if main_record:
            training_metrics = {"train/loss": mean_loss, "train/lr": lr}
            utilisation = main_record.utilisation
            mfu_pct = utilisation.mfu_pct(images_per_s) if utilisation else None
            if mfu_pct is not None:
                training_metrics["train/mfu_pct"] = mfu_pct
            training_metrics["train/images_per_s"] = images_per_s
            main_record.log.log_metrics(training_metrics, session.exchange.telemetry.measurement_means())

    def show_progress(self, text: str) -> None:
        """Show an evaluation's progress, and exchange signals with all ranks, without waiting for the device.

        All ranks must call this method. Raise Preempted if a process received a signal.
        """
        if main_record := self.session.main_record:
            main_record.log.progress.tell(text)
        self.session.exchange.exchange_signals()

    def keep_predictions(self, confusion: "Tensor | list[Mistake]", examples: "list[PredictedBatch]") -> None:
        """Store an evaluation's predictions until its metrics are logged.

        `confusion` is a confusion matrix, int64 [classes, classes], or the most frequent mistakes for a model
        with too many classes. `examples` are this process's sample predictions.
        """
        self.session.predictions.keep_evaluation(confusion, examples)

    def log_scalars(self, values: Mapping[str, float | Tensor]) -> None:
        """Add scalars from the main process to the next training or evaluation line of the log.

        If a name is repeated, the last value is logged. A tensor stays on its device until the line is
        logged. Raise ValueError if a name contains no group, such as `train/`.
        """
        for tag in values:
            if "/" not in tag:
                raise ValueError(f"log_scalars: the name {tag} needs a group, for example train/{tag}")
        if main_record := self.session.main_record:
            main_record.log.pending_scalars.update(values)

    def log_evaluation(self, step: int, metrics: dict[str, float]) -> None:
        """Log an evaluation's metrics, and update the best evaluation.

        The run uses the predictions from the last keep_predictions() for confusion.json and plots/.

        Args:
            step: Number of completed training steps.
            metrics: Metrics `loss` and `images`, `accuracy` for models with classes, and `raw_accuracy` with
                an EMA.

        Raises:
            FloatingPointError: If the loss is not finite. All processes raise this error.
        """
        now.enter(TRAINING)
        self.session.meter.restart_clock()  # Excludes the evaluation from the training time
        if not math.isfinite(metrics["loss"]):
            raise FloatingPointError(f"the evaluation loss is {metrics['loss']} at step {step}")
        self.session.state.add_evaluation(step, metrics, self.recipe.best_by)
        self.session.predictions.accept_kept(f"step {step:,}")
        if main_record := self.session.main_record:
            main_record.log.log_evaluation("val", metrics, self.session.predictions, step=step)
