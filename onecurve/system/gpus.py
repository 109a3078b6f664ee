"""Lists this host's NVIDIA GPUs with NVML, and checks whether the installed torch can use these GPUs.

This module does not import torch, so that every host responds to doctor.py in a fraction of a second.
"""

import importlib.util
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import psutil

# A driver also supports later minor versions of CUDA:
# https://docs.nvidia.com/deploy/cuda-compatibility/minor-version-compatibility.html
MIN_DRIVER_BY_CUDA = {11: 450, 12: 525, 13: 580}  # {major version of CUDA: minimum driver version}


class GpuInventory(NamedTuple):
    """Driver and GPUs of this host, as reported by NVML."""

    driver: str | None = None  # version of the driver, for example 580.65.06
    driver_cuda: tuple[int, int] | None = None  # (major, minor) of the newest CUDA that the driver supports
    # Unknown properties are None
    gpus: tuple[dict[str, Any], ...] = ()  # properties of each GPU in PCI bus order
    # None if NVML lists the GPUs, or if the host has no driver
    problem: str | None = None  # reason why NVML can't list the GPUs


def list_gpus() -> GpuInventory:
    """Return this host's driver and GPUs, or the reason why NVML can't list the GPUs."""
    try:
        import pynvml

        pynvml.nvmlInit()
    except ImportError:  # torch does not need pynvml to use the GPUs
        return GpuInventory()
    except (pynvml.NVMLError_LibraryNotFound, pynvml.NVMLError_DriverNotLoaded):
        return GpuInventory()  # this host has no driver
    except pynvml.NVMLError as nvml_error:
        return GpuInventory(problem=str(nvml_error))
    try:
        nvml_cuda_number = _query(pynvml, pynvml.nvmlSystemGetCudaDriverVersion_v2) or 0
        driver_version = _query(pynvml, pynvml.nvmlSystemGetDriverVersion)
        gpu_count = pynvml.nvmlDeviceGetCount()
        gpu_handles = [pynvml.nvmlDeviceGetHandleByIndex(gpu_index) for gpu_index in range(gpu_count)]
        gpus = tuple(_describe_gpu(pynvml, gpu_handle, gpu_handles) for gpu_handle in gpu_handles)
        # NVML reports CUDA 12.4 as the number 12040.
        driver_cuda = divmod(nvml_cuda_number // 10, 100) if nvml_cuda_number else None
        return GpuInventory(driver_version, driver_cuda, gpus)
    except pynvml.NVMLError as nvml_error:  # raised, for example, for a GPU that has fallen off the bus
        return GpuInventory(problem=str(nvml_error))
    finally:
        pynvml.nvmlShutdown()


def _describe_gpu(pynvml: Any, gpu_handle: Any, all_handles: list[Any]) -> dict[str, Any]:
    """Return the properties of one GPU for GpuInventory.gpus.

    `all_handles` contains the NVML handles of all GPUs on this host, including `gpu_handle`.
    """
    gpu_memory = _query(pynvml, pynvml.nvmlDeviceGetMemoryInfo, gpu_handle)
    compute_capability = _query(pynvml, pynvml.nvmlDeviceGetCudaComputeCapability, gpu_handle)
    gpu_processes = _query(pynvml, pynvml.nvmlDeviceGetComputeRunningProcesses, gpu_handle) or []
    peer_handles = [other_handle for other_handle in all_handles if other_handle is not gpu_handle]
    return {
        "name": _query(pynvml, pynvml.nvmlDeviceGetName, gpu_handle) or "a GPU",
        "capability": list(compute_capability) if compute_capability else None,
        "memory_gib": gpu_memory and gpu_memory.total / 2**30,
        "free_gib": gpu_memory and gpu_memory.free / 2**30,
        "held_by": [_pid_and_name(gpu_process.pid) for gpu_process in gpu_processes],
        "peers": [_can_read_peer(pynvml, gpu_handle, peer_handle) for peer_handle in peer_handles],
    }


def _query(pynvml: Any, nvml_function: Callable[..., Any], *nvml_arguments: Any) -> Any:
    """Return the result of an NVML query, or None if the query fails."""
    try:
        return nvml_function(*nvml_arguments)
    except pynvml.NVMLError:
        return None  # the query failed


def _pid_and_name(pid: int) -> str:
    """Describe a process by its PID and program name, or only by its PID if the name is unavailable."""
    try:
        return f"{pid} {psutil.Process(pid).name()}"
    except psutil.Error:
        return str(pid)


def _can_read_peer(pynvml: Any, gpu_handle: Any, peer_handle: Any) -> bool:
    """Return True if a GPU can directly read a peer GPU's memory."""
    read_capability = pynvml.NVML_P2P_CAPS_INDEX_READ
    peer_status = _query(pynvml, pynvml.nvmlDeviceGetP2PStatus, gpu_handle, peer_handle, read_capability)
    return peer_status == pynvml.NVML_P2P_STATUS_OK


def torch_cuda() -> str | None:
    """Return the CUDA version for which the installed torch was built, or None for a build without CUDA.

    This function reads the version from a file instead of importing torch.
    """
    torch_spec = importlib.util.find_spec("torch")
    if torch_spec is None or torch_spec.origin is None:
        return None  # torch is not installed
    version_file_text = Path(torch_spec.origin).with_name("version.py").read_text()
    version_match = re.search(r"^cuda[^=\n]*= '([\d.]+)'", version_file_text, re.MULTILINE)
    return version_match and version_match[1]


def driver_problem(gpu_inventory: GpuInventory, torch_cuda_version: str | None) -> str | None:
    """Return the reason why the installed torch can't use the host's GPUs, or None if no reason is known.

    `torch_cuda_version` is the result of torch_cuda() on the same host.
    """
    if gpu_inventory.problem:
        return f"the NVIDIA driver does not respond ({gpu_inventory.problem})"
    if not gpu_inventory.gpus:
        return None  # there is no GPU to use
    if torch_cuda_version is None:
        return "the installed torch was built without CUDA"
    if gpu_inventory.driver_cuda is None:
        return None  # the driver's CUDA version is unknown
    driver_major, driver_minor = gpu_inventory.driver_cuda
    if driver_major < _major_version(torch_cuda_version):
        return (
            f"driver {gpu_inventory.driver} supports CUDA up to {driver_major}.{driver_minor},"
            f" but the installed torch needs CUDA {torch_cuda_version}"
        )
    return None  # torch can use the GPUs


def needed_driver(cuda_version: str) -> str:
    """Describe the driver required by a CUDA version, for example as `driver 580 or newer`."""
    min_driver = MIN_DRIVER_BY_CUDA.get(_major_version(cuda_version))
    return f"driver {min_driver} or newer" if min_driver else "a newer driver"


def _major_version(cuda_version: str) -> int:
    return int(cuda_version.partition(".")[0])


def visible_devices(gpu_indices: Sequence[int]) -> dict[str, str]:
    """Return environment variables that select some of this host's GPUs.

    GPU indices are the same as in nvidia-smi and the hostfile. By default, CUDA assigns index 0 to the
    fastest GPU.
    """
    return {"CUDA_DEVICE_ORDER": "PCI_BUS_ID", "CUDA_VISIBLE_DEVICES": ",".join(map(str, gpu_indices))}


def runs_on(architecture: str, gpu_major: int, gpu_minor: int) -> bool:
    """Return True if a GPU of compute capability gpu_major.gpu_minor can run code for `architecture`.

    For example, code built for sm_80 runs on all GPUs of compute capability 8.x, and code built for
    compute_80 also runs on newer GPUs.
    """
    code_type, _, capability_digits = architecture.partition("_")
    # Names such as sm_90a and sm_100f have a suffix after the digits.
    code_major, code_minor = divmod(int(capability_digits.rstrip("af")), 10)
    if code_type == "compute":  # PTX, which the driver compiles for newer GPUs
        return (code_major, code_minor) <= (gpu_major, gpu_minor)
    return code_major == gpu_major and code_minor <= gpu_minor
