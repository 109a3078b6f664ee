"""Opens a run and restores its newest checkpoint."""

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
from typing import TYPE_CHECKING, Any

import torch
from accelerate.utils import gather_object

from onecurve import __version__
from onecurve.checkpoint.format import Checkpoint, remove_temporary_folders, steps_in
from onecurve.checkpoint.saver import Saver
from onecurve.checkpoint.training import TrainingState
from onecurve.distributed import strategy as job
from onecurve.distributed.agreement import once
from onecurve.distributed.job_accelerator import JobAccelerator
from onecurve.flags.fields import flags_where
from onecurve.flags.recipe import Batch, ImageRecipe, Recipe, recipe_part, without_initial_weights
from onecurve.models.preprocessing import DataConfig, data_config
from onecurve.numerics.order import Steps
from onecurve.run.folder import RunFolder, count_restarts
from onecurve.run.identity import run_name, script_name
from onecurve.run.log import RunLog, host_change
from onecurve.run.predictions import Predictions
from onecurve.run.record import MainRecord
from onecurve.run.schemas import EndEntries, RecipeFile, StartLine
from onecurve.run.session import MessageExchange, RunSession, TakeSkippedIds, TrainingMeter
from onecurve.run.starts import add_start
from onecurve.run.state import RunState
from onecurve.system.env import EVENTS_FILE_VARIABLE, report_to_launcher
from onecurve.system.files import explaining_write_errors
from onecurve.system.output import log
from onecurve.system.paths import ROOT
from onecurve.system.processes import ancestors
from onecurve.system.text import some_of
from onecurve.system.threads import Heartbeat

if TYPE_CHECKING:
    from onecurve.telemetry.flops import Utilisation

# Method by which --max_val_images selects images, as recorded in recipe.json
VAL_SELECTION_METHOD = "a hash of their ids"


