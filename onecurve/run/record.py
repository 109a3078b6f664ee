"""What the main process records of a run: folder, log, result.json, plots/."""

import contextlib
import resource
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, cast

import torch

from onecurve.checkpoint import format as checkpoints
from onecurve.checkpoint.format import Checkpoint, step_name
from onecurve.checkpoint.saver import Saver
from onecurve.distributed import strategy as job
from onecurve.distributed.job_accelerator import JobAccelerator
from onecurve.distributed.rendezvous import hosts
from onecurve.flags.recipe import Batch, Recipe
from onecurve.numerics.order import Steps
from onecurve.run.end_tables import print_result
from onecurve.run.folder import RunFolder
from onecurve.run.identity import script_name
from onecurve.run.log import RunLog
from onecurve.run.predictions import Predictions
from onecurve.run.schemas import Result, ResultEnd
from onecurve.run.starts import where_in_words, where_trained
from onecurve.run.state import RunState
from onecurve.system.env import report
from onecurve.system.files import read_json, read_lines, sync, write_json, writing
from onecurve.system.output import log
from onecurve.system.paths import ROOT, python_command, shortest
from onecurve.system.phase import PLOTS, spending
from onecurve.system.threads import Heartbeat, run_with_heartbeat

if TYPE_CHECKING:  # imported where they are needed
    from onecurve.telemetry.flops import Utilisation
    from onecurve.telemetry.sampling import Telemetry

UPLOAD_GRACE_S = 15  # how long a preempted run waits for S3: launchers kill 30 s after SIGTERM
WRITING_GRACE_S = 8  # for a checkpoint in flight in a failed run; the other processes wait 10 s


