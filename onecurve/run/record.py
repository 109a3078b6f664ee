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
from onecurve.distributed.rendezvous import current_host_count
from onecurve.flags.recipe import Batch, Recipe
from onecurve.numerics.order import Steps
from onecurve.run.end_tables import print_result
from onecurve.run.folder import RunFolder
from onecurve.run.identity import script_name
from onecurve.run.log import RunLog
from onecurve.run.predictions import Predictions
from onecurve.run.schemas import EndEntries, Result
from onecurve.run.starts import hardware_by_start, hardware_in_words
from onecurve.run.state import RunState
from onecurve.system.env import report_to_launcher
from onecurve.system.files import explaining_write_errors, read_json, read_lines, sync, write_json
from onecurve.system.output import log
from onecurve.system.paths import ROOT, python_command, shortest
from onecurve.system.phase import PLOTS, timed_as
from onecurve.system.threads import Heartbeat, run_with_heartbeat

if TYPE_CHECKING:  # Imported lazily at runtime
    from onecurve.telemetry.flops import Utilisation
    from onecurve.telemetry.sampling import Telemetry

# Maximum number of seconds that a preempted run waits for S3. Launchers send SIGKILL 30 s after SIGTERM
MAX_UPLOAD_WAIT_S = 15
# Maximum number of seconds that a failed run waits for an unfinished checkpoint. Other processes wait 10 s
MAX_CHECKPOINT_WAIT_S = 8
BYTES_PER_GIB = 2**30
KIB_PER_GIB = 2**20


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
    end_entries: EndEntries  # result.json entries that are known at the start. write_end() adds more
    best_checkpoint: Checkpoint | None = None  # Set by find_best_checkpoint()

    @property
    def folder(self) -> Path:
        """Folder of the run."""
        return self.run_folder.path

    def failure_message(self) -> str | None:
        """Return a message about a lost folder or a failed write that ends the run, or None."""
        return self.run_folder.lost_message() or self.saver.problem or self.log.problem

    def find_best_checkpoint(self, heartbeat: Heartbeat) -> bool:
        """Verify the best checkpoint, and store it in `best_checkpoint`.

        The method waits for an unfinished save, and downloads the checkpoint if only S3 contains it. It
        returns False if the checkpoint is missing or damaged.
        """
        self._wait_for_save(heartbeat)
        best_step, s3_mirror = self.state.best_step, self.run_folder.mirror
        checkpoints_folder = self.folder / "checkpoints"
        assert best_step
        # Errors that show that the checkpoint is lost
        lost_checkpoint_errors: tuple[type[ValueError], ...] = (checkpoints.DamagedCheckpoint,)
        try:
            if s3_mirror and best_step not in checkpoints.steps_in(checkpoints_folder):
                from onecurve.checkpoint.mirror import committed_steps, fetch_checkpoint
                from onecurve.system.s3 import WrongSize

                lost_checkpoint_errors = (checkpoints.DamagedCheckpoint, WrongSize)
                if best_step in committed_steps(s3_mirror.store):
                    fetch_checkpoint(s3_mirror.store, best_step, checkpoints_folder, heartbeat)
            best_checkpoint_folder = checkpoints_folder / step_name(best_step)
            self.best_checkpoint = checkpoints.verify_checkpoint(best_checkpoint_folder, heartbeat)
            return True
        except lost_checkpoint_errors as error:
            log.info(f"the best weights (step {best_step:,}) can't be tested, because they are lost: {error}")
            return False

    def write_end(
        self,
        final_entries: EndEntries,
        predictions: Predictions,
        telemetry: "Telemetry",
        heartbeat: Heartbeat,
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
            final_entries: result.json entries that are known at the end of the run.
            predictions: Predictions from the last evaluation.
            telemetry: Telemetry of the run.
            heartbeat: Function called during long operations.
        """
        run_path, s3_mirror, state = self.folder, self.run_folder.mirror, self.state
        self.end_entries.update(final_entries)
        self.log.progress.stop()
        self._wait_for_save(heartbeat)
        if self.utilisation:
            result_so_far = self.current_result("finished")
            # The peak performance of this start's devices does not apply to starts on different devices.
            distinct_devices = {devices for _, devices in hardware_by_start(run_path, result_so_far)}
            images_per_s = result_so_far["images_per_s"] or 0.0
            mfu_pct = self.utilisation.mfu_pct(images_per_s) if len(distinct_devices) == 1 else None
            self.end_entries["flops_per_image"] = self.utilisation.flops_per_image
            self.end_entries["peak_flops"] = self.utilisation.peak_flops
            self.end_entries["mfu_pct"] = mfu_pct
        with explaining_write_errors("the result of the run", run_path):
            # In an interrupted run, the last evaluation may be newer than the evaluation in the checkpoint.
            checkpoints.write_step_index(run_path / "checkpoints", state.step, state.best_step)
            # After one day, computing the telemetry summaries takes seconds. A launcher that stops a run does
            # not wait for seconds, so an unfinished run's page computes the summaries instead.
            from onecurve.telemetry.summary import energy_wh

            host_summaries = run_with_heartbeat(telemetry.summaries, heartbeat)
            result_content = self.current_result("finished")
            result_content["telemetry"] = host_summaries
            result_content["energy_wh"] = energy_wh(host_summaries)
            if s3_mirror:
                result_content["uploaded"] = False
            with timed_as(PLOTS):
                self._draw_plots(result_content, predictions)
            self.log.close(has_failed=False)
            for written_file in (run_path / "metrics.jsonl", *run_path.glob("plots/*")):
                sync(written_file)
            write_json(run_path / "result.json", {**result_content, **self._time_entries()})
        # Each row of the confusion matrix contains the images of one true class.
        images_by_class = [sum(row) for row in predictions.confusion_entries().get("confusion", [])]
        chance_accuracy = max(images_by_class) / sum(images_by_class) if images_by_class else None
        print_result(run_path, chance_accuracy)

    def _draw_plots(self, result_content: Result, predictions: Predictions) -> None:
        """Draw the plots, and send them to the trackers. Raise OSError if a write fails.

        `result_content` is the content of result.json.
        """
        from onecurve.run.plots import plot_curves

        plots_folder = self.folder / "plots"
        try:
            log_entries = read_lines(self.folder / "metrics.jsonl")
            data_name = Path(result_content["data"]).name
            hardware = hardware_in_words(self.folder, result_content)
            plot_curves(self.folder, log_entries, f"{result_content['script']} on {data_name}, {hardware}")
            plot_files = predictions.draw_plots(plots_folder)
            if self.log.trackers:
                self.log.trackers.show_plots(plot_files, self.state.step)
        except OSError:
            raise
        except Exception as error:  # Plotting libraries raise many types of errors
            log.info(f"some plots in {plots_folder} could not be drawn: {type(error).__name__}: {error}")

    def _wait_for_save(self, heartbeat: Heartbeat) -> None:
        """Wait until the current checkpoint is written. Raise ValueError if a write failed."""
        self.saver.wait(heartbeat)
        if failure_message := self.failure_message():
            raise ValueError(failure_message)

    def _time_entries(self) -> EndEntries:
        """Return the total number of seconds since the run started, and the seconds spent in each phase."""
        return {"wall_s": self.state.wall_now_s(), "spent_s": self.state.spent_now_s()}

    def upload(self, heartbeat: Heartbeat) -> None:
        """Upload the run to S3 with --s3, and record in result.json whether the upload succeeded.

        A failed upload is logged, but raises no error. The method calls heartbeat() while it waits.
        """
        s3_mirror, result_file = self.run_folder.mirror, self.folder / "result.json"
        if s3_mirror is None:
            return
        s3_mirror.offer(self.state.step, self.state.best_step)  # Also retries a failed upload
        while not s3_mirror.wait(0.5):
            self.log.progress.tell(f"uploading the run to {s3_mirror.store.url}")
            heartbeat()
        result_content = cast(Result, read_json(result_file))
        result_content.update(self._time_entries())
        result_content["uploaded"] = not s3_mirror.last_upload_failed
        if result_content["uploaded"]:
            try:
                run_with_heartbeat(partial(s3_mirror.send_last_files, result_content), heartbeat)
            except (OSError, ValueError) as upload_error:  # A StoreError is a ValueError
                result_content["uploaded"] = False
                log.info(
                    f"the result could not be uploaded to {s3_mirror.store.url} ({upload_error})."
                    " Run the same command to upload the result"
                )
        with explaining_write_errors("result.json", result_file.parent):
            write_json(result_file, result_content)

    def current_result(self, status: str, error_message: str | None = None) -> Result:
        """Return the content of result.json for the run's current state.

        `status` is `finished`, `preempted` or `failed`. `error_message` is a failed run's error message.
        """
        state = self.state
        # Mean training time per epoch
        epoch_s = state.train_s / state.logged_step * self.steps.per_epoch if state.logged_step else None
        end_entries: EndEntries = {"epoch_s": epoch_s, "error": error_message}
        if last_saved_step := self.saver.committed_step:
            end_entries["checkpoint"] = f"checkpoints/{step_name(last_saved_step)}"
        if best_step := state.best_step:
            end_entries["best_checkpoint"] = f"checkpoints/{step_name(best_step)}"
        end_entries.update(self.end_entries)
        return build_result(self.accelerator, self.recipe, self.batch, status, state, end_entries)

    def write_held_snapshot(self) -> None:
        """Start writing a snapshot held in memory, unless a device error may have corrupted it."""
        if self.saver.training.is_copied():
            self.saver.write_held()

    def close_failed(self, error_message: str) -> None:
        """Close the run after a rank has failed. Wait at most MAX_CHECKPOINT_WAIT_S for a checkpoint."""
        self.write_held_snapshot()
        self.saver.wait_up_to(MAX_CHECKPOINT_WAIT_S)
        self.close("failed", error_message)

    def close(self, status: str, error_message: str | None = None) -> None:
        """Close files and trackers, release the folder, and print the command that creates the run's page.

        Unless the status is `finished`, this method also writes result.json. If the status is `preempted`, it
        waits up to MAX_UPLOAD_WAIT_S seconds for the upload to S3. It ignores errors from a full disk.
        """
        self.log.progress.stop()
        report_to_launcher("step", step=self.state.step)
        with contextlib.suppress(OSError):
            if status != "finished":
                write_json(self.folder / "result.json", self.current_result(status, error_message))
        if status == "preempted" and self.run_folder.mirror:
            self.run_folder.mirror.wait(MAX_UPLOAD_WAIT_S)
        self.log.close(has_failed=status == "failed")
        if self.state.step:
            log.info(python_command(shortest(ROOT / "logbook.py"), "add", self.folder))
        self.run_folder.release()


def build_result(
    accelerator: JobAccelerator,
    recipe: Recipe,
    batch: Batch,
    status: str,
    state: RunState,
    end_entries: EndEntries,
) -> Result:
    """Return the content of result.json. The entries in `end_entries` replace derived entries.

    Only the main process calls this function.

    Args:
        accelerator: Accelerator of the job.
        recipe: Recipe of the run.
        batch: Division of the batch among processes.
        status: Status of the run, which is `finished`, `preempted` or `failed`.
        state: Progress of the run.
        end_entries: Additional result.json entries for a run that has begun, such as the memory use of all
            ranks.
    """
    best_by = recipe.best_by if "accuracy" in state.best else "loss"
    metric_values = {f"best_{best_by}": state.best.get(best_by), f"final_{best_by}": state.last.get(best_by)}
    metric_entries = cast(EndEntries, metric_values)  # mypy does not support computed keys of a TypedDict
    memory_by_rank = end_entries.get("memory_gib") or [memory_gib(accelerator)]
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
        "hosts": current_host_count(),
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
        "best_by": best_by,
        "best_accuracy": state.best.get("accuracy"),
        "best_step": state.best_step,
        "final_accuracy": state.last.get("accuracy"),
        "final_loss": state.last.get("loss"),
        **metric_entries,
        "val_images": int(state.last["images"]) if "images" in state.last else None,
        "bad_images": len(state.bad_images),
        "train_s": state.train_s,
        "wall_s": state.wall_now_s(),
        "spent_s": state.spent_now_s(),
        "images_per_s": state.logged_step * batch.total / state.train_s if state.train_s else None,
        "peak_memory_gib": max(rank_memory["peak"] for rank_memory in memory_by_rank),
        "memory_gib": memory_by_rank,
        "seed": recipe.seed,
        **end_entries,
    }


def memory_gib(accelerator: JobAccelerator, is_gpu_responsive: bool = False) -> dict[str, float]:
    """Return this process's memory use in GiB.

    Args:
        accelerator: Accelerator of the job.
        is_gpu_responsive: True if the GPU responds to queries. `other` and `device` are read only if the GPU
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
        memory_bytes = {"peak": torch.cuda.max_memory_allocated()}
        memory_bytes["reserved"] = torch.cuda.max_memory_reserved()
        if is_gpu_responsive:
            free_bytes, total_bytes = torch.cuda.mem_get_info()
            other_bytes = total_bytes - free_bytes - torch.cuda.memory_reserved()
            memory_bytes |= {"other": other_bytes, "device": total_bytes}
        return {memory_key: byte_count / BYTES_PER_GIB for memory_key, byte_count in memory_bytes.items()}
    peak_rss_kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    # /proc/self/status contains a line such as `VmData:   123456 kB`.
    _, _, status_after_key = Path("/proc/self/status").read_text().partition("VmData:")
    data_kib, *_ = status_after_key.split()
    return {"peak": peak_rss_kib / KIB_PER_GIB, "data": int(data_kib) / KIB_PER_GIB}
