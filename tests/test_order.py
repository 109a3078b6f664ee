"""The order of the samples: a function of (seed, epoch, step, batch size) and of nothing else."""

import numpy as np
import pytest
import torch

from common.order import (
    Shuffled,
    chosen_by_hash,
    evaluation_plan,
    order,
    reseed,
    steps_per_epoch,
    training_plan,
    uniforms,
)
from common.recipe import share_out


def test_orders_never_change():
    """Numbers of the first version: another order would make old runs impossible to continue."""
    assert order(0, 0, 8).tolist() == [3, 7, 4, 0, 2, 6, 5, 1]
    assert order(7, 3, 8).tolist() == [5, 3, 1, 6, 7, 4, 2, 0]
    assert uniforms(7, 3, np.array([5]), 3)[0].tolist() == [
        0.7494258473294089,
        0.2957477098503827,
        0.04762140972786788,
    ]


def test_a_choice_by_hash_never_changes():
    """Numbers of the first version. Each choice is part of a larger one, and spread over all ids."""
    assert chosen_by_hash(50_000, 8).tolist() == [7813, 9539, 10062, 25727, 29332, 30320, 34952, 47786]
    assert set(chosen_by_hash(1000, 16)) <= set(chosen_by_hash(1000, 100))
    assert chosen_by_hash(97, 97).tolist() == list(range(97))
    thirds = np.histogram(chosen_by_hash(50_000, 3000), bins=3, range=(0, 50_000))[0]
    assert all(900 < count < 1100 for count in thirds)


@pytest.mark.parametrize("processes", [1, 2, 3, 4, 6])
@pytest.mark.parametrize("per_device", [None, 1])
def test_a_step_has_the_same_samples_on_any_number_of_processes(processes, per_device):
    count, steps = 101, 19  # 8 steps an epoch: two epochs and a bit
    batch = share_out(12, per_device, processes)
    plans = [list(training_plan(Shuffled(count), batch, rank, 5, 0, steps)) for rank in range(processes)]
    for step in range(steps):
        first, last = step * batch.accumulations, (step + 1) * batch.accumulations
        together = np.concatenate([ids for plan in plans for _, ids in plan[first:last]])
        epoch, place = divmod(step, 8)
        assert together.tolist() == order(5, epoch, count)[place * 12 : place * 12 + 12].tolist()
        assert {e for plan in plans for e, _ in plan[first:last]} == {epoch}


def test_a_plan_can_begin_anywhere():
    batch = share_out(12, 3, 2)
    whole = list(training_plan(Shuffled(101), batch, 1, 5, 0, 19))
    rest = list(training_plan(Shuffled(101), batch, 1, 5, 7, 19))
    for (e1, ids1), (e2, ids2) in zip(whole[7 * batch.accumulations :], rest, strict=True):
        assert e1 == e2
        assert ids1.tolist() == ids2.tolist()


def test_a_batch_larger_than_the_data_is_refused():
    assert steps_per_epoch(Shuffled(12), share_out(12, None, 2)) == 1
    with pytest.raises(ValueError, match="14 is more than the 12 training images: choose at most 12"):
        steps_per_epoch(Shuffled(12), share_out(14, None, 2))


@pytest.mark.parametrize("count", [1, 7, 97, 100])
@pytest.mark.parametrize("processes", [1, 2, 3])
def test_evaluation_has_every_sample_once_and_equal_shapes(count, processes):
    plans = [list(evaluation_plan(count, 5, processes, rank)) for rank in range(processes)]
    assert len({len(plan) for plan in plans}) == 1
    assert all(len(ids) == 5 and ids.max() < count for plan in plans for ids, _ in plan)
    counted = [i for plan in plans for ids, valid in plan for i in ids[:valid].tolist()]
    assert counted == list(range(count))  # in order: each process has a part of its own, and reads that alone
    for plan in plans:
        read = {i for ids, _ in plan for i in ids.tolist()}
        assert len(read) <= 5 * -(-count // (5 * processes)), "what fills up is one of its own"
    # An image's last bits depend on its place in a micro-batch, and so on a cut between processes.
    filled = [ids.tolist() for plan in plans for ids, valid in plan if valid]
    assert filled == [ids.tolist() for ids, _ in evaluation_plan(count, 5, 1, 0)]


def test_random_numbers_belong_to_the_sample():
    samples = np.arange(1000)
    draws = uniforms(1, 2, samples, 4)
    assert np.array_equal(uniforms(1, 2, samples[::-1], 4)[::-1], draws)  # whatever batch it is in
    assert np.array_equal(uniforms(1, 2, samples[10:20], 2), draws[10:20, :2])  # nor how many are drawn
    for other in (uniforms(2, 2, samples, 4), uniforms(1, 3, samples, 4), uniforms(1, 2, samples + 1, 4)):
        assert not np.any(other == draws)


def test_random_numbers_are_uniform_and_independent():
    draws = uniforms(0, 0, np.arange(100_000), 3)
    assert draws.min() >= 0
    assert draws.max() < 1
    # five standard errors of the mean, the variance and the correlations
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
