"""Maps each rank's local tensors to whole tensors. Subclasses adapt the layout to FSDP2 and ZeRO.

The following terms describe a parameter, or optimizer state with the parameter's shape:

    whole    the complete tensor, which is flattened before it is divided into pieces
    local    the tensor that the optimizer updates in place on this rank: a parameter (one process or DDP), a
             shard (FSDP2), or a flat partition of the fp32 master weights (ZeRO). An EMA's averages have the
             same shapes. A flat partition contains many parameters, every other local tensor only one
    key      the nn.Parameter or DTensor that is the key of a local tensor's entry in the optimizer's `state`
    piece    the range of the flattened whole tensor that is on this rank, with its start in the whole tensor
             and its offset in the local tensor. A piece may be empty, or be the whole tensor
    own      the elements of the piece, as a view of the local tensor

    whole, flat  0 1 2 3 4 5 6 7 8 9      on rank 1 of 2: piece (start 5, length 5, offset 2),
    local        . . 5 6 7 8 9 . .        own 5 6 7 8 9; the dots belong to other parameters
"""

import copy
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from accelerate.optimizer import AcceleratedOptimizer
from torch import Tensor, nn
from torch.optim import Optimizer

# One entry per local tensor; None if the optimizer keeps no such state for it
LocalTensors = Sequence[Tensor | None]
# Maps a group's whole parameters to one process's shards or flat partition
Arrangement = Callable[[list[Tensor]], list[Tensor]]


class Piece(NamedTuple):
    """Range of a flattened whole tensor that this process stores."""

    start: int  # start index in the flattened whole tensor
    length: int  # number of elements
    offset: int = 0  # start index in the flat partition under ZeRO


