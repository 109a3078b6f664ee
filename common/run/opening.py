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
from typing import TYPE_CHECKING, Any

import psutil
import torch
from accelerate.utils import gather_object

from common.checkpoint.format import Checkpoint
from common.checkpoint.saver import Saver
from common.checkpoint.training import TrainingState
from common.distributed import strategy as job
from common.distributed.agreement import once
from common.distributed.rendezvous import most_hosts, most_processes
from common.recipe import ImageRecipe, Recipe, recipe_part
from common.run.exchange import Exchange
from common.run.folder import RunFolder, count_restarts, script_name
from common.run.log import RunLog
from common.run.state import RunState
from common.system.env import EVENTS_FILE, report
from common.system.files import not_written
from common.system.paths import ROOT, project_version
from common.system.threads import Heartbeat

if TYPE_CHECKING:
    from common.run.run import Run
    from common.telemetry.sampling import ProcessInfo

VAL_CHOSEN = "a hash of their ids"  # how --max_val_images chooses images
ENTRIES = ("accelerate", "torchrun", "deepspeed")  # launchers
MODULES = ("accelerate.commands.launch", "torch.distributed.run")  # the same, as modules


def open_run(run: "Run", training: TrainingState, data: tuple[str, tuple[str, ...]]) -> None:
    """Restores the training from the newest checkpoint, if there is one, and opens the run's parts.

    data: a name that changes with its content, and the names of the classes. On an error the run's folder
    is released. Collective.
    """
    from common.telemetry.sampling import Telemetry, this_process

    accelerator, recipe = run.accelerator, run.recipe
    processes = gather_object([this_process(accelerator)])
    try:
        find = partial(_find_resume_point, run, training, data[0])
        content, run.saved_step, has_optimizer = once(accelerator, "run folder", find, recipe.timeout_s)
        place, rank = run.place, accelerator.process_index
        path, mirror = (place.path, place.mirror) if place else (None, None)
        run.state = state = RunState(**content)
        run.steps = dataclasses.replace(run.steps, first=state.step)
        if state.step:  # of a checkpoint
            training.restore(place.checkpoint if place else None, state.scalars(), has_optimizer)
        run.record = _run_record(run, processes, data[0])
        once(accelerator, "log", partial(_start_log, run, data[1]), recipe.timeout_s)
        run.final["parameters"] = sum(map(math.prod, training.gathering.shapes.values()))
        manifest = _checkpoint_record(run, data[1]) | training.about()
        lost = place.leases[0].check if place else lambda: None
        newest = run.saved_step or None
        run.saver = Saver(training, path, manifest, recipe.keep_every, mirror, newest, lost)
        last, wall_s = run.steps.last, state.wall_s
        telemetry = Telemetry(processes, rank, path, recipe.telemetry_s, lambda: state.step, last, wall_s)
        skipped: Callable[[], list[int]] = list
        if isinstance(recipe, ImageRecipe):
            from common.data.workers import skipped
        run.exchange = Exchange(run, telemetry, skipped)
        _report_start(run)
    except BaseException:
        if run.place:
            run.place.release()
        raise


def _find_resume_point(run: "Run", training: TrainingState, source: str, heartbeat: Heartbeat) -> list[Any]:
    """Opens the folder. Returns the state to resume from, which is empty at step 0, and its step if it is
    this run's own; and if the optimizer's state is restored. Main process only.

    ValueError for a checkpoint of other data, another model or optimizer, or a step after the run's last;
    and after too many restarts without a new checkpoint.
    """
    run.place = place = RunFolder(run.recipe, run_name(run), run.steps.last, heartbeat)
    state, has_optimizer, checkpoint = RunState(), False, place.checkpoint
    if checkpoint:
        state, has_optimizer = _from_checkpoint(checkpoint, run, training, source)
    count_restarts(place.path, state.step)
    if checkpoint:
        print(f"continuing at step {checkpoint.step:,} with {checkpoint.folder}", flush=True)
    return [state.to_json(), 0 if place.is_new else state.step, has_optimizer]


