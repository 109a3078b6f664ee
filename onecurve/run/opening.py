"""Opens a run: its folder, resume point, record, log, saver and telemetry."""

import contextlib
import dataclasses
import json
import math
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from accelerate.utils import gather_object

from onecurve import __version__
from onecurve.checkpoint.format import Checkpoint, remove_temporary, steps_in
from onecurve.checkpoint.saver import Saver
from onecurve.checkpoint.training import TrainingState
from onecurve.distributed import strategy as job
from onecurve.distributed.agreement import once
from onecurve.distributed.job_accelerator import JobAccelerator
from onecurve.flags.fields import flags_where
from onecurve.flags.recipe import Batch, ImageRecipe, Recipe, recipe_part
from onecurve.models.preprocessing import DataConfig, data_config
from onecurve.numerics.order import Steps
from onecurve.run.folder import RunFolder, count_restarts
from onecurve.run.identity import run_name, script_name
from onecurve.run.log import RunLog, change_of_hosts
from onecurve.run.predictions import Predictions
from onecurve.run.record import MainRecord
from onecurve.run.schemas import RecipeFile, ResultEnd, StartLine
from onecurve.run.session import Exchange, Ids, Meter, Ranks
from onecurve.run.starts import add_start
from onecurve.run.state import RunState
from onecurve.system.env import EVENTS_FILE, report
from onecurve.system.files import writing
from onecurve.system.output import log
from onecurve.system.paths import ROOT
from onecurve.system.processes import parents
from onecurve.system.text import some_of
from onecurve.system.threads import Heartbeat

VAL_CHOSEN = "a hash of their ids"  # the way in which --max_val_images chooses images