@dataclass
class MainRecord:
    """What the main process alone has of a run: folder, lease, log, result, plots."""

    accelerator: JobAccelerator
    recipe: Recipe
    batch: Batch
    steps: Steps
    state: RunState
    place: RunFolder
    saver: Saver
    log: RunLog
    utilisation: "Utilisation | None"
    final: ResultEnd  # parts of result.json that are known from the beginning, or at the end
    best: Checkpoint | None = None  # after find_best()

    @property
    def folder(self) -> Path:
        return self.place.path

    def problem(self) -> str | None:
        """The first error that ends the run: a lost folder, a checkpoint or a line that can't be written."""
        return self.place.lost() or self.saver.problem or self.log.problem

    def find_best(self, heartbeat: Heartbeat) -> bool:
        """Finds and verifies the checkpoint of the best evaluation, here or in S3; False if it is gone."""
        self._wait_for_save(heartbeat)
        step, parent, mirror = self.state.best_step, self.folder / "checkpoints", self.place.mirror
        assert step
        gone: tuple[type[ValueError], ...] = (checkpoints.DamagedCheckpoint,)
        try:
            if mirror and step not in checkpoints.steps_in(parent):
                from onecurve.checkpoint.mirror import committed, fetch
                from onecurve.system.s3 import WrongSize

                gone = (checkpoints.DamagedCheckpoint, WrongSize)
                if step in committed(mirror.store):
                    fetch(mirror.store, step, parent, heartbeat)
            self.best = checkpoints.verify(parent / step_name(step), heartbeat)
            return True
        except gone as error:
            log.info(f"no test accuracy: the best weights, of step {step:,}, are gone: {error}")
            return False

    def write_end(
        self, facts: ResultEnd, predictions: Predictions, telemetry: "Telemetry", heartbeat: Heartbeat
    ) -> None:
        """Completes the run on this disk. A kill or a full disk at any point loses no training.

        facts: parts of result.json about the end. The steps:

        1. The last checkpoint is committed, and index.json names it.
        2. Pictures are drawn into plots/.
        3. The trackers are closed.
        4. result.json says `finished`, and with a mirror `uploaded` false.
        5. upload() sends the checkpoint and the run's files to S3, result.json last.
        6. result.json says `uploaded` true.

        After an interruption the same command restores the last checkpoint, repeats its evaluation, which
        the pictures show, and then all steps. Once result.json says `finished` and, with a mirror, `uploaded`
        true, the same command begins another run.
        """
        folder, mirror, state = self.folder, self.place.mirror, self.state
        self.final.update(facts)
        self.log.progress.stop()
        self._wait_for_save(heartbeat)
        if self.utilisation:
            found = self.result("finished")
            is_of_all = len({devices for _, devices in where_trained(folder, found)}) == 1
            mfu_pct = self.utilisation.pct(found["images_per_s"] or 0.0) if is_of_all else None
            self.final["flops_per_image"] = self.utilisation.flops_per_image
            self.final["peak_flops"] = self.utilisation.peak_flops
            self.final["mfu_pct"] = mfu_pct
        with writing("the end of the run", folder):
            # After an interruption an evaluation may come after its checkpoint.
            checkpoints.write_step_index(folder / "checkpoints", state.step, state.best_step)
            # After a day they take seconds, for which a launcher does not wait when it stops a run; the page
            # of an unfinished one makes them.
            from onecurve.telemetry.summary import energy_wh

            summaries = run_with_heartbeat(telemetry.summaries, heartbeat)
            content = self.result("finished")
            content["telemetry"], content["energy_wh"] = summaries, energy_wh(summaries)
            if mirror:
                content["uploaded"] = False
            with spending(PLOTS):
                self._draw(content, predictions)
            self.log.close(failed=False)
            for file in (folder / "metrics.jsonl", *folder.glob("plots/*")):
                sync(file)
            write_json(folder / "result.json", {**content, **self._times()})
        counts = [sum(row) for row in predictions.as_json().get("confusion", [])]  # by class
        print_result(folder, max(counts) / sum(counts) if counts else None)

    def _draw(self, content: Result, predictions: Predictions) -> None:
        """Draws the pictures, for the trackers, too. Raises OSError. content: of result.json."""
        from onecurve.run.plots import plot_curves

        plots = self.folder / "plots"
        try:
            lines = read_lines(self.folder / "metrics.jsonl")
            place = f"{Path(content['data']).name}, {where_in_words(self.folder, content)}"
            plot_curves(self.folder, lines, f"{content['script']} on {place}")
            pictures = predictions.draw(plots)
            if self.log.trackers:
                self.log.trackers.show(pictures, self.state.step)
        except OSError:
            raise
        except Exception as error:  # libraries raise many kinds
            log.info(f"not all pictures are in {plots}: {type(error).__name__}: {error}")

    def _wait_for_save(self, heartbeat: Heartbeat) -> None:
        """Waits until the checkpoint in flight is written. ValueError when it could not be."""
        self.saver.wait(heartbeat)
        if problem := self.problem():
            raise ValueError(problem)

    def _times(self) -> ResultEnd:
        """Return the time of the run up to now, and its parts."""
        return {"wall_s": self.state.wall_now_s(), "spent_s": self.state.spent_now_s()}

    def upload(self, heartbeat: Heartbeat) -> None:
        """Waits until the mirror has sent everything, and writes into result.json if it succeeded."""
        mirror, file = self.place.mirror, self.folder / "result.json"
        if mirror is None:
            return
        mirror.offer(self.state.step, self.state.best_step)
        while not mirror.wait(0.5):
            self.log.progress.tell(f"uploading to {mirror.store.url}")
            heartbeat()
        content = cast(Result, read_json(file))
        content.update(self._times())
        content["uploaded"] = not mirror.failed
        if content["uploaded"]:
            try:
                run_with_heartbeat(partial(mirror.send_last_files, content), heartbeat)
            except (OSError, ValueError) as error:  # StoreError is one
                content["uploaded"] = False
                log.info(
                    f"the result is not in {mirror.store.url} ({error}): run the same command to send it"
                )
        with writing("result.json", file.parent):
            write_json(file, content)

    def result(self, status: str, error: str | None = None) -> Result:
        """The content of result.json. error: of a failed run."""
        state = self.state
        epoch_s = state.train_s / state.logged_step * self.steps.per_epoch if state.logged_step else None
        steps = {"checkpoint": self.saver.committed, "best_checkpoint": state.best_step}
        final: ResultEnd = {"epoch_s": epoch_s, "error": error}
        for name in ("checkpoint", "best_checkpoint"):
            if step := steps[name]:
                final[name] = f"checkpoints/{step_name(step)}"
        final.update(self.final)
        return result(self.accelerator, self.recipe, self.batch, status, state, final)

    def write_best(self) -> None:
        """Starts to write a held snapshot, unless a device error may have spoilt it."""
        if self.saver.training.is_copied():
            self.saver.write_held()

    def close_failed(self, error: str) -> None:
        """Closes the run, also where another rank has failed. Waits WRITING_GRACE_S for a checkpoint."""
        self.write_best()
        self.saver.done(WRITING_GRACE_S)
        self.close("failed", error)

    def close(self, status: str, error: str | None = None) -> None:
        """Closes files and trackers, releases the folder, and prints the command that makes the run's page.
        Ignores a full disk."""
        self.log.progress.stop()
        report("step", step=self.state.step)
        with contextlib.suppress(OSError):
            if status != "finished":
                write_json(self.folder / "result.json", self.result(status, error))
        if status == "preempted" and self.place.mirror:
            self.place.mirror.wait(UPLOAD_GRACE_S)
        self.log.close(failed=status == "failed")
        if self.state.step:
            log.info(python_command(shortest(ROOT / "logbook.py"), "add", self.folder))
        self.place.release()


