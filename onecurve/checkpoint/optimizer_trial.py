"""Tries the script's optimizer on small tensors before the training.

The trial shows which state the optimizer keeps, and if its update stays the same when a strategy shards
parameters: ZeRO gives an optimizer flat partitions, FSDP2 shards. An elementwise update (AdamW, SGD, Lion)
stays the same. An update that needs the shape or the norm of a parameter (Muon, Lamb, Adafactor) may not.
So copies of the optimizer step small parameters, whole and sharded, and the results are compared: within
rounding, and with --deterministic bit for bit.
"""

import copy
from collections import defaultdict
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from onecurve.checkpoint.format import can_store
from onecurve.distributed.layout import Arrange, Layout, changed, group_values, owner, shaped

LARGEST_EDGE = 128  # of a small parameter
STEPS = 3
LEARNING_RATE = 0.01
TOLERANCE = 1e-5  # relative to the update, as sums over shards round differently
# Compared bit for bit. Vector instructions may round otherwise than what computes a tensor's last elements.
ODD_EDGES, CUTS = (101, 37), (2, 3, 8)

Shape = tuple[int, ...]
Groups = list[list[Tensor]]  # the tensors of each parameter group


@dataclass
class OptimizerTrial:
    """What the trial shows about an optimizer."""

    name: str  # its class
    states: dict[str, dict[str, Any]] = field(default_factory=dict)  # parameter -> state of its small copy
    groups: list[dict[str, Any]] = field(default_factory=list)  # values that it changes in its groups
    shaped: dict[str, dict[str, torch.dtype]] = field(default_factory=dict)  # state with a parameter's shape

    def state_names(self) -> list[str] | None:
        """Names of the state of parameters and groups; None without a trial."""
        if not self.states:
            return None
        return sorted({name for state in (*self.states.values(), *self.groups) for name in state})


def try_out(layout: Layout, same_bits: bool = False) -> OptimizerTrial:
    """Tries the layout's optimizer. Collective. same_bits: shards must have the bits of whole parameters.

    ValueError for an optimizer whose state can't be saved, or whose update the strategy would change.
    """
    if type(layout.inner).__module__.startswith("deepspeed."):  # its optimizers are made for flat partitions
        return OptimizerTrial(class_name(layout.inner))
    try:
        return _try_out(layout, same_bits)
    except ValueError as error:
        problem = str(error)
    except Exception as error:  # optimizers raise any kind on tensors that they do not expect
        problem = (
            f"a trial step ended with {type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"
        )
    advice = "train with DDP, or choose one as AdamW, SGD or Lion" if layout.parts else "choose another"
    place = f" on {layout.parts}" if layout.parts else ""
    raise ValueError(f"the optimizer {class_name(layout.inner)} can't be used{place}: {problem}; {advice}")


def class_name(optimizer: Optimizer) -> str:
    """The class with its module: `timm.optim.lookahead.Lookahead(torch.optim.adamw.AdamW)`."""
    name, inside = f"{type(optimizer).__module__}.{type(optimizer).__qualname__}", owner(optimizer)
    return name if inside is optimizer else f"{name}({class_name(inside)})"


def _try_out(layout: Layout, same_bits: bool) -> OptimizerTrial:
    names, shapes = layout.groups(), layout.shapes()
    if len(names) != len(layout.inner.param_groups):
        raise ValueError("DeepSpeed rebuilds this optimizer and drops its parameter groups")
    if layout.is_flat and owner(layout.inner) is not layout.inner:
        raise ValueError("ZeRO would step it group by group, but not the optimizer inside")
    if layout.arrangements() and owner(layout.inner).state:
        raise ValueError("it makes its state before its first step, for whole parameters")
    small = {name: tuple(min(n, LARGEST_EDGE) for n in shapes[name]) for group in names for name in group}
    kinds = [{small[name]: name for name in group} for group in names]  # small shape -> a parameter
    values, *gradients = _drawn([list(group) for group in kinds], 1 + STEPS, layout.local[0].device)
    state = dict(zip(layout.parameters, layout.states(), strict=False)) if owner(layout.inner).state else {}
    whole = _Copy(layout, values, lambda tensors: tensors)
    for group, mine in zip(kinds, whole.parameters, strict=True):
        for name, p in zip(group.values(), mine, strict=True):
            whole.begin(p, state.get(name, {}), shapes[name])
    whole.step(gradients)
    parts = [_Copy(layout, values, arrange) for arrange in layout.arrangements()]
    for part in parts:
        part.step(gradients)
    if parts:
        _compare(layout, values, whole, parts)
    if parts and same_bits:
        _compare_bits(layout, [[shapes[name] for name in group] for group in names])
    seen = parts[0] if parts else whole
    trial = OptimizerTrial(class_name(layout.inner), groups=whole.changed_groups())
    for i, members in enumerate(names):
        for name in members:
            j = list(kinds[i]).index(small[name])
            trial.states[name] = seen.states(i)[0 if layout.is_flat else j]
            own, key = whole.states(i)[j], whole.parameters[i][j]
            trial.shaped[name] = {state: value.dtype for state, value in shaped(own, key).items()}
    return trial


