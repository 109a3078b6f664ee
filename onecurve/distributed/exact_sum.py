"""Adds gradients exactly, which makes --deterministic training independent of the number of processes.

A sum of fp32 numbers depends on the order of additions, and therefore on how work is distributed among
processes. To avoid this dependence, each micro-batch's gradient is rounded to multiples of a unit, 1 /
UNITS_PER_ONE, and accumulated in float64. The 53 bits of a float64 represent every sum of units below MAX_SUM
exactly. Additions are therefore exact within and between processes, for DDP's buckets and FSDP2's shards.
Only the final sum is rounded to fp32. This module uses float64 instead of int64, which has the same size,
because FSDP2 can be configured to reduce in float64. A step with a single micro-batch needs no exact sum,
because each parameter has only one gradient.

benchmarks/README.md describes the gradients of three models from which UNITS_PER_ONE was chosen. Demmel and
Nguyen instead derive the unit from the largest summand (Parallel Reproducible Summation, IEEE TC 2015).
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

UNITS_PER_ONE = 2.0**40  # number of units in 1.0; Adam's epsilon, 1e-8, equals 11,000 units
# Maximum sum of gradient magnitudes over a step's micro-batches. The limit is approximate, because
# comparisons use fp32.
MAX_SUM = 2.0**52 / UNITS_PER_ONE
LOSS_UNITS_PER_ONE = 2.0**28  # number of units in 1.0 when losses are added
BUCKET_SIZE = 2**22  # number of gradient elements per exchange; 32 MiB
CPU_CHUNK_SIZE = 2**16  # number of gradient elements that a CPU processes at a time; 512 KiB


def exact_sum(values: Tensor) -> Tensor:
    """Return the float64 sum of values rounded to 1 / LOSS_UNITS_PER_ONE. Sums below 2**25 are exact."""
    return (values.double() * LOSS_UNITS_PER_ONE).round_().sum() / LOSS_UNITS_PER_ONE


def use_foreach(optimizer: torch.optim.Optimizer) -> None:
    """Make the optimizer use its foreach implementation instead of its fused kernel.

    On a CPU, fused kernels round the last elements of a tensor differently, and the last elements of a shard
    are not the last elements of the whole tensor.
    """
    for parameter_group in optimizer.param_groups:
        if parameter_group.get("fused"):
            parameter_group |= {"fused": False, "foreach": True}
    unscale_before_step(optimizer)  # only the fused kernel can unscale fp16 gradients in the step


class Bucket:
    """Group of parameters whose gradients are added and exchanged together in one flat tensor.

    `sums_and_counts` contains the gradient sums in units, followed by one count per parameter. A positive
    count means that in this step, at least one process had a gradient for the parameter. If the count is 0,
    the parameter's .grad becomes None, as usual in torch.
    """

    def __init__(self, parameters: list[nn.Parameter], parameter_indices: list[int], device: torch.device):
        # `parameter_indices` contains the parameters' indices in the model.
        self.parameters, self.parameter_indices = parameters, parameter_indices
        self.parameter_sizes = [parameter.numel() for parameter in parameters]
        section_sizes = [sum(self.parameter_sizes), len(parameters)]  # of the sums and of the counts
        self.sums_and_counts = torch.zeros(sum(section_sizes), dtype=torch.float64, device=device)
        self.gradient_sums, self.gradient_counts = self.sums_and_counts.split(section_sizes)
        self.exchange_work: Any = None  # handle of the exchange in progress
        # Indices of parameters whose gradient from this micro-batch has not been added yet
        self.arrived_indices: set[int] = set()
        # Indices of parameters with a gradient in this process in this step
        self.indices_with_gradient: set[int] = set()
        self.has_added_micro_batch = False  # True once this micro-batch's gradients have been added

    def move_gradients(self, gradient_buffer: Tensor) -> None:
        """Move a micro-batch's gradients to the buffer, in the memory order of the parameters' elements."""
        flat_gradients = [
            gradient_buffer.new_zeros(size) if parameter.grad is None else _flat_view(parameter.grad)
            for parameter, size in zip(self.parameters, self.parameter_sizes, strict=True)
        ]
        torch.cat(flat_gradients, out=gradient_buffer)
        for parameter in self.parameters:
            parameter.grad = None

    def end_micro_batch(self) -> None:
        """Record that this micro-batch's gradients have been added."""
        self.indices_with_gradient |= self.arrived_indices
        self.arrived_indices.clear()
        self.has_added_micro_batch = True

    def reset(self) -> None:
        """Discard the current step's state, even if the step is unfinished, and begin the next step."""
        self.exchange_work = None
        self.has_added_micro_batch = False
        self.indices_with_gradient = set()
        self.arrived_indices.clear()

    def exchange(self) -> None:
        """Start an asynchronous all-reduce of the gradient sums and counts."""
        if not self.indices_with_gradient:
            self.gradient_sums.zero_()
        self.gradient_counts.fill_(1)
        for index_in_bucket in self._indices_without_gradient():
            self.gradient_counts[index_in_bucket] = 0
        self.exchange_work = dist.all_reduce(self.sums_and_counts, async_op=True)

    def finish_step(self, units_per_one: float | Tensor) -> None:
        """Wait for the exchange, convert the sums to the parameters' .grad, and begin the next step."""
        missing_indices = self._indices_without_gradient()
        if self.exchange_work:
            self.exchange_work.wait()
            if missing_indices:  # the host waits for the device only here
                gradient_counts = self.gradient_counts.tolist()
                missing_indices = {index for index in missing_indices if not gradient_counts[index]}
        # Dividing by a power of two is exact
        flat_gradients = self.gradient_sums.float().div_(units_per_one).split(self.parameter_sizes)
        parameters_and_gradients = zip(self.parameters, flat_gradients, strict=True)
        for index_in_bucket, (parameter, flat_gradient) in enumerate(parameters_and_gradients):
            if index_in_bucket in missing_indices:
                parameter.grad = None
            else:
                parameter.grad = flat_gradient.as_strided(parameter.shape, parameter.stride())
        self.exchange_work = None
        self.indices_with_gradient = set()

    def _indices_without_gradient(self) -> set[int]:
        """Return the bucket indices of parameters without a gradient in this process in this step."""
        return set(range(len(self.parameters))) - self.indices_with_gradient


