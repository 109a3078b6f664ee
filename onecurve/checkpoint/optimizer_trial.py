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
    ParameterLayout,
    changed_settings,
    group_settings,
    innermost_optimizer,
    shaped_entries,
)

MAX_SMALL_DIMENSION = 128  # maximum dimension size of a small parameter
TRIAL_STEP_COUNT = 3
TRIAL_LEARNING_RATE = 0.01
# Maximum relative difference between updates, because sums over shards round differently
UPDATE_TOLERANCE = 1e-5
# Maximum dimension sizes and shard counts for the bitwise comparison. The scalar code for the last elements
# of a tensor may round differently from vector instructions, so the comparison must exercise both code paths.
ODD_DIMENSIONS = (101, 37)
SHARD_COUNTS = (2, 3, 8)

Shape = tuple[int, ...]
TensorsByGroup = list[list[Tensor]]  # each parameter group's tensors


@dataclass
class OptimizerTrial:
    """Optimizer properties determined by trial steps."""

    class_name: str  # class name, including the module
    # State of each parameter's small copy, by parameter name
    state_by_parameter: dict[str, dict[str, Any]] = field(default_factory=dict)
    # Each parameter group's settings that the optimizer changed
    changed_groups: list[dict[str, Any]] = field(default_factory=list)
    # Dtypes of the state tensors shaped like their parameter: parameter name -> state name -> dtype
    shaped_dtypes: dict[str, dict[str, torch.dtype]] = field(default_factory=dict)

    def state_names(self) -> list[str] | None:
        """Return the names of all per-parameter and per-group state, or None if no trial steps were run."""
        if not self.state_by_parameter:
            return None
        states = (*self.state_by_parameter.values(), *self.changed_groups)
        return sorted({state_name for state in states for state_name in state})


def run_optimizer_trial(layout: ParameterLayout, needs_bitwise: bool = False) -> OptimizerTrial:
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
        return OptimizerTrial(optimizer_class_name(layout.script_optimizer))
    try:
        return _run_trial(layout, needs_bitwise)
    except ValueError as error:
        trial_problem = str(error)
    except Exception as error:  # optimizers raise many exception types for unsupported tensors
        first_line, _, _ = str(error).strip().partition("\n")
        trial_problem = f"a trial step raised {type(error).__name__}: {first_line}"
    refusal_text = f"the optimizer {optimizer_class_name(layout.script_optimizer)} can't be used"
    if layout.partition_name:
        optimizer_advice = "Train with DDP, or choose an optimizer such as AdamW, SGD or Lion"
        raise ValueError(f"{refusal_text} on {layout.partition_name}: {trial_problem}. {optimizer_advice}")
    raise ValueError(f"{refusal_text}: {trial_problem}. Choose a different optimizer")


def optimizer_class_name(optimizer: Optimizer) -> str:
    """Return the class name, for example `timm.optim.lookahead.Lookahead(torch.optim.adamw.AdamW)`."""
    class_name = f"{type(optimizer).__module__}.{type(optimizer).__qualname__}"
    wrapped_optimizer = innermost_optimizer(optimizer)
    if wrapped_optimizer is optimizer:
        return class_name
    return f"{class_name}({optimizer_class_name(wrapped_optimizer)})"


