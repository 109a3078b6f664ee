"""Missing gradients under DDP: refused before the first optimizer step."""

import re

import torch
from torch import nn


def refuse_missing_gradients(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Makes the optimizer's first step raise ValueError when a trained parameter has no gradient.

    DDP averages no gradient of a bucket in which one is missing. It says so itself, but at the next forward,
    after a step by gradients that differ between the processes.
    """

    def check(stepping: torch.optim.Optimizer, *_) -> None:
        if stepping is not optimizer:  # a copy, which is tried before the training
            return
        hook.remove()
        if missing := [name for name, p in model.named_parameters() if p.requires_grad and p.grad is None]:
            raise ValueError(without_gradient(missing))

    hook = optimizer.register_step_pre_hook(check)


def unused_parameters(error: BaseException | None, parameters: list[str]) -> list[str]:
    """The names in DDP's own error about them, which comes when a gradient is missing in a later step."""
    found = re.search(r"Parameter indices which did not receive grad for rank \d+: ([\d ]+)", str(error))
    return [parameters[int(i)] for i in found[1].split()] if found else []


def without_gradient(names: list[str]) -> str:
    return (
        f"under DDP every trained parameter needs a gradient in each step, and {', '.join(names)} had none:"
        " set its requires_grad to False, or train with FSDP or ZeRO"
    )
