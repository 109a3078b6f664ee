"""Train models with --deterministic in one launch, and print a SHA-256 hash of each model's tensors.

The argument is a file with a JSON list of rows. Each row is a train script with its flags, including
--per_device_batch_size for the micro-batch size. Each model trains two steps of six micro-batches.
"""

import hashlib
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from accelerate import Accelerator
from torch import Tensor, nn

from onecurve.distributed.accelerator import prepare, start
from onecurve.distributed.layout import plain_module
from onecurve.distributed.process import run_process
from onecurve.flags.recipe import Batch, Job, parse
from onecurve.models.script import load_script, normalisation, recipe_class
from onecurve.numerics.augment import to_float
from onecurve.system.paths import ROOT

STEPS, MICRO_BATCHES, CLASSES = 2, 6, 10


def main() -> None:
    job = Job(batch_size=MICRO_BATCHES, per_device_batch_size=1, mixed_precision="no", deterministic=True)
    accelerator, batch = start(job)
    for words in json.loads(Path(sys.argv[1]).read_text()):
        trained = train(accelerator, batch, words)
        accelerator.print(json.dumps([" ".join(words), trained]))
        accelerator.free_memory()
        if plugin := getattr(accelerator.state, "fsdp_plugin", None):
            # By default, FSDP would keep wrapping the first model's block classes.
            plugin.transformer_cls_names_to_wrap = None


def train(accelerator: Accelerator, batch: Batch, words: list[str]) -> str:
    script = load_script(ROOT / words[0])
    recipe: Any = parse(recipe_class(script), words[1:])
    torch.manual_seed(recipe.seed)
    model = script.build_model(recipe, CLASSES)
    pixels = normalisation(script, model)
    model, optimizer = prepare(accelerator, model, script.build_optimizer(model, recipe))
    for step in range(STEPS):
        for k in batch.micro_batches(accelerator.process_index):
            inputs, labels = images(recipe, step * MICRO_BATCHES + k, *pixels)
            torch.manual_seed(k)
            with accelerator.accumulate(model):
                accelerator.backward(F.cross_entropy(model(inputs), labels))
                optimizer.step()
                optimizer.zero_grad()
    trained = tensors(plain_module(model), optimizer.optimizer)
    model.eval()
    with torch.no_grad():
        return digest([*trained, model(images(recipe, 0, *pixels)[0])])


def images(recipe: Any, number: int, *pixels: tuple[float, ...]) -> tuple[Tensor, Tensor]:
    """Return a micro-batch in the scripts' format: float [b, 3, S, S] channels_last, and int64 labels [b]."""
    random = np.random.RandomState([recipe.seed, number])
    count = recipe.per_device_batch_size
    raw = torch.from_numpy(random.randint(0, 256, (count, 8, 8, 3), np.uint8))
    return to_float(raw, *pixels, recipe.image_size), torch.from_numpy(random.randint(0, CLASSES, count))


def tensors(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[Tensor]:
    """Return a training run's parameters, buffers and optimizer state, as one process would hold them."""
    states = [value for p in model.parameters() for _, value in sorted(optimizer.state[p].items())]
    return [getattr(t, "full_tensor", lambda t=t: t)() for t in (*model.state_dict().values(), *states)]


def digest(parts: list[Tensor]) -> str:
    sha = hashlib.sha256()
    for tensor in parts:
        sha.update(tensor.detach().contiguous().numpy().tobytes())
    return sha.hexdigest()


if __name__ == "__main__":
    run_process(main)
