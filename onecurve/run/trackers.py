"""Logs to TensorBoard, Weights & Biases and trackio, based on Accelerate's trackers."""

import hashlib
import os
import secrets
import shlex
import signal
import threading
from pathlib import Path
from typing import Any

import numpy as np
from accelerate.tracking import GeneralTracker, TensorBoardTracker, TrackioTracker, WandBTracker

from onecurve.run.schemas import RecipeFile
from onecurve.run.state import RunState
from onecurve.system.output import log
from onecurve.system.text import printable
from onecurve.upstream.packages_ import is_tensorboard_writer

# Metrics that TensorBoard shows next to the hyperparameters
HEADLINE_METRICS = ("val/accuracy", "val/loss", "train/loss", "train/images_per_s")
WANDB_INIT_TIMEOUT_S = 10  # Maximum seconds to wait for a W&B server at the start of a run
WANDB_FINISH_TIMEOUT_S = 60  # Maximum seconds to wait for a W&B server at the end of a run


class Trackers:
    """Trackers selected by --trackers. Only the main process uses trackers.

    The trackers write to the run folder, and show the recipe, the strategy and the number of processes as
    hyperparameters.

    Args:
        tracker_names: Names of the trackers.
        folder: Folder of the run.
        recipe_file: Content of recipe.json.
        state: State at which the run starts or resumes.
    """

    def __init__(
        self, tracker_names: tuple[str, ...], folder: Path, recipe_file: RecipeFile, state: RunState
    ):
        self.started_trackers: list[GeneralTracker] = []
        project_name = recipe_file["script"]
        if "tensorboard" in tracker_names:
            threading.excepthook = _ignore_full_disk  # Hides errors in TensorBoard's thread
            # TensorBoard hides values that were logged after the step from which the run resumes.
            tensorboard_tracker = _TensorBoard("tensorboard", folder, purge_step=state.step + 1)
            self.started_trackers.append(tensorboard_tracker)
            tensorboard_tracker.start()
        if "wandb" in tracker_names:
            wandb_tracker = _start_wandb(folder, project_name, state.wandb_id)
            self.started_trackers += [wandb_tracker] if wandb_tracker else []
        if "trackio" in tracker_names:
            # Runs in different folders may have the same folder name.
            folder_hash = hashlib.sha256(os.fsencode(folder.resolve())).hexdigest()[:8]
            run_name = f"{folder.name}-{folder_hash}"
            run_options = {"name": run_name, "resume": "allow", "embed": False}
            # The run's telemetry already contains the CPU and GPU measurements.
            no_measurements = {"auto_log_cpu": False, "auto_log_gpu": False}
            trackio_tracker = _Trackio(project_name, **run_options, **no_measurements)
            self.started_trackers.append(trackio_tracker)
            trackio_tracker.start()
            log.info(f"to view the run {run_name}, run `trackio show --project {project_name}`")
        hyperparameters = recipe_file["recipe"] | {
            "strategy": recipe_file["strategy"],
            "processes": len(recipe_file["devices"]),
        }
        for setting_name, setting_value in hyperparameters.items():
            if not isinstance(setting_value, (bool, int, float)):
                hyperparameters[setting_name] = printable(setting_value)
        for tracker in self.started_trackers:
            tracker.store_init_configuration(hyperparameters)

    def ids(self) -> dict[str, str]:
        """Return the id and address of the W&B run for recipe.json, or {} without W&B."""
        ids: dict[str, str] = {}
        for tracker in self.started_trackers:
            if isinstance(tracker, _WandB):
                ids = {"wandb_id": tracker.run.id, "wandb_url": tracker.run.url}
        return {key: value for key, value in ids.items() if value}  # An offline run has no address

    def log(self, metrics: dict[str, float], step: int) -> None:
        """Send metrics to all trackers."""
        for tracker in self.started_trackers:
            tracker.log(metrics, step=step)

    def show_plots(self, plot_files: list[Path], step: int) -> None:
        """Send PNG files as `plots/<name>`. An error is logged but does not end training."""
        from PIL import Image

        for tracker in self.started_trackers:
            # TensorBoard needs the layout [1, H, W, 3]. W&B and trackio accept single images.
            layout_option = {"dataformats": "NHWC"} if isinstance(tracker, _TensorBoard) else {}
            try:
                for plot_file in plot_files:
                    with Image.open(plot_file) as plot_image:
                        plot_pixels = np.asarray(plot_image.convert("RGB"))[None]  # [1, H, W, 3]
                    tracker.log_images({f"plots/{plot_file.stem}": plot_pixels}, step=step, **layout_option)
            except Exception as error:  # Tracking libraries and disks cause many types of errors
                log.info(f"{tracker.name} did not receive the plots in plots/ ({error})")

    def finish(self, has_failed: bool) -> None:
        """Close all trackers. `has_failed` is True if trackers should mark the run as failed."""
        for tracker in self.started_trackers:
            tracker.finish(has_failed)


def _ignore_full_disk(hook_arguments: threading.ExceptHookArgs) -> None:
    """Hide disk errors of TensorBoard's thread, because the main thread raises the same errors."""
    if not isinstance(hook_arguments.exc_value, OSError) or not is_tensorboard_writer(hook_arguments.thread):
        threading.__excepthook__(hook_arguments)


