"""Exact sums: with --deterministic the bits of a training do not depend on the number of processes.

A sum of fp32 numbers depends on its order, and so on who adds what. Here each micro-batch's gradient is
rounded to multiples of 1 / UNIT and added in float64, whose 53 bits hold every sum of such numbers below
LIMIT exactly: on a process, between processes, bucket by bucket or shard by shard. float64 and not int64, as
FSDP2 reduces in it by its own settings, and the bytes are the same. Only the sum is rounded to fp32, once.
A step of one micro-batch needs none of this: its gradient has one order.

benchmarks/README.md has the gradients of three models, by which UNIT was chosen. Demmel and Nguyen choose the
grid by the largest number instead (Parallel Reproducible Summation, IEEE TC 2015).
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

UNIT = 2.0**40  # Adam's epsilon, 1e-8, is 11,000 units
LIMIT = 2.0**52 / UNIT  # of the magnitudes of a step's micro-batches together; comparisons in fp32 round
LOSS_UNIT = 2.0**28
BUCKET = 2**22  # numbers in one exchange; 32 MiB
CACHED = 2**16  # numbers that a CPU computes with at a time: 512 KiB


def exact_sum(values: Tensor) -> Tensor:
    """The sum in float64 of the values, rounded to multiples of 1 / LOSS_UNIT: exact below 2**25."""
    return (values.double() * LOSS_UNIT).round_().sum() / LOSS_UNIT


def use_foreach(optimizer: torch.optim.Optimizer) -> None:
    """Has the optimizer step tensor by tensor: on a CPU fused ones round a tensor's last elements otherwise,
    and these are others in a shard."""
    for group in optimizer.param_groups:
        if group.get("fused"):
            group |= {"fused": False, "foreach": True}
    unscale_before_step(optimizer)


class Bucket:
    """Parameters whose gradients are added and exchanged together, as one flat tensor.

    `total` has their sums, in units, and then for each of them a number above 0 if it had a gradient in this
    step on any process. Without one its .grad is None, as in torch.
    """

    def __init__(self, parameters: list[nn.Parameter], numbers: list[int], device: torch.device):
        self.parameters, self.numbers = parameters, numbers  # numbers: their places in the model
        self.sizes = [p.numel() for p in parameters]
        self.total = torch.zeros(sum(self.sizes) + len(parameters), dtype=torch.float64, device=device)
        self.sums, self.had = self.total.split([sum(self.sizes), len(parameters)])
        self.work: Any = None  # the exchange
        self.came: set[int] = set()  # those with a gradient in this micro-batch, which is not added yet
        self.seen: set[int] = set()  # those with a gradient in this step, on this process
        self.is_added = False  # in this micro-batch

    def take(self, flat: Tensor) -> None:
        """Moves the gradients of a micro-batch to `flat`, as they lie in memory: like their parameters."""
        pairs = zip(self.parameters, self.sizes, strict=True)
        torch.cat([flat.new_zeros(n) if p.grad is None else _flat(p.grad) for p, n in pairs], out=flat)
        for p in self.parameters:
            p.grad = None

    def end_micro_batch(self) -> None:
        self.seen |= self.came
        self.came.clear()
        self.is_added = True

    def forget(self) -> None:
        """Begin the next step, whatever has become of this one."""
        self.work, self.seen, self.is_added = None, set(), False
        self.came.clear()

    def exchange(self) -> None:
        if not self.seen:
            self.sums.zero_()
        self.had.fill_(1)
        for i in self._missing():
            self.had[i] = 0
        self.work = dist.all_reduce(self.total, async_op=True)

    def finish(self, unit: float | Tensor) -> None:
        """Waits for the exchange, gives the parameters their gradients, and begins the next step."""
        without = self._missing()
        if self.work:
            self.work.wait()
            if without:  # only then does the host wait for the device
                had = self.had.tolist()
                without = {i for i in without if not had[i]}
        parts = self.sums.float().div_(unit).split(self.sizes)  # by a power of two, which rounds nothing
        for i, (p, part) in enumerate(zip(self.parameters, parts, strict=True)):
            p.grad = None if i in without else part.as_strided(p.shape, p.stride())
        self.work, self.seen = None, set()

    def _missing(self) -> set[int]:
        return set(range(len(self.parameters))) - self.seen


class ExactSum:
    """Computes what JobAccelerator.backward and clip_grad_norm_ do, and replaces DDP's exchange of gradients.

    Create it after prepare(), with the plain model. backward divides each loss by the number of micro-batches
    in a step of the whole job: by accumulations and then by processes would round differently.
    """

    def __init__(self, accelerator: Accelerator, model: nn.Module):
        self.accelerator, device = accelerator, accelerator.device
        trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
        self.names, self.numbers = list(trained), sum(p.numel() for p in trained.values())
        self.micro_batches = accelerator.gradient_accumulation_steps * accelerator.num_processes
        self.zero, self.one = torch.zeros((), device=device), torch.ones((), device=device)
        self.chunk = CACHED if device.type == "cpu" else 2 * BUCKET  # on a GPU few launches matter
        self.unit: float | Tensor = UNIT  # with fp16 divided by the loss scale, a power of two
        self.largest = torch.zeros(len(trained), device=device)  # of this process in this step; NaN stays NaN
        self.norms = [self.zero] * len(trained)  # likewise, of a micro-batch
        self.steps = torch.zeros((), device=device)  # since the last check()
        self.failed = torch.full_like(self.largest, math.inf)  # the first of them in which one did not fit
        self.buckets: list[Bucket] = []
        self.exchanged = 0  # buckets in this step
        self.came: set[int] = set()  # under FSDP2: the parameters with a gradient in this step
        self.digest = 0  # of these, over all steps
        if strategy(accelerator) == "fsdp":
            self._follow_shards(model)
        else:
            self._follow(list(trained.values()))

    def backward(self, loss: Tensor, **options: Any) -> None:
        """Adds the gradients of a micro-batch; in a step's last one, exchanges and sets them."""
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
        """Scales the gradients to the norm max_norm if theirs is larger. Returns theirs."""
        assert norm_type == 2
        self.accelerator.unscale_gradients()
        # A small parameter has no shard on some processes, and a small model none at all.
        grads = [to_local(p.grad) for p in parameters if p.grad is not None]
        grads = [gradient for gradient in grads if gradient.numel()] or [self.one.new_zeros(1)]
        norm = self._norm(grads)
        multiply_(grads, (max_norm / (norm + 1e-6)).clamp(max=1).float().to(grads[0].device))
        return norm

    @contextmanager
    def uncounted(self) -> Iterator[None]:
        """Capture a step inside, which need not succeed: what the host counts is then as before a step."""
        digest = self.digest
        try:
            yield
        finally:
            self.digest, self.exchanged, self.norms = digest, 0, [self.zero] * len(self.names)
            self.came.clear()
            for bucket in self.buckets:
                bucket.forget()

    def check(self, step: int) -> None:
        """FloatingPointError on all processes if a gradient did not fit since the last call. step: the last
        one. ValueError if FSDP2 added gradients of different parameters. Collective; waits for the device."""
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
        if not self.buckets:
            self._check_shards(step)

    def _check_shards(self, step: int) -> None:
        """ValueError if FSDP2 added gradients of different parameters: it takes those that a process has."""
        digests = torch.tensor([self.digest, -self.digest], device=self.accelerator.device)
        self._reduce(digests, dist.ReduceOp.MIN)
        least, negative = digests.tolist()
        if least != -negative:
            raise ValueError(
                f"up to step {step} a parameter had a gradient on some processes and none on others, which"
                " FSDP2 can't add: train with DDP"
            )

    def _follow(self, parameters: list[nn.Parameter]) -> None:
        """Puts the parameters into buckets. The last layers come first, as in backward."""
        last_first = list(reversed(range(len(parameters))))
        for group in _grouped([parameters[i].numel() for i in last_first], BUCKET):
            numbers = [last_first[i] for i in group]
            bucket = Bucket([parameters[i] for i in numbers], numbers, self.accelerator.device)
            self.buckets.append(bucket)
            for place, p in enumerate(bucket.parameters):
                p.register_post_accumulate_grad_hook(partial(self._came, bucket, place))
        longest = max(len(bucket.sums) for bucket in self.buckets)
        self.flat = torch.empty(longest, device=self.accelerator.device)  # gradients of one, side by side

    def _came(self, bucket: Bucket, place: int, p: nn.Parameter) -> None:
        bucket.came.add(place)
        if len(bucket.came) == len(bucket.parameters):
            self._add(bucket)
            if self.accelerator.sync_gradients and self.accelerator.num_processes > 1:
                while self.exchanged < len(self.buckets) and self.buckets[self.exchanged].is_added:
                    self._exchange_next()

    def _add(self, bucket: Bucket) -> None:
        """Adds the gradients of a micro-batch: few operations for many numbers."""
        units = self.flat[: len(bucket.sums)]
        bucket.take(units)
        largest = norms(units.split(bucket.sizes), math.inf)
        for i, norm in zip(bucket.numbers, largest, strict=True):
            self.norms[i] = norm
        assert not bucket.work, "a parameter has two gradients of one micro-batch"
        for part, sums in zip(units.split(self.chunk), bucket.sums.split(self.chunk), strict=True):
            self._in_units(part, out=part)
            sums.add_(part) if bucket.seen else sums.copy_(part)
        bucket.end_micro_batch()

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
        self.came.add(i)
        self.norms[i] = torch.linalg.vector_norm(gradient, math.inf)
        return self._in_units(gradient).div_(self.unit)

    def _in_units(self, gradient: Tensor, out: Tensor | None = None) -> Tensor:
        """The gradient in whole units, which fp32 holds exactly."""
        return torch.mul(gradient, self.unit, out=out).round_()

    @torch.no_grad()
    def _end_micro_batch(self) -> None:
        for bucket in self.buckets:
            if bucket.came:  # not all of its parameters had a gradient
                self._add(bucket)
            bucket.is_added = False
        # In place, as all that the next step reads: a step may be a graph
        torch.maximum(self.largest, torch.stack(self.norms), out=self.largest)
        self.norms = [self.zero] * len(self.names)

    @torch.no_grad()
    def _end_step(self) -> None:
        if self.accelerator.num_processes > 1:
            while self.exchanged < len(self.buckets):  # a parameter had no gradient in the last micro-batch
                self._exchange_next()
        for bucket in self.buckets:
            bucket.finish(self.unit)
        self.exchanged = 0
        self.digest = hash((self.digest, *sorted(self.came)))
        self.came.clear()
        fits = self.largest * self.unit <= LIMIT * UNIT / self.micro_batches
        if self.accelerator.scaler is not None:
            fits |= ~self.largest.isfinite()  # the scaler skips such a step
        self.steps += 1
        torch.minimum(self.failed, torch.where(fits, math.inf, self.steps), out=self.failed)
        self.largest.zero_()

    def _norm(self, grads: list[Tensor]) -> Tensor:
        """The 2-norm: squares of at most 1 are rounded to two grids, and the sums of each are exact."""
        largest = torch.stack(norms(grads, math.inf)).max()
        largest = largest.double().to(self.accelerator.device)
        self._reduce(largest, dist.ReduceOp.MAX)
        largest = largest.clamp(min=1e-300)
        replicas = sharding(self.accelerator).get("replicas", 1)
        unit = 2.0 ** (53 - (self.numbers * replicas).bit_length())
        parts = [part for gradient in grads for part in _flat(gradient).split(self.chunk)]
        zero, sums = torch.zeros(3, dtype=torch.float64, device=grads[0].device).split([1, 2])
        divisor = largest.to(sums.device).view(1)  # with a dimension, so that the quotient is in float64
        for group in _grouped([len(part) for part in parts], min(self.chunk, BUCKET)):
            values = torch.cat([parts[i] for i in group])
            high, low = both = sums.new_empty(2, len(values))
            torch.div(values, divisor, out=low)
            torch.addcmul(zero, low, low, value=unit, out=low)  # unit * the square
            torch.trunc(low, out=high)
            low.frac_().mul_(unit).round_()
            sums += both.sum(1)
        sums = sums.to(largest.device)
        self._reduce(sums, dist.ReduceOp.SUM)
        return largest * ((sums[0] / unit + sums[1] / unit**2) / replicas).sqrt()

    def _reduce(self, values: Tensor, how: Any) -> None:
        """Combines what the processes have; of DDP's gradients each has the whole."""
        if self.accelerator.num_processes > 1 and (not self.buckets or how == dist.ReduceOp.MIN):
            dist.all_reduce(values, how)


def _flat(tensor: Tensor) -> Tensor:
    """The numbers of a dense tensor, as they lie in memory."""
    return tensor.as_strided((tensor.numel(),), (1,))


def _grouped(sizes: list[int], enough: int) -> list[list[int]]:
    """The places in `sizes`, in groups whose sizes reach `enough` together."""
    groups: list[list[int]] = []
    together = enough
    for i, size in enumerate(sizes):
        if together >= enough:
            groups.append([])
            together = 0
        groups[-1].append(i)
        together += size
    return groups
