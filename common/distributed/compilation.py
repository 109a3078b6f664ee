"""torch.compile, block by block: with --compile, or with the `dynamo_config` of an accelerate config.

Equal blocks share their graphs. The blocks of a ViT need 2 graphs to train and 2 to evaluate, for any number
of blocks: one for the first block, which has no drop path, and one for all others (common/drop_path.py).
Speed is not yet measured on a GPU.
"""

import argparse
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
from accelerate.utils import TorchDynamoPlugin
from torch import nn

from common.distributed.activation_checkpointing import blocks_of

# Graphs of one class of blocks: for each width and stride, to train and to evaluate. Beyond Dynamo's default
# limit of 8, a block would silently run uncompiled.
RECOMPILE_LIMIT = 64


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


def asked_for(flag: str | None) -> Compilation:
    """The compilation of --compile, else of the launcher. Raises ValueError if this host can't compile."""
    asked = _by_launcher() if flag is None else Compilation("no" if flag == "no" else "inductor", flag)
    if asked:
        _check(asked)
    return asked


def compile_blocks(
    model: nn.Module, how: Compilation, is_whole: bool = False, accumulations: int = 1
) -> None:
    """Compiles the forward of each block, or of a model without blocks. Parameters keep their names.

    is_whole: True if nothing shards or checkpoints the model. Then modes with CUDA graphs compile the model
    as a whole; except a timm model, whose blocks would no longer share graphs. Block by block, and with
    accumulations, `max-autotune` goes without CUDA graphs, and the others raise ValueError: in an evaluation
    a block would overwrite its input, the output of the block before, and a micro-batch the gradients of the
    one before. block.compile() is not used, as it also traces FSDP's and DeepSpeed's hooks.
    """
    import torch._dynamo
    import torch._inductor.config

    torch._dynamo.config.recompile_limit = max(RECOMPILE_LIMIT, torch._dynamo.config.recompile_limit)
    torch._inductor.config.fallback_random = True  # else dropout differs from eager mode
    mode = how.mode if how.backend == "inductor" else None  # other backends have no modes
    blocks = list(blocks_of(model))
    if how.backend == "cudagraphs" or mode in ("reduce-overhead", "max-autotune"):
        if is_whole and accumulations == 1 and not any(is_timms(block) for block in blocks):
            blocks = []
        elif mode == "max-autotune":
            mode = "max-autotune-no-cudagraphs"
        else:
            raise ValueError(
                f"--compile {how} (dynamo_backend): CUDA graphs are for CNNs on one process or under DDP,"
                " without activation checkpointing or gradient accumulation; choose --compile default"
            )
    for block in blocks or [model]:
        block.forward = torch.compile(
            block.forward, backend=how.backend, mode=mode, fullgraph=how.fullgraph, dynamic=how.dynamic
        )


def is_timms(module: nn.Module) -> bool:
    return type(module).__module__.startswith("timm.")


def _by_launcher() -> Compilation:
    if os.environ.get("ACCELERATE_USE_DEEPSPEED") == "true" and "ACCELERATE_DYNAMO_BACKEND" not in os.environ:
        plugin = TorchDynamoPlugin(**_in_launchers_file())  # for DeepSpeed, accelerate launch passes nothing
    else:
        plugin = TorchDynamoPlugin()
    return Compilation(
        plugin.backend.value.lower(), plugin.mode, bool(plugin.fullgraph), bool(plugin.dynamic)
    )


def _in_launchers_file() -> dict[str, Any]:
    """The plugin's arguments from `dynamo_config` of `accelerate launch`'s config file."""
    import yaml
    from accelerate.commands.config.config_args import default_config_file

    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--config_file", default=default_config_file)
    for process in psutil.Process().parents():
        try:
            words, folder = process.cmdline(), process.cwd()
        except psutil.Error:
            break
        if any(Path(word).name == "accelerate" or word == "accelerate.commands.launch" for word in words):
            file = Path(folder, parser.parse_known_args(words)[0].config_file)
            config = (yaml.safe_load(file.read_text()) or {}) if file.is_file() else {}
            found = config.get("dynamo_config") or {}
            keys = {"backend": "backend", "mode": "mode"}
            keys |= {"fullgraph": "use_fullgraph", "dynamic": "use_dynamic"}
            return {name: found[f"dynamo_{key}"] for name, key in keys.items() if f"dynamo_{key}" in found}
    return {}


def _check(asked: Compilation) -> None:
    from torch._dynamo import list_backends

    if asked.backend not in (known := list_backends(())):
        raise ValueError(f"dynamo_backend {asked.backend} is not on this host: choose {', '.join(known)}")
    if asked.backend == "inductor":
        from torch._inductor.cpp_builder import get_cpp_compiler
        from torch._inductor.exc import InvalidCxxCompiler

        try:
            get_cpp_compiler()
        except InvalidCxxCompiler:
            raise ValueError(
                f"--compile {asked} (dynamo_backend) needs a C++ compiler, and this host has none: install"
                " g++, or choose --compile no"
            ) from None
