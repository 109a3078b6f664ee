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
# Maximum seconds to wait for a W&B server at the start and at the end
INIT_TIMEOUT_S, FINISH_TIMEOUT_S = 10, 60


class Trackers:
    """Trackers selected by --trackers. Only the main process uses trackers.

    The trackers write to the run folder, and show the recipe, the strategy and the number of processes as
    hyperparameters.

    Args:
        names: Names of the trackers.
        folder: Folder of the run.
        recipe_file: Content of recipe.json.
        state: State at which the run starts or resumes.
    """

    def __init__(self, names: tuple[str, ...], folder: Path, recipe_file: RecipeFile, state: RunState):
        self.started_trackers: list[GeneralTracker] = []
        if "tensorboard" in names:
            threading.excepthook = _ignore_full_disk
            self.started_trackers.append(_TensorBoard("tensorboard", folder, purge_step=state.step + 1))
            self.started_trackers[-1].start()
        if "wandb" in names and (wandb := _start_wandb(folder, recipe_file["script"], state.wandb_id)):
            self.started_trackers.append(wandb)
        if "trackio" in names:
            # Runs in different folders may have the same folder name.
            name = f"{folder.name}-{hashlib.sha256(os.fsencode(folder.resolve())).hexdigest()[:8]}"
            run_options = {"name": name, "resume": "allow", "embed": False}
            # The run's telemetry already contains the CPU and GPU measurements.
            no_measurements = {"auto_log_cpu": False, "auto_log_gpu": False}
            self.started_trackers.append(_Trackio(recipe_file["script"], **run_options, **no_measurements))
            self.started_trackers[-1].start()
            log.info(f"to view the run {name}, run `trackio show --project {recipe_file['script']}`")
        hyperparameters = recipe_file["recipe"] | {
            "strategy": recipe_file["strategy"],
            "processes": len(recipe_file["devices"]),
        }
        for name, value in hyperparameters.items():
            if not isinstance(value, (bool, int, float)):
                hyperparameters[name] = printable(value)
        for tracker in self.started_trackers:
            tracker.store_init_configuration(hyperparameters)

    def ids(self) -> dict[str, str]:
        """Return the id and address of the W&B run for recipe.json, or {} without W&B."""
        runs = [tracker.run for tracker in self.started_trackers if isinstance(tracker, _WandB)]
        ids = {"wandb_id": runs[0].id, "wandb_url": runs[0].url} if runs else {}
        return {name: value for name, value in ids.items() if value}  # An offline run has no address

    def log(self, values: dict[str, float], step: int) -> None:
        """Send metrics to all trackers."""
        for tracker in self.started_trackers:
            tracker.log(values, step=step)

    def show(self, files: list[Path], step: int) -> None:
        """Send PNG files as `plots/<name>`. An error is logged but does not end training."""
        from PIL import Image

        for tracker in self.started_trackers:
            # TensorBoard needs the layout [1, H, W, 3]. W&B and trackio accept single images.
            layout = {"dataformats": "NHWC"} if isinstance(tracker, _TensorBoard) else {}
            try:
                for file in files:
                    with Image.open(file) as image:
                        pixels = np.asarray(image.convert("RGB"))[None]
                    tracker.log_images({f"plots/{file.stem}": pixels}, step=step, **layout)
            except Exception as error:  # Tracking libraries and disks cause many types of errors
                log.info(f"{tracker.name} did not receive the plots in plots/ ({error})")

    def finish(self, failed: bool) -> None:
        """Close all trackers. `failed` is True if trackers should mark the run as failed."""
        for tracker in self.started_trackers:
            tracker.finish(failed)


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
        *first_summaries, self.success_summary = hparams(values, dict.fromkeys(HEADLINE_METRICS, 0.0))
        for summary in first_summaries:
            self.writer.file_writer.add_summary(summary)
        self.writer.flush()

    def finish(self, failed: bool) -> None:
        if not failed:
            self.writer.file_writer.add_summary(self.success_summary)
        super().finish()


