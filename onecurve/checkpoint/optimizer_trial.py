"""Runs trial steps of the script's optimizer on small tensors before training.

The trial shows which state the optimizer keeps, and whether its update stays the same when a strategy shards
parameters. ZeRO passes flat partitions to the optimizer, and FSDP2 passes shards. An elementwise update
(AdamW, SGD, Lion) is not affected. An update that depends on the shape or norm of a parameter (Muon, Lamb,
Adafactor) may change. Therefore, copies of the optimizer update small parameters, once whole and once
sharded. The results must be equal up to rounding errors, or bitwise identical with --deterministic.
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

LARGEST_EDGE = 128  # largest dimension of a small parameter
STEPS = 3
LEARNING_RATE = 0.01
TOLERANCE = 1e-5  # relative to the update, because sums over shards round differently
# Dimensions and shard counts for the bitwise comparison. The scalar code for the last elements of a tensor
# may round differently from vector instructions, so the comparison must run both kinds of code.
ODD_EDGES, CUTS = (101, 37), (2, 3, 8)

Shape = tuple[int, ...]
Groups = list[list[Tensor]]  # the tensors of each parameter group


@dataclass
class OptimizerTrial:
    """Properties of an optimizer that the trial determines."""

    name: str  # class name with its module
    # Parameter -> state of the parameter's small copy
    states: dict[str, dict[str, Any]] = field(default_factory=dict)
    # Settings that the optimizer changes, per group
    groups: list[dict[str, Any]] = field(default_factory=list)
    # State tensors with the same shape as their parameter: parameter -> name -> dtype
    shaped: dict[str, dict[str, torch.dtype]] = field(default_factory=dict)

    def state_names(self) -> list[str] | None:
        """Return the names of the parameter state and the group state, or None if there was no trial."""
        if not self.states:
            return None
        return sorted({name for state in (*self.states.values(), *self.groups) for name in state})


def try_out(layout: Layout, same_bits: bool = False) -> OptimizerTrial:
    """Run trial steps of the layout's optimizer. Collective.

    Args:
        same_bits: Require that updates of shards are bitwise identical to updates of whole parameters.

    Raises:
        ValueError: If the optimizer's state can't be saved, or the strategy would change its update.
    """
    # DeepSpeed's optimizers are made for flat partitions
    if type(layout.inner).__module__.startswith("deepspeed."):
        return OptimizerTrial(class_name(layout.inner))
    try:
        return _try_out(layout, same_bits)
    except ValueError as error:
        problem = str(error)
    except Exception as error:  # optimizers raise various exceptions for unexpected tensors
        problem = (
            f"a trial step ended with {type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"
        )
    name, advice, parts = class_name(layout.inner), "Choose another optimizer", ""
    if layout.parts:
        parts = f" on {layout.parts}"
        advice = "Train with DDP, or choose an optimizer such as AdamW, SGD or Lion"
    raise ValueError(f"the optimizer {name} can't be used{parts}: {problem}. {advice}")


def class_name(optimizer: Optimizer) -> str:
    """Return the class name, for example `timm.optim.lookahead.Lookahead(torch.optim.adamw.AdamW)`."""
    name, wrapped = f"{type(optimizer).__module__}.{type(optimizer).__qualname__}", owner(optimizer)
    return name if wrapped is optimizer else f"{name}({class_name(wrapped)})"


def _try_out(layout: Layout, same_bits: bool) -> OptimizerTrial:
    names, shapes = layout.groups(), layout.shapes()
    if len(names) != len(layout.inner.param_groups):
        raise ValueError("DeepSpeed rebuilds this optimizer and drops its parameter groups")
    if layout.is_flat and owner(layout.inner) is not layout.inner:
        raise ValueError("ZeRO would step it group by group, but not the optimizer that it wraps")
    if layout.arrangements() and owner(layout.inner).state:
        raise ValueError("it creates its state before its first step, for whole parameters")
    small = {name: tuple(min(n, LARGEST_EDGE) for n in shapes[name]) for group in names for name in group}
    # Small shape -> name of a parameter
    examples = [{small[name]: name for name in group} for group in names]
    values, *gradients = _drawn([list(group) for group in examples], 1 + STEPS, layout.local[0].device)
    state = dict(zip(layout.parameters, layout.states(), strict=False)) if owner(layout.inner).state else {}
    whole = _Copy(layout, values, lambda tensors: tensors)
    for group, parameters in zip(examples, whole.parameters, strict=True):
        for name, p in zip(group.values(), parameters, strict=True):
            whole.begin(p, state.get(name, {}), shapes[name])
    whole.step(gradients)
    parts = [_Copy(layout, values, arrange) for arrange in layout.arrangements()]
    for part in parts:
        part.step(gradients)
    if parts:
        _compare(layout, values, whole, parts)
    if parts and same_bits:
        _compare_bits(layout, [[shapes[name] for name in group] for group in names])
    stepped = parts[0] if parts else whole
    trial = OptimizerTrial(class_name(layout.inner), groups=whole.changed_groups())
    for i, members in enumerate(names):
        for name in members:
            j = list(examples[i]).index(small[name])
            trial.states[name] = stepped.states(i)[0 if layout.is_flat else j]
            shaped_state = shaped(whole.states(i)[j], whole.parameters[i][j])
            trial.shaped[name] = {state: value.dtype for state, value in shaped_state.items()}
    return trial


class _Copy:
    """Copy of the layout's optimizer whose parameter groups are arrange(values)."""

    def __init__(self, layout: Layout, values: Groups, arrange: Arrange):
        self.layout, self.arrange = layout, arrange
        self.parameters = [[nn.Parameter(t.clone()) for t in arrange(group)] for group in values]
        self.optimizer = _copied(layout.inner, {})
        for group, parameters in zip(self.optimizer.param_groups, self.parameters, strict=True):
            group |= {"params": parameters, "lr": LEARNING_RATE}

    def begin(self, p: nn.Parameter, state: dict[str, Any], shape: Shape) -> None:
        """Set the small parameter's state to a slice of the whole parameter's initial state."""
        if state:
            corner = tuple(slice(n) for n in p.shape)
            cut = {
                n: v[corner] if isinstance(v, Tensor) and v.shape == shape else v for n, v in state.items()
            }
            owner(self.optimizer).state[p] = copy.deepcopy(cut)

    def step(self, gradients: list[Groups]) -> None:
        """Take one step with each set of gradients. Raise ValueError if the state can't be saved."""
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
        if changed_numbers := [n for n, value in self._numbers().items() if before.get(n) != value]:
            raise ValueError(f"it keeps {changed_numbers[0]} outside of its state_dict()")
        attributes = vars(owner(self.optimizer)).values()
        extra_keys = self.optimizer.state_dict().keys() - {"state", "param_groups"}
        if extra_keys or any(isinstance(value, Optimizer) for value in attributes):
            raise ValueError("its state_dict() contains more than the state and groups of one optimizer")

    def _numbers(self) -> dict[str, float]:
        return {name: value for name, value in vars(self.optimizer).items() if type(value) in (int, float)}


