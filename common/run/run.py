"""A training run as a train script uses it: its start, log, checkpoints and end."""

import contextlib
import math
from collections.abc import Generator, Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
from accelerate import Accelerator
from accelerate.optimizer import AcceleratedOptimizer
from accelerate.utils import broadcast_object_list, gather_object
from torch import Tensor, nn

from common.checkpoint.saver import Saver
from common.checkpoint.training import TrainingState
from common.distributed.agreement import let_main_close_first, once
from common.distributed.peers import begin_exit, on_failure, tell_failure
from common.distributed.preemption import Preempted, agreed, reason
from common.optim import EMA
from common.order import Steps
from common.recipe import Batch, Recipe
from common.run.exchange import Exchange
from common.run.failure import WRITING_GRACE_S, explained, interruption
from common.run.meter import Meter
from common.run.opening import open_run
from common.run.output import RunOutput, note_early_preemption
from common.run.planned import read_plan
from common.run.predictions import Predictions
from common.run.schedule import SaveSchedule
from common.run.state import RunState
from common.run.utilisation import utilisation
from common.system.doing import ENDING, EVALUATION, READING, SAVING, STARTING, TRAINING, now, spending
from common.system.events import report
from common.system.threads import Heartbeat
from common.telemetry.flops import Utilisation
from common.telemetry.memory import memory_gib
from common.telemetry.profiler import STEPS, Profile

if TYPE_CHECKING:  # train_hello.py has no images, and starts faster without these imports
    from common.evaluation import Predicted

Item = TypeVar("Item")


