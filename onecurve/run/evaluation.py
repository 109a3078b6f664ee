"""Evaluation of every sample exactly once, on any number of processes."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
import torch.nn.functional as F
from accelerate import Accelerator
from accelerate.utils import broadcast, gather_object
from torch import Tensor, nn

from onecurve.data.splits import Split
from onecurve.distributed.exact_sum import exact_sum
from onecurve.flags.recipe import METRICS, Batch, ImageRecipe, Metric
from onecurve.models.preprocessing import IMAGENET_CROP, Crop
from onecurve.numerics.augment import send, to_float
from onecurve.numerics.order import chosen_by_hash, evaluation_plan

SHOWN = 16  # sample predictions for plots/
CONFUSED = 1000  # the most classes with a confusion matrix; with more the most frequent mistakes are listed
MISTAKES = 20  # of them

Mistake = tuple[int, int, int]  # true class, predicted class, images


def mean_of_classes(metric: Metric, counts: np.ndarray) -> float:
    """A metric by class, as scikit-learn's, of all images, predicted and right ones: int64 [3, classes]."""
    assert metric.value
    parts, wholes = metric.value(*counts)
    return float((parts[wholes > 0] / wholes[wholes > 0]).mean())


def frequent_mistakes(labels: np.ndarray, predicted: np.ndarray, classes: int) -> list[Mistake]:
    """Return the most confused pairs of classes, the most frequent first. labels, predicted: int64 [n]."""
    is_wrong = labels != predicted
    codes, counts = np.unique(labels[is_wrong] * classes + predicted[is_wrong], return_counts=True)
    order = np.argsort(-counts, kind="stable")[:MISTAKES]
    return [(code // classes, code % classes, count) for code, count in np.c_[codes, counts][order].tolist()]


@dataclass(frozen=True)
class Predicted:
    """The v samples of one micro-batch that count, on this process's device; v may be 0."""

    ids: np.ndarray  # int64 [v]
    pixels: Tensor  # uint8 [v, H, W, 3]
    labels: Tensor  # int64 [v]
    logits: Tensor  # float32 [v, classes]

    def only(self, ids: np.ndarray) -> "Predicted":
        """A copy of the samples among `ids`, so that the whole micro-batch can be freed."""
        rows = np.flatnonzero(np.isin(self.ids, ids))
        sent = send(torch.from_numpy(rows), self.labels.device)  # t[rows] would wait for the device
        parts = (t.index_select(0, sent) for t in (self.pixels, self.labels, self.logits))
        return Predicted(self.ids[rows], *parts)

    def to(self, device: str) -> "Predicted":
        return Predicted(self.ids, *(t.to(device) for t in (self.pixels, self.labels, self.logits)))


class Watcher(Protocol):
    """Receives an evaluation's progress and predictions."""

    def show_progress(self, text: str) -> None: ...

    def keep(self, confusion: Tensor | list[Mistake], examples: list[Predicted]) -> None: ...


def evaluate(
    accelerator: Accelerator,
    model: nn.Module,
    split: Split,
    recipe: ImageRecipe,
    batch: Batch,
    *,
    mean: tuple[float, ...],
    std: tuple[float, ...],
    crop: Crop = IMAGENET_CROP,
    watcher: Watcher,
) -> dict[str, float]:
    """{"loss", "accuracy", "images"} and the metric of --best_by, the same on all processes.

    mean, std: of the pixels in [0, 1]. crop: how images are resized, and cropped where they stay encoded.
    watcher: its show_progress() is called before each micro-batch, its keep() with the confusion matrix,
    int64 [classes, classes] with a row per true class (for more than CONFUSED classes with the most frequent
    mistakes), and this process's share of SHOWN predictions, of the same images for any seed. Collective.
    """
    total = torch.zeros(2, device=accelerator.device, dtype=torch.float64)  # of the losses, of another metric
    chosen = METRICS[recipe.best_by]
    counts = confusion = None
    pairs, examples = list[Tensor](), []
    expected = counted(split, recipe)
    shown = chosen_by_hash(len(split), min(SHOWN, expected))
    for part in predictions(accelerator, model, split, recipe, batch, mean, std, watcher.show_progress, crop):
        classes, predicted = part.logits.shape[1], part.logits.argmax(1)
        total[0] += exact_sum(F.cross_entropy(part.logits, part.labels, reduction="none"))
        if chosen.value and not chosen.by_class:
            total[1] += exact_sum(chosen.value(part.logits, part.labels).float())
        if counts is None:
            counts = torch.zeros(3, classes, dtype=torch.int64, device=total.device)
        if confusion is None and classes <= CONFUSED:
            confusion = torch.zeros(classes, classes, dtype=torch.int64, device=total.device)
        ones = torch.ones_like(predicted)
        counts[0].index_add_(0, part.labels, ones)
        counts[1].index_add_(0, predicted, ones)
        counts[2].index_add_(0, predicted, (part.labels == predicted).long())
        if confusion is not None:
            confusion.view(-1).index_add_(0, part.labels * classes + predicted, ones)
        else:
            pairs.append(torch.stack([part.labels, predicted]))
        if np.isin(part.ids, shown).any():
            examples.append(part.only(shown))
    counts = accelerator.reduce(counts, "sum")
    images, _, right = counts.sum(1).tolist()
    assert images == expected, f"counted {images} of {expected} images"
    if confusion is not None:
        watcher.keep(accelerator.reduce(confusion, "sum"), examples)
    else:
        everyones = gather_object([torch.cat(pairs, 1).cpu().numpy()])
        labels, predicted_classes = np.concatenate(everyones, 1)
        watcher.keep(frequent_mistakes(labels, predicted_classes, classes), examples)
    loss, other = (accelerator.reduce(total, "sum") / images).tolist()
    metrics = {"loss": loss, "accuracy": right / images, "images": images}
    if recipe.best_by not in metrics:
        metrics[recipe.best_by] = mean_of_classes(chosen, counts.cpu().numpy()) if chosen.by_class else other
    return metrics


def counted(split: Split, recipe: ImageRecipe) -> int:
    """The number of the split's images that are evaluated."""
    return min(len(split), recipe.max_val_images or len(split))


def evaluated_ids(split: Split, recipe: ImageRecipe) -> np.ndarray:
    """The ids of the split's images that are evaluated: int64 [counted], ascending."""
    return chosen_by_hash(len(split), counted(split, recipe))


@torch.no_grad()
def predictions(
    accelerator: Accelerator,
    model: nn.Module,
    split: Split,
    recipe: ImageRecipe,
    batch: Batch,
    mean: tuple[float, ...],
    std: tuple[float, ...],
    show_progress: Callable[[str], None],
    crop: Crop = IMAGENET_CROP,
) -> Iterator[Predicted]:
    """Yields the predictions for this process's share of the split. Collective."""
    for buffer in model.buffers():  # BatchNorm's statistics: rank 0's count
        broadcast(buffer)
    model.eval()
    device, size, count = accelerator.device, recipe.image_size, counted(split, recipe)
    evaluated = evaluated_ids(split, recipe)
    mine = list(evaluation_plan(count, batch.per_device, batch.processes, accelerator.process_index))
    plan = ((0, evaluated[places]) for places, _ in mine)
    batches = split.batches(
        plan, device=device, train=False, size=size, seed=recipe.seed, workers=recipe.workers, crop=crop
    )
    for i, ((_, ids, pixels, labels), (_, valid)) in enumerate(zip(batches, mine, strict=True)):
        show_progress(f"evaluated {i * batch.per_device * batch.processes:,} of {count:,} images")
        logits = model(to_float(pixels, mean, std, size, crop.enlargement)).float()
        yield Predicted(ids[:valid], pixels[:valid], labels[:valid], logits[:valid])
    model.train()
