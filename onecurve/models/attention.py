"""Attention in a training: a kernel for few tokens with its plain twin, or torch's, and when each is used.

The kernel (onecurve/models/attention_kernels.py) computes layers of up to 256 tokens with heads of up to 64
numbers, in bf16 and fp16, on GPUs of compute capability 8.0 and later. Everything else keeps torch's
scaled_dot_product_attention: masks, dropout, norms of query and key, fp32, CPUs, evaluations, exports.
"""

import importlib.util
import os
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

MOST_TOKENS, MOST_HEAD_SIZE = 256, 64
MOST_ERROR = 0.02  # of the norm of a result: bf16's rounding makes some 0.003
HALF = (torch.bfloat16, torch.float16)
CUDNN_FROM = 129  # tokens: at 197, on an H200, cuDNN took 0.456 ms for what flash took 0.615 ms
CUDNN_FIRST = [SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION]
CUDNN_FIRST += [SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]


def plain_attention(qkv: Tensor) -> Tensor:
    """The kernel's plain twin: [B, N, 3, H, D] -> [B, N, H, D], computed in at least fp32."""
    precise = qkv.to(torch.promote_types(qkv.dtype, torch.float32))
    q, k, v = precise.permute(2, 0, 3, 1, 4)  # each [B, H, N, D]
    scores = q @ k.transpose(-2, -1) * qkv.shape[-1] ** -0.5
    return (scores.softmax(-1) @ v).transpose(1, 2).to(qkv.dtype)


class Attention:
    """A mixin for timm's self-attention, [B, N, C] -> [B, N, C]: the same function with fewer copies.

    timm permutes query, key and value to the front before it takes them apart. Backward then stacks their
    gradients in that order, and copies the stack into the order of the projection `qkv`. Here they are taken
    apart in that order: the bits are the same, the stack reads whole rows, and nothing is copied again. In
    training, layers that use_kernel() has chosen take the kernel, which needs no stack either.
    """

    PARTS = ("qkv", "q_norm", "k_norm", "attn_drop", "proj", "proj_drop")
    tokens = 0  # of an image in training; 0: unknown
    kernel_tokens = 0  # the most tokens that the kernel computes in training
    prefers_cudnn = False

    def forward(self: Any, x: Tensor, attn_mask: Tensor | None = None, is_causal: bool = False) -> Tensor:
        batch, tokens, _ = x.shape
        qkv = self.qkv(x).reshape(batch, tokens, 3, self.num_heads, -1)
        is_masked = attn_mask is not None or is_causal
        if self.training and tokens <= self.kernel_tokens and not is_masked and qkv.dtype in HALF:
            x = _kernel(qkv)
        else:
            q, k, v = (part.transpose(1, 2) for part in qkv.unbind(2))  # [B, heads, N, C / heads]
            q, k, dropout = self.q_norm(q), self.k_norm(k), self.attn_drop.p if self.training else 0.0
            with self.backends(tokens):
                x = F.scaled_dot_product_attention(q, k, v, attn_mask, dropout, is_causal)
            x = x.transpose(1, 2)
        return self.proj_drop(self.proj(x.flatten(2)))

    def backends(self: Any, tokens: int) -> AbstractContextManager[Any]:
        """Return a context with the order in which torch tries its kernels."""
        if self.training and self.prefers_cudnn and tokens >= CUDNN_FROM:
            return sdpa_kernel(CUDNN_FIRST, set_priority=True)
        return nullcontext()

    def head_size(self: Any) -> int:
        return self.qkv.out_features // 3 // self.num_heads

    def fits_kernel(self: Any) -> bool:
        size = self.head_size()
        is_plain = isinstance(self.q_norm, nn.Identity) and isinstance(self.k_norm, nn.Identity)
        fits = 0 < self.tokens <= MOST_TOKENS and size <= MOST_HEAD_SIZE and size % 8 == 0
        return fits and is_plain and not self.attn_drop.p


def has_kernel(device: torch.device, mixed_precision: str) -> bool:
    """Return True if the kernel runs there. With TRITON_INTERPRET=1 it does on a CPU, for tests.

    It is slow there, and only in fp16: Triton's interpreter multiplies bf16 wrongly.
    """
    if mixed_precision == "no" or importlib.util.find_spec("triton") is None:
        return False
    if device.type == "cuda":
        return torch.cuda.get_device_capability(device) >= (8, 0) and not torch.version.hip
    return mixed_precision == "fp16" and os.environ.get("TRITON_INTERPRET") == "1"


def use_kernel(model: nn.Module) -> bool:
    """Makes each attention that fits use the kernel in training. Returns False if none does."""
    chosen = _fitting(model)
    if chosen:
        import onecurve.models.attention_kernels  # noqa: F401  # it makes the operator, and imports Triton
    for module in chosen:
        module.kernel_tokens = MOST_TOKENS
    return bool(chosen)


def kernel_failure(model: nn.Module, device: torch.device, dtype: torch.dtype) -> str | None:
    """Return why the kernel can't compute the model's attentions on this device, or an empty text. None if
    there is nothing to try: no attention that fits, or plan.py's tensors, which have no numbers.

    Each shape is computed once, forward and backward, and compared with the plain twin: a driver or a
    compiler that fails must not end the training. No random number is drawn.
    """
    shapes = {(module.tokens, module.num_heads, module.head_size()) for module in _fitting(model)}
    if not shapes or type(torch.empty(0)) is not Tensor:
        return None
    import onecurve.models.attention_kernels  # noqa: F401

    for tokens, heads, size in sorted(shapes):
        values = torch.arange(2 * tokens * 3 * heads * size, device=device).sin().to(dtype)
        qkv = values.view(2, tokens, 3, heads, size)
        try:
            ours, twins = (_with_gradient(each, qkv) for each in (_kernel, plain_attention))
        except Exception as error:  # of Triton, its compiler or the driver
            return f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"
        for own, twin in zip(ours, twins, strict=True):
            error_share = ((own.float() - twin.float()).norm() / twin.float().norm()).item()
            if not error_share < MOST_ERROR:
                return f"for {tokens} tokens it is {error_share:.1e} off, relative to plain attention"
    return ""


def _fitting(model: nn.Module) -> list[Any]:
    return [module for module in model.modules() if isinstance(module, Attention) and module.fits_kernel()]


def _kernel(qkv: Tensor) -> Tensor:
    return torch.ops.onecurve.short_attention(qkv)[0]


def _with_gradient(attention: Callable[[Tensor], Tensor], qkv: Tensor) -> tuple[Tensor, Tensor]:
    """Return the output, and the gradient of half the sum of its squares."""
    qkv = qkv.clone().requires_grad_()
    out = attention(qkv)
    out.backward(out.detach())
    assert qkv.grad is not None
    return out.detach(), qkv.grad


def prefer_cudnn(model: nn.Module, device: torch.device) -> None:
    """Makes torch try cuDNN's attention first in training, from CUDNN_FROM tokens on, on GPUs like an H200.

    Don't call it for deterministic trainings, in which torch refuses cuDNN's attention.
    """
    if device.type != "cuda" or torch.cuda.get_device_capability(device) < (9, 0):
        return
    for module in model.modules():
        if isinstance(module, Attention):
            module.prefers_cudnn = True


def kernel_version() -> str:
    """Return the package that the kernel's bits depend on, with its version."""
    from importlib.metadata import version

    return f"triton {version('triton')}"