def _run_trial(layout: ParameterLayout, needs_bitwise: bool) -> OptimizerTrial:
    """Run the trial steps with small copies of the parameters, and compare sharded with whole updates.

    Parameters of a group whose small copies have the same shape share one copy.

    Raises:
        ValueError: If the optimizer can't be used. The message states the reason.
    """
    names_by_group = layout.parameter_names_by_group()
    whole_shapes = layout.shapes()
    if len(names_by_group) != len(layout.script_optimizer.param_groups):
        raise ValueError("DeepSpeed rebuilds this optimizer without its parameter groups")
    state_optimizer = innermost_optimizer(layout.script_optimizer)
    if layout.has_flat_partitions and state_optimizer is not layout.script_optimizer:
        raise ValueError(
            "ZeRO steps one parameter group at a time, but the wrapped optimizer would step all groups"
        )
    if layout.arrangements() and state_optimizer.state:
        raise ValueError("the optimizer creates state for whole parameters before its first step")
    small_shapes = {name: _limit_shape(shape, MAX_SMALL_DIMENSION) for name, shape in whole_shapes.items()}
    # For each group, one parameter name per distinct small shape
    name_by_shape_per_group = [{small_shapes[name]: name for name in names} for names in names_by_group]
    distinct_shapes = [list(name_by_shape) for name_by_shape in name_by_shape_per_group]
    device = layout.local_tensors[0].device  # device of this rank's parameters
    initial_values, *gradient_sets = _draw_tensors(distinct_shapes, 1 + TRIAL_STEP_COUNT, device)
    # State that the optimizer has created before its first step, as Adagrad does
    initial_states: dict[str, dict[str, Any]] = {}
    if state_optimizer.state:
        initial_states = dict(zip(layout.parameters, layout.local_states(), strict=False))
    whole_copy = _OptimizerCopy(layout, initial_values, arrange=list)
    for name_by_shape, small_parameters in zip(name_by_shape_per_group, whole_copy.parameters, strict=True):
        for parameter_name, small_parameter in zip(name_by_shape.values(), small_parameters, strict=True):
            whole_copy.set_initial_state(
                small_parameter, initial_states.get(parameter_name, {}), whole_shapes[parameter_name]
            )
    whole_copy.run_steps(gradient_sets)
    sharded_copies = [_OptimizerCopy(layout, initial_values, arrange) for arrange in layout.arrangements()]
    for sharded_copy in sharded_copies:
        sharded_copy.run_steps(gradient_sets)
    if sharded_copies:
        _check_updates(layout, initial_values, whole_copy, sharded_copies)
    if sharded_copies and needs_bitwise:
        _check_bitwise(layout, [[whole_shapes[name] for name in names] for names in names_by_group])
    reference_copy = sharded_copies[0] if sharded_copies else whole_copy  # sharded as in training
    class_name = optimizer_class_name(layout.script_optimizer)
    trial = OptimizerTrial(class_name, changed_groups=whole_copy.changed_groups())
    for group_index, parameter_names in enumerate(names_by_group):
        for parameter_name in parameter_names:
            shape_index = distinct_shapes[group_index].index(small_shapes[parameter_name])
            # ZeRO joins a group's parameters into one flat parameter
            state_index = 0 if layout.has_flat_partitions else shape_index
            trial.state_by_parameter[parameter_name] = reference_copy.group_states(group_index)[state_index]
            whole_state = whole_copy.group_states(group_index)[shape_index]
            shaped_state = shaped_entries(whole_state, whole_copy.parameters[group_index][shape_index])
            trial.shaped_dtypes[parameter_name] = {
                state_name: state_tensor.dtype for state_name, state_tensor in shaped_state.items()
            }
    return trial


def _limit_shape(shape: Shape, max_dimension: int) -> Shape:
    return tuple(min(dimension_size, max_dimension) for dimension_size in shape)


