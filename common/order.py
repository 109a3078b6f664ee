"""Which sample belongs to which step: a pure function of (seed, epoch, step, batch size), on every machine.

An epoch has floor(N / B) steps. Step s of epoch e takes the samples order(seed, e, N)[s*B : (s+1)*B];
micro-batch k of a step is its samples [k*b : (k+1)*b]; of A accumulations rank r does k = r*A ... r*A + A-1.
What is left over is left out.
"""

from collections.abc import Iterable, Iterator

import numpy as np
import torch

from common.recipe import Batch

Plan = Iterable[tuple[int, np.ndarray]]  # (epoch, sample ids int64 [b]) of one micro-batch after another


def order(seed: int, epoch: int, count: int) -> np.ndarray:
    """The samples of one epoch, shuffled: int64 [count]. RandomState: its stream is frozen (NEP 19)."""
    return np.random.RandomState([seed, epoch]).permutation(count)


def steps_per_epoch(count: int, batch: Batch) -> int:
    """floor(count / batch size). Raises ValueError when there are fewer samples than one batch."""
    if count < batch.total:
        raise ValueError(
            f"--batch_size {batch.total} is more than the {count} training images: choose at most {count}"
            f" (with {batch.processes} processes a multiple of {batch.processes})"
        )
    return count // batch.total


def training_plan(count: int, batch: Batch, rank: int, seed: int, first_step: int, last_step: int) -> Plan:
    """This process's micro-batches of the steps first_step ... last_step - 1, in the order of training."""
    per_epoch = steps_per_epoch(count, batch)
    epoch, samples = -1, None
    for step in range(first_step, last_step):
        if step // per_epoch != epoch:
            epoch = step // per_epoch
            samples = order(seed, epoch, count)
        start = (step % per_epoch) * batch.total
        for k in micro_batches(batch, rank):
            yield epoch, samples[start + k * batch.per_device : start + (k + 1) * batch.per_device]


def micro_batches(batch: Batch, rank: int) -> range:
    """The numbers k of the micro-batches of a step that process `rank` computes."""
    return range(rank * batch.accumulations, (rank + 1) * batch.accumulations)


def evaluation_plan(
    count: int, per_device: int, processes: int, rank: int
) -> Iterator[tuple[np.ndarray, int]]:
    """Every sample exactly once over all processes: yields (ids int64 [per_device], how many of them count).

    All processes get equally many micro-batches of equal shape, because under FSDP and ZeRO-3 a forward is
    a collective. Where the samples run out, sample 0 fills up and is not counted.
    """
    for start in range(0, count, per_device * processes):
        first = start + rank * per_device
        ids = np.arange(first, first + per_device)
        valid = int(np.count_nonzero(ids < count))
        yield np.where(ids < count, ids, 0), valid


def _mix(x: np.ndarray) -> np.ndarray:
    """The finalizer of SplitMix64 (Steele, Lea, Flood 2014): scrambles 64 bits."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


_GOLDEN = 0x9E3779B97F4A7C15  # SplitMix64's increment: 2**64 / golden ratio
_MASK = 2**64 - 1


def _hash(*words: int) -> int:
    """64 well-mixed bits from some integers; in Python's own, which are quicker than NumPy one by one."""
    state = 0
    for word in words:
        state = (state + (word + 1) * _GOLDEN) & _MASK
        state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
        state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & _MASK
        state ^= state >> 31
    return state


def uniforms(seed: int, epoch: int, samples: np.ndarray, count: int) -> np.ndarray:
    """Random numbers of each sample, from (seed, epoch, sample) alone: float64 [b, count] in [0, 1)."""
    key = np.uint64(_hash(seed, epoch))
    per_sample = _mix(key + np.asarray(samples).astype(np.uint64) * np.uint64(_GOLDEN))
    draws = np.arange(1, count + 1, dtype=np.uint64) * np.uint64(_GOLDEN)
    return (_mix(per_sample[:, None] + draws) >> np.uint64(11)) * 2.0**-53


def reseed(seed: int, step: int, k: int) -> None:
    """Sets torch's generators before micro-batch k: dropout, drop path and mixup then need no saved state.

    Not torch.manual_seed: without a GPU it formats a stack trace at each call, 0.4 ms.
    """
    number = _hash(seed, step, k) >> 1  # 63 bits: generators take a signed integer
    torch.default_generator.manual_seed(number)
    if torch.cuda.is_initialized():
        torch.cuda.manual_seed_all(number)