@dataclass
class Opening:
    """Parts of a run that is being opened. open() restores the newest checkpoint, if one exists."""

    accelerator: JobAccelerator
    recipe: Recipe
    batch: Batch
    steps: Steps
    training: TrainingState
    source: str  # identity of the data; changes if the content of the data changes
    classes: tuple[str, ...]
    cropped: bool | None = None  # True if images stay encoded and are cropped
    # The model's preprocessing; after open(), the run's preprocessing. None if the script decides.
    preprocessing: DataConfig | None = dataclasses.field(default=None, kw_only=True)
    run_folder: RunFolder | None = None  # main process only
    record: MainRecord | None = None  # main process only

    def open(self) -> Ranks:
        """Open the run. If an error occurs, release the run's folder. Collective."""
        from onecurve.telemetry.sampling import Telemetry, this_process

        accelerator, recipe, training = self.accelerator, self.recipe, self.training
        processes = gather_object([this_process(accelerator)])
        try:
            resume_point = once(accelerator, "run folder", self._find_resume_point, recipe.timeout_s)
            content, saved_step, has_optimizer, folder, saved_steps, preprocessing = resume_point
            self._refuse_older(folder, saved_steps, [process.host for process in processes])
            run_folder, state = self.run_folder, RunState(**content)
            self.preprocessing = preprocessing and data_config(preprocessing)
            path, mirror = (run_folder.path, run_folder.mirror) if run_folder else (None, None)
            steps = dataclasses.replace(self.steps, first=state.step)
            if state.step:  # resumed from a checkpoint
                training.restore(
                    run_folder.checkpoint if run_folder else None, state.scalars(), has_optimizer
                )
            hosts = list(dict.fromkeys(process.host for process in processes))
            recipe_file = self._recipe_file(hosts, [process.device for process in processes])
            manifest, lost = (
                self._manifest(recipe_file),
                run_folder.leases[0].check if run_folder else lambda: None,
            )
            saver = Saver(training, path, manifest, recipe.keep_every, mirror, saved_step or None, lost)
            start = self._start_line(recipe_file, steps, state, has_optimizer)
            begin_log = partial(self._start_log, recipe_file, start, steps, state, saver)
            once(accelerator, "log", begin_log, recipe.timeout_s)
            rank, last, wall_s = accelerator.process_index, steps.last, state.wall_s
            telemetry = Telemetry(processes, rank, path, recipe.telemetry_s, lambda: state.step, last, wall_s)
            skipped: Ids = list
            if isinstance(recipe, ImageRecipe):
                from onecurve.data.workers import skipped
            exchange = Exchange(self.record, telemetry, recipe.timeout_s, skipped)
            self._report_start(exchange, state.step)
            meter = Meter(accelerator, self.batch, recipe.log_samples)
            meter.resume(state, rank)
            parts = meter, Predictions(self.classes), saver, exchange
            return Ranks(recipe, steps, state, *parts, self.record, saved_step)
        except BaseException:
            if self.run_folder:
                self.run_folder.release()
            raise

    def _find_resume_point(self, heartbeat: Heartbeat) -> list[Any]:
        """Open the run's folder and find the state to resume from. Main process only.

        Returns:
            The state as JSON, which is empty at step 0; the state's step, or 0 if the state is from another
            run; True if the optimizer's state is restored; the folder; the steps of the checkpoints in the
            folder; and the preprocessing.

        Raises:
            ValueError: The checkpoint belongs to other data, another model or another optimizer, or its step
                is after the run's last step. Also raised after too many restarts without a new checkpoint.
        """
        name = run_name(self.accelerator, self.recipe, self.batch)
        self.run_folder = run_folder = RunFolder(self.recipe, name, self.steps.last, heartbeat)
        state, has_optimizer, checkpoint = RunState(), False, run_folder.checkpoint
        if checkpoint:
            state, has_optimizer = self._from_checkpoint(checkpoint, run_folder.is_new)
        count_restarts(run_folder.path, state.step)
        if checkpoint:
            log.info(f"continuing at step {checkpoint.step:,} with {checkpoint.folder}")
        preprocessing = self._preprocessing(checkpoint.manifest if checkpoint else None)
        own_step, steps = 0 if run_folder.is_new else state.step, steps_in(run_folder.path / "checkpoints")
        return [state.to_json(), own_step, has_optimizer, str(run_folder.path), steps, preprocessing]

    def _preprocessing(self, manifest: dict[str, Any] | None) -> dict[str, Any] | None:
        """Return the checkpoint's preprocessing as changed by flags, or else the model's preprocessing.

        Checkpoints from earlier versions do not record the preprocessing, because the scripts determined it.
        """
        model_config = self.preprocessing
        if model_config is None or manifest is None:
            return model_config and model_config.to_json()
        recorded = {"mean": model_config.mean, "std": model_config.std} | manifest.get("preprocessing", {})
        run_config = data_config(recorded, self.recipe)
        if run_config != model_config:
            log.info(f"preprocessing: the run keeps {run_config}, although the model now has {model_config}")
        return run_config.to_json()

    def _refuse_older(self, folder: str, steps: list[int], hosts: list[str]) -> None:
        """Raise ValueError if another host's disk has newer checkpoints. Collective.

        With c10d, the host whose name sorts first becomes rank 0, so a newly joined host may become rank 0.

        Args:
            folder: The run's folder.
            steps: Steps of the checkpoints on rank 0's disk.
            hosts: Host of each rank.
        """
        unknown_steps = set(steps_in(Path(folder) / "checkpoints")) - set(steps)
        newest = gather_object([max(unknown_steps, default=-1)])
        if (step := max(newest)) > max(steps, default=-1) and not self.recipe.s3:
            raise ValueError(
                f"{hosts[newest.index(step)]} has the run's checkpoint of step {step:,} in {folder}, but"
                f" {hosts[0]}, with rank 0, lacks it. Copy the folder there, share it, or give --s3. A new"
                " run needs another --output_dir"
            )

    def _from_checkpoint(self, checkpoint: Checkpoint, is_new: bool) -> tuple[RunState, bool]:
        """Return the checkpoint's state, and True if the optimizer's state is restored.

        is_new: True if the checkpoint is from another run.
        """
        recipe, steps, manifest = self.recipe, self.steps, checkpoint.manifest
        before, was_cropped = manifest.get("data"), manifest.get("cropped", self.cropped)
        is_other = before != self.source or was_cropped != self.cropped
        if (
            before != self.source and "data" not in recipe.allow_changed
        ):  # the state's sample ids must refer to the same images
            raise ValueError(
                f"{checkpoint.folder} was trained on {before}, but --data {recipe.data} is now {self.source}."
                " Give the previous data, or --allow_changed data"
            )
        if is_other and "data" not in recipe.allow_changed:
            old, new = ("cropped", "whole") if was_cropped else ("whole", "cropped")
            raise ValueError(
                f"{checkpoint.folder} was trained on images that were {old}, because an earlier version chose"
                f" by the free memory. Now they are {new}. Give --allow_changed data to continue with these"
            )
        self.training.check(checkpoint)
        if line := self.training.match(checkpoint).describe(recipe.data, str(checkpoint.folder)):
            log.info(f"{line} The head's rows and their state follow the names")
        state = RunState.read(checkpoint)
        has_optimizer = _has_optimizer(checkpoint, state, self.training, recipe)
        if (at := checkpoint.step) > steps.last:
            raise ValueError(
                f"--max_steps {steps.last}: {checkpoint.folder} is at step {at:,} already. Give more steps"
            )
        for change in _changes(checkpoint, self.training, recipe):
            log.info(change)
        current = json.loads(json.dumps(recipe_part(recipe)))  # converts values to the types in a manifest
        recorded, measuring = manifest["recipe"], flags_where(type(recipe), "measures_best")
        is_other = is_other or any(recorded.get(name, current[name]) != current[name] for name in measuring)
        if is_new or is_other:  # the best evaluation is from another run, or is not comparable
            reset: dict[str, Any] = {"best": {}, "stale": 0, "stopped": False}
            state = dataclasses.replace(state, evaluated=False, **reset)
        if is_new:
            state = dataclasses.replace(state, wandb_id=None, wandb_url=None)
        elif is_other:
            log.info("the best result is reset, because data or flags of the evaluation have changed")
        if at == steps.last or state.is_over(recipe.patience):
            # Only the end of the run is missing. The pictures drawn at the end require an evaluation.
            state = dataclasses.replace(state, evaluated=False)
        return state, has_optimizer

    def _recipe_file(self, hosts: list[str], devices: list[str]) -> RecipeFile:
        """Return the content of recipe.json. `devices`: the device of each rank."""
        accelerator, recipe = self.accelerator, self.recipe
        recipe_file: RecipeFile = {
            "script": script_name(),
            "strategy": job.strategy(accelerator),
            "sharding": job.sharding(accelerator),
            "mixed_precision": accelerator.precision.mixed_precision,
            "half_precision": accelerator.precision.half_precision,
            "gradient_reduction": accelerator.precision.gradient_reduction,
            "compile": str(accelerator.compilation),
            "grad_checkpointing": accelerator.grad_checkpointing,
            "step_graph": accelerator.step_graph,
            "threads": torch.get_num_threads(),
            "recipe": dataclasses.asdict(recipe),
            "defaults": _defaults(recipe),
            "source": self.source,
            "unit": recipe.unit,
            "val_chosen": VAL_CHOSEN,
            "resumed_from": self.run_folder.began_at if self.run_folder else None,
            "command": _command(),
            "argv": sys.argv,
            "version": __version__,
            "git_commit": _git_commit(),
            "versions": job.versions(accelerator),
            "hosts": hosts,
            "devices": devices,
        }
        if self.preprocessing:
            recipe_file["preprocessing"] = self.preprocessing.to_json()
        return recipe_file

    def _manifest(self, recipe_file: Mapping[str, object]) -> dict[str, Any]:
        """Return the part of a checkpoint's manifest that describes the run."""
        names = ("script", "strategy", "version", "git_commit", "versions", "hosts", "val_chosen")
        writer = {name: recipe_file[name] for name in names} | dataclasses.asdict(self.accelerator.precision)
        writer |= {"processes": self.batch.processes, "deterministic": self.recipe.deterministic}
        manifest: dict[str, Any] = {"recipe": recipe_part(self.recipe), "data": self.source}
        manifest |= {"classes": self.classes} | ({} if self.cropped is None else {"cropped": self.cropped})
        manifest |= {"preprocessing": self.preprocessing.to_json()} if self.preprocessing else {}
        return manifest | {"written_by": writer} | self.training.about()

    def _start_line(
        self, recipe_file: RecipeFile, steps: Steps, state: RunState, has_optimizer: bool
    ) -> StartLine:
        """Return a line for starts.jsonl, before the comparison with a checkpoint."""
        return {
            **recipe_file,
            "step": state.step,
            "at": time.time(),
            "per_device_batch_size": self.batch.per_device,
            "accumulation_steps": self.batch.accumulations,
            "steps_per_epoch": steps.per_epoch,
            "cropped": self.cropped,
            "has_optimizer": has_optimizer,
        }

    def _start_log(
        self,
        recipe_file: RecipeFile,
        start: StartLine,
        steps: Steps,
        state: RunState,
        saver: Saver,
        _: Heartbeat,
    ) -> None:
        """Create the main process's record, with a log that starts at the given state.

        start: Line for starts.jsonl.
        """
        run_folder = self.run_folder
        assert run_folder
        checkpoint = None if run_folder.is_new else run_folder.checkpoint
        with writing("the log", run_folder.path):
            # Removes, for example, a checkpoint that was downloaded from another run
            remove_temporary(run_folder.path / "checkpoints")
            paths = flags_where(type(self.recipe), "is_path")
            add_start(run_folder.path, start, checkpoint.manifest if checkpoint else None, paths)
            (run_folder.path / "result.json").unlink(missing_ok=True)
            run_log = RunLog(run_folder.path, self.recipe, recipe_file, state, steps)
            writer = checkpoint.manifest.get("written_by", {}) if checkpoint else {}
            if change := change_of_hosts(writer, recipe_file):
                run_log.write_mark(change)
        if run_folder.mirror and checkpoint:  # the checkpoint's upload may have been interrupted
            run_folder.mirror.offer(checkpoint.step, state.best_step)
        log.info(f"run folder {run_folder.path}")
        utilisation_values = None
        if isinstance(self.recipe, ImageRecipe):
            from onecurve.telemetry.flops import utilisation

            utilisation_values = utilisation(
                self.recipe, len(self.classes), recipe_file["devices"], recipe_file["mixed_precision"]
            )
            self._warn_of_export()
        final: ResultEnd = {"parameters": sum(map(math.prod, self.training.gathering.shapes.values()))}
        run = self.accelerator, self.recipe, self.batch
        self.record = MainRecord(*run, steps, state, run_folder, saver, run_log, utilisation_values, final)

    def _warn_of_export(self) -> None:
        """Warn if export.py would refuse the trained model because code is outside the Model section."""
        from onecurve.models.script import MOVE, model_section, names_from_above

        file = getattr(sys.modules[type(self.recipe).__module__], "__file__", None)  # None in a notebook
        # timm can rebuild such a model
        if file is None or hasattr(self.training.layout.module, "pretrained_cfg"):
            return
        section = model_section(Path(file).read_text())
        if section and (names := names_from_above(section)):
            log.info(f"warning: export.py will refuse: the Model section needs {some_of(names)}. {MOVE}")

    def _report_start(self, exchange: Exchange, step: int) -> None:
        """Report the first step to launch.py, and whether all hosts see the run's folder. Collective."""
        if EVENTS_FILE not in os.environ:
            return
        file = self.run_folder.path.resolve() / "recipe.json" if self.run_folder else None
        main_file = exchange.poll.gather((file, file.read_bytes()) if file else None)[0]
        is_shared = all(exchange.poll.gather(_holds(*main_file)))
        if file:
            facts = {"folder": str(file.parent), "in_s3": bool(self.recipe.s3), "is_shared": is_shared}
            report("began", step=step, processes=self.batch.processes, **facts)


