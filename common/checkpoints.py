"""The model's weights on disk, the same file from every strategy: safetensors in fp32, no pickle."""

import shutil
from pathlib import Path

import torch
from accelerate import Accelerator
from accelerate.utils import DistributedType
from torch import Tensor, nn

from common.accelerator import plain_module
from common.files import sync


def save_weights(accelerator: Accelerator, model: nn.Module, folder: Path) -> Path:
    """Writes folder/model.safetensors, whole or not at all: into a temporary folder first, then renamed.

    Collective: every process calls it, the main process writes. Returns the folder.
    """
    weights = full_weights(accelerator, model)
    if accelerator.is_main_process:
        from safetensors.torch import save_file

        temporary = folder.with_name(f".{folder.name}.tmp")
        shutil.rmtree(temporary, ignore_errors=True)
        temporary.mkdir(parents=True)
        save_file(weights, temporary / "model.safetensors")
        sync(temporary / "model.safetensors")
        sync(temporary)
        temporary.rename(folder)
        sync(folder.parent)
    accelerator.wait_for_everyone()
    return folder


@torch.no_grad()
def full_weights(accelerator: Accelerator, model: nn.Module) -> dict[str, Tensor]:
    """The model's own names -> whole tensors on CPU, floats in fp32; under ZeRO the fp32 masters.

    Collective. One tensor at a time is gathered; only the main process keeps it, the others return nothing.
    """
    module = plain_module(model)
    deepspeed = accelerator.distributed_type == DistributedType.DEEPSPEED
    if deepspeed:
        from deepspeed.utils import safe_get_full_fp32_param
    weights = {}
    for name, tensor in module.state_dict(keep_vars=True).items():
        if hasattr(tensor, "full_tensor"):  # an FSDP2 shard
            tensor = tensor.full_tensor()
        elif deepspeed and isinstance(tensor, nn.Parameter):
            tensor = safe_get_full_fp32_param(tensor)
        if accelerator.is_main_process:
            kind = torch.float32 if tensor.is_floating_point() else tensor.dtype
            weights[name] = tensor.detach().to("cpu", kind, copy=True).contiguous()
    return weights


def load_weights(model: nn.Module, file: Path, head: str) -> None:
    """Copies a safetensors file into a model that is not yet prepared.

    The layer named `head` keeps its fresh weights when the file has another number of classes. ValueError
    names the file and what is missing, unknown or of another shape.
    """
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    try:
        loaded = load_file(file)
    except (OSError, SafetensorError) as error:
        raise ValueError(f"--weights {file}: {error}") from None
    own = model.state_dict()
    for name in [
        n for n in loaded if n.startswith(f"{head}.") and n in own and loaded[n].shape != own[n].shape
    ]:
        loaded[name] = own[name]
    wrong = [n for n in own if n in loaded and own[n].shape != loaded[n].shape]
    wrong += sorted(own.keys() ^ loaded.keys())
    if wrong:
        name = wrong[0]
        theirs, ours = (list(d[name].shape) if name in d else "nothing" for d in (loaded, own))
        raise ValueError(
            f"--weights {file} is not this model's: {len(wrong)} tensors differ, the first is {name}"
            f" ({theirs} in the file, {ours} in the model): give its --model, --image_size, --patch_size"
        )
    model.load_state_dict(loaded)
