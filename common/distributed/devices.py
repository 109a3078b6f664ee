"""Checks a process's device: refuses a CPU used by accident, and a GPU that torch has no code for."""

import os
import re

import torch
from accelerate.utils import is_torch_xla_available

from common.distributed.launch_config import refuse
from common.distributed.precision import on_gpu
from common.system.env import processes_per_host
from common.system.gpus import devices, driver_problem, needed_driver, runs_on

REHEARSE = "to rehearse on the CPU put CUDA_VISIBLE_DEVICES= before the same command"


def check_devices() -> None:
    """ValueError if there are too few GPUs, or torch can't use them; and on TPUs, XPUs or NPUs."""
    _check_kind()
    gpus, processes = torch.cuda.device_count(), processes_per_host()
    if not on_gpu():
        _check_that_no_gpu_is_left_out()
    elif gpus < processes:
        raise ValueError(
            f"{processes} processes were started on this host, which has {gpus} GPU{'s' if gpus > 1 else ''}:"
            f" set num_processes to {gpus} per host (--num_processes {gpus}), take another file of"
            f" accelerate_configs/, or {REHEARSE}"
        )
    else:
        _check_code(int(os.environ.get("LOCAL_RANK", "0")))


def _check_kind() -> None:
    """ValueError on a host with TPUs, XPUs or NPUs, on which Accelerate would train."""
    device = torch.accelerator.current_accelerator(check_available=True)
    kind = "XLA" if is_torch_xla_available() else device.type.upper() if device else "CPU"
    if kind not in ("CPU", "CUDA", "MPS"):
        refuse(f"distributed_type: {kind}", "choose multi-GPU, or no distributed training")


def _check_that_no_gpu_is_left_out() -> None:
    """ValueError if torch can't use this host's GPUs: with an old driver it would train on the CPU."""
    if _gpus_are_hidden() or os.environ.get("ACCELERATE_USE_CPU", "").lower() == "true":
        return
    found, cuda = devices(), torch.version.cuda
    if not found.gpus and not found.problem:
        return
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    reason = driver_problem(found, cuda)
    if reason and found.problem:
        remedy = "restart the host, or the container"
    elif reason and cuda:
        remedy = f"install {needed_driver(cuda)}, or a torch for this driver (README, GPUs and drivers)"
    elif reason:
        remedy = "install a torch with CUDA (README, GPUs and drivers)"
    elif visible is not None:
        reason, remedy = f"CUDA_VISIBLE_DEVICES={visible} names none of them", "correct it"
    else:
        reason, remedy = _torchs_own_reason(), "see README, GPUs and drivers"
    which = f"{len(found.gpus)} GPUs ({found.gpus[0]['name']})" if found.gpus else "GPUs"
    raise ValueError(f"torch can't use this host's {which}: {reason}: {remedy}; {REHEARSE}")


def _gpus_are_hidden() -> bool:
    """True when CUDA_VISIBLE_DEVICES is empty, -1 or a word, such as Slurm's NoDevFiles."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    return visible is not None and not re.match(r"\s*(\d|GPU-|MIG-)", visible)


def _torchs_own_reason() -> str:
    try:
        torch.cuda.init()
    except (RuntimeError, AssertionError) as error:
        return str(error).splitlines()[0]
    return "no reason is known"


def _check_code(device: int) -> None:
    """ValueError if torch was not built for this process's GPU, where the first kernel would fail."""
    major, minor = torch.cuda.get_device_capability(device)
    built = torch.cuda.get_arch_list()
    if built and not any(runs_on(code, major, minor) for code in built):
        raise ValueError(
            f"torch {torch.__version__} has no code for GPU {device}, {torch.cuda.get_device_name(device)}"
            f" (compute capability {major}.{minor}): it is built for {', '.join(built)}: install a torch for"
            f" this GPU (README, GPUs and drivers); {REHEARSE}"
        )