def _start_log(run: "Run", classes: tuple[str, ...], _: Heartbeat) -> None:
    assert run.place
    place = run.place
    with writing("the log", place.path):
        (place.path / "result.json").unlink(missing_ok=True)
        own = None if place.is_new else place.checkpoint
        writer = own.manifest.get("written_by", {}) if own else {}
        run.log = RunLog(place.path, run.recipe, run.record, classes, run.state, run.steps, writer)
    if place.mirror and run.saved_step:  # its upload may have been interrupted
        place.mirror.offer(run.saved_step, run.state.best_step)
    print(f"run folder {place.path}", flush=True)


def _report_start(run: "Run") -> None:
    """Reports the first step to launch.py, and if all hosts see the run's folder. Collective."""
    if EVENTS_FILE not in os.environ:
        return
    file = run.folder.resolve() / "recipe.json" if run.place else None
    mains = run.exchange.of_main((file, file.read_bytes()) if file else None)
    is_shared = all(run.exchange.poll.gather(_holds(*mains)))
    if file:
        report(
            "began",
            step=run.state.step,
            processes=run.batch.processes,
            folder=str(file.parent),
            in_s3=bool(run.recipe.s3),
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
    checkpoint: Checkpoint, run: "Run", training: TrainingState, source: str
) -> tuple[RunState, bool]:
    """The checkpoint's state, and if its optimizer fits."""
    recipe, steps, before = run.recipe, run.steps, checkpoint.manifest.get("data")
    if before != source and "data" not in recipe.allow_changed:  # ids must mean the same images and classes
        raise ValueError(
            f"{checkpoint.folder} was trained on {before}, and --data {recipe.data} is now {source}:"
            " give what it was, or --allow_changed data"
        )
    training.check(checkpoint)
    state = RunState.read(checkpoint)
    has_optimizer = _has_optimizer(checkpoint, state, training, recipe)
    if checkpoint.step > steps.last:
        raise ValueError(
            f"--max_steps {steps.last}: {checkpoint.folder} is at step {checkpoint.step:,} already; give more"
        )
    for change in _changes(checkpoint, state, training, recipe, steps.per_epoch):
        print(change, flush=True)
    assert run.place
    if run.place.is_new:  # the best evaluation and the W&B run are another run's
        state.best, state.evaluated, state.wandb_id, state.wandb_url = {}, False, None, None
        state.stale, state.stopped = 0, False
    if checkpoint.step == steps.last or state.is_over(recipe.patience):
        # Only the run's end is missing, whose pictures need an evaluation.
        state.evaluated = False
    return state, has_optimizer


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


def run_name(run: "Run") -> str:
    """<strategy>_<batch>_<epochs>_<hosts>_<mean processes per host>; hosts that are away count, too."""
    hosts, processes = most_hosts(), most_processes()
    strategy = job.strategy(run.accelerator)
    strategy = "ddp" if strategy == "single" and processes > 1 else strategy
    return f"{strategy}_{run.batch.total}_{run.recipe.epochs}_{hosts}_{processes / hosts:g}"


def _run_record(run: "Run", processes: "list[ProcessInfo]", source: str) -> dict[str, Any]:
    """The content of recipe.json. processes: of all ranks. source: a name that changes with the data."""
    accelerator, recipe = run.accelerator, run.recipe
    return {
        "script": script_name(),
        "strategy": job.strategy(accelerator),
        "sharding": job.sharding(accelerator),
        **dataclasses.asdict(accelerator.precision),
        "compile": str(accelerator.compilation),
        "grad_checkpointing": accelerator.grad_checkpointing,
        "step_graph": accelerator.step_graph,
        "threads": torch.get_num_threads(),
        "recipe": dataclasses.asdict(recipe),
        "defaults": _defaults(recipe),
        "source": source,
        "unit": recipe.unit,
        "val_chosen": VAL_CHOSEN,
        "resumed_from": run.place and run.place.began_at,
        "command": _command(),
        "argv": sys.argv,
        "version": project_version(),
        "git_commit": _git_commit(),
        "versions": job.versions(),
        "hosts": list(dict.fromkeys(process.host for process in processes)),
        "devices": [process.device for process in processes],
    }


def _checkpoint_record(run: "Run", classes: tuple[str, ...]) -> dict[str, Any]:
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
