"""Tests of train_cnn_b.py's fast recipes and flags. test_real_data.py trains the CIFAR-10 recipe."""

from functools import partial

import numpy as np
import pytest
import torch
import torch.nn.functional as F

import train_cnn_b
from onecurve.data.images import Images
from onecurve.data.splits import ArraySplit, SplitPart
from onecurve.flags.recipe import parse, share_out
from onecurve.numerics.order import Steps
from tests.conftest import ROOT, python, result, run
from train_cnn_b import BlurredConv2d, CnnB, ResNet18, build_optimizer, training_batches, training_size


def recipe_of(name: str, *flags: str) -> CnnB:
    return parse(CnnB, ["--config", str(ROOT / "recipes" / f"{name}.yaml"), *flags])


def test_the_16_epochs_on_imagenet_start_and_the_images_grow(photographs, cache, tmp_path):
    """Train on 8 photographs for 4 epochs of 2 steps, with image sizes of at most 32 pixels."""
    for split in ("train", "val"):
        for file in sorted(photographs.iterdir())[:8]:
            folder = tmp_path / "images" / split / file.stem
            folder.mkdir(parents=True)
            (folder / file.name).symlink_to(file)
    # The model has at least 16 channels, because oneDNN in torch 2.15 writes out of bounds on AMD EPYC CPUs
    # in the backward pass of a 1x1 convolution with stride 2, fewer than 16 channels and images of 64 pixels.
    words = ["train_cnn_b.py", "--config", "recipes/cnn_b_imagenet_16epochs.yaml", "--width", "16", *cache]
    words += ["--data", tmp_path / "images", "--batch_size", "4", "--epochs", "4", "--workers", "0"]
    words += ["--log_every", "1", "--mixed_precision", "no", "--lr", "0.01", "--output_dir", tmp_path / "run"]
    run([*python(), *words])
    assert result(tmp_path / "run")["steps"] == 8


def test_the_epoch_determines_the_image_size():
    recipe = recipe_of("cnn_b_imagenet_16epochs")
    assert [training_size(recipe, epoch) for epoch in range(16)] == [160] * 12 + [192] * 4
    assert training_size(CnnB(), 39) == 32
    pixels, labels = np.zeros((16, 24, 24, 3), np.uint8), np.zeros(16, np.int64)
    splits = [ArraySplit(pixels, SplitPart(split, labels)) for split in ("train", "val")]
    images = Images("", ("a",), *splits, val_name="val")
    recipe = CnnB(epochs=4, batch_size=8, train_sizes=(16, 24), image_size=32)
    batch = share_out(8, None, 1)
    steps = Steps.of(images.train, batch, recipe)
    plan = list(steps.plan(images.train, batch, 0, 0))
    batches = list(training_batches(images, plan, torch.device("cpu"), recipe))
    assert [len(inputs[0][0]) for inputs, _, _ in batches] == [16] * 4 + [24] * 4
    assert all(np.array_equal(ids, planned) for (_, _, ids), (_, planned) in zip(batches, plan, strict=True))
    # A run that resumes in the third epoch must continue with that epoch's image size.
    later = list(training_batches(images, plan[5:], torch.device("cpu"), recipe))
    assert [len(inputs[0][0]) for inputs, _, _ in later] == [24] * 3
    for (resumed_images, *_), (images_of_run, *_) in zip(later, batches[5:], strict=True):
        assert torch.equal(resumed_images, images_of_run)


def test_the_rate_falls_linearly():
    rate = partial(train_cnn_b.learning_rate, recipe_of("cnn_b_imagenet_16epochs"), total_steps=16 * 1251)
    peak = 2 * 1251
    assert rate(peak - 1) == pytest.approx(0.5)
    assert rate(peak + 7 * 1251) == pytest.approx(0.25)
    assert rate(16 * 1251 - 1) == pytest.approx(0.5 / (14 * 1251))


def test_strided_convolutions_are_blurred_and_keep_their_names():
    torch.manual_seed(0)
    plain = ResNet18(8, "imagenet", 10)
    torch.manual_seed(0)
    blurred = train_cnn_b.build_model(recipe_of("cnn_b_imagenet_16epochs", "--width", "8"), 10)
    names = [name for name, module in blurred.named_modules() if isinstance(module, BlurredConv2d)]
    assert names == [f"stages.{i}.0.{part}" for i in (1, 2, 3) for part in ("conv1", "shortcut.0")]
    plain_state, blurred_state = plain.state_dict(), blurred.state_dict()
    assert list(plain_state) == list(blurred_state)
    assert all(torch.equal(plain_state[name], blurred_state[name]) for name in plain_state)
    conv = blurred.get_submodule("stages.1.0.conv1")
    x = torch.randn(2, 8, 9, 9)
    weights = torch.tensor([1.0, 2.0, 1.0])
    kernel = torch.outer(weights, weights)[None, None] / 16
    smooth = torch.cat([F.conv2d(channel[:, None], kernel, padding=1) for channel in x.unbind(1)], 1)
    torch.testing.assert_close(conv(x), F.conv2d(smooth, conv.weight, stride=2, padding=1))


def test_momentum_is_nesterovs_unless_the_recipe_says_no():
    model = ResNet18(4, "cifar", 10)
    assert all(group["nesterov"] for group in build_optimizer(model, CnnB()).param_groups)
    recipe = recipe_of("cnn_b_imagenet_16epochs")
    groups = build_optimizer(model, recipe).param_groups
    assert not any(group["nesterov"] for group in groups)
    assert [group["weight_decay"] for group in groups] == [0.00005, 0.0]
