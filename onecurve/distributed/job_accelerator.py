"""JobAccelerator: Accelerate's Accelerator, with what a job adds to it."""

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
    """Accelerator with the choices of a job. make_accelerator() makes it, start() and wrap() complete it.

    precision: types of the training's tensors.
    compilation: arguments of torch.compile; None before start() has chosen.
    step_graph: each step is one CUDA graph.
    step_stream: the stream of these graphs; None on a CPU.
    deterministic: the value of --deterministic.
    grad_checkpointing: activations are recomputed, by the flag or by FSDP's config.
    exact_sum: adds the gradients with --deterministic; wrap() makes it.
    short_attention: the device has the kernel of models/attention.py. After wrap(), the model also uses it.
    prepared: the wrapped model; None before wrap().
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
        """Compute the gradients of a micro-batch, and exchange them in the last one of a step."""
        if self.exact_sum:
            self.exact_sum.backward(loss, **kwargs)
        else:
            super().backward(loss, **kwargs)

    def clip_grad_norm_(
        self, parameters: Iterable[Tensor], max_norm: float, norm_type: float = 2
    ) -> Tensor | None:
        """Scale the gradients to the norm max_norm if theirs is larger. Return their norm.

        Under DeepSpeed the engine has clipped in backward(), and None is returned: Accelerate 1.15 would copy
        the norm to the host, and nothing reads it.
        """
        if self.exact_sum:
            return self.exact_sum.clip_grad_norm_(parameters, max_norm, norm_type)
        if self.distributed_type == DistributedType.DEEPSPEED:
            return None
        return super().clip_grad_norm_(parameters, max_norm, norm_type)
