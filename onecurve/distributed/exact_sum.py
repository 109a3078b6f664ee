"""Exact sums of gradients, which make --deterministic training independent of the number of processes.

A sum of fp32 numbers depends on the order of the additions, and therefore on the distribution of work among
processes. To avoid this, each micro-batch's gradient is rounded to multiples of 1 / UNIT and accumulated in
float64. The 53 bits of a float64 represent every sum of such multiples below LIMIT exactly. Additions are
therefore exact within and between processes, for buckets and for shards. Only the final sum is rounded to
fp32. This module uses float64 instead of int64, which has the same size, because FSDP2 can be configured to
reduce in float64. A step with a single micro-batch needs no exact sum, because there is only one gradient.

benchmarks/README.md describes the gradients of three models from which UNIT was chosen. Demmel and Nguyen
instead derive the unit from the largest summand (Parallel Reproducible Summation, IEEE TC 2015).
"""

import math
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from accelerate import Accelerator
from torch import Tensor, nn

from onecurve.distributed.layout import to_local
from onecurve.distributed.strategy import sharding, strategy
from onecurve.upstream.torch_ import multiply_, norms, unscale_before_step

UNIT = 2.0**40  # units per 1.0; Adam's epsilon, 1e-8, equals 11,000 units
LIMIT = 2.0**52 / UNIT  # maximum sum of magnitudes over a step's micro-batches; fp32 comparisons round
LOSS_UNIT = 2.0**28
BUCKET = 2**22  # gradient elements per exchange; 32 MiB
CACHED = 2**16  # gradient elements that a CPU processes at a time; 512 KiB


def exact_sum(values: Tensor) -> Tensor:
    """Return the float64 sum of values rounded to multiples of 1 / LOSS_UNIT. Sums below 2**25 are exact."""
    return (values.double() * LOSS_UNIT).round_().sum() / LOSS_UNIT


def use_foreach(optimizer: torch.optim.Optimizer) -> None:
    """Make the optimizer use its foreach implementation instead of a fused kernel.

    On a CPU, fused kernels round the last elements of a tensor differently, and the last elements of a shard
    are not the last elements of the whole tensor.
    """
    for group in optimizer.param_groups:
        if group.get("fused"):
            group |= {"fused": False, "foreach": True}
    unscale_before_step(optimizer)


class Bucket:
    """Group of parameters whose gradients are added and exchanged together, in one flat tensor.

    `total` contains the gradient sums in units, followed by one count per parameter. The count is above 0 if
    the parameter had a gradient in this step in any process. Otherwise, the parameter's .grad becomes None,
    as usual in torch.
    """

    def __init__(self, parameters: list[nn.Parameter], numbers: list[int], device: torch.device):
        self.parameters, self.numbers = parameters, numbers  # numbers: indices of the parameters in the model
        self.sizes = [p.numel() for p in parameters]
        self.total = torch.zeros(sum(self.sizes) + len(parameters), dtype=torch.float64, device=device)
        self.sums, self.gradient_counts = self.total.split([sum(self.sizes), len(parameters)])
        self.work: Any = None  # handle of the running exchange
        self.arrived: set[int] = set()  # parameters whose gradient of this micro-batch is not yet added
        self.seen: set[int] = set()  # parameters with a gradient in this step in this process
        self.is_added = False  # True if this micro-batch's gradients are added

    def take(self, flat: Tensor) -> None:
        """Move a micro-batch's gradients to `flat`. Elements are in the memory order of the parameters."""
        pairs = zip(self.parameters, self.sizes, strict=True)
        torch.cat([flat.new_zeros(n) if p.grad is None else _flat(p.grad) for p, n in pairs], out=flat)
        for p in self.parameters:
            p.grad = None

    def end_micro_batch(self) -> None:
        """Record that this micro-batch's gradients are added."""
        self.seen |= self.arrived
        self.arrived.clear()
        self.is_added = True

    def forget(self) -> None:
        """Discard the state of the current step, whether finished or not, and begin the next step."""
        self.work, self.seen, self.is_added = None, set(), False
        self.arrived.clear()

    def exchange(self) -> None:
        """Start to exchange the sums between processes."""
        if not self.seen:
            self.sums.zero_()
        self.gradient_counts.fill_(1)
        for i in self._missing():
            self.gradient_counts[i] = 0
        self.work = dist.all_reduce(self.total, async_op=True)

    def finish(self, unit: float | Tensor) -> None:
        """Wait for the exchange, set the parameters' gradients, and begin the next step."""
        missing = self._missing()
        if self.work:
            self.work.wait()
            if missing:  # only in this case, the host waits for the device
                counts = self.gradient_counts.tolist()
                missing = {i for i in missing if not counts[i]}
        parts = self.sums.float().div_(unit).split(self.sizes)  # the division by a power of two is exact
        for i, (p, part) in enumerate(zip(self.parameters, parts, strict=True)):
            p.grad = None if i in missing else part.as_strided(p.shape, p.stride())
        self.work, self.seen = None, set()

    def _missing(self) -> set[int]:
        return set(range(len(self.parameters))) - self.seen


