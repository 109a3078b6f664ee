"""The order of samples, and random numbers per step and sample: pure functions, equal on every machine.

The order depends on (seed, epoch, step, batch size) only. An epoch has floor(N / B) steps. Step s takes the
samples [s*B : (s+1)*B] of the epoch's order; the samples left over are not used. Micro-batch k of a step has
its samples [k*b : (k+1)*b]. With A accumulations rank r computes the micro-batches r*A ... r*A + A-1.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

if TYPE_CHECKING:  # it imports all flags
    from onecurve.flags.recipe import Batch, Recipe

Plan = Iterable[tuple[int, np.ndarray]]  # (epoch, sample ids int64 [b]) of each micro-batch, in order


class Shuffled:
    """Samples with fast random access: an epoch is a permutation of all of them."""

    def __init__(self, count: int):
        self.count = count

    def __len__(self) -> int:
        return self.count

    def check(self, batch: "Batch") -> None:
        """Accepts any batch."""

    def order(self, seed: int, epoch: int, batch: "Batch") -> np.ndarray:
        return order(seed, epoch, self.count)


class Streamed:
    """The samples of shards, read sequentially in parallel streams. counts: samples in each shard."""

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
                f" processes, {processes}: choose {' or '.join(map(str, nearest))}"
            )

    def order(self, seed: int, epoch: int, batch: "Batch") -> np.ndarray:
        return stream_order(seed, epoch, self.counts, self.streams, self.window, batch.total)


Samples = Shuffled | Streamed  # the number and order of a data set's training samples


def order(seed: int, epoch: int, count: int) -> np.ndarray:
    """The samples of one epoch, shuffled: int64 [count]. RandomState: its stream is frozen (NEP 19)."""
    return np.random.RandomState([seed, epoch]).permutation(count)


def stream_order(
    seed: int, epoch: int, counts: np.ndarray, streams: int, window: int, batch_size: int
) -> np.ndarray:
    """The samples of one epoch, which are read shard by shard: int64 [floor(N / B) * B].

    The shards, of counts[k] samples each, are concatenated in a new order and cut into equal streams. In each
    stream the samples are shuffled within windows, so that only the shards of one window are needed at once.
    A step takes B / streams samples of each stream, stream by stream: if the number of processes divides the
    number of streams, each process has its own streams.
    """
    generator = np.random.RandomState([seed, epoch])
    ends = np.cumsum(counts)
    shards = [np.arange(ends[k] - counts[k], ends[k]) for k in generator.permutation(len(counts))]
    sequence = np.concatenate(shards)
    steps, share = len(sequence) // batch_size, batch_size // streams
    laid = sequence[: steps * batch_size].reshape(streams, steps * share)
    for number, stream in enumerate(laid):
        # The first window's length differs by stream, so that not all streams need new shards in one step.
        first = window * (number + 1) // streams
        for samples in np.split(stream, range(first, len(stream), window)):
            generator.shuffle(samples)
    return laid.reshape(streams, steps, share).swapaxes(0, 1).reshape(-1)


def steps_per_epoch(samples: Samples, batch: "Batch") -> int:
    """floor(N / batch size). Raises ValueError for fewer samples than one batch, or a batch that can't be
    divided among the processes."""
    if len(samples) < batch.total:
        raise ValueError(
            f"--batch_size {batch.total} is more than the {len(samples)} training {batch.unit}: choose at"
            f" most {len(samples) // batch.processes * batch.processes}"
        )
    samples.check(batch)
    return len(samples) // batch.total


@dataclass(frozen=True)
class Steps:
    """The optimizer steps of a run. It trains the steps first ... last - 1."""

    per_epoch: int
    total: int  # of all epochs: the length of schedules
    last: int  # total, or --max_steps
    first: int = 0  # more in a resumed run

    @classmethod
    def of(cls, samples: Samples, batch: "Batch", recipe: "Recipe") -> "Steps":
        """Raises ValueError as steps_per_epoch does."""
        per_epoch = steps_per_epoch(samples, batch)
        total = recipe.epochs * per_epoch
        return cls(per_epoch, total, min(total, recipe.max_steps or total))

    def plan(self, samples: Samples, batch: "Batch", rank: int, seed: int) -> Plan:
        return training_plan(samples, batch, rank, seed, self.first, self.last)


def training_plan(
    samples: Samples, batch: "Batch", rank: int, seed: int, first_step: int, last_step: int
) -> Plan:
    """This process's micro-batches of the steps first_step ... last_step - 1, in order."""
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
    """Every sample exactly once over all processes: yields (ids int64 [per_device], how many of them count).

    Each process gets consecutive micro-batches, so that it reads only its part of the shards. They are the
    same on any number of processes, up to empty ones: all get the same number of micro-batches of the same
    shape, because under FSDP and ZeRO-3 a forward is a collective. Padding repeats the process's last sample,
    and does not count.
    """
    share = -(-count // (per_device * processes)) * per_device
    first, end = rank * share, min((rank + 1) * share, count)
    for start in range(first, first + share, per_device):
        ids = np.arange(start, start + per_device)
        valid = int(np.count_nonzero(ids < end))
        yield np.minimum(ids, end - 1), valid


def chosen_by_hash(count: int, size: int) -> np.ndarray:
    """`size` of the samples 0 ... count - 1, chosen by a fixed hash of their ids: int64 [size], ascending.

    The choice does not depend on the seed, and a smaller choice is a subset of a larger one.
    """
    return np.sort(np.argsort(hashes(count), kind="stable")[:size])


def hashes(count: int) -> np.ndarray:
    """A fixed hash of each of the sample ids 0 ... count - 1: uint64 [count], all different."""
    return _mix(np.arange(1, count + 1, dtype=np.uint64) * np.uint64(_GOLDEN))


_GOLDEN = 0x9E3779B97F4A7C15  # SplitMix64's increment: 2**64 / golden ratio
_MASK = 2**64 - 1  # Python's integers are longer


def _mix(x: Any) -> Any:
    """The finalizer of SplitMix64 (Steele, Lea, Flood 2014): scrambles 64 bits, of an integer or an array."""
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & _MASK
    return x ^ (x >> 31)


def _hash(*words: int) -> int:
    """A 64-bit hash of some integers, with Python's integers: for a few they are faster than NumPy's."""
    state = 0
    for word in words:
        state = _mix((state + (word + 1) * _GOLDEN) & _MASK)
    return state


def uniforms(seed: int, epoch: int, samples: np.ndarray, count: int) -> np.ndarray:
    """Return random numbers that depend only on (seed, epoch, sample): float64 [b, count] in [0, 1).

    onecurve/numerics/augment.py's COLUMNS assigns each column to its use.
    """
    key = np.uint64(_hash(seed, epoch))
    per_sample = _mix(key + np.asarray(samples).astype(np.uint64) * np.uint64(_GOLDEN))
    draws = np.arange(1, count + 1, dtype=np.uint64) * np.uint64(_GOLDEN)
    return (_mix(per_sample[:, None] + draws) >> np.uint64(11)) * 2.0**-53


def reseed(seed: int, step: int, k: int) -> None:
    """Seeds torch's generators before micro-batch k: dropout, drop path and mixup then need no saved state.

    It does not call torch.manual_seed, which without a GPU takes 0.4 ms to format a stack trace (torch 2.15).
    """
    number = _hash(seed, step, k) >> 1  # 63 bits: generators take a signed integer
    torch.default_generator.manual_seed(number)
    if torch.cuda.is_initialized():
        torch.cuda.manual_seed_all(number)
