"""Opens a run: its folder, the state it resumes from, its records, its log, its saver and its telemetry."""

import contextlib
import dataclasses
import math
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import torch
from accelerate import Accelerator
from accelerate.utils import gather_object

from common.checkpoint.format import Checkpoint
from common.checkpoint.saver import Saver
from common.checkpoint.training import TrainingState
from common.distributed import strategy as job
from common.distributed.agreement import once
from common.distributed.rendezvous import most_hosts
from common.order import Steps
from common.recipe import Batch, ImageRecipe, Recipe, recipe_part
from common.run.exchange import Exchange
from common.run.folder import RunFolder, count_restarts, open_folder, resumed_from, script_name
from common.run.log import RunLog
from common.run.state import RunState
from common.system.env import EVENTS_FILE, processes_per_host, report
from common.system.files import not_written
from common.system.paths import ROOT, project_version
from common.system.threads import Heartbeat
from common.telemetry.sampling import ProcessInfo, Telemetry, this_process

VAL_CHOSEN = "a hash of their ids"  # how --max_val_images chooses images
ENTRIES = ("accelerate", "torchrun", "deepspeed")  # launchers
MODULES = ("accelerate.commands.launch", "torch.distributed.run")  # the same, as modules
_print = partial(print, flush=True)  # for the main process, also in the threads that save and upload


class OpenRun:
    """A run in one process: its settings and its progress; after open() also its parts."""

    # Of the main process, after open()
    place: RunFolder | None = None
    log: RunLog | None = None

    # After open()
    steps: Steps  # from the first of this process on
    saved_step: int  # of the newest checkpoint in the run's own folder, or 0
    record: dict[str, Any]  # the content of recipe.json
    saver: Saver
    exchange: Exchange

    def __init__(self, accelerator: Accelerator, recipe: Recipe, batch: Batch):
        self.accelerator, self.recipe, self.batch = accelerator, recipe, batch
        self.state = RunState()
        self.final: dict[str, Any] = {}  # parts of result.json that are known after open(), or at the end

    @property
    def folder(self) -> Path:
        """The run's folder. Main process only."""
        assert self.place
        return self.place.path

    def open(self, training: TrainingState, data: tuple[str, tuple[str, ...]], steps: Steps) -> None:
        """Restores the training from the newest checkpoint, if there is one. Collective.

        data: a name that changes with its content, and the names of the classes. On an error the run's folder
        is released.
        """
        accelerator, recipe = self.accelerator, self.recipe
        processes = gather_object([this_process(accelerator)])
        try:
            find = partial(self._find_resume_point, training, data[0], steps)
            content, self.saved_step, has_optimizer, began_at = once(
                accelerator, "run folder", find, recipe.timeout_s
            )
            self.state = state = RunState(**content)
            self.steps = dataclasses.replace(steps, first=state.step)
            if state.step:  # of a checkpoint
                checkpoint = self.place.checkpoint if self.place else None
                training.restore(checkpoint, state.scalars(), has_optimizer)
            self.record = _run_record(self, processes, began_at, data[0])
            once(accelerator, "log", self._start_log, recipe.timeout_s)
            path, mirror = (self.place.path, self.place.mirror) if self.place else (None, None)
            lost = self.place.leases[0].check if self.place else lambda: None
            manifest = _checkpoint_record(self, data[1]) | training.about()
            newest = self.saved_step or None
            shapes = training.layout.frozen_shapes() | training.layout.shapes()
            self.final["parameters"] = sum(map(math.prod, shapes.values()))
            self.saver = Saver(training, path, recipe.keep_every, manifest, mirror, newest, lost)
            rank, interval_s = accelerator.process_index, recipe.telemetry_s
            telemetry = Telemetry(
                processes, rank, path, interval_s, lambda: state.step, steps.last, state.wall_s
            )
            find_problem = self._problem if self.place else None
            skipped: Callable[[], list[int]] = list
            if isinstance(recipe, ImageRecipe):
                from common.data.workers import skipped
            self.exchange = Exchange(recipe.timeout_s, state, telemetry, find_problem, skipped)
            self._report_start()
        except BaseException:
            if self.place:
                self.place.release()
            raise

    def wait_for_save(self, heartbeat: Heartbeat) -> None:
        """Waits until the checkpoint in flight is written. ValueError when it could not be. Main process."""
        self.saver.wait(heartbeat)
        if problem := self.exchange.problem():
            raise ValueError(problem)

    def _find_resume_point(
        self, training: TrainingState, data: str, steps: Steps, heartbeat: Heartbeat
    ) -> list[Any]:
        """Opens the folder. Returns the state to resume from, which is empty at step 0, and its step if it is
        this run's own; if the optimizer's state is restored; and the --resume with which the run began. Main
        process only.

        ValueError for a checkpoint of other data, another model or optimizer, or a step after the run's last;
        and after too many restarts without a new checkpoint.
        """
        self.place = place = open_folder(self.recipe, run_name(self), steps.last, heartbeat, _print)
        state, has_optimizer, began_at = RunState(), False, None
        if checkpoint := place.checkpoint:
            state, has_optimizer, began_at = _from_checkpoint(
                checkpoint, place, training, self.recipe, data, steps
            )
        count_restarts(place.path, state.step)
        if checkpoint:
            print(f"continuing at step {checkpoint.step:,} with {checkpoint.folder}", flush=True)
        return [state.to_json(), 0 if place.is_new else state.step, has_optimizer, began_at]

    def _start_log(self, _: Heartbeat) -> None:
        assert self.place
        place, steps = self.place, self.steps
        with writing("the log", place.path):
            (place.path / "result.json").unlink(missing_ok=True)
            own = None if place.is_new else place.checkpoint
            writer = own.manifest.get("written_by", {}) if own else {}
            self.log = RunLog(
                place.path, self.recipe, self.record, self.state, steps.last, steps.per_epoch, writer
            )
        if place.mirror and self.saved_step:  # its upload may have been interrupted
            place.mirror.offer(self.saved_step, self.state.best_step)
        print(f"run folder {place.path}", flush=True)

    def _problem(self) -> str | None:
        """The first error that ends the run: a lost folder, a checkpoint or a line that can't be written."""
        assert self.place
        assert self.log
        return self.place.lost() or self.saver.problem or self.log.problem

    def _report_start(self) -> None:
        """Reports the first step to launch.py, and if all hosts see the run's folder. Collective."""
        if EVENTS_FILE not in os.environ:
            return
        file = self.folder.resolve() / "recipe.json" if self.place else None
        mains = self.exchange.of_main((file, file.read_bytes()) if file else None)
        is_shared = all(self.exchange.poll.gather(_holds(*mains)))
        if file:
            report(
                "began",
                step=self.state.step,
                processes=self.batch.processes,
                folder=str(file.parent),
                in_s3=bool(self.recipe.s3),
                is_shared=is_shared,
            )


