"""What validate.py and predict.py share: their settings, start and end of such a job."""

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
    """The settings of every command that computes with a trained model."""

    model: str | None = setting(None, "timm's name of the model, for a lone file of its weights")
    pretrained: bool = setting(False, "the first word is timm's name of a model: fetch it from the hub")
    which: str = setting("best", "which checkpoint of a run", choices=("best", "latest"))
    script: str | None = setting(None, "the script that trained the model, if not one of this project")
    output_dir: str | None = setting(None, "a folder for the results; unset: one named after the model")
    per_device_batch_size: int = setting(128, "images per forward on one device", minimum=1)
    mixed_precision: str | None = setting(None, choices=("no", "bf16", "fp16"))
    deterministic: bool = setting(False, "the same bits in each run on the same GPUs")
    deepspeed_config: str | None = setting(None)
    timeout_s: int = setting(300, "seconds after which a silent process ends the job", minimum=1)

    def start(self) -> tuple[Accelerator, Batch]:
        """Each process computes its share with the whole model, under any launcher's strategy."""
        names = ("per_device_batch_size", "mixed_precision", "deterministic", "deepspeed_config", "timeout_s")
        settings: dict[str, Any] = {name: getattr(self, name) for name in names}
        return start(Job(batch_size=self.per_device_batch_size * world_size(), compile="no", **settings))

    @contextlib.contextmanager
    def trained(
        self, accelerator: Accelerator, location: str, also: Callable[[], Any] = lambda: None
    ) -> Iterator[tuple[TrainedModel, Any, Path]]:
        """The model that the main process finds and verifies, its also(), and a scratch folder."""
        with tempfile.TemporaryDirectory(prefix="inference-") as scratch:

            def look(heartbeat: Heartbeat) -> tuple[dict[str, Any], Any]:
                return dataclasses.asdict(self._find(location, Path(scratch), heartbeat)), also()

            about, others = once(accelerator, "model", look, self.timeout_s)
            yield TrainedModel(**about), others, Path(scratch)

    def _find(self, location: str, scratch: Path, heartbeat: Heartbeat) -> TrainedModel:
        """Find the model in files, or fetch one of timm's from the hub."""
        if self.pretrained or (is_hub_name(location) and not Path(location).exists()):
            name = timm_name(location)
            found = find(str(download(name)), self.which, scratch, heartbeat)
            return dataclasses.replace(found, name=f"timm/{name}", reports=f"validation/{name}")
        if "://" not in location and not Path(location).exists():
            raise ValueError(
                f"{location}: there is no such folder or file. --pretrained fetches timm's models"
            )
        found = find(location, self.which, scratch, heartbeat)
        if self.model and not self.script and found.recipe is None:
            return of_model(found, timm_name(self.model))
        return found

    def finish(self, accelerator: Accelerator, report: Callable[[], None]) -> None:
        """Calls report() on the main process, and ends the job."""
        once(accelerator, "report", partial(run_with_heartbeat, report), self.timeout_s)
        watch.begin_exit()
        accelerator.wait_for_everyone()  # under deepspeed rank 0 hosts the store that the others use


def preprocessing_of(
    trained: TrainedModel, script: ModuleType, recipe: ImageRecipe, model: nn.Module
) -> DataConfig:
    """How the model's inputs are prepared: as its files record it, or its script or timm says, then by flags.

    Files of an earlier version record nothing: every model had the same crop.
    """
    if trained.recipe is None and not hasattr(script, "MEAN"):  # a lone file
        return data_config_of(model, recipe)
    mean, std = normalisation(script, model)
    return data_config({"mean": mean, "std": std} | (trained.preprocessing or {}), recipe)


def evaluated_split(split: Split, trained: TrainedModel) -> Split:
    """The split, cropped where the model was evaluated on crops, also if the images have one size."""
    return CroppedSplit(split) if trained.cropped and isinstance(split, ArraySplit) else split


def pixels_of(split: Split, ids: np.ndarray, recipe: ImageRecipe, crop: Crop) -> Tensor:
    """The images of a split with these ids, before normalisation: uint8 [n, H, W, 3]."""
    size, seed = recipe.image_size, recipe.seed
    batches = split.batches([(0, ids)], device="cpu", train=False, size=size, seed=seed, workers=0, crop=crop)
    return next(iter(batches)).images


def keep_features(model: Any) -> list[np.ndarray]:
    """The list to which each forward adds its features, float32 [B, features]: what the head gets.

    The head is the classifier of a model of timm, of two the first; of others the last linear layer.
    """
    linear = [layer for layer in model.modules() if isinstance(layer, nn.Linear)]
    head = model.get_classifier() if hasattr(model, "get_classifier") else linear[-1]
    kept: list[np.ndarray] = []
    head = head[0] if isinstance(head, tuple) else head
    head.register_forward_pre_hook(lambda _, given: kept.append(given[0].flatten(1).float().cpu().numpy()))
    return kept


def own_words(words: list[str]) -> list[str]:
    """The command's words without what DeepSpeed's launcher adds."""
    return [word for word in words if not word.startswith("--local_rank")]
