"""Chooses the layout for a job's strategy, and defines FSDP2's layout."""

from typing import Any

from accelerate.optimizer import AcceleratedOptimizer
from torch import Tensor, nn

from onecurve.distributed.layout import Arrangement, ParameterLayout, Piece


def layout_of(model: nn.Module, optimizer: AcceleratedOptimizer) -> ParameterLayout:
    """Return the layout of a model and an optimizer, both returned by accelerator.prepare."""
    wrapped_optimizer = optimizer.optimizer
    if type(wrapped_optimizer).__module__.startswith("deepspeed"):  # does not import DeepSpeed
        from onecurve.distributed.zero_layout import Zero3Layout, ZeroLayout

        is_stage_3 = hasattr(wrapped_optimizer, "fp32_partitioned_groups_flat")
        return Zero3Layout(model, optimizer) if is_stage_3 else ZeroLayout(model, optimizer)
    if any(hasattr(parameter, "to_local") for parameter in model.parameters()):  # FSDP2's DTensors
        return FsdpLayout(model, optimizer)
    return ParameterLayout(model, optimizer)


class FsdpLayout(ParameterLayout):
    """Layout for FSDP2, where parameters and moments are DTensors."""

    partition_name = "FSDP2's shards"

    def _piece_of(self, parameter: Any) -> Piece:
        """Return this process's chunk of rows along the sharded mesh dimension.

        All chunks except the last have the same size.
        """
        if not hasattr(parameter, "placements"):
            return super()._piece_of(parameter)
        (sharded_dim,) = (dim for dim, placement in enumerate(parameter.placements) if placement.is_shard(0))
        device_mesh, row_count = parameter.device_mesh, len(parameter)
        rows_per_rank = -(-row_count // device_mesh.size(sharded_dim))
        start_row = min(row_count, rows_per_rank * device_mesh.get_local_rank(sharded_dim))
        row_numel = parameter.numel() // row_count
        return Piece(start_row * row_numel, min(rows_per_rank, row_count - start_row) * row_numel)

    def arrangements(self) -> list[Arrangement]:
        """Return one function that shards whole tensors like the model's first parameter."""
        first_dtensor = next(iter(self.parameters.values()))

        def shard(whole_tensors: list[Tensor]) -> list[Tensor]:
            return [_distributed_like(first_dtensor, whole_tensor) for whole_tensor in whole_tensors]

        return [shard]

    def sync_model(self) -> None:
        """Discard gathered copies of the parameters, which FSDP2 keeps after an evaluation."""
        from torch.distributed.fsdp import FSDPModule

        for module in self.module.modules():
            if isinstance(module, FSDPModule):
                module.reshard()


def _distributed_like(reference_tensor: Any, whole_tensor: Tensor) -> Any:
    """Return the whole tensor as a DTensor with the reference DTensor's sharding and device."""
    from torch.distributed.tensor import distribute_tensor

    # With src_data_rank=None, each rank slices its own whole tensor, without communication
    return distribute_tensor(
        whole_tensor, reference_tensor.device_mesh, reference_tensor.placements, src_data_rank=None
    ).to(reference_tensor.to_local().device)
