"""Lists the host's NVIDIA GPUs through NVML, and checks whether the installed torch can use them.

This file does not import torch, so that every host answers doctor.py in a fraction of a second.
"""

import importlib.util
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import psutil

# Oldest supported driver for each major version of CUDA. The driver also supports newer minor versions:
# https://docs.nvidia.com/deploy/cuda-compatibility/minor-version-compatibility.html
LEAST_DRIVER = {11: 450, 12: 525, 13: 580}


class Devices(NamedTuple):
    """NVML's description of this host's driver and GPUs."""

    driver: str | None = None
    driver_cuda: tuple[int, int] | None = None  # newest CUDA version that the driver supports: (major, minor)
    gpus: tuple[dict[str, Any], ...] = ()  # in PCI bus order; None for values that a GPU does not report
    # Reason why NVML lists no GPUs although the host may have some; None without a driver
    problem: str | None = None


def list_gpus() -> Devices:
    try:
        import pynvml

        pynvml.nvmlInit()
    except ImportError:  # torch can use the GPUs without pynvml
        return Devices()
    except (pynvml.NVMLError_LibraryNotFound, pynvml.NVMLError_DriverNotLoaded):
        return Devices()
    except pynvml.NVMLError as error:
        return Devices(problem=str(error))
    try:
        version = _ask(pynvml, pynvml.nvmlSystemGetCudaDriverVersion_v2) or 0
        driver = _ask(pynvml, pynvml.nvmlSystemGetDriverVersion)
        handles = [pynvml.nvmlDeviceGetHandleByIndex(i) for i in range(pynvml.nvmlDeviceGetCount())]
        gpus = tuple(_gpu(pynvml, handle, handles) for handle in handles)
        return Devices(driver, divmod(version // 10, 100) if version else None, gpus)
    except pynvml.NVMLError as error:  # a GPU that has fallen off the bus has no handle
        return Devices(problem=str(error))
    finally:
        pynvml.nvmlShutdown()


def _gpu(pynvml: Any, handle: Any, handles: list[Any]) -> dict[str, Any]:
    memory = _ask(pynvml, pynvml.nvmlDeviceGetMemoryInfo, handle)
    capability = _ask(pynvml, pynvml.nvmlDeviceGetCudaComputeCapability, handle)
    processes = _ask(pynvml, pynvml.nvmlDeviceGetComputeRunningProcesses, handle) or []
    return {
        "name": _ask(pynvml, pynvml.nvmlDeviceGetName, handle) or "a GPU",
        "capability": list(capability) if capability else None,
        "memory_gib": memory and memory.total / 2**30,
        "free_gib": memory and memory.free / 2**30,
        "held_by": [_process_name(process.pid) for process in processes],
        "peers": [_can_read(pynvml, handle, other) for other in handles if other is not handle],
    }


def _ask(pynvml: Any, function: Callable[..., Any], *arguments: Any) -> Any:
    """Return NVML's answer to a query, or None if the query fails, so that other queries can continue."""
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
    """Return True if a GPU can read another GPU's memory directly."""
    status = _ask(pynvml, pynvml.nvmlDeviceGetP2PStatus, gpu, peer, pynvml.NVML_P2P_CAPS_INDEX_READ)
    return status == pynvml.NVML_P2P_STATUS_OK


def torch_cuda() -> str | None:
    """Return the CUDA version for which the installed torch was built, or None without CUDA support.

    The version is read without importing torch.
    """
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        return None
    text = Path(spec.origin).with_name("version.py").read_text()
    match = re.search(r"^cuda[^=\n]*= '([\d.]+)'", text, re.MULTILINE)
    return match and match[1]


def driver_problem(devices: Devices, cuda: str | None) -> str | None:
    """Return why a torch built for this CUDA version can't use the host's GPUs, or None."""
    if devices.problem:
        return f"the NVIDIA driver does not answer ({devices.problem})"
    if not devices.gpus:
        return None
    if cuda is None:
        return "the installed torch has no CUDA"
    if devices.driver_cuda and devices.driver_cuda[0] < int(cuda.split(".")[0]):
        newest = ".".join(map(str, devices.driver_cuda))
        return f"driver {devices.driver} runs CUDA up to {newest}, but the installed torch needs CUDA {cuda}"
    return None


def needed_driver(cuda: str) -> str:
    """Return `driver 580 or newer` for a torch built for this CUDA version."""
    version = LEAST_DRIVER.get(int(cuda.split(".")[0]))
    return f"driver {version} or newer" if version else "a newer driver"


def visible_devices(numbers: Sequence[int]) -> dict[str, str]:
    """Return environment variables that select GPUs of a host.

    The GPU numbers are the same as in nvidia-smi and the hostfile. By default, CUDA would assign number 0 to
    the fastest GPU.
    """
    return {"CUDA_DEVICE_ORDER": "PCI_BUS_ID", "CUDA_VISIBLE_DEVICES": ",".join(map(str, numbers))}


def runs_on(built: str, major: int, minor: int) -> bool:
    """Return True if a GPU of compute capability major.minor can run code built for `built`.

    Code built for sm_80 runs on compute capabilities 8.0 to 8.x, and code built for compute_80 also runs on
    newer GPUs.
    """
    prefix, _, number = built.partition("_")
    built_major, built_minor = divmod(int(number.rstrip("af")), 10)
    if prefix == "compute":
        return (built_major, built_minor) <= (major, minor)
    return built_major == major and built_minor <= minor
