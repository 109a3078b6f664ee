"""The peak memory of a process, and advice when it was not enough."""

import resource
from pathlib import Path

import torch
from accelerate import Accelerator

from common.distributed.strategy import device_name
from common.recipe import Batch
from common.system.processes import says_out_of_memory


def memory_gib(accelerator: Accelerator, is_healthy: bool = False) -> dict[str, float]:
    """Memory of this process in GiB. `peak`: torch's peak allocation on a GPU, the peak resident set on CPU.

    On a GPU also `reserved`, the peak of torch's allocator. is_healthy: the GPU can be asked, which adds
    `other`, the memory in use outside of torch now (CUDA context, NCCL, other processes), and `device`, its
    size. On CPU also `data`, the writable memory requested so far, which RLIMIT_DATA limits.
    """
    if accelerator.device.type == "cuda":
        sizes = {"peak": torch.cuda.max_memory_allocated(), "reserved": torch.cuda.max_memory_reserved()}
        if is_healthy:
            free, device = torch.cuda.mem_get_info()
            sizes |= {"other": device - free - torch.cuda.memory_reserved(), "device": device}
        return {name: size / 2**30 for name, size in sizes.items()}
    status = Path("/proc/self/status").read_text()
    data_kib = int(status.partition("VmData:")[2].split()[0])
    return {"peak": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20, "data": data_kib / 2**20}


def is_out_of_memory(error: BaseException | None) -> bool:
    """True for errors of torch's allocators on GPU and CPU, of CUDA's libraries, and Python's MemoryError."""
    return isinstance(error, (torch.OutOfMemoryError, MemoryError)) or (
        isinstance(error, RuntimeError) and says_out_of_memory(str(error))
    )


def out_of_memory(accelerator: Accelerator, batch: Batch, error: BaseException) -> str:
    """The message, with the batch size to try. It quotes an error that does not speak of memory."""
    smaller = batch.smaller()
    advice = "shard the model (fsdp_4gpu, zero3_4gpu, zero3_offload_4gpu) or take a smaller one"
    if smaller:
        advice = (
            f"try --per_device_batch_size {smaller}, the same --batch_size {batch.total} with"
            f" {batch.total // (smaller * batch.processes)} accumulations, or {advice}"
        )
    device = device_name(accelerator)
    said = str(error).partition("\n")[0]
    quoted = "" if "memory" in said or not said else f" (the error was: {said})"
    return f"out of memory on {device} with --per_device_batch_size {batch.per_device}: {advice}{quoted}"
