"""Settings, startup and shutdown of validate.py and predict.py."""

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

from onecurve.checkpoint.published import download
from onecurve.checkpoint.weights import TrainedModel, find, of_model
from onecurve.data.splits import ArraySplit, CroppedSplit, Split
from onecurve.distributed.accelerator import start
from onecurve.distributed.agreement import once
from onecurve.distributed.watch import watch
from onecurve.flags.recipe import Batch, ImageRecipe, Job, is_hub_name, setting, timm_name
from onecurve.models.preprocessing import Crop, DataConfig, data_config
from onecurve.models.script import normalisation
from onecurve.models.timm_models import data_config_of
from onecurve.system.env import world_size
from onecurve.system.threads import Heartbeat, run_with_heartbeat


@dataclasses.dataclass(frozen=True, kw_only=True)
class Inference:
    """Settings of the commands that run inference with a trained model."""

    help_group = (
        "model and computation",
        "MODEL is a run's folder or S3 prefix, a checkpoint's folder, a folder written\n"
        "by export.py, or a .safetensors file.",
    )
    model: str | None = setting(
        None, "Name of the model in timm, if MODEL is a file that contains only weights."
    )
    pretrained: bool = setting(False, "Use MODEL as the name of a timm model, and download its weights.")
    which: str = setting("best", "Checkpoint to use if MODEL is a run.", choices=("best", "latest"))
    script: str | None = setting(
        None, "Script that trained the model, if the script is not in this project.", metavar="FILE"
    )
    per_device_batch_size: int = setting(128, "Images per forward pass on one device.", minimum=1)
    mixed_precision: str | None = setting(
        None,
        "Precision of the forward pass. Default: the launcher's setting, or bf16 on devices with native bf16"
        " support.",
        choices=("no", "bf16", "fp16"),
    )
    deterministic: bool = setting(False, "Produce bitwise identical results in every run on the same GPUs.")
    deepspeed_config: str | None = setting(None)
    timeout_s: int = setting(
        300, "The job ends when a process makes no progress for this many seconds.", minimum=1
    )

    def start(self) -> tuple[Accelerator, Batch]:
        """Start the job. Each process loads the whole model under any strategy of the launcher."""
        names = ("per_device_batch_size", "mixed_precision", "deterministic", "deepspeed_config", "timeout_s")
        settings: dict[str, Any] = {name: getattr(self, name) for name in names}
        return start(Job(batch_size=self.per_device_batch_size * world_size(), compile="no", **settings))

    @contextlib.contextmanager
    def trained(
        self, accelerator: Accelerator, location: str, list_inputs: Callable[[], Any] = lambda: None
    ) -> Iterator[tuple[TrainedModel, Any, Path]]:
        """Find and verify the model on the main process. Collective.

        Yields:
            The model, the result of list_inputs() on the main process, and a scratch folder.
        """
        with tempfile.TemporaryDirectory(prefix="inference-") as scratch:

            def look(heartbeat: Heartbeat) -> tuple[dict[str, Any], Any]:
                return dataclasses.asdict(self._find(location, Path(scratch), heartbeat)), list_inputs()

            fields, inputs = once(accelerator, "model", look, self.timeout_s)
            yield TrainedModel(**fields), inputs, Path(scratch)

    def _find(self, location: str, scratch: Path, heartbeat: Heartbeat) -> TrainedModel:
        """Find the model in files, or download timm's weights from the hub."""
        if self.pretrained or (is_hub_name(location) and not Path(location).exists()):
            name = timm_name(location)
            trained = find(str(download(name)), self.which, scratch, heartbeat)
            return dataclasses.replace(trained, name=f"timm/{name}", reports=f"validation/{name}")
        if "://" not in location and not Path(location).exists():
            raise ValueError(f"{location}: no such folder or file. For a timm model, add --pretrained.")
        trained = find(location, self.which, scratch, heartbeat)
        if self.model and not self.script and trained.recipe is None:
            return of_model(trained, timm_name(self.model))
        return trained

    def finish(self, accelerator: Accelerator, report: Callable[[], None]) -> None:
        """Call report() on the main process and end the job. Collective."""
        once(accelerator, "report", partial(run_with_heartbeat, report), self.timeout_s)
        watch.begin_exit()
        accelerator.wait_for_everyone()  # under the deepspeed launcher, rank 0 hosts the store of all ranks


def preprocessing_of(
    trained: TrainedModel, script: ModuleType, recipe: ImageRecipe, model: nn.Module
) -> DataConfig:
    """Return the preprocessing of the model's inputs.

    The preprocessing is read from the model's files. If the files do not record it, the script or timm
    determines the preprocessing. Flags override the result. Files of earlier versions contain no record,
    because every model used the same crop.
    """
    if trained.recipe is None and not hasattr(script, "MEAN"):  # the file contains only weights
        return data_config_of(model, recipe)
    mean, std = normalisation(script, model)
    return data_config({"mean": mean, "std": std} | (trained.preprocessing or {}), recipe)


def evaluated_split(split: Split, trained: TrainedModel) -> Split:
    """Return the split. Crop it if the model was evaluated on crops, even if all images have one size."""
    return CroppedSplit(split) if trained.cropped and isinstance(split, ArraySplit) else split


def pixels_of(split: Split, ids: np.ndarray, recipe: ImageRecipe, crop: Crop) -> Tensor:
    """Return the images with these ids before normalisation, as uint8 [n, H, W, 3]."""
    size, seed = recipe.image_size, recipe.seed
    batches = split.batches([(0, ids)], device="cpu", train=False, size=size, seed=seed, workers=0, crop=crop)
    return next(iter(batches)).images


def keep_features(model: Any) -> list[np.ndarray]:
    """Record the inputs of the model's head.

    The head is the classifier of a timm model (the first one if there are two), or the last linear layer of
    another model.

    Returns:
        A list to which each forward pass appends its features, float32 [B, features].
    """
    linear = [layer for layer in model.modules() if isinstance(layer, nn.Linear)]
    head = model.get_classifier() if hasattr(model, "get_classifier") else linear[-1]
    features: list[np.ndarray] = []
    head = head[0] if isinstance(head, tuple) else head
    head.register_forward_pre_hook(
        lambda _, inputs: features.append(inputs[0].flatten(1).float().cpu().numpy())
    )
    return features


def own_words(words: list[str]) -> list[str]:
    """Return the command's words without the word that DeepSpeed's launcher adds."""
    return [word for word in words if not word.startswith("--local_rank")]
