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

    queries: int  # queries per program, or 0 for all queries
    keys: int  # keys per tile
    warps: int  # warps per program


MAX_WHOLE_TOKENS = 64  # maximum number of tokens for which a program keeps a whole head in registers
WHOLE_WARPS = 4  # warps per program; 4 was the fastest of 1, 2, 4 and 8 on an H200 with 50 tokens
# These tile sizes were chosen based on the compiled kernels' register and shared-memory use. The kernels'
# speed with these sizes has not been measured on a GPU yet.
FORWARD_TILES = Tiles(queries=64, keys=32, warps=4)
BACKWARD_TILES = Tiles(queries=0, keys=32, warps=8)
LOG2_E = tl.constexpr(1.4426950408889634)  # converts exponents to base 2, because GPUs compute powers of 2


@triton.jit
def _tile_offsets(
    first_token, stride: tl.constexpr, TOKENS: tl.constexpr, HEAD_SIZE: tl.constexpr, COUNT: tl.constexpr,
    PADDED: tl.constexpr,
):  # fmt: skip
    """Return memory offsets and a validity mask, both [COUNT, PADDED], for tokens from `first_token`.

    PADDED is the padded head size.
    """
    token, channel = first_token + tl.arange(0, COUNT), tl.arange(0, PADDED)
    offsets = token[:, None] * stride + channel[None, :]
    return offsets, (token[:, None] < TOKENS) & (channel[None, :] < HEAD_SIZE)


@triton.jit
def _scores(q, k, first_key, TOKENS: tl.constexpr, KEYS: tl.constexpr, SCALE: tl.constexpr):
    """Return base-2 logarithms of the softmax numerators for keys from `first_key`: [QUERIES, KEYS]."""
    scores = tl.dot(q, tl.trans(k)) * (SCALE * LOG2_E)
    return tl.where((first_key + tl.arange(0, KEYS))[None, :] < TOKENS, scores, float("-inf"))


