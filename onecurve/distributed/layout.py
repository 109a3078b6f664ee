"""What each process has of the whole tensors, under every strategy.

Six words for a parameter, or for state of its shape:

    whole    the tensor as one process has it; flattened where pieces are cut from it
    local    what the optimizer changes in place here: parameters on one process and under DDP, shards under
             FSDP2, flat partitions of the fp32 masters under ZeRO. An EMA's averages have the same shapes
    key      the object by which the optimizer's `state` has a local tensor: an nn.Parameter, a DTensor
    members  the parameters in a local tensor: one, or many in a flat partition
    piece    the part of the flat, whole tensor that is here: all, some, or nothing; where it starts in both
    own      the elements of that piece, a view of the local tensor

    whole, flat  0 1 2 3 4 5 6 7 8 9      on rank 1 of 2: piece (start 5, length 5, offset 2),
    local        . . 5 6 7 8 9 . .        own 5 6 7 8 9, before and behind it those of other members
"""

import copy
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from accelerate.optimizer import AcceleratedOptimizer
from torch import Tensor, nn
from torch.optim import Optimizer

from onecurve.upstream import deepspeed_

Local = Sequence[Tensor | None]  # one per local tensor; None if the parameter has no such state
Arrange = Callable[[list[Tensor]], list[Tensor]]  # converts a parameter group to one process's part


class Piece(NamedTuple):
    """The elements of a flat, whole tensor that a process has."""

    start: int  # in the whole tensor
    length: int
    offset: int = 0  # in the flat partition, under ZeRO


