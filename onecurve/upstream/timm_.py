"""Replaced layers of timm. Seen in timm 1.0.31."""

from collections.abc import Callable
from functools import cache
from typing import Any

BATCH_NORM_ACT = "timm.layers.norm_act.BatchNormAct2d.forward"


def is_batch_norm_act(forward: Callable[..., Any]) -> bool:
    """Return True if `forward` belongs to timm's BatchNorm with an activation. This does not import timm.

    numerics/batch_norm.py replaces this forward method, which normalises and then calls the layer's `drop`
    and `act`. Layers with another forward method are refused, because the replacement would compute incorrect
    results.
    """
    return f"{forward.__module__}.{forward.__qualname__}" == BATCH_NORM_ACT


def replace_attention(module: Any, mixin: type) -> None:
    """Make a timm.layers.Attention use the mixin's forward method. Parameters keep their names.

    timm always calls torch's attention and has no option for another implementation. The project's kernel for
    few tokens is faster (docs/gpu.md), and reads the projection's output in a different order.
    """
    module.__class__ = _attention_class(mixin)


@cache
def _attention_class(mixin: type) -> type:
    import timm.layers

    return type("Attention", (mixin, timm.layers.Attention), {})


def replace_patch_convolution(embedding: Any, convolution: type) -> None:
    """Make a timm.layers.PatchEmbed use another convolution class with the same parameters.

    timm projects patches with torch's convolution. In a 60 ms step of ViT-B/32 at batch 512 on an H200, cuDNN
    took 7.4 ms for this convolution.
    """
    embedding.proj.__class__ = convolution