@contextlib.contextmanager
def writing(what: str, folder: Path) -> Iterator[None]:
    """Turns an OSError into a ValueError that says what to do."""
    try:
        yield
    except OSError as error:
        raise not_written(what, folder, error) from error


def _holds(file: Path, content: bytes) -> bool:
    with contextlib.suppress(OSError):
        return file.read_bytes() == content
    return False


def _from_checkpoint(
    checkpoint: Checkpoint,
    folder: RunFolder,
    training: TrainingState,
    recipe: Recipe,
    data: str,
    steps: Steps,
) -> tuple[RunState, bool, str | None]:
    """The checkpoint's state, if its optimizer fits, and the --resume with which the run began."""
    before = checkpoint.manifest.get("data")
    if before != data and "data" not in recipe.allow_changed:  # ids must mean the same images and classes
        raise ValueError(
            f"{checkpoint.folder} was trained on {before}, and --data {recipe.data} is now {data}:"
            " give what it was, or --allow_changed data"
        )
    training.check(checkpoint)
    state = RunState.read(checkpoint)
    has_optimizer = _has_optimizer(checkpoint, state, training, recipe)
    if checkpoint.step > steps.last:
        raise ValueError(
            f"--max_steps {steps.last}: {checkpoint.folder} is at step {checkpoint.step:,} already; give more"
        )
    began_at = resumed_from(folder.path)
    for change in _changes(checkpoint, state, training, recipe, steps.per_epoch):
        print(change, flush=True)
    if folder.is_new:  # the best evaluation and the W&B run are another run's
        state.best, state.evaluated, state.wandb_id, state.wandb_url = {}, False, None, None
        state.stale, state.stopped = 0, False
        began_at = recipe.resume
    if checkpoint.step == steps.last or state.is_over(recipe.patience):
        # Only the run's end is missing, whose pictures need an evaluation.
        state.evaluated = False
    return state, has_optimizer, began_at


def _has_optimizer(checkpoint: Checkpoint, state: RunState, training: TrainingState, recipe: Recipe) -> bool:
    """False when the optimizer differs from the checkpoint's and --allow_changed permits it."""
    try:
        training.optimizer.check(checkpoint, state.scalars())
    except ValueError as problem:
        if "optimizer" not in recipe.allow_changed:
            raise ValueError(
                f"{problem}: give that optimizer, or --allow_changed optimizer to start its state afresh"
            ) from None
        print(f"the optimizer's state starts afresh: {problem}", flush=True)
        return False
    return True


