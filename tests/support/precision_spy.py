"""Copied beside a train script: writes the types of its first step into $SPY/<rank>.json."""

import json
import math
import os
from pathlib import Path

import torch
import torch._C._distributed_c10d as c10d
from accelerate import Accelerator
from torch import nn

from common.distributed.strategy import plain_module

SCALARS = 8  # elements; smaller reductions are counts and losses, not gradients


def watch(accelerator: Accelerator, prepared: nn.Module) -> None:
    """residual: of each block's output; outputs: of the model; reduced: of gradients, as gloo sends them."""
    model, found, micro_batches = plain_module(prepared), {"residual": [], "outputs": []}, 0
    before = -1  # the last collective before the step

    def note(name: str):
        def hook(module: nn.Module, inputs, output: torch.Tensor) -> None:
            if model.training:
                found[name].append(str(output.dtype).removeprefix("torch."))

        return hook

    def count(module: nn.Module, *_) -> None:
        nonlocal micro_batches, before
        if not model.training:
            return
        if micro_batches == 0:
            before = max((entry["record_id"] for entry in collectives()), default=-1)
        if micro_batches == accelerator.gradient_accumulation_steps:
            file = Path(os.environ["SPY"]) / f"{accelerator.process_index}.json"
            types = {name: sorted(set(seen)) for name, seen in (found | {"reduced": reduced(before)}).items()}
            file.write_text(json.dumps(types))
        micro_batches += 1

    for block in model.blocks:  # of timm's ViT
        block.register_forward_hook(note("residual"))
    model.register_forward_hook(note("outputs"))
    model.register_forward_pre_hook(count)


def collectives() -> list[dict]:
    """The collectives in torch's flight recorder."""
    return json.loads(c10d._dump_fr_trace_json()).get("entries", [])


def reduced(before: int) -> list[str]:
    """Types of the tensors that are reduced after collective `before`."""
    return [
        kind.lower()
        for entry in collectives()
        if entry["record_id"] > before and "reduce" in entry["profiling_name"]
        for kind, size in zip(entry["input_dtypes"], entry["input_sizes"], strict=True)
        if math.prod(size) > SCALARS
    ]
