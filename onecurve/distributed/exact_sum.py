"""Adds gradients exactly, which makes --deterministic training independent of the number of processes.

A sum of fp32 numbers depends on the order of additions, and therefore on how work is distributed among
processes. To avoid this dependence, each micro-batch's gradient is rounded to multiples of 1 / UNIT and
accumulated in float64. The 53 bits of a float64 represent every sum of multiples of 1 / UNIT below MAX_SUM
exactly. Additions are therefore exact within and between processes, for DDP's buckets and FSDP2's shards.
Only the final sum is rounded to fp32. This module uses float64 instead of int64, which has the same size,
because FSDP2 can be configured to reduce in float64. A step with a single micro-batch needs no exact sum,
because each parameter has only one gradient.

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

UNIT = 2.0**40  # number of units in 1.0; Adam's epsilon, 1e-8, equals 11,000 units
# Maximum sum of gradient magnitudes over a step's micro-batches. The limit is approximate, because
# comparisons use fp32.
MAX_SUM = 2.0**52 / UNIT
LOSS_UNIT = 2.0**28
BUCKET_SIZE = 2**22  # number of gradient elements per exchange; 32 MiB
CPU_CHUNK = 2**16  # number of gradient elements that a CPU processes at a time; 512 KiB


def exact_sum(values: Tensor) -> Tensor:
    """Return the float64 sum of values rounded to multiples of 1 / LOSS_UNIT. Sums below 2**25 are exact."""
    return (values.double() * LOSS_UNIT).round_().sum() / LOSS_UNIT


def use_foreach(optimizer: torch.optim.Optimizer) -> None:
    """Make the optimizer use its foreach implementation instead of its fused kernel.

    On a CPU, fused kernels round the last elements of a tensor differently, and the last elements of a shard
    are not the last elements of the whole tensor.
    """
    for group in optimizer.param_groups:
        if group.get("fused"):
            group |= {"fused": False, "foreach": True}
    unscale_before_step(optimizer)


class Bucket:
    """Group of parameters whose gradients are added and exchanged together in one flat tensor.

    `total` contains the gradient sums in units, followed by one count per parameter. A positive count means
    that in this step, at least one process had a gradient for the parameter. If the count is 0, the
    parameter's .grad becomes None, as usual in torch.
    """

    def __init__(self, parameters: list[nn.Parameter], parameter_indices: list[int], device: torch.device):
        # `numbers` contains the parameters' indices in the model.
        self.parameters, self.parameter_indices = parameters, parameter_indices
        self.sizes = [parameter.numel() for parameter in parameters]
        self.total = torch.zeros(sum(self.sizes) + len(parameters), dtype=torch.float64, device=device)
        self.sums, self.gradient_counts = self.total.split([sum(self.sizes), len(parameters)])
        self.reduction: Any = None  # handle of the exchange in progress
        # Indices of parameters whose gradient from this micro-batch has not been added yet
        self.arrived: set[int] = set()
        self.touched: set[int] = set()  # indices of parameters with a gradient in this process in this step
        self.is_added = False  # True once this micro-batch's gradients have been added

    def take_gradients(self, units: Tensor) -> None:
        """Move a micro-batch's gradients to `units`, in the memory order of the parameters' elements."""
        pairs = zip(self.parameters, self.sizes, strict=True)
        gradients = [
            units.new_zeros(size) if parameter.grad is None else _flat_view(parameter.grad)
            for parameter, size in pairs
        ]
        torch.cat(gradients, out=units)
        for parameter in self.parameters:
            parameter.grad = None

    def end_micro_batch(self) -> None:
        """Record that this micro-batch's gradients have been added."""
        self.touched |= self.arrived
        self.arrived.clear()
        self.is_added = True

    def reset(self) -> None:
        """Discard the current step's state, even if the step is unfinished, and begin the next step."""
        self.reduction, self.touched, self.is_added = None, set(), False
        self.arrived.clear()

    def exchange(self) -> None:
        """Start the exchange of gradient sums between processes."""
        if not self.touched:
            self.sums.zero_()
        self.gradient_counts.fill_(1)
        for index in self._missing():
            self.gradient_counts[index] = 0
        self.reduction = dist.all_reduce(self.total, async_op=True)

    def finish(self, unit: float | Tensor) -> None:
        """Wait for the exchange, set the parameters' gradients, and begin the next step."""
        missing = self._missing()
        if self.reduction:
            self.reduction.wait()
            if missing:  # the host waits for the device only here
                counts = self.gradient_counts.tolist()
                missing = {index for index in missing if not counts[index]}
        gradients = self.sums.float().div_(unit).split(self.sizes)  # a division by a power of two is exact
        for index, (parameter, gradient) in enumerate(zip(self.parameters, gradients, strict=True)):
            is_missing = index in missing
            parameter.grad = None if is_missing else gradient.as_strided(parameter.shape, parameter.stride())
        self.reduction, self.touched = None, set()

    def _missing(self) -> set[int]:
        return set(range(len(self.parameters))) - self.touched


