"""Whole tensors out of, and into, what each process holds, under every strategy.

What the optimizer changes in place is called "held" here: the parameters themselves on one process and under
DDP, shards under FSDP2, flat partitions of the fp32 masters under ZeRO. An optimizer's moments and an EMA's
averages are lists of tensors with the shapes of the held ones, so one way in and out serves all three.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext

import torch
from accelerate.optimizer import AcceleratedOptimizer
from torch import Tensor, nn

from common.accelerator import plain_module

EXCHANGED_BYTES = 64 * 2**20  # what exchanging two tensors takes beside them


class Layout:
    """One process, and DDP: every process holds everything. FSDP2 and ZeRO differ as the subclasses say.

    Made before the first forward: later FSDP2's modules show gathered copies of their parameters.
    """

    def __init__(self, model: nn.Module, optimizer: AcceleratedOptimizer):
        self.module, self.optimizer = plain_module(model), optimizer.optimizer
        self.parameters = {name: p for name, p in self.module.named_parameters() if p.requires_grad}
        self.held = self._held()  # fp32, in the order of self.states()

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """The model's own names of what is trained -> whole shapes."""
        return {name: tuple(p.shape) for name, p in self.parameters.items()}

    def untrained(self) -> dict[str, Tensor]:
        """Buffers such as BatchNorm's statistics, by the model's own names. Rank 0's are the model's."""
        trained = {id(p) for p in self.parameters.values()}
        everything = self.module.state_dict(keep_vars=True)
        # After a forward FSDP2 may show a gathered parameter, which is not the one that is trained.
        return {
            name: tensor.detach()
            for name, tensor in everything.items()
            if id(tensor) not in trained and name not in self.parameters
        }

    def whole(self, held: list[Tensor]) -> Iterator[tuple[str, Tensor]]:
        """(name, whole tensor) of each trained parameter, one gathered at a time. Collective."""
        yield from zip(self.parameters, held, strict=True)

    def fill(self, held: list[Tensor], whole: Callable[[str], Tensor]) -> None:
        """Puts whole(name), on the device, into the held tensors. Every process calls whole in one order."""
        for name, mine in zip(self.parameters, held, strict=True):
            mine.copy_(whole(name))

    def publish(self) -> None:
        """Lets the next forward see what was written into self.held. Collective."""

    def states(self) -> list[dict]:
        """The optimizer's state of each held tensor; empty before the first step."""
        return [self.optimizer.state[key] for key in self._keys()]

    def moments(self) -> dict[str, list[Tensor]]:
        """`exp_avg` and the like -> tensors with the shapes of the held ones."""
        states = self.states()
        return {
            name: [_local(state[name]) for state in states]
            for name, value in (states[0] if states else {}).items()
            if isinstance(value, Tensor) and value.shape == self._keys()[0].shape
        }

    def expected_moments(self) -> list[str]:
        """The names of moments() before the first step, of the optimizers that the scripts use."""
        inner = getattr(self.optimizer, "optimizer", self.optimizer)
        names = {"AdamW": ["exp_avg", "exp_avg_sq"], "SGD": ["momentum_buffer"]}
        return names.get(type(inner).__name__, [])

    def optimizer_steps(self) -> int | None:
        """How many steps the optimizer counts (fp16 leaves some out); None for one that does not count."""
        counted = next((state["step"] for state in self.states() if "step" in state), None)
        return None if counted is None else int(counted)

    def make_moments(self, names: list[str], steps: int | None) -> dict[str, list[Tensor]]:
        """States of zeros after so many steps, as the optimizer itself would make them in its first."""
        fused = any(group.get("fused") for group in self.optimizer.param_groups)
        for key in self._keys():
            state = self.optimizer.state[key]
            for name in names:
                state[name] = torch.zeros_like(key)
            if steps is not None:
                device = _local(key).device if fused else torch.device("cpu")
                state["step"] = torch.tensor(float(steps), device=device)
        return self.moments()

    def _held(self) -> list[Tensor]:
        return [_local(p.detach()) for p in self.parameters.values()]

    def _keys(self) -> list[Tensor]:
        """What the optimizer's state is found by."""
        return list(self.parameters.values())


