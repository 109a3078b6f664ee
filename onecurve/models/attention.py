"""Replaces timm's attention with faster layers, and chooses between our kernel and torch's attention.

The kernel (onecurve/models/attention_kernels.py) supports layers with up to 256 tokens and a head size of up
to 64, in bf16 and fp16, on GPUs of compute capability 8.0 and later. torch's scaled_dot_product_attention
handles layers with masks, dropout, or query and key norms, as well as fp32, CPUs, evaluation and export.
"""

import importlib.util
import math
import os
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

MAX_KERNEL_TOKENS = 256  # maximum number of tokens per image that the kernel supports
MAX_KERNEL_HEAD_SIZE = 64  # maximum number of channels per head that the kernel supports
KERNEL_HEAD_SIZE_STEP = 8  # the kernel supports head sizes that are multiples of this number
MAX_RELATIVE_ERROR = 0.02  # maximum error relative to the result's norm; rounding to bf16 causes about 0.003
HALF_DTYPES = (torch.bfloat16, torch.float16)  # dtypes that the kernel supports
# With 197 tokens on an H200, cuDNN took 0.456 ms and flash attention took 0.615 ms.
CUDNN_MIN_TOKENS = 129  # minimum number of tokens for which torch prefers cuDNN
# torch's attention kernels in the order in which torch tries them if cuDNN is preferred
CUDNN_FIRST_BACKENDS = [SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION]
CUDNN_FIRST_BACKENDS += [SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]


def plain_attention(qkv: Tensor) -> Tensor:
    """Compute the kernel's attention in plain torch, in at least fp32: [B, N, 3, H, D] -> [B, N, H, D]."""
    precise_qkv = qkv.to(torch.promote_types(qkv.dtype, torch.float32))
    q, k, v = precise_qkv.permute(2, 0, 3, 1, 4)  # each [B, H, N, D]
    scores = q @ k.transpose(-2, -1) * qkv.shape[-1] ** -0.5
    return (scores.softmax(-1) @ v).transpose(1, 2).to(qkv.dtype)


class Attention:
    """Mixin that makes timm's self-attention, [B, N, C] -> [B, N, C], use fewer copies.

    timm moves the dimension of query, key and value to the front before splitting the tensor. The backward
    pass then stacks the three gradients in that order, and copies the stack into the memory order of the
    projection `qkv`. This class splits the tensor in the projection's order instead. The results are bitwise
    identical, but the stack operation reads whole rows, and no second copy is needed. In training, layers
    chosen by use_kernel() call the kernel, which needs no stack operation.
    """

    # Submodules that forward() uses
    CHILD_NAMES = ("qkv", "q_norm", "k_norm", "attn_drop", "proj", "proj_drop")
    tokens = 0  # number of tokens per image in training, or 0 if unknown
    kernel_tokens = 0  # maximum number of tokens for which training uses the kernel
    prefers_cudnn = False  # True if torch tries cuDNN's attention first in training

    def forward(self: Any, x: Tensor, attn_mask: Tensor | None = None, is_causal: bool = False) -> Tensor:
        """Compute self-attention, [B, N, C] -> [B, N, C], with our kernel if the layer uses it."""
        batch_size, token_count, _ = x.shape
        qkv = self.qkv(x).reshape(batch_size, token_count, 3, self.num_heads, -1)
        is_masked = attn_mask is not None or is_causal
        uses_kernel = self.training and token_count <= self.kernel_tokens and not is_masked
        if uses_kernel and qkv.dtype in HALF_DTYPES:
            x = _kernel_attention(qkv)  # [B, N, heads, C / heads]
        else:
            q, k, v = (tensor.transpose(1, 2) for tensor in qkv.unbind(2))  # [B, heads, N, C / heads]
            q, k = self.q_norm(q), self.k_norm(k)
            dropout_rate = self.attn_drop.p if self.training else 0.0
            with self.backends(token_count):
                x = F.scaled_dot_product_attention(q, k, v, attn_mask, dropout_rate, is_causal)
            x = x.transpose(1, 2)
        return self.proj_drop(self.proj(x.flatten(2)))

    def backends(self: Any, token_count: int) -> AbstractContextManager[Any]:
        """Return a context manager that makes torch try cuDNN's attention first in training.

        For layers that do not prefer cuDNN, and for few tokens, it changes nothing.
        """
        if self.training and self.prefers_cudnn and token_count >= CUDNN_MIN_TOKENS:
            return sdpa_kernel(CUDNN_FIRST_BACKENDS, set_priority=True)
        return nullcontext()

    def head_size(self: Any) -> int:
        """Return the number of channels per head."""
        return self.qkv.out_features // 3 // self.num_heads

    def fits_kernel(self: Any) -> bool:
        """Return True if the kernel supports the layer's number of tokens, head size and options."""
        head_size = self.head_size()
        has_suitable_head = head_size <= MAX_KERNEL_HEAD_SIZE and head_size % KERNEL_HEAD_SIZE_STEP == 0
        has_suitable_length = 0 < self.tokens <= MAX_KERNEL_TOKENS  # 0 if unknown
        has_qk_norm = not (isinstance(self.q_norm, nn.Identity) and isinstance(self.k_norm, nn.Identity))
        return has_suitable_length and has_suitable_head and not has_qk_norm and self.attn_drop.p == 0