class ExactSum:
    """Implementation of JobAccelerator.backward and clip_grad_norm_ that replaces DDP's gradient exchange.

    Create this object after prepare(), and pass the plain model to the constructor. A loop that uses
    Accelerate's own Accelerator must call backward() and clip_grad_norm_() of this object instead.
    backward() divides each loss by the number of micro-batches in a step of the whole job. Dividing first by
    the number of accumulations and then by the number of processes would round differently.
    """

    def __init__(self, accelerator: Accelerator, model: nn.Module):
        self.accelerator = accelerator
        device = accelerator.device
        trained_parameters = {
            name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad
        }
        self.parameter_names = list(trained_parameters)
        self.element_count = sum(parameter.numel() for parameter in trained_parameters.values())
        self.micro_batch_count = accelerator.gradient_accumulation_steps * accelerator.num_processes
        self.zero, self.one = torch.zeros((), device=device), torch.ones((), device=device)
        # Buckets are large on a GPU, so that few kernels are launched
        self.chunk_size = CPU_CHUNK_SIZE if device.type == "cpu" else 2 * BUCKET_SIZE
        # With fp16, UNITS_PER_ONE divided by the loss scale (a power of two)
        self.units_per_one: float | Tensor = UNITS_PER_ONE
        # Each parameter's maximum gradient magnitude in this process in this step. A NaN gradient results in
        # NaN.
        self.max_magnitudes = torch.zeros(len(trained_parameters), device=device)
        # Each parameter's maximum gradient magnitude in this micro-batch
        self.micro_batch_magnitudes = [self.zero] * len(trained_parameters)
        self.steps_since_check = torch.zeros((), device=device)  # number of steps since the last check()
        # First step in which each parameter's gradient was too large
        self.first_failed_steps = torch.full_like(self.max_magnitudes, math.inf)
        self.buckets: list[Bucket] = []
        self.next_bucket_index = 0  # index of the next bucket to exchange in this step
        # Indices of parameters with a gradient in this step, under FSDP2
        self.arrived_indices: set[int] = set()
        self.arrival_digest = 0  # hash of `arrived_indices` over all steps
        if strategy(accelerator) == "fsdp":
            self._register_shard_hooks(model)
        else:
            self._register_bucket_hooks(list(trained_parameters.values()))

    def backward(self, loss: Tensor, **options: Any) -> None:
        """Add a micro-batch's gradients. After a step's last micro-batch, exchange the sums and set .grad."""
        loss = loss / self.micro_batch_count
        loss_scaler = self.accelerator.scaler
        if loss_scaler is not None:
            loss, loss_scale = loss_scaler.scale([loss, self.one])  # scale(1) is the loss scale
            self.units_per_one = UNITS_PER_ONE / loss_scale
        loss.backward(**options)
        self._end_micro_batch()
        if self.accelerator.sync_gradients:
            self._end_step()

    @torch.no_grad()
    def clip_grad_norm_(self, parameters: Iterable[Tensor], max_norm: float, norm_type: float = 2) -> Tensor:
        """Scale the gradients in place to norm max_norm if their norm is larger.

        This method is collective under FSDP2. It returns the norm before scaling.
        """
        assert norm_type == 2
        self.accelerator.unscale_gradients()
        # A process's shard of a small parameter, or even of a small model, may be empty.
        local_gradients = [to_local(parameter.grad) for parameter in parameters if parameter.grad is not None]
        local_gradients = [gradient for gradient in local_gradients if gradient.numel()]
        local_gradients = local_gradients or [self.one.new_zeros(1)]
        gradient_norm = self._exact_norm(local_gradients)
        # The same formula as torch.nn.utils.clip_grad_norm_
        gradient_scale = (max_norm / (gradient_norm + 1e-6)).clamp(max=1).float()
        multiply_(local_gradients, gradient_scale.to(local_gradients[0].device))
        return gradient_norm

    @contextmanager
    def restoring_counters(self) -> Iterator[None]:
        """Run a block that captures a step, and then reset the host's counters, even if the capture fails."""
        saved_arrival_digest = self.arrival_digest
        try:
            yield
        finally:
            self.arrival_digest, self.next_bucket_index = saved_arrival_digest, 0
            self.micro_batch_magnitudes = [self.zero] * len(self.parameter_names)
            self.arrived_indices.clear()
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
        failed_steps = self.first_failed_steps.clone()
        self._reduce_in_place(failed_steps, dist.ReduceOp.MIN)
        first_failure = failed_steps.min(0)
        # One tensor, so that the host waits for the device only once
        failure_summary = torch.stack([first_failure.values, first_failure.indices, self.steps_since_check])
        first_failed_step, parameter_index, checked_step_count = failure_summary.tolist()
        if first_failed_step < math.inf:
            parameter_name = self.parameter_names[int(parameter_index)]
            failed_step = step - int(checked_step_count - first_failed_step)
            raise FloatingPointError(
                f"the gradient of {parameter_name} at step {failed_step} is not finite"
                f" or exceeds {MAX_SUM / self.micro_batch_count:g} in a micro-batch,"
                " so --deterministic can't add it exactly"
            )
        self.steps_since_check.zero_()
        self.first_failed_steps.fill_(math.inf)
        if not self.buckets:
            self._check_arrivals(step)

    def _check_arrivals(self, step: int) -> None:
        """Raise ValueError if the ranks computed gradients of different parameters under FSDP2.

        FSDP2 exchanges whichever gradients a process has computed, and would add gradients of different
        parameters. This method is collective.
        """
        # The minimum of negated digests is the negated maximum, so one reduction compares all ranks' digests
        digests = torch.tensor([self.arrival_digest, -self.arrival_digest], device=self.accelerator.device)
        self._reduce_in_place(digests, dist.ReduceOp.MIN)
        smallest_digest, negated_largest_digest = digests.tolist()
        if smallest_digest != -negated_largest_digest:
            raise ValueError(
                f"at step {step} or earlier, a parameter received a gradient only on some processes."
                " FSDP2 can't add such gradients. Train with DDP."
            )

    def _register_bucket_hooks(self, parameters: list[nn.Parameter]) -> None:
        """Assign the parameters to buckets, last layers first, because the backward pass uses this order."""
        indices_last_first = list(reversed(range(len(parameters))))
        parameter_sizes_last_first = [parameters[index].numel() for index in indices_last_first]
        for bucket_positions in _group_indices(parameter_sizes_last_first, BUCKET_SIZE):
            parameter_indices = [indices_last_first[position] for position in bucket_positions]
            bucket_parameters = [parameters[parameter_index] for parameter_index in parameter_indices]
            bucket = Bucket(bucket_parameters, parameter_indices, self.accelerator.device)
            self.buckets.append(bucket)
            for index_in_bucket, parameter in enumerate(bucket.parameters):
                gradient_hook = partial(self._on_gradient_arrival, bucket, index_in_bucket)
                parameter.register_post_accumulate_grad_hook(gradient_hook)
        max_bucket_size = max(len(bucket.gradient_sums) for bucket in self.buckets)
        # Buffer for one bucket's gradients
        self.gradient_buffer = torch.empty(max_bucket_size, device=self.accelerator.device)

    def _on_gradient_arrival(self, bucket: Bucket, index_in_bucket: int, _parameter: nn.Parameter) -> None:
        """Handle a parameter's new .grad, as a hook that autograd calls in the backward pass.

        Once a bucket's gradients have all arrived, this method adds them. In a step's last micro-batch, it
        also starts the exchange of complete buckets, in order.
        """
        bucket.arrived_indices.add(index_in_bucket)
        if len(bucket.arrived_indices) == len(bucket.parameters):
            self._add_bucket(bucket)
            if self.accelerator.sync_gradients and self.accelerator.num_processes > 1:
                while (
                    self.next_bucket_index < len(self.buckets)
                    and self.buckets[self.next_bucket_index].has_added_micro_batch
                ):
                    self._exchange_next()

    def _add_bucket(self, bucket: Bucket) -> None:
        """Add a bucket's gradients from one micro-batch to its sums, and set .grad to None.

        This method uses few operations on long tensors, instead of one operation per parameter.
        """
        bucket_gradients = self.gradient_buffer[: len(bucket.gradient_sums)]
        bucket.move_gradients(bucket_gradients)
        magnitudes = norms(bucket_gradients.split(bucket.parameter_sizes), math.inf)
        for parameter_index, magnitude in zip(bucket.parameter_indices, magnitudes, strict=True):
            self.micro_batch_magnitudes[parameter_index] = magnitude
        assert not bucket.exchange_work, "a parameter received two gradients in one micro-batch"
        gradient_chunks = bucket_gradients.split(self.chunk_size)
        sum_chunks = bucket.gradient_sums.split(self.chunk_size)
        for gradient_chunk, sum_chunk in zip(gradient_chunks, sum_chunks, strict=True):
            self._to_units(gradient_chunk, out=gradient_chunk)
            if bucket.indices_with_gradient:
                sum_chunk.add_(gradient_chunk)
            else:  # overwrite the previous step's sums
                sum_chunk.copy_(gradient_chunk)
        bucket.end_micro_batch()

    def _exchange_next(self) -> None:
        """Start the exchange of the next bucket. All processes exchange buckets in the same order."""
        self.buckets[self.next_bucket_index].exchange()
        self.next_bucket_index += 1

    def _register_shard_hooks(self, model: nn.Module) -> None:
        """Make FSDP2 sum gradients instead of averaging them, and round each gradient before the sum."""
        index_by_name = {name: index for index, name in enumerate(self.parameter_names)}
        module_by_name: dict[str, Any] = dict(model.named_modules())
        for module_name, module in module_by_name.items():
            if hasattr(module, "unshard"):  # an FSDP2 module
                module.set_force_sum_reduction_for_comms(True)
                module.set_gradient_divide_factor(1.0)
                module.unshard()  # later calls gather parameters into the same objects
                # Nested FSDP2 modules' parameters are still DTensors, and get hooks in their own iterations
                for name, parameter in module.named_parameters(module_name):
                    if name in index_by_name and not hasattr(parameter, "to_local"):
                        parameter.register_hook(partial(self._round_gradient, index_by_name.pop(name)))
                module.reshard()
        assert not index_by_name, f"not sharded: {index_by_name}"

    def _round_gradient(self, parameter_index: int, gradient: Tensor) -> Tensor:
        """Return a parameter's gradient, rounded to multiples of 1 / UNITS_PER_ONE.

        This hook also records the gradient's arrival and maximum magnitude.
        """
        self.arrived_indices.add(parameter_index)
        self.micro_batch_magnitudes[parameter_index] = torch.linalg.vector_norm(gradient, math.inf)
        return self._to_units(gradient).div_(self.units_per_one)

    def _to_units(self, gradient: Tensor, out: Tensor | None = None) -> Tensor:
        """Return the gradient as a whole number of units, which fp32 represents exactly."""
        return torch.mul(gradient, self.units_per_one, out=out).round_()

    @torch.no_grad()
    def _end_micro_batch(self) -> None:
        """Add the gradients of incomplete buckets, and update this step's maximum gradient magnitudes."""
        for bucket in self.buckets:
            if bucket.arrived_indices:  # some of the bucket's parameters received no gradient
                self._add_bucket(bucket)
            bucket.has_added_micro_batch = False
        # Update tensors in place, because a step may be a CUDA graph, which reads fixed addresses.
        torch.maximum(self.max_magnitudes, torch.stack(self.micro_batch_magnitudes), out=self.max_magnitudes)
        self.micro_batch_magnitudes = [self.zero] * len(self.parameter_names)

    @torch.no_grad()
    def _end_step(self) -> None:
        """Exchange the remaining buckets, set .grad, and record gradients that were too large to add exactly.

        check() reports the recorded gradients later.
        """
        if self.accelerator.num_processes > 1:
            while self.next_bucket_index < len(self.buckets):  # exchange the buckets with missing gradients
                self._exchange_next()
        for bucket in self.buckets:
            bucket.finish_step(self.units_per_one)
        self.next_bucket_index = 0
        self.arrival_digest = hash((self.arrival_digest, *sorted(self.arrived_indices)))
        self.arrived_indices.clear()
        max_gradient_units = MAX_SUM * UNITS_PER_ONE / self.micro_batch_count
        is_sum_exact = self.max_magnitudes * self.units_per_one <= max_gradient_units
        if self.accelerator.scaler is not None:
            # The scaler skips steps with non-finite gradients.
            is_sum_exact |= ~self.max_magnitudes.isfinite()
        self.steps_since_check += 1
        failed_steps = torch.where(is_sum_exact, math.inf, self.steps_since_check)
        torch.minimum(self.first_failed_steps, failed_steps, out=self.first_failed_steps)
        self.max_magnitudes.zero_()

    def _exact_norm(self, gradients: list[Tensor]) -> Tensor:
        """Return the 2-norm of this step's gradients on all ranks, independently of the order of additions.

        Each squared element, scaled to at most 1, is rounded to a multiple of a coarse unit plus a multiple
        of a fine unit. Sums of multiples of the same unit are exact.
        """
        max_magnitude = torch.stack(norms(gradients, math.inf)).max()
        max_magnitude = max_magnitude.double().to(self.accelerator.device)
        self._reduce_in_place(max_magnitude, dist.ReduceOp.MAX)
        max_magnitude = max_magnitude.clamp(min=1e-300)  # prevents a division by zero
        replica_count = sharding(self.accelerator).get("replicas", 1)
        # A float64 has 53 bits, so a sum of all elements, each at most this many units, is exact
        norm_units_per_one = 2.0 ** (53 - (self.element_count * replica_count).bit_length())
        chunks = [chunk for gradient in gradients for chunk in _flat_view(gradient).split(self.chunk_size)]
        zero_and_sums = torch.zeros(3, dtype=torch.float64, device=gradients[0].device)
        zero, high_and_low_sums = zero_and_sums.split([1, 2])
        # The divisor is a 1-D tensor, so that the quotient is float64
        divisor = max_magnitude.to(high_and_low_sums.device).view(1)
        chunk_sizes = [len(chunk) for chunk in chunks]
        for chunk_indices in _group_indices(chunk_sizes, min(self.chunk_size, BUCKET_SIZE)):
            elements = torch.cat([chunks[chunk_index] for chunk_index in chunk_indices])
            high_and_low = high_and_low_sums.new_empty(2, len(elements))
            high, low = high_and_low
            torch.div(elements, divisor, out=low)
            # Square of the scaled element, in coarse units
            torch.addcmul(zero, low, low, value=norm_units_per_one, out=low)
            torch.trunc(low, out=high)
            low.frac_().mul_(norm_units_per_one).round_()
            high_and_low_sums += high_and_low.sum(1)
        high_and_low_sums = high_and_low_sums.to(max_magnitude.device)
        self._reduce_in_place(high_and_low_sums, dist.ReduceOp.SUM)
        high_sum, low_sum = high_and_low_sums.unbind()
        scaled_square_sum = high_sum / norm_units_per_one + low_sum / norm_units_per_one**2
        return max_magnitude * (scaled_square_sum / replica_count).sqrt()

    def _reduce_in_place(self, values: Tensor, reduce_operation: Any) -> None:
        """Reduce the values between processes in place.

        Under DDP, all processes store the same whole gradients, so a norm's SUM and MAX need no exchange.
        Only check()'s MIN does.
        """
        if self.accelerator.num_processes > 1 and (not self.buckets or reduce_operation == dist.ReduceOp.MIN):
            dist.all_reduce(values, reduce_operation)


def _flat_view(dense_tensor: Tensor) -> Tensor:
    """Return a 1-D view of a dense tensor's elements in memory order."""
    return dense_tensor.as_strided((dense_tensor.numel(),), (1,))


def _group_indices(item_sizes: list[int], min_group_size: int) -> list[list[int]]:
    """Split the indices of `item_sizes` into consecutive groups of at least the minimum total size.

    The last group may be smaller.
    """
    index_groups: list[list[int]] = []
    group_size = min_group_size  # makes the first item begin a group
    for item_index, item_size in enumerate(item_sizes):
        if group_size >= min_group_size:
            index_groups.append([])
            group_size = 0
        index_groups[-1].append(item_index)
        group_size += item_size
    return index_groups
