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

    The constructor replaces the class of the model's BatchNorm layers in place.

    Raises:
        ValueError: If a BatchNorm class's statistics can't be made independent of the number of processes.
    """

    def __init__(self, model: nn.Module):
        self.layers: list[_RunningStatisticsLayer] = []
        for layer in model.modules():
            if isinstance(layer, BatchNorm) and layer.track_running_stats:
                _refuse_unsupported_layer(layer)
                # The layer keeps its parameters, buffers and hooks, and its place in the model
                layer.__class__ = _tracking_subclass(type(layer))  # type: ignore[arg-type]  # classes are hashable
                assert isinstance(layer, _RunningStatisticsLayer)
                self.layers.append(layer)
        self.updated_layers = [layer for layer in self.layers if not layer.is_frozen]
        # Kept in fp32, because DeepSpeed casts all tensors of the model
        self.initial_statistics = [(layer.running_mean, layer.running_var) for layer in self.layers]

    def register_update_hook(self, accelerator: Accelerator, plain_model: nn.Module) -> None:
        """Make each forward pass of micro-batch 0 update the statistics from now on.

        The method also moves the layers' fp32 statistics to the device, and adds the extra buffers.
        `plain_model` is the prepared model without wrappers such as DDP.
        """
        for layer, (initial_mean, initial_var) in zip(self.layers, self.initial_statistics, strict=True):
            # DeepSpeed casts all tensors of the model, but running statistics must be fp32.
            layer.running_mean = initial_mean.to(accelerator.device)
            layer.running_var = initial_var.to(accelerator.device)
            # Buffers that are not saved, and that each training pass overwrites
            for buffer_name in ("batch_mean", "batch_var"):
                layer.register_buffer(buffer_name, torch.zeros_like(layer.running_mean), persistent=False)

        def update_after_first_micro_batch(hooked_module: nn.Module, *_inputs_and_output) -> None:
            if hooked_module.training:
                micro_batch_index = accelerator.step - 1  # accelerator.step counts micro-batches from 1
                if micro_batch_index % accelerator.gradient_accumulation_steps == 0:
                    self._update_statistics()

        if self.updated_layers:
            plain_model.register_forward_hook(update_after_first_micro_batch)

    @torch.no_grad()
    def _update_statistics(self) -> None:
        """Move the running statistics towards the last batch's, with few kernels for all layers."""
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
    num_batches_tracked: Tensor  # number of updates, []
    drop: nn.Module  # exists only in timm's BatchNormAct2d
    act: nn.Module  # exists only in timm's BatchNormAct2d

    @property
    def is_frozen(self) -> bool:
        """True if --freeze excludes the weights from training. The statistics are then frozen as well."""
        return self.affine and not self.weight.requires_grad

    def train(self, mode: bool = True) -> Self:
        """Set training or evaluation mode. A frozen layer stays in evaluation mode."""
        return super().train(mode and not self.is_frozen)

    def forward(self, x: Tensor) -> Tensor:
        """Normalise x. In training, write the batch's statistics into the extra buffers."""
        self._check_input_dim(x)
        mean, var = self.running_mean, self.running_var
        weight = None if self.weight is None else self.weight.to(mean.dtype)
        bias = None if self.bias is None else self.bias.to(mean.dtype)
        if self.training:
            # F.batch_norm overwrites batch_mean and batch_var in place, because its momentum argument is 1.0
            mean, var = self.batch_mean, self.batch_var
        x = F.batch_norm(x, mean, var, weight, bias, self.training, 1.0, self.eps)
        return self.act(self.drop(x)) if hasattr(self, "act") else x  # only timm's BatchNormAct2d has `act`


@cache
def _tracking_subclass(layer_class: type[nn.Module]) -> type[nn.Module]:
    """Return a subclass of a BatchNorm class that trains with the micro-batch's statistics.

    The subclass has the same name as its base class, and isinstance() checks still work.
    """
    return type(layer_class.__name__, (_RunningStatisticsLayer, layer_class), {})


def _refuse_unsupported_layer(layer: Any) -> None:
    """Raise ValueError for a layer with an unknown forward method or without momentum."""
    forward_method = type(layer).forward
    # _RunningStatisticsLayer.forward can replace only these two forward methods.
    if forward_method is not BatchNorm.forward and not is_batch_norm_act(forward_method):
        raise ValueError(
            f"the running statistics of the model's {type(layer).__name__} layers would depend"
            " on the number of processes."
            " Use BatchNorm1d, BatchNorm2d, BatchNorm3d or timm's BatchNormAct2d."
        )
    if layer.momentum is None:
        raise ValueError(
            f"the model contains a {type(layer).__name__} layer without momentum."
            " Set the layer's momentum, for example to 0.1."
        )
