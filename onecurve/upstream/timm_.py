"""Layers of timm that are computed in another way. Seen in timm 1.0.31."""

from collections.abc import Callable
from functools import cache
from typing import Any

BATCH_NORM_ACT = "timm.layers.norm_act.BatchNormAct2d.forward"


def is_batch_norm_act(forward: Callable[..., Any]) -> bool:
    """Return True for the forward of timm's BatchNorm with an activation, without importing timm.

    numerics/batch_norm.py replaces this method, which normalises, then calls the layer's `drop` and `act`. A
    layer with another forward would be computed wrongly, so it is refused.
    """
    return f"{forward.__module__}.{forward.__qualname__}" == BATCH_NORM_ACT


def replace_attention(module: Any, mixin: type) -> None:
    """Make a timm.layers.Attention compute by the forward of the mixin; its parameters keep their names.

    timm has no option for another attention: it calls torch's. The project's kernel for few tokens is faster
    (docs/gpu.md), and reads the projection's output in its own order.
    """
    module.__class__ = _attention_class(mixin)


@cache
def _attention_class(mixin: type) -> type:
    import timm.layers

    return type("Attention", (mixin, timm.layers.Attention), {})


def replace_patch_convolution(embedding: Any, convolution: type) -> None:
    """Make a timm.layers.PatchEmbed project by another class of convolution, with the same parameters.

    timm projects patches by torch's convolution, for which cuDNN took 7.4 ms of a step's 60 (ViT-B/32, batch
    512, an H200).
    """
    embedding.proj.__class__ = convolution
