"""Compare the project's attention kernel with torch's backends by time and error, forward and backward.

    python -m benchmarks.gpu_suite --out gpu --only attention

All expected times were measured on one H200 (docs/gpu.md). The kernel's expected time was measured with a
prototype.
"""

import statistics
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from benchmarks.gpu.rows import Result, check
from onecurve.models.attention import has_kernel, plain_attention

REPEATED = 10  # number of attention layers in a CUDA graph
BACKENDS = {
    "flash": SDPBackend.FLASH_ATTENTION,
    "cuDNN": SDPBackend.CUDNN_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
}
AS_EXACT = 1.5  # largest allowed kernel error against float64, as a multiple of flash attention's error


class Shape(NamedTuple):
    """Shape of an attention layer's inputs."""

    samples: int
    tokens: int
    heads: int
    size: int = 64  # head dimension
    expected: dict[str, float] = {}  # noqa: RUF012  # expected milliseconds of each arm


SHAPES = {
    "ViT-B/32, 50 tokens": Shape(
        *(512, 50, 12), expected={"kernel": 0.127, "flash": 0.794, "cuDNN": 0.475, "efficient": 0.322}
    ),
    "65 tokens": Shape(512, 65, 3, expected={"flash": 0.224, "cuDNN": 0.160, "efficient": 0.225}),
    "ViT-S/16, 197 tokens": Shape(
        *(256, 197, 6), expected={"flash": 0.615, "cuDNN": 0.456, "efficient": 0.980}
    ),
    "256 tokens": Shape(256, 256, 6),
}
# Tile rows, tile keys and warps of the forward and backward kernels
TILES = [(64, 32, 4), (64, 64, 4), (128, 32, 8), (128, 64, 8)]
TILES_BACK = [(0, 16, 8), (0, 32, 4), (0, 32, 8), (0, 64, 8), (0, 64, 16)]

Arm = Callable[[Tensor], Tensor]


def attention(device: torch.device) -> dict[str, Result]:
    """Measure each arm's milliseconds for each shape.

    Check that the kernel is about as accurate as flash attention.
    """
    results = {}
    for name, shape in shapes(device):
        errors = {}
        for arm, run in arms(device).items():
            inputs = inputs_of(shape, device)
            ms, errors[arm] = milliseconds(run, *inputs), error(run, *inputs)
            note = f"error {errors[arm]:.1e}; memory traffic alone takes {shape_ms(shape):.3f} ms on an H200"
            results[f"{name}, {arm}"] = Result(round(ms, 4), "ms", shape.expected.get(arm, ""), note=note)
        if "kernel" in errors:
            least = errors.get("flash", errors.get("plain twin", 0.0))
            is_exact = errors["kernel"] <= AS_EXACT * least
            promised = f"at most {AS_EXACT} x {least:.1e}"
            results[f"{name}, error"] = check(is_exact, f"{errors['kernel']:.1e}", "", promised)
    return results


def tiles(device: torch.device) -> dict[str, Result]:
    """Measure the kernel with tile sizes other than the defaults in attention_kernels.py."""
    from onecurve.models import attention_kernels as kernels

    results, defaults = {}, (kernels.FORWARD_TILES, kernels.BACKWARD_TILES)
    pairs = [(kernels.Tiles(*tile), defaults[1]) for tile in TILES]
    pairs += [(defaults[0], kernels.Tiles(*tile)) for tile in TILES_BACK]
    for name, shape in shapes(device):
        for pair in pairs if shape.tokens > kernels.MAX_WHOLE_TOKENS else ():
            kernels.FORWARD_TILES, kernels.BACKWARD_TILES = pair
            cell = f"{name}, forward {tuple(pair[0])}, backward {tuple(pair[1])}"
            try:
                results[cell] = Result(round(milliseconds(kernel, *inputs_of(shape, device)), 4), "ms")
            except Exception as error:  # Triton raises different errors for too much shared memory
                results[cell] = Result(note=f"{type(error).__name__}: {str(error)[:100]}")
    kernels.FORWARD_TILES, kernels.BACKWARD_TILES = defaults
    return results


def shapes(device: torch.device) -> Iterator[tuple[str, Shape]]:
    for name, shape in SHAPES.items():
        yield name, shape if device.type == "cuda" else shape._replace(samples=1, heads=1)


def arms(device: torch.device) -> dict[str, Arm]:
    by_name: dict[str, Arm] = {"plain twin": plain_attention}
    if device.type == "cuda":
        by_name = {name: partial(torch_attention, backend) for name, backend in BACKENDS.items()}
    if has_kernel(device, "bf16"):
        import onecurve.models.attention_kernels  # noqa: F401

        by_name = {"kernel": kernel} | by_name
    return by_name


def kernel(qkv: Tensor) -> Tensor:
    return torch.ops.onecurve.short_attention(qkv)[0]


def torch_attention(backend: SDPBackend, qkv: Tensor) -> Tensor:
    q, k, v = (part.transpose(1, 2) for part in qkv.unbind(2))
    with sdpa_kernel(backend):
        return F.scaled_dot_product_attention(q, k, v).transpose(1, 2)


def inputs_of(shape: Shape, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return a random qkv tensor [B, N, 3, H, D] and a random output gradient [B, N, H, D]."""
    samples, tokens, heads, size, _ = shape
    draw = partial(torch.randn, device=device, dtype=torch.bfloat16)
    return draw(samples, tokens, 3, heads, size).requires_grad_(), draw(samples, tokens, heads, size)


def shape_ms(shape: Shape) -> float:
    """Return the milliseconds that a shape's memory traffic takes at 4.2 TB/s.

    The kernels read qkv twice, write the outputs and qkv's gradient, and read the outputs and their gradient.
    """
    return 1e3 * 12 * 2 * shape.samples * shape.tokens * shape.heads * shape.size / 4.2e12


def milliseconds(run: Arm, qkv: Tensor, gradient: Tensor) -> float:
    """Return the milliseconds of a forward and backward pass.

    The time is measured in a graph of REPEATED passes on a GPU, and in one call on a CPU.
    """

    def layers() -> None:
        for _ in range(REPEATED if qkv.is_cuda else 1):
            torch.autograd.grad(run(qkv), qkv, gradient)

    if not qkv.is_cuda:
        began = time.perf_counter()
        layers()
        return 1e3 * (time.perf_counter() - began)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        layers()
    torch.cuda.current_stream().wait_stream(side)
    graph, times = torch.cuda.CUDAGraph(), []
    with torch.cuda.graph(graph):
        layers()
    for _ in range(12):
        began, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        began.record()
        graph.replay()
        ended.record()
        ended.synchronize()
        times.append(began.elapsed_time(ended) / REPEATED)
    return statistics.median(times[2:])


def error(run: Arm, qkv: Tensor, gradient: Tensor) -> float:
    """Return the larger of the outputs' and gradients' relative errors against float64, for 8 samples."""
    few, few_gradient = qkv[:8].detach().requires_grad_(), gradient[:8]
    exact = few.detach().double().requires_grad_()
    out, precise = run(few), plain_attention(exact)
    (grad,) = torch.autograd.grad(out, few, few_gradient)
    (precise_grad,) = torch.autograd.grad(precise, exact, few_gradient.double())
    pairs = [(out, precise), (grad, precise_grad)]
    return max(((value.double() - exact).norm() / exact.norm()).item() for value, exact in pairs)
