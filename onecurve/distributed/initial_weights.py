"""Copies rank 0's initial weights to all ranks."""

import hashlib

import torch
from accelerate import Accelerator
from accelerate.utils import broadcast, gather_object
from torch import Tensor, nn

from onecurve.distributed.agreement import agree


@torch.no_grad()
def share_initial_weights(accelerator: Accelerator, model: nn.Module) -> None:
    """Copy rank 0's initial weights into the model on all ranks, in place. This function is collective.

    All ranks draw their weights with the same seed, but CPUs with different instruction sets round
    differently. If all ranks have drawn identical weights, nothing is sent.

    Raises:
        ValueError: If parameter names, shapes or dtypes differ between ranks.
    """
    tensor_by_name = model.state_dict()
    shape_and_dtype_by_name = {
        tensor_name: [list(tensor.shape), str(tensor.dtype)] for tensor_name, tensor in tensor_by_name.items()
    }
    agree(accelerator, {"the model": shape_and_dtype_by_name})
    if accelerator.num_processes == 1:
        return
    digest_by_rank = gather_object([_weights_digest(tensor_by_name)])
    if len(set(digest_by_rank)) == 1:
        return
    for tensor in tensor_by_name.values():
        tensor.copy_(broadcast(tensor.to(accelerator.device)))
    accelerator.print(
        "the ranks' initial weights differ, because their CPUs round differently."
        " All ranks use rank 0's weights."
    )


def _weights_digest(tensor_by_name: dict[str, Tensor]) -> str:
    """Return the SHA-256 of the tensors' bytes, which are copied to the CPU."""
    weights_hash = hashlib.sha256()
    for tensor in tensor_by_name.values():
        weights_hash.update(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return weights_hash.hexdigest()
