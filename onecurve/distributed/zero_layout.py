"""Maps each rank's local tensors to whole tensors under DeepSpeed ZeRO. Imported only under ZeRO."""

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from onecurve.distributed.layout import Arrangement, ParameterLayout, Piece
from onecurve.upstream import deepspeed_


class ZeroLayout(ParameterLayout):
    """Layout for ZeRO-1 and ZeRO-2, with flat partitions of the fp32 master weights."""

    partition_name = "ZeRO's flat partitions"
    has_flat_partitions = True

    def parameter_names_by_group(self) -> list[list[str]]:
        return self.parameter_names_by_tensor()  # ZeRO-1 and ZeRO-2 keep one flat partition per group

    def arrangements(self) -> list[Arrangement]:
        """Return one function for each of two processes."""
        return [partial(_flat_partition, partition_index=partition_index) for partition_index in range(2)]

    def sync_model(self) -> None:
        """Copy the fp32 master weights into the model's weights, and gather them from all ranks."""
        self.optimizer.update_lp_params()

    def loss_scale(self) -> tuple[float, int] | None:
        return deepspeed_.zero_loss_scale(self.optimizer)

    def set_loss_scale(self, loss_scale: float, good_steps: int) -> None:
        if self.loss_scale():  # with bf16 or fp32, DeepSpeed does not scale the loss
            deepspeed_.set_zero_loss_scale(self.optimizer, loss_scale, good_steps)

    def _piece_of(self, parameter: Any) -> Piece:
        """Return the fragment of a parameter in this process's flat partition."""
        if not parameter.requires_grad:
            return super()._piece_of(parameter)
        fragment = deepspeed_.parameter_fragment(parameter)
        # Without a fragment, this process's flat partition contains no part of the parameter
        return Piece(*fragment) if fragment else Piece(0, 0)

    def _script_optimizer(self) -> Optimizer:
        return self.optimizer.optimizer  # inside DeepSpeed's optimizer

    def parameter_names_by_tensor(self) -> list[list[str]]:
        return self._names_in_groups(self.optimizer.bit16_groups)  # the model's parameters in any format

    def _state_key_tensors(self) -> list[Tensor]:
        return list(self.optimizer.single_partition_of_fp32_groups)  # this rank's master weights


class Zero3Layout(ZeroLayout):
    """Layout for ZeRO-3, which splits each parameter into equally sized partitions, one per process.

    The last partition is padded.
    """

    def _whole_shape(self, parameter: Any) -> tuple[int, ...]:
        return tuple(parameter.ds_shape)  # a partitioned parameter's own shape is (0,)

    def frozen_pieces(self) -> Iterator[tuple[str, Tensor]]:
        for parameter_name, parameter in self.frozen_parameters.items():
            # The last partition ends with padding
            yield parameter_name, parameter.ds_tensor[: self.piece_of[parameter_name].length]

    def parameter_names_by_group(self) -> list[list[str]]:
        # DeepSpeed divides each parameter group into sub-groups, each with its own flat partition
        names_by_group: list[list[str]] = [[] for _ in self.script_optimizer.param_groups]
        for sub_group_index, parameter_names in enumerate(self.parameter_names_by_tensor()):
            names_by_group[self.optimizer.sub_group_to_group_id[sub_group_index]] += parameter_names
        return names_by_group

    def is_stepped_in_one_call(self) -> bool:
        return len(self._state_key_tensors()) == 1  # DeepSpeed calls step() once per flat partition

    def sync_model(self) -> None:
        """Copy the fp32 master weights into the model's partitioned weights."""
        deepspeed_.end_zero3_step(self.optimizer, len(self._state_key_tensors()))

    def _piece_of(self, parameter: Any) -> Piece:
        """Return this process's partition of a parameter, without padding."""
        partition_size = parameter.ds_tensor.ds_numel
        start = min(parameter.ds_numel, partition_size * deepspeed_.partition_rank(self.optimizer, parameter))
        partition_offset = 0  # placeholder offset for frozen parameters, which are in no partition
        if parameter.requires_grad:
            # Values: index of the sub-group, offset in its flat partition, number of elements
            _, partition_offset, _ = self.optimizer.grad_position[self.optimizer.get_param_id(parameter)]
        return Piece(start, min(partition_size, parameter.ds_numel - start), partition_offset)

    def parameter_names_by_tensor(self) -> list[list[str]]:
        return self._names_in_groups(self.optimizer.fp16_groups)  # the model's parameters in any format

    def _state_key_tensors(self) -> list[Tensor]:
        return list(self.optimizer.fp32_partitioned_groups_flat)  # this rank's master weights


def _flat_partition(whole_tensors: list[Tensor], partition_index: int) -> list[Tensor]:
    """Return one process's flat partition in a job with two processes. The second partition is padded."""
    if not whole_tensors:
        return []
    flat_tensor = torch.cat([tensor.flatten() for tensor in whole_tensors])
    padding = flat_tensor.new_zeros(len(flat_tensor) % 2)
    partitions = torch.cat([flat_tensor, padding]).chunk(2)
    return [partitions[partition_index]]