@dataclass
class RunSetup:
    """Components of a run that is being opened. open_session() restores the run's newest checkpoint."""

    accelerator: JobAccelerator
    recipe: Recipe
    batch: Batch
    steps: Steps
    training: TrainingState
    data_identity: str  # Identity of the data, which changes with the data's content
    classes: tuple[str, ...]
    are_images_cropped: bool | None = None  # True if the images stay encoded and are cropped
    # The model's preprocessing before open_session(), and the run's preprocessing after it. None if the
    # script determines the preprocessing.
    preprocessing: DataConfig | None = dataclasses.field(default=None, kw_only=True)
    run_folder: RunFolder | None = None  # None except on the main process
    main_record: MainRecord | None = None  # None except on the main process

    def open_session(self) -> RunSession:
        """Open the run folder, restore the newest checkpoint, and return the state of the open run.

        All ranks must call this method. The main process also creates the log and recipe.json. If opening
        fails, the main process releases the run folder.
        """
        from onecurve.telemetry.sampling import Telemetry, this_process

        accelerator, recipe, training = self.accelerator, self.recipe, self.training
        process_infos = gather_object([this_process(accelerator.device, job.device_name(accelerator))])
        host_by_rank = [process_info.host for process_info in process_infos]
        device_by_rank = [process_info.device for process_info in process_infos]
        try:
            # The main process finds the resume point, and once() sends it to all ranks as JSON.
            resume_point = once(accelerator, "run folder", self._find_resume_point, recipe.timeout_s)
            state_values, saved_step, has_optimizer, main_folder, saved_steps, preprocessing = resume_point
            self._refuse_outdated_folder(main_folder, saved_steps, host_by_rank)
            run_folder, state = self.run_folder, RunState(**state_values)
            self.preprocessing = preprocessing and data_config(preprocessing)
            folder, s3_mirror = (run_folder.path, run_folder.mirror) if run_folder else (None, None)
            steps = dataclasses.replace(self.steps, first=state.step)
            if state.step:  # The run resumes from a checkpoint
                checkpoint = run_folder.checkpoint if run_folder else None
                training.restore(checkpoint, state.scalars(), has_optimizer)
            recipe_file = self._recipe_file_content(list(dict.fromkeys(host_by_rank)), device_by_rank)
            run_manifest = self._run_manifest(recipe_file)
            # The first lease is on the run folder
            check_owner = run_folder.leases[0].check_owner if run_folder else lambda: None
            saver = Saver(
                training, folder, run_manifest, recipe.keep_every, s3_mirror, saved_step or None, check_owner
            )
            start_line = self._start_line(recipe_file, steps, state, has_optimizer)
            create_record = partial(self._create_record, recipe_file, start_line, steps, state, saver)
            once(accelerator, "log", create_record, recipe.timeout_s)
            rank = accelerator.process_index
            telemetry = Telemetry(
                process_infos, rank, folder, recipe.telemetry_s, lambda: state.step, steps.last, state.wall_s
            )
            take_skipped_ids: TakeSkippedIds = list
            if isinstance(recipe, ImageRecipe):
                from onecurve.data.workers import skipped_ids as take_skipped_ids
            exchange = MessageExchange(self.main_record, telemetry, recipe.timeout_s, take_skipped_ids)
            self._report_start(exchange, state.step)
            meter = TrainingMeter(accelerator, self.batch, recipe.log_samples)
            meter.resume(state, rank)
            predictions = Predictions(self.classes)
            return RunSession(
                recipe, steps, state, meter, predictions, saver, exchange, self.main_record, saved_step
            )
        except BaseException:
            if self.run_folder:
                self.run_folder.release()
            raise

    def _find_resume_point(self, heartbeat: Heartbeat) -> list[Any]:
        """Open the run folder and find the state from which the run resumes.

        Only the main process calls this method.

        Returns:
            A list with the following items:
            - State as JSON.
            - Step of the state, or 0 if the state belongs to a different run.
            - True if the optimizer state is restored.
            - Path of the run folder.
            - Steps of all checkpoints in the run folder.
            - Preprocessing as JSON, or None.

        Raises:
            ValueError: If the checkpoint does not match the data, the model or the optimizer, or if its step
                is after the run's last step. Also raised after too many restarts without a new checkpoint.
        """
        automatic_name = run_name(self.accelerator, self.recipe, self.batch)
        self.run_folder = run_folder = RunFolder(self.recipe, automatic_name, self.steps.last, heartbeat)
        state, has_optimizer, checkpoint = RunState(), False, run_folder.checkpoint
        if checkpoint:
            state, has_optimizer = self._state_from_checkpoint(checkpoint, run_folder.starts_from_other_run)
        count_restarts(run_folder.path, state.step)
        if checkpoint:
            log.info(f"continuing at step {checkpoint.step:,} with the checkpoint {checkpoint.folder}")
        preprocessing = self._chosen_preprocessing(checkpoint.manifest if checkpoint else None)
        saved_step = 0 if run_folder.starts_from_other_run else state.step
        saved_steps = steps_in(run_folder.path / "checkpoints")
        return [state.to_json(), saved_step, has_optimizer, str(run_folder.path), saved_steps, preprocessing]

    def _chosen_preprocessing(self, checkpoint_manifest: dict[str, Any] | None) -> dict[str, Any] | None:
        """Return the checkpoint's preprocessing as JSON, with the changes specified by flags.

        Without a checkpoint, the function returns the model's preprocessing, or None if the script determines
        it. In earlier versions, all scripts determined it, so their checkpoints do not contain it.
        """
        model_config = self.preprocessing
        if model_config is None or checkpoint_manifest is None:
            return model_config and model_config.to_json()
        model_values = {"mean": model_config.mean, "std": model_config.std}
        run_config = data_config(model_values | checkpoint_manifest.get("preprocessing", {}), self.recipe)
        if run_config != model_config:
            log.info(
                f"the run keeps its preprocessing ({run_config}), although the model now has {model_config}"
            )
        return run_config.to_json()

    def _refuse_outdated_folder(self, folder: str, saved_steps: list[int], host_by_rank: list[str]) -> None:
        """Raise ValueError if a different host stores newer checkpoints than rank 0.

        All ranks must call this method. The c10d rendezvous assigns rank 0 to the host whose name sorts
        first, so a newly joined host may become rank 0.

        Args:
            folder: Folder of the run.
            saved_steps: Training steps at which rank 0's disk contains a checkpoint.
            host_by_rank: Name of each rank's host.
        """
        steps_not_on_rank_0 = set(steps_in(Path(folder) / "checkpoints")) - set(saved_steps)
        newest_step_by_rank = gather_object([max(steps_not_on_rank_0, default=-1)])  # -1 means none
        newest_step = max(newest_step_by_rank)
        if newest_step > max(saved_steps, default=-1) and not self.recipe.s3:
            main_host = host_by_rank[0]
            newest_host = host_by_rank[newest_step_by_rank.index(newest_step)]
            # The message contains no `host NAME`, by which tools/launch/elastic.py finds a host to exclude.
            raise ValueError(
                f"{newest_host} stores the run's checkpoint of step {newest_step:,} in {folder}, but"
                f" {main_host}, which runs rank 0, does not. Copy the folder to {main_host}, use a shared"
                " folder, or specify --s3. To start a new run, choose a different --output_dir"
            )

    def _state_from_checkpoint(self, checkpoint: Checkpoint, is_other_run: bool) -> tuple[RunState, bool]:
        """Check that the run can resume from a checkpoint, and return the state from which it resumes.

        The best evaluation is reset if it is not comparable with this run's evaluations. The method logs all
        permitted changes that affect the results.

        Args:
            checkpoint: Checkpoint from which the run resumes.
            is_other_run: True if the checkpoint belongs to a different run.

        Returns:
            The state, and True if the optimizer state can be restored.

        Raises:
            ValueError: If the data, classes, model or optimizer differ, unless --allow_changed permits the
                difference. Also raised if the checkpoint's step is after the run's last step.
        """
        recipe, steps, manifest = self.recipe, self.steps, checkpoint.manifest
        old_identity, was_cropped = manifest.get("data"), manifest.get("cropped", self.are_images_cropped)
        has_data_changed = old_identity != self.data_identity or was_cropped != self.are_images_cropped
        # The sample ids in the state must refer to the same images.
        if old_identity != self.data_identity and "data" not in recipe.allow_changed:
            raise ValueError(
                f"{checkpoint.folder} was trained on {old_identity}, but --data {recipe.data} is now"
                f" {self.data_identity}. Specify the previous data, or add --allow_changed data"
            )
        if has_data_changed and "data" not in recipe.allow_changed:
            old_form, new_form = ("cropped", "whole") if was_cropped else ("whole", "cropped")
            raise ValueError(
                f"{checkpoint.folder} was trained on {old_form} images, because an earlier version of the"
                " code chose whole or cropped images by the amount of free memory. This version uses"
                f" {new_form} images. Add --allow_changed data to continue with {new_form} images"
            )
        self.training.check(checkpoint)  # Raises ValueError if class names, tensor names or shapes differ
        if class_changes := self.training.match(checkpoint).describe(recipe.data, str(checkpoint.folder)):
            log.info(
                f"{class_changes} The rows of the classification head and their state are reordered by class"
                " name"
            )
        state = RunState.read(checkpoint)
        has_optimizer = _can_restore_optimizer(checkpoint, state, self.training, recipe)
        if checkpoint.step > steps.last:
            raise ValueError(
                f"--max_steps {steps.last}: {checkpoint.folder} is already at step {checkpoint.step:,}."
                " Specify a larger number of steps"
            )
        for change_message in _change_messages(checkpoint, self.training, recipe):
            log.info(change_message)
        # Convert each value to the type it has in a manifest
        current_flags = json.loads(json.dumps(recipe_part(recipe)))
        recorded_flags = current_flags | manifest["recipe"]
        evaluation_flags = flags_where(type(recipe), "measures_best")
        changed_flags = [flag for flag in evaluation_flags if recorded_flags[flag] != current_flags[flag]]
        is_best_comparable = not (has_data_changed or changed_flags)
        # The best evaluation is reset if it belongs to a different run or is not comparable.
        if is_other_run or not is_best_comparable:
            reset_fields: dict[str, Any] = {"best": {}, "stale": 0, "stopped": False}
            state = dataclasses.replace(state, evaluated=False, **reset_fields)
        if is_other_run:
            state = dataclasses.replace(state, wandb_id=None, wandb_url=None)
        elif not is_best_comparable:
            log.info("the best result is reset, because the data or the flags of the evaluation have changed")
        if checkpoint.step == steps.last or state.ends_early(recipe.patience):
            # Only the end of the run is missing. Evaluate again, because the plots need predictions.
            state = dataclasses.replace(state, evaluated=False)
        return state, has_optimizer

    def _recipe_file_content(self, host_names: list[str], device_by_rank: list[str]) -> RecipeFile:
        """Return the content of recipe.json."""
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
            "defaults": _default_flags(recipe),
            "source": self.data_identity,
            "unit": recipe.unit,
            "val_chosen": VAL_SELECTION_METHOD,
            "resumed_from": self.run_folder.resumed_from if self.run_folder else None,
            "command": _user_command(),
            "argv": sys.argv,
            "version": __version__,
            "git_commit": _git_commit(),
            "versions": job.versions(accelerator),
            "hosts": host_names,
            "devices": device_by_rank,
        }
        if self.preprocessing:
            recipe_file["preprocessing"] = self.preprocessing.to_json()
        return recipe_file

    def _run_manifest(self, recipe_file: Mapping[str, object]) -> dict[str, Any]:
        """Return the manifest entries that each checkpoint of this run contains.

        `recipe_file` is the content of recipe.json.
        """
        writer_keys = ("script", "strategy", "version", "git_commit", "versions", "hosts", "val_chosen")
        written_by = {writer_key: recipe_file[writer_key] for writer_key in writer_keys}
        written_by |= dataclasses.asdict(self.accelerator.precision)
        written_by |= {"processes": self.batch.processes, "deterministic": self.recipe.deterministic}
        manifest: dict[str, Any] = {"recipe": recipe_part(self.recipe), "data": self.data_identity}
        manifest["classes"] = self.classes
        if self.are_images_cropped is not None:
            manifest["cropped"] = self.are_images_cropped
        if self.preprocessing:
            manifest["preprocessing"] = self.preprocessing.to_json()
        return manifest | {"written_by": written_by} | self.training.about()  # about() adds the optimizer

    def _start_line(
        self, recipe_file: RecipeFile, steps: Steps, state: RunState, has_optimizer: bool
    ) -> StartLine:
        """Return a line for starts.jsonl, without the differences from the checkpoint."""
        return {
            **recipe_file,
            "step": state.step,
            "at": time.time(),
            "per_device_batch_size": self.batch.per_device,
            "accumulation_steps": self.batch.accumulations,
            "steps_per_epoch": steps.per_epoch,
            "cropped": self.are_images_cropped,
            "has_optimizer": has_optimizer,
        }

    def _create_record(
        self,
        recipe_file: RecipeFile,
        start_line: StartLine,
        steps: Steps,
        state: RunState,
        saver: Saver,
        _: Heartbeat,
    ) -> None:
        """Prepare the files in the run folder for training, and set `main_record`.

        Only the main process calls this method. It adds `start_line` to starts.jsonl, removes result.json and
        temporary folders, and opens the log and the trackers. The log continues at the step in `state`.
        """
        run_folder = self.run_folder
        assert run_folder
        checkpoint = None if run_folder.starts_from_other_run else run_folder.checkpoint
        with explaining_write_errors("the log", run_folder.path):
            # Remove temporary folders, such as a checkpoint that was downloaded from a different run.
            remove_temporary_folders(run_folder.path / "checkpoints")
            path_flags = flags_where(type(self.recipe), "is_path")
            add_start(run_folder.path, start_line, checkpoint.manifest if checkpoint else None, path_flags)
            (run_folder.path / "result.json").unlink(missing_ok=True)  # Describes an earlier end of the run
            run_log = RunLog(run_folder.path, self.recipe, recipe_file, state, steps)
            written_by = checkpoint.manifest.get("written_by", {}) if checkpoint else {}
            if host_change_event := host_change(written_by, recipe_file):
                run_log.write_entry(host_change_event)
        if run_folder.mirror and checkpoint:  # The upload of the checkpoint may have been interrupted
            run_folder.mirror.offer(checkpoint.step, state.best_step)
        log.info(f"the run folder is {run_folder.path}")
        flops_utilisation = self._flops_utilisation(recipe_file)
        if isinstance(self.recipe, ImageRecipe):
            self._warn_if_export_would_fail()
        parameter_count = sum(map(math.prod, self.training.gatherer.shapes.values()))
        end_entries: EndEntries = {"parameters": parameter_count}
        job_parts = (self.accelerator, self.recipe, self.batch)
        self.main_record = MainRecord(
            *job_parts, steps, state, run_folder, saver, run_log, flops_utilisation, end_entries
        )

    def _flops_utilisation(self, recipe_file: RecipeFile) -> "Utilisation | None":
        """Return the FLOPs and the peak performance from which the run's MFU is computed.

        The result is None for a script without images or without build_model, and if the image size changes
        during training.
        """
        build_model = getattr(sys.modules["__main__"], "build_model", None)  # of the train script
        if not isinstance(self.recipe, ImageRecipe) or self.recipe.train_sizes or build_model is None:
            return None
        from onecurve.telemetry.flops import utilisation_of_run

        build_untrained_model = partial(build_model, without_initial_weights(self.recipe), len(self.classes))
        devices, precision = recipe_file["devices"], recipe_file["mixed_precision"]
        return utilisation_of_run(build_untrained_model, self.recipe.image_size, devices, precision)

    def _warn_if_export_would_fail(self) -> None:
        """Warn if export.py would refuse the model because the Model section depends on code outside it."""
        from onecurve.models.script import MOVE_ADVICE, model_section, undefined_names

        script_file = getattr(sys.modules[type(self.recipe).__module__], "__file__", None)
        # In a notebook, `script_file` is None. timm can rebuild a model with a pretrained_cfg from its
        # configuration.
        if script_file is None or hasattr(self.training.layout.module, "pretrained_cfg"):
            return
        model_code = model_section(Path(script_file).read_text())
        outside_names = undefined_names(model_code) if model_code else []
        if outside_names:
            needs = some_of(outside_names)
            log.info(f"warning: export.py will fail, because the Model section needs {needs}. {MOVE_ADVICE}")

    def _report_start(self, exchange: MessageExchange, first_step: int) -> None:
        """Report to launch.py the first step of this start, and whether all hosts can read the run folder.

        All ranks must call this method.
        """
        if EVENTS_FILE_VARIABLE not in os.environ:
            return
        recipe_path = self.run_folder.path.resolve() / "recipe.json" if self.run_folder else None
        local_path_and_content = (recipe_path, recipe_path.read_bytes()) if recipe_path else None
        # Rank 0 is the main process, the only one with a path
        (main_recipe_path, main_content), *_ = exchange.poll.gather(local_path_and_content)
        is_folder_shared = all(exchange.poll.gather(_has_content(main_recipe_path, main_content)))
        if recipe_path:
            run_location: dict[str, Any] = {"folder": str(recipe_path.parent), "in_s3": bool(self.recipe.s3)}
            run_location["is_shared"] = is_folder_shared
            report_to_launcher("began", step=first_step, processes=self.batch.processes, **run_location)


