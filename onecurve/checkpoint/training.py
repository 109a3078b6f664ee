"""Copies a run's tensors into snapshots, and a checkpoint's tensors to all ranks.

take() copies each rank's tensor pieces into CPU memory. gather() sends all pieces to the main process.
Therefore, each rank needs additional CPU memory for its pieces, and the main process needs enough for the
whole snapshot. restore() broadcasts one full tensor at a time.
"""

from collections.abc import Callable, Sequence
from itertools import chain
from typing import TYPE_CHECKING, Any

import torch
from accelerate import Accelerator
from accelerate.optimizer import AcceleratedOptimizer
from accelerate.utils import broadcast, broadcast_object_list
from torch import Tensor, nn

from onecurve.checkpoint import format as checkpoints
from onecurve.checkpoint.format import Checkpoint, TensorFile
from onecurve.checkpoint.gather import Gather
from onecurve.checkpoint.optimizer_state import OptimizerState
from onecurve.checkpoint.snapshot import Snapshot, Specs
from onecurve.data.class_names import SHOWN, ClassMatch, match_classes
from onecurve.distributed.layout import layout_of
from onecurve.system.text import some_of
from onecurve.upstream import deepspeed_, torch_

if TYPE_CHECKING:
    from onecurve.distributed.ema import EMA


