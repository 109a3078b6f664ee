"""Refuses gradients that a strategy silently skips: missing ones under DDP, infinite ones under ZeRO."""

import re
from typing import Any

import torch
from torch import nn


def refuse_missing_gradients(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Makes the optimizer's first step raise ValueError when a trained parameter has no gradient.

    DDP averages no gradient of a bucket in which one is missing. It reports this only at the next forward,
    after a step with gradients that differ between the processes.
    """

    def check(stepping: torch.optim.Optimizer, *_) -> None:
        if stepping is not optimizer:  # a copy, in the trial before the training
            return
        hook.remove()
        if missing := [name for name, p in model.named_parameters() if p.requires_grad and p.grad is None]:
            raise ValueError(without_gradient(missing))

    hook = optimizer.register_step_pre_hook(check)


def refuse_skipped_steps(zero: Any) -> None:
    """Makes DeepSpeed's optimizer raise FloatingPointError where it would skip a step.

    For precisions without loss scaling, where it skips a step if a gradient is not finite. All processes
    detect this together.
    """
    update_scale = zero._update_scale

    def check(has_overflow: bool = False) -> None:
        if has_overflow:
            lr = zero.param_groups[0]["lr"]
            raise FloatingPointError(f"a gradient is not finite with learning rate {lr:g}")
        update_scale(has_overflow)

    zero._update_scale = check


def unused_parameters(error: BaseException | None, parameters: list[str]) -> list[str]:
    """The parameters in DDP's own error, which it raises when a gradient is missing in a later step."""
    found = re.search(r"Parameter indices which did not receive grad for rank \d+: ([\d ]+)", str(error))
    return [parameters[int(i)] for i in found[1].split()] if found else []


def without_gradient(names: list[str]) -> str:
    return (
        f"under DDP every trained parameter needs a gradient in each step, and {', '.join(names)} had none:"
        " set its requires_grad to False, or train with FSDP or ZeRO"
    )
