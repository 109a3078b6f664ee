"""Measure the device's performance ceilings, and compare a checkpoint's snapshot with a blocking copy.

    python -m benchmarks.gpu.device ceilings

The command prints a line of JSON that maps each row's name to its cells.
"""

import json
import statistics
import sys
from collections.abc import Callable
from dataclasses import asdict

import torch
from torch import nn
from torch.utils.benchmark import Timer

from benchmarks.gpu import attention
from benchmarks.gpu.rows import Result, Row, Setting, check, on_gpu, succeeds
from onecurve.system.gpus import list_gpus

# Data type and expected TFLOP/s of each matrix product. All expected values in this file were measured on one
# H200 (docs/gpu.md).
PRODUCTS = {"fp32": (torch.float32, 50.9), "bf16": (torch.bfloat16, 738), "fp16": (torch.float16, 689)}


def rows_of(name: str) -> dict[str, Row]:
    """Return the rows that a function in this file measures in a separate process."""

    def row(setting: Setting) -> dict[str, Result]:
        measured = json.loads(succeeds(setting, ["-m", "benchmarks.gpu.device", name]))
        return {name: Result(**cells) for name, cells in measured.items()}

    return {"": row, "vit saves": saves} if name == "snapshots" else {"": row}


def ceilings(device: torch.device) -> dict[str, Result]:
    on_gpu = device.type == "cuda"
    small = torch.zeros(1, device=device)
    source = torch.zeros(2**30 if on_gpu else 2**22, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    results = {
        "facts": facts(on_gpu),
        # The result is the host's time to launch a kernel, because the GPU keeps up with the host.
        "one launch": Result(round(1e6 * median_s(lambda: small.add_(1)), 1), "us", 5.9),
        "copy on the device": speed_of(lambda: target.copy_(source), 2 * len(source), 4239),
    }
    if on_gpu:
        pinned = torch.zeros(2**28, dtype=torch.uint8).pin_memory()
        part = target[: len(pinned)]
        copying = speed_of(lambda: part.copy_(pinned, non_blocking=True), len(pinned), 55.5)
        results["copy from pinned memory"] = copying
    for name, (dtype, expected) in PRODUCTS.items():
        results[f"matrix product, {name}"] = tflops(product_flops(device, dtype), expected)
    return results


def thorough() -> dict[str, Row]:
    return rows_of("tf32") | {"attention's tiles": on_gpu(rows_of("tiles")[""])}


def tf32(device: torch.device) -> dict[str, Result]:
    return {"matrix product, tf32": tflops(product_flops(device, torch.float32, tf32=True), 363)}


def tflops(flops: float, expected: float) -> Result:
    return Result(round(flops / 1e12, 3), "TFLOP/s", expected)


def facts(on_gpu: bool) -> Result:
    if not on_gpu:
        return Result("CPU", note=f"torch {torch.__version__}, {torch.get_num_threads()} threads")
    properties = torch.cuda.get_device_properties(0)
    size = f"{properties.total_memory / 2**30:.0f} GiB, {properties.multi_processor_count} multiprocessors"
    versions = f"driver {list_gpus().driver}, torch {torch.__version__}, CUDA {torch.version.cuda}"
    return Result(properties.name, note=f"{size}, {versions}")


def speed_of(work: Callable[[], object], moved: int, expected: float) -> Result:
    """Measure the memory bandwidth of `work`, which reads and writes `moved` bytes in total."""
    return Result(round(moved / median_s(work) / 1e9, 1), "GB/s", expected)


def product_flops(device: torch.device, dtype: torch.dtype, tf32: bool = False) -> float:
    """Return the FLOP/s of a large square matrix product. The suite uses them as the MFU's peak."""
    size = 256 if device.type == "cpu" else 8192
    a, b = (torch.randn(size, size, device=device, dtype=dtype) for _ in range(2))
    before = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = tf32
    try:
        return 2 * size**3 / median_s(lambda: torch.mm(a, b))
    finally:
        torch.backends.cuda.matmul.allow_tf32 = before


def median_s(work: Callable[[], object]) -> float:
    """Return the median seconds of one call to `work`.

    torch's timer waits for the device after each block of calls.
    """
    return Timer("work()", globals={"work": work}).blocked_autorange(min_run_time=0.1).median


# --- Snapshots


def snapshots(device: torch.device) -> dict[str, Result]:
    results = {"weights of one step in a snapshot": consistent(64 if device.type == "cpu" else 8192)}
    if device.type == "cuda":  # copy as many weights as ViT-B has
        weights = torch.zeros(86_000_000, device=device)
        results["blocking copy"] = Result(round(1e3 * median_s(weights.cpu), 1), "ms", 150)
    return results


def consistent(size: int) -> Result:
    """Check that a snapshot contains the weights of one step, although training continues immediately."""
    from onecurve.checkpoint.training import TrainingState
    from onecurve.distributed.accelerator import prepare, start
    from onecurve.flags.recipe import Job

    accelerator, _ = start(Job(batch_size=8, mixed_precision="no"))
    model = nn.Linear(size, size)
    model, optimizer = prepare(accelerator, model, torch.optim.SGD(model.parameters(), lr=1.0))
    inputs = torch.ones(8, size, device=accelerator.device)
    training = TrainingState(accelerator, model, optimizer, None)
    training.allocate(training.expected_specs())
    wrong = 0
    for _ in range(10):
        before = {name: p.detach().clone() for name, p in model.named_parameters()}
        taken = training.take_snapshots()
        for _ in range(3):
            model(inputs).mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        training.wait_until_copied()
        views = taken["model.safetensors"].views
        wrong += any(not torch.equal(before[name].cpu(), views[name].cpu()) for name in before)
    return check(wrong == 0, wrong, "snapshots with weights of another step", 0)


def saves(setting: Setting) -> Result:
    """Measure how long a save blocks a step, compared with `accelerator.save_state`."""
    model = ["--model", "vit_tiny_patch16_224"] if setting.dry_run else []
    file = setting.folder / "saves.json"
    words = ["-m", "benchmarks.checkpoint_saves", "--rounds", setting.size(2, 1), *model, "--json", file]
    succeeds(setting, [*words, "--folder", setting.folder / "saves"])
    rounds = json.loads(file.read_text())["rounds"]
    medians = {arm: 1e3 * statistics.median(numbers[arm] for numbers in rounds) for arm in rounds[0]}
    note = f"save_state {medians['save_state']:,.1f} ms"
    return Result(round(medians["ours"], 1), "ms", "below save_state's", note=note)


if __name__ == "__main__":
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    functions = {"ceilings": ceilings, "snapshots": snapshots, "tf32": tf32}
    functions |= {"attention": attention.attention, "tiles": attention.tiles}
    measured = functions[sys.argv[1]](device)
    print(json.dumps({name: asdict(result) for name, result in measured.items()}))