class _TensorBoard(TensorBoardTracker):
    """TensorBoard tracker that stores hyperparameters in the same TensorBoard run as the curves.

    Accelerate's tracker would create a second TensorBoard run, because it uses torch's add_hparams
    (pytorch/pytorch#32651).
    """

    def store_init_configuration(self, values: dict[str, Any]) -> None:
        from torch.utils.tensorboard.summary import hparams

        # Next to the hyperparameters, TensorBoard shows the last value of each curve in HEADLINE_METRICS.
        # hparams() returns two summaries for the start, and one that marks the run as successful.
        *start_summaries, self.success_summary = hparams(values, dict.fromkeys(HEADLINE_METRICS, 0.0))
        for start_summary in start_summaries:
            self.writer.file_writer.add_summary(start_summary)
        self.writer.flush()

    def finish(self, has_failed: bool) -> None:
        if not has_failed:
            self.writer.file_writer.add_summary(self.success_summary)
        super().finish()


class _Trackio(TrackioTracker):
    """Tracker for trackio, which reports errors as warnings and can't mark a run as failed."""

    def log_images(self, values: dict[str, np.ndarray], step: int) -> None:
        import trackio

        self.run.log({plot_name: trackio.Image(images[0]) for plot_name, images in values.items()}, step=step)

    def finish(self, has_failed: bool) -> None:
        super().finish()


class _WandB(WandBTracker):
    """W&B tracker that uses the optimizer step as the horizontal axis of all curves.

    W&B's built-in step counter does not accept the same step twice. The first error is logged and ends
    logging to W&B, but does not end training.
    """

    has_logging_ended = False

    def start(self) -> None:
        super().start()
        self.run.define_metric("step")
        # Use the logged value `step` as the horizontal axis of all curves
        self.run.define_metric("*", step_metric="step")

    def log(self, values: dict[str, float], step: int, **_: Any) -> None:
        if self.has_logging_ended:
            return
        try:
            super().log(values | {"step": step})
        except Exception as error:
            self.has_logging_ended = True
            log.info(f"logging to W&B has stopped ({error}). metrics.jsonl contains all metrics")

    def finish(self, has_failed: bool) -> None:
        if self.has_logging_ended:
            return
        if not self.run.offline:
            log.info(f"uploading the remaining data to W&B for at most {WANDB_FINISH_TIMEOUT_S} s")
        try:
            self.run.finish(exit_code=int(has_failed))
        except Exception as error:
            run_folder = Path(self.run.dir).parents[2]  # self.run.dir is <run folder>/wandb/<W&B run>/files
            log.info(f"W&B did not receive all data ({error}). {_upload_advice(run_folder)}")


def _start_wandb(folder: Path, project_name: str, run_id: str | None) -> _WandB | None:
    """Start or resume a W&B run in a run folder, and return its tracker. Return None if W&B is disabled.

    The W&B run is offline if no API key is configured, or if no server accepts the run. W&B's environment
    variables override the run and project names. docs/launching.md lists some of these variables.
    """
    # W&B's error reports would wait for an unavailable server at the end of the run.
    os.environ.setdefault("WANDB_ERROR_REPORTING", "false")
    import wandb

    wandb_settings = wandb.Settings(
        init_timeout=WANDB_INIT_TIMEOUT_S,
        finish_timeout=WANDB_FINISH_TIMEOUT_S,
        finish_timeout_raises=True,
        console="off",
        silent=True,
        stop_fn=_save_and_stop,
    )
    if wandb.setup(wandb_settings).settings.mode == "disabled":
        log.info("W&B is disabled by WANDB_MODE=disabled")
        return None
    wandb_options = {
        "dir": folder,
        "name": os.environ.get("WANDB_NAME", folder.name),
        "id": os.environ.get("WANDB_RUN_ID") or run_id or secrets.token_hex(4),
        "resume": "allow",
        "settings": wandb_settings,
    }
    wandb_tracker = _WandB(os.environ.get("WANDB_PROJECT", project_name), **wandb_options)
    offline_tracker = _WandB(wandb_tracker.run_name, **wandb_options | {"mode": "offline"})
    try:
        # Without an API key, wandb.init would prompt for a key.
        if wandb.setup(wandb_settings).settings.mode in ("online", "run") and wandb.api.api_key is None:
            log.info(f"no W&B API key is configured, so the run is logged offline. {_upload_advice(folder)}")
            wandb_tracker = offline_tracker
        wandb_tracker.start()
    except Exception as error:  # The API key, the server or W&B's service process may cause the error
        log.info(
            f"W&B did not accept the run ({error}), so the run is logged offline. {_upload_advice(folder)}"
        )
        wandb.teardown()  # Without teardown(), the offline run would wait for the same server
        wandb_tracker = offline_tracker
        wandb_tracker.start()
    log.info(f"the W&B run is {wandb_tracker.run.id if wandb_tracker.run.offline else wandb_tracker.run.url}")
    return wandb_tracker


def _save_and_stop() -> None:
    """Send SIGTERM, which saves a checkpoint and ends the run. W&B would send SIGINT, which saves nothing."""
    log.info("W&B's Stop button was pressed, so the run saves a checkpoint and ends")
    os.kill(os.getpid(), signal.SIGTERM)


def _upload_advice(run_folder: Path | str) -> str:
    """Return a sentence with the command that uploads an offline W&B run."""
    return f"To upload the run later, log in and run: wandb sync {shlex.quote(str(run_folder))}/wandb/*run-*"
