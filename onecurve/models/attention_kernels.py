"""Triton kernels for attention with few tokens, as the operator `torch.ops.onecurve.short_attention`.

onecurve/models/attention.py decides when the kernels are used, and computes the same function in plain torch.
This file imports Triton, so only a training that uses the kernels imports it.

A program computes one head of one sample, or some of the head's tokens. It reads query, key and value
directly from the projection's output, [B, N, 3, H, D], and writes their gradients to the same positions of
one packed tensor. No program reads or changes values that another program writes. Therefore the kernels need
no atomics, and the bits of the results do not depend on the order of the programs.

- With up to 64 tokens, a program holds its head in registers, and backward recomputes the softmax.
- With 65 to 256 tokens, a program loops over tiles of keys (FlashAttention-2, arXiv 2307.08691). Forward
  divides the queries among programs, and stores the logarithm of each softmax's sum. A backward program
  processes all queries of its head, so it writes the gradients of a tile's keys and values in one pass.

All numbers are constants of the kernels (tl.constexpr); the only arguments are pointers. The reason is that
Inductor passed a Python float to a Triton kernel as fp64, whereas Triton passes fp32 (since pytorch #170289
of December 2025; fixed by #190340, which torch 2.15 includes). With the scale as an argument, the softmax of
a compiled step was then computed in fp64. Compiled for an H200, the prototype had 966 fp64 instructions in
forward and 1,112 in backward instead of none, and used 112 and 220 registers instead of 80 and 149. This is
the likely reason why the two kernels took 0.32 ms in a compiled step, and 0.127 ms outside of it (torch
2.11). Inductor preserves warps, strides and alignment: its code for ViT-B/32, generated on a CPU, uses the
same values as an eager launch.
"""

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.library import register_autograd, register_fake, triton_op, wrap_triton
from torch.utils.flop_counter import register_flop_formula


class Tiles(NamedTuple):
    """Tile sizes of a program for more than WHOLE tokens."""

    rows: int  # queries of a program, 0 for all queries
    keys: int  # keys of a tile
    warps: int


WHOLE = 64  # largest number of tokens for which a program holds a whole head in registers
WHOLE_WARPS = 4  # warps of a program; on an H200 the fastest of 1, 2, 4 and 8 for 50 tokens
# Chosen by registers and shared memory of the compiled kernels. Not yet measured on a GPU.
FORWARD, BACKWARD = Tiles(64, 32, 4), Tiles(0, 32, 8)
LOG2_E = tl.constexpr(1.4426950408889634)  # GPUs compute powers of 2


@triton.jit
def _rows(first, stride: tl.constexpr, N: tl.constexpr, D: tl.constexpr, R: tl.constexpr, P: tl.constexpr):
    """Return the offsets of R tokens, starting at `first`, with this row stride, and their mask: [R, P]."""
    n, d = first + tl.arange(0, R), tl.arange(0, P)
    return n[:, None] * stride + d[None, :], (n[:, None] < N) & (d[None, :] < D)


@triton.jit
def _scores(q, k, first, N: tl.constexpr, T: tl.constexpr, SCALE: tl.constexpr):
    """Return base-2 logarithms of the softmax's numerators for T keys, starting at `first`: [R, T]."""
    scores = tl.dot(q, tl.trans(k)) * (SCALE * LOG2_E)
    return tl.where((first + tl.arange(0, T))[None, :] < N, scores, float("-inf"))


@triton.jit
def _forward(
    qkv, out, logs, N: tl.constexpr, H: tl.constexpr, D: tl.constexpr, P: tl.constexpr, R: tl.constexpr,
    T: tl.constexpr, SCALE: tl.constexpr,
):  # fmt: skip
    """Compute R tokens of a head per program, from tiles of T keys."""
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
    """Compute the gradients of one head per program; R >= N. Padding rows and their gradients are 0."""
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
    """Compute attention: [B, N, 3, H, D] -> [B, N, H, D], and logarithms of the softmax's sums.

    The logarithms are fp32 [B, H, N], or empty for up to WHOLE tokens.
    """
    qkv = qkv.contiguous()
    out, logs = _results(qkv)
    programs, settings = _launch(qkv, FORWARD)
    wrap_triton(_forward)[programs](qkv, out, logs, **settings)
    return out, logs


@triton_op("onecurve::short_attention_backward", mutates_args=())
def short_attention_backward(qkv: Tensor, out: Tensor, logs: Tensor, gradient: Tensor) -> Tensor:
    """Compute the gradient of qkv, [B, N, 3, H, D], from the gradient of out."""
    qkv, gradient = qkv.contiguous(), gradient.contiguous()
    packed = qkv.new_empty(qkv.shape)
    programs, settings = _launch(qkv, BACKWARD)
    wrap_triton(_backward)[programs](qkv, out, logs, gradient, packed, **settings)
    return packed


def _results(qkv: Tensor) -> tuple[Tensor, Tensor]:
    samples, tokens, _, heads, size = qkv.shape
    summed = (samples, heads, tokens) if tokens > WHOLE else (0,)
    return qkv.new_empty(samples, tokens, heads, size), qkv.new_empty(summed, dtype=torch.float32)


def _launch(qkv: Tensor, tiles: Tiles) -> tuple[tuple[int], dict[str, Any]]:
    """Return the number of programs, and the kernel's constants and warps."""
    samples, tokens, _, heads, size = qkv.shape
    edge = _padded(tokens)
    rows, keys, warps = (edge, edge, WHOLE_WARPS) if tokens <= WHOLE else tiles
    rows = rows or edge
    settings = {"N": tokens, "H": heads, "D": size, "P": _padded(size), "R": rows, "T": keys}
    settings |= {"SCALE": size**-0.5, "num_warps": warps}
    return (samples * heads * triton.cdiv(tokens, rows),), settings


def _padded(count: int) -> int:
    """Return the edge of a block: a power of 2, and at least 16, as matrix products require."""
    return max(16, triton.next_power_of_2(count))


# The fake implementations only compute shapes, so they work on any device. plan.py uses them.
register_fake(short_attention, _results)
register_fake(short_attention_backward, lambda qkv, *_: qkv.new_empty(qkv.shape))


def _save(ctx: Any, inputs: tuple[Tensor], output: tuple[Tensor, Tensor]) -> None:
    ctx.mark_non_differentiable(output[1])
    ctx.save_for_backward(*inputs, *output)


def _differentiate(ctx: Any, gradient: Tensor, _: Tensor | None) -> Tensor:
    return short_attention_backward(*ctx.saved_tensors, gradient)


register_autograd(short_attention, _differentiate, setup_context=_save)


@register_flop_formula(torch.ops.onecurve.short_attention)
def _forward_flops(qkv: Any, **_: Any) -> int:
    samples, tokens, _, heads, size = qkv
    return 4 * samples * heads * tokens**2 * size


@register_flop_formula(torch.ops.onecurve.short_attention_backward)
def _backward_flops(qkv: Any, *_: Any, **__: Any) -> int:
    return 5 * _forward_flops(qkv) // 2  # same formula as for torch's attention: recomputes the scores
