"""A rehearsal: several processes on the CPU, over gloo, from the config files meant for GPUs."""

import ctypes
import os
import platform
from typing import Any

import torch
from accelerate import PartialState
from accelerate.utils import DistributedType

from common.system.env import launched, launched_with, processes_per_host


def rehearse_on_cpu() -> None:
    """Lets Accelerate run DDP, FSDP2 and DeepSpeed on gloo processes, from the config files meant for GPUs.

    Accelerate 1.15 looks for a GPU only in these two methods. Without one, each process would be a job of its
    own.
    """
    if launched_with("DEEPSPEED"):
        import deepspeed

        # gloo instead of the shared-memory op, which is compiled at first use and leaves a lock when killed
        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
        # torch computes fp16 on every CPU; DeepSpeed refuses CPUs where it is slow
        deepspeed.accelerator.get_accelerator().is_fp16_supported = lambda: True
    sharded = launched_with("FSDP") or launched_with("DEEPSPEED")

    def prepare_backend(self: PartialState, *_: Any, **__: Any) -> tuple[str, DistributedType]:
        return "gloo", DistributedType.MULTI_GPU if sharded else DistributedType.MULTI_CPU

    def set_device(self: PartialState) -> None:
        self.device = torch.device("cpu")

    PartialState._prepare_backend = prepare_backend
    PartialState.set_device = set_device


def use_all_cores() -> None:
    """Divides a host's cores among its processes.

    torchrun and accelerate set OMP_NUM_THREADS=1, which suits a GPU; deepspeed gives all cores to each
    process. For one process accelerate counts all cores of the machine, also those that this process may not
    use: two threads on one core are 35 times slower than one (CNN-A). With plain `python` a value set by hand
    stays, so that one process can round like each of several.
    """
    cores = len(os.sched_getaffinity(0))
    if launched() and (os.environ.get("OMP_NUM_THREADS", "1") == "1" or torch.get_num_threads() > cores):
        torch.set_num_threads(max(1, cores // processes_per_host()))


def keep_freed_memory() -> None:
    """Lets glibc keep freed activations for the next step instead of returning them to the kernel.

    CNN-A at batch 256, one thread: 57 instead of 82 ms of CPU time per step, and no page faults instead of
    14,000. Other C libraries are not changed.
    """
    libc = ctypes.CDLL(None)
    if platform.libc_ver()[0] == "glibc":
        libc.mallopt(-3, 2**30)  # M_MMAP_THRESHOLD: blocks up to 1 GiB come from the heap
        libc.mallopt(-1, 2**31 - 1)  # M_TRIM_THRESHOLD: the heap is not trimmed