class TrainingState:
    """A run's model, optimizer, EMA and loss scale, saved and restored together.

    The constructor is collective and must be called before the model's first forward pass.

    Args:
        accelerator: The started Accelerator.
        model: The prepared model.
        optimizer: The prepared optimizer.
        ema: The EMA of the weights, or None.
        classes: The run's class names. Each row of a checkpoint's head is restored to the class with the same
            name.

    Raises:
        ValueError: If the optimizer's state can't be saved, or the strategy would change the optimizer's
            update.
    """

    def __init__(
        self,
        accelerator: Accelerator,
        model: nn.Module,
        optimizer: AcceleratedOptimizer,
        ema: "EMA | None",
        classes: Sequence[str] = (),
    ):
        self.accelerator, self.ema, self.classes = accelerator, ema, classes
        self.layout = layout_of(model, optimizer)
        # An accelerator's exact_sum is set only with --deterministic.
        needs_bitwise = getattr(accelerator, "exact_sum", None) is not None
        self.optimizer = OptimizerState(self.layout, needs_bitwise)
        self.gathering = Gather(self.layout)
        self.snapshots: dict[str, Snapshot] = {}
        self.copy_event: torch.cuda.Event | None = None

    # --- Save

    def expected(self) -> dict[str, Specs]:
        """Return the dtypes and shapes of all tensors, by file name.

        Only the main thread may call this method, because that thread may change modules at any time.
        """
        return self._specs_by_file(self.optimizer.expected())

    def allocate(self, expected: dict[str, Specs]) -> None:
        """Allocate the snapshots before the first take(), because allocation takes longer than copying.

        Any thread may call this method. The saver's thread calls this method first.
        """
        if self.accelerator.device.type == "cuda":  # a new thread uses the host's first GPU by default
            # In a single-process job, the device's index is None.
            torch.cuda.set_device(self.accelerator.device.index or 0)
        for file, specs in expected.items():
            self._snapshot_for(file, specs).buffer.zero_()

    @torch.no_grad()
    def take(self) -> dict[str, Snapshot]:
        """Copy this rank's tensors into its snapshots, and return the snapshots by file name.

        gather() completes the snapshots. On a GPU, the copies are queued before the next step's kernels, so
        call wait_until_copied() before reading the snapshots.
        """
        layout = self.layout
        optimizer_specs, optimizer_tensors = self.optimizer.tensors()
        untrained = [*layout.buffers().items(), *layout.frozen_views()]
        files = {
            checkpoints.MODEL_FILE: chain(untrained, layout.views(layout.local)),
            checkpoints.OPTIMIZER_FILE: optimizer_tensors,
        }
        if self.ema:
            files[checkpoints.EMA_FILE] = chain(untrained, layout.views(self.ema.averages))
        specs = self._specs_by_file(optimizer_specs)
        for file, tensors in files.items():
            views = self.gathering.local_views(self._snapshot_for(file, specs[file]))
            for name, tensor in tensors:
                if name in views:
                    views[name].view(tensor.shape).copy_(tensor, non_blocking=True)
        self.gathering.hurry.clear()
        if self.accelerator.device.type == "cuda":
            self.copy_event = torch.cuda.Event()
            self.copy_event.record()
        return self.snapshots

    def gather(self) -> None:
        """Complete the main process's snapshots. Every rank calls this method in a background thread.

        Raises:
            NotGathered: If a rank does not answer.
        """
        self.wait_until_copied()
        self.gathering.run(self.snapshots)

    def wait_until_copied(self) -> None:
        if self.copy_event:
            self.copy_event.synchronize()

    def is_copied(self) -> bool:
        """Return True, without waiting, if take()'s copies are complete. A device error results in False."""
        try:
            return self.copy_event is None or self.copy_event.query()
        except RuntimeError:
            return False

    def scalars(self) -> dict[str, Any]:
        """Return the optimizer's scalars and the fp16 loss scale, for state.json.

        This method is collective.
        """
        return {"optimizer": self.optimizer.scalars(), "loss_scale": self._loss_scale()}

    def about(self) -> dict[str, Any]:
        """Return the optimizer's class and the names of its state tensors and scalars, for the manifest."""
        return {"optimizer": self.optimizer.about()}

    def _specs_by_file(self, optimizer: Specs) -> dict[str, Specs]:
        """Return the dtypes and shapes of all tensors, by file name.

        Args:
            optimizer: Dtypes and shapes of the optimizer's tensors.
        """
        parameters = {name: (torch.float32, shape) for name, shape in self.gathering.shapes.items()}
        buffers = {
            name: (_stored_dtype(tensor.dtype), tuple(tensor.shape))
            for name, tensor in self.layout.buffers().items()
        }
        model_specs = buffers | parameters
        specs = {checkpoints.MODEL_FILE: model_specs, checkpoints.OPTIMIZER_FILE: optimizer}
        return specs | ({checkpoints.EMA_FILE: model_specs} if self.ema else {})

    def _snapshot_for(self, file: str, specs: Specs) -> Snapshot:
        """Return the snapshot of this rank's tensor pieces in the file.

        If dtypes or shapes have changed, this method creates a new snapshot.
        """
        specs = self.gathering.local_specs(specs)
        if file not in self.snapshots or self.snapshots[file].specs != specs:
            pinned = self.accelerator.device.type == "cuda"
            self.snapshots[file] = Snapshot(specs, pinned, self.gathering.pause)
        return self.snapshots[file]

    # --- Restore

    def check(self, checkpoint: Checkpoint) -> None:
        """Raise ValueError unless the checkpoint's class names, tensor names and shapes match this run's."""
        self.row_orders(checkpoint)
        shapes, folder = self.gathering.shapes, checkpoint.folder
        buffers = {name: tuple(tensor.shape) for name, tensor in self.layout.buffers().items()}
        TensorFile(folder / checkpoints.MODEL_FILE).expect(shapes | buffers)
        if (folder / checkpoints.EMA_FILE).exists() != (self.ema is not None):
            article, verb = ("no", "uses") if self.ema else ("an", "does not use")
            raise ValueError(f"{folder} contains {article} EMA, but this recipe {verb} an EMA")
        if self.ema:
            TensorFile(folder / checkpoints.EMA_FILE).expect(shapes | buffers)

    def match(self, checkpoint: Checkpoint) -> ClassMatch:
        """Match this run's classes to the checkpoint's.

        Raises:
            ValueError: If the run's class names differ from the checkpoint's.
        """
        names = checkpoint.manifest.get("classes") if self.classes else ()
        match = match_classes(names or self.classes, self.classes)
        if not match.is_permutation:
            names_by_side = {"new": match.unknown, "missing": match.absent}
            differences = "; ".join(
                f"{side}: {some_of(classes, SHOWN)}" for side, classes in names_by_side.items() if classes
            )
            raise ValueError(
                f"{checkpoint.folder} was trained on different classes ({differences}). A resumed run can't"
                " change its classes. To start a new run with the head rows of known classes, use"
                " train_vit.py --weights."
            )
        return match

    def row_orders(self, checkpoint: Checkpoint) -> dict[str, Tensor]:
        """Map each head parameter's name to the checkpoint's row index for each class.

        If the checkpoint and this run have the same class order, the result is {}.
        """
        if (match := self.match(checkpoint)).is_identity:
            return {}
        from onecurve.models.timm_models import head_layers  # imported only if the class order differs

        heads, shapes = head_layers(self.layout.module), self.gathering.shapes
        names = [name for name in shapes if name.rpartition(".")[0] in heads]
        if not names or any(shapes[name][:1] != (len(self.classes),) for name in names):
            raise ValueError(
                f"{checkpoint.folder} lists the classes in a different order, but the model has no head with"
                " one row per class to reorder. Use data with the checkpoint's class order."
            )
        return dict.fromkeys(names, torch.from_numpy(match.labels))

    @torch.no_grad()
    def restore(
        self, checkpoint: Checkpoint | None, state: dict[str, Any], with_optimizer: bool = True
    ) -> None:
        """Restore a checkpoint's tensors and scalars. This method is collective.

        Args:
            checkpoint: The checkpoint on the main process, or None on other ranks. The main process
                broadcasts the tensors.
            state: Scalars saved with the checkpoint, as returned by scalars().
            with_optimizer: True to restore the optimizer's state. If False, the optimizer starts without
                state.
        """
        if with_optimizer:
            send_tensor, specs = self._make_sender(checkpoint, checkpoints.OPTIMIZER_FILE)
            self.optimizer.restore(broadcast_object_list([specs])[0], state, send_tensor)
        if self.ema:
            send_tensor, _ = self._make_sender(checkpoint, checkpoints.EMA_FILE)
            self.layout.fill(self.layout.views(self.ema.averages), send_tensor)
        self._restore_model(checkpoint, checkpoints.MODEL_FILE)
        self._set_loss_scale(state["loss_scale"])

    @torch.no_grad()
    def restore_evaluated(self, checkpoint: Checkpoint | None) -> None:
        """Load the checkpoint's EMA into the model, or the weights if the checkpoint contains no EMA.

        This method is collective. Call this method only after the last step, because the optimizer and the
        EMA keep their current state.

        Args:
            checkpoint: The checkpoint on the main process, or None on other ranks.
        """
        self._restore_model(checkpoint, checkpoints.EMA_FILE if self.ema else checkpoints.MODEL_FILE)

    def _restore_model(self, checkpoint: Checkpoint | None, file_name: str) -> None:
        """Restore the model's parameters from the given file, and its buffers from the raw weights' file."""
        layout, (send_tensor, _) = self.layout, self._make_sender(checkpoint, checkpoints.MODEL_FILE)
        for name, buffer in layout.buffers().items():
            buffer.copy_(send_tensor(name, buffer.shape, _stored_dtype(buffer.dtype)))
        send_tensor, _ = self._make_sender(checkpoint, file_name)
        layout.fill(chain(layout.views(layout.local), layout.frozen_views()), send_tensor)
        layout.sync()

    def _make_sender(
        self, checkpoint: Checkpoint | None, file_name: str
    ) -> tuple[Callable[..., Tensor], Specs | None]:
        """Return send() and, on the main process, the dtypes and shapes of the file's tensors.

        send(name, shape, dtype) broadcasts a tensor from the main process to each device. By default, send()
        uses the parameter's shape and fp32. send() reorders the head's rows to match this run's class order.
        """
        shapes, device = self.gathering.shapes, self.accelerator.device
        tensor_file = TensorFile(checkpoint.folder / file_name) if checkpoint else None
        row_orders = self.row_orders(checkpoint) if checkpoint else {}

        def send_tensor(
            name: str, shape: tuple[int, ...] | None = None, dtype: torch.dtype = torch.float32
        ) -> Tensor:
            if tensor_file:
                tensor, parameter = tensor_file.tensor(name), name.partition("/")[0]
                if parameter in row_orders and tensor.shape == shapes[parameter]:
                    tensor = tensor[row_orders[parameter]]
                tensor = tensor.to(device, dtype)
            else:
                tensor = torch.empty(shapes[name] if shape is None else shape, dtype=dtype, device=device)
            return broadcast(tensor)

        return send_tensor, tensor_file.specs() if tensor_file else None

    # --- fp16

    def _loss_scale(self) -> dict[str, float] | None:
        """Return the fp16 loss scale and the number of steps since the last overflow.

        Without fp16, the result is None.
        """
        zero_scale, scaler = deepspeed_.zero_loss_scale(self.layout.optimizer), self.accelerator.scaler
        if zero_scale is None and scaler is None:
            return None
        scale, good_steps = zero_scale or torch_.loss_scale(scaler)
        return {"scale": scale, "good_steps": good_steps}

    def _set_loss_scale(self, saved: dict[str, float] | None) -> None:
        """Restore the loss scale, which may have been saved under a different strategy.

        Only the loss scale's growth rate depends on the strategy.
        """
        if saved is None:
            return
        scale, good_steps = saved["scale"], int(saved["good_steps"])
        if deepspeed_.zero_loss_scale(self.layout.optimizer):
            deepspeed_.set_zero_loss_scale(self.layout.optimizer, scale, good_steps)
        elif self.accelerator.scaler is not None:
            torch_.set_loss_scale(self.accelerator.scaler, scale, good_steps)


def _stored_dtype(dtype: torch.dtype) -> torch.dtype:
    return torch.float32 if dtype.is_floating_point else dtype