def _changes(
    checkpoint: Checkpoint, state: RunState, training: TrainingState, recipe: Recipe, per_epoch: int
) -> Iterator[str]:
    """Yields a remark for each change that the flags permit, and that changes numbers."""
    writer = checkpoint.manifest.get("written_by", {})
    if types := changed_types(writer, vars(training.accelerator.precision)):
        yield f"the checkpoint was computed with other types: from here on {types}; losses differ by rounding"
    if writer.get("deterministic", recipe.deterministic) != recipe.deterministic:
        now = "deterministic, but" if recipe.deterministic else "not deterministic:"
        yield f"from here on the run is {now} it cannot be reproduced bit for bit"
    size, unit = recipe.batch_size, recipe.unit
    old_size = checkpoint.manifest["recipe"].get("batch_size", size)
    if old_size != size and state.epoch:
        # Steps keep their numbers. state.epoch is the step divided by the checkpoint's steps per epoch.
        old_epoch, old_step = divmod(state.step, round(state.step / state.epoch))
        epoch, step = divmod(state.step, per_epoch)
        old, new = old_step * old_size, step * size
        between = f"{abs(old - new):,} {unit}" if epoch == old_epoch else f"the {unit} between"
        yield (
            f"--batch_size {size} (it was {old_size}): step {state.step:,} came after {old:,} {unit} of epoch"
            f" {old_epoch + 1}, and comes after {new:,} of epoch {epoch + 1} now: {between} are"
            f" {'trained twice' if (epoch, new) < (old_epoch, old) else 'not trained'}"
        )


def changed_types(writer: dict[str, Any], types: dict[str, Any]) -> str:
    """The types of the computation that differ from the checkpoint's, whose weights are always fp32."""
    changed = (name for name, now in types.items() if writer.get(name, now) != now)
    return ", ".join(f"{name} {types[name]} (it was {writer[name]})" for name in changed)


# Its records


def run_name(run: OpenRun) -> str:
    """<strategy>_<batch>_<epochs>_<hosts>_<processes per host>; hosts that are away count, too."""
    hosts, on_each = most_hosts(), processes_per_host()
    strategy = job.strategy(run.accelerator)
    strategy = "ddp" if strategy == "single" and hosts * on_each > 1 else strategy
    return f"{strategy}_{run.batch.total}_{run.recipe.epochs}_{hosts}_{on_each}"


def _run_record(
    run: OpenRun, processes: list[ProcessInfo], began_at: str | None, source: str
) -> dict[str, Any]:
    """The content of recipe.json. processes: of all ranks. source: a name that changes with the data."""
    accelerator, recipe = run.accelerator, run.recipe
    return {
        "script": script_name(),
        "strategy": job.strategy(accelerator),
        "sharding": job.sharding(accelerator),
        **dataclasses.asdict(accelerator.precision),
        "compile": str(accelerator.compilation),
        "grad_checkpointing": accelerator.grad_checkpointing,
        "threads": torch.get_num_threads(),
        "recipe": dataclasses.asdict(recipe),
        "defaults": _defaults(recipe),
        "source": source,
        "unit": recipe.unit,
        "val_chosen": VAL_CHOSEN,
        "resumed_from": began_at,
        "command": _command(),
        "argv": sys.argv,
        "version": project_version(),
        "git_commit": _git_commit(),
        "versions": job.versions(),
        "hosts": list(dict.fromkeys(process.host for process in processes)),
        "devices": [process.device for process in processes],
    }


def _checkpoint_record(run: OpenRun, classes: tuple[str, ...]) -> dict[str, Any]:
    """The part of a checkpoint's manifest about the run that writes it."""
    names = ("script", "strategy", "version", "git_commit", "versions", "hosts", "val_chosen")
    writer = {name: run.record[name] for name in names} | dataclasses.asdict(run.accelerator.precision)
    writer |= {"processes": run.batch.processes, "deterministic": run.recipe.deterministic}
    recipe, source = recipe_part(run.recipe), run.record["source"]
    return {"recipe": recipe, "data": source, "classes": classes, "written_by": writer}


def _defaults(recipe: Recipe) -> dict[str, Any]:
    """The script's default recipe; fields derived from batch_size have the values of this recipe."""
    own = type(recipe)()
    return dataclasses.asdict(type(recipe)(batch_size=recipe.batch_size)) | {"batch_size": own.batch_size}


def _command() -> list[str]:
    """The command as typed: that of the outermost launcher of this script, else this process's.

    Words before the launcher (sudo, env, a shell) are left out: pages show the command, and they may be
    secret.
    """
    own = [word for word in sys.argv[1:] if not word.startswith("--local_rank")]
    command = ["python", sys.argv[0], *own]
    for process in psutil.Process().parents():
        with contextlib.suppress(psutil.Error):
            python, *words = process.cmdline() or [""]
            names_script = any(Path(word).name == Path(sys.argv[0]).name for word in words)
            is_python = Path(python).name.startswith("python")
            if not is_python or not names_script or words[len(words) - len(own) :] != own:
                continue
            if Path(words[0]).name in ENTRIES:
                command = [Path(words[0]).name, *words[1:]]
            elif Path(words[0]).name == "launch.py" or (words[0] == "-m" and words[1] in MODULES):
                command = ["python", *words]
    return command


def _git_commit() -> str | None:
    """The commit of the code, followed by + if files differ from it; None outside of a repository."""
    try:
        commit, changed = (
            subprocess.run(
                ["git", "-C", ROOT, *words], capture_output=True, text=True, timeout=10, check=True
            ).stdout
            for words in (["rev-parse", "HEAD"], ["status", "--porcelain"])
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return commit.strip() + ("+" if changed.strip() else "")
