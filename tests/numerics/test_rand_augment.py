"""Tests that compare RandAugment on whole batches with PIL, image by image."""

import numpy as np
import pytest
import torch
from PIL import Image, ImageEnhance, ImageOps

from onecurve.data.cache import prepare_data
from onecurve.data.images import open_images
from onecurve.flags.recipe import share_out
from onecurve.models.preprocessing import DataConfig
from onecurve.numerics.augment import (
    DRAWS,
    RAND_AUGMENT,
    gather_pixels,
    moved_pixel_indices,
    random_moves,
    to_float,
)
from onecurve.numerics.order import training_plan, uniforms
from onecurve.numerics.rand_augment import GREY, LAYER_DRAWS, OPERATIONS, rand_augment
from tests.conftest import real_data
from train_vit import Vit, training_batches

COUNT, H, W = 8, 60, 72


@pytest.fixture(scope="module")
def images() -> torch.Tensor:
    """Return real photographs and one image of a single color."""
    files = sorted((real_data() / "imagenet_sample").glob("*.JPEG"))[: COUNT - 1]
    photographs = [np.asarray(Image.open(file).convert("RGB").resize((W, H))) for file in files]
    return torch.from_numpy(np.stack([*photographs, np.full((H, W, 3), 77, np.uint8)]))


def draws_for(name: str, count: int) -> np.ndarray:
    """Return draws for one layer that applies this operation to all images."""
    draws = uniforms(0, 0, np.arange(count), LAYER_DRAWS)
    draws[:, 0] = (list(OPERATIONS).index(name) + 0.5) / len(OPERATIONS)
    return draws


def solarized_add(image: Image.Image, amount: int) -> Image.Image:
    return image.point([min(255, i + amount) if i < 128 else i for i in range(256)] * 3)


def moved(image: Image.Image, *affine: float) -> Image.Image:
    """Apply an affine map of pixel centers with PIL, whose coordinates begin at the first pixel's corner."""
    a, b, c, d, e, f = affine
    affine = (a, b, c + 0.5 - 0.5 * (a + b), d, e, f + 0.5 - 0.5 * (d + e))
    grey = (GREY,) * 3
    # This transform selects the nearest pixel.
    return image.transform(image.size, Image.Transform.AFFINE, affine, fillcolor=grey)


def enhanced(enhancer):
    return lambda image, strength, sign: enhancer(image).enhance(1.8 * strength + 0.1)


# PIL's operations, as functions of the strength and the direction
PIL = {
    "AutoContrast": lambda image, s, sign: ImageOps.autocontrast(image),
    "Equalize": lambda image, s, sign: ImageOps.equalize(image),
    "Invert": lambda image, s, sign: ImageOps.invert(image),
    "Posterize": lambda image, s, sign: ImageOps.posterize(image, min(8, int(4 * s))),
    "Solarize": lambda image, s, sign: ImageOps.solarize(image, int(256 * s)),
    "SolarizeAdd": lambda image, s, sign: solarized_add(image, int(110 * s)),
    "Color": enhanced(ImageEnhance.Color),
    "Contrast": enhanced(ImageEnhance.Contrast),
    "Brightness": enhanced(ImageEnhance.Brightness),
    "Sharpness": enhanced(ImageEnhance.Sharpness),
    "Rotate": lambda image, s, sign: image.rotate(30 * s * sign, fillcolor=(GREY,) * 3),
    "ShearX": lambda image, s, sign: moved(image, 1, 0.3 * s * sign, 0, 0, 1, 0),
    "ShearY": lambda image, s, sign: moved(image, 1, 0, 0, 0.3 * s * sign, 1, 0),
    "TranslateX": lambda image, s, sign: moved(image, 1, 0, 100 / 224 * W * s * sign, 0, 1, 0),
    "TranslateY": lambda image, s, sign: moved(image, 1, 0, 0, 0, 1, 100 / 224 * H * s * sign),
}
# Maximum difference from PIL, in steps of 1/255
ROUNDED = {"AutoContrast": 1, "Color": 2, "Contrast": 2, "Brightness": 1, "Sharpness": 2}


