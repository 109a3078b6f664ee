"""Tests that all ranks agree on signals at the same steps, either every step or after several short steps.

One process simulates two ranks by replacing their messages and clocks.
"""

import itertools
from types import SimpleNamespace

import pytest

from onecurve.distributed.watch import Preempted
from onecurve.run import session as module
from onecurve.run.session import MAX_STEPS_PER_POLL, MessageExchange


class Board:
    """Board on which the simulated ranks exchange messages.

    The response to the n-th message is the maximum of all ranks' (n - 1)-th messages.
    """

    def __init__(self, count: int):
        self.count, self.messages = count, [[] for _ in range(count)]

    def poll(self, rank: int):
        def send(*message: int) -> list[int]:
            self.messages[rank].append(message)
            previous = len(self.messages[rank]) - 2
            if previous < 0:
                return []
            return [
                max(column)
                for column in zip(*(messages[previous] for messages in self.messages), strict=True)
            ]

        send.gloo_group = "gloo"
        return send


@pytest.fixture
def clock(monkeypatch):
    now = SimpleNamespace(s=0.0)
    monkeypatch.setattr(module.time, "perf_counter", lambda: now.s)
    monkeypatch.setattr(module, "GlooExchange", lambda timeout_s: None)
    return now


def agreed(clock, monkeypatch, durations, signalled=None) -> tuple[list[int], int | None]:
    """Return the steps after which both ranks send a message, and the step after which both ranks stop.

    Args:
        clock: Clock of the session module.
        monkeypatch: Fixture that replaces the module's names.
        durations: Duration of each step in seconds, on rank 0 and on rank 1.
        signalled: Rank that receives a signal, and the step of the signal.
    """
    board, ranks, clocks = Board(2), [MessageExchange(None, None, 300) for _ in range(2)], [0.0, 0.0]
    for rank, exchange in enumerate(ranks):
        exchange.poll = board.poll(rank)
    steps = []
    for step, seconds in enumerate(durations):
        stopped, before = 0, len(board.messages[0])
        for rank, exchange in enumerate(ranks):
            clocks[rank] += seconds[rank]
            clock.s = clocks[rank]
            is_signalled = signalled is not None and signalled[0] == rank and step >= signalled[1]
            monkeypatch.setattr(module.watch, "wanted", lambda answer=is_signalled: answer)
            try:
                exchange.exchange_signals_if_due(step)
            except Preempted:
                stopped += 1
        assert len(board.messages[0]) == len(board.messages[1]), (
            f"after step {step} one process sends a message"
        )
        assert stopped in (0, 2), f"after step {step} only one process stops"
        steps += [step] * (len(board.messages[0]) - before)
        if stopped:
            return steps, step
    return steps, None


@pytest.mark.parametrize(
    ("first_ms", "second_ms", "distance"),
    [(7, 7, 1), (6, 1, 1), (1, 6, 1), (3.9, 1, 5), (1, 3.9, 5), (1, 1.9, 10), (0.1, 0.1, MAX_STEPS_PER_POLL)],
)
def test_the_slowest_process_decides_when_messages_are_sent(
    first_ms, second_ms, distance, clock, monkeypatch
):
    steps, _ = agreed(clock, monkeypatch, [(first_ms / 1000, second_ms / 1000)] * 200)
    assert {b - a for a, b in itertools.pairwise(steps[4:])} == {distance}


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("step_s", [0.0005, 0.001, 0.004, 0.02])
def test_a_signal_is_obeyed_by_all_after_the_same_step(rank, step_s, clock, monkeypatch):
    for signal_step in range(100, 140, 7):
        clock.s = 0.0
        _, stopped = agreed(clock, monkeypatch, [(step_s, 1.5 * step_s)] * 300, (rank, signal_step))
        assert stopped is not None
        delay = stopped - signal_step
        assert delay <= 2 * MAX_STEPS_PER_POLL
        assert delay * 1.5 * step_s <= 2 * module.MESSAGE_INTERVAL_S + 1.5 * step_s


def test_steps_that_become_slow_are_followed_one_by_one(clock, monkeypatch):
    steps, _ = agreed(clock, monkeypatch, [(0.001, 0.001)] * 100 + [(0.001, 1.0)] * 60)
    assert steps[-1] - steps[-2] == 1
    assert max(b - a for a, b in itertools.pairwise(steps)) <= MAX_STEPS_PER_POLL
