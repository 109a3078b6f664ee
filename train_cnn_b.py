"""Train CNN-B, a ResNet-18 (arXiv 1512.03385) with a stem for small images by default.

The recipe is based on main.py in github.com/kuangliu/pytorch-cifar, which trains ResNet-18 with a 3x3 stem
and no max-pool. The recipe uses SGD with momentum 0.9, learning rate 0.1, weight decay 5e-4, a cosine
schedule, shifts by up to 4 pixels, and flips. The README of pytorch-cifar reports 93.02 percent with an older
step schedule. This script adds Nesterov momentum and a warm-up of 5 percent of the steps (arXiv 1706.02677,
section 2.2), does not decay biases and BatchNorm (arXiv 1812.01187, section 3.1), and trains for 40 epochs
instead of 200. The goal is an accuracy of 0.94 on CIFAR-10. The accuracy of this recipe has not been measured
yet. On one H200, recipes/cnn_b_cifar10_fast.yaml reached 0.9032 on a JPEG copy in 22.1 s (docs/gpu.md).

    accelerate launch --config_file accelerate_configs/ddp_2gpu.yaml train_cnn_b.py
    deepspeed --num_gpus 2 train_cnn_b.py --deepspeed_config ds_configs/zero2.json
    torchrun --nproc_per_node=2 train_cnn_b.py --stem imagenet --image_size 224 --data IMAGES
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from itertools import groupby

from onecurve.flags.recipe import Batch, ImageRecipe, flag, setting
from onecurve.run.early import check_early

# --- Recipe -----------------------------------------------------------------------------------------------


@check_early  # reports wrong flags before the imports below, which take seconds
@dataclass(frozen=True, kw_only=True)
class CnnB(ImageRecipe):
    epochs: int = flag(40, "Number of passes over the training images.", minimum=1)
    batch_size: int = flag(128, "Number of images per optimizer step, over all processes.", minimum=1)
    lr: float = flag(0.1, "Peak learning rate.", minimum=0)
    stem: str = flag(
        "cifar",
        "First layers: a 3x3 convolution, or 7x7 with stride 2 and max-pool (`imagenet`, for 224 pixels).",
        choices=("cifar", "imagenet"),
    )
    width: int = flag(
        64, "Channels of the first stage. Later stages have 2, 4 and 8 times as many channels.", minimum=1
    )
    blurpool: bool = flag(False, "Blur the input of each convolution with stride 2, except in the stem.")
    image_size: int = flag(32, "Edge length of the square input images, in pixels.", minimum=8)
    train_sizes: tuple[int, ...] = flag(
        (),
        "Image sizes during training, each for the same number of epochs. If empty, --image_size is used.",
        minimum=8,
    )
    crop_scale: tuple[float, float] = flag((0.08, 1.0), maximum=1)
    optimizer: str = flag("sgd", "Optimizer. Only `sgd` uses --momentum.", choices=("sgd", "adamw"))
    momentum: float = flag(0.9, "Momentum of `sgd`.", minimum=0, maximum=0.999999)
    nesterov: bool = flag(True, "Use Nesterov momentum.")
    weight_decay: float = flag(5e-4, "Weight decay, applied to matrices and convolutions only.", minimum=0)
    warmup: float = flag(0.05, "Fraction of steps in which the learning rate rises.", minimum=0, maximum=1)
    schedule: str = flag(
        "cosine",
        "Learning-rate schedule after warm-up. Both schedules end at 0.",
        choices=("cosine", "linear"),
    )
    label_smoothing: float = flag(
        0.0, "Probability that label smoothing spreads over all classes.", minimum=0, maximum=1
    )
    class_weights: str = flag("none", choices=("none", "balanced", "sqrt"))
    clip_norm: float = flag(0.0, "Maximum gradient norm. 0 disables clipping.", minimum=0)
    step_graph: bool | None = setting(None)


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


class BlurredConv2d(nn.Conv2d):
    """Convolution preceded by a blur with weights 1, 2, 1 along rows and columns (arXiv 1904.11486)."""

    kernel: Tensor

    def __init__(self, width_in: int, width_out: int, size: int, stride: int, padding: int, bias: bool):
        super().__init__(width_in, width_out, size, stride, padding, bias=bias)
        line = torch.tensor([0.25, 0.5, 0.25])
        kernel = torch.outer(line, line).repeat(width_in, 1, 1, 1)
        self.register_buffer("kernel", kernel, persistent=False)  # not saved in checkpoints

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(F.conv2d(x, self.kernel, padding=1, groups=self.in_channels))


class Block(nn.Module):
    """Residual block that maps [B, width_in, H, W] to [B, width_out, H / stride, W / stride]."""

    def __init__(self, width_in: int, width_out: int, stride: int, blurpool: bool):
        super().__init__()
        conv = BlurredConv2d if blurpool and stride > 1 else nn.Conv2d
        self.conv1 = conv(width_in, width_out, 3, stride, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(width_out)
        self.conv2 = nn.Conv2d(width_out, width_out, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(width_out)
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1 or width_in != width_out:
            projection = conv(width_in, width_out, 1, stride, padding=0, bias=False)
            self.shortcut = nn.Sequential(projection, nn.BatchNorm2d(width_out))

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.bn1(self.conv1(x)), inplace=True)
        y = self.bn2(self.conv2(y))
        return F.relu(y + self.shortcut(x), inplace=True)


class ResNet18(nn.Module):
    """Network that maps images [B, 3, image_size, image_size] to logits [B, classes]."""

    _no_split_modules = ("Block",)  # FSDP wraps each module of these classes

    def __init__(self, width: int, stem: str, classes: int, blurpool: bool = False):
        super().__init__()
        size, stride = (3, 1) if stem == "cifar" else (7, 2)
        conv = nn.Conv2d(3, width, size, stride, padding=size // 2, bias=False)
        self.stem = nn.Sequential(conv, nn.BatchNorm2d(width), nn.ReLU(inplace=True))
        if stem == "imagenet":
            self.stem.append(nn.MaxPool2d(3, stride=2, padding=1))
        widths = [width, width, 2 * width, 4 * width, 8 * width]
        self.stages = nn.Sequential()
        for i in range(4):
            first = Block(widths[i], widths[i + 1], stride=1 if i == 0 else 2, blurpool=blurpool)
            second = Block(widths[i + 1], widths[i + 1], stride=1, blurpool=blurpool)
            self.stages.append(nn.Sequential(first, second))
        self.head = nn.Linear(8 * width, classes)
        for module in self.modules():
            if isinstance(module, nn.Conv2d):  # initial weights as in arXiv 1502.01852
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")

    def forward(self, x: Tensor) -> Tensor:
        x = self.stages(self.stem(x))  # [B, 8 * width, H / 8, W / 8], or H / 32 with the ImageNet stem
        return self.head(x.mean((2, 3)))


def build_model(recipe: CnnB, classes: int) -> nn.Module:
    return ResNet18(recipe.width, recipe.stem, classes, recipe.blurpool)


# --- Data -------------------------------------------------------------------------------------------------

# Mean and standard deviation of CIFAR-10's training images, with pixels in [0, 1]
MEAN, STD = (0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)


def training_batches(
    images: Images, plan: Plan, device: torch.device, recipe: CnnB
) -> Iterator[tuple[Tensor, Tensor, np.ndarray]]:
    """Yield randomly augmented images, their labels and their sample ids.

    Photographs are randomly cropped. Images are shifted instead if they all have the same small size. All
    images are randomly flipped. The shapes are float [b, 3, S, S] in channels_last format, int64 [b] and
    int64 [b].
    """
    for size, part in groupby(plan, lambda item: training_size(recipe, item[0])):
        batches = images.train.batches(
            part,
            device=device,
            train=True,
            size=size,
            seed=recipe.seed,
            workers=recipe.workers,
            crop_scale=recipe.crop_scale,
        )
        for _, ids, pixels, labels in batches:
            yield to_float(pixels, MEAN, STD, size), labels, ids


def training_size(recipe: CnnB, epoch: int) -> int:
    """Return an epoch's image size. Early epochs cost less if sizes ascend (arXiv 1906.06423)."""
    sizes = recipe.train_sizes or (recipe.image_size,)
    return sizes[epoch * len(sizes) // recipe.epochs]


# --- Optimizer and learning rate --------------------------------------------------------------------------


def build_optimizer(model: nn.Module, recipe: CnnB, fused: bool = False) -> torch.optim.Optimizer:
    # Weight decay would pull biases and norms to zero without making the model simpler.
    decayed = [p for p in model.parameters() if p.ndim > 1]
    rest = [p for p in model.parameters() if p.ndim <= 1]
    groups = [{"params": decayed, "weight_decay": recipe.weight_decay}, {"params": rest, "weight_decay": 0.0}]
    if recipe.optimizer == "adamw":
        return torch.optim.AdamW(groups, lr=recipe.lr, fused=True)
    nesterov = recipe.nesterov and recipe.momentum > 0
    return torch.optim.SGD(groups, recipe.lr, recipe.momentum, nesterov=nesterov, fused=fused)


def learning_rate(recipe: CnnB, step: int, total_steps: int) -> float:
    """Return a step's learning rate.

    The rate rises linearly, then falls to 0 along a cosine (arXiv 1608.03983) or a line.
    """
    warmup_steps = int(recipe.warmup * total_steps)
    if step < warmup_steps:
        return recipe.lr * ((step + 1) / warmup_steps)
    progress = (step - warmup_steps) / max(1, total_steps - warmup_steps)
    if recipe.schedule == "linear":
        return recipe.lr * (1 - progress)
    return recipe.lr * (0.5 * (1 + math.cos(math.pi * progress)))


# --- Train ------------------------------------------------------------------------------------------------


@entry(CnnB)
def main(recipe: CnnB, accelerator: Accelerator, batch: Batch) -> None:
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
