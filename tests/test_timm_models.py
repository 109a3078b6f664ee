"""What is changed in a model of timm: the patch embedding is a product, with the same numbers and names."""

import copy

import pytest
import timm
import torch
from timm.layers import PatchEmbed
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from common.telemetry.flops import flops_per_image
from common.timm_models import PatchConv2d, multiply_patches
from train_vit import Vit, build_model

MODELS = ("vit_tiny_patch16_224", "swin_tiny_patch4_window7_224", "mixer_s32_224", "visformer_tiny")


class Operators(TorchDispatchMode):
    """The names of the operators that are called."""

    def __init__(self):
        super().__init__()
        self.names = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.add(func.__name__.split(".")[0])
        return func(*args, **(kwargs or {}))


def results(embed: nn.Module, images: Tensor) -> tuple[list[Tensor], bool]:
    """The embedding, its gradients with respect to images and parameters; whether it is a convolution."""
    images = images.detach().requires_grad_()
    with Operators() as called:
        patches = embed(images)
        gradients = torch.autograd.grad(patches.pow(3).sum(), [images, *embed.parameters()])
    return [patches, *gradients], "convolution" in called.names


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
    """formats: of the images and the weights, contiguous or channels_last."""
    torch.manual_seed(0)
    images_format, weights_format = (
        torch.channels_last if name == "C" else torch.contiguous_format for name in formats
    )
    theirs = PatchEmbed(size, embed_dim=24, **options).to(memory_format=weights_format)
    ours, names = copy.deepcopy(theirs), list(theirs.state_dict())
    multiply_patches(ours)
    assert list(ours.state_dict()) == names
    images = torch.randn(3, options.get("in_chans", 3), *size).to(memory_format=images_format)
    expected, found = results(theirs, images), results(ours, images)
    assert (expected[1], found[1]) == (True, False)
    for one, other in zip(found[0], expected[0], strict=True):
        assert (one - other).abs().max() < 1e-5 * other.abs().max()
        assert one.shape == other.shape
    expected, found = results(theirs.eval(), images), results(copy.deepcopy(ours).eval(), images)
    assert found[1]
    assert all(map(torch.equal, found[0], expected[0]))


def test_images_that_patches_do_not_divide_keep_the_convolution():
    theirs, images = PatchEmbed(None, 16, embed_dim=24), torch.randn(2, 3, 40, 56)
    ours = copy.deepcopy(theirs)
    multiply_patches(ours)
    (found, is_convolution), (expected, _) = results(ours, images), results(theirs, images)
    assert is_convolution
    assert all(map(torch.equal, found, expected))


@pytest.mark.parametrize("name", MODELS)
def test_a_model_has_the_same_operations_names_and_logits(name):
    torch.manual_seed(0)
    theirs = timm.create_model(name, num_classes=10, drop_path_rate=0.0)
    ours = build_model(Vit(model=name, drop_path=0.0), 10)
    assert any(isinstance(module, PatchConv2d) for module in ours.modules())
    ours.load_state_dict(theirs.state_dict())
    with torch.no_grad():
        images = torch.randn(1, 3, 224, 224)
        assert torch.equal(ours.eval()(images), theirs.eval()(images))
        torch.testing.assert_close(ours.train()(images), theirs.train()(images))
    assert flops_per_image(ours.to("meta").train, 224) == flops_per_image(theirs.to("meta").train, 224)
