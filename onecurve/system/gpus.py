"""GPUs as NVIDIA's driver reports them through NVML, and if the installed torch can use them.

It does not import torch, so that hosts answer doctor.py in a fraction of a second.
"""

import importlib.util
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import psutil

# The oldest driver for each major version of CUDA. A torch for a newer minor version runs on it, too:
# https://docs.nvidia.com/deploy/cuda-compatibility/minor-version-compatibility.html
LEAST_DRIVER = {11: 450, 12: 525, 13: 580}


class Devices(NamedTuple):
    """NVML's answers on this host. gpus: in the order of the PCI bus; a fact that a GPU does not support is
    None. driver_cuda: the newest CUDA that the driver supports, as (major, minor). problem: why NVML lists no
    GPUs although there may be some; None also without NVIDIA's driver."""

    driver: str | None = None
    driver_cuda: tuple[int, int] | None = None
    gpus: tuple[dict[str, Any], ...] = ()
    problem: str | None = None


def list_gpus() -> Devices:
    try:
        import pynvml

        pynvml.nvmlInit()
    except ImportError:  # torch finds the GPUs without it
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
    except pynvml.NVMLError as error:  # a GPU that fell off the bus has no handle
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
        "held_by": [_named(process.pid) for process in processes],
        "peers": [_reaches(pynvml, handle, other) for other in handles if other is not handle],
    }


def _ask(pynvml: Any, function: Callable[..., Any], *words: Any) -> Any:
    """NVML's answer, or None if the query fails, so that the other queries can go on."""
    try:
        return function(*words)
    except pynvml.NVMLError:
        return None


def _named(process: int) -> str:
    try:
        return f"{process} {psutil.Process(process).name()}"
    except psutil.Error:
        return str(process)


def _reaches(pynvml: Any, one: Any, other: Any) -> bool:
    """True if a GPU can read the other's memory directly."""
    status = _ask(pynvml, pynvml.nvmlDeviceGetP2PStatus, one, other, pynvml.NVML_P2P_CAPS_INDEX_READ)
    return status == pynvml.NVML_P2P_STATUS_OK


def torch_cuda() -> str | None:
    """The version of CUDA that the installed torch was built for, read without importing torch.

    None for a torch without CUDA.
    """
    found = importlib.util.find_spec("torch")
    if found is None or found.origin is None:
        return None
    text = Path(found.origin).with_name("version.py").read_text()
    match = re.search(r"^cuda[^=\n]*= '([\d.]+)'", text, re.MULTILINE)
    return match and match[1]


def driver_problem(found: Devices, cuda: str | None) -> str | None:
    """Why a torch built for this version of CUDA can't use the host's GPUs; None without a known problem."""
    if found.problem:
        return f"the NVIDIA driver does not answer ({found.problem})"
    if not found.gpus:
        return None
    if cuda is None:
        return "the installed torch has no CUDA"
    if found.driver_cuda and found.driver_cuda[0] < int(cuda.split(".")[0]):
        runs = ".".join(map(str, found.driver_cuda))
        return f"driver {found.driver} runs CUDA up to {runs}, the installed torch is built for CUDA {cuda}"
    return None


def needed_driver(cuda: str) -> str:
    """`driver 580 or newer`, for a torch built for this version of CUDA."""
    least = LEAST_DRIVER.get(int(cuda.split(".")[0]))
    return f"driver {least} or newer" if least else "a newer driver"


def visible_devices(numbers: Sequence[int]) -> dict[str, str]:
    """The environment that selects these GPUs of a host, numbered as in nvidia-smi and the hostfile.

    By default CUDA would number the fastest GPU first.
    """
    return {"CUDA_DEVICE_ORDER": "PCI_BUS_ID", "CUDA_VISIBLE_DEVICES": ",".join(map(str, numbers))}


def runs_on(built: str, major: int, minor: int) -> bool:
    """True if the GPU runs code for `built`: sm_80 on 8.0 and later 8.x, compute_80 also on newer GPUs."""
    kind, _, number = built.partition("_")
    built_major, built_minor = divmod(int(number.rstrip("af")), 10)
    if kind == "compute":
        return (built_major, built_minor) <= (major, minor)
    return built_major == major and built_minor <= minor
