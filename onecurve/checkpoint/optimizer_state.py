"""Saves and restores the complete state of an optimizer.

The state is divided among three files. `optimizer.safetensors` contains the tensors, named
`<parameter>/<state>`. `state.json` contains the scalars and the settings that the optimizer changed in its
parameter groups. `manifest.json` contains the optimizer's class and the names of its state.
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
from onecurve.distributed.layout import Layout, group_values

Send = Callable[[str, tuple[int, ...], torch.dtype], Tensor]  # broadcasts a tensor from the main process


class OptimizerState:
    """State of an optimizer. Create this object before the optimizer's first step. Collective.

    Args:
        same_bits: See try_out().

    Raises:
        ValueError: If the optimizer's state can't be saved, or the strategy would change its update.
    """

    def __init__(self, layout: Layout, same_bits: bool):
        self.layout, self.trial = layout, try_out(layout, same_bits)

    def about(self) -> dict[str, Any]:
        """Return the optimizer's class and the names of its state tensors and scalars, for the manifest."""
        return {"class": self.trial.name, "state": self.trial.state_names()}

    # --- Save

    def expected(self) -> Specs:
        """Return the dtype and shape of the state tensors that have the same shape as their parameter.

        These tensors are known before the first step.
        """
        shapes = self.layout.shapes()
        return {
            f"{parameter}/{name}": (dtype, shapes[parameter])
            for parameter, state in self.trial.shaped.items()
            for name, dtype in state.items()
        }

    def tensors(self) -> tuple[Specs, Iterator[tuple[str, Tensor]]]:
        """Return the dtype and shape of every full tensor, and an iterator of (name, this rank's part).

        Collective only for DTensors whose shape differs from their parameter's shape.
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
                for parameter, piece in self.layout.own(local_tensors)
            ),
            unshaped.items(),
        )

    def scalars(self) -> OptimizerScalars:
        """Return the scalars of parameters and the changed group settings, for state.json. Collective."""
        states, groups = self.layout.other_state(), self.layout.changed_groups()
        return {
            "scalars": {
                parameter: {n: checkpoints.encode_value(v) for n, v in state.items() if not _is_array(v)}
                for parameter, state in states.items()
            },
            "groups": [{n: checkpoints.encode_value(v) for n, v in group.items()} for group in groups],
        }

    # --- Restore

    def check(self, checkpoint: Checkpoint, state: dict[str, Any], moved: Collection[str] = ()) -> None:
        """Raise ValueError unless the checkpoint contains this optimizer's state. Called by one process.

        Args:
            state: Scalars from the checkpoint's state.json, as returned by TrainingState.scalars().
            moved: Parameters whose rows are in a different order in this run.
        """
        folder, shapes = checkpoint.folder, self.layout.shapes()
        specs = TensorFile(folder / checkpoints.OPTIMIZER_FILE).specs()
        saved, current = checkpoint.manifest.get("optimizer"), self.about()
        if not isinstance(saved, dict):
            raise ValueError(f"{folder / checkpoints.MANIFEST_FILE} does not describe its optimizer")
        known = [key for key in current if saved.get(key) is not None and current[key] is not None]
        if any(saved[key] != current[key] for key in known):
            raise ValueError(
                f"{folder} has the state of {_describe(saved)}, but this run's optimizer is"
                f" {_describe(current)}"
            )
        scalars, groups = state["optimizer"]["scalars"], state["optimizer"]["groups"]
        parameters = scalars.keys() | {name.rpartition("/")[0] for name in specs}
        if unknown := parameters - shapes.keys():
            raise ValueError(
                f"{folder} contains optimizer state of {min(unknown)!r}, which this model does not train"
            )
        for name, dtype_and_shape in self.expected().items():
            if name in specs and specs[name] != dtype_and_shape:
                raise ValueError(f"{folder}'s optimizer state {name} has a different shape or dtype")
        for name, (_, shape) in specs.items():
            parameter = name.rpartition("/")[0]
            if parameter in moved and shape != shapes[parameter] and math.prod(shape) > 1:
                raise ValueError(f"{folder}'s {name} can't follow the classes to their new order")
        group_count = len(self.layout.constants)
        if any(groups) and len(groups) != group_count:
            raise ValueError(
                f"{folder} has {len(groups)} parameter groups, but this run's optimizer has {group_count}"
            )
        for members in self.layout.members():
            saved_scalars = [scalars[name] for name in members if scalars.get(name)]
            if any(values != saved_scalars[0] for values in saved_scalars):
                raise ValueError(
                    f"the optimizer state of {folder} has different scalars, such as step counts, for"
                    " parameters of one group. ZeRO keeps only one value per group."
                )

    def restore(self, specs: Specs, state: dict[str, Any], send: Send) -> None:
        """Restore the optimizer's state. Collective.

        specs: dtypes and shapes of the tensors in optimizer.safetensors.
        """
        layout, shapes = self.layout, self.layout.shapes()
        shaped: dict[str, dict[str, torch.dtype]] = {}  # state name -> parameter -> dtype
        for full_name, (dtype, shape) in sorted(specs.items()):
            parameter, _, name = full_name.rpartition("/")
            if shape == shapes[parameter]:
                shaped.setdefault(name, {})[parameter] = dtype
            else:
                self._put(parameter, name, send(full_name, shape, dtype))
        for name, dtypes in shaped.items():
            local_tensors = layout.make_state(name, dtypes)

            def receive(parameter: str, name: str = name) -> Tensor:
                dtype, shape = specs[f"{parameter}/{name}"]
                return send(f"{parameter}/{name}", shape, dtype)

            layout.fill(((n, piece) for n, piece in layout.own(local_tensors) if n in dtypes), receive)
        for parameter, values in state["optimizer"]["scalars"].items():
            for name, value in values.items():
                self._put(parameter, name, checkpoints.decode_value(value))
        groups = state["optimizer"]["groups"]
        for group, saved, trial in zip(layout.inner.param_groups, groups, self.trial.groups, strict=False):
            values = group_values(saved)
            group |= {
                name: _placed(checkpoints.decode_value(v), trial.get(name)) for name, v in values.items()
            }

    def _put(self, parameter: str, name: str, value: Any) -> None:
        example = self.trial.states.get(parameter, {}).get(name)
        self.layout.put_state(parameter, name, _placed(value, example))


def _placed(value: Any, example: Any) -> Any:
    """Return the value on the same device, or with the same sharding, as the example from the trial.

    If there is no example, the value stays on the CPU.
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


def _describe(optimizer: dict[str, Any]) -> str:
    state = ", ".join(map(str, optimizer.get("state") or ["none"]))
    return f"{optimizer.get('class') or 'an optimizer'} ({state})"
