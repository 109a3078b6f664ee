"""Exact sums: with --deterministic the bits of a training do not depend on the number of processes.

A sum of fp32 numbers depends on its order, and so on who adds what. Here each micro-batch's gradient is
rounded to multiples of 1 / UNIT and added in float64, whose 53 bits hold every sum of such numbers below
LIMIT exactly: on a process, between processes, bucket by bucket or shard by shard. float64 and not int64, as
FSDP2 reduces in it by its own settings, and the bytes are the same. Only the sum is rounded to fp32, once.

benchmarks/README.md has the gradients of three models, by which UNIT was chosen. Demmel and Nguyen choose the
grid by the largest number instead (Parallel Reproducible Summation, IEEE TC 2015).
"""

import math
from collections.abc import Iterable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from accelerate import Accelerator
from torch import Tensor, nn

from common.distributed.strategy import sharding, strategy

UNIT = 2.0**40  # Adam's epsilon, 1e-8, is 11,000 units
LIMIT = 2.0**52 / UNIT  # of the magnitudes of a step's micro-batches together; comparisons in fp32 round
LOSS_UNIT = 2.0**28
BUCKET = 2**22  # numbers in one exchange; 32 MiB


def exact_sum(values: Tensor) -> Tensor:
    """The sum in float64 of the values, rounded to multiples of 1 / LOSS_UNIT: exact below 2**25."""
    return (values.double() * LOSS_UNIT).round_().sum() / LOSS_UNIT


def use_foreach(optimizer: torch.optim.Optimizer) -> None:
    """Has the optimizer step tensor by tensor: on a CPU fused ones round a tensor's last elements otherwise,
    and these are others in a shard."""
    for group in optimizer.param_groups:
        if group.get("fused"):
            group |= {"fused": False, "foreach": True}
    optimizer._step_supports_amp_scaling = False  # type: ignore[attr-defined]


class Bucket:
    """Parameters whose gradients are exchanged together. `total` has their sums, in units."""

    def __init__(self, parameters: list[nn.Parameter], device: torch.device):
        self.parameters = parameters
        self.work: Any = None  # the exchange
        self.total = torch.zeros(sum(p.numel() for p in parameters), dtype=torch.float64, device=device)
        self.seen: set[int] = set()  # the parameters that have ever had a gradient
        self.awaited = len(parameters)  # in the step's last micro-batch

    def views(self, flat: Tensor) -> list[Tensor]:
        """The parts of `flat` that belong to the parameters, in their layout."""
        parts = flat.split([p.numel() for p in self.parameters])
        return [part.as_strided(p.shape, p.stride()) for part, p in zip(parts, self.parameters, strict=True)]

    def exchange(self) -> None:
        self.work = dist.all_reduce(self.total, async_op=True)

    def finish(self, unit: float | Tensor) -> None:
        """Waits for the exchange, gives the parameters their gradients, and begins the next step."""
        if self.work:
            self.work.wait()
        for i, gradient in enumerate(self.views((self.total / unit).float())):
            if i in self.seen:
                self.parameters[i].grad = gradient
        self.total.zero_()
        self.work, self.awaited = None, len(self.parameters)


