"""The main process's part of a run: its folder, log and result.json, and their copies in S3."""

import contextlib
import math
import os
import time
from collections.abc import Iterator
from typing import Any

from accelerate import Accelerator

from common.checkpoint.format import Checkpoint, Damaged, step_name, steps_in, verify, write_index
from common.checkpoint.mirror import committed, fetch
from common.checkpoint.saver import Saver
from common.recipe import Batch, Recipe
from common.run import finish as run_end
from common.run.facts import result, run_name
from common.run.folder import open_folder
from common.run.log import RunLog
from common.run.owner import RECORD
from common.run.predictions import Predictions
from common.run.state import RunState
from common.run.storage import RunStorage
from common.system.env import EVENTS_FILE, report
from common.system.files import not_written, read_json, sync, write_json
from common.system.s3 import StoreError, WrongSize
from common.system.threads import Heartbeat
from common.telemetry.collect import Telemetry

UPLOAD_GRACE_S = 15  # how long a preempted run waits for S3: launchers kill 30 s after SIGTERM


class RunOutput:
    """The main process's part of an open run. start_log() and `saver` complete it before the first step."""

    log: RunLog
    saver: Saver | None = None

    def __init__(self, accelerator: Accelerator, recipe: Recipe, batch: Batch, storage: RunStorage):
        self.accelerator, self.recipe, self.batch = accelerator, recipe, batch
        self.storage, self.folder = storage, storage.folder
        self.next_report = 0.0 if EVENTS_FILE in os.environ else math.inf  # time.monotonic()
        self.final: dict[str, Any] = {}  # parts of result.json that are known only at the end
        self.best: Checkpoint | None = None  # from find_best()

    def tell_launcher(self, step: int) -> None:
        """Reports the step to launch.py, at most once a second."""
        if time.monotonic() > self.next_report:
            self.next_report = time.monotonic() + 1
            report("step", step=step)

    def start_log(
        self,
        about: dict[str, Any],
        state: RunState,
        saved_step: int,
        steps: int,
        steps_per_epoch: int,
    ) -> None:
        """Opens the log. about: recipe.json. saved_step: of the checkpoint in the folder, or 0."""
        with self._writing("the log"):
            (self.folder / "result.json").unlink(missing_ok=True)
            found = self.storage.checkpoint
            wrote = {} if found is None or self.storage.is_new else found.manifest.get("written_by", {})
            self.log = RunLog(self.folder, self.recipe, about, state, steps, steps_per_epoch, wrote)
        if self.storage.mirror and saved_step:  # its upload may have been interrupted
            self.storage.mirror.offer(saved_step, state.best_step)
        print(f"run folder {self.folder}", flush=True)

    def problem(self) -> str | None:
        """The first error that ends the run: a lost folder, a checkpoint or a line that can't be written."""
        saving = self.saver.problem if self.saver else None
        return self.storage.owner_lost() or saving or self.log.problem

    def find_best(self, step: int, beat: Heartbeat) -> bool:
        """Finds and verifies the checkpoint of the best evaluation, here or in S3. False if it is gone."""
        assert self.saver
        self.saver.wait(beat)
        if problem := self.problem():
            raise ValueError(problem)
        parent, mirror = self.folder / "checkpoints", self.storage.mirror
        try:
            if step not in steps_in(parent) and mirror and step in committed(mirror.store):
                fetch(mirror.store, step, parent, beat, mirror.say)
            self.best = verify(parent / step_name(step), beat)
        except (Damaged, WrongSize) as error:
            print(f"no test accuracy: the best weights, of step {step:,}, are gone: {error}", flush=True)
        return self.best is not None

    def finish(
        self,
        state: RunState,
        predictions: Predictions,
        telemetry: Telemetry,
        known: dict[str, Any],
        beat: Heartbeat,
    ) -> None:
        """Completes the run on this disk. A kill or a full disk at any point loses no training.

        known: further parts of result(). The steps:

        1. The last checkpoint is committed, and index.json names it.
        2. Pictures are drawn into plots/.
        3. The trackers are closed.
        4. result.json says `finished`, and with a mirror `uploaded` false.
        5. upload() sends the checkpoint and the run's files to S3, result.json last.
        6. result.json says `uploaded` true.

        After an interruption the same command restores the last checkpoint, repeats its evaluation, which the
        pictures show, and then all steps. Once result.json says `finished` and, with a mirror, `uploaded`
        true, the same command begins another run.
        """
        mirror, self.final = self.storage.mirror, known
        self.log.progress.stop()
        assert self.saver
        self.saver.wait(beat)
        if problem := self.problem():
            raise ValueError(problem)
        with self._writing("the end of the run"):
            # After an interruption an evaluation may come after its checkpoint.
            write_index(self.folder / "checkpoints", state.step, state.best_step)
            if mirror:
                mirror.offer(state.step, state.best_step)
            found = self._result(state, "finished", telemetry=telemetry.summaries())
            found |= {"uploaded": False} if mirror else {}
            self._draw(state.step, predictions, found)
            self.log.close(failed=False)
            for file in (self.folder / "metrics.jsonl", *self.folder.glob("plots/*")):
                sync(file)
            write_json(self.folder / "result.json", found)
        run_end.show(self.folder)

    def upload(self, state: RunState, beat: Heartbeat) -> None:
        """Waits until the mirror has sent everything, and writes into result.json if it succeeded."""
        mirror = self.storage.mirror
        if mirror is None:
            return
        mirror.retry()
        while not mirror.wait(0.5):
            self.log.progress.tell(f"uploading to {mirror.store.url}")
            beat()
        file = self.folder / "result.json"
        found = read_json(file) | {"uploaded": mirror.failed is None, "wall_s": state.wall_now_s()}
        if found["uploaded"]:
            try:
                mirror.send_last_files(found)
            except (OSError, StoreError) as error:
                found["uploaded"] = False
                print(f"the result is not in {mirror.store.url} ({error}): the same command sends it")
        with self._writing("result.json"):
            write_json(file, found)

    def close(self, state: RunState, status: str, error: str | None = None) -> None:
        """Closes files and trackers, and releases the folder. Ignores a full disk."""
        self.log.progress.stop()
        report("step", step=state.step)
        with contextlib.suppress(OSError):
            if status != "finished":
                write_json(self.folder / "result.json", self._result(state, status, error=error))
        if status == "preempted" and self.storage.mirror:
            self.storage.mirror.wait(UPLOAD_GRACE_S)
        self.log.close(failed=status == "failed")
        run_end.say_how_to_add(self.folder)
        self.storage.release()

    def _result(self, state: RunState, status: str, **parts: Any) -> dict[str, Any]:
        parts |= self.final | {"checkpoint": self.saver.committed if self.saver else None}
        return result(self.accelerator, self.recipe, self.batch, state, status, **parts)

    def _draw(self, step: int, predictions: Predictions, found: dict[str, Any]) -> None:
        """Draws all pictures. A picture that can't be drawn is reported, and does not fail the run."""
        try:
            run_end.draw(self.folder, found)
            self.log.show(step, predictions.draw(self.folder / "plots"))
        except OSError:
            raise
        except Exception as error:  # libraries raise many kinds
            print(
                f"not all pictures are in {self.folder / 'plots'}: {type(error).__name__}: {error}",
                flush=True,
            )

    @contextlib.contextmanager
    def _writing(self, what: str) -> Iterator[None]:
        """Turns an OSError into a ValueError that says what to do."""
        try:
            yield
        except OSError as error:
            raise not_written(what, self.folder, error) from error


def newest_step(accelerator: Accelerator, recipe: Recipe, batch: Batch) -> int:
    """The step of the newest checkpoint in the folder that this recipe would get, 0 without one. Called
    before the folder is open."""
    with contextlib.suppress(ValueError, OSError):
        folder = open_folder(recipe, run_name(accelerator, recipe, batch), None)
        return max(steps_in(folder / "checkpoints"), default=0)
    return 0


def note_early_preemption(accelerator: Accelerator, recipe: Recipe, batch: Batch) -> None:
    """Writes `preempted` into result.json after a signal before the training. There is nothing to save."""
    with contextlib.suppress(ValueError, OSError):
        folder = open_folder(recipe, run_name(accelerator, recipe, batch), None)
        if (folder / RECORD).exists():
            return  # another process runs there, or was killed
        file = folder / "result.json"
        before = (
            read_json(file) if file.exists() else result(accelerator, recipe, batch, RunState(), "preempted")
        )
        write_json(file, before | {"status": "preempted"})