def has_kernel(device: torch.device, mixed_precision: str) -> bool:
    """Return True if the attention kernel can run on the device.

    In tests, TRITON_INTERPRET=1 runs the kernel on a CPU, but only in fp16, because Triton's slow interpreter
    multiplies bf16 values incorrectly.
    """
    if mixed_precision == "no" or importlib.util.find_spec("triton") is None:
        return False  # fp32 training, or Triton is not installed
    if device.type == "cuda":
        return torch.cuda.get_device_capability(device) >= (8, 0) and not torch.version.hip
    return mixed_precision == "fp16" and os.environ.get("TRITON_INTERPRET") == "1"


def use_kernel(model: nn.Module) -> bool:
    """Make suitable attention layers use the kernel in training, and return False if none is suitable."""
    kernel_layers = _layers_for_kernel(model)
    if kernel_layers:
        import onecurve.models.attention_kernels  # noqa: F401  # registers the operator and imports Triton
    for layer in kernel_layers:
        layer.kernel_tokens = MAX_KERNEL_TOKENS
    return bool(kernel_layers)


def kernel_failure(model: nn.Module, device: torch.device, dtype: torch.dtype) -> str | None:
    """Return the reason why the kernel can't compute the model's attention on this device.

    The kernel runs forward and backward once for each shape, and its results must match plain_attention().
    Without this check, a driver or compiler failure would end training. The check draws no random numbers.

    Returns:
        The reason, or an empty string if the kernel works. None means that no layer is suitable, or that the
        tensors come from plan.py and contain no data.
    """
    kernel_layers = _layers_for_kernel(model)
    layer_shapes = {(layer.tokens, layer.num_heads, layer.head_size()) for layer in kernel_layers}
    if not layer_shapes or type(torch.empty(0)) is not Tensor:
        return None  # nothing to check
    import onecurve.models.attention_kernels  # noqa: F401  # registers the operator and imports Triton

    for token_count, head_count, head_size in sorted(layer_shapes):
        qkv_shape = (2, token_count, 3, head_count, head_size)  # a batch of two samples
        qkv = torch.arange(math.prod(qkv_shape), device=device).sin().to(dtype).view(qkv_shape)
        try:
            kernel_tensors = _output_and_gradient(_kernel_attention, qkv)
            expected_tensors = _output_and_gradient(plain_attention, qkv)
        except Exception as error:  # Triton, the compiler or the driver may raise any exception
            first_error_line, _, _ = str(error).strip().partition("\n")
            return f"{type(error).__name__}: {first_error_line}"
        for kernel_tensor, expected_tensor in zip(kernel_tensors, expected_tensors, strict=True):
            error_norm = (kernel_tensor.float() - expected_tensor.float()).norm()
            relative_error = (error_norm / expected_tensor.float().norm()).item()
            if not relative_error < MAX_RELATIVE_ERROR:  # `not` also detects NaN
                return f"the relative error for {token_count} tokens is {relative_error:.1e}"
    return ""  # the kernel works


def _layers_for_kernel(model: nn.Module) -> list[Any]:
    return [module for module in model.modules() if isinstance(module, Attention) and module.fits_kernel()]


def _kernel_attention(qkv: Tensor) -> Tensor:
    """Compute attention with the Triton kernel, [B, N, 3, H, D] -> [B, N, H, D]."""
    output, _ = torch.ops.onecurve.short_attention(qkv)
    return output


def _output_and_gradient(
    attention_function: Callable[[Tensor], Tensor], qkv: Tensor
) -> tuple[Tensor, Tensor]:
    """Return an attention function's output, and a gradient for qkv, for the comparison of two functions.

    The gradient belongs to half the sum of the squared outputs, whose gradient is the output itself.
    """
    qkv = qkv.clone().requires_grad_()
    attention_output = attention_function(qkv)
    attention_output.backward(attention_output.detach())
    assert qkv.grad is not None
    return attention_output.detach(), qkv.grad


def prefer_cudnn(model: nn.Module, device: torch.device) -> None:
    """Make torch prefer cuDNN's attention in training, for layers with at least CUDNN_MIN_TOKENS tokens.

    The preference affects only GPUs of compute capability 9.0 and later. Do not call this function for
    deterministic training, because torch refuses cuDNN's attention in deterministic mode.
    """
    if device.type != "cuda" or torch.cuda.get_device_capability(device) < (9, 0):
        return  # torch keeps its default order
    for module in model.modules():
        if isinstance(module, Attention):
            module.prefers_cudnn = True


def kernel_version() -> str:
    """Return the name and version of the package that determines the bits of the kernel's results."""
    from importlib.metadata import version

    return f"triton {version('triton')}"