def _has_content(local_file: Path, expected_content: bytes) -> bool:
    """Return True if the file exists and contains exactly `expected_content`."""
    with contextlib.suppress(OSError):
        return local_file.read_bytes() == expected_content
    return False


def _can_restore_optimizer(
    checkpoint: Checkpoint, state: RunState, training: TrainingState, recipe: Recipe
) -> bool:
    """Return True if the optimizer state in the checkpoint matches this run's optimizer.

    Otherwise, the function logs the mismatch and returns False if --allow_changed contains `optimizer`, or
    raises ValueError.
    """
    try:
        training.optimizer.check(checkpoint, state.scalars(), training.row_orders(checkpoint))
    except ValueError as mismatch:
        if "optimizer" not in recipe.allow_changed:
            raise ValueError(
                f"{mismatch}. Specify the same optimizer, or add --allow_changed optimizer to reset the state"
            ) from None
        log.info(f"the optimizer's state is reset: {mismatch}")
        return False
    return True


def _change_messages(checkpoint: Checkpoint, training: TrainingState, recipe: Recipe) -> Iterator[str]:
    """Yield a message for each difference from the checkpoint that affects the numerical results.

    The differences are the compute dtypes, the package versions and --deterministic.
    """
    written_by = checkpoint.manifest.get("written_by", {})
    if dtypes := changed_dtypes(written_by, vars(training.accelerator.precision)):
        yield f"the run now computes with different data types: {dtypes}. Losses change by rounding errors"
    if package_changes := changed_packages(written_by.get("versions"), job.versions(training.accelerator)):
        yield f"the run now uses {package_changes}. Losses change by rounding errors"
    if written_by.get("deterministic", recipe.deterministic) != recipe.deterministic:
        determinism = "deterministic" if recipe.deterministic else "not deterministic"
        yield f"the run is now {determinism}. The result of the run can't be reproduced bit for bit"


