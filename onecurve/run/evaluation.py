"""Evaluates each sample exactly once, regardless of the number of processes."""

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
from onecurve.numerics.order import choose_by_hash, evaluation_plan

MAX_EXAMPLES = 16  # Maximum number of sample predictions shown in plots/
# Maximum number of classes for which a confusion matrix is stored instead of the most frequent mistakes
MAX_CONFUSION_CLASSES = 1000
MAX_LISTED_MISTAKES = 20  # Maximum number of pairs that frequent_mistakes() returns

Mistake = tuple[int, int, int]  # (true class, predicted class, number of images)


def mean_of_classes(metric: Metric, counts_by_class: np.ndarray) -> float:
    """Return the mean of a per-class metric, computed as in scikit-learn.

    `counts_by_class`, int64 [3, classes], contains the numbers of images, predictions and correct predictions
    per class.
    """
    assert metric.compute
    numerators, denominators = metric.compute(*counts_by_class)
    is_defined = denominators > 0  # Excludes classes for which the metric would be 0 / 0
    return float((numerators[is_defined] / denominators[is_defined]).mean())


def frequent_mistakes(labels: np.ndarray, predicted: np.ndarray, class_count: int) -> list[Mistake]:
    """Return the most frequently confused class pairs, in descending order of frequency.

    Both inputs are int64 [n].
    """
    is_wrong = labels != predicted
    # Encode each pair of classes as an integer, so that np.unique counts the pairs
    pair_codes, counts = np.unique(labels[is_wrong] * class_count + predicted[is_wrong], return_counts=True)
    most_frequent_rows = np.argsort(-counts, kind="stable")[:MAX_LISTED_MISTAKES]
    codes_with_counts = np.c_[pair_codes, counts][most_frequent_rows].tolist()
    return [(code // class_count, code % class_count, count) for code, count in codes_with_counts]


@dataclass(frozen=True)
class PredictedBatch:
    """Predictions for the v >= 0 valid samples in a micro-batch, on this process's device."""

    ids: np.ndarray  # Ids of the samples, int64 [v]
    pixels: Tensor  # Images, uint8 [v, H, W, 3]
    labels: Tensor  # True classes, int64 [v]
    logits: Tensor  # Outputs of the model, float32 [v, classes]

    def select(self, ids: np.ndarray) -> "PredictedBatch":
        """Return a copy of the predictions for the samples in `ids`, so that the micro-batch can be freed."""
        selected_rows = np.flatnonzero(np.isin(self.ids, ids))
        # Indexing with tensor[rows] would synchronize with the device.
        device_rows = send(torch.from_numpy(selected_rows), self.labels.device)
        selected_tensors = (
            tensor.index_select(0, device_rows) for tensor in (self.pixels, self.labels, self.logits)
        )
        return PredictedBatch(self.ids[selected_rows], *selected_tensors)

    def to(self, device: str) -> "PredictedBatch":
        moved_tensors = (tensor.to(device) for tensor in (self.pixels, self.labels, self.logits))
        return PredictedBatch(self.ids, *moved_tensors)


class EvaluationWatcher(Protocol):
    """Interface for objects that receive an evaluation's progress and predictions."""

    def show_progress(self, text: str) -> None:
        """Show the evaluation's progress. All ranks call this method before each micro-batch."""

    def keep_predictions(self, confusion: Tensor | list[Mistake], examples: list[PredictedBatch]) -> None:
        """Store an evaluation's predictions.

        Args:
            confusion: Confusion matrix of all ranks, int64 [classes, classes] with one row per true class. If
                there are more than MAX_CONFUSION_CLASSES classes, the most frequent mistakes of all ranks.
            examples: This rank's share of the sample predictions.
        """


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
    watcher: EvaluationWatcher,
) -> dict[str, float]:
    """Evaluate a model on a split. All ranks must call this function.

    The function copies rank 0's BatchNorm statistics to all ranks, and leaves the model in training mode.

    Args:
        accelerator: Accelerator of the job.
        model: Model whose forward pass returns logits.
        split: Split that contains the images to evaluate.
        recipe: Recipe of the run.
        batch: Division of the batch, which determines the micro-batch size.
        mean: Per-channel mean, for pixels in [0, 1].
        std: Per-channel standard deviation, for pixels in [0, 1].
        crop: Method for resizing images, and for cropping images that stay encoded.
        watcher: Receiver of the evaluation's progress and predictions. keep_predictions() receives this
            process's share of MAX_EXAMPLES sample predictions. The sample images do not depend on the seed.

    Returns:
        A dictionary with "loss", "accuracy", "images" and the metric of --best_by. All processes return the
        same metrics.
    """
    # [sum of the losses, sum of the metric that --best_by selects]
    metric_sums = torch.zeros(2, device=accelerator.device, dtype=torch.float64)
    metric = METRICS[recipe.best_by]
    # counts_by_class contains each class's numbers of images, predictions and correct predictions,
    # int64 [3, classes]. Both tensors are created when the number of classes is known.
    counts_by_class = confusion = None
    labels_and_predictions: list[Tensor] = []  # int64 [2, v] per micro-batch, used with too many classes
    example_batches: list[PredictedBatch] = []
    expected_image_count = evaluated_count(split, recipe)
    example_ids = choose_by_hash(len(split), min(MAX_EXAMPLES, expected_image_count))
    show_progress = watcher.show_progress
    loss_sum, metric_sum = metric_sums.unbind()  # Views of the two elements
    for outputs in predict_batches(accelerator, model, split, recipe, batch, mean, std, show_progress, crop):
        class_count, predicted_classes = outputs.logits.shape[1], outputs.logits.argmax(1)
        loss_sum += exact_sum(F.cross_entropy(outputs.logits, outputs.labels, reduction="none"))
        if metric.compute and not metric.by_class:  # The metric is a mean over samples
            metric_sum += exact_sum(metric.compute(outputs.logits, outputs.labels).float())
        if counts_by_class is None:
            counts_by_class = torch.zeros(3, class_count, dtype=torch.int64, device=metric_sums.device)
        if confusion is None and class_count <= MAX_CONFUSION_CLASSES:
            confusion = torch.zeros(class_count, class_count, dtype=torch.int64, device=metric_sums.device)
        ones = torch.ones_like(predicted_classes)
        image_counts, prediction_counts, correct_counts = counts_by_class.unbind()
        image_counts.index_add_(0, outputs.labels, ones)
        prediction_counts.index_add_(0, predicted_classes, ones)
        correct_counts.index_add_(0, predicted_classes, (outputs.labels == predicted_classes).long())
        if confusion is not None:
            confusion.view(-1).index_add_(0, outputs.labels * class_count + predicted_classes, ones)
        else:
            labels_and_predictions.append(torch.stack([outputs.labels, predicted_classes]))
        if np.isin(outputs.ids, example_ids).any():
            example_batches.append(outputs.select(example_ids))
    counts_by_class = accelerator.reduce(counts_by_class, "sum")
    image_count, _, correct_count = counts_by_class.sum(1).tolist()  # Sums over the classes
    assert image_count == expected_image_count, f"evaluated {image_count} of {expected_image_count} images"
    if confusion is not None:
        watcher.keep_predictions(accelerator.reduce(confusion, "sum"), example_batches)
    else:
        label_arrays_by_rank = gather_object([torch.cat(labels_and_predictions, 1).cpu().numpy()])
        all_labels, all_predicted = np.concatenate(label_arrays_by_rank, 1)
        watcher.keep_predictions(frequent_mistakes(all_labels, all_predicted, class_count), example_batches)
    loss, mean_metric = (accelerator.reduce(metric_sums, "sum") / image_count).tolist()
    metrics = {"loss": loss, "accuracy": correct_count / image_count, "images": image_count}
    if recipe.best_by not in metrics:
        class_counts = counts_by_class.cpu().numpy()
        metrics[recipe.best_by] = mean_of_classes(metric, class_counts) if metric.by_class else mean_metric
    return metrics


def evaluated_count(split: Split, recipe: ImageRecipe) -> int:
    """Return the number of images that an evaluation of the split includes."""
    return min(len(split), recipe.max_val_images or len(split))


def evaluated_ids(split: Split, recipe: ImageRecipe) -> np.ndarray:
    """Return the ids of the images to evaluate, in ascending order, int64 [evaluated_count()]."""
    return choose_by_hash(len(split), evaluated_count(split, recipe))


@torch.no_grad()
def predict_batches(
    accelerator: Accelerator,
    model: nn.Module,
    split: Split,
    recipe: ImageRecipe,
    batch: Batch,
    mean: tuple[float, ...],
    std: tuple[float, ...],
    show_progress: Callable[[str], None],
    crop: Crop = IMAGENET_CROP,
) -> Iterator[PredictedBatch]:
    """Yield predictions for this process's share of the split. All ranks must use this iterator.

    The generator copies rank 0's BatchNorm statistics to all ranks. It sets the model to evaluation mode, and
    back to training mode at the end. It calls show_progress(text) before each micro-batch. `crop` is the
    method for resizing and cropping images. `mean` and `std` then normalise pixels in [0, 1].
    """
    for buffer in model.buffers():  # All ranks use rank 0's BatchNorm statistics
        broadcast(buffer)
    model.eval()
    device, image_size = accelerator.device, recipe.image_size
    ids_to_evaluate = evaluated_ids(split, recipe)
    rank, image_count = accelerator.process_index, evaluated_count(split, recipe)
    micro_batches = list(evaluation_plan(image_count, batch.per_device, batch.processes, rank))
    epoch = 0  # Evaluations do not depend on the epoch
    plan = ((epoch, ids_to_evaluate[id_positions]) for id_positions, _ in micro_batches)
    image_batches = split.batches(
        plan, device=device, train=False, size=image_size, seed=recipe.seed, workers=recipe.workers, crop=crop
    )
    finished_image_count = 0
    for (_, ids, pixels, labels), (_, valid_count) in zip(image_batches, micro_batches, strict=True):
        show_progress(f"evaluated {finished_image_count:,} of {image_count:,} images")
        finished_image_count += batch.per_device * batch.processes
        logits = model(to_float(pixels, mean, std, image_size, crop.enlargement)).float()
        valid_rows = slice(valid_count)  # Excludes the padding
        yield PredictedBatch(ids[valid_rows], pixels[valid_rows], labels[valid_rows], logits[valid_rows])
    model.train()