def _holds(file: Path, content: bytes) -> bool:
    """Return True if the file exists and has this content."""
    with contextlib.suppress(OSError):
        return file.read_bytes() == content
    return False


def _has_optimizer(checkpoint: Checkpoint, state: RunState, training: TrainingState, recipe: Recipe) -> bool:
    """Return True if the checkpoint's optimizer state can be restored.

    For a state that does not match, return False if --allow_changed permits the change, or else raise
    ValueError.
    """
    try:
        training.optimizer.check(checkpoint, state.scalars(), training.moved_rows(checkpoint))
    except ValueError as problem:
        if "optimizer" not in recipe.allow_changed:
            raise ValueError(
                f"{problem}. Give that optimizer, or --allow_changed optimizer to reset its state"
            ) from None
        log.info(f"the optimizer's state is reset: {problem}")
        return False
    return True


def _changes(checkpoint: Checkpoint, training: TrainingState, recipe: Recipe) -> Iterator[str]:
    """Yield a message for each permitted change that affects numerical results."""
    writer = checkpoint.manifest.get("written_by", {})
    if types := changed_types(writer, vars(training.accelerator.precision)):
        yield f"the checkpoint was computed with other types. From now on: {types}. Losses differ by rounding"
    if packages := changed_packages(writer.get("versions"), job.versions(training.accelerator)):
        yield f"from now on, the run uses {packages}. Losses differ by rounding"
    if writer.get("deterministic", recipe.deterministic) != recipe.deterministic:
        now = "deterministic" if recipe.deterministic else "not deterministic"
        yield f"from now on, the run is {now}. It can't be reproduced bit for bit"


