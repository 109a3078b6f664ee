"""Settings, startup and shutdown of the validate.py and predict.py commands."""

import contextlib
import dataclasses
import tempfile
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
from accelerate import Accelerator
from torch import Tensor, nn

from onecurve.checkpoint.published import download_from_hub
from onecurve.checkpoint.weights import TrainedModel, as_timm_model, find_model
from onecurve.data.splits import ArraySplit, CroppedSplit, Split
from onecurve.distributed.accelerator import start
from onecurve.distributed.agreement import once
from onecurve.distributed.watch import watch
from onecurve.flags.recipe import Batch, ImageRecipe, Job, is_hub_name, parse, setting, timm_name
from onecurve.models.preprocessing import Crop, DataConfig, data_config
from onecurve.models.script import as_flags, load_script, normalisation, project_script, recipe_class
from onecurve.models.timm_models import data_config_of
from onecurve.system.env import world_size
from onecurve.system.threads import Heartbeat, run_with_heartbeat


@dataclasses.dataclass(frozen=True, kw_only=True)
class InferenceSettings:
    """Settings for commands that run inference with a trained model."""

    help_group = (
        "model and computation",
        "MODEL is a run folder, the S3 prefix of a run, a checkpoint folder, a folder\n"
        "written by export.py, or a .safetensors file.",
    )
    model: str | None = setting(
        None, "Name of the timm model. Use this flag if MODEL is a file that contains only weights."
    )
    pretrained: bool = setting(
        False, "Interpret MODEL as the name of a timm model, and download its pretrained weights."
    )
    which: str = setting("best", "Checkpoint to load if MODEL is a run.", choices=("best", "latest"))
    script: str | None = setting(
        None,
        "Script that trained the model. Required only if the script is not in this project.",
        metavar="FILE",
    )
    per_device_batch_size: int = setting(128, "Number of images per forward pass on each device.", minimum=1)
    mixed_precision: str | None = setting(
        None,
        "Precision of the forward pass. Default: the precision that the launcher sets, or otherwise bf16 on"
        " devices with native bf16 support.",
        choices=("no", "bf16", "fp16"),
    )
    deterministic: bool = setting(False, "Produce bitwise identical results in every run on the same GPUs.")
    deepspeed_config: str | None = setting(None)  # flags.yaml contains the help text
    timeout_s: int = setting(
        300, "Seconds without progress in a process after which the job ends.", minimum=1
    )

    def start(self) -> tuple[Accelerator, Batch]:
        """Start the job, and return the Accelerator and the batch arithmetic.

        The model is not compiled. Each process loads the entire model under every strategy.
        """
        job_setting_names = ["per_device_batch_size", "mixed_precision", "deterministic"]
        job_setting_names += ["deepspeed_config", "timeout_s"]
        job_settings: dict[str, Any] = {
            setting_name: getattr(self, setting_name) for setting_name in job_setting_names
        }
        return start(Job(batch_size=self.per_device_batch_size * world_size(), compile="no", **job_settings))

    @contextlib.contextmanager
    def opened_model(
        self, accelerator: Accelerator, location: str, list_inputs: Callable[[], Any] = lambda: None
    ) -> Iterator[tuple[TrainedModel, Any, Path]]:
        """Find and verify the model on the main process. All processes must call this method.

        Args:
            accelerator: The job's Accelerator.
            location: The model's path, s3:// URL or timm name.
            list_inputs: Function that the main process calls once it has found the model.

        Yields:
            The model, the result of list_inputs(), and a folder for temporary files.
        """
        with tempfile.TemporaryDirectory(prefix="inference-") as scratch:

            def find_model_and_list_inputs(heartbeat: Heartbeat) -> tuple[dict[str, Any], Any]:
                trained_model = self._find_model(location, Path(scratch), heartbeat)
                return dataclasses.asdict(trained_model), list_inputs()

            # The main process sends the model's fields and the inputs to the other processes as JSON.
            model_fields, inputs = once(accelerator, "model", find_model_and_list_inputs, self.timeout_s)
            yield TrainedModel(**model_fields), inputs, Path(scratch)

    def _find_model(self, location: str, scratch: Path, heartbeat: Heartbeat) -> TrainedModel:
        """Find the model in files, or download a timm model's weights from the Hugging Face Hub.

        Raises:
            ValueError: If the location does not exist or contains no valid model.
        """
        if self.pretrained or (is_hub_name(location) and not Path(location).exists()):
            timm_model_name = timm_name(location)
            trained_model = find_model(
                str(download_from_hub(timm_model_name)), self.which, scratch, heartbeat
            )
            return dataclasses.replace(
                trained_model, name=f"timm/{timm_model_name}", reports=f"validation/{timm_model_name}"
            )
        if "://" not in location and not Path(location).exists():
            remedy = "To use a timm model with this name, add --pretrained."
            raise ValueError(f"{location} does not exist. {remedy}")
        trained_model = find_model(location, self.which, scratch, heartbeat)
        # Only a file without a recipe needs --model to state the architecture.
        if self.model and not self.script and trained_model.recipe is None:
            return as_timm_model(trained_model, timm_name(self.model))
        return trained_model

    def finish(self, accelerator: Accelerator, report: Callable[[], None]) -> None:
        """Call report() on the main process and end the job. All processes must call this method."""
        once(accelerator, "report", partial(run_with_heartbeat, report), self.timeout_s)
        watch.begin_exit()
        accelerator.wait_for_everyone()  # under deepspeed, rank 0 hosts the store and must end last


