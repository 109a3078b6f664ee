"""Run the attention kernel, or a mutant, under Triton's interpreter and print the problems.

`TRITON_INTERPRET=1 python -m tests.support.interpreted_attention` reads one line of JSON per case from
standard input, and prints a list of problems for each case. The interpreter needs a separate process because
Triton reads TRITON_INTERPRET at import.
"""

import importlib.util
import json
import sys
import tempfile
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import torch
import triton.language as tl
from torch import Tensor
from triton.runtime import interpreter

import onecurve.models.attention_kernels
from onecurve.models.attention import plain_attention

TIMES_EPS = 6  # Error bound in multiples of the output dtype's eps, relative to the sum of absolute values
STEPS_OF_FP16 = 1e-6  # Absolute error bound for the fixed spacing between fp16 numbers near 0
written: list[np.ndarray] = []  # Addresses written by each store operation


def watch_the_interpreter() -> None:
    """Make the interpreter record store addresses, and multiply bf16 numbers, which it stores as uint16."""
    builder = interpreter.InterpreterBuilder
    store, dot = builder.create_masked_store, builder.create_dot

    def noting_store(self: Any, pointers: Any, value: Any, mask: Any, *more: Any) -> Any:
        written.append(pointers.data[np.broadcast_to(mask.data, pointers.data.shape)])
        return store(self, pointers, value, mask, *more)

    def widened(operand: Any) -> Any:
        if operand.dtype.scalar != tl.bfloat16:
            return operand
        wide = (operand.data.astype(np.uint32) << 16).view(np.float32)
        return interpreter.TensorHandle(wide, tl.float32)

    def widening_dot(self: Any, a: Any, b: Any, *more: Any) -> Any:
        return dot(self, widened(a), widened(b), *more)

    builder.create_masked_store, builder.create_dot = noting_store, widening_dot


def mutant(number: int, replacements: dict[str, str], folder: Path) -> ModuleType:
    source = (
        Path(onecurve.models.attention_kernels.__file__).read_text().replace("onecurve", f"mutant_{number}")
    )
    for old, new in replacements.items():
        assert source.count(old) == 1, f"{source.count(old)} x {old!r}"
        source = source.replace(old, new)
    (file := folder / f"mutant_{number}.py").write_text(source)
    spec = importlib.util.spec_from_file_location(file.stem, file)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def problems(
    kernels: ModuleType, tokens: int, size: int, dtype: str, largest: float, order: str, heads: int
) -> list[str]:
    """Return the problems found in a case.

    `order` is the memory layout of qkv: `packed`, or the non-contiguous layout `parts first`.
    """
    torch.manual_seed(tokens)
    torch_dtype = getattr(torch, dtype)
    qkv = (torch.randn(1, tokens, 3, heads, size) * largest).clamp(-largest, largest).to(torch_dtype)
    gradient = torch.randn(1, tokens, heads, size).to(torch_dtype)
    if order == "parts first":
        qkv = qkv.transpose(1, 2).contiguous().transpose(1, 2)
        gradient = gradient.transpose(1, 2).contiguous().transpose(1, 2)
    qkv.requires_grad_()
    errors = []
    written.clear()
    out, logs = kernels.short_attention(qkv)
    errors += _written_once("forward", out, *([logs] if logs.numel() else []))
    written.clear()
    packed = kernels.short_attention_backward(qkv.detach(), out.detach(), logs, gradient)
    errors += _written_once("backward", packed)
    (grad,) = torch.autograd.grad(out, qkv, gradient)
    exact = qkv.detach().double().requires_grad_()
    expected = plain_attention(exact)
    (expected_grad,) = torch.autograd.grad(expected, exact, gradient.double())
    bound, bound_grad, added = _bounds(qkv.detach().double(), gradient.double())
    # Scores are summed in fp32.
    eps = torch.finfo(torch_dtype).eps + 4 * torch.finfo(torch.float32).eps * added
    pairs = {"outputs": (out, expected, bound), "gradients": (grad, expected_grad, bound_grad)}
    pairs["packed gradients"] = packed, expected_grad, bound_grad
    for name, (value, expected_value, bound_of_sum) in pairs.items():
        allowed = TIMES_EPS * eps * bound_of_sum + STEPS_OF_FP16
        if not ((value.double() - expected_value).abs() <= allowed).all():  # The comparison is False for NaN
            errors.append(name)
    return errors


def _written_once(name: str, *results: Tensor) -> list[str]:
    """Check that exactly one program writes each result element. Elements that no program writes are NaN."""
    addresses = np.concatenate([part.ravel() for part in written])
    expected = [r.data_ptr() + r.element_size() * np.arange(r.numel(), dtype=np.uint64) for r in results]
    distinct = np.unique(addresses)
    is_once = len(distinct) == len(addresses)
    is_all = np.array_equal(distinct, np.unique(np.concatenate(expected)))
    return [f"{name} writes twice"] * (not is_once) + [f"{name} writes elsewhere"] * (not is_all)


def _bounds(qkv: Tensor, gradient: Tensor) -> tuple[Tensor, Tensor, float]:
    """Return the sums of absolute values behind the outputs and gradients, and the largest sum behind a
    score.

    Error bounds are fractions of these sums.
    """
    q, k, v = qkv.permute(2, 0, 3, 1, 4)
    p = (q @ k.transpose(-2, -1) * qkv.shape[-1] ** -0.5).softmax(-1)
    do, q, k, v = gradient.abs().transpose(1, 2), q.abs(), k.abs(), v.abs()
    dp = do @ v.transpose(-2, -1)
    ds = p * (dp + (p * dp).sum(-1, keepdim=True)) * qkv.shape[-1] ** -0.5
    parts = ds @ k, ds.transpose(-2, -1) @ q, p.transpose(-2, -1) @ do
    packed = torch.stack(parts).permute(1, 3, 0, 2, 4)
    scores = q @ k.transpose(-2, -1) * qkv.shape[-1] ** -0.5
    return (p @ v).transpose(1, 2), packed, scores.max().item()


def main() -> None:
    torch.use_deterministic_algorithms(True)  # Makes torch fill new tensors with NaN
    watch_the_interpreter()
    with tempfile.TemporaryDirectory() as folder:
        for number, line in enumerate(sys.stdin):
            case = json.loads(line)
            changed = case.pop("replacements", {})
            kernels = mutant(number, changed, Path(folder)) if changed else onecurve.models.attention_kernels
            print(json.dumps(problems(kernels, **case)), flush=True)


if __name__ == "__main__":
    main()
