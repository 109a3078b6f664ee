"""A model and its blocks, compiled (--compile), or with recomputed activations (--grad_checkpointing).

Compilation: also by the `dynamo_config` of an accelerate config. On one process and under DDP a CNN is one
graph to train and one to evaluate, for each size of its images; torch cuts it at DDP's buckets, so that their
exchange hides behind the backward pass. Elsewhere and with --deterministic blocks are compiled one by one,
and so are those of timm's models: equal blocks share their graphs. The blocks of a ViT need 2 graphs to train
and 2 to evaluate, for any number of blocks: one for the first block, which has no drop path, and one for all
others. On an H200 ResNet-18 trains at 83,289 images/s as one graph, and at 63,042 eagerly (docs/gpu.md).

Activation checkpointing: a block's activations are recomputed in the backward pass instead of kept, with the
same random numbers. Between forward and backward a ViT-B/32 with 32 images of 224 pixels holds 66 MiB instead
of 911 (fp32, counted on a CPU). On an H200 its peak at batch 512 is 3.69 GiB instead of 10.48 (bf16).
"""

import functools
import os
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from accelerate.utils import TorchDynamoPlugin
from torch import nn
from torch.utils.checkpoint import checkpoint

from onecurve.system.env import is_on
from onecurve.system.processes import accelerate_config
from onecurve.upstream.accelerate_ import block_names
from onecurve.upstream.torch_ import allow_recompilations, draw_as_eager, has_cpp_compiler

# Graphs of one class of blocks: for each width and stride, to train and to evaluate. Beyond Dynamo's default
# limit of 8, a block would silently run uncompiled.
RECOMPILE_LIMIT = 64


def blocks_of(model: nn.Module, names: Collection[str] | None = None) -> Iterator[nn.Module]:
    """The outermost modules of the classes that are named, by default in the model's `_no_split_modules`."""
    if names is None:
        names = block_names(model)
    for child in model.children():
        if type(child).__name__ in names:
            yield child
        else:
            yield from blocks_of(child, names)


def checkpoint_activations(model: nn.Module) -> None:
    """Checkpoints each block, or what timm's own method chooses. ValueError for a model with neither.

    Parameters keep their names. Accelerate's method would draw other random numbers in the backward pass, and
    rename parameters.
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


@dataclass(frozen=True)
class Compilation:
    """Arguments of torch.compile. Backend `no` compiles nothing."""

    backend: str = "no"
    mode: str = "default"
    fullgraph: bool = False
    dynamic: bool = False

    def __bool__(self) -> bool:
        return self.backend != "no"

    def __str__(self) -> str:
        """The value of --compile; for a backend other than Inductor, the backend's name."""
        return self.mode if self.backend == "inductor" else self.backend


def chosen_compilation(flag: str | None) -> Compilation:
    """The compilation of --compile, else of the launcher. Raises ValueError if this host can't compile."""
    if flag is None:
        plugin = TorchDynamoPlugin(**_arguments_in_launchers_file())
        is_full, is_dynamic = bool(plugin.fullgraph), bool(plugin.dynamic)
        chosen = Compilation(plugin.backend.value.lower(), plugin.mode, is_full, is_dynamic)
    else:
        chosen = Compilation("no" if flag == "no" else "inductor", flag)
    if chosen:
        _check(chosen)
    return chosen


def compile_blocks(
    model: nn.Module, how: Compilation, is_whole: bool = False, accumulations: int = 1
) -> None:
    """Compiles the forward of each block, or of the whole model. Parameters keep their names.

    is_whole: True if nothing needs blocks: no sharding, no checkpointing, not the bits of a sharded model.
    Then one graph is compiled; but not of timm's models, whose equal blocks share theirs. Blocks and
    accumulations go without CUDA graphs: in an evaluation a block would overwrite its input, the output of
    the block before (pytorch #152887), and a micro-batch the gradients of the one before. `max-autotune` has
    a mode without them, the others raise ValueError. block.compile() is not used, as it also traces FSDP's
    and DeepSpeed's hooks.
    """
    allow_recompilations(RECOMPILE_LIMIT)
    draw_as_eager()
    mode = how.mode if how.backend == "inductor" else None  # other backends have no modes
    blocks = list(blocks_of(model))
    is_whole = is_whole and not any(type(block).__module__.startswith("timm.") for block in blocks)
    has_graphs = how.backend == "cudagraphs" or mode in ("reduce-overhead", "max-autotune")
    if has_graphs and not (is_whole and accumulations == 1):
        if mode != "max-autotune":
            raise ValueError(
                f"--compile {how} (dynamo_backend): CUDA graphs are for CNNs on one process or under DDP,"
                " without activation checkpointing, accumulation or --deterministic; choose --compile default"
            )
        mode = "max-autotune-no-cudagraphs"
    for part in [model] if is_whole else blocks or [model]:
        part.forward = torch.compile(
            part.forward, backend=how.backend, mode=mode, fullgraph=how.fullgraph, dynamic=how.dynamic
        )


def _arguments_in_launchers_file() -> dict[str, Any]:
    """TorchDynamoPlugin's arguments where `accelerate launch` (1.15) sets no variables: for DeepSpeed."""
    if not is_on("ACCELERATE_USE_DEEPSPEED") or "ACCELERATE_DYNAMO_BACKEND" in os.environ:
        return {}
    answers = accelerate_config().get("dynamo_config") or {}
    keys = {"backend": "backend", "mode": "mode", "fullgraph": "use_fullgraph", "dynamic": "use_dynamic"}
    return {name: answers.get(f"dynamo_{key}") for name, key in keys.items()}


def _check(chosen: Compilation) -> None:
    if chosen.backend not in (known := torch.compiler.list_backends(())):
        raise ValueError(f"dynamo_backend {chosen.backend} is not on this host: choose {', '.join(known)}")
    if chosen.backend == "inductor" and not has_cpp_compiler():
        raise ValueError(
            f"--compile {chosen} (dynamo_backend) needs a C++ compiler, and this host has none: install"
            " g++, or choose --compile no"
        )