class ParameterLayout:
    """Layout for a single process and DDP, where every process stores all tensors.

    Create the layout before the first forward pass, because FSDP2's modules may later expose gathered copies
    of their parameters.
    """

    # Name for the shards or partitions that the optimizer updates, or "" if it updates whole parameters
    partition_name = ""
    has_flat_partitions = False

    def __init__(self, model: nn.Module, optimizer: AcceleratedOptimizer):
        self.module, self.optimizer = plain_module(model), optimizer.optimizer
        # The values are nn.Parameters. The type is Any because FSDP2 and ZeRO add attributes.
        all_parameters: dict[str, Any] = dict(self.module.named_parameters())
        self.parameters = {
            name: parameter for name, parameter in all_parameters.items() if parameter.requires_grad
        }
        self.frozen_parameters = {
            name: parameter for name, parameter in all_parameters.items() if not parameter.requires_grad
        }
        # Local fp32 tensors, in the order of self.local_states()
        self.local_tensors = [to_local(state_key.detach()) for state_key in self._state_key_tensors()]
        self.script_optimizer = self._script_optimizer()  # the optimizer that the script created
        self.piece_of = {name: self._piece_of(parameter) for name, parameter in all_parameters.items()}
        # Each parameter group's settings before the first step, for changed_groups()
        self.initial_settings = copy.deepcopy(
            [group_settings(parameter_group) for parameter_group in self.script_optimizer.param_groups]
        )

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Return the shapes of the whole trained parameters, by name."""
        return {name: self._whole_shape(parameter) for name, parameter in self.parameters.items()}

    def buffers(self) -> dict[str, Tensor]:
        """Return the model's persistent buffers, such as BatchNorm's statistics, by name.

        Buffers may differ between ranks. Rank 0's buffers are authoritative.
        """
        parameter_by_name = {**self.parameters, **self.frozen_parameters}
        parameter_ids = {id(parameter) for parameter in parameter_by_name.values()}
        # keep_vars=True returns the parameter objects themselves, whose IDs are compared below
        tensor_by_name = self.module.state_dict(keep_vars=True)
        # After a forward pass, FSDP2 may expose a gathered parameter instead of the original object (pytorch
        # #144289). Therefore, this code also compares names.
        return {
            name: tensor.detach()
            for name, tensor in tensor_by_name.items()
            if id(tensor) not in parameter_ids and name not in parameter_by_name
        }

    def frozen_shapes(self) -> dict[str, tuple[int, ...]]:
        """Return the shapes of the whole frozen parameters, by name."""
        return {name: self._whole_shape(parameter) for name, parameter in self.frozen_parameters.items()}

    def named_pieces(self, local_tensors: LocalTensors) -> Iterator[tuple[str, Tensor]]:
        """Yield the name and this process's piece of each trained parameter, as views of the local tensors.

        Parameters whose entry in `local_tensors` is None are skipped.
        """
        for tensor, parameter_names in zip(local_tensors, self.parameter_names_by_tensor(), strict=True):
            if tensor is None:
                continue
            for name in parameter_names:
                piece = self.piece_of[name]
                piece_end = piece.offset + piece.length
                yield name, tensor[piece.offset : piece_end] if self.has_flat_partitions else tensor

    def frozen_pieces(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the name and this process's piece of each frozen parameter."""
        for parameter_name, parameter in self.frozen_parameters.items():
            yield parameter_name, to_local(parameter.detach())

    def fill_pieces(
        self, own_pieces: Iterable[tuple[str, Tensor]], get_whole: Callable[[str], Tensor]
    ) -> None:
        """Copy this process's part of each whole tensor into its pieces, in place.

        Args:
            own_pieces: Names and pieces, from named_pieces() or frozen_pieces(). All processes must use the
                same name order.
            get_whole: Function that maps a name to the whole tensor on the device. The function may be
                collective.
        """
        for parameter_name, own_piece in own_pieces:
            piece = self.piece_of[parameter_name]
            whole_piece = get_whole(parameter_name).flatten()[piece.start : piece.start + piece.length]
            own_piece.copy_(whole_piece.view(own_piece.shape))

    def sync_model(self) -> None:
        """Make changes in self.local_tensors visible to the next forward pass. This method is collective.

        The base class does nothing, because its local tensors are the model's parameters.
        """

    def parameter_names_by_group(self) -> list[list[str]]:
        """Return the trained parameters' names in each of the optimizer's parameter groups."""
        return self._names_in_groups([group["params"] for group in self.script_optimizer.param_groups])

    def local_states(self) -> list[dict[str, Any]]:
        """Return the optimizer's state for each local tensor.

        The state is empty before the optimizer's first step.
        """
        state_by_key = innermost_optimizer(self.script_optimizer).state
        return [state_by_key.get(state_key, {}) for state_key in self._state_key_tensors()]

    def shaped_state(self) -> dict[str, LocalTensors]:
        """Return the optimizer's state tensors shaped like the local tensors, by name such as `exp_avg`.

        The tensors are not copied. An entry is None if the optimizer keeps no such state for a local tensor.
        """
        keys_and_states = list(zip(self._state_key_tensors(), self.local_states(), strict=True))
        state_names = {
            name for state_key, state in keys_and_states for name in shaped_entries(state, state_key)
        }
        return {
            state_name: [
                to_local(state[state_name]) if _has_shape(state.get(state_name), state_key) else None
                for state_key, state in keys_and_states
            ]
            for state_name in sorted(state_names)
        }

    def other_state(self) -> dict[str, dict[str, Any]]:
        """Return the optimizer state outside shaped_state() as {parameter: {name: scalar or whole tensor}}.

        This method is collective.
        """
        shaped_names = self.shaped_state().keys()
        state_by_parameter: dict[str, dict[str, Any]] = {}
        names_by_tensor = self.parameter_names_by_tensor()
        keys_and_states = zip(self._state_key_tensors(), self.local_states(), strict=True)
        for (state_key, state), parameter_names in zip(keys_and_states, names_by_tensor, strict=True):
            for parameter_name in parameter_names:
                state_by_parameter[parameter_name] = {
                    state_name: _to_whole(state_value)
                    for state_name, state_value in sorted(state.items())
                    if not (state_name in shaped_names and _has_shape(state_value, state_key))
                }
        return state_by_parameter

    def changed_groups(self) -> list[dict[str, Any]]:
        """Return the parameter group settings that the optimizer itself has changed, such as a step count."""
        return changed_settings(self.script_optimizer.param_groups, self.initial_settings)

    def make_state(self, state_name: str, dtype_of: dict[str, torch.dtype]) -> LocalTensors:
        """Create zero-filled tensors shaped like the local tensors in the optimizer's state, and return them.

        Args:
            state_name: Name of the state.
            dtype_of: The state's dtype for each parameter that has this state.
        """
        state_tensors: list[Tensor | None] = []
        names_by_tensor = self.parameter_names_by_tensor()
        for state_key, parameter_names in zip(self._state_key_tensors(), names_by_tensor, strict=True):
            # The parameters in a flat partition share one state tensor, and therefore its dtype
            state_dtype = next((dtype_of[name] for name in parameter_names if name in dtype_of), None)
            state_tensor = None if state_dtype is None else torch.zeros_like(state_key, dtype=state_dtype)
            if state_tensor is not None:
                self._set_state(state_key, state_name, state_tensor)
            state_tensors.append(to_local(state_tensor))
        return state_tensors

    def put_state(self, parameter: str, state_name: str, value: Any) -> None:
        """Set a parameter's state to a scalar, or to a tensor that already has the strategy's layout."""
        names_by_tensor = self.parameter_names_by_tensor()
        state_key_by_parameter = {
            name: state_key
            for state_key, parameter_names in zip(self._state_key_tensors(), names_by_tensor, strict=True)
            for name in parameter_names
        }
        self._set_state(state_key_by_parameter[parameter], state_name, value)

    def arrangements(self) -> list[Arrangement]:
        """Return functions that map a group's whole parameters to one process's shards or flat partition.

        Before training, the optimizer trial applies these functions to small copies of the parameters. If the
        strategy does not shard parameters, the result is [].
        """
        return []

    def is_stepped_in_one_call(self) -> bool:
        """Return True if each training step calls the optimizer's step() exactly once."""
        return True

    def loss_scale(self) -> tuple[float, int] | None:
        """Return DeepSpeed's fp16 loss scale and the number of steps since the last overflow.

        The result is None unless the strategy is ZeRO with fp16.
        """
        return None

    def set_loss_scale(self, loss_scale: float, good_steps: int) -> None:
        """Set the values that loss_scale() returns. Without ZeRO, this method has no effect."""

    def _set_state(self, state_key: Tensor, state_name: str, state_value: Any) -> None:
        """Set one entry of the optimizer's state."""
        state_by_key = innermost_optimizer(self.script_optimizer).state
        state_by_key.setdefault(state_key, {})[state_name] = state_value

    def _script_optimizer(self) -> Optimizer:
        """Return the optimizer that the script created, which a strategy may have wrapped."""
        return self.optimizer

    def parameter_names_by_tensor(self) -> list[list[str]]:
        """Return the parameter names in each local tensor."""
        return [[name] for name in self.parameters]

    def _names_in_groups(self, parameter_groups: list[list[Tensor]]) -> list[list[str]]:
        """Return the names of the trained parameters in each group. Other tensors are skipped."""
        name_by_id = {id(parameter): name for name, parameter in self.parameters.items()}
        return [
            [name_by_id[id(parameter)] for parameter in parameter_group if id(parameter) in name_by_id]
            for parameter_group in parameter_groups
        ]

    def _state_key_tensors(self) -> list[Tensor]:
        """Return the tensors that are the keys of the optimizer's state, one per local tensor."""
        return list(self.parameters.values())

    def _whole_shape(self, parameter: Any) -> tuple[int, ...]:
        return tuple(parameter.shape)  # a DTensor's shape is the whole tensor's

    def _piece_of(self, parameter: Any) -> Piece:
        """Return this process's piece of a parameter."""
        return Piece(0, parameter.numel())