class _Sharded(Layout):
    """FSDP2: parameters and moments are DTensors."""

    def whole(self, held: list[Tensor]) -> Iterator[tuple[str, Tensor]]:
        from torch.distributed.tensor import DTensor

        for (name, p), mine in zip(self.parameters.items(), held, strict=True):
            place = {"shape": p.shape, "stride": p.stride(), "run_check": False}
            yield name, DTensor.from_local(mine, p.device_mesh, p.placements, **place).full_tensor()

    def fill(self, held: list[Tensor], whole: Callable[[str], Tensor]) -> None:
        from torch.distributed.tensor import distribute_tensor

        for (name, p), mine in zip(self.parameters.items(), held, strict=True):
            sharded = distribute_tensor(whole(name), p.device_mesh, p.placements, src_data_rank=None)
            mine.copy_(sharded.to_local())

    def publish(self) -> None:
        for module in self.module.modules():
            if hasattr(module, "reshard"):  # FSDP2 keeps gathered copies after a forward without backward
                module.reshard()


class _Zero(Layout):
    """ZeRO-1 and 2: flat partitions, which only DeepSpeed can take apart, and only the masters'.

    So moments and averages change places with the masters while they are read or written.
    """

    def whole(self, held: list[Tensor]) -> Iterator[tuple[str, Tensor]]:
        from deepspeed.utils import safe_get_full_fp32_param

        with self._in_masters(held):
            for name, p in self.parameters.items():
                yield name, safe_get_full_fp32_param(p)

    def fill(self, held: list[Tensor], whole: Callable[[str], Tensor]) -> None:
        with self._in_masters(held):
            for name, p in self.parameters.items():
                self._set(p, whole(name))

    def publish(self) -> None:
        self.optimizer.update_lp_params()

    @contextmanager
    def _in_masters(self, held: list[Tensor]) -> Iterator[None]:
        with nullcontext() if held is self.held else exchanged(held, self.held):
            yield

    def _set(self, parameter: nn.Parameter, value: Tensor) -> None:
        parameter.set_full_hp_param(value)

    def _held(self) -> list[Tensor]:
        return [flat.detach() for flat in self._keys()]

    def states(self) -> list[dict]:
        return [self.optimizer.optimizer.state[key] for key in self._keys()]

    def _keys(self) -> list[Tensor]:
        return list(self.optimizer.single_partition_of_fp32_groups)


class _Zero3(_Zero):
    """ZeRO-3: each parameter is cut into as many equal parts as there are processes, the last one padded."""

    def shapes(self) -> dict[str, tuple[int, ...]]:
        return {name: tuple(p.ds_shape) for name, p in self.parameters.items()}

    def publish(self) -> None:
        """As its optimizer's step does."""
        zero = self.optimizer
        zero._partition_all_parameters()
        for i in range(len(self._keys())):
            zero._reassign_or_swap_out_partitioned_parameters(i)
        if zero.persistent_parameters:
            zero.persistent_parameters[0].all_gather(zero.persistent_parameters)

    def _set(self, parameter: nn.Parameter, value: Tensor) -> None:
        # Not DeepSpeed's own set_full_hp_param: it fails where the parts need padding.
        part, _ = self.optimizer._get_fp32_opt_state_partition(parameter, release_swap_buffers=False)
        start = part.numel() * self.optimizer._get_param_partition_rank(parameter)
        mine = value.flatten()[start : start + part.numel()]
        part[: mine.numel()].copy_(mine)

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


@contextmanager
def exchanged(ours: list[Tensor], theirs: list[Tensor]) -> Iterator[None]:
    """Inside, two lists of tensors have one another's contents."""
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


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor
