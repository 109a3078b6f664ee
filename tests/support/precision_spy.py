"""Copied beside a train script: writes the types of its first step into $SPY/<rank>.json."""

import json
import os
from pathlib import Path

import torch
from accelerate import Accelerator
from torch import nn
from torch.profiler import profile

from common.distributed.strategy import plain_module

SCALARS = 8  # elements; smaller reductions are counts and losses, not gradients


def watch(accelerator: Accelerator, prepared: nn.Module) -> None:
    """residual: of each block's output; outputs: of the model; reduced: of gradients, as gloo sends them."""
    model, found, micro_batches = plain_module(prepared), {"residual": [], "outputs": []}, 0
    seen = profile(record_shapes=True, acc_events=True)

    def note(name: str):
        def hook(module: nn.Module, inputs, output: torch.Tensor) -> None:
            if model.training:
                found[name].append(str(output.dtype).removeprefix("torch."))

        return hook

    def count(module: nn.Module, *_) -> None:
        nonlocal micro_batches
        if not model.training:
            return
        if micro_batches == 0:
            seen.start()
        if micro_batches == accelerator.gradient_accumulation_steps:
            seen.stop()
            folder = Path(os.environ["SPY"])
            trace = folder / f"trace{accelerator.process_index}.json"
            seen.export_chrome_trace(str(trace))
            write(folder / f"{accelerator.process_index}.json", found | {"reduced": reduced(trace)})
        micro_batches += 1

    for block in model.blocks:  # of timm's ViT
        block.register_forward_hook(note("residual"))
    model.register_forward_hook(note("outputs"))
    model.register_forward_pre_hook(count)


def write(file: Path, found: dict[str, list[str]]) -> None:
    file.write_text(json.dumps({name: sorted(set(types)) for name, types in found.items()}))


def reduced(trace: Path) -> list[str]:
    events = json.loads(trace.read_text())["traceEvents"]
    sent = [event["args"] for event in events if event["name"] in ("gloo:all_reduce", "gloo:reduce_scatter")]
    sent = [args for args in sent if "Input Dims" in args]  # torch 2.11 has events without
    return [args["Input type"][0] for args in sent if sum(args["Input Dims"][0]) > SCALARS]