class ExactSum:
    """Takes the place of accelerator.backward and clip_grad_norm_, and of DDP's exchange of gradients.

    Create it after prepare(), with the plain model. backward divides each loss by the number of micro-batches
    in a step of the whole job: by accumulations and then by processes would round differently.
    """

    def __init__(self, accelerator: Accelerator, model: nn.Module):
        self.accelerator, device = accelerator, accelerator.device
        trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
        self.names, self.numbers = list(trained), sum(p.numel() for p in trained.values())
        self.micro_batches = accelerator.gradient_accumulation_steps * accelerator.num_processes
        self.one = torch.ones((), device=device)
        self.unit: float | Tensor = UNIT  # with fp16 divided by the loss scale, a power of two
        self.largest = torch.zeros(len(trained), device=device)  # of this process in this step; NaN stays NaN
        self.steps = torch.zeros((), device=device)  # since the last check()
        self.failed = torch.full_like(self.largest, math.inf)  # the first of them in which one did not fit
        self.buckets: list[Bucket] = []
        self.exchanged = 0  # buckets in this step
        if strategy(accelerator) == "fsdp":
            self._follow_shards(model)
        else:
            self._follow(list(trained.values()))
        accelerator.backward = self.backward
        accelerator.clip_grad_norm_ = self.clip_grad_norm_

    def backward(self, loss: Tensor, **options: Any) -> None:
        """Adds the gradients of a micro-batch; in a step's last one, exchanges and sets them."""
        loss, scaler = loss / self.micro_batches, self.accelerator.scaler
        if scaler is not None:
            loss, scale = scaler.scale([loss, self.one])
            self.unit = UNIT / scale
        loss.backward(**options)
        if self.accelerator.sync_gradients:
            self._end_step()

    @torch.no_grad()
    def clip_grad_norm_(self, parameters: Iterable[Tensor], max_norm: float, norm_type: float = 2) -> Tensor:
        """Scales the gradients to the norm max_norm if theirs is larger. Returns theirs."""
        assert norm_type == 2
        self.accelerator.unscale_gradients()
        # A small parameter has no shard on some processes, and a small model none at all.
        grads = [_local(p.grad) for p in parameters if p.grad is not None]
        grads = [gradient for gradient in grads if gradient.numel()] or [self.one.new_zeros(1)]
        norm = self._norm(grads)
        torch._foreach_mul_(grads, (max_norm / (norm + 1e-6)).clamp(max=1).float().to(grads[0].device))
        return norm

    def check(self, step: int) -> None:
        """FloatingPointError on all processes if a gradient did not fit since the last call. step: the last
        one. Collective; waits for the device."""
        failed = self.failed.clone()
        self._reduce(failed, dist.ReduceOp.MIN)
        first, number = failed.min(0)
        first, number, steps = torch.stack([first, number, self.steps]).tolist()
        if first < math.inf:
            name, at = self.names[int(number)], step - int(steps - first)
            raise FloatingPointError(
                f"the gradient of {name} at step {at} is not finite, or more than"
                f" {LIMIT / self.micro_batches:g} in a micro-batch, which --deterministic can't add exactly"
            )
        self.steps.zero_()
        self.failed.fill_(math.inf)

    def _follow(self, parameters: list[nn.Parameter]) -> None:
        """Adds each gradient to its bucket. The last layers come first, as in backward."""
        groups: list[list[int]] = []
        size = BUCKET
        for i in reversed(range(len(parameters))):
            if size >= BUCKET:
                groups.append([])
                size = 0
            groups[-1].append(i)
            size += parameters[i].numel()
        for group in groups:
            bucket = Bucket([parameters[i] for i in group], self.accelerator.device)
            self.buckets.append(bucket)
            for place, (i, total) in enumerate(zip(group, bucket.views(bucket.total), strict=True)):
                parameters[i].register_post_accumulate_grad_hook(partial(self._add, i, bucket, place, total))

    def _add(self, i: int, bucket: Bucket, place: int, total: Tensor, p: nn.Parameter) -> None:
        assert p.grad is not None
        total.add_(self._in_units(i, p.grad))
        p.grad = None
        bucket.seen.add(place)
        if self.accelerator.sync_gradients and self.accelerator.num_processes > 1:
            bucket.awaited -= 1
            while self.exchanged < len(self.buckets) and not self.buckets[self.exchanged].awaited:
                self._exchange_next()

    def _exchange_next(self) -> None:
        """Begins the exchange of the next bucket: on all processes in the same order."""
        self.buckets[self.exchanged].exchange()
        self.exchanged += 1

    def _follow_shards(self, model: nn.Module) -> None:
        """Has FSDP2 add, without averages, gradients that are rounded before."""
        numbers = {name: i for i, name in enumerate(self.names)}
        modules: dict[str, Any] = dict(model.named_modules())
        for prefix, module in modules.items():
            if hasattr(module, "unshard"):
                module.set_force_sum_reduction_for_comms(True)
                module.set_gradient_divide_factor(1.0)
                module.unshard()  # the gathered parameters stay the same objects
                for name, p in module.named_parameters(prefix):
                    if name in numbers and not hasattr(p, "to_local"):
                        p.register_hook(partial(self._rounded, numbers.pop(name)))
                module.reshard()
        assert not numbers, f"not sharded: {numbers}"

    def _rounded(self, i: int, gradient: Tensor) -> Tensor:
        return self._in_units(i, gradient) / self.unit

    def _in_units(self, i: int, gradient: Tensor) -> Tensor:
        """The gradient of parameter i in whole units, which fp32 holds exactly."""
        torch.maximum(self.largest[i], torch.linalg.vector_norm(gradient, math.inf), out=self.largest[i])
        return (gradient * self.unit).round_()

    @torch.no_grad()
    def _end_step(self) -> None:
        if self.accelerator.num_processes > 1:
            while self.exchanged < len(self.buckets):  # a parameter had no gradient in the last micro-batch
                self._exchange_next()
        for bucket in self.buckets:
            bucket.finish(self.unit)
        self.exchanged = 0
        fits = self.largest * self.unit <= LIMIT * UNIT / self.micro_batches
        if self.accelerator.scaler is not None:
            fits |= ~self.largest.isfinite()  # the scaler skips such a step
        self.steps += 1
        # In place, as a CUDA graph of the step reads the same memory each time
        torch.minimum(self.failed, torch.where(fits, math.inf, self.steps), out=self.failed)
        self.largest.zero_()

    def _norm(self, grads: list[Tensor]) -> Tensor:
        """The 2-norm: squares of at most 1 are rounded to two grids, and the sums of each are exact."""
        norms = [torch.linalg.vector_norm(gradient, math.inf) for gradient in grads]
        largest = torch.stack(norms).max().double().to(self.accelerator.device)
        self._reduce(largest, dist.ReduceOp.MAX)
        largest = largest.clamp(min=1e-300)
        replicas = sharding(self.accelerator).get("replicas", 1)
        unit = 2.0 ** (53 - (self.numbers * replicas).bit_length())
        sums = torch.zeros(2, dtype=torch.float64, device=grads[0].device)
        for gradient in grads:
            squares = (gradient.double() / largest.to(gradient.device)).square_() * unit
            rounded = squares.round()
            sums += torch.stack([rounded.sum(), ((squares - rounded) * unit).round_().sum()])
        sums = sums.to(largest.device)
        self._reduce(sums, dist.ReduceOp.SUM)
        return largest * ((sums[0] / unit + sums[1] / unit**2) / replicas).sqrt()

    def _reduce(self, values: Tensor, how: Any) -> None:
        """Combines what the processes have; of DDP's gradients each has the whole."""
        if self.accelerator.num_processes > 1 and (not self.buckets or how == dist.ReduceOp.MIN):
            dist.all_reduce(values, how)


def _local(gradient: Any) -> Tensor:
    return gradient.to_local() if hasattr(gradient, "to_local") else gradient
