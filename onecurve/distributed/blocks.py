"""Compiles models (--compile) and adds activation checkpointing (--grad_checkpointing), block by block.

An accelerate config's `dynamo_config` also enables compilation. In a single process or under DDP, a CNN is
compiled as a whole, with one training graph and one evaluation graph per image size. Under DDP, torch splits
the graph at bucket boundaries, so that the gradient exchange overlaps with the backward pass. With other
strategies, with --deterministic and for timm's models, each block is compiled separately, and identical
blocks share graphs. Regardless of its number of blocks, a ViT needs two graphs for training and two for
evaluation: one for the first block, which has no drop path, and one for all other blocks. On an H200,
ResNet-18 trains at 83,289 images/s as one graph and at 63,042 images/s in eager mode (docs/gpu.md).

With activation checkpointing, a block's activations are not stored. The backward pass recomputes them with
the same random numbers. For a ViT-B/32 with 32 images of 224x224 pixels, activations occupy 66 MiB instead of
911 MiB between the forward and backward passes (fp32, measured on a CPU). At batch size 512 on an H200, peak
memory is 3.69 GiB instead of 10.48 GiB (bf16).
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
from onecurve.upstream.torch_ import allow_recompilations, draw_random_numbers_as_eager, has_cpp_compiler

# Maximum number of graphs per block class. A block class needs one training graph and one evaluation graph
# for each width and stride. Beyond Dynamo's default limit of 8, a block would silently run uncompiled.
RECOMPILE_LIMIT = 64
CUDA_GRAPH_MODES = ("reduce-overhead", "max-autotune")  # Inductor modes that use the compiler's CUDA graphs


def blocks_of(model: nn.Module, class_names: Collection[str] | None = None) -> Iterator[nn.Module]:
    """Yield the outermost modules of the named classes. The default is the model's `_no_split_modules`."""
    if class_names is None:
        class_names = block_names(model)
    for child in model.children():
        if type(child).__name__ in class_names:
            yield child
        else:
            yield from blocks_of(child, class_names)


def checkpoint_activations(model: nn.Module) -> None:
    """Enable activation checkpointing for each block, or for the layers selected by timm's method.

    The parameters keep their names. Accelerate's method would rename the parameters and draw different random
    numbers in the backward pass.

    Raises:
        ValueError: If the model defines neither block classes nor timm's method.
    """
    blocks = list(blocks_of(model))
    for block in blocks:
        block.forward = _with_recomputation(block.forward)
    if blocks:
        return
    try:
        model.set_grad_checkpointing()  # type: ignore[operator]  # timm's models define it
    except (AttributeError, AssertionError):
        raise ValueError(
            f"activation checkpointing needs block classes, but {type(model).__name__} defines none."
            " List the model's block classes in its attribute _no_split_modules,"
            " or disable --grad_checkpointing (or fsdp_activation_checkpointing in the accelerate config)."
        ) from None


