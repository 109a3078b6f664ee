"""Tests of replacements for timm's layers, which must keep the results and the parameter names."""

import copy
from collections import Counter
from typing import Any

import pytest
import timm
import torch
from timm.layers import Attention, PatchEmbed
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from onecurve.models.timm_models import PatchConv2d, speed_up
from onecurve.telemetry.flops import flops_per_image
from train_vit import Vit, build_model

MODELS = ("vit_tiny_patch16_224", "swin_tiny_patch4_window7_224", "mixer_s32_224", "visformer_tiny")


class Operators(TorchDispatchMode):
    """Dispatch mode that records the operators that are called."""

    def __init__(self):
        super().__init__()
        self.called = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.called.append(func)
        return func(*args, **(kwargs or {}))


def results(layer: nn.Module, inputs: Tensor, **more: Any) -> tuple[list[Tensor], Counter]:
    """Return the outputs, the gradients of inputs and parameters, and the number of calls per operator."""
    inputs = inputs.detach().requires_grad_()
    with Operators() as called:
        outputs = layer(inputs, **more)
        gradients = torch.autograd.grad(outputs.pow(3).sum(), [inputs, *layer.parameters()])
    return [outputs, *gradients], Counter(func.__name__.split(".")[0] for func in called.called)


@pytest.mark.parametrize("formats", ["NN", "NC", "CN", "CC"])
@pytest.mark.parametrize(
    ("options", "size"),
    [
        ({"patch_size": 14}, (28, 28)),
        ({"patch_size": 16}, (32, 32)),
        ({"patch_size": 32, "bias": False}, (64, 64)),
        ({"patch_size": (4, 8), "in_chans": 1, "flatten": False}, (16, 24)),
        ({"patch_size": 8, "in_chans": 5, "norm_layer": nn.LayerNorm}, (16, 24)),
        ({"patch_size": 8, "output_fmt": "NHWC", "strict_img_size": False}, (24, 40)),
        ({"patch_size": 8, "strict_img_size": False, "dynamic_img_pad": True}, (17, 30)),
    ],
)
def test_a_patch_embedding_is_a_product_in_training(options, size, formats):
    """Check each combination of image and weight memory formats: contiguous or channels_last."""
    torch.manual_seed(0)
    memory_formats = {"C": torch.channels_last, "N": torch.contiguous_format}
    images_format, weights_format = (memory_formats[name] for name in formats)
    timm_layer = PatchEmbed(size, embed_dim=24, **options).to(memory_format=weights_format)
    fast_layer, names = copy.deepcopy(timm_layer), list(timm_layer.state_dict())
    speed_up(fast_layer)
    assert list(fast_layer.state_dict()) == names
    images = torch.randn(3, options.get("in_chans", 3), *size).to(memory_format=images_format)
    expected, actual = results(timm_layer, images), results(fast_layer, images)
    assert (expected[1]["convolution"], actual[1]["convolution"]) == (1, 0)
    for value, expected_value in zip(actual[0], expected[0], strict=True):
        assert (value - expected_value).abs().max() < 1e-5 * expected_value.abs().max()
        assert value.shape == expected_value.shape
    expected, actual = results(timm_layer.eval(), images), results(copy.deepcopy(fast_layer).eval(), images)
    assert actual[1] == expected[1]
    assert all(map(torch.equal, actual[0], expected[0]))


def test_images_that_patches_do_not_divide_keep_the_convolution():
    timm_layer, images = PatchEmbed(None, 16, embed_dim=24), torch.randn(2, 3, 40, 56)
    fast_layer = copy.deepcopy(timm_layer)
    speed_up(fast_layer)
    expected, actual = results(timm_layer, images), results(fast_layer, images)
    assert actual[1] == expected[1]
    assert all(map(torch.equal, actual[0], expected[0]))


@pytest.mark.parametrize(
    ("options", "saved"),
    [
        ({}, 1),
        ({"qkv_bias": True, "qk_norm": True, "attn_head_dim": 6}, 1),
        ({"dim_out": 12, "proj_bias": False}, 1),
        ({"gated": True}, 0),
        ({"scale_norm": True}, 0),
    ],
)
def test_an_attention_has_the_same_bits_with_fewer_copies(options, saved):
    torch.manual_seed(0)
    timm_layer, tokens = Attention(24, 3, norm_layer=nn.LayerNorm, **options), torch.randn(2, 5, 24)
    fast_layer = copy.deepcopy(timm_layer)
    speed_up(fast_layer)
    assert list(fast_layer.state_dict()) == list(timm_layer.state_dict())
    for more in ({}, {"attn_mask": torch.randn(5, 5)}, {"is_causal": True}):
        (expected, before), (actual, after) = (results(m, tokens, **more) for m in (timm_layer, fast_layer))
        assert all(map(torch.equal, actual, expected))
        assert before["clone"] - after["clone"] == saved


@pytest.mark.parametrize("name", MODELS)
def test_a_model_has_the_same_operations_names_and_logits(name):
    torch.manual_seed(0)
    timm_model = timm.create_model(name, num_classes=10, drop_path_rate=0.0)
    fast_model = build_model(Vit(model=name, drop_path=0.0), 10)
    assert any(isinstance(module, PatchConv2d) for module in fast_model.modules())
    fast_model.load_state_dict(timm_model.state_dict())
    with torch.no_grad():
        images = torch.randn(1, 3, 224, 224)
        assert torch.equal(fast_model.eval()(images), timm_model.eval()(images))
        torch.testing.assert_close(fast_model.train()(images), timm_model.train()(images))
    assert flops_per_image(fast_model.to("meta").train, 224) == flops_per_image(
        timm_model.to("meta").train, 224
    )
