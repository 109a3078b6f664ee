"""Drop path (stochastic depth, arXiv 1603.09382) whose rate is data: compiled blocks share their graphs."""

import timm.layers
import torch
from torch import Tensor, nn

UNITS = 2**24  # of which float32 holds every number


class DropPath(nn.Module):
    """Drops a residual branch of some samples in training, and scales the others: [B, ...] -> [B, ...].

    timm's DropPath has its rate as a Python number, which torch.compile makes a constant of the graph: blocks
    that differ in nothing else would each need their own.
    """

    keep: Tensor

    def __init__(self, rate: float):
        super().__init__()
        # An integer, as ZeRO rounds a model's floating-point buffers to bf16.
        self.register_buffer("keep", torch.tensor(round((1 - rate) * UNITS)), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        if not self.training:
            return x
        keep = self.keep / UNITS
        kept = torch.rand((x.shape[0],) + (1,) * (x.ndim - 1), device=x.device) < keep
        return x * (kept / keep).to(x.dtype)


def share_graphs(model: nn.Module) -> None:
    """Replaces timm's DropPath in the model."""
    for module in list(model.modules()):
        for name, child in module.named_children():
            if isinstance(child, timm.layers.DropPath):
                module.add_module(name, DropPath(child.drop_prob))
