"""Computes the order of samples and random numbers, with equal results on every machine.

All functions are pure. The order depends only on (seed, epoch, step, batch size). An epoch of N samples has
floor(N / B) steps with batch size B. Step s uses the samples [s*B : (s+1)*B] of the epoch's order; the
remaining samples are not used. Micro-batch k of a step contains the step's samples [k*b : (k+1)*b]. With A
gradient accumulation steps, rank r computes the micro-batches r*A ... r*A + A-1.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

if TYPE_CHECKING:  # not at runtime, which avoids importing all flags
    from onecurve.flags.recipe import Batch, Recipe

Plan = Iterable[tuple[int, np.ndarray]]  # (epoch, sample ids int64 [b]) of each micro-batch, in order


class Shuffled:
    """Samples with fast random access. The order of an epoch is a permutation of all samples."""

    def __init__(self, count: int):
        self.count = count

    def __len__(self) -> int:
        return self.count

    def check(self, batch: "Batch") -> None:
        """Accept any batch."""

    def order(self, seed: int, epoch: int, batch: "Batch") -> np.ndarray:
        return order(seed, epoch, self.count)


class Streamed:
    """Samples stored in shards, which are read sequentially in parallel streams.

    Args:
        counts: Number of samples in each shard.
        streams: Number of parallel streams.
        window: Number of consecutive samples of a stream that are shuffled together.
    """

    def __init__(self, counts: Sequence[int], streams: int, window: int):
        self.counts, self.streams, self.window = np.asarray(counts), streams, window

    def __len__(self) -> int:
        return int(self.counts.sum())

    def check(self, batch: "Batch") -> None:
        total, processes, streams = batch.total, batch.processes, self.streams
        if total % streams or streams % processes:
            possible = [s for s in range(processes, total + 1, processes) if total % s == 0]
            nearest = sorted(sorted(possible, key=lambda s: abs(s - streams))[:2])
            raise ValueError(
                f"--streams {streams} must divide --batch_size {total} and be a multiple of the number of"
                f" processes, {processes}. Choose {' or '.join(map(str, nearest))}."
            )

    def order(self, seed: int, epoch: int, batch: "Batch") -> np.ndarray:
        return stream_order(seed, epoch, self.counts, self.streams, self.window, batch.total)


Samples = Shuffled | Streamed  # number and order of a data set's training samples


def order(seed: int, epoch: int, count: int) -> np.ndarray:
    """Return the shuffled samples of one epoch: int64 [count].

    The function uses RandomState, because NumPy guarantees that its random stream never changes (NEP 19).
    """
    return np.random.RandomState([seed, epoch]).permutation(count)


def stream_order(
    seed: int, epoch: int, counts: np.ndarray, streams: int, window: int, batch_size: int
) -> np.ndarray:
    """Return the samples of one epoch of sharded data: int64 [floor(N / B) * B].

    The shards, with counts[k] samples each, are concatenated in random order and cut into equal streams.
    Samples of a stream are shuffled within windows, so that a reader needs only the shards of one window at a
    time. A step of B samples uses B / streams samples from each stream, one stream after the other. If the
    number of processes divides the number of streams, no two processes read the same stream.
    """
    generator = np.random.RandomState([seed, epoch])
    ends = np.cumsum(counts)
    shards = [np.arange(ends[k] - counts[k], ends[k]) for k in generator.permutation(len(counts))]
    sequence = np.concatenate(shards)
    steps, share = len(sequence) // batch_size, batch_size // streams
    by_stream = sequence[: steps * batch_size].reshape(streams, steps * share)
    for number, stream in enumerate(by_stream):
        # The first window has a different length in each stream, so that streams need new shards at different
        # steps.
        first = window * (number + 1) // streams
        for samples in np.split(stream, range(first, len(stream), window)):
            generator.shuffle(samples)
    return by_stream.reshape(streams, steps, share).swapaxes(0, 1).reshape(-1)


def steps_per_epoch(samples: Samples, batch: "Batch") -> int:
    """Return floor(N / batch size).

    Raises:
        ValueError: If there are fewer samples than one batch, or the batch can't be divided among the
            processes.
    """
    if len(samples) < batch.total:
        raise ValueError(
            f"--batch_size {batch.total} is more than the {len(samples)} training {batch.unit}. Choose at"
            f" most {len(samples) // batch.processes * batch.processes}."
        )
    samples.check(batch)
    return len(samples) // batch.total


@dataclass(frozen=True)
class Steps:
    """Optimizer steps of a run. The run trains the steps first ... last - 1."""

    per_epoch: int
    total: int  # steps of all epochs, the length of schedules
    last: int  # total, or --max_steps if that is smaller
    first: int = 0  # greater than 0 in a resumed run

    @classmethod
    def of(cls, samples: Samples, batch: "Batch", recipe: "Recipe") -> "Steps":
        """Compute the steps of a run. Raise ValueError for the same reasons as steps_per_epoch()."""
        per_epoch = steps_per_epoch(samples, batch)
        total = recipe.epochs * per_epoch
        return cls(per_epoch, total, min(total, recipe.max_steps or total))

    def plan(self, samples: Samples, batch: "Batch", rank: int, seed: int) -> Plan:
        return training_plan(samples, batch, rank, seed, self.first, self.last)


def training_plan(
    samples: Samples, batch: "Batch", rank: int, seed: int, first_step: int, last_step: int
) -> Plan:
    """Yield this rank's micro-batches of the steps first_step ... last_step - 1, in order."""
    per_epoch = steps_per_epoch(samples, batch)
    epoch, ids = -1, np.empty(0, np.int64)
    for step in range(first_step, last_step):
        if step // per_epoch != epoch:
            epoch = step // per_epoch
            ids = samples.order(seed, epoch, batch)
        start = (step % per_epoch) * batch.total
        for k in batch.micro_batches(rank):
            yield epoch, ids[start + k * batch.per_device : start + (k + 1) * batch.per_device]


