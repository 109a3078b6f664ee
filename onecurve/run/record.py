"""Writes the log, result.json and plots/ of a run on the main process."""

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
from onecurve.system.env import report_event
from onecurve.system.files import explaining_write_errors, read_json, read_lines, sync, write_json
from onecurve.system.output import log
from onecurve.system.paths import ROOT, python_command, shortest
from onecurve.system.phase import PLOTS, spending
from onecurve.system.threads import Heartbeat, run_with_heartbeat

if TYPE_CHECKING:  # Imported lazily at runtime
    from onecurve.telemetry.flops import Utilisation
    from onecurve.telemetry.sampling import Telemetry

# Maximum number of seconds that a preempted run waits for S3. Launchers send SIGKILL 30 s after SIGTERM
UPLOAD_GRACE_S = 15
# Maximum number of seconds that a failed run waits for an unfinished checkpoint. Other processes wait 10 s
WRITING_GRACE_S = 8


@dataclass
class MainRecord:
    """Components of a run that exist only on the main process, such as the folder, the log and the result."""

    accelerator: JobAccelerator
    recipe: Recipe
    batch: Batch
    steps: Steps
    state: RunState
    run_folder: RunFolder
    saver: Saver
    log: RunLog
    utilisation: "Utilisation | None"
    result_end: ResultEnd  # result.json entries that are known at the start. write_end() adds more
    best: Checkpoint | None = None  # Best checkpoint, set by find_best()

    @property
    def folder(self) -> Path:
        """Folder of the run."""
        return self.run_folder.path

    def problem(self) -> str | None:
        """Return a message about a lost folder or a failed write that ends the run, or None."""
        return self.run_folder.lost() or self.saver.problem or self.log.problem

    def find_best(self, heartbeat: Heartbeat) -> bool:
        """Find and verify the best checkpoint locally or in S3. Return False if the checkpoint is lost."""
        self._wait_for_save(heartbeat)
        best_step, mirror, parent = self.state.best_step, self.run_folder.mirror, self.folder / "checkpoints"
        assert best_step
        loss_errors: tuple[type[ValueError], ...] = (checkpoints.DamagedCheckpoint,)
        try:
            if mirror and best_step not in checkpoints.steps_in(parent):
                from onecurve.checkpoint.mirror import committed, fetch
                from onecurve.system.s3 import WrongSize

                loss_errors = (checkpoints.DamagedCheckpoint, WrongSize)
                if best_step in committed(mirror.store):
                    fetch(mirror.store, best_step, parent, heartbeat)
            self.best = checkpoints.verify(parent / step_name(best_step), heartbeat)
            return True
        except loss_errors as error:
            log.info(f"the best weights (step {best_step:,}) can't be tested, because they are lost: {error}")
            return False

    def write_end(
        self, facts: ResultEnd, predictions: Predictions, telemetry: "Telemetry", heartbeat: Heartbeat
    ) -> None:
        """Complete the run on the local disk. A kill or a full disk loses no training progress.

        A run ends with the following steps:

        1. Commit the last checkpoint, and list it in index.json.
        2. Draw the images in plots/.
        3. Close the trackers.
        4. Write `finished` to result.json. With a mirror, also write `uploaded` false.
        5. Upload the checkpoint and the other files to S3, with result.json as the last file. upload()
           performs this step and the next one.
        6. Write `uploaded` true to result.json.

        After an interruption, the same command restores the last checkpoint, repeats the last evaluation, and
        repeats all of these steps. After result.json contains `finished` and, with a mirror, `uploaded` true,
        the same command starts a new run.

        Args:
            facts: result.json entries that are known at the end of the run.
            predictions: Predictions from the last evaluation.
            telemetry: Telemetry of the run.
            heartbeat: Function called during long operations.
        """
        folder, mirror, state = self.folder, self.run_folder.mirror, self.state
        self.result_end.update(facts)
        self.log.progress.stop()
        self._wait_for_save(heartbeat)
        if self.utilisation:
            result_so_far = self.result("finished")
            is_one_setting = len({devices for _, devices in where_trained(folder, result_so_far)}) == 1
            images_per_s = result_so_far["images_per_s"] or 0.0
            mfu_pct = self.utilisation.mfu_pct(images_per_s) if is_one_setting else None
            self.result_end["flops_per_image"] = self.utilisation.flops_per_image
            self.result_end["peak_flops"] = self.utilisation.peak_flops
            self.result_end["mfu_pct"] = mfu_pct
        with explaining_write_errors("the result of the run", folder):
            # In an interrupted run, the last evaluation may be newer than the evaluation in the checkpoint.
            checkpoints.write_step_index(folder / "checkpoints", state.step, state.best_step)
            # After one day, computing the telemetry summaries takes seconds. A launcher that stops a run does
            # not wait for seconds, so an unfinished run's page computes the summaries instead.
            from onecurve.telemetry.summary import energy_wh

            summaries = run_with_heartbeat(telemetry.summaries, heartbeat)
            result_content = self.result("finished")
            result_content["telemetry"], result_content["energy_wh"] = summaries, energy_wh(summaries)
            if mirror:
                result_content["uploaded"] = False
            with spending(PLOTS):
                self._draw(result_content, predictions)
            self.log.close(failed=False)
            for file in (folder / "metrics.jsonl", *folder.glob("plots/*")):
                sync(file)
            write_json(folder / "result.json", {**result_content, **self._times()})
        # Number of evaluated images per class
        class_counts = [sum(row) for row in predictions.as_json().get("confusion", [])]
        chance = max(class_counts) / sum(class_counts) if class_counts else None
        print_result(folder, chance)

    def _draw(self, content: Result, predictions: Predictions) -> None:
        """Draw the plots, and send them to the trackers. Raise OSError if a write fails.

        `content` is the content of result.json.
        """
        from onecurve.run.plots import plot_curves

        plots_folder = self.folder / "plots"
        try:
            log_entries = read_lines(self.folder / "metrics.jsonl")
            data_and_devices = f"{Path(content['data']).name}, {where_in_words(self.folder, content)}"
            plot_curves(self.folder, log_entries, f"{content['script']} on {data_and_devices}")
            plot_files = predictions.draw(plots_folder)
            if self.log.trackers:
                self.log.trackers.show(plot_files, self.state.step)
        except OSError:
            raise
        except Exception as error:  # Plotting libraries raise many types of errors
            log.info(f"some plots in {plots_folder} could not be drawn: {type(error).__name__}: {error}")

    def _wait_for_save(self, heartbeat: Heartbeat) -> None:
        """Wait until the current checkpoint is written. Raise ValueError if a write failed."""
        self.saver.wait(heartbeat)
        if problem := self.problem():
            raise ValueError(problem)

    def _times(self) -> ResultEnd:
        """Return the total number of seconds since the run started, and the seconds spent in each phase."""
        return {"wall_s": self.state.wall_now_s(), "spent_s": self.state.spent_now_s()}

    def upload(self, heartbeat: Heartbeat) -> None:
        """Wait until the mirror has uploaded all files, and record in result.json if the upload succeeded."""
        mirror, result_file = self.run_folder.mirror, self.folder / "result.json"
        if mirror is None:
            return
        mirror.offer(self.state.step, self.state.best_step)
        while not mirror.wait(0.5):
            self.log.progress.tell(f"uploading the run to {mirror.store.url}")
            heartbeat()
        result_content = cast(Result, read_json(result_file))
        result_content.update(self._times())
        result_content["uploaded"] = not mirror.failed
        if result_content["uploaded"]:
            try:
                run_with_heartbeat(partial(mirror.send_last_files, result_content), heartbeat)
            except (OSError, ValueError) as error:  # A StoreError is a ValueError
                result_content["uploaded"] = False
                log.info(
                    f"the result could not be uploaded to {mirror.store.url} ({error})."
                    " Run the same command to upload the result"
                )
        with explaining_write_errors("result.json", result_file.parent):
            write_json(result_file, result_content)

    def result(self, status: str, error: str | None = None) -> Result:
        """Return the content of result.json. `error` is a failed run's error message."""
        state = self.state
        epoch_s = state.train_s / state.logged_step * self.steps.per_epoch if state.logged_step else None
        checkpoint_steps = {"checkpoint": self.saver.committed, "best_checkpoint": state.best_step}
        result_end: ResultEnd = {"epoch_s": epoch_s, "error": error}
        for name in ("checkpoint", "best_checkpoint"):
            if checkpoint_step := checkpoint_steps[name]:
                result_end[name] = f"checkpoints/{step_name(checkpoint_step)}"
        result_end.update(self.result_end)
        return result(self.accelerator, self.recipe, self.batch, status, state, result_end)

    def write_best(self) -> None:
        """Start writing a snapshot held in memory, unless a device error may have corrupted it."""
        if self.saver.training.is_copied():
            self.saver.write_held()

    def close_failed(self, error: str) -> None:
        """Close the run after a rank has failed. Wait at most WRITING_GRACE_S seconds for a checkpoint."""
        self.write_best()
        self.saver.done(WRITING_GRACE_S)
        self.close("failed", error)

    def close(self, status: str, error: str | None = None) -> None:
        """Close files and trackers, release the folder, and print the command that creates the run's page.

        This method ignores errors from a full disk.
        """
        self.log.progress.stop()
        report_event("step", step=self.state.step)
        with contextlib.suppress(OSError):
            if status != "finished":
                write_json(self.folder / "result.json", self.result(status, error))
        if status == "preempted" and self.run_folder.mirror:
            self.run_folder.mirror.wait(UPLOAD_GRACE_S)
        self.log.close(failed=status == "failed")
        if self.state.step:
            log.info(python_command(shortest(ROOT / "logbook.py"), "add", self.folder))
        self.run_folder.release()


