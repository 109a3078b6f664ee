"""Train CNN-A (two convolutions, two linear layers), which reaches 0.766 on CIFAR-10's test split.

Training for 10 epochs to this accuracy took 75 s on two AVX512-BF16 cores, with a JPEG copy of the data. On
one H200 the throughput is 516,588 images/s at batch 512 (docs/gpu.md). The accuracy on a GPU has not been
measured yet. The recipe uses AdamW (arXiv 1711.05101) and a learning rate with linear warm-up and cosine
decay (arXiv 1608.03983). Images are shifted by up to 4 pixels and flipped (arXiv 1512.03385, section 4.2).

    accelerate launch --config_file accelerate_configs/cpu.yaml train_cnn_a.py --data digits
    accelerate launch --config_file accelerate_configs/ddp_2gpu.yaml train_cnn_a.py
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial

from onecurve.flags.recipe import Batch, ImageRecipe, flag, setting
from onecurve.run.early import check_early

# --- Recipe -----------------------------------------------------------------------------------------------


@check_early  # reports wrong flags before the imports below, which take seconds
@dataclass(frozen=True, kw_only=True)
class CnnA(ImageRecipe):
    epochs: int = flag(10, "Number of passes over the training images.", minimum=1)
    batch_size: int = flag(128, "Number of images per optimizer step, over all processes.", minimum=1)
    lr: float = flag(3e-3, "Peak learning rate.", minimum=0)
    widths: tuple[int, ...] = flag(
        (32, 64, 128), "Channels of the two convolutions, then widths of the hidden layers.", minimum=1
    )
    kernel_size: int = flag(3, "Edge length of the convolution kernels, in pixels.", minimum=1)
    padding: bool = flag(
        True, "Pad convolutions so that they keep the image size. `--no_padding` disables padding."
    )
    image_size: int = flag(32, "Edge length of the square input images, in pixels.", minimum=4)
    crop_scale: tuple[float, float] = flag((0.08, 1.0), maximum=1)
    optimizer: str = flag("adamw", "Optimizer. Only `sgd` uses --momentum.", choices=("adamw", "sgd"))
    momentum: float = flag(0.9, "Momentum of `sgd`.", minimum=0, maximum=0.999999)
    weight_decay: float = flag(0.05, "Weight decay, applied to matrices and convolutions only.", minimum=0)
    warmup: float = flag(0.1, "Fraction of steps in which the learning rate rises.", minimum=0, maximum=1)
    label_smoothing: float = flag(
        0.0, "Probability that label smoothing spreads over all classes.", minimum=0, maximum=1
    )
    class_weights: str = flag("none", choices=("none", "balanced", "sqrt"))
    clip_norm: float = flag(0.0, "Maximum gradient norm. 0 disables clipping.", minimum=0)
    step_graph: bool | None = setting(None)

    def __post_init__(self) -> None:
        super().__post_init__()
        if len(self.widths) < 3:
            widths = ",".join(map(str, self.widths))
            raise ValueError(f"--widths {widths} must list at least three widths, for example 32,64,128")
        if not self.padding and self.image_size <= 3 * self.kernel_size:
            raise ValueError(f"--image_size {self.image_size} is too small for --no_padding")


import numpy as np
import torch
import torch.nn.functional as F
from accelerate import Accelerator
from torch import Tensor, nn

from onecurve.data.images import Images, load
from onecurve.distributed.accelerator import prepare
from onecurve.distributed.process import entry
from onecurve.distributed.step_graph import step_graph
from onecurve.numerics.augment import to_float
from onecurve.numerics.optimizers import can_fuse_sgd
from onecurve.numerics.order import Plan, Steps, reseed
from onecurve.run.evaluation import evaluate
from onecurve.run.run import Run

# --- Model ------------------------------------------------------------------------------------------------


class Block(nn.Sequential):
    """Block that maps [B, width_in, H, W] to [B, width_out, H/2, W/2].

    An unpadded convolution reduces H and W before the pooling.
    """

    def __init__(self, width_in: int, width_out: int, kernel_size: int, padding: int):
        # Pooling before the ReLU does not change the result, and reduces the ReLU's work to a quarter.
        conv = nn.Conv2d(width_in, width_out, kernel_size, padding=padding)
        super().__init__(conv, nn.MaxPool2d(2), nn.ReLU())


class Net(nn.Module):
    """Network that maps images [B, 3, image_size, image_size] to logits [B, classes]."""

    _no_split_modules = ("Block",)  # FSDP wraps each module of these classes

    def __init__(self, recipe: CnnA, classes: int):
        super().__init__()
        first, second, *widths = recipe.widths
        size, padding = recipe.kernel_size, recipe.kernel_size // 2 if recipe.padding else 0
        self.blocks = nn.Sequential(Block(3, first, size, padding), Block(first, second, size, padding))
        lost = size - 1 - 2 * padding  # pixels by which a convolution shortens the image's edge
        edge = ((recipe.image_size - lost) // 2 - lost) // 2
        self.hidden = nn.Linear(second * edge**2, widths[0])
        self.more = nn.Sequential()  # additional hidden layers
        for k in range(1, len(widths)):
            self.more.append(nn.Sequential(nn.Linear(widths[k - 1], widths[k]), nn.ReLU()))
        self.head = nn.Linear(widths[-1], classes)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.more(F.relu(self.hidden(self.blocks(x).flatten(1)))))


def build_model(recipe: CnnA, classes: int) -> nn.Module:
    return Net(recipe, classes)


# --- Data -------------------------------------------------------------------------------------------------

# Mean and standard deviation of CIFAR-10's training images, with pixels in [0, 1]
MEAN, STD = (0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)


def training_batches(
    images: Images, plan: Plan, device: torch.device, recipe: CnnA
) -> Iterator[tuple[Tensor, Tensor, np.ndarray]]:
    """Yield randomly augmented images, their labels and their sample ids.

    Photographs are randomly cropped. Images are shifted instead if they all have the same small size. All
    images are randomly flipped. The shapes are float [b, 3, S, S] in channels_last format, int64 [b] and
    int64 [b].
    """
    batches = images.train.batches(
        plan,
        device=device,
        train=True,
        size=recipe.image_size,
        seed=recipe.seed,
        workers=recipe.workers,
        crop_scale=recipe.crop_scale,
    )
    for _, ids, pixels, labels in batches:
        yield to_float(pixels, MEAN, STD, recipe.image_size), labels, ids


# --- Optimizer and learning rate --------------------------------------------------------------------------


def build_optimizer(model: nn.Module, recipe: CnnA, fused: bool = False) -> torch.optim.Optimizer:
    # Weight decay would pull biases and norms to zero without making the model simpler.
    decayed = [p for p in model.parameters() if p.ndim > 1]
    rest = [p for p in model.parameters() if p.ndim <= 1]
    groups = [{"params": decayed, "weight_decay": recipe.weight_decay}, {"params": rest, "weight_decay": 0.0}]
    if recipe.optimizer == "sgd":
        return torch.optim.SGD(groups, recipe.lr, recipe.momentum, fused=fused)
    return torch.optim.AdamW(groups, lr=recipe.lr, fused=True)


def learning_rate(recipe: CnnA, step: int, total_steps: int) -> float:
    """Return a step's learning rate.

    The rate rises linearly, then falls to 0 along a cosine (arXiv 1608.03983).
    """
    warmup_steps = int(recipe.warmup * total_steps)
    if step < warmup_steps:
        return recipe.lr * ((step + 1) / warmup_steps)
    progress = (step - warmup_steps) / max(1, total_steps - warmup_steps)
    return recipe.lr * (0.5 * (1 + math.cos(math.pi * progress)))


# --- Train ------------------------------------------------------------------------------------------------


@entry(CnnA)
def main(recipe: CnnA, accelerator: Accelerator, batch: Batch) -> None:
    with Run(accelerator, recipe, batch) as run:
        images = load(accelerator, recipe)
        torch.manual_seed(recipe.seed)  # gives every process the same initial weights
        model = build_model(recipe, len(images.classes))
        optimizer = build_optimizer(model, recipe, fused=can_fuse_sgd(accelerator))
        model, optimizer = prepare(accelerator, model, optimizer)

        steps = run.begin(model, optimizer, Steps.of(images.train, batch, recipe), data=images.identity)
        rank = accelerator.process_index
        plan = steps.plan(images.train, batch, rank, recipe.seed)
        measure = partial(
            evaluate, accelerator, model, recipe=recipe, batch=batch, mean=MEAN, std=STD, watcher=run
        )
        weights = images.class_weights(recipe.class_weights, accelerator.device)
        cross_entropy = nn.CrossEntropyLoss(weights, reduction="none", label_smoothing=recipe.label_smoothing)
        batches = run.feed(training_batches(images, plan, accelerator.device, recipe))

        @step_graph(accelerator, optimizer)
        def train(inputs: Tensor, labels: Tensor) -> Tensor:
            with accelerator.accumulate(model):
                logits = model(inputs).float()
                loss = cross_entropy(logits, labels).mean()
                accelerator.backward(loss)
                if recipe.clip_norm and accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), recipe.clip_norm)
                optimizer.step()
                optimizer.zero_grad()
            return loss

        for step in range(steps.first, steps.last + 1):
            if run.should_evaluate(step):
                run.log_evaluation(step, measure(images.val))
            run.checkpoint(step)
            if run.is_last(step):
                break
            lr = learning_rate(recipe, step, steps.total)
            for group in optimizer.param_groups:  # Accelerate's scheduler would advance once per process
                group["lr"] = lr
            for k in batch.micro_batches(rank):
                inputs, labels, ids = next(batches)
                reseed(recipe.seed, step, k)
                loss = train(inputs, labels)
                run.add(loss, ids)
            run.log_training(step + 1, lr)
        if images.test and run.restore_best():
            run.log_test(measure(images.test), images.test_name)
        run.finish(images.val_name)


# --- Entry ------------------------------------------------------------------------------------------------

if __name__ == "__main__":
    main()
