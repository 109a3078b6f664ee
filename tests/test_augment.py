"""Augmentation on whole batches against the plain way, image by image."""

import numpy as np
import pytest
import torch
from torchvision.transforms import v2

from common.augment import crop_and_flip, mixer, to_float
from common.order import reseed, uniforms


@pytest.fixture
def images() -> torch.Tensor:
    return torch.from_numpy(np.random.RandomState(0).randint(0, 256, (64, 20, 24, 3), dtype=np.uint8))


def test_crop_and_flip_is_pad_crop_flip(images):
    draws = uniforms(0, 0, np.arange(64), 3)
    ours = crop_and_flip(images, draws, 4, flip=True)
    shifts, flips = set(), 0
    for image, result, (down, right, turn) in zip(images, ours, draws, strict=True):
        top, left = int(down * 9), int(right * 9)
        padded = np.pad(image.numpy(), ((4, 4), (4, 4), (0, 0)), mode="reflect")
        expected = padded[top : top + 20, left : left + 24]
        assert np.array_equal(result.numpy(), expected[:, ::-1] if turn < 0.5 else expected)
        shifts.add((top, left))
        flips += turn < 0.5
    assert {0, 8} <= {top for top, _ in shifts}  # both extremes occur
    assert 16 < flips < 48


def test_without_padding_and_flip_nothing_changes(images):
    assert torch.equal(crop_and_flip(images, uniforms(0, 0, np.arange(64), 3), 0, flip=False), images)


@pytest.mark.parametrize("size", [20, 48])
def test_to_float_is_torchvisions_normalize_and_resize(images, size):
    square = images[:, :, :20].contiguous()
    mean, std = (0.4, 0.5, 0.6), (0.2, 0.3, 0.25)
    ours = to_float(square, mean, std, size)
    plain = square.permute(0, 3, 1, 2)
    theirs = v2.functional.normalize(plain.float() / 255, mean, std)
    if size != 20:
        theirs = v2.functional.resize(theirs, [size, size], v2.InterpolationMode.BICUBIC, antialias=False)
    assert ours.shape == (64, 3, size, size)
    assert ours.is_contiguous(memory_format=torch.channels_last)
    assert torch.allclose(ours, theirs, atol=1e-4)


def test_mixing_is_decided_by_the_seed_of_the_micro_batch(images):
    floats, labels = to_float(images, (0.5,) * 3, (0.5,) * 3, 24), torch.arange(64) % 10
    mix = mixer(0.8, 1.0, 10)

    def mixed(*numbers):
        reseed(*numbers)
        return mix(floats, labels)

    (a, soft), (b, _), (c, _) = mixed(0, 1, 2), mixed(0, 1, 2), mixed(0, 1, 3)
    assert torch.equal(a, b)
    assert not torch.equal(a, c)
    assert soft.shape == (64, 10)
    assert torch.allclose(soft.sum(1), torch.ones(64))
    assert mixer(0, 0, 10) is None