class Layout:
    """The layout of one process and of DDP, where every process has everything.

    Create it before the first forward: later FSDP2's modules may show gathered copies of their parameters.
    """

    parts = ""  # a name of what the optimizer gets instead of whole parameters
    is_flat = False

    def __init__(self, model: nn.Module, optimizer: AcceleratedOptimizer):
        self.module, self.optimizer = plain_module(model), optimizer.optimizer
        # nn.Parameters; under FSDP and ZeRO with further attributes
        everything: dict[str, Any] = dict(self.module.named_parameters())
        self.parameters = {name: p for name, p in everything.items() if p.requires_grad}
        self.frozen = {name: p for name, p in everything.items() if not p.requires_grad}
        self.local = [to_local(key.detach()) for key in self._keys()]  # fp32, in the order of self.states()
        self.inner = self._inner()  # the script's own optimizer
        self.pieces = {name: self._piece(p) for name, p in everything.items()}
        self.constants = copy.deepcopy([group_values(group) for group in self.inner.param_groups])

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Whole shapes of the trained parameters, by their names in the model."""
        return {name: self._shape(p) for name, p in self.parameters.items()}

    def buffers(self) -> dict[str, Tensor]:
        """Buffers such as BatchNorm's statistics, by their names in the model. Rank 0's count."""
        parameters = {**self.parameters, **self.frozen}
        known = {id(p) for p in parameters.values()}
        everything = self.module.state_dict(keep_vars=True)
        # After a forward FSDP2 may show a gathered parameter (pytorch #144289), not the object that is known.
        return {
            name: tensor.detach()
            for name, tensor in everything.items()
            if id(tensor) not in known and name not in parameters
        }

    def frozen_shapes(self) -> dict[str, tuple[int, ...]]:
        """Whole shapes of the frozen parameters, by their names in the model."""
        return {name: self._shape(p) for name, p in self.frozen.items()}

    def own(self, local: Local) -> Iterator[tuple[str, Tensor]]:
        """(name, this process's piece) of each trained parameter that has such state."""
        for mine, members in zip(local, self.members(), strict=True):
            if mine is None:
                continue
            for name in members:
                _, length, offset = self.pieces[name]
                yield name, mine[offset : offset + length] if self.is_flat else mine

    def own_frozen(self) -> Iterator[tuple[str, Tensor]]:
        """(name, this process's piece) of each frozen parameter."""
        for name, p in self.frozen.items():
            yield name, to_local(p.detach())

    def fill(self, own: Iterable[tuple[str, Tensor]], whole: Callable[[str], Tensor]) -> None:
        """Fills this process's pieces with whole(name), a tensor on the device. All use the same order."""
        for name, mine in own:
            start, length, _ = self.pieces[name]
            mine.copy_(whole(name).flatten()[start : start + length].view(mine.shape))

    def sync(self) -> None:
        """Makes what was written into self.local visible to the next forward. Collective."""

    def groups(self) -> list[list[str]]:
        """The names of the trained parameters in each of the optimizer's groups."""
        return self._names_of([group["params"] for group in self.inner.param_groups])

    def states(self) -> list[dict[str, Any]]:
        """The optimizer's state of each local tensor; empty before the first step."""
        return [owner(self.inner).state.get(key, {}) for key in self._keys()]

    def shaped_state(self) -> dict[str, Local]:
        """The state with the shape of the local tensors, such as `exp_avg`."""
        keys, states = self._keys(), self.states()
        names = {name for key, state in zip(keys, states, strict=True) for name in shaped(state, key)}
        return {
            name: [
                to_local(state[name] if _has_shape(state.get(name), key) else None)
                for key, state in zip(keys, states, strict=True)
            ]
            for name in sorted(names)
        }

    def other_state(self) -> dict[str, dict[str, Any]]:
        """All other state: parameter -> name -> a scalar, or a whole tensor of another shape. Collective."""
        names = self.shaped_state().keys()
        return {
            parameter: {
                name: value.full_tensor() if hasattr(value, "full_tensor") else value
                for name, value in sorted(state.items())
                if not (name in names and _has_shape(value, key))
            }
            for key, state, members in zip(self._keys(), self.states(), self.members(), strict=True)
            for parameter in members
        }

    def changed_groups(self) -> list[dict[str, Any]]:
        """The values of the parameter groups that the optimizer itself has changed, as a count of steps."""
        return changed(self.inner.param_groups, self.constants)

    def make_state(self, name: str, dtypes: dict[str, torch.dtype]) -> Local:
        """Creates state of zeros with the shapes of the local tensors, for these parameters and types."""
        made: list[Tensor | None] = []
        for key, members in zip(self._keys(), self.members(), strict=True):
            dtype = next((dtypes[member] for member in members if member in dtypes), None)
            new = None if dtype is None else self._put(key, name, torch.zeros_like(key, dtype=dtype))
            made.append(to_local(new))
        return made

    def put_state(self, parameter: str, name: str, value: Any) -> None:
        """Sets a scalar, or a tensor that is already in the strategy's layout."""
        keys = {m: key for key, ms in zip(self._keys(), self.members(), strict=True) for m in ms}
        self._put(keys[parameter], name, value)

    def arrangements(self) -> list[Arrange]:
        """Functions that convert a group of parameters to one process's part; none without shards."""
        return []

    def steps_at_once(self) -> bool:
        """True when a training step is one call of the optimizer's step()."""
        return True

    def _put(self, key: Tensor, name: str, value: Any) -> Any:
        owner(self.inner).state.setdefault(key, {})[name] = value
        return value

    def _inner(self) -> Optimizer:
        return self.optimizer

    def members(self) -> list[list[str]]:
        """The names of the parameters in each local tensor."""
        return [[name] for name in self.parameters]

    def _names_of(self, groups: list[list[Tensor]]) -> list[list[str]]:
        names = {id(p): name for name, p in self.parameters.items()}
        return [[names[id(p)] for p in group if id(p) in names] for group in groups]

    def _keys(self) -> list[Tensor]:
        return list(self.parameters.values())

    def _shape(self, parameter: Any) -> tuple[int, ...]:
        return tuple(parameter.shape)

    def _piece(self, parameter: Any) -> Piece:
        """What this process has of a parameter."""
        return Piece(0, parameter.numel())


class _Sharded(Layout):
    """FSDP2's layout: parameters and moments are DTensors."""

    parts = "FSDP2's shards"

    def _piece(self, parameter: Any) -> Piece:
        """Whole rows: one of the equal chunks that the devices of the sharded dimension have."""
        if not hasattr(parameter, "placements"):
            return super()._piece(parameter)
        (dimension,) = (i for i, placement in enumerate(parameter.placements) if placement.is_shard(0))
        mesh, rows = parameter.device_mesh, len(parameter)
        chunk = -(-rows // mesh.size(dimension))
        start = min(rows, chunk * mesh.get_local_rank(dimension))
        row = parameter.numel() // rows
        return Piece(start * row, min(chunk, rows - start) * row)

    def arrangements(self) -> list[Arrange]:
        p = next(iter(self.parameters.values()))
        return [lambda tensors: [_distributed_like(p, tensor) for tensor in tensors]]

    def sync(self) -> None:
        from torch.distributed.fsdp import FSDPModule

        for module in self.module.modules():
            if isinstance(module, FSDPModule):  # keeps gathered copies after a forward without backward
                module.reshard()


class _Zero(Layout):
    """The layout of ZeRO-1 and ZeRO-2: flat partitions of the fp32 masters."""

    parts = "ZeRO's flat partitions"
    is_flat = True

    def groups(self) -> list[list[str]]:
        return self.members()

    def arrangements(self) -> list[Arrange]:
        return [lambda tensors: _flat_half(tensors, 0), lambda tensors: _flat_half(tensors, 1)]

    def sync(self) -> None:
        self.optimizer.update_lp_params()

    def _piece(self, parameter: Any) -> Piece:
        if not parameter.requires_grad:
            return super()._piece(parameter)
        return Piece(*(deepspeed_.fragment(parameter) or (0, 0)))

    def _inner(self) -> Optimizer:
        return self.optimizer.optimizer

    def members(self) -> list[list[str]]:
        return self._names_of(self.optimizer.bit16_groups)

    def _keys(self) -> list[Tensor]:
        return list(self.optimizer.single_partition_of_fp32_groups)


class _Zero3(_Zero):
    """ZeRO-3's layout: each parameter is split into equal parts, one per process, the last one padded."""

    def _shape(self, parameter: Any) -> tuple[int, ...]:
        return tuple(parameter.ds_shape)

    def own_frozen(self) -> Iterator[tuple[str, Tensor]]:
        for name, p in self.frozen.items():
            yield name, p.ds_tensor[: self.pieces[name].length]

    def groups(self) -> list[list[str]]:
        groups: list[list[str]] = [[] for _ in self.inner.param_groups]
        for i, members in enumerate(self.members()):
            groups[self.optimizer.sub_group_to_group_id[i]] += members
        return groups

    def steps_at_once(self) -> bool:
        return len(self._keys()) == 1  # one call per partition

    def sync(self) -> None:
        deepspeed_.end_zero3_step(self.optimizer, len(self._keys()))

    def _piece(self, parameter: Any) -> Piece:
        part = parameter.ds_tensor.ds_numel
        start = min(parameter.ds_numel, part * deepspeed_.partition_rank(self.optimizer, parameter))
        offset = 0  # of a frozen parameter, which has a tensor of its own
        if parameter.requires_grad:
            _, offset, _ = self.optimizer.grad_position[self.optimizer.get_param_id(parameter)]
        return Piece(start, min(part, parameter.ds_numel - start), offset)

    def members(self) -> list[list[str]]:
        return self._names_of(self.optimizer.fp16_groups)

    def _keys(self) -> list[Tensor]:
        return list(self.optimizer.fp32_partitioned_groups_flat)


def layout_of(model: nn.Module, optimizer: AcceleratedOptimizer) -> Layout:
    """The layout of what accelerator.prepare returned."""
    inner = optimizer.optimizer
    if type(inner).__module__.startswith("deepspeed"):
        return (_Zero3 if hasattr(inner, "fp32_partitioned_groups_flat") else _Zero)(model, optimizer)
    if any(hasattr(p, "to_local") for p in model.parameters()):
        return _Sharded(model, optimizer)
    return Layout(model, optimizer)


def owner(optimizer: Optimizer) -> Optimizer:
    """The optimizer that has the state: a wrapper such as Lookahead keeps it in the inner optimizer."""
    inside = [value for value in vars(optimizer).values() if isinstance(value, Optimizer)]
    return owner(inside[0]) if len(inside) == 1 and not optimizer.state else optimizer


def shaped(state: dict[str, Any], key: Tensor) -> dict[str, Tensor]:
    """The state with the shape of its parameter; none for a scalar parameter, whose shape is ambiguous."""
    return {name: value for name, value in state.items() if key.ndim and _has_shape(value, key)}


def group_values(group: dict[str, Any]) -> dict[str, Any]:
    """A parameter group's values, without its parameters, the learning rate, which the script sets, and
    `capturable`, which a step graph needs on a GPU, and no other device takes."""
    return {name: value for name, value in group.items() if name not in ("params", "lr", "capturable")}


def changed(groups: list[dict[str, Any]], before: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The values of each group that differ from those before."""
    return [
        {
            name: value
            for name, value in group_values(group).items()
            if name not in old or not _equal(value, old[name])
        }
        for group, old in zip(groups, before, strict=True)
    ]


def plain_module(model: nn.Module) -> nn.Module:
    """Return the model inside DDP's or DeepSpeed's wrapper. Accelerate's own function imports DeepSpeed."""
    while type(model).__name__ in ("DistributedDataParallel", "DeepSpeedEngine"):
        model = model.get_submodule("module")
    return model


def to_local(value: Any) -> Any:
    return value.to_local() if hasattr(value, "to_local") else value


def _distributed_like(p: Any, whole: Tensor) -> Any:
    """The whole tensor as a DTensor, sharded as the DTensor p is, on its device: a CPU, if p is offloaded."""
    from torch.distributed.tensor import distribute_tensor

    return distribute_tensor(whole, p.device_mesh, p.placements, src_data_rank=None).to(p.to_local().device)


def _has_shape(value: Any, key: Tensor) -> bool:
    return isinstance(value, Tensor) and value.shape == key.shape


def _equal(a: Any, b: Any) -> bool:
    if isinstance(a, Tensor) or isinstance(b, Tensor):
        return isinstance(a, Tensor) and isinstance(b, Tensor) and torch.equal(a, b)
    return type(a) is type(b) and a == b


def _flat_half(tensors: list[Tensor], half: int) -> list[Tensor]:
    """The flat partition of one of two processes; the second one is padded."""
    if not tensors:
        return []
    flat = torch.cat([t.flatten() for t in tensors])
    return [torch.cat([flat, flat.new_zeros(len(flat) % 2)]).chunk(2)[half]]