class ExactSum:
    """Implementation of JobAccelerator.backward and clip_grad_norm_ that replaces DDP's gradient exchange.

    Create this object after prepare(), and pass the plain model. backward() divides each loss by the number
    of micro-batches in a step of the whole job. Two divisions, first by the number of accumulations and then
    by the number of processes, would round differently.
    """

    def __init__(self, accelerator: Accelerator, model: nn.Module):
        self.accelerator, device = accelerator, accelerator.device
        trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
        self.names, self.numbers = list(trained), sum(p.numel() for p in trained.values())
        self.micro_batches = accelerator.gradient_accumulation_steps * accelerator.num_processes
        self.zero, self.one = torch.zeros((), device=device), torch.ones((), device=device)
        self.chunk = CACHED if device.type == "cpu" else 2 * BUCKET  # large on a GPU, to launch few kernels
        self.unit: float | Tensor = UNIT  # with fp16, UNIT divided by the loss scale (a power of two)
        # Maximum gradient magnitude of each parameter in this step in this process. NaN is preserved.
        self.largest = torch.zeros(len(trained), device=device)
        self.norms = [self.zero] * len(trained)  # maximum magnitudes in the current micro-batch
        self.steps = torch.zeros((), device=device)  # number of steps since the last check()
        self.failed = torch.full_like(self.largest, math.inf)  # first step with a gradient that was too large
        self.buckets: list[Bucket] = []
        self.exchanged = 0  # number of buckets exchanged in this step
        self.arrived: set[int] = set()  # parameters with a gradient in this step, under FSDP2
        self.digest = 0  # hash of `arrived` over all steps
        if strategy(accelerator) == "fsdp":
            self._follow_shards(model)
        else:
            self._follow(list(trained.values()))

    def backward(self, loss: Tensor, **options: Any) -> None:
        """Add a micro-batch's gradients. After a step's last micro-batch, exchange sums and set .grad."""
        loss, scaler = loss / self.micro_batches, self.accelerator.scaler
        if scaler is not None:
            loss, scale = scaler.scale([loss, self.one])
            self.unit = UNIT / scale
        loss.backward(**options)
        self._end_micro_batch()
        if self.accelerator.sync_gradients:
            self._end_step()

    @torch.no_grad()
    def clip_grad_norm_(self, parameters: Iterable[Tensor], max_norm: float, norm_type: float = 2) -> Tensor:
        """Scale the gradients to norm max_norm if their norm is larger. Return the norm before scaling."""
        assert norm_type == 2
        self.accelerator.unscale_gradients()
        # A process may hold no elements of a small parameter, or even of a small model.
        grads = [to_local(p.grad) for p in parameters if p.grad is not None]
        grads = [gradient for gradient in grads if gradient.numel()] or [self.one.new_zeros(1)]
        norm = self._norm(grads)
        multiply_(grads, (max_norm / (norm + 1e-6)).clamp(max=1).float().to(grads[0].device))
        return norm

    @contextmanager
    def uncounted(self) -> Iterator[None]:
        """Reset the host's counters after a block that captures a step, even if the capture fails."""
        digest = self.digest
        try:
            yield
        finally:
            self.digest, self.exchanged, self.norms = digest, 0, [self.zero] * len(self.names)
            self.arrived.clear()
            for bucket in self.buckets:
                bucket.forget()

    def check(self, step: int) -> None:
        """Check the gradients of all steps since the last call. Collective. Waits for the device.

        Args:
            step: Number of the last step.

        Raises:
            FloatingPointError: A gradient was too large or not finite. All processes raise the error.
            ValueError: FSDP2 added gradients of different parameters.
        """
        failed = self.failed.clone()
        self._reduce(failed, dist.ReduceOp.MIN)
        first, number = failed.min(0)
        first, number, steps = torch.stack([first, number, self.steps]).tolist()
        if first < math.inf:
            name, failed_step = self.names[int(number)], step - int(steps - first)
            raise FloatingPointError(
                f"the gradient of {name} at step {failed_step} is not finite, or more than"
                f" {LIMIT / self.micro_batches:g} in a micro-batch; --deterministic can't add it exactly"
            )
        self.steps.zero_()
        self.failed.fill_(math.inf)
        if not self.buckets:
            self._check_shards(step)

    def _check_shards(self, step: int) -> None:
        """Raise ValueError if FSDP2 added gradients of different parameters.

        This can happen because FSDP2 exchanges whichever gradients a process has computed.
        """
        digests = torch.tensor([self.digest, -self.digest], device=self.accelerator.device)
        self._reduce(digests, dist.ReduceOp.MIN)
        least, negative = digests.tolist()
        if least != -negative:
            raise ValueError(
                f"by step {step}, a parameter had a gradient on some processes only, which FSDP2 can't add."
                " Train with DDP."
            )

    def _follow(self, parameters: list[nn.Parameter]) -> None:
        """Assign the parameters to buckets, last layers first, because the backward pass has this order."""
        last_first = list(reversed(range(len(parameters))))
        for group in _grouped([parameters[i].numel() for i in last_first], BUCKET):
            numbers = [last_first[i] for i in group]
            bucket = Bucket([parameters[i] for i in numbers], numbers, self.accelerator.device)
            self.buckets.append(bucket)
            for index, p in enumerate(bucket.parameters):
                p.register_post_accumulate_grad_hook(partial(self._on_gradient, bucket, index))
        longest = max(len(bucket.sums) for bucket in self.buckets)
        self.flat = torch.empty(longest, device=self.accelerator.device)  # buffer for a bucket's gradients

    def _on_gradient(self, bucket: Bucket, index: int, p: nn.Parameter) -> None:
        """Add a bucket's gradients once all have arrived, and exchange completed buckets in order."""
        bucket.arrived.add(index)
        if len(bucket.arrived) == len(bucket.parameters):
            self._add(bucket)
            if self.accelerator.sync_gradients and self.accelerator.num_processes > 1:
                while self.exchanged < len(self.buckets) and self.buckets[self.exchanged].is_added:
                    self._exchange_next()

    def _add(self, bucket: Bucket) -> None:
        """Add a bucket's gradients of one micro-batch, with few operations on long tensors."""
        units = self.flat[: len(bucket.sums)]
        bucket.take(units)
        largest = norms(units.split(bucket.sizes), math.inf)
        for i, norm in zip(bucket.numbers, largest, strict=True):
            self.norms[i] = norm
        assert not bucket.work, "a parameter received two gradients in one micro-batch"
        for part, sums in zip(units.split(self.chunk), bucket.sums.split(self.chunk), strict=True):
            self._in_units(part, out=part)
            sums.add_(part) if bucket.seen else sums.copy_(part)
        bucket.end_micro_batch()

    def _exchange_next(self) -> None:
        """Start the exchange of the next bucket. The order of buckets is the same in all processes."""
        self.buckets[self.exchanged].exchange()
        self.exchanged += 1

    def _follow_shards(self, model: nn.Module) -> None:
        """Make FSDP2 sum the rounded gradients instead of averaging them."""
        numbers = {name: i for i, name in enumerate(self.names)}
        modules: dict[str, Any] = dict(model.named_modules())
        for prefix, module in modules.items():
            if hasattr(module, "unshard"):
                module.set_force_sum_reduction_for_comms(True)
                module.set_gradient_divide_factor(1.0)
                module.unshard()  # later calls gather into the same parameter objects
                for name, p in module.named_parameters(prefix):
                    if name in numbers and not hasattr(p, "to_local"):
                        p.register_hook(partial(self._rounded, numbers.pop(name)))
                module.reshard()
        assert not numbers, f"not sharded: {numbers}"

    def _rounded(self, i: int, gradient: Tensor) -> Tensor:
        """Return the gradient of parameter i rounded to multiples of 1 / UNIT."""
        self.arrived.add(i)
        self.norms[i] = torch.linalg.vector_norm(gradient, math.inf)
        return self._in_units(gradient).div_(self.unit)

    def _in_units(self, gradient: Tensor, out: Tensor | None = None) -> Tensor:
        """Return the gradient in whole units, which fp32 represents exactly."""
        return torch.mul(gradient, self.unit, out=out).round_()

    @torch.no_grad()
    def _end_micro_batch(self) -> None:
        for bucket in self.buckets:
            if bucket.arrived:  # buckets in which some parameters had no gradient
                self._add(bucket)
            bucket.is_added = False
        # Updates are in place, because a step may be a CUDA graph, which reads fixed addresses.
        torch.maximum(self.largest, torch.stack(self.norms), out=self.largest)
        self.norms = [self.zero] * len(self.names)

    @torch.no_grad()
    def _end_step(self) -> None:
        if self.accelerator.num_processes > 1:
            while self.exchanged < len(self.buckets):  # exchange buckets with missing gradients
                self._exchange_next()
        for bucket in self.buckets:
            bucket.finish(self.unit)
        self.exchanged = 0
        self.digest = hash((self.digest, *sorted(self.arrived)))
        self.arrived.clear()
        fits = self.largest * self.unit <= LIMIT * UNIT / self.micro_batches
        if self.accelerator.scaler is not None:
            fits |= ~self.largest.isfinite()  # the scaler skips steps with such gradients
        self.steps += 1
        torch.minimum(self.failed, torch.where(fits, math.inf, self.steps), out=self.failed)
        self.largest.zero_()

    def _norm(self, grads: list[Tensor]) -> Tensor:
        """Return the 2-norm.

        Each squared element, scaled to at most 1, is rounded to a multiple of a coarse unit plus a multiple
        of a fine unit. Multiples of the same unit are added exactly.
        """
        largest = torch.stack(norms(grads, math.inf)).max()
        largest = largest.double().to(self.accelerator.device)
        self._reduce(largest, dist.ReduceOp.MAX)
        largest = largest.clamp(min=1e-300)
        replicas = sharding(self.accelerator).get("replicas", 1)
        unit = 2.0 ** (53 - (self.numbers * replicas).bit_length())
        parts = [part for gradient in grads for part in _flat(gradient).split(self.chunk)]
        zero, sums = torch.zeros(3, dtype=torch.float64, device=grads[0].device).split([1, 2])
        divisor = largest.to(sums.device).view(1)  # a 1-D tensor, so that the quotient is float64
        for group in _grouped([len(part) for part in parts], min(self.chunk, BUCKET)):
            values = torch.cat([parts[i] for i in group])
            high, low = both = sums.new_empty(2, len(values))
            torch.div(values, divisor, out=low)
            torch.addcmul(zero, low, low, value=unit, out=low)  # unit * square
            torch.trunc(low, out=high)
            low.frac_().mul_(unit).round_()
            sums += both.sum(1)
        sums = sums.to(largest.device)
        self._reduce(sums, dist.ReduceOp.SUM)
        return largest * ((sums[0] / unit + sums[1] / unit**2) / replicas).sqrt()

    def _reduce(self, values: Tensor, operation: Any) -> None:
        """Reduce tensors between processes in place.

        Under DDP, each process already holds the whole gradients, so only minima need an exchange.
        """
        if self.accelerator.num_processes > 1 and (not self.buckets or operation == dist.ReduceOp.MIN):
            dist.all_reduce(values, operation)


def _flat(tensor: Tensor) -> Tensor:
    """Return a 1-D view of a dense tensor's elements in memory order."""
    return tensor.as_strided((tensor.numel(),), (1,))


def _grouped(sizes: list[int], enough: int) -> list[list[int]]:
    """Split the indices of `sizes` into consecutive groups. Each group's sizes add up to `enough` or more."""
    groups: list[list[int]] = []
    total = enough
    for i, size in enumerate(sizes):
        if total >= enough:
            groups.append([])
            total = 0
        groups[-1].append(i)
        total += size
    return groups