class _Trackio(TrackioTracker):
    """Tracker for trackio, which reports errors as warnings and can't mark a run as failed."""

    def log_images(self, values: dict[str, np.ndarray], step: int) -> None:
        import trackio

        self.run.log({name: trackio.Image(images[0]) for name, images in values.items()}, step=step)

    def finish(self, failed: bool) -> None:
        super().finish()


class _WandB(WandBTracker):
    """W&B tracker that uses the optimizer step as the horizontal axis of all curves.

    W&B's built-in step counter does not accept the same step twice. The first error is logged and ends
    logging to W&B, but does not end training.
    """

    has_ended = False

    def start(self) -> None:
        super().start()
        self.run.define_metric("step")
        self.run.define_metric("*", step_metric="step")

    def log(self, values: dict[str, float], step: int, **_: Any) -> None:
        if self.has_ended:
            return
        try:
            super().log(values | {"step": step})
        except Exception as error:
            self.has_ended = True
            log.info(f"logging to W&B has stopped ({error}). metrics.jsonl contains all metrics")

    def finish(self, failed: bool) -> None:
        if self.has_ended:
            return
        if not self.run.offline:
            log.info(f"uploading the remaining data to W&B for at most {FINISH_TIMEOUT_S} s")
        try:
            self.run.finish(exit_code=int(failed))
        except Exception as error:
            log.info(f"W&B did not receive all data ({error}). {_sync_later(Path(self.run.dir).parents[2])}")


def _start_wandb(folder: Path, project: str, run_id: str | None) -> _WandB | None:
    """Start or resume a W&B run. Return None if W&B is disabled.

    The W&B run is offline if no API key is configured, or if no server accepts the run. W&B's environment
    variables override the run and project names. docs/launching.md lists some of these variables.
    """
    # W&B's error reports would wait for an unavailable server at the end of the run.
    os.environ.setdefault("WANDB_ERROR_REPORTING", "false")
    import wandb

    settings = wandb.Settings(
        init_timeout=INIT_TIMEOUT_S,
        finish_timeout=FINISH_TIMEOUT_S,
        finish_timeout_raises=True,
        console="off",
        silent=True,
        stop_fn=_save_and_stop,
    )
    if wandb.setup(settings).settings.mode == "disabled":
        log.info("W&B is disabled by WANDB_MODE=disabled")
        return None
    run_options = {
        "dir": folder,
        "name": os.environ.get("WANDB_NAME", folder.name),
        "id": os.environ.get("WANDB_RUN_ID") or run_id or secrets.token_hex(4),
        "resume": "allow",
        "settings": settings,
    }
    tracker = _WandB(os.environ.get("WANDB_PROJECT", project), **run_options)
    offline_tracker = _WandB(tracker.run_name, **run_options | {"mode": "offline"})
    try:
        # Without an API key, wandb.init would prompt for a key.
        if wandb.setup(settings).settings.mode in ("online", "run") and wandb.api.api_key is None:
            log.info(f"no W&B API key is configured, so the run is logged offline. {_sync_later(folder)}")
            tracker = offline_tracker
        tracker.start()
    except Exception as error:  # The API key, the server or W&B's service process may cause the error
        log.info(f"W&B did not accept the run ({error}), so the run is logged offline. {_sync_later(folder)}")
        wandb.teardown()  # Without teardown(), the offline run would wait for the same server
        tracker = offline_tracker
        tracker.start()
    log.info(f"the W&B run is {tracker.run.id if tracker.run.offline else tracker.run.url}")
    return tracker


def _save_and_stop() -> None:
    """Send SIGTERM, which saves a checkpoint and ends the run. W&B would send SIGINT, which saves nothing."""
    log.info("W&B's Stop button was pressed, so the run saves a checkpoint and ends")
    os.kill(os.getpid(), signal.SIGTERM)


def _sync_later(folder: Path | str) -> str:
    return f"To upload the run later, log in and run: wandb sync {shlex.quote(str(folder))}/wandb/*run-*"
