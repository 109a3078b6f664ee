"""Computes the order of samples and random numbers, with identical results on every machine.

The sample order depends only on (seed, epoch, step, batch size). With N samples and batch size B, an epoch
consists of floor(N / B) steps. Step s uses the samples [s*B : (s+1)*B] in the epoch's order, and samples
after the last full batch are not used. Micro-batch k of a step consists of the step's samples [k*b :
(k+1)*b]. With A gradient accumulation steps, rank r computes the micro-batches r*A ... r*A + A-1.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

if TYPE_CHECKING:  # a runtime import would also import all flags
    from onecurve.flags.recipe import Batch, Recipe

PlanItem = tuple[int, np.ndarray]  # epoch and sample ids (int64 [b]) of a micro-batch
Plan = Iterable[PlanItem]  # micro-batches in order


class Shuffled:
    """Samples with fast random access. Each epoch's order is a random permutation of all samples."""

    def __init__(self, sample_count: int):
        self.sample_count = sample_count

    def __len__(self) -> int:
        return self.sample_count

    def check_batch(self, batch: "Batch") -> None:
        """Accept any batch."""

    def order(self, seed: int, epoch: int, batch: "Batch") -> np.ndarray:
        """Return the sample ids of an epoch in training order, int64 [N]."""
        return order(seed, epoch, self.sample_count)


class Streamed:
    """Samples stored in shards, which are read sequentially in parallel streams.

    Args:
        samples_per_shard: Number of samples in each shard.
        streams: Number of parallel streams.
        window: Number of consecutive samples of a stream that are shuffled together.
    """

    def __init__(self, samples_per_shard: Sequence[int], streams: int, window: int):
        self.samples_per_shard = np.asarray(samples_per_shard)
        self.streams, self.window = streams, window

    def __len__(self) -> int:
        return int(self.samples_per_shard.sum())

    def check_batch(self, batch: "Batch") -> None:
        """Raise ValueError unless the streams divide the batch, and the processes divide the streams."""
        batch_size, processes, streams = batch.total, batch.processes, self.streams
        if batch_size % streams or streams % processes:
            multiples = range(processes, batch_size + 1, processes)
            valid_counts = [stream_count for stream_count in multiples if batch_size % stream_count == 0]
            nearest_counts = sorted(valid_counts, key=lambda stream_count: abs(stream_count - streams))
            stream_advice = f"Choose {' or '.join(map(str, sorted(nearest_counts[:2])))}."
            raise ValueError(
                f"--streams {streams} must divide --batch_size {batch_size}"
                f" and be a multiple of the number of processes, {processes}. {stream_advice}"
            )

    def order(self, seed: int, epoch: int, batch: "Batch") -> np.ndarray:
        """Return the sample ids of an epoch in training order, int64 [floor(N / B) * B] for batch size B."""
        return stream_order(seed, epoch, self.samples_per_shard, self.streams, self.window, batch.total)


Samples = Shuffled | Streamed  # determines the number and the order of training samples


def order(seed: int, epoch: int, count: int) -> np.ndarray:
    """Return the shuffled sample ids of one epoch: int64 [count].

    The random numbers come from RandomState, whose stream NumPy guarantees never to change (NEP 19).
    """
    return np.random.RandomState([seed, epoch]).permutation(count)


