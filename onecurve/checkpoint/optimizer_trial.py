"""Runs trial steps of the script's optimizer on small tensors before training.

The trial shows which state the optimizer keeps, and whether sharding the parameters changes its update. ZeRO
passes flat partitions to the optimizer, and FSDP2 passes shards. Sharding does not affect an elementwise
update (AdamW, SGD, Lion). Sharding may change an update that depends on a parameter's shape or norm (Muon,
Lamb, Adafactor). Therefore, the trial updates small parameters twice, once whole and once sharded. The
updates must match up to rounding errors, or bitwise with --deterministic.
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
from onecurve.distributed.layout import (
    Arrangement,
    Layout,
    base_of,
    changed_settings,
    group_settings,
    shaped_entries,
)

LARGEST_EDGE = 128  # maximum dimension size of a small parameter
TRIAL_STEPS = 3
LEARNING_RATE = 0.01
TOLERANCE = 1e-5  # maximum relative difference between updates, because sums over shards round differently
# Maximum dimension sizes and shard counts for the bitwise comparison. The scalar code for the last elements
# of a tensor may round differently from vector instructions, so the comparison must exercise both code paths.
ODD_EDGES, SHARD_COUNTS = (101, 37), (2, 3, 8)

Shape = tuple[int, ...]
Groups = list[list[Tensor]]  # each parameter group's tensors


@dataclass
class OptimizerTrial:
    """Optimizer properties determined by trial steps."""

    name: str  # class name, including the module
    # State of each parameter's small copy, by parameter name
    states: dict[str, dict[str, Any]] = field(default_factory=dict)
    # Each parameter group's settings that the optimizer changed
    groups: list[dict[str, Any]] = field(default_factory=list)
    # Dtypes of the state tensors shaped like their parameter: parameter name -> state name -> dtype
    shaped: dict[str, dict[str, torch.dtype]] = field(default_factory=dict)

    def state_names(self) -> list[str] | None:
        """Return the names of all per-parameter and per-group state, or None if no trial steps were run."""
        if not self.states:
            return None
        return sorted({name for state in (*self.states.values(), *self.groups) for name in state})


def try_out(layout: Layout, needs_bitwise: bool = False) -> OptimizerTrial:
    """Run trial steps of the layout's optimizer. This function is collective.

    Args:
        layout: Layout of the model and the optimizer.
        needs_bitwise: True to require that sharded and whole-parameter updates are bitwise identical.

    Raises:
        ValueError: If the optimizer's state can't be saved, or the strategy would change the optimizer's
            update.
    """
    # DeepSpeed's own optimizers support flat partitions and need no trial.
    if type(layout.script_optimizer).__module__.startswith("deepspeed."):
        return OptimizerTrial(class_name(layout.script_optimizer))
    try:
        return _run_trial(layout, needs_bitwise)
    except ValueError as error:
        problem = str(error)
    except Exception as error:  # optimizers raise many exception types for unsupported tensors
        problem = f"a trial step raised {type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"
    name, advice, location = class_name(layout.script_optimizer), "Choose a different optimizer", ""
    if layout.partition_name:
        location = f" on {layout.partition_name}"
        advice = "Train with DDP, or choose an optimizer such as AdamW, SGD or Lion"
    raise ValueError(f"the optimizer {name} can't be used{location}: {problem}. {advice}")


def class_name(optimizer: Optimizer) -> str:
    """Return the class name, for example `timm.optim.lookahead.Lookahead(torch.optim.adamw.AdamW)`."""
    name, wrapped = f"{type(optimizer).__module__}.{type(optimizer).__qualname__}", base_of(optimizer)
    return name if wrapped is optimizer else f"{name}({class_name(wrapped)})"


def _run_trial(layout: Layout, needs_bitwise: bool) -> OptimizerTrial:
    names, shapes = layout.groups(), layout.shapes()
    if len(names) != len(layout.script_optimizer.param_groups):
        raise ValueError("DeepSpeed rebuilds this optimizer without its parameter groups")
    if layout.is_flat and base_of(layout.script_optimizer) is not layout.script_optimizer:
        raise ValueError(
            "ZeRO steps one parameter group at a time, but the wrapped optimizer would step all groups"
        )
    if layout.arrangements() and base_of(layout.script_optimizer).state:
        raise ValueError("the optimizer creates state for whole parameters before its first step")
    small_shapes = {name: tuple(min(size, LARGEST_EDGE) for size in shape) for name, shape in shapes.items()}
    # For each group, one parameter name per distinct small shape
    examples = [{small_shapes[name]: name for name in group_names} for group_names in names]
    drawn_shapes, device = [list(group) for group in examples], layout.local[0].device
    initial_values, *gradients = _draw_tensors(drawn_shapes, 1 + TRIAL_STEPS, device)
    initial_states: dict[str, dict[str, Any]] = {}
    if base_of(layout.script_optimizer).state:
        initial_states = dict(zip(layout.parameters, layout.states(), strict=False))
    whole_copy = _OptimizerCopy(layout, initial_values, lambda tensors: tensors)
    for group_names, parameters in zip(examples, whole_copy.parameters, strict=True):
        for name, parameter in zip(group_names.values(), parameters, strict=True):
            whole_copy.set_initial_state(parameter, initial_states.get(name, {}), shapes[name])
    whole_copy.step(gradients)
    sharded_copies = [_OptimizerCopy(layout, initial_values, arrange) for arrange in layout.arrangements()]
    for sharded_copy in sharded_copies:
        sharded_copy.step(gradients)
    if sharded_copies:
        _check_updates(layout, initial_values, whole_copy, sharded_copies)
    if sharded_copies and needs_bitwise:
        _check_bitwise(layout, [[shapes[name] for name in group_names] for group_names in names])
    stepped = sharded_copies[0] if sharded_copies else whole_copy
    trial = OptimizerTrial(class_name(layout.script_optimizer), groups=whole_copy.changed_groups())
    for group_index, members in enumerate(names):
        for name in members:
            shape_index = list(examples[group_index]).index(small_shapes[name])
            trial.states[name] = stepped.states(group_index)[0 if layout.is_flat else shape_index]
            state = whole_copy.states(group_index)[shape_index]
            shaped_state = shaped_entries(state, whole_copy.parameters[group_index][shape_index])
            trial.shaped[name] = {state_name: value.dtype for state_name, value in shaped_state.items()}
    return trial


class _OptimizerCopy:
    """Copy of the layout's optimizer that updates small parameters.

    Args:
        layout: Layout of the model and the optimizer to copy.
        initial_values: Each group's initial values of the whole small parameters.
        arrange: Function that maps a group's whole parameters to the tensors that this copy updates.
    """

    def __init__(self, layout: Layout, initial_values: Groups, arrange: Arrangement):
        self.layout, self.arrange = layout, arrange
        self.parameters = [
            [nn.Parameter(value.clone()) for value in arrange(group)] for group in initial_values
        ]
        self.optimizer = _copy_optimizer(layout.script_optimizer, {})
        for group, parameters in zip(self.optimizer.param_groups, self.parameters, strict=True):
            group |= {"params": parameters, "lr": LEARNING_RATE}

    def set_initial_state(self, parameter: nn.Parameter, state: dict[str, Any], shape: Shape) -> None:
        """Set a small parameter's state to a slice of the original parameter's initial state."""
        if state:
            corner_slices = tuple(slice(size) for size in parameter.shape)
            initial_state = {
                name: value[corner_slices] if isinstance(value, Tensor) and value.shape == shape else value
                for name, value in state.items()
            }
            base_of(self.optimizer).state[parameter] = copy.deepcopy(initial_state)

    def step(self, gradients: list[Groups]) -> None:
        """Run one optimizer step for each set of gradients.

        Raises:
            ValueError: If the optimizer's state can't be saved.
        """
        attributes_before = self._numeric_attributes()
        for groups in gradients:
            for parameters, group in zip(self.parameters, groups, strict=True):
                for parameter, gradient in zip(parameters, self.arrange(group), strict=True):
                    parameter.grad = gradient.clone()
            self.optimizer.step()
        self._check_state(attributes_before)

    def states(self, group: int) -> list[dict[str, Any]]:
        return [base_of(self.optimizer).state.get(parameter, {}) for parameter in self.parameters[group]]

    def changed_groups(self) -> list[dict[str, Any]]:
        return changed_settings(self.optimizer.param_groups, self.layout.initial_settings)

    def flat_parameters(self, group: int) -> Tensor:
        whole_parameters = [
            parameter.full_tensor() if hasattr(parameter, "full_tensor") else parameter
            for parameter in self.parameters[group]
        ]
        return torch.cat([parameter.detach().flatten() for parameter in whole_parameters])

    def _check_state(self, attributes_before: dict[str, float]) -> None:
        states = [state for group_index in range(len(self.parameters)) for state in self.states(group_index)]
        for name, value in [entry for state in (*states, *self.changed_groups()) for entry in state.items()]:
            if not can_store(value):
                raise ValueError(
                    f"the optimizer state {name} is a {type(value).__name__}, which a checkpoint can't store"
                )
        for name, value in self._numeric_attributes().items():
            if attributes_before.get(name) != value:
                raise ValueError(f"the optimizer stores {name} outside its state_dict()")
        attributes = vars(base_of(self.optimizer)).values()
        extra_keys = self.optimizer.state_dict().keys() - {"state", "param_groups"}
        if extra_keys or any(isinstance(value, Optimizer) for value in attributes):
            raise ValueError(
                "the optimizer wraps several optimizers, or its state_dict() contains keys other than state"
                " and param_groups"
            )

    def _numeric_attributes(self) -> dict[str, float]:
        return {name: value for name, value in vars(self.optimizer).items() if type(value) in (int, float)}


def _check_updates(
    layout: Layout, initial_values: Groups, whole_copy: _OptimizerCopy, sharded_copies: list[_OptimizerCopy]
) -> None:
    """Raise ValueError unless sharded and whole-parameter updates match up to rounding errors."""
    for group_index, group in enumerate(initial_values):
        if not group:
            continue
        initial_values_flat = torch.cat([value.flatten() for value in group])
        expected = whole_copy.flat_parameters(group_index)
        padded = torch.cat([sharded_copy.flat_parameters(group_index) for sharded_copy in sharded_copies])
        sharded = padded[: len(expected)]
        # With `not`, NaN also raises the error.
        if not (expected - sharded).abs().max() <= TOLERANCE * (expected - initial_values_flat).abs().max():
            raise ValueError("the update of an element depends on the whole parameter")
    for sharded_copy in sharded_copies:
        expected_groups = [group_settings(group) for group in whole_copy.optimizer.param_groups]
        if any(changed_settings(sharded_copy.optimizer.param_groups, expected_groups)):
            raise ValueError("the state of a parameter group depends on whole parameters")
    if any(whole_copy.changed_groups()) and not layout.is_stepped_in_one_call():
        raise ValueError(
            "the optimizer counts the steps of each parameter group, but ZeRO-3 calls step() several times in"
            " each training step"
        )
    if layout.is_flat:
        _check_flat_state(sharded_copies[0])


def _check_bitwise(layout: Layout, shapes: list[list[Shape]]) -> None:
    """Raise ValueError unless sharded and whole-parameter updates are bitwise identical.

    The comparison covers many different shard lengths.
    """
    splits = [partial(_split_into_shards, count) for count in SHARD_COUNTS]
    arranges: list[Arrangement] = [list, *layout.arrangements(), *splits]
    for edge in ODD_EDGES:
        small_shapes = [
            list({tuple(min(dimension, edge) for dimension in shape): None for shape in group})
            for group in shapes
        ]
        initial_values, *gradients = _draw_tensors(small_shapes, 1 + TRIAL_STEPS, layout.local[0].device)
        # Use small values, so that rounding does not hide the last bits of an update.
        initial_values = [[value / 1024 for value in group] for group in initial_values]
        optimizer_copies = [_OptimizerCopy(layout, initial_values, arrange) for arrange in arranges]
        whole_copy, *sharded_copies = optimizer_copies
        for optimizer_copy in optimizer_copies:
            optimizer_copy.step(gradients)
        nonempty_groups = [group_index for group_index, group in enumerate(initial_values) if group]
        for group_index in nonempty_groups:
            expected = whole_copy.flat_parameters(group_index)
            for sharded_copy in sharded_copies:
                if not torch.equal(expected, sharded_copy.flat_parameters(group_index)):
                    raise ValueError(
                        "updates of shards are not bitwise identical to updates of whole parameters, which"
                        " --deterministic requires"
                    )


def _split_into_shards(count: int, tensors: list[Tensor]) -> list[Tensor]:
    """Split each tensor into shards for `count` devices, and return all shards."""
    return [shard for tensor in tensors for shard in (tensor.chunk(count) if tensor.ndim else [tensor])]


def _check_flat_state(partition: _OptimizerCopy) -> None:
    """Raise ValueError unless ZeRO can split every non-scalar state tensor.

    ZeRO can split a state tensor that contains one fp32 value per parameter element.
    """
    for group_index, group in enumerate(partition.parameters):
        for parameter, state in zip(group, partition.states(group_index), strict=True):
            for name, value in state.items():
                is_array = isinstance(value, Tensor) and value.ndim
                if is_array and (value.shape != parameter.shape or value.dtype != torch.float32):
                    raise ValueError(
                        f"the optimizer state {name} does not contain one fp32 number per parameter element"
                    )


def _draw_tensors(shapes: list[list[Shape]], count: int, device: torch.device) -> list[Groups]:
    """Return `count` sets of normally distributed tensors, identical on every rank."""
    generator = torch.Generator().manual_seed(0)
    return [
        [[torch.randn(shape, generator=generator).to(device) for shape in group] for group in shapes]
        for _ in range(count)
    ]


def _copy_optimizer(optimizer: Optimizer, memo: dict[int, Any]) -> Optimizer:
    """Copy an optimizer without its parameters and state. copy.deepcopy would lose subclass attributes."""
    duplicate = object.__new__(type(optimizer))
    memo[id(optimizer)], memo[id(optimizer.state)] = duplicate, defaultdict(dict)
    memo |= {
        id(parameter): torch.empty(0) for group in optimizer.param_groups for parameter in group["params"]
    }
    for value in vars(optimizer).values():
        if isinstance(value, Optimizer):
            _copy_optimizer(value, memo)
    duplicate.__dict__ = copy.deepcopy(vars(optimizer), memo)
    return duplicate
