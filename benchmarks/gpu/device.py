"""The device: its facts and ceilings, and the snapshot of a checkpoint beside a blocking copy."""

import json
import statistics
import time
from collections.abc import Callable

import torch
from torch import nn

from benchmarks.gpu.rows import Result, Row, Setting, check, need_gpu, succeeds
from benchmarks.harness import wait_for_device
from common.system.gpus import devices

ROUNDS = 5
# Type, and the TFLOP/s that are expected: two thirds of the data sheet of an H100.
PRODUCTS = {"fp32": (torch.float32, 45), "tf32": (torch.float32, 330)}
PRODUCTS |= {"bf16": (torch.bfloat16, 650), "fp16": (torch.float16, 650)}


def ceilings() -> dict[str, Row]:
    rows: dict[str, Row] = {"facts": facts, "one launch": launch, "copy on the device": copy_on_device}
    rows["copy from pinned memory"] = copy_from_host
    return rows | {f"matrix product, {kind}": product(kind) for kind in PRODUCTS}


def facts(setting: Setting) -> Result:
    if setting.dry_run:
        return Result("CPU", note=f"torch {torch.__version__}, {torch.get_num_threads()} threads")
    about = torch.cuda.get_device_properties(0)
    size = f"{about.total_memory / 2**30:.0f} GiB, {about.multi_processor_count} multiprocessors"
    versions = f"driver {devices().driver}, torch {torch.__version__}, CUDA {torch.version.cuda}"
    return Result(about.name, note=f"{size}, {versions}")


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


def product(name: str) -> Row:
    kind, expected = PRODUCTS[name]

    def row(setting: Setting) -> Result:
        tflops = product_flops(setting.device, kind, name == "tf32") / 1e12
        return Result(round(tflops, 3), "TFLOP/s", expected)

    return row


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
        wait_for_device()
        began = time.perf_counter()
        for _ in range(repeats):
            work()
        wait_for_device()
        times.append((time.perf_counter() - began) / repeats)
    return statistics.median(times[1:])


# --- Snapshots


def snapshots() -> dict[str, Row]:
    return {"snapshots are of one step": consistent, "a blocking copy": blocking, "vit saves": saves}


def consistent(setting: Setting) -> Result:
    """Steps go on right after each snapshot. A copy that is overtaken by one would have its numbers."""
    from common.checkpoint.training import TrainingState
    from common.distributed.accelerator import prepare, start
    from common.recipe import Job

    accelerator, _ = start(Job(batch_size=8, mixed_precision="no"))
    size = setting.size(8192, 64)
    model = nn.Linear(size, size)
    model, optimizer = prepare(accelerator, model, torch.optim.SGD(model.parameters(), lr=1.0))
    inputs = torch.ones(8, size, device=accelerator.device)
    training = TrainingState(accelerator, model, optimizer, None)
    training.allocate(training.expected())
    wrong = 0
    for _ in range(10):
        before = {name: p.detach().clone() for name, p in model.named_parameters()}
        taken = training.take()
        for _ in range(3):
            model(inputs).mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        training.wait_until_copied()
        views = taken["model.safetensors"].views
        wrong += any(not torch.equal(before[name].cpu(), views[name].cpu()) for name in before)
    return check(wrong == 0, wrong, "of another step", 0)


def blocking(setting: Setting) -> Result:
    """Milliseconds of the copy of a model of ViT-B's size that waits for it."""
    need_gpu(setting)
    weights = torch.zeros(86_000_000, device=setting.device)
    return Result(round(1e3 * median_s(lambda: weights.cpu(), repeats=2), 1), "ms", 150)


def saves(setting: Setting) -> Result:
    """How long a save holds up a step, beside accelerator.save_state."""
    model = ["--model", "vit_tiny_patch16_224"] if setting.is_small else []
    file = setting.folder / "saves.json"
    words = ["-m", "benchmarks.checkpoint_saves", "--rounds", setting.size(5, 1), *model, "--json", file]
    succeeds(setting, [*words, "--folder", setting.folder / "saves"])
    rounds = json.loads(file.read_text())["rounds"]
    ours, theirs = (1e3 * statistics.median(each[arm] for each in rounds) for arm in ("ours", "save_state"))
    return Result(round(ours, 1), "ms", "below save_state's", note=f"save_state {theirs:,.1f} ms")