def _compare(layout: Layout, values: Groups, whole: _Copy, parts: list[_Copy]) -> None:
    """Raise ValueError unless the updates of the shards equal the update of the whole parameters."""
    for i, group in enumerate(values):
        if not group:
            continue
        initial = torch.cat([t.flatten() for t in group])
        expected = whole.flat(i)
        sharded = torch.cat([part.flat(i) for part in parts])[: len(expected)]  # without padding
        # The condition is written so that it also fails for NaN.
        if not (expected - sharded).abs().max() <= TOLERANCE * (expected - initial).abs().max():
            raise ValueError("its update of an element depends on the whole parameter")
    for part in parts:
        expected_groups = [group_values(group) for group in whole.optimizer.param_groups]
        if any(changed(part.optimizer.param_groups, expected_groups)):
            raise ValueError("its state of a parameter group depends on whole parameters")
    if any(whole.changed_groups()) and not layout.steps_at_once():
        raise ValueError(
            "it counts the steps of each parameter group, and ZeRO-3 calls it several times in one step"
        )
    if layout.is_flat:
        _check_flat(parts[0])


def _compare_bits(layout: Layout, shapes: list[list[Shape]]) -> None:
    """Raise ValueError unless updates of shards of many lengths match whole parameters bit for bit."""
    arranges: list[Arrange] = [list, *layout.arrangements(), *(partial(_cut, count) for count in CUTS)]
    for edge in ODD_EDGES:
        small = [list({tuple(min(n, edge) for n in shape): None for shape in group}) for group in shapes]
        values, *gradients = _drawn(small, 1 + STEPS, layout.local[0].device)
        # Use small values, so that rounding does not hide the last bits of an update.
        values = [[t / 1024 for t in group] for group in values]
        whole, *parts = [_Copy(layout, values, arrange) for arrange in arranges]
        for copy_ in (whole, *parts):
            copy_.step(gradients)
        for i in range(len(values)):
            if values[i] and any(not torch.equal(whole.flat(i), part.flat(i)) for part in parts):
                raise ValueError(
                    "its update of shards has different bits, and --deterministic promises the same bits"
                )


def _cut(count: int, tensors: list[Tensor]) -> list[Tensor]:
    """Return the shards of the tensors on `count` devices."""
    return [shard for tensor in tensors for shard in (tensor.chunk(count) if tensor.ndim else [tensor])]


def _check_flat(part: _Copy) -> None:
    """Raise ValueError unless every state tensor can be split (one fp32 number per parameter element)."""
    for i, group in enumerate(part.parameters):
        for p, state in zip(group, part.states(i), strict=True):
            for name, value in state.items():
                is_array = isinstance(value, Tensor) and value.ndim
                if is_array and (value.shape != p.shape or value.dtype != torch.float32):
                    raise ValueError(f"its state {name} does not have one fp32 number per element")


def _drawn(shapes: list[list[Shape]], count: int, device: torch.device) -> list[Groups]:
    """Return normally distributed tensors that are identical on every rank."""
    generator = torch.Generator().manual_seed(0)
    return [
        [[torch.randn(shape, generator=generator).to(device) for shape in group] for group in shapes]
        for _ in range(count)
    ]


def _copied(optimizer: Optimizer, memo: dict[int, Any]) -> Optimizer:
    """Copy an optimizer without its parameters and state. copy.deepcopy would lose subclass attributes."""
    duplicate = object.__new__(type(optimizer))
    memo[id(optimizer)], memo[id(optimizer.state)] = duplicate, defaultdict(dict)
    memo |= {id(p): torch.empty(0) for group in optimizer.param_groups for p in group["params"]}
    for value in vars(optimizer).values():
        if isinstance(value, Optimizer):
            _copied(value, memo)
    duplicate.__dict__ = copy.deepcopy(vars(optimizer), memo)
    return duplicate
