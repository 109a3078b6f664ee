"""Tests that compare batch augmentation with single-image augmentation, and tests of decoding benchmarks."""

import itertools
import json
import shutil
import sys
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torchvision.transforms import v2

from onecurve.data.crops import _resize_by_torch
from onecurve.distributed.precision import input_dtype
from onecurve.numerics.augment import (
    COLOR,
    DRAWS,
    ERASING,
    JITTER_ORDERS,
    RAND_AUGMENT,
    color_jitter,
    gather_pixels,
    mixer,
    moved_pixel_indices,
    random_erasing,
    random_moves,
    to_float,
)
from onecurve.numerics.order import reseed, uniforms
from onecurve.numerics.rand_augment import LAYER_DRAWS, rand_augment
from tests.conftest import ROOT, VIT, full, python, real_data, run
from tests.support.data_sets import write_shards


@pytest.fixture
def images() -> torch.Tensor:
    return torch.from_numpy(np.random.RandomState(0).randint(0, 256, (64, 20, 24, 3), dtype=np.uint8))


def cropped(images, draws, pad, flip, rows=None):
    rows = torch.arange(len(images)) if rows is None else torch.from_numpy(rows)
    moved = torch.from_numpy(random_moves(draws, pad, flip))
    return gather_pixels(images, *moved_pixel_indices(rows, moved, images.shape))


def test_crop_and_flip_is_pad_crop_flip(images):
    draws = uniforms(0, 0, np.arange(64), 3)
    augmented = cropped(images, draws, 4, flip=True)
    shifts, flips = set(), 0
    for image, result, (down, right, turn) in zip(images, augmented, draws, strict=True):
        top, left = int(down * 9), int(right * 9)
        padded = np.pad(image.numpy(), ((4, 4), (4, 4), (0, 0)), mode="reflect")
        expected = padded[top : top + 20, left : left + 24]
        assert np.array_equal(result.numpy(), expected[:, ::-1] if turn < 0.5 else expected)
        shifts.add((top, left))
        flips += turn < 0.5
    assert {0, 8} <= {top for top, _ in shifts}  # The smallest and the largest shift must occur
    assert 16 < flips < 48
    chosen = np.array([9, 2, 9])  # Indices of the selected images on the device
    assert torch.equal(cropped(images, draws[chosen], 4, True, chosen), augmented[chosen])
    last = 2**22 - 1  # Index of an image whose offset exceeds 32 bits
    y, _ = moved_pixel_indices(
        torch.tensor([last]), torch.zeros(3, 1, dtype=torch.int64), (last + 1, 32, 32, 3)
    )
    assert y[0].tolist() == [(last * 32 + line) * 32 for line in range(32)]


@pytest.mark.parametrize(
    ("h", "w", "size"), [(20, 20, 12), (20, 20, 20), (20, 20, 48), (20, 24, 22), (24, 20, 22), (2, 10**6, 12)]
)
@pytest.mark.parametrize("interpolation", [None, "bicubic", "bilinear"])
def test_to_float_matches_torchvision(h, w, size, interpolation):
    """Check sizes at which one edge grows and one shrinks, and an image too large for full matrices."""
    images = torch.randint(256, (64 if w < 99 else 1, h, w, 3), dtype=torch.uint8)
    mean, std = (0.4, 0.5, 0.6), (0.2, 0.3, 0.25)
    resized = to_float(images, mean, std, size, interpolation)
    expected = v2.functional.normalize(images.permute(0, 3, 1, 2).float() / 255, mean, std)
    if (h, w) != (size, size):
        mode = v2.InterpolationMode(interpolation or "bicubic")
        # torchvision must antialias in the same cases as PIL.
        antialias = size < max(h, w) or interpolation is not None
        expected = v2.functional.resize(expected, [size, size], mode, antialias=antialias)
    assert resized.shape == (len(images), 3, size, size)
    assert resized.is_contiguous(memory_format=torch.channels_last)
    assert torch.allclose(resized, expected, atol=1e-4)


@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
@pytest.mark.parametrize(("mixup", "cutmix"), [(0.8, 0.0), (0.0, 1.0), (0.8, 1.0)])
def test_mixing_matches_torchvision_and_keeps_channels_last(mixup, cutmix, dtype):
    images = torch.randn(8, 3, 12, 12).contiguous(memory_format=torch.channels_last)
    labels, before = torch.arange(8), images.clone()
    transform_types = ((v2.MixUp, mixup), (v2.CutMix, cutmix))
    transforms = [transform(alpha=alpha, num_classes=10) for transform, alpha in transform_types if alpha]
    reseed(0, 1, 2)
    expected, expected_labels = v2.RandomChoice(transforms)(images, labels)
    reseed(0, 1, 2)
    mixed, mixed_labels = mixer(mixup, cutmix, 10, dtype)(images, labels)
    assert torch.equal(mixed_labels, expected_labels)
    assert torch.equal(images, before)
    assert mixed.is_contiguous(memory_format=torch.channels_last)
    if dtype is None:
        assert torch.equal(mixed, expected)
    else:
        assert mixed.dtype == dtype
        torch.testing.assert_close(mixed.float(), expected, rtol=2**-8, atol=2**-6)