class _Copy:
    """A copy of the layout's optimizer whose parameter groups are arrange(values)."""

    def __init__(self, layout: Layout, values: Groups, arrange: Arrange):
        self.layout, self.arrange = layout, arrange
        self.parameters = [[nn.Parameter(t.clone()) for t in arrange(group)] for group in values]
        self.optimizer = _copied(layout.inner, {})
        for group, mine in zip(self.optimizer.param_groups, self.parameters, strict=True):
            group |= {"params": mine, "lr": LEARNING_RATE}

    def begin(self, p: nn.Parameter, state: dict[str, Any], shape: Shape) -> None:
        """Gives the small parameter the state that the optimizer's constructor made for the whole one."""
        if state:
            corner = tuple(slice(n) for n in p.shape)
            cut = {
                n: v[corner] if isinstance(v, Tensor) and v.shape == shape else v for n, v in state.items()
            }
            owner(self.optimizer).state[p] = copy.deepcopy(cut)

    def step(self, gradients: list[Groups]) -> None:
        """Steps with each of the gradients. ValueError when the state can't be saved."""
        before = self._numbers()
        for groups in gradients:
            for parameters, group in zip(self.parameters, groups, strict=True):
                for p, gradient in zip(parameters, self.arrange(group), strict=True):
                    p.grad = gradient.clone()
            self.optimizer.step()
        self._check(before)

    def states(self, group: int) -> list[dict[str, Any]]:
        return [owner(self.optimizer).state.get(p, {}) for p in self.parameters[group]]

    def changed_groups(self) -> list[dict[str, Any]]:
        return changed(self.optimizer.param_groups, self.layout.constants)

    def flat(self, group: int) -> Tensor:
        whole = [p.full_tensor() if hasattr(p, "full_tensor") else p for p in self.parameters[group]]
        return torch.cat([p.detach().flatten() for p in whole])

    def _check(self, before: dict[str, float]) -> None:
        states = [state for i in range(len(self.parameters)) for state in self.states(i)]
        for name, value in [item for state in (*states, *self.changed_groups()) for item in state.items()]:
            if not can_store(value):
                raise ValueError(
                    f"its state {name} is a {type(value).__name__}, which no checkpoint can hold"
                )
        if other := [name for name, value in self._numbers().items() if before.get(name) != value]:
            raise ValueError(f"it keeps {other[0]} outside of its state_dict()")
        inside = vars(owner(self.optimizer)).values()
        extra = self.optimizer.state_dict().keys() - {"state", "param_groups"}
        if extra or any(isinstance(value, Optimizer) for value in inside):
            raise ValueError("its state_dict() has more than the state and the groups of one optimizer")

    def _numbers(self) -> dict[str, float]:
        return {name: value for name, value in vars(self.optimizer).items() if type(value) in (int, float)}


def _compare(layout: Layout, values: Groups, whole: _Copy, parts: list[_Copy]) -> None:
    """Raises ValueError unless the sharded updates together equal the whole one."""
    for i, group in enumerate(values):
        if not group:
            continue
        begun = torch.cat([t.flatten() for t in group])
        mine = whole.flat(i)
        theirs = torch.cat([part.flat(i) for part in parts])[: len(mine)]  # without padding
        if not (mine - theirs).abs().max() <= TOLERANCE * (mine - begun).abs().max():  # also for NaN
            raise ValueError("its update of an element depends on the whole parameter")
    for part in parts:
        ours = [group_values(group) for group in whole.optimizer.param_groups]
        if any(changed(part.optimizer.param_groups, ours)):
            raise ValueError("what it keeps for a parameter group depends on whole parameters")
    if any(whole.changed_groups()) and not layout.steps_at_once():
        raise ValueError(
            "it keeps a count for each parameter group, and ZeRO-3 steps it several times for one"
        )
    if layout.is_flat:
        _check_flat(parts[0])


def _compare_bits(layout: Layout, shapes: list[list[Shape]]) -> None:
    """Raises ValueError unless shards of many lengths have the bits of the whole parameters."""
    ways: list[Arrange] = [list, *layout.arrangements(), *(partial(_cut, count) for count in CUTS)]
    for edge in ODD_EDGES:
        small = [list({tuple(min(n, edge) for n in shape): None for shape in group}) for group in shapes]
        values, *gradients = _drawn(small, 1 + STEPS, layout.local[0].device)
        # Of small parameters the last bits of an update are not rounded away.
        values = [[t / 1024 for t in group] for group in values]
        copies = [_Copy(layout, values, how) for how in ways]
        for each in copies:
            each.step(gradients)
        for i in range(len(values)):
            if values[i] and any(not torch.equal(copies[0].flat(i), each.flat(i)) for each in copies[1:]):
                raise ValueError("its update has other bits there, and --deterministic promises the same")


def _cut(count: int, tensors: list[Tensor]) -> list[Tensor]:
    """The shards that so many devices have."""
    return [shard for whole in tensors for shard in (whole.chunk(count) if whole.ndim else [whole])]


def _check_flat(part: _Copy) -> None:
    """Raises ValueError unless its state tensors have one fp32 number per element: others can't be split."""
    for i, group in enumerate(part.parameters):
        for p, state in zip(group, part.states(i), strict=True):
            for name, value in state.items():
                is_array = isinstance(value, Tensor) and value.ndim
                if is_array and (value.shape != p.shape or value.dtype != torch.float32):
                    raise ValueError(f"its state {name} is not one fp32 number for each element")


def _drawn(shapes: list[list[Shape]], count: int, device: torch.device) -> list[Groups]:
    """Normally distributed tensors, the same on every process."""
    generator = torch.Generator().manual_seed(0)
    return [
        [[torch.randn(shape, generator=generator).to(device) for shape in group] for group in shapes]
        for _ in range(count)
    ]


def _copied(optimizer: Optimizer, memo: dict[int, Any]) -> Optimizer:
    """A copy without parameters and state. (copy.deepcopy would lose a subclass's attributes.)"""
    made = object.__new__(type(optimizer))
    memo[id(optimizer)], memo[id(optimizer.state)] = made, defaultdict(dict)
    memo |= {id(p): torch.empty(0) for group in optimizer.param_groups for p in group["params"]}
    for value in vars(optimizer).values():
        if isinstance(value, Optimizer):
            _copied(value, memo)
    made.__dict__ = copy.deepcopy(vars(optimizer), memo)
    return made
