"""A training's tensors into a snapshot on the main process, and back out of a checkpoint, on all processes.

Both are collective. One tensor at a time is gathered or sent: beside the training's own memory it takes the
snapshot on the main process's host, and one whole tensor on each device.
"""

from collections.abc import Callable, Iterable, Iterator
from itertools import chain
from typing import Any

import torch
import torch.distributed as dist
from accelerate import Accelerator
from accelerate.optimizer import AcceleratedOptimizer
from accelerate.utils import broadcast_object_list
from torch import Tensor, nn

from common import checkpoints
from common.checkpoints import Checkpoint, Snapshot, Specs, TensorFile
from common.layout import layout_of
from common.optim import EMA


class TrainingState:
    """Model, optimizer, EMA and loss scale of a prepared training. Made before the first forward."""

    def __init__(
        self, accelerator: Accelerator, model: nn.Module, optimizer: AcceleratedOptimizer, ema: EMA | None
    ):
        self.accelerator, self.ema = accelerator, ema
        self.layout = layout_of(model, optimizer)
        self.snapshots: dict[str, Snapshot] = {}
        self.copied: torch.cuda.Event | None = None

    # --- Out

    def expected(self) -> dict[str, Specs]:
        """What each snapshot will hold. Not for another thread: modules may change under it."""
        files = (checkpoints.MODEL, checkpoints.OPTIMIZER, *([checkpoints.EMA] if self.ema else []))
        return {file: self._specs(file, self.layout.expected_moments()) for file in files}

    def allocate(self, expected: dict[str, Specs]) -> None:
        """Makes the snapshots before they are needed, as new memory takes longer than the copy into it.

        Of the main process, in any thread, before the first take().
        """
        for file, specs in expected.items():
            self._snapshot(file, specs).buffer.zero_()

    @torch.no_grad()
    def take(self) -> dict[str, Snapshot]:
        """Copies everything into the snapshots: file name -> its content, empty but on the main process.

        On a GPU the copies are queued before the next step's kernels: wait_until_copied() before reading.
        """
        for file, tensors in self._tensors().items():
            if self.accelerator.is_main_process:
                snapshot = self._snapshot(file, self._specs(file, list(self.layout.moments())))
                for name, tensor in tensors:
                    snapshot.views[name].copy_(tensor, non_blocking=True)
            else:
                for _ in tensors:
                    pass
        if self.accelerator.device.type == "cuda":
            self.copied = torch.cuda.Event()
            self.copied.record()
        return self.snapshots

    def wait_until_copied(self) -> None:
        if self.copied:
            self.copied.synchronize()

    def scalars(self) -> dict[str, Any]:
        """For state.json: what an optimizer and fp16's loss scaling count."""
        return {"optimizer_steps": self.layout.optimizer_steps(), "loss_scale": self._loss_scale()}

    def _tensors(self) -> dict[str, Iterable[tuple[str, Tensor]]]:
        layout = self.layout
        tensors = {
            checkpoints.MODEL: chain(layout.untrained().items(), layout.whole(layout.held)),
            checkpoints.OPTIMIZER: self._whole_moments(),
        }
        return tensors | ({checkpoints.EMA: layout.whole(self.ema.averages)} if self.ema else {})

    def _whole_moments(self) -> Iterator[tuple[str, Tensor]]:
        for moment, held in self.layout.moments().items():
            for name, tensor in self.layout.whole(held):
                yield f"{name}/{moment}", tensor

    def _specs(self, file: str, moments: list[str]) -> Specs:
        trained = {name: (torch.float32, shape) for name, shape in self.layout.shapes().items()}
        if file == checkpoints.MODEL:
            buffers = self.layout.untrained().items()
            return {name: (_stored(tensor.dtype), tuple(tensor.shape)) for name, tensor in buffers} | trained
        if file == checkpoints.OPTIMIZER:
            return {f"{name}/{moment}": trained[name] for moment in moments for name in trained}
        return trained

    def _snapshot(self, file: str, specs: Specs) -> Snapshot:
        """The one that is used again and again; another one where the optimizer has other moments."""
        if file not in self.snapshots or self.snapshots[file].specs != specs:
            self.snapshots[file] = Snapshot(specs, pinned=self.accelerator.device.type == "cuda")
        return self.snapshots[file]

    # --- In

    def check(self, checkpoint: Checkpoint) -> None:
        """ValueError unless its tensors are this training's, in names and shapes. Called by one process."""
        shapes, folder = self.layout.shapes(), checkpoint.folder
        buffers = {name: tuple(tensor.shape) for name, tensor in self.layout.untrained().items()}
        TensorFile(folder / checkpoints.MODEL).expect(shapes | buffers)
        moments = TensorFile(folder / checkpoints.OPTIMIZER)
        names = {name.rpartition("/")[2] for name in moments.shapes()}
        moments.expect({f"{name}/{moment}": shape for moment in names for name, shape in shapes.items()})
        if (folder / checkpoints.EMA).exists() != (self.ema is not None):
            raise ValueError(f"{folder} {'lacks' if self.ema else 'has'} an EMA, other than this recipe")
        if self.ema:
            TensorFile(folder / checkpoints.EMA).expect(shapes)

    @torch.no_grad()
    def restore(self, checkpoint: Checkpoint | None, scalars: dict[str, Any]) -> None:
        """Everything as take() found it. checkpoint: the main process's; it sends its tensors to all."""
        layout = self.layout
        moments = TensorFile(checkpoint.folder / checkpoints.OPTIMIZER) if checkpoint else None
        names = sorted({name.rpartition("/")[2] for name in moments.shapes()}) if moments else None
        names = broadcast_object_list([names])[0]
        if names:
            for moment, held in layout.make_moments(names, scalars["optimizer_steps"]).items():
                layout.fill(held, self._sender(moments, "/" + moment))
        if self.ema:
            file = TensorFile(checkpoint.folder / checkpoints.EMA) if checkpoint else None
            layout.fill(self.ema.averages, self._sender(file))
        send = self._sender(TensorFile(checkpoint.folder / checkpoints.MODEL) if checkpoint else None)
        layout.fill(layout.held, send)
        for name, buffer in layout.untrained().items():
            buffer.copy_(send(name, buffer.shape, _stored(buffer.dtype)))
        layout.publish()
        self._set_loss_scale(scalars["loss_scale"])

    def _sender(self, file: TensorFile | None, ending: str = "") -> Callable[..., Tensor]:
        """whole(name): the main process's tensor name + ending, on each process's device."""
        shapes, device = self.layout.shapes(), self.accelerator.device

        def whole(name: str, shape: tuple | None = None, dtype: torch.dtype = torch.float32) -> Tensor:
            if file:
                tensor = file.tensor(name + ending).to(device, dtype)
            else:
                tensor = torch.empty(shapes[name] if shape is None else shape, dtype=dtype, device=device)
            if dist.is_initialized():
                dist.broadcast(tensor, 0)
            return tensor

        return whole

    # --- fp16

    def _loss_scale(self) -> dict[str, float] | None:
        """fp16's scale, and for how many steps it has not overflowed; None where there is none."""
        if scaler := self._deepspeed_scaler():
            return {"scale": scaler.cur_scale, "good_steps": scaler.cur_iter - scaler.last_overflow_iter - 1}
        if self.accelerator.scaler is None:
            return None
        state = self.accelerator.scaler.state_dict()
        return {"scale": state["scale"], "good_steps": state["_growth_tracker"]}

    def _set_loss_scale(self, saved: dict[str, float] | None) -> None:
        """From any strategy to any: they differ in how fast they grow, not in what a scale is."""
        if saved is None:
            return
        if scaler := self._deepspeed_scaler():
            scaler.cur_scale = saved["scale"]
            scaler.cur_iter = scaler.last_overflow_iter + 1 + int(saved["good_steps"])
        elif self.accelerator.scaler is not None:
            scaler = self.accelerator.scaler
            new = {"scale": saved["scale"], "_growth_tracker": int(saved["good_steps"])}
            scaler.load_state_dict(scaler.state_dict() | new)

    def _deepspeed_scaler(self) -> Any:
        scaler = getattr(self.layout.optimizer, "loss_scaler", None)
        return scaler if getattr(scaler, "dynamic", False) else None


def _stored(dtype: torch.dtype) -> torch.dtype:
    return torch.float32 if dtype.is_floating_point else dtype
