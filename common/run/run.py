"""One run: its folder, its checkpoints, what it says, its result."""

import contextlib
import errno
import math
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from accelerate import Accelerator
from accelerate.optimizer import AcceleratedOptimizer
from accelerate.utils import broadcast_object_list, gather_object
from torch import Tensor, nn

from common.checkpoint.format import Checkpoint, steps_in, write_index
from common.checkpoint.saver import Saver
from common.checkpoint.training import TrainingState
from common.data import bad_images
from common.distributed import accelerator as job
from common.distributed.agreement import first_mistake, let_main_close_first, once
from common.distributed.preemption import Poll, Preempted, agreed, wanted
from common.optim import EMA
from common.recipe import Batch, Recipe, recipe_part
from common.report import summary as report
from common.run.facts import VAL_CHOSEN, about_run, draw_predictions, result, run_name
from common.run.folder import count_restarts, open_folder, resumed_from
from common.run.log import RunLog
from common.run.owner import RECORD
from common.run.place import Place, open_place
from common.system.files import not_written, read_json, sync, write_json
from common.system.processes import own_age_s
from common.system.s3 import StoreError
from common.telemetry.collect import Telemetry, own_seat
from common.telemetry.memory import is_out_of_memory, memory_gib, out_of_memory

if TYPE_CHECKING:  # train_hello.py has no images, and starts sooner without what reads them
    from common.evaluation import Predicted

STOP, PROBLEM = 1, 2  # what a process tells the others at each step
WRITING_GRACE_S = 8  # how long a failed run waits for a checkpoint in flight: the others wait 10 s for it
UPLOAD_GRACE_S = 15  # how long a preempted run waits for S3: launchers kill 30 s after SIGTERM


