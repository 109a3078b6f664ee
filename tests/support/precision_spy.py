"""Module that is copied next to a train script and writes the dtypes of its steps to $SPY/<rank>.json."""

import json
import math
import os
from pathlib import Path

import torch
import torch._C._distributed_c10d as c10d
from accelerate import Accelerator
from torch import nn

from onecurve.distributed.layout import plain_module

SCALARS = 8  # Number of elements below which a reduction sums counts and losses instead of gradients


def watch(accelerator: Accelerator, prepared: nn.Module) -> None:
    """Record the dtypes of block outputs (the residual stream), model outputs and reduced gradients."""
    model, dtypes = plain_module(prepared), {"residual": set(), "outputs": set()}
    file = Path(os.environ["SPY"]) / f"{accelerator.process_index}.json"

    def note(name: str):
        def hook(module: nn.Module, inputs, output: torch.Tensor) -> None:
            if model.training:
                dtypes[name].add(str(output.dtype).removeprefix("torch."))

        return hook

    def write(*_) -> None:
        if not model.training:  # An evaluation reduces counts, which are not recorded
            return
        types = {name: sorted(seen) for name, seen in (dtypes | {"reduced": reduced()}).items()}
        file.write_text(json.dumps(types))

    for block in model.blocks:  # timm's ViT stores its blocks in this attribute
        block.register_forward_hook(note("residual"))
    model.register_forward_hook(note("outputs"))
    model.register_forward_pre_hook(write)


def reduced() -> set[str]:
    """Return the dtypes of reduced tensors, read from torch's flight recorder."""
    return {
        dtype.lower()
        for entry in json.loads(c10d._dump_fr_trace_json()).get("entries", [])
        if "reduce" in entry["profiling_name"]
        for dtype, size in zip(entry["input_dtypes"], entry["input_sizes"], strict=True)
        if math.prod(size) > SCALARS
    }