def stream_order(
    seed: int, epoch: int, samples_per_shard: np.ndarray, streams: int, window: int, batch_size: int
) -> np.ndarray:
    """Return the sample ids of one epoch of sharded data: int64 [floor(N / B) * B].

    The shards (shard k contains samples_per_shard[k] samples) are concatenated in random order and cut into
    streams of the same length. The samples in a stream are shuffled within windows, so that a reader needs
    only the shards of one window at a time. A step of B samples uses B / streams samples from each stream,
    one stream after the other. If the number of processes divides the number of streams, no two processes
    read the same stream.
    """
    random_generator = np.random.RandomState([seed, epoch])
    shard_ends = np.cumsum(samples_per_shard)
    shard_starts = shard_ends - samples_per_shard
    shuffled_shards = [
        np.arange(shard_starts[shard_index], shard_ends[shard_index])
        for shard_index in random_generator.permutation(len(samples_per_shard))
    ]
    concatenated_ids = np.concatenate(shuffled_shards)
    step_count = len(concatenated_ids) // batch_size
    step_length = batch_size // streams  # samples from one stream in each step
    ids_by_stream = concatenated_ids[: step_count * batch_size].reshape(streams, step_count * step_length)
    for stream_index, stream_ids in enumerate(ids_by_stream):
        # The first window has a different length in each stream, so that the streams need new shards at
        # different steps.
        first_window_length = window * (stream_index + 1) // streams
        window_starts = range(first_window_length, len(stream_ids), window)
        for window_ids in np.split(stream_ids, window_starts):
            random_generator.shuffle(window_ids)  # in place, because window_ids is a view of ids_by_stream
    # From one stream after the other to one step after the other
    return ids_by_stream.reshape(streams, step_count, step_length).swapaxes(0, 1).reshape(-1)


def steps_per_epoch(samples: Samples, batch: "Batch") -> int:
    """Return the number of steps per epoch, floor(N / batch size).

    Raises:
        ValueError: If a batch is larger than the data, or if the number of streams does not match the batch.
    """
    if len(samples) < batch.total:
        max_batch_size = len(samples) // batch.processes * batch.processes
        raise ValueError(
            f"--batch_size {batch.total} is more than the {len(samples)} training {batch.unit}."
            f" Choose at most {max_batch_size}."
        )
    samples.check_batch(batch)
    return len(samples) // batch.total


@dataclass(frozen=True)
class Steps:
    """Range of optimizer steps that a run trains, first ... last - 1."""

    per_epoch: int  # number of steps per epoch
    total: int  # number of steps in all epochs, used as the schedule length
    last: int  # exclusive end of the range, the minimum of total and --max_steps
    first: int = 0  # first step of the range, greater than 0 in a resumed run

    @classmethod
    def of(cls, samples: Samples, batch: "Batch", recipe: "Recipe") -> "Steps":
        """Compute the steps of a run, or raise ValueError for the same reasons as steps_per_epoch()."""
        epoch_steps = steps_per_epoch(samples, batch)
        total_steps = recipe.epochs * epoch_steps
        return cls(epoch_steps, total_steps, min(total_steps, recipe.max_steps or total_steps))

    def plan(self, samples: Samples, batch: "Batch", rank: int, seed: int) -> Plan:
        """Return this rank's training micro-batches for all steps in the range."""
        return training_plan(samples, batch, rank, seed, self.first, self.last)


def training_plan(
    samples: Samples, batch: "Batch", rank: int, seed: int, first_step: int, last_step: int
) -> Plan:
    """Yield this rank's training micro-batches for the steps first_step ... last_step - 1, in order."""
    epoch_steps = steps_per_epoch(samples, batch)
    epoch = -1  # before the first epoch, so that the first step computes its epoch's order
    epoch_ids = np.empty(0, np.int64)
    for step in range(first_step, last_step):
        if step // epoch_steps != epoch:
            epoch = step // epoch_steps
            epoch_ids = samples.order(seed, epoch, batch)
        step_start = (step % epoch_steps) * batch.total
        for micro_batch_index in batch.micro_batches(rank):
            micro_batch_start = step_start + micro_batch_index * batch.per_device
            yield epoch, epoch_ids[micro_batch_start : micro_batch_start + batch.per_device]