def changed_dtypes(written_by: dict[str, Any], current_dtypes: dict[str, Any]) -> str:
    """Describe how the compute dtypes differ from a checkpoint's, or return "" if they are the same.

    `written_by` is an entry in the checkpoint's manifest. Weights are always stored in fp32.
    """
    changed = {name: dtype for name, dtype in current_dtypes.items() if written_by.get(name, dtype) != dtype}
    return ", ".join(f"{name} {dtype} (previously {written_by[name]})" for name, dtype in changed.items())


def changed_packages(old_versions: dict[str, str] | None, current_versions: dict[str, str]) -> str:
    """Describe the packages or attention kernels that differ from the checkpoint's, or return "".

    `old_versions` is None if the checkpoint contains no versions.
    """
    if old_versions is None:
        return ""
    package_changes = []
    for package in {**old_versions, **current_versions}:
        old_version, version = old_versions.get(package, "none"), current_versions.get(package, "none")
        if old_version != version:
            package_changes.append(f"{package} {version} (previously {old_version})")
    return ", ".join(package_changes)


def _default_flags(recipe: Recipe) -> dict[str, Any]:
    """Return the default value of each flag. Some defaults depend on flags in the given recipe.

    For example, the default of --streams depends on --batch_size.
    """
    default_recipe = type(recipe)()
    # Keep the given values of the flags that determine other defaults, and derive these defaults
    deciding_flags = {flag: getattr(recipe, flag) for flag in flags_where(type(recipe), "decides_defaults")}
    derived_defaults = dataclasses.asdict(type(recipe)(**deciding_flags).resolved())
    # The determining flags have fixed defaults
    return derived_defaults | {flag: getattr(default_recipe, flag) for flag in deciding_flags}