def test_images_are_mixed_in_the_dtype_of_the_model():
    """Check the dtype for simulated accelerators, because the test has no GPU."""
    types = {"cuda bf16": torch.bfloat16, "cuda fp16": torch.float16, "cuda no": None, "cpu bf16": None}
    for (device, mixed_precision), dtype in ((name.split(), dtype) for name, dtype in types.items()):
        precision = SimpleNamespace(mixed_precision=mixed_precision)
        assert input_dtype(SimpleNamespace(device=torch.device(device), precision=precision)) == dtype


OPERATIONS = (v2.functional.adjust_brightness, v2.functional.adjust_contrast, v2.functional.adjust_saturation)


@pytest.mark.parametrize("alone", [0, 1, 2, None])
def test_color_jitter_matches_torchvision_in_every_order(images, alone):
    draws = uniforms(0, 0, np.arange(64), DRAWS)[:, COLOR]
    if alone is not None:  # A draw of 0.5 yields a factor of 1, which disables the other two operations
        draws[:, [k for k in range(3) if k != alone]] = 0.5
    jittered = color_jitter(images, draws, 0.4)
    assert (jittered.shape, jittered.dtype, jittered.is_contiguous()) == (images.shape, torch.uint8, True)
    orders = set()
    for image, result, (*factors, turn) in zip(images, jittered, draws, strict=True):
        expected = image.permute(2, 0, 1).float() / 255
        for k in JITTER_ORDERS[int(turn * 6)]:
            expected = OPERATIONS[k](expected, 0.6 + 0.8 * factors[k])
        # Rounding the result adds half a step, and rounding the gray values before their mean adds slightly
        # more.
        assert (result.permute(2, 0, 1) - 255 * expected).abs().max() < 0.55
        orders.add(int(turn * 6))
    assert orders == set(range(6))
    assert sorted(map(tuple, JITTER_ORDERS)) == list(itertools.permutations(range(3)))
    assert (jittered != images).flatten(1).any(1).sum() > 60  # A few images may have a factor close to 1


def test_erased_boxes_have_the_areas_and_shapes_of_the_paper():
    """Check that erased areas range from 0.02 to 1/3 of the image, and aspect ratios from 0.3 to 1/0.3.

    Erased boxes may lie at any position.
    """
    count, h, w = 3000, 40, 60
    draws = uniforms(0, 0, np.arange(count), DRAWS)[:, ERASING]
    images = torch.ones(count, 3, h, w).contiguous(memory_format=torch.channels_last)
    erased = random_erasing(images, draws, 0.25) == 0
    assert erased.is_contiguous(memory_format=torch.channels_last)
    assert (erased == erased[:, :1]).all()  # Erased pixels are zero in all channels
    # Erased rows [count, h] and erased columns [count, w]
    rows, columns = erased[:, 0].any(2), erased[:, 0].any(1)
    assert (erased[:, 0] == (rows[:, :, None] & columns[:, None, :])).all()
    for edges in (rows, columns):  # Erased boxes are connected
        assert (edges.int().diff(dim=1) == 1).sum(1).max() <= 1
    hit = rows.any(1)
    assert (hit == torch.from_numpy(draws[:, 0] < 0.25)).all()
    assert hit.float().mean().item() == pytest.approx(0.25, abs=0.03)
    height, width = rows[hit].sum(1).double(), columns[hit].sum(1).double()
    area = height * width / (h * w)
    assert area.min() > 0.01  # Rounding changes each edge, of at least 4 pixels, by at most one pixel
    assert area.max() < 0.36
    assert area.mean().item() == pytest.approx((0.02 + 1 / 3) / 2, abs=0.01)
    aspect = (height / width).log()
    assert aspect.mean().abs() < 0.06
    assert aspect.quantile(0.02) < np.log(0.4)
    assert aspect.quantile(0.98) > np.log(2.5)
    assert rows.any(0).all()  # Erased boxes reach every border
    assert columns.any(0).all()


def test_augmentation_at_zero_changes_nothing(images):
    draws = uniforms(0, 0, np.arange(64), DRAWS)
    assert torch.equal(cropped(images, draws, 0, flip=False), images)
    assert torch.equal(color_jitter(images, draws[:, COLOR], 0.0), images)
    floats = torch.randn(64, 3, 20, 24)
    assert torch.equal(random_erasing(floats.clone(), draws[:, ERASING], 0.0), floats)
    assert mixer(0, 0, 10) is None