def open_script(
    trained: TrainedModel, script_file: str | None, flag_words: list[str]
) -> tuple[ModuleType, ImageRecipe, Path]:
    """Return the train script's module, the model's recipe as changed by the flags, and the script's file.

    Loading the script runs its top-level code, but not its main().

    Args:
        trained: The trained model.
        script_file: The script's file. The default is the project's script named in the manifest.
        flag_words: Command-line flags that change the recipe.

    Raises:
        ValueError: If the script does not train an image classifier.
    """
    if script_file and not Path(script_file).is_file():
        raise ValueError(f"--script {script_file} does not exist")
    try:
        script_path = Path(script_file) if script_file else project_script(trained.script)
        script_module = load_script(script_path)
        recipe_type = recipe_class(script_module)
        if not issubclass(recipe_type, ImageRecipe):
            raise ValueError(
                f"{script_module.__name__} does not train an image classifier."
                " Set --script to a script that trains an image classifier."
            )
        trained_flags = as_flags(trained.recipe or {}, recipe_type)
        recipe = parse(recipe_type, flag_words, trained_flags).resolved()
        return script_module, recipe, script_path
    except ValueError as error:
        raise ValueError(f"{trained.name}: {error}") from None


def preprocessing_of(
    trained_model: TrainedModel, script: ModuleType, recipe: ImageRecipe, model: nn.Module
) -> DataConfig:
    """Return the model's input preprocessing.

    The preprocessing comes from the model's files, or from the script or timm if the files do not specify it.
    Flags override the result. Files from earlier versions of this project contain no preprocessing, because
    all models used the same crop.
    """
    if trained_model.recipe is None and not hasattr(script, "MEAN"):  # the file contains only weights
        return data_config_of(model, recipe)
    mean, std = normalisation(script, model)
    return data_config({"mean": mean, "std": std} | (trained_model.preprocessing or {}), recipe)


def evaluated_split(split: Split, trained_model: TrainedModel) -> Split:
    """Return the split, cropped if the model was evaluated on crops, even if all images are the same size."""
    return CroppedSplit(split) if trained_model.cropped and isinstance(split, ArraySplit) else split


def pixels_of(split: Split, ids: np.ndarray, recipe: ImageRecipe, crop: Crop) -> Tensor:
    """Return the pixels of the images with these ids as uint8 [n, H, W, 3], before normalisation."""
    image_size, seed = recipe.image_size, recipe.seed
    single_batch_plan = [(0, ids)]  # one batch in epoch 0
    pixel_batches = split.batches(
        single_batch_plan, device="cpu", train=False, size=image_size, seed=seed, workers=0, crop=crop
    )
    return next(iter(pixel_batches)).images


def record_head_inputs(model: Any) -> list[np.ndarray]:
    """Register a hook that records the inputs of the model's head in all later forward passes.

    The head is the first classifier of a timm model, or the last linear layer of any other model.

    Returns:
        List to which each forward pass appends a float32 array [B, features], copied to the CPU.
    """
    linear_layers = [layer for layer in model.modules() if isinstance(layer, nn.Linear)]
    head_layer = model.get_classifier() if hasattr(model, "get_classifier") else linear_layers[-1]
    # A distilled timm model has a tuple of two classifiers.
    head_layer = head_layer[0] if isinstance(head_layer, tuple) else head_layer
    head_inputs: list[np.ndarray] = []

    def keep_head_input(_: nn.Module, layer_inputs: tuple[Tensor, ...]) -> None:
        head_inputs.append(layer_inputs[0].flatten(1).float().cpu().numpy())

    head_layer.register_forward_pre_hook(keep_head_input)
    return head_inputs


def without_local_rank(words: list[str]) -> list[str]:
    """Return command-line words without the --local_rank flag that DeepSpeed's launcher adds."""
    return [word for word in words if not word.startswith("--local_rank")]
