"""Saves and restores an optimizer's complete state.

A checkpoint stores the optimizer's state in three files. `optimizer.safetensors` contains the tensors, named
`<parameter>/<state>`. `state.json` contains the scalars and the parameter group settings that the optimizer
changed. `manifest.json` contains the optimizer's class and its state names.
"""

import math
from collections.abc import Callable, Collection, Iterator
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from onecurve.checkpoint import format as checkpoints
from onecurve.checkpoint.format import Checkpoint, OptimizerScalars, TensorFile, parameter_of
from onecurve.checkpoint.optimizer_trial import run_optimizer_trial
from onecurve.checkpoint.snapshot import Specs
from onecurve.distributed.layout import ParameterLayout, group_settings

# (name, shape, dtype) -> tensor from the main process
BroadcastFromMain = Callable[[str, tuple[int, ...], torch.dtype], Tensor]


class OptimizerState:
    """An optimizer's complete state, saved and restored under any strategy.

    The constructor is collective and must be called before the optimizer's first step.

    Args:
        layout: Layout of the model and the optimizer.
        needs_bitwise: True to require that sharded and whole-parameter updates are bitwise identical.

    Raises:
        ValueError: If the optimizer's state can't be saved, or the strategy would change the optimizer's
            update.
    """

    def __init__(self, layout: ParameterLayout, needs_bitwise: bool):
        self.layout = layout
        self.trial = run_optimizer_trial(layout, needs_bitwise)

    def manifest_entry(self) -> dict[str, Any]:
        """Return the optimizer's class and the names of its state tensors and scalars, for the manifest."""
        return {"class": self.trial.class_name, "state": self.trial.state_names()}

    # --- Save

    def expected_specs(self) -> Specs:
        """Return the dtype and shape of each state tensor shaped like its parameter.

        The trial determines these tensors before the optimizer's first step.
        """
        parameter_shapes = self.layout.shapes()
        return {
            f"{parameter_name}/{state_name}": (state_dtype, parameter_shapes[parameter_name])
            for parameter_name, dtype_by_state_name in self.trial.shaped_dtypes.items()
            for state_name, state_dtype in dtype_by_state_name.items()
        }

    def specs_and_pieces(self) -> tuple[Specs, Iterator[tuple[str, Tensor]]]:
        """Return each full state tensor's dtype and shape, and an iterator over (name, this rank's piece).

        This method is collective only if a DTensor's shape differs from its parameter's shape.
        """
        parameter_shapes, shaped_state = self.layout.shapes(), self.layout.shaped_state()
        unshaped_tensors = {
            f"{parameter_name}/{state_name}": state_value
            for parameter_name, parameter_state in self.layout.other_state().items()
            for state_name, state_value in parameter_state.items()
            if _is_nonscalar(state_value)
        }
        specs: Specs = {}
        names_by_tensor = self.layout.parameter_names_by_tensor()
        for state_name, local_tensors in shaped_state.items():
            for local_tensor, parameter_names in zip(local_tensors, names_by_tensor, strict=True):
                if local_tensor is not None:
                    for name in parameter_names:
                        specs[f"{name}/{state_name}"] = local_tensor.dtype, parameter_shapes[name]
        for full_name, unshaped_tensor in unshaped_tensors.items():
            specs[full_name] = unshaped_tensor.dtype, tuple(unshaped_tensor.shape)
        shaped_pieces = (
            (f"{parameter_name}/{state_name}", local_piece)
            for state_name, local_tensors in shaped_state.items()
            for parameter_name, local_piece in self.layout.named_pieces(local_tensors)
        )
        return specs, chain(shaped_pieces, unshaped_tensors.items())

    def scalars(self) -> OptimizerScalars:
        """Return each parameter's scalars and the changed parameter group settings, for state.json.

        This method is collective.
        """
        scalars_by_parameter: dict[str, dict[str, Any]] = {}
        for parameter_name, state in self.layout.other_state().items():
            scalars = {state_name: value for state_name, value in state.items() if not _is_nonscalar(value)}
            scalars_by_parameter[parameter_name] = _scalars_to_json(scalars)
        changed_groups = [_scalars_to_json(settings) for settings in self.layout.changed_groups()]
        return {"scalars": scalars_by_parameter, "groups": changed_groups}

    # --- Restore

    def check(self, checkpoint: Checkpoint, state: dict[str, Any], reordered: Collection[str] = ()) -> None:
        """Raise ValueError unless the checkpoint contains this optimizer's state.

        Only one process calls this method.

        Args:
            checkpoint: The verified checkpoint.
            state: Scalars from the checkpoint's state.json, as returned by TrainingState.scalars().
            reordered: Names of the parameters whose rows have a different order in this run.
        """
        saved_folder, parameter_shapes = checkpoint.folder, self.layout.shapes()
        stored_specs = TensorFile(saved_folder / checkpoints.OPTIMIZER_FILE).specs()
        saved_optimizer = checkpoint.manifest.get("optimizer")
        current_optimizer = self.manifest_entry()
        if not isinstance(saved_optimizer, dict):
            raise ValueError(
                f"{saved_folder / checkpoints.MANIFEST_FILE} does not describe the checkpoint's optimizer"
            )
        # Compare the classes and the state names, unless one of them is unknown
        for entry_name, current_entry in current_optimizer.items():
            saved_entry = saved_optimizer.get(entry_name)
            if None not in (saved_entry, current_entry) and saved_entry != current_entry:
                raise ValueError(
                    f"{saved_folder} contains the state of {_describe_optimizer(saved_optimizer)},"
                    f" but this run's optimizer is {_describe_optimizer(current_optimizer)}"
                )
        saved_scalars = state["optimizer"]["scalars"]  # by parameter name
        saved_groups = state["optimizer"]["groups"]  # changed settings of each parameter group
        saved_parameters = saved_scalars.keys() | {parameter_of(full_name) for full_name in stored_specs}
        if unknown_parameters := saved_parameters - parameter_shapes.keys():
            raise ValueError(
                f"{saved_folder} contains optimizer state for the parameter {min(unknown_parameters)!r},"
                " which this model does not train"
            )
        for full_name, dtype_and_shape in self.expected_specs().items():
            if full_name in stored_specs and stored_specs[full_name] != dtype_and_shape:
                raise ValueError(
                    f"the optimizer state {full_name} in {saved_folder}"
                    " has a different shape or dtype than in this run"
                )
        for full_name, (_, stored_shape) in stored_specs.items():
            parameter_name = parameter_of(full_name)
            has_parameter_shape = stored_shape == parameter_shapes[parameter_name]
            is_reorderable = has_parameter_shape or math.prod(stored_shape) <= 1  # one number has no order
            if parameter_name in reordered and not is_reorderable:
                raise ValueError(
                    f"the optimizer state {full_name} in {saved_folder}"
                    " can't be reordered to match the data's class order"
                )
        group_count = len(self.layout.initial_settings)
        if any(saved_groups) and len(saved_groups) != group_count:
            raise ValueError(
                f"{saved_folder} contains the state of {len(saved_groups)} parameter groups,"
                f" but this run's optimizer has {group_count} parameter groups"
            )
        # Under ZeRO, a local tensor contains a group's parameters, which then share their scalars
        for parameter_names in self.layout.parameter_names_by_tensor():
            scalars_in_tensor = [saved_scalars[name] for name in parameter_names if saved_scalars.get(name)]
            if any(parameter_scalars != scalars_in_tensor[0] for parameter_scalars in scalars_in_tensor):
                raise ValueError(
                    f"the optimizer state in {saved_folder} contains different scalars, such as step counts,"
                    " for parameters in the same group. ZeRO stores each scalar only once per group"
                )

    def restore(self, specs: Specs, state: dict[str, Any], broadcast_from_main: BroadcastFromMain) -> None:
        """Restore the optimizer's state on all ranks. This method is collective.

        Args:
            specs: Dtypes and shapes of the tensors in optimizer.safetensors.
            state: Scalars from the checkpoint's state.json, as returned by TrainingState.scalars().
            broadcast_from_main: Function that broadcasts a tensor from the main process.
        """
        layout, parameter_shapes = self.layout, self.layout.shapes()
        shaped_dtypes: dict[str, dict[str, torch.dtype]] = {}  # state name -> parameter name -> dtype
        for full_name, (dtype, shape) in sorted(specs.items()):
            parameter_name, _, state_name = full_name.rpartition("/")
            if shape == parameter_shapes[parameter_name]:
                shaped_dtypes.setdefault(state_name, {})[parameter_name] = dtype
            else:
                self._put_state(parameter_name, state_name, broadcast_from_main(full_name, shape, dtype))
        for state_name, dtype_by_parameter in shaped_dtypes.items():
            local_tensors = layout.make_state(state_name, dtype_by_parameter)

            def receive(parameter_name: str, state_name: str = state_name) -> Tensor:
                dtype, shape = specs[f"{parameter_name}/{state_name}"]
                return broadcast_from_main(f"{parameter_name}/{state_name}", shape, dtype)

            local_pieces = (
                (parameter_name, local_piece)
                for parameter_name, local_piece in layout.named_pieces(local_tensors)
                if parameter_name in dtype_by_parameter
            )
            layout.fill_pieces(local_pieces, receive)
        for parameter_name, saved_scalars in state["optimizer"]["scalars"].items():
            for state_name, json_value in saved_scalars.items():
                self._put_state(parameter_name, state_name, checkpoints.scalar_from_json(json_value))
        param_groups = layout.script_optimizer.param_groups
        saved_groups = state["optimizer"]["groups"]
        # The lists may differ in length if no group has changed settings, or if the trial was not needed
        for param_group, saved_settings, trial_settings in zip(
            param_groups, saved_groups, self.trial.changed_groups, strict=False
        ):
            for setting_name, json_value in group_settings(saved_settings).items():
                setting_value = checkpoints.scalar_from_json(json_value)
                param_group[setting_name] = _place_like(setting_value, trial_settings.get(setting_name))

    def _put_state(self, parameter_name: str, state_name: str, state_value: Any) -> None:
        """Set a parameter's state to a whole value, placed on the device or sharded as in the trial."""
        trial_value = self.trial.state_by_parameter.get(parameter_name, {}).get(state_name)
        self.layout.put_state(parameter_name, state_name, _place_like(state_value, trial_value))