def _with_recomputation(forward: Callable) -> Callable:
    """Return a forward method that stores no activations but recomputes them in the backward pass."""

    @functools.wraps(forward)
    def forward_with_recomputation(*args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return forward(*args, **kwargs)
        return checkpoint(forward, *args, use_reentrant=False, **kwargs)

    return forward_with_recomputation


@dataclass(frozen=True)
class Compilation:
    """Arguments of torch.compile. The backend `no` disables compilation."""

    backend: str = "no"  # name of a compiler backend
    mode: str = "default"  # Inductor's optimisation mode
    fullgraph: bool = False  # True to raise an error at a graph break
    dynamic: bool = False  # True to compile for variable tensor shapes

    def __bool__(self) -> bool:
        """Return True if compilation is enabled."""
        return self.backend != "no"

    def __str__(self) -> str:
        """Return the equivalent value of --compile for Inductor, or the name of any other backend."""
        return self.mode if self.backend == "inductor" else self.backend


def chosen_compilation(compile_flag: str | None) -> Compilation:
    """Return the compilation settings from --compile or, without the flag, from the launcher's config.

    Raises:
        ValueError: If this host can't compile.
    """
    if compile_flag is None:
        dynamo_plugin = TorchDynamoPlugin(**_dynamo_arguments_from_config())
        compilation = Compilation(
            backend=dynamo_plugin.backend.value.lower(),
            mode=dynamo_plugin.mode,
            fullgraph=bool(dynamo_plugin.fullgraph),
            dynamic=bool(dynamo_plugin.dynamic),
        )
    else:
        backend = "no" if compile_flag == "no" else "inductor"
        compilation = Compilation(backend, mode=compile_flag)
    if compilation:
        _check_backend(compilation)
    return compilation


def compile_blocks(
    model: nn.Module, compilation: Compilation, as_one_graph: bool = False, accumulations: int = 1
) -> None:
    """Compile the forward method of each block or the whole model. The parameters keep their names.

    timm's models are always compiled block by block, because their identical blocks share graphs. A compiler
    backend's CUDA graphs work only for a whole model without gradient accumulation. If blocks were compiled
    separately, an evaluation would overwrite a block's input, which is the previous block's output (pytorch
    #152887). With gradient accumulation, each micro-batch would overwrite the previous micro-batch's
    gradients. With separately compiled blocks or gradient accumulation, `max-autotune` falls back to the mode
    without CUDA graphs. This function replaces forward() instead of calling block.compile(), which would also
    trace the hooks of FSDP2 and DeepSpeed.

    Args:
        model: The model to compile, before the strategy wraps the model.
        compilation: Arguments of torch.compile.
        as_one_graph: True to compile the model as one graph if possible. A whole-model graph requires a model
            without sharding and activation checkpointing. Its results may differ bitwise from a sharded
            model's results.
        accumulations: Number of micro-batches per step in each process.

    Raises:
        ValueError: If the mode requires CUDA graphs, which do not work in this case.
    """
    allow_recompilations(RECOMPILE_LIMIT)
    draw_random_numbers_as_eager()
    # Other backends do not support modes
    compile_mode = compilation.mode if compilation.backend == "inductor" else None
    blocks = list(blocks_of(model))
    as_one_graph = as_one_graph and not any(type(block).__module__.startswith("timm.") for block in blocks)
    uses_cuda_graphs = compilation.backend == "cudagraphs" or compile_mode in CUDA_GRAPH_MODES
    if uses_cuda_graphs and not (as_one_graph and accumulations == 1):
        if compile_mode != "max-autotune":
            raise ValueError(
                f"--compile {compilation} (or dynamo_backend in the accelerate config)"
                " uses the compiler's CUDA graphs, which work only for CNNs in a single process or under DDP,"
                " without activation checkpointing, gradient accumulation and --deterministic."
                " Use --compile default."
            )
        compile_mode = "max-autotune-no-cudagraphs"
    compiled_modules = [model] if as_one_graph or not blocks else blocks
    for module in compiled_modules:
        module.forward = torch.compile(
            module.forward,
            backend=compilation.backend,
            mode=compile_mode,
            fullgraph=compilation.fullgraph,
            dynamic=compilation.dynamic,
        )


def _dynamo_arguments_from_config() -> dict[str, Any]:
    """Return TorchDynamoPlugin's arguments from a DeepSpeed job's accelerate config.

    For DeepSpeed, `accelerate launch` (1.15) does not pass these arguments in environment variables.
    """
    if not is_on("ACCELERATE_USE_DEEPSPEED") or "ACCELERATE_DYNAMO_BACKEND" in os.environ:
        return {}
    dynamo_answers = accelerate_config().get("dynamo_config") or {}
    key_by_argument = {
        "backend": "dynamo_backend",
        "mode": "dynamo_mode",
        "fullgraph": "dynamo_use_fullgraph",
        "dynamic": "dynamo_use_dynamic",
    }
    return {argument: dynamo_answers.get(config_key) for argument, config_key in key_by_argument.items()}


def _check_backend(compilation: Compilation) -> None:
    """Raise ValueError if this host lacks the compiler backend or the C++ compiler that Inductor needs."""
    known_backends = torch.compiler.list_backends(exclude_tags=())  # include experimental backends
    if compilation.backend not in known_backends:
        raise ValueError(
            f"dynamo_backend {compilation.backend} is not available on this host."
            f" Choose one of {', '.join(known_backends)}."
        )
    if compilation.backend == "inductor" and not has_cpp_compiler():
        raise ValueError(
            f"--compile {compilation} (or dynamo_backend in the accelerate config) needs a C++ compiler,"
            " but none is installed on this host. Install g++, or use --compile no."
        )
