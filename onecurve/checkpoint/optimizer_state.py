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
from onecurve.checkpoint.format import Checkpoint, OptimizerScalars, TensorFile
from onecurve.checkpoint.optimizer_trial import try_out
from onecurve.checkpoint.snapshot import Specs
from onecurve.distributed.layout import Layout, group_settings

# (name, shape, dtype) -> tensor from the main process
SendTensor = Callable[[str, tuple[int, ...], torch.dtype], Tensor]


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

    def __init__(self, layout: Layout, needs_bitwise: bool):
        self.layout, self.trial = layout, try_out(layout, needs_bitwise)

    def about(self) -> dict[str, Any]:
        """Return the optimizer's class and the names of its state tensors and scalars, for the manifest."""
        return {"class": self.trial.name, "state": self.trial.state_names()}

    # --- Save

    def expected(self) -> Specs:
        """Return the dtype and shape of each state tensor shaped like its parameter.

        State tensors shaped like their parameter are known before the optimizer's first step.
        """
        shapes = self.layout.shapes()
        return {
            f"{parameter}/{name}": (dtype, shapes[parameter])
            for parameter, state in self.trial.shaped.items()
            for name, dtype in state.items()
        }

    def tensors(self) -> tuple[Specs, Iterator[tuple[str, Tensor]]]:
        """Return each full state tensor's dtype and shape, and an iterator over (name, this rank's piece).

        This method is collective only if a DTensor's shape differs from its parameter's shape.
        """
        shapes, shaped = self.layout.shapes(), self.layout.shaped_state()
        unshaped = {
            f"{parameter}/{name}": value
            for parameter, state in self.layout.other_state().items()
            for name, value in state.items()
            if _is_array(value)
        }
        specs = {
            f"{parameter}/{name}": (local.dtype, shapes[parameter])
            for name, local_tensors in shaped.items()
            for local, members in zip(local_tensors, self.layout.members(), strict=True)
            if local is not None
            for parameter in members
        }
        specs |= {name: (tensor.dtype, tuple(tensor.shape)) for name, tensor in unshaped.items()}
        return specs, chain(
            (
                (f"{parameter}/{name}", piece)
                for name, local_tensors in shaped.items()
                for parameter, piece in self.layout.views(local_tensors)
            ),
            unshaped.items(),
        )

    def scalars(self) -> OptimizerScalars:
        """Return each parameter's scalars and the changed parameter group settings, for state.json.

        This method is collective.
        """
        states, groups = self.layout.other_state(), self.layout.changed_groups()
        return {
            "scalars": {
                parameter: {
                    name: checkpoints.encode_value(value)
                    for name, value in state.items()
                    if not _is_array(value)
                }
                for parameter, state in states.items()
            },
            "groups": [
                {name: checkpoints.encode_value(value) for name, value in group.items()} for group in groups
            ],
        }

    # --- Restore

    def check(self, checkpoint: Checkpoint, state: dict[str, Any], reordered: Collection[str] = ()) -> None:
        """Raise ValueError unless the checkpoint contains this optimizer's state.

        Only one process calls this method.

        Args:
            checkpoint: The verified checkpoint.
            state: Scalars from the checkpoint's state.json, as returned by TrainingState.scalars().
            reordered: Names of the parameters whose rows have a different order in this run.
        """
        folder, shapes = checkpoint.folder, self.layout.shapes()
        specs = TensorFile(folder / checkpoints.OPTIMIZER_FILE).specs()
        saved, current = checkpoint.manifest.get("optimizer"), self.about()
        if not isinstance(saved, dict):
            raise ValueError(
                f"{folder / checkpoints.MANIFEST_FILE} does not describe the checkpoint's optimizer"
            )
        comparable_keys = [key for key in current if saved.get(key) is not None and current[key] is not None]
        if any(saved[key] != current[key] for key in comparable_keys):
            raise ValueError(
                f"{folder} contains the state of {_describe_optimizer(saved)}, but this run's optimizer is"
                f" {_describe_optimizer(current)}"
            )
        scalars, groups = state["optimizer"]["scalars"], state["optimizer"]["groups"]
        parameters = scalars.keys() | {name.rpartition("/")[0] for name in specs}
        if unknown := parameters - shapes.keys():
            raise ValueError(
                f"{folder} contains optimizer state for the parameter {min(unknown)!r}, which this model does"
                " not train"
            )
        for name, dtype_and_shape in self.expected().items():
            if name in specs and specs[name] != dtype_and_shape:
                raise ValueError(
                    f"the optimizer state {name} in {folder} has a different shape or dtype than in this run"
                )
        for name, (_, shape) in specs.items():
            parameter = name.rpartition("/")[0]
            if parameter in reordered and shape != shapes[parameter] and math.prod(shape) > 1:
                raise ValueError(
                    f"the optimizer state {name} in {folder} can't be reordered to match the data's class"
                    " order"
                )
        group_count = len(self.layout.initial_settings)
        if any(groups) and len(groups) != group_count:
            raise ValueError(
                f"{folder} contains the state of {len(groups)} parameter groups, but this run's optimizer has"
                f" {group_count} parameter groups"
            )
        for members in self.layout.members():
            saved_scalars = [scalars[name] for name in members if scalars.get(name)]
            if any(parameter_scalars != saved_scalars[0] for parameter_scalars in saved_scalars):
                raise ValueError(
                    f"the optimizer state in {folder} contains different scalars, such as step counts, for"
                    " parameters in the same group. ZeRO stores each scalar only once per group"
                )

    def restore(self, specs: Specs, state: dict[str, Any], send_tensor: SendTensor) -> None:
        """Restore the optimizer's state on all ranks. This method is collective.

        Args:
            specs: Dtypes and shapes of the tensors in optimizer.safetensors.
            state: Scalars from the checkpoint's state.json, as returned by TrainingState.scalars().
            send_tensor: Function that broadcasts a tensor from the main process.
        """
        layout, shapes = self.layout, self.layout.shapes()
        shaped_dtypes: dict[str, dict[str, torch.dtype]] = {}  # state name -> parameter name -> dtype
        for full_name, (dtype, shape) in sorted(specs.items()):
            parameter, _, name = full_name.rpartition("/")
            if shape == shapes[parameter]:
                shaped_dtypes.setdefault(name, {})[parameter] = dtype
            else:
                self._put_state(parameter, name, send_tensor(full_name, shape, dtype))
        for name, dtypes in shaped_dtypes.items():
            local_tensors = layout.make_state(name, dtypes)

            def receive(parameter: str, name: str = name) -> Tensor:
                dtype, shape = specs[f"{parameter}/{name}"]
                return send_tensor(f"{parameter}/{name}", shape, dtype)

            pieces = ((member, piece) for member, piece in layout.views(local_tensors) if member in dtypes)
            layout.fill(pieces, receive)
        for parameter, values in state["optimizer"]["scalars"].items():
            for name, value in values.items():
                self._put_state(parameter, name, checkpoints.decode_value(value))
        groups = state["optimizer"]["groups"]
        for group, saved_settings, trial_settings in zip(
            layout.script_optimizer.param_groups, groups, self.trial.groups, strict=False
        ):
            for name, encoded in group_settings(saved_settings).items():
                group[name] = _place_like(checkpoints.decode_value(encoded), trial_settings.get(name))

    def _put_state(self, parameter: str, name: str, value: Any) -> None:
        example = self.trial.states.get(parameter, {}).get(name)
        self.layout.put_state(parameter, name, _place_like(value, example))


def _place_like(value: Any, example: Any) -> Any:
    """Move the value to the device of the trial's example, or shard it like the example.

    Without an example, the value stays on the CPU.
    """
    if not isinstance(value, Tensor) or not isinstance(example, Tensor):
        return value
    if hasattr(example, "placements"):
        from torch.distributed.tensor import DTensor, distribute_tensor

        assert isinstance(example, DTensor)
        return distribute_tensor(value, example.device_mesh, example.placements, src_data_rank=None)
    return value.to(example.device)


def _is_array(value: Any) -> bool:
    return isinstance(value, Tensor) and value.ndim > 0


def _describe_optimizer(optimizer: dict[str, Any]) -> str:
    state = ", ".join(map(str, optimizer.get("state") or ["none"]))
    return f"{optimizer.get('class') or 'an optimizer'} ({state})"