def _user_command() -> list[str]:
    """Return the command with which the user started the outermost launcher or this process.

    The result excludes words before the launcher (sudo, env, a shell), because these words may contain
    secrets, and pages show the command.
    """
    script_flags = [argument for argument in sys.argv[1:] if not argument.startswith("--local_rank")]
    user_command = ["python", sys.argv[0], *script_flags]
    for ancestor in ancestors():  # From the parent outwards, so the outermost launcher wins
        ancestor_words = ancestor.words[1:]
        contains_script = any(Path(argument).name == Path(sys.argv[0]).name for argument in ancestor_words)
        ends_with_flags = ancestor_words[len(ancestor_words) - len(script_flags) :] == script_flags
        # The first three words contain the launcher, such as `python launch.py` or `python -m <launcher>`.
        if contains_script and ends_with_flags and ancestor.launcher_name(within=3):
            # An installed command such as torchrun runs as `python /usr/bin/torchrun`.
            is_launcher_installed = ancestor.launcher_name(within=2) not in ("", "launch.py")
            if is_launcher_installed:
                user_command = [Path(ancestor_words[0]).name, *ancestor_words[1:]]
            else:
                user_command = ["python", *ancestor_words]
    return user_command


def _git_commit() -> str | None:
    """Return the code's Git commit, with a trailing + after changes, or None outside a repository."""
    try:
        run_git = partial(subprocess.run, capture_output=True, text=True, timeout=10, check=True)
        head_commit = run_git(["git", "-C", ROOT, "rev-parse", "HEAD"]).stdout
        uncommitted_changes = run_git(["git", "-C", ROOT, "status", "--porcelain"]).stdout
    except (OSError, subprocess.SubprocessError):
        return None
    return head_commit.strip() + ("+" if uncommitted_changes.strip() else "")
