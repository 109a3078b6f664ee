"""Replaces layers of timm models. Written for timm 1.0.31."""

from collections.abc import Callable
from functools import cache
from typing import Any

BATCH_NORM_ACT = "timm.layers.norm_act.BatchNormAct2d.forward"  # qualified name of the forward method


def is_batch_norm_act(forward: Callable[..., Any]) -> bool:
    """Return True for the forward method of timm's BatchNorm with an activation, without importing timm.

    numerics/batch_norm.py replaces this method, which normalises the input and then calls the layer's `drop`
    and `act`. Layers with a different forward method are refused, because the replacement would compute
    incorrect results.
    """
    return f"{forward.__module__}.{forward.__qualname__}" == BATCH_NORM_ACT


def replace_attention(module: Any, mixin: type) -> None:
    """Make a timm.layers.Attention use a mixin's forward method, without renaming parameters.

    timm always calls torch's attention function and can't be configured to call a different function. This
    project's kernel for few tokens is faster (docs/gpu.md), and reads the projection's output in a different
    order.
    """
    module.__class__ = _attention_class(mixin)  # keeps the parameters and their names


@cache
def _attention_class(attention_mixin: type) -> type:
    """Return a subclass of timm's Attention in which the mixin's methods take precedence."""
    import timm.layers

    return type("Attention", (attention_mixin, timm.layers.Attention), {})


def replace_patch_convolution(embedding: Any, convolution: type) -> None:
    """Replace the convolution class of a timm.layers.PatchEmbed in place, and keep the parameters.

    timm projects patches with torch's convolution. On an H200, cuDNN spent 7.4 ms of a 60 ms step of ViT-B/32
    at batch 512 on this convolution.
    """
    embedding.proj.__class__ = convolution