def result(
    accelerator: JobAccelerator, recipe: Recipe, batch: Batch, status: str, state: RunState, final: ResultEnd
) -> Result:
    """Return the content of result.json. Only the main process calls this function.

    Args:
        accelerator: Accelerator of the job.
        recipe: Recipe of the run.
        batch: Division of the batch among processes.
        status: Status of the run, which is `finished`, `preempted` or `failed`.
        state: Progress of the run.
        final: Additional result.json entries for a run that has begun.
    """
    measure = recipe.best_by if "accuracy" in state.best else "loss"
    scores = {f"best_{measure}": state.best.get(measure), f"final_{measure}": state.last.get(measure)}
    metrics = cast(ResultEnd, scores)  # mypy does not support computed keys of a TypedDict
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
        **metrics,
        "val_images": int(state.last["images"]) if "images" in state.last else None,
        "bad_images": len(state.bad_images),
        "train_s": state.train_s,
        "wall_s": state.wall_now_s(),
        "spent_s": state.spent_now_s(),
        "images_per_s": state.logged_step * batch.total / state.train_s if state.train_s else None,
        "peak_memory_gib": max(rank_memory["peak"] for rank_memory in memory),
        "memory_gib": memory,
        "seed": recipe.seed,
        **final,
    }


def memory_gib(accelerator: JobAccelerator, is_healthy: bool = False) -> dict[str, float]:
    """Return this process's memory use in GiB.

    Args:
        accelerator: Accelerator of the job.
        is_healthy: True if the GPU responds to queries. `other` and `device` are read only if the GPU
            responds.

    Returns:
        A dictionary with the following keys on a GPU:
        - `peak`: Peak memory that torch allocated.
        - `reserved`: Peak memory that torch's allocator reserved.
        - `other`: Memory used outside of torch (CUDA context, NCCL, other processes).
        - `device`: Total memory of the GPU.

        A dictionary with the following keys on a CPU:
        - `peak`: Peak resident set size.
        - `data`: Writable memory requested so far, which RLIMIT_DATA limits.
    """
    if accelerator.device.type == "cuda":
        sizes = {"peak": torch.cuda.max_memory_allocated(), "reserved": torch.cuda.max_memory_reserved()}
        if is_healthy:
            free_bytes, total_bytes = torch.cuda.mem_get_info()
            other_bytes = total_bytes - free_bytes - torch.cuda.memory_reserved()
            sizes |= {"other": other_bytes, "device": total_bytes}
        return {name: size / 2**30 for name, size in sizes.items()}
    process_status = Path("/proc/self/status").read_text()
    data_kib = int(process_status.partition("VmData:")[2].split()[0])
    return {"peak": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20, "data": data_kib / 2**20}
