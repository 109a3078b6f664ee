"""Defines `torch.ops.onecurve.short_attention`, Triton kernels for attention with few tokens.

onecurve/models/attention.py decides when to use the kernels, and computes the same function in plain torch.
This file imports Triton, so only runs that use the kernels import it.

A Triton program computes one head of one sample, or some of the head's tokens. Each program reads query, key
and value directly from the projection's output, [B, N, 3, H, D], and writes the gradients to the same
positions in one packed tensor. No program accesses memory that a different program writes. Therefore, the
kernels need no atomics, and the results are bitwise identical for any execution order of the programs.

- With up to 64 tokens, a program keeps one head in registers, and the backward kernel recomputes the softmax.
- With 65 to 256 tokens, a program loops over tiles of keys (FlashAttention-2, arXiv 2307.08691). The forward
  kernel divides the queries among programs, and stores the logarithm of each softmax denominator. A backward
  program processes all queries of one head, so it writes the gradients of a tile's keys and values in one
  pass.

The kernels receive only pointers as arguments. All numbers are compile-time constants (tl.constexpr), because
some Inductor versions passed a Python float to a Triton kernel as fp64, whereas Triton passes fp32. This bug
was introduced by pytorch #170289 in December 2025 and fixed by #190340, which torch 2.15 includes. A scale
passed as an argument therefore made compiled steps compute the softmax in fp64. Compiled for an H200, the
prototype's forward and backward kernels contained 966 and 1,112 fp64 instructions instead of none, and used
112 and 220 registers instead of 80 and 149. These instructions are the likely reason why the two kernels took
0.32 ms in a compiled step but 0.127 ms outside of a compiled step (torch 2.11). Inductor preserves warps,
strides and alignment. The code that Inductor generates for ViT-B/32 on a CPU uses the same values as an eager
launch.
"""

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.library import register_autograd, register_fake, triton_op, wrap_triton
from torch.utils.flop_counter import register_flop_formula


class Tiles(NamedTuple):
    """Tile sizes for programs that process more than MAX_WHOLE_TOKENS tokens."""

    rows: int  # queries per program, or 0 for all queries
    keys: int  # keys per tile
    warps: int


MAX_WHOLE_TOKENS = 64  # maximum number of tokens for which a program keeps a whole head in registers
WHOLE_WARPS = 4  # warps per program; 4 was the fastest of 1, 2, 4 and 8 on an H200 with 50 tokens
# These tile sizes were chosen based on the compiled kernels' register and shared-memory use. The kernels'
# speed with these sizes has not been measured on a GPU yet.
FORWARD_TILES, BACKWARD_TILES = Tiles(64, 32, 4), Tiles(0, 32, 8)
LOG2_E = tl.constexpr(1.4426950408889634)  # converts exponents to base 2, because GPUs compute powers of 2


@triton.jit
def _rows(first, stride: tl.constexpr, N: tl.constexpr, D: tl.constexpr, R: tl.constexpr, P: tl.constexpr):
    """Return memory offsets and a validity mask, both [R, P], for R tokens starting at token `first`."""
    n, d = first + tl.arange(0, R), tl.arange(0, P)
    return n[:, None] * stride + d[None, :], (n[:, None] < N) & (d[None, :] < D)


@triton.jit
def _scores(q, k, first, N: tl.constexpr, T: tl.constexpr, SCALE: tl.constexpr):
    """Return base-2 logarithms of the softmax numerators for T keys starting at key `first`: [R, T]."""
    scores = tl.dot(q, tl.trans(k)) * (SCALE * LOG2_E)
    return tl.where((first + tl.arange(0, T))[None, :] < N, scores, float("-inf"))


@triton.jit
def _forward(
    qkv, out, logs, N: tl.constexpr, H: tl.constexpr, D: tl.constexpr, P: tl.constexpr, R: tl.constexpr,
    T: tl.constexpr, SCALE: tl.constexpr,
):  # fmt: skip
    """Compute the attention output for R tokens of a head per program, in tiles of T keys."""
    BLOCKS: tl.constexpr = (N + R - 1) // R
    number, first = tl.program_id(0) // BLOCKS, tl.program_id(0) % BLOCKS * R
    sample, head = (number // H).to(tl.int64), number % H
    start = qkv + sample * (N * 3 * H * D) + head * D
    rows, mask = _rows(first, 3 * H * D, N, D, R, P)
    q = tl.load(start + rows, mask, 0.0)
    if T >= N:
        tile, exists = _rows(0, 3 * H * D, N, D, T, P)
        k = tl.load(start + H * D + tile, exists, 0.0)
        v = tl.load(start + 2 * H * D + tile, exists, 0.0)
        scores = _scores(q, k, 0, N, T, SCALE)
        p = tl.exp2(scores - tl.max(scores, 1)[:, None])
        o, total = tl.dot(p.to(v.dtype), v), tl.sum(p, 1)
    else:
        largest = tl.full([R], float("-inf"), tl.float32)
        o, total = tl.zeros([R, P], tl.float32), tl.zeros([R], tl.float32)
        for key in range(0, N, T):
            tile, exists = _rows(key, 3 * H * D, N, D, T, P)
            k = tl.load(start + H * D + tile, exists, 0.0)
            v = tl.load(start + 2 * H * D + tile, exists, 0.0)
            scores = _scores(q, k, key, N, T, SCALE)
            before, largest = largest, tl.maximum(largest, tl.max(scores, 1))
            p, shrink = tl.exp2(scores - largest[:, None]), tl.exp2(before - largest)
            o = tl.dot(p.to(v.dtype), v, o * shrink[:, None])
            total = total * shrink + tl.sum(p, 1)
        n = first + tl.arange(0, R)
        tl.store(logs + number * N + n, largest + tl.log2(total), n < N)
    rows, mask = _rows(first, H * D, N, D, R, P)
    tl.store(out + sample * (N * H * D) + head * D + rows, (o / total[:, None]).to(q.dtype), mask)


@triton.jit
def _backward(
    qkv, out, logs, gradient, packed, N: tl.constexpr, H: tl.constexpr, D: tl.constexpr, P: tl.constexpr,
    R: tl.constexpr, T: tl.constexpr, SCALE: tl.constexpr,
):  # fmt: skip
    """Compute the gradients of one head per program (R >= N). The gradients of padding rows are 0."""
    sample, head = (tl.program_id(0) // H).to(tl.int64), tl.program_id(0) % H
    rows, mask = _rows(0, H * D, N, D, R, P)
    rows += sample * (N * H * D) + head * D
    do = tl.load(gradient + rows, mask, 0.0)
    if T < N:
        n = tl.arange(0, R)
        log = tl.load(logs + tl.program_id(0) * N + n, n < N, 0.0)
        mean = tl.sum(do.to(tl.float32) * tl.load(out + rows, mask, 0.0).to(tl.float32), 1)
    start = sample * (N * 3 * H * D) + head * D
    rows, mask = _rows(0, 3 * H * D, N, D, R, P)
    q = tl.load(qkv + start + rows, mask, 0.0)
    dq = tl.zeros([R, P], tl.float32)
    for key in range(0, N, T):
        tile, exists = _rows(key, 3 * H * D, N, D, T, P)
        tile += start
        k = tl.load(qkv + tile + H * D, exists, 0.0)
        v = tl.load(qkv + tile + 2 * H * D, exists, 0.0)
        scores = _scores(q, k, key, N, T, SCALE)
        if T < N:
            p = tl.exp2(scores - log[:, None])
        else:
            p = tl.exp2(scores - tl.max(scores, 1)[:, None])
            p = p / tl.sum(p, 1)[:, None]
        dv = tl.dot(tl.trans(p.to(q.dtype)), do)
        tl.store(packed + tile + 2 * H * D, dv.to(q.dtype), exists)
        dp = tl.dot(do, tl.trans(v))
        if T >= N:
            mean = tl.sum(p * dp, 1)
        ds = (p * (dp - mean[:, None]) * SCALE).to(q.dtype)
        dq = tl.dot(ds, k, dq)
        tl.store(packed + tile + H * D, tl.dot(tl.trans(ds), q).to(q.dtype), exists)
    tl.store(packed + start + rows, dq.to(q.dtype), mask)


@triton_op("onecurve::short_attention", mutates_args=())
def short_attention(qkv: Tensor) -> tuple[Tensor, Tensor]:
    """Compute attention, [B, N, 3, H, D] -> [B, N, H, D], and the logarithms of the softmax sums.

    The logarithms are an fp32 tensor [B, H, N], which is empty for up to MAX_WHOLE_TOKENS tokens.
    """
    qkv = qkv.contiguous()
    out, logs = _empty_outputs(qkv)
    programs, settings = _launch_settings(qkv, FORWARD_TILES)
    wrap_triton(_forward)[programs](qkv, out, logs, **settings)
    return out, logs


@triton_op("onecurve::short_attention_backward", mutates_args=())
def short_attention_backward(qkv: Tensor, out: Tensor, logs: Tensor, gradient: Tensor) -> Tensor:
    """Compute the gradient of qkv, [B, N, 3, H, D], from the gradient of the output."""
    qkv, gradient = qkv.contiguous(), gradient.contiguous()
    packed = qkv.new_empty(qkv.shape)
    programs, settings = _launch_settings(qkv, BACKWARD_TILES)
    wrap_triton(_backward)[programs](qkv, out, logs, gradient, packed, **settings)
    return packed


def _empty_outputs(qkv: Tensor) -> tuple[Tensor, Tensor]:
    samples, tokens, _, heads, head_size = qkv.shape
    logs_shape = (samples, heads, tokens) if tokens > MAX_WHOLE_TOKENS else (0,)
    return qkv.new_empty(samples, tokens, heads, head_size), qkv.new_empty(logs_shape, dtype=torch.float32)


def _launch_settings(qkv: Tensor, tiles: Tiles) -> tuple[tuple[int], dict[str, Any]]:
    """Return the launch grid (number of programs), and the kernel's constants and number of warps."""
    samples, tokens, _, heads, head_size = qkv.shape
    padded_tokens = _padded(tokens)
    rows, keys, warps = (padded_tokens, padded_tokens, WHOLE_WARPS) if tokens <= MAX_WHOLE_TOKENS else tiles
    rows = rows or padded_tokens
    settings = {"N": tokens, "H": heads, "D": head_size, "P": _padded(head_size), "R": rows, "T": keys}
    settings |= {"SCALE": head_size**-0.5, "num_warps": warps}
    return (samples * heads * triton.cdiv(tokens, rows),), settings


def _padded(count: int) -> int:
    """Round up to a power of 2 of at least 16, which Triton requires for the edges of matrix products."""
    return max(16, triton.next_power_of_2(count))


# The fake implementations, which plan.py uses, compute only shapes and work on any device.
register_fake(short_attention, _empty_outputs)
register_fake(short_attention_backward, lambda qkv, *_: qkv.new_empty(qkv.shape))


def _save_for_backward(ctx: Any, inputs: tuple[Tensor], output: tuple[Tensor, Tensor]) -> None:
    ctx.mark_non_differentiable(output[1])
    ctx.save_for_backward(*inputs, *output)


def _differentiate(ctx: Any, gradient: Tensor, _: Tensor | None) -> Tensor:
    return short_attention_backward(*ctx.saved_tensors, gradient)


register_autograd(short_attention, _differentiate, setup_context=_save_for_backward)


@register_flop_formula(torch.ops.onecurve.short_attention)
def _forward_flops(qkv: Any, **_: Any) -> int:
    samples, tokens, _, heads, size = qkv
    return 4 * samples * heads * tokens**2 * size


@register_flop_formula(torch.ops.onecurve.short_attention_backward)
def _backward_flops(qkv: Any, *_: Any, **__: Any) -> int:
    # FLOP formula of torch's attention, whose backward pass also recomputes the scores
    return 5 * _forward_flops(qkv) // 2