class Run:
    """A context manager around a training. All processes call it, the main process writes and prints.

    Raises ValueError when the folder holds another run or can't be written, or when the training inside ran
    out of memory: then with the size to try. Preempted when a process was told to stop, after saving.
    """

    def __init__(self, accelerator: Accelerator, recipe: Recipe, batch: Batch):
        self.accelerator, self.recipe, self.batch = accelerator, recipe, batch
        self.is_main = accelerator.is_main_process
        # summed over the micro-batches since the last line
        self.loss = torch.zeros((), device=accelerator.device)  # of the steps since the last line
        self.step_loss = torch.zeros_like(self.loss)  # of the step that is not done
        self.ids: list[int] = []  # of the samples since the last line, for --log_samples
        self.micro_batches = 0  # of this process, since it started
        self.first_step = self.step = self.logged_step = self.saved_step = self.evaluated_step = 0
        self.train_s = self.earlier_wall_s = 0.0
        self.best: dict[str, float] = {}
        self.last: dict[str, float] = {}
        self.kept: tuple[Tensor | None, list[Predicted]] = (None, [])  # by an evaluation; once it is logged:
        self.confusion: Tensor | None = None  # a row per true class; None where there are none, or too many
        self.examples: list[Predicted] = []  # this process's share of the predictions that are drawn
        self.memory: list[dict[str, float]] = []  # of each process, at the end
        self.bad_images: set[int] = set()  # of the main process: samples that were skipped by any
        self.error: str | None = None  # what a failed run ended with
        self.val_name: str | None = None  # of the split that was evaluated, once the run has finished
        self.place: Place | None = None  # of the main process, once it is open
        self.log: RunLog | None = None  # of the main process, once the run has begun
        self.telemetry: Telemetry | None = None  # once the run has begun
        self.begun = False

    def begin(
        self,
        model: nn.Module,
        optimizer: AcceleratedOptimizer,
        ema: EMA | None,
        data: tuple[str, tuple[str, ...]],
        steps: int,
        steps_per_epoch: int,
    ) -> int:
        """Opens the run's folder and restores the newest checkpoint: the step to go on at, or 0. Collective.

        After prepare, before the first forward. data: a name that changes with its content, and the names of
        the classes; steps: optimizer steps of this run; steps_per_epoch: of one epoch.
        """
        self.steps, self.steps_per_epoch = steps, steps_per_epoch
        self.data, self.classes = data
        self.training = TrainingState(self.accelerator, model, optimizer, ema)
        self.poll = Poll(self.recipe.timeout_s)
        seats = gather_object([own_seat(self.accelerator)])
        state = once(self.accelerator, "run folder", self._open, self.recipe.timeout_s)
        if state:
            found = self.place.checkpoint if self.is_main else None
            self.training.restore(found, state, with_optimizer=state["has_optimizer"])
            self._go_on(state)
        began_with = (state or {}).get("resumed_from")
        about = about_run(self.accelerator, self.recipe, seats, began_with, self.data)
        once(self.accelerator, "log", lambda _: self._start_log(about, state), self.recipe.timeout_s)
        self.saver = Saver(
            self.training,
            self.folder if self.is_main else None,
            self.recipe.keep_every,
            self._described(about),
            self.place.mirror if self.is_main else None,
            self.saved_step or None,
        )
        rank, folder = self.accelerator.process_index, self.folder if self.is_main else None
        self.telemetry = Telemetry(seats, rank, folder, self.recipe.telemetry_s, lambda: self.step, steps)
        self.mark = time.perf_counter()
        self.begun = True
        return self.first_step

    def __enter__(self) -> "Run":
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self.telemetry:
            self.telemetry.stop()
        if kind is None:
            self._close("finished")
            return
        if isinstance(error, Preempted):
            self._end_preempted()
            return
        mine = error
        if is_out_of_memory(error):
            mine = ValueError(out_of_memory(self.accelerator, self.batch))
        elif self.begun and (unused := job.unused_parameters(error, list(self.training.layout.parameters))):
            mine = ValueError(job.without_gradient(unused))
        elif isinstance(error, KeyboardInterrupt):
            mine = KeyboardInterrupt(*self._where_it_goes_on())
        elif isinstance(error, OSError) and error.errno == errno.ENOSPC and self.begun and self.is_main:
            mine = not_written("the run", self.folder, error)  # by the script itself
        first = first_mistake(mine)
        if self.is_main and self.begun:
            self.saver.done(WRITING_GRACE_S)
            interrupted = isinstance(first, KeyboardInterrupt)
            self.error = "interrupted" if interrupted else str(first) or type(first).__name__
            self._close("failed")
        elif self.place:
            self.place.release()
        let_main_close_first(self.accelerator)
        if first is not error:
            raise first from error

    def should_evaluate(self, step: int) -> bool:
        """Whether `step` steps end an epoch, or the run, and have not been evaluated."""
        ends = step % self.steps_per_epoch == 0 or step == self.steps
        return step > 0 and ends and step != self.evaluated_step

    def checkpoint(self, step: int) -> None:
        """Saves when that is due after `step` steps. Collective.

        Raises Preempted when any process was told to stop, ValueError when what was written before failed.
        """
        self._listen()
        every = self.recipe.checkpoint_every
        period = self.steps_per_epoch if every == "epoch" else int(every)
        due = step % period == 0 or step in (self.steps, self.first_step) or self.best.get("step") == step
        if due and step > self.saved_step:
            self._save()

    def finish(self, val_name: str) -> None:
        """Waits for the last checkpoint, writes plots/ and result.json, prints the table. Collective."""
        self.val_name = val_name
        self.poll.finish()
        self.telemetry.stop()
        self.memory = self._gathered(memory_gib(self.accelerator, is_healthy=True))
        on_cpu = [part.to("cpu") for part in self.examples]
        self.examples = [part for parts in self.poll.gather(on_cpu) for part in parts]
        once(self.accelerator, "report", self._finish, self.recipe.timeout_s)
        once(self.accelerator, "last upload", self._wait_for_upload, self.recipe.timeout_s)
        self.accelerator.wait_for_everyone()  # under deepspeed rank 0 keeps the store that the others ask

    def feed(self, batches: Iterator[tuple]) -> Iterator[tuple]:
        """The micro-batches. The clock starts at the first: the start of decoders is not training time."""
        first = next(batches)
        self.mark = time.perf_counter()
        yield first
        yield from batches

    def add(self, loss: Tensor, ids: np.ndarray) -> None:
        """One micro-batch: its loss stays on the device until the next line."""
        self.step_loss += loss.detach()
        self.micro_batches += 1
        done = self.first_step + self.micro_batches // self.batch.accumulations
        if self.is_main:
            self.log.progress.advance(done)
        if self.recipe.log_samples:
            self.ids.extend(ids.tolist())

    def log_training(self, step: int, lr: float) -> None:
        """Every --log_every steps, and where an epoch ends, one line on the steps since the last: mean loss,
        rate, speed. Collective; waits for the device.

        Raises FloatingPointError on all processes when the loss is not finite.
        """
        self.step = step
        self.loss += self.step_loss
        self.step_loss.zero_()
        if step % self.recipe.log_every and step % self.steps_per_epoch and step != self.steps:
            return
        summed = (step - self.logged_step) * self.batch.accumulations
        loss = (self.accelerator.reduce(self.loss, "mean") / summed).item()
        self.loss.zero_()
        now = time.perf_counter()
        images_per_s = self._timed(now, step)
        self._write_samples(step)
        self.logged_step = step
        if not math.isfinite(loss):
            raise FloatingPointError(f"the loss is {loss} at step {step} with learning rate {lr:g}")
        if self.is_main:
            values = {"train/loss": loss, "train/lr": lr, "train/images_per_s": images_per_s}
            self.log.write(step, self.wall_s(), values, self.telemetry.means())

    def tell(self, doing: str) -> None:
        """Shows that an evaluation gets on, without waiting for the device. Collective.

        Raises Preempted when any process was told to stop.
        """
        if self.is_main:
            self.log.tell(doing)
        self._listen()

    def keep(self, confusion: Tensor | None, examples: "list[Predicted]") -> None:
        """What an evaluation found beside its numbers, on the device. It counts when its numbers are logged:
        an EMA's evaluation follows that of the weights themselves.
        """
        self.kept = (confusion, examples)

    def log_evaluation(self, step: int, metrics: dict[str, float]) -> None:
        """Loss, images and, of classes, accuracy on held-out data; with an EMA raw_accuracy, without it."""
        self.mark = time.perf_counter()
        self.last, self.evaluated_step = metrics, step
        self.confusion, self.examples = self.kept
        if not self.best or _score(metrics) > _score(self.best):
            self.best = metrics | {"step": step}
        if self.is_main:
            values = {f"val/{name}": value for name, value in metrics.items() if name != "images"}
            self.log.write(step, self.wall_s(), values)
            if self.confusion is not None:
                self.log.write_confusion(step, self.classes, self.confusion.tolist())

    # --- Beginning

    @property
    def folder(self) -> Path:
        """Of the main process."""
        return self.place.folder

    def _open(self, beat: Callable[[], None]) -> dict[str, Any] | None:
        """Of the main process: finds the folder and the checkpoint. Returns its state; None: a fresh run."""
        name = run_name(self.accelerator, self.recipe, self.batch)
        self.place = open_place(self.recipe, name, self.steps, beat, self._say)
        folder = self.folder
        found = self.place.checkpoint
        state = None
        if found:
            self._check_data(found)
            self.training.check(found)
            has_optimizer = self._check_optimizer(found)
            state = found.state()
            if found.step > self.steps:
                raise ValueError(
                    f"--max_steps {self.steps}: {found.folder} is at step {found.step:,} already; give more"
                )
            # After the last step only the end is missing, and its pictures show an evaluation.
            state["evaluated"] &= found.step < self.steps
            state |= {"saved": True, "resumed_from": resumed_from(folder), "has_optimizer": has_optimizer}
            if self._saw_other_images(found):
                print("--max_val_images takes other images than before: the best evaluation begins anew")
                state |= {"best": {}, "evaluated": False}
            if self.place.is_new:
                # Another run's best is not this one's, nor its W&B run, and its checkpoint is not here.
                state |= {"best": {}, "evaluated": False, "wandb_id": None, "saved": False}
                state["resumed_from"] = self.recipe.resume
        count_restarts(self.folder, found.step if found else 0)
        if found:
            print(f"continuing at step {found.step:,} with {found.folder}", flush=True)
        return state

    def _check_data(self, found: Checkpoint) -> None:
        """The same numbers must mean the same images still, and the same classes."""
        theirs = found.manifest.get("data", self.data)  # an older run's has none
        if theirs != self.data and "data" not in self.recipe.allow_changed:
            raise ValueError(
                f"{found.folder} was trained on {theirs}, and --data {self.recipe.data} is now {self.data}:"
                " give what it was, or --allow_changed data"
            )

    def _saw_other_images(self, found: Checkpoint) -> bool:
        """True where --max_val_images took the first images of the split, as older versions did."""
        part = getattr(self.recipe, "max_val_images", None)
        return bool(part) and found.manifest.get("written_by", {}).get("val_chosen") != VAL_CHOSEN

    def _check_optimizer(self, found: Checkpoint) -> bool:
        """Whether the checkpoint's optimizer state is this run's; with --allow_changed it need not be."""
        try:
            self.training.optimizer.check(found)
        except ValueError as problem:
            if "optimizer" not in self.recipe.allow_changed:
                raise ValueError(
                    f"{problem}: give that optimizer, or --allow_changed optimizer to start its state afresh"
                ) from None
            self._say(f"the optimizer's state starts afresh: {problem}")
            return False
        return True

    def _go_on(self, state: dict[str, Any]) -> None:
        self.first_step = self.step = state["step"]
        self.saved_step = state["step"] if state["saved"] else 0
        self.logged_step = state["logged_step"]
        self.evaluated_step = state["step"] if state["evaluated"] else 0
        self.best, self.last = state["best"], state["last"]
        self.bad_images = set(state.get("bad_images", ()))  # an older run's has none
        self.train_s, self.earlier_wall_s = state["train_s"], state["wall_s"]
        losses = state["losses"]
        same = len(losses) == self.batch.processes
        mine = losses[self.accelerator.process_index] if same else sum(losses) / len(losses)
        # The mean over the micro-batches stays, however many there are now.
        self.loss.fill_(mine * self.batch.accumulations / state["accumulations"])

    def _start_log(self, about: dict[str, Any], state: dict[str, Any] | None) -> None:
        with self._writing("the log"):
            (self.folder / "result.json").unlink(missing_ok=True)
            self.log = RunLog(self.folder, self.recipe, about, state, self.steps, self.steps_per_epoch)
        if self.place.mirror and self.saved_step:  # what was interrupted before it was uploaded
            self.place.mirror.offer(self.saved_step, self.best.get("step"))
        print(f"run folder {self.folder}", flush=True)

    def _described(self, about: dict[str, Any]) -> dict[str, Any]:
        """What a checkpoint is of, and who writes it, for its manifest."""
        names = ("script", "strategy", "version", "git_commit", "versions", "hosts", "val_chosen")
        writer = {name: about[name] for name in names} | {
            "processes": self.batch.processes,
            "mixed_precision": job.precision(self.accelerator),
        }
        recipe = recipe_part(self.recipe)
        about = {"recipe": recipe, "data": self.data, "classes": self.classes, "written_by": writer}
        return about | self.training.about()

    # --- In the training

    def _listen(self) -> None:
        """Tells the others what this process has to say, and hears what they said at the last call."""
        problem = self._problem()
        heard = self.poll(PROBLEM if problem else STOP if wanted() else 0)
        if heard == PROBLEM:
            raise ValueError(broadcast_object_list([problem])[0])
        if heard == STOP:
            raise Preempted

    def _problem(self) -> str | None:
        """Of the main process, for all to hear."""
        if not self.is_main:
            return None
        return self.place.owner_lost() or self.saver.problem or self.log.problem

    def _save(self) -> None:
        """A snapshot; the rest goes on beside the training. Collective."""
        self.poll.wait_for_main(self.is_main, self.saver.done)
        losses = self._gathered(self.loss.item())
        if not all(math.isfinite(loss) for loss in losses):
            raise FloatingPointError(f"the loss is {sum(losses)} before step {self.step}: nothing was saved")
        self._write_samples(self.step)
        state = {
            "step": self.step,
            "epoch": self.step / self.steps_per_epoch,
            "evaluated": self.evaluated_step == self.step,
            "best": self.best,
            "last": self.last,
            "logged_step": self.logged_step,
            "losses": losses,  # of each process, summed since the last line
            "accumulations": self.batch.accumulations,
            "train_s": self.train_s + time.perf_counter() - self.mark,
            "wall_s": self.wall_s(),
            "bad_images": sorted(self.bad_images),
            **self.training.scalars(),
        }
        if self.is_main:
            state |= self.log.tracker_ids()
        self.saver.save(self.step, state, self.best.get("step"))
        self.saved_step = self.step

    def _gathered(self, own: Any) -> list[Any]:
        """That of each process. With it the other hosts' telemetry and the skipped images come to the main
        process. Collective."""
        everyones = self.poll.gather((own, self.telemetry.take(), bad_images.seen()))
        if self.is_main:
            self.telemetry.append([piece for _, pieces, _ in everyones for piece in pieces])
            self.bad_images.update(i for *_, bad in everyones for i in bad)
        return [own for own, *_ in everyones]

    def _timed(self, now: float, step: int) -> float:
        """Adds the time since the last line. Returns images/s."""
        images = (step - max(self.logged_step, self.first_step)) * self.batch.total
        spent_s = now - self.mark
        self.train_s += spent_s
        self.mark = now
        return images / spent_s

    # --- Ending

    def _finish(self, beat: Callable[[], None]) -> None:
        """The end on this disk. A kill or a full disk at any point of it costs no training.

        1. The last checkpoint is committed, and index.json names it.
        2. Pictures are drawn into plots/.
        3. The trackers are closed.
        4. result.json says `finished`: where there is a mirror with `uploaded` false.
        5. _wait_for_upload: the checkpoint and the run's files are in S3, result.json last.
        6. result.json says `uploaded` true.

        Before 4 the same command restores the last checkpoint, evaluates it once more, as the pictures show
        that evaluation, and goes through 1 to 4. Between 4 and 6 it does that too, and makes up for the
        upload. After 4, or with a mirror after 6, the run is finished: the same command begins another one.
        """
        self.log.progress.stop()
        self.saver.wait(beat)
        if problem := self._problem():
            raise ValueError(problem)
        with self._writing("the end of the run"):
            # An evaluation that was interrupted and made up for came after its checkpoint.
            best = self.best.get("step")
            write_index(self.folder / "checkpoints", self.step, best)
            if self.place.mirror:
                self.place.mirror.offer(self.step, best)
            found = result(self, "finished") | ({"uploaded": False} if self.place.mirror else {})
            self._draw(found)
            self.log.close(failed=False)
            for file in (self.folder / "metrics.jsonl", *self.folder.glob("plots/*")):
                sync(file)
            write_json(self.folder / "result.json", found)
        report.show(self.folder, self.val_name)

    def _draw(self, found: dict[str, Any]) -> None:
        """All pictures. What can't be drawn is said: the run has its result without it."""
        try:
            report.draw(self.folder, found)
            self.log.show(self.step, draw_predictions(self))
        except OSError:
            raise
        except Exception as error:  # of many kinds, of libraries
            self._say(f"not all pictures are in {self.folder / 'plots'}: {type(error).__name__}: {error}")

    @contextlib.contextmanager
    def _writing(self, what: str) -> Iterator[None]:
        """Turns an OSError into a ValueError that says what to do. Of the main process."""
        try:
            yield
        except OSError as error:
            raise not_written(what, self.folder, error) from error

    def _wait_for_upload(self, beat: Callable[[], None]) -> None:
        mirror = self.place.mirror
        if mirror is None:
            return
        mirror.retry()
        while not mirror.wait(0.5):
            self.log.progress.tell(f"uploading to {mirror.store.url}")
            beat()
        file = self.folder / "result.json"
        found = read_json(file) | {"uploaded": mirror.failed is None, "wall_s": self.wall_s()}
        if found["uploaded"]:
            try:
                mirror.send_last_files(found)
            except (OSError, StoreError) as error:
                found["uploaded"] = False
                self._say(f"the result is not in {mirror.store.url} ({error}): the same command sends it")
        with self._writing("result.json"):
            write_json(file, found)

    def _end_preempted(self) -> None:
        """Saves, once. The others wait for the main process: a launcher kills all when one has ended."""
        agreed()
        if not self.begun:
            if self.is_main:
                self._note_preemption()
            let_main_close_first(self.accelerator)
            return
        # A process that is alone stops where it waits for a shard, maybe in the midst of a step, of which
        # nothing counts then.
        if self.step == self.saved_step:
            self._gathered(None)  # for the telemetry since then
        else:
            try:
                self._save()
            except FloatingPointError:
                self._close("failed")
                raise
        self.poll.wait_for_main(self.is_main, self.saver.done)
        problem = None
        if self.is_main:
            problem = self._problem()
            self._close("failed" if problem else "preempted")
        if problem := broadcast_object_list([problem])[0]:
            raise ValueError(problem)

    def _close(self, status: str) -> None:
        """Files, trackers and the folder itself. A full disk is no second error."""
        if not self.is_main:
            return
        self.log.progress.stop()
        with contextlib.suppress(OSError):
            if status != "finished":
                write_json(self.folder / "result.json", result(self, status))
        if status == "preempted" and self.place.mirror:
            self.place.mirror.wait(UPLOAD_GRACE_S)
        self.log.close(failed=status == "failed")
        report.say_how_to_add(self.folder)
        self.place.release()

    def _where_it_goes_on(self) -> list[str]:
        """After Ctrl-C, which saves nothing. The main process alone knows."""
        if not self.is_main:
            return []
        step = 0
        if self.begun:
            self.saver.done(WRITING_GRACE_S)
            step = self.saver.committed or self.first_step
        else:
            with contextlib.suppress(ValueError, OSError):
                folder = open_folder(self.recipe, run_name(self.accelerator, self.recipe, self.batch), None)
                step = max(steps_in(folder / "checkpoints"), default=0)
        return [f"the same command goes on {f'at step {step:,}' if step else 'from the beginning'}"]

    def _note_preemption(self) -> None:
        """Before the training began, while data is prepared: nothing to save, but it is said."""
        if self.place:
            self.place.release()
        with contextlib.suppress(ValueError, OSError):
            folder = open_folder(self.recipe, run_name(self.accelerator, self.recipe, self.batch), None)
            if (folder / RECORD).exists():
                return  # a run that goes on, or was killed
            file = folder / "result.json"
            before = read_json(file) if file.exists() else result(self, "preempted")
            write_json(file, before | {"status": "preempted"})

    def _write_samples(self, step: int) -> None:
        """The sample ids since the last call, each step's in the order of its whole batch."""
        if not self.recipe.log_samples:
            return
        per_rank = gather_object([self.ids])
        self.ids = []
        if not self.is_main:
            return
        share = self.batch.per_device * self.batch.accumulations
        count = len(per_rank[0]) // share
        for i in range(count):
            ids = [sample for ids in per_rank for sample in ids[i * share : (i + 1) * share]]
            self.log.write_samples(step - count + i + 1, ids)

    def _say(self, message: str) -> None:
        """Of the main process, also from the threads that save and upload."""
        print(message, flush=True)

    def wall_s(self) -> float:
        """Since the run's first process began, imports included, without the pauses between interruptions."""
        return self.earlier_wall_s + own_age_s()


def _score(metrics: dict[str, float]) -> float:
    """What the best evaluation has most of: accuracy, or, where there are no classes, the negative loss."""
    return metrics.get("accuracy", -metrics["loss"])
