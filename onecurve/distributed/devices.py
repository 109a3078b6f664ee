"""Checks a process's GPU, chooses algorithms, and sets up CPU rehearsals.

In a rehearsal, several CPU processes communicate over gloo and use config files written for GPUs.
"""

import ctypes
import os
import re
from collections.abc import Mapping

import psutil
import torch
from accelerate.utils import DistributedType, is_torch_xla_available

from onecurve.distributed.channel import Channel
from onecurve.distributed.launch_config import refuse
from onecurve.distributed.precision import on_gpu
from onecurve.system.env import LOCAL_NUMBER_VARIABLE, is_launched, is_on, local_rank, processes_per_host
from onecurve.system.processes import allowed_cores
from onecurve.upstream import accelerate_, deepspeed_

CPU_HINT = "To rehearse on the CPU, put CUDA_VISIBLE_DEVICES= (without a value) in front of the same command."


def check_devices() -> None:
    """Check that torch can use this host's accelerators, and that each process has a GPU.

    If the launcher shows each process only its own GPU, this function sets LOCAL_RANK to 0, the GPU's index.

    Raises:
        ValueError: If the host has too few GPUs, torch can't use the host's GPUs, or the host has TPUs, XPUs,
            NPUs or AMD GPUs.
    """
    _check_device_type()
    gpu_count, host_process_count = torch.cuda.device_count(), processes_per_host()
    may_see_only_own_gpu = gpu_count == 1 and "CUDA_VISIBLE_DEVICES" in os.environ
    if not on_gpu():
        _refuse_unusable_gpus()
    elif gpu_count < host_process_count and not may_see_only_own_gpu:
        raise ValueError(
            f"{host_process_count} processes were started on this host,"
            f" which has {gpu_count} GPU{'s' if gpu_count > 1 else ''}."
            f" Start {gpu_count} per host with accelerate's --num_processes, torchrun's --nproc_per_node"
            f" or launch.py's --gpus, or choose a different file in accelerate_configs/. {CPU_HINT}"
        )
    else:
        if gpu_count == 1 and "LOCAL_RANK" in os.environ:
            os.environ[LOCAL_NUMBER_VARIABLE], os.environ["LOCAL_RANK"] = str(local_rank()), "0"
        _check_gpu_support(int(os.environ.get("LOCAL_RANK", "0")))


def refuse_shared_gpu(channel: Channel, own_rank: int, process_count: int, own_uuid: str) -> None:
    """Check that no other process uses this process's GPU, because NCCL would fail.

    This function is collective.

    Args:
        channel: Channel to the other ranks.
        own_rank: This process's rank.
        process_count: Number of processes in the job.
        own_uuid: UUID of this process's GPU.

    Raises:
        ValueError: If two processes use the same GPU.
    """
    channel.post(f"gpu/{own_rank}", own_uuid)
    uuid_by_rank = [channel.wait(f"gpu/{other_rank}") for other_rank in range(process_count)]
    for other_rank, other_uuid in enumerate(uuid_by_rank):
        if other_uuid == own_uuid and other_rank != own_rank:
            raise ValueError(
                f"ranks {own_rank} and {other_rank} use the same GPU."
                f" Start only one process per GPU. {CPU_HINT}"
            )


def _check_device_type() -> None:
    """Raise ValueError on TPUs, XPUs, NPUs and AMD GPUs, which Accelerate would otherwise use."""
    accelerator_device = torch.accelerator.current_accelerator(check_available=True)
    device_type = accelerator_device.type.upper() if accelerator_device else "CPU"
    if is_torch_xla_available():
        device_type = "XLA"
    elif device_type == "CUDA" and torch.version.hip:
        device_type = "ROCM"
    if device_type not in ("CPU", "CUDA", "MPS"):
        refuse(f"distributed_type: {device_type}", "choose multi-GPU or no distributed training")


def _refuse_unusable_gpus() -> None:
    """Raise ValueError if torch can't use this host's GPUs, because training would silently use the CPU.

    One possible cause is an outdated driver.
    """
    if _gpus_are_hidden() or is_on("ACCELERATE_USE_CPU"):
        return

    from onecurve.system.gpus import driver_problem, list_gpus, needed_driver

    gpu_inventory, cuda_version = list_gpus(), torch.version.cuda
    if not gpu_inventory.gpus and not gpu_inventory.problem:
        return  # this host has no NVIDIA GPU
    visible_devices = os.environ.get("CUDA_VISIBLE_DEVICES")
    gpu_problem = driver_problem(gpu_inventory, cuda_version)
    if gpu_problem and gpu_inventory.problem:
        remedy = "Restart the host or the container"
    elif gpu_problem and cuda_version:
        remedy = (
            f"Install {needed_driver(cuda_version)},"
            " or a torch build for this driver (see README, GPUs and drivers)"
        )
    elif gpu_problem:
        remedy = "Install a torch build with CUDA (see README, GPUs and drivers)"
    elif visible_devices is not None:
        gpu_problem = f"CUDA_VISIBLE_DEVICES={visible_devices} selects none of the host's GPUs"
        remedy = "Correct CUDA_VISIBLE_DEVICES"
    else:
        gpu_problem, remedy = _cuda_error_message(), "See README, GPUs and drivers"
    gpu_description = (
        f"{len(gpu_inventory.gpus)} GPUs ({gpu_inventory.gpus[0]['name']})" if gpu_inventory.gpus else "GPUs"
    )
    raise ValueError(f"torch can't use this host's {gpu_description}: {gpu_problem}. {remedy}. {CPU_HINT}")