def _place_like(value: Any, trial_value: Any) -> Any:
    """Move the value to the device of the trial's value, or shard it like the trial's value.

    If the trial's value is not a tensor, the value stays on the CPU.
    """
    if not isinstance(value, Tensor) or not isinstance(trial_value, Tensor):
        return value
    if hasattr(trial_value, "placements"):
        from torch.distributed.tensor import DTensor, distribute_tensor

        assert isinstance(trial_value, DTensor)
        # With src_data_rank=None, each rank takes its shard from its own copy of the value
        return distribute_tensor(value, trial_value.device_mesh, trial_value.placements, src_data_rank=None)
    return value.to(trial_value.device)


def _scalars_to_json(scalar_by_name: dict[str, Any]) -> dict[str, Any]:
    return {scalar_name: checkpoints.scalar_to_json(scalar) for scalar_name, scalar in scalar_by_name.items()}


def _is_nonscalar(state_value: Any) -> bool:
    return isinstance(state_value, Tensor) and state_value.ndim > 0


def _describe_optimizer(optimizer_entry: dict[str, Any]) -> str:
    """Return the class and state names in a manifest's optimizer entry, for an error message."""
    class_name = optimizer_entry.get("class") or "an optimizer"
    state_names = ", ".join(map(str, optimizer_entry.get("state") or ["none"]))
    return f"{class_name} ({state_names})"
