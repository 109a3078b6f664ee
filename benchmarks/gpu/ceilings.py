"""Facts about the device, and its ceilings: copies, and products of matrices in each precision."""

import statistics
import time
from collections.abc import Callable

import torch

from benchmarks.gpu.rows import Result, Row, Setting, need_gpu
from common.system.gpus import devices

ROUNDS = 5


def rows() -> dict[str, Row]:
    kinds = {"fp32": torch.float32, "tf32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
    return {
        "facts": facts,
        "copy on the device": copy_on_device,
        "copy from pinned memory": copy_from_host,
        **{f"matrix product, {name}": product(kind, name == "tf32") for name, kind in kinds.items()},
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
    seconds = median_s(setting, lambda: target.copy_(source))
    return Result(round(2 * len(source) / seconds / 1e9, 1), "GB/s")


def copy_from_host(setting: Setting) -> Result:
    need_gpu(setting)
    source = torch.zeros(2**28, dtype=torch.uint8).pin_memory()
    target = torch.empty_like(source, device=setting.device)
    seconds = median_s(setting, lambda: target.copy_(source, non_blocking=True))
    return Result(round(len(source) / seconds / 1e9, 1), "GB/s")


def product(kind: torch.dtype, tf32: bool) -> Row:
    def measured(setting: Setting) -> Result:
        return Result(round(product_flops(setting, kind, tf32) / 1e12, 3), "TFLOP/s")

    return measured


def product_flops(setting: Setting, kind: torch.dtype, tf32: bool = False) -> float:
    """Floating-point operations in a second of a large square product: the peak that MFU is measured by."""
    size = setting.size(8192, 256)
    a, b = (torch.randn(size, size, device=setting.device, dtype=kind) for _ in range(2))
    before = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = tf32
    try:
        return 2 * size**3 / median_s(setting, lambda: torch.mm(a, b))
    finally:
        torch.backends.cuda.matmul.allow_tf32 = before


def median_s(setting: Setting, work: Callable[[], object], repeats: int = 10) -> float:
    """Seconds of one call: the median of ROUNDS, each of `repeats` calls, after one that warms up."""
    times = []
    for _ in range(ROUNDS + 1):
        wait(setting)
        began = time.perf_counter()
        for _ in range(repeats):
            work()
        wait(setting)
        times.append((time.perf_counter() - began) / repeats)
    return statistics.median(times[1:])


def wait(setting: Setting) -> None:
    if not setting.dry_run:
        torch.cuda.synchronize()