def innermost_optimizer(optimizer: Optimizer) -> Optimizer:
    """Return the optimizer that stores the state.

    A wrapper such as Lookahead stores the state in an inner optimizer.
    """
    optimizer_attributes = vars(optimizer).values()
    inner_optimizers = [attribute for attribute in optimizer_attributes if isinstance(attribute, Optimizer)]
    is_wrapper = len(inner_optimizers) == 1 and not optimizer.state
    return innermost_optimizer(inner_optimizers[0]) if is_wrapper else optimizer


def shaped_entries(state: dict[str, Any], state_key: Tensor) -> dict[str, Tensor]:
    """Return the entries of one parameter's optimizer state that are tensors shaped like the parameter.

    Args:
        state: The parameter's entries, by name such as `exp_avg`.
        state_key: The parameter. For a scalar parameter, the result is {}, because other scalars have the
            same shape.
    """
    if not state_key.ndim:
        return {}
    return {state_name: entry for state_name, entry in state.items() if _has_shape(entry, state_key)}


def group_settings(parameter_group: dict[str, Any]) -> dict[str, Any]:
    """Return the parameter group's settings that a checkpoint stores.

    A checkpoint stores neither the parameters nor the learning rate, which the script sets. It also omits
    `capturable`, which only step graphs on a GPU need, and which other devices reject.
    """
    omitted_names = ("params", "lr", "capturable")
    return {name: setting for name, setting in parameter_group.items() if name not in omitted_names}


def changed_settings(
    parameter_groups: list[dict[str, Any]], earlier_settings_by_group: list[dict[str, Any]]
) -> list[dict[str, Any]]:
    """Return the settings in each parameter group that differ from the earlier settings."""
    return [
        {
            name: setting
            for name, setting in group_settings(parameter_group).items()
            if name not in earlier_settings or not _are_identical(setting, earlier_settings[name])
        }
        for parameter_group, earlier_settings in zip(parameter_groups, earlier_settings_by_group, strict=True)
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


def _to_whole(value: Any) -> Any:
    """Gather a DTensor's whole tensor from all ranks. Return any other value unchanged."""
    return value.full_tensor() if hasattr(value, "full_tensor") else value


def _has_shape(state_value: Any, parameter: Tensor) -> bool:
    """Return True if the state value is a tensor shaped like the parameter."""
    return isinstance(state_value, Tensor) and state_value.shape == parameter.shape


def _are_identical(first: Any, second: Any) -> bool:
    """Return True if two settings have the same type and equal values."""
    if isinstance(first, Tensor) or isinstance(second, Tensor):
        return isinstance(first, Tensor) and isinstance(second, Tensor) and torch.equal(first, second)
    return type(first) is type(second) and first == second
