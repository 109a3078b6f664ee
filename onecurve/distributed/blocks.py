"""Compilation (--compile) and activation checkpointing (--grad_checkpointing) of a model or its blocks.

The `dynamo_config` of an accelerate config also selects compilation. On one process and under DDP, a CNN
compiles to one training graph and one evaluation graph for each image size. Under DDP, torch splits the graph
at bucket boundaries, so that the gradient exchange overlaps with the backward pass. All other cases compile
block by block: other strategies, --deterministic and timm's models. Equal blocks share their graphs. A ViT
with any number of blocks needs 2 graphs to train and 2 to evaluate: one for the first block, which has no
drop path, and one for all other blocks. On an H200, ResNet-18 trains at 83,289 images/s as one graph and at
63,042 images/s in eager mode (docs/gpu.md).

Activation checkpointing recomputes a block's activations in the backward pass, with the same random numbers,
instead of keeping them. Between the forward and backward pass, a ViT-B/32 with 32 images of 224 pixels then
holds 66 MiB instead of 911 MiB (fp32, counted on a CPU). At batch 512 on an H200, peak memory is 3.69 GiB
instead of 10.48 GiB (bf16).
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

# Most graphs of one block class: one for each width and stride, for training and evaluation. Beyond Dynamo's
# default limit of 8, a block would silently run uncompiled.
RECOMPILE_LIMIT = 64


def blocks_of(model: nn.Module, names: Collection[str] | None = None) -> Iterator[nn.Module]:
    """Yield the outermost modules of the named classes; default: the model's `_no_split_modules`."""
    if names is None:
        names = block_names(model)
    for child in model.children():
        if type(child).__name__ in names:
            yield child
        else:
            yield from blocks_of(child, names)


def checkpoint_activations(model: nn.Module) -> None:
    """Checkpoint the activations of each block, or the layers that timm's own method selects.

    Parameters keep their names. Accelerate's method would draw different random numbers in the backward pass
    and rename parameters.

    Raises:
        ValueError: The model has neither blocks nor timm's method.
    """
    blocks = list(blocks_of(model))
    for block in blocks:
        block.forward = _recomputed(block.forward)
    if blocks:
        return
    try:
        model.set_grad_checkpointing()  # type: ignore[operator]  # timm's models define it
    except (AttributeError, AssertionError):
        raise ValueError(
            f"activation checkpointing: {type(model).__name__} has no blocks. Name the block classes in its"
            " _no_split_modules, or train without --grad_checkpointing (fsdp_activation_checkpointing)."
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
    """Arguments of torch.compile. The backend `no` disables compilation."""

    backend: str = "no"
    mode: str = "default"
    fullgraph: bool = False
    dynamic: bool = False

    def __bool__(self) -> bool:
        return self.backend != "no"

    def __str__(self) -> str:
        """Return the value of --compile, or the backend's name for a backend other than Inductor."""
        return self.mode if self.backend == "inductor" else self.backend


def chosen_compilation(flag: str | None) -> Compilation:
    """Return the compilation that --compile selects, or else the launcher's config.

    Raises:
        ValueError: This host can't compile.
    """
    if flag is None:
        plugin = TorchDynamoPlugin(**_dynamo_arguments_from_config())
        is_full, is_dynamic = bool(plugin.fullgraph), bool(plugin.dynamic)
        compilation = Compilation(plugin.backend.value.lower(), plugin.mode, is_full, is_dynamic)
    else:
        compilation = Compilation("no" if flag == "no" else "inductor", flag)
    if compilation:
        _check(compilation)
    return compilation


def compile_blocks(
    model: nn.Module, settings: Compilation, is_whole: bool = False, accumulations: int = 1
) -> None:
    """Compile the forward method of each block, or of the whole model. Parameters keep their names.

    timm's models always compile block by block, because their equal blocks share graphs. CUDA graphs of a
    compiler backend work only for a whole model without gradient accumulation. With blocks, an evaluation
    would overwrite a block's input, which is the previous block's output (pytorch #152887). With
    accumulation, a micro-batch would overwrite the previous gradients. In these cases `max-autotune` falls
    back to its mode without CUDA graphs. This function replaces forward() instead of calling block.compile(),
    which would also trace the hooks of FSDP and DeepSpeed.

    Args:
        model: The model to compile, before the strategy wraps it.
        settings: The arguments of torch.compile.
        is_whole: Compile one graph if possible. True if nothing needs blocks: no sharding, no activation
            checkpointing, and no bits to match with a sharded model.
        accumulations: Micro-batches per step on each process.

    Raises:
        ValueError: The mode needs CUDA graphs, which do not work here.
    """
    allow_recompilations(RECOMPILE_LIMIT)
    draw_as_eager()
    mode = settings.mode if settings.backend == "inductor" else None  # other backends have no modes
    blocks = list(blocks_of(model))
    is_whole = is_whole and not any(type(block).__module__.startswith("timm.") for block in blocks)
    has_graphs = settings.backend == "cudagraphs" or mode in ("reduce-overhead", "max-autotune")
    if has_graphs and not (is_whole and accumulations == 1):
        if mode != "max-autotune":
            raise ValueError(
                f"--compile {settings} (dynamo_backend): CUDA graphs work only for CNNs on one process or"
                " under DDP, without activation checkpointing, accumulation or --deterministic. Choose"
                " --compile default."
            )
        mode = "max-autotune-no-cudagraphs"
    for part in [model] if is_whole else blocks or [model]:
        part.forward = torch.compile(
            part.forward,
            backend=settings.backend,
            mode=mode,
            fullgraph=settings.fullgraph,
            dynamic=settings.dynamic,
        )


def _dynamo_arguments_from_config() -> dict[str, Any]:
    """Return TorchDynamoPlugin's arguments from the accelerate config, for a DeepSpeed job.

    For DeepSpeed, `accelerate launch` (1.15) does not pass these settings in environment variables.
    """
    if not is_on("ACCELERATE_USE_DEEPSPEED") or "ACCELERATE_DYNAMO_BACKEND" in os.environ:
        return {}
    answers = accelerate_config().get("dynamo_config") or {}
    keys = {"backend": "backend", "mode": "mode", "fullgraph": "use_fullgraph", "dynamic": "use_dynamic"}
    return {name: answers.get(f"dynamo_{key}") for name, key in keys.items()}


def _check(compilation: Compilation) -> None:
    if compilation.backend not in (backends := torch.compiler.list_backends(())):
        names = ", ".join(backends)
        raise ValueError(
            f"dynamo_backend {compilation.backend} is not available here. Choose one of {names}."
        )
    if compilation.backend == "inductor" and not has_cpp_compiler():
        raise ValueError(
            f"--compile {compilation} (dynamo_backend) needs a C++ compiler, but this host has none. Install"
            " g++, or choose --compile no."
        )