@pytest.mark.parametrize("magnitude", [3, 10, 15])
@pytest.mark.parametrize("name", PIL)
def test_each_operation_matches_pil(name, magnitude, images):
    draws = draws_for(name, COUNT)
    augmented = rand_augment(images, draws, 1, magnitude)
    assert (augmented.shape, augmented.dtype) == (images.shape, torch.uint8)
    signs = set()
    for image, result, (_, direction, *_) in zip(images.numpy(), augmented.numpy(), draws, strict=True):
        sign = -1 if direction < 0.5 else 1
        expected = np.asarray(PIL[name](Image.fromarray(image), magnitude / 10, sign)).astype(int)
        is_different = np.abs(result - expected) > ROUNDED.get(name, 0)
        # Where two pixels are equally near, for example in every tenth row of a shear, PIL may choose the
        # other pixel.
        assert is_different.mean() < (0.1 if name.startswith(("Rotate", "Shear", "Translate")) else 1e-9)
        signs.add(sign)
    assert signs == {-1, 1}


def test_brightness_is_the_product_rounded_down(images):
    expected = np.minimum(images.numpy() * np.float32(1.9), 255).astype(np.uint8)
    assert (rand_augment(images, draws_for("Brightness", COUNT), 1, 10).numpy() == expected).all()


def test_a_cut_out_is_a_grey_square_at_any_place(images):
    copies = images[-1:].expand(400, -1, -1, -1)
    grey = (rand_augment(copies, draws_for("Cutout", 400), 1, 10) == GREY).all(3)
    rows, columns = grey.any(2), grey.any(1)
    assert (grey == (rows[:, :, None] & columns[:, None, :])).all()
    edge = 2 * int(40 / 224 * H)
    assert rows.sum(1).max() == columns.sum(1).max() == edge
    assert rows.sum(1).min() < edge  # One of the erased squares extends beyond the image
    assert rows.any(0).all()
    assert columns.any(0).all()


def test_operations_are_equally_frequent_and_layers_independent():
    draws = uniforms(0, 0, np.arange(16_000), DRAWS)[:, RAND_AUGMENT]
    assert draws.shape[1] == Vit.__dataclass_fields__["randaug_layers"].metadata["maximum"] * LAYER_DRAWS
    first, second = ((draws[:, layer * LAYER_DRAWS] * 16).astype(int) for layer in (0, 1))
    assert np.bincount(first).min() > 850
    assert np.bincount(first * 16 + second).min() > 30
    assert len(OPERATIONS) == 16


def test_the_training_applies_randaugment(tmp_path):
    recipe = Vit(data="digits", image_size=32, batch_size=16, randaug_layers=2, randaug_magnitude=7)
    digits = open_images(prepare_data("digits", tmp_path))
    plan = list(training_plan(digits.train, share_out(16, None, 1), 0, recipe.seed, 0, 1))
    prepared = DataConfig((0.5,) * 3, (0.5,) * 3)
    batches = training_batches(digits, plan, torch.device("cpu"), recipe, prepared)
    inputs, _, ids = next(batches)
    draws = uniforms(recipe.seed, 0, ids, DRAWS)
    images, moved = torch.from_numpy(digits.train.images), torch.from_numpy(random_moves(draws, 4, False))
    pixels = gather_pixels(images, *moved_pixel_indices(torch.from_numpy(ids), moved, images.shape))
    augmented = rand_augment(pixels, draws[:, RAND_AUGMENT], 2, 7)
    assert (augmented != pixels).any()
    assert torch.equal(inputs, to_float(augmented, (0.5,) * 3, (0.5,) * 3, 32))


def test_a_second_layer_uses_the_output_of_the_first(images):
    draws = np.hstack([draws_for("Invert", COUNT), draws_for("Invert", COUNT)])
    assert torch.equal(rand_augment(images, draws, 2, 10), images)
    assert torch.equal(rand_augment(images, draws, 1, 10), 255 - images)
    assert torch.equal(rand_augment(images, draws, 0, 10), images)