def evaluation_plan(
    count: int, per_device: int, processes: int, rank: int
) -> Iterator[tuple[np.ndarray, int]]:
    """Yield this rank's micro-batches. All ranks together evaluate every sample exactly once.

    Each rank evaluates consecutive micro-batches, so that it reads only its part of the shards. Except for
    empty micro-batches, the micro-batches are the same on any number of processes. All ranks evaluate the
    same number of micro-batches with the same shape, because a forward pass is a collective operation under
    FSDP and ZeRO-3. Padding repeats the rank's last sample and must not be counted.

    Yields:
        Sample ids, int64 [per_device], and the number of ids at the beginning that are not padding.
    """
    share = -(-count // (per_device * processes)) * per_device
    first, end = rank * share, min((rank + 1) * share, count)
    for start in range(first, first + share, per_device):
        ids = np.arange(start, start + per_device)
        valid = int(np.count_nonzero(ids < end))
        yield np.minimum(ids, end - 1), valid


def chosen_by_hash(count: int, size: int) -> np.ndarray:
    """Choose `size` of the ids 0 ... count - 1 by a fixed hash. Return sorted ids: int64 [size].

    The choice does not depend on the seed. A smaller choice is always a subset of a larger choice.
    """
    return np.sort(np.argsort(hashes(count), kind="stable")[:size])


def hashes(count: int) -> np.ndarray:
    """Return a fixed, unique hash for each sample id 0 ... count - 1: uint64 [count]."""
    return _mix(np.arange(1, count + 1, dtype=np.uint64) * np.uint64(_GOLDEN))


_GOLDEN = 0x9E3779B97F4A7C15  # SplitMix64's increment: 2**64 / golden ratio
_MASK = 2**64 - 1  # truncates Python integers to 64 bits


def _mix(x: Any) -> Any:
    """Scramble 64-bit integers with SplitMix64's finalizer (Steele, Lea, Flood 2014)."""
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & _MASK
    return x ^ (x >> 31)


def _hash(*words: int) -> int:
    """Return one 64-bit hash of several integers. For a few integers, Python is faster than NumPy."""
    state = 0
    for word in words:
        state = _mix((state + (word + 1) * _GOLDEN) & _MASK)
    return state


def uniforms(seed: int, epoch: int, samples: np.ndarray, count: int) -> np.ndarray:
    """Return random numbers that depend only on (seed, epoch, sample): float64 [b, count] in [0, 1).

    COLUMNS in onecurve/numerics/augment.py assigns each column to an operation.
    """
    key = np.uint64(_hash(seed, epoch))
    per_sample = _mix(key + np.asarray(samples).astype(np.uint64) * np.uint64(_GOLDEN))
    draws = np.arange(1, count + 1, dtype=np.uint64) * np.uint64(_GOLDEN)
    return (_mix(per_sample[:, None] + draws) >> np.uint64(11)) * 2.0**-53


def reseed(seed: int, step: int, k: int) -> None:
    """Seed torch's generators before micro-batch k, so that no generator state needs to be saved.

    The generators determine dropout, drop path and mixup. This function does not call torch.manual_seed(),
    because that call takes 0.4 ms without a GPU to format a stack trace (torch 2.15).
    """
    number = _hash(seed, step, k) >> 1  # 63 bits, because generators accept signed integers
    torch.default_generator.manual_seed(number)
    if torch.cuda.is_initialized():
        torch.cuda.manual_seed_all(number)
