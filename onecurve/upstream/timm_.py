"""Replaced layers of timm. Seen in timm 1.0.31."""

from collections.abc import Callable
from functools import cache
from typing import Any

BATCH_NORM_ACT = "timm.layers.norm_act.BatchNormAct2d.forward"


def is_batch_norm_act(forward: Callable[..., Any]) -> bool:
    """Return True for the forward method of timm's BatchNorm with an activation, without importing timm.

    numerics/batch_norm.py replaces this method, which normalises and then calls the layer's `drop` and `act`.
    A layer with another forward method would be computed incorrectly, so it is refused.
    """
    return f"{forward.__module__}.{forward.__qualname__}" == BATCH_NORM_ACT


def replace_attention(module: Any, mixin: type) -> None:
    """Make a timm.layers.Attention use the mixin's forward method. Parameters keep their names.

    timm always calls torch's attention and has no option for another one. The project's kernel for few tokens
    is faster (docs/gpu.md), and reads the projection's output in a different order.
    """
    module.__class__ = _attention_class(mixin)


@cache
def _attention_class(mixin: type) -> type:
    import timm.layers

    return type("Attention", (mixin, timm.layers.Attention), {})


def replace_patch_convolution(embedding: Any, convolution: type) -> None:
    """Make a timm.layers.PatchEmbed use another convolution class with the same parameters.

    timm projects patches with torch's convolution. cuDNN took 7.4 ms for it in a step of 60 ms (ViT-B/32,
    batch 512, on an H200).
    """
    embedding.proj.__class__ = convolution
