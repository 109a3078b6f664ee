"""Facts about the device, and its ceilings: copies, and products of matrices in each precision."""

import statistics
import time
from collections.abc import Callable

import torch

from benchmarks.gpu.rows import Result, Row, Setting, need_gpu
from common.system.gpus import devices

ROUNDS = 5


# Type, and the TFLOP/s that are expected: two thirds of the data sheet of an H100.
PRODUCTS = {"fp32": (torch.float32, 45), "tf32": (torch.float32, 330)}
PRODUCTS |= {"bf16": (torch.bfloat16, 650), "fp16": (torch.float16, 650)}


def rows() -> dict[str, Row]:
    return {
        "facts": facts,
        "one launch": launch,
        "copy on the device": copy_on_device,
        "copy from pinned memory": copy_from_host,
        **{
            f"matrix product, {name}": product(kind, name == "tf32", expected)
            for name, (kind, expected) in PRODUCTS.items()
        },
    }


def facts(setting: Setting) -> Result:
    if setting.dry_run:
        return Result("CPU", note=f"torch {torch.__version__}, {torch.get_num_threads()} threads")
    about = torch.cuda.get_device_properties(0)
    driver, cuda = devices().driver, torch.version.cuda
    size = f"{about.total_memory / 2**30:.0f} GiB, {about.multi_processor_count} multiprocessors"
    return Result(about.name, note=f"{size}, driver {driver}, torch {torch.__version__}, CUDA {cuda}")


def copy_on_device(setting: Setting) -> Result:
    """Bytes read and written in a second."""
    source = torch.zeros(setting.size(2**30, 2**22), dtype=torch.uint8, device=setting.device)
    target = torch.empty_like(source)
    seconds = median_s(lambda: target.copy_(source))
    return Result(round(2 * len(source) / seconds / 1e9, 1), "GB/s", expected=3000)


def copy_from_host(setting: Setting) -> Result:
    need_gpu(setting)
    source = torch.zeros(2**28, dtype=torch.uint8).pin_memory()
    target = torch.empty_like(source, device=setting.device)
    seconds = median_s(lambda: target.copy_(source, non_blocking=True))
    return Result(round(len(source) / seconds / 1e9, 1), "GB/s", expected=50)


def launch(setting: Setting) -> Result:
    """What the host needs for one kernel, while the GPU keeps up."""
    small = torch.zeros(1, device=setting.device)
    return Result(round(1e6 * median_s(lambda: small.add_(1), 1000), 1), "us", expected=7)


def product(kind: torch.dtype, tf32: bool, expected: float) -> Row:
    def measured(setting: Setting) -> Result:
        tflops = product_flops(setting.device, kind, tf32) / 1e12
        return Result(round(tflops, 3), "TFLOP/s", expected)

    return measured


def product_flops(device: torch.device, kind: torch.dtype, tf32: bool = False) -> float:
    """Floating-point operations in a second of a large square product: a peak that MFU is measured by."""
    size = 256 if device.type == "cpu" else 8192
    a, b = (torch.randn(size, size, device=device, dtype=kind) for _ in range(2))
    before = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = tf32
    try:
        return 2 * size**3 / median_s(lambda: torch.mm(a, b))
    finally:
        torch.backends.cuda.matmul.allow_tf32 = before


def median_s(work: Callable[[], object], repeats: int = 10) -> float:
    """Seconds of one call: the median of ROUNDS, each of `repeats` calls, after one that warms up."""
    times = []
    for _ in range(ROUNDS + 1):
        wait()
        began = time.perf_counter()
        for _ in range(repeats):
            work()
        wait()
        times.append((time.perf_counter() - began) / repeats)
    return statistics.median(times[1:])


def wait() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()
