"""Train any timm model (ViT-B/32, ConvNeXt, ResNet, Swin, ...) on CIFAR-10 or a folder of images.

The default model is ViT-B/32. The default recipe follows DeiT (arXiv 2012.12877, table 9) and uses AdamW with
betas (0.9, 0.999), learning rate 5e-4 at batch 512, weight decay 0.05, warm-up and a cosine schedule, label
smoothing 0.1, drop path 0.1, mixup 0.8 and cutmix 1.0. This script also clips gradients at 1.0, as in "How to
train your ViT" (arXiv 2106.10270), and evaluates an EMA of the weights. The script trains for 100 epochs
instead of DeiT's 300. The EMA decay is 0.999. At this batch size, the EMA averages over about 10 epochs of
CIFAR-10 instead of 100. The accuracy on a GPU has not been measured yet. On one H200 the throughput is 10,546
images/s, or 12,982 images/s with a compiled model (docs/gpu.md).

    accelerate launch --config_file accelerate_configs/fsdp_4gpu.yaml train_vit.py
    python train_vit.py --config recipes/vit_tiny_digits.yaml
    deepspeed --num_gpus 2 train_vit.py --deepspeed_config ds_configs/zero2.json --pretrained --lr 1e-4
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from onecurve.flags.recipe import Batch, ImageRecipe, flag, setting, timm_name
from onecurve.models.preprocessing import CROP_MODES, INTERPOLATIONS, LEGACY, DataConfig
from onecurve.run.early import check_early

# --- Recipe -----------------------------------------------------------------------------------------------


@check_early  # reports wrong flags before the imports below, which take seconds
@dataclass(frozen=True, kw_only=True)
class Vit(ImageRecipe):
    epochs: int = flag(100, "Number of passes over the training images.", minimum=1)
    batch_size: int = flag(512, "Number of images per optimizer step, over all processes.", minimum=1)
    lr: float = flag(5e-4, "Peak learning rate.", minimum=0)
    model: str = flag("vit_base_patch32_224", "Name of a timm model.", decides_defaults=True, in_names=2)
    pretrained: bool = flag(
        False,
        "Start from the model's pretrained weights on the Hub.",
        initial_weights=True,
        training_only=True,
    )
    weights: str | None = flag(
        None,
        "Initial weights: a safetensors file, a run folder, a checkpoint folder or a Hub model's folder.",
        is_path=True,
        decides_defaults=True,
        initial_weights=True,
        training_only=True,
    )
    freeze: bool = flag(
        False,
        "Train only the head (linear probe). --freeze requires --pretrained or --weights.",
        training_only=True,
    )
    image_size: int = flag(
        None, "Edge length of input images, in pixels. Default: the model's size.", minimum=1
    )
    interpolation: str | None = flag(
        None,
        "Interpolation for resizing. `legacy` crops like earlier versions. Default: the model's method.",
        choices=(*INTERPOLATIONS, LEGACY),
    )
    crop_pct: float | None = flag(
        None,
        "Edge of the evaluation crop, as a fraction of the image's edge. Default: the model's fraction.",
        minimum=0.1,
        maximum=1,
    )
    crop_mode: str | None = flag(
        None, "Crop mode for evaluation, as in timm. Default: the model's crop mode.", choices=CROP_MODES
    )
    patch_size: int | None = flag(
        None, "Edge length of a patch, in pixels. Default: the model's size.", minimum=1
    )
    depth: int | None = flag(None, "Number of blocks. Default: the model's depth.", minimum=1)
    drop_path: float = flag(
        0.1, "Fraction of residual branches to drop at random.", minimum=0, maximum=0.99, drawn_on_device=True
    )
    dropout: float = flag(
        0.0, "Fraction of activations to drop at random.", minimum=0, maximum=0.99, drawn_on_device=True
    )
    mixup: float = flag(0.8, "Alpha of mixup. 0 disables mixup.", minimum=0)
    cutmix: float = flag(1.0, "Alpha of cutmix. 0 disables cutmix.", minimum=0)
    crop_scale: tuple[float, float] = flag((0.08, 1.0), maximum=1)
    color_jitter: float = flag(
        0.0,
        "Maximum relative change of brightness, contrast and saturation. 0 disables color jitter.",
        minimum=0,
        maximum=1,
    )
    randaug_layers: int = flag(
        0, "RandAugment operations per image. 0 disables RandAugment.", minimum=0, maximum=4
    )
    randaug_magnitude: float = flag(10.0, "Magnitude of RandAugment. 10 is strong.", minimum=0, maximum=30)
    random_erasing: float = flag(0.0, "Fraction of images in which a box is erased.", minimum=0, maximum=1)
    label_smoothing: float = flag(
        0.1, "Probability that label smoothing spreads over all classes.", minimum=0, maximum=1
    )
    class_weights: str = flag("none", choices=("none", "balanced", "sqrt"))
    optimizer: str = flag(
        "adamw", "Any optimizer from timm or torch.optim, for example `sgd`, `lion` or `muon`."
    )
    weight_decay: float = flag(0.05, "Weight decay, applied to matrices only.", minimum=0)
    layer_decay: float = flag(
        1.0,
        "Ratio of a block's learning rate to the next block's rate. 1 disables layer decay.",
        minimum=0,
        maximum=1,
    )
    warmup: float = flag(0.05, "Fraction of steps in which the learning rate rises.", minimum=0, maximum=1)
    schedule: str = flag(
        "cosine",
        "Learning-rate schedule after warm-up. `step` divides the rate by 10 after each third of training.",
        choices=("cosine", "linear", "constant", "step"),
    )
    clip_norm: float = flag(1.0, "Maximum gradient norm. 0 disables clipping.", minimum=0)
    ema_decay: float = flag(
        0.999,
        "Decay of the EMA of the weights. The averaged weights are evaluated and saved. 0 disables the EMA.",
        minimum=0,
        maximum=0.999999,
    )
    step_graph: bool | None = setting(None)

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "model", timm_name(self.model))
        if self.freeze and not (self.pretrained or self.weights):
            raise ValueError(
                "--freeze trains only the head. Pass --pretrained or --weights for the other layers."
            )

    def resolved(self) -> "Vit":
        if self.image_size is not None:
            return self
        return replace(self, image_size=own_image_size(self.model, self.weights))


import numpy as np
import torch
from accelerate import Accelerator
from torch import Tensor, nn

from onecurve.checkpoint.weights import model_with_weights, own_image_size, pretrained_model
from onecurve.data.images import Images, load
from onecurve.distributed.accelerator import prepare
from onecurve.distributed.ema import EMA
from onecurve.distributed.precision import input_dtype
from onecurve.distributed.process import entry
from onecurve.distributed.step_graph import step_graph
from onecurve.models.timm_models import (
    block_classes,
    data_config_of,
    fitting,
    head_names,
    registered_config,
    speed_up,
)
from onecurve.numerics import augment
from onecurve.numerics.optimizers import named_optimizer
from onecurve.numerics.order import Plan, Steps, reseed, uniforms
from onecurve.numerics.rand_augment import rand_augment
from onecurve.run.evaluation import evaluate
from onecurve.run.run import Run

# --- Model ------------------------------------------------------------------------------------------------


def build_model(recipe: Vit, classes: int, names: tuple[str, ...] = ()) -> nn.Module:
    """Build a model that maps images [B, 3, image_size, image_size] to logits [B, classes].

    Args:
        recipe: The training run's recipe.
        classes: Number of classes.
        names: Class names, which select the rows of the classification head in --weights.

    Raises:
        ValueError: If timm can't build the model.
    """
    import timm  # takes seconds, so the script first prints its first lines

    registered_config(recipe.model)  # raises an error for an unknown model
    recipe = recipe.resolved()
    options: dict[str, Any] = {"drop_path_rate": recipe.drop_path, "drop_rate": recipe.dropout}
    sizes = {"patch_size": recipe.patch_size, "depth": recipe.depth}
    options |= {name: size for name, size in sizes.items() if size}
    options = fitting(recipe.model, recipe.image_size, **options)
    try:
        if recipe.weights:
            model = model_with_weights(recipe.model, Path(recipe.weights), classes, names, **options)
        elif recipe.pretrained:
            model = pretrained_model(recipe.model, classes, **options)
        else:
            model = timm.create_model(recipe.model, num_classes=classes, **options)
    except (TypeError, AttributeError, AssertionError, RuntimeError) as error:
        raise ValueError(f"--model {recipe.model} can't be built with these flags: {error}") from error
    speed_up(model, recipe.image_size)
    # FSDP wraps each module of these classes. mypy expects tensors or modules as attributes.
    model._no_split_modules = block_classes(model)  # type: ignore[assignment]
    if recipe.freeze:
        model.requires_grad_(False)
        for head in head_names(recipe.model):
            model.get_submodule(head).requires_grad_(True)
    return model


# --- Data -------------------------------------------------------------------------------------------------


def training_batches(
    images: Images, plan: Plan, device: torch.device, recipe: Vit, preprocessing: DataConfig
) -> Iterator[tuple[Tensor, Tensor, np.ndarray]]:
    """Yield randomly augmented images, their labels and their sample ids.

    Photographs are randomly cropped. Images are shifted instead if they all have the same small size. All
    images are flipped and augmented. The shapes are float [b, 3, S, S] in channels_last format, int64 [b] and
    int64 [b].
    """
    mean, std, crop = preprocessing
    size, seed, workers = recipe.image_size, recipe.seed, recipe.workers
    batches = images.train.batches(
        plan,
        device=device,
        train=True,
        size=size,
        seed=seed,
        workers=workers,
        crop=crop,
        crop_scale=recipe.crop_scale,
    )
    needs_draws = recipe.randaug_layers or recipe.color_jitter or recipe.random_erasing
    for epoch, ids, pixels, labels in batches:
        draws = uniforms(recipe.seed, epoch, ids, augment.DRAWS if needs_draws else 0)
        if recipe.randaug_layers:
            layers, magnitude = recipe.randaug_layers, recipe.randaug_magnitude
            pixels = rand_augment(pixels, draws[:, augment.RAND_AUGMENT], layers, magnitude)
        if recipe.color_jitter:
            pixels = augment.color_jitter(pixels, draws[:, augment.COLOR], recipe.color_jitter)
        inputs = augment.to_float(pixels, mean, std, size, crop.enlargement)
        if recipe.random_erasing:
            inputs = augment.random_erasing(inputs, draws[:, augment.ERASING], recipe.random_erasing)
        yield inputs, labels, ids


# --- Optimizer and learning rate --------------------------------------------------------------------------


def build_optimizer(model: nn.Module, recipe: Vit) -> torch.optim.Optimizer:
    # Weight decay would pull biases, norms and position embeddings to zero without making the model simpler.
    excluded: set[str] = getattr(model, "no_weight_decay", set)()  # parameter names from timm
    if recipe.layer_decay < 1:  # as in BEiT (arXiv 2106.08254), with an `lr_scale` per group
        from timm.optim import param_groups_layer_decay

        groups = param_groups_layer_decay(
            model, recipe.weight_decay, excluded, layer_decay=recipe.layer_decay
        )
    else:
        trained = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
        decayed = [p for name, p in trained if p.ndim > 1 and name not in excluded]
        rest = [p for name, p in trained if p.ndim <= 1 or name in excluded]
        groups = [{"params": decayed, "weight_decay": recipe.weight_decay}]
        groups += [{"params": rest, "weight_decay": 0.0}]
    if recipe.optimizer == "adamw":
        return torch.optim.AdamW(groups, lr=recipe.lr, fused=True)
    return named_optimizer(recipe.optimizer, groups, recipe.lr)


def learning_rate(recipe: Vit, step: int, total_steps: int) -> float:
    """Return a step's learning rate.

    The rate rises linearly, then follows --schedule (cosine: arXiv 1608.03983).
    """
    warmup_steps = int(recipe.warmup * total_steps)
    if step < warmup_steps:
        return recipe.lr * ((step + 1) / warmup_steps)
    progress = (step - warmup_steps) / max(1, total_steps - warmup_steps)
    falls = {
        "cosine": 0.5 * (1 + math.cos(math.pi * progress)),
        "linear": 1 - progress,
        "constant": 1.0,
        "step": 0.1 ** int(3 * progress),
    }
    return recipe.lr * falls[recipe.schedule]


# --- Train ------------------------------------------------------------------------------------------------


@entry(Vit)
def main(recipe: Vit, accelerator: Accelerator, batch: Batch) -> None:
    with Run(accelerator, recipe, batch) as run:
        images = load(accelerator, recipe)
        torch.manual_seed(recipe.seed)  # gives every process the same initial weights
        model = build_model(recipe, len(images.classes), images.classes)
        preprocessing = data_config_of(model, recipe)
        optimizer = build_optimizer(model, recipe)
        model, optimizer = prepare(accelerator, model, optimizer)
        ema = EMA(model, optimizer, recipe.ema_decay) if recipe.ema_decay else None
        mix = augment.mixer(recipe.mixup, recipe.cutmix, len(images.classes), input_dtype(accelerator))
        if mix and batch.per_device == 1:
            accelerator.print(
                "--mixup and --cutmix have no effect, because each micro-batch contains one image"
            )

        steps = Steps.of(images.train, batch, recipe)
        data = images.identity
        steps = run.begin(model, optimizer, steps, data=data, ema=ema, preprocessing=preprocessing)
        mean, std, crop = preprocessing = run.preprocessing  # a resumed run keeps its preprocessing
        rank = accelerator.process_index
        plan = steps.plan(images.train, batch, rank, recipe.seed)
        measure = partial(
            evaluate,
            accelerator,
            model,
            recipe=recipe,
            batch=batch,
            mean=mean,
            std=std,
            crop=crop,
            watcher=run,
        )
        weights = images.class_weights(recipe.class_weights, accelerator.device)
        cross_entropy = nn.CrossEntropyLoss(weights, reduction="none", label_smoothing=recipe.label_smoothing)
        batches = run.feed(training_batches(images, plan, accelerator.device, recipe, preprocessing))

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
                metrics = measure(images.val)
                if ema:
                    with ema.in_place():
                        averaged = measure(images.val)
                    metrics = averaged | {"raw_accuracy": metrics["accuracy"]}
                run.log_evaluation(step, metrics)
            run.checkpoint(step)
            if run.is_last(step):
                break
            lr = learning_rate(recipe, step, steps.total)
            for group in optimizer.param_groups:  # Accelerate's scheduler would advance once per process
                group["lr"] = lr * group.get("lr_scale", 1.0)
            for k in batch.micro_batches(rank):
                inputs, labels, ids = next(batches)
                reseed(recipe.seed, step, k)
                if mix:
                    inputs, labels = mix(inputs, labels)
                loss = train(inputs, labels)
                run.add(loss, ids)
            if ema:
                ema.update(step)
            run.log_training(step + 1, lr)
        if images.test and run.restore_best():
            run.log_test(measure(images.test), images.test_name)
        run.finish(images.val_name)


# --- Entry ------------------------------------------------------------------------------------------------

if __name__ == "__main__":
    main()
