"""Where metrics go beside metrics.jsonl: TensorBoard and Weights & Biases, with Accelerate's trackers."""

import netrc
import os
import secrets
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from accelerate.tracking import GeneralTracker, TensorBoardTracker, WandBTracker

INIT_S, FINISH_S = 10, 60  # what a run waits for a W&B server at most, at its beginning and at its end


def start_trackers(names: tuple[str, ...], folder: Path, about: dict[str, Any]) -> list[GeneralTracker]:
    """The trackers that --trackers names, in the run's folder. Called by the main process only.

    about: the run's recipe.json; its recipe, strategy and number of processes are the hyper-parameters.
    """
    where = {"strategy": about["strategy"], "processes": len(about["devices"])}
    hyper_parameters = {
        key: value if isinstance(value, (bool, int, float, str)) else str(value)
        for key, value in (about["recipe"] | where).items()
    }
    started: list[GeneralTracker] = []
    if "tensorboard" in names:
        started.append(TensorBoardTracker("tensorboard", folder))
        started[-1].start()
    if "wandb" in names:
        started.append(_start_wandb(folder, about["script"]))
    for tracker in started:
        tracker.store_init_configuration(hyper_parameters)
    return started


def finish_trackers(trackers: list[GeneralTracker], failed: bool) -> None:
    for tracker in trackers:
        if isinstance(tracker, _WandB):
            tracker.run.finish(exit_code=int(failed))
        else:
            tracker.finish()


class _WandB(WandBTracker):
    """W&B with the optimizer step as the axis of all curves: its own counter takes no step twice."""

    def start(self) -> None:
        super().start()
        self.run.define_metric("step")
        self.run.define_metric("*", step_metric="step")

    def log(self, values: dict[str, float], step: int, **_: Any) -> None:
        super().log(values | {"step": step})


def _start_wandb(folder: Path, project: str) -> _WandB:
    """One run, continued where WANDB_RUN_ID names it; offline without a key, or where no server answers.

    WANDB_PROJECT, WANDB_MODE and W&B's other variables hold as everywhere.
    """
    # Its reports on its own errors go to the same server, for whose answer they would wait at the end.
    os.environ.setdefault("WANDB_ERROR_REPORTING", "false")
    import wandb

    options = {
        "dir": folder,
        "name": folder.name,
        "id": os.environ.get("WANDB_RUN_ID") or secrets.token_hex(4),
        "resume": "allow",
        "settings": wandb.Settings(init_timeout=INIT_S, finish_timeout=FINISH_S, console="off", silent=True),
    }
    project = os.environ.get("WANDB_PROJECT", project)
    send_later = f"send it later by: wandb sync {folder}/wandb/offline-*"
    if "WANDB_MODE" not in os.environ and not _has_wandb_key(wandb.setup().settings.base_url):
        print(f"W&B has no key (wandb login): the run is logged offline; {send_later}", flush=True)
        options["mode"] = "offline"
    tracker = _WandB(project, **options)
    try:
        tracker.start()
    except wandb.errors.Error as error:
        print(f"W&B does not take the run ({error}): it is logged offline; {send_later}", flush=True)
        wandb.teardown()  # or the offline start would wait for the same server
        tracker = _WandB(project, **options | {"mode": "offline"})
        tracker.start()
    print(f"W&B run {tracker.run.id if tracker.run.offline else tracker.run.url}", flush=True)
    return tracker


def _has_wandb_key(base_url: str) -> bool:
    """Whether wandb.init would find a key, instead of asking for one at the terminal."""
    if os.environ.get("WANDB_API_KEY") or os.environ.get("WANDB_IDENTITY_TOKEN_FILE"):
        return True
    try:
        return netrc.netrc(os.environ.get("NETRC")).authenticators(urlsplit(base_url).hostname) is not None
    except (OSError, netrc.NetrcParseError):
        return False
