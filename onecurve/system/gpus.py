"""Lists this host's NVIDIA GPUs with NVML, and checks whether the installed torch can use these GPUs.

This module does not import torch, so that every host responds to doctor.py in a fraction of a second.
"""

import importlib.util
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import psutil

# Minimum driver version for each major version of CUDA. A driver also supports later minor versions of CUDA:
# https://docs.nvidia.com/deploy/cuda-compatibility/minor-version-compatibility.html
MIN_DRIVER_BY_CUDA = {11: 450, 12: 525, 13: 580}


class Devices(NamedTuple):
    """Driver and GPUs of this host, as reported by NVML."""

    driver: str | None = None
    driver_cuda: tuple[int, int] | None = None  # (major, minor) of the newest CUDA that the driver supports
    # properties of each GPU in PCI bus order; unknown properties are None
    gpus: tuple[dict[str, Any], ...] = ()
    # Reason why NVML can't list the GPUs. None if NVML lists the GPUs, or if the host has no driver.
    problem: str | None = None


def list_gpus() -> Devices:
    try:
        import pynvml

        pynvml.nvmlInit()
    except ImportError:  # torch does not need pynvml to use the GPUs
        return Devices()
    except (pynvml.NVMLError_LibraryNotFound, pynvml.NVMLError_DriverNotLoaded):
        return Devices()
    except pynvml.NVMLError as error:
        return Devices(problem=str(error))
    try:
        cuda_number = _query(pynvml, pynvml.nvmlSystemGetCudaDriverVersion_v2) or 0
        driver = _query(pynvml, pynvml.nvmlSystemGetDriverVersion)
        handles = [pynvml.nvmlDeviceGetHandleByIndex(index) for index in range(pynvml.nvmlDeviceGetCount())]
        gpus = tuple(_describe_gpu(pynvml, handle, handles) for handle in handles)
        # NVML reports CUDA 12.4 as the number 12040.
        driver_cuda = divmod(cuda_number // 10, 100) if cuda_number else None
        return Devices(driver, driver_cuda, gpus)
    except pynvml.NVMLError as error:  # raised, for example, for a GPU that has fallen off the bus
        return Devices(problem=str(error))
    finally:
        pynvml.nvmlShutdown()


def _describe_gpu(pynvml: Any, handle: Any, handles: list[Any]) -> dict[str, Any]:
    memory = _query(pynvml, pynvml.nvmlDeviceGetMemoryInfo, handle)
    capability = _query(pynvml, pynvml.nvmlDeviceGetCudaComputeCapability, handle)
    processes = _query(pynvml, pynvml.nvmlDeviceGetComputeRunningProcesses, handle) or []
    return {
        "name": _query(pynvml, pynvml.nvmlDeviceGetName, handle) or "a GPU",
        "capability": list(capability) if capability else None,
        "memory_gib": memory and memory.total / 2**30,
        "free_gib": memory and memory.free / 2**30,
        "held_by": [_process_name(process.pid) for process in processes],
        "peers": [_can_read(pynvml, handle, peer) for peer in handles if peer is not handle],
    }


def _query(pynvml: Any, function: Callable[..., Any], *arguments: Any) -> Any:
    """Return the result of an NVML query, or None if the query fails."""
    try:
        return function(*arguments)
    except pynvml.NVMLError:
        return None


def _process_name(pid: int) -> str:
    try:
        return f"{pid} {psutil.Process(pid).name()}"
    except psutil.Error:
        return str(pid)


def _can_read(pynvml: Any, gpu: Any, peer: Any) -> bool:
    """Return True if a GPU can directly read a peer GPU's memory."""
    status = _query(pynvml, pynvml.nvmlDeviceGetP2PStatus, gpu, peer, pynvml.NVML_P2P_CAPS_INDEX_READ)
    return status == pynvml.NVML_P2P_STATUS_OK


def torch_cuda() -> str | None:
    """Return the CUDA version for which the installed torch was built, or None for a build without CUDA.

    This function reads the version from a file instead of importing torch.
    """
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        return None
    version_file = Path(spec.origin).with_name("version.py").read_text()
    match = re.search(r"^cuda[^=\n]*= '([\d.]+)'", version_file, re.MULTILINE)
    return match and match[1]


def driver_problem(devices: Devices, cuda: str | None) -> str | None:
    """Return the reason why torch for a CUDA version can't use the host's GPUs, or None if it can."""
    if devices.problem:
        return f"the NVIDIA driver does not respond ({devices.problem})"
    if not devices.gpus:
        return None
    if cuda is None:
        return "the installed torch was built without CUDA"
    if devices.driver_cuda and devices.driver_cuda[0] < int(cuda.split(".")[0]):
        newest = ".".join(map(str, devices.driver_cuda))
        return (
            f"driver {devices.driver} supports CUDA up to {newest}, but the installed torch needs CUDA {cuda}"
        )
    return None


def needed_driver(cuda: str) -> str:
    """Describe the driver required by a CUDA version, for example as `driver 580 or newer`."""
    version = MIN_DRIVER_BY_CUDA.get(int(cuda.split(".")[0]))
    return f"driver {version} or newer" if version else "a newer driver"


def visible_devices(gpu_indices: Sequence[int]) -> dict[str, str]:
    """Return environment variables that select some of this host's GPUs.

    GPU indices are the same as in nvidia-smi and the hostfile. By default, CUDA assigns index 0 to the
    fastest GPU.
    """
    return {"CUDA_DEVICE_ORDER": "PCI_BUS_ID", "CUDA_VISIBLE_DEVICES": ",".join(map(str, gpu_indices))}


def runs_on(architecture: str, major: int, minor: int) -> bool:
    """Return True if a GPU of compute capability major.minor can run code built for `architecture`.

    For example, code built for sm_80 runs on all GPUs of compute capability 8.x, and code built for
    compute_80 also runs on newer GPUs.
    """
    prefix, _, digits = architecture.partition("_")
    built_major, built_minor = divmod(int(digits.rstrip("af")), 10)
    if prefix == "compute":
        return (built_major, built_minor) <= (major, minor)
    return built_major == major and built_minor <= minor
