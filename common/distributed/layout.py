"""Conversion between whole tensors and what each process holds of them, under every strategy.

The tensors that the optimizer changes in place are called "held" here: the parameters themselves on one
process and under DDP, shards under FSDP2, flat partitions of the fp32 masters under ZeRO. An EMA's averages
and most of an optimizer's state have the shapes of the held tensors, so they are converted in the same way.
"""

import copy
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from accelerate.optimizer import AcceleratedOptimizer
from torch import Tensor, nn
from torch.optim import Optimizer

from common.distributed.strategy import plain_module

EXCHANGED_BYTES = 64 * 2**20  # extra memory for exchanging two tensors

Held = Sequence[Tensor | None]  # one per held tensor; None if the parameter has no such state
Arrange = Callable[[list[Tensor]], list[Tensor]]  # converts a parameter group to what a strategy holds


class Layout:
    """The layout of one process and of DDP, where every process holds everything.

    Create it before the first forward: later FSDP2's modules may show gathered copies of their parameters.
    """

    parts = ""  # a name of what the optimizer gets instead of whole parameters
    is_flat = False

    def __init__(self, model: nn.Module, optimizer: AcceleratedOptimizer):
        self.module, self.optimizer = plain_module(model), optimizer.optimizer
        # nn.Parameters; under FSDP and ZeRO with further attributes
        self.parameters: dict[str, Any] = {
            name: p for name, p in self.module.named_parameters() if p.requires_grad
        }
        self.frozen: dict[str, Any] = {
            name: p for name, p in self.module.named_parameters() if not p.requires_grad
        }
        self.held = self._held()  # fp32, in the order of self.states()
        self.inner = self._inner()  # the script's own optimizer
        self.constants = copy.deepcopy([group_values(group) for group in self.inner.param_groups])

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Whole shapes of the trained parameters, by their names in the model."""
        return {name: tuple(p.shape) for name, p in self.parameters.items()}

    def buffers(self) -> dict[str, Tensor]:
        """Buffers such as BatchNorm's statistics, by their names in the model. Rank 0's count."""
        parameters = {**self.parameters, **self.frozen}
        known = {id(p) for p in parameters.values()}
        everything = self.module.state_dict(keep_vars=True)
        # After a forward FSDP2 may show a gathered parameter, which is another object than the known one.
        return {
            name: tensor.detach()
            for name, tensor in everything.items()
            if id(tensor) not in known and name not in parameters
        }

    # --- Frozen parameters, which the optimizer does not have

    def frozen_shapes(self) -> dict[str, tuple[int, ...]]:
        """Whole shapes of the frozen parameters, by their names in the model."""
        return {name: tuple(p.shape) for name, p in self.frozen.items()}

    def whole_frozen(self) -> Iterator[tuple[str, Tensor]]:
        """(name, whole tensor) of each frozen parameter, one gathered at a time. Collective."""
        for name, p in self.frozen.items():
            yield name, _gathered(p.detach())

    def fill_frozen(self, whole: Callable[[str], Tensor]) -> None:
        """Fills the frozen parameters with whole(name), a tensor on the device. Collective."""
        for name, p in self.frozen.items():
            p.copy_(whole(name))

    # --- Trained parameters

    def whole(self, held: Held) -> Iterator[tuple[str, Tensor]]:
        """(name, whole tensor) of each trained parameter, one gathered at a time. Collective."""
        for name, mine in zip(self.parameters, held, strict=True):
            if mine is not None:
                yield name, mine

    def fill(self, held: Held, whole: Callable[[str], Tensor], names: Collection[str] | None = None) -> None:
        """Fills the held tensors with whole(name), a tensor on the device. All processes use the same order.

        names: the parameters to fill; all by default.
        """
        for name, mine in zip(self.parameters, held, strict=True):
            if names is None or name in names:
                assert mine is not None, name
                mine.copy_(whole(name))

    def publish(self) -> None:
        """Makes what was written into self.held visible to the next forward. Collective."""

    # --- The optimizer's state

    def groups(self) -> list[list[str]]:
        """The names of the trained parameters in each of the optimizer's groups."""
        return self._names_of([group["params"] for group in self.inner.param_groups])

    def states(self) -> list[dict[str, Any]]:
        """The optimizer's state of each held tensor; empty before the first step."""
        return [owner(self.inner).state.get(key, {}) for key in self._keys()]

    def shaped_state(self) -> dict[str, Held]:
        """The state with the shape of the held tensors, such as `exp_avg`."""
        keys, states = self._keys(), self.states()
        names = {name for key, state in zip(keys, states, strict=True) for name in shaped(state, key)}
        return {
            name: [
                _local(state[name] if _has_shape(state.get(name), key) else None)
                for key, state in zip(keys, states, strict=True)
            ]
            for name in sorted(names)
        }

    def other_state(self) -> dict[str, dict[str, Any]]:
        """All other state: parameter -> name -> a scalar, or a whole tensor of another shape. Collective."""
        names = self.shaped_state().keys()
        return {
            parameter: {
                name: _gathered(value)
                for name, value in sorted(state.items())
                if not (name in names and _has_shape(value, key))
            }
            for key, state, members in zip(self._keys(), self.states(), self.members(), strict=True)
            for parameter in members
        }

    def changed_groups(self) -> list[dict[str, Any]]:
        """The values of the parameter groups that the optimizer itself has changed, as a count of steps."""
        return changed(self.inner.param_groups, self.constants)

    def make_state(self, name: str, dtypes: dict[str, torch.dtype]) -> Held:
        """Creates state of zeros with the shapes of the held tensors, for these parameters and types."""
        made: list[Tensor | None] = []
        for key, members in zip(self._keys(), self.members(), strict=True):
            dtype = next((dtypes[member] for member in members if member in dtypes), None)
            new = None if dtype is None else self._put(key, name, torch.zeros_like(key, dtype=dtype))
            made.append(_local(new))
        return made

    def put_state(self, parameter: str, name: str, value: Any) -> None:
        """Sets a scalar, or a tensor that is already in the strategy's layout."""
        keys = {m: key for key, ms in zip(self._keys(), self.members(), strict=True) for m in ms}
        self._put(keys[parameter], name, value)

    def arrangements(self) -> list[Arrange]:
        """Functions that convert a group of parameters to what each process holds; none without shards."""
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
        """The names of the parameters in each held tensor."""
        return [[name] for name in self.parameters]

    def _names_of(self, groups: list[list[Tensor]]) -> list[list[str]]:
        names = {id(p): name for name, p in self.parameters.items()}
        return [[names[id(p)] for p in group if id(p) in names] for group in groups]

    def _held(self) -> list[Tensor]:
        return [_local(p.detach()) for p in self.parameters.values()]

    def _keys(self) -> list[Tensor]:
        return list(self.parameters.values())