class _OptimizerCopy:
    """Copy of the layout's optimizer that updates small parameters.

    Args:
        layout: Layout of the model and the optimizer to copy.
        initial_values: Each group's initial values of the whole small parameters.
        arrange: Function that maps a group's whole parameters to the tensors that this copy updates.
    """

    def __init__(self, layout: ParameterLayout, initial_values: TensorsByGroup, arrange: Arrangement):
        self.layout, self.arrange = layout, arrange
        self.parameters = [
            [nn.Parameter(initial_value.clone()) for initial_value in arrange(group_values)]
            for group_values in initial_values
        ]
        self.optimizer = _copy_optimizer(layout.script_optimizer, copied_objects={})
        for param_group, group_parameters in zip(self.optimizer.param_groups, self.parameters, strict=True):
            param_group.update(params=group_parameters, lr=TRIAL_LEARNING_RATE)

    def set_initial_state(
        self, small_parameter: nn.Parameter, whole_state: dict[str, Any], whole_shape: Shape
    ) -> None:
        """Set a small parameter's state to the original parameter's initial state, cut to the small shape."""
        if whole_state:
            corner_slices = tuple(slice(dimension_size) for dimension_size in small_parameter.shape)
            small_state = dict(whole_state)
            for state_name, state_value in whole_state.items():
                if isinstance(state_value, Tensor) and state_value.shape == whole_shape:
                    small_state[state_name] = state_value[corner_slices]
            innermost_optimizer(self.optimizer).state[small_parameter] = copy.deepcopy(small_state)

    def run_steps(self, gradient_sets: list[TensorsByGroup]) -> None:
        """Run one optimizer step for each set of gradients.

        Raises:
            ValueError: If the optimizer's state can't be saved.
        """
        attributes_before = self._numeric_attributes()
        for gradients_by_group in gradient_sets:
            for group_parameters, group_gradients in zip(self.parameters, gradients_by_group, strict=True):
                for parameter, gradient in zip(group_parameters, self.arrange(group_gradients), strict=True):
                    parameter.grad = gradient.clone()
            self.optimizer.step()
        self._require_storable_state(attributes_before)

    def group_states(self, group_index: int) -> list[dict[str, Any]]:
        """Return the optimizer's state for each parameter in a group."""
        state_by_parameter = innermost_optimizer(self.optimizer).state
        return [state_by_parameter.get(parameter, {}) for parameter in self.parameters[group_index]]

    def changed_groups(self) -> list[dict[str, Any]]:
        """Return each parameter group's settings that the trial steps have changed, such as a step count."""
        return changed_settings(self.optimizer.param_groups, self.layout.initial_settings)

    def flat_parameters(self, group_index: int) -> Tensor:
        """Return a group's parameter values as one flat tensor. This method is collective for FSDP2."""
        whole_parameters = [
            parameter.full_tensor() if hasattr(parameter, "full_tensor") else parameter
            for parameter in self.parameters[group_index]
        ]
        return torch.cat([parameter.detach().flatten() for parameter in whole_parameters])

    def _require_storable_state(self, attributes_before: dict[str, float]) -> None:
        """Raise ValueError unless a checkpoint can store everything that the trial steps have changed.

        Args:
            attributes_before: Result of _numeric_attributes() before the steps.
        """
        parameter_states: list[dict[str, Any]] = []
        for group_index in range(len(self.parameters)):
            parameter_states += self.group_states(group_index)
        for checked_state in (*parameter_states, *self.changed_groups()):
            for state_name, state_value in checked_state.items():
                if not can_store(state_value):
                    raise ValueError(
                        f"the optimizer state {state_name} is a {type(state_value).__name__},"
                        " which a checkpoint can't store"
                    )
        for attribute_name, attribute_value in self._numeric_attributes().items():
            if attributes_before.get(attribute_name) != attribute_value:
                raise ValueError(f"the optimizer stores {attribute_name} outside its state_dict()")
        # innermost_optimizer() descends only through wrappers of one optimizer
        optimizer_attributes = vars(innermost_optimizer(self.optimizer)).values()
        extra_state_keys = self.optimizer.state_dict().keys() - {"state", "param_groups"}
        if extra_state_keys or any(isinstance(attribute, Optimizer) for attribute in optimizer_attributes):
            raise ValueError(
                "the optimizer wraps several optimizers,"
                " or its state_dict() contains keys other than state and param_groups"
            )

    def _numeric_attributes(self) -> dict[str, float]:
        """Return the numbers that the optimizer stores as attributes, for example a step count."""
        attribute_items = vars(self.optimizer).items()
        return {attribute: number for attribute, number in attribute_items if type(number) in (int, float)}


def _check_updates(
    layout: ParameterLayout,
    initial_values: TensorsByGroup,
    whole_copy: _OptimizerCopy,
    sharded_copies: list[_OptimizerCopy],
) -> None:
    """Raise ValueError unless sharded and whole-parameter updates match up to rounding errors.

    The function also compares the parameter groups' settings, and checks ZeRO's requirements for the state.
    """
    for group_index, group_values in enumerate(initial_values):
        if not group_values:  # the group contains no trained parameters
            continue
        flat_initial_values = torch.cat([initial_value.flatten() for initial_value in group_values])
        expected_values = whole_copy.flat_parameters(group_index)
        padded_values = torch.cat([shard_copy.flat_parameters(group_index) for shard_copy in sharded_copies])
        sharded_values = padded_values[: len(expected_values)]  # without the padding of ZeRO's last partition
        max_difference = (expected_values - sharded_values).abs().max()
        max_update = (expected_values - flat_initial_values).abs().max()
        # With `not`, NaN also raises the error.
        if not max_difference <= UPDATE_TOLERANCE * max_update:
            raise ValueError("the update of an element depends on the whole parameter")
    for sharded_copy in sharded_copies:
        expected_settings = [group_settings(param_group) for param_group in whole_copy.optimizer.param_groups]
        if any(changed_settings(sharded_copy.optimizer.param_groups, expected_settings)):
            raise ValueError("the state of a parameter group depends on whole parameters")
    if any(whole_copy.changed_groups()) and not layout.is_stepped_in_one_call():
        raise ValueError(
            "the optimizer counts the steps of each parameter group,"
            " but ZeRO-3 calls step() several times in each training step"
        )
    if layout.has_flat_partitions:
        _require_splittable_state(sharded_copies[0])  # all copies have the same kinds of state


