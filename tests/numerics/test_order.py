"""Tests of the sample order, which depends only on the seed, epoch, step and batch size."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from onecurve.flags.recipe import Batch, share_out
from onecurve.numerics.order import (
    Samples,
    Shuffled,
    Streamed,
    choose_by_hash,
    evaluation_plan,
    order,
    reseed,
    steps_per_epoch,
    training_plan,
    uniforms,
)


def test_orders_never_change():
    """Compare with the first version's sample order. With a different order, runs can't resume."""
    assert order(0, 0, 8).tolist() == [3, 7, 4, 0, 2, 6, 5, 1]
    assert order(7, 3, 8).tolist() == [5, 3, 1, 6, 7, 4, 2, 0]
    draws = [0.7494258473294089, 0.2957477098503827, 0.04762140972786788]
    assert uniforms(7, 3, np.array([5]), 3)[0].tolist() == draws


def test_a_choice_by_hash_never_changes():
    """Compare with the first version's selection.

    A larger selection contains each smaller selection and covers all IDs evenly.
    """
    assert choose_by_hash(50_000, 8).tolist() == [7813, 9539, 10062, 25727, 29332, 30320, 34952, 47786]
    assert set(choose_by_hash(1000, 16)) <= set(choose_by_hash(1000, 100))
    assert choose_by_hash(97, 97).tolist() == list(range(97))
    thirds = np.histogram(choose_by_hash(50_000, 3000), bins=3, range=(0, 50_000))[0]
    assert all(900 < count < 1100 for count in thirds)


@st.composite
def jobs(draw) -> tuple[Samples, Batch]:
    """Generate shuffled or streamed samples, and a batch."""
    processes, accumulations, per_device = (draw(st.integers(1, maximum)) for maximum in (6, 4, 4))
    batch = share_out(processes * accumulations * per_device, per_device, processes)
    if draw(st.booleans()):
        return Shuffled(draw(st.integers(batch.total, 4 * batch.total))), batch
    counts = [*draw(st.lists(st.integers(0, 9), max_size=20)), batch.total]
    streams = processes * draw(st.sampled_from([1, per_device, accumulations * per_device]))
    return Streamed(draw(st.permutations(counts)), streams, draw(st.integers(1, 20))), batch


@given(jobs(), st.integers(0, 12))
def test_each_sample_is_used_once_per_epoch_on_any_number_of_processes(job, begin):
    """Check plans that begin at any step, and the order, which must not depend on the number of processes.

    Each stream belongs to one process. Processes share only the shards at the ends of their streams.
    """
    samples, batch = job
    per_epoch, size = steps_per_epoch(samples, batch), batch.accumulations
    plans = [list(training_plan(samples, batch, rank, 5, 0, 13)) for rank in range(batch.processes)]
    orders: dict[int, list[int]] = {}
    for step in range(13):
        parts = [part for plan in plans for part in plan[step * size : (step + 1) * size]]
        assert {(epoch, len(ids)) for epoch, ids in parts} == {(step // per_epoch, batch.per_device)}
        orders.setdefault(step // per_epoch, []).extend(i for _, ids in parts for i in ids.tolist())
    for epoch, ids in orders.items():
        assert len(set(ids)) == len(ids)
        assert set(ids) <= set(range(len(samples)))
        assert ids == samples.order(5, epoch, batch)[: len(ids)].tolist()
    for rank, plan in enumerate(plans):
        rest = training_plan(samples, batch, rank, 5, begin, 13)
        assert [(e, i.tolist()) for e, i in plan[begin * size :]] == [(e, i.tolist()) for e, i in rest]
    if isinstance(samples, Streamed):
        shard_of = np.repeat(np.arange(len(samples.samples_per_shard)), samples.samples_per_shard)
        shards_of_rank = [{shard_of[i] for e, ids in plan if e == 0 for i in ids} for plan in plans]
        assert sum(map(len, shards_of_rank)) <= len(samples.samples_per_shard) + batch.processes - 1


def test_a_batch_larger_than_the_data_is_refused():
    assert steps_per_epoch(Shuffled(12), share_out(12, None, 2)) == 1
    with pytest.raises(ValueError, match=r"14 is more than the 12 training images\. Choose at most 12"):
        steps_per_epoch(Shuffled(12), share_out(14, None, 2))


@given(*map(st.integers, (1, 1, 1), (200, 9, 6)))
def test_evaluation_has_every_sample_once_and_equal_shapes(count, size, processes):
    plans = [list(evaluation_plan(count, size, processes, rank)) for rank in range(processes)]
    assert len({len(plan) for plan in plans}) == 1
    assert all(len(ids) == size and ids.max() < count for plan in plans for ids, _ in plan)
    counted = [i for plan in plans for ids, valid in plan for i in ids[:valid].tolist()]
    assert counted == list(range(count))  # Each process reads only its slice of the order
    for plan in plans:
        read_ids = {i for ids, _ in plan for i in ids.tolist()}
        assert len(read_ids) <= size * -(-count // (size * processes)), "what fills up is one of its own"
    # The position in a micro-batch, which depends on how processes divide the batch, affects the last bits of
    # an image's result.
    filled = [ids.tolist() for plan in plans for ids, valid in plan if valid]
    assert filled == [ids.tolist() for ids, _ in evaluation_plan(count, size, 1, 0)]


def test_random_numbers_belong_to_the_sample():
    samples = np.arange(1000)
    draws = uniforms(1, 2, samples, 4)
    # A sample's draws do not depend on the batch
    assert np.array_equal(uniforms(1, 2, samples[::-1], 4)[::-1], draws)
    # A sample's draws do not depend on the number of columns.
    assert np.array_equal(uniforms(1, 2, samples[10:20], 2), draws[10:20, :2])
    for other in (uniforms(2, 2, samples, 4), uniforms(1, 3, samples, 4), uniforms(1, 2, samples + 1, 4)):
        assert not np.any(other == draws)


def test_random_numbers_are_uniform_and_independent():
    draws = uniforms(0, 0, np.arange(100_000), 3)
    assert draws.min() >= 0
    assert draws.max() < 1
    # Allow five standard errors of the mean, the variance and the correlations.
    assert np.abs(draws.mean(0) - 0.5).max() < 5 * (1 / 12 / 1e5) ** 0.5
    assert np.abs(draws.var(0) - 1 / 12).max() < 5 * (1 / 180 / 1e5) ** 0.5
    neighbours = np.corrcoef(np.hstack([draws[:-1], draws[1:]]).T) - np.eye(6)
    assert np.abs(neighbours).max() < 5 / 1e5**0.5


def test_reseeding_depends_on_all_of_seed_step_and_micro_batch():
    def draw(*numbers):
        reseed(*numbers)
        return torch.rand(4).tolist()

    assert draw(1, 2, 3) == draw(1, 2, 3)
    different = [draw(1, 2, 3), draw(2, 2, 3), draw(1, 3, 3), draw(1, 2, 4), draw(2, 1, 3)]
    assert len({tuple(numbers) for numbers in different}) == 5
