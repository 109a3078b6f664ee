"""Activation checkpointing: a block's activations are recomputed in the backward pass instead of kept.

The recomputation draws the same random numbers, so dropout and drop path do not change the gradients.
Parameters keep their names. Between forward and backward a ViT-B/32 with 32 images of 224 pixels holds 66 MiB
instead of 911 (fp32, counted on a CPU). Not yet measured on a GPU.
"""

import functools
from collections.abc import Callable, Collection, Iterator
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint


def blocks_of(model: nn.Module) -> Iterator[nn.Module]:
    """The outermost modules of the classes that the model's `_no_split_modules` names."""
    yield from _outermost(model, getattr(model, "_no_split_modules", None) or ())


def _outermost(module: nn.Module, names: Collection[str]) -> Iterator[nn.Module]:
    for child in module.children():
        if type(child).__name__ in names:
            yield child
        else:
            yield from _outermost(child, names)


def checkpoint_activations(model: nn.Module) -> None:
    """Checkpoints each block, or what timm's own method chooses. ValueError for a model with neither.

    Accelerate's method would draw other random numbers in the backward pass, and rename parameters.
    """
    blocks = list(blocks_of(model))
    for block in blocks:
        block.forward = _recomputed(block.forward)
    if blocks:
        return
    try:
        model.set_grad_checkpointing()  # type: ignore[operator]  # timm's models have it
    except (AttributeError, AssertionError):
        raise ValueError(
            f"activation checkpointing: {type(model).__name__} has no blocks, name their classes in its"
            " _no_split_modules; or train without --grad_checkpointing (fsdp_activation_checkpointing)"
        ) from None


def _recomputed(forward: Callable) -> Callable:
    @functools.wraps(forward)
    def run(*args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return forward(*args, **kwargs)
        return checkpoint(forward, *args, use_reentrant=False, **kwargs)

    return run
