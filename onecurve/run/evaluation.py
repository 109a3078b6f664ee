"""Evaluates each sample exactly once, on any number of processes."""

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

SHOWN = 16  # number of sample predictions shown in plots/
# Maximum number of classes for a confusion matrix; with more classes, frequent mistakes replace it
CONFUSED = 1000
MISTAKES = 20  # number of frequent mistakes

Mistake = tuple[int, int, int]  # true class, predicted class, number of images


def mean_of_classes(metric: Metric, counts: np.ndarray) -> float:
    """Return the mean of a metric over classes, as scikit-learn computes it.

    counts: int64 [3, classes], the number of images, predictions and correct predictions of each class.
    """
    assert metric.value
    numerators, denominators = metric.value(*counts)
    is_defined = denominators > 0
    return float((numerators[is_defined] / denominators[is_defined]).mean())


def frequent_mistakes(labels: np.ndarray, predicted: np.ndarray, classes: int) -> list[Mistake]:
    """Return the most frequently confused pairs of classes, most frequent first. Inputs are int64 [n]."""
    is_wrong = labels != predicted
    codes, counts = np.unique(labels[is_wrong] * classes + predicted[is_wrong], return_counts=True)
    order = np.argsort(-counts, kind="stable")[:MISTAKES]
    return [(code // classes, code % classes, count) for code, count in np.c_[codes, counts][order].tolist()]


@dataclass(frozen=True)
class Predicted:
    """Predictions for the v valid samples of one micro-batch, on this process's device. v may be 0."""

    ids: np.ndarray  # int64 [v]
    pixels: Tensor  # uint8 [v, H, W, 3]
    labels: Tensor  # int64 [v]
    logits: Tensor  # float32 [v, classes]

    def only(self, ids: np.ndarray) -> "Predicted":
        """Return a copy of the samples in `ids`, so that the micro-batch can be freed."""
        rows = np.flatnonzero(np.isin(self.ids, ids))
        sent = send(
            torch.from_numpy(rows), self.labels.device
        )  # indexing with t[rows] would synchronize with the device
        parts = (t.index_select(0, sent) for t in (self.pixels, self.labels, self.logits))
        return Predicted(self.ids[rows], *parts)

    def to(self, device: str) -> "Predicted":
        return Predicted(self.ids, *(t.to(device) for t in (self.pixels, self.labels, self.logits)))


class Watcher(Protocol):
    """Interface that receives an evaluation's progress and predictions."""

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
    """Evaluate a model on a split. Collective.

    Args:
        accelerator: The job's accelerator.
        model: Model whose forward pass returns logits.
        split: Images to evaluate.
        recipe: The run's recipe.
        batch: Division of the batch, which determines the size of micro-batches.
        mean: Mean of each channel, for pixels in [0, 1].
        std: Standard deviation of each channel, for pixels in [0, 1].
        crop: Resizing of images, and the crop for images that stay encoded.
        watcher: Receiver of the progress and the predictions. show_progress() is called before each
            micro-batch. keep() receives the confusion matrix, int64 [classes, classes] with one row per true
            class, or the most frequent mistakes if there are more than CONFUSED classes. keep() also receives
            this process's share of SHOWN sample predictions. The sample images are the same for any seed.

    Returns:
        "loss", "accuracy", "images" and the metric of --best_by. The values are equal on all processes.
    """
    # Sum of the losses, sum of --best_by's metric
    sums = torch.zeros(2, device=accelerator.device, dtype=torch.float64)
    best_by = METRICS[recipe.best_by]
    counts = confusion = None
    pairs, examples = list[Tensor](), []
    expected = counted(split, recipe)
    shown = chosen_by_hash(len(split), min(SHOWN, expected))
    for part in predictions(accelerator, model, split, recipe, batch, mean, std, watcher.show_progress, crop):
        classes, predicted = part.logits.shape[1], part.logits.argmax(1)
        sums[0] += exact_sum(F.cross_entropy(part.logits, part.labels, reduction="none"))
        if best_by.value and not best_by.by_class:
            sums[1] += exact_sum(best_by.value(part.logits, part.labels).float())
        if counts is None:
            counts = torch.zeros(3, classes, dtype=torch.int64, device=sums.device)
        if confusion is None and classes <= CONFUSED:
            confusion = torch.zeros(classes, classes, dtype=torch.int64, device=sums.device)
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
    images, _, correct = counts.sum(1).tolist()
    assert images == expected, f"evaluated {images} of {expected} images"
    if confusion is not None:
        watcher.keep(accelerator.reduce(confusion, "sum"), examples)
    else:
        pairs_by_rank = gather_object([torch.cat(pairs, 1).cpu().numpy()])
        labels, predicted_classes = np.concatenate(pairs_by_rank, 1)
        watcher.keep(frequent_mistakes(labels, predicted_classes, classes), examples)
    loss, mean_metric = (accelerator.reduce(sums, "sum") / images).tolist()
    metrics = {"loss": loss, "accuracy": correct / images, "images": images}
    if recipe.best_by not in metrics:
        class_counts = counts.cpu().numpy()
        metrics[recipe.best_by] = mean_of_classes(best_by, class_counts) if best_by.by_class else mean_metric
    return metrics


def counted(split: Split, recipe: ImageRecipe) -> int:
    """Return the number of images in the split that are evaluated."""
    return min(len(split), recipe.max_val_images or len(split))


def evaluated_ids(split: Split, recipe: ImageRecipe) -> np.ndarray:
    """Return the ids of the split's evaluated images in ascending order: int64 [counted]."""
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
    """Yield predictions for this process's share of the split. See evaluate() for arguments. Collective."""
    for buffer in model.buffers():  # all ranks use rank 0's BatchNorm statistics
        broadcast(buffer)
    model.eval()
    device, size, count = accelerator.device, recipe.image_size, counted(split, recipe)
    evaluated = evaluated_ids(split, recipe)
    micro_batches = list(evaluation_plan(count, batch.per_device, batch.processes, accelerator.process_index))
    plan = ((0, evaluated[positions]) for positions, _ in micro_batches)
    batches = split.batches(
        plan, device=device, train=False, size=size, seed=recipe.seed, workers=recipe.workers, crop=crop
    )
    for i, ((_, ids, pixels, labels), (_, valid)) in enumerate(zip(batches, micro_batches, strict=True)):
        show_progress(f"evaluated {i * batch.per_device * batch.processes:,} of {count:,} images")
        logits = model(to_float(pixels, mean, std, size, crop.enlargement)).float()
        yield Predicted(ids[:valid], pixels[:valid], labels[:valid], logits[:valid])
    model.train()
