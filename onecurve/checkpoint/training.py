"""Copies a run's tensors into snapshots, and a checkpoint's tensors to all ranks.

take_snapshots() copies each rank's tensor pieces into CPU memory. gather() sends all pieces to the main
process. Therefore, each rank needs additional CPU memory for its pieces, and the main process needs enough
for the whole snapshot. restore() broadcasts one full tensor at a time.
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
from onecurve.checkpoint.gather import PieceGatherer
from onecurve.checkpoint.optimizer_state import OptimizerState
from onecurve.checkpoint.snapshot import Snapshot, Specs
from onecurve.distributed.strategy_layouts import layout_of
from onecurve.upstream import torch_

if TYPE_CHECKING:
    from onecurve.distributed.ema import EMA
    from onecurve.models.class_names import ClassMatch


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
        self.gatherer = PieceGatherer(self.layout)
        self.snapshots: dict[str, Snapshot] = {}
        self.copy_event: torch.cuda.Event | None = None

    # --- Save

    def expected_specs(self) -> dict[str, Specs]:
        """Return the dtypes and shapes of the tensors known before the first step, by file name.

        Only the main thread may call this method, because that thread may change modules at any time.
        """
        return self._specs_by_file(self.optimizer.expected_specs())

    def allocate(self, specs_by_file: dict[str, Specs]) -> None:
        """Allocate the snapshots before they are first taken, because allocation takes longer than copying.

        Any thread may call this method. The saver's thread calls this method first.

        Args:
            specs_by_file: Result of expected_specs().
        """
        if self.accelerator.device.type == "cuda":  # a new thread uses the host's first GPU by default
            # In a single-process job, the device's index is None.
            torch.cuda.set_device(self.accelerator.device.index or 0)
        for file_name, specs in specs_by_file.items():
            self._snapshot_for(file_name, specs).buffer.zero_()  # makes the OS map all pages now

    @torch.no_grad()
    def take_snapshots(self) -> dict[str, Snapshot]:
        """Copy this rank's tensors into its snapshots, and return the snapshots by file name.

        gather() completes the snapshots. On a GPU, the copies are queued before the next step's kernels, so
        call wait_until_copied() before reading the snapshots.
        """
        layout = self.layout
        optimizer_specs, optimizer_pieces = self.optimizer.specs_and_pieces()
        untrained_tensors = [*layout.buffers().items(), *layout.frozen_pieces()]
        pieces_by_file = {
            checkpoints.MODEL_FILE: chain(untrained_tensors, layout.named_pieces(layout.local_tensors)),
            checkpoints.OPTIMIZER_FILE: optimizer_pieces,
        }
        if self.ema:
            averaged_pieces = layout.named_pieces(self.ema.averages)
            pieces_by_file[checkpoints.EMA_FILE] = chain(untrained_tensors, averaged_pieces)
        specs_by_file = self._specs_by_file(optimizer_specs)
        for file_name, named_pieces in pieces_by_file.items():
            snapshot = self._snapshot_for(file_name, specs_by_file[file_name])
            snapshot_views = self.gatherer.local_views(snapshot)
            for tensor_name, piece in named_pieces:
                if tensor_name in snapshot_views:  # otherwise, a different rank sends this piece
                    snapshot_views[tensor_name].view(piece.shape).copy_(piece, non_blocking=True)
        self.gatherer.pauses_disabled.clear()  # training continues, so the save must leave time for it
        if self.accelerator.device.type == "cuda":
            self.copy_event = torch.cuda.Event()
            self.copy_event.record()
        return self.snapshots

    def gather(self) -> None:
        """Complete the main process's snapshots. Every rank calls this method in a background thread.

        Raises:
            GatherError: If a rank does not answer.
        """
        self.wait_until_copied()
        self.gatherer.complete_snapshots(self.snapshots)

    def wait_until_copied(self) -> None:
        """Block until the device has finished the copies that take_snapshots() queued."""
        if self.copy_event:
            self.copy_event.synchronize()

    def is_copied(self) -> bool:
        """Return True, without waiting, if the snapshots are copied. A device error results in False."""
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
        return {"optimizer": self.optimizer.manifest_entry()}

    def _specs_by_file(self, optimizer_specs: Specs) -> dict[str, Specs]:
        """Return the dtypes and shapes of a checkpoint's tensors, by file name.

        Args:
            optimizer_specs: Dtypes and shapes of the optimizer's tensors.
        """
        parameter_specs = {
            parameter_name: (torch.float32, shape) for parameter_name, shape in self.gatherer.shapes.items()
        }
        buffer_specs = {
            buffer_name: (_dtype_in_file(buffer.dtype), tuple(buffer.shape))
            for buffer_name, buffer in self.layout.buffers().items()
        }
        model_specs = buffer_specs | parameter_specs
        specs_by_file = {checkpoints.MODEL_FILE: model_specs, checkpoints.OPTIMIZER_FILE: optimizer_specs}
        if self.ema:
            specs_by_file[checkpoints.EMA_FILE] = model_specs
        return specs_by_file

    def _snapshot_for(self, file_name: str, whole_specs: Specs) -> Snapshot:
        """Return the snapshot of this rank's tensor pieces in the file, and create it if necessary.

        If dtypes or shapes have changed, a new snapshot replaces the previous one.
        """
        local_specs = self.gatherer.local_specs(whole_specs)
        snapshot = self.snapshots.get(file_name)
        if snapshot is None or snapshot.specs != local_specs:
            is_pinned = self.accelerator.device.type == "cuda"
            snapshot = self.snapshots[file_name] = Snapshot(local_specs, is_pinned, self.gatherer.pause)
        return snapshot

    # --- Restore

    def check(self, checkpoint: Checkpoint) -> None:
        """Raise ValueError unless the checkpoint's class names, tensor names and shapes match this run's.

        Both must use an EMA, or neither. The optimizer's state is not checked.
        """
        self.row_orders(checkpoint)  # raises ValueError if the class names do not match
        checkpoint_folder = checkpoint.folder
        buffer_shapes = {name: tuple(buffer.shape) for name, buffer in self.layout.buffers().items()}
        model_shapes = self.gatherer.shapes | buffer_shapes
        TensorFile(checkpoint_folder / checkpoints.MODEL_FILE).require_shapes(model_shapes)
        if (checkpoint_folder / checkpoints.EMA_FILE).exists() != (self.ema is not None):
            article, verb = ("no", "uses") if self.ema else ("an", "does not use")
            raise ValueError(f"{checkpoint_folder} contains {article} EMA, but this recipe {verb} an EMA")
        if self.ema:
            TensorFile(checkpoint_folder / checkpoints.EMA_FILE).require_shapes(model_shapes)

    def match(self, checkpoint: Checkpoint) -> "ClassMatch":
        """Match this run's classes, by name, to the head rows of the checkpoint.

        The classes may be in a different order.

        Raises:
            ValueError: If the run's class names differ from the checkpoint's.
        """
        from onecurve.models.class_names import match_resumed_classes  # only a run with class names needs it

        saved_classes = checkpoint.manifest.get("classes") if self.classes else ()
        return match_resumed_classes(saved_classes or self.classes, self.classes, str(checkpoint.folder))

    def row_orders(self, checkpoint: Checkpoint) -> dict[str, Tensor]:
        """Map each head parameter's name to the checkpoint's row index for each class.

        If the checkpoint and this run have the same class order, the result is {}.

        Raises:
            ValueError: If the class names differ, or the model has no head that can be reordered.
        """
        class_match = self.match(checkpoint) if self.classes else None
        if class_match is None or class_match.is_identity:
            return {}
        from onecurve.models.timm_models import head_layers  # imported only if the class order differs

        head_layer_names = head_layers(self.layout.module)
        head_shapes: dict[str, tuple[int, ...]] = {}
        for parameter_name, shape in self.gatherer.shapes.items():
            layer_name, _, _ = parameter_name.rpartition(".")
            if layer_name in head_layer_names:
                head_shapes[parameter_name] = shape
        class_count = len(self.classes)
        if not head_shapes or any(shape[:1] != (class_count,) for shape in head_shapes.values()):
            raise ValueError(
                f"{checkpoint.folder} lists the classes in a different order,"
                " but the model has no head with one row per class to reorder."
                " Use data with the checkpoint's class order."
            )
        return dict.fromkeys(head_shapes, torch.from_numpy(class_match.labels))

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
            broadcast_from_main, main_specs = self._open_broadcaster(checkpoint, checkpoints.OPTIMIZER_FILE)
            (optimizer_specs,) = broadcast_object_list([main_specs])
            self.optimizer.restore(optimizer_specs, state, broadcast_from_main)
        if self.ema:
            broadcast_from_main, _ = self._open_broadcaster(checkpoint, checkpoints.EMA_FILE)
            self.layout.fill_pieces(self.layout.named_pieces(self.ema.averages), broadcast_from_main)
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

    def _restore_model(self, checkpoint: Checkpoint | None, weight_file_name: str) -> None:
        """Restore the model's parameters from the given file, and its buffers from the raw weights' file.

        This method is collective.
        """
        layout = self.layout
        broadcast_from_main, _ = self._open_broadcaster(checkpoint, checkpoints.MODEL_FILE)
        for buffer_name, buffer in layout.buffers().items():
            buffer.copy_(broadcast_from_main(buffer_name, buffer.shape, _dtype_in_file(buffer.dtype)))
        broadcast_from_main, _ = self._open_broadcaster(checkpoint, weight_file_name)
        layout.fill_pieces(
            chain(layout.named_pieces(layout.local_tensors), layout.frozen_pieces()), broadcast_from_main
        )
        layout.sync_model()

    def _open_broadcaster(
        self, checkpoint: Checkpoint | None, file_name: str
    ) -> tuple[Callable[..., Tensor], Specs | None]:
        """Return broadcast_from_main() and, on the main process, the dtypes and shapes of the file's tensors.

        broadcast_from_main(tensor_name, tensor_shape, dtype) broadcasts a tensor from the main process to all
        devices. By default, it uses the parameter's shape and fp32. It reorders the head's rows to match this
        run's class order.
        """
        parameter_shapes, device = self.gatherer.shapes, self.accelerator.device
        tensor_file = TensorFile(checkpoint.folder / file_name) if checkpoint else None
        row_orders = self.row_orders(checkpoint) if checkpoint else {}

        def broadcast_from_main(
            tensor_name: str, tensor_shape: tuple[int, ...] | None = None, dtype: torch.dtype = torch.float32
        ) -> Tensor:
            if tensor_file:
                stored_tensor = tensor_file.read_tensor(tensor_name)
                parameter_name, _, _ = tensor_name.partition("/")  # optimizer state is <parameter>/<state>
                if parameter_name in row_orders and stored_tensor.shape == parameter_shapes[parameter_name]:
                    stored_tensor = stored_tensor[row_orders[parameter_name]]
                return broadcast(stored_tensor.to(device, dtype))
            received_shape = parameter_shapes[tensor_name] if tensor_shape is None else tensor_shape
            return broadcast(torch.empty(received_shape, dtype=dtype, device=device))

        return broadcast_from_main, tensor_file.specs() if tensor_file else None

    # --- fp16

    def _loss_scale(self) -> dict[str, float] | None:
        """Return the fp16 loss scale and the number of steps since the last overflow.

        Without fp16, the result is None.
        """
        zero_scale = self.layout.loss_scale()
        grad_scaler = self.accelerator.scaler
        if zero_scale is None and grad_scaler is None:
            return None
        loss_scale, steps_since_overflow = zero_scale or torch_.loss_scale(grad_scaler)
        return {"scale": loss_scale, "good_steps": steps_since_overflow}

    def _set_loss_scale(self, saved_scale: dict[str, float] | None) -> None:
        """Restore the fp16 loss scale, which may have been saved under a different strategy.

        Only the loss scale's growth rate depends on the strategy.

        Args:
            saved_scale: Result of _loss_scale(), or None if the saved run did not use fp16.
        """
        if saved_scale is None:
            return
        loss_scale, steps_since_overflow = saved_scale["scale"], int(saved_scale["good_steps"])
        self.layout.set_loss_scale(loss_scale, steps_since_overflow)
        if self.accelerator.scaler is not None:  # always None under ZeRO
            torch_.set_loss_scale(self.accelerator.scaler, loss_scale, steps_since_overflow)


def _dtype_in_file(buffer_dtype: torch.dtype) -> torch.dtype:
    """Return the dtype with which checkpoints store a buffer, which is fp32 for any floating-point buffer."""
    return torch.float32 if buffer_dtype.is_floating_point else buffer_dtype