class ExactSum:
    """Implementation of JobAccelerator.backward and clip_grad_norm_ that replaces DDP's gradient exchange.

    Create this object after prepare(), and pass the plain model to the constructor. backward() divides each
    loss by the number of micro-batches in a step of the whole job. Dividing first by the number of
    accumulations and then by the number of processes would round differently.
    """

    def __init__(self, accelerator: Accelerator, model: nn.Module):
        self.accelerator, device = accelerator, accelerator.device
        trained = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
        self.names, self.elements = list(trained), sum(parameter.numel() for parameter in trained.values())
        self.micro_batches = accelerator.gradient_accumulation_steps * accelerator.num_processes
        self.zero, self.one = torch.zeros((), device=device), torch.ones((), device=device)
        # Buckets are large on a GPU, so that few kernels are launched
        self.chunk_size = CPU_CHUNK if device.type == "cpu" else 2 * BUCKET_SIZE
        self.unit: float | Tensor = UNIT  # with fp16, UNIT divided by the loss scale (a power of two)
        # Each parameter's maximum gradient magnitude in this process in this step. A NaN gradient results in
        # NaN.
        self.max_magnitudes = torch.zeros(len(trained), device=device)
        # Each parameter's maximum gradient magnitude in this micro-batch
        self.norms = [self.zero] * len(trained)
        self.steps = torch.zeros((), device=device)  # number of steps since the last check()
        # First step in which each parameter's gradient was too large
        self.failed = torch.full_like(self.max_magnitudes, math.inf)
        self.buckets: list[Bucket] = []
        self.next_bucket = 0  # number of buckets exchanged in this step
        self.arrived: set[int] = set()  # indices of parameters with a gradient in this step, under FSDP2
        self.arrival_digest = 0  # hash of `arrived` over all steps
        if strategy(accelerator) == "fsdp":
            self._register_shard_hooks(model)
        else:
            self._register_bucket_hooks(list(trained.values()))

    def backward(self, loss: Tensor, **options: Any) -> None:
        """Add a micro-batch's gradients. After a step's last micro-batch, exchange the sums and set .grad."""
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
        # A process's shard of a small parameter, or even of a small model, may be empty.
        grads = [to_local(parameter.grad) for parameter in parameters if parameter.grad is not None]
        grads = [gradient for gradient in grads if gradient.numel()] or [self.one.new_zeros(1)]
        norm = self._exact_norm(grads)
        multiply_(grads, (max_norm / (norm + 1e-6)).clamp(max=1).float().to(grads[0].device))
        return norm

    @contextmanager
    def uncounted(self) -> Iterator[None]:
        """Run a block that captures a step, and then reset the host's counters, even if the capture fails."""
        digest = self.arrival_digest
        try:
            yield
        finally:
            self.arrival_digest, self.next_bucket, self.norms = digest, 0, [self.zero] * len(self.names)
            self.arrived.clear()
            for bucket in self.buckets:
                bucket.reset()

    def check(self, step: int) -> None:
        """Check the gradients of all steps since the last call.

        This method is collective and waits for the device.

        Args:
            step: Index of the last step.

        Raises:
            FloatingPointError: If a gradient was too large or not finite. All processes raise the error.
            ValueError: If FSDP2 added gradients of different parameters.
        """
        failed = self.failed.clone()
        self._reduce_in_place(failed, dist.ReduceOp.MIN)
        minimum = failed.min(0)
        summary = torch.stack([minimum.values, minimum.indices, self.steps])
        first_failed_step, parameter_index, steps = summary.tolist()
        if first_failed_step < math.inf:
            name, failed_step = self.names[int(parameter_index)], step - int(steps - first_failed_step)
            raise FloatingPointError(
                f"the gradient of {name} at step {failed_step} is not finite or exceeds"
                f" {MAX_SUM / self.micro_batches:g} in a micro-batch, so --deterministic can't add it exactly"
            )
        self.steps.zero_()
        self.failed.fill_(math.inf)
        if not self.buckets:
            self._check_shards(step)

    def _check_shards(self, step: int) -> None:
        """Raise ValueError if FSDP2 added gradients of different parameters.

        This error can occur because FSDP2 exchanges whichever gradients a process has computed.
        """
        digests = torch.tensor([self.arrival_digest, -self.arrival_digest], device=self.accelerator.device)
        self._reduce_in_place(digests, dist.ReduceOp.MIN)
        smallest, negated_largest = digests.tolist()
        if smallest != -negated_largest:
            raise ValueError(
                f"at step {step} or earlier, a parameter received a gradient only on some processes. FSDP2"
                " can't add such gradients. Train with DDP."
            )

    def _register_bucket_hooks(self, parameters: list[nn.Parameter]) -> None:
        """Assign the parameters to buckets, last layers first, because the backward pass uses this order."""
        last_first = list(reversed(range(len(parameters))))
        for group in _group_indices([parameters[position].numel() for position in last_first], BUCKET_SIZE):
            parameter_indices = [last_first[position] for position in group]
            bucket_parameters = [parameters[index] for index in parameter_indices]
            bucket = Bucket(bucket_parameters, parameter_indices, self.accelerator.device)
            self.buckets.append(bucket)
            for index, parameter in enumerate(bucket.parameters):
                parameter.register_post_accumulate_grad_hook(partial(self._on_gradient, bucket, index))
        longest_bucket = max(len(bucket.sums) for bucket in self.buckets)
        # Buffer for one bucket's gradients
        self.units = torch.empty(longest_bucket, device=self.accelerator.device)

    def _on_gradient(self, bucket: Bucket, index: int, _parameter: nn.Parameter) -> None:
        """Add a bucket's gradients once all have arrived, and exchange complete buckets in order."""
        bucket.arrived.add(index)
        if len(bucket.arrived) == len(bucket.parameters):
            self._add_bucket(bucket)
            if self.accelerator.sync_gradients and self.accelerator.num_processes > 1:
                while self.next_bucket < len(self.buckets) and self.buckets[self.next_bucket].is_added:
                    self._exchange_next()

    def _add_bucket(self, bucket: Bucket) -> None:
        """Add a bucket's gradients from one micro-batch, using few operations on long tensors."""
        units = self.units[: len(bucket.sums)]
        bucket.take_gradients(units)
        magnitudes = norms(units.split(bucket.sizes), math.inf)
        for parameter_index, norm in zip(bucket.parameter_indices, magnitudes, strict=True):
            self.norms[parameter_index] = norm
        assert not bucket.reduction, "a parameter received two gradients in one micro-batch"
        for chunk, sums in zip(units.split(self.chunk_size), bucket.sums.split(self.chunk_size), strict=True):
            self._to_units(chunk, out=chunk)
            sums.add_(chunk) if bucket.touched else sums.copy_(chunk)
        bucket.end_micro_batch()

    def _exchange_next(self) -> None:
        """Start the exchange of the next bucket. All processes exchange buckets in the same order."""
        self.buckets[self.next_bucket].exchange()
        self.next_bucket += 1

    def _register_shard_hooks(self, model: nn.Module) -> None:
        """Make FSDP2 sum the rounded gradients instead of averaging them."""
        indices_by_name = {name: index for index, name in enumerate(self.names)}
        modules: dict[str, Any] = dict(model.named_modules())
        for prefix, module in modules.items():
            if hasattr(module, "unshard"):
                module.set_force_sum_reduction_for_comms(True)
                module.set_gradient_divide_factor(1.0)
                module.unshard()  # later calls gather parameters into the same objects
                for name, parameter in module.named_parameters(prefix):
                    if name in indices_by_name and not hasattr(parameter, "to_local"):
                        parameter.register_hook(partial(self._round_gradient, indices_by_name.pop(name)))
                module.reshard()
        assert not indices_by_name, f"not sharded: {indices_by_name}"

    def _round_gradient(self, parameter_index: int, gradient: Tensor) -> Tensor:
        """Return parameter i's gradient, rounded to multiples of 1 / UNIT."""
        self.arrived.add(parameter_index)
        self.norms[parameter_index] = torch.linalg.vector_norm(gradient, math.inf)
        return self._to_units(gradient).div_(self.unit)

    def _to_units(self, gradient: Tensor, out: Tensor | None = None) -> Tensor:
        """Return the gradient as a whole number of units, which fp32 represents exactly."""
        return torch.mul(gradient, self.unit, out=out).round_()

    @torch.no_grad()
    def _end_micro_batch(self) -> None:
        for bucket in self.buckets:
            if bucket.arrived:  # some of the bucket's parameters received no gradient
                self._add_bucket(bucket)
            bucket.is_added = False
        # Update tensors in place, because a step may be a CUDA graph, which reads fixed addresses.
        torch.maximum(self.max_magnitudes, torch.stack(self.norms), out=self.max_magnitudes)
        self.norms = [self.zero] * len(self.names)

    @torch.no_grad()
    def _end_step(self) -> None:
        if self.accelerator.num_processes > 1:
            while self.next_bucket < len(self.buckets):  # exchange the buckets with missing gradients
                self._exchange_next()
        for bucket in self.buckets:
            bucket.finish(self.unit)
        self.next_bucket = 0
        self.arrival_digest = hash((self.arrival_digest, *sorted(self.arrived)))
        self.arrived.clear()
        is_exact = self.max_magnitudes * self.unit <= MAX_SUM * UNIT / self.micro_batches
        if self.accelerator.scaler is not None:
            # The scaler skips steps with non-finite gradients.
            is_exact |= ~self.max_magnitudes.isfinite()
        self.steps += 1
        torch.minimum(self.failed, torch.where(is_exact, math.inf, self.steps), out=self.failed)
        self.max_magnitudes.zero_()

    def _exact_norm(self, grads: list[Tensor]) -> Tensor:
        """Return the gradients' 2-norm.

        Each squared element, scaled to at most 1, is rounded to a multiple of a coarse unit plus a multiple
        of a fine unit. Sums of multiples of the same unit are exact.
        """
        largest = torch.stack(norms(grads, math.inf)).max()
        largest = largest.double().to(self.accelerator.device)
        self._reduce_in_place(largest, dist.ReduceOp.MAX)
        largest = largest.clamp(min=1e-300)
        replicas = sharding(self.accelerator).get("replicas", 1)
        unit = 2.0 ** (53 - (self.elements * replicas).bit_length())
        chunks = [chunk for gradient in grads for chunk in _flat_view(gradient).split(self.chunk_size)]
        no_offset, sums = torch.zeros(3, dtype=torch.float64, device=grads[0].device).split([1, 2])
        divisor = largest.to(sums.device).view(1)  # a 1-D tensor, so that the quotient is float64
        for group in _group_indices([len(chunk) for chunk in chunks], min(self.chunk_size, BUCKET_SIZE)):
            values = torch.cat([chunks[chunk_index] for chunk_index in group])
            high, low = high_and_low = sums.new_empty(2, len(values))
            torch.div(values, divisor, out=low)
            # Square of the scaled element, in coarse units
            torch.addcmul(no_offset, low, low, value=unit, out=low)
            torch.trunc(low, out=high)
            low.frac_().mul_(unit).round_()
            sums += high_and_low.sum(1)
        sums = sums.to(largest.device)
        self._reduce_in_place(sums, dist.ReduceOp.SUM)
        return largest * ((sums[0] / unit + sums[1] / unit**2) / replicas).sqrt()

    def _reduce_in_place(self, values: Tensor, operation: Any) -> None:
        """Reduce tensors between processes in place.

        Under DDP, each process already stores the whole gradients, so only minima must be exchanged.
        """
        if self.accelerator.num_processes > 1 and (not self.buckets or operation == dist.ReduceOp.MIN):
            dist.all_reduce(values, operation)


def _flat_view(tensor: Tensor) -> Tensor:
    """Return a 1-D view of a dense tensor's elements in memory order."""
    return tensor.as_strided((tensor.numel(),), (1,))


def _group_indices(sizes: list[int], minimum_total: int) -> list[list[int]]:
    """Split the indices of `sizes` into consecutive groups, each with a total size of at least `enough`.

    The last group may be smaller.
    """
    groups: list[list[int]] = []
    total = minimum_total
    for index, size in enumerate(sizes):
        if total >= minimum_total:
            groups.append([])
            total = 0
        groups[-1].append(index)
        total += size
    return groups
