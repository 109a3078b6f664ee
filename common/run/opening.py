"""Opens a run: its folder, the state it resumes from, its log, its saver and its telemetry."""

import contextlib
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from accelerate import Accelerator
from accelerate.utils import gather_object

from common.checkpoint.saver import Saver
from common.checkpoint.training import TrainingState
from common.distributed.agreement import once
from common.order import Steps
from common.recipe import Batch, Recipe
from common.run.exchange import Exchange
from common.run.facts import about_checkpoint, about_run, run_name
from common.run.output import RunOutput
from common.run.resume import ResumePoint, resume_point
from common.run.state import RunState
from common.run.storage import open_storage
from common.system.env import EVENTS_FILE, report
from common.system.threads import Heartbeat
from common.telemetry.collect import Telemetry, this_process


@dataclass
class OpenRun:
    state: RunState
    saved_step: int  # of the newest checkpoint in the run's own folder, 0 without one
    output: RunOutput | None  # of the main process
    saver: Saver
    exchange: Exchange
    devices: list[str]  # of all processes


def open_run(
    accelerator: Accelerator,
    recipe: Recipe,
    batch: Batch,
    training: TrainingState,
    data: tuple[str, tuple[str, ...]],
    steps: Steps,
) -> OpenRun:
    """Restores the training from the newest checkpoint, if there is one. Collective.

    data: a name that changes with its content, and the names of the classes. On an error the
    run's folder is released.
    """
    output: RunOutput | None = None
    source, classes = data
    processes = gather_object([this_process(accelerator)])

    def open_output(beat: Heartbeat) -> dict[str, Any]:
        nonlocal output
        storage = open_storage(recipe, run_name(accelerator, recipe, batch), steps.last, beat, _say)
        output = RunOutput(accelerator, recipe, batch, storage)
        return resume_point(storage, training, recipe, source, steps).to_json()

    def start_log(_: Heartbeat) -> None:
        assert output
        output.start_log(about, state, saved_step, steps.last, steps.per_epoch)

    try:
        point = ResumePoint.from_json(once(accelerator, "run folder", open_output, recipe.timeout_s))
        state, saved_step = point.state, point.saved_step
        if point.has_checkpoint:
            found = output.storage.checkpoint if output else None
            training.restore(found, state.scalars(), with_optimizer=point.has_optimizer)
        about = about_run(accelerator, recipe, processes, point.resumed_from, source)
        once(accelerator, "log", start_log, recipe.timeout_s)
        folder = output.folder if output else None
        mirror = output.storage.mirror if output else None
        manifest = about_checkpoint(about, recipe, batch, accelerator, classes) | training.about()
        lost = output.storage.owners[0].check if output else lambda: None
        saver = Saver(training, folder, recipe.keep_every, manifest, mirror, saved_step or None, lost)
        if output:
            output.saver = saver
        rank = accelerator.process_index
        telemetry = Telemetry(
            processes, rank, folder, recipe.telemetry_s, lambda: state.step, steps.last, state.wall_s
        )
        exchange = Exchange(recipe.timeout_s, state, telemetry, output)
        _tell_launcher(exchange, recipe, batch, state.step)
        return OpenRun(state, saved_step, output, saver, exchange, about["devices"])
    except BaseException:
        if output:
            output.storage.release()
        raise


def _tell_launcher(exchange: Exchange, recipe: Recipe, batch: Batch, step: int) -> None:
    """Reports the first step to launch.py, and if all hosts see the run's folder. Collective."""
    if EVENTS_FILE not in os.environ:
        return
    record = exchange.output.folder.resolve() / "recipe.json" if exchange.output else None
    told = exchange.of_main((record, record.read_bytes()) if record else None)
    is_shared = all(exchange.poll.gather(_holds(*told)))
    if record:
        report(
            "began",
            step=step,
            processes=batch.processes,
            folder=str(record.parent),
            in_s3=bool(recipe.s3),
            is_shared=is_shared,
        )


def _holds(file: Path, content: bytes) -> bool:
    with contextlib.suppress(OSError):
        return file.read_bytes() == content
    return False


def _say(message: str) -> None:
    """Prints. Called by the main process, also in the threads that save and upload."""
    print(message, flush=True)
