"""Defines JobAccelerator, a subclass of Accelerate's Accelerator that stores a job's settings."""

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
    """Accelerator that stores a job's settings, which make_accelerator(), start() and wrap() determine.

    Attributes:
        precision: Floating-point formats used in training.
        compilation: Arguments of torch.compile, or None before start() chooses them.
        step_graph: True if each step runs as a CUDA graph.
        step_stream: The step graphs' CUDA stream, or None without step graphs on a GPU.
        deterministic: Value of --deterministic.
        grad_checkpointing: True if --grad_checkpointing or FSDP2's config enables activation checkpointing.
        exact_sum: Object that adds gradients exactly with --deterministic. wrap() creates it.
        uses_short_attention_kernel: True if the device supports the kernel in models/attention.py. After
            wrap(), it is True only if the model also uses this kernel.
        prepared_model: The wrapped model, or None before wrap().
    """

    precision: Precision
    compilation: "Compilation | None" = None
    step_graph: bool = False
    step_stream: "torch.cuda.Stream | None" = None
    deterministic: bool = False
    grad_checkpointing: bool = False
    exact_sum: ExactSum | None = None
    uses_short_attention_kernel: bool = False
    prepared_model: nn.Module | None = None

    def print(self, *values: Any, **_: Any) -> None:
        """Log a line in the first process on each host."""
        if is_hosts_first():
            log.info(" ".join(map(str, values)))

    def backward(self, loss: Tensor, **kwargs: Any) -> None:
        """Compute a micro-batch's gradients. After a step's last micro-batch, exchange the gradient sums."""
        if self.exact_sum:
            self.exact_sum.backward(loss, **kwargs)
        else:
            super().backward(loss, **kwargs)

    def clip_grad_norm_(
        self, parameters: Iterable[Tensor], max_norm: float, norm_type: float = 2
    ) -> Tensor | None:
        """Scale the gradients to norm max_norm if their norm is larger. Return the norm before scaling.

        Under DeepSpeed, this method returns None, because the engine has already clipped the gradients in
        backward(). Accelerate 1.15 would copy the unused norm to the host.
        """
        if self.exact_sum:
            return self.exact_sum.clip_grad_norm_(parameters, max_norm, norm_type)
        if self.distributed_type == DistributedType.DEEPSPEED:
            return None
        return super().clip_grad_norm_(parameters, max_norm, norm_type)