class Run:
    """A context manager around a training. All processes call it; the main process writes and prints.

    Raises ValueError for a wrong --plan, when the folder holds another run or can't be written, or when
    memory runs out, with the size to try. Raises Preempted, after saving, when a process was told to stop.
    """

    # Set by begin()
    steps: Steps
    saver: Saver
    exchange: Exchange
    schedule: SaveSchedule

    def __init__(self, accelerator: Accelerator, recipe: Recipe, batch: Batch):
        self.accelerator, self.recipe, self.batch = accelerator, recipe, batch
        self.state = RunState()
        self.saved_step = 0  # of the newest snapshot, or of the checkpoint in the folder
        self.meter = Meter(accelerator.device, batch, recipe.log_samples)
        self.predictions = Predictions()
        self.tested: dict[str, Any] = {}  # parts of result.json about the test split
        self.output: RunOutput | None = None  # of the main process, once the run has begun
        self.profile: Profile | None = None  # of the main process, with --profile
        self.utilisation: Utilisation | None = None  # of the main process
        self.begun = False
        self.plan = read_plan(accelerator, recipe)

    def begin(
        self,
        model: nn.Module,
        optimizer: AcceleratedOptimizer,
        steps: Steps,
        *,
        data: tuple[str, tuple[str, ...]],
        ema: EMA | None = None,
    ) -> Steps:
        """Opens the run's folder and restores the newest checkpoint. Returns the steps left. Collective.

        Call it after prepare() and before the first forward. data: a name that changes with its content, and
        the names of the classes.
        """
        training = TrainingState(self.accelerator, model, optimizer, ema)
        opened = open_run(self.accelerator, self.recipe, self.batch, training, data, steps, self.plan)
        self.state, self.saved_step, self.output = opened.state, opened.saved_step, opened.output
        self.saver, self.exchange = opened.saver, opened.exchange
        self.steps = replace(steps, first=self.state.step)
        self.predictions.classes = data[1]
        self.meter.resume(self.state, self.accelerator.process_index)
        self.meter.start_clock()
        self.schedule = SaveSchedule(self.recipe, steps.per_epoch)
        self._begin_profile(model, optimizer)
        if self.output:
            self.utilisation = utilisation(self.accelerator, self.recipe, len(data[1]), opened.devices)
        now.enter(TRAINING)
        now.step = self.state.step
        self.begun = True
        on_failure(self._close_failed)
        return self.steps

    def _begin_profile(self, model: nn.Module, optimizer: AcceleratedOptimizer) -> None:
        first = self.recipe.profile
        if first is None:
            return
        if first + STEPS - 1 > self.steps.last:
            raise ValueError(
                f"--profile {first}: {STEPS} steps from step {first:,} on, and the run ends at step"
                f" {self.steps.last:,}: choose at most {self.steps.last - STEPS + 1:,}"
            )
        if self.output and self.state.step < first:
            self.profile = Profile(self.accelerator, model, optimizer, first, self.output.folder)
            self.profile.begin(self.state.step)
        elif self.output:
            print(f"no new profile: the run goes on behind step {first:,}", flush=True)

    @property
    def folder(self) -> Path:
        """The run's folder. Main process only."""
        assert self.output
        return self.output.folder

    def __enter__(self) -> "Run":
        return self

    def __exit__(self, _: object, error: BaseException | None, trace: object) -> None:
        if self.begun:
            self.exchange.telemetry.stop()
        if error is None:
            self._close("finished")
        elif isinstance(error, Preempted):
            self._end_preempted()
        else:
            self._end_failed(error)

    def should_evaluate(self, step: int) -> bool:
        """True when an epoch or the run ends after `step` steps and is not evaluated yet."""
        ends = step % self.steps.per_epoch == 0 or step == self.steps.last
        due = step > 0 and ends and not self.state.evaluated
        now.enter(EVALUATION if due else TRAINING)
        return due

    def checkpoint(self, step: int) -> None:
        """Saves if a checkpoint is due after `step` steps. Collective.

        A snapshot of a new best evaluation that is not due stays in memory until --checkpoint_s after the
        last write. Raises Preempted when any process was told to stop, ValueError when a write failed.
        """
        self.exchange.listen_after(step)
        if step > self.saved_step:
            due = self.schedule.is_due(step, self.saver, self.exchange)
            if due or step in (self.steps.last, self.steps.first):
                self._save()
            elif step == self.state.best_step:
                self._save(hold=True)
        self.saver.write_held(self.recipe.checkpoint_s)
        if step == self.steps.last:
            now.enter(ENDING)

    def restore_best(self) -> bool:
        """Gives the model the weights of the best evaluation, or their EMA if there is one. Collective.

        Call it after the checkpoint of the last step. Returns False if those weights are gone.
        """
        assert self.saved_step == self.state.step == self.steps.last
        step, output = self.state.best_step, self.output

        def find(beat: Heartbeat) -> bool:
            assert output
            assert step
            return output.find_best(step, beat)

        found = once(self.accelerator, "best checkpoint", find, self.recipe.timeout_s)
        if found:
            self.saver.training.restore_evaluated(output.best if output else None)
            now.enter(EVALUATION)
        return found

    def log_test(self, metrics: dict[str, float], split: str) -> None:
        """Logs the best weights' metrics on the data's own held-out split, by which nothing was chosen.

        metrics: of evaluate(), after restore_best().
        """
        now.enter(ENDING)
        self.tested = {f"test_{name}": value for name, value in metrics.items()} | {"test_name": split}
        self.predictions.accept(f"{split} split, best weights")
        if self.output:
            self.output.log.write_test(self.state, metrics, split, self.predictions)

    def finish(self, val_name: str) -> None:
        """Waits for the last checkpoint, writes plots/ and result.json, and prints the table. Collective."""
        now.enter(ENDING)
        exchange, output = self.exchange, self.output
        exchange.poll.finish()
        exchange.telemetry.stop()
        memory = exchange.gather(memory_gib(self.accelerator, is_healthy=True))
        self.predictions.gather(exchange.poll)

        def finish(beat: Heartbeat) -> None:
            assert output
            if self.profile:
                self.profile.wait(beat)
            known: dict[str, Any] = {"val_name": val_name, "memory": memory, "tested": self.tested}
            known["utilisation"] = self.utilisation
            output.finish(self.state, self.predictions, exchange.telemetry, known, beat)

        def upload(beat: Heartbeat) -> None:
            assert output
            output.upload(self.state, beat)

        once(self.accelerator, "report", finish, self.recipe.timeout_s)
        once(self.accelerator, "last upload", upload, self.recipe.timeout_s)
        begin_exit()
        self.accelerator.wait_for_everyone()  # under deepspeed rank 0 hosts the store that the others use
        if output:
            report("finished")

    def feed(self, batches: Iterator[Item]) -> Iterator[Item]:
        """Yields the micro-batches. The clock starts at the first one, as decoders take time to start."""
        now.enter(STARTING)
        now.phase = READING
        with contextlib.ExitStack() as stack:
            if isinstance(batches, Generator):
                stack.callback(batches.close)  # its decoders end with this generator
            for number, item in enumerate(self.profile.watch(batches) if self.profile else batches):
                if number == 0:
                    self.meter.start_clock()
                now.enter(TRAINING)
                yield item
                now.enter(READING)

    def add(self, loss: Tensor, ids: np.ndarray) -> None:
        """Adds a micro-batch. Its loss stays on the device until the next line of the log."""
        self.meter.add(loss, ids)
        if self.output:
            done = self.steps.first + self.meter.micro_batches // self.batch.accumulations
            self.output.log.progress.advance(done)

    def log_training(self, step: int, lr: float) -> None:
        """Ends a step. Every --log_every steps, and at the end of an epoch, it waits for the device and logs
        mean loss, learning rate and speed since the last line. Collective.

        Raises FloatingPointError on all processes when the loss is not finite.
        """
        if self.profile:
            self.profile.end_step(step)
        self.state.end_step(step)
        now.step = step
        self.meter.end_step()
        if self.output:
            self.output.tell_launcher(step)
            if step == self.steps.first + 1:
                self.output.log.end_interruption(step, self.state.wall_now_s())
        if step % self.recipe.log_every and step % self.steps.per_epoch and step != self.steps.last:
            return
        state, meter = self.state, self.meter
        loss = meter.mean_loss(self.accelerator, step - state.logged_step)
        spent_s = meter.start_clock()
        images = (step - max(state.logged_step, self.steps.first)) * self.batch.total
        state.train_s += spent_s
        self._write_samples()
        state.logged_step = step
        if not math.isfinite(loss):
            raise FloatingPointError(f"the loss is {loss} at step {step} with learning rate {lr:g}")
        if self.output:
            values = {"train/loss": loss, "train/lr": lr}
            if self.utilisation and (mfu_pct := self.utilisation.pct(images / spent_s)) is not None:
                values["train/mfu_pct"] = mfu_pct
            values["train/images_per_s"] = images / spent_s
            self.output.log.write(step, state.wall_now_s(), values, self.exchange.telemetry.means())

    def tell(self, doing: str) -> None:
        """Shows an evaluation's progress without waiting for the device. May raise Preempted. Collective."""
        if self.output:
            self.output.log.tell(doing)
        self.exchange.listen()

    def keep(self, confusion: Tensor | None, examples: "list[Predicted]") -> None:
        """Holds an evaluation's confusion matrix and examples until its metrics are logged."""
        self.predictions.keep(confusion, examples)

    def log_evaluation(self, step: int, metrics: dict[str, float]) -> None:
        """Logs an evaluation. metrics: loss, images and, with classes, accuracy; with an EMA raw_accuracy."""
        now.enter(TRAINING)
        self.meter.start_clock()
        self.state.add_evaluation(step, metrics)
        self.predictions.accept(f"step {step:,}")
        if self.output:
            self.output.log.write_evaluation(step, self.state.wall_now_s(), metrics, self.predictions)

    def _save(self, hold: bool = False) -> None:
        """Takes a snapshot, and writes it in the background or holds it in memory. Collective."""
        with spending(SAVING):
            self._take_snapshot(hold)

    def _take_snapshot(self, hold: bool) -> None:
        if self.state.best_step != self.state.step:
            self.saver.write_held()  # the best evaluation's
        self.exchange.wait_for_main(self.saver.done)
        step, state, meter = self.state.step, self.state, self.meter
        losses = self.exchange.gather(meter.loss.item())
        if not all(math.isfinite(loss) for loss in losses):
            raise FloatingPointError(f"the loss is {sum(losses)} before step {step}: nothing was saved")
        self._write_samples()
        content = state.at_save(
            losses=losses,
            accumulations=self.batch.accumulations,
            epoch=step / self.steps.per_epoch,
            train_s=state.train_s + meter.elapsed_s(),
            **self.saver.training.scalars(),
            **(self.output.log.tracker_ids() if self.output else {}),
        ).to_json()
        self.saver.save(step, content, state.best_step, hold)
        self.saved_step = step

    def _write_samples(self) -> None:
        """Logs the sample ids since the last call, of each step in the order of its batch. Collective."""
        if not self.recipe.log_samples:
            return
        per_rank = gather_object([self.meter.take_ids()])
        if self.output:
            share = self.batch.per_device * self.batch.accumulations
            self.output.log.write_samples(self.state.step, per_rank, share)

    # --- Ending

    def _end_preempted(self) -> None:
        """Saves once. The others wait for the main process, because a launcher kills all when one exits."""
        agreed()
        if not self.begun:
            if self.accelerator.is_main_process:
                note_early_preemption(self.accelerator, self.recipe, self.batch)
            let_main_close_first(self.accelerator)
            return
        now.enter(SAVING)
        why = next(filter(None, self.exchange.poll.gather(reason())), "")
        if self.output:
            self.output.log.write_interruption(self.state.step, self.state.wall_now_s(), why)
        # A single process may stop within a step, while it waits for a shard: that step does not count.
        if self.state.step == self.saved_step:
            self.saver.write_held()
            self.exchange.gather(None)  # collects the telemetry since then
        else:
            try:
                self._save()
            except FloatingPointError:
                self._close("failed")
                raise
        self.exchange.wait_for_main(self.saver.done)
        problem = self.exchange.problem()
        self._close("failed" if problem else "preempted")
        if problem := broadcast_object_list([problem])[0]:
            raise ValueError(problem)

    def _end_failed(self, error: BaseException) -> None:
        """Raises the error that all processes report, explained if its cause is known."""
        begin_exit()
        now.enter(ENDING)
        if self.begun and not isinstance(error, RuntimeError):  # after a device error this would fail, too
            self.saver.write_held()
        if isinstance(error, KeyboardInterrupt):
            saver, first_step = (self.saver, self.steps.first) if self.begun else (None, 0)
            mine: BaseException = interruption(self.accelerator, self.recipe, self.batch, saver, first_step)
        else:
            parameters = self.saver.training.layout.parameters if self.begun else ()
            folder = self.output.folder if self.output else None
            mine = explained(error, self.accelerator, self.batch, parameters, folder)
        first = tell_failure(mine)
        interrupted = isinstance(first, KeyboardInterrupt)
        self._close_failed("interrupted" if interrupted else str(first) or type(first).__name__)
        let_main_close_first(self.accelerator)
        if first is not error:
            raise first from error

    def _close_failed(self, error: str) -> None:
        """Closes the run. Waits up to WRITING_GRACE_S for a checkpoint in flight."""
        if self.output:
            self.saver.done(WRITING_GRACE_S)
            self._close("failed", error)

    def _close(self, status: str, error: str | None = None) -> None:
        if self.output:
            self.output.close(self.state, status, error)