def result(
    accelerator: JobAccelerator, recipe: Recipe, batch: Batch, status: str, state: RunState, final: ResultEnd
) -> Result:
    """Return the content of result.json. Main process only.

    status: `finished`, `preempted` or `failed`. final: what is known of a run that has begun.
    """
    measure = recipe.best_by if "accuracy" in state.best else "loss"
    scores = {f"best_{measure}": state.best.get(measure), f"final_{measure}": state.last.get(measure)}
    measured = cast(ResultEnd, scores)  # mypy knows no computed keys
    memory = final.get("memory_gib") or [memory_gib(accelerator)]
    return {
        "script": script_name(),
        "status": status,
        "strategy": job.strategy(accelerator),
        "mixed_precision": accelerator.precision.mixed_precision,
        "half_precision": accelerator.precision.half_precision,
        "gradient_reduction": accelerator.precision.gradient_reduction,
        "compile": str(accelerator.compilation),
        "grad_checkpointing": accelerator.grad_checkpointing,
        "step_graph": accelerator.step_graph,
        "deterministic": recipe.deterministic,
        "hosts": hosts(),
        "processes": batch.processes,
        "device": job.device_name(accelerator),
        "data": recipe.data,
        "batch_size": batch.total,
        "per_device_batch_size": batch.per_device,
        "accumulation_steps": batch.accumulations,
        "epochs": recipe.epochs,
        "steps": state.step,
        "best_loss": None,
        "val_name": None,
        "epoch_s": None,
        "checkpoint": None,
        "best_checkpoint": None,
        "error": None,
        "best_by": measure,
        "best_accuracy": state.best.get("accuracy"),
        "best_step": state.best_step,
        "final_accuracy": state.last.get("accuracy"),
        "final_loss": state.last.get("loss"),
        **measured,
        "val_images": int(state.last["images"]) if "images" in state.last else None,
        "bad_images": len(state.bad_images),
        "train_s": state.train_s,
        "wall_s": state.wall_now_s(),
        "spent_s": state.spent_now_s(),
        "images_per_s": state.logged_step * batch.total / state.train_s if state.train_s else None,
        "peak_memory_gib": max(peak["peak"] for peak in memory),
        "memory_gib": memory,
        "seed": recipe.seed,
        **final,
    }


def memory_gib(accelerator: JobAccelerator, is_healthy: bool = False) -> dict[str, float]:
    """Memory of this process in GiB. `peak`: torch's peak allocation on a GPU, the peak resident set on CPU.

    On a GPU also `reserved`, the peak of torch's allocator. is_healthy: the GPU can be asked, which adds
    `other`, the memory in use outside of torch now (CUDA context, NCCL, other processes), and `device`, its
    size. On CPU also `data`, the writable memory requested so far, which RLIMIT_DATA limits.
    """
    if accelerator.device.type == "cuda":
        sizes = {"peak": torch.cuda.max_memory_allocated(), "reserved": torch.cuda.max_memory_reserved()}
        if is_healthy:
            free, device = torch.cuda.mem_get_info()
            sizes |= {"other": device - free - torch.cuda.memory_reserved(), "device": device}
        return {name: size / 2**30 for name, size in sizes.items()}
    status = Path("/proc/self/status").read_text()
    data_kib = int(status.partition("VmData:")[2].split()[0])
    return {"peak": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20, "data": data_kib / 2**20}