class _Sharded(Layout):
    """FSDP2's layout: parameters and moments are DTensors."""

    parts = "FSDP2's shards"

    def whole(self, held: Held) -> Iterator[tuple[str, Tensor]]:
        from torch.distributed.tensor import DTensor

        for (name, p), mine in zip(self.parameters.items(), held, strict=True):
            if mine is None:
                continue
            sharded = DTensor.from_local(
                mine, p.device_mesh, p.placements, run_check=False, shape=p.shape, stride=p.stride()
            )
            yield name, sharded.full_tensor()

    def fill(self, held: Held, whole: Callable[[str], Tensor], names: Collection[str] | None = None) -> None:
        for (name, p), mine in zip(self.parameters.items(), held, strict=True):
            if names is None or name in names:
                assert mine is not None, name
                mine.copy_(_sharded_like(p, whole(name)))

    def fill_frozen(self, whole: Callable[[str], Tensor]) -> None:
        for name, p in self.frozen.items():
            p.to_local().copy_(_sharded_like(p, whole(name)))

    def arrangements(self) -> list[Arrange]:
        from torch.distributed.tensor import distribute_tensor

        p = next(iter(self.parameters.values()))
        return [
            lambda tensors: [
                distribute_tensor(t, p.device_mesh, p.placements, src_data_rank=None) for t in tensors
            ]
        ]

    def publish(self) -> None:
        from torch.distributed.fsdp import FSDPModule

        for module in self.module.modules():
            if isinstance(module, FSDPModule):  # keeps gathered copies after a forward without backward
                module.reshard()


