"""Makes BatchNorm's running statistics independent of the strategy and of the number of processes.

In training, each BatchNorm layer from torch or timm writes the mean and variance of a forward pass into extra
buffers. Only the buffers of rank 0's first micro-batch update the running statistics. Therefore, the running
statistics depend neither on the number of processes nor on recomputation due to activation checkpointing.
"""

from functools import cache
from typing import Any, Self

import torch
import torch.nn.functional as F
from accelerate import Accelerator
from torch import Tensor, nn

from onecurve.upstream.timm_ import is_batch_norm_act
from onecurve.upstream.torch_ import add_, batch_norm_class, lerp_

BatchNorm: Any = batch_norm_class()


class RunningStatistics:
    """Running statistics of a model's BatchNorm layers. Create this object before accelerator.prepare().

    Raises:
        ValueError: If a BatchNorm class's statistics can't be made independent of the number of processes.
    """

    def __init__(self, model: nn.Module):
        self.layers: list[_RunningStatisticsLayer] = []
        for layer in model.modules():
            if isinstance(layer, BatchNorm) and layer.track_running_stats:
                _check_layer(layer)
                layer.__class__ = _layer_class(type(layer))  # type: ignore[arg-type]  # classes are hashable
                assert isinstance(layer, _RunningStatisticsLayer)
                self.layers.append(layer)
        self.updated_layers = [layer for layer in self.layers if not layer.is_frozen]
        self.initial_statistics = [(layer.running_mean, layer.running_var) for layer in self.layers]

    def follow(self, accelerator: Accelerator, prepared: nn.Module) -> None:
        """Update the statistics after micro-batch 0's forward pass. `prepared` is the unwrapped model."""
        for layer, (mean, var) in zip(self.layers, self.initial_statistics, strict=True):
            # DeepSpeed casts all tensors of the model, but running statistics must be fp32.
            layer.running_mean, layer.running_var = (
                statistic.to(accelerator.device) for statistic in (mean, var)
            )
            for name in ("batch_mean", "batch_var"):
                layer.register_buffer(name, torch.zeros_like(layer.running_mean), persistent=False)
        first_micro_batch = 1 % accelerator.gradient_accumulation_steps  # accelerator.step counts from 1

        def update(module: nn.Module, *_) -> None:
            if (
                module.training
                and accelerator.step % accelerator.gradient_accumulation_steps == first_micro_batch
            ):
                self._update_statistics()

        if self.updated_layers:
            prepared.register_forward_hook(update)

    @torch.no_grad()
    def _update_statistics(self) -> None:
        for momentum in {layer.momentum for layer in self.updated_layers}:
            layers = [layer for layer in self.updated_layers if layer.momentum == momentum]
            lerp_([layer.running_mean for layer in layers], [layer.batch_mean for layer in layers], momentum)
            lerp_([layer.running_var for layer in layers], [layer.batch_var for layer in layers], momentum)
        add_([layer.num_batches_tracked for layer in self.updated_layers], 1)


class _RunningStatisticsLayer(BatchNorm):
    """BatchNorm layer, [B, C, ...] -> [B, C, ...], that trains with the micro-batch's statistics.

    Weight and bias are cast to fp32, the statistics' dtype, because torch refuses mixed dtypes.
    """

    momentum: float
    running_mean: Tensor  # [C], like the other statistics
    running_var: Tensor
    batch_mean: Tensor
    batch_var: Tensor
    num_batches_tracked: Tensor  # []
    drop: nn.Module  # exists only in timm's BatchNormAct2d
    act: nn.Module  # exists only in timm's BatchNormAct2d

    @property
    def is_frozen(self) -> bool:
        """True if --freeze excludes the weights from training. The statistics are then frozen as well."""
        return self.affine and not self.weight.requires_grad

    def train(self, mode: bool = True) -> Self:
        return super().train(mode and not self.is_frozen)

    def forward(self, x: Tensor) -> Tensor:
        self._check_input_dim(x)
        mean, var = self.running_mean, self.running_var
        weight, bias = (
            None if parameter is None else parameter.to(mean.dtype) for parameter in (self.weight, self.bias)
        )
        if self.training:
            # The forward pass overwrites batch_mean and batch_var, because the momentum is 1
            mean, var = self.batch_mean, self.batch_var
        x = F.batch_norm(x, mean, var, weight, bias, self.training, 1.0, self.eps)
        return self.act(self.drop(x)) if hasattr(self, "act") else x


@cache
def _layer_class(cls: type[nn.Module]) -> type[nn.Module]:
    """Return a subclass with the same name as the layer's class, so that isinstance() checks still work."""
    return type(cls.__name__, (_RunningStatisticsLayer, cls), {})


def _check_layer(layer: Any) -> None:
    forward = type(layer).forward
    # _Layer.forward can replace only these two forward methods.
    if forward is not BatchNorm.forward and not is_batch_norm_act(forward):
        raise ValueError(
            f"the running statistics of the model's {type(layer).__name__} layers would depend on the number"
            " of processes. Use BatchNorm1d, BatchNorm2d, BatchNorm3d or timm's BatchNormAct2d."
        )
    if layer.momentum is None:
        raise ValueError(
            f"the model contains a {type(layer).__name__} layer without momentum. Set the layer's momentum,"
            " for example to 0.1."
        )