def _gpus_are_hidden() -> bool:
    """Return True if CUDA_VISIBLE_DEVICES is empty, -1, or a word such as Slurm's NoDevFiles."""
    visible_devices = os.environ.get("CUDA_VISIBLE_DEVICES")
    return visible_devices is not None and not re.match(r"\s*(\d|GPU-|MIG-)", visible_devices)


def _cuda_error_message() -> str:
    """Return the first line of the error that torch raises when it initialises CUDA."""
    try:
        torch.cuda.init()
    except (RuntimeError, AssertionError) as error:
        return str(error).splitlines()[0]
    return "torch does not report the reason"


def _check_gpu_support(device_index: int) -> None:
    """Raise ValueError if torch contains no kernels for this GPU, because the first kernel would fail."""
    from onecurve.system.gpus import runs_on

    major, minor = torch.cuda.get_device_capability(device_index)
    architectures = torch.cuda.get_arch_list()
    if architectures and not any(runs_on(architecture, major, minor) for architecture in architectures):
        raise ValueError(
            f"torch {torch.__version__} supports only {', '.join(architectures)}, but GPU {device_index}"
            f" ({torch.cuda.get_device_name(device_index)}) has compute capability {major}.{minor}."
            f" Install a torch build for this GPU (see README, GPUs and drivers). {CPU_HINT}"
        )


def choose_algorithms(deterministic: bool) -> None:
    """Select either deterministic algorithms or the fastest algorithms.

    Call this function before the first GPU operation. Without `deterministic`, cuDNN benchmarks its
    algorithms once per convolution shape, because shapes rarely change.

    With `deterministic`, all runs on the same GPUs produce bitwise identical results. An operation without a
    deterministic algorithm raises RuntimeError. Without `deterministic`, results may differ between runs:
    atomic additions in the backward pass follow the order in which a GPU's thread blocks finish, and cuBLAS
    may choose different algorithms. In addition, fp32 convolutions round their inputs to TF32. On a CPU, the
    argument has no effect. See https://docs.pytorch.org/docs/stable/notes/randomness.html
    """
    # cuDNN's benchmarks choose algorithms by timings, which differ between runs
    torch.backends.cudnn.benchmark = not deterministic
    if not deterministic:
        return
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # read during cuBLAS initialisation
    torch.use_deterministic_algorithms(True)
    # Mypy does not know this property. Filling uninitialised memory takes time, and this project never reads
    # uninitialised memory.
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    torch.backends.cudnn.deterministic = True
    torch.backends.cudnn.allow_tf32 = False
    torch.backends.cuda.matmul.allow_tf32 = False


def rehearse_on_cpu(backend: str = "gloo") -> None:
    """Let Accelerate run DDP, FSDP2 and DeepSpeed in CPU processes, with config files written for GPUs.

    This function replaces Accelerate's only two methods that look for a GPU.
    """
    if is_on("ACCELERATE_USE_DEEPSPEED"):
        deepspeed_.use_gloo()
        deepspeed_.allow_fp16_on_cpu()
    shards_model = is_on("ACCELERATE_USE_FSDP") or is_on("ACCELERATE_USE_DEEPSPEED")
    accelerate_.set_backend(backend, DistributedType.MULTI_GPU if shards_model else DistributedType.MULTI_CPU)
    accelerate_.set_device_to_cpu()


def use_all_cores(deterministic: bool = False) -> None:
    """Set torch's number of threads, to divide a host's cores among its processes.

    torchrun and accelerate set OMP_NUM_THREADS=1, which suits GPU training. deepspeed assigns all cores to
    each process. For a single process, accelerate counts all of the machine's cores, including those that the
    process may not use. In a container with a CPU quota, torch also counts all cores. Two threads on one core
    are 35 times slower than one thread (CNN-A). If the script is started with plain `python`, this function
    keeps the user's OMP_NUM_THREADS, so that a single process can reproduce the rounding of a process in a
    larger job.

    Args:
        deterministic: True to use a fixed number of threads, because a kernel's order of additions depends on
            the number of threads. The fixed number is the user's OMP_NUM_THREADS, or 1 if this variable is
            not set.
    """
    if deterministic:
        # The variable may contain one number per nesting level
        outer_threads, _, _ = _users_environment().get("OMP_NUM_THREADS", "1").partition(",")
        torch.set_num_threads(int(outer_threads))
        return
    core_count, omp_threads = allowed_cores(), os.environ.get("OMP_NUM_THREADS")
    launcher_limits_threads = is_launched() and (omp_threads or "1") == "1"
    user_chose_threads = bool(omp_threads) and not is_launched()
    has_too_many_threads = torch.get_num_threads() > core_count and not user_chose_threads
    if launcher_limits_threads or has_too_many_threads:
        torch.set_num_threads(max(1, core_count // processes_per_host()))


def _users_environment() -> Mapping[str, str]:
    """Return the environment in which the user started the job.

    In a launched job, the result is the launcher's environment. Otherwise, the result is this process's
    environment.
    """
    try:
        return psutil.Process(os.getppid()).environ() if is_launched() else os.environ
    except psutil.Error:  # the launcher has just exited, or its environment can't be read
        return {}


def keep_freed_memory() -> None:
    """Make glibc reuse the memory of freed activations instead of returning it to the kernel.

    For CNN-A at batch size 256 on one thread, this reuse reduces CPU time per step from 82 ms to 57 ms, and
    the number of page faults from 14,000 to 0.
    """
    mmap_threshold_option, trim_threshold_option = -3, -1  # M_MMAP_THRESHOLD, M_TRIM_THRESHOLD in malloc.h
    libc = ctypes.CDLL(None)
    libc.mallopt(mmap_threshold_option, 2**30)  # allocate blocks of up to 1 GiB from the heap
    libc.mallopt(trim_threshold_option, 2**31 - 1)  # never trim the heap