def evaluation_plan(
    sample_count: int, per_device: int, processes: int, rank: int
) -> Iterator[tuple[np.ndarray, int]]:
    """Yield this rank's evaluation micro-batches. All ranks together evaluate each sample exactly once.

    Each rank evaluates consecutive micro-batches, so it reads only some of the shards. The micro-batches that
    contain samples are the same regardless of the number of processes. All ranks evaluate the same number of
    micro-batches with the same shape, because a forward pass is a collective operation under FSDP and ZeRO-3.
    Padding repeats the rank's last sample (for a rank without samples, the data's last sample) and must be
    excluded from metrics.

    Yields:
        Sample ids, int64 [per_device], and the number of ids that precede the padding.
    """
    # Rounded up to complete micro-batches
    samples_per_rank = -(-sample_count // (per_device * processes)) * per_device
    first_id = rank * samples_per_rank
    end_id = min(first_id + samples_per_rank, sample_count)  # exclusive
    for batch_start in range(first_id, first_id + samples_per_rank, per_device):
        ids = np.arange(batch_start, batch_start + per_device)
        valid_count = int(np.count_nonzero(ids < end_id))
        yield np.minimum(ids, end_id - 1), valid_count


def choose_by_hash(sample_count: int, chosen_count: int) -> np.ndarray:
    """Choose ids from 0 ... sample_count - 1 by a fixed hash, and return them sorted: int64 [chosen_count].

    The choice does not depend on the seed. A smaller choice is always a subset of a larger one.
    """
    return np.sort(np.argsort(sample_hashes(sample_count), kind="stable")[:chosen_count])


def sample_hashes(sample_count: int) -> np.ndarray:
    """Return a fixed, unique hash for each sample id 0 ... sample_count - 1: uint64 [sample_count]."""
    return _scramble(np.arange(1, sample_count + 1, dtype=np.uint64) * np.uint64(_GOLDEN_INCREMENT))


_GOLDEN_INCREMENT = 0x9E3779B97F4A7C15  # SplitMix64's increment: 2**64 / golden ratio
_UINT64_MASK = 2**64 - 1  # truncates Python integers to 64 bits


def _scramble(x: Any) -> Any:
    """Scramble a Python integer or uint64 array with SplitMix64's finalizer (Steele, Lea, Flood 2014)."""
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & _UINT64_MASK
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & _UINT64_MASK
    return x ^ (x >> 31)


def _hash_integers(*integers: int) -> int:
    """Return a 64-bit hash of several integers. Plain Python is faster than NumPy for a few integers."""
    combined_hash = 0
    for integer in integers:
        combined_hash = _scramble((combined_hash + (integer + 1) * _GOLDEN_INCREMENT) & _UINT64_MASK)
    return combined_hash


def uniforms(seed: int, epoch: int, samples: np.ndarray, count: int) -> np.ndarray:
    """Return random numbers that depend only on (seed, epoch, sample): float64 [b, count] in [0, 1).

    COLUMNS in onecurve/numerics/augment.py assigns each column to an operation.
    """
    epoch_key = np.uint64(_hash_integers(seed, epoch))
    sample_keys = _scramble(epoch_key + np.asarray(samples).astype(np.uint64) * np.uint64(_GOLDEN_INCREMENT))
    column_offsets = np.arange(1, count + 1, dtype=np.uint64) * np.uint64(_GOLDEN_INCREMENT)
    upper_53_bits = _scramble(sample_keys[:, None] + column_offsets) >> np.uint64(11)
    return upper_53_bits * 2.0**-53


def reseed(seed: int, step: int, index: int) -> None:
    """Seed torch's CPU and GPU generators before micro-batch `index`.

    The generators determine dropout, drop path and mixup. Seeding in each micro-batch makes it unnecessary to
    store generator states in checkpoints. The function seeds the generators directly, because
    torch.manual_seed() would take 0.4 ms without a GPU to format a stack trace (torch 2.15).
    """
    # 63 bits, because generators accept only signed integers
    micro_batch_seed = _hash_integers(seed, step, index) >> 1
    torch.default_generator.manual_seed(micro_batch_seed)
    if torch.cuda.is_initialized():
        torch.cuda.manual_seed_all(micro_batch_seed)