@triton.jit
def _forward(
    qkv, out, logs, TOKENS: tl.constexpr, HEADS: tl.constexpr, HEAD_SIZE: tl.constexpr,
    PADDED: tl.constexpr, QUERIES: tl.constexpr, KEYS: tl.constexpr, SCALE: tl.constexpr,
):  # fmt: skip
    """Compute the attention output for QUERIES tokens of a head per program, in tiles of KEYS keys.

    Each program writes its rows of `out`. With several tiles, it also writes `logs`, the base-2 logarithms of
    the softmax denominators, which the backward kernel reads.
    """
    BLOCKS: tl.constexpr = (TOKENS + QUERIES - 1) // QUERIES
    CHANNELS: tl.constexpr = HEADS * HEAD_SIZE
    # flat_head is the head's index in the batch
    flat_head, first_query = tl.program_id(0) // BLOCKS, tl.program_id(0) % BLOCKS * QUERIES
    sample, head = (flat_head // HEADS).to(tl.int64), flat_head % HEADS
    # Pointer to the head's first query. Its first key is CHANNELS elements later, and its value 2 * CHANNELS
    qkv_head = qkv + sample * (TOKENS * 3 * CHANNELS) + head * HEAD_SIZE
    query_offsets, query_mask = _tile_offsets(first_query, 3 * CHANNELS, TOKENS, HEAD_SIZE, QUERIES, PADDED)
    q = tl.load(qkv_head + query_offsets, query_mask, 0.0)
    if KEYS >= TOKENS:  # one tile contains all keys
        key_offsets, key_mask = _tile_offsets(0, 3 * CHANNELS, TOKENS, HEAD_SIZE, KEYS, PADDED)
        k = tl.load(qkv_head + CHANNELS + key_offsets, key_mask, 0.0)
        v = tl.load(qkv_head + 2 * CHANNELS + key_offsets, key_mask, 0.0)
        scores = _scores(q, k, 0, TOKENS, KEYS, SCALE)
        p = tl.exp2(scores - tl.max(scores, 1)[:, None])
        weighted_sum, denominator = tl.dot(p.to(v.dtype), v), tl.sum(p, 1)
    else:  # online softmax, which rescales the sums of earlier tiles if the maximum score grows
        running_max = tl.full([QUERIES], float("-inf"), tl.float32)
        weighted_sum = tl.zeros([QUERIES, PADDED], tl.float32)
        denominator = tl.zeros([QUERIES], tl.float32)
        for first_key in range(0, TOKENS, KEYS):
            key_offsets, key_mask = _tile_offsets(first_key, 3 * CHANNELS, TOKENS, HEAD_SIZE, KEYS, PADDED)
            k = tl.load(qkv_head + CHANNELS + key_offsets, key_mask, 0.0)
            v = tl.load(qkv_head + 2 * CHANNELS + key_offsets, key_mask, 0.0)
            scores = _scores(q, k, first_key, TOKENS, KEYS, SCALE)
            previous_max, running_max = running_max, tl.maximum(running_max, tl.max(scores, 1))
            # p is the tile's softmax numerators, relative to the new maximum
            p, rescaling = tl.exp2(scores - running_max[:, None]), tl.exp2(previous_max - running_max)
            weighted_sum = tl.dot(p.to(v.dtype), v, weighted_sum * rescaling[:, None])
            denominator = denominator * rescaling + tl.sum(p, 1)
        query = first_query + tl.arange(0, QUERIES)
        tl.store(logs + flat_head * TOKENS + query, running_max + tl.log2(denominator), query < TOKENS)
    out_offsets, out_mask = _tile_offsets(first_query, CHANNELS, TOKENS, HEAD_SIZE, QUERIES, PADDED)
    out_head = out + sample * (TOKENS * CHANNELS) + head * HEAD_SIZE
    tl.store(out_head + out_offsets, (weighted_sum / denominator[:, None]).to(q.dtype), out_mask)


@triton.jit
def _backward(
    qkv, out, logs, out_gradient, qkv_gradient, TOKENS: tl.constexpr, HEADS: tl.constexpr,
    HEAD_SIZE: tl.constexpr, PADDED: tl.constexpr, QUERIES: tl.constexpr, KEYS: tl.constexpr,
    SCALE: tl.constexpr,
):  # fmt: skip
    """Compute the gradients of one head per program (QUERIES >= TOKENS). Padding rows have zero gradients.

    The variables follow FlashAttention: p is the softmax, and dX is the gradient of X. mean_dp is the mean of
    dp weighted by p, which the gradient of a softmax subtracts.
    """
    CHANNELS: tl.constexpr = HEADS * HEAD_SIZE
    sample, head = (tl.program_id(0) // HEADS).to(tl.int64), tl.program_id(0) % HEADS
    out_offsets, out_mask = _tile_offsets(0, CHANNELS, TOKENS, HEAD_SIZE, QUERIES, PADDED)
    out_offsets += sample * (TOKENS * CHANNELS) + head * HEAD_SIZE
    do = tl.load(out_gradient + out_offsets, out_mask, 0.0)
    if KEYS < TOKENS:  # several tiles of keys
        query = tl.arange(0, QUERIES)
        log_denominator = tl.load(logs + tl.program_id(0) * TOKENS + query, query < TOKENS, 0.0)
        # The product of do and out equals the sum of p * dp over all keys, without a pass over the tiles
        mean_dp = tl.sum(do.to(tl.float32) * tl.load(out + out_offsets, out_mask, 0.0).to(tl.float32), 1)
    # Offset of the head's first query. Its first key is CHANNELS elements later, and its value 2 * CHANNELS
    head_start = sample * (TOKENS * 3 * CHANNELS) + head * HEAD_SIZE
    query_offsets, query_mask = _tile_offsets(0, 3 * CHANNELS, TOKENS, HEAD_SIZE, QUERIES, PADDED)
    q = tl.load(qkv + head_start + query_offsets, query_mask, 0.0)
    dq = tl.zeros([QUERIES, PADDED], tl.float32)
    for first_key in range(0, TOKENS, KEYS):
        key_offsets, key_mask = _tile_offsets(first_key, 3 * CHANNELS, TOKENS, HEAD_SIZE, KEYS, PADDED)
        key_offsets += head_start
        k = tl.load(qkv + key_offsets + CHANNELS, key_mask, 0.0)
        v = tl.load(qkv + key_offsets + 2 * CHANNELS, key_mask, 0.0)
        scores = _scores(q, k, first_key, TOKENS, KEYS, SCALE)
        if KEYS < TOKENS:  # several tiles of keys
            p = tl.exp2(scores - log_denominator[:, None])
        else:
            p = tl.exp2(scores - tl.max(scores, 1)[:, None])
            p = p / tl.sum(p, 1)[:, None]
        dv = tl.dot(tl.trans(p.to(q.dtype)), do)
        tl.store(qkv_gradient + key_offsets + 2 * CHANNELS, dv.to(q.dtype), key_mask)
        dp = tl.dot(do, tl.trans(v))
        if KEYS >= TOKENS:  # one tile contains all keys
            mean_dp = tl.sum(p * dp, 1)
        ds = (p * (dp - mean_dp[:, None]) * SCALE).to(q.dtype)
        dq = tl.dot(ds, k, dq)
        tl.store(qkv_gradient + key_offsets + CHANNELS, tl.dot(tl.trans(ds), q).to(q.dtype), key_mask)
    tl.store(qkv_gradient + head_start + query_offsets, dq.to(q.dtype), query_mask)


@triton_op("onecurve::short_attention", mutates_args=())
def short_attention(qkv: Tensor) -> tuple[Tensor, Tensor]:
    """Compute attention, [B, N, 3, H, D] -> [B, N, H, D], and the logarithms of the softmax sums.

    The logarithms are an fp32 tensor [B, H, N], which is empty for up to MAX_WHOLE_TOKENS tokens.
    """
    qkv = qkv.contiguous()
    out, logs = _empty_outputs(qkv)
    launch_grid, kernel_constants = _launch_settings(qkv, FORWARD_TILES)
    wrap_triton(_forward)[launch_grid](qkv, out, logs, **kernel_constants)
    return out, logs


@triton_op("onecurve::short_attention_backward", mutates_args=())
def short_attention_backward(qkv: Tensor, out: Tensor, logs: Tensor, out_gradient: Tensor) -> Tensor:
    """Compute the gradient of qkv, [B, N, 3, H, D], from the gradient of the output."""
    qkv, out_gradient = qkv.contiguous(), out_gradient.contiguous()
    qkv_gradient = qkv.new_empty(qkv.shape)
    launch_grid, kernel_constants = _launch_settings(qkv, BACKWARD_TILES)
    wrap_triton(_backward)[launch_grid](qkv, out, logs, out_gradient, qkv_gradient, **kernel_constants)
    return qkv_gradient


def _empty_outputs(qkv: Tensor) -> tuple[Tensor, Tensor]:
    """Allocate short_attention()'s two results: the attention output and the softmax logarithms."""
    sample_count, token_count, _, head_count, head_size = qkv.shape
    logs_shape = (sample_count, head_count, token_count) if token_count > MAX_WHOLE_TOKENS else (0,)
    out = qkv.new_empty(sample_count, token_count, head_count, head_size)
    return out, qkv.new_empty(logs_shape, dtype=torch.float32)


def _launch_settings(qkv: Tensor, tiles: Tiles) -> tuple[tuple[int], dict[str, Any]]:
    """Return the launch grid (number of programs), and the kernel's constants and number of warps."""
    sample_count, token_count, _, head_count, head_size = qkv.shape
    padded_token_count = _padded_length(token_count)
    if token_count <= MAX_WHOLE_TOKENS:  # one tile contains the whole head
        tiles = Tiles(padded_token_count, padded_token_count, WHOLE_WARPS)
    queries_per_program = tiles.queries or padded_token_count
    program_count = sample_count * head_count * triton.cdiv(token_count, queries_per_program)
    constants = {"TOKENS": token_count, "HEADS": head_count, "HEAD_SIZE": head_size, "SCALE": head_size**-0.5}
    constants |= {"PADDED": _padded_length(head_size), "QUERIES": queries_per_program, "KEYS": tiles.keys}
    return (program_count,), constants | {"num_warps": tiles.warps}


def _padded_length(length: int) -> int:
    """Round up to a power of 2 of at least 16, which Triton requires for the edges of matrix products."""
    return max(16, triton.next_power_of_2(length))


# The fake implementations, which plan.py uses, compute only shapes and work on any device.
register_fake(short_attention, _empty_outputs)
register_fake(short_attention_backward, lambda qkv, *_: qkv.new_empty(qkv.shape))


def _save_for_backward(ctx: Any, inputs: tuple[Tensor], output: tuple[Tensor, Tensor]) -> None:
    """Save the tensors that short_attention_backward() needs. The softmax logarithms have no gradient."""
    (qkv,), (out, logs) = inputs, output
    ctx.mark_non_differentiable(logs)
    ctx.save_for_backward(qkv, out, logs)


def _qkv_gradient(ctx: Any, out_gradient: Tensor, _: Tensor | None) -> Tensor:
    """Return the gradient of qkv. The third argument belongs to the logarithms, which have no gradient."""
    return short_attention_backward(*ctx.saved_tensors, out_gradient)


register_autograd(short_attention, _qkv_gradient, setup_context=_save_for_backward)


@register_flop_formula(torch.ops.onecurve.short_attention)
def _forward_flops(qkv_shape: Any, **_: Any) -> int:
    """Return the FLOPs of two matrix products per head, with two FLOPs per multiply-add."""
    sample_count, token_count, _, head_count, head_size = qkv_shape
    return 4 * sample_count * head_count * token_count**2 * head_size


@register_flop_formula(torch.ops.onecurve.short_attention_backward)
def _backward_flops(qkv_shape: Any, *_: Any, **__: Any) -> int:
    """Return the FLOPs of five matrix products per head instead of the forward pass's two.

    torch's FLOP formula for attention is the same, because its backward pass also recomputes the scores.
    """
    return 5 * _forward_flops(qkv_shape) // 2
