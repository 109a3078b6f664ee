"""Metrics over every sample exactly once, whatever the number of processes."""

from collections.abc import Callable

import torch
import torch.distributed as dist
import torch.nn.functional as F
from accelerate import Accelerator
from torch import nn

from common.augment import to_float
from common.images import ArraySplit, FileSplit
from common.order import evaluation_plan
from common.recipe import Batch, ImageRecipe


@torch.no_grad()
def evaluate(
    accelerator: Accelerator,
    model: nn.Module,
    split: ArraySplit | FileSplit,
    recipe: ImageRecipe,
    batch: Batch,
    mean: tuple[float, ...],
    std: tuple[float, ...],
    tell: Callable[[str], None],
) -> dict[str, float]:
    """Mean cross-entropy and top-1 accuracy: {"loss", "accuracy", "images"}, the same on all processes.

    mean, std: of the pixels in [0, 1]. tell gets a line on the progress with each micro-batch. Collective.
    """
    broadcast_buffers(model)
    model.eval()
    device, size = accelerator.device, recipe.image_size
    mine = list(evaluation_plan(len(split), batch.per_device, batch.processes, accelerator.process_index))
    options = dict(train=False, size=size, seed=recipe.seed, workers=recipe.workers)
    batches = split.batches(((0, ids) for ids, _ in mine), device=device, **options)
    totals = torch.zeros(3, device=device, dtype=torch.float64)  # loss, correct, images
    for i, ((_, _, pixels, labels), (_, valid)) in enumerate(zip(batches, mine, strict=True)):
        tell(f"evaluated {i * batch.per_device * batch.processes:,} of {len(split):,} images")
        logits = model(to_float(pixels, mean, std, size)).float()
        losses = F.cross_entropy(logits, labels, reduction="none")[:valid]
        correct = (logits.argmax(1) == labels)[:valid]
        totals += torch.stack([losses.double().sum(), correct.double().sum(), totals.new_tensor(valid)])
    loss, correct, images = accelerator.reduce(totals, "sum").tolist()
    assert images == len(split), f"counted {images:g} of {len(split)} images"
    model.train()
    return {"loss": loss / images, "accuracy": correct / images, "images": int(images)}


def broadcast_buffers(model: nn.Module) -> None:
    """Rank 0's buffers (BatchNorm's statistics) are the model's. Collective."""
    if dist.is_initialized():
        for buffer in model.buffers():
            dist.broadcast(buffer, 0)
