"""Maps each rank's local tensors to whole tensors, for every strategy.

The following terms describe a parameter, or optimizer state with the parameter's shape:

    whole    the complete tensor, which is flattened before it is divided into pieces
    local    the tensor that the optimizer updates in place on this rank: a parameter (one process or DDP), a
             shard (FSDP2), or a flat partition of the fp32 master weights (ZeRO). An EMA's averages have the
             same shapes
    key      the nn.Parameter or DTensor that is the key of a local tensor's entry in the optimizer's `state`
    members  the parameters in a local tensor: one parameter, or many parameters in a flat partition
    piece    the range of the flattened whole tensor that is on this rank, with its start in the whole tensor
             and its offset in the local tensor. A piece may be empty, or be the whole tensor
    own      the elements of the piece, as a view of the local tensor

    whole, flat  0 1 2 3 4 5 6 7 8 9      on rank 1 of 2: piece (start 5, length 5, offset 2),
    local        . . 5 6 7 8 9 . .        own 5 6 7 8 9; the dots belong to other members
"""

import copy
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from accelerate.optimizer import AcceleratedOptimizer
from torch import Tensor, nn
from torch.optim import Optimizer

from onecurve.upstream import deepspeed_

# One entry per local tensor; None if the optimizer keeps no such state for it
LocalTensors = Sequence[Tensor | None]
# Maps a group's whole parameters to one process's shards or flat partition
Arrangement = Callable[[list[Tensor]], list[Tensor]]


class Piece(NamedTuple):
    """Range of a flattened whole tensor that this process stores."""

    start: int  # start index in the flattened whole tensor
    length: int
    offset: int = 0  # start index in the flat partition under ZeRO


