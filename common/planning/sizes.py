"""What `accelerate estimate-memory` says of the same model."""

from dataclasses import dataclass

from torch import nn


@dataclass(frozen=True)
class AcceleratesEstimate:
    """Bytes, in fp32."""

    model: int
    largest_layer: int
    training: int  # weights, gradients, and Adam's two moments; no activations

    def __str__(self) -> str:
        return (
            f"accelerate estimate-memory: {self.model / 2**30:.2f} GiB for the model in fp32,"
            f" {self.training / 2**30:.2f} GiB with gradients and Adam; it counts no activations"
        )


def accelerates_estimate(model: nn.Module) -> AcceleratesEstimate:
    """Accelerate's own functions on a model, which may be on the meta device."""
    from accelerate.commands.estimate import estimate_training_usage
    from accelerate.utils import calculate_maximum_sizes

    total, (largest, _) = calculate_maximum_sizes(model)
    return AcceleratesEstimate(total, largest, estimate_training_usage(total, "float32")["step"])
