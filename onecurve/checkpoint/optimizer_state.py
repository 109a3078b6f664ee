"""Saves and restores all state of an optimizer.

`optimizer.safetensors` holds its tensors as `<parameter>/<state>`, `state.json` its scalars and the values
that it changes in its parameter groups, `manifest.json` its class and the names of its state.
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

Send = Callable[[str, tuple[int, ...], torch.dtype], Tensor]  # broadcasts a tensor of the main process


class OptimizerState:
    """The optimizer's state. Create it before the optimizer's first step. Collective.

    same_bits: as for try_out(). ValueError for an optimizer whose state can't be saved, or whose update the
    strategy would change.
    """

    def __init__(self, layout: Layout, same_bits: bool):
        self.layout, self.trial = layout, try_out(layout, same_bits)

    def about(self) -> dict[str, Any]:
        """The optimizer's class and the names of its state, for the manifest."""
        return {"class": self.trial.name, "state": self.trial.state_names()}

    # --- Save

    def expected(self) -> Specs:
        """Type and shape of the tensors that have their parameter's shape, known before the first step."""
        shapes = self.layout.shapes()
        return {
            f"{parameter}/{name}": (dtype, shapes[parameter])
            for parameter, state in self.trial.shaped.items()
            for name, dtype in state.items()
        }

    def tensors(self) -> tuple[Specs, Iterator[tuple[str, Tensor]]]:
        """Type and shape of every whole tensor, and (name, what this process has of it).

        Collective only for state of another shape in DTensors.
        """
        shapes, shaped = self.layout.shapes(), self.layout.shaped_state()
        others = {
            f"{parameter}/{name}": value
            for parameter, state in self.layout.other_state().items()
            for name, value in state.items()
            if _is_array(value)
        }
        specs = {
            f"{parameter}/{name}": (mine.dtype, shapes[parameter])
            for name, held in shaped.items()
            for mine, members in zip(held, self.layout.members(), strict=True)
            if mine is not None
            for parameter in members
        }
        specs |= {name: (tensor.dtype, tuple(tensor.shape)) for name, tensor in others.items()}
        return specs, chain(
            (
                (f"{parameter}/{name}", mine)
                for name, held in shaped.items()
                for parameter, mine in self.layout.own(held)
            ),
            others.items(),
        )

    def scalars(self) -> OptimizerScalars:
        """Scalars of the parameters and changed values of the groups, for state.json. Collective."""
        others, groups = self.layout.other_state(), self.layout.changed_groups()
        return {
            "scalars": {
                parameter: {n: checkpoints.encode_value(v) for n, v in state.items() if not _is_array(v)}
                for parameter, state in others.items()
            },
            "groups": [{n: checkpoints.encode_value(v) for n, v in group.items()} for group in groups],
        }

    # --- In

    def check(self, checkpoint: Checkpoint, state: dict[str, Any], moved: Collection[str] = ()) -> None:
        """Raises ValueError unless the checkpoint has this optimizer's state. One process calls it.

        state: the scalars of the checkpoint's state.json, as TrainingState.scalars() gave them. moved:
        parameters whose rows are in another order now.
        """
        folder, shapes = checkpoint.folder, self.layout.shapes()
        specs = TensorFile(folder / checkpoints.OPTIMIZER_FILE).specs()
        theirs, ours = checkpoint.manifest.get("optimizer"), self.about()
        if not isinstance(theirs, dict):
            raise ValueError(f"{folder / checkpoints.MANIFEST_FILE} does not describe its optimizer")
        known = [key for key in ours if theirs.get(key) is not None and ours[key] is not None]
        if any(theirs[key] != ours[key] for key in known):
            raise ValueError(
                f"{folder} has the state of {_words(theirs)}, and this run's optimizer is {_words(ours)}"
            )
        scalars, groups = state["optimizer"]["scalars"], state["optimizer"]["groups"]
        parameters = scalars.keys() | {name.rpartition("/")[0] for name in specs}
        if unknown := parameters - shapes.keys():
            raise ValueError(
                f"{folder} has optimizer state of {min(unknown)!r}, which this model does not train"
            )
        for name, dtype_and_shape in self.expected().items():
            if name in specs and specs[name] != dtype_and_shape:
                raise ValueError(f"{folder}'s optimizer state {name} has another shape or type than here")
        for name, (_, shape) in specs.items():
            parameter = name.rpartition("/")[0]
            if parameter in moved and shape != shapes[parameter] and math.prod(shape) > 1:
                raise ValueError(f"{folder}'s {name} can't follow the classes to their new order")
        here = len(self.layout.constants)
        if any(groups) and len(groups) != here:
            raise ValueError(f"{folder} has {len(groups)} parameter groups, and this run's optimizer {here}")
        for members in self.layout.members():
            found = [scalars[name] for name in members if scalars.get(name)]
            if any(one != found[0] for one in found):
                raise ValueError(
                    f"the optimizer state of {folder} has different scalars for parameters of one group, as"
                    " their numbers of steps, and ZeRO keeps one for all"
                )

    def restore(self, specs: Specs, state: dict[str, Any], send: Send) -> None:
        """Restores the state. specs: types and shapes in optimizer.safetensors. Collective."""
        layout, shapes = self.layout, self.layout.shapes()
        alike: dict[str, dict[str, torch.dtype]] = {}  # name -> parameter -> type
        for full_name, (dtype, shape) in sorted(specs.items()):
            parameter, _, name = full_name.rpartition("/")
            if shape == shapes[parameter]:
                alike.setdefault(name, {})[parameter] = dtype
            else:
                self._put(parameter, name, send(full_name, shape, dtype))
        for name, dtypes in alike.items():
            held = layout.make_state(name, dtypes)

            def receive(parameter: str, name: str = name) -> Tensor:
                dtype, shape = specs[f"{parameter}/{name}"]
                return send(f"{parameter}/{name}", shape, dtype)

            layout.fill(((n, mine) for n, mine in layout.own(held) if n in dtypes), receive)
        for parameter, values in state["optimizer"]["scalars"].items():
            for name, value in values.items():
                self._put(parameter, name, checkpoints.decode_value(value))
        groups = state["optimizer"]["groups"]
        for group, values, like in zip(layout.inner.param_groups, groups, self.trial.groups, strict=False):
            values = group_values(values)
            group |= {
                name: _placed(checkpoints.decode_value(v), like.get(name)) for name, v in values.items()
            }

    def _put(self, parameter: str, name: str, value: Any) -> None:
        like = self.trial.states.get(parameter, {}).get(name)
        self.layout.put_state(parameter, name, _placed(value, like))


def _placed(value: Any, like: Any) -> Any:
    """The value on the device, or sharded over the devices, as in the optimizer's trial; else on the CPU."""
    if not isinstance(value, Tensor) or not isinstance(like, Tensor):
        return value
    if hasattr(like, "placements"):
        from torch.distributed.tensor import DTensor, distribute_tensor

        assert isinstance(like, DTensor)
        return distribute_tensor(value, like.device_mesh, like.placements, src_data_rank=None)
    return value.to(like.device)


def _is_array(value: Any) -> bool:
    return isinstance(value, Tensor) and value.ndim > 0


def _words(about: dict[str, Any]) -> str:
    return f"{about.get('class') or 'an optimizer'} ({', '.join(map(str, about.get('state') or ['none']))})"
