"""Replaces timm's attention with faster layers, and chooses between our kernel and torch's attention.

The kernel (onecurve/models/attention_kernels.py) supports layers with up to 256 tokens and a head size of up
to 64, in bf16 and fp16, on GPUs of compute capability 8.0 and later. All other cases use torch's
scaled_dot_product_attention: layers with masks, dropout, or query and key norms, and also fp32, CPUs,
evaluation and export.
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
MOST_ERROR = 0.02  # relative to the norm of the result; rounding to bf16 causes an error of about 0.003
HALF = (torch.bfloat16, torch.float16)
CUDNN_FROM = 129  # tokens; with 197 tokens on an H200, cuDNN took 0.456 ms and flash attention took 0.615 ms
CUDNN_FIRST = [SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION]
CUDNN_FIRST += [SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]


def plain_attention(qkv: Tensor) -> Tensor:
    """Compute the kernel's function in plain torch, in at least fp32: [B, N, 3, H, D] -> [B, N, H, D]."""
    precise = qkv.to(torch.promote_types(qkv.dtype, torch.float32))
    q, k, v = precise.permute(2, 0, 3, 1, 4)  # each [B, H, N, D]
    scores = q @ k.transpose(-2, -1) * qkv.shape[-1] ** -0.5
    return (scores.softmax(-1) @ v).transpose(1, 2).to(qkv.dtype)


class Attention:
    """Mixin for timm's self-attention, [B, N, C] -> [B, N, C]: the same function with fewer copies.

    timm moves the dimension of query, key and value to the front before it splits the tensor. The backward
    pass then stacks the three gradients in that order, and copies the stack into the order of the projection
    `qkv`. This class splits the tensor in the order of the projection. The results are bitwise identical, the
    stack operation reads whole rows, and no second copy is needed. In training, layers chosen by use_kernel()
    call the kernel, which needs no stack.
    """

    PARTS = ("qkv", "q_norm", "k_norm", "attn_drop", "proj", "proj_drop")
    tokens = 0  # number of tokens per image in training; 0 if unknown
    kernel_tokens = 0  # largest number of tokens for which training uses the kernel
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
        """Return a context that sets the order in which torch tries its attention kernels."""
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
    """Return True if the kernel can run on the device.

    For tests, TRITON_INTERPRET=1 makes the kernel run on a CPU. Triton's interpreter is slow and multiplies
    bf16 incorrectly, so only fp16 is supported.
    """
    if mixed_precision == "no" or importlib.util.find_spec("triton") is None:
        return False
    if device.type == "cuda":
        return torch.cuda.get_device_capability(device) >= (8, 0) and not torch.version.hip
    return mixed_precision == "fp16" and os.environ.get("TRITON_INTERPRET") == "1"


def use_kernel(model: nn.Module) -> bool:
    """Make suitable attention layers use the kernel in training. Return False if no layer is suitable."""
    layers = _suitable_layers(model)
    if layers:
        import onecurve.models.attention_kernels  # noqa: F401  # registers the operator and imports Triton
    for layer in layers:
        layer.kernel_tokens = MOST_TOKENS
    return bool(layers)


def kernel_failure(model: nn.Module, device: torch.device, dtype: torch.dtype) -> str | None:
    """Return why the kernel can't compute the model's attention on this device.

    The kernel runs once, forward and backward, for each shape, and the result is compared with
    plain_attention(). This check is needed because a failure of the driver or compiler must not end training.
    No random numbers are drawn.

    Returns:
        The reason, an empty string if the kernel works, or None if there is nothing to try. The latter is the
        case if no layer is suitable, or if the tensors come from plan.py and contain no data.
    """
    shapes = {(layer.tokens, layer.num_heads, layer.head_size()) for layer in _suitable_layers(model)}
    if not shapes or type(torch.empty(0)) is not Tensor:
        return None
    import onecurve.models.attention_kernels  # noqa: F401

    for tokens, heads, size in sorted(shapes):
        values = torch.arange(2 * tokens * 3 * heads * size, device=device).sin().to(dtype)
        qkv = values.view(2, tokens, 3, heads, size)
        try:
            results, references = (_with_gradient(f, qkv) for f in (_kernel, plain_attention))
        except Exception as error:  # the error may come from Triton, the compiler or the driver
            return f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"
        for result, reference in zip(results, references, strict=True):
            error_share = ((result.float() - reference.float()).norm() / reference.float().norm()).item()
            if not error_share < MOST_ERROR:
                return f"its relative error for {tokens} tokens is {error_share:.1e}"
    return ""


def _suitable_layers(model: nn.Module) -> list[Any]:
    return [module for module in model.modules() if isinstance(module, Attention) and module.fits_kernel()]


def _kernel(qkv: Tensor) -> Tensor:
    return torch.ops.onecurve.short_attention(qkv)[0]


def _with_gradient(attention: Callable[[Tensor], Tensor], qkv: Tensor) -> tuple[Tensor, Tensor]:
    """Return the output of a function, and the gradient of half of the output's sum of squares."""
    qkv = qkv.clone().requires_grad_()
    out = attention(qkv)
    out.backward(out.detach())
    assert qkv.grad is not None
    return out.detach(), qkv.grad


def prefer_cudnn(model: nn.Module, device: torch.device) -> None:
    """Make torch try cuDNN's attention first in training, for layers with at least CUDNN_FROM tokens.

    This function affects only GPUs of compute capability 9.0 and later. Do not call it for deterministic
    training, because torch then refuses cuDNN's attention.
    """
    if device.type != "cuda" or torch.cuda.get_device_capability(device) < (9, 0):
        return
    for module in model.modules():
        if isinstance(module, Attention):
            module.prefers_cudnn = True


def kernel_version() -> str:
    """Return the name and version of the package that determines the bits of the kernel's results."""
    from importlib.metadata import version

    return f"triton {version('triton')}"
