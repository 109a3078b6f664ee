"""JobAccelerator: Accelerate's Accelerator with the choices of a job."""

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from accelerate import Accelerator
from accelerate.utils import DistributedType
from torch import Tensor, nn

from onecurve.distributed.exact_sum import ExactSum
from onecurve.distributed.precision import Precision
from onecurve.system.env import is_hosts_first
from onecurve.system.output import log

if TYPE_CHECKING:
    import torch

    from onecurve.distributed.blocks import Compilation


class JobAccelerator(Accelerator):
    """Accelerator with the choices of a job. make_accelerator() creates it; start() and wrap() complete it.

    Attributes:
        precision: Number formats used in training.
        compilation: Arguments of torch.compile; None before start() has chosen them.
        step_graph: True if each step runs as a CUDA graph.
        step_stream: CUDA stream of the step graphs; None on a CPU.
        deterministic: Value of --deterministic.
        grad_checkpointing: True if activations are recomputed, by the flag or by FSDP's config.
        exact_sum: Adder of the gradients with --deterministic; created by wrap().
        short_attention: True if the device supports the kernel of models/attention.py; after wrap(), True if
            the model also uses the kernel.
        prepared: The wrapped model; None before wrap().
    """

    precision: Precision
    compilation: "Compilation | None" = None
    step_graph: bool = False
    step_stream: "torch.cuda.Stream | None" = None
    deterministic: bool = False
    grad_checkpointing: bool = False
    exact_sum: ExactSum | None = None
    short_attention: bool = False
    prepared: nn.Module | None = None

    def print(self, *values: Any, **_: Any) -> None:
        """Log a line on the first process of each host."""
        if is_hosts_first():
            log.info(" ".join(map(str, values)))

    def backward(self, loss: Tensor, **kwargs: Any) -> None:
        """Compute a micro-batch's gradients, and exchange the sums after the last micro-batch of a step."""
        if self.exact_sum:
            self.exact_sum.backward(loss, **kwargs)
        else:
            super().backward(loss, **kwargs)

    def clip_grad_norm_(
        self, parameters: Iterable[Tensor], max_norm: float, norm_type: float = 2
    ) -> Tensor | None:
        """Scale the gradients to the norm max_norm if their norm is larger, and return their norm.

        Under DeepSpeed, return None, because the engine has already clipped in backward(). Accelerate 1.15
        would copy the unused norm to the host.
        """
        if self.exact_sum:
            return self.exact_sum.clip_grad_norm_(parameters, max_norm, norm_type)
        if self.distributed_type == DistributedType.DEEPSPEED:
            return None
        return super().clip_grad_norm_(parameters, max_norm, norm_type)