class Layout:
    """Layout for a single process and DDP, where every process stores all tensors.

    Create the layout before the first forward pass, because FSDP2's modules may later expose gathered copies
    of their parameters.
    """

    # Name for the shards or partitions that the optimizer updates, or "" if it updates whole parameters
    partition_name = ""
    is_flat = False

    def __init__(self, model: nn.Module, optimizer: AcceleratedOptimizer):
        self.module, self.optimizer = plain_module(model), optimizer.optimizer
        # The values are nn.Parameters. The type is Any because FSDP2 and ZeRO add attributes.
        all_parameters: dict[str, Any] = dict(self.module.named_parameters())
        self.parameters = {
            name: parameter for name, parameter in all_parameters.items() if parameter.requires_grad
        }
        self.frozen = {
            name: parameter for name, parameter in all_parameters.items() if not parameter.requires_grad
        }
        # Local fp32 tensors, in the order of self.states()
        self.local = [to_local(key.detach()) for key in self._state_keys()]
        self.script_optimizer = self._script_optimizer()  # the optimizer that the script created
        self.piece_of = {name: self._piece_of(parameter) for name, parameter in all_parameters.items()}
        self.initial_settings = copy.deepcopy(
            [group_settings(group) for group in self.script_optimizer.param_groups]
        )

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Return the shapes of the whole trained parameters, by name."""
        return {name: self._whole_shape(parameter) for name, parameter in self.parameters.items()}

    def buffers(self) -> dict[str, Tensor]:
        """Return the model's buffers, such as BatchNorm's statistics, by name.

        Buffers may differ between ranks. Rank 0's buffers are authoritative.
        """
        parameters = {**self.parameters, **self.frozen}
        parameter_ids = {id(parameter) for parameter in parameters.values()}
        all_tensors = self.module.state_dict(keep_vars=True)
        # After a forward pass, FSDP2 may expose a gathered parameter instead of the original object (pytorch
        # #144289). Therefore, this code also compares names.
        return {
            name: tensor.detach()
            for name, tensor in all_tensors.items()
            if id(tensor) not in parameter_ids and name not in parameters
        }

    def frozen_shapes(self) -> dict[str, tuple[int, ...]]:
        """Return the shapes of the whole frozen parameters, by name."""
        return {name: self._whole_shape(parameter) for name, parameter in self.frozen.items()}

    def views(self, local: LocalTensors) -> Iterator[tuple[str, Tensor]]:
        """Yield the name and this process's piece of each trained parameter that has this state."""
        for tensor, members in zip(local, self.members(), strict=True):
            if tensor is None:
                continue
            for name in members:
                _, length, offset = self.piece_of[name]
                yield name, tensor[offset : offset + length] if self.is_flat else tensor

    def frozen_views(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the name and this process's piece of each frozen parameter."""
        for name, parameter in self.frozen.items():
            yield name, to_local(parameter.detach())

    def fill(self, own_pieces: Iterable[tuple[str, Tensor]], whole: Callable[[str], Tensor]) -> None:
        """Fill this process's pieces from whole tensors. All processes must use the same name order.

        Args:
            own_pieces: Names and pieces, from views() or frozen_views().
            whole: Function that maps a name to the whole tensor on the device.
        """
        for name, own_piece in own_pieces:
            start, length, _ = self.piece_of[name]
            own_piece.copy_(whole(name).flatten()[start : start + length].view(own_piece.shape))

    def sync(self) -> None:
        """Make changes in self.local visible to the next forward pass. This method is collective."""

    def groups(self) -> list[list[str]]:
        """Return the trained parameters' names in each of the optimizer's parameter groups."""
        return self._names_of([group["params"] for group in self.script_optimizer.param_groups])

    def states(self) -> list[dict[str, Any]]:
        """Return the optimizer's state for each local tensor.

        The state is empty before the optimizer's first step.
        """
        return [base_of(self.script_optimizer).state.get(key, {}) for key in self._state_keys()]

    def shaped_state(self) -> dict[str, LocalTensors]:
        """Return the state tensors shaped like the local tensors, by state name such as `exp_avg`."""
        keys, states = self._state_keys(), self.states()
        names = {name for key, state in zip(keys, states, strict=True) for name in shaped_entries(state, key)}
        return {
            name: [
                to_local(state[name] if _has_shape(state.get(name), key) else None)
                for key, state in zip(keys, states, strict=True)
            ]
            for name in sorted(names)
        }

    def other_state(self) -> dict[str, dict[str, Any]]:
        """Return all other state as {parameter: {name: scalar or whole tensor}}.

        This method is collective.
        """
        names = self.shaped_state().keys()
        return {
            parameter: {
                name: value.full_tensor() if hasattr(value, "full_tensor") else value
                for name, value in sorted(state.items())
                if not (name in names and _has_shape(value, key))
            }
            for key, state, members in zip(self._state_keys(), self.states(), self.members(), strict=True)
            for parameter in members
        }

    def changed_groups(self) -> list[dict[str, Any]]:
        """Return the parameter group settings that the optimizer itself has changed, such as a step count."""
        return changed_settings(self.script_optimizer.param_groups, self.initial_settings)

    def make_state(self, name: str, dtypes: dict[str, torch.dtype]) -> LocalTensors:
        """Create zero-filled state tensors shaped like the local tensors.

        Args:
            name: Name of the state.
            dtypes: The state's dtype for each parameter that has this state.
        """
        states: list[Tensor | None] = []
        for key, members in zip(self._state_keys(), self.members(), strict=True):
            dtype = next((dtypes[member] for member in members if member in dtypes), None)
            value = None if dtype is None else self._set_state(key, name, torch.zeros_like(key, dtype=dtype))
            states.append(to_local(value))
        return states

    def put_state(self, parameter: str, name: str, value: Any) -> None:
        """Set a parameter's state to a scalar, or to a tensor that already has the strategy's layout."""
        keys = {
            member: key
            for key, members in zip(self._state_keys(), self.members(), strict=True)
            for member in members
        }
        self._set_state(keys[parameter], name, value)

    def arrangements(self) -> list[Arrangement]:
        """Return functions that map a group's whole parameters to one process's shards or flat partition.

        If the strategy does not shard parameters, the result is [].
        """
        return []

    def is_stepped_in_one_call(self) -> bool:
        """Return True if each training step calls the optimizer's step() exactly once."""
        return True

    def _set_state(self, key: Tensor, name: str, value: Any) -> Any:
        base_of(self.script_optimizer).state.setdefault(key, {})[name] = value
        return value

    def _script_optimizer(self) -> Optimizer:
        return self.optimizer

    def members(self) -> list[list[str]]:
        """Return the parameter names in each local tensor."""
        return [[name] for name in self.parameters]

    def _names_of(self, groups: list[list[Tensor]]) -> list[list[str]]:
        names = {id(parameter): name for name, parameter in self.parameters.items()}
        return [[names[id(parameter)] for parameter in group if id(parameter) in names] for group in groups]

    def _state_keys(self) -> list[Tensor]:
        return list(self.parameters.values())

    def _whole_shape(self, parameter: Any) -> tuple[int, ...]:
        return tuple(parameter.shape)

    def _piece_of(self, parameter: Any) -> Piece:
        """Return this process's piece of a parameter."""
        return Piece(0, parameter.numel())


class _Sharded(Layout):
    """Layout for FSDP2, where parameters and moments are DTensors."""

    partition_name = "FSDP2's shards"

    def _piece_of(self, parameter: Any) -> Piece:
        """Return this process's chunk of rows along the sharded mesh dimension.

        All chunks except the last have the same size.
        """
        if not hasattr(parameter, "placements"):
            return super()._piece_of(parameter)
        (dimension,) = (dim for dim, placement in enumerate(parameter.placements) if placement.is_shard(0))
        mesh, rows = parameter.device_mesh, len(parameter)
        rows_per_rank = -(-rows // mesh.size(dimension))
        start = min(rows, rows_per_rank * mesh.get_local_rank(dimension))
        row_size = parameter.numel() // rows
        return Piece(start * row_size, min(rows_per_rank, rows - start) * row_size)

    def arrangements(self) -> list[Arrangement]:
        example = next(iter(self.parameters.values()))
        return [lambda tensors: [_distributed_like(example, tensor) for tensor in tensors]]

    def sync(self) -> None:
        from torch.distributed.fsdp import FSDPModule

        for module in self.module.modules():
            if isinstance(module, FSDPModule):  # gathered copies exist after an evaluation
                module.reshard()


class _Zero(Layout):
    """Layout for ZeRO-1 and ZeRO-2, with flat partitions of the fp32 master weights."""

    partition_name = "ZeRO's flat partitions"
    is_flat = True

    def groups(self) -> list[list[str]]:
        return self.members()

    def arrangements(self) -> list[Arrangement]:
        return [lambda tensors: _flat_half(tensors, 0), lambda tensors: _flat_half(tensors, 1)]

    def sync(self) -> None:
        self.optimizer.update_lp_params()

    def _piece_of(self, parameter: Any) -> Piece:
        if not parameter.requires_grad:
            return super()._piece_of(parameter)
        return Piece(*(deepspeed_.fragment(parameter) or (0, 0)))

    def _script_optimizer(self) -> Optimizer:
        return self.optimizer.optimizer

    def members(self) -> list[list[str]]:
        return self._names_of(self.optimizer.bit16_groups)

    def _state_keys(self) -> list[Tensor]:
        return list(self.optimizer.single_partition_of_fp32_groups)


class _Zero3(_Zero):
    """Layout for ZeRO-3, which splits each parameter into equally sized partitions, one per process.

    The last partition is padded.
    """

    def _whole_shape(self, parameter: Any) -> tuple[int, ...]:
        return tuple(parameter.ds_shape)

    def frozen_views(self) -> Iterator[tuple[str, Tensor]]:
        for name, parameter in self.frozen.items():
            yield name, parameter.ds_tensor[: self.piece_of[name].length]

    def groups(self) -> list[list[str]]:
        groups: list[list[str]] = [[] for _ in self.script_optimizer.param_groups]
        for index, members in enumerate(self.members()):
            groups[self.optimizer.sub_group_to_group_id[index]] += members
        return groups

    def is_stepped_in_one_call(self) -> bool:
        return len(self._state_keys()) == 1  # DeepSpeed calls step() once per partition

    def sync(self) -> None:
        deepspeed_.end_zero3_step(self.optimizer, len(self._state_keys()))

    def _piece_of(self, parameter: Any) -> Piece:
        part_size = parameter.ds_tensor.ds_numel
        start = min(parameter.ds_numel, part_size * deepspeed_.partition_rank(self.optimizer, parameter))
        offset = 0  # placeholder offset for frozen parameters, which are in no partition
        if parameter.requires_grad:
            _, offset, _ = self.optimizer.grad_position[self.optimizer.get_param_id(parameter)]
        return Piece(start, min(part_size, parameter.ds_numel - start), offset)

    def members(self) -> list[list[str]]:
        return self._names_of(self.optimizer.fp16_groups)

    def _state_keys(self) -> list[Tensor]:
        return list(self.optimizer.fp32_partitioned_groups_flat)


def layout_of(model: nn.Module, optimizer: AcceleratedOptimizer) -> Layout:
    """Return the layout of a model and an optimizer, both returned by accelerator.prepare."""
    inner = optimizer.optimizer
    if type(inner).__module__.startswith("deepspeed"):
        return (_Zero3 if hasattr(inner, "fp32_partitioned_groups_flat") else _Zero)(model, optimizer)
    if any(hasattr(parameter, "to_local") for parameter in model.parameters()):
        return _Sharded(model, optimizer)
    return Layout(model, optimizer)


def base_of(optimizer: Optimizer) -> Optimizer:
    """Return the optimizer that stores the state.

    A wrapper such as Lookahead stores the state in an inner optimizer.
    """
    inner_optimizers = [value for value in vars(optimizer).values() if isinstance(value, Optimizer)]
    return base_of(inner_optimizers[0]) if len(inner_optimizers) == 1 and not optimizer.state else optimizer


def shaped_entries(state: dict[str, Any], key: Tensor) -> dict[str, Tensor]:
    """Return the state tensors shaped like their parameter.

    The state of a scalar parameter is excluded, because a scalar shape is ambiguous.
    """
    return {name: value for name, value in state.items() if key.ndim and _has_shape(value, key)}


def group_settings(group: dict[str, Any]) -> dict[str, Any]:
    """Return the parameter group's settings that a checkpoint stores.

    A checkpoint stores neither the parameters nor the learning rate, which the script sets. It also omits
    `capturable`, which only step graphs on a GPU need, and which other devices reject.
    """
    return {name: value for name, value in group.items() if name not in ("params", "lr", "capturable")}


def changed_settings(groups: list[dict[str, Any]], earlier: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the settings in each parameter group that differ from the earlier settings."""
    return [
        {
            name: value
            for name, value in group_settings(group).items()
            if name not in earlier_settings or not _are_identical(value, earlier_settings[name])
        }
        for group, earlier_settings in zip(groups, earlier, strict=True)
    ]


def plain_module(model: nn.Module) -> nn.Module:
    """Return the model inside DDP's or DeepSpeed's wrapper.

    Accelerate's function for this purpose would import DeepSpeed.
    """
    while type(model).__name__ in ("DistributedDataParallel", "DeepSpeedEngine"):
        model = model.get_submodule("module")
    return model


def to_local(value: Any) -> Any:
    """Return a DTensor's local tensor. Return any other value unchanged."""
    return value.to_local() if hasattr(value, "to_local") else value


def _distributed_like(example: Any, whole: Tensor) -> Any:
    """Return the whole tensor as a DTensor with the DTensor p's sharding and device."""
    from torch.distributed.tensor import distribute_tensor

    return distribute_tensor(whole, example.device_mesh, example.placements, src_data_rank=None).to(
        example.to_local().device
    )


def _has_shape(value: Any, key: Tensor) -> bool:
    return isinstance(value, Tensor) and value.shape == key.shape


def _are_identical(first: Any, second: Any) -> bool:
    if isinstance(first, Tensor) or isinstance(second, Tensor):
        return isinstance(first, Tensor) and isinstance(second, Tensor) and torch.equal(first, second)
    return type(first) is type(second) and first == second


def _flat_half(tensors: list[Tensor], half: int) -> list[Tensor]:
    """Return one process's flat partition in a job with two processes. The second partition is padded."""
    if not tensors:
        return []
    flat = torch.cat([tensor.flatten() for tensor in tensors])
    return [torch.cat([flat, flat.new_zeros(len(flat) % 2)]).chunk(2)[half]]
