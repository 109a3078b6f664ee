"""A process's device: checks that GPUs are used, chooses algorithms, rehearses on the CPU.

A rehearsal: several processes on the CPU, over gloo, from the config files meant for GPUs.
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
from onecurve.system.env import LOCAL_NUMBER, is_on, launched, local_rank, processes_per_host
from onecurve.system.processes import allowed_cores
from onecurve.upstream import accelerate_, deepspeed_

REHEARSE = "to rehearse on the CPU put CUDA_VISIBLE_DEVICES= before the same command"


def check_devices() -> None:
    """ValueError if there are too few GPUs, or torch can't use them; and on TPUs, XPUs or NPUs."""
    _check_kind()
    gpus, processes = torch.cuda.device_count(), processes_per_host()
    if not on_gpu():
        _check_that_no_gpu_is_left_out()
    elif gpus < processes and not (gpus == 1 and "CUDA_VISIBLE_DEVICES" in os.environ):
        raise ValueError(
            f"{processes} processes were started on this host, which has {gpus} GPU{'s' if gpus > 1 else ''}:"
            f" start {gpus} per host (accelerate's --num_processes, torchrun's --nproc_per_node, launch.py's"
            f" --gpus), take another file of accelerate_configs/, or {REHEARSE}"
        )
    else:
        if gpus == 1 and "LOCAL_RANK" in os.environ:  # it may be another one for each process
            os.environ[LOCAL_NUMBER], os.environ["LOCAL_RANK"] = str(local_rank()), "0"
        _check_code(int(os.environ.get("LOCAL_RANK", "0")))


def check_own_gpu(channel: Channel, number: int, processes: int, gpu: str) -> None:
    """ValueError if two processes have the same GPU, before NCCL fails. gpu: a unique name. Collective."""
    channel.post(f"gpu/{number}", gpu)
    names = [channel.wait(f"gpu/{rank}") for rank in range(processes)]
    if same := [rank for rank, name in enumerate(names) if name == gpu and rank != number]:
        raise ValueError(
            f"ranks {number} and {same[0]} have the same GPU: start one process per GPU, or {REHEARSE}"
        )


def _check_kind() -> None:
    """ValueError on a host with TPUs, XPUs, NPUs or AMD's GPUs, on which Accelerate would train."""
    device = torch.accelerator.current_accelerator(check_available=True)
    kind = "XLA" if is_torch_xla_available() else device.type.upper() if device else "CPU"
    kind = "ROCM" if kind == "CUDA" and torch.version.hip else kind
    if kind not in ("CPU", "CUDA", "MPS"):
        refuse(f"distributed_type: {kind}", "choose multi-GPU, or no distributed training")


def _check_that_no_gpu_is_left_out() -> None:
    """ValueError if torch can't use this host's GPUs: with an old driver it would train on the CPU."""
    if _gpus_are_hidden() or is_on("ACCELERATE_USE_CPU"):
        return

    from onecurve.system.gpus import driver_problem, list_gpus, needed_driver

    found, cuda = list_gpus(), torch.version.cuda
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
    from onecurve.system.gpus import runs_on

    major, minor = torch.cuda.get_device_capability(device)
    built = torch.cuda.get_arch_list()
    if built and not any(runs_on(code, major, minor) for code in built):
        raise ValueError(
            f"torch {torch.__version__} has no code for GPU {device}, {torch.cuda.get_device_name(device)}"
            f" (compute capability {major}.{minor}): it is built for {', '.join(built)}: install a torch for"
            f" this GPU (README, GPUs and drivers); {REHEARSE}"
        )


def choose_algorithms(deterministic: bool) -> None:
    """Chooses the fastest algorithms, or deterministic ones. Call it before the first operation on a GPU.

    The fastest: cuDNN tries several once per shape of a convolution; shapes rarely change.

    Deterministic: the same bits in each run on the same GPUs. An operation without a deterministic algorithm
    raises RuntimeError. By default a GPU adds in the order in which its blocks finish (atomic additions in
    backward), cuBLAS may choose other algorithms from run to run, and fp32 convolutions round their inputs to
    TF32. On a CPU this changes nothing.
    https://docs.pytorch.org/docs/stable/notes/randomness.html
    """
    torch.backends.cudnn.benchmark = not deterministic  # it chooses algorithms by their speed in this run
    if not deterministic:
        return
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # read when cuBLAS starts
    torch.use_deterministic_algorithms(True)
    # mypy does not see this property. Nothing here reads uninitialised memory, and filling it takes time.
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    torch.backends.cudnn.deterministic = True
    torch.backends.cudnn.allow_tf32 = False
    torch.backends.cuda.matmul.allow_tf32 = False


def rehearse_on_cpu(backend: str = "gloo") -> None:
    """Let Accelerate run DDP, FSDP2 and DeepSpeed on processes of a CPU, from config files meant for GPUs.

    Accelerate looks for a GPU only in the two methods that this replaces.
    """
    if is_on("ACCELERATE_USE_DEEPSPEED"):
        deepspeed_.use_gloo()
        deepspeed_.allow_fp16_on_cpu()
    sharded = is_on("ACCELERATE_USE_FSDP") or is_on("ACCELERATE_USE_DEEPSPEED")
    accelerate_.set_backend(backend, DistributedType.MULTI_GPU if sharded else DistributedType.MULTI_CPU)
    accelerate_.set_device_to_cpu()


def use_all_cores(deterministic: bool = False) -> None:
    """Divides a host's cores among its processes.

    torchrun and accelerate set OMP_NUM_THREADS=1, which suits a GPU; deepspeed gives all cores to each
    process. For one process accelerate counts all cores of the machine, also those that this process may not
    use, and so does torch where a container has a quota: two threads on one core are 35 times slower than one
    (CNN-A). With plain `python` a value set by hand stays, so that one process can round like each of
    several. deterministic: one thread, or as many as the user's own OMP_NUM_THREADS says, as kernels add in
    an order that depends on their threads.
    """
    if deterministic:
        torch.set_num_threads(int(_users_environment().get("OMP_NUM_THREADS", "1").partition(",")[0]))
        return
    cores, given = allowed_cores(), os.environ.get("OMP_NUM_THREADS")
    is_one = launched() and (given or "1") == "1"
    if is_one or (torch.get_num_threads() > cores and (launched() or not given)):
        torch.set_num_threads(max(1, cores // processes_per_host()))


def _users_environment() -> Mapping[str, str]:
    """The environment of whoever started the job: that with which the launcher, if there is one, began."""
    try:
        return psutil.Process(os.getppid()).environ() if launched() else os.environ
    except psutil.Error:  # the launcher has just ended, or its environment is hidden
        return {}


def keep_freed_memory() -> None:
    """Lets glibc keep freed activations for the next step instead of returning them to the kernel.

    CNN-A at batch 256, one thread: 57 instead of 82 ms of CPU time per step, and no page faults instead of
    14,000.
    """
    libc = ctypes.CDLL(None)
    libc.mallopt(-3, 2**30)  # M_MMAP_THRESHOLD: blocks up to 1 GiB come from the heap
    libc.mallopt(-1, 2**31 - 1)  # M_TRIM_THRESHOLD: the heap is not trimmed