def test_augmentation_depends_only_on_the_sample(images):
    def augmented(rows, epoch=0):
        ids = np.arange(64)[rows]
        draws = uniforms(3, epoch, ids, DRAWS)
        pixels = rand_augment(cropped(images[ids], draws, 4, flip=True), draws[:, RAND_AUGMENT], 2, 10)
        pixels = color_jitter(pixels, draws[:, COLOR], 0.4)
        floats = to_float(pixels, (0.5,) * 3, (0.5,) * 3, 24)
        return random_erasing(floats, draws[:, ERASING], 0.5)

    before = images.clone()
    whole = augmented(slice(64))
    assert torch.equal(images, before)
    assert torch.equal(augmented(slice(40, 64)), whole[40:])
    for i in range(8):
        assert torch.equal(augmented([i]), whole[[i]])
    assert not torch.equal(augmented([7], epoch=1), whole[[7]])
    large = torch.randint(256, (9, 256, 256, 3), dtype=torch.uint8)
    draws = uniforms(3, 0, np.arange(9), DRAWS)[:, COLOR]
    jittered = color_jitter(large, draws, 0.4)  # Several threads share the pixels of a few images
    for i in range(9):
        assert torch.equal(jittered[[i]], color_jitter(large[[i]], draws[[i]], 0.4))


ALONE = """
import numpy as np, torch
from mine.augment import COLOR, DRAWS, ERASING, RAND_AUGMENT, color_jitter, mixer, random_erasing, to_float
from mine.rand_augment import rand_augment
rng = np.random.default_rng(0)
pixels, draws = torch.from_numpy(rng.integers(0, 256, (16, 20, 24, 3), np.uint8)), rng.random((16, DRAWS))
pixels = color_jitter(rand_augment(pixels, draws[:, RAND_AUGMENT], 2, 10), draws[:, COLOR], 0.4)
images = random_erasing(to_float(pixels, (0.5,) * 3, (0.5,) * 3, 24), draws[:, ERASING], 0.5)
mixer(0.8, 1.0, 10)(images, torch.arange(16) % 10)
"""


def test_the_two_files_work_without_the_rest(tmp_path, monkeypatch):
    (tmp_path / "mine").mkdir()
    for name in ("augment.py", "rand_augment.py"):
        shutil.copy(ROOT / "onecurve" / "numerics" / name, tmp_path / "mine")
    monkeypatch.syspath_prepend(tmp_path)
    project_names, copied_names = {}, {}
    exec(ALONE.replace("mine", "onecurve.numerics"), project_names)
    for name in list(sys.modules):
        if name.partition(".")[0] in ("onecurve", "accelerate", "timm"):
            monkeypatch.setitem(sys.modules, name, None)
    exec(ALONE, copied_names)
    assert torch.equal(project_names["images"], copied_names["images"])


def test_each_type_of_draw_has_separate_columns():
    """Check that no column of random_moves() (0 to 2) is also a column of the decoder (4 to 43,
    onecurve/data/workers.py).
    """
    columns = [0, 1, 2, *range(4, 44)]
    for part in (COLOR, ERASING, RAND_AUGMENT):
        columns += range(DRAWS)[part]
    assert len(columns) == len(set(columns)) == 52 + 4 * LAYER_DRAWS


def test_a_crop_is_resized_like_a_separate_image():
    """Check a channels_last crop with gaps in memory, which torch resizes in a different code path."""
    image = np.random.RandomState(1).randint(0, 256, (300, 400, 3), dtype=np.uint8)
    crop = image[20:280, 33:350]
    whole = torch.from_numpy(crop.transpose(2, 0, 1).copy())[None]
    expected = torch.nn.functional.interpolate(whole, (96, 128), mode="bilinear", antialias=True)[0]
    assert np.array_equal(_resize_by_torch(crop, 96, 128, "bilinear"), expected.permute(1, 2, 0))


FROM_SHARDS = f"--steps 2 train_vit.py --data OUT/shards --cache_dir OUT/cache {' '.join(VIT[1:])}"
FROM_SHARDS += " --batch_size 16 --per_device_batch_size 8 --streams 4 --shuffle_window 20 --workers 1"


@pytest.mark.parametrize(
    ("words", "arms"),
    [
        ("decoding --size 64 --limit 4 --rounds 2", ["PIL, originals", "ours, resized"]),
        full(f"train_speed --arms ready,ours --rounds 2 {FROM_SHARDS}", ["ready", "ours"]),
    ],
)
def test_a_benchmark_measures_its_arms(words, arms, tmp_path):
    name, *flags = words.replace("OUT", str(tmp_path)).split()
    write_shards(tmp_path / "shards")
    images = [] if name == "train_speed" else ["--images", real_data() / "imagenet_sample"]
    run([*python(), "-m", f"benchmarks.{name}", *images, "--json", tmp_path / "out.json", *flags])
    rounds = json.loads((tmp_path / "out.json").read_text())["rounds"]
    assert len(rounds) == 2
    assert all(speeds[arm] > 0 for speeds in rounds for arm in arms)
