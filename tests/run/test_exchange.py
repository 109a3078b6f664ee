"""Signals are agreed on after every step, or where steps are short after several, the same on all processes.

Two processes are simulated in one: their messages and their clocks are replaced.
"""

import itertools
from types import SimpleNamespace

import pytest

from onecurve.distributed.watch import Preempted
from onecurve.run import session as module
from onecurve.run.session import MOST_STEPS, Exchange


class Board:
    """The processes' messages: the answer to a process's nth one is the largest of all (n - 1)th ones."""

    def __init__(self, count: int):
        self.count, self.said = count, [[] for _ in range(count)]

    def poll(self, rank: int):
        def tell(*mine: int) -> list[int]:
            self.said[rank].append(mine)
            told = len(self.said[rank]) - 2
            if told < 0:
                return []
            return [max(column) for column in zip(*(said[told] for said in self.said), strict=True)]

        tell.group = "gloo"
        return tell


@pytest.fixture
def clock(monkeypatch):
    now = SimpleNamespace(s=0.0)
    monkeypatch.setattr(module.time, "perf_counter", lambda: now.s)
    monkeypatch.setattr(module, "Poll", lambda timeout_s: None)
    return now


def agreed(clock, monkeypatch, durations, told=None) -> tuple[list[int], int | None]:
    """The steps after which both processes send a message, and the one after which both stop.

    durations: (seconds of a step on rank 0, on rank 1), step by step. told: (rank, step) that gets a signal.
    """
    board, ranks, clocks = Board(2), [Exchange(None, None, 300) for _ in range(2)], [0.0, 0.0]
    for rank, one in enumerate(ranks):
        one.poll = board.poll(rank)
    steps = []
    for step, both in enumerate(durations):
        stopped, before = 0, len(board.said[0])
        for rank, one in enumerate(ranks):
            clocks[rank] += both[rank]
            clock.s = clocks[rank]
            hears = told is not None and told[0] == rank and step >= told[1]
            monkeypatch.setattr(module.watch, "wanted", lambda hears=hears: hears)
            try:
                one.listen_after(step)
            except Preempted:
                stopped += 1
        assert len(board.said[0]) == len(board.said[1]), f"after step {step} one process sends a message"
        assert stopped in (0, 2), f"after step {step} only one process stops"
        steps += [step] * (len(board.said[0]) - before)
        if stopped:
            return steps, step
    return steps, None


@pytest.mark.parametrize(
    ("own_ms", "others_ms", "distance"),
    [(7, 7, 1), (6, 1, 1), (1, 6, 1), (3.9, 1, 5), (1, 3.9, 5), (1, 1.9, 10), (0.1, 0.1, MOST_STEPS)],
)
def test_the_slowest_process_decides_when_messages_are_sent(own_ms, others_ms, distance, clock, monkeypatch):
    steps, _ = agreed(clock, monkeypatch, [(own_ms / 1000, others_ms / 1000)] * 200)
    assert {b - a for a, b in itertools.pairwise(steps[4:])} == {distance}


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("step_s", [0.0005, 0.001, 0.004, 0.02])
def test_a_signal_is_obeyed_by_all_after_the_same_step(rank, step_s, clock, monkeypatch):
    for at in range(100, 140, 7):
        clock.s = 0.0
        _, stopped = agreed(clock, monkeypatch, [(step_s, 1.5 * step_s)] * 300, (rank, at))
        assert stopped is not None
        late = stopped - at
        assert late <= 2 * MOST_STEPS
        assert late * 1.5 * step_s <= 2 * module.AGREEMENT_S + 1.5 * step_s


def test_steps_that_become_slow_are_followed_one_by_one(clock, monkeypatch):
    steps, _ = agreed(clock, monkeypatch, [(0.001, 0.001)] * 100 + [(0.001, 1.0)] * 60)
    assert steps[-1] - steps[-2] == 1
    assert max(b - a for a, b in itertools.pairwise(steps)) <= MOST_STEPS
