"""What validate.py and predict.py share: their settings, start and end of such a job."""

import contextlib
import dataclasses
import tempfile
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from accelerate import Accelerator
from torch import Tensor, nn

from common.checkpoint.weights import TrainedModel, find
from common.data.splits import Split
from common.distributed.accelerator import start
from common.distributed.agreement import once
from common.distributed.watch import begin_exit
from common.recipe import Batch, ImageRecipe, Job, setting
from common.system.env import world_size
from common.system.threads import Heartbeat, run_with_heartbeat


@dataclasses.dataclass(frozen=True, kw_only=True)
class Inference:
    """The settings of every command that computes with a trained model."""

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
                return dataclasses.asdict(find(location, self.which, Path(scratch), heartbeat)), also()

            about, others = once(accelerator, "model", look, self.timeout_s)
            yield TrainedModel(**about), others, Path(scratch)

    def finish(self, accelerator: Accelerator, report: Callable[[], None]) -> None:
        """Calls report() on the main process, and ends the job."""
        once(accelerator, "report", partial(run_with_heartbeat, report), self.timeout_s)
        begin_exit()
        accelerator.wait_for_everyone()  # under deepspeed rank 0 hosts the store that the others use


def pixels_of(split: Split, ids: np.ndarray, recipe: ImageRecipe) -> Tensor:
    """The images of a split with these ids, before normalisation: uint8 [n, H, W, 3]."""
    size, seed = recipe.image_size, recipe.seed
    batches = split.batches([(0, ids)], device="cpu", train=False, size=size, seed=seed, workers=0)
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
