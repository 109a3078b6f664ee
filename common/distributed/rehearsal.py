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

    Accelerate 1.15 looks for a GPU in these two methods alone; finding none, it would take each process for a
    job of its own.
    """
    if launched_with("DEEPSPEED"):
        import deepspeed

        # gloo instead of the shared-memory op, which is compiled at first use and leaves a lock when killed
        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
        # torch has fp16 on each CPU, fast or not; DeepSpeed asks for a fast one
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

    torchrun and accelerate set OMP_NUM_THREADS=1, right beside a GPU; deepspeed leaves all cores to each.
    For one process accelerate counts the machine's cores, also those that this process may not use: two
    threads on one core are 35 times slower than one (CNN-A). Set by hand before `python` it stays: then one
    process rounds as each of several does.
    """
    cores = len(os.sched_getaffinity(0))
    if launched() and (os.environ.get("OMP_NUM_THREADS", "1") == "1" or torch.get_num_threads() > cores):
        torch.set_num_threads(max(1, cores // processes_per_host()))


def keep_freed_memory() -> None:
    """Lets glibc keep freed activations for the next step instead of returning them to the kernel.

    CNN-A at batch 256, one thread: 57 instead of 82 ms of processor time a step, no instead of 14,000 page
    faults. Other C libraries are left as they are.
    """
    libc = ctypes.CDLL(None)
    if platform.libc_ver()[0] == "glibc":
        libc.mallopt(-3, 2**30)  # M_MMAP_THRESHOLD: blocks up to 1 GiB come from the heap
        libc.mallopt(-1, 2**31 - 1)  # M_TRIM_THRESHOLD: the heap is not cut