class _Zero(Layout):
    """The layout of ZeRO-1 and ZeRO-2: flat partitions of the fp32 masters.

    Only DeepSpeed can split a partition into parameters, and only that of the masters. So moments and
    averages are exchanged with the masters while they are read or written.
    """

    parts = "ZeRO's flat partitions"
    is_flat = True

    def whole(self, held: Held) -> Iterator[tuple[str, Tensor]]:
        from deepspeed.utils import safe_get_full_fp32_param

        absent = {m for mine, ms in zip(held, self.members(), strict=True) if mine is None for m in ms}
        with self._in_masters(held):
            for name, p in self.parameters.items():
                if name not in absent:
                    yield name, safe_get_full_fp32_param(p)

    def fill(self, held: Held, whole: Callable[[str], Tensor], names: Collection[str] | None = None) -> None:
        with self._in_masters(held):
            for name, p in self.parameters.items():
                if names is None or name in names:
                    self._set(p, whole(name))

    def groups(self) -> list[list[str]]:
        return self.members()

    def arrangements(self) -> list[Arrange]:
        return [lambda tensors: _flat_half(tensors, 0), lambda tensors: _flat_half(tensors, 1)]

    def publish(self) -> None:
        self.optimizer.update_lp_params()

    @contextmanager
    def _in_masters(self, held: Held) -> Iterator[None]:
        pairs = [(mine, master) for mine, master in zip(held, self.held, strict=True) if mine is not None]
        with nullcontext() if held is self.held else exchanged(*map(list, zip(*pairs, strict=True))):
            yield

    def _set(self, parameter: Any, value: Tensor) -> None:
        parameter.set_full_hp_param(value)

    def _held(self) -> list[Tensor]:
        return [flat.detach() for flat in self._keys()]

    def _inner(self) -> Optimizer:
        return self.optimizer.optimizer

    def members(self) -> list[list[str]]:
        return self._names_of(self.optimizer.bit16_groups)

    def _keys(self) -> list[Tensor]:
        return list(self.optimizer.single_partition_of_fp32_groups)


class _Zero3(_Zero):
    """ZeRO-3's layout: each parameter is split into equal parts, one per process, the last one padded."""

    def shapes(self) -> dict[str, tuple[int, ...]]:
        return {name: tuple(p.ds_shape) for name, p in self.parameters.items()}

    def frozen_shapes(self) -> dict[str, tuple[int, ...]]:
        return {name: tuple(p.ds_shape) for name, p in self.frozen.items()}

    def whole_frozen(self) -> Iterator[tuple[str, Tensor]]:
        from deepspeed.runtime.zero import GatheredParameters

        for name, p in self.frozen.items():
            with GatheredParameters([p]):
                yield name, p.detach()

    def fill_frozen(self, whole: Callable[[str], Tensor]) -> None:
        from deepspeed.runtime.zero import GatheredParameters

        for name, p in self.frozen.items():
            with GatheredParameters([p], modifier_rank=0):  # at its end all ranks get rank 0's values
                p.copy_(whole(name))

    def groups(self) -> list[list[str]]:
        groups: list[list[str]] = [[] for _ in self.inner.param_groups]
        for i, members in enumerate(self.members()):
            groups[self.optimizer.sub_group_to_group_id[i]] += members
        return groups

    def steps_at_once(self) -> bool:
        return len(self._keys()) == 1  # one call per partition

    def publish(self) -> None:
        """Repeats the end of the optimizer's step."""
        zero = self.optimizer
        zero._partition_all_parameters()
        for i in range(len(self._keys())):
            zero._reassign_or_swap_out_partitioned_parameters(i)
        if zero.persistent_parameters:
            zero.persistent_parameters[0].all_gather(zero.persistent_parameters)

    def _set(self, parameter: Any, value: Tensor) -> None:
        # Not DeepSpeed's own set_full_hp_param: it fails where the parts need padding.
        part, _ = self.optimizer._get_fp32_opt_state_partition(parameter, release_swap_buffers=False)
        start = part.numel() * self.optimizer._get_param_partition_rank(parameter)
        mine = value.flatten()[start : start + part.numel()]
        part[: mine.numel()].copy_(mine)

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
    """A parameter group's values, without its parameters and the learning rate, which the script sets."""
    return {name: value for name, value in group.items() if name not in ("params", "lr")}


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


@contextmanager
def exchanged(ours: list[Tensor], theirs: list[Tensor]) -> Iterator[None]:
    """Exchanges the contents of two lists of tensors, and exchanges them back at the end."""
    _exchange(ours, theirs)
    try:
        yield
    finally:
        _exchange(ours, theirs)


@torch.no_grad()
def _exchange(ours: list[Tensor], theirs: list[Tensor]) -> None:
    for a, b in zip(ours, theirs, strict=True):
        if not a.numel():
            continue
        a, b = torch.atleast_1d(a), torch.atleast_1d(b)
        rows = max(1, EXCHANGED_BYTES * len(a) // a.nbytes)
        for some_a, some_b in zip(a.split(rows), b.split(rows), strict=True):
            kept = some_a.clone()
            some_a.copy_(some_b)
            some_b.copy_(kept)


def _local(value: Any) -> Any:
    return value.to_local() if hasattr(value, "to_local") else value


def _sharded_like(p: Any, whole: Tensor) -> Tensor:
    """This process's shard of a whole tensor, as the DTensor p is sharded."""
    from torch.distributed.tensor import distribute_tensor

    return distribute_tensor(whole, p.device_mesh, p.placements, src_data_rank=None).to_local()


def _gathered(value: Any) -> Any:
    return value.full_tensor() if hasattr(value, "full_tensor") else value


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