def _check_bitwise(layout: ParameterLayout, shapes_by_group: list[list[Shape]]) -> None:
    """Raise ValueError unless sharded and whole-parameter updates are bitwise identical.

    The comparison covers many different shard lengths.
    """
    shard_arrangements = [partial(_split_into_shards, shard_count) for shard_count in SHARD_COUNTS]
    # `list` keeps the parameters whole
    arrangements: list[Arrangement] = [list, *layout.arrangements(), *shard_arrangements]
    for max_dimension in ODD_DIMENSIONS:
        small_shapes = [
            list(dict.fromkeys(_limit_shape(whole_shape, max_dimension) for whole_shape in group_shapes))
            for group_shapes in shapes_by_group
        ]
        device = layout.local_tensors[0].device  # device of this rank's parameters
        initial_values, *gradient_sets = _draw_tensors(small_shapes, 1 + TRIAL_STEP_COUNT, device)
        # Use small values, so that rounding does not hide the last bits of an update.
        initial_values = [[value / 1024 for value in group_values] for group_values in initial_values]
        optimizer_copies = [_OptimizerCopy(layout, initial_values, arrange) for arrange in arrangements]
        whole_copy, *sharded_copies = optimizer_copies
        for optimizer_copy in optimizer_copies:
            optimizer_copy.run_steps(gradient_sets)
        nonempty_group_indices = [index for index, group_values in enumerate(initial_values) if group_values]
        for group_index in nonempty_group_indices:
            expected_values = whole_copy.flat_parameters(group_index)
            for sharded_copy in sharded_copies:
                if not torch.equal(expected_values, sharded_copy.flat_parameters(group_index)):
                    raise ValueError(
                        "updates of shards are not bitwise identical"
                        " to updates of whole parameters, which --deterministic requires"
                    )


def _split_into_shards(shard_count: int, whole_tensors: list[Tensor]) -> list[Tensor]:
    """Split each tensor into shards for `shard_count` devices, and return all shards."""
    shards: list[Tensor] = []
    for whole_tensor in whole_tensors:
        shards += whole_tensor.chunk(shard_count) if whole_tensor.ndim else [whole_tensor]
    return shards


def _require_splittable_state(partitioned_copy: _OptimizerCopy) -> None:
    """Raise ValueError unless ZeRO can split every non-scalar state tensor.

    ZeRO can split a state tensor that contains one fp32 value per parameter element.
    """
    for group_index, parameters in enumerate(partitioned_copy.parameters):
        for parameter, state in zip(parameters, partitioned_copy.group_states(group_index), strict=True):
            for state_name, state_value in state.items():
                is_array = isinstance(state_value, Tensor) and state_value.ndim
                if is_array and (state_value.shape != parameter.shape or state_value.dtype != torch.float32):
                    raise ValueError(
                        f"the optimizer state {state_name}"
                        " does not contain one fp32 number per parameter element"
                    )


def _draw_tensors(
    shapes_by_group: list[list[Shape]], set_count: int, device: torch.device
) -> list[TensorsByGroup]:
    """Return `set_count` sets of normally distributed tensors, identical on every rank."""
    generator = torch.Generator().manual_seed(0)

    def draw_set() -> TensorsByGroup:
        return [
            [torch.randn(tensor_shape, generator=generator).to(device) for tensor_shape in group_shapes]
            for group_shapes in shapes_by_group
        ]

    return [draw_set() for _ in range(set_count)]


def _copy_optimizer(optimizer: Optimizer, copied_objects: dict[int, Any]) -> Optimizer:
    """Copy an optimizer without its parameters and state. copy.deepcopy would lose subclass attributes.

    The copy has empty tensors instead of parameters, and an empty `state`.

    Args:
        optimizer: The optimizer, which may wrap a different optimizer.
        copied_objects: copy.deepcopy's memo, which maps an object's id to its copy. This function extends it.
    """
    optimizer_copy = object.__new__(type(optimizer))
    copied_objects[id(optimizer)] = optimizer_copy
    copied_objects[id(optimizer.state)] = defaultdict(dict)
    for param_group in optimizer.param_groups:
        copied_objects |= {id(parameter): torch.empty(0) for parameter in param_group["params"]}
    for attribute_value in vars(optimizer).values():
        if isinstance(attribute_value, Optimizer):
            _copy_optimizer(attribute_value, copied_objects)
    optimizer_copy.__dict__ = copy.deepcopy(vars(optimizer), copied_objects)
    return optimizer_copy