def changed_types(writer: dict[str, Any], types: dict[str, Any]) -> str:
    """Describe how the compute dtypes differ from the checkpoint's dtypes. Weights are always fp32."""
    changed = (name for name, now in types.items() if writer.get(name, now) != now)
    return ", ".join(f"{name} {types[name]} (it was {writer[name]})" for name in changed)


def changed_packages(before: dict[str, str] | None, now: dict[str, str]) -> str:
    """Describe the packages, or the attention kernel, that differ. `before`: None if unknown."""
    before = now if before is None else before
    pairs = {name: (before.get(name, "none"), now.get(name, "none")) for name in {**before, **now}}
    return ", ".join(f"{name} {new} (it was {old})" for name, (old, new) in pairs.items() if old != new)


def _defaults(recipe: Recipe) -> dict[str, Any]:
    """Return the script's default recipe. Defaults that depend on other flags use this recipe's values."""
    default = type(recipe)()
    deciding = {name: getattr(recipe, name) for name in flags_where(type(recipe), "decides_defaults")}
    with_derived = dataclasses.asdict(type(recipe)(**deciding).resolved())
    return with_derived | {name: getattr(default, name) for name in deciding}


def _command() -> list[str]:
    """Return the command that the user typed: the outermost launcher's command, or this process's.

    Words before the launcher (sudo, env, a shell) are omitted, because they may contain secrets and pages
    show the command.
    """
    flags = [word for word in sys.argv[1:] if not word.startswith("--local_rank")]
    command = ["python", sys.argv[0], *flags]
    for parent in parents():
        words = parent.words[1:]
        names_script = any(Path(word).name == Path(sys.argv[0]).name for word in words)
        if names_script and words[len(words) - len(flags) :] == flags and parent.launcher(within=3):
            is_program = parent.launcher(within=2) not in ("", "launch.py")
            command = [Path(words[0]).name, *words[1:]] if is_program else ["python", *words]
    return command


def _git_commit() -> str | None:
    """Return the commit of the code, with a + if files were modified, or None outside a repository."""
    try:
        git = partial(subprocess.run, capture_output=True, text=True, timeout=10, check=True)
        commit = git(["git", "-C", ROOT, "rev-parse", "HEAD"]).stdout
        status = git(["git", "-C", ROOT, "status", "--porcelain"]).stdout
    except (OSError, subprocess.SubprocessError):
        return None
    return commit.strip() + ("+" if status.strip() else "")
